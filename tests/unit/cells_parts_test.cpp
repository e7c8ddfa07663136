// SPDX-License-Identifier: Apache-2.0
// Each part of a cell called alone, against its formula written out here; and the gradients of each by differences.
#include "cells_testing.h"

namespace {

using namespace cells_testing;

constexpr int64_t kSequences = 2, kLength = 5, kRows = kSequences * kLength;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }
double softplus(double x) { return std::log1p(std::exp(x)); }

class Parts : public testing::TestWithParam<lla_backend> {
 protected:
  ContextPointer context_ = make_context(GetParam());
  lla_dtype dtype() const { return context_->backend->compute_dtype; }
  double tolerance() const { return GetParam() == LLA_BACKEND_REFERENCE ? 1e-14 : 2e-6; }

  RandomCall run(const lla_layer_desc& d, const std::vector<lla_role>& without = {}) {
    const LayerPointer layer = make_layer(context_, d);
    RandomCall c(*layer, kRows, dtype(), 21, without);
    Plan plan(context_, kSequences, kRows);
    plan.plan(Plan::uniform(kSequences, kLength));
    Error error;
    EXPECT_EQ(forward(*layer, plan, c.forward(), &error), LLA_OK) << error.text;
    return c;
  }
  void expect(RandomCall& c, lla_role role, const std::vector<double>& values) {
    EXPECT_LE(error_of(c.tensor(role), values), tolerance()) << role_name(role);
  }
  static double at(const RandomCall& c, lla_role role, int64_t i) { return const_cast<RandomCall&>(c).tensor(role).get(i); }

  // Gradients of sum(dy * outputs) along random directions against differences of the reference.
  void gradients(const lla_layer_desc& d, const std::vector<lla_role>& without = {}) {
    const ContextPointer reference = make_context(LLA_BACKEND_REFERENCE);
    const LayerPointer layer = make_layer(context_, d), model = make_layer(reference, d);
    RandomCall c(*layer, kRows, dtype(), 22, without), m(*model, kRows, LLA_F64, 22, without);
    Random random(23);
    const std::vector<Tensor> dy = c.like(true, dtype(), &random), g = c.like(false, dtype());
    Plan plan(context_, kSequences, kRows);
    plan.plan(Plan::uniform(kSequences, kLength));
    Error error;
    ASSERT_EQ(backward(*layer, plan, c.backward(dy, g), &error), LLA_OK) << error.text;
    Plan model_plan(reference, kSequences, kRows);
    model_plan.plan(Plan::uniform(kSequences, kLength));
    size_t index = 0;
    for (RandomCall::Entry& e : m.entries) {
      if (e.output) continue;
      const std::vector<double> x = e.tensor.values(), direction = random.values(e.tensor.size());
      const auto loss = [&](double step) {
        for (size_t i = 0; i < x.size(); ++i) e.tensor.set(static_cast<int64_t>(i), x[i] + step * direction[i]);
        EXPECT_EQ(forward(*model, model_plan, m.forward(), &error), LLA_OK) << error.text;
        double sum = 0;
        size_t output = 0;
        for (const RandomCall::Entry& o : m.entries) {
          if (!o.output) continue;
          for (int64_t i = 0; i < o.tensor.size(); ++i) sum += o.tensor.get(i) * dy[output].get(i);
          ++output;
        }
        return sum;
      };
      constexpr double kStep = 1e-4;
      const double difference = (8 * (loss(kStep) - loss(-kStep)) - (loss(2 * kStep) - loss(-2 * kStep))) / (12 * kStep);
      loss(0);
      double along = 0, size = 1;
      for (size_t i = 0; i < x.size(); ++i) {
        along += direction[i] * g[index].get(static_cast<int64_t>(i));
        size += std::fabs(g[index].get(static_cast<int64_t>(i)));
      }
      EXPECT_NEAR(along, difference, (GetParam() == LLA_BACKEND_REFERENCE ? 1e-9 : 2e-6) * size) << role_name(e.role);
      ++index;
    }
  }
};

