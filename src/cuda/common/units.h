// SPDX-License-Identifier: Apache-2.0
// Sums of fp16 numbers, which end at 65504 and lose bits below 6e-5: where a sum of many rows is stored in fp16, it is in
// units, powers of two that follow from the factors alone. With W, the sum of the weights with which a sum takes its rows
// in, and a unit of at least W, nothing in the sum is larger than the largest product of two elements, and it shrinks no
// further than an average does.
#pragma once

#include "cuda/common/platform.h"

namespace lla::cuda {

constexpr int kLeastExponent = -40, kMostExponent = 60;

// The exponent of the power of two above a weight, which is not negative.
__device__ __forceinline__ int exponent_above(float weight) {
  const int exponent = static_cast<int>(__float_as_uint(weight) >> 23) - 126;
  return exponent < kLeastExponent ? kLeastExponent : exponent > kMostExponent ? kMostExponent : exponent;
}
// For |exponent| <= 126.
__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

}  // namespace lla::cuda
