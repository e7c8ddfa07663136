// SPDX-License-Identifier: Apache-2.0
// What backends compute: plain values only, checked before they get here. Kernels see these and no handle.
#pragma once

#include <cstdint>

#include "lla/layer.h"
#include "plugin/slot.h"

namespace lla {

// A tensor as kernels see it. Element (sequence b, absolute row r of the row axis, head h, i) is at
// data + b * sequence_stride + r * row_stride + h * head_stride + i. `data` null: not given.
struct View {
  void* data = nullptr;
  int32_t dtype = LLA_F32;
  bool accumulate = false;  // gradients: add instead of overwrite
  int64_t sequence_stride = 0, row_stride = 0, head_stride = 0;

  LLA_HOST_DEVICE bool present() const { return data != nullptr; }
  LLA_HOST_DEVICE void* at(int64_t sequence, int64_t row, int64_t head) const {
    return offset_elements(data, dtype, sequence * sequence_stride + row * row_stride + head * head_stride);
  }
};

// A contiguous-rows weight: element (i, j) at data + i * row_stride + j. Vectors: j only.
struct Matrix {
  void* data = nullptr;
  int32_t dtype = LLA_F32;
  bool accumulate = false;
  int64_t row_stride = 0;

  LLA_HOST_DEVICE bool present() const { return data != nullptr; }
  LLA_HOST_DEVICE void* at(int64_t i, int64_t j = 0) const { return offset_elements(data, dtype, i * row_stride + j); }
};

// One sequence of a planned batch. Its rows are the absolute rows row_begin ... row_begin + rows - 1 of the tensors' row
// axis and stand at positions position ... position + rows - 1.
struct Sequence {
  int64_t index = 0;  // b
  int64_t row_begin = 0, rows = 0;
  int64_t position = 0;
  bool padding = false;                          // slot -1: rows are skipped
  SlotImage history;                             // history.tail < 0: none (position may still be > 0: an empty past)
  const NodesToStore* nodes_to_store = nullptr;  // by rising position, all in (position, position + rows]
  int64_t nodes_to_store_count = 0;
  const RowsToStore* tail_to_store = nullptr;
  int64_t tail_to_store_count = 0;
  const RowsToStore* conv_to_store = nullptr;
  int64_t conv_to_store_count = 0;
  SlotImage initial_gradient;  // backward writes it; tail < 0: not wanted
  SlotImage final_gradient;    // backward reads it; tail < 0: zero
};

struct RowRange {
  int64_t begin = 0, end = 0;
};

constexpr int64_t kNoPast = int64_t{1} << 62;

struct BatchView {
  const Sequence* sequences = nullptr;
  int64_t count = 0;
  int64_t total_rows = 0;           // length of the row axis
  const RowRange* slack = nullptr;  // rows of no live sequence: outputs are zeroed there (by the steps of kind Zero)
  int64_t slack_count = 0;
  // Only device backends look at the rest. All pointers are the device's; grids are made from these upper bounds.
  int64_t most_rows = 0;                                                            // rows of one sequence
  int64_t most_length = 0;                                                          // position + rows of one sequence
  int64_t most_nodes_to_store = 0, most_tail_to_store = 0, most_conv_to_store = 0;  // entries of one sequence
  int64_t least_rows = 0;                                                           // of a sequence that is not padding
  // A power of two that divides the positions of all sequences with a past, which goes back to 0; kNoPast: there is none; 0:
  // the host does not know, or some past does not go back to 0.
  int64_t past_alignment = 0;
  int64_t max_draft = 0;  // a sequence of at most so many rows is a draft: it stores nodes at every border that it crosses
  bool stores = true;     // false: nothing is stored, whatever the sequences say (a forward that is recomputed)
};

// Upper limits from which workspaces are sized.
struct Limits {
  int64_t sequences = 0, rows = 0, rows_per_sequence = 0, length = 0, snapshots = 0;
  bool replay = false;  // launches serve later plans, too
};

// ---- mixer --------------------------------------------------------------------------------------------------------------

struct MixerShape {
  int32_t mixer = LLA_SCALAR_GATE;
  int32_t head_map = LLA_HEAD_MAP_BLOCKED;
  int64_t heads = 1, groups = 1, key_dim = 1, value_dim = 1;
  int64_t grain = 64;
  int64_t levels = 0;   // λ columns; 0: linear (weight 1)
  bool absorb = false;  // levels >= L - 1 read column L - 1
  double scale = 1;     // multiplies q

