/* SPDX-License-Identifier: Apache-2.0 */
/* Handles may be released in every order; references are counted; NULL is ignored; a failed creation leaves nothing. */
#include "rig.h"

static int64_t outstanding;

static void *counted_allocate(size_t bytes, size_t alignment, void *user) {
  void *memory = NULL;
  if (posix_memalign(&memory, alignment < sizeof(void *) ? sizeof(void *) : alignment, bytes) != 0) return NULL;
  ++*(int64_t *)user;
  return memory;
}

static void counted_release(void *memory, size_t bytes, size_t alignment, void *user) {
  (void)bytes;
  (void)alignment;
  --*(int64_t *)user;
  free(memory);
}

static lla_context *counted_context(void) {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_allocator allocator;
  lla_context *context = NULL;
  memset(&allocator, 0, sizeof allocator);
  allocator.struct_size = sizeof allocator;
  allocator.allocate = counted_allocate;
  allocator.release = counted_release;
  allocator.user = &outstanding;
  options.allocator = &allocator;
  OK(lla_context_create(&options, &context, &error));
  return context;
}

/* One token through the handles that are left: they must still work. */
static void append_one(lla_layer *layer, lla_state *state) {
  float q[8] = {1, 0, 0, 0, 0, 1, 0, 0}, v[8] = {1, 2, 3, 4, 5, 6, 7, 8}, y[8] = {0};
  lla_binding io[4];
  io[0] = lla_bind(LLA_Q, lla_tensor_of(q, LLA_F32, 1, 2, 4, -1));
  io[1] = lla_bind(LLA_K, lla_tensor_of(q, LLA_F32, 1, 2, 4, -1));
  io[2] = lla_bind(LLA_V, lla_tensor_of(v, LLA_F32, 1, 2, 4, -1));
  io[3] = lla_bind(LLA_Y, lla_tensor_of(y, LLA_F32, 1, 2, 4, -1));
  OK(lla_append(layer, state, 0, io, 4, NULL, 0, NULL, &error));
  CHECK(y[0] >= 1.0f && y[7] >= 8.0f);
}

static void every_order_of_release(void **unused) {
  static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  int o, i;
  (void)unused;
  for (o = 0; o < 6; ++o) {
    lla_context *context = counted_context();
    lla_layer_desc desc = mixer_desc(LLA_SCALAR_GATE, 2, 2, 4, 4, 0);
    lla_layer *layer = NULL;
    lla_state *state = NULL;
    int layer_alive = 1, state_alive = 1;
    OK(lla_layer_create(context, &desc, &layer, &error));
    OK(lla_state_create(&layer, 1, NULL, NULL, 0, &state, &error));
    append_one(layer, state);
    CHECK(outstanding > 0);
    for (i = 0; i < 3; ++i) {
      switch (orders[o][i]) {
        case 0:
          lla_context_release(context);
          break;
        case 1:
          lla_layer_release(layer);
          layer_alive = 0;
          break;
        default:
          lla_state_release(state);
          state_alive = 0;
      }
      /* A state keeps its layers alive, so that its layer handle is good as long as the state is. */
      if (state_alive) append_one(layer, state);
      if (layer_alive) {
        int64_t levels = -1;
        size_t size = sizeof levels;
        OK(lla_layer_query(layer, LLA_LAYER_LEVELS, 0, &levels, &size, &error));
        CHECK(levels == 0);
      }
    }
    CHECK(outstanding == 0);
  }
}

static void references_are_counted(void **unused) {
  lla_context *context = counted_context();
  lla_layer_desc desc = mixer_desc(LLA_DELTA_RULE, 2, 2, 4, 4, 3);
  lla_layer *layer = NULL, *group[3];
  lla_state *state = NULL;
  int i;
  (void)unused;
  OK(lla_layer_create(context, &desc, &layer, &error));
  for (i = 0; i < 3; ++i) group[i] = layer; /* equal layers may share one handle */
  OK(lla_state_create(group, 3, NULL, NULL, 0, &state, &error));
  CHECK(lla_context_retain(context) == context);
  CHECK(lla_layer_retain(layer) == layer);
  CHECK(lla_state_retain(state) == state);
  for (i = 0; i < 2; ++i) {
    lla_context_release(context);
    lla_layer_release(layer);
    CHECK(outstanding > 0);
    CHECK(lla_state_length(state, 0, &(int64_t){0}, NULL) == LLA_OK);
    lla_state_release(state);
  }
  CHECK(outstanding == 0);
}

static void null_is_ignored(void **unused) {
  (void)unused;
  CHECK(lla_context_retain(NULL) == NULL);
  CHECK(lla_layer_retain(NULL) == NULL);
  CHECK(lla_state_retain(NULL) == NULL);
  lla_context_release(NULL);
  lla_layer_release(NULL);
  lla_state_release(NULL);
  lla_batch_discard(NULL);
  CHECK(lla_batch_faults(NULL) == 0);
  CHECK(lla_tasks_phases(NULL) == 0);
  CHECK(lla_tasks_count(NULL, 0) == 0);
  lla_tasks_run(NULL, 0, 0, 0);
}

static void a_failed_creation_leaves_nothing(void **unused) {
  lla_context *context = counted_context(), *untouched = (lla_context *)&outstanding;
  lla_layer_desc desc = mixer_desc(LLA_SCALAR_GATE, 3, 2, 4, 4, 0); /* 2 does not divide 3 */
  lla_layer *layer = (lla_layer *)&outstanding;
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  const int64_t before = outstanding;
  (void)unused;
  FAILS(LLA_INVALID_ARGUMENT, "groups", lla_layer_create(context, &desc, &layer, &error));
  CHECK(layer == (lla_layer *)&outstanding && outstanding == before);
  options.backend = 99;
  FAILS(LLA_INVALID_ARGUMENT, "backend", lla_context_create(&options, &untouched, &error));
  CHECK(untouched == (lla_context *)&outstanding);
  lla_context_release(context);
  CHECK(outstanding == 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(every_order_of_release), cmocka_unit_test(references_are_counted),
                                     cmocka_unit_test(null_is_ignored), cmocka_unit_test(a_failed_creation_leaves_nothing)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
