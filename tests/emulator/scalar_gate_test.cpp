// SPDX-License-Identifier: Apache-2.0
// The CUDA scalar gate on the emulator, against the reference: shapes, cuts, hard gates, histories, types, gradients.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "golden.h"
#include "scalar_gate_testing.h"

namespace {

using namespace scalar_gate_testing;

std::map<std::string, double> worst;

void expect_near(const Values& got, const Values& want, double forward, double backward, const std::string& text,
                 const std::string& kind) {
  for (const auto& [name, values] : want) {
    const auto found = got.find(name);
    if (found == got.end()) continue;
    const bool is_forward = name == "y" || name == "state" || name == "state scalars";
    const double error = max_error(found->second, values);
    double& most = worst[kind + " " + name];
    most = std::max(most, error);
    EXPECT_LE(error, is_forward ? forward : backward) << name << ": " << text;
  }
}

void report() {
  for (const auto& [name, error] : worst) std::printf("%s %.2g\n", name.c_str(), error);
  worst.clear();
}

void check(const Case& c) {
  const bool exact = c.inputs.dtype != LLA_BF16;
  expect_near(run_case(cuda_kernels(), c), run_case(reference_kernels(), c), exact ? 1e-5 : 1e-2, exact ? 5e-5 : 2e-2,
              describe(c), exact ? "exact" : "bf16");
}

int64_t levels_for(int64_t length, int64_t grain) { return std::max(levels_needed(length), log2_of(grain) + int64_t{1}); }

std::vector<Case> random_cases(int count, uint64_t seed) {
  Random random(seed);
  const int64_t dims[] = {1, 3, 16, 48, 64, 70, 130}, grains[] = {1, 4, 16, 64};
  const int64_t head_counts[][2] = {{1, 1}, {2, 2}, {4, 1}, {4, 2}, {6, 3}, {9, 1}};
  std::vector<Case> cases;
  for (int n = 0; n < count; ++n) {
    Case c;
    c.seed = seed * 1000 + static_cast<uint64_t>(n);
    const int64_t* hg = head_counts[random.below(6)];
    const int64_t grain = grains[random.below(4)];
    const int64_t parts = 1 + random.below(3);
    const bool state = random.below(4) != 0;
    int64_t length = 1;
    for (int64_t i = 0; i < parts; ++i) {
      Part part{};
      part.rows = random.below(4) == 0 ? random.below(3) : random.below(grain < 16 ? 30 : random.below(3) == 0 ? 301 : 100);
      if (random.below(3) == 0) part.rows = (part.rows + grain - 1) / grain * grain;
      part.position = random.below(3) == 0 ? 0 : random.below(grain == 1 ? 50 : 5 * grain + 7);
      part.start = -1;
      if (state && random.below(5) > 0) part.start = random.below(2) == 0 ? 0 : random.below(part.position + 1);
      part.fork = random.below(2) == 0;
      c.parts.push_back(part);
      length = std::max(length, part.position + part.rows);
    }
    const int64_t form = random.below(3);
    const int64_t needed = levels_for(length, grain);
    const int64_t levels = form == 0 ? 0 : form == 1 ? needed + random.below(3) : 1 + random.below(needed);
    c.shape = make_shape(hg[0], hg[1], dims[random.below(7)], dims[random.below(7)], grain, levels, form == 2,
                         random.below(2) == 0, random.below(2) == 0 ? 1 : 0.3);
    if (c.shape.heads > 4) c.shape.key_dim = std::min<int64_t>(c.shape.key_dim, 64);
    c.inputs.gate = random.below(5) != 0;
    c.inputs.write = random.below(2) == 0;
    c.inputs.hard = random.below(3) == 0 ? 0.1 : 0;
    c.inputs.decay = random.below(2) == 0 ? 0.02 : 0.4;
    c.inputs.pad = random.below(2) == 0 ? 0 : 7;
    c.inputs.dtype = random.below(2) == 0 ? LLA_F32 : random.below(2) == 0 ? LLA_BF16 : LLA_F16;
    c.accumulate = random.below(3) == 0;
    cases.push_back(c);
  }
  return cases;
}

TEST(CudaScalarGate, MatchesReference) {
  for (const Case& c : random_cases(40, 7)) {
    check(c);
    if (HasFailure()) break;
  }
  report();
}

// Several chunks to a grain; more chunks than a segment; wide values.
TEST(CudaScalarGate, LongSequencesAndGrains) {
  std::vector<Case> cases(7);
  cases[0].shape = make_shape(2, 1, 16, 8, 128, levels_needed(1000));
  cases[0].parts = {Part{300, 333, 0}, Part{200, 0, -1}};
  cases[1].shape = make_shape(2, 1, 16, 8, 256, 5, true);
  cases[1].parts = {Part{300, 801, 40, true}, Part{700, 300, 0}};
  cases[2].shape = make_shape(1, 1, 8, 8, 4, levels_needed(1400));
  cases[2].parts = {Part{550, 850, 0}, Part{300, 1, -1}};
  cases[3].shape = make_shape(1, 1, 4, 8, 1, 5, true);
  cases[3].parts = {Part{200, 77, 0}, Part{3, 300, 5}};
  cases[4].shape = make_shape(2, 1, 8, 200, 128, 0);
  cases[4].parts = {Part{300, 333, 0}, Part{1, 127, 0}};
  cases[5].shape = make_shape(1, 1, 8, 8, 4, 0);
  cases[5].parts = {Part{550, 850, 0}};
  cases[6].shape = make_shape(1, 1, 8, 8, 1, 9, true);
  cases[6].parts = {Part{300, 130, 0}};
  for (Case& c : cases) {
    c.inputs.hard = 0.02;
    check(c);
    if (HasFailure()) break;
  }
  report();
}

TEST(CudaScalarGate, NarrowTypes) {
  for (int32_t dtype : {LLA_BF16, LLA_F16}) {
    Case c;
    c.shape = make_shape(4, 2, 16, 12, 16, levels_needed(200));
    c.parts = {Part{70, 41, 0}, Part{33, 0, -1}};
    c.inputs.dtype = c.out_dtype = c.tail_dtype = c.node_dtype = dtype;
    c.accumulate = true;
    const double ulp = dtype == LLA_BF16 ? 0x1p-7 : 0x1p-10;
    expect_near(run_case(cuda_kernels(), c), run_case(reference_kernels(), c), ulp, 2 * ulp, describe(c), "narrow");
  }
  report();
}

// Gates to -1000 and write strengths to 8.
TEST(CudaScalarGate, StrongGates) {
  for (int64_t levels : {int64_t{0}, levels_needed(200), int64_t{3}}) {
    Case c;
    c.shape = make_shape(2, 1, 24, 20, 16, levels, levels == 3);
    c.parts = {Part{150, 37, 0}};
    c.inputs.decay = 5;
    check(c);
    c.inputs.decay = 1000;
    check(c);
  }
  report();
}

// A slot that starts inside a chunk and has no history: nothing of what lies before is read or stored, empty nodes are zero.
TEST(CudaScalarGate, EmptyPast) {
  const MixerShape shape = make_shape(2, 1, 8, 8, 16, levels_needed(110));
  Random random(3);
  Tensors t = random_tensors(random, shape, 20, Inputs{});
  Memory memory(shape, 8, 4);
  SlotImage before;
  before.position = before.start = 85;
  Append append;
  append.plan(memory, before, 0, 0, 20, false, true);
  NodesToStore& nodes = append.nodes.back();
  const int32_t empty = memory.next_node++;
  nodes.node[2] = empty;
  nodes.write |= 1 << 2;
  append.tails[0].first = 80;  // before the start
  std::vector<Sequence> sequences = {append.sequence};
  MixerForward f = forward_problem(shape, t, sequences);
  bound(&f.batch);
  f.state = memory.memory;
  f.batch.stores = false;
  run(*cuda_kernels().forward, &f, limits_of(sequences, 20));
  const SlotMemory& m = memory.memory;
  EXPECT_TRUE(std::isnan(load_element<double>(m.node(empty, 0), LLA_F32, 0)));
  f.batch.stores = true;
  run(*cuda_kernels().forward, &f, limits_of(sequences, 20));
  const std::vector<double> y = t.y.values();
  std::vector<Sequence> plain = {plain_sequence(0, 20, 85)};
  f = forward_problem(shape, t, plain);
  bound(&f.batch);
  run(*cuda_kernels().forward, &f, limits_of(plain, 20));
  EXPECT_TRUE(y == t.y.values());
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(load_element<double>(m.node(empty, h), LLA_F32, i), 0);
    EXPECT_EQ(load_element<double>(m.node_decay(empty, h), LLA_F32, 0), 0);
  }
  const int64_t ring = append.tails[0].ring;
  for (int64_t r = 0; r < 5; ++r) EXPECT_TRUE(std::isnan(load_element<double>(m.tail_v(0, 1, ring + r), LLA_F32, 0)));
  EXPECT_EQ(load_element<double>(m.tail_v(0, 1, ring + 5), LLA_F32, 0), t.v.get(0, 1, 0));
}

