// SPDX-License-Identifier: Apache-2.0
// What forward leaves for backward: of every piece a record, at some pieces the nodes (docs/memory.md).
//
// A record holds X, R and the Z of each node that the piece advanced. With it a node moves through the piece by one product,
// Kt^T Z, so that few pieces need sets of nodes, and backward neither inverts anything nor computes a Z again.
#pragma once

#include "cpu/delta_rule_nodes.h"

namespace lla::cpu {

int64_t delta_triangle_floats(const DeltaShape& shape);  // X and R of a record
void store_triangles(const DeltaPiece& piece, float* out);
void load_triangles(const float* in, DeltaPiece* piece);

// A set holds the nodes that are live, newest first; null ones are zeros.
void store_set(const DeltaShape& shape, const DeltaNodes& nodes, int64_t index, float* set);
void use_set(const DeltaShape& shape, int64_t index, const float* set, DeltaNodes* nodes);

// The saved memory of one head of one sequence; without memory there are neither sets nor records. Where it begins follows
// from the sequence's own rows and the limits, so that a task need not look at other sequences.
class DeltaSaved {
 public:
  DeltaSaved(const DeltaShape& shape, const MixerShape& mixer, const Limits& limits, const void* saved, const Sequence& s,
             int64_t order, int64_t head);
  // The nodes at the start of piece `index`; null: they are not kept there.
  float* set(int64_t index) const;
  DeltaRecord record(int64_t index) const;
  // The last piece up to `index` whose nodes are kept, or the sequence's first.
  int64_t start_of(int64_t index) const;

 private:
  int64_t floats_of_sets(int64_t index) const;  // before the set of piece `index`
  int64_t floats_of_z(int64_t index) const;     // before that of piece `index`

  const DeltaShape& shape_;
  int64_t every_;                 // pieces from one set to the next
  int64_t first_ = 0, last_ = 0;  // pieces
  float *sets_ = nullptr, *triangles_ = nullptr, *z_ = nullptr;
};
int64_t delta_saved_bytes(const MixerShape& mixer, const Limits& limits);  // negative: overflow

}  // namespace lla::cpu
