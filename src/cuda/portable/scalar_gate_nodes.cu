// SPDX-License-Identifier: Apache-2.0
// The nodes of the full chunks of a call: leaves by matrix products, then merges element by element.
#include "cuda/portable/scalar_gate.h"

namespace lla::cuda::scalar_gate {

namespace {

template <bool kExact>
struct LeavesShared {
  Tile<kExact> key[2], value;
  ChunkDecays decays;
};

// One block: one chunk and head, 64 columns of values. Content S = sum of exp(decay to the end) write k v^T.
template <bool kExact>
__global__ void __launch_bounds__(kThreads) leaves(const __grid_constant__ Inputs in, int64_t tasks) {
  auto& shared = *reinterpret_cast<LeavesShared<kExact>*>(shared_memory());
  const Geometry& geometry = in.geometry;
  const int64_t tiles = tiles_of(in.shape.value_dim), heads = in.shape.heads;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = in.head_of(task % heads), v0 = task / heads % tiles * kTile;
    int64_t slot;
    const int64_t b = geometry.slots.find(in.batch, task / heads / tiles, &slot);
    const Walk walk(in, b);
    const int64_t chunk = walk.range.first + slot - walk.slot;
    if (!walk.makes(chunk)) continue;
    const ChunkSpan span(walk.sequence, geometry.chunk, chunk);
    const ChunkRows keys = key_rows(in, walk.sequence, span, head), values = value_rows(in, walk.sequence, span, head);
    fill_tile<kExact>(shared.value, v0, in.shape.value_dim, values);
    fill_tile<kExact>(shared.key[0], 0, in.shape.key_dim, keys);
    if (threadIdx.x < 32) {
      const float total = fill_decays(in, walk.sequence, span, head, &shared.decays);
      if (threadIdx.x == 0 && v0 == 0) in.scratch.leaf_decay[slot * heads + head] = total;
    }
    arrive();
    for (int i = threadIdx.x; i < 64 * 32; i += kThreads) {
      const int r = i / 32, c = 2 * (i % 32);
      const float factor = shared.decays.write[r] * shared.decays.key[7][r];
      const float2 x = read_pair<kExact>(shared.value, r, c);
      write_pair<kExact>(shared.value, r, c, factor * x.x, factor * x.y);
    }
    char* node = node_at(in, in.scratch.nodes, slot, head);
    int side = 0;
    for (int64_t k0 = 0; k0 < in.shape.key_dim; k0 += kTile, side ^= 1) {
      if (k0 + kTile < in.shape.key_dim) fill_tile<kExact>(shared.key[side ^ 1], k0 + kTile, in.shape.key_dim, keys);
      if (k0 == 0) __syncthreads();
      TileSum sum;
      sum.clear();
      multiply_tiles<kExact, Layout::Across, Layout::Across>(sum, depth_of(geometry.chunk.rows), shared.key[side],
                                                             shared.value);
      __syncthreads();
      set_node_tile<kExact>(in, node, k0, v0, sum, shared.key[side]);
      arrive();
    }
  }
}

// Fused, whatever the compiler makes of the surroundings: the fold of a step must have the same bits (scalar_gate_fold.h).
__device__ __forceinline__ float4 add_scaled(float4 a, float factor, float4 b) {
  return make_float4(fmaf(factor, b.x, a.x), fmaf(factor, b.y, a.y), fmaf(factor, b.z, a.z), fmaf(factor, b.w, a.w));
}
__device__ __forceinline__ float4 rounded4(int32_t dtype, float4 a) {
  return make_float4(rounded(dtype, a.x), rounded(dtype, a.y), rounded(dtype, a.z), rounded(dtype, a.w));
}

// Elements 4 e ... 4 e + 3 of a node, as scratch numbers them.
__device__ __forceinline__ float4 node_elements(const Inputs& in, const NodeSource& node, int64_t e) {
  if (!node.data) return make_float4(0, 0, 0, 0);
  const int64_t row = 4 * e / in.geometry.node_row, column = 4 * e % in.geometry.node_row;
  if (column >= node.row) return make_float4(0, 0, 0, 0);
  return load4(node.data, node.dtype, row * node.row + column, node.row - column);
}

// What a walk over elements needs of a task: which ones.
struct Elements4 {
  int64_t head, index;  // of four elements
  bool writer;          // the one thread of a head that writes its scalars
  bool there;

