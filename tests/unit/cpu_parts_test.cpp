// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of the parts against the reference backend, for every instruction set of this CPU: slack rows, strided
// rows between NaN, tensors [B, T, ...], several types, and bits against other splits.
#include "cpu/projection_tiles.h"
#include "parts_cases.h"
#include "tests/unit/tiles_testing.h"

namespace lla {
namespace {

using namespace parts_testing;

// ---- projection ----

TEST_P(PartsTest, Projection) {
  size_t turn = 0;
  for (const Batch& batch : batches()) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      for (const auto& [inputs, outputs] : {std::pair<int64_t, int64_t>{5, 3}, {130, 70}, {800, 129}}) {
        for (const bool accumulate : {false, true}) {
          if (repeat > 0 && inputs > 500) continue;
          const Types& type = kTypes[(turn++ + static_cast<size_t>(repeat)) % 4];
          Parts parts(batch);
          Projection problem[2];
          Projection& p = problem[kTested];
          p.inputs = inputs;
          p.outputs = outputs;
          p.batch = batch.view();
          p.x = parts.in(1, inputs, type.rows);
          p.weight = parts.in_weight(outputs, inputs, type.weights);
          p.bias = accumulate ? Matrix() : parts.in_weight(1, outputs, type.weights);
          problem[kReference] = p;
          parts.out(&p.y, &problem[kReference].y, 1, outputs, type.results, accumulate);
          tested().check(&parts, Op::ProjectionForward, problem, 4e-6, "projection");

          Parts back(batch);
          p.y = View();
          p.x = back.in(1, inputs, type.rows);
          p.weight = back.in_weight(outputs, inputs, type.weights);
          p.dy = back.in(1, outputs, type.rows);
          problem[kReference] = p;
          back.out(&p.dx, &problem[kReference].dx, 1, inputs, type.results, accumulate);
          back.out_weight(&p.dweight, &problem[kReference].dweight, outputs, inputs, type.results, accumulate);
          back.out_weight(&p.dbias, &problem[kReference].dbias, 1, outputs, type.results, accumulate);
          tested().check(&back, Op::ProjectionBackward, problem, 4e-6, "projection");
        }
      }
    }
  }
}

// One at a time: what is not asked for is not touched, and the rest stays the same.
TEST_P(PartsTest, ProjectionGradientsAlone) {
  const Batch batch = packed({9, 80});
  for (int which = 0; which < 3; ++which) {
    Parts parts(batch);
    Projection problem[2];
    Projection& p = problem[kTested];
    p.inputs = 70;
    p.outputs = 66;
    p.batch = batch.view();
    p.x = parts.in(1, 70, LLA_F32);
    p.weight = parts.in_weight(66, 70, LLA_F32);
    p.dy = parts.in(1, 66, LLA_F32);
    Projection& r = problem[kReference] = p;
    if (which == 0) parts.out(&p.dx, &r.dx, 1, 70, LLA_F32, false);
    if (which == 1) parts.out_weight(&p.dweight, &r.dweight, 66, 70, LLA_F32, false);
    if (which == 2) parts.out_weight(&p.dbias, &r.dbias, 1, 66, LLA_F32, false);
    tested().check(&parts, Op::ProjectionBackward, problem, 4e-6, "projection");
  }
}

// A row's bits are the same alone and in a batch.
TEST_P(PartsTest, ProjectionOfARowDoesNotDependOnTheBatch) {
  for (const int32_t dtype : {LLA_F32, LLA_BF16}) {
    const int64_t inputs = 1000, outputs = 100;
    const Batch many = packed({70, 3, 64}), one = packed({1});
    Parts parts(many);
    Projection p;
    p.inputs = inputs;
    p.outputs = outputs;
    p.batch = many.view();
    p.x = parts.in(1, inputs, dtype);
    p.weight = parts.in_weight(outputs, inputs, dtype);
    View unused;
    parts.out(&p.y, &unused, 1, outputs, LLA_F32, false);
    tested().run(Op::ProjectionForward, &p, many.limits());
    for (const int64_t row : {2, 60, 71, 72, 138}) {
      Parts alone(one);
      Projection q = p;
      q.batch = one.view();
      q.x.data = p.x.at(0, row - 2, 0);
      alone.out(&q.y, &unused, 1, outputs, LLA_F32, false);
      tested().run(Op::ProjectionForward, &q, one.limits());
      ASSERT_EQ(0, std::memcmp(q.y.at(0, 2, 0), p.y.at(0, row, 0), static_cast<size_t>(outputs) * sizeof(float))) << row;
    }
  }
}

