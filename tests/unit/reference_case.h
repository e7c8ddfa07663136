// SPDX-License-Identifier: Apache-2.0
// Helpers of the reference backend's tests: mixer cases in double, hand-made states, and calls of single kernels.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/fenwick.h"
#include "golden.h"
#include "plugin/backend.h"

namespace reference_test {

using lla::BatchView;
using lla::Sequence;
using lla::SlotImage;
using lla::View;
using Values = std::vector<double>;

// Memory of exactly the size that a kernel asked for, 64-byte aligned; what is written beyond it is noticed.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes), raw_(static_cast<size_t>(bytes) + 192, static_cast<char>(0x7f)) {
    data_ = raw_.data() + 64;
    data_ += (64 - reinterpret_cast<uintptr_t>(data_) % 64) % 64;
  }
  char* data() { return data_; }
  bool intact() const {
    for (int i = 0; i < 64; ++i) {
      if (data_[bytes_ + i] != 0x7f) return false;
    }
    return true;
  }

 private:
  int64_t bytes_;
  std::vector<char> raw_;
  char* data_;
};

inline lla::Limits limits_of(const BatchView& batch) {
  lla::Limits limits;
  limits.sequences = batch.count;
  limits.rows = batch.total_rows;
  for (int64_t b = 0; b < batch.count; ++b) {
    const Sequence& s = batch.sequences[b];
    limits.rows_per_sequence = std::max(limits.rows_per_sequence, s.rows);
    limits.length = std::max(limits.length, s.position + s.rows);
  }
  return limits;
}

// Runs the reference kernel of an operation, with scratch memory full of rubbish.
template <class Problem>
void run_kernel(lla::Op op, const Problem& problem) {
  const lla::Kernel* kernel = lla::find_kernel(lla::reference_backend(), op, &problem);
  ASSERT_NE(kernel, nullptr);
  const lla::Limits limits = limits_of(problem.batch);
  lla::Need need;
  kernel->measure(&problem, limits, &need);
  ASSERT_GE(need.shared, 0);
  Memory shared(need.shared), thread(need.per_thread);
  for (int32_t phase = 0; phase < kernel->phases(&problem); ++phase) {
    for (int64_t task = kernel->tasks(&problem, phase) - 1; task >= 0; --task) {
      kernel->run(&problem, limits, {shared.data(), thread.data()}, phase, task);
    }
  }
  EXPECT_TRUE(shared.intact() && thread.intact()) << kernel->name << " writes beyond its scratch";
}

// A contiguous tensor [rows, heads, dim] of doubles; empty = not present.
inline View view(const Values& data, int64_t heads, int64_t dim) {
  View v;
  v.data = data.empty() ? nullptr : const_cast<double*>(data.data());
  v.dtype = LLA_F64;
  v.row_stride = heads * dim;
  v.head_stride = dim;
  return v;
}

inline lla::Matrix matrix(const Values& data, int64_t columns) {
  lla::Matrix m;
  m.data = data.empty() ? nullptr : const_cast<double*>(data.data());
  m.dtype = LLA_F64;
  m.row_stride = columns;
  return m;
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(engine_); }
  Values normal(int64_t count, double sigma = 1) {
    Values values(static_cast<size_t>(count));
    for (double& value : values) value = sigma * std::normal_distribution<double>()(engine_);
    return values;
  }
  Values uniforms(int64_t count, double low, double high) {
    Values values(static_cast<size_t>(count));
    for (double& value : values) value = uniform(low, high);
    return values;
  }

 private:
  std::mt19937 engine_;
};

// ---- mixer ----

// Inputs of a mixer, or the gradients of all of them.
struct Tensors {
  Values q, k, v, gate, write, lambda;

  std::vector<std::pair<const char*, Values*>> all() {
    return {{"q", &q}, {"k", &k}, {"v", &v}, {"gate", &gate}, {"write", &write}, {"lambda", &lambda}};
  }
};

struct Case {
  lla::MixerShape shape;
  int64_t sequences = 1, length = 0;
  Tensors in;
  Values dy;  // gradient of the output