  __device__ Elements4(const Inputs& in, int64_t task, int64_t blocks)
      : head(task / blocks % in.shape.heads),
        index(task % blocks * kWalkThreads + threadIdx.x),
        writer(index == 0),
        there(4 * index < in.geometry.node_size) {}
  // The next ones of the thread, where blocks are too few for all elements.
  __device__ __forceinline__ void next(const Inputs& in, int64_t blocks) {
    index += blocks * kWalkThreads;
    writer = false;
    there = 4 * index < in.geometry.node_size;
  }
};

// Log-linear, first step: inside segments. The nodes of levels 0 ... 5 wait in registers for the chunk that takes them in.
__global__ void __launch_bounds__(kWalkThreads)
    merge_segments(const __grid_constant__ Inputs in, int64_t blocks, int64_t tasks) {
  const Geometry& geometry = in.geometry;
  const int64_t heads = in.shape.heads;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    int64_t number;
    const int64_t b = geometry.segments.find(in.batch, task / blocks / heads, &number);
    const Walk walk(in, b);
    const int64_t segment = (walk.range.first >> kSegmentLog) + number - geometry.segments.first(in.batch, b);
    const int64_t begin = max(segment << kSegmentLog, walk.range.first);
    const int64_t end = min((segment + 1) << kSegmentLog, walk.range.first + walk.range.full);
    if (begin >= end) continue;
    for (Elements4 at(in, task, blocks); at.there; at.next(in, blocks)) {
      float4 wait[kSegmentLog];
      float wait_decay[kSegmentLog];
#pragma unroll
      for (int j = 0; j < kSegmentLog; ++j) {
        NodeSource node;
        if (((begin >> j) & 1) && j < geometry.apart) node = history_node(in, walk.sequence, j, at.head);
        wait[j] = node_elements(in, node, at.index);
        wait_decay[j] = node.decay;
      }
      const auto node_of = [&](int64_t c) { return node_at(in, in.scratch.nodes, walk.slot_of(c), at.head); };
      constexpr int kAhead = 4;  // leaves that are on their way
      float4 coming[kAhead];
      float coming_decay[kAhead];
      const auto fetch = [&](int64_t c, float4& node, float& decay) {
        if (c >= end) return;
        node = get_node4(in, node_of(c), at.index);
        decay = in.scratch.leaf_decay[walk.slot_of(c) * heads + at.head];
      };
#pragma unroll
      for (int i = 0; i < kAhead; ++i) fetch(begin + i, coming[i], coming_decay[i]);
      for (int64_t c = begin; c < end; ++c) {
        const int level = min(trailing_ones_of(c), kSegmentLog);
        const int64_t scalar = walk.slot_of(c) * heads + at.head;
        float4 sum = coming[0];
        float decay = coming_decay[0];
#pragma unroll
        for (int i = 0; i + 1 < kAhead; ++i) {
          coming[i] = coming[i + 1];
          coming_decay[i] = coming_decay[i + 1];
        }
        fetch(c + kAhead, coming[kAhead - 1], coming_decay[kAhead - 1]);
#pragma unroll
        for (int j = 0; j < kSegmentLog; ++j) {
          if (j >= level) continue;
          sum = add_scaled(sum, decay_of(decay), wait[j]);
          const int64_t child = c - (int64_t{1} << j);
          if (at.writer && child >= walk.range.first) in.scratch.up[walk.slot_of(child) * heads + at.head] = decay;
          decay += wait_decay[j];
        }
        const bool ends_segment = level == kSegmentLog;
        const bool rounds = geometry.node_dtype != LLA_F32 && !ends_segment && ((c + 1) & (geometry.chunk.ratio - 1)) == 0;
        if (rounds) sum = rounded4(geometry.node_dtype, sum);
        if (rounds || level > 0) set_node4(in, node_of(c), at.index, sum);
#pragma unroll
        for (int j = 0; j < kSegmentLog; ++j) {
          if (j != level) continue;
          wait[j] = sum;
          wait_decay[j] = decay;
        }
        if (at.writer) {
          in.scratch.inner_decay[scalar] = decay;
          if (!ends_segment) in.scratch.decay[scalar] = decay;
        }
      }
    }
  }
}

