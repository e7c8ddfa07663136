/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file types.h
 * @brief Element types, tensors, the roles that tensors play, and index arrays.
 *
 * Shapes use these letters: N rows (tokens of all sequences of a batch, one after the other), H value heads, G key/query
 * groups (G divides H), dk key size, dv value size, L λ columns, W convolution width.
 */
#ifndef LLA_TYPES_H
#define LLA_TYPES_H

#include "status.h"

LLA_BEGIN_DECLS

/** Element type of a tensor: LLA_F32 ... */
typedef int32_t lla_dtype;
/** "Default of this place" in a descriptor; never valid in a tensor. */
#define LLA_DTYPE_DEFAULT 0
/** IEEE binary32. */
#define LLA_F32 1
/** bfloat16. */
#define LLA_BF16 2
/** IEEE binary16. */
#define LLA_F16 3
/** IEEE binary64; only the reference backend computes with it. */
#define LLA_F64 4
/** 32-bit signed integer; only in index arrays. */
#define LLA_I32 5
/** 64-bit signed integer; only in index arrays. */
#define LLA_I64 6

/** Most dimensions that a tensor can have. */
#define LLA_MAX_RANK 6

/**
 * @brief A view into the caller's memory. Frozen: this struct never changes.
 *
 * Borrowed for the duration of the call (on a device: until the stream has passed it). Strides are in elements and may be
 * anything from 0 up that stays inside the caller's memory, but the last axis is contiguous (stride 1; of a dimension of 1 the
 * stride is ignored). Only element alignment is needed. Where a shape says [N, ...], a tensor [B, T, ...] of one rank more
 * is accepted too when the batch is uniform (B sequences of T rows).
 */
typedef struct lla_tensor {
  void *data;                    /**< first element; may be NULL only if a dimension is 0. */
  lla_dtype dtype;               /**< element type. */
  int32_t rank;                  /**< number of dimensions, 1 ... LLA_MAX_RANK. */
  int64_t dims[LLA_MAX_RANK];    /**< sizes, each >= 0; entries from rank on are ignored. */
  int64_t strides[LLA_MAX_RANK]; /**< distances in elements; entries from rank on are ignored. */
} lla_tensor;

/** What a tensor is to a layer: LLA_Q, LLA_WEIGHT_SKIP, ... */
typedef int32_t lla_role;

/* -- inputs and outputs. What stands in brackets is the shape. --------------------------------------------------------- */
/** Queries [N, G, dk] (cell: before the convolution). Mamba-2's C. */
#define LLA_Q 1
/** Keys [N, G, dk] (cell: before the convolution). Mamba-2's B. */
#define LLA_K 2
/** Values [N, H, dv] (cell: before the convolution). Mamba-2's x. */
#define LLA_V 3
/** Gate [N, H]: the natural log of the decay (<= 0), or what the layer's gate form makes it from. */
#define LLA_GATE 4
/** Write strength [N, H]: β, or what the layer's write form makes it from. */
#define LLA_WRITE 5
/** Level weights λ [N, H, L], or what the layer's λ form makes them from. Columns of dead levels are never read. An input may
 *  have more columns than the layer has levels (not with LLA_LEVELS_ABSORB); its gradient has exactly L. */
#define LLA_LAMBDA 6
/** Output gate z [N, H * dv] of the gated norm. */
#define LLA_Z 7
/** Input of a block or a part: [N, hidden], [N, channels], [N, heads, d]. */
#define LLA_X 8
/** Output: mixer [N, H, dv]; cell [N, H * dv]; block [N, hidden]; parts: see lla_layer_desc. */
#define LLA_Y 9
/** Value of the skip connection [N, H, dv] in the part LLA_LAYER_GATED_NORM (D times this is added to LLA_X). */
#define LLA_SKIP_INPUT 10
/** Output of the part LLA_LAYER_GATES: the log gate [N, H]. */
#define LLA_GATE_OUT 11
/** Output of the part LLA_LAYER_GATES: the write strength [N, H]. */
#define LLA_WRITE_OUT 12
/** Output of the part LLA_LAYER_GATES: λ [N, H, L]. */
#define LLA_LAMBDA_OUT 13

