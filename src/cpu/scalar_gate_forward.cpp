// SPDX-License-Identifier: Apache-2.0
// Forward of the scalar gate: a task walks the chunks of one head of one sequence (docs/mathematics.md).
#include <algorithm>
#include <cstring>

#include "cpu/scalar_gate.h"
#include "cpu/scalar_gate_tiles.h"

namespace lla::cpu::scalar_gate {

namespace {

constexpr int64_t kFewRows = 8;   // of a sequence: too few for a phase of their own for the products that heads share
constexpr int64_t kFewHeads = 4;  // of a group, to which a task hands the products of few rows

struct Buffers {
  OperandBuffers operands;
  Factors factors;
  float* weights = nullptr;     // [row block][C]: q.k, then times decay and λ
  float* scaled = nullptr;      // [C][dv]
  float* row_weight = nullptr;  // [row block]: of one node
  float* y = nullptr;           // [row block][dv]
  float* few = nullptr;         // [kFewRows][C]: q.k that heads share
  float* pool = nullptr;
  TileBuffers tiles;

  void carve(const MixerShape& shape, const Limits& limits, bool on_tiles, Carver* carver) {
    const Sizes z(shape);
    operands.carve(z, carver);
    factors.carve(z, carver);
    weights = carver->floats(times(z.row_block(), z.grain));
    scaled = carver->floats(times(z.grain, z.value_dim));
    row_weight = carver->floats(z.row_block());
    y = carver->floats(times(z.row_block(), z.value_dim));
    if (shares_products(shape)) few = carver->floats(times(kFewRows, z.grain));
    pool = carver->floats(times(Nodes::buffers(z, longest(limits)), z.node));
    if (on_tiles) tiles.carve(z, Nodes::buffers(z, longest(limits)), carver);
  }
};

// A small chunk: row t of q K^T, `from`, becomes the row of weights `to`. `key` holds the key-side factors.
void weigh_row(const MixerShape& shape, const Factors& f, int64_t t, const float* lambda, float scale, const float* from,
               float* to) {
  const int64_t c = shape.grain;
  to[t] = from[t] * f.key[t] * (lambda ? scale * lambda[0] : scale);
  for (int l = 1; int64_t{1} << (l - 1) <= t; ++l) {
    if (!(t >> (l - 1) & 1)) continue;
    const int64_t begin = t >> l << l, end = begin + (int64_t{1} << (l - 1));
    float factor = f.table[l * c + t] * scale;
    if (lambda) factor *= lambda[shape.column(l)];
    for (int64_t s = begin; s < end; ++s) to[s] = from[s] * f.key[s] * factor;
  }
}

// Rows [i0, i1) of the weights from their q.k, `from`, which may be `rows`; zeros above the diagonal.
void weigh_rows(const Simd& simd, const MixerShape& shape, const Sizes& z, const Operands& o, const Factors& factors,
                int64_t i0, int64_t i1, const float* from, float* rows) {
  const int64_t c = z.grain;
  const float scale = static_cast<float>(shape.scale);
  if (c % kWeightsGrain == 0) {
    ChunkWeights w;
    w.grain = c;
    w.table = factors.table;
    w.write = o.write;
    w.key = factors.key;
    w.scale = scale;
    w.lambda = o.lambda ? o.lambda + (i0 - o.lo) * z.levels : nullptr;
    w.lambda_stride = w.columns = z.levels;
    return simd.weigh_rows(w, i0, i1, from, rows);
  }
  for (int64_t t = i0; t < i1; ++t) {
    if (t == o.lo)
      first_keys(factors, c, t, o.write);
    else
      next_keys(factors, c, t, o.write);
    float* row = rows + (t - i0) * c;
    const float* lambda = o.lambda ? o.lambda + (t - o.lo) * z.levels : nullptr;
    weigh_row(shape, factors, t, lambda, scale, from + (t - i0) * c, row);
    std::fill(row + t + 1, row + i1, 0.0f);
  }
}

// What the rows [t0, t1) read node `n` with.
void weigh_reads(const MixerShape& shape, const Sizes& z, const Operands& o, const Factors& factors, const Reads& reads,
                 int n, int64_t t0, int64_t t1, float* out) {
  const float scale = static_cast<float>(shape.scale);
  for (int64_t t = t0; t < t1; ++t) {
    float weight = factors.prefix[t] * reads.factor[n] * scale;
    if (o.lambda) weight *= o.lambda[(t - o.lo) * z.levels + reads.column[n]];
    out[t - t0] = weight;
  }
}

// Local rows [t0, t1) of the chunk: what they read of the chunk itself and of the nodes. `products` [t1 - t0][C]: q.k if
// they are there already. `kept`: where q.k is left for backward, or null.
void forward_rows(const Simd& simd, const MixerShape& shape, const Sizes& z, const Operands& o, const Reads& reads,
                  const float* products, float* kept, int64_t t0, int64_t t1, const Buffers& b, float* y, int64_t ldy) {
  const int64_t c = z.grain, dk = z.key_dim, dv = z.value_dim;
  const float* q = o.q + (t0 - o.lo) * dk;
  for (int64_t i0 = t0; i0 < t1; i0 += kTriangleBlock) {
    const int64_t i1 = std::min(i0 + kTriangleBlock, t1), rows = i1 - i0;
    float* weights = b.weights + (i0 - t0) * c;
    if (!products) products_of_rows(simd, o, dk, i0, i1, weights, c);
    for (int64_t i = 0; kept && i < rows; ++i) {
      std::memcpy(kept + kept_products(i0) + i * i1, weights + i * c, static_cast<size_t>(i1) * sizeof(float));
    }
    weigh_rows(simd, shape, z, o, b.factors, i0, i1, products ? products + (i0 - t0) * c : weights, weights);
    float* out = y + (i0 - t0) * ldy;
    bool any = false;
    for (int n = 0; n < o.v.parts; ++n) {
      const Rows::Part& part = o.v.part[n];
      const int64_t last = std::min(part.last, i1);
      if (part.first >= last) continue;
      simd.outer_product(rows, dv, last - part.first, weights + part.first, c, 1, part.data, dv, out, ldy, any);
      any = true;
    }
  }
  for (int n = 0; n < reads.count; ++n) {
    weigh_reads(shape, z, o, b.factors, reads, n, t0, t1, b.row_weight);
    simd.outer_product_scaled(t1 - t0, dv, dk, q, dk, reads.content[n], dv, y, ldy, b.row_weight);
  }
}

// A whole chunk on tiles.
void forward_chunk(const Simd& simd, const Tiles& tiles, const MixerForward& p, const Sizes& z, const Sequence& s,
                   int64_t head, const Operands& o, const Reads& reads, const float* products, Buffers* b) {
  const int64_t c = z.grain, dv = z.value_dim;
  load_tiles(tiles, p, z, s, head, o.row, &b->tiles);
  if (!products) {
    load_tile_keys(simd, p, z, s, head, o.row, &b->tiles);
    tile_products(tiles, z, b->tiles, b->weights);
    products = b->weights;
  }
  weigh_rows(simd, p.shape, z, o, b->factors, 0, c, products, b->weights);
  tile_values(tiles, z, b->weights, b->tiles, b->y);
  for (int n = 0; n < reads.count; ++n) {
    weigh_reads(p.shape, z, o, b->factors, reads, n, 0, c, b->row_weight);
    tile_read(tiles, z, reads, n, &b->tiles, b->scaled);
    simd.add_scaled_rows(c, b->y, b->scaled, b->row_weight, dv);
  }
}

// Stores the nodes that are to stand in blocks at this position.
void store_nodes(const Simd& simd, const Sizes& z, const SlotMemory& state, const NodesToStore& store, const Nodes& nodes,
                 int64_t head) {
  for (int b = 0; b < kNodes; ++b) {
    if (!keeps_node(z, b) || store.node[b] < 0 || !(store.write >> b & 1)) continue;
    const Node& node = nodes.node[b];
    if (node.content) {
      store_node(simd, state, store.node[b], head, node.content, node.log_decay);
    } else {
      std::memset(state.node(store.node[b], head), 0, static_cast<size_t>(state.node_layout.head_bytes()));
    }
  }
}

}  // namespace

bool accepts_forward(const MixerForward& p) {
  return p.shape.mixer == LLA_SCALAR_GATE && is_mixer_dtype(p.q) && is_mixer_dtype(p.k) && is_mixer_dtype(p.v) &&
         is_mixer_dtype(p.gate) && is_mixer_dtype(p.write) && is_mixer_dtype(p.lambda) && is_mixer_dtype(p.y) &&
         p.state.node_layout.dtype != LLA_F64 && p.state.tail_layout.dtype != LLA_F64;
}

namespace {

// Tasks of a group of heads. Their number makes no difference to bits.
int64_t parts_of_group(const MixerForward& p) {
  const int64_t share = p.shape.heads / p.shape.groups;
  return shares_products(p.shape) && phases_forward(p) == 1 ? (share + kFewHeads - 1) / kFewHeads : share;
}

template <class Problem>
bool fits_tiles(const Problem& p) {
  const MixerShape& s = p.shape;
  return p.q.dtype == LLA_BF16 && p.k.dtype == LLA_BF16 && p.v.dtype == LLA_BF16 && s.key_dim % kTileDepth == 0 &&
         s.value_dim % kTileRows == 0 && s.grain % kTileDepth == 0 && s.grain <= kRowBlock;
}

}  // namespace

bool accepts_tiles(const MixerForward& p) { return accepts_forward(p) && fits_tiles(p); }
bool accepts_tiles(const MixerBackward& p) { return accepts_backward(p) && fits_tiles(p); }

void measure_forward(const MixerForward& p, const Limits& limits, bool on_tiles, Need* need) {
  Carver shared(nullptr), thread(nullptr);
  Products products;
  products.carve(p.shape, limits, on_tiles, &shared);
  Buffers buffers;
  buffers.carve(p.shape, limits, on_tiles, &thread);
  const bool overflow = shared.bytes() < 0 || thread.bytes() < 0;
  need->shared = overflow ? -1 : shared.bytes();
  need->per_thread = overflow ? 0 : thread.bytes();
}

namespace {

// One head of a sequence, from chunk to chunk.
void forward_head(const Simd& simd, const Tiles* tiles, const MixerForward& p, const Sizes& z, const Sequence& s,
                  int64_t order, int64_t head, const Products& products, Buffers& b) {
  const MixerShape& shape = p.shape;
  Nodes nodes;
  nodes.pool = b.pool;
  nodes.load(simd, z, p.state, s.history, head);

  const MixerInputs inputs = inputs_of(p);
  const int64_t first = first_chunk(s, z.grain), chunks = chunk_count(s, z.grain);
  const bool direct = p.y.dtype == LLA_F32;
  if (tiles) {
    b.tiles.forget_nodes();
    tiles->begin();
  }
  const int64_t slot = p.saved ? saved_slot(shape, s, order) * shape.heads + head : 0, span = saved_span(shape);
  // Of the first chunk; null: nothing is saved.
  float* const saved = p.saved ? static_cast<float*>(p.saved) + slot * span : nullptr;
  int64_t stored = 0;
  for (int64_t i = first; i < first + chunks; ++i) {
    const bool on_tiles = tiles && is_whole(z, s, i);
    OperandBuffers buffers = b.operands;
    if (on_tiles) buffers.q = buffers.k = buffers.v = nullptr;                          // taken as they are
    if (products.data && (i + 1) * z.grain > s.position + s.rows) buffers.k = nullptr;  // no node is made of them
    Operands o;
    load_operands(simd, inputs, s, head, i, false, buffers, &o);
    prefetch_view(p.v, s, o.row + o.hi - o.lo, z.grain, head, z.value_dim);
    fill_factors(simd, z, o.gate, o.lo, o.hi, &b.factors);
    Reads reads;
    list_reads(simd, shape, z, nodes.node, 0, &reads);
    if (on_tiles) {
      prefetch_view(p.y, s, o.row, z.grain, head, z.value_dim);
      const float* common = products.row(shape, shape.group_of(head), o.row);
      forward_chunk(simd, *tiles, p, z, s, head, o, reads, common, &b);
      for (int64_t t = 0; t < z.grain; ++t) {
        simd.narrow(p.y.at(s.index, o.row + t, head), p.y.dtype, b.y + t * z.value_dim, z.value_dim);
      }
    }
    float* const slot_of_chunk = saved && o.hi == z.grain ? saved + (i - first) * shape.heads * span : nullptr;
    float* const kept =
        slot_of_chunk && keeps_products(shape) && is_whole(z, s, i) ? slot_of_chunk + z.node_span() : nullptr;
    for (int64_t t0 = on_tiles ? o.hi : o.lo; t0 < o.hi; t0 += z.row_block()) {
      const int64_t t1 = std::min(t0 + z.row_block(), o.hi), row = o.row + t0 - o.lo;
      float* y = direct ? static_cast<float*>(p.y.at(s.index, row, head)) : b.y;
      forward_rows(simd, shape, z, o, reads, products.row(shape, shape.group_of(head), row), kept, t0, t1, b, y,
                   direct ? p.y.row_stride : z.value_dim);
      if (direct) continue;
      for (int64_t t = 0; t < t1 - t0; ++t) {
        simd.narrow(p.y.at(s.index, row + t, head), p.y.dtype, b.y + t * z.value_dim, z.value_dim);
      }
    }
    if (o.hi < z.grain) break;
    int buffer = -1;
    float* content = slot_of_chunk;
    if (!content) {
      buffer = nodes.take();
      content = b.pool + buffer * z.node;
    }
    fill_suffix(simd, z, o.gate, &b.factors);
    if (on_tiles) {
      const uint16_t* key_rows = products.keys(shape, shape.group_of(head), o.row);
      if (!key_rows) {
        transpose_keys(simd, *tiles, inputs, z, s, head, o.row, b.tiles.fold, b.tiles.fold.key_rows);
        key_rows = b.tiles.fold.key_rows;
      }
      tile_content(*tiles, inputs, z, s, head, o, b.factors, key_rows, b.tiles.fold, content);
      join_nodes(simd, z, p.state, o, b.factors, content, buffer, &nodes);
    } else {
      fold_chunk(simd, z, p.state, o, b.factors, b.scaled, content, buffer, &nodes);
    }
    b.tiles.packed[created_node(z, i)] = nullptr;  // its memory may have been another node's
    if (slot_of_chunk) content[z.node] = nodes.node[created_node(z, i)].log_decay;
    while (stored < s.nodes_to_store_count && s.nodes_to_store[stored].position <= (i + 1) * z.grain) {
      store_nodes(simd, z, p.state, s.nodes_to_store[stored++], nodes, head);
    }
  }
  if (tiles) tiles->end();
  store_tail(simd, p, s, head);
}

// Part `split` of what the heads of a group share, on tiles where that can be.
void share_products(const Simd& simd, const Tiles* tiles, const MixerForward& p, const Sizes& z, const Sequence& s,
                    int64_t group, int64_t split, const Products& products, Buffers* b) {
  const MixerInputs inputs = inputs_of(p);
  if (!tiles) return fill_products(simd, inputs, s, group, split, b->operands, products);
  const int64_t head = head_of(p.shape, group, 0);
  tiles->begin();
  for_chunks_of_split(s, z.grain, split, [&](int64_t index) {
    if (!is_whole(z, s, index)) return fill_chunk_products(simd, inputs, s, group, index, b->operands, products);
    const int64_t row = s.row_begin + index * z.grain - s.position;
    load_tile_keys(simd, p, z, s, head, row, &b->tiles);
    tile_products(*tiles, z, b->tiles, products.row(p.shape, group, row));
    transpose_keys(simd, *tiles, inputs, z, s, head, row, b->tiles.fold, products.keys(p.shape, group, row));
  });
  tiles->end();
}

}  // namespace

int32_t phases_forward(const MixerForward& p) {
  return shares_products(p.shape) && p.batch.total_rows >= kFewRows * p.batch.count ? 2 : 1;
}

int64_t tasks_forward(const MixerForward& p, int32_t phase) {
  const MixerShape& shape = p.shape;
  const bool first = phases_forward(p) == 2 && phase == 0;
  return p.batch.count * shape.groups * (first ? kSplits : parts_of_group(p));
}

void run_forward(const Simd& simd, const Tiles* tiles, const MixerForward& p, const Limits& limits, const Scratch& scratch,
                 int32_t phase, int64_t task) {
  const MixerShape& shape = p.shape;
  const Sizes z(shape);
  Buffers b;
  Products products;
  Carver shared(scratch.shared), thread(scratch.thread);
  b.carve(shape, limits, tiles, &thread);
  const bool in_two = phases_forward(p) == 2;
  if (in_two) products.carve(shape, limits, tiles, &shared);
  const int64_t pieces = in_two && phase == 0 ? kSplits : parts_of_group(p);
  const int64_t piece = task % pieces, group = task / pieces % shape.groups, order = task / pieces / shape.groups;
  const Sequence& s = p.batch.sequences[order];
  if (s.padding) return;
  if (in_two && phase == 0) {
    share_products(simd, tiles, p, z, s, group, piece, products, &b);
    return;
  }
  const int64_t share = shape.heads / shape.groups, first = piece * share / pieces, last = (piece + 1) * share / pieces;
  if (!in_two && last - first > 1 && s.rows <= kFewRows) {
    products.data = b.few;
    products.first = s.row_begin;
    for (int64_t split = 0; split < kSplits; ++split) {
      fill_products(simd, inputs_of(p), s, group, split, b.operands, products);
    }
  }
  for (int64_t i = first; i < last; ++i) forward_head(simd, tiles, p, z, s, order, head_of(shape, group, i), products, b);
}

}  // namespace lla::cpu::scalar_gate
