// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper, linear: gradients of the states of a segment, from its newest state to its oldest, and the
// flow through them. What comes from segments behind is added later.
//
// One block of threads works on one segment and head; a warpgroup has 64 rows of keys of the gradient, transposed, in
// registers.
#pragma once

#include "cuda/common/reduce.h"
#include "cuda/hopper/capability.h"
#include "cuda/hopper/register_budget.h"
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_transposed.h"
#include "cuda/hopper/tile_rows.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kMostStages = 5;
constexpr int kGroupRegisters[3] = {56, 224, 224};  // where there are three warpgroups
static_assert(registers_suffice(kGroupRegisters), "more registers than a block has");

// kKeyDim: keys of a task, all of a state's or, in two pieces, 64 of them.
template <int kKeyDim>
struct StateLayout {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;     // q: [row][dk]
  using ValueTile = SwizzledTile<kBlock, kColumns>;  // dy: [row][dv]
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;  // [dk][dv]
  static constexpr int kStages = kKeyDim == 64 ? 5 : 3;
  static constexpr int kGroups = kKeyDim / 64, kWarps = 4 * kGroups, kThreads = 128 * (kGroups + 1);
  static constexpr uint32_t kDy = RowTile::kBytes, kNode = kDy + ValueTile::kBytes;
  static constexpr uint32_t kStageBytes = kNode + NodeTile::kBytes;
  static constexpr uint32_t kStarts = kStages * kStageBytes;  // [stage][128]: weights of the rows
  static constexpr uint32_t kBarriers = kStarts + kStages * kBlock * 4;
  static constexpr uint32_t kBytes = kBarriers + 128;
};

struct StateBarriers {
  Barrier full[kMostStages], free[kMostStages];
};
static_assert(sizeof(StateBarriers) <= 128, "place is kept for them");

// States after the blocks [from, to) of a segment; rows of the blocks behind them read these.
struct Segment {
  int from = 0, to = 0, end = 0;  // end: of the sequence's blocks
  int row = 0;                    // of block `from` on the row axis
  int last = 0;                   // rows of the sequence's last block that are the call's
  int number = 0;                 // of the head
  int piece = 0;                  // of the keys
  int64_t slot = 0;               // of block `from`

  template <int kPieces>
  __device__ __forceinline__ bool find(const BackwardParameters& in, int task) {
    piece = task % kPieces;
    task /= kPieces;
    const int n = task / in.head_count, count = static_cast<int>(in.batch.count), b = n % count;
    number = in.head_begin + task - n * in.head_count;
    BlockOfRows first;
    if (!find_block(in, b, 0, &first)) return false;
    const int begin = ((first.first >> kSegmentLog) + n / count) << kSegmentLog;
    from = max(first.first, begin);
    end = first.end;
    to = min(end - 1, begin + kSegment);
    row = first.row + ((from - first.first) << kBlockLog);
    last = min(kBlock, first.position + first.rows - ((end - 1) << kBlockLog));
    slot = in.slot(first.place_of(from), number);
    return from < to;
  }
  __device__ __forceinline__ int64_t slot_of(const BackwardParameters& in, int block) const {
    return slot + int64_t{block - from} * in.head_count;
  }
  // Of the task's keys of a state, in boxes of them.
  template <int kPieces>
  __device__ __forceinline__ int64_t place_of(const BackwardParameters& in, int block) const {
    return slot_of(in, block) * kPieces + piece;
  }
};

// One thread: brings what a state needs.
template <int kKeyDim, int kPieces>
__device__ void bring_states(const BackwardParameters& in, int tasks, char* shared, StateBarriers* barriers) {
  using Layout = StateLayout<kKeyDim>;
  using RowTile = typename Layout::RowTile;
  Turn stage;
  for (int task = static_cast<int>(blockIdx.x); task < tasks; task += static_cast<int>(gridDim.x)) {
    Segment segment;
    if (!segment.find<kPieces>(in, task)) continue;
    const int head = in.head_of(segment.number), group = in.group_of(segment.number);
    for (int block = segment.to - 1; block >= segment.from; --block) {
      char* to = shared + stage.index * Layout::kStageBytes;
      Barrier* full = &barriers->full[stage.index];
      const int row = segment.row + ((block + 1 - segment.from) << kBlockLog);
      wait(&barriers->free[stage.index], stage.phase ^ 1);
      arrive_expect_bytes(full, Layout::kStageBytes + kBlock * 4);
      load_box(to + Layout::kNode, kPieces == 1 ? &in.nodes : &in.node_halves,
               {0, static_cast<int32_t>(segment.place_of<kPieces>(in, block) * kKeyDim)}, full);
      load_bytes(shared + Layout::kStarts + stage.index * kBlock * 4, in.factors(segment.slot_of(in, block + 1))->start,
                 kBlock * 4, full);
      load_box(to + Layout::kDy, &in.dy, {0, row, head}, full);
      for (int panel = 0; panel < RowTile::kPanels; ++panel)
        load_box(to + panel * RowTile::kPanelBytes, &in.q, {kKeyDim * segment.piece + 64 * panel, row, group}, full);
      stage.next(Layout::kStages);
    }
  }
}

