// SPDX-License-Identifier: Apache-2.0
// Records of slots on the device, and plans and commits that are made there: one thread for each sequence. The arithmetic is
// the core's own (plugin/plan_rows.h).
#include "cuda/plan_rows.h"

#include "cuda/common/platform.h"
#include "plugin/host_device.h"

namespace lla::cuda {
namespace {

constexpr int kThreads = 64;
constexpr int kCommitThreads = 256;

// ---- records ------------------------------------------------------------------------------------------------------------

constexpr int kImagesInParcel = 15;

struct RecordParcel {
  SlotImage images[kImagesInParcel];
  int32_t slots[kImagesInParcel];
};

__global__ void __launch_bounds__(kThreads) unpack_records(SlotImage* records, const __grid_constant__ RecordParcel parcel,
                                                          int count) {
  constexpr int kWords = sizeof(SlotImage) / 8;
  static_assert(sizeof(SlotImage) % 8 == 0);
  for (int i = threadIdx.x; i < count * kWords; i += kThreads) {
    const uint64_t* from = reinterpret_cast<const uint64_t*>(parcel.images + i / kWords);
    reinterpret_cast<uint64_t*>(records + parcel.slots[i / kWords])[i % kWords] = from[i % kWords];
  }
}

// ---- plan ---------------------------------------------------------------------------------------------------------------

struct Spares {
  const int32_t* ids;
  int32_t left;
  __device__ int32_t operator()() { return left-- > 0 ? *ids++ : -1; }
};

struct BlockOfSlot {
  const SlotImage* records;
  __device__ int32_t operator()(int64_t slot) const { return records[slot].tail; }
};

__device__ inline int64_t source_of(const PlanRequest& r, int64_t b) { return r.slot_in.present() ? r.slot_in.at(b) : b; }
__device__ inline int64_t destination_of(const PlanRequest& r, int64_t b) {
  return r.slot_out.present() ? r.slot_out.at(b) : source_of(r, b);
}

// Where the sequence's rows lie.
__device__ inline uint32_t read_rows(const PlanRequest& r, int64_t b, int64_t* begin, int64_t* rows) {
  const bool ragged = r.offsets.present();
  const int64_t first = ragged ? r.offsets.at(b) : b * r.rows_per_sequence;
  const int64_t next = ragged ? r.offsets.at(b + 1) : first + r.rows_per_sequence;
  bool good = first >= 0 && next >= first && next <= r.total_rows;
  int64_t highest = first;
  if (ragged) {  // beyond every sequence before it, good or bad
    for (int64_t a = 0; a < b; ++a) highest = r.offsets.at(a) > highest ? r.offsets.at(a) : highest;
  }
  good = good && highest == first;
  // Kernels look rows up by where sequences begin: that rises, whatever stands in the array.
  *begin = highest < 0 ? 0 : lesser(highest, r.total_rows);
  if (!good) return LLA_FAULT_ROWS;
  const int64_t count = r.counts.present() ? r.counts.at(b) : next - first;
  if (count < 0 || count > next - first || count > r.most_rows) return LLA_FAULT_ROWS;
  *rows = count;
  return 0;
}

// Slots of the sequence; -1 both: padding.
__device__ inline uint32_t read_slots(const PlanRequest& r, int64_t b, int32_t first_snapshot, int64_t* in, int64_t* out) {
  const int64_t source = source_of(r, b), destination = destination_of(r, b);
  if (source < -1 || source >= r.shape.slots) return LLA_FAULT_SLOT;
  if (source == -1) return destination == -1 ? 0 : LLA_FAULT_SLOT;
  if (destination < 0 || destination >= r.shape.slots) return LLA_FAULT_SLOT;
  *in = source;
  *out = destination;
  bool twice = false;
  for (int64_t a = 0; a < r.count; ++a) {
    const int64_t other = destination_of(r, a);
    twice = twice || (other == destination && a != b);
    for (int64_t i = first_snapshot; i >= 0; i = r.snapshots[i].next) twice = twice || other == r.snapshots[i].slot;
  }
  for (int64_t i = 0; i < r.snapshot_count; ++i) twice = twice || r.snapshots[i].slot == destination;
  if (source != destination && !holds_nothing(r.records[destination])) twice = true;
  for (int64_t i = first_snapshot; i >= 0; i = r.snapshots[i].next) twice = twice || !holds_nothing(r.records[r.snapshots[i].slot]);
  return twice ? LLA_FAULT_DESTINATION : 0;
}

__device__ inline uint32_t read_place(const PlanRequest& r, int64_t b, const Allotment& allotment, Sequence* sequence,
                               PlannedSequence* planned) {
  const bool expected = r.expected_positions.present();
  int64_t longest = r.longest;
  uint32_t faults = read_rows(r, b, &sequence->row_begin, &sequence->rows);
  if (r.records) {
    faults |= read_slots(r, b, allotment.first_snapshot, &planned->slot_in, &planned->slot_out);
    if (planned->slot_in < 0) {  // padding, or no slot
      sequence->padding = true;
      return (faults & LLA_FAULT_SLOT) | (allotment.first_snapshot >= 0 ? LLA_FAULT_SNAPSHOT : 0);
    }
    sequence->history = r.records[planned->slot_in];
    sequence->position = sequence->history.position;
    if (expected && r.expected_positions.at(b) != sequence->position) faults |= LLA_FAULT_POSITION;
    longest = lesser(longest, r.shape.max_length);
  } else {
    sequence->position = expected ? r.expected_positions.at(b) : 0;
    if (sequence->position < 0) faults |= LLA_FAULT_POSITION;
    sequence->history.position = sequence->history.start = sequence->position;
  }
  if (sequence->position > longest - sequence->rows) faults |= LLA_FAULT_LENGTH;
  for (int64_t i = allotment.first_snapshot; i >= 0; i = r.snapshots[i].next) {
    if (r.snapshots[i].rows > sequence->rows) faults |= LLA_FAULT_SNAPSHOT;
  }
  return faults;
}

__device__ inline uint32_t store_plan(const PlanRequest& r, const Allotment& allotment, Sequence* sequence, PlannedSequence* planned) {
  Spares spares{r.spares + allotment.first_spare, allotment.spares};
  NodesToStore* nodes = r.nodes + allotment.first_nodes;
  const NodesPlanned stored = plan_nodes(r.shape, *sequence, r.snapshots, allotment.first_snapshot, nodes, spares);
  if (!stored.complete) return LLA_FAULT_BLOCKS;
  sequence->nodes_to_store = nodes;
  sequence->nodes_to_store_count = stored.count;
  RowsToStore* rows = r.rows + allotment.first_rows;
  const RowsPlanned count = plan_rows(r.shape, *sequence, planned, r.snapshots, rows, BlockOfSlot{r.records});
  sequence->tail_to_store = rows;
  sequence->tail_to_store_count = count.tail;
  sequence->conv_to_store = rows + count.tail;
  sequence->conv_to_store_count = count.conv;
  return 0;
}

__global__ void __launch_bounds__(kThreads) plan_sequences(const __grid_constant__ PlanRequest r) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b >= r.count) return;
  const Allotment allotment = r.allotments[b];
  Sequence& sequence = r.sequences[b];
  PlannedSequence& planned = r.planned[b];
  sequence = Sequence();
  planned = PlannedSequence();
  sequence.index = b;
  planned.first_snapshot = allotment.first_snapshot;
  uint32_t faults = read_place(r, b, allotment, &sequence, &planned);
  if (faults == 0 && r.records && !sequence.padding) faults = store_plan(r, allotment, &sequence, &planned);
  if (faults != 0) {
    const int64_t begin = sequence.row_begin;
    sequence = Sequence();
    sequence.index = b;
    sequence.row_begin = begin;
    sequence.padding = true;
  }
  if (sequence.padding) sequence.rows = 0;
  planned.rows = sequence.rows;
  planned.position = sequence.position;
  planned.faults = faults;
}

