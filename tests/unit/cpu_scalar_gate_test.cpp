// SPDX-License-Identifier: Apache-2.0
// The CPU's scalar gate kernels: against the reference and golden vectors, on every instruction set of this machine; cuts,
// hard gates, histories, saved nodes, and bits that may not depend on schedule or batch.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>

#include "cpu/mixers.h"
#include "cpu/scalar_gate.h"
#include "lla/context.h"
#include "tests/unit/golden.h"
#include "tests/unit/mixer_testing.h"
#include "tests/unit/tiles_testing.h"

namespace {

using namespace lla;
using namespace mixer_testing;

using Values = std::map<std::string, std::vector<double>>;

struct Kernels {
  std::string name;
  const Kernel *forward, *backward;
  const Kernel *forward_on_tiles = nullptr, *backward_on_tiles = nullptr;  // take some problems before the others do

  const Kernel& forward_of(const MixerForward& p) const {
    return forward_on_tiles && forward_on_tiles->accepts(&p) ? *forward_on_tiles : *forward;
  }
  const Kernel& backward_of(const MixerBackward& p) const {
    return backward_on_tiles && backward_on_tiles->accepts(&p) ? *backward_on_tiles : *backward;
  }
};

// The last two are forward and backward of any problem.
Kernels cpu_kernels(int isa) {
  int64_t count = 0;
  const Kernel* k = cpu::scalar_gate_kernels(isa, &count);
  Kernels kernels{isa_name(isa), k + count - 2, k + count - 1};
  if (count > 2) {
    kernels.forward_on_tiles = k;
    kernels.backward_on_tiles = k + 1;
  }
  return kernels;
}

// On tiles in software.
Kernels tile_kernels() {
  using namespace cpu::scalar_gate;
  static constexpr const cpu::Tiles* kTiles = &cpu::tiles_testing::kSoftwareTiles;
  Kernels kernels = cpu_kernels(cpu_isa());
  static Kernel forward = *kernels.forward, backward = *kernels.backward;
  forward.accepts = [](const void* p) { return accepts_tiles(*static_cast<const MixerForward*>(p)); };
  forward.measure = [](const void* p, const Limits& limits, Need* need) {
    measure_forward(*static_cast<const MixerForward*>(p), limits, true, need);
  };
  forward.run = [](const void* p, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task) {
    run_forward(cpu::simd(LLA_ISA_DEFAULT), kTiles, *static_cast<const MixerForward*>(p), limits, scratch, phase, task);
  };
  backward.accepts = [](const void* p) { return accepts_tiles(*static_cast<const MixerBackward*>(p)); };
  backward.measure = [](const void* p, const Limits& limits, Need* need) {
    measure_backward(*static_cast<const MixerBackward*>(p), limits, true, need);
  };
  backward.run = [](const void* p, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task) {
    run_backward(cpu::simd(LLA_ISA_DEFAULT), kTiles, *static_cast<const MixerBackward*>(p), limits, scratch, phase, task);
  };
  kernels.name += " with tiles";
  kernels.forward_on_tiles = &forward;
  kernels.backward_on_tiles = &backward;
  return kernels;
}

std::vector<int> isas() {
  std::vector<int> out;
  for (int isa : {LLA_ISA_BASELINE, LLA_ISA_AVX2, LLA_ISA_AVX512, LLA_ISA_NEON}) {
    const bool lower = cpu_isa() != LLA_ISA_NEON && isa < cpu_isa();  // a CPU with AVX-512 has AVX2
    if (isa == LLA_ISA_BASELINE || isa == cpu_isa() || lower) out.push_back(isa);
  }
  return out;
}

Kernels reference_kernels() {
  Kernels r{"reference", nullptr, nullptr};
  MixerForward forward;
  MixerBackward backward;
  r.forward = find_kernel(reference_backend(), Op::MixerForward, &forward);
  r.backward = find_kernel(reference_backend(), Op::MixerBackward, &backward);
  return r;
}

MixerShape make_shape(int64_t heads, int64_t groups, int64_t dk, int64_t dv, int64_t grain, int64_t levels,
                      bool absorb = false, bool cyclic = false, double scale = 1) {
  MixerShape s;
  s.heads = heads;
  s.groups = groups;
  s.key_dim = dk;
  s.value_dim = dv;
  s.grain = grain;
  s.levels = levels;
  s.absorb = absorb;
  s.head_map = cyclic ? LLA_HEAD_MAP_CYCLIC : LLA_HEAD_MAP_BLOCKED;
  s.scale = scale;
  return s;
}

// One sequence of a case: `rows` rows from `position` on. `start` < 0: no state.
struct Part {
  int64_t rows, position = 0, start = -1;
  bool fork = false;
};

struct Case {
  MixerShape shape;
  Inputs inputs;
  std::vector<Part> parts;
  int32_t out_dtype = LLA_F32, node_dtype = LLA_F32, tail_dtype = LLA_F32;
  bool accumulate = false, save = false, reverse_tasks = false;
  uint64_t seed = 1;
};

constexpr int64_t kSlack = 3;  // rows of no sequence between two sequences

// Everything that forward and backward of a case give: outputs, states, gradients.
Values run_case(const Kernels& kernels, const Case& c) {
  const MixerShape& shape = c.shape;
  Random random(c.seed);
  int64_t rows = 0;
  bool state = false;
  for (const Part& part : c.parts) {
    rows += part.rows + kSlack;
    state |= part.start >= 0;
  }
  Tensors t = random_tensors(random, shape, rows, c.inputs);
  for (Tensor* out : {&t.y, &t.dq, &t.dk, &t.dv}) {
    *out = Tensor(c.out_dtype, out->rows, out->heads, out->dim, out->pad, out->by_heads);
    if (c.accumulate) out->fill([&] { return random.normal(); });
  }
  if (c.accumulate) {
    for (Tensor* out : {&t.dgate, &t.dwrite, &t.dlambda}) out->fill([&] { return random.normal(); });
  }
  Memory memory(shape, 400, 40, 8, c.node_dtype, c.tail_dtype);
  Memory gradient(shape, 400, 40);
  std::vector<Append> appends(c.parts.size());
  std::vector<Sequence> sequences;
  int64_t row = 0;
  for (size_t i = 0; i < c.parts.size(); ++i) {
    const Part& part = c.parts[i];
    if (part.start >= 0) {
      const SlotImage before = memory.random_slot(random, part.position, part.start, c.inputs.decay);
      appends[i].plan(memory, before, 0, row, part.rows, i % 2 == 0, part.fork);
      sequences.push_back(appends[i].sequence);
      Sequence& s = sequences.back();
      s.initial_gradient = gradient.random_slot(random, part.position, part.start);
      s.final_gradient = gradient.random_slot(random, part.position + part.rows, part.start);
    } else {
      sequences.push_back(plain_sequence(row, part.rows, part.position));
      // With another part's state: the gradient of the past that this sequence does not have, as a left neighbour needs it.
      if (state) sequences.back().initial_gradient = gradient.random_slot(random, part.position, 0);
    }
    row += part.rows + kSlack;
  }
  // λ columns that no row reads hold NaN.
  for (size_t i = 0; i < c.parts.size() && shape.levels > 0; ++i) {
    for (int64_t r = 0; r < c.parts[i].rows; ++r) {
      const int64_t p = c.parts[i].position + r;
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t l = 0; l < shape.levels; ++l) {
          bool live = l == 0;
          for (int64_t level = 1; level < 63; ++level) live |= (p >> (level - 1) & 1) && shape.column(level) == l;
          if (!live) t.lambda.set(sequences[i].row_begin + r, h, l, NAN);
        }
      }
    }
  }
  const Limits limits = limits_of(sequences, rows);
  MixerForward forward = forward_problem(shape, t, sequences);
  if (state) forward.state = memory.memory;
  const bool save = c.save && kernels.forward->saved_bytes;
  Buffer saved(save ? kernels.forward->saved_bytes(&forward, limits) : 0);
  if (save) forward.saved = saved.data();
  const Kernel& kernel = kernels.forward_of(forward);
  EXPECT_TRUE(kernel.accepts(&forward));
  run_kernel(kernel, &forward, limits, c.reverse_tasks);

  MixerBackward backward = backward_problem(shape, t, sequences);
  for (View* v : {&backward.dq, &backward.dk, &backward.dv, &backward.dgate, &backward.dwrite, &backward.dlambda}) {
    v->accumulate = c.accumulate;
  }
  if (state) {
    backward.state = memory.memory;
    backward.gradient = gradient.memory;
  }
  if (save) backward.saved = saved.data();
  const Kernel& back = kernels.backward_of(backward);
  EXPECT_TRUE(back.accepts(&backward));
  run_kernel(back, &backward, limits, c.reverse_tasks);

  Values out;
  out["y"] = t.y.values();
  out["dq"] = t.dq.values();
  out["dk"] = t.dk.values();
  out["dv"] = t.dv.values();
  if (c.inputs.gate) out["dgate"] = t.dgate.values();
  if (c.inputs.write) out["dwrite"] = t.dwrite.values();
  if (shape.levels > 0) out["dlambda"] = t.dlambda.values();
  for (size_t i = 0; i < c.parts.size(); ++i) {
    if (sequences[i].initial_gradient.tail < 0) continue;
    const auto append = [](std::vector<double>& to, const std::vector<double>& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    const SlotValues state_values = c.parts[i].start < 0 ? SlotValues() : slot_values(memory, appends[i].after);
    const SlotValues gradient_values = slot_values(gradient, sequences[i].initial_gradient);
    append(out["state"], state_values.content);
    append(out["state scalars"], state_values.scalars);
    append(out["dstate"], gradient_values.content);
    append(out["dstate scalars"], gradient_values.scalars);
  }
  return out;
}

