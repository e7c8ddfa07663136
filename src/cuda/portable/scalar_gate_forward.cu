// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward: the outputs of a chunk from its own rows and the nodes of its past, and what is stored afterwards.
#include <new>

#include "cuda/common/scratch_limit.h"
#include "cuda/portable/head_slices.h"
#include "cuda/portable/scalar_gate.h"

namespace lla::cuda::scalar_gate {

namespace {

template <bool kExact>
struct OutputsShared {
  Tile<kExact> query;  // later the weights of the chunk's own rows
  Tile<kExact> key;    // later the values
  Tile<kExact> node[2];
  ChunkDecays decays;  // row factors times scale and λ, key factors times the write strength
  float diagonal[64];  // scale λ of level 0
  Past past;
  alignas(16) char sources[sizeof(RowSources)];
  float weight[1];  // [entries][64]: with which the rows read the nodes
};

size_t outputs_bytes(const Inputs& in, bool exact) {
  return (exact ? sizeof(OutputsShared<true>) : sizeof(OutputsShared<false>)) +
         static_cast<size_t>(in.most_entries) * 64 * 4;
}

// Stores 64 x 64 elements of y, by way of two tiles that nobody uses.
template <bool kExact>
__device__ __forceinline__ void store_rows(const Inputs& in, const View& y, const Sequence& sequence, const ChunkSpan& span,
                                           int64_t head, int64_t v0, TileSum& sum, Tile<kExact> (&tiles)[2]) {
  char* base = static_cast<char*>(y.at(sequence.index, span.row(sequence, 0), head)) + v0 * dtype_size(y.dtype);
  const int64_t bytes = y.row_stride * dtype_size(y.dtype);
  const int columns = static_cast<int>(min(in.shape.value_dim - v0, int64_t{64}));
  float* staging = reinterpret_cast<float*>(tiles);
  if constexpr (!kExact) {
    if (y.dtype == LLA_BF16 && !y.accumulate && columns % 8 == 0 && is_aligned16(base, bytes)) {
      put_tile<false>(tiles[0], sum);
      __syncthreads();
      store_tile(tiles[0], base, bytes, span.lo, span.hi, columns);
      return;
    }
  }
  each_pair(sum, [&](int r, int c, float x, float z) {
    *reinterpret_cast<float2*>(staging + r * kStride + c) = make_float2(x, z);
  });
  __syncthreads();
#pragma unroll 1  // not the common case: little code
  for (int i = threadIdx.x; i < 64 * columns; i += kThreads) {
    const int r = i / columns, c = i % columns;
    if (r >= span.lo && r < span.hi) put_element(base + r * bytes, y.dtype, c, staging[r * kStride + c], y.accumulate);
  }
}

// One block: one chunk and head, 64 columns of values.
template <bool kExact>
__global__ void __launch_bounds__(kThreads, kExact ? 2 : 3)
    outputs(const __grid_constant__ Inputs in, const View y, int64_t tasks) {
  auto& shared = *reinterpret_cast<OutputsShared<kExact>*>(shared_memory());
  const Geometry& geometry = in.geometry;
  const MixerShape& shape = in.shape;
  const int64_t tiles = tiles_of(shape.value_dim), heads = shape.heads;
  const float scale = static_cast<float>(shape.scale);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = in.head_of(task % heads), v0 = task / heads % tiles * kTile;
    int64_t number;
    const int64_t b = geometry.places.find(in.batch, task / heads / tiles, &number);
    const Walk walk(in, b);
    const Sequence& sequence = walk.sequence;
    const int64_t order = number - geometry.places.first(in.batch, b), chunk = walk.range.first + order;
    if (order >= walk.range.count || takes_step(geometry, sequence)) continue;
    const ChunkSpan span(sequence, geometry.chunk, chunk);
    if (span.lo >= span.hi) continue;
    const uint64_t past = past_of(geometry, walk.range.first, chunk);
    if (threadIdx.x == 0)
      new (shared.sources) RowSources{call_rows(in, sequence, span, in.q, shape.group_of(head)),
                                      key_rows(in, sequence, span, head), value_rows(in, sequence, span, head)};
    __syncthreads();
    const RowSources& sources = *reinterpret_cast<const RowSources*>(shared.sources);
    const auto fill = [&](Tile<kExact>& tile, int64_t column, int64_t columns, const ChunkRows& rows) {
      const ChunkRows copy = rows;
      fill_tile<kExact>(tile, column, columns, copy);
    };

    fill(shared.query, 0, shape.key_dim, sources.queries);
    fill(shared.key, 0, shape.key_dim, sources.keys);
    if (threadIdx.x < 32) fill_decays(in, sequence, span, head, &shared.decays);
    if (threadIdx.x / 32 == 1) list_past(in, walk, chunk, head, past, &shared.past);
    __syncthreads();
    // Weights: of the row's own levels, then of the nodes. A column of λ that no row reads is not looked at.
    {
      const int r = threadIdx.x % 64;
      const bool live = r >= span.lo && r < span.hi;
      const View& lambda = in.lambda;
      const void* row = live && shape.levels > 0 ? lambda.at(sequence.index, span.row(sequence, r), head) : nullptr;
      const auto weight = [&](int64_t column) { return row ? scale * load_element(row, lambda.dtype, column) : scale; };
      for (int l = threadIdx.x / 64; l <= 6; l += 2) {
        if (l == 0) {
          shared.diagonal[r] = live ? weight(0) : 0;
          continue;
        }
        shared.decays.row[l][r] *= live && ((r >> (l - 1)) & 1) ? weight(shape.column(l)) : 0;
        shared.decays.key[l][r] *= shared.decays.write[r];
      }
      int entry = 0;
      for (uint64_t left = past; left; left &= left - 1, ++entry) {
        const int level = __ffsll(static_cast<long long>(left)) - 1;
        if (entry % 2 != static_cast<int>(threadIdx.x) / 64) continue;
        shared.weight[entry * 64 + r] =
            live ? weight(entry_column(in, level)) * shared.decays.row[7][r] * decay_of(shared.past.newer[level]) : 0;
      }
    }

    TileSum scores, sum;
    scores.clear();
    sum.clear();
    for (int64_t k0 = 0; k0 < shape.key_dim; k0 += kTile) {
      const int depth = depth_of(shape.key_dim - k0);
      if (k0 > 0) {
        fill(shared.query, k0, shape.key_dim, sources.queries);
        fill(shared.key, k0, shape.key_dim, sources.keys);
      }
      uint64_t left = past;
      int entry = -1, side = 0;
      // Fills the tile of the next entry that is there.
      const auto fill_next = [&](int to) {
        for (; left; left &= left - 1) {
          const NodeSource& node = shared.past.node[__ffsll(static_cast<long long>(left)) - 1];
          ++entry;
          if (!node.data) continue;
          left &= left - 1;
          fill_node_tile<kExact>(in, shared.node[to], node, k0, v0);
          return entry;
        }
        return -1;
      };
      int next = fill_next(0);
      arrive();
      multiply_tiles<kExact, Layout::Along, Layout::Along>(scores, depth, shared.query, shared.key);
      while (next >= 0) {
        const int now = next;
        next = fill_next(side ^ 1);
        TileSum product;
        product.clear();
        multiply_tiles<kExact, Layout::Along, Layout::Across>(product, depth, shared.query, shared.node[side]);
        add_rows_scaled(sum, product, shared.weight + now * 64);
        arrive();
        side ^= 1;
      }
      __syncthreads();
    }
    fill(shared.key, v0, shape.value_dim, sources.values);
    put_levels<kExact>(shared.query, scores, [&](int i, int s, int level) {
      return level == 0 ? shared.diagonal[i] * shared.decays.write[i]
                        : shared.decays.row[level][i] * shared.decays.key[level][s];
    });
    arrive();
    multiply_tiles<kExact, Layout::Along, Layout::Across>(sum, depth_of(span.hi), shared.query, shared.key);
    store_rows<kExact>(in, y, sequence, span, head, v0, sum, shared.node);
    __syncthreads();
  }
}

// One block: one node of one border to store, one head. Levels are the state's; the last one is the absorbing node.
__global__ void __launch_bounds__(kWalkThreads)
    store_nodes(const __grid_constant__ Inputs in, int levels, int64_t most, int64_t tasks) {
  const Geometry& geometry = in.geometry;
  const int64_t heads = in.shape.heads;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = task % heads, index = task / heads % (levels + 1), item = task / heads / (levels + 1) % most;
    const Walk walk(in, task / heads / (levels + 1) / most);
    if (walk.sequence.padding || item >= walk.sequence.nodes_to_store_count) continue;
    if (takes_step(geometry, walk.sequence) || (in.beside_sweeps && takes_sweep(walk.sequence, in.routes))) continue;
    const NodesToStore& plan = walk.sequence.nodes_to_store[item];
    const int state_level = index == levels ? kAbsorbed : static_cast<int>(index);
    const int32_t id = plan.node[state_level];
    const int64_t chunk = plan.position >> geometry.chunk.rows_log;
    if (id < 0 || !((plan.write >> state_level) & 1)) continue;
    // The entries of which it is the sum; none: zero.
    uint64_t parts = past_of(geometry, walk.range.first, chunk);
    if (state_level == kAbsorbed) {
      if (!geometry.absorbs) continue;
      parts &= ~((uint64_t{1} << geometry.apart) - 1);
    } else {
      const int level = state_level + geometry.chunk.ratio_log;
      if (level >= geometry.apart) continue;
      parts &= uint64_t{1} << level;
    }
    const int64_t size = in.shape.key_dim * in.shape.value_dim;
    char* to = in.state.node(id, head);
    const int32_t dtype = in.state.node_layout.dtype;
    for (int64_t e = threadIdx.x; e <= size; e += kWalkThreads) {  // the one after the last is the log decay
      const int64_t row = e / in.shape.value_dim, column = e % in.shape.value_dim;
      float sum = 0, decay = 0;
      for (uint64_t left = parts; left; left &= left - 1) {
        const NodeSource node = past_node(in, walk, chunk, __ffsll(static_cast<long long>(left)) - 1, head);
        if (node.data && e < size)
          sum = fmaf(decay_of(decay), load_element(node.data, node.dtype, row * node.row + column), sum);
        decay += node.decay;
      }
      if (e < size) {
        store_element(to, dtype, e, sum);
      } else {
        if (geometry.linear) decay = in.scratch.decay[walk.slot_of(chunk - 1) * heads + head];
        store_element(in.state.node_decay(id, head), LLA_F32, 0, decay);
      }
    }
  }
}

