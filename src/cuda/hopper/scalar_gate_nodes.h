// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: the warpgroup that makes nodes, or, where nothing but nodes is made and dk is 128, the two.
#pragma once

#include "cuda/hopper/scalar_gate_fold.h"
#include "cuda/hopper/scalar_gate_multiply.h"

namespace lla::cuda::hopper {

template <Half kType, int kKeyDim, bool kLinear, bool kNodesOnly>
struct NodeSweep {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;                // k: [row][dk]
  using ValueTile = SwizzledTile<kBlock, kColumns>;             // v: [row][dv]
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;             // [dk][dv]
  static constexpr int kParts = kNodesOnly ? 1 : kKeyDim / 64;  // of 64 rows of a node
  static constexpr bool kUnits = kType == Half::kF16;

  const SweepParameters& in;
  char* shared;
  Barriers* barriers;
  const int first_part, warp, lane;
  Turn stage, table, node;
  Turn block_turn{1, 1};  // of the block before
  Sums sums[kParts];      // linear: the state, in fp32

  __device__ __forceinline__ NodeSweep(const SweepParameters& parameters, char* memory, Barriers* all, int part)
      : in(parameters),
        shared(memory),
        barriers(all),
        first_part(part),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32 % 4, 0)),
        lane(own_lane()) {}

  __device__ __forceinline__ int node_row(int part) const { return 64 * (first_part + part) + 16 * warp; }
  __device__ __forceinline__ int slot_of(int level) const { return level < in.layout.slots ? level : in.layout.slots - 1; }

  __device__ __forceinline__ uint32_t slot_address(int slot) const { return shared_address(shared + in.layout.slot(slot)); }
  __device__ __forceinline__ void store_slot(const Sums& node, int slot, int part, float unit) const {
    store_node<kType, NodeTile>(node, slot_address(slot), node_row(part), lane, unit);
    fence_shared_writes();
  }
  // Where elements i and i + 1 of this thread lie in a node [dk][64] in memory.
  __device__ __forceinline__ int node_element(int part, int i) const {
    const Place at = wgmma_sum(lane, i);
    return (node_row(part) + at.row) * kColumns + at.column;
  }

  __device__ __forceinline__ float* segment_sum(const Task& task) const {
    return in.sums + in.place(task.places + task.segment - task.oldest_segment, task.head, task.tile) * kKeyDim * kColumns;
  }

  // Before anything is written into a slot: the rows of the block before have read what was in it.
  __device__ __forceinline__ void wait_reads() {
    if constexpr (!kNodesOnly) wait(&barriers->reads_done[block_turn.index], block_turn.phase);
  }
  __device__ __forceinline__ void finish() {
    if constexpr (!kNodesOnly) release(&barriers->node_done[node.index], lane);
    node.next(kNodeTurns);
  }

  // Before the first block of a segment: the linear state that older segments, or the history, leave.
  __device__ __forceinline__ void begin_state(const Task& task) {
    const bool carried = !kNodesOnly && task.segment > task.oldest_segment;
    const float* from = segment_sum(task);
    if (!kNodesOnly && !carried && task.oldest) {
      const LinearState old(in, in.batch.sequences[task.sequence], task.head, task.tile);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const Place at = wgmma_sum(lane, i);
          sums[part][i] = old.get(node_row(part) + at.row, at.column);
        }
      }
      publish_state(task);
      return;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        const float2 x = carried ? *reinterpret_cast<const float2*>(from + node_element(part, i)) : make_float2(0, 0);
        sums[part][i] = x.x;
        sums[part][i + 1] = x.y;
      }
    }
    if (carried) publish_state(task);
  }
  __device__ __forceinline__ void publish_state(const Task& task) {
    float unit = 1;
    if constexpr (kUnits) unit = power_of_two(-exponent_above(weight_before(in, task)));
    wait_reads();
#pragma unroll
    for (int part = 0; part < kParts; ++part) store_slot(sums[part], (task.first - 1) & 1, part, unit);
    finish();
  }

  __device__ __forceinline__ void run_block(const Task& task, int block, uint32_t present) {
    const LiveRows rows(task, block);
    const Tables& tables = *reinterpret_cast<const Tables*>(shared + in.layout.tables(table.index));
    wait(&barriers->k_full[stage.index], stage.phase);
    wait(&barriers->v_full[stage.index], stage.phase);
    if (rows.lo > 0 || rows.hi < kBlock) {
      constexpr int kFirst = kNodesOnly ? kSweepThreads - 2 * kKeyDim : 128;
      complete_rows<kType, kKeyDim>(in, shared, stage.index, task, block, rows, static_cast<int>(threadIdx.x) - kFirst,
                                    kSweepThreads - kFirst);
    }
    wait(&barriers->tables_full[table.index], table.phase);
    // Also where nobody needs it, after the last block: products under way do not go with branches.
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t keys[kFoldSteps][4];
      load_folded<kType, RowTile>(keys, shared_address(shared + in.layout.k(stage.index)), node_row(part), tables.fold,
                                  lane);
      if constexpr (kLinear) {
        const float decay = tables.merge[0];
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[part][i] *= decay;
      } else {
        make_fresh(sums[part]);
      }
      fence_products(sums[part]);
      issue_fold<kType, ValueTile>(sums[part], keys, shared_address(shared + in.layout.v(stage.index)), kLinear);
      wait_products<0>(sums[part]);
#pragma unroll
      for (int i = 0; i < kFoldSteps; ++i) pin(keys[i]);
    }
    release(&barriers->k_free[stage.index], lane);
    release(&barriers->v_free[stage.index], lane);
    stage.next(in.layout.stages);

    const int level = kLinear ? 0 : trailing_ones_of_block(block);
    const bool makes = rows.hi == kBlock && (kNodesOnly || block + 1 < task.end);
    if (!kLinear && makes) {
#pragma unroll 1
      for (uint32_t left = present & ((uint32_t{1} << level) - 1); left; left &= left - 1) {
        const int child = __ffsll(left) - 1;
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          add_node<kType, NodeTile>(sums[part], slot_address(slot_of(child)), node_row(part), tables.merge[child], lane);
      }
    }
    float unit = 1;
    if constexpr (kUnits) {
      const Units& units = *reinterpret_cast<const Units*>(shared + in.layout.units_of(table.index));
      unit = kNodesOnly && block + 1 == task.end ? units.sum : units.node;
    }
    release(&barriers->tables_free[table.index], lane);
    table.next(2);
    wait_reads();
    if (kNodesOnly && block + 1 == task.end) {
      if constexpr (kUnits) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int i = 0; i < 32; ++i) sums[part][i] *= unit;
        }
      }
      float* to = segment_sum(task);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 32; i += 2)
          *reinterpret_cast<float2*>(to + node_element(part, i)) = make_float2(sums[part][i], sums[part][i + 1]);
      }
    } else if (!(kLinear && kNodesOnly) && makes) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) store_slot(sums[part], kLinear ? block & 1 : slot_of(level), part, unit);
    }
    finish();
    block_turn.next(2);
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int64_t number = blockIdx.x; number < in.tasks; number += gridDim.x) {
      const Task task = find_task(in, number);
      if (task.first >= task.end || (kNodesOnly && task.last)) continue;
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
