// SPDX-License-Identifier: Apache-2.0
// For tests of plans that the emulated device makes: its context, its arrays, and batches with their memory there.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "core/batch_device.h"
#include "core/batch_records.h"
#include "core_model_groups.h"
#include "core_testing.h"
#include "plugin/plugin.h"

extern "C" const lla::Plugin* lla_plugin_query(uint32_t abi);

namespace core_testing {

// A context of the emulated device, without the library's way to find it. Its memory is the host's.
inline ContextPointer device_context() {
  ContextPointer context = reference_context();
  context->device = lla_plugin_query(kPluginAbi);
  return context;
}

inline lla_index on_device(const std::vector<int64_t>& values) { return {values.data(), LLA_I64, LLA_DEVICE}; }
inline lla_index on_device(const std::vector<int32_t>& values) { return {values.data(), LLA_I32, LLA_DEVICE}; }

// A batch with its memory on the device.
struct DeviceBatch {
  BatchOwner owner;
  std::unique_ptr<char[]> memory;
  char* aligned = nullptr;

  DeviceBatch(Context* context, const lla_batch_limits& limits) : owner(context, limits) {
    size_t bytes = 0;
    Error error;
    EXPECT_EQ(batch_device_size(*context, owner->limits, &bytes, &error), LLA_OK) << error.text;
    memory.reset(new char[bytes + 64]);
    std::memset(memory.get(), 0xff, bytes + 64);
    aligned = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64);
    EXPECT_EQ(bind_device_memory(owner.get(), aligned, bytes, &error), LLA_OK) << error.text;
  }
  Batch* get() const { return owner.get(); }
  const Sequence& sequence(int64_t b) const { return owner->device_view.sequences[b]; }
  const PlannedSequence& answer(int64_t b) const {
    return reinterpret_cast<const PlannedSequence*>(aligned + DeviceLayout(owner->limits).planned)[b];
  }
};

}  // namespace core_testing