// One block: 64 raw rows to store, of one group's keys or one head's values, gates and write strengths.
__global__ void __launch_bounds__(kWalkThreads)
    store_tail(const __grid_constant__ Inputs in, int64_t splits, int64_t most, int64_t tasks) {
  const int64_t lanes = in.shape.groups + in.shape.heads;
  const SlotMemory& state = in.state;
  const TailLayout& layout = state.tail_layout;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t lane = task % lanes, split = task / lanes % splits, item = task / lanes / splits % most;
    const Sequence& sequence = in.batch.sequences[task / lanes / splits / most];
    if (sequence.padding || item >= sequence.tail_to_store_count || takes_step(in.geometry, sequence)) continue;
    const RowsToStore& plan = sequence.tail_to_store[item];
    const SlotImage& history = sequence.history;
    const bool keys = lane < in.shape.groups;
    const int64_t head = keys ? lane : lane - in.shape.groups, width = keys ? in.shape.key_dim : in.shape.value_dim;
    const View& tensor = keys ? in.k : in.v;
    for (int64_t p = plan.first + 64 * split + threadIdx.x / 32; p < min(plan.last, plan.first + 64 * (split + 1));
         p += kWalkThreads / 32) {
      const int64_t ring = (plan.ring + p - plan.first) % layout.capacity;
      char* to = keys ? state.tail_k(plan.block, head, ring) : state.tail_v(plan.block, head, ring);
      const bool fresh = p >= sequence.position;
      if (!fresh && (history.tail < 0 || p < history.start)) continue;
      const int64_t from_ring = (history.tail_origin + p % in.shape.grain) % layout.capacity;
      const int64_t row = sequence.row_begin + p - sequence.position;
      const void* from = fresh  ? tensor.at(sequence.index, row, head)
                         : keys ? state.tail_k(history.tail, head, from_ring)
                                : state.tail_v(history.tail, head, from_ring);
      if (from == to) continue;
      const int32_t dtype = fresh ? tensor.dtype : layout.dtype;
      for (int64_t i = threadIdx.x % 32; i < width; i += 32) {
        store_element(to, layout.dtype, i, load_element(from, dtype, i));
      }
      if (keys || threadIdx.x % 32 != 0) continue;
      store_tail_factors(in, sequence, static_cast<int>(head), fresh, row, from_ring, plan.block, ring);
    }
  }
}

