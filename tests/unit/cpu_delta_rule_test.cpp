// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of the delta rule, for every instruction set of this CPU: golden vectors, the reference backend, hostile
// keys and gates, histories, splits, handed-over gradients, and the promises about bits.
#include <gtest/gtest.h>

#include "delta_rule_testing.h"

namespace {

using namespace delta_rule_testing;

class DeltaRule : public testing::TestWithParam<int32_t> {
 protected:
  const Kernel& forward = kernel_of(GetParam(), Op::MixerForward);
  const Kernel& backward = kernel_of(GetParam(), Op::MixerBackward);
};

// ---- golden vectors ----

struct GoldenCase {
  MixerShape shape;
  Tensors t;
  std::vector<Sequence> sequences;
  int64_t rows = 0;
};

void fill_from(Tensor& tensor, const golden::File& f, const char* name) {
  size_t at = 0;
  const Values& values = f[name];
  tensor.fill([&] { return values[at++]; });
}

GoldenCase golden_case(const golden::File& f, int64_t grain) {
  GoldenCase c;
  c.shape = shape_of(f.integer("H"), f.integer("G"), f.integer("dk"), f.integer("dv"), grain, f.integer("L"),
                     f.text("levels_policy") == "absorb");
  c.shape.scale = f.number("scale");
  c.rows = f.integer("B") * f.integer("T");
  Random random(1);
  Inputs in;
  in.pad = 3;
  c.t = random_tensors(random, c.shape, c.rows, in);
  fill_from(c.t.q, f, "in.q");
  fill_from(c.t.k, f, "in.k");
  fill_from(c.t.v, f, "in.v");
  fill_from(c.t.gate, f, "in.g");
  fill_from(c.t.write, f, "in.beta");
  fill_from(c.t.lambda, f, "in.lam");
  for (int64_t b = 0; b < f.integer("B"); ++b) c.sequences.push_back(plain_sequence(b * f.integer("T"), f.integer("T")));
  return c;
}

const char* const kGolden[] = {"delta_tiny",   "delta_groups",    "delta_absorb",     "delta_linear",
                               "delta_no_gate", "delta_gdn_shape", "delta_paper_shape"};

TEST_P(DeltaRule, Golden) {
  for (const char* name : kGolden) {
    const golden::File f = golden::load(name);
    ASSERT_TRUE(f.valid) << f.error;
    const double tolerance = std::string(name) == "delta_no_gate" ? 1e-4 : 2e-5;
    for (int64_t grain : {1, 4, 16, 64, 128, 512}) {
      const std::string where = std::string(name) + " grain " + std::to_string(grain);
      GoldenCase c = golden_case(f, grain);
      const Limits limits = limits_of(c.sequences, c.rows);
      const MixerForward p = forward_problem(c.shape, c.t, c.sequences);
      run_kernel(forward, &p, limits);
      EXPECT_LE(norm_error(c.t.y.values(), f["out.o"]), tolerance) << where;
      if (!f.has("in.do")) continue;
      fill_from(c.t.dy, f, "in.do");
      const MixerBackward b = backward_problem(c.shape, c.t, c.sequences);
      run_kernel(backward, &b, limits);
      expect_close(gradients_of(c.t),
                   {{"dq", f["grad.q"]},
                    {"dk", f["grad.k"]},
                    {"dv", f["grad.v"]},
                    {"dgate", f["grad.g"]},
                    {"dwrite", f["grad.beta"]},
                    {"dlambda", f["grad.lam"]}},
                   tolerance, where);
    }
  }
}

// With a grain of one row the nodes are the canonical blocks.
TEST_P(DeltaRule, GoldenStates) {
  for (const char* name : kGolden) {
    const golden::File f = golden::load(name);
    ASSERT_TRUE(f.valid) << f.error;
    if (f.text("levels_policy") != "error") continue;
    GoldenCase c = golden_case(f, 1);
    const int64_t batch = f.integer("B"), rows = f.integer("T"), size = c.shape.key_dim * c.shape.value_dim;
    Memory memory(c.shape, 1000, batch);
    std::vector<Append> appends(static_cast<size_t>(batch));
    for (int64_t b = 0; b < batch; ++b) {
      Append& append = appends[static_cast<size_t>(b)];
      append.plan(memory, memory.empty_slot(0), b, b * rows, rows);
      c.sequences[static_cast<size_t>(b)] = append.sequence;
    }
    MixerForward p = forward_problem(c.shape, c.t, c.sequences);
    p.state = memory.memory;
    run_kernel(forward, &p, limits_of(c.sequences, c.rows));
    Values got, want;
    for (int j = 0; j < 12; ++j) {
      const std::string block = "state.block" + std::to_string(j);
      EXPECT_EQ(f.has(block), appends[0].after.node[j] >= 0) << name << " " << block;
      if (!f.has(block)) continue;
      want.insert(want.end(), f[block].begin(), f[block].end());
      for (const Append& append : appends) {
        for (int64_t h = 0; h < c.shape.heads; ++h) {
          const char* node = memory.memory.node(append.after.node[j], h);
          for (int64_t i = 0; i < size; ++i) got.push_back(load_element<double>(node, LLA_F32, i));
        }
      }
    }
    EXPECT_LE(norm_error(got, want), 2e-5) << name;
  }
}

// ---- against the reference backend ----

void expect_trial(const Kernel& forward, const Kernel& backward, const Trial& trial, uint64_t seed, double tolerance,
                  const std::string& where) {
  Step own(seed, trial.shape, trial.parts, trial.node_dtype, trial.tail_dtype);
  Step other(seed, trial.shape, trial.parts, trial.node_dtype, trial.tail_dtype);
  Random random(seed + 1);
  const Tensors t = unit_tensors(random, trial.shape, own.rows, trial.in);
  const Result result = run_step(&forward, &backward, own, t);
  const Result expected = run_step(nullptr, nullptr, other, with_double_outputs(t));
  expect_close(result.named(true), expected.named(true), tolerance, where);
}

TEST_P(DeltaRule, MatchesReference) {
  Random random(7);
  for (int number = 0; number < 80; ++number) {
    const Trial trial = random_trial(random, number);
    const double tolerance = trial.shape.key_dim == 1 ? 2e-5 : 3e-6;  // all unit keys of one element are the same key
    expect_trial(forward, backward, trial, 100 + static_cast<uint64_t>(number), tolerance, describe(trial, number));
  }
}

// All unit keys of one element are the same key: without write strengths each row erases what is older, and the gates'
// gradients are zero.
TEST_P(DeltaRule, KeysOfOneElement) {
  Random random(21);
  for (int number = 0; number < 96; ++number) {
    Trial trial = random_trial(random, number);
    trial.shape.key_dim = 1;
    trial.shape.grain = number % 3 ? 1 : 4;
    trial.in.write = number % 5 == 0;
    expect_trial(forward, backward, trial, 900 + static_cast<uint64_t>(number), 1e-5, describe(trial, number));
  }
}

// Types of memory; the arithmetic is the same. Gradients and y stay wide, so that their rounding hides nothing.
TEST_P(DeltaRule, MatchesReferenceInNarrowTypes) {
  Random random(8);
  for (int number = 0; number < 24; ++number) {
    Trial trial = random_trial(random, number);
    trial.in.dtype = number % 2 ? LLA_F16 : LLA_BF16;
    trial.tail_dtype = number % 3 ? LLA_F32 : trial.in.dtype;
    Step own(5, trial.shape, trial.parts, LLA_F32, trial.tail_dtype);
    Step other(5, trial.shape, trial.parts, LLA_F32, trial.tail_dtype);
    Tensors t = unit_tensors(random, trial.shape, own.rows, trial.in);
    const Tensors wide = with_double_outputs(t);
    for (Tensor* x : {&t.y, &t.dq, &t.dk, &t.dv}) *x = Tensor(LLA_F32, x->rows, x->heads, x->dim, x->pad);
    const Result result = run_step(&forward, &backward, own, t);
    const double tolerance = trial.shape.key_dim == 1 ? 2e-5 : 3e-6;
    const Result expected = run_step(nullptr, nullptr, other, wide);
    expect_close(result.named(true), expected.named(true), tolerance, describe(trial, number));
  }
}

// Rows of a head that lie together are read, and gradients made, where they are: the same bits as anywhere else.
TEST_P(DeltaRule, BitsDoNotDependOnTheLayout) {
  Random random(31);
  for (int number = 0; number < 32; ++number) {
    Trial trial = random_trial(random, number);
    const Saved keep = number % 2 ? Saved::Yes : Saved::No;
    const auto run = [&](bool by_heads, int64_t pad) {
      trial.in.by_heads = by_heads;
      trial.in.pad = pad;
      Step step(7, trial.shape, trial.parts, LLA_F32, LLA_F32);
      Random numbers(static_cast<uint64_t>(number));
      return run_step(&forward, &backward, step, unit_tensors(numbers, trial.shape, step.rows, trial.in), keep);
    };
    const std::vector<Named> want = run(false, 0).named(true);
    for (const int64_t pad : {0, 5}) {
      const std::vector<Named> got = run(true, pad).named(true);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_TRUE(got[i].values == want[i].values) << want[i].name << " " << describe(trial, number) << " pad " << pad;
      }
    }
  }
}

