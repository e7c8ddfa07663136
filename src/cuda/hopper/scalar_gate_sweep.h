// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: one block of threads sweeps over one segment of a sequence, for one head and 64 columns of
// values. What the kernel's parts share: parameters, the order of tasks, shared memory.
//
// A sweep goes in blocks of 128 rows, numbered absolutely. Nodes of level b here are buckets of 2^b blocks. They are held as
// tiles of the rows' type in shared memory from their creation to their merge and never decay: the rows' weights do.
#pragma once

#include "core/checked.h"
#include "cuda/common/element.h"
#include "cuda/common/reduce.h"
#include "cuda/common/scalar_gate_routes.h"
#include "cuda/common/scratch_limit.h"
#include "cuda/common/units.h"
#include "cuda/hopper/matrix_copy.h"
#include "cuda/hopper/mbarrier.h"
#include "cuda/hopper/swizzle.h"
#include "cuda/hopper/tma.h"
#include "plugin/backend.h"

namespace lla::cuda::hopper {

constexpr int kBlockLog = 7, kBlock = 1 << kBlockLog;  // rows
constexpr int kHalf = 64;                              // rows of a warpgroup that makes outputs
constexpr int kColumns = 64;                           // values of a task
constexpr int kSweepThreads = 512;                     // warpgroups: producers, two that make outputs, one that makes nodes
constexpr int kRowWarps = 8;
constexpr int kInnerLevels = 7;      // levels 1 ... 7 lie within a block
constexpr int kMostLevels = 32;      // of nodes; the lanes of a warp hold their decays
constexpr int kMostStages = 4;       // of q, k, v
constexpr int kNodeTurns = 3;        // barriers for the node of a block: rows may lag by two, and by one more state
constexpr int kRing = 2;             // tiles for nodes from older segments and from histories
constexpr int kWhole = 30;           // segment_log of a sweep over whole sequences
constexpr int kShortSegmentLog = 3;  // blocks of the shortest segments, which fill the device with few sequences
constexpr size_t kMostShared = 232448;
constexpr uint32_t kBarrierBytes = 320;

// Factors of a block in shared memory, followed by λ[entry][128] of the nodes that the rows read: a row reads a node with
// λ start[row] newer[entry]. Linear: start alone.
struct Tables {
  // [l - 1][r]: rows whose bit l - 1 is set: scale λ of level l, times the decay from the middle of the pair's bucket into
  // the row; the others: the decay from the row to that middle, times the write strength. Their product is the mask at level
  // l.
  float level[kInnerLevels][kBlock];
  float diagonal[kBlock];    // scale λ of level 0, times the write strength
  float fold[kBlock];        // decay to the block's end, times the write strength
  float start[kBlock];       // scale, times the decay from the block's start into the row
  float merge[kMostLevels];  // decay of the node of a level to the block's end
  float newer[kMostLevels];  // of an entry, to the block's start
};

// fp16 (common/units.h), behind that: a block's write strengths are below 2^`fold`, and so are the factors of its rows.
struct Units {
  float row[kBlock];  // of a row's sums
  float node;         // 2^fold over the unit of the node that the block makes, as it is stored
  float unused[3];
};

// Places of things in shared memory. Tiles first: they need 1024 bytes. Sums are formed on the host: the kernel has no
// register to keep them in.
struct SharedLayout {
  int slots = 0;   // nodes of this segment: level b in slot min(b, slots - 1); linear: two states in turn
  int ring = 0;    // nodes of older segments
  int stages = 1;  // of q, k, v
  uint32_t node_bytes = 0, stage_bytes = 0, table_bytes = 0;
  uint32_t ring_begin = 0, q_begin = 0, k_begin = 0, v_begin = 0, staging_begin = 0, tables_begin = 0, barriers_begin = 0;
  uint32_t bytes = 0;
  bool units = false;  // fp16

