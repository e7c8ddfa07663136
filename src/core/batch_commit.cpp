// SPDX-License-Identifier: Apache-2.0
// Committing a batch: accepted rows become part of their slots, new nodes are linked, snapshots come into being.
#include <algorithm>

#include "core/batch.h"
#include "core/batch_records.h"
#include "core/error.h"

namespace lla {

namespace {

long long ll(int64_t x) { return static_cast<long long>(x); }

int64_t accepted_rows(const Batch& batch, const lla_index& accepted, int64_t b) {
  return accepted.data ? index_at(accepted, b) : batch.sequences[b].rows;
}

lla_status check_accepted(const Batch& batch, const lla_index& accepted, lla_error* error) {
  if (!accepted.data) return LLA_OK;
  LLA_TRY(check_index(accepted, "accepted", error));
  const int64_t max_draft = batch.state->plan().max_draft;
  for (int64_t b = 0; b < batch.view.count; ++b) {
    const Sequence& sequence = batch.sequences[b];
    if (sequence.padding) continue;
    const int64_t rows = index_at(accepted, b);
    if (rows < 0 || rows > sequence.rows)
      return fail(error, LLA_INVALID_ARGUMENT, "accepted[%lld] = %lld is not 0 ... %lld, the rows of the sequence", ll(b),
                  ll(rows), ll(sequence.rows));
    if (rows != 0 && rows != sequence.rows && sequence.rows > max_draft)
      return fail(error, LLA_INVALID_ARGUMENT,
                  "accepted[%lld] = %lld, but of %lld rows (more than max_draft %lld) it must be all or none", ll(b),
                  ll(rows), ll(sequence.rows), ll(max_draft));
  }
  return LLA_OK;
}

// The history after `rows` rows, which forward stored at `places` of block `tail`.
SlotImage appended_image(const StatePlan& plan, const Sequence& sequence, int64_t rows, const RowPlaces& places,
                         int32_t tail) {
  SlotImage image = sequence.history;
  const int64_t position = sequence.position + rows;
  image.position = position;
  image.tail = tail;
  image.tail_origin =
      static_cast<int32_t>((places.tail_ring + plan.chunk_start(position) - places.tail_first) % plan.tail_capacity);
  if (plan.conv_capacity) {
    image.conv_origin = static_cast<int32_t>((places.conv_ring + position - places.conv_first) % plan.conv_capacity);
    image.conv_rows = static_cast<int32_t>(std::min(position - places.conv_low, plan.conv_needed(position)));
  }
  for (int64_t i = sequence.nodes_to_store_count - 1; i >= 0; --i) {
    const NodesToStore& nodes = sequence.nodes_to_store[i];
    if (nodes.position > position) continue;
    std::copy(std::begin(nodes.node), std::end(nodes.node), image.node);
    break;
  }
  return image;
}

// What a destination becomes, as SlotRecord::next. Without rows it is a copy of the history, which nobody has stored there.
lla_status prepare(State* state, const Sequence& sequence, int64_t rows, const RowPlaces& places, int64_t slot, void* stream,
                   lla_error* error) {
  SlotRecord& record = state->record(slot);
  if (rows > 0) {
    record.next = appended_image(state->plan(), sequence, rows, places, record.image.tail);
  } else {
    record.next = sequence.history;
    record.next.tail = record.image.tail;
    LLA_TRY(state->copy_rows(sequence.history, record.next.tail, stream, error));
  }
  state->retain_nodes(record.next);
  return LLA_OK;
}

int64_t replace(State* state, int64_t slot) {
  SlotRecord& record = state->record(slot);
  const int64_t released = state->release_nodes(record.image);
  record.image = record.next;
  ++record.version;
  return released;
}

// Calls act(rows, places, slot) for every destination that changes.
template <class Act>
void for_destinations(const Batch& batch, const lla_index& accepted, Act act) {
  for (int64_t b = 0; b < batch.view.count; ++b) {
    const Sequence& sequence = batch.sequences[b];
    if (sequence.padding) continue;
    const SequenceRecord& record = batch.records[b];
    const int64_t rows = accepted_rows(batch, accepted, b);
    if (rows > 0 || !record.in_place()) act(sequence, rows, record.places, record.slot_out);
    for (int64_t i = record.first_snapshot; i >= 0; i = batch.snapshots[i].next) {
      const SnapshotRecord& snapshot = batch.snapshots[i];
      if (snapshot.rows <= rows) act(sequence, snapshot.rows, snapshot.places, snapshot.slot);
    }
  }
}

}  // namespace

lla_status commit_batch(State* state, Batch* batch, const lla_index& accepted, void* stream,
                        lla_error* error) noexcept {
  LLA_TRY(check_batch(*batch, state, error));
  if (!state) return fail(error, LLA_INVALID_ARGUMENT, "batch was planned without a state: there is nothing to commit");
  LLA_TRY(check_accepted(*batch, accepted, error));
  // New images first: they share nodes that the old ones still hold.
  lla_status status = LLA_OK;
  int64_t prepared = 0;
  for_destinations(*batch, accepted, [&](const Sequence& sequence, int64_t rows, const RowPlaces& places, int64_t slot) {
    if (status != LLA_OK) return;
    status = prepare(state, sequence, rows, places, slot, stream, error);
    prepared += status == LLA_OK;
  });
  if (status != LLA_OK) {  // the device refused a copy: nothing is linked
    for_destinations(*batch, accepted, [&](const Sequence&, int64_t, const RowPlaces&, int64_t slot) {
      if (prepared-- > 0) state->release_nodes(state->record(slot).next);
    });
    return status;
  }
  int64_t released = 0;
  for_destinations(*batch, accepted,
                   [&](const Sequence&, int64_t, const RowPlaces&, int64_t slot) { released += replace(state, slot); });
  batch->released = released + release_plan(batch);
  batch->phase = BatchPhase::Spent;
  return LLA_OK;
}

lla_status settle_batch(State* state, Batch* batch, const lla_index& accepted, int64_t* released,
                        lla_error* error) noexcept {
  if (batch->phase != BatchPhase::Spent) return fail(error, LLA_BUSY, "batch is not committed");
  if (batch->state != state) return fail(error, LLA_STATE_INCOMPATIBLE, "batch was planned with another state");
  LLA_TRY(check_accepted(*batch, accepted, error));
  if (released) *released = batch->released;
  return LLA_OK;
}

}  // namespace lla