  int64_t rows() const { return sequences * length; }
  int64_t value_width() const { return shape.heads * shape.value_dim; }
};

// Random inputs. Keys are about normalised, gates in [-0.3, 0], λ of any sign.
inline Case random_case(int32_t mixer, int64_t length, int64_t grain, int64_t levels, uint32_t seed) {
  Case c;
  c.shape.mixer = mixer;
  c.shape.heads = 4;
  c.shape.groups = 2;
  c.shape.key_dim = 5;
  c.shape.value_dim = 3;
  c.shape.grain = grain;
  c.shape.levels = levels;
  c.shape.absorb = levels > 0 && levels < lla::levels_needed(length);
  c.shape.scale = 0.7;
  c.length = length;
  Random random(seed);
  c.in.q = random.normal(length * 2 * 5);
  c.in.k = random.normal(length * 2 * 5, 0.45);
  c.in.v = random.normal(length * 4 * 3);
  c.in.gate = random.uniforms(length * 4, -0.3, 0);
  c.in.write = random.uniforms(length * 4, 0.1, 1);
  if (levels > 0) c.in.lambda = random.normal(length * 4 * levels);
  c.dy = random.normal(length * 4 * 3);
  return c;
}

// A golden file as a case. `linear`: without λ (it is 1 in the file).
inline Case golden_case(const golden::File& file, int64_t grain, bool linear = false) {
  Case c;
  const bool delta = file.text("mixer") == "delta_rule";
  c.shape.mixer = delta ? LLA_DELTA_RULE : LLA_SCALAR_GATE;
  c.shape.heads = file.integer("H");
  c.shape.groups = file.integer("G");
  c.shape.key_dim = file.integer("dk");
  c.shape.value_dim = file.integer("dv");
  c.shape.grain = grain;
  c.shape.levels = linear ? 0 : file.integer("L");
  c.shape.absorb = file.text("levels_policy") == "absorb";
  c.shape.scale = file.number("scale");
  c.sequences = file.integer("B");
  c.length = file.integer("T");
  c.in.q = file["in.q"];
  c.in.k = file["in.k"];
  c.in.v = file["in.v"];
  c.in.gate = file["in.g"];
  if (delta) c.in.write = file["in.beta"];
  if (!linear) c.in.lambda = file["in.lam"];
  if (file.has("in.do")) c.dy = file["in.do"];
  return c;
}

// Sequences that run from the beginning to the end.
inline std::vector<Sequence> whole_sequences(const Case& c) {
  std::vector<Sequence> sequences(static_cast<size_t>(c.sequences));
  for (int64_t b = 0; b < c.sequences; ++b) {
    sequences[static_cast<size_t>(b)].index = b;
    sequences[static_cast<size_t>(b)].row_begin = b * c.length;
    sequences[static_cast<size_t>(b)].rows = c.length;
  }
  return sequences;
}

template <class Problem>
void bind_inputs(const Case& c, const std::vector<Sequence>& sequences, const lla::SlotMemory* state, Problem* problem) {
  const lla::MixerShape& s = c.shape;
  problem->shape = s;
  problem->batch.sequences = sequences.data();
  problem->batch.count = static_cast<int64_t>(sequences.size());
  problem->batch.total_rows = c.rows();
  problem->q = view(c.in.q, s.groups, s.key_dim);
  problem->k = view(c.in.k, s.groups, s.key_dim);
  problem->v = view(c.in.v, s.heads, s.value_dim);
  problem->gate = view(c.in.gate, s.heads, 1);
  problem->write = view(c.in.write, s.heads, 1);
  problem->lambda = view(c.in.lambda, s.heads, s.levels);
  if (state) problem->state = *state;
}

// Runs forward on some rows; outputs go into `y` [rows of the case].
inline void forward(const Case& c, const std::vector<Sequence>& sequences, const lla::SlotMemory* state, Values* y) {
  lla::MixerForward problem;
  bind_inputs(c, sequences, state, &problem);
  y->resize(static_cast<size_t>(c.rows() * c.value_width()));
  problem.y = view(*y, c.shape.heads, c.shape.value_dim);
  run_kernel(lla::Op::MixerForward, problem);
}