TEST_P(Parts, L2Norm) {
  lla_layer_desc d = description_of(LLA_LAYER_L2_NORM);
  d.heads = 3;
  d.key_dim = 4;
  d.scale = 0.5;
  d.qk_norm_epsilon = 0.125;
  RandomCall c = run(d);
  std::vector<double> y;
  for (int64_t i = 0; i < kRows * 12; ++i) {
    double sum = 0.125;
    for (int64_t j = i / 4 * 4; j < i / 4 * 4 + 4; ++j) sum += std::pow(at(c, LLA_X, j), 2);
    y.push_back(0.5 * at(c, LLA_X, i) / std::sqrt(sum));
  }
  expect(c, LLA_Y, y);
  gradients(d);
}

TEST_P(Parts, Projection) {
  lla_layer_desc d = description_of(LLA_LAYER_PROJECTION);
  d.hidden = 7;
  d.outputs = 5;
  for (const bool bias : {true, false}) {
    const std::vector<lla_role> without = bias ? std::vector<lla_role>{} : std::vector<lla_role>{LLA_WEIGHT_PROJ_BIAS};
    RandomCall c = run(d, without);
    std::vector<double> y;
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t o = 0; o < 5; ++o) {
        double sum = bias ? at(c, LLA_WEIGHT_PROJ_BIAS, o) : 0;
        for (int64_t i = 0; i < 7; ++i) sum += at(c, LLA_X, r * 7 + i) * at(c, LLA_WEIGHT_PROJ, o * 7 + i);
        y.push_back(sum);
      }
    }
    expect(c, LLA_Y, y);
    gradients(d, without);
  }
}

TEST_P(Parts, Convolution) {
  lla_layer_desc d = description_of(LLA_LAYER_CONVOLUTION);
  d.hidden = 6;
  for (const int64_t width : {1, 3, 4, 9}) {
    for (const lla_activation activation : {LLA_ACTIVATION_SILU, LLA_ACTIVATION_NONE}) {
      d.conv_width = width;
      d.conv_activation = activation;
      RandomCall c = run(d);
      std::vector<double> y;
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t ch = 0; ch < 6; ++ch) {
          double sum = at(c, LLA_WEIGHT_CONV_BIAS, ch);
          for (int64_t tap = 0; tap < width; ++tap) {
            const int64_t back = width - 1 - tap;
            if (back > r % kLength) continue;
            sum += at(c, LLA_WEIGHT_CONV, ch * width + tap) * at(c, LLA_X, (r - back) * 6 + ch);
          }
          y.push_back(activation == LLA_ACTIVATION_SILU ? silu(sum) : sum);
        }
      }
      expect(c, LLA_Y, y);
      gradients(d);
    }
  }
  gradients(d, {LLA_WEIGHT_CONV_BIAS});
}

TEST_P(Parts, Gates) {
  lla_layer_desc d = description_of(LLA_LAYER_GATES);
  d.heads = 3;
  for (lla_gate_form gate = LLA_GATE_LOG; gate <= LLA_GATE_SOFTPLUS; ++gate) {
    for (lla_write_form write = LLA_WRITE_NONE; write <= LLA_WRITE_STEP; ++write) {
      for (lla_lambda_form lambda = LLA_LAMBDA_NONE; lambda <= LLA_LAMBDA_PRODUCT; ++lambda) {
        if (write == LLA_WRITE_STEP && gate != LLA_GATE_SOFTPLUS) continue;
        d.gate_form = gate;
        d.write_form = write;
        d.lambda_form = lambda;
        d.levels = lambda ? 4 : 0;
        d.lambda_scale = lambda ? 1.5 : 0;
        d.dt_min = gate ? 0.4 : 0;
        d.dt_max = gate ? 1.1 : 0;
        RandomCall c = run(d);
        std::vector<double> g, w, l;
        for (int64_t i = 0; i < kRows * 3; ++i) {
          const int64_t h = i % 3;
          double dt = 0;
          if (gate) {
            dt = softplus(at(c, LLA_GATE, i) + at(c, LLA_WEIGHT_DT_BIAS, h));
            dt = std::fmin(std::fmax(dt, 0.4), 1.1);
          }
          g.push_back(gate ? -std::exp(at(c, LLA_WEIGHT_A_LOG, h)) * dt : at(c, LLA_GATE, i));
          if (write == LLA_WRITE_STEP)
            w.push_back(dt);
          else if (write == LLA_WRITE_READY)
            w.push_back(at(c, LLA_WRITE, i));
          else if (write)
            w.push_back((write == LLA_WRITE_TWO_SIGMOID ? 2 : 1) * sigmoid(at(c, LLA_WRITE, i)));
          for (int64_t level = 0; level < d.levels; ++level) {
            const double raw = at(c, LLA_LAMBDA, i * 4 + level);
            const double p = lambda > LLA_LAMBDA_READY ? at(c, LLA_WEIGHT_LAMBDA, h * 4 + level) : 0;
            l.push_back(1.5 * (lambda == LLA_LAMBDA_READY      ? raw
                               : lambda == LLA_LAMBDA_SOFTPLUS ? softplus(p * raw)
                               : lambda == LLA_LAMBDA_BOUNDED  ? std::exp(-std::exp(p) * softplus(raw))
                                                               : p * raw));
          }
        }
        expect(c, LLA_GATE_OUT, g);
        if (write) expect(c, LLA_WRITE_OUT, w);
        if (lambda) expect(c, LLA_LAMBDA_OUT, l);
        gradients(d);
      }
    }
  }
}

