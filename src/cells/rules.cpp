// SPDX-License-Identifier: Apache-2.0
// The roles of each kind of layer with their shapes.
#include "cells/rules.h"

namespace lla {
namespace {

class Rules {
 public:
  explicit Rules(LayerRules* rules) : r_(*rules) { r_ = LayerRules(); }

  IoRule& io(lla_role role, bool required, bool output, int64_t width, int64_t head_dim) {
    IoRule& rule = r_.io[r_.io_count++];
    rule.role = role;
    rule.output = output;
    rule.required = required;
    rule.rank = 1;
    rule.dims[0] = width;
    rule.head_dim = head_dim;
    return rule;
  }
  IoRule& heads(lla_role role, bool required, bool output, int64_t heads, int64_t dim) {
    IoRule& rule = io(role, required, output, heads, 0);
    rule.rank = 2;
    rule.dims[1] = dim;
    return rule;
  }
  void vector(lla_role role, bool required, int64_t length, int64_t other = 0) {
    WeightRule& rule = r_.weights[r_.weight_count++];
    rule.role = role;
    rule.required = required;
    rule.dims[0] = length;
    rule.other_dim = other;
  }
  WeightRule& matrix(lla_role role, bool required, int64_t rows, int64_t columns) {
    WeightRule& rule = r_.weights[r_.weight_count++];
    rule.role = role;
    rule.required = required;
    rule.rank = 2;
    rule.dims[0] = rows;
    rule.dims[1] = columns;
    return rule;
  }
  void convolution(lla_role role, lla_role bias, int64_t channels, int64_t width) {
    matrix(role, true, channels, width).convolution = true;
    vector(bias, false, channels);
  }

