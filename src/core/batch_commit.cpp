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
  LLA_TRY(check_index(accepted, "accepted", nullptr, error));
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

// Calls act(sequence, rows, places, slot) for every destination that changes.
template <class Act>
void for_all_destinations(const Batch& batch, Act act) {
  for (int64_t b = 0; b < batch.view.count; ++b) {
    const Sequence& sequence = batch.sequences[b];
    if (sequence.padding) continue;
    for_destinations(batch.records[b], batch.snapshots, batch.records[b].accepted,
                     [&](int64_t rows, const RowPlaces& places, int64_t slot) { act(sequence, rows, places, slot); });
  }
}

}  // namespace

int64_t link_destinations(Batch* batch, bool change) noexcept {
  State* state = batch->state;
  // New images first: they share nodes that the old ones still hold.
  for_all_destinations(*batch, [&](const Sequence& sequence, int64_t rows, const RowPlaces& places, int64_t slot) {
    SlotRecord& record = state->record(slot);
    record.next = record.image;
    append_rows(state->plan(), sequence, rows, places, &record.next);
    state->retain_nodes(record.next);
  });
  int64_t released = 0;
  for_all_destinations(*batch, [&](const Sequence&, int64_t, const RowPlaces&, int64_t slot) {
    SlotRecord& record = state->record(slot);
    released += state->release_nodes(record.image);
    record.image = record.next;
    if (change) state->touch(&record);
  });
  return released + release_plan(batch);
}

lla_status commit_batch(State* state, Batch* batch, const lla_index& accepted, void* stream, lla_error* error) noexcept {
  LLA_TRY(check_batch(*batch, state, error));
  if (!state) return fail(error, LLA_INVALID_ARGUMENT, "batch was planned without a state: there is nothing to commit");
  if (accepted.data) LLA_TRY(check_index(accepted, "accepted", batch->context, error));
  if (batch->on_device || lies_on_device(accepted)) return commit_on_device(batch, accepted, stream, error);
  LLA_TRY(check_accepted(*batch, accepted, error));
  for (int64_t b = 0; b < batch->view.count; ++b) batch->records[b].accepted = accepted_rows(*batch, accepted, b);
  // Without rows a destination is a copy of the history, which nobody has stored there. A device that refuses the copy
  // leaves records as they were.
  lla_status status = LLA_OK;
  for_all_destinations(*batch, [&](const Sequence& sequence, int64_t rows, const RowPlaces&, int64_t slot) {
    if (status == LLA_OK && rows == 0)
      status = state->copy_rows(sequence.history, state->record(slot).image.tail, stream, error);
  });
  if (status != LLA_OK) return status;
  batch->released = link_destinations(batch, true);
  batch->phase = BatchPhase::Spent;
  return LLA_OK;
}

lla_status settle_batch(State* state, Batch* batch, const lla_index& accepted, int64_t* released,
                        lla_error* error) noexcept {
  if (batch->phase != BatchPhase::Spent && batch->phase != BatchPhase::Pending)
    return fail(error, LLA_BUSY, "batch is not committed");
  if (batch->state != state) return fail(error, LLA_STATE_INCOMPATIBLE, "batch was planned with another state");
  if (batch->phase == BatchPhase::Pending)
    LLA_TRY(settle_pending(batch, accepted, error));
  else
    LLA_TRY(check_accepted(*batch, accepted, error));
  if (released) *released = batch->released;
  return LLA_OK;
}

}  // namespace lla
