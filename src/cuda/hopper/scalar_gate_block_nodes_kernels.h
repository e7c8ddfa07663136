// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: the nodes that blocks make.
//
// A first launch folds blocks, one block of threads a run of kRun of them for two heads of a group, and joins nodes within
// the run. A warp has the same 16 rows of every node, so that joins need no other warp: it keeps its rows of the latest node
// of each level in shared memory. A second launch, few elements a thread, joins what reaches beyond a run. Linear layers:
// a run is a segment of one head, along which the state stays in registers; a second launch adds what crosses segments.
#pragma once

#include <algorithm>

#include "cuda/hopper/capability.h"
#include "cuda/hopper/register_budget.h"
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_fold.h"
#include "cuda/hopper/scalar_gate_walk.h"
#include "cuda/hopper/tile_rows.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kRunLog = 3, kRun = 1 << kRunLog;  // blocks, from a multiple of kRun on

// kHeads: that go over a block together, and have one copy of its keys. kKeyDim: keys of a task; linear: of a node, or half
// of its keys.
template <int kKeyDim, int kHeads>
struct FoldShared {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;
  using ValueTile = SwizzledTile<kBlock, kColumns>;
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;
  static constexpr int kStages = kHeads == 2 ? 2 : kKeyDim == 64 ? 5 : 3;

  char nodes[kHeads][kRunLog][NodeTile::kBytes];  // [level]: those of the run's own level go by way of the last
  struct Stage {
    char k[RowTile::kBytes], v[kHeads][ValueTile::kBytes];
  } stages[kStages];
  float fold[kStages][kHeads][kBlock];  // decay to the block's end, times the write strength
  Barrier full[kStages], free[kStages];
};

template <int kKeyDim>
constexpr int kHeadWarps = kKeyDim / 16;
template <int kKeyDim, int kHeads>
constexpr int kFoldWarps = kHeads* kHeadWarps<kKeyDim>;  // and a warpgroup, of which one warp brings rows
template <int kKeyDim, int kHeads>
constexpr int kFoldThreads = 32 * kFoldWarps<kKeyDim, kHeads> + 128;

// Where there are most warpgroups.
constexpr int kGroupRegisters[5] = {112, 112, 112, 112, 32};
static_assert(registers_suffice(kGroupRegisters), "more registers than a block has");

// Blocks [from, to) of a run that make nodes, and heads of a part: `heads` from `number` on, as of head_of().
struct Run {
  int first = 0, lo = 0;  // block of the sequence, and the first of its rows that is the call's
  int from = 0, to = 0;
  int row = 0;  // of block `from` on the row axis
  int number = 0, heads = 0;
  int piece = 0;     // of the keys
  int64_t slot = 0;  // of block `from` and the first head
};

// Linear: a run is a segment.
LLA_HOST_DEVICE inline int run_log(const BackwardParameters& in) { return in.linear ? kSegmentLog : kRunLog; }

template <int kHeads, int kPieces>
LLA_HOST_DEVICE int64_t fold_tasks(const BackwardParameters& in) {
  return in.batch.count * in.runs(run_log(in)) * in.part_count * ((in.bundle + kHeads - 1) / kHeads) * kPieces;
}

template <int kHeads, int kPieces>
__device__ __forceinline__ bool find_run(const BackwardParameters& in, int64_t task, Run* run) {
  run->piece = static_cast<int>(task % kPieces);
  task /= kPieces;
  const int shares = (in.bundle + kHeads - 1) / kHeads,
            part = in.part_begin + static_cast<int>(task / shares % in.part_count);
  run->number = in.part_first(part) + static_cast<int>(task % shares) * kHeads;
  run->heads = min(kHeads, in.part_end(part) - run->number);
  // Sequences go round faster than runs: else some blocks of threads would always get the last run, which is often empty.
  const int64_t n = task / shares / in.part_count;
  BlockOfRows block;  // of the sequence, the first
  if (run->heads <= 0 || !find_block(in, n % in.batch.count * in.blocks, &block)) return false;
  const int log = run_log(in), begin = ((block.first >> log) + static_cast<int>(n / in.batch.count)) << log;
  run->first = block.first;
  run->lo = block.lo;
  run->from = max(block.first, begin);
  run->to = min(block.end - 1, begin + (1 << log));
  run->row = block.row + (run->from - block.first) * kBlock;
  run->slot = in.slot(block.place_of(run->from), run->number);
  return run->from < run->to;
}

