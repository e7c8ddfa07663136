// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper, gradients of rows: the mask within a block, and what rows read at its levels.
#pragma once

#include "cuda/hopper/matrix_copy.h"
#include "cuda/hopper/scalar_gate_row_tasks.h"

namespace lla::cuda::hopper {

// Four scores of a lane, of eight n of columns: from the sums of a product, or its own in shared memory.
struct ScoreSums {
  const Sums& sums;
  __device__ __forceinline__ float4 eight(int n) const {
    return make_float4(sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]);
  }
};
struct ScoresKept {
  float4* scores;
  int step;
  __device__ __forceinline__ float4& eight(int n) const { return scores[step * n]; }
};

// By a warp with 16 rows of the half.
template <Half kType, bool kLinear>
struct RowMask {
  const int half, warp, lane;
  const float scale;
  const float unit;  // fp16: by which gradients of scores are multiplied

  __device__ __forceinline__ int first_row() const { return kHalf * half + 16 * warp; }

  // From products of dy and values, and scores: their gradient, rounded, and what rows read at the levels, without λ. Eights
  // of columns left of the row's own are at one level.
  struct Reads {
    float level[2][kInner];  // [row lane / 4 or 8 more]
  };
  __device__ __forceinline__ static float lambda_of(const BlockFactors& f, int level, int row) {
    return kLinear ? 1.0f : f.lambda(level)[row];
  }

  // λ of a row, in the gradient's unit.
  __device__ __forceinline__ float weight_of(const BlockFactors& f, int level, int row) const {
    return kType == Half::kF16 ? unit * lambda_of(f, level, row) : lambda_of(f, level, row);
  }

  // Factors of two columns at a level: this lane's of eight n of half `piece`.
  __device__ __forceinline__ float2 columns(const BlockFactors& f, int level, int piece, int n) const {
    const int at = kHalf * piece + 8 * n + 2 * (lane % 4);
    const float2 decay = *reinterpret_cast<const float2*>(&f.level[level - 1][at]);
    const float2 write = *reinterpret_cast<const float2*>(&f.write[at]);
    return make_float2(decay.x * write.x, decay.y * write.y);
  }

  // Columns 8 n ... 8 n + 7, all at one level; row: factors of the two rows.
  __device__ __forceinline__ static void mask_eight(const Sums& product, const float4& score, int n, float2 column,
                                                    const float (&row)[2], uint32_t (&weights)[4][4], float (&sum)[2]) {
    const float scores[4] = {score.x, score.y, score.z, score.w};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int e = 4 * n + 2 * h;
      const float x = column.x * product[e], y = column.y * product[e + 1];
      sum[h] = fmaf(y, scores[2 * h + 1], fmaf(x, scores[2 * h], sum[h]));
      weights[n / 2][2 * (n % 2) + h] = pack<kType>(row[h] * x, row[h] * y);
    }
  }

  // The first half's columns, for rows of the second from `first` on: all at level 7. Their sums at that level.
  template <class Scores>
  __device__ __forceinline__ void mask_first(const Sums& product, const Scores& scores, const BlockFactors& f, int first,
                                             uint32_t (&weights)[4][4], float (&reads)[2]) const {
    const float* level = f.level[kInnerLevels - 1];
    const int r = first + lane / 4;
    const float a[2] = {level[r], level[r + 8]};
    const float row[2] = {a[0] * weight_of(f, kInnerLevels, r), a[1] * weight_of(f, kInnerLevels, r + 8)};
    float sum[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < 8; ++n) mask_eight(product, scores.eight(n), n, columns(f, kInnerLevels, 0, n), row, weights, sum);
    reads[0] = a[0] * sum[0];
    reads[1] = a[1] * sum[1];
  }

  // An eight of its own row's: row lane / 4, columns 2 (lane % 4) and the next.
  template <int kSide>
  __device__ __forceinline__ uint32_t mask_diagonal(const Sums& product, const float4& score, int n, const BlockFactors& f,
                                                    Reads* reads) const {
    const int first = first_row() + 8 * kSide, row = first + lane / 4;
    const float scores[4] = {score.x, score.y, score.z, score.w};
    float weight[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int e = 4 * n + 2 * kSide + odd, column = 2 * (lane % 4) + odd, differ = lane / 4 ^ column;
      const int l = differ >= 4 ? 3 : differ >= 2 ? 2 : differ;
      const float* level = f.level[differ == 0 ? 0 : l - 1];
      const float pair = level[row] * level[first + column];  // also where it is not asked for: no branches
      const float base = column > lane / 4 ? 0.0f : (differ == 0 ? scale : pair) * f.write[first + column];
      const float x = base * product[e], read = x * scores[2 * kSide + odd];
      weight[odd] = weight_of(f, l, row) * x;
#pragma unroll
      for (int i = 0; i < 4; ++i) reads->level[kSide][i] += i == l ? read : 0.0f;
    }
    return pack<kType>(weight[0], weight[1]);
  }

  // The half with itself.
  template <class Scores>
  __device__ __forceinline__ void mask_own(const Sums& product, const Scores& scores, const BlockFactors& f,
                                           uint32_t (&weights)[4][4], Reads* reads) const {
    const int r = first_row() + lane / 4;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (pair > warp) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[pair][i] = 0;
      } else if (pair < warp) {
        const bool far = (pair ^ warp) >= 2;
        const int l = far ? 6 : 5;
        const float* level = f.level[l - 1];
        const float a[2] = {level[r], level[r + 8]};
        const float row[2] = {a[0] * weight_of(f, l, r), a[1] * weight_of(f, l, r + 8)};
        float sum[2] = {0, 0};
        mask_eight(product, scores.eight(2 * pair), 2 * pair, columns(f, l, half, 2 * pair), row, weights, sum);
        mask_eight(product, scores.eight(2 * pair + 1), 2 * pair + 1, columns(f, l, half, 2 * pair + 1), row, weights, sum);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          reads->level[h][6] += far ? a[h] * sum[h] : 0.0f;
          reads->level[h][5] += far ? 0.0f : a[h] * sum[h];
        }
      } else {
        const float* level = f.level[3];
        const float a[2] = {0, level[r + 8]}, row[2] = {0, a[1] * weight_of(f, 4, r + 8)};
        float sum[2] = {0, 0};
        const float4 score[2] = {scores.eight(2 * pair), scores.eight(2 * pair + 1)};
        mask_eight(product, score[0], 2 * pair, columns(f, 4, half, 2 * pair), row, weights, sum);
        reads->level[1][4] = a[1] * sum[1];
        weights[pair][0] = mask_diagonal<0>(product, score[0], 2 * pair, f, reads);
        weights[pair][2] = 0;
        weights[pair][3] = mask_diagonal<1>(product, score[1], 2 * pair + 1, f, reads);
      }
    }
  }

  // Sums over the four lanes of a row; of each row a lane gets levels 2 (lane % 4) and the next.
  __device__ __forceinline__ void sum_lanes(const Reads& reads, float (&to)[2][2]) const {
    const bool high = (lane & 2) != 0, odd = (lane & 1) != 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low_level = reads.level[h][i], high_level = reads.level[h][4 + i];
        four[i] = (high ? high_level : low_level) + __shfl_xor_sync(kAllLanes, high ? low_level : high_level, 2);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        to[h][i] = (odd ? four[2 + i] : four[i]) + __shfl_xor_sync(kAllLanes, odd ? four[i] : four[2 + i], 1);
    }
  }
};

}  // namespace lla::cuda::hopper
