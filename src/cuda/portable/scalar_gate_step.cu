// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward of few rows, as in decoding: the rows of a sequence that appends at most kStepRows rows without leaving
// its chunk. Their products are sums over what is read once: the nodes of the past and the raw rows of the tail.
#include "cuda/common/async_copy.h"
#include "cuda/portable/scalar_gate.h"
#include "cuda/portable/scalar_gate_columns.h"

namespace lla::cuda::scalar_gate {

namespace {

constexpr int kMostColumns = 80;  // of λ, that can be read: levels inside a chunk and 64 entries
constexpr int kTileRows = 32;  // rows of a node that are copied at once
constexpr int kStages = 4;     // of the ring of such tiles

// What one block needs. Behind it: the queries [dk][kRows], the sums of the lanes [kLanes][kRows][columns], the ring.
template <int kRows>
struct StepShared {
  ChunkDecays decays;
  Past past;
  float lambda[kMostColumns][kRows];  // of the levels that there are, times the scale
  float weight[64][kRows];            // with which the rows read the entry of a level
  float score[64][kRows];             // with which they read the chunk's own values
  const void *key[64], *value[64];    // the chunk's rows; null: zero
};

// Where its parts lie.
struct StepParts {
  int64_t query, lanes, ring, bytes;

  template <class Shared>
  static __host__ __device__ StepParts of(const Inputs& in, int rows, int columns) {
    StepParts parts;
    parts.query = (sizeof(Shared) + 15) & ~int64_t{15};
    parts.lanes = parts.query + ((in.shape.key_dim * rows + 3) & ~int64_t{3}) * 4;
    parts.ring = parts.lanes + int64_t{kLanes} * rows * columns * 4;
    parts.bytes = parts.ring + int64_t{kStages} * kTileRows * columns * dtype_size(in.state.node_layout.dtype);
    return parts;
  }
};

template <int kRows>
__device__ __forceinline__ void add_scaled_row(float (&sum)[kRows][kColumns], const float (&x)[kColumns], const float* factor) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sum[r][j] += factor[r] * x[j];
  }
}
template <int kRows>
__device__ __forceinline__ void clear(float (&sum)[kRows][kColumns]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sum[r][j] = 0;
  }
}

// The tiles of the nodes of a past, one after the other.
struct TileWalk {
  const Past& past;
  uint64_t rest;  // entries from the current one on
  int level = -1, row = 0;

  __device__ TileWalk(const Past& nodes, uint64_t mask) : past(nodes), rest(mask) { find(); }
  __device__ __forceinline__ bool there() const { return rest != 0; }
  __device__ __forceinline__ void find() {
    for (; rest; rest &= rest - 1) {
      level = __ffsll(static_cast<long long>(rest)) - 1;
      if (past.node[level].data) return;
    }
  }
  // Whether the tile was the last one of its node.
  __device__ __forceinline__ bool next(int rows) {
    row += kTileRows;
    if (row < rows) return false;
    row = 0;
    rest &= rest - 1;
    find();
    return true;
  }
};

