// SPDX-License-Identifier: Apache-2.0
// A batch on a device: the memory that its plan needs there, and the way of the plan to it.
#include "core/batch_device.h"

#include <algorithm>

#include "core/batch.h"
#include "core/batch_records.h"
#include "core/checked.h"
#include "core/error.h"

namespace lla {

namespace {

// The element of the device's array that stands for one of the host's.
template <class T>
const T* translate(const T* element, const T* host, char* device) {
  return element ? reinterpret_cast<const T*>(device) + (element - host) : nullptr;
}

}  // namespace

void widen(const Batch* batch, BatchView* view) {
  const Limits& limits = batch->limits;
  view->most_rows = std::min(limits.rows_per_sequence, view->total_rows);
  view->most_length = limits.length;
  view->slack_count = view->count + 1;
  if (!batch->state) {
    if (limits.length == kAnyLength) view->most_length = limits.rows_per_sequence;
    return;
  }
  const StatePlan& plan = batch->state->plan();
  view->most_length = std::min(limits.length, plan.max_length);
  view->max_draft = plan.max_draft;
  const int64_t drafted = std::min(view->most_rows, plan.max_draft);
  view->most_nodes_to_store = std::max((plan.grain - 1 + drafted) / plan.grain, 1 + limits.snapshots);
  view->most_tail_to_store = view->most_conv_to_store = 1 + limits.snapshots;
}

DeviceLayout::DeviceLayout(const Limits& limits) {
  const auto place = [&](Size count, int64_t size) {
    const int64_t offset = bytes.value();
    bytes += (count * size).aligned(kAlignment);
    return offset;
  };
  sequences = place(limits.sequences, sizeof(Sequence));
  nodes = place(node_plans(limits), sizeof(NodesToStore));
  rows = place(row_plans(limits), sizeof(RowsToStore));
  slack = place(Size(limits.sequences) + 1, sizeof(RowRange));
  planned = place(limits.sequences, sizeof(PlannedSequence));
  accepted = place(limits.sequences, sizeof(int64_t));
  request = place(request_bytes(limits), 1);
}

lla_status batch_device_size(const Context& context, const Limits& limits, size_t* bytes, lla_error* error) noexcept {
  if (!context.device) {
    *bytes = 0;
    return LLA_OK;
  }
  const DeviceLayout layout(limits);
  if (!layout.bytes.valid())
    return fail(error, LLA_SIZE_OVERFLOW, "limits: a batch of %lld sequences and %lld rows is too large",
                static_cast<long long>(limits.sequences), static_cast<long long>(limits.rows));
  *bytes = static_cast<size_t>(layout.bytes.value());
  return LLA_OK;
}

lla_status bind_device_memory(Batch* batch, void* memory, size_t bytes, lla_error* error) noexcept {
  if (batch->phase == BatchPhase::Planned || batch->phase == BatchPhase::Pending)
    return fail(error, LLA_BUSY, "batch: its plan lies in the memory that it has");
  size_t needed = 0;
  LLA_TRY(batch_device_size(*batch->context, batch->limits, &needed, error));
  if (reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(kAlignment) != 0)
    return fail(error, LLA_MISALIGNED, "memory is not aligned to %lld bytes", static_cast<long long>(kAlignment));
  if (bytes < needed) return fail(error, LLA_BUFFER_TOO_SMALL, "bytes = %zu, but the batch needs %zu", bytes, needed);
  if (!reaches_memory(*batch->context, memory))
    return fail(error, LLA_INVALID_ARGUMENT, "memory is not memory of the device");
  batch->device_memory = static_cast<char*>(memory);
  return LLA_OK;
}

lla_status upload_plan(Batch* batch, void* stream, lla_error* error) noexcept {
  const Context& context = *batch->context;
  if (!batch->device_memory)
    return fail(error, LLA_NULL_POINTER, "batch: lla_batch_bind_device() has not given it memory of the device");
  const DeviceLayout layout(batch->limits);
  char* base = batch->device_memory;
  BatchView& view = batch->device_view;
  view = batch->view;
  view.max_draft = batch->state ? batch->state->plan().max_draft : 0;
  view.past_alignment = batch->limits.replay ? 0 : kNoPast;
  view.least_rows = batch->limits.replay ? 0 : view.total_rows;
  for (int64_t b = 0; b < view.count; ++b) {
    const Sequence& sequence = batch->sequences[b];
    Sequence& moved = batch->translated[b];
    moved = sequence;
    moved.nodes_to_store = translate<NodesToStore>(sequence.nodes_to_store, batch->nodes, base + layout.nodes);
    moved.tail_to_store = translate<RowsToStore>(sequence.tail_to_store, batch->rows, base + layout.rows);
    moved.conv_to_store = translate<RowsToStore>(sequence.conv_to_store, batch->rows, base + layout.rows);
    if (sequence.padding || batch->limits.replay) continue;
    view.most_rows = std::max(view.most_rows, sequence.rows);
    view.least_rows = std::min(view.least_rows, sequence.rows);
    const int64_t past = sequence.history.start == 0 ? sequence.position : 0;
    if (sequence.history.has_past()) view.past_alignment = std::min(view.past_alignment, past & -past);
    view.most_length = std::max(view.most_length, sequence.position + sequence.rows);
    view.most_nodes_to_store = std::max(view.most_nodes_to_store, sequence.nodes_to_store_count);
    view.most_tail_to_store = std::max(view.most_tail_to_store, sequence.tail_to_store_count);
    view.most_conv_to_store = std::max(view.most_conv_to_store, sequence.conv_to_store_count);
  }
  if (batch->limits.replay) {
    widen(batch, &view);
    for (int64_t i = batch->view.slack_count; i < view.slack_count; ++i) batch->slack[i] = RowRange();
  }
  view.sequences = reinterpret_cast<const Sequence*>(base + layout.sequences);
  view.slack = reinterpret_cast<const RowRange*>(base + layout.slack);
  const auto send = [&](int64_t offset, const void* from, int64_t count, size_t size) {
    const int32_t status = context.device->upload(base + offset, from, static_cast<size_t>(count) * size, stream);
    return device_status(context, status, "the plan cannot be sent", error);
  };
  LLA_TRY(send(layout.sequences, batch->translated, view.count, sizeof(Sequence)));
  LLA_TRY(send(layout.nodes, batch->nodes, batch->nodes_used, sizeof(NodesToStore)));
  LLA_TRY(send(layout.rows, batch->rows, batch->rows_used, sizeof(RowsToStore)));
  return send(layout.slack, batch->slack, view.slack_count, sizeof(RowRange));
}

}  // namespace lla
