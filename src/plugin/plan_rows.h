// SPDX-License-Identifier: Apache-2.0
// The arithmetic of plans and commits: which blocks receive which nodes and rows of a sequence, and what its slot becomes. The
// core plans with it on the host, device backends with the same functions on the device.
#pragma once

#include <cstdint>

#include "plugin/problem.h"

namespace lla {

// Sizes of a state, as far as plans depend on them.
struct PlanShape {
  int64_t slots = 0, max_length = 0, max_draft = 0;
  int64_t grain = 64;
  int64_t node_levels = 0;      // separate levels that max_length can reach in any layer
  bool uses_absorbed = false;   // some layer is linear or absorbing
  bool rewrites_nodes = false;  // some layer (log-linear delta rule) rewrites all live nodes at each fold
  int64_t tail_capacity = 0, conv_capacity = 0;  // conv: of the widest convolution of the group; 0: there is none
  int64_t conv_reach = 0;       // W - 1 of the widest convolution

  // Nodes of one level each, and the absorbing one: the most that a slot links.
  LLA_HOST_DEVICE int64_t live_nodes() const { return node_levels + (uses_absorbed ? 1 : 0); }
  LLA_HOST_DEVICE int64_t chunk_start(int64_t position) const { return position - position % grain; }
  // Convolution inputs that a slot keeps: enough to take back every row of its chunk.
  LLA_HOST_DEVICE int64_t conv_needed(int64_t position) const {
    return conv_capacity ? conv_reach + position % grain : 0;
  }
  // A draft may be accepted in part, a longer append as a whole or not at all.
  LLA_HOST_DEVICE bool is_draft(int64_t rows) const { return rows <= max_draft; }
};

// Where the rows of a destination lie once forward has stored them: row p of the tail at ring index tail_ring + p -
// tail_first, row p of the convolution at conv_ring + p - conv_first, valid from conv_low on.
struct RowPlaces {
  int64_t tail_first = 0, tail_ring = 0;
  int64_t conv_first = 0, conv_ring = 0, conv_low = 0;
};

// What a plan knows of a sequence beside what kernels see. `accepted` and `faults` (LLA_FAULT_...) are the device's answer.
struct PlannedSequence {
  int64_t slot_in = -1, slot_out = -1;
  int64_t rows = 0, position = 0;
  RowPlaces places;
  int64_t first_snapshot = -1;  // list of the sequence's snapshots by rising rows
  int64_t accepted = 0;
  uint32_t faults = 0;