std::string describe(int isa, const Case& c) {
  const MixerShape& s = c.shape;
  std::string text = std::string(isa_name(isa)) + ": H " + std::to_string(s.heads) + " G " + std::to_string(s.groups) +
                     " dk " + std::to_string(s.key_dim) + " dv " + std::to_string(s.value_dim) + " C " +
                     std::to_string(s.grain) + " L " + std::to_string(s.levels) + (s.absorb ? " absorb" : "") +
                     (c.inputs.gate ? "" : " no gate") + (c.inputs.write ? " write" : "") + " hard " +
                     std::to_string(c.inputs.hard);
  for (const Part& p : c.parts) {
    text += " [" + std::to_string(p.position) + " + " + std::to_string(p.rows) + ", start " + std::to_string(p.start) + "]";
  }
  return text;
}

double g_worst_forward = 0, g_worst_backward = 0;

void expect_near(const Values& got, const Values& want, double forward, double backward, const std::string& text) {
  for (const auto& [name, values] : want) {
    const bool is_forward = name == "y" || name == "state" || name == "state scalars";
    const double error = max_error(got.at(name), values);
    double& worst = is_forward ? g_worst_forward : g_worst_backward;
    worst = std::max(worst, error);
    EXPECT_LE(error, is_forward ? forward : backward) << name << ": " << text;
  }
}

