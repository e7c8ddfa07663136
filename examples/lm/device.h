// SPDX-License-Identifier: Apache-2.0
// Memory of the device that lla computes on. The example's own arithmetic stays on the host: what both need exists twice and
// is copied before and after lla's part. On the CPU there is only the host's memory, and nothing is copied.
#pragma once

#include <lla/lla.h>

#include <cstddef>
#include <string_view>
#include <utility>

#include "error.h"

namespace lm {

// True if what lla reads and writes must lie in memory of its own, which the host does not touch.
inline bool has_device_memory(lla_context* context) {
  char name[32] = {};
  size_t size = sizeof name;
  LM_CALL(lla_context_query, context, LLA_CONTEXT_BACKEND_NAME, static_cast<void*>(name), &size);
  return std::string_view(name) == "cuda";
}

// Memory that lla computes in, on the device or the host. The context must outlive it, and work that uses it must have ended
// before it does.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(lla_context* context, size_t bytes) : context_(context), bytes_(bytes) {
    LM_CALL(lla_device_allocate, context, bytes, &memory_);
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    DeviceBuffer taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~DeviceBuffer() { lla_device_release(context_, memory_, bytes_); }
  // What lies on the device beside `bytes` of host memory: nothing on the CPU.
  static DeviceBuffer beside_host(lla_context* context, size_t bytes) {
    return has_device_memory(context) ? DeviceBuffer(context, bytes) : DeviceBuffer();
  }

  void* data() const { return memory_; }
  size_t bytes() const { return bytes_; }
  explicit operator bool() const { return memory_ != nullptr; }
  // `host` has bytes() bytes. Both do nothing if there is nothing on the device.
  void send(const void* host) const {
    if (memory_) LM_CALL(lla_device_copy, context_, memory_, host, bytes_, static_cast<void*>(nullptr));
  }
  // The bytes are there once wait_for_device() has returned.
  void fetch(void* host) const {
    if (memory_)
      LM_CALL(lla_device_copy, context_, host, static_cast<const void*>(memory_), bytes_, static_cast<void*>(nullptr));
  }

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
  }

  lla_context* context_ = nullptr;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

// Everything runs on the device's default stream.
inline void wait_for_device(lla_context* context) { LM_CALL(lla_device_wait, context, static_cast<void*>(nullptr)); }

}  // namespace lm
