/* SPDX-License-Identifier: Apache-2.0 */
/* The first program: log-linear attention over a prompt, then one token at a time, and the same in one call to compare. */
#include <lla/lla.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 2, KEY = 16, VALUE = 24, PROMPT = 100, TOTAL = 110, LEVELS = 8 };

/* One row per token: queries, keys, values, log gates (<= 0) and level weights. */
static float q[TOTAL][HEADS][KEY], k[TOTAL][HEADS][KEY], v[TOTAL][HEADS][VALUE], gate[TOTAL][HEADS];
static float lambda[TOTAL][HEADS][LEVELS], streamed[TOTAL][HEADS][VALUE], at_once[TOTAL][HEADS][VALUE];

static lla_error error = LLA_ERROR_INIT;

static void check(lla_status status) {
  if (status == LLA_OK) return;
  fprintf(stderr, "%s: %s\n", lla_status_name(status), error.text);
  exit(1);
}

static float noise(void) { return (float)rand() / (float)RAND_MAX - 0.5f; }

/* Appends rows first ... first + count - 1 to a slot, and receives their outputs. */
static void append(lla_layer *layer, lla_state *state, int64_t slot, int64_t first, int64_t count,
                   float (*y)[HEADS][VALUE]) {
  const lla_binding io[] = {
      lla_bind(LLA_Q, lla_tensor_of(q[first], LLA_F32, count, HEADS, KEY, -1)),
      lla_bind(LLA_K, lla_tensor_of(k[first], LLA_F32, count, HEADS, KEY, -1)),
      lla_bind(LLA_V, lla_tensor_of(v[first], LLA_F32, count, HEADS, VALUE, -1)),
      lla_bind(LLA_GATE, lla_tensor_of(gate[first], LLA_F32, count, HEADS, -1, -1)),
      lla_bind(LLA_LAMBDA, lla_tensor_of(lambda[first], LLA_F32, count, HEADS, LEVELS, -1)),
      lla_bind(LLA_Y, lla_tensor_of(y[first], LLA_F32, count, HEADS, VALUE, -1)),
  };
  check(lla_append(layer, state, slot, io, sizeof io / sizeof io[0], NULL, 0, NULL, &error));
}

int main(void) {
  lla_context *context = NULL;
  lla_layer_desc description = LLA_LAYER_DESC_INIT;
  lla_layer *layer = NULL;
  lla_state_desc slots = LLA_STATE_DESC_INIT;
  lla_state *state = NULL;
  int64_t t, h, i, length;
  double largest = 0, difference = 0;

  for (t = 0; t < TOTAL; ++t) {
    for (h = 0; h < HEADS; ++h) {
      for (i = 0; i < KEY; ++i) q[t][h][i] = noise(), k[t][h][i] = noise();
      for (i = 0; i < VALUE; ++i) v[t][h][i] = noise();
      for (i = 0; i < LEVELS; ++i) lambda[t][h][i] = 1.0f + noise();
      gate[t][h] = -0.1f * (0.5f + noise());
    }
  }

  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = LLA_BACKEND_CPU; /* the tensors below are host memory */
  check(lla_context_create(&options, &context, &error));
  description.kind = LLA_LAYER_MIXER;
  description.mixer = LLA_SCALAR_GATE;
  description.heads = HEADS;
  description.key_dim = KEY;
  description.value_dim = VALUE;
  description.levels = lla_levels_needed(TOTAL);
  description.lambda_form = LLA_LAMBDA_READY;
  check(lla_layer_create(context, &description, &layer, &error));
  slots.slots = 2;
  check(lla_state_create(&layer, 1, &slots, NULL, 0, &state, &error));

  append(layer, state, 0, 0, PROMPT, streamed);                                     /* the prompt */
  for (t = PROMPT; t < TOTAL; ++t) append(layer, state, 0, t, 1, streamed);         /* token by token */
  append(layer, state, 1, 0, TOTAL, at_once);                                       /* all at once, in another slot */

  check(lla_state_length(state, 0, &length, &error));
  for (t = 0; t < TOTAL; ++t) {
    for (h = 0; h < HEADS; ++h) {
      for (i = 0; i < VALUE; ++i) {
        const double output = fabs(at_once[t][h][i]), apart = fabs(at_once[t][h][i] - streamed[t][h][i]);
        if (output > largest) largest = output;
        if (apart > difference) difference = apart;
      }
    }
  }
  printf("lla %s: %d tokens, largest output %.3f, prompt and decode against one call: %.1e\n", lla_version_string(),
         (int)length, largest, difference);

  lla_state_release(state);
  lla_layer_release(layer);
  lla_context_release(context);
  return largest > 0.1 && difference <= 1e-5 * largest ? 0 : 1;
}
