// SPDX-License-Identifier: Apache-2.0
// Drives the public C interface from tests: random problems with all their tensors, appended in any pieces, and gradients.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../capi/mixer_desc.h"

namespace sweep {

inline void check(lla_status status, const lla_error& error, const char* what) {
  if (status != LLA_OK) {
    ADD_FAILURE() << what << ": " << lla_status_name(status) << ": " << error.text;
    throw std::runtime_error(what);
  }
}
#define SWEEP_CALL(call)                        \
  do {                                          \
    lla_error error = LLA_ERROR_INIT;           \
    ::sweep::check((call), error, #call);       \
  } while (0)

inline uint16_t to_bf16(float x) {  // to nearest even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A tensor in memory, of float, double or bfloat16.
struct Buffer {
  lla_dtype dtype = LLA_F32;
  std::vector<int64_t> dims;
  std::vector<double> f64;
  std::vector<float> f32;
  std::vector<uint16_t> bf16;

  Buffer() = default;
  Buffer(lla_dtype type, std::vector<int64_t> shape) : dtype(type), dims(std::move(shape)) {
    if (dtype == LLA_F64)
      f64.resize(count());
    else if (dtype == LLA_BF16)
      bf16.resize(count());
    else
      f32.resize(count());
  }
  size_t count() const {
    size_t n = 1;
    for (int64_t d : dims) n *= static_cast<size_t>(d);
    return n;
  }
  size_t row_size() const { return dims[0] ? count() / static_cast<size_t>(dims[0]) : 0; }
  void* data() {
    return dtype == LLA_F64    ? static_cast<void*>(f64.data())
           : dtype == LLA_BF16 ? static_cast<void*>(bf16.data())
                               : f32.data();
  }
  double get(size_t i) const { return dtype == LLA_F64 ? f64[i] : dtype == LLA_BF16 ? from_bf16(bf16[i]) : f32[i]; }
  void set(size_t i, double x) {
    if (dtype == LLA_F64)
      f64[i] = x;
    else if (dtype == LLA_BF16)
      bf16[i] = to_bf16(static_cast<float>(x));
    else
      f32[i] = static_cast<float>(x);
  }
  void add(size_t i, double x) { set(i, get(i) + x); }
  // Rows [begin, end) of the first axis.
  lla_tensor rows(int64_t begin, int64_t end) {
    lla_tensor t{};
    t.dtype = dtype;
    t.rank = static_cast<int32_t>(dims.size());
    int64_t stride = 1;
    for (int i = t.rank - 1; i >= 0; --i) {
      t.dims[i] = dims[static_cast<size_t>(i)];
      t.strides[i] = stride;
      stride *= dims[static_cast<size_t>(i)];
    }
    t.dims[0] = end - begin;
    t.data = static_cast<char*>(data()) + static_cast<size_t>(begin) * row_size() * lla_dtype_size(dtype);
    return t;
  }
  lla_tensor all() { return rows(0, dims[0]); }
  bool same_bits(const Buffer& other) const {
    return f64.size() == other.f64.size() && f32.size() == other.f32.size() && bf16 == other.bf16 &&
           (f64.empty() || !std::memcmp(f64.data(), other.f64.data(), f64.size() * 8)) &&
           (f32.empty() || !std::memcmp(f32.data(), other.f32.data(), f32.size() * 4));
  }
};

using Tensors = std::map<lla_role, Buffer>;

inline lla_index index_of(const std::vector<int64_t>& values) { return {values.data(), LLA_I64, LLA_HOST}; }

// Memory from a size query, aligned to 64 bytes.
class Memory {
 public:
  void* get(size_t bytes) {
    bytes_.resize(bytes + 64);
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(bytes_.data()) + 63) & ~uintptr_t{63});
  }

 private:
  std::vector<char> bytes_;
};

struct ContextDeleter { void operator()(lla_context* c) const { lla_context_release(c); } };
struct LayerDeleter { void operator()(lla_layer* l) const { lla_layer_release(l); } };
struct StateDeleter { void operator()(lla_state* s) const { lla_state_release(s); } };
using Context = std::unique_ptr<lla_context, ContextDeleter>;
using Layer = std::unique_ptr<lla_layer, LayerDeleter>;
using State = std::unique_ptr<lla_state, StateDeleter>;

inline Context make_context(lla_backend backend, int32_t threads = 1) {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = backend;
  options.threads = threads;
  lla_context* context = nullptr;
  SWEEP_CALL(lla_context_create(&options, &context, &error));
  return Context(context);
}
inline Layer make_layer(const Context& context, const lla_layer_desc& description) {
  lla_layer* layer = nullptr;
  SWEEP_CALL(lla_layer_create(context.get(), &description, &layer, &error));
  return Layer(layer);
}
inline State make_state(const Layer& layer, int64_t slots, lla_state_kind kind = LLA_STATE_VALUE, int64_t max_draft = 0,
                        int64_t max_length = 0) {
  lla_state_desc description = LLA_STATE_DESC_INIT;
  description.kind = kind;
  description.slots = slots;
  description.max_draft = max_draft;
  description.max_length = max_length;
  lla_layer* layers[1] = {layer.get()};
  lla_state* state = nullptr;
  SWEEP_CALL(lla_state_create(layers, 1, &description, nullptr, 0, &state, &error));
  return State(state);
}

// A batch with one sequence: the rows [begin, end) of a problem.
struct Step {
  int64_t begin = 0, end = 0;
  int64_t slot_in = 0, slot_out = 0;
  lla_state* state = nullptr;
  lla_state* gradient_state = nullptr;
  int64_t initial_gradient_slot = -1, final_gradient_slot = -1;
};

class Runner {
 public:
  Runner(lla_context* context, lla_layer* layer) : context_(context), layer_(layer) {}

