// SPDX-License-Identifier: Apache-2.0
// One or four elements of a run-time type. Rounding is to nearest even, as on the CPU (plugin/numeric.h).
#pragma once

#include "cuda/common/platform.h"
#include "plugin/problem.h"

#if !defined(LLA_CUDA_EMULATED)
#include <cuda_fp16.h>
#endif

namespace lla::cuda {

__device__ __forceinline__ float from_bf16(unsigned bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ unsigned to_bf16(float x) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;  // NaN stays NaN
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

#if defined(LLA_CUDA_EMULATED)
inline float from_f16(unsigned bits) { return f16_to_float(static_cast<uint16_t>(bits)); }
inline unsigned to_f16(float x) { return float_to_f16(x); }
#else
__device__ __forceinline__ float from_f16(unsigned bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ unsigned to_f16(float x) { return __half_as_ushort(__float2half_rn(x)); }
#endif

// Two numbers in one word, `low` in its lower half.
__device__ __forceinline__ unsigned bf16_pair(float low, float high) {
#if defined(LLA_CUDA_EMULATED)
  return to_bf16(low) | to_bf16(high) << 16;
#else
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#endif
}

__device__ __forceinline__ unsigned f16_pair(float low, float high) {
#if defined(LLA_CUDA_EMULATED)
  return to_f16(low) | to_f16(high) << 16;
#else
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#endif
}

// Element i of an array of type LLA_F32, LLA_BF16 or LLA_F16.
__device__ __forceinline__ float load_element(const void* data, int32_t dtype, int64_t i) {
  if (dtype == LLA_F32) return static_cast<const float*>(data)[i];
  const unsigned bits = static_cast<const unsigned short*>(data)[i];
  return dtype == LLA_BF16 ? from_bf16(bits) : from_f16(bits);
}

__device__ __forceinline__ void store_element(void* data, int32_t dtype, int64_t i, float value) {
  if (dtype == LLA_F32)
    static_cast<float*>(data)[i] = value;
  else
    static_cast<unsigned short*>(data)[i] = static_cast<unsigned short>(dtype == LLA_BF16 ? to_bf16(value) : to_f16(value));
}

// Stores or, if the tensor accumulates, adds.
__device__ __forceinline__ void put_element(void* data, int32_t dtype, int64_t i, float value, bool accumulate) {
  store_element(data, dtype, i, accumulate ? value + load_element(data, dtype, i) : value);
}

// Elements i ... i + 3, of which `count` (1 ... 4) exist; the others are zero.
__device__ __forceinline__ float4 load4(const void* data, int32_t dtype, int64_t i, int64_t count) {
  if (dtype == LLA_F32) {
    const float* p = static_cast<const float*>(data) + i;
    if (count >= 4 && (reinterpret_cast<uintptr_t>(p) & 15) == 0) return *reinterpret_cast<const float4*>(p);
    return make_float4(p[0], count > 1 ? p[1] : 0, count > 2 ? p[2] : 0, count > 3 ? p[3] : 0);
  }
  const unsigned short* p = static_cast<const unsigned short*>(data) + i;
  unsigned x[4];
  if (count >= 4 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) {
    const uint2 both = *reinterpret_cast<const uint2*>(p);
    x[0] = both.x & 0xffffu, x[1] = both.x >> 16, x[2] = both.y & 0xffffu, x[3] = both.y >> 16;
  } else {
    x[0] = p[0], x[1] = count > 1 ? p[1] : 0, x[2] = count > 2 ? p[2] : 0, x[3] = count > 3 ? p[3] : 0;
  }
  if (dtype == LLA_BF16) return make_float4(from_bf16(x[0]), from_bf16(x[1]), from_bf16(x[2]), from_bf16(x[3]));
  return make_float4(from_f16(x[0]), from_f16(x[1]), from_f16(x[2]), from_f16(x[3]));
}

}  // namespace lla::cuda
