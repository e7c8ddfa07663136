// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet block: seven projections of the input (q, k, v, gate, write, z, λ) feed a cell, and an output projection.
#include "cells/cell.h"

namespace lla {
namespace {

constexpr int kProjections = 7;

struct InputProjection {
  lla_role role;
  int64_t heads, dim;  // outputs = heads * dim
  View CellTensors::*view;
  int stream;  // index of qkv, or -1: `view`
};

// The projections that this description has, in the order in which they run.
int projections_of(const lla_layer_desc& d, InputProjection* p) {
  int count = 0;
  p[count++] = {LLA_WEIGHT_Q_PROJ, d.groups, d.key_dim, nullptr, kQueries};
  p[count++] = {LLA_WEIGHT_K_PROJ, d.groups, d.key_dim, nullptr, kKeys};
  p[count++] = {LLA_WEIGHT_V_PROJ, d.heads, d.value_dim, nullptr, kValues};
  p[count++] = {LLA_WEIGHT_GATE_PROJ, d.heads, 1, &CellTensors::gate, -1};
  p[count++] = {LLA_WEIGHT_WRITE_PROJ, d.heads, 1, &CellTensors::write, -1};
  p[count++] = {LLA_WEIGHT_Z_PROJ, d.heads, d.value_dim, &CellTensors::z, -1};
  if (d.lambda_form != LLA_LAMBDA_NONE) {
    p[count++] = {LLA_WEIGHT_LAMBDA_PROJ, d.heads, d.levels, &CellTensors::lambda, -1};
  }
  return count;
}

View& input_of(const InputProjection& p, CellTensors* t) { return p.stream >= 0 ? t->qkv[p.stream] : t->*p.view; }

// All projections of x that backward does not find saved; one whose weight was not given (z) leaves its view empty.
void add_inputs(Builder& b, const Tensors& v, CellTensors* t) {
  InputProjection list[kProjections];
  const int count = projections_of(b.d, list);
  for (int i = 0; i < count; ++i) {
    const InputProjection& p = list[i];
    const View rows = b.kept_rows(p.heads, p.dim);
    if (!b.wants(v.weight(p.role))) continue;
    input_of(p, t) = rows;
    if (b.saved_in) continue;
    add_projection(b, v.view(LLA_X), rows, v.weight(p.role), Matrix(), b.d.hidden, p.heads * p.dim);
  }
}

}  // namespace

void add_gated_deltanet_forward(Builder& b, const CallTensors& call) {
  const lla_layer_desc& d = b.d;
  const Tensors& v = call.values;
  const int64_t values = d.heads * d.value_dim;
  CellTensors t;
  cell_tensors(v, &t);
  add_inputs(b, v, &t);
  t.y = columns(b.inner_rows(1, values), 0, d.value_dim);
  CellRows rows;
  add_cell_inputs(b, t, b.batch, &rows);
  add_cell_mixer(b, b.batch, Save::Yes, rows);
  add_cell_output(b, t, rows);
  add_projection(b, t.y, v.view(LLA_Y), v.weight(LLA_WEIGHT_OUT_PROJ), v.weight(LLA_WEIGHT_OUT_PROJ_BIAS), values, d.hidden);
}

void add_gated_deltanet_backward(Builder& b, const CallTensors& call) {
  const lla_layer_desc& d = b.d;
  const Tensors& v = call.values;
  const Tensors& gradients = call.gradients;
  const int64_t values = d.heads * d.value_dim;
  b.quieten();

  // Forward once more, up to what the output projection reads, without what it has saved.
  CellTensors t, g;
  cell_tensors(v, &t);
  add_inputs(b, v, &t);
  t.y = columns(b.inner_rows(1, values), 0, d.value_dim);
  CellRows rows;
  add_cell_inputs(b, t, b.quiet_batch, &rows);
  add_cell_mixer(b, b.quiet_batch, Save::No, rows);
  if (b.wants(gradients.weight(LLA_WEIGHT_OUT_PROJ))) add_cell_output(b, t, rows);

  cell_tensors(gradients, &g);
  InputProjection list[kProjections];
  const int count = projections_of(d, list);
  const bool want_x = b.wants(gradients.view(LLA_X));
  for (int i = 0; i < count; ++i) {
    const InputProjection& p = list[i];
    const View gradient = b.inner_rows(p.heads, p.dim);
    const bool given = b.measuring || input_of(p, &t).present();
    if (given && (want_x || b.wants(gradients.weight(p.role)))) input_of(p, &g) = gradient;
  }
  const View dx = b.rows(1, d.hidden);  // the projections' terms meet here, not rounded
  g.y = columns(b.inner_rows(1, values), 0, d.value_dim);
  add_projection_backward(b, t.y, call.output_gradients.view(LLA_Y), v.weight(LLA_WEIGHT_OUT_PROJ), g.y,
                          gradients.weight(LLA_WEIGHT_OUT_PROJ), gradients.weight(LLA_WEIGHT_OUT_PROJ_BIAS), values,
                          d.hidden);
  add_cell_gradients(b, t, g, rows);

  View term = dx;
  for (int i = 0; i < count; ++i) {
    const InputProjection& p = list[i];
    const View& dy = input_of(p, &g);
    if (!b.wants(dy)) continue;
    add_projection_backward(b, v.view(LLA_X), dy, v.weight(p.role), want_x ? term : View(), gradients.weight(p.role),
                            Matrix(), d.hidden, p.heads * p.dim, true);
    term.accumulate = true;
  }
  if (want_x) b.copy(dx, gradients.view(LLA_X), 1, d.hidden);
}

}  // namespace lla
