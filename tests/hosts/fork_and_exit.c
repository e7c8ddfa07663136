/* SPDX-License-Identifier: Apache-2.0 */
/* Handles and forks in every order, and exits with handles that nobody released, with and without a pool of threads.
 *   usage: fork_and_exit LIBRARY */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "first_result.h"

enum { IN_TIME = 60 };

static functions f;

/* Runs `body` in a child; 0 if it returned 0 in time, through exit() and what that runs. */
static int in_child(int (*body)(void *), void *argument) {
  int status = -1;
  pid_t child;
  fflush(NULL);
  child = fork();
  if (child == 0) {
    alarm(IN_TIME);
    exit(body(argument));
  }
  return child < 0 || waitpid(child, &status, 0) != child || status != 0;
}

static int go_on_and_leave(void *argument) { return append_ones(&f, (const handles *)argument, 4); }

static int go_on_and_release(void *argument) {
  if (append_ones(&f, (const handles *)argument, 4)) return 1;
  release_handles(&f, (handles *)argument);
  return 0;
}

static int release_at_once(void *argument) {
  release_handles(&f, (handles *)argument);
  return 0;
}

static int make_new_ones(void *argument) {
  handles fresh;
  return first_result(&f, *(const int32_t *)argument, &fresh); /* which are never released */
}

static int new_beside_inherited(void *argument) {
  const handles *inherited = (const handles *)argument;
  handles fresh;
  return first_result(&f, 3, &fresh) || append_ones(&f, inherited, 4) || append_ones(&f, &fresh, 4);
}

static int fork_again(void *argument) {
  return in_child(go_on_and_release, argument) || in_child(go_on_and_leave, argument) || go_on_and_release(argument);
}

static int check(int failed, const char *what, int32_t threads) {
  printf("%s %s, %d threads\n", failed ? "FAILED" : "ok    ", what, (int)threads);
  return failed;
}

int main(int count, char **words) {
  static const struct {
    int (*body)(void *);
    const char *what;
  } with_handles[] = {{go_on_and_leave, "child goes on with the handles and exits"},
                      {go_on_and_release, "child goes on and releases"},
                      {release_at_once, "child releases at once"},
                      {new_beside_inherited, "child makes new handles beside the inherited ones"},
                      {fork_again, "child forks again"}};
  static const int32_t thread_counts[] = {0, 3};
  int failures = 0;
  size_t i, k;
  if (count != 2 || open_library(words[1], &f) == NULL) return 2;
  for (i = 0; i < sizeof thread_counts / sizeof thread_counts[0]; ++i) {
    int32_t threads = thread_counts[i];
    handles h;
    failures += check(in_child(make_new_ones, &threads), "first use in a child, which exits with live handles", threads);
    if (first_result(&f, threads, &h)) return 1;
    for (k = 0; k < sizeof with_handles / sizeof with_handles[0]; ++k)
      failures += check(in_child(with_handles[k].body, &h), with_handles[k].what, threads);
    failures += check(append_ones(&f, &h, 4), "parent goes on after all of them", threads);
    if (i == 0) release_handles(&f, &h); /* the others are alive when this process exits */
  }
  return failures;
}
