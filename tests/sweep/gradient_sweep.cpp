// SPDX-License-Identifier: Apache-2.0
// Gradients of mixers, cells and blocks: against central differences in double (states included), in segments with handed-over
// state gradients against one pass, and with `saved` against recomputed.
#include "harness.h"

namespace sweep {
namespace {

struct Problem {
  std::string name;
  lla_layer_desc description = LLA_LAYER_DESC_INIT;
  // Shape of one row of each input, and of each weight.
  std::map<lla_role, std::vector<int64_t>> inputs, weights;
  std::vector<int64_t> output;
};

Problem mixer(lla_mixer kind, bool log_linear, int64_t grain) {
  MixerCase c;
  c.mixer = kind;
  c.log_linear = log_linear;
  c.grain = grain;
  c.heads = 4;
  c.groups = 2;
  c.key_dim = 5;
  c.value_dim = 3;
  Problem p;
  p.name = "mixer_" + c.name();
  p.description = describe(c, 512);
  p.inputs = {{LLA_Q, {2, 5}}, {LLA_K, {2, 5}}, {LLA_V, {4, 3}}, {LLA_GATE, {4}}, {LLA_WRITE, {4}}};
  if (log_linear) p.inputs[LLA_LAMBDA] = {4, lla_levels_needed(512)};
  p.output = {4, 3};
  return p;
}

Problem cell(bool gdn, bool log_linear, int64_t grain) {
  const int64_t H = 4, G = 2, dk = 4, dv = 3, L = 10;
  Problem p;
  p.name = std::string("cell_") + (gdn ? "gdn" : "mamba2") + (log_linear ? "_loglinear" : "_linear") + "_C" + std::to_string(grain);
  lla_layer_desc& d = p.description;
  d.kind = LLA_LAYER_CELL;
  d.mixer = gdn ? LLA_DELTA_RULE : LLA_SCALAR_GATE;
  d.heads = H;
  d.groups = G;
  d.key_dim = dk;
  d.value_dim = dv;
  d.grain = grain;
  d.gate_form = LLA_GATE_SOFTPLUS;
  d.write_form = gdn ? LLA_WRITE_TWO_SIGMOID : LLA_WRITE_STEP;
  d.qk_norm = gdn;
  d.scale = 0.5;
  d.dt_max = 1.5;
  d.conv_width = 4;
  d.norm_form = gdn ? LLA_NORM_NORM_FIRST : LLA_NORM_GATE_FIRST;
  d.norm_group = gdn ? dv : 6;
  p.inputs = {{LLA_Q, {G, dk}}, {LLA_K, {G, dk}}, {LLA_V, {H, dv}}, {LLA_GATE, {H}}, {LLA_Z, {H * dv}}};
  if (gdn) p.inputs[LLA_WRITE] = {H};
  p.weights = {{LLA_WEIGHT_CONV_Q, {G * dk, 4}}, {LLA_WEIGHT_CONV_K, {G * dk, 4}}, {LLA_WEIGHT_CONV_V, {H * dv, 4}},
               {LLA_WEIGHT_CONV_V_BIAS, {H * dv}}, {LLA_WEIGHT_DT_BIAS, {H}}, {LLA_WEIGHT_A_LOG, {H}},
               {LLA_WEIGHT_SKIP, {gdn ? H * dv : H}}, {LLA_WEIGHT_NORM, {gdn ? dv : H * dv}}};
  if (log_linear) {
    d.lambda_form = gdn ? LLA_LAMBDA_BOUNDED : LLA_LAMBDA_SOFTPLUS;
    d.levels = L;
    d.lambda_scale = 1.5;
    p.inputs[LLA_LAMBDA] = {H, L};
    p.weights[LLA_WEIGHT_LAMBDA] = {H, L};
  }
  p.output = {H * dv};
  return p;
}

Problem block(bool gdn, bool log_linear, int64_t grain) {
  const int64_t H = 2, G = gdn ? 2 : 1, dk = 4, dv = 3, L = 10, hidden = 6, d_inner = H * dv, conv = d_inner + 2 * G * dk;
  Problem p;
  p.name = std::string("block_") + (gdn ? "gdn" : "mamba2") + (log_linear ? "_loglinear" : "_linear") + "_C" + std::to_string(grain);
  lla_layer_desc& d = p.description;
  d.kind = gdn ? LLA_LAYER_GATED_DELTANET : LLA_LAYER_MAMBA2;
  d.heads = H;
  d.groups = G;
  d.key_dim = dk;
  d.value_dim = dv;
  d.hidden = hidden;
  d.grain = grain;
  if (log_linear) {
    d.lambda_form = LLA_LAMBDA_SOFTPLUS;
    d.levels = L;
    p.weights[LLA_WEIGHT_LAMBDA] = {H, L};
  }
  p.inputs = {{LLA_X, {hidden}}};
  p.output = {hidden};
  p.weights[LLA_WEIGHT_DT_BIAS] = {H};
  p.weights[LLA_WEIGHT_A_LOG] = {H};
  p.weights[LLA_WEIGHT_OUT_PROJ] = {hidden, d_inner};
  if (gdn) {
    p.weights[LLA_WEIGHT_Q_PROJ] = {G * dk, hidden};
    p.weights[LLA_WEIGHT_K_PROJ] = {G * dk, hidden};
    p.weights[LLA_WEIGHT_V_PROJ] = {d_inner, hidden};
    p.weights[LLA_WEIGHT_Z_PROJ] = {d_inner, hidden};
    p.weights[LLA_WEIGHT_GATE_PROJ] = {H, hidden};
    p.weights[LLA_WEIGHT_WRITE_PROJ] = {H, hidden};
    p.weights[LLA_WEIGHT_CONV_Q] = {G * dk, 1, 4};
    p.weights[LLA_WEIGHT_CONV_K] = {G * dk, 1, 4};
    p.weights[LLA_WEIGHT_CONV_V] = {d_inner, 1, 4};
    p.weights[LLA_WEIGHT_NORM] = {dv};
    if (log_linear) p.weights[LLA_WEIGHT_LAMBDA_PROJ] = {H * L, hidden};
  } else {
    p.weights[LLA_WEIGHT_IN_PROJ] = {d_inner + conv + H + (log_linear ? H * L : 0), hidden};
    p.weights[LLA_WEIGHT_CONV] = {conv, 1, 4};
    p.weights[LLA_WEIGHT_CONV_BIAS] = {conv};
    p.weights[LLA_WEIGHT_SKIP] = {H};
    p.weights[LLA_WEIGHT_NORM] = {d_inner};
  }
  return p;
}

double sample(lla_role role, lla_layer_kind kind, std::mt19937& engine) {
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(0, 1);
  if (kind == LLA_LAYER_MIXER) {
    if (role == LLA_GATE) return -0.4 * uniform(engine);
    if (role == LLA_WRITE) return 0.2 + 0.6 * uniform(engine);
    if (role == LLA_K) return 0.45 * normal(engine);
  }
  if (role == LLA_WEIGHT_A_LOG) return std::log(0.2 + uniform(engine));
  if (role >= 100) return 0.6 * normal(engine);
  return normal(engine);
}

Tensors make_inputs(const Problem& p, int64_t rows, lla_dtype dtype, unsigned seed) {
  std::mt19937 engine(seed);
  Tensors t;
  for (const auto& [role, shape] : p.inputs) {
    std::vector<int64_t> dims{rows};
    dims.insert(dims.end(), shape.begin(), shape.end());
    t[role] = Buffer(dtype, dims);
    for (size_t i = 0; i < t[role].count(); ++i) t[role].set(i, sample(role, p.description.kind, engine));
  }
  std::vector<int64_t> dims{rows};
  dims.insert(dims.end(), p.output.begin(), p.output.end());
  t[LLA_Y] = Buffer(dtype, dims);
  return t;
}

Tensors make_weights(const Problem& p, lla_dtype dtype, unsigned seed) {
  std::mt19937 engine(seed);
  Tensors t;
  for (const auto& [role, shape] : p.weights) {
    t[role] = Buffer(dtype, shape);
    for (size_t i = 0; i < t[role].count(); ++i) t[role].set(i, sample(role, p.description.kind, engine));
  }
  return t;
}

Tensors zeros_like(const Tensors& tensors) {
  Tensors z;
  for (const auto& [role, b] : tensors)
    if (role != LLA_Y) z[role] = Buffer(b.dtype, b.dims);
  return z;
}

// The parts that a slot of one layer has at a position, with their shapes.
struct Part {
  lla_state_part part;
  int64_t index;
  std::vector<int64_t> dims;
};
std::vector<Part> parts_at(const Problem& p, int64_t position) {
  const lla_layer_desc& d = p.description;
  const int64_t chunks = position / d.grain, tail = position % d.grain;
  std::vector<Part> parts;
  if (d.levels == 0) {
    if (chunks > 0) parts.push_back({LLA_PART_ABSORBED, 0, {d.heads, d.key_dim, d.value_dim}});
  } else {
    for (int64_t b = 0; chunks >> b; ++b) {
      if (!(chunks >> b & 1)) continue;
      parts.push_back({LLA_PART_NODE, b, {d.heads, d.key_dim, d.value_dim}});
      const bool scalar = d.kind == LLA_LAYER_MAMBA2 || (d.kind != LLA_LAYER_GATED_DELTANET && d.mixer == LLA_SCALAR_GATE);
      if (scalar) parts.push_back({LLA_PART_NODE_DECAY, b, {d.heads}});
    }
  }
  if (tail > 0) {
    parts.push_back({LLA_PART_TAIL_K, 0, {tail, d.groups, d.key_dim}});
    parts.push_back({LLA_PART_TAIL_V, 0, {tail, d.heads, d.value_dim}});
    parts.push_back({LLA_PART_TAIL_GATE, 0, {tail, d.heads}});
    parts.push_back({LLA_PART_TAIL_WRITE, 0, {tail, d.heads}});
  }
  if (d.kind != LLA_LAYER_MIXER) parts.push_back({LLA_PART_CONV, 0, {3, d.heads * d.value_dim + 2 * d.groups * d.key_dim}});
  return parts;
}

Buffer read_part(lla_state* state, int64_t slot, const Part& part, lla_dtype dtype) {
  Buffer b(dtype, part.dims);
  const lla_tensor t = b.all();
  SWEEP_CALL(lla_state_read(state, slot, 0, part.part, part.index, &t, nullptr, &error));
  return b;
}
void write_part(lla_state* state, int64_t slot, const Part& part, Buffer& b) {
  const lla_tensor t = b.all();
  SWEEP_CALL(lla_state_write(state, slot, 0, part.part, part.index, &t, nullptr, &error));
}
void reset(lla_state* state, int64_t slot, int64_t position = 0) {
  std::vector<int64_t> slots{slot}, positions{position};
  SWEEP_CALL(lla_state_reset(state, index_of(slots), 1, index_of(positions), nullptr, &error));
}

class Gradient : public testing::TestWithParam<Problem> {};

// loss = <y, dy> + <final state, dstate>, over the rows [history, rows) of a sequence whose first `history` rows are in a state.
TEST_P(Gradient, FiniteDifferences) {
  const Problem& p = GetParam();
  for (const auto& cut : {std::pair<int64_t, int64_t>{11, 27}, {0, 13}, {8, 12}, {14, 15}}) {
    const int64_t history = cut.first, rows = cut.second;
    Context context = make_context(LLA_BACKEND_REFERENCE);
    Layer layer = make_layer(context, p.description);
    State state = make_state(layer, 3), gradient_state = make_state(layer, 3, LLA_STATE_GRADIENT);
    Tensors inputs = make_inputs(p, rows, LLA_F64, 5), weights = make_weights(p, LLA_F64, 6);
    Runner runner(context.get(), layer.get());
    Step step;
    step.state = state.get();
    step.end = history;
    runner.append(step, inputs, weights);  // slot 0: the history
    step.begin = history;
    step.end = rows;
    step.slot_out = 1;
    Buffer dy = random_like(inputs[LLA_Y], 8);
    const std::vector<Part> initial = parts_at(p, history), final = parts_at(p, rows);
    std::vector<Buffer> dfinal;
    reset(gradient_state.get(), 1, rows);
    for (size_t i = 0; i < final.size(); ++i) {
      dfinal.push_back(random_like(Buffer(LLA_F64, final[i].dims), static_cast<unsigned>(20 + i)));
      write_part(gradient_state.get(), 1, final[i], dfinal[i]);
    }
    const auto loss = [&]() {
      reset(state.get(), 1);
      runner.append(step, inputs, weights);
      double sum = 0;
      const Buffer& y = inputs[LLA_Y];
      for (size_t i = static_cast<size_t>(history) * y.row_size(); i < y.count(); ++i) sum += y.get(i) * dy.get(i);
      for (size_t k = 0; k < final.size(); ++k) {
        const Buffer b = read_part(state.get(), 1, final[k], LLA_F64);
        for (size_t i = 0; i < b.count(); ++i) sum += b.get(i) * dfinal[k].get(i);
      }
      return sum;
    };
    Tensors gradients = zeros_like(inputs), weight_gradients = zeros_like(weights);
    Step back = step;
    back.slot_out = 0;  // backward moves no value state
    back.gradient_state = gradient_state.get();
    back.initial_gradient_slot = 0;
    back.final_gradient_slot = 1;
    runner.backward(back, inputs, weights, dy, gradients, weight_gradients);

    std::mt19937 engine(9);
    const double h = 1e-5;
    const auto compare = [&](double& slot_value, auto store, double gradient, const std::string& what) {
      const double x = slot_value;
      store(x + h);
      const double up = loss();
      store(x - h);
      const double down = loss();
      store(x);
      const double difference = (up - down) / (2 * h);
      EXPECT_NEAR(gradient, difference, 2e-7 * std::max(1.0, std::fabs(difference))) << p.name << " " << history << " " << what;
    };
    for (Tensors* group : {&inputs, &weights}) {
      const bool is_weight = group == &weights;
      for (auto& entry : *group) {
        const lla_role role = entry.first;
        Buffer& buffer = entry.second;
        if (role == LLA_Y) continue;
        Buffer& gradient = (is_weight ? weight_gradients : gradients)[role];
        const size_t first = is_weight ? 0 : static_cast<size_t>(history) * buffer.row_size();
        for (int trial = 0; trial < 6; ++trial) {
          const size_t i = first + engine() % (buffer.count() - first);
          double x = buffer.get(i);
          compare(x, [&](double value) { buffer.set(i, value); }, gradient.get(i), "role " + std::to_string(role));
        }
      }
    }
    for (const Part& part : initial) {
      Buffer value = read_part(state.get(), 0, part, LLA_F64);
      const Buffer gradient = read_part(gradient_state.get(), 0, part, LLA_F64);
      for (int trial = 0; trial < 6; ++trial) {
        const size_t i = engine() % value.count();
        double x = value.get(i);
        compare(x, [&](double v) { value.set(i, v); write_part(state.get(), 0, part, value); }, gradient.get(i),
                "part " + std::to_string(part.part) + " " + std::to_string(part.index));
      }
    }
  }
}

// Segments of a long sequence, each from a state of its own, the gradients of states handed back: equal to one pass.
// Probes D6, M3.
TEST_P(Gradient, Segments) {
  const Problem& p = GetParam();
  for (lla_backend backend : {LLA_BACKEND_REFERENCE, LLA_BACKEND_CPU}) {
    for (int64_t segment : {100, 37}) {
      const int64_t rows = 300;
      const lla_dtype dtype = backend == LLA_BACKEND_REFERENCE ? LLA_F64 : LLA_F32;
      Context context = make_context(backend);
      Layer layer = make_layer(context, p.description);
      Tensors inputs = make_inputs(p, rows, dtype, 5), weights = make_weights(p, dtype, 6);
      Buffer dy = random_like(inputs[LLA_Y], 8);
      Runner runner(context.get(), layer.get());
      Step whole;
      whole.end = rows;
      runner.forward(whole, inputs, weights);
      const Buffer y = inputs[LLA_Y];
      Tensors reference = zeros_like(inputs), weight_reference = zeros_like(weights);
      runner.backward(whole, inputs, weights, dy, reference, weight_reference);

      const int64_t count = (rows + segment - 1) / segment;
      State state = make_state(layer, count + 1), gradient_state = make_state(layer, count + 1, LLA_STATE_GRADIENT);
      Tensors gradients = zeros_like(inputs), weight_gradients = zeros_like(weights);
      const auto step_of = [&](int64_t i) {
        Step s;
        s.begin = i * segment;
        s.end = std::min(rows, s.begin + segment);
        s.slot_in = i;
        s.slot_out = i + 1;
        s.state = state.get();
        return s;
      };
      for (int64_t i = 0; i < count; ++i) runner.append(step_of(i), inputs, weights);
      const double tolerance = backend == LLA_BACKEND_REFERENCE ? 1e-11 : 2e-5;
      EXPECT_LE(relative_error(inputs[LLA_Y], y), tolerance);
      for (int64_t i = count - 1; i >= 0; --i) {
        Step s = step_of(i);
        s.slot_out = i;  // backward moves no value state
        s.gradient_state = gradient_state.get();
        s.initial_gradient_slot = i > 0 ? i : -1;
        s.final_gradient_slot = i + 1 < count ? i + 1 : -1;
        runner.backward(s, inputs, weights, dy, gradients, weight_gradients);
      }
      for (auto& [role, b] : reference)
        EXPECT_LE(relative_error(gradients[role], b), tolerance) << p.name << " backend " << backend << " segment " << segment << " role " << role;
      for (auto& [role, b] : weight_reference)
        EXPECT_LE(relative_error(weight_gradients[role], b), tolerance) << p.name << " backend " << backend << " weight " << role;
    }
  }
}

// What forward saves changes no bit of the gradients; nor does the number of threads.
// Probe M2.
TEST_P(Gradient, SavedAndThreads) {
  const Problem& p = GetParam();
  Tensors first, first_weights;
  for (const auto& [threads, use_saved] : {std::pair<int, bool>{1, false}, {1, true}, {2, true}, {7, false}}) {
    const int64_t rows = 333;
    Context context = make_context(LLA_BACKEND_CPU, threads);
    Layer layer = make_layer(context, p.description);
    Tensors inputs = make_inputs(p, rows, LLA_F32, 5), weights = make_weights(p, LLA_F32, 6);
    Buffer dy = random_like(inputs[LLA_Y], 8);
    Runner runner(context.get(), layer.get());
    Step whole;
    whole.end = rows;
    std::vector<char> saved;
    runner.forward(whole, inputs, weights, use_saved ? &saved : nullptr);
    Tensors gradients = zeros_like(inputs), weight_gradients = zeros_like(weights);
    runner.backward(whole, inputs, weights, dy, gradients, weight_gradients, use_saved ? &saved : nullptr);
    gradients[LLA_Y] = inputs[LLA_Y];
    if (first.empty()) {
      first = gradients;
      first_weights = weight_gradients;
      continue;
    }
    for (auto& [role, b] : first) EXPECT_TRUE(gradients[role].same_bits(b)) << p.name << " role " << role << " threads " << threads;
    for (auto& [role, b] : first_weights) EXPECT_TRUE(weight_gradients[role].same_bits(b)) << p.name << " weight " << role;
  }
}

// A plain linear state of another library, at a position before the first full chunk, is read and has a gradient.
TEST(ImportedState, IsReadBeforeTheFirstFullChunk) {
  for (lla_mixer kind : {LLA_SCALAR_GATE, LLA_DELTA_RULE}) {
    const Problem p = mixer(kind, false, 64);
    Buffer outputs[2], gradients[2];
    for (int i = 0; i < 2; ++i) {
      const lla_dtype dtype = i ? LLA_F32 : LLA_F64;
      const int64_t rows = 100, position = 5;
      Context context = make_context(i ? LLA_BACKEND_CPU : LLA_BACKEND_REFERENCE);
      Layer layer = make_layer(context, p.description);
      State state = make_state(layer, 2), gradient_state = make_state(layer, 2, LLA_STATE_GRADIENT);
      Tensors inputs = make_inputs(p, rows, dtype, 5), none;
      const Part part{LLA_PART_ABSORBED, 0, {4, 5, 3}};
      Buffer matrix = random_like(Buffer(dtype, part.dims), 3);
      const lla_tensor t = matrix.all();
      Runner runner(context.get(), layer.get());
      Step step;
      step.end = rows;
      step.slot_out = 1;
      step.state = state.get();
      const auto run = [&](const lla_tensor& m) {
        SWEEP_CALL(lla_state_import_linear(state.get(), 0, 0, position, &m, 1, nullptr, &error));
        reset(state.get(), 1);
        runner.append(step, inputs, none);
        return inputs[LLA_Y];
      };
      outputs[i] = run(t);
      Buffer dy = random_like(inputs[LLA_Y], 8);
      Tensors input_gradients, weight_gradients;
      step.slot_out = 0;
      step.gradient_state = gradient_state.get();
      step.initial_gradient_slot = 0;
      runner.backward(step, inputs, none, dy, input_gradients, weight_gradients);
      gradients[i] = read_part(gradient_state.get(), 0, part, dtype);
      // Linear in the state: <dy, y(M) - y(0)> = <dM, M>.
      step.slot_out = 1;
      step.gradient_state = nullptr;
      Buffer zero(dtype, part.dims);
      const lla_tensor z = zero.all();
      const Buffer without = run(z);
      double change = 0, product = 0;
      for (size_t n = 0; n < dy.count(); ++n) change += dy.get(n) * (outputs[i].get(n) - without.get(n));
      for (size_t n = 0; n < matrix.count(); ++n) product += gradients[i].get(n) * matrix.get(n);
      EXPECT_GT(std::fabs(change), 0.1);
      EXPECT_NEAR(product, change, (i ? 1e-4 : 1e-11) * std::max(1.0, std::fabs(change))) << "mixer " << kind << ", pass " << i;
    }
    EXPECT_LE(relative_error(outputs[1], outputs[0]), 2e-5);
    EXPECT_LE(relative_error(gradients[1], gradients[0]), 2e-5);
  }
}

std::vector<Problem> problems() {
  std::vector<Problem> all;
  for (int64_t grain : {4, 64})
    for (bool log_linear : {true, false}) {
      all.push_back(mixer(LLA_SCALAR_GATE, log_linear, grain));
      all.push_back(mixer(LLA_DELTA_RULE, log_linear, grain));
      for (bool gdn : {false, true}) {
        all.push_back(cell(gdn, log_linear, grain));
        all.push_back(block(gdn, log_linear, grain));
      }
    }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Layers, Gradient, testing::ValuesIn(problems()), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace sweep