  // Plans `step`, and runs forward over its rows. `tensors` hold inputs and LLA_Y. Does not commit.
  void forward(const Step& step, Tensors& tensors, Tensors& weights, std::vector<char>* saved = nullptr) {
    plan(step);
    std::vector<lla_binding> io, w;
    for (auto& [role, buffer] : tensors) io.push_back(lla_bind(role, buffer.rows(step.begin, step.end)));
    for (auto& [role, buffer] : weights) w.push_back(lla_bind(role, buffer.all()));
    size_t bytes = 0, saved_bytes = 0;
    SWEEP_CALL(lla_layer_workspace(layer_, &limits_, LLA_PASS_FORWARD, &bytes, nullptr, &error));
    lla_forward_args a = LLA_FORWARD_ARGS_INIT;
    a.batch = batch_;
    a.state = step.state;
    a.io = io.data();
    a.io_count = static_cast<int64_t>(io.size());
    a.weights = w.data();
    a.weight_count = static_cast<int64_t>(w.size());
    a.workspace = workspace_.get(bytes);
    a.workspace_bytes = bytes;
    if (saved) {
      SWEEP_CALL(lla_layer_saved_size(layer_, &limits_, &saved_bytes, nullptr, &error));
      saved->assign(saved_bytes + 64, 0);
      if (saved_bytes) a.saved = align(saved->data());
      a.saved_bytes = saved_bytes;
    }
    SWEEP_CALL(lla_layer_forward(layer_, &a, &error));
  }
  void commit(const Step& step, int64_t accepted = -1) {
    std::vector<int64_t> counts{accepted};
    SWEEP_CALL(lla_state_commit(step.state, batch_, accepted < 0 ? lla_index{nullptr, 0, 0} : index_of(counts), nullptr, &error));
  }
  void append(const Step& step, Tensors& tensors, Tensors& weights) {
    forward(step, tensors, weights);
    commit(step);
  }
  // Gradients of the rows of `step` into `gradients` (roles of inputs, rows [begin, end)) and `weight_gradients` (added to).
  void backward(const Step& step, Tensors& tensors, Tensors& weights, Buffer& dy, Tensors& gradients, Tensors& weight_gradients,
                std::vector<char>* saved = nullptr) {
    plan(step);
    std::vector<lla_binding> io, w, g;
    for (auto& [role, buffer] : tensors)
      if (role != LLA_Y) io.push_back(lla_bind(role, buffer.rows(step.begin, step.end)));
    for (auto& [role, buffer] : weights) w.push_back(lla_bind(role, buffer.all()));
    for (auto& [role, buffer] : gradients) g.push_back(lla_bind(role, buffer.rows(step.begin, step.end)));
    for (auto& [role, buffer] : weight_gradients) {
      g.push_back(lla_bind(role, buffer.all()));
      g.back().flags = LLA_ACCUMULATE;
    }
    lla_binding out = lla_bind(LLA_Y, dy.rows(step.begin, step.end));
    size_t bytes = 0, saved_bytes = 0;
    SWEEP_CALL(lla_layer_workspace(layer_, &limits_, LLA_PASS_BACKWARD, &bytes, nullptr, &error));
    lla_backward_args a = LLA_BACKWARD_ARGS_INIT;
    a.batch = batch_;
    a.state = step.state;
    a.io = io.data();
    a.io_count = static_cast<int64_t>(io.size());
    a.weights = w.data();
    a.weight_count = static_cast<int64_t>(w.size());
    a.outputs = &out;
    a.output_count = 1;
    a.gradients = g.data();
    a.gradient_count = static_cast<int64_t>(g.size());
    a.workspace = workspace_.get(bytes);
    a.workspace_bytes = bytes;
    if (saved) {
      SWEEP_CALL(lla_layer_saved_size(layer_, &limits_, &saved_bytes, nullptr, &error));
      if (saved_bytes) a.saved = align(saved->data());
      a.saved_bytes = saved_bytes;
    }
    SWEEP_CALL(lla_layer_backward(layer_, &a, &error));
    lla_batch_discard(batch_);
  }
  lla_batch* batch() { return batch_; }
  int64_t longest = int64_t{1} << 14;  // sequence, whatever the step

