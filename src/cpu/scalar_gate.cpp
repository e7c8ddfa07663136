// SPDX-License-Identifier: Apache-2.0
// Shared parts of the scalar gate's kernels: operands, decay factors, reading and folding of nodes.
#include "cpu/scalar_gate.h"

#include <algorithm>
#include <cstring>

#include "core/contract.h"

namespace lla::cpu::scalar_gate {

namespace {

// One of k and v: tail rows, then rows of the call.
void load_rows(const Simd& simd, const MixerInputs& in, const Sequence& s, int64_t head, bool is_key, bool whole, int64_t lo,
               int64_t hi, int64_t row, float* buffer, Rows* out) {
  const MixerShape& shape = *in.shape;
  const View& view = is_key ? *in.k : *in.v;
  const int64_t dim = is_key ? shape.key_dim : shape.value_dim, column = is_key ? shape.group_of(head) : head;
  out->parts = 0;
  if (!buffer) return;
  if (lo > 0) {
    const TailRows tail = tail_rows(shape, *in.state, s);
    if (whole || in.state->tail_layout.dtype != LLA_F32) {
      gather_tail(simd, shape, *in.state, s, head, tail, is_key ? buffer : nullptr, is_key ? nullptr : buffer, nullptr,
                  nullptr);
      const int64_t first = whole ? 0 : tail.first;
      out->add(first, lo, buffer + first * dim, dim);
    } else {
      int64_t at = tail.first;
      for (int i = 0; i < 2; ++i) {
        const char* data = tail.count[i] == 0 ? nullptr
                           : is_key           ? in.state->tail_k(s.history.tail, column, tail.ring[i])
                                              : in.state->tail_v(s.history.tail, column, tail.ring[i]);
        out->add(at, at + tail.count[i], reinterpret_cast<const float*>(data), dim);
        at += tail.count[i];
      }
    }
  }
  if (is_run(view, hi - lo, dim) && (lo == 0 || !whole)) {
    out->add(lo, hi, static_cast<const float*>(view.at(s.index, row, column)), dim);
  } else {
    gather_view(simd, view, s, row, hi - lo, column, dim, buffer + lo * dim);
    out->add(lo, hi, buffer + lo * dim, dim);
  }
}

}  // namespace

void Rows::add(int64_t first, int64_t last, const float* data, int64_t dim) {
  if (first >= last) return;
  if (parts > 0 && part[parts - 1].data + (first - part[parts - 1].first) * dim == data) {
    part[parts - 1].last = last;
    return;
  }
  part[parts++] = Part{first, last, data};
}

void OperandBuffers::carve(const Sizes& z, Carver* carver) {
  q = carver->floats(times(z.grain, z.key_dim));
  k = carver->floats(times(z.grain, z.key_dim));
  v = carver->floats(times(z.grain, z.value_dim));
  lambda = carver->floats(times(z.grain, z.levels));
  gate = carver->floats(z.grain);
  write = carver->floats(z.grain);
}

void load_keys(const Simd& simd, const MixerInputs& in, const Sequence& s, int64_t head, int64_t index, bool whole,
               const OperandBuffers& buffers, Operands* o) {
  const MixerShape& shape = *in.shape;
  const int64_t start = index * shape.grain;
  o->index = index;
  o->lo = std::max<int64_t>(0, s.position - start);
  o->hi = std::min(shape.grain, s.position + s.rows - start);
  o->row = s.row_begin + start + o->lo - s.position;
  o->q = rows_of(simd, *in.q, s, o->row, o->hi - o->lo, shape.group_of(head), shape.key_dim, buffers.q);
  load_rows(simd, in, s, head, true, whole, o->lo, o->hi, o->row, buffers.k, &o->k);
}

void load_operands(const Simd& simd, const MixerInputs& in, const Sequence& s, int64_t head, int64_t index, bool whole,
                   const OperandBuffers& buffers, Operands* o) {
  const MixerShape& shape = *in.shape;
  load_keys(simd, in, s, head, index, whole, buffers, o);
  const int64_t lo = o->lo, hi = o->hi, rows = hi - lo;
  o->lambda = nullptr;
  if (shape.levels > 0) o->lambda = rows_of(simd, *in.lambda, s, o->row, rows, head, shape.levels, buffers.lambda);
  load_rows(simd, in, s, head, false, whole, lo, hi, o->row, buffers.v, &o->v);
  o->gate = buffers.gate;
  o->write = buffers.write;
  if (lo > 0) {
    gather_tail(simd, shape, *in.state, s, head, tail_rows(shape, *in.state, s), nullptr, nullptr, o->gate, o->write);
  }
  gather_scalars(*in.gate, s, o->row, rows, head, 0.0f, o->gate + lo);
  gather_scalars(*in.write, s, o->row, rows, head, 1.0f, o->write + lo);
}

void products_of_rows(const Simd& simd, const Operands& o, int64_t dk, int64_t t0, int64_t t1, float* out, int64_t ldo) {
  for (int n = 0; n < o.k.parts; ++n) {
    const Rows::Part& part = o.k.part[n];
    const int64_t columns = std::min(part.last, t1) - part.first;
    if (columns <= 0) continue;
    simd.dot_product(t1 - t0, columns, dk, o.q + (t0 - o.lo) * dk, dk, part.data, dk, out + part.first, ldo, false);
  }
}

void Factors::carve(const Sizes& z, Carver* carver) {
  table = carver->floats(times(z.log2_grain + 1, z.grain));
  prefix = carver->floats(z.grain);
  suffix = carver->floats(z.grain);
  key = carver->floats(z.grain);
}

void fill_factors(const Simd& simd, const Sizes& z, const float* gate, int64_t lo, int64_t hi, Factors* f) {
  const int64_t c = z.grain;
  for (int l = 1; l <= z.log2_grain; ++l) {
    const int64_t half = int64_t{1} << (l - 1), begin = lo >> l << l;
    float* row = f->table + l * c;
    int64_t end = begin;
    // Pairs of halves with queries in the right one.
    for (int64_t x = begin; x + half < hi; x += 2 * half) {
      const int64_t middle = x + half;
      end = std::min(x + 2 * half, hi);
      row[middle - 1] = 0;
      for (int64_t s = middle - 2; s >= x; --s) row[s] = row[s + 1] + gate[s + 1];
      row[middle] = gate[middle];
      for (int64_t t = middle + 1; t < end; ++t) row[t] = row[t - 1] + gate[t];
    }
    if (end > begin) simd.exp(row + begin, row + begin, end - begin);
  }
  float sum = 0;
  for (int64_t t = 0; t < hi; ++t) f->prefix[t] = sum += gate[t];
  simd.exp(f->prefix + lo, f->prefix + lo, hi - lo);
}

void fill_suffix(const Simd& simd, const Sizes& z, const float* gate, Factors* f) {
  const int64_t c = z.grain;
  f->total = 0;
  for (int64_t t = 0; t < c; ++t) f->total += gate[t];
  f->suffix[c - 1] = 0;
  for (int64_t s = c - 2; s >= 0; --s) f->suffix[s] = f->suffix[s + 1] + gate[s + 1];
  simd.exp(f->suffix, f->suffix, c);
}

namespace {

void copy_keys(const Factors& f, int64_t grain, int level, int64_t begin, int64_t end, const float* write) {
  const float* from = f.table + level * grain;
  if (write) {
    for (int64_t s = begin; s < end; ++s) f.key[s] = from[s] * write[s];
  } else {
    for (int64_t s = begin; s < end; ++s) f.key[s] = from[s];
  }
}

}  // namespace

void first_keys(const Factors& f, int64_t grain, int64_t t, const float* write) {
  for (int l = 1; int64_t{1} << (l - 1) <= t; ++l) {
    if (!(t >> (l - 1) & 1)) continue;
    const int64_t x = t >> l << l;
    copy_keys(f, grain, l, x, x + (int64_t{1} << (l - 1)), write);
  }
  f.key[t] = write ? write[t] : 1;
}

void next_keys(const Factors& f, int64_t grain, int64_t t, const float* write) {
  // From t - 1 to t the buckets of the trailing ones merge into one; older ones stay.
  LLA_CONTRACT(t > 0);
  const int level = std::countr_zero(static_cast<uint64_t>(t)) + 1;
  copy_keys(f, grain, level, t - (int64_t{1} << (level - 1)), t, write);
  f.key[t] = write ? write[t] : 1;
}

int64_t Nodes::buffers(const Sizes& z, int64_t length) {
  if (z.levels > 0 && !z.absorb) length = std::min(length, length_allowed(z.levels));
  const int64_t apart = std::min<int64_t>(z.separate, bit_length(std::max<int64_t>(0, length) >> z.log2_grain));
  return apart + 2;  // the absorbed one, and the new one
}

void Nodes::load(const Simd& simd, const Sizes& z, const SlotMemory& memory, const SlotImage& image, int64_t head) {
  if (image.tail < 0 || !memory.nodes.base) return;
  for (int b = 0; b < kNodes; ++b) {
    if (!keeps_node(z, b) || image.node[b] < 0) continue;
    // Nothing was absorbed yet: the block is zero, and its λ column is not to be read. (An imported linear state is older
    // than any chunk.)
    if (b == kAbsorbed && z.separate > 0 && (image.position / z.grain) >> z.separate == 0) continue;
    Node& n = node[b];
    if (memory.node_layout.dtype == LLA_F32) {
      n.content = reinterpret_cast<const float*>(memory.node(image.node[b], head));
      load_node(simd, memory, image.node[b], head, nullptr, &n.log_decay);
    } else {
      n.buffer = take();
      float* content = pool + n.buffer * z.node;
      load_node(simd, memory, image.node[b], head, content, &n.log_decay);
      n.content = content;
    }
  }
}

int Nodes::take() {
  const int buffer = std::countr_one(used);
  used |= uint64_t{1} << buffer;
  return buffer;
}

void Nodes::free(int b) {
  if (node[b].buffer >= 0) used &= ~(uint64_t{1} << node[b].buffer);
  node[b] = Node();
}

void list_reads(const Simd& simd, const MixerShape& shape, const Sizes& z, const Node* nodes, uint64_t also, Reads* reads) {
  float newer = 0;
  reads->count = 0;
  const auto add = [&](int b) {
    if (!nodes[b].content && !(also >> b & 1)) return;
    const int i = reads->count++;
    reads->level[i] = b;
    reads->content[i] = nodes[b].content;
    reads->column[i] = column_of_node(shape, b);
    reads->factor[i] = newer;
    newer += nodes[b].log_decay;
  };
  for (int b = 0; b < z.separate; ++b) add(b);
  if (z.separate < kNodeLevels) add(kAbsorbed);
  simd.exp(reads->factor, reads->factor, reads->count);
}

void fold_chunk(const Simd& simd, const Sizes& z, const SlotMemory& state, const Operands& o, const Factors& f,
                float* scaled, float* content, int buffer, Nodes* nodes) {
  const int64_t dk = z.key_dim, dv = z.value_dim;
  bool any = false;
  for (int i = 0; i < o.v.parts; ++i) {
    const Rows::Part& part = o.v.part[i];
    const int64_t first = part.first;
    for (int64_t s = first; s < part.last; ++s) f.key[s] = f.suffix[s] * o.write[s];
    simd.scale_rows(part.last - first, scaled + first * dv, part.data, f.key + first, dv);
  }
  for (int i = 0; i < o.k.parts; ++i) {
    const Rows::Part& part = o.k.part[i];
    simd.outer_product(dk, dv, part.last - part.first, part.data, 1, dk, scaled + part.first * dv, dv, content, dv, any);
    any = true;
  }
  join_nodes(simd, z, state, o, f, content, buffer, nodes);
}

void join_nodes(const Simd& simd, const Sizes& z, const SlotMemory& state, const Operands& o, const Factors& f,
                float* content, int buffer, Nodes* nodes) {
  // The chunk is the newest part; older nodes decay over all that is newer than they are.
  const int created = created_node(z, o.index);
  float log_decay = f.total;
  const auto swallow = [&](int b) {
    if (!nodes->node[b].content) return;  // an empty past
    float decay = log_decay;
    simd.exp(&decay, &decay, 1);
    simd.add_scaled(content, nodes->node[b].content, decay, z.node);
    log_decay += nodes->node[b].log_decay;
    nodes->free(b);
  };
  const int ones = std::min(trailing_ones(o.index), z.separate);
  for (int b = 0; b < ones; ++b) swallow(b);
  if (created == kAbsorbed) swallow(kAbsorbed);
  round_node(simd, state, content);
  nodes->node[created] = Node{content, log_decay, buffer};
}

void Products::carve(const MixerShape& shape, const Limits& limits, bool on_tiles, Carver* carver) {
  if (!shares_products(shape)) return;
  rows = limits.rows;
  data = carver->floats(times(shape.groups, times(rows, shape.grain)));
  if (!on_tiles) return;
  key_rows = reinterpret_cast<uint16_t*>(carver->floats(times(shape.groups, times(rows, shape.key_dim / 2))));
}

void fill_chunk_products(const Simd& simd, const MixerInputs& in, const Sequence& s, int64_t group, int64_t index,
                         const OperandBuffers& buffers, const Products& products) {
  const MixerShape& shape = *in.shape;
  const int64_t c = shape.grain, dk = shape.key_dim;
  Operands o;
  load_keys(simd, in, s, head_of(shape, group, 0), index, false, buffers, &o);
  for (int64_t t0 = o.lo; t0 < o.hi; t0 += kTriangleBlock) {
    const int64_t t1 = std::min(t0 + kTriangleBlock, o.hi);
    float* rows = products.row(shape, group, o.row + t0 - o.lo);
    products_of_rows(simd, o, dk, t0, t1, rows, c);
    for (int64_t t = t0; t < t1; ++t) std::fill_n(rows + (t - t0) * c, o.k.part[0].first, 0.0f);
  }
}

void fill_products(const Simd& simd, const MixerInputs& in, const Sequence& s, int64_t group, int64_t split,
                   const OperandBuffers& buffers, const Products& products) {
  for_chunks_of_split(s, in.shape->grain, split,
                      [&](int64_t index) { fill_chunk_products(simd, in, s, group, index, buffers, products); });
}

int64_t saved_span(const MixerShape& shape) {
  const int64_t node = Sizes(shape).node_span(), blocks = std::max(shape.grain, kTriangleBlock);
  int64_t span = node;
  if (!keeps_products(shape) || node < 0) return span;
  return __builtin_add_overflow(node, kept_products(blocks), &span) ? -1 : span;
}

int64_t saved_bytes(const MixerShape& shape, const Limits& limits) {
  int64_t slots = 0;
  const int64_t extra = times(2, limits.sequences);
  if (extra < 0 || limits.rows < 0 || __builtin_add_overflow(limits.rows / shape.grain, extra, &slots)) return -1;
  return times(times(times(slots, shape.heads), saved_span(shape)), 4);
}

}  // namespace lla::cpu::scalar_gate
