// SPDX-License-Identifier: Apache-2.0
// What the two backward kernels inside a chunk share. Gates: a decay over an interval belongs to all gates of the interval,
// so that nothing is subtracted.
#pragma once

#include "cuda/portable/delta_rule_chunk.h"
#include "cuda/portable/delta_rule_gradient.h"
#include "cuda/portable/delta_rule_wide.h"

namespace lla::cuda {

// Where the gradients of the call's rows go.
struct RowTargets {
  View dy, v, gate, write, lambda;
  SlotMemory state;  // of gradients
};

constexpr int kChunkTile = kTile * kAcross;
constexpr int kSums = 64 * 8 + 7 * 64 + 4;

// Shared memory: `tiles` tiles, the tables of rows, and sums for each row.
struct ChunkMemory {
  float *x, *t, *a, *b, *r;  // tiles: X, three for all kinds, and R last
  float* tables;
  float* level;  // [64][8] sums over the levels at which a row reads its chunk
  float* pair;   // [64] gate: what rows read from rows of the chunk
  float* into;   // [64][2] what rows read through their decay from the chunk's start
  float* out;    // [64][2] what rows give through their decay to the chunk's end
  float* write;  // [64][2] gradient of the write strength
  float* whole;  // [4] per warp: through the decay over the chunk

  static constexpr size_t bytes(int tiles) { return (tiles * kChunkTile + DeltaRows::kFloats + kSums) * sizeof(float); }
  __device__ __forceinline__ explicit ChunkMemory(int tiles) {
    x = reinterpret_cast<float*>(shared_memory());
    t = x + kChunkTile, a = t + kChunkTile, b = a + kChunkTile, r = b + kChunkTile;
    tables = x + tiles * kChunkTile;
    level = tables + DeltaRows::kFloats;
    pair = level + 512, into = pair + 64, out = into + 128, write = out + 128, whole = write + 128;
  }
};

// sum (+)= to rows of scratch memory, through tile `stage`. Begins and ends with barriers.
template <class Row>
__device__ __forceinline__ void put_rows(TileSum& sum, float* stage, int64_t at, int64_t columns, bool adds, Row row) {
  __syncthreads();
  put_sum(sum, stage, kAcross);
  __syncthreads();
  store_tile(stage, kAcross, at, columns, [&](int r) -> Target { return {row(r), LLA_F32, adds}; });
  __syncthreads();
}

// dots[row][half] += sums of a .* b over 64 columns of rows.
__device__ __forceinline__ void add_row_dots(const float* a, int stride_a, const float* b, int stride_b, float* dots) {
  const int row = threadIdx.x / 2, half = threadIdx.x % 2;
  float sum = 0;
  for (int c = 0; c < 32; ++c) {
    const int column = 32 * half + (c + row) % 32;  // rows begin at different banks
    sum += a[row * stride_a + column] * b[row * stride_b + column];
  }
  dots[2 * row + half] += sum;
}

// One chunk of one head.
template <bool kExact>
struct ChunkGradient {
  const DeltaInputs& in;
  const DeltaGradients& scratch;
  const RowTargets& targets;
  const ChunkSource& source;
  const DeltaRows& rows;
  const ChunkMemory& memory;
  int64_t head, group, slot, place;
  int depth;  // of sums over rows

