/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file layer.h
 * @brief Layers: mixers, cells, blocks and their parts; forward, backward, and the tasks that they consist of.
 *
 * A layer is a checked description with its kernels chosen. It owns no weight and no sequence, is immutable and may be
 * used by any number of threads at once. The mathematics is in docs/mathematics.md; what is rounded where, in
 * docs/accuracy.md.
 */
#ifndef LLA_LAYER_H
#define LLA_LAYER_H

#include "batch.h"

LLA_BEGIN_DECLS

/** What a layer is. */
typedef int32_t lla_layer_kind;
/** The operator alone. Roles: Q, K, V, GATE [, WRITE] [, LAMBDA] -> Y [N, H, dv]. GATE absent = no decay (log gate 0).
 *  A value that is not finite may reach earlier rows of the same chunk and sequence, but no other sequence. */
#define LLA_LAYER_MIXER 1
/** Convolution, gates, λ, q/k norm, mixer, skip, gated norm. Roles: Q, K, V, GATE [, WRITE] [, LAMBDA] [, Z] -> Y [N, H*dv].
 *  Weights: with a convolution CONV_Q, CONV_K, CONV_V [and their biases], with LLA_GATE_SOFTPLUS A_LOG [, DT_BIAS], with a λ form
 *  other than READY LAMBDA [, SKIP] [, NORM]. */
#define LLA_LAYER_CELL 2
/** Mamba-2 block (cell and projections). Roles: X [N, hidden] -> Y [N, hidden]. Weights: IN_PROJ, CONV, DT_BIAS, A_LOG,
 *  OUT_PROJ, with λ also LAMBDA [, IN_PROJ_BIAS] [, CONV_BIAS] [, SKIP] [, NORM] [, OUT_PROJ_BIAS]. An optional weight that is not
 *  bound is left out of the formula (no bias, no skip, norm scale 1). */
#define LLA_LAYER_MAMBA2 3
/** Gated DeltaNet block (cell and projections). Roles: X [N, hidden] -> Y [N, hidden]. Weights: Q_PROJ, K_PROJ, V_PROJ, GATE_PROJ,
 *  WRITE_PROJ, CONV_Q, CONV_K, CONV_V, DT_BIAS, A_LOG, OUT_PROJ, with λ also LAMBDA_PROJ and LAMBDA [, CONV_Q_BIAS, CONV_K_BIAS,
 *  CONV_V_BIAS] [, Z_PROJ] [, NORM] [, OUT_PROJ_BIAS]. */
#define LLA_LAYER_GATED_DELTANET 4
/** Causal depthwise convolution. Roles: X [N, channels] -> Y [N, channels]; channels = hidden. */
#define LLA_LAYER_CONVOLUTION 5
/** Gates. Roles: GATE [, WRITE] [, LAMBDA] -> GATE_OUT [, WRITE_OUT] [, LAMBDA_OUT]. */
#define LLA_LAYER_GATES 6
/** L2 norm over the last axis, times scale. Roles: X [N, heads, key_dim] -> Y of the same shape. */
#define LLA_LAYER_L2_NORM 7
/** Skip, output gate and RMS norm. Roles: X [N, hidden] [, SKIP_INPUT [N, H, dv]] [, Z] -> Y [N, hidden]; hidden = H*dv. */
#define LLA_LAYER_GATED_NORM 8
/** Matrix product with a weight. Roles: X [N, hidden] -> Y [N, outputs]. */
#define LLA_LAYER_PROJECTION 9

/** Interaction of a mixer. */
typedef int32_t lla_mixer;
/** S <- exp(g) S + w k v^T (linear attention, RetNet, Mamba-2). */
#define LLA_SCALAR_GATE 1
/** S <- exp(g) (I - w k k^T) S + w k v^T (DeltaNet, Gated DeltaNet). */
#define LLA_DELTA_RULE 2

