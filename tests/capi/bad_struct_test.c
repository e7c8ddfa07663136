/* SPDX-License-Identifier: Apache-2.0 */
/* Versioned structs: too small is refused, larger with a tail of zeros is taken, larger with anything else in the tail is
 * refused. */
#include "bad_input.h"

/* A struct with room behind it for fields of a later version. */
#define ROOMY(type)  \
  union {            \
    type known;      \
    char bytes[512]; \
  }

/* `call` uses roomy.known. What it makes is undone by `undo`. */
#define CHECK_SIZES(roomy, name, call, undo)     \
  do {                                           \
    const size_t size = sizeof roomy.known;      \
    roomy.known.struct_size = size;              \
    OK(call);                                    \
    undo;                                        \
    roomy.known.struct_size = size + 64;         \
    OK(call);                                    \
    CHECK(roomy.known.struct_size == size + 64); \
    undo;                                        \
    roomy.bytes[size + 63] = 1;                  \
    FAILS(LLA_STRUCT_VERSION, name, call);       \
    roomy.bytes[size + 63] = 0;                  \
    roomy.bytes[size] = 1;                       \
    FAILS(LLA_STRUCT_VERSION, name, call);       \
    roomy.bytes[size] = 0;                       \
    roomy.known.struct_size = size - 1;          \
    FAILS(LLA_STRUCT_VERSION, name, call);       \
    roomy.known.struct_size = sizeof(size_t);    \
    FAILS(LLA_STRUCT_VERSION, name, call);       \
    roomy.known.struct_size = 0;                 \
    FAILS(LLA_STRUCT_VERSION, name, call);       \
    roomy.known.struct_size = SIZE_MAX;          \
    FAILS(LLA_STRUCT_VERSION, name, call);       \
    roomy.known.struct_size = size;              \
  } while (0)

static void *plain_allocate(size_t bytes, size_t alignment, void *user) {
  void *memory = NULL;
  (void)user;
  return posix_memalign(&memory, alignment < sizeof(void *) ? sizeof(void *) : alignment, bytes) == 0 ? memory : NULL;
}

static void plain_release(void *memory, size_t bytes, size_t alignment, void *user) {
  (void)bytes;
  (void)alignment;
  (void)user;
  free(memory);
}

static int32_t plain_run(int64_t count, lla_task task, void *argument, void *user) {
  int64_t i;
  (void)user;
  for (i = 0; i < count; ++i) task(i, 0, argument);
  return 0;
}

static void plain_write(lla_log_level level, const char *text, void *user) {
  (void)level;
  (void)text;
  ++*(int *)user;
}

static void context_options(void **unused) {
  ROOMY(lla_context_options) options;
  ROOMY(lla_allocator) allocator;
  ROOMY(lla_parallel) parallel;
  ROOMY(lla_log) log;
  lla_context *context = NULL;
  int lines = 0;
  (void)unused;
  memset(&options, 0, sizeof options);
  memset(&allocator, 0, sizeof allocator);
  memset(&parallel, 0, sizeof parallel);
  memset(&log, 0, sizeof log);
  allocator.known.allocate = plain_allocate;
  allocator.known.release = plain_release;
  parallel.known.max_threads = 2;
  parallel.known.run = plain_run;
  log.known.level = LLA_LOG_INFO;
  log.known.write = plain_write;
  log.known.user = &lines;
#define CREATE lla_context_create(&options.known, &context, &error)
  CHECK_SIZES(options, "options", CREATE, lla_context_release(context));
  options.known.allocator = &allocator.known;
  CHECK_SIZES(allocator, "options->allocator", CREATE, lla_context_release(context));
  options.known.parallel = &parallel.known;
  CHECK_SIZES(parallel, "options->parallel", CREATE, lla_context_release(context));
  options.known.log = &log.known;
  CHECK_SIZES(log, "options->log", CREATE, lla_context_release(context));
  CHECK(lines > 0);

  allocator.known.release = NULL;
  FAILS(LLA_INVALID_ARGUMENT, "allocator", CREATE);
  allocator.known.release = plain_release;
  allocator.known.allocate = NULL;
  FAILS(LLA_INVALID_ARGUMENT, "allocator", CREATE);
  allocator.known.allocate = plain_allocate;
  parallel.known.run = NULL;
  FAILS(LLA_INVALID_ARGUMENT, "parallel", CREATE);
  parallel.known.run = plain_run;
  parallel.known.max_threads = 0;
  FAILS(LLA_INVALID_ARGUMENT, "max_threads", CREATE);
  parallel.known.max_threads = 1;
  parallel.known.reserved = 1;
  FAILS(LLA_INVALID_ARGUMENT, "reserved", CREATE);
  parallel.known.reserved = 0;
  log.known.write = NULL;
  FAILS(LLA_INVALID_ARGUMENT, "log", CREATE);
  log.known.write = plain_write;
  log.known.level = 9;
  FAILS(LLA_INVALID_ARGUMENT, "level", CREATE);
  log.known.level = LLA_LOG_ERROR;
  options.known.backend = 17;
  FAILS(LLA_INVALID_ARGUMENT, "backend", CREATE);
  options.known.backend = LLA_BACKEND_CPU;
  options.known.isa = 17;
  FAILS(LLA_INVALID_ARGUMENT, "isa", CREATE);
  options.known.isa = 0;
  options.known.determinism = -1;
  FAILS(LLA_INVALID_ARGUMENT, "determinism", CREATE);
  options.known.determinism = LLA_DETERMINISM_SPLIT_INVARIANT;
  FAILS(LLA_UNSUPPORTED, "determinism", CREATE);
  options.known.determinism = 0;
  options.known.threads = -1;
  FAILS(LLA_INVALID_ARGUMENT, "threads", CREATE);
  options.known.threads = 0;
  options.known.device = -1;
  FAILS(LLA_INVALID_ARGUMENT, "device", CREATE);
  options.known.device = 0;
  options.known.reserved = 5;
  FAILS(LLA_INVALID_ARGUMENT, "reserved", CREATE);
}