  LLA_HOST_DEVICE bool in_place() const { return slot_in == slot_out; }
};

struct PlannedSnapshot {
  int64_t sequence = 0, rows = 0, slot = 0;
  RowPlaces places;
  int64_t next = -1;  // of the same sequence
};

LLA_HOST_DEVICE inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
LLA_HOST_DEVICE inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

LLA_HOST_DEVICE inline bool holds_nothing(const SlotImage& image) {
  if (image.position != image.start) return false;
  for (const int32_t id : image.node) {
    if (id >= 0) return false;
  }
  return true;
}

LLA_HOST_DEVICE inline bool same_image(const SlotImage& a, const SlotImage& b) {
  bool same = a.position == b.position && a.start == b.start && a.floor == b.floor && a.tail == b.tail &&
              a.tail_origin == b.tail_origin && a.conv_origin == b.conv_origin && a.conv_rows == b.conv_rows;
  for (int i = 0; i < kNodes; ++i) same = same && a.node[i] == b.node[i];
  return same;
}

// ---- nodes --------------------------------------------------------------------------------------------------------------

// Fills in the nodes of one border. A node of the border ends in a chunk that is full. If that is one of the history's chunks,
// the history has the same node (or none there: zero). If it is a later one, the preceding border may have made it; otherwise
// it is new. take() gives a fresh block, or -1: then the answer is false.
template <class Take>
LLA_HOST_DEVICE bool plan_border(const PlanShape& shape, const Sequence& sequence, int64_t border,
                                 const NodesToStore* previous, NodesToStore* nodes, Take& take) {
  const int64_t chunks = border / shape.grain, old_chunks = sequence.position / shape.grain;
  const int64_t previous_chunks = previous ? previous->position / shape.grain : 0;
  nodes->position = border;
  nodes->write = 0;
  for (int32_t& id : nodes->node) id = -1;
  for (int b = 0; b < kNodes; ++b) {
    bool fresh = b == kAbsorbed && shape.uses_absorbed;
    if (b < shape.node_levels && ((chunks >> b) & 1)) {
      const int64_t end = ((chunks >> (b + 1)) << (b + 1)) + (int64_t{1} << b);
      if (end <= old_chunks) {
        nodes->node[b] = sequence.history.node[b];
        fresh = shape.rewrites_nodes && nodes->node[b] >= 0;
      } else {
        const bool made = end <= previous_chunks;
        if (made) nodes->node[b] = previous->node[b];
        fresh = shape.rewrites_nodes || !made;
      }
    }
    if (!fresh) continue;
    nodes->node[b] = take();
    if (nodes->node[b] < 0) return false;
    nodes->write |= uint64_t{1} << b;
  }
  return true;
}

struct NodesPlanned {
  int64_t count = 0;     // entries begun
  bool complete = true;  // false: take() had no more
};

// The nodes of a sequence. A draft may end at any row, so that every border it crosses may become its last; a longer append
// ends at its last row, and only snapshots look at earlier borders.
template <class Snapshot, class Take>
LLA_HOST_DEVICE NodesPlanned plan_nodes(const PlanShape& shape, const Sequence& sequence, const Snapshot* snapshots,
                                        int64_t first_snapshot, NodesToStore* nodes, Take& take) {
  const int64_t end = sequence.position + sequence.rows;
  const int64_t last = shape.chunk_start(end);
  int64_t reached = shape.chunk_start(sequence.position);  // the border before the next one
  NodesPlanned planned;
  const auto add = [&](int64_t border) {
    if (!planned.complete || border <= reached) return;
    const NodesToStore* previous = planned.count > 0 ? nodes + planned.count - 1 : nullptr;
    planned.complete = plan_border(shape, sequence, border, previous, nodes + planned.count++, take);
    reached = border;
  };
  if (shape.is_draft(sequence.rows)) {
    for (int64_t border = reached + shape.grain; border <= last; border += shape.grain) add(border);
    return planned;
  }
  for (int64_t i = first_snapshot; i >= 0; i = snapshots[i].next) add(shape.chunk_start(sequence.position + snapshots[i].rows));
  add(last);
  return planned;
}

// Most entries that plan_nodes() makes for a sequence of at most `rows` rows that stands at low ... high.
LLA_HOST_DEVICE inline int64_t most_borders(const PlanShape& shape, int64_t rows, int64_t low, int64_t high,
                                            int64_t snapshots) {
  const auto crossed = [&](int64_t count) {
    const int64_t anywhere = (shape.grain - 1 + count) / shape.grain;
    return lesser(anywhere, (shape.chunk_start(high + count) - shape.chunk_start(low)) / shape.grain);
  };
  const int64_t drafted = crossed(lesser(rows, shape.max_draft));
  return shape.is_draft(rows) ? drafted : greater(drafted, lesser(crossed(rows), 1 + snapshots));
}

// Most blocks that it takes for so many entries. Beside those that a fold rewrites, the nodes that end in m new chunks are one
// that may begin earlier and others whose sizes are different powers of two with a sum below m.
LLA_HOST_DEVICE inline int64_t most_fresh_nodes(const PlanShape& shape, int64_t rows, int64_t borders) {
  if (shape.rewrites_nodes) return borders * shape.live_nodes();
  int64_t apart = 1;
  if (!shape.is_draft(rows)) {
    for (int64_t rest = (shape.grain - 1 + rows) / shape.grain - 1; rest > 0; rest >>= 1) ++apart;
  }
  return borders * (lesser(apart, shape.node_levels) + (shape.uses_absorbed ? 1 : 0));
}

// ---- rows ---------------------------------------------------------------------------------------------------------------

LLA_HOST_DEVICE inline int64_t conv_available(const PlanShape& shape, const Sequence& sequence, int64_t position) {
  return lesser(sequence.history.conv_rows + position - sequence.position, shape.conv_needed(position));
}

// The destination's own rows, in block `block`. In place, a draft goes behind the rows that are there; a longer append leaves
// only the rows of its last chunk, one grain further on, so that the rows of the present chunk stay as they are. A fork starts
// at ring index 0 and takes the rows of the present chunk along if the new position may lie in it.
LLA_HOST_DEVICE inline void plan_own_rows(const PlanShape& shape, const Sequence& sequence, bool in_place, int32_t block,
                                          RowPlaces* places, RowsToStore* tail, RowsToStore* conv) {
  const SlotImage& history = sequence.history;
  const int64_t position = sequence.position, end = position + sequence.rows;
  const int64_t chunk = shape.chunk_start(position), last_chunk = shape.chunk_start(end);
  const bool draft = shape.is_draft(sequence.rows);
  tail->block = conv->block = block;
  tail->last = conv->last = end;

  const bool keeps_chunk = draft || last_chunk == chunk;
  places->tail_first = keeps_chunk ? chunk : last_chunk;
  places->tail_ring = in_place ? history.tail_origin + (keeps_chunk ? 0 : shape.grain) : 0;
  tail->first = in_place ? greater(position, places->tail_first) : greater(places->tail_first, history.start);
  tail->ring = static_cast<int32_t>(places->tail_ring + tail->first - places->tail_first);

  if (shape.conv_capacity == 0) return;
  const int64_t kept = conv_available(shape, sequence, end);  // of a long append
  const bool jumps = !draft && kept <= sequence.rows;         // its rows alone fill what is kept
  if (in_place) {
    places->conv_first = jumps ? end - kept : position;
    places->conv_ring = history.conv_origin;
    places->conv_low = position - history.conv_rows;  // no more of it counts than commit finds needed
    conv->first = places->conv_first;
  } else {
    places->conv_low = draft ? position - lesser(history.conv_rows, shape.conv_needed(position)) : end - kept;
    places->conv_first = conv->first = places->conv_low;
    places->conv_ring = 0;
  }
  conv->ring = static_cast<int32_t>(places->conv_ring);
}

LLA_HOST_DEVICE inline void plan_snapshot_rows(const PlanShape& shape, const Sequence& sequence, int64_t rows, int32_t block,
                                               RowPlaces* places, RowsToStore* tail, RowsToStore* conv) {
  const int64_t end = sequence.position + rows;
  tail->block = conv->block = block;
  tail->last = conv->last = end;
  places->tail_first = shape.chunk_start(end);
  tail->first = greater(places->tail_first, sequence.history.start);
  tail->ring = static_cast<int32_t>(tail->first - places->tail_first);
  if (shape.conv_capacity == 0) return;
  places->conv_low = places->conv_first = conv->first = end - conv_available(shape, sequence, end);
}

struct RowsPlanned {
  int64_t tail = 0, conv = 0;  // entries; those of the convolution follow those of the tail
};

// Rows of a sequence and of its snapshots; block_of(slot) is the slot's block of rows. Sets the places of all of them. Room
// for 2 * (1 + snapshots) entries is needed.
template <class Snapshot, class BlockOf>
LLA_HOST_DEVICE RowsPlanned plan_rows(const PlanShape& shape, const Sequence& sequence, PlannedSequence* planned,
                                      Snapshot* snapshots, RowsToStore* out, BlockOf block_of) {
  RowsPlanned count;
  for (int kind = 0; kind < 2; ++kind) {  // tail, convolution
    const int64_t capacity = kind == 0 ? shape.tail_capacity : shape.conv_capacity;
    const auto add = [&](const RowsToStore& tail, const RowsToStore& conv) {
      RowsToStore entry = kind == 0 ? tail : conv;
      if (entry.first >= entry.last || capacity == 0) return;
      entry.ring = static_cast<int32_t>(entry.ring % capacity);
      out[count.tail + count.conv] = entry;
      ++(kind == 0 ? count.tail : count.conv);
    };
    RowsToStore tail, conv;
    plan_own_rows(shape, sequence, planned->in_place(), block_of(planned->slot_out), &planned->places, &tail, &conv);
    if (sequence.rows > 0) add(tail, conv);
    for (int64_t i = planned->first_snapshot; i >= 0; i = snapshots[i].next) {
      RowsToStore its_tail, its_conv;
      plan_snapshot_rows(shape, sequence, snapshots[i].rows, block_of(snapshots[i].slot), &snapshots[i].places, &its_tail,
                         &its_conv);
      if (snapshots[i].rows > 0) add(its_tail, its_conv);
    }
  }
  return count;
}

// ---- commits ------------------------------------------------------------------------------------------------------------

// Whether so many rows of a sequence may be kept.
LLA_HOST_DEVICE inline bool can_accept(const PlanShape& shape, int64_t rows, int64_t accepted) {
  if (accepted < 0 || accepted > rows) return false;
  return accepted == 0 || accepted == rows || shape.is_draft(rows);
}

// Makes *image the history after `rows` rows, which forward stored at `places`; without rows a copy of the history, whose rows
// somebody has to copy. The image's block of rows stays its own.
LLA_HOST_DEVICE inline void append_rows(const PlanShape& shape, const Sequence& sequence, int64_t rows,
                                        const RowPlaces& places, SlotImage* image) {
  const int32_t tail = image->tail;
  *image = sequence.history;
  image->tail = tail;
  if (rows == 0) return;
  const int64_t position = sequence.position + rows;
  image->position = position;
  image->tail_origin =
      static_cast<int32_t>((places.tail_ring + shape.chunk_start(position) - places.tail_first) % shape.tail_capacity);
  if (shape.conv_capacity) {
    image->conv_origin = static_cast<int32_t>((places.conv_ring + position - places.conv_first) % shape.conv_capacity);
    image->conv_rows = static_cast<int32_t>(lesser(position - places.conv_low, shape.conv_needed(position)));
  }
  for (int64_t i = sequence.nodes_to_store_count - 1; i >= 0; --i) {
    const NodesToStore& nodes = sequence.nodes_to_store[i];
    if (nodes.position > position) continue;
    for (int b = 0; b < kNodes; ++b) image->node[b] = nodes.node[b];
    break;
  }
}

// Calls act(rows, places, slot) for every destination that changes when `rows` rows of the sequence are kept.
template <class Snapshot, class Act>
LLA_HOST_DEVICE void for_destinations(const PlannedSequence& planned, const Snapshot* snapshots, int64_t rows, Act act) {
  if (rows > 0 || !planned.in_place()) act(rows, planned.places, planned.slot_out);
  for (int64_t i = planned.first_snapshot; i >= 0; i = snapshots[i].next) {
    if (snapshots[i].rows <= rows) act(snapshots[i].rows, snapshots[i].places, snapshots[i].slot);
  }
}

}  // namespace lla
