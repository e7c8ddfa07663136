// SPDX-License-Identifier: Apache-2.0
// One layer of every kind with the shapes of all its roles, written down here by hand, and calls that are only prepared.
#pragma once

#include "cells_testing.h"

namespace cells_testing {

constexpr int64_t kRows = 6;

struct RoleShape {
  lla_role role;
  std::vector<int64_t> dims;  // inputs and outputs: after the rows
  bool required;
};

struct Kind {
  const char* name;
  lla_layer_desc description;
  std::vector<RoleShape> inputs, outputs, weights;
};

inline lla_layer_desc operator_desc(lla_layer_kind kind) {
  lla_layer_desc d = description_of(kind);
  d.heads = 4;
  d.groups = 2;
  d.key_dim = 3;
  d.value_dim = 5;
  d.grain = 4;
  d.lambda_form = LLA_LAMBDA_READY;
  d.levels = 4;
  return d;
}

inline std::vector<Kind> kinds() {
  std::vector<Kind> list;
  lla_layer_desc d = operator_desc(LLA_LAYER_MIXER);
  d.mixer = LLA_DELTA_RULE;
  d.write_form = LLA_WRITE_READY;
  list.push_back({"mixer",
                  d,
                  {{LLA_Q, {2, 3}, true},
                   {LLA_K, {2, 3}, true},
                   {LLA_V, {4, 5}, true},
                   {LLA_GATE, {4}, false},
                   {LLA_WRITE, {4}, true},
                   {LLA_LAMBDA, {4, 4}, true}},
                  {{LLA_Y, {4, 5}, true}},
                  {}});
  d = operator_desc(LLA_LAYER_CELL);
  d.mixer = LLA_SCALAR_GATE;
  d.lambda_form = LLA_LAMBDA_SOFTPLUS;
  d.gate_form = LLA_GATE_SOFTPLUS;
  d.write_form = LLA_WRITE_SIGMOID;
  d.conv_width = 3;
  d.norm_form = LLA_NORM_GATE_FIRST;
  d.norm_group = 10;
  d.qk_norm = 1;
  list.push_back({"cell",
                  d,
                  {{LLA_Q, {2, 3}, true},
                   {LLA_K, {2, 3}, true},
                   {LLA_V, {4, 5}, true},
                   {LLA_GATE, {4}, true},
                   {LLA_WRITE, {4}, true},
                   {LLA_LAMBDA, {4, 4}, true},
                   {LLA_Z, {20}, false}},
                  {{LLA_Y, {20}, true}},
                  {{LLA_WEIGHT_CONV_Q, {6, 3}, true},
                   {LLA_WEIGHT_CONV_K, {6, 3}, true},
                   {LLA_WEIGHT_CONV_V, {20, 3}, true},
                   {LLA_WEIGHT_CONV_Q_BIAS, {6}, false},
                   {LLA_WEIGHT_CONV_K_BIAS, {6}, false},
                   {LLA_WEIGHT_CONV_V_BIAS, {20}, false},
                   {LLA_WEIGHT_DT_BIAS, {4}, false},
                   {LLA_WEIGHT_A_LOG, {4}, true},
                   {LLA_WEIGHT_LAMBDA, {4, 4}, true},
                   {LLA_WEIGHT_SKIP, {4}, false},
                   {LLA_WEIGHT_NORM, {20}, false}}});
  d = operator_desc(LLA_LAYER_MAMBA2);
  d.lambda_form = LLA_LAMBDA_SOFTPLUS;
  d.hidden = 7;
  list.push_back({"mamba2",
                  d,
                  {{LLA_X, {7}, true}},
                  {{LLA_Y, {7}, true}},
                  {{LLA_WEIGHT_IN_PROJ, {20 + 32 + 4 + 16, 7}, true},
                   {LLA_WEIGHT_IN_PROJ_BIAS, {72}, false},
                   {LLA_WEIGHT_CONV, {32, 4}, true},
                   {LLA_WEIGHT_CONV_BIAS, {32}, false},
                   {LLA_WEIGHT_DT_BIAS, {4}, true},
                   {LLA_WEIGHT_A_LOG, {4}, true},
                   {LLA_WEIGHT_LAMBDA, {4, 4}, true},
                   {LLA_WEIGHT_SKIP, {20}, false},
                   {LLA_WEIGHT_NORM, {20}, false},
                   {LLA_WEIGHT_OUT_PROJ, {7, 20}, true},
                   {LLA_WEIGHT_OUT_PROJ_BIAS, {7}, false}}});
  d = operator_desc(LLA_LAYER_GATED_DELTANET);
  d.lambda_form = LLA_LAMBDA_SOFTPLUS;
  d.hidden = 7;
  list.push_back({"gated_deltanet",
                  d,
                  {{LLA_X, {7}, true}},
                  {{LLA_Y, {7}, true}},
                  {{LLA_WEIGHT_Q_PROJ, {6, 7}, true},
                   {LLA_WEIGHT_K_PROJ, {6, 7}, true},
                   {LLA_WEIGHT_V_PROJ, {20, 7}, true},
                   {LLA_WEIGHT_GATE_PROJ, {4, 7}, true},
                   {LLA_WEIGHT_WRITE_PROJ, {4, 7}, true},
                   {LLA_WEIGHT_Z_PROJ, {20, 7}, false},
                   {LLA_WEIGHT_LAMBDA_PROJ, {16, 7}, true},
                   {LLA_WEIGHT_CONV_Q, {6, 4}, true},
                   {LLA_WEIGHT_CONV_K, {6, 4}, true},
                   {LLA_WEIGHT_CONV_V, {20, 4}, true},
                   {LLA_WEIGHT_CONV_Q_BIAS, {6}, false},
                   {LLA_WEIGHT_CONV_K_BIAS, {6}, false},
                   {LLA_WEIGHT_CONV_V_BIAS, {20}, false},
                   {LLA_WEIGHT_DT_BIAS, {4}, true},
                   {LLA_WEIGHT_A_LOG, {4}, true},
                   {LLA_WEIGHT_LAMBDA, {4, 4}, true},
                   {LLA_WEIGHT_NORM, {5}, false},
                   {LLA_WEIGHT_OUT_PROJ, {7, 20}, true},
                   {LLA_WEIGHT_OUT_PROJ_BIAS, {7}, false}}});
  d = description_of(LLA_LAYER_CONVOLUTION);
  d.hidden = 5;
  list.push_back({"convolution",
                  d,
                  {{LLA_X, {5}, true}},
                  {{LLA_Y, {5}, true}},
                  {{LLA_WEIGHT_CONV, {5, 4}, true}, {LLA_WEIGHT_CONV_BIAS, {5}, false}}});
  d = description_of(LLA_LAYER_GATES);
  d.heads = 4;
  d.levels = 3;
  d.lambda_form = LLA_LAMBDA_BOUNDED;
  d.gate_form = LLA_GATE_SOFTPLUS;
  d.write_form = LLA_WRITE_TWO_SIGMOID;
  list.push_back({"gates",
                  d,
                  {{LLA_GATE, {4}, true}, {LLA_WRITE, {4}, true}, {LLA_LAMBDA, {4, 3}, true}},
                  {{LLA_GATE_OUT, {4}, true}, {LLA_WRITE_OUT, {4}, true}, {LLA_LAMBDA_OUT, {4, 3}, true}},
                  {{LLA_WEIGHT_DT_BIAS, {4}, false}, {LLA_WEIGHT_A_LOG, {4}, true}, {LLA_WEIGHT_LAMBDA, {4, 3}, true}}});
  d = description_of(LLA_LAYER_L2_NORM);
  d.heads = 2;
  d.key_dim = 3;
  list.push_back({"l2_norm", d, {{LLA_X, {2, 3}, true}}, {{LLA_Y, {2, 3}, true}}, {}});
  d = description_of(LLA_LAYER_GATED_NORM);
  d.heads = 4;
  d.value_dim = 5;
  d.norm_form = LLA_NORM_NORM_FIRST;
  list.push_back({"gated_norm",
                  d,
                  {{LLA_X, {20}, true}, {LLA_SKIP_INPUT, {4, 5}, true}, {LLA_Z, {20}, false}},
                  {{LLA_Y, {20}, true}},
                  {{LLA_WEIGHT_SKIP, {4}, true}, {LLA_WEIGHT_NORM, {20}, false}}});
  d = description_of(LLA_LAYER_PROJECTION);
  d.hidden = 7;
  d.outputs = 3;
  list.push_back({"projection",
                  d,
                  {{LLA_X, {7}, true}},
                  {{LLA_Y, {3}, true}},
                  {{LLA_WEIGHT_PROJ, {3, 7}, true}, {LLA_WEIGHT_PROJ_BIAS, {3}, false}}});
  return list;
}

inline std::vector<int64_t> with_rows(const std::vector<int64_t>& dims, int64_t rows = kRows) {
  std::vector<int64_t> all{rows};
  all.insert(all.end(), dims.begin(), dims.end());
  return all;
}

// Prepares calls of one kind; `change` may spoil one binding of one array.
class Calls {
 public:
  Calls(const ContextPointer& context, const Kind& kind)
      : context_(context), layer_(make_layer(context, kind.description)), plan_(context, 3, kRows + 4) {
    plan_.plan(Plan::uniform(3, 2));
    Random random(1);
    const auto make = [&](const std::vector<int64_t>& dims) { return random.tensor(LLA_F32, dims, 0.5); };
    for (const RoleShape& r : kind.inputs) all_.add_io(r.role, keep(make(with_rows(r.dims))));
    inputs_ = all_.io.size();
    for (const RoleShape& r : kind.outputs) {
      all_.add_io(r.role, keep(make(with_rows(r.dims))));
      all_.add_output(r.role, keep(make(with_rows(r.dims))));
    }
    for (const RoleShape& r : kind.weights) all_.add_weight(r.role, keep(make(r.dims)));
    for (const RoleShape& r : kind.inputs) all_.add_gradient(r.role, keep(make(with_rows(r.dims))));
    for (const RoleShape& r : kind.weights) all_.add_gradient(r.role, keep(make(r.dims)));
  }
  const Bindings& forward_bindings() const { return all_; }
  Bindings backward_bindings() const {
    Bindings b = all_;
    b.io.resize(inputs_);
    return b;
  }
  lla_status forward(const Bindings& b) {
    error = Error();
    return cells_testing::forward(*layer_, plan_, b, &error, prepare());
  }
  lla_status backward(const Bindings& b) {
    error = Error();
    return cells_testing::backward(*layer_, plan_, b, &error, prepare());
  }
  Plan& plan() { return plan_; }
  Error error;

 private:
  static Setting prepare() {
    Setting s;
    s.run = false;
    return s;
  }
  const Tensor& keep(Tensor t) {
    kept_.push_back(std::make_unique<Tensor>(std::move(t)));
    return *kept_.back();
  }
  ContextPointer context_;
  LayerPointer layer_;
  Plan plan_;
  Bindings all_;
  size_t inputs_ = 0;
  std::vector<std::unique_ptr<Tensor>> kept_;
};

}  // namespace cells_testing
