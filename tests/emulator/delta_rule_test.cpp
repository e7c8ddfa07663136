// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of the delta rule on the emulator, against the reference backend: shapes, histories, drafts, hostile keys
// and gates, types of memory, and the promises about bits.
#include <gtest/gtest.h>

#include "cuda/backend.h"
#include "delta_rule_testing.h"

namespace {

using namespace delta_rule_testing;

const Kernel* cuda_kernel(Op op) {
  const cuda::KernelTable table = cuda::delta_rule_kernels();
  for (int64_t i = 0; i < table.count; ++i) {
    if (table.kernels[i].op == op) return &table.kernels[i];
  }
  return nullptr;
}

// Runs a device kernel, or a host one if it has no launch.
template <class Problem>
void run_any(const Kernel& kernel, Problem problem, const Limits& limits) {
  if (!kernel.launch) {
    run_kernel(kernel, &problem, limits);
    return;
  }
  BatchView& batch = problem.batch;
  for (int64_t i = 0; i < batch.count; ++i) {
    const Sequence& s = batch.sequences[i];
    batch.most_rows = std::max(batch.most_rows, s.rows);
    batch.most_length = std::max(batch.most_length, s.position + s.rows);
    batch.most_nodes_to_store = std::max(batch.most_nodes_to_store, s.nodes_to_store_count);
    batch.most_tail_to_store = std::max(batch.most_tail_to_store, s.tail_to_store_count);
  }
  ASSERT_TRUE(kernel.accepts(&problem));
  Need need;
  kernel.measure(&problem, limits, &need);
  ASSERT_GE(need.shared, 0);
  ASSERT_EQ(need.per_thread, 0);
  Buffer scratch(need.shared + 256);
  char* memory = scratch.data();
  ASSERT_EQ(kernel.launch(&problem, limits, memory, nullptr), LLA_OK);
}

struct Device {
  const Kernel* forward = cuda_kernel(Op::MixerForward);
  const Kernel* backward = cuda_kernel(Op::MixerBackward);
};

Result run_both(bool device, Step& step, Tensors t) {
  Result result;
  result.t = std::move(t);
  const Limits limits = limits_of(step.sequences, result.t.q.rows);
  MixerForward f = forward_problem(step.memory.shape, result.t, step.sequences);
  f.state = step.memory.memory;
  const Device kernels;
  run_any(device ? *kernels.forward : *find_kernel(reference_backend(), Op::MixerForward, &f), f, limits);
  result.slots = step.slots();
  if (!kernels.backward) return result;
  MixerBackward b = backward_problem(step.memory.shape, result.t, step.sequences);
  b.state = step.memory.memory;
  b.gradient = step.gradient.memory;
  run_any(device ? *kernels.backward : *find_kernel(reference_backend(), Op::MixerBackward, &b), b, limits);
  result.initial = step.initial_gradients();
  return result;
}

std::vector<Named> forward_only(const Result& r, bool states) {
  std::vector<Named> out = {{"y", r.t.y.values()}};
  if (states) out.push_back({"slots", r.slots});
  return out;
}

std::vector<Named> backward_only(const Result& r, bool states) {
  std::vector<Named> out;
  if (!Device().backward) return out;
  out = gradients_of(r.t);
  if (states) out.push_back({"initial gradient", r.initial});
  return out;
}

double worst[2] = {0, 0};

void expect_match(const Result& a, const Result& b, bool states, double forward, double backward, const std::string& where,
                  double gate_size = 0) {
  expect_close(forward_only(a, states), forward_only(b, states), forward, where);
  expect_close(backward_only(a, states), backward_only(b, states), backward, where, gate_size);
  const auto note = [&](const std::vector<Named>& x, const std::vector<Named>& y, double* most) {
    for (size_t i = 0; i < x.size(); ++i) {
      const double size = std::string(x[i].name) == "dgate" ? gate_size : 0;
      const double floor = std::max(size, 1e-2 * std::sqrt(static_cast<double>(x[i].values.size())));
      *most = std::max(*most, golden::relative_error(x[i].values, y[i].values, floor));
    }
  };
  note(forward_only(a, states), forward_only(b, states), &worst[0]);
  note(backward_only(a, states), backward_only(b, states), &worst[1]);
}

class CudaDeltaRule : public testing::Test {
 protected:
  void SetUp() override { worst[0] = worst[1] = 0; }
  void TearDown() override {
    RecordProperty("forward", std::to_string(worst[0]));
    std::printf("  worst: forward %.2e, backward %.2e\n", worst[0], worst[1]);
  }
};

void expect_trial(const Trial& trial, uint64_t seed, double forward, double backward, const std::string& where) {
  Step own(seed, trial.shape, trial.parts, trial.node_dtype, trial.tail_dtype);
  Step other(seed, trial.shape, trial.parts, trial.node_dtype, trial.tail_dtype);
  Random random(seed + 1);
  const Tensors t = unit_tensors(random, trial.shape, own.rows, trial.in);
  const Result result = run_both(true, own, t);
  expect_match(result, run_both(false, other, with_double_outputs(t)), true, forward, backward, where);
}

// Smaller than the CPU's trials: the emulator is slow.
Trial small_trial(Random& random, int number) {
  Trial trial = random_trial(random, number);
  const int64_t dims[] = {1, 3, 16, 40, 65, 130}, grains[] = {1, 4, 16, 64, 128};
  const bool small = number % 8 != 7;
  trial.shape.key_dim = dims[random.below(small ? 4 : 6)];
  trial.shape.value_dim = dims[random.below(small ? 4 : 6)];
  trial.shape.grain = grains[random.below(5)];
  if (trial.shape.grain < 16 || !small) {
    for (Part& part : trial.parts) part.rows = std::min<int64_t>(part.rows, 40);
    for (Part& part : trial.parts) part.position %= 100, part.start = std::min(part.start, part.position);
  }
  for (Part& part : trial.parts) part.rows %= trial.shape.grain < 64 ? 90 : 200;
  if (trial.shape.heads > 4 || !small) trial.shape.heads = trial.shape.groups;
  if (trial.parts.size() > 2 && !small) trial.parts.resize(2);
  return trial;
}

TEST_F(CudaDeltaRule, MatchesReference) {
  Random random(7);
  for (int number = 0; number < 24; ++number) {
    const Trial trial = small_trial(random, number);
    expect_trial(trial, 100 + static_cast<uint64_t>(number), 1e-5, 5e-5, describe(trial, number));
  }
}

// Lengths around chunk borders, one after the other.
TEST_F(CudaDeltaRule, Lengths) {
  int number = 0;
  for (const int64_t rows : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300}) {
    Trial trial;
    trial.shape = shape_of(2, 1, 8, 12, number % 2 ? 16 : 64, number % 3 ? 12 : 0);
    trial.parts = {{0, 0, rows, false}, {0, 0, rows / 2 + 1, true}};
    expect_trial(trial, 900 + static_cast<uint64_t>(number), 1e-5, 5e-5, describe(trial, number));
    ++number;
  }
}