 private:
  static char* align(char* p) { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + 63) & ~uintptr_t{63}); }
  void plan(const Step& step) {
    const int64_t rows = step.end - step.begin;
    if (!batch_ || rows > limits_.max_rows) {
      if (batch_) lla_batch_discard(batch_);
      limits_.max_sequences = 1;
      limits_.max_rows = rows;
      limits_.max_length = std::max(longest, rows);
      size_t bytes = 0;
      SWEEP_CALL(lla_batch_size(context_, &limits_, &bytes, nullptr, &error));
      SWEEP_CALL(lla_batch_init(context_, &limits_, batch_memory_.get(bytes), bytes, &batch_, &error));
    }
    std::vector<int64_t> in{step.slot_in}, out{step.slot_out}, gi{step.initial_gradient_slot}, gf{step.final_gradient_slot};
    lla_rows r = LLA_ROWS_INIT;
    r.sequences = 1;
    r.rows_per_sequence = rows;
    if (step.state) {
      r.slot_in = index_of(in);
      r.slot_out = index_of(out);
    }
    if (step.gradient_state) {
      r.gradient_state = step.gradient_state;
      r.initial_gradient_slots = index_of(gi);
      r.final_gradient_slots = index_of(gf);
    }
    SWEEP_CALL(lla_batch_plan(batch_, step.state, &r, nullptr, &error));
  }

  lla_context* context_;
  lla_layer* layer_;
  lla_batch* batch_ = nullptr;
  lla_batch_limits limits_ = LLA_BATCH_LIMITS_INIT;
  Memory batch_memory_, workspace_;
};

// ---- problems -----------------------------------------------------------------------------------------------------------

enum class Keys { Random, Repeated };

struct MixerCase {
  lla_mixer mixer = LLA_SCALAR_GATE;
  bool log_linear = true;
  Keys keys = Keys::Random;
  int64_t heads = 2, groups = 1, key_dim = 16, value_dim = 8, grain = 64;
  bool write = true;
  std::string name() const {
    return std::string(mixer == LLA_DELTA_RULE ? "delta" : "scalar") + (log_linear ? "_loglinear" : "_linear") +
           (keys == Keys::Repeated ? "_repeated" : "") + "_C" + std::to_string(grain);
  }
};

