// SPDX-License-Identifier: Apache-2.0
// Context: backend, memory, threads, log. Immutable after creation, counted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "lla/context.h"
#include "plugin/backend.h"

namespace lla {

class ThreadPool;

struct Context {
  std::atomic<int64_t> references{1};
  const Backend* backend = nullptr;
  lla_backend kind = LLA_BACKEND_CPU;
  lla_determinism determinism = LLA_DETERMINISM_BATCH_INVARIANT;
  lla_allocator allocator{};
  lla_parallel parallel{};     // always complete; the own pool or a serial loop fill it in if the caller gave none
  lla_log log{};
  ThreadPool* pool = nullptr;  // own pool, if asked for
  char fallback_reason[200] = {};

  // Memory of the context's allocator, 64-byte aligned; null if there is none. `bytes` 0 counts as 1.
  void* allocate(size_t bytes) const noexcept;
  void release(void* memory, size_t bytes) const noexcept;
  int32_t threads() const { return parallel.max_threads; }
  void write_log(lla_log_level level, const char* text) const noexcept;
};

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