void expect_same(const Values& got, const Values& want, const std::string& text) {
  for (const auto& [name, values] : want) {
    EXPECT_TRUE(got.at(name) == values) << name << ": " << text << ", error " << max_error(got.at(name), values);
  }
}

int64_t levels_for(int64_t length, int64_t grain) { return std::max(levels_needed(length), log2_of(grain) + int64_t{1}); }

std::vector<Case> random_cases(int count, uint64_t seed) {
  Random random(seed);
  const int64_t dims[] = {1, 3, 16, 48, 64, 128}, grains[] = {1, 4, 16, 64};
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
      part.rows = random.below(4) == 0 ? random.below(3) : random.below(grain == 1 ? 40 : random.below(3) == 0 ? 301 : 100);
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
    c.shape = make_shape(hg[0], hg[1], dims[random.below(6)], dims[random.below(6)], grain, levels, form == 2,
                         random.below(2) == 0, random.below(2) == 0 ? 1 : 0.3);
    c.inputs.gate = random.below(5) != 0;
    c.inputs.write = random.below(2) == 0;
    c.inputs.hard = random.below(3) == 0 ? 0.1 : 0;
    c.inputs.decay = random.below(2) == 0 ? 0.02 : 0.4;
    c.inputs.pad = random.below(2) == 0 ? 0 : 8;
    c.inputs.dtype = random.below(2) == 0 ? LLA_F32 : random.below(2) == 0 ? LLA_BF16 : LLA_F16;
    c.accumulate = random.below(3) == 0;
    cases.push_back(c);
  }
  return cases;
}

