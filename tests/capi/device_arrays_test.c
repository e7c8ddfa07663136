/* SPDX-License-Identifier: Apache-2.0 */
/* The first test of the design with index arrays and accepted counts in memory of the device: drafts over a chunk border, a
 * fork by slot_in != slot_out, padding, the host settling two steps late; and afterwards the same bits as plain decoding. Also
 * what a bad value on the device does. On the CPU such arrays are refused; the device suites run the rest. */
#include "rig.h"

#define SEQUENCES 4
#define DRAFT 4
#define ROWS (SEQUENCES * DRAFT)
#define LATE 2
#define RING (LATE + 1)
#define SLOTS 6
#define STEPS 40
#define PADDING 3
#define WIDEST 128

/* Memory of the device; the suites run where the host reaches it too. */
typedef struct arrays {
  int32_t slot_in[SEQUENCES], slot_out[SEQUENCES], counts[SEQUENCES], accepted[SEQUENCES];
  int64_t positions[SEQUENCES], offsets[SEQUENCES + 1];
} arrays;

typedef struct step {
  rig *model;
  lla_rows rows;
  arrays *at;
  int with_counts; /* of the commit */
  void *batch_memory;
  lla_batch *batch;
} step;

static lla_index there(lla_index index) {
  index.location = LLA_DEVICE;
  return index;
}

static int has_device(const rig *r) {
  char name[32] = "";
  size_t size = sizeof name;
  OK(lla_context_query(r->context, LLA_CONTEXT_BACKEND_NAME, name, &size, &error));
  return strcmp(name, "cpu") != 0;
}

static void open_model(rig *model) {
  lla_layer_desc layers[2];
  lla_state_desc state = LLA_STATE_DESC_INIT;
  layers[0] = mixer_desc(LLA_SCALAR_GATE, 4, 2, 16, 24, lla_levels_needed(1024));
  layers[1] = cell_desc(2, 2, 24, 16, lla_levels_needed(1024));
  state.slots = SLOTS;
  state.max_length = 1024;
  state.max_draft = DRAFT;
  state.node_blocks = 300;
  rig_open(model, NULL, layers, 2, &state, SEQUENCES, 128, 2);
}

/* `slots_there`: whether the slots, too, lie on the device, so that the host does not know them. */
static void make_step(step *s, rig *model, int slots_there) {
  size_t bytes;
  lla_rows rows = LLA_ROWS_INIT;
  int64_t b;
  memset(s, 0, sizeof *s);
  s->model = model;
  s->at = (arrays *)take(sizeof *s->at);
  s->with_counts = 1;
  OK(lla_batch_size(model->context, &model->limits, &bytes, NULL, &error));
  s->batch_memory = take(bytes);
  OK(lla_batch_init(model->context, &model->limits, s->batch_memory, bytes, &s->batch, &error));
  for (b = 0; b <= SEQUENCES; ++b) s->at->offsets[b] = b * DRAFT;
  rows.sequences = SEQUENCES;
  rows.rows_per_sequence = DRAFT;
  rows.total_rows = ROWS;
  rows.counts = there(index32(s->at->counts));
  rows.slot_in = index32(s->at->slot_in);
  rows.slot_out = index32(s->at->slot_out);
  rows.expected_positions = there(index64(s->at->positions));
  if (slots_there) {
    rows.offsets = there(index64(s->at->offsets));
    rows.slot_in = there(rows.slot_in);
    rows.slot_out = there(rows.slot_out);
  }
  s->rows = rows;
  rig_set_rows(model, ROWS);
}

static void close_step(step *s) {
  lla_batch_discard(s->batch);
  free(s->batch_memory);
  free(s->at);
}

static void plan_and_run(step *s) {
  int64_t i;
  OK(lla_batch_plan(s->batch, s->model->state, &s->rows, NULL, &error));
  for (i = 0; i < s->model->layer_count; ++i) {
    lla_forward_args arguments = rig_forward_args(s->model, i);
    arguments.batch = s->batch;
    OK(lla_layer_forward(s->model->layer[i].layer, &arguments, &error));
  }
}

static void commit(step *s) {
  OK(lla_state_commit(s->model->state, s->batch, s->with_counts ? there(index32(s->at->accepted)) : no_index(), NULL, &error));
}

static void settle(step *s, uint32_t faults) {
  int64_t released = -1;
  OK(lla_batch_collect(s->batch, NULL, &error));
  CHECK(lla_batch_faults(s->batch) == faults);
  OK(lla_state_settle(s->model->state, s->batch, no_index(), &released, &error));
  CHECK(released >= 0);
}