/** Which key/query group a value head uses. */
typedef int32_t lla_head_map;
/** Head h uses group h / (H / G) (integer division). */
#define LLA_HEAD_MAP_BLOCKED 0
/** Head h uses group h mod G. */
#define LLA_HEAD_MAP_CYCLIC 1

/** Where λ comes from. */
typedef int32_t lla_lambda_form;
/** No λ: the linear model, one state. */
#define LLA_LAMBDA_NONE 0
/** The tensor is λ itself, any sign. The only form of a mixer besides NONE. */
#define LLA_LAMBDA_READY 1
/** λ = softplus(P * raw), P = LLA_WEIGHT_LAMBDA. */
#define LLA_LAMBDA_SOFTPLUS 2
/** λ = exp(-exp(P) * softplus(raw)), in (0, 1). */
#define LLA_LAMBDA_BOUNDED 3
/** λ = P * raw. */
#define LLA_LAMBDA_PRODUCT 4

/** What happens to levels beyond the last λ column. */
typedef int32_t lla_level_overflow;
/** A sequence that would need more columns than there are is refused. */
#define LLA_LEVELS_ERROR 0
/** Every level >= L - 1 reads column L - 1; buckets beyond are kept as one. */
#define LLA_LEVELS_ABSORB 1

/** Where the log gate comes from. */
typedef int32_t lla_gate_form;
/** The tensor is the log gate g <= 0 itself. The only form of a mixer. */
#define LLA_GATE_LOG 0
/** dt = clamp(softplus(raw + dt_bias), dt_min, dt_max); g = -exp(A_log) * dt. */
#define LLA_GATE_SOFTPLUS 1

/** Where the write strength comes from. */
typedef int32_t lla_write_form;
/** There is none (1), and no LLA_WRITE is bound. */
#define LLA_WRITE_NONE 0
/** The tensor is the write strength. A mixer takes NONE (no LLA_WRITE bound) or this. */
#define LLA_WRITE_READY 1
/** sigmoid(raw). */
#define LLA_WRITE_SIGMOID 2
/** 2 * sigmoid(raw): negative eigenvalues allowed. */
#define LLA_WRITE_TWO_SIGMOID 3
/** The dt of LLA_GATE_SOFTPLUS (Mamba-2). */
#define LLA_WRITE_STEP 4

/** Order of the output gate and the norm. */
typedef int32_t lla_norm_form;
/** No norm: y, times silu(z) if Z is bound. */
#define LLA_NORM_NONE 0
/** rmsnorm(y * silu(z)) (Mamba-2). */
#define LLA_NORM_GATE_FIRST 1
/** rmsnorm(y) * silu(z) (Gated DeltaNet). */
#define LLA_NORM_NORM_FIRST 2

/** Activation after a convolution. */
typedef int32_t lla_activation;
/** x * sigmoid(x). */
#define LLA_ACTIVATION_SILU 0
/** None. */
#define LLA_ACTIVATION_NONE 1

/**
 * @brief Description of a layer. Zero in a field means its default; fields that a kind does not use, or sets itself, must be 0
 * (or what the kind sets).
 *
 * The two blocks set the forms of their cell themselves: scale, lambda_scale, gate_form, write_form (except
 * LLA_WRITE_TWO_SIGMOID for Gated DeltaNet), qk_norm, norm_form (except LLA_NORM_NORM_FIRST for Mamba-2)
 * and, for Gated DeltaNet, norm_group; mixer is implied.
 */