TEST_F(CudaDeltaRule, WideHeads) {
  int number = 0;
  for (const auto& [dk, dv] : {std::pair<int64_t, int64_t>{130, 200}, {256, 64}, {192, 384}, {512, 8}, {64, 200}}) {
    for (const int64_t levels : {0, 12}) {
      Trial trial;
      trial.shape = shape_of(1, 1, dk, dv, 16, levels);
      trial.parts = {{0, 18, 33, true}};
      expect_trial(trial, 950 + static_cast<uint64_t>(number), 1e-5, 5e-5, describe(trial, number));
      ++number;
    }
  }
}

TEST_F(CudaDeltaRule, NarrowTypes) {
  Random random(8);
  for (int number = 0; number < 8; ++number) {
    Trial trial = small_trial(random, number);
    if (trial.shape.key_dim == 1) trial.shape.key_dim = 3;  // of one element all unit keys are the same: no gate matters
    trial.in.dtype = number % 2 ? LLA_F16 : LLA_BF16;
    trial.tail_dtype = number % 3 ? LLA_F32 : trial.in.dtype;
    Step own(5, trial.shape, trial.parts, LLA_F32, trial.tail_dtype);
    Step other(5, trial.shape, trial.parts, LLA_F32, trial.tail_dtype);
    Tensors t = unit_tensors(random, trial.shape, own.rows, trial.in);
    const Tensors wide = with_double_outputs(t);
    const Result result = run_both(true, own, t);
    expect_match(result, run_both(false, other, wide), true, 1e-2, 2e-2, describe(trial, number));
  }
}

