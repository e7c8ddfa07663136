// SPDX-License-Identifier: Apache-2.0
// Cell: what stands between a block's projections, as steps. Cells of their own and blocks use the same functions.
#pragma once

#include "cells/builder.h"

namespace lla {

enum Stream { kQueries, kKeys, kValues, kStreams };

// The tensors of a cell, or their gradients (y: the gradient that comes in).
struct CellTensors {
  View qkv[kStreams];  // before the convolution
  View gate, write, lambda, z, y;
  Matrix conv[kStreams], conv_bias[kStreams];
  Matrix dt_bias, a_log, lambda_weight, skip, norm;
  bool skip_per_channel = false, norm_per_group = false;
};

// What the steps of a cell hand to each other.
struct CellRows {
  View stage;                // [N, widest stream]: first packed inputs of convolutions, then the mixer's output
  View conv[kStreams];       // after the convolution, if there is one
  View norm[2];              // q and k after the norm, if there is one
  View qkv[kStreams];        // what the norm or mixer reads: conv, or the input itself
  View mixed[kStreams];      // what the mixer reads: norm, or qkv
  View gate, write, lambda;  // what the mixer reads
  View o;                    // the mixer's output: kept for backward or in stage, or y itself if nothing follows
  bool after = false;        // something follows the mixer: skip, output gate or norm
};

// Takes the cell's tensors from the caller's by role.
void cell_tensors(const Tensors& by_role, CellTensors* t);
int64_t stream_heads(const Builder& b, int stream);
int64_t stream_dim(const Builder& b, int stream);

// Everything before the mixer; also says where its output goes.
void add_cell_inputs(Builder& b, const CellTensors& t, const BatchView& batch, CellRows* rows);
// The mixer, and what follows it. What is kept for backward is not made again.
enum class Save { No, Yes };  // what the mixer itself saves
void add_cell_mixer(Builder& b, const BatchView& batch, Save save, const CellRows& rows);
void add_cell_output(Builder& b, const CellTensors& t, const CellRows& rows);

// Gradients. The inputs and, if something follows the mixer, its output have been recomputed into `rows`.
void add_cell_gradients(Builder& b, const CellTensors& t, const CellTensors& gradients, const CellRows& rows);

// Whole layers.
void add_cell_forward(Builder& b, const CallTensors& call);
void add_cell_backward(Builder& b, const CallTensors& call);
void add_mamba2_forward(Builder& b, const CallTensors& call);
void add_mamba2_backward(Builder& b, const CallTensors& call);
void add_gated_deltanet_forward(Builder& b, const CallTensors& call);
void add_gated_deltanet_backward(Builder& b, const CallTensors& call);
void add_part_forward(Builder& b, const CallTensors& call);
void add_part_backward(Builder& b, const CallTensors& call);

// Pieces that cell and parts share.
GatedNorm gated_norm_of(const Builder& b, const Matrix& skip, bool skip_per_channel, const Matrix& norm,
                        bool norm_per_group);
Gates gates_of(const Builder& b);
// Rows of values in `stage`.
View staged_values(const Builder& b, const View& stage);
// Columns [first, first + heads * dim) of a tensor whose rows are contiguous.
View columns(const View& rows, int64_t first, int64_t dim);
void add_projection(Builder& b, const View& x, const View& y, const Matrix& weight, const Matrix& bias, int64_t inputs,
                    int64_t outputs);
// `dx_is_scratch`: as in the problem.
void add_projection_backward(Builder& b, const View& x, const View& dy, const Matrix& weight, const View& dx,
                             const Matrix& dweight, const Matrix& dbias, int64_t inputs, int64_t outputs,
                             bool dx_is_scratch = false);

}  // namespace lla