static void check_zero_row(const rig *r, int64_t row) {
  static const float zero[WIDEST];
  int64_t i;
  for (i = 0; i < r->layer_count; ++i)
    check_equal_bytes(rig_output(r, i, row), zero, (size_t)rig_output_width(r, i) * sizeof(float), "row of no sequence");
}

/* What the scheduler believes about a sequence. */
typedef struct sequence {
  uint64_t seed;
  int32_t slot;
  int32_t length;
} sequence;

static void decode(int slots_there) {
  rig served, plain;
  step steps[RING];
  sequence live[SEQUENCES - 1] = {{1, 0, 59}, {2, 1, 126}, {3, 2, 0}};
  int64_t crossed = 0, not_crossed = 0, i, t;
  int forked = 0;
  open_model(&served);
  if (!has_device(&served)) {
    rig_close(&served);
    return;
  }
  open_model(&plain);
  for (i = 0; i < SEQUENCES - 1; ++i) rig_append_to(&served, live[i].slot, live[i].seed, live[i].length, 128);
  for (i = 0; i < RING; ++i) make_step(&steps[i], &served, slots_there);

  for (t = 0; t < STEPS; ++t) {
    step *s = &steps[t % RING];
    arrays *a = s->at;
    int64_t b, r;
    if (t >= RING) settle(s, 0);
    for (b = 0; b < SEQUENCES; ++b) {
      if (b == PADDING) {
        a->slot_in[b] = a->slot_out[b] = -1;
        a->counts[b] = DRAFT;
        a->positions[b] = 0;
        a->accepted[b] = 0;
        for (r = 0; r < DRAFT; ++r) rig_fill_row(&served, b * DRAFT + r, 66, r);
        continue;
      }
      a->slot_in[b] = a->slot_out[b] = live[b].slot;
      a->positions[b] = live[b].length;
      a->counts[b] = (int32_t)(1 + (t + b) % DRAFT);
      a->accepted[b] = (int32_t)(mix((uint64_t)(t * 8 + b)) % (uint64_t)(a->counts[b] + 1));
      if (live[b].length % 64 > 64 - DRAFT) { /* the next border lies inside the draft: first rejected, then accepted */
        a->counts[b] = DRAFT;
        a->accepted[b] = t % 3 == 0 ? 0 : t % 3 == 1 ? 64 - live[b].length % 64 - 1 : DRAFT;
        if (live[b].length % 64 + a->accepted[b] > 64)
          ++crossed;
        else
          ++not_crossed;
      }
      for (r = 0; r < a->counts[b]; ++r) /* rows beyond the accepted ones are a wrong guess */
        rig_fill_row(&served, b * DRAFT + r, r < a->accepted[b] ? live[b].seed : 1000 + (uint64_t)t, live[b].length + r);
    }
    if (t == 9) { /* sequence 1 goes on in another slot; its old one stays as it is */
      a->slot_out[1] = 4;
      forked = live[1].length;
    }
    if (t == 20) { /* a fork that keeps no row: a copy */
      a->slot_out[2] = 5;
      a->accepted[2] = 0;
    }
    plan_and_run(s);
    for (b = 0; b < ROWS; ++b) {
      if (b / DRAFT == PADDING || b % DRAFT >= a->counts[b / DRAFT]) check_zero_row(&served, b);
    }
    commit(s);
    for (b = 0; b < SEQUENCES - 1; ++b) {
      live[b].slot = a->slot_out[b];
      live[b].length += a->accepted[b];
    }
    if (t == STEPS / 2) { /* what the host may not do before it has settled */
      const int64_t slot = live[0].slot;
      size_t bytes;
      lla_rows rows = LLA_ROWS_INIT;
      rows.sequences = 1;
      rows.rows_per_sequence = 1;
      FAILS(LLA_BUSY, "lla_state_settle", lla_batch_plan(served.batch, served.state, &rows, NULL, &error));
      FAILS(LLA_BUSY, "lla_state_settle", lla_state_reset(served.state, index64(&slot), 1, no_index(), NULL, &error));
      FAILS(LLA_BUSY, "lla_state_settle", lla_state_truncate(served.state, slot, 0, NULL, &error));
      FAILS(LLA_BUSY, "lla_state_settle", lla_state_export_size(served.state, slot, &bytes, &error));
      FAILS(LLA_BUSY, "lla_state_settle", lla_batch_plan(s->batch, served.state, &s->rows, NULL, &error));
      FAILS(LLA_BUSY, "batch", lla_state_settle(served.state, s->batch, no_index(), NULL, &error)); /* not its turn */
    }
  }
  CHECK(forked >= 128 && crossed >= 2 && not_crossed >= 2);
  for (t = STEPS; t < STEPS + RING; ++t) settle(&steps[t % RING], 0);

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
  for (i = 0; i < RING; ++i) close_step(&steps[i]);
  for (i = 0; i < SLOTS; ++i) rig_reset(&served, i);
  CHECK(rig_query(&served, LLA_STATE_FREE_NODE_BLOCKS, 0) == 300);
  rig_close(&served);
  rig_close(&plain);
}

