// SPDX-License-Identifier: Apache-2.0
// Owners of lla's handles and of the aligned memory that lla asks the caller for.
#pragma once

#include <lla/lla.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include "device.h"
#include "error.h"

namespace lm {

struct Release {
  void operator()(lla_context* p) const { lla_context_release(p); }
  void operator()(lla_layer* p) const { lla_layer_release(p); }
  void operator()(lla_state* p) const { lla_state_release(p); }
};
using Context = std::unique_ptr<lla_context, Release>;
using Layer = std::unique_ptr<lla_layer, Release>;
using State = std::unique_ptr<lla_state, Release>;

inline Context make_context(const lla_context_options& options) {
  lla_context* context = nullptr;
  LM_CALL(lla_context_create, &options, &context);
  return Context(context);
}

inline Layer make_layer(lla_context* context, const lla_layer_desc& description) {
  lla_layer* layer = nullptr;
  LM_CALL(lla_layer_create, context, &description, &layer);
  return Layer(layer);
}

// Memory of a fixed size with the alignment that a query asked for.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes, size_t alignment = 64) : bytes_(bytes) {
    if (alignment < 64) alignment = 64;
    memory_.reset(std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment));
    if (!memory_) throw std::bad_alloc();
  }
  void* data() const { return memory_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t bytes_ = 0;
};

// A batch together with its memory, the device's included. A plan that was not committed is given back at the end, so that a
// batch must not outlive the state that it was planned with.
class Batch {
 public:
  Batch() = default;
  Batch(lla_context* context, const lla_batch_limits& limits) : limits_(limits) {
    size_t bytes = 0, alignment = 0;
    LM_CALL(lla_batch_size, context, &limits, &bytes, &alignment);
    memory_ = Buffer(bytes, alignment);
    lla_batch* batch = nullptr;
    LM_CALL(lla_batch_init, context, &limits, memory_.data(), memory_.bytes(), &batch);
    batch_.reset(batch);
    LM_CALL(lla_batch_device_size, context, &limits, &bytes, static_cast<size_t*>(nullptr));
    if (bytes == 0) return;
    device_memory_ = DeviceBuffer(context, bytes);
    LM_CALL(lla_batch_bind_device, batch, device_memory_.data(), device_memory_.bytes());
  }
  lla_batch* get() const { return batch_.get(); }
  const lla_batch_limits& limits() const { return limits_; }

 private:
  struct Discard {
    void operator()(lla_batch* p) const { lla_batch_discard(p); }
  };
  lla_batch_limits limits_ = LLA_BATCH_LIMITS_INIT;
  Buffer memory_;
  DeviceBuffer device_memory_;
  std::unique_ptr<lla_batch, Discard> batch_;
};

inline lla_index index_of(const int64_t* values) { return {values, LLA_I64, LLA_HOST}; }
inline lla_index no_index() { return {nullptr, 0, LLA_HOST}; }

// Bytes of workspace that a layer needs for a pass.
inline size_t workspace_bytes(const lla_layer* layer, const lla_batch_limits& limits, lla_pass pass) {
  size_t bytes = 0;
  LM_CALL(lla_layer_workspace, layer, &limits, pass, &bytes, static_cast<size_t*>(nullptr));
  return bytes;
}
inline size_t saved_bytes(const lla_layer* layer, const lla_batch_limits& limits) {
  size_t bytes = 0;
  LM_CALL(lla_layer_saved_size, layer, &limits, &bytes, static_cast<size_t*>(nullptr));
  return bytes;
}

}  // namespace lm
