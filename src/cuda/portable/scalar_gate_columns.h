// SPDX-License-Identifier: Apache-2.0
// Eight columns of a row at a time: what kernels without matrix products read and write. They come by way of pieces of 16
// bytes of shared memory that one thread copies and the same thread reads, so that no barrier stands between.
#pragma once

#include "cuda/common/async_copy.h"
#include "cuda/common/element.h"

namespace lla::cuda::scalar_gate {

constexpr int kColumns = 8;

// Pieces that eight columns take.
LLA_HOST_DEVICE constexpr int pieces_of(int32_t dtype) { return dtype == LLA_F32 ? 2 : 1; }

// f(type) with the run-time type as a constant.
template <int32_t kType>
struct DtypeConstant {
  static constexpr int32_t kDtype = kType;
};
template <class F>
__device__ __forceinline__ void with_dtype(int32_t dtype, F f) {
  if (dtype == LLA_BF16)
    f(DtypeConstant<LLA_BF16>());
  else if (dtype == LLA_F32)
    f(DtypeConstant<LLA_F32>());
  else
    f(DtypeConstant<LLA_F16>());
}

// Begins to copy elements i ... i + 7 of a row, of which `count` exist, to pieces of the thread, fp32 ones to two, others to
// the first; what does not exist is zero there.
__device__ __forceinline__ void copy_columns(char* low, char* high, const void* row, int32_t dtype, int64_t i,
                                             int64_t count) {
  const char* from = static_cast<const char*>(row) + i * dtype_size(dtype);
  if (count >= kColumns && (reinterpret_cast<uintptr_t>(from) & 15) == 0) {
    copy_async16(low, from);
    if (pieces_of(dtype) == 2) copy_async16(high, from + 16);
    return;
  }
#pragma unroll 1  // not the common case: little code
  for (int j = 0; j < kColumns; ++j) {
    char* to = j < 4 || pieces_of(dtype) == 1 ? low : high - 16;
    store_element(to, dtype, j, j < count ? load_element(from, dtype, j) : 0);
  }
}

template <int32_t kDtype>
__device__ __forceinline__ void unpack_columns(uint4 bits, float (&x)[kColumns]) {
  const unsigned pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = kDtype == LLA_BF16 ? from_bf16(pairs[i]) : from_f16(pairs[i] & 0xffffu);
    x[2 * i + 1] = kDtype == LLA_BF16 ? __uint_as_float(pairs[i] & 0xffff0000u) : from_f16(pairs[i] >> 16);
  }
}
// Eight columns that lie in two halves of 16 bytes or, of 16-bit types, in the first.
template <int32_t kDtype>
__device__ __forceinline__ void get_columns(const char* low, const char* high, float (&x)[kColumns]) {
  if constexpr (kDtype == LLA_F32) {
    const float4 a = *reinterpret_cast<const float4*>(low), b = *reinterpret_cast<const float4*>(high);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
    unpack_columns<kDtype>(*reinterpret_cast<const uint4*>(low), x);
  }
}
__device__ __forceinline__ void get_columns(const char* low, const char* high, int32_t dtype, float (&x)[kColumns]) {
  with_dtype(dtype, [&](auto type) { get_columns<decltype(type)::kDtype>(low, high, x); });
}

// Elements i ... i + 7 of a row, of which `count` exist; the others are zero.
__device__ __forceinline__ void load_columns(const void* row, int32_t dtype, int64_t i, int64_t count,
                                             float (&x)[kColumns]) {
  const char* data = static_cast<const char*>(row) + i * (dtype == LLA_F32 ? 4 : 2);
  if (count >= kColumns && (reinterpret_cast<uintptr_t>(data) & 15) == 0) {
    get_columns(data, data + 16, dtype, x);
    return;
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) x[j] = j < count ? load_element(row, dtype, i + j) : 0;
}

__device__ __forceinline__ void store_columns(void* row, int32_t dtype, int64_t i, int64_t count,
                                              const float (&x)[kColumns]) {
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
