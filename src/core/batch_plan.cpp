// SPDX-License-Identifier: Apache-2.0
// Planning a batch: checks the caller's arrays entry by entry, then says which blocks receive which nodes and rows. Nothing
// outside the batch changes before everything is checked.
#include <algorithm>
#include <new>

#include "core/batch.h"
#include "core/batch_records.h"
#include "core/checked.h"
#include "core/error.h"
#include "core/fenwick.h"
#include "core/gradient_plan.h"

namespace lla {

namespace {

long long ll(int64_t x) { return static_cast<long long>(x); }

}  // namespace

class BatchPlanner {
 public:
  BatchPlanner(Batch* batch, State* state, const lla_rows& rows, State* gradient, void* stream, lla_error* error)
      : batch_(*batch), state_(state), rows_(rows), gradient_(gradient), stream_(stream), error_(error) {}

  lla_status run() {
    batch_.phase = BatchPhase::Empty;
    batch_.state = state_;
    batch_.gradient_state = gradient_;
    batch_.nodes_used = batch_.rows_used = batch_.snapshot_count = batch_.released = batch_.spare_count = 0;
    batch_.view = BatchView();
    batch_.on_device = false;
    for (const lla_index* array :
         {&rows_.offsets, &rows_.counts, &rows_.slot_in, &rows_.slot_out, &rows_.expected_positions})
      batch_.on_device = batch_.on_device || lies_on_device(*array);
    batch_.slots_known = !state_ || (!lies_on_device(rows_.slot_in) && !lies_on_device(rows_.slot_out));
    batch_.may_fork = batch_.collected = false;
    batch_.faults = 0;
    batch_.changes = state_ ? state_->changes() : 0;
    batch_.unknown_commits = state_ ? state_->unknown_commits() : 0;
    lla_status status = check();
    if (status == LLA_OK && batch_.on_device) status = plan_on_device(&batch_, rows_, stream_, error_);
    if (status == LLA_OK && state_ && !batch_.on_device) {
      status = plan_stores();
      if (status == LLA_OK && gradient_) status = plan_gradients(&batch_, rows_, stream_, error_);
    }
    if (status == LLA_OK && batch_.context->device && !batch_.on_device) status = upload_plan(&batch_, stream_, error_);
    if (state_) {
      if (status == LLA_OK)
        reserve();
      else
        release_plan(&batch_);
    }
    if (status != LLA_OK) {
      batch_.state = batch_.gradient_state = nullptr;
      batch_.view = BatchView();
      return status;
    }
    batch_.phase = BatchPhase::Planned;
    return LLA_OK;
  }

 private:
  lla_status check();
  lla_status check_arguments();
  lla_status check_rows();
  lla_status check_total(int64_t end);
  lla_status check_places(int64_t b);
  lla_status check_state_slots(int64_t b);
  lla_status check_destination(const char* name, int64_t entry, int64_t slot, bool in_place);
  lla_status check_snapshots();
  void list_slack();

  lla_status plan_stores();
  void reserve();

