// SPDX-License-Identifier: Apache-2.0
// The host's part of a plan that is made on the device: sets node blocks and room aside for what the sequences may need at most,
// and sends what the device does not have.
#include <algorithm>
#include <new>

#include "core/batch.h"
#include "core/batch_device.h"
#include "core/batch_records.h"
#include "core/error.h"

namespace lla {

namespace {

long long ll(int64_t x) { return static_cast<long long>(x); }

class DevicePlanner {
 public:
  DevicePlanner(Batch* batch, const lla_rows& rows, void* stream, lla_error* error)
      : batch_(*batch), state_(batch->state), rows_(rows), stream_(stream), error_(error) {}

  lla_status run() {
    if (!batch_.device_memory)
      return fail(error_, LLA_NULL_POINTER, "batch: lla_batch_bind_device() has not given it memory of the device");
    LLA_TRY(lay_out());
    if (state_) {
      LLA_TRY(take_spares());
      LLA_TRY(send_records());
    }
    return send();
  }

 private:
  // Pieces of the request, one after the other; the spares are last, because their number is found on the way.
  lla_status lay_out();
  lla_status take_spares();
  lla_status send_records();
  lla_status send();
  void set_view(BatchView* view, const char* base, const DeviceLayout& layout) const;
  bool is_padding(int64_t b) const { return state_ && batch_.slots_known && batch_.sequences[b].padding; }

