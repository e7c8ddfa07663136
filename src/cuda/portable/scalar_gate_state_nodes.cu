// SPDX-License-Identifier: Apache-2.0
// The nodes that a state keeps of a sequence without a history, straight from the sequence's rows: nothing but what is
// stored is made. Rows are summed up in runs, newest chunk first, each chunk with its decay to the run's end; a node of
// several runs is their sum. Runs have the same places in every call, so that bits depend on the sequence alone.
#include "cuda/common/reduce.h"
#include "cuda/common/scratch_limit.h"
#include "cuda/portable/head_slices.h"
#include "cuda/portable/scalar_gate.h"

namespace lla::cuda::scalar_gate {

namespace {

constexpr int kRunLog = 12;  // rows; nodes of fewer rows are a run of their own
constexpr int64_t kRun = int64_t{1} << kRunLog;
constexpr int kMostKeyTiles = 2;

// Of a chunk; two are under way.
struct ChunkTiles {
  Tile<false> key[kMostKeyTiles], value;
};
struct RunsShared {
  ChunkTiles tiles[2];
  ChunkDecays decays[2];
  float total[2];
};

struct StateNodes {
  Inputs in;
  float* contents = nullptr;  // [place of the run][head][tile][tiles of dk][64][64]
  float* decays = nullptr;    // [place of the run][head]: log decay over the run
  int64_t item = 0;           // of the borders of each sequence
  int small = 0;              // levels of nodes that are smaller than a run
  int64_t runs = 0;           // that a sequence touches at most
  int key_tiles = 1;

  explicit StateNodes(const MixerForward& p) : in(p) {
    while (in.shape.grain << small < kRun) ++small;
    runs = ((in.batch.most_rows + kRun - 1) >> kRunLog) + 1;
    key_tiles = static_cast<int>(tiles_of(in.shape.key_dim));
  }
  __device__ int64_t place(const Sequence& sequence, int64_t b, int64_t run) const {
    return (sequence.row_begin >> kRunLog) + 2 * b + run - (sequence.position >> kRunLog);
  }
  __device__ float* content(int64_t place, int64_t head, int64_t tile) const {
    return contents + ((place * in.shape.heads + head) * tiles_of(in.shape.value_dim) + tile) * key_tiles * kTile * kTile;
  }
};

// A border at which nodes are stored: the sequence up to it is one absorbing node and nodes of separate levels.
struct StoredBorder {
  const NodesToStore& plan;
  int64_t number, absorbed;  // chunks of the state up to the border, and of its absorbing node
  int apart;

