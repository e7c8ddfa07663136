// SPDX-License-Identifier: Apache-2.0
// A sequence that begins on the device, goes on on the CPU and comes back: its outputs are those of one run on the CPU, and
// an image that was imported leaves the other backend as the very same bytes.
#include <cstdio>

#include "device_model.h"
#include "needs_device.h"

namespace {

using device::Bytes;
using device::Limits;
using device::Model;
using device::Piece;

constexpr int64_t kPositions[] = {1, 63, 64, 65, 700, 5000};
constexpr int64_t kMore = 70;  // rows on the CPU, then on the device again: both cross the border of a chunk
constexpr int64_t kMaxLength = 8192, kLevels = 14;

using Handover = NeedsDevice;

void hand_over(const lla_layer_desc& desc, const char* name) {
  lla_context *gpu = device::open_context(LLA_BACKEND_CUDA), *cpu = device::open_context(LLA_BACKEND_CPU);
  const int64_t last = device::is_emulated(gpu) ? 700 : 5000;
  Limits limits;
  limits.rows = last + 2 * kMore;
  limits.length = kMaxLength;
  limits.slots = 2;
  double worst = 0;
  {
    Model there, here, whole;
    there.open(gpu, desc, limits);
    here.open(cpu, desc, limits);
    whole.open(cpu, desc, limits);
    std::vector<float> expected;
    whole.append({1, 0, last + 2 * kMore}, &expected);
    if (testing::Test::HasFatalFailure()) return;
    const size_t width = whole.output_width();
    for (const int64_t position : kPositions) {
      if (position > last) continue;
      std::vector<float> outputs;
      Bytes image, copy;
      there.empty();
      there.append({1, 0, position}, &outputs);
      there.export_to(&image);
      here.import_from(image);
      here.export_to(&copy);
      EXPECT_TRUE(image == copy) << name << ", to the CPU at " << position;
      here.append({1, position, kMore}, &outputs);
      here.export_to(&image);
      there.import_from(image, 1);  // a slot that held something else
      there.export_to(&copy, 1);
      EXPECT_TRUE(image == copy) << name << ", to the device at " << position + kMore;
      there.append({1, position + kMore, kMore, 1}, &outputs);
      if (testing::Test::HasFatalFailure()) return;
      ASSERT_EQ(outputs.size(), static_cast<size_t>(position + 2 * kMore) * width);
      // The rows of each stay on their own, so that a fault of a few is not lost among many.
      for (const auto& [from, count] : {std::pair{int64_t{0}, position}, {position, kMore}, {position + kMore, kMore}}) {
        const size_t first = static_cast<size_t>(from) * width;
        const double error = device::error_of(&outputs[first], &expected[first], static_cast<size_t>(count) * width);
        worst = std::max(worst, error);
        EXPECT_LE(error, 5e-5) << name << ", rows " << from << " ... " << from + count - 1 << " of " << position;
      }
    }
  }
  std::printf("%s: worst error %.2e\n", name, worst);
  lla_context_release(gpu);
  lla_context_release(cpu);
}

TEST_F(Handover, ScalarGate) { hand_over(device::mixer(LLA_SCALAR_GATE, 4, 2, 32, 16, kLevels), "scalar gate"); }
TEST_F(Handover, ScalarGateLinear) { hand_over(device::mixer(LLA_SCALAR_GATE, 4, 2, 32, 16, 0), "scalar gate, linear"); }
TEST_F(Handover, DeltaRule) { hand_over(device::mixer(LLA_DELTA_RULE, 2, 2, 32, 16, kLevels), "delta rule"); }
TEST_F(Handover, DeltaRuleLinear) { hand_over(device::mixer(LLA_DELTA_RULE, 2, 2, 32, 16, 0), "delta rule, linear"); }
TEST_F(Handover, Mamba2Block) { hand_over(device::block(LLA_LAYER_MAMBA2, 32, 4, 16, 16, kLevels), "Mamba-2 block"); }
TEST_F(Handover, GatedDeltaNetBlock) {
  hand_over(device::block(LLA_LAYER_GATED_DELTANET, 32, 2, 16, 16, kLevels), "Gated DeltaNet block");
}
TEST_F(Handover, GatedDeltaNetBlockLinear) {
  hand_over(device::block(LLA_LAYER_GATED_DELTANET, 32, 2, 16, 16, 0), "linear Gated DeltaNet block");
}

}  // namespace
