// SPDX-License-Identifier: Apache-2.0
// Cells of many forms: equal to their parts called one by one, gradients against differences, layouts, slack, narrow types,
// pieces through a state.
#include "cells_testing.h"

namespace {

using namespace cells_testing;

struct Form {
  const char* name;
  lla_layer_desc description;
  std::vector<lla_role> without;  // optional roles left out
};

std::vector<Form> forms() {
  std::vector<Form> list;
  lla_layer_desc base = description_of(LLA_LAYER_CELL);
  base.mixer = LLA_SCALAR_GATE;
  base.heads = 4;
  base.groups = 2;
  base.key_dim = 3;
  base.value_dim = 5;
  base.grain = 4;
  lla_layer_desc d = base;
  list.push_back({"bare", d, {LLA_Z, LLA_WEIGHT_SKIP}});
  list.push_back({"no_gate", d, {LLA_Z, LLA_WEIGHT_SKIP, LLA_GATE}});
  list.push_back({"skip_only", d, {LLA_Z}});
  list.push_back({"z_only", d, {LLA_WEIGHT_SKIP}});
  d.mixer = LLA_DELTA_RULE;
  d.write_form = LLA_WRITE_READY;
  d.lambda_form = LLA_LAMBDA_READY;
  d.levels = 5;
  d.qk_norm = 1;
  d.scale = 0.5;
  list.push_back({"delta_ready", d, {LLA_Z, LLA_WEIGHT_SKIP}});
  d.lambda_scale = 1.5;
  d.head_map = LLA_HEAD_MAP_CYCLIC;
  d.write_form = LLA_WRITE_TWO_SIGMOID;
  list.push_back({"delta_scaled_lambda", d, {LLA_WEIGHT_SKIP}});
  d = base;
  d.gate_form = LLA_GATE_SOFTPLUS;
  d.write_form = LLA_WRITE_STEP;
  d.lambda_form = LLA_LAMBDA_SOFTPLUS;
  d.levels = 5;
  d.conv_width = 4;
  d.norm_form = LLA_NORM_GATE_FIRST;
  list.push_back({"mamba2", d, {}});
  list.push_back({"mamba2_bare",
                  d,
                  {LLA_Z, LLA_WEIGHT_SKIP, LLA_WEIGHT_NORM, LLA_WEIGHT_DT_BIAS, LLA_WEIGHT_CONV_Q_BIAS,
                   LLA_WEIGHT_CONV_K_BIAS, LLA_WEIGHT_CONV_V_BIAS}});
  d.norm_group = 10;
  d.norm_form = LLA_NORM_NORM_FIRST;
  d.level_overflow = LLA_LEVELS_ABSORB;
  d.levels = 2;
  d.lambda_form = LLA_LAMBDA_BOUNDED;
  d.conv_activation = LLA_ACTIVATION_NONE;
  d.dt_min = 0.5;
  d.dt_max = 1.25;
  list.push_back({"mamba2_groups", d, {}});
  d = base;
  d.mixer = LLA_DELTA_RULE;
  d.groups = 4;
  d.gate_form = LLA_GATE_SOFTPLUS;
  d.write_form = LLA_WRITE_SIGMOID;
  d.lambda_form = LLA_LAMBDA_PRODUCT;
  d.levels = 5;
  d.lambda_scale = 0.5;
  d.qk_norm = 1;
  d.scale = 0.75;
  d.conv_width = 2;
  d.norm_form = LLA_NORM_NORM_FIRST;
  d.norm_group = 5;
  list.push_back({"gated_deltanet", d, {LLA_WEIGHT_SKIP}});
  d.lambda_form = LLA_LAMBDA_NONE;
  d.levels = 0;
  d.lambda_scale = 0;
  d.conv_width = 1;
  list.push_back({"gated_deltanet_linear", d, {LLA_WEIGHT_SKIP, LLA_Z}});
  return list;
}

constexpr int64_t kSequences = 3, kLength = 7, kRows = kSequences * kLength;

class Cell : public testing::TestWithParam<std::tuple<size_t, lla_backend>> {
 protected:
  Form form_ = forms()[std::get<0>(GetParam())];
  lla_backend backend_ = std::get<1>(GetParam());
  ContextPointer context_ = make_context(backend_);
  LayerPointer layer_ = make_layer(context_, form_.description);
  const lla_layer_desc& d_ = layer_->description;
  bool exact() const { return backend_ == LLA_BACKEND_REFERENCE; }
  lla_dtype dtype() const { return context_->backend->compute_dtype; }
  double tolerance() const { return exact() ? 1e-13 : 5e-6; }

