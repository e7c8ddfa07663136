// SPDX-License-Identifier: Apache-2.0
// Helpers for the unit tests of mixer kernels: random tensors, slots with plain-array memory, plans of appends, running one
// kernel, comparing results. Everything a test needs without the core's planner.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/fenwick.h"
#include "plugin/backend.h"

namespace mixer_testing {

using namespace lla;

// A small generator with the same numbers everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}
  uint64_t bits() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double normal() {
    const double u = 1 - uniform(), v = uniform();
    return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }

 private:
  uint64_t state_;
};

// A tensor [rows, heads, dim] of any float type. `pad` elements of NaN follow every row, as in a strided view. `by_heads`:
// all rows of a head lie together, those of the next head behind them.
struct Tensor {
  std::vector<char> bytes;
  int32_t dtype = LLA_F32;
  int64_t rows = 0, heads = 0, dim = 0, pad = 0;
  bool by_heads = false;

  Tensor() = default;
  Tensor(int32_t type, int64_t row_count, int64_t head_count, int64_t width, int64_t padding = 0, bool heads_first = false)
      : dtype(type), rows(row_count), heads(head_count), dim(width), pad(padding), by_heads(heads_first) {
    const int64_t elements = rows * row_stride() * (by_heads ? heads : 1);
    bytes.assign(static_cast<size_t>(elements * dtype_size(dtype)), 0);
    for (int64_t i = 0; i < elements; ++i) store_element<double>(bytes.data(), dtype, i, NAN);
    fill([] { return 0.0; });
  }
  int64_t row_stride() const { return (by_heads ? dim : heads * dim) + pad; }
  int64_t head_stride() const { return by_heads ? rows * row_stride() : dim; }
  bool empty() const { return bytes.empty(); }
  double get(int64_t row, int64_t head, int64_t i) const {
    return load_element<double>(bytes.data(), dtype, row * row_stride() + head * head_stride() + i);
  }
  void set(int64_t row, int64_t head, int64_t i, double value) {
    store_element<double>(bytes.data(), dtype, row * row_stride() + head * head_stride() + i, value);
  }
  template <class F>
  void fill(F value) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < dim; ++i) set(r, h, i, value());
      }
    }
  }
  View view(bool accumulate = false) {
    View v;
    if (bytes.empty()) return v;
    v.data = bytes.data();
    v.dtype = dtype;
    v.accumulate = accumulate;
    v.row_stride = row_stride();
    v.head_stride = head_stride();
    return v;
  }
  std::vector<double> values() const {
    std::vector<double> out;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < dim; ++i) out.push_back(get(r, h, i));
      }
    }
    return out;
  }
};

// max |a - b| / max |b|; equal infinities count as equal, anything else that is not finite makes the result infinite.
inline double max_error(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isinf(a[i]) && a[i] == b[i]) continue;
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return INFINITY;
    difference = std::max(difference, std::fabs(a[i] - b[i]));
    size = std::max(size, std::fabs(b[i]));
  }
  return difference == 0 ? 0 : difference / size;
}

// ||a - b|| / ||b||.
inline double norm_error(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return INFINITY;
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return difference == 0 ? 0 : std::sqrt(difference / size);
}

// 64-byte aligned bytes, filled with a pattern that makes reads of unwritten scratch visible (NaN as float).
class Buffer {
 public:
  explicit Buffer(int64_t bytes = 0) : storage_(static_cast<size_t>(bytes + 64), static_cast<char>(0xff)) {}
  char* data() { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(storage_.data()) + 63) & ~uintptr_t{63}); }

 private:
  std::vector<char> storage_;
};

// Runs a kernel on one thread, or with its tasks in reverse order as another schedule would.
inline void run_kernel(const Kernel& kernel, const void* problem, const Limits& limits, bool reverse = false) {
  Need need;
  kernel.measure(problem, limits, &need);
  Buffer shared(need.shared), thread(need.per_thread);
  const Scratch scratch{shared.data(), thread.data()};
  for (int32_t phase = 0; phase < kernel.phases(problem); ++phase) {
    const int64_t tasks = kernel.tasks(problem, phase);
    for (int64_t i = 0; i < tasks; ++i) kernel.run(problem, limits, scratch, phase, reverse ? tasks - 1 - i : i);
  }
}

// Memory of one layer's slots, and plans of appends to them.
struct Memory {
  MixerShape shape;
  SlotMemory memory;
  Buffer node_buffer, tail_buffer;
  int32_t next_node = 0, next_tail = 0;
  bool rewrites_all = false;  // every fold writes all live nodes anew (log-linear delta rule)

