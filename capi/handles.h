// SPDX-License-Identifier: Apache-2.0
// What the opaque handles of the interface are, and the checks that all entries share. Entries call nothing that throws, so
// that nothing can cross the boundary.
#pragma once

#include <atomic>
#include <cstdint>

#include "cells/layer.h"
#include "cells/program.h"
#include "core/batch.h"
#include "core/context.h"
#include "core/error.h"
#include "core/state.h"
#include "lla/lla.h"

namespace lla::capi {

// Behind lla_state: the core's state, and the layers that it was made for.
struct StateHandle {
  std::atomic<int64_t> references{1};
  Context* context = nullptr;
  State* state = nullptr;
  Layer** layers = nullptr;  // [layer_count], each with a reference
  int64_t layer_count = 0;
};

inline Context* unwrap(lla_context* p) { return reinterpret_cast<Context*>(p); }
inline const Context* unwrap(const lla_context* p) { return reinterpret_cast<const Context*>(p); }
inline Layer* unwrap(lla_layer* p) { return reinterpret_cast<Layer*>(p); }
inline const Layer* unwrap(const lla_layer* p) { return reinterpret_cast<const Layer*>(p); }
inline StateHandle* unwrap(lla_state* p) { return reinterpret_cast<StateHandle*>(p); }
inline const StateHandle* unwrap(const lla_state* p) { return reinterpret_cast<const StateHandle*>(p); }
inline Batch* unwrap(lla_batch* p) { return reinterpret_cast<Batch*>(p); }
inline const Batch* unwrap(const lla_batch* p) { return reinterpret_cast<const Batch*>(p); }
inline Program* unwrap(lla_tasks* p) { return reinterpret_cast<Program*>(p); }
inline const Program* unwrap(const lla_tasks* p) { return reinterpret_cast<const Program*>(p); }

inline lla_context* wrap(Context* p) { return reinterpret_cast<lla_context*>(p); }
inline lla_layer* wrap(Layer* p) { return reinterpret_cast<lla_layer*>(p); }
inline lla_state* wrap(StateHandle* p) { return reinterpret_cast<lla_state*>(p); }
inline lla_batch* wrap(Batch* p) { return reinterpret_cast<lla_batch*>(p); }
inline lla_tasks* wrap(Program* p) { return reinterpret_cast<lla_tasks*>(p); }

inline lla_status null_pointer(lla_error* error, const char* function, const char* argument) noexcept {
  return fail(error, LLA_NULL_POINTER, "%s: %s is NULL", function, argument);
}

inline lla_status negative_count(lla_error* error, const char* function, const char* name, int64_t count) noexcept {
  return fail(error, LLA_INVALID_ARGUMENT, "%s: %s is negative (%lld)", function, name, static_cast<long long>(count));
}

// An array of `count` entries: may be NULL only if it has none.
inline lla_status check_array(const void* data, int64_t count, const char* function, const char* data_name,
                              const char* count_name, lla_error* error) noexcept {
  if (count < 0) return negative_count(error, function, count_name, count);
  if (count > 0 && !data) return null_pointer(error, function, data_name);
  return LLA_OK;
}

inline bool is_batch(const lla_batch* batch) noexcept {
  return reinterpret_cast<uintptr_t>(batch) % alignof(Batch) == 0 && unwrap(batch)->magic == kBatchMagic;
}

// `batch` is not null.
inline lla_status check_batch_handle(const lla_batch* batch, const char* function, const char* argument,
                                     lla_error* error) noexcept {
  if (!is_batch(batch))
    return fail(error, LLA_INVALID_ARGUMENT, "%s: %s was not made by lla_batch_init()", function, argument);
  return LLA_OK;
}

inline lla_status check_context(const Context* one, const Context* other, const char* function, const char* argument,
                                lla_error* error) noexcept {
  if (one != other) return fail(error, LLA_WRONG_CONTEXT, "%s: %s is of another context", function, argument);
  return LLA_OK;
}

// A backend on the CPU has no streams.
inline lla_status check_stream(const Context* context, const void* stream, const char* function, lla_error* error) noexcept {
  if (stream && !context->device) return fail(error, LLA_INVALID_ARGUMENT, "%s: stream must be NULL on the CPU", function);
  return LLA_OK;
}

inline lla_status check_slot(const State& state, int64_t slot, const char* function, lla_error* error) noexcept {
  if (slot < 0 || slot >= state.plan().slots)
    return fail(error, LLA_INVALID_ARGUMENT, "%s: slot is %lld, the state has %lld", function, static_cast<long long>(slot),
                static_cast<long long>(state.plan().slots));
  return LLA_OK;
}

inline lla_status check_layer_index(int64_t layers, int64_t index, const char* function, lla_error* error) noexcept {
  if (index < 0 || index >= layers)
    return fail(error, LLA_INVALID_ARGUMENT, "%s: layer_index is %lld, the group has %lld layers", function,
                static_cast<long long>(index), static_cast<long long>(layers));
  return LLA_OK;
}

}  // namespace lla::capi

// Refuses a null argument of the calling entry, which has a parameter `error`.
#define LLA_REQUIRE(argument)                                                      \
  do {                                                                             \
    if (!(argument)) return ::lla::capi::null_pointer(error, __func__, #argument); \
  } while (0)

// Refuses a stream where there is none, and makes the context's device the current one until the entry returns.
#define LLA_ON_DEVICE(context, stream)                                      \
  LLA_TRY(::lla::capi::check_stream((context), (stream), __func__, error)); \
  const ::lla::DeviceScope lla_device_scope_(context);                      \
  LLA_TRY(lla_device_scope_.check(error))
