// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: gradients of queries and of λ, and what rows read.
//
// One block of threads works on one block of rows and one part of a group's heads, one head after the other. The first
// warpgroup brings things; each of the two others has half of the rows, whose queries and their gradient stay in registers.
// Nodes come first: then the keys, which all heads share, may still be on their way.
#pragma once

#include <type_traits>

#include "cuda/hopper/capability.h"
#include "cuda/hopper/fragment.h"
#include "cuda/hopper/scalar_gate_head_units.h"
#include "cuda/hopper/scalar_gate_row_copies.h"
#include "cuda/hopper/scalar_gate_row_levels.h"
#include "cuda/hopper/scalar_gate_row_mask.h"
#include "cuda/hopper/tile_rows.h"

namespace lla::cuda::hopper {

namespace {

// A warpgroup's half of the rows.
template <Half kType, int kKeyDim, bool kLinear>
struct RowGradients {
  static constexpr bool kUnits = kType == Half::kF16;
  using RowTile = SwizzledTile<kBlock, kKeyDim>;     // q, k: [row][dk]
  using ValueTile = SwizzledTile<kBlock, kColumns>;  // v, dy: [row][dv]
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;  // [dk][dv]
  static constexpr int kSteps = kKeyDim / kDepthStep, kValueSteps = kColumns / kDepthStep;
  static constexpr int kParts = kKeyDim / 64;  // of 64 rows of a node
  template <int kValue>
  using Number = std::integral_constant<int, kValue>;
  using Mask = RowMask<kType, kLinear>;
  using Reads = typename Mask::Reads;

  const BackwardParameters& in;
  const RowLayout& layout;
  char* shared;
  RowBarriers* barriers;
  const int half, warp, lane;  // half: the warpgroup; warp: of the warpgroup
  Turn stage, once, across;
  Turn arrived, ring;  // of nodes: the next whose products begin, and the next to give back
  uint32_t query[kSteps][4];
  uint32_t dy[kValueSteps][4];
  float gradient[kKeyDim / 2];
  int unit = 0;  // fp16: of the gradient

  __device__ __forceinline__ RowGradients(const BackwardParameters& parameters, const RowLayout& places, char* memory,
                                          RowBarriers* all)
      : in(parameters),
        layout(places),
        shared(memory),
        barriers(all),
        half(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32 % 4, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  // The warp's first row; a lane has elements of the rows lane / 4 and 8 more, and in the end the sums of one of the two.
  __device__ __forceinline__ int first_row() const { return kHalf * half + 16 * warp; }
  __device__ __forceinline__ int own_row() const { return lane / 4 + 8 * (lane % 2); }
  __device__ __forceinline__ float own_of(const float (&rows)[2]) const { return lane % 2 == 0 ? rows[0] : rows[1]; }
  // Sums over the four lanes that share the two rows.
  __device__ __forceinline__ float sum_own(const float (&rows)[2]) const {
    const float sum = own_of(rows) + __shfl_xor_sync(kAllLanes, lane % 2 == 0 ? rows[1] : rows[0], 1);
    return sum + __shfl_xor_sync(kAllLanes, sum, 2);
  }
  __device__ __forceinline__ Mask masks() const {
    return {half, warp, lane, static_cast<float>(in.shape.scale), kUnits ? power_of_two(-unit) : 1.0f};
  }
  __device__ __forceinline__ const BlockFactors& factors() const {
    return *reinterpret_cast<const BlockFactors*>(shared + layout.factors(stage.index));
  }
  // Of the warp's first row.
  __device__ __forceinline__ float* staging() const {
    return reinterpret_cast<float*>(shared + layout.staging(stage.index)) + first_row() * layout.staged;
  }

  template <class Tile, int kCount>
  __device__ __forceinline__ void load_rows(uint32_t (&to)[kCount][4], uint32_t begin) {
    const uint32_t tile = shared_address(shared + begin);
    const Place at = block_row(lane);
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
      load_matrices<false>(to[step], tile + Tile::offset(first_row() + at.row, kDepthStep * step + at.column));
      pin(to[step]);
    }
  }

