// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: the two warpgroups that make outputs, each for 64 of a block's rows.
#pragma once

#include "cuda/hopper/fragment.h"
#include "cuda/hopper/scalar_gate_fragments.h"
#include "cuda/hopper/scalar_gate_sweep.h"
#include "cuda/hopper/wgmma.h"

namespace lla::cuda::hopper {

// Rows of k and v that are not the call's hold anything at all: zeroes them. By all multiplying warpgroups together.
template <int kKeyDim>
__device__ __forceinline__ void clear_dead_rows(const SharedLayout& layout, char* shared, int stage, const LiveRows& rows,
                                                int thread, int threads) {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;
  char *k = shared + layout.k(stage), *v = shared + layout.v(stage);
  constexpr int kChunks = 8 * (RowTile::kPanels + 1);
#pragma unroll 1
  for (int i = thread; i < kBlock * kChunks; i += threads) {
    const int r = i / kChunks, c = i % kChunks;
    if (r >= rows.lo && r < rows.hi) continue;
    char* row = (c < 8 ? v : k + (c / 8 - 1) * RowTile::kPanelBytes) + r * kSwizzleRow + c % 8 * kSwizzleChunk;
    *reinterpret_cast<uint4*>(row) = uint4{0, 0, 0, 0};
  }
  fence_shared_writes();
  sync_some(1, threads);
}

template <int kKeyDim, bool kLinear>
struct RowSweep {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;     // q, k: [row][dk]
  using ValueTile = SwizzledTile<kBlock, kColumns>;  // v: [row][dv]
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;  // [dk][dv]
  static constexpr int kSteps = kKeyDim / kDepthStep;

  const SweepParameters& in;
  char* shared;
  Barriers* barriers;
  const int half, warp, lane;  // half: the warpgroup; warp: of the warpgroup
  Turn stage, table, ring, node, block_turn;
  bool waits = false;  // for the node of the block before
  uint32_t query[kSteps][4];

  __device__ __forceinline__ RowSweep(const SweepParameters& parameters, char* memory, Barriers* all)
      : in(parameters),
        shared(memory),
        barriers(all),
        half(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32 % 4, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {}

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
      multiply<Half::kBf16, Major::kDepth>(
          sum, query[step], moved(k, depth_offset(Major::kDepth, step * kDepthStep, RowTile::kPanelBytes)), step > 0);
    commit_products();
  }

