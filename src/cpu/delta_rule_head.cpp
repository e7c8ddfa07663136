// SPDX-License-Identifier: Apache-2.0
// Walking one head of one sequence: rows of pieces, nodes of the history.
#include <algorithm>

#include "cpu/delta_rule.h"

namespace lla::cpu {

void carve_head(const DeltaShape& shape, const MixerShape& mixer, DeltaArena* arena, DeltaHead* head) {
  head->chunk_memory = arena->floats(chunk_floats(mixer));
  carve_piece(shape, arena, &head->piece);
  carve_node_scratch(shape, arena, &head->node_scratch);
}

void gather_chunk_of(DeltaHead* head, int64_t index) {
  const int64_t chunk = index / head->shape.per_chunk;
  if (head->gathered && head->chunk.index == chunk) return;
  gather_chunk(head->simd, head->in, head->sequence, head->head, chunk, head->chunk_memory, &head->chunk);
  head->gathered = true;
}

void select_piece(DeltaHead* head, int64_t index) {
  const Chunk& chunk = head->chunk;
  DeltaPiece& piece = head->piece;
  const int64_t begin = head->row_in_chunk(index), dk = head->shape.key_dim, dv = head->shape.value_dim;
  piece.n = std::min(head->shape.rows, chunk.hi - begin);
  const int64_t first_query = std::max(begin, chunk.lo);
  piece.m = std::max<int64_t>(0, begin + piece.n - first_query);
  const int64_t query = piece.m > 0 ? first_query - chunk.lo : 0;
  piece.q = chunk.q + query * dk;
  piece.lambda = chunk.lambda ? chunk.lambda + query * head->shape.levels : nullptr;
  piece.k = chunk.k + begin * dk;
  piece.v = chunk.v + begin * dv;
  piece.gate = chunk.gate + begin;
  piece.write = chunk.write + begin;
}

int entry_of_node(const DeltaShape& shape, const MixerShape& mixer, int b) {
  if (b == kAbsorbed) return shape.has_absorbed() ? kDeltaAbsorbed : -1;
  const int entry = b + shape.log2_per_chunk;
  return b < mixer.separate_levels() && entry < shape.separate ? entry : -1;
}

void load_history(DeltaHead* head, bool dense) {
  const DeltaShape& shape = head->shape;
  const SlotImage& history = head->sequence.history;
  const int64_t index = head->first_piece(), size = shape.node_size();
  std::fill(head->nodes.content, head->nodes.content + kDeltaEntries, nullptr);
  const SlotMemory& state = *head->in.state;
  for (int b = 0; b < kNodes && history.tail >= 0; ++b) {
    const int entry = entry_of_node(shape, *head->in.shape, b);
    if (history.node[b] < 0 || entry < 0 || !delta_is_live(shape, index, entry)) continue;
    if (state.node_layout.dtype == LLA_F32) {
      head->nodes.content[entry] = reinterpret_cast<const float*>(state.node(history.node[b], head->head));
    } else {
      load_node(head->simd, state, history.node[b], head->head, head->nodes.buffer[entry], nullptr);
      head->nodes.content[entry] = head->nodes.buffer[entry];
    }
  }
  if (!dense) return;
  for_live_entries(shape, index, [&](int e) {
    if (head->nodes.content[e]) return;
    std::fill(head->nodes.buffer[e], head->nodes.buffer[e] + size, 0.0f);
    head->nodes.content[e] = head->nodes.buffer[e];
  });
}

void round_nodes(DeltaHead* head, int64_t index) {
  for_live_entries(head->shape, index, [&](int e) {
    if (head->nodes.content[e]) round_node(head->simd, *head->in.state, head->nodes.buffer[e]);
  });
}

}  // namespace lla::cpu
