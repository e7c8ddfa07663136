/* SPDX-License-Identifier: Apache-2.0 */
/* Every function of the interface with an allocator that fails the first allocation of the call, then the second, ... until
 * the call succeeds: each failure is a status with a text, keeps no memory, writes nothing and leaves states as they were.
 * Functions that promise not to allocate succeed at once. */
#include "meter.h"
#include "rig.h"

enum { kLayers = 3, kSlots = 4, kGroup = 80 };

/* A served model, and room for what a function under test makes. */
typedef struct world {
  meter m;
  lla_allocator allocator;
  lla_context_options options;
  rig r, training;
  lla_layer *wide[kGroup]; /* one layer, often: more than fit on the stack */
  lla_block_memory memory[9];
  int64_t memory_count;
  lla_state *single; /* of layer 0 alone, for lla_append() */
  char *image;
  size_t image_bytes;
  lla_tensor matrix, tail;
  lla_binding io[RIG_IO], gradients[RIG_IO + RIG_WEIGHTS];
  /* What a call makes; `made` is released after it has succeeded. */
  lla_context *context;
  lla_layer *layer;
  lla_state *state;
  size_t bytes;
  int64_t number;
  char text[256];
} world;

typedef lla_status (*function)(world *w, lla_error *error);

/* -- functions that allocate ------------------------------------------------------------------------------------------- */

static lla_status context_alone(world *w, lla_error *error) {
  w->options.threads = 0;
  return lla_context_create(&w->options, &w->context, error);
}
static lla_status context_with_pool(world *w, lla_error *error) {
  w->options.threads = 3;
  return lla_context_create(&w->options, &w->context, error);
}
static lla_status context_of_reference(world *w, lla_error *error) {
  lla_context_options options = w->options;
  options.threads = 2;
  options.backend = LLA_BACKEND_REFERENCE;
  return lla_context_create(&options, &w->context, error);
}
static lla_status layer_mixer(world *w, lla_error *error) {
  return lla_layer_create(w->r.context, &w->r.layer[0].desc, &w->layer, error);
}
static lla_status layer_cell(world *w, lla_error *error) {
  return lla_layer_create(w->r.context, &w->r.layer[1].desc, &w->layer, error);
}
static lla_status layer_block(world *w, lla_error *error) {
  return lla_layer_create(w->r.context, &w->r.layer[2].desc, &w->layer, error);
}
static lla_status layer_part(world *w, lla_error *error) {
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = LLA_LAYER_PROJECTION;
  d.hidden = 3;
  d.outputs = 5;
  return lla_layer_create(w->r.context, &d, &w->layer, error);
}
static lla_status state_own(world *w, lla_error *error) {
  lla_layer *group[kLayers];
  int i;
  for (i = 0; i < kLayers; ++i) group[i] = w->r.layer[i].layer;
  return lla_state_create(group, kLayers, NULL, NULL, 0, &w->state, error);
}
static lla_status state_of_gradients(world *w, lla_error *error) {
  lla_state_desc d = LLA_STATE_DESC_INIT;
  d.kind = LLA_STATE_GRADIENT;
  return lla_state_create(w->wide, 2, &d, NULL, 0, &w->state, error);
}
static lla_status state_in_callers_memory(world *w, lla_error *error) {
  lla_layer *group[kLayers];
  int i;
  for (i = 0; i < kLayers; ++i) group[i] = w->r.layer[i].layer;
  return lla_state_create(group, kLayers, NULL, w->memory, w->memory_count, &w->state, error);
}
static lla_status state_of_many_layers(world *w, lla_error *error) {
  return lla_state_create(w->wide, kGroup, NULL, NULL, 0, &w->state, error);
}
static lla_status geometry_of_many_layers(world *w, lla_error *error) {
  lla_block_geometry g = LLA_BLOCK_GEOMETRY_INIT;
  const lla_status status = lla_state_geometry(w->wide, kGroup, NULL, kGroup - 1, LLA_BLOCK_NODE, &g, error);
  CHECK((status == LLA_OK) == (g.bytes > 0));
  return status;
}
/* lla_append() is looked at more closely below: a success moves the state. */