// One warp: brings k, v and factors of all blocks of all runs.
template <Half kType, int kKeyDim, int kHeads, int kPieces>
__device__ void bring_blocks(const BackwardParameters& in, FoldShared<kKeyDim, kHeads>* shared) {
  using Shared = FoldShared<kKeyDim, kHeads>;
  using RowTile = typename Shared::RowTile;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Turn turn;
  for (int64_t task = blockIdx.x; task < fold_tasks<kHeads, kPieces>(in); task += gridDim.x) {
    Run run;
    if (!find_run<kHeads, kPieces>(in, task, &run)) continue;
    for (int block = 0; block < run.to - run.from; ++block) {
      float4 fold[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= run.heads) continue;
        const BlockFactors& source = *in.factors(run.slot + block * in.head_count + h);
        const float4 decay = reinterpret_cast<const float4*>(source.fold)[lane];
        const float4 write = reinterpret_cast<const float4*>(source.write)[lane];
        fold[h] = make_float4(decay.x * write.x, decay.y * write.y, decay.z * write.z, decay.w * write.w);
        if constexpr (kType == Half::kF16) {
          const float unit = power_of_two(-in.units[run.slot + block * in.head_count + h].fold);
          fold[h] = make_float4(unit * fold[h].x, unit * fold[h].y, unit * fold[h].z, unit * fold[h].w);
        }
      }
      auto& stage = shared->stages[turn.index];
      Barrier* full = &shared->full[turn.index];
      wait(&shared->free[turn.index], turn.phase ^ 1);
      if (lane == 0) {
        const int row = run.row + block * kBlock;
        arrive_expect_bytes(full, RowTile::kBytes + static_cast<uint32_t>(run.heads) * Shared::ValueTile::kBytes);
        for (int panel = 0; panel < RowTile::kPanels; ++panel)
          load_box(stage.k + panel * RowTile::kPanelBytes, &in.k,
                   {kKeyDim * run.piece + 64 * panel, row, in.group_of(run.number)}, full);
        for (int h = 0; h < run.heads; ++h) load_box(stage.v[h], &in.v, {0, row, in.head_of(run.number + h)}, full);
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h < run.heads) reinterpret_cast<float4*>(shared->fold[turn.index][h])[lane] = fold[h];
      }
      release(full);
      turn.next(Shared::kStages);
    }
  }
}

template <Half kType, int kKeyDim, int kHeads, bool kLinear, int kPieces>
struct BlockFold {
  static constexpr bool kUnits = kType == Half::kF16;
  using Shared = FoldShared<kKeyDim, kHeads>;
  using NodeTile = typename Shared::NodeTile;
  static constexpr int kThreads = 32 * kFoldWarps<kKeyDim, kHeads>;

  const BackwardParameters& in;
  Shared* shared;
  const int head, warp, lane;  // head: of those that go together; warp: of the head's
  Turn turn;
  Turn tiles;
  Sums sums;     // linear: the state
  int unit = 0;  // linear, fp16: of it

  // Whether the block's node, of level `level`, takes in the run's latest one of level j.
  __device__ __forceinline__ bool joins(const Run& run, int block, int level, int j) const {
    return j < level && block - (1 << j) >= run.first && head < run.heads;
  }

