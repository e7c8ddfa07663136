// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: the nodes of whole segments, for sweeps over later ones. For the files that have them of
// one type of rows.
//
// One block of threads makes the nodes of a segment for a pair of heads of a group, which share its keys: what limits such a
// kernel is what tiles take from the cache, and the time between a block's first and last step. A warpgroup has one of the
// heads (of a pair that lacks one, only the first works). Rows come 64 at a time; while the product of the latest is on its
// way, the next are folded. Of nodes that are merged later, the newest of one block stays in registers, the others in shared
// memory. Three warps for each head make its factors: two those of 64 rows each, one those of nodes.
#pragma once

#include <algorithm>

#include "cuda/hopper/capability.h"
#include "cuda/hopper/register_budget.h"
#include "cuda/hopper/scalar_gate_fold.h"
#include "cuda/hopper/scalar_gate_rows.h"
#include "cuda/hopper/scalar_gate_tables.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kMostSegmentLog = 8;  // levels of nodes that are merged; PairLayout::fit() says how many have room
constexpr int kMostPieces = 8;      // of 64 rows, under way
constexpr int kFactorWarps = 3;     // of a head
constexpr int kPairRegisters[4] = {88, 88, 168, 168};
static_assert(registers_suffice(kPairRegisters), "more registers than a block has");

struct SegmentTables {
  float fold[kBlock];            // decay to the block's end, times the write strength
  float merge[kMostSegmentLog];  // decay of the node of a level to the block's end
  float sum_unit, node_unit;     // fp16: as `node` of Units; of the sums that leave
  float unused[2];
};

struct PairShared {
  SegmentTables tables[kPair][2];
  struct Halves {
    float total[2], most[2];  // of 64 rows each: log decay; fp16: the largest write strength
  } halves[kPair][2];
  Barrier full[kMostPieces], free[kMostPieces];
  Barrier tables_full[kPair][2], tables_free[kPair][2];
};

// Tiles first: they need 1024 bytes.
struct PairLayout {
  int slots = 0, pieces = 0;  // nodes of a head; 64 rows under way
  uint32_t node_bytes = 0, key_bytes = 0, piece_bytes = 0, pieces_begin = 0, rest_begin = 0, bytes = 0;

  // False: not even two pieces fit.
  bool fit(int key_dim, int slots_of_head) {
    slots = slots_of_head;
    node_bytes = static_cast<uint32_t>(key_dim) * kSwizzleRow;
    key_bytes = static_cast<uint32_t>(kHalf * key_dim * 2);
    piece_bytes = key_bytes + kPair * kHalf * kSwizzleRow;
    pieces_begin = static_cast<uint32_t>(kPair * slots) * node_bytes;
    for (pieces = kMostPieces; pieces > 1; --pieces) {
      rest_begin = pieces_begin + static_cast<uint32_t>(pieces) * piece_bytes;
      bytes = rest_begin + static_cast<uint32_t>(sizeof(PairShared));
      if (bytes <= kMostShared) return true;
    }
    return false;
  }
  LLA_HOST_DEVICE uint32_t slot(int head, int i) const { return static_cast<uint32_t>(head * slots + i) * node_bytes; }
  LLA_HOST_DEVICE uint32_t k(int piece) const { return pieces_begin + static_cast<uint32_t>(piece) * piece_bytes; }
  LLA_HOST_DEVICE uint32_t v(int piece, int head) const {
    return k(piece) + key_bytes + static_cast<uint32_t>(head * kHalf) * kSwizzleRow;
  }
};

// Goes over the tasks of a block of threads: segments of pairs of heads, of which nothing but the last of a sequence is left
// out. `task` is of the first head.
struct PairWalk {
  const SweepParameters& in;
  int64_t number, tasks;
  int heads = 0;  // 1 or 2
  Task task;