// Rounding a node to bf16 can go either way where both sides are close to the middle: a rare step of 2^-9.
TEST_P(DeltaRule, MatchesReferenceWithRoundedNodes) {
  Random random(9);
  for (int number = 2; number < 40; number += number % 4 == 3 ? 3 : 1) {  // log-linear without absorbing
    Trial trial = random_trial(random, number);
    if (trial.shape.key_dim == 1) trial.shape.key_dim = 2;
    trial.node_dtype = LLA_BF16;
    expect_trial(forward, backward, trial, 300 + static_cast<uint64_t>(number), 2e-4, describe(trial, number));
  }
}

// ---- hostile keys and gates ----

TEST_P(DeltaRule, HardGates) {
  Random random(10);
  for (int number = 0; number < 40; ++number) {
    Trial trial = random_trial(random, number);
    trial.in.gate = true;
    trial.in.hard = 0.15;
    const double tolerance = trial.shape.key_dim == 1 ? 2e-5 : 3e-6;
    expect_trial(forward, backward, trial, 500 + static_cast<uint64_t>(number), tolerance, describe(trial, number));
  }
}

// What a row reads is erased by the next: little is left of older rows, and the gate's gradient is small against what it is
// made of, the rows' dy . y.
// Probe B5.
TEST_P(DeltaRule, RepeatedKey) {
  for (const double write : {0.835, 0.999}) {
    for (const int64_t levels : {0, 10}) {
      for (const int64_t grain : {16, 64, 128}) {
        Trial trial;
        trial.shape = shape_of(1, 1, 128, 128, grain, levels);
        const std::vector<Part> parts = {{0, 0, 256, false}};
        Step own(1, trial.shape, parts, LLA_F32, LLA_F32), other(1, trial.shape, parts, LLA_F32, LLA_F32);
        Random random(11);
        Tensors t = unit_tensors(random, trial.shape, 256, trial.in);
        for (int64_t r = 1; r < 256; ++r) {
          for (int64_t i = 0; i < 128; ++i) t.k.set(r, 0, i, t.k.get(0, 0, i));
        }
        t.gate.fill([] { return -1e-3; });
        t.write.fill([&] { return write; });
        const Result expected = run_step(nullptr, nullptr, other, with_double_outputs(t));
        expect_close(run_step(&forward, &backward, own, t).named(false), expected.named(false), 5e-5,
                     std::string("write ") + std::to_string(write) + " L" + std::to_string(levels) + " C" +
                         std::to_string(grain),
                     golden::row_dot_norm(t.dy.values(), expected.t.y.values(), 128));
      }
    }
  }
}