// Types of 16 bits and dimensions of at most 128: kernels of their own. All kinds of histories.
Trial half_trial(Random& random, int number) {
  Trial trial = small_trial(random, number);
  const int64_t dims[] = {3, 16, 40, 65, 100, 128};
  trial.shape.key_dim = dims[random.below(6)];
  trial.shape.value_dim = dims[random.below(6)];
  if (trial.shape.heads > 2) trial.shape.heads = trial.shape.groups = 2;
  trial.in.dtype = number % 4 == 3 ? LLA_F16 : LLA_BF16;
  return trial;
}

void expect_half_trial(const Trial& trial, uint64_t seed, double forward, double backward, const std::string& where) {
  Step own(seed, trial.shape, trial.parts, trial.node_dtype, trial.tail_dtype);
  Step other(seed, trial.shape, trial.parts, trial.node_dtype, trial.tail_dtype);
  Random random(seed + 1);
  Tensors t = unit_tensors(random, trial.shape, own.rows, trial.in);
  const Tensors wide = with_double_outputs(t);
  const Result result = run_both(true, own, t);
  expect_match(result, run_both(false, other, wide), true, forward, backward, where);
}

TEST_F(CudaDeltaRule, Halves) {
  Random random(17);
  for (int number = 0; number < 12; ++number) {
    const Trial trial = half_trial(random, number);
    expect_half_trial(trial, 1100 + static_cast<uint64_t>(number), 6e-3, 2e-2, describe(trial, number));
  }
}

// Many chunks, so that the tree has several levels, and calls that begin anywhere.
TEST_F(CudaDeltaRule, HalvesOfManyChunks) {
  Random random(18);
  int number = 0;
  for (const int64_t levels : {12, 0, 7}) {
    for (const int64_t position : {0, 21, 48}) {
      Trial trial;
      trial.shape = shape_of(1, 1, 24, 40, 16, levels, levels == 7);
      trial.in.dtype = LLA_BF16;
      trial.parts = {{0, position, 16 * 11 + 5, true}};
      trial.in.gate = number % 2 == 0;
      if (number % 3 == 2) trial.in.hard = 0.1;
      expect_half_trial(trial, 1200 + static_cast<uint64_t>(number), 6e-3, 2e-2, describe(trial, number));
      ++number;
    }
  }
}

// Training without states: backward on halves.
void expect_stateless(const MixerShape& shape, const std::vector<std::pair<int64_t, int64_t>>& positions_and_rows,
                      const Tensors& t, double forward, double backward, const std::string& where) {
  std::vector<Sequence> sequences;
  for (const auto& [position, rows] : positions_and_rows) {
    Sequence sequence;
    sequence.index = 0;
    sequence.row_begin = sequences.empty() ? 0 : sequences.back().row_begin + sequences.back().rows;
    sequence.rows = rows;
    sequence.position = position;
    sequences.push_back(sequence);
  }
  for (size_t i = 0; i < sequences.size(); ++i) sequences[i].index = static_cast<int64_t>(i);
  const Device kernels;
  Result results[2];
  for (const bool device : {true, false}) {
    Result& result = results[device ? 0 : 1];
    result.t = device ? t : with_double_outputs(t);
    const Limits limits = limits_of(sequences, t.q.rows);
    const MixerForward f = forward_problem(shape, result.t, sequences);
    run_any(device ? *kernels.forward : *find_kernel(reference_backend(), Op::MixerForward, &f), f, limits);
    const MixerBackward b = backward_problem(shape, result.t, sequences);
    run_any(device ? *kernels.backward : *find_kernel(reference_backend(), Op::MixerBackward, &b), b, limits);
  }
  expect_match(results[0], results[1], false, forward, backward, where);
}

