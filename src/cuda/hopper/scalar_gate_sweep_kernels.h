// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: the sweep's kernel, the join of the nodes of whole segments, and their launches. For the
// files that have them of one type of rows.
#pragma once

#include "cuda/hopper/capability.h"
#include "cuda/hopper/register_budget.h"
#include "cuda/hopper/scalar_gate_multiply.h"
#include "cuda/hopper/scalar_gate_nodes.h"
#include "cuda/hopper/scalar_gate_sweep.h"
#include "cuda/hopper/scalar_gate_tables.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kGroupRegisters[4] = {96, 136, 136, 144};
static_assert(registers_suffice(kGroupRegisters), "more registers than a block has");

// One thread: brings q, k and v of all blocks of all tasks.
template <int kKeyDim>
__device__ void copy_rows(const SweepParameters& in, char* shared, Barriers* barriers) {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;
  Turn turn;
  for (int64_t number = blockIdx.x; number < in.tasks; number += gridDim.x) {
    const Task task = find_task(in, number);
    for (int block = task.first; block < task.end; ++block) {
      const int row = LiveRows(task, block).row;
      const auto copy = [&](char* to, const CUtensorMap* map, Barrier* full, Barrier* free) {
        wait(free, turn.phase ^ 1);
        arrive_expect_bytes(full, RowTile::kBytes);
        for (int panel = 0; panel < RowTile::kPanels; ++panel)
          load_box(to + panel * RowTile::kPanelBytes, map, {64 * panel, row, task.group}, full);
      };
      const int i = turn.index;
      copy(shared + in.layout.q(i), &in.q, &barriers->q_full[i], &barriers->q_free[i]);
      copy(shared + in.layout.k(i), &in.k, &barriers->k_full[i], &barriers->k_free[i]);
      wait(&barriers->v_free[i], turn.phase ^ 1);
      arrive_expect_bytes(&barriers->v_full[i], kBlock * kSwizzleRow);
      load_box(shared + in.layout.v(i), &in.v, {kColumns * task.tile, row, task.head}, &barriers->v_full[i]);
      turn.next(in.layout.stages);
    }
  }
}

// One thread: brings the nodes of older segments and of the history, for each block anew.
template <int kKeyDim>
__device__ void copy_nodes(const SweepParameters& in, char* shared, Barriers* barriers) {
  Turn turn;
  for (int64_t number = blockIdx.x; number < in.tasks; number += gridDim.x) {
    const Task task = find_task(in, number);
    const auto next = [&] {
      wait(&barriers->ring_free[turn.index], turn.phase ^ 1);
      arrive_expect_bytes(&barriers->ring_full[turn.index], in.layout.node_bytes);
    };
    for (int block = task.first; block < task.end; ++block) {
      for (uint32_t left = task.upper(); left; left &= left - 1) {
        const int u = __ffsll(left) - 1;
        const int64_t place = in.place(task.places + task.upper_end(u), task.head, task.tile);
        next();
        load_box(shared + in.layout.ring_slot(turn.index), &in.nodes, {0, static_cast<int32_t>(place * kKeyDim)},
                 &barriers->ring_full[turn.index]);
        turn.next(in.layout.ring);
      }
      for (int entry = 0; entry < task.old_count(); ++entry) {
        int column = 0, head = task.head * static_cast<int>(in.tiles) + task.tile,
            node = task.old_number * in.old_entries + entry;
        if (in.old_copies == nullptr) {
          int level;
          node = in.batch.sequences[task.sequence].history.node[task.old_level(entry, in.grain_shift, &level)];
          column = kColumns * task.tile;
          head = static_cast<int32_t>(in.state.layer_head(task.head));
        }
        next();
        load_box(shared + in.layout.ring_slot(turn.index), &in.old_nodes, {column, 0, head, node},
                 &barriers->ring_full[turn.index]);
        turn.next(in.layout.ring);
      }
    }
  }
}