// Keys that differ little, so that the rows of tril(w K K^T) sum to about 40; and writes of exactly one without any gate.
// Probe B6.
TEST_P(DeltaRule, NearParallelKeys) {
  for (const double noise : {0.05, 0.02, 0.0}) {
    for (const int64_t grain : {64, 128}) {
      const MixerShape shape = shape_of(2, 1, 64, 64, grain, noise == 0.02 ? 0 : 10);
      const std::vector<Part> parts = {{0, 0, 300, false}};
      Step own(1, shape, parts, LLA_F32, LLA_F32), other(1, shape, parts, LLA_F32, LLA_F32);
      Random random(12);
      Inputs in;
      in.gate = noise > 0;
      Tensors t = unit_tensors(random, shape, 300, in);
      for (int64_t r = 1; r < 300 && noise > 0; ++r) {
        for (int64_t i = 0; i < 64; ++i) t.k.set(r, 0, i, t.k.get(0, 0, i) + noise * random.normal());
      }
      make_unit(t.k);
      if (in.gate) t.gate.fill([] { return -1e-3; });
      t.write.fill([&] { return noise > 0 ? 0.72 : 1.0; });
      double sum = 0;
      for (int64_t s = 0; s < 64; ++s) {
        double dot = 0;
        for (int64_t i = 0; i < 64; ++i) dot += t.k.get(63, 0, i) * t.k.get(s, 0, i);
        sum += t.write.get(63, 0, 0) * std::fabs(dot);
      }
      EXPECT_TRUE(noise == 0 || sum > 35) << sum;
      expect_close(run_step(&forward, &backward, own, t).named(false),
                   run_step(nullptr, nullptr, other, with_double_outputs(t)).named(false), noise > 0 ? 5e-5 : 3e-6,
                   std::string("noise ") + std::to_string(noise) + " C" + std::to_string(grain));
    }
  }
}

