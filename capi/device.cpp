// SPDX-License-Identifier: Apache-2.0
// device.h: memory of the backend.
#include "lla/device.h"

#include "capi/handles.h"

using namespace lla;
using namespace lla::capi;

lla_status lla_device_allocate(lla_context* context, size_t bytes, void** memory, lla_error* error) {
  LLA_REQUIRE(context);
  LLA_REQUIRE(memory);
  const Context& known = *unwrap(context);
  LLA_ON_DEVICE(&known, nullptr);
  void* made = allocate_memory(known, bytes);
  if (!made)
    return fail(error, known.device ? LLA_OUT_OF_DEVICE_MEMORY : LLA_OUT_OF_MEMORY, "%s: no memory for %zu bytes", __func__,
                bytes);
  *memory = made;
  return LLA_OK;
}

void lla_device_release(lla_context* context, void* memory, size_t bytes) {
  if (!context || !memory) return;
  const DeviceScope scope(unwrap(context));
  release_memory(*unwrap(context), memory, bytes);
}

lla_status lla_device_copy(lla_context* context, void* to, const void* from, size_t bytes, void* stream, lla_error* error) {
  LLA_REQUIRE(context);
  const Context& known = *unwrap(context);
  if (bytes == 0) return check_stream(&known, stream, __func__, error);
  LLA_REQUIRE(to);
  LLA_REQUIRE(from);
  if (bytes > static_cast<size_t>(PTRDIFF_MAX))
    return fail(error, LLA_SIZE_OVERFLOW, "%s: bytes = %zu is too large", __func__, bytes);
  LLA_ON_DEVICE(&known, stream);
  return copy_memory(known, to, from, static_cast<int64_t>(bytes), stream, error);
}

lla_status lla_device_wait(lla_context* context, void* stream, lla_error* error) {
  LLA_REQUIRE(context);
  const Context& known = *unwrap(context);
  LLA_ON_DEVICE(&known, stream);
  return wait_for(known, stream, error);
}
