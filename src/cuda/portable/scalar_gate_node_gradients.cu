// SPDX-License-Identifier: Apache-2.0
// Gradients of nodes: from the rows that read them, then down through the merges; those of the history's nodes go to the
// initial gradient.
#include "cuda/portable/scalar_gate_backward.h"

namespace lla::cuda::scalar_gate {

namespace {

struct WeightsShared {
  ChunkDecays decays;
  Past past;
};

// The weights with which the rows of a chunk read the entries of its past. One block: one chunk and head.
__global__ void __launch_bounds__(kThreads) read_weights(const __grid_constant__ Backward a, int64_t tasks) {
  WeightsShared& shared = *reinterpret_cast<WeightsShared*>(shared_memory());
  const Inputs& in = a.in;
  const int64_t heads = in.shape.heads;
  const float scale = static_cast<float>(in.shape.scale);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = task % heads;
    int64_t place;
    const int64_t b = in.geometry.places.find(in.batch, task / heads, &place);
    const Walk walk(in, b);
    const int64_t order = place - in.geometry.places.first(in.batch, b), chunk = walk.range.first + order;
    if (order >= walk.range.count) continue;
    const ChunkSpan span(walk.sequence, in.geometry.chunk, chunk);
    const uint64_t past = past_of(in.geometry, walk.range.first, chunk);
    if (span.lo >= span.hi || past == 0) continue;
    if (threadIdx.x < 32) fill_decays(in, walk.sequence, span, head, &shared.decays);
    if (threadIdx.x / 32 == 1) list_past(in, walk, chunk, head, past, &shared.past);
    __syncthreads();
    const int r = threadIdx.x % 64;
    const bool live = r >= span.lo && r < span.hi;
    int entry = 0;
    for (uint64_t left = past; left; left &= left - 1, ++entry) {
      if (entry % 2 != static_cast<int>(threadIdx.x) / 64) continue;
      const int level = __ffsll(static_cast<long long>(left)) - 1;
      float weight = 0;
      if (live) weight = scale * shared.decays.row[7][r] * decay_of(shared.past.newer[level]);
      if (live && in.shape.levels > 0)
        weight *= load_element(in.lambda.at(walk.sequence.index, span.row(walk.sequence, r), head), in.lambda.dtype,
                               entry_column(in, level));
      a.weight_rows(place, head, entry)[r] = weight;
    }
    __syncthreads();
  }
}

template <bool kExact>
struct OwnShared {
  Tile<kExact> query[2][2], dy[2];  // by turns
  float weight[2][64];
};

// Adds the gradient that the rows of the chunks [from, to) give to their entry `level`: two tiles of keys from `k0` on, one
// of values. The rows of the next chunk are fetched while products are made.
template <bool kExact>
__device__ __forceinline__ void add_readers(const Backward& a, const Walk& walk, int64_t b, int64_t from, int64_t to,
                                            int level, int64_t head, int64_t k0, int64_t v0, OwnShared<kExact>& shared,
                                            TileSum (&sum)[2]) {
  const Inputs& in = a.in;
  const int64_t first_place = in.geometry.places.first(in.batch, b);
  const bool both = k0 + kTile < in.shape.key_dim;
  int depth = 0, next_depth = 0;
  // The first chunk from u on that has rows of the call.
  const auto find = [&](int64_t u) {
    for (; u < to; ++u) {
      const ChunkSpan span(walk.sequence, in.geometry.chunk, u);
      if (span.lo < span.hi) break;
    }
    return u;
  };
  const auto fill = [&](int64_t u, int side) {
    const ChunkSpan span(walk.sequence, in.geometry.chunk, u);
    const uint64_t past = past_of(in.geometry, walk.range.first, u);
    const int entry = __popcll(past & ((uint64_t{1} << level) - 1));
    const float* weights = a.weight_rows(first_place + u - walk.range.first, head, entry);
    if (threadIdx.x < 16) copy_async16(shared.weight[side] + 4 * threadIdx.x, weights + 4 * threadIdx.x);
    fill_tile<kExact>(shared.dy[side], v0, in.shape.value_dim, call_rows(in, walk.sequence, span, a.dy, head));
    const ChunkRows queries = call_rows(in, walk.sequence, span, in.q, in.shape.group_of(head));
    fill_tile<kExact>(shared.query[side][0], k0, in.shape.key_dim, queries);
    if (both) fill_tile<kExact>(shared.query[side][1], k0 + kTile, in.shape.key_dim, queries);
    next_depth = depth_of(span.hi);
  };
  int64_t u = find(from);
  if (u >= to) return;
  fill(u, 0);
  for (int side = 0; u < to; side ^= 1) {
    arrive();
    depth = next_depth;
    for (int i = threadIdx.x; i < 64 * 32; i += kThreads) {
      const int r = i / 32, c = 2 * (i % 32);
      const float2 x = read_pair<kExact>(shared.dy[side], r, c);
      write_pair<kExact>(shared.dy[side], r, c, shared.weight[side][r] * x.x, shared.weight[side][r] * x.y);
    }
    u = find(u + 1);
    if (u < to) fill(u, side ^ 1);
    __syncthreads();
    multiply_tiles<kExact, Layout::Across, Layout::Across>(sum[0], depth, shared.query[side][0], shared.dy[side]);
    if (both) multiply_tiles<kExact, Layout::Across, Layout::Across>(sum[1], depth, shared.query[side][1], shared.dy[side]);
  }
  __syncthreads();
}

// The gradient of every node of the call from its readers. One block: one node and head, 128 rows of keys, 64 columns.
template <bool kExact>
__global__ void __launch_bounds__(kThreads) own_gradients(const __grid_constant__ Backward a, int64_t tasks) {
  auto& shared = *reinterpret_cast<OwnShared<kExact>*>(shared_memory());
  const Inputs& in = a.in;
  const int64_t heads = in.shape.heads, v_tiles = tiles_of(in.shape.value_dim),
                k_pairs = (tiles_of(in.shape.key_dim) + 1) / 2;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = in.head_of(task % heads), v0 = task / heads % v_tiles * kTile;
    const int64_t k0 = task / heads / v_tiles % k_pairs * 2 * kTile;
    int64_t slot;
    const int64_t b = in.geometry.slots.find(in.batch, task / heads / v_tiles / k_pairs, &slot);
    const Walk walk(in, b);
    const int64_t chunk = walk.range.first + slot - walk.slot, last = walk.range.first + walk.range.count;
    if (!walk.makes(chunk)) continue;
    const int level = in.geometry.linear ? kOldest : trailing_ones_of(chunk);
    const int64_t to = chunk + 1 + (in.geometry.linear ? 1 : int64_t{1} << level);
    TileSum sum[2];
    sum[0].clear();
    sum[1].clear();
    add_readers<kExact>(a, walk, b, chunk + 1, min(to, last), level, head, k0, v0, shared, sum);
    char* node = node_at(in, a.scratch.grads, slot, head);
    set_node_tile<kExact>(in, node, k0, v0, sum[0], shared.query[0][0]);
    if (k0 + kTile < in.shape.key_dim) set_node_tile<kExact>(in, node, k0 + kTile, v0, sum[1], shared.query[0][1]);
    __syncthreads();
  }
}