TEST(CpuScalarGate, MatchesReference) {
  const Kernels reference = reference_kernels();
  ASSERT_TRUE(reference.forward && reference.backward);
  for (const Case& c : random_cases(60, 7)) {
    const Values want = run_case(reference, c);
    for (int isa : isas()) expect_near(run_case(cpu_kernels(isa), c), want, 3e-6, 2e-5, describe(isa, c));
    if (HasFailure()) return;
  }
  RecordProperty("worst_forward", std::to_string(g_worst_forward));
  std::printf("worst error: forward %.2g, backward %.2g\n", g_worst_forward, g_worst_backward);
}

std::vector<Case> tile_cases() {
  std::vector<Case> cases;
  for (const Case& random : random_cases(60, 23)) {
    Case c = random;
    c.shape.key_dim = 32 + 32 * (c.shape.key_dim % 4);
    c.shape.value_dim = 16 + 16 * (c.shape.value_dim % 5);
    if (c.shape.grain < 16) continue;
    c.shape.grain = c.shape.grain == 16 ? 32 : 64;
    if (c.shape.levels > 0 && !c.shape.absorb) c.shape.levels += 2;
    c.inputs.dtype = LLA_BF16;
    cases.push_back(c);
  }
  return cases;
}

TEST(CpuScalarGate, Tiles) {
  const Kernels reference = reference_kernels();
  std::vector<Kernels> all = {tile_kernels()};
  if (cpu_kernels(cpu_isa()).forward_on_tiles) all.push_back(cpu_kernels(cpu_isa()));  // this CPU has them
  const std::vector<Case> cases = tile_cases();
  ASSERT_GT(cases.size(), 15u);
  g_worst_forward = 0;
  for (const Case& c : cases) {
    const Values want = run_case(reference, c);
    for (const Kernels& tiles : all) {
      const Values got = run_case(tiles, c);
      expect_near(got, want, 3e-6, 2e-5, tiles.name + ": " + describe(cpu_isa(), c));
      Case saving = c;
      saving.save = saving.reverse_tasks = true;
      expect_same(run_case(tiles, saving), got, "saved, " + tiles.name + ": " + describe(cpu_isa(), c));
    }
    if (HasFailure()) return;
  }
  std::printf("worst error: forward %.2g\n", g_worst_forward);
}

TEST(CpuScalarGate, LongGrain) {
  const Kernels reference = reference_kernels();
  for (int64_t grain : {128, 256}) {
    Case c;
    c.shape = make_shape(2, 1, 16, 8, grain, levels_needed(1000));
    c.parts = {Part{300, 333, 0}, Part{200, 0, -1}};
    c.inputs.hard = 0.02;
    const Values want = run_case(reference, c);
    for (int isa : isas()) expect_near(run_case(cpu_kernels(isa), c), want, 3e-6, 2e-5, describe(isa, c));
  }
}

TEST(CpuScalarGate, NarrowOutputs) {
  const Kernels reference = reference_kernels();
  for (int32_t dtype : {LLA_BF16, LLA_F16}) {
    Case c;
    c.shape = make_shape(4, 2, 16, 12, 16, levels_needed(200));
    c.parts = {Part{70, 41, 0}, Part{33, 0, -1}};
    c.inputs.dtype = c.out_dtype = dtype;
    c.tail_dtype = dtype;
    c.accumulate = true;
    const Values want = run_case(reference, c);
    const double ulp = dtype == LLA_BF16 ? 0x1p-8 : 0x1p-11;
    for (int isa : isas()) expect_near(run_case(cpu_kernels(isa), c), want, ulp, ulp, describe(isa, c));
  }
}

