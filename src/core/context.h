// SPDX-License-Identifier: Apache-2.0
// Context: backend, memory, threads, log. Immutable after creation, counted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "lla/context.h"
#include "plugin/backend.h"
#include "plugin/plugin.h"

namespace lla {

class ThreadPool;

struct Context {
  std::atomic<int64_t> references{1};
  const Backend* backend = nullptr;
  lla_backend kind = LLA_BACKEND_CPU;
  lla_determinism determinism = LLA_DETERMINISM_BATCH_INVARIANT;
  lla_allocator allocator{};
  lla_parallel parallel{};  // always complete; the own pool or a serial loop fill it in if the caller gave none
  lla_log log{};
  ThreadPool* pool = nullptr;      // own pool, if asked for
  const Plugin* device = nullptr;  // null: the backend works in host memory
  int32_t device_number = 0;
  int32_t process = 0;  // with a device: who made the context; a forked child cannot use it
  char device_name[128] = {};
  char fallback_reason[200] = {};

  // Memory of the context's allocator, 64-byte aligned; null if there is none. `bytes` 0 counts as 1.
  void* allocate(size_t bytes) const noexcept;
  void release(void* memory, size_t bytes) const noexcept;
  int32_t threads() const { return parallel.max_threads; }
  void write_log(lla_log_level level, const char* text) const noexcept;
};

// The context's device is the current one of this thread while a scope lives. Does nothing on the CPU.
class DeviceScope {
 public:
  explicit DeviceScope(const Context* context) noexcept;
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  // LLA_OK, LLA_FORKED or LLA_DEVICE_ERROR.
  lla_status check(lla_error* error) const noexcept;

 private:
  const Context* context_;
  int32_t previous_ = 0;
  lla_status status_ = LLA_OK;
};

// Work on the memory of the backend, host or device; on a device in the order of the stream.
lla_status copy_memory(const Context& context, void* to, const void* from, int64_t bytes, void* stream,
                       lla_error* error) noexcept;
lla_status clear_memory(const Context& context, void* at, int64_t bytes, void* stream, lla_error* error) noexcept;
lla_status wait_for(const Context& context, void* stream, lla_error* error) noexcept;
// For what waits, or allocates: LLA_CAPTURE_UNSAFE, before anything is done, if a graph is made of what the stream is given.
// Asking the device itself would end the caller's capture.
lla_status check_capture(const Context& context, void* stream, lla_error* error) noexcept;
// Memory that the backend's kernels work on; null if there is none.
void* allocate_memory(const Context& context, size_t bytes) noexcept;
void release_memory(const Context& context, void* memory, size_t bytes) noexcept;
// Whether the backend's kernels can use memory at this address. Null counts as memory.
bool reaches_memory(const Context& context, const void* memory) noexcept;
// Turns what a plugin's function returned into a message.
lla_status device_status(const Context& context, int32_t status, const char* what, lla_error* error) noexcept;
// Whether a backend can be used here; `reason` receives why not.
lla_status backend_available(lla_backend backend, char* reason, size_t capacity) noexcept;

lla_status create_context(const lla_context_options& options, Context** context, lla_error* error) noexcept;
void retain(Context* context) noexcept;
void release(Context* context) noexcept;

// An array in the context's memory that does not throw. Moves, but does not copy; T is trivially destructible.
template <class T>
class Array {
 public:
  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { reset(); }
  // Allocates `count` value-initialised elements; false if there is no memory. What was there is released first.
  bool allocate(const Context* context, int64_t count) noexcept {
    reset();
    if (count <= 0) return true;
    if (static_cast<uint64_t>(count) > SIZE_MAX / sizeof(T)) return false;
    void* memory = context->allocate(static_cast<size_t>(count) * sizeof(T));
    if (!memory) return false;
    context_ = context;
    data_ = static_cast<T*>(memory);
    count_ = count;
    for (int64_t i = 0; i < count; ++i) ::new (static_cast<void*>(data_ + i)) T();
    return true;
  }
  void reset() noexcept {
    if (data_) context_->release(data_, static_cast<size_t>(count_) * sizeof(T));
    data_ = nullptr;
    count_ = 0;
  }
  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return count_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  const Context* context_ = nullptr;
  T* data_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace lla
