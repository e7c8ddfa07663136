// SPDX-License-Identifier: Apache-2.0
// What only exists in machine code for sm_90a. A pass for another target compiles it to a trap: such a kernel must never be
// launched, and if it is, it fails instead of giving wrong numbers. The emulator (tests/emulator) has its own.
#pragma once

#include <cstdint>

#if defined(LLA_CUDA_EMULATED)
#include <hopper_emulator.h>
#else
#include <cuda_runtime.h>
#endif

// LLA_HOPPER(what the emulator does, what the device does); the emulator cannot do what is in LLA_ON_HOPPER.
#if defined(LLA_CUDA_EMULATED)
#define LLA_HOPPER(emulated, ...) emulated
#define LLA_ON_HOPPER(...) emulator::fail("an instruction that is not emulated")
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LLA_HOPPER(emulated, ...) __VA_ARGS__
#define LLA_ON_HOPPER(...) __VA_ARGS__
#else
#define LLA_HOPPER(emulated, ...) __trap()
#define LLA_ON_HOPPER(...) __trap()
#endif

namespace lla::cuda::hopper {

// Instructions take 32-bit addresses within the shared window.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
#if defined(LLA_CUDA_EMULATED)
  return emulator::shared_address(pointer);
#else
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
#endif
}

// In a kernel that was launched early (launch_early): what the kernel before it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() { LLA_HOPPER(, asm volatile("griddepcontrol.wait;" ::: "memory")); }
// As far as this block is concerned, the next kernel may begin, if it was launched early.
__device__ __forceinline__ void let_next_kernel_begin() { LLA_HOPPER(, asm volatile("griddepcontrol.launch_dependents;")); }

// True in one lane of the warp, always the same one. All lanes take part.
__device__ __forceinline__ bool elect_lane() {
  uint32_t elected = 0;
  LLA_HOPPER((__syncwarp(), elected = threadIdx.x % 32 == 0),
             asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
                          : "=r"(elected)));
  return elected != 0;
}

}  // namespace lla::cuda::hopper
