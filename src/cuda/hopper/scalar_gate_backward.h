// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: what its kernels share. No state goes in or comes out; dv <= 64.
//
// A sequence is cut into blocks of 128 rows, numbered absolutely. A full block e that another one follows makes one node of
// level u = trailing ones of e: the last 2^u blocks with their decay to the end of e. Block c reads, for each set bit u of
// c, the node that ends before block (c >> u) << u, if it is of this call. Kernels, in order:
//   scalar_gate_factors.cu          factors of the rows of each block and head, decays between nodes
//   scalar_gate_backward_units.cu   fp16: units of nodes, their gradients and operands
//   scalar_gate_block_nodes_*       contents of all nodes
//   scalar_gate_row_gradients_*     dq, dlambda, what rows read
//   scalar_gate_node_readers_*      gradient of each node from the rows that read it
//   scalar_gate_state_gradients_*   linear: the same, with what comes by later states of its segment
//   scalar_gate_node_gradients.cu   ... and from the node that takes it in: then it is that of the block itself, too
//   scalar_gate_column_gradients_*  dk, dv, dwrite, what others read of rows
//   scalar_gate_block_flows.cu      dgate, sums of dq and dk over parts of a group
// All are parallel over blocks. Heads go in slices, so that scratch does not grow with their number.
//
// Flow: a read of source s by row t contributes dy_t . (weight v_s) to the gradient of every log gate between the two.
#pragma once

#include "cuda/hopper/matrix_copy.h"
#include "cuda/hopper/scalar_gate_backward_units.h"
#include "cuda/hopper/scalar_gate_sweep.h"

namespace lla::cuda::hopper {

constexpr int kWarpRows = 16;     // of a product
constexpr int kBundle = 8;        // heads of a group whose dq and dk one block of threads sums up in registers
constexpr int kMostEntries = 16;  // nodes that a block reads at most: sequences have up to 2^21 rows
// Readers of a node go in pieces of so many blocks, aligned; of nodes of higher levels, their sums are put together later.
constexpr int kPieceLog = 5, kPiece = 1 << kPieceLog;
constexpr int kFlowPlace = 8;  // in BlockFactors::newer
// Linear: states and their gradients are sums within aligned segments of so many blocks first; then what crosses segments is
// added.
constexpr int kSegmentLog = 7, kSegment = 1 << kSegmentLog;

// What rows and sources of one block and head need. Log-linear: behind it lies λ[level or kInnerLevels + 1 + entry][128],
// for the levels within the block, then the nodes that the block reads, entries in order of levels; zero where a row has no
// such level. Linear: λ is 1. Rows that are not the call's have zeros everywhere.
struct BlockFactors {
  // [l - 1][r]: rows whose bit l - 1 is set: scale times the decay from the middle of the pair's bucket into the row; the
  // others: the decay from the row to that middle.
  float level[kInnerLevels][kBlock];
  float start[kBlock];  // scale times the decay from the block's start into the row
  float write[kBlock];  // strength
  float fold[kBlock];   // decay from the row to the block's end
  float
      newer[kMostEntries];  // of an entry: decay from the node's end to the block's start; linear: flows from kFlowPlace on

  LLA_HOST_DEVICE static int64_t bytes(int64_t entries, bool linear) {
    return static_cast<int64_t>(sizeof(BlockFactors)) + (linear ? 0 : (kInnerLevels + 1 + entries) * kBlock * 4);
  }
  LLA_HOST_DEVICE float* lambda(int level) { return reinterpret_cast<float*>(this + 1) + level * kBlock; }
  LLA_HOST_DEVICE const float* lambda(int level) const { return reinterpret_cast<const float*>(this + 1) + level * kBlock; }
};

// fp16, of a block and head: sums and maxima of magnitudes.
struct FactorSums {
  float fold_sum, fold_most;     // of write strengths, decayed to the block's end
  float write_most, inner_most;  // of write strengths; of λ at levels within the block
  float grad_bound;              // of the gradient of the block's node, from those who read it; linear: in all
  float unused[3];
  float read_sum[kMostEntries], read_most[kMostEntries];  // of what rows read the node of an entry with, but for its decay
};
static_assert(sizeof(FactorSums) <= kBlock * sizeof(float), "it lies in the place of row_reads");

struct BackwardParameters {
  CUtensorMap q, k, v, dy;   // as in SweepParameters: boxes of 64 columns and 128 rows
  CUtensorMap nodes, grads;  // of the scratch below, as rows of 64 columns: boxes of 64 columns and key_dim (padded) rows
  CUtensorMap node_halves, grad_halves;  // linear, 128 rows: the same in boxes of 64
  CUtensorMap dv_rows;                   // boxes of 64 columns and a warp's 16 rows; only where `dv_boxes`
  MixerShape shape;
  BatchView batch;
  View gate, write, lambda;
  View dq, dk, dv, dgate, dwrite, dlambda;  // absent: not wanted
  bool linear = false;
  bool f16 = false;       // rows and their gradients; else bf16
  bool dv_boxes = false;  // dv can be written by the copy engine