// The element that a thread of a walk downward holds, and its share of flows.
struct DownWalk {
  const Backward& a;
  const Walk& walk;
  int64_t head, index;
  bool there;
  int64_t chunks;  // final_chunks

  static constexpr int kAhead = 2;  // chunks that are on their way
  struct Loaded {
    float up = 0;
    float4 own = make_float4(0, 0, 0, 0), node = make_float4(0, 0, 0, 0);
  };
  __device__ __forceinline__ Loaded load(int64_t c, int64_t begin) const {
    Loaded loaded;
    if (!there || c < begin) return loaded;
    const int64_t slot = walk.slot_of(c);
    const int64_t parent = c + (a.in.geometry.linear ? 1 : int64_t{1} << trailing_ones_of(c));
    if (walk.makes(parent)) loaded.up = a.in.scratch.up[slot * a.in.shape.heads + head];
    loaded.own = get_node4(a.in, node_at(a.in, a.scratch.grads, slot, head), index);
    loaded.node = get_node4(a.in, node_at(a.in, a.in.scratch.nodes, slot, head), index);
    return loaded;
  }
  // Adds the final state's part and what comes from the parent's gradient; stores; returns the sum.
  __device__ __forceinline__ float4 visit(int64_t c, int level, bool has_parent, float4 parent, const Loaded& loaded) const {
    const Inputs& in = a.in;
    const int64_t slot = walk.slot_of(c), scalar = slot * in.shape.heads + head;
    float4 sum = loaded.own;
    const float4 node = loaded.node;
    float through = 0, into_final = 0;
    const auto add = [&](float4 x, float factor, float& flow) {
      x = make_float4(factor * x.x, factor * x.y, factor * x.z, factor * x.w);
      flow = node.x * x.x + node.y * x.y + node.z * x.z + node.w * x.w;
      sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    };
    if (has_parent) add(parent, decay_of(loaded.up), through);
    if (c < chunks) {
      const NodeSource final = final_gradient(a, walk, level, c + 1, head);
      if (final.data && there) {
        const int64_t row = 4 * index / in.geometry.node_row, column = 4 * index % in.geometry.node_row;
        if (column < final.row)
          add(load4(final.data, final.dtype, row * final.row + column, final.row - column), decay_of(final.decay),
              into_final);
      }
    }
    if (there) set_node4(in, node_at(in, a.scratch.grads, slot, head), index, sum);
    through = warp_sum(through);
    into_final = warp_sum(into_final);
    const int64_t warp = index / 32;
    if (threadIdx.x % 32 == 0 && warp < a.warps) {
      float* partial = a.scratch.partials + (scalar * a.warps + warp) * 2;
      partial[0] = through;
      partial[1] = into_final;
    }
    return sum;
  }
};