  __device__ __forceinline__ static bool is_partial(const BlockOfRows& block) { return block.lo > 0 || block.hi < kBlock; }
  // Zeroes the rows of two tiles that are not the call's.
  __device__ __forceinline__ void clear_dead(const BlockOfRows& block, uint32_t a, uint32_t b, int panels) const {
    if (!is_partial(block)) return;
    constexpr int kThreads = 32 * kRowWarps;
    const int thread = static_cast<int>(threadIdx.x) - (kRowThreads - kThreads);
    clear_rows<kBlock>(shared + a, panels, block.lo, block.hi, thread, kThreads);
    clear_rows<kBlock>(shared + b, panels, block.lo, block.hi, thread, kThreads);
    fence_shared_writes();
    sync_some(kClearBarrier, kThreads);
  }

  // ---- products ----------------------------------------------------------------------------------------------------------

  // dy times 64 rows of [...][dv] at `from`: rows of v, or of a node.
  __device__ __forceinline__ void issue_values(Sums& sum, uint64_t from) {
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step)
      multiply<kType, Major::kDepth>(
          sum, dy[step], moved(from, depth_offset(Major::kDepth, step * kDepthStep, ValueTile::kPanelBytes)), step > 0);
    commit_products();
  }
  __device__ __forceinline__ uint64_t values(int piece) const {
    return moved(describe(shared_address(shared + layout.v(stage.index)), Major::kDepth, ValueTile::kPanelBytes),
                 outer_offset(Major::kDepth, static_cast<uint32_t>(kHalf * piece), ValueTile::kPanelBytes));
  }
  __device__ __forceinline__ uint64_t node(int slot, int part) const {
    return moved(describe(shared_address(shared + layout.node(slot)), Major::kDepth, NodeTile::kPanelBytes),
                 outer_offset(Major::kDepth, static_cast<uint32_t>(64 * part), NodeTile::kPanelBytes));
  }

  // Queries times the keys of half `piece`.
  __device__ __forceinline__ void issue_scores(Sums& sum, int piece) {
    const uint64_t k = moved(describe(shared_address(shared + layout.k_begin), Major::kDepth, RowTile::kPanelBytes),
                             outer_offset(Major::kDepth, static_cast<uint32_t>(kHalf * piece), RowTile::kPanelBytes));
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      multiply<kType, Major::kDepth>(
          sum, query[step], moved(k, depth_offset(Major::kDepth, step * kDepthStep, RowTile::kPanelBytes)), step > 0);
    commit_products();
  }

  // Adds weights times these keys to the gradient.
  __device__ __forceinline__ void issue_keys(const uint32_t (&weights)[4][4], int piece) {
    const uint64_t k = moved(describe(shared_address(shared + layout.k_begin), Major::kOuter, RowTile::kPanelBytes),
                             depth_offset(Major::kOuter, static_cast<uint32_t>(kHalf * piece), RowTile::kPanelBytes));
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply<kType, Major::kOuter>(gradient, weights[step],
                                     moved(k, depth_offset(Major::kOuter, step * kDepthStep, RowTile::kPanelBytes)), true);
    commit_products();
  }

  // ---- nodes -------------------------------------------------------------------------------------------------------------

  // 64 columns of dy times a node: adds them to the gradient, and their products with the queries.
  template <int kPart>
  __device__ __forceinline__ void add_node(const Sums& z, const float (&weight)[2], float (&dot)[2]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int h = i / 2 % 2, e = 32 * kPart + i;
      const uint32_t pair = query[e / 8][e % 8 / 2];
      gradient[e] = fmaf(weight[h], z[i], gradient[e]);
      dot[h] = fmaf(i % 2 == 0 ? low_of<kType>(pair) : high_of<kType>(pair), z[i], dot[h]);
    }
  }

  // Leaves what an entry gives to the gradient of λ.
  __device__ __forceinline__ void finish_node(int entry, const float (&dot)[2]) const {
    const float own = sum_own(dot);
    const BlockFactors& f = factors();
    if (lane % 4 >= 2) return;
    float base = f.start[first_row() + own_row()];
    if constexpr (!kLinear || kUnits) base *= f.newer[entry];
    staging()[own_row() * layout.staged + kInner + entry] = base * own;
  }

  // Products number kNumber of kEntries nodes, in x and y by turns, or, after these, with the block's first half.
  template <int kNumber, int kEntries>
  __device__ __forceinline__ void issue_number(Sums& sum) {
    if constexpr (kNumber >= kEntries * kParts) {
      if constexpr (kNumber % 2 == 1) wait(&barriers->k_full, once.phase);
    } else if constexpr (kNumber % kParts == 0) {
      wait(&barriers->node_full[arrived.index], arrived.phase);
    }
    if constexpr (kParts == 1) make_fresh(sum);
    fence_products(sum);
    if constexpr (kNumber >= kEntries * kParts) {
      if constexpr (kNumber % 2 == 0)
        issue_values(sum, values(0));
      else
        issue_scores(sum, 0);
    } else {
      issue_values(sum, node(arrived.index, kNumber % kParts));
      if constexpr (kNumber % kParts == kParts - 1) arrived.next(layout.ring);
    }
  }

