/* SPDX-License-Identifier: Apache-2.0 */
/* Batches: limits, memory, rows and slots that do not fit, calls in the wrong phase, handles that do not belong together. */
#include "bad_input.h"

static void limits_and_memory(void **unused) {
  const lla_layer_desc desc = victim_mixer();
  victim v;
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  int64_t *const fields[5] = {&limits.max_sequences, &limits.max_rows, &limits.max_rows_per_sequence, &limits.max_length,
                              &limits.max_snapshots};
  static const char *const names[5] = {"max_sequences", "max_rows", "max_rows_per_sequence", "max_length", "max_snapshots"};
  lla_batch *batch = (lla_batch *)&v;
  size_t bytes = 4242, needed, alignment;
  char *memory;
  int i;
  (void)unused;
  victim_open(&v, &desc);
  for (i = 0; i < 5; ++i) {
    *fields[i] = -1;
    FAILS(LLA_INVALID_ARGUMENT, names[i], lla_batch_size(v.r.context, &limits, &bytes, NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, names[i], lla_batch_init(v.r.context, &limits, &v, sizeof v, &batch, &error));
    FAILS(LLA_INVALID_ARGUMENT, names[i],
          lla_layer_workspace(v.r.layer[0].layer, &limits, LLA_PASS_FORWARD, &bytes, NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, names[i], lla_layer_saved_size(v.r.layer[0].layer, &limits, &bytes, NULL, &error));
    *fields[i] = INT64_MAX;
    FAILS(LLA_SIZE_OVERFLOW, names[i], lla_batch_size(v.r.context, &limits, &bytes, NULL, &error));
    *fields[i] = 0;
  }
  limits.max_rows = limits.max_sequences = (int64_t)1 << 60;
  FAILS(LLA_SIZE_OVERFLOW, "", lla_batch_size(v.r.context, &limits, &bytes, NULL, &error));
  FAILS(LLA_SIZE_OVERFLOW, "", lla_layer_workspace(v.r.layer[0].layer, &limits, LLA_PASS_FORWARD, &bytes, NULL, &error));
  CHECK(bytes == 4242);
  limits.max_rows = 7;
  limits.max_sequences = 2;
  OK(lla_batch_size(v.r.context, &limits, &needed, &alignment, &error));
  memory = (char *)take(needed + 64);
  memset(memory, 0x11, needed + 64);
  FAILS(LLA_BUFFER_TOO_SMALL, "bytes", lla_batch_init(v.r.context, &limits, memory, needed - 1, &batch, &error));
  FAILS(LLA_MISALIGNED, "memory", lla_batch_init(v.r.context, &limits, memory + 8, needed, &batch, &error));
  CHECK(batch == (lla_batch *)&v);
  for (bytes = 0; bytes < needed + 64; ++bytes) CHECK(memory[bytes] == 0x11);
  OK(lla_batch_init(v.r.context, &limits, memory, needed, &batch, &error));
  for (bytes = needed; bytes < needed + 64; ++bytes) CHECK(memory[bytes] == 0x11);
  free(memory);
  victim_close(&v);
}

/* The size never falls when a limit rises. */
static void sizes_are_monotonous(void **unused) {
  const lla_layer_desc descs[3] = {victim_mixer(), cell_desc(2, 2, 8, 8, 8), mamba2_desc(2, 1, 8, 8, 12, 8)};
  static const int64_t steps[6] = {0, 1, 2, 63, 64, 1000};
  int d, field, pass;
  (void)unused;
  for (d = 0; d < 3; ++d) {
    victim v;
    victim_open(&v, &descs[d]);
    for (field = 0; field < 5; ++field) {
      size_t last[4] = {0, 0, 0, 0};
      int i;
      for (i = 0; i < 6; ++i) {
        lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
        int64_t *const fields[5] = {&limits.max_sequences, &limits.max_rows, &limits.max_rows_per_sequence,
                                    &limits.max_length, &limits.max_snapshots};
        size_t now[4];
        limits.max_sequences = 3;
        limits.max_rows = 100;
        limits.max_rows_per_sequence = 50;
        limits.max_length = 100;
        if (steps[i] == 0 && (field == 2 || field == 3)) continue; /* 0 stands for a default there */
        *fields[field] = steps[i];
        OK(lla_batch_size(v.r.context, &limits, &now[0], NULL, &error));
        for (pass = LLA_PASS_FORWARD; pass <= LLA_PASS_BACKWARD; ++pass)
          OK(lla_layer_workspace(v.r.layer[0].layer, &limits, pass, &now[pass], NULL, &error));
        OK(lla_layer_saved_size(v.r.layer[0].layer, &limits, &now[3], NULL, &error));
        for (pass = 0; pass < 4; ++pass) {
          CHECK(now[pass] >= last[pass]);
          last[pass] = now[pass];
        }
      }
    }
    victim_close(&v);
  }
}

/* -- rows -------------------------------------------------------------------------------------------------------------- */

static void refused(victim *v, const lla_rows *rows, lla_status status, const char *word) {
  const lla_forward_args arguments = rig_forward_args(&v->r, 0);
  FAILS(status, word, lla_batch_plan(v->r.batch, v->r.state, rows, NULL, &error));
  FAILS(LLA_BUSY, "batch", lla_layer_forward(v->r.layer[0].layer, &arguments, &error));
}

static void rows_that_do_not_fit(void **unused) {
  const lla_layer_desc desc = victim_mixer();
  static int64_t slots[3] = {0, 1, 2}, outs[3] = {0, 1, 3}, offsets[4] = {0, 4, 8, 12}, counts[3] = {4, 4, 4};
  static int64_t positions[3] = {70, 10, 0}, one[1] = {0}, two[2] = {0, 0}, snapshot_slots[2] = {3, 3};
  static char bytes[64];
  victim v;
  lla_rows good = LLA_ROWS_INIT, rows;
  lla_index *const arrays[5] = {&rows.offsets, &rows.counts, &rows.slot_in, &rows.slot_out, &rows.expected_positions};
  static const char *const names[5] = {"offsets", "counts", "slot_in", "slot_out", "expected_positions"};
  int i;
  (void)unused;
  good.sequences = 3;
  good.offsets = index64(offsets);
  good.counts = index64(counts);
  good.slot_in = index64(slots);
  good.slot_out = index64(outs);
  good.expected_positions = index64(positions);
  victim_open(&v, &desc);
  OK(lla_batch_plan(v.r.batch, v.r.state, &good, NULL, &error));
  lla_batch_discard(v.r.batch);
#define BAD(field, value, status, word) \
  rows = good;                          \
  rows.field = (value);                 \
  refused(&v, &rows, status, word)
  BAD(sequences, -1, LLA_INVALID_ARGUMENT, "sequences");
  BAD(sequences, 4, LLA_INVALID_ARGUMENT, "sequences");
  BAD(sequences, INT64_MAX, LLA_INVALID_ARGUMENT, "sequences");
  BAD(total_rows, -1, LLA_INVALID_ARGUMENT, "total_rows");
  BAD(total_rows, 11, LLA_INVALID_ARGUMENT, "total_rows");
  BAD(total_rows, 81, LLA_INVALID_ARGUMENT, "total_rows");
  BAD(rows_per_sequence, -1, LLA_INVALID_ARGUMENT, "rows_per_sequence");
  BAD(snapshots, -1, LLA_INVALID_ARGUMENT, "snapshots");
  BAD(snapshots, 3, LLA_INVALID_ARGUMENT, "snapshots");
  BAD(snapshots, 1, LLA_NULL_POINTER, "snapshot_");
  for (i = 0; i < 5; ++i) {
    rows = good;
    arrays[i]->dtype = LLA_F32;
    refused(&v, &rows, LLA_DTYPE_MISMATCH, names[i]);
    rows = good;
    arrays[i]->dtype = 0;
    refused(&v, &rows, LLA_DTYPE_MISMATCH, names[i]);
    rows = good;
    arrays[i]->location = LLA_DEVICE;
    refused(&v, &rows, LLA_INVALID_ARGUMENT, names[i]);
    rows = good;
    arrays[i]->location = 2;
    refused(&v, &rows, LLA_INVALID_ARGUMENT, names[i]);
    rows = good;
    arrays[i]->data = bytes + 1;
    refused(&v, &rows, LLA_MISALIGNED, names[i]);
  }
  /* Uniform rows that do not fit into the limits, or overflow. */
  rows = good;
  rows.offsets = no_index();
  rows.counts = no_index();
  rows.rows_per_sequence = 27;
  refused(&v, &rows, LLA_INVALID_ARGUMENT, "rows_per_sequence");
  rows.rows_per_sequence = INT64_MAX;
  refused(&v, &rows, LLA_INVALID_ARGUMENT, "rows_per_sequence");

#define BAD_ENTRY(array, at, value, status, word) \
  do {                                            \
    const int64_t kept = array[at];               \
    array[at] = (value);                          \
    refused(&v, &good, status, word);             \
    array[at] = kept;                             \
  } while (0)
  BAD_ENTRY(offsets, 0, -1, LLA_INVALID_ARGUMENT, "offsets[0]");
  BAD_ENTRY(offsets, 1, 9, LLA_INVALID_ARGUMENT, "offsets[2]");
  BAD_ENTRY(offsets, 3, 81, LLA_INVALID_ARGUMENT, "rows");
  BAD_ENTRY(offsets, 3, INT64_MAX, LLA_INVALID_ARGUMENT, "rows");
  BAD_ENTRY(counts, 1, -1, LLA_INVALID_ARGUMENT, "counts[1]");
  BAD_ENTRY(counts, 1, 5, LLA_INVALID_ARGUMENT, "counts[1]");
  BAD_ENTRY(counts, 2, INT64_MAX, LLA_INVALID_ARGUMENT, "counts[2]");
  BAD_ENTRY(slots, 0, -2, LLA_INVALID_ARGUMENT, "slot_in[0]");
  BAD_ENTRY(slots, 0, VICTIM_SLOTS, LLA_INVALID_ARGUMENT, "slot_in[0]");
  BAD_ENTRY(slots, 2, INT64_MIN, LLA_INVALID_ARGUMENT, "slot_in[2]");
  BAD_ENTRY(outs, 0, -2, LLA_INVALID_ARGUMENT, "slot_out[0]");
  BAD_ENTRY(outs, 1, 4, LLA_INVALID_ARGUMENT, "slot_out[1]");
  BAD_ENTRY(outs, 1, 0, LLA_INVALID_ARGUMENT, "slot_out[1]"); /* named twice */
  BAD_ENTRY(outs, 2, 1, LLA_INVALID_ARGUMENT, "slot_out[2]");
  BAD_ENTRY(positions, 0, 69, LLA_POSITION_MISMATCH, "expected_positions[0]");
  BAD_ENTRY(positions, 2, -1, LLA_POSITION_MISMATCH, "expected_positions[2]");
  { /* A fork into a slot that is not empty. */
    static int64_t from[1] = {2}, to[1] = {1};
    rows = good;
    rows.sequences = 1;
    rows.slot_in = index64(from);
    rows.slot_out = index64(to);
    rows.expected_positions = no_index();
    refused(&v, &rows, LLA_SLOT_IN_USE, "slot_out[0]");
  }
  { /* Longer than the state's max_length, which is 128. */
    static int64_t from[1] = {0};
    rows = good;
    rows.sequences = 1;
    rows.slot_in = index64(from);
    rows.slot_out = rows.expected_positions = rows.offsets = rows.counts = no_index();
    rows.rows_per_sequence = 59;
    refused(&v, &rows, LLA_LEVELS_EXCEEDED, "");
  }
  /* Snapshots. */
  rows = good;
  rows.slot_out = no_index();
  rows.snapshots = 1;
  rows.snapshot_sequences = index64(one);
  rows.snapshot_rows = index64(one);
  rows.snapshot_slots = index64(snapshot_slots);
  OK(lla_batch_plan(v.r.batch, v.r.state, &rows, NULL, &error));
  lla_batch_discard(v.r.batch);
#define BAD_SNAPSHOT(array, value, status, word) \
  do {                                           \
    static const int64_t bad[1] = {value};       \
    lla_rows changed = rows;                     \
    changed.array = index64(bad);                \
    refused(&v, &changed, status, word);         \
  } while (0)
  BAD_SNAPSHOT(snapshot_sequences, -1, LLA_INVALID_ARGUMENT, "snapshot_sequences[0]");
  BAD_SNAPSHOT(snapshot_sequences, 3, LLA_INVALID_ARGUMENT, "snapshot_sequences[0]");
  BAD_SNAPSHOT(snapshot_rows, -1, LLA_INVALID_ARGUMENT, "snapshot_rows[0]");
  BAD_SNAPSHOT(snapshot_rows, 5, LLA_INVALID_ARGUMENT, "snapshot_rows[0]");
  BAD_SNAPSHOT(snapshot_slots, -1, LLA_INVALID_ARGUMENT, "snapshot_slots[0]");
  BAD_SNAPSHOT(snapshot_slots, 4, LLA_INVALID_ARGUMENT, "snapshot_slots[0]");
  BAD_SNAPSHOT(snapshot_slots, 1, LLA_INVALID_ARGUMENT, "snapshot_slots[0]");
  rows.snapshots = 2;
  rows.snapshot_sequences = rows.snapshot_rows = index64(two);
  refused(&v, &rows, LLA_INVALID_ARGUMENT, "snapshot_slots[1]"); /* the same slot twice */
  {                                                              /* Slots need a state, gradient slots a gradient state. */
    rows = good;
    FAILS(LLA_INVALID_ARGUMENT, "slot_in", lla_batch_plan(v.r.batch, NULL, &rows, NULL, &error));
    rows.final_gradient_slots = index64(slots);
    refused(&v, &rows, LLA_NULL_POINTER, "final_gradient_slots");
    rows = good;
    rows.initial_gradient_slots = index64(slots);
    refused(&v, &rows, LLA_NULL_POINTER, "initial_gradient_slots");
    rows = good;
    rows.gradient_state = v.r.state; /* not of the kind */
    refused(&v, &rows, LLA_STATE_INCOMPATIBLE, "gradient_state");
    FAILS(LLA_INVALID_ARGUMENT, "stream", lla_batch_plan(v.r.batch, v.r.state, &good, &v, &error));
  }
  victim_close(&v);
}

/* -- phases ------------------------------------------------------------------------------------------------------------ */

static void refused_calls(victim *v, lla_status status, const char *word) {
  const lla_forward_args forward = rig_forward_args(&v->r, 0);
  const lla_backward_args backward = rig_backward_args(&v->r, 0);
  lla_tasks *tasks = NULL;
  lla_layer *layer = v->r.layer[0].layer;
  FAILS(status, word, lla_layer_forward(layer, &forward, &error));
  FAILS(status, word, lla_layer_backward(layer, &backward, &error));
  FAILS(status, word, lla_layer_forward_tasks(layer, &forward, &tasks, &error));
  FAILS(status, word, lla_layer_backward_tasks(layer, &backward, &tasks, &error));
  FAILS(status, word, lla_state_commit(v->r.state, v->r.batch, no_index(), NULL, &error));
  CHECK(tasks == NULL);
}

static void phases(void **unused) {
  const lla_layer_desc desc = victim_mixer();
  const int64_t slot = 0, other = 2, nothing = 0;
  victim v;
  size_t bytes;
  (void)unused;
  victim_open(&v, &desc);
  OK(lla_batch_size(v.r.context, &v.r.limits, &bytes, NULL, &error));
  OK(lla_batch_init(v.r.context, &v.r.limits, v.r.batch_memory, bytes, &v.r.batch, &error));
  refused_calls(&v, LLA_BUSY, "batch"); /* not planned */
  FAILS(LLA_BUSY, "batch", lla_state_settle(v.r.state, v.r.batch, no_index(), NULL, &error));
  victim_plan(&v);
  FAILS(LLA_BUSY, "batch", lla_state_settle(v.r.state, v.r.batch, no_index(), NULL, &error)); /* not committed */
  rig_commit(&v.r, &nothing);
  refused_calls(&v, LLA_BUSY, "batch"); /* spent */
  OK(lla_state_settle(v.r.state, v.r.batch, index64(&nothing), NULL, &error));
  victim_check(&v);
  /* Slots that moved since. */
  victim_plan(&v);
  OK(lla_state_truncate(v.r.state, 0, 69, NULL, &error));
  refused_calls(&v, LLA_BUSY, "slot_in[0]");
  lla_batch_discard(v.r.batch);
  rig_fill(&v.r, 0, 1, 69, 1);
  rig_set_rows(&v.r, 1);
  OK(lla_append(v.r.layer[0].layer, v.r.state, 0, v.r.layer[0].io, v.r.layer[0].io_count, NULL, 0, NULL, &error));
  rig_set_rows(&v.r, VICTIM_ROWS);
  victim_remember(&v);
  victim_plan(&v);
  OK(lla_state_fork(v.r.state, index64(&slot), index64(&other), 1, NULL, &error)); /* the source does not move */
  {
    const lla_forward_args arguments = rig_forward_args(&v.r, 0);
    OK(lla_layer_forward(v.r.layer[0].layer, &arguments, &error));
  }
  OK(lla_state_fork(v.r.state, index64(&other), index64(&slot), 1, NULL, &error)); /* the same bits, but moved */
  refused_calls(&v, LLA_BUSY, "slot_in[0]");
  rig_reset(&v.r, 2);
  { /* An empty slot that was emptied again moved too. */
    lla_rows rows = LLA_ROWS_INIT;
    rows.sequences = 1;
    rows.rows_per_sequence = VICTIM_ROWS;
    rows.slot_in = index64(&other);
    rig_plan(&v.r, &rows);
    rig_reset(&v.r, 2);
    refused_calls(&v, LLA_BUSY, "slot_in[0]");
  }
  lla_batch_discard(v.r.batch);
  victim_remember(&v);
  victim_close(&v);
}

static void handles_that_do_not_belong_together(void **unused) {
  const lla_layer_desc desc = victim_mixer(), other_desc = mixer_desc(LLA_DELTA_RULE, 4, 2, 8, 8, 8);
  victim v, w;
  char *garbage;
  lla_batch *batch;
  lla_forward_args arguments;
  lla_layer *layer;
  int64_t accepted[1] = {5};
  (void)unused;
  victim_open(&v, &desc);
  victim_open(&w, &other_desc);
  layer = v.r.layer[0].layer;
  /* Memory that is no batch. */
  garbage = (char *)take(v.r.workspace_bytes);
  batch = (lla_batch *)garbage;
  {
    const lla_rows rows = LLA_ROWS_INIT;
    FAILS(LLA_INVALID_ARGUMENT, "batch", lla_batch_plan(batch, v.r.state, &rows, NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "batch", lla_state_commit(v.r.state, batch, no_index(), NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "batch", lla_state_settle(v.r.state, batch, no_index(), NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "batch", lla_state_commit(v.r.state, (lla_batch *)(garbage + 1), no_index(), NULL, &error));
    lla_batch_discard(batch);
  }
  arguments = rig_forward_args(&v.r, 0);
  arguments.batch = batch;
  FAILS(LLA_INVALID_ARGUMENT, "batch", lla_layer_forward(layer, &arguments, &error));
  free(garbage);
  /* Batch, state or layer of another context. */
  victim_plan(&v);
  victim_plan(&w);
  arguments = rig_forward_args(&v.r, 0);
  arguments.batch = w.r.batch;
  FAILS(LLA_WRONG_CONTEXT, "batch", lla_layer_forward(layer, &arguments, &error));
  arguments = rig_forward_args(&v.r, 0);
  arguments.state = w.r.state;
  FAILS(LLA_WRONG_CONTEXT, "state", lla_layer_forward(layer, &arguments, &error));
  arguments = rig_forward_args(&v.r, 0);
  FAILS(LLA_WRONG_CONTEXT, "batch", lla_layer_forward(w.r.layer[0].layer, &arguments, &error));
  {
    const lla_rows rows = LLA_ROWS_INIT;
    lla_rows gradient = LLA_ROWS_INIT;
    lla_layer *group[2];
    lla_state *state = NULL;
    lla_block_geometry geometry = LLA_BLOCK_GEOMETRY_INIT;
    FAILS(LLA_WRONG_CONTEXT, "state", lla_batch_plan(v.r.batch, w.r.state, &rows, NULL, &error));
    gradient.gradient_state = w.r.state;
    FAILS(LLA_WRONG_CONTEXT, "gradient_state", lla_batch_plan(v.r.batch, v.r.state, &gradient, NULL, &error));
    group[0] = v.r.layer[0].layer;
    group[1] = w.r.layer[0].layer;
    FAILS(LLA_WRONG_CONTEXT, "layers[1]", lla_state_create(group, 2, NULL, NULL, 0, &state, &error));
    FAILS(LLA_WRONG_CONTEXT, "layers[1]", lla_state_geometry(group, 2, NULL, 0, 0, &geometry, &error));
    FAILS(LLA_WRONG_CONTEXT, "state",
          lla_append(layer, w.r.state, 0, v.r.layer[0].io, v.r.layer[0].io_count, NULL, 0, NULL, &error));
  }
  /* The right context, but another state or layer. */
  victim_plan(&v);
  {
    lla_state *twin = NULL;
    lla_layer *stranger = NULL;
    lla_forward_args wrong = rig_forward_args(&v.r, 0);
    OK(lla_state_create(&layer, 1, NULL, NULL, 0, &twin, &error));
    wrong.state = twin;
    FAILS(LLA_STATE_INCOMPATIBLE, "batch", lla_layer_forward(layer, &wrong, &error));
    FAILS(LLA_STATE_INCOMPATIBLE, "batch", lla_state_commit(twin, v.r.batch, no_index(), NULL, &error));
    wrong.state = NULL;
    FAILS(LLA_STATE_INCOMPATIBLE, "batch", lla_layer_forward(layer, &wrong, &error));
    wrong = rig_forward_args(&v.r, 0);
    wrong.layer_index = 1;
    FAILS(LLA_INVALID_ARGUMENT, "layer_index", lla_layer_forward(layer, &wrong, &error));
    wrong.layer_index = -1;
    FAILS(LLA_INVALID_ARGUMENT, "layer_index", lla_layer_forward(layer, &wrong, &error));
    OK(lla_layer_create(v.r.context, &other_desc, &stranger, &error));
    wrong = rig_forward_args(&v.r, 0);
    FAILS(LLA_STATE_INCOMPATIBLE, "state", lla_layer_forward(stranger, &wrong, &error));
    FAILS(LLA_STATE_INCOMPATIBLE, "state",
          lla_append(stranger, v.r.state, 1, v.r.layer[0].io, v.r.layer[0].io_count, NULL, 0, NULL, &error));
    lla_state_release(twin);
    lla_layer_release(stranger);
  }
  /* Counts of accepted rows. */
  FAILS(LLA_INVALID_ARGUMENT, "accepted[0]", lla_state_commit(v.r.state, v.r.batch, index64(accepted), NULL, &error));
  accepted[0] = -1;
  FAILS(LLA_INVALID_ARGUMENT, "accepted[0]", lla_state_commit(v.r.state, v.r.batch, index64(accepted), NULL, &error));
  accepted[0] = 0;
  {
    lla_index index = index64(accepted);
    index.dtype = LLA_BF16;
    FAILS(LLA_DTYPE_MISMATCH, "accepted", lla_state_commit(v.r.state, v.r.batch, index, NULL, &error));
    index = index64(accepted);
    index.location = LLA_DEVICE;
    FAILS(LLA_INVALID_ARGUMENT, "accepted", lla_state_commit(v.r.state, v.r.batch, index, NULL, &error));
  }
  FAILS(LLA_INVALID_ARGUMENT, "stream", lla_state_commit(v.r.state, v.r.batch, no_index(), &v, &error));
  lla_batch_discard(w.r.batch);
  victim_close(&w);
  victim_close(&v);
}

static void appends(void **unused) {
  const lla_layer_desc desc = victim_mixer();
  victim v;
  lla_binding io[RIG_IO];
  lla_layer *layer, *group[2];
  lla_state *both = NULL;
  int64_t count;
  (void)unused;
  victim_open(&v, &desc);
  layer = v.r.layer[0].layer;
  count = v.r.layer[0].io_count;
  memcpy(io, v.r.layer[0].io, sizeof io);
  FAILS(LLA_INVALID_ARGUMENT, "slot", lla_append(layer, v.r.state, -1, io, count, NULL, 0, NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "slot", lla_append(layer, v.r.state, VICTIM_SLOTS, io, count, NULL, 0, NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "io_count", lla_append(layer, v.r.state, 0, io, -1, NULL, 0, NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "weight_count", lla_append(layer, v.r.state, 0, io, count, NULL, -1, NULL, &error));
  FAILS(LLA_MISSING_ROLE, "LLA_Q", lla_append(layer, v.r.state, 0, io + 1, count - 1, NULL, 0, NULL, &error));
  FAILS(LLA_MISSING_ROLE, "LLA_Y", lla_append(layer, v.r.state, 0, io, count - 1, NULL, 0, NULL, &error));
  io[0].tensor.dims[0] = -1;
  FAILS(LLA_SHAPE_MISMATCH, "LLA_Q", lla_append(layer, v.r.state, 0, io, count, NULL, 0, NULL, &error));
  io[0].tensor.dims[0] = INT64_MAX;
  CHECK(lla_append(layer, v.r.state, 0, io, count, NULL, 0, NULL, NULL) != LLA_OK);
  io[0].tensor.dims[0] = (int64_t)1 << 40;
  CHECK(lla_append(layer, v.r.state, 0, io, count, NULL, 0, NULL, NULL) != LLA_OK);
  io[0].tensor.dims[0] = VICTIM_ROWS;
  io[0].tensor.rank = 2;
  FAILS(LLA_SHAPE_MISMATCH, "LLA_Q", lla_append(layer, v.r.state, 0, io, count, NULL, 0, NULL, &error));
  io[0] = v.r.layer[0].io[0];
  io[2].tensor.dims[0] = VICTIM_ROWS + 1;
  FAILS(LLA_SHAPE_MISMATCH, "LLA_V", lla_append(layer, v.r.state, 0, io, count, NULL, 0, NULL, &error));
  io[2] = v.r.layer[0].io[2];
  { /* [B, N, ...] of more than one sequence */
    lla_binding batched[RIG_IO];
    int64_t i, d;
    for (i = 0; i < count; ++i) {
      lla_tensor *t = &batched[i].tensor;
      batched[i] = io[i];
      for (d = t->rank; d > 0; --d) {
        t->dims[d] = t->dims[d - 1];
        t->strides[d] = t->strides[d - 1];
      }
      ++t->rank;
      t->dims[0] = 2;
      t->dims[1] = VICTIM_ROWS / 2;
      t->strides[0] = t->strides[1] * 2;
    }
    FAILS(LLA_SHAPE_MISMATCH, "LLA_Q", lla_append(layer, v.r.state, 0, batched, count, NULL, 0, NULL, &error));
  }
  group[0] = group[1] = layer;
  OK(lla_state_create(group, 2, NULL, NULL, 0, &both, &error));
  FAILS(LLA_STATE_INCOMPATIBLE, "state", lla_append(layer, both, 0, io, count, NULL, 0, NULL, &error));
  lla_state_release(both);
  victim_close(&v);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(limits_and_memory),
                                     cmocka_unit_test(sizes_are_monotonous),
                                     cmocka_unit_test(rows_that_do_not_fit),
                                     cmocka_unit_test(phases),
                                     cmocka_unit_test(handles_that_do_not_belong_together),
                                     cmocka_unit_test(appends)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