  __device__ StoredBorder(const Inputs& in, const Sequence& sequence, int64_t item)
      : plan(sequence.nodes_to_store[item]), number(plan.position / in.shape.grain) {
    const Geometry& geometry = in.geometry;
    apart = geometry.linear ? 0 : geometry.apart - geometry.chunk.ratio_log;
    absorbed = geometry.absorbs && apart < 63 ? number >> apart << apart : 0;
  }
  __device__ bool wants(int level) const { return plan.node[level] >= 0 && ((plan.write >> level) & 1) != 0; }
  // Rows [begin, end) of the node of a separate level.
  __device__ bool has(int level) const { return level < apart && ((number >> level) & 1) != 0; }
  __device__ int64_t begin(int level, int64_t grain) const { return (number >> (level + 1) << (level + 1)) * grain; }
};

// Sums up the chunks of rows [begin, end), whose ends are borders of chunks, and gives the sum to store(part, sum), log
// decays to total(sum). Rows before the sequence count as zero.
template <class Store, class Total>
__device__ __forceinline__ void sum_rows(const Inputs& in, const Sequence& sequence, int64_t head, int64_t v0, int64_t begin,
                                         int64_t end, int key_tiles, RunsShared& shared, Store store, Total total) {
  const ChunkShape& shape = in.geometry.chunk;
  const int64_t first = max(begin, sequence.position) >> shape.rows_log;
  TileSum sum[kMostKeyTiles];
#pragma unroll
  for (int i = 0; i < kMostKeyTiles; ++i) sum[i].clear();
  float newer = 0;  // log decay over the chunks that are done
  const int warp = threadIdx.x / 32;
  const auto fill = [&](int64_t chunk, ChunkTiles& to) {
    const ChunkSpan span(sequence, shape, chunk);
    const ChunkRows keys = key_rows(in, sequence, span, head);
    fill_tile<false>(to.key[0], 0, in.shape.key_dim, keys);
    if (key_tiles > 1) fill_tile<false>(to.key[1], kTile, in.shape.key_dim, keys);
    fill_tile<false>(to.value, v0, in.shape.value_dim, value_rows(in, sequence, span, head));
  };
  float gate[2] = {}, write[2] = {};  // of one warp, which makes the next chunk's decays
  const auto load_gates = [&](int64_t chunk) {
    const ChunkSource source{sequence, in.state, in.shape.grain, ChunkSpan(sequence, shape, chunk)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      gate[half] = source.gate(in.gate, head, threadIdx.x % 32 + 32 * half);
      write[half] = source.write(in.write, head, threadIdx.x % 32 + 32 * half);
    }
  };
  const auto make_decays = [&](int side) {
    const float total_of_chunk = fill_decays(gate, write, &shared.decays[side]);
    if (threadIdx.x % 32 == 0) shared.total[side] = total_of_chunk;
  };
  int64_t chunk = (end >> shape.rows_log) - 1;
  int side = 0;
  if (chunk >= first) {
    fill(chunk, shared.tiles[0]);
    if (warp == 0) {
      load_gates(chunk);
      make_decays(0);
    }
  }
#pragma unroll 1
  for (; chunk >= first; --chunk, side ^= 1) {
    arrive();
    const bool more = chunk > first;
    if (more) fill(chunk - 1, shared.tiles[side ^ 1]);
    if (more && warp == 0) load_gates(chunk - 1);
    ChunkTiles& tiles = shared.tiles[side];
    const ChunkDecays& decays = shared.decays[side];
    const float after = decay_of(newer);
    for (int i = threadIdx.x; i < 64 * 32; i += kThreads) {
      const int r = i / 32, c = 2 * (i % 32);
      const float factor = decays.write[r] * decays.key[7][r] * after;
      const float2 x = read_pair<false>(tiles.value, r, c);
      write_pair<false>(tiles.value, r, c, factor * x.x, factor * x.y);
    }
    newer += shared.total[side];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kMostKeyTiles; ++i) {
      if (i < key_tiles) multiply_tiles<false, Layout::Across, Layout::Across>(sum[i], kTile, tiles.key[i], tiles.value);
    }
    if (more && warp == 0) make_decays(side ^ 1);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMostKeyTiles; ++i) {
    if (i < key_tiles) store(i, sum[i]);
  }
  if (threadIdx.x == 0) total(newer);
}

// One block: one run, or one small node, of one head and 64 columns of values.
__global__ void __launch_bounds__(kThreads) sum_runs(const __grid_constant__ StateNodes a, int64_t tasks) {
  auto& shared = *reinterpret_cast<RunsShared*>(shared_memory());
  const Inputs& in = a.in;
  const int64_t heads = in.shape.heads, tiles = tiles_of(in.shape.value_dim), pieces = a.runs + a.small;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = in.head_of(task % heads), tile = task / heads % tiles, piece = task / heads / tiles % pieces;
    const int64_t b = task / heads / tiles / pieces;
    const Sequence& sequence = in.batch.sequences[b];
    if (!takes_sweep(sequence) || a.item >= sequence.nodes_to_store_count) continue;
    const StoredBorder border(in, sequence, a.item);
    const int64_t grain = in.shape.grain, v0 = tile * kTile, value_dim = in.shape.value_dim;
    if (piece < a.small) {
      const int level = static_cast<int>(piece);
      if (!border.has(level) || !border.wants(level)) continue;
      const int64_t begin = border.begin(level, grain);
      const int32_t id = border.plan.node[level], dtype = in.state.node_layout.dtype;
      char* to = in.state.node(id, head);
      sum_rows(
          in, sequence, head, v0, begin, begin + (grain << level), a.key_tiles, shared,
          [&](int part, TileSum& sum) {
            each_pair(sum, [&](int r, int c, float x, float y) {
              const int64_t row = part * kTile + r, column = v0 + c;
              if (row >= in.shape.key_dim) return;
              if (column < value_dim) store_element(to, dtype, row * value_dim + column, x);
              if (column + 1 < value_dim) store_element(to, dtype, row * value_dim + column + 1, y);
            });
          },
          [&](float decay) {
            if (tile == 0) store_element(in.state.node_decay(id, head), LLA_F32, 0, decay);
          });
      continue;
    }
    // A run of the absorbing node, or of a node of the level that its number says.
    const int64_t run = (sequence.position >> kRunLog) + piece - a.small, begin = run << kRunLog;
    const int64_t absorbed_end = border.absorbed * grain, position = border.plan.position;
    int64_t end = begin + kRun;
    int level = kAbsorbed;
    if (begin < absorbed_end) {
      end = min(end, absorbed_end);
    } else {
      const int64_t differ = run ^ (position >> kRunLog);
      if (end > position || differ == 0) continue;
      level = highest_bit(differ) + a.small;
    }
    if (!border.wants(level)) continue;
    const int64_t place = a.place(sequence, b, run);
    float* to = a.content(place, head, tile);
    sum_rows(
        in, sequence, head, v0, begin, end, a.key_tiles, shared,
        [&](int part, TileSum& sum) {
          each_pair(sum, [&](int r, int c, float x, float y) {
            *reinterpret_cast<float2*>(to + (part * kTile + r) * kTile + c) = make_float2(x, y);
          });
        },
        [&](float decay) {
          if (tile == 0) a.decays[place * heads + head] = decay;
        });
  }
}

