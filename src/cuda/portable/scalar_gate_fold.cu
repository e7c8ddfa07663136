// SPDX-License-Identifier: Apache-2.0
// The nodes of a step that reaches a border (scalar_gate_step.cu): the completed chunk's content, merged with the nodes of its
// past that end with it. Most steps have none.
#include <new>

#include "cuda/portable/scalar_gate.h"
#include "cuda/portable/scalar_gate_columns.h"

namespace lla::cuda::scalar_gate {

namespace {

constexpr int kSumStride = 68;  // of the products in shared memory
constexpr int kRowsAtOnce = 4;  // of a thread, which has kColumns columns of every 16th row

template <bool kExact>
struct FoldShared {
  Tile<kExact> key, value;
  alignas(16) float sum[64 * kSumStride];
  ChunkDecays decays;
  Past past;
  float total;  // log decay of the chunk
  alignas(16) char sources[sizeof(RowSources)];
};

// What a border does to the nodes of a step's past.
struct Border {
  int top;       // level of the node that the chunk completes
  int merged;    // levels of the past that it takes in
  bool oldest;   // whether there is an absorbing node
  bool absorbs;  // whether it takes in the chunk

  __device__ Border(const Geometry& geometry, int64_t chunk)
      : top(trailing_ones_of(chunk)),
        merged(min(top, geometry.apart)),
        oldest(has_oldest(geometry, chunk)),
        absorbs(top >= geometry.apart) {}
  // The new node has its levels in this order, newest first.
  template <class F>
  __device__ __forceinline__ void each_child(F f) const {
    for (int level = 0; level < merged; ++level) f(level);
    if (absorbs && oldest) f(kOldest);
  }
  // Whether `level` of the state is kept by this layer; whether it is the new one; else, of which past node it is a copy.
  __device__ __forceinline__ bool keeps(const Geometry& geometry, int level) const {
    return level == kAbsorbed ? geometry.absorbs : level < geometry.apart;
  }
  __device__ __forceinline__ bool is_new(int level) const { return level == kAbsorbed ? absorbs : level == top; }
  __device__ __forceinline__ int copied(int level) const { return level != kAbsorbed ? level : oldest ? kOldest : -1; }
};

// f(plan, level) for the nodes that are to be written.
template <class F>
__device__ __forceinline__ void each_node_to_store(const Sequence& sequence, F f) {
  for (int64_t item = 0; item < sequence.nodes_to_store_count; ++item) {
    const NodesToStore& plan = sequence.nodes_to_store[item];
    for (uint64_t rest = plan.write; rest; rest &= rest - 1) {
      const int level = __ffsll(static_cast<long long>(rest)) - 1;
      if (plan.node[level] >= 0) f(plan, level);
    }
  }
}

// One block: the border of one sequence and head, 64 columns of values.
template <bool kExact>
__global__ void __launch_bounds__(kThreads, 2) fold_steps(const __grid_constant__ Inputs in, int64_t tasks) {
  auto& shared = *reinterpret_cast<FoldShared<kExact>*>(shared_memory());
  const Geometry& geometry = in.geometry;
  const MixerShape& shape = in.shape;
  const int64_t heads = shape.heads, tiles = tiles_of(shape.value_dim);
  const int32_t dtype = in.state.node_layout.dtype;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t number = task / heads;
    const Walk walk(in, number / tiles);
    const Sequence& sequence = walk.sequence;
    if (sequence.nodes_to_store_count == 0 || walk.range.full == 0 || !takes_step(geometry, sequence)) continue;
    const int64_t head = in.head_of(task % heads), v0 = number % tiles * kTile, chunk = walk.range.first;
    const ChunkSpan span(sequence, geometry.chunk, chunk);
    if (threadIdx.x == 0)
      new (shared.sources) RowSources{ChunkRows(in, sequence, span, in.q, shape.group_of(head)),
                                      key_rows(in, sequence, span, head), value_rows(in, sequence, span, head)};
    __syncthreads();
    const RowSources& sources = *reinterpret_cast<const RowSources*>(shared.sources);
    const auto fill = [&](Tile<kExact>& tile, int64_t column, int64_t columns, const ChunkRows& rows) {
      const ChunkRows copy = rows;
      fill_tile<kExact>(tile, column, columns, copy);
    };
    fill(shared.value, v0, shape.value_dim, sources.values);
    fill(shared.key, 0, shape.key_dim, sources.keys);
    if (threadIdx.x < 32) {
      const float total = fill_decays(in, sequence, span, head, &shared.decays);
      if (threadIdx.x == 0) shared.total = total;
    }
    if (threadIdx.x / 32 == 1) list_past(in, walk, chunk, head, past_of(geometry, chunk, chunk), &shared.past);
    arrive();
    for (int i = threadIdx.x; i < 64 * 32; i += kThreads) {
      const int r = i / 32, c = 2 * (i % 32);
      const float factor = shared.decays.write[r] * shared.decays.key[7][r];
      const float2 x = read_pair<kExact>(shared.value, r, c);
      write_pair<kExact>(shared.value, r, c, factor * x.x, factor * x.y);
    }
    const Border border(geometry, chunk);
    const int64_t columns = shape.value_dim - v0;
    for (int64_t k0 = 0; k0 < shape.key_dim; k0 += kTile) {
      if (k0 > 0) {
        fill(shared.key, k0, shape.key_dim, sources.keys);
        arrive();
      } else {
        __syncthreads();
      }
      TileSum sum;
      sum.clear();
      multiply_tiles<kExact, Layout::Across, Layout::Across>(sum, depth_of(geometry.chunk.rows), shared.key, shared.value);
      each_pair(sum, [&](int r, int c, float x, float y) {
        *reinterpret_cast<float2*>(shared.sum + r * kSumStride + c) = make_float2(x, y);
      });
      __syncthreads();
      // Rows row, row + 16 ... of the tile, so that the loads of all of them are on their way at once.
      const int row = static_cast<int>(threadIdx.x) / 8, column = threadIdx.x % 8 * kColumns;
      const int rows = static_cast<int>(min(shape.key_dim - k0, int64_t{64}));
      const auto get = [&](const NodeSource& node, float (&x)[kRowsAtOnce][kColumns]) {
        const int64_t bytes = node.row * dtype_size(node.dtype);
        const char* data = static_cast<const char*>(node.data) + (k0 + row) * bytes;
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          const bool there = node.data && row + 16 * i < rows && column < columns;
          load_columns(data + 16 * i * bytes, node.dtype, v0 + column, there ? columns - column : 0, x[i]);
        }
      };
      float merged[kRowsAtOnce][kColumns], other[kRowsAtOnce][kColumns];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        get_columns(reinterpret_cast<const char*>(shared.sum + (row + 16 * i) * kSumStride + column), LLA_F32, merged[i]);
      }
      float decay = shared.total;
      border.each_child([&](int level) {
        const NodeSource& node = shared.past.node[level];
        const float factor = decay_of(decay);
        get(node, other);
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) merged[i][j] = fmaf(factor, other[i][j], merged[i][j]);  // as longer calls do
        }
        decay += node.decay;
      });
      each_node_to_store(sequence, [&](const NodesToStore& plan, int level) {
        if (!border.keeps(geometry, level)) return;
        const bool is_new = border.is_new(level);
        const int from = border.copied(level);
        char* to = in.state.node(plan.node[level], head);
        if (!is_new) get(from >= 0 ? shared.past.node[from] : NodeSource(), other);
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          if (row + 16 * i >= rows || column >= columns) continue;
#pragma unroll
          for (int j = 0; j < kColumns; ++j) other[i][j] = is_new ? merged[i][j] : other[i][j];
          store_columns(to + (k0 + row + 16 * i) * shape.value_dim * dtype_size(dtype), dtype, v0 + column, columns - column,
                        other[i]);
        }
        if (threadIdx.x == 0 && k0 == 0 && v0 == 0)
          store_element(in.state.node_decay(plan.node[level], head), LLA_F32, 0,
                        is_new ? decay : from >= 0 ? shared.past.node[from].decay : 0);
      });
      __syncthreads();
    }
  }
}

}  // namespace

int32_t launch_folds(const Inputs& in, void* stream) {
  const int64_t tasks = in.batch.count * tiles_of(in.shape.value_dim) * in.shape.heads;
  return in.exact() ? launch(fold_steps<true>, tasks, kThreads, sizeof(FoldShared<true>), stream, in, tasks)
                    : launch(fold_steps<false>, tasks, kThreads, sizeof(FoldShared<false>), stream, in, tasks);
}

int32_t load_folds() {
  const int32_t status = load_kernel(fold_steps<true>);
  return status == LLA_OK ? load_kernel(fold_steps<false>) : status;
}

}  // namespace lla::cuda::scalar_gate