// What comes before the values: decays, weights, scores. Needs `shared.past`. Ends with a barrier.
template <int kRows>
__device__ __forceinline__ void prepare_step(const Inputs& in, const Walk& walk, int64_t head, StepShared<kRows>& shared,
                                          float* query) {
  const MixerShape& shape = in.shape;
  const Sequence& sequence = walk.sequence;
  const int64_t chunk = walk.range.first;
  const ChunkSpan span(sequence, in.geometry.chunk, chunk);
  const uint64_t past = past_of(in.geometry, chunk, chunk);
  const int count = static_cast<int>(sequence.rows);
  const float scale = static_cast<float>(shape.scale);
  const auto lambda_of = [&](int r, int64_t column) { return shape.levels == 0 ? scale : shared.lambda[column][r]; };
  for (int i = threadIdx.x; i < min(shape.levels, int64_t{kMostColumns}) * kRows; i += blockDim.x) {
    const int c = i / kRows, r = i % kRows;
    const int64_t position = sequence.position + r;  // whose pairs with the past have no level above its bit length
    if (r < count && (c == 0 || c == shape.levels - 1 || (c <= 62 && position >> (c - 1) != 0)))
      shared.lambda[c][r] =
          scale * load_element(in.lambda.at(sequence.index, span.row(sequence, span.lo + r), head), in.lambda.dtype, c);
  }
  if (threadIdx.x < 32) fill_decays(in, sequence, span, head, &shared.decays);
  const ChunkRows keys = key_rows(in, sequence, span, head), values = value_rows(in, sequence, span, head);
  for (int s = threadIdx.x; s < 64; s += blockDim.x) {
    shared.key[s] = keys(s).data;
    shared.value[s] = values(s).data;
  }
  for (int64_t i = threadIdx.x; i < shape.key_dim * kRows; i += blockDim.x) {
    const int r = static_cast<int>(i % kRows);
    query[i] = r < count ? load_element(in.q.at(sequence.index, span.row(sequence, span.lo + r), shape.group_of(head)),
                                        in.q.dtype, i / kRows)
                         : 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * kRows; i += blockDim.x) {
    const int level = i / kRows, r = i % kRows;
    const bool read = r < count && ((past >> level) & 1);
    shared.weight[level][r] = read ? lambda_of(r, entry_column(in, level)) * shared.decays.row[7][span.lo + r] *
                                         decay_of(shared.past.newer[level])
                                   : 0;
  }
  // Scores: two threads for each row of the chunk, whose halves of the key are interleaved.
  for (int first = 0; first < span.hi; first += blockDim.x / 2) {
    const int s = first + threadIdx.x / 2;
    float dot[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) dot[r] = 0;
    const void* key = s < span.hi ? shared.key[s] : nullptr;
    const int32_t dtype = s < span.lo ? in.state.tail_layout.dtype : in.k.dtype;
    const int64_t dim = key ? shape.key_dim : 0;
#pragma unroll 8
    for (int64_t k = kColumns * (threadIdx.x % 2); k < dim; k += 2 * kColumns) {
      float x[kColumns];
      load_columns(key, dtype, k, dim - k, x);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (k + j >= dim) break;
#pragma unroll
        for (int r = 0; r < kRows; ++r) dot[r] += x[j] * query[(k + j) * kRows + r];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = span.lo + r;
      const float total = dot[r] + __shfl_xor_sync(kAllLanes, dot[r], 1);
      if (threadIdx.x % 2 != 0 || s >= span.hi) continue;
      float weight = 0;
      if (r < count && s <= i) {
        const int level = local_level(i, s);
        weight = total * lambda_of(r, shape.column(level)) * shared.decays.write[s];
        if (level > 0) weight *= shared.decays.row[level][i] * shared.decays.key[level][s];
      }
      shared.score[s][r] = weight;
    }
  }
  __syncthreads();
}

