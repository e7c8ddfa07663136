// SPDX-License-Identifier: Apache-2.0
// The reference's parts (gates, norms, projection, fill) against plain formulas and central differences.
#include <gtest/gtest.h>

#include "reference_case.h"

namespace reference_test {
namespace {

// Two sequences of 4 and 33 rows with a padding one between them, and slack rows at the end.
struct Batch {
  std::vector<Sequence> sequences{3};
  std::vector<lla::RowRange> slack{{4, 6}, {39, 41}};
  int64_t rows = 41;
  BatchView view;

  Batch() {
    sequences[0].rows = 4;
    sequences[1].row_begin = 4;
    sequences[1].rows = 2;
    sequences[1].padding = true;
    sequences[2].row_begin = 6;
    sequences[2].rows = 33;
    view.sequences = sequences.data();
    view.count = 3;
    view.total_rows = rows;
    view.slack = slack.data();
    view.slack_count = 2;
  }
  bool live(int64_t row) const { return row < 4 || (row >= 6 && row < 39); }
};

// Rows that are not live may hold anything.
void poison(const Batch& batch, Values* values) {
  const int64_t width = static_cast<int64_t>(values->size()) / batch.rows;
  for (int64_t i = 0; i < static_cast<int64_t>(values->size()); ++i) {
    if (!batch.live(i / width)) (*values)[static_cast<size_t>(i)] = NAN;
  }
}

double live_dot(const Batch& batch, const Values& y, const Values& dy) {
  const int64_t width = static_cast<int64_t>(y.size()) / batch.rows;
  double sum = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    if (batch.live(static_cast<int64_t>(i) / width)) sum += y[i] * dy[i];
  }
  return sum;
}

// Gradients of rows that are not live are not written; for the comparison they are zero.
Values live_only(const Batch& batch, Values values) {
  const int64_t width = static_cast<int64_t>(values.size()) / batch.rows;
  for (size_t i = 0; i < values.size(); ++i) {
    if (batch.live(static_cast<int64_t>(i) / width)) continue;
    EXPECT_EQ(values[i], 5.0) << "a row that is not live was written";
    values[i] = 0;
  }
  return values;
}

Values untouched(const Values& like) { return Values(like.size(), 5.0); }

// ---- norms, gates, projection ----

TEST(L2Norm, ForwardAndBackward) {
  Batch batch;
  Random random(31);
  Values x = random.normal(batch.rows * 3 * 5), dy = random.normal(batch.rows * 3 * 5);
  Values y = untouched(x), dx = untouched(x);
  lla::L2Norm p;
  p.heads = 3;
  p.dim = 5;
  p.epsilon = 0.3;
  p.scale = 0.7;
  p.batch = batch.view;
  p.x = view(x, 3, 5);
  p.y = view(y, 3, 5);
  const auto loss = [&] {
    run_kernel(lla::Op::L2NormForward, p);
    return live_dot(batch, y, dy);
  };
  loss();
  double squares = 0;
  for (size_t i = 100; i < 105; ++i) squares += x[i] * x[i];
  EXPECT_NEAR(y[102], 0.7 * x[102] / std::sqrt(squares + 0.3), 1e-15);
  p.dy = view(dy, 3, 5);
  p.dx = view(dx, 3, 5);
  run_kernel(lla::Op::L2NormBackward, p);
  check("x", &x, live_only(batch, dx), loss);
  p.dx.accumulate = true;
  const Values once = live_only(batch, dx);
  run_kernel(lla::Op::L2NormBackward, p);
  for (size_t i = 0; i < 60; ++i) EXPECT_DOUBLE_EQ(dx[i], 2 * once[i]);
}

struct NormCase {
  const char* name;
  int32_t form;
  int64_t group;
  bool skip, gate, weight, per_channel, per_group;
};

class GatedNorm : public testing::TestWithParam<NormCase> {};

TEST_P(GatedNorm, ForwardAndBackward) {
  const NormCase& n = GetParam();
  Batch batch;
  Random random(32);
  const int64_t heads = 4, dv = 3, width = 12;
  Values x = random.normal(batch.rows * width), skip = random.normal(batch.rows * width),
         z = random.normal(batch.rows * width);
  Values dy = random.normal(batch.rows * width), y = untouched(x), dx = y, dskip = y, dz = y;
  Values d = random.normal(n.per_channel ? width : heads), weight = random.normal(n.per_group ? n.group : width);
  Values dd(d.size(), 5.0), dweight(weight.size(), 5.0);
  lla::GatedNorm p;
  p.form = n.form;
  p.width = width;
  p.heads = heads;
  p.value_dim = dv;
  p.group = n.group;
  p.skip_per_channel = n.per_channel;
  p.weight_per_group = n.per_group;
  p.epsilon = 0.2;
  p.batch = batch.view;
  p.x = view(x, heads, dv);
  p.y = view(y, heads, dv);
  if (n.skip) p.skip = view(skip, heads, dv);
  if (n.skip) p.d = matrix(d, 1);
  if (n.gate) p.z = view(z, 1, width);
  if (n.weight) p.weight = matrix(weight, 1);
  const auto loss = [&] {
    run_kernel(lla::Op::GatedNormForward, p);
    return live_dot(batch, y, dy);
  };
  loss();

  // The formula, for one row.
  const int64_t row = 20;
  for (int64_t first = 0; first < width; first += n.group ? n.group : width) {
    const int64_t size = n.group ? n.group : width;
    const auto at = [&](const Values& values, int64_t e) { return values[static_cast<size_t>(row * width + e)]; };
    const auto u = [&](int64_t e) {
      return at(x, e) + (n.skip ? d[static_cast<size_t>(n.per_channel ? e : e / dv)] * at(skip, e) : 0);
    };
    const auto gate = [&](int64_t e) { return n.gate ? at(z, e) * sigmoid(at(z, e)) : 1; };
    double squares = 0;
    for (int64_t e = first; e < first + size; ++e) {
      const double a = n.form == LLA_NORM_GATE_FIRST ? u(e) * gate(e) : u(e);
      squares += a * a / static_cast<double>(size);
    }
    for (int64_t e = first; e < first + size; ++e) {
      const double w = n.weight ? weight[static_cast<size_t>(n.per_group ? e % size : e)] : 1;
      const double r = n.form == LLA_NORM_NONE ? 1 : 1 / std::sqrt(squares + 0.2);
      EXPECT_NEAR(at(y, e), u(e) * gate(e) * r * w, 1e-13);
    }
  }

  p.dy = view(dy, heads, dv);
  p.dx = view(dx, heads, dv);
  if (n.skip) p.dskip = view(dskip, heads, dv);
  if (n.skip) p.dd = matrix(dd, 1);
  if (n.gate) p.dz = view(dz, 1, width);
  if (n.weight) p.dweight = matrix(dweight, 1);
  run_kernel(lla::Op::GatedNormBackward, p);
  check("x", &x, live_only(batch, dx), loss);
  if (n.skip) check("skip", &skip, live_only(batch, dskip), loss);
  if (n.skip) check("d", &d, dd, loss);
  if (n.gate) check("z", &z, live_only(batch, dz), loss);
  if (n.weight) check("weight", &weight, dweight, loss);
}

INSTANTIATE_TEST_SUITE_P(
    Forms, GatedNorm,
    testing::Values(NormCase{"gate_only", LLA_NORM_NONE, 0, true, true, false, false, false},
                    NormCase{"plain", LLA_NORM_NONE, 0, false, false, false, false, false},
                    NormCase{"gate_first", LLA_NORM_GATE_FIRST, 12, true, true, true, false, false},
                    NormCase{"gate_first_groups", LLA_NORM_GATE_FIRST, 6, true, true, true, true, false},
                    NormCase{"norm_first_heads", LLA_NORM_NORM_FIRST, 3, false, true, true, false, true},
                    NormCase{"norm_first", LLA_NORM_NORM_FIRST, 2, true, true, true, true, false},
                    NormCase{"no_gate", LLA_NORM_NORM_FIRST, 4, true, false, false, false, false}),
    [](const auto& p) { return std::string(p.param.name); });

class Gates : public testing::TestWithParam<std::tuple<int32_t, int32_t, int32_t>> {};

TEST_P(Gates, ForwardAndBackward) {
  const auto [gate_form, write_form, lambda_form] = GetParam();
  if (write_form == LLA_WRITE_STEP && gate_form != LLA_GATE_SOFTPLUS) return;  // there is no step then
  Batch batch;
  Random random(33);
  const int64_t heads = 3, levels = 4;
  Values gate = random.normal(batch.rows * heads), write = random.normal(batch.rows * heads);
  Values lambda = random.normal(batch.rows * heads * levels);
  Values dt_bias = random.normal(heads), a_log = random.normal(heads), weight = random.normal(heads * levels);
  Values gate_out = untouched(gate), write_out = gate_out, lambda_out = untouched(lambda);
  Values dgate_out = random.normal(batch.rows * heads), dwrite_out = random.normal(batch.rows * heads);
  Values dlambda_out = random.normal(batch.rows * heads * levels);
  lla::Gates p;
  p.heads = heads;
  p.levels = levels;
  p.gate_form = gate_form;
  p.write_form = write_form;
  p.lambda_form = lambda_form;
  p.dt_min = 0.4;
  p.dt_max = 1.5;
  p.lambda_scale = 1.3;
  p.batch = batch.view;
  p.gate = view(gate, heads, 1);
  if (write_form != LLA_WRITE_STEP) p.write = view(write, heads, 1);
  p.lambda = view(lambda, heads, levels);
  if (gate_form == LLA_GATE_SOFTPLUS) {
    p.dt_bias = matrix(dt_bias, 1);
    p.a_log = matrix(a_log, 1);
  }
  if (lambda_form != LLA_LAMBDA_READY) p.lambda_weight = matrix(weight, levels);
  p.gate_out = view(gate_out, heads, 1);
  p.write_out = view(write_out, heads, 1);
  p.lambda_out = view(lambda_out, heads, levels);
  const auto loss = [&] {
    run_kernel(lla::Op::GatesForward, p);
    return live_dot(batch, gate_out, dgate_out) + live_dot(batch, write_out, dwrite_out) +
           live_dot(batch, lambda_out, dlambda_out);
  };
  loss();

  // The formulas, for one row and head.
  const size_t i = 25 * heads + 2, l = i * levels + 1;
  const double dt = std::fmin(std::fmax(softplus(gate[i] + dt_bias[2]), 0.4), 1.5);
  EXPECT_NEAR(gate_out[i], gate_form == LLA_GATE_LOG ? gate[i] : -std::exp(a_log[2]) * dt, 1e-14);
  const double writes[] = {0, write[i], sigmoid(write[i]), 2 * sigmoid(write[i]), dt};
  EXPECT_NEAR(write_out[i], writes[write_form], 1e-14);
  const double w = weight[2 * levels + 1], raw = lambda[l];
  const double lambdas[] = {0, raw, softplus(w * raw), std::exp(-std::exp(w) * softplus(raw)), w * raw};
  EXPECT_NEAR(lambda_out[l], 1.3 * lambdas[lambda_form], 1e-14);

  Values dgate = untouched(gate), dwrite = untouched(write), dlambda = untouched(lambda);
  Values ddt_bias(3, 5.0), da_log(3, 5.0), dweight(weight.size(), 5.0);
  p.dgate_out = view(dgate_out, heads, 1);
  p.dwrite_out = view(dwrite_out, heads, 1);
  p.dlambda_out = view(dlambda_out, heads, levels);
  p.dgate = view(dgate, heads, 1);
  if (p.write.present()) p.dwrite = view(dwrite, heads, 1);
  p.dlambda = view(dlambda, heads, levels);
  if (p.dt_bias.present()) p.ddt_bias = matrix(ddt_bias, 1);
  if (p.a_log.present()) p.da_log = matrix(da_log, 1);
  if (p.lambda_weight.present()) p.dlambda_weight = matrix(dweight, levels);
  run_kernel(lla::Op::GatesBackward, p);
  check("gate", &gate, live_only(batch, dgate), loss);
  if (p.write.present()) check("write", &write, live_only(batch, dwrite), loss);
  check("lambda", &lambda, live_only(batch, dlambda), loss);
  if (p.dt_bias.present()) check("dt_bias", &dt_bias, ddt_bias, loss);
  if (p.a_log.present()) check("a_log", &a_log, da_log, loss);
  if (p.lambda_weight.present()) check("lambda weight", &weight, dweight, loss);

  // A column whose gradient is zero sends zero back, whatever it holds.
  lambda[l] = NAN;
  dlambda_out[l] = 0;
  run_kernel(lla::Op::GatesBackward, p);
  EXPECT_EQ(dlambda[l], 0);
  if (p.lambda_weight.present()) {
    EXPECT_TRUE(std::isfinite(dweight[2 * levels + 1]));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Forms, Gates,
    testing::Combine(testing::Values(LLA_GATE_LOG, LLA_GATE_SOFTPLUS),
                     testing::Values(LLA_WRITE_READY, LLA_WRITE_SIGMOID, LLA_WRITE_TWO_SIGMOID, LLA_WRITE_STEP),
                     testing::Values(LLA_LAMBDA_READY, LLA_LAMBDA_SOFTPLUS, LLA_LAMBDA_BOUNDED, LLA_LAMBDA_PRODUCT)));

// Extreme raw values stay finite.
TEST(Gates, LargeRawValues) {
  Values gate = {1000, -1000, 40, -40}, out(4);
  Values a_log = {0}, bias = {0};
  std::vector<Sequence> sequences(1);
  sequences[0].rows = 4;
  lla::Gates p;
  p.heads = 1;
  p.gate_form = LLA_GATE_SOFTPLUS;
  p.batch.sequences = sequences.data();
  p.batch.count = 1;
  p.batch.total_rows = 4;
  p.gate = view(gate, 1, 1);
  p.a_log = matrix(a_log, 1);
  p.dt_bias = matrix(bias, 1);
  p.gate_out = view(out, 1, 1);
  run_kernel(lla::Op::GatesForward, p);
  EXPECT_EQ(out, (Values{-1000, -0.0, -(40 + std::log1p(std::exp(-40.0))), -std::log1p(std::exp(-40.0))}));
}

TEST(Projection, ForwardAndBackward) {
  for (int64_t outputs : {3, 70}) {
    Batch batch;
    Random random(34);
    const int64_t inputs = outputs == 3 ? 67 : 5;
    Values x = random.normal(batch.rows * inputs), weight = random.normal(outputs * inputs), bias = random.normal(outputs);
    Values dy = random.normal(batch.rows * outputs), y = untouched(dy), dx = untouched(x);
    Values dweight(weight.size(), 5.0), dbias(bias.size(), 5.0);
    lla::Projection p;
    p.inputs = inputs;
    p.outputs = outputs;
    p.batch = batch.view;
    p.x = view(x, 1, inputs);
    p.y = view(y, 1, outputs);
    p.weight = matrix(weight, inputs);
    p.bias = matrix(bias, 1);
    const auto loss = [&] {
      run_kernel(lla::Op::ProjectionForward, p);
      return live_dot(batch, y, dy);
    };
    loss();
    double expected = bias[2];
    for (int64_t i = 0; i < inputs; ++i) {
      expected += x[static_cast<size_t>(38 * inputs + i)] * weight[static_cast<size_t>(2 * inputs + i)];
    }
    EXPECT_NEAR(y[static_cast<size_t>(38 * outputs + 2)], expected, 1e-13);
    p.dy = view(dy, 1, outputs);
    p.dx = view(dx, 1, inputs);
    p.dweight = matrix(dweight, inputs);
    p.dbias = matrix(dbias, 1);
    run_kernel(lla::Op::ProjectionBackward, p);
    check("x", &x, live_only(batch, dx), loss);
    check("weight", &weight, dweight, loss);
    check("bias", &bias, dbias, loss);
  }
}

// Rows that are not live may hold NaN: no weight gradient sees them.
TEST(Parts, SlackRowsAreNotRead) {
  Batch batch;
  Random random(35);
  Values x = random.normal(batch.rows * 6), dy = random.normal(batch.rows * 4), weight = random.normal(24), dweight(24);
  poison(batch, &x);
  poison(batch, &dy);
  lla::Projection p;
  p.inputs = 6;
  p.outputs = 4;
  p.batch = batch.view;
  p.x = view(x, 1, 6);
  p.dy = view(dy, 1, 4);
  p.weight = matrix(weight, 6);
  p.dweight = matrix(dweight, 6);
  run_kernel(lla::Op::ProjectionBackward, p);
  for (double value : dweight) EXPECT_TRUE(std::isfinite(value));
}

TEST(RowsFill, ZeroesSlackAndCopies) {
  Batch batch;
  Random random(36);
  Values x = random.normal(batch.rows * 6), y = untouched(x);
  lla::RowsFill p;
  p.heads = 2;
  p.dim = 3;
  p.batch = batch.view;
  p.y = view(y, 2, 3);
  run_kernel(lla::Op::RowsFill, p);
  for (size_t i = 0; i < y.size(); ++i) EXPECT_EQ(y[i], batch.live(static_cast<int64_t>(i) / 6) ? 5.0 : 0.0);
  p.copy = true;
  p.x = view(x, 2, 3);
  run_kernel(lla::Op::RowsFill, p);
  for (size_t i = 0; i < y.size(); ++i) EXPECT_EQ(y[i], batch.live(static_cast<int64_t>(i) / 6) ? x[i] : 0.0);
  p.y.accumulate = true;
  y[6 * 5] = 9;
  run_kernel(lla::Op::RowsFill, p);
  for (size_t i = 0; i < y.size(); ++i) {
    EXPECT_EQ(y[i], i == 6 * 5 ? 9 : batch.live(static_cast<int64_t>(i) / 6) ? 2 * x[i] : 0);
  }
}

// Slack rows of a tensor [B, T, ...] with a gap between its sequences.
TEST(RowsFill, SlackOfAUniformBatch) {
  std::vector<Sequence> sequences(2);
  std::vector<lla::RowRange> slack = {{2, 3}, {4, 6}};
  for (int64_t b = 0; b < 2; ++b) {
    sequences[static_cast<size_t>(b)].index = b;
    sequences[static_cast<size_t>(b)].row_begin = 3 * b;
    sequences[static_cast<size_t>(b)].rows = 2 - b;
  }
  Values y(10, 5.0);
  lla::RowsFill p;
  p.dim = 1;
  p.sequence_rows = 3;
  p.batch.sequences = sequences.data();
  p.batch.count = 2;
  p.batch.total_rows = 6;
  p.batch.slack = slack.data();
  p.batch.slack_count = 2;
  p.y = view(y, 1, 1);
  p.y.sequence_stride = 2;  // sequence b begins at element 5 b: 3 b rows and a gap of 2 b
  run_kernel(lla::Op::RowsFill, p);
  EXPECT_EQ(y, (Values{5, 5, 0, 5, 5, 5, 0, 0, 5, 5}));
}

}  // namespace
}  // namespace reference_test
