// SPDX-License-Identifier: Apache-2.0
// What a step reads, streamed through shared memory: a thread copies pieces of its own several stages ahead, from the moment
// it knows the sequence.
#pragma once

#include "cuda/portable/scalar_gate.h"
#include "cuda/portable/scalar_gate_columns.h"
#include "cuda/portable/scalar_gate_fold.h"
#include "cuda/portable/scalar_gate_step.h"

namespace lla::cuda::scalar_gate {

constexpr int kLanes = kThreads / kAcross;   // threads that share the rows of one run of columns
constexpr int kPieces = 4;                   // of a thread in one stage
constexpr int kPieceStride = 16 * kThreads;  // bytes between them
constexpr int kStageBytes = kPieces * kPieceStride;

// Stages of the ring. A step that completes a chunk makes its content in the place of the last ones.
template <bool kExact>
struct StepRing {
  static constexpr int kFoldStages = 3;
  static constexpr int kStages = kFoldStages + sizeof(ContentShared<kExact>) / kStageBytes;
  static constexpr int kBytes = kFoldStages * kStageBytes + sizeof(ContentShared<kExact>);
};

// Where piece `piece` of row `row` of a warp's four rows, column run `run`, lies in the warp's part of a stage: such that
// neither threads that read their own pieces nor matrix loads, which read eight rows of a run, meet in a bank.
__device__ __forceinline__ int piece_offset(int piece, int row, int run) {
  return piece * kPieceStride + 128 * row + 16 * (run ^ (row + 4 * (piece % 2)));
}

// What a thread reads, in the order in which it uses it: keys, values, then tile by tile the rows of all nodes. Two threads
// share a key, whose runs of eight columns they take by turns; kAcross threads share a row of values or of a node.
template <bool kExact>
struct Stream {
  using Ring = StepRing<kExact>;
  const Inputs& in;
  const Step& step;
  const int dim, key_pieces, value_pieces, key_stages, stages;
  const int lane, place;  // of a row of values or of a node: the first, and the first column
  int fill = 0, use = 0;  // stages of the ring
  int begun = 0;          // stages of keys and values
  const char* const* nodes;
  int nodes_count, node = 0, node_row = 0;  // which tile of which node is to be copied
  int node_bytes;                           // from the node's start to the thread's columns in the tile
  int row_bytes;                            // between a node's rows
  bool plain;                               // whether its tiles are whole, in pieces of 16 bytes
  char *even, *odd;                         // the thread's first two pieces; two more stand behind them
  ChunkRows values;
  Elements key;

  __device__ Stream(const Inputs& inputs, const Step& what, const char* const* list, char* ring)
      : in(inputs),
        step(what),
        dim(static_cast<int>(in.shape.key_dim)),
        key_pieces(max(pieces_of(in.k.dtype), pieces_of(in.state.tail_layout.dtype))),
        value_pieces(max(pieces_of(in.v.dtype), pieces_of(in.state.tail_layout.dtype))),
        key_stages((dim * key_pieces + 2 * kColumns * kPieces - 1) / (2 * kColumns * kPieces)),
        stages(step.folds ? Ring::kFoldStages : Ring::kStages),
        lane(static_cast<int>(threadIdx.x) / kAcross),
        place(threadIdx.x % kAcross * kColumns),
        nodes(list),
        nodes_count(step.history.count()),
        values(value_rows(in, step.sequence, step.span, step.head)),
        key(find_key()) {
    const int size = static_cast<int>(dtype_size(in.state.node_layout.dtype));
    row_bytes = static_cast<int>(in.shape.value_dim) * size;
    node_bytes = lane * row_bytes + (step.v0 + place) * size;
    plain = step.columns - place >= kColumns && row_bytes % 16 == 0 && dim % tile_rows() == 0;
    char* warp = ring + threadIdx.x / 32 * 512;
    even = warp + piece_offset(0, lane % 4, threadIdx.x % kAcross);
    odd = warp + piece_offset(1, lane % 4, threadIdx.x % kAcross);
#pragma unroll 1
    for (int i = 0; i + 1 < stages; ++i) copy_next();
  }
  __device__ __forceinline__ int tile_rows() const { return kLanes * kPieces / pieces_of(in.state.node_layout.dtype); }
  __device__ __forceinline__ int row_stages() const { return key_stages + value_pieces; }
  __device__ __forceinline__ int key_row() const { return threadIdx.x / 2; }
  __device__ __forceinline__ Elements find_key() const {
    const int r = key_row();
    const Sequence& sequence = step.sequence;
    if (r < values.begin || r >= step.span.hi) return {};
    if (r >= step.span.lo) return {in.k.at(sequence.index, sequence.row_begin + r - step.span.lo, step.group), in.k.dtype};
    const int64_t at = values.ring + r - (values.ring + r >= values.capacity ? values.capacity : 0);
    return {in.state.tail_k(sequence.history.tail, step.group, at), in.state.tail_layout.dtype};
  }
  __device__ __forceinline__ int key_column(int stage, int i) const {
    return kColumns * static_cast<int>(2 * (stage * (kPieces / key_pieces) + i) + threadIdx.x % 2);
  }
  __device__ __forceinline__ int value_row(int stage, int i) const {
    return lane + kLanes * (stage * (kPieces / value_pieces) + i);
  }
  __device__ __forceinline__ char* piece(int stage, int i) const {
    return (i % 2 ? odd : even) + stage * kStageBytes + i / 2 * (2 * kPieceStride);
  }
  // Pieces of run i of columns of a stage, if a run has `pieces`.
  __device__ __forceinline__ char* low(int stage, int pieces, int i) const { return piece(stage, pieces * i); }
  __device__ __forceinline__ char* high(int stage, int pieces, int i) const { return piece(stage, pieces * i + 1); }

