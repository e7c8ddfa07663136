/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors, workspaces and saved buffers that do not fit: each is refused by name, forward and backward, before anything is
 * written. */
#include <math.h>

#include "bad_input.h"

/* Names as they must stand in the text. */
static const char *role_text(lla_role role) {
  switch (role) {
    case LLA_Q:
      return "LLA_Q";
    case LLA_K:
      return "LLA_K";
    case LLA_V:
      return "LLA_V";
    case LLA_GATE:
      return "LLA_GATE";
    case LLA_WRITE:
      return "LLA_WRITE";
    case LLA_LAMBDA:
      return "LLA_LAMBDA";
    case LLA_Z:
      return "LLA_Z";
    case LLA_X:
      return "LLA_X";
    case LLA_Y:
      return "LLA_Y";
    case LLA_WEIGHT_CONV:
      return "LLA_WEIGHT_CONV";
    case LLA_WEIGHT_CONV_BIAS:
      return "LLA_WEIGHT_CONV_BIAS";
    case LLA_WEIGHT_DT_BIAS:
      return "LLA_WEIGHT_DT_BIAS";
    case LLA_WEIGHT_A_LOG:
      return "LLA_WEIGHT_A_LOG";
    case LLA_WEIGHT_LAMBDA:
      return "LLA_WEIGHT_LAMBDA";
    case LLA_WEIGHT_SKIP:
      return "LLA_WEIGHT_SKIP";
    case LLA_WEIGHT_NORM:
      return "LLA_WEIGHT_NORM";
    case LLA_WEIGHT_IN_PROJ:
      return "LLA_WEIGHT_IN_PROJ";
    case LLA_WEIGHT_OUT_PROJ:
      return "LLA_WEIGHT_OUT_PROJ";
    default:
      return "?";
  }
}

typedef struct attempt {
  victim *v;
  lla_forward_args forward;
  lla_backward_args backward;
  lla_binding io[RIG_IO], weights[RIG_WEIGHTS], outputs[1], gradients[RIG_IO + RIG_WEIGHTS];
} attempt;

static void begin(attempt *a, victim *v) {
  a->v = v;
  a->forward = rig_forward_args(&v->r, 0);
  a->backward = rig_backward_args(&v->r, 0);
  memcpy(a->io, a->forward.io, (size_t)a->forward.io_count * sizeof(lla_binding));
  memcpy(a->weights, a->forward.weights, (size_t)a->forward.weight_count * sizeof(lla_binding));
  a->outputs[0] = a->backward.outputs[0];
  a->backward.gradient_count = rig_list_gradients(&v->r, 0, a->gradients);
  a->forward.io = a->backward.io = a->io;
  a->forward.weights = a->backward.weights = a->weights;
  a->backward.outputs = a->outputs;
  a->backward.gradients = a->gradients;
}

static void refused_forward(attempt *a, lla_status status, const char *word) {
  lla_tasks *tasks = NULL;
  FAILS(status, word, lla_layer_forward(a->v->r.layer[0].layer, &a->forward, &error));
  FAILS(status, word, lla_layer_forward_tasks(a->v->r.layer[0].layer, &a->forward, &tasks, &error));
  CHECK(tasks == NULL);
}

static void refused_backward(attempt *a, lla_status status, const char *word) {
  FAILS(status, word, lla_layer_backward(a->v->r.layer[0].layer, &a->backward, &error));
}

typedef struct fault {
  lla_status status;
  const char *what;
  void (*apply)(lla_tensor *tensor);
} fault;

static void low_rank(lla_tensor *t) { --t->rank; }
static void high_rank(lla_tensor *t) {
  t->strides[t->rank] = 1;
  t->dims[t->rank++] = 1;
}
static void rank_zero(lla_tensor *t) { t->rank = 0; }
static void rank_negative(lla_tensor *t) { t->rank = -1; }
static void rank_huge(lla_tensor *t) { t->rank = 1000000; }
static void first_less(lla_tensor *t) { --t->dims[0]; }
static void first_more(lla_tensor *t) { ++t->dims[0]; }
static void first_negative(lla_tensor *t) { t->dims[0] = -1; }
static void first_huge(lla_tensor *t) { t->dims[0] = INT64_MAX; }
static void last_less(lla_tensor *t) { --t->dims[t->rank - 1]; }
static void last_huge(lla_tensor *t) { t->dims[t->rank - 1] = INT64_MAX; }
static void last_lowest(lla_tensor *t) { t->dims[t->rank - 1] = INT64_MIN; }
static void last_stride(lla_tensor *t) { t->strides[t->rank - 1] = 2; }
static void last_stride_zero(lla_tensor *t) { t->strides[t->rank - 1] = 0; }
static void first_stride_negative(lla_tensor *t) { t->strides[0] = -t->strides[0]; }
static void first_stride_huge(lla_tensor *t) { t->strides[0] = INT64_MAX; }
static void first_stride_large(lla_tensor *t) { t->strides[0] = INT64_MAX / 4 + 1; }
static void no_dtype(lla_tensor *t) { t->dtype = LLA_DTYPE_DEFAULT; }
static void integer(lla_tensor *t) { t->dtype = LLA_I32; }
static void unknown_dtype(lla_tensor *t) { t->dtype = 99; }
static void wide_dtype(lla_tensor *t) { t->dtype = LLA_F64; }
static void misaligned(lla_tensor *t) { t->data = (char *)t->data + 1; }
static void no_data(lla_tensor *t) { t->data = NULL; }