  void run(const LayerPointer& layer, const Bindings& b) {
    Plan plan(context_, kSequences, kRows);
    plan.plan(Plan::uniform(kSequences, kLength));
    Error error;
    ASSERT_EQ(forward(*layer, plan, b, &error), LLA_OK) << error.text;
  }
  RandomCall call(const ContextPointer& context, const Layer& layer, lla_dtype dtype, uint64_t seed = 5) const {
    (void)context;
    return RandomCall(layer, kRows, dtype, seed, form_.without);
  }
  std::vector<Tensor> gradients(RandomCall& c, const std::vector<Tensor>& dy, lla_dtype dtype) {
    const std::vector<Tensor> g = c.like(false, dtype);
    Plan plan(context_, kSequences, kRows);
    plan.plan(Plan::uniform(kSequences, kLength));
    Error error;
    EXPECT_EQ(backward(*layer_, plan, c.backward(dy, g), &error), LLA_OK) << error.text;
    return g;
  }
};

// The parts as layers of their own give the same bits.
TEST_P(Cell, EqualsItsParts) {
  RandomCall c = call(context_, *layer_, dtype());
  run(layer_, c.forward());
  const auto bind = [&](Bindings* b, lla_role part, lla_role role) {
    if (!c.has(role)) return;
    is_weight_role(role) ? b->add_weight(part, c.tensor(role)) : b->add_io(part, c.tensor(role));
  };
  const int64_t heads[] = {d_.groups, d_.groups, d_.heads}, dims[] = {d_.key_dim, d_.key_dim, d_.value_dim};
  const lla_role inputs[] = {LLA_Q, LLA_K, LLA_V};
  Tensor stream[3];
  for (int s = 0; s < 3; ++s) {
    stream[s] = c.tensor(inputs[s]);
    if (d_.conv_width == 0) continue;
    lla_layer_desc part = description_of(LLA_LAYER_CONVOLUTION);
    part.hidden = heads[s] * dims[s];
    part.conv_width = d_.conv_width;
    part.conv_activation = d_.conv_activation;
    const Tensor input(dtype(), {kRows, part.hidden}, stream[s].values()), y(dtype(), {kRows, part.hidden});
    Bindings b;
    b.add_io(LLA_X, input);
    b.add_io(LLA_Y, y);
    bind(&b, LLA_WEIGHT_CONV, LLA_WEIGHT_CONV_Q + s);
    bind(&b, LLA_WEIGHT_CONV_BIAS, LLA_WEIGHT_CONV_Q_BIAS + s);
    run(make_layer(context_, part), b);
    stream[s] = Tensor(dtype(), {kRows, heads[s], dims[s]}, y.values());
  }
  const Tensor value = stream[2];
  for (int s = 0; s < 2 && d_.qk_norm; ++s) {
    lla_layer_desc part = description_of(LLA_LAYER_L2_NORM);
    part.heads = d_.groups;
    part.key_dim = d_.key_dim;
    part.qk_norm_epsilon = d_.qk_norm_epsilon;
    const Tensor y(dtype(), {kRows, d_.groups, d_.key_dim});
    Bindings b;
    b.add_io(LLA_X, stream[s]);
    b.add_io(LLA_Y, y);
    run(make_layer(context_, part), b);
    stream[s] = y;
  }
  // Gates: what is ready passes through unchanged.
  const bool has_gate = c.has(LLA_GATE);
  Tensor gate(dtype(), {kRows, d_.heads}), write(dtype(), {kRows, d_.heads}), lambda(dtype(), {kRows, d_.heads, d_.levels});
  if (has_gate) {
    lla_layer_desc part = description_of(LLA_LAYER_GATES);
    part.heads = d_.heads;
    part.levels = d_.levels;
    part.lambda_form = d_.lambda_form;
    part.gate_form = d_.gate_form;
    part.write_form = d_.write_form;
    part.lambda_scale = d_.lambda_form ? d_.lambda_scale : 0;
    if (d_.gate_form == LLA_GATE_SOFTPLUS) {
      part.dt_min = d_.dt_min;
      part.dt_max = d_.dt_max;
    }
    Bindings b;
    for (const lla_role role : {LLA_GATE, LLA_WRITE, LLA_LAMBDA, LLA_WEIGHT_DT_BIAS, LLA_WEIGHT_A_LOG, LLA_WEIGHT_LAMBDA}) {
      bind(&b, role, role);
    }
    b.add_io(LLA_GATE_OUT, gate);
    if (d_.write_form) b.add_io(LLA_WRITE_OUT, write);
    if (d_.lambda_form) b.add_io(LLA_LAMBDA_OUT, lambda);
    run(make_layer(context_, part), b);
  }
  lla_layer_desc mixer = description_of(LLA_LAYER_MIXER);
  mixer.mixer = d_.mixer;
  mixer.heads = d_.heads;
  mixer.groups = d_.groups;
  mixer.key_dim = d_.key_dim;
  mixer.value_dim = d_.value_dim;
  mixer.grain = d_.grain;
  mixer.levels = d_.levels;
  mixer.lambda_form = d_.lambda_form ? LLA_LAMBDA_READY : LLA_LAMBDA_NONE;
  mixer.level_overflow = d_.level_overflow;
  mixer.write_form = d_.write_form ? LLA_WRITE_READY : LLA_WRITE_NONE;
  mixer.head_map = d_.head_map;
  mixer.scale = d_.scale;
  const Tensor o(dtype(), {kRows, d_.heads, d_.value_dim});
  Bindings b;
  b.add_io(LLA_Q, stream[0]);
  b.add_io(LLA_K, stream[1]);
  b.add_io(LLA_V, stream[2]);
  if (has_gate) b.add_io(LLA_GATE, gate);
  if (d_.write_form) b.add_io(LLA_WRITE, write);
  if (d_.lambda_form) b.add_io(LLA_LAMBDA, lambda);
  b.add_io(LLA_Y, o);
  run(make_layer(context_, mixer), b);

  lla_layer_desc norm = description_of(LLA_LAYER_GATED_NORM);
  norm.heads = d_.heads;
  norm.value_dim = d_.value_dim;
  norm.norm_form = d_.norm_form;
  if (d_.norm_form) {
    norm.norm_group = d_.norm_group;
    norm.norm_epsilon = d_.norm_epsilon;
  }
  const int64_t width = d_.heads * d_.value_dim;
  const Tensor x(dtype(), {kRows, width}, o.values()), y(dtype(), {kRows, width});
  b = Bindings();
  b.add_io(LLA_X, x);
  b.add_io(LLA_Y, y);
  bind(&b, LLA_Z, LLA_Z);
  bind(&b, LLA_WEIGHT_NORM, LLA_WEIGHT_NORM);
  bind(&b, LLA_WEIGHT_SKIP, LLA_WEIGHT_SKIP);
  if (c.has(LLA_WEIGHT_SKIP)) b.add_io(LLA_SKIP_INPUT, value);
  run(make_layer(context_, norm), b);
  EXPECT_EQ(y.values(), c.tensor(LLA_Y).values());
}

// Directional differences of sum(w * outputs), one role at a time; on the CPU: the reference's gradients.
TEST_P(Cell, Gradients) {
  RandomCall c = call(context_, *layer_, dtype());
  Random random(6);
  const std::vector<Tensor> dy = c.like(true, dtype(), &random);
  const std::vector<Tensor> g = gradients(c, dy, dtype());
  const ContextPointer reference = make_context(LLA_BACKEND_REFERENCE);
  const LayerPointer model = make_layer(reference, form_.description);
  RandomCall m = call(reference, *model, LLA_F64);
  const auto loss = [&] {
    Plan plan(reference, kSequences, kRows);
    plan.plan(Plan::uniform(kSequences, kLength));
    Error error;
    EXPECT_EQ(forward(*model, plan, m.forward(), &error), LLA_OK) << error.text;
    double sum = 0;
    const Tensor& y = m.tensor(LLA_Y);
    for (int64_t i = 0; i < y.size(); ++i) sum += y.get(i) * dy[0].get(i);
    return sum;
  };
  size_t index = 0;
  for (RandomCall::Entry& e : m.entries) {
    if (e.output) continue;
    const Tensor& gradient = g[index++];
    for (int trial = 0; trial < 2; ++trial) {
      const std::vector<double> direction = random.values(e.tensor.size()), x = e.tensor.values();
      constexpr double kStep = 1e-5;
      double along = 0, size = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        along += direction[i] * gradient.get(static_cast<int64_t>(i));
        size += std::pow(gradient.get(static_cast<int64_t>(i)), 2);
      }
      const auto moved = [&](double step) {
        for (size_t i = 0; i < x.size(); ++i) e.tensor.set(static_cast<int64_t>(i), x[i] + step * direction[i]);
        return loss();
      };
      // Fourth order, so that the step's error stays below rounding.
      const double difference = (8 * (moved(kStep) - moved(-kStep)) - (moved(2 * kStep) - moved(-2 * kStep))) / (12 * kStep);
      for (size_t i = 0; i < x.size(); ++i) e.tensor.set(static_cast<int64_t>(i), x[i]);
      const double allowed = (exact() ? 1e-8 : 2e-5) * (std::sqrt(size) * std::sqrt(static_cast<double>(x.size())) + 1);
      EXPECT_NEAR(along, difference, allowed) << form_.name << " " << role_name(e.role);
    }
  }
}

