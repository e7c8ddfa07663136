// SPDX-License-Identifier: Apache-2.0
// Gradient slots of a batch: their shape, which slots are taken, and what is refused.
#include <cstring>
#include <functional>

#include "core_testing.h"

using namespace core_testing;

namespace {

class GradientTest : public testing::Test {
 protected:
  GradientTest() {
    LayerHistory first = with_convolution(mixer(LLA_SCALAR_GATE, 4, 8), 2, 4);
    layers_ = {first, mixer(LLA_DELTA_RULE, 4, 0), mixer(LLA_DELTA_RULE, 4, 8)};
    description_.slots = 3;
    description_.max_length = 100;
    state_ = make_state(context_.get(), layers_, description_);
    lla_state_desc description = description_;
    description.kind = LLA_STATE_GRADIENT;
    gradient_ = make_state(context_.get(), layers_, description);
    batch_ = std::make_unique<BatchOwner>(context_.get(), limits_of(3, 60));
    append(0, 23);  // five chunks: nodes 0 and 2, three rows
  }
  void append(int64_t slot, int64_t rows) {
    lla_rows given = LLA_ROWS_INIT;
    given.sequences = 1;
    given.rows_per_sequence = rows;
    const std::vector<int64_t> in = {slot};
    given.slot_in = index_of(in);
    ASSERT_EQ(plan_batch(batch_->get(), state_.get(), given, nullptr, nullptr, nullptr), LLA_OK);
    ASSERT_EQ(commit_batch(state_.get(), batch_->get(), {nullptr, 0, 0}, nullptr, nullptr), LLA_OK);
  }
  lla_status plan(const std::vector<int64_t>& in, int64_t rows, const std::vector<int64_t>& initial,
                  const std::vector<int64_t>& final) {
    lla_rows given = LLA_ROWS_INIT;
    given.sequences = static_cast<int64_t>(in.size());
    given.rows_per_sequence = rows;
    given.slot_in = index_of(in);
    if (!initial.empty()) given.initial_gradient_slots = index_of(initial);
    if (!final.empty()) given.final_gradient_slots = index_of(final);
    error_ = Error();
    return plan_batch(batch_->get(), state_.get(), given, gradient_.get(), nullptr, &error_);
  }
  const Sequence& sequence(int64_t b) const { return (*batch_)->view.sequences[b]; }

