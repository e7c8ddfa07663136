/* SPDX-License-Identifier: Apache-2.0 */
/* A first result through functions found by dlsym(): four rows of ones through log-linear attention with weights 1 add up.
 */
#ifndef LLA_FIRST_RESULT_H
#define LLA_FIRST_RESULT_H

#include <dlfcn.h>
#include <lla/lla.h>
#include <stdio.h>
#include <string.h>

typedef struct functions {
  lla_status (*context_create)(const lla_context_options *, lla_context **, lla_error *);
  lla_status (*layer_create)(lla_context *, const lla_layer_desc *, lla_layer **, lla_error *);
  lla_status (*state_create)(lla_layer *const *, int64_t, const lla_state_desc *, const lla_block_memory *, int64_t,
                             lla_state **, lla_error *);
  lla_status (*append)(const lla_layer *, lla_state *, int64_t, const lla_binding *, int64_t, const lla_binding *, int64_t,
                       void *, lla_error *);
  void (*context_release)(lla_context *);
  void (*layer_release)(lla_layer *);
  void (*state_release)(lla_state *);
} functions;

typedef struct handles {
  lla_context *context;
  lla_layer *layer;
  lla_state *state;
} handles;

/* ISO C has no cast from an object pointer to a function pointer; POSIX says that the bits are the same. */
static inline int find_function(void *library, const char *name, void *function) {
  void *symbol = dlsym(library, name);
  if (symbol == NULL) fprintf(stderr, "%s\n", dlerror());
  memcpy(function, &symbol, sizeof symbol);
  return symbol == NULL;
}

/* Opens the library; NULL, with the reason printed, if it or a function is not there. */
static inline void *open_library(const char *path, functions *f) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return NULL;
  }
  return find_function(library, "lla_context_create", &f->context_create) ||
                 find_function(library, "lla_layer_create", &f->layer_create) ||
                 find_function(library, "lla_state_create", &f->state_create) ||
                 find_function(library, "lla_append", &f->append) ||
                 find_function(library, "lla_context_release", &f->context_release) ||
                 find_function(library, "lla_layer_release", &f->layer_release) ||
                 find_function(library, "lla_state_release", &f->state_release)
             ? NULL
             : library;
}

/* Four more rows for the state, which has seen `before` rows; 0 if the result is right. */
static inline int append_ones(const functions *f, const handles *h, int before) {
  enum { ROWS = 4, LEVELS = 12 };
  float ones[ROWS * LEVELS], y[ROWS] = {0};
  lla_error error = LLA_ERROR_INIT;
  int i;
  for (i = 0; i < ROWS * LEVELS; ++i) ones[i] = 1;
  const lla_binding io[] = {
      lla_bind(LLA_Q, lla_tensor_of(ones, LLA_F32, ROWS, 1, 1, -1)),
      lla_bind(LLA_K, lla_tensor_of(ones, LLA_F32, ROWS, 1, 1, -1)),
      lla_bind(LLA_V, lla_tensor_of(ones, LLA_F32, ROWS, 1, 1, -1)),
      lla_bind(LLA_LAMBDA, lla_tensor_of(ones, LLA_F32, ROWS, 1, LEVELS, -1)),
      lla_bind(LLA_Y, lla_tensor_of(y, LLA_F32, ROWS, 1, 1, -1)),
  };
  if (f->append(h->layer, h->state, 0, io, sizeof io / sizeof io[0], NULL, 0, NULL, &error) != LLA_OK) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  for (i = 0; i < ROWS; ++i) {
    if (y[i] != (float)(before + i + 1)) {
      fprintf(stderr, "row %d is %g\n", before + i, (double)y[i]);
      return 1;
    }
  }
  return 0;
}

/* Makes the handles, with a pool of threads if `threads` > 1, and computes; 0 if the result is right. */
static inline int first_result(const functions *f, int32_t threads, handles *h) {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_layer_desc description = LLA_LAYER_DESC_INIT;
  lla_error error = LLA_ERROR_INIT;
  options.backend = LLA_BACKEND_CPU;
  options.threads = threads;
  description.kind = LLA_LAYER_MIXER;
  description.mixer = LLA_SCALAR_GATE;
  description.heads = description.key_dim = description.value_dim = 1;
  description.lambda_form = LLA_LAMBDA_READY;
  description.levels = 12;
  if (f->context_create(&options, &h->context, &error) != LLA_OK ||
      f->layer_create(h->context, &description, &h->layer, &error) != LLA_OK ||
      f->state_create(&h->layer, 1, NULL, NULL, 0, &h->state, &error) != LLA_OK) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  return append_ones(f, h, 0);
}

static inline void release_handles(const functions *f, handles *h) {
  f->context_release(h->context);
  f->layer_release(h->layer);
  f->state_release(h->state);
}

#endif