// What forward saved has the same layout whichever optional inputs it had, and backward reads it at the same places: the
// bits of a backward call that repeats everything. Only the mixer's output has to be there if something follows it.
TEST_P(Cell, SavedWithOtherOptionalInputs) {
  std::vector<lla_role> without;
  for (const lla_role role : form_.without) {
    if (role != LLA_Z && role != LLA_WEIGHT_SKIP) without.push_back(role);
  }
  const RandomCall all(*layer_, kRows, dtype(), 5, without);
  const auto some = [&](size_t given) {
    RandomCall c = all;
    std::erase_if(c.entries, [&](const RandomCall::Entry& e) {
      return (e.role == LLA_Z && !(given & 1)) || (e.role == LLA_WEIGHT_SKIP && !(given & 2));
    });
    return c;
  };
  Random random(11);
  const std::vector<Tensor> dy = all.like(true, dtype(), &random);
  Plan plan(context_, kSequences, kRows);
  plan.plan(Plan::uniform(kSequences, kLength));
  Error error;
  size_t bytes = 0;
  ASSERT_EQ(measure_saved(*layer_, plan.limits(), &bytes, &error), LLA_OK) << error.text;
  for (size_t saved = 0; saved < 4; ++saved) {
    Memory memory(bytes);
    Setting setting;
    setting.saved = &memory;
    ASSERT_EQ(forward(*layer_, plan, some(saved).forward(), &error, setting), LLA_OK) << error.text;
    ASSERT_TRUE(memory.guards_hold());
    const std::string content(memory.data(), bytes);
    for (size_t read = 0; read < 4; ++read) {
      if (saved == 0 && read != 0 && d_.norm_form == LLA_NORM_NONE) continue;
      const RandomCall c = some(read);
      const std::vector<Tensor> g = c.like(false, dtype()), again = c.like(false, dtype());
      ASSERT_EQ(backward(*layer_, plan, c.backward(dy, g), &error, setting), LLA_OK) << error.text;
      ASSERT_EQ(backward(*layer_, plan, c.backward(dy, again), &error), LLA_OK) << error.text;
      for (size_t i = 0; i < g.size(); ++i) EXPECT_TRUE(g[i].same_bytes(again[i])) << saved << read << " " << i;
      EXPECT_EQ(0, std::memcmp(content.data(), memory.data(), bytes));
    }
  }
}

