// SPDX-License-Identifier: Apache-2.0
// types.h: element sizes, and the arithmetic of levels.
#include "lla/types.h"

#include "core/fenwick.h"
#include "plugin/numeric.h"

size_t lla_dtype_size(lla_dtype dtype) { return static_cast<size_t>(lla::dtype_size(dtype)); }

int64_t lla_levels_needed(int64_t length) { return lla::levels_needed(length); }

int64_t lla_level_of(int64_t query, int64_t key) { return key < 0 || key > query ? -1 : lla::level_of(query, key); }
