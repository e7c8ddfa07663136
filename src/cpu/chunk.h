// SPDX-License-Identifier: Apache-2.0
// What both mixers do around a chunk: gather its rows as floats, find the nodes of its past, store nodes and tails.
//
// A call's rows of one sequence are cut at multiples of the grain C into chunks. The first chunk may begin with rows that
// the tail holds (or, before `start`, with zero rows); the last one may be incomplete. All rows of a chunk are read raw,
// everything older through nodes, so numbers do not depend on how the sequence was cut.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/simd.h"
#include "plugin/problem.h"

namespace lla::cpu {

// One chunk of one head. Local rows: [0, lo) are history, [lo, hi) belong to the call; lo < hi <= C.
struct Chunk {
  int64_t index = 0;  // number of the chunk: position of local row 0 is index * C
  int64_t lo = 0, hi = 0;
  int64_t row = 0;          // absolute row (row axis) of local row `lo`
  float* q = nullptr;       // [hi - lo][dk], times scale
  float* k = nullptr;       // [hi][dk]
  float* v = nullptr;       // [hi][dv]
  float* gate = nullptr;    // [hi]
  float* write = nullptr;   // [hi]
  float* lambda = nullptr;  // [hi - lo][L]; null: linear

  bool complete(int64_t grain) const { return hi == grain; }
};

inline int64_t first_chunk(const Sequence& s, int64_t grain) { return s.position / grain; }
inline int64_t chunk_count(const Sequence& s, int64_t grain) {
  return s.rows == 0 ? 0 : (s.position + s.rows - 1) / grain - s.position / grain + 1;
}

// Floats of scratch that gather_chunk needs for its arrays.
int64_t chunk_floats(const MixerShape& shape);
// Fills `chunk` (arrays carved from `memory`) for chunk number `index` of sequence `s`, value head `head`.
// Works for forward and backward problems alike: both have q, k, v, gate, write, lambda, batch, shape and state.
struct MixerInputs {
  const MixerShape* shape;
  const View *q, *k, *v, *gate, *write, *lambda;
  const SlotMemory* state;
};
// k and gate always; the rest can be left out.
struct ChunkParts {
  bool queries = true;  // q, lambda
  bool values = true;   // v, write
  bool tail = true;     // the k and v of rows that the tail holds
};
void gather_chunk(const Simd& simd, const MixerInputs& in, const Sequence& s, int64_t head, int64_t index, float* memory,
                  Chunk* chunk, const ChunkParts& parts = ChunkParts());
// Local rows of the call in chunk number `index`.
inline RowRange rows_of_call(const Sequence& s, int64_t grain, int64_t index) {
  return {std::max<int64_t>(0, s.position - index * grain), std::min(grain, s.position + s.rows - index * grain)};
}

// The pieces of which gather_chunk consists.
// Rows [row, row + rows) of the row axis, `dim` elements of `head` each, as floats.
void gather_view(const Simd& simd, const View& view, const Sequence& s, int64_t row, int64_t rows, int64_t head, int64_t dim,
                 float* out);
// Whether `rows` rows of a head lie as one run of floats.
bool is_run(const View& view, int64_t rows, int64_t dim);
// Rows of a head as floats, in place or in the buffer; without a buffer they are not wanted.
const float* rows_of(const Simd& simd, const View& view, const Sequence& s, int64_t row, int64_t rows, int64_t head,
                     int64_t dim, float* buffer);
// Asks for rows that a later chunk gathers. Rows of one head lie too far apart for the CPU to see them coming.
void prefetch_view(const View& view, const Sequence& s, int64_t row, int64_t rows, int64_t head, int64_t dim);
// One scalar per row and head; `absent` if the view is not present.
void gather_scalars(const View& view, const Sequence& s, int64_t row, int64_t rows, int64_t head, float absent, float* out);
// Where the tail holds the local rows [first, last) of the first chunk, last = its `lo`: two runs of ring indices. Local
// rows before `first` are zero (before the sequence's start, or there is no history).
struct TailRows {
  int64_t first = 0, last = 0;
  int64_t ring[2] = {0, 0}, count[2] = {0, 0};
};
TailRows tail_rows(const MixerShape& shape, const SlotMemory& state, const Sequence& s);
// Fills the local rows [0, last) of those arrays that are not null: zeros before `first`, then the tail.
void gather_tail(const Simd& simd, const MixerShape& shape, const SlotMemory& state, const Sequence& s, int64_t head,
                 const TailRows& rows, float* k, float* v, float* gate, float* write);

// λ column with which rows read node `b` (kAbsorbed included); -1: linear, weight 1.
int64_t column_of_node(const MixerShape& shape, int b);

// Stores the raw rows that the plan asks for (Sequence::tail_to_store) of one head: v, gate and write of the head, and k of
// its group if the head is the group's first. Reads call tensors and the old tail.
void store_tail(const Simd& simd, const MixerForward& problem, const Sequence& s, int64_t head);

// Node contents between block memory and floats; load_node skips what is null.
void load_node(const Simd& simd, const SlotMemory& memory, int32_t id, int64_t head, float* content, float* log_decay);
void store_node(const Simd& simd, const SlotMemory& memory, int32_t id, int64_t head, const float* content, float log_decay);
// Rounds content to the node type in place, as a store and load would (nothing for LLA_F32 or without a state).
void round_node(const Simd& simd, const SlotMemory& memory, float* content);

}  // namespace lla::cpu