// Inputs and gradients whose heads and rows do not lie side by side, batches as [B, T, ...] with gaps: the same bits.
TEST_P(Cell, LayoutsDoNotMatter) {
  RandomCall c = call(context_, *layer_, dtype());
  Random random(7);
  const std::vector<Tensor> dy = c.like(true, dtype(), &random);
  run(layer_, c.forward());
  const std::vector<Tensor> g = gradients(c, dy, dtype());

  struct Spread {
    std::shared_ptr<std::vector<char>> bytes;
    lla_tensor view;
  };
  std::vector<Spread> spreads;
  // [B, T, dims...] with a gap of 2 after each head (of q, k, v), 3 after each row and 17 after each sequence.
  const auto spread = [&](const Tensor& t, bool copy) {
    const std::vector<int64_t>& dims = t.dims();
    const bool by_heads = dims.size() == 3;
    const int64_t inner = dims.back(), heads = by_heads ? dims[1] : 1;
    const int64_t head_stride = by_heads ? inner + 2 : 0, row = (by_heads ? heads * head_stride : inner) + 3;
    const int64_t sequence = kLength * row + 17;
    Spread s;
    const int64_t count = kSequences * sequence;
    s.bytes = std::make_shared<std::vector<char>>(static_cast<size_t>(count * dtype_size(dtype())));
    for (int64_t i = 0; i < count; ++i) store_element<double>(s.bytes->data(), dtype(), i, NAN);
    for (int64_t i = 0; copy && i < t.size(); ++i) {
      const int64_t r = i / (heads * inner), h = i / inner % heads;
      store_element<double>(s.bytes->data(), dtype(),
                            r / kLength * sequence + r % kLength * row + h * head_stride + i % inner, t.get(i));
    }
    s.view = t.view();
    s.view.data = s.bytes->data();
    s.view.rank = static_cast<int32_t>(dims.size()) + 1;
    const int64_t d[] = {kSequences, kLength, by_heads ? heads : inner, inner};
    const int64_t strides[] = {sequence, row, by_heads ? head_stride : 1, 1};
    std::copy(d, d + 4, s.view.dims);
    std::copy(strides, strides + 4, s.view.strides);
    spreads.push_back(s);
    return s.view;
  };
  const auto gather = [&](const Tensor& t, const lla_tensor& v) {
    std::vector<double> values;
    for (int64_t i = 0; i < t.size(); ++i) {
      const int64_t inner = v.dims[v.rank - 1], heads = v.rank == 4 ? v.dims[2] : 1, r = i / (heads * inner);
      values.push_back(load_element<double>(v.data, v.dtype,
                                            r / kLength * v.strides[0] + r % kLength * v.strides[1] +
                                                (v.rank == 4 ? i / inner % heads * v.strides[2] : 0) + i % inner));
    }
    return values;
  };
  Bindings f, b;
  std::vector<lla_tensor> gradient_views;
  lla_tensor y{};
  size_t index = 0;
  for (RandomCall::Entry& e : c.entries) {
    if (is_weight_role(e.role)) {
      f.add_weight(e.role, e.tensor);
      b.add_weight(e.role, e.tensor);
      gradient_views.push_back(Tensor(dtype(), e.tensor.dims()).view());
      spreads.push_back({std::make_shared<std::vector<char>>(static_cast<size_t>(e.tensor.size() * 8)), {}});
      gradient_views.back().data = spreads.back().bytes->data();
      b.gradients.push_back(lla_bind(e.role, gradient_views.back()));
      ++index;
      continue;
    }
    const lla_tensor view = spread(e.tensor, !e.output);
    f.io.push_back(lla_bind(e.role, view));
    if (e.output) {
      y = view;
      b.outputs.push_back(lla_bind(e.role, spread(dy[0], true)));
      continue;
    }
    b.io.push_back(lla_bind(e.role, view));
    gradient_views.push_back(spread(e.tensor, false));
    b.gradients.push_back(lla_bind(e.role, gradient_views.back()));
    ++index;
  }
  run(layer_, f);
  EXPECT_EQ(gather(c.tensor(LLA_Y), y), c.tensor(LLA_Y).values());
  Plan plan(context_, kSequences, kRows);
  plan.plan(Plan::uniform(kSequences, kLength));
  Error error;
  ASSERT_EQ(backward(*layer_, plan, b, &error), LLA_OK) << error.text;
  index = 0;
  for (RandomCall::Entry& e : c.entries) {
    if (e.output) continue;
    if (!is_weight_role(e.role)) {
      EXPECT_EQ(gather(e.tensor, gradient_views[index]), g[index].values()) << role_name(e.role);
    }
    ++index;
  }
}

