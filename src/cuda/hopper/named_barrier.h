// SPDX-License-Identifier: Apache-2.0
// Barriers known by number, for some warps of a block: a kernel enumerates its own, from 1 to 15 (0 is __syncthreads()).
#pragma once

#include "cuda/hopper/target.h"

namespace lla::cuda::hopper {

// Waits until `threads` threads (a multiple of 32, the same number in every call of a round) have come, those that only
// arrive included. Whole warps take part.
template <int kNumber>
__device__ __forceinline__ void sync_at(int threads) {
  static_assert(kNumber >= 1 && kNumber <= 15, "barriers have numbers 1 ... 15");
  LLA_HOPPER(emulator::sync_number(kNumber, threads),
             asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(kNumber), "r"(threads)
                          : "memory"));
}

// Comes without waiting: what the warp did before happens before whoever waits there goes on.
template <int kNumber>
__device__ __forceinline__ void arrive_at(int threads) {
  static_assert(kNumber >= 1 && kNumber <= 15, "barriers have numbers 1 ... 15");
  LLA_HOPPER(emulator::arrive_number(kNumber, threads),
             asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"n"(kNumber), "r"(threads)
                          : "memory"));
}

}  // namespace lla::cuda::hopper
