// SPDX-License-Identifier: Apache-2.0
// The reference mixers against the golden vectors: outputs and all gradients, for several grains.
#include <gtest/gtest.h>

#include "reference_case.h"

namespace reference_test {
namespace {

constexpr double kTolerance = 1e-10;

void compare(const golden::File& file, const Case& c) {
  const Values y = forward(c);
  EXPECT_LE(relative_error(y, file["out.o"]), kTolerance);
  if (!file.has("grad.q")) return;
  const Tensors gradient = backward(c);
  // Gradients of gate and write strength cancel: their errors are those of the terms.
  const double terms = golden::row_dot_norm(file["in.do"], file["out.o"], c.shape.value_dim);
  EXPECT_LE(relative_error(gradient.q, file["grad.q"]), kTolerance);
  EXPECT_LE(relative_error(gradient.k, file["grad.k"]), kTolerance);
  EXPECT_LE(relative_error(gradient.v, file["grad.v"]), kTolerance);
  EXPECT_LE(relative_error(gradient.gate, file["grad.g"], terms), kTolerance);
  if (!gradient.write.empty()) {
    EXPECT_LE(relative_error(gradient.write, file["grad.beta"], terms), kTolerance);
  }
  if (!gradient.lambda.empty()) {
    EXPECT_LE(relative_error(gradient.lambda, file["grad.lam"]), kTolerance);
  }
}

class Golden : public testing::TestWithParam<std::string> {};

TEST_P(Golden, OutputsAndGradientsForSeveralGrains) {
  const golden::File file = golden::load(GetParam());
  ASSERT_TRUE(file.valid) << file.error;
  for (int64_t grain : {1, 4, 16, 64}) {
    SCOPED_TRACE("grain " + std::to_string(grain));
    compare(file, golden_case(file, grain));
  }
}

INSTANTIATE_TEST_SUITE_P(Files, Golden,
                         testing::Values("scalar_tiny", "scalar_groups", "scalar_linear", "scalar_no_gate",
                                         "scalar_signed_lambda", "scalar_absorb", "scalar_mamba2_shape", "delta_tiny",
                                         "delta_groups", "delta_linear", "delta_no_gate", "delta_absorb", "delta_gdn_shape",
                                         "delta_paper_shape"),
                         [](const auto& parameter) { return parameter.param; });

// Without λ there is one node, and the numbers are those of λ = 1.
TEST(Golden, LinearModelsNeedNoLevels) {
  for (const char* name : {"scalar_linear", "delta_linear"}) {
    const golden::File file = golden::load(name);
    ASSERT_TRUE(file.valid) << file.error;
    for (double lambda : file["in.lam"]) ASSERT_EQ(lambda, 1);
    for (int64_t grain : {1, 8, 64, 128}) {
      SCOPED_TRACE(std::string(name) + ", grain " + std::to_string(grain));
      compare(file, golden_case(file, grain, true));
    }
  }
}

// A gate or a write strength that is not given counts as 0 and 1.
TEST(Golden, AbsentGateAndWrite) {
  Case c = random_case(LLA_SCALAR_GATE, 37, 4, 7, 1);
  c.in.gate.assign(c.in.gate.size(), 0);
  c.in.write.assign(c.in.write.size(), 1);
  const Values y = forward(c);
  const Tensors gradient = backward(c);
  c.in.gate.clear();
  c.in.write.clear();
  EXPECT_EQ(relative_error(forward(c), y), 0);
  EXPECT_EQ(relative_error(backward(c).k, gradient.k), 0);
}

// Columns of λ that no row reads may hold anything and get zero gradients.
TEST(Golden, DeadLevelsAreNeverRead) {
  for (int32_t mixer : {LLA_SCALAR_GATE, LLA_DELTA_RULE}) {
    Case c = random_case(mixer, 41, 4, 8, 2);
    const Values y = forward(c);
    const Tensors gradient = backward(c);
    std::vector<size_t> dead;
    for (int64_t t = 0; t < c.length; ++t) {
      for (int64_t l = 1; l < 8; ++l) {
        for (int64_t h = 0; !((t >> (l - 1)) & 1) && h < 4; ++h) dead.push_back(static_cast<size_t>((t * 4 + h) * 8 + l));
      }
    }
    for (size_t i : dead) c.in.lambda[i] = NAN;
    EXPECT_EQ(forward(c), y);
    Tensors poisoned = backward(c);
    for (size_t i : dead) EXPECT_EQ(poisoned.lambda[i], 0);
    EXPECT_EQ(poisoned.q, gradient.q);
    EXPECT_EQ(poisoned.k, gradient.k);
    EXPECT_EQ(poisoned.lambda, gradient.lambda);
  }
}

// Gradients are added where the binding says so, and the cyclic head map sums over other heads.
TEST(Golden, AccumulatingGradientsAndCyclicHeads) {
  Case c = random_case(LLA_DELTA_RULE, 21, 4, 6, 3);
  c.shape.head_map = LLA_HEAD_MAP_CYCLIC;
  EXPECT_LE(relative_error(forward(c), direct_forward(c)), 1e-13);
  const Tensors gradient = backward(c);
  lla::MixerBackward problem;
  const std::vector<Sequence> sequences = whole_sequences(c);
  bind_inputs(c, sequences, nullptr, &problem);
  problem.dy = view(c.dy, 4, 3);
  Values dk(c.in.k.size(), 2.0), dgate(c.in.gate.size(), -1.0);
  problem.dk = view(dk, 2, 5);
  problem.dgate = view(dgate, 4, 1);
  problem.dk.accumulate = problem.dgate.accumulate = true;
  run_kernel(lla::Op::MixerBackward, problem);
  for (size_t i = 0; i < dk.size(); ++i) EXPECT_DOUBLE_EQ(dk[i], 2.0 + gradient.k[i]);
  for (size_t i = 0; i < dgate.size(); ++i) EXPECT_DOUBLE_EQ(dgate[i], -1.0 + gradient.gate[i]);
}

// Scratch never shrinks when a limit rises; sizes that do not fit are reported.
template <class Problem>
void check_measure(lla::Op op) {
  Problem problem;
  problem.shape = random_case(LLA_SCALAR_GATE, 10, 4, 12, 5).shape;
  const lla::Kernel* kernel = lla::find_kernel(lla::reference_backend(), op, &problem);
  ASSERT_NE(kernel, nullptr);
  int64_t last = 0;
  lla::Need need;
  for (int64_t rows = 0; rows < 40; ++rows) {
    kernel->measure(&problem, {2, rows, rows, rows, 0}, &need);
    EXPECT_GE(need.per_thread, last);
    last = need.per_thread;
  }
  EXPECT_GT(last, 0);
  problem.shape.key_dim = problem.shape.value_dim = int64_t{1} << 40;
  kernel->measure(&problem, {1, 1, 1, 1, 0}, &need);
  EXPECT_LT(need.shared, 0);
}

TEST(Golden, MeasureRisesWithTheLimits) {
  check_measure<lla::MixerForward>(lla::Op::MixerForward);
  check_measure<lla::MixerBackward>(lla::Op::MixerBackward);
}

// Narrow inputs are read exactly, outputs rounded once.
TEST(Golden, EveryElementType) {
  Case c = random_case(LLA_SCALAR_GATE, 33, 8, 7, 4);
  for (int32_t dtype : {LLA_F32, LLA_BF16, LLA_F16}) {
    std::vector<std::vector<char>> memory;
    memory.reserve(8);
    const std::vector<Sequence> sequences = whole_sequences(c);
    lla::MixerForward problem;
    bind_inputs(c, sequences, nullptr, &problem);
    const auto narrow = [&](Values* values, View* v) {
      memory.emplace_back(values->size() * static_cast<size_t>(lla::dtype_size(dtype)));
      for (size_t i = 0; i < values->size(); ++i) {
        lla::store_element(memory.back().data(), dtype, static_cast<int64_t>(i), (*values)[i]);
        (*values)[i] = lla::load_element<double>(memory.back().data(), dtype, static_cast<int64_t>(i));
      }
      v->data = memory.back().data();
      v->dtype = dtype;
    };
    narrow(&c.in.q, &problem.q);
    narrow(&c.in.k, &problem.k);
    narrow(&c.in.v, &problem.v);
    narrow(&c.in.gate, &problem.gate);
    narrow(&c.in.write, &problem.write);
    narrow(&c.in.lambda, &problem.lambda);
    Values y = forward(c);
    Values rounded = y;
    problem.y = view(y, 4, 3);
    narrow(&rounded, &problem.y);
    std::memset(problem.y.data, 0, memory.back().size());
    run_kernel(lla::Op::MixerForward, problem);
    for (size_t i = 0; i < y.size(); ++i) {
      ASSERT_EQ(lla::load_element<double>(problem.y.data, dtype, static_cast<int64_t>(i)), rounded[i]);
    }
  }
}

}  // namespace
}  // namespace reference_test