// Ragged batches with padding and slack: garbage in dead rows changes nothing, dead rows of results are zero or, where
// gradients accumulate, untouched.
TEST_P(Cell, DeadRows) {
  const std::vector<int64_t> offsets{1, 6, 9, 14, 19}, counts{4, 3, 0, 5}, slots{0, -1, 1, 2};
  RandomCall c = RandomCall(*layer_, 20, dtype(), 8, form_.without);
  std::vector<bool> live(20, false);
  for (size_t s = 0; s < 4; ++s) {
    for (int64_t r = 0; slots[s] >= 0 && r < counts[s]; ++r) live[static_cast<size_t>(offsets[s] + r)] = true;
  }
  Random random(9);
  std::vector<Tensor> dy = c.like(true, dtype(), &random);
  const auto poison = [&](Tensor* t) {
    for (int64_t i = 0; i < t->size(); ++i) {
      if (!live[static_cast<size_t>(i / t->row_size())]) t->set(i, NAN);
    }
  };
  for (RandomCall::Entry& e : c.entries) {
    if (!is_weight_role(e.role)) poison(&e.tensor);
  }
  poison(&dy[0]);
  StateRig state(context_, *layer_, 3, 8);
  lla_rows rows = LLA_ROWS_INIT;
  rows.sequences = 4;
  rows.total_rows = 20;
  rows.offsets = {offsets.data(), LLA_I64, LLA_HOST};
  rows.counts = {counts.data(), LLA_I64, LLA_HOST};
  rows.slot_in = {slots.data(), LLA_I64, LLA_HOST};
  Plan plan(context_, 4, 20, 8);
  plan.plan(rows, state.get());
  Setting setting;
  setting.state = state.get();
  Error error;
  ASSERT_EQ(forward(*layer_, plan, c.forward(), &error, setting), LLA_OK) << error.text;
  const auto check = [&](const Tensor& t, const char* what, double dead) {
    for (int64_t i = 0; i < t.size(); ++i) {
      const double x = t.get(i);
      if (live[static_cast<size_t>(i / t.row_size())]) {
        ASSERT_TRUE(std::isfinite(x)) << what << " " << i;
      } else {
        ASSERT_EQ(x, dead) << what << " " << i;
      }
    }
  };
  check(c.tensor(LLA_Y), "y", 0);
  for (const bool accumulate : {false, true}) {
    std::vector<Tensor> g = c.like(false, dtype());
    for (Tensor& t : g) t.fill(accumulate ? 3 : NAN);
    ASSERT_EQ(backward(*layer_, plan, c.backward(dy, g, accumulate), &error, setting), LLA_OK) << error.text;
    size_t index = 0;
    for (const RandomCall::Entry& e : c.entries) {
      if (e.output) continue;
      const Tensor& t = g[index++];
      if (!is_weight_role(e.role)) {
        check(t, role_name(e.role), accumulate ? 3 : 0);
        continue;
      }
      for (const double x : t.values()) ASSERT_TRUE(std::isfinite(x)) << role_name(e.role);
    }
  }
}