TEST_F(CudaDeltaRule, HalvesWithoutStates) {
  int number = 0;
  for (const int64_t levels : {12, 0, 7}) {
    for (const int64_t position : {0, 37}) {
      const int64_t grain = number == 1 ? 4 : number == 2 ? 64 : number == 5 ? 128 : 16;
      const MixerShape shape = shape_of(2, number % 2 + 1, number % 2 ? 100 : 24, 40, grain, levels, levels == 7);
      Inputs in;
      in.dtype = number == 3 ? LLA_F16 : LLA_BF16;
      in.gate = number % 3 != 0;
      in.hard = number % 3 == 2 ? 0.1 : 0;
      Random random(1300 + static_cast<uint64_t>(number));
      const int64_t rows = grain == 4 ? 45 : grain * 7 / (grain > 16 ? 3 : 1) + 5;
      const Tensors t = unit_tensors(random, shape, rows + 30, in);
      expect_stateless(shape, {{position, rows}, {number, 30}}, t, 6e-3, 8e-3, "number " + std::to_string(number));
      ++number;
    }
  }
}

// Full size, and keys that are nearly the same.
TEST_F(CudaDeltaRule, HalvesOfFullSize) {
  for (const bool parallel : {false, true}) {
    const MixerShape shape = shape_of(1, 1, 128, 128, 64, 10);
    Inputs in;
    in.dtype = LLA_BF16;
    in.gate = true;
    Random random(1400);
    Tensors t = unit_tensors(random, shape, 350, in);
    if (parallel) {
      for (int64_t r = 1; r < t.k.rows; ++r) {
        for (int64_t i = 0; i < 128; ++i) t.k.set(r, 0, i, t.k.get(0, 0, i) + 0.05 * random.normal());
      }
      make_unit(t.k);
      t.gate.fill([] { return -1e-3; });
    }
    expect_stateless(shape, {{0, 350}}, t, 5e-3, parallel ? 1e-2 : 5e-3, parallel ? "parallel" : "ordinary");
  }
}

// The reference rounds nodes at every fold, the kernels only when they are stored.
TEST_F(CudaDeltaRule, NarrowNodes) {
  Random random(9);
  for (int number = 2; number < 12; number += number % 4 == 3 ? 3 : 1) {
    Trial trial = small_trial(random, number);
    if (trial.shape.key_dim == 1) trial.shape.key_dim = 2;
    trial.node_dtype = LLA_BF16;
    expect_trial(trial, 300 + static_cast<uint64_t>(number), 2e-2, 2e-2, describe(trial, number));
  }
}

TEST_F(CudaDeltaRule, HardGates) {
  Random random(10);
  for (int number = 0; number < 16; ++number) {
    Trial trial = small_trial(random, number);
    trial.in.gate = true;
    trial.in.hard = 0.15;
    expect_trial(trial, 500 + static_cast<uint64_t>(number), 1e-5, 5e-5, describe(trial, number));
  }
}

TEST_F(CudaDeltaRule, RepeatedKey) {
  for (const double write : {0.835, 0.999, 2.0}) {
    for (const int64_t levels : {0, 10}) {
      const int64_t grain = levels ? 64 : 16;
      const MixerShape shape = shape_of(1, 1, 32, 16, grain, levels);
      const std::vector<Part> parts = {{0, 0, 200, false}};
      Step own(1, shape, parts, LLA_F32, LLA_F32), other(1, shape, parts, LLA_F32, LLA_F32);
      Random random(11);
      Tensors t = unit_tensors(random, shape, 200, Inputs());
      for (int64_t r = 1; r < 200; ++r) {
        for (int64_t i = 0; i < 32; ++i) t.k.set(r, 0, i, t.k.get(0, 0, i));
      }
      t.gate.fill([&] { return write == 2 ? -0.1 : -1e-3; });
      t.write.fill([&] { return write; });
      const Result expected = run_both(false, other, with_double_outputs(t));
      expect_match(run_both(true, own, t), expected, false, 2e-4, 2e-4,
                   std::string("write ") + std::to_string(write) + " L" + std::to_string(levels),
                   golden::row_dot_norm(t.dy.values(), expected.t.y.values(), 16));
    }
  }
}

