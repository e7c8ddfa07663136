// SPDX-License-Identifier: Apache-2.0
// What a layer costs of a device's memory: nothing when it is created, and in use its tensors and what the size queries
// stated. Calls go through on a device that has nothing left. Needs a CUDA device.
#include <cuda_runtime.h>

#include <cstdio>

#include "device_model.h"
#include "needs_device.h"

namespace {

using device::Limits;
using device::Model;

constexpr size_t kGranule = size_t{2} << 20;  // the driver hands out memory in pieces of this size

size_t free_bytes() {
  size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}
double mib(size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// Takes all memory that is left, and gives it back.
class Hog {
 public:
  Hog() {
    for (size_t bytes = size_t{16} << 30; bytes >= 4096; bytes /= 2) {
      void* memory = nullptr;
      while (cudaMalloc(&memory, bytes) == cudaSuccess) blocks_.push_back(memory);
      cudaGetLastError();
    }
  }
  ~Hog() {
    for (void* memory : blocks_) cudaFree(memory);
  }

 private:
  std::vector<void*> blocks_;
};

class Memory : public NeedsDevice {
 protected:
  void SetUp() override {
    NeedsDevice::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    context = device::open_context(LLA_BACKEND_CUDA);
  }
  void TearDown() override { lla_context_release(context); }

  void measure(const lla_layer_desc& desc, const char* name, int64_t rows, lla_dtype dtype) {
    const size_t start = free_bytes();
    lla_layer* layer = nullptr;
    CALL(lla_layer_create(context, &desc, &layer, &error));
    const size_t created = free_bytes();
    EXPECT_EQ(start, created) << name << ": creating a layer takes memory of the device";
    {
      Limits limits;
      limits.sequences = 2;
      limits.rows = rows;
      limits.rows_per_sequence = limits.length = rows / 2;
      limits.backward = true;
      limits.dtype = dtype;
      Model model;
      model.open(context, layer, desc, limits, nullptr);
      const size_t opened = free_bytes();
      EXPECT_LE(start - opened, model.device_bytes() + 16 * kGranule) << name;
      model.load({{1, 0, rows / 2}, {2, 0, rows / 2}});
      device::Tensors first, second;
      const size_t before = free_bytes();
      size_t least = 0;
      {
        const Hog hog;  // from here on nobody can get anything
        least = free_bytes();
        model.forward();
        model.backward();
        CALL(lla_device_wait(context, nullptr, &error));
        EXPECT_EQ(free_bytes(), least) << name;
      }
      model.read(true, &first);
      const size_t after = free_bytes();
      EXPECT_EQ(before, after) << name << ": calls leave memory taken";
      model.forward();
      model.backward();
      model.read(true, &second);
      EXPECT_EQ(free_bytes(), after) << name;
      EXPECT_TRUE(first == second) << name;
      std::printf(
          "%s, %lld rows: layer %.1f MiB; tensors, plan, workspace %.1f and saved %.1f: %.1f MiB, the device says %.1f; "
          "forward and backward with %.1f MiB left: %.1f more\n",
          name, static_cast<long long>(rows), mib(start - created), mib(model.workspace_bytes()), mib(model.saved_bytes()),
          mib(model.device_bytes()), mib(start - opened), mib(least), mib(before - after));
    }
    lla_layer_release(layer);
    EXPECT_EQ(free_bytes(), start) << name << ": memory stays taken";
  }
  lla_context* context = nullptr;
};

TEST_F(Memory, ScalarGate) {
  measure(device::mixer(LLA_SCALAR_GATE, 8, 1, 128, 64, 13), "scalar gate, bf16", 8192, LLA_BF16);
  measure(device::mixer(LLA_SCALAR_GATE, 8, 1, 128, 64, 13), "scalar gate, fp32", 8192, LLA_F32);
  measure(device::mixer(LLA_SCALAR_GATE, 8, 1, 128, 64, 0), "scalar gate, linear, bf16", 8192, LLA_BF16);
}
TEST_F(Memory, DeltaRule) {
  measure(device::mixer(LLA_DELTA_RULE, 4, 4, 128, 128, 13), "delta rule, bf16", 8192, LLA_BF16);
  measure(device::mixer(LLA_DELTA_RULE, 4, 4, 128, 128, 13), "delta rule, fp32", 8192, LLA_F32);
  measure(device::mixer(LLA_DELTA_RULE, 4, 4, 128, 128, 0), "delta rule, linear, bf16", 8192, LLA_BF16);
}
TEST_F(Memory, Blocks) {
  measure(device::block(LLA_LAYER_MAMBA2, 256, 8, 64, 64, 13), "Mamba-2 block", 4096, LLA_F32);
  measure(device::block(LLA_LAYER_GATED_DELTANET, 256, 4, 64, 64, 13), "Gated DeltaNet block", 4096, LLA_F32);
}

}  // namespace