TEST(CpuScalarGate, BitsDoNotDependOnSavedNodesOrSchedule) {
  std::vector<Case> cases = random_cases(16, 11);
  // Heads with keys of their own, whose products are saved too: chunks of less than a block of rows and of several.
  for (int64_t grain : {2, 8, 32, 128, 256}) {
    Case c;
    c.shape = make_shape(2, 2, 16, 12, grain, levels_needed(3 * grain + 40));
    c.parts = {Part{2 * grain + 21, 5, 0}, Part{grain, 0, -1}, Part{3, 2 * grain, 0}};
    cases.push_back(c);
  }
  for (const Case& c : cases) {
    for (int isa : isas()) {
      const Values want = run_case(cpu_kernels(isa), c);
      Case other = c;
      other.save = true;
      expect_same(run_case(cpu_kernels(isa), other), want, std::string("saved, ") + describe(isa, c));
      other.reverse_tasks = true;
      expect_same(run_case(cpu_kernels(isa), other), want, std::string("tasks reversed, ") + describe(isa, c));
    }
  }
}

// Outputs and final state of `rows` rows in pieces that end at the given rows.
Values in_pieces(const Kernels& kernels, const MixerShape& shape, Tensors& t, const std::vector<int64_t>& cuts,
                 int32_t node_dtype, int32_t tail_dtype, int64_t position) {
  const int64_t rows = t.q.rows;
  Memory memory(shape, 800, 400, 8, node_dtype, tail_dtype);
  SlotImage image = memory.empty_slot(position);
  int64_t row = 0;
  std::vector<int64_t> ends = cuts;
  ends.push_back(rows);
  for (int64_t end : ends) {
    Append append;
    append.plan(memory, image, 0, row, end - row, false, end % 3 == 0);
    const std::vector<Sequence> sequences = {append.sequence};
    MixerForward p = forward_problem(shape, t, sequences);
    p.state = memory.memory;
    run_kernel(kernels.forward_of(p), &p, limits_of(sequences, rows));
    image = append.after;
    row = end;
  }
  const SlotValues state = slot_values(memory, image);
  return Values{{"y", t.y.values()}, {"state", state.content}, {"state scalars", state.scalars}};
}

// One pass, pieces, and single rows give the same bits, as long as the tail's type loses nothing.
TEST(CpuScalarGate, CutsDoNotChangeBits) {
  for (int form = 0; form < 6; ++form) {
    const int64_t rows = 150, grain = form % 2 == 0 ? 16 : 4, position = form == 3 ? 21 : 0;
    const bool narrow = form >= 4;
    const MixerShape shape = make_shape(4, 2, 24, 20, grain,
                                        form == 1   ? 0
                                        : form == 2 ? 5
                                                    : levels_needed(rows + position),
                                        form == 2);
    Random random(40 + static_cast<uint64_t>(form));
    Inputs inputs;
    inputs.hard = 0.05;
    inputs.dtype = narrow ? LLA_BF16 : LLA_F32;
    Tensors t = random_tensors(random, shape, rows, inputs);
    t.y = Tensor(LLA_F32, rows, shape.heads, shape.value_dim);
    const int32_t type = narrow ? LLA_BF16 : LLA_F32;
    for (int isa : isas()) {
      const Kernels kernels = cpu_kernels(isa);
      const auto pieces = [&](const std::vector<int64_t>& cuts) {
        return in_pieces(kernels, shape, t, cuts, type, type, position);
      };
      const Values whole = pieces({});
      std::vector<int64_t> every;
      for (int64_t i = 1; i < rows; ++i) every.push_back(i);
      expect_same(pieces(every), whole, "row by row");
      for (int64_t cut = 1; cut < rows; cut += 7) expect_same(pieces({cut}), whole, "cut at " + std::to_string(cut));
      expect_same(pieces({1, 15, 16, 17, 31, 32, 33, 64, 65, 100}), whole, "many cuts");
    }
  }
}

