// SPDX-License-Identifier: Apache-2.0
// Versioned structs: brings a caller's struct of an older or newer header to the size that this library knows. Every size
// from version 0.1 up is taken; fields that the caller does not have yet read as zero, and fields that this library does not
// know must be zero.
#pragma once

#include <cstddef>
#include <cstring>

#include "core/error.h"
#include "lla/lla.h"

namespace lla::capi {

// A larger struct_size than this is not the size of a struct, so that its tail is not looked at.
constexpr size_t kLargestStruct = 4096;

// Size of the struct in version 0.1. The field named is the last that 0.1 had, whatever is appended later.
template <class T>
inline constexpr size_t kFirstSize = 0;

#define LLA_FIRST_SIZE(type, last)           \
  template <>                                \
  inline constexpr size_t kFirstSize<type> = \
      (offsetof(type, last) + sizeof(type::last) + alignof(type) - 1) / alignof(type) * alignof(type)

LLA_FIRST_SIZE(lla_allocator, user);
LLA_FIRST_SIZE(lla_parallel, user);
LLA_FIRST_SIZE(lla_log, user);
LLA_FIRST_SIZE(lla_context_options, log);
LLA_FIRST_SIZE(lla_batch_limits, reserved);
LLA_FIRST_SIZE(lla_rows, final_gradient_slots);
LLA_FIRST_SIZE(lla_layer_desc, reserved);
LLA_FIRST_SIZE(lla_forward_args, stream);
LLA_FIRST_SIZE(lla_backward_args, stream);
LLA_FIRST_SIZE(lla_state_desc, node_blocks);
LLA_FIRST_SIZE(lla_block_geometry, layout);
LLA_FIRST_SIZE(lla_image_info, tag);

#undef LLA_FIRST_SIZE

// Copies *given into *known. `given` is not null; `function` and `name` are for the text of an error.
template <class T>
lla_status read_struct(const T* given, const char* function, const char* name, T* known, lla_error* error) noexcept {
  static_assert(kFirstSize<T> != 0 && offsetof(T, struct_size) == 0);
  const char* bytes = reinterpret_cast<const char*>(given);
  size_t size;
  std::memcpy(&size, bytes, sizeof size);
  if (size < kFirstSize<T>)
    return fail(error, LLA_STRUCT_VERSION, "%s: %s.struct_size is %zu, less than %zu", function, name, size, kFirstSize<T>);
  if (size > kLargestStruct)
    return fail(error, LLA_STRUCT_VERSION, "%s: %s.struct_size is %zu, more than any version has", function, name, size);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0)
      return fail(error, LLA_STRUCT_VERSION, "%s: %s sets a field (byte %zu) that this version does not know", function,
                  name, i);
  }
  std::memset(static_cast<void*>(known), 0, sizeof(T));
  std::memcpy(static_cast<void*>(known), bytes, size < sizeof(T) ? size : sizeof(T));
  known->struct_size = sizeof(T);
  return LLA_OK;
}

// Copies the fields that the caller has back into his struct; its struct_size stays.
template <class T>
void write_struct(const T& known, T* given) noexcept {
  const size_t size = given->struct_size;
  std::memcpy(static_cast<void*>(given), &known, size < sizeof(T) ? size : sizeof(T));
  given->struct_size = size;
}

}  // namespace lla::capi
