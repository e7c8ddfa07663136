// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper, gradients of rows: tasks, shared memory and barriers.
#pragma once

#include "cuda/hopper/register_budget.h"
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_fragments.h"

namespace lla::cuda::hopper {

constexpr int kRowThreads = 384;
constexpr int kGroupRegisters[3] = {56, 224, 224};
static_assert(registers_suffice(kGroupRegisters), "more registers than a block has");

constexpr int kHeadStages = 2;            // of what belongs to one head
constexpr int kMostNodes = 4;             // in the ring
constexpr int kFinishers = 2;             // warps of the first group
constexpr int kInner = kInnerLevels + 1;  // levels within a block

constexpr int kClearBarrier = 1, kFlowBarrier = 2;  // numbered ones

// Linear: weights of the second half's rows for the first half's sources, from one warpgroup to the other; and the scores of
// a part, which do not depend on the head: of each half with itself, a warp having none behind its rows, then across.
using AcrossTile = SwizzledTile<kHalf, kHalf>;
constexpr uint32_t kOwnScoreBytes = (2 + 4 + 6 + 8) * 32 * sizeof(float4);

struct RowLayout {
  int ring = 0;
  int staged = 0;  // floats of a row in the staging: sums of levels within the block, of entries; odd, for the banks' sake
  uint32_t node_bytes = 0, value_bytes = kBlock * kSwizzleRow, factor_bytes = 0, staging_bytes = 0;
  uint32_t k_begin = 0, head_begin = 0, ring_begin = 0, weights_begin = 0, scores_begin = 0;
  uint32_t factors_begin = 0, staging_begin = 0, flows_begin = 0;
  uint32_t barriers_begin = 0, bytes = 0;

  // False if it does not fit.
  bool place(int key_dim, int entries, int64_t bytes_of_factors, bool linear, int nodes) {
    const uint32_t row_bytes = kBlock * static_cast<uint32_t>(key_dim) * 2;
    ring = nodes;
    staged = (kInner + entries) | 1;
    node_bytes = static_cast<uint32_t>(key_dim) * kSwizzleRow;
    factor_bytes = static_cast<uint32_t>(bytes_of_factors);
    staging_bytes = static_cast<uint32_t>(kBlock * staged * 4);
    k_begin = row_bytes;
    head_begin = 2 * row_bytes;
    ring_begin = head_begin + 2 * kHeadStages * value_bytes;
    weights_begin = ring_begin + static_cast<uint32_t>(ring) * node_bytes;
    scores_begin = weights_begin + (linear ? AcrossTile::kBytes : 0);
    factors_begin = scores_begin + (linear ? 2 * kOwnScoreBytes + kHalf * kHalf * 4 : 0);
    staging_begin = factors_begin + kHeadStages * factor_bytes;
    flows_begin = staging_begin + kHeadStages * staging_bytes;
    barriers_begin = flows_begin + kHeadStages * kFinishers * kMostEntries * 4;
    bytes = barriers_begin + 256;
    return bytes <= kMostShared;
  }
  LLA_HOST_DEVICE uint32_t v(int stage) const { return head_begin + 2 * static_cast<uint32_t>(stage) * value_bytes; }
  LLA_HOST_DEVICE uint32_t dy(int stage) const { return v(stage) + value_bytes; }
  LLA_HOST_DEVICE uint32_t node(int i) const { return ring_begin + static_cast<uint32_t>(i) * node_bytes; }
  LLA_HOST_DEVICE uint32_t factors(int stage) const { return factors_begin + static_cast<uint32_t>(stage) * factor_bytes; }
  // [128][staged]: gradients of a row's λ at the levels, before those that share a column are added up.
  LLA_HOST_DEVICE uint32_t staging(int stage) const { return staging_begin + static_cast<uint32_t>(stage) * staging_bytes; }
  // [finisher][entry]
  LLA_HOST_DEVICE uint32_t flows(int stage) const {
    return flows_begin + static_cast<uint32_t>(stage) * kFinishers * kMostEntries * 4;
  }
};

struct RowBarriers {
  Barrier q_full, q_free, k_full, k_free;
  Barrier head_full[kHeadStages], tiles_free[kHeadStages], factors_free[kHeadStages];  // of v and dy; of factors
  Barrier staged_full[kHeadStages], staged_free[kHeadStages];
  Barrier across_full, across_free;
  Barrier node_full[kMostNodes], node_free[kMostNodes];
};
static_assert(sizeof(RowBarriers) <= 256, "place is kept for them");

struct RowTask {
  BlockOfRows block;
  int part = 0, first = 0, end = 0;  // heads
  uint32_t reads = 0;                // levels of the nodes
};

// Calls work(task) for this block's tasks, one of each round. Every other round goes backwards: otherwise some blocks would
// always get those rows that read the most nodes, as bits of their numbers would not change.
template <bool kLinear, class Work>
__device__ __forceinline__ void each_task(const BackwardParameters& in, int tasks, Work work) {
  const int blocks = static_cast<int>(gridDim.x);
  int turn = static_cast<int>(blockIdx.x);
#pragma unroll 1
  for (int begin = 0; begin < tasks; begin += blocks) {
    const int number = begin + turn;
    turn = blocks - 1 - turn;
    RowTask task;
    const int each = in.tasks_of_block(in.chained_rows);
    if (number >= tasks || !find_block(in, number / each, &task.block)) continue;
    task.part = in.first_part(in.chained_rows, number % each);
    task.first = in.part_first(task.part);
    task.end = in.task_end(in.chained_rows, task.part);
    task.reads = task.block.reads(kLinear);
    work(task);
  }
}

}  // namespace lla::cuda::hopper
