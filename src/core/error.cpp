// SPDX-License-Identifier: Apache-2.0
// Formats a failure into the caller's lla_error, cut to what the caller's struct holds.
#include "core/error.h"

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>

namespace lla {

namespace {

// Drops an incomplete UTF-8 sequence that a cut left at the end.
void drop_partial_character(char* text) {
  const size_t length = std::strlen(text);
  size_t first = length;  // of the last character
  while (first > 0 && (static_cast<unsigned char>(text[first - 1]) & 0xc0u) == 0x80u) --first;
  if (first == 0) return;
  const unsigned char lead = static_cast<unsigned char>(text[first - 1]);
  const size_t expected = lead < 0x80u ? 1 : lead < 0xe0u ? 2 : lead < 0xf0u ? 3 : 4;
  if (length - (first - 1) < expected) text[first - 1] = 0;
}

}  // namespace

lla_status fail(lla_error* error, lla_status status, const char* format, ...) noexcept {
  if (!error || error->struct_size < offsetof(lla_error, text) + 1) return status;
  error->code = status;
  size_t capacity = error->struct_size - offsetof(lla_error, text);
  if (capacity > sizeof error->text) capacity = sizeof error->text;
  va_list arguments;
  va_start(arguments, format);
  const int length = std::vsnprintf(error->text, capacity, format, arguments);
  va_end(arguments);
  if (length < 0) {
    error->text[0] = 0;
  } else if (static_cast<size_t>(length) >= capacity) {
    drop_partial_character(error->text);
  }
  return status;
}

}  // namespace lla
