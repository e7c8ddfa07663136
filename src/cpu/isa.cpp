// SPDX-License-Identifier: Apache-2.0
// Which instruction set this CPU has. Compiled for the baseline: nothing here may use what it asks for.
#include "lla/context.h"
#include "plugin/backend.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

namespace lla {
namespace {

#if defined(__x86_64__)
bool has_f16c() {  // Clang 14's __builtin_cpu_supports() does not know it
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (1u << 29)) != 0;
}

int32_t probe() {
  // The operating system's part (saved registers) is in what __builtin_cpu_supports() says of AVX and AVX-512.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("sse4.2") && has_f16c();
  if (!avx2) return LLA_ISA_BASELINE;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  return avx512 ? LLA_ISA_AVX512 : LLA_ISA_AVX2;
}
#elif defined(__aarch64__)
int32_t probe() { return LLA_ISA_NEON; }  // part of the architecture
#else
int32_t probe() { return LLA_ISA_BASELINE; }
#endif

}  // namespace

int32_t cpu_isa() {
  static const int32_t isa = probe();
  return isa;
}

const char* isa_name(int32_t isa) {
  switch (isa) {
    case LLA_ISA_BASELINE: return "baseline";
    case LLA_ISA_AVX2: return "avx2";
    case LLA_ISA_AVX512: return "avx512";
    case LLA_ISA_NEON: return "neon";
    default: return "default";
  }
}

}  // namespace lla