  // state_decay: linear, over the block.
  __device__ __forceinline__ void run_block(const Run& run, int block, float state_decay) {
    const int level = kLinear ? 0 : trailing_ones_of_block(block);
    const int64_t slot = run.slot + (block - run.from) * in.head_count + head;
    // Nodes that are joined end 2^j blocks before.
    float decay[kRunLog];
#pragma unroll
    for (int j = 0; j < kRunLog && !kLinear; ++j) {
      const float* up = kUnits ? in.joins : in.up;
      decay[j] = joins(run, block, level, j) ? up[slot - (in.head_count << j)] : 0.0f;
    }
    BlockUnits units;
    if constexpr (kUnits) {
      if (head < run.heads) units = in.units[slot];
    }
    auto& stage = shared->stages[turn.index];
    wait(&shared->full[turn.index], turn.phase);
    if (block == run.first && run.lo > 0) {  // values lie right behind keys
      clear_rows<kBlock>(stage.k, Shared::RowTile::kPanels + kHeads, run.lo, kBlock, static_cast<int>(threadIdx.x),
                         kThreads);
      fence_shared_writes();
      sync_some(1, kThreads);
    }
    if (head >= run.heads) {
      release(&shared->free[turn.index]);
      turn.next(Shared::kStages);
      return;
    }
    uint32_t keys[kFoldSteps][4];
    load_folded<kType, typename Shared::RowTile>(keys, shared_address(stage.k), 16 * warp, shared->fold[turn.index][head],
                                                 lane);
    if constexpr (kLinear) {
      if constexpr (kUnits) {
        state_decay *= unit_ratio(unit, units.fold);
        unit = units.fold;
      }
#pragma unroll
      for (float& sum : sums) sum *= state_decay;
    } else {
      make_fresh(sums);
    }
    fence_products(sums);
    issue_fold<kType, typename Shared::ValueTile>(sums, keys, shared_address(stage.v[head]), kLinear);
    wait_products<0>(sums);
#pragma unroll
    for (int i = 0; i < kFoldSteps; ++i) pin(keys[i]);
    release(&shared->free[turn.index]);
    turn.next(Shared::kStages);
    const float to_node = kUnits ? unit_ratio(units.fold, units.node) : 1.0f;
    if constexpr (kUnits && !kLinear) {
#pragma unroll
      for (float& sum : sums) sum *= to_node;
    }
#pragma unroll
    for (int j = 0; j < kRunLog && !kLinear; ++j) {
      if (joins(run, block, level, j))
        add_node<kType, NodeTile>(sums, shared_address(shared->nodes[head][j]), 16 * warp, decay[j], lane);
    }
    if constexpr (kLinear) return store_state(slot * kPieces + run.piece, to_node);
    char* tile = shared->nodes[head][level < kRunLog ? level : kRunLog - 1];
    __syncwarp();
    store_node<kType, NodeTile>(sums, shared_address(tile), 16 * warp, lane, 1);
    __syncwarp();
    unsigned short* node = in.nodes_memory + slot * (kKeyDim * kColumns);
    uint4* to = reinterpret_cast<uint4*>(node) + 16 * warp * (kColumns / 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = 32 * i + lane;
      to[chunk] = *reinterpret_cast<const uint4*>(tile + NodeTile::offset(16 * warp + chunk / 8, chunk % 8 * 8));
    }
  }

  // By the copy engine, from one tile after the other. That the one before the last has been read is known to all when they
  // meet again, before they write there.
  __device__ __forceinline__ void store_state(int64_t place, float to_node) {
    char* tile = shared->nodes[0][tiles.index];
    store_node<kType, NodeTile>(sums, shared_address(tile), 16 * warp, lane, to_node);
    fence_shared_writes();
    sync_some(1, kThreads);
    if (threadIdx.x == 0) {
      store_box(kPieces == 1 ? &in.nodes : &in.node_halves, {0, static_cast<int32_t>(place * kKeyDim)}, tile);
      commit_stores();
      wait_stores_read<1>();
    }
    static_assert(kRunLog == 3, "tiles in turn");
    tiles.next(3);
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int64_t task = blockIdx.x; task < fold_tasks<kHeads, kPieces>(in); task += gridDim.x) {
      Run run;
      if (!find_run<kHeads, kPieces>(in, task, &run)) continue;
      if constexpr (kLinear) {
#pragma unroll
        for (float& sum : sums) sum = 0;
      }
      float decay = 0;
#pragma unroll 1
      for (int block = run.from; block < run.to; ++block) {
        const float next = kLinear ? in.up[run.slot + int64_t{block - run.from} * in.head_count] : 0.0f;
        run_block(run, block, decay);
        decay = next;
      }
    }
    if (kLinear && threadIdx.x == 0) wait_stores<0>();
  }
};

