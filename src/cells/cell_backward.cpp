// SPDX-License-Identifier: Apache-2.0
// Backward steps of a cell, from the gated norm back to the convolutions.
#include "cells/cell.h"

namespace lla {
namespace {

// Convolution of one stream, backward. `stage_x`, `stage_dx`: packed copies for inputs whose heads do not lie side by side.
void add_convolution_gradient(Builder& b, const CellTensors& t, const CellTensors& g, int stream, const View& dy,
                              const View& stage_x, const View& stage_dx) {
  const int64_t heads = stream_heads(b, stream), dim = stream_dim(b, stream);
  Convolution p;
  p.channels = heads * dim;
  p.width = b.d.conv_width;
  p.activation = b.d.conv_activation;
  for (int s = 0; s < stream; ++s) p.first_channel += stream_heads(b, s) * stream_dim(b, s);
  p.batch = b.batch;
  p.x = t.qkv[stream];
  p.weight = t.conv[stream];
  p.bias = t.conv_bias[stream];
  p.state = b.state;
  p.dy = dy;
  p.dx = g.qkv[stream];
  p.dweight = g.conv[stream];
  p.dbias = g.conv_bias[stream];
  p.gradient = b.gradient;
  if (!b.measuring && heads > 1 && p.x.head_stride != dim) {
    p.x = columns(stage_x, 0, dim);
    b.copy(t.qkv[stream], p.x, heads, dim);
  }
  const bool packed = b.measuring || heads == 1 || !p.dx.present() || p.dx.head_stride == dim;
  if (!packed) p.dx = columns(stage_dx, 0, dim);
  b.add(Op::ConvolutionBackward, p);
  if (!packed) b.copy(p.dx, g.qkv[stream], heads, dim);
}

}  // namespace

void add_cell_gradients(Builder& b, const CellTensors& t, const CellTensors& g, const CellRows& rows) {
  const lla_layer_desc& d = b.d;
  const bool conv = d.conv_width > 0;
  const bool states = b.measuring || b.gradient_state;
  bool want[kStreams];
  bool want_mixer = states;
  for (int s = 0; s < kStreams; ++s) {
    want[s] = b.wants(g.qkv[s]) || (conv && (b.wants(g.conv[s]) || b.wants(g.conv_bias[s]) || states));
    want_mixer = want_mixer || want[s];
  }
  const bool gate_step = d.gate_form != LLA_GATE_LOG;
  const bool write_step = d.write_form > LLA_WRITE_READY;
  const bool lambda_step = d.lambda_form > LLA_LAMBDA_READY || (d.lambda_form == LLA_LAMBDA_READY && d.lambda_scale != 1);
  const bool want_gate = b.wants(g.gate) || b.wants(g.dt_bias) || b.wants(g.a_log);
  const bool want_write = d.write_form == LLA_WRITE_STEP ? want_gate : b.wants(g.write) && d.write_form != LLA_WRITE_NONE;
  const bool want_lambda = d.lambda_form != LLA_LAMBDA_NONE && (b.wants(g.lambda) || b.wants(g.lambda_weight));
  want_mixer = want_mixer || want_gate || want_write || want_lambda;

  // All rows are laid out whatever is wanted, so that every call has the layout that was measured.
  const int64_t keys = d.groups * d.key_dim, values = d.heads * d.value_dim;
  const View stage = b.rows(1, keys > values ? keys : values);
  View dqkv[kStreams];  // after the convolution
  for (int s = 0; s < kStreams; ++s) dqkv[s] = conv ? b.inner_rows(stream_heads(b, s), stream_dim(b, s)) : g.qkv[s];
  View dv_sum = dqkv[kValues];  // two terms meet here if there is a skip
  if (!conv) dv_sum = b.inner_rows(d.heads, d.value_dim);
  View dmixed[kStreams] = {dqkv[kQueries], dqkv[kKeys], dqkv[kValues]};
  if (d.qk_norm) {
    for (int s : {kQueries, kKeys}) dmixed[s] = b.inner_rows(d.groups, d.key_dim);
  }
  const View dgate = gate_step ? columns(b.rows(1, d.heads), 0, 1) : g.gate;
  const View dwrite = write_step ? columns(b.rows(1, d.heads), 0, 1) : g.write;
  const View dlambda = lambda_step ? b.rows(d.heads, d.levels) : g.lambda;

  const bool skip = b.wants(t.skip);
  const bool sum_v = skip && want[kValues];
  const View d_o = rows.after ? staged_values(b, stage) : columns(g.y, 0, d.value_dim);
  if (rows.after && (want_mixer || b.wants(g.z) || b.wants(g.skip) || b.wants(g.norm))) {
    GatedNorm p = gated_norm_of(b, t.skip, t.skip_per_channel, t.norm, t.norm_per_group);
    p.x = rows.o;
    if (skip) p.skip = rows.qkv[kValues];
    p.z = t.z;
    p.dy = g.y;
    if (want_mixer) p.dx = d_o;
    if (sum_v) p.dskip = dv_sum;
    p.dz = g.z;
    p.dd = g.skip;
    p.dweight = g.norm;
    b.add(Op::GatedNormBackward, p);
  }
  if (!want_mixer) return;

  MixerBackward m;
  m.shape = b.layer.shape;
  m.batch = b.batch;
  m.q = rows.mixed[kQueries];
  m.k = rows.mixed[kKeys];
  m.v = rows.mixed[kValues];
  m.gate = rows.gate;
  m.write = rows.write;
  m.lambda = rows.lambda;
  m.dy = d_o;
  if (want[kQueries]) m.dq = dmixed[kQueries];
  if (want[kKeys]) m.dk = dmixed[kKeys];
  if (want[kValues]) {
    m.dv = sum_v ? dv_sum : dqkv[kValues];
    if (sum_v) m.dv.accumulate = true;
  }
  if (want_gate) m.dgate = dgate;
  if (want_write) m.dwrite = dwrite;
  if (want_lambda) m.dlambda = dlambda;
  m.state = b.state;
  m.gradient = b.gradient;
  m.saved = b.mixer_saved_in();
  b.add(Op::MixerBackward, m);
  if (!b.measuring && sum_v && !conv) b.copy(dv_sum, g.qkv[kValues], d.heads, d.value_dim);

  if (d.qk_norm) {
    for (int s : {kQueries, kKeys}) {
      if (!want[s]) continue;
      L2Norm p;
      p.heads = d.groups;
      p.dim = d.key_dim;
      p.epsilon = d.qk_norm_epsilon;
      p.batch = b.batch;
      p.x = rows.qkv[s];
      p.dy = dmixed[s];
      p.dx = dqkv[s];
      b.add(Op::L2NormBackward, p);
    }
  }
  Gates p = gates_of(b);
  if (gate_step && want_gate) {
    p.gate = t.gate;
    p.dt_bias = t.dt_bias;
    p.a_log = t.a_log;
    p.dgate_out = dgate;
    p.dgate = g.gate;
    p.ddt_bias = g.dt_bias;
    p.da_log = g.a_log;
  } else {
    p.gate_form = LLA_GATE_LOG;
  }
  if (write_step && want_write) {
    p.write = t.write;
    p.dwrite_out = dwrite;
    p.dwrite = g.write;
  } else {
    p.write_form = LLA_WRITE_NONE;
  }
  if (lambda_step && want_lambda) {
    p.lambda = t.lambda;
    p.lambda_weight = t.lambda_weight;
    p.dlambda_out = dlambda;
    p.dlambda = g.lambda;
    p.dlambda_weight = g.lambda_weight;
  } else {
    p.lambda_form = LLA_LAMBDA_NONE;
    p.levels = 0;
  }
  if ((gate_step && want_gate) || (write_step && want_write) || (lambda_step && want_lambda)) {
    b.add(Op::GatesBackward, p);
  }
  if (!conv) return;
  for (int s = 0; s < kStreams; ++s) {
    if (want[s]) add_convolution_gradient(b, t, g, s, dqkv[s], rows.stage, stage);
  }
}

void add_cell_backward(Builder& b, const CallTensors& call) {
  CellTensors t, g;
  cell_tensors(call.values, &t);
  cell_tensors(call.gradients, &g);
  g.y = call.output_gradients.view(LLA_Y);
  b.quieten();
  CellRows rows;
  add_cell_inputs(b, t, b.quiet_batch, &rows);
  if (rows.after) add_cell_mixer(b, b.quiet_batch, Save::No, rows);
  add_cell_gradients(b, t, g, rows);
}

}  // namespace lla
