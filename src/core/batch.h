// SPDX-License-Identifier: Apache-2.0
// Batch: the plan of one step, in the caller's memory. Turns rows and slots into sequences with block ids.
#pragma once

#include <cstdint>

#include "core/state.h"
#include "lla/batch.h"
#include "plugin/problem.h"

namespace lla {

// Pending: committed on the device, not settled.
enum class BatchPhase : int32_t { Empty, Planned, Pending, Spent };

// Header at the start of the caller's memory; the arrays follow it there.
struct Batch {
  uint64_t magic = 0;  // kBatchMagic: tells a batch from random memory
  Context* context = nullptr;
  Limits limits;
  BatchPhase phase = BatchPhase::Empty;
  State* state = nullptr;           // of the plan; null: none
  State* gradient_state = nullptr;
  bool uniform = false;             // sequence b begins at row b * uniform_rows and has so many rows at most
  int64_t uniform_rows = 0;
  int64_t released = 0;             // node blocks that the commit gave back
  BatchView view;                   // what kernels see; points into the arrays

  Sequence* sequences = nullptr;            // [limits.sequences]
  struct SequenceRecord* records = nullptr; // [limits.sequences] what commit needs to know
  NodesToStore* nodes = nullptr;            // pool, filled front to back by planning
  int64_t nodes_capacity = 0, nodes_used = 0;
  RowsToStore* rows = nullptr;
  int64_t rows_capacity = 0, rows_used = 0;
  RowRange* slack = nullptr;                // [limits.sequences + 1]
  struct SnapshotRecord* snapshots = nullptr;  // [limits.snapshots]
  int64_t snapshot_count = 0;
  // On a device: the caller's memory there, the plan in it as kernels see it, and room to translate addresses.
  char* device_memory = nullptr;
  BatchView device_view;
  Sequence* translated = nullptr;  // [limits.sequences]
  // Plans and commits that are made on the device.
  bool on_device = false;          // the plan is; then `sequences` says nothing before it is settled
  bool slots_known = true;         // the host knows which slots the plan names; else it may be any
  bool may_fork = false;           // the commit may have to copy rows
  bool collected = false;          // `answers` are those of the commit
  uint32_t faults = 0;             // that the host knows of
  uint64_t changes = 0;            // of the state at the plan
  uint64_t unknown_commits = 0;
  uint64_t turn = 0;               // number of the commit
  char* request = nullptr;         // what goes to the device, see request_bytes()
  Allotment* allotments = nullptr; // in it
  int32_t* spares = nullptr;
  int64_t spare_count = 0;
  PlannedSequence* answers = nullptr;  // [limits.sequences] as they lie on the device
  int64_t* counts = nullptr;           // [limits.sequences] accepted counts on their way to the device
  bool counts_given = false;           // the commit had accepted counts
  PlannedSnapshot* device_snapshots = nullptr;
};

constexpr uint64_t kBatchMagic = 0x686374616261'6c6cu;
// Limits::length of a batch without max_length: planning then takes the state's, or max_rows_per_sequence without a state.
// For workspaces it is the longest sequence that there can be.
constexpr int64_t kAnyLength = int64_t{1} << 62;

// Fills in defaults (max_rows_per_sequence, max_length) and checks domains.
lla_status read_limits(const lla_batch_limits& limits, Limits* out, lla_error* error) noexcept;
// `device`: of a context that computes on a device.
lla_status batch_size(const Limits& limits, bool device, size_t* bytes, lla_error* error) noexcept;
lla_status init_batch(Context* context, const Limits& limits, void* memory, size_t bytes, Batch** batch,
                      lla_error* error) noexcept;
// Memory of the device that the plan needs there (0 on the CPU), and where it is.
lla_status batch_device_size(const Context& context, const Limits& limits, size_t* bytes, lla_error* error) noexcept;
lla_status bind_device_memory(Batch* batch, void* memory, size_t bytes, lla_error* error) noexcept;
// Puts a finished plan into the device's memory.
lla_status upload_plan(Batch* batch, void* stream, lla_error* error) noexcept;
// Lets the device plan: records, snapshots, total rows and the state are checked and set in the batch.
lla_status plan_on_device(Batch* batch, const lla_rows& rows, void* stream, lla_error* error) noexcept;
// Commits there. `accepted` is checked, in memory of either kind.
lla_status commit_on_device(Batch* batch, const lla_index& accepted, void* stream, lla_error* error) noexcept;
// Sends the records of the slots that a batch names, where the device does not have them.
lla_status send_records_of(const Batch& batch, void* stream, lla_error* error) noexcept;
// Brings what the device found out to the host; waits for the stream.
lla_status collect_batch(Batch* batch, void* stream, lla_error* error) noexcept;
// Checks and plans. On failure the batch is Empty and the state as it was. The slots of `gradient_state` that receive
// initial gradients take their shape now, and discard_batch does not undo that.
// Sequences without rows store nothing: commit_batch copies a fork or a snapshot that adds no row by itself.
lla_status plan_batch(Batch* batch, State* state, const lla_rows& rows, State* gradient_state, void* stream,
                      lla_error* error) noexcept;
void discard_batch(Batch* batch) noexcept;
// Gives reservations of destinations back, and fresh node blocks; returns how many blocks went back to the pool.
void release_reservations(Batch* batch) noexcept;
int64_t release_blocks(Batch* batch) noexcept;
int64_t release_plan(Batch* batch) noexcept;
// Whether forward may run now: planned with this state, and no slot has moved since.
lla_status check_batch(const Batch& batch, const State* state, lla_error* error) noexcept;
lla_status commit_batch(State* state, Batch* batch, const lla_index& accepted, void* stream,
                        lla_error* error) noexcept;
// Catches up with a commit on the device.
lla_status settle_pending(Batch* batch, const lla_index& accepted, lla_error* error) noexcept;
// Links the rows of every sequence that its record says are accepted, and gives back what the plan had set aside; returns how
// many blocks went back to the pool. `change`: the slots change now, not earlier on the device.
int64_t link_destinations(Batch* batch, bool change) noexcept;
lla_status settle_batch(State* state, Batch* batch, const lla_index& accepted, int64_t* released, lla_error* error) noexcept;

// Element i of an index array, whatever its type.
inline int64_t index_at(const lla_index& index, int64_t i) {
  return index.dtype == LLA_I32 ? static_cast<const int32_t*>(index.data)[i] : static_cast<const int64_t*>(index.data)[i];
}
// Checks dtype and location of an index array that is given. `device`: null, or the context on whose device it may lie.
lla_status check_index(const lla_index& index, const char* name, const Context* device, lla_error* error) noexcept;
inline bool lies_on_device(const lla_index& index) { return index.data && index.location == LLA_DEVICE; }

}  // namespace lla
