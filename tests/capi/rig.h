/* SPDX-License-Identifier: Apache-2.0 */
/* Rig: a small model. Some layers of one group with their state, batch, workspaces, and input and output rows, so that a
 * test says only which rows of which sequence go where. Every layer has its own inputs (they are not chained). */
#ifndef LLA_RIG_H
#define LLA_RIG_H

#include "testing.h"

#define RIG_LAYERS 4
#define RIG_IO 8
#define RIG_WEIGHTS 12

typedef struct rig_layer {
  lla_layer_desc desc;
  lla_layer *layer;
  int64_t io_count;             /* inputs first, the output last */
  lla_binding io[RIG_IO];       /* [max_rows, ...], float */
  lla_binding gradient[RIG_IO]; /* of the inputs; the last entry is the gradient of the output */
  int64_t width[RIG_IO];        /* floats of one row */
  int64_t weight_count;
  lla_binding weight[RIG_WEIGHTS];
  lla_binding weight_gradient[RIG_WEIGHTS];
  int64_t weight_size[RIG_WEIGHTS];
} rig_layer;

typedef struct rig {
  lla_context *context;
  int64_t layer_count;
  rig_layer layer[RIG_LAYERS];
  lla_state *state;
  lla_batch_limits limits;
  void *batch_memory;
  lla_batch *batch;
  void *workspace;
  size_t workspace_bytes;
  int64_t max_rows;
} rig;

static inline float rig_value(lla_role role, const lla_layer_desc *desc, uint64_t series, int64_t i) {
  const float u = unit(series, i);
  const int mixer = desc->kind == LLA_LAYER_MIXER;
  switch (role) {
    case LLA_Q:
    case LLA_K:
      return mixer ? (2 * u - 1) * 0.3f : 2 * u - 1;
    case LLA_GATE:
      return mixer ? -0.2f * u : 2 * u - 3;
    case LLA_WRITE:
    case LLA_LAMBDA:
      return mixer ? u : 2 * u - 1;
    default:
      return 2 * u - 1;
  }
}

static inline void rig_add_io(rig_layer *l, lla_role role, int64_t rows, int64_t d1, int64_t d2) {
  const int64_t i = l->io_count++;
  const int64_t width = d1 * (d2 < 0 ? 1 : d2);
  const size_t bytes = (size_t)(rows * width) * sizeof(float);
  l->width[i] = width;
  l->io[i] = lla_bind(role, lla_tensor_of(take(bytes), LLA_F32, rows, d1, d2, -1));
  l->gradient[i] = lla_bind(role, lla_tensor_of(take(bytes), LLA_F32, rows, d1, d2, -1));
}

static inline void rig_add_weight(rig_layer *l, lla_role role, int64_t d0, int64_t d1, float low, float high) {
  const int64_t i = l->weight_count++;
  const int64_t size = d0 * (d1 < 0 ? 1 : d1);
  float *data = (float *)take((size_t)size * sizeof(float));
  int64_t k;
  for (k = 0; k < size; ++k) data[k] = low + (high - low) * unit(series_of(77, 0, 0, role), k);
  l->weight_size[i] = size;
  l->weight[i] = lla_bind(role, lla_tensor_of(data, LLA_F32, d0, d1, -1, -1));
  l->weight_gradient[i] = lla_bind(role, lla_tensor_of(take((size_t)size * sizeof(float)), LLA_F32, d0, d1, -1, -1));
}