// Outputs and final state of `rows` rows in pieces that end at the given rows.
Values in_pieces(const MixerShape& shape, Tensors& t, std::vector<int64_t> ends, int64_t position) {
  const int64_t rows = t.q.rows;
  Memory memory(shape, 800, 400);
  SlotImage image = memory.empty_slot(position);
  int64_t row = 0;
  ends.push_back(rows);
  for (int64_t end : ends) {
    Append append;
    append.plan(memory, image, 0, row, end - row, false, end % 3 == 0);
    const std::vector<Sequence> sequences = {append.sequence};
    MixerForward p = forward_problem(shape, t, sequences);
    p.state = memory.memory;
    bound(&p.batch);
    run(*cuda_kernels().forward, &p, limits_of(sequences, rows));
    image = append.after;
    row = end;
  }
  const SlotValues state = slot_values(memory, image);
  return Values{{"y", t.y.values()}, {"state", state.content}, {"state scalars", state.scalars}};
}

TEST(CudaScalarGate, Cuts) {
  for (int form = 0; form < 4; ++form) {
    const int64_t rows = 150, grain = form % 2 == 0 ? 16 : 4, position = form == 3 ? 21 : 0;
    const MixerShape shape = make_shape(2, 1, 12, 10, grain,
                                        form == 1   ? 0
                                        : form == 2 ? 5
                                                    : levels_needed(rows + position),
                                        form == 2);
    Random random(40 + static_cast<uint64_t>(form));
    Inputs inputs;
    inputs.hard = 0.05;
    Tensors t = random_tensors(random, shape, rows, inputs);
    const Values whole = in_pieces(shape, t, {}, position);
    std::vector<int64_t> every;
    for (int64_t i = 1; i < rows; ++i) every.push_back(i);
    expect_near(in_pieces(shape, t, every, position), whole, 1e-5, 0, "row by row", "cuts");
    for (int64_t cut = 1; cut < rows; cut += 23) {
      expect_near(in_pieces(shape, t, {cut}, position), whole, 1e-5, 0, "cut at " + std::to_string(cut), "cuts");
    }
    expect_near(in_pieces(shape, t, {1, 15, 16, 17, 31, 32, 33, 64, 65, 100}, position), whole, 1e-5, 0, "many cuts",
                "cuts");
  }
  report();
}