// The raw rows behind the last full chunks.
int32_t launch_tail(const Inputs& in, void* stream) {
  const BatchView& batch = in.batch;
  if (!batch.stores || !in.state.tails.base) return LLA_OK;
  const int64_t splits = (in.state.tail_layout.capacity + 63) / 64;
  const int64_t blocks = batch.count * batch.most_tail_to_store * splits * (in.shape.heads + in.shape.groups);
  return launch(store_tail, blocks, kWalkThreads, 0, stream, in, splits, batch.most_tail_to_store, blocks);
}

// One slice of the heads, but for the sequences that take steps.
int32_t launch_slice(const MixerForward& p, bool beside_sweeps, char* scratch, void* stream) {
  Inputs in(p);
  in.beside_sweeps = beside_sweeps;
  Carver carver{scratch, 0};
  in.scratch.take(&carver, in.geometry, p.shape.heads, in.limits());
  const BatchView& batch = p.batch;
  const int64_t heads = p.shape.heads;
  const bool exact = in.exact();
  if (!exact && !p.state.nodes.base) in.geometry.scratch_dtype = LLA_BF16;
  int32_t status = launch_nodes(in, exact, stream);
  const int64_t tasks = in.geometry.places.tasks(batch) * tiles_of(p.shape.value_dim) * heads;
  if (status == LLA_OK)
    status =
        launch(exact ? outputs<true> : outputs<false>, tasks, kThreads, outputs_bytes(in, exact), stream, in, p.y, tasks);
  if (batch.stores && p.state.nodes.base && status == LLA_OK) {
    int levels = 0;
    for (int64_t n = batch.most_length / p.shape.grain; n > 0 && levels < kNodeLevels; n >>= 1) ++levels;
    const int64_t blocks = batch.count * batch.most_nodes_to_store * (levels + 1) * heads;
    status = launch(store_nodes, blocks, kWalkThreads, 0, stream, in, levels, batch.most_nodes_to_store, blocks);
  }
  return status == LLA_OK ? launch_tail(in, stream) : status;
}

