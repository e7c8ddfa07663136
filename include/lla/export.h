/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file export.h
 * @brief Linkage of the public functions, and the two standard headers that the interface needs.
 */
#ifndef LLA_EXPORT_H
#define LLA_EXPORT_H

#include <stddef.h>
#include <stdint.h>

/** Marks a function of the shared library. Define LLA_STATIC when linking the static archive. */
#if defined(LLA_STATIC)
#define LLA_API
#elif defined(__GNUC__)
#define LLA_API __attribute__((visibility("default")))
#else
#define LLA_API
#endif

#ifdef __cplusplus
/** Opens a block of C declarations. */
#define LLA_BEGIN_DECLS extern "C" {
/** Closes a block of C declarations. */
#define LLA_END_DECLS }
#else
/** Opens a block of C declarations. */
#define LLA_BEGIN_DECLS
/** Closes a block of C declarations. */
#define LLA_END_DECLS
#endif

#endif
