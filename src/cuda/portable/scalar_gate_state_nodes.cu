// SPDX-License-Identifier: Apache-2.0
// The nodes that a state keeps of a sequence that takes a sweep, straight from its rows and its history: nothing but what is
// stored is made. Rows are summed up in runs, newest chunk first, each chunk with its decay to the run's end; a node of
// several runs is their sum. Runs have the same places in every call, so that bits depend on the sequence alone.
#include "cuda/common/reduce.h"
#include "cuda/common/scratch_limit.h"
#include "cuda/common/tail_rows.h"
#include "cuda/common/units.h"
#include "cuda/portable/head_slices.h"
#include "cuda/portable/scalar_gate.h"

namespace lla::cuda::scalar_gate {

namespace {

constexpr int kRunLog = 12;  // rows; nodes of fewer rows are a run of their own
constexpr int64_t kRun = int64_t{1} << kRunLog;
constexpr int kMostKeyTiles = 2;

// Of a chunk; two are under way. `factor`: write strengths times the decays to the run's end.
struct ChunkTiles {
  Tile<false> key[kMostKeyTiles], value;
  float factor[64];
  int unit;  // fp16: exponent of what factors are in
};
struct RunsShared {
  ChunkTiles tiles[2];
  float total;  // log decay
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

// Position of the first row of a sequence that is no node's: the history's last chunk begins with it, or the sequence.
__device__ __forceinline__ int64_t base_of(const Inputs& in, const Sequence& sequence) {
  return sequence.history.has_past() ? sequence.position & -in.shape.grain : sequence.position;
}

// Rows of a call, by their distance from its first one, and before them those of the history's tail. Sweeps take tensors
// whose rows are whole pieces of 16 bytes only.
struct CallRows {
  TailRows tail;
  int raw;  // rows of the tail
  int64_t group, head, v0;
  const char *key, *value;
  int64_t key_bytes, value_bytes;
  int key_columns, value_columns;
  int32_t dtype;

  __device__ CallRows(const Inputs& in, const Sequence& sequence, int64_t head, int64_t v0)
      : tail{in.state, sequence.history},
        raw(static_cast<int>(sequence.position - base_of(in, sequence))),
        group(in.shape.group_of(head)),
        head(head),
        v0(v0),
        key(static_cast<const char*>(in.k.at(sequence.index, sequence.row_begin, group))),
        value(static_cast<const char*>(in.v.at(sequence.index, sequence.row_begin, head)) + 2 * v0),
        key_bytes(2 * in.k.row_stride),
        value_bytes(2 * in.v.row_stride),
        key_columns(static_cast<int>(in.shape.key_dim)),
        value_columns(static_cast<int>(in.shape.value_dim - v0)),
        dtype(in.k.dtype) {}

  // 64 rows from `row` on into tiles; those before the first raw one count as zero. Complete after arrive().
  __device__ __forceinline__ void fill(int64_t row, int key_tiles, ChunkTiles& to) const {
    const int c = 8 * (threadIdx.x % 8), first = threadIdx.x / 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = first + 16 * i, place = r * kStride + c;
      if (row + r < 0 && row + r >= -raw) {
        fill_tail(static_cast<int>(row + r) + raw, place, c, key_tiles, to);
        continue;
      }
      const bool live = row + r >= 0;
      const char* k = live ? key + (row + r) * key_bytes + 2 * c : key;
      const char* v = live ? value + (row + r) * value_bytes + 2 * c : value;
      copy_async16(to.key[0].data + place, k, live && c < key_columns ? 16 : 0);
      if (key_tiles > 1) copy_async16(to.key[1].data + place, k + 2 * kTile, live && c + kTile < key_columns ? 16 : 0);
      copy_async16(to.value.data + place, v, live && c < value_columns ? 16 : 0);
    }
  }
  __device__ __forceinline__ void fill_tail(int row, int place, int c, int key_tiles, ChunkTiles& to) const {
#pragma unroll
    for (int i = 0; i < kMostKeyTiles; ++i) {
      if (i >= key_tiles) continue;
      if (c + kTile * i < key_columns)
        tail.copy_eight(to.key[i].data + place, dtype, tail.key(group, row), (c + kTile * i) / 8);
      else
        copy_async16(to.key[i].data + place, key, 0);
    }
    if (c < value_columns)
      tail.copy_eight(to.value.data + place, dtype, tail.value(head, row), static_cast<int>(v0 + c) / 8);
    else
      copy_async16(to.value.data + place, value, 0);
  }
};

// By one warp: the gates of 64 rows, and what follows from them.
struct ChunkGates {
  float gate[2], write[2];

