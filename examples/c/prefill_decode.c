/* SPDX-License-Identifier: Apache-2.0 */
/* A server's step: one batch for two layers that mixes a prefill, a decoded token and an idle place (slot -1), with memory
 * that is asked for once. Prints what each step did and compares with every sequence alone. */
#define _POSIX_C_SOURCE 200112L /* posix_memalign() */
#include <lla/lla.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, HEADS = 4, DIM = 16, PLACES = 3, MAX_ROWS = 128, LENGTH = 1024, IO = 6 };

static lla_error error = LLA_ERROR_INIT;

static void check(lla_status status) {
  if (status == LLA_OK) return;
  fprintf(stderr, "%s: %s\n", lla_status_name(status), error.text);
  exit(1);
}

/* Everything that steps need; nothing is allocated after it is set up. */
static lla_context *context;
static lla_layer *layers[LAYERS];
static lla_state *state;
static lla_batch *batch;
static void *batch_memory, *workspace;
static size_t workspace_bytes;
static float q[MAX_ROWS][HEADS][DIM], k[MAX_ROWS][HEADS][DIM], v[MAX_ROWS][HEADS][DIM], gate[MAX_ROWS][HEADS];
static float write_strength[MAX_ROWS][HEADS], y[LAYERS][MAX_ROWS][HEADS][DIM];

static void set_up(void) {
  lla_layer_desc description = LLA_LAYER_DESC_INIT;
  lla_state_desc slots = LLA_STATE_DESC_INIT;
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  size_t bytes, alignment;
  int l;
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = LLA_BACKEND_CPU; /* the tensors below are host memory */
  check(lla_context_create(&options, &context, &error));
  description.kind = LLA_LAYER_MIXER;
  description.mixer = LLA_DELTA_RULE;
  description.write_form = LLA_WRITE_READY;
  description.heads = HEADS;
  description.key_dim = description.value_dim = DIM;
  for (l = 0; l < LAYERS; ++l) check(lla_layer_create(context, &description, &layers[l], &error));
  slots.slots = 8;
  slots.max_length = LENGTH;
  check(lla_state_create(layers, LAYERS, &slots, NULL, 0, &state, &error));

  limits.max_sequences = PLACES;
  limits.max_rows = MAX_ROWS;
  limits.max_length = LENGTH;
  check(lla_batch_size(context, &limits, &bytes, &alignment, &error));
  if (posix_memalign(&batch_memory, alignment < sizeof(void *) ? sizeof(void *) : alignment, bytes)) exit(1);
  check(lla_batch_init(context, &limits, batch_memory, bytes, &batch, &error));
  for (l = 0; l < LAYERS; ++l) { /* one workspace for the neediest layer serves all of them in turn */
    check(lla_layer_workspace(layers[l], &limits, LLA_PASS_FORWARD, &bytes, &alignment, &error));
    if (bytes > workspace_bytes) workspace_bytes = bytes;
  }
  if (posix_memalign(&workspace, alignment < sizeof(void *) ? sizeof(void *) : alignment, workspace_bytes)) exit(1);
}

/* Stands for the rest of a model: the inputs of token `position` of a sequence. */
static void make_inputs(int64_t row, int64_t sequence, int64_t position) {
  uint32_t seed = (uint32_t)(sequence * 100003 + position * 977 + 1);
  int h, i;
  for (h = 0; h < HEADS; ++h) {
    for (i = 0; i < 3 * DIM; ++i) {
      float(*to)[HEADS][DIM] = i < DIM ? q : i < 2 * DIM ? k : v;
      seed = seed * 1664525u + 1013904223u;
      to[row][h][i % DIM] = ((float)(seed >> 8) / 16777216.0f - 0.5f) * 0.5f;
    }
    gate[row][h] = -0.01f * (float)(h + 1);
    write_strength[row][h] = 0.5f;
  }
}

