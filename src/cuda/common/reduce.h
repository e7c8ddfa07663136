// SPDX-License-Identifier: Apache-2.0
// Sums in a fixed order, and the largest number: over the lanes of a warp, and over partial results that blocks have left in
// memory.
#pragma once

#include "cuda/common/platform.h"

namespace lla::cuda {

// The same bits in every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

constexpr int kSumSegments = 16;
constexpr int kSumThreads = 32 * kSumSegments;

// store(column, partials[0][column] + ... + partials[count - 1][column]) for all columns. The order depends on `count` only.
template <class Store>
__global__ void __launch_bounds__(kSumThreads)
    sum_partials(const float* partials, int64_t count, int64_t columns, Store store) {
  __shared__ float sums[kSumSegments][32];
  const int lane = threadIdx.x % 32, segment = threadIdx.x / 32;
  for (int64_t task = blockIdx.x; task * 32 < columns; task += gridDim.x) {
    const int64_t column = task * 32 + lane;
    float sum = 0;
    if (column < columns) {
      const int64_t end = count * (segment + 1) / kSumSegments;
#pragma unroll 4
      for (int64_t i = count * segment / kSumSegments; i < end; ++i) sum += partials[i * columns + column];
    }
    sums[segment][lane] = sum;
    __syncthreads();
    if (segment == 0 && column < columns) {
#pragma unroll
      for (int s = 1; s < kSumSegments; ++s) sum += sums[s][lane];
      store(column, sum);
    }
    __syncthreads();
  }
}

template <class Store>
int32_t launch_sum_partials(const float* partials, int64_t count, int64_t columns, const Store& store, void* stream) {
  return launch(sum_partials<Store>, (columns + 31) / 32, kSumThreads, 0, stream, partials, count, columns, store);
}

}  // namespace lla::cuda