  // Scores times the mask, rounded, of the half with itself. Eights of columns left of the row's own are at one level.
  __device__ __forceinline__ void mask_own(const Sums& sum, const Tables& tables, uint32_t (&weights)[4][4]) const {
    const float* level = &tables.level[0][kHalf * half];  // and the diagonal behind the last level
    const float *rows = level + 16 * warp + lane / 4, *columns = level + 2 * (lane % 4);
    float of_row[2][3], of_own[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int l = 0; l < 3; ++l) of_row[h][l] = rows[(3 + l) * kBlock + 8 * h];
      of_own[h][0] = own_factor(level + 16 * warp + 8 * h, 0);
      of_own[h][1] = own_factor(level + 16 * warp + 8 * h, 1);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int eight = 2 * warp + h, differ = eight ^ n;
        const int l = differ >= 4 ? 2 : differ >= 2 ? 1 : 0;
        const float a = n > eight ? 0.0f : differ >= 4 ? of_row[h][2] : differ >= 2 ? of_row[h][1] : of_row[h][0];
        const float2 b = *reinterpret_cast<const float2*>(columns + (3 + l) * kBlock + 8 * n);
        float x = a * b.x, y = a * b.y;
        if (n % 2 == h) {
          x = n == eight ? of_own[h][0] : x;
          y = n == eight ? of_own[h][1] : y;
        }
        weights[n / 2][2 * (n % 2) + h] = pack<Half::kBf16>(x * sum[4 * n + 2 * h], y * sum[4 * n + 2 * h + 1]);
      }
    }
  }
  // The mask in an eight of its own row's: row lane / 4, column 2 (lane % 4) + odd.
  __device__ __forceinline__ float own_factor(const float* level, int odd) const {
    const int row = lane / 4, key = 2 * (lane % 4) + odd, differ = row ^ key;
    const int at = (differ == 0 ? kInnerLevels : differ >= 4 ? 2 : differ >= 2 ? 1 : 0) * kBlock;
    return key > row ? 0.0f : level[at + row] * (differ == 0 ? 1.0f : level[at + key]);
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
        weights[n / 2][2 * (n % 2) + h] =
            pack<Half::kBf16>(sum[4 * n + 2 * h] * a[h] * b.x, sum[4 * n + 2 * h + 1] * a[h] * b.y);
    }
  }

  __device__ __forceinline__ void issue_values(Sums& out, const uint32_t (&weights)[4][4], int keys, bool adds) {
    const uint64_t v =
        moved(describe(shared_address(shared + in.layout.v(stage.index)), Major::kOuter, ValueTile::kPanelBytes),
              depth_offset(Major::kOuter, static_cast<uint32_t>(kHalf * keys), ValueTile::kPanelBytes));
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply<Half::kBf16, Major::kOuter>(out, weights[step],
                                           moved(v, depth_offset(Major::kOuter, step * kDepthStep, ValueTile::kPanelBytes)),
                                           adds || step > 0);
    commit_products();
  }

  // The nodes that a block's rows read: first those of the segment, then those of older segments, which come by the ring.
  struct Reads {
    uint32_t left;  // levels of the segment's own
    int locals, count;
    int linear_slot;
    Turn released;  // place in the ring of the next node to give back
  };

  __device__ __forceinline__ void issue_read(Sums& sum, Reads* reads) {
    uint32_t tile;
    if (kLinear || reads->left) {
      tile = in.layout.slot(kLinear ? reads->linear_slot : slot_of(__ffsll(reads->left) - 1));
      reads->left &= reads->left - 1;
    } else {
      wait(&barriers->ring_full[ring.index], ring.phase);
      tile = in.layout.ring_slot(ring.index);
      ring.next(kRing);
    }
    const uint64_t node = describe(shared_address(shared + tile), Major::kOuter, NodeTile::kPanelBytes);
    make_fresh(sum);
    fence_products(sum);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      multiply<Half::kBf16, Major::kOuter>(
          sum, query[step], moved(node, depth_offset(Major::kOuter, step * kDepthStep, NodeTile::kPanelBytes)), step > 0);
    commit_products();
  }

  __device__ __forceinline__ void add_read(Sums& out, const Sums& sum, int entry, const Tables& tables, Reads* reads) const {
    const int r = kHalf * half + 16 * warp + lane / 4;
    float a = tables.start[r], b = tables.start[r + 8];
    if constexpr (!kLinear) {
      const float newer = tables.newer[entry];
      const float* lambda = reinterpret_cast<const float*>(&tables + 1) + entry * kBlock + r;
      a *= newer * lambda[0];
      b *= newer * lambda[8];
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) out[i] = fmaf(i / 2 % 2 == 0 ? a : b, sum[i], out[i]);
    if (entry >= reads->locals) {
      release(&barriers->ring_free[reads->released.index]);
      reads->released.next(kRing);
    }
  }

  // Adds weight * (query times node) for all nodes that the rows read.
  __device__ __forceinline__ void read_nodes(Sums& out, uint32_t local, int uppers, int block, const Tables& tables) {
    Reads reads;
    reads.left = local;
    reads.locals = __popcll(local);
    reads.count = reads.locals + uppers;
    reads.linear_slot = (block - 1) & 1;
    reads.released = ring;
#pragma unroll 1
    for (int entry = 0; entry < reads.count; ++entry) {
      Sums sum;
      issue_read(sum, &reads);
      wait_products<0>(sum);
      add_read(out, sum, entry, tables, &reads);
    }
  }

  // Rows of y, by way of the warp's own kibibyte: 32 columns at a time. If y accumulates, straight, so that the sum is
  // rounded once.
  __device__ __forceinline__ void store_rows(const Task& task, char* y, const LiveRows& rows, const Sums& out) const {
    char* staging = shared + in.layout.staging(half * 4 + warp);
    const uint32_t address = shared_address(staging);
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
        pair = pack<Half::kBf16>(from_bf16(pair & 0xffffu) + out[i], from_bf16(pair >> 16) + out[i + 1]);
      }
      return;
    }
    const auto place = [](int row, int chunk) { return static_cast<uint32_t>(row * 64 + ((chunk ^ (row >> 1 & 3)) * 16)); };
    const Place at = block_row(lane);
    const int row = lane / 4, chunk = lane % 4;
    // Of this lane's first 16 bytes.
    char* to = y + static_cast<int64_t>(rows.row + first + row) * (2 * in.y.row_stride) + 16 * chunk;
    const char* from = staging + place(row, chunk);
    const int columns = static_cast<int>(in.shape.value_dim) - kColumns * task.tile - 8 * chunk;
    const bool store[2] = {first + row >= rows.lo && first + row < rows.hi,
                           first + row + 8 >= rows.lo && first + row + 8 < rows.hi};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int e = 16 * side + 8 * part + 2 * i;
          pairs[i] = pack<Half::kBf16>(out[e], out[e + 1]);
        }
        store_matrices<false>(address + place(at.row, 2 * part + at.column / 8), pairs);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Eight rows on is the same place of the pattern.
        if (store[i] && 32 * side < columns)
          *reinterpret_cast<uint4*>(to + i * (16 * in.y.row_stride) + 64 * side) =
              *reinterpret_cast<const uint4*>(from + 512 * i);
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void wait_node() {
    wait(&barriers->node_done[node.index], node.phase);
    node.next(kNodeTurns);
  }

  // `reads`: bits of the nodes in slots; linear: whether there is a state.
  __device__ __forceinline__ void run_block(const Task& task, char* y, int block, uint32_t reads, int uppers) {
    const LiveRows rows(task, block);
    const Tables& tables = *reinterpret_cast<const Tables*>(shared + in.layout.tables(table.index));
    wait(&barriers->q_full[stage.index], stage.phase);
    load_queries();
    wait(&barriers->k_full[stage.index], stage.phase);
    if (rows.lo > 0 || rows.hi < kBlock) {
      wait(&barriers->v_full[stage.index], stage.phase);
      clear_dead_rows<kKeyDim>(in.layout, shared, stage.index, rows, static_cast<int>(threadIdx.x) - 128,
                               kSweepThreads - 128);
    }
    Sums scores, out;
    uint32_t factors[4][4];
    make_fresh(scores);
    fence_products(scores);
    issue_scores(scores, half);
    wait(&barriers->tables_full[table.index], table.phase);
    wait_products<0>(scores);
    release(&barriers->q_free[stage.index]);
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
    release(&barriers->k_free[stage.index]);
    release(&barriers->v_free[stage.index]);
    stage.next(in.layout.stages);
    if (waits) wait_node();
    waits = true;
    read_nodes(out, reads, uppers, block, tables);
    release(&barriers->reads_done[block_turn.index]);
    block_turn.next(2);
    release(&barriers->tables_free[table.index]);
    table.next(2);
    store_rows(task, y, rows, out);
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int64_t number = blockIdx.x; number < in.tasks; number += gridDim.x) {
      const Task task = find_task(in, number);
      if (task.first >= task.end) continue;
      char* y = static_cast<char*>(in.y.at(task.index, 0, task.head)) + 2 * kColumns * task.tile;
      const int uppers = kLinear ? 0 : __popcll(task.upper());
      uint32_t present = kLinear && task.segment > task.oldest ? 1 : 0;
      if (present) {  // the state that older segments leave counts as one more node
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
