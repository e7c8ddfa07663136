/* SPDX-License-Identifier: Apache-2.0 */
/* Every pointer that must not be NULL, of every function: LLA_NULL_POINTER, a text that names it, and nothing changed. */
#include "bad_input.h"

#define NULL_NAMED(name, call) FAILS(LLA_NULL_POINTER, name, call)

static void contexts_and_layers(void **unused) {
  const lla_layer_desc desc = victim_mixer();
  victim v;
  lla_layer *layer = (lla_layer *)&v;
  size_t bytes = 4242, alignment = 4242;
  int64_t number = 4242;
  (void)unused;
  victim_open(&v, &desc);
  NULL_NAMED("context", lla_context_create(NULL, NULL, &error));
  bytes = sizeof number;
  NULL_NAMED("context", lla_context_query(NULL, LLA_CONTEXT_THREADS, &number, &bytes, &error));
  NULL_NAMED("size", lla_context_query(v.r.context, LLA_CONTEXT_THREADS, &number, NULL, &error));
  NULL_NAMED("context", lla_layer_create(NULL, &desc, &layer, &error));
  NULL_NAMED("description", lla_layer_create(v.r.context, NULL, &layer, &error));
  NULL_NAMED("layer", lla_layer_create(v.r.context, &desc, NULL, &error));
  NULL_NAMED("context", lla_layer_supported(NULL, &desc, &error));
  NULL_NAMED("description", lla_layer_supported(v.r.context, NULL, &error));
  NULL_NAMED("layer", lla_layer_query(NULL, LLA_LAYER_LEVELS, 0, &number, &bytes, &error));
  NULL_NAMED("size", lla_layer_query(v.r.layer[0].layer, LLA_LAYER_LEVELS, 0, &number, NULL, &error));
  bytes = 4242;
  NULL_NAMED("layer", lla_layer_workspace(NULL, &v.r.limits, LLA_PASS_FORWARD, &bytes, &alignment, &error));
  NULL_NAMED("limits", lla_layer_workspace(v.r.layer[0].layer, NULL, LLA_PASS_FORWARD, &bytes, &alignment, &error));
  NULL_NAMED("bytes", lla_layer_workspace(v.r.layer[0].layer, &v.r.limits, LLA_PASS_FORWARD, NULL, &alignment, &error));
  NULL_NAMED("layer", lla_layer_saved_size(NULL, &v.r.limits, &bytes, &alignment, &error));
  NULL_NAMED("limits", lla_layer_saved_size(v.r.layer[0].layer, NULL, &bytes, &alignment, &error));
  NULL_NAMED("bytes", lla_layer_saved_size(v.r.layer[0].layer, &v.r.limits, NULL, &alignment, &error));
  CHECK(layer == (lla_layer *)&v && bytes == 4242 && alignment == 4242 && number == 4242);
  /* An alignment that nobody wants, and an error that nobody reads. */
  OK(lla_layer_workspace(v.r.layer[0].layer, &v.r.limits, LLA_PASS_FORWARD, &bytes, NULL, &error));
  OK(lla_layer_saved_size(v.r.layer[0].layer, &v.r.limits, &bytes, NULL, &error));
  CHECK(lla_layer_create(v.r.context, NULL, &layer, NULL) == LLA_NULL_POINTER);
  victim_close(&v);
}