  __device__ __forceinline__ PairWalk(const SweepParameters& parameters, int64_t all)
      : in(parameters), number(blockIdx.x), tasks(all) {}
  __device__ __forceinline__ bool next() {
    const int groups = static_cast<int>(in.shape.groups), members = static_cast<int>(in.shape.heads) / groups;
    const int of_group = static_cast<int>(pairs_of_group(in.shape)), pairs = groups * of_group;
    while (number < tasks) {
      const int n = static_cast<int>(number), pair = n % pairs, first = kPair * (pair % of_group);
      task = find_segment(in, n / pairs, pair / of_group * members + first);
      heads = min(kPair, members - first);
      number += gridDim.x;
      if (task.first < task.end && !task.last) return true;
    }
    return false;
  }
  __device__ __forceinline__ int head(int i) const {
    return task.head + (in.shape.head_map == LLA_HEAD_MAP_CYCLIC ? i * static_cast<int>(in.shape.groups) : i);
  }
  __device__ __forceinline__ Task task_of(int i) const {
    Task of = task;
    of.head = head(i);
    return of;
  }
};

// One thread: brings k, and v of both heads, of all blocks of all tasks.
template <int kKeyDim>
__device__ void copy_pieces(const SweepParameters& in, const PairLayout& layout, int64_t tasks, char* shared,
                            PairShared* rest) {
  using Keys = SwizzledTile<kHalf, kKeyDim>;
  Turn turn;
  PairWalk walk(in, tasks);
  while (walk.next()) {
    const Task& task = walk.task;
    int row = LiveRows(task, task.first).row;
    for (int piece = 2 * task.first; piece < 2 * task.end; ++piece, row += kHalf) {
      Barrier* full = &rest->full[turn.index];
      wait(&rest->free[turn.index], turn.phase ^ 1);
      arrive_expect_bytes(full, Keys::kBytes + static_cast<uint32_t>(walk.heads * kHalf) * kSwizzleRow);
      for (int panel = 0; panel < Keys::kPanels; ++panel)
        load_box(shared + layout.k(turn.index) + panel * Keys::kPanelBytes, &in.half_k, {64 * panel, row, task.group}, full);
      for (int i = 0; i < walk.heads; ++i)
        load_box(shared + layout.v(turn.index, i), &in.half_v, {kColumns * task.tile, row, walk.head(i)}, full);
      turn.next(layout.pieces);
    }
  }
}

// ---- factors -------------------------------------------------------------------------------------------------------------

// What a lane loads of a block: its rows 64 half + lane and 32 more. What is not there is zero.
struct FoldFactors {
  uint32_t gate[2] = {0, 0}, write[2] = {0, 0};
  bool live[2] = {false, false};
  bool raw = false;  // one of them is a raw row of the history, whose factors are fp32
  bool there = false;
};

// Goes over all blocks of all tasks, ahead of what is made of their factors.
template <bool kWide>
struct FactorWalk {
  PairWalk walk;
  const int head, first;  // of the pair; row of a block
  FactorColumn<kWide> gate, write;
  int block = 0;
  bool there;

  __device__ __forceinline__ FactorWalk(const SweepParameters& in, int64_t tasks, int head_of_pair, int half)
      : walk(in, tasks),
        head(head_of_pair),
        first(kHalf * half + static_cast<int>(threadIdx.x) % 32),
        gate(in.gate),
        write(in.write),
        there(true) {
    begin_task();
  }
  __device__ __forceinline__ void begin_task() {
    do there = walk.next();
    while (there && head >= walk.heads);
    if (!there) return;
    block = walk.task.first;
    const int64_t row = LiveRows(walk.task, block).row + first;
    gate.move_to(walk.task.index, row, walk.head(head));
    write.move_to(walk.task.index, row, walk.head(head));
  }
  __device__ __forceinline__ FoldFactors next() {
    FoldFactors to;
    if (!there) return to;
    to.there = true;
    const LiveRows rows(walk.task, block);
    const bool gates = gate.present(), writes = write.present();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = first + 32 * i;
      to.live[i] = r >= rows.lo && r < rows.hi;
      if (gates && to.live[i]) to.gate[i] = gate.load(gate.row(32 * i));
      if (writes && to.live[i]) to.write[i] = write.load(write.row(32 * i));
    }
    if (rows.from < rows.lo) load_raw(rows, &to);
    if (++block == walk.task.end) {
      begin_task();
    } else {
      gate.next_block();
      write.next_block();
    }
    return to;
  }
  __device__ __forceinline__ void load_raw(const LiveRows& rows, FoldFactors* to) const {
    const SweepParameters& in = walk.in;
    const TailRows tail{in.state, in.batch.sequences[walk.task.sequence].history};
    const int distance = (block << kBlockLog) - walk.task.base;
    to->raw = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = first + 32 * i;
      if (is_raw(rows, r)) {
        to->gate[i] = __float_as_uint(tail.gate(walk.head(head), distance + r));
        to->write[i] = __float_as_uint(tail.write(walk.head(head), distance + r));
      } else {
        to->gate[i] = __float_as_uint(gate.read(to->gate[i]));
        to->write[i] = __float_as_uint(write.present() ? write.read(to->write[i]) : to->live[i] ? 1.0f : 0.0f);
      }
    }
  }
};