  __device__ __forceinline__ bool is_query(int r) const { return r >= source.span.lo && r < source.span.hi; }
  __device__ __forceinline__ int64_t row(int r) const { return source.span.row(source.sequence, r); }
  __device__ __forceinline__ Elements key(int r) const { return source.k(in.k, group, r); }
  __device__ __forceinline__ Elements value(int r) const { return source.v(in.v, head, r); }
  __device__ __forceinline__ Elements query(int r) const {
    if (!is_query(r)) return {};
    return {in.q.at(source.sequence.index, row(r), group), in.q.dtype};
  }
  __device__ __forceinline__ Elements dy(int r) const {
    if (!is_query(r)) return {};
    return {targets.dy.at(source.sequence.index, row(r), head), targets.dy.dtype};
  }
  __device__ __forceinline__ Elements seen(int r) const {  // what nodes see of a query
    if (!is_query(r)) return {};
    return {scratch.nodes.query_at(row(r), head), LLA_F32};
  }
  __device__ __forceinline__ float* dseen(int r) const { return is_query(r) ? scratch.dx_at(0, row(r), head) : nullptr; }
  __device__ __forceinline__ float* place_of(float* base, int r, int64_t stride) const {
    return r < source.span.hi ? base + scratch.nodes.place(place + r, head) * stride : nullptr;
  }
  // Tiles of rows: 64 columns from `at` on, with little code.
  __device__ __forceinline__ void load_call(float* tile, int stride, int64_t at, int64_t columns,
                                            const CallRows& from) const {
    load_rows<false>(tile, stride, from, static_cast<int>(at), static_cast<int>(columns));
  }
  __device__ __forceinline__ void load_keys(float* tile, int stride, int64_t at) const {
    const int columns = static_cast<int>(in.shape.key_dim);
    load_call(tile, stride, at, columns, CallRows(in.k, source.sequence, source.span, group));
    load_tail_rows<false>(tile, stride, source.span.lo, static_cast<int>(at), columns, [&](int r) { return key(r); });
  }
  __device__ __forceinline__ void load_values(float* tile, int stride, int64_t at) const {
    const int columns = static_cast<int>(in.shape.value_dim);
    load_call(tile, stride, at, columns, CallRows(in.v, source.sequence, source.span, head));
    load_tail_rows<false>(tile, stride, source.span.lo, static_cast<int>(at), columns, [&](int r) { return value(r); });
  }
  __device__ __forceinline__ void load_queries(float* tile, int stride, int64_t at) const {
    load_call(tile, stride, at, in.shape.key_dim, CallRows(in.q, source.sequence, source.span, group));
  }
  __device__ __forceinline__ void load_dy(float* tile, int stride, int64_t at) const {
    load_call(tile, stride, at, in.shape.value_dim, CallRows(targets.dy, source.sequence, source.span, head));
  }
  __device__ __forceinline__ void load_dseen(float* tile, int stride, int64_t at) const {
    load_call(tile, stride, at, in.shape.key_dim,
              CallRows(scratch.dx_at(0, row(0), head), scratch.nodes.heads * scratch.nodes.key_stride, source.span));
  }
  __device__ __forceinline__ void load_seen(float* tile, int stride, int64_t at) const {
    load_call(tile, stride, at, in.shape.key_dim,
              CallRows(scratch.nodes.query_at(row(0), head), scratch.nodes.heads * scratch.nodes.key_stride, source.span));
  }
  __device__ __forceinline__ float* dinverse(int r) const { return place_of(scratch.inverse, r, in.chunk.rows); }
  __device__ __forceinline__ float* dgate(int r) const { return place_of(scratch.gate, r, 1); }
  __device__ __forceinline__ float* dkey(int r) const { return place_of(scratch.key, r, scratch.nodes.key_stride); }
  __device__ __forceinline__ float* derase(int r) const { return place_of(scratch.erase, r, scratch.nodes.key_stride); }
  __device__ __forceinline__ float* dvalue(int r) const { return place_of(scratch.value, r, scratch.nodes.value_stride); }

  // Tables and X; with kQueries also R and, in the rows of dinverse, P.
  template <bool kQueries>
  __device__ __forceinline__ void prepare() const {
    const int64_t dk = in.shape.key_dim;
    [[maybe_unused]] const float scale = static_cast<float>(in.shape.scale);
    float *a = memory.a, *b = memory.b, *x = memory.x;
    TileSum gram;
    [[maybe_unused]] TileSum score;
    gram.clear();
    if constexpr (kQueries) score.clear();
    for (int64_t at = 0; at < dk; at += kTile) {
      __syncthreads();
      load_keys(a, kAlong, at);
      if constexpr (kQueries) load_queries(b, kAlong, at);
      __syncthreads();
      const auto across = [&](int k, int n) { return a[n * kAlong + k]; };
      multiply<kExact>(
          gram, delta_depth(at, dk), [&](int m, int k) { return a[m * kAlong + k]; }, across);
      if constexpr (kQueries) {
        multiply<kExact>(
            score, delta_depth(at, dk), [&](int m, int k) { return b[m * kAlong + k]; }, across);
      }
    }
    delta_load_rows(in, source, head, rows);
    gram.each([&](int i, int s, float& g) { x[i * kAcross + s] = s < i ? rows.write[i] * g : 0.0f; });
    if constexpr (kQueries) {
      score.each([&](int i, int s, float& p) { p = s <= i ? scale * p : 0.0f; });
      put_sum(score, b, kAlong);
    }
    for (int n = threadIdx.x; n < kSums; n += kThreads) memory.level[n] = 0;
    __syncthreads();
    delta_invert(x, memory.t, source.span.hi);
    if constexpr (kQueries) {
      TileSum sum;
      sum.clear();
      multiply<kExact>(
          sum, depth, [&](int m, int k) { return b[m * kAlong + k]; }, [&](int k, int n) { return x[k * kAcross + n]; });
      sum.each([&](int i, int s, float& r) { memory.r[i * kAcross + s] = s <= i ? r : 0.0f; });
      store_tile(b, kAlong, 0, in.chunk.rows, [&](int i) -> Target { return {dinverse(i)}; });
      __syncthreads();
    }
  }
};

}  // namespace lla::cuda
