// SPDX-License-Identifier: Apache-2.0
// Operands of the scalar gate's forward for matrix tiles, and its products on them.
#include "cpu/scalar_gate_tiles.h"

#include <algorithm>
#include <cstring>

namespace lla::cpu::scalar_gate {

void FoldTiles::carve(const Sizes& z, Carver* carver) {
  key_pairs = reinterpret_cast<uint32_t*>(carver->floats(times(z.grain / 2, z.key_dim)));
  key_rows = reinterpret_cast<uint16_t*>(carver->floats(times(z.grain / 2, z.key_dim)));
  scaled = reinterpret_cast<uint32_t*>(carver->floats(times(kParts, times(z.grain / 2, z.value_dim))));
}

void TileBuffers::carve(const Sizes& z, int64_t node_count, Carver* carver) {
  const int64_t c = z.grain, dk = z.key_dim, dv = z.value_dim;
  keys = reinterpret_cast<uint32_t*>(carver->floats(times(dk / 2, c)));
  values = reinterpret_cast<uint32_t*>(carver->floats(times(c / 2, dv)));
  weights = reinterpret_cast<uint16_t*>(carver->floats(times(2, times(c, c))));
  words = carver->floats(times(c, dk / 2));
  kept = node_count;
  node_words = z.node / 2;
  nodes = reinterpret_cast<uint32_t*>(carver->floats(times(node_count, times(2, z.node))));
  fold.carve(z, carver);
}

void TileBuffers::forget_nodes() { std::fill(packed, packed + kNodes, nullptr); }

void load_tiles(const Tiles& tiles, const MixerForward& p, const Sizes& z, const Sequence& s, int64_t head, int64_t row,
                TileBuffers* b) {
  const int64_t c = z.grain, dv = z.value_dim;
  b->q = static_cast<const uint16_t*>(p.q.at(s.index, row, p.shape.group_of(head)));
  b->q_stride = p.q.row_stride;
  tiles.pack(c, dv, static_cast<const uint16_t*>(p.v.at(s.index, row, head)), p.v.row_stride, b->values, c / 2 * kTileRows);
}

void load_tile_keys(const Simd& simd, const MixerForward& p, const Sizes& z, const Sequence& s, int64_t head, int64_t row,
                    TileBuffers* b) {
  const int64_t c = z.grain, dk = z.key_dim, group = p.shape.group_of(head);
  b->q = static_cast<const uint16_t*>(p.q.at(s.index, row, group));
  b->q_stride = p.q.row_stride;
  // Two numbers that lie side by side in k are one word, and the words only have to be transposed.
  for (int64_t t = 0; t < c; ++t) {
    std::memcpy(b->words + t * dk / 2, p.k.at(s.index, row + t, group), static_cast<size_t>(dk) * 2);
  }
  for (int64_t j = 0; j < c; j += kTileRows) {
    simd.transpose(kTileRows, dk / 2, b->words + j * dk / 2, dk / 2, reinterpret_cast<float*>(b->keys + j * dk / 2),
                   kTileRows);
  }
}

void transpose_keys(const Simd& simd, const Tiles& tiles, const MixerInputs& in, const Sizes& z, const Sequence& s,
                    int64_t head, int64_t row, const FoldTiles& b, uint16_t* key_rows) {
  const int64_t c = z.grain, dk = z.key_dim;
  const auto* k = static_cast<const uint16_t*>(in.k->at(s.index, row, in.shape->group_of(head)));
  tiles.pack(c, dk, k, in.k->row_stride, b.key_pairs, c / 2 * kTileRows);
  for (int64_t i = 0; i < dk; i += kTileRows) {  // pairs of rows are words of k^T
    simd.transpose(c / 2, kTileRows, reinterpret_cast<const float*>(b.key_pairs + i * c / 2), kTileRows,
                   reinterpret_cast<float*>(key_rows + i * c), c / 2);
  }
}

void tile_products(const Tiles& tiles, const Sizes& z, const TileBuffers& b, float* out) {
  const int64_t c = z.grain, dk = z.key_dim;
  tiles.product(c, c, dk, b.q, 0, b.q_stride, b.keys, 0, dk / 2 * kTileRows, out, c);
}

void tile_values(const Tiles& tiles, const Sizes& z, const float* weights, const TileBuffers& b, float* y) {
  const int64_t c = z.grain, dv = z.value_dim;
  for (int64_t t = 0; t < c; t += kTileDepth) {  // these rows read the chunk up to their own end
    const int64_t end = t + kTileDepth;
    tiles.split_rows(kTileDepth, end, weights + t * c, c, b.weights + t * c, c * c, c);
    tiles.product(kTileDepth, dv, end, b.weights + t * c, c * c, c, b.values, 0, c / 2 * kTileRows, y + t * dv, dv);
  }
}

void tile_content(const Tiles& tiles, const MixerInputs& in, const Sizes& z, const Sequence& s, int64_t head,
                  const Operands& o, const Factors& f, const uint16_t* key_rows, const FoldTiles& b, float* content) {
  const int64_t c = z.grain, dk = z.key_dim, dv = z.value_dim, block = c / 2 * kTileRows;
  for (int64_t t = 0; t < c; ++t) f.key[t] = f.suffix[t] * o.write[t];
  const auto* v = static_cast<const uint16_t*>(in.v->at(s.index, o.row, head));
  tiles.scale_split_pack(c, dv, v, in.v->row_stride, f.key, b.scaled, c / 2 * dv, block);
  tiles.product(dk, dv, c, key_rows, 0, c, b.scaled, c / 2 * dv, block, content, dv);
}

void tile_read(const Tiles& tiles, const Sizes& z, const Reads& reads, int n, TileBuffers* b, float* out) {
  const int64_t c = z.grain, dk = z.key_dim, dv = z.value_dim, block = dk / 2 * kTileRows;
  const int index = reads.level[n];
  uint32_t* packed = b->nodes + kParts * (index == kAbsorbed ? b->kept - 1 : index) * b->node_words;
  const bool split = b->packed[index] != reads.content[n];
  b->packed[index] = reads.content[n];
  for (int64_t j = 0; j < dv; j += 2 * kTileRows) {  // columns whose parts stay in the first-level cache
    const int64_t columns = std::min(2 * kTileRows, dv - j);
    uint32_t* part = packed + j / kTileRows * block;
    if (split) tiles.split_pack(dk, columns, reads.content[n] + j, dv, part, b->node_words, block);
    tiles.product(c, columns, dk, b->q, 0, b->q_stride, part, b->node_words, block, out + j, dv);
  }
}

}  // namespace lla::cpu::scalar_gate
