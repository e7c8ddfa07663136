/* SPDX-License-Identifier: Apache-2.0 */
/* Time from dlopen() to the first result on the CPU: in each of RUNS fresh processes the library is loaded, a context, a
 * layer and a state are made, and four rows are appended, whose result is checked.   usage: startup LIBRARY [RUNS
 * [JSON_FILE]] */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/hosts/first_result.h"

enum { MAX_RUNS = 10000 };

typedef struct {
  double load, result; /* milliseconds: dlopen() alone; all of it */
} run_times;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e3 * (double)time.tv_sec + 1e-6 * (double)time.tv_nsec;
}

/* What a fresh process does; returns 0 if the result is right. */
static int once(const char *path, run_times *times) {
  const double start = now();
  functions f;
  handles h;
  if (open_library(path, &f) == NULL) return 1;
  times->load = now() - start;
  if (first_result(&f, 0, &h)) return 1;
  times->result = now() - start;
  return 0;
}

static int in_order(const void *one, const void *other) {
  const double difference = ((const run_times *)one)->result - ((const run_times *)other)->result;
  return (difference > 0) - (difference < 0);
}

int main(int count, char **words) {
  static run_times times[MAX_RUNS];
  const int runs = count > 2 ? atoi(words[2]) : 101;
  int i;

  if (count < 2 || count > 4 || runs < 1 || runs > MAX_RUNS) {
    fprintf(stderr, "usage: startup LIBRARY [RUNS [JSON_FILE]]\n");
    return 2;
  }
  for (i = 0; i < runs; ++i) {
    int status, ends[2];
    pid_t child;
    if (pipe(ends) || (child = fork()) < 0) {
      perror("startup");
      return 1;
    }
    if (child == 0) {
      run_times mine;
      _exit(once(words[1], &mine) || write(ends[1], &mine, sizeof mine) != (ssize_t)sizeof mine);
    }
    close(ends[1]);
    if (read(ends[0], &times[i], sizeof times[i]) != (ssize_t)sizeof times[i] || waitpid(child, &status, 0) != child ||
        status) {
      fprintf(stderr, "run %d failed\n", i);
      return 1;
    }
    close(ends[0]);
  }
  qsort(times, (size_t)runs, sizeof times[0], in_order);
  printf("from dlopen() to the first result, %d processes: median %.3f ms (dlopen() %.3f), fastest %.3f, slowest %.3f\n",
         runs, times[runs / 2].result, times[runs / 2].load, times[0].result, times[runs - 1].result);
  if (count > 3) {
    FILE *file = fopen(words[3], "w");
    if (file == NULL ||
        fprintf(file,
                "{\n \"processes\": %d,\n \"median_ms\": %.3f,\n \"median_dlopen_ms\": %.3f,\n \"fastest_ms\": %.3f,\n"
                " \"slowest_ms\": %.3f\n}\n",
                runs, times[runs / 2].result, times[runs / 2].load, times[0].result, times[runs - 1].result) < 0 ||
        fclose(file)) {
      perror(words[3]);
      return 1;
    }
  }
  return 0;
}
