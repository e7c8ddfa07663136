// SPDX-License-Identifier: Apache-2.0
// Helpers for the unit tests of layers: contexts and layers that release themselves, tensors of any type, planned batches,
// and calls that run in a workspace of exactly the size that was asked for, between guard bytes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cells/program.h"
#include "cells/rules.h"
#include "core/batch.h"
#include "core/context.h"
#include "core/state.h"
#include "golden.h"

namespace cells_testing {

using namespace lla;

struct Error : lla_error {
  Error() : lla_error(LLA_ERROR_INIT) {}
};

// Bytes at a 64-byte border with a guard on both sides.
class Memory {
 public:
  explicit Memory(size_t bytes, unsigned char content = 0xff) : bytes_(bytes), store_(bytes + 2 * kGuard + 64, '\xa5') {
    const uintptr_t address = reinterpret_cast<uintptr_t>(store_.data()) + kGuard;
    data_ = store_.data() + kGuard + (64 - address % 64) % 64;
    std::memset(data_, content, bytes);
  }
  char* data() { return data_; }
  size_t bytes() const { return bytes_; }
  bool guards_hold() const {
    for (const char* p = store_.data(); p < store_.data() + store_.size(); ++p) {
      if ((p < data_ || p >= data_ + bytes_) && *p != '\xa5') return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 256;
  size_t bytes_;
  std::vector<char> store_;
  char* data_;
};

using ContextPointer = std::shared_ptr<Context>;
inline ContextPointer make_context(lla_backend backend, int threads = 1, const lla_parallel* parallel = nullptr) {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = backend;
  options.threads = threads;
  options.parallel = parallel;
  Context* context = nullptr;
  Error error;
  EXPECT_EQ(create_context(options, &context, &error), LLA_OK) << error.text;
  return ContextPointer(context, [](Context* c) { release(c); });
}

using LayerPointer = std::shared_ptr<Layer>;
inline lla_status try_layer(const ContextPointer& context, const lla_layer_desc& description, LayerPointer* layer,
                            Error* error) {
  Layer* made = nullptr;
  const lla_status status = create_layer(context.get(), description, &made, error);
  *layer = LayerPointer(made, [](Layer* l) { release(l); });
  return status;
}
inline LayerPointer make_layer(const ContextPointer& context, const lla_layer_desc& description) {
  LayerPointer layer;
  Error error;
  EXPECT_EQ(try_layer(context, description, &layer, &error), LLA_OK) << error.text;
  return layer;
}

// A tensor with memory of its own. `pad` elements of NaN follow each row (axis 0).
class Tensor {
 public:
  Tensor() = default;
  Tensor(lla_dtype dtype, std::vector<int64_t> dims, int64_t pad = 0) : dtype_(dtype), dims_(std::move(dims)), pad_(pad) {
    bytes_ = std::make_shared<std::vector<char>>();
    bytes_->reserve(static_cast<size_t>(rows() * stride() * dtype_size(dtype)) + kSpare);
    bytes_->resize(static_cast<size_t>(rows() * stride() * dtype_size(dtype)));
    for (int64_t i = 0; i < rows() * stride(); ++i) store_element<double>(bytes_->data(), dtype, i, NAN);
  }
  Tensor(lla_dtype dtype, std::vector<int64_t> dims, const std::vector<double>& values, int64_t pad = 0)
      : Tensor(dtype, std::move(dims), pad) {
    for (size_t i = 0; i < values.size(); ++i) set(static_cast<int64_t>(i), values[i]);
  }
  int64_t rows() const { return dims_.empty() ? 0 : dims_[0]; }
  int64_t row_size() const {
    return std::accumulate(dims_.begin() + 1, dims_.end(), int64_t{1}, std::multiplies<int64_t>());
  }
  int64_t stride() const { return row_size() + pad_; }
  int64_t size() const { return rows() * row_size(); }
  const std::vector<int64_t>& dims() const { return dims_; }
  double get(int64_t i) const {
    return load_element<double>(bytes_->data(), dtype_, i / row_size() * stride() + i % row_size());
  }
  void set(int64_t i, double value) {
    store_element<double>(bytes_->data(), dtype_, i / row_size() * stride() + i % row_size(), value);
  }
  void fill(double value) {
    for (int64_t i = 0; i < size(); ++i) set(i, value);
  }
  std::vector<double> values() const {
    std::vector<double> v;
    for (int64_t i = 0; i < size(); ++i) v.push_back(get(i));
    return v;
  }
  // Every element between the rows is still NaN.
  bool pads_hold() const {
    for (int64_t i = 0; i < rows() * stride(); ++i) {
      if (i % stride() >= row_size() && !std::isnan(load_element<double>(bytes_->data(), dtype_, i))) return false;
    }
    return true;
  }
  bool same_bytes(const Tensor& other) const { return *bytes_ == *other.bytes_; }
  char* data() const { return bytes_->data(); }
  lla_tensor view() const {
    lla_tensor t{};
    t.data = bytes_->data();
    t.dtype = dtype_;
    t.rank = static_cast<int32_t>(dims_.size());
    int64_t step = 1;
    for (int i = t.rank - 1; i > 0; --i) {
      t.dims[i] = dims_[static_cast<size_t>(i)];
      t.strides[i] = step;
      step *= t.dims[i];
    }
    t.dims[0] = dims_[0];
    t.strides[0] = t.rank == 1 ? 1 : stride();
    return t;
  }

 private:
  static constexpr size_t kSpare = 1 << 15;  // bytes behind it that no other tensor has
  lla_dtype dtype_ = LLA_F32;
  std::vector<int64_t> dims_;
  int64_t pad_ = 0;
  std::shared_ptr<std::vector<char>> bytes_;
};

// The same small numbers everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 77) {}
  double uniform() {  // in [-1, 1)
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(static_cast<int64_t>(state_) >> 11) * 0x1p-52;
  }
  std::vector<double> values(int64_t count, double size = 1) {
    std::vector<double> v;
    for (int64_t i = 0; i < count; ++i) v.push_back(size * std::round(uniform() * 256) / 256);
    return v;
  }
  Tensor tensor(lla_dtype dtype, const std::vector<int64_t>& dims, double size = 1, int64_t pad = 0) {
    Tensor t(dtype, dims, pad);
    const std::vector<double> v = values(t.size(), size);
    for (int64_t i = 0; i < t.size(); ++i) t.set(i, v[static_cast<size_t>(i)]);
    return t;
  }

 private:
  uint64_t state_;
};

// A planned batch in memory of its own.
class Plan {
 public:
  Plan(const ContextPointer& context, int64_t sequences, int64_t rows, int64_t length = 0) {
    lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
    limits.max_sequences = sequences;
    limits.max_rows = rows;
    limits.max_length = length;
    limits.max_snapshots = 4;
    Error error;
    EXPECT_EQ(read_limits(limits, &limits_, &error), LLA_OK) << error.text;
    size_t bytes = 0;
    EXPECT_EQ(batch_size(limits_, false, &bytes, &error), LLA_OK) << error.text;
    memory_ = std::make_unique<Memory>(bytes);
    EXPECT_EQ(init_batch(context.get(), limits_, memory_->data(), bytes, &batch_, &error), LLA_OK) << error.text;
  }
  ~Plan() { discard_batch(batch_); }
  // `sequences` of `rows` rows each, one after the other.
  static lla_rows uniform(int64_t sequences, int64_t rows) {
    lla_rows r = LLA_ROWS_INIT;
    r.sequences = sequences;
    r.rows_per_sequence = rows;
    return r;
  }
  Plan& plan(const lla_rows& rows, State* state = nullptr, State* gradients = nullptr) {
    Error error;
    EXPECT_EQ(plan_batch(batch_, state, rows, gradients, nullptr, &error), LLA_OK) << error.text;
    return *this;
  }
  Batch* batch() { return batch_; }
  const Limits& limits() const { return limits_; }