TEST(CpuScalarGate, BitsDoNotDependOnTheBatch) {
  Case together;
  together.shape = make_shape(6, 2, 32, 24, 16, levels_needed(300));
  together.parts = {Part{60, 37, 0}, Part{1, 99, 0}, Part{100, 0, -1}};
  for (int isa : isas()) {
    const MixerShape& shape = together.shape;
    Random random(5);
    Tensors t = random_tensors(random, shape, 180, Inputs{});
    Memory memory(shape, 100, 10);
    std::vector<Append> appends(3);
    const int64_t begin[] = {0, 60, 61}, count[] = {60, 1, 100}, position[] = {37, 99, 0};
    std::vector<Sequence> all;
    for (size_t i = 0; i < 3; ++i) {
      appends[i].plan(memory, memory.random_slot(random, position[i], 0), 0, begin[i], count[i]);
      all.push_back(appends[i].sequence);
    }
    const auto results = [&](const std::vector<Sequence>& sequences) {
      Tensors copy = t;
      MixerForward f = forward_problem(shape, copy, sequences);
      f.state = memory.memory;
      run_kernel(*cpu_kernels(isa).forward, &f, limits_of(sequences, 180));
      MixerBackward b = backward_problem(shape, copy, sequences);
      b.state = memory.memory;
      run_kernel(*cpu_kernels(isa).backward, &b, limits_of(sequences, 180));
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
}

// A gradient that is not wanted changes nothing in the others.
TEST(CpuScalarGate, GradientsAlone) {
  const MixerShape shape = make_shape(4, 2, 16, 8, 16, levels_needed(64));
  Random random(3);
  Tensors t = random_tensors(random, shape, 50, Inputs{});
  const std::vector<Sequence> sequences = {plain_sequence(0, 50)};
  const Limits limits = limits_of(sequences, 50);
  const Kernels kernels = cpu_kernels(LLA_ISA_BASELINE);
  MixerBackward full = backward_problem(shape, t, sequences);
  run_kernel(*kernels.backward, &full, limits);
  const Tensors want = t;
  View MixerBackward::*views[] = {&MixerBackward::dq,    &MixerBackward::dk,     &MixerBackward::dv,
                                  &MixerBackward::dgate, &MixerBackward::dwrite, &MixerBackward::dlambda};
  Tensor Tensors::*tensors[] = {&Tensors::dq,    &Tensors::dk,     &Tensors::dv,
                                &Tensors::dgate, &Tensors::dwrite, &Tensors::dlambda};
  for (int i = 0; i < 6; ++i) {
    Tensors copy = want;
    (copy.*tensors[i]).fill([] { return 7.0; });
    MixerBackward one = backward_problem(shape, copy, sequences);
    for (int j = 0; j < 6; ++j) {
      if (j != i) one.*views[j] = View();
    }
    run_kernel(*kernels.backward, &one, limits);
    for (int j = 0; j < 6; ++j) EXPECT_TRUE((copy.*tensors[j]).values() == (want.*tensors[j]).values()) << i << " " << j;
  }
}

// A slot that starts inside a chunk and has no history: nothing of what lies before is read or stored, empty nodes are zero.
TEST(CpuScalarGate, EmptyPast) {
  const MixerShape shape = make_shape(2, 1, 8, 8, 16, levels_needed(100));
  Random random(3);
  Tensors t = random_tensors(random, shape, 20, Inputs{});
  Memory memory(shape, 8, 4);
  SlotImage before;
  before.position = before.start = 53;
  Append append;
  append.plan(memory, before, 0, 0, 20, false, true);
  NodesToStore& nodes = append.nodes.back();
  const int32_t empty = memory.next_node++;
  nodes.node[5] = empty;
  nodes.write |= 1 << 5;
  append.tails[0].first = 48;  // before the start
  const std::vector<Sequence> sequences = {append.sequence};
  MixerForward f = forward_problem(shape, t, sequences);
  f.state = memory.memory;
  run_kernel(*cpu_kernels(LLA_ISA_BASELINE).forward, &f, limits_of(sequences, 20));
  const std::vector<double> y = t.y.values();
  const std::vector<Sequence> plain = {plain_sequence(0, 20, 53)};
  f = forward_problem(shape, t, plain);
  run_kernel(*cpu_kernels(LLA_ISA_BASELINE).forward, &f, limits_of(plain, 20));
  EXPECT_TRUE(y == t.y.values());
  const SlotMemory& m = memory.memory;
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(load_element<double>(m.node(empty, h), LLA_F32, i), 0);
    EXPECT_EQ(load_element<double>(m.node_decay(empty, h), LLA_F32, 0), 0);
  }
  const int64_t ring = append.tails[0].ring;
  for (int64_t r = 0; r < 5; ++r) EXPECT_TRUE(std::isnan(load_element<double>(m.tail_v(0, 1, ring + r), LLA_F32, 0)));
  EXPECT_EQ(load_element<double>(m.tail_v(0, 1, ring + 5), LLA_F32, 0), t.v.get(0, 1, 0));
}

// Padding sequences are skipped, rows of no sequence untouched.
TEST(CpuScalarGate, Padding) {
  const MixerShape shape = make_shape(2, 1, 8, 8, 4, 0);
  Random random(3);
  Tensors t = random_tensors(random, shape, 20, Inputs{});
  for (Tensor* out : {&t.y, &t.dq, &t.dv}) out->fill([] { return 5.0; });
  std::vector<Sequence> sequences = {plain_sequence(0, 6), plain_sequence(6, 7), plain_sequence(15, 5)};
  sequences[1].padding = true;
  const Limits limits = limits_of(sequences, 20);
  MixerForward f = forward_problem(shape, t, sequences);
  run_kernel(*cpu_kernels(LLA_ISA_BASELINE).forward, &f, limits);
  MixerBackward b = backward_problem(shape, t, sequences);
  run_kernel(*cpu_kernels(LLA_ISA_BASELINE).backward, &b, limits);
  for (int64_t r = 0; r < 20; ++r) {
    const bool live = r < 6 || r >= 15;
    EXPECT_EQ(t.y.get(r, 1, 3) == 5.0, !live) << r;
    EXPECT_EQ(t.dq.get(r, 0, 3) == 5.0, !live) << r;
    EXPECT_EQ(t.dv.get(r, 1, 3) == 5.0, !live) << r;
  }
}

// Golden vectors, at several grains.
void check_golden(const std::string& name) {
  const golden::File file = golden::load(name);
  ASSERT_TRUE(file.valid) << file.error;
  const std::vector<int64_t>& qs = file.tensor("in.q").shape;
  const std::vector<int64_t>& vs = file.tensor("in.v").shape;
  const int64_t batch = qs[0], rows = qs[1], levels = file.has("in.lam") ? file.tensor("in.lam").shape[3] : 0;
  const bool absorb = file.text("levels_policy") == "absorb";
  for (int64_t grain : {8, 64}) {
    if (levels > 0 && !absorb && levels < log2_of(grain) + 1) continue;
    for (int isa : isas()) {
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
      for (int64_t b = 0; b < batch; ++b) sequences.push_back(plain_sequence(b * rows, rows));
      const Limits limits = limits_of(sequences, batch * rows);
      const Kernels kernels = cpu_kernels(isa);
      MixerForward f = forward_problem(shape, t, sequences);
      run_kernel(*kernels.forward, &f, limits);
      MixerBackward b = backward_problem(shape, t, sequences);
      run_kernel(*kernels.backward, &b, limits);
      const auto check = [&](const Tensor& tensor, const char* key, double floor = 0) {
        EXPECT_LE(golden::relative_error(tensor.values(), file[key], floor), 2e-5) << name << " " << key << " C " << grain;
      };
      check(t.y, "out.o");
      check(t.dq, "grad.q");
      check(t.dk, "grad.k");
      check(t.dv, "grad.v");
      if (inputs.gate) check(t.dgate, "grad.g", golden::row_dot_norm(file["in.do"], file["out.o"], vs[3]) * 1e-2);
      if (levels > 0) check(t.dlambda, "grad.lam");
    }
  }
}

TEST(CpuScalarGate, Golden) {
  for (const char* name : {"scalar_tiny", "scalar_groups", "scalar_linear", "scalar_absorb", "scalar_no_gate",
                           "scalar_signed_lambda", "scalar_mamba2_shape"}) {
    check_golden(name);
  }
}

// With gates of -inf at chosen rows, what lies before them has no influence at all and gets gradients of exactly zero.
TEST(CpuScalarGate, WallsAreExact) {
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
    const Limits limits = limits_of(sequences, 60);
    for (int isa : isas()) {
      MixerBackward b = backward_problem(shape, t, sequences);
      run_kernel(*cpu_kernels(isa).backward, &b, limits);
      for (int64_t r = 0; r <= wall; ++r) {
        for (int64_t h = 0; h < 2; ++h) EXPECT_EQ(t.dgate.get(r, h, 0), 0) << wall << " " << r;
        for (int64_t i = 0; i < 16 && r < wall; ++i) EXPECT_EQ(t.dk.get(r, 0, i), 0) << wall << " " << r;
        for (int64_t i = 0; i < 8 && r < wall; ++i) EXPECT_EQ(t.dv.get(r, 1, i), 0) << wall << " " << r;
      }
      for (const Tensor* x : {&t.dq, &t.dk, &t.dv, &t.dgate, &t.dwrite, &t.dlambda}) {
        for (double value : x->values()) EXPECT_TRUE(std::isfinite(value));
      }
    }
  }
}

