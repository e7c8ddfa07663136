// SPDX-License-Identifier: Apache-2.0
// Batches: memory, refusals with their texts, reservations, and what plans look like.
#include <functional>

#include "core_testing.h"

using namespace core_testing;

namespace {

class BatchTest : public testing::Test {
 protected:
  BatchTest() : BatchTest(LLA_STATE_DESC_INIT) {}
  explicit BatchTest(lla_state_desc description) {
    description.slots = 4;
    description.max_length = 200;
    description.max_draft = 5;
    state_ = make_state(context_.get(), {with_convolution(mixer(LLA_SCALAR_GATE, 4, 9), 2, 4)}, description);
    batch_ = std::make_unique<BatchOwner>(context_.get(), limits_of(4, 100, 2));
  }
  // Plans uniform rows; the arrays may be changed by `change`.
  struct Rows {
    lla_rows rows = LLA_ROWS_INIT;
    std::vector<int64_t> offsets, counts, in, out, expected, snapshot_sequences, snapshot_rows, snapshot_slots;
  };
  lla_status plan(Rows* given, State* state) {
    lla_rows rows = given->rows;
    const auto set = [](lla_index* index, const std::vector<int64_t>& values) {
      if (!values.empty()) *index = index_of(values);
    };
    set(&rows.offsets, given->offsets);
    set(&rows.counts, given->counts);
    set(&rows.slot_in, given->in);
    set(&rows.slot_out, given->out);
    set(&rows.expected_positions, given->expected);
    set(&rows.snapshot_sequences, given->snapshot_sequences);
    set(&rows.snapshot_rows, given->snapshot_rows);
    set(&rows.snapshot_slots, given->snapshot_slots);
    error_ = Error();
    return plan_batch(batch_->get(), state, rows, nullptr, nullptr, &error_);
  }
  void append(int64_t slot, int64_t rows) {
    BatchOwner batch(context_.get(), limits_of(1, rows));
    lla_rows given = LLA_ROWS_INIT;
    given.sequences = 1;
    given.rows_per_sequence = rows;
    const std::vector<int64_t> in = {slot};
    given.slot_in = index_of(in);
    ASSERT_EQ(plan_batch(batch.get(), state_.get(), given, nullptr, nullptr, nullptr), LLA_OK);
    ASSERT_EQ(commit_batch(state_.get(), batch.get(), {nullptr, 0, 0}, nullptr, nullptr), LLA_OK);
  }
  // A plan that is refused leaves nothing behind.
  void refuse(lla_status status, const char* text, const std::function<void(Rows*)>& change) {
    Rows given;
    given.rows.sequences = 2;
    given.rows.rows_per_sequence = 3;
    given.in = {0, 1};
    change(&given);
    const int64_t free = state_->free_nodes();
    EXPECT_EQ(plan(&given, state_.get()), status) << text;
    EXPECT_STREQ(error_.text, text);
    EXPECT_EQ((*batch_)->phase, BatchPhase::Empty);
    EXPECT_EQ(state_->free_nodes(), free);
    for (int64_t slot = 0; slot < 4; ++slot) {
      EXPECT_FALSE(state_->record(slot).reserved);
      EXPECT_EQ(state_->record(slot).appends, 0);
    }
  }

