/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file device.h
 * @brief Memory where the backend computes, for programs that do not link a device's own run-time library.
 *
 * On a GPU these functions allocate, copy and wait there; on the CPU they do the same in host memory, so that one program
 * serves both. Who has the device's own library may use its memory and streams instead: nothing here is needed then.
 */
#ifndef LLA_DEVICE_H
#define LLA_DEVICE_H

#include "context.h"

LLA_BEGIN_DECLS

/**
 * @brief Allocates memory that tensors, weights, workspaces and plans may lie in.
 * @param context  the context.
 * @param bytes    size; 0 counts as 1.
 * @param memory   receives it, aligned to at least 64 bytes; release it with lla_device_release().
 * @param error    may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_OUT_OF_MEMORY, LLA_OUT_OF_DEVICE_MEMORY, LLA_FORKED, LLA_DEVICE_ERROR. Any thread.
 *         Since 0.1.
 */
LLA_API lla_status lla_device_allocate(lla_context *context, size_t bytes, void **memory, lla_error *error);
/**
 * @brief Releases what lla_device_allocate() gave; work that uses it must have finished. Any thread. Since 0.1.
 * @param context  the context that gave it.
 * @param memory   the memory; NULL is ignored.
 * @param bytes    its size.
 */
LLA_API void lla_device_release(lla_context *context, void *memory, size_t bytes);
/**
 * @brief Copies bytes between host and device memory, in any direction, in the order of the stream. Pageable host memory makes
 *        the call wait; after a copy to the host wait with lla_device_wait() before reading.
 * @param context  the context.
 * @param to       destination.
 * @param from     source; must not overlap the destination.
 * @param bytes    size.
 * @param stream   stream of the device; NULL on the CPU.
 * @param error    may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT, LLA_SIZE_OVERFLOW, LLA_FORKED, LLA_DEVICE_ERROR. Any thread.
 *         Since 0.1.
 */
LLA_API lla_status lla_device_copy(lla_context *context, void *to, const void *from, size_t bytes, void *stream,
                                   lla_error *error);
/**
 * @brief Waits until all work on a stream has finished, and reports what failed in it.
 * @param context  the context.
 * @param stream   stream of the device; NULL = its default stream, and on the CPU.
 * @param error    may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT, LLA_FORKED, LLA_DEVICE_ERROR. Any thread. Since 0.1.
 */
LLA_API lla_status lla_device_wait(lla_context *context, void *stream, lla_error *error);

LLA_END_DECLS

#endif
