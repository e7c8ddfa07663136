// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: factors of a block as its sources need them, made on the way to shared memory.
#pragma once

#include "cuda/hopper/scalar_gate_backward.h"

namespace lla::cuda::hopper {

constexpr int kSourceWarps = 3;  // that bring factors

// Factors of a block's rows as its sources need them.
struct SourceFactors {
  // [l - 1][r]: rows whose bit l - 1 is set: scale λ times the decay from the middle into the row; the others: the decay
  // from the row to the middle.
  float level[kInnerLevels][kBlock];
  float diagonal[kBlock];  // scale times λ of level 0
  float write[kBlock];
  float fold[kBlock];  // decay from the row to the block's end
};

__device__ __forceinline__ float4 times(const float4& a, const float4& b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

// Warp `number` of kSourceWarps: its share of the factors. A lane has rows 4 lane ... 4 lane + 3.
struct SourceShare {
  static constexpr int kLevels = 3;  // of a share; the last one has level 7 alone, and what else there is
  const int number, lane;

  __device__ __forceinline__ static float4& rows(float* column, int lane) { return reinterpret_cast<float4*>(column)[lane]; }
  __device__ __forceinline__ float4 rows(const float* column) const { return reinterpret_cast<const float4*>(column)[lane]; }
  // Of the rows that read at level l: λ; of the others: 1.
  __device__ __forceinline__ float4 weights(const BlockFactors& from, int l) const {
    const float4 lambda = rows(from.lambda(l));
    const auto of = [&](int i, float x) { return (4 * lane + i) >> (l - 1) & 1 ? x : 1.0f; };
    return make_float4(of(0, lambda.x), of(1, lambda.y), of(2, lambda.z), of(3, lambda.w));
  }

  __device__ __forceinline__ void copy(const BlockFactors& from, bool linear, float scale, SourceFactors* to) const {
    const int first = kLevels * number, count = number + 1 < kSourceWarps ? kLevels : kInnerLevels - first;
    float4 level[kLevels];
#pragma unroll
    for (int i = 0; i < kLevels; ++i) {
      if (i >= count) continue;
      level[i] = rows(from.level[first + i]);
      if (!linear) level[i] = times(level[i], weights(from, first + i + 1));
    }
    if (count < kLevels) {
      const float4 scales = make_float4(scale, scale, scale, scale);
      rows(to->diagonal, lane) = linear ? scales : times(scales, rows(from.lambda(0)));
      rows(to->write, lane) = rows(from.write);
      rows(to->fold, lane) = rows(from.fold);
    }
#pragma unroll
    for (int i = 0; i < kLevels; ++i) {
      if (i < count) rows(to->level[first + i], lane) = level[i];
    }
  }
};

}  // namespace lla::cuda::hopper
