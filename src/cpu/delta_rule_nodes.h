// SPDX-License-Identifier: Apache-2.0
// The nodes that a head of the delta rule reads and advances, piece by piece, and their gradients. Transitions are applied
// when a piece completes, so that a node always stands at the current piece's start.
#pragma once

#include "core/fenwick.h"
#include "cpu/delta_rule_piece.h"

namespace lla::cpu {

// Contents by entry. What is not live is null; a live node that is null is zero.
struct DeltaNodes {
  const float* content[kDeltaEntries] = {};
  float* buffer[kDeltaEntries] = {};  // where the content goes when it changes
};

inline bool delta_is_live(const DeltaShape& shape, int64_t index, int entry) {
  if (entry == kDeltaAbsorbed) {
    // An imported linear state is older than any piece.
    return shape.has_absorbed() && (shape.levels == 0 || (index >> shape.separate) != 0);
  }
  return entry < shape.separate && ((index >> entry) & 1) != 0;
}

// Calls f(entry) for the live entries at the start of piece `index`, newest first.
template <class F>
void for_live_entries(const DeltaShape& shape, int64_t index, F f) {
  for (int e = 0; e < shape.separate && (index >> e) != 0; ++e) {
    if ((index >> e) & 1) f(e);
  }
  if (delta_is_live(shape, index, kDeltaAbsorbed)) f(kDeltaAbsorbed);
}

// The longest sequence of a call: the levels bound it, unless the last one absorbs.
inline int64_t delta_longest(const MixerShape& mixer, const Limits& limits) {
  return mixer.levels > 0 && !mixer.absorb ? std::min(limits.length, length_allowed(mixer.levels)) : limits.length;
}

// Slots of a set that holds every entry which can be live up to piece `index`; the absorbed one is the last.
inline int64_t delta_slots(const DeltaShape& shape, int64_t index) {
  return std::min<int64_t>(shape.separate, bit_length(index)) + shape.has_absorbed();
}
inline int64_t delta_slot(int64_t slots, int entry) { return entry == kDeltaAbsorbed ? slots - 1 : entry; }

// Points the buffers at a set.
void set_buffers(const DeltaShape& shape, float* set, int64_t slots, DeltaNodes* nodes);

// Contents are what the buffers hold.
void use_buffers(const DeltaShape& shape, int64_t index, DeltaNodes* nodes);

// Which entries become one when piece `index` completes.
struct DeltaMerge {
  DeltaMerge(const DeltaShape& shape, int64_t index)
      : carries(trailing_ones(index)), target(carries < shape.separate ? carries : kDeltaAbsorbed) {}
  bool takes(int entry) const { return entry == kDeltaAbsorbed ? target == kDeltaAbsorbed : entry < carries; }
  int carries;
  int target;
};

struct DeltaNodeScratch {
  float* product = nullptr;  // [2 rows][dv]
  float* z = nullptr;        // [rows][dv]
};
void carve_node_scratch(const DeltaShape& shape, DeltaArena* arena, DeltaNodeScratch* scratch);

// What forward computed of a piece and backward can use (delta_rule_saved.h). Null: nothing is kept.
struct DeltaRecord {
  float* triangles = nullptr;  // X, R
  float* z = nullptr;          // Z [rows][dv] of the entries that are live at the piece's end, newest first, without entry 0
  int64_t index = 0;           // of the piece
  // Z with which entry `to` was advanced; null if it is not kept. Entry 0 is what the piece itself wrote: no product.
  float* z_of(const DeltaShape& shape, int to) const;
};

// y [m][dv] += what the piece's queries read from the nodes; then, with `fold`, the nodes move to the piece's end.
void pass_nodes(const Simd& simd, const DeltaShape& shape, const DeltaPiece& piece, int64_t index, bool fold,
                const DeltaNodeScratch& scratch, const DeltaRecord& keep, DeltaNodes* nodes, float* y);
// The nodes move to the end of a piece of which all Z are kept.
void replay_nodes(const Simd& simd, const DeltaShape& shape, const DeltaPiece& piece, const DeltaRecord& record,
                  const DeltaNodeScratch& scratch, DeltaNodes* nodes);

struct DeltaNodeGradientScratch {
  float *z = nullptr, *dz = nullptr;  // [rows][dv]
  float* arriving = nullptr;  // [2 rows][dv]: dy times decay, behind these rows the gradient of Z times the piece's decay
  float* weighed = nullptr;   // [rows][dv]: dy times decay times λ
  float* read = nullptr;      // [2 rows][dk]
  float* sum = nullptr;       // [dk][dv]
  float *row_gate = nullptr, *write_gate = nullptr;  // [rows]
};
void carve_node_gradient_scratch(const DeltaShape& shape, DeltaArena* arena, DeltaNodeGradientScratch* scratch);

// The other way round: on entry `gradients` are those of the nodes at the piece's end, on exit at its start. `nodes` are the
// contents at its start. Sets da, dkb, dkt, du, dgate, dlambda to what comes through nodes, dwrite to zero.
void pass_nodes_backward(const Simd& simd, const DeltaShape& shape, const DeltaPiece& piece, int64_t index, bool fold,
                         const DeltaNodes& nodes, const DeltaRecord& record, const DeltaNodeGradientScratch& scratch,
                         DeltaNodes* gradients, DeltaPieceGradient* out);

}  // namespace lla::cpu