typedef struct lla_layer_desc {
  size_t struct_size;                /**< sizeof(lla_layer_desc). */
  lla_layer_kind kind;               /**< LLA_LAYER_... */
  lla_mixer mixer;                   /**< mixer and cell: which interaction. */
  int64_t heads;                     /**< H >= 1, value heads. */
  int64_t groups;                    /**< G >= 1, divides H; default H. */
  int64_t key_dim;                   /**< dk >= 1. */
  int64_t value_dim;                 /**< dv >= 1. */
  int64_t hidden;                    /**< width of X (block, convolution, gated norm, projection). */
  int64_t outputs;                   /**< projection: width of Y. */
  int64_t grain;                     /**< rows of a chunk, a power of two up to 4096; default 64. */
  int64_t levels;                    /**< L, λ columns; needed if lambda_form is not NONE (1 ... 62). */
  lla_lambda_form lambda_form;       /**< default NONE: the linear model. */
  lla_level_overflow level_overflow; /**< default LLA_LEVELS_ERROR. */
  lla_gate_form gate_form;           /**< default LLA_GATE_LOG. */
  lla_write_form write_form;         /**< default LLA_WRITE_NONE. */
  lla_head_map head_map;             /**< default LLA_HEAD_MAP_BLOCKED. */
  int32_t qk_norm;                   /**< cell: 1 = L2-normalise q and k per head after the convolution. */
  double scale;                      /**< multiplies q (part L2_NORM: the result); default 1. */
  double lambda_scale;               /**< multiplies λ; default 1. */
  double qk_norm_epsilon;            /**< added to the sum of squares; default 1e-6. */
  double dt_min;                     /**< lower limit of dt, >= 0; default 0. */
  double dt_max;                     /**< upper limit of dt; default none. */
  int64_t conv_width;                /**< W; 0 = no convolution in a cell; blocks and CONVOLUTION: default 4. */
  lla_activation conv_activation;    /**< default LLA_ACTIVATION_SILU. */
  lla_norm_form norm_form;           /**< cell and GATED_NORM. */
  int64_t norm_group;                /**< elements that share one RMS, divides H*dv; default all of them. */
  double norm_epsilon;               /**< added to the mean square; default 1e-5. */
  lla_dtype inner_dtype;             /**< type of the rows between the steps of a cell or block (q, k, v, the mixer's
                                          output, projected rows, and their gradients; never gates and λ that a mixer
                                          reads): default not rounded, LLA_F32; LLA_BF16 and LLA_F16 round them and are
                                          several times faster on a GPU. Reference backend: LLA_F64, LLA_F32. */
  int32_t reserved;                  /**< 0. */
} lla_layer_desc;