// Log-linear, second step: the last chunks of segments take in the nodes of levels from 6 on.
__global__ void __launch_bounds__(kWalkThreads)
    merge_upper(const __grid_constant__ Inputs in, int64_t blocks, int64_t tasks) {
  const Geometry& geometry = in.geometry;
  const int64_t heads = in.shape.heads;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const Walk walk(in, task / blocks / heads);
    for (Elements4 at(in, task, blocks); at.there; at.next(in, blocks)) {
      const int64_t first = walk.range.first, end = first + walk.range.full;
      float wait_decay[64];  // of the node of each level that waits
      for (int64_t c = first | (kSegment - 1); c < end; c += kSegment) {
        const int level = trailing_ones_of(c);
        const int64_t slot = walk.slot_of(c), scalar = slot * heads + at.head;
        char* node = node_at(in, in.scratch.nodes, slot, at.head);
        float4 sum = get_node4(in, node, at.index);
        float decay = in.scratch.inner_decay[scalar];
        for (int j = kSegmentLog; j < level; ++j) {
          const int64_t child = c - (int64_t{1} << j);
          if (child >= first) {
            const int64_t child_slot = walk.slot_of(child);
            sum = add_scaled(sum, decay_of(decay),
                             get_node4(in, node_at(in, in.scratch.nodes, child_slot, at.head), at.index));
            if (at.writer) in.scratch.up[child_slot * heads + at.head] = decay;
            decay += wait_decay[j];
          } else if (j < geometry.apart) {
            const NodeSource other = history_node(in, walk.sequence, j, at.head);
            sum = add_scaled(sum, decay_of(decay), node_elements(in, other, at.index));
            decay += other.decay;
          }
        }
        if (geometry.node_dtype != LLA_F32) sum = rounded4(geometry.node_dtype, sum);
        set_node4(in, node, at.index, sum);
        wait_decay[level] = decay;
        if (at.writer) in.scratch.decay[scalar] = decay;
      }
    }
  }
}

// Linear: slot c becomes the state after chunk c.
__global__ void __launch_bounds__(kWalkThreads) chain(const __grid_constant__ Inputs in, int64_t blocks, int64_t tasks) {
  constexpr int kAhead = 8;  // leaves that are on their way
  const int64_t heads = in.shape.heads;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const Walk walk(in, task / blocks / heads);
    if (walk.range.full <= 0) continue;
    for (Elements4 at(in, task, blocks); at.there; at.next(in, blocks)) {
      const NodeSource history = history_node(in, walk.sequence, kOldest, at.head);
      float4 sum = node_elements(in, history, at.index);
      float total = history.decay;
      for (int64_t c0 = 0; c0 < walk.range.full; c0 += kAhead) {
        float4 leaf[kAhead];
        float decay[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (c0 + i >= walk.range.full) continue;
          const int64_t slot = walk.slot + c0 + i;
          leaf[i] = get_node4(in, node_at(in, in.scratch.nodes, slot, at.head), at.index);
          decay[i] = in.scratch.leaf_decay[slot * heads + at.head];
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (c0 + i >= walk.range.full) continue;
          const int64_t slot = walk.slot + c0 + i;
          sum = add_scaled(leaf[i], decay_of(decay[i]), sum);
          set_node4(in, node_at(in, in.scratch.nodes, slot, at.head), at.index, sum);
          total += decay[i];
          if (at.writer) {
            in.scratch.decay[slot * heads + at.head] = total;
            if (c0 + i > 0) in.scratch.up[(slot - 1) * heads + at.head] = decay[i];
          }
        }
      }
    }
  }
}

}  // namespace

int32_t launch_nodes(const Inputs& in, bool exact, void* stream) {
  const BatchView& batch = in.batch;
  const int64_t heads = in.shape.heads;
  // Where sequences fill one chunk at most, as in decoding, one block takes the whole node: most find nothing to do.
  const int64_t blocks = in.geometry.slots.most <= 1 ? 1 : (in.geometry.node_size / 4 + kWalkThreads - 1) / kWalkThreads;
  const int64_t leaf_tasks = in.geometry.slots.tasks(batch) * tiles_of(in.shape.value_dim) * heads;
  const int64_t segment_tasks = in.geometry.segments.tasks(batch) * heads * blocks;
  const int64_t sequence_tasks = batch.count * heads * blocks;
  int32_t status = launch(exact ? leaves<true> : leaves<false>, leaf_tasks, kThreads,
                          exact ? sizeof(LeavesShared<true>) : sizeof(LeavesShared<false>), stream, in, leaf_tasks);
  if (in.geometry.linear) {
    if (status == LLA_OK) status = launch(chain, sequence_tasks, kWalkThreads, 0, stream, in, blocks, sequence_tasks);
    return status;
  }
  if (status == LLA_OK) status = launch(merge_segments, segment_tasks, kWalkThreads, 0, stream, in, blocks, segment_tasks);
  const bool upper = (batch.most_length >> in.geometry.chunk.rows_log) >= kSegment;
  if (status == LLA_OK && upper)
    status = launch(merge_upper, sequence_tasks, kWalkThreads, 0, stream, in, blocks, sequence_tasks);
  return status;
}

int32_t load_nodes_kernels() {
  int32_t status = load_kernel(leaves<true>);
  if (status == LLA_OK) status = load_kernel(leaves<false>);
  if (status == LLA_OK) status = load_kernel(merge_segments);
  if (status == LLA_OK) status = load_kernel(merge_upper);
  if (status == LLA_OK) status = load_kernel(chain);
  return status;
}

}  // namespace lla::cuda::scalar_gate
