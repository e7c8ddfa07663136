/* SPDX-License-Identifier: Apache-2.0 */
/* What a server does, on a group of four layers (scalar gate, delta rule, linear, cell): ragged batches, drafts, an
 * exhausted pool, the longest sequence, empty sequences. Compared bit by bit where the rows of a
 * sequence come in the same way, and closely where they do not. */
#include <math.h>

#include "serving.h"

/* -- ragged batches ---------------------------------------------------------------------------------------------------- */

static void check_ragged(rig *r, const int64_t *slots, const int64_t *counts, int64_t sequences, const int64_t *seeds) {
  int64_t offsets[8] = {0}, twins[8], b, total;
  lla_rows rows = LLA_ROWS_INIT;
  size_t bystander_bytes;
  void *bystander = rig_pack(r, 15, &bystander_bytes);
  char *expected[8] = {NULL};
  size_t bytes;
  for (b = 0; b < sequences; ++b) offsets[b + 1] = offsets[b] + counts[b];
  total = offsets[sequences] + 3;   /* slack rows at the end */
  for (b = 0; b < sequences; ++b) { /* each alone, in a twin of its slot */
    if (slots[b] < 0) continue;
    twins[b] = slots[b] + 8;
    rig_reset(r, twins[b]);
    copy_slot(r, slots[b], twins[b]);
    rig_append(r, twins[b], (uint64_t)seeds[b], counts[b]);
    expected[b] = keep_outputs(r, 0, counts[b], &bytes);
  }
  rig_set_rows(r, total);
  for (b = 0; b < sequences; ++b)
    rig_fill(r, offsets[b], (uint64_t)seeds[b], slots[b] < 0 ? 0 : rig_length(r, slots[b]), counts[b]);
  rows.sequences = sequences;
  rows.total_rows = total;
  rows.offsets = index64(offsets);
  rows.slot_in = index64(slots);
  rig_plan(r, &rows);
  rig_forward(r);
  for (b = 0; b < 3; ++b) check_zero_row(r, total - 3 + b);
  for (b = 0; b < sequences; ++b) {
    int64_t k;
    if (slots[b] >= 0)
      check_outputs(r, offsets[b], counts[b], expected[b], "row of a ragged batch against the sequence alone");
    for (k = 0; slots[b] < 0 && k < counts[b]; ++k) check_zero_row(r, offsets[b] + k);
  }
  rig_commit(r, NULL);
  for (b = 0; b < sequences; ++b) {
    if (slots[b] >= 0) rig_check_same_slot(r, slots[b], r, twins[b], "slot of a ragged batch against the sequence alone");
    free(expected[b]);
  }
  {
    size_t now_bytes;
    void *now = rig_pack(r, 15, &now_bytes);
    CHECK(now_bytes == bystander_bytes);
    check_equal_bytes(now, bystander, now_bytes, "slot that no call named");
    free(now);
  }
  free(bystander);
}

/* Probes D11, G1, G2, G3, L2, S2, S3, S9, S10. */
static void ragged_batches(void **unused) {
  static const int64_t lengths[5] = {0, 1, 63, 64, 5000};
  static const int64_t slots[6] = {0, 1, -1, 2, 3, 4}, seeds[6] = {10, 11, 99, 12, 13, 14};
  static const int64_t ones[6] = {1, 1, 1, 1, 1, 1}, mixed[6] = {130, 1, 5, 2, 64, 7};
  rig r;
  int64_t i;
  (void)unused;
  open_group(&r, 16, 0, 6, 512, 0);
  for (i = 0; i < 5; ++i) rig_append_to(&r, i, (uint64_t)(10 + i), lengths[i], 512);
  rig_append_to(&r, 15, 20, 200, 512);
  check_ragged(&r, slots, ones, 6, seeds);
  check_ragged(&r, slots, ones, 6, seeds);
  check_ragged(&r, slots, mixed, 6, seeds);
  check_ragged(&r, slots, ones, 6, seeds);
  rig_close(&r);
}