  int64_t places = 0;  // of blocks, of all sequences; some stay empty
  int64_t blocks = 1;  // that a sequence touches at most
  int members = 1;     // heads of a group
  int bundle = 1;      // heads of a part: min(members, kBundle)
  int parts_of_group = 1;
  // The slice: heads in the order of head_of(), whole parts of them.
  int head_begin = 0, head_count = 0, part_begin = 0, part_count = 0;
  // Where the slice has whole groups of some sequences, a task of columns takes all parts of a group, one after the other,
  // and sums them up in memory of its block of threads. One of rows does the same where all blocks have the same work:
  // linear.
  bool chained = false, chained_rows = false;
  int entries = 0;           // most that a block reads
  int64_t factor_bytes = 0;  // of BlockFactors and its λ: a multiple of 16

  // Scratch; [slot] = place * head_count + head's number in the slice.
  char* factors_memory = nullptr;  // [slot] BlockFactors with λ
  float* totals = nullptr;         // [slot] log decay over the block; last, flow that crosses its end
  float* up = nullptr;             // [slot] decay from the end of the block's node to that of the node that takes it in
  unsigned short* nodes_memory = nullptr;  // [slot][key_dim padded][64]: the node that the block makes
  unsigned short* grads_memory = nullptr;  // the same of its gradient: from its readers, later in all
  float* reads = nullptr;                  // [slot][kMostEntries] flow of the block's reads of an entry
  // [place of the piece][level - kPieceLog - 1][head of the slice][64 * key_dim padded]: sums of the pieces of nodes of
  // higher levels than kPieceLog, in an order of the kernel's own.
  float* node_pieces = nullptr;
  int piece_levels = 0;        // such levels that there can be: piece_levels_of()
  float* through = nullptr;    // [slot] flow of the block's node through the node that takes it in
  float* row_reads = nullptr;  // [slot][128] flow of what a row reads, without itself
  // Only where a group has several parts, else the kernels write dq and dk themselves. Slices of one part add it to those
  // before it, if `adds`; larger slices have sums of earlier ones beside their parts.
  float *dq_parts = nullptr, *dk_parts = nullptr;  // [part of the slice][place][128][key_dim padded]
  float *dq_sums = nullptr, *dk_sums = nullptr;    // [place][128][key_dim padded]: of the group's earlier slices
  bool adds = false;
  // fp16 only.
  BlockUnits* units = nullptr;               // [slot]
  float *joins = nullptr, *downs = nullptr;  // [slot] `up` between the units of nodes, and of their gradients
  BlockRange *head_ranges = nullptr, *group_ranges = nullptr;  // [slot]; [place][group of the slice]
  // Chained: [block of threads][128 * key_dim padded], in an order of the kernel's own.
  float *dq_chain = nullptr, *dk_chain = nullptr;

