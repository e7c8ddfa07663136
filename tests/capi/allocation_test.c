/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory: every allocation goes through the hook, may fail at any time without a leak, and none happens in the calls
 * that promise none. */
#include "meter.h"
#include "rig.h"

/* Context, layers, state and one append; says which step failed. Nothing may be left of it afterwards. */
static lla_status try_everything(meter *m, const lla_layer_desc *desc, int32_t threads, int64_t layer_count) {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_allocator allocator = allocator_of(m);
  lla_context *context = NULL;
  lla_layer *layer = NULL, *group[80];
  lla_state *state = NULL;
  lla_error error = LLA_ERROR_INIT;
  lla_status status;
  int64_t i;
  options.allocator = &allocator;
  options.threads = threads;
  status = lla_context_create(&options, &context, &error);
  if (status == LLA_OK) status = lla_layer_create(context, desc, &layer, &error);
  for (i = 0; i < layer_count; ++i) group[i] = layer;
  if (status == LLA_OK) status = lla_state_create(group, layer_count, NULL, NULL, 0, &state, &error);
  if (status == LLA_OK && layer_count == 1) {
    rig r;
    int64_t length = -1, free_blocks = -1, all_blocks = -2;
    memset(&r, 0, sizeof r);
    r.max_rows = 70;
    r.layer_count = 1;
    rig_make_layer(&r, 0, desc, layer);
    rig_fill(&r, 0, 1, 0, 70);
    status = lla_append(layer, state, 0, r.layer[0].io, r.layer[0].io_count, r.layer[0].weight, r.layer[0].weight_count,
                        NULL, &error);
    OK(lla_state_length(state, 0, &length, &error));
    CHECK(length == (status == LLA_OK ? 70 : 0));
    OK(lla_state_query(state, LLA_STATE_FREE_NODE_BLOCKS, 0, &free_blocks, &error));
    OK(lla_state_query(state, LLA_STATE_NODE_BLOCKS, 0, &all_blocks, &error));
    CHECK((free_blocks == all_blocks) == (status != LLA_OK));
    rig_close(&r);
  }
  if (status != LLA_OK) {
    CHECK(error.code == status && error.text[0]);
  }
  lla_state_release(state);
  lla_layer_release(layer);
  lla_context_release(context);
  CHECK(m->outstanding == 0 && m->bytes == 0);
  return status;
}

static void check_every_failure(const lla_layer_desc *desc, int32_t threads, int64_t layer_count) {
  meter m = {0, 0, 0, 0};
  int64_t n, all;
  CHECK(try_everything(&m, desc, threads, layer_count) == LLA_OK);
  all = m.count;
  CHECK(all >= (layer_count == 1 ? 5 : 3));
  for (n = 1; n <= all; ++n) {
    lla_status status;
    m.count = 0;
    m.fail_at = n;
    status = try_everything(&m, desc, threads, layer_count);
    if (status != LLA_OUT_OF_MEMORY) stop_test("allocation %d of %d failed: %s", (int)n, (int)all, lla_status_name(status));
  }
}

static void any_allocation_may_fail(void **unused) {
  const lla_layer_desc mixer = mixer_desc(LLA_SCALAR_GATE, 2, 1, 8, 8, 8), cell = cell_desc(2, 2, 8, 8, 8);
  const lla_layer_desc block = mamba2_desc(2, 1, 8, 8, 16, 8);
  (void)unused;
  check_every_failure(&mixer, 0, 1);
  check_every_failure(&mixer, 3, 1);
  check_every_failure(&cell, 0, 1);
  check_every_failure(&block, 0, 1);
  check_every_failure(&mixer, 0, 80); /* a group that does not fit on the stack */
}

