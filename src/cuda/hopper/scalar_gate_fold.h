// SPDX-License-Identifier: Apache-2.0
// Scalar gate on Hopper: a block of rows folded into a node, and nodes in shared memory.
//
// By columns, as the forward does: a warp has 16 columns of values of a node, its warpgroup all 64, and all keys. Values are
// multiplied by the rows' factors, and keys taken as they lie, which are the wider tile and may serve two heads.
// By rows, as the backward does: a warp works on 16 rows of a node, its warpgroup on 64 of them and all 64 columns. Keys are
// multiplied by the factors.
#pragma once

#include "cuda/hopper/fragment.h"
#include "cuda/hopper/scalar_gate_fragments.h"

namespace lla::cuda::hopper {

constexpr int kFoldSteps = kBlock / kDepthStep;

// Columns [first, first + 16) of a tile [row][dk] of keys, or [row][64] of values, transposed, times a factor for each row.
template <Half kType, class Tile, int kSteps>
__device__ __forceinline__ void load_folded(uint32_t (&folded)[kSteps][4], uint32_t tile, int first, const float* factor,
                                            int lane) {
  const Place at = block_row_transposed(lane);
  // The swizzle repeats every 8 rows: one address, and distances that instructions hold.
  const uint32_t columns = tile + Tile::offset(at.row, first + at.column);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load_matrices<true>(folded[step], columns + static_cast<uint32_t>(kDepthStep * step) * kSwizzleRow);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const float2 fold = *reinterpret_cast<const float2*>(factor + kDepthStep * step + 8 * side + 2 * (lane % 4));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t& pair = folded[step][2 * side + h];
        pair = pack<kType>(low_of<kType>(pair) * fold.x, high_of<kType>(pair) * fold.y);
      }
    }
  }
}

// ---- by columns ----------------------------------------------------------------------------------------------------------

// This thread's elements of a node, for 64 keys at a time: element i of them is at value wgmma_sum(thread, i).row and key
// .column.
template <int kKeyDim>
using NodeColumns = Sums[kKeyDim / 64];

template <int kPanels>
__device__ __forceinline__ void pin(float (&node)[kPanels][32]) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) pin(node[panel]);
}
template <int kPanels>
__device__ __forceinline__ void scale_columns(float (&node)[kPanels][32], float factor) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
    for (float& sum : node[panel]) sum *= factor;
  }
}
// visit(key, value, element)
template <int kPanels, class Visit>
__device__ __forceinline__ void visit_columns(float (&node)[kPanels][32], int first, int lane, const Visit& visit) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const Place at = wgmma_sum(lane, i);
      visit(64 * panel + at.column, first + at.row, node[panel][i]);
    }
  }
}

// Puts the product of folded values with a tile [row][dk] of keys on its way. kWide: for all keys at once, which is faster
// by itself (and in fp16 sweeps, by 4 %); beside warpgroups that make bf16 outputs it is slower, by 2 %: their products wait
// for longer ones.
template <Half kType, class RowTile, bool kWide, int kSteps, int kPanels>
__device__ __forceinline__ void issue_columns(float (&node)[kPanels][32], const uint32_t (&values)[kSteps][4], uint32_t tile,
                                              bool adds) {
  constexpr int kProducts = kWide ? 1 : kPanels;
#pragma unroll
  for (int n = 0; n < kProducts; ++n) {
    const uint64_t k = moved(describe(tile, Major::kOuter, RowTile::kPanelBytes),
                             outer_offset(Major::kOuter, 64 * static_cast<uint32_t>(n), RowTile::kPanelBytes));
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      multiply<kType, Major::kOuter>(reinterpret_cast<float(&)[32 * kPanels / kProducts]>(node[n]), values[step],
                                     moved(k, depth_offset(Major::kOuter, step * kDepthStep, RowTile::kPanelBytes)),
                                     adds || step > 0);
  }
  commit_products();
}

// Of the node in shared memory [dk][64], for the columns [first, first + 16) of a warp: the address that a lane gives for
// its first 16 keys. The swizzle repeats every 8 rows, so that others are at distances that instructions hold.
template <class NodeTile>
__device__ __forceinline__ uint32_t columns_address(uint32_t tile, int first, int lane) {
  const Place at = block_row_transposed(lane);
  return tile + NodeTile::offset(at.row, first + at.column);
}
constexpr uint32_t kSixteenKeys = 16 * kSwizzleRow;

// Adds a pair of elements as they are stored.
template <Half kType>
__device__ __forceinline__ void add_pair(float& low, float& high, float factor, uint32_t pair) {
  low = fmaf(factor, low_of<kType>(pair), low);
  high = fmaf(factor, high_of<kType>(pair), high);
}
// `unit`: of fp16 nodes, what they are multiplied by.
template <Half kType>
__device__ __forceinline__ uint32_t pack_pair(float low, float high, float unit) {
  if constexpr (kType == Half::kF16) return pack<kType>(unit * low, unit * high);
  return pack<kType>(low, high);
}

template <Half kType, class NodeTile, int kPanels>
__device__ __forceinline__ void add_columns(float (&node)[kPanels][32], uint32_t tile, int first, float factor, int lane) {
  const uint32_t address = columns_address<NodeTile>(tile, first, lane);
#pragma unroll
  for (int n = 0; n < 4 * kPanels; ++n) {
    uint32_t pairs[4];
    load_matrices<true>(pairs, address + static_cast<uint32_t>(n) * kSixteenKeys);
    float* sums = &node[n / 4][n % 4 * 8];
#pragma unroll
    for (int i = 0; i < 4; ++i) add_pair<kType>(sums[2 * i], sums[2 * i + 1], factor, pairs[i]);
  }
}

template <Half kType, class NodeTile, int kPanels>
__device__ __forceinline__ void store_columns(const float (&node)[kPanels][32], uint32_t tile, int first, int lane,
                                              float unit) {
  const uint32_t address = columns_address<NodeTile>(tile, first, lane);
#pragma unroll
  for (int n = 0; n < 4 * kPanels; ++n) {
    const float* sums = &node[n / 4][n % 4 * 8];
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack_pair<kType>(sums[2 * i], sums[2 * i + 1], unit);
    store_matrices<true>(address + static_cast<uint32_t>(n) * kSixteenKeys, pairs);
  }
}

// ---- by rows -------------------------------------------------------------------------------------------------------------

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
    for (int i = 0; i < 4; ++i) add_pair<kType>(node[8 * quarter + 2 * i], node[8 * quarter + 2 * i + 1], factor, pairs[i]);
  }
}

template <Half kType, class NodeTile>
__device__ __forceinline__ void store_node(const Sums& node, uint32_t tile, int first, int lane, float unit) {
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack_pair<kType>(node[8 * quarter + 2 * i], node[8 * quarter + 2 * i + 1], unit);
    store_matrices<false>(node_address<NodeTile>(tile, first, 16 * quarter, lane), pairs);
  }
}

}  // namespace lla::cuda::hopper