  __device__ __forceinline__ void load(const Inputs& in, const Sequence& sequence, int64_t head, int64_t row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t r = row + threadIdx.x % 32 + 32 * half, at = sequence.row_begin + r;
      gate[half] = 0, write[half] = r >= 0 ? 1 : 0;
      if (r < 0) {
        const TailRows tail{in.state, sequence.history};
        const int64_t raw = sequence.position - base_of(in, sequence);
        if (r < -raw) continue;
        gate[half] = tail.gate(head, static_cast<int>(r + raw));
        write[half] = tail.write(head, static_cast<int>(r + raw));
        continue;
      }
      if (in.gate.present()) gate[half] = load_element(in.gate.at(sequence.index, at, head), in.gate.dtype, 0);
      if (in.write.present()) write[half] = load_element(in.write.at(sequence.index, at, head), in.write.dtype, 0);
    }
  }
  // `newer`: log decay over the chunks that come later; gives the one with this chunk.
  template <bool kHalf>
  __device__ __forceinline__ float make_factors(float newer, ChunkTiles* to) {
    float(&factor)[64] = to->factor;
    if constexpr (kHalf) {
      const float most = warp_max(fmaxf(fabsf(write[0]), fabsf(write[1])));
      const int unit = exponent_above(most);
      write[0] *= power_of_two(-unit);
      write[1] *= power_of_two(-unit);
      if (threadIdx.x == 0) to->unit = unit;
    }
    const int lane = threadIdx.x % 32;
    float sum[2] = {gate[0], gate[1]};  // from the row on, in its half
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = __shfl_down_sync(kAllLanes, sum[half], d);
        if (lane + d < 32) sum[half] += x;
      }
    }
    const float high = __shfl_sync(kAllLanes, sum[1], 0);
    float after[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      after[half] = __shfl_down_sync(kAllLanes, sum[half], 1);
      if (lane == 31) after[half] = 0;
    }
    factor[lane] = write[0] * decay_of(newer + (after[0] + high));
    factor[lane + 32] = write[1] * decay_of(newer + after[1]);
    return newer + (__shfl_sync(kAllLanes, sum[0], 0) + high);
  }
};