template <Half kType, int kKeyDim, int kHeads, bool kLinear, int kPieces>
__global__ void __launch_bounds__(kFoldThreads<kKeyDim, kHeads>, 1)
    fold_blocks(const __grid_constant__ BackwardParameters in) {
  using Shared = FoldShared<kKeyDim, kHeads>;
  static_assert(sizeof(Shared) <= kMostShared, "more than a block of threads has");
  auto* shared = reinterpret_cast<Shared*>(shared_memory());
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared::kStages; ++i) {
      init_barrier(&shared->full[i], 2);  // the copies' arrival and the factors'
      init_barrier(&shared->free[i], kFoldWarps<kKeyDim, kHeads>);
    }
    publish_barriers();
  }
  __syncthreads();
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kWarps = kHeadWarps<kKeyDim>;
  constexpr bool kMoves = kFoldThreads<kKeyDim, kHeads> == 128 * 5;
  if (warp >= kHeads * kWarps) {
    if constexpr (kMoves) keep_registers<kGroupRegisters[4]>();
    if (warp == kHeads * kWarps) bring_blocks<kType, kKeyDim, kHeads, kPieces>(in, shared);
  } else {
    if constexpr (kMoves) take_registers<kGroupRegisters[0]>();
    BlockFold<kType, kKeyDim, kHeads, kLinear, kPieces>{in, shared, warp / kWarps, warp % kWarps, lane, {}, {}, {}}.run();
  }
}

// ---- beyond runs ---------------------------------------------------------------------------------------------------------

// Warps that share the nodes of a level; few where sequences have few such nodes. Bits do not know.
constexpr int kMostJoinWarps = 16, kFewJoinWarps = 4, kFewBlocks = 256;

// Nodes of levels above a run's own, level by level: those of one level do not need each other.
template <Half kType>
__global__ void __launch_bounds__(32 * kMostJoinWarps)
    join_runs(const __grid_constant__ BackwardParameters in, int64_t node_size, int64_t tasks) {
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    Walk walk;
    if (!walk.find(in, task, node_size)) continue;
    const int first = walk.first.first, end = walk.first.end - 1;  // of the blocks that make nodes
    for (int level = kRunLog + 1; (1 << level) <= end; ++level) {
      const int period = 2 << level, last = (1 << level) - 1;  // blocks of the level are last + a multiple of the period
      const int begin = first <= last ? last : last + (first - last + period - 1) / period * period;
#pragma unroll 1
      for (int64_t block = begin + int64_t{warp} * period; block < end; block += int64_t{warps} * period) {
        const int64_t slot = walk.slot(in, static_cast<int>(block));
        Elements<kType> sum = {};
        sum.add(1, *walk.at(in.nodes_memory, slot));
#pragma unroll 4
        for (int j = kRunLog; j < level; ++j) {
          const int child = static_cast<int>(block) - (1 << j);
          if (child < first) break;
          const int64_t from = walk.slot(in, child);
          sum.add(kType == Half::kF16 ? in.joins[from] : in.up[from], *walk.at(in.nodes_memory, from));
        }
        *walk.at(in.nodes_memory, slot) = sum.packed();
      }
      __syncthreads();
    }
  }
}

