// SPDX-License-Identifier: Apache-2.0
// A batch's memory and phases: limits, layout, making, discarding, and whether its plan still holds.
#include "core/batch.h"

#include <algorithm>
#include <new>

#include "core/batch_records.h"
#include "core/checked.h"
#include "core/error.h"

namespace lla {

namespace {

long long ll(int64_t x) { return static_cast<long long>(x); }

// Offsets of the arrays behind the header.
struct BatchLayout {
  int64_t nodes_capacity = 0, rows_capacity = 0;
  int64_t sequences = 0, records = 0, nodes = 0, rows = 0, slack = 0, snapshots = 0, translated = 0;
  int64_t request = 0, answers = 0, counts = 0;
  Size bytes;

  BatchLayout(const Limits& limits, bool device) {
    const Size nodes_count = node_plans(limits), rows_count = row_plans(limits);
    bytes = Size(sizeof(Batch)).aligned(kAlignment);
    sequences = place(limits.sequences, sizeof(Sequence));
    records = place(limits.sequences, sizeof(SequenceRecord));
    nodes = place(nodes_count, sizeof(NodesToStore));
    rows = place(rows_count, sizeof(RowsToStore));
    slack = place(Size(limits.sequences) + 1, sizeof(RowRange));
    snapshots = place(limits.snapshots, sizeof(SnapshotRecord));
    const int64_t sent = device ? limits.sequences : 0;
    translated = place(sent, sizeof(Sequence));
    answers = place(sent, sizeof(PlannedSequence));
    counts = place(sent, sizeof(int64_t));
    request = place(device ? request_bytes(limits) : Size(0), 1);
    nodes_capacity = nodes_count.value();
    rows_capacity = rows_count.value();
  }

