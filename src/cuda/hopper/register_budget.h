// SPDX-License-Identifier: Apache-2.0
// Registers moved between the warpgroups of a block: those that only issue copies give, those that multiply take.
#pragma once

#include "cuda/hopper/target.h"

namespace lla::cuda::hopper {

constexpr int kRegisters = 65536;  // of a multiprocessor

constexpr bool is_register_count(int registers) { return registers >= 24 && registers <= 256 && registers % 8 == 0; }

// Registers that each thread starts with, if the kernel is declared __launch_bounds__(threads, 1). Without that declaration
// the compiler ignores the moves (warning C7508).
constexpr int registers_at_entry(int threads) {
  const int each = kRegisters / threads / 8 * 8;
  return each < 256 ? each : 256;
}

// Whether the groups' counts, one for each warpgroup, need no more than the block has: else the takers wait for ever.
template <int kGroups>
constexpr bool registers_suffice(const int (&registers)[kGroups]) {
  int sum = 0;
  for (int count : registers) {
    if (!is_register_count(count)) return false;
    sum += count;
  }
  return sum <= kGroups * registers_at_entry(128 * kGroups);
}

// All warps of a warpgroup call one of these, once, at the start of the group's branch. A giver's count is at most, a
// taker's at least what it started with.
template <int kCount>
__device__ __forceinline__ void keep_registers() {
  static_assert(is_register_count(kCount), "24 ... 256, a multiple of 8");
  LLA_HOPPER(, asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount)));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  static_assert(is_register_count(kCount), "24 ... 256, a multiple of 8");
  LLA_HOPPER(, asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount)));
}

}  // namespace lla::cuda::hopper