// ---- splits ----

// Appends rows in pieces of the given lengths; returns the slot at the end, the outputs are in t.y.
SlotImage append_pieces(const Kernel& forward, Memory& m, Tensors& t, const std::vector<int64_t>& pieces) {
  SlotImage slot = m.empty_slot(0);
  int64_t begin = 0;
  for (int64_t rows : pieces) {
    Append append;
    append.plan(m, slot, 0, begin, rows);
    const std::vector<Sequence> sequences = {append.sequence};
    MixerForward p = forward_problem(m.shape, t, sequences);
    p.state = m.memory;
    run_kernel(forward, &p, limits_of(sequences, t.q.rows));
    slot = append.after;
    begin += rows;
  }
  return slot;
}

TEST_P(DeltaRule, PiecesMatchOneCall) {
  Random random(13);
  for (const int64_t grain : {1, 4, 16, 64, 256}) {
    for (const int64_t levels : {0, 5, 9}) {
      const MixerShape shape = shape_of(2, 1, 16, 24, grain, levels, levels == 5);
      const int64_t total = 150;
      Tensors t = unit_tensors(random, shape, total, Inputs());
      Memory whole_memory(shape, 3000, 1);
      whole_memory.rewrites_all = true;
      const SlotImage whole = append_pieces(forward, whole_memory, t, {total});
      const Values y = t.y.values();
      for (int kind = 0; kind < 4; ++kind) {  // single rows; drafts; anything
        std::vector<int64_t> pieces;
        for (int64_t left = total; left > 0; left -= pieces.back()) {
          const int64_t rows = kind == 0 ? 1 : kind == 1 ? 3 : random.below(kind == 2 ? 9 : 80);
          pieces.push_back(std::min(left, rows));
        }
        Memory memory(shape, 3000, 1);
        memory.rewrites_all = true;
        t.y.fill([] { return 0.0; });
        const SlotImage slot = append_pieces(forward, memory, t, pieces);
        const std::string where = std::string("C") + std::to_string(grain) + " L" + std::to_string(levels) + " kind " +
                                  std::to_string(kind);
        EXPECT_LE(norm_error(t.y.values(), y), 3e-6) << where;
        EXPECT_LE(norm_error(slot_values(memory, slot).content, slot_values(whole_memory, whole).content), 3e-6) << where;
      }
    }
  }
}

