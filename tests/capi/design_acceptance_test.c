/* SPDX-License-Identifier: Apache-2.0 */
/* The first test of the design: a state of two layers, one step written once over fixed buffers as a captured graph would
 * be, drafts that cross a chunk border, commits by an int32 array, a fork by slot_in != slot_out, a padding row, settling
 * two steps late; and afterwards the same bits as plain decoding. */
#include "rig.h"

#define SEQUENCES 4
#define DRAFT 4
#define ROWS (SEQUENCES * DRAFT)
#define RING 3 /* a batch may be planned again once it is settled, which happens two steps late */
#define SLOTS 5
#define STEPS 40
#define PADDING 3

/* What a graph would hold on to: everything that a step touches, at fixed addresses. Only contents change between steps. */
typedef struct step {
  rig *model;
  lla_rows rows;
  lla_forward_args arguments[2];
  int32_t slot_in[SEQUENCES], slot_out[SEQUENCES], counts[SEQUENCES], positions[SEQUENCES], accepted[SEQUENCES];
  void *batch_memory;
  lla_batch *batch;
} step;

static void make_step(step *s, rig *model) {
  size_t bytes;
  int64_t i;
  lla_rows rows = LLA_ROWS_INIT;
  memset(s, 0, sizeof *s);
  s->model = model;
  OK(lla_batch_size(model->context, &model->limits, &bytes, NULL, &error));
  s->batch_memory = take(bytes);
  OK(lla_batch_init(model->context, &model->limits, s->batch_memory, bytes, &s->batch, &error));
  rows.sequences = SEQUENCES;
  rows.rows_per_sequence = DRAFT;
  rows.total_rows = ROWS;
  rows.counts = index32(s->counts);
  rows.slot_in = index32(s->slot_in);
  rows.slot_out = index32(s->slot_out);
  rows.expected_positions = index32(s->positions);
  s->rows = rows;
  rig_set_rows(model, ROWS);
  for (i = 0; i < 2; ++i) {
    s->arguments[i] = rig_forward_args(model, i);
    s->arguments[i].batch = s->batch;
  }
}

/* The captured part: no branch, no allocation, no size that depends on a value. */
static void run_step(step *s) {
  rig *m = s->model;
  OK(lla_batch_plan(s->batch, m->state, &s->rows, NULL, &error));
  OK(lla_layer_forward(m->layer[0].layer, &s->arguments[0], &error));
  OK(lla_layer_forward(m->layer[1].layer, &s->arguments[1], &error));
  /* On a device sampling would write `accepted` here. */
  OK(lla_state_commit(m->state, s->batch, index32(s->accepted), NULL, &error));
}

/* What the scheduler believes about a sequence; it runs on its own numbers, not on the state's. */
typedef struct sequence {
  uint64_t seed;
  int32_t slot;
  int32_t length;
} sequence;

static void open_model(rig *model) {
  lla_layer_desc layers[2];
  lla_state_desc state = LLA_STATE_DESC_INIT;
  layers[0] = mixer_desc(LLA_SCALAR_GATE, 4, 2, 16, 24, lla_levels_needed(1024));
  layers[1] = mixer_desc(LLA_DELTA_RULE, 2, 2, 24, 16, lla_levels_needed(1024));
  state.slots = SLOTS;
  state.max_length = 1024;
  state.max_draft = DRAFT;
  rig_open(model, NULL, layers, 2, &state, SEQUENCES, 128, 0);
}

