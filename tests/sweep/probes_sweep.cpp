// SPDX-License-Identifier: Apache-2.0
// Inputs that broke other libraries and that no other test has; tests/probes.md says what happened there. Long sequences,
// narrow types, positive gates, pools beyond 2^31 elements.
#include <limits>

#include "hostile.h"

namespace {

using namespace hostile;
using sweep::Context;
using sweep::Layer;
using sweep::MixerCase;
using sweep::Runner;
using sweep::State;
using sweep::Step;

constexpr lla_mixer kMixers[] = {LLA_SCALAR_GATE, LLA_DELTA_RULE};

Context& cpu() {
  static Context context = sweep::make_context(LLA_BACKEND_CPU);
  return context;
}
Context& reference() {
  static Context context = sweep::make_context(LLA_BACKEND_REFERENCE);
  return context;
}
MixerCase case_of(lla_mixer mixer, bool log_linear, int64_t heads, int64_t key_dim, int64_t value_dim) {
  MixerCase c;
  c.mixer = mixer;
  c.log_linear = log_linear;
  c.heads = heads;
  c.key_dim = key_dim;
  c.value_dim = value_dim;
  return c;
}
// The same numbers, rounded to another type and read from it.
Tensors as(const Tensors& t, lla_dtype dtype) {
  Tensors r;
  for (const auto& [role, b] : t) {
    r[role] = Buffer(dtype, b.dims);
    for (size_t i = 0; i < b.count(); ++i) r[role].set(i, b.get(i));
  }
  return r;
}
Tensors zeros_like(const Tensors& inputs) {
  Tensors r;
  for (const auto& [role, b] : inputs)
    if (role != LLA_Y) r[role] = Buffer(b.dtype, b.dims);
  return r;
}
// All rows at once, without a state.
Buffer one_pass(const Context& context, const lla_layer_desc& d, Tensors tensors) {
  const Layer layer = sweep::make_layer(context, d);
  Runner runner(context.get(), layer.get());
  Tensors none;
  Step whole;
  whole.end = tensors.at(LLA_Y).dims[0];
  runner.forward(whole, tensors, none);
  return tensors.at(LLA_Y);
}
// Rows in pieces of so many, through a state.
Buffer in_pieces(const lla_layer_desc& d, Tensors tensors, int64_t piece, lla_dtype node_dtype = LLA_F32) {
  const int64_t rows = tensors.at(LLA_Y).dims[0];
  const Layer layer = sweep::make_layer(cpu(), d);
  lla_state_desc description = LLA_STATE_DESC_INIT;
  description.max_length = rows;
  description.node_dtype = node_dtype;
  lla_layer* layers[1] = {layer.get()};
  lla_state* made = nullptr;
  SWEEP_CALL(lla_state_create(layers, 1, &description, nullptr, 0, &made, &error));
  const State state(made);
  Runner runner(cpu().get(), layer.get());
  runner.longest = rows;
  Tensors none;
  Step step;
  step.state = state.get();
  for (step.begin = 0; step.begin < rows; step.begin = step.end) {
    step.end = std::min(rows, step.begin + piece);
    runner.append(step, tensors, none);
  }
  return tensors.at(LLA_Y);
}
// Relative errors of the eighths of all rows, one after the other.
std::vector<double> errors_over_time(const Buffer& x, const Buffer& exact) {
  std::vector<double> all;
  for (int64_t part = 0, rows = exact.dims[0]; part < 8; ++part)
    all.push_back(sweep::relative_error(x, exact, part * rows / 8, (part + 1) * rows / 8));
  return all;
}
// No eighth is worse than the bound, and the last ones not much worse than the first.
void expect_no_drift(const std::vector<double>& errors, double bound, const std::string& what) {
  std::printf("%s:", what.c_str());
  for (const double e : errors) std::printf(" %.1e", e);
  std::printf("\n");
  for (const double e : errors) EXPECT_LE(e, bound) << what;
  EXPECT_LE(std::max(errors[6], errors[7]), 2 * std::max(errors[0], errors[1])) << what;
}

// A5: 131 072 rows, no file and no table of pairs; with λ = 1 they are the linear model. Probes S9, S10.
TEST(Probes, A5_LongSequences) {
  for (const lla_mixer mixer : kMixers) {
    MixerCase c = case_of(mixer, true, 1, 8, 8);
    constexpr int64_t kRows = 131072;
    Tensors tensors = sweep::mixer_tensors(c, kRows, LLA_F32, 1);
    for (float& x : tensors[LLA_LAMBDA].f32) x = 1;
    const Buffer levels = one_pass(cpu(), sweep::describe(c, kRows), tensors);
    c.log_linear = false;
    tensors.erase(LLA_LAMBDA);
    const Buffer linear = one_pass(cpu(), sweep::describe(c, kRows), tensors);
    EXPECT_TRUE(finite(levels));
    EXPECT_LE(sweep::row_error(levels, linear, 0, kRows), 1e-5) << c.name();
  }
}

// B3: positive gates are what the formula says as long as the numbers fit, in outputs and gradients.
TEST(Probes, B3_PositiveGates) {
  for (const lla_mixer mixer : kMixers) {
    for (const bool log_linear : {true, false}) {
      for (const double gate : {5.0, 0.5, 0.05}) {
        const MixerCase c = case_of(mixer, log_linear, 2, 16, 8);
        const auto rows = std::min<int64_t>(200, static_cast<int64_t>(70 / gate));  // up to e^70
        const lla_layer_desc d = sweep::describe(c, rows);
        Tensors tensors = sweep::mixer_tensors(c, rows, LLA_F32, 1);
        for (float& x : tensors[LLA_GATE].f32) x = static_cast<float>(gate);
        Tensors exact = as(tensors, LLA_F64), none, gradients = zeros_like(tensors), exact_gradients = zeros_like(exact);
        Buffer dy = sweep::random_like(tensors[LLA_Y], 5), exact_dy(LLA_F64, dy.dims);
        for (size_t i = 0; i < dy.count(); ++i) exact_dy.set(i, dy.get(i));
        Step whole;
        whole.end = rows;
        const Layer fast_layer = sweep::make_layer(cpu(), d), exact_layer = sweep::make_layer(reference(), d);
        Runner fast(cpu().get(), fast_layer.get()), judge(reference().get(), exact_layer.get());
        fast.forward(whole, tensors, none);
        judge.forward(whole, exact, none);
        fast.backward(whole, tensors, none, dy, gradients, none);
        judge.backward(whole, exact, none, exact_dy, exact_gradients, none);
        const std::string name = c.name() + " g " + std::to_string(gate) + " T " + std::to_string(rows);
        EXPECT_TRUE(finite(tensors[LLA_Y])) << name;
        EXPECT_LE(sweep::relative_error(tensors[LLA_Y], exact[LLA_Y]), 2e-5) << name;
        for (auto& [role, b] : exact_gradients) {
          EXPECT_TRUE(finite(gradients[role])) << name << " role " << role;
          EXPECT_LE(sweep::relative_error(gradients[role], b), 1e-4) << name << " role " << role;
        }
      }
    }
  }
}

// B4: nothing is ever forgotten and every key written with full strength, in bf16: the error is that of rounding the inputs
// (the judge reads the rounded ones) and the outputs once.
TEST(Probes, B4_NoDecayInBf16) {
  const MixerCase c = case_of(LLA_DELTA_RULE, true, 1, 64, 16);
  constexpr int64_t kRows = 4096;
  Tensors tensors = as(sweep::mixer_tensors(c, kRows, LLA_F32, 3), LLA_BF16);
  fill_rows(tensors[LLA_GATE], 0, kRows, 0);
  fill_rows(tensors[LLA_WRITE], 0, kRows, 1);
  const lla_layer_desc d = sweep::describe(c, kRows);
  expect_no_drift(errors_over_time(one_pass(cpu(), d, tensors), one_pass(reference(), d, as(tensors, LLA_F64))), 5e-3,
                  "no decay in bf16");
}

// B8: write strengths near 1 in bf16, one row after the other and all at once: the same numbers, however far it goes.
TEST(Probes, B8_DecodeAndPrefillInBf16) {
  constexpr int64_t kRows = 8192;
  for (const lla_mixer mixer : kMixers) {
    const MixerCase c = case_of(mixer, true, 1, 64, 16);
    Tensors tensors = as(sweep::mixer_tensors(c, kRows, LLA_F32, 3), LLA_BF16);
    for (size_t i = 0; i < tensors[LLA_WRITE].count(); ++i) tensors[LLA_WRITE].set(i, 1 - 0.01 * static_cast<double>(i % 8));
    for (size_t i = 0; i < tensors[LLA_GATE].count(); ++i) tensors[LLA_GATE].set(i, -1e-3);
    const lla_layer_desc d = sweep::describe(c, kRows);
    const Buffer exact = one_pass(reference(), d, as(tensors, LLA_F64)), prefill = one_pass(cpu(), d, tensors),
                 decode = in_pieces(d, tensors, 1);
    expect_no_drift(errors_over_time(prefill, exact), 5e-3, c.name() + " prefill in bf16");
    expect_no_drift(errors_over_time(decode, exact), 5e-3, c.name() + " decode in bf16");
    expect_no_drift(errors_over_time(decode, prefill), 5e-3, c.name() + " decode against prefill");
  }
}

// B10: 65 536 single rows that forget almost nothing, in states of 32 and of 16 bits: what a narrow state costs does not
// grow with time.
TEST(Probes, B10_DriftOfNarrowStates) {
  constexpr int64_t kRows = 65536;
  for (const lla_mixer mixer : kMixers) {
    const MixerCase c = case_of(mixer, true, 1, 16, 8);
    Tensors tensors = sweep::mixer_tensors(c, kRows, LLA_F32, 3);
    for (float& x : tensors[LLA_GATE].f32) x = -1e-4f;
    const lla_layer_desc d = sweep::describe(c, kRows);
    const Buffer exact = one_pass(reference(), d, as(tensors, LLA_F64));
    expect_no_drift(errors_over_time(in_pieces(d, tensors, 1), exact), 1e-5, c.name() + " nodes in fp32");
    expect_no_drift(errors_over_time(in_pieces(d, tensors, 1, LLA_BF16), exact), 1e-2, c.name() + " nodes in bf16");
  }
}

// B11: a gate is the natural log of the decay: log(1/2) halves, exactly once a row, and nothing else does.
TEST(Probes, B11_GatesAreNaturalLogarithms) {
  constexpr int64_t kRows = 100;
  for (const lla_mixer mixer : kMixers) {
    MixerCase c = case_of(mixer, false, 1, 4, 4);
    Tensors tensors = sweep::mixer_tensors(c, kRows, LLA_F32, 3);
    for (float& x : tensors[LLA_GATE].f32) x = static_cast<float>(std::log(0.5));
    for (lla_role role : {LLA_Q, LLA_K, LLA_V})  // one thing is written, in row 0, and read ever after
      for (size_t i = 0; i < tensors[role].count(); ++i)
        tensors[role].set(i, i % 4 == 0 && (role == LLA_Q || i == 0) ? 1 : 0);
    for (float& x : tensors[LLA_WRITE].f32) x = 1;
    const Buffer y = one_pass(cpu(), sweep::describe(c, kRows), tensors);
    for (int64_t t = 0; t < kRows; ++t) {
      const double expected = std::ldexp(1.0, static_cast<int>(-t));
      const double tolerance = 1e-6 + static_cast<double>(t * t) * 6e-8;  // of a sum of t numbers in fp32
      EXPECT_NEAR(y.get(static_cast<size_t>(4 * t)), expected, tolerance * expected) << "row " << t;
    }
  }
}

// C2: blocks of a state that lie more than 2^31 elements apart.
TEST(Probes, C2_PoolsBeyond2To31Elements) {
  constexpr int64_t kRows = 330;
  for (const lla_mixer mixer : kMixers) {
    const MixerCase c = case_of(mixer, true, 2, 16, 8);
    const lla_layer_desc d = sweep::describe(c, kRows);
    Tensors tensors = sweep::mixer_tensors(c, kRows, LLA_F32, 3), none;
    const Layer layer = sweep::make_layer(cpu(), d);
    lla_layer* layers[1] = {layer.get()};
    lla_state_desc description = LLA_STATE_DESC_INIT;
    description.slots = 2;
    description.max_length = kRows;
    std::vector<lla_block_memory> memory;
    std::vector<std::pair<void*, size_t>> maps;
    for (const lla_block_kind kind : {LLA_BLOCK_NODE, LLA_BLOCK_TAIL}) {
      lla_block_geometry g = LLA_BLOCK_GEOMETRY_INIT;
      SWEEP_CALL(lla_state_geometry(layers, 1, &description, 0, kind, &g, &error));
      ASSERT_GT(g.bytes, 0);
      const int64_t stride = (int64_t{1} << 33) + g.alignment;  // 2^31 floats and a little
      const auto bytes = static_cast<size_t>(stride * g.count);
      void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      ASSERT_NE(base, MAP_FAILED);
      maps.emplace_back(base, bytes);
      memory.push_back({0, kind, 0, base, stride});
    }
    lla_state* made = nullptr;
    SWEEP_CALL(lla_state_create(layers, 1, &description, memory.data(), static_cast<int64_t>(memory.size()), &made, &error));
    {
      const State state(made);
      Runner runner(cpu().get(), layer.get());
      Step step;
      step.state = state.get();
      step.slot_in = step.slot_out = 1;
      for (step.begin = 0; step.begin < kRows; step.begin = step.end) {
        step.end = std::min<int64_t>(kRows, step.begin + 37);
        runner.append(step, tensors, none);
      }
    }
    EXPECT_TRUE(in_pieces(d, tensors, 37).same_bits(tensors[LLA_Y])) << c.name();
    for (const auto& [base, bytes] : maps) munmap(base, bytes);
  }
}

// C7: the gradients of a sequence of 1024 chunks with three short ones behind it are those of each sequence alone, bit for
// bit, and those of the reference.
TEST(Probes, C7_BackwardOf65536Rows) {
  const std::vector<int64_t> lengths{65536, 3, 70, 1};
  std::vector<int64_t> offsets{0};
  for (const int64_t n : lengths) offsets.push_back(offsets.back() + n);
  for (const lla_mixer mixer : kMixers) {
    const Problem p = problem_of(hostile::mixer(mixer, lla_levels_needed(65536), 1, 1, 8, 4), offsets.back(), 3);
    const Layer layer = sweep::make_layer(cpu(), p.desc), exact_layer = sweep::make_layer(reference(), p.desc);
    const Buffer dy = sweep::random_like(p.tensors.at(LLA_Y), 5), exact_dy = to_double(dy);
    Call c;
    c.context = cpu().get();
    c.layer = layer.get();
    c.tensors = p.tensors;
    c.rows = packed(offsets);
    c.dy = &dy;
    Outcome all = run(c);
    ASSERT_EQ(all.status, LLA_OK) << all.text;
    all.gradients[LLA_Y] = all.y;
    for (size_t b = 0; b < lengths.size(); ++b) {
      const Buffer part = slice(dy, offsets[b], lengths[b]);
      c.tensors = slice(p.tensors, offsets[b], lengths[b]);
      c.rows = uniform_rows(1, lengths[b]);
      c.dy = &part;
      Outcome alone = run(c);
      ASSERT_EQ(alone.status, LLA_OK) << alone.text;
      alone.gradients[LLA_Y] = alone.y;
      for (auto& [role, x] : alone.gradients)
        EXPECT_TRUE(x.same_bits(slice(all.gradients[role], offsets[b], lengths[b]))) << "sequence " << b << " role " << role;
    }
    c.context = reference().get();
    c.layer = exact_layer.get();
    c.tensors = to_double(p.tensors);
    c.rows = packed(offsets);
    c.dy = &exact_dy;
    Outcome exact = run(c);
    ASSERT_EQ(exact.status, LLA_OK) << exact.text;
    exact.gradients[LLA_Y] = exact.y;
    for (auto& [role, x] : exact.gradients)
      EXPECT_LE(sweep::relative_error(all.gradients[role], x), 1e-4) << "mixer " << mixer << " role " << role;
  }
}

// C8: a very long sequence as the first call of a process, a short one, the long one again. (Run in a process of its own.)
TEST(FirstCall, C8_DoesNotMatter) {
  constexpr int64_t kRows = 300000;
  for (const lla_mixer mixer : kMixers) {
    const MixerCase c = case_of(mixer, true, 1, 4, 4);
    const Tensors tensors = sweep::mixer_tensors(c, kRows, LLA_F32, 3);
    const lla_layer_desc d = sweep::describe(c, kRows);
    const Buffer first = one_pass(cpu(), d, tensors);
    const Buffer part = one_pass(cpu(), d, slice(tensors, 0, 128));
    EXPECT_TRUE(part.same_bits(one_pass(cpu(), d, slice(tensors, 0, 128))));
    EXPECT_TRUE(first.same_bits(one_pass(cpu(), d, tensors)));
    EXPECT_LE(sweep::row_error(part, first, 0, 128), 3e-6);
  }
}

// D5: every length below a chunk of 16 rows and a little beyond, forward and backward, against the reference.
TEST(Probes, D5_TinyLengths) {
  for (const lla_mixer mixer : kMixers) {
    for (const int64_t grain : {16, 64}) {
      for (int64_t rows = 1; rows <= 17; ++rows) {
        const Problem p = problem_of(hostile::mixer(mixer, lla_levels_needed(rows), 2, 1, 9, 7, grain), rows, 3);
        const Buffer dy = sweep::random_like(p.tensors.at(LLA_Y), 5), exact_dy = to_double(dy);
        const Layer layer = sweep::make_layer(cpu(), p.desc), exact_layer = sweep::make_layer(reference(), p.desc);
        Call c;
        c.context = cpu().get();
        c.layer = layer.get();
        c.tensors = p.tensors;
        c.rows = uniform_rows(1, rows);
        c.dy = &dy;
        Outcome fast = run(c);
        c.context = reference().get();
        c.layer = exact_layer.get();
        c.tensors = to_double(p.tensors);
        c.dy = &exact_dy;
        Outcome exact = run(c);
        ASSERT_EQ(fast.status, LLA_OK) << fast.text;
        ASSERT_EQ(exact.status, LLA_OK) << exact.text;
        EXPECT_LE(sweep::relative_error(fast.y, exact.y), 2e-6) << rows;
        for (auto& [role, x] : exact.gradients)
          EXPECT_LE(sweep::relative_error(fast.gradients[role], x), 2e-5) << rows << " rows, role " << role;
      }
    }
  }
}

// F4: a long prompt in four pieces is the prompt in one, in the last piece as in the first.
TEST(Probes, F4_PiecesOfALongPrompt) {
  constexpr int64_t kRows = 32768;
  for (const lla_mixer mixer : kMixers) {
    for (const bool log_linear : {true, false}) {
      const MixerCase c = case_of(mixer, log_linear, 1, 16, 8);
      const Tensors tensors = sweep::mixer_tensors(c, kRows, LLA_F32, 3);
      const lla_layer_desc d = sweep::describe(c, kRows);
      const Buffer whole = one_pass(cpu(), d, tensors), pieces = in_pieces(d, tensors, kRows / 4);
      for (int64_t i = 0; i < 4; ++i)
        EXPECT_LE(sweep::row_error(pieces, whole, i * kRows / 4, (i + 1) * kRows / 4), 3e-6) << c.name() << " piece " << i;
    }
  }
}

// M3: 10 000 rows in segments of 1000, the gradients of states handed back: those of one pass, of gates and λ too.
TEST(Probes, M3_TrainingInSegments) {
  constexpr int64_t kRows = 10000, kSegment = 1000, kCount = kRows / kSegment;
  for (const lla_mixer mixer : kMixers) {
    const MixerCase c = case_of(mixer, true, 1, 8, 4);
    Tensors tensors = sweep::mixer_tensors(c, kRows, LLA_F32, 3), none;
    for (float& x : tensors[LLA_GATE].f32) x *= 0.02f;  // what happens in one segment matters in the next
    const Layer layer = sweep::make_layer(cpu(), sweep::describe(c, kRows));
    Runner runner(cpu().get(), layer.get());
    Buffer dy = sweep::random_like(tensors[LLA_Y], 5);
    Tensors whole_gradients = zeros_like(tensors), gradients = zeros_like(tensors);
    Step whole;
    whole.end = kRows;
    runner.forward(whole, tensors, none);
    runner.backward(whole, tensors, none, dy, whole_gradients, none);
    const State state = sweep::make_state(layer, kCount + 1),
                gradient_state = sweep::make_state(layer, kCount + 1, LLA_STATE_GRADIENT);
    const auto step_of = [&](int64_t i) {
      Step s;
      s.begin = i * kSegment;
      s.end = s.begin + kSegment;
      s.slot_in = i;
      s.slot_out = i + 1;
      s.state = state.get();
      return s;
    };
    for (int64_t i = 0; i < kCount; ++i) runner.append(step_of(i), tensors, none);
    for (int64_t i = kCount - 1; i >= 0; --i) {
      Step s = step_of(i);
      s.slot_out = i;
      s.gradient_state = gradient_state.get();
      s.initial_gradient_slot = i > 0 ? i : -1;
      s.final_gradient_slot = i + 1 < kCount ? i + 1 : -1;
      runner.backward(s, tensors, none, dy, gradients, none);
    }
    for (auto& [role, b] : whole_gradients)
      for (int64_t i = 0; i < kCount; ++i)
        EXPECT_LE(sweep::relative_error(gradients[role], b, i * kSegment, (i + 1) * kSegment), 1e-4)
            << c.name() << " segment " << i << " role " << role;
  }
}

// S7: outputs and gradients in bf16 with wide keys: the error against double does not grow with the length.
TEST(Probes, S7_Bf16OfWideKeys) {
  constexpr int64_t kRows = 8192;
  for (const lla_mixer mixer : kMixers) {
    const MixerCase c = case_of(mixer, true, 1, 256, 16);
    Tensors tensors = as(sweep::mixer_tensors(c, kRows, LLA_F32, 3), LLA_BF16), exact = as(tensors, LLA_F64), none;
    Tensors gradients = zeros_like(tensors), exact_gradients = zeros_like(exact);
    Buffer dy(LLA_BF16, tensors[LLA_Y].dims), exact_dy(LLA_F64, dy.dims);
    const Buffer values = sweep::random_like(Buffer(LLA_F32, dy.dims), 5);
    for (size_t i = 0; i < dy.count(); ++i) {
      dy.set(i, values.get(i));
      exact_dy.set(i, dy.get(i));
    }
    const lla_layer_desc d = sweep::describe(c, kRows);
    const Layer fast_layer = sweep::make_layer(cpu(), d), exact_layer = sweep::make_layer(reference(), d);
    Runner fast(cpu().get(), fast_layer.get()), judge(reference().get(), exact_layer.get());
    Step whole;
    whole.end = kRows;
    fast.forward(whole, tensors, none);
    judge.forward(whole, exact, none);
    fast.backward(whole, tensors, none, dy, gradients, none);
    judge.backward(whole, exact, none, exact_dy, exact_gradients, none);
    expect_no_drift(errors_over_time(tensors[LLA_Y], exact[LLA_Y]), 1e-2, c.name() + " bf16 outputs");
    for (auto& [role, b] : exact_gradients)
      expect_no_drift(errors_over_time(gradients[role], b), 1e-2, c.name() + " bf16 gradient " + std::to_string(role));
  }
}

}  // namespace