  Memory(const MixerShape& s, int64_t nodes, int64_t tails, int64_t draft = 8, int32_t node_dtype = LLA_F32,
         int32_t tail_dtype = LLA_F32)
      : shape(s) {
    memory.node_layout = NodeLayout{s.heads, s.key_dim, s.value_dim, node_dtype};
    const int64_t capacity = s.grain + std::max(s.grain, draft);
    memory.tail_layout = TailLayout{s.heads, s.groups, s.key_dim, s.value_dim, capacity, tail_dtype};
    memory.nodes.stride = memory.node_layout.bytes();
    memory.tails.stride = align64(memory.tail_layout.bytes());
    node_buffer = Buffer(nodes * memory.nodes.stride);
    tail_buffer = Buffer(tails * memory.tails.stride);
    memory.nodes.base = node_buffer.data();
    memory.tails.base = tail_buffer.data();
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Chunks [first, last) that node b covers at chunk count n; empty if the node is not there.
  RowRange covers(int64_t n, int b) const {
    const int apart = shape.separate_levels();
    if (b == kAbsorbed) return RowRange{0, apart >= kNodeLevels ? 0 : (n >> apart) << apart};
    if (b >= apart || ((n >> b) & 1) == 0) return RowRange{0, 0};
    const int64_t first = (n >> (b + 1)) << (b + 1);
    return RowRange{first, first + (int64_t{1} << b)};
  }
  bool live(int64_t n, int b, int64_t start) const {
    const RowRange r = covers(n, b);
    return r.end > r.begin && r.end * shape.grain > start;
  }
  // An empty slot that starts at `position`.
  SlotImage empty_slot(int64_t position) {
    SlotImage image;
    image.position = image.start = position;
    image.tail = next_tail++;
    return image;
  }
  // A slot whose nodes and tail rows hold random numbers, started at `start`. log decays are about -`decay` per row.
  SlotImage random_slot(Random& random, int64_t position, int64_t start, double decay = 0.1) {
    SlotImage image = empty_slot(position);
    image.start = start;
    const int64_t c = shape.grain, n = position / c;
    image.tail_origin = static_cast<int32_t>(random.below(memory.tail_layout.capacity));
    for (int b = 0; b < kNodes; ++b) {
      if (!live(n, b, start)) continue;
      image.node[b] = next_node++;
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t i = 0; i < shape.key_dim * shape.value_dim; ++i) {
          store_element<double>(memory.node(image.node[b], h), memory.node_layout.dtype, i, random.normal());
        }
        const RowRange r = covers(n, b);
        const int64_t rows = (r.end - r.begin) * c;
        store_element<double>(memory.node_decay(image.node[b], h), memory.node_layout.decay_dtype(), 0,
                              -decay * static_cast<double>(rows) * random.uniform());
      }
    }
    for (int64_t p = std::max(n * c, start); p < position; ++p) {
      const int64_t ring = (image.tail_origin + p - n * c) % memory.tail_layout.capacity;
      const int32_t type = memory.tail_layout.dtype, gate_type = memory.tail_layout.gate_dtype();
      const double k_size = 1 / std::sqrt(static_cast<double>(shape.key_dim));
      for (int64_t g = 0; g < shape.groups; ++g) {
        for (int64_t i = 0; i < shape.key_dim; ++i) {
          store_element<double>(memory.tail_k(image.tail, g, ring), type, i, k_size * random.normal());
        }
      }
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t i = 0; i < shape.value_dim; ++i) {
          store_element<double>(memory.tail_v(image.tail, h, ring), type, i, random.normal());
        }
        store_element<double>(memory.tail_gate(image.tail, h, ring), gate_type, 0, -2 * decay * random.uniform());
        store_element<double>(memory.tail_write(image.tail, h, ring), gate_type, 0, random.uniform());
      }
    }
    return image;
  }
};

// What an append of `rows` rows to a slot plans, and the slot afterwards. Keep it alive while the Sequence is in use.
struct Append {
  Sequence sequence;
  SlotImage after;
  std::vector<NodesToStore> nodes;
  std::vector<RowsToStore> tails;

