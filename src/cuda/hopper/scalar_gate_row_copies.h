// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper, gradients of rows: the threads that bring rows and nodes.
#pragma once

#include "cuda/hopper/scalar_gate_row_tasks.h"

namespace lla::cuda::hopper {

// One thread: brings queries, keys and what belongs to each head.
template <int kKeyDim, bool kLinear>
__device__ void copy_rows(const BackwardParameters& in, const RowLayout& layout, char* shared, RowBarriers* barriers,
                          int tasks) {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;
  Turn stage, once;
  each_task<kLinear>(in, tasks, [&](const RowTask& task) {
    const int group = in.group_of(task.first), row = task.block.row;
    const auto copy = [&](char* to, const CUtensorMap* map, Barrier* full, Barrier* free) {
      wait(free, once.phase ^ 1);
      arrive_expect_bytes(full, RowTile::kBytes);
      for (int panel = 0; panel < RowTile::kPanels; ++panel)
        load_box(to + panel * RowTile::kPanelBytes, map, {64 * panel, row, group}, full);
    };
    const uint32_t factor_bytes = static_cast<uint32_t>(BlockFactors::bytes(__popcll(task.reads), kLinear));
    copy(shared, &in.q, &barriers->q_full, &barriers->q_free);
    for (int i = task.first; i < task.end; ++i) {
      const int head = in.head_of(i);
      Barrier* full = &barriers->head_full[stage.index];
      wait(&barriers->tiles_free[stage.index], stage.phase ^ 1);
      arrive_expect_bytes(full, 2 * layout.value_bytes + factor_bytes);
      load_box(shared + layout.dy(stage.index), &in.dy, {0, row, head}, full);
      load_box(shared + layout.v(stage.index), &in.v, {0, row, head}, full);
      wait(&barriers->factors_free[stage.index], stage.phase ^ 1);
      load_bytes(shared + layout.factors(stage.index), in.factors(in.slot(task.block.place, i)), factor_bytes, full);
      if (i == task.first) copy(shared + layout.k_begin, &in.k, &barriers->k_full, &barriers->k_free);
      // What the end of the task waits for. Much earlier, it would have left the cache again.
      if (i + 1 == task.end && in.adds && in.dq.present())
        prefetch_bytes(part_sums<kKeyDim>(in, in.dq_parts, task.block, task.part), kBlock * kKeyDim * 4);
      stage.next(kHeadStages);
    }
    once.next(1);
  });
}

// One thread: brings the nodes.
template <int kKeyDim, bool kLinear>
__device__ void copy_nodes(const BackwardParameters& in, const RowLayout& layout, char* shared, RowBarriers* barriers,
                           int tasks) {
  Turn ring;
  each_task<kLinear>(in, tasks, [&](const RowTask& task) {
    for (int i = task.first; i < task.end; ++i) {
      // Linear: one always. No state: a box before the tensor, zeros.
      for (uint32_t left = kLinear ? 1 : task.reads; left; left &= left - 1) {
        const int end = task.block.node_end(__ffsll(left) - 1, kLinear);
        const int64_t slot = task.reads ? in.slot(task.block.place_of(end), i) : -1;
        wait(&barriers->node_free[ring.index], ring.phase ^ 1);
        arrive_expect_bytes(&barriers->node_full[ring.index], layout.node_bytes);
        load_box(shared + layout.node(ring.index), &in.nodes, {0, static_cast<int32_t>(slot * kKeyDim)},
                 &barriers->node_full[ring.index]);
        ring.next(layout.ring);
      }
    }
  });
}

}  // namespace lla::cuda::hopper
