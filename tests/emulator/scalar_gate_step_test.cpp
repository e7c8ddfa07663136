// SPDX-License-Identifier: Apache-2.0
// Steps of bf16 and fp16 rows on the emulator: against the reference, over shapes, histories, borders and types of nodes;
// and their bits, which depend on nothing but the sequence.
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "scalar_gate_testing.h"

namespace {

using namespace scalar_gate_testing;

Kernels portable() { return {cuda_kernels().forward, nullptr}; }

Case make_case(MixerShape shape, std::vector<Part> parts, int32_t node_dtype = LLA_BF16) {
  Case c;
  c.shape = shape;
  c.parts = std::move(parts);
  c.inputs.dtype = c.tail_dtype = LLA_BF16;
  c.node_dtype = node_dtype;
  c.forward_only = true;
  return c;
}

// The same with rows of another 2-byte type.
Case in_type(Case c, int32_t dtype) {
  c.inputs.dtype = dtype;
  for (int32_t* type : {&c.tail_dtype, &c.factor_dtype}) {
    if (*type == LLA_BF16) *type = dtype;
  }
  return c;
}

void check(const Case& of_bf16) {
  for (const int32_t dtype : {LLA_BF16, LLA_F16}) {
    const Case c = in_type(of_bf16, dtype);
    SCOPED_TRACE(describe(c) + " nodes " + std::to_string(c.node_dtype));
    const Values got = run_case(portable(), c), want = run_case(reference_kernels(), c);
    for (const char* name : {"y", "state", "state scalars"}) {
      if (!want.count(name)) continue;
      const double tolerance = std::string(name) == "y"   ? dtype == LLA_F16 ? 2e-6 : 3e-5
                               : c.node_dtype == LLA_BF16 ? 6e-3
                               : dtype == LLA_F16         ? 8e-4
                                                          : 4e-3;
      EXPECT_LE(norm_error(got.at(name), want.at(name)), tolerance) << name;
    }
  }
}

MixerShape log_linear(int64_t heads, int64_t groups, int64_t dk, int64_t dv, int64_t grain = 64, bool cyclic = false) {
  return make_shape(heads, groups, dk, dv, grain, 14, false, cyclic, 0.125);
}

// One to four rows anywhere in a chunk, at its end too, after a past of any nodes.
const std::vector<Part> kParts = {{1, 64 * 13 + 5, 0}, {4, 64 * 6 + 60, 0}, {3, 64 * 7 + 20, 100},
                                  {1, 63, 0},          {2, 0, 0},           {1, 64 * 3, 64 * 3}};

TEST(ScalarGateStep, Shapes) {
  for (int32_t dtype : {LLA_BF16, LLA_F32}) {
    for (const auto& [dk, dv] : std::vector<std::pair<int64_t, int64_t>>{{128, 64}, {64, 32}, {32, 128}, {96, 72}, {160, 8}})
      check(make_case(log_linear(2, 1, dk, dv), kParts, dtype));
  }
}

TEST(ScalarGateStep, Groups) {
  check(make_case(log_linear(4, 4, 64, 64), kParts));
  check(make_case(log_linear(6, 2, 64, 32), kParts, LLA_F32));
  check(make_case(log_linear(6, 2, 64, 32, 64, true), kParts));
}

// Small chunks, in which a step is most of one, and more nodes.
TEST(ScalarGateStep, Grains) {
  for (int64_t grain : {4, 16, 32}) {
    check(make_case(log_linear(2, 1, 64, 32, grain),
                    {{1, grain * 181 + grain - 1, 0}, {2, grain * 255 + 1, 3}, {3, grain - 3, 0}}));
    check(make_case(log_linear(2, 1, 64, 32, grain), {{4, grain * 127 + grain - 4, 0}}, LLA_F32));
  }
}

// One state, an absorbing one, no state.
TEST(ScalarGateStep, Forms) {
  for (int32_t dtype : {LLA_BF16, LLA_F32}) {
    check(make_case(make_shape(2, 1, 64, 64, 64, 0), kParts, dtype));
    check(make_case(make_shape(2, 1, 64, 64, 64, 9, true), kParts, dtype));
    check(make_case(make_shape(2, 1, 64, 64, 64, 8, true), kParts, dtype));
  }
  check(make_case(log_linear(2, 1, 64, 64), {{1, 700}, {4, 60}, {3, 0}}));
}

TEST(ScalarGateStep, Inputs) {
  Case c = make_case(log_linear(2, 1, 64, 64), kParts);
  c.inputs.gate = false;
  c.inputs.write = true;
  c.factor_dtype = LLA_BF16;
  check(c);
  c.inputs.gate = true;
  c.inputs.write = false;
  c.inputs.hard = 0.1;
  check(c);
  c.inputs.decay = 30;
  c.accumulate = true;
  check(c);
  for (Part& part : c.parts) part.fork = true;
  check(c);
}

// Rows that are not aligned give the same bits as aligned ones.
TEST(ScalarGateStep, UnalignedRows) {
  for (const int32_t dtype : {LLA_BF16, LLA_F16}) {
    Case c = in_type(make_case(log_linear(2, 1, 64, 64), kParts), dtype);
    const Values aligned = run_case(portable(), c);
    c.inputs.pad = 7;
    const Values unaligned = run_case(portable(), c);
    EXPECT_TRUE(aligned == unaligned) << dtype;
  }
}

// Of rows, and of nodes.
constexpr std::array<int32_t, 2> kTypes[] = {
    {LLA_BF16, LLA_BF16}, {LLA_BF16, LLA_F32}, {LLA_F16, LLA_BF16}, {LLA_F16, LLA_F32}};

// y of some rows of one sequence, appended in pieces that end at the given rows.
std::vector<double> rows_of(const MixerShape& shape, Tensors& t, Memory& memory, SlotImage image,
                            std::vector<int64_t> ends) {
  int64_t row = 0;
  for (int64_t end : ends) {
    Append append;
    append.plan(memory, image, 0, row, end - row, false, false);
    const std::vector<Sequence> sequences = {append.sequence};
    MixerForward p = forward_problem(shape, t, sequences);
    p.state = memory.memory;
    bound(&p.batch);
    run(*portable().forward, &p, limits_of(sequences, t.q.rows));
    image = append.after;
    row = end;
  }
  std::vector<double> all = t.y.values();
  const SlotValues state = slot_values(memory, image);
  all.insert(all.end(), state.content.begin(), state.content.end());
  all.insert(all.end(), state.scalars.begin(), state.scalars.end());
  return all;
}

// A row has the same bits alone and with others, and so has the node of a chunk that they complete.
TEST(ScalarGateStep, RowsAloneAndTogether) {
  for (const auto& [rows, dtype] : kTypes) {
    const MixerShape shape = log_linear(2, 1, 128, 64);
    Random random(5);
    Inputs inputs;
    inputs.dtype = rows;
    Tensors t = random_tensors(random, shape, 12, inputs);
    Memory memory(shape, 300, 10, 8, dtype, rows);
    const SlotImage start = memory.random_slot(random, 64 * 11 + 56, 0, 0.01);
    const std::vector<double> alone = rows_of(shape, t, memory, start, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
    for (const std::vector<int64_t>& ends :
         std::vector<std::vector<int64_t>>{{4, 8, 12}, {1, 4, 6, 8, 9, 12}, {2, 5, 8, 10, 12}})
      EXPECT_TRUE(rows_of(shape, t, memory, start, ends) == alone) << rows << " " << dtype;
  }
}

// The node of a chunk that steps complete, alone or merged with others, has the bits of that of a longer call.
TEST(ScalarGateStep, NodesOfLongerCalls) {
  for (const auto& [rows, dtype] : kTypes) {
    for (const auto& [dk, dv, grain, chunk] : std::vector<std::array<int64_t, 4>>{
             {128, 64, 64, 10}, {128, 64, 64, 15}, {96, 40, 64, 7}, {320, 64, 32, 5}, {64, 128, 16, 3}}) {
      const MixerShape shape = log_linear(2, 1, dk, dv, grain);
      Random random(static_cast<uint64_t>(dk + chunk));
      Inputs inputs;
      inputs.dtype = rows;
      Tensors t = random_tensors(random, shape, 8, inputs);
      Memory memory(shape, 300, 10, 8, dtype, rows);
      const SlotImage start = memory.random_slot(random, grain * chunk + grain - 6, 0, 0.01);
      const size_t outputs = t.y.values().size();
      const std::vector<double> steps = rows_of(shape, t, memory, start, {1, 5, 6, 8}),
                                whole = rows_of(shape, t, memory, start, {8});
      ASSERT_EQ(steps.size(), whole.size());
      EXPECT_TRUE(std::equal(steps.begin() + static_cast<ptrdiff_t>(outputs), steps.end(),
                             whole.begin() + static_cast<ptrdiff_t>(outputs)))
          << rows << " " << dtype << " " << dk << " " << chunk;
      EXPECT_LT(norm_error({steps.begin(), steps.begin() + static_cast<ptrdiff_t>(outputs)},
                           {whole.begin(), whole.begin() + static_cast<ptrdiff_t>(outputs)}),
                1e-2);
    }
  }
}

// The heads of a group have the bits that they would have alone: of H = 4, G = 1 each head, and of the same with G = H.
TEST(ScalarGateStep, HeadsAloneAndTogether) {
  const MixerShape shape = log_linear(4, 1, 64, 64), single = log_linear(1, 1, 64, 64);
  Random random(6);
  Inputs inputs;
  inputs.dtype = LLA_BF16;
  Tensors t = random_tensors(random, shape, 2, inputs);
  Memory memory(shape, 100, 10, 8, LLA_BF16, LLA_BF16);
  const SlotImage image = memory.random_slot(random, 64 * 45 + 31, 0, 0.01);
  const auto forward = [&](const MixerShape& of, Tensors& tensors, const SlotMemory& state, const SlotImage& history) {
    Sequence s = plain_sequence(0, 2, history.position);
    s.history = history;
    const std::vector<Sequence> sequences = {s};
    MixerForward p = forward_problem(of, tensors, sequences);
    p.state = state;
    bound(&p.batch);
    p.batch.stores = false;
    run(*portable().forward, &p, limits_of(sequences, 2));
  };
  forward(shape, t, memory.memory, image);
  for (int64_t h = 0; h < 4; ++h) {
    Tensors one = random_tensors(random, single, 2, inputs);
    Memory own(single, 100, 10, 8, LLA_BF16, LLA_BF16);
    SlotImage slot = own.random_slot(random, image.position, 0);
    slot.tail_origin = image.tail_origin;
    const auto copy = [](Tensor& to, const Tensor& from, int64_t head) {
      for (int64_t r = 0; r < to.rows && !to.empty(); ++r) {
        for (int64_t i = 0; i < to.dim; ++i) to.set(r, 0, i, from.get(r, head, i));
      }
    };
    copy(one.q, t.q, 0), copy(one.k, t.k, 0), copy(one.v, t.v, h);
    copy(one.gate, t.gate, h), copy(one.write, t.write, h), copy(one.lambda, t.lambda, h);
    const SlotMemory &from = memory.memory, &to = own.memory;
    for (int b = 0; b < kNodes; ++b) {
      if (image.node[b] >= 0)
        std::memcpy(to.node(slot.node[b], 0), from.node(image.node[b], h),
                    static_cast<size_t>(from.node_layout.head_bytes()));
    }
    const auto bytes = [](int64_t n) { return static_cast<size_t>(n); };
    std::memcpy(to.tail_k(slot.tail, 0, 0), from.tail_k(image.tail, 0, 0), bytes(from.tail_layout.k_span()));
    std::memcpy(to.tail_v(slot.tail, 0, 0), from.tail_v(image.tail, h, 0), bytes(from.tail_layout.v_span()));
    std::memcpy(to.tail_gate(slot.tail, 0, 0), from.tail_gate(image.tail, h, 0), bytes(from.tail_layout.gate_span()));
    std::memcpy(to.tail_write(slot.tail, 0, 0), from.tail_write(image.tail, h, 0), bytes(from.tail_layout.gate_span()));
    forward(single, one, own.memory, slot);
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t i = 0; i < 64; ++i) ASSERT_EQ(one.y.get(r, 0, i), t.y.get(r, h, i)) << h << " " << r << " " << i;
    }
  }
}

