/* SPDX-License-Identifier: Apache-2.0 */
/* The library writes nothing to the standard output or error output, and says through the log hook what it chose. */
#include "rig.h"

#include <fcntl.h>
#include <unistd.h>

typedef struct heard {
  int lines, kernels, errors;
} heard;

static void hear(lla_log_level level, const char *text, void *user) {
  heard *h = (heard *)user;
  ++h->lines;
  if (level == LLA_LOG_ERROR) ++h->errors;
  if (strstr(text, "cpu.scalar_gate.forward")) ++h->kernels;
}

static int32_t refuse_to_run(int64_t count, lla_task task, void *argument, void *user) {
  (void)count, (void)task, (void)argument, (void)user;
  return 1;
}

static lla_layer_desc mixer(void) {
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = LLA_LAYER_MIXER;
  d.mixer = LLA_SCALAR_GATE;
  d.heads = 4;
  d.key_dim = 8;
  d.value_dim = 8;
  return d;
}

/* Append of `rows` rows with values of no interest. */
static lla_status append(lla_layer *layer, lla_state *state, int64_t rows, lla_error *error) {
  static float in[3][200 * 32], gate[200 * 4], out[200 * 32];
  const lla_binding io[] = {lla_bind(LLA_Q, lla_tensor_of(in[0], LLA_F32, rows, 4, 8, -1)),
                            lla_bind(LLA_K, lla_tensor_of(in[1], LLA_F32, rows, 4, 8, -1)),
                            lla_bind(LLA_V, lla_tensor_of(in[2], LLA_F32, rows, 4, 8, -1)),
                            lla_bind(LLA_GATE, lla_tensor_of(gate, LLA_F32, rows, 4, -1, -1)),
                            lla_bind(LLA_Y, lla_tensor_of(out, LLA_F32, rows, 4, 8, -1))};
  return lla_append(layer, state, 0, io, 5, NULL, 0, NULL, error);
}

/* A life of successes and failures, with `log` or without. */
static void live(const lla_log *log, const lla_parallel *parallel, lla_status expected) {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_layer_desc d = mixer();
  lla_context *context = NULL;
  lla_layer *layer = NULL, *none = NULL;
  lla_state *state = NULL;
  lla_error error = LLA_ERROR_INIT;
  options.log = log;
  options.parallel = parallel;
  if (lla_context_create(&options, &context, &error) != LLA_OK) stop_test("%s", error.text);
  OK(lla_layer_create(context, &d, &layer, &error));
  OK(lla_state_create(&layer, 1, NULL, NULL, 0, &state, &error));
  CHECK(append(layer, state, 130, &error) == expected);
  CHECK(append(layer, state, 1, NULL) == expected);
  d.heads = -1;
  FAILS(LLA_INVALID_ARGUMENT, "heads", lla_layer_create(context, &d, &none, &error));
  FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_truncate(state, 99, 0, NULL, &error));
  FAILS(LLA_NULL_POINTER, "layer", lla_layer_create(context, &d, NULL, &error));
  lla_state_release(state);
  lla_layer_release(layer);
  lla_context_release(context);
}

static void nothing_is_printed(void **unused) {
  char byte;
  const lla_parallel broken = {sizeof(lla_parallel), 2, 0, refuse_to_run, NULL};
  FILE *scratch = tmpfile();
  const int file = scratch ? fileno(scratch) : -1, out = dup(1), err = dup(2);
  int64_t printed;
  (void)unused;
  CHECK(file >= 0 && out >= 0 && err >= 0);
  fflush(stdout);
  fflush(stderr);
  dup2(file, 1);
  dup2(file, 2);
  live(NULL, NULL, LLA_OK);
  live(NULL, &broken, LLA_THREADS_FAILED);
  fflush(stdout);
  fflush(stderr);
  printed = (int64_t)lseek(file, 0, SEEK_END);
  CHECK(write(1, "x", 1) == 1 && lseek(file, 0, SEEK_END) == printed + 1); /* it would have been seen */
  lseek(file, 0, SEEK_SET);
  dup2(out, 1);
  dup2(err, 2);
  if (printed) stop_test("%d bytes were printed", (int)printed);
  CHECK(read(file, &byte, 1) == 1 && byte == 'x');
  fclose(scratch);
  close(out);
  close(err);
}

static void the_log_hears_it(void **unused) {
  heard all = {0, 0, 0}, errors = {0, 0, 0};
  const lla_log info = {sizeof(lla_log), LLA_LOG_INFO, 0, hear, &all};
  const lla_log only_errors = {sizeof(lla_log), LLA_LOG_ERROR, 0, hear, &errors};
  const lla_parallel broken = {sizeof(lla_parallel), 2, 0, refuse_to_run, NULL};
  (void)unused;
  live(&info, NULL, LLA_OK);
  CHECK(all.lines > 2 && all.kernels == 1 && all.errors == 0);
  live(&only_errors, &broken, LLA_THREADS_FAILED);
  CHECK(errors.errors >= 1 && errors.lines == errors.errors);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(nothing_is_printed), cmocka_unit_test(the_log_hears_it)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
