// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper, gradients of sources: tasks, shared memory, and the warps that bring things.
#pragma once

#include "cuda/hopper/register_budget.h"
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_fragments.h"
#include "cuda/hopper/scalar_gate_sources.h"

namespace lla::cuda::hopper {

constexpr int kColumnThreads = 384;  // warpgroups: one that brings tiles, two that multiply, each for 64 sources
constexpr int kColumnWarps = 8;      // that multiply
constexpr int kHeadStages = 2;
constexpr int kGroupRegisters[3] = {40, 232, 232};
static_assert(registers_suffice(kGroupRegisters), "more registers than a block has");

// Shared memory: q and k stay for all heads of a part, and so do scores, which do not depend on the head: each thread has
// its own ones. The rest comes for each head.
template <int kKeyDim>
struct ColumnLayout {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;     // q, k: [row][dk]
  using ValueTile = SwizzledTile<kBlock, kColumns>;  // v, dy: [row][dv]
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;  // [dk][dv]
  static constexpr uint32_t kQ = 0, kK = RowTile::kBytes, kHeads = 2 * RowTile::kBytes;
  static constexpr uint32_t kV = 0, kDy = ValueTile::kBytes, kNode = 2 * ValueTile::kBytes;  // in a stage
  static constexpr uint32_t kStageBytes = kNode + NodeTile::kBytes;
  // Between the warpgroups: of the first half's sources with the second half's rows, weights and gradients of scores, and
  // what is read of each source.
  using AcrossTile = SwizzledTile<kHalf, kHalf>;
  static constexpr uint32_t kWeights = kHeads + kHeadStages * kStageBytes, kGradients = kWeights + AcrossTile::kBytes;
  static constexpr uint32_t kOthers = kGradients + AcrossTile::kBytes;
  static constexpr uint32_t kSources = kOthers + kHalf * 4;
  // Scores of a half with itself: a warp has no rows before its sources. Behind them, those across.
  static constexpr uint32_t kScores = kSources + kHeadStages * sizeof(SourceFactors);
  static constexpr uint32_t kOwnBytes = (8 + 6 + 4 + 2) * 32 * sizeof(float4);
  static constexpr uint32_t kScoresAcross = kScores + 2 * kOwnBytes;
  static constexpr uint32_t kBarriers = kScoresAcross + 128 * sizeof(float[32]);
  static constexpr uint32_t kBytes = kBarriers + 128;
};

struct ColumnBarriers {
  Barrier rows_full, rows_free;  // q and k
  Barrier full[kHeadStages], sources_full[kHeadStages], free[kHeadStages];
  Barrier across_full, across_free;
};
static_assert(sizeof(ColumnBarriers) <= 128, "place is kept for them");

// Task: a block and a part of the heads.
__device__ __forceinline__ bool find_task(const BackwardParameters& in, int64_t number, BlockOfRows* block, int* part) {
  const int each = in.tasks_of_block(in.chained);
  *part = in.first_part(in.chained, static_cast<int>(number % each));
  return find_block(in, number / each, block);
}

// What a task waits for at its end, the sums of earlier parts, and at its start, q and k of the next one: into the cache.
template <int kKeyDim>
__device__ __forceinline__ void prefetch_rest(const BackwardParameters& in, int64_t tasks, int64_t number,
                                              const BlockOfRows& block, int part) {
  if (in.adds && in.dk.present()) prefetch_bytes(part_sums<kKeyDim>(in, in.dk_parts, block, part), kBlock * kKeyDim * 4);
  BlockOfRows next;
  if (number + gridDim.x >= tasks || !find_task(in, number + gridDim.x, &next, &part)) return;
  const int group = in.group_of(in.part_first(part));
  for (int column = 0; column < in.shape.key_dim; column += 64) {
    prefetch_box(&in.q, {column, next.row, group});
    prefetch_box(&in.k, {column, next.row, group});
  }
}

// One thread: brings q, k, v, dy and the gradients of nodes.
template <int kKeyDim>
__device__ void copy_tiles(const BackwardParameters& in, int64_t tasks, char* shared, ColumnBarriers* barriers) {
  using Layout = ColumnLayout<kKeyDim>;
  using RowTile = typename Layout::RowTile;
  Turn stage;
  uint32_t phase = 0;
  for (int64_t number = blockIdx.x; number < tasks; number += gridDim.x) {
    BlockOfRows block;
    int part;
    if (!find_task(in, number, &block, &part)) continue;
    const int first = in.part_first(part), end = in.task_end(in.chained, part);
    for (int i = first; i < end; ++i) {
      char* to = shared + Layout::kHeads + stage.index * Layout::kStageBytes;
      Barrier* full = &barriers->full[stage.index];
      wait(&barriers->free[stage.index], stage.phase ^ 1);
      arrive_expect_bytes(full, Layout::kStageBytes);
      const int head = in.head_of(i);
      load_box(to + Layout::kV, &in.v, {0, block.row, head}, full);
      load_box(to + Layout::kDy, &in.dy, {0, block.row, head}, full);
      // No node: a box before the tensor, zeros.
      const int64_t slot = block.makes ? in.slot(block.place, i) : -1;
      load_box(to + Layout::kNode, &in.grads, {0, static_cast<int32_t>(slot * kKeyDim)}, full);
      stage.next(kHeadStages);
      if (i + 1 == end) prefetch_rest<kKeyDim>(in, tasks, number, block, part);  // earlier, it would leave the cache again
      if (i > first) continue;
      wait(&barriers->rows_free, phase ^ 1);
      arrive_expect_bytes(&barriers->rows_full, 2 * RowTile::kBytes);
      for (int panel = 0; panel < RowTile::kPanels; ++panel) {
        const uint32_t at = panel * RowTile::kPanelBytes;
        load_box(shared + Layout::kQ + at, &in.q, {64 * panel, block.row, in.group_of(i)}, &barriers->rows_full);
        load_box(shared + Layout::kK + at, &in.k, {64 * panel, block.row, in.group_of(i)}, &barriers->rows_full);
      }
      phase ^= 1;
    }
  }
}

// kSourceWarps warps: bring the factors.
template <int kKeyDim>
__device__ void copy_sources(const BackwardParameters& in, int64_t tasks, char* shared, ColumnBarriers* barriers,
                             int number) {
  using Layout = ColumnLayout<kKeyDim>;
  const SourceShare share{number, static_cast<int>(threadIdx.x) % 32};
  Turn stage;
  for (int64_t number = blockIdx.x; number < tasks; number += gridDim.x) {
    BlockOfRows block;
    int part;
    if (!find_task(in, number, &block, &part)) continue;
    const int end = in.task_end(in.chained, part);
    for (int i = in.part_first(part); i < end; ++i) {
      if (share.number == 0 && share.lane == 0 && i + 1 < end)
        prefetch_bytes(in.factors(in.slot(block.place, i + 1)), static_cast<uint32_t>(in.factor_bytes));
      wait(&barriers->free[stage.index], stage.phase ^ 1);
      share.copy(*in.factors(in.slot(block.place, i)), in.linear, static_cast<float>(in.shape.scale),
                 reinterpret_cast<SourceFactors*>(shared + Layout::kSources) + stage.index);
      release(&barriers->sources_full[stage.index]);
      stage.next(kHeadStages);
    }
  }
}

}  // namespace lla::cuda::hopper