  // `entries`: nodes that a row reads.
  void place(int key_dim, int entries) {
    const uint32_t k_bytes = kBlock * static_cast<uint32_t>(key_dim) * 2;
    node_bytes = static_cast<uint32_t>(key_dim) * kSwizzleRow;
    stage_bytes = 2 * k_bytes + kBlock * kSwizzleRow;
    table_bytes = static_cast<uint32_t>(sizeof(Tables)) + static_cast<uint32_t>(entries) * kBlock * 4;
    if (units) table_bytes += static_cast<uint32_t>(sizeof(Units));
    ring_begin = static_cast<uint32_t>(slots) * node_bytes;
    q_begin = ring_begin + static_cast<uint32_t>(ring) * node_bytes;
    k_begin = q_begin + k_bytes;
    v_begin = k_begin + k_bytes;
    staging_begin = q_begin + static_cast<uint32_t>(stages) * stage_bytes;
    tables_begin = staging_begin + kRowWarps * 1024;
    barriers_begin = tables_begin + 2 * table_bytes;
    bytes = barriers_begin + kBarrierBytes;
  }
  // With as many stages as fit; false: not even one does.
  bool fit(int key_dim, int entries) {
    for (stages = kMostStages; stages > 0; --stages) {
      place(key_dim, entries);
      if (bytes <= kMostShared) return true;
    }
    return false;
  }
  LLA_HOST_DEVICE uint32_t slot(int i) const { return static_cast<uint32_t>(i) * node_bytes; }
  LLA_HOST_DEVICE uint32_t ring_slot(int i) const { return ring_begin + static_cast<uint32_t>(i) * node_bytes; }
  LLA_HOST_DEVICE uint32_t q(int stage) const { return q_begin + static_cast<uint32_t>(stage) * stage_bytes; }
  LLA_HOST_DEVICE uint32_t k(int stage) const { return k_begin + static_cast<uint32_t>(stage) * stage_bytes; }
  LLA_HOST_DEVICE uint32_t v(int stage) const { return v_begin + static_cast<uint32_t>(stage) * stage_bytes; }
  // 1 KiB for each warp that makes outputs: rows of y on their way out.
  LLA_HOST_DEVICE uint32_t staging(int warp) const { return staging_begin + static_cast<uint32_t>(warp) * 1024; }
  LLA_HOST_DEVICE uint32_t tables(int i) const { return tables_begin + static_cast<uint32_t>(i) * table_bytes; }
  LLA_HOST_DEVICE uint32_t units_of(int i) const { return tables(i + 1) - static_cast<uint32_t>(sizeof(Units)); }
};

struct Barriers {
  Barrier q_full[kMostStages], k_full[kMostStages], v_full[kMostStages];
  Barrier q_free[kMostStages], k_free[kMostStages], v_free[kMostStages];
  Barrier tables_full[2], tables_free[2];
  Barrier ring_full[kRing], ring_free[kRing];
  Barrier node_done[kNodeTurns];  // a block's node is in its slot
  Barrier reads_done[2];          // a block's rows have read all nodes
};
static_assert(sizeof(Barriers) <= kBarrierBytes, "place is kept for them");

struct SweepParameters {
  CUtensorMap q, k, v;
  CUtensorMap half_k, half_v;  // the same in boxes of half a block, for the nodes of segments
  CUtensorMap nodes;           // of finished segments: `upper`, as rows of 64 columns
  MixerShape shape;
  BatchView batch;
  View gate, write, lambda, y;
  SharedLayout layout;
  int segment_log = kWhole;  // blocks of a segment
  int64_t segments = 1;      // that a sequence touches at most
  bool routes = false;       // only sequences that takes_sweep() names; else all, whose histories do not count
  SweepRoutes route;
  SlotMemory state;       // with routes
  CUtensorMap old_nodes;  // of the state, if it is read: columns, dk, heads of the layer, ids; or of `old_copies`
  // [old_number()][entry][head][tile][dk][64]: nodes of histories in the rows' type, where the state has them in another.
  unsigned short* old_copies = nullptr;
  float* old_largest = nullptr;  // fp16, of each: the largest number in it, from which its unit follows
  int old_entries = 0;           // nodes that a history has at most
  bool old_by_rows = false;      // there are more sequences than can have rows for a sweep: they are numbered by these
  int grain_shift = 0;           // a chunk of the state is 2^grain_shift halves of a block
  int apart = 0;                 // levels of halves that the state keeps apart
  int64_t tiles = 1;             // of kColumns values
  int64_t tasks = 0;
  // Of segments in order (segment_place), head and tile:
  float* sums = nullptr;  // [place][dk][64], linear: later the state before the segment; log-linear: the node
  // [place][2]: log decay over the segment; log-linear: over its last block, and of the nodes that this one merged.
  float* sum_decay = nullptr;
  unsigned short* upper = nullptr;  // [place][dk][64] in the rows' type: the node that ends with the segment
  float* upper_decay = nullptr;     // [place]
  // fp16, [place]: weight of the sums, linear: later of the rows in the state before; of the node.
  float *sum_weight = nullptr, *upper_weight = nullptr;

