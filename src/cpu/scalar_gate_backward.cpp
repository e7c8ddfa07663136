// SPDX-License-Identifier: Apache-2.0
// Backward of the scalar gate. Phase 0: a task takes some heads of one group of one sequence and walks their chunks
// backwards. Phase 1, if heads share a group: sums the parts of the gradients of q and k in a fixed order.
#include <algorithm>
#include <cstring>

#include "cpu/scalar_gate.h"
#include "cpu/scalar_gate_gradient.h"

namespace lla::cpu::scalar_gate {

namespace {

constexpr int64_t kMostParts = 8;  // tasks into which a group's heads are split
constexpr int64_t kSumSplits = 8;  // tasks of a sum

// How the heads of a group are spread over tasks, and the partial sums in shared scratch.
struct Split {
  explicit Split(const MixerShape& shape)
      : per_group(shape.heads / shape.groups), parts(std::min(per_group, kMostParts)), groups(shape.groups) {}
  int64_t per_group, parts, groups;
  int64_t rows = 0, key_rows = 0;  // of a partial sum
  float *dq = nullptr, *dk = nullptr;

  bool shared() const { return per_group > 1; }
  int64_t head(const MixerShape& shape, int64_t group, int64_t i) const {
    return shape.head_map == LLA_HEAD_MAP_CYCLIC ? i * groups + group : group * per_group + i;
  }
  void carve(const MixerShape& shape, const Limits& limits, Carver* carver) {
    if (!shared()) return;
    rows = limits.rows;
    const int64_t history = times(limits.sequences, shape.grain);
    if (history < 0 || __builtin_add_overflow(rows, history, &key_rows)) key_rows = -1;
    const int64_t copies = times(parts, times(groups, shape.key_dim));
    dq = carver->floats(times(copies, rows));
    dk = carver->floats(times(copies, key_rows));
  }
  float* q_rows(const MixerShape& shape, int64_t part, int64_t group, int64_t row) const {
    return dq + ((part * groups + group) * rows + row) * shape.key_dim;
  }
  // Rows of the sequence from the start of its first chunk on.
  float* k_rows(const MixerShape& shape, int64_t part, int64_t group, const Sequence& s, int64_t order, int64_t row) const {
    return dk + ((part * groups + group) * key_rows + s.row_begin + order * shape.grain + row) * shape.key_dim;
  }
};

struct Buffers {
  OperandBuffers operands;
  Factors factors;
  GradientBuffers gradient;
  ChunkGradient chunk;
  float *q = nullptr, *k = nullptr;  // for ChunkGradient if a group has one head
  float* history = nullptr;          // converted nodes
  float* gradients = nullptr;        // of nodes
  float* created = nullptr;          // nodes of the call
  int64_t gradient_count = 0;

  void carve(const Sizes& z, const Limits& limits, Carver* carver) {
    operands.carve(z, carver);
    factors.carve(z, carver);
    gradient.carve(z, carver);
    q = carver->floats(times(z.row_block(), z.key_dim));
    k = carver->floats(times(z.grain, z.key_dim));
    chunk.v = carver->floats(times(z.grain, z.value_dim));
    chunk.gate = carver->floats(z.grain);
    chunk.write = carver->floats(z.grain);
    chunk.lambda = carver->floats(times(z.row_block(), z.levels));
    chunk.table = carver->floats(times(z.log2_grain + 1, z.grain));
    chunk.prefix = carver->floats(z.grain);
    gradient_count = Nodes::buffers(z, longest(limits));
    history = carver->floats(times(gradient_count, z.node));
    gradients = carver->floats(times(gradient_count, z.node));
    created = carver->floats(times(limits.rows_per_sequence / z.grain + 1, z.node_span()));
  }
};

void write_rows(const Simd& simd, const View& view, const Sequence& s, int64_t row, int64_t rows, int64_t head, int64_t dim,
                const float* values, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    void* to = view.at(s.index, row + i, head);
    if (view.accumulate) simd.narrow_add(to, view.dtype, values + i * stride, dim);
    else simd.narrow(to, view.dtype, values + i * stride, dim);
  }
}

// A sequence that stands where a gradient's image stands, for the functions that read tails.
Sequence stands_at(const SlotImage& image) {
  Sequence s;
  s.position = image.position;
  s.history = image;
  return s;
}

// One head on its way back through the chunks.
class Walk {
 public:
  Walk(const Simd& simd, const MixerBackward& problem, const Sequence& s, int64_t order, int64_t group, const Split& split,
       const Buffers& buffers)
      : simd_(simd), p_(problem), z_(problem.shape), s_(s), order_(order), group_(group), split_(split), b_(buffers),
        inputs_(inputs_of(problem)), first_(s.position / problem.shape.grain),
        wants_initial_(s.initial_gradient.tail >= 0 && problem.gradient.tails.base) {
    wants_q_ = p_.dq.present();
    wants_k_ = p_.dk.present() || wants_initial_;
  }
  // Head number `i` of the group. `opens`: the first of its part.
  void run(int64_t part, int64_t i, bool opens);

