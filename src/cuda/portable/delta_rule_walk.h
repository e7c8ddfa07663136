// SPDX-License-Identifier: Apache-2.0
// Rows X that walk back through nodes: products X N and X <- X Phi of 64 rows, by a block of 128 threads.
#pragma once

#include "cuda/portable/delta_rule.h"

namespace lla::cuda {

// Narrow: X [64][dk] is made anew in registers (dk <= 128), and a block makes 128 columns of y. Else a block makes all
// columns, 64 at a time, and what does not fit lies in scratch memory.
constexpr int64_t kNarrowDim = 2 * kTile;
template <bool kNarrow>
constexpr int kSides = kNarrow ? 2 : 1;
template <bool kNarrow>
constexpr int kSideStride = kSides<kNarrow>* kTile + 8;

LLA_HOST_DEVICE inline int64_t x_stride(int64_t dk) { return (dk + kTile - 1) / kTile * kTile + 4; }

struct ReadMemory {
  float* x;        // [64][stride]
  float* tile;     // [64][kSideStride]
  float* weights;  // [64]
  int stride;
};

template <bool kNarrow>
size_t read_bytes(int64_t dk) {
  return (kTile * x_stride(dk) + kTile * kSideStride<kNarrow> + kTile) * sizeof(float);
}

__device__ __forceinline__ ReadMemory read_memory(int64_t dk, int side_stride) {
  ReadMemory memory;
  memory.stride = static_cast<int>(x_stride(dk));
  memory.x = reinterpret_cast<float*>(shared_memory());
  memory.tile = memory.x + kTile * memory.stride;
  memory.weights = memory.tile + kTile * side_stride;
  return memory;
}

// sum[side] += (weights .* X) times columns [column + 64 side, ...) of a matrix of dk rows.
template <bool kExact, bool kNarrow, bool kWeighs>
__device__ __forceinline__ void read_product(const ReadMemory& memory, int64_t dk, const Elements& matrix, int64_t stride,
                                             int64_t column, int64_t columns, TileSum (&sum)[kSides<kNarrow>]) {
  constexpr int kStride = kSideStride<kNarrow>;
  const bool both = kNarrow && columns - column > kTile;
  for (int64_t at = 0; at < dk; at += kTile) {
    __syncthreads();
    for (int side = 0; side <= (both ? 1 : 0); ++side) {
      load_tile(memory.tile + side * kTile, kStride, column + side * kTile, columns, [&](int r) -> Elements {
        if (at + r >= dk) return {};
        return delta_row(matrix, at + r, stride);
      });
    }
    __syncthreads();
    const float* x = memory.x + at;
    const auto a = [&](int m, int k) {
      if constexpr (kWeighs)
        return memory.weights[m] * x[m * memory.stride + k];
      else
        return x[m * memory.stride + k];
    };
    const int depth = delta_depth(at, dk);
    multiply<kExact>(sum[0], depth, a, [&](int k, int n) { return memory.tile[k * kStride + n]; });
    if constexpr (kNarrow) {
      if (both) multiply<kExact>(sum[1], depth, a, [&](int k, int n) { return memory.tile[k * kStride + kTile + n]; });
    }
  }
}

// X <- X Phi. `spill(row)`: where row's columns may be put meanwhile, null for rows that are zero anyway.
template <bool kExact, bool kNarrow, class Spill>
__device__ __forceinline__ void read_transition(const ReadMemory& memory, int64_t dk, const void* transition, int64_t stride,
                                                Spill spill) {
  TileSum next[kSides<kNarrow>];
  for (int64_t column = 0; column < dk; column += kSides<kNarrow> * kTile) {
    for (TileSum& sum : next) sum.clear();
    read_product<kExact, kNarrow, false>(memory, dk, {transition, LLA_F32}, stride, column, dk, next);
    if constexpr (!kNarrow) {
      __syncthreads();
      put_sum(next[0], memory.tile, kSideStride<kNarrow>);
      __syncthreads();
      store_tile(memory.tile, kSideStride<kNarrow>, column, dk, [&](int r) -> Target { return {spill(r)}; });
    }
  }
  __syncthreads();
  if constexpr (kNarrow) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (side * kTile >= dk) break;
      put_sum(next[side], memory.x + side * kTile, memory.stride);
    }
  } else {
    for (int64_t column = 0; column < dk; column += kTile) {
      load_tile(memory.x + column, memory.stride, column, dk, [&](int r) -> Elements { return {spill(r), LLA_F32}; });
    }
  }
}

// Rows of 64 columns of a matrix of floats into a sum and back, through the tile. row(r): column 0, null: zero or nowhere.
template <bool kNarrow, class Row>
__device__ __forceinline__ void read_sum(const ReadMemory& memory, int64_t column, int64_t columns, TileSum& sum, Row row) {
  __syncthreads();
  load_tile(memory.tile, kSideStride<kNarrow>, column, columns, [&](int r) -> Elements { return {row(r), LLA_F32}; });
  __syncthreads();
  get_sum(sum, memory.tile, kSideStride<kNarrow>);
}
template <bool kNarrow, class Row>
__device__ __forceinline__ void write_sum(const ReadMemory& memory, int64_t column, int64_t columns, TileSum& sum, Row row) {
  __syncthreads();
  put_sum(sum, memory.tile, kSideStride<kNarrow>);
  __syncthreads();
  store_tile(memory.tile, kSideStride<kNarrow>, column, columns, row);
}

}  // namespace lla::cuda