// Sums up the chunks of rows [begin, end), whose ends are borders of chunks, and gives the sum to store(part, sum), log
// decays to total(sum). Rows before the sequence count as zero.
template <bool kHalf, class Store, class Total>
__device__ __forceinline__ void sum_rows(const Inputs& in, const Sequence& sequence, int64_t head, int64_t v0, int64_t begin,
                                         int64_t end, int key_tiles, RunsShared& shared, Store store, Total total) {
  const CallRows rows(in, sequence, head, v0);
  TileSum sum[kMostKeyTiles];
#pragma unroll
  for (int i = 0; i < kMostKeyTiles; ++i) sum[i].clear();
  int unit = 0;  // fp16: exponent of what sums are in
  const auto change_unit = [&](int to) {
    if (to == unit) return;
    const float factor = power_of_two(unit - to);
    unit = to;
#pragma unroll
    for (int i = 0; i < kMostKeyTiles; ++i) sum[i].each([&](int, int, float& x) { x *= factor; });
  };
  ChunkGates gates;
  float newer = 0;  // of the first warp: log decay over the chunks that are done
  const bool makes_factors = threadIdx.x < 32;
  // Distances of chunks' first rows from the sequence's.
  const int64_t first = max(begin, base_of(in, sequence) & ~int64_t{kTile - 1}) - sequence.position;
  int64_t row = end - sequence.position - kTile;
  int side = 0;
  if (row >= first) {
    rows.fill(row, key_tiles, shared.tiles[0]);
    if (makes_factors) {
      gates.load(in, sequence, head, row);
      newer = gates.make_factors<kHalf>(newer, &shared.tiles[0]);
    }
  }
#pragma unroll 1
  for (; row >= first; row -= kTile, side ^= 1) {
    arrive();
    const bool more = row > first;
    if (more) rows.fill(row - kTile, key_tiles, shared.tiles[side ^ 1]);
    if (more && makes_factors) gates.load(in, sequence, head, row - kTile);
    ChunkTiles& tiles = shared.tiles[side];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = threadIdx.x / 8 + 16 * i;
      const float factor = tiles.factor[r];
      uint4& eight = *reinterpret_cast<uint4*>(tiles.value.data + r * kStride + 8 * (threadIdx.x % 8));
      uint4 x = eight;
      for (uint32_t* pair : {&x.x, &x.y, &x.z, &x.w}) {
        if constexpr (kHalf)
          *pair = f16_pair(factor * from_f16(*pair & 0xffffu), factor * from_f16(*pair >> 16));
        else
          *pair = bf16_pair(factor * __uint_as_float(*pair << 16), factor * __uint_as_float(*pair & 0xffff0000u));
      }
      eight = x;
    }
    __syncthreads();
    if constexpr (kHalf) change_unit(tiles.unit);
#pragma unroll
    for (int i = 0; i < kMostKeyTiles; ++i) {
      if (i < key_tiles)
        multiply_tiles<false, Layout::Across, Layout::Across, kHalf>(sum[i], kTile, tiles.key[i], tiles.value);
    }
    if (more && makes_factors) newer = gates.make_factors<kHalf>(newer, &shared.tiles[side ^ 1]);
  }
  if constexpr (kHalf) change_unit(0);
  if (threadIdx.x == 0) shared.total = newer;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMostKeyTiles; ++i) {
    if (i < key_tiles) store(i, sum[i]);
  }
  if (threadIdx.x == 0) total(newer);
  __syncthreads();
}

// Calls f(node) for the nodes of the history within rows [begin, end), newest first.
template <class F>
__device__ __forceinline__ void each_old_node(const Inputs& in, const Sequence& sequence, int64_t head, int64_t begin,
                                              int64_t end, F f) {
  if (!sequence.history.has_past() || begin >= sequence.position) return;
  const int64_t grain = in.shape.grain, number = sequence.position / grain;
  const int apart = in.geometry.linear ? 0 : in.geometry.apart - in.geometry.chunk.ratio_log;
  const auto visit = [&](int level) {
    const int32_t id = sequence.history.node[level];
    if (id < 0) return;
    NodeSource node;
    node.data = in.state.node(id, head);
    node.dtype = in.state.node_layout.dtype;
    node.decay = load_element(in.state.node_decay(id, head), LLA_F32, 0);
    f(node);
  };
#pragma unroll 1
  for (int level = 0; level < apart && number >> level != 0; ++level) {
    if (((number >> level) & 1) == 0) continue;
    const int64_t first = (number >> (level + 1) << (level + 1)) * grain;
    if (first >= begin && first + (grain << level) <= end) visit(level);
  }
  if (in.geometry.absorbs && begin == 0 && number >> apart != 0) visit(kAbsorbed);
}