 private:
  const MixerShape& shape() const { return p_.shape; }
  Node created_by(int64_t index) const;
  // The nodes after `chunks` chunks, and bits for those that need a gradient.
  void nodes_after(int64_t chunks, Node* nodes, uint64_t* wanted) const;
  void sweep_forward();
  void load_final();
  void go_back(int64_t index);
  void reverse_fold(const Node* nodes, uint64_t wanted, const Operands& o, const ChunkGradient& g);
  void store_history_rows(const Operands& o, const ChunkGradient& g);
  void store_initial();

  float* buffer(int i) const { return b_.gradients + i * z_.node; }
  float* take() {
    const int i = std::countr_one(used_);
    used_ |= uint64_t{1} << i;
    return buffer(i);
  }
  void free(float* content) {
    if (content) used_ &= ~(uint64_t{1} << ((content - b_.gradients) / z_.node));
  }

  const Simd& simd_;
  const MixerBackward& p_;
  const Sizes z_;
  const Sequence& s_;
  const int64_t order_, group_;
  const Split& split_;
  const Buffers& b_;
  const MixerInputs inputs_;
  const int64_t first_;
  const bool wants_initial_;
  bool wants_q_ = false, wants_k_ = false;
  // Of the head:
  int64_t head_ = 0, part_ = 0;
  bool opens_ = false, owns_keys_ = false;
  Nodes history_;
  const float* created_ = nullptr;
  int64_t created_stride_ = 0;
  NodeGradient gradient_[kNodes];
  uint64_t used_ = 0;
};

Node Walk::created_by(int64_t index) const {
  const float* content = created_ + (index - first_) * created_stride_;
  return Node{content, content[z_.node], -1};
}

void Walk::nodes_after(int64_t chunks, Node* nodes, uint64_t* wanted) const {
  *wanted = 0;
  for (int b = 0; b < kNodes; ++b) {
    nodes[b] = Node();
    if (!keeps_node(z_, b)) continue;
    int64_t end = 0;  // chunks [.., end) are in the node
    if (b == kAbsorbed) end = chunks >> z_.separate << z_.separate;
    else if (chunks >> b & 1) end = chunks >> b << b;
    if (end == 0) continue;
    const bool created = end > first_;
    nodes[b] = created ? created_by(end - 1) : history_.node[b];
    if (created || (wants_initial_ && s_.initial_gradient.node[b] >= 0)) *wanted |= uint64_t{1} << b;
  }
}

// The nodes that the forward created: saved, or computed once more.
void Walk::sweep_forward() {
  history_ = Nodes();
  history_.pool = b_.history;
  history_.load(simd_, z_, p_.state, s_.history, head_);
  if (p_.saved) {
    const int64_t slot = saved_slot(shape(), s_, order_) * shape().heads + head_;
    created_ = static_cast<const float*>(p_.saved) + slot * z_.node_span();
    created_stride_ = shape().heads * z_.node_span();
    return;
  }
  created_ = b_.created;
  created_stride_ = z_.node_span();
  Nodes nodes = history_;
  Factors factors = b_.factors;
  for (int64_t i = first_; (i + 1) * z_.grain <= s_.position + s_.rows; ++i) {
    Operands o;
    load_operands(simd_, inputs_, s_, head_, i, false, b_.operands, &o);
    fill_suffix(simd_, z_, o.gate, &factors);
    float* content = b_.created + (i - first_) * created_stride_;
    fold_chunk(simd_, z_, p_.state, o, factors, b_.gradient.scaled, content, -1, &nodes);
    content[z_.node] = nodes.node[created_node(z_, i)].log_decay;
  }
}

void Walk::load_final() {
  used_ = 0;
  for (NodeGradient& g : gradient_) g = NodeGradient();
  if (s_.final_gradient.tail < 0 || !p_.gradient.nodes.base) return;
  Node nodes[kNodes];
  uint64_t wanted = 0;
  nodes_after((s_.position + s_.rows) / z_.grain, nodes, &wanted);
  for (int b = 0; b < kNodes; ++b) {
    const int32_t id = s_.final_gradient.node[b];
    if (!(wanted >> b & 1) || id < 0) continue;
    gradient_[b].content = take();
    load_node(simd_, p_.gradient, id, head_, gradient_[b].content, &gradient_[b].log_decay);
  }
}

// The chunk's fold, backwards: the gradient of the node that it created goes to the chunk and to what it swallowed.
void Walk::reverse_fold(const Node* nodes, uint64_t wanted, const Operands& o, const ChunkGradient& g) {
  const int created = created_node(z_, o.index);
  const NodeGradient made = gradient_[created];
  gradient_[created] = NodeGradient();
  Factors factors = b_.factors;
  fill_suffix(simd_, z_, o.gate, &factors);

  int part[kNodes + 1];
  float decay[kNodes + 1], inner[kNodes + 1], newer = factors.total;
  int parts = 0;
  const auto add = [&](int b) {
    if (!nodes[b].content && !(wanted >> b & 1)) return;
    decay[parts] = newer;
    part[parts++] = b;
    newer += nodes[b].log_decay;
  };
  for (int b = 0; b < std::min(trailing_ones(o.index), z_.separate); ++b) add(b);
  if (created == kAbsorbed) add(kAbsorbed);
  simd_.exp(decay, decay, parts);
  for (int j = 0; j < parts; ++j) {
    const float* content = nodes[part[j]].content;
    inner[j] = made.content && content ? decay[j] * simd_.dot(made.content, content, z_.node) : 0;
  }
  float log_decay = made.log_decay;  // what is newer than a part also decays the parts older than it
  for (int j = parts - 1; j >= 0; --j) {
    NodeGradient& target = gradient_[part[j]];
    target = NodeGradient();
    target.log_decay = log_decay;
    log_decay += inner[j];
    if (!made.content || !(wanted >> part[j] & 1)) continue;
    target.content = take();
    simd_.scale(target.content, made.content, decay[j], z_.node);
  }
  gradient_of_content(simd_, z_, o, factors, made.content, log_decay, b_.gradient, g);
  free(made.content);
}

void Walk::go_back(int64_t index) {
  const int64_t c = z_.grain, dk = z_.key_dim, dv = z_.value_dim;
  Operands o;
  load_operands(simd_, inputs_, s_, head_, index, true, b_.operands, &o);
  const int64_t lo = o.lo, hi = o.hi;
  ChunkGradient g = b_.chunk;
  const int64_t key_row = (index - first_) * c;
  g.k = !wants_k_ ? nullptr : split_.shared() ? split_.k_rows(shape(), part_, group_, s_, order_, key_row) : b_.k;

  // What the final state adds to the raw rows of an incomplete chunk.
  const bool open = hi < c, final = open && s_.final_gradient.tail >= 0 && p_.gradient.tails.base;
  if (g.k && (opens_ || !split_.shared())) std::fill(g.k, g.k + hi * dk, 0.0f);
  if (final) {
    const Sequence end = stands_at(s_.final_gradient);
    gather_tail(simd_, shape(), p_.gradient, end, head_, tail_rows(shape(), p_.gradient, end),
                g.k && owns_keys_ ? g.k : nullptr, g.v, g.gate, g.write);
  } else {
    std::fill(g.v, g.v + hi * dv, 0.0f);
    std::fill(g.gate, g.gate + hi, 0.0f);
    std::fill(g.write, g.write + hi, 0.0f);
  }
  std::fill(g.table, g.table + (z_.log2_grain + 1) * c, 0.0f);
  std::fill(g.prefix, g.prefix + hi, 0.0f);

  Node nodes[kNodes];
  uint64_t wanted = 0;
  nodes_after(index, nodes, &wanted);
  if (!open) reverse_fold(nodes, wanted, o, g);

  Factors factors = b_.factors;
  fill_factors(simd_, z_, o.gate, lo, hi, &factors);
  Reads reads;
  list_reads(simd_, shape(), z_, nodes, wanted, &reads);
  float read_sum[kNodes] = {};
  for (int64_t t0 = lo; t0 < hi; t0 += z_.row_block()) {
    const int64_t t1 = std::min(t0 + z_.row_block(), hi), rows = t1 - t0, row = o.row + t0 - lo;
    gather_view(simd_, p_.dy, s_, row, rows, head_, dv, b_.gradient.dy);
    g.q = !wants_q_ ? nullptr : split_.shared() ? split_.q_rows(shape(), part_, group_, row) : b_.q;
    if (g.q && (opens_ || !split_.shared())) std::fill(g.q, g.q + rows * dk, 0.0f);
    if (o.lambda) std::fill(g.lambda, g.lambda + rows * z_.levels, 0.0f);
    gradient_inside(simd_, shape(), z_, o, factors, t0, t1, b_.gradient.dy, b_.gradient, g);
    for (int n = 0; n < reads.count; ++n) {
      NodeGradient& target = gradient_[reads.level[n]];
      const bool into = wanted >> reads.level[n] & 1, started = target.content;
      if (into && !started) target.content = take();
      read_sum[n] += gradient_of_read(simd_, shape(), z_, o, factors, reads, n, t0, t1, b_.gradient.dy,
                                      into ? target.content : nullptr, started, b_.gradient, g);
    }
    if (p_.dlambda.present() && o.lambda) {
      write_rows(simd_, p_.dlambda, s_, row, rows, head_, z_.levels, g.lambda, z_.levels);
    }
    if (g.q && !split_.shared()) write_rows(simd_, p_.dq, s_, row, rows, group_, dk, g.q, dk);
  }
  float older = 0;  // gradient of the logs of the factors of all older nodes
  for (int n = reads.count - 1; n >= 0; --n) {
    gradient_[reads.level[n]].log_decay += older;
    older += read_sum[n];
  }
  gradient_of_factors(z_, o, g);

  const int64_t rows = hi - lo;
  if (p_.dv.present()) write_rows(simd_, p_.dv, s_, o.row, rows, head_, dv, g.v + lo * dv, dv);
  if (p_.dgate.present()) write_rows(simd_, p_.dgate, s_, o.row, rows, head_, 1, g.gate + lo, 1);
  if (p_.dwrite.present()) write_rows(simd_, p_.dwrite, s_, o.row, rows, head_, 1, g.write + lo, 1);
  if (p_.dk.present() && !split_.shared()) write_rows(simd_, p_.dk, s_, o.row, rows, group_, dk, g.k + lo * dk, dk);
  if (wants_initial_ && lo > 0) store_history_rows(o, g);
}

// Gradients of the rows [0, lo) of the first chunk, which the initial state holds.
void Walk::store_history_rows(const Operands& o, const ChunkGradient& g) {
  const SlotMemory& memory = p_.gradient;
  const SlotImage& image = s_.initial_gradient;
  const int64_t dk = z_.key_dim, dv = z_.value_dim;
  const int32_t type = memory.tail_layout.dtype, gate_type = memory.tail_layout.gate_dtype();
  const TailRows rows = tail_rows(shape(), memory, stands_at(image));
  int64_t at = rows.first;
  for (int part = 0; part < 2 && at < o.lo; ++part) {
    const int64_t ring = rows.ring[part], count = rows.count[part];
    if (count == 0) continue;
    if (!split_.shared()) simd_.narrow(memory.tail_k(image.tail, group_, ring), type, g.k + at * dk, count * dk);
    simd_.narrow(memory.tail_v(image.tail, head_, ring), type, g.v + at * dv, count * dv);
    simd_.narrow(memory.tail_gate(image.tail, head_, ring), gate_type, g.gate + at, count);
    simd_.narrow(memory.tail_write(image.tail, head_, ring), gate_type, g.write + at, count);
    at += count;
  }
}

void Walk::store_initial() {
  if (!wants_initial_ || !p_.gradient.nodes.base) return;
  for (int b = 0; b < kNodes; ++b) {
    const int32_t id = s_.initial_gradient.node[b];
    if (id < 0 || !keeps_node(z_, b)) continue;
    float* content = gradient_[b].content;
    if (!content) {
      content = take();
      std::fill(content, content + z_.node, 0.0f);
    }
    store_node(simd_, p_.gradient, id, head_, content, gradient_[b].log_decay);
    free(content);
  }
}

void Walk::run(int64_t part, int64_t i, bool opens) {
  head_ = split_.head(shape(), group_, i);
  part_ = part;
  opens_ = opens;
  owns_keys_ = i == 0;
  sweep_forward();
  load_final();
  int64_t chunks = chunk_count(s_, z_.grain);
  if (s_.rows == 0 && s_.position % z_.grain > 0 && wants_initial_) chunks = 1;  // the final state's rows pass through
  for (int64_t n = chunks - 1; n >= 0; --n) go_back(first_ + n);
  store_initial();
}

// Sums the parts of rows [first, last), from the start of the sequence's first chunk, of one group.
void sum_parts(const Simd& simd, const MixerBackward& p, const Split& split, int64_t order, int64_t group, int64_t first,
               int64_t last, float* sum) {
  const MixerShape& shape = p.shape;
  const Sequence& s = p.batch.sequences[order];
  const int64_t dk = shape.key_dim, lo = s.position % shape.grain;
  const auto total = [&](const auto& rows_of) {
    std::memcpy(sum, rows_of(0), static_cast<size_t>(dk) * sizeof(float));
    for (int64_t part = 1; part < split.parts; ++part) simd.add_scaled(sum, rows_of(part), 1, dk);
  };
  const bool initial = s.initial_gradient.tail >= 0 && p.gradient.tails.base;
  const Sequence start = stands_at(s.initial_gradient);
  const TailRows held = initial && lo > 0 ? tail_rows(shape, p.gradient, start) : TailRows();
  for (int64_t i = first; i < last; ++i) {
    const auto key = [&](int64_t part) { return split.k_rows(shape, part, group, s, order, i); };
    const int64_t row = s.row_begin + i - lo;
    if (i < lo) {
      if (!initial || i < held.first) continue;
      total(key);
      const int64_t n = i - held.first;
      const int64_t ring = n < held.count[0] ? held.ring[0] + n : held.ring[1] + n - held.count[0];
      simd.narrow(p.gradient.tail_k(s.initial_gradient.tail, group, ring), p.gradient.tail_layout.dtype, sum, dk);
      continue;
    }
    if (p.dk.present()) {
      total(key);
      write_rows(simd, p.dk, s, row, 1, group, dk, sum, dk);
    }
    if (p.dq.present()) {
      total([&](int64_t part) { return split.q_rows(shape, part, group, row); });
      write_rows(simd, p.dq, s, row, 1, group, dk, sum, dk);
    }
  }
}

}  // namespace