// Rows of no live sequence: entry b ends where sequence b begins, the last one at the end of the row axis. Live sequences rise.
__global__ void __launch_bounds__(kThreads) plan_slack(const __grid_constant__ PlanRequest r) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b > r.count) return;
  const bool at_end = b == r.count;
  RowRange range;
  if (at_end || r.planned[b].rows > 0) {
    int64_t before = b - 1;
    while (before >= 0 && r.planned[before].rows == 0) --before;
    range.begin = before < 0 ? 0 : r.sequences[before].row_begin + r.sequences[before].rows;
    range.end = at_end ? r.total_rows : r.sequences[b].row_begin;
  }
  r.slack[b] = range;
}

// ---- commit -------------------------------------------------------------------------------------------------------------

// Whether all slots are what the plan saw.
__device__ inline bool unmoved(const CommitRequest& r, const Sequence& sequence, const PlannedSequence& planned) {
  if (!same_image(r.records[planned.slot_in], sequence.history)) return false;
  if (!planned.in_place() && !holds_nothing(r.records[planned.slot_out])) return false;
  for (int64_t i = planned.first_snapshot; i >= 0; i = r.snapshots[i].next) {
    if (!holds_nothing(r.records[r.snapshots[i].slot])) return false;
  }
  return true;
}

// One block: every slot is looked at before the first one changes.
__global__ void __launch_bounds__(kCommitThreads) commit_sequences(const __grid_constant__ CommitRequest r) {
  for (int64_t b = threadIdx.x; b < r.count; b += kCommitThreads) {
    const Sequence& sequence = r.sequences[b];
    PlannedSequence& planned = r.planned[b];
    planned.accepted = 0;
    if (sequence.padding) continue;
    const int64_t accepted = r.accepted.present() ? r.accepted.at(b) : sequence.rows;
    if (!can_accept(r.shape, sequence.rows, accepted)) planned.faults |= LLA_FAULT_ACCEPTED;
    if (!unmoved(r, sequence, planned)) planned.faults |= LLA_FAULT_MOVED;
    if (planned.faults == 0) planned.accepted = accepted;
  }
  __syncthreads();
  for (int64_t b = threadIdx.x; b < r.count; b += kCommitThreads) {
    const Sequence& sequence = r.sequences[b];
    const PlannedSequence& planned = r.planned[b];
    if (sequence.padding || planned.faults != 0) continue;
    for_destinations(planned, r.snapshots, planned.accepted, [&](int64_t rows, const RowPlaces& places, int64_t slot) {
      append_rows(r.shape, sequence, rows, places, r.records + slot);
    });
  }
}

