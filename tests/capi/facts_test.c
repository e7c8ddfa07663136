/* SPDX-License-Identifier: Apache-2.0 */
/* What the library says about itself, its statuses, levels, contexts and layers. */
#include "testing.h"

static lla_context *default_context(void) {
  lla_context *context = NULL;
  OK(lla_context_create(NULL, &context, &error));
  return context;
}

static void identity(void **unused) {
  char version[32];
  int64_t i;
  (void)unused;
  CHECK(lla_version() == LLA_VERSION_MAJOR * 10000 + LLA_VERSION_MINOR * 100 + LLA_VERSION_PATCH);
  CHECK(lla_abi_version() == LLA_ABI_VERSION);
  CHECK(strcmp(lla_version_string(), LLA_VERSION_STRING) == 0);
  snprintf(version, sizeof version, "%d.%d.%d", LLA_VERSION_MAJOR, LLA_VERSION_MINOR, LLA_VERSION_PATCH);
  CHECK(strcmp(version, LLA_VERSION_STRING) == 0);
  CHECK(lla_source_id() && lla_source_id()[0]);
  CHECK(lla_build_option_count() > 0);
  CHECK(!lla_build_option(-1) && !lla_build_option(lla_build_option_count()) && !lla_build_option(INT64_MAX));
  for (i = 0; i < lla_build_option_count(); ++i) {
    const char *equals = strchr(lla_build_option(i), '=');
    CHECK(equals && equals > lla_build_option(i) && equals[1]);
  }
}

static void every_status_has_a_name(void **unused) {
  static const struct {
    lla_status status;
    const char *name;
  } known[] = {
#define NAMED(status) {status, #status}
      NAMED(LLA_OK),
      NAMED(LLA_INVALID_ARGUMENT),
      NAMED(LLA_NULL_POINTER),
      NAMED(LLA_STRUCT_VERSION),
      NAMED(LLA_SHAPE_MISMATCH),
      NAMED(LLA_DTYPE_MISMATCH),
      NAMED(LLA_MISALIGNED),
      NAMED(LLA_BUFFER_TOO_SMALL),
      NAMED(LLA_WRONG_CONTEXT),
      NAMED(LLA_SIZE_OVERFLOW),
      NAMED(LLA_MISSING_ROLE),
      NAMED(LLA_LEVELS_EXCEEDED),
      NAMED(LLA_STATE_INCOMPATIBLE),
      NAMED(LLA_DATA_CORRUPT),
      NAMED(LLA_BUSY),
      NAMED(LLA_NO_BLOCKS),
      NAMED(LLA_POSITION_MISMATCH),
      NAMED(LLA_SLOT_IN_USE),
      NAMED(LLA_ROLLBACK_LIMIT),
      NAMED(LLA_UNSUPPORTED),
      NAMED(LLA_NOT_IMPLEMENTED),
      NAMED(LLA_NO_DEVICE),
      NAMED(LLA_DRIVER_TOO_OLD),
      NAMED(LLA_BACKEND_MISSING),
      NAMED(LLA_BACKEND_MISMATCH),
      NAMED(LLA_FORKED),
      NAMED(LLA_OUT_OF_MEMORY),
      NAMED(LLA_OUT_OF_DEVICE_MEMORY),
      NAMED(LLA_THREADS_FAILED),
      NAMED(LLA_DEVICE_ERROR),
      NAMED(LLA_CAPTURE_UNSAFE),
      NAMED(LLA_INTERNAL)};
  const size_t count = sizeof known / sizeof known[0];
  lla_status status;
  size_t named = 0, i;
  (void)unused;
  for (status = -10; status < 1000; ++status) {
    CHECK(lla_status_message(status) && lla_status_message(status)[0]);
    if (strcmp(lla_status_name(status), "LLA_UNKNOWN_STATUS") != 0) ++named;
  }
  for (i = 0; i < count; ++i) CHECK(strcmp(lla_status_name(known[i].status), known[i].name) == 0);
  CHECK(named == count);
  CHECK(strcmp(lla_status_name(INT32_MIN), "LLA_UNKNOWN_STATUS") == 0);
}

