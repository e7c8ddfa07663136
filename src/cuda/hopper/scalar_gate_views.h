// SPDX-License-Identifier: Apache-2.0
// Scalar gate on Hopper, host side: which tensors the kernels can read, and what a batch's extent says about its blocks.
#pragma once

#include <algorithm>

#include "cuda/hopper/scalar_gate_sweep.h"

namespace lla::cuda::hopper {

constexpr int64_t kMostLength = int64_t{1} << 21;  // of a sequence, so that weights of all levels fit

inline int bits(int64_t x) {
  int n = 0;
  for (; x > 0; x >>= 1) ++n;
  return n;
}

// Columns of keys as kernels see them: instances exist for two numbers, and copies bring zeros for the rest.
inline int key_columns(const MixerShape& shape) { return shape.key_dim <= 64 ? 64 : 128; }
// Nothing but sums of products of queries and keys depends on dk, so that wider ones are worked on in pieces.
constexpr int64_t kMostKeyDim = 128;
inline View columns_from(View view, int64_t column) {
  if (view.present()) view.data = offset_elements(view.data, view.dtype, column);
  return view;
}

inline int64_t tiles_of(const MixerShape& shape) { return (shape.value_dim + kColumns - 1) / kColumns; }

// Nodes that the history of a sequence of at most `length` rows has at most: one row at least is the call's.
inline int old_entries_of(const MixerShape& shape, int64_t length) {
  return shape.levels == 0 ? 1 : bits(std::max<int64_t>(length - 1, 0) / shape.grain) + 1;
}
// Sequences of a batch that may have copies of old nodes: those of enough rows for a sweep.
inline int64_t old_sequences(int64_t sequences, int64_t rows) { return std::min(sequences, rows / kSweepRows); }
// Whether a sweep has to read copies of a state's nodes.
inline bool copies_nodes(const MixerForward& p) {
  return p.shape.levels > 0 && p.state.nodes.base && p.state.node_layout.dtype != p.q.dtype;
}

// Blocks that a sequence touches at most.
inline int64_t blocks_of(int64_t most_rows, int64_t most_length) {
  return std::min(((most_rows + kBlock - 2) >> kBlockLog) + 1, (most_length + kBlock - 1) >> kBlockLog);
}
// Nodes that a block reads at most.
inline int node_levels(int64_t blocks, int64_t most_length) {
  return std::min(bits((most_length - 1) >> kBlockLog), bits(blocks) + 1);
}

inline TensorView<3> rows_view(const View& view, int64_t dim, int64_t rows, int64_t heads, int32_t box_rows = kBlock) {
  TensorView<3> map;
  map.type = TensorType::kBf16;
  map.data = view.data;
  map.extents[0] = dim;
  map.extents[1] = rows;
  map.extents[2] = heads;
  map.strides[0] = rows == 1 ? 2 * ((dim + 7) & ~int64_t{7}) : 2 * view.row_stride;  // of one row it says nothing
  map.strides[1] = heads == 1 ? map.strides[0] : 2 * view.head_stride;
  map.box[0] = 64;
  map.box[1] = box_rows;
  map.box[2] = 1;
  return map;
}

// Whether a view that is given can be copied in boxes.
inline bool can_copy(const View& view, int64_t dim, int64_t rows, int64_t heads) {
  return !view.present() || rows == 0 || (view.sequence_stride == 0 && can_map(rows_view(view, dim, rows, heads)));
}

// Whether rows of a view that is given can be stored 16 bytes at a time.
inline bool can_store(const View& view) {
  return !view.present() || (reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.row_stride % 8 == 0 &&
                             view.head_stride % 8 == 0 && view.sequence_stride % 8 == 0);
}

inline bool is_factor_type(int32_t dtype) { return dtype == LLA_F32 || dtype == LLA_BF16 || dtype == LLA_F16; }

// Factors are loaded element by element. Within a block, distances have 32 bits.
inline bool is_factor(const View& view) {
  return is_factor_type(view.dtype) && view.row_stride >= 0 && view.row_stride < 1 << 20;
}

}  // namespace lla::cuda::hopper