 private:
  Limits limits_;
  std::unique_ptr<Memory> memory_;
  Batch* batch_ = nullptr;
};

// A state of one layer in memory of the test, so that a change of any byte shows.
class StateRig {
 public:
  StateRig(const ContextPointer& context, const Layer& layer, int64_t slots, int64_t max_length,
           lla_state_kind kind = LLA_STATE_VALUE, lla_dtype tail = LLA_DTYPE_DEFAULT) {
    lla_state_desc d = LLA_STATE_DESC_INIT;
    d.kind = kind;
    d.slots = slots;
    d.max_length = max_length;
    d.tail_dtype = tail;
    StatePlan plan;
    Error error;
    EXPECT_EQ(plan_state(*context, &layer.history, 1, d, &plan, &error), LLA_OK) << error.text;
    std::vector<lla_block_memory> blocks;
    for (const lla_block_kind block : {LLA_BLOCK_NODE, LLA_BLOCK_TAIL, LLA_BLOCK_CONV}) {
      lla_block_geometry g = LLA_BLOCK_GEOMETRY_INIT;
      EXPECT_EQ(block_geometry(plan, layer.history, block, &g, &error), LLA_OK) << error.text;
      if (g.bytes == 0) continue;
      memory_.push_back(std::make_unique<Memory>(static_cast<size_t>(g.count * g.bytes), 0));
      lla_block_memory b{};
      b.kind = block;
      b.base = memory_.back()->data();
      b.stride = g.bytes;
      blocks.push_back(b);
    }
    EXPECT_EQ(State::create(context.get(), &layer.history, 1, d, blocks.data(), static_cast<int64_t>(blocks.size()), &state_,
                            &error),
              LLA_OK)
        << error.text;
  }
  ~StateRig() {
    if (state_) state_->destroy();
  }
  State* get() { return state_; }
  std::string bytes() const {
    std::string all;
    for (const auto& m : memory_) {
      EXPECT_TRUE(m->guards_hold());
      all.append(m->data(), m->bytes());
    }
    return all;
  }

