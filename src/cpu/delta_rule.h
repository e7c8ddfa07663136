// SPDX-License-Identifier: Apache-2.0
// What the forward and backward kernels of the delta rule share: walking one head of one sequence piece by piece.
#pragma once

#include "cpu/chunk.h"
#include "cpu/delta_rule_saved.h"
#include "plugin/backend.h"

namespace lla::cpu {

// One head of one sequence on one thread. Pieces are numbered absolutely: position / rows of a piece.
struct DeltaHead {
  DeltaHead(const Simd& table, const DeltaShape& pieces, const MixerInputs& inputs, const Sequence& s, int64_t number)
      : simd(table), shape(pieces), in(inputs), sequence(s), head(number) {}

  const Simd& simd;
  const DeltaShape& shape;
  const MixerInputs& in;
  const Sequence& sequence;
  int64_t head;
  float* chunk_memory = nullptr;
  Chunk chunk;
  bool gathered = false;  // all of the chunk's rows
  DeltaPiece piece;
  DeltaNodes nodes;
  DeltaNodeScratch node_scratch;

  int64_t first_piece() const { return sequence.position / in.shape->grain * shape.per_chunk; }
  int64_t last_piece() const { return (sequence.position + sequence.rows - 1) / shape.rows; }  // needs rows > 0
  // Piece number at which the position after the call's last row has its chunk.
  int64_t end_boundary() const { return (sequence.position + sequence.rows) / in.shape->grain * shape.per_chunk; }
  int64_t row_in_chunk(int64_t index) const { return index % shape.per_chunk * shape.rows; }
};

void carve_head(const DeltaShape& shape, const MixerShape& mixer, DeltaArena* arena, DeltaHead* head);
// Gathers the chunk that piece `index` is part of, unless that is done.
void gather_chunk_of(DeltaHead* head, int64_t index);
// Points the piece at its rows.
void select_piece(DeltaHead* head, int64_t index);
// Entry of node b of a record, -1 if the layer does not use it.
int entry_of_node(const DeltaShape& shape, const MixerShape& mixer, int b);
// Sets the nodes to those of the history: in place where they are floats, else into the buffers. With `dense`, live nodes
// that the history does not have become zeros instead of null.
void load_history(DeltaHead* head, bool dense);
// Rounds all nodes as a fold at the end of a chunk does.
void round_nodes(DeltaHead* head, int64_t index);

// ---- drivers ------------------------------------------------------------------------------------------------------------
void measure_delta_forward(const MixerForward& problem, const Limits& limits, Need* need);
void run_delta_forward(const Simd& simd, const MixerForward& problem, const Limits& limits, const Scratch& scratch,
                       int64_t task);
void measure_delta_backward(const MixerBackward& problem, const Limits& limits, Need* need);
int64_t delta_backward_tasks(const MixerBackward& problem, int32_t phase);
int32_t delta_backward_phases(const MixerBackward& problem);
void run_delta_backward(const Simd& simd, const MixerBackward& problem, const Limits& limits, const Scratch& scratch,
                        int32_t phase, int64_t task);

}  // namespace lla::cpu
