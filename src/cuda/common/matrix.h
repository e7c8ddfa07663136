// SPDX-License-Identifier: Apache-2.0
// Products of 64 x 64 tiles by a block of 128 threads, on tensor cores in tf32 with fp32 accumulation. Operands are functions
// of (row, column), so that scaling, masks and transposition happen where a fragment is read, in fp32.
#pragma once

#include "cuda/common/platform.h"

namespace lla::cuda {

constexpr int kTile = 64;
constexpr int kThreads = 128;  // 4 warps; warp w makes rows 32 * (w / 2) ... and columns 32 * (w % 2) ... of a tile
// Row distance of a tile in shared memory. Fragments read without bank conflicts if lanes run along (row / 4, column % 4) for
// kAlong, and along (row % 4, column / 4) for kAcross.
constexpr int kAlong = 68;   // tiles read as A(m, k) or as B(k, n) stored [n][k]
constexpr int kAcross = 72;  // tiles read as B(k, n) stored [k][n] or as A(m, k) stored [k][m]

// Nearest tf32, ties away from zero.
__device__ __forceinline__ unsigned to_tf32(float x) {
#if defined(LLA_CUDA_EMULATED)
  const unsigned bits = __float_as_uint(x);
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & ~0x1fffu;
#else
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
#endif
}

// c[16 x 8] += a[16 x 8] b[8 x 8] of a warp (PTX mma.m16n8k8.tf32). Lane l holds a(l / 4 + 8 * (i % 2), l % 4 + 4 * (i / 2)),
// b(l % 4 + 4 * i, l / 4), c(l / 4 + 8 * (i / 2), 2 * (l % 4) + i % 2).
__device__ __forceinline__ void multiply_fragment(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if defined(LLA_CUDA_EMULATED)
  unsigned give[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const char* all = emulator::warp_meet(give, sizeof give);
  const auto word = [all](int lane, int i) { return __uint_as_float(reinterpret_cast<const unsigned*>(all + 64 * lane)[i]); };
  const int l = emulator::lane();
  for (int i = 0; i < 4; ++i) {
    const int row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2;
    for (int k = 0; k < 8; ++k) {
      c[i] += word((row % 8) * 4 + k % 4, row / 8 + 2 * (k / 4)) * word(column * 4 + k % 4, 4 + k / 4);
    }
  }
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// An accumulator of 64 x 64 elements, spread over the block.
struct TileSum {
  float c[2][4][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) c[i][j][q] = 0;
  }
  // f(row, column, element&) for the elements of this thread. Elements 2n and 2n + 1 are neighbours in a row.
  template <class F>
  __device__ __forceinline__ void each(F f) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = 32 * (warp / 2) + lane / 4, column = 32 * (warp % 2) + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) f(row + 16 * i + 8 * (q / 2), column + 8 * j + q % 2, c[i][j][q]);
  }
  // Adds up over the columns: f(row, sum) is called once for each row by one thread of each warp; a row is covered by two
  // warps, whose column halves are 0 and 1: f(row, half, sum).
  template <class F, class Value>
  __device__ __forceinline__ void row_sums(Value value, F f) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = 32 * (warp / 2) + lane / 4, column = 32 * (warp % 2) + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = 0;
        const int r = row + 16 * i + 8 * half;
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int q = 0; q < 2; ++q) sum += value(r, column + 8 * j + q, c[i][j][2 * half + q]);
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (lane % 4 == 0) f(r, warp % 2, sum);
      }
  }
};

// sum += a b over k in 0 ... depth - 1 (a multiple of 8). kExact: three products of split operands, about 2^-21 relative to
// the operands; else one, 2^-11. a(m, k) and b(k, n) must be readable for all 64 rows and columns.
template <bool kExact, class A, class B>
__device__ __forceinline__ void multiply(TileSum& sum, int depth, A a, B b) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int m0 = 32 * (warp / 2) + lane / 4, n0 = 32 * (warp % 2) + lane / 4, k0 = lane % 4;
#pragma unroll 2
  for (int k = 0; k < depth; k += 8) {
    unsigned fa[2][4], fb[4][2], ra[2][4], rb[4][2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float x = a(m0 + 16 * i + 8 * (q % 2), k + k0 + 4 * (q / 2));
        fa[i][q] = to_tf32(x);
        if constexpr (kExact) ra[i][q] = to_tf32(x - __uint_as_float(fa[i][q]));
      }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const float x = b(k + k0 + 4 * q, n0 + 8 * j);
        fb[j][q] = to_tf32(x);
        if constexpr (kExact) rb[j][q] = to_tf32(x - __uint_as_float(fb[j][q]));
      }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kExact) {
          multiply_fragment(sum.c[i][j], ra[i], fb[j]);
          multiply_fragment(sum.c[i][j], fa[i], rb[j]);
        }
        multiply_fragment(sum.c[i][j], fa[i], fb[j]);
      }
  }
}

}  // namespace lla::cuda
