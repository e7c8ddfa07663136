// SPDX-License-Identifier: Apache-2.0
// Copies of 16 bytes from global to shared memory that run while the thread goes on (cp.async), in groups.
#pragma once

#include <cstring>

#include "cuda/common/platform.h"

namespace lla::cuda {

// Both addresses aligned to 16 bytes.
__device__ __forceinline__ void copy_async16(void* to, const void* from) {
#if defined(LLA_CUDA_EMULATED)
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
#endif
}

// The same of the first `bytes` (0 ... 16) bytes; the others become zero.
__device__ __forceinline__ void copy_async16(void* to, const void* from, int bytes) {
#if defined(LLA_CUDA_EMULATED)
  std::memset(to, 0, 16);
  std::memcpy(to, from, static_cast<size_t>(bytes));
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes)
               : "memory");
#endif
}

// Closes a group of the thread's copies; a group may be empty.
__device__ __forceinline__ void commit_copies() {
#if !defined(LLA_CUDA_EMULATED)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kLeft of the thread's latest groups are under way. Other threads see the data after a barrier.
template <int kLeft>
__device__ __forceinline__ void wait_copies() {
#if !defined(LLA_CUDA_EMULATED)
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// Waits for all copies of the thread, in groups or not.
__device__ __forceinline__ void wait_all_copies() {
#if !defined(LLA_CUDA_EMULATED)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace lla::cuda
