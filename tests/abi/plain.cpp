// SPDX-License-Identifier: Apache-2.0
// A shared library with nothing of its own in it but the question which CPU this is, which the compiler's run-time answers
// (and prepares at load time). What start-up code it has is the tool chain's; objects.py allows that and no more.
extern "C" int lla_plain_library(void);

int lla_plain_library(void) {
#if defined(__x86_64__) || defined(__i386__)
  return __builtin_cpu_supports("avx2");
#else
  return 0;
#endif
}