// Log-linear: the last chunks of segments, from the newest to the oldest.
__global__ void __launch_bounds__(kWalkThreads)
    down_upper(const __grid_constant__ Backward a, int64_t blocks, int64_t tasks) {
  const Inputs& in = a.in;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = task / blocks % in.shape.heads, index = task % blocks * kWalkThreads + threadIdx.x;
    const Walk walk(in, task / blocks / in.shape.heads);
    const DownWalk down{a,
                        walk,
                        head,
                        index,
                        4 * index < in.geometry.node_size,
                        a.gradient.nodes.base ? final_chunks(in, walk.sequence) : 0};
    const int64_t end = walk.range.first + walk.range.full;
    for (int64_t c = (end & ~int64_t{kSegment - 1}) - 1; c >= walk.range.first; c -= kSegment) {
      const int level = trailing_ones_of(c);
      const int64_t parent = c + (int64_t{1} << level);
      float4 above = make_float4(0, 0, 0, 0);
      if (walk.makes(parent) && down.there)
        above = get_node4(in, node_at(in, a.scratch.grads, walk.slot_of(parent), head), index);
      down.visit(c, level, walk.makes(parent), above, down.load(c, walk.range.first));
    }
  }
}

// Log-linear: inside segments. The parent of a node is the last one visited that is of a higher level.
__global__ void __launch_bounds__(kWalkThreads)
    down_segments(const __grid_constant__ Backward a, int64_t blocks, int64_t tasks) {
  const Inputs& in = a.in;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = task / blocks % in.shape.heads, index = task % blocks * kWalkThreads + threadIdx.x;
    int64_t number;
    const int64_t b = in.geometry.segments.find(in.batch, task / blocks / in.shape.heads, &number);
    const Walk walk(in, b);
    const int64_t segment = (walk.range.first >> kSegmentLog) + number - in.geometry.segments.first(in.batch, b);
    const int64_t begin = max(segment << kSegmentLog, walk.range.first);
    const int64_t end = min((segment + 1) << kSegmentLog, walk.range.first + walk.range.full);
    const DownWalk down{a,
                        walk,
                        head,
                        index,
                        4 * index < in.geometry.node_size,
                        a.gradient.nodes.base ? final_chunks(in, walk.sequence) : 0};
    float4 above[kSegmentLog];
#pragma unroll
    for (int j = 0; j < kSegmentLog; ++j) above[j] = make_float4(0, 0, 0, 0);
    DownWalk::Loaded coming[DownWalk::kAhead];
#pragma unroll
    for (int i = 0; i < DownWalk::kAhead; ++i) coming[i] = down.load(end - 1 - i, begin);
    for (int64_t c = end - 1; c >= begin; --c) {
      const int level = min(trailing_ones_of(c), kSegmentLog);
      const DownWalk::Loaded loaded = coming[0];
#pragma unroll
      for (int i = 0; i + 1 < DownWalk::kAhead; ++i) coming[i] = coming[i + 1];
      coming[DownWalk::kAhead - 1] = down.load(c - DownWalk::kAhead, begin);
      float4 sum = loaded.own;
      if (level < kSegmentLog) {  // the other one was done before
        sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < kSegmentLog; ++j) {
          if (j == level) sum = above[j];
        }
        sum = down.visit(c, level, walk.makes(c + (int64_t{1} << level)), sum, loaded);
      }
#pragma unroll
      for (int j = 0; j < kSegmentLog; ++j) {
        if (j < level) above[j] = sum;
      }
    }
  }
}

