// SPDX-License-Identifier: Apache-2.0
// Commits on the device, and how the host catches up with them: it links, with the same arithmetic, what the device linked.
#include <algorithm>

#include "core/batch.h"
#include "core/batch_device.h"
#include "core/batch_records.h"
#include "core/error.h"

namespace lla {

namespace {

long long ll(int64_t x) { return static_cast<long long>(x); }

// Calls act(record, rows added at most, whether it grows in place) for every slot that the commit may change.
template <class Act>
void for_known_slots(const Batch& batch, Act act) {
  State& state = *batch.state;
  for (int64_t b = 0; b < batch.view.count; ++b) {
    if (batch.sequences[b].padding && !batch.on_device) continue;
    const SequenceRecord& record = batch.records[b];
    if (record.slot_out < 0) continue;
    act(state.record(record.slot_out), batch.on_device ? record.most_rows : record.rows, record.in_place());
  }
  for (int64_t i = 0; i < batch.snapshot_count; ++i) act(state.record(batch.snapshots[i].slot), int64_t{0}, false);
}

// Sends what the device does not have of a plan that the host made.
lla_status send_plan(Batch* batch, const DeviceLayout& layout, void* stream, lla_error* error) {
  const Context& context = *batch->context;
  char* base = batch->device_memory;
  for (int64_t b = 0; b < batch->view.count; ++b) {
    batch->answers[b] = batch->records[b];
    batch->may_fork = batch->may_fork || (!batch->sequences[b].padding && !batch->records[b].in_place());
  }
  PlannedSnapshot* snapshots = reinterpret_cast<PlannedSnapshot*>(batch->request);
  for (int64_t i = 0; i < batch->snapshot_count; ++i)
    ::new (static_cast<void*>(snapshots + i)) PlannedSnapshot(batch->snapshots[i]);
  batch->may_fork = batch->may_fork || batch->snapshot_count > 0;
  batch->device_snapshots = reinterpret_cast<PlannedSnapshot*>(base + layout.request);
  LLA_TRY(send_records_of(*batch, stream, error));
  const auto send = [&](int64_t offset, const void* from, int64_t bytes) {
    const int32_t status = context.device->upload(base + offset, from, static_cast<size_t>(bytes), stream);
    return device_status(context, status, "the plan cannot be sent", error);
  };
  LLA_TRY(send(layout.planned, batch->answers, batch->view.count * static_cast<int64_t>(sizeof(PlannedSequence))));
  return send(layout.request, snapshots, batch->snapshot_count * static_cast<int64_t>(sizeof(PlannedSnapshot)));
}

// What the commit kept of sequence b, on the host's side of a plan that the host made; sets bits of *faults.
int64_t kept_rows(const Batch& batch, const lla_index& accepted, int64_t b, uint32_t* faults) {
  const State& state = *batch.state;
  const SequenceRecord& record = batch.records[b];
  const int64_t rows = accepted.data ? index_at(accepted, b) : record.rows;
  uint32_t found = 0;
  if (!can_accept(state.plan(), record.rows, rows)) found |= LLA_FAULT_ACCEPTED;
  bool moved = !same_image(state.record(record.slot_in).image, batch.sequences[b].history) ||
               (!record.in_place() && !state.record(record.slot_out).holds_nothing());
  for (int64_t i = record.first_snapshot; i >= 0; i = batch.snapshots[i].next)
    moved = moved || !state.record(batch.snapshots[i].slot).holds_nothing();
  if (moved) found |= LLA_FAULT_MOVED;
  *faults |= found;
  return found ? 0 : rows;
}

// Plans again what the device has planned, on the host's records, which have come to the same place.
lla_status repeat_plan(Batch* batch, lla_error* error) {
  State& state = *batch->state;
  batch->nodes_used = batch->rows_used = 0;
  for (int64_t b = 0; b < batch->view.count; ++b) {
    const PlannedSequence& answer = batch->answers[b];
    Sequence& sequence = batch->sequences[b];
    SequenceRecord& record = batch->records[b];
    record.slot_in = answer.slot_in;
    record.slot_out = answer.slot_out;
    record.rows = answer.rows;
    record.position = answer.position;
    sequence = Sequence();
    sequence.index = b;
    sequence.padding = answer.slot_in < 0 || answer.faults != 0;
    if (sequence.padding) continue;
    sequence.rows = answer.rows;
    sequence.history = state.record(answer.slot_in).image;
    sequence.position = sequence.history.position;
    if (sequence.position != answer.position || answer.rows > record.most_rows)
      return fail(error, LLA_INTERNAL, "sequence %lld: slot %lld stands at %lld on the host, the device planned from %lld",
                  ll(b), ll(answer.slot_in), ll(sequence.position), ll(answer.position));
    const int32_t* next = batch->spares + batch->allotments[b].first_spare;
    const int32_t* end = next + batch->allotments[b].spares;
    const auto take = [&] { return next < end ? *next++ : -1; };
    if (!store_sequence(batch, &state, b, take))
      return fail(error, LLA_INTERNAL, "sequence %lld: the node blocks that were set aside do not suffice", ll(b));
  }
  return LLA_OK;
}

// The counts that the caller gives beside collected ones must be those.
lla_status check_counts(const Batch& batch, const lla_index& accepted, lla_error* error) {
  for (int64_t b = 0; accepted.data && b < batch.view.count; ++b) {
    const PlannedSequence& answer = batch.answers[b];
    if (answer.slot_in < 0 || answer.faults != 0 || index_at(accepted, b) == answer.accepted) continue;
    return fail(error, LLA_INVALID_ARGUMENT, "accepted[%lld] = %lld, but the commit kept %lld", ll(b),
                ll(index_at(accepted, b)), ll(answer.accepted));
  }
  return LLA_OK;
}

}  // namespace

lla_status commit_on_device(Batch* batch, const lla_index& accepted, void* stream, lla_error* error) noexcept {
  State& state = *batch->state;
  const Context& context = *batch->context;
  const DeviceLayout layout(batch->limits);
  char* base = batch->device_memory;
  if (!batch->on_device) LLA_TRY(send_plan(batch, layout, stream, error));
  CommitRequest request;
  request.shape = state.plan();
  request.count = batch->view.count;
  request.sequences = batch->device_view.sequences;
  request.planned = reinterpret_cast<PlannedSequence*>(base + layout.planned);
  request.snapshots = batch->device_snapshots;
  request.records = state.device_records();
  if (lies_on_device(accepted)) {
    request.accepted = {accepted.data, accepted.dtype == LLA_I32};
  } else if (accepted.data) {
    for (int64_t b = 0; b < request.count; ++b) batch->counts[b] = index_at(accepted, b);
    const int32_t status = context.device->upload(base + layout.accepted, batch->counts,
                                                  static_cast<size_t>(request.count) * sizeof(int64_t), stream);
    LLA_TRY(device_status(context, status, "the accepted counts cannot be sent", error));
    request.accepted = {base + layout.accepted, 0};
  }
  LLA_TRY(device_status(context, context.device->commit(&request, stream), "the commit cannot be made", error));
  // From here on the device has moved, so the batch is pending even if what follows fails.
  lla_status copied = LLA_OK;
  for (int64_t i = 0; batch->may_fork && copied == LLA_OK && i < state.plan().layers; ++i) {
    const int32_t status = context.device->copy_forks(&request, &state.memory(i), stream);
    copied = device_status(context, status, "the rows of forks cannot be copied", error);
  }
  release_reservations(batch);
  batch->phase = BatchPhase::Pending;
  batch->collected = false;
  batch->counts_given = accepted.data != nullptr;
  batch->turn = state.begin_commit(batch->slots_known);
  if (!batch->slots_known) return copied;
  for_known_slots(*batch, [](SlotRecord& slot, int64_t rows, bool in_place) {
    slot.device_version = ++slot.version;
    ++slot.behind;
    slot.pending += rows;
    slot.arrivals += !in_place;
  });
  return copied;
}

lla_status collect_batch(Batch* batch, void* stream, lla_error* error) noexcept {
  const bool pending = batch->phase == BatchPhase::Pending;
  if (!pending && !(batch->phase == BatchPhase::Planned && batch->on_device)) {
    if (batch->phase == BatchPhase::Empty) return fail(error, LLA_BUSY, "batch is not planned");
    return LLA_OK;  // the host knows everything
  }
  const DeviceLayout layout(batch->limits);
  LLA_TRY(check_capture(*batch->context, stream, error));
  LLA_TRY(copy_memory(*batch->context, batch->answers, batch->device_memory + layout.planned,
                      batch->view.count * static_cast<int64_t>(sizeof(PlannedSequence)), stream, error));
  LLA_TRY(wait_for(*batch->context, stream, error));
  batch->faults = 0;
  for (int64_t b = 0; b < batch->view.count; ++b) batch->faults |= batch->answers[b].faults;
  batch->collected = pending;
  return LLA_OK;
}

lla_status settle_pending(Batch* batch, const lla_index& accepted, lla_error* error) noexcept {
  State& state = *batch->state;
  if (accepted.data) LLA_TRY(check_index(accepted, "accepted", nullptr, error));
  if (!state.is_turn(batch->turn)) return fail(error, LLA_BUSY, "batch: commits that came before its own are not settled");
  if (!batch->collected && batch->on_device)
    return fail(error, LLA_BUSY, "batch: the device planned it: lla_batch_collect() comes first");
  if (!batch->collected && batch->counts_given && !accepted.data)
    return fail(error, LLA_NULL_POINTER,
                "accepted is not given, and lla_batch_collect() has not brought the commit's counts");
  if (batch->collected) LLA_TRY(check_counts(*batch, accepted, error));
  if (batch->on_device) LLA_TRY(repeat_plan(batch, error));
  if (batch->slots_known) {  // as they were raised
    for_known_slots(*batch, [](SlotRecord& slot, int64_t rows, bool in_place) {
      --slot.behind;
      slot.pending -= rows;
      slot.arrivals -= !in_place;
    });
  }
  uint32_t faults = 0;
  for (int64_t b = 0; b < batch->view.count; ++b) {
    SequenceRecord& record = batch->records[b];
    if (batch->sequences[b].padding)
      record.accepted = 0;
    else
      record.accepted = batch->collected ? batch->answers[b].accepted : kept_rows(*batch, accepted, b, &faults);
  }
  if (!batch->collected) batch->faults = faults;
  batch->released = link_destinations(batch, false);
  state.end_settle(batch->slots_known);
  batch->phase = BatchPhase::Spent;
  return LLA_OK;
}

}  // namespace lla
