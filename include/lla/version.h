/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file version.h
 * @brief Version of the header and of the library that is loaded.
 *
 * Include <lla/lla.h>. Every macro has a run-time twin, so that a binding needs no header. All functions of this file may
 * be called before anything else, from any thread, also after fork; they touch no device and allocate nothing.
 */
#ifndef LLA_VERSION_H
#define LLA_VERSION_H

#include "export.h"

/** Major version: changes with an incompatible interface after 1.0. */
#define LLA_VERSION_MAJOR 0
/** Minor version: grows with new functions. */
#define LLA_VERSION_MINOR 1
/** Patch version: grows with repairs. */
#define LLA_VERSION_PATCH 0
/** The three numbers as text. */
#define LLA_VERSION_STRING "0.1.0"
/** Number of the binary interface, with which the soname ends: liblla.so.0. */
#define LLA_ABI_VERSION 0

LLA_BEGIN_DECLS

/** @brief Version of the loaded library as a number. Since 0.1. @return major * 10000 + minor * 100 + patch. */
LLA_API int32_t lla_version(void);
/** @brief Version of the loaded library as text. Since 0.1. @return "0.1.0", static, never NULL. */
LLA_API const char *lla_version_string(void);
/** @brief Number of the binary interface of the loaded library. Since 0.1. @return the number in the soname. */
LLA_API int32_t lla_abi_version(void);
/** @brief Identity of the source that the library was built from. Since 0.1.
 *  @return a revision or "unknown", static, never NULL. */
LLA_API const char *lla_source_id(void);
/** @brief How many facts about the build lla_build_option() knows. Since 0.1. @return the number. */
LLA_API int64_t lla_build_option_count(void);
/**
 * @brief One fact about the build, as "name=value" ("compiler=...", "targets=baseline,avx2,avx512"). Since 0.1.
 * @param index  0 ... lla_build_option_count() - 1.
 * @return static text, or NULL if the index is out of range.
 */
LLA_API const char *lla_build_option(int64_t index);

LLA_END_DECLS

#endif
