// SPDX-License-Identifier: Apache-2.0
// What a planned batch remembers for its commit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/batch.h"
#include "core/checked.h"

namespace lla {

// Where the rows of a destination lie once forward has stored them: row p of the tail at ring index tail_ring + p -
// tail_first, row p of the convolution at conv_ring + p - conv_first, valid from conv_low on.
struct RowPlaces {
  int64_t tail_first = 0, tail_ring = 0;
  int64_t conv_first = 0, conv_ring = 0, conv_low = 0;
};

struct SequenceRecord {
  int64_t slot_in = -1, slot_out = -1;
  uint64_t version_in = 0, version_out = 0;
  RowPlaces places;
  int64_t first_snapshot = -1;  // list of the sequence's snapshots by rising rows
  bool reserved = false;        // the destination's record counts this batch

  bool in_place() const { return slot_in == slot_out; }
};

struct SnapshotRecord {
  int64_t sequence = 0, rows = 0, slot = 0;
  uint64_t version = 0;
  RowPlaces places;
  int64_t next = -1;  // of the same sequence
  bool reserved = false;
};

// Plans of nodes that a batch has room for: a sequence stores nodes at every border that a draft crosses, or at its last one, and
// at one border of each snapshot. And runs of rows: tail and convolution of each sequence and snapshot.
inline Size node_plans(const Limits& limits) {
  const Size borders = Size(limits.sequences) * kMostDraftChunks;
  return Size(borders.valid() ? std::min(borders.value(), limits.rows) : limits.rows) + limits.snapshots;
}
inline Size row_plans(const Limits& limits) { return (Size(limits.sequences) + limits.snapshots) * 2; }

}  // namespace lla
