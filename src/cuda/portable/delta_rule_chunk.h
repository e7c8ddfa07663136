// SPDX-License-Identifier: Apache-2.0
// The delta rule inside a chunk: decays, the triangular inverse, weights of levels. By a block of 128 threads.
#pragma once

#include "cuda/portable/delta_rule.h"

namespace lla::cuda {

// Per-row tables of one chunk and head, in shared memory. Decays are sums within aligned blocks of 2^d rows, d = 0 ... 6, so
// that none is a difference: prefix[d][i] over the block's rows up to i, suffix[d][s] over its rows after s.
struct DeltaRows {
  float* prefix;  // [7][64], exponentials
  float* suffix;  // [7][64]
  float* write;   // [64]
  float* lambda;  // [64][8]: weights of the levels at which a row reads its chunk

  static constexpr int kFloats = 7 * 64 + 7 * 64 + 64 + 64 * 8;
  __device__ __forceinline__ explicit DeltaRows(float* memory)
      : prefix(memory), suffix(memory + 448), write(memory + 896), lambda(memory + 960) {}

  // Decay from row s to row i >= s.
  __device__ __forceinline__ float decay(int i, int s) const {
    const int level = local_level(i, s);
    return level == 0 ? 1.0f : prefix[(level - 1) * 64 + i] * suffix[(level - 1) * 64 + s];
  }
  __device__ __forceinline__ float weight(int i, int s) const { return decay(i, s) * lambda[i * 8 + local_level(i, s)]; }
  __device__ __forceinline__ float into(int i) const { return prefix[6 * 64 + i]; }    // from the chunk's start into row i
  __device__ __forceinline__ float to_end(int s) const { return suffix[6 * 64 + s]; }  // from row s to the chunk's end
  __device__ __forceinline__ float whole() const { return prefix[6 * 64 + 63]; }       // over the chunk
};

// Fills the tables; ends with a barrier. By a block of 128 threads or more.
__device__ __forceinline__ void delta_load_rows(const DeltaInputs& in, const ChunkSource& source, int64_t head,
                                                const DeltaRows& rows) {
  const int i = threadIdx.x % 64;
  const bool first = threadIdx.x < 64, second = !first && threadIdx.x < 128;
  const int threads = static_cast<int>(blockDim.x);
  if (first) {
    rows.prefix[i] = source.gate(in.gate, head, i);
  } else if (second) {
    rows.suffix[i] = 0;
    rows.write[i] = source.write(in.write, head, i);
  }
#pragma unroll 1
  for (int n = threadIdx.x; n < 64 * 8; n += threads) {
    const int row = n / 8, level = n % 8;
    float weight = 0;
    if (row >= source.span.lo && row < source.span.hi && (level == 0 || (level < 7 && (row >> (level - 1)) & 1))) {
      weight = in.shape.levels == 0
                   ? 1.0f
                   : load_element(in.lambda.at(source.sequence.index, source.span.row(source.sequence, row), head),
                                  in.lambda.dtype, in.shape.column(level));
    }
    rows.lambda[n] = weight;
  }
  __syncthreads();
#pragma unroll 1
  for (int d = 0; d < 6; ++d) {
    const int block = i >> d;
    const bool odd = block & 1;
    const float* totals = rows.prefix + d * 64;
    if (first) {
      rows.prefix[(d + 1) * 64 + i] = totals[i] + (odd ? totals[(block << d) - 1] : 0.0f);
    } else if (second) {
      rows.suffix[(d + 1) * 64 + i] = rows.suffix[d * 64 + i] + (odd ? 0.0f : totals[((block + 2) << d) - 1]);
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int n = threadIdx.x; n < 2 * 7 * 64; n += threads) rows.prefix[n] = decay_of(rows.prefix[n]);
  __syncthreads();
}

// out = a b for square blocks of kSize rows, kThreadsUsed threads making 4 columns of some rows each. Triangular zeros are
// multiplied too.
template <int kSize, int kRows>
__device__ __forceinline__ void delta_small_product(int thread, const float* a, int lda, const float* b, int ldb, float sign,
                                                    float* out, int ldo) {
  const int column = thread % (kSize / 4) * 4, row = thread / (kSize / 4) * kRows;
  float sum[kRows][4] = {};
#pragma unroll 4
  for (int k = 0; k < kSize; ++k) {
    const float4 y = *reinterpret_cast<const float4*>(b + k * ldb + column);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float x = a[(row + r) * lda + k];
      sum[r][0] += x * y.x, sum[r][1] += x * y.y, sum[r][2] += x * y.z, sum[r][3] += x * y.w;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    *reinterpret_cast<float4*>(out + (row + r) * ldo + column) =
        make_float4(sign * sum[r][0], sign * sum[r][1], sign * sum[r][2], sign * sum[r][3]);
}

// X = (I + N)^-1 in place, N strictly lower triangular and [64][kAcross]. Rows from `rows` on are those of the unit matrix.
// `temporary` [32][36]. Begins after a barrier, ends with one. By the first 128 threads of a block.
__device__ __forceinline__ void delta_invert(float* x, float* temporary, int rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool works = threadIdx.x < kThreads;
  // Diagonal blocks of 16: each lane makes one column.
  if (works) {
    float* block = x + 16 * warp * (kAcross + 1);
    float column[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float sum = i == lane ? 1.0f : 0.0f;
#pragma unroll
      for (int s = 0; s < i; ++s) sum -= block[i * kAcross + s] * column[s];
      column[i] = sum;
    }
    __syncwarp();
    if (lane < 16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) block[i * kAcross + lane] = column[i];
    }
  }
  __syncthreads();
  // Joins two neighbouring inverses: the block below the diagonal is -X22 N21 X11.
  if (rows > 16) {
    const int pair = threadIdx.x / 64, thread = threadIdx.x % 64;
    float* corner = x + 32 * pair * (kAcross + 1);
    float* below = corner + 16 * kAcross;
    float* product = temporary + pair * 16 * 20;
    if (works) delta_small_product<16, 1>(thread, below, kAcross, corner, kAcross, 1, product, 20);
    __syncthreads();
    if (works) delta_small_product<16, 1>(thread, below + 16, kAcross, product, 20, -1, below, kAcross);
    __syncthreads();
  }
  if (rows > 32) {
    float* below = x + 32 * kAcross;
    if (works) delta_small_product<32, 2>(threadIdx.x, below, kAcross, x, kAcross, 1, temporary, 36);
    __syncthreads();
    if (works) delta_small_product<32, 2>(threadIdx.x, below + 32, kAcross, temporary, 36, -1, below, kAcross);
    __syncthreads();
  }
}

}  // namespace lla::cuda
