// SPDX-License-Identifier: Apache-2.0
// Which kernels of the scalar gate's forward work on a sequence of a call with states, where there are Hopper kernels. The
// layer and the sequence's own properties alone decide, so that its bits do not depend on the batch.
#pragma once

#include "plugin/problem.h"

namespace lla::cuda {

constexpr int64_t kSweepRows = 128;   // fewer rows are not worth a sweep
constexpr int64_t kSweepBorders = 4;  // at which nodes are stored: each is a pass of its own over keys and values
// Rows of a state's chunk of which a sweep reads those that are still raw: two of its blocks, of which it has tables at
// once.
constexpr int64_t kMostTail = 256;

// Of a layer and its state: which histories a sweep can read.
struct SweepRoutes {
  int64_t border = 1;  // those that end at multiples of this
};

// `dtype`: of rows, bf16 or fp16.
inline SweepRoutes sweep_routes(const MixerShape& shape, const SlotMemory& state, int32_t dtype) {
  // Raw rows become the type of the call's; bf16 numbers may be too large for fp16.
  const bool raw = shape.grain <= kMostTail && !(dtype == LLA_F16 && state.tail_layout.dtype == LLA_BF16);
  return {raw ? 1 : shape.grain};
}

// Sequences of many rows, without a history or with one that a sweep can read: outputs by the sweep, states straight from
// the rows.
LLA_HOST_DEVICE inline bool takes_sweep(const Sequence& sequence, const SweepRoutes& routes) {
  if (sequence.padding || sequence.rows < kSweepRows || sequence.nodes_to_store_count > kSweepBorders) return false;
  if (!sequence.history.has_past()) return true;
  return sequence.history.start == 0 && (sequence.position & (routes.border - 1)) == 0;
}
// Whether all sequences of a batch do, as far as the host can see.
inline bool all_take_sweeps(const BatchView& batch, const SweepRoutes& routes) {
  if (batch.least_rows < kSweepRows || batch.most_nodes_to_store > kSweepBorders) return false;
  return batch.past_alignment == kNoPast || batch.past_alignment >= routes.border;
}

}  // namespace lla::cuda