  ContextPointer context_ = reference_context();
  StatePointer state_;
  std::unique_ptr<BatchOwner> batch_;
  Error error_;
};

TEST_F(BatchTest, LimitsHaveDefaultsAndDomains) {
  lla_batch_limits limits = limits_of(3, 70);
  Limits plain;
  ASSERT_EQ(read_limits(limits, &plain, nullptr), LLA_OK);
  EXPECT_EQ(plain.rows_per_sequence, 70);
  EXPECT_EQ(plain.length, kAnyLength);
  limits.max_rows_per_sequence = 5;
  limits.max_length = 9;
  ASSERT_EQ(read_limits(limits, &plain, nullptr), LLA_OK);
  EXPECT_EQ(plain.rows_per_sequence, 5);
  EXPECT_EQ(plain.length, 9);
  Error error;
  limits.max_snapshots = -1;
  EXPECT_EQ(read_limits(limits, &plain, &error), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(error.text, "limits->max_snapshots is negative (-1)");
  limits = limits_of(int64_t{1} << 60, 1);
  ASSERT_EQ(read_limits(limits, &plain, nullptr), LLA_OK);
  size_t bytes = 0;
  EXPECT_EQ(batch_size(plain, false, &bytes, &error), LLA_SIZE_OVERFLOW);
}

TEST_F(BatchTest, MemoryIsChecked) {
  Limits plain;
  ASSERT_EQ(read_limits(limits_of(2, 8), &plain, nullptr), LLA_OK);
  size_t bytes = 0;
  ASSERT_EQ(batch_size(plain, false, &bytes, nullptr), LLA_OK);
  char* memory = static_cast<char*>(std::aligned_alloc(64, bytes + 64));
  Batch* batch = nullptr;
  EXPECT_EQ(init_batch(context_.get(), plain, memory, bytes - 1, &batch, nullptr), LLA_BUFFER_TOO_SMALL);
  EXPECT_EQ(init_batch(context_.get(), plain, memory + 8, bytes, &batch, nullptr), LLA_MISALIGNED);
  EXPECT_EQ(batch, nullptr);
  EXPECT_EQ(init_batch(context_.get(), plain, memory, bytes, &batch, nullptr), LLA_OK);
  EXPECT_EQ(check_batch(*batch, nullptr, nullptr), LLA_BUSY);
  EXPECT_EQ(commit_batch(state_.get(), batch, {nullptr, 0, 0}, nullptr, nullptr), LLA_BUSY);
  discard_batch(batch);
  discard_batch(nullptr);
  std::free(memory);
}

TEST_F(BatchTest, SizeOfBatchesDoesNotFallWithTheLimits) {
  size_t last = 0;
  for (int64_t n = 0; n < 60; ++n) {
    Limits plain;
    size_t bytes = 0;
    ASSERT_EQ(read_limits(limits_of(n / 3, 7 * n, n / 2), &plain, nullptr), LLA_OK);
    ASSERT_EQ(batch_size(plain, false, &bytes, nullptr), LLA_OK);
    EXPECT_GE(bytes, last);
    last = bytes;
  }
}

TEST_F(BatchTest, RefusalsNameArgumentAndEntry) {
  append(3, 6);
  const auto invalid = [&](const char* text, const std::function<void(Rows*)>& change) {
    refuse(LLA_INVALID_ARGUMENT, text, change);
  };
  invalid("sequences = 5 is not 0 ... 4, the batch's max_sequences", [](Rows* r) { r->rows.sequences = 5; });
  invalid("snapshots = 3 is not 0 ... 2, the batch's max_snapshots", [](Rows* r) { r->rows.snapshots = 3; });
  invalid("2 sequences of rows_per_sequence = 51 exceed the batch's max_rows 100",
          [](Rows* r) { r->rows.rows_per_sequence = 51; });
  invalid("total_rows = 5, but the sequences end at row 6", [](Rows* r) { r->rows.total_rows = 5; });
  invalid("total_rows = 101 exceeds the batch's max_rows 100", [](Rows* r) { r->rows.total_rows = 101; });
  invalid("offsets[2] = 3 is less than offsets[1] = 4", [](Rows* r) { r->offsets = {0, 4, 3}; });
  invalid("offsets[0] = -1 is negative", [](Rows* r) { r->offsets = {-1, 4, 5}; });
  invalid("offsets[2] = 101 exceeds the batch's max_rows 100", [](Rows* r) { r->offsets = {0, 4, 101}; });
  invalid("counts[1] = 4 exceeds the 3 rows up to the next sequence", [](Rows* r) { r->counts = {3, 4}; });
  invalid("counts[0] = 5 exceeds the 4 rows up to the next sequence", [](Rows* r) {
    r->offsets = {0, 4, 9};
    r->counts = {5, 4};
  });
  invalid("counts[1] = -2 is negative", [](Rows* r) { r->counts = {3, -2}; });
  invalid("slot_in[1] = 9 is not below the state's 4 slots", [](Rows* r) { r->in = {0, 9}; });
  invalid("slot_in[1] = -2 is not below the state's 4 slots", [](Rows* r) { r->in = {0, -2}; });
  invalid("slot_out[1] = 4 is not one of the state's 4 slots", [](Rows* r) { r->out = {0, 4}; });
  invalid("slot_out[0] = -1 is not one of the state's 4 slots", [](Rows* r) { r->out = {-1, 1}; });
  invalid("slot_out[0] = 2, but slot_in[0] = -1: padding", [](Rows* r) {
    r->in = {-1, 1};
    r->out = {2, 1};
  });
  invalid("slot_out[1] = 0 receives another sequence or snapshot already", [](Rows* r) { r->in = {0, 0}; });
  invalid("snapshot_sequences[0] = 2 is not one of the 2 sequences", [](Rows* r) {
    r->rows.snapshots = 1;
    r->snapshot_sequences = {2};
    r->snapshot_rows = {0};
    r->snapshot_slots = {2};
  });
  invalid("snapshot_rows[0] = 4 is not 0 ... 3, the rows of sequence 1", [](Rows* r) {
    r->rows.snapshots = 1;
    r->snapshot_sequences = {1};
    r->snapshot_rows = {4};
    r->snapshot_slots = {2};
  });
  invalid("snapshot_sequences[0] = 1 is padding", [](Rows* r) {
    r->in = {0, -1};
    r->rows.snapshots = 1;
    r->snapshot_sequences = {1};
    r->snapshot_rows = {0};
    r->snapshot_slots = {2};
  });
  invalid("snapshot_slots[1] = 2 receives another sequence or snapshot already", [](Rows* r) {
    r->rows.snapshots = 2;
    r->snapshot_sequences = {1, 0};
    r->snapshot_rows = {2, 2};
    r->snapshot_slots = {2, 2};
  });
  refuse(LLA_NULL_POINTER, "snapshots = 1, but snapshot_rows is not given", [](Rows* r) {
    r->rows.snapshots = 1;
    r->snapshot_sequences = {1};
    r->snapshot_slots = {2};
  });
  refuse(LLA_SLOT_IN_USE, "snapshot_slots[0] = 3 is not empty", [](Rows* r) {
    r->rows.snapshots = 1;
    r->snapshot_sequences = {1};
    r->snapshot_rows = {2};
    r->snapshot_slots = {3};
  });
  refuse(LLA_SLOT_IN_USE, "slot_out[1] = 3 is not empty", [](Rows* r) { r->out = {0, 3}; });
  refuse(LLA_POSITION_MISMATCH, "expected_positions[1] = 5, but slot 3 stands at 6", [](Rows* r) {
    r->in = {0, 3};
    r->expected = {0, 5};
  });
  refuse(LLA_LEVELS_EXCEEDED, "sequence 1: 3 rows after position 198 exceed the state's max_length 200", [&](Rows* r) {
    const int64_t slot = 1, position = 198;
    ASSERT_EQ(state_->reset(&slot, 1, &position, nullptr), LLA_OK);
    r->in = {0, 1};
  });
}

TEST_F(BatchTest, IndexArraysAreChecked) {
  const std::vector<int32_t> narrow = {3, 1};
  lla_rows rows = LLA_ROWS_INIT;
  rows.sequences = 2;
  rows.rows_per_sequence = 1;
  rows.slot_in = index_of(narrow);
  EXPECT_EQ(plan_batch(batch_->get(), state_.get(), rows, nullptr, nullptr, nullptr), LLA_OK);
  EXPECT_EQ((*batch_)->view.sequences[1].history.tail, 1);
  rows.slot_in.dtype = LLA_F32;
  EXPECT_EQ(plan_batch(batch_->get(), state_.get(), rows, nullptr, nullptr, &error_), LLA_DTYPE_MISMATCH);
  rows.slot_in.dtype = LLA_I32;
  rows.slot_in.location = LLA_DEVICE;
  EXPECT_EQ(plan_batch(batch_->get(), state_.get(), rows, nullptr, nullptr, &error_), LLA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error_.text).find("slot_in"), std::string::npos);
  rows.slot_in.location = LLA_HOST;
  rows.slot_in.data = reinterpret_cast<const char*>(narrow.data()) + 2;
  EXPECT_EQ(plan_batch(batch_->get(), state_.get(), rows, nullptr, nullptr, &error_), LLA_MISALIGNED);
}

TEST_F(BatchTest, LimitsBindWithoutAState) {
  Rows given;
  given.rows.sequences = 2;
  given.rows.rows_per_sequence = 7;
  ASSERT_EQ(plan(&given, nullptr), LLA_OK) << error_.text;
  const BatchView& view = (*batch_)->view;
  EXPECT_EQ(view.total_rows, 14);
  EXPECT_EQ(view.slack_count, 0);
  EXPECT_TRUE((*batch_)->uniform);
  EXPECT_EQ((*batch_)->uniform_rows, 7);
  EXPECT_EQ(view.sequences[1].row_begin, 7);
  EXPECT_LT(view.sequences[1].history.tail, 0);
  EXPECT_EQ(view.sequences[1].nodes_to_store_count + view.sequences[1].tail_to_store_count, 0);
  EXPECT_EQ(check_batch(*batch_->get(), nullptr, nullptr), LLA_OK);
  EXPECT_EQ(check_batch(*batch_->get(), state_.get(), nullptr), LLA_STATE_INCOMPATIBLE);
  EXPECT_EQ(commit_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, nullptr, nullptr), LLA_STATE_INCOMPATIBLE);
  given.expected = {0, 60};
  ASSERT_EQ(plan(&given, nullptr), LLA_OK);
  EXPECT_EQ(view.sequences[1].position, 60);
  EXPECT_EQ(view.sequences[1].history.start, 60);
  given.expected = {0, 94};
  EXPECT_EQ(plan(&given, nullptr), LLA_LEVELS_EXCEEDED);
  EXPECT_STREQ(error_.text, "sequence 1: 7 rows after position 94 exceed the batch's max_length 100");
  given.expected = {0, -1};
  EXPECT_EQ(plan(&given, nullptr), LLA_INVALID_ARGUMENT);
  given.expected = {};
  given.in = {0, 1};
  EXPECT_EQ(plan(&given, nullptr), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(error_.text, "slot_in is given, but no state");
}

TEST_F(BatchTest, TheBatchsOwnMaxLengthBindsToo) {
  lla_batch_limits limits = limits_of(2, 20);
  limits.max_length = 10;
  limits.max_rows_per_sequence = 8;
  batch_ = std::make_unique<BatchOwner>(context_.get(), limits);
  append(0, 6);
  Rows given;
  given.rows.sequences = 1;
  given.rows.rows_per_sequence = 4;
  EXPECT_EQ(plan(&given, state_.get()), LLA_OK) << error_.text;
  given.rows.rows_per_sequence = 5;
  EXPECT_EQ(plan(&given, state_.get()), LLA_LEVELS_EXCEEDED);
  given.rows.rows_per_sequence = 9;
  EXPECT_EQ(plan(&given, state_.get()), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(error_.text, "sequence 0 has 9 rows, more than the batch's max_rows_per_sequence 8");
}

TEST_F(BatchTest, UniformBatchesMayHaveShorterSequences) {
  Rows given;
  given.rows.sequences = 4;
  given.rows.rows_per_sequence = 5;
  given.in = {0, -1, 2, 3};
  given.counts = {5, 5, 0, 3};
  ASSERT_EQ(plan(&given, state_.get()), LLA_OK) << error_.text;
  const BatchView& view = (*batch_)->view;
  EXPECT_EQ(view.total_rows, 20);
  EXPECT_TRUE(view.sequences[1].padding);
  EXPECT_EQ(view.sequences[1].rows, 0);
  ASSERT_EQ(view.slack_count, 2);
  EXPECT_EQ(view.slack[0].begin, 5);
  EXPECT_EQ(view.slack[0].end, 15);
  EXPECT_EQ(view.slack[1].begin, 18);
  EXPECT_EQ(view.slack[1].end, 20);
}

TEST_F(BatchTest, EmptyBatchesAreFine) {
  Rows given;
  ASSERT_EQ(plan(&given, state_.get()), LLA_OK) << error_.text;
  EXPECT_EQ(commit_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, nullptr, nullptr), LLA_OK);
  given.rows.total_rows = 9;
  ASSERT_EQ(plan(&given, nullptr), LLA_OK);
  ASSERT_EQ((*batch_)->view.slack_count, 1);
  EXPECT_EQ((*batch_)->view.slack[0].end, 9);
}

TEST_F(BatchTest, DestinationsAreReservedUntilThePlanIsGone) {
  Rows given;
  given.rows.sequences = 1;
  given.rows.rows_per_sequence = 4;
  given.in = {0};
  given.out = {2};
  given.rows.snapshots = 1;
  given.snapshot_sequences = {0};
  given.snapshot_rows = {1};
  given.snapshot_slots = {3};
  const int64_t free = state_->free_nodes();
  const auto other = [&](int64_t in, int64_t out) {
    BatchOwner batch(context_.get(), limits_of(1, 4));
    lla_rows rows = LLA_ROWS_INIT;
    rows.sequences = 1;
    rows.rows_per_sequence = 1;
    const std::vector<int64_t> ins = {in}, outs = {out};
    rows.slot_in = index_of(ins);
    rows.slot_out = index_of(outs);
    const lla_status status = plan_batch(batch.get(), state_.get(), rows, nullptr, nullptr, &error_);
    discard_batch(batch.get());
    return status;
  };
  ASSERT_EQ(plan(&given, state_.get()), LLA_OK);
  EXPECT_EQ(state_->free_nodes(), free - 1);
  EXPECT_FALSE(state_->is_empty(2));
  EXPECT_EQ(other(1, 2), LLA_SLOT_IN_USE);
  EXPECT_STREQ(error_.text, "slot_out[0] = 2 is reserved by another planned batch");
  EXPECT_EQ(other(1, 3), LLA_SLOT_IN_USE);
  EXPECT_EQ(other(2, 2), LLA_SLOT_IN_USE);
  ASSERT_EQ(plan(&given, state_.get()), LLA_OK);  // planning anew gives the first plan's reservations back
  EXPECT_EQ(state_->free_nodes(), free - 1);
  discard_batch(batch_->get());
  EXPECT_EQ(state_->free_nodes(), free);
  EXPECT_EQ(other(1, 2), LLA_OK);
  EXPECT_TRUE(state_->is_empty(2));
  // A slot that a batch appends to may be planned again, but not receive a fork.
  given.in = {2};
  ASSERT_EQ(plan(&given, state_.get()), LLA_OK);
  EXPECT_EQ(other(1, 2), LLA_SLOT_IN_USE);
  EXPECT_EQ(other(2, 2), LLA_OK);
  ASSERT_EQ(commit_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, nullptr, nullptr), LLA_OK);
  EXPECT_EQ(state_->record(2).appends, 0);
  EXPECT_EQ(state_->record(2).image.position, 4);
}

