// SPDX-License-Identifier: Apache-2.0
// What the scalar gate's forward and backward share: geometry, the nodes in scratch, a chunk's decays, and the list of nodes
// that a chunk reads.
//
// Levels are the chunks' (chunk.h): entry j < 63 of a chunk's past is the node of 2^j chunks, entry kOldest the one node of
// linear layers, or the history's absorbing node, which stays apart from everything newer until it is stored.
#pragma once

#include "core/checked.h"
#include "cuda/common/chunk.h"
#include "cuda/common/matrix.h"
#include "cuda/common/scalar_gate_routes.h"
#include "cuda/portable/scalar_gate_tile.h"
#include "plugin/backend.h"

namespace lla::cuda::scalar_gate {

constexpr int kOldest = 63;
constexpr int kSegmentLog = 6;  // chunks of a segment: merged by one walk
constexpr int kSegment = 1 << kSegmentLog;
constexpr int kWalkThreads = 256;  // kernels that work on elements of nodes, 4 per thread

// Numbers of things of which a sequence of n rows has at most n >> shift, + extra. Rising with the sequences.
struct Places {
  int shift = 0;
  int64_t extra = 0;
  int64_t most = 0;  // that any sequence of this call has

  LLA_HOST_DEVICE int64_t first(const BatchView& batch, int64_t b) const {
    return (batch.sequences[b].row_begin >> shift) + b * extra;
  }
  LLA_HOST_DEVICE int64_t count(int64_t rows, int64_t sequences) const { return (rows >> shift) + sequences * extra; }
  Size size(const Limits& limits) const { return Size(limits.rows >> shift) + Size(limits.sequences) * extra; }
  // Tasks to which find() gives a number: all numbers, or, if these are fewer, the first `most` of each sequence.
  LLA_HOST_DEVICE bool by_sequence(const BatchView& batch) const {
    return batch.count * most <= count(batch.total_rows, batch.count);
  }
  int64_t tasks(const BatchView& batch) const {
    return by_sequence(batch) ? batch.count * most : count(batch.total_rows, batch.count);
  }
  // The sequence in whose range the number of a task lies; row_begin rises with the sequences.
  __device__ __forceinline__ int64_t find(const BatchView& batch, int64_t task, int64_t* number) const {
    if (by_sequence(batch)) {
      const int64_t b = task / most;
      *number = first(batch, b) + task % most;
      return b;
    }
    *number = task;
    int64_t low = 0, high = batch.count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (first(batch, middle) <= task)
        low = middle;
      else
        high = middle;
    }
    return low;
  }
};

struct Geometry {
  ChunkShape chunk;
  Places slots, places, segments;   // full chunks, all chunks, runs of kSegment chunks
  int64_t node_row = 0;             // elements between rows of a node in scratch
  int64_t node_size = 0;            // elements of a node in scratch
  int32_t scratch_dtype = LLA_F32;  // of nodes in scratch: bf16 where products are, and no state is involved
  int apart = 0;                    // nodes of higher levels are the absorbing node's business
  bool linear = false, absorbs = false;
  int32_t node_dtype = LLA_F32;  // nodes are rounded to what a state can hold

  Geometry(const MixerShape& shape, const SlotMemory& state)
      : chunk(shape.grain),
        node_row((shape.value_dim + 7) & ~int64_t{7}),
        node_size(shape.key_dim * node_row),
        apart(shape.separate_levels() + chunk.ratio_log),
        linear(shape.levels == 0),
        absorbs(linear || shape.absorb) {
    slots = Places{chunk.rows_log, chunk.ratio};
    places = Places{chunk.rows_log, chunk.ratio + 1};
    segments = Places{chunk.rows_log + kSegmentLog, (chunk.ratio >> kSegmentLog) + 4};
    if (state.nodes.base && !linear) node_dtype = state.node_layout.dtype;
  }
  // Entries that the past of a chunk has at most.
  int most_entries(const MixerShape& shape, int64_t length, int64_t rows) const {
    const auto bits = [](int64_t x) {
      int n = 0;
      for (; x > 0; x >>= 1) ++n;
      return n;
    };
    if (linear) return 1;
    const int by_length = bits(length >> chunk.rows_log);
    const int by_call = bits(chunk.most_chunks(rows)) + 2 + (shape.absorb ? apart : by_length);
    return 1 + (by_length < by_call ? by_length : by_call);
  }
};