TEST_F(CudaDeltaRule, NearParallelKeys) {
  for (const double noise : {0.05, 0.02, 0.0}) {
    const MixerShape shape = shape_of(2, 1, 32, 16, 64, noise == 0.02 ? 0 : 10);
    const std::vector<Part> parts = {{0, 0, 150, false}};
    Step own(1, shape, parts, LLA_F32, LLA_F32), other(1, shape, parts, LLA_F32, LLA_F32);
    Random random(12);
    Inputs in;
    in.gate = noise > 0;
    Tensors t = unit_tensors(random, shape, 150, in);
    for (int64_t r = 1; r < 150 && noise > 0; ++r) {
      for (int64_t i = 0; i < 32; ++i) t.k.set(r, 0, i, t.k.get(0, 0, i) + noise * random.normal());
    }
    make_unit(t.k);
    if (in.gate) t.gate.fill([] { return -1e-3; });
    t.write.fill([&] { return noise > 0 ? 0.72 : 1.0; });
    expect_match(run_both(true, own, t), run_both(false, other, with_double_outputs(t)), false, 1e-5,
                 noise > 0 ? 2e-4 : 5e-5, std::string("noise ") + std::to_string(noise));
  }
}

// Appends rows in pieces of the given lengths; returns the slot at the end, the outputs are in t.y.
SlotImage append_pieces(Memory& m, Tensors& t, const std::vector<int64_t>& pieces) {
  SlotImage slot = m.empty_slot(0);
  int64_t begin = 0;
  for (int64_t rows : pieces) {
    Append append;
    append.plan(m, slot, 0, begin, rows);
    const std::vector<Sequence> sequences = {append.sequence};
    MixerForward p = forward_problem(m.shape, t, sequences);
    p.state = m.memory;
    run_any(*Device().forward, p, limits_of(sequences, t.q.rows));
    slot = append.after;
    begin += rows;
  }
  return slot;
}

TEST_F(CudaDeltaRule, PiecesMatchOneCall) {
  Random random(13);
  for (const int64_t grain : {1, 4, 16, 128}) {
    for (const int64_t levels : {0, 5, 9}) {
      const MixerShape shape = shape_of(2, 1, 5, 6, grain, levels, levels == 5);
      const int64_t total = grain < 16 ? 40 : grain == 16 ? 70 : 300;
      Tensors t = unit_tensors(random, shape, total, Inputs());
      Memory whole_memory(shape, 3000, 1);
      whole_memory.rewrites_all = true;
      const SlotImage whole = append_pieces(whole_memory, t, {total});
      const Values y = t.y.values();
      for (int kind = 0; kind < 4; ++kind) {  // single rows; drafts; anything
        if (kind < 2 && grain == 128) continue;
        std::vector<int64_t> pieces;
        for (int64_t left = total; left > 0; left -= pieces.back()) {
          const int64_t rows = kind == 0 ? 1 : kind == 1 ? 3 : random.below(kind == 2 ? 9 : 80);
          pieces.push_back(std::min(left, rows));
        }
        Memory memory(shape, 3000, 1);
        memory.rewrites_all = true;
        t.y.fill([] { return 0.0; });
        const SlotImage slot = append_pieces(memory, t, pieces);
        const std::string where =
            std::string("C") + std::to_string(grain) + " L" + std::to_string(levels) + " kind " + std::to_string(kind);
        EXPECT_LE(norm_error(t.y.values(), y), 1e-5) << where;
        EXPECT_LE(norm_error(slot_values(memory, slot).content, slot_values(whole_memory, whole).content), 1e-5) << where;
      }
    }
  }
}

