// SPDX-License-Identifier: Apache-2.0
// Element types: loading and storing one element of a run-time type. Rounding is to nearest even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lla/types.h"
#include "plugin/host_device.h"

namespace lla {

LLA_HOST_DEVICE inline int64_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case LLA_BF16:
    case LLA_F16: return 2;
    case LLA_F32:
    case LLA_I32: return 4;
    case LLA_F64:
    case LLA_I64: return 8;
    default: return 0;
  }
}

inline bool is_float_dtype(int32_t dtype) { return dtype >= LLA_F32 && dtype <= LLA_F64; }

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  const uint32_t mantissa = h & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

inline uint16_t float_to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (magnitude < 0x38800000u) {                        // subnormal: a multiple of 2^-24
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p24f;
    return sign | static_cast<uint16_t>(std::nearbyintf(scaled));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

// A double rounded once to nearest even in a narrower type (a detour through float rounded to odd avoids double rounding).
inline float double_to_float_round_odd(double x) {
  const float f = static_cast<float>(x);
  if (std::isnan(x) || std::isinf(f) || static_cast<double>(f) == x) return f;
  uint32_t bits = std::bit_cast<uint32_t>(f);
  if (bits & 1u) return f;
  const bool away = std::fabs(static_cast<double>(f)) > std::fabs(x);
  bits = away ? bits - 1 : bits + 1;
  return std::bit_cast<float>(bits);
}

// Element `i` of an array of run-time type. T is float or double.
template <class T>
inline T load_element(const void* data, int32_t dtype, int64_t i) {
  switch (dtype) {
    case LLA_F32: return static_cast<T>(static_cast<const float*>(data)[i]);
    case LLA_F64: return static_cast<T>(static_cast<const double*>(data)[i]);
    case LLA_BF16: return static_cast<T>(bf16_to_float(static_cast<const uint16_t*>(data)[i]));
    default: return static_cast<T>(f16_to_float(static_cast<const uint16_t*>(data)[i]));
  }
}

template <class T>
inline void store_element(void* data, int32_t dtype, int64_t i, T value) {
  switch (dtype) {
    case LLA_F32: static_cast<float*>(data)[i] = static_cast<float>(value); break;
    case LLA_F64: static_cast<double*>(data)[i] = static_cast<double>(value); break;
    default: {
      float f;
      if constexpr (sizeof(T) == 8) f = double_to_float_round_odd(value);
      else f = value;
      static_cast<uint16_t*>(data)[i] = dtype == LLA_BF16 ? float_to_bf16(f) : float_to_f16(f);
    }
  }
}

LLA_HOST_DEVICE inline void* offset_elements(void* data, int32_t dtype, int64_t elements) {
  return static_cast<char*>(data) + elements * dtype_size(dtype);
}
LLA_HOST_DEVICE inline const void* offset_elements(const void* data, int32_t dtype, int64_t elements) {
  return static_cast<const char*>(data) + elements * dtype_size(dtype);
}

}  // namespace lla
