// SPDX-License-Identifier: Apache-2.0
// The scalar gate's backward on Hopper as a whole, on the emulator against the reference, and what it leaves to the portable
// kernels.
#include <cstdlib>

#include "scalar_gate_testing.h"

namespace {

using namespace scalar_gate_testing;

// The emulated device is a Hopper one while a test runs.
class HopperScalarGateBackward : public ::testing::Test {
 protected:
  void SetUp() override { setenv("LLA_EMULATED_HOPPER", "1", 1); }
  void TearDown() override {
    unsetenv("LLA_EMULATED_HOPPER");
    unsetenv("LLA_EMULATED_SCRATCH");
  }
};

Kernels hopper_kernels() {
  Kernels k;
  const cuda::KernelTable table = cuda::scalar_gate_kernels();
  for (int64_t i = 0; i < table.count; ++i) {
    const std::string name = table.kernels[i].name;
    if (name == "cuda.scalar_gate.forward.hopper") k.forward = &table.kernels[i];
    if (name == "cuda.scalar_gate.backward.hopper") k.backward = &table.kernels[i];
  }
  return k;
}

Case make_case(int64_t heads, int64_t groups, int64_t dk, int64_t dv, int64_t levels, std::vector<Part> parts) {
  Case c;
  c.shape = make_shape(heads, groups, dk, dv, 64, levels, false, false, 0.125);
  c.inputs.dtype = c.out_dtype = LLA_BF16;
  c.parts = std::move(parts);
  return c;
}

Values run_hopper(const Case& c) { return run_case(hopper_kernels(), c); }

void check_type(const Case& c, double most) {
  SCOPED_TRACE(describe(c));
  ASSERT_NE(hopper_kernels().backward, nullptr);
  const Values got = run_hopper(c), want = run_case(reference_kernels(), c);
  for (const auto& [name, values] : want) {
    const double error = norm_error(got.at(name), values);
    EXPECT_LT(error, most) << name;
    if (std::getenv("LLA_PRINT")) std::printf("%s %.2e  ", name.c_str(), error);
  }
  if (std::getenv("LLA_PRINT")) std::printf("\n");
}

Case of_type(Case c, int32_t dtype) {
  c.inputs.dtype = c.out_dtype = dtype;
  return c;
}

// Rows of bf16 and of fp16, whose errors are an eighth.
void check(const Case& c) {
  check_type(of_type(c, LLA_BF16), 8e-3);
  check_type(of_type(c, LLA_F16), 1e-3);
}

void expect_same(const Values& a, const Values& b) {
  for (const auto& [name, values] : a) EXPECT_EQ(b.at(name), values) << name;
}

TEST_F(HopperScalarGateBackward, LogLinear) {
  check(make_case(2, 1, 128, 64, 10, {{300}, {64}, {0}, {1}, {128}}));
  check(make_case(1, 1, 64, 64, 12, {{1500}}));
}

TEST_F(HopperScalarGateBackward, Linear) {
  check(make_case(2, 2, 128, 64, 0, {{300}, {129}, {0}, {127}}));
  check(make_case(1, 1, 64, 64, 0, {{1300}}));
}

// Rows, columns and heads that fill no tile; one group for several heads, in either order.
TEST_F(HopperScalarGateBackward, OddShapes) {
  Case c = make_case(4, 2, 40, 8, 10, {{200}, {17}});
  c.inputs.pad = 8;
  check(c);
  c = make_case(4, 2, 96, 40, 10, {{260}});
  c.shape.head_map = LLA_HEAD_MAP_CYCLIC;
  check(c);
  c.shape.levels = 0;
  check(c);
}

// Nodes and their gradients far beyond the largest fp16 number, and far below the least that keeps its bits. Results are of
// ordinary size.
TEST_F(HopperScalarGateBackward, SumsBeyondTheRangeOfRows) {
  Case c = make_case(1, 1, 64, 32, 16, {{16384 + 300}});
  c.inputs.lift = 4;
  c.inputs.row_lift = 1;
  c.inputs.decay = 1e-6;
  c.inputs.lambda_size = 0.005;
  check(c);
  c.shape.levels = 0;
  c.shape.scale = 1e-4;
  check(c);
  c = make_case(1, 1, 64, 32, 15, {{3000}});
  c.inputs.decay = 0.002;
  for (const int64_t levels : {15, 0}) {
    c.shape.levels = levels;
    c.inputs.write_size = 1e-6;
    c.shape.scale = 1e5;
    check(c);
    c.inputs.write_size = 1e6;
    c.shape.scale = 1e-7;
    check(c);
    c.inputs.write_size = 1;
    c.shape.scale = 0.125;
    c.inputs.gradient_size = 1e-4;
    check(c);
    c.inputs.gradient_size = 300;
    check(c);
    c.inputs.gradient_size = 1;
  }
}

// fp16: units follow the size of dy, so that bits do not depend on it.
TEST_F(HopperScalarGateBackward, SizeOfOutputGradients) {
  for (const int64_t levels : {0, 10}) {
    Case c = of_type(make_case(2, 1, 40, 8, levels, {{300}}), LLA_F16);
    const Values usual = run_hopper(c);
    c.inputs.gradient_size = 64;
    const Values large = run_hopper(c);
    for (const auto& [name, values] : usual) {
      if (name == "y") continue;
      for (size_t i = 0; i < values.size(); ++i) {
        if (std::abs(values[i]) < 1e-3) continue;
        ASSERT_EQ(large.at(name)[i], 64 * values[i]) << name << ' ' << i;
      }
    }
  }
}

// An empty past: the call begins within a block, at any node level.
TEST_F(HopperScalarGateBackward, Positions) {
  check(make_case(1, 1, 64, 16, 15, {{300, 1000}, {200, 64}, {70, 130}, {400, 8192 - 200}}));
  check(make_case(1, 1, 64, 16, 0, {{300, 1000}, {70, 130}, {300, 16384 - 100}}));
}

// Gates of -inf and -700, strong ones, and none at all; no write strength.
TEST_F(HopperScalarGateBackward, HardGates) {
  Case c = make_case(2, 1, 64, 16, 10, {{400}});
  c.inputs.hard = 0.05;
  check(c);
  c.shape.levels = 0;
  check(c);
  c.inputs.hard = 0;
  c.inputs.decay = 25;
  check(c);
  c.shape.levels = 10;
  check(c);
  c.inputs.gate = c.inputs.write = false;
  check(c);
  c.shape.levels = 0;
  check(c);
}

// Keys and values of more columns than the kernels take at once.
TEST_F(HopperScalarGateBackward, WideRows) {
  check(make_case(2, 1, 64, 128, 10, {{300}, {64, 70}}));
  check(make_case(2, 2, 136, 72, 10, {{200}}));
  Case c = make_case(9, 1, 256, 16, 0, {{150}});
  c.accumulate = true;
  check(c);
}

// Without a state it makes no difference how long the chunks are that a state would keep apart.
TEST_F(HopperScalarGateBackward, Grains) {
  Case c = make_case(1, 1, 64, 16, 10, {{300, 192}, {70}});
  const Values usual = run_hopper(c);
  for (const int64_t grain : {16, 128}) {
    c.shape.grain = grain;
    expect_same(usual, run_hopper(c));
  }
}

TEST_F(HopperScalarGateBackward, Absorbing) {
  Case c = make_case(1, 1, 64, 16, 4, {{700}});
  c.shape.absorb = true;
  check(c);
  c.shape.levels = 9;
  check(c);
}

TEST_F(HopperScalarGateBackward, TypesOfFactors) {
  Case c = make_case(1, 1, 64, 16, 10, {{300}});
  c.factor_dtype = LLA_BF16;
  check(c);
  c.factor_dtype = LLA_F16;
  check(c);
}

TEST_F(HopperScalarGateBackward, Accumulates) {
  Case c = make_case(10, 1, 40, 8, 10, {{200}, {100}});
  c.accumulate = true;
  check(c);
  c.shape.groups = 2;
  check(c);
}

TEST_F(HopperScalarGateBackward, AbsentGradients) {
  Case c = make_case(2, 1, 64, 16, 10, {{300}});
  const Values all = run_hopper(c);
  const std::vector<std::string> names = {"dq", "dk", "dv", "dgate", "dwrite", "dlambda"};
  for (const std::string& wanted : names) {
    SCOPED_TRACE(wanted);
    c.absent = {wanted};
    const Values others = run_hopper(c);
    for (const std::string& name : names) EXPECT_EQ(others.at(name) == all.at(name), name != wanted) << name;
    c.absent.clear();
    for (const std::string& name : names) {
      if (name != wanted) c.absent.push_back(name);
    }
    EXPECT_EQ(run_hopper(c).at(wanted), all.at(wanted));
  }
}

// Groups of more heads than one block of threads sums up.
TEST_F(HopperScalarGateBackward, Parts) {
  Case c = make_case(9, 1, 64, 8, 10, {{300}});
  check(c);
  c = make_case(26, 2, 40, 8, 10, {{140}});
  c.shape.head_map = LLA_HEAD_MAP_CYCLIC;
  check(c);
}

// Groups in one part or several, slices of one part, of two, of one group.
TEST_F(HopperScalarGateBackward, BitsDoNotDependOnSlices) {
  for (const int32_t dtype : {LLA_BF16, LLA_F16}) {
    for (const auto& [heads, groups] : std::vector<std::pair<int64_t, int64_t>>{{17, 1}, {18, 2}, {6, 3}}) {
      const Case c = of_type(make_case(heads, groups, 40, 8, 10, {{200, 50}}), dtype);
      SCOPED_TRACE(describe(c));
      const Values whole = run_hopper(c);
      for (const char* bytes : {"1", "1000000", "1600000"}) {
        setenv("LLA_EMULATED_SCRATCH", bytes, 1);
        expect_same(whole, run_hopper(c));
      }
      unsetenv("LLA_EMULATED_SCRATCH");
    }
  }
}

// All parts of a group one after the other, of all sequences or of some, or each part alone.
TEST_F(HopperScalarGateBackward, BitsDoNotDependOnChains) {
  for (const int64_t levels : {0, 10}) {
    for (const int64_t groups : {1, 2}) {
      Case c = make_case(18, groups, 40, 8, levels, {{384}, {100, 256}, {300}});
      check(c);
      for (const int32_t dtype : {LLA_BF16, LLA_F16}) {
        if (dtype == LLA_F16 && groups == 1) continue;
        c = of_type(c, dtype);
        SCOPED_TRACE(describe(c));
        const Values whole = run_hopper(c);
        for (const char* bytes : {"1", "4000000"}) {
          setenv("LLA_EMULATED_SCRATCH", bytes, 1);
          expect_same(whole, run_hopper(c));
        }
        unsetenv("LLA_EMULATED_SCRATCH");
      }
      c.accumulate = true;
      if (groups == 2) check(c);
    }
  }
}

// The same rows of the same tensors, beside one other sequence or beside two.
TEST_F(HopperScalarGateBackward, BitsDoNotDependOnTheBatch) {
  for (const auto& [levels, dtype] :
       std::vector<std::pair<int64_t, int32_t>>{{0, LLA_BF16}, {15, LLA_BF16}, {0, LLA_F16}, {15, LLA_F16}}) {
    Case few = of_type(make_case(1, 1, 64, 16, levels, {{700, 300}, {2509, 100}}), dtype), many = few;
    many.parts = {few.parts[0], {1}, {2505}};
    const Values some = run_hopper(few), others = run_hopper(many);
    for (const auto& [name, values] : some) {
      const std::vector<double>& other = others.at(name);
      ASSERT_EQ(other.size(), values.size());
      const auto count = static_cast<int64_t>(values.size()) / (703 + 2512) * 700;
      EXPECT_TRUE(std::equal(values.begin(), values.begin() + count, other.begin())) << name;
    }
  }
}

TEST_F(HopperScalarGateBackward, ScratchNeverFalls) {
  const Kernel& kernel = *hopper_kernels().backward;
  for (const auto& [groups, dtype] :
       std::vector<std::pair<int64_t, int32_t>>{{1, LLA_BF16}, {4, LLA_BF16}, {48, LLA_BF16}, {1, LLA_F16}, {48, LLA_F16}}) {
    MixerBackward p;
    p.shape = make_shape(48, groups, 128, 64, 64, 18);
    p.q.dtype = dtype;
    int64_t before = 0;
    for (int64_t rows = 1; rows < int64_t{1} << 32; rows += rows / 3 + 1) {
      Limits limits;
      limits.sequences = 1 + rows / 20000;
      limits.rows = rows;
      limits.rows_per_sequence = limits.length = rows < 1 << 21 ? rows : 1 << 21;
      Need need;
      kernel.measure(&p, limits, &need);
      ASSERT_GE(need.shared, before);
      before = need.shared;
      EXPECT_TRUE(rows > 131072 || need.shared < int64_t{1} << 29);
    }
  }
}

TEST_F(HopperScalarGateBackward, Refuses) {
  MixerBackward p;
  p.shape = make_shape(2, 1, 128, 64, 64, 10);
  const Kernel& kernel = *hopper_kernels().backward;
  EXPECT_FALSE(kernel.accepts(&p));  // fp32
  for (View* view : {&p.q, &p.k, &p.v, &p.dy}) view->dtype = LLA_BF16;
  EXPECT_TRUE(kernel.accepts(&p));
  p.dy.dtype = LLA_F16;
  EXPECT_FALSE(kernel.accepts(&p));  // of two types
  for (View* view : {&p.q, &p.k, &p.v}) view->dtype = LLA_F16;
  EXPECT_TRUE(kernel.accepts(&p));
  for (View* view : {&p.q, &p.k, &p.v, &p.dy}) view->dtype = LLA_BF16;
  unsetenv("LLA_EMULATED_HOPPER");
  EXPECT_FALSE(kernel.accepts(&p));
  setenv("LLA_EMULATED_HOPPER", "1", 1);
  p.shape.value_dim = 72;
  EXPECT_TRUE(kernel.accepts(&p));
  p.shape.value_dim = 68;
  EXPECT_FALSE(kernel.accepts(&p));
  p.shape.value_dim = 64;
  alignas(16) char memory[64] = {};
  p.gradient.nodes.base = memory;
  EXPECT_FALSE(kernel.accepts(&p));
  p.gradient.nodes.base = nullptr;
  p.batch.total_rows = 10;
  p.dq.data = memory;
  p.dq.row_stride = p.dq.head_stride = 128;
  EXPECT_FALSE(kernel.accepts(&p));  // fp32
  p.dq.dtype = LLA_F16;
  EXPECT_FALSE(kernel.accepts(&p));  // not the rows' type
  p.dq.dtype = LLA_BF16;
  EXPECT_TRUE(kernel.accepts(&p));
  p.dq.data = memory + 2;
  EXPECT_FALSE(kernel.accepts(&p));
  p.dq.data = memory;
  p.dy.data = memory;
  p.dy.row_stride = p.dy.head_stride = 132;
  EXPECT_FALSE(kernel.accepts(&p));
}

}  // namespace
