// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory on which threads and bulk copies arrive, and the orderings that go with them.
#pragma once

#include "cuda/hopper/target.h"

#if !defined(LLA_CUDA_EMULATED)
#include <cuda/ptx>
#endif

namespace lla::cuda::hopper {

#if !defined(LLA_CUDA_EMULATED)
namespace ptx = ::cuda::ptx;
#endif

// Lies in shared memory. A phase ends when all arrivals and all announced bytes have come; the next begins at once.
using Barrier = uint64_t;

// By one thread, before publish_barriers() and a __syncthreads() of the block.
__device__ __forceinline__ void init_barrier(Barrier* barrier, uint32_t arrivals) {
  LLA_HOPPER(emulator::init_barrier(barrier, arrivals), ptx::mbarrier_init(barrier, arrivals));
}

// By the thread that initialised: the copy engine must see the barriers too, and it is no party to __syncthreads().
__device__ __forceinline__ void publish_barriers() {
  LLA_HOPPER(, ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster));
}

// What this thread did to shared memory happens before whoever waits for the phase.
__device__ __forceinline__ void arrive(Barrier* barrier) {
  LLA_HOPPER(emulator::arrive(barrier, 0),
             ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier));
}

// Arrives, and announces the bytes that copies will bring. The bytes are those of whole boxes, also where a box hangs over
// the tensor's edge (there zeros are brought).
__device__ __forceinline__ void arrive_expect_bytes(Barrier* barrier, uint32_t bytes) {
  LLA_HOPPER(emulator::arrive(barrier, bytes),
             ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier, bytes));
}

// Waits for the end of a phase. Phases have parities 0, 1, 0, ...; the phase before the first counts as ended, so that
// waiting for parity 1 on a fresh barrier ("the buffer is free") returns at once. A waiter must not fall two phases behind.
__device__ __forceinline__ void wait(Barrier* barrier, uint32_t parity) {
#if defined(LLA_CUDA_EMULATED)
  emulator::wait_parity(barrier, parity);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // The instruction itself suspends the thread for a while: no sleep is needed.
  while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cta, barrier, parity)) {
  }
#else
  __trap();
#endif
}

// Ordinary writes of this thread to shared memory become visible to bulk copies and to wgmma, which read by another path.
// Each writing thread calls this before the barrier after which the copy or product is issued.
__device__ __forceinline__ void fence_shared_writes() { LLA_HOPPER(, ptx::fence_proxy_async(ptx::space_shared)); }

// __syncthreads() for some warps of the block: number 1 ... 15 (0 is __syncthreads() itself), threads a multiple of 32.
__device__ __forceinline__ void sync_some(int number, int threads) {
  LLA_HOPPER(emulator::sync_number(number, threads),
             asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(number), "r"(threads)
                          : "memory"));
}

}  // namespace lla::cuda::hopper
