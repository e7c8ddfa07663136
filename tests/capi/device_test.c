/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the backend, on the CPU and, where there is one, on a device; what a batch needs there; and what a context says if
 * there is no device. */
#include "rig.h"

static lla_context *open_context(lla_backend backend) {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_context *context = NULL;
  options.backend = backend;
  OK(lla_context_create(&options, &context, &error));
  return context;
}

/* Copies there and back; every wrong argument is named and nothing is written. */
static void check_memory(lla_context *context) {
  char there[100], back[100];
  void *memory = NULL, *nothing = NULL;
  size_t i;
  for (i = 0; i < sizeof there; ++i) there[i] = (char)(3 * i + 1);
  memset(back, 0, sizeof back);
  OK(lla_device_allocate(context, sizeof there, &memory, &error));
  CHECK(memory && (uintptr_t)memory % 64 == 0);
  OK(lla_device_allocate(context, 0, &nothing, &error));
  CHECK(nothing && nothing != memory);
  OK(lla_device_copy(context, memory, there, sizeof there, NULL, &error));
  OK(lla_device_copy(context, back, memory, sizeof back, NULL, &error));
  OK(lla_device_wait(context, NULL, &error));
  check_equal_bytes(there, back, sizeof back, "memory of the backend");
  OK(lla_device_copy(context, NULL, NULL, 0, NULL, &error));
  FAILS(LLA_NULL_POINTER, "context", lla_device_allocate(NULL, 1, &memory, &error));
  FAILS(LLA_NULL_POINTER, "memory", lla_device_allocate(context, 1, NULL, &error));
  FAILS(LLA_NULL_POINTER, "context", lla_device_copy(NULL, back, there, 1, NULL, &error));
  FAILS(LLA_NULL_POINTER, "to", lla_device_copy(context, NULL, there, 1, NULL, &error));
  FAILS(LLA_NULL_POINTER, "from", lla_device_copy(context, back, NULL, 1, NULL, &error));
  FAILS(LLA_SIZE_OVERFLOW, "bytes", lla_device_copy(context, back, there, SIZE_MAX, NULL, &error));
  FAILS(LLA_NULL_POINTER, "context", lla_device_wait(NULL, NULL, &error));
  lla_device_release(context, memory, sizeof there);
  lla_device_release(context, nothing, 0);
  lla_device_release(context, NULL, 5);
  lla_device_release(NULL, NULL, 5);
}

static void memory_of_the_cpu(void **unused) {
  lla_context *context = open_context(LLA_BACKEND_CPU);
  char a = 1, b = 2;
  (void)unused;
  check_memory(context);
  FAILS(LLA_INVALID_ARGUMENT, "stream", lla_device_copy(context, &a, &b, 1, &b, &error));
  FAILS(LLA_INVALID_ARGUMENT, "stream", lla_device_copy(context, &a, &b, 0, &b, &error));
  FAILS(LLA_INVALID_ARGUMENT, "stream", lla_device_wait(context, &b, &error));
  CHECK(a == 1);
  lla_context_release(context);
}

/* On the CPU a batch needs nothing more, and says so. */
static void batches_of_the_cpu(void **unused) {
  lla_context *context = open_context(LLA_BACKEND_CPU);
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  size_t bytes = 7, alignment = 0;
  lla_batch *batch = NULL;
  void *memory;
  (void)unused;
  limits.max_sequences = 2;
  limits.max_rows = 10;
  OK(lla_batch_device_size(context, &limits, &bytes, &alignment, &error));
  CHECK(bytes == 0 && alignment == 64);
  OK(lla_batch_device_size(context, &limits, &bytes, NULL, &error));
  FAILS(LLA_NULL_POINTER, "context", lla_batch_device_size(NULL, &limits, &bytes, NULL, &error));
  FAILS(LLA_NULL_POINTER, "limits", lla_batch_device_size(context, NULL, &bytes, NULL, &error));
  FAILS(LLA_NULL_POINTER, "bytes", lla_batch_device_size(context, &limits, NULL, NULL, &error));
  OK(lla_batch_size(context, &limits, &bytes, NULL, &error));
  memory = take(bytes);
  OK(lla_batch_init(context, &limits, memory, bytes, &batch, &error));
  OK(lla_batch_bind_device(batch, NULL, 0, &error));
  FAILS(LLA_NULL_POINTER, "batch", lla_batch_bind_device(NULL, memory, bytes, &error));
  limits.replay = 2;
  FAILS(LLA_INVALID_ARGUMENT, "replay", lla_batch_size(context, &limits, &bytes, NULL, &error));
  limits.replay = 0;
  limits.reserved = 1;
  FAILS(LLA_INVALID_ARGUMENT, "reserved", lla_batch_size(context, &limits, &bytes, NULL, &error));
  free(memory);
  lla_context_release(context);
}