TEST_F(BatchTest, StalePlansAreRefused) {
  Rows given;
  given.rows.sequences = 2;
  given.rows.rows_per_sequence = 4;
  given.in = {0, 1};
  given.out = {0, 2};
  const int64_t free = state_->free_nodes();
  const auto stale_after = [&](const std::function<void()>& change, const char* text) {
    ASSERT_EQ(plan(&given, state_.get()), LLA_OK) << error_.text;
    EXPECT_EQ(check_batch(*batch_->get(), state_.get(), &error_), LLA_OK);
    change();
    EXPECT_EQ(check_batch(*batch_->get(), state_.get(), &error_), LLA_BUSY);
    EXPECT_EQ(commit_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, nullptr, &error_), LLA_BUSY);
    EXPECT_NE(std::string(error_.text).find(text), std::string::npos) << error_.text;
    discard_batch(batch_->get());
    ASSERT_EQ(state_->reset(nullptr, 0, nullptr, nullptr), LLA_OK);
    EXPECT_EQ(state_->free_nodes(), free);
  };
  const int64_t one = 1, three = 3;
  stale_after([&] { state_->reset(&one, 1, nullptr, nullptr); }, "slot_in[1] = 1");
  stale_after([&] { append(0, 1); }, "slot_in[0] = 0");
  stale_after([&] { state_->fork(&three, &one, 1, nullptr, nullptr); }, "slot_in[1] = 1");
  const int64_t two = 2;
  stale_after([&] { state_->reset(&two, 1, nullptr, nullptr); }, "slot_out[1] = 2");
}