static void batches(void **unused) {
  const lla_layer_desc desc = victim_mixer();
  const lla_rows rows = LLA_ROWS_INIT;
  victim v;
  lla_batch *batch = (lla_batch *)&v;
  size_t bytes = 4242, alignment = 4242;
  (void)unused;
  victim_open(&v, &desc);
  NULL_NAMED("context", lla_batch_size(NULL, &v.r.limits, &bytes, &alignment, &error));
  NULL_NAMED("limits", lla_batch_size(v.r.context, NULL, &bytes, &alignment, &error));
  NULL_NAMED("bytes", lla_batch_size(v.r.context, &v.r.limits, NULL, &alignment, &error));
  NULL_NAMED("context", lla_batch_init(NULL, &v.r.limits, v.r.workspace, v.r.workspace_bytes, &batch, &error));
  NULL_NAMED("limits", lla_batch_init(v.r.context, NULL, v.r.workspace, v.r.workspace_bytes, &batch, &error));
  NULL_NAMED("memory", lla_batch_init(v.r.context, &v.r.limits, NULL, (size_t)1 << 30, &batch, &error));
  NULL_NAMED("batch", lla_batch_init(v.r.context, &v.r.limits, v.r.workspace, v.r.workspace_bytes, NULL, &error));
  CHECK(batch == (lla_batch *)&v && bytes == 4242 && alignment == 4242);
  OK(lla_batch_size(v.r.context, &v.r.limits, &bytes, NULL, &error));
  NULL_NAMED("batch", lla_batch_plan(NULL, v.r.state, &rows, NULL, &error));
  victim_plan(&v);
  NULL_NAMED("rows", lla_batch_plan(v.r.batch, v.r.state, NULL, NULL, &error));
  FAILS(LLA_BUSY, "batch", lla_state_commit(v.r.state, v.r.batch, no_index(), NULL, &error)); /* a refused plan is no plan */
  victim_close(&v);
}

