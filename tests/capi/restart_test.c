/* SPDX-License-Identifier: Apache-2.0 */
/* Processes that start one after the other and many at once, in an environment without anything and a folder where nothing
 * can be written: all compute the same bits, whatever the addresses that they got. */
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rig.h"
#include "testing.h"

enum { kInARow = 12, kAtOnce = 8 };

static uint64_t hash_of(uint64_t hash, const void *data, size_t bytes) {
  const unsigned char *x = (const unsigned char *)data;
  size_t i;
  for (i = 0; i < bytes; ++i) hash = (hash ^ x[i]) * 0x100000001b3u;
  return hash;
}

/* Outputs, states and gradients of three kinds of layers, with a pool of threads. */
static uint64_t work(void) {
  static const lla_state_desc small_state = {sizeof(lla_state_desc), 0, 0, 0, 0, 1, 512, 0, 0};
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_layer_desc layers[3];
  lla_rows rows = LLA_ROWS_INIT;
  uint64_t hash = 0xcbf29ce484222325u;
  size_t bytes;
  void *image;
  int64_t i, k;
  rig r;
  options.backend = LLA_BACKEND_CPU;
  options.threads = 3;
  layers[0] = mixer_desc(LLA_SCALAR_GATE, 4, 2, 16, 16, lla_levels_needed(512));
  layers[1] = mixer_desc(LLA_DELTA_RULE, 3, 1, 16, 16, lla_levels_needed(512));
  layers[2] = mamba2_desc(2, 1, 8, 8, 24, lla_levels_needed(512));
  rig_open(&r, &options, layers, 3, &small_state, 1, 200, 0);
  for (i = 0; i < 2; ++i) {
    rig_append(&r, 0, 3, 200);
    for (k = 0; k < 3; ++k)
      hash = hash_of(hash, rig_output(&r, k, 0), (size_t)(200 * rig_output_width(&r, k)) * sizeof(float));
  }
  image = rig_pack(&r, 0, &bytes);
  hash = hash_of(hash, image, bytes);
  free(image);
  rig_close(&r);
  rig_open(&r, &options, layers, 3, NULL, 1, 200, 0);
  rig_set_rows(&r, 200);
  rig_fill(&r, 0, 3, 0, 200);
  rows.sequences = 1;
  rows.rows_per_sequence = 200;
  rig_plan(&r, &rows);
  rig_forward(&r);
  for (k = 0; k < 3; ++k) {
    lla_binding list[RIG_IO + RIG_WEIGHTS];
    lla_backward_args a = rig_backward_args(&r, k);
    rig_fill_output_gradient(&r, k, 5, 200);
    a.gradients = list;
    a.gradient_count = rig_list_gradients(&r, k, list);
    OK(lla_layer_backward(r.layer[k].layer, &a, &error));
    for (i = 0; i + 1 < r.layer[k].io_count; ++i)
      hash = hash_of(hash, r.layer[k].gradient[i].tensor.data, (size_t)(200 * r.layer[k].width[i]) * sizeof(float));
    for (i = 0; i < r.layer[k].weight_count; ++i)
      hash = hash_of(hash, r.layer[k].weight_gradient[i].tensor.data, (size_t)r.layer[k].weight_size[i] * sizeof(float));
  }
  rig_close(&r);
  return hash;
}

typedef struct child {
  pid_t id;
  int out;
} child;

static child start(const char *path) {
  static char isa[64]; /* the one variable that may change bits */
  char *environment[2];
  int ends[2];
  child c;
  environment[0] = environment[1] = NULL;
  if (getenv("LLA_MAX_ISA")) {
    CHECK(snprintf(isa, sizeof isa, "LLA_MAX_ISA=%s", getenv("LLA_MAX_ISA")) < (int)sizeof isa);
    environment[0] = isa;
  }
  CHECK(pipe(ends) == 0);
  fflush(NULL);
  c.id = fork();
  CHECK(c.id >= 0);
  if (c.id == 0) {
    char *arguments[3];
    arguments[0] = (char *)path;
    arguments[1] = (char *)"work";
    arguments[2] = NULL;
    if (dup2(ends[1], 1) != 1 || chdir("/proc") != 0) _exit(3);
    alarm(300);
    execve(path, arguments, environment);
    _exit(4);
  }
  close(ends[1]);
  c.out = ends[0];
  return c;
}

static uint64_t finish(child c) {
  uint64_t hash = 0;
  int status = -1;
  CHECK(read(c.out, &hash, sizeof hash) == (ssize_t)sizeof hash);
  close(c.out);
  CHECK(waitpid(c.id, &status, 0) == c.id);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  return hash;
}

/* Probes J2, L3. */
static void processes_agree(void **unused) {
  char path[4096];
  child crowd[kAtOnce];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  uint64_t first;
  int i;
  (void)unused;
  CHECK(length > 0);
  path[length] = 0;
  first = work();
  for (i = 0; i < kInARow; ++i) CHECK(finish(start(path)) == first);
  for (i = 0; i < kAtOnce; ++i) crowd[i] = start(path);
  for (i = 0; i < kAtOnce; ++i) CHECK(finish(crowd[i]) == first);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(processes_agree)};
  if (argc == 2 && !strcmp(argv[1], "work")) {
    const uint64_t hash = work();
    return write(1, &hash, sizeof hash) == (ssize_t)sizeof hash ? 0 : 2;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