// Carves arrays out of scratch; without memory it only counts.
struct Carver {
  char* memory = nullptr;
  Size used;

  template <class T>
  T* take(Size count) {
    char* here = memory ? memory + used.value() : nullptr;
    used += (count * Size(sizeof(T))).aligned(256);
    return reinterpret_cast<T*>(here);
  }
};

// The nodes that the call makes: slot c of a sequence ends with its c-th chunk.
struct NodeScratch {
  char* nodes = nullptr;  // [slot][head][dk][node_row] of scratch_dtype
  // [slot][head], logarithms of decays:
  float* leaf_decay = nullptr;   // over the chunk
  float* inner_decay = nullptr;  // over the part of the node inside the chunk's segment
  float* decay = nullptr;        // over the node
  float* up = nullptr;           // from the node's end to the end of the node that takes it in

  void take(Carver* carver, const Geometry& geometry, int64_t heads, const Limits& limits) {
    const Size count = geometry.slots.size(limits) * heads;
    nodes = reinterpret_cast<char*>(carver->take<float>(count * geometry.node_size));
    leaf_decay = carver->take<float>(count);
    inner_decay = carver->take<float>(count);
    decay = carver->take<float>(count);
    up = carver->take<float>(count);
  }
};

// The inputs that both directions have, with everything that follows from them.
struct Inputs {
  MixerShape shape;
  BatchView batch;
  View q, k, v, gate, write, lambda;
  SlotMemory state;
  Geometry geometry;
  NodeScratch scratch;
  int most_entries = 0;
  bool beside_sweeps = false;  // sequences that takes_sweep() names are others' work
  SweepRoutes routes;

  template <class Problem>
  explicit Inputs(const Problem& p)
      : shape(p.shape),
        batch(p.batch),
        q(p.q),
        k(p.k),
        v(p.v),
        gate(p.gate),
        write(p.write),
        lambda(p.lambda),
        state(p.state),
        geometry(p.shape, p.state),
        routes(sweep_routes(p.shape, p.state, p.k.dtype)) {
    most_entries = geometry.most_entries(shape, batch.most_length, batch.most_rows);
    const int64_t most_rows = batch.most_rows + shape.grain - 1;  // with those of the tail
    geometry.slots.most = most_rows >> geometry.chunk.rows_log;
    geometry.places.most = (most_rows + geometry.chunk.rows - 1) >> geometry.chunk.rows_log;
    geometry.segments.most =
        geometry.slots.most <= 1 ? geometry.slots.most : ((geometry.slots.most + kSegment - 2) >> kSegmentLog) + 1;
  }
  // Limits that are just enough for this call.
  Limits limits() const {
    Limits limits;
    limits.sequences = batch.count;
    limits.rows = batch.total_rows;
    limits.rows_per_sequence = batch.most_rows;
    limits.length = batch.most_length;
    return limits;
  }
  // Head number i in the order in which heads of a group are neighbours.
  LLA_HOST_DEVICE int64_t head_of(int64_t i) const {
    if (shape.head_map != LLA_HEAD_MAP_CYCLIC) return i;
    const int64_t members = shape.heads / shape.groups;
    return i % members * shape.groups + i / members;
  }
  // Whether products need more than bf16 operands.
  LLA_HOST_DEVICE bool exact() const { return k.dtype != LLA_BF16 || v.dtype != LLA_BF16 || q.dtype != LLA_BF16; }
};

// Makes the nodes of all full chunks: two to four kernels.
int32_t launch_nodes(const Inputs& in, bool exact, void* stream);
int32_t load_nodes_kernels();

// Outputs and states of the sequences that takes_step() names: one kernel.
int32_t launch_steps(const Inputs& in, const View& y, void* stream);
int32_t load_steps();
// The same where queries, keys, values and tails have one 2-byte type; kernels of each type in a file of their own.
template <int32_t kDtype>
int32_t launch_half_steps(const Inputs& in, const View& y, void* stream);
template <int32_t kDtype>
int32_t load_half_steps();