/* Probe G7. */
static void captured_decode_equals_plain_decode(void **unused) {
  rig served, plain;
  step steps[RING];
  sequence live[SEQUENCES - 1] = {{1, 0, 59}, {2, 1, 126}, {3, 2, 0}};
  int64_t crossed = 0, not_crossed = 0; /* drafts over a border whose accepted rows went over it, or ended before it */
  int64_t expected_released = 0, i, t;
  int32_t history[STEPS][SEQUENCES];
  int forked = 0;
  (void)unused;
  open_model(&served);
  open_model(&plain);
  for (i = 0; i < SEQUENCES - 1; ++i) rig_append_to(&served, live[i].slot, live[i].seed, live[i].length, 128);
  for (i = 0; i < RING; ++i) make_step(&steps[i], &served);

  for (t = 0; t < STEPS; ++t) {
    step *s = &steps[t % RING];
    int64_t b, r;
    if (t >= 2) { /* the host catches up with the step before the last */
      int64_t released = -1;
      OK(lla_state_settle(served.state, steps[(t - 2) % RING].batch, index32(history[t - 2]), &released, &error));
      CHECK(released >= 0);
      expected_released += released;
    }
    for (b = 0; b < SEQUENCES; ++b) {
      if (b == PADDING) {
        s->slot_in[b] = s->slot_out[b] = -1;
        s->counts[b] = DRAFT;
        s->positions[b] = 0;
        s->accepted[b] = 0;
        for (r = 0; r < DRAFT; ++r) rig_fill_row(&served, b * DRAFT + r, 66, r);
        continue;
      }
      s->slot_in[b] = s->slot_out[b] = live[b].slot;
      s->positions[b] = live[b].length;
      s->counts[b] = (int32_t)(1 + (t + b) % DRAFT);
      s->accepted[b] = (int32_t)(mix((uint64_t)(t * 8 + b)) % (uint64_t)(s->counts[b] + 1));
      if (live[b].length % 64 > 64 - DRAFT) { /* the next border lies inside the draft: first rejected, then accepted */
        s->counts[b] = DRAFT;
        s->accepted[b] = t % 3 == 0 ? 0 : t % 3 == 1 ? 64 - live[b].length % 64 - 1 : DRAFT;
        if (live[b].length % 64 + s->accepted[b] > 64)
          ++crossed;
        else
          ++not_crossed;
      }
      for (r = 0; r < s->counts[b]; ++r) /* rows beyond the accepted ones are a wrong guess */
        rig_fill_row(&served, b * DRAFT + r, r < s->accepted[b] ? live[b].seed : 1000 + (uint64_t)t, live[b].length + r);
    }
    if (t == 9) { /* sequence 1 goes on in another slot; its old one stays as it is */
      s->slot_out[1] = 4;
      forked = live[1].length;
    }
    run_step(s);
    for (b = 0; b < ROWS; ++b) {
      static const float zero[128];
      if (b / DRAFT != PADDING && b % DRAFT < s->counts[b / DRAFT]) continue;
      for (i = 0; i < 2; ++i)
        check_equal_bytes(rig_output(&served, i, b), zero, (size_t)rig_output_width(&served, i) * sizeof(float), "padding");
    }
    memcpy(history[t], s->accepted, sizeof history[t]);
    for (b = 0; b < SEQUENCES - 1; ++b) {
      live[b].slot = s->slot_out[b];
      live[b].length += s->accepted[b];
    }
  }
  CHECK(forked >= 128 && crossed >= 2 && not_crossed >= 2);
  CHECK(live[0].length > 64 && live[2].length > 0);
  CHECK(expected_released >= 0);

  for (i = 0; i < SEQUENCES - 1; ++i) {
    CHECK(rig_length(&served, live[i].slot) == live[i].length);
    rig_append_to(&plain, live[i].slot, live[i].seed, live[i].length, 1);
    rig_check_same_slot(&served, live[i].slot, &plain, live[i].slot, "state after drafts and state after plain decode");
  }
  rig_append_to(&plain, 1, live[1].seed, forked, 1);
  rig_check_same_slot(&served, 1, &plain, 1, "slot that was forked from");

  /* And the next token is the same, bit by bit. */
  for (i = 0; i < SEQUENCES - 1; ++i) {
    int64_t layer;
    rig_append(&served, live[i].slot, live[i].seed, 1);
    rig_append(&plain, live[i].slot, live[i].seed, 1);
    for (layer = 0; layer < 2; ++layer)
      check_equal_bytes(rig_output(&served, layer, 0), rig_output(&plain, layer, 0),
                        (size_t)rig_output_width(&served, layer) * sizeof(float), "next token");
  }
  for (i = 0; i < RING; ++i) {
    lla_batch_discard(steps[i].batch);
    free(steps[i].batch_memory);
  }
  rig_close(&served);
  rig_close(&plain);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(captured_decode_equals_plain_decode)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
