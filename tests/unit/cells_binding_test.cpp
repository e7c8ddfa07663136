// SPDX-License-Identifier: Apache-2.0
// Bindings: every role of every kind, each thing that can be wrong with it, with the exact status and the role's name.
#include "cells_kinds.h"

namespace {

using namespace cells_testing;

// One array of bindings of a call.
struct ArrayOf {
  const char* name;
  std::vector<lla_binding> Bindings::*list;
  bool backward;
};
constexpr ArrayOf kArrays[] = {
    {"io", &Bindings::io, false},          {"weights", &Bindings::weights, false}, {"io", &Bindings::io, true},
    {"weights", &Bindings::weights, true}, {"outputs", &Bindings::outputs, true},  {"gradients", &Bindings::gradients, true},
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

// Probe E2.
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
    const bool written = array.list == &Bindings::gradients ||
                         (array.list == &Bindings::io && !array.backward && (b->role == LLA_Y || b->role >= LLA_GATE_OUT));
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

}  // namespace
