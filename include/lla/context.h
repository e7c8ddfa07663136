/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file context.h
 * @brief Context: which backend computes, who gives memory and threads, who hears the log.
 *
 * A context is immutable after its creation and may be shared by any number of threads. Contexts, layers and states may be
 * released in any order: each keeps what it needs alive.
 */
#ifndef LLA_CONTEXT_H
#define LLA_CONTEXT_H

#include "types.h"

LLA_BEGIN_DECLS

/** Handle of a context. */
typedef struct lla_context lla_context;

/** Which library computes. */
typedef int32_t lla_backend;
/** The best backend that works here; lla_context_query(LLA_CONTEXT_FALLBACK_REASON) says why a better one does not. */
#define LLA_BACKEND_AUTO 0
/** SIMD kernels on the CPU. */
#define LLA_BACKEND_CPU 1
/** NVIDIA GPUs, through a plugin. */
#define LLA_BACKEND_CUDA 2
/** The model of correctness: plain loops in double precision, the only one that takes LLA_F64. */
#define LLA_BACKEND_REFERENCE 3

/** Instruction sets of the CPU backend, in rising order. */
typedef int32_t lla_isa;
/** The best one of this CPU. */
#define LLA_ISA_DEFAULT 0
/** What every CPU of the architecture has. */
#define LLA_ISA_BASELINE 1
/** x86: AVX2 with FMA. */
#define LLA_ISA_AVX2 2
/** x86: AVX-512 (F, BW, DQ, VL, CD). */
#define LLA_ISA_AVX512 3
/** Arm: Advanced SIMD. */
#define LLA_ISA_NEON 4

/** Promise about bits, see docs/determinism.md. */
typedef int32_t lla_determinism;
/** Default: LLA_DETERMINISM_BATCH_INVARIANT. */
#define LLA_DETERMINISM_DEFAULT 0
/** The same call gives the same bits, run after run, for any number of threads. */
#define LLA_DETERMINISM_RUN_TO_RUN 1
/** Also: a sequence's bits do not depend on what else is in the batch (docs/determinism.md names the one limit). */
#define LLA_DETERMINISM_BATCH_INVARIANT 2
/** Also: a sequence's bits do not depend on how it was cut into calls. Reserved: no backend offers it yet. */
#define LLA_DETERMINISM_SPLIT_INVARIANT 3

/**
 * @brief Where host memory comes from. Copied into the context.
 *
 * Both functions may be called from any thread that calls lla. lla allocates when it creates a context, layer or state and
 * in lla_append(), for lists of more than 64 layers, and on a device for copies of what a slot holds (lla_state_read(),
 * lla_state_write(), lla_state_import_linear(), lla_state_pack(), lla_state_unpack()); never in lla_batch_plan(),
 * lla_layer_forward(), lla_layer_backward() or lla_state_commit(). No lock is held while a hook runs, this one or another: it
 * may ask (lla_context_query() and the like), but must not create, change or release anything of lla.
 */
typedef struct lla_allocator {
  size_t struct_size; /**< sizeof(lla_allocator). */
  /** Returns `bytes` (> 0) bytes aligned to `alignment` (a power of two), or NULL. */
  void *(*allocate)(size_t bytes, size_t alignment, void *user);
  /** Takes back what `allocate` gave; never called with NULL. */
  void (*release)(void *memory, size_t bytes, size_t alignment, void *user);
  void *user; /**< handed to both. */
} lla_allocator;

/** A piece of work: runs task `task` on behalf of worker `thread`. */
typedef void (*lla_task)(int64_t task, int32_t thread, void *argument);

/**
 * @brief The caller's threads. Copied into the context.
 *
 * `run` must call `task(i, thread, argument)` once for each i in 0 ... count - 1, with 0 <= thread < max_threads, never two
 * at once with the same `thread`, and return after the last one has returned (0), or return another value if it could not
 * run all of them, upon which the call fails with LLA_THREADS_FAILED and its outputs are undefined (states stay as they were).
 */
typedef struct lla_parallel {
  size_t struct_size;  /**< sizeof(lla_parallel). */
  int32_t max_threads; /**< >= 1; memory of a workspace grows with it. */
  int32_t reserved;    /**< 0. */
  /** Runs `count` tasks and waits for them. */
  int32_t (*run)(int64_t count, lla_task task, void *argument, void *user);
  void *user; /**< handed to `run`. */
} lla_parallel;

/** Weight of a log line. */
typedef int32_t lla_log_level;
/** Something failed. */
#define LLA_LOG_ERROR 1
/** Something is not as asked (a fallback). */
#define LLA_LOG_WARNING 2
/** What was chosen. */
#define LLA_LOG_INFO 3