// A sequence's bits are the same alone and in a batch with padding, longer calls and other steps.
TEST(ScalarGateStep, BitsDoNotDependOnTheBatch) {
  const MixerShape shape = log_linear(2, 1, 64, 64);
  Random random(7);
  Inputs inputs;
  inputs.dtype = LLA_BF16;
  Tensors t = random_tensors(random, shape, 60, inputs);
  Memory memory(shape, 200, 20, 8, LLA_BF16, LLA_BF16);
  const int64_t begin[] = {0, 1, 5, 6, 50}, count[] = {1, 4, 1, 40, 2}, position[] = {64 * 9 + 63, 500, 64, 90, 64 * 15};
  std::vector<Append> appends(5);
  std::vector<Sequence> all;
  for (size_t i = 0; i < 5; ++i) {
    appends[i].plan(memory, memory.random_slot(random, position[i], 0), static_cast<int64_t>(i), begin[i], count[i]);
    all.push_back(appends[i].sequence);
  }
  all[4].padding = true;
  const auto forward = [&](const std::vector<Sequence>& sequences) {
    Tensors copy = t;
    copy.y.fill([] { return 5.0; });
    MixerForward p = forward_problem(shape, copy, sequences);
    bound(&p.batch);
    p.state = memory.memory;
    run(*portable().forward, &p, limits_of(sequences, 60));
    return copy;
  };
  const Tensors batch = forward(all);
  for (size_t i = 0; i < 5; ++i) {
    const Tensors alone = forward({all[i]});
    for (int64_t r = begin[i]; r < begin[i] + count[i]; ++r) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 64; ++d) ASSERT_EQ(alone.y.get(r, h, d), batch.y.get(r, h, d)) << i;
        if (i == 4) {
          EXPECT_EQ(batch.y.get(r, h, 0), 5.0);
        }
      }
    }
  }
}

}  // namespace