int32_t launch_forward(const void* problem, const Limits& limits, char* scratch, void* stream);
// The same without the outputs and nodes of sequences that take sweeps.
int32_t launch_beside_sweeps(const MixerForward& p, char* scratch, void* stream);
// Stores the nodes of these sequences; scratch as state_nodes_bytes() says.
int32_t launch_state_nodes(const MixerForward& p, char* scratch, void* stream);
int64_t state_nodes_bytes(const MixerShape& shape, const Limits& limits);
int32_t load_state_nodes();
void measure_forward(const void* problem, const Limits& limits, Need* need);
int32_t load_forward();
int32_t launch_backward(const void* problem, const Limits& limits, char* scratch, void* stream);
void measure_backward(const void* problem, const Limits& limits, Need* need);
int32_t load_backward();

// Whether a sequence appends few rows to one chunk. Its own rows alone decide, so that its bits do not depend on the batch.
constexpr int kStepRows = 4;
LLA_HOST_DEVICE inline bool takes_step(const Geometry& geometry, const Sequence& sequence) {
  const int rows = geometry.chunk.rows;
  return geometry.chunk.ratio_log == 0 && !sequence.padding && sequence.rows > 0 && sequence.rows <= kStepRows &&
         (sequence.position & (rows - 1)) + sequence.rows <= rows;
}

LLA_HOST_DEVICE inline int64_t tiles_of(int64_t size) { return (size + kTile - 1) / kTile; }

// One sequence as the kernels see it.
struct Walk {
  const Sequence& sequence;
  ChunkRange range;
  int64_t slot;  // of the first chunk

  __device__ Walk(const Inputs& in, int64_t b)
      : sequence(in.batch.sequences[b]), range(sequence, in.geometry.chunk), slot(in.geometry.slots.first(in.batch, b)) {
    if (sequence.padding || (in.beside_sweeps && takes_sweep(sequence, in.routes))) range.count = range.full = 0;
  }
  __device__ __forceinline__ int64_t slot_of(int64_t chunk) const { return slot + chunk - range.first; }
  __device__ __forceinline__ bool makes(int64_t chunk) const {
    return chunk >= range.first && chunk < range.first + range.full;
  }
};

__device__ __forceinline__ char* node_at(const Inputs& in, char* nodes, int64_t slot, int64_t head) {
  return nodes + (slot * in.shape.heads + head) * in.geometry.node_size * dtype_size(in.geometry.scratch_dtype);
}
// Elements 4 i ... 4 i + 3 of a node in scratch.
__device__ __forceinline__ float4 get_node4(const Inputs& in, const char* node, int64_t i) {
  if (in.geometry.scratch_dtype == LLA_F32) return reinterpret_cast<const float4*>(node)[i];
  const uint2 x = reinterpret_cast<const uint2*>(node)[i];
  return make_float4(from_bf16(x.x & 0xffffu), from_bf16(x.x >> 16), from_bf16(x.y & 0xffffu), from_bf16(x.y >> 16));
}
__device__ __forceinline__ void set_node4(const Inputs& in, char* node, int64_t i, float4 x) {
  if (in.geometry.scratch_dtype == LLA_F32) {
    reinterpret_cast<float4*>(node)[i] = x;
    return;
  }
  uint2 both;
  both.x = bf16_pair(x.x, x.y);
  both.y = bf16_pair(x.z, x.w);
  reinterpret_cast<uint2*>(node)[i] = both;
}
// Stores 64 x 64 elements of a node in scratch, from row k0 and column v0 on, by way of a tile that nobody uses. The tile is
// free again after the next barrier.
template <bool kExact>
__device__ __forceinline__ void set_node_tile(const Inputs& in, char* node, int64_t k0, int64_t v0, TileSum& sum,
                                              Tile<kExact>& tile) {
  const int rows = static_cast<int>(min(in.shape.key_dim - k0, int64_t{64}));
  const int columns = static_cast<int>(min(in.geometry.node_row - v0, int64_t{64}));
  const int64_t at = k0 * in.geometry.node_row + v0;
  if constexpr (!kExact) {
    if (in.geometry.scratch_dtype == LLA_BF16) {
      put_tile<false>(tile, sum);
      __syncthreads();
      store_tile(tile, node + 2 * at, 2 * in.geometry.node_row, 0, rows, columns);
      return;
    }
  }
  each_pair(sum, [&](int row, int column, float x, float y) {
    if (row < rows && column < columns)
      *reinterpret_cast<float2*>(reinterpret_cast<float*>(node) + at + row * in.geometry.node_row + column) =
          make_float2(x, y);
  });
}