  LLA_HOST_DEVICE int64_t group_of(int64_t head) const {
    return head_map == LLA_HEAD_MAP_CYCLIC ? head % groups : head / (heads / groups);
  }
  // Node levels that are kept apart; higher ones are summed in node kAbsorbed. Linear: 0. No absorbing: kNodeLevels.
  LLA_HOST_DEVICE int separate_levels() const {
    if (levels == 0) return 0;
    if (!absorb) return kNodeLevels;
    int log2_grain = 0;
    while ((int64_t{1} << log2_grain) < grain) ++log2_grain;
    const int64_t apart = levels - 2 - log2_grain;  // node b has column b + log2(grain) + 1 < L - 1
    return apart < 0 ? 0 : apart > kNodeLevels ? kNodeLevels : static_cast<int>(apart);
  }
  // Column of λ for a level.
  LLA_HOST_DEVICE int64_t column(int64_t level) const { return absorb && level > levels - 1 ? levels - 1 : level; }
};

struct MixerForward {
  MixerShape shape;
  BatchView batch;
  View q, k, v;           // [N, G, dk], [N, G, dk], [N, H, dv]
  View gate, write;       // [N, H]; not present: log gate 0, write strength 1
  View lambda;            // [N, H, L]; not present: linear
  View y;                 // [N, H, dv]
  SlotMemory state;       // of this layer; pools empty: no state
  void* saved = nullptr;  // written if not null
};

struct MixerBackward {
  MixerShape shape;
  BatchView batch;
  View q, k, v, gate, write, lambda;
  View dy;                                  // gradient of y
  View dq, dk, dv, dgate, dwrite, dlambda;  // written (or added to) where present
  SlotMemory state;                         // initial states, read only
  SlotMemory gradient;                      // of Sequence::initial_gradient and final_gradient
  const void* saved = nullptr;              // of forward, or null: recompute
};

// ---- parts --------------------------------------------------------------------------------------------------------------

// y_t = act(bias + sum_i w[:, i] x_{t-W+1+i}); rows before the call come from the conv ring, rows before `start` are zero.
struct Convolution {
  int64_t channels = 0, width = 0;
  int32_t activation = LLA_ACTIVATION_SILU;
  int64_t first_channel = 0;  // where this stream's channels begin in the conv block
  BatchView batch;
  View x, y;            // [N, channels]
  Matrix weight, bias;  // [channels, W], [channels]
  SlotMemory state;
  // backward only
  View dy, dx;
  Matrix dweight, dbias;
  SlotMemory gradient;
};

struct Gates {
  int64_t heads = 0, levels = 0;
  int32_t gate_form = 0, write_form = 0, lambda_form = 0;
  double dt_min = 0, dt_max = INFINITY, lambda_scale = 1;
  BatchView batch;
  View gate, write, lambda;              // raw [N, H], [N, H], [N, H, L]
  Matrix dt_bias, a_log, lambda_weight;  // [H], [H], [H, L]
  View gate_out, write_out, lambda_out;  // forward results, where present (backward: not used)
  // backward only: gradients of the results (in), then of raw inputs and weights (out)
  View dgate_out, dwrite_out, dlambda_out;
  View dgate, dwrite, dlambda;
  Matrix ddt_bias, da_log, dlambda_weight;
};

// A norm's epsilon as a float: what is positive stays so where the smallest numbers are zero, and a row of zeros is not
// divided by zero.
LLA_HOST_DEVICE inline float float_of_epsilon(double epsilon) {
  return epsilon < 0x1p-126 ? 0x1p-126f : static_cast<float>(epsilon);
}

// y = scale * x / sqrt(sum(x^2) + epsilon) over the last axis.
struct L2Norm {
  int64_t heads = 0, dim = 0;
  double epsilon = 1e-6, scale = 1;
  BatchView batch;
  View x, y, dy, dx;  // [N, heads, dim]
};

// u = x + D * skip; GATE_FIRST: rmsnorm(u * silu(z)) * w; NORM_FIRST: rmsnorm(u) * w * silu(z); NONE: u * silu(z).
// Without z the gate is 1; without w the scale is 1.
struct GatedNorm {
  int32_t form = LLA_NORM_NONE;
  int64_t width = 0;                 // H * dv
  int64_t heads = 1, value_dim = 1;  // of skip and D
  int64_t group = 0;                 // elements per RMS; divides width
  bool skip_per_channel = false;     // D is [width], else [heads]
  bool weight_per_group = false;     // w is [group], else [width]
  double epsilon = 1e-5;
  BatchView batch;
  View x;     // [N, heads, value_dim] when head_stride is set by the caller, width = heads * value_dim
  View skip;  // [N, heads, value_dim]
  View z, y;  // [N, width]; y too may be given by heads (head_stride); a contiguous row has head_stride = value_dim
  Matrix d, weight;
  // backward only
  View dy, dx, dskip, dz;
  Matrix dd, dweight;
};

// y [N, outputs] = x [N, inputs] * weight^T + bias.
struct Projection {
  int64_t inputs = 0, outputs = 0;
  BatchView batch;
  View x, y;
  Matrix weight, bias;  // [outputs, inputs], [outputs]
  // backward only
  View dy, dx;
  Matrix dweight, dbias;
  bool dx_is_scratch = false;  // what dx holds in rows of no sequence does not matter, even if it accumulates
};

// Zeroes the slack rows of y (not if y accumulates); with `copy` also y (+)= x on live rows (types may differ).
struct RowsFill {
  int64_t heads = 1, dim = 0;
  bool copy = false;
  int64_t sequence_rows = 0;  // > 0: y is [B, T, ...] and slack row r is that of sequence r / sequence_rows; else sequence 0
  BatchView batch;
  View x, y;
};

}  // namespace lla
