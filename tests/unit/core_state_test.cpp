// SPDX-License-Identifier: Apache-2.0
// States: sizes and defaults, refusals, memory of the caller, reading and writing parts, imports of linear states.
#include <cmath>
#include <cstring>
#include <limits>

#include "core_testing.h"

using namespace core_testing;

namespace {

lla_state_desc description_of(int64_t slots = 1) {
  lla_state_desc description = LLA_STATE_DESC_INIT;
  description.slots = slots;
  return description;
}

class StateTest : public testing::Test {
 protected:
  StatePlan plan(const Context& context, const std::vector<LayerHistory>& layers, const lla_state_desc& description) {
    StatePlan result;
    Error error;
    EXPECT_EQ(plan_state(context, layers.data(), static_cast<int64_t>(layers.size()), description, &result, &error), LLA_OK)
        << error.text;
    return result;
  }
  void refuse(const Context& context, const std::vector<LayerHistory>& layers, const lla_state_desc& description,
              lla_status status, const char* text) {
    StatePlan result;
    Error error;
    EXPECT_EQ(plan_state(context, layers.data(), static_cast<int64_t>(layers.size()), description, &result, &error), status);
    EXPECT_NE(std::string(error.text).find(text), std::string::npos) << error.text;
  }

  ContextPointer reference_ = reference_context();
  ContextPointer cpu_ = cpu_context();
};

TEST_F(StateTest, LengthFollowsFromTheLevels) {
  const LayerHistory linear = mixer(LLA_SCALAR_GATE, 64, 0), short_layer = mixer(LLA_SCALAR_GATE, 64, 10),
                     long_layer = mixer(LLA_DELTA_RULE, 64, 30), absorbing = mixer(LLA_SCALAR_GATE, 64, 9, true);
  EXPECT_EQ(plan(*cpu_, {linear}, description_of()).max_length, 1 << 20);
  EXPECT_EQ(plan(*cpu_, {linear, short_layer}, description_of()).max_length, 512);
  EXPECT_EQ(plan(*cpu_, {long_layer}, description_of()).max_length, 1 << 20);
  EXPECT_EQ(plan(*cpu_, {absorbing}, description_of()).max_length, 1 << 20);
  lla_state_desc description = description_of();
  description.max_length = 512;
  EXPECT_EQ(plan(*cpu_, {short_layer}, description).node_levels, 4);  // 8 chunks: bits 0 ... 3
  EXPECT_EQ(plan(*cpu_, {absorbing}, description).node_levels, 1);    // column 7 is apart, column 8 absorbs
  EXPECT_EQ(plan(*cpu_, {linear}, description).node_levels, 0);
  description.max_length = 513;
  refuse(*cpu_, {linear, short_layer}, description, LLA_LEVELS_EXCEEDED, "max_length is 513");
  EXPECT_EQ(plan(*cpu_, {linear, absorbing}, description).max_length, 513);
  description.max_length = int64_t{1} << 61;
  EXPECT_EQ(plan(*cpu_, {linear}, description).max_length, int64_t{1} << 61);
  refuse(*cpu_, {mixer(LLA_SCALAR_GATE, 64, 62)}, description, LLA_LEVELS_EXCEEDED, "2^48 chunks");
}

TEST_F(StateTest, KnowsHowTheGroupUsesNodes) {
  const LayerHistory linear = mixer(LLA_DELTA_RULE, 4, 0), scalar = mixer(LLA_SCALAR_GATE, 4, 10),
                     delta = mixer(LLA_DELTA_RULE, 4, 10), all_absorbed = mixer(LLA_DELTA_RULE, 4, 3, true);
  const auto check = [&](const std::vector<LayerHistory>& layers, bool absorbed, bool rewrites, int64_t levels) {
    const StatePlan result = plan(*cpu_, layers, description_of());
    EXPECT_EQ(result.uses_absorbed, absorbed);
    EXPECT_EQ(result.rewrites_nodes, rewrites);
    EXPECT_EQ(result.node_levels, levels);
  };
  check({linear}, true, false, 0);
  check({scalar}, false, false, 8);
  check({delta}, false, true, 8);
  check({scalar, linear}, true, false, 8);
  check({all_absorbed}, true, false, 0);
  check({convolution(4, 3, 4)}, false, false, 0);
}

TEST_F(StateTest, TypesFollowTheBackend) {
  const std::vector<LayerHistory> layers = {mixer(LLA_SCALAR_GATE, 4, 0), mixer(LLA_SCALAR_GATE, 4, 10)};
  EXPECT_EQ(plan(*cpu_, layers, description_of()).node_dtype, LLA_F32);
  EXPECT_EQ(plan(*reference_, layers, description_of()).tail_dtype, LLA_F64);
  lla_state_desc description = description_of();
  description.node_dtype = LLA_F64;
  refuse(*cpu_, layers, description, LLA_DTYPE_MISMATCH, "node_dtype");
  description.node_dtype = LLA_F16;
  refuse(*reference_, layers, description, LLA_DTYPE_MISMATCH, "node_dtype");
  description.node_dtype = LLA_BF16;
  description.tail_dtype = LLA_F64;
  refuse(*cpu_, layers, description, LLA_DTYPE_MISMATCH, "tail_dtype");
  description.tail_dtype = LLA_BF16;
  const StatePlan made = plan(*cpu_, layers, description);
  SlotMemory linear, log_linear;
  lay_out(made, layers[0], &linear);
  lay_out(made, layers[1], &log_linear);
  EXPECT_EQ(linear.node_layout.dtype, LLA_F32);  // a single node sums too much for bf16
  EXPECT_EQ(log_linear.node_layout.dtype, LLA_BF16);
  description.kind = LLA_STATE_GRADIENT;
  EXPECT_EQ(plan(*cpu_, layers, description).node_dtype, LLA_F32);
  EXPECT_EQ(plan(*reference_, layers, description).tail_dtype, LLA_F64);
}

TEST_F(StateTest, TailsHoldWhatACellHandsOver) {
  LayerHistory cell = mixer(LLA_SCALAR_GATE, 4, 0);
  lla_state_desc description = description_of();
  const auto holds = [&](int32_t tail, int32_t inner) {
    cell.inner_dtype = inner;
    description.tail_dtype = tail;
    StatePlan result;
    return plan_state(*reference_, &cell, 1, description, &result, nullptr) == LLA_OK;
  };
  EXPECT_TRUE(holds(LLA_F32, LLA_F32));
  EXPECT_TRUE(holds(LLA_F64, LLA_F32));
  EXPECT_TRUE(holds(LLA_F32, LLA_BF16));
  EXPECT_TRUE(holds(LLA_BF16, LLA_BF16));
  EXPECT_TRUE(holds(LLA_BF16, LLA_DTYPE_DEFAULT));
  EXPECT_FALSE(holds(LLA_BF16, LLA_F32));
  EXPECT_FALSE(holds(LLA_BF16, LLA_F16));
  EXPECT_FALSE(holds(LLA_F16, LLA_BF16));
  EXPECT_FALSE(holds(LLA_F32, LLA_F64));
}

TEST_F(StateTest, RefusesDescriptionsThatDoNotFit) {
  const std::vector<LayerHistory> layers = {mixer(LLA_SCALAR_GATE, 4, 10)};
  lla_state_desc description = description_of();
  refuse(*cpu_, {mixer(LLA_SCALAR_GATE, 4, 10), convolution(8, 3, 4)}, description, LLA_STATE_INCOMPATIBLE,
         "layers[1] has grain 8");
  refuse(*cpu_, {LayerHistory()}, description, LLA_INVALID_ARGUMENT, "layers[0]");
  description.kind = 2;
  refuse(*cpu_, layers, description, LLA_INVALID_ARGUMENT, "kind");
  description = description_of();
  description.reserved = 1;
  refuse(*cpu_, layers, description, LLA_INVALID_ARGUMENT, "reserved");
  description = description_of(-1);
  refuse(*cpu_, layers, description, LLA_INVALID_ARGUMENT, "slots");
  description = description_of();
  description.max_draft = 64 * 4 + 1;
  refuse(*cpu_, layers, description, LLA_INVALID_ARGUMENT, "max_draft");
  description = description_of();
  description.node_blocks = -1;
  refuse(*cpu_, layers, description, LLA_INVALID_ARGUMENT, "node_blocks");
  description = description_of(1 << 30);
  refuse(*cpu_, layers, description, LLA_SIZE_OVERFLOW, "node_blocks");
  LayerHistory huge = mixer(LLA_SCALAR_GATE, 4, 10);
  huge.shape.key_dim = huge.shape.value_dim = int64_t{1} << 31;
  refuse(*cpu_, {huge}, description_of(), LLA_SIZE_OVERFLOW, "layers[0]");
}

TEST_F(StateTest, GeometryAgreesWithTheLayout) {
  LayerHistory layer = with_convolution(mixer(LLA_DELTA_RULE, 4, 10), 7, 4);
  layer.shape.heads = 4;
  layer.shape.groups = 2;
  layer.shape.key_dim = 5;
  layer.shape.value_dim = 3;
  for (const int32_t dtype : {LLA_F32, LLA_BF16}) {
    lla_state_desc description = description_of(3);
    description.node_dtype = description.tail_dtype = dtype;
    const StatePlan made = plan(*cpu_, {layer}, description);
    SlotMemory memory;
    lay_out(made, layer, &memory);
    lla_block_geometry geometry = LLA_BLOCK_GEOMETRY_INIT;
    ASSERT_EQ(block_geometry(made, layer, LLA_BLOCK_NODE, &geometry, nullptr), LLA_OK);
    EXPECT_EQ(geometry.bytes, memory.node_layout.bytes());
    EXPECT_EQ(geometry.head_bytes * 4, geometry.bytes);
    EXPECT_EQ(geometry.count, made.node_blocks);
    EXPECT_EQ(geometry.blocks_per_fold, made.node_levels);
    EXPECT_EQ(geometry.struct_size, sizeof geometry);
    ASSERT_EQ(block_geometry(made, layer, LLA_BLOCK_TAIL, &geometry, nullptr), LLA_OK);
    EXPECT_EQ(geometry.bytes, memory.tail_layout.bytes());
    EXPECT_EQ(geometry.count, 3);
    EXPECT_EQ(geometry.head_bytes, 0);
    ASSERT_EQ(block_geometry(made, layer, LLA_BLOCK_CONV, &geometry, nullptr), LLA_OK);
    EXPECT_EQ(geometry.bytes, memory.conv_layout.bytes());
    EXPECT_EQ(geometry.bytes % geometry.alignment, 0);
    ASSERT_EQ(block_geometry(made, mixer(LLA_DELTA_RULE, 4, 10), LLA_BLOCK_CONV, &geometry, nullptr), LLA_OK);
    EXPECT_EQ(geometry.bytes, 0);
  }
}

TEST_F(StateTest, TakesTheCallersMemory) {
  const std::vector<LayerHistory> layers = {with_convolution(mixer(LLA_SCALAR_GATE, 4, 10), 2, 3)};
  const lla_state_desc description = description_of(2);
  const StatePlan made = plan(*cpu_, layers, description);
  std::vector<lla_block_memory> memory;
  std::vector<std::unique_ptr<void, void (*)(void*)>> owned;
  for (lla_block_kind kind = LLA_BLOCK_NODE; kind <= LLA_BLOCK_CONV; ++kind) {
    lla_block_geometry geometry = LLA_BLOCK_GEOMETRY_INIT;
    ASSERT_EQ(block_geometry(made, layers[0], kind, &geometry, nullptr), LLA_OK);
    const int64_t stride = geometry.bytes + 128;
    owned.emplace_back(std::aligned_alloc(64, static_cast<size_t>(stride * geometry.count)), std::free);
    memory.push_back({0, kind, 0, owned.back().get(), stride});
  }
  const auto create = [&](const std::vector<lla_block_memory>& entries, const char* text) {
    State* state = nullptr;
    Error error;
    const lla_status status = State::create(cpu_.get(), layers.data(), 1, description, entries.data(),
                                            static_cast<int64_t>(entries.size()), &state, &error);
    EXPECT_NE(std::string(error.text).find(text), std::string::npos) << error.text;
    if (state) {
      EXPECT_EQ(state->memory(0).tails.base, memory[1].base);
      EXPECT_EQ(state->memory(0).tails.stride, memory[1].stride);
      state->destroy();
    }
    return status;
  };
  EXPECT_EQ(create(memory, ""), LLA_OK);
  EXPECT_EQ(create({memory[0], memory[2]}, "kind 1"), LLA_MISSING_ROLE);
  EXPECT_EQ(create({memory[0], memory[1], memory[2], memory[1]}, "memory[3]"), LLA_INVALID_ARGUMENT);
  auto wrong = memory;
  wrong[1].stride -= 32;
  EXPECT_EQ(create(wrong, "memory[1].stride"), LLA_MISALIGNED);
  wrong = memory;
  wrong[2].stride = 0;
  EXPECT_EQ(create(wrong, "memory[2].stride"), LLA_INVALID_ARGUMENT);
  wrong = memory;
  wrong[0].base = static_cast<char*>(wrong[0].base) + 8;
  EXPECT_EQ(create(wrong, "memory[0].base"), LLA_MISALIGNED);
  wrong = memory;
  wrong[0].layer_index = 1;
  EXPECT_EQ(create(wrong, "memory[0].layer_index"), LLA_INVALID_ARGUMENT);
  wrong = memory;
  wrong[0].kind = 3;
  EXPECT_EQ(create(wrong, "memory[0].kind"), LLA_INVALID_ARGUMENT);
}

TEST_F(StateTest, AnswersQueries) {
  lla_state_desc description = description_of(3);
  description.max_length = 100;
  description.max_draft = 5;
  description.node_blocks = 9;
  const StatePointer state = make_state(cpu_.get(), {mixer(LLA_SCALAR_GATE, 4, 10), convolution(4, 3, 2)}, description);
  EXPECT_EQ(query(*state, LLA_STATE_SLOTS), 3);
  EXPECT_EQ(query(*state, LLA_STATE_MAX_LENGTH), 100);
  EXPECT_EQ(query(*state, LLA_STATE_NODE_BLOCKS), 9);
  EXPECT_EQ(query(*state, LLA_STATE_FREE_NODE_BLOCKS), 9);
  EXPECT_EQ(query(*state, LLA_STATE_LAYERS), 2);
  EXPECT_EQ(query(*state, LLA_STATE_GRAIN), 4);
  EXPECT_EQ(query(*state, LLA_STATE_MAX_DRAFT), 5);
  EXPECT_EQ(query(*state, LLA_STATE_SLOT_NODES, 2), 0);
  const int64_t rows = state->memory(0).tail_layout.bytes() + state->memory(1).conv_layout.bytes();
  EXPECT_EQ(query(*state, LLA_STATE_SLOT_BYTES, 2), rows);
  EXPECT_EQ(query(*state, LLA_STATE_POOL_BYTES), 3 * rows + 9 * state->memory(0).node_layout.bytes());
  int64_t value = 0;
  Error error;
  EXPECT_EQ(state->query(LLA_STATE_SLOT_NODES, 3, &value, &error), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(error.text, "slot = 3 is not one of the state's 3 slots");
  EXPECT_EQ(state->query(99, 0, &value, &error), LLA_INVALID_ARGUMENT);
}

TEST_F(StateTest, ResetsAndForksSayWhatIsWrong) {
  lla_state_desc description = description_of(4);
  description.max_length = 50;
  const StatePointer state = make_state(cpu_.get(), {mixer(LLA_SCALAR_GATE, 4, 10)}, description);
  Error error;
  const std::vector<int64_t> slots = {1, -1, 2}, positions = {50, -7, 3};
  EXPECT_EQ(state->reset(slots.data(), 3, positions.data(), &error), LLA_OK);
  EXPECT_EQ(state->record(1).image.position, 50);
  EXPECT_EQ(state->record(2).image.start, 3);
  EXPECT_TRUE(state->is_empty(2));
  const std::vector<int64_t> bad_slots = {1, 4}, bad_positions = {0, 51}, negative = {0, -1}, two = {1, 2}, twice = {3, 3};
  EXPECT_EQ(state->reset(bad_slots.data(), 2, nullptr, &error), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(error.text, "slots[1] = 4 is not below the state's 4 slots");
  EXPECT_EQ(state->reset(two.data(), 2, bad_positions.data(), &error), LLA_LEVELS_EXCEEDED);
  EXPECT_STREQ(error.text, "positions[1] = 51 is beyond the state's max_length 50");
  EXPECT_EQ(state->reset(two.data(), 2, negative.data(), &error), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(state->record(1).image.position, 50);  // nothing changed
  EXPECT_EQ(state->fork(two.data(), bad_slots.data(), 2, nullptr, &error), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(error.text, "targets[1] = 4 is not one of the state's 4 slots");
  EXPECT_EQ(state->fork(bad_slots.data(), two.data(), 2, nullptr, &error), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(error.text, "sources[1] = 4 is not one of the state's 4 slots");
  EXPECT_EQ(state->fork(two.data(), twice.data(), 2, nullptr, &error), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(error.text, "targets[1] = 3 is named twice");
  EXPECT_EQ(state->truncate(1, 51, &error), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(state->truncate(1, 49, &error), LLA_ROLLBACK_LIMIT);
  EXPECT_EQ(state->truncate(7, 0, &error), LLA_INVALID_ARGUMENT);
}

// ---- contents -----------------------------------------------------------------------------------------------------------

// A tensor of floats with a gap behind every row.
struct Values {
  std::vector<float> data;
  lla_tensor tensor;
  Values(std::vector<int64_t> dims, float first) {
    tensor = lla_tensor_of(nullptr, LLA_F32, dims[0], dims.size() > 1 ? dims[1] : -1, dims.size() > 2 ? dims[2] : -1, -1);
    int64_t elements = 1;
    for (int32_t i = tensor.rank - 1; i >= 0; --i) {
      tensor.strides[i] = elements;
      elements = elements * tensor.dims[i] + (i == tensor.rank - 1 ? 2 : 0);
    }
    data.assign(static_cast<size_t>(elements) + 8, -99);
    tensor.data = data.data();
    visit([&](float& x) { x = first++; });
  }
  template <class F>
  void visit(F f) {
    int64_t dims[3] = {1, 1, 1}, strides[3] = {0, 0, 0};
    for (int32_t i = 0; i < tensor.rank; ++i) {
      dims[i] = tensor.dims[i];
      strides[i] = tensor.strides[i];
    }
    for (int64_t i = 0; i < dims[0]; ++i) {
      for (int64_t j = 0; j < dims[1]; ++j) {
        for (int64_t k = 0; k < dims[2]; ++k) f(data[static_cast<size_t>(i * strides[0] + j * strides[1] + k * strides[2])]);
      }
    }
  }
  std::vector<float> values() {
    std::vector<float> out;
    visit([&](float& x) { out.push_back(x); });
    return out;
  }
};

class ContentsTest : public StateTest {
 protected:
  ContentsTest() {
    LayerHistory log_linear = with_convolution(mixer(LLA_SCALAR_GATE, 4, 8), 3, 4);
    log_linear.shape.heads = 2;
    log_linear.shape.key_dim = 3;
    log_linear.shape.value_dim = 2;
    LayerHistory linear = log_linear;
    linear.shape.levels = 0;
    linear.conv_channels = 2;
    linear.conv_width = 3;
    LayerHistory delta = mixer(LLA_DELTA_RULE, 4, 8);
    layers_ = {log_linear, linear, delta};
    state_ = make_state(cpu_.get(), layers_, description_of(3));
    // Nothing that was never written may be read.
    const auto poison = [](const Pool& pool, int64_t blocks) {
      if (pool.base) std::memset(pool.base, 0xff, static_cast<size_t>(pool.stride * blocks));
    };
    for (int64_t i = 0; i < 3; ++i) {
      poison(state_->memory(i).nodes, state_->plan().node_blocks);
      poison(state_->memory(i).tails, 3);
      poison(state_->memory(i).convs, 3);
    }
  }
  void reset(int64_t slot, int64_t position) { ASSERT_EQ(state_->reset(&slot, 1, &position, nullptr), LLA_OK); }
  lla_status write(int64_t slot, int64_t layer, lla_state_part part, int64_t index, std::vector<int64_t> dims, float first) {
    Values values(dims, first);
    return state_->write(slot, layer, part, index, values.tensor, nullptr, &error_);
  }
  std::vector<float> read(int64_t slot, int64_t layer, lla_state_part part, int64_t index, std::vector<int64_t> dims) {
    Values values(dims, -1);
    Error error;
    EXPECT_EQ(state_->read(slot, layer, part, index, values.tensor, nullptr, &error), LLA_OK) << error.text;
    return values.values();
  }
  static std::vector<float> rising(size_t count, float first) {
    std::vector<float> out;
    for (size_t i = 0; i < count; ++i) out.push_back(first + static_cast<float>(i));
    return out;
  }

  std::vector<LayerHistory> layers_;
  StatePointer state_;
  Error error_;
};

TEST_F(ContentsTest, NodesAreZeroUntilWritten) {
  reset(0, 14);  // three chunks: bits 0 and 1
  EXPECT_EQ(read(0, 0, LLA_PART_NODE, 1, {2, 3, 2}), std::vector<float>(12, 0));
  EXPECT_EQ(write(0, 0, LLA_PART_NODE, 1, {2, 3, 2}, 10), LLA_OK);
  EXPECT_EQ(write(0, 0, LLA_PART_NODE_DECAY, 1, {2}, -5), LLA_OK);
  EXPECT_EQ(read(0, 0, LLA_PART_NODE, 1, {2, 3, 2}), rising(12, 10));
  EXPECT_EQ(read(0, 0, LLA_PART_NODE_DECAY, 1, {2}), rising(2, -5));
  EXPECT_EQ(read(0, 2, LLA_PART_NODE, 1, {1, 1, 1}), std::vector<float>(1, 0));  // made zero in the other layers
  EXPECT_EQ(read(0, 0, LLA_PART_NODE, 0, {2, 3, 2}), std::vector<float>(12, 0));
  EXPECT_EQ(read(0, 0, LLA_PART_NODE, 40, {2, 3, 2}), std::vector<float>(12, 0));
  EXPECT_EQ(query(*state_, LLA_STATE_SLOT_NODES, 0), 1);
  EXPECT_FALSE(state_->is_empty(0));
  EXPECT_EQ(write(0, 0, LLA_PART_NODE, 2, {2, 3, 2}, 0), LLA_INVALID_ARGUMENT);  // bit 2 is not set
  EXPECT_EQ(write(0, 1, LLA_PART_NODE, 0, {2, 3, 2}, 0), LLA_INVALID_ARGUMENT);  // a linear layer keeps none apart
  EXPECT_EQ(write(0, 0, LLA_PART_ABSORBED, 0, {2, 3, 2}, 0), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(write(0, 2, LLA_PART_NODE_DECAY, 0, {1}, 0), LLA_INVALID_ARGUMENT);  // part of the content already
  EXPECT_EQ(read(0, 2, LLA_PART_NODE_DECAY, 0, {1}), std::vector<float>(1, 0));
}

TEST_F(ContentsTest, WritingASharedNodeMakesAnOwnCopy) {
  reset(0, 8);
  EXPECT_EQ(write(0, 0, LLA_PART_NODE, 1, {2, 3, 2}, 10), LLA_OK);
  EXPECT_EQ(write(0, 2, LLA_PART_NODE, 1, {1, 1, 1}, 77), LLA_OK);
  const int64_t source = 0, target = 1;
  ASSERT_EQ(state_->fork(&source, &target, 1, nullptr, nullptr), LLA_OK);
  const int64_t free = query(*state_, LLA_STATE_FREE_NODE_BLOCKS);
  EXPECT_EQ(state_->record(0).image.node[1], state_->record(1).image.node[1]);
  EXPECT_EQ(write(1, 0, LLA_PART_NODE, 1, {2, 3, 2}, 50), LLA_OK);
  EXPECT_EQ(query(*state_, LLA_STATE_FREE_NODE_BLOCKS), free - 1);
  EXPECT_EQ(read(0, 0, LLA_PART_NODE, 1, {2, 3, 2}), rising(12, 10));
  EXPECT_EQ(read(1, 0, LLA_PART_NODE, 1, {2, 3, 2}), rising(12, 50));
  EXPECT_EQ(read(1, 2, LLA_PART_NODE, 1, {1, 1, 1}), rising(1, 77));  // copied with it
  EXPECT_EQ(write(1, 0, LLA_PART_NODE, 1, {2, 3, 2}, 60), LLA_OK);    // now its own
  EXPECT_EQ(query(*state_, LLA_STATE_FREE_NODE_BLOCKS), free - 1);
}

TEST_F(ContentsTest, TailRowsComeIntoBeing) {
  reset(0, 7);
  EXPECT_EQ(read(0, 0, LLA_PART_TAIL_V, 0, {3, 2, 2}), std::vector<float>(12, 0));
  EXPECT_EQ(write(0, 0, LLA_PART_TAIL_K, 0, {3, 1, 3}, 1), LLA_OK);
  EXPECT_EQ(state_->record(0).image.start, 4);
  EXPECT_EQ(read(0, 0, LLA_PART_TAIL_K, 0, {3, 1, 3}), rising(9, 1));
  for (const int64_t layer : {0, 1}) {
    EXPECT_EQ(read(0, layer, LLA_PART_TAIL_V, 0, {3, 2, 2}), std::vector<float>(12, 0));
    EXPECT_EQ(read(0, layer, LLA_PART_TAIL_GATE, 0, {3, 2}), std::vector<float>(6, 0));
    EXPECT_EQ(read(0, layer, LLA_PART_TAIL_WRITE, 0, {3, 2}), std::vector<float>(6, 0));
  }
  EXPECT_EQ(read(0, 1, LLA_PART_CONV, 0, {2, 2}), std::vector<float>(4, 0));
  EXPECT_EQ(write(0, 1, LLA_PART_TAIL_V, 0, {3, 2, 2}, 20), LLA_OK);
  EXPECT_EQ(write(0, 1, LLA_PART_TAIL_GATE, 0, {3, 2}, -40), LLA_OK);
  EXPECT_EQ(write(0, 1, LLA_PART_TAIL_WRITE, 0, {3, 2}, 40), LLA_OK);
  EXPECT_EQ(read(0, 1, LLA_PART_TAIL_V, 0, {3, 2, 2}), rising(12, 20));
  EXPECT_EQ(read(0, 1, LLA_PART_TAIL_GATE, 0, {3, 2}), rising(6, -40));
  EXPECT_EQ(read(0, 1, LLA_PART_TAIL_WRITE, 0, {3, 2}), rising(6, 40));
  EXPECT_EQ(read(0, 0, LLA_PART_TAIL_K, 0, {3, 1, 3}), rising(9, 1));
}

TEST_F(ContentsTest, ConvolutionInputsComeIntoBeing) {
  reset(0, 9);
  EXPECT_EQ(write(0, 0, LLA_PART_CONV, 0, {3, 3}, 1), LLA_OK);
  EXPECT_EQ(state_->record(0).image.start, 6);
  EXPECT_EQ(state_->record(0).image.conv_rows, 3);
  EXPECT_EQ(read(0, 0, LLA_PART_CONV, 0, {3, 3}), rising(9, 1));
  EXPECT_EQ(read(0, 1, LLA_PART_CONV, 0, {2, 2}), std::vector<float>(4, 0));
  EXPECT_EQ(write(0, 1, LLA_PART_CONV, 0, {2, 2}, 30), LLA_OK);
  EXPECT_EQ(read(0, 1, LLA_PART_CONV, 0, {2, 2}), rising(4, 30));
  EXPECT_EQ(read(0, 0, LLA_PART_TAIL_V, 0, {1, 2, 2}), std::vector<float>(4, 0));  // row 8 exists now, and is zero
  EXPECT_EQ(state_->min_length(0), 9);  // position 8 would need an input that nobody knows
  EXPECT_EQ(state_->truncate(0, 8, nullptr), LLA_ROLLBACK_LIMIT);
  // Before position 0 there is nothing.
  reset(1, 1);
  EXPECT_EQ(write(1, 0, LLA_PART_CONV, 0, {3, 3}, 1), LLA_OK);
  EXPECT_EQ(read(1, 0, LLA_PART_CONV, 0, {3, 3}), (std::vector<float>{0, 0, 0, 0, 0, 0, 7, 8, 9}));
  EXPECT_EQ(state_->record(1).image.start, 0);
}

TEST_F(ContentsTest, ShapesAndTypesAreChecked) {
  reset(0, 7);
  EXPECT_EQ(write(0, 0, LLA_PART_TAIL_K, 0, {3, 3}, 0), LLA_SHAPE_MISMATCH);
  EXPECT_EQ(write(0, 0, LLA_PART_TAIL_K, 0, {2, 1, 3}, 0), LLA_SHAPE_MISMATCH);
  EXPECT_STREQ(error_.text, "tensor: dimension 0 is 2, this part has 3");
  EXPECT_EQ(write(0, 0, LLA_PART_TAIL_K, 1, {3, 1, 3}, 0), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(write(0, 2, LLA_PART_CONV, 0, {3, 3}, 0), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(write(0, 0, 9, 0, {3, 3}, 0), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(write(3, 0, LLA_PART_TAIL_K, 0, {3, 1, 3}, 0), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(write(0, 0, LLA_PART_NODE, 48, {2, 3, 2}, 0), LLA_INVALID_ARGUMENT);
  Values values({3, 1, 3}, 0);
  values.tensor.dtype = LLA_I32;
  EXPECT_EQ(state_->read(0, 0, LLA_PART_TAIL_K, 0, values.tensor, nullptr, nullptr), LLA_DTYPE_MISMATCH);
  values.tensor.dtype = LLA_F32;
  values.tensor.data = nullptr;
  EXPECT_EQ(state_->read(0, 0, LLA_PART_TAIL_K, 0, values.tensor, nullptr, nullptr), LLA_NULL_POINTER);
  EXPECT_TRUE(state_->is_empty(0));  // nothing of this changed the slot
}

TEST_F(ContentsTest, ConvertsOnceAndToNearest) {
  reset(0, 5);
  double value[2] = {1 + 0x1p-9 + 0x1p-40, -std::numeric_limits<double>::infinity()};
  ASSERT_EQ(state_->write(0, 0, LLA_PART_TAIL_GATE, 0, lla_tensor_of(value, LLA_F64, 1, 2, -1, -1), nullptr, nullptr),
            LLA_OK);
  uint16_t narrow[2];
  ASSERT_EQ(state_->read(0, 0, LLA_PART_TAIL_GATE, 0, lla_tensor_of(narrow, LLA_BF16, 1, 2, -1, -1), nullptr, nullptr),
            LLA_OK);
  EXPECT_EQ(bf16_to_float(narrow[0]), 1.0f);
  EXPECT_EQ(bf16_to_float(narrow[1]), -INFINITY);
}

// Probe E7.
TEST_F(ContentsTest, ImportsLinearStates) {
  const LayerHistory linear = layers_[1];
  state_ = make_state(cpu_.get(), {linear, linear, layers_[0]}, description_of(2));
  reset(0, 8);
  Values other({2, 3, 2}, 1), matrix({2, 3, 2}, 100);
  ASSERT_EQ(state_->write(0, 2, LLA_PART_NODE, 1, other.tensor, nullptr, nullptr), LLA_OK);
  ASSERT_EQ(state_->import_linear(0, 0, 11, matrix.tensor, true, nullptr, &error_), LLA_OK) << error_.text;
  EXPECT_EQ(state_->record(0).image.position, 11);
  EXPECT_EQ(state_->record(0).image.start, 11);
  EXPECT_EQ(query(*state_, LLA_STATE_SLOT_NODES, 0), 1);
  EXPECT_EQ(query(*state_, LLA_STATE_FREE_NODE_BLOCKS), query(*state_, LLA_STATE_NODE_BLOCKS) - 1);
  EXPECT_EQ(read(0, 0, LLA_PART_ABSORBED, 0, {2, 3, 2}), rising(12, 100));
  EXPECT_EQ(read(0, 1, LLA_PART_ABSORBED, 0, {2, 3, 2}), std::vector<float>(12, 0));
  EXPECT_EQ(read(0, 2, LLA_PART_NODE, 1, {2, 3, 2}), std::vector<float>(12, 0));
  Values second({2, 3, 2}, 200);
  EXPECT_EQ(state_->import_linear(0, 1, 12, second.tensor, false, nullptr, &error_), LLA_POSITION_MISMATCH);
  EXPECT_STREQ(error_.text, "position = 12, but slot 0 stands at 11");
  ASSERT_EQ(state_->import_linear(0, 1, 11, second.tensor, false, nullptr, &error_), LLA_OK);
  EXPECT_EQ(read(0, 0, LLA_PART_ABSORBED, 0, {2, 3, 2}), rising(12, 100));
  EXPECT_EQ(read(0, 1, LLA_PART_ABSORBED, 0, {2, 3, 2}), rising(12, 200));
  EXPECT_EQ(state_->import_linear(0, 2, 11, second.tensor, false, nullptr, &error_), LLA_UNSUPPORTED);
  EXPECT_EQ(state_->import_linear(0, 0, -1, second.tensor, true, nullptr, &error_), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(state_->import_linear(0, 0, int64_t{1} << 40, second.tensor, true, nullptr, &error_), LLA_LEVELS_EXCEEDED);
  EXPECT_EQ(state_->record(0).image.position, 11);
}

TEST_F(ContentsTest, AnAbsorbingNodeExistsOnceItAbsorbs) {
  LayerHistory absorbing = mixer(LLA_SCALAR_GATE, 4, 6, true);  // two levels apart
  ASSERT_EQ(absorbing.shape.separate_levels(), 2);
  state_ = make_state(cpu_.get(), {absorbing}, description_of(2));
  reset(0, 15);
  EXPECT_EQ(write(0, 0, LLA_PART_ABSORBED, 0, {1, 1, 1}, 5), LLA_INVALID_ARGUMENT);
  reset(0, 16);
  EXPECT_EQ(write(0, 0, LLA_PART_ABSORBED, 0, {1, 1, 1}, 5), LLA_OK);
  EXPECT_EQ(read(0, 0, LLA_PART_ABSORBED, 0, {1, 1, 1}), rising(1, 5));
}

TEST_F(ContentsTest, AnExhaustedPoolRefusesAndChangesNothing) {
  lla_state_desc description = description_of(3);
  description.node_blocks = 1;
  state_ = make_state(cpu_.get(), {layers_[1]}, description);
  reset(0, 8);
  reset(1, 8);
  EXPECT_EQ(write(0, 0, LLA_PART_ABSORBED, 0, {2, 3, 2}, 5), LLA_OK);
  EXPECT_EQ(write(1, 0, LLA_PART_ABSORBED, 0, {2, 3, 2}, 9), LLA_NO_BLOCKS);
  EXPECT_TRUE(state_->is_empty(1));
  Values matrix({2, 3, 2}, 100);
  EXPECT_EQ(state_->import_linear(1, 0, 3, matrix.tensor, true, nullptr, nullptr), LLA_NO_BLOCKS);
  EXPECT_EQ(state_->record(1).image.position, 8);
  EXPECT_EQ(state_->import_linear(0, 0, 3, matrix.tensor, true, nullptr, nullptr), LLA_OK);  // takes over its own block
  EXPECT_EQ(read(0, 0, LLA_PART_ABSORBED, 0, {2, 3, 2}), rising(12, 100));
  const int64_t source = 0, target = 1;
  ASSERT_EQ(state_->fork(&source, &target, 1, nullptr, nullptr), LLA_OK);
  EXPECT_EQ(write(1, 0, LLA_PART_ABSORBED, 0, {2, 3, 2}, 9), LLA_NO_BLOCKS);  // shared, and no copy can be made
  EXPECT_EQ(read(1, 0, LLA_PART_ABSORBED, 0, {2, 3, 2}), rising(12, 100));
}

}  // namespace