__device__ __forceinline__ int trailing_ones_of(int64_t chunk) { return __ffsll(~chunk) - 1; }
__device__ __forceinline__ int highest_bit(int64_t x) { return 63 - __clzll(x); }

// Whether the history has an absorbing node that counts.
__device__ __forceinline__ bool has_oldest(const Geometry& geometry, int64_t first) {
  return geometry.absorbs && (geometry.linear || (first >> geometry.apart) != 0);
}

// Bits of the entries of the past of `chunk`, in a call whose first chunk is `first`. What the history has lumped is left
// out.
__device__ __forceinline__ uint64_t past_of(const Geometry& geometry, int64_t first, int64_t chunk) {
  uint64_t mask = has_oldest(geometry, first) ? uint64_t{1} << kOldest : 0;
  if (geometry.linear) return mask;
  const uint64_t fresh = chunk == first ? 0 : (uint64_t{2} << highest_bit(chunk ^ first)) - 1;
  return mask | (static_cast<uint64_t>(chunk) & (fresh | ((uint64_t{1} << geometry.apart) - 1)));
}

// Id of the history's node for an entry; -1: none.
__device__ __forceinline__ int32_t old_node(const Inputs& in, const int32_t* ids, int level) {
  if (!in.state.nodes.base) return -1;
  return ids[level == kOldest ? kAbsorbed : level - in.geometry.chunk.ratio_log];
}

// Where a node lies; data null: it is zero.
struct NodeSource {
  const void* data = nullptr;
  int32_t dtype = LLA_F32;
  int64_t row = 0;  // elements between rows
  float decay = 0;
};

__device__ __forceinline__ NodeSource history_node(const Inputs& in, const Sequence& sequence, int level, int64_t head) {
  NodeSource node;
  const int32_t id = old_node(in, sequence.history.node, level);
  if (id < 0) return node;
  node.data = in.state.node(id, head);
  node.dtype = in.state.node_layout.dtype;
  node.row = in.shape.value_dim;
  node.decay = load_element(in.state.node_decay(id, head), LLA_F32, 0);
  return node;
}

// Entry `level` of the past of `chunk`.
__device__ __forceinline__ NodeSource past_node(const Inputs& in, const Walk& walk, int64_t chunk, int level, int64_t head) {
  const bool linear = in.geometry.linear;
  const int64_t end = linear ? chunk : level == kOldest ? 0 : bucket_end(chunk, level);
  if (end <= walk.range.first) return history_node(in, walk.sequence, level, head);
  const int64_t slot = walk.slot_of(end - 1);
  NodeSource node;
  node.data = node_at(in, in.scratch.nodes, slot, head);
  node.dtype = in.geometry.scratch_dtype;
  node.row = in.geometry.node_row;
  node.decay = linear ? 0 : in.scratch.decay[slot * in.shape.heads + head];
  return node;
}

// The entries of a chunk's past in shared memory.
struct Past {
  NodeSource node[64];
  float newer[64];  // log decay from the node's end to the chunk's start
};

// By one warp. Entries that are not in `mask` are not set.
__device__ __forceinline__ void list_past(const Inputs& in, const Walk& walk, int64_t chunk, int64_t head, uint64_t mask,
                                          Past* past) {
  const int lane = threadIdx.x % 32;
  float carry = 0;
  for (int round = 0; round < 2; ++round) {
    const int level = 32 * round + lane;
    NodeSource node;
    const bool live = (mask >> level) & 1;
    if (live) node = past_node(in, walk, chunk, level, head);
    float sum = node.decay;  // of this and the newer ones
    for (int d = 1; d < 32; d *= 2) {
      const float other = __shfl_up_sync(kAllLanes, sum, d);
      if (lane >= d) sum += other;
    }
    const float newer = __shfl_up_sync(kAllLanes, sum, 1);
    if (live) {
      past->node[level] = node;
      past->newer[level] = lane == 0 ? carry : carry + newer;
    }
    carry += __shfl_sync(kAllLanes, sum, 31);
  }
}

// λ column of an entry.
__device__ __forceinline__ int64_t entry_column(const Inputs& in, int level) {
  return level == kOldest ? in.shape.levels - 1 : in.shape.column(level + in.geometry.chunk.rows_log + 1);
}

