/* SPDX-License-Identifier: Apache-2.0 */
/* Time from dlopen() to the first result on the CPU: in each of RUNS fresh processes the library is loaded, a context, a
 * layer and a state are made, and four rows are appended, whose result is checked.   usage: startup LIBRARY [RUNS
 * [JSON_FILE]] */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <lla/lla.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ROWS = 4, LEVELS = 3, MAX_RUNS = 10000 };

typedef struct {
  double load, result; /* milliseconds: dlopen() alone; all of it */
} run_times;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e3 * (double)time.tv_sec + 1e-6 * (double)time.tv_nsec;
}

/* A function of the library. ISO C has no cast from an object pointer to a function pointer; POSIX has this. */
static void find(void *library, const char *name, void *function) {
  void *symbol = dlsym(library, name);
  if (symbol == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    _exit(1);
  }
  memcpy(function, &symbol, sizeof symbol);
}

/* What a fresh process does; returns 0 if the result is right. */
static int once(const char *path, run_times *times) {
  float ones[ROWS * LEVELS], y[ROWS] = {0};
  lla_status (*context_create)(const lla_context_options *, lla_context **, lla_error *);
  lla_status (*layer_create)(lla_context *, const lla_layer_desc *, lla_layer **, lla_error *);
  lla_status (*state_create)(lla_layer *const *, int64_t, const lla_state_desc *, const lla_block_memory *, int64_t,
                             lla_state **, lla_error *);
  lla_status (*append)(const lla_layer *, lla_state *, int64_t, const lla_binding *, int64_t, const lla_binding *, int64_t,
                       void *, lla_error *);
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_layer_desc description = LLA_LAYER_DESC_INIT;
  lla_error error = LLA_ERROR_INIT;
  lla_context *context = NULL;
  lla_layer *layer = NULL;
  lla_state *state = NULL;
  double start;
  void *library;
  int i;

  for (i = 0; i < ROWS * LEVELS; ++i) ones[i] = 1;
  start = now();
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  times->load = now() - start;
  find(library, "lla_context_create", &context_create);
  find(library, "lla_layer_create", &layer_create);
  find(library, "lla_state_create", &state_create);
  find(library, "lla_append", &append);
  options.backend = LLA_BACKEND_CPU;
  description.kind = LLA_LAYER_MIXER;
  description.mixer = LLA_SCALAR_GATE;
  description.heads = description.key_dim = description.value_dim = 1;
  description.lambda_form = LLA_LAMBDA_READY;
  description.levels = LEVELS;
  const lla_binding io[] = {
      lla_bind(LLA_Q, lla_tensor_of(ones, LLA_F32, ROWS, 1, 1, -1)),
      lla_bind(LLA_K, lla_tensor_of(ones, LLA_F32, ROWS, 1, 1, -1)),
      lla_bind(LLA_V, lla_tensor_of(ones, LLA_F32, ROWS, 1, 1, -1)),
      lla_bind(LLA_LAMBDA, lla_tensor_of(ones, LLA_F32, ROWS, 1, LEVELS, -1)),
      lla_bind(LLA_Y, lla_tensor_of(y, LLA_F32, ROWS, 1, 1, -1)),
  };
  if (context_create(&options, &context, &error) || layer_create(context, &description, &layer, &error) ||
      state_create(&layer, 1, NULL, NULL, 0, &state, &error) ||
      append(layer, state, 0, io, sizeof io / sizeof io[0], NULL, 0, NULL, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  times->result = now() - start;
  for (i = 0; i < ROWS; ++i) {
    if (y[i] != (float)(i + 1)) {
      fprintf(stderr, "row %d is %g\n", i, (double)y[i]);
      return 1;
    }
  }
  return 0;
}

static int in_order(const void *one, const void *other) {
  const double difference = ((const run_times *)one)->result - ((const run_times *)other)->result;
  return (difference > 0) - (difference < 0);
}

int main(int count, char **words) {
  static run_times times[MAX_RUNS];
  const int runs = count > 2 ? atoi(words[2]) : 101;
  int i;

  if (count < 2 || count > 4 || runs < 1 || runs > MAX_RUNS) {
    fprintf(stderr, "usage: startup LIBRARY [RUNS [JSON_FILE]]\n");
    return 2;
  }
  for (i = 0; i < runs; ++i) {
    int status, ends[2];
    pid_t child;
    if (pipe(ends) || (child = fork()) < 0) {
      perror("startup");
      return 1;
    }
    if (child == 0) {
      run_times mine;
      _exit(once(words[1], &mine) || write(ends[1], &mine, sizeof mine) != (ssize_t)sizeof mine);
    }
    close(ends[1]);
    if (read(ends[0], &times[i], sizeof times[i]) != (ssize_t)sizeof times[i] || waitpid(child, &status, 0) != child ||
        status) {
      fprintf(stderr, "run %d failed\n", i);
      return 1;
    }
    close(ends[0]);
  }
  qsort(times, (size_t)runs, sizeof times[0], in_order);
  printf("from dlopen() to the first result, %d processes: median %.3f ms (dlopen() %.3f), fastest %.3f, slowest %.3f\n",
         runs, times[runs / 2].result, times[runs / 2].load, times[0].result, times[runs - 1].result);
  if (count > 3) {
    FILE *file = fopen(words[3], "w");
    if (file == NULL ||
        fprintf(file,
                "{\n \"processes\": %d,\n \"median_ms\": %.3f,\n \"median_dlopen_ms\": %.3f,\n \"fastest_ms\": %.3f,\n"
                " \"slowest_ms\": %.3f\n}\n",
                runs, times[runs / 2].result, times[runs / 2].load, times[0].result, times[runs - 1].result) < 0 ||
        fclose(file)) {
      perror(words[3]);
      return 1;
    }
  }
  return 0;
}