// One of the two warps for the rows of a head.
template <bool kUnits, bool kWide>
__device__ __forceinline__ void make_row_factors(const SweepParameters& in, int64_t tasks, PairShared* rest, int head,
                                                 int half) {
  const int lane = static_cast<int>(threadIdx.x) % 32, first = kHalf * half + lane;
  FactorWalk<kWide> ahead(in, tasks, head, half);
  FoldFactors row = ahead.next();
  Turn turn;
#pragma unroll 1
  while (row.there) {
    const FoldFactors next = ahead.next();
    float prefix[2], suffix[2] = {0, 0}, write[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      prefix[i] = row.raw ? __uint_as_float(row.gate[i]) : ahead.gate.read(row.gate[i]);
      write[i] = row.raw                 ? __uint_as_float(row.write[i])
                 : ahead.write.present() ? ahead.write.read(row.write[i])
                 : row.live[i]           ? 1.0f
                                         : 0.0f;
    }
    PairShared::Halves& of_halves = rest->halves[head][turn.index];
    if constexpr (kUnits) {
      const float most = warp_max(fmaxf(fmaxf(fabsf(write[0]), fabsf(write[1])), ahead.write.present() ? 0.0f : 1.0f));
      if (lane == 0) of_halves.most[half] = most;
    }
    // Sums over the row's aligned block of 2^d rows, and of those after it, in the order of fill_tables().
#pragma unroll
    for (int d = 0; d < 5; ++d) {
      const int size = 1 << d;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sibling = __shfl_xor_sync(kAllLanes, prefix[i], size);
        if (!(lane & size)) suffix[i] += sibling;
        prefix[i] += sibling;
      }
    }
    suffix[0] += prefix[1];
    const float total = prefix[0] + prefix[1];
    if (lane == 0) of_halves.total[half] = total;
    sync_some(2 + head, 32 * kFactorWarps);
    if (half == 0) {
      const float other = of_halves.total[1];
      suffix[0] += other;
      suffix[1] += other;
    }
    if constexpr (kUnits) {
      const float unit = power_of_two(-exponent_above(fmaxf(of_halves.most[0], of_halves.most[1])));
      write[0] *= unit;
      write[1] *= unit;
    }
    const float fold[2] = {write[0] * quick_decay(suffix[0]), write[1] * quick_decay(suffix[1])};
    wait(&rest->tables_free[head][turn.index], turn.phase ^ 1);
    float* to = rest->tables[head][turn.index].fold + first;
    to[0] = fold[0];
    to[32] = fold[1];
    __syncwarp();
    if (lane == 0) arrive(&rest->tables_full[head][turn.index]);
    turn.next(2);
    row = next;
  }
}