inline Values forward(const Case& c) {
  Values y;
  forward(c, whole_sequences(c), nullptr, &y);
  return y;
}

// Gradients of the rows of some sequences; other rows stay what they are (NaN if the arrays were empty).
inline void backward(const Case& c, const std::vector<Sequence>& sequences, const lla::SlotMemory* state,
                     const lla::SlotMemory* gradient, Tensors* out) {
  const lla::MixerShape& s = c.shape;
  lla::MixerBackward problem;
  bind_inputs(c, sequences, state, &problem);
  if (gradient) problem.gradient = *gradient;
  const auto shape_like = [](const Values& input, Values* values) {
    if (values->empty()) values->assign(input.size(), NAN);
  };
  shape_like(c.in.q, &out->q);
  shape_like(c.in.k, &out->k);
  shape_like(c.in.v, &out->v);
  shape_like(c.in.gate, &out->gate);
  shape_like(c.in.write, &out->write);
  shape_like(c.in.lambda, &out->lambda);
  problem.dy = view(c.dy, s.heads, s.value_dim);
  problem.dq = view(out->q, s.groups, s.key_dim);
  problem.dk = view(out->k, s.groups, s.key_dim);
  problem.dv = view(out->v, s.heads, s.value_dim);
  problem.dgate = view(out->gate, s.heads, 1);
  problem.dwrite = view(out->write, s.heads, 1);
  problem.dlambda = view(out->lambda, s.heads, s.levels);
  run_kernel(lla::Op::MixerBackward, problem);
}

inline Tensors backward(const Case& c) {
  Tensors out;
  backward(c, whole_sequences(c), nullptr, nullptr, &out);
  return out;
}

// The operator straight from its definition, no chunks and no nodes, decays as products: for finite and infinite gates
// alike.
inline Values direct_forward(const Case& c) {
  const lla::MixerShape& s = c.shape;
  const int64_t dk = s.key_dim, dv = s.value_dim;
  Values y(static_cast<size_t>(c.rows() * c.value_width()), 0.0);
  for (int64_t b = 0; b < c.sequences; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      for (int64_t t = 0; t < c.length; ++t) {
        const auto at = [&](const Values& values, int64_t position, int64_t heads, int64_t head, int64_t dim) {
          return values.data() + ((b * c.length + position) * heads + head) * dim;
        };
        const int64_t g = s.group_of(h);
        Values x(at(c.in.q, t, s.groups, g, dk), at(c.in.q, t, s.groups, g, dk) + dk);
        double decay = s.scale;
        for (int64_t p = t; p >= 0; --p) {
          const double* k = at(c.in.k, p, s.groups, g, dk);
          const double* v = at(c.in.v, p, s.heads, h, dv);
          const double write = c.in.write.empty() ? 1 : *at(c.in.write, p, s.heads, h, 1);
          double match = 0;
          for (int64_t i = 0; i < dk; ++i) match += x[static_cast<size_t>(i)] * k[i];
          const double weight = s.levels == 0 ? 1 : at(c.in.lambda, t, s.heads, h, s.levels)[s.column(lla::level_of(t, p))];
          for (int64_t i = 0; i < dv; ++i) {
            y[static_cast<size_t>(((b * c.length + t) * s.heads + h) * dv + i)] += weight * decay * match * write * v[i];
          }
          if (s.mixer == LLA_DELTA_RULE) {
            for (int64_t i = 0; i < dk; ++i) x[static_cast<size_t>(i)] -= write * match * k[i];
          }
          decay *= c.in.gate.empty() ? 1 : std::exp(*at(c.in.gate, p, s.heads, h, 1));
        }
      }
    }
  }
  return y;
}

// ---- states ----