static const fault faults[] = {{LLA_SHAPE_MISMATCH, "rank one less", low_rank},
                               {LLA_SHAPE_MISMATCH, "rank one more", high_rank},
                               {LLA_SHAPE_MISMATCH, "rank 0", rank_zero},
                               {LLA_SHAPE_MISMATCH, "rank -1", rank_negative},
                               {LLA_SHAPE_MISMATCH, "rank 1000000", rank_huge},
                               {LLA_SHAPE_MISMATCH, "first dimension less", first_less},
                               {LLA_SHAPE_MISMATCH, "first dimension more", first_more},
                               {LLA_SHAPE_MISMATCH, "first dimension -1", first_negative},
                               {LLA_SHAPE_MISMATCH, "first dimension huge", first_huge},
                               {LLA_SHAPE_MISMATCH, "last dimension less", last_less},
                               {LLA_SHAPE_MISMATCH, "last dimension huge", last_huge},
                               {LLA_SHAPE_MISMATCH, "last dimension lowest", last_lowest},
                               {LLA_SHAPE_MISMATCH, "last stride 2", last_stride},
                               {LLA_SHAPE_MISMATCH, "last stride 0", last_stride_zero},
                               {LLA_SHAPE_MISMATCH, "first stride negative", first_stride_negative},
                               {LLA_SIZE_OVERFLOW, "first stride huge", first_stride_huge},
                               {LLA_SIZE_OVERFLOW, "first stride large", first_stride_large},
                               {LLA_DTYPE_MISMATCH, "no type", no_dtype},
                               {LLA_DTYPE_MISMATCH, "integer type", integer},
                               {LLA_DTYPE_MISMATCH, "unknown type", unknown_dtype},
                               {LLA_DTYPE_MISMATCH, "type of the reference", wide_dtype},
                               {LLA_MISALIGNED, "one byte off", misaligned},
                               {LLA_NULL_POINTER, "no data", no_data}};

/* A stride along which there is one element is never looked at; a vector has but one stride. */
static int harmless(const fault *f, const lla_tensor *t) {
  const int stride_of_first =
      f->apply == first_stride_negative || f->apply == first_stride_huge || f->apply == first_stride_large;
  if (stride_of_first && t->rank == 1) return 1;
  if ((f->apply == last_stride || f->apply == last_stride_zero) && t->dims[t->rank - 1] == 1) return 1;
  return 0;
}

/* λ may have more columns than are read: then it is the size that is impossible. */
static lla_status status_of_input(const fault *f, lla_role role) {
  return role == LLA_LAMBDA && f->apply == last_huge ? LLA_SIZE_OVERFLOW : f->status;
}

