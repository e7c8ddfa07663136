// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper in fp16: units as the kernels of rows and of columns use them. In bf16 nothing has one.
#pragma once

#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_fragments.h"

namespace lla::cuda::hopper {

// The unit of dq or dk of the heads that are summed up together, from number `first` of the order on, of those before `end`.
__device__ __forceinline__ int unit_of_heads(const BackwardParameters& in, int64_t place, int first, int end, int lane) {
  int unit = in.units[in.slot(place, first + min(lane, min(in.bundle, end - first) - 1))].scores;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) unit = max(unit, __shfl_xor_sync(kAllLanes, unit, d));
  return unit;
}

template <Half kType, int kCount>
__device__ __forceinline__ void leave_unit(float (&sums)[kCount], int unit) {
#pragma unroll
  for (int i = 0; kType == Half::kF16 && i < kCount; ++i) sums[i] *= power_of_two(unit);
}

// Of the sources of a head. Each takes a factor into the unit of something; `values`: sums of dv out of theirs.
template <Half kType>
struct SourceUnits {
  float of_weights = 1, of_values = 1, of_scores = 1, of_node = 1, of_folded = 1;

  // keys: the unit of dk.
  __device__ __forceinline__ SourceUnits(const BackwardParameters& in, int64_t slot, int keys) {
    if constexpr (kType == Half::kF16) {
      const BlockUnits units = in.units[slot];
      of_weights = power_of_two(-units.weights);
      of_values = power_of_two(units.weights);
      of_scores = power_of_two(-keys);
      of_node = unit_ratio(units.grad, units.weights);
      of_folded = unit_ratio(units.grad, keys);
    }
  }
  __device__ __forceinline__ static float times(float unit, float x) { return kType == Half::kF16 ? unit * x : x; }
  __device__ __forceinline__ float weights(float x) const { return times(of_weights, x); }
  __device__ __forceinline__ float values(float x) const { return times(of_values, x); }
  __device__ __forceinline__ float scores(float x) const { return times(of_scores, x); }
  __device__ __forceinline__ float node(float x) const { return times(of_node, x); }  // of keys times the node's gradient
  __device__ __forceinline__ float folded(float x) const { return times(of_folded, x); }  // of values that meet it
};

}  // namespace lla::cuda::hopper
