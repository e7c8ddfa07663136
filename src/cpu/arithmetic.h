// SPDX-License-Identifier: Apache-2.0
// The floating-point environment of a task: rounding to nearest, no traps, numbers too small for a float's exponent are
// zero.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace lla::cpu {

// Sets it for as long as it lives; then the caller's is back, its flags untouched. So bits do not depend on what a host has
// set, its traps do not end it, and gradients that decay over long distances do not cost the hundredfold that some CPUs take
// for subnormal numbers.
class Arithmetic {
 public:
  Arithmetic(const Arithmetic&) = delete;
  Arithmetic& operator=(const Arithmetic&) = delete;
#if defined(__x86_64__)
  Arithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(kMasked | kFlush | kFromZero); }
  ~Arithmetic() { _mm_setcsr(saved_); }

 private:
  static constexpr uint32_t kMasked = 0x1f80, kFlush = 0x8000, kFromZero = 0x0040;
  uint32_t saved_;
#elif defined(__aarch64__)
  Arithmetic() : saved_(0) {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(kFlush));
  }
  ~Arithmetic() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  static constexpr uint64_t kFlush = uint64_t{1} << 24;
  uint64_t saved_;
#else
  Arithmetic() {}   // the environment is the caller's
  ~Arithmetic() {}  // not trivial, so that no compiler calls it unused
#endif
};

}  // namespace lla::cpu
