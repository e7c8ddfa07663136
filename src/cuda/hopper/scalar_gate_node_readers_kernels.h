// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper, log-linear: the gradient of each node from the rows that read it.
#pragma once

#include <algorithm>

#include "cuda/common/reduce.h"
#include "cuda/hopper/capability.h"
#include "cuda/hopper/register_budget.h"
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_transposed.h"
#include "cuda/hopper/tile_rows.h"

namespace lla::cuda::hopper {

namespace {

// Tasks, those of the highest levels first: a level's pieces of blocks that read nodes, for each sequence.
struct ReaderPlan {
  int levels = 0;       // of nodes
  int pieces[16] = {};  // of a level and sequence at most
  int sequences = 0;
  int chunks = 0, chunks_of_part = 0;  // of heads
  int tasks = 0;
};

// Blocks [from, to) that read one node, for some heads of one group.
struct ReaderTask {
  int row = 0;   // of position 0 on the row axis
  int last = 0;  // rows of the last block that are the call's; those of the others all are
  int level = 0, from = 0, to = 0;
  int heads = 0, head = 0, group = 0;  // how many, number of the first
  int node_place = 0, from_place = 0;
  int piece_place = -1;  // of a piece of a node that has several

  __device__ __forceinline__ int row_of(int block) const { return row + (block << kBlockLog); }
};

template <int kHeads>
__device__ __forceinline__ bool find_task(const BackwardParameters& in, const ReaderPlan& plan, int number, ReaderTask* to) {
  int n = static_cast<int>(number / plan.chunks);
  const int chunk = static_cast<int>(number) - n * plan.chunks, part = in.part_begin + chunk / plan.chunks_of_part;
  if (number >= plan.tasks) return false;
  to->head = in.part_first(part) + chunk % plan.chunks_of_part * kHeads;
  to->heads = min(kHeads, in.part_end(part) - to->head);
  if (to->heads <= 0) return false;
  to->group = in.group_of(to->head);
  int u = plan.levels - 1;
  while (n >= plan.pieces[u] * plan.sequences) n -= plan.pieces[u--] * plan.sequences;
  const int b = n / plan.pieces[u], piece = n % plan.pieces[u];
  BlockOfRows block;
  if (!find_block(in, b * in.blocks, &block)) return false;
  to->row = block.row_begin - block.position;
  to->level = u;
  // Blocks that read nodes of level u have bit u: pieces of 2^s blocks have bit t.
  const int s = min(u, kPieceLog), t = u - s;
  const int x = (block.first >> (u + 1) << (t + 1)) + (piece >> t << (t + 1)) + (1 << t) + (piece & ((1 << t) - 1));
  to->from = x << s;
  to->to = min((x + 1) << s, block.end);
  const int node = (x >> t << u) - 1;
  to->piece_place =
      u <= kPieceLog ? -1 : static_cast<int>(in.first_piece(block.row_begin, b)) + x - (block.first >> kPieceLog);
  if (node < block.first || to->from >= to->to) return false;
  to->last = min(kBlock, block.position + block.rows - ((to->to - 1) << kBlockLog));
  to->node_place = static_cast<int>(block.place_of(node));
  to->from_place = static_cast<int>(block.place_of(to->from));
  return true;
}

// The task of a block of threads in some round: back and forth, so that nobody has the larger one in every round.
__device__ __forceinline__ int task_of_round(int round) {
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

constexpr int kReaderStages = 2;
constexpr int kTaskTurns = 2;  // tasks that are known ahead

template <int kKeyDim, int kHeads>
struct ReaderLayout {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;     // q: [row][dk]
  using ValueTile = SwizzledTile<kBlock, kColumns>;  // dy: [row][dv]
  static constexpr uint32_t kStageBytes = RowTile::kBytes + kHeads * ValueTile::kBytes;
  static constexpr uint32_t kStaging = kReaderStages * kStageBytes;            // a kibibyte for each warp
  static constexpr uint32_t kWeights = kStaging + kHeads * 4 * kStagingBytes;  // [turn][head][128]
  static constexpr uint32_t kBarriers = kWeights + 2 * kHeads * kBlock * 4;
  static constexpr uint32_t kTasks = kBarriers + 64;
  static constexpr uint32_t kBytes = kTasks + kTaskTurns * sizeof(ReaderTask);
  // A warpgroup for each head, and a thread that finds tasks and brings rows. Several heads: it has a warpgroup, whose
  // registers the others take.
  static constexpr int kThreads = kHeads == 1 ? 160 : 128 * (kHeads + 1);
};

struct ReaderBarriers {
  Barrier full[kReaderStages], free[kReaderStages];
  Barrier task_full[kTaskTurns], task_free[kTaskTurns];
};
static_assert(sizeof(ReaderBarriers) <= 64, "place is kept for them");

// Where the warpgroup of a head leaves its sums of a piece: [i / 4][thread][4].
template <int kKeyDim>
__device__ __forceinline__ float4* piece_of(const BackwardParameters& in, int64_t place, int level, int head) {
  const int64_t slot = (place * in.piece_levels + level - kPieceLog - 1) * in.head_count + head - in.head_begin;
  return reinterpret_cast<float4*>(in.node_pieces + slot * (kKeyDim * kColumns)) + threadIdx.x % 128;
}

// fp16: what the sums of a node's readers are multiplied by where they become its gradient.
template <Half kType>
__device__ __forceinline__ float to_gradient(const BackwardParameters& in, int64_t slot) {
  if constexpr (kType != Half::kF16) return 1;
  const BlockUnits units = in.units[slot];
  return unit_ratio(units.reader, units.grad);
}

template <Half kType, int kKeyDim, int kHeads>
struct NodeReaders {
  static constexpr bool kUnits = kType == Half::kF16;
  using Layout = ReaderLayout<kKeyDim, kHeads>;
  using RowTile = typename Layout::RowTile;
  using ValueTile = typename Layout::ValueTile;
  static constexpr int kSteps = kBlock / kDepthStep;

  const BackwardParameters& in;
  char* shared;
  ReaderBarriers* barriers;
  const int number, thread, warp, lane;  // number: of the warpgroup, and of its head in the task
  Turn stage, task_turn;
  int turn = 0;  // of the weights
  float sums[kKeyDim / 2];

  __device__ __forceinline__ NodeReaders(const BackwardParameters& parameters, char* memory, ReaderBarriers* all)
      : in(parameters),
        shared(memory),
        barriers(all),
        number(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0)),
        thread(static_cast<int>(threadIdx.x) % 128),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32 % 4, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ char* q() const { return shared + stage.index * Layout::kStageBytes; }
  __device__ __forceinline__ char* dy() const { return q() + RowTile::kBytes + number * ValueTile::kBytes; }

  // With which a row of a block reads the node: this thread's. Fetched ahead.
  struct Weight {
    float start = 0, newer = 0, lambda = 0;
  };
  __device__ __forceinline__ Weight fetch(const char* readers, int block, int level) const {
    const auto* reader = reinterpret_cast<const BlockFactors*>(readers);
    const int entry = __popcll(static_cast<uint32_t>(block) & ((uint32_t{1} << level) - 1));
    return {reader->start[thread], reader->newer[entry], reader->lambda(kInnerLevels + 1 + entry)[thread]};
  }
  __device__ __forceinline__ const char* readers_of(const ReaderTask& task) const {
    return reinterpret_cast<const char*>(in.factors(in.slot(task.from_place, task.head + number)));
  }

  // While two steps are multiplied, the next two are made ready: there are no registers for more.
  __device__ __forceinline__ void add_block(const float* weights, bool adds) {
    uint32_t values[2][2][4];
    const uint64_t queries = describe(shared_address(q()), Major::kOuter, RowTile::kPanelBytes);
    fence_products(sums);
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t(&pair)[2][4] = values[step / 2 % 2];
      if (step >= 4) wait_products<1>(pair[0], pair[1]);
      load_weighted<kType, ValueTile>(shared_address(dy()), weights, 1, step, warp, lane, pair);
      fence_products(pair[0], pair[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        multiply<kType, Major::kOuter>(
            sums, pair[i], moved(queries, depth_offset(Major::kOuter, (step + i) * kDepthStep, RowTile::kPanelBytes)),
            adds || step + i > 0);
      commit_products();
    }
    wait_products<0>(sums, values[0][0], values[0][1], values[1][0], values[1][1]);
  }

  // Adds up what the task's blocks read.
  __device__ __forceinline__ void add_blocks(const ReaderTask& task, Weight weight) {
    const bool active = number < task.heads;
    const char* readers = readers_of(task);
    float of_node = 1, of_weights = 1;  // fp16
    if constexpr (kUnits) {
      if (active) {
        const BlockUnits units = in.units[in.slot(task.node_place, task.head + number)];
        of_node = power_of_two(-units.node);  // `newer` is times the node's unit
        of_weights = power_of_two(-units.reader);
      }
    }
    make_fresh(sums);
#pragma unroll 1
    for (int block = task.from; block < task.to; ++block) {
      float* weights = reinterpret_cast<float*>(shared + Layout::kWeights) + (turn * kHeads + number) * kBlock;
      turn ^= 1;
      if (active) {
        if constexpr (kUnits)
          weights[thread] = weight.start * (weight.newer * of_node) * weight.lambda * of_weights;
        else
          weights[thread] = weight.start * weight.newer * weight.lambda;
        readers += in.head_count * in.factor_bytes;
        if (block + 1 < task.to) weight = fetch(readers, block + 1, task.level);
      }
      sync_some(2 + number, 128);
      wait(&barriers->full[stage.index], stage.phase);
      if (block + 1 == task.to && task.last < kBlock) {
        if (active) clear_rows<kBlock>(dy(), 1, 0, task.last, thread, 128);
        clear_rows<kBlock>(q(), RowTile::kPanels, 0, task.last, static_cast<int>(threadIdx.x), 128 * kHeads);
        fence_shared_writes();
        sync_some(1, 128 * kHeads);
      }
      if (active) add_block(weights, block > task.from);
      release(&barriers->free[stage.index]);
      stage.next(kReaderStages);
    }
  }

  __device__ __forceinline__ void store(int node_place, int piece_place, int level, int head) const {
    if (piece_place >= 0) {
      float4* to = piece_of<kKeyDim>(in, piece_place, level, head);
#pragma unroll
      for (int i = 0; i < kKeyDim / 8; ++i)
        to[128 * i] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    } else {
      const int64_t slot = in.slot(node_place, head);
      store_gradient<kType, kKeyDim>(in.grads_memory + slot * (kKeyDim * kColumns), sums, to_gradient<kType>(in, slot),
                                     shared + Layout::kStaging + (number * 4 + warp) * kStagingBytes);
    }
  }

  // The next task; false: there is none.
  __device__ __forceinline__ bool find(ReaderTask* task) {
    wait(&barriers->task_full[task_turn.index], task_turn.phase);
    *task = reinterpret_cast<const ReaderTask*>(shared + Layout::kTasks)[task_turn.index];
    release(&barriers->task_free[task_turn.index]);
    task_turn.next(kTaskTurns);
    return task->heads > 0;
  }

  // While a task's sums are stored, the next one's first weights are on their way.
  __device__ __forceinline__ void run() {
    ReaderTask task;
    Weight weight;
    bool found = find(&task);
    if (found && number < task.heads) weight = fetch(readers_of(task), task.from, task.level);
#pragma unroll 1
    while (found) {
      add_blocks(task, weight);
      const int node_place = task.node_place, piece_place = task.piece_place, level = task.level, head = task.head + number;
      const bool active = number < task.heads;
      found = find(&task);
      if (found && number < task.heads) weight = fetch(readers_of(task), task.from, task.level);
      if (active) store(node_place, piece_place, level, head);
    }
  }
};

// One thread: finds the tasks, for all, and brings q and dy of their blocks.
template <int kKeyDim, int kHeads>
__device__ void copy_readers(const BackwardParameters& in, const ReaderPlan& plan, char* shared, ReaderBarriers* barriers) {
  using Layout = ReaderLayout<kKeyDim, kHeads>;
  using RowTile = typename Layout::RowTile;
  using ValueTile = typename Layout::ValueTile;
  Turn stage, turn;
  const auto tell = [&](const ReaderTask& task) {
    wait(&barriers->task_free[turn.index], turn.phase ^ 1);
    reinterpret_cast<ReaderTask*>(shared + Layout::kTasks)[turn.index] = task;
    arrive(&barriers->task_full[turn.index]);
    turn.next(kTaskTurns);
  };
  for (int round = 0; round * static_cast<int>(gridDim.x) < plan.tasks; ++round) {
    ReaderTask task;
    if (!find_task<kHeads>(in, plan, task_of_round(round), &task)) continue;
    tell(task);
    for (int block = task.from; block < task.to; ++block) {
      char* to = shared + stage.index * Layout::kStageBytes;
      Barrier* full = &barriers->full[stage.index];
      wait(&barriers->free[stage.index], stage.phase ^ 1);
      arrive_expect_bytes(full, RowTile::kBytes + static_cast<uint32_t>(task.heads) * ValueTile::kBytes);
      for (int panel = 0; panel < RowTile::kPanels; ++panel)
        load_box(to + panel * RowTile::kPanelBytes, &in.q, {64 * panel, task.row_of(block), task.group}, full);
      to += RowTile::kBytes;
      for (int i = 0; i < task.heads; ++i, to += ValueTile::kBytes)
        load_box(to, &in.dy, {0, task.row_of(block), in.head_of(task.head + i)}, full);
      stage.next(kReaderStages);
    }
  }
  tell(ReaderTask{});  // no heads: the end
}

constexpr int kReaderRegisters[5] = {112, 112, 112, 112, 32};  // of warpgroups, where there are several heads
static_assert(registers_suffice(kReaderRegisters), "more registers than a block has");

template <Half kType, int kKeyDim, int kHeads>
__global__ void __launch_bounds__(ReaderLayout<kKeyDim, kHeads>::kThreads, kHeads == 1 ? 2 : 1)
    read_nodes(const __grid_constant__ BackwardParameters in, const __grid_constant__ ReaderPlan plan) {
  using Layout = ReaderLayout<kKeyDim, kHeads>;
  char* shared = shared_memory();
  ReaderBarriers* barriers = reinterpret_cast<ReaderBarriers*>(shared + Layout::kBarriers);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kReaderStages; ++i) {
      init_barrier(&barriers->full[i], 1);
      init_barrier(&barriers->free[i], 4 * kHeads);
    }
    for (int i = 0; i < kTaskTurns; ++i) {
      init_barrier(&barriers->task_full[i], 1);
      init_barrier(&barriers->task_free[i], 4 * kHeads);
    }
    publish_barriers();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4 * kHeads) {
    if constexpr (kHeads > 1) take_registers<kReaderRegisters[0]>();
    NodeReaders<kType, kKeyDim, kHeads>(in, shared, barriers).run();
  } else {
    if constexpr (kHeads > 1) keep_registers<kReaderRegisters[4]>();
    if (threadIdx.x == 128 * kHeads) copy_readers<kKeyDim, kHeads>(in, plan, shared, barriers);
  }
}

// Nodes whose readers went in pieces: their sum, in order. One block of threads: one node and head.
template <Half kType, int kKeyDim>
__global__ void __launch_bounds__(128)
    join_pieces(const __grid_constant__ BackwardParameters in, int64_t most_nodes, int64_t tasks) {
  constexpr int kNodeLog = kPieceLog + 1;  // such nodes end with a multiple of so many blocks
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int head = in.head_begin + static_cast<int>(task % in.head_count);
    const int64_t n = task / in.head_count, b = n / most_nodes;
    BlockOfRows node;
    if (!find_block(in, b * in.blocks, &node)) continue;
    const int64_t places = node.place;
    const int first = node.first;
    node.block = (((first >> kNodeLog) + static_cast<int>(n % most_nodes) + 1) << kNodeLog) - 1;
    if (node.block < first || node.block + 1 >= node.end) continue;
    const int level = trailing_ones_of_block(node.block);
    const int64_t piece =
        in.first_piece(in.batch.sequences[b].row_begin, b) + ((node.block + 1) >> kPieceLog) - (first >> kPieceLog);
    const int count = (node.readers_end(false) - node.block - 1 + kPiece - 1) >> kPieceLog;
    float sums[kKeyDim / 2];
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const float4* from = piece_of<kKeyDim>(in, piece + i, level, head);
#pragma unroll
      for (int j = 0; j < kKeyDim / 8; ++j) {
        const float4 x = from[128 * j];
        sums[4 * j] += x.x;
        sums[4 * j + 1] += x.y;
        sums[4 * j + 2] += x.z;
        sums[4 * j + 3] += x.w;
      }
    }
    const int64_t slot = in.slot(places + node.block - first, head);
    store_gradient<kType, kKeyDim>(in.grads_memory + slot * (kKeyDim * kColumns), sums, to_gradient<kType>(in, slot),
                                   shared_memory() + threadIdx.x / 32 * kStagingBytes);
  }
}

