// SPDX-License-Identifier: Apache-2.0
// Eight columns of a row at a time, of a run-time type: what kernels without matrix products read and write.
#pragma once

#include "cuda/common/element.h"

namespace lla::cuda::scalar_gate {

constexpr int kColumns = 8;  // of a thread
constexpr int kLanes = 16;   // threads that share the rows of one group of columns, however wide the block is

// All of them, from an address that is aligned to 16 bytes.
__device__ __forceinline__ void get_columns(const char* data, int32_t dtype, float (&x)[kColumns]) {
  if (dtype == LLA_F32) {
    const float4 low = reinterpret_cast<const float4*>(data)[0], high = reinterpret_cast<const float4*>(data)[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    return;
  }
  const uint4 bits = *reinterpret_cast<const uint4*>(data);
  const unsigned pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = dtype == LLA_BF16 ? from_bf16(pairs[i] & 0xffffu) : from_f16(pairs[i] & 0xffffu);
    x[2 * i + 1] = dtype == LLA_BF16 ? from_bf16(pairs[i] >> 16) : from_f16(pairs[i] >> 16);
  }
}

// Elements i ... i + 7 of a row, of which `count` exist; the others are zero.
__device__ __forceinline__ void load_columns(const void* row, int32_t dtype, int64_t i, int64_t count, float (&x)[kColumns]) {
  const char* data = static_cast<const char*>(row) + i * (dtype == LLA_F32 ? 4 : 2);
  if (count >= kColumns && (reinterpret_cast<uintptr_t>(data) & 15) == 0) return get_columns(data, dtype, x);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) x[j] = j < count ? load_element(row, dtype, i + j) : 0;
}

__device__ __forceinline__ void store_columns(void* row, int32_t dtype, int64_t i, int64_t count, const float (&x)[kColumns]) {
  char* data = static_cast<char*>(row) + i * (dtype == LLA_F32 ? 4 : 2);
  if (count >= kColumns && (reinterpret_cast<uintptr_t>(data) & 15) == 0) {
    if (dtype == LLA_F32) {
      reinterpret_cast<float4*>(data)[0] = make_float4(x[0], x[1], x[2], x[3]);
      reinterpret_cast<float4*>(data)[1] = make_float4(x[4], x[5], x[6], x[7]);
      return;
    }
    unsigned pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      pairs[j] = dtype == LLA_BF16 ? to_bf16(x[2 * j]) | to_bf16(x[2 * j + 1]) << 16
                                   : to_f16(x[2 * j]) | to_f16(x[2 * j + 1]) << 16;
    *reinterpret_cast<uint4*>(data) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    if (j < count) store_element(row, dtype, i + j, x[j]);
  }
}

}  // namespace lla::cuda::scalar_gate