 private:
  std::vector<std::unique_ptr<Memory>> memory_;
  State* state_ = nullptr;
};

// Arrays of bindings of one call.
struct Bindings {
  std::vector<lla_binding> io, weights, outputs, gradients;
  std::vector<Tensor> kept;  // their memory lives as long as this

  void add_io(lla_role role, const Tensor& t) { add(&io, role, t); }
  void add_weight(lla_role role, const Tensor& t) { add(&weights, role, t); }
  void add_output(lla_role role, const Tensor& t) { add(&outputs, role, t); }
  void add_gradient(lla_role role, const Tensor& t, bool accumulate = false) {
    add(&gradients, role, t);
    gradients.back().flags = accumulate ? LLA_ACCUMULATE : 0;
  }

 private:
  void add(std::vector<lla_binding>* list, lla_role role, const Tensor& t) {
    list->push_back(lla_bind(role, t.view()));
    kept.push_back(t);
  }
};

// What a call gets besides its tensors.
struct Setting {
  State* state = nullptr;
  int64_t layer_index = 0;
  Memory* saved = nullptr;
  bool run = true;       // false: prepare only
  int64_t short_by = 0;  // bytes by which the workspace is too small
  lla_status run_status = LLA_OK;
};

inline lla_status forward(const Layer& layer, Plan& plan, const Bindings& b, Error* error, const Setting& s = Setting()) {
  size_t bytes = 0;
  if (const lla_status status = measure_program(layer, plan.limits(), LLA_PASS_FORWARD, &bytes, error)) return status;
  Memory workspace(bytes - static_cast<size_t>(s.short_by));
  lla_forward_args a = LLA_FORWARD_ARGS_INIT;
  a.layer_index = s.layer_index;
  a.io = b.io.data();
  a.io_count = static_cast<int64_t>(b.io.size());
  a.weights = b.weights.data();
  a.weight_count = static_cast<int64_t>(b.weights.size());
  a.workspace = workspace.data();
  a.workspace_bytes = workspace.bytes();
  a.saved = s.saved ? s.saved->data() : nullptr;
  a.saved_bytes = s.saved ? s.saved->bytes() : 0;
  Program* program = nullptr;
  if (const lla_status status = prepare_forward(layer, a, plan.batch(), s.state, &program, error)) return status;
  const lla_status status = s.run ? run_program(*layer.context, program, error) : LLA_OK;
  EXPECT_TRUE(workspace.guards_hold());
  return status;
}

inline lla_status backward(const Layer& layer, Plan& plan, const Bindings& b, Error* error, const Setting& s = Setting()) {
  size_t bytes = 0;
  if (const lla_status status = measure_program(layer, plan.limits(), LLA_PASS_BACKWARD, &bytes, error)) return status;
  Memory workspace(bytes - static_cast<size_t>(s.short_by));
  lla_backward_args a = LLA_BACKWARD_ARGS_INIT;
  a.layer_index = s.layer_index;
  a.io = b.io.data();
  a.io_count = static_cast<int64_t>(b.io.size());
  a.weights = b.weights.data();
  a.weight_count = static_cast<int64_t>(b.weights.size());
  a.outputs = b.outputs.data();
  a.output_count = static_cast<int64_t>(b.outputs.size());
  a.gradients = b.gradients.data();
  a.gradient_count = static_cast<int64_t>(b.gradients.size());
  a.workspace = workspace.data();
  a.workspace_bytes = workspace.bytes();
  a.saved = s.saved ? s.saved->data() : nullptr;
  a.saved_bytes = s.saved ? s.saved->bytes() : 0;
  Program* program = nullptr;
  if (const lla_status status = prepare_backward(layer, a, plan.batch(), s.state, &program, error)) return status;
  const lla_status status = s.run ? run_program(*layer.context, program, error) : LLA_OK;
  EXPECT_TRUE(workspace.guards_hold());
  return status;
}

// ||x - reference|| / ||reference||.
inline double error_of(const Tensor& x, const std::vector<double>& reference) {
  return golden::relative_error(x.values(), reference, 1e-30);
}

inline lla_layer_desc description_of(lla_layer_kind kind) {
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = kind;
  return d;
}

// Random tensors for every role of a layer, optional ones included.
struct RandomCall {
  struct Entry {
    lla_role role;
    bool output;
    std::vector<int64_t> dims;  // without the rows for inputs and outputs
    Tensor tensor;
  };
  std::vector<Entry> entries;
  int64_t rows = 0;