/* -- weights --------------------------------------------------------------------------------------------------------------- */
/** Depthwise convolution of one stream [channels, W] or [channels, 1, W]; tap W - 1 multiplies the current row. */
#define LLA_WEIGHT_CONV 100
/** Bias of LLA_WEIGHT_CONV [channels]. */
#define LLA_WEIGHT_CONV_BIAS 101
/** Convolution of the queries [G * dk, W]. */
#define LLA_WEIGHT_CONV_Q 102
/** Convolution of the keys [G * dk, W]. */
#define LLA_WEIGHT_CONV_K 103
/** Convolution of the values [H * dv, W]. */
#define LLA_WEIGHT_CONV_V 104
/** Bias of LLA_WEIGHT_CONV_Q [G * dk]. */
#define LLA_WEIGHT_CONV_Q_BIAS 105
/** Bias of LLA_WEIGHT_CONV_K [G * dk]. */
#define LLA_WEIGHT_CONV_K_BIAS 106
/** Bias of LLA_WEIGHT_CONV_V [H * dv]. */
#define LLA_WEIGHT_CONV_V_BIAS 107
/** Bias added to the raw gate before softplus [H]. */
#define LLA_WEIGHT_DT_BIAS 108
/** Log of the decay rate [H]: g = -exp(A_log) * dt. */
#define LLA_WEIGHT_A_LOG 109
/** Per-head parameter of the λ form [H, L]. */
#define LLA_WEIGHT_LAMBDA 110
/** Skip D: [H] or [H * dv]. */
#define LLA_WEIGHT_SKIP 111
/** Scale of the gated norm: [H * dv], or [norm_group] shared by all groups. */
#define LLA_WEIGHT_NORM 112
/** Mamba-2 block: input projection [H*dv + (H*dv + 2*G*dk) + H + H*L, hidden], rows in the order z, x, B, C, dt, λ. */
#define LLA_WEIGHT_IN_PROJ 120
/** Bias of the input projection. */
#define LLA_WEIGHT_IN_PROJ_BIAS 121
/** Output projection [hidden, H * dv]. */
#define LLA_WEIGHT_OUT_PROJ 122
/** Bias of the output projection [hidden]. */
#define LLA_WEIGHT_OUT_PROJ_BIAS 123
/** Gated DeltaNet block: queries [G * dk, hidden]. */
#define LLA_WEIGHT_Q_PROJ 124
/** Gated DeltaNet block: keys [G * dk, hidden]. */
#define LLA_WEIGHT_K_PROJ 125
/** Gated DeltaNet block: values [H * dv, hidden]. */
#define LLA_WEIGHT_V_PROJ 126
/** Gated DeltaNet block: raw gate [H, hidden]. */
#define LLA_WEIGHT_GATE_PROJ 127
/** Gated DeltaNet block: raw write strength [H, hidden]. */
#define LLA_WEIGHT_WRITE_PROJ 128
/** Gated DeltaNet block: output gate z [H * dv, hidden]. */
#define LLA_WEIGHT_Z_PROJ 129
/** Gated DeltaNet block: raw λ [H * L, hidden], head-major. */
#define LLA_WEIGHT_LAMBDA_PROJ 130
/** Part LLA_LAYER_PROJECTION: [outputs, hidden]. */
#define LLA_WEIGHT_PROJ 131
/** Bias of LLA_WEIGHT_PROJ [outputs]. */
#define LLA_WEIGHT_PROJ_BIAS 132

/** Binding flag: add to what the tensor holds instead of overwriting it (gradients only). */
#define LLA_ACCUMULATE 1

/** @brief One tensor in its role. Frozen: this struct never changes. */
typedef struct lla_binding {
  lla_role role;     /**< LLA_Q, LLA_WEIGHT_SKIP, ... */
  int32_t flags;     /**< 0, or LLA_ACCUMULATE for a gradient. */
  lla_tensor tensor; /**< the view. */
} lla_binding;

/** Where an array lives. */
typedef int32_t lla_location;
/** Host memory. */
#define LLA_HOST 0
/** Memory of the context's device. */
#define LLA_DEVICE 1

/** @brief A one-dimensional, contiguous array of integers. Frozen. `data` NULL means "not given". */
typedef struct lla_index {
  const void *data;      /**< elements of `dtype`. */
  lla_dtype dtype;       /**< LLA_I32 or LLA_I64. */
  lla_location location; /**< LLA_HOST or LLA_DEVICE. */
} lla_index;

/**
 * @brief Bytes of one element. Any thread, any time. Since 0.1.
 * @param dtype  an element type.
 * @return 2, 4 or 8, and 0 for a number that is no element type.
 */
LLA_API size_t lla_dtype_size(lla_dtype dtype);

/**
 * @brief λ columns that a sequence of a given length needs: 1 for up to one token, else 1 + bit_length(length - 1). Since 0.1.
 * @param length  tokens; a negative number counts as 0.
 * @return the number of columns, >= 1.
 */
LLA_API int64_t lla_levels_needed(int64_t length);
/**
 * @brief Level at which a query reads a key: 0 if they are the same position, else bit_length(query xor key). Since 0.1.
 * @param query  position of the query, >= key.
 * @param key    position of the key, >= 0.
 * @return the level, or -1 if key > query or key < 0.
 */
LLA_API int64_t lla_level_of(int64_t query, int64_t key);

/**
 * @brief A contiguous tensor of rank 1 ... 4. Since 0.1.
 * @param data   first element.
 * @param dtype  element type.
 * @param d0     first dimension.
 * @param d1     second dimension, -1 = rank 1.
 * @param d2     third dimension, -1 = rank 2.
 * @param d3     fourth dimension, -1 = rank 3.
 * @return the view.
 */
static inline lla_tensor lla_tensor_of(void *data, lla_dtype dtype, int64_t d0, int64_t d1, int64_t d2, int64_t d3) {
  lla_tensor t = {0, 0, 0, {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}};
  int64_t stride = 1;
  int32_t i;
  t.data = data;
  t.dtype = dtype;
  t.dims[0] = d0;
  t.dims[1] = d1;
  t.dims[2] = d2;
  t.dims[3] = d3;
  t.rank = d1 < 0 ? 1 : d2 < 0 ? 2 : d3 < 0 ? 3 : 4;
  for (i = t.rank - 1; i >= 0; --i) {
    t.strides[i] = stride;
    stride *= t.dims[i];
  }
  return t;
}
/**
 * @brief A tensor in a role, with no flag. Since 0.1.
 * @param role    LLA_Q, ...
 * @param tensor  the view.
 * @return the binding.
 */
static inline lla_binding lla_bind(lla_role role, lla_tensor tensor) {
  lla_binding b;
  b.role = role;
  b.flags = 0;
  b.tensor = tensor;
  return b;
}

LLA_END_DECLS

#endif
