// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of the parts against the reference backend: slack rows, strided rows between NaN, tensors [B, T, ...],
// several types, histories.
#include "cuda_parts_testing.h"
#include "parts_cases.h"

namespace lla {
namespace {

using namespace parts_testing;

TEST(PartsOnDevices, Convolution) { check_convolution(CudaParts()); }
TEST(PartsOnDevices, Gates) { check_gates(CudaParts()); }
TEST(PartsOnDevices, GatesAtTheirEnds) { check_gates_at_their_ends(CudaParts()); }
TEST(PartsOnDevices, L2Norm) { check_l2_norm(CudaParts()); }
TEST(PartsOnDevices, GatedNorm) { check_gated_norm(CudaParts()); }
TEST(PartsOnDevices, NormsOfZeros) { check_norms_of_zeros(CudaParts()); }
TEST(PartsOnDevices, RowsFillCopies) { check_rows_fill_copies(CudaParts()); }
TEST(PartsOnDevices, RowsFillClearsSlack) { check_rows_fill_clears_slack(CudaParts()); }

// Several blocks of rows in a sequence, and a call that must not store.
TEST(PartsOnDevices, ConvolutionOfLongSequences) {
  Batch batch = packed({300, 5, -70, 0, 200});
  for (const int64_t width : {2, 3, 4, 7}) {
    const int64_t channels = 135;
    Rings state(channels, 2 * width + 5, 4, kNan);
    const RowsToStore plan{1, 0, 0, 3};
    for (Sequence& s : batch.sequences) {
      s.conv_to_store = &plan;
      s.conv_to_store_count = 1;
    }
    const std::vector<char> before = state.memory;
    Parts parts(batch);
    Convolution problem[2];
    Convolution& p = problem[kTested];
    p.channels = channels;
    p.width = width;
    p.batch = device_view(batch);
    p.batch.stores = false;
    p.x = parts.in(1, channels, LLA_BF16);
    p.weight = parts.in_weight(channels, width, LLA_F32);
    Convolution& r = problem[kReference] = p;
    p.state = state.slots;
    parts.out(&p.y, &r.y, 1, channels, LLA_F32, true);
    check_cuda(&parts, Op::ConvolutionForward, problem, 3e-6, "convolution");
    EXPECT_TRUE(state.memory == before);
    Parts back(batch);
    p.x = back.in(1, channels, LLA_BF16);
    p.weight = back.in_weight(channels, width, LLA_F32);
    p.dy = back.in(1, channels, LLA_F16);
    r = p;
    r.state = SlotMemory();
    back.out(&p.dx, &r.dx, 1, channels, LLA_F32, false);
    back.out_weight(&p.dweight, &r.dweight, channels, width, LLA_F32, true);
    check_cuda(&back, Op::ConvolutionBackward, problem, 6e-6, "convolution");
  }
}

// A sequence's bits do not depend on the others, whichever way rows are cut.
TEST(PartsOnDevices, BitsDoNotDependOnTheBatch) {
  const Batch many = packed({40, 9, -3, 0, 130, 1, 1, 1, 1, 1, 1, 1}), one = packed({9});
  const int64_t row = 42;
  Parts parts(many), alone(one);
  GatedNorm p;
  p.form = LLA_NORM_GATE_FIRST;
  p.width = 900;
  p.heads = 3;
  p.value_dim = p.group = 300;
  p.batch = device_view(many);
  p.x = parts.in(3, 300, LLA_BF16);
  p.z = parts.in(1, 900, LLA_BF16);
  View unused;
  parts.out(&p.y, &unused, 3, 300, LLA_F32, false);
  run_cuda(Op::GatedNormForward, &p, many.limits());
  GatedNorm q = p;
  q.batch = device_view(one);
  q.x.data = p.x.at(0, row - 2, 0);
  q.z.data = p.z.at(0, row - 2, 0);
  alone.out(&q.y, &unused, 3, 300, LLA_F32, false);
  run_cuda(Op::GatedNormForward, &q, one.limits());
  for (int64_t r = 0; r < 9; ++r) ASSERT_EQ(0, std::memcmp(q.y.at(0, 2 + r, 0), p.y.at(0, row + r, 0), 3600));
}

// Groups of a warp, of a block, and such that sums over rows do not fit into shared memory.
TEST(PartsOnDevices, GatedNormOfWideGroups) {
  const Batch batch = packed({70, -3, 0, 2});
  for (const int64_t group : {512, 600, 1536, 9001}) {
    for (const bool shared : {false, true}) {
      const int64_t heads = shared ? 2 : 1, width = heads * group;
      Parts parts(batch);
      GatedNorm problem[2];
      GatedNorm& p = problem[kTested];
      p.form = shared ? LLA_NORM_NORM_FIRST : LLA_NORM_GATE_FIRST;
      p.width = width;
      p.heads = heads;
      p.value_dim = p.group = group;
      p.weight_per_group = shared;
      p.batch = device_view(batch);
      p.x = parts.in(heads, group, LLA_BF16);
      p.skip = parts.in(heads, group, LLA_F32);
      p.d = parts.in_weight(1, heads, LLA_F32);
      p.z = parts.in(1, width, LLA_BF16);
      p.weight = parts.in_weight(1, shared ? group : width, LLA_F32);
      p.dy = parts.in(heads, group, LLA_F32);
      GatedNorm& r = problem[kReference] = p;
      parts.out(&p.y, &r.y, heads, group, LLA_F32, false);
      check_cuda(&parts, Op::GatedNormForward, problem, 2e-6, "gated norm");
      Parts back(batch);
      p.x = back.in(heads, group, LLA_BF16);
      p.skip = back.in(heads, group, LLA_F32);
      p.d = back.in_weight(1, heads, LLA_F32);
      p.z = back.in(1, width, LLA_BF16);
      p.weight = back.in_weight(1, shared ? group : width, LLA_F32);
      p.dy = back.in(heads, group, LLA_F32);
      p.y = View();
      r = p;
      back.out(&p.dx, &r.dx, heads, group, LLA_F32, false);
      back.out(&p.dz, &r.dz, 1, width, LLA_F32, true);
      back.out_weight(&p.dd, &r.dd, 1, heads, LLA_F32, true);
      back.out_weight(&p.dweight, &r.dweight, 1, shared ? group : width, LLA_F32, false);
      check_cuda(&back, Op::GatedNormBackward, problem, 6e-6, "gated norm");
    }
  }
}

}  // namespace
}  // namespace lla