// Pools of one layer in plain memory. Blocks are handed out one after the other and never come back.
class Pools {
 public:
  Pools(const lla::MixerShape& s, int32_t dtype, int64_t node_blocks = 256, int64_t tail_blocks = 8) : shape_(s) {
    memory.node_layout = {s.heads, s.key_dim, s.value_dim, dtype};
    memory.tail_layout = {s.heads, s.groups, s.key_dim, s.value_dim, 2 * s.grain, dtype == LLA_F64 ? LLA_F64 : LLA_F32};
    nodes_.assign(static_cast<size_t>(memory.node_layout.bytes() * node_blocks), static_cast<char>(0x7f));
    tails_.assign(static_cast<size_t>(memory.tail_layout.bytes() * tail_blocks), static_cast<char>(0x7f));
    memory.nodes = {nodes_.data(), memory.node_layout.bytes()};
    memory.tails = {tails_.data(), memory.tail_layout.bytes()};
    node_blocks_ = node_blocks;
    tail_blocks_ = tail_blocks;
  }
  Pools(const Pools&) = delete;
  Pools& operator=(const Pools&) = delete;

  int32_t take_node() {
    EXPECT_LT(next_node_, node_blocks_);
    return next_node_++;
  }
  int32_t take_tail() {
    EXPECT_LT(next_tail_, tail_blocks_);
    return next_tail_++;
  }
  // Entries of an image that this layer has after `chunks` chunks.
  bool live(int entry, int64_t chunks) const {
    const int apart = shape_.separate_levels();
    if (entry == lla::kAbsorbed) return (shape_.levels == 0 || shape_.absorb) && (chunks >> apart) != 0;
    return entry < apart && ((chunks >> entry) & 1);
  }
  // An image at a position, with fresh blocks.
  SlotImage image(int64_t position, int32_t tail_origin = 0) {
    SlotImage image;
    image.position = position;
    image.tail = take_tail();
    image.tail_origin = tail_origin;
    for (int b = 0; b < lla::kNodes; ++b) {
      if (live(b, position / shape_.grain)) image.node[b] = take_node();
    }
    return image;
  }
  Values node(const SlotImage& image, int entry, int64_t head) const {
    Values values(static_cast<size_t>(shape_.key_dim * shape_.value_dim), 0.0);
    if (image.node[entry] < 0) return values;
    const void* data = memory.node(image.node[entry], head);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = lla::load_element<double>(data, memory.node_layout.dtype, static_cast<int64_t>(i));
    }
    return values;
  }
  double node_decay(const SlotImage& image, int entry, int64_t head) const {
    if (image.node[entry] < 0) return 0;
    return lla::load_element<double>(memory.node_decay(image.node[entry], head), memory.node_layout.decay_dtype(), 0);
  }
  // Addresses of all numbers that an image holds: nodes, their log decays (scalar gate), raw rows. F64 pools.
  std::vector<double*> numbers(const SlotImage& image) const {
    std::vector<double*> out;
    const auto add = [&out](char* data, int64_t count) {
      for (int64_t i = 0; i < count; ++i) out.push_back(reinterpret_cast<double*>(data) + i);
    };
    for (int64_t h = 0; h < shape_.heads; ++h) {
      for (int32_t id : image.node) {
        if (id < 0) continue;
        add(memory.node(id, h), shape_.key_dim * shape_.value_dim);
        if (shape_.mixer == LLA_SCALAR_GATE) add(memory.node_decay(id, h), 1);
      }
    }
    const int64_t a = image.position - image.position % shape_.grain;
    for (int64_t p = std::max(a, image.start); p < image.position; ++p) {
      const int64_t ring = (image.tail_origin + p - a) % memory.tail_layout.capacity;
      for (int64_t g = 0; g < shape_.groups; ++g) add(memory.tail_k(image.tail, g, ring), shape_.key_dim);
      for (int64_t h = 0; h < shape_.heads; ++h) {
        add(memory.tail_v(image.tail, h, ring), shape_.value_dim);
        add(memory.tail_gate(image.tail, h, ring), 1);
        add(memory.tail_write(image.tail, h, ring), 1);
      }
    }
    return out;
  }

  lla::SlotMemory memory;

 private:
  lla::MixerShape shape_;
  std::vector<char> nodes_, tails_;
  int64_t node_blocks_ = 0, tail_blocks_ = 0;
  int32_t next_node_ = 0, next_tail_ = 0;
};

