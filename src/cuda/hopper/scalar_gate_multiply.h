// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: the two warpgroups that make outputs, each for 64 of a block's rows. They take turns with
// its halves, since the second one, with keys of both, has more work.
#pragma once

#include "cuda/hopper/fragment.h"
#include "cuda/hopper/scalar_gate_fragments.h"
#include "cuda/hopper/scalar_gate_rows.h"
#include "cuda/hopper/scalar_gate_sweep.h"
#include "cuda/hopper/wgmma.h"

namespace lla::cuda::hopper {

template <Half kType, int kKeyDim, bool kLinear>
struct RowSweep {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;     // q, k: [row][dk]
  using ValueTile = SwizzledTile<kBlock, kColumns>;  // v: [row][dv]
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;  // [dk][dv]
  static constexpr int kSteps = kKeyDim / kDepthStep;

  const SweepParameters& in;
  char* shared;
  Barriers* barriers;
  const int group, warp;  // warpgroup; warp of it
  int lane;
  int half = 0;  // of the block
  Turn stage, table, ring, node, block_turn;
  bool waits = false;    // for the node of the block before
  char* stored[2] = {};  // where the block before was stored
  uint32_t query[kSteps][4];

  __device__ __forceinline__ RowSweep(const SweepParameters& parameters, char* memory, Barriers* all)
      : in(parameters),
        shared(memory),
        barriers(all),
        group(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32 % 4, 0)),
        lane(own_lane()) {}

  __device__ __forceinline__ int slot_of(int level) const { return level < in.layout.slots ? level : in.layout.slots - 1; }

  __device__ __forceinline__ void load_queries() {
    const uint32_t q = shared_address(shared + in.layout.q(stage.index));
    const Place at = block_row(lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_matrices<false>(query[step],
                           q + RowTile::offset(kHalf * half + 16 * warp + at.row, kDepthStep * step + at.column));
      pin(query[step]);
    }
  }

  // Scores of the half's rows with the keys of half `keys`.
  __device__ __forceinline__ void issue_scores(Sums& sum, int keys) {
    const uint64_t k =
        moved(describe(shared_address(shared + in.layout.k(stage.index)), Major::kDepth, RowTile::kPanelBytes),
              outer_offset(Major::kDepth, static_cast<uint32_t>(kHalf * keys), RowTile::kPanelBytes));
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      multiply<kType, Major::kDepth>(
          sum, query[step], moved(k, depth_offset(Major::kDepth, step * kDepthStep, RowTile::kPanelBytes)), step > 0);
    commit_products();
  }