// One block: one node of several runs, one head; the absorbing node too where it has none.
__global__ void __launch_bounds__(kWalkThreads) join_runs(const __grid_constant__ StateNodes a, int levels, int64_t tasks) {
  const Inputs& in = a.in;
  const int64_t heads = in.shape.heads, grain = in.shape.grain, value_dim = in.shape.value_dim;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = task % heads, index = task / heads % (levels + 1), b = task / heads / (levels + 1);
    const Sequence& sequence = in.batch.sequences[b];
    if (!takes_sweep(sequence) || a.item >= sequence.nodes_to_store_count) continue;
    const StoredBorder border(in, sequence, a.item);
    const int level = index == levels ? kAbsorbed : static_cast<int>(index) + a.small;
    if (!border.wants(level)) continue;
    int64_t begin = 0, end = border.absorbed * grain;
    if (level == kAbsorbed) {
      if (!in.geometry.absorbs) continue;
    } else {
      if (!border.has(level)) continue;
      begin = border.begin(level, grain);
      end = begin + (grain << level);
    }
    begin = max(begin, sequence.position);
    const int64_t first = begin >> kRunLog, last = (end - 1) >> kRunLog;  // runs
    const int32_t id = border.plan.node[level], dtype = in.state.node_layout.dtype;
    char* to = in.state.node(id, head);
    const int64_t size = in.shape.key_dim * value_dim;
    for (int64_t e = threadIdx.x; e <= size; e += kWalkThreads) {  // the one after the last is the log decay
      const int64_t row = e / value_dim, column = e % value_dim;
      float sum = 0, newer = 0;
      for (int64_t run = last; run >= first && begin < end; --run) {
        const int64_t place = a.place(sequence, b, run);
        if (e < size) sum = fmaf(decay_of(newer), a.content(place, head, column / kTile)[row * kTile + column % kTile], sum);
        newer += a.decays[place * heads + head];
      }
      if (e < size)
        store_element(to, dtype, e, sum);
      else
        store_element(in.state.node_decay(id, head), LLA_F32, 0, newer);
    }
  }
}

// For slices of this many heads.
void take(Carver* carver, const MixerShape& shape, const Limits& limits, int64_t heads, StateNodes* to) {
  const Size places = (Size(limits.rows >> kRunLog) + Size(limits.sequences) * 2) * heads;
  float* contents = carver->take<float>(places * (tiles_of(shape.value_dim) * tiles_of(shape.key_dim) * kTile * kTile));
  float* decays = carver->take<float>(places);
  if (!to) return;
  to->contents = contents;
  to->decays = decays;
}

Size bytes_of(const MixerShape& shape, const Limits& limits, int64_t heads) {
  Carver carver;
  take(&carver, shape, limits, heads, nullptr);
  return carver.used;
}

int32_t launch_slice(const MixerForward& p, char* scratch, void* stream) {
  const BatchView& batch = p.batch;
  StateNodes a(p);
  Carver carver{scratch, 0};
  take(&carver, p.shape, a.in.limits(), p.shape.heads, &a);
  int levels = 0;  // of nodes of one run and more
  for (int64_t n = batch.most_length >> kRunLog; n > 0; n >>= 1) ++levels;
  const int64_t sums = batch.count * (a.runs + a.small) * tiles_of(p.shape.value_dim) * p.shape.heads;
  const int64_t joins = batch.count * (levels + 1) * p.shape.heads;
  int32_t status = LLA_OK;
  for (a.item = 0; a.item < min(batch.most_nodes_to_store, kSweepBorders) && status == LLA_OK; ++a.item) {
    status = launch(sum_runs, sums, kThreads, sizeof(RunsShared), stream, a, sums);
    if (status == LLA_OK) status = launch(join_runs, joins, kWalkThreads, 0, stream, a, levels, joins);
  }
  return status;
}

}  // namespace

int64_t state_nodes_bytes(const MixerShape& shape, const Limits& limits) {
  return sliced_bytes(shape.heads, [&](int64_t heads) { return bytes_of(shape, limits, heads); });
}

int32_t launch_state_nodes(const MixerForward& p, char* scratch, void* stream) {
  if (!p.batch.stores || !p.state.nodes.base) return LLA_OK;
  const Limits limits = Inputs(p).limits();
  HeadSlices slices(p.shape, 1);
  slices.choose([&](int64_t heads) { return fits_scratch(bytes_of(p.shape, limits, heads)); });
  int32_t status = LLA_OK;
  for (HeadSlice slice = slices.first(); slice.count > 0 && status == LLA_OK; slice = slices.next(slice))
    status = launch_slice(slices.problem_of(p, slice), scratch, stream);
  return status;
}

int32_t load_state_nodes() {
  const int32_t status = load_kernel(sum_runs);
  return status == LLA_OK ? load_kernel(join_runs) : status;
}

}  // namespace lla::cuda::scalar_gate
