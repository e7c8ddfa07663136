/* SPDX-License-Identifier: Apache-2.0 */
/* One step of training of a log-linear Mamba-2 block: forward, backward, a step down the gradient, and the loss falls. */
#define _POSIX_C_SOURCE 200112L /* posix_memalign() */
#include <lla/lla.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LEARNING_RATE 0.05f

enum { ROWS = 90, SEQUENCES = 2, N = ROWS * SEQUENCES, HIDDEN = 16, HEADS = 2, KEY = 8, VALUE = 8, LEVELS = 8 };
enum { INNER = HEADS * VALUE, CHANNELS = INNER + 2 * KEY, PROJECTED = INNER + CHANNELS + HEADS + HEADS * LEVELS };

static lla_error error = LLA_ERROR_INIT;

static void check(lla_status status) {
  if (status != LLA_OK) fprintf(stderr, "%s: %s\n", lla_status_name(status), error.text), exit(1);
}

/* A weight, its gradient, and both as tensors in the weight's role. */
typedef struct parameter {
  lla_role role;
  int64_t rows, columns; /* columns -1: a vector */
  float low, high;       /* of the initial values */
  float *value, *gradient;
} parameter;

static parameter parameters[] = {
    {LLA_WEIGHT_IN_PROJ, PROJECTED, HIDDEN, -0.3f, 0.3f, NULL, NULL},
    {LLA_WEIGHT_CONV, CHANNELS, 4, -0.5f, 0.5f, NULL, NULL},
    {LLA_WEIGHT_CONV_BIAS, CHANNELS, -1, -0.1f, 0.1f, NULL, NULL},
    {LLA_WEIGHT_DT_BIAS, HEADS, -1, -2, -1, NULL, NULL},
    {LLA_WEIGHT_A_LOG, HEADS, -1, 0, 1, NULL, NULL},
    {LLA_WEIGHT_LAMBDA, HEADS, LEVELS, 1, 1, NULL, NULL},
    {LLA_WEIGHT_SKIP, HEADS, -1, 1, 1, NULL, NULL},
    {LLA_WEIGHT_NORM, INNER, -1, 1, 1, NULL, NULL},
    {LLA_WEIGHT_OUT_PROJ, HIDDEN, INNER, -0.3f, 0.3f, NULL, NULL},
};
enum { COUNT = sizeof parameters / sizeof parameters[0] };

static float x[N][HIDDEN], y[N][HIDDEN], target[N][HIDDEN], dy[N][HIDDEN];

static float noise(float low, float high) { return low + (high - low) * ((float)rand() / (float)RAND_MAX); }
static int64_t size_of(const parameter *p) { return p->rows * (p->columns < 0 ? 1 : p->columns); }
static void *memory_of(size_t bytes) {
  void *memory;
  if (posix_memalign(&memory, 64, bytes + 64)) exit(1);
  memset(memory, 0, bytes);
  return memory;
}

/* Half the squared distance from the target; its gradient goes to dy. */
static double loss(void) {
  double sum = 0;
  int64_t i, j;
  for (i = 0; i < N; ++i) {
    for (j = 0; j < HIDDEN; ++j) {
      dy[i][j] = y[i][j] - target[i][j];
      sum += 0.5 * dy[i][j] * dy[i][j];
    }
  }
  return sum / N;
}

