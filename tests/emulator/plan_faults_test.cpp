// SPDX-License-Identifier: Apache-2.0
// What a bad value in memory of the device does to a plan or a commit that is made there, and what the host may do
// meanwhile.
#include <gtest/gtest.h>

#include "device_plan_testing.h"

namespace core_testing {
namespace {

class Faults : public testing::Test {
 protected:
  static constexpr int64_t kGrain = 4, kCount = 4;
  void SetUp() override { open(1); }
  // With so many times the rows between two sequences.
  void open(int64_t spread) {
    batch_.reset();
    state_.reset();
    context_ = device_context();
    total_ = 48 * spread;
    for (size_t i = 0; i < offsets_.size(); ++i) offsets_[i] = 12 * spread * static_cast<int64_t>(i);
    positions_ = {0, 0, 0, 0};
    lla_state_desc description = LLA_STATE_DESC_INIT;
    description.slots = 8;
    description.max_length = 32;
    description.max_draft = 3;
    description.node_blocks = 500;
    state_ = make_state(context_.get(), {sized(mixer(LLA_SCALAR_GATE, kGrain, 14))}, description);
    lla_batch_limits limits = limits_of(kCount, 64 * spread, 1);
    limits.max_rows_per_sequence = 12;
    limits.max_length = 30;
    batch_ = std::make_unique<DeviceBatch>(context_.get(), limits);
    append({5, 6, 7, 8});
  }
  void append(std::vector<int64_t> rows) {
    count_ = std::move(rows);
    ASSERT_EQ(plan(false), LLA_OK);
    ASSERT_EQ(commit_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, nullptr, nullptr), LLA_OK);
    for (int64_t b = 0; b < kCount; ++b) positions_[static_cast<size_t>(b)] += count_[static_cast<size_t>(b)];
    count_ = {1, 1, 1, 1};
  }
  lla_status plan(bool there = true) {
    lla_rows rows = LLA_ROWS_INIT;
    rows.sequences = kCount;
    rows.total_rows = total_;
    rows.offsets = index_of(offsets_);
    rows.counts = index_of(count_);
    rows.slot_in = index_of(in_);
    rows.slot_out = index_of(out_);
    rows.expected_positions = index_of(positions_);
    rows.snapshots = static_cast<int64_t>(snapshot_slot_.size());
    rows.snapshot_sequences = index_of(snapshot_sequence_);
    rows.snapshot_rows = index_of(snapshot_rows_);
    rows.snapshot_slots = index_of(snapshot_slot_);
    if (there) {
      for (lla_index* array : {&rows.offsets, &rows.counts, &rows.slot_in, &rows.slot_out, &rows.expected_positions})
        array->location = LLA_DEVICE;
    }
    Error error;
    const lla_status status = plan_batch(batch_->get(), state_.get(), rows, nullptr, nullptr, &error);
    EXPECT_EQ(status, LLA_OK) << error.text;
    return status;
  }
  // Plans and commits; only the sequences named have faults, and only their slots stay as they were.
  void expect(uint32_t fault, std::vector<int64_t> faulty) {
    std::vector<SlotImage> before;
    for (int64_t slot = 0; slot < 8; ++slot) before.push_back(state_->record(slot).image);
    ASSERT_EQ(plan(), LLA_OK);
    Error error;
    ASSERT_EQ(commit_batch(state_.get(), batch_->get(), accepted_.empty() ? lla_index{nullptr, 0, 0} : on_device(accepted_),
                           nullptr, &error),
              LLA_OK)
        << error.text;
    const SlotImage* records = state_->device_records();
    const bool at_plan = fault != LLA_FAULT_ACCEPTED;
    for (int64_t b = 0; b < kCount; ++b) {
      bool bad = false;
      for (const int64_t f : faulty) bad = bad || f == b;
      const size_t i = static_cast<size_t>(b);
      EXPECT_EQ(batch_->answer(b).faults, bad ? fault : 0u) << b;
      EXPECT_EQ(batch_->sequence(b).padding, bad && at_plan) << b;
      EXPECT_EQ(batch_->sequence(b).rows, bad && at_plan ? 0 : count_[i]) << b;
      if (bad) continue;
      EXPECT_EQ(records[out_[i]].position, before[static_cast<size_t>(in_[i])].position + count_[i]) << b;
    }
    for (int64_t slot = 0; slot < 8; ++slot) {
      bool moved = false;
      for (int64_t b = 0; b < kCount; ++b) {
        bool bad = false;
        for (const int64_t f : faulty) bad = bad || f == b;
        moved = moved || (!bad && out_[static_cast<size_t>(b)] == slot && count_[static_cast<size_t>(b)] > 0);
      }
      EXPECT_EQ(same_image(records[slot], before[static_cast<size_t>(slot)]), !moved) << slot;
    }
    // Every row is in a live sequence or slack.
    std::vector<int> seen(static_cast<size_t>(total_));
    const BatchView& view = batch_->get()->device_view;
    for (int64_t b = 0; b < kCount; ++b) {
      for (int64_t r = 0; r < view.sequences[b].rows; ++r) ++seen[static_cast<size_t>(view.sequences[b].row_begin + r)];
    }
    for (int64_t i = 0; i < view.slack_count; ++i) {
      for (int64_t r = view.slack[i].begin; r < view.slack[i].end; ++r) ++seen[static_cast<size_t>(r)];
    }
    for (const int times : seen) EXPECT_EQ(times, 1);
    // The host hears of it, and comes to the same records.
    EXPECT_EQ(settle_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, nullptr, nullptr), LLA_BUSY);
    ASSERT_EQ(collect_batch(batch_->get(), nullptr, &error), LLA_OK) << error.text;
    EXPECT_EQ(batch_->get()->faults, faulty.empty() ? 0u : fault);
    ASSERT_EQ(settle_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, nullptr, &error), LLA_OK) << error.text;
    int64_t linked = 0;
    for (int64_t slot = 0; slot < 8; ++slot) {
      EXPECT_TRUE(same_image(records[slot], state_->record(slot).image)) << slot;
      for (const int32_t id : records[slot].node) linked += id >= 0;
    }
    EXPECT_EQ(state_->free_nodes() + linked, 500);
  }

  ContextPointer context_;
  StatePointer state_;
  std::unique_ptr<DeviceBatch> batch_;
  int64_t total_ = 48;
  std::vector<int64_t> offsets_{0, 12, 24, 36, 48}, count_, in_{0, 1, 2, 3}, out_{0, 1, 2, 3}, positions_{0, 0, 0, 0};
  std::vector<int64_t> accepted_, snapshot_sequence_, snapshot_rows_, snapshot_slot_;
};