/* Without a device: a status, the reason in words, and a CPU for those who asked for the best. With one: its memory works, and
 * a batch must be given some. */
static void a_device_or_the_reason(void **unused) {
  char reason[200] = "";
  const lla_status status = lla_backend_available(LLA_BACKEND_CUDA, reason, sizeof reason);
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_context *context = NULL;
  (void)unused;
  if (status != LLA_OK) {
    char text[200] = "";
    size_t size = sizeof text;
    CHECK(status == LLA_BACKEND_MISSING || status == LLA_NO_DEVICE || status == LLA_DRIVER_TOO_OLD);
    CHECK(strstr(reason, "cuda") != NULL);
    options.backend = LLA_BACKEND_CUDA;
    FAILS(status, "cuda", lla_context_create(&options, &context, &error));
    CHECK(context == NULL);
    options.backend = LLA_BACKEND_AUTO;
    OK(lla_context_create(&options, &context, &error));
    OK(lla_context_query(context, LLA_CONTEXT_FALLBACK_REASON, text, &size, &error));
    CHECK(strcmp(text, reason) == 0);
    size = sizeof text;
    OK(lla_context_query(context, LLA_CONTEXT_BACKEND_NAME, text, &size, &error));
    CHECK(strcmp(text, "cpu") == 0);
  } else {
    lla_layer_desc desc = mixer_desc(LLA_SCALAR_GATE, 2, 2, 4, 4, 0);
    lla_layer *layer = NULL;
    lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
    lla_rows rows = LLA_ROWS_INIT;
    lla_tasks *tasks = NULL;
    lla_forward_args arguments = LLA_FORWARD_ARGS_INIT;
    size_t bytes = 0;
    void *memory;
    context = open_context(LLA_BACKEND_CUDA);
    check_memory(context);
    OK(lla_layer_create(context, &desc, &layer, &error));
    FAILS(LLA_UNSUPPORTED, "tasks", lla_layer_forward_tasks(layer, &arguments, &tasks, &error));
    limits.max_sequences = 1;
    limits.max_rows = 4;
    OK(lla_batch_device_size(context, &limits, &bytes, NULL, &error));
    CHECK(bytes > 0);
    OK(lla_batch_size(context, &limits, &bytes, NULL, &error));
    memory = take(bytes);
    OK(lla_batch_init(context, &limits, memory, bytes, &arguments.batch, &error));
    if (!getenv("LD_PRELOAD")) { /* a preloaded shim of the device suites gives batches their memory */
      rows.sequences = 1;
      rows.rows_per_sequence = 4;
      FAILS(LLA_NULL_POINTER, "lla_batch_bind_device", lla_batch_plan(arguments.batch, NULL, &rows, NULL, &error));
      FAILS(LLA_NULL_POINTER, "memory", lla_batch_bind_device(arguments.batch, NULL, 1 << 20, &error));
    }
    free(memory);
    lla_layer_release(layer);
  }
  lla_context_release(context);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(memory_of_the_cpu), cmocka_unit_test(batches_of_the_cpu),
                                     cmocka_unit_test(a_device_or_the_reason)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