  ContextPointer context_ = reference_context();
  std::vector<LayerHistory> layers_;
  lla_state_desc description_ = LLA_STATE_DESC_INIT;
  StatePointer state_, gradient_;
  std::unique_ptr<BatchOwner> batch_;
  Error error_;
};

TEST_F(GradientTest, InitialGradientsTakeTheShapeOfTheHistoryAndAreZero) {
  const auto fill = [](const Pool& pool, int64_t blocks) {
    if (pool.base) std::memset(pool.base, 0xff, static_cast<size_t>(pool.stride * blocks));
  };
  for (int64_t i = 0; i < 3; ++i) {
    fill(gradient_->memory(i).nodes, gradient_->plan().node_blocks);
    fill(gradient_->memory(i).tails, 3);
    fill(gradient_->memory(i).convs, 3);
  }
  ASSERT_EQ(plan({0, 1}, 4, {2, -1}, {}), LLA_OK) << error_.text;
  const SlotImage& image = sequence(0).initial_gradient;
  EXPECT_EQ(image.position, 23);
  EXPECT_EQ(image.start, 0);
  EXPECT_EQ(image.tail, 2);
  EXPECT_EQ(image.tail_origin, 0);
  EXPECT_EQ(image.conv_rows, 3);
  EXPECT_EQ(image.conv_origin, 3);
  for (int b = 0; b < kNodes; ++b) EXPECT_EQ(image.node[b] >= 0, sequence(0).history.node[b] >= 0) << b;
  EXPECT_GE(image.node[0], 0);
  EXPECT_GE(image.node[2], 0);
  EXPECT_GE(image.node[kAbsorbed], 0);
  EXPECT_EQ(gradient_->free_nodes(), gradient_->plan().node_blocks - 3);
  EXPECT_LT(sequence(1).initial_gradient.tail, 0);
  EXPECT_LT(sequence(0).final_gradient.tail, 0);
  const SlotImage& record = gradient_->record(2).image;
  EXPECT_EQ(std::memcmp(record.node, image.node, sizeof record.node), 0);
  EXPECT_EQ(record.position, 23);
  double values[12];
  const auto is_zero = [&](int64_t layer, lla_state_part part, int64_t index, int64_t d0, int64_t d1, int64_t d2) {
    for (double& value : values) value = 1;
    EXPECT_EQ(gradient_->read(2, layer, part, index, lla_tensor_of(values, LLA_F64, d0, d1, d2, -1), nullptr, &error_),
              LLA_OK);
    return std::all_of(values, values + d0 * (d1 < 0 ? 1 : d1), [](double value) { return value == 0; });
  };
  EXPECT_TRUE(is_zero(0, LLA_PART_NODE, 2, 1, 1, 1));
  EXPECT_TRUE(is_zero(0, LLA_PART_NODE_DECAY, 2, 1, -1, -1));
  EXPECT_TRUE(is_zero(1, LLA_PART_ABSORBED, 0, 1, 1, 1));
  EXPECT_TRUE(is_zero(2, LLA_PART_TAIL_K, 0, 3, 1, 1));
  EXPECT_TRUE(is_zero(2, LLA_PART_TAIL_GATE, 0, 3, 1, -1));
  EXPECT_TRUE(is_zero(0, LLA_PART_CONV, 0, 3, 2, -1));
  // Planning anew empties the slot first; discarding the plan leaves it as it is.
  const uint64_t version = gradient_->record(2).version;
  ASSERT_EQ(plan({0}, 4, {2}, {}), LLA_OK);
  EXPECT_EQ(gradient_->free_nodes(), gradient_->plan().node_blocks - 3);
  EXPECT_GT(gradient_->record(2).version, version);
  discard_batch(batch_->get());
  EXPECT_EQ(gradient_->record(2).image.position, 23);
  ASSERT_EQ(plan({1}, 4, {2}, {}), LLA_OK);  // slot 1 is empty
  EXPECT_EQ(gradient_->free_nodes(), gradient_->plan().node_blocks);
  EXPECT_EQ(sequence(0).initial_gradient.tail, 2);
}

TEST_F(GradientTest, FinalGradientsStandWhereTheRowsEnd) {
  const int64_t slot = 1, position = 27;
  ASSERT_EQ(gradient_->reset(&slot, 1, &position, nullptr), LLA_OK);
  ASSERT_EQ(plan({0}, 4, {}, {1}), LLA_OK) << error_.text;
  EXPECT_LT(sequence(0).final_gradient.tail, 0);  // nothing in it: zero
  ASSERT_EQ(plan({0}, 9, {}, {1}), LLA_OK);       // wherever it stands
  double value = 3;
  ASSERT_EQ(gradient_->write(1, 0, LLA_PART_NODE, 1, lla_tensor_of(&value, LLA_F64, 1, 1, 1, -1), nullptr, &error_), LLA_OK);
  ASSERT_EQ(plan({0}, 4, {}, {1}), LLA_OK) << error_.text;
  EXPECT_EQ(sequence(0).final_gradient.tail, 1);
  EXPECT_EQ(sequence(0).final_gradient.node[1], gradient_->record(1).image.node[1]);
  EXPECT_EQ(plan({0}, 5, {}, {1}), LLA_POSITION_MISMATCH);
  EXPECT_STREQ(error_.text, "final_gradient_slots[0] = 1 stands at 27, but the rows of sequence 0 end at 28");
}

TEST_F(GradientTest, OnePieceHandsItsGradientToTheOneBefore) {
  ASSERT_EQ(plan({0}, 4, {2}, {}), LLA_OK);  // the later piece: position 23 on
  const SlotImage shape = sequence(0).initial_gradient;
  const int64_t slot = 1, position = 0;
  ASSERT_EQ(state_->reset(&slot, 1, &position, nullptr), LLA_OK);
  ASSERT_EQ(plan({1}, 23, {0}, {2}), LLA_OK) << error_.text;  // the earlier piece ends there
  EXPECT_EQ(sequence(0).final_gradient.tail, shape.tail);
  EXPECT_EQ(std::memcmp(sequence(0).final_gradient.node, shape.node, sizeof shape.node), 0);
}

TEST_F(GradientTest, SlotsHaveOneRole) {
  EXPECT_EQ(plan({0, 1}, 4, {2, 2}, {}), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(error_.text, "initial_gradient_slots[1] = 2 has another role in this batch already");
  EXPECT_EQ(plan({0}, 4, {2}, {2}), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(plan({0, 1}, 4, {}, {1, 1}), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(plan({0}, 4, {3}, {}), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(error_.text, "initial_gradient_slots[0] = 3 is not below the gradient state's 3 slots");
  EXPECT_EQ(plan({0, -1}, 4, {2, 2}, {}), LLA_OK) << error_.text;  // padding has no gradient
}

TEST_F(GradientTest, RefusalsChangeNothing) {
  const int64_t free = state_->free_nodes();
  lla_state_desc description = description_;
  description.kind = LLA_STATE_GRADIENT;
  description.node_blocks = 2;  // three are needed
  gradient_ = make_state(context_.get(), layers_, description);
  EXPECT_EQ(plan({0}, 4, {2}, {}), LLA_NO_BLOCKS);
  EXPECT_EQ(gradient_->free_nodes(), 2);
  EXPECT_EQ(gradient_->record(2).image.position, 0);
  EXPECT_EQ(state_->free_nodes(), free);
  EXPECT_EQ(state_->record(0).appends, 0);
  description.node_blocks = 3;  // enough, also for planning it again and again
  gradient_ = make_state(context_.get(), layers_, description);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(plan({0}, 4, {2}, {}), LLA_OK) << error_.text;
  description.node_blocks = 0;
  description.max_length = 22;
  gradient_ = make_state(context_.get(), layers_, description);
  EXPECT_EQ(plan({0}, 4, {2}, {}), LLA_LEVELS_EXCEEDED);
}

TEST_F(GradientTest, TheGradientStateMustBeOfTheSameGroup) {
  lla_state_desc description = description_;
  description.kind = LLA_STATE_GRADIENT;
  gradient_ = make_state(context_.get(), {layers_[0], layers_[1]}, description);
  EXPECT_EQ(plan({0}, 4, {2}, {}), LLA_STATE_INCOMPATIBLE);
  auto layers = layers_;
  layers[2].shape.value_dim = 2;
  gradient_ = make_state(context_.get(), layers, description);
  EXPECT_EQ(plan({0}, 4, {2}, {}), LLA_STATE_INCOMPATIBLE);
  EXPECT_STREQ(error_.text, "gradient_state and state have different layers 2");
  gradient_ = make_state(context_.get(), layers_, description_);  // of the wrong kind
  EXPECT_EQ(plan({0}, 4, {2}, {}), LLA_STATE_INCOMPATIBLE);
  const ContextPointer other = reference_context();
  gradient_ = make_state(other.get(), layers_, description);
  EXPECT_EQ(plan({0}, 4, {2}, {}), LLA_WRONG_CONTEXT);
  gradient_.reset();
  EXPECT_EQ(plan({0}, 4, {2}, {}), LLA_NULL_POINTER);
  EXPECT_STREQ(error_.text, "initial_gradient_slots is given, but no gradient_state");
  gradient_ = make_state(context_.get(), layers_, description);
  std::swap(gradient_, state_);
  EXPECT_EQ(plan({0}, 4, {}, {}), LLA_STATE_INCOMPATIBLE);  // rows cannot be appended to gradients
}

}  // namespace