  // Reads kEntries nodes from `entry` on. While products are added, the next ones run: it is written out, as no product may
  // be under way where the compiler sees a choice of registers. kLast: ends with the products with the first half's values
  // in x, and with its keys in y.
  template <int kEntries, bool kLast>
  __device__ __forceinline__ void read_nodes(Sums& x, Sums& y, int entry) {
    constexpr int kCount = kEntries * kParts;
    const BlockFactors& f = factors();
    const int r = first_row() + lane / 4;
    const float* lambda = f.lambda(kInner) + r;
    float weight[2], dot[2];
    issue_number<0, kEntries>(x);
    issue_number<1, kEntries>(y);
    const auto add = [&](auto number) {
      constexpr int kNumber = decltype(number)::value;
      if constexpr (kNumber < kCount) {
        Sums& sum = kNumber % 2 == 0 ? x : y;
        if constexpr (kNumber % kParts == 0) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            dot[h] = 0;
            weight[h] = f.start[r + 8 * h];
            if constexpr (!kLinear)
              weight[h] *= f.newer[entry + kNumber / kParts] * lambda[(entry + kNumber / kParts) * kBlock + 8 * h];
            if constexpr (kUnits) weight[h] *= power_of_two(-unit);
          }
        }
        wait_products<kLast || kNumber + 1 < kCount ? 1 : 0>(sum);
        add_node<kNumber % kParts>(sum, weight, dot);
        if constexpr (kLast || kNumber + 2 < kCount) issue_number<kNumber + 2, kEntries>(sum);
        if constexpr (kNumber % kParts == kParts - 1) {
          release(&barriers->node_free[ring.index]);
          ring.next(layout.ring);
          finish_node(entry + kNumber / kParts, dot);
        }
      }
    };
    add(Number<0>{});
    add(Number<1>{});
    add(Number<2>{});
    add(Number<3>{});
    if constexpr (kLast) wait_products<0>(x, y);
  }

  // ---- linear ------------------------------------------------------------------------------------------------------------
  // Rows of the second half read all sources, so that they are twice the work: the first warpgroup makes their weights for
  // the first half's sources.

  __device__ __forceinline__ ScoresKept own_scores() const {
    float4* own = reinterpret_cast<float4*>(shared + layout.scores_begin + static_cast<uint32_t>(half) * kOwnScoreBytes);
    return {own + warp * (warp + 1) * 32 + lane, 32};
  }
  __device__ __forceinline__ ScoresKept scores_across() const {
    return {reinterpret_cast<float4*>(shared + layout.scores_begin + 2 * kOwnScoreBytes) + 32 * warp + lane, 128};
  }
  // a: from its second half on; b: its first half.
  template <class Tile, int kDepth>
  __device__ __forceinline__ void issue_across(Sums& sum, uint32_t a_begin, uint32_t b_begin) {
    const uint64_t a = moved(describe(shared_address(shared + a_begin), Major::kDepth, Tile::kPanelBytes),
                             outer_offset(Major::kDepth, kHalf, Tile::kPanelBytes));
    const uint64_t b = describe(shared_address(shared + b_begin), Major::kDepth, Tile::kPanelBytes);
    fence_products(sum);
#pragma unroll
    for (int depth = 0; depth < kDepth; depth += kDepthStep)
      multiply<kType, Major::kDepth, Major::kDepth>(sum, moved(a, depth_offset(Major::kDepth, depth, Tile::kPanelBytes)),
                                                    moved(b, depth_offset(Major::kDepth, depth, Tile::kPanelBytes)),
                                                    depth > 0);
    commit_products();
  }
  // Once for all heads of a part.
  __device__ __forceinline__ void make_scores(Sums& sum) {
    const auto put = [&](const ScoresKept& to, int count) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (n < count) to.eight(n) = ScoreSums{sum}.eight(n);
      }
    };
    fence_products(sum);
    issue_scores(sum, half);
    wait_products<0>(sum);
    put(own_scores(), 2 * warp + 2);
    if (half == 1) return;
    issue_across<RowTile, kKeyDim>(sum, 0, layout.k_begin);
    wait_products<0>(sum);
    put(scores_across(), 8);
  }

  __device__ __forceinline__ void read_state(Sums& x, Sums& y) {
    const BlockFactors& f = factors();
    const int r = first_row() + lane / 4;
    float weight[2] = {f.start[r], f.start[r + 8]};
    if constexpr (kUnits) {
#pragma unroll
      for (float& x : weight) x = x * f.newer[0] * power_of_two(-unit);
    }
    float dot[2] = {0, 0};
    wait(&barriers->node_full[arrived.index], arrived.phase);
    fence_products(x, y);
    issue_values(x, node(arrived.index, 0));
    if constexpr (kParts == 2) issue_values(y, node(arrived.index, 1));
    arrived.next(layout.ring);
    wait_products<kParts - 1>(x);
    add_node<0>(x, weight, dot);
    if constexpr (kParts == 2) {
      wait_products<0>(y);
      add_node<1>(y, weight, dot);
    }
    release(&barriers->node_free[ring.index]);
    ring.next(layout.ring);
    finish_node(0, dot);
  }

  // For the other warpgroup's rows: their weights, and what they read.
  __device__ __forceinline__ void weigh_across(const Sums& products) {
    const int first = kHalf + 16 * warp;
    uint32_t weights[4][4];
    float reads[2];
    masks().mask_first(products, scores_across(), factors(), first, weights, reads);
    const float own = sum_own(reads);
    if (lane % 4 < 2)
      reinterpret_cast<float*>(shared + layout.staging(stage.index))[(first + own_row()) * layout.staged + kInnerLevels] =
          own;
    wait(&barriers->across_free, across.phase ^ 1);
    const Place at = block_row(lane);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      store_matrices<false>(shared_address(shared + layout.weights_begin) +
                                AcrossTile::offset(16 * warp + at.row, kDepthStep * step + at.column),
                            weights[step]);
    fence_shared_writes();
    release(&barriers->across_full);
  }
  __device__ __forceinline__ void issue_keys_across() {
    const uint64_t a = describe(shared_address(shared + layout.weights_begin), Major::kDepth, AcrossTile::kPanelBytes);
    const uint64_t k = describe(shared_address(shared + layout.k_begin), Major::kOuter, RowTile::kPanelBytes);
    fence_products(gradient);
#pragma unroll
    for (int depth = 0; depth < kHalf; depth += kDepthStep)
      multiply<kType, Major::kDepth, Major::kOuter>(
          gradient, moved(a, depth_offset(Major::kDepth, depth, AcrossTile::kPanelBytes)),
          moved(k, depth_offset(Major::kOuter, depth, RowTile::kPanelBytes)), true);
    commit_products();
  }

  __device__ __forceinline__ void run_linear_head(const RowTask& task, bool first) {
    wait(&barriers->head_full[stage.index], stage.phase);
    clear_dead(task.block, layout.v(stage.index), layout.dy(stage.index), 1);
    load_rows<ValueTile>(dy, layout.dy(stage.index));
    wait(&barriers->staged_free[stage.index], stage.phase ^ 1);
    Sums x, y;
    make_fresh(x);
    make_fresh(y);
    read_state(x, y);
    if (first) {
      wait(&barriers->k_full, once.phase);
      make_scores(x);
    }
    // By both, of which one does not need it: no product may be under way where the compiler sees a choice.
    issue_across<ValueTile, kColumns>(y, layout.dy(stage.index), layout.v(stage.index));
    fence_products(x);
    issue_values(x, values(half));
    wait_products<1>(y);
    if (half == 0) weigh_across(y);
    wait_products<0>(x);
    release(&barriers->tiles_free[stage.index]);
    Reads reads;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int l = 0; l < kInner; ++l) reads.level[h][l] = 0;
    uint32_t weights[4][4];
    masks().mask_own(x, own_scores(), factors(), weights, &reads);
    fence_products(gradient);
    issue_keys(weights, half);
    if (half == 1) {
      wait(&barriers->across_full, across.phase);
      issue_keys_across();
    }
    stage_levels(reads);
    wait_products<0>(gradient);
