// SPDX-License-Identifier: Apache-2.0
// Whether the current device runs the kernels of this folder, and how many blocks fill it.
#pragma once

#include <cstdlib>

#include "cuda/common/platform.h"

namespace lla::cuda::hopper {

// The emulated device is a Hopper one if the environment says so: tests choose the kernels by it.
inline bool is_hopper() {
#if defined(LLA_CUDA_EMULATED)
  return std::getenv("LLA_EMULATED_HOPPER") != nullptr;
#else
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
#endif
}

inline int multiprocessors() {
#if defined(LLA_CUDA_EMULATED)
  return 3;
#else
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return 132;
  return count;
#endif
}

}  // namespace lla::cuda::hopper
