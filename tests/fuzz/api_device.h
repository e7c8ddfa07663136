// SPDX-License-Identifier: Apache-2.0
// The calls that move memory and plans of a device, on contexts of the CPU: there they do what they say, or nothing.
#pragma once

#include "fuzz.h"

namespace fuzz {

// Context and batch may be null. `choice`: any number.
inline void device_calls(lla_context* context, lla_batch* batch, const lla_batch_limits& limits, size_t choice) {
  size_t bytes = 1, alignment = 0;
  if (batch) {
    const lla_status size =
        FUZZ_CALL(lla_batch_device_size(context, &limits, &bytes, choice % 2 ? &alignment : nullptr, &error));
    PROMISE(size != LLA_OK || bytes == 0);
    char memory[64];
    const lla_status bound =
        FUZZ_CALL(lla_batch_bind_device(batch, choice % 3 ? nullptr : memory, choice % 3 ? 0 : sizeof memory, &error));
    PROMISE(bound == LLA_OK || bound == LLA_BUSY);
    const lla_status collected = FUZZ_CALL(lla_batch_collect(batch, nullptr, &error));
    PROMISE(collected == LLA_OK || collected == LLA_BUSY);
  }
  PROMISE(lla_batch_faults(batch) == 0);
  if (!context) return;
  // Now and then more than there is, and what wraps around when it is rounded up.
  static constexpr size_t kSizes[] = {0, 1, 63, 64, 65, 4096, SIZE_MAX, SIZE_MAX - 62, SIZE_MAX / 2 + 1};
  const size_t wanted = kSizes[choice % (sizeof kSizes / sizeof kSizes[0])];
  void* memory = nullptr;
  const lla_status got = FUZZ_CALL(lla_device_allocate(context, wanted, &memory, &error));
  PROMISE((got == LLA_OK) == (memory != nullptr));
  PROMISE(got == LLA_OK || got == LLA_OUT_OF_MEMORY);
  FUZZ_OK(lla_device_wait(context, nullptr, &error));
  if (!memory) return;
  PROMISE(wanted <= 4096 && reinterpret_cast<uintptr_t>(memory) % 64 == 0);
  const Block from(wanted), to(wanted);
  if (wanted > 0) {
    std::memset(from.data(), static_cast<int>(choice % 251), wanted);
    FUZZ_OK(lla_device_copy(context, memory, from.data(), wanted, nullptr, &error));
    FUZZ_OK(lla_device_copy(context, to.data(), memory, wanted, nullptr, &error));
    PROMISE(std::memcmp(from.data(), to.data(), wanted) == 0);
  }
  lla_device_release(context, memory, wanted);
}

}  // namespace fuzz