// Linear: from the newest state to the oldest.
__global__ void __launch_bounds__(kWalkThreads)
    down_chain(const __grid_constant__ Backward a, int64_t blocks, int64_t tasks) {
  const Inputs& in = a.in;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = task / blocks % in.shape.heads, index = task % blocks * kWalkThreads + threadIdx.x;
    const Walk walk(in, task / blocks / in.shape.heads);
    const DownWalk down{a,
                        walk,
                        head,
                        index,
                        4 * index < in.geometry.node_size,
                        a.gradient.nodes.base ? final_chunks(in, walk.sequence) : 0};
    float4 above = make_float4(0, 0, 0, 0);
    const int64_t begin = walk.range.first, end = begin + walk.range.full;
    DownWalk::Loaded coming[DownWalk::kAhead];
#pragma unroll
    for (int i = 0; i < DownWalk::kAhead; ++i) coming[i] = down.load(end - 1 - i, begin);
    for (int64_t c = end - 1; c >= begin; --c) {
      const DownWalk::Loaded loaded = coming[0];
#pragma unroll
      for (int i = 0; i + 1 < DownWalk::kAhead; ++i) coming[i] = coming[i + 1];
      coming[DownWalk::kAhead - 1] = down.load(c - DownWalk::kAhead, begin);
      above = down.visit(c, kOldest, c + 1 < end, above, loaded);
    }
  }
}

// Sums of the partials, one warp for each node and head.
__global__ void __launch_bounds__(kWalkThreads) sum_partials(const __grid_constant__ Backward a, int64_t tasks) {
  const Inputs& in = a.in;
  const int lane = threadIdx.x % 32;
  for (int64_t task = blockIdx.x * (kWalkThreads / 32) + threadIdx.x / 32; task < tasks;
       task += gridDim.x * int64_t{kWalkThreads / 32}) {
    int64_t slot;
    const Walk walk(in, in.geometry.slots.find(in.batch, task / in.shape.heads, &slot));
    if (!walk.makes(walk.range.first + slot - walk.slot)) continue;
    const int64_t scalar = slot * in.shape.heads + task % in.shape.heads;
    float through = 0, into_final = 0;
    for (int64_t w = lane; w < a.warps; w += 32) {
      through += a.scratch.partials[(scalar * a.warps + w) * 2];
      into_final += a.scratch.partials[(scalar * a.warps + w) * 2 + 1];
    }
    through = warp_sum(through);
    into_final = warp_sum(into_final);
    if (lane == 0) {
      a.scratch.flows[scalar * 2] = through;
      a.scratch.flows[scalar * 2 + 1] = into_final;
    }
  }
}