template <Half kType, int kKeyDim, int kHeads>
int32_t launch_readers(const BackwardParameters& in, void* stream) {
  ReaderPlan plan;
  plan.chunks_of_part = (in.bundle + kHeads - 1) / kHeads;
  plan.chunks = in.part_count * plan.chunks_of_part;
  plan.sequences = static_cast<int>(in.batch.count);
  const int blocks = static_cast<int>(in.blocks);
  int64_t pieces = 0;
  for (int64_t n = (in.batch.most_length - 1) >> kBlockLog; n > 0; n >>= 1, ++plan.levels) {
    const int s = std::min(plan.levels, kPieceLog), t = plan.levels - s;
    plan.pieces[plan.levels] = ((blocks >> (plan.levels + 1)) + 2) << t;
    pieces += plan.pieces[plan.levels];
  }
  const int64_t tasks = pieces * in.batch.count * plan.chunks;
  if (tasks >= int64_t{1} << 30) return LLA_INTERNAL;
  plan.tasks = static_cast<int>(tasks);
  using Layout = ReaderLayout<kKeyDim, kHeads>;
  const int64_t most = (kHeads == 1 ? 2 : 1) * multiprocessors();
  int32_t status = launch(read_nodes<kType, kKeyDim, kHeads>, tasks < most ? tasks : most, Layout::kThreads, Layout::kBytes,
                          stream, in, plan);
  if (status == LLA_OK && in.piece_levels > 0) {
    const int64_t nodes = (in.blocks >> (kPieceLog + 1)) + 2, joins = nodes * in.batch.count * in.head_count;
    status = launch(join_pieces<kType, kKeyDim>, joins, 128, 4 * kStagingBytes, stream, in, nodes, joins);
  }
  return status;
}

}  // namespace

template <Half kType>
int32_t launch_node_readers(const BackwardParameters& in, int key_dim, void* stream) {
  if (in.blocks < 2) return LLA_OK;  // no nodes
  if (in.bundle == 1)
    return key_dim == 64 ? launch_readers<kType, 64, 1>(in, stream) : launch_readers<kType, 128, 1>(in, stream);
  return key_dim == 64 ? launch_readers<kType, 64, 4>(in, stream) : launch_readers<kType, 128, 4>(in, stream);
}

template <Half kType>
int32_t load_node_readers() {
  int32_t status = load_kernel(read_nodes<kType, 64, 1>);
  if (status == LLA_OK) status = load_kernel(read_nodes<kType, 64, 4>);
  if (status == LLA_OK) status = load_kernel(read_nodes<kType, 128, 1>);
  if (status == LLA_OK) status = load_kernel(read_nodes<kType, 128, 4>);
  if (status == LLA_OK) status = load_kernel(join_pieces<kType, 64>);
  return status == LLA_OK ? load_kernel(join_pieces<kType, 128>) : status;
}

}  // namespace lla::cuda::hopper
