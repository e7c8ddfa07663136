// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: the warpgroup that makes nodes, or, where nothing but nodes is made and dk is 128, the two.
#pragma once

#include "cuda/hopper/scalar_gate_multiply.h"

namespace lla::cuda::hopper {

template <int kKeyDim, bool kLinear, bool kNodesOnly>
struct NodeSweep {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;     // k: [row][dk]
  using ValueTile = SwizzledTile<kBlock, kColumns>;  // v: [row][dv]
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;  // [dk][dv]
  static constexpr int kParts = kNodesOnly ? 1 : kKeyDim / 64;  // of 64 rows of a node

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
        lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ int node_row(int part) const { return 64 * (first_part + part) + 16 * warp; }
  __device__ __forceinline__ int slot_of(int level) const { return level < in.layout.slots ? level : in.layout.slots - 1; }

  // Keys, transposed, times their decay to the block's end.
  __device__ __forceinline__ void load_folded_keys(const Tables& tables, int part,
                                                   uint32_t (&keys)[kBlock / kDepthStep][4]) const {
    const uint32_t k = shared_address(shared + in.layout.k(stage.index));
    const Place at = block_row_transposed(lane);
#pragma unroll
    for (int step = 0; step < kBlock / kDepthStep; ++step) {
      load_matrices<true>(keys[step], k + RowTile::offset(kDepthStep * step + at.row, node_row(part) + at.column));
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const float2 fold =
            *reinterpret_cast<const float2*>(&tables.fold[kDepthStep * step + 8 * side + 2 * (lane % 4)]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t& pair = keys[step][2 * side + h];
          pair = pack<Half::kBf16>(low_of(pair) * fold.x, high_of(pair) * fold.y);
        }
      }
    }
  }

  __device__ __forceinline__ void issue_node(Sums& node, const uint32_t (&keys)[kBlock / kDepthStep][4], bool adds) {
    const uint64_t v = describe(shared_address(shared + in.layout.v(stage.index)), Major::kOuter, ValueTile::kPanelBytes);
#pragma unroll
    for (int step = 0; step < kBlock / kDepthStep; ++step)
      multiply<Half::kBf16, Major::kOuter>(
          node, keys[step], moved(v, depth_offset(Major::kOuter, step * kDepthStep, ValueTile::kPanelBytes)),
          adds || step > 0);
    commit_products();
  }

  // This thread's elements of a node in shared memory, 16 columns of the warp's rows.
  __device__ __forceinline__ uint32_t node_address(int slot, int part, int columns) const {
    const Place at = block_row(lane);
    return shared_address(shared + in.layout.slot(slot)) + NodeTile::offset(node_row(part) + at.row, columns + at.column);
  }
  __device__ __forceinline__ void add_slot(Sums& node, int slot, int part, float factor) const {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      uint32_t pairs[4];
      load_matrices<false>(pairs, node_address(slot, part, 16 * quarter));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        node[8 * quarter + 2 * i] = fmaf(factor, low_of(pairs[i]), node[8 * quarter + 2 * i]);
        node[8 * quarter + 2 * i + 1] = fmaf(factor, high_of(pairs[i]), node[8 * quarter + 2 * i + 1]);
      }
    }
  }
  __device__ __forceinline__ void store_slot(const Sums& node, int slot, int part) const {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = pack<Half::kBf16>(node[8 * quarter + 2 * i], node[8 * quarter + 2 * i + 1]);
      store_matrices<false>(node_address(slot, part, 16 * quarter), pairs);
    }
    fence_shared_writes();
  }
  // Where elements i and i + 1 of this thread lie in a node [dk][64] in memory.
  __device__ __forceinline__ int node_element(int part, int i) const {
    const Place at = wgmma_sum(lane, i);
    return (node_row(part) + at.row) * kColumns + at.column;
  }

  __device__ __forceinline__ float* segment_sum(const Task& task) const {
    return in.sums + in.place(task.places + task.segment - task.oldest, task.head, task.tile) * kKeyDim * kColumns;
  }

  // Before anything is written into a slot: the rows of the block before have read what was in it.
  __device__ __forceinline__ void wait_reads() {
    if constexpr (!kNodesOnly) wait(&barriers->reads_done[block_turn.index], block_turn.phase);
  }
  __device__ __forceinline__ void finish() {
    if constexpr (!kNodesOnly) release(&barriers->node_done[node.index]);
    node.next(kNodeTurns);
  }

  // Before the first block of a segment: the linear state that older segments leave.
  __device__ __forceinline__ void begin_state(const Task& task) {
    const bool carried = !kNodesOnly && task.segment > task.oldest;
    const float* from = segment_sum(task);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        const float2 x = carried ? *reinterpret_cast<const float2*>(from + node_element(part, i)) : make_float2(0, 0);
        sums[part][i] = x.x;
        sums[part][i + 1] = x.y;
      }
    }
    if (!carried) return;
    wait_reads();
#pragma unroll
    for (int part = 0; part < kParts; ++part) store_slot(sums[part], (task.first - 1) & 1, part);
    finish();
  }

  __device__ __forceinline__ void run_block(const Task& task, int block, uint32_t present) {
    const LiveRows rows(task, block);
    const Tables& tables = *reinterpret_cast<const Tables*>(shared + in.layout.tables(table.index));
    wait(&barriers->k_full[stage.index], stage.phase);
    wait(&barriers->v_full[stage.index], stage.phase);
    if (rows.lo > 0 || rows.hi < kBlock) {
      constexpr int kFirst = kNodesOnly ? kSweepThreads - 2 * kKeyDim : 128;
      clear_dead_rows<kKeyDim>(in.layout, shared, stage.index, rows, static_cast<int>(threadIdx.x) - kFirst,
                               kSweepThreads - kFirst);
    }
    wait(&barriers->tables_full[table.index], table.phase);
    // Also where nobody needs it, after the last block: products under way do not go with branches.
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t keys[kBlock / kDepthStep][4];
      load_folded_keys(tables, part, keys);
      if constexpr (kLinear) {
        const float decay = tables.merge[0];
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[part][i] *= decay;
      } else {
        make_fresh(sums[part]);
      }
      fence_products(sums[part]);
      issue_node(sums[part], keys, kLinear);
      wait_products<0>(sums[part]);
#pragma unroll
      for (int i = 0; i < kBlock / kDepthStep; ++i) pin(keys[i]);
    }
    release(&barriers->k_free[stage.index]);
    release(&barriers->v_free[stage.index]);
    stage.next(in.layout.stages);

    const int level = kLinear ? 0 : trailing_ones_of_block(block);
    const bool makes = rows.hi == kBlock && (kNodesOnly || block + 1 < task.end);
    if (!kLinear && makes) {
#pragma unroll 1
      for (uint32_t left = present & ((uint32_t{1} << level) - 1); left; left &= left - 1) {
        const int child = __ffsll(left) - 1;
#pragma unroll
        for (int part = 0; part < kParts; ++part) add_slot(sums[part], slot_of(child), part, tables.merge[child]);
      }
    }
    release(&barriers->tables_free[table.index]);
    table.next(2);
    wait_reads();
    if (kNodesOnly && block + 1 == task.end) {
      float* to = segment_sum(task);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 32; i += 2)
          *reinterpret_cast<float2*>(to + node_element(part, i)) = make_float2(sums[part][i], sums[part][i + 1]);
      }
    } else if (!(kLinear && kNodesOnly) && makes) {
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        store_slot(sums[part], kLinear ? block & 1 : slot_of(level), part);
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
