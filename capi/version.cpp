// SPDX-License-Identifier: Apache-2.0
// version.h: identity of the loaded library.
#include "lla/version.h"

#ifndef LLA_SOURCE_ID
#define LLA_SOURCE_ID "unknown"
#endif

namespace {

#if defined(__clang__)
#define LLA_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define LLA_COMPILER "gcc " __VERSION__
#else
#define LLA_COMPILER "unknown"
#endif

#if defined(__x86_64__)
#define LLA_ARCHITECTURE "x86_64"
#define LLA_TARGETS "baseline,avx2,avx512"
#elif defined(__aarch64__)
#define LLA_ARCHITECTURE "aarch64"
#define LLA_TARGETS "neon"
#else
#define LLA_ARCHITECTURE "other"
#define LLA_TARGETS "baseline"
#endif

#if defined(__OPTIMIZE__)
#define LLA_OPTIMIZED "yes"
#else
#define LLA_OPTIMIZED "no"
#endif

constexpr const char* kOptions[] = {
    "version=" LLA_VERSION_STRING, "source=" LLA_SOURCE_ID,    "compiler=" LLA_COMPILER, "architecture=" LLA_ARCHITECTURE,
    "targets=" LLA_TARGETS,        "optimized=" LLA_OPTIMIZED, "backends=cpu,reference",
};
constexpr int64_t kOptionCount = static_cast<int64_t>(sizeof kOptions / sizeof kOptions[0]);

}  // namespace

int32_t lla_version(void) { return LLA_VERSION_MAJOR * 10000 + LLA_VERSION_MINOR * 100 + LLA_VERSION_PATCH; }

const char* lla_version_string(void) { return LLA_VERSION_STRING; }

int32_t lla_abi_version(void) { return LLA_ABI_VERSION; }

const char* lla_source_id(void) { return LLA_SOURCE_ID; }

int64_t lla_build_option_count(void) { return kOptionCount; }

const char* lla_build_option(int64_t index) { return index < 0 || index >= kOptionCount ? nullptr : kOptions[index]; }