/* -- drafts ------------------------------------------------------------------------------------------------------------ */

enum { kBase, kDraft, kPlain };

static void check_drafts_from(int64_t start) {
  rig r;
  void *image[18];
  size_t image_bytes[18], bytes;
  char *output[18];
  int64_t i, rows, accepted;
  open_group(&r, 3, 0, 1, 64, 0);
  rig_append_to(&r, kBase, 5, start, 64);
  copy_slot(&r, kBase, kPlain);
  for (i = 0; i <= 17; ++i) { /* plain decode: image[i] after i more rows, output[i] of row start + i */
    image[i] = rig_pack(&r, kPlain, &image_bytes[i]);
    rig_append(&r, kPlain, 5, 1);
    output[i] = keep_outputs(&r, 0, 1, &bytes);
  }
  for (rows = 1; rows <= 16; ++rows) {
    for (accepted = 0; accepted <= rows; ++accepted) {
      size_t now_bytes;
      void *now;
      rig_reset(&r, kDraft);
      copy_slot(&r, kBase, kDraft);
      rig_run(&r, kDraft, 5, rows);
      if (accepted < rows) { /* the same again, with a wrong guess after the accepted rows: the first plan is dropped */
        rig_run(&r, kDraft, 5, rows);
        rig_fill(&r, accepted, 1234, start + accepted, rows - accepted);
        rig_forward(&r);
      }
      CHECK(rig_length(&r, kDraft) == start);
      rig_commit(&r, &accepted);
      CHECK(rig_length(&r, kDraft) == start + accepted);
      now = rig_pack(&r, kDraft, &now_bytes);
      if (now_bytes != image_bytes[accepted]) fail_msg("%d of %d rows: size", (int)accepted, (int)rows);
      check_equal_bytes(now, image[accepted], now_bytes, "state after a draft against plain decode");
      free(now);
      rig_append(&r, kDraft, 5, 1);
      check_outputs(&r, 0, 1, output[accepted], "token after a draft against plain decode");
      now = rig_pack(&r, kDraft, &now_bytes);
      CHECK(now_bytes == image_bytes[accepted + 1]);
      check_equal_bytes(now, image[accepted + 1], now_bytes, "state one token later");
      free(now);
    }
  }
  for (i = 0; i <= 17; ++i) {
    free(image[i]);
    free(output[i]);
  }
  rig_close(&r);
}

/* Probe H3. */
static void drafts(void **unused) {
  (void)unused;
  check_drafts_from(0);
  check_drafts_from(56);  /* across the first border */
  check_drafts_from(120); /* across a carry */
  check_drafts_from(250);
}

/* One call, pieces of any length, and token by token end in the same bits, and the next token reads the same. */
/* Probe A3. */
static void every_way_of_cutting(void **unused) {
  static const int64_t pieces[5] = {1, 7, 64, 100, 330};
  rig r;
  char *expected = NULL;
  size_t bytes;
  int64_t i;
  (void)unused;
  open_group(&r, 5, 0, 1, 330, 0);
  for (i = 0; i < 5; ++i) rig_append_to(&r, i, 5, 330, pieces[i]);
  for (i = 1; i < 5; ++i) rig_check_same_slot(&r, i, &r, 0, "slot by way of cutting");
  for (i = 0; i < 5; ++i) {
    rig_append(&r, i, 5, 1);
    if (!expected) expected = keep_outputs(&r, 0, 1, &bytes);
    check_outputs(&r, 0, 1, expected, "next token by way of cutting");
  }
  free(expected);
  rig_close(&r);
}