TEST_F(Faults, None) { expect(0, {}); }
TEST_F(Faults, SlotOutOfRange) {
  in_[1] = out_[1] = 8;
  ASSERT_EQ(plan(), LLA_OK);
  EXPECT_EQ(batch_->answer(1).faults, LLA_FAULT_SLOT);
  EXPECT_TRUE(batch_->sequence(1).padding);
  in_[1] = -2;
  out_[1] = 1;
  ASSERT_EQ(plan(), LLA_OK);
  EXPECT_EQ(batch_->answer(1).faults, LLA_FAULT_SLOT);
  in_[1] = 1;
  out_[1] = -1;
  expect(LLA_FAULT_SLOT, {1});
}
TEST_F(Faults, PaddingWithDestination) {
  in_[1] = -1;
  out_[1] = 5;
  ASSERT_EQ(plan(), LLA_OK);
  EXPECT_EQ(batch_->answer(1).faults, LLA_FAULT_SLOT);
  EXPECT_EQ(batch_->answer(0).faults, 0u);
  discard_batch(batch_->get());
  EXPECT_EQ(state_->free_nodes(), 500 - 4);
}
TEST_F(Faults, Position) {
  positions_[2] += 1;
  expect(LLA_FAULT_POSITION, {2});
}
TEST_F(Faults, CountsOutOfRange) {
  count_[3] = 13;
  expect(LLA_FAULT_ROWS, {3});
  positions_ = {6, 7, 8, 8};
  count_[3] = -1;
  expect(LLA_FAULT_ROWS, {3});
}
TEST_F(Faults, OffsetsFall) {
  offsets_ = {0, 12, 8, 36, 48};  // the second ends before it begins, the third begins inside the first
  expect(LLA_FAULT_ROWS, {1, 2});
}
TEST_F(Faults, OffsetsFallInALongBatch) {
  open(25);
  offsets_ = {0, 300, 200, 900, 1200};
  expect(LLA_FAULT_ROWS, {1, 2});
  positions_ = {6, 6, 7, 9};
  offsets_ = {0, 300, 1100, 900, 1200};  // over more than half of the rows
  expect(LLA_FAULT_ROWS, {2, 3});
}
TEST_F(Faults, OffsetsBeyondTheRows) {
  offsets_ = {0, 12, 24, 36, 49};
  expect(LLA_FAULT_ROWS, {3});
  positions_ = {6, 7, 8, 8};
  offsets_ = {-1, 12, 24, 36, 48};
  expect(LLA_FAULT_ROWS, {0});
}
TEST_F(Faults, Length) {
  append({10, 10, 10, 10});
  append({10, 9, 8, 7});  // 25 25 25 25
  count_ = {5, 6, 5, 5};
  expect(LLA_FAULT_LENGTH, {1});
}
TEST_F(Faults, DestinationTwice) {
  in_[0] = 1;  // which grows at the same time: that is allowed
  positions_[0] = positions_[1];
  out_[0] = 5;
  out_[3] = 5;
  expect(LLA_FAULT_DESTINATION, {0, 3});
}
TEST_F(Faults, DestinationHoldsSomething) {
  in_[0] = 1;
  positions_[0] = positions_[1];
  out_[0] = 0;
  expect(LLA_FAULT_DESTINATION, {0});
}
TEST_F(Faults, SnapshotBeyondTheRows) {
  snapshot_sequence_ = {2};
  snapshot_rows_ = {2};
  snapshot_slot_ = {6};
  expect(LLA_FAULT_SNAPSHOT, {2});
}
TEST_F(Faults, SnapshotDestinationTwice) {
  snapshot_sequence_ = {2};
  snapshot_rows_ = {1};
  snapshot_slot_ = {6};
  out_[1] = 6;
  expect(LLA_FAULT_DESTINATION, {1, 2});
}
TEST_F(Faults, Accepted) {
  count_ = {2, 3, 7, 3};
  accepted_ = {3, 3, 7, -1};
  expect(LLA_FAULT_ACCEPTED, {0, 3});
  positions_ = {5, 9, 14, 8};
  count_ = {2, 3, 7, 3};
  accepted_ = {2, 3, 4, 3};  // a part of a long append
  expect(LLA_FAULT_ACCEPTED, {2});
}
TEST_F(Faults, MovedSincePlan) {
  DeviceBatch other(context_.get(), limits_of(kCount, 64, 1));
  ASSERT_EQ(plan(), LLA_OK);
  std::swap(*batch_, other);
  ASSERT_EQ(plan(), LLA_OK);
  const std::vector<int64_t> kept{0, 1, 0, 1}, all{1, 1, 1, 1};
  ASSERT_EQ(commit_batch(state_.get(), batch_->get(), on_device(kept), nullptr, nullptr), LLA_OK);
  ASSERT_EQ(commit_batch(state_.get(), other.get(), on_device(all), nullptr, nullptr), LLA_OK);
  EXPECT_EQ(other.answer(0).faults, 0u);
  EXPECT_EQ(other.answer(1).faults, LLA_FAULT_MOVED);
  EXPECT_EQ(other.answer(2).faults, 0u);
  EXPECT_EQ(other.answer(3).faults, LLA_FAULT_MOVED);
  Error error;
  // In their order only.
  ASSERT_EQ(collect_batch(other.get(), nullptr, &error), LLA_OK);
  EXPECT_EQ(settle_batch(state_.get(), other.get(), {nullptr, 0, 0}, nullptr, nullptr), LLA_BUSY);
  for (DeviceBatch* batch : {batch_.get(), &other}) {
    ASSERT_EQ(collect_batch(batch->get(), nullptr, &error), LLA_OK);
    ASSERT_EQ(settle_batch(state_.get(), batch->get(), {nullptr, 0, 0}, nullptr, &error), LLA_OK) << error.text;
  }
  for (int64_t slot = 0; slot < 4; ++slot) {
    EXPECT_EQ(state_->record(slot).image.position, positions_[static_cast<size_t>(slot)] + 1);
    EXPECT_TRUE(same_image(state_->record(slot).image, state_->device_records()[slot]));
  }
}
// While commits are not settled the host neither plans nor changes nor reads; a batch is planned again after its settling
// only.
TEST_F(Faults, HostIsBehind) {
  ASSERT_EQ(plan(), LLA_OK);
  ASSERT_EQ(commit_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, nullptr, nullptr), LLA_OK);
  Error error;
  lla_rows rows = LLA_ROWS_INIT;
  rows.sequences = 1;
  rows.rows_per_sequence = 1;
  EXPECT_EQ(plan_batch(batch_->get(), state_.get(), rows, nullptr, nullptr, &error), LLA_BUSY);
  DeviceBatch other(context_.get(), limits_of(kCount, 64, 1));
  EXPECT_EQ(plan_batch(other.get(), state_.get(), rows, nullptr, nullptr, &error), LLA_BUSY);
  EXPECT_NE(std::strstr(error.text, "lla_state_settle"), nullptr);
  size_t bytes = 0;
  const std::vector<int64_t> one{1}, two{2};
  EXPECT_EQ(state_->reset(index_of(one), 1, {}, &error), LLA_BUSY);
  EXPECT_EQ(state_->fork(index_of(one), index_of(two), 1, nullptr, &error), LLA_BUSY);
  EXPECT_EQ(state_->truncate(1, 5, &error), LLA_BUSY);
  EXPECT_EQ(state_->export_size(1, &bytes, &error), LLA_BUSY);
  ASSERT_EQ(collect_batch(batch_->get(), nullptr, &error), LLA_OK);
  const std::vector<int64_t> wrong{1, 0, 1, 1};
  EXPECT_EQ(settle_batch(state_.get(), batch_->get(), index_of(wrong), nullptr, &error), LLA_INVALID_ARGUMENT);
  ASSERT_EQ(settle_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, nullptr, &error), LLA_OK);
  EXPECT_EQ(plan_batch(other.get(), state_.get(), rows, nullptr, nullptr, &error), LLA_OK) << error.text;
  discard_batch(other.get());
}
// Without a state only rows and positions are there to be checked.
TEST_F(Faults, NoState) {
  lla_rows rows = LLA_ROWS_INIT;
  rows.sequences = kCount;
  rows.total_rows = 48;
  offsets_[1] = 13;
  rows.offsets = on_device(offsets_);
  Error error;
  ASSERT_EQ(plan_batch(batch_->get(), nullptr, rows, nullptr, nullptr, &error), LLA_OK) << error.text;
  EXPECT_EQ(batch_->answer(0).faults, LLA_FAULT_ROWS);
  EXPECT_EQ(batch_->sequence(1).rows, 11);
  EXPECT_EQ(batch_->sequence(1).nodes_to_store_count, 0);
  EXPECT_LT(batch_->sequence(1).history.tail, 0);
  positions_ = {0, 19, -1, 20};
  rows.expected_positions = on_device(positions_);
  ASSERT_EQ(plan_batch(batch_->get(), nullptr, rows, nullptr, nullptr, &error), LLA_OK) << error.text;
  EXPECT_EQ(batch_->answer(1).faults, 0u);
  EXPECT_EQ(batch_->sequence(1).position, 19);
  EXPECT_EQ(batch_->answer(2).faults, LLA_FAULT_POSITION);
  EXPECT_EQ(batch_->answer(3).faults, LLA_FAULT_LENGTH);
  rows.total_rows = 0;
  EXPECT_EQ(plan_batch(batch_->get(), nullptr, rows, nullptr, nullptr, &error), LLA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace core_testing
