// SPDX-License-Identifier: Apache-2.0
// Rules that concern single roles: shapes with a choice, spare columns, levels, fused buffers, types that a state can keep.
#include "cells_kinds.h"

namespace {

using namespace cells_testing;

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
      EXPECT_EQ(forward(*layer, plan, calls.forward_bindings(), &calls.error, setting),
                enough ? LLA_OK : LLA_LEVELS_EXCEEDED)
          << position;
      EXPECT_EQ(backward(*layer, plan, calls.backward_bindings(), &calls.error, setting),
                enough ? LLA_OK : LLA_LEVELS_EXCEEDED);
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
