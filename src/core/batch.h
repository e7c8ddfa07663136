// SPDX-License-Identifier: Apache-2.0
// Batch: the plan of one step, in the caller's memory. Turns rows and slots into sequences with block ids.
#pragma once

#include <cstdint>

#include "core/state.h"
#include "lla/batch.h"
#include "plugin/problem.h"

namespace lla {

enum class BatchPhase : int32_t { Empty, Planned, Spent };

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
// Checks and plans. On failure the batch is Empty and the state as it was. The slots of `gradient_state` that receive
// initial gradients take their shape now, and discard_batch does not undo that.
// Sequences without rows store nothing: commit_batch copies a fork or a snapshot that adds no row by itself.
lla_status plan_batch(Batch* batch, State* state, const lla_rows& rows, State* gradient_state, void* stream,
                      lla_error* error) noexcept;
void discard_batch(Batch* batch) noexcept;
// Gives fresh node blocks and reservations of a plan with a state back; returns how many blocks went back to the pool.
int64_t release_plan(Batch* batch) noexcept;
// Whether forward may run now: planned with this state, and no slot has moved since.
lla_status check_batch(const Batch& batch, const State* state, lla_error* error) noexcept;
lla_status commit_batch(State* state, Batch* batch, const lla_index& accepted, void* stream,
                        lla_error* error) noexcept;
lla_status settle_batch(State* state, Batch* batch, const lla_index& accepted, int64_t* released, lla_error* error) noexcept;

// Element i of an index array, whatever its type.
inline int64_t index_at(const lla_index& index, int64_t i) {
  return index.dtype == LLA_I32 ? static_cast<const int32_t*>(index.data)[i] : static_cast<const int64_t*>(index.data)[i];
}
// Checks dtype and location of an index array that is given.
lla_status check_index(const lla_index& index, const char* name, lla_error* error) noexcept;

}  // namespace lla