static void calls(void **unused) {
  const lla_layer_desc desc = mamba2_desc(2, 1, 8, 8, 12, 8);
  victim v;
  lla_layer *layer;
  lla_tasks *tasks = (lla_tasks *)&v;
  lla_forward_args forward, good_forward;
  lla_backward_args backward, good_backward;
  lla_binding gradients[RIG_IO + RIG_WEIGHTS];
  int how;
  (void)unused;
  victim_open(&v, &desc);
  layer = v.r.layer[0].layer;
  victim_plan(&v);
  good_forward = rig_forward_args(&v.r, 0);
  good_backward = rig_backward_args(&v.r, 0);
  good_backward.gradients = gradients;
  good_backward.gradient_count = rig_list_gradients(&v.r, 0, gradients);
  NULL_NAMED("tasks", lla_layer_forward_tasks(layer, &good_forward, NULL, &error));
  NULL_NAMED("tasks", lla_layer_backward_tasks(layer, &good_backward, NULL, &error));
  for (how = 0; how < 2; ++how) {
#define FORWARD(l, a) (how ? lla_layer_forward_tasks(l, a, &tasks, &error) : lla_layer_forward(l, a, &error))
#define BACKWARD(l, a) (how ? lla_layer_backward_tasks(l, a, &tasks, &error) : lla_layer_backward(l, a, &error))
    NULL_NAMED("layer", FORWARD(NULL, &good_forward));
    NULL_NAMED("arguments", FORWARD(layer, NULL));
    NULL_NAMED("layer", BACKWARD(NULL, &good_backward));
    NULL_NAMED("arguments", BACKWARD(layer, NULL));
#define WITHOUT(field)                          \
  forward = good_forward;                       \
  backward = good_backward;                     \
  forward.field = NULL;                         \
  backward.field = NULL;                        \
  NULL_NAMED(#field, FORWARD(layer, &forward)); \
  NULL_NAMED(#field, BACKWARD(layer, &backward))
    WITHOUT(batch);
    WITHOUT(io);
    WITHOUT(weights);
    WITHOUT(workspace);
    backward = good_backward;
    backward.outputs = NULL;
    NULL_NAMED("outputs", BACKWARD(layer, &backward));
    backward = good_backward;
    backward.gradients = NULL;
    NULL_NAMED("gradients", BACKWARD(layer, &backward));
  }
  CHECK(tasks == (lla_tasks *)&v);
  NULL_NAMED("layer", lla_append(NULL, v.r.state, 0, good_forward.io, 2, good_forward.weights, 9, NULL, &error));
  NULL_NAMED("state", lla_append(layer, NULL, 0, good_forward.io, 2, good_forward.weights, 9, NULL, &error));
  NULL_NAMED("io", lla_append(layer, v.r.state, 0, NULL, 2, good_forward.weights, 9, NULL, &error));
  NULL_NAMED("io", lla_append(layer, v.r.state, 0, NULL, 0, good_forward.weights, 9, NULL, &error));
  NULL_NAMED("weights", lla_append(layer, v.r.state, 0, good_forward.io, 2, NULL, 9, NULL, &error));
  victim_close(&v);
}

static void states(void **unused) {
  const lla_layer_desc desc = victim_mixer();
  const int64_t one = 0;
  victim v;
  lla_state *state = (lla_state *)&v, *s;
  lla_layer *group[2];
  lla_block_geometry geometry = LLA_BLOCK_GEOMETRY_INIT;
  lla_block_memory memory = {0, LLA_BLOCK_NODE, 0, NULL, 4096};
  lla_image_info info;
  lla_tensor tensor;
  int64_t number = 4242;
  size_t bytes = 4242;
  char buffer[64];
  (void)unused;
  victim_open(&v, &desc);
  s = v.r.state;
  group[0] = v.r.layer[0].layer;
  group[1] = NULL;
  tensor = lla_tensor_of(buffer, LLA_F32, 4, 4, -1, -1);
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  NULL_NAMED("layers", lla_state_geometry(NULL, 1, NULL, 0, LLA_BLOCK_NODE, &geometry, &error));
  NULL_NAMED("layers[1]", lla_state_geometry(group, 2, NULL, 0, LLA_BLOCK_NODE, &geometry, &error));
  NULL_NAMED("geometry", lla_state_geometry(group, 1, NULL, 0, LLA_BLOCK_NODE, NULL, &error));
  NULL_NAMED("layers", lla_state_create(NULL, 1, NULL, NULL, 0, &state, &error));
  NULL_NAMED("layers[1]", lla_state_create(group, 2, NULL, NULL, 0, &state, &error));
  NULL_NAMED("state", lla_state_create(group, 1, NULL, NULL, 0, NULL, &error));
  NULL_NAMED("memory", lla_state_create(group, 1, NULL, NULL, 1, &state, &error));
  NULL_NAMED("memory[0].base", lla_state_create(group, 1, NULL, &memory, 1, &state, &error));
  CHECK(state == (lla_state *)&v && geometry.bytes == 0);
  victim_plan(&v);
  NULL_NAMED("state", lla_state_commit(NULL, v.r.batch, no_index(), NULL, &error));
  NULL_NAMED("batch", lla_state_commit(s, NULL, no_index(), NULL, &error));
  NULL_NAMED("state", lla_state_settle(NULL, v.r.batch, no_index(), &number, &error));
  NULL_NAMED("batch", lla_state_settle(s, NULL, no_index(), &number, &error));
  NULL_NAMED("state", lla_state_reset(NULL, index64(&one), 1, no_index(), NULL, &error));
  NULL_NAMED("state", lla_state_fork(NULL, index64(&one), index64(&one), 1, NULL, &error));
  NULL_NAMED("sources", lla_state_fork(s, no_index(), index64(&one), 1, NULL, &error));
  NULL_NAMED("targets", lla_state_fork(s, index64(&one), no_index(), 1, NULL, &error));
  NULL_NAMED("state", lla_state_truncate(NULL, 0, 0, NULL, &error));
  NULL_NAMED("state", lla_state_length(NULL, 0, &number, &error));
  NULL_NAMED("length", lla_state_length(s, 0, NULL, &error));
  NULL_NAMED("state", lla_state_min_length(NULL, 0, &number, &error));
  NULL_NAMED("length", lla_state_min_length(s, 0, NULL, &error));
  NULL_NAMED("state", lla_state_query(NULL, LLA_STATE_SLOTS, 0, &number, &error));
  NULL_NAMED("value", lla_state_query(s, LLA_STATE_SLOTS, 0, NULL, &error));
  NULL_NAMED("state", lla_state_read(NULL, 0, 0, LLA_PART_TAIL_K, 0, &tensor, NULL, &error));
  NULL_NAMED("tensor", lla_state_read(s, 0, 0, LLA_PART_TAIL_K, 0, NULL, NULL, &error));
  NULL_NAMED("state", lla_state_write(NULL, 0, 0, LLA_PART_TAIL_K, 0, &tensor, NULL, &error));
  NULL_NAMED("tensor", lla_state_write(s, 0, 0, LLA_PART_TAIL_K, 0, NULL, NULL, &error));
  NULL_NAMED("state", lla_state_import_linear(NULL, 0, 0, 0, &tensor, 1, NULL, &error));
  NULL_NAMED("matrix", lla_state_import_linear(s, 0, 0, 0, NULL, 1, NULL, &error));
  NULL_NAMED("state", lla_state_export_size(NULL, 0, &bytes, &error));
  NULL_NAMED("bytes", lla_state_export_size(s, 0, NULL, &error));
  NULL_NAMED("state", lla_state_pack(NULL, 0, buffer, sizeof buffer, NULL, &error));
  NULL_NAMED("buffer", lla_state_pack(s, 0, NULL, (size_t)1 << 30, NULL, &error));
  NULL_NAMED("buffer", lla_state_seal(NULL, 4096, NULL, &error));
  NULL_NAMED("buffer", lla_state_check(NULL, 4096, NULL, &info, &error));
  NULL_NAMED("state", lla_state_unpack(NULL, 0, buffer, sizeof buffer, NULL, &error));
  NULL_NAMED("buffer", lla_state_unpack(s, 0, NULL, (size_t)1 << 30, NULL, &error));
  CHECK(number == 4242 && bytes == 4242 && info.bytes == 0);
  OK(lla_state_fork(s, no_index(), no_index(), 0, NULL, &error));
  victim_close(&v);
}

/* An error that is NULL, too small for its text, or not set up is never written beyond what it says it has. */
static void errors_of_every_size(void **unused) {
  struct {
    lla_error error;
    char guard[16];
  } room;
  size_t size;
  (void)unused;
  for (size = 0; size <= sizeof(lla_error); ++size) {
    size_t i;
    memset(&room, 0x77, sizeof room);
    room.error.struct_size = size;
    CHECK(lla_state_seal(NULL, 0, NULL, &room.error) == LLA_NULL_POINTER);
    CHECK(room.error.struct_size == size);
    for (i = size < sizeof(size_t) ? sizeof(size_t) : size; i < sizeof room; ++i) CHECK(((char *)&room)[i] == 0x77);
    if (size > offsetof(lla_error, text)) {
      CHECK(room.error.code == LLA_NULL_POINTER);
      CHECK(memchr(room.error.text, 0, size - offsetof(lla_error, text)) != NULL);
    }
  }
  memset(&room, 0x77, sizeof room);
  room.error.struct_size = SIZE_MAX; /* a newer, larger struct */
  CHECK(lla_state_seal(NULL, 0, NULL, &room.error) == LLA_NULL_POINTER);
  CHECK(room.error.code == LLA_NULL_POINTER && room.guard[0] == 0x77);
  { /* Success leaves it alone. */
    lla_context *context = NULL;
    lla_error error = LLA_ERROR_INIT;
    memset(error.text, 'x', 8);
    error.code = 12345;
    CHECK(lla_context_create(NULL, &context, &error) == LLA_OK);
    CHECK(error.code == 12345 && error.text[0] == 'x');
    lla_context_release(context);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(contexts_and_layers), cmocka_unit_test(batches),
                                     cmocka_unit_test(calls), cmocka_unit_test(states),
                                     cmocka_unit_test(errors_of_every_size)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
