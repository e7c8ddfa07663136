// SPDX-License-Identifier: Apache-2.0
// Answers of the query functions: a text or a number into a buffer of the caller, with its size in and out.
#pragma once

#include <cstddef>
#include <cstring>

#include "core/error.h"

namespace lla::capi {

inline lla_status answer_bytes(const void* answer, size_t bytes, void* value, size_t* size, const char* function,
                               lla_error* error) noexcept {
  const size_t given = *size;
  *size = bytes;
  if (!value) return LLA_OK;
  if (given < bytes)
    return fail(error, LLA_BUFFER_TOO_SMALL, "%s: value has %zu bytes, the answer needs %zu", function, given, bytes);
  std::memcpy(value, answer, bytes);
  return LLA_OK;
}

inline lla_status answer_text(const char* text, void* value, size_t* size, const char* function, lla_error* error) noexcept {
  return answer_bytes(text, std::strlen(text) + 1, value, size, function, error);
}

template <class T>
lla_status answer_number(T number, void* value, size_t* size, const char* function, lla_error* error) noexcept {
  return answer_bytes(&number, sizeof number, value, size, function, error);
}

}  // namespace lla::capi