// Scratch of slices of this many heads.
Size forward_bytes(const MixerForward& p, const Limits& limits, int64_t heads) {
  Carver carver;
  NodeScratch().take(&carver, Geometry(p.shape, p.state), heads, limits);
  return carver.used;
}

int32_t launch_slices(const MixerForward& p, bool beside_sweeps, char* scratch, void* stream) {
  const Inputs in(p);
  if (beside_sweeps && all_take_sweeps(p.batch, in.routes)) return launch_tail(in, stream);
  int32_t status = LLA_OK;
  if (in.geometry.chunk.ratio_log == 0) {
    status = launch_steps(in, p.y, stream);
    if (p.batch.most_rows <= 1) return status;  // all sequences take steps
  }
  const Limits limits = in.limits();
  HeadSlices slices(p.shape, 1);
  slices.choose([&](int64_t heads) { return fits_scratch(forward_bytes(p, limits, heads)); });
  for (HeadSlice slice = slices.first(); slice.count > 0 && status == LLA_OK; slice = slices.next(slice))
    status = launch_slice(slices.problem_of(p, slice), beside_sweeps, scratch, stream);
  return status;
}

}  // namespace

void measure_forward(const void* problem, const Limits& limits, Need* need) {
  const MixerForward& p = *static_cast<const MixerForward*>(problem);
  need->shared = sliced_bytes(p.shape.heads, [&](int64_t heads) { return forward_bytes(p, limits, heads); });
}

int32_t launch_beside_sweeps(const MixerForward& p, char* scratch, void* stream) {
  return launch_slices(p, true, scratch, stream);
}

int32_t launch_forward(const void* problem, const Limits&, char* scratch, void* stream) {
  return launch_slices(*static_cast<const MixerForward*>(problem), false, scratch, stream);
}

int32_t load_forward() {
  int32_t status = load_nodes_kernels();
  if (status == LLA_OK) status = load_steps();
  if (status == LLA_OK) status = load_kernel(outputs<true>);
  if (status == LLA_OK) status = load_kernel(outputs<false>);
  if (status == LLA_OK) status = load_kernel(store_nodes);
  if (status == LLA_OK) status = load_kernel(store_tail);
  return status;
}

}  // namespace lla::cuda::scalar_gate