static inline void rig_make_layer(rig *r, int64_t index, const lla_layer_desc *desc, lla_layer *shared) {
  rig_layer *l = &r->layer[index];
  const int64_t h = desc->heads, g = desc->groups ? desc->groups : h, dk = desc->key_dim, dv = desc->value_dim;
  const int64_t n = r->max_rows, levels = desc->levels, hidden = desc->hidden;
  memset(l, 0, sizeof *l);
  l->desc = *desc;
  if (shared)
    l->layer = lla_layer_retain(shared);
  else
    OK(lla_layer_create(r->context, desc, &l->layer, &error));
  if (desc->kind == LLA_LAYER_MAMBA2) {
    const int64_t d = h * dv, channels = d + 2 * g * dk;
    rig_add_io(l, LLA_X, n, hidden, -1);
    rig_add_io(l, LLA_Y, n, hidden, -1);
    rig_add_weight(l, LLA_WEIGHT_IN_PROJ, d + channels + h + h * levels, hidden, -0.3f, 0.3f);
    rig_add_weight(l, LLA_WEIGHT_CONV, channels, 4, -0.5f, 0.5f);
    rig_add_weight(l, LLA_WEIGHT_CONV_BIAS, channels, -1, -0.1f, 0.1f);
    rig_add_weight(l, LLA_WEIGHT_DT_BIAS, h, -1, -2.0f, -1.0f);
    rig_add_weight(l, LLA_WEIGHT_A_LOG, h, -1, 0.0f, 1.0f);
    if (levels) rig_add_weight(l, LLA_WEIGHT_LAMBDA, h, levels, 0.5f, 1.5f);
    rig_add_weight(l, LLA_WEIGHT_SKIP, h, -1, 0.5f, 1.5f);
    rig_add_weight(l, LLA_WEIGHT_NORM, d, -1, 0.5f, 1.5f);
    rig_add_weight(l, LLA_WEIGHT_OUT_PROJ, hidden, d, -0.3f, 0.3f);
    return;
  }
  rig_add_io(l, LLA_Q, n, g, dk);
  rig_add_io(l, LLA_K, n, g, dk);
  rig_add_io(l, LLA_V, n, h, dv);
  rig_add_io(l, LLA_GATE, n, h, -1);
  if (desc->write_form == LLA_WRITE_READY || desc->write_form == LLA_WRITE_SIGMOID) rig_add_io(l, LLA_WRITE, n, h, -1);
  if (levels) rig_add_io(l, LLA_LAMBDA, n, h, levels);
  if (desc->kind == LLA_LAYER_CELL) {
    rig_add_io(l, LLA_Z, n, h * dv, -1);
    rig_add_io(l, LLA_Y, n, h * dv, -1);
    rig_add_weight(l, LLA_WEIGHT_CONV_Q, g * dk, 4, -0.5f, 0.5f);
    rig_add_weight(l, LLA_WEIGHT_CONV_K, g * dk, 4, -0.5f, 0.5f);
    rig_add_weight(l, LLA_WEIGHT_CONV_V, h * dv, 4, -0.5f, 0.5f);
    rig_add_weight(l, LLA_WEIGHT_DT_BIAS, h, -1, -2.0f, -1.0f);
    rig_add_weight(l, LLA_WEIGHT_A_LOG, h, -1, 0.0f, 1.0f);
    if (levels) rig_add_weight(l, LLA_WEIGHT_LAMBDA, h, levels, 0.5f, 1.5f);
    rig_add_weight(l, LLA_WEIGHT_NORM, dv, -1, 0.5f, 1.5f);
  } else {
    rig_add_io(l, LLA_Y, n, h, dv);
  }
}

static inline void rig_make_step(rig *r, int64_t max_sequences, int64_t max_snapshots) {
  size_t bytes = 0, alignment = 0;
  int64_t i;
  r->limits.struct_size = sizeof r->limits;
  r->limits.max_sequences = max_sequences;
  r->limits.max_rows = r->max_rows;
  r->limits.max_snapshots = max_snapshots;
  if (r->state) OK(lla_state_query(r->state, LLA_STATE_MAX_LENGTH, 0, &r->limits.max_length, &error));
  OK(lla_batch_size(r->context, &r->limits, &bytes, &alignment, &error));
  CHECK(alignment >= 1 && alignment <= 64);
  r->batch_memory = take(bytes);
  OK(lla_batch_init(r->context, &r->limits, r->batch_memory, bytes, &r->batch, &error));
  for (i = 0; i < r->layer_count; ++i) {
    const lla_pass passes[2] = {LLA_PASS_FORWARD, LLA_PASS_BACKWARD};
    int p;
    for (p = 0; p < 2; ++p) {
      OK(lla_layer_workspace(r->layer[i].layer, &r->limits, passes[p], &bytes, &alignment, &error));
      CHECK(alignment >= 1 && alignment <= 64);
      if (bytes > r->workspace_bytes) r->workspace_bytes = bytes;
    }
  }
  r->workspace = take(r->workspace_bytes);
}

/* Makes layers, state (none if `state` is NULL), batch and workspace for the limits given. */
static inline void rig_open(rig *r, const lla_context_options *options, const lla_layer_desc *descs, int64_t layer_count,
                            const lla_state_desc *state, int64_t max_sequences, int64_t max_rows, int64_t max_snapshots) {
  lla_layer *layers[RIG_LAYERS];
  lla_context_options host = LLA_CONTEXT_OPTIONS_INIT;
  int64_t i;
  if (options) host = *options;
  if (host.backend == LLA_BACKEND_AUTO) host.backend = LLA_BACKEND_CPU; /* the rig's tensors are host memory */
  memset(r, 0, sizeof *r);
  r->max_rows = max_rows;
  r->layer_count = layer_count;
  OK(lla_context_create(&host, &r->context, &error));
  for (i = 0; i < layer_count; ++i) {
    rig_make_layer(r, i, &descs[i], NULL);
    layers[i] = r->layer[i].layer;
  }
  if (state) OK(lla_state_create(layers, layer_count, state, NULL, 0, &r->state, &error));
  rig_make_step(r, max_sequences, max_snapshots);
}