// The product on tiles (in software) against the reference, and a row's bits alone and in a batch.
void check_tiled_projection(const Kernel& kernel) {
  for (const Batch& batch : batches()) {
    for (const auto& [inputs, outputs] : {std::pair<int64_t, int64_t>{32, 16}, {96, 21}, {160, 135}}) {
      for (const int32_t result : {LLA_F32, LLA_BF16}) {
        Parts parts(batch);
        Projection problem[2];
        Projection& p = problem[kTested];
        p.inputs = inputs;
        p.outputs = outputs;
        p.batch = batch.view();
        p.x = parts.in(1, inputs, LLA_BF16);
        p.weight = parts.in_weight(outputs, inputs, LLA_BF16);
        if (outputs > 16) p.bias = parts.in_weight(1, outputs, LLA_F32);
        problem[kReference] = p;
        parts.out(&p.y, &problem[kReference].y, 1, outputs, result, false);
        ASSERT_TRUE(cpu::TiledProjection::accepts(&p));
        run(kernel, &p, batch.limits());
        run(*find_kernel(reference_backend(), Op::ProjectionForward, &problem[kReference]), &problem[kReference],
            batch.limits());
        parts.compare(4e-6, "tiled projection");
        const auto first = parts.results();
        parts.reset_results();
        run(kernel, &p, batch.limits(), Order::Backward);
        ASSERT_TRUE(parts.results() == first);
      }
    }
  }
  const Batch many = packed({70, 3, 64}), one = packed({1});
  Parts parts(many), alone(one);
  Projection p;
  p.inputs = 512;
  p.outputs = 100;
  p.batch = many.view();
  p.x = parts.in(1, p.inputs, LLA_BF16);
  p.weight = parts.in_weight(p.outputs, p.inputs, LLA_BF16);
  View unused;
  parts.out(&p.y, &unused, 1, p.outputs, LLA_F32, false);
  run(kernel, &p, many.limits());
  Projection q = p;
  q.batch = one.view();
  alone.out(&q.y, &unused, 1, p.outputs, LLA_F32, false);
  for (const int64_t row : {2, 60, 71, 72, 138}) {
    q.x.data = p.x.at(0, row - 2, 0);
    run(kernel, &q, one.limits());
    ASSERT_EQ(0, std::memcmp(q.y.at(0, 2, 0), p.y.at(0, row, 0), static_cast<size_t>(p.outputs) * sizeof(float))) << row;
  }
}

TEST(TiledProjection, MatchesReference) {
  Kernel kernel = cpu::kTiledProjection;
  kernel.run = [](const void* p, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task) {
    const auto& software = cpu::tiles_testing::kSoftwareTiles;
    cpu::TiledProjection::run(cpu::simd(LLA_ISA_DEFAULT), software, p, limits, scratch, phase, task);
  };
  check_tiled_projection(kernel);
  if (cpu::tiles()) check_tiled_projection(cpu::kTiledProjection);
  if (cpu::bf16_dots()) check_tiled_projection(cpu::kDotProjection);
}

// ---- cases of every backend ----

TEST_P(PartsTest, Convolution) { check_convolution(tested()); }
// Probe S12.
TEST_P(PartsTest, Gates) { check_gates(tested()); }
TEST_P(PartsTest, GatesAtTheirEnds) { check_gates_at_their_ends(tested()); }
TEST_P(PartsTest, L2Norm) { check_l2_norm(tested()); }
TEST_P(PartsTest, GatedNorm) { check_gated_norm(tested()); }
TEST_P(PartsTest, NormsOfZeros) { check_norms_of_zeros(tested()); }
TEST_P(PartsTest, RowsFillCopies) { check_rows_fill_copies(tested()); }
TEST_P(PartsTest, RowsFillClearsSlack) { check_rows_fill_clears_slack(tested()); }

// ---- table ----

TEST_P(PartsTest, TableEndsInTheReference) {
  const Backend& backend = cpu_backend(GetParam());
  EXPECT_STREQ(backend.name, "cpu");
  EXPECT_STREQ(backend.isa, isa_name(GetParam()));
  EXPECT_EQ(&backend, &cpu_backend(GetParam()));
  const Backend& reference = reference_backend();
  ASSERT_GT(backend.kernel_count, reference.kernel_count);
  for (int64_t i = 0; i < reference.kernel_count; ++i) {
    EXPECT_EQ(backend.kernels[backend.kernel_count - reference.kernel_count + i].run, reference.kernels[i].run);
  }
  for (int64_t i = 0; i < backend.kernel_count - reference.kernel_count; ++i) {
    const std::string name = backend.kernels[i].name;
    EXPECT_EQ(name.substr(0, 4), "cpu.");
    EXPECT_EQ(name.substr(name.rfind('.') + 1), isa_name(GetParam()));
  }
  Projection p;
  p.x.dtype = LLA_F64;
  EXPECT_STREQ(find_kernel(backend, Op::ProjectionForward, &p)->name, "reference.projection.forward");
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, PartsTest, testing::ValuesIn(instruction_sets()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace lla