// A sequence's bits are the same alone and in a batch.
TEST(CudaScalarGate, BitsDoNotDependOnTheBatch) {
  const MixerShape shape = make_shape(6, 2, 32, 24, 16, levels_needed(300));
  Random random(5);
  Tensors t = random_tensors(random, shape, 180, Inputs{});
  Memory memory(shape, 100, 10);
  std::vector<Append> appends(3);
  const int64_t begin[] = {0, 60, 61}, count[] = {60, 1, 100}, position[] = {37, 99, 0};
  std::vector<Sequence> all;
  for (size_t i = 0; i < 3; ++i) {
    appends[i].plan(memory, memory.random_slot(random, position[i], 0), static_cast<int64_t>(i), begin[i], count[i]);
    all.push_back(appends[i].sequence);
  }
  const auto results = [&](const std::vector<Sequence>& sequences) {
    Tensors copy = t;
    MixerForward f = forward_problem(shape, copy, sequences);
    bound(&f.batch);
    f.state = memory.memory;
    run(*cuda_kernels().forward, &f, limits_of(sequences, 180));
    if (!cuda_kernels().backward) return copy;
    MixerBackward b = backward_problem(shape, copy, sequences);
    bound(&b.batch);
    b.state = memory.memory;
    run(*cuda_kernels().backward, &b, limits_of(sequences, 180));
    return copy;
  };
  const Tensors batch = results(all);
  for (size_t i = 0; i < 3; ++i) {
    const Tensors alone = results({all[i]});
    for (auto tensor : {&Tensors::y, &Tensors::dq, &Tensors::dk, &Tensors::dv, &Tensors::dgate, &Tensors::dlambda}) {
      const Tensor &a = alone.*tensor, &b = batch.*tensor;
      for (int64_t r = begin[i]; r < begin[i] + count[i]; ++r) {
        for (int64_t h = 0; h < a.heads; ++h) {
          for (int64_t d = 0; d < a.dim; ++d) ASSERT_EQ(a.get(r, h, d), b.get(r, h, d));
        }
      }
    }
  }
}

