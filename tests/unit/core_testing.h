// SPDX-License-Identifier: Apache-2.0
// Helpers for the unit tests of the core: contexts, layer histories filled in by hand, states, index arrays.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/checked.h"
#include "core/context.h"
#include "core/error.h"
#include "core/fenwick.h"
#include "core/state.h"

namespace core_testing {

using namespace lla;

struct Error : lla_error {
  Error() : lla_error(LLA_ERROR_INIT) {}
};

struct ReleaseContext {
  void operator()(Context* context) const { release(context); }
};
using ContextPointer = std::unique_ptr<Context, ReleaseContext>;

inline ContextPointer make_context(const lla_context_options& options) {
  Context* context = nullptr;
  Error error;
  EXPECT_EQ(create_context(options, &context, &error), LLA_OK) << error.text;
  return ContextPointer(context);
}
inline ContextPointer reference_context() {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = LLA_BACKEND_REFERENCE;
  return make_context(options);
}
inline ContextPointer cpu_context() {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = LLA_BACKEND_CPU;
  return make_context(options);
}

struct DestroyState {
  void operator()(State* state) const { state->destroy(); }
};
using StatePointer = std::unique_ptr<State, DestroyState>;

inline StatePointer make_state(Context* context, const std::vector<LayerHistory>& layers,
                               const lla_state_desc& description) {
  State* state = nullptr;
  Error error;
  EXPECT_EQ(
      State::create(context, layers.data(), static_cast<int64_t>(layers.size()), description, nullptr, 0, &state, &error),
      LLA_OK)
      << error.text;
  return StatePointer(state);
}

// A mixer with `levels` columns (0: linear).
inline LayerHistory mixer(int32_t kind, int64_t grain, int64_t levels, bool absorb = false) {
  LayerHistory history;
  history.has_mixer = true;
  history.grain = grain;
  history.inner_dtype = LLA_DTYPE_DEFAULT;
  history.shape.mixer = kind;
  history.shape.grain = grain;
  history.shape.levels = levels;
  history.shape.absorb = absorb;
  history.shape.heads = 1;
  history.shape.groups = 1;
  history.shape.key_dim = 1;
  history.shape.value_dim = 1;
  return history;
}
inline LayerHistory convolution(int64_t grain, int64_t channels, int64_t width) {
  LayerHistory history;
  history.grain = grain;
  history.conv_channels = channels;
  history.conv_width = width;
  return history;
}
inline LayerHistory with_convolution(LayerHistory history, int64_t channels, int64_t width) {
  history.conv_channels = channels;
  history.conv_width = width;
  return history;
}

inline lla_index index_of(const std::vector<int64_t>& values) { return {values.data(), LLA_I64, LLA_HOST}; }
inline lla_index index_of(const std::vector<int32_t>& values) { return {values.data(), LLA_I32, LLA_HOST}; }

// A batch and its memory.
class BatchOwner {
 public:
  BatchOwner(Context* context, const lla_batch_limits& limits) {
    Limits plain;
    Error error;
    size_t bytes = 0;
    EXPECT_EQ(read_limits(limits, &plain, &error), LLA_OK) << error.text;
    EXPECT_EQ(batch_size(plain, context->device != nullptr, &bytes, &error), LLA_OK) << error.text;
    memory_.reset(std::aligned_alloc(64, bytes));
    EXPECT_EQ(init_batch(context, plain, memory_.get(), bytes, &batch_, &error), LLA_OK) << error.text;
  }
  Batch* get() const { return batch_; }
  Batch* operator->() const { return batch_; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  Batch* batch_ = nullptr;
};

inline lla_batch_limits limits_of(int64_t sequences, int64_t rows, int64_t snapshots = 0) {
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  limits.max_sequences = sequences;
  limits.max_rows = rows;
  limits.max_snapshots = snapshots;
  return limits;
}

inline int64_t query(const State& state, lla_state_key key, int64_t slot = 0) {
  int64_t value = -1;
  EXPECT_EQ(state.query(key, slot, &value, nullptr), LLA_OK);
  return value;
}

// Numbers that are the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint64_t bits() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

}  // namespace core_testing