/* -- functions that do not -----------------------------------------------------------------------------------------------
 */

static lla_status context_query(world *w, lla_error *error) {
  size_t size = sizeof w->text;
  return lla_context_query(w->r.context, LLA_CONTEXT_DEVICE_NAME, w->text, &size, error);
}
static lla_status backend_available(world *w, lla_error *error) {
  (void)error;
  return lla_backend_available(LLA_BACKEND_CPU, w->text, sizeof w->text);
}
static lla_status layer_supported(world *w, lla_error *error) {
  return lla_layer_supported(w->r.context, &w->r.layer[2].desc, error);
}
static lla_status layer_query(world *w, lla_error *error) {
  size_t size = sizeof w->text;
  return lla_layer_query(w->r.layer[2].layer, LLA_LAYER_STEP_KERNEL, 1, w->text, &size, error);
}
static lla_status layer_workspace(world *w, lla_error *error) {
  return lla_layer_workspace(w->r.layer[2].layer, &w->r.limits, LLA_PASS_BACKWARD, &w->bytes, NULL, error);
}
static lla_status layer_saved_size(world *w, lla_error *error) {
  return lla_layer_saved_size(w->r.layer[2].layer, &w->r.limits, &w->bytes, NULL, error);
}
static lla_status geometry_of_few_layers(world *w, lla_error *error) {
  lla_block_geometry g = LLA_BLOCK_GEOMETRY_INIT;
  return lla_state_geometry(w->wide, 2, NULL, 0, LLA_BLOCK_TAIL, &g, error);
}
static lla_status batch_size(world *w, lla_error *error) {
  return lla_batch_size(w->r.context, &w->r.limits, &w->bytes, NULL, error);
}
static lla_status batch_device_size(world *w, lla_error *error) {
  return lla_batch_device_size(w->r.context, &w->r.limits, &w->bytes, NULL, error);
}
static lla_status batch_init(world *w, lla_error *error) {
  lla_batch *batch;
  void *memory;
  lla_status status;
  OK(lla_batch_size(w->r.context, &w->r.limits, &w->bytes, NULL, &error));
  memory = take(w->bytes);
  status = lla_batch_init(w->r.context, &w->r.limits, memory, w->bytes, &batch, error);
  free(memory);
  return status;
}
static lla_status batch_bind_device(world *w, lla_error *error) {
  return lla_batch_bind_device(w->r.batch, w->text, 16, error);
}
static lla_status batch_collect(world *w, lla_error *error) { return lla_batch_collect(w->r.batch, NULL, error); }
static lla_status batch_plan(world *w, lla_error *error) {
  static const int64_t slots[2] = {0, 1}, outs[2] = {0, 3}, sequence = 0, rows = 3, snapshot = 2;
  lla_rows r = LLA_ROWS_INIT;
  r.sequences = 2;
  r.rows_per_sequence = 5;
  r.slot_in = index64(slots);
  r.slot_out = index64(outs);
  r.snapshots = 1;
  r.snapshot_sequences = index64(&sequence);
  r.snapshot_rows = index64(&rows);
  r.snapshot_slots = index64(&snapshot);
  rig_set_rows(&w->r, 10);
  return lla_batch_plan(w->r.batch, w->r.state, &r, NULL, error);
}
static lla_status layer_forward(world *w, lla_error *error) {
  const lla_forward_args a = rig_forward_args(&w->r, 2);
  return lla_layer_forward(w->r.layer[2].layer, &a, error);
}
static lla_status layer_forward_tasks(world *w, lla_error *error) {
  const lla_forward_args a = rig_forward_args(&w->r, 1);
  lla_tasks *tasks = NULL;
  return lla_layer_forward_tasks(w->r.layer[1].layer, &a, &tasks, error);
}
static lla_status layer_backward(world *w, lla_error *error) {
  lla_backward_args a = rig_backward_args(&w->training, 2);
  a.gradients = w->gradients;
  a.gradient_count = rig_list_gradients(&w->training, 2, w->gradients);
  return lla_layer_backward(w->training.layer[2].layer, &a, error);
}
static lla_status layer_backward_tasks(world *w, lla_error *error) {
  lla_backward_args a = rig_backward_args(&w->training, 1);
  lla_tasks *tasks = NULL;
  a.gradients = w->gradients;
  a.gradient_count = rig_list_gradients(&w->training, 1, w->gradients);
  return lla_layer_backward_tasks(w->training.layer[1].layer, &a, &tasks, error);
}
static lla_status state_commit(world *w, lla_error *error) {
  static const int64_t none[2] = {0, 0};
  const lla_status status = lla_state_commit(w->r.state, w->r.batch, index64(none), NULL, error);
  const int64_t fork[2] = {3, 2};
  OK(lla_state_reset(w->r.state, index64(fork), 2, no_index(), NULL,
                     &error)); /* the fork, which the next function wants empty */
  return status;
}
static lla_status state_settle(world *w, lla_error *error) {
  return lla_state_settle(w->r.state, w->r.batch, no_index(), &w->number, error);
}
static lla_status state_query(world *w, lla_error *error) {
  return lla_state_query(w->r.state, LLA_STATE_POOL_BYTES, 0, &w->number, error);
}
static lla_status state_length(world *w, lla_error *error) { return lla_state_length(w->r.state, 0, &w->number, error); }
static lla_status state_min_length(world *w, lla_error *error) {
  return lla_state_min_length(w->r.state, 0, &w->number, error);
}
static lla_status state_read(world *w, lla_error *error) {
  return lla_state_read(w->r.state, 0, 0, LLA_PART_NODE, 2, &w->matrix, NULL, error);
}
static lla_status state_pack(world *w, lla_error *error) {
  return lla_state_pack(w->r.state, 0, w->image, w->image_bytes, NULL, error);
}
static lla_status state_seal(world *w, lla_error *error) { return lla_state_seal(w->image, w->image_bytes, NULL, error); }
static lla_status state_check(world *w, lla_error *error) {
  return lla_state_check(w->image, w->image_bytes, NULL, NULL, error);
}
static lla_status state_export_size(world *w, lla_error *error) {
  return lla_state_export_size(w->r.state, 0, &w->bytes, error);
}
/* The rest changes the state; slot 0 stays what the image says. */
static lla_status state_fork(world *w, lla_error *error) {
  static const int64_t from = 0, to = 2;
  return lla_state_fork(w->r.state, index64(&from), index64(&to), 1, NULL, error);
}
static lla_status state_write_shared(world *w, lla_error *error) {
  return lla_state_write(w->r.state, 2, 0, LLA_PART_NODE, 2, &w->matrix, NULL, error);
}
static lla_status state_write_tail(world *w, lla_error *error) {
  return lla_state_write(w->r.state, 2, 0, LLA_PART_TAIL_V, 0, &w->tail, NULL, error);
}
static lla_status state_truncate(world *w, lla_error *error) { return lla_state_truncate(w->r.state, 2, 69, NULL, error); }
static lla_status state_unpack(world *w, lla_error *error) {
  return lla_state_unpack(w->r.state, 2, w->image, w->image_bytes, NULL, error);
}
static lla_status state_import_linear(world *w, lla_error *error) {
  return lla_state_import_linear(w->r.state, 3, 1, 32, &w->matrix, 1, NULL, error);
}
static lla_status state_reset(world *w, lla_error *error) {
  static const int64_t slots[2] = {2, 3};
  return lla_state_reset(w->r.state, index64(slots), 2, no_index(), NULL, error);
}

