// SPDX-License-Identifier: Apache-2.0
// Which kernels of the scalar gate's forward work on a sequence of a call with states, where there are Hopper kernels. A
// sequence's own properties alone decide, so that its bits do not depend on the batch.
#pragma once

#include "plugin/problem.h"

namespace lla::cuda {

constexpr int64_t kSweepRows = 128;   // fewer rows are not worth a sweep
constexpr int64_t kSweepBorders = 4;  // at which nodes are stored: each is a pass of its own over keys and values

// Sequences without a history, as in a first prefill: outputs by the sweep, states straight from the rows.
LLA_HOST_DEVICE inline bool takes_sweep(const Sequence& sequence) {
  return !sequence.padding && !sequence.history.has_past() && sequence.rows >= kSweepRows &&
         sequence.nodes_to_store_count <= kSweepBorders;
}
// Whether all sequences of a batch do, as far as the host can see.
inline bool all_take_sweeps(const BatchView& batch) {
  return batch.fresh && batch.least_rows >= kSweepRows && batch.most_nodes_to_store <= kSweepBorders;
}

}  // namespace lla::cuda