template <Half kType, int kKeyDim, int kPieces>
struct StateGradients {
  static constexpr bool kUnits = kType == Half::kF16;
  using Layout = StateLayout<kKeyDim>;
  using RowTile = typename Layout::RowTile;
  using ValueTile = typename Layout::ValueTile;
  using NodeTile = typename Layout::NodeTile;
  static constexpr int kSteps = kBlock / kDepthStep;

  const BackwardParameters& in;
  char* shared;
  StateBarriers* barriers;
  const int group, warp, lane;  // group: the warpgroup, with keys 64 group ...; warp: of the warpgroup
  Turn stage;
  int stored = -1;  // of the thread that stores: the stage whose tile may still be read
  Sums sums;        // [dv][dk]
  int unit = 0;     // fp16: of them

  __device__ __forceinline__ StateGradients(const BackwardParameters& parameters, char* memory, StateBarriers* all)
      : in(parameters),
        shared(memory),
        barriers(all),
        group(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32 % 4, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ char* tile(uint32_t place) const { return shared + stage.index * Layout::kStageBytes + place; }

  // Takes the gradient back over the block behind the state; returns this thread's share in the flow through the state.
  __device__ __forceinline__ float decay(float up) {
    const Place at = block_row_transposed(lane);
    const uint32_t node = shared_address(tile(Layout::kNode));
    float flow = 0;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t pairs[4];
      load_matrices<true>(pairs, node + NodeTile::offset(64 * group + 16 * step + at.row, 16 * warp + at.column));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = 8 * step + 2 * i;
        sums[e] *= up;
        sums[e + 1] *= up;
        flow = fmaf(sums[e], low_of<kType>(pairs[i]), flow);
        flow = fmaf(sums[e + 1], high_of<kType>(pairs[i]), flow);
      }
    }
    return flow;
  }

  // Adds what the rows of the block behind the state read of it.
  __device__ __forceinline__ void add_rows() {
    const float of_rows = kUnits ? power_of_two(-unit) : 1.0f;
    const float* starts = reinterpret_cast<const float*>(shared + Layout::kStarts) + stage.index * kBlock;
    const uint32_t dy = shared_address(tile(Layout::kDy));
    const uint64_t queries = describe(shared_address(tile(0)) + static_cast<uint32_t>(group) * RowTile::kPanelBytes,
                                      Major::kOuter, RowTile::kPanelBytes);
    uint32_t values[kSteps / 2][2][4];
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) load_weighted<kType, ValueTile>(dy, starts, of_rows, 2 * i, warp, lane, values[i]);
    fence_products(sums);
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
      fence_values(values[i]);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        multiply<kType, Major::kOuter>(
            sums, values[i][j], moved(queries, depth_offset(Major::kOuter, (2 * i + j) * kDepthStep, RowTile::kPanelBytes)),
            true);
    }
    commit_products();
    wait_products<0>(sums);
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) fence_values(values[i]);
  }
  __device__ __forceinline__ static void fence_values(uint32_t (&values)[2][4]) {
    pin(values[0]);
    pin(values[1]);
  }

  __device__ __forceinline__ void run_state(const Segment& segment, int block, float up, BlockUnits units) {
    if constexpr (kUnits) {
      up *= unit_ratio(unit, units.reader);
      unit = units.reader;
    }
    wait(&barriers->full[stage.index], stage.phase);
    if (block + 2 == segment.end && segment.last < kBlock) {
      const int thread = static_cast<int>(threadIdx.x) - 128;
      clear_rows<kBlock>(tile(0), RowTile::kPanels + 1, 0, segment.last, thread, 128 * Layout::kGroups);  // dy lies behind q
      fence_shared_writes();
      sync_some(1, 128 * Layout::kGroups);
    }
    float flow = warp_sum(decay(up));
    if constexpr (kUnits) flow *= unit_ratio(unit, -units.node);
    add_rows();
    const int64_t slot = segment.slot_of(in, block);
    if (lane == 0) in.factors(slot)->newer[kFlowPlace + 4 * (group + segment.piece) + warp] = flow;
    put_gradient(kUnits ? unit_ratio(unit, units.grad) : 1.0f);
    fence_shared_writes();
    sync_some(1, 128 * Layout::kGroups);
    if (issues()) {
      store_box(kPieces == 1 ? &in.grads : &in.grad_halves,
                {0, static_cast<int32_t>(segment.place_of<kPieces>(in, block) * kKeyDim)}, tile(Layout::kNode));
      commit_stores();
      if (stored >= 0) {
        wait_stores_read<1>();
        arrive(&barriers->free[stored]);
      }
      stored = stage.index;
    }
    stage.next(Layout::kStages);
  }
  // One thread stores gradients, and gives stages back.
  __device__ __forceinline__ static bool issues() { return threadIdx.x == 128; }

  // To the place of the state, whose elements here nobody else reads.
  __device__ __forceinline__ void put_gradient(float to_gradient) const {
    const Place at = block_row_transposed(lane);
    const uint32_t node = shared_address(tile(Layout::kNode));
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = 8 * step + 2 * i;
        if constexpr (kUnits)
          pairs[i] = pack<kType>(to_gradient * sums[e], to_gradient * sums[e + 1]);
        else
          pairs[i] = pack<kType>(sums[e], sums[e + 1]);
      }
      store_matrices<true>(node + NodeTile::offset(64 * group + 16 * step + at.row, 16 * warp + at.column), pairs);
    }
  }

  __device__ __forceinline__ void run(int tasks) {
    for (int task = static_cast<int>(blockIdx.x); task < tasks; task += static_cast<int>(gridDim.x)) {
      Segment segment;
      if (!segment.find<kPieces>(in, task)) continue;
#pragma unroll
      for (float& sum : sums) sum = 0;
      float up = in.up[segment.slot_of(in, segment.to - 1)];
      BlockUnits units, next_units;
      if constexpr (kUnits) units = in.units[segment.slot_of(in, segment.to - 1)];
#pragma unroll 1
      for (int block = segment.to - 1; block >= segment.from; --block) {
        const float next = block > segment.from ? in.up[segment.slot_of(in, block - 1)] : 0.0f;
        if constexpr (kUnits) {
          if (block > segment.from) next_units = in.units[segment.slot_of(in, block - 1)];
        }
        run_state(segment, block, up, units);
        up = next;
        units = next_units;
      }
    }
    if (issues()) wait_stores<0>();
  }
};