// Linear: adds what the segments before leave to the states of a segment.
template <Half kType>
__global__ void __launch_bounds__(32 * kWalkWarps)
    carry_states(const __grid_constant__ BackwardParameters in, int64_t node_size, int64_t tasks) {
  constexpr bool kUnits = kType == Half::kF16;
  __shared__ float decays[kSegment];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    Walk walk;
    if (!walk.find(in, task, node_size)) continue;
    const int first = walk.first.first, end = walk.first.end - 1;
    int begin = ((first >> kSegmentLog) + 1) << kSegmentLog;
    if (begin >= end) continue;
    // fp16: units of the states are left aside here.
    const auto unit_of = [&](int block) { return kUnits ? power_of_two(in.units[walk.slot(in, block)].node) : 1.0f; };
    Elements<kType> carry = {};
    carry.add(unit_of(begin - 1), *walk.at(in.nodes_memory, walk.slot(in, begin - 1)));
    for (; begin < end; begin += kSegment) {
      const int count = min(kSegment, end - begin);
      if (warp == 0) walk.put_decays(in, begin - 1, count, false, decays);
      const uint4 last = *walk.at(in.nodes_memory, walk.slot(in, begin + count - 1));
      __syncthreads();
      uint4 own[kWalkSteps];  // all on their way at once
#pragma unroll
      for (int n = 0; n < kWalkSteps; ++n) {
        const int i = n * kWalkWarps + warp;
        own[n] = i < count ? *walk.at(in.nodes_memory, walk.slot(in, begin + i)) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int n = 0; n < kWalkSteps; ++n) {
        const int i = n * kWalkWarps + warp;
        if (i >= count) continue;
        Elements<kType> sum = carry;
        if constexpr (kUnits) {
          const int unit = in.units[walk.slot(in, begin + i)].node;
          sum.step(decays[i], own[n], power_of_two(unit));
          *walk.at(in.nodes_memory, walk.slot(in, begin + i)) = sum.packed(power_of_two(-unit));
        } else {
          sum.step(decays[i], own[n]);
          *walk.at(in.nodes_memory, walk.slot(in, begin + i)) = sum.packed();
        }
      }
      carry.step(decays[count - 1], last, unit_of(begin + count - 1));
      __syncthreads();
    }
  }
}

template <Half kType, int kKeyDim, int kHeads, bool kLinear, int kPieces = 1>
int32_t launch_folds(const BackwardParameters& in, void* stream) {
  return launch(fold_blocks<kType, kKeyDim, kHeads, kLinear, kPieces>,
                std::min<int64_t>(fold_tasks<kHeads, kPieces>(in), multiprocessors()), kFoldThreads<kKeyDim, kHeads>,
                sizeof(FoldShared<kKeyDim, kHeads>), stream, in);
}
template <Half kType, int kKeyDim>
int32_t launch_folds(const BackwardParameters& in, void* stream) {
  // Linear: segments are long, and there are few of them.
  if (in.halves_states(kKeyDim, multiprocessors()) && in.linear) return launch_folds<kType, 64, 1, true, 2>(in, stream);
  if (in.linear) return launch_folds<kType, kKeyDim, 1, true>(in, stream);
  return in.bundle == 1 ? launch_folds<kType, kKeyDim, 1, false>(in, stream)
                        : launch_folds<kType, kKeyDim, 2, false>(in, stream);
}

}  // namespace

template <Half kType>
int32_t launch_block_nodes(const BackwardParameters& in, int key_dim, void* stream) {
  const int32_t status = key_dim == 64 ? launch_folds<kType, 64>(in, stream) : launch_folds<kType, 128>(in, stream);
  if (status != LLA_OK) return status;
  const int64_t size = int64_t{key_dim} * kColumns, tasks = in.batch.count * in.head_count * (size / kWarpElements);
  if (in.linear) {
    const bool crosses = in.batch.most_length > int64_t{kSegment} << kBlockLog;
    return crosses ? launch(carry_states<kType>, tasks, 32 * kWalkWarps, 0, stream, in, size, tasks) : LLA_OK;
  }
  // A block whose number ends with more ones than a run's must be followed by another one.
  if (in.batch.most_length <= (2 * kRun) << kBlockLog) return LLA_OK;
  const int warps = in.blocks > kFewBlocks ? kMostJoinWarps : kFewJoinWarps;
  return launch(join_runs<kType>, tasks, 32 * warps, 0, stream, in, size, tasks);
}

template <Half kType>
int32_t load_block_nodes() {
  int32_t status = LLA_OK;
  for (auto* kernel :
       {fold_blocks<kType, 64, 1, true, 1>, fold_blocks<kType, 64, 1, true, 2>, fold_blocks<kType, 64, 1, false, 1>,
        fold_blocks<kType, 64, 2, false, 1>, fold_blocks<kType, 128, 1, true, 1>, fold_blocks<kType, 128, 1, false, 1>,
        fold_blocks<kType, 128, 2, false, 1>}) {
    if (status == LLA_OK) status = load_kernel(kernel);
  }
  for (auto* kernel : {join_runs<kType>, carry_states<kType>}) {
    if (status == LLA_OK) status = load_kernel(kernel);
  }
  return status;
}

}  // namespace lla::cuda::hopper
