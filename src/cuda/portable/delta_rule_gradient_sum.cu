// SPDX-License-Identifier: Apache-2.0
// Sums the gradients of q and k over the heads of a group, in the order of heads, and writes them.
#include "cuda/portable/delta_rule_gradient.h"

namespace lla::cuda {

namespace {

struct GroupTargets {
  View q, k;
  SlotMemory state;  // of gradients
};

__global__ void __launch_bounds__(kThreads, 4)
    delta_rule_group_sums(DeltaInputs in, DeltaGradients scratch, GroupTargets targets) {
  const MixerShape& shape = in.shape;
  const DeltaScratch& nodes = scratch.nodes;
  const int64_t dk = shape.key_dim, groups = shape.groups, share = shape.heads / groups, most = in.most_chunks();
  const bool cyclic = shape.head_map == LLA_HEAD_MAP_CYCLIC;
  const float scale = static_cast<float>(shape.scale);
  const int64_t pass_end = nodes.first_head + nodes.pass_heads;
  const int64_t tasks = in.batch.count * most * groups;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t group = task % groups, number = task / groups % most;
    const Sequence& sequence = in.batch.sequences[task / groups / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.count) continue;
    const ChunkSpan span(sequence, in.chunk, chunks.range.first + number);
    const int64_t place = (in.chunk.first_place(sequence) + number) * in.chunk.rows;
    const int64_t base = cyclic ? group : group * share, step = cyclic ? groups : 1;
    // Heads base + step * i of the group that belong to the pass.
    int64_t from = 0, to = share;
    while (from < share && base + step * from < nodes.first_head) ++from;
    while (to > from && base + step * (to - 1) >= pass_end) --to;
    if (from == to) continue;
    const int fours = static_cast<int>((dk + 3) / 4);
    for (int n = static_cast<int>(threadIdx.x); n < span.hi * fours; n += kThreads) {
      const int r = n / fours, i = 4 * (n - r * fours), left = static_cast<int>(dk) - i;
      const int64_t position = span.begin + r, row = span.row(sequence, r);
      const bool is_query = r >= span.lo;
      float4 dk_sum = make_float4(0, 0, 0, 0), dq_sum = dk_sum;
      const auto add = [](float4& sum, const float* from) {
        const float4 x = *reinterpret_cast<const float4*>(from);
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      };
      float* key_sum = scratch.key_sum + ((place + r) * groups + group) * nodes.key_stride + i;
      float* query_sum = scratch.query_sum + (row * groups + group) * nodes.key_stride + i;
      if (from > 0) add(dk_sum, key_sum);
      if (from > 0 && is_query) add(dq_sum, query_sum);
      for (int64_t h = from; h < to; ++h) {
        const int64_t head = base + step * h;
        add(dk_sum, scratch.key + nodes.place(place + r, head) * nodes.key_stride + i);
        if (is_query) add(dq_sum, scratch.dx_at(0, row, head) + i);
      }
      if (to < share) {
        *reinterpret_cast<float4*>(key_sum) = dk_sum;
        if (is_query) *reinterpret_cast<float4*>(query_sum) = dq_sum;
        continue;
      }
      if (delta_has_final_row(targets.state, sequence, shape.grain, position)) {
        const int64_t ring = delta_gradient_ring(sequence.final_gradient, targets.state.tail_layout, shape.grain, position);
        const float4 x =
            load4(targets.state.tail_k(sequence.final_gradient.tail, group, ring), targets.state.tail_layout.dtype, i, left);
        dk_sum.x += x.x, dk_sum.y += x.y, dk_sum.z += x.z, dk_sum.w += x.w;
      }
      if (is_query) {
        if (targets.q.present()) {
          store4({targets.q.at(sequence.index, row, group), targets.q.dtype, targets.q.accumulate}, i, left,
                 make_float4(scale * dq_sum.x, scale * dq_sum.y, scale * dq_sum.z, scale * dq_sum.w));
        }
        if (targets.k.present())
          store4({targets.k.at(sequence.index, row, group), targets.k.dtype, targets.k.accumulate}, i, left, dk_sum);
      } else if (targets.state.tails.base && sequence.initial_gradient.tail >= 0) {
        const bool real = sequence.history.tail >= 0 && position >= sequence.history.start;
        const int64_t ring =
            delta_gradient_ring(sequence.initial_gradient, targets.state.tail_layout, shape.grain, position);
        store4({targets.state.tail_k(sequence.initial_gradient.tail, group, ring), targets.state.tail_layout.dtype}, i, left,
               real ? dk_sum : make_float4(0, 0, 0, 0));
      }
    }
  }
}

}  // namespace

int32_t launch_delta_group_sums(const DeltaInputs& in, const DeltaGradients& scratch, const MixerBackward& problem,
                                void* stream) {
  const GroupTargets targets{problem.dq, problem.dk, problem.gradient};
  return launch(delta_rule_group_sums, in.batch.count * in.most_chunks() * in.shape.groups, kThreads, 0, stream, in, scratch,
                targets);
}

int32_t load_delta_group_sums() { return load_kernel(delta_rule_group_sums); }

}  // namespace lla::cuda
