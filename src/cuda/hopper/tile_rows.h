// SPDX-License-Identifier: Apache-2.0
// Rows of swizzled tiles of 2-byte elements: clearing those that hold anything, and bringing sums to memory.
#pragma once

#include "cuda/common/element.h"
#include "cuda/hopper/fragment.h"
#include "cuda/hopper/matrix_copy.h"
#include "cuda/hopper/scalar_gate_fragments.h"
#include "cuda/hopper/swizzle.h"
#include "plugin/problem.h"

namespace lla::cuda::hopper {

// Zeroes the rows of a tile of kRows rows that lie outside [lo, hi), by some threads. After: fence_shared_writes() and a
// barrier.
template <int kRows>
__device__ __forceinline__ void clear_rows(char* tile, int panels, int lo, int hi, int thread, int threads) {
#pragma unroll 1
  for (int i = thread; i < kRows * panels * 8; i += threads) {
    const int r = i / 8 % kRows;
    if (r < lo || r >= hi) reinterpret_cast<uint4*>(tile)[i] = uint4{0, 0, 0, 0};
  }
}

// Puts a warp's 16 rows of 64 sums into its own shared memory as 2-byte elements; element(i): the sum's, as of wgmma. 16
// bytes at staging + place(row, chunk).
template <Half kType, class Locate, class Element>
__device__ __forceinline__ void put_rows(char* staging, int lane, Locate place, Element element) {
  const uint32_t address = shared_address(staging);
  const Place at = block_row(lane);
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = 8 * quarter + 2 * i;
      pairs[i] = pack<kType>(element(e), element(e + 1));
    }
    store_matrices<false>(address + place(at.row, 2 * quarter + at.column / 8), pairs);
  }
}

// Stores those of a warp's rows [first, first + 16) that lie in [lo, hi), `columns` of 64 (a multiple of 8), to a
// tensor whose row 0 is at `to`; element(i): the sum's, as of wgmma. Rows go through the warp's own memory, 16 bytes at
// staging + place(row, chunk); if the tensor accumulates, straight, so that the sum is rounded once.
template <Half kType, class Locate, class Element>
__device__ __forceinline__ void store_rows(char* to, int64_t row_bytes, bool accumulate, int columns, int first, int lo,
                                           int hi, int lane, char* staging, Locate place, Element element) {
  if (lo >= first + 16 || hi <= first) return;
  if (accumulate) {
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const Place at = wgmma_sum(lane, i);
      const int row = first + at.row;
      if (row < lo || row >= hi || at.column >= columns) continue;
      uint32_t& pair = *reinterpret_cast<uint32_t*>(to + row * row_bytes + 2 * at.column);
      pair = pack<kType>(low_of<kType>(pair) + element(i), high_of<kType>(pair) + element(i + 1));
    }
    return;
  }
  put_rows<kType>(staging, lane, place, element);
  __syncwarp();
  const int chunk = lane % 8;
  char* here = to + (first + lane / 8) * row_bytes + 16 * chunk;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // four rows at a time
    const int row = 4 * i + lane / 8;
    if (8 * chunk < columns && first + row >= lo && first + row < hi)
      *reinterpret_cast<uint4*>(here + 4 * i * row_bytes) = *reinterpret_cast<const uint4*>(staging + place(row, chunk));
  }
  __syncwarp();
}

// Stores a warp's sums of 16 rows of kColumns as fp32, or adds them to what is there: rows of kColumns floats, the first at
// `to`. Reads come before stores, many at a time: alternating, each would wait for memory.
template <int kColumns>
__device__ __forceinline__ void store_sums(float* to, const float (&sums)[kColumns / 2], bool adds) {
  constexpr int kAhead = 16;  // pairs
  const int lane = static_cast<int>(threadIdx.x) % 32;
  to += lane / 4 * kColumns + 2 * (lane % 4);
  const auto at = [&](int pair) { return reinterpret_cast<float2*>(to + pair % 2 * 8 * kColumns + pair / 2 * 8); };
#pragma unroll
  for (int begin = 0; begin < kColumns / 4; begin += kAhead) {
    float2 before[kAhead];
    if (adds) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) before[i] = *at(begin + i);
    } else {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) before[i] = make_float2(0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      *at(begin + i) = make_float2(before[i].x + sums[2 * (begin + i)], before[i].y + sums[2 * (begin + i) + 1]);
  }
}

// A thread's sums, continued from those of earlier parts, and left for later ones: in memory of its own, [i][kThreads]. What
// stays in the cache, since it is used again soon.
template <int kThreads, int kCount>
__device__ __forceinline__ void chain_sums(float4* memory, float (&sums)[kCount], bool adds, bool leaves) {
  constexpr int kAhead = 8;
  if (adds) {
#pragma unroll
    for (int begin = 0; begin < kCount / 4; begin += kAhead) {
      float4 before[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) before[i] = memory[(begin + i) * kThreads];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float x[4] = {before[i].x, before[i].y, before[i].z, before[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[4 * (begin + i) + j] += x[j];
      }
    }
  }
  if (!leaves) return;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    memory[i * kThreads] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[4 * i + j] = 0;
  }
}

}  // namespace lla::cuda::hopper