// One append to one sequence, planned by hand as the core would.
struct Append {
  Sequence sequence;
  std::vector<lla::NodesToStore> nodes;
  std::vector<lla::RowsToStore> tails;
  SlotImage after;

  std::vector<Sequence> bound() {
    sequence.nodes_to_store = nodes.data();
    sequence.nodes_to_store_count = static_cast<int64_t>(nodes.size());
    sequence.tail_to_store = tails.data();
    sequence.tail_to_store_count = static_cast<int64_t>(tails.size());
    return {sequence};
  }
};

// Image after `rows` rows on top of `from`, its nodes and raw rows being stored by the append. `fork`: into another tail
// block.
inline SlotImage plan_image(const lla::MixerShape& shape, Pools* pools, const SlotImage& from, int64_t rows, bool fork,
                            Append* append) {
  const int64_t grain = shape.grain, capacity = pools->memory.tail_layout.capacity;
  SlotImage to = from;
  to.position = from.position + rows;
  const int64_t before = from.position / grain, after = to.position / grain;
  if (after != before) {
    lla::NodesToStore plan;
    plan.position = after * grain;
    for (int b = 0; b < lla::kNodes; ++b) {
      const int shift = b == lla::kAbsorbed ? shape.separate_levels() : b;
      const bool kept = shape.mixer == LLA_SCALAR_GATE && from.node[b] >= 0 && (before >> shift) == (after >> shift);
      if (!pools->live(b, after)) {
        to.node[b] = -1;
      } else if (!kept) {
        to.node[b] = pools->take_node();
        plan.write |= uint64_t{1} << b;
      }
      plan.node[b] = to.node[b];
    }
    append->nodes.push_back(plan);
  }
  const int64_t old_start = before * grain, start = after * grain;
  if (fork) {
    to.tail = pools->take_tail();
    to.tail_origin = static_cast<int32_t>((from.tail_origin + 5) % capacity);
    append->tails.push_back({to.tail, to.tail_origin, start, to.position});
  } else if (start == old_start) {
    const int64_t ring = (from.tail_origin + from.position - start) % capacity;
    append->tails.push_back({to.tail, static_cast<int32_t>(ring), from.position, to.position});
  } else {
    to.tail_origin = static_cast<int32_t>((from.tail_origin + from.position - old_start) % capacity);
    append->tails.push_back({to.tail, to.tail_origin, start, to.position});
  }
  return to;
}

// `rows` more rows of sequence b of a case, whose history is `history`.
inline Append append_rows(const Case& c, Pools* pools, const SlotImage& history, int64_t b, int64_t rows,
                          bool fork = false) {
  Append append;
  append.sequence.index = b;
  append.sequence.row_begin = b * c.length + history.position;
  append.sequence.rows = rows;
  append.sequence.position = history.position;
  append.sequence.history = history;
  append.after = plan_image(c.shape, pools, history, rows, fork, &append);
  return append;
}

inline double relative_error(const Values& x, const Values& reference, double floor = 0) {
  return golden::relative_error(x, reference, floor);
}

// ---- gradients ----

inline double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double softplus(double x) { return std::log1p(std::exp(x)); }

// Compares a gradient with central differences of a loss over the values that it belongs to.
inline void check(const char* name, Values* values, const Values& gradient, const std::function<double()>& loss) {
  Values numeric;
  for (double& value : *values) {
    const double step = 1e-5, kept = value;
    value = kept + step;
    const double above = loss();
    value = kept - step;
    const double below = loss();
    value = kept;
    numeric.push_back((above - below) / (2 * step));
  }
  EXPECT_LE(relative_error(gradient, numeric), 1e-8) << name;
}

}  // namespace reference_test
