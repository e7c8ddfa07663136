// SPDX-License-Identifier: Apache-2.0
// Which Highway targets are compiled, and the settings under which its headers need no run-time library.
// To be included before hwy/foreach_target.h.
#pragma once

#undef HWY_DISABLED_TARGETS
// Kept: the portable one (baseline), AVX2, AVX-512, NEON.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#ifndef HWY_COMPILE_ALL_ATTAINABLE
#define HWY_COMPILE_ALL_ATTAINABLE  // the baseline too, whatever the compiler is told about the CPU
#endif
#ifndef HWY_BROKEN_EMU128
#define HWY_BROKEN_EMU128 0  // the compiler bug it avoids is about 16-bit high products, which are not used here
#endif
#ifndef HWY_DISABLE_PCLMUL_AES
#define HWY_DISABLE_PCLMUL_AES  // not used; a CPU need not have it
#endif
#ifndef HWY_IS_DEBUG_BUILD
#define HWY_IS_DEBUG_BUILD 0  // its assertions would need Highway's library
#endif