template <Half kType, int kKeyDim, int kPieces>
__global__ void __launch_bounds__(StateLayout<kKeyDim>::kThreads, 1)
    read_states(const __grid_constant__ BackwardParameters in, int tasks) {
  using Layout = StateLayout<kKeyDim>;
  static_assert(Layout::kBytes <= kMostShared, "more than a block of threads has");
  static_assert(kFlowPlace + kPieces * Layout::kWarps <= kMostEntries, "a place for each warp's flow");
  char* shared = shared_memory();
  StateBarriers* barriers = reinterpret_cast<StateBarriers*>(shared + Layout::kBarriers);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Layout::kStages; ++i) {
      init_barrier(&barriers->full[i], 1);
      init_barrier(&barriers->free[i], 1);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    if constexpr (Layout::kGroups == 2) keep_registers<kGroupRegisters[0]>();
    if (threadIdx.x == 0) bring_states<kKeyDim, kPieces>(in, tasks, shared, barriers);
  } else {
    if constexpr (Layout::kGroups == 2) take_registers<kGroupRegisters[1]>();
    StateGradients<kType, kKeyDim, kPieces>(in, shared, barriers).run(tasks);
  }
}

template <Half kType, int kKeyDim, int kPieces>
int32_t launch_states(const BackwardParameters& in, void* stream) {
  const int64_t tasks = in.batch.count * in.runs(kSegmentLog) * in.head_count * kPieces, most = multiprocessors();
  if (tasks >= int64_t{1} << 30) return LLA_INTERNAL;
  using Layout = StateLayout<kKeyDim>;
  return launch(read_states<kType, kKeyDim, kPieces>, tasks < most ? tasks : most, Layout::kThreads, Layout::kBytes, stream,
                in, static_cast<int>(tasks));
}

}  // namespace

template <Half kType>
int32_t launch_state_gradients(const BackwardParameters& in, int key_dim, void* stream) {
  if (in.halves_states(key_dim, multiprocessors())) return launch_states<kType, 64, 2>(in, stream);
  return key_dim == 64 ? launch_states<kType, 64, 1>(in, stream) : launch_states<kType, 128, 1>(in, stream);
}

template <Half kType>
int32_t load_state_gradients() {
  int32_t status = load_kernel(read_states<kType, 64, 1>);
  if (status == LLA_OK) status = load_kernel(read_states<kType, 64, 2>);
  return status == LLA_OK ? load_kernel(read_states<kType, 128, 1>) : status;
}

}  // namespace lla::cuda::hopper