  Batch& batch_;
  State* state_;
  const lla_rows& rows_;
  State* gradient_;
  void* stream_;
  lla_error* error_;
  uint64_t stamp_ = 0;
};

// ---- checks -------------------------------------------------------------------------------------------------------------

lla_status BatchPlanner::check() {
  LLA_TRY(check_arguments());
  for (int64_t b = 0; b < rows_.sequences; ++b) {
    batch_.sequences[b] = Sequence();
    batch_.records[b] = SequenceRecord();
    batch_.sequences[b].index = b;
  }
  LLA_TRY(check_rows());
  batch_.view.sequences = batch_.sequences;
  batch_.view.count = rows_.sequences;
  if (state_) stamp_ = state_->new_stamp();
  for (int64_t b = 0; b < rows_.sequences; ++b) LLA_TRY(check_places(b));
  LLA_TRY(check_snapshots());
  if (!batch_.on_device) list_slack();
  return LLA_OK;
}

lla_status BatchPlanner::check_arguments() {
  const Limits& limits = batch_.limits;
  if (state_) {
    if (state_->context() != batch_.context) return fail(error_, LLA_WRONG_CONTEXT, "state is of another context");
    if (state_->plan().kind != LLA_STATE_VALUE)
      return fail(error_, LLA_STATE_INCOMPATIBLE, "state is of kind LLA_STATE_GRADIENT: it takes no rows");
  }
  if (rows_.sequences < 0 || rows_.sequences > limits.sequences)
    return fail(error_, LLA_INVALID_ARGUMENT, "sequences = %lld is not 0 ... %lld, the batch's max_sequences",
                ll(rows_.sequences), ll(limits.sequences));
  if (rows_.snapshots < 0 || rows_.snapshots > limits.snapshots)
    return fail(error_, LLA_INVALID_ARGUMENT, "snapshots = %lld is not 0 ... %lld, the batch's max_snapshots",
                ll(rows_.snapshots), ll(limits.snapshots));
  if (rows_.rows_per_sequence < 0)
    return fail(error_, LLA_INVALID_ARGUMENT, "rows_per_sequence is negative (%lld)", ll(rows_.rows_per_sequence));
  if (rows_.total_rows < 0) return fail(error_, LLA_INVALID_ARGUMENT, "total_rows is negative (%lld)", ll(rows_.total_rows));
  const struct {
    const char* name;
    const lla_index& index;
    bool needs_state;
  } arrays[] = {{"offsets", rows_.offsets, false},
                {"counts", rows_.counts, false},
                {"slot_in", rows_.slot_in, true},
                {"slot_out", rows_.slot_out, true},
                {"expected_positions", rows_.expected_positions, false},
                {"snapshot_sequences", rows_.snapshot_sequences, true},
                {"snapshot_rows", rows_.snapshot_rows, true},
                {"snapshot_slots", rows_.snapshot_slots, true},
                {"initial_gradient_slots", rows_.initial_gradient_slots, true},
                {"final_gradient_slots", rows_.final_gradient_slots, true}};
  for (const auto& array : arrays) {
    if (!array.index.data) continue;
    LLA_TRY(check_index(array.index, array.name, &array - arrays < kPlanArrays ? batch_.context : nullptr, error_));
    if (array.needs_state && !state_) return fail(error_, LLA_INVALID_ARGUMENT, "%s is given, but no state", array.name);
  }
  if (batch_.on_device && gradient_)
    return fail(error_, LLA_UNSUPPORTED, "gradient_state is given, but arrays are in device memory");
  if (lies_on_device(rows_.offsets) && rows_.total_rows == 0)
    return fail(error_, LLA_INVALID_ARGUMENT, "total_rows is not given, but offsets are in device memory");
  if (rows_.snapshots > 0) {
    for (size_t i = 5; i < 8; ++i) {
      if (!arrays[i].index.data)
        return fail(error_, LLA_NULL_POINTER, "snapshots = %lld, but %s is not given", ll(rows_.snapshots), arrays[i].name);
    }
  }
  if (!rows_.slot_in.data && state_ && rows_.sequences > state_->plan().slots)
    return fail(error_, LLA_INVALID_ARGUMENT, "sequences = %lld, but without slot_in the state's %lld slots allow no more",
                ll(rows_.sequences), ll(state_->plan().slots));
  if (!gradient_) {
    for (size_t i = 8; i < 10; ++i) {
      if (arrays[i].index.data) return fail(error_, LLA_NULL_POINTER, "%s is given, but no gradient_state", arrays[i].name);
    }
    return LLA_OK;
  }
  return check_gradient_state(state_, *gradient_, error_);
}

// Where each sequence's rows lie.
lla_status BatchPlanner::check_rows() {
  const Limits& limits = batch_.limits;
  const bool ragged = rows_.offsets.data != nullptr;
  int64_t end = 0;  // of the rows so far
  if (!ragged) {
    const Size all = Size(rows_.sequences) * rows_.rows_per_sequence;
    if (!all.valid() || all.value() > limits.rows)
      return fail(error_, LLA_INVALID_ARGUMENT,
                  "%lld sequences of rows_per_sequence = %lld exceed the batch's max_rows %lld", ll(rows_.sequences),
                  ll(rows_.rows_per_sequence), ll(limits.rows));
    end = all.value();
  }
  const bool counted = rows_.counts.data && !lies_on_device(rows_.counts);
  for (int64_t b = 0; b < rows_.sequences; ++b) {
    if (lies_on_device(rows_.offsets)) {
      const int64_t count = counted ? index_at(rows_.counts, b) : limits.rows_per_sequence;
      if (count < 0 || count > limits.rows_per_sequence)
        return fail(error_, LLA_INVALID_ARGUMENT, "counts[%lld] = %lld is not 0 ... %lld, the batch's max_rows_per_sequence",
                    ll(b), ll(count), ll(limits.rows_per_sequence));
      batch_.records[b].most_rows = count;
      continue;
    }
    const int64_t begin = ragged ? index_at(rows_.offsets, b) : b * rows_.rows_per_sequence;
    const int64_t next = ragged ? index_at(rows_.offsets, b + 1) : begin + rows_.rows_per_sequence;
    if (begin < 0) return fail(error_, LLA_INVALID_ARGUMENT, "offsets[%lld] = %lld is negative", ll(b), ll(begin));
    if (next < begin)
      return fail(error_, LLA_INVALID_ARGUMENT, "offsets[%lld] = %lld is less than offsets[%lld] = %lld", ll(b + 1),
                  ll(next), ll(b), ll(begin));
    if (next > limits.rows)
      return fail(error_, LLA_INVALID_ARGUMENT, "offsets[%lld] = %lld exceeds the batch's max_rows %lld", ll(b + 1),
                  ll(next), ll(limits.rows));
    const bool unknown = lies_on_device(rows_.counts);
    const int64_t count = counted   ? index_at(rows_.counts, b)
                          : unknown ? std::min(next - begin, limits.rows_per_sequence)
                                    : next - begin;
    if (count < 0) return fail(error_, LLA_INVALID_ARGUMENT, "counts[%lld] = %lld is negative", ll(b), ll(count));
    if (count > next - begin)
      return fail(error_, LLA_INVALID_ARGUMENT, "counts[%lld] = %lld exceeds the %lld rows up to the next sequence", ll(b),
                  ll(count), ll(next - begin));
    if (count > limits.rows_per_sequence)
      return fail(error_, LLA_INVALID_ARGUMENT,
                  "sequence %lld has %lld rows, more than the batch's max_rows_per_sequence %lld", ll(b), ll(count),
                  ll(limits.rows_per_sequence));
    batch_.sequences[b].row_begin = begin;
    batch_.sequences[b].rows = batch_.records[b].most_rows = count;
    if (ragged) end = next;
  }
  return check_total(end);
}

// The length of the row axis, where the sequences end at `end`.
lla_status BatchPlanner::check_total(int64_t end) {
  const Limits& limits = batch_.limits;
  const int64_t total = rows_.total_rows ? rows_.total_rows : end;
  if (total < end)
    return fail(error_, LLA_INVALID_ARGUMENT, "total_rows = %lld, but the sequences end at row %lld", ll(total), ll(end));
  if (total > limits.rows)
    return fail(error_, LLA_INVALID_ARGUMENT, "total_rows = %lld exceeds the batch's max_rows %lld", ll(total),
                ll(limits.rows));
  batch_.view.total_rows = total;
  batch_.uniform = !rows_.offsets.data;
  batch_.uniform_rows = batch_.uniform ? rows_.rows_per_sequence : 0;
  return LLA_OK;
}

// Where sequence b stands, and what it may become.
lla_status BatchPlanner::check_places(int64_t b) {
  Sequence& sequence = batch_.sequences[b];
  if (batch_.on_device) return state_ && batch_.slots_known ? check_state_slots(b) : LLA_OK;
  const bool expected = rows_.expected_positions.data != nullptr;
  int64_t longest = batch_.limits.length;
  if (state_) {
    LLA_TRY(check_state_slots(b));
    if (sequence.padding) {
      sequence.rows = 0;
      return LLA_OK;
    }
    sequence.history = state_->record(batch_.records[b].slot_in).image;
    sequence.position = sequence.history.position;
    if (expected && index_at(rows_.expected_positions, b) != sequence.position)
      return fail(error_, LLA_POSITION_MISMATCH, "expected_positions[%lld] = %lld, but slot %lld stands at %lld", ll(b),
                  ll(index_at(rows_.expected_positions, b)), ll(batch_.records[b].slot_in), ll(sequence.position));
    if (sequence.position + sequence.rows > state_->plan().max_length)
      return fail(error_, LLA_LEVELS_EXCEEDED,
                  "sequence %lld: %lld rows after position %lld exceed the state's max_length %lld", ll(b),
                  ll(sequence.rows), ll(sequence.position), ll(state_->plan().max_length));
  } else {
    sequence.position = expected ? index_at(rows_.expected_positions, b) : 0;
    if (sequence.position < 0)
      return fail(error_, LLA_INVALID_ARGUMENT, "expected_positions[%lld] = %lld is negative", ll(b), ll(sequence.position));
    sequence.history.position = sequence.history.start = sequence.position;
    if (longest == kAnyLength) longest = batch_.limits.rows_per_sequence;
  }
  if (sequence.position > longest - sequence.rows)
    return fail(error_, LLA_LEVELS_EXCEEDED,
                "sequence %lld: %lld rows after position %lld exceed the batch's max_length %lld", ll(b), ll(sequence.rows),
                ll(sequence.position), ll(longest));
  return LLA_OK;
}

lla_status BatchPlanner::check_state_slots(int64_t b) {
  SequenceRecord& record = batch_.records[b];
  const int64_t slots = state_->plan().slots;
  const int64_t in = rows_.slot_in.data ? index_at(rows_.slot_in, b) : b;
  if (in < -1 || in >= slots)
    return fail(error_, LLA_INVALID_ARGUMENT, "slot_in[%lld] = %lld is not below the state's %lld slots", ll(b), ll(in),
                ll(slots));
  const int64_t out = rows_.slot_out.data ? index_at(rows_.slot_out, b) : in;
  if (in == -1) {
    if (out != -1)
      return fail(error_, LLA_INVALID_ARGUMENT, "slot_out[%lld] = %lld, but slot_in[%lld] = -1: padding", ll(b), ll(out),
                  ll(b));
    batch_.sequences[b].padding = true;
    return LLA_OK;
  }
  record.slot_in = in;
  record.slot_out = out;
  if (!batch_.on_device) {
    LLA_TRY(state_->check_current(in, "slot_in", error_));
    if (out >= 0 && out < slots) LLA_TRY(state_->check_current(out, "slot_out", error_));
  }
  LLA_TRY(check_destination("slot_out", b, out, in == out));
  record.version_in = state_->record(in).version;
  record.version_out = state_->record(out).version;
  return LLA_OK;
}

lla_status BatchPlanner::check_destination(const char* name, int64_t entry, int64_t slot, bool in_place) {
  if (slot < 0 || slot >= state_->plan().slots)
    return fail(error_, LLA_INVALID_ARGUMENT, "%s[%lld] = %lld is not one of the state's %lld slots", name, ll(entry),
                ll(slot), ll(state_->plan().slots));
  SlotRecord& record = state_->record(slot);
  if (record.mark == stamp_)
    return fail(error_, LLA_INVALID_ARGUMENT, "%s[%lld] = %lld receives another sequence or snapshot already", name,
                ll(entry), ll(slot));
  record.mark = stamp_;
  if (record.reserved || (!in_place && record.appends > 0))
    return fail(error_, LLA_SLOT_IN_USE, "%s[%lld] = %lld is reserved by another planned batch", name, ll(entry), ll(slot));
  if (!in_place && state_->is_current(slot) && !record.holds_nothing())
    return fail(error_, LLA_SLOT_IN_USE, "%s[%lld] = %lld is not empty", name, ll(entry), ll(slot));
  return LLA_OK;
}

// Also hangs each snapshot into its sequence's list, which rises by rows.
lla_status BatchPlanner::check_snapshots() {
  for (int64_t i = 0; i < rows_.snapshots; ++i) {
    SnapshotRecord snapshot;
    snapshot.sequence = index_at(rows_.snapshot_sequences, i);
    snapshot.rows = index_at(rows_.snapshot_rows, i);
    snapshot.slot = index_at(rows_.snapshot_slots, i);
    if (snapshot.sequence < 0 || snapshot.sequence >= rows_.sequences)
      return fail(error_, LLA_INVALID_ARGUMENT, "snapshot_sequences[%lld] = %lld is not one of the %lld sequences", ll(i),
                  ll(snapshot.sequence), ll(rows_.sequences));
    const Sequence& sequence = batch_.sequences[snapshot.sequence];
    if (sequence.padding)
      return fail(error_, LLA_INVALID_ARGUMENT, "snapshot_sequences[%lld] = %lld is padding", ll(i), ll(snapshot.sequence));
    const int64_t most = batch_.records[snapshot.sequence].most_rows;
    if (snapshot.rows < 0 || snapshot.rows > most)
      return fail(error_, LLA_INVALID_ARGUMENT, "snapshot_rows[%lld] = %lld is not 0 ... %lld, the rows of sequence %lld",
                  ll(i), ll(snapshot.rows), ll(most), ll(snapshot.sequence));
    if (!batch_.on_device && snapshot.slot >= 0 && snapshot.slot < state_->plan().slots)
      LLA_TRY(state_->check_current(snapshot.slot, "snapshot_slots", error_));
    LLA_TRY(check_destination("snapshot_slots", i, snapshot.slot, false));
    snapshot.version = state_->record(snapshot.slot).version;
    int64_t* link = &batch_.records[snapshot.sequence].first_snapshot;
    while (*link >= 0 && batch_.snapshots[*link].rows <= snapshot.rows) link = &batch_.snapshots[*link].next;
    snapshot.next = *link;
    *link = i;
    batch_.snapshots[i] = snapshot;
    batch_.snapshot_count = i + 1;
  }
  return LLA_OK;
}

void BatchPlanner::list_slack() {
  int64_t cursor = 0, count = 0;
  for (int64_t b = 0; b < rows_.sequences; ++b) {
    const Sequence& sequence = batch_.sequences[b];
    if (sequence.padding || sequence.rows == 0) continue;
    if (sequence.row_begin > cursor) batch_.slack[count++] = {cursor, sequence.row_begin};
    cursor = sequence.row_begin + sequence.rows;
  }
  if (cursor < batch_.view.total_rows) batch_.slack[count++] = {cursor, batch_.view.total_rows};
  batch_.view.slack = batch_.slack;
  batch_.view.slack_count = count;
}

// ---- what is stored where -----------------------------------------------------------------------------------------------

lla_status BatchPlanner::plan_stores() {
  for (int64_t b = 0; b < rows_.sequences; ++b) {
    Sequence& sequence = batch_.sequences[b];
    if (sequence.padding) continue;
    SequenceRecord& record = batch_.records[b];
    const auto take = [&] { return state_->take_node(); };
    if (!store_sequence(&batch_, state_, b, take))
      return fail(error_, LLA_NO_BLOCKS, "sequence %lld: the state's %lld node blocks are all in use", ll(b),
                  ll(state_->plan().node_blocks));
    record.rows = sequence.rows;
    record.position = sequence.position;
  }
  return LLA_OK;
}

void BatchPlanner::reserve() {
  for (int64_t b = 0; b < rows_.sequences; ++b) {
    SequenceRecord& record = batch_.records[b];
    if (batch_.sequences[b].padding || !batch_.slots_known) continue;
    SlotRecord& slot = state_->record(record.slot_out);
    if (record.in_place())
      ++slot.appends;
    else
      slot.reserved = true;
    record.reserved = true;
  }
  for (int64_t i = 0; i < batch_.snapshot_count; ++i) {
    state_->record(batch_.snapshots[i].slot).reserved = true;
    batch_.snapshots[i].reserved = true;
  }
}

lla_status plan_batch(Batch* batch, State* state, const lla_rows& rows, State* gradient_state, void* stream,
                      lla_error* error) noexcept {
  if (batch->phase == BatchPhase::Pending)
    return fail(error, LLA_BUSY, "batch: its commit is not settled: lla_state_settle() comes before the next plan");
  discard_batch(batch);
  return BatchPlanner(batch, state, rows, gradient_state, stream, error).run();
}

}  // namespace lla