// Heads go in slices, where scratch is scarce: one head, some of a part, parts of a group, groups; states and their
// gradients.
TEST(CudaScalarGate, BitsDoNotDependOnSlices) {
  struct Way {
    int64_t heads, groups;
    bool cyclic, narrow;
    std::vector<const char*> bytes;
  };
  for (const Way& way : {Way{17, 1, false, false, {"1", "30000", "90000"}}, Way{10, 2, true, true, {"1", "40000"}},
                         Way{6, 3, false, false, {"1", "40000"}}, Way{7, 1, true, true, {"1"}}}) {
    Case c;
    c.shape = make_shape(way.heads, way.groups, 12, 8, 16, way.narrow ? 0 : levels_needed(300), false, way.cyclic);
    c.inputs.dtype = way.narrow ? LLA_BF16 : LLA_F32;
    c.parts = {{30, 37}, {2, 40}, {40, 0}};
    SCOPED_TRACE(describe(c));
    const Values whole = run_case(cuda_kernels(), c);
    const Limits limits{3, 100, 100, 100, 0};
    MixerBackward b;
    b.shape = c.shape;
    Need all, some;
    cuda_kernels().backward->measure(&b, limits, &all);
    for (const char* bytes : way.bytes) {
      SCOPED_TRACE(bytes);
      setenv("LLA_EMULATED_SCRATCH", bytes, 1);
      const Values sliced = run_case(cuda_kernels(), c);
      cuda_kernels().backward->measure(&b, limits, &some);
      unsetenv("LLA_EMULATED_SCRATCH");
      for (const auto& [name, values] : whole) EXPECT_EQ(sliced.at(name), values) << name;
      EXPECT_LT(some.shared, all.shared);
    }
  }
}

// Padding sequences are skipped, rows of no sequence untouched.
TEST(CudaScalarGate, Padding) {
  const MixerShape shape = make_shape(2, 1, 8, 8, 4, 0);
  Random random(3);
  Tensors t = random_tensors(random, shape, 20, Inputs{});
  for (Tensor* out : {&t.y, &t.dq, &t.dv}) out->fill([] { return 5.0; });
  std::vector<Sequence> sequences = {plain_sequence(0, 6), plain_sequence(6, 7), plain_sequence(15, 5)};
  sequences[1].padding = true;
  const Limits limits = limits_of(sequences, 20);
  MixerForward f = forward_problem(shape, t, sequences);
  bound(&f.batch);
  run(*cuda_kernels().forward, &f, limits);
  MixerBackward b = backward_problem(shape, t, sequences);
  bound(&b.batch);
  if (cuda_kernels().backward) run(*cuda_kernels().backward, &b, limits);
  for (int64_t r = 0; r < 20; ++r) {
    const bool live = r < 6 || r >= 15;
    EXPECT_EQ(t.y.get(r, 1, 3) == 5.0, !live) << r;
    if (!cuda_kernels().backward) continue;
    EXPECT_EQ(t.dq.get(r, 0, 3) == 5.0, !live) << r;
    EXPECT_EQ(t.dv.get(r, 1, 3) == 5.0, !live) << r;
  }
}