static void descriptions_and_limits(void **unused) {
  ROOMY(lla_layer_desc) layer_desc;
  ROOMY(lla_batch_limits) limits;
  ROOMY(lla_rows) rows;
  victim v;
  lla_layer *layer = NULL;
  lla_batch *batch = NULL;
  size_t bytes;
  (void)unused;
  memset(&layer_desc, 0, sizeof layer_desc);
  memset(&limits, 0, sizeof limits);
  memset(&rows, 0, sizeof rows);
  layer_desc.known = victim_mixer();
  victim_open(&v, &layer_desc.known);
  CHECK_SIZES(layer_desc, "description", lla_layer_create(v.r.context, &layer_desc.known, &layer, &error),
              lla_layer_release(layer));
  CHECK_SIZES(layer_desc, "description", lla_layer_supported(v.r.context, &layer_desc.known, &error), (void)0);
  limits.known.max_sequences = 1;
  limits.known.max_rows = 2;
  CHECK_SIZES(limits, "limits", lla_batch_size(v.r.context, &limits.known, &bytes, NULL, &error), (void)0);
  CHECK_SIZES(limits, "limits",
              lla_batch_init(v.r.context, &limits.known, v.r.workspace, v.r.workspace_bytes, &batch, &error), (void)0);
  CHECK_SIZES(limits, "limits",
              lla_layer_workspace(v.r.layer[0].layer, &limits.known, LLA_PASS_BACKWARD, &bytes, NULL, &error), (void)0);
  CHECK_SIZES(limits, "limits", lla_layer_saved_size(v.r.layer[0].layer, &limits.known, &bytes, NULL, &error), (void)0);
  rows.known.sequences = 1;
  rows.known.rows_per_sequence = 1;
  CHECK_SIZES(rows, "rows", lla_batch_plan(v.r.batch, v.r.state, &rows.known, NULL, &error), (void)0);
  victim_close(&v);
}

static void arguments(void **unused) {
  ROOMY(lla_forward_args) forward;
  ROOMY(lla_backward_args) backward;
  const lla_layer_desc desc = victim_mixer();
  victim v;
  lla_tasks *tasks;
  lla_layer *layer;
  (void)unused;
  memset(&forward, 0, sizeof forward);
  memset(&backward, 0, sizeof backward);
  victim_open(&v, &desc);
  victim_plan(&v);
  layer = v.r.layer[0].layer;
  forward.known = rig_forward_args(&v.r, 0);
  backward.known = rig_backward_args(&v.r, 0);
  CHECK_SIZES(forward, "arguments", lla_layer_forward_tasks(layer, &forward.known, &tasks, &error), (void)0);
  CHECK_SIZES(backward, "arguments", lla_layer_backward_tasks(layer, &backward.known, &tasks, &error), (void)0);
  CHECK_SIZES(backward, "arguments", lla_layer_backward(layer, &backward.known, &error), (void)0);
  CHECK_SIZES(forward, "arguments", lla_layer_forward(layer, &forward.known, &error), (void)0);
  lla_batch_discard(v.r.batch);
  victim_remember(&v); /* the successful calls wrote their outputs */
  victim_close(&v);
}

static void states(void **unused) {
  ROOMY(lla_state_desc) desc;
  ROOMY(lla_block_geometry) geometry;
  ROOMY(lla_image_info) info;
  const lla_layer_desc layer_desc = victim_mixer();
  victim v;
  lla_layer *layer;
  lla_state *state = NULL;
  void *image;
  size_t bytes;
  (void)unused;
  memset(&desc, 0, sizeof desc);
  memset(&geometry, 0, sizeof geometry);
  memset(&info, 0, sizeof info);
  victim_open(&v, &layer_desc);
  layer = v.r.layer[0].layer;
  CHECK_SIZES(desc, "description", lla_state_create(&layer, 1, &desc.known, NULL, 0, &state, &error),
              lla_state_release(state));
  geometry.known.struct_size = sizeof geometry.known;
  CHECK_SIZES(desc, "description", lla_state_geometry(&layer, 1, &desc.known, 0, LLA_BLOCK_NODE, &geometry.known, &error),
              (void)0);
  CHECK_SIZES(geometry, "geometry", lla_state_geometry(&layer, 1, NULL, 0, LLA_BLOCK_TAIL, &geometry.known, &error),
              CHECK(geometry.known.bytes > 0 && geometry.bytes[sizeof geometry.known] == 0));
  image = rig_pack(&v.r, 0, &bytes);
  OK(lla_state_seal(image, bytes, NULL, &error));
  CHECK_SIZES(info, "info", lla_state_check(image, bytes, NULL, &info.known, &error),
              CHECK(info.known.position == 70 && info.bytes[sizeof info.known] == 0));
  free(image);
  victim_close(&v);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(context_options), cmocka_unit_test(descriptions_and_limits),
                                     cmocka_unit_test(arguments), cmocka_unit_test(states)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