// One block: one run, or one small node, of one head and 64 columns of values.
template <bool kHalf>
__global__ void __launch_bounds__(kThreads) sum_runs(const __grid_constant__ StateNodes a, int64_t tasks) {
  auto& shared = *reinterpret_cast<RunsShared*>(shared_memory());
  const Inputs& in = a.in;
  const int64_t heads = in.shape.heads, tiles = tiles_of(in.shape.value_dim), pieces = a.runs + a.small;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = in.head_of(task % heads), tile = task / heads % tiles, piece = task / heads / tiles % pieces;
    const int64_t b = task / heads / tiles / pieces;
    const Sequence& sequence = in.batch.sequences[b];
    if (!takes_sweep(sequence, in.routes) || a.item >= sequence.nodes_to_store_count) continue;
    const StoredBorder border(in, sequence, a.item);
    const int64_t grain = in.shape.grain, v0 = tile * kTile, value_dim = in.shape.value_dim;
    if (piece < a.small) {
      const int level = static_cast<int>(piece);
      if (!border.has(level) || !border.wants(level)) continue;
      const int64_t begin = border.begin(level, grain);
      const int32_t id = border.plan.node[level], dtype = in.state.node_layout.dtype;
      char* to = in.state.node(id, head);
      sum_rows<kHalf>(
          in, sequence, head, v0, begin, begin + (grain << level), a.key_tiles, shared,
          [&](int part, TileSum& sum) {
            each_pair(sum, [&](int r, int c, float x, float y) {
              const int64_t row = part * kTile + r, column = v0 + c;
              if (row >= in.shape.key_dim) return;
              float newer = shared.total;
              each_old_node(in, sequence, head, begin, begin + (grain << level), [&](const NodeSource& node) {
                const float factor = decay_of(newer);
                const int64_t e = row * value_dim + column;
                if (column < value_dim) x = fmaf(factor, load_element(node.data, node.dtype, e), x);
                if (column + 1 < value_dim) y = fmaf(factor, load_element(node.data, node.dtype, e + 1), y);
                newer += node.decay;
              });
              if (column < value_dim) store_element(to, dtype, row * value_dim + column, x);
              if (column + 1 < value_dim) store_element(to, dtype, row * value_dim + column + 1, y);
            });
          },
          [&](float decay) {
            if (tile != 0) return;
            each_old_node(in, sequence, head, begin, begin + (grain << level),
                          [&](const NodeSource& node) { decay += node.decay; });
            store_element(in.state.node_decay(id, head), LLA_F32, 0, decay);
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
    sum_rows<kHalf>(
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
    if (!takes_sweep(sequence, in.routes) || a.item >= sequence.nodes_to_store_count) continue;
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
    const int64_t live = max(begin, sequence.position);
    const int64_t first = live >> kRunLog, last = (end - 1) >> kRunLog;  // runs
    const int32_t id = border.plan.node[level], dtype = in.state.node_layout.dtype;
    char* to = in.state.node(id, head);
    const int64_t size = in.shape.key_dim * value_dim;
    for (int64_t e = threadIdx.x; e <= size; e += kWalkThreads) {  // the one after the last is the log decay
      const int64_t row = e / value_dim, column = e % value_dim;
      float sum = 0, newer = 0;
      for (int64_t run = last; run >= first && live < end; --run) {
        const int64_t place = a.place(sequence, b, run);
        if (e < size) sum = fmaf(decay_of(newer), a.content(place, head, column / kTile)[row * kTile + column % kTile], sum);
        newer += a.decays[place * heads + head];
      }
      each_old_node(in, sequence, head, begin, end, [&](const NodeSource& node) {
        if (e < size) sum = fmaf(decay_of(newer), load_element(node.data, node.dtype, e), sum);
        newer += node.decay;
      });
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
    status = a.in.k.dtype == LLA_F16 ? launch(sum_runs<true>, sums, kThreads, sizeof(RunsShared), stream, a, sums)
                                     : launch(sum_runs<false>, sums, kThreads, sizeof(RunsShared), stream, a, sums);
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
  int32_t status = load_kernel(sum_runs<false>);
  if (status == LLA_OK) status = load_kernel(sum_runs<true>);
  return status == LLA_OK ? load_kernel(join_runs) : status;
}

}  // namespace lla::cuda::scalar_gate