bool accepts_backward(const MixerBackward& p) {
  const View* const views[] = {&p.q,  &p.k,  &p.v,  &p.gate,  &p.write,  &p.lambda, &p.dy,
                               &p.dq, &p.dk, &p.dv, &p.dgate, &p.dwrite, &p.dlambda};
  for (const View* view : views) {
    if (!is_mixer_dtype(*view)) return false;
  }
  return p.shape.mixer == LLA_SCALAR_GATE && p.state.node_layout.dtype != LLA_F64 && p.state.tail_layout.dtype != LLA_F64 &&
         p.gradient.node_layout.dtype != LLA_F64 && p.gradient.tail_layout.dtype != LLA_F64;
}

void measure_backward(const MixerBackward& p, const Limits& limits, Need* need) {
  Carver shared(nullptr), thread(nullptr);
  Split split(p.shape);
  split.carve(p.shape, limits, &shared);
  Buffers buffers;
  buffers.carve(Sizes(p.shape), limits, &thread);
  const bool overflow = shared.bytes() < 0 || thread.bytes() < 0;
  need->shared = overflow ? -1 : shared.bytes();
  need->per_thread = overflow ? 0 : thread.bytes();
}

int32_t phases_backward(const MixerBackward& p) { return p.shape.heads > p.shape.groups ? 2 : 1; }

