/* SPDX-License-Identifier: Apache-2.0 */
/* Histories of slots, on a group of four layers (scalar gate, delta rule, linear, cell): forks, snapshots, roll-back, reuse,
 * saving and loading. Everything is compared bit by bit. */
#include <math.h>

#include "serving.h"

/* -- forks and snapshots ----------------------------------------------------------------------------------------------- */

/* Probe H11. */
static void forks(void **unused) {
  static const int64_t starts[4] = {0, 37, 64, 190};
  int64_t s;
  (void)unused;
  for (s = 0; s < 4; ++s) {
    rig r;
    const int64_t in = 0, out = 1, start = starts[s];
    int64_t swap_from[2] = {0, 1}, swap_to[2] = {1, 0};
    lla_rows rows = LLA_ROWS_INIT;
    size_t bytes;
    char *expected;
    open_group(&r, 4, 0, 1, 64, 0);
    rig_append_to(&r, 0, 5, start, 64);
    copy_slot(&r, 0, 2);
    rig_check_same_slot(&r, 0, &r, 2, "copy");
    rig_append(&r, 2, 6, 10);
    expected = keep_outputs(&r, 0, 10, &bytes);
    rows.sequences = 1;
    rows.rows_per_sequence = 10;
    rows.slot_in = index64(&in);
    rows.slot_out = index64(&out);
    rig_set_rows(&r, 10);
    rig_fill(&r, 0, 6, start, 10);
    rig_plan(&r, &rows);
    rig_forward(&r);
    check_outputs(&r, 0, 10, expected, "outputs of a fork by slot_out");
    CHECK(rig_length(&r, 1) == 0);
    rig_commit(&r, NULL);
    CHECK(rig_length(&r, 0) == start && rig_length(&r, 1) == start + 10);
    rig_check_same_slot(&r, 1, &r, 2, "fork by slot_out against copy and append");
    FAILS(LLA_SLOT_IN_USE, "slot_out", lla_batch_plan(r.batch, r.state, &rows, NULL, &error));
    /* Both ways at once: all sources are read as they were. */
    copy_slot(&r, 0, 3);
    OK(lla_state_fork(r.state, index64(swap_from), index64(swap_to), 2, NULL, &error));
    rig_check_same_slot(&r, 1, &r, 3, "swapped slot");
    rig_check_same_slot(&r, 0, &r, 2, "swapped slot");
    /* Both branches go on independently across borders and agree with each other. */
    rig_append_to(&r, 0, 6, start + 150, 16);
    rig_append_to(&r, 2, 6, start + 150, 50);
    rig_check_same_slot(&r, 0, &r, 2, "branches that went the same way");
    rig_check_same_slot(&r, 1, &r, 3, "origin of branches");
    free(expected);
    rig_close(&r);
  }
}

static void check_snapshots_from(int64_t start) {
  static const int64_t at[7] = {0, 1, 63, 64, 100, 128, 130};
  static const int64_t sequence[7] = {0, 0, 0, 0, 0, 0, 0};
  const int64_t slot = 0;
  int64_t slots[7], i;
  lla_rows rows = LLA_ROWS_INIT;
  rig r;
  open_group(&r, 16, 0, 1, 160, 7);
  rig_append_to(&r, 0, 8, start, 64);
  for (i = 0; i < 7; ++i) {
    slots[i] = i + 1;
    if (start > 0) copy_slot(&r, 0, 8 + i);
  }
  rows.sequences = 1;
  rows.rows_per_sequence = 130;
  rows.slot_in = index64(&slot);
  rows.snapshots = 7;
  rows.snapshot_sequences = index64(sequence);
  rows.snapshot_rows = index64(at);
  rows.snapshot_slots = index64(slots);
  rig_set_rows(&r, 130);
  rig_fill(&r, 0, 8, start, 130);
  rig_plan(&r, &rows);
  rig_forward(&r);
  for (i = 0; i < 7; ++i) CHECK(rig_length(&r, slots[i]) == 0);
  rig_commit(&r, NULL);
  for (i = 0; i < 7; ++i) {
    if (at[i] > 0) rig_append(&r, 8 + i, 8, at[i]);
    CHECK(rig_length(&r, slots[i]) == start + at[i]);
    rig_check_same_slot(&r, slots[i], &r, 8 + i, "snapshot against stopping there");
  }
  rig_check_same_slot(&r, 0, &r, 7, "snapshot at the end against the slot");
  for (i = 0; i < 7; ++i) {
    size_t bytes;
    char *expected;
    rig_append(&r, 8 + i, 9, 70);
    expected = keep_outputs(&r, 0, 70, &bytes);
    rig_append(&r, slots[i], 9, 70);
    check_outputs(&r, 0, 70, expected, "rows after a snapshot");
    rig_check_same_slot(&r, slots[i], &r, 8 + i, "snapshot that went on");
    free(expected);
  }
  rig_close(&r);
}

