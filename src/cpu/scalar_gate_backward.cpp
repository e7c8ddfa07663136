// SPDX-License-Identifier: Apache-2.0
// Backward of the scalar gate. A task takes some heads of one group of one sequence and walks their chunks backwards. If
// heads share a group, a phase before computes their common products q.k, and a phase after sums the tasks' parts of the
// gradients of q, k and q.k in a fixed order.
#include <algorithm>
#include <cstring>

#include "cpu/scalar_gate.h"
#include "cpu/scalar_gate_gradient.h"
#include "cpu/scalar_gate_tiles.h"

namespace lla::cpu::scalar_gate {

namespace {

constexpr int64_t kMostParts = 8;  // tasks into which a group's heads are split

// How the heads of a group are spread over tasks, and the partial sums in shared scratch.
struct Split {
  explicit Split(const MixerShape& shape)
      : per_group(shape.heads / shape.groups), parts(std::min(per_group, kMostParts)), groups(shape.groups) {}
  int64_t per_group, parts, groups;
  int64_t rows = 0, key_rows = 0;  // of a partial sum
  float *dq = nullptr, *dk = nullptr, *dproducts = nullptr;
  Products products;

  bool shared() const { return per_group > 1; }
  void carve(const MixerShape& shape, const Limits& limits, Carver* carver) {
    if (!shared()) return;
    rows = limits.rows;
    const int64_t history = times(limits.sequences, shape.grain);
    if (history < 0 || __builtin_add_overflow(rows, history, &key_rows)) key_rows = -1;
    const int64_t copies = times(parts, times(groups, shape.key_dim));
    dq = carver->floats(times(copies, rows));
    dk = carver->floats(times(copies, key_rows));
    if (!shares_products(shape)) return;
    products.carve(shape, limits, false, carver);
    dproducts = carver->floats(times(times(parts, groups), times(rows, shape.grain)));
  }
  float* product_rows(const MixerShape& shape, int64_t part, int64_t group, int64_t row) const {
    return dproducts + ((part * groups + group) * rows + row) * shape.grain;
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
  float* transposed = nullptr;       // nodes that are read, [dv][dk], one per index
  int64_t gradient_count = 0;
  FoldTiles fold;

  void carve(const Sizes& z, const Limits& limits, bool on_tiles, Carver* carver) {
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
    transposed = carver->floats(times(gradient_count, z.node));
    created = carver->floats(times(limits.rows_per_sequence / z.grain + 1, z.node_span()));
    if (on_tiles) fold.carve(z, carver);
  }
};

void write_rows(const Simd& simd, const View& view, const Sequence& s, int64_t row, int64_t rows, int64_t head, int64_t dim,
                const float* values, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    void* to = view.at(s.index, row + i, head);
    if (view.accumulate)
      simd.narrow_add(to, view.dtype, values + i * stride, dim);
    else
      simd.narrow(to, view.dtype, values + i * stride, dim);
  }
}

// Where those rows lie if their gradient can be made in place, else null.
float* in_place(const View& view, const Sequence& s, int64_t row, int64_t rows, int64_t head, int64_t dim) {
  const bool plain = view.present() && view.dtype == LLA_F32 && !view.accumulate;
  return plain && (view.row_stride == dim || rows == 1) ? static_cast<float*>(view.at(s.index, row, head)) : nullptr;
}

// A sequence that stands where a gradient's image stands, for the functions that read tails.
Sequence stands_at(const SlotImage& image) {
  Sequence s;
  s.position = image.position;
  s.history = image;
  return s;
}

// Calls f(ring, at, count) for the runs of tail rows of the initial state's gradient: local rows [at, at + count) of the
// first chunk.
template <class F>
void for_history_rows(const MixerBackward& p, const Sequence& s, F f) {
  const TailRows rows = tail_rows(p.shape, p.gradient, stands_at(s.initial_gradient));
  int64_t at = rows.first;
  for (int part = 0; part < 2; ++part) {
    if (rows.count[part] > 0) f(rows.ring[part], at, rows.count[part]);
    at += rows.count[part];
  }
}

void store_history_keys(const Simd& simd, const MixerBackward& p, const Sequence& s, int64_t group, const float* dk) {
  const SlotMemory& memory = p.gradient;
  const int64_t dim = p.shape.key_dim;
  for_history_rows(p, s, [&](int64_t ring, int64_t at, int64_t count) {
    simd.narrow(memory.tail_k(s.initial_gradient.tail, group, ring), memory.tail_layout.dtype, dk + at * dim, count * dim);
  });
}

bool wants_initial(const MixerBackward& p, const Sequence& s) {
  return s.initial_gradient.tail >= 0 && p.gradient.tails.base;
}

// Chunks to walk. Without rows the final state's raw rows pass through to the initial state's.
int64_t chunks_back(const MixerBackward& p, const Sequence& s) {
  if (s.rows == 0) return s.position % p.shape.grain > 0 && wants_initial(p, s) ? 1 : 0;
  return chunk_count(s, p.shape.grain);
}

// One head on its way back through the chunks.
class Walk {
 public:
  Walk(const Simd& simd, const Tiles* tiles, const MixerBackward& problem, const Sequence& s, int64_t order, int64_t group,
       const Split& split, const Buffers& buffers)
      : simd_(simd),
        tiles_(tiles),
        p_(problem),
        z_(problem.shape),
        s_(s),
        order_(order),
        group_(group),
        split_(split),
        b_(buffers),
        inputs_(inputs_of(problem)),
        first_(s.position / problem.shape.grain),
        wants_initial_(wants_initial(problem, s)) {
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
  const float* transposed(const Reads& reads, int n);
  void add_products(int64_t row, int64_t t0, int64_t t1);
  void reverse_fold(const Node* nodes, uint64_t wanted, const Operands& o, bool add_k, const ChunkGradient& g);
  void store_history_rows(const ChunkGradient& g);
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
  const Tiles* const tiles_;
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
  const float* transposed_of_[kNodes] = {};  // whose transpose Buffers::transposed holds
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
    if (b == kAbsorbed)
      end = chunks >> z_.separate << z_.separate;
    else if (chunks >> b & 1)
      end = chunks >> b << b;
    const bool imported = b == kAbsorbed && z_.levels == 0 && history_.node[b].content;  // older than any chunk
    if (end == 0 && !imported) continue;
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
    const int64_t slot = saved_slot(shape(), s_, order_) * shape().heads + head_, span = saved_span(shape());
    created_ = static_cast<const float*>(p_.saved) + slot * span;
    created_stride_ = shape().heads * span;
    return;
  }
  created_ = b_.created;
  created_stride_ = z_.node_span();
  Nodes nodes = history_;
  Factors factors = b_.factors;
  if (tiles_) tiles_->begin();
  for (int64_t i = first_; (i + 1) * z_.grain <= s_.position + s_.rows; ++i) {
    const bool on_tiles = tiles_ && is_whole(z_, s_, i);
    OperandBuffers buffers = b_.operands;
    buffers.q = nullptr;
    if (on_tiles) buffers.k = buffers.v = nullptr;
    Operands o;
    load_operands(simd_, inputs_, s_, head_, i, false, buffers, &o);
    fill_suffix(simd_, z_, o.gate, &factors);
    float* content = b_.created + (i - first_) * created_stride_;
    if (on_tiles) {
      transpose_keys(simd_, *tiles_, inputs_, z_, s_, head_, o.row, b_.fold, b_.fold.key_rows);
      tile_content(*tiles_, inputs_, z_, s_, head_, o, factors, b_.fold.key_rows, b_.fold, content);
      join_nodes(simd_, z_, p_.state, o, factors, content, -1, &nodes);
    } else {
      fold_chunk(simd_, z_, p_.state, o, factors, b_.gradient.scaled, content, -1, &nodes);
    }
    content[z_.node] = nodes.node[created_node(z_, i)].log_decay;
  }
  if (tiles_) tiles_->end();
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
void Walk::reverse_fold(const Node* nodes, uint64_t wanted, const Operands& o, bool add_k, const ChunkGradient& g) {
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
  gradient_of_content(simd_, z_, o, factors, made.content, log_decay, add_k, b_.gradient, g);
  free(made.content);
}

// The transpose of a node that is read. A node of index b is read in up to 2^b chunks one after the other.
const float* Walk::transposed(const Reads& reads, int n) {
  const int b = reads.level[n];
  const float* content = reads.content[n];
  if (!content) return nullptr;
  float* memory = b_.transposed + (b == kAbsorbed ? b_.gradient_count - 1 : b) * z_.node;
  if (transposed_of_[b] != content) simd_.transpose(z_.key_dim, z_.value_dim, content, z_.value_dim, memory, z_.key_dim);
  transposed_of_[b] = content;
  return memory;
}

// Adds the gradient of q.k of the rows [t0, t1), the first one of which is row `row` of the row axis, to the part's sum.
void Walk::add_products(int64_t row, int64_t t0, int64_t t1) {
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t end = std::min(t0 + ((t - t0) / kTriangleBlock + 1) * kTriangleBlock, t1);
    const float* x = b_.gradient.x + (t - t0) * z_.grain;
    float* sum = split_.product_rows(shape(), part_, group_, row + t - t0);
    if (opens_)
      std::memcpy(sum, x, static_cast<size_t>(end) * sizeof(float));
    else
      simd_.add_scaled(sum, x, 1, end);
  }
}

void Walk::go_back(int64_t index) {
  const int64_t c = z_.grain, dk = z_.key_dim, dv = z_.value_dim;
  Operands o;
  load_operands(simd_, inputs_, s_, head_, index, true, b_.operands, &o);
  const int64_t lo = o.lo, hi = o.hi;
  prefetch_view(p_.v, s_, o.row - c, c, head_, dv);
  prefetch_view(p_.dy, s_, o.row - c, c, head_, dv);
  ChunkGradient g = b_.chunk;
  const int64_t key_row = (index - first_) * c;
  float* const placed_k = lo == 0 && !split_.shared() ? in_place(p_.dk, s_, o.row, hi, group_, dk) : nullptr;
  float* const placed_v = lo == 0 ? in_place(p_.dv, s_, o.row, hi, head_, dv) : nullptr;
  if (placed_v) g.v = placed_v;
  g.k = !wants_k_         ? nullptr
        : split_.shared() ? split_.k_rows(shape(), part_, group_, s_, order_, key_row)
        : placed_k        ? placed_k
                          : b_.k;

  // What the final state adds to the raw rows of an incomplete chunk.
  const bool open = hi < c, final = open && s_.final_gradient.tail >= 0 && p_.gradient.tails.base;
  const bool own = !split_.shared();
  const bool overwrites_k = own && !open && gradient_[created_node(z_, index)].content;  // as the first one to write it
  if (g.k && (opens_ || own) && !overwrites_k) std::fill(g.k, g.k + hi * dk, 0.0f);
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
  if (!open) reverse_fold(nodes, wanted, o, !overwrites_k, g);

  Factors factors = b_.factors;
  fill_factors(simd_, z_, o.gate, lo, hi, &factors);
  Reads reads;
  list_reads(simd_, shape(), z_, nodes, wanted, &reads);
  float read_sum[kNodes] = {};
  simd_.transpose(hi, dv, o.v.part[0].data, dv, b_.gradient.v, c);
  const bool kept = p_.saved && keeps_products(shape()) && !tiles_ && is_whole(z_, s_, index);
  const float* const kept_rows = kept ? created_by(index).content + z_.node_span() : nullptr;
  for (int64_t t0 = lo; t0 < hi; t0 += z_.row_block()) {
    const int64_t t1 = std::min(t0 + z_.row_block(), hi), rows = t1 - t0, row = o.row + t0 - lo;
    const float* const dy = rows_of(simd_, p_.dy, s_, row, rows, head_, dv, b_.gradient.dy);
    float* const placed_q = split_.shared() ? nullptr : in_place(p_.dq, s_, row, rows, group_, dk);
    g.q = !wants_q_ ? nullptr : split_.shared() ? split_.q_rows(shape(), part_, group_, row) : placed_q ? placed_q : b_.q;
    if (g.q && opens_ && !own) std::fill(g.q, g.q + rows * dk, 0.0f);
    if (o.lambda) std::fill(g.lambda, g.lambda + rows * z_.levels, 0.0f);
    gradient_inside(simd_, shape(), z_, o, factors, split_.products.row(shape(), group_, row), kept_rows, t0, t1, dy,
                    b_.gradient, g);
    if (split_.dproducts)
      add_products(row, t0, t1);
    else
      gradient_of_products(simd_, z_, o, t0, t1, b_.gradient.x, g.q, !own, g.k);
    for (int n = 0; n < reads.count; ++n) {
      NodeGradient& target = gradient_[reads.level[n]];
      const bool into = wanted >> reads.level[n] & 1, started = target.content;
      if (into && !started) target.content = take();
      read_sum[n] += gradient_of_read(simd_, shape(), z_, o, factors, reads, n, transposed(reads, n), t0, t1, dy,
                                      into ? target.content : nullptr, started, b_.gradient, g);
    }
    if (p_.dlambda.present() && o.lambda) {
      write_rows(simd_, p_.dlambda, s_, row, rows, head_, z_.levels, g.lambda, z_.levels);
    }
    if (g.q && !split_.shared() && !placed_q) write_rows(simd_, p_.dq, s_, row, rows, group_, dk, g.q, dk);
  }
  float older = 0;  // gradient of the logs of the factors of all older nodes
  for (int n = reads.count - 1; n >= 0; --n) {
    gradient_[reads.level[n]].log_decay += older;
    older += read_sum[n];
  }
  gradient_of_factors(z_, o, g);

  const int64_t rows = hi - lo;
  if (p_.dv.present() && !placed_v) write_rows(simd_, p_.dv, s_, o.row, rows, head_, dv, g.v + lo * dv, dv);
  if (p_.dgate.present()) write_rows(simd_, p_.dgate, s_, o.row, rows, head_, 1, g.gate + lo, 1);
  if (p_.dwrite.present()) write_rows(simd_, p_.dwrite, s_, o.row, rows, head_, 1, g.write + lo, 1);
  if (p_.dk.present() && !split_.shared() && !placed_k)
    write_rows(simd_, p_.dk, s_, o.row, rows, group_, dk, g.k + lo * dk, dk);
  if (wants_initial_ && lo > 0) store_history_rows(g);
}

// Gradients of the rows of the first chunk that the initial state holds.
void Walk::store_history_rows(const ChunkGradient& g) {
  const SlotMemory& memory = p_.gradient;
  const SlotImage& image = s_.initial_gradient;
  const int32_t gate_type = memory.tail_layout.gate_dtype();
  for_history_rows(p_, s_, [&](int64_t ring, int64_t at, int64_t count) {
    simd_.narrow(memory.tail_v(image.tail, head_, ring), memory.tail_layout.dtype, g.v + at * z_.value_dim,
                 count * z_.value_dim);
    simd_.narrow(memory.tail_gate(image.tail, head_, ring), gate_type, g.gate + at, count);
    simd_.narrow(memory.tail_write(image.tail, head_, ring), gate_type, g.write + at, count);
  });
  if (!split_.shared()) store_history_keys(simd_, p_, s_, group_, g.k);
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
  head_ = head_of(shape(), group_, i);
  part_ = part;
  opens_ = opens;
  owns_keys_ = i == 0;
  std::fill(transposed_of_, transposed_of_ + kNodes, nullptr);
  sweep_forward();
  load_final();
  for (int64_t n = chunks_back(p_, s_) - 1; n >= 0; --n) go_back(first_ + n);
  store_initial();
}

// Part `piece` of kSplits of the last phase: gradients of q and k of one group from the parts' sums.
void sum_parts(const Simd& simd, const MixerBackward& p, const Split& split, const Buffers& b, int64_t order, int64_t group,
               int64_t piece) {
  const MixerShape& shape = p.shape;
  const Sizes z(shape);
  const Sequence& s = p.batch.sequences[order];
  const int64_t c = z.grain, dk = z.key_dim, chunks = chunks_back(p, s);
  const bool initial = wants_initial(p, s), wants_k = p.dk.present() || initial;
  // out = the sum over the parts of n floats each.
  const auto total = [&](float* out, int64_t n, const auto& floats_of) {
    std::memcpy(out, floats_of(0), static_cast<size_t>(n) * sizeof(float));
    for (int64_t part = 1; part < split.parts; ++part) simd.add_scaled(out, floats_of(part), 1, n);
  };
  for (int64_t i = piece * chunks / kSplits; i < (piece + 1) * chunks / kSplits; ++i) {
    Operands o;
    load_keys(simd, inputs_of(p), s, head_of(shape, group, 0), first_chunk(s, c) + i, true, b.operands, &o);
    if (wants_k) total(b.k, o.hi * dk, [&](int64_t part) { return split.k_rows(shape, part, group, s, order, i * c); });
    for (int64_t t0 = o.lo; t0 < o.hi; t0 += z.row_block()) {
      const int64_t t1 = std::min(t0 + z.row_block(), o.hi), row = o.row + t0 - o.lo;
      if (p.dq.present()) {
        total(b.q, (t1 - t0) * dk, [&](int64_t part) { return split.q_rows(shape, part, group, row); });
      }
      for (int64_t i0 = t0; split.dproducts && i0 < t1; i0 += kTriangleBlock) {
        const int64_t i1 = std::min(i0 + kTriangleBlock, t1);
        for (int64_t t = i0; t < i1; ++t) {
          total(b.gradient.x + (t - t0) * c, i1,
                [&](int64_t part) { return split.product_rows(shape, part, group, row + t - t0); });
        }
      }
      if (split.dproducts) {
        gradient_of_products(simd, z, o, t0, t1, b.gradient.x, p.dq.present() ? b.q : nullptr, true,
                             wants_k ? b.k : nullptr);
      }
      if (p.dq.present()) write_rows(simd, p.dq, s, row, t1 - t0, group, dk, b.q, dk);
    }
    if (p.dk.present()) write_rows(simd, p.dk, s, o.row, o.hi - o.lo, group, dk, b.k + o.lo * dk, dk);
    if (initial && o.lo > 0) store_history_keys(simd, p, s, group, b.k);
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

void measure_backward(const MixerBackward& p, const Limits& limits, bool on_tiles, Need* need) {
  Carver shared(nullptr), thread(nullptr);
  Split split(p.shape);
  split.carve(p.shape, limits, &shared);
  Buffers buffers;
  buffers.carve(Sizes(p.shape), limits, on_tiles, &thread);
  const bool overflow = shared.bytes() < 0 || thread.bytes() < 0;
  need->shared = overflow ? -1 : shared.bytes();
  need->per_thread = overflow ? 0 : thread.bytes();
}

int32_t phases_backward(const MixerBackward& p) { return p.shape.heads > p.shape.groups ? 3 : 1; }

int64_t tasks_backward(const MixerBackward& p, int32_t phase) {
  const Split split(p.shape);
  const bool walk = phases_backward(p) == 1 || phase == 1;
  if (phase == 0 && !walk && !shares_products(p.shape)) return 0;
  return p.batch.count * split.groups * (walk ? split.parts : kSplits);
}

void run_backward(const Simd& simd, const Tiles* tiles, const MixerBackward& p, const Limits& limits, const Scratch& scratch,
                  int32_t phase, int64_t task) {
  Split split(p.shape);
  Carver shared(scratch.shared), thread(scratch.thread);
  split.carve(p.shape, limits, &shared);
  Buffers b;
  b.carve(Sizes(p.shape), limits, tiles, &thread);
  const bool walks = phases_backward(p) == 1 || phase == 1;
  const int64_t pieces = walks ? split.parts : kSplits;
  const int64_t piece = task % pieces, group = task / pieces % split.groups, order = task / pieces / split.groups;
  const Sequence& s = p.batch.sequences[order];
  if (s.padding) return;
  if (walks) {
    Walk walk(simd, tiles, p, s, order, group, split, b);
    const int64_t first = piece * split.per_group / pieces, last = (piece + 1) * split.per_group / pieces;
    for (int64_t i = first; i < last; ++i) walk.run(piece, i, i == first);
  } else if (phase == 0) {
    fill_products(simd, inputs_of(p), s, group, piece, b.operands, split.products);
  } else {
    sum_parts(simd, p, split, b, order, group, piece);
  }
}

}  // namespace lla::cpu::scalar_gate
