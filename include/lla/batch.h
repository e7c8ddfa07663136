/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file batch.h
 * @brief Batch: which rows of a call belong to which sequence and slot, planned once per step for all layers.
 *
 * A batch lives in memory of the caller (lla_batch_size(), lla_batch_init()), owns nothing outside it and needs no release;
 * but node blocks that it reserved come back only by lla_state_commit() (if that happens on a device, by lla_state_settle()), by
 * planning it again, or by lla_batch_discard().
 * One batch belongs to one thread at a time; several batches of one state may be in flight if their slots are disjoint. A slot
 * may be planned by two batches, but the forward of one destroys the other's rows: only one of them may be committed.
 * lla_batch_init() over a planned batch loses its reservations; a batch must not be used after its state was released.
 */
#ifndef LLA_BATCH_H
#define LLA_BATCH_H

#include "context.h"

LLA_BEGIN_DECLS

/** Handle of a layer, see layer.h. */
typedef struct lla_layer lla_layer;
/** Handle of a state, see state.h. */
typedef struct lla_state lla_state;
/** A batch, inside the caller's memory. */
typedef struct lla_batch lla_batch;

/** @brief Upper limits of what a batch will ever hold. Workspaces are sized from them. */
typedef struct lla_batch_limits {
  size_t struct_size;            /**< sizeof(lla_batch_limits). */
  int64_t max_sequences;         /**< sequences, padding included, >= 0. */
  int64_t max_rows;              /**< rows of all sequences together (slack rows included), >= 0. */
  int64_t max_rows_per_sequence; /**< rows of one sequence, >= 0; 0 = max_rows. */
  int64_t max_length;            /**< longest sequence after the call, history included; 0 = what the state, or without
                                      one max_rows_per_sequence, allows. Sizes that are asked for with 0 assume the
                                      longest that there is: set it when training. */
  int64_t max_snapshots;         /**< snapshots of all sequences together, >= 0. */
  int32_t replay;                /**< 1 = what is launched with one plan serves every later plan with the same numbers of
                                      sequences and rows: capture forward or backward once, then plan, replay and commit step
                                      after step. Launches are then as large as the limits allow. 0 = as large as the plan. */
  int32_t reserved;              /**< 0. */
} lla_batch_limits;

/** Fault: row offsets or counts are negative, not rising, or beyond a limit of the batch. */
#define LLA_FAULT_ROWS 1u
/** Fault: a slot is not one of the state's, or padding has a destination. */
#define LLA_FAULT_SLOT 2u
/** Fault: the slot does not stand at the expected position. */
#define LLA_FAULT_POSITION 4u
/** Fault: the rows would exceed the batch's or the state's max_length. */
#define LLA_FAULT_LENGTH 8u
/** Fault: a destination is named twice in the batch (all that name it are refused), or that of a fork or snapshot holds
 *  something. */
#define LLA_FAULT_DESTINATION 16u
/** Fault: a snapshot lies beyond the rows of its sequence. */
#define LLA_FAULT_SNAPSHOT 32u
/** Fault: an accepted count is not 0 ... the rows, or a part of more than max_draft rows. */
#define LLA_FAULT_ACCEPTED 64u
/** Fault: a slot has changed between plan and commit. */
#define LLA_FAULT_MOVED 128u
/** Fault: the node blocks that were set aside do not suffice: a bug of lla. */
#define LLA_FAULT_BLOCKS 256u

/** Initialiser of @ref lla_batch_limits. */
#define LLA_BATCH_LIMITS_INIT {sizeof(lla_batch_limits), 0, 0, 0, 0, 0, 0, 0}

/**
 * @brief The rows of one step. Index arrays are read during lla_batch_plan() only, those in device memory by work that it puts
 *        on the stream.
 *
 * Sequence b has rows offsets[b] ... offsets[b] + counts[b] - 1 of the tensors' row axis. Without `offsets` the batch is
 * uniform: sequence b begins at b * rows_per_sequence. Without `counts` a sequence reaches to offsets[b + 1]
 * (rows_per_sequence). Rows in no sequence are slack: inputs are not read, outputs and gradients set to zero.
 *
 * On a device `offsets` (then total_rows must be given), `counts`, `slot_in`, `slot_out` and `expected_positions` may lie in
 * memory of the device (LLA_DEVICE), each for itself. Then the device plans: the host checks what it can see, a bad value that
 * only the device sees makes its sequence padding and sets bits of lla_batch_faults(), and the slots may be ones whose commits
 * the host has not settled. Slots in device memory may be any: for threads and for what is settled such a batch names all slots
 * of the state.
 */