int main(void) {
  lla_context *context = NULL;
  lla_layer_desc description = LLA_LAYER_DESC_INIT;
  lla_layer *layer = NULL;
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  lla_batch *batch = NULL;
  lla_rows rows = LLA_ROWS_INIT;
  lla_forward_args forward = LLA_FORWARD_ARGS_INIT;
  lla_backward_args backward = LLA_BACKWARD_ARGS_INIT;
  lla_binding io[2], output, weights[COUNT], gradients[COUNT];
  size_t batch_bytes, forward_bytes, backward_bytes, saved_bytes;
  void *batch_memory, *workspace, *saved;
  double first = 0, last = 0;
  int64_t i, k;
  int step;

  description.kind = LLA_LAYER_MAMBA2;
  description.heads = HEADS;
  description.groups = 1;
  description.key_dim = KEY;
  description.value_dim = VALUE;
  description.hidden = HIDDEN;
  description.levels = LEVELS;
  description.lambda_form = LLA_LAMBDA_SOFTPLUS;
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = LLA_BACKEND_CPU; /* the tensors below are host memory */
  check(lla_context_create(&options, &context, &error));
  check(lla_layer_create(context, &description, &layer, &error));

  limits.max_sequences = SEQUENCES;
  limits.max_rows = N;
  limits.max_rows_per_sequence = limits.max_length = ROWS;
  check(lla_batch_size(context, &limits, &batch_bytes, NULL, &error));
  check(lla_layer_workspace(layer, &limits, LLA_PASS_FORWARD, &forward_bytes, NULL, &error));
  check(lla_layer_workspace(layer, &limits, LLA_PASS_BACKWARD, &backward_bytes, NULL, &error));
  check(lla_layer_saved_size(layer, &limits, &saved_bytes, NULL, &error));
  batch_memory = memory_of(batch_bytes);
  workspace = memory_of(backward_bytes > forward_bytes ? backward_bytes : forward_bytes);
  saved = memory_of(saved_bytes);
  check(lla_batch_init(context, &limits, batch_memory, batch_bytes, &batch, &error));
  rows.sequences = SEQUENCES; /* no state: every sequence starts empty */
  rows.rows_per_sequence = ROWS;
  check(lla_batch_plan(batch, NULL, &rows, NULL, &error));

  for (k = 0; k < COUNT; ++k) {
    parameter *p = &parameters[k];
    p->value = memory_of((size_t)size_of(p) * sizeof(float));
    p->gradient = memory_of((size_t)size_of(p) * sizeof(float));
    for (i = 0; i < size_of(p); ++i) p->value[i] = noise(p->low, p->high);
    weights[k] = lla_bind(p->role, lla_tensor_of(p->value, LLA_F32, p->rows, p->columns, -1, -1));
    gradients[k] = lla_bind(p->role, lla_tensor_of(p->gradient, LLA_F32, p->rows, p->columns, -1, -1));
  }
  for (i = 0; i < N; ++i) {
    for (k = 0; k < HIDDEN; ++k) x[i][k] = noise(-1, 1), target[i][k] = noise(-0.5f, 0.5f);
  }
  io[0] = lla_bind(LLA_X, lla_tensor_of(x, LLA_F32, N, HIDDEN, -1, -1));
  io[1] = lla_bind(LLA_Y, lla_tensor_of(y, LLA_F32, N, HIDDEN, -1, -1));
  output = lla_bind(LLA_Y, lla_tensor_of(dy, LLA_F32, N, HIDDEN, -1, -1));

  forward.batch = backward.batch = batch;
  forward.io = backward.io = io;
  forward.io_count = 2;
  backward.io_count = 1; /* inputs only */
  forward.weights = backward.weights = weights;
  forward.weight_count = backward.weight_count = COUNT;
  forward.workspace = backward.workspace = workspace;
  forward.workspace_bytes = forward_bytes;
  backward.workspace_bytes = backward_bytes;
  forward.saved = saved_bytes ? saved : NULL; /* optional: backward without it gives the same bits */
  backward.saved = forward.saved;
  forward.saved_bytes = backward.saved_bytes = saved_bytes;
  backward.outputs = &output;
  backward.output_count = 1;
  backward.gradients = gradients;
  backward.gradient_count = COUNT;
  for (step = 0; step < 20; ++step) {
    check(lla_layer_forward(layer, &forward, &error));
    last = loss();
    if (step == 0) first = last;
    check(lla_layer_backward(layer, &backward, &error));
    for (k = 0; k < COUNT; ++k) {
      for (i = 0; i < size_of(&parameters[k]); ++i) parameters[k].value[i] -= LEARNING_RATE / N * parameters[k].gradient[i];
    }
  }
  printf("20 steps of gradient descent: loss %.4f, then %.4f\n", first, last);

  for (k = 0; k < COUNT; ++k) free(parameters[k].value), free(parameters[k].gradient);
  free(batch_memory);
  free(workspace);
  free(saved);
  lla_layer_release(layer);
  lla_context_release(context);
  return last < 0.9 * first ? 0 : 1;
}
