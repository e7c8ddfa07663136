// SPDX-License-Identifier: Apache-2.0
// What a planned batch remembers for its commit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/batch.h"
#include "core/checked.h"

namespace lla {

struct SequenceRecord : PlannedSequence {
  uint64_t version_in = 0, version_out = 0;
  int64_t most_rows = 0;  // that it has, as far as the host can see
  bool reserved = false;  // the destination's record counts this batch
};

struct SnapshotRecord : PlannedSnapshot {
  uint64_t version = 0;
  bool reserved = false;
};

// Plans of nodes that a batch has room for: a sequence stores nodes at every border that a draft crosses, or at its last
// one, and at one border of each snapshot. And runs of rows: tail and convolution of each sequence and snapshot.
inline Size node_plans(const Limits& limits) {
  const Size borders = Size(limits.sequences) * kMostDraftChunks;
  return Size(borders.valid() ? std::min(borders.value(), limits.rows) : limits.rows) + limits.snapshots;
}
inline Size row_plans(const Limits& limits) { return (Size(limits.sequences) + limits.snapshots) * 2; }

// Index arrays of a plan that may lie on the device.
constexpr int kPlanArrays = 5;

// What goes to the device for a plan that is made there, in one piece: Allotment [sequences], PlannedSnapshot [snapshots],
// the arrays that the caller has on the host (int64 each), and spare node blocks (int32).
inline Size request_bytes(const Limits& limits) {
  return Size(limits.sequences) * (sizeof(Allotment) + kPlanArrays * sizeof(int64_t)) + kPlanArrays * sizeof(int64_t) +
         Size(limits.snapshots) * sizeof(PlannedSnapshot) + node_plans(limits) * (kNodes * sizeof(int32_t));
}

// Says what sequence b of the batch, whose history is known, stores where; take() gives fresh node blocks. False: there are
// no more of them.
template <class Take>
bool store_sequence(Batch* batch, State* state, int64_t b, Take& take) {
  Sequence& sequence = batch->sequences[b];
  const PlanShape& shape = state->plan();
  SequenceRecord& record = batch->records[b];
  NodesToStore* nodes = batch->nodes + batch->nodes_used;
  const NodesPlanned stored = plan_nodes(shape, sequence, batch->snapshots, record.first_snapshot, nodes, take);
  batch->nodes_used += stored.count;
  if (!stored.complete) return false;
  sequence.nodes_to_store = nodes;
  sequence.nodes_to_store_count = stored.count;
  RowsToStore* rows = batch->rows + batch->rows_used;
  const auto block_of = [&](int64_t slot) { return state->record(slot).image.tail; };
  const RowsPlanned count = plan_rows(shape, sequence, &record, batch->snapshots, rows, block_of);
  batch->rows_used += count.tail + count.conv;
  sequence.tail_to_store = rows;
  sequence.tail_to_store_count = count.tail;
  sequence.conv_to_store = rows + count.tail;
  sequence.conv_to_store_count = count.conv;
  return true;
}

}  // namespace lla
