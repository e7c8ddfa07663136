// SPDX-License-Identifier: Apache-2.0
// Forward steps of a cell: convolutions, gates, norm of q and k, mixer, skip and gated norm.
#include "cells/cell.h"

namespace lla {

void cell_tensors(const Tensors& by_role, CellTensors* t) {
  constexpr lla_role kConv[kStreams] = {LLA_WEIGHT_CONV_Q, LLA_WEIGHT_CONV_K, LLA_WEIGHT_CONV_V};
  constexpr lla_role kBias[kStreams] = {LLA_WEIGHT_CONV_Q_BIAS, LLA_WEIGHT_CONV_K_BIAS, LLA_WEIGHT_CONV_V_BIAS};
  constexpr lla_role kInput[kStreams] = {LLA_Q, LLA_K, LLA_V};
  for (int s = 0; s < kStreams; ++s) {
    t->qkv[s] = by_role.view(kInput[s]);
    t->conv[s] = by_role.weight(kConv[s]);
    t->conv_bias[s] = by_role.weight(kBias[s]);
  }
  t->gate = by_role.view(LLA_GATE);
  t->write = by_role.view(LLA_WRITE);
  t->lambda = by_role.view(LLA_LAMBDA);
  t->z = by_role.view(LLA_Z);
  t->y = by_role.view(LLA_Y);
  t->dt_bias = by_role.weight(LLA_WEIGHT_DT_BIAS);
  t->a_log = by_role.weight(LLA_WEIGHT_A_LOG);
  t->lambda_weight = by_role.weight(LLA_WEIGHT_LAMBDA);
  t->skip = by_role.weight(LLA_WEIGHT_SKIP);
  t->norm = by_role.weight(LLA_WEIGHT_NORM);
  t->skip_per_channel = by_role.skip_per_channel;
  t->norm_per_group = by_role.norm_per_group;
}

int64_t stream_heads(const Builder& b, int stream) { return stream == kValues ? b.d.heads : b.d.groups; }
int64_t stream_dim(const Builder& b, int stream) { return stream == kValues ? b.d.value_dim : b.d.key_dim; }

View columns(const View& rows, int64_t first, int64_t dim) {
  View view = rows;
  if (view.data) view.data = offset_elements(view.data, view.dtype, first);
  view.head_stride = dim;
  return view;
}

Gates gates_of(const Builder& b) {
  Gates p;
  p.heads = b.d.heads;
  p.levels = b.d.levels;
  p.gate_form = b.d.gate_form;
  p.write_form = b.d.write_form;
  p.lambda_form = b.d.lambda_form;
  p.dt_min = b.d.dt_min;
  p.dt_max = b.d.gate_form == LLA_GATE_SOFTPLUS ? b.d.dt_max : INFINITY;
  p.lambda_scale = b.d.lambda_scale;
  p.batch = b.batch;
  return p;
}

GatedNorm gated_norm_of(const Builder& b, const Matrix& skip, bool skip_per_channel, const Matrix& norm,
                        bool norm_per_group) {
  GatedNorm p;
  p.form = b.d.norm_form;
  p.width = b.d.heads * b.d.value_dim;
  p.heads = b.d.heads;
  p.value_dim = b.d.value_dim;
  p.group = b.d.norm_group;
  p.epsilon = b.d.norm_epsilon;
  p.d = skip;
  p.skip_per_channel = skip_per_channel;
  p.weight = norm;
  p.weight_per_group = norm_per_group;
  p.batch = b.batch;
  return p;
}

View staged_values(const Builder& b, const View& stage) {
  View view = stage;
  view.dtype = b.d.inner_dtype;
  view.row_stride = b.d.heads * b.d.value_dim;
  view.head_stride = b.d.value_dim;
  return view;
}

void add_cell_inputs(Builder& b, const CellTensors& t, const BatchView& batch, CellRows* rows) {
  const lla_layer_desc& d = b.d;
  const int64_t keys = d.groups * d.key_dim, values = d.heads * d.value_dim;
  rows->stage = b.rows(1, keys > values ? keys : values);
  // Kept rows are laid out whatever follows the mixer, so that its own part of the saved buffer begins at the same place in
  // every call.
  const View kept = b.keep(staged_values(b, rows->stage), d.heads, d.value_dim);
  rows->after = b.measuring || d.norm_form != LLA_NORM_NONE || t.skip.present() || t.z.present();
  rows->o = rows->after ? kept : columns(t.y, 0, d.value_dim);
  int64_t first_channel = 0;
  for (int s = 0; s < kStreams; ++s) {
    const int64_t heads = stream_heads(b, s), dim = stream_dim(b, s);
    rows->qkv[s] = t.qkv[s];
    if (d.conv_width == 0) continue;
    rows->conv[s] = b.inner_rows(heads, dim);
    rows->qkv[s] = rows->conv[s];
    Convolution p;
    p.channels = heads * dim;
    p.width = d.conv_width;
    p.activation = d.conv_activation;
    p.first_channel = first_channel;
    first_channel += p.channels;
    p.batch = batch;
    p.x = t.qkv[s];
    if (!b.measuring && heads > 1 && p.x.head_stride != dim) {  // a convolution reads channels side by side
      p.x = columns(rows->stage, 0, dim);
      b.copy(t.qkv[s], p.x, heads, dim);
    }
    p.y = rows->conv[s];
    p.weight = t.conv[s];
    p.bias = t.conv_bias[s];
    p.state = b.state;
    b.add(Op::ConvolutionForward, p);
  }

  rows->gate = t.gate;
  rows->write = t.write;
  rows->lambda = t.lambda;
  Gates g = gates_of(b);
  const bool gate = d.gate_form != LLA_GATE_LOG;
  const bool write = d.write_form > LLA_WRITE_READY;
  const bool lambda = d.lambda_form > LLA_LAMBDA_READY || (d.lambda_form == LLA_LAMBDA_READY && d.lambda_scale != 1);
  if (gate) {
    rows->gate = columns(b.rows(1, d.heads), 0, 1);
    g.gate = t.gate;
    g.gate_out = rows->gate;
    g.dt_bias = t.dt_bias;
    g.a_log = t.a_log;
  }
  if (write) {
    rows->write = columns(b.rows(1, d.heads), 0, 1);
    g.write = t.write;
    g.write_out = rows->write;
  } else {
    g.write_form = LLA_WRITE_NONE;
  }
  if (lambda) {
    rows->lambda = b.rows(d.heads, d.levels);
    g.lambda = t.lambda;
    g.lambda_out = rows->lambda;
    g.lambda_weight = t.lambda_weight;
  } else {
    g.lambda_form = LLA_LAMBDA_NONE;
    g.levels = 0;
  }
  if (gate || write || lambda) b.add(Op::GatesForward, g);

  for (int s = 0; s < kStreams; ++s) rows->mixed[s] = rows->qkv[s];
  if (!d.qk_norm) return;
  for (int s : {kQueries, kKeys}) {
    rows->norm[s] = b.inner_rows(d.groups, d.key_dim);
    rows->mixed[s] = rows->norm[s];
    L2Norm p;
    p.heads = d.groups;
    p.dim = d.key_dim;
    p.epsilon = d.qk_norm_epsilon;
    p.batch = batch;
    p.x = rows->qkv[s];
    p.y = rows->norm[s];
    b.add(Op::L2NormForward, p);
  }
}

void add_cell_mixer(Builder& b, const BatchView& batch, Save save, const CellRows& rows) {
  if (b.saved_in) return;
  MixerForward p;
  p.shape = b.layer.shape;
  p.batch = batch;
  p.q = rows.mixed[kQueries];
  p.k = rows.mixed[kKeys];
  p.v = rows.mixed[kValues];
  p.gate = rows.gate;
  p.write = rows.write;
  p.lambda = rows.lambda;
  p.y = rows.o;
  p.state = b.state;
  p.saved = save == Save::Yes ? b.mixer_saved_out() : nullptr;
  b.add(Op::MixerForward, p);
}

void add_cell_output(Builder& b, const CellTensors& t, const CellRows& rows) {
  if (!rows.after) return;
  GatedNorm p = gated_norm_of(b, t.skip, t.skip_per_channel, t.norm, t.norm_per_group);
  p.x = rows.o;
  if (b.wants(t.skip)) p.skip = rows.qkv[kValues];
  p.z = t.z;
  p.y = t.y;
  b.add(Op::GatedNormForward, p);
}

void add_cell_forward(Builder& b, const CallTensors& call) {
  CellTensors t;
  cell_tensors(call.values, &t);
  CellRows rows;
  add_cell_inputs(b, t, b.batch, &rows);
  add_cell_mixer(b, b.batch, Save::Yes, rows);
  add_cell_output(b, t, rows);
}

}  // namespace lla
