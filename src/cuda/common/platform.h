// SPDX-License-Identifier: Apache-2.0
// CUDA, or its emulation on the CPU (tests/emulator), under one roof. Everything that differs between the two is here.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(LLA_CUDA_EMULATED)
#include <cuda_emulator.h>
#else
#include <cuda_runtime.h>
#endif

#include "lla/status.h"

namespace lla::cuda {

// Text of the last error that a call of this thread met.
inline thread_local const char* last_error_text = "no error";

// Forgets an error that is being answered, so that nobody else meets it.
inline int32_t status_of(cudaError_t error) {
  if (error == cudaSuccess) return LLA_OK;
  last_error_text = cudaGetErrorString(error);
  cudaGetLastError();
  return error == cudaErrorMemoryAllocation ? LLA_OUT_OF_DEVICE_MEMORY : LLA_DEVICE_ERROR;
}

constexpr unsigned kAllLanes = 0xffffffffu;

// The dynamic shared memory of the block, aligned to 1024 bytes.
__device__ __forceinline__ char* shared_memory() {
#if defined(LLA_CUDA_EMULATED)
  return emulator::shared_base;
#else
  extern __shared__ __align__(1024) char lla_shared[];
  return lla_shared;
#endif
}

// exp(x) for x <= 0, -inf included. About 2 ulp.
__device__ __forceinline__ float decay_of(float log_decay) { return expf(log_decay); }

// Kernels walk over their tasks with a stride of gridDim.x, so that a grid may be smaller than the number of tasks. A block
// must not leave the loop's body with shared memory still being read: end it with __syncthreads().
constexpr int64_t kMostBlocks = int64_t{1} << 30;

// Blocks along three axes; y and z at most kMostBlocksAcross.
struct Grid {
  unsigned x = 1, y = 1, z = 1;
};
constexpr int64_t kMostBlocksAcross = 65535;

// Puts a kernel on a stream. Returns an lla_status.
template <class... Parameters>
int32_t launch_grid(void (*kernel)(Parameters...), Grid grid, int threads, size_t shared_bytes, void* stream,
                    const Parameters&... arguments) {
#if defined(LLA_CUDA_EMULATED)
  (void)stream;
  if (shared_bytes > emulator::kSharedBytes) return LLA_INTERNAL;
  emulator::run_kernel({grid.x, grid.y, grid.z}, {static_cast<unsigned>(threads), 1, 1}, [&] { kernel(arguments...); });
  return LLA_OK;
#else
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return status_of(error);
  }
  kernel<<<dim3(grid.x, grid.y, grid.z), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  return status_of(cudaGetLastError());
#endif
}
// The same with at most one block for each task. No tasks: nothing happens.
template <class... Parameters>
int32_t launch(void (*kernel)(Parameters...), int64_t tasks, int threads, size_t shared_bytes, void* stream,
               const Parameters&... arguments) {
  if (tasks <= 0) return LLA_OK;
  const unsigned blocks = static_cast<unsigned>(tasks < kMostBlocks ? tasks : kMostBlocks);
  return launch_grid(kernel, Grid{blocks, 1, 1}, threads, shared_bytes, stream, arguments...);
}

// The same for a kernel that may begin before the one ahead of it on the stream has ended (Hopper and later), once all
// blocks of that have ended or said so: it waits itself before it reads what that one writes.
template <class... Parameters>
int32_t launch_early(void (*kernel)(Parameters...), int64_t tasks, int threads, size_t shared_bytes, void* stream,
                     const Parameters&... arguments) {
#if defined(LLA_CUDA_EMULATED)
  return launch(kernel, tasks, threads, shared_bytes, stream, arguments...);
#else
  if (tasks <= 0) return LLA_OK;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return status_of(error);
  }
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tasks < kMostBlocks ? tasks : kMostBlocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  return status_of(cudaLaunchKernelEx(&config, kernel, arguments...));
#endif
}

// Brings a kernel onto the current device now instead of at its first launch.
template <class... Parameters>
int32_t load_kernel(void (*kernel)(Parameters...)) {
#if defined(LLA_CUDA_EMULATED)
  (void)kernel;
  return LLA_OK;
#else
  cudaFuncAttributes attributes;
  return status_of(cudaFuncGetAttributes(&attributes, kernel));
#endif
}

}  // namespace lla::cuda
