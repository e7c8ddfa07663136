// SPDX-License-Identifier: Apache-2.0
// What a function's callers guarantee, said to the static analyser, which sees one file at a time. No code, no branch:
// inputs that a caller of the library can get wrong are checked before anything runs, and by a status.
#pragma once

#ifdef __clang_analyzer__
#define LLA_CONTRACT(condition)                \
  do {                                         \
    if (!(condition)) __builtin_unreachable(); \
  } while (false)
#else
#define LLA_CONTRACT(condition) static_cast<void>(sizeof(!(condition)))
#endif