// Flows of the history's nodes. One warp: one entry of one head.
__global__ void __launch_bounds__(kWalkThreads) old_flows(const __grid_constant__ Backward a, int64_t tasks) {
  const Inputs& in = a.in;
  const int lane = threadIdx.x % 32;
  for (int64_t task = blockIdx.x * (kWalkThreads / 32) + threadIdx.x / 32; task < tasks;
       task += gridDim.x * int64_t{kWalkThreads / 32}) {
    const int level = a.level_of_index(static_cast<int>(task % a.levels));
    const int64_t head = task / a.levels % in.shape.heads;
    const Walk walk(in, task / a.levels / in.shape.heads);
    const int64_t first = walk.range.first;
    float through = 0, into_final = 0;
    if (!walk.sequence.padding && ((past_of(in.geometry, first, first) >> level) & 1)) {
      const NodeSource node = history_node(in, walk.sequence, level, head);
      const int64_t end = in.geometry.linear ? first : level == kOldest ? 0 : bucket_end(first, level);
      const NodeSource final = final_gradient(a, walk, level, end, head);
      const int64_t parent = old_parent(in, walk, level), size = in.shape.key_dim * in.shape.value_dim;
      const float up = parent < 0 ? 0 : decay_of(old_up(in, walk, level, parent, head)), down = decay_of(final.decay);
      const char* above = parent < 0 ? nullptr : node_at(in, a.scratch.grads, walk.slot_of(parent), head);
      for (int64_t e = lane; e < size && node.data; e += 32) {
        const float x = load_element(node.data, node.dtype, e);
        const int64_t row = e / in.shape.value_dim, column = e % in.shape.value_dim;
        if (above) through += x * (up * load_element(above, in.geometry.scratch_dtype, row * in.geometry.node_row + column));
        if (final.data) into_final += x * (down * load_element(final.data, final.dtype, e));
      }
    }
    through = warp_sum(through);
    into_final = warp_sum(into_final);
    if (lane == 0) {
      a.scratch.old_flows[task * 2] = through;
      a.scratch.old_flows[task * 2 + 1] = into_final;
    }
  }
}

// Gradients of the history's nodes, into the initial gradient. Tasks as own_gradients(), of entries of sequences.
template <bool kExact>
__global__ void __launch_bounds__(kThreads) initial_nodes(const __grid_constant__ Backward a, int64_t tasks) {
  auto& shared = *reinterpret_cast<OwnShared<kExact>*>(shared_memory());
  const Inputs& in = a.in;
  const int64_t heads = in.shape.heads, v_tiles = tiles_of(in.shape.value_dim),
                k_pairs = (tiles_of(in.shape.key_dim) + 1) / 2;
  const int state_nodes = kNodes;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = task % heads, v0 = task / heads % v_tiles * kTile;
    const int64_t k0 = task / heads / v_tiles % k_pairs * 2 * kTile, entry = task / heads / v_tiles / k_pairs;
    const int state_level = static_cast<int>(entry % state_nodes);
    const int64_t b = entry / state_nodes;
    const Walk walk(in, b);
    if (walk.sequence.padding || walk.sequence.initial_gradient.tail < 0) continue;
    const int32_t id = walk.sequence.initial_gradient.node[state_level];
    const int level = state_level == kAbsorbed ? kOldest : state_level + in.geometry.chunk.ratio_log;
    if (id < 0 || (level == kOldest ? !in.geometry.absorbs : level >= in.geometry.apart)) continue;
    const int64_t first = walk.range.first, last = first + walk.range.count;
    const bool live = (past_of(in.geometry, first, first) >> level) & 1;
    TileSum sum[2];
    sum[0].clear();
    sum[1].clear();
    int64_t end = 0, parent = -1;
    NodeSource final;
    float up = 0;
    if (live) {
      end = in.geometry.linear ? first : level == kOldest ? 0 : bucket_end(first, level);
      int64_t to = last;
      if (in.geometry.linear) to = min(last, first + 1);
      if (level != kOldest) to = min(last, end + (int64_t{1} << level));
      add_readers<kExact>(a, walk, b, first, to, level, head, k0, v0, shared, sum);
      parent = old_parent(in, walk, level);
      final = final_gradient(a, walk, level, end, head);
      if (parent >= 0) up = decay_of(old_up(in, walk, level, parent, head));
    }
    const char* above = parent < 0 ? nullptr : node_at(in, a.scratch.grads, walk.slot_of(parent), head);
    const float down = decay_of(final.decay);
    char* to = a.gradient.node(id, head);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i].each([&](int row, int column, float& x) {
        const int64_t r = k0 + i * kTile + row, c = v0 + column;
        if (r >= in.shape.key_dim || c >= in.shape.value_dim) return;
        float value = x;
        if (above) value += up * load_element(above, in.geometry.scratch_dtype, r * in.geometry.node_row + c);
        if (final.data) value += down * load_element(final.data, final.dtype, r * in.shape.value_dim + c);
        store_element(to, a.gradient.node_layout.dtype, r * in.shape.value_dim + c, value);
      });
    }
  }
}

}  // namespace