// Backward in two calls, the second's gradient of its initial state handed to the first, is backward in one.
TEST_P(DeltaRule, HandedOverGradients) {
  Random random(14);
  for (const int64_t grain : {4, 16, 128}) {
    for (const int64_t cut : {1, 16, 37, 96, 130}) {
      const MixerShape shape = shape_of(4, 2, 16, 24, grain, grain == 16 ? 0 : 9);
      const int64_t total = 150;
      Memory memory(shape, 3000, 1), gradient(shape, 3000, 3);
      memory.rewrites_all = true;
      Tensors t = unit_tensors(random, shape, total, Inputs());
      std::vector<Append> appends(2);
      appends[0].plan(memory, memory.empty_slot(0), 0, 0, cut);
      std::vector<Sequence> first = {appends[0].sequence};
      MixerForward p = forward_problem(shape, t, first);
      p.state = memory.memory;
      run_kernel(forward, &p, limits_of(first, total));
      appends[1].plan(memory, appends[0].after, 0, cut, total - cut);
      std::vector<Sequence> second = {appends[1].sequence}, whole = {plain_sequence(0, total)};
      const SlotImage final = gradient.random_slot(random, total, 0);
      SlotImage middle = gradient.empty_slot(cut);
      middle.start = 0;
      for (int b = 0; b < kNodes; ++b) {
        if (gradient.live(cut / grain, b, 0)) middle.node[b] = gradient.next_node++;
      }
      second[0].initial_gradient = first[0].final_gradient = middle;
      second[0].final_gradient = whole[0].final_gradient = final;
      std::vector<Named> results[2];
      for (const bool split : {false, true}) {
        for (Tensor* x : {&t.dq, &t.dk, &t.dv, &t.dgate, &t.dwrite, &t.dlambda}) x->fill([] { return 0.0; });
        for (const std::vector<Sequence>* sequences : {&whole, &second, &first}) {
          if (split == (sequences == &whole)) continue;
          MixerBackward b = backward_problem(shape, t, *sequences);
          for (View* view : {&b.dq, &b.dk, &b.dv, &b.dgate, &b.dwrite, &b.dlambda}) view->accumulate = true;
          b.state = memory.memory;
          b.gradient = gradient.memory;
          run_kernel(backward, &b, limits_of(*sequences, total));
        }
        results[split] = gradients_of(t);
      }
      expect_close(results[1], results[0], 3e-6, std::string("C") + std::to_string(grain) + " cut " + std::to_string(cut));
    }
  }
}

// ---- promises about bits ----

bool same_bits(const std::vector<Named>& a, const std::vector<Named>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].values != b[i].values) return false;
  }
  return true;
}

TEST_P(DeltaRule, BitsDoNotDependOnScheduleSavedOrBatch) {
  Random random(15);
  for (int number = 0; number < 40; ++number) {
    Trial trial = random_trial(random, number);
    if (number < 24) trial.shape.grain = number % 3 ? 4 : 1;  // many pieces, several saved sets
    if (trial.shape.levels == 12) trial.shape.levels = 11 + 3 * random.below(3);  // sets at other distances
    const uint64_t seed = 700 + static_cast<uint64_t>(number);
    Random numbers(seed);
    const auto step = [&] { return Step(seed, trial.shape, trial.parts, LLA_F32, LLA_F32); };
    Step a = step(), b = step(), c = step();
    const Tensors t = unit_tensors(numbers, trial.shape, a.rows, trial.in);
    const Result plain = run_step(&forward, &backward, a, t);
    const std::string where = describe(trial, number);
    EXPECT_TRUE(same_bits(run_step(&forward, &backward, b, t, Saved::Yes).named(true), plain.named(true))) << where;
    // One sequence alone, its tasks in reverse order: all others are made padding.
    const size_t kept = static_cast<size_t>(random.below(static_cast<int64_t>(trial.parts.size())));
    if (trial.parts[kept].padding) continue;
    for (size_t i = 0; i < c.sequences.size(); ++i) c.sequences[i].padding = i != kept;
    const Result alone = run_step(&forward, &backward, c, t, Saved::No, true);
    const Sequence& s = c.sequences[kept];
    const std::pair<const Tensor*, const Tensor*> pairs[] = {
        {&alone.t.y, &plain.t.y}, {&alone.t.dk, &plain.t.dk}, {&alone.t.dgate, &plain.t.dgate}};
    for (const auto& [x, y] : pairs) {
      for (int64_t r = s.row_begin; r < s.row_begin + s.rows && !x->empty(); ++r) {
        for (int64_t h = 0; h < x->heads; ++h) {
          for (int64_t i = 0; i < x->dim; ++i) EXPECT_EQ(x->get(r, h, i), y->get(r, h, i)) << where;
        }
      }
    }
  }
}