 private:
  LayerRules& r_;
};

bool lambda_has_weight(const lla_layer_desc& d) { return d.lambda_form > LLA_LAMBDA_READY; }
bool write_is_tensor(const lla_layer_desc& d) { return d.write_form != LLA_WRITE_NONE && d.write_form != LLA_WRITE_STEP; }

// Q, K, V, GATE, WRITE, LAMBDA of mixers and cells.
void operator_inputs(Rules* r, const lla_layer_desc& d) {
  r->heads(LLA_Q, true, false, d.groups, d.key_dim);
  r->heads(LLA_K, true, false, d.groups, d.key_dim);
  r->heads(LLA_V, true, false, d.heads, d.value_dim);
  r->io(LLA_GATE, d.gate_form != LLA_GATE_LOG, false, d.heads, 1);
  if (write_is_tensor(d)) r->io(LLA_WRITE, true, false, d.heads, 1);
  if (d.lambda_form != LLA_LAMBDA_NONE) {
    r->heads(LLA_LAMBDA, true, false, d.heads, d.levels).spare_columns = d.level_overflow != LLA_LEVELS_ABSORB;
  }
}

void gate_weights(Rules* r, const lla_layer_desc& d, bool bias_required) {
  if (d.gate_form == LLA_GATE_SOFTPLUS) {
    r->vector(LLA_WEIGHT_DT_BIAS, bias_required, d.heads);
    r->vector(LLA_WEIGHT_A_LOG, true, d.heads);
  }
  if (lambda_has_weight(d)) r->matrix(LLA_WEIGHT_LAMBDA, true, d.heads, d.levels);
}

void norm_weight(Rules* r, const lla_layer_desc& d) {
  if (d.norm_form != LLA_NORM_NONE) r->vector(LLA_WEIGHT_NORM, false, d.heads * d.value_dim, d.norm_group);
}

void cell_rules(Rules* r, const lla_layer_desc& d) {
  const int64_t keys = d.groups * d.key_dim, values = d.heads * d.value_dim;
  operator_inputs(r, d);
  r->io(LLA_Z, false, false, values, d.value_dim);
  r->io(LLA_Y, true, true, values, d.value_dim);
  if (d.conv_width > 0) {
    r->convolution(LLA_WEIGHT_CONV_Q, LLA_WEIGHT_CONV_Q_BIAS, keys, d.conv_width);
    r->convolution(LLA_WEIGHT_CONV_K, LLA_WEIGHT_CONV_K_BIAS, keys, d.conv_width);
    r->convolution(LLA_WEIGHT_CONV_V, LLA_WEIGHT_CONV_V_BIAS, values, d.conv_width);
  }
  gate_weights(r, d, false);
  r->vector(LLA_WEIGHT_SKIP, false, d.heads, values);
  norm_weight(r, d);
}

void output_rules(Rules* r, const lla_layer_desc& d) {
  r->matrix(LLA_WEIGHT_OUT_PROJ, true, d.hidden, d.heads * d.value_dim);
  r->vector(LLA_WEIGHT_OUT_PROJ_BIAS, false, d.hidden);
}

void mamba2_rules(Rules* r, const lla_layer_desc& d) {
  const int64_t values = d.heads * d.value_dim, channels = values + 2 * d.groups * d.key_dim;
  const int64_t rows = values + channels + d.heads + d.heads * d.levels;
  r->io(LLA_X, true, false, d.hidden, d.hidden);
  r->io(LLA_Y, true, true, d.hidden, d.hidden);
  r->matrix(LLA_WEIGHT_IN_PROJ, true, rows, d.hidden);
  r->vector(LLA_WEIGHT_IN_PROJ_BIAS, false, rows);
  r->convolution(LLA_WEIGHT_CONV, LLA_WEIGHT_CONV_BIAS, channels, d.conv_width);
  gate_weights(r, d, true);
  r->vector(LLA_WEIGHT_SKIP, false, d.heads, values);
  norm_weight(r, d);
  output_rules(r, d);
}

void gated_deltanet_rules(Rules* r, const lla_layer_desc& d) {
  const int64_t keys = d.groups * d.key_dim, values = d.heads * d.value_dim;
  r->io(LLA_X, true, false, d.hidden, d.hidden);
  r->io(LLA_Y, true, true, d.hidden, d.hidden);
  r->matrix(LLA_WEIGHT_Q_PROJ, true, keys, d.hidden);
  r->matrix(LLA_WEIGHT_K_PROJ, true, keys, d.hidden);
  r->matrix(LLA_WEIGHT_V_PROJ, true, values, d.hidden);
  r->matrix(LLA_WEIGHT_GATE_PROJ, true, d.heads, d.hidden);
  r->matrix(LLA_WEIGHT_WRITE_PROJ, true, d.heads, d.hidden);
  r->matrix(LLA_WEIGHT_Z_PROJ, false, values, d.hidden);
  if (d.lambda_form != LLA_LAMBDA_NONE) r->matrix(LLA_WEIGHT_LAMBDA_PROJ, true, d.heads * d.levels, d.hidden);
  r->convolution(LLA_WEIGHT_CONV_Q, LLA_WEIGHT_CONV_Q_BIAS, keys, d.conv_width);
  r->convolution(LLA_WEIGHT_CONV_K, LLA_WEIGHT_CONV_K_BIAS, keys, d.conv_width);
  r->convolution(LLA_WEIGHT_CONV_V, LLA_WEIGHT_CONV_V_BIAS, values, d.conv_width);
  gate_weights(r, d, true);
  norm_weight(r, d);
  output_rules(r, d);
}

void gates_rules(Rules* r, const lla_layer_desc& d) {
  r->io(LLA_GATE, true, false, d.heads, 1);
  if (write_is_tensor(d)) r->io(LLA_WRITE, true, false, d.heads, 1);
  if (d.lambda_form != LLA_LAMBDA_NONE) {
    r->heads(LLA_LAMBDA, true, false, d.heads, d.levels).spare_columns = true;
  }
  r->io(LLA_GATE_OUT, true, true, d.heads, 1);
  if (d.write_form != LLA_WRITE_NONE) r->io(LLA_WRITE_OUT, true, true, d.heads, 1);
  if (d.lambda_form != LLA_LAMBDA_NONE) r->heads(LLA_LAMBDA_OUT, true, true, d.heads, d.levels);
  gate_weights(r, d, false);
}

}  // namespace

void fill_rules(const lla_layer_desc& d, LayerRules* rules) noexcept {
  Rules r(rules);
  switch (d.kind) {
    case LLA_LAYER_MIXER:
      operator_inputs(&r, d);
      r.heads(LLA_Y, true, true, d.heads, d.value_dim);
      break;
    case LLA_LAYER_CELL:
      cell_rules(&r, d);
      break;
    case LLA_LAYER_MAMBA2:
      mamba2_rules(&r, d);
      break;
    case LLA_LAYER_GATED_DELTANET:
      gated_deltanet_rules(&r, d);
      break;
    case LLA_LAYER_CONVOLUTION:
      r.io(LLA_X, true, false, d.hidden, d.hidden);
      r.io(LLA_Y, true, true, d.hidden, d.hidden);
      r.convolution(LLA_WEIGHT_CONV, LLA_WEIGHT_CONV_BIAS, d.hidden, d.conv_width);
      break;
    case LLA_LAYER_GATES:
      gates_rules(&r, d);
      break;
    case LLA_LAYER_L2_NORM:
      r.heads(LLA_X, true, false, d.heads, d.key_dim);
      r.heads(LLA_Y, true, true, d.heads, d.key_dim);
      break;
    case LLA_LAYER_GATED_NORM:
      r.io(LLA_X, true, false, d.hidden, d.value_dim);
      r.heads(LLA_SKIP_INPUT, false, false, d.heads, d.value_dim);
      r.io(LLA_Z, false, false, d.hidden, d.value_dim);
      r.io(LLA_Y, true, true, d.hidden, d.value_dim);
      r.vector(LLA_WEIGHT_SKIP, false, d.heads, d.hidden);
      norm_weight(&r, d);
      break;
    default:  // LLA_LAYER_PROJECTION
      r.io(LLA_X, true, false, d.hidden, d.hidden);
      r.io(LLA_Y, true, true, d.outputs, d.outputs);
      r.matrix(LLA_WEIGHT_PROJ, true, d.outputs, d.hidden);
      r.vector(LLA_WEIGHT_PROJ_BIAS, false, d.outputs);
  }
}

const char* role_name(lla_role role) noexcept {
  switch (role) {
#define LLA_ROLE(name) \
  case name:           \
    return #name
    LLA_ROLE(LLA_Q);
    LLA_ROLE(LLA_K);
    LLA_ROLE(LLA_V);
    LLA_ROLE(LLA_GATE);
    LLA_ROLE(LLA_WRITE);
    LLA_ROLE(LLA_LAMBDA);
    LLA_ROLE(LLA_Z);
    LLA_ROLE(LLA_X);
    LLA_ROLE(LLA_Y);
    LLA_ROLE(LLA_SKIP_INPUT);
    LLA_ROLE(LLA_GATE_OUT);
    LLA_ROLE(LLA_WRITE_OUT);
    LLA_ROLE(LLA_LAMBDA_OUT);
    LLA_ROLE(LLA_WEIGHT_CONV);
    LLA_ROLE(LLA_WEIGHT_CONV_BIAS);
    LLA_ROLE(LLA_WEIGHT_CONV_Q);
    LLA_ROLE(LLA_WEIGHT_CONV_K);
    LLA_ROLE(LLA_WEIGHT_CONV_V);
    LLA_ROLE(LLA_WEIGHT_CONV_Q_BIAS);
    LLA_ROLE(LLA_WEIGHT_CONV_K_BIAS);
    LLA_ROLE(LLA_WEIGHT_CONV_V_BIAS);
    LLA_ROLE(LLA_WEIGHT_DT_BIAS);
    LLA_ROLE(LLA_WEIGHT_A_LOG);
    LLA_ROLE(LLA_WEIGHT_LAMBDA);
    LLA_ROLE(LLA_WEIGHT_SKIP);
    LLA_ROLE(LLA_WEIGHT_NORM);
    LLA_ROLE(LLA_WEIGHT_IN_PROJ);
    LLA_ROLE(LLA_WEIGHT_IN_PROJ_BIAS);
    LLA_ROLE(LLA_WEIGHT_OUT_PROJ);
    LLA_ROLE(LLA_WEIGHT_OUT_PROJ_BIAS);
    LLA_ROLE(LLA_WEIGHT_Q_PROJ);
    LLA_ROLE(LLA_WEIGHT_K_PROJ);
    LLA_ROLE(LLA_WEIGHT_V_PROJ);
    LLA_ROLE(LLA_WEIGHT_GATE_PROJ);
    LLA_ROLE(LLA_WEIGHT_WRITE_PROJ);
    LLA_ROLE(LLA_WEIGHT_Z_PROJ);
    LLA_ROLE(LLA_WEIGHT_LAMBDA_PROJ);
    LLA_ROLE(LLA_WEIGHT_PROJ);
    LLA_ROLE(LLA_WEIGHT_PROJ_BIAS);
#undef LLA_ROLE
    default:
      return "a role";
  }
}

}  // namespace lla