typedef struct lla_rows {
  size_t struct_size;               /**< sizeof(lla_rows). */
  int64_t sequences;                /**< number of sequences, >= 0. */
  int64_t rows_per_sequence;        /**< uniform batches: row distance of two sequences. */
  int64_t total_rows;               /**< length N of the tensors' row axis; 0 = offsets[sequences], or of a uniform batch
                                         sequences * rows_per_sequence. */
  lla_index offsets;                /**< [sequences + 1] rising row offsets, or not given (uniform). */
  lla_index counts;                 /**< [sequences] rows of each sequence, or not given. */
  lla_index slot_in;                /**< [sequences] slot with the history; -1 = padding: the rows are skipped and their
                                         outputs zero. Not given: slot b (with a state). */
  lla_index slot_out;               /**< [sequences] slot that receives history and rows; a slot other than slot_in must be
                                         empty (this is a fork). Not given: slot_in. */
  lla_index expected_positions;     /**< [sequences] position at which each slot must stand, checked; or not given. With no
                                         state: the position at which each sequence starts (default 0). */
  int64_t snapshots;                /**< number of snapshots. */
  lla_index snapshot_sequences;     /**< [snapshots] sequence of each snapshot. */
  lla_index snapshot_rows;          /**< [snapshots] rows of that sequence that it contains, 0 ... count. */
  lla_index snapshot_slots;         /**< [snapshots] slot that receives it at commit; must be empty. */
  lla_state *gradient_state;        /**< backward: state of kind LLA_STATE_GRADIENT with the same layers, or NULL. */
  lla_index initial_gradient_slots; /**< [sequences] slot of gradient_state that receives the gradient of the state before
                                         the first row, -1 = not wanted; planning empties it and gives it its shape. */
  lla_index final_gradient_slots;   /**< [sequences] slot of gradient_state with the gradient of the state after the last
                                         row, -1 = zero; read only. */
} lla_rows;

/** Initialiser of `lla_rows`: nothing given. */
#define LLA_ROWS_INIT                                                                                                       \
  {sizeof(lla_rows), 0, 0, 0, {NULL, 0, 0}, {NULL, 0, 0}, {NULL, 0, 0}, {NULL, 0, 0}, {NULL, 0, 0}, 0, {NULL, 0, 0},         \
   {NULL, 0, 0}, {NULL, 0, 0}, NULL, {NULL, 0, 0}, {NULL, 0, 0}}

/**
 * @brief Memory that a batch needs.
 * @param context    the context.
 * @param limits     upper limits.
 * @param bytes      receives the size.
 * @param alignment  receives the alignment (a power of two); may be NULL.
 * @param error      may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_STRUCT_VERSION, LLA_INVALID_ARGUMENT, LLA_SIZE_OVERFLOW. Any thread. Since 0.1.
 */
LLA_API lla_status lla_batch_size(const lla_context *context, const lla_batch_limits *limits, size_t *bytes,
                                  size_t *alignment, lla_error *error);
/**
 * @brief Makes an unplanned batch in the caller's memory.
 * @param context  the context; must outlive the batch.
 * @param limits   as given to lla_batch_size().
 * @param memory   the memory; stays the caller's, must not move while the batch is used.
 * @param bytes    its size.
 * @param batch    receives the batch (inside `memory`).
 * @param error    may be NULL.
 * @return LLA_OK; as lla_batch_size(); LLA_BUFFER_TOO_SMALL, LLA_MISALIGNED. Since 0.1.
 */
LLA_API lla_status lla_batch_init(lla_context *context, const lla_batch_limits *limits, void *memory, size_t bytes,
                                  lla_batch **batch, lla_error *error);
/**
 * @brief Memory of the context's device that a batch needs beside its own, see lla_batch_bind_device().
 * @param context    the context.
 * @param limits     as given to lla_batch_size().
 * @param bytes      receives the size; 0 on the CPU.
 * @param alignment  receives the alignment (a power of two); may be NULL.
 * @param error      may be NULL.
 * @return as lla_batch_size(). Any thread. Since 0.1.
 */
