// SPDX-License-Identifier: Apache-2.0
// What a device plugin is asked to do where plans and commits are made on the device: plain values and pointers of the device.
#pragma once

#include <cstdint>

#include "plugin/plan_rows.h"

namespace lla {

// An index array in memory of the device; `data` null: not given.
struct IndexView {
  const void* data = nullptr;
  int32_t narrow = 0;  // 32-bit entries, else 64-bit

  LLA_HOST_DEVICE bool present() const { return data != nullptr; }
  LLA_HOST_DEVICE int64_t at(int64_t i) const {
    return narrow ? static_cast<const int32_t*>(data)[i] : static_cast<const int64_t*>(data)[i];
  }
};

// What the host sets aside for one sequence, as much as it may need at most: fresh node blocks, entries of the arrays of nodes
// and of rows. Also its list of snapshots.
struct Allotment {
  int32_t first_spare = 0, spares = 0;
  int32_t first_nodes = 0, nodes = 0;
  int32_t first_rows = 0;
  int32_t first_snapshot = -1;
};

// Plan `count` sequences: check the arrays against the slots' records and fill in everything that kernels see. A sequence with a
// bad value becomes padding and has bits of PlannedSequence::faults.
struct PlanRequest {
  PlanShape shape;
  int64_t count = 0, total_rows = 0;
  int64_t rows_per_sequence = 0;  // uniform batches: distance of two sequences
  int64_t most_rows = 0;          // limits of the batch: rows of one sequence, and its length
  int64_t longest = 0;
  IndexView offsets, counts, slot_in, slot_out, expected_positions;
  const Allotment* allotments = nullptr;  // [count]
  const int32_t* spares = nullptr;
  int64_t snapshot_count = 0;
  PlannedSnapshot* snapshots = nullptr;   // in: all but the places
  const SlotImage* records = nullptr;     // [slots]; null: no state
  // Results.
  Sequence* sequences = nullptr;          // [count]
  PlannedSequence* planned = nullptr;     // [count]
  NodesToStore* nodes = nullptr;
  RowsToStore* rows = nullptr;
  RowRange* slack = nullptr;              // [count + 1], empty ones included
};

// Commit a plan that lies on the device: records of the destinations change, unless a count is bad or a slot is not any more
// what the plan saw; `planned` receives counts and faults.
struct CommitRequest {
  PlanShape shape;
  int64_t count = 0, snapshot_count = 0;
  const Sequence* sequences = nullptr;
  PlannedSequence* planned = nullptr;
  const PlannedSnapshot* snapshots = nullptr;
  SlotImage* records = nullptr;
  IndexView accepted;  // not given: all rows
};

}  // namespace lla