  // Scores times the mask, rounded, of the half with itself, 16 columns at a time. Left of the warp's own all are at one
  // level.
  __device__ __forceinline__ void mask_own(const Sums& sum, const Tables& tables, uint32_t (&weights)[4][4]) const {
    const float* level = &tables.level[0][kHalf * half];  // and the diagonal behind the last level
    const float *rows = level + 16 * warp + lane / 4, *columns = level + 2 * (lane % 4);
    float of_own[2][2], of_near[2], of_far[2];  // rows lane / 4 and eight on
    own_factors(level + 16 * warp, of_own);
    const float of_next = rows[3 * kBlock + 8];  // of the warp's second eight with its first
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      of_near[h] = rows[4 * kBlock + 8 * h];
      of_far[h] = rows[5 * kBlock + 8 * h];
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      if (m > warp) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[m][i] = 0;
      } else if (m < warp) {
        const bool far = (m ^ warp) >= 2;
        const float a[2] = {far ? of_far[0] : of_near[0], far ? of_far[1] : of_near[1]};
        const float* at = columns + (far ? 5 : 4) * kBlock + 16 * m;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float2 b = *reinterpret_cast<const float2*>(at + 8 * side);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int i = 8 * m + 4 * side + 2 * h;
            weights[m][2 * side + h] = pack<kType>(a[h] * b.x * sum[i], a[h] * b.y * sum[i + 1]);
          }
        }
      } else {
        const float2 b = *reinterpret_cast<const float2*>(columns + 3 * kBlock + 16 * m);
        weights[m][0] = pack<kType>(of_own[0][0] * sum[8 * m], of_own[0][1] * sum[8 * m + 1]);
        weights[m][1] = pack<kType>(of_next * b.x * sum[8 * m + 2], of_next * b.y * sum[8 * m + 3]);
        weights[m][2] = 0;
        weights[m][3] = pack<kType>(of_own[1][0] * sum[8 * m + 6], of_own[1][1] * sum[8 * m + 7]);
      }
    }
  }
  // The mask in the eights of the own rows: [h][odd] of row lane / 4 + 8 h, column 2 (lane % 4) + odd. All loads at once.
  __device__ __forceinline__ void own_factors(const float* level, float (&to)[2][2]) const {
    float of_row[2][2], of_key[2][2];
    const int row = lane / 4;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int key = 2 * (lane % 4) + odd, differ = row ^ key;
      const int at = (differ == 0 ? kInnerLevels : differ >= 4 ? 2 : differ >= 2 ? 1 : 0) * kBlock;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        of_row[h][odd] = level[at + row + 8 * h];
        of_key[h][odd] = level[at + key + 8 * h];
      }
    }
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int key = 2 * (lane % 4) + odd;
#pragma unroll
      for (int h = 0; h < 2; ++h) to[h][odd] = key > row ? 0.0f : of_row[h][odd] * (key == row ? 1.0f : of_key[h][odd]);
    }
  }

  // The same of the second half with the first: all at level 7.
  __device__ __forceinline__ void mask_first(const Sums& sum, const Tables& tables, uint32_t (&weights)[4][4]) const {
    const float* level = tables.level[kInnerLevels - 1];
    const int r = kHalf + 16 * warp + lane / 4;
    const float a[2] = {level[r], level[r + 8]};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 b = *reinterpret_cast<const float2*>(level + 8 * n + 2 * (lane % 4));
#pragma unroll
      for (int h = 0; h < 2; ++h)
        weights[n / 2][2 * (n % 2) + h] = pack<kType>(sum[4 * n + 2 * h] * a[h] * b.x, sum[4 * n + 2 * h + 1] * a[h] * b.y);
    }
  }

  __device__ __forceinline__ void issue_values(Sums& out, const uint32_t (&weights)[4][4], int keys, bool adds) {
    const uint64_t v =
        moved(describe(shared_address(shared + in.layout.v(stage.index)), Major::kOuter, ValueTile::kPanelBytes),
              depth_offset(Major::kOuter, static_cast<uint32_t>(kHalf * keys), ValueTile::kPanelBytes));
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply<kType, Major::kOuter>(out, weights[step],
                                     moved(v, depth_offset(Major::kOuter, step * kDepthStep, ValueTile::kPanelBytes)),
                                     adds || step > 0);
    commit_products();
  }

  __device__ __forceinline__ void issue_read(Sums& sum, uint64_t node) {
    make_fresh(sum);
    fence_products(sum);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      multiply<kType, Major::kOuter>(
          sum, query[step], moved(node, depth_offset(Major::kOuter, step * kDepthStep, NodeTile::kPanelBytes)), step > 0);
    commit_products();
  }

  // What a row multiplies the product with a node by, apart from `start`.
  struct ReadFactors {
    float newer, lambda[2];
  };

  // Adds weight * (query times node) for all nodes that the rows read: first those of the segment, `local` by level, then
  // those of older segments and of the history, which come by the ring. While a product is on its way, the next one's place
  // and factors are found, without branches.
  __device__ __forceinline__ void read_nodes(Sums& out, uint32_t local, int uppers, int block, const Tables& tables) {
    const int locals = __popcll(local), count = locals + uppers;
    if (count == 0) return;
    const int r = kHalf * half + 16 * warp + lane / 4;
    const float start[2] = {tables.start[r], tables.start[r + 8]};
    const float* lambda = reinterpret_cast<const float*>(&tables + 1) + r;
    Turn coming = ring;
    const auto find_tile = [&] {
      const uint32_t own = in.layout.slot(kLinear ? (block - 1) & 1 : slot_of(__ffsll(local) - 1));
      const uint32_t tile = kLinear || local ? own : in.layout.ring_slot(coming.index);
      local &= local - 1;
      return describe(shared_address(shared + tile), Major::kOuter, NodeTile::kPanelBytes);
    };
    const auto load_factors = [&](int entry) {
      ReadFactors factors{1.0f, {1.0f, 1.0f}};
      if constexpr (!kLinear) factors = {tables.newer[entry], {lambda[entry * kBlock], lambda[entry * kBlock + 8]}};
      return factors;
    };
    uint64_t node = find_tile();
    ReadFactors factors = load_factors(0);
#pragma unroll 1
    for (int entry = 0; entry < count; ++entry) {
      if (entry >= locals) {
        wait(&barriers->ring_full[coming.index], coming.phase);
        coming.next(in.layout.ring);
      }
      Sums sum;
      issue_read(sum, node);
      const float a = start[0] * (factors.newer * factors.lambda[0]), b = start[1] * (factors.newer * factors.lambda[1]);
      if constexpr (!kLinear) {
        node = find_tile();
        factors = load_factors(entry + 1 < count ? entry + 1 : entry);
      }
      wait_products<0>(sum);
#pragma unroll
      for (int i = 0; i < 32; ++i) out[i] = fmaf(i / 2 % 2 == 0 ? a : b, sum[i], out[i]);
      if (entry >= locals) {
        release(&barriers->ring_free[ring.index], lane);
        ring.next(in.layout.ring);
      }
    }
  }

  // Rows of y, by way of the warp's own kibibyte: 32 columns at a time. If y accumulates, straight, so that the sum is
  // rounded once.
  __device__ __forceinline__ void store_rows(const Task& task, char* y, const LiveRows& rows, const Sums& out) {
    const int first = kHalf * half + 16 * warp;
    if (rows.lo >= first + 16 || rows.hi <= first) return;
    if (in.y.accumulate) {
      const int columns = static_cast<int>(in.shape.value_dim) - kColumns * task.tile;
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        const Place at = wgmma_sum(lane, i);
        const int row = first + at.row;
        if (row < rows.lo || row >= rows.hi || at.column >= columns) continue;
        uint32_t& pair =
            *reinterpret_cast<uint32_t*>(y + static_cast<int64_t>(rows.row + row) * (2 * in.y.row_stride) + 2 * at.column);
        pair = pack<kType>(low_of<kType>(pair) + out[i], high_of<kType>(pair) + out[i + 1]);
      }
      return;
    }
    char* staging = shared + in.layout.staging(group * 4 + warp);
    const uint32_t address = shared_address(staging);
    const auto place = [](int row, int chunk) { return static_cast<uint32_t>(row * 64 + ((chunk ^ (row >> 1 & 3)) * 16)); };
    const Place at = block_row(lane);
    const int row = lane / 4, chunk = lane % 4;
    const char* from = staging + place(row, chunk);
    const int columns = static_cast<int>(in.shape.value_dim) - kColumns * task.tile - 8 * chunk;
    bool store[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int number = first + row + 8 * i;
      store[i] = number >= rows.lo && number < rows.hi;
      stored[i] = y + static_cast<int64_t>(rows.row + number) * (2 * in.y.row_stride) + 16 * chunk;
    }
    // Everything on its way before anything is stored: [side][row or eight on], which is the same place of the pattern.
    uint4 parts[2][2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int e = 16 * side + 8 * part + 2 * i;
          pairs[i] = pack<kType>(out[e], out[e + 1]);
        }
        store_matrices<false>(address + place(at.row, 2 * part + at.column / 8), pairs);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) parts[side][i] = *reinterpret_cast<const uint4*>(from + 512 * i);
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (store[i] && 32 * side < columns) *reinterpret_cast<uint4*>(stored[i] + 64 * side) = parts[side][i];
      }
    }
  }

  __device__ __forceinline__ void wait_node() {
    wait(&barriers->node_done[node.index], node.phase);
    node.next(kNodeTurns);
  }

  // `reads`: bits of the nodes in slots; linear: whether there is a state.
  __device__ __forceinline__ void run_block(const Task& task, char* y, int block, uint32_t reads, int uppers) {
    half = (group + block) & 1;
    if constexpr (kLinear) renew(lane);
    const LiveRows rows(task, block);
    const Tables& tables = *reinterpret_cast<const Tables*>(shared + in.layout.tables(table.index));
    wait(&barriers->q_full[stage.index], stage.phase);
    load_queries();
    wait(&barriers->k_full[stage.index], stage.phase);
    still_needed(stored[0]);
    still_needed(stored[1]);
    if (rows.lo > 0 || rows.hi < kBlock) {
      wait(&barriers->v_full[stage.index], stage.phase);
      complete_rows<kType, kKeyDim>(in, shared, stage.index, task, block, rows, static_cast<int>(threadIdx.x) - 128,
                                    kSweepThreads - 128);
    }
    Sums scores, out;
    uint32_t factors[4][4];
    make_fresh(scores);
    fence_products(scores);
    issue_scores(scores, half);
    wait(&barriers->tables_full[table.index], table.phase);
    wait_products<0>(scores);
    release(&barriers->q_free[stage.index], lane);
    mask_own(scores, tables, factors);
    wait(&barriers->v_full[stage.index], stage.phase);
    make_fresh(out);
    fence_products(out);
    issue_values(out, factors, half, false);
    wait_products<0>(out);
#pragma unroll
    for (int i = 0; i < 4; ++i) pin(factors[i]);
    if (half == 1) {
      make_fresh(scores);
      fence_products(scores);
      issue_scores(scores, 0);
      wait_products<0>(scores);
      mask_first(scores, tables, factors);
      fence_products(out);
      issue_values(out, factors, 0, true);
      wait_products<0>(out);
#pragma unroll
      for (int i = 0; i < 4; ++i) pin(factors[i]);
    }
    release(&barriers->k_free[stage.index], lane);
    release(&barriers->v_free[stage.index], lane);
    stage.next(in.layout.stages);
    if (waits) wait_node();
    waits = true;
    read_nodes(out, reads, uppers, block, tables);
    if constexpr (kType == Half::kF16) {
      const Units& units = *reinterpret_cast<const Units*>(shared + in.layout.units_of(table.index));
      const int r = kHalf * half + 16 * warp + lane / 4;
      const float a = units.row[r], b = units.row[r + 8];
#pragma unroll
      for (int i = 0; i < 32; ++i) out[i] *= i / 2 % 2 == 0 ? a : b;
    }
    release(&barriers->reads_done[block_turn.index], lane);
    block_turn.next(2);
    release(&barriers->tables_free[table.index], lane);
    table.next(2);
    store_rows(task, y, rows, out);
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int64_t number = blockIdx.x; number < in.tasks; number += gridDim.x) {
      const Task task = find_task(in, number);
      if (task.first >= task.end) continue;
      char* y = static_cast<char*>(in.y.at(task.index, 0, task.head)) + 2 * kColumns * task.tile;
      const int uppers = kLinear ? 0 : __popcll(task.upper()) + task.old_count();
      uint32_t present = kLinear && (task.segment > task.oldest_segment || task.oldest) ? 1 : 0;
      if (present) {  // the state that older segments, or the history, leave counts as one more node
        if (waits) wait_node();
        waits = true;
      }
#pragma unroll 1
      for (int block = task.first; block < task.end; ++block) {
        run_block(task, y, block, kLinear ? present : present & static_cast<uint32_t>(block), uppers);
        const int level = kLinear ? 0 : trailing_ones_of_block(block);
        present = (present >> level << level) | uint32_t{1} << level;
      }
    }
  }
};

}  // namespace lla::cuda::hopper