/* One step: `rows[b]` tokens for slot `slots[b]`, for all layers; then the positions move. */
static void step(int64_t places, const int64_t *slots, const int64_t *rows) {
  lla_rows plan = LLA_ROWS_INIT;
  lla_index all = {NULL, 0, 0};
  int64_t offsets[PLACES + 1] = {0}, b, r, position, total;
  int l;
  for (b = 0; b < places; ++b) {
    offsets[b + 1] = offsets[b] + rows[b];
    if (slots[b] < 0) continue; /* rows of an idle place are not read */
    check(lla_state_length(state, slots[b], &position, &error));
    for (r = 0; r < rows[b]; ++r) make_inputs(offsets[b] + r, slots[b] % 4, position + r);
  }
  total = offsets[places];
  plan.sequences = places;
  plan.offsets.data = offsets;
  plan.offsets.dtype = LLA_I64;
  plan.slot_in.data = slots;
  plan.slot_in.dtype = LLA_I64;
  check(lla_batch_plan(batch, state, &plan, NULL, &error));
  for (l = 0; l < LAYERS; ++l) { /* here both layers read the same inputs */
    const lla_binding io[IO] = {lla_bind(LLA_Q, lla_tensor_of(q, LLA_F32, total, HEADS, DIM, -1)),
                                lla_bind(LLA_K, lla_tensor_of(k, LLA_F32, total, HEADS, DIM, -1)),
                                lla_bind(LLA_V, lla_tensor_of(v, LLA_F32, total, HEADS, DIM, -1)),
                                lla_bind(LLA_GATE, lla_tensor_of(gate, LLA_F32, total, HEADS, -1, -1)),
                                lla_bind(LLA_WRITE, lla_tensor_of(write_strength, LLA_F32, total, HEADS, -1, -1)),
                                lla_bind(LLA_Y, lla_tensor_of(y[l], LLA_F32, total, HEADS, DIM, -1))};
    lla_forward_args arguments = LLA_FORWARD_ARGS_INIT;
    arguments.batch = batch;
    arguments.state = state;
    arguments.layer_index = l;
    arguments.io = io;
    arguments.io_count = IO;
    arguments.workspace = workspace;
    arguments.workspace_bytes = workspace_bytes;
    check(lla_layer_forward(layers[l], &arguments, &error));
  }
  check(lla_state_commit(state, batch, all, NULL, &error)); /* all rows, all layers */
}

int main(void) {
  static const int64_t slots[PLACES] = {0, -1, 1}, rows[3][PLACES] = {{90, 2, 30}, {1, 1, 70}, {1, 1, 1}};
  float together[2][HEADS][DIM], idle = 0;
  double difference = 0;
  int64_t s, twin, total[2] = {92, 101}, i;
  set_up();
  for (s = 0; s < 3; ++s) {
    step(PLACES, slots, rows[s]);
    for (i = 0; i < rows[s][1] * HEADS * DIM; ++i) idle += fabsf((&y[1][rows[s][0]][0][0])[i]);
    printf("step %d: %d rows for slot 0, %d for slot 1\n", (int)s, (int)rows[s][0], (int)rows[s][2]);
  }
  memcpy(together[0], y[1][0], sizeof together[0]); /* the last token of each sequence */
  memcpy(together[1], y[1][2], sizeof together[1]);
  for (twin = 4; twin < 6; ++twin) { /* the same tokens alone and in one piece, in slots 4 and 5 */
    step(1, &twin, &total[twin - 4]);
    for (i = 0; i < HEADS * DIM; ++i) {
      const double apart = fabs((&y[1][total[twin - 4] - 1][0][0])[i] - (&together[twin - 4][0][0])[i]);
      if (apart > difference) difference = apart;
    }
  }
  printf("served together against alone: %.1e, idle rows sum to %g\n", difference, (double)idle);
  lla_state_release(state);
  for (i = 0; i < LAYERS; ++i) lla_layer_release(layers[i]);
  lla_context_release(context);
  free(batch_memory);
  free(workspace);
  return difference < 1e-5 && idle == 0 && together[0][0][0] != 0 ? 0 : 1;
}
