// SPDX-License-Identifier: Apache-2.0
// Bindings: every role of every kind, each thing that can be wrong with it, with the exact status and the role's name; and the
// order and the rest of what a call checks before it writes anything.
#include "cells_testing.h"

#include "cells/rules.h"

namespace {

using namespace cells_testing;

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

lla_layer_desc operator_desc(lla_layer_kind kind) {
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

std::vector<Kind> kinds() {
  std::vector<Kind> list;
  lla_layer_desc d = operator_desc(LLA_LAYER_MIXER);
  d.mixer = LLA_DELTA_RULE;
  d.write_form = LLA_WRITE_READY;
  list.push_back({"mixer", d,
                  {{LLA_Q, {2, 3}, true}, {LLA_K, {2, 3}, true}, {LLA_V, {4, 5}, true}, {LLA_GATE, {4}, false},
                   {LLA_WRITE, {4}, true}, {LLA_LAMBDA, {4, 4}, true}},
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
  list.push_back({"cell", d,
                  {{LLA_Q, {2, 3}, true}, {LLA_K, {2, 3}, true}, {LLA_V, {4, 5}, true}, {LLA_GATE, {4}, true},
                   {LLA_WRITE, {4}, true}, {LLA_LAMBDA, {4, 4}, true}, {LLA_Z, {20}, false}},
                  {{LLA_Y, {20}, true}},
                  {{LLA_WEIGHT_CONV_Q, {6, 3}, true}, {LLA_WEIGHT_CONV_K, {6, 3}, true}, {LLA_WEIGHT_CONV_V, {20, 3}, true},
                   {LLA_WEIGHT_CONV_Q_BIAS, {6}, false}, {LLA_WEIGHT_CONV_K_BIAS, {6}, false},
                   {LLA_WEIGHT_CONV_V_BIAS, {20}, false}, {LLA_WEIGHT_DT_BIAS, {4}, false}, {LLA_WEIGHT_A_LOG, {4}, true},
                   {LLA_WEIGHT_LAMBDA, {4, 4}, true}, {LLA_WEIGHT_SKIP, {4}, false}, {LLA_WEIGHT_NORM, {20}, false}}});
  d = operator_desc(LLA_LAYER_MAMBA2);
  d.lambda_form = LLA_LAMBDA_SOFTPLUS;
  d.hidden = 7;
  list.push_back({"mamba2", d,
                  {{LLA_X, {7}, true}},
                  {{LLA_Y, {7}, true}},
                  {{LLA_WEIGHT_IN_PROJ, {20 + 32 + 4 + 16, 7}, true}, {LLA_WEIGHT_IN_PROJ_BIAS, {72}, false},
                   {LLA_WEIGHT_CONV, {32, 4}, true}, {LLA_WEIGHT_CONV_BIAS, {32}, false}, {LLA_WEIGHT_DT_BIAS, {4}, true},
                   {LLA_WEIGHT_A_LOG, {4}, true}, {LLA_WEIGHT_LAMBDA, {4, 4}, true}, {LLA_WEIGHT_SKIP, {20}, false},
                   {LLA_WEIGHT_NORM, {20}, false}, {LLA_WEIGHT_OUT_PROJ, {7, 20}, true},
                   {LLA_WEIGHT_OUT_PROJ_BIAS, {7}, false}}});
  d = operator_desc(LLA_LAYER_GATED_DELTANET);
  d.lambda_form = LLA_LAMBDA_SOFTPLUS;
  d.hidden = 7;
  list.push_back({"gated_deltanet", d,
                  {{LLA_X, {7}, true}},
                  {{LLA_Y, {7}, true}},
                  {{LLA_WEIGHT_Q_PROJ, {6, 7}, true}, {LLA_WEIGHT_K_PROJ, {6, 7}, true}, {LLA_WEIGHT_V_PROJ, {20, 7}, true},
                   {LLA_WEIGHT_GATE_PROJ, {4, 7}, true}, {LLA_WEIGHT_WRITE_PROJ, {4, 7}, true},
                   {LLA_WEIGHT_Z_PROJ, {20, 7}, false}, {LLA_WEIGHT_LAMBDA_PROJ, {16, 7}, true},
                   {LLA_WEIGHT_CONV_Q, {6, 4}, true}, {LLA_WEIGHT_CONV_K, {6, 4}, true}, {LLA_WEIGHT_CONV_V, {20, 4}, true},
                   {LLA_WEIGHT_CONV_Q_BIAS, {6}, false}, {LLA_WEIGHT_CONV_K_BIAS, {6}, false},
                   {LLA_WEIGHT_CONV_V_BIAS, {20}, false}, {LLA_WEIGHT_DT_BIAS, {4}, true}, {LLA_WEIGHT_A_LOG, {4}, true},
                   {LLA_WEIGHT_LAMBDA, {4, 4}, true}, {LLA_WEIGHT_NORM, {5}, false}, {LLA_WEIGHT_OUT_PROJ, {7, 20}, true},
                   {LLA_WEIGHT_OUT_PROJ_BIAS, {7}, false}}});
  d = description_of(LLA_LAYER_CONVOLUTION);
  d.hidden = 5;
  list.push_back({"convolution", d, {{LLA_X, {5}, true}}, {{LLA_Y, {5}, true}},
                  {{LLA_WEIGHT_CONV, {5, 4}, true}, {LLA_WEIGHT_CONV_BIAS, {5}, false}}});
  d = description_of(LLA_LAYER_GATES);
  d.heads = 4;
  d.levels = 3;
  d.lambda_form = LLA_LAMBDA_BOUNDED;
  d.gate_form = LLA_GATE_SOFTPLUS;
  d.write_form = LLA_WRITE_TWO_SIGMOID;
  list.push_back({"gates", d,
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
  list.push_back({"gated_norm", d,
                  {{LLA_X, {20}, true}, {LLA_SKIP_INPUT, {4, 5}, true}, {LLA_Z, {20}, false}},
                  {{LLA_Y, {20}, true}},
                  {{LLA_WEIGHT_SKIP, {4}, true}, {LLA_WEIGHT_NORM, {20}, false}}});
  d = description_of(LLA_LAYER_PROJECTION);
  d.hidden = 7;
  d.outputs = 3;
  list.push_back({"projection", d, {{LLA_X, {7}, true}}, {{LLA_Y, {3}, true}},
                  {{LLA_WEIGHT_PROJ, {3, 7}, true}, {LLA_WEIGHT_PROJ_BIAS, {3}, false}}});
  return list;
}

std::vector<int64_t> with_rows(const std::vector<int64_t>& dims, int64_t rows = kRows) {
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

// One array of bindings of a call.
struct ArrayOf {
  const char* name;
  std::vector<lla_binding> Bindings::*list;
  bool backward;
};
constexpr ArrayOf kArrays[] = {
    {"io", &Bindings::io, false},          {"weights", &Bindings::weights, false},
    {"io", &Bindings::io, true},           {"weights", &Bindings::weights, true},
    {"outputs", &Bindings::outputs, true}, {"gradients", &Bindings::gradients, true},
};

class Binding : public testing::TestWithParam<size_t> {
 protected:
  Kind kind_ = kinds()[GetParam()];
  ContextPointer context_ = make_context(LLA_BACKEND_REFERENCE);
  Calls calls_{context_, kind_};

  // Spoils each binding in turn; every spoiled call must give `status` and name array and role.
  void each(lla_status status, const std::function<bool(lla_binding*, const ArrayOf&)>& spoil) {
    for (const ArrayOf& array : kArrays) {
      const Bindings good = array.backward ? calls_.backward_bindings() : calls_.forward_bindings();
      for (size_t i = 0; i < (good.*array.list).size(); ++i) {
        Bindings bad = good;
        lla_binding* b = &(bad.*array.list)[i];
        const std::string role = role_name(b->role);
        if (!spoil(b, array)) continue;
        const lla_status got = array.backward ? calls_.backward(bad) : calls_.forward(bad);
        EXPECT_EQ(got, status) << array.name << " " << role << ": " << calls_.error.text;
        const std::string text = calls_.error.text;
        EXPECT_NE(text.find(array.name), std::string::npos) << text;
        EXPECT_NE(text.find(role), std::string::npos) << text;
      }
    }
  }
};

TEST_P(Binding, GoodCallsAreAccepted) {
  EXPECT_EQ(calls_.forward(calls_.forward_bindings()), LLA_OK) << calls_.error.text;
  EXPECT_EQ(calls_.backward(calls_.backward_bindings()), LLA_OK) << calls_.error.text;
  Bindings b = calls_.backward_bindings();
  b.gradients.clear();
  EXPECT_EQ(calls_.backward(b), LLA_OK) << calls_.error.text;
}

TEST_P(Binding, MissingRoles) {
  const auto required = [&](lla_role role) {
    for (const auto* list : {&kind_.inputs, &kind_.outputs, &kind_.weights}) {
      for (const RoleShape& r : *list) {
        if (r.role == role) return r.required;
      }
    }
    return false;
  };
  for (const ArrayOf& array : kArrays) {
    if (array.list == &Bindings::gradients) continue;
    const Bindings good = array.backward ? calls_.backward_bindings() : calls_.forward_bindings();
    for (size_t i = 0; i < (good.*array.list).size(); ++i) {
      Bindings bad = good;
      const lla_role role = (bad.*array.list)[i].role;
      (bad.*array.list).erase((bad.*array.list).begin() + static_cast<std::ptrdiff_t>(i));
      // What is not given has no gradient either.
      for (size_t g = 0; g < bad.gradients.size(); ++g) {
        if (bad.gradients[g].role == role) bad.gradients.erase(bad.gradients.begin() + static_cast<std::ptrdiff_t>(g));
      }
      const lla_status got = array.backward ? calls_.backward(bad) : calls_.forward(bad);
      EXPECT_EQ(got, required(role) ? LLA_MISSING_ROLE : LLA_OK) << array.name << " " << role_name(role);
      if (got == LLA_MISSING_ROLE) {
        EXPECT_EQ(std::string(calls_.error.text), std::string(array.name) + ": " + role_name(role) + " is missing");
      }
    }
  }
}

TEST_P(Binding, GradientsOfWhatIsNotThere) {
  const Bindings good = calls_.backward_bindings();
  for (const lla_binding& g : good.gradients) {
    Bindings bad = good;
    for (auto* list : {&bad.io, &bad.weights}) {
      for (size_t i = 0; i < list->size(); ++i) {
        if ((*list)[i].role == g.role) list->erase(list->begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    const lla_status status = calls_.backward(bad);
    EXPECT_TRUE(status == LLA_MISSING_ROLE || status == LLA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(calls_.error.text).find(role_name(g.role)), std::string::npos) << calls_.error.text;
  }
}

TEST_P(Binding, RolesGivenTwice) {
  for (const ArrayOf& array : kArrays) {
    const Bindings good = array.backward ? calls_.backward_bindings() : calls_.forward_bindings();
    for (size_t i = 0; i < (good.*array.list).size(); ++i) {
      Bindings bad = good;
      const lla_binding again = (bad.*array.list)[i];
      (bad.*array.list).push_back(again);
      EXPECT_EQ(array.backward ? calls_.backward(bad) : calls_.forward(bad), LLA_MISSING_ROLE) << calls_.error.text;
      EXPECT_NE(std::string(calls_.error.text).find("twice"), std::string::npos) << calls_.error.text;
    }
  }
}

TEST_P(Binding, UnknownRoles) {
  for (const ArrayOf& array : kArrays) {
    for (const lla_role role : {0, -1, 14, 99, 110, 133, 1 << 20, LLA_Z, LLA_Y, LLA_X, LLA_WEIGHT_PROJ, LLA_WEIGHT_CONV}) {
      Bindings bad = array.backward ? calls_.backward_bindings() : calls_.forward_bindings();
      bool known = false;
      for (const lla_binding& b : bad.*array.list) known = known || b.role == role;
      if (known) continue;
      lla_binding b = bad.io[0];
      b.role = role;
      (bad.*array.list).push_back(b);
      EXPECT_EQ(array.backward ? calls_.backward(bad) : calls_.forward(bad), LLA_INVALID_ARGUMENT) << array.name << role;
    }
  }
}

TEST_P(Binding, Flags) {
  each(LLA_INVALID_ARGUMENT, [](lla_binding* b, const ArrayOf& array) {
    b->flags = array.list == &Bindings::gradients ? 2 : LLA_ACCUMULATE;
    return true;
  });
}

TEST_P(Binding, Types) {
  for (const lla_dtype dtype : {0, -1, LLA_I32, LLA_I64, 7}) {
    each(LLA_DTYPE_MISMATCH, [dtype](lla_binding* b, const ArrayOf&) {
      b->tensor.dtype = dtype;
      return true;
    });
  }
  // Every floating-point type is good anywhere (the memory is not looked at here).
  for (const lla_dtype dtype : {LLA_BF16, LLA_F16}) {
    Bindings b = calls_.backward_bindings();
    for (auto* list : {&b.io, &b.weights, &b.outputs, &b.gradients}) {
      for (lla_binding& x : *list) x.tensor.dtype = dtype;
    }
    EXPECT_EQ(calls_.backward(b), LLA_OK) << calls_.error.text;
  }
}

TEST_P(Binding, Ranks) {
  for (const int32_t change : {-2, -1, 1, 2, 3, 100}) {
    each(LLA_SHAPE_MISMATCH, [change](lla_binding* b, const ArrayOf& array) {
      const bool weight = array.list == &Bindings::weights || b->role >= LLA_WEIGHT_CONV;
      const bool conv = b->role >= LLA_WEIGHT_CONV && b->role <= LLA_WEIGHT_CONV_V && b->role != LLA_WEIGHT_CONV_BIAS;
      if (change == 1 && (!weight || conv)) return false;  // shapes that exist; their sizes are tested elsewhere
      b->tensor.rank += change;
      return true;
    });
  }
}

TEST_P(Binding, Dims) {
  for (int axis = 0; axis < 3; ++axis) {
    for (const int64_t change : {int64_t{-1}, int64_t{1}, int64_t{-1000}, int64_t{1} << 60}) {
      each(LLA_SHAPE_MISMATCH, [=](lla_binding* b, const ArrayOf& array) {
        if (axis >= b->tensor.rank) return false;
        const bool spare = b->role == LLA_LAMBDA && axis == 2 && array.list == &Bindings::io && change > 0;
        if (spare) return false;
        b->tensor.dims[axis] += change;
        return true;
      });
    }
  }
}

TEST_P(Binding, Strides) {
  for (int axis = 0; axis < 3; ++axis) {
    for (const int64_t stride : {int64_t{-1}, INT64_MIN}) {
      each(LLA_SHAPE_MISMATCH, [=](lla_binding* b, const ArrayOf&) {
        if (axis >= b->tensor.rank) return false;
        b->tensor.strides[axis] = stride;
        return true;
      });
    }
  }
  for (const int64_t stride : {0, 2}) {
    each(LLA_SHAPE_MISMATCH, [=](lla_binding* b, const ArrayOf&) {
      b->tensor.strides[b->tensor.rank - 1] = stride;
      return true;
    });
  }
  for (const int64_t stride : {INT64_MAX, INT64_MAX / 8, int64_t{1} << 61}) {
    each(LLA_SIZE_OVERFLOW, [=](lla_binding* b, const ArrayOf&) {
      if (b->tensor.rank == 1) return false;
      b->tensor.strides[0] = stride;
      return true;
    });
  }
  // Rows that coincide are good to read and bad to write.
  each(LLA_SHAPE_MISMATCH, [](lla_binding* b, const ArrayOf& array) {
    const bool written = array.list == &Bindings::gradients || (array.list == &Bindings::io && !array.backward &&
                                                                (b->role == LLA_Y || b->role >= LLA_GATE_OUT));
    if (!written || b->tensor.rank == 1) return false;
    b->tensor.strides[0] = 0;
    return true;
  });
  Bindings b = calls_.backward_bindings();
  for (auto* list : {&b.io, &b.outputs}) {
    for (lla_binding& x : *list) x.tensor.strides[0] = 0;
  }
  EXPECT_EQ(calls_.backward(b), LLA_OK) << calls_.error.text;
}

TEST_P(Binding, Pointers) {
  each(LLA_NULL_POINTER, [](lla_binding* b, const ArrayOf&) {
    b->tensor.data = nullptr;
    return true;
  });
  each(LLA_MISALIGNED, [](lla_binding* b, const ArrayOf&) {
    b->tensor.data = static_cast<char*>(b->tensor.data) + 1;
    return true;
  });
  each(LLA_SIZE_OVERFLOW, [](lla_binding* b, const ArrayOf&) {
    b->tensor.data = reinterpret_cast<void*>(UINTPTR_MAX - 3);
    return true;
  });
}

TEST_P(Binding, CountsAndArrays) {
  Bindings good = calls_.forward_bindings();
  lla_forward_args a = LLA_FORWARD_ARGS_INIT;
  Memory workspace(1 << 20);
  a.workspace = workspace.data();
  a.workspace_bytes = workspace.bytes();
  Program* program = nullptr;
  Error error;
  const LayerPointer layer = make_layer(context_, kind_.description);
  const auto prepare = [&] { return prepare_forward(*layer, a, calls_.plan().batch(), nullptr, &program, &error); };
  a.io_count = -1;
  EXPECT_EQ(prepare(), LLA_INVALID_ARGUMENT);
  a.io_count = 1;
  EXPECT_EQ(prepare(), LLA_NULL_POINTER);
  a.io = good.io.data();
  a.io_count = static_cast<int64_t>(good.io.size());
  a.weight_count = -1;
  EXPECT_EQ(prepare(), LLA_INVALID_ARGUMENT);
  a.weight_count = 2;
  EXPECT_EQ(prepare(), LLA_NULL_POINTER);
}

TEST_P(Binding, OutputsMustNotTouchInputs) {
  for (const ArrayOf& array : kArrays) {
    const Bindings good = array.backward ? calls_.backward_bindings() : calls_.forward_bindings();
    for (size_t i = 0; i < (good.*array.list).size(); ++i) {
      const lla_role role = (good.*array.list)[i].role;
      const bool output = array.list == &Bindings::gradients ||
                          (array.list == &Bindings::io && !array.backward && (role == LLA_Y || role >= LLA_GATE_OUT));
      if (output) continue;
      for (const int64_t shift : {0, 4}) {
        Bindings bad = good;
        lla_binding& written = array.backward ? bad.gradients.front() : bad.io.back();
        if (shift && written.tensor.rank == 1) continue;
        written.tensor.data = static_cast<char*>((bad.*array.list)[i].tensor.data) + shift;
        if (written.tensor.rank > 1) written.tensor.strides[0] = 1000;  // other rows than the input's
        EXPECT_EQ(array.backward ? calls_.backward(bad) : calls_.forward(bad), LLA_INVALID_ARGUMENT) << role_name(role);
        EXPECT_NE(std::string(calls_.error.text).find(role_name(role)), std::string::npos) << calls_.error.text;
        EXPECT_NE(std::string(calls_.error.text).find("overlaps"), std::string::npos) << calls_.error.text;
      }
    }
  }
}

TEST_P(Binding, UniformBatchesTakeOneRankMore) {
  Bindings b = calls_.backward_bindings(), f = calls_.forward_bindings();
  const auto widen = [](lla_tensor* t) {  // [6, ...] -> [3, 2, ...]
    for (int i = t->rank; i > 0; --i) {
      t->dims[i] = t->dims[i - 1];
      t->strides[i] = t->strides[i - 1];
    }
    ++t->rank;
    t->dims[0] = 3;
    t->dims[1] = 2;
    t->strides[0] = 2 * t->strides[1];
  };
  for (lla_binding& x : f.io) widen(&x.tensor);
  for (auto* list : {&b.io, &b.outputs}) {
    for (lla_binding& x : *list) widen(&x.tensor);
  }
  for (lla_binding& x : b.gradients) {
    if (x.role < LLA_WEIGHT_CONV) widen(&x.tensor);
  }
  EXPECT_EQ(calls_.forward(f), LLA_OK) << calls_.error.text;
  EXPECT_EQ(calls_.backward(b), LLA_OK) << calls_.error.text;
  for (const int axis : {0, 1}) {
    Bindings bad = f;
    bad.io[0].tensor.dims[axis] = 1;
    EXPECT_EQ(calls_.forward(bad), LLA_SHAPE_MISMATCH) << calls_.error.text;
  }
  const std::vector<int64_t> offsets{0, 1, 4, 6};  // not uniform
  lla_rows rows = LLA_ROWS_INIT;
  rows.sequences = 3;
  rows.offsets = {offsets.data(), LLA_I64, LLA_HOST};
  calls_.plan().plan(rows);
  EXPECT_EQ(calls_.forward(calls_.forward_bindings()), LLA_OK) << calls_.error.text;
  EXPECT_EQ(calls_.forward(f), LLA_SHAPE_MISMATCH) << calls_.error.text;
  rows = Plan::uniform(3, 2);
  rows.total_rows = 8;  // [3, 2] would leave rows 6 and 7 out
  calls_.plan().plan(rows);
  EXPECT_EQ(calls_.forward(f), LLA_SHAPE_MISMATCH) << calls_.error.text;
}

TEST_P(Binding, NoRowsNeedNoMemory) {
  Bindings f = calls_.forward_bindings(), b = calls_.backward_bindings();
  const auto empty = [](lla_binding* x) {
    if (x->role >= LLA_WEIGHT_CONV) return;
    x->tensor.dims[0] = 0;
    x->tensor.data = nullptr;
  };
  for (lla_binding& x : f.io) empty(&x);
  for (auto* list : {&b.io, &b.outputs, &b.gradients}) {
    for (lla_binding& x : *list) empty(&x);
  }
  lla_rows rows = LLA_ROWS_INIT;
  calls_.plan().plan(rows);
  EXPECT_EQ(calls_.forward(f), LLA_OK) << calls_.error.text;
  EXPECT_EQ(calls_.backward(b), LLA_OK) << calls_.error.text;
}

std::string kind_name(const testing::TestParamInfo<size_t>& info) { return kinds()[info.param].name; }
INSTANTIATE_TEST_SUITE_P(Kinds, Binding, testing::Range(size_t{0}, kinds().size()), kind_name);

// ---- rules that concern single roles -------------------------------------------------------------------------------------

class Rules : public testing::Test {
 protected:
  ContextPointer context_ = make_context(LLA_BACKEND_REFERENCE);
  std::vector<Kind> kinds_ = kinds();
  static lla_binding& find(std::vector<lla_binding>* list, lla_role role) {
    for (lla_binding& b : *list) {
      if (b.role == role) return b;
    }
    ADD_FAILURE() << role;
    return list->front();
  }
};

TEST_F(Rules, WideTypesAreForTheReference) {
  Backend narrow = reference_backend();
  narrow.compute_dtype = LLA_F32;
  const ContextPointer context = make_context(LLA_BACKEND_REFERENCE);
  context->backend = &narrow;
  Calls calls(context, kinds_[0]);
  for (size_t i = 0; i < calls.forward_bindings().io.size(); ++i) {
    Bindings b = calls.forward_bindings();
    b.io[i].tensor.dtype = LLA_F64;
    EXPECT_EQ(calls.forward(b), LLA_DTYPE_MISMATCH);
  }
}

TEST_F(Rules, ShapesWithAChoice) {
  Calls cell(context_, kinds_[1]);
  Random random(2);
  const Tensor skip = random.tensor(LLA_F32, {20}), norm = random.tensor(LLA_F32, {10}), other = random.tensor(LLA_F32, {4});
  Bindings b = cell.backward_bindings();
  find(&b.weights, LLA_WEIGHT_SKIP).tensor = skip.view();
  EXPECT_EQ(cell.backward(b), LLA_SHAPE_MISMATCH);  // its gradient is still [H]
  EXPECT_NE(std::string(cell.error.text).find("gradients: LLA_WEIGHT_SKIP: dims[0] must be 20, is 4"), std::string::npos)
      << cell.error.text;
  const Tensor dskip = random.tensor(LLA_F32, {20}), dnorm = random.tensor(LLA_F32, {10});
  find(&b.gradients, LLA_WEIGHT_SKIP).tensor = dskip.view();
  EXPECT_EQ(cell.backward(b), LLA_OK) << cell.error.text;
  find(&b.gradients, LLA_WEIGHT_NORM).tensor = dnorm.view();
  EXPECT_EQ(cell.backward(b), LLA_SHAPE_MISMATCH);
  EXPECT_NE(std::string(cell.error.text).find("gradients: LLA_WEIGHT_NORM: dims[0] must be 20, is 10"), std::string::npos)
      << cell.error.text;
  find(&b.weights, LLA_WEIGHT_NORM).tensor = norm.view();
  EXPECT_EQ(cell.backward(b), LLA_OK) << cell.error.text;
  find(&b.weights, LLA_WEIGHT_NORM).tensor = other.view();
  EXPECT_EQ(cell.backward(b), LLA_SHAPE_MISMATCH);

  Calls conv(context_, kinds_[4]);
  Bindings f = conv.forward_bindings();
  const Tensor three = random.tensor(LLA_F32, {5, 1, 4}), bad = random.tensor(LLA_F32, {5, 2, 4});
  find(&f.weights, LLA_WEIGHT_CONV).tensor = three.view();
  EXPECT_EQ(conv.forward(f), LLA_OK) << conv.error.text;
  find(&f.weights, LLA_WEIGHT_CONV).tensor = bad.view();
  EXPECT_EQ(conv.forward(f), LLA_SHAPE_MISMATCH);
  EXPECT_NE(std::string(conv.error.text).find("dims[1] must be 1, is 2"), std::string::npos) << conv.error.text;
}

TEST_F(Rules, SpareLambdaColumns) {
  Random random(3);
  const Tensor wide = random.tensor(LLA_F32, {kRows, 4, 9}), narrow = random.tensor(LLA_F32, {kRows, 4, 3});
  Calls calls(context_, kinds_[0]);
  Bindings b = calls.forward_bindings();
  find(&b.io, LLA_LAMBDA).tensor = wide.view();
  EXPECT_EQ(calls.forward(b), LLA_OK) << calls.error.text;
  find(&b.io, LLA_LAMBDA).tensor = narrow.view();
  EXPECT_EQ(calls.forward(b), LLA_SHAPE_MISMATCH);
  EXPECT_NE(std::string(calls.error.text).find("io: LLA_LAMBDA: dims[2] must be at least 4, is 3"), std::string::npos)
      << calls.error.text;
  Kind absorbing = kinds_[0];
  absorbing.description.level_overflow = LLA_LEVELS_ABSORB;
  Calls absorb(context_, absorbing);
  b = absorb.forward_bindings();
  EXPECT_EQ(absorb.forward(b), LLA_OK) << absorb.error.text;
  find(&b.io, LLA_LAMBDA).tensor = wide.view();
  EXPECT_EQ(absorb.forward(b), LLA_SHAPE_MISMATCH);
}

TEST_F(Rules, TooFewLevels) {
  Kind kind = kinds_[0];
  for (const bool absorb : {false, true}) {
    kind.description.levels = 4;  // 8 tokens
    kind.description.level_overflow = absorb ? LLA_LEVELS_ABSORB : LLA_LEVELS_ERROR;
    Calls calls(context_, kind);
    const std::vector<int64_t> offsets{0, 2, 4, 6};
    lla_rows rows = LLA_ROWS_INIT;
    rows.sequences = 3;
    rows.offsets = {offsets.data(), LLA_I64, LLA_HOST};
    for (const int64_t position : {0, 5, 6, 7, 100}) {
      const std::vector<int64_t> positions{0, position, 1};
      rows.expected_positions = {positions.data(), LLA_I64, LLA_HOST};
      Plan plan(context_, 3, kRows, 1000);
      plan.plan(rows);
      const LayerPointer layer = make_layer(context_, kind.description);
      Setting setting;
      setting.run = false;
      const bool enough = absorb || position <= 6;
      EXPECT_EQ(forward(*layer, plan, calls.forward_bindings(), &calls.error, setting), enough ? LLA_OK : LLA_LEVELS_EXCEEDED)
          << position;
      EXPECT_EQ(backward(*layer, plan, calls.backward_bindings(), &calls.error, setting), enough ? LLA_OK : LLA_LEVELS_EXCEEDED);
      if (!enough) {
        EXPECT_NE(std::string(calls.error.text).find("sequence 1"), std::string::npos) << calls.error.text;
        EXPECT_NE(std::string(calls.error.text).find("has 4"), std::string::npos) << calls.error.text;
      }
    }
  }
}

// A fused buffer: outputs in columns beside the inputs do not overlap, one column farther they do.
TEST_F(Rules, ColumnsOfAFusedBuffer) {
  Calls calls(context_, kinds_[8]);
  std::vector<float> buffer(kRows * 16);
  Bindings b = calls.forward_bindings();
  const auto column = [&](int64_t first, int64_t width) {
    lla_tensor t = lla_tensor_of(buffer.data() + first, LLA_F32, kRows, width, -1, -1);
    t.strides[0] = 16;
    return t;
  };
  find(&b.io, LLA_X).tensor = column(3, 7);
  for (int64_t first = 0; first + 3 <= 16; ++first) {
    find(&b.io, LLA_Y).tensor = column(first, 3);
    const bool apart = first + 3 <= 3 || first >= 10;
    EXPECT_EQ(calls.forward(b), apart ? LLA_OK : LLA_INVALID_ARGUMENT) << first;
  }
  find(&b.io, LLA_Y).tensor = column(14, 3);  // wraps into column 0 of the next row
  EXPECT_EQ(calls.forward(b), LLA_OK) << calls.error.text;
  find(&b.io, LLA_X).tensor = column(0, 7);
  EXPECT_EQ(calls.forward(b), LLA_INVALID_ARGUMENT);
}

TEST_F(Rules, SkipNeedsBothItsParts) {
  Calls calls(context_, kinds_[7]);
  Bindings b = calls.forward_bindings();
  b.weights.erase(b.weights.begin());
  EXPECT_EQ(calls.forward(b), LLA_MISSING_ROLE);
  b = calls.forward_bindings();
  b.weights.erase(b.weights.begin());
  b.io.erase(b.io.begin() + 1);
  EXPECT_EQ(calls.forward(b), LLA_OK) << calls.error.text;
}

// Rows must not be wider than the tail of the state that keeps them.
TEST_F(Rules, TailTypes) {
  const lla_dtype floats[] = {LLA_F64, LLA_F32, LLA_BF16, LLA_F16};
  const auto fits = [](lla_dtype dtype, lla_dtype tail) {
    return tail == LLA_F64 || dtype == tail || (tail == LLA_F32 && (dtype == LLA_BF16 || dtype == LLA_F16));
  };
  Kind kind = kinds_[0];
  const LayerPointer layer = make_layer(context_, kind.description);
  for (const lla_dtype tail : floats) {
    StateRig state(context_, *layer, 3, 8, LLA_STATE_VALUE, tail);
    for (const lla_dtype dtype : floats) {
      for (const lla_role role : {LLA_Q, LLA_K, LLA_V, LLA_GATE, LLA_WRITE}) {
        Plan plan(context_, 3, kRows, 8);
        plan.plan(Plan::uniform(3, 2), state.get());
        Random random(4);
        Bindings b;
        std::vector<Tensor> keep;
        for (const auto* list : {&kind.inputs, &kind.outputs}) {
          for (const RoleShape& r : *list) {
            const bool row = r.role == LLA_K || r.role == LLA_V;
            keep.push_back(random.tensor(r.role == role ? dtype : row ? tail : LLA_F32, with_rows(r.dims)));
            b.add_io(r.role, keep.back());
          }
        }
        Setting setting;
        setting.state = state.get();
        setting.run = false;
        Error error;
        const bool row = role == LLA_K || role == LLA_V, gate = role == LLA_GATE || role == LLA_WRITE;
        const bool good = row ? fits(dtype, tail) : !gate || dtype != LLA_F64 || tail == LLA_F64;
        EXPECT_EQ(forward(*layer, plan, b, &error, setting), good ? LLA_OK : LLA_DTYPE_MISMATCH)
            << role_name(role) << " " << dtype << " in " << tail << ": " << error.text;
      }
    }
  }
}

}  // namespace
