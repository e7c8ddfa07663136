// SPDX-License-Identifier: Apache-2.0
// Products of one whole chunk of the scalar gate's forward on matrix tiles. q, k and v are bf16 as the caller has them;
// weights and nodes, which are fp32, are split, so that nothing is rounded to bf16.
#pragma once

#include "cpu/scalar_gate.h"

namespace lla::cpu::scalar_gate {

// For the content of a chunk.
struct FoldTiles {
  uint32_t* key_pairs = nullptr;  // packed k [C][dk]
  uint16_t* key_rows = nullptr;   // k^T [dk][C]
  uint32_t* scaled = nullptr;     // [kParts], packed [C][dv]
  void carve(const Sizes& sizes, Carver* carver);
};

struct TileBuffers {
  const uint16_t* q = nullptr;  // [C][dk] in the caller's memory
  int64_t q_stride = 0;
  uint32_t* keys = nullptr;     // k^T, packed [dk][C]
  uint32_t* values = nullptr;   // packed [C][dv]
  uint16_t* weights = nullptr;  // [kParts][C][C]
  float* words = nullptr;       // [C][dk / 2]: k in pairs
  uint32_t* nodes = nullptr;    // [kept][kParts], packed [dk][dv]
  int64_t kept = 0;             // one for each index of a node
  int64_t node_words = 0;
  const float* packed[kNodes] = {};  // which node is there, by index
  FoldTiles fold;

  void carve(const Sizes& sizes, int64_t node_count, Carver* carver);
  void forget_nodes();
};

// Find q and pack v, or k, of the rows from `row` on.
void load_tiles(const Tiles& tiles, const MixerForward& problem, const Sizes& sizes, const Sequence& s, int64_t head,
                int64_t row, TileBuffers* buffers);
void load_tile_keys(const Simd& simd, const MixerForward& problem, const Sizes& sizes, const Sequence& s, int64_t head,
                    int64_t row, TileBuffers* buffers);
// key_rows [dk][C] = k^T of the rows from `row` on.
void transpose_keys(const Simd& simd, const Tiles& tiles, const MixerInputs& in, const Sizes& sizes, const Sequence& s,
                    int64_t head, int64_t row, const FoldTiles& buffers, uint16_t* key_rows);
// out [C][C] = q k^T.
void tile_products(const Tiles& tiles, const Sizes& sizes, const TileBuffers& buffers, float* out);
// y [C][dv] = weights [C][C] v; the weights are zero above the diagonal.
void tile_values(const Tiles& tiles, const Sizes& sizes, const float* weights, const TileBuffers& buffers, float* y);
// content [dk][dv] of a whole chunk; factors.key is overwritten.
void tile_content(const Tiles& tiles, const MixerInputs& in, const Sizes& sizes, const Sequence& s, int64_t head,
                  const Operands& operands, const Factors& factors, const uint16_t* key_rows, const FoldTiles& buffers,
                  float* content);
// out [C][dv] = q S of node `n` of the list.
void tile_read(const Tiles& tiles, const Sizes& sizes, const Reads& reads, int n, TileBuffers* buffers, float* out);

}  // namespace lla::cpu::scalar_gate
