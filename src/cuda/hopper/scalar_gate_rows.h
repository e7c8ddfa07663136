// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: rows of a block that are not the call's, which the copies of tiles bring anything for.
#pragma once

#include "cuda/common/tail_rows.h"
#include "cuda/hopper/scalar_gate_sweep.h"
#include "cuda/hopper/wgmma.h"

namespace lla::cuda::hopper {

// Rows of k and v before the call's: from the history's tail; all others that are not the call's: zero. Of tiles with kRows
// rows of a block from `first` on; without k those of v alone. What they bring is there after finish_rows().
template <Half kType, int kKeyDim, int kRows>
__device__ __forceinline__ void complete_tiles(const SweepParameters& in, const Task& task, int block, const LiveRows& rows,
                                               int first, char* k, char* v, int thread, int threads) {
  constexpr int kPanels = SwizzledTile<kRows, kKeyDim>::kPanels;
  const TailRows tail{in.state, in.batch.sequences[task.sequence].history};
  const int distance = (block << kBlockLog) - task.base, chunks = k ? 8 * (kPanels + 1) : 8;
#pragma unroll 1
  for (int i = thread; i < kRows * chunks; i += threads) {
    const int row = i / chunks, r = first + row, c = i % chunks;
    if (r >= rows.lo && r < rows.hi) continue;
    char* to = (c < 8 ? v : k + (c / 8 - 1) * SwizzledTile<kRows, kKeyDim>::kPanelBytes) +
               swizzle(row * kSwizzleRow + c % 8 * kSwizzleChunk);
    const int eight = c < 8 ? c + kColumns / 8 * task.tile : c - 8;
    const int64_t width = c < 8 ? in.shape.value_dim : in.shape.key_dim;
    if (r < rows.from || r >= rows.lo || 8 * eight >= width)
      *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
    else
      tail.copy_eight(to, kType == Half::kF16 ? LLA_F16 : LLA_BF16,
                      c < 8 ? tail.value(task.head, distance + r) : tail.key(task.group, distance + r), eight);
  }
}
__device__ __forceinline__ void finish_rows(int threads) {
  wait_all_copies();
  fence_shared_writes();
  sync_some(1, threads);
}

// The same of a whole block, by all multiplying warpgroups together.
template <Half kType, int kKeyDim>
__device__ __forceinline__ void complete_rows(const SweepParameters& in, char* shared, int stage, const Task& task,
                                              int block, const LiveRows& rows, int thread, int threads) {
  complete_tiles<kType, kKeyDim, kBlock>(in, task, block, rows, 0, shared + in.layout.k(stage), shared + in.layout.v(stage),
                                         thread, threads);
  finish_rows(threads);
}

}  // namespace lla::cuda::hopper