#pragma unroll
    for (int n = 0; n < 4; ++n) pin(weights[n]);
    if (half == 1) release(&barriers->across_free);
    across.next(1);
    release(&barriers->staged_full[stage.index]);
    release(&barriers->factors_free[stage.index]);
    stage.next(kHeadStages);
  }

  // ---- results -----------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void stage_levels(const Reads& reads) const {
    float sums[2][2];
    masks().sum_lanes(reads, sums);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* to = staging() + (lane / 4 + 8 * h) * layout.staged + 2 * (lane % 4);
      to[0] = sums[h][0];
      if (!kLinear || half == 0 || lane % 4 < 3) to[1] = sums[h][1];  // linear: the other warpgroup has made the last one
    }
  }

  __device__ __forceinline__ void store_rows(const RowTask& task) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row() + lane / 4 + 8 * h;
      if (row < task.block.lo || row >= task.block.hi) continue;
      uint32_t* to =
          static_cast<uint32_t*>(in.dq.at(task.block.index, task.block.row + row, in.group_of(task.first))) + lane % 4;
#pragma unroll
      for (int n = 0; n < kKeyDim / 8; ++n) {
        if (8 * n >= static_cast<int>(in.shape.key_dim)) continue;
        const uint32_t old = in.dq.accumulate ? to[4 * n] : 0;
        to[4 * n] =
            pack<kType>(low_of<kType>(old) + gradient[4 * n + 2 * h], high_of<kType>(old) + gradient[4 * n + 2 * h + 1]);
      }
    }
  }

  __device__ __forceinline__ void store_gradient(const RowTask& task) const {
    if (!in.dq.present()) return;
    if (in.parts_of_group == 1 || in.chained_rows) return store_rows(task);
    store_sums<kKeyDim>(part_sums<kKeyDim>(in, in.dq_parts, task.block, task.part) + first_row() * kKeyDim, gradient,
                        in.adds);
  }

  // ---- the loops ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void run_head(const RowTask& task) {
    wait(&barriers->head_full[stage.index], stage.phase);
    clear_dead(task.block, layout.v(stage.index), layout.dy(stage.index), 1);
    load_rows<ValueTile>(dy, layout.dy(stage.index));
    wait(&barriers->staged_free[stage.index], stage.phase ^ 1);
    Sums x, y;
    make_fresh(x);
    make_fresh(y);
    const int count = __popcll(task.reads);
    int entry = 0;