/* A second user of the same context, layers and state, with batch, workspace and rows of its own. */
static inline void rig_share(rig *r, const rig *other) {
  int64_t i;
  memset(r, 0, sizeof *r);
  r->max_rows = other->max_rows;
  r->layer_count = other->layer_count;
  r->context = lla_context_retain(other->context);
  for (i = 0; i < r->layer_count; ++i) rig_make_layer(r, i, &other->layer[i].desc, other->layer[i].layer);
  r->state = lla_state_retain(other->state);
  rig_make_step(r, other->limits.max_sequences, other->limits.max_snapshots);
}

static inline void rig_close(rig *r) {
  int64_t i, k;
  lla_batch_discard(r->batch);
  lla_state_release(r->state);
  for (i = 0; i < r->layer_count; ++i) {
    rig_layer *l = &r->layer[i];
    lla_layer_release(l->layer);
    for (k = 0; k < l->io_count; ++k) {
      free(l->io[k].tensor.data);
      free(l->gradient[k].tensor.data);
    }
    for (k = 0; k < l->weight_count; ++k) {
      free(l->weight[k].tensor.data);
      free(l->weight_gradient[k].tensor.data);
    }
  }
  free(r->batch_memory);
  free(r->workspace);
  lla_context_release(r->context);
}

/* -- rows -------------------------------------------------------------------------------------------------------------- */

static inline float *rig_row(const rig *r, int64_t layer, int64_t io, int64_t row) {
  return (float *)r->layer[layer].io[io].tensor.data + row * r->layer[layer].width[io];
}

/* Output of a row. */
static inline float *rig_output(const rig *r, int64_t layer, int64_t row) {
  return rig_row(r, layer, r->layer[layer].io_count - 1, row);
}

static inline int64_t rig_output_width(const rig *r, int64_t layer) {
  return r->layer[layer].width[r->layer[layer].io_count - 1];
}

/* Puts the inputs that the sequence `seed` has at `position` into a row. */
static inline void rig_fill_row(rig *r, int64_t row, uint64_t seed, int64_t position) {
  int64_t i, k, e;
  for (i = 0; i < r->layer_count; ++i) {
    rig_layer *l = &r->layer[i];
    for (k = 0; k + 1 < l->io_count; ++k) {
      const uint64_t series = series_of(seed, position, i, l->io[k].role);
      float *data = rig_row(r, i, k, row);
      for (e = 0; e < l->width[k]; ++e) data[e] = rig_value(l->io[k].role, &l->desc, series, e);
    }
  }
}

static inline void rig_fill(rig *r, int64_t row, uint64_t seed, int64_t position, int64_t count) {
  int64_t i;
  for (i = 0; i < count; ++i) rig_fill_row(r, row + i, seed, position + i);
}

/* Sets the length of the row axis of all tensors. */
static inline void rig_set_rows(rig *r, int64_t rows) {
  int64_t i, k;
  CHECK(rows <= r->max_rows);
  for (i = 0; i < r->layer_count; ++i) {
    for (k = 0; k < r->layer[i].io_count; ++k) {
      r->layer[i].io[k].tensor.dims[0] = rows;
      r->layer[i].gradient[k].tensor.dims[0] = rows;
    }
  }
}

static inline lla_forward_args rig_forward_args(rig *r, int64_t layer) {
  lla_forward_args a = LLA_FORWARD_ARGS_INIT;
  rig_layer *l = &r->layer[layer];
  a.batch = r->batch;
  a.state = r->state;
  a.layer_index = r->state ? layer : 0;
  a.io = l->io;
  a.io_count = l->io_count;
  a.weights = l->weight;
  a.weight_count = l->weight_count;
  a.workspace = r->workspace;
  a.workspace_bytes = r->workspace_bytes;
  return a;
}

/* Fills the gradient of the output with values of `seed`. */
static inline void rig_fill_output_gradient(rig *r, int64_t layer, uint64_t seed, int64_t rows) {
  rig_layer *l = &r->layer[layer];
  const int64_t io = l->io_count - 1;
  float *data = (float *)l->gradient[io].tensor.data;
  int64_t i;
  for (i = 0; i < rows * l->width[io]; ++i) data[i] = 2 * unit(series_of(seed, 0, layer, LLA_Y), i) - 1;
}