int32_t launch_node_gradients(const Backward& a, bool exact, void* stream) {
  const Inputs& in = a.in;
  const Geometry& geometry = in.geometry;
  const BatchView& batch = in.batch;
  const int64_t heads = in.shape.heads, slots = geometry.slots.tasks(batch) * heads;
  const int64_t blocks = (geometry.node_size / 4 + kWalkThreads - 1) / kWalkThreads;
  const int64_t tiles = tiles_of(in.shape.value_dim) * ((tiles_of(in.shape.key_dim) + 1) / 2);
  const int64_t places = geometry.places.tasks(batch) * heads, own = slots * tiles;
  const int64_t sequences = batch.count * heads * blocks;
  const int64_t segments = geometry.segments.tasks(batch) * heads * blocks;
  const int64_t old = batch.count * heads * a.levels;
  constexpr int kWarps = kWalkThreads / 32;
  int32_t status = launch(read_weights, places, kThreads, sizeof(WeightsShared), stream, a, places);
  if (status == LLA_OK)
    status = launch(exact ? own_gradients<true> : own_gradients<false>, own, kThreads,
                    exact ? sizeof(OwnShared<true>) : sizeof(OwnShared<false>), stream, a, own);
  if (geometry.linear) {
    if (status == LLA_OK) status = launch(down_chain, sequences, kWalkThreads, 0, stream, a, blocks, sequences);
  } else {
    const bool upper = (batch.most_length >> geometry.chunk.rows_log) >= kSegment;
    if (status == LLA_OK && upper) status = launch(down_upper, sequences, kWalkThreads, 0, stream, a, blocks, sequences);
    if (status == LLA_OK) status = launch(down_segments, segments, kWalkThreads, 0, stream, a, blocks, segments);
  }
  if (status == LLA_OK) status = launch(sum_partials, (slots + kWarps - 1) / kWarps, kWalkThreads, 0, stream, a, slots);
  if (status == LLA_OK) status = launch(old_flows, (old + kWarps - 1) / kWarps, kWalkThreads, 0, stream, a, old);
  return status;
}

int32_t launch_old_node_gradients(const Backward& a, bool exact, void* stream) {
  if (!a.gradient.nodes.base) return LLA_OK;
  const Inputs& in = a.in;
  const int64_t tiles = tiles_of(in.shape.value_dim) * ((tiles_of(in.shape.key_dim) + 1) / 2);
  const int64_t tasks = in.batch.count * kNodes * in.shape.heads * tiles;
  return launch(exact ? initial_nodes<true> : initial_nodes<false>, tasks, kThreads,
                exact ? sizeof(OwnShared<true>) : sizeof(OwnShared<false>), stream, a, tasks);
}

int32_t load_node_gradients() {
  int32_t status = load_kernel(read_weights);
  if (status == LLA_OK) status = load_kernel(own_gradients<true>);
  if (status == LLA_OK) status = load_kernel(own_gradients<false>);
  if (status == LLA_OK) status = load_kernel(down_upper);
  if (status == LLA_OK) status = load_kernel(down_segments);
  if (status == LLA_OK) status = load_kernel(down_chain);
  if (status == LLA_OK) status = load_kernel(sum_partials);
  if (status == LLA_OK) status = load_kernel(old_flows);
  if (status == LLA_OK) status = load_kernel(initial_nodes<true>);
  if (status == LLA_OK) status = load_kernel(initial_nodes<false>);
  return status;
}

}  // namespace lla::cuda::scalar_gate
