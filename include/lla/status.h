/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file status.h
 * @brief Status codes, and the caller-owned text that explains a failure.
 *
 * Every function that can fail returns an @ref lla_status and takes a nullable @ref lla_error. Unless a function says
 * otherwise, a failure leaves every output and every state as it was. lla never prints, exits, aborts or throws.
 */
#ifndef LLA_STATUS_H
#define LLA_STATUS_H

#include "export.h"

LLA_BEGIN_DECLS

/** Result of a call: LLA_OK, or one of the codes below. Numbers are never reused; new codes fill the gaps of a family. */
typedef int32_t lla_status;

/** Success. */
#define LLA_OK 0

/* -- the caller gave something wrong ---------------------------------------------------------------------------------- */
/** A value is outside its domain. */
#define LLA_INVALID_ARGUMENT 10
/** A pointer that must not be NULL is NULL. */
#define LLA_NULL_POINTER 11
/** A struct's size is smaller than its first version, or its unknown tail is not zero. */
#define LLA_STRUCT_VERSION 12
/** Rank, a dimension or a stride of a tensor does not fit. */
#define LLA_SHAPE_MISMATCH 13
/** The element type of a tensor is not accepted here. */
#define LLA_DTYPE_MISMATCH 14
/** A pointer or a stride breaks an alignment rule. */
#define LLA_MISALIGNED 15
/** A buffer is smaller than its query said. */
#define LLA_BUFFER_TOO_SMALL 16
/** Handles of different contexts were mixed. */
#define LLA_WRONG_CONTEXT 17
/** A size does not fit into 64 bits or into the address space. */
#define LLA_SIZE_OVERFLOW 18
/** A tensor or weight that this layer needs was not given, or one was given twice. */
#define LLA_MISSING_ROLE 19

/* -- a state does not allow it ---------------------------------------------------------------------------------------- */
/** The sequence would need more levels (λ columns) or more length than there are. */
#define LLA_LEVELS_EXCEEDED 30
/** A state, batch or exported image does not belong to these layers. */
#define LLA_STATE_INCOMPATIBLE 31
/** An exported image is damaged. */
#define LLA_DATA_CORRUPT 32
/** A batch is not in the right phase (planned, committed), or its slots moved since it was planned. */
#define LLA_BUSY 33
/** The pool of node blocks is exhausted. */
#define LLA_NO_BLOCKS 34
/** A slot does not stand at the expected position. */
#define LLA_POSITION_MISMATCH 35
/** A slot that must be empty is not. */
#define LLA_SLOT_IN_USE 36
/** The wanted position lies before the last linked fold. */
#define LLA_ROLLBACK_LIMIT 37

/* -- this build or machine cannot do it ------------------------------------------------------------------------------- */
/** Never possible in this build. */
#define LLA_UNSUPPORTED 50
/** A valid combination for which this backend has no kernel. */
#define LLA_NOT_IMPLEMENTED 51
/** No usable device. */
#define LLA_NO_DEVICE 52
/** The device's driver is too old. */
#define LLA_DRIVER_TOO_OLD 53
/** The backend's plugin is not installed. */
#define LLA_BACKEND_MISSING 54
/** The backend's plugin is of another plugin interface. */
#define LLA_BACKEND_MISMATCH 55
/** The process was forked; the object belongs to the parent. */
#define LLA_FORKED 56

/* -- resources -------------------------------------------------------------------------------------------------------- */
/** The allocator returned NULL. */
#define LLA_OUT_OF_MEMORY 70
/** Device memory is exhausted. */
#define LLA_OUT_OF_DEVICE_MEMORY 71
/** The caller's thread hook did not run every task. */
#define LLA_THREADS_FAILED 72

/* -- device (only of backends that have one) -------------------------------------------------------------------------- */
/** The device reported an error; later calls on it report it too. */
#define LLA_DEVICE_ERROR 90
/** The stream is being captured into a graph, and the call would wait for it. Nothing was done, and the capture goes on. */
#define LLA_CAPTURE_UNSAFE 91

/** A bug in lla: please report it. */
#define LLA_INTERNAL 110

/** Bytes of text in an @ref lla_error, the closing NUL included. */
#define LLA_ERROR_TEXT_SIZE 244

/**
 * @brief Caller-owned description of a failure.
 *
 * Set struct_size (LLA_ERROR_INIT does) and pass its address. A failing call writes code and text; the text names the
 * argument. A succeeding call leaves it alone. One lla_error belongs to one thread at a time.
 */
typedef struct lla_error {
  size_t struct_size;             /**< sizeof(lla_error). */
  lla_status code;                /**< the status that the call returned. */
  char text[LLA_ERROR_TEXT_SIZE]; /**< UTF-8, NUL-ended, cut if longer. */
} lla_error;

/** Initialiser of an @ref lla_error. */
#define LLA_ERROR_INIT {sizeof(lla_error), LLA_OK, {0}}

/**
 * @brief Identifier of a status, "LLA_NO_BLOCKS" for instance. Any thread, any time. Since 0.1.
 * @param status  any integer.
 * @return static text, never NULL ("LLA_UNKNOWN_STATUS" for a number that is none).
 */
LLA_API const char *lla_status_name(lla_status status);
/**
 * @brief A sentence that explains a status. Any thread, any time. Since 0.1.
 * @param status  any integer.
 * @return static text, never NULL.
 */
LLA_API const char *lla_status_message(lla_status status);

LLA_END_DECLS

#endif
