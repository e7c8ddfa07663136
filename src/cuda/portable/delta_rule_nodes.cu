// SPDX-License-Identifier: Apache-2.0
// Joins the nodes of full chunks, level by level: N = Phi_right N_left + N_right, Phi = Phi_right Phi_left. Nodes that begin
// before the call take their left part from the history; a sequence has one of each level at most.
#include "cuda/portable/delta_rule.h"

namespace lla::cuda {

namespace {

constexpr int kWide = 2 * kTile + 8;  // row distance of two tiles side by side
constexpr int kJoinFloats = kTile * kAlong + kTile * kWide;
constexpr int kStraddleFloats = kTile * (kAlong + kAcross);

// out rows [row, row + 64), columns [column, column + 128): += or = left right, all in scratch memory.
template <bool kExact>
__device__ __forceinline__ void join(float* tile, const float* left, int64_t depth, int64_t left_stride, const float* right,
                                     int64_t right_stride, int64_t row, int64_t column, int64_t columns, bool adds,
                                     float* out) {
  float* wide = tile + kTile * kAlong;
  TileSum sum[2];
  sum[0].clear();
  sum[1].clear();
  const bool both = columns - column > kTile;
  for (int64_t at = 0; at < depth; at += kTile) {
    __syncthreads();
    load_tile(tile, kAlong, at, depth, [&](int r) -> Elements {
      if (row + r >= depth) return {};
      return {left + (row + r) * left_stride, LLA_F32};
    });
    for (int half = 0; half <= (both ? 1 : 0); ++half) {
      load_tile(wide + half * kTile, kWide, column + half * kTile, columns, [&](int r) -> Elements {
        if (at + r >= depth) return {};
        return {right + (at + r) * right_stride, LLA_F32};
      });
    }
    __syncthreads();
    const int steps = delta_depth(at, depth);
    const auto a = [&](int m, int k) { return tile[m * kAlong + k]; };
    multiply<kExact>(sum[0], steps, a, [&](int k, int n) { return wide[k * kWide + n]; });
    if (both) multiply<kExact>(sum[1], steps, a, [&](int k, int n) { return wide[k * kWide + kTile + n]; });
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    each_pair(sum[half], [&](int m, int n, float x, float y) {
      const int64_t c = column + half * kTile + n;
      if (row + m >= depth || c >= columns) return;
      float2* to = reinterpret_cast<float2*>(out + (row + m) * right_stride + c);
      *to = adds ? make_float2(to->x + x, to->y + y) : make_float2(x, y);
    });
  }
}

// One level: nodes of 2^level chunks that lie within the call.
template <bool kExact>
__global__ void __launch_bounds__(kThreads) delta_rule_join(DeltaInputs in, DeltaScratch scratch, int level) {
  float* tile = reinterpret_cast<float*>(shared_memory());
  const int64_t heads = scratch.pass_heads, dk = in.shape.key_dim, dv = in.shape.value_dim;
  const int64_t row_tiles = (dk + kTile - 1) / kTile;
  const int64_t value_pairs = (dv + 2 * kTile - 1) / (2 * kTile), key_pairs = (dk + 2 * kTile - 1) / (2 * kTile);
  const int64_t tiles = row_tiles * (value_pairs + key_pairs), most = in.most_full() >> level;
  const int64_t tasks = in.batch.count * most * heads * tiles;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t part = task % tiles, head = scratch.first_head + task / tiles % heads, number = task / tiles / heads % most;
    const Sequence& sequence = in.batch.sequences[task / tiles / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t size = int64_t{1} << level;
    const int64_t end = ((((chunks.range.first + size - 1) >> level) + number + 1) << level);
    if (end > chunks.range.first + chunks.range.full) continue;
    const int64_t middle = end - size / 2, row = part % row_tiles * kTile, pair = part / row_tiles;
    const float* right = chunks.transition(scratch, level - 1, end, head);
    if (pair < value_pairs) {
      join<kExact>(tile, right, dk, scratch.key_stride, chunks.content(scratch, middle, head), scratch.value_stride, row,
                   pair * 2 * kTile, dv, true, chunks.content(scratch, end, head));
    } else {
      join<kExact>(tile, right, dk, scratch.key_stride, chunks.transition(scratch, level - 1, middle, head),
                   scratch.key_stride, row, (pair - value_pairs) * 2 * kTile, dk, false,
                   chunks.transition(scratch, level, end, head));
    }
    __syncthreads();
  }
}

// out [rows][64 columns from `column`] += or = left right, by one block; right may be a node of the history.
template <bool kExact>
__device__ __forceinline__ void straddle_product(float* tile, const float* left, int64_t depth, int64_t left_stride,
                                                 const Elements& right, int64_t right_stride, int64_t column,
                                                 int64_t columns, bool adds, float* out, int64_t out_stride) {
  float* across = tile + kTile * kAlong;
  for (int64_t row = 0; row < depth; row += kTile) {
    TileSum sum;
    sum.clear();
    for (int64_t at = 0; at < depth; at += kTile) {
      __syncthreads();
      load_tile(tile, kAlong, at, depth, [&](int r) -> Elements {
        if (row + r >= depth) return {};
        return {left + (row + r) * left_stride, LLA_F32};
      });
      load_tile(across, kAcross, column, columns, [&](int r) -> Elements {
        if (at + r >= depth) return {};
        return delta_row(right, at + r, right_stride);
      });
      __syncthreads();
      multiply<kExact>(
          sum, delta_depth(at, depth), [&](int m, int k) { return tile[m * kAlong + k]; },
          [&](int k, int n) { return across[k * kAcross + n]; });
    }
    each_pair(sum, [&](int m, int n, float x, float y) {
      if (row + m >= depth || column + n >= columns) return;
      float2* to = reinterpret_cast<float2*>(out + (row + m) * out_stride + column + n);
      *to = adds ? make_float2(to->x + x, to->y + y) : make_float2(x, y);
    });
  }
  __syncthreads();
}

// The nodes that begin before the call and end in it, from the smallest on. First their transitions, then their contents.
template <bool kExact>
__global__ void __launch_bounds__(kThreads) delta_rule_straddle(DeltaInputs in, DeltaScratch scratch, bool contents) {
  float* tile = reinterpret_cast<float*>(shared_memory());
  const int64_t heads = scratch.pass_heads, dk = in.shape.key_dim, columns = contents ? in.shape.value_dim : dk;
  const int64_t parts = (columns + kTile - 1) / kTile, tasks = in.batch.count * heads * parts;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t column = task % parts * kTile, head = scratch.first_head + task / parts % heads;
    const Sequence& sequence = in.batch.sequences[task / parts / heads];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t first = chunks.range.first, last = first + chunks.range.full;
    if (first == 0) continue;
    for (int level = __ffsll(static_cast<long long>(first)); level < kDeltaLevels; ++level) {
      const int64_t begin = (first >> level) << level, middle = begin + (int64_t{1} << (level - 1));
      const int64_t end = begin + (int64_t{1} << level);
      if (end > last) break;
      if (middle > first) {  // the left half began before the call, the right half is all of the call
        const float* right = chunks.transition(scratch, level - 1, end, head);
        if (contents) {
          straddle_product<kExact>(tile, right, dk, scratch.key_stride, {chunks.content(scratch, middle, head), LLA_F32},
                                   scratch.value_stride, column, columns, true, chunks.content(scratch, end, head),
                                   scratch.value_stride);
        } else {
          straddle_product<kExact>(tile, right, dk, scratch.key_stride,
                                   {chunks.transition(scratch, level - 1, middle, head), LLA_F32}, scratch.key_stride,
                                   column, columns, false, chunks.transition(scratch, level, end, head),
                                   scratch.key_stride);
        }
        continue;
      }
      // The left half is history. What its level is summed with is read apart.
      const int entry = level - 1 - in.chunk.ratio_log;
      if (!contents || entry < 0 || entry >= in.separate) continue;
      const int32_t id = delta_history_node(in, sequence, entry);
      if (id < 0) continue;
      straddle_product<kExact>(tile, chunks.transition(scratch, level - 1, end, head), dk, scratch.key_stride,
                               {in.state.node(id, head), in.state.node_layout.dtype}, in.shape.value_dim, column, columns,
                               true, chunks.content(scratch, end, head), scratch.value_stride);
    }
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_nodes(const DeltaInputs& in, const DeltaScratch& scratch, bool exact, void* stream) {
  const int64_t heads = scratch.pass_heads, dk = in.shape.key_dim, dv = in.shape.value_dim;
  const int64_t rows = (dk + kTile - 1) / kTile;
  const int64_t tiles = rows * ((dv + 2 * kTile - 1) / (2 * kTile) + (dk + 2 * kTile - 1) / (2 * kTile));
  for (int level = 1; (in.most_full() >> level) > 0; ++level) {
    const int32_t status =
        launch(exact ? delta_rule_join<true> : delta_rule_join<false>,
               in.batch.count * (in.most_full() >> level) * heads * tiles, kThreads, kJoinFloats * sizeof(float), stream, in,
               scratch, level);
    if (status) return status;
  }
  if (in.most_full() == 0) return LLA_OK;
  for (const bool contents : {false, true}) {
    const int64_t columns = contents ? dv : dk;
    const int32_t status = launch(exact ? delta_rule_straddle<true> : delta_rule_straddle<false>,
                                  in.batch.count * heads * ((columns + kTile - 1) / kTile), kThreads,
                                  kStraddleFloats * sizeof(float), stream, in, scratch, contents);
    if (status) return status;
  }
  return LLA_OK;
}

int32_t load_delta_nodes() {
  int32_t status = load_kernel(delta_rule_join<true>);
  if (!status) status = load_kernel(delta_rule_join<false>);
  if (!status) status = load_kernel(delta_rule_straddle<true>);
  if (!status) status = load_kernel(delta_rule_straddle<false>);
  return status;
}

}  // namespace lla::cuda
