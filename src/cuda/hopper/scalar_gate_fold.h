// SPDX-License-Identifier: Apache-2.0
// Scalar gate on Hopper: a block of rows folded into a node, and nodes in shared memory. A warp works on 16 rows of a node,
// its warpgroup on 64 of them and all 64 columns.
#pragma once

#include "cuda/hopper/fragment.h"
#include "cuda/hopper/scalar_gate_fragments.h"

namespace lla::cuda::hopper {

constexpr int kFoldSteps = kBlock / kDepthStep;

// Columns [first, first + 16) of a tile [row][dk] of keys, transposed, times a factor for each row.
template <Half kType, class RowTile>
__device__ __forceinline__ void load_folded(uint32_t (&keys)[kFoldSteps][4], uint32_t tile, int first, const float* factor,
                                            int lane) {
  const Place at = block_row_transposed(lane);
  // The swizzle repeats every 8 rows: one address, and distances that instructions hold.
  const uint32_t columns = tile + RowTile::offset(at.row, first + at.column);
#pragma unroll
  for (int step = 0; step < kFoldSteps; ++step) {
    load_matrices<true>(keys[step], columns + static_cast<uint32_t>(kDepthStep * step) * kSwizzleRow);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const float2 fold = *reinterpret_cast<const float2*>(factor + kDepthStep * step + 8 * side + 2 * (lane % 4));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t& pair = keys[step][2 * side + h];
        pair = pack<kType>(low_of<kType>(pair) * fold.x, high_of<kType>(pair) * fold.y);
      }
    }
  }
}

// Puts the product of folded keys with a tile [row][64] of values on its way.
template <Half kType, class ValueTile>
__device__ __forceinline__ void issue_fold(Sums& node, const uint32_t (&keys)[kFoldSteps][4], uint32_t tile, bool adds) {
  const uint64_t v = describe(tile, Major::kOuter, ValueTile::kPanelBytes);
#pragma unroll
  for (int step = 0; step < kFoldSteps; ++step)
    multiply<kType, Major::kOuter>(node, keys[step],
                                   moved(v, depth_offset(Major::kOuter, step * kDepthStep, ValueTile::kPanelBytes)),
                                   adds || step > 0);
  commit_products();
}

// This thread's elements of a node in shared memory, 16 columns of the warp's rows [first, first + 16).
template <class NodeTile>
__device__ __forceinline__ uint32_t node_address(uint32_t tile, int first, int columns, int lane) {
  const Place at = block_row(lane);
  return tile + NodeTile::offset(first + at.row, columns + at.column);
}

template <Half kType, class NodeTile>
__device__ __forceinline__ void add_node(Sums& node, uint32_t tile, int first, float factor, int lane) {
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    uint32_t pairs[4];
    load_matrices<false>(pairs, node_address<NodeTile>(tile, first, 16 * quarter, lane));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      node[8 * quarter + 2 * i] = fmaf(factor, low_of<kType>(pairs[i]), node[8 * quarter + 2 * i]);
      node[8 * quarter + 2 * i + 1] = fmaf(factor, high_of<kType>(pairs[i]), node[8 * quarter + 2 * i + 1]);
    }
  }
}

// `unit`: of fp16 nodes, what they are multiplied by.
template <Half kType, class NodeTile>
__device__ __forceinline__ void store_node(const Sums& node, uint32_t tile, int first, int lane, float unit) {
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = 8 * quarter + 2 * i;
      if constexpr (kType == Half::kF16)
        pairs[i] = pack<kType>(unit * node[e], unit * node[e + 1]);
      else
        pairs[i] = pack<kType>(node[e], node[e + 1]);
    }
    store_matrices<false>(node_address<NodeTile>(tile, first, 16 * quarter, lane), pairs);
  }
}

}  // namespace lla::cuda::hopper