TEST_F(BatchTest, PartsOfLongAppendsAreRefused) {
  Rows given;
  given.rows.sequences = 2;
  given.rows.rows_per_sequence = 6;
  given.counts = {6, 5};
  ASSERT_EQ(plan(&given, state_.get()), LLA_OK);
  const auto commit = [&](std::vector<int64_t> accepted) {
    return commit_batch(state_.get(), batch_->get(), index_of(accepted), nullptr, &error_);
  };
  EXPECT_EQ(commit({5, 5}), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(error_.text, "accepted[0] = 5, but of 6 rows (more than max_draft 5) it must be all or none");
  EXPECT_EQ(commit({6, 6}), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(error_.text, "accepted[1] = 6 is not 0 ... 5, the rows of the sequence");
  EXPECT_EQ(commit({6, -1}), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(state_->record(0).image.position, 0);
  EXPECT_EQ(commit({6, 4}), LLA_OK);
  EXPECT_EQ(state_->record(0).image.position, 6);
  EXPECT_EQ(state_->record(1).image.position, 4);
  EXPECT_EQ(commit({6, 4}), LLA_BUSY);
  EXPECT_STREQ(error_.text, "batch is committed already; plan it again");
}

TEST_F(BatchTest, SettleCountsReleasedBlocks) {
  append(0, 4);  // one node
  Rows given;
  given.rows.sequences = 1;
  given.rows.rows_per_sequence = 5;
  ASSERT_EQ(plan(&given, state_.get()), LLA_OK);
  int64_t released = -1;
  EXPECT_EQ(settle_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, &released, nullptr), LLA_BUSY);
  ASSERT_EQ(commit_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, nullptr, nullptr), LLA_OK);
  ASSERT_EQ(settle_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, &released, nullptr), LLA_OK);
  EXPECT_EQ(released, 1);  // the two chunks' common node replaced the first one's
  ASSERT_EQ(plan(&given, state_.get()), LLA_OK);
  const std::vector<int64_t> none = {0};
  ASSERT_EQ(commit_batch(state_.get(), batch_->get(), index_of(none), nullptr, nullptr), LLA_OK);
  ASSERT_EQ(settle_batch(state_.get(), batch_->get(), index_of(none), &released, nullptr), LLA_OK);
  EXPECT_EQ(released, 1);  // what was reserved for nothing
}

