// SPDX-License-Identifier: Apache-2.0
// The C++ wrapper where the library's memory is concerned: a batch whose layers take turns, whose workspace is outgrown, and
// whose memory runs out.
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "lla/lla.hpp"

namespace {

// Counts what is out, and gives nothing of more than `most` bytes.
struct Meter {
  int64_t outstanding = 0;
  size_t most = SIZE_MAX;
  lla_allocator hook() {
    lla_allocator a{};
    a.struct_size = sizeof a;
    a.user = this;
    a.allocate = [](size_t bytes, size_t alignment, void* user) -> void* {
      auto* meter = static_cast<Meter*>(user);
      if (bytes > meter->most) return nullptr;
      ++meter->outstanding;
      return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    a.release = [](void* memory, size_t, size_t, void* user) {
      --static_cast<Meter*>(user)->outstanding;
      std::free(memory);
    };
    return a;
  }
};

constexpr int64_t kRows = 70;

// A layer with its rows.
struct Mixer {
  int64_t heads, width;
  lla::layer layer;
  std::vector<float> x, y, dx;
  Mixer(const lla::context& context, int64_t h, int64_t d) : heads(h), width(d) {
    lla::layer_desc description;
    description.kind = LLA_LAYER_MIXER;
    description.mixer = LLA_DELTA_RULE;
    description.heads = h;
    description.key_dim = description.value_dim = d;
    layer = lla::layer(context, description);
    const auto count = static_cast<size_t>(kRows * h * d);
    for (size_t i = 0; i < count; ++i) x.push_back(static_cast<float>(i * 31 % 101) / 300 / static_cast<float>(d));
    y.resize(count);
    dx.resize(count);
  }
  // Forward and backward: the outputs and the gradient of the values.
  std::vector<float> run(lla::batch& batch) {
    const auto bind = [this](lla_role role, std::vector<float>& data) {
      return lla_bind(role, lla_tensor_of(data.data(), LLA_F32, kRows, heads, width, -1));
    };
    const lla_binding io[] = {bind(LLA_Q, x), bind(LLA_K, x), bind(LLA_V, x), bind(LLA_Y, y)};
    const lla_binding gradient[] = {bind(LLA_V, dx)};
    lla::rows rows;
    rows.sequences = 1;
    rows.rows_per_sequence = kRows;
    batch.plan({}, rows);
    layer.forward(batch, io);
    layer.backward(batch, {io, 3}, {}, {&io[3], 1}, gradient);
    std::vector<float> both = y;
    both.insert(both.end(), dx.begin(), dx.end());
    return both;
  }
};

lla::context context_of(Meter* meter) {
  const lla_allocator allocator = meter->hook();
  lla::context_options options;
  options.backend = LLA_BACKEND_CPU;
  options.allocator = &allocator;
  return lla::context(options);
}
lla::batch_limits limits() {
  lla::batch_limits l;
  l.max_sequences = 1;
  l.max_rows = kRows;
  return l;
}

TEST(Wrapper, WorkspacesAreOutgrown) {
  Meter meter;
  {
    const lla::context context = context_of(&meter);
    Mixer small(context, 1, 8), large(context, 4, 64);
    lla::batch a(context, limits()), b(context, limits()), shared(context, limits());
    const std::vector<float> of_small = small.run(a), of_large = large.run(b);
    for (const bool big : {false, true, false, true, true, false})
      EXPECT_EQ((big ? large : small).run(shared), big ? of_large : of_small);
    const int64_t steady = meter.outstanding;
    large.run(shared);
    small.run(shared);
    EXPECT_EQ(meter.outstanding, steady);
  }
  EXPECT_EQ(meter.outstanding, 0);
}

// A workspace that cannot grow leaves the batch with the one that it has.
TEST(Wrapper, WorkspacesThatCannotGrow) {
  Meter meter;
  {
    const lla::context context = context_of(&meter);
    Mixer small(context, 1, 8), large(context, 4, 64);
    lla::batch batch(context, limits());
    const std::vector<float> of_small = small.run(batch);
    const int64_t before = meter.outstanding;
    const lla::batch_limits l = limits();
    size_t bytes = 0;
    ASSERT_EQ(lla_layer_workspace(large.layer.get(), &l, LLA_PASS_FORWARD, &bytes, nullptr, nullptr), LLA_OK);
    meter.most = bytes / 2;
    EXPECT_THROW(large.run(batch), lla::failure);
    EXPECT_EQ(meter.outstanding, before);
    EXPECT_EQ(small.run(batch), of_small);
    meter.most = SIZE_MAX;
    large.run(batch);
    EXPECT_EQ(small.run(batch), of_small);
  }
  EXPECT_EQ(meter.outstanding, 0);
}

// Calls for plans and commits of a device: on the CPU, where the host knows everything, they only check their order, and
// index arrays of a device are refused.
TEST(Wrapper, CollectAndSettle) {
  Meter meter;
  const lla::context context = context_of(&meter);
  const Mixer mixer(context, 1, 8);
  lla::state state({&mixer.layer, 1}, lla::state_desc()), other({&mixer.layer, 1}, lla::state_desc());
  lla::batch batch(context, limits());
  lla::error error;
  EXPECT_EQ(batch.collect(error), LLA_BUSY);
  EXPECT_EQ(state.settle(batch, {}, error), LLA_BUSY);
  EXPECT_THROW(batch.collect(), lla::failure);
  EXPECT_THROW(state.settle(batch), lla::failure);

  const std::int32_t slots[] = {0}, accepted[] = {0};
  lla::rows rows;
  rows.sequences = 1;
  rows.rows_per_sequence = kRows;
  rows.slot_in = lla::device_indices(slots);
  EXPECT_EQ(batch.plan(state, rows, error), LLA_INVALID_ARGUMENT) << error.text;
  rows.slot_in = lla::indices(slots);
  batch.plan(state, rows);
  batch.collect();
  EXPECT_EQ(batch.faults(), 0u);
  EXPECT_EQ(state.settle(batch, {}, error), LLA_BUSY) << error.text;  // not committed
  state.commit(batch, lla::indices(accepted));
  batch.collect(nullptr);
  EXPECT_EQ(other.settle(batch, {}, error), LLA_STATE_INCOMPATIBLE) << error.text;
  state.settle(batch);
  EXPECT_EQ(state.length(0), 0);
  EXPECT_EQ(lla::batch().faults(), 0u);
}

TEST(Wrapper, StatesOfOtherLibraries) {
  Meter meter;
  const lla::context context = context_of(&meter);
  Mixer mixer(context, 1, 8);
  lla::state state({&mixer.layer, 1}, lla::state_desc());
  std::vector<float> theirs(64, 0.0f);
  for (size_t i = 0; i < 8; ++i) theirs[i * 8 + (i + 1) % 8] = 2;  // moves what it is multiplied with
  state.import_linear(0, 0, 70, lla::tensor(theirs.data(), LLA_F32, {1, 8, 8}), true);
  std::vector<float> q(8), k(8, 0.0f), y(8);
  for (size_t i = 0; i < 8; ++i) q[i] = static_cast<float>(i);
  const lla_binding io[] = {lla::bind(LLA_Q, q.data(), {1, 1, 8}), lla::bind(LLA_K, k.data(), {1, 1, 8}),
                            lla::bind(LLA_V, k.data(), {1, 1, 8}), lla::bind(LLA_Y, y.data(), {1, 1, 8})};
  state.append(mixer.layer, 0, io);
  EXPECT_EQ(state.length(0), 71);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(y[(i + 1) % 8], 2 * q[i]);
  lla::error error;
  EXPECT_EQ(state.import_linear(0, 0, 70, lla::tensor(theirs.data(), LLA_F32, {8, 8}), true, error), LLA_SHAPE_MISMATCH);
  EXPECT_EQ(state.length(0), 71);
}

// Every method that changes slots takes a stream, which a CPU does not have.
TEST(Wrapper, StreamsAreHandedOn) {
  Meter meter;
  const lla::context context = context_of(&meter);
  Mixer mixer(context, 1, 8);
  lla::state_desc description;
  description.slots = 2;
  lla::state state({&mixer.layer, 1}, description);
  const lla_binding io[] = {lla::bind(LLA_Q, mixer.x.data(), {kRows, 1, 8}), lla::bind(LLA_K, mixer.x.data(), {kRows, 1, 8}),
                            lla::bind(LLA_V, mixer.x.data(), {kRows, 1, 8}),
                            lla::bind(LLA_Y, mixer.y.data(), {kRows, 1, 8})};
  state.append(mixer.layer, 0, io);
  const lla::host_memory image = state.save(0);
  lla::batch batch(context, limits());
  lla::rows rows;
  rows.sequences = 1;
  void* stream = &rows;
  EXPECT_THROW(state.append(mixer.layer, 0, io, {}, stream), lla::failure);
  EXPECT_THROW(state.fork(0, 1, stream), lla::failure);
  EXPECT_THROW(state.clear(0, 0, stream), lla::failure);
  EXPECT_THROW(state.truncate(0, kRows, stream), lla::failure);
  EXPECT_THROW(state.save(0, {}, stream), lla::failure);
  EXPECT_THROW(state.load(1, image, {}, stream), lla::failure);
  EXPECT_THROW(batch.plan(state, rows, stream), lla::failure);
  EXPECT_EQ(state.length(0), kRows);
  EXPECT_EQ(state.length(1), 0);
  state.load(1, image);
  EXPECT_EQ(state.length(1), kRows);
}

}  // namespace