constexpr int kSlices = 16;  // of a block that is copied

// Two runs of blocks for each sequence: its destinations' tails, then their convolutions.
__global__ void __launch_bounds__(kCommitThreads) copy_fork_rows(const __grid_constant__ CommitRequest r, const Pool tails,
                                                                const Pool convs, int64_t tail_bytes, int64_t conv_bytes) {
  const int64_t b = blockIdx.x / (2 * kSlices);
  const int part = static_cast<int>(blockIdx.x % (2 * kSlices));
  const Pool pool = part < kSlices ? tails : convs;
  const int64_t words = (part < kSlices ? tail_bytes : conv_bytes) / 16;
  const Sequence& sequence = r.sequences[b];
  const PlannedSequence& planned = r.planned[b];
  if (!pool.base || sequence.padding || planned.faults != 0) return;
  const uint4* source = reinterpret_cast<const uint4*>(pool.block(sequence.history.tail));
  for_destinations(planned, r.snapshots, planned.accepted, [&](int64_t rows, const RowPlaces&, int64_t slot) {
    if (rows > 0) return;
    uint4* target = reinterpret_cast<uint4*>(pool.block(r.records[slot].tail));
    if (target == source) return;
    for (int64_t i = part % kSlices * kCommitThreads + threadIdx.x; i < words; i += kSlices * kCommitThreads)
      target[i] = source[i];
  });
}

}  // namespace

int32_t put_records(SlotImage* records, const int32_t* slots, const SlotImage* images, int64_t count, void* stream) {
  for (int64_t done = 0; done < count; done += kImagesInParcel) {
    RecordParcel parcel;
    const int some = static_cast<int>(lesser(kImagesInParcel, count - done));
    for (int i = 0; i < some; ++i) {
      parcel.images[i] = images[done + i];
      parcel.slots[i] = slots[done + i];
    }
    const int32_t status = launch(unpack_records, 1, kThreads, 0, stream, records, parcel, some);
    if (status != LLA_OK) return status;
  }
  return LLA_OK;
}

int32_t plan(const PlanRequest* request, void* stream) {
  const int64_t blocks = (request->count + kThreads - 1) / kThreads;
  const int32_t status = launch(plan_sequences, blocks, kThreads, 0, stream, *request);
  return status == LLA_OK ? launch(plan_slack, request->count / kThreads + 1, kThreads, 0, stream, *request) : status;
}

int32_t commit(const CommitRequest* request, void* stream) {
  return launch(commit_sequences, request->count > 0 ? 1 : 0, kCommitThreads, 0, stream, *request);
}

int32_t copy_forks(const CommitRequest* request, const SlotMemory* layer, void* stream) {
  return launch(copy_fork_rows, request->count * 2 * kSlices, kCommitThreads, 0, stream, *request, layer->tails, layer->convs,
                layer->tail_layout.bytes(), layer->conv_layout.bytes());
}

int32_t load_plan_kernels() {
  for (const int32_t status : {load_kernel(unpack_records), load_kernel(plan_sequences), load_kernel(plan_slack),
                               load_kernel(commit_sequences), load_kernel(copy_fork_rows)}) {
    if (status != LLA_OK) return status;
  }
  return LLA_OK;
}

}  // namespace lla::cuda
