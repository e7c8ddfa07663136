// SPDX-License-Identifier: Apache-2.0
// delta_rule_nodes.cu on halves: a block joins two nodes, N = Phi_right N_left + N_right, Phi = Phi_right Phi_left.
#include "cuda/portable/delta_rule_half_walk.h"

namespace lla::cuda {

namespace {

struct JoinShared {
  char *right, *content, *transition;  // Phi_right, N_left, Phi_left
  float* most;
  static constexpr size_t kBytes = 3 * kHalfTile + 64;

  __device__ __forceinline__ JoinShared() {
    right = shared_memory();
    content = right + kHalfTile, transition = content + kHalfTile;
    most = reinterpret_cast<float*>(transition + kHalfTile);
  }
};

// N = Phi_right N_left + N_right in the place of N_right.
struct Join {
  float right_scale;
  unsigned short* content;
  float* content_scale;
};

__device__ __forceinline__ void join_content(const JoinShared& shared, const Join& join, float left_scale, int dk,
                                             int stride) {
  HalfSum sum;
  sum.multiply<Stored::kAlongDepth, Stored::kByDepth>(shared.right, shared.content, (dk + 15) / 16);
  const float unit = sum.add_halves(join.right_scale * left_scale, join.content, *join.content_scale, dk, stride);
  sum.put(unit, join.content, join.content_scale, dk, stride, shared.most);
}

// One level: nodes of 2^level chunks that lie within the call.
__global__ void __launch_bounds__(kWideThreads, 2)
    delta_rule_half_join(DeltaInputs in, DeltaHalfScratch scratch, int level) {
  const JoinShared shared;
  const int64_t heads = scratch.pass_heads, most = in.most_full() >> level, tasks = in.batch.count * most * heads;
  const int dk = static_cast<int>(in.shape.key_dim), key_stride = static_cast<int>(scratch.key_stride),
            value_stride = static_cast<int>(scratch.value_stride);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.first_head + task % heads, number = task / heads % most;
    const Sequence& sequence = in.batch.sequences[task / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t size = int64_t{1} << level;
    const int64_t end = ((((chunks.range.first + size - 1) >> level) + number + 1) << level);
    if (end > chunks.range.first + chunks.range.full) continue;
    const int64_t middle = end - size / 2;
    bring_halves(shared.right, chunks.transition(scratch, level - 1, end, head), dk, key_stride);
    bring_halves(shared.content, chunks.content(scratch, middle, head), dk, value_stride);
    commit_copies();
    bring_halves(shared.transition, chunks.transition(scratch, level - 1, middle, head), dk, key_stride);
    commit_copies();
    const Join join{*chunks.transition_scale(scratch, level - 1, end, head), chunks.content(scratch, end, head),
                    chunks.content_scale(scratch, end, head)};
    const float content_scale = *chunks.content_scale(scratch, middle, head),
                transition_scale = *chunks.transition_scale(scratch, level - 1, middle, head);
    wait_copies<1>();
    __syncthreads();
    join_content(shared, join, content_scale, dk, value_stride);
    wait_copies<0>();
    __syncthreads();
    HalfSum sum;
    sum.multiply<Stored::kAlongDepth, Stored::kByDepth>(shared.right, shared.transition, (dk + 15) / 16);
    sum.put(join.right_scale * transition_scale, chunks.transition(scratch, level, end, head),
            chunks.transition_scale(scratch, level, end, head), dk, key_stride, shared.most);
    __syncthreads();
  }
}

// The nodes that begin before the call and end in it, from the smallest on.
__global__ void __launch_bounds__(kWideThreads, 2) delta_rule_half_straddle(DeltaInputs in, DeltaHalfScratch scratch) {
  const JoinShared shared;
  const int64_t heads = scratch.pass_heads, tasks = in.batch.count * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_stride = static_cast<int>(scratch.key_stride), value_stride = static_cast<int>(scratch.value_stride);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.first_head + task % heads;
    const Sequence& sequence = in.batch.sequences[task / heads];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t first = chunks.range.first, last = first + chunks.range.full;
    if (first == 0) continue;
    for (int level = __ffsll(static_cast<long long>(first)); level < kDeltaLevels; ++level) {
      const int64_t begin = (first >> level) << level, middle = begin + (int64_t{1} << (level - 1));
      const int64_t end = begin + (int64_t{1} << level);
      if (end > last) break;
      const bool own_left = middle > first;
      int32_t id = -1;
      if (!own_left) {  // the left half is history: what its level is summed with is read apart
        const int entry = level - 1 - in.chunk.ratio_log;
        if (entry >= 0 && entry < in.separate) id = delta_history_node(in, sequence, entry);
        if (id < 0) continue;
      }
      bring_halves(shared.right, chunks.transition(scratch, level - 1, end, head), dk, key_stride);
      if (own_left) {
        bring_halves(shared.content, chunks.content(scratch, middle, head), dk, value_stride);
        bring_halves(shared.transition, chunks.transition(scratch, level - 1, middle, head), dk, key_stride);
      }
      commit_copies();
      const Join join{*chunks.transition_scale(scratch, level - 1, end, head), chunks.content(scratch, end, head),
                      chunks.content_scale(scratch, end, head)};
      float content_scale = 0;
      if (own_left)
        content_scale = *chunks.content_scale(scratch, middle, head);
      else
        content_scale = put_matrix(shared.content, {in.state.node(id, head), in.state.node_layout.dtype}, in.shape.value_dim,
                                   dk, dv, shared.most);
      wait_copies<0>();
      __syncthreads();
      join_content(shared, join, content_scale, dk, value_stride);
      if (own_left) {
        const float scale = join.right_scale * *chunks.transition_scale(scratch, level - 1, middle, head);
        HalfSum sum;
        sum.multiply<Stored::kAlongDepth, Stored::kByDepth>(shared.right, shared.transition, (dk + 15) / 16);
        sum.put(scale, chunks.transition(scratch, level, end, head), chunks.transition_scale(scratch, level, end, head), dk,
                key_stride, shared.most);
      }
      __syncthreads();
    }
  }
}

}  // namespace

int32_t launch_delta_half_nodes(const DeltaInputs& in, const DeltaHalfScratch& scratch, void* stream) {
  for (int level = 1; (in.most_full() >> level) > 0; ++level) {
    const int32_t status = launch(delta_rule_half_join, in.batch.count * (in.most_full() >> level) * scratch.pass_heads,
                                  kWideThreads, JoinShared::kBytes, stream, in, scratch, level);
    if (status) return status;
  }
  if (in.most_full() == 0) return LLA_OK;
  return launch(delta_rule_half_straddle, in.batch.count * scratch.pass_heads, kWideThreads, JoinShared::kBytes, stream, in,
                scratch);
}

int32_t load_delta_half_nodes() {
  const int32_t status = load_kernel(delta_rule_half_join);
  return status ? status : load_kernel(delta_rule_half_straddle);
}

}  // namespace lla::cuda