  // Number of the first of the sequence's segments; those of two sequences never meet.
  LLA_HOST_DEVICE int64_t first_place(const Sequence& sequence, int64_t b) const {
    return (sequence.row_begin >> (kBlockLog + segment_log)) + 2 * b;
  }
  __device__ __forceinline__ bool takes(const Sequence& sequence) const {
    return !sequence.padding && (!routes || takes_sweep(sequence, route));
  }
  LLA_HOST_DEVICE int64_t old_place(int64_t number, int64_t entry, int64_t head, int64_t tile) const {
    return ((number * old_entries + entry) * shape.heads + head) * tiles + tile;
  }
  LLA_HOST_DEVICE int64_t place(int64_t segment_place, int64_t head, int64_t tile) const {
    return (segment_place * shape.heads + head) * tiles + tile;
  }
};

// What one sweep does. Rows and positions have 32 bits here: the copies' coordinates do, and sequences are not longer.
struct Task {
  int64_t index = 0;                          // of the sequence, in tensors
  int row_begin = 0, rows = 0, position = 0;  // of the sequence
  int base = 0;                               // position of the first raw row: the history's chunk begins with it
  int head = 0, group = 0, tile = 0;
  int first = 0, end = 0;               // blocks
  int segment = 0, oldest_segment = 0;  // number of this segment and of the sequence's first
  int places = 0;                       // place of the sequence's first segment
  bool last = true;                     // nothing reads the segment's node
  int sequence = 0;
  int old_number = 0;  // of the sequence among those with copies of old nodes; those of two sequences never meet
  uint32_t past = 0;   // levels of halves of the history's nodes, up to `base`, and its absorbing node, or linear state
  bool oldest = false;

  // Fresh nodes of older segments: bit u is the one of 2^u segments.
  __device__ __forceinline__ uint32_t upper() const {
    const uint32_t differ = static_cast<uint32_t>(segment ^ oldest_segment);
    return differ == 0 ? 0 : static_cast<uint32_t>(segment) & ((uint32_t{2} << (31 - __clz(static_cast<int>(differ)))) - 1);
  }
  __device__ __forceinline__ int old_count() const { return __popcll(past) + oldest; }
  // The history's node number `entry`, newest first: its level in the state's terms. `level`: of halves; the absorbing
  // node's is above all.
  __device__ __forceinline__ int old_level(int entry, int grain_shift, int* level) const {
    uint32_t left = past;
    for (int i = 0; i < entry; ++i) left &= left - 1;
    *level = left ? __ffsll(left) - 1 : kMostLevels;
    return left ? *level - grain_shift : kAbsorbed;
  }
  // The segment with which the upper node u ends, counted from the sequence's first.
  __device__ __forceinline__ int upper_end(int u) const {
    return ((segment >> (u + 1)) << (u + 1)) + (1 << u) - 1 - oldest_segment;
  }
};

// `i`: of the head, in the order of groups. `number`: of the tile, sequence and segment.
__device__ __forceinline__ Task find_segment(const SweepParameters& in, int number, int i) {
  Task task;
  const int heads = static_cast<int>(in.shape.heads), groups = static_cast<int>(in.shape.groups), members = heads / groups;
  task.head = in.shape.head_map == LLA_HEAD_MAP_CYCLIC ? i % members * groups + i / members : i;
  task.group = i / members;
  task.tile = number % static_cast<int>(in.tiles);
  number /= static_cast<int>(in.tiles);
  const int b = number / static_cast<int>(in.segments);
  const Sequence& sequence = in.batch.sequences[b];
  task.index = sequence.index;
  task.row_begin = static_cast<int>(sequence.row_begin);
  task.rows = in.takes(sequence) ? static_cast<int>(sequence.rows) : 0;
  task.position = task.base = static_cast<int>(sequence.position);
  task.sequence = b;
  task.old_number = in.old_by_rows ? task.row_begin >> kBlockLog : b;
  if (in.old_entries > 0 && sequence.history.has_past()) {
    task.base &= -static_cast<int>(in.shape.grain);
    const int halves = task.base / kHalf;
    task.past = static_cast<uint32_t>(halves) & ((uint32_t{1} << in.apart) - 1);
    task.oldest = (in.shape.absorb || in.shape.levels == 0) && halves >> in.apart != 0;
  }
  const int first = task.base >> kBlockLog;
  const int end = task.rows == 0 ? first : (task.position + task.rows + kBlock - 1) >> kBlockLog;
  task.oldest_segment = first >> in.segment_log;
  task.segment = task.oldest_segment + number % static_cast<int>(in.segments);
  task.places = in.segment_log == kWhole ? 0 : static_cast<int>(in.first_place(sequence, b));
  const int from = in.segment_log == kWhole ? 0 : task.segment << in.segment_log;
  const int to = in.segment_log == kWhole ? end : (task.segment + 1) << in.segment_log;
  task.first = first > from ? first : from;
  task.end = end < to ? end : to;
  task.last = end <= to;
  return task;
}

__device__ __forceinline__ Task find_task(const SweepParameters& in, int64_t task_number) {
  // Heads of a group are neighbours: they read the same q and k at about the same time.
  const int number = static_cast<int>(task_number), heads = static_cast<int>(in.shape.heads);
  return find_segment(in, number / heads, number % heads);
}

// Of the sums of a segment of a head, [dk][64] in memory.
__device__ __forceinline__ float* segment_sum(const SweepParameters& in, const Task& task, int key_dim) {
  return in.sums + in.place(task.places + task.segment - task.oldest_segment, task.head, task.tile) * key_dim * kColumns;
}

// The state of a linear layer that a history has left.
struct LinearState {
  const char* data = nullptr;
  int32_t dtype = LLA_F32;
  int rows = 0, columns = 0, stride = 0;