// Copies rows into the ring blocks of the tail, new ones from the call's tensors, older ones from the history: `columns` of the
// head's values; by the block of the first ones the gates, and by that of the group's first head the keys.
__device__ __forceinline__ void store_rows(const Inputs& in, const Sequence& sequence, int64_t head, int64_t v0,
                                           int64_t columns) {
  const SlotMemory& state = in.state;
  const TailLayout& layout = state.tail_layout;
  const SlotImage& history = sequence.history;
  const int64_t group = in.shape.group_of(head), members = in.shape.heads / in.shape.groups;
  const bool is_first = in.shape.head_map == LLA_HEAD_MAP_CYCLIC ? head < in.shape.groups : head % members == 0;
  const int64_t all = columns + (is_first && v0 == 0 ? in.shape.key_dim : 0);
  for (int64_t item = 0; item < sequence.tail_to_store_count; ++item) {
    const RowsToStore& plan = sequence.tail_to_store[item];
    for (int64_t p = plan.first; p < plan.last; ++p) {
      const bool fresh = p >= sequence.position;
      if (!fresh && (history.tail < 0 || p < history.start)) continue;
      const int64_t ring = (plan.ring + p - plan.first) % layout.capacity;
      const int64_t from_ring = (history.tail_origin + (p & (in.shape.grain - 1))) % layout.capacity;
      const int64_t row = sequence.row_begin + p - sequence.position;
      if (!fresh && plan.block == history.tail && ring == from_ring) continue;
      for (int64_t i = threadIdx.x; i < all; i += blockDim.x) {
        const bool value = i < columns;
        const int64_t column = value ? v0 + i : i - columns, owner = value ? head : group;
        const View& tensor = value ? in.v : in.k;
        const void* from = fresh   ? tensor.at(sequence.index, row, owner)
                           : value ? state.tail_v(history.tail, owner, from_ring)
                                   : state.tail_k(history.tail, owner, from_ring);
        void* to = value ? state.tail_v(plan.block, owner, ring) : state.tail_k(plan.block, owner, ring);
        store_element(to, layout.dtype, column, load_element(from, fresh ? tensor.dtype : layout.dtype, column));
      }
      if (v0 != 0 || threadIdx.x != 0) continue;
      float gate = 0, write = 1;
      if (fresh) {
        if (in.gate.present()) gate = load_element(in.gate.at(sequence.index, row, head), in.gate.dtype, 0);
        if (in.write.present()) write = load_element(in.write.at(sequence.index, row, head), in.write.dtype, 0);
      } else {
        gate = load_element(state.tail_gate(history.tail, head, from_ring), LLA_F32, 0);
        write = load_element(state.tail_write(history.tail, head, from_ring), LLA_F32, 0);
      }
      store_element(state.tail_gate(plan.block, head, ring), LLA_F32, 0, gate);
      store_element(state.tail_write(plan.block, head, ring), LLA_F32, 0, write);
    }
  }
}

// One block: the rows of one sequence and head, `columns` columns of values (kLanes threads for every kColumns of them).
template <int kRows>
__global__ void __launch_bounds__(128, kRows == 1 ? 5 : 4)
    step_rows(const __grid_constant__ Inputs in, const View y, int columns, int64_t tasks) {
  auto& shared = *reinterpret_cast<StepShared<kRows>*>(shared_memory());
  const StepParts at = StepParts::of<StepShared<kRows>>(in, kRows, columns);
  float* query = reinterpret_cast<float*>(shared_memory() + at.query);
  float* lanes = reinterpret_cast<float*>(shared_memory() + at.lanes);
  const MixerShape& shape = in.shape;
  const int64_t heads = shape.heads, parts = (shape.value_dim + columns - 1) / columns;
  const int rows = static_cast<int>(shape.key_dim);
  const int across = columns / kColumns, lane = static_cast<int>(threadIdx.x) / across, place = threadIdx.x % across * kColumns;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = in.head_of(task % heads), v0 = task / heads % parts * columns;
    const Walk walk(in, task / heads / parts);
    const Sequence& sequence = walk.sequence;
    if (!takes_step(in.geometry, sequence)) continue;
    const int64_t chunk = walk.range.first;
    const uint64_t past = past_of(in.geometry, chunk, chunk);
    if (threadIdx.x < 32) list_past(in, walk, chunk, head, past, &shared.past);
    __syncthreads();

    // Nodes of the pool have whole rows of value_dim elements; if these are not multiples of 16 bytes, there is no ring.
    const int32_t dtype = in.state.node_layout.dtype;
    const int size = static_cast<int>(dtype_size(dtype)), row_bytes = columns * size;
    const int64_t left = shape.value_dim - v0;
    const bool ring = shape.value_dim % kColumns == 0;
    TileWalk ahead(shared.past, ring ? past : 0), here(shared.past, past);
    char* stages = shared_memory() + at.ring;
    const auto copy_next = [&](int stage) {
      if (ahead.there()) {
        const NodeSource& node = ahead.past.node[ahead.level];
        const char* from = static_cast<const char*>(node.data) + (ahead.row * node.row + v0) * size;
        char* to = stages + stage * kTileRows * row_bytes;
        const int pieces = row_bytes / 16, count = min(kTileRows, rows - ahead.row) * pieces;
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
          const int r = i / pieces, c = i % pieces;
          if (c * 16 < left * size) copy_async16(to + r * row_bytes + c * 16, from + r * node.row * size + c * 16);
        }
        ahead.next(rows);
      }
      commit_copies();
    };
    for (int stage = 0; stage < kStages - 1; ++stage) copy_next(stage);
    prepare_step<kRows>(in, walk, head, shared, query);

    float sum[kRows][kColumns], part[kRows][kColumns];
    clear(sum);
    clear(part);
    const auto close_node = [&](int level) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float weight = shared.weight[level][r];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sum[r][j] += weight * part[r][j];
      }
      clear(part);
    };
    if (ring) {
      for (int stage = 0; here.there(); stage = (stage + 1) % kStages) {
        wait_copies<kStages - 2>();
        __syncthreads();
        copy_next((stage + kStages - 1) % kStages);
        const char* tile = stages + stage * kTileRows * row_bytes;
        if (place < left) {
#pragma unroll
          for (int i = 0; i < kTileRows / kLanes; ++i) {
            const int r = lane + i * kLanes;
            if (here.row + r >= rows) continue;
            float x[kColumns];
            get_columns(tile + r * row_bytes + place * size, dtype, x);
            add_scaled_row<kRows>(part, x, query + (here.row + r) * kRows);
          }
        }
        const int level = here.level;
        if (here.next(rows)) close_node(level);
      }
      wait_copies<0>();
    } else {
      for (; here.there(); here.next(0)) {
        const NodeSource& node = here.past.node[here.level];
#pragma unroll 1
        for (int k = lane; k < rows; k += kLanes) {
          float x[kColumns];
          load_columns(static_cast<const char*>(node.data) + k * node.row * size, dtype, v0 + place, left - place, x);
          add_scaled_row<kRows>(part, x, query + k * kRows);
        }
        close_node(here.level);
      }
    }
    const ChunkSpan span(sequence, in.geometry.chunk, chunk);
