// SPDX-License-Identifier: Apache-2.0
// How much scratch a call should need at most: work on a few heads after the other needs less, and takes hardly longer.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "core/checked.h"

namespace lla::cuda {

// Where the smallest piece of work does not need more. The emulated device has less if the environment says so.
inline int64_t most_scratch() {
#if defined(LLA_CUDA_EMULATED)
  if (const char* bytes = std::getenv("LLA_EMULATED_SCRATCH")) return std::atoll(bytes);
#endif
  return int64_t{460} << 20;
}

inline bool fits_scratch(Size bytes, int64_t most = most_scratch()) { return bytes.valid() && bytes.value() <= most; }

// What a kernel that works on slices measures, of which bytes_of(heads) is a Size: enough for any call within the limits,
// which may take larger slices than the limits themselves would. -1: overflow.
template <class BytesOf>
int64_t sliced_bytes(int64_t heads, BytesOf bytes_of, int64_t limit = most_scratch()) {
  const Size one = bytes_of(int64_t{1}), all = bytes_of(heads);
  if (!one.valid()) return -1;
  const int64_t most = fits_scratch(all, limit) ? all.value() : limit;
  return one.value() > most ? one.value() : most;
}

}  // namespace lla::cuda