  // The head with number i of the order in which members of a group are neighbours, and its group.
  LLA_HOST_DEVICE int head_of(int i) const {
    const int groups = static_cast<int>(shape.groups);
    return shape.head_map == LLA_HEAD_MAP_CYCLIC ? i % members * groups + i / members : i;
  }
  LLA_HOST_DEVICE int group_of(int i) const { return i / members; }
  // Heads [first, end) of a part, as such numbers.
  LLA_HOST_DEVICE int part_first(int part) const { return part / parts_of_group * members + part % parts_of_group * bundle; }
  LLA_HOST_DEVICE int part_end(int part) const {
    const int end = part_first(part) + bundle, group_end = (part / parts_of_group + 1) * members;
    return end < group_end ? end : group_end;
  }
  // Tasks of a block of rows; the first part of a task, and its last head and one more.
  LLA_HOST_DEVICE int tasks_of_block(bool chained) const { return chained ? part_count / parts_of_group : part_count; }
  LLA_HOST_DEVICE int first_part(bool chained, int task) const { return part_begin + task * (chained ? parts_of_group : 1); }
  LLA_HOST_DEVICE int task_end(bool chained, int part) const { return part_end(chained ? part + parts_of_group - 1 : part); }
  // Groups of which the slice has heads, and where the range of the one of a head lies.
  LLA_HOST_DEVICE int first_group() const { return group_of(head_begin); }
  LLA_HOST_DEVICE int group_count() const { return group_of(head_begin + head_count - 1) - first_group() + 1; }
  LLA_HOST_DEVICE int64_t group_place(int64_t place, int group) const {
    return place * group_count() + group - first_group();
  }
  LLA_HOST_DEVICE int64_t slot(int64_t place, int i) const { return place * head_count + (i - head_begin); }
  LLA_HOST_DEVICE BlockFactors* factors(int64_t slot) const {
    return reinterpret_cast<BlockFactors*>(factors_memory + slot * factor_bytes);
  }
  // In the place of row_reads, which are written later.
  LLA_HOST_DEVICE FactorSums* factor_sums(int64_t slot) const {
    return reinterpret_cast<FactorSums*>(row_reads + slot * kBlock);
  }
  // [128]: flow of what others read of a row, in the place of factors that nobody needs after the readers of nodes.
  LLA_HOST_DEVICE float* row_others(int64_t slot) const { return factors(slot)->start; }
  // Aligned runs of 2^log blocks that a sequence touches at most.
  LLA_HOST_DEVICE int64_t runs(int log) const {
    const int64_t runs = (blocks + (int64_t{2} << log) - 2) >> log, all = ((batch.most_length - 1) >> (kBlockLog + log)) + 1;
    return runs < all ? runs : all;
  }
  // Linear: whether two blocks of threads share the keys of a segment's states, since there are few segments. No bit knows.
  bool halves_states(int key_dim, int multiprocessors) const {
    return key_dim == 128 && 2 * batch.count * runs(kSegmentLog) * head_count <= multiprocessors;
  }
  // Levels of nodes above kPieceLog in sequences that end at `length` at most, and places of pieces of a batch.
  static int piece_levels_of(int64_t length, bool linear) {
    int levels = 0;
    for (int64_t n = length > 0 ? (length - 1) >> kBlockLog : 0; n > 0; n >>= 1) ++levels;
    return linear || levels <= kPieceLog + 1 ? 0 : levels - kPieceLog - 1;
  }
  static int64_t piece_places(int64_t total_rows, int64_t sequences) {
    return (total_rows >> (kBlockLog + kPieceLog)) + 2 * sequences;
  }
  LLA_HOST_DEVICE static int64_t pieces_of(int64_t blocks) { return (blocks >> kPieceLog) + 2; }
  // Place of the sequence's first block, and of its first piece; those of two sequences never meet.
  LLA_HOST_DEVICE int64_t first_place(const Sequence& sequence, int64_t b) const {
    return chained ? b * blocks : (sequence.row_begin >> kBlockLog) + 2 * b;
  }
  LLA_HOST_DEVICE int64_t first_piece(int64_t row_begin, int64_t b) const {
    return chained ? b * pieces_of(blocks) : (row_begin >> (kBlockLog + kPieceLog)) + 2 * b;
  }
};

// One block of a sequence.
struct BlockOfRows {
  int64_t index = 0;                          // of the sequence, in tensors
  int row_begin = 0, rows = 0, position = 0;  // of the sequence
  int first = 0, end = 0;                     // blocks of the sequence
  int block = 0;
  int64_t place = 0;
  int lo = 0, hi = 0;  // its local rows that are the call's
  int row = 0;         // of local row 0 on the row axis
  bool makes = false;  // a node