// Rows of a head that lie together are read, and gradients made, where they are: the same bits as anywhere else.
TEST(CpuScalarGate, BitsDoNotDependOnTheLayout) {
  for (Case c : random_cases(24, 61)) {
    c.save = c.seed % 2;
    for (int isa : isas()) {
      c.inputs.by_heads = false;
      const Values want = run_case(cpu_kernels(isa), c);
      c.inputs.by_heads = true;
      for (const int64_t pad : {0, 5}) {
        c.inputs.pad = pad;
        expect_same(run_case(cpu_kernels(isa), c), want, describe(isa, c) + " by heads, pad " + std::to_string(pad));
      }
    }
    if (HasFailure()) return;
  }
}

// Long chunks do not leave their products for backward, of which each row would have as many as the chunk has rows.
TEST(CpuScalarGate, SavedMemoryOfARowIsBounded) {
  MixerForward f;
  Limits limits;
  limits.sequences = 1;
  limits.rows = limits.rows_per_sequence = limits.length = 1 << 20;
  const Kernels kernels = cpu_kernels(LLA_ISA_BASELINE);
  for (int64_t grain = 64; grain <= 4096; grain *= 2) {
    f.shape = make_shape(1, 1, 64, 64, grain, 0);
    EXPECT_LE(kernels.forward->saved_bytes(&f, limits) / limits.rows, 1024) << grain;
  }
}