/* Probe J1. */
static void steps_do_not_allocate(void **unused) {
  static const int64_t slots[2] = {0, 1}, others[2] = {2, 3};
  static const int32_t narrow[2] = {0, 1};
  lla_layer_desc layers[3];
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_state_desc state = LLA_STATE_DESC_INIT;
  meter m = {0, 0, 0, 0};
  lla_allocator allocator = allocator_of(&m);
  lla_rows rows = LLA_ROWS_INIT;
  lla_binding list[RIG_IO + RIG_WEIGHTS];
  int32_t threads;
  int64_t i;
  (void)unused;
  layers[0] = mixer_desc(LLA_DELTA_RULE, 2, 1, 8, 8, 11);
  layers[1] = cell_desc(2, 2, 8, 8, 11);
  layers[2] = mamba2_desc(2, 1, 8, 8, 16, 11);
  state.slots = 4;
  state.max_length = 1024;
  options.allocator = &allocator;
  for (threads = 0; threads <= 2; threads += 2) {
    rig r, training;
    int64_t before;
    size_t bytes;
    void *image;
    options.threads = threads;
    rig_open(&r, &options, layers, 3, &state, 2, 200, 0);
    rig_open(&training, &options, layers, 3, NULL, 2, 200, 0);
    before = m.count;
    CHECK(before > 0);
    m.fail_at = before + 1; /* and it would fail */
    rows.sequences = 2;
    rows.rows_per_sequence = 100;
    rows.slot_in = index64(slots);
    for (i = 0; i < 3; ++i) {
      rig_set_rows(&r, 200);
      rig_fill(&r, 0, 1, rig_length(&r, 0), 100);
      rig_fill(&r, 100, 2, rig_length(&r, 1), 100);
      rig_plan(&r, &rows);
      rig_forward(&r);
      rig_commit(&r, NULL);
    }
    OK(lla_state_fork(r.state, index64(slots), index64(others), 2, NULL, &error));
    OK(lla_state_truncate(r.state, 0, 290, NULL, &error));
    image = rig_pack(&r, 1, &bytes);
    OK(lla_state_seal(image, bytes, NULL, &error));
    OK(lla_state_check(image, bytes, NULL, NULL, &error));
    OK(lla_state_unpack(r.state, 3, image, bytes, NULL, &error));
    free(image);
    OK(lla_state_reset(r.state, index32(narrow), 2, no_index(), NULL, &error));
    rows.slot_in = no_index();
    rig_set_rows(&training, 200);
    rig_fill(&training, 0, 1, 0, 100);
    rig_fill(&training, 100, 2, 0, 100);
    rig_plan(&training, &rows);
    rig_forward(&training);
    for (i = 0; i < 3; ++i) {
      lla_backward_args arguments = rig_backward_args(&training, i);
      rig_fill_output_gradient(&training, i, 5, 200);
      arguments.gradients = list;
      arguments.gradient_count = rig_list_gradients(&training, i, list);
      OK(lla_layer_backward(training.layer[i].layer, &arguments, &error));
    }
    CHECK(m.count == before);
    m.fail_at = 0;
    rig_close(&r);
    rig_close(&training);
    CHECK(m.outstanding == 0 && m.bytes == 0);
  }
}

/* Long arrays of 32-bit indexes are read without memory too. */
static void long_indexes_do_not_allocate(void **unused) {
  enum { kSlots = 400 };
  static int32_t sources[kSlots], targets[kSlots];
  const lla_layer_desc desc = mixer_desc(LLA_SCALAR_GATE, 1, 1, 4, 4, 0);
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_state_desc state = LLA_STATE_DESC_INIT;
  meter m = {0, 0, 0, 0};
  lla_allocator allocator = allocator_of(&m);
  rig r;
  int32_t i;
  (void)unused;
  state.slots = kSlots;
  options.allocator = &allocator;
  rig_open(&r, &options, &desc, 1, &state, 1, 8, 0);
  for (i = 0; i < kSlots; ++i) {
    sources[i] = i;
    targets[i] = (i + 1) % kSlots;
    if (i % 50 == 0) rig_append(&r, i, 5, 1 + i / 50);
  }
  m.fail_at = m.count + 1;
  OK(lla_state_fork(r.state, index32(sources), index32(targets), kSlots, NULL, &error));
  CHECK(m.count + 1 == m.fail_at);
  for (i = 0; i < kSlots; ++i) CHECK(rig_length(&r, (i + 1) % kSlots) == (i % 50 == 0 ? 1 + i / 50 : 0));
  OK(lla_state_reset(r.state, index32(sources), kSlots, index32(targets), NULL, &error));
  CHECK(m.count + 1 == m.fail_at);
  for (i = 0; i < kSlots; ++i) CHECK(rig_length(&r, i) == (i + 1) % kSlots);
  m.fail_at = 0;
  rig_close(&r);
  CHECK(m.outstanding == 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(any_allocation_may_fail), cmocka_unit_test(steps_do_not_allocate),
                                     cmocka_unit_test(long_indexes_do_not_allocate)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