/* Probes H7, H12. */
static void snapshots(void **unused) {
  (void)unused;
  check_snapshots_from(0);
  check_snapshots_from(37);
  check_snapshots_from(128);
}

/* A snapshot that lies beyond the accepted rows does not come into being. */
static void snapshots_of_rejected_rows(void **unused) {
  static const int64_t at[3] = {2, 9, 10}, sequence[3] = {0, 0, 0}, slots[3] = {1, 2, 3};
  const int64_t slot = 0, accepted = 9;
  lla_rows rows = LLA_ROWS_INIT;
  rig r;
  int64_t free_before;
  (void)unused;
  open_group(&r, 5, 0, 1, 64, 3);
  rig_append_to(&r, 0, 8, 60, 64);
  copy_slot(&r, 0, 4);
  free_before = rig_query(&r, LLA_STATE_FREE_NODE_BLOCKS, 0);
  rows.sequences = 1;
  rows.rows_per_sequence = 16;
  rows.slot_in = index64(&slot);
  rows.snapshots = 3;
  rows.snapshot_sequences = index64(sequence);
  rows.snapshot_rows = index64(at);
  rows.snapshot_slots = index64(slots);
  rig_set_rows(&r, 16);
  rig_fill(&r, 0, 8, 60, 16);
  rig_plan(&r, &rows);
  rig_forward(&r);
  rig_commit(&r, &accepted);
  CHECK(rig_length(&r, 0) == 69 && rig_length(&r, 1) == 62 && rig_length(&r, 2) == 69 && rig_length(&r, 3) == 0);
  rig_append(&r, 4, 8, 2);
  rig_check_same_slot(&r, 1, &r, 4, "snapshot before the border");
  rig_append(&r, 4, 8, 7);
  rig_check_same_slot(&r, 2, &r, 4, "snapshot behind the border");
  rig_check_same_slot(&r, 0, &r, 4, "slot");
  OK(lla_state_reset(r.state, no_index(), 0, no_index(), NULL, &error));
  CHECK(rig_query(&r, LLA_STATE_FREE_NODE_BLOCKS, 0) >= free_before);
  CHECK(rig_query(&r, LLA_STATE_FREE_NODE_BLOCKS, 0) == rig_query(&r, LLA_STATE_NODE_BLOCKS, 0));
  rig_close(&r);
}

/* -- roll-back, reuse, save -------------------------------------------------------------------------------------------- */

