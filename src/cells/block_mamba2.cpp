// SPDX-License-Identifier: Apache-2.0
// Mamba-2 block: one input projection whose columns z | x | B | C | dt | λ feed a cell, and an output projection.
#include "cells/cell.h"

namespace lla {
namespace {

struct Columns {
  int64_t z, x, b, c, dt, lambda, width;
};

Columns columns_of(const lla_layer_desc& d) {
  const int64_t values = d.heads * d.value_dim, keys = d.groups * d.key_dim;
  Columns c;
  c.z = 0;
  c.x = values;
  c.b = c.x + values;
  c.c = c.b + keys;
  c.dt = c.c + keys;
  c.lambda = c.dt + d.heads;
  c.width = c.lambda + d.heads * d.levels;
  return c;
}

// The cell's inputs (or their gradients) as columns of the projection.
void project_columns(const Builder& b, const View& rows, CellTensors* t) {
  const lla_layer_desc& d = b.d;
  const Columns c = columns_of(d);
  t->z = columns(rows, c.z, d.value_dim);
  t->qkv[kValues] = columns(rows, c.x, d.value_dim);
  t->qkv[kKeys] = columns(rows, c.b, d.key_dim);
  t->qkv[kQueries] = columns(rows, c.c, d.key_dim);
  t->gate = columns(rows, c.dt, 1);
  if (d.levels > 0) t->lambda = columns(rows, c.lambda, d.levels);
}

Matrix part(const Matrix& matrix, int64_t row, bool vector) {
  Matrix m = matrix;
  if (m.data) m.data = vector ? m.at(0, row) : m.at(row);
  return m;
}

// The cell's weights (or their gradients): the rows of the one convolution are those of x, B and C.
void block_weights(const Builder& b, const Tensors& by_role, CellTensors* t) {
  const int64_t values = b.d.heads * b.d.value_dim, keys = b.d.groups * b.d.key_dim;
  cell_tensors(by_role, t);
  const int64_t first[kStreams] = {values + keys, values, 0};
  for (int s = 0; s < kStreams; ++s) {
    t->conv[s] = part(by_role.weight(LLA_WEIGHT_CONV), first[s], false);
    t->conv_bias[s] = part(by_role.weight(LLA_WEIGHT_CONV_BIAS), first[s], true);
  }
}

}  // namespace

void add_mamba2_forward(Builder& b, const CallTensors& call) {
  const lla_layer_desc& d = b.d;
  const Tensors& v = call.values;
  const int64_t width = columns_of(d).width, values = d.heads * d.value_dim;
  const View projected = b.kept_rows(1, width);
  CellTensors t;
  block_weights(b, v, &t);
  project_columns(b, projected, &t);
  t.y = columns(b.inner_rows(1, values), 0, d.value_dim);
  add_projection(b, v.view(LLA_X), projected, v.weight(LLA_WEIGHT_IN_PROJ), v.weight(LLA_WEIGHT_IN_PROJ_BIAS), d.hidden,
                 width);
  CellRows rows;
  add_cell_inputs(b, t, b.batch, &rows);
  add_cell_mixer(b, b.batch, Save::Yes, rows);
  add_cell_output(b, t, rows);
  add_projection(b, t.y, v.view(LLA_Y), v.weight(LLA_WEIGHT_OUT_PROJ), v.weight(LLA_WEIGHT_OUT_PROJ_BIAS), values, d.hidden);
}

void add_mamba2_backward(Builder& b, const CallTensors& call) {
  const lla_layer_desc& d = b.d;
  const Tensors& v = call.values;
  const Tensors& gradients = call.gradients;
  const int64_t width = columns_of(d).width, values = d.heads * d.value_dim;
  b.quieten();

  // Forward once more, up to what the output projection reads, without what it has saved.
  const View projected = b.kept_rows(1, width);
  CellTensors t, g;
  block_weights(b, v, &t);
  project_columns(b, projected, &t);
  t.y = columns(b.inner_rows(1, values), 0, d.value_dim);
  if (!b.saved_in) {
    add_projection(b, v.view(LLA_X), projected, v.weight(LLA_WEIGHT_IN_PROJ), v.weight(LLA_WEIGHT_IN_PROJ_BIAS), d.hidden,
                   width);
  }
  CellRows rows;
  add_cell_inputs(b, t, b.quiet_batch, &rows);
  add_cell_mixer(b, b.quiet_batch, Save::No, rows);
  if (b.wants(gradients.weight(LLA_WEIGHT_OUT_PROJ))) add_cell_output(b, t, rows);

  const View& x = v.view(LLA_X);
  const bool want_projected = b.wants(gradients.view(LLA_X)) || b.wants(gradients.weight(LLA_WEIGHT_IN_PROJ)) ||
                              b.wants(gradients.weight(LLA_WEIGHT_IN_PROJ_BIAS));
  block_weights(b, gradients, &g);
  const View dprojected = b.inner_rows(1, width);
  if (want_projected) project_columns(b, dprojected, &g);
  g.y = columns(b.inner_rows(1, values), 0, d.value_dim);
  add_projection_backward(b, t.y, call.output_gradients.view(LLA_Y), v.weight(LLA_WEIGHT_OUT_PROJ), g.y,
                          gradients.weight(LLA_WEIGHT_OUT_PROJ), gradients.weight(LLA_WEIGHT_OUT_PROJ_BIAS), values,
                          d.hidden);
  add_cell_gradients(b, t, g, rows);
  if (!want_projected) return;
  add_projection_backward(b, x, dprojected, v.weight(LLA_WEIGHT_IN_PROJ), gradients.view(LLA_X),
                          gradients.weight(LLA_WEIGHT_IN_PROJ), gradients.weight(LLA_WEIGHT_IN_PROJ_BIAS), d.hidden, width);
}

}  // namespace lla
