// SPDX-License-Identifier: Apache-2.0
// Products on the tensor cores by a warpgroup (wgmma.m64nNk16): bf16 or fp16 operands, fp32 sums; B from shared memory, A from
// shared memory or registers. They run asynchronously:
//   fence_products(sum); multiply(sum, ...) ...; commit_products(); ... wait_products<0>(sum);
// In between nobody may touch the sums or an A in registers, but the compiler believes that each instruction is over once
// issued. fence and wait therefore name the registers as changed: nothing that touches them moves across. (If something does,
// ptxas serialises the products: warning C7510.)
#pragma once

#include "cuda/hopper/descriptor.h"
#include "cuda/hopper/matrix_copy.h"
#include "cuda/hopper/target.h"

namespace lla::cuda::hopper {

#if defined(LLA_CUDA_EMULATED)
template <class Registers>
void pin(Registers&) {}
#else
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}
#endif

// Before the first product of a series, and after registers were changed between two: those changes come first. Not needed
// between products that add to the same sums.
template <class... Registers>
__device__ __forceinline__ void fence_products(Registers&... registers) {
  (pin(registers), ...);
  LLA_HOPPER(, asm volatile("wgmma.fence.sync.aligned;" ::: "memory"));
}

// Closes a group of products.
__device__ __forceinline__ void commit_products() {
  LLA_HOPPER(emulator::commit_products(), asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"));
}

// Waits until at most kGroups of the latest groups are running. `registers`: the sums and the A of those that have ended.
template <int kGroups, class... Registers>
__device__ __forceinline__ void wait_products(Registers&... registers) {
  LLA_HOPPER(emulator::wait_products(kGroups), asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory"));
  (pin(registers), ...);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The sums as operands, and their names in the instruction.
#define LLA_SUMS_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define LLA_SUMS_16(i) LLA_SUMS_4(i), LLA_SUMS_4(i + 4), LLA_SUMS_4(i + 8), LLA_SUMS_4(i + 12)
#define LLA_SUMS_32(i) LLA_SUMS_16(i), LLA_SUMS_16(i + 16)
#define LLA_SUMS_64(i) LLA_SUMS_32(i), LLA_SUMS_32(i + 32)
#define LLA_SUMS_128(i) LLA_SUMS_64(i), LLA_SUMS_64(i + 64)
#define LLA_LIST_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LLA_LIST_32 \
  LLA_LIST_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LLA_LIST_64 \
  LLA_LIST_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LLA_LIST_128 \
  LLA_LIST_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// `flag` and `tail` name the operands after the sums.
#define LLA_WGMMA(type, list, columns, flag, tail, ...)                                                                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\nwgmma.mma_async.sync.aligned.m64" columns "k16.f32." type    \
               "." type " {" list "}, " tail ";\n}" : __VA_ARGS__)
#define LLA_WGMMA_SHARED(n, columns, flag, tail)                                                                            \
  if constexpr (kType == Half::kBf16) {                                                                                     \
    LLA_WGMMA("bf16", LLA_LIST_##n, columns, flag, tail, LLA_SUMS_##n(0) : "l"(a), "l"(b), "r"(add), "n"(kMajorA), "n"(kMajorB));\
  } else {                                                                                                                  \
    LLA_WGMMA("f16", LLA_LIST_##n, columns, flag, tail, LLA_SUMS_##n(0) : "l"(a), "l"(b), "r"(add), "n"(kMajorA), "n"(kMajorB));\
  }
#define LLA_WGMMA_REGISTERS(n, columns, flag, tail)                                                                         \
  if constexpr (kType == Half::kBf16) {                                                                                     \
    LLA_WGMMA("bf16", LLA_LIST_##n, columns, flag, tail, LLA_SUMS_##n(0)                                                    \
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kMajorB));                                \
  } else {                                                                                                                  \
    LLA_WGMMA("f16", LLA_LIST_##n, columns, flag, tail, LLA_SUMS_##n(0)                                                     \
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kMajorB));                                \
  }
#endif

// sum[64 x N] = or += a[64 x 16] b[16 x N], both described by descriptor.h. N = 2 kCount: 32, 64, 128 or 256; sum[i] is at
// wgmma_sum(thread, i). accumulate = false: the old sum is not read, so that nobody need clear it.
template <Half kType, Major kA, Major kB, int kCount>
__device__ __forceinline__ void multiply(float (&sum)[kCount], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kCount == 16 || kCount == 32 || kCount == 64 || kCount == 128, "N is 32, 64, 128 or 256");
#if defined(LLA_CUDA_EMULATED)
  emulator::multiply({2 * kCount, kType == Half::kBf16, kA == Major::kOuter, kB == Major::kOuter, false}, sum, nullptr, a, b,
                     accumulate);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kMajorA = static_cast<int>(kA), kMajorB = static_cast<int>(kB);
  const int add = accumulate;
  if constexpr (kCount == 16) {
    LLA_WGMMA_SHARED(16, "n32", "%18", "%16, %17, p, 1, 1, %19, %20");
  } else if constexpr (kCount == 32) {
    LLA_WGMMA_SHARED(32, "n64", "%34", "%32, %33, p, 1, 1, %35, %36");
  } else if constexpr (kCount == 64) {
    LLA_WGMMA_SHARED(64, "n128", "%66", "%64, %65, p, 1, 1, %67, %68");
  } else if constexpr (kCount == 128) {
    LLA_WGMMA_SHARED(128, "n256", "%130", "%128, %129, p, 1, 1, %131, %132");
  }
#else
  __trap();
#endif
}

// The same with a[64 x 16] in registers: element i of this thread at wgmma_a(thread, i).
template <Half kType, Major kB, int kCount>
__device__ __forceinline__ void multiply(float (&sum)[kCount], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(kCount == 16 || kCount == 32 || kCount == 64 || kCount == 128, "N is 32, 64, 128 or 256");
#if defined(LLA_CUDA_EMULATED)
  emulator::multiply({2 * kCount, kType == Half::kBf16, false, kB == Major::kOuter, true}, sum, a, 0, b, accumulate);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kMajorB = static_cast<int>(kB);
  const int add = accumulate;
  if constexpr (kCount == 16) {
    LLA_WGMMA_REGISTERS(16, "n32", "%21", "{%16, %17, %18, %19}, %20, p, 1, 1, %22");
  } else if constexpr (kCount == 32) {
    LLA_WGMMA_REGISTERS(32, "n64", "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, %38");
  } else if constexpr (kCount == 64) {
    LLA_WGMMA_REGISTERS(64, "n128", "%69", "{%64, %65, %66, %67}, %68, p, 1, 1, %70");
  } else if constexpr (kCount == 128) {
    LLA_WGMMA_REGISTERS(128, "n256", "%133", "{%128, %129, %130, %131}, %132, p, 1, 1, %134");
  }
#else
  __trap();
#endif
}

#undef LLA_SUMS_4
#undef LLA_SUMS_16
#undef LLA_SUMS_32
#undef LLA_SUMS_64
#undef LLA_SUMS_128
#undef LLA_LIST_16
#undef LLA_LIST_32
#undef LLA_LIST_64
#undef LLA_LIST_128
#undef LLA_WGMMA
#undef LLA_WGMMA_SHARED
#undef LLA_WGMMA_REGISTERS

}  // namespace lla::cuda::hopper
