// SPDX-License-Identifier: Apache-2.0
// Cuts drafts at the borders that they cross. The bits of a node depend on the order in which transitions were multiplied:
// chunk by chunk, a draft's are those of rows that came one by one.
#include "cuda/portable/delta_rule.h"

namespace lla::cuda {

namespace {

// Piece number `piece` of every sequence: up to its first border, to the next one, ..., the rest. Other sequences are whole
// in the first piece.
__global__ void __launch_bounds__(kThreads) delta_rule_pieces(BatchView batch, int64_t piece, Sequence* pieces) {
  for (int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x; b < batch.count; b += int64_t{gridDim.x} * kThreads) {
    Sequence s = batch.sequences[b];
    const NodesToStore* borders = s.nodes_to_store;
    const int64_t count = s.nodes_to_store_count, end = s.position + s.rows;
    if (!s.padding && s.rows <= batch.max_draft && piece <= count) {
      const int64_t from = piece == 0 ? s.position : borders[piece - 1].position;
      const int64_t to = piece < count ? borders[piece].position : end;
      if (piece > 0) {
        for (int i = 0; i < kNodes; ++i) s.history.node[i] = borders[piece - 1].node[i];
        if (s.history.tail < 0) s.history.tail = 0;  // there is a history now; at a border nothing of a tail is read
        s.history.position = from;
      }
      s.row_begin += from - s.position;
      s.position = from;
      s.rows = to - from;
      s.nodes_to_store = borders + piece;
      s.nodes_to_store_count = piece < count ? 1 : 0;
      s.padding = from == to;
    } else if (piece > 0) {
      s.padding = true;
    }
    pieces[b] = s;
  }
}

}  // namespace

int32_t launch_delta_pieces(const DeltaInputs& in, int64_t piece, Sequence* pieces, void* stream) {
  return launch(delta_rule_pieces, (in.batch.count + kThreads - 1) / kThreads, kThreads, 0, stream, in.batch, piece, pieces);
}

int32_t load_delta_pieces() { return load_kernel(delta_rule_pieces); }

}  // namespace lla::cuda