 private:
  int64_t place(Size count, int64_t size) {
    const int64_t offset = bytes.value();
    bytes += (count * size).aligned(kAlignment);
    return offset;
  }
};

template <class T>
T* array_at(char* base, int64_t offset, int64_t count) {
  T* array = reinterpret_cast<T*>(base + offset);
  for (int64_t i = 0; i < count; ++i) ::new (static_cast<void*>(array + i)) T();
  return array;
}

}  // namespace

lla_status check_index(const lla_index& index, const char* name, const Context* device, lla_error* error) noexcept {
  if (index.dtype != LLA_I32 && index.dtype != LLA_I64)
    return fail(error, LLA_DTYPE_MISMATCH, "%s: element type %d is neither LLA_I32 nor LLA_I64", name,
                static_cast<int>(index.dtype));
  const bool there = index.location == LLA_DEVICE && device && device->device;
  if (index.location != LLA_HOST && !there)
    return fail(error, LLA_INVALID_ARGUMENT, "%s: location %d, but it is read from LLA_HOST only", name,
                static_cast<int>(index.location));
  const uintptr_t size = index.dtype == LLA_I32 ? 4 : 8;
  if (reinterpret_cast<uintptr_t>(index.data) % size != 0)
    return fail(error, LLA_MISALIGNED, "%s is not aligned to its element type", name);
  if (there && !reaches_memory(*device, index.data))
    return fail(error, LLA_INVALID_ARGUMENT, "%s is not memory of the device", name);
  return LLA_OK;
}

lla_status read_limits(const lla_batch_limits& limits, Limits* out, lla_error* error) noexcept {
  const struct {
    const char* name;
    int64_t value;
  } fields[] = {{"max_sequences", limits.max_sequences},
                {"max_rows", limits.max_rows},
                {"max_rows_per_sequence", limits.max_rows_per_sequence},
                {"max_length", limits.max_length},
                {"max_snapshots", limits.max_snapshots}};
  for (const auto& field : fields) {
    if (field.value < 0)
      return fail(error, LLA_INVALID_ARGUMENT, "limits->%s is negative (%lld)", field.name, ll(field.value));
    if (field.value >= kAnyLength)
      return fail(error, LLA_SIZE_OVERFLOW, "limits->%s = %lld is too large", field.name, ll(field.value));
  }
  if (limits.replay != 0 && limits.replay != 1)
    return fail(error, LLA_INVALID_ARGUMENT, "limits->replay is %d, not 0 or 1", static_cast<int>(limits.replay));
  if (limits.reserved != 0) return fail(error, LLA_INVALID_ARGUMENT, "limits->reserved is not 0");
  out->sequences = limits.max_sequences;
  out->rows = limits.max_rows;
  out->rows_per_sequence = limits.max_rows_per_sequence ? limits.max_rows_per_sequence : limits.max_rows;
  out->length = limits.max_length ? limits.max_length : kAnyLength;
  out->snapshots = limits.max_snapshots;
  out->replay = limits.replay != 0;
  return LLA_OK;
}

lla_status batch_size(const Limits& limits, bool device, size_t* bytes, lla_error* error) noexcept {
  const BatchLayout layout(limits, device);
  if (!layout.bytes.valid())
    return fail(error, LLA_SIZE_OVERFLOW, "limits: a batch of %lld sequences, %lld rows and %lld snapshots is too large",
                ll(limits.sequences), ll(limits.rows), ll(limits.snapshots));
  *bytes = static_cast<size_t>(layout.bytes.value());
  return LLA_OK;
}

lla_status init_batch(Context* context, const Limits& limits, void* memory, size_t bytes, Batch** batch,
                      lla_error* error) noexcept {
  size_t needed = 0;
  const bool device = context->device != nullptr;
  LLA_TRY(batch_size(limits, device, &needed, error));
  if (reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(kAlignment) != 0)
    return fail(error, LLA_MISALIGNED, "memory is not aligned to %lld bytes", ll(kAlignment));
  if (bytes < needed) return fail(error, LLA_BUFFER_TOO_SMALL, "bytes = %zu, but the batch needs %zu", bytes, needed);
  const BatchLayout layout(limits, device);
  char* base = static_cast<char*>(memory);
  Batch* made = ::new (memory) Batch;
  made->magic = kBatchMagic;
  made->context = context;
  made->limits = limits;
  made->nodes_capacity = layout.nodes_capacity;
  made->rows_capacity = layout.rows_capacity;
  made->sequences = array_at<Sequence>(base, layout.sequences, limits.sequences);
  made->records = array_at<SequenceRecord>(base, layout.records, limits.sequences);
  made->nodes = array_at<NodesToStore>(base, layout.nodes, 0);  // written as they are planned
  made->rows = array_at<RowsToStore>(base, layout.rows, 0);
  made->slack = array_at<RowRange>(base, layout.slack, limits.sequences + 1);
  made->snapshots = array_at<SnapshotRecord>(base, layout.snapshots, limits.snapshots);
  if (device) {
    made->translated = array_at<Sequence>(base, layout.translated, limits.sequences);
    made->answers = array_at<PlannedSequence>(base, layout.answers, limits.sequences);
    made->counts = array_at<int64_t>(base, layout.counts, limits.sequences);
    made->request = base + layout.request;
  }
  *batch = made;
  return LLA_OK;
}

void discard_batch(Batch* batch) noexcept {
  if (!batch || batch->magic != kBatchMagic || batch->phase != BatchPhase::Planned) return;
  if (batch->state) release_plan(batch);
  batch->phase = BatchPhase::Empty;
  batch->state = batch->gradient_state = nullptr;
}

int64_t release_blocks(Batch* batch) noexcept {
  State& state = *batch->state;
  int64_t released = 0;
  if (batch->on_device) {
    for (int64_t i = 0; i < batch->spare_count; ++i) released += state.release_node(batch->spares[i]);
    batch->spare_count = 0;
    return released;
  }
  for (int64_t i = 0; i < batch->nodes_used; ++i) {
    const NodesToStore& nodes = batch->nodes[i];
    for (int b = 0; b < kNodes; ++b) {
      if ((nodes.write >> b) & 1) released += state.release_node(nodes.node[b]);
    }
  }
  batch->nodes_used = 0;
  return released;
}

void release_reservations(Batch* batch) noexcept {
  State& state = *batch->state;
  for (int64_t b = 0; b < batch->view.count; ++b) {
    SequenceRecord& record = batch->records[b];
    if (!record.reserved) continue;
    SlotRecord& slot = state.record(record.slot_out);
    if (record.in_place())
      --slot.appends;
    else
      slot.reserved = false;
    record.reserved = false;
  }
  for (int64_t i = 0; i < batch->snapshot_count; ++i) {
    SnapshotRecord& snapshot = batch->snapshots[i];
    if (snapshot.reserved) state.record(snapshot.slot).reserved = false;
    snapshot.reserved = false;
  }
}

int64_t release_plan(Batch* batch) noexcept {
  release_reservations(batch);
  return release_blocks(batch);
}

lla_status check_batch(const Batch& batch, const State* state, lla_error* error) noexcept {
  if (batch.phase != BatchPhase::Planned)
    return fail(error, LLA_BUSY, "batch is %s",
                batch.phase == BatchPhase::Empty ? "not planned" : "committed already; plan it again");
  if (batch.state != state)
    return fail(error, LLA_STATE_INCOMPATIBLE, "batch was planned with %s state", batch.state ? "another" : "no");
  if (!state) return LLA_OK;
  // Slots that the host does not know of may be any.
  if (batch.slots_known ? !batch.on_device && batch.unknown_commits != state->unknown_commits()
                        : batch.changes != state->changes())
    return fail(error, LLA_BUSY, "slots of the state have changed since the batch was planned");
  if (!batch.slots_known) return LLA_OK;
  for (int64_t b = 0; b < batch.view.count; ++b) {
    const SequenceRecord& record = batch.records[b];
    if (batch.sequences[b].padding) continue;
    if (state->record(record.slot_in).version != record.version_in)
      return fail(error, LLA_BUSY, "slot_in[%lld] = %lld has changed since the batch was planned", ll(b),
                  ll(record.slot_in));
    if (state->record(record.slot_out).version != record.version_out)
      return fail(error, LLA_BUSY, "slot_out[%lld] = %lld has changed since the batch was planned", ll(b),
                  ll(record.slot_out));
  }
  for (int64_t i = 0; i < batch.snapshot_count; ++i) {
    const SnapshotRecord& snapshot = batch.snapshots[i];
    if (state->record(snapshot.slot).version != snapshot.version)
      return fail(error, LLA_BUSY, "snapshot_slots[%lld] = %lld has changed since the batch was planned", ll(i),
                  ll(snapshot.slot));
  }
  return LLA_OK;
}

}  // namespace lla