/* Probe S11. */
static void levels(void **unused) {
  int64_t n;
  (void)unused;
  CHECK(lla_levels_needed(INT64_MIN) == 1 && lla_levels_needed(0) == 1 && lla_levels_needed(1) == 1);
  CHECK(lla_levels_needed(2) == 2 && lla_levels_needed(3) == 3 && lla_levels_needed(16384) == 15);
  CHECK(lla_levels_needed(16385) == 16 && lla_levels_needed(INT64_MAX) == 64);
  for (n = 1; n < 3000; ++n) {
    int64_t highest = 0, s;
    for (s = 0; s < n; ++s) {
      if (lla_level_of(n - 1, s) > highest) highest = lla_level_of(n - 1, s);
    }
    CHECK(highest < lla_levels_needed(n));
  }
  CHECK(lla_level_of(11, 11) == 0 && lla_level_of(11, 10) == 1 && lla_level_of(11, 9) == 2 && lla_level_of(11, 0) == 4);
  CHECK(lla_level_of(3, 4) == -1 && lla_level_of(3, -1) == -1 && lla_level_of(-1, -2) == -1);
  CHECK(lla_dtype_size(LLA_F32) == 4 && lla_dtype_size(LLA_BF16) == 2 && lla_dtype_size(LLA_F16) == 2);
  CHECK(lla_dtype_size(LLA_F64) == 8 && lla_dtype_size(LLA_I32) == 4 && lla_dtype_size(LLA_I64) == 8);
  CHECK(lla_dtype_size(0) == 0 && lla_dtype_size(7) == 0 && lla_dtype_size(-1) == 0);
}

static void contexts_answer(void **unused) {
  lla_context *context = default_context();
  char text[128], reason[64];
  int32_t number = -1;
  size_t size = 0;
  (void)unused;
  OK(lla_context_query(context, LLA_CONTEXT_BACKEND_NAME, NULL, &size, &error));
  CHECK(size == 4);
  size = 3;
  FAILS(LLA_BUFFER_TOO_SMALL, "value", lla_context_query(context, LLA_CONTEXT_BACKEND_NAME, text, &size, &error));
  CHECK(size == 4);
  OK(lla_context_query(context, LLA_CONTEXT_BACKEND_NAME, text, &size, &error));
  CHECK(strcmp(text, "cpu") == 0);
  size = sizeof text;
  OK(lla_context_query(context, LLA_CONTEXT_ISA_NAME, text, &size, &error));
  CHECK(text[0] && size == strlen(text) + 1);
  size = sizeof text;
  OK(lla_context_query(context, LLA_CONTEXT_DEVICE_NAME, text, &size, &error));
  CHECK(text[0] && size == strlen(text) + 1);
  size = sizeof text;
  OK(lla_context_query(context, LLA_CONTEXT_FALLBACK_REASON, text, &size, &error));
  size = sizeof number;
  OK(lla_context_query(context, LLA_CONTEXT_THREADS, &number, &size, &error));
  CHECK(number == 1 && size == sizeof number);
  OK(lla_context_query(context, LLA_CONTEXT_DETERMINISM, &number, &size, &error));
  CHECK(number == LLA_DETERMINISM_BATCH_INVARIANT);
  FAILS(LLA_INVALID_ARGUMENT, "key", lla_context_query(context, 99, text, &size, &error));
  lla_context_release(context);

  CHECK(lla_backend_available(LLA_BACKEND_CPU, reason, sizeof reason) == LLA_OK && !reason[0]);
  CHECK(lla_backend_available(LLA_BACKEND_AUTO, reason, sizeof reason) == LLA_OK && !reason[0]);
  CHECK(lla_backend_available(LLA_BACKEND_REFERENCE, NULL, 0) == LLA_OK);
  CHECK(lla_backend_available(-3, reason, sizeof reason) == LLA_INVALID_ARGUMENT && reason[0]);
  {
    lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
    const lla_status status = lla_backend_available(LLA_BACKEND_CUDA, reason, sizeof reason);
    options.backend = LLA_BACKEND_CUDA;
    context = NULL;
    CHECK(lla_context_create(&options, &context, NULL) == status);
    CHECK((status == LLA_OK) == (reason[0] == 0));
    lla_context_release(context);
    memset(reason, 'x', sizeof reason);
    CHECK(lla_backend_available(LLA_BACKEND_CUDA, reason, 4) == status);
    CHECK(reason[4] == 'x' && memchr(reason, 0, 4));
  }
}

