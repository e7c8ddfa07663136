// SPDX-License-Identifier: Apache-2.0
// What the mixer's forward and backward share: the rows of a chunk, the nodes of the past, and the fold of a full chunk.
//
// A sequence is cut at multiples of the grain C. Rows of the query's own chunk are read raw, everything older through nodes:
// entry j < separate is the node of 2^j chunks, entry `separate` the absorbing node that sums all older ones.
#pragma once

#include <cstdint>

#include "reference/common.h"

namespace lla::reference {

// The inputs that forward and backward problems have in common.
struct MixerInputs {
  const MixerShape& shape;
  const View &q, &k, &v, &gate, &write, &lambda;
  const SlotMemory& state;

  template <class Problem>
  explicit MixerInputs(const Problem& p)
      : shape(p.shape), q(p.q), k(p.k), v(p.v), gate(p.gate), write(p.write), lambda(p.lambda), state(p.state) {}
};

// Rows of one chunk and one head: [grain][dk], [grain][dv], [grain], [grain].
struct ChunkRows {
  double *k = nullptr, *v = nullptr, *gate = nullptr, *write = nullptr;

  void take(Carver* carver, const MixerShape& shape);
};

// Where chunk number `index` lies in a sequence. Local rows [0, lo) are history, [lo, hi) belong to the call.
struct ChunkSpan {
  int64_t index = 0, begin = 0;  // begin: position of local row 0
  int64_t lo = 0, hi = 0;

  ChunkSpan(const Sequence& sequence, int64_t grain, int64_t chunk)
      : index(chunk), begin(chunk * grain), lo(sequence.position > begin ? sequence.position - begin : 0) {
    const int64_t end = sequence.position + sequence.rows - begin;
    hi = end < grain ? end : grain;
  }
};

// Chunks from the one that holds the first position on. Without rows: the incomplete chunk that the sequence stands in, if
// any.
inline int64_t first_chunk(const Sequence& sequence, int64_t grain) { return sequence.position / grain; }
inline int64_t chunk_count(const Sequence& sequence, int64_t grain) {
  return (sequence.position + sequence.rows + grain - 1) / grain - sequence.position / grain;
}

// Position p of the image's chunk in its tail ring.
inline int64_t tail_ring(const SlotImage& image, const TailLayout& layout, int64_t grain, int64_t p) {
  return (image.tail_origin + p % grain) % layout.capacity;
}

// Loads local rows [0, span.hi). Rows before the start of the history are zero.
void load_chunk(const MixerInputs& in, const Sequence& sequence, int64_t head, const ChunkSpan& span, const ChunkRows& rows);

// The nodes of one head. Entries that are not live may hold anything.
struct Nodes {
  int separate = 0;             // entries that stand for one level each
  bool absorbs = false;         // entry `separate` is in use
  bool linear = false;          // it is the only one, and has no λ
  int64_t size = 0;             // dk * dv
  double* content = nullptr;    // [separate + 1][dk][dv]
  double* log_decay = nullptr;  // [separate + 1], over each node's own span; the delta rule leaves it 0

  void take(Carver* carver, const MixerShape& shape, const Limits& limits);
  int count() const { return separate + 1; }
  double* at(int j) const { return content + j * size; }
  // Whether entry j holds something after `chunks` chunks.
  bool live(int j, int64_t chunks) const {
    if (j < separate) return (chunks >> j) & 1;
    return absorbs && (linear || (chunks >> separate) != 0);  // an imported linear state is older than any chunk
  }
  // Block of entry j in a list of kNodes ids.
  int32_t id(const int32_t* ids, int j) const {
    if (j < separate) return ids[j];
    return absorbs ? ids[kAbsorbed] : -1;
  }
  // Entry into which chunk number `chunk` goes when it is full.
  int target(int64_t chunk) const;
  // λ column with which rows read entry j; -1: linear, weight 1.
  int64_t column(int j, const MixerShape& shape) const;
};

// Loads the entries that are live after `chunks` chunks; a block that is not there is zero.
void load_nodes(const SlotMemory& memory, const int32_t* ids, int64_t head, int64_t chunks, const Nodes& nodes);
void load_node(const SlotMemory& memory, int32_t id, int64_t head, double* content, double* log_decay);
void store_node(const SlotMemory& memory, int32_t id, int64_t head, const double* content, double log_decay);

// Folds full chunk `chunk` into the nodes. With state memory every node is rounded to what a block can hold, so that the
// numbers do not depend on where calls end. `content` [dk * dv] and `column` [dk] are scratch.
void fold_chunk(const MixerInputs& in, const ChunkRows& rows, int64_t chunk, const Nodes& nodes, double* content,
                double* column);

}  // namespace lla::reference
