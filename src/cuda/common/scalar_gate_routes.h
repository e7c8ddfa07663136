// SPDX-License-Identifier: Apache-2.0
// Which kernels of the scalar gate's forward work on a sequence of a call with states, where there are Hopper kernels. The
// layer and the sequence's own properties alone decide, so that its bits do not depend on the batch.
#pragma once

#include "plugin/problem.h"

namespace lla::cuda {

constexpr int64_t kSweepRows = 128;   // fewer rows are not worth a sweep
constexpr int64_t kSweepBorders = 4;  // at which nodes are stored: each is a pass of its own over keys and values

// Of a layer and its state: which histories a sweep can read.
struct SweepRoutes {
  bool histories = false;  // those that end with a block of the sweep and a chunk of the state:
  int64_t border = 128;    // at multiples of this
};

// `dtype`: of rows, bf16 or fp16. Nodes of the history are multiplied as they are,
// and none are fp16.
inline SweepRoutes sweep_routes(const MixerShape& shape, const SlotMemory& state, int32_t dtype) {
  return {shape.levels == 0 || state.node_layout.dtype == dtype, shape.grain > 128 ? shape.grain : 128};
}

// Sequences of many rows, without a history or with one that a sweep can read: outputs by the sweep, states straight from
// the rows.
LLA_HOST_DEVICE inline bool takes_sweep(const Sequence& sequence, const SweepRoutes& routes) {
  if (sequence.padding || sequence.rows < kSweepRows || sequence.nodes_to_store_count > kSweepBorders) return false;
  if (!sequence.history.has_past()) return true;
  return routes.histories && sequence.history.start == 0 && (sequence.position & (routes.border - 1)) == 0;
}
// Whether all sequences of a batch do, as far as the host can see.
inline bool all_take_sweeps(const BatchView& batch, const SweepRoutes& routes) {
  if (batch.least_rows < kSweepRows || batch.most_nodes_to_store > kSweepBorders) return false;
  return batch.past_alignment == kNoPast || (routes.histories && batch.past_alignment >= routes.border);
}

}  // namespace lla::cuda