LLA_API lla_status lla_batch_device_size(const lla_context *context, const lla_batch_limits *limits, size_t *bytes,
                                         size_t *alignment, lla_error *error);
/**
 * @brief Gives a batch of a device's context its memory there. Needed once before lla_batch_plan(); the plan lies in it until
 *        the work that was launched with it has finished. On the CPU it is allowed and does nothing.
 * @param batch   the batch.
 * @param memory  memory of the device; stays the caller's.
 * @param bytes   its size.
 * @param error   may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_BUFFER_TOO_SMALL, LLA_MISALIGNED, LLA_INVALID_ARGUMENT (not memory of the device),
 *         LLA_BUSY (planned, or committed and not settled: its plan lies in the memory that it has). Since 0.1.
 */
LLA_API lla_status lla_batch_bind_device(lla_batch *batch, void *memory, size_t bytes, lla_error *error);
/**
 * @brief Plans a step: checks the rows, looks the slots up, reserves node blocks. Once per step, for all layers.
 * @param batch   the batch. If it was planned before and not committed, its reservations are given back first.
 * @param state   the state whose slots are named, or NULL: every sequence starts empty and nothing is kept.
 * @param rows    the rows; read during the call only.
 * @param stream  stream of the device, on which the plan goes there; work with it belongs on the same stream. NULL on the CPU.
 * @param error   may be NULL; names the argument and the entry.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_STRUCT_VERSION, LLA_INVALID_ARGUMENT (out of a limit or range; a destination twice),
 *         LLA_WRONG_CONTEXT, LLA_STATE_INCOMPATIBLE, LLA_LEVELS_EXCEEDED (beyond max_length), LLA_POSITION_MISMATCH,
 *         LLA_SLOT_IN_USE, LLA_NO_BLOCKS, LLA_DTYPE_MISMATCH, LLA_MISALIGNED (an index array), LLA_FORKED, LLA_DEVICE_ERROR;
 *         LLA_UNSUPPORTED (gradient_state beside arrays on the device); LLA_BUSY (the batch, or an earlier commit of a slot that
 *         host arrays name, is not settled). On failure the batch is unplanned, unless it was committed and is not settled, and
 *         the state as it was. A batch that was committed with arrays on the device must be settled before its memory goes: its
 *         slots, and every later commit, wait for it. Since 0.1.
 */
LLA_API lla_status lla_batch_plan(lla_batch *batch, lla_state *state, const lla_rows *rows, void *stream, lla_error *error);
/**
 * @brief Drops a plan that will not be committed and gives its reservations back. NULL, unplanned and committed batches are
 *        ignored. Must not be called after the state of the plan was released. Since 0.1.
 * @param batch  the batch.
 */
LLA_API void lla_batch_discard(lla_batch *batch);
/**
 * @brief Brings what the device found out about a batch to the host: faults, and once it is committed there also slots, rows and
 *        accepted counts, which lla_state_settle() needs if the device planned. Waits for the stream, so it cannot be captured;
 *        the batch's work must be before it on this stream or have finished (wait for an event and use another stream to leave
 *        later steps alone). Does nothing for batches of which the host knows everything.
 * @param batch   planned or committed.
 * @param stream  stream of the device; NULL on the CPU.
 * @param error   may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT, LLA_BUSY (not planned), LLA_FORKED, LLA_DEVICE_ERROR. Since 0.1.
 */
LLA_API lla_status lla_batch_collect(lla_batch *batch, void *stream, lla_error *error);
/**
 * @brief Bits LLA_FAULT_... that say what was wrong in values that only the device could see, all sequences together; 0 =
 *        nothing. The host knows them after lla_batch_collect() or lla_state_settle(), until the batch is planned again. A
 *        sequence with a fault was padding: its outputs are zero and its slots as they were (LLA_FAULT_ACCEPTED and
 *        LLA_FAULT_MOVED come from the commit: the outputs are there, the slots as they were). On the CPU always 0, since every
 *        value is checked before anything is written. Since 0.1.
 * @param batch  the batch; NULL gives 0.
 * @return the bits.
 */
LLA_API uint32_t lla_batch_faults(const lla_batch *batch);

LLA_END_DECLS

#endif