// The same in a uniform batch given as [B, T, ...] with gaps between the sequences: dead rows are found in their own
// sequence.
TEST_P(Cell, DeadRowsOfSpreadBatches) {
  constexpr int64_t kGap = 5, kWidth = 20, kSequence = kLength * kWidth + kGap;
  const std::vector<int64_t> counts{4, 7, 2}, slots{0, -1, 1};
  RandomCall c = call(context_, *layer_, dtype());
  Tensor y(dtype(), {kSequences * kSequence});
  Bindings b = c.forward();
  for (lla_binding& x : b.io) {
    if (x.role != LLA_Y) continue;
    x.tensor = y.view();
    x.tensor.rank = 3;
    const int64_t dims[] = {kSequences, kLength, kWidth}, strides[] = {kSequence, kWidth, 1};
    std::copy(dims, dims + 3, x.tensor.dims);
    std::copy(strides, strides + 3, x.tensor.strides);
  }
  StateRig state(context_, *layer_, 2, 8);
  lla_rows rows = Plan::uniform(kSequences, kLength);
  rows.counts = {counts.data(), LLA_I64, LLA_HOST};
  rows.slot_in = {slots.data(), LLA_I64, LLA_HOST};
  Plan plan(context_, kSequences, kRows, 8);
  plan.plan(rows, state.get());
  Setting setting;
  setting.state = state.get();
  Error error;
  ASSERT_EQ(forward(*layer_, plan, b, &error, setting), LLA_OK) << error.text;
  for (int64_t i = 0; i < y.size(); ++i) {
    const int64_t s = i / kSequence, row = i % kSequence / kWidth;
    if (row >= kLength) {
      ASSERT_TRUE(std::isnan(y.get(i))) << "gap " << i;
    } else if (slots[static_cast<size_t>(s)] < 0 || row >= counts[static_cast<size_t>(s)]) {
      ASSERT_EQ(y.get(i), 0) << "sequence " << s << " row " << row;
    } else {
      ASSERT_TRUE(std::isfinite(y.get(i))) << "sequence " << s << " row " << row;
    }
  }
}