template <Half kType, int kKeyDim, bool kLinear>
__global__ void __launch_bounds__(kSweepThreads, 1) sweep(const __grid_constant__ SweepParameters in) {
  char* shared = shared_memory();
  Barriers* barriers = reinterpret_cast<Barriers*>(shared + in.layout.barriers_begin);
  constexpr int kNodeWarps = 4, kReaders = kRowWarps + kNodeWarps;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMostStages; ++i) {
      init_barrier(&barriers->q_full[i], 1);
      init_barrier(&barriers->k_full[i], 1);
      init_barrier(&barriers->v_full[i], 1);
      init_barrier(&barriers->q_free[i], kRowWarps);
      init_barrier(&barriers->k_free[i], kReaders);
      init_barrier(&barriers->v_free[i], kReaders);
    }
    for (int i = 0; i < 2; ++i) {
      init_barrier(&barriers->tables_full[i], 2);
      init_barrier(&barriers->tables_free[i], kReaders);
      init_barrier(&barriers->reads_done[i], kRowWarps);
    }
    for (int i = 0; i < kRing; ++i) {
      init_barrier(&barriers->ring_full[i], 1);
      init_barrier(&barriers->ring_free[i], kRowWarps);
    }
    for (int i = 0; i < kNodeTurns; ++i) init_barrier(&barriers->node_done[i], kNodeWarps);
    publish_barriers();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4) {
    keep_registers<kGroupRegisters[0]>();
    if (warp > 0) wait_for_kernel_before();  // the rows' copies need not
    if (warp == 0) {
      if (threadIdx.x == 0) copy_rows<kKeyDim>(in, shared, barriers);
    } else if (warp == 3) {
      if constexpr (!kLinear) {
        if (in.layout.ring > 0 && threadIdx.x % 32 == 0) copy_nodes<kKeyDim>(in, shared, barriers);
      }
    } else {
      make_tables<kLinear, kType == Half::kF16>(in, shared, barriers, warp - 1);
    }
  } else if (warp < 12) {
    take_registers<kGroupRegisters[1]>();
    RowSweep<kType, kKeyDim, kLinear>(in, shared, barriers).run();
  } else {
    take_registers<kGroupRegisters[3]>();
    if constexpr (kLinear) wait_for_kernel_before();
    NodeSweep<kType, kKeyDim, kLinear>(in, shared, barriers).run();
  }
}

constexpr int kJoinThreads = 256;

// After the sums of all segments but the last: the nodes that end with segments, or, linear, the states before them. One
// thread: four elements of a sequence's nodes, in order. As a sweep over the whole sequence does it, to the bit.
template <Half kType, bool kLinear>
__global__ void __launch_bounds__(kJoinThreads)
    join_segments(const __grid_constant__ SweepParameters in, int64_t size, int64_t blocks, int64_t tasks) {
  let_next_kernel_begin();  // it waits before it reads what comes from here
  wait_for_kernel_before();
  for (int64_t number = blockIdx.x; number < tasks; number += gridDim.x) {
    const int64_t element = number % blocks * kJoinThreads + threadIdx.x;
    const int64_t tile = number / blocks % in.tiles, head = number / blocks / in.tiles % in.shape.heads;
    const int64_t b = number / blocks / in.tiles / in.shape.heads;
    const Sequence& sequence = in.batch.sequences[b];
    if (!in.takes(sequence) || sequence.rows <= 0 || 4 * element >= size) continue;
    const int64_t oldest = sequence.position >> (kBlockLog + in.segment_log);
    const int64_t count = ((sequence.position + sequence.rows - 1) >> (kBlockLog + in.segment_log)) - oldest;
    const int64_t places = in.first_place(sequence, b);
    constexpr bool kUnits = kType == Half::kF16;
    constexpr int kAhead = kLinear ? 4 : 8;  // segments whose sums are under way
    float4 sums[kAhead] = {};
    float2 decays[kAhead] = {};
    float of_sums[kAhead] = {};  // fp16: their weights
    const auto load_sum = [&](int64_t i, int at) {
      if (i >= count) return;
      const int64_t place = in.place(places + i, head, tile);
      sums[at] = reinterpret_cast<const float4*>(in.sums + place * size)[element];
      decays[at] = reinterpret_cast<const float2*>(in.sum_decay)[place];
      if constexpr (kUnits) of_sums[at] = in.sum_weight[place];
    };
    const auto next_sum = [&](int64_t i) {
#pragma unroll
      for (int n = 0; n + 1 < kAhead; ++n) sums[n] = sums[n + 1], decays[n] = decays[n + 1], of_sums[n] = of_sums[n + 1];
      load_sum(i + kAhead, kAhead - 1);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_sum(i, i);
    if constexpr (kLinear) {
      float4 state = make_float4(0, 0, 0, 0);
      if (const LinearState old(in, sequence, head, tile); old.is_there()) {
        const int row = static_cast<int>(4 * element / kColumns), column = static_cast<int>(4 * element % kColumns);
        state =
            make_float4(old.get(row, column), old.get(row, column + 1), old.get(row, column + 2), old.get(row, column + 3));
      }
      float weight = 0;
      for (int64_t i = 0; i <= count; ++i) {
        const int64_t place = in.place(places + i, head, tile);
        const float4 sum = sums[0];
        const float decay = decay_of(decays[0].x), of_sum = of_sums[0];
        next_sum(i);
        reinterpret_cast<float4*>(in.sums + place * size)[element] = state;
        if (kUnits && element == 0) {
          const float before = weight;
          if (i < count) weight = fmaf(decay, weight, of_sum);
          in.sum_weight[place] = before;
        }
        state = make_float4(fmaf(decay, state.x, sum.x), fmaf(decay, state.y, sum.y), fmaf(decay, state.z, sum.z),
                            fmaf(decay, state.w, sum.w));
      }
    } else {
      // Of the newest node of each level, which are what is joined: what other blocks of threads write is not there yet. (In
      // local memory: with all loops over levels unrolled, for registers, it takes longer.)
      float latest[kMostLevels];  // log decays
      uint2 contents[kMostLevels];
      float weights[kUnits ? kMostLevels : 1];  // fp16
      uint32_t present = 0;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t place = in.place(places + i, head, tile), segment = oldest + i;
        const int level = __ffsll(~segment) - 1;
        float4 sum = sums[0];
        const float total = decays[0].x;
        float newer = decays[0].y, weight = of_sums[0];
        next_sum(i);
        // The child of level u ends 2^u segments before; a sequence may begin behind it.
        for (int u = 0; u < level && (present >> u & 1) != 0; ++u) {
          float factor = quick_decay(total + newer);
          if constexpr (kUnits) {
            weight = fmaf(factor, weights[u], weight);
            factor *= power_of_two(exponent_above(weights[u]));
          }
          const uint2 x = contents[u];
          sum = make_float4(fmaf(factor, low_of<kType>(x.x), sum.x), fmaf(factor, high_of<kType>(x.x), sum.y),
                            fmaf(factor, low_of<kType>(x.y), sum.z), fmaf(factor, high_of<kType>(x.y), sum.w));
          newer += latest[u];
        }
        const float decay = total + newer;
        if constexpr (kUnits) {
          const float unit = power_of_two(-exponent_above(weight));
          sum = make_float4(unit * sum.x, unit * sum.y, unit * sum.z, unit * sum.w);
          weights[level] = weight;
        }
        const uint2 content = make_uint2(pack<kType>(sum.x, sum.y), pack<kType>(sum.z, sum.w));
        latest[level] = decay;
        contents[level] = content;
        present = (present >> level << level) | uint32_t{1} << level;
        reinterpret_cast<uint2*>(in.upper + place * size)[element] = content;
        if (element == 0) in.upper_decay[place] = decay;
        if (kUnits && element == 0) in.upper_weight[place] = weight;
      }
    }
  }
}