static void layers_answer(void **unused) {
  static const lla_layer_key counts[2] = {LLA_LAYER_STEP_COUNT, LLA_LAYER_BACKWARD_STEP_COUNT};
  static const lla_layer_key names[2] = {LLA_LAYER_STEP_KERNEL, LLA_LAYER_BACKWARD_STEP_KERNEL};
  lla_context *context = default_context();
  lla_layer_desc descs[3];
  int i, pass;
  (void)unused;
  descs[0] = mixer_desc(LLA_SCALAR_GATE, 2, 1, 16, 16, 5);
  descs[1] = cell_desc(2, 2, 16, 16, 9);
  descs[2] = mamba2_desc(2, 1, 16, 16, 24, 0);
  for (i = 0; i < 3; ++i) {
    lla_layer *layer = NULL;
    int64_t number = -1, step;
    size_t size = sizeof number;
    OK(lla_layer_supported(context, &descs[i], &error));
    OK(lla_layer_create(context, &descs[i], &layer, &error));
    OK(lla_layer_query(layer, LLA_LAYER_LEVELS, 0, &number, &size, &error));
    CHECK(number == descs[i].levels && size == sizeof number);
    OK(lla_layer_query(layer, LLA_LAYER_MAX_LENGTH, 0, &number, &size, &error));
    CHECK(number == (descs[i].levels ? (int64_t)1 << (descs[i].levels - 1) : INT64_MAX));
    OK(lla_layer_query(layer, LLA_LAYER_INTERMEDIATE_BYTES, 0, &number, &size, &error));
    CHECK(i == 0 ? number == 0 : number > 0);
    for (pass = 0; pass < 2; ++pass) {
      char text[80];
      OK(lla_layer_query(layer, counts[pass], 0, &number, &size, &error));
      CHECK(i == 0 ? number >= 1 : number > 3);
      for (step = 0; step < number; ++step) {
        size_t bytes = sizeof text;
        OK(lla_layer_query(layer, names[pass], step, text, &bytes, &error));
        CHECK(strncmp(text, "cpu.", 4) == 0 || strncmp(text, "reference.", 10) == 0);
      }
      size = sizeof text;
      FAILS(LLA_INVALID_ARGUMENT, "index", lla_layer_query(layer, names[pass], number, text, &size, &error));
      FAILS(LLA_INVALID_ARGUMENT, "index", lla_layer_query(layer, names[pass], -1, text, &size, &error));
      FAILS(LLA_INVALID_ARGUMENT, "index", lla_layer_query(layer, counts[pass], 1, text, &size, &error));
      size = sizeof number;
    }
    FAILS(LLA_INVALID_ARGUMENT, "key", lla_layer_query(layer, 0, 0, &number, &size, &error));
    size = 4;
    FAILS(LLA_BUFFER_TOO_SMALL, "value", lla_layer_query(layer, LLA_LAYER_LEVELS, 0, &number, &size, &error));
    CHECK(size == 8);
    lla_layer_release(layer);
  }
  lla_context_release(context);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(identity), cmocka_unit_test(every_status_has_a_name),
                                     cmocka_unit_test(levels), cmocka_unit_test(contexts_answer),
                                     cmocka_unit_test(layers_answer)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