static void check_faults(const lla_layer_desc *desc) {
  victim v;
  attempt a;
  size_t f;
  int64_t i;
  victim_open(&v, desc);
  victim_plan(&v);
  for (f = 0; f < sizeof faults / sizeof faults[0]; ++f) {
    begin(&a, &v);
    for (i = 0; i < a.forward.io_count; ++i) {
      begin(&a, &v);
      if (harmless(&faults[f], &a.io[i].tensor)) continue;
      faults[f].apply(&a.io[i].tensor);
      refused_forward(&a, status_of_input(&faults[f], a.io[i].role), role_text(a.io[i].role));
      if (i + 1 < a.forward.io_count)
        refused_backward(&a, status_of_input(&faults[f], a.io[i].role), role_text(a.io[i].role));
    }
    for (i = 0; i < a.forward.weight_count; ++i) {
      begin(&a, &v);
      if (harmless(&faults[f], &a.weights[i].tensor)) continue;
      if (faults[f].apply == high_rank && a.weights[i].tensor.rank == 2 && a.weights[i].role == LLA_WEIGHT_CONV)
        continue; /* [channels, W, 1] is caught by its dimensions in another fault */
      faults[f].apply(&a.weights[i].tensor);
      refused_forward(&a, faults[f].status, role_text(a.weights[i].role));
      refused_backward(&a, faults[f].status, role_text(a.weights[i].role));
    }
    for (i = 0; i < a.backward.gradient_count; ++i) {
      begin(&a, &v);
      if (harmless(&faults[f], &a.gradients[i].tensor)) continue;
      if (faults[f].apply == high_rank && a.gradients[i].role == LLA_WEIGHT_CONV) continue;
      faults[f].apply(&a.gradients[i].tensor);
      refused_backward(&a, faults[f].status, role_text(a.gradients[i].role));
    }
    begin(&a, &v);
    faults[f].apply(&a.outputs[0].tensor);
    refused_backward(&a, faults[f].status, "LLA_Y");
  }
  victim_close(&v);
}

static void faults_of_tensors(void **unused) {
  const lla_layer_desc mixer = victim_mixer(), block = mamba2_desc(2, 1, 8, 8, 12, 8);
  (void)unused;
  check_faults(&mixer);
  check_faults(&block);
}

static void roles(void **unused) {
  const lla_layer_desc desc = mamba2_desc(2, 1, 8, 8, 12, 8), mixer = victim_mixer();
  victim v;
  attempt a;
  (void)unused;
  victim_open(&v, &desc);
  victim_plan(&v);
  begin(&a, &v);
  a.forward.io_count = 1; /* no output */
  refused_forward(&a, LLA_MISSING_ROLE, "LLA_Y");
  begin(&a, &v);
  a.forward.io = a.io + 1; /* no input */
  a.forward.io_count = 1;
  refused_forward(&a, LLA_MISSING_ROLE, "LLA_X");
  begin(&a, &v);
  a.forward.weight_count = a.backward.weight_count = 1;
  refused_forward(&a, LLA_MISSING_ROLE, "LLA_WEIGHT_");
  refused_backward(&a, LLA_MISSING_ROLE, "LLA_WEIGHT_");
  begin(&a, &v);
  a.backward.output_count = 0;
  refused_backward(&a, LLA_MISSING_ROLE, "LLA_Y");
  begin(&a, &v);
  a.weights[1] = a.weights[0]; /* twice */
  refused_forward(&a, LLA_MISSING_ROLE, "LLA_WEIGHT_IN_PROJ");
  begin(&a, &v);
  a.io[1] = a.io[0];
  refused_forward(&a, LLA_MISSING_ROLE, "LLA_X");
  begin(&a, &v);
  a.gradients[1] = a.gradients[0];
  refused_backward(&a, LLA_MISSING_ROLE, "LLA_X");
  begin(&a, &v);
  a.io[0].role = LLA_Q; /* a role of other layers */
  refused_forward(&a, LLA_INVALID_ARGUMENT, "LLA_Q");
  begin(&a, &v);
  a.io[0].role = 12345;
  refused_forward(&a, LLA_INVALID_ARGUMENT, "12345");
  begin(&a, &v);
  a.io[0].role = -5;
  refused_forward(&a, LLA_INVALID_ARGUMENT, "-5");
  begin(&a, &v);
  a.weights[2].role = LLA_WEIGHT_Q_PROJ;
  refused_forward(&a, LLA_INVALID_ARGUMENT, "LLA_WEIGHT_Q_PROJ");
  begin(&a, &v);
  a.gradients[0].role = LLA_Y;
  refused_backward(&a, LLA_INVALID_ARGUMENT, "LLA_Y");
  begin(&a, &v);
  a.io[0].flags = LLA_ACCUMULATE; /* for gradients only */
  refused_forward(&a, LLA_INVALID_ARGUMENT, "flags");
  begin(&a, &v);
  a.gradients[0].flags = 2;
  refused_backward(&a, LLA_INVALID_ARGUMENT, "flags");
  begin(&a, &v);
  a.forward.io_count = -1;
  refused_forward(&a, LLA_INVALID_ARGUMENT, "io_count");
  begin(&a, &v);
  a.forward.weight_count = a.backward.weight_count = INT64_MIN;
  refused_forward(&a, LLA_INVALID_ARGUMENT, "weight_count");
  refused_backward(&a, LLA_INVALID_ARGUMENT, "weight_count");
  begin(&a, &v);
  a.backward.output_count = -1;
  refused_backward(&a, LLA_INVALID_ARGUMENT, "output_count");
  begin(&a, &v);
  a.backward.gradient_count = -1;
  refused_backward(&a, LLA_INVALID_ARGUMENT, "gradient_count");
  victim_close(&v);

  victim_open(&v, &mixer);
  victim_plan(&v);
  begin(&a, &v);
  a.io[a.forward.io_count - 1].tensor.data = a.io[2].tensor.data; /* the output over the values */
  refused_forward(&a, LLA_INVALID_ARGUMENT, "LLA_V");
  begin(&a, &v);
  a.gradients[2].tensor.data = a.outputs[0].tensor.data;
  refused_backward(&a, LLA_INVALID_ARGUMENT, "LLA_V");
  begin(&a, &v);
  a.io[a.forward.io_count - 1].tensor.strides[0] = 0; /* all rows of the output in one place */
  refused_forward(&a, LLA_SHAPE_MISMATCH, "LLA_Y");
  begin(&a, &v);
  a.io[a.forward.io_count - 1].tensor.strides[1] = 3; /* heads that overlap */
  refused_forward(&a, LLA_SHAPE_MISMATCH, "LLA_Y");
  begin(&a, &v);
  a.io[5].tensor.dims[2] = 7; /* fewer columns than the layer has levels */
  CHECK(a.io[5].role == LLA_LAMBDA);
  refused_forward(&a, LLA_SHAPE_MISMATCH, "LLA_LAMBDA");
  refused_backward(&a, LLA_SHAPE_MISMATCH, "LLA_LAMBDA");
  victim_close(&v);
}