static void long_appends_are_accepted_whole_or_not_at_all(void **unused) {
  rig r;
  int64_t accepted;
  size_t bytes;
  void *before;
  (void)unused;
  open_group(&r, 1, 0, 1, 256, 0);
  rig_append_to(&r, 0, 5, 40, 64);
  before = rig_pack(&r, 0, &bytes);
  rig_run(&r, 0, 5, 100);
  accepted = 99;
  FAILS(LLA_INVALID_ARGUMENT, "accepted", lla_state_commit(r.state, r.batch, index64(&accepted), NULL, &error));
  accepted = 101;
  FAILS(LLA_INVALID_ARGUMENT, "accepted", lla_state_commit(r.state, r.batch, index64(&accepted), NULL, &error));
  accepted = -1;
  FAILS(LLA_INVALID_ARGUMENT, "accepted", lla_state_commit(r.state, r.batch, index64(&accepted), NULL, &error));
  CHECK(rig_length(&r, 0) == 40);
  accepted = 0;
  rig_commit(&r, &accepted);
  {
    size_t now_bytes;
    void *now = rig_pack(&r, 0, &now_bytes);
    CHECK(now_bytes == bytes);
    check_equal_bytes(now, before, bytes, "state after accepting nothing");
    free(now);
  }
  rig_run(&r, 0, 5, 100);
  accepted = 100;
  rig_commit(&r, &accepted);
  CHECK(rig_length(&r, 0) == 140);
  free(before);
  rig_close(&r);
}

/* lla_append() is plan, forward and commit; [1, N, ...] is [N, ...]; no rows change nothing. */
/* Probe F3. */
static void appends_in_one_call(void **unused) {
  const lla_layer_desc descs[3] = {mixer_desc(LLA_SCALAR_GATE, 3, 1, 12, 20, 8), cell_desc(2, 2, 8, 16, 8),
                                   mamba2_desc(2, 1, 8, 8, 12, 8)};
  lla_state_desc state = LLA_STATE_DESC_INIT;
  int d, batched;
  (void)unused;
  state.slots = 3;
  for (d = 0; d < 3; ++d) {
    rig r;
    rig_layer *l = &r.layer[0];
    rig_open(&r, NULL, &descs[d], 1, &state, 1, 70, 0);
    rig_append(&r, 0, 5, 70);
    rig_append(&r, 0, 5, 1);
    for (batched = 0; batched < 2; ++batched) {
      lla_binding io[RIG_IO];
      int64_t rows, i, k;
      for (rows = 70; rows >= 0; rows = rows == 70 ? 1 : rows - 1) {
        rig_set_rows(&r, rows);
        rig_fill(&r, 0, 5, rig_length(&r, 1 + batched), rows);
        memcpy(io, l->io, sizeof io);
        for (i = 0; batched && i < l->io_count; ++i) {
          lla_tensor *t = &io[i].tensor;
          for (k = t->rank++; k > 0; --k) {
            t->dims[k] = t->dims[k - 1];
            t->strides[k] = t->strides[k - 1];
          }
          t->dims[0] = 1;
        }
        OK(lla_append(l->layer, r.state, 1 + batched, io, l->io_count, l->weight, l->weight_count, NULL, &error));
      }
      rig_check_same_slot(&r, 1 + batched, &r, 0, "slot that lla_append() filled");
    }
    rig_close(&r);
  }
}

/* -- limits ------------------------------------------------------------------------------------------------------------ */