// The warp for the nodes of a head.
template <bool kLinear, bool kUnits>
__device__ __forceinline__ void make_node_factors(const SweepParameters& in, int64_t tasks, PairShared* rest, int head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  PairWalk walk(in, tasks);
  Turn turn;
  while (walk.next()) {
    if (head >= walk.heads) continue;
    const Task task = walk.task_of(head);
    NodeDecays nodes;
#pragma unroll 1
    for (int block = task.first; block < task.end; ++block) {
      float newer = 0, of_all;
      if constexpr (!kLinear) newer = decays_of_newer(nodes, lane, &of_all);
      const int of_node = kUnits ? exponent_above(nodes.weight) : 0;
      const PairShared::Halves& of_halves = rest->halves[head][turn.index];
      sync_some(2 + head, 32 * kFactorWarps);
      const float block_total = of_halves.total[0] + of_halves.total[1];
      int fold = 0;
      if constexpr (kUnits) fold = exponent_above(fmaxf(of_halves.most[0], of_halves.most[1]));
      const float merge = quick_decay(block_total + newer);
      const float in_units = kUnits ? merge * power_of_two((kLinear ? nodes.fold : of_node) - fold) : merge;
      if constexpr (kUnits) nodes.fold = fold;
      nodes.take<kLinear, kUnits>(lane, trailing_ones_of_block(block), block_total, newer, merge,
                                  power_of_two(fold + kBlockLog));
      wait(&rest->tables_free[head][turn.index], turn.phase ^ 1);
      SegmentTables& tables = rest->tables[head][turn.index];
      if (lane < kMostSegmentLog) tables.merge[lane] = in_units;
      if constexpr (kUnits) {
        if (lane == 0) {
          tables.sum_unit = power_of_two(fold);
          tables.node_unit = power_of_two(fold - exponent_above(nodes.latest));
        }
      }
      __syncwarp();
      if (lane == 0) arrive(&rest->tables_full[head][turn.index]);
      turn.next(2);
    }
    if (lane == 0) {
      const int64_t place = in.place(task.places + task.segment - task.oldest_segment, task.head, task.tile);
      in.sum_decay[2 * place] = kLinear ? nodes.decay : nodes.last[0];
      in.sum_decay[2 * place + 1] = nodes.last[1];
      if constexpr (kUnits) in.sum_weight[place] = nodes.latest;
    }
  }
}

template <bool kLinear, bool kUnits>
__device__ __forceinline__ void make_factors(const SweepParameters& in, int64_t tasks, PairShared* rest, int head,
                                             int number) {
  const auto wide = [](const View& view) { return !view.present() || view.dtype == LLA_F32; };
  if (number == 2)
    make_node_factors<kLinear, kUnits>(in, tasks, rest, head);
  else if (wide(in.gate) && wide(in.write))
    make_row_factors<kUnits, true>(in, tasks, rest, head, number);
  else
    make_row_factors<kUnits, false>(in, tasks, rest, head, number);
}

// ---- products ------------------------------------------------------------------------------------------------------------

template <Half kType, int kKeyDim, bool kLinear>
struct SegmentNodes {
  using Keys = SwizzledTile<kHalf, kKeyDim>;
  using Values = SwizzledTile<kHalf, kColumns>;
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;  // [dk][dv]
  static constexpr bool kUnits = kType == Half::kF16;
  static constexpr int kSteps = kHalf / kDepthStep, kThreads = kPair * 128;
  using Folded = uint32_t[kSteps][4];

  const SweepParameters& in;
  const PairLayout& layout;
  char* shared;
  PairShared* rest;
  const int head, warp, lane;
  Turn coming, piece;                          // the next to be folded, and to be given back
  Turn coming_table, table;                    // the same
  NodeColumns<kKeyDim> sums;                   // linear: the state
  uint32_t newest[kLinear ? 1 : kKeyDim / 4];  // the latest node of one block

  __device__ __forceinline__ SegmentNodes(const SweepParameters& parameters, const PairLayout& places, char* memory,
                                          PairShared* others, int head_of_pair, int warp_of_head)
      : in(parameters),
        layout(places),
        shared(memory),
        rest(others),
        head(head_of_pair),
        warp(warp_of_head),
        lane(own_lane()) {
#pragma unroll
    for (Sums& panel : sums) make_fresh(panel);
  }

  __device__ __forceinline__ uint32_t slot(int level) const { return shared_address(shared + layout.slot(head, level - 1)); }
  __device__ __forceinline__ const SegmentTables& tables(const Turn& turn) const { return rest->tables[head][turn.index]; }