  // Plans into fresh blocks. Nodes are stored at the end, and at all folds too if `every_fold`. `fork`: the rows go
  // to a ring of their own, as they do when slot_out is not slot_in.
  void plan(Memory& m, const SlotImage& before, int64_t index, int64_t row_begin, int64_t rows, bool every_fold = false,
            bool fork = false) {
    const int64_t c = m.shape.grain, capacity = m.memory.tail_layout.capacity;
    const int64_t end = before.position + rows, first = before.position / c, last = end / c;
    after = before;
    after.position = end;
    nodes.clear();
    tails.clear();
    for (int64_t n = first + 1; n <= last; ++n) {
      if (n != last && !every_fold) continue;
      NodesToStore store;
      store.position = n * c;
      store.write = 0;
      const int64_t stored = nodes.empty() ? first : nodes.back().position / c;
      for (int b = 0; b < kNodes; ++b) {
        store.node[b] = -1;
        if (!m.live(n, b, before.start)) continue;
        const RowRange now = m.covers(n, b), then = m.covers(stored, b);
        const bool kept = !m.rewrites_all && after.node[b] >= 0 && now.begin == then.begin && now.end == then.end;
        store.node[b] = kept ? after.node[b] : m.next_node++;
        if (!kept) store.write |= uint64_t{1} << b;
      }
      std::copy(store.node, store.node + kNodes, after.node);
      nodes.push_back(store);
    }
    RowsToStore tail;
    tail.block = fork ? m.next_tail++ : before.tail;
    tail.first = fork ? last * c : std::max(before.position, last * c);
    tail.last = end;
    // Rows of a new chunk go behind those that the slot still holds.
    const int64_t held = last > first ? before.position - first * c : 0;
    const int64_t origin = fork ? 3 % capacity : (before.tail_origin + held) % capacity;
    tail.ring = static_cast<int32_t>((origin + tail.first - last * c) % capacity);
    after.tail = tail.block;
    after.tail_origin = static_cast<int32_t>(origin);
    if (tail.last > tail.first) tails.push_back(tail);
    sequence = Sequence();
    sequence.index = index;
    sequence.row_begin = row_begin;
    sequence.rows = rows;
    sequence.position = before.position;
    sequence.history = before;
    sequence.nodes_to_store = nodes.data();
    sequence.nodes_to_store_count = static_cast<int64_t>(nodes.size());
    sequence.tail_to_store = tails.data();
    sequence.tail_to_store_count = static_cast<int64_t>(tails.size());
  }
};

// A sequence without a state that starts at `position`.
inline Sequence plain_sequence(int64_t row_begin, int64_t rows, int64_t position = 0) {
  Sequence s;
  s.row_begin = row_begin;
  s.rows = rows;
  s.position = position;
  s.history.position = s.history.start = position;
  return s;
}

// Contents of a slot: nodes and the k and v rows of the tail, and (apart, since they may be large) what is a log or a
// scalar: log decays of nodes, gates and write strengths of rows.
struct SlotValues {
  std::vector<double> content, scalars;
};

inline SlotValues slot_values(const Memory& m, const SlotImage& image) {
  SlotValues out;
  const MixerShape& shape = m.shape;
  const SlotMemory& memory = m.memory;
  const auto add = [](std::vector<double>* to, const char* from, int32_t dtype, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to->push_back(load_element<double>(from, dtype, i));
  };
  for (int b = 0; b < kNodes; ++b) {
    if (image.node[b] < 0) continue;
    for (int64_t h = 0; h < shape.heads; ++h) {
      add(&out.content, memory.node(image.node[b], h), memory.node_layout.dtype, shape.key_dim * shape.value_dim);
      add(&out.scalars, memory.node_decay(image.node[b], h), memory.node_layout.decay_dtype(), 1);
    }
  }
  const TailLayout& tail = memory.tail_layout;
  const int64_t begin = image.position / shape.grain * shape.grain;
  for (int64_t p = std::max(begin, image.start); p < image.position; ++p) {
    const int64_t ring = (image.tail_origin + p - begin) % tail.capacity;
    for (int64_t g = 0; g < shape.groups; ++g) {
      add(&out.content, memory.tail_k(image.tail, g, ring), tail.dtype, shape.key_dim);
    }
    for (int64_t h = 0; h < shape.heads; ++h) {
      add(&out.content, memory.tail_v(image.tail, h, ring), tail.dtype, shape.value_dim);
      add(&out.scalars, memory.tail_gate(image.tail, h, ring), tail.gate_dtype(), 1);
      add(&out.scalars, memory.tail_write(image.tail, h, ring), tail.gate_dtype(), 1);
    }
  }
  return out;
}

// Tensors of a mixer problem and of its gradients.
struct Tensors {
  Tensor q, k, v, gate, write, lambda, y, dy, dq, dk, dv, dgate, dwrite, dlambda;
};

struct Inputs {
  int32_t dtype = LLA_F32;  // of q, k, v, y, dy and gradients; gate, write and lambda are fp32
  bool gate = true, write = true;
  double decay = 0.1;  // gates are about -decay
  double hard = 0;     // share of gates that are -inf, -700 or 0 instead
  int64_t pad = 0;
  bool by_heads = false;  // all but gate and write
  double lift = 0;        // added to keys and values, whose products then do not cancel
  double query_size = 1, write_size = 1, lambda_size = 1;
  double row_lift = 0, gradient_size = 1;  // added to queries and to dy; of dy
};