  // Becomes another block of the sequence.
  __device__ __forceinline__ void move_to(int other) {
    place += other - block;
    block = other;
    const int before = position - (block << kBlockLog), behind = before + rows;
    lo = before <= 0 ? 0 : before;
    hi = behind >= kBlock ? kBlock : behind;
    row = row_begin - before;
    makes = block + 1 < end;
  }
  // Place of another block of the sequence.
  __device__ __forceinline__ int64_t place_of(int other) const { return place + other - block; }
  // Levels of the nodes that it reads; linear: bit 0.
  __device__ __forceinline__ uint32_t reads(bool linear) const {
    if (linear) return block > first ? 1 : 0;
    uint32_t found = 0;
    for (uint32_t left = static_cast<uint32_t>(block); left; left &= left - 1) {
      const int u = __ffsll(left) - 1;
      if (node_end(u, false) >= first) found |= uint32_t{1} << u;
    }
    return found;
  }
  // The block with which the node of level u that it reads ends.
  __device__ __forceinline__ int node_end(int u, bool linear) const { return linear ? block - 1 : ((block >> u) << u) - 1; }
  // The block whose node takes in this block's, if it makes one.
  __device__ __forceinline__ int parent(bool linear) const {
    return linear ? block + 1 : block + (1 << trailing_ones_of_block(block));
  }
  // Blocks after which the node that this block makes is read by none: it is read by those from block + 1 on.
  __device__ __forceinline__ int readers_end(bool linear) const {
    const int to = linear ? block + 2 : block + 1 + (1 << trailing_ones_of_block(block));
    return to < end ? to : end;
  }
};

// Where a part's sums of dq or dk of a block lie: [128][kKeyDim].
template <int kKeyDim>
__device__ __forceinline__ float* part_sums(const BackwardParameters& in, float* parts, const BlockOfRows& block, int part) {
  return parts + ((part - in.part_begin) * in.places + block.place) * (kBlock * kKeyDim);
}

// Block number `distance` of sequence b: false if there is none.
__device__ __forceinline__ bool find_block(const BackwardParameters& in, int64_t b, int distance, BlockOfRows* to) {
  const Sequence& sequence = in.batch.sequences[b];
  if (sequence.padding || sequence.rows <= 0) return false;
  to->index = sequence.index;
  to->row_begin = static_cast<int>(sequence.row_begin);
  to->rows = static_cast<int>(sequence.rows);
  to->position = static_cast<int>(sequence.position);
  to->first = to->position >> kBlockLog;
  to->end = (to->position + to->rows + kBlock - 1) >> kBlockLog;
  to->place = in.first_place(sequence, b);
  to->block = to->first;
  to->move_to(to->first + distance);
  return to->block < to->end;
}
// Block number n of [0, sequences * blocks).
__device__ __forceinline__ bool find_block(const BackwardParameters& in, int64_t n, BlockOfRows* to) {
  const int64_t b = n / in.blocks;
  return find_block(in, b, static_cast<int>(n - b * in.blocks), to);
}

int32_t launch_factors(const BackwardParameters& in, void* stream);
// fp16. After it, BlockFactors::newer of an entry is times the unit of the node.
int32_t launch_backward_units(const BackwardParameters& in, const RangeViews& rows, void* stream);
int32_t launch_block_nodes(const BackwardParameters& in, int key_dim, void* stream);
int32_t launch_node_readers(const BackwardParameters& in, int key_dim, void* stream);
int32_t launch_state_gradients(const BackwardParameters& in, int key_dim, void* stream);  // linear
int32_t launch_node_gradients(const BackwardParameters& in, int key_dim, void* stream);
int32_t launch_row_gradients(const BackwardParameters& in, int key_dim, void* stream);
int32_t launch_column_gradients(const BackwardParameters& in, int key_dim, void* stream);
int32_t launch_block_flows(const BackwardParameters& in, void* stream);  // dgate
// Sums of dq or dk over the parts of groups, those of earlier slices included; the slice that ends a group stores them.
int32_t launch_part_sums(const BackwardParameters& in, const View& to, const float* parts, float* sums, int key_dim,
                         void* stream);
// The same for one type of rows.
template <Half kType>
int32_t launch_row_gradients(const BackwardParameters& in, int key_dim, void* stream);
template <Half kType>
int32_t launch_column_gradients(const BackwardParameters& in, int key_dim, void* stream);
template <Half kType>
int32_t launch_block_nodes(const BackwardParameters& in, int key_dim, void* stream);
template <Half kType>
int32_t launch_node_readers(const BackwardParameters& in, int key_dim, void* stream);
template <Half kType>
int32_t launch_state_gradients(const BackwardParameters& in, int key_dim, void* stream);
template <Half kType>
int32_t load_row_gradients();
template <Half kType>
int32_t load_column_gradients();
template <Half kType>
int32_t load_block_nodes();
template <Half kType>
int32_t load_node_readers();
template <Half kType>
int32_t load_state_gradients();
int32_t load_factors();
int32_t load_backward_units();
int32_t load_block_nodes();
int32_t load_node_readers();
int32_t load_state_gradients();
int32_t load_node_gradients();
int32_t load_row_gradients();
int32_t load_column_gradients();
int32_t load_block_flows();

}  // namespace lla::cuda::hopper
