// SPDX-License-Identifier: Apache-2.0
// What one warp does with small matrices of bf16 or fp16: products of 16 x 16 by 16 x 8, and loads of four 8 x 8 matrices
// that are transposed on the way. All lanes take part.
#pragma once

#include "cuda/common/element.h"

namespace lla::cuda {

// c[16 x 8] += a[16 x 16] b[16 x 8] (PTX mma.m16n8k16). Each register of a and b holds two neighbours in depth, the first in
// its lower half: lane l has a(l / 4 + 8 * (i % 2), 2 * (l % 4) + 8 * (i / 2)) and the next, b(2 * (l % 4) + 8 * i, l / 4)
// and the next; c(l / 4 + 8 * (i / 2), 2 * (l % 4) + i % 2).
template <int32_t kDtype>
__device__ __forceinline__ void multiply_half(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  static_assert(kDtype == LLA_BF16 || kDtype == LLA_F16);
#if defined(LLA_CUDA_EMULATED)
  const unsigned give[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const char* all = emulator::warp_meet(give, sizeof give);
  const auto number = [all](int lane, int i, int k) {
    const unsigned pair = reinterpret_cast<const unsigned*>(all + 64 * lane)[i], bits = k % 2 ? pair >> 16 : pair & 0xffffu;
    return kDtype == LLA_BF16 ? from_bf16(bits) : from_f16(bits);
  };
  const int l = emulator::lane();
  for (int i = 0; i < 4; ++i) {
    const int row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2;
    for (int k = 0; k < 16; ++k)
      c[i] += number(row % 8 * 4 + k % 8 / 2, row / 8 + 2 * (k / 8), k) * number(column * 4 + k % 8 / 2, 4 + k / 8, k);
  }
#else
  if constexpr (kDtype == LLA_BF16)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Lane l gives the place of row l % 8 of matrix l / 8 in shared memory, 16 bytes, as shared_place() names it; it gets
// elements (2 * (l % 4), l / 4) and (2 * (l % 4) + 1, l / 4) of each matrix.
#if defined(LLA_CUDA_EMULATED)
using SharedPlace = uintptr_t;
__device__ __forceinline__ SharedPlace shared_place(const void* at) { return reinterpret_cast<uintptr_t>(at); }
#else
using SharedPlace = uint32_t;
__device__ __forceinline__ SharedPlace shared_place(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}
#endif
__device__ __forceinline__ void load_transposed(unsigned (&x)[4], SharedPlace row) {
#if defined(LLA_CUDA_EMULATED)
  const char* all = emulator::warp_meet(&row, sizeof row);
  const int l = emulator::lane();
  for (int i = 0; i < 4; ++i) {
    unsigned pair[2];
    for (int n = 0; n < 2; ++n) {
      const SharedPlace from = *reinterpret_cast<const SharedPlace*>(all + 64 * (8 * i + 2 * (l % 4) + n));
      pair[n] = reinterpret_cast<const unsigned short*>(from)[l / 4];
    }
    x[i] = pair[0] | pair[1] << 16;
  }
  __syncwarp();  // nobody overwrites what another lane still reads
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
#endif
}

}  // namespace lla::cuda