  // Rows 64 half ... of a block; the heads of a pair meet where there are rows that are not the call's.
  __device__ __forceinline__ void take_piece(const PairWalk& walk, int block, int half) {
    wait(&rest->full[coming.index], coming.phase);
    const LiveRows rows(walk.task, block);
    if (rows.lo > 0 || rows.hi < kBlock) {
      char* k = head == 0 ? shared + layout.k(coming.index) : nullptr;
      if (head < walk.heads)
        complete_tiles<kType, kKeyDim, kHalf>(in, walk.task_of(head), block, rows, kHalf * half, k,
                                              shared + layout.v(coming.index, head), static_cast<int>(threadIdx.x) % 128,
                                              128);
      finish_rows(kThreads);
    }
  }
  __device__ __forceinline__ void fold_piece(Folded& values, const PairWalk& walk, int block, int half) {
    take_piece(walk, block, half);
    if (half == 0) wait(&rest->tables_full[head][coming_table.index], coming_table.phase);
    load_folded<kType, Values>(values, shared_address(shared + layout.v(coming.index, head)), 16 * warp,
                               tables(coming_table).fold + kHalf * half, lane);
    coming.next(layout.pieces);
    if (half == 1) coming_table.next(2);
  }
  __device__ __forceinline__ void multiply_piece(Folded& values, int at, bool adds) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) pin(values[i]);
    fence_products();
    issue_columns<kType, Keys, true>(sums, values, shared_address(shared + layout.k(at)), adds);
  }
  __device__ __forceinline__ void give_piece(Folded& values) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) pin(values[i]);
    release(&rest->free[piece.index], lane);
    piece.next(layout.pieces);
  }

  __device__ __forceinline__ void merge_nodes(uint32_t children) {
    const SegmentTables& factors = tables(table);
    if (children & 1) {
      const float factor = factors.merge[0];
#pragma unroll
      for (int i = 0; i < kKeyDim / 4; ++i)
        add_pair<kType>(sums[i / 16][2 * i % 32], sums[i / 16][2 * i % 32 + 1], factor, newest[kLinear ? 0 : i]);
    }
#pragma unroll 1
    for (uint32_t left = children >> 1; left; left &= left - 1) {
      const int level = __ffsll(left);
      add_columns<kType, NodeTile>(sums, slot(level), 16 * warp, factors.merge[level], lane);
    }
  }
  __device__ __forceinline__ void keep_node(int level, float unit) {
    if (level > 0) return store_columns<kType, NodeTile>(sums, slot(level), 16 * warp, lane, unit);
#pragma unroll
    for (int i = 0; i < kKeyDim / 4; ++i)
      newest[kLinear ? 0 : i] = pack_pair<kType>(sums[i / 16][2 * i % 32], sums[i / 16][2 * i % 32 + 1], unit);
  }
  __device__ __forceinline__ void store_sums(const Task& task, float unit) {
    float* to = segment_sum(in, task, kKeyDim);
    visit_columns(sums, 16 * warp, lane,
                  [&](int key, int value, float sum) { to[key * kColumns + value] = kUnits ? unit * sum : sum; });
  }

  __device__ __forceinline__ void run_segment(const PairWalk& walk) {
    const Task task = walk.task_of(head);
    Folded values[2];
    fold_piece(values[0], walk, task.first, 0);
    uint32_t present = 0;
    if constexpr (kLinear) visit_columns(sums, 0, 0, [](int, int, float& sum) { sum = 0; });
#pragma unroll 1
    for (int block = task.first; block < task.end; ++block) {
      if constexpr (kLinear) {
        scale_columns(sums, tables(table).merge[0]);
      } else {
#pragma unroll
        for (Sums& panel : sums) make_fresh(panel);
      }
      pin(sums);
      const int at = piece.index, other = at + 1 == layout.pieces ? 0 : at + 1;
      multiply_piece(values[0], at, kLinear);
      fold_piece(values[1], walk, block, 1);
      multiply_piece(values[1], other, true);
      wait_products<1>();
      give_piece(values[0]);
      if (block + 1 < task.end) fold_piece(values[0], walk, block + 1, 0);
      wait_products<0>();
      pin(sums);
      give_piece(values[1]);

      const bool ends = block + 1 == task.end;
      if constexpr (!kLinear) {
        const int level = trailing_ones_of_block(block);
        merge_nodes(present & ((uint32_t{1} << level) - 1));
        if (!ends) keep_node(level, kUnits ? tables(table).node_unit : 1.0f);
        present = (present >> level << level) | uint32_t{1} << level;
      }
      if (ends) store_sums(task, kUnits ? tables(table).sum_unit : 1.0f);
      release(&rest->tables_free[head][table.index], lane);
      table.next(2);
    }
  }

  __device__ __forceinline__ void run(int64_t tasks) {
    PairWalk walk(in, tasks);
#pragma unroll 1
    while (walk.next()) {
      if (head < walk.heads) {
        run_segment(walk);
        continue;
      }
      for (int n = 2 * walk.task.first; n < 2 * walk.task.end; ++n) {  // the other head's rows
        take_piece(walk, n / 2, n % 2);
        coming.next(layout.pieces);
        release(&rest->free[piece.index], lane);
        piece.next(layout.pieces);
      }
    }
  }
};