/* Probe H5. */
static void truncation(void **unused) {
  rig r;
  int64_t position, lowest;
  size_t bytes, now_bytes;
  void *before, *now;
  (void)unused;
  open_group(&r, 3, 0, 1, 128, 0);
  for (position = 150; position >= 128; position -= 11) {
    rig_reset(&r, 0);
    rig_reset(&r, 1);
    rig_append_to(&r, 0, 4, 150, 128);
    rig_append_to(&r, 1, 4, position, 128);
    OK(lla_state_truncate(r.state, 0, position, NULL, &error));
    CHECK(rig_length(&r, 0) == position);
    rig_check_same_slot(&r, 0, &r, 1, "truncated against never having gone there");
    rig_append(&r, 0, 3, 70);
    rig_append(&r, 1, 3, 70);
    rig_check_same_slot(&r, 0, &r, 1, "truncated, then gone on");
  }
  rig_reset(&r, 0);
  rig_append_to(&r, 0, 4, 150, 128);
  OK(lla_state_min_length(r.state, 0, &lowest, &error));
  CHECK(lowest == 128);
  before = rig_pack(&r, 0, &bytes);
  FAILS(LLA_ROLLBACK_LIMIT, "", lla_state_truncate(r.state, 0, 127, NULL, &error));
  FAILS(LLA_ROLLBACK_LIMIT, "", lla_state_truncate(r.state, 0, 0, NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "position", lla_state_truncate(r.state, 0, 151, NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "position", lla_state_truncate(r.state, 0, -1, NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_truncate(r.state, 3, 140, NULL, &error));
  now = rig_pack(&r, 0, &now_bytes);
  CHECK(now_bytes == bytes);
  check_equal_bytes(now, before, bytes, "state after refused truncations");
  OK(lla_state_truncate(r.state, 0, 150, NULL, &error));
  OK(lla_state_truncate(r.state, 0, 128, NULL, &error));
  FAILS(LLA_ROLLBACK_LIMIT, "", lla_state_truncate(r.state, 0, 127, NULL, &error));
  free(now);
  free(before);
  rig_close(&r);
}

/* Probes B17, G9. */
static void poisoned_slots_can_be_used_again(void **unused) {
  rig r;
  int64_t layer, io, e;
  static const int64_t slots[2] = {0, 1}, offsets[3] = {0, 100, 200};
  lla_rows rows = LLA_ROWS_INIT;
  size_t bytes;
  char *expected;
  (void)unused;
  open_group(&r, 4, 0, 2, 256, 0);
  rig_append(&r, 2, 7, 100); /* the neighbour alone */
  expected = keep_outputs(&r, 0, 100, &bytes);
  rows.sequences = 2;
  rows.offsets = index64(offsets);
  rows.slot_in = index64(slots);
  rig_set_rows(&r, 200);
  rig_fill(&r, 0, 6, 0, 100);
  rig_fill(&r, 100, 7, 0, 100);
  for (layer = 0; layer < r.layer_count; ++layer) {
    for (io = 0; io + 1 < r.layer[layer].io_count; ++io) {
      for (e = 0; e < r.layer[layer].width[io]; ++e) rig_row(&r, layer, io, 50)[e] = NAN;
    }
  }
  rig_plan(&r, &rows);
  rig_forward(&r);
  CHECK(isnan(rig_output(&r, 0, 60)[0]));
  check_outputs(&r, 100, 100, expected, "neighbour of a sequence with NaN");
  rig_commit(&r, NULL);
  rig_check_same_slot(&r, 1, &r, 2, "neighbour of a sequence with NaN");
  free(expected);
  /* The poisoned slot, emptied and used again, equals a fresh one. */
  rig_reset(&r, 0);
  rig_append(&r, 3, 8, 150);
  expected = keep_outputs(&r, 0, 150, &bytes);
  rig_append(&r, 0, 8, 150);
  check_outputs(&r, 0, 150, expected, "slot used again");
  rig_check_same_slot(&r, 0, &r, 3, "slot used again");
  free(expected);
  rig_close(&r);
}

/* Probes H6, H10. */
static void saved_slots_go_on(void **unused) {
  static const int64_t lengths[5] = {0, 1, 64, 130, 449};
  char tag[LLA_TAG_SIZE] = "model 1, prompt 2", other[LLA_TAG_SIZE] = "model 1, prompt 3";
  rig a, b;
  int64_t i;
  (void)unused;
  open_group(&a, 2, 0, 1, 128, 0);
  open_group(&b, 2, 0, 1, 128, 0);
  rig_append_to(&b, 1, 99, 300, 128); /* what the import replaces */
  for (i = 0; i < 5; ++i) {
    lla_image_info info;
    size_t bytes, out;
    void *image;
    char *expected;
    rig_reset(&a, 0);
    rig_append_to(&a, 0, 5, lengths[i], 128);
    image = rig_pack(&a, 0, &bytes);
    FAILS(LLA_DATA_CORRUPT, "", lla_state_check(image, bytes, NULL, NULL, &error)); /* not sealed yet */
    OK(lla_state_seal(image, bytes, tag, &error));
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    OK(lla_state_check(image, bytes, tag, &info, &error));
    CHECK(info.position == lengths[i] && info.layers == 4 && info.grain == 64 && (size_t)info.bytes == bytes);
    CHECK(memcmp(info.tag, tag, LLA_TAG_SIZE) == 0 && info.struct_size == sizeof info);
    FAILS(LLA_STATE_INCOMPATIBLE, "tag", lla_state_check(image, bytes, other, &info, &error));
    OK(lla_state_unpack(b.state, 1, image, bytes, NULL, &error));
    CHECK(rig_length(&b, 1) == lengths[i]);
    rig_check_same_slot(&a, 0, &b, 1, "imported slot");
    rig_append(&a, 0, 5, 100);
    expected = keep_outputs(&a, 0, 100, &out);
    rig_append(&b, 1, 5, 100);
    check_outputs(&b, 0, 100, expected, "rows after an import");
    rig_check_same_slot(&a, 0, &b, 1, "imported slot that went on");
    free(expected);
    free(image);
  }
  rig_close(&a);
  rig_close(&b);
}

/* A batch whose launches are as large as its limits allow plans, stores and answers like any other: prompts over several
 * borders, drafts and single rows, with resting sequences beside them. */
/* Probe G6. */
static void replayable_batches(void **unused) {
  static const int64_t pieces[5] = {70, 1, 64, 16, 1};
  const int64_t slots[3] = {0, -1, 1};
  rig plain, replay;
  size_t bytes;
  int i, s;
  (void)unused;
  open_group(&plain, 2, 0, 3, 3 * 70, 0);
  open_group(&replay, 2, 0, 3, 3 * 70, 0);
  replay.limits.replay = 1;
  OK(lla_batch_size(replay.context, &replay.limits, &bytes, NULL, &error));
  OK(lla_batch_init(replay.context, &replay.limits, replay.batch_memory, bytes, &replay.batch, &error));
  for (i = 0; i < 5; ++i) {
    rig *rigs[2];
    char *expected = NULL;
    rigs[0] = &plain;
    rigs[1] = &replay;
    for (s = 0; s < 2; ++s) {
      rig *r = rigs[s];
      lla_rows rows = LLA_ROWS_INIT;
      const int64_t n = pieces[i], at = rig_length(r, 0);
      rows.sequences = 3;
      rows.rows_per_sequence = n;
      rows.slot_in = index64(slots);
      rig_set_rows(r, 3 * n);
      rig_fill(r, 0, 5, at, n);
      rig_fill(r, n, 7, at, n);
      rig_fill(r, 2 * n, 6, at, n);
      rig_plan(r, &rows);
      rig_forward(r);
      if (s == 0)
        expected = keep_outputs(r, 0, 3 * n, &bytes);
      else
        check_outputs(r, 0, 3 * n, expected, "outputs of a replayable batch");
      rig_commit(r, NULL);
    }
    free(expected);
    rig_check_same_slot(&plain, 0, &replay, 0, "slot of a replayable batch");
    rig_check_same_slot(&plain, 1, &replay, 1, "slot of a replayable batch");
  }
  rig_close(&plain);
  rig_close(&replay);
}

/* Snapshots at places of the caller's choice in one long append are what stopping there gives, all of them from one pass. */
/* Probes H8, S14. */
static void snapshots_of_a_long_prompt(void **unused) {
  enum { kRows = 2100, kStops = 5 };
  static const int64_t at[kStops] = {576, 1024, 1500, 2047, 2048}, slots[kStops] = {1, 2, 3, 4, 5};
  static const int64_t sequence[kStops] = {0, 0, 0, 0, 0}, in = 0;
  lla_rows rows = LLA_ROWS_INIT;
  rig r, stops;
  int i;
  (void)unused;
  open_group(&r, 6, 0, 1, kRows, kStops);
  open_group(&stops, 1, 0, 1, kRows, 0);
  rows.sequences = 1;
  rows.rows_per_sequence = kRows;
  rows.slot_in = index64(&in);
  rows.snapshots = kStops;
  rows.snapshot_sequences = index64(sequence);
  rows.snapshot_rows = index64(at);
  rows.snapshot_slots = index64(slots);
  rig_set_rows(&r, kRows);
  rig_fill(&r, 0, 5, 0, kRows);
  rig_plan(&r, &rows);
  rig_forward(&r);
  rig_commit(&r, NULL);
  for (i = 0; i < kStops; ++i) {
    CHECK(rig_length(&r, slots[i]) == at[i]);
    rig_reset(&stops, 0);
    rig_append_to(&stops, 0, 5, at[i], kRows);
    rig_check_same_slot(&r, slots[i], &stops, 0, "snapshot of a long prompt");
  }
  rig_close(&r);
  rig_close(&stops);
}

/* A caller whose count of rows disagrees with a restored slot is told, before anything is computed twice. */
/* Probes H1, H2, H14. */
static void restored_slots_know_their_position(void **unused) {
  static const int64_t slot = 1, wrong[4] = {260, 299, 301, 0}, right = 300;
  lla_rows rows = LLA_ROWS_INIT;
  rig a, b;
  size_t bytes;
  void *image;
  int i;
  (void)unused;
  open_group(&a, 2, 0, 1, 128, 0);
  open_group(&b, 2, 0, 1, 128, 0);
  rig_append_to(&a, 0, 5, right, 128);
  image = rig_pack(&a, 0, &bytes);
  OK(lla_state_seal(image, bytes, NULL, &error));
  OK(lla_state_unpack(b.state, slot, image, bytes, NULL, &error));
  rows.sequences = 1;
  rows.rows_per_sequence = 10;
  rows.slot_in = index64(&slot);
  rig_set_rows(&b, 10);
  rig_fill(&b, 0, 5, right, 10);
  for (i = 0; i < 4; ++i) {
    rows.expected_positions = index64(&wrong[i]);
    FAILS(LLA_POSITION_MISMATCH, "expected_positions[0]", lla_batch_plan(b.batch, b.state, &rows, NULL, &error));
    rig_check_same_slot(&a, 0, &b, slot, "restored slot after a wrong position");
  }
  rows.expected_positions = index64(&right);
  rig_plan(&b, &rows);
  rig_forward(&b);
  rig_commit(&b, NULL);
  rig_append(&a, 0, 5, 10);
  rig_check_same_slot(&a, 0, &b, slot, "restored slot that went on");
  free(image);
  rig_close(&a);
  rig_close(&b);
}

static void *to_bf16(const lla_tensor *from, int64_t count, lla_tensor *to) {
  uint16_t *data = (uint16_t *)take((size_t)count * sizeof(uint16_t));
  int64_t i;
  for (i = 0; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, (const float *)from->data + i, sizeof bits);
    data[i] = (uint16_t)(bits >> 16);
  }
  *to = *from;
  to->data = data;
  to->dtype = LLA_BF16;
  return data;
}

/* Inputs of 16 bits do not narrow a state of 32: its numbers use all their bits, whether rows came at once or one by one. */
/* Probe B9. */
static void narrow_inputs_leave_wide_states(void **unused) {
  enum { kRows = 64 };
  static const lla_mixer mixers[2] = {LLA_SCALAR_GATE, LLA_DELTA_RULE};
  int m, levels;
  (void)unused;
  for (m = 0; m < 2; ++m) {
    for (levels = 0; levels <= 8; levels += 8) {
      const lla_layer_desc d = mixer_desc(mixers[m], 2, 1, 8, 8, levels);
      lla_state_desc state = LLA_STATE_DESC_INIT;
      static float content[2][2 * 8 * 8];
      void *narrow[RIG_IO];
      int64_t step, i, k;
      rig r;
      state.slots = 2;
      rig_open(&r, NULL, &d, 1, &state, 1, kRows, 0);
      for (step = 1; step <= kRows; step += kRows - 1) { /* single rows into slot 0, all of them into slot 1 */
        const int64_t slot = step > 1;
        for (i = 0; i < kRows; i += step) {
          lla_rows rows = LLA_ROWS_INIT;
          lla_binding io[RIG_IO];
          lla_forward_args a;
          rows.sequences = 1;
          rows.rows_per_sequence = step;
          rows.slot_in = index64(&slot);
          rig_set_rows(&r, step);
          rig_fill(&r, 0, 5, i, step);
          rig_plan(&r, &rows);
          a = rig_forward_args(&r, 0);
          for (k = 0; k < a.io_count; ++k) {
            io[k] = a.io[k];
            narrow[k] = k + 1 < a.io_count ? to_bf16(&a.io[k].tensor, step * r.layer[0].width[k], &io[k].tensor) : NULL;
          }
          a.io = io;
          OK(lla_layer_forward(r.layer[0].layer, &a, &error));
          rig_commit(&r, NULL);
          for (k = 0; k < a.io_count; ++k) free(narrow[k]);
        }
        {
          const lla_tensor t = lla_tensor_of(content[slot], LLA_F32, 2, 8, 8, -1);
          int64_t full = 0;
          OK(lla_state_read(r.state, slot, 0, levels ? LLA_PART_NODE : LLA_PART_ABSORBED, 0, &t, NULL, &error));
          for (k = 0; k < 2 * 8 * 8; ++k) {
            uint32_t bits;
            memcpy(&bits, &content[slot][k], sizeof bits);
            if (bits & 0xffffu) ++full;
          }
          CHECK(full > 2 * 8 * 8 * 9 / 10);
        }
      }
      check_equal_bytes(content[0], content[1], sizeof content[0], "node of single rows against one append");
      rig_close(&r);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(forks),
                                     cmocka_unit_test(snapshots),
                                     cmocka_unit_test(snapshots_of_rejected_rows),
                                     cmocka_unit_test(truncation),
                                     cmocka_unit_test(poisoned_slots_can_be_used_again),
                                     cmocka_unit_test(saved_slots_go_on),
                                     cmocka_unit_test(replayable_batches),
                                     cmocka_unit_test(snapshots_of_a_long_prompt),
                                     cmocka_unit_test(restored_slots_know_their_position),
                                     cmocka_unit_test(narrow_inputs_leave_wide_states)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