// Gradients that accumulate, in types of their own, equal the plain ones added and rounded once.
TEST_P(DeltaRule, AccumulatesInTheGradientsType) {
  Random random(16);
  const MixerShape shape = shape_of(4, 2, 16, 8, 16, 6);
  const std::vector<Sequence> sequences = {plain_sequence(0, 30)};
  Inputs in;
  in.dtype = LLA_BF16;
  Tensors t = unit_tensors(random, shape, 30, in);
  const auto outputs = [](Tensors& x) {
    return std::vector<Tensor*>{&x.dq, &x.dk, &x.dv, &x.dgate, &x.dwrite, &x.dlambda};
  };
  Tensors wide = t;
  for (Tensor* x : outputs(wide)) *x = Tensor(LLA_F32, x->rows, x->heads, x->dim);
  const MixerBackward plain = backward_problem(shape, wide, sequences);
  run_kernel(backward, &plain, limits_of(sequences, 30));
  for (Tensor* x : outputs(t)) x->fill([&] { return random.normal(); });
  Tensors before = t;
  MixerBackward added = backward_problem(shape, t, sequences);
  for (View* view : {&added.dq, &added.dk, &added.dv, &added.dgate, &added.dwrite, &added.dlambda}) view->accumulate = true;
  run_kernel(backward, &added, limits_of(sequences, 30));
  for (size_t n = 0; n < outputs(t).size(); ++n) {
    Tensor &x = *outputs(t)[n], &w = *outputs(wide)[n], &old = *outputs(before)[n];
    for (int64_t r = 0; r < x.rows; ++r) {
      for (int64_t h = 0; h < x.heads; ++h) {
        for (int64_t i = 0; i < x.dim; ++i) {
          const float sum = static_cast<float>(old.get(r, h, i)) + static_cast<float>(w.get(r, h, i));
          Tensor rounded(x.dtype, 1, 1, 1);
          rounded.set(0, 0, 0, sum);
          EXPECT_EQ(x.get(r, h, i), rounded.get(0, 0, 0)) << n;
        }
      }
    }
  }
}

// Whether a size may follow another where a limit rises by a third: it does not fall, nor does it overflow (a negative
// number) while this machine's memory can hold it.
bool grown(int64_t size, int64_t before) {
  return size < 0 ? before < 0 || before > PTRDIFF_MAX / 2 : before >= 0 && size >= before;
}

TEST_P(DeltaRule, MemoryGrowsWithTheLimits) {
  for (const int64_t levels : {0, 5, 20}) {
    MixerBackward b;
    b.shape = shape_of(4, 2, 64, 64, 64, levels, levels == 5);
    MixerForward f;
    f.shape = b.shape;
    Need f_before, b_before;
    int64_t saved_before = 0;
    for (int64_t rows = 0; rows < 3000000; rows += rows / 3 + 1) {
      const Limits limits{3, rows, rows, rows, 0};
      Need f_need, b_need;
      forward.measure(&f, limits, &f_need);
      backward.measure(&b, limits, &b_need);
      const int64_t saved = forward.saved_bytes(&f, limits);
      EXPECT_TRUE(grown(f_need.per_thread, f_before.per_thread) && grown(b_need.per_thread, b_before.per_thread) &&
                  grown(b_need.shared, b_before.shared) && grown(saved, saved_before))
          << rows;
      f_before = f_need;
      b_before = b_need;
      saved_before = saved;
    }
    Need need;
    const Limits huge{1, INT64_MAX / 2, INT64_MAX / 2, INT64_MAX / 2, 0};
    backward.measure(&b, huge, &need);
    EXPECT_LT(need.shared, 0);
    EXPECT_LT(forward.saved_bytes(&f, huge), 0);
  }
}

// Where no length is said, the levels say it.
TEST_P(DeltaRule, LevelsBoundTheMemory) {
  MixerBackward b;
  b.shape = shape_of(4, 2, 64, 64, 64, 9, false);
  MixerForward f;
  f.shape = b.shape;
  const int64_t length = length_allowed(9);
  const Limits any{1, length, length, int64_t{1} << 62, 0}, tight{1, length, length, length, 0};
  Need any_need, tight_need;
  forward.measure(&f, any, &any_need);
  forward.measure(&f, tight, &tight_need);
  EXPECT_EQ(any_need.per_thread, tight_need.per_thread);
  backward.measure(&b, any, &any_need);
  backward.measure(&b, tight, &tight_need);
  EXPECT_EQ(any_need.per_thread, tight_need.per_thread);
  EXPECT_EQ(any_need.shared, tight_need.shared);
  EXPECT_EQ(forward.saved_bytes(&f, any), forward.saved_bytes(&f, tight));
}

INSTANTIATE_TEST_SUITE_P(Isa, DeltaRule, testing::ValuesIn(instruction_sets()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
