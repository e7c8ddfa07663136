/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of this folder share: checks with the library's own error text, aligned memory, and values that depend only
 * on what they belong to, so that any row of any sequence can be made again anywhere. */
#ifndef LLA_TESTING_H
#define LLA_TESTING_H

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

/* clang-format off: cmocka.h needs what stands before it */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <lla/lla.h>
/* clang-format on */

#include "mixer_desc.h"

/* -- checks ------------------------------------------------------------------------------------------------------------ */

/* Set in threads that a test starts: a failed check cannot jump out of them. */
static __thread int in_worker;

static inline void stop_test(const char *format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (in_worker) {
    fprintf(stderr, "%s\n", text);
    abort();
  }
  fail_msg("%s", text);
}

/* A call that must succeed; it takes `&error` of the place where it stands. */
#define OK(call)                                                                                     \
  do {                                                                                               \
    lla_error error = LLA_ERROR_INIT;                                                                \
    const lla_status ok_status = (call);                                                             \
    if (ok_status != LLA_OK) stop_test("%s: %s: %s", #call, lla_status_name(ok_status), error.text); \
  } while (0)

/* A call that must fail with a status; the text must hold `word`, and the code must be the status. */
#define FAILS(expected, word, call)                                                                           \
  do {                                                                                                        \
    lla_error error = LLA_ERROR_INIT;                                                                         \
    const lla_status got = (call);                                                                            \
    if (got != (expected))                                                                                    \
      stop_test("%s: %s (%s), not %s", #call, lla_status_name(got), error.text, lla_status_name(expected));   \
    if (error.code != got) stop_test("%s: the error's code is %d, not %d", #call, (int)error.code, (int)got); \
    if (!strstr(error.text, (word))) stop_test("%s: \"%s\" does not name %s", #call, error.text, (word));     \
  } while (0)

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) stop_test("%s:%d: not so: %s", __FILE__, __LINE__, #condition); \
  } while (0)

static inline void check_equal_bytes(const void *a, const void *b, size_t bytes, const char *what) {
  const unsigned char *x = (const unsigned char *)a, *y = (const unsigned char *)b;
  size_t i;
  for (i = 0; i < bytes; ++i) {
    if (x[i] != y[i]) stop_test("%s: byte %zu of %zu differs", what, i, bytes);
  }
}

/* -- memory ------------------------------------------------------------------------------------------------------------ */

static inline void *take(size_t bytes) {
  void *memory = NULL;
  if (posix_memalign(&memory, 64, bytes ? bytes : 1) != 0) abort();
  memset(memory, 0xa5, bytes);
  return memory;
}

/* -- values ------------------------------------------------------------------------------------------------------------ */

static inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* Number i of a series, in [0, 1). */
static inline float unit(uint64_t series, int64_t i) {
  return (float)(mix(series + (uint64_t)i) >> 40) * (1.0f / 16777216.0f);
}

static inline uint64_t series_of(uint64_t seed, int64_t position, int64_t layer, lla_role role) {
  return mix(mix(mix(seed) + (uint64_t)position) + (uint64_t)layer * 1000u + (uint64_t)role);
}

/* -- indexes ----------------------------------------------------------------------------------------------------------- */

static inline lla_index index64(const int64_t *data) {
  lla_index index;
  index.data = data;
  index.dtype = LLA_I64;
  index.location = LLA_HOST;
  return index;
}

static inline lla_index index32(const int32_t *data) {
  lla_index index;
  index.data = data;
  index.dtype = LLA_I32;
  index.location = LLA_HOST;
  return index;
}

static inline lla_index no_index(void) {
  lla_index index = {NULL, 0, 0};
  return index;
}

/* -- layers ------------------------------------------------------------------------------------------------------------ */

/* A Gated DeltaNet cell with everything on. */
static inline lla_layer_desc cell_desc(int64_t heads, int64_t groups, int64_t key_dim, int64_t value_dim, int64_t levels) {
  lla_layer_desc d = mixer_desc(LLA_DELTA_RULE, heads, groups, key_dim, value_dim, levels);
  d.kind = LLA_LAYER_CELL;
  d.lambda_form = levels ? LLA_LAMBDA_SOFTPLUS : LLA_LAMBDA_NONE;
  d.gate_form = LLA_GATE_SOFTPLUS;
  d.write_form = LLA_WRITE_SIGMOID;
  d.qk_norm = 1;
  d.conv_width = 4;
  d.norm_form = LLA_NORM_NORM_FIRST;
  d.norm_group = value_dim;
  return d;
}

static inline lla_layer_desc mamba2_desc(int64_t heads, int64_t groups, int64_t key_dim, int64_t value_dim, int64_t hidden,
                                         int64_t levels) {
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = LLA_LAYER_MAMBA2;
  d.heads = heads;
  d.groups = groups;
  d.key_dim = key_dim;
  d.value_dim = value_dim;
  d.hidden = hidden;
  d.levels = levels;
  d.lambda_form = levels ? LLA_LAMBDA_SOFTPLUS : LLA_LAMBDA_NONE;
  return d;
}

#endif
