/* SPDX-License-Identifier: Apache-2.0 */
/* How long a new process waits for its first results: a plain C program that makes a context and a layer, runs forward and
 * backward twice, and writes the seconds since its start as JSON. first_call.py runs it. usage: first_call [cpu | cuda]
 * [rows] [clock at the start of the process] */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "lla/lla.h"

enum { HEADS = 48, KEY = 128, VALUE = 64, ROLES = 6 };

static double clock_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static lla_error error = LLA_ERROR_INIT;
static void ok(lla_status status, const char *what) {
  if (status == LLA_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, lla_status_name(status), error.text);
  exit(1);
}
#define OK(call) ok(call, #call)

/* Values of a tensor: as random as timing needs. */
static void fill(void *host, lla_dtype dtype, size_t count, float low, float high) {
  uint32_t x = 12345;
  size_t i;
  for (i = 0; i < count; ++i) {
    const float value = low + (high - low) * (float)((x = x * 1664525u + 1013904223u) >> 8) / 16777216.0f;
    if (dtype == LLA_F32) {
      ((float *)host)[i] = value;
    } else {
      uint32_t bits;
      memcpy(&bits, &value, 4);
      ((uint16_t *)host)[i] = (uint16_t)(bits >> 16);
    }
  }
}

int main(int argc, char **argv) {
  const int cpu = argc > 1 && strcmp(argv[1], "cpu") == 0;
  const int64_t rows = argc > 2 ? atoll(argv[2]) : 4096;
  const double start = argc > 3 ? atof(argv[3]) : clock_now();
  const lla_role roles[ROLES] = {LLA_Q, LLA_K, LLA_V, LLA_GATE, LLA_LAMBDA, LLA_Y};
  const int64_t levels = lla_levels_needed(rows);
  const int64_t d1[ROLES] = {1, 1, HEADS, HEADS, HEADS, HEADS}, d2[ROLES] = {KEY, KEY, VALUE, -1, levels, VALUE};
  const float low[ROLES] = {-0.15f, -1, -1, -0.1f, 0.2f, -1}, high[ROLES] = {0.15f, 1, 1, 0, 1.2f, 1};
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_layer_desc desc = LLA_LAYER_DESC_INIT;
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  lla_rows plan = LLA_ROWS_INIT;
  lla_forward_args forward = LLA_FORWARD_ARGS_INIT;
  lla_backward_args backward = LLA_BACKWARD_ARGS_INIT;
  lla_binding io[ROLES], gradients[ROLES];
  lla_context *context = NULL;
  lla_layer *layer = NULL;
  size_t bytes = 0, device_bytes = 0, more = 0, alignment = 0;
  void *batch_memory = NULL, *memory = NULL;
  double at_main = clock_now(), at_context, at_layer, at_inputs, at_forward[2], at_backward[2], checksum = 0;
  int i, repeat;

  options.backend = cpu ? LLA_BACKEND_CPU : LLA_BACKEND_CUDA;
  OK(lla_context_create(&options, &context, &error));
  at_context = clock_now();
  desc.kind = LLA_LAYER_MIXER;
  desc.mixer = LLA_SCALAR_GATE;
  desc.heads = HEADS;
  desc.groups = 1;
  desc.key_dim = KEY;
  desc.value_dim = VALUE;
  desc.levels = levels;
  desc.lambda_form = LLA_LAMBDA_READY;
  OK(lla_layer_create(context, &desc, &layer, &error));
  at_layer = clock_now();

  limits.max_sequences = 1;
  limits.max_rows = limits.max_rows_per_sequence = limits.max_length = rows;
  OK(lla_batch_size(context, &limits, &bytes, &alignment, &error));
  OK(lla_batch_device_size(context, &limits, &device_bytes, NULL, &error));
  if (posix_memalign(&batch_memory, 64, bytes) != 0) return 1;
  OK(lla_batch_init(context, &limits, batch_memory, bytes, &forward.batch, &error));
  if (device_bytes) {
    OK(lla_device_allocate(context, device_bytes, &memory, &error));
    OK(lla_batch_bind_device(forward.batch, memory, device_bytes, &error));
  }
  plan.sequences = 1;
  plan.rows_per_sequence = rows;
  OK(lla_batch_plan(forward.batch, NULL, &plan, NULL, &error));
  OK(lla_layer_workspace(layer, &limits, LLA_PASS_FORWARD, &bytes, NULL, &error));
  OK(lla_layer_workspace(layer, &limits, LLA_PASS_BACKWARD, &more, NULL, &error));
  forward.workspace_bytes = bytes > more ? bytes : more;
  OK(lla_device_allocate(context, forward.workspace_bytes, &forward.workspace, &error));
  OK(lla_layer_saved_size(layer, &limits, &forward.saved_bytes, NULL, &error));
  if (forward.saved_bytes) OK(lla_device_allocate(context, forward.saved_bytes, &forward.saved, &error));
  for (i = 0; i < ROLES; ++i) {
    const lla_dtype dtype = roles[i] == LLA_GATE || roles[i] == LLA_LAMBDA ? LLA_F32 : LLA_BF16;
    const size_t count = (size_t)(rows * d1[i] * (d2[i] < 0 ? 1 : d2[i])), size = count * lla_dtype_size(dtype);
    void *host = malloc(size), *data = NULL, *gradient = NULL;
    fill(host, dtype, count, low[i], high[i]);
    OK(lla_device_allocate(context, size, &data, &error));
    OK(lla_device_allocate(context, size, &gradient, &error));
    OK(lla_device_copy(context, roles[i] == LLA_Y ? gradient : data, host, size, NULL, &error));
    io[i] = lla_bind(roles[i], lla_tensor_of(data, dtype, rows, d1[i], d2[i], -1));
    gradients[i] = lla_bind(roles[i], lla_tensor_of(gradient, dtype, rows, d1[i], d2[i], -1));
    free(host);
  }
  OK(lla_device_wait(context, NULL, &error));
  at_inputs = clock_now();

  forward.io = io;
  forward.io_count = ROLES;
  backward.batch = forward.batch;
  backward.io = io;
  backward.io_count = ROLES - 1;
  backward.outputs = &gradients[ROLES - 1];
  backward.output_count = 1;
  backward.gradients = gradients;
  backward.gradient_count = ROLES - 1;
  backward.workspace = forward.workspace;
  backward.workspace_bytes = forward.workspace_bytes;
  backward.saved = forward.saved;
  backward.saved_bytes = forward.saved_bytes;
  for (repeat = 0; repeat < 2; ++repeat) {
    OK(lla_layer_forward(layer, &forward, &error));
    OK(lla_device_wait(context, NULL, &error));
    at_forward[repeat] = clock_now();
    OK(lla_layer_backward(layer, &backward, &error));
    OK(lla_device_wait(context, NULL, &error));
    at_backward[repeat] = clock_now();
  }
  {
    uint16_t *y = malloc((size_t)(rows * HEADS * VALUE) * 2);
    int64_t k;
    OK(lla_device_copy(context, y, io[ROLES - 1].tensor.data, (size_t)(rows * HEADS * VALUE) * 2, NULL, &error));
    OK(lla_device_wait(context, NULL, &error));
    for (k = 0; k < rows * HEADS * VALUE; ++k) {
      const uint32_t bits = (uint32_t)y[k] << 16;
      float value;
      memcpy(&value, &bits, 4);
      checksum += value > 0 ? value : -value;
    }
    free(y);
  }
  printf(
      "{\"who\": \"lla, C\", \"rows\": %lld, \"main_s\": %.4f, \"context_s\": %.4f, \"layer_s\": %.4f, \"inputs_s\": %.4f, "
      "\"forward_s\": %.4f, \"backward_s\": %.4f, \"second_forward_s\": %.4f, \"second_backward_s\": %.4f, "
      "\"mean_output\": %.4f}\n",
      (long long)rows, at_main - start, at_context - start, at_layer - start, at_inputs - start, at_forward[0] - start,
      at_backward[0] - start, at_forward[1] - at_backward[0], at_backward[1] - at_forward[1],
      checksum / (double)(rows * HEADS * VALUE));
  return checksum > 0 && checksum < 1e30 ? 0 : 1;
}