  Batch& batch_;
  State* state_;
  const lla_rows& rows_;
  void* stream_;
  lla_error* error_;
  PlannedSnapshot* snapshots_ = nullptr;
  IndexView views_[kPlanArrays];  // where the device finds the arrays
  int64_t bytes_ = 0;             // of the request
  int64_t longest_rows_ = 0, most_nodes_ = 0;
};

lla_status DevicePlanner::lay_out() {
  const int64_t count = batch_.view.count;
  const DeviceLayout layout(batch_.limits);
  char* at = batch_.request;
  batch_.allotments = reinterpret_cast<Allotment*>(at);
  at += count * static_cast<int64_t>(sizeof(Allotment));
  snapshots_ = reinterpret_cast<PlannedSnapshot*>(at);
  at += batch_.snapshot_count * static_cast<int64_t>(sizeof(PlannedSnapshot));
  for (int64_t i = 0; i < batch_.snapshot_count; ++i)
    ::new (static_cast<void*>(snapshots_ + i)) PlannedSnapshot(batch_.snapshots[i]);
  const lla_index* arrays[kPlanArrays] = {&rows_.offsets, &rows_.counts, &rows_.slot_in, &rows_.slot_out,
                                          &rows_.expected_positions};
  for (int i = 0; i < kPlanArrays; ++i) {
    const lla_index& array = *arrays[i];
    if (!array.data) continue;
    if (array.location == LLA_DEVICE) {
      views_[i] = {array.data, array.dtype == LLA_I32};
      continue;
    }
    const int64_t entries = count + (i == 0);
    int64_t* copy = reinterpret_cast<int64_t*>(at);
    for (int64_t b = 0; b < entries; ++b) copy[b] = index_at(array, b);
    views_[i] = {batch_.device_memory + layout.request + (at - batch_.request), 0};
    at += entries * static_cast<int64_t>(sizeof(int64_t));
  }
  batch_.spares = reinterpret_cast<int32_t*>(at);
  bytes_ = at - batch_.request;

  int64_t first_nodes = 0, first_rows = 0;
  for (int64_t b = 0; b < count; ++b) {
    SequenceRecord& record = batch_.records[b];
    Allotment& allotment = *::new (static_cast<void*>(batch_.allotments + b)) Allotment;
    record.most_rows = is_padding(b) ? 0 : std::min(record.most_rows, batch_.view.total_rows);
    longest_rows_ = std::max(longest_rows_, record.most_rows);
    if (!state_) continue;
    int64_t snapshots = 0;
    for (int64_t i = record.first_snapshot; i >= 0; i = batch_.snapshots[i].next) ++snapshots;
    allotment.first_snapshot = static_cast<int32_t>(record.first_snapshot);
    allotment.first_rows = static_cast<int32_t>(first_rows);
    first_rows += 2 * (1 + snapshots);
    batch_.may_fork = batch_.may_fork || snapshots > 0 ||
                      (batch_.slots_known ? !is_padding(b) && !record.in_place() : rows_.slot_out.data != nullptr);
    if (is_padding(b)) continue;
    const StatePlan& plan = state_->plan();
    int64_t low = 0, high = plan.max_length;
    if (batch_.slots_known) state_->position_range(record.slot_in, &low, &high);
    if (rows_.expected_positions.data && !lies_on_device(rows_.expected_positions)) {
      const int64_t expected = index_at(rows_.expected_positions, b);
      if (expected >= low && expected <= high) low = high = expected;
    }
    const int64_t borders = most_borders(plan, record.most_rows, low, high, snapshots);
    allotment.first_nodes = static_cast<int32_t>(first_nodes);
    allotment.nodes = static_cast<int32_t>(borders);
    allotment.spares = static_cast<int32_t>(most_fresh_nodes(plan, record.most_rows, borders));
    first_nodes += borders;
    most_nodes_ = std::max(most_nodes_, borders);
    if (first_nodes > batch_.nodes_capacity)
      return fail(error_, LLA_INVALID_ARGUMENT,
                  "sequence %lld: with counts on the device each sequence may have %lld rows, and together they may cross more "
                  "borders of chunks than max_rows %lld allows: set max_rows_per_sequence",
                  ll(b), ll(record.most_rows), ll(batch_.limits.rows));
  }
  return LLA_OK;
}

lla_status DevicePlanner::take_spares() {
  for (int64_t b = 0; b < batch_.view.count; ++b) {
    Allotment& allotment = batch_.allotments[b];
    allotment.first_spare = static_cast<int32_t>(batch_.spare_count);
    for (int32_t i = 0; i < allotment.spares; ++i) {
      const int32_t id = state_->take_node();
      if (id < 0)
        return fail(error_, LLA_NO_BLOCKS,
                    "sequence %lld: the state's %lld node blocks are all in use or set aside for batches that are not settled",
                    ll(b), ll(state_->plan().node_blocks));
      batch_.spares[batch_.spare_count++] = id;
    }
  }
  bytes_ += batch_.spare_count * static_cast<int64_t>(sizeof(int32_t));
  return LLA_OK;
}

lla_status DevicePlanner::send_records() {
  if (!batch_.slots_known) {
    const auto every = [](int64_t slot) { return slot; };
    return state_->send_records(state_->plan().slots, every, stream_, error_);
  }
  return send_records_of(batch_, stream_, error_);
}

void DevicePlanner::set_view(BatchView* view, const char* base, const DeviceLayout& layout) const {
  *view = batch_.view;
  widen(&batch_, view);
  view->sequences = reinterpret_cast<const Sequence*>(base + layout.sequences);
  view->slack = reinterpret_cast<const RowRange*>(base + layout.slack);
  if (batch_.limits.replay) return;
  view->most_rows = std::min(view->most_rows, longest_rows_);
  view->most_nodes_to_store = std::min(view->most_nodes_to_store, most_nodes_);
  view->most_tail_to_store = view->most_conv_to_store = state_ ? 1 + batch_.snapshot_count : 0;
}

lla_status DevicePlanner::send() {
  const Context& context = *batch_.context;
  const DeviceLayout layout(batch_.limits);
  char* base = batch_.device_memory;
  set_view(&batch_.device_view, base, layout);
  const int32_t sent =
      context.device->upload(base + layout.request, batch_.request, static_cast<size_t>(bytes_), stream_);
  LLA_TRY(device_status(context, sent, "the plan cannot be sent", error_));
  const auto there = [&](const void* at) { return base + layout.request + (static_cast<const char*>(at) - batch_.request); };
  PlanRequest request;
  if (state_) request.shape = state_->plan();
  request.count = batch_.view.count;
  request.total_rows = batch_.view.total_rows;
  request.rows_per_sequence = batch_.uniform_rows;
  request.most_rows = batch_.limits.rows_per_sequence;
  request.longest = state_ || batch_.limits.length != kAnyLength ? batch_.limits.length : batch_.limits.rows_per_sequence;
  request.offsets = views_[0];
  request.counts = views_[1];
  request.slot_in = views_[2];
  request.slot_out = views_[3];
  request.expected_positions = views_[4];
  request.allotments = reinterpret_cast<const Allotment*>(there(batch_.allotments));
  request.spares = reinterpret_cast<const int32_t*>(there(batch_.spares));
  request.snapshot_count = batch_.snapshot_count;
  request.snapshots = reinterpret_cast<PlannedSnapshot*>(there(snapshots_));
  request.records = state_ ? state_->device_records() : nullptr;
  request.sequences = reinterpret_cast<Sequence*>(base + layout.sequences);
  request.planned = reinterpret_cast<PlannedSequence*>(base + layout.planned);
  request.nodes = reinterpret_cast<NodesToStore*>(base + layout.nodes);
  request.rows = reinterpret_cast<RowsToStore*>(base + layout.rows);
  request.slack = reinterpret_cast<RowRange*>(base + layout.slack);
  batch_.device_snapshots = request.snapshots;
  return device_status(context, context.device->plan(&request, stream_), "the plan cannot be made", error_);
}

}  // namespace

lla_status send_records_of(const Batch& batch, void* stream, lla_error* error) noexcept {
  const int64_t count = batch.view.count;
  const auto slot_of = [&](int64_t i) {
    if (i >= 2 * count) return batch.snapshots[i - 2 * count].slot;
    const SequenceRecord& record = batch.records[i / 2];
    return i % 2 == 0 ? record.slot_in : record.slot_out;  // padding: -1
  };
  return batch.state->send_records(2 * count + batch.snapshot_count, slot_of, stream, error);
}

lla_status plan_on_device(Batch* batch, const lla_rows& rows, void* stream, lla_error* error) noexcept {
  return DevicePlanner(batch, rows, stream, error).run();
}

}  // namespace lla