/** Initialiser of `lla_layer_desc`: every field 0. */
#define LLA_LAYER_DESC_INIT \
  {sizeof(lla_layer_desc), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/**
 * @brief Creates a layer.
 * @param context      the context that computes; the layer keeps a reference.
 * @param description  read during the call only.
 * @param layer        receives the handle; release it with lla_layer_release().
 * @param error        may be NULL; names the field.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_STRUCT_VERSION, LLA_INVALID_ARGUMENT, LLA_SIZE_OVERFLOW; LLA_NOT_IMPLEMENTED (no
 *         kernel of this backend takes it); LLA_OUT_OF_MEMORY. Any thread. Since 0.1.
 */
LLA_API lla_status lla_layer_create(lla_context *context, const lla_layer_desc *description, lla_layer **layer,
                                    lla_error *error);
/** @brief Takes one more reference. NULL is ignored. Any thread. Since 0.1. @param layer  the layer. @return layer. */
LLA_API lla_layer *lla_layer_retain(lla_layer *layer);
/** @brief Gives a reference back; the last one frees. NULL is ignored. Any thread. Since 0.1. @param layer  the layer. */
LLA_API void lla_layer_release(lla_layer *layer);
/**
 * @brief Says whether lla_layer_create() would succeed, without creating anything. Same arguments and results. Since 0.1.
 * @param context      the context.
 * @param description  the description.
 * @param error        may be NULL; names the field.
 * @return as lla_layer_create().
 */
LLA_API lla_status lla_layer_supported(lla_context *context, const lla_layer_desc *description, lla_error *error);

/** Keys of lla_layer_query(). */
typedef int32_t lla_layer_key;
/** int64_t: operations that a forward call consists of. */
#define LLA_LAYER_STEP_COUNT 1
/** Text, by index: name of the kernel of step `index` of forward, "cpu.scalar_gate.forward.avx2" for instance. */
#define LLA_LAYER_STEP_KERNEL 2
/** int64_t: operations that a backward call consists of. */
#define LLA_LAYER_BACKWARD_STEP_COUNT 3
/** Text, by index: name of the kernel of step `index` of backward. */
#define LLA_LAYER_BACKWARD_STEP_KERNEL 4
/** int64_t: bytes of intermediate results per row of a forward call. */
#define LLA_LAYER_INTERMEDIATE_BYTES 5
/** int64_t: L, the λ columns that the layer expects (0: linear). */
#define LLA_LAYER_LEVELS 6
/** int64_t: the longest sequence that the levels allow (INT64_MAX if there is no limit). */
#define LLA_LAYER_MAX_LENGTH 7

/**
 * @brief Reads a fact about a layer.
 * @param layer  the layer.
 * @param key    LLA_LAYER_STEP_COUNT, ...
 * @param index  for the keys "by index", else 0.
 * @param value  receives the text (NUL-ended) or integer; NULL asks for the size only.
 * @param size   in: bytes at `value`; out: bytes needed. Never NULL.
 * @param error  may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER; LLA_INVALID_ARGUMENT; LLA_BUFFER_TOO_SMALL. Any thread. Since 0.1.
 */
LLA_API lla_status lla_layer_query(const lla_layer *layer, lla_layer_key key, int64_t index, void *value, size_t *size,
                                   lla_error *error);

/** Direction of a call. */
typedef int32_t lla_pass;
/** lla_layer_forward(). */
#define LLA_PASS_FORWARD 1
/** lla_layer_backward(). */
#define LLA_PASS_BACKWARD 2

/**
 * @brief Workspace that a call needs.
 *
 * The answer never falls when a limit rises (a limit of 0 counts as the value that it stands for), so that one workspace made
 * for the largest limits serves every batch, and one made for the largest layer serves all layers one after the other.
 * @param layer      the layer.
 * @param limits     the limits that the batch was made with.
 * @param pass       LLA_PASS_FORWARD or LLA_PASS_BACKWARD.
 * @param bytes      receives the size.
 * @param alignment  receives the alignment (a power of two); may be NULL.
 * @param error      may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_STRUCT_VERSION, LLA_INVALID_ARGUMENT, LLA_SIZE_OVERFLOW. Any thread. Since 0.1.
 */
LLA_API lla_status lla_layer_workspace(const lla_layer *layer, const lla_batch_limits *limits, lla_pass pass, size_t *bytes,
                                       size_t *alignment, lla_error *error);
/**
 * @brief Size of the optional `saved` buffer with which a backward call need not repeat the forward sweep. 0 = this layer
 *        has nothing to save. Arguments and results as lla_layer_workspace(). Since 0.1.
 * @param layer      the layer.
 * @param limits     the limits that the batch was made with.
 * @param bytes      receives the size.
 * @param alignment  receives the alignment; may be NULL.
 * @param error      may be NULL.
 * @return as lla_layer_workspace().
 */
LLA_API lla_status lla_layer_saved_size(const lla_layer *layer, const lla_batch_limits *limits, size_t *bytes,
                                        size_t *alignment, lla_error *error);

/** @brief Arguments of lla_layer_forward(). All pointers are borrowed for the call. */
typedef struct lla_forward_args {
  size_t struct_size;         /**< sizeof(lla_forward_args). */
  lla_batch *batch;           /**< planned; its rows are the N of the shapes. */
  lla_state *state;           /**< the state that the batch was planned with, or NULL if it was planned without. */
  int64_t layer_index;        /**< which layer of the state's group this is; 0 without a state. */
  const lla_binding *io;      /**< inputs and outputs, in any order. */
  int64_t io_count;           /**< entries of `io`. */
  const lla_binding *weights; /**< weights, in any order; NULL if the layer has none. */
  int64_t weight_count;       /**< entries of `weights`. */
  void *workspace;            /**< private to this call while it runs. */
  size_t workspace_bytes;     /**< at least what lla_layer_workspace() says. */
  void *saved;                /**< receives what backward can use, or NULL. */
  size_t saved_bytes;         /**< at least what lla_layer_saved_size() says; 0 if `saved` is NULL. */
  void *stream;               /**< stream of the device; NULL on the CPU. */
} lla_forward_args;

/** Initialiser of @ref lla_forward_args. */
#define LLA_FORWARD_ARGS_INIT {sizeof(lla_forward_args), NULL, NULL, 0, NULL, 0, NULL, 0, NULL, 0, NULL, 0, NULL}

/**
 * @brief Appends the batch's rows: computes their outputs, writes them and the nodes of chunks that fill up into memory
 *        that the state does not use yet. The state's positions do not move: lla_state_commit() does that, once for all
 *        layers. Rows of outputs that belong to no sequence, and rows of slot -1, are set to zero.
 * @param layer      the layer.
 * @param arguments  see @ref lla_forward_args. Outputs must not overlap inputs.
 * @param error      may be NULL; names the argument.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_STRUCT_VERSION, LLA_INVALID_ARGUMENT, LLA_SHAPE_MISMATCH, LLA_DTYPE_MISMATCH,
 *         LLA_MISALIGNED, LLA_BUFFER_TOO_SMALL, LLA_MISSING_ROLE, LLA_WRONG_CONTEXT, LLA_LEVELS_EXCEEDED,
 *         LLA_STATE_INCOMPATIBLE, LLA_BUSY (the batch is not planned, or a slot moved since), LLA_THREADS_FAILED.
 *         Nothing is written unless the result is LLA_OK or LLA_THREADS_FAILED. Calls on different slots may run at once.
 *         Since 0.1.
 */
LLA_API lla_status lla_layer_forward(const lla_layer *layer, const lla_forward_args *arguments, lla_error *error);

/** @brief Arguments of lla_layer_backward(). All pointers are borrowed for the call. */
typedef struct lla_backward_args {
  size_t struct_size;           /**< sizeof(lla_backward_args). */
  lla_batch *batch;             /**< as for forward. With a state: planned from the positions at which the rows began. */
  lla_state *state;             /**< as for forward: holds the initial states (read only), or NULL. */
  int64_t layer_index;          /**< as for forward. */
  const lla_binding *io;        /**< the inputs of forward, not its outputs. */
  int64_t io_count;             /**< entries of `io`. */
  const lla_binding *weights;   /**< the weights of forward. */
  int64_t weight_count;         /**< entries of `weights`. */
  const lla_binding *outputs;   /**< the gradients of the outputs, each in its output's role. */
  int64_t output_count;         /**< entries of `outputs`. */
  const lla_binding *gradients; /**< where the gradients of inputs and weights go, each in its input's role, with
                                     LLA_ACCUMULATE or not; what is not listed is not computed. */
  int64_t gradient_count;       /**< entries of `gradients`. */
  void *workspace;              /**< private to this call while it runs. */
  size_t workspace_bytes;       /**< at least what lla_layer_workspace() says. */
  const void *saved;            /**< what forward wrote for the same rows, limits and inputs (unchecked), or NULL: same bits. */
  size_t saved_bytes;           /**< at least what lla_layer_saved_size() says; 0 if `saved` is NULL. */
  void *stream;                 /**< stream of the device; NULL on the CPU. */
} lla_backward_args;

/** Initialiser of @ref lla_backward_args. */
#define LLA_BACKWARD_ARGS_INIT \
  {sizeof(lla_backward_args), NULL, NULL, 0, NULL, 0, NULL, 0, NULL, 0, NULL, 0, NULL, 0, NULL, 0, NULL}

/**
 * @brief Gradients of the batch's rows. Gradients of states flow through the gradient slots of @ref lla_rows.
 * @param layer      the layer.
 * @param arguments  see @ref lla_backward_args.
 * @param error      may be NULL; names the argument.
 * @return as lla_layer_forward(). Since 0.1.
 */
LLA_API lla_status lla_layer_backward(const lla_layer *layer, const lla_backward_args *arguments, lla_error *error);

/**
 * @brief A call cut into phases of independent tasks, for engines whose own threads are already running.
 *
 * Lives in the workspace of the call and is valid until that memory is used for something else. Phases run one after the
 * other (the caller puts a barrier between them); the tasks of one phase run in any order, on any threads, each once.
 */
typedef struct lla_tasks lla_tasks;

/**
 * @brief Checks and prepares a forward call without running it. CPU backends only.
 * @param layer      the layer.
 * @param arguments  as for lla_layer_forward(); everything must stay valid until the last task has run.
 * @param tasks      receives the tasks, inside the workspace.
 * @param error      may be NULL.
 * @return as lla_layer_forward(). Since 0.1.
 */
LLA_API lla_status lla_layer_forward_tasks(const lla_layer *layer, const lla_forward_args *arguments, lla_tasks **tasks,
                                           lla_error *error);
/** @brief As lla_layer_forward_tasks(), for backward. Since 0.1. @param layer  the layer. @param arguments  as for
 *  lla_layer_backward(). @param tasks  receives the tasks. @param error  may be NULL. @return as lla_layer_backward(). */
LLA_API lla_status lla_layer_backward_tasks(const lla_layer *layer, const lla_backward_args *arguments, lla_tasks **tasks,
                                            lla_error *error);
/** @brief Number of phases. Since 0.1. @param tasks  the tasks; NULL gives 0. @return the number. */
LLA_API int64_t lla_tasks_phases(const lla_tasks *tasks);
/** @brief Number of tasks of a phase. Since 0.1. @param tasks  the tasks. @param phase  0 ... phases - 1.
 *  @return the number; 0 if there is no such phase. */
LLA_API int64_t lla_tasks_count(const lla_tasks *tasks, int64_t phase);
/**
 * @brief Runs one task. Never fails, allocates or waits. Since 0.1.
 * @param tasks   the tasks.
 * @param phase   the phase; all earlier phases must have finished.
 * @param task    0 ... lla_tasks_count() - 1; anything else does nothing.
 * @param thread  0 ... threads of the context - 1, used by one thread at a time; anything else does nothing.
 */
LLA_API void lla_tasks_run(lla_tasks *tasks, int64_t phase, int64_t task, int32_t thread);

/**
 * @brief Plans, appends and commits rows to one slot of a state of one layer, in one call.
 *
 * For first programs and tests: it allocates batch and workspace from the context's allocator on each call.
 * @param layer         the only layer of the state.
 * @param state         the state.
 * @param slot          the slot, 0 ... slots - 1.
 * @param io            inputs and outputs; N is the number of rows to append.
 * @param io_count      entries of `io`.
 * @param weights       weights, or NULL.
 * @param weight_count  entries of `weights`.
 * @param stream        stream of the device, for which the call waits; NULL on the CPU.
 * @param error         may be NULL.
 * @return as lla_batch_plan(), lla_layer_forward() and lla_state_commit(); LLA_OUT_OF_MEMORY, LLA_OUT_OF_DEVICE_MEMORY (on a
 *         device). Unless it is LLA_OK the state is as it was. Since 0.1.
 */
LLA_API lla_status lla_append(const lla_layer *layer, lla_state *state, int64_t slot, const lla_binding *io, int64_t io_count,
                              const lla_binding *weights, int64_t weight_count, void *stream, lla_error *error);

LLA_END_DECLS

#endif