TEST_P(Parts, GatedNorm) {
  lla_layer_desc d = description_of(LLA_LAYER_GATED_NORM);
  d.heads = 2;
  d.value_dim = 6;
  const std::vector<std::vector<lla_role>> absences = {
      {}, {LLA_Z}, {LLA_WEIGHT_NORM}, {LLA_WEIGHT_SKIP, LLA_SKIP_INPUT}, {LLA_Z, LLA_WEIGHT_SKIP, LLA_SKIP_INPUT}};
  for (lla_norm_form form = LLA_NORM_NONE; form <= LLA_NORM_NORM_FIRST; ++form) {
    for (const int64_t group : {0, 3, 6, 12}) {
      if (form == LLA_NORM_NONE && group != 0) continue;
      d.norm_form = form;
      d.norm_group = group;
      for (const std::vector<lla_role>& without : absences) {
        RandomCall c = run(d, without);
        const int64_t size = group ? group : 12;
        std::vector<double> y(kRows * 12), u(kRows * 12);
        const auto gate = [&](int64_t i) { return c.has(LLA_Z) ? silu(at(c, LLA_Z, i)) : 1; };
        for (int64_t i = 0; i < kRows * 12; ++i) {
          u[i] = at(c, LLA_X, i);
          if (c.has(LLA_SKIP_INPUT)) u[i] += at(c, LLA_WEIGHT_SKIP, i % 12 / 6) * at(c, LLA_SKIP_INPUT, i);
          if (form == LLA_NORM_GATE_FIRST) u[i] *= gate(i);
        }
        for (int64_t i = 0; i < kRows * 12; ++i) {
          double squares = 0;
          for (int64_t j = i / size * size; j < i / size * size + size; ++j) squares += u[j] * u[j];
          y[i] = u[i];
          if (form) y[i] /= std::sqrt(squares / static_cast<double>(size) + 1e-5);
          if (form && c.has(LLA_WEIGHT_NORM)) y[i] *= at(c, LLA_WEIGHT_NORM, i % 12);
          if (form != LLA_NORM_GATE_FIRST) y[i] *= gate(i);
        }
        expect(c, LLA_Y, y);
        gradients(d, without);
      }
    }
  }
}

// The parameter of a skip or norm may be shared: the same as repeating it.
TEST_P(Parts, SharedParameters) {
  lla_layer_desc d = description_of(LLA_LAYER_GATED_NORM);
  d.heads = 2;
  d.value_dim = 6;
  d.norm_form = LLA_NORM_NORM_FIRST;
  d.norm_group = 3;
  RandomCall c = run(d);
  const std::vector<double> wide = c.tensor(LLA_Y).values();
  Tensor& skip = c.tensor(LLA_WEIGHT_SKIP);
  std::vector<double> repeated;
  for (int64_t i = 0; i < 12; ++i) repeated.push_back(skip.get(i / 6));
  skip = Tensor(dtype(), {12}, repeated);
  const LayerPointer layer = make_layer(context_, d);
  Plan plan(context_, kSequences, kRows);
  plan.plan(Plan::uniform(kSequences, kLength));
  Error error;
  ASSERT_EQ(forward(*layer, plan, c.forward(), &error), LLA_OK) << error.text;
  EXPECT_EQ(c.tensor(LLA_Y).values(), wide);

  Tensor& norm = c.tensor(LLA_WEIGHT_NORM);
  const Tensor group(dtype(), {3}, {0.5, -1, 2});
  repeated.clear();
  for (int64_t i = 0; i < 12; ++i) repeated.push_back(group.get(i % 3));
  norm = Tensor(dtype(), {12}, repeated);
  ASSERT_EQ(forward(*layer, plan, c.forward(), &error), LLA_OK) << error.text;
  const std::vector<double> full = c.tensor(LLA_Y).values();
  Random random(24);
  const std::vector<Tensor> dy = c.like(true, dtype(), &random), g = c.like(false, dtype());
  ASSERT_EQ(backward(*layer, plan, c.backward(dy, g), &error), LLA_OK) << error.text;
  norm = group;
  ASSERT_EQ(forward(*layer, plan, c.forward(), &error), LLA_OK) << error.text;
  EXPECT_EQ(c.tensor(LLA_Y).values(), full);
  const std::vector<Tensor> shared = c.like(false, dtype());
  ASSERT_EQ(backward(*layer, plan, c.backward(dy, shared), &error), LLA_OK) << error.text;
  std::vector<double> sums(3);
  for (int64_t i = 0; i < 12; ++i) sums[static_cast<size_t>(i % 3)] += g.back().get(i);
  EXPECT_LE(error_of(shared.back(), sums), tolerance());
}

