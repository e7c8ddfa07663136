// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: walks along the nodes of a sequence and head, a few elements of all nodes a warp.
#pragma once

#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_fragments.h"

namespace lla::cuda::hopper {

constexpr int kLaneElements = 8, kWarpElements = 32 * kLaneElements;
constexpr int kWalkWarps = 8, kWalkSteps = kSegment / kWalkWarps;  // blocks of a segment that a warp has

// Of a node. fp16: the node's are multiplied by `unit`, from memory and to it.
template <Half kType>
struct Elements {
  static constexpr bool kUnits = kType == Half::kF16;
  float x[kLaneElements];

  __device__ __forceinline__ void add(float factor, const uint4& pairs) {
    const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = fmaf(factor, low_of<kType>(words[i]), x[2 * i]);
      x[2 * i + 1] = fmaf(factor, high_of<kType>(words[i]), x[2 * i + 1]);
    }
  }
  // *this times factor, plus what is given.
  __device__ __forceinline__ void step(float factor, const uint4& pairs, float unit = 1) {
    const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = low_of<kType>(words[i]), high = high_of<kType>(words[i]);
      x[2 * i] = fmaf(factor, x[2 * i], kUnits ? unit * low : low);
      x[2 * i + 1] = fmaf(factor, x[2 * i + 1], kUnits ? unit * high : high);
    }
  }
  // Of the products with what is given.
  __device__ __forceinline__ float dot(const uint4& pairs) const {
    const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum = fmaf(x[2 * i + 1], high_of<kType>(words[i]), fmaf(x[2 * i], low_of<kType>(words[i]), sum));
    return sum;
  }
  __device__ __forceinline__ uint4 packed(float unit = 1) const {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kUnits)
        words[i] = pack<kType>(unit * x[2 * i], unit * x[2 * i + 1]);
      else
        words[i] = pack<kType>(x[2 * i], x[2 * i + 1]);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// A lane's elements of the nodes of a sequence and head. A task is kWarpElements of them, the same in all warps.
struct Walk {
  BlockOfRows first;  // block of the sequence
  int number = 0;     // of the head
  int64_t element = 0, size = 0;

  __device__ __forceinline__ bool find(const BackwardParameters& in, int64_t task, int64_t node_size) {
    size = node_size;
    const int64_t pieces = size / kWarpElements;
    element = task % pieces * kWarpElements + threadIdx.x % 32 * kLaneElements;
    number = in.head_begin + static_cast<int>(task / pieces % in.head_count);
    return find_block(in, task / pieces / in.head_count * in.blocks, &first);
  }
  __device__ __forceinline__ int64_t slot(const BackwardParameters& in, int block) const {
    return in.slot(first.place_of(block), number);
  }
  __device__ __forceinline__ uint4* at(unsigned short* nodes, int64_t slot) const {
    return reinterpret_cast<uint4*>(nodes + slot * size + element);
  }
  __device__ __forceinline__ int piece() const { return static_cast<int>(element / kWarpElements); }

  // Linear, by a warp: decays [i] over blocks begin ... begin + i of their states, or, from the end, over those from begin +
  // i on.
  __device__ __forceinline__ void put_decays(const BackwardParameters& in, int begin, int count, bool from_end,
                                             float* to) const {
    constexpr int kEach = kSegment / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float x[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int n = kEach * lane + i;
      x[i] = n < count ? in.up[slot(in, from_end ? begin + count - 1 - n : begin + n)] : 1.0f;
      if (i > 0) x[i] *= x[i - 1];
    }
    float before = x[kEach - 1];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float other = __shfl_up_sync(kAllLanes, before, d);
      if (lane >= d) before *= other;
    }
    before = __shfl_up_sync(kAllLanes, before, 1);
    if (lane == 0) before = 1;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int n = kEach * lane + i;
      if (n < count) to[from_end ? count - 1 - n : n] = before * x[i];
    }
  }
};

}  // namespace lla::cuda::hopper
