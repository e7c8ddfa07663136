// SPDX-License-Identifier: Apache-2.0
// What the kernels of steps share: the nodes of a step's past, what the tail stores, the end of a border.
#pragma once

#include "cuda/portable/scalar_gate.h"
#include "cuda/portable/scalar_gate_columns.h"
#include "cuda/portable/scalar_gate_fold.h"

namespace lla::cuda::scalar_gate {

constexpr int kAcross = 64 / kColumns;  // threads that share a row; a block has 64 columns of values
constexpr int kWarps = kThreads / 32;

// The nodes of a step's past, all of the history. By all lanes of each warp.
struct History {
  int32_t id[2];  // of entries lane and lane + 32; -1: zero
  uint64_t live;  // entries that are there

  // Ids of all entries, which can be asked for before `past` is known.
  struct Ids {
    int32_t of[2];
    __device__ __forceinline__ Ids(const Inputs& in, const SlotImage& image) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int level = threadIdx.x % 32 + 32 * half, index = level == kOldest ? kAbsorbed : level;
        of[half] = in.state.nodes.base && index < kNodes ? image.node[index] : -1;
      }
    }
  };
  __device__ __forceinline__ History(const Ids& ids, uint64_t past) {
#pragma unroll
    for (int half = 0; half < 2; ++half) id[half] = (past >> (threadIdx.x % 32 + 32 * half)) & 1 ? ids.of[half] : -1;
    live = __ballot_sync(kAllLanes, id[0] >= 0) | static_cast<uint64_t>(__ballot_sync(kAllLanes, id[1] >= 0)) << 32;
  }
  __device__ __forceinline__ bool has(int level) const { return (live >> level) & 1; }
  __device__ __forceinline__ int count() const { return __popcll(live); }
  // Which of the nodes entry `level` is.
  __device__ __forceinline__ int rank(int level) const { return __popcll(live & ((uint64_t{1} << level) - 1)); }
  __device__ __forceinline__ void list_nodes(const Inputs& in, int head, const char** nodes) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (id[half] >= 0) nodes[rank(threadIdx.x % 32 + 32 * half)] = in.state.node(id[half], head);
    }
    __syncwarp();
  }
  // By one warp.
  __device__ __forceinline__ void list_decays(const Inputs& in, int64_t head, float* decays, float* newer) const {
    const int lane = threadIdx.x % 32;
    float decay[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      decay[half] = id[half] >= 0 ? *reinterpret_cast<const float*>(in.state.node_decay(id[half], head)) : 0;
    float carry = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = decay[half];  // of this and the newer ones
      for (int d = 1; d < 32; d *= 2) {
        const float other = __shfl_up_sync(kAllLanes, sum, d);
        if (lane >= d) sum += other;
      }
      const float before = __shfl_up_sync(kAllLanes, sum, 1);
      decays[lane + 32 * half] = decay[half];
      newer[lane + 32 * half] = lane == 0 ? carry : carry + before;
      carry += __shfl_sync(kAllLanes, sum, 31);
    }
  }
};

// A step of one head, 64 columns of values.
struct Step {
  const Sequence& sequence;
  ChunkSpan span;
  History history;
  int head, group;
  int v0, columns;  // of the values; at most 64
  bool folds;       // completes its chunk, and the state wants the node
};

// By one warp. Copies rows into the ring blocks of the tail, new ones from the call's tensors, older ones from the history:
// the step's columns of values; by the block of the first ones the gates, and by that of the group's first head the keys.
// What others read stands elsewhere in the ring.
__device__ __forceinline__ void store_rows(const Inputs& in, const Step& step) {
  const Sequence& sequence = step.sequence;
  const SlotMemory& state = in.state;
  const TailLayout& layout = state.tail_layout;
  const SlotImage& history = sequence.history;
  const int head = step.head, group = step.group, dim = static_cast<int>(in.shape.key_dim);
  const int members = static_cast<int>(in.shape.heads) / static_cast<int>(in.shape.groups);
  const bool is_first = head == (in.shape.head_map == LLA_HEAD_MAP_CYCLIC ? group : group * members);
  const int values = (step.columns + kColumns - 1) / kColumns;
  const int parts = values + (is_first && step.v0 == 0 ? (dim + kColumns - 1) / kColumns : 0);
  const uint32_t capacity = static_cast<uint32_t>(layout.capacity);
  for (int64_t item = 0; item < sequence.tail_to_store_count; ++item) {
    const RowsToStore& plan = sequence.tail_to_store[item];
    for (int64_t p = plan.first; p < plan.last; ++p) {
      const bool fresh = p >= sequence.position;
      if (!fresh && (history.tail < 0 || p < history.start)) continue;
      const int64_t ring = (plan.ring + static_cast<uint32_t>(p - plan.first)) % capacity;
      const int64_t from_ring = (history.tail_origin + static_cast<uint32_t>(p & (in.shape.grain - 1))) % capacity;
      const int64_t row = sequence.row_begin + p - sequence.position;
      if (!fresh && plan.block == history.tail && ring == from_ring) continue;
#pragma unroll 1
      for (int part = threadIdx.x % 32; part < parts; part += 32) {
        const bool value = part < values;
        const int column = kColumns * (value ? part : part - values) + (value ? step.v0 : 0), owner = value ? head : group;
        const int count = (value ? step.v0 + step.columns : dim) - column;
        const View& tensor = value ? in.v : in.k;
        const void* from = fresh   ? tensor.at(sequence.index, row, owner)
                           : value ? state.tail_v(history.tail, owner, from_ring)
                                   : state.tail_k(history.tail, owner, from_ring);
        void* to = value ? state.tail_v(plan.block, owner, ring) : state.tail_k(plan.block, owner, ring);
        float x[kColumns];
        load_columns(from, fresh ? tensor.dtype : layout.dtype, column, count, x);
        store_columns(to, layout.dtype, column, count, x);
      }
      if (step.v0 != 0 || threadIdx.x % 32 != 31) continue;
      store_tail_factors(in, sequence, head, fresh, row, from_ring, plan.block, ring);
    }
  }
}

// The rest of a border: the new nodes' decays, and nodes that are only copied. `nodes`: the past's, newest first;
// past(entry): their log decays; `total`: of the new node.
template <class PastDecay>
__device__ __forceinline__ void finish_border(const Inputs& in, const Step& step, const char* const* nodes, PastDecay past,
                                              float total) {
  const int32_t dtype = in.state.node_layout.dtype;
  const int64_t value_dim = in.shape.value_dim;
  const Border border(in.geometry, step.span.begin >> in.geometry.chunk.rows_log);
  each_node_to_store(in.geometry, step.sequence, border, [&](int32_t id, int level) {
    float decay = total;
    if (!border.is_new(level)) {
      const int from = border.copied(level);
      const char* old = from >= 0 && step.history.has(from) ? nodes[step.history.rank(from)] : nullptr;
      decay = old ? past(from) : 0;
      for (int i = threadIdx.x; i < in.shape.key_dim * kAcross; i += kThreads) {
        const int64_t row = i / kAcross * value_dim * dtype_size(dtype), column = step.v0 + i % kAcross * kColumns;
        float x[kColumns] = {};
        if (old) load_columns(old + row, dtype, column, value_dim - column, x);
        store_columns(in.state.node(id, step.head) + row, dtype, column, value_dim - column, x);
      }
    }
    if (threadIdx.x == 0 && step.v0 == 0) store_element(in.state.node_decay(id, step.head), LLA_F32, 0, decay);
  });
}

}  // namespace lla::cuda::scalar_gate
