// SPDX-License-Identifier: Apache-2.0
// Plain loops over numbers, compiled once more for a wider instruction set and run where the machine has it. Products and
// sums stay apart there (AVX2 has no fused multiply-add by itself), so that the bits are the same.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define LM_WIDE __attribute__((target("avx2")))
#endif
#if defined(__GNUC__)
#define LM_LOOP __attribute__((always_inline)) inline  // becomes part of its caller, whatever that is compiled for
#else
#define LM_LOOP inline
#endif

namespace lm {

#ifdef LM_WIDE
template <class Loop, class... Arguments>
LM_WIDE void run_wide(Arguments... arguments) {
  Loop::run(arguments...);
}
#endif

// Loop::run(arguments...), a static LM_LOOP function.
template <class Loop, class... Arguments>
void run_loop(Arguments... arguments) {
#ifdef LM_WIDE
  static const bool wide = __builtin_cpu_supports("avx2");
  if (wide) return run_wide<Loop>(arguments...);
#endif
  Loop::run(arguments...);
}

}  // namespace lm
