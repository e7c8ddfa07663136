// SPDX-License-Identifier: Apache-2.0
// Stores the nodes of a border: rows of the unit matrix walk back through its past as queries do, so that each content is
// brought to the border, X N; what is absorbed is summed.
#include "cuda/portable/delta_rule_walk.h"

namespace lla::cuda {

namespace {

template <bool kExact, bool kNarrow>
__global__ void __launch_bounds__(kThreads) delta_rule_store(DeltaInputs in, DeltaScratch scratch) {
  const int64_t heads = scratch.pass_heads, dk = in.shape.key_dim, dv = in.shape.value_dim;
  constexpr int64_t kWidth = kSides<kNarrow> * kTile;
  const int64_t parts = kNarrow ? (dv + kWidth - 1) / kWidth : 1, row_tiles = (dk + kTile - 1) / kTile;
  const int64_t most = in.batch.most_nodes_to_store, tasks = in.batch.count * most * heads * row_tiles * parts;
  const ReadMemory memory = read_memory(dk, kSideStride<kNarrow>);
  float* spill = kNarrow ? nullptr : scratch.spill + blockIdx.x * (kTile * (scratch.key_stride + scratch.value_stride));
  const auto spill_x = [&](int r) { return spill + r * scratch.key_stride; };
  const auto spill_sum = [&](int r) { return spill + kTile * scratch.key_stride + r * scratch.value_stride; };
  const auto spill_target = [&](int r) -> Target { return {spill_sum(r)}; };
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t part = task % parts, row = task / parts % row_tiles * kTile,
                  head = scratch.first_head + task / parts / row_tiles % heads;
    const int64_t number = task / parts / row_tiles / heads % most;
    const Sequence& sequence = in.batch.sequences[task / parts / row_tiles / heads / most];
    if (sequence.padding || number >= sequence.nodes_to_store_count) continue;
    const NodesToStore& plan = sequence.nodes_to_store[number];
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t chunk = plan.position >> in.chunk.rows_log;
    if (plan.write == 0 || chunk > chunks.range.first + chunks.range.full) continue;

    const auto wanted = [&](int entry) { return plan.node[entry] >= 0 && ((plan.write >> entry) & 1) != 0; };
    const auto store = [&](TileSum& sum, int entry, int64_t column) {
      char* node = in.state.node(plan.node[entry], head);
      const int32_t dtype = in.state.node_layout.dtype;
      write_sum<kNarrow>(memory, column, dv, sum, [&](int r) -> Target {
        if (row + r >= dk) return {};
        return {offset_elements(static_cast<void*>(node), dtype, (row + r) * dv), dtype};
      });
      if (threadIdx.x == 0 && row == 0 && column == 0)
        *reinterpret_cast<float*>(in.state.node_decay(plan.node[entry], head)) = 0;
    };

    for (int n = threadIdx.x; n < kTile * memory.stride; n += kThreads) {
      memory.x[n] = n % memory.stride == row + n / memory.stride ? 1.0f : 0.0f;
    }
    TileSum sum[kSides<kNarrow>];
    for (TileSum& s : sum) s.clear();
    if constexpr (!kNarrow) {
      for (int64_t column = 0; column < dv; column += kTile) write_sum<kNarrow>(memory, column, dv, sum[0], spill_target);
    }
    // Levels rise, so that what is absorbed comes last.
    DeltaWalk walk(in, scratch, chunks, head, chunk, true);
    DeltaStep step;
    while (walk.next(&step)) {
      if (wanted(step.entry)) {
        const bool sums = step.entry == kAbsorbed;
        if constexpr (kNarrow) {
          read_product<kExact, kNarrow, false>(memory, dk, step.content, step.stride, part * kWidth, dv, sum);
          if (!sums) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
              store(sum[side], step.entry, part * kWidth + side * kTile);
              sum[side].clear();
            }
          }
        } else {
          for (int64_t column = 0; column < dv; column += kTile) {
            if (sums)
              read_sum<kNarrow>(memory, column, dv, sum[0], spill_sum);
            else
              sum[0].clear();
            read_product<kExact, kNarrow, false>(memory, dk, step.content, step.stride, column, dv, sum);
            if (sums)
              write_sum<kNarrow>(memory, column, dv, sum[0], spill_target);
            else
              store(sum[0], step.entry, column);
          }
        }
      }
      if (step.transition) read_transition<kExact, kNarrow>(memory, dk, step.transition, scratch.key_stride, spill_x);
    }
    const bool live = in.shape.levels == 0 || (in.shape.absorb && (chunk >> in.chunk.ratio_log >> in.separate) != 0);
    if (live && wanted(kAbsorbed)) {
      if constexpr (kNarrow) {
        store(sum[0], kAbsorbed, part * kWidth);
        store(sum[1], kAbsorbed, part * kWidth + kTile);
      } else {
        for (int64_t column = 0; column < dv; column += kTile) {
          read_sum<kNarrow>(memory, column, dv, sum[0], spill_sum);
          store(sum[0], kAbsorbed, column);
        }
      }
    }
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_store_nodes(const DeltaInputs& in, const DeltaScratch& scratch, bool exact, void* stream) {
  const int64_t dk = in.shape.key_dim, rows = (dk + kTile - 1) / kTile;
  const int64_t tasks = in.batch.count * in.batch.most_nodes_to_store * scratch.pass_heads * rows;
  if (dk <= kNarrowDim) {
    const int64_t parts = (in.shape.value_dim + 2 * kTile - 1) / (2 * kTile);
    return launch(exact ? delta_rule_store<true, true> : delta_rule_store<false, true>, tasks * parts, kThreads,
                  read_bytes<true>(dk), stream, in, scratch);
  }
  return launch(exact ? delta_rule_store<true, false> : delta_rule_store<false, false>,
                tasks < kDeltaSpills ? tasks : kDeltaSpills, kThreads, read_bytes<false>(dk), stream, in, scratch);
}

int32_t load_delta_store_nodes() {
  int32_t status = load_kernel(delta_rule_store<true, true>);
  if (!status) status = load_kernel(delta_rule_store<false, true>);
  if (!status) status = load_kernel(delta_rule_store<true, false>);
  if (!status) status = load_kernel(delta_rule_store<false, false>);
  return status;
}

}  // namespace lla::cuda