static void buffers(void **unused) {
  const lla_layer_desc desc = victim_mixer();
  victim v;
  attempt a;
  size_t bytes, saved_bytes, alignment;
  char *guarded, *saved;
  int pass;
  (void)unused;
  victim_open(&v, &desc);
  victim_plan(&v);
  for (pass = LLA_PASS_FORWARD; pass <= LLA_PASS_BACKWARD; ++pass) {
    OK(lla_layer_workspace(v.r.layer[0].layer, &v.r.limits, pass, &bytes, &alignment, &error));
    guarded = (char *)take(bytes + 128);
    memset(guarded, 0x3c, bytes + 128);
    begin(&a, &v);
    a.forward.workspace = a.backward.workspace = guarded + 64;
    a.forward.workspace_bytes = a.backward.workspace_bytes = bytes - 1;
#define REFUSED(status, word)          \
  if (pass == LLA_PASS_FORWARD)        \
    refused_forward(&a, status, word); \
  else                                 \
    refused_backward(&a, status, word)
    REFUSED(LLA_BUFFER_TOO_SMALL, "workspace");
    a.forward.workspace_bytes = a.backward.workspace_bytes = 0;
    REFUSED(LLA_BUFFER_TOO_SMALL, "workspace");
    a.forward.workspace_bytes = a.backward.workspace_bytes = bytes;
    a.forward.workspace = a.backward.workspace = guarded + 64 + alignment / 2;
    REFUSED(LLA_MISALIGNED, "workspace");
    a.forward.workspace = a.backward.workspace = guarded + 64;
    a.forward.stream = a.backward.stream = guarded;
    REFUSED(LLA_INVALID_ARGUMENT, "stream");
    a.forward.stream = a.backward.stream = NULL;
    OK(lla_layer_saved_size(v.r.layer[0].layer, &v.r.limits, &saved_bytes, &alignment, &error));
    saved = (char *)take(saved_bytes + 128);
    a.forward.saved_bytes = a.backward.saved_bytes = 5;
    REFUSED(LLA_INVALID_ARGUMENT, "saved");
    if (saved_bytes > 0) {
      a.forward.saved = saved;
      a.backward.saved = saved;
      a.forward.saved_bytes = a.backward.saved_bytes = saved_bytes - 1;
      REFUSED(LLA_BUFFER_TOO_SMALL, "saved");
      a.forward.saved = saved + alignment / 2;
      a.backward.saved = saved + alignment / 2;
      a.forward.saved_bytes = a.backward.saved_bytes = saved_bytes;
      REFUSED(LLA_MISALIGNED, "saved");
    }
    free(saved);
    victim_check(&v);
    begin(&a, &v);
    a.forward.workspace = a.backward.workspace = guarded + 64;
    a.forward.workspace_bytes = a.backward.workspace_bytes = bytes; /* exactly what was asked for is enough */
    if (pass == LLA_PASS_FORWARD) {
      OK(lla_layer_forward(v.r.layer[0].layer, &a.forward, &error));
    } else {
      OK(lla_layer_backward(v.r.layer[0].layer, &a.backward, &error));
    }
    {
      size_t i;
      for (i = 0; i < 64; ++i) CHECK(guarded[i] == 0x3c && guarded[64 + bytes + i] == 0x3c);
    }
    free(guarded);
    lla_batch_discard(v.r.batch);
    victim_remember(&v);
    victim_plan(&v);
  }
  FAILS(LLA_INVALID_ARGUMENT, "pass", lla_layer_workspace(v.r.layer[0].layer, &v.r.limits, 0, &bytes, NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "pass", lla_layer_workspace(v.r.layer[0].layer, &v.r.limits, 3, &bytes, NULL, &error));
  victim_close(&v);
}

/* Forward writes what it says and nothing else: padding between rows of a strided output, rows behind the last. */
static void outputs_are_written_exactly(void **unused) {
  const lla_layer_desc desc = victim_mixer();
  const int64_t pad = 5;
  victim v;
  attempt a;
  lla_tensor *y;
  float *wide;
  int64_t row, h, e, width;
  (void)unused;
  victim_open(&v, &desc);
  victim_plan(&v);
  begin(&a, &v);
  OK(lla_layer_forward(v.r.layer[0].layer, &a.forward, &error));
  y = &a.io[a.forward.io_count - 1].tensor;
  width = 4 * (12 + pad) + pad;
  wide = (float *)take((size_t)((VICTIM_ROWS + 1) * width) * sizeof(float));
  for (e = 0; e < (VICTIM_ROWS + 1) * width; ++e) wide[e] = 12345.0f;
  y->data = wide;
  y->strides[0] = width;
  y->strides[1] = 12 + pad;
  OK(lla_layer_forward(v.r.layer[0].layer, &a.forward, &error));
  for (row = 0; row <= VICTIM_ROWS; ++row) {
    for (h = 0; h < 5; ++h) {
      for (e = 0; e < 12 + pad && h * (12 + pad) + e < width; ++e) {
        const float is = wide[row * width + h * (12 + pad) + e];
        if (row < VICTIM_ROWS && h < 4 && e < 12)
          CHECK(is == rig_output(&v.r, 0, row)[h * 12 + e]);
        else
          CHECK(is == 12345.0f);
      }
    }
  }
  free(wide);
  lla_batch_discard(v.r.batch);
  victim_remember(&v);
  victim_close(&v);
}

/* Probe S5. */
static void levels_too_few(void **unused) {
  const lla_layer_desc desc = mixer_desc(LLA_SCALAR_GATE, 2, 1, 8, 8, 4); /* 8 tokens at most */
  lla_state_desc state = LLA_STATE_DESC_INIT;
  lla_rows rows = LLA_ROWS_INIT;
  lla_forward_args arguments;
  lla_layer *layer;
  lla_state *refused = NULL;
  rig r;
  int64_t longest = 0;
  (void)unused;
  rig_open(&r, NULL, &desc, 1, &state, 1, 16, 0);
  layer = r.layer[0].layer;
  OK(lla_state_query(r.state, LLA_STATE_MAX_LENGTH, 0, &longest, &error));
  CHECK(longest == 8);
  state.max_length = 9;
  FAILS(LLA_LEVELS_EXCEEDED, "max_length", lla_state_create(&layer, 1, &state, NULL, 0, &refused, &error));
  CHECK(refused == NULL);
  rows.sequences = 1;
  rows.rows_per_sequence = 9;
  FAILS(LLA_LEVELS_EXCEEDED, "", lla_batch_plan(r.batch, r.state, &rows, NULL, &error));
  rig_append(&r, 0, 3, 8);
  {
    const lla_status status = lla_append(layer, r.state, 0, r.layer[0].io, r.layer[0].io_count, NULL, 0, NULL, NULL);
    CHECK(status == LLA_LEVELS_EXCEEDED && rig_length(&r, 0) == 8);
  }
  rig_close(&r);
  rig_open(&r, NULL, &desc, 1, NULL, 1, 16, 0);
  rig_set_rows(&r, 9);
  rig_plan(&r, &rows);
  arguments = rig_forward_args(&r, 0);
  FAILS(LLA_LEVELS_EXCEEDED, "levels", lla_layer_forward(r.layer[0].layer, &arguments, &error));
  rig_close(&r);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(faults_of_tensors), cmocka_unit_test(roles), cmocka_unit_test(buffers),
                                     cmocka_unit_test(outputs_are_written_exactly), cmocka_unit_test(levels_too_few)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
