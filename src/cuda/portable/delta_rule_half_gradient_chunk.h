// SPDX-License-Identifier: Apache-2.0
// What the two backward kernels inside a chunk share on halves: products of tiles and of lower triangular squares, by rows
// of sixteen.
#pragma once

#include "cuda/portable/delta_rule_chunk.h"
#include "cuda/portable/delta_rule_gradient.h"
#include "cuda/portable/delta_rule_half_walk.h"

namespace lla::cuda {

constexpr int kSquareRow = 128;  // bytes of a row of 64 halves
constexpr int kSquare = kTile * kSquareRow;

// Sixteen rows of a warp: of a tile with rows along the depth.
template <int kPairs, Stored kStored>
__device__ __forceinline__ void multiply_tile(RowSum<kPairs>& sum, const char* left_tile, const char* right_tile, int part,
                                              int steps) {
  const SharedAddress left = left_address<Stored::kAlongDepth>(left_tile), right = right_address<kStored>(right_tile);
  sum.clear();
#pragma unroll 2
  for (int k = 0; k < steps; ++k) {
    unsigned a[4];
    load_fragment<false>(a, block_address(left, part, k));
    sum.template add<kStored, 1>(
        right, 1, [&](int) -> const unsigned(&)[4] { return a; }, k);
  }
}
// The same with rows 16 part ... of the transpose of a square tile, lower triangular, from depth 16 part on.
template <int kPairs, int kRightRow>
__device__ __forceinline__ void multiply_square(RowSum<kPairs>& sum, const char* square, const char* right_tile, int part,
                                                int steps) {
  const SharedAddress left = left_address<Stored::kByDepth, kSquareRow>(square),
                      right = right_address<Stored::kByDepth, kRightRow>(right_tile);
  sum.clear();
#pragma unroll 1
  for (int k = part; k < steps; ++k) {
    unsigned a[4];
    load_fragment<true>(a, block_address<kSquareRow>(left, k, part));
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      unsigned b[4];
      load_fragment<true>(b, block_address<kRightRow>(right, k, j));
      multiply_halves(sum.c[2 * j], a, b[0], b[1]);
      multiply_halves(sum.c[2 * j + 1], a, b[2], b[3]);
    }
  }
}

template <int kPairs>
__device__ __forceinline__ void scale_rows_of(RowSum<kPairs>& sum, float f0, float f1) {
#pragma unroll
  for (int j = 0; j < 2 * kPairs; ++j) sum.c[j][0] *= f0, sum.c[j][1] *= f0, sum.c[j][2] *= f1, sum.c[j][3] *= f1;
}
// Adds rows of floats; null: zero.
template <int kPairs>
__device__ __forceinline__ void add_floats(RowSum<kPairs>& sum, const float* row0, const float* row1, int columns) {
  const int column0 = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* row = half ? row1 : row0;
#pragma unroll
    for (int j = 0; j < 2 * kPairs; ++j) {
      const int column = 8 * j + column0;
      if (!row || column >= columns) continue;
      const float2 x = *reinterpret_cast<const float2*>(row + column);  // rows are padded
      sum.c[j][2 * half] += x.x, sum.c[j][2 * half + 1] += column + 1 < columns ? x.y : 0.0f;
    }
  }
}
// Dots of rows with those of a tile, one for each of this lane's two rows, the same in all lanes of a quad.
__device__ __forceinline__ void row_dots(const WideRows& sum, const char* tile, int row, float (&dots)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float dot = 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 x =
          unpack_halves(*reinterpret_cast<const unsigned*>(tile + half_place(row + 8 * half, j) + 4 * (threadIdx.x % 4)));
      dot += sum.c[j][2 * half] * x.x + sum.c[j][2 * half + 1] * x.y;
    }
    dot += __shfl_xor_sync(kAllLanes, dot, 1);
    dots[half] = dot + __shfl_xor_sync(kAllLanes, dot, 2);
  }
}
template <int kPairs>
__device__ __forceinline__ float most_of(const RowSum<kPairs>& sum) {
  float most[2];
  sum.row_most(most);
  return warp_max(fmaxf(most[0], most[1]));
}
__device__ __forceinline__ float most_of_four(const float* most) {
  return fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
}
// Into a square tile.
__device__ __forceinline__ void put_square(char* tile, int row, const RowSum<4>& sum, float to) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<unsigned*>(tile + half_place<kSquareRow>(row + 8 * half, j) + 4 * (threadIdx.x % 4)) =
          f16_pair(sum.c[j][2 * half] * to, sum.c[j][2 * half + 1] * to);
}

// Rows of floats to scratch memory; null: nowhere.
template <int kPairs>
__device__ __forceinline__ void put_floats(const RowSum<kPairs>& sum, float* row0, float* row1, int columns) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* row = half ? row1 : row0;
#pragma unroll
    for (int j = 0; j < 2 * kPairs; ++j) {
      const int column = 8 * j + 2 * static_cast<int>(threadIdx.x % 4);
      if (row && column < columns)
        *reinterpret_cast<float2*>(row + column) = make_float2(sum.c[j][2 * half], sum.c[j][2 * half + 1]);
    }
  }
}
// Zeroes what lies right of the diagonal, and, if strict, the diagonal.
__device__ __forceinline__ void keep_lower(RowSum<4>& square, int row, bool strict) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (8 * j + 2 * static_cast<int>(threadIdx.x % 4) + q % 2 + (strict ? 1 : 0) > row + 8 * (q / 2)) square.c[j][q] = 0;
    }
}
// += A B^T for a square tile B, with A's fragments.
__device__ __forceinline__ void add_by_square(RowSum<4>& sum, const unsigned (&a)[4][4], const char* square, int steps) {
  const SharedAddress right = right_address<Stored::kAlongDepth, kSquareRow>(square);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k >= steps) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      unsigned b[4];
      load_fragment<false>(b, block_address<kSquareRow>(right, j, k));
      multiply_halves(sum.c[2 * j], a[k], b[0], b[1]);
      multiply_halves(sum.c[2 * j + 1], a[k], b[2], b[3]);
    }
  }
}

}  // namespace lla::cuda