template <Half kType, int kKeyDim, bool kLinear>
int32_t launch_sweeps_of(SweepParameters* in, bool segmented, void* stream) {
  const int64_t most = multiprocessors();
  const auto blocks = [&](int64_t tasks) { return tasks < most ? tasks : most; };
  int32_t status = LLA_OK;
  if (segmented) {
    const int64_t size = int64_t{kKeyDim} * kColumns, parts = size / 4 / kJoinThreads;
    const int64_t joins = in->batch.count * in->shape.heads * in->tiles * parts;
    status = launch_segment_nodes<kType>(*in, kKeyDim, stream);
    if (status == LLA_OK)
      status = launch_early(join_segments<kType, kLinear>, joins, kJoinThreads, 0, stream, *in, size, parts, joins);
  }
  if (status == LLA_OK)
    status =
        segmented
            ? launch_early(sweep<kType, kKeyDim, kLinear>, blocks(in->tasks), kSweepThreads, in->layout.bytes, stream, *in)
            : launch(sweep<kType, kKeyDim, kLinear>, blocks(in->tasks), kSweepThreads, in->layout.bytes, stream, *in);
  return status;
}

template <Half kType, int kKeyDim>
int32_t load_sweeps_of() {
  const int32_t status = load_kernel(sweep<kType, kKeyDim, true>);
  return status == LLA_OK ? load_kernel(sweep<kType, kKeyDim, false>) : status;
}

}  // namespace

template <Half kType>
int32_t launch_sweeps(SweepParameters* in, int key_dim, bool segmented, void* stream) {
  const bool linear = in->shape.levels == 0;
  if (key_dim == 64)
    return linear ? launch_sweeps_of<kType, 64, true>(in, segmented, stream)
                  : launch_sweeps_of<kType, 64, false>(in, segmented, stream);
  return linear ? launch_sweeps_of<kType, 128, true>(in, segmented, stream)
                : launch_sweeps_of<kType, 128, false>(in, segmented, stream);
}

template <Half kType>
int32_t load_sweeps() {
  int32_t status = load_sweeps_of<kType, 64>();
  if (status == LLA_OK) status = load_sweeps_of<kType, 128>();
  if (status == LLA_OK) status = load_kernel(join_segments<kType, true>);
  if (status == LLA_OK) status = load_kernel(join_segments<kType, false>);
  return status == LLA_OK ? load_segment_nodes<kType>() : status;
}

}  // namespace lla::cuda::hopper