// Without `stores` a forward leaves the state as it is.
TEST_F(CudaDeltaRule, StoresNothingIfTold) {
  Trial trial;
  trial.shape = shape_of(2, 1, 8, 8, 16, 9);
  trial.parts = {{0, 20, 50, true}};
  Step step(3, trial.shape, trial.parts, LLA_F32, LLA_F32);
  Random random(4);
  Tensors t = unit_tensors(random, trial.shape, step.rows, Inputs());
  const int64_t bytes = 400 * step.memory.memory.nodes.stride;
  const std::vector<char> nodes(step.memory.memory.nodes.base, step.memory.memory.nodes.base + bytes);
  MixerForward p = forward_problem(trial.shape, t, step.sequences);
  p.state = step.memory.memory;
  p.batch.stores = false;
  run_any(*Device().forward, p, limits_of(step.sequences, step.rows));
  EXPECT_EQ(std::memcmp(nodes.data(), p.state.nodes.base, static_cast<size_t>(bytes)), 0);
}

// A sequence's numbers are the same bits whatever stands beside it and however large the limits are.
TEST_F(CudaDeltaRule, BitsDoNotDependOnBatch) {
  Random random(15);
  for (int number = 0; number < 8; ++number) {
    Trial trial = small_trial(random, number);
    const uint64_t seed = 700 + static_cast<uint64_t>(number);
    Step a(seed, trial.shape, trial.parts, LLA_F32, LLA_F32), b(seed, trial.shape, trial.parts, LLA_F32, LLA_F32);
    Random numbers(seed);
    if (number >= 4) trial.in.dtype = LLA_BF16;
    const Tensors t = unit_tensors(numbers, trial.shape, a.rows, trial.in);
    const Result plain = run_both(true, a, t);
    const size_t kept = static_cast<size_t>(random.below(static_cast<int64_t>(trial.parts.size())));
    if (trial.parts[kept].padding) continue;
    for (size_t i = 0; i < b.sequences.size(); ++i) b.sequences[i].padding = i != kept;
    const Result alone = run_both(true, b, t);
    const Sequence& s = b.sequences[kept];
    for (const auto& [x, y] : {std::pair<const Tensor*, const Tensor*>{&alone.t.y, &plain.t.y},
                               {&alone.t.dq, &plain.t.dq},
                               {&alone.t.dk, &plain.t.dk},
                               {&alone.t.dgate, &plain.t.dgate}}) {
      for (int64_t r = s.row_begin; r < s.row_begin + s.rows && !x->empty(); ++r) {
        for (int64_t h = 0; h < x->heads; ++h) {
          for (int64_t i = 0; i < x->dim; ++i) ASSERT_EQ(x->get(r, h, i), y->get(r, h, i)) << describe(trial, number);
        }
      }
    }
  }
}

TEST_F(CudaDeltaRule, MemoryGrowsWithTheLimits) {
  for (const Op op : {Op::MixerForward, Op::MixerBackward}) {
    const Kernel* kernel = cuda_kernel(op);
    if (!kernel) continue;
    for (const int64_t grain : {1, 64, 256}) {
      MixerForward f;
      MixerBackward b;
      f.shape = b.shape = shape_of(4, 2, 64, 64, grain, 20);
      const void* problem = op == Op::MixerForward ? static_cast<const void*>(&f) : &b;
      int64_t before = 0;
      for (int64_t rows = 0; rows < 300000; rows += rows / 3 + 1) {
        Need need;
        kernel->measure(problem, Limits{3, rows, rows, rows, 0}, &need);
        EXPECT_GE(need.shared, before);
        before = need.shared;
      }
      Need need;
      kernel->measure(problem, Limits{1, INT64_MAX / 2, INT64_MAX / 2, INT64_MAX / 2, 0}, &need);
      EXPECT_LT(need.shared, 0);
    }
  }
}

}  // namespace
