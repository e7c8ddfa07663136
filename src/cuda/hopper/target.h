// SPDX-License-Identifier: Apache-2.0
// What only exists in machine code for sm_90a. A pass for another target compiles it to a trap: such a kernel must never be
// launched, and if it is, it fails instead of giving wrong numbers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LLA_ON_HOPPER(...) __VA_ARGS__
#else
#define LLA_ON_HOPPER(...) __trap()
#endif

namespace lla::cuda::hopper {

// Instructions take 32-bit addresses within the shared window.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace lla::cuda::hopper