  // Tiles of nodes: kPieces runs of 16-bit columns of a thread, half as many of fp32 ones.
  __device__ __forceinline__ void copy_node(int stage) {
    if (node_row >= dim || nodes_count == 0) return;
    const int32_t dtype = in.state.node_layout.dtype;
    const char* from = nodes[node] + node_bytes;
    const int run = kLanes * row_bytes;  // from one of the thread's rows to the next one
    if (plain) {
      const int next = dtype == LLA_F32 ? 16 : run, pair = dtype == LLA_F32 ? run : 2 * run;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) copy_async16(piece(stage, i), from + i / 2 * pair + i % 2 * next);
    } else if (place < step.columns) {
#pragma unroll 1
      for (int i = 0; i < kPieces / pieces_of(dtype); ++i)
        copy_columns(low(stage, pieces_of(dtype), i), high(stage, pieces_of(dtype), i), from + i * run, dtype, 0,
                     node_row + lane + i * kLanes < dim ? step.columns - place : 0);
    }
    if (++node < nodes_count) return;
    node = 0;
    node_row += tile_rows();
    node_bytes += tile_rows() * row_bytes;
  }
  __device__ __forceinline__ void copy_row(int stage) {
    const bool is_key = begun < key_stages;
    const int pieces = is_key ? key_pieces : value_pieces;
#pragma unroll 1
    for (int i = 0; i < kPieces / pieces; ++i) {
      const Elements row = is_key ? key : values(value_row(begun - key_stages, i));
      const int column = is_key ? key_column(begun, i) : step.v0 + place;
      const int count = is_key ? dim - column : step.columns - place;
      if (row.data && count > 0)
        copy_columns(low(stage, pieces, i), high(stage, pieces, i), row.data, row.dtype, column, count);
    }
    ++begun;
  }
  __device__ __forceinline__ void copy_next() {
    if (begun < row_stages())
      copy_row(fill);
    else
      copy_node(fill);
    fill = fill + 1 == stages ? 0 : fill + 1;
    commit_copies();
  }
  template <int kStages>
  __device__ __forceinline__ int used() {
    const int stage = use;
    use = use + 1 == kStages ? 0 : use + 1;
    return stage;
  }
  // Waits for the next stage; its warp sees what each lane has copied. Another copy begins, into the stage that was used
  // before.
  __device__ __forceinline__ int next() {
    if (step.folds)
      wait_copies<Ring::kFoldStages - 2>();
    else
      wait_copies<Ring::kStages - 2>();
    __syncwarp();
    copy_next();
    return step.folds ? used<Ring::kFoldStages>() : used<Ring::kStages>();
  }
  // The same where only nodes are left.
  template <int kStages>
  __device__ __forceinline__ int next_node() {
    wait_copies<kStages - 2>();
    __syncwarp();
    copy_node(fill);
    fill = fill + 1 == kStages ? 0 : fill + 1;
    commit_copies();
    return used<kStages>();
  }
};

}  // namespace lla::cuda::scalar_gate