static void decode_with_known_slots(void **unused) {
  (void)unused;
  decode(0);
}

static void decode_with_slots_on_the_device(void **unused) {
  (void)unused;
  decode(1);
}

/* The host plans, the counts lie on the device; it settles with its own copy of them and collects nothing. */
static void counts_on_the_device(void **unused) {
  rig served, plain;
  int32_t *accepted;
  const int32_t copy[2] = {2, 0};
  const int64_t slots[2] = {0, 1}, targets[2] = {0, 3}, snapshot_sequence[2] = {0, 0}, snapshot_rows[2] = {0, 1},
                snapshot_slots[2] = {4, 5};
  lla_rows rows = LLA_ROWS_INIT;
  (void)unused;
  open_model(&served);
  if (!has_device(&served)) {
    rig_close(&served);
    return;
  }
  open_model(&plain);
  rig_append_to(&served, 0, 7, 62, 128);
  rig_append_to(&served, 1, 8, 70, 128);
  accepted = (int32_t *)take(2 * sizeof *accepted);
  memcpy(accepted, copy, sizeof copy);
  rows.sequences = 2;
  rows.rows_per_sequence = DRAFT;
  rows.slot_in = index64(slots);
  rows.slot_out = index64(targets);
  rows.snapshots = 2;
  rows.snapshot_sequences = index64(snapshot_sequence);
  rows.snapshot_rows = index64(snapshot_rows);
  rows.snapshot_slots = index64(snapshot_slots);
  rig_set_rows(&served, 2 * DRAFT);
  rig_fill(&served, 0, 7, 62, DRAFT);
  rig_fill(&served, DRAFT, 8, 70, DRAFT);
  rig_plan(&served, &rows);
  rig_forward(&served);
  OK(lla_state_commit(served.state, served.batch, there(index32(accepted)), NULL, &error));
  FAILS(LLA_NULL_POINTER, "accepted", lla_state_settle(served.state, served.batch, no_index(), NULL, &error));
  CHECK(rig_length(&served, 0) == 62);
  OK(lla_state_settle(served.state, served.batch, index32(copy), NULL, &error));
  CHECK(lla_batch_faults(served.batch) == 0);
  CHECK(rig_length(&served, 0) == 64 && rig_length(&served, 1) == 70 && rig_length(&served, 3) == 70);
  CHECK(rig_length(&served, 4) == 62 && rig_length(&served, 5) == 63);
  rig_append_to(&plain, 0, 7, 62, 1);
  rig_check_same_slot(&served, 4, &plain, 0, "snapshot of no row");
  rig_append_to(&plain, 0, 7, 63, 1);
  rig_check_same_slot(&served, 5, &plain, 0, "snapshot of a row");
  rig_append_to(&plain, 0, 7, 64, 1);
  rig_check_same_slot(&served, 0, &plain, 0, "slot that grew");
  rig_append_to(&plain, 1, 8, 70, 1);
  rig_check_same_slot(&served, 3, &plain, 1, "fork of no row");
  free(accepted);
  rig_close(&served);
  rig_close(&plain);
}

