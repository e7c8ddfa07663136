// SPDX-License-Identifier: Apache-2.0
// What a step does that completes a chunk: the chunk's content, merged with the nodes of its past that end with it, becomes
// a node. Most steps have none of it.
#pragma once

#include "cuda/portable/scalar_gate.h"

namespace lla::cuda::scalar_gate {

// What a border does to the nodes of a step's past.
struct Border {
  int top;          // level of the node that the chunk completes
  bool oldest;      // whether there is an absorbing node
  bool absorbs;     // whether it takes in the chunk
  uint64_t merged;  // entries of the past that the new node takes in, newest first

  __device__ Border(const Geometry& geometry, int64_t chunk)
      : top(trailing_ones_of(chunk)), oldest(has_oldest(geometry, chunk)), absorbs(top >= geometry.apart) {
    merged = (uint64_t{1} << min(top, geometry.apart)) - 1;
    if (absorbs && oldest) merged |= uint64_t{1} << kOldest;
  }
  // Whether `level` of the state is kept by this layer; whether it is the new one; else, of which past node it is a copy.
  __device__ __forceinline__ bool keeps(const Geometry& geometry, int level) const {
    return level == kAbsorbed ? geometry.absorbs : level < geometry.apart;
  }
  __device__ __forceinline__ bool is_new(int level) const { return level == kAbsorbed ? absorbs : level == top; }
  __device__ __forceinline__ int copied(int level) const { return level != kAbsorbed ? level : oldest ? kOldest : -1; }
};

// f(id, level) for the nodes of this layer that are to be written.
template <class F>
__device__ __forceinline__ void each_node_to_store(const Geometry& geometry, const Sequence& sequence, const Border& border,
                                                   F f) {
  for (int64_t item = 0; item < sequence.nodes_to_store_count; ++item) {
    const NodesToStore& plan = sequence.nodes_to_store[item];
    for (uint64_t rest = plan.write; rest; rest &= rest - 1) {
      const int level = __ffsll(static_cast<long long>(rest)) - 1;
      if (plan.node[level] >= 0 && border.keeps(geometry, level)) f(plan.node[level], level);
    }
  }
}

// Tiles of keys and values; then their product in fp32.
template <bool kExact>
union ContentShared {
  static constexpr int kStride = 68;  // of the product
  Tile<kExact> tiles[2];
  float product[64 * kStride];
};

// By one warp, whose lane l gives the log gates and write strengths of local rows l and l + 32: with which rows of a chunk
// enter its content. Returns the log decay of the chunk (in all lanes).
__device__ __forceinline__ float list_content_factors(const float (&gate)[2], const float (&write)[2], float* factors) {
  float total = 0;
  block_sums(gate[0], gate[1], [&](int d, int r, float prefix, float suffix) {
    if (d != 6) return;
    factors[r] = (r < 32 ? write[0] : write[1]) * decay_of(suffix);
    total = prefix;
  });
  return __shfl_sync(kAllLanes, total, 31);
}

// Rows k0 ... k0 + 63 of the content of a chunk, 64 columns of values.
template <bool kExact>
__device__ __forceinline__ void make_content(const Inputs& in, const Sequence& sequence, const ChunkSpan& span, int head,
                                             int group, int k0, int v0, const float* factors,
                                             ContentShared<kExact>& shared) {
  Tile<kExact>&key = shared.tiles[0], &value = shared.tiles[1];
  fill_tile<kExact>(key, k0, in.shape.key_dim, group_key_rows(in, sequence, span, group));
  fill_tile<kExact>(value, v0, in.shape.value_dim, value_rows(in, sequence, span, head));
  arrive();
#pragma unroll 1  // once a tile: few registers
  for (int i = threadIdx.x; i < 64 * 32; i += kThreads) {
    const int r = i / 32, c = 2 * (i % 32);
    const float factor = factors[r];
    const float2 x = read_pair<kExact>(value, r, c);
    write_pair<kExact>(value, r, c, factor * x.x, factor * x.y);
  }
  __syncthreads();
  TileSum sum;
  sum.clear();
  multiply_tiles<kExact, Layout::Across, Layout::Across>(sum, depth_of(in.geometry.chunk.rows), key, value);
  __syncthreads();
  each_pair(sum, [&](int r, int c, float x, float y) {
    *reinterpret_cast<float2*>(shared.product + r * ContentShared<kExact>::kStride + c) = make_float2(x, y);
  });
  __syncthreads();
}

// The same products of fp32 numbers, half of the chunk at a time: half the memory.
union ExactContent {
  static constexpr int kRows = 32;
  float tiles[2][kRows * kStride];
  float product[64 * ContentShared<true>::kStride];
};
__device__ __forceinline__ void make_exact_content(const Inputs& in, const Sequence& sequence, const ChunkSpan& span,
                                                   int head, int group, int k0, int v0, const float* factors,
                                                   ExactContent& shared) {
  constexpr int kRows = ExactContent::kRows;
  const ChunkRows keys = group_key_rows(in, sequence, span, group), values = value_rows(in, sequence, span, head);
  const auto four = [](const Elements& row, int64_t column, int64_t columns) {
    return row.data && column < columns ? load4(row.data, row.dtype, column, columns - column) : make_float4(0, 0, 0, 0);
  };
  const int depth = depth_of(in.geometry.chunk.rows);
  TileSum sum;
  sum.clear();
  __syncthreads();
#pragma unroll 1
  for (int first = 0; first < depth; first += kRows) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * 16; i += kThreads) {
      const int r = i / 16, c = 4 * (i % 16);
      const float factor = factors[first + r];
      const float4 x = four(values(first + r), v0 + c, in.shape.value_dim);
      *reinterpret_cast<float4*>(shared.tiles[0] + r * kStride + c) = four(keys(first + r), k0 + c, in.shape.key_dim);
      *reinterpret_cast<float4*>(shared.tiles[1] + r * kStride + c) =
          make_float4(factor * x.x, factor * x.y, factor * x.z, factor * x.w);
    }
    __syncthreads();
    multiply<true>(
        sum, depth - first < kRows ? depth - first : kRows, [&](int m, int k) { return shared.tiles[0][k * kStride + m]; },
        [&](int k, int n) { return shared.tiles[1][k * kStride + n]; });
    __syncthreads();
  }
  each_pair(sum, [&](int r, int c, float x, float y) {
    *reinterpret_cast<float2*>(shared.product + r * ContentShared<true>::kStride + c) = make_float2(x, y);
  });
  __syncthreads();
}

}  // namespace lla::cuda::scalar_gate