/**
 * @brief Who hears the log. Copied into the context. Without one lla is silent.
 *
 * ERROR: a thread hook that failed. WARNING: a step of a layer for which only the reference backend has a kernel, a better
 * backend that is not there. INFO: backend and instruction set of a context, kernels of a layer.
 */
typedef struct lla_log {
  size_t struct_size;  /**< sizeof(lla_log). */
  lla_log_level level; /**< the least important level wanted. */
  int32_t reserved;    /**< 0. */
  /** Receives one line, without line end; may be called from any thread that calls lla. */
  void (*write)(lla_log_level level, const char *text, void *user);
  void *user; /**< handed to `write`. */
} lla_log;

/** @brief What a context is made of. A field that is 0 means its default. */
typedef struct lla_context_options {
  size_t struct_size;             /**< sizeof(lla_context_options). */
  lla_backend backend;            /**< default LLA_BACKEND_AUTO. */
  int32_t device;                 /**< device number of a GPU backend. */
  lla_isa isa;                    /**< highest instruction set that the CPU backend may use; the environment variable
                                       LLA_MAX_ISA (baseline, avx2, avx512, neon) may lower it, never raise it. */
  lla_determinism determinism;    /**< the least promise wanted. */
  int32_t threads;                /**< > 1 without `parallel`: the context starts a pool of its own with so many workers
                                       (the calling thread included). 0 or 1: the caller's thread alone. */
  int32_t reserved;               /**< 0. */
  const lla_allocator *allocator; /**< default: the C library's. */
  const lla_parallel *parallel;   /**< default: none, see `threads` (which is ignored if this is given). */
  const lla_log *log;             /**< default: silence. */
} lla_context_options;

/** Initialiser of `lla_context_options`: every field its default. */
#define LLA_CONTEXT_OPTIONS_INIT {sizeof(lla_context_options), 0, 0, 0, 0, 0, 0, NULL, NULL, NULL}

/**
 * @brief Creates a context.
 * @param options  NULL = defaults. Read during the call only; the hooks in it are copied.
 * @param context  receives the handle; release it with lla_context_release().
 * @param error    may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_STRUCT_VERSION, LLA_INVALID_ARGUMENT (a field is out of its domain, a hook is
 *         incomplete); LLA_NO_DEVICE, LLA_BACKEND_MISSING, LLA_BACKEND_MISMATCH; LLA_UNSUPPORTED (a promise or instruction
 *         set that there is not); LLA_OUT_OF_MEMORY. Any thread. Since 0.1.
 */
LLA_API lla_status lla_context_create(const lla_context_options *options, lla_context **context, lla_error *error);
/** @brief Takes one more reference. NULL is ignored. Any thread. Since 0.1. @param context  the context. @return context. */
LLA_API lla_context *lla_context_retain(lla_context *context);
/** @brief Gives a reference back; the last one frees. NULL is ignored. Any thread. Since 0.1. @param context  the context. */
LLA_API void lla_context_release(lla_context *context);

/** Keys of lla_context_query(). */
typedef int32_t lla_context_key;
/** Text: "cpu", "reference", "cuda". */
#define LLA_CONTEXT_BACKEND_NAME 1
/** Text: instruction set in use: "baseline", "avx2", "avx512", "neon", or "scalar" for the reference. */
#define LLA_CONTEXT_ISA_NAME 2
/** int32_t: workers that tasks may be spread over. */
#define LLA_CONTEXT_THREADS 3
/** int32_t: the @ref lla_determinism that holds. */
#define LLA_CONTEXT_DETERMINISM 4
/** Text: why LLA_BACKEND_AUTO did not take a better backend; empty if it took the best. */
#define LLA_CONTEXT_FALLBACK_REASON 5
/** Text: name of the device or CPU. */
#define LLA_CONTEXT_DEVICE_NAME 6

/**
 * @brief Reads a fact about a context.
 * @param context  the context.
 * @param key      LLA_CONTEXT_...
 * @param value    receives the text (NUL-ended) or integer; NULL asks for the size only.
 * @param size     in: bytes at `value`; out: bytes needed. Never NULL.
 * @param error    may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER; LLA_INVALID_ARGUMENT (unknown key); LLA_BUFFER_TOO_SMALL (`size` says what is needed).
 *         Any thread. Since 0.1.
 */
LLA_API lla_status lla_context_query(const lla_context *context, lla_context_key key, void *value, size_t *size,
                                     lla_error *error);
/**
 * @brief Says whether a backend can be used here, without creating anything.
 * @param backend   LLA_BACKEND_...
 * @param reason    receives why not, in words (empty if it can); may be NULL.
 * @param capacity  bytes at `reason`.
 * @return LLA_OK, or the status that lla_context_create() would give. Any thread. Since 0.1.
 */
LLA_API lla_status lla_backend_available(lla_backend backend, char *reason, size_t capacity);

LLA_END_DECLS

#endif
