// SPDX-License-Identifier: Apache-2.0
// Preloaded before a program of the test suites, runs it on a CUDA device as it is: contexts of the CPU become contexts of
// the device, batches get their device memory, and calls wait for their work. Tensors must be memory that the device
// reaches: managed_malloc.cpp sees to that, and under the emulator all memory is.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include "lla/lla.h"

namespace {

template <class Function>
Function* next(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  if (!found) {
    std::fprintf(stderr, "device_shim: %s is not there\n", name);
    std::abort();
  }
  return reinterpret_cast<Function*>(found);
}
#define NEXT(name) (next<decltype(name)>(#name))

struct DeviceMemory {
  lla_context* context = nullptr;
  void* memory = nullptr;
  size_t bytes = 0;
};

std::mutex mutex;
// By batch. Never destroyed: programs may end in any way.
std::unordered_map<const void*, DeviceMemory>& batches() {
  static auto* map = new std::unordered_map<const void*, DeviceMemory>;
  return *map;
}

lla_context* context_of(const lla_batch* batch) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = batches().find(batch);
  return found == batches().end() ? nullptr : found->second.context;
}

lla_status wait(const lla_batch* batch, lla_status status, lla_error* error) {
  lla_context* context = status == LLA_OK ? context_of(batch) : nullptr;
  return context ? NEXT(lla_device_wait)(context, nullptr, error) : status;
}

// The driver takes its memory back when a program ends, before the program's own objects are gone: leave without them.
void leave_at_exit() {
  static std::once_flag once;
  std::call_once(once, [] {
    on_exit(
        [](int status, void*) {
          std::fflush(nullptr);
          _exit(status);
        },
        nullptr);
  });
}

}  // namespace

extern "C" {

LLA_API lla_status lla_context_create(const lla_context_options* options, lla_context** context, lla_error* error) {
  lla_context_options changed = LLA_CONTEXT_OPTIONS_INIT;
  if (!options || options->struct_size == sizeof changed) {
    if (options) changed = *options;
    if (changed.backend == LLA_BACKEND_AUTO || changed.backend == LLA_BACKEND_CPU) changed.backend = LLA_BACKEND_CUDA;
    options = &changed;
  }
  const lla_status status = NEXT(lla_context_create)(options, context, error);
  leave_at_exit();
  return status;
}

LLA_API lla_status lla_batch_init(lla_context* context, const lla_batch_limits* limits, void* memory, size_t bytes,
                                  lla_batch** batch, lla_error* error) {
  const lla_status status = NEXT(lla_batch_init)(context, limits, memory, bytes, batch, error);
  if (status != LLA_OK) return status;
  size_t needed = 0;
  static_cast<void>(NEXT(lla_batch_device_size)(context, limits, &needed, nullptr, nullptr));
  const std::lock_guard<std::mutex> lock(mutex);
  DeviceMemory& kept = batches()[*batch];
  kept.context = nullptr;  // another batch may have lain at this address
  if (needed == 0) return status;
  if (kept.bytes < needed) {  // what was there may still be in use by launched work: it is left
    if (NEXT(lla_device_allocate)(context, needed, &kept.memory, error) != LLA_OK) return LLA_OUT_OF_DEVICE_MEMORY;
    kept.bytes = needed;
  }
  kept.context = context;
  return NEXT(lla_batch_bind_device)(*batch, kept.memory, kept.bytes, error);
}

LLA_API lla_status lla_layer_forward(const lla_layer* layer, const lla_forward_args* arguments, lla_error* error) {
  const lla_status status = NEXT(lla_layer_forward)(layer, arguments, error);
  return wait(arguments ? arguments->batch : nullptr, status, error);
}

LLA_API lla_status lla_layer_backward(const lla_layer* layer, const lla_backward_args* arguments, lla_error* error) {
  const lla_status status = NEXT(lla_layer_backward)(layer, arguments, error);
  return wait(arguments ? arguments->batch : nullptr, status, error);
}

LLA_API lla_status lla_state_commit(lla_state* state, lla_batch* batch, lla_index accepted, void* stream, lla_error* error) {
  const lla_status status = NEXT(lla_state_commit)(state, batch, accepted, stream, error);
  return wait(batch, status, error);
}

}  // extern "C"