template <Half kType, int kKeyDim, bool kLinear>
__global__ void __launch_bounds__(kSweepThreads, 1)
    segment_nodes(const __grid_constant__ SweepParameters in, const __grid_constant__ PairLayout layout, int64_t tasks) {
  char* shared = shared_memory();
  auto* rest = reinterpret_cast<PairShared*>(shared + layout.rest_begin);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMostPieces; ++i) {
      init_barrier(&rest->full[i], 1);
      init_barrier(&rest->free[i], kPair * 4);
    }
    for (int head = 0; head < kPair; ++head) {
      for (int i = 0; i < 2; ++i) {
        init_barrier(&rest->tables_full[head][i], kFactorWarps);
        init_barrier(&rest->tables_free[head][i], 4);
      }
    }
    publish_barriers();
  }
  __syncthreads();
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 8) {
    keep_registers<kPairRegisters[0]>();
    if (warp == 0) {
      if (threadIdx.x == 0) copy_pieces<kKeyDim>(in, layout, tasks, shared, rest);
    } else if (warp <= kPair * kFactorWarps) {
      make_factors<kLinear, kType == Half::kF16>(in, tasks, rest, (warp - 1) / kFactorWarps, (warp - 1) % kFactorWarps);
    }
  } else {
    take_registers<kPairRegisters[2]>();
    SegmentNodes<kType, kKeyDim, kLinear>(in, layout, shared, rest, warp / 4 - 2, warp % 4).run(tasks);
  }
}

template <Half kType, int kKeyDim, bool kLinear>
int32_t launch_nodes_of(const SweepParameters& in, void* stream) {
  PairLayout layout;
  if (in.segment_log > kMostSegmentLog || !layout.fit(kKeyDim, kLinear ? 0 : std::max(in.segment_log - 1, 0)))
    return LLA_INTERNAL;
  const int64_t tasks = in.batch.count * in.segments * in.tiles * in.shape.groups * pairs_of_group(in.shape);
  return launch(segment_nodes<kType, kKeyDim, kLinear>, std::min<int64_t>(tasks, multiprocessors()), kSweepThreads,
                layout.bytes, stream, in, layout, tasks);
}

}  // namespace

template <Half kType>
int32_t launch_segment_nodes(const SweepParameters& in, int key_dim, void* stream) {
  const bool linear = in.shape.levels == 0;
  if (key_dim == 64)
    return linear ? launch_nodes_of<kType, 64, true>(in, stream) : launch_nodes_of<kType, 64, false>(in, stream);
  return linear ? launch_nodes_of<kType, 128, true>(in, stream) : launch_nodes_of<kType, 128, false>(in, stream);
}

template <Half kType>
int32_t load_segment_nodes() {
  int32_t status = LLA_OK;
  for (auto* kernel : {segment_nodes<kType, 64, true>, segment_nodes<kType, 64, false>, segment_nodes<kType, 128, true>,
                       segment_nodes<kType, 128, false>}) {
    if (status == LLA_OK) status = load_kernel(kernel);
  }
  return status;
}

}  // namespace lla::cuda::hopper
