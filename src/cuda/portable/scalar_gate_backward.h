// SPDX-License-Identifier: Apache-2.0
// What the kernels of the scalar gate's backward share.
//
// Flow: a read of source s by row t contributes dy . (weight v_s) to the gradient of every log gate between the two. The
// gradient of a gate is the flow that crosses it: inside a chunk from sums over rows and columns of the same products, at
// the end of a chunk from its nodes: what later rows read of them, plus what goes on through the node that takes them in.
#pragma once

#include "cuda/portable/head_slices.h"
#include "cuda/portable/scalar_gate.h"

namespace lla::cuda::scalar_gate {

constexpr int64_t kBundle = 8;  // heads of a group whose gradients of q and k one block sums up

struct BackwardScratch {
  char* grads = nullptr;  // [slot][head][dk][node_row] of scratch_dtype: of nodes; first from their readers only, then all
  float* weights = nullptr;  // [place][head][entries][64]: with which the rows of a chunk read the entries of its past
  float* reads = nullptr;  // [place][levels][head]: flow of these reads, then summed over the later chunks of the same node
  float* rows = nullptr;   // [place][head][64]: what a row reads of others less what others read of it
  float* partials = nullptr;   // [slot][head][warps][2]: parts of `flows`
  float* flows = nullptr;      // [slot][head][2]: of a node through the one that takes it in, and into the final state
  float* old_flows = nullptr;  // [sequence][head][levels][2]: the same of the history's nodes
  float *dq = nullptr, *dk = nullptr;            // [part][place][part_size]
  float *dq_sums = nullptr, *dk_sums = nullptr;  // [place][part_size]: over the group's earlier parts, if slices cut groups
};

struct Backward {
  Inputs in;
  View dy, dq, dk, dv, dgate, dwrite, dlambda;
  SlotMemory gradient;
  BackwardScratch scratch;
  int levels = 1;                              // of entries that there can be, kOldest included
  int64_t warps = 0;                           // that share a node
  int64_t members = 1, bundle = 1, parts = 1;  // heads of a group, heads of a part, parts of all groups
  // A slice of a group: it goes on with the part that the slice before has begun, with the sums that are there; all heads of
  // its last part, of its group, are there then.
  bool resumes_part = false, resumes_group = false, ends_part = true, ends_group = true;