// A gradient that is not wanted changes nothing in the others.
TEST(CudaScalarGate, GradientsAlone) {
  const MixerShape shape = make_shape(4, 2, 16, 8, 16, levels_needed(64));
  Random random(3);
  Tensors t = random_tensors(random, shape, 50, Inputs{});
  const std::vector<Sequence> sequences = {plain_sequence(0, 50)};
  const Limits limits = limits_of(sequences, 50);
  const Kernel& kernel = *cuda_kernels().backward;
  MixerBackward full = backward_problem(shape, t, sequences);
  bound(&full.batch);
  run(kernel, &full, limits);
  const Tensors want = t;
  View MixerBackward::*views[] = {&MixerBackward::dq,    &MixerBackward::dk,     &MixerBackward::dv,
                                  &MixerBackward::dgate, &MixerBackward::dwrite, &MixerBackward::dlambda};
  Tensor Tensors::*tensors[] = {&Tensors::dq,    &Tensors::dk,     &Tensors::dv,
                                &Tensors::dgate, &Tensors::dwrite, &Tensors::dlambda};
  for (int i = 0; i < 6; ++i) {
    Tensors copy = want;
    (copy.*tensors[i]).fill([] { return 7.0; });
    MixerBackward one = backward_problem(shape, copy, sequences);
    bound(&one.batch);
    for (int j = 0; j < 6; ++j) {
      if (j != i) one.*views[j] = View();
    }
    run(kernel, &one, limits);
    for (int j = 0; j < 6; ++j) EXPECT_TRUE((copy.*tensors[j]).values() == (want.*tensors[j]).values()) << i << " " << j;
  }
}

// With a gate of -inf at a row, what lies before it has no influence at all and gets gradients of exactly zero.
TEST(CudaScalarGate, WallsAreExact) {
  for (int64_t wall : {1, 5, 16, 23, 32, 48}) {
    const MixerShape shape = make_shape(2, 1, 16, 8, 16, levels_needed(60));
    Random random(9);
    Tensors t = random_tensors(random, shape, 60, Inputs{});
    for (int64_t h = 0; h < 2; ++h) t.gate.set(wall, h, 0, wall % 2 == 0 ? -INFINITY : -700.0);
    for (int64_t r = 0; r < wall; ++r) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t i = 0; i < 8; ++i) t.dy.set(r, h, i, 0);
      }
    }
    const std::vector<Sequence> sequences = {plain_sequence(0, 60)};
    MixerBackward b = backward_problem(shape, t, sequences);
    bound(&b.batch);
    run(*cuda_kernels().backward, &b, limits_of(sequences, 60));
    for (int64_t r = 0; r <= wall; ++r) {
      for (int64_t h = 0; h < 2; ++h) EXPECT_NEAR(t.dgate.get(r, h, 0), 0, r == wall ? 0 : 1e-5) << wall << " " << r;
      for (int64_t i = 0; i < 16 && r < wall; ++i) EXPECT_EQ(t.dk.get(r, 0, i), 0) << wall << " " << r;
      for (int64_t i = 0; i < 8 && r < wall; ++i) EXPECT_EQ(t.dv.get(r, 1, i), 0) << wall << " " << r;
    }
    for (const Tensor* x : {&t.dq, &t.dk, &t.dv, &t.dgate, &t.dwrite, &t.dlambda}) {
      for (double value : x->values()) EXPECT_TRUE(std::isfinite(value));
    }
  }
}

