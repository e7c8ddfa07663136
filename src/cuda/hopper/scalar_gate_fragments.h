// SPDX-License-Identifier: Apache-2.0
// Scalar gate on Hopper: what multiplying warpgroups do with registers and buffers.
#pragma once

#include "cuda/common/element.h"
#include "cuda/hopper/mbarrier.h"
#include "cuda/hopper/scalar_gate_sweep.h"
#include "cuda/hopper/wgmma.h"

namespace lla::cuda::hopper {

using Sums = float[32];  // 64 x 64 of a warpgroup

__device__ __forceinline__ float low_of(uint32_t pair) { return from_bf16(pair & 0xffffu); }
__device__ __forceinline__ float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
template <Half kType>
__device__ __forceinline__ float low_of(uint32_t pair) {
  if constexpr (kType == Half::kF16) return from_f16(pair & 0xffffu);
  return low_of(pair);
}
template <Half kType>
__device__ __forceinline__ float high_of(uint32_t pair) {
  if constexpr (kType == Half::kF16) return from_f16(pair >> 16);
  return high_of(pair);
}

// Gives sums that a product will overwrite some value, at no cost: what is undefined would be kept in local memory.
template <int kCount>
__device__ __forceinline__ void make_fresh(float (&sum)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#if defined(LLA_CUDA_EMULATED)
    sum[i] = 0;
#else
    asm volatile("" : "=f"(sum[i]));
#endif
  }
}

// The number in the warp, in a register: from threadIdx it would be asked for anew at every use, which takes as long as a
// load.
__device__ __forceinline__ int own_lane() {
  int lane = 0;
#if defined(LLA_CUDA_EMULATED)
  lane = static_cast<int>(threadIdx.x) % 32;
#else
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
#endif
  return lane;
}

// Nothing that follows from the number before is kept: there are no registers for it.
__device__ __forceinline__ void renew(int& number) {
#if !defined(LLA_CUDA_EMULATED)
  asm volatile("" : "+r"(number));
#else
  (void)number;
#endif
}

// Keeps an address in its registers: a store reads them when memory takes it, and what overwrites them earlier waits.
__device__ __forceinline__ void still_needed(const char* address) {
#if !defined(LLA_CUDA_EMULATED)
  asm volatile("" ::"l"(address));
#else
  (void)address;
#endif
}

// By a warp that is done with a buffer: everything that it loaded from there has been used (matrix_copy.h says why).
__device__ __forceinline__ void release(Barrier* barrier, int lane) {
  __syncwarp();
  if (lane == 0) arrive(barrier);
}
__device__ __forceinline__ void release(Barrier* barrier) { release(barrier, static_cast<int>(threadIdx.x) % 32); }

}  // namespace lla::cuda::hopper