TEST_P(Parts, Mixers) {
  for (const lla_mixer mixer : {LLA_SCALAR_GATE, LLA_DELTA_RULE}) {
    for (const int64_t levels : {0, 2, 4}) {
      lla_layer_desc d = description_of(LLA_LAYER_MIXER);
      d.mixer = mixer;
      d.heads = 4;
      d.groups = 2;
      d.key_dim = 3;
      d.value_dim = 2;
      d.grain = 2;
      d.scale = 0.75;
      d.write_form = LLA_WRITE_READY;
      d.lambda_form = levels ? LLA_LAMBDA_READY : LLA_LAMBDA_NONE;
      d.level_overflow = levels == 2 ? LLA_LEVELS_ABSORB : LLA_LEVELS_ERROR;
      d.levels = levels;
      RandomCall c = run(d);
      // Token by token: the sum over sources of the operator's definition.
      std::vector<double> expected;
      for (int64_t r = 0; r < kRows; ++r) {
        const int64_t t = r % kLength, base = r - t;
        for (int64_t h = 0; h < 4; ++h) {
          const int64_t group = h / 2;
          std::vector<double> o(2, 0.0);
          for (int64_t s = 0; s <= t; ++s) {
            double x[3];  // q after the transitions of the tokens between
            for (int64_t i = 0; i < 3; ++i) x[i] = 0.75 * at(c, LLA_Q, (r * 2 + group) * 3 + i);
            for (int64_t u = t; u > s; --u) {
              const int64_t row = base + u;
              double along = 0;
              for (int64_t i = 0; i < 3; ++i) along += x[i] * at(c, LLA_K, (row * 2 + group) * 3 + i);
              for (int64_t i = 0; i < 3; ++i) {
                if (mixer == LLA_DELTA_RULE) {
                  x[i] -= at(c, LLA_WRITE, row * 4 + h) * along * at(c, LLA_K, (row * 2 + group) * 3 + i);
                }
                x[i] *= std::exp(at(c, LLA_GATE, row * 4 + h));
              }
            }
            double along = 0;
            for (int64_t i = 0; i < 3; ++i) along += x[i] * at(c, LLA_K, ((base + s) * 2 + group) * 3 + i);
            int64_t level = 0;
            while ((t ^ s) >> level) ++level;
            if (levels && level > levels - 1) level = levels - 1;
            const double weight = levels ? at(c, LLA_LAMBDA, (r * 4 + h) * levels + level) : 1;
            for (int64_t i = 0; i < 2; ++i) {
              o[static_cast<size_t>(i)] +=
                  weight * along * at(c, LLA_WRITE, (base + s) * 4 + h) * at(c, LLA_V, ((base + s) * 4 + h) * 2 + i);
            }
          }
          expected.insert(expected.end(), o.begin(), o.end());
        }
      }
      expect(c, LLA_Y, expected);
      gradients(d);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Parts, testing::Values(LLA_BACKEND_REFERENCE, LLA_BACKEND_CPU),
                         [](const testing::TestParamInfo<lla_backend>& info) {
                           return info.param == LLA_BACKEND_CPU ? "cpu" : "reference";
                         });

}  // namespace