#pragma unroll 1
    for (; entry + 1 < count; ++entry) read_nodes<1, false>(x, y, entry);
    if (entry + 1 == count)
      read_nodes<1, true>(x, y, entry);
    else
      read_nodes<0, true>(x, y, entry);
    const BlockFactors& f = factors();
    Reads reads;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int l = 0; l < kInner; ++l) reads.level[h][l] = 0;
    uint32_t weights[4][4];
    const Mask mask = masks();
    if (half == 1) {
      float first[2];
      mask.mask_first(x, ScoreSums{y}, f, first_row(), weights, first);
      reads.level[0][kInnerLevels] = first[0];
      reads.level[1][kInnerLevels] = first[1];
      fence_products(gradient);
      issue_keys(weights, 0);
      fence_products(x, y);
      issue_values(x, values(1));
      issue_scores(y, 1);
      wait_products<0>(gradient, x, y);
#pragma unroll
      for (int n = 0; n < 4; ++n) pin(weights[n]);
    }
    release(&barriers->tiles_free[stage.index]);
    mask.mask_own(x, ScoreSums{y}, f, weights, &reads);
    fence_products(gradient);
    issue_keys(weights, half);
    stage_levels(reads);
    wait_products<0>(gradient);
#pragma unroll
    for (int n = 0; n < 4; ++n) pin(weights[n]);
    release(&barriers->staged_full[stage.index]);
    release(&barriers->factors_free[stage.index]);
    stage.next(kHeadStages);
  }

  __device__ __forceinline__ void run(int tasks) {
    each_task<kLinear>(in, tasks, [&](const RowTask& task) {
      wait(&barriers->q_full, once.phase);
      if (is_partial(task.block)) wait(&barriers->k_full, once.phase);
      clear_dead(task.block, 0, layout.k_begin, RowTile::kPanels);
      load_rows<RowTile>(query, 0);
#pragma unroll
      for (int e = 0; e < kKeyDim / 2; ++e) gradient[e] = 0;
#pragma unroll 1
      for (int i = task.first; i < task.end; ++i) {
        if (kUnits && (i - task.first) % in.bundle == 0) unit = unit_of_heads(in, task.block.place, i, task.end, lane);
        if constexpr (kLinear)
          run_linear_head(task, i == task.first);
        else
          run_head(task);
        if (i == task.first) release(&barriers->q_free);  // products with the queries are through
        const int done = i + 1 - task.first;
        if (in.chained_rows && in.dq.present() && (done % in.bundle == 0 || i + 1 == task.end)) {
          constexpr int kThreads = 32 * kRowWarps;
          leave_unit<kType>(gradient, unit);
          float* sums = in.dq_chain + static_cast<int64_t>(blockIdx.x) * (kBlock * kKeyDim);
          chain_sums<kThreads>(reinterpret_cast<float4*>(sums) + threadIdx.x - (kRowThreads - kThreads), gradient,
                               done > in.bundle, i + 1 < task.end);
        }
      }
      release(&barriers->k_free);
      once.next(1);
      if (!in.chained_rows) leave_unit<kType>(gradient, unit);
      store_gradient(task);
    });
  }
};

