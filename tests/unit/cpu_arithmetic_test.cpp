// SPDX-License-Identifier: Apache-2.0
// A host's rounding, traps and flags make no difference to what the CPU kernels compute, and are left as they were; numbers
// too small for a float's exponent, which long decays make, become zero.
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <vector>

#include "core_testing.h"
#include "cpu/arithmetic.h"

using namespace core_testing;

namespace {

#if defined(__x86_64__) || defined(__aarch64__)
constexpr int64_t kRows = 200, kHeads = 2, kWidth = 16;

// Outputs and gradients of one sequence on the calling thread, with gates that let nothing of the far past be left.
std::vector<float> passes(lla_mixer mixer) {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = LLA_BACKEND_CPU;
  options.threads = 1;
  Error error;
  lla_context* context = nullptr;
  lla_layer* layer = nullptr;
  EXPECT_EQ(lla_context_create(&options, &context, &error), LLA_OK) << error.text;
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = LLA_LAYER_MIXER;
  d.mixer = mixer;
  d.heads = d.groups = kHeads;
  d.key_dim = d.value_dim = kWidth;
  d.grain = 16;
  EXPECT_EQ(lla_layer_create(context, &d, &layer, &error), LLA_OK) << error.text;

  std::vector<float> x, gate, out(kRows * kHeads * kWidth), gradient(out.size());
  for (int64_t i = 0; i < kRows * kHeads * kWidth; ++i) x.push_back(static_cast<float>(i * 31 % 101 - 50) / 256);  // exact
  for (int64_t i = 0; i < kRows * kHeads; ++i) gate.push_back(static_cast<float>(i % 7) * -0.3125f);
  gate[61] = -INFINITY;
  const auto wide = [&](lla_role role, std::vector<float>& data) {
    return lla_bind(role, lla_tensor_of(data.data(), LLA_F32, kRows, kHeads, kWidth, -1));
  };
  const lla_binding gates = lla_bind(LLA_GATE, lla_tensor_of(gate.data(), LLA_F32, kRows, kHeads, -1, -1));

  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  limits.max_sequences = 1;
  limits.max_rows = kRows;
  size_t batch_bytes = 0, forward_bytes = 0, backward_bytes = 0;
  EXPECT_EQ(lla_batch_size(context, &limits, &batch_bytes, nullptr, &error), LLA_OK) << error.text;
  EXPECT_EQ(lla_layer_workspace(layer, &limits, LLA_PASS_FORWARD, &forward_bytes, nullptr, &error), LLA_OK) << error.text;
  EXPECT_EQ(lla_layer_workspace(layer, &limits, LLA_PASS_BACKWARD, &backward_bytes, nullptr, &error), LLA_OK) << error.text;
  const size_t bytes = std::max(forward_bytes, backward_bytes);
  std::unique_ptr<void, decltype(&std::free)> batch_memory(std::aligned_alloc(64, (batch_bytes + 64) / 64 * 64), &std::free);
  std::unique_ptr<void, decltype(&std::free)> workspace(std::aligned_alloc(64, (bytes + 64) / 64 * 64), &std::free);
  lla_batch* batch = nullptr;
  EXPECT_EQ(lla_batch_init(context, &limits, batch_memory.get(), batch_bytes, &batch, &error), LLA_OK) << error.text;
  lla_rows rows = LLA_ROWS_INIT;
  rows.sequences = 1;
  rows.rows_per_sequence = kRows;
  EXPECT_EQ(lla_batch_plan(batch, nullptr, &rows, nullptr, &error), LLA_OK) << error.text;

  const lla_binding io[] = {wide(LLA_Q, x), wide(LLA_K, x), wide(LLA_V, x), gates, wide(LLA_Y, out)};
  lla_forward_args forward = LLA_FORWARD_ARGS_INIT;
  forward.batch = batch;
  forward.io = io;
  forward.io_count = 5;
  forward.workspace = workspace.get();
  forward.workspace_bytes = bytes;
  EXPECT_EQ(lla_layer_forward(layer, &forward, &error), LLA_OK) << error.text;

  const lla_binding inputs[] = {wide(LLA_Q, x), wide(LLA_K, x), wide(LLA_V, x), gates};
  const lla_binding from[] = {wide(LLA_Y, x)}, to[] = {wide(LLA_K, gradient)};
  lla_backward_args backward = LLA_BACKWARD_ARGS_INIT;
  backward.batch = batch;
  backward.io = inputs;
  backward.io_count = 4;
  backward.outputs = from;
  backward.output_count = 1;
  backward.gradients = to;
  backward.gradient_count = 1;
  backward.workspace = workspace.get();
  backward.workspace_bytes = bytes;
  EXPECT_EQ(lla_layer_backward(layer, &backward, &error), LLA_OK) << error.text;

  lla_batch_discard(batch);
  lla_layer_release(layer);
  lla_context_release(context);
  out.insert(out.end(), gradient.begin(), gradient.end());
  return out;
}

TEST(CpuArithmetic, HostsEnvironmentMakesNoDifferenceAndStays) {
  for (const lla_mixer mixer : {LLA_SCALAR_GATE, LLA_DELTA_RULE}) {
    const std::vector<float> expected = passes(mixer);
    for (const int rounding : {FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO}) {
      ASSERT_EQ(std::fesetround(rounding), 0);
      std::feclearexcept(FE_ALL_EXCEPT);
      const std::vector<float> got = passes(mixer);
      const int left = std::fegetround();
      std::fesetround(FE_TONEAREST);
      EXPECT_EQ(left, rounding);
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0) << mixer << " " << rounding;
    }
#if defined(__x86_64__) && defined(__GLIBC__)
    // A host that traps what goes wrong in its own code.
    std::feclearexcept(FE_ALL_EXCEPT);
    const int traps = FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW | FE_UNDERFLOW;
    ASSERT_NE(feenableexcept(traps), -1);
    const std::vector<float> got = passes(mixer);
    EXPECT_EQ(feenableexcept(0), traps);
    fedisableexcept(traps);
    EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0) << mixer;
#endif
  }
}

TEST(CpuArithmetic, SmallestNumbersAreZeroInATaskAlone) {
  volatile float small = 1e-30f, smaller = 1e-10f;
  const float outside = small * smaller;
  EXPECT_GT(outside, 0);
  {
    const lla::cpu::Arithmetic arithmetic;
    EXPECT_EQ(small * smaller, 0.0f);
  }
  EXPECT_EQ(small * smaller, outside);
}
#endif

}  // namespace