#pragma unroll
    for (int i = 0; i < 64 / kLanes; ++i) {
      const int s = lane + i * kLanes;
      if (s >= span.hi || !shared.value[s]) continue;
      float x[kColumns];
      load_columns(shared.value[s], s < span.lo ? in.state.tail_layout.dtype : in.v.dtype, v0 + place, left - place, x);
      add_scaled_row<kRows>(sum, x, shared.score[s]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) lanes[(lane * kRows + r) * columns + place + j] = sum[r][j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * columns; i += blockDim.x) {
      const int r = i / columns, c = i % columns;
      if (r >= sequence.rows || c >= left) continue;
      float total = 0;
      for (int l = 0; l < kLanes; ++l) total += lanes[(l * kRows + r) * columns + c];
      put_element(y.at(sequence.index, span.row(sequence, span.lo + r), head), y.dtype, v0 + c, total, y.accumulate);
    }
    if (in.batch.stores && in.state.tails.base) store_rows(in, sequence, head, v0, min(left, int64_t{columns}));
    __syncthreads();
  }
}

template <int kRows>
int32_t launch_rows(const Inputs& in, const View& y, void* stream) {
  // Narrower blocks where half of one would have nothing to do: the bits are the same.
  int columns = 64;
  while (columns > 16 && columns / 2 >= in.shape.value_dim) columns /= 2;
  const int64_t tasks = in.batch.count * in.shape.heads * ((in.shape.value_dim + columns - 1) / columns);
  const int64_t bytes = StepParts::of<StepShared<kRows>>(in, kRows, columns).bytes;
  return launch(step_rows<kRows>, tasks, columns / kColumns * kLanes, static_cast<size_t>(bytes), stream, in, y, columns, tasks);
}

}  // namespace

int32_t launch_steps(const Inputs& in, const View& y, void* stream) {
  const int32_t status =
      in.batch.most_rows <= 1 ? launch_rows<1>(in, y, stream) : launch_rows<kStepRows>(in, y, stream);
  const bool folds = in.batch.stores && in.state.nodes.base && in.batch.most_nodes_to_store > 0;
  return status == LLA_OK && folds ? launch_folds(in, stream) : status;
}

int32_t load_steps() {
  int32_t status = load_kernel(step_rows<1>);
  if (status == LLA_OK) status = load_kernel(step_rows<kStepRows>);
  return status == LLA_OK ? load_folds() : status;
}

}  // namespace lla::cuda::scalar_gate