TEST_F(BatchTest, DraftsPrepareEveryBorderAndLongAppendsTheLast) {
  lla_state_desc description = LLA_STATE_DESC_INIT;
  description.max_draft = 8;
  state_ = make_state(context_.get(), {mixer(LLA_SCALAR_GATE, 2, 9)}, description);
  Rows given;
  given.rows.sequences = 1;
  given.rows.rows_per_sequence = 7;
  ASSERT_EQ(plan(&given, state_.get()), LLA_OK);
  const Sequence& sequence = (*batch_)->view.sequences[0];
  ASSERT_EQ(sequence.nodes_to_store_count, 3);
  const NodesToStore* nodes = sequence.nodes_to_store;
  EXPECT_EQ(nodes[0].position, 2);
  EXPECT_EQ(nodes[0].write, 1u);
  EXPECT_EQ(nodes[1].position, 4);
  EXPECT_EQ(nodes[1].write, 2u);
  EXPECT_LT(nodes[1].node[0], 0);
  EXPECT_EQ(nodes[2].position, 6);
  EXPECT_EQ(nodes[2].write, 1u);
  EXPECT_EQ(nodes[2].node[1], nodes[1].node[1]);  // made one border earlier
  given.rows.rows_per_sequence = 15;
  ASSERT_EQ(plan(&given, state_.get()), LLA_OK);
  ASSERT_EQ(sequence.nodes_to_store_count, 1);
  EXPECT_EQ(sequence.nodes_to_store[0].position, 14);
  EXPECT_EQ(sequence.nodes_to_store[0].write, 7u);
}

