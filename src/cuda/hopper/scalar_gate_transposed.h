// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: gradients of nodes as transposed sums [dv][dk], a warp having 16 columns of values.
#pragma once

#include "cuda/hopper/fragment.h"
#include "cuda/hopper/scalar_gate_fragments.h"
#include "cuda/hopper/swizzle.h"

namespace lla::cuda::hopper {

constexpr uint32_t kStagingBytes = 1024;  // of a warp

// dy [row][dv], transposed, times weights of the rows: two steps of depth. fp16: times `unit`.
template <Half kType, class ValueTile>
__device__ __forceinline__ void load_weighted(uint32_t dy, const float* weights, float unit, int first, int warp, int lane,
                                              uint32_t (&values)[2][4]) {
  const Place at = block_row_transposed(lane);
  const uint32_t from = dy + ValueTile::offset(at.row, 16 * warp + at.column);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = kDepthStep * (first + i);
    load_matrices<true>(values[i], from + row * kSwizzleRow);  // whole atoms on: the same place of the pattern
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float2 weight = *reinterpret_cast<const float2*>(&weights[row + 8 * side + 2 * (lane % 4)]);
      if constexpr (kType == Half::kF16) weight = make_float2(unit * weight.x, unit * weight.y);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t& pair = values[i][2 * side + h];
        pair = pack<kType>(low_of<kType>(pair) * weight.x, high_of<kType>(pair) * weight.y);
      }
    }
  }
}

// Stores the transposed sum of a node's gradient [dv][dk], as [dk][64]; fp16: times `unit`.
template <Half kType, int kKeyDim>
__device__ __forceinline__ void store_gradient(unsigned short* node, const float (&sums)[kKeyDim / 2], float unit,
                                               char* staging) {
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t address = shared_address(staging);
  const auto place = [](int row, int chunk) { return static_cast<uint32_t>(row * 32 + ((chunk ^ (row >> 2 & 1)) * 16)); };
  const Place at = block_row_transposed(lane);
  // 32 keys, 16 columns of values: sectors of memory.
#pragma unroll
  for (int keys = 0; keys < kKeyDim; keys += 32) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = keys / 2 + 8 * side + 2 * i;
        if constexpr (kType == Half::kF16)
          pairs[i] = pack<kType>(unit * sums[e], unit * sums[e + 1]);
        else
          pairs[i] = pack<kType>(sums[e], sums[e + 1]);
      }
      store_matrices<true>(address + place(16 * side + at.row, at.column / 8), pairs);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * i + lane / 2, chunk = lane % 2;
      reinterpret_cast<uint4*>(node + (keys + row) * kColumns + 16 * warp)[chunk] =
          *reinterpret_cast<const uint4*>(staging + place(row, chunk));
    }
    __syncwarp();
  }
}

}  // namespace lla::cuda::hopper