// Narrow tensors: inputs are read exactly, arithmetic is as ever, only the result is rounded.
TEST_P(Cell, NarrowTypes) {
  for (const lla_dtype narrow : {LLA_BF16, LLA_F16, LLA_F32}) {
    RandomCall c = call(context_, *layer_, narrow), wide = call(context_, *layer_, dtype());
    for (size_t i = 0; i < c.entries.size(); ++i) {
      for (int64_t e = 0; !c.entries[i].output && e < c.entries[i].tensor.size(); ++e) {
        wide.entries[i].tensor.set(e, c.entries[i].tensor.get(e));
      }
    }
    run(layer_, c.forward());
    run(layer_, wide.forward());
    const double unit = narrow == LLA_BF16 ? 0x1p-8 : narrow == LLA_F16 ? 0x1p-10 : 0x1p-23;
    const Tensor& y = c.tensor(LLA_Y);
    for (int64_t i = 0; i < y.size(); ++i) {
      const double exact = wide.tensor(LLA_Y).get(i);
      ASSERT_NEAR(y.get(i), exact, unit * std::fabs(exact) + 1e-7) << form_.name << " " << narrow;
    }
  }
}

// Pieces of any size through a state give the rows of one call.
// Probe A3.
TEST_P(Cell, Pieces) {
  for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{1, 2, 3, 4, 9, 16}, {5, 16}, {4, 8, 16}}) {
    RandomCall whole(*layer_, 16, dtype(), 10, form_.without);
    Plan plan(context_, 1, 16, 16);
    plan.plan(Plan::uniform(1, 16));
    Error error;
    ASSERT_EQ(forward(*layer_, plan, whole.forward(), &error), LLA_OK) << error.text;
    const std::vector<double> expected = whole.tensor(LLA_Y).values();
    whole.tensor(LLA_Y).fill(NAN);
    StateRig state(context_, *layer_, 1, 16);
    Setting setting;
    setting.state = state.get();
    int64_t begin = 0;
    for (const int64_t end : cuts) {
      plan.plan(Plan::uniform(1, end - begin), state.get());
      Bindings b = whole.forward();
      for (lla_binding& x : b.io) {
        x.tensor.data = offset_elements(x.tensor.data, x.tensor.dtype, begin * x.tensor.strides[0]);
        x.tensor.dims[0] = end - begin;
      }
      ASSERT_EQ(forward(*layer_, plan, b, &error, setting), LLA_OK) << error.text;
      ASSERT_EQ(commit_batch(state.get(), plan.batch(), lla_index{}, nullptr, &error), LLA_OK) << error.text;
      begin = end;
    }
    EXPECT_LE(error_of(whole.tensor(LLA_Y), expected), tolerance()) << form_.name;
  }
}

std::string form_name(const testing::TestParamInfo<std::tuple<size_t, lla_backend>>& info) {
  return std::string(forms()[std::get<0>(info.param)].name) +
         (std::get<1>(info.param) == LLA_BACKEND_CPU ? "_cpu" : "_reference");
}
INSTANTIATE_TEST_SUITE_P(Forms, Cell,
                         testing::Combine(testing::Range(size_t{0}, forms().size()),
                                          testing::Values(LLA_BACKEND_REFERENCE, LLA_BACKEND_CPU)),
                         form_name);

}  // namespace