// Rows of a chunk in one tensor: of the call, and, before local row lo, of the tail. Cheaper than ChunkSource per row.
struct ChunkRows {
  const char *call, *tail = nullptr;
  int64_t call_row, tail_row = 0;  // bytes
  int32_t call_dtype, tail_dtype = LLA_F32;
  int lo, hi, begin;  // local rows before `begin` are zero
  int64_t ring = 0, capacity = 0;

  __device__ ChunkRows(const Inputs& in, const Sequence& sequence, const ChunkSpan& span, const View& tensor, int64_t head)
      : lo(span.lo), hi(span.hi), begin(span.lo) {
    call = static_cast<const char*>(tensor.at(sequence.index, span.row(sequence, 0), head));
    call_row = tensor.row_stride * dtype_size(tensor.dtype);
    call_dtype = tensor.dtype;
    if (lo == 0 || sequence.history.tail < 0) return;
    const int64_t before = sequence.history.start - span.begin;
    begin = before <= 0 ? 0 : before < lo ? static_cast<int>(before) : lo;
    capacity = in.state.tail_layout.capacity;
    ring = (static_cast<uint32_t>(sequence.history.tail_origin) + static_cast<uint32_t>(span.begin & (in.shape.grain - 1))) %
           static_cast<uint32_t>(capacity);  // little code, as above all a step has use for
    tail_dtype = in.state.tail_layout.dtype;
  }
  __device__ void set_tail(const char* base, int64_t elements) {
    tail = base;
    tail_row = elements * dtype_size(tail_dtype);
  }
  __device__ __forceinline__ Elements operator()(int r) const {
    if (r >= hi || r < begin) return {};
    if (r >= lo) return {call + r * call_row, call_dtype};
    int64_t at = ring + r;
    if (at >= capacity) at -= capacity;
    return {tail + at * tail_row, tail_dtype};
  }
};

__device__ __forceinline__ ChunkRows group_key_rows(const Inputs& in, const Sequence& sequence, const ChunkSpan& span,
                                                    int64_t group) {
  ChunkRows rows(in, sequence, span, in.k, group);
  if (rows.begin < rows.lo) rows.set_tail(in.state.tail_k(sequence.history.tail, group, 0), in.shape.key_dim);
  return rows;
}
__device__ __forceinline__ ChunkRows key_rows(const Inputs& in, const Sequence& sequence, const ChunkSpan& span,
                                              int64_t head) {
  return group_key_rows(in, sequence, span, in.shape.group_of(head));
}
__device__ __forceinline__ ChunkRows value_rows(const Inputs& in, const Sequence& sequence, const ChunkSpan& span,
                                                int64_t head) {
  ChunkRows rows(in, sequence, span, in.v, head);
  if (rows.begin < rows.lo) rows.set_tail(in.state.tail_v(sequence.history.tail, head, 0), in.shape.value_dim);
  return rows;
}
// Of a tensor that has no rows in the tail: q, dy.
__device__ __forceinline__ ChunkRows call_rows(const Inputs& in, const Sequence& sequence, const ChunkSpan& span,
                                               const View& tensor, int64_t head) {
  ChunkRows rows(in, sequence, span, tensor, head);
  rows.begin = rows.lo;
  return rows;
}

// The rows of a chunk's tensors, for shared memory: all threads hold them alike, and they would cost registers all the way.
struct RowSources {
  ChunkRows queries, keys, values;
};

// By one warp, whose lane l holds the log gates of local rows l and l + 32. Calls f(d, row, prefix, suffix) for d = 0 ... 6:
// sums over the row's aligned block of 2^d rows, up to and with the row, and after it. No sum is a difference of two.
template <class F>
__device__ __forceinline__ void block_sums(float low_gate, float high_gate, F f) {
  const int lane = threadIdx.x % 32;
  float prefix[2] = {low_gate, high_gate}, suffix[2] = {0, 0};
#pragma unroll
  for (int d = 0; d <= 6; ++d) {
#pragma unroll
    for (int half = 0; half < 2; ++half) f(d, lane + 32 * half, prefix[half], suffix[half]);
    if (d < 5) {
      const int block = lane >> d << d, size = 1 << d;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float left = __shfl_sync(kAllLanes, prefix[half], (block - 1) & 31);
        const float right = __shfl_sync(kAllLanes, prefix[half], (block + 2 * size - 1) & 31);
        if (lane & size)
          prefix[half] += left;
        else
          suffix[half] += right;
      }
    } else if (d == 5) {
      const float left = __shfl_sync(kAllLanes, prefix[0], 31), right = __shfl_sync(kAllLanes, prefix[1], 31);
      prefix[1] += left;
      suffix[0] += right;
    }
  }
}