typedef struct entry {
  const char *name;
  function call;
  int64_t least; /* allocations; 0: none is allowed */
} entry;
#define ENTRY(name, least) \
  { #name, name, least }

/* In an order in which each finds what it needs. */
static const entry table[] = {ENTRY(context_alone, 1),
                              ENTRY(context_with_pool, 2),
                              ENTRY(context_of_reference, 2),
                              ENTRY(layer_mixer, 1),
                              ENTRY(layer_cell, 1),
                              ENTRY(layer_block, 1),
                              ENTRY(layer_part, 1),
                              ENTRY(state_own, 8),
                              ENTRY(state_of_gradients, 5),
                              ENTRY(state_in_callers_memory, 5),
                              ENTRY(state_of_many_layers, 9),
                              ENTRY(geometry_of_many_layers, 1),
                              ENTRY(context_query, 0),
                              ENTRY(backend_available, 0),
                              ENTRY(layer_supported, 0),
                              ENTRY(layer_query, 0),
                              ENTRY(layer_workspace, 0),
                              ENTRY(layer_saved_size, 0),
                              ENTRY(geometry_of_few_layers, 0),
                              ENTRY(batch_size, 0),
                              ENTRY(batch_device_size, 0),
                              ENTRY(batch_init, 0),
                              ENTRY(batch_bind_device, 0),
                              ENTRY(batch_plan, 0),
                              ENTRY(batch_collect, 0),
                              ENTRY(layer_forward, 0),
                              ENTRY(layer_forward_tasks, 0),
                              ENTRY(layer_backward, 0),
                              ENTRY(layer_backward_tasks, 0),
                              ENTRY(state_commit, 0),
                              ENTRY(state_settle, 0),
                              ENTRY(state_query, 0),
                              ENTRY(state_length, 0),
                              ENTRY(state_min_length, 0),
                              ENTRY(state_read, 0),
                              ENTRY(state_export_size, 0),
                              ENTRY(state_pack, 0),
                              ENTRY(state_seal, 0),
                              ENTRY(state_check, 0),
                              ENTRY(state_fork, 0),
                              ENTRY(state_write_shared, 0),
                              ENTRY(state_write_tail, 0),
                              ENTRY(state_truncate, 0),
                              ENTRY(state_unpack, 0),
                              ENTRY(state_import_linear, 0),
                              ENTRY(state_reset, 0)};

/* -- the world --------------------------------------------------------------------------------------------------------- */

static void open_world(world *w) {
  const lla_context_options plain = LLA_CONTEXT_OPTIONS_INIT;
  lla_layer_desc layers[kLayers];
  lla_state_desc state = LLA_STATE_DESC_INIT;
  lla_rows rows = LLA_ROWS_INIT;
  int64_t i;
  int kind;
  memset(w, 0, sizeof *w);
  layers[0] = mixer_desc(LLA_SCALAR_GATE, 2, 1, 4, 6, 8);
  layers[1] = cell_desc(2, 2, 4, 6, 0);
  layers[2] = mamba2_desc(2, 1, 4, 6, 10, 8);
  for (i = 0; i < kLayers; ++i) layers[i].grain = 16;
  w->allocator = allocator_of(&w->m);
  w->options = plain;
  w->options.backend = LLA_BACKEND_CPU;
  w->options.allocator = &w->allocator;
  state.slots = kSlots;
  rig_open(&w->r, &w->options, layers, kLayers, &state, 2, 40, 1);
  rig_open(&w->training, &w->options, layers, kLayers, NULL, 1, 40, 0);
  rig_append_to(&w->r, 0, 1, 70, 40); /* 4 chunks: node 2, and 6 rows */
  rig_append_to(&w->r, 1, 2, 50, 40);
  rig_set_rows(&w->training, 40);
  rig_fill(&w->training, 0, 3, 0, 40);
  rows.sequences = 1;
  rows.rows_per_sequence = 40;
  rig_plan(&w->training, &rows);
  rig_forward(&w->training);
  for (i = 0; i < kLayers; ++i) rig_fill_output_gradient(&w->training, i, 4, 40);
  for (i = 0; i < kGroup; ++i) w->wide[i] = w->r.layer[0].layer;
  for (i = 0; i < kLayers; ++i) {
    for (kind = LLA_BLOCK_NODE; kind <= LLA_BLOCK_CONV; ++kind) {
      lla_block_geometry g = LLA_BLOCK_GEOMETRY_INIT;
      lla_layer *group[kLayers];
      int k;
      for (k = 0; k < kLayers; ++k) group[k] = w->r.layer[k].layer;
      OK(lla_state_geometry(group, kLayers, NULL, i, kind, &g, &error));
      if (g.bytes == 0) continue;
      w->memory[w->memory_count].layer_index = i;
      w->memory[w->memory_count].kind = kind;
      w->memory[w->memory_count].base = take((size_t)(g.bytes * g.count));
      w->memory[w->memory_count++].stride = g.bytes;
    }
  }
  OK(lla_state_create(w->wide, 1, NULL, NULL, 0, &w->single, &error));
  w->image = (char *)rig_pack(&w->r, 0, &w->image_bytes);
  w->matrix = lla_tensor_of(take(2 * 4 * 6 * sizeof(float)), LLA_F32, 2, 4, 6, -1);
  w->tail = lla_tensor_of(take(6 * 2 * 6 * sizeof(float)), LLA_F32, 6, 2, 6, -1);
  memset(w->matrix.data, 0, 2 * 4 * 6 * sizeof(float));
  memset(w->tail.data, 0, 6 * 2 * 6 * sizeof(float));
}

static void close_world(world *w) {
  int64_t i;
  lla_state_release(w->single);
  for (i = 0; i < w->memory_count; ++i) free(w->memory[i].base);
  free(w->image);
  free(w->matrix.data);
  free(w->tail.data);
  rig_close(&w->training);
  rig_close(&w->r);
  CHECK(w->m.outstanding == 0 && w->m.bytes == 0);
}

typedef struct print {
  void *image[kSlots];
  size_t bytes[kSlots];
  int64_t free_blocks;
} print;

static print take_print(const rig *r) {
  print p;
  int64_t s;
  for (s = 0; s < kSlots; ++s) p.image[s] = rig_pack(r, s, &p.bytes[s]);
  p.free_blocks = rig_query(r, LLA_STATE_FREE_NODE_BLOCKS, 0);
  return p;
}

static void check_print(const rig *r, const print *old, const char *what) {
  print now = take_print(r);
  int64_t s;
  CHECK(now.free_blocks == old->free_blocks);
  for (s = 0; s < kSlots; ++s) {
    CHECK(now.bytes[s] == old->bytes[s]);
    check_equal_bytes(now.image[s], old->image[s], now.bytes[s], what);
    free(now.image[s]);
  }
}

static void free_print(print *p) {
  int64_t s;
  for (s = 0; s < kSlots; ++s) free(p->image[s]);
}

static void every_function_survives(void **unused) {
  static world w;
  size_t i;
  (void)unused;
  open_world(&w);
  for (i = 0; i < sizeof table / sizeof table[0]; ++i) {
    const entry *e = &table[i];
    int64_t n;
    for (n = 1;; ++n) {
      print before = take_print(&w.r);
      const int64_t count = w.m.count, outstanding = w.m.outstanding;
      const size_t bytes = w.m.bytes;
      lla_error error = LLA_ERROR_INIT;
      lla_status status;
      w.m.fail_at = count + n;
      w.context = NULL;
      w.layer = NULL;
      w.state = NULL;
      status = e->call(&w, &error);
      w.m.fail_at = 0;
      if (status == LLA_OK) {
        /* All allocations were granted: there are n - 1 of them. */
        if (w.m.count - count != n - 1 || n - 1 < e->least || (e->least == 0 && n != 1))
          stop_test("%s: succeeded after %d allocations, %d were granted", e->name, (int)(w.m.count - count), (int)(n - 1));
        lla_state_release(w.state);
        lla_layer_release(w.layer);
        lla_context_release(w.context);
        if (w.m.outstanding != outstanding || w.m.bytes != bytes) stop_test("%s: keeps memory after it succeeded", e->name);
        free_print(&before);
        break;
      }
      if (status != LLA_OUT_OF_MEMORY || error.code != status || !error.text[0])
        stop_test("%s: allocation %d fails: %s: %s", e->name, (int)n, lla_status_name(status), error.text);
      if (e->least == 0) stop_test("%s: allocates", e->name);
      if (w.context || w.layer || w.state) stop_test("%s: allocation %d fails: a handle was written", e->name, (int)n);
      if (w.m.outstanding != outstanding || w.m.bytes != bytes)
        stop_test("%s: allocation %d fails: memory stays", e->name, (int)n);
      check_print(&w.r, &before, e->name);
      free_print(&before);
    }
  }
  close_world(&w);
}

/* lla_append() onto a history: the history and the output stay, and the next call goes on as if nothing had been. */
static void append_survives(void **unused) {
  static world w;
  static float untouched[40 * 12];
  lla_state *twin;
  const rig_layer *l;
  int64_t n, round;
  (void)unused;
  open_world(&w);
  l = &w.r.layer[0];
  OK(lla_state_create(w.wide, 1, NULL, NULL, 0, &twin, &error));
  memset(untouched, 0xa5, sizeof untouched);
  CHECK(w.r.layer[0].width[l->io_count - 1] == 12);
  for (round = 0; round < 3; ++round) {
    rig_set_rows(&w.r, 40);
    rig_fill(&w.r, 0, 9, 40 * round, 40);
    for (n = 1;; ++n) {
      size_t bytes, again;
      char *before, *after;
      const int64_t outstanding = w.m.outstanding;
      lla_error error = LLA_ERROR_INIT;
      lla_status status;
      OK(lla_state_export_size(w.single, 0, &bytes, &error));
      before = (char *)take(bytes);
      OK(lla_state_pack(w.single, 0, before, bytes, NULL, &error));
      memset(rig_output(&w.r, 0, 0), 0xa5, sizeof untouched);
      w.m.fail_at = w.m.count + n;
      status = lla_append(l->layer, w.single, 0, l->io, l->io_count, NULL, 0, NULL, &error);
      w.m.fail_at = 0;
      CHECK(w.m.outstanding == outstanding);
      if (status == LLA_OK) {
        free(before);
        break;
      }
      CHECK(status == LLA_OUT_OF_MEMORY && error.code == status && strstr(error.text, "lla_append"));
      check_equal_bytes(rig_output(&w.r, 0, 0), untouched, sizeof untouched, "output of an append without memory");
      OK(lla_state_export_size(w.single, 0, &again, &error));
      CHECK(again == bytes);
      after = (char *)take(bytes);
      OK(lla_state_pack(w.single, 0, after, bytes, NULL, &error));
      check_equal_bytes(after, before, bytes, "slot after an append without memory");
      free(before);
      free(after);
    }
    CHECK(n > 2); /* batch and workspace */
    OK(lla_append(l->layer, twin, 0, l->io, l->io_count, NULL, 0, NULL, &error));
  }
  {
    size_t bytes, again;
    void *a, *b;
    OK(lla_state_export_size(w.single, 0, &bytes, &error));
    OK(lla_state_export_size(twin, 0, &again, &error));
    CHECK(again == bytes);
    a = take(bytes);
    b = take(bytes);
    OK(lla_state_pack(w.single, 0, a, bytes, NULL, &error));
    OK(lla_state_pack(twin, 0, b, bytes, NULL, &error));
    check_equal_bytes(a, b, bytes, "slot with failed appends between the others");
    free(a);
    free(b);
  }
  lla_state_release(twin);
  close_world(&w);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(every_function_survives), cmocka_unit_test(append_survives)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