inline Tensors random_tensors(Random& random, const MixerShape& s, int64_t rows, const Inputs& in) {
  Tensors t;
  const double k_size = 1 / std::sqrt(static_cast<double>(s.key_dim));
  t.q = Tensor(in.dtype, rows, s.groups, s.key_dim, in.pad, in.by_heads);
  t.k = Tensor(in.dtype, rows, s.groups, s.key_dim, in.pad, in.by_heads);
  t.v = Tensor(in.dtype, rows, s.heads, s.value_dim, in.pad, in.by_heads);
  t.y = Tensor(in.dtype, rows, s.heads, s.value_dim, in.pad, in.by_heads);
  t.dy = Tensor(in.dtype, rows, s.heads, s.value_dim, in.pad, in.by_heads);
  t.q.fill([&] { return in.row_lift + in.query_size * random.normal(); });
  t.k.fill([&] { return in.lift + k_size * random.normal(); });
  t.v.fill([&] { return in.lift + random.normal(); });
  t.dy.fill([&] { return in.gradient_size * (in.row_lift + random.normal()); });
  if (in.gate) {
    t.gate = Tensor(LLA_F32, rows, s.heads, 1, in.pad);
    t.gate.fill([&] {
      if (random.uniform() >= in.hard) return -2 * in.decay * random.uniform();
      const int64_t which = random.below(3);
      return which == 0 ? -INFINITY : which == 1 ? -700.0 : 0.0;
    });
    t.dgate = Tensor(LLA_F32, rows, s.heads, 1, in.pad);
  }
  if (in.write) {
    t.write = Tensor(LLA_F32, rows, s.heads, 1, in.pad);
    t.write.fill([&] { return in.write_size * random.uniform(); });
    t.dwrite = Tensor(LLA_F32, rows, s.heads, 1, in.pad);
  }
  if (s.levels > 0) {
    t.lambda = Tensor(LLA_F32, rows, s.heads, s.levels, in.pad, in.by_heads);
    t.lambda.fill([&] { return in.lambda_size * random.normal(); });
    t.dlambda = Tensor(LLA_F32, rows, s.heads, s.levels, in.pad, in.by_heads);
  }
  t.dq = Tensor(in.dtype, rows, s.groups, s.key_dim, in.pad, in.by_heads);
  t.dk = Tensor(in.dtype, rows, s.groups, s.key_dim, in.pad, in.by_heads);
  t.dv = Tensor(in.dtype, rows, s.heads, s.value_dim, in.pad, in.by_heads);
  return t;
}

inline MixerForward forward_problem(const MixerShape& shape, Tensors& t, const std::vector<Sequence>& sequences) {
  MixerForward p;
  p.shape = shape;
  p.batch.sequences = sequences.data();
  p.batch.count = static_cast<int64_t>(sequences.size());
  p.batch.total_rows = t.q.rows;
  p.q = t.q.view();
  p.k = t.k.view();
  p.v = t.v.view();
  p.gate = t.gate.view();
  p.write = t.write.view();
  p.lambda = t.lambda.view();
  p.y = t.y.view();
  return p;
}

inline MixerBackward backward_problem(const MixerShape& shape, Tensors& t, const std::vector<Sequence>& sequences) {
  MixerBackward p;
  p.shape = shape;
  p.batch.sequences = sequences.data();
  p.batch.count = static_cast<int64_t>(sequences.size());
  p.batch.total_rows = t.q.rows;
  p.q = t.q.view();
  p.k = t.k.view();
  p.v = t.v.view();
  p.gate = t.gate.view();
  p.write = t.write.view();
  p.lambda = t.lambda.view();
  p.dy = t.dy.view();
  p.dq = t.dq.view();
  p.dk = t.dk.view();
  p.dv = t.dv.view();
  p.dgate = t.dgate.view();
  p.dwrite = t.dwrite.view();
  p.dlambda = t.dlambda.view();
  return p;
}

inline Limits limits_of(const std::vector<Sequence>& sequences, int64_t rows) {
  Limits limits;
  limits.sequences = static_cast<int64_t>(sequences.size());
  limits.rows = rows;
  for (const Sequence& s : sequences) {
    limits.rows_per_sequence = std::max(limits.rows_per_sequence, s.rows);
    limits.length = std::max(limits.length, s.position + s.rows);
  }
  return limits;
}

}  // namespace mixer_testing