  // `p`: a slice of a problem whose parts have at most `part` heads.
  explicit Backward(const MixerBackward& p, int64_t part, const Limits& limits)
      : in(p),
        dy(p.dy),
        dq(p.dq),
        dk(p.dk),
        dv(p.dv),
        dgate(p.dgate),
        dwrite(p.dwrite),
        dlambda(p.dlambda),
        gradient(p.gradient) {
    const MixerShape& shape = in.shape;
    for (int64_t n = limits.length >> in.geometry.chunk.rows_log; n > 0 && !in.geometry.linear; n >>= 1) ++levels;
    in.most_entries = in.geometry.most_entries(shape, limits.length, limits.rows_per_sequence);
    warps = (in.geometry.node_size + 127) / 128;
    members = shape.heads / shape.groups;
    bundle = members < part ? members : part;
    parts = shape.groups * ((members + bundle - 1) / bundle);
  }
  // For slices of this many heads. Sums over parts come first: they stay from slice to slice.
  void take(Carver* carver, const Limits& limits, int64_t heads, bool cuts_groups) {
    const Geometry& geometry = in.geometry;
    const Size places = geometry.places.size(limits), part = places * part_size();
    if (cuts_groups) {
      scratch.dq_sums = carver->take<float>(part);
      scratch.dk_sums = carver->take<float>(part);
    }
    const int64_t of_group = (members + bundle - 1) / bundle;
    const int64_t count = heads >= members ? heads / members * of_group : (heads + bundle - 1) / bundle;
    scratch.dq = carver->take<float>(part * count);
    scratch.dk = carver->take<float>(part * count);
    in.scratch.take(carver, geometry, heads, limits);
    const Size slots = geometry.slots.size(limits) * heads;
    scratch.grads = reinterpret_cast<char*>(carver->take<float>(slots * geometry.node_size));
    scratch.weights = carver->take<float>(places * heads * in.most_entries * 64);
    scratch.reads = carver->take<float>(places * levels * heads);
    scratch.rows = carver->take<float>(places * heads * 64);
    scratch.partials = carver->take<float>(slots * warps * 2);
    scratch.flows = carver->take<float>(slots * 2);
    scratch.old_flows = carver->take<float>(Size(limits.sequences) * heads * levels * 2);
  }
  // Sums of a chunk and part: whole tiles in the order of an accumulator's threads, or, of small chunks, [C][dk].
  LLA_HOST_DEVICE int64_t part_size() const {
    return in.geometry.chunk.rows == kTile ? tiles_of(in.shape.key_dim) * kTile * kTile
                                           : in.geometry.chunk.rows * in.shape.key_dim;
  }
  // Where the element of a row and column lies there.
  LLA_HOST_DEVICE int64_t part_index(int row, int64_t column) const {
    if (in.geometry.chunk.rows != kTile) return row * in.shape.key_dim + column;
    const int c = static_cast<int>(column % kTile);
    const int thread = 32 * (row / 32 * 2 + c / 32) + row % 8 * 4 + c % 8 / 2;
    return column / kTile * kTile * kTile + (row % 32 / 16 * 4 + c % 32 / 8) * 4 * kThreads + 4 * thread + row % 16 / 8 * 2 +
           c % 2;
  }
  // Index of an entry in arrays of `levels`.
  LLA_HOST_DEVICE int index_of(int level) const { return level == kOldest ? levels - 1 : level; }
  LLA_HOST_DEVICE int level_of_index(int index) const { return index == levels - 1 ? kOldest : index; }
  LLA_HOST_DEVICE float* weight_rows(int64_t place, int64_t head, int entry) const {
    return scratch.weights + ((place * in.shape.heads + head) * in.most_entries + entry) * 64;
  }
  LLA_HOST_DEVICE float* reads_at(int64_t place, int index, int64_t head) const {
    return scratch.reads + (place * levels + index) * in.shape.heads + head;
  }
};

int32_t launch_node_gradients(const Backward& a, bool exact, void* stream);
int32_t launch_old_node_gradients(const Backward& a, bool exact, void* stream);
int32_t launch_chunk_gradients(const Backward& a, bool exact, void* stream);
int32_t launch_flows(const Backward& a, void* stream);
int32_t load_node_gradients();
int32_t load_chunk_gradients();
int32_t load_flows();

// ---- the final state ---------------------------------------------------------------------------------------------------

// Chunks that the nodes of the state after the call cover.
__device__ __forceinline__ int64_t final_chunks(const Inputs& in, const Sequence& sequence) {
  const ChunkShape& chunk = in.geometry.chunk;
  const int64_t end = sequence.position + sequence.rows;
  return end >> (chunk.rows_log + chunk.ratio_log) << chunk.ratio_log;
}

// First of the chunks that no longer lie before the end of the final state's node that contains an entry of level `level`
// that ends before chunk `end`.
__device__ __forceinline__ int64_t final_end(const Inputs& in, const Sequence& sequence, int level, int64_t end) {
  if (in.geometry.linear) return final_chunks(in, sequence);
  return level < in.geometry.apart ? end : final_chunks(in, sequence) >> in.geometry.apart << in.geometry.apart;
}

// The gradient that the final state gives to the node of level `level` that ends before chunk `end`: a block of the gradient
// state; `decay` is the log decay with which it arrives. data null: none.
__device__ __forceinline__ NodeSource final_gradient(const Backward& a, const Walk& walk, int level, int64_t end,
                                                     int64_t head) {
  const Inputs& in = a.in;
  NodeSource node;
  if (walk.sequence.final_gradient.tail < 0 || !a.gradient.nodes.base) return node;
  const int64_t chunks = final_chunks(in, walk.sequence);
  const uint64_t past = past_of(in.geometry, walk.range.first, chunks);
  if (!((past >> level) & 1) || (in.geometry.linear ? chunks != end : level != kOldest && bucket_end(chunks, level) != end))
    return node;
  const bool absorbed = level >= in.geometry.apart;
  const int32_t id = walk.sequence.final_gradient.node[absorbed ? kAbsorbed : level - in.geometry.chunk.ratio_log];
  if (id < 0) return node;
  node.data = a.gradient.node(id, head);
  node.dtype = a.gradient.node_layout.dtype;
  node.row = in.shape.value_dim;
  if (absorbed && !in.geometry.linear) {
    uint64_t newer = past & ~((uint64_t{1} << in.geometry.apart) - 1) & ((uint64_t{1} << level) - 1);
    for (; newer; newer &= newer - 1)
      node.decay += past_node(in, walk, chunks, __ffsll(static_cast<long long>(newer)) - 1, head).decay;
  }
  return node;
}

// Log decay from the end of a node of the history to that of the node that takes it in, whose last chunk is `parent`.
__device__ __forceinline__ float old_up(const Inputs& in, const Walk& walk, int level, int64_t parent, int64_t head) {
  float sum = in.scratch.leaf_decay[walk.slot_of(parent) * in.shape.heads + head];
  for (int j = 0; j < level && !in.geometry.linear; ++j) sum += past_node(in, walk, parent, j, head).decay;
  return sum;
}

// Last chunk of the node that takes in the history's entry `level`; -1: none of this call.
__device__ __forceinline__ int64_t old_parent(const Inputs& in, const Walk& walk, int level) {
  const int64_t first = walk.range.first;
  if (!in.geometry.linear && level == kOldest) return -1;
  const int64_t parent = in.geometry.linear ? first : bucket_end(first, level) - 1 + (int64_t{1} << level);
  return walk.makes(parent) ? parent : -1;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kAllLanes, x, d);
  return x;
}

}  // namespace lla::cuda::scalar_gate