/* All gradients of inputs and weights, in `list`, which has room for RIG_IO + RIG_WEIGHTS. */
static inline int64_t rig_list_gradients(const rig *r, int64_t layer, lla_binding *list) {
  const rig_layer *l = &r->layer[layer];
  int64_t count = 0, i;
  for (i = 0; i + 1 < l->io_count; ++i) list[count++] = l->gradient[i];
  for (i = 0; i < l->weight_count; ++i) list[count++] = l->weight_gradient[i];
  return count;
}

/* Everything of a backward call but the list of gradients. */
static inline lla_backward_args rig_backward_args(rig *r, int64_t layer) {
  lla_backward_args a = LLA_BACKWARD_ARGS_INIT;
  rig_layer *l = &r->layer[layer];
  a.batch = r->batch;
  a.state = r->state;
  a.layer_index = r->state ? layer : 0;
  a.io = l->io;
  a.io_count = l->io_count - 1;
  a.weights = l->weight;
  a.weight_count = l->weight_count;
  a.outputs = &l->gradient[l->io_count - 1];
  a.output_count = 1;
  a.workspace = r->workspace;
  a.workspace_bytes = r->workspace_bytes;
  return a;
}

static inline void rig_forward(rig *r) {
  int64_t i;
  for (i = 0; i < r->layer_count; ++i) {
    const lla_forward_args arguments = rig_forward_args(r, i);
    OK(lla_layer_forward(r->layer[i].layer, &arguments, &error));
  }
}

static inline void rig_plan(rig *r, const lla_rows *rows) { OK(lla_batch_plan(r->batch, r->state, rows, NULL, &error)); }

static inline void rig_commit(rig *r, const int64_t *accepted) {
  OK(lla_state_commit(r->state, r->batch, accepted ? index64(accepted) : no_index(), NULL, &error));
}

/* -- whole steps ------------------------------------------------------------------------------------------------------- */

static inline int64_t rig_length(const rig *r, int64_t slot) {
  int64_t length = -1;
  OK(lla_state_length(r->state, slot, &length, &error));
  return length;
}

/* Plans and runs `count` rows of the sequence `seed` on one slot; nothing is committed. Outputs lie in rows 0 ... count - 1.
 */
static inline void rig_run(rig *r, int64_t slot, uint64_t seed, int64_t count) {
  lla_rows rows = LLA_ROWS_INIT;
  rows.sequences = 1;
  rows.rows_per_sequence = count;
  rows.total_rows = count;
  rows.slot_in = index64(&slot);
  rig_set_rows(r, count);
  rig_fill(r, 0, seed, rig_length(r, slot), count);
  rig_plan(r, &rows);
  rig_forward(r);
}

static inline void rig_append(rig *r, int64_t slot, uint64_t seed, int64_t count) {
  rig_run(r, slot, seed, count);
  rig_commit(r, NULL);
}

/* Appends up to a length, in calls of at most `step` rows. */
static inline void rig_append_to(rig *r, int64_t slot, uint64_t seed, int64_t length, int64_t step) {
  int64_t at = rig_length(r, slot);
  while (at < length) {
    const int64_t count = length - at < step ? length - at : step;
    rig_append(r, slot, seed, count);
    at += count;
  }
}

/* The exported bytes of a slot; the caller frees them. */
static inline void *rig_pack(const rig *r, int64_t slot, size_t *bytes) {
  void *image;
  OK(lla_state_export_size(r->state, slot, bytes, &error));
  image = take(*bytes);
  OK(lla_state_pack(r->state, slot, image, *bytes, NULL, &error));
  return image;
}

/* Two slots (of the same or of equal rigs) hold the same bits. */
static inline void rig_check_same_slot(const rig *a, int64_t slot_a, const rig *b, int64_t slot_b, const char *what) {
  size_t bytes_a, bytes_b;
  void *image_a = rig_pack(a, slot_a, &bytes_a), *image_b = rig_pack(b, slot_b, &bytes_b);
  if (bytes_a != bytes_b) stop_test("%s: images of %zu and %zu bytes", what, bytes_a, bytes_b);
  check_equal_bytes(image_a, image_b, bytes_a, what);
  free(image_a);
  free(image_b);
}

static inline void rig_reset(rig *r, int64_t slot) {
  OK(lla_state_reset(r->state, index64(&slot), 1, no_index(), NULL, &error));
}

static inline int64_t rig_query(const rig *r, lla_state_key key, int64_t slot) {
  int64_t value = -1;
  OK(lla_state_query(r->state, key, slot, &value, &error));
  return value;
}

#endif