// Sizes never fall when a limit rises, and an overflow is reported.
TEST(CpuScalarGate, Measure) {
  MixerForward f;
  MixerBackward b;
  f.shape = b.shape = make_shape(8, 2, 64, 64, 64, 12);
  const Kernels kernels = cpu_kernels(LLA_ISA_BASELINE);
  Limits limits;
  int64_t shared = 0, thread = 0, saved = 0;
  for (int64_t n : {0, 1, 63, 64, 65, 1000, 100000}) {
    limits.sequences = limits.rows = limits.rows_per_sequence = limits.length = n;
    Need forward, backward;
    kernels.forward->measure(&f, limits, &forward);
    kernels.backward->measure(&b, limits, &backward);
    const int64_t bytes = kernels.forward->saved_bytes(&f, limits);
    EXPECT_GE(backward.shared, shared);
    EXPECT_GE(forward.per_thread + backward.per_thread, thread);
    EXPECT_GE(bytes, saved);
    shared = backward.shared;
    thread = forward.per_thread + backward.per_thread;
    saved = bytes;
  }
  limits.sequences = limits.rows = limits.rows_per_sequence = limits.length = INT64_MAX / 2;
  Need backward;
  kernels.backward->measure(&b, limits, &backward);
  EXPECT_LT(backward.shared, 0);
  EXPECT_LT(kernels.forward->saved_bytes(&f, limits), 0);
}

}  // namespace