inline lla_layer_desc describe(const MixerCase& c, int64_t length) {
  lla_layer_desc d =
      mixer_desc(c.mixer, c.heads, c.groups, c.key_dim, c.value_dim, c.log_linear ? lla_levels_needed(length) : 0);
  d.grain = c.grain;
  d.write_form = c.write ? LLA_WRITE_READY : LLA_WRITE_NONE;
  return d;
}

inline Tensors mixer_tensors(const MixerCase& c, int64_t rows, lla_dtype dtype, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(0, 1);
  Tensors t;
  t[LLA_Q] = Buffer(dtype, {rows, c.groups, c.key_dim});
  t[LLA_K] = Buffer(dtype, {rows, c.groups, c.key_dim});
  t[LLA_V] = Buffer(dtype, {rows, c.heads, c.value_dim});
  t[LLA_GATE] = Buffer(dtype, {rows, c.heads});
  t[LLA_Y] = Buffer(dtype, {rows, c.heads, c.value_dim});
  if (c.write) t[LLA_WRITE] = Buffer(dtype, {rows, c.heads});
  if (c.log_linear) t[LLA_LAMBDA] = Buffer(dtype, {rows, c.heads, lla_levels_needed(rows)});
  for (auto& [role, b] : t) {
    if (role == LLA_Y) continue;
    for (size_t i = 0; i < b.count(); ++i) {
      if (role == LLA_GATE) b.set(i, c.keys == Keys::Repeated ? -1e-3 : -0.2 * uniform(engine));
      else if (role == LLA_WRITE) b.set(i, c.keys == Keys::Repeated ? 0.999 : 0.1 + 0.8 * uniform(engine));
      else if (role == LLA_LAMBDA) b.set(i, 0.2 + uniform(engine));
      else b.set(i, normal(engine));
    }
  }
  Buffer& k = t[LLA_K];  // unit keys; all the same ones in the hard case
  const size_t d = static_cast<size_t>(c.key_dim);
  for (size_t r = 0; r < k.count() / d; ++r) {
    double norm = 0;
    for (size_t i = 0; i < d; ++i) norm += k.get(r * d + i) * k.get(r * d + i);
    for (size_t i = 0; i < d; ++i)
      k.set(r * d + i, c.keys == Keys::Repeated && r > 0 ? k.get(i) : k.get(r * d + i) / std::sqrt(norm));
  }
  return t;
}

inline Buffer random_like(const Buffer& shape, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  Buffer b(shape.dtype, shape.dims);
  for (size_t i = 0; i < b.count(); ++i) b.set(i, normal(engine));
  return b;
}

// Largest distance of rows [begin, end) from the reference, relative to the RMS of the norms of all reference rows.
inline double row_error(const Buffer& x, const Buffer& reference, int64_t begin, int64_t end) {
  const size_t width = reference.row_size();
  double total = 0, worst = 0;
  for (size_t i = 0; i < reference.count(); ++i) total += reference.get(i) * reference.get(i);
  const double rms = std::sqrt(total / static_cast<double>(reference.dims[0]));
  for (int64_t r = begin; r < end; ++r) {
    double e = 0;
    for (size_t i = 0; i < width; ++i) {
      const double delta = x.get(static_cast<size_t>(r) * width + i) - reference.get(static_cast<size_t>(r) * width + i);
      e += delta * delta;
    }
    if (!(std::sqrt(e) <= worst)) worst = std::sqrt(e);  // a NaN stays
  }
  return worst / rms;
}

inline double relative_error(const Buffer& x, const Buffer& reference, int64_t begin = 0, int64_t end = -1) {
  if (end < 0) end = reference.dims[0];
  double e = 0, n = 0;
  for (size_t i = static_cast<size_t>(begin) * reference.row_size(); i < static_cast<size_t>(end) * reference.row_size(); ++i) {
    e += (x.get(i) - reference.get(i)) * (x.get(i) - reference.get(i));
    n += reference.get(i) * reference.get(i);
  }
  return n > 0 ? std::sqrt(e / n) : std::sqrt(e);
}

}  // namespace sweep