TEST_F(BatchTest, AnExhaustedPoolLeavesTheStateAsItWas) {
  lla_state_desc description = LLA_STATE_DESC_INIT;
  description.slots = 4;
  description.max_length = 200;
  description.max_draft = 5;
  description.node_blocks = 3;
  state_ = make_state(context_.get(), {mixer(LLA_SCALAR_GATE, 4, 9)}, description);
  append(0, 8);  // takes two at a time, keeps one
  refuse(LLA_NO_BLOCKS, "sequence 1: the state's 3 node blocks are all in use", [](Rows* r) {
    r->in = {0, 1};
    r->rows.rows_per_sequence = 12;
  });
  append(0, 4);
  EXPECT_EQ(state_->free_nodes(), 1);
}

// Whatever one slot does, the default pool suffices.
TEST_F(BatchTest, TheDefaultPoolIsLargeEnough) {
  for (const bool delta : {false, true}) {
    for (const bool with_linear : {false, true}) {
      for (const int64_t draft : {int64_t{2}, int64_t{9}}) {
        std::vector<LayerHistory> layers = {mixer(delta ? LLA_DELTA_RULE : LLA_SCALAR_GATE, 2, 9)};
        if (with_linear) layers.push_back(mixer(LLA_SCALAR_GATE, 2, 0));
        lla_state_desc description = LLA_STATE_DESC_INIT;
        description.max_length = 31;
        description.max_draft = draft;
        state_ = make_state(context_.get(), layers, description);
        for (int64_t first = 0; first <= 31; ++first) {
          for (int64_t second = 0; second <= 31 - first; ++second) {
            ASSERT_EQ(state_->reset(nullptr, 0, nullptr, nullptr), LLA_OK);
            if (first > 0) append(0, first);
            if (second > 0) append(0, second);
            ASSERT_EQ(state_->record(0).image.position, first + second);
          }
        }
      }
    }
  }
}

}  // namespace
