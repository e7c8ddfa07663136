// SPDX-License-Identifier: Apache-2.0
// Joins the nodes of full chunks, level by level: N = Phi_right N_left + N_right, Phi = Phi_right Phi_left. Nodes that begin
// before the call take their left part from the history; a sequence has one of each level at most.
#include "cuda/portable/delta_rule_wide.h"

namespace lla::cuda {

namespace {

constexpr int kStraddleFloats = kTile * (kAlong + kAcross);

// One level: nodes of 2^level chunks that lie within the call.
template <bool kExact>
__global__ void __launch_bounds__(kWideThreads, kExact ? 1 : 2)
    delta_rule_join(DeltaInputs in, DeltaScratch scratch, int level) {
  float* memory = reinterpret_cast<float*>(shared_memory());
  const int64_t heads = scratch.pass_heads, dk = in.shape.key_dim, dv = in.shape.value_dim;
  const int64_t key_tiles = (dk + kWide - 1) / kWide, value_tiles = (dv + kWide - 1) / kWide;
  const int64_t tiles = key_tiles * (value_tiles + key_tiles), most = in.most_full() >> level;
  const int64_t tasks = in.batch.count * most * heads * tiles;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t part = task % tiles, head = scratch.first_head + task / tiles % heads,
                  number = task / tiles / heads % most;
    const Sequence& sequence = in.batch.sequences[task / tiles / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t size = int64_t{1} << level;
    const int64_t end = ((((chunks.range.first + size - 1) >> level) + number + 1) << level);
    if (end > chunks.range.first + chunks.range.full) continue;
    const int64_t middle = end - size / 2, row = part % key_tiles * kWide;
    const bool content = part / key_tiles < value_tiles;
    const int64_t column = (part / key_tiles - (content ? 0 : value_tiles)) * kWide, columns = content ? dv : dk;
    const int64_t stride = content ? scratch.value_stride : scratch.key_stride;
    const float* right = chunks.transition(scratch, level - 1, end, head);
    const float* left =
        content ? chunks.content(scratch, middle, head) : chunks.transition(scratch, level - 1, middle, head);
    float* out = content ? chunks.content(scratch, end, head) : chunks.transition(scratch, level, end, head);
    WideSum sum;
    sum.clear();
    add_wide_product<kExact, false, false>(memory, sum, {{right, LLA_F32}, scratch.key_stride, dk, dk},
                                           {{left, LLA_F32}, stride, dk, columns}, row, column, dk);
    put_wide(sum, out, stride, row, dk, column, columns, content);
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
                                   column, columns, false, chunks.transition(scratch, level, end, head), scratch.key_stride);
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
  const int64_t rows = (dk + kWide - 1) / kWide, tiles = rows * ((dv + kWide - 1) / kWide + rows);
  for (int level = 1; (in.most_full() >> level) > 0; ++level) {
    const int32_t status = launch(exact ? delta_rule_join<true> : delta_rule_join<false>,
                                  in.batch.count * (in.most_full() >> level) * heads * tiles, kWideThreads,
                                  kWideProductBytes, stream, in, scratch, level);
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
