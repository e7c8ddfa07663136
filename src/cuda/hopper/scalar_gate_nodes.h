// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: the warpgroup that makes the nodes of a sweep.
#pragma once

#include "cuda/hopper/scalar_gate_fold.h"
#include "cuda/hopper/scalar_gate_multiply.h"

namespace lla::cuda::hopper {

template <Half kType, int kKeyDim, bool kLinear>
struct NodeSweep {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;     // k: [row][dk]
  using ValueTile = SwizzledTile<kBlock, kColumns>;  // v: [row][dv]
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;  // [dk][dv]
  static constexpr bool kUnits = kType == Half::kF16;

  const SweepParameters& in;
  char* shared;
  Barriers* barriers;
  const int warp, lane;
  Turn stage, table, node;
  Turn block_turn{1, 1};      // of the block before
  NodeColumns<kKeyDim> sums;  // linear: the state, in fp32

  __device__ __forceinline__ NodeSweep(const SweepParameters& parameters, char* memory, Barriers* all)
      : in(parameters),
        shared(memory),
        barriers(all),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32 % 4, 0)),
        lane(own_lane()) {}

  __device__ __forceinline__ int slot_of(int level) const { return level < in.layout.slots ? level : in.layout.slots - 1; }

  __device__ __forceinline__ uint32_t slot_address(int slot) const { return shared_address(shared + in.layout.slot(slot)); }
  __device__ __forceinline__ void store_slot(int slot, float unit) const {
    store_columns<kType, NodeTile>(sums, slot_address(slot), 16 * warp, lane, unit);
    fence_shared_writes();
  }

  // Before anything is written into a slot: the rows of the block before have read what was in it.
  __device__ __forceinline__ void wait_reads() { wait(&barriers->reads_done[block_turn.index], block_turn.phase); }
  __device__ __forceinline__ void finish() {
    release(&barriers->node_done[node.index], lane);
    node.next(kNodeTurns);
  }

  // Before the first block of a segment: the linear state that older segments, or the history, leave.
  __device__ __forceinline__ void begin_state(const Task& task) {
    const bool carried = task.segment > task.oldest_segment;
    const float* from = segment_sum(in, task, kKeyDim);
    if (!carried && task.oldest) {
      const LinearState old(in, in.batch.sequences[task.sequence], task.head, task.tile);
      visit_columns(sums, 16 * warp, lane, [&](int key, int value, float& sum) { sum = old.get(key, value); });
      publish_state(task);
      return;
    }
    visit_columns(sums, 16 * warp, lane,
                  [&](int key, int value, float& sum) { sum = carried ? from[key * kColumns + value] : 0.0f; });
    if (carried) publish_state(task);
  }
  __device__ __forceinline__ void publish_state(const Task& task) {
    float unit = 1;
    if constexpr (kUnits) unit = power_of_two(-exponent_above(weight_before(in, task)));
    wait_reads();
    store_slot((task.first - 1) & 1, unit);
    finish();
  }

  __device__ __forceinline__ void run_block(const Task& task, int block, uint32_t present) {
    const LiveRows rows(task, block);
    const Tables& tables = *reinterpret_cast<const Tables*>(shared + in.layout.tables(table.index));
    wait(&barriers->k_full[stage.index], stage.phase);
    wait(&barriers->v_full[stage.index], stage.phase);
    if (rows.lo > 0 || rows.hi < kBlock) {
      complete_rows<kType, kKeyDim>(in, shared, stage.index, task, block, rows, static_cast<int>(threadIdx.x) - 128,
                                    kSweepThreads - 128);
    }
    wait(&barriers->tables_full[table.index], table.phase);
    // Also where nobody needs it, after the last block: products under way do not go with branches.
    uint32_t values[kFoldSteps][4];
    load_folded<kType, ValueTile>(values, shared_address(shared + in.layout.v(stage.index)), 16 * warp, tables.fold, lane);
    if constexpr (kLinear) {
      scale_columns(sums, tables.merge[0]);
    } else {
#pragma unroll
      for (Sums& panel : sums) make_fresh(panel);
    }
    pin(sums);
    fence_products();
    issue_columns<kType, RowTile, kUnits>(sums, values, shared_address(shared + in.layout.k(stage.index)), kLinear);
    wait_products<0>();
    pin(sums);
#pragma unroll
    for (int i = 0; i < kFoldSteps; ++i) pin(values[i]);
    release(&barriers->k_free[stage.index], lane);
    release(&barriers->v_free[stage.index], lane);
    stage.next(in.layout.stages);

    const int level = kLinear ? 0 : trailing_ones_of_block(block);
    const bool makes = rows.hi == kBlock && block + 1 < task.end;
    if (!kLinear && makes) {
#pragma unroll 1
      for (uint32_t left = present & ((uint32_t{1} << level) - 1); left; left &= left - 1) {
        const int child = __ffsll(left) - 1;
        add_columns<kType, NodeTile>(sums, slot_address(slot_of(child)), 16 * warp, tables.merge[child], lane);
      }
    }
    float unit = 1;
    if constexpr (kUnits) unit = reinterpret_cast<const Units*>(shared + in.layout.units_of(table.index))->node;
    release(&barriers->tables_free[table.index], lane);
    table.next(2);
    wait_reads();
    if (makes) store_slot(kLinear ? block & 1 : slot_of(level), unit);
    finish();
    block_turn.next(2);
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int64_t number = blockIdx.x; number < in.tasks; number += gridDim.x) {
      const Task task = find_task(in, number);
      if (task.first >= task.end) continue;
      if constexpr (kLinear) begin_state(task);
      uint32_t present = 0;
#pragma unroll 1
      for (int block = task.first; block < task.end; ++block) {
        run_block(task, block, present);
        const int level = kLinear ? 0 : trailing_ones_of_block(block);
        present = (present >> level << level) | uint32_t{1} << level;
      }
    }
  }
};

}  // namespace lla::cuda::hopper
