// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: rows of a block that are not the call's, which the copies of tiles bring anything for.
#pragma once

#include "cuda/common/tail_rows.h"
#include "cuda/hopper/scalar_gate_sweep.h"
#include "cuda/hopper/wgmma.h"

namespace lla::cuda::hopper {

// Rows of k and v before the call's: from the history's tail; all others that are not the call's: zero. By all multiplying
// warpgroups together.
template <Half kType, int kKeyDim>
__device__ __forceinline__ void complete_rows(const SweepParameters& in, char* shared, int stage, const Task& task,
                                              int block, const LiveRows& rows, int thread, int threads) {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;
  char *k = shared + in.layout.k(stage), *v = shared + in.layout.v(stage);
  constexpr int kChunks = 8 * (RowTile::kPanels + 1);
  const TailRows tail{in.state, in.batch.sequences[task.sequence].history};
  const int distance = (block << kBlockLog) - task.base;
#pragma unroll 1
  for (int i = thread; i < kBlock * kChunks; i += threads) {
    const int r = i / kChunks, c = i % kChunks;
    if (r >= rows.lo && r < rows.hi) continue;
    char* to = (c < 8 ? v : k + (c / 8 - 1) * RowTile::kPanelBytes) + swizzle(r * kSwizzleRow + c % 8 * kSwizzleChunk);
    const int eight = c < 8 ? c + kColumns / 8 * task.tile : c - 8;
    const int64_t width = c < 8 ? in.shape.value_dim : in.shape.key_dim;
    if (r < rows.from || r >= rows.lo || 8 * eight >= width)
      *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
    else
      tail.copy_eight(to, kType == Half::kF16 ? LLA_F16 : LLA_BF16,
                      c < 8 ? tail.value(task.head, distance + r) : tail.key(task.group, distance + r), eight);
  }
  wait_all_copies();
  fence_shared_writes();
  sync_some(1, threads);
}

}  // namespace lla::cuda::hopper