  RandomCall(const Layer& layer, int64_t row_count, lla_dtype dtype, uint64_t seed,
             const std::vector<lla_role>& without = {})
      : rows(row_count) {
    LayerRules rules;
    fill_rules(layer.description, &rules);
    Random random(seed);
    const auto wanted = [&](lla_role role) { return std::find(without.begin(), without.end(), role) == without.end(); };
    for (int i = 0; i < rules.io_count; ++i) {
      const IoRule& r = rules.io[i];
      std::vector<int64_t> dims(r.dims, r.dims + r.rank), all{rows};
      all.insert(all.end(), dims.begin(), dims.end());
      // A log gate is negative; everything else has both signs.
      Tensor t = random.tensor(dtype, all);
      if (r.role == LLA_GATE && layer.description.gate_form == LLA_GATE_LOG) {
        for (int64_t e = 0; e < t.size(); ++e) t.set(e, -std::fabs(t.get(e)) / 4);
      }
      if (wanted(r.role)) entries.push_back({r.role, r.output, dims, t});
    }
    for (int i = 0; i < rules.weight_count; ++i) {
      const WeightRule& r = rules.weights[i];
      const std::vector<int64_t> dims(r.dims, r.dims + r.rank);
      if (wanted(r.role)) entries.push_back({r.role, false, dims, random.tensor(dtype, dims)});
    }
  }
  Tensor& tensor(lla_role role) {
    for (Entry& e : entries) {
      if (e.role == role) return e.tensor;
    }
    ADD_FAILURE() << "no " << role_name(role);
    return entries.front().tensor;
  }
  bool has(lla_role role) const {
    return std::any_of(entries.begin(), entries.end(), [role](const Entry& e) { return e.role == role; });
  }
  Bindings forward() const {
    Bindings b;
    for (const Entry& e : entries) is_weight_role(e.role) ? b.add_weight(e.role, e.tensor) : b.add_io(e.role, e.tensor);
    return b;
  }
  // Without outputs among io; `dy` and `gradients` are in the order of the entries.
  Bindings backward(const std::vector<Tensor>& dy, const std::vector<Tensor>& gradients, bool accumulate = false) const {
    Bindings b;
    size_t outputs = 0, inputs = 0;
    for (const Entry& e : entries) {
      if (e.output) {
        b.add_output(e.role, dy[outputs++]);
        continue;
      }
      is_weight_role(e.role) ? b.add_weight(e.role, e.tensor) : b.add_io(e.role, e.tensor);
      b.add_gradient(e.role, gradients[inputs++], accumulate);
    }
    return b;
  }
  std::vector<Tensor> like(bool outputs, lla_dtype dtype, Random* random = nullptr) const {
    std::vector<Tensor> list;
    for (const Entry& e : entries) {
      if (e.output == outputs)
        list.push_back(random ? random->tensor(dtype, e.tensor.dims()) : Tensor(dtype, e.tensor.dims()));
    }
    return list;
  }
};

}  // namespace cells_testing
