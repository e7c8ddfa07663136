// SPDX-License-Identifier: Apache-2.0
// Where gradients of the delta rule go to and come from: row tensors, parts of groups, states of kind gradient.
#pragma once

#include "cpu/delta_rule.h"
#include "plugin/backend.h"

namespace lla::cpu {

// Parts that the heads of a group are split into; each sums its heads' gradients of q and k in order.
inline int64_t delta_parts(const MixerShape& mixer) {
  const int64_t share = mixer.heads / mixer.groups;
  return share < 8 ? share : 8;
}
// Bytes of the parts' gradients of q and k; negative: overflow. None if every group has one head.
int64_t delta_partial_bytes(const MixerShape& mixer, const Limits& limits);

// Where one head's gradients of q and k go. Rows are counted from the start of the sequence's first chunk.
struct DeltaRowsOut {
  DeltaRowsOut(const MixerShape& mixer, const Limits& limits, const Scratch& scratch, const Sequence& s, int64_t order,
               int64_t group, int64_t part, bool first_of_part, bool first_of_group);
  float* dq = nullptr;  // [rows][dk] of the part; null: straight into the tensors
  float* dk = nullptr;
  bool add = false;  // to what earlier heads left there
  bool first_of_group = false;
};

// Adds the gradient of the final tail and writes the gradients of the piece's rows.
void write_piece_gradient(const DeltaHead& head, const MixerBackward& problem, const DeltaRowsOut& out, int64_t index,
                          float* row, DeltaPieceGradient* gradient);
// A sequence without rows: the gradient of the final state is that of the initial one. `row` [max(dk, dv)].
void pass_through_gradient(const DeltaHead& head, const MixerBackward& problem, const DeltaRowsOut& out, float* row);
// gradients += those of the final state, whose nodes stand at piece `index`. `temporary` [dk][dv].
void add_final_nodes(const DeltaHead& head, const MixerBackward& problem, int64_t index, float* temporary,
                     DeltaNodes* gradients);
void write_initial_nodes(const DeltaHead& head, const MixerBackward& problem, int64_t index, const DeltaNodes& gradients);
// Second phase: sums the parts of one group and sequence.
void reduce_parts(const Simd& simd, const MixerInputs& in, const MixerBackward& problem, const Limits& limits,
                  const Scratch& scratch, int64_t order, int64_t group);

}  // namespace lla::cpu
