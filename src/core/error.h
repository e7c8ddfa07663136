// SPDX-License-Identifier: Apache-2.0
// Reports a failure into the caller's lla_error. No allocation, no exception.
#pragma once

#include "lla/status.h"

namespace lla {

// Writes code and formatted text if `error` is not null and its struct_size covers the fields; returns `status`.
[[gnu::format(printf, 3, 4)]] lla_status fail(lla_error* error, lla_status status, const char* format, ...) noexcept;

}  // namespace lla

// Returns from the calling function if `expression` is not LLA_OK.
#define LLA_TRY(expression)                                                  \
  do {                                                                       \
    if (const lla_status lla_try_ = (expression); lla_try_) return lla_try_; \
  } while (0)
