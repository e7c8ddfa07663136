// SPDX-License-Identifier: Apache-2.0
// Rows of swizzled tiles of 2-byte elements: clearing those that hold anything, and bringing sums to memory.
#pragma once

#include "cuda/common/element.h"
#include "cuda/hopper/fragment.h"
#include "cuda/hopper/matrix_copy.h"
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

// 16 rows of 64 columns that a warp holds as sums of wgmma.
constexpr uint32_t kStagingBytes = 1024;

// Stores those of the rows [first, first + 16) that lie in [lo, hi) as bf16, `columns` of them (a multiple of 8), to a
// tensor whose row 0 is at `to`; element(i): the sum's. Rows go through the warp's own kibibyte, 32 columns at a time; if
// the tensor accumulates, straight, so that the sum is rounded once.
template <class Element>
__device__ __forceinline__ void store_rows(char* to, int64_t row_bytes, bool accumulate, int columns, int first, int lo,
                                           int hi, char* staging, Element element) {
  if (lo >= first + 16 || hi <= first) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (accumulate) {
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const Place at = wgmma_sum(lane, i);
      const int row = first + at.row;
      if (row < lo || row >= hi || at.column >= columns) continue;
      uint32_t& pair = *reinterpret_cast<uint32_t*>(to + row * row_bytes + 2 * at.column);
      pair = pack<Half::kBf16>(from_bf16(pair & 0xffffu) + element(i), from_bf16(pair >> 16) + element(i + 1));
    }
    return;
  }
  const uint32_t address = shared_address(staging);
  const auto place = [](int row, int chunk) { return static_cast<uint32_t>(row * 64 + ((chunk ^ (row >> 1 & 3)) * 16)); };
  const Place at = block_row(lane);
  const int row = lane / 4, chunk = lane % 4;
  const char* from = staging + place(row, chunk);
  char* here = to + (first + row) * row_bytes + 16 * chunk;
  const bool store[2] = {first + row >= lo && first + row < hi, first + row + 8 >= lo && first + row + 8 < hi};
#pragma unroll
  for (int side = 0; side < 2; ++side) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = 16 * side + 8 * part + 2 * i;
        pairs[i] = pack<Half::kBf16>(element(e), element(e + 1));
      }
      store_matrices<false>(address + place(at.row, 2 * part + at.column / 8), pairs);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Eight rows on is the same place of the pattern.
      if (store[i] && 32 * side + 8 * chunk < columns)
        *reinterpret_cast<uint4*>(here + i * 8 * row_bytes + 64 * side) = *reinterpret_cast<const uint4*>(from + 512 * i);
    }
    __syncwarp();
  }
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

}  // namespace lla::cuda::hopper