static void an_exhausted_pool_changes_nothing(void **unused) {
  rig r;
  lla_rows rows = LLA_ROWS_INIT;
  static const int64_t slots[2] = {0, 1};
  int64_t blocks, i;
  size_t bytes[2], now_bytes;
  void *before[2], *now;
  (void)unused;
  open_group(&r, 2, 6, 2, 512, 0);
  blocks = rig_query(&r, LLA_STATE_FREE_NODE_BLOCKS, 0);
  CHECK(blocks == 6);
  rig_append(&r, 0, 1, 70);
  rig_append(&r, 1, 2, 10);
  blocks = rig_query(&r, LLA_STATE_FREE_NODE_BLOCKS, 0);
  for (i = 0; i < 2; ++i) before[i] = rig_pack(&r, i, &bytes[i]);
  rows.sequences = 2;
  rows.rows_per_sequence = 250;
  rows.slot_in = index64(slots);
  rig_set_rows(&r, 500);
  FAILS(LLA_NO_BLOCKS, "", lla_batch_plan(r.batch, r.state, &rows, NULL, &error));
  CHECK(rig_query(&r, LLA_STATE_FREE_NODE_BLOCKS, 0) == blocks);
  {
    const lla_forward_args arguments = rig_forward_args(&r, 0);
    FAILS(LLA_BUSY, "batch", lla_layer_forward(r.layer[0].layer, &arguments, &error));
  }
  FAILS(LLA_BUSY, "batch", lla_state_commit(r.state, r.batch, no_index(), NULL, &error));
  for (i = 0; i < 2; ++i) {
    now = rig_pack(&r, i, &now_bytes);
    CHECK(now_bytes == bytes[i]);
    check_equal_bytes(now, before[i], now_bytes, "slot after a refused plan");
    free(now);
    free(before[i]);
  }
  /* A plan that is dropped or made again gives its blocks back. */
  for (i = 0; i < 20; ++i) rig_run(&r, 0, 1, 100);
  lla_batch_discard(r.batch);
  CHECK(rig_query(&r, LLA_STATE_FREE_NODE_BLOCKS, 0) == blocks);
  rig_append(&r, 0, 1, 20);
  rig_reset(&r, 0);
  rig_reset(&r, 1);
  CHECK(rig_query(&r, LLA_STATE_FREE_NODE_BLOCKS, 0) == 6);
  rig_close(&r);
}

static void lengths_are_limited(void **unused) {
  rig r;
  const int64_t slot = 0, at = LONGEST - 3;
  lla_rows rows = LLA_ROWS_INIT;
  (void)unused;
  open_group(&r, 1, 0, 1, 64, 0);
  OK(lla_state_reset(r.state, index64(&slot), 1, index64(&at), NULL, &error));
  CHECK(rig_length(&r, 0) == at);
  rows.sequences = 1;
  rows.rows_per_sequence = 4;
  FAILS(LLA_LEVELS_EXCEEDED, "", lla_batch_plan(r.batch, r.state, &rows, NULL, &error));
  rig_append(&r, 0, 1, 3);
  rows.rows_per_sequence = 1;
  FAILS(LLA_LEVELS_EXCEEDED, "", lla_batch_plan(r.batch, r.state, &rows, NULL, &error));
  CHECK(rig_length(&r, 0) == LONGEST);
  rig_close(&r);
}

/* Probes D1, D2. */
static void empty_sequences(void **unused) {
  static const int64_t slots[4] = {0, 1, 2, 3}, offsets[5] = {0, 0, 5, 5, 70}, nothing[5] = {0, 0, 0, 0, 0};
  static const int64_t snapshot_sequence = 0, snapshot_row = 0, snapshot_slot = 9;
  rig r;
  lla_rows rows = LLA_ROWS_INIT;
  int64_t i;
  (void)unused;
  open_group(&r, 10, 0, 4, 128, 1);
  for (i = 0; i < 4; ++i) {
    rig_append_to(&r, i, (uint64_t)i + 1, 60 + i, 128);
    copy_slot(&r, i, i + 4);
  }
  rows.sequences = 4;
  rows.offsets = index64(offsets);
  rows.slot_in = index64(slots);
  rows.snapshots = 1;
  rows.snapshot_sequences = index64(&snapshot_sequence);
  rows.snapshot_rows = index64(&snapshot_row);
  rows.snapshot_slots = index64(&snapshot_slot);
  rig_set_rows(&r, 70);
  rig_fill(&r, 0, 2, 61, 5);
  rig_fill(&r, 5, 4, 63, 65);
  rig_plan(&r, &rows);
  rig_forward(&r);
  rig_commit(&r, NULL);
  rig_append(&r, 5, 2, 5);
  rig_append(&r, 7, 4, 65);
  for (i = 0; i < 4; ++i) rig_check_same_slot(&r, i, &r, i + 4, "slot of a batch with empty sequences");
  rig_check_same_slot(&r, 0, &r, 9, "snapshot of an empty append");
  /* All empty, with tensors of no rows and no memory; and no sequence at all. */
  rows.offsets = index64(nothing);
  rows.snapshots = 0;
  rig_set_rows(&r, 0);
  rig_plan(&r, &rows);
  rig_forward(&r);
  {
    lla_binding io[RIG_IO];
    lla_forward_args arguments = rig_forward_args(&r, 0);
    memcpy(io, arguments.io, sizeof io);
    for (i = 0; i < arguments.io_count; ++i) io[i].tensor.data = NULL;
    arguments.io = io;
    OK(lla_layer_forward(r.layer[0].layer, &arguments, &error));
  }
  rig_commit(&r, NULL);
  for (i = 0; i < 4; ++i) rig_check_same_slot(&r, i, &r, i + 4, "slot of an empty batch");
  {
    const lla_rows none = LLA_ROWS_INIT;
    rig_plan(&r, &none);
    rig_forward(&r);
    rig_commit(&r, NULL);
  }
  for (i = 0; i < 4; ++i) rig_check_same_slot(&r, i, &r, i + 4, "slot that no batch named");
  rig_close(&r);
}