  __device__ __forceinline__ LinearState(const SweepParameters& in, const Sequence& sequence, int64_t head, int64_t tile) {
    if (in.old_entries == 0 || !sequence.history.has_past()) return;
    const int32_t id = sequence.history.node[kAbsorbed];
    if (id < 0) return;
    dtype = in.state.node_layout.dtype;
    data = in.state.node(id, head) + kColumns * tile * dtype_size(dtype);
    rows = static_cast<int>(in.shape.key_dim);
    stride = static_cast<int>(in.shape.value_dim);
    columns = stride - kColumns * static_cast<int>(tile);
  }
  __device__ __forceinline__ bool is_there() const { return data != nullptr; }
  __device__ __forceinline__ float get(int row, int column) const {
    return row < rows && column < columns ? load_element(data, dtype, static_cast<int64_t>(row) * stride + column) : 0.0f;
  }
  // The largest absolute value, by a warp.
  __device__ __forceinline__ float largest() const {
    float most = 0;
    if (is_there()) {
#pragma unroll 4
      for (int i = static_cast<int>(threadIdx.x) % 32; i < rows * kColumns; i += 32)
        most = fmaxf(most, fabsf(get(i / kColumns, i % kColumns)));
    }
    return warp_max(most);
  }
};

// fp16: weight of what is in a linear state before a segment.
__device__ __forceinline__ float weight_before(const SweepParameters& in, const Task& task) {
  float weight = 0;
  if (task.oldest) weight = LinearState(in, in.batch.sequences[task.sequence], task.head, task.tile).largest();
  if (task.segment > task.oldest_segment)
    weight += in.sum_weight[in.place(task.places + task.segment - task.oldest_segment, task.head, task.tile)];
  return weight;
}

// Rows of the block that are the call's: local rows [lo, hi). Before them, from `from` on, raw rows of the history.
struct LiveRows {
  int from, lo, hi;
  int row;  // of local row 0 on the row axis

  __device__ __forceinline__ LiveRows(const Task& task, int block) {
    const int before = task.position - (block << kBlockLog), end = before + task.rows;
    const int raw = task.base - (block << kBlockLog);
    lo = before <= 0 ? 0 : before < kBlock ? before : kBlock;
    from = raw <= 0 ? 0 : raw < lo ? raw : lo;
    hi = end >= kBlock ? kBlock : end > 0 ? end : 0;
    row = task.row_begin - before;
  }
};

__device__ __forceinline__ int trailing_ones_of_block(int block) { return __ffsll(~static_cast<int64_t>(block)) - 1; }

// Place and phase in a ring of buffers.
struct Turn {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int count) {
    if (++index == count) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Kernels of one type of rows, in files of their own.
template <Half kType>
int32_t launch_sweeps(SweepParameters* in, int key_dim, bool segmented, void* stream);
template <Half kType>
int32_t load_sweeps();
// The nodes of all segments but the last, for pairs of heads of a group.
constexpr int kPair = 2;
LLA_HOST_DEVICE inline int64_t pairs_of_group(const MixerShape& shape) {
  return (shape.heads / shape.groups + kPair - 1) / kPair;
}
template <Half kType>
int32_t launch_segment_nodes(const SweepParameters& in, int key_dim, void* stream);
template <Half kType>
int32_t load_segment_nodes();

// Fills `old_copies`.
int32_t launch_old_copies(const SweepParameters& in, int key_dim, bool half, void* stream);
int32_t load_old_copies();
// How many there should be at most: heads go in slices. Bytes of those of a log-linear layer, whatever its state: when
// scratch is measured, there is none yet.
inline int64_t most_old_copies() { return most_scratch() < int64_t{128} << 20 ? most_scratch() : int64_t{128} << 20; }
Size old_copies_bytes(const MixerShape& shape, const Limits& limits);

// The sweep as a whole; shapes, types and views that it takes, whatever the state.
bool accepts_sweep(const MixerForward& p);
void measure_sweep(const MixerForward& p, const Limits& limits, Need* need);
int32_t launch_sweep(const MixerForward& p, bool routes, char* scratch, void* stream);
int32_t load_sweep();

}  // namespace lla::cuda::hopper