// Factors of 64 local rows in shared memory. For i > s of level l the decay is row[l][i] * key[l][s].
struct ChunkDecays {
  float row[8][64];  // [7]: from the chunk's start into the row
  float key[8][64];  // [7]: from the row to the chunk's end
  float write[64];
  float gate[64];
};

// By one warp, whose lane l gives the log gates and write strengths of local rows l and l + 32. Returns the log decay of the
// chunk (in all lanes).
__device__ __forceinline__ float fill_decays(const float (&gate)[2], const float (&write)[2], ChunkDecays* decays) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    decays->gate[lane + 32 * half] = gate[half];
    decays->write[lane + 32 * half] = write[half];
  }
  float total = 0;
  block_sums(gate[0], gate[1], [&](int d, int r, float prefix, float suffix) {
    decays->row[d + 1][r] = decay_of(prefix);
    decays->key[d + 1][r] = decay_of(suffix);
    if (d == 6) total = prefix;
  });
  return __shfl_sync(kAllLanes, total, 31);
}
__device__ __forceinline__ float fill_decays(const Inputs& in, const Sequence& sequence, const ChunkSpan& span, int64_t head,
                                             ChunkDecays* decays) {
  const ChunkSource source{sequence, in.state, in.shape.grain, span};
  float gate[2], write[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = threadIdx.x % 32 + 32 * half;
    gate[half] = source.gate(in.gate, head, r);
    write[half] = source.write(in.write, head, r);
  }
  return fill_decays(gate, write, decays);
}

// Gate and write strength of a row that the tail keeps: `row` of the call, if it is `fresh`, else place `from_ring` of the
// history's block.
__device__ __forceinline__ void store_tail_factors(const Inputs& in, const Sequence& sequence, int head, bool fresh,
                                                   int64_t row, int64_t from_ring, int64_t block, int64_t ring) {
  const SlotMemory& state = in.state;
  float gate = 0, write = 1;
  if (fresh) {
    if (in.gate.present()) gate = load_element(in.gate.at(sequence.index, row, head), in.gate.dtype, 0);
    if (in.write.present()) write = load_element(in.write.at(sequence.index, row, head), in.write.dtype, 0);
  } else {
    gate = load_element(state.tail_gate(sequence.history.tail, head, from_ring), LLA_F32, 0);
    write = load_element(state.tail_write(sequence.history.tail, head, from_ring), LLA_F32, 0);
  }
  store_element(state.tail_gate(block, head, ring), LLA_F32, 0, gate);
  store_element(state.tail_write(block, head, ring), LLA_F32, 0, write);
}

// Rounds to the type of a state's nodes.
__device__ __forceinline__ float rounded(int32_t dtype, float x) {
  if (dtype == LLA_F32) return x;
  return dtype == LLA_BF16 ? from_bf16(to_bf16(x)) : from_f16(to_f16(x));
}

// Fills a tile with the block of a node that begins at row `k0` and column `v0`. Complete after arrive().
template <bool kExact>
__device__ __forceinline__ void fill_node_tile(const Inputs& in, Tile<kExact>& tile, const NodeSource& node, int64_t k0,
                                               int64_t v0) {
  const int64_t bytes = node.row * dtype_size(node.dtype);
  const char* data = static_cast<const char*>(node.data) + k0 * bytes;
  const int rows = static_cast<int>(min(in.shape.key_dim - k0, int64_t{64}));
  const int32_t dtype = node.dtype;
  fill_tile<kExact>(tile, v0, node.row, [&](int r) { return r < rows ? Elements{data + r * bytes, dtype} : Elements{}; });
}

// A depth of at most 64 as multiply() wants it.
__device__ __forceinline__ int depth_of(int64_t left) {
  return left >= kTile ? kTile : static_cast<int>((left + 7) & ~int64_t{7});
}

}  // namespace lla::cuda::scalar_gate