template <Half kType, int kKeyDim, bool kLinear>
__global__ void __launch_bounds__(kRowThreads, 1)
    row_gradients(const __grid_constant__ BackwardParameters in, const __grid_constant__ RowLayout layout, int tasks) {
  char* shared = shared_memory();
  RowBarriers* barriers = reinterpret_cast<RowBarriers*>(shared + layout.barriers_begin);
  if (threadIdx.x == 0) {
    init_barrier(&barriers->q_full, 1);
    init_barrier(&barriers->k_full, 1);
    init_barrier(&barriers->q_free, kRowWarps);
    init_barrier(&barriers->k_free, kRowWarps);
    for (int i = 0; i < kHeadStages; ++i) {
      init_barrier(&barriers->head_full[i], 1);
      init_barrier(&barriers->tiles_free[i], kRowWarps);
      init_barrier(&barriers->factors_free[i], kRowWarps + kFinishers);
      init_barrier(&barriers->staged_full[i], kRowWarps);
      init_barrier(&barriers->staged_free[i], kFinishers);
    }
    init_barrier(&barriers->across_full, kRowWarps / 2);
    init_barrier(&barriers->across_free, kRowWarps / 2);
    for (int i = 0; i < kMostNodes; ++i) {
      init_barrier(&barriers->node_full[i], 1);
      init_barrier(&barriers->node_free[i], kRowWarps);
    }
    publish_barriers();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4) {
    keep_registers<kGroupRegisters[0]>();
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) copy_rows<kKeyDim, kLinear>(in, layout, shared, barriers, tasks);
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) copy_nodes<kKeyDim, kLinear>(in, layout, shared, barriers, tasks);
    } else {
      Finisher<kLinear>{in, layout, shared, barriers, warp - kFinishers, static_cast<int>(threadIdx.x) % 32}.run(tasks);
    }
  } else {
    take_registers<kGroupRegisters[1]>();
    RowGradients<kType, kKeyDim, kLinear>(in, layout, shared, barriers).run(tasks);
  }
}

template <Half kType, int kKeyDim>
int32_t launch_rows(const BackwardParameters& in, void* stream) {
  RowLayout layout;
  int nodes = kMostNodes;
  while (nodes > 0 && !layout.place(kKeyDim, in.entries, in.factor_bytes, in.linear, nodes)) --nodes;
  if (nodes == 0) return LLA_INTERNAL;
  const int64_t tasks = in.batch.count * in.blocks * in.tasks_of_block(in.chained_rows), most = multiprocessors();
  if (tasks >= int64_t{1} << 30) return LLA_INTERNAL;
  return launch(in.linear ? row_gradients<kType, kKeyDim, true> : row_gradients<kType, kKeyDim, false>,
                tasks < most ? tasks : most, kRowThreads, layout.bytes, stream, in, layout, static_cast<int>(tasks));
}

}  // namespace

template <Half kType>
int32_t launch_row_gradients(const BackwardParameters& in, int key_dim, void* stream) {
  return key_dim == 64 ? launch_rows<kType, 64>(in, stream) : launch_rows<kType, 128>(in, stream);
}

template <Half kType>
int32_t load_row_gradients() {
  int32_t status = load_kernel(row_gradients<kType, 64, false>);
  if (status == LLA_OK) status = load_kernel(row_gradients<kType, 64, true>);
  if (status == LLA_OK) status = load_kernel(row_gradients<kType, 128, false>);
  return status == LLA_OK ? load_kernel(row_gradients<kType, 128, true>) : status;
}

}  // namespace lla::cuda::hopper