int64_t tasks_backward(const MixerBackward& p, int32_t phase) {
  const Split split(p.shape);
  return p.batch.count * split.groups * (phase == 0 ? split.parts : kSumSplits);
}

void run_backward(const Simd& simd, const MixerBackward& p, const Limits& limits, const Scratch& scratch, int32_t phase,
                  int64_t task) {
  Split split(p.shape);
  Carver shared(scratch.shared), thread(scratch.thread);
  split.carve(p.shape, limits, &shared);
  Buffers buffers;
  buffers.carve(Sizes(p.shape), limits, &thread);
  const int64_t pieces = phase == 0 ? split.parts : kSumSplits;
  const int64_t piece = task % pieces, group = task / pieces % split.groups, order = task / pieces / split.groups;
  const Sequence& s = p.batch.sequences[order];
  if (s.padding) return;
  if (phase == 0) {
    Walk walk(simd, p, s, order, group, split, buffers);
    const int64_t first = piece * split.per_group / pieces, last = (piece + 1) * split.per_group / pieces;
    for (int64_t i = first; i < last; ++i) walk.run(piece, i, i == first);
  } else {
    const int64_t rows = s.position % p.shape.grain + s.rows;
    sum_parts(simd, p, split, order, group, piece * rows / pieces, (piece + 1) * rows / pieces, buffers.q);
  }
}

}  // namespace lla::cpu::scalar_gate
