// SPDX-License-Identifier: Apache-2.0
// ldmatrix and stmatrix: 8 x 8 matrices of 2-byte elements between shared memory and the registers of a warp. fragment.h says
// which address each lane gives and what it holds. All lanes of the warp take part.
#pragma once

#include "cuda/hopper/target.h"

namespace lla::cuda::hopper {

enum class Half : int { kBf16 = 0, kF16 = 1 };  // the 2-byte types

// Two numbers rounded to nearest even into one register, `low` in the lower half: the neighbour with the smaller column.
template <Half kType>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t both = 0;
  if constexpr (kType == Half::kBf16)
    LLA_HOPPER(both = emulator::pack_bf16(low, high), asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low)));
  else
    LLA_HOPPER(both = emulator::pack_f16(low, high), asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low)));
  return both;
}

// `row`: the shared address (16-byte aligned) that this lane gives. kTransposed: each matrix is transposed on the way.
//
// An arrival on a barrier does not wait for matrices that are still on their way into registers (measured: whole warps then
// read what the next bulk copy brought). Use what was loaded, in a product that is waited for or in arithmetic, before arriving
// on the barrier that gives the buffer away.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t row) {
  if constexpr (kTransposed)
    LLA_HOPPER(emulator::load_matrices(to, 4, true, row),
               asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                            : "r"(row)
                            : "memory"));
  else
    LLA_HOPPER(emulator::load_matrices(to, 4, false, row),
               asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                            : "r"(row)
                            : "memory"));
}

// Two matrices, from the addresses that lanes 0 ... 15 give.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[2], uint32_t row) {
  if constexpr (kTransposed)
    LLA_HOPPER(emulator::load_matrices(to, 2, true, row),
               asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                            : "=r"(to[0]), "=r"(to[1])
                            : "r"(row)
                            : "memory"));
  else
    LLA_HOPPER(emulator::load_matrices(to, 2, false, row),
               asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                            : "=r"(to[0]), "=r"(to[1])
                            : "r"(row)
                            : "memory"));
}

template <bool kTransposed>
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&from)[4]) {
  if constexpr (kTransposed)
    LLA_HOPPER(emulator::store_matrices(row, from, 4, true),
               asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                            "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                            : "memory"));
  else
    LLA_HOPPER(emulator::store_matrices(row, from, 4, false),
               asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]),
                            "r"(from[1]), "r"(from[2]), "r"(from[3])
                            : "memory"));
}

template <bool kTransposed>
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&from)[2]) {
  if constexpr (kTransposed)
    LLA_HOPPER(emulator::store_matrices(row, from, 2, true),
               asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(from[0]),
                            "r"(from[1])
                            : "memory"));
  else
    LLA_HOPPER(emulator::store_matrices(row, from, 2, false),
               asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(from[0]),
                            "r"(from[1])
                            : "memory"));
}

}  // namespace lla::cuda::hopper
