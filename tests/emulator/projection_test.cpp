// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of the projections against the reference backend: slack rows, strided rows between NaN, tensors [B, T,
// ...], several types, and bits against other batches.
#include "cuda_parts_testing.h"

namespace lla {
namespace {

using namespace parts_testing;

// ---- projection ----

TEST(CudaProjection, Projection) {
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
          p.batch = device_view(batch);
          p.x = parts.in(1, inputs, type.rows);
          p.weight = parts.in_weight(outputs, inputs, type.weights);
          p.bias = accumulate ? Matrix() : parts.in_weight(1, outputs, type.weights);
          problem[kReference] = p;
          parts.out(&p.y, &problem[kReference].y, 1, outputs, type.results, accumulate);
          check_cuda(&parts, Op::ProjectionForward, problem, 4e-6, "projection");

          Parts back(batch);
          p.y = View();
          p.x = back.in(1, inputs, type.rows);
          p.weight = back.in_weight(outputs, inputs, type.weights);
          p.dy = back.in(1, outputs, type.rows);
          problem[kReference] = p;
          back.out(&p.dx, &problem[kReference].dx, 1, inputs, type.results, accumulate);
          back.out_weight(&p.dweight, &problem[kReference].dweight, outputs, inputs, type.results, accumulate);
          back.out_weight(&p.dbias, &problem[kReference].dbias, 1, outputs, type.results, accumulate);
          check_cuda(&back, Op::ProjectionBackward, problem, 4e-6, "projection");
        }
      }
    }
  }
}

// One at a time: what is not asked for is not touched, and the rest stays the same.
TEST(CudaProjection, ProjectionGradientsAlone) {
  const Batch batch = packed({9, 80});
  for (int which = 0; which < 3; ++which) {
    Parts parts(batch);
    Projection problem[2];
    Projection& p = problem[kTested];
    p.inputs = 70;
    p.outputs = 66;
    p.batch = device_view(batch);
    p.x = parts.in(1, 70, LLA_F32);
    p.weight = parts.in_weight(66, 70, LLA_F32);
    p.dy = parts.in(1, 66, LLA_F32);
    Projection& r = problem[kReference] = p;
    if (which == 0) parts.out(&p.dx, &r.dx, 1, 70, LLA_F32, false);
    if (which == 1) parts.out_weight(&p.dweight, &r.dweight, 66, 70, LLA_F32, false);
    if (which == 2) parts.out_weight(&p.dbias, &r.dbias, 1, 66, LLA_F32, false);
    check_cuda(&parts, Op::ProjectionBackward, problem, 4e-6, "projection");
  }
}

// A sequence's bits are the same alone and in a batch, of short sequences, of long ones and of both, forward and backward.
TEST(CudaProjection, BitsOfASequenceDoNotDependOnTheBatch) {
  const Batch batches[] = {packed({1, 16, 3, 0, 15, -2, 16}), packed({9, 1, 12}), packed(std::vector<int64_t>(85, 1)),
                           packed({70, 64, -5, 17}), packed({1, 70, 3, -2, 0, 16, 17, 300, 1, 1, 2})};
  for (const int32_t dtype : {LLA_F32, LLA_BF16}) {
    for (const Batch& many : batches) {
      const int64_t inputs = 1000, outputs = 100;
      Parts parts(many);
      Projection p, back;
      p.inputs = back.inputs = inputs;
      p.outputs = back.outputs = outputs;
      p.batch = back.batch = device_view(many);
      p.weight = back.weight = parts.in_weight(outputs, inputs, dtype);
      p.x = parts.in(1, inputs, dtype);
      back.dy = parts.in(1, outputs, dtype);
      View unused;
      parts.out(&p.y, &unused, 1, outputs, LLA_F32, false);
      parts.out(&back.dx, &unused, 1, inputs, LLA_F32, false);
      run_cuda(Op::ProjectionForward, &p, many.limits());
      run_cuda(Op::ProjectionBackward, &back, many.limits());
      for (const Sequence& s : many.sequences) {
        if (s.padding || s.rows == 0) continue;
        const Batch one = packed({s.rows});
        const int64_t at = one.sequences[0].row_begin;
        Parts alone(one);
        Projection q = p, back_q = back;
        q.batch = back_q.batch = device_view(one);
        q.x.data = p.x.at(0, s.row_begin - at, 0);
        back_q.dy.data = back.dy.at(0, s.row_begin - at, 0);
        alone.out(&q.y, &unused, 1, outputs, LLA_F32, false);
        alone.out(&back_q.dx, &unused, 1, inputs, LLA_F32, false);
        run_cuda(Op::ProjectionForward, &q, one.limits());
        run_cuda(Op::ProjectionBackward, &back_q, one.limits());
        for (int64_t r = 0; r < s.rows; ++r) {
          ASSERT_EQ(0, std::memcmp(q.y.at(0, at + r, 0), p.y.at(0, s.row_begin + r, 0), outputs * sizeof(float)))
              << s.rows << " rows, row " << r;
          ASSERT_EQ(0, std::memcmp(back_q.dx.at(0, at + r, 0), back.dx.at(0, s.row_begin + r, 0), inputs * sizeof(float)))
              << s.rows << " rows, row " << r;
        }
      }
    }
  }
}

// Many splits of the rows, for a weight of one tile and for one of several.
TEST(CudaProjection, GradientsOfManyRows) {
  const Batch batch = packed({700, -300, 5, 1100});
  for (const int64_t inputs : {9, 130}) {
    Parts parts(batch);
    Projection problem[2];
    Projection& p = problem[kTested];
    p.inputs = inputs;
    p.outputs = 140;
    p.batch = device_view(batch);
    p.x = parts.in(1, inputs, LLA_BF16);
    p.weight = parts.in_weight(140, inputs, LLA_BF16);
    p.dy = parts.in(1, 140, LLA_BF16);
    Projection& r = problem[kReference] = p;
    parts.out_weight(&p.dweight, &r.dweight, 140, inputs, LLA_F32, true);
    parts.out_weight(&p.dbias, &r.dbias, 1, 140, LLA_F32, true);
    check_cuda(&parts, Op::ProjectionBackward, problem, 4e-6, "projection");
  }
}

}  // namespace
}  // namespace lla