/* Outputs of all layers for a row, close to kept ones: rounding may differ where rows came in otherwise. */
static void check_close_outputs(const rig *r, int64_t row, const char *expected, const char *what) {
  size_t bytes, i;
  char *now = keep_outputs(r, row, 1, &bytes);
  for (i = 0; i < bytes; i += sizeof(float)) {
    float x, y;
    memcpy(&x, now + i, sizeof x);
    memcpy(&y, expected + i, sizeof y);
    if (!(fabsf(x - y) <= 1e-5f * (1 + fabsf(y)))) stop_test("%s: number %zu is %g, not %g", what, i / sizeof(float), x, y);
  }
  free(now);
}

/* Lengths at which chunks merge, all up to 33 chunks, and their neighbours: a prompt of that length, then one row, is what one
 * long prompt gives; so is decoding all the way. */
/* Probes A4, F7, S1. */
static void every_carry(void **unused) {
  enum { kRows = 33 * 64 + 2 };
  rig whole, pieces, decode;
  int64_t length, chunk;
  size_t bytes;
  char *expected;
  (void)unused;
  open_group(&whole, 1, 0, 1, kRows, 0);
  open_group(&pieces, 1, 0, 1, kRows, 0);
  open_group(&decode, 1, 0, 1, 64, 0);
  rig_append(&whole, 0, 5, kRows);
  for (length = 0; length < kRows; ++length) {
    rig_append(&decode, 0, 5, 1);
    expected = keep_outputs(&whole, length, 1, &bytes);
    check_close_outputs(&decode, 0, expected, "a decoded row against one prompt");
    free(expected);
  }
  for (chunk = 1; chunk <= 33; ++chunk) {
    for (length = 64 * chunk - 1; length <= 64 * chunk + 1; ++length) {
      rig_reset(&pieces, 0);
      rig_append(&pieces, 0, 5, length);
      rig_append(&pieces, 0, 5, 1);
      expected = keep_outputs(&whole, length, 1, &bytes);
      check_close_outputs(&pieces, 0, expected, "the row after a prompt");
      free(expected);
    }
  }
  rig_close(&whole);
  rig_close(&pieces);
  rig_close(&decode);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(ragged_batches),
                                     cmocka_unit_test(drafts),
                                     cmocka_unit_test(every_way_of_cutting),
                                     cmocka_unit_test(appends_in_one_call),
                                     cmocka_unit_test(long_appends_are_accepted_whole_or_not_at_all),
                                     cmocka_unit_test(an_exhausted_pool_changes_nothing),
                                     cmocka_unit_test(lengths_are_limited),
                                     cmocka_unit_test(empty_sequences),
                                     cmocka_unit_test(every_carry)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