/* A bad value on the device: its sequence is padding, the others come out as without it. */
static void bad_values(void **unused) {
  const struct {
    uint32_t fault;
    int32_t slot, position, count;
  } cases[] = {{0, 1, 70, 3},
               {LLA_FAULT_SLOT, SLOTS, 70, 3},
               {LLA_FAULT_SLOT, -7, 70, 3},
               {LLA_FAULT_POSITION, 1, 71, 3},
               {LLA_FAULT_ROWS, 1, 70, DRAFT + 1},
               {LLA_FAULT_ROWS, 1, 70, -1},
               {LLA_FAULT_ACCEPTED, 1, 70, 3}};
  const int64_t lengths[3] = {62, 70, 130};
  float *expected = (float *)take(2 * DRAFT * 2 * WIDEST * sizeof(float));
  size_t k;
  (void)unused;
  for (k = 0; k < sizeof cases / sizeof cases[0]; ++k) {
    const uint32_t fault = cases[k].fault;
    rig served;
    step s;
    void *before;
    size_t bytes, after_bytes;
    int64_t b, r, i;
    open_model(&served);
    if (!has_device(&served)) {
      rig_close(&served);
      break;
    }
    for (b = 0; b < 3; ++b) rig_append_to(&served, b, 20 + (uint64_t)b, lengths[b], 128);
    before = rig_pack(&served, 1, &bytes);
    make_step(&s, &served, 1);
    for (b = 0; b < SEQUENCES; ++b) {
      const int bad = b == 1;
      s.at->slot_in[b] = s.at->slot_out[b] = b < 3 ? (bad ? cases[k].slot : (int32_t)b) : -1;
      s.at->positions[b] = b < 3 ? (bad ? cases[k].position : lengths[b]) : 0;
      s.at->counts[b] = bad ? cases[k].count : 3;
      s.at->accepted[b] = bad && fault == LLA_FAULT_ACCEPTED ? 9 : b < 3 ? 3 : 0;
      if (b < 3) rig_fill(&served, b * DRAFT, 20 + (uint64_t)b, lengths[b], DRAFT);
    }
    plan_and_run(&s);
    for (b = 0; b < 3; b += 2) { /* the neighbours */
      for (r = 0; r < 3; ++r) {
        for (i = 0; i < 2; ++i) {
          float *known = expected + (((b / 2) * DRAFT + r) * 2 + i) * WIDEST;
          const size_t size = (size_t)rig_output_width(&served, i) * sizeof(float);
          if (k == 0) memcpy(known, rig_output(&served, i, b * DRAFT + r), size);
          check_equal_bytes(rig_output(&served, i, b * DRAFT + r), known, size, "output of a neighbour");
        }
      }
    }
    for (r = 0; r < DRAFT; ++r) {
      if (r == 3 || (fault && fault != LLA_FAULT_ACCEPTED)) check_zero_row(&served, DRAFT + r);
      check_zero_row(&served, PADDING * DRAFT + r);
    }
    commit(&s);
    settle(&s, fault);
    for (b = 0; b < 3; ++b) CHECK(rig_length(&served, b) == lengths[b] + (b == 1 && fault ? 0 : 3));
    if (fault) {
      void *after = rig_pack(&served, 1, &after_bytes);
      CHECK(after_bytes == bytes);
      check_equal_bytes(before, after, bytes, "slot of the faulty sequence");
      free(after);
    }
    free(before);
    close_step(&s);
    rig_close(&served);
  }
  free(expected);
}

/* Refusals that need no device. */
static void refused_on_the_host(void **unused) {
  rig r;
  const int64_t zero = 0;
  lla_rows rows = LLA_ROWS_INIT;
  (void)unused;
  open_model(&r);
  rows.sequences = 1;
  rows.rows_per_sequence = 1;
  FAILS(LLA_NULL_POINTER, "batch", lla_batch_collect(NULL, NULL, &error));
  if (has_device(&r)) {
    FAILS(LLA_BUSY, "batch", lla_batch_collect(r.batch, NULL, &error));
  } else {
    rows.slot_in = there(index64(&zero));
    FAILS(LLA_INVALID_ARGUMENT, "slot_in", lla_batch_plan(r.batch, r.state, &rows, NULL, &error));
    rig_run(&r, 0, 1, 1);
    FAILS(LLA_INVALID_ARGUMENT, "accepted", lla_state_commit(r.state, r.batch, there(index64(&zero)), NULL, &error));
    OK(lla_batch_collect(r.batch, NULL, &error));
    rig_commit(&r, NULL);
    OK(lla_batch_collect(r.batch, NULL, &error));
    CHECK(lla_batch_faults(r.batch) == 0);
  }
  rows.slot_in = no_index();
  rows.snapshots = 1;
  rows.snapshot_sequences = there(index64(&zero));
  rows.snapshot_rows = rows.snapshot_slots = index64(&zero);
  FAILS(LLA_INVALID_ARGUMENT, "snapshot_sequences", lla_batch_plan(r.batch, r.state, &rows, NULL, &error));
  rig_close(&r);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(decode_with_known_slots), cmocka_unit_test(decode_with_slots_on_the_device),
                                     cmocka_unit_test(counts_on_the_device), cmocka_unit_test(bad_values),
                                     cmocka_unit_test(refused_on_the_host)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