TEST(CudaScalarGate, Golden) {
  for (const char* name :
       {"scalar_tiny", "scalar_groups", "scalar_linear", "scalar_absorb", "scalar_no_gate", "scalar_signed_lambda"}) {
    const golden::File file = golden::load(name);
    ASSERT_TRUE(file.valid) << file.error;
    const std::vector<int64_t>& qs = file.tensor("in.q").shape;
    const std::vector<int64_t>& vs = file.tensor("in.v").shape;
    const int64_t batch = qs[0], rows = qs[1], levels = file.has("in.lam") ? file.tensor("in.lam").shape[3] : 0;
    const bool absorb = file.text("levels_policy") == "absorb";
    for (int64_t grain : {8, 64}) {
      if (levels > 0 && !absorb && levels < log2_of(grain) + 1) continue;
      const MixerShape shape = make_shape(vs[2], qs[2], qs[3], vs[3], grain, levels, absorb, false, file.number("scale"));
      Random random(1);
      Inputs inputs;
      inputs.write = false;
      inputs.gate = file.has("in.g");
      Tensors t = random_tensors(random, shape, batch * rows, inputs);
      const auto put = [&](Tensor& tensor, const char* key) {
        int64_t i = 0;
        tensor.fill([&] { return file[key][static_cast<size_t>(i++)]; });
      };
      put(t.q, "in.q");
      put(t.k, "in.k");
      put(t.v, "in.v");
      put(t.dy, "in.do");
      if (inputs.gate) put(t.gate, "in.g");
      if (levels > 0) put(t.lambda, "in.lam");
      std::vector<Sequence> sequences;
      for (int64_t b = 0; b < batch; ++b) {
        sequences.push_back(plain_sequence(b * rows, rows));
        sequences.back().index = b;
      }
      const Limits limits = limits_of(sequences, batch * rows);
      MixerForward f = forward_problem(shape, t, sequences);
      bound(&f.batch);
      run(*cuda_kernels().forward, &f, limits);
      MixerBackward b = backward_problem(shape, t, sequences);
      bound(&b.batch);
      run(*cuda_kernels().backward, &b, limits);
      const auto compare = [&](const Tensor& tensor, const char* key, double floor = 0) {
        EXPECT_LE(golden::relative_error(tensor.values(), file[key], floor), 2e-5) << name << " " << key << " C " << grain;
      };
      compare(t.y, "out.o");
      compare(t.dq, "grad.q");
      compare(t.dk, "grad.k");
      compare(t.dv, "grad.v");
      if (inputs.gate) compare(t.dgate, "grad.g", golden::row_dot_norm(file["in.do"], file["out.o"], vs[3]) * 1e-2);
      if (levels > 0) compare(t.dlambda, "grad.lam");
    }
  }
}

// Sizes never fall when a limit rises, and an overflow is reported.
TEST(CudaScalarGate, Measure) {
  MixerForward f;
  MixerBackward b;
  f.shape = b.shape = make_shape(8, 2, 64, 64, 64, 12);
  const Kernels kernels = cuda_kernels();
  const auto check_kernel = [](const Kernel* kernel, const void* problem) {
    if (!kernel) return;
    int64_t before = 0;
    Need need;
    for (int64_t n : {0, 1, 63, 64, 65, 1000, 100000}) {
      kernel->measure(problem, Limits{n, n, n, n, n}, &need);
      EXPECT_GE(need.shared, before);
      before = need.shared;
    }
    constexpr int64_t kMany = INT64_MAX / 2;
    kernel->measure(problem, Limits{kMany, kMany, kMany, kMany, kMany}, &need);
    EXPECT_LT(need.shared, 0);
  };
  check_kernel(kernels.forward, &f);
  check_kernel(kernels.backward, &b);
  f.shape.key_dim = 513;
  EXPECT_FALSE(kernels.forward->accepts(&f));
  f.shape.key_dim = 64;
  f.q.dtype = LLA_F64;
  EXPECT_FALSE(kernels.forward->accepts(&f));
}

}  // namespace
