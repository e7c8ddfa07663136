// SPDX-License-Identifier: Apache-2.0
// Gradients of the reference mixers against central differences: inputs, initial states through final states, hard gates.
#include <gtest/gtest.h>

#include <limits>

#include "reference_case.h"

namespace reference_test {
namespace {

double central_difference(double* value, const std::function<double()>& loss) {
  const double step = 1e-5, kept = *value;
  *value = kept + step;
  const double above = loss();
  *value = kept - step;
  const double below = loss();
  *value = kept;
  return (above - below) / (2 * step);
}

struct Kind {
  const char* name;
  int32_t mixer;
  int64_t levels;
};

const Kind kKinds[] = {
    {"scalar", LLA_SCALAR_GATE, 7}, {"scalar_absorb", LLA_SCALAR_GATE, 4}, {"scalar_linear", LLA_SCALAR_GATE, 0},
    {"delta", LLA_DELTA_RULE, 7},   {"delta_absorb", LLA_DELTA_RULE, 4},   {"delta_linear", LLA_DELTA_RULE, 0},
};

class Gradient : public testing::TestWithParam<Kind> {};

// loss = <y, dy> + <final state, dstate>, by rows [from, to) of a sequence with history [0, from).
void check_segment(const Kind& kind, int64_t grain, int64_t from, int64_t to, bool final_gradient) {
  SCOPED_TRACE(testing::Message() << "grain " << grain << ", rows " << from << " to " << to);
  Case c = random_case(kind.mixer, 40, grain, kind.levels, 21);
  Pools pools(c.shape, LLA_F64, 128), gradients(c.shape, LLA_F64, 128);
  Values y;
  Append history = append_rows(c, &pools, pools.image(0, 1), 0, from);
  forward(c, history.bound(), &pools.memory, &y);
  const SlotImage initial = history.after;
  Append append = append_rows(c, &pools, initial, 0, to - from, true);

  const SlotImage dfinal = gradients.image(to, 3), dinitial = gradients.image(from);
  Random random(22);
  const std::vector<double*> dstate = gradients.numbers(dfinal);
  for (double* number : dstate) *number = random.uniform(-1, 1);

  const auto loss = [&] {
    Values out(c.dy.size(), 0.0);
    forward(c, append.bound(), &pools.memory, &out);
    double sum = dot(out, c.dy);
    const std::vector<double*> state = pools.numbers(append.after);
    EXPECT_EQ(state.size(), dstate.size());
    for (size_t i = 0; final_gradient && i < state.size(); ++i) sum += *state[i] * *dstate[i];
    return sum;
  };

  Sequence s = append.sequence;
  s.initial_gradient = dinitial;
  if (final_gradient) s.final_gradient = dfinal;
  Tensors gradient;
  backward(c, {s}, &pools.memory, &gradients.memory, &gradient);

  Values analytic, numeric;
  const std::vector<double*> state = pools.numbers(initial), slopes = gradients.numbers(dinitial);
  ASSERT_EQ(state.size(), slopes.size());
  for (size_t i = 0; i < state.size(); ++i) {
    analytic.push_back(*slopes[i]);
    numeric.push_back(central_difference(state[i], loss));
  }
  EXPECT_LE(relative_error(analytic, numeric), 1e-8) << "initial state";

  std::vector<std::pair<const char*, Values*>> inputs = c.in.all(), results = gradient.all();
  for (size_t n = 0; n < inputs.size(); ++n) {
    const size_t width = inputs[n].second->size() / 40;
    analytic.clear();
    numeric.clear();
    for (size_t i = width * static_cast<size_t>(from); i < width * static_cast<size_t>(to); ++i) {
      analytic.push_back((*results[n].second)[i]);
      numeric.push_back(central_difference(&(*inputs[n].second)[i], loss));
    }
    EXPECT_LE(relative_error(analytic, numeric), 1e-8) << inputs[n].first;
  }
}

TEST_P(Gradient, StatesAndInputsAgainstCentralDifferences) {
  check_segment(GetParam(), 4, 11, 26, true);  // cut inside chunks, several folds
  check_segment(GetParam(), 4, 12, 16, true);  // at chunk borders, a fold that merges everything
  check_segment(GetParam(), 4, 28, 32, true);
  check_segment(GetParam(), 4, 29, 31, true);  // inside one chunk: history rows in the final tail
  check_segment(GetParam(), 4, 30, 30, true);  // no rows at all
  check_segment(GetParam(), 1, 13, 18, true);
  check_segment(GetParam(), 16, 0, 23, true);
  check_segment(GetParam(), 4, 11, 15, false);
}

// Without an initial gradient slot nothing is written; what is not present is not computed.
TEST_P(Gradient, AbsentResultsChangeNothing) {
  const Case c = random_case(GetParam().mixer, 30, 4, GetParam().levels, 23);
  const Tensors all = backward(c);
  const std::vector<Sequence> sequences = whole_sequences(c);
  lla::MixerBackward problem;
  bind_inputs(c, sequences, nullptr, &problem);
  problem.dy = view(c.dy, 4, 3);
  Values dv(c.in.v.size(), NAN);
  problem.dv = view(dv, 4, 3);
  run_kernel(lla::Op::MixerBackward, problem);
  EXPECT_EQ(dv, all.v);
}

// Padding sequences are skipped; other sequences of a batch do not matter.
TEST_P(Gradient, SequencesOfABatchAreIndependent) {
  Case c = random_case(GetParam().mixer, 30, 4, GetParam().levels, 24);
  std::vector<Sequence> sequences(3);
  for (size_t b = 0; b < 3; ++b) {
    sequences[b].row_begin = static_cast<int64_t>(b) * 10;
    sequences[b].rows = b == 2 ? 9 : 10;
  }
  sequences[1].padding = true;
  Values y(c.dy.size(), 7.0), alone(c.dy.size(), 7.0);
  forward(c, sequences, nullptr, &y);
  forward(c, {sequences[2]}, nullptr, &alone);
  for (size_t i = 120; i < 240; ++i) EXPECT_EQ(y[i], 7.0);
  for (size_t i = 240; i < y.size(); ++i) EXPECT_EQ(y[i], alone[i]);
  Tensors gradient, single;
  backward(c, sequences, nullptr, nullptr, &gradient);
  backward(c, {sequences[0]}, nullptr, nullptr, &single);
  for (size_t i = 0; i < 100; ++i) EXPECT_EQ(gradient.k[i], single.k[i]);
  for (size_t i = 100; i < 200; ++i) EXPECT_TRUE(std::isnan(gradient.k[i]));
}

// log gates of -inf, -700 and 0: outputs are those of the mask, gradients finite and right.
TEST_P(Gradient, HardGates) {
  const double infinity = std::numeric_limits<double>::infinity();
  Case c = random_case(GetParam().mixer, 30, 1, GetParam().levels, 25);
  Random random(26);
  for (double& gate : c.in.gate) {
    const double draw = random.uniform(0, 1);
    gate = draw < 0.1 ? -infinity : draw < 0.2 ? -700.0 : draw < 0.5 ? 0.0 : gate;
  }
  const Values expected = direct_forward(c);
  Tensors numeric;
  for (size_t n = 0; n < c.in.all().size(); ++n) {
    for (double& input : *c.in.all()[n].second) {
      const auto loss = [&] { return dot(direct_forward(c), c.dy); };
      numeric.all()[n].second->push_back(std::isinf(input) ? 0 : central_difference(&input, loss));
    }
  }
  for (int64_t grain : {1, 4, 8}) {
    SCOPED_TRACE(grain);
    c.shape.grain = grain;
    EXPECT_LE(relative_error(forward(c), expected), 1e-13);
    Tensors gradient = backward(c);
    for (size_t n = 0; n < numeric.all().size(); ++n) {
      for (double value : *gradient.all()[n].second) ASSERT_TRUE(std::isfinite(value)) << numeric.all()[n].first;
      EXPECT_LE(relative_error(*gradient.all()[n].second, *numeric.all()[n].second), 1e-8) << numeric.all()[n].first;
    }
    // With a state, cut in the middle: the same outputs and gradients, and finite gradients of the state.
    Pools pools(c.shape, LLA_F64), gradients(c.shape, LLA_F64);
    Values y;
    Append first = append_rows(c, &pools, pools.image(0), 0, 19);
    forward(c, first.bound(), &pools.memory, &y);
    Append second = append_rows(c, &pools, first.after, 0, 11, true);
    forward(c, second.bound(), &pools.memory, &y);
    EXPECT_EQ(y, forward(c));
    second.sequence.initial_gradient = gradients.image(19);
    Tensors segment;
    backward(c, {second.sequence}, &pools.memory, &gradients.memory, &segment);
    first.sequence.final_gradient = second.sequence.initial_gradient;
    backward(c, {first.sequence}, &pools.memory, &gradients.memory, &segment);
    for (double* number : gradients.numbers(second.sequence.initial_gradient)) EXPECT_TRUE(std::isfinite(*number));
    for (size_t n = 0; n < numeric.all().size(); ++n) {
      EXPECT_LE(relative_error(*segment.all()[n].second, *gradient.all()[n].second), 1e-11) << numeric.all()[n].first;
    }
  }
}

// One gate of -inf in every row: nothing but the row itself is left.
TEST(HardGates, AllClosed) {
  for (int32_t mixer : {LLA_SCALAR_GATE, LLA_DELTA_RULE}) {
    Case c = random_case(mixer, 20, 4, 6, 27);
    for (double& gate : c.in.gate) gate = -std::numeric_limits<double>::infinity();
    EXPECT_LE(relative_error(forward(c), direct_forward(c)), 1e-15);
    for (double gate : backward(c).gate) EXPECT_EQ(gate, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Gradient, testing::ValuesIn(kKinds),
                         [](const auto& p) { return std::string(p.param.name); });

}  // namespace
}  // namespace reference_test
