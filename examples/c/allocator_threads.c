/* SPDX-License-Identifier: Apache-2.0 */
/* The caller's memory and threads: an allocator that counts, a team of threads behind the hook, and the same team running
 * the tasks of a call itself. All three ways give the same bits, and a call allocates nothing. */
#define _POSIX_C_SOURCE 200112L /* posix_memalign(), barriers */
#include <lla/lla.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 3, ROWS = 300, HEADS = 6, DIM = 32 };

static lla_error error = LLA_ERROR_INIT;
static void check(lla_status status) {
  if (status == LLA_OK) return;
  fprintf(stderr, "%s: %s\n", lla_status_name(status), error.text);
  exit(1);
}

/* Memory: aligned blocks, counted. */
typedef struct meter {
  long allocations, live;
} meter;

static void *take(size_t bytes, size_t alignment, void *user) {
  meter *m = (meter *)user;
  void *memory = NULL;
  if (posix_memalign(&memory, alignment, bytes)) return NULL;
  ++m->allocations, ++m->live;
  return memory;
}

static void give_back(void *memory, size_t bytes, size_t alignment, void *user) {
  (void)bytes, (void)alignment;
  --((meter *)user)->live;
  free(memory);
}

/* Threads: thread i runs every THREADS-th task. */
typedef struct share {
  int64_t count;
  lla_task task;
  void *argument;
  int32_t thread;
} share;

static void *run_share(void *argument) {
  const share *s = (const share *)argument;
  int64_t i;
  for (i = s->thread; i < s->count; i += THREADS) s->task(i, s->thread, s->argument);
  return NULL;
}
/* The hook. A real engine would wake threads that wait instead of starting them. */
static int32_t run(int64_t count, lla_task task, void *argument, void *user) {
  share shares[THREADS];
  pthread_t threads[THREADS];
  int32_t i;
  ++*(long *)user;
  for (i = THREADS - 1; i >= 0; --i) {
    const share s = {count, task, argument, i};
    shares[i] = s;
    if (i > 0 && pthread_create(&threads[i], NULL, run_share, &shares[i])) exit(1);
  }
  run_share(&shares[0]);
  for (i = 1; i < THREADS; ++i) pthread_join(threads[i], NULL);
  return 0; /* another value says that some tasks did not run, and the call fails */
}

/* An engine whose threads are already inside an operation runs the tasks itself, with a barrier between two phases. */
static pthread_barrier_t barrier;
static void take_part(int64_t member, int32_t thread, void *argument) {
  lla_tasks *tasks = (lla_tasks *)argument;
  int64_t phase, task;
  for (phase = 0; phase < lla_tasks_phases(tasks); ++phase) {
    for (task = member; task < lla_tasks_count(tasks, phase); task += THREADS) lla_tasks_run(tasks, phase, task, thread);
    pthread_barrier_wait(&barrier);
  }
}

static float q[ROWS * HEADS * DIM], y[3][ROWS * HEADS * DIM];

/* Causal linear attention of q with itself; way 0: one thread, 1: through the hook, 2: by the engine's threads. */
static void attend(int way, meter *memory, long *hook_calls) {
  const lla_allocator allocator = {sizeof(lla_allocator), take, give_back, memory};
  const lla_parallel parallel = {sizeof(lla_parallel), THREADS, 0, run, hook_calls};
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_layer_desc description = LLA_LAYER_DESC_INIT;
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  lla_rows rows = LLA_ROWS_INIT;
  lla_forward_args arguments = LLA_FORWARD_ARGS_INIT;
  const lla_tensor in = lla_tensor_of(q, LLA_F32, ROWS, HEADS, DIM, -1);
  const lla_binding io[] = {lla_bind(LLA_Q, in), lla_bind(LLA_K, in), lla_bind(LLA_V, in),
                            lla_bind(LLA_Y, lla_tensor_of(y[way], LLA_F32, ROWS, HEADS, DIM, -1))};
  lla_context *context;
  lla_layer *layer;
  lla_batch *batch;
  void *batch_memory, *workspace;
  size_t batch_bytes, workspace_bytes, alignment;
  long before, unused = 0;
  lla_tasks *tasks;

  options.allocator = &allocator;
  if (way > 0) options.parallel = &parallel;
  check(lla_context_create(&options, &context, &error));
  description.kind = LLA_LAYER_MIXER;
  description.mixer = LLA_SCALAR_GATE;
  description.heads = HEADS;
  description.key_dim = description.value_dim = DIM;
  check(lla_layer_create(context, &description, &layer, &error));
  limits.max_sequences = 1;
  limits.max_rows = ROWS;
  check(lla_batch_size(context, &limits, &batch_bytes, &alignment, &error));
  batch_memory = take(batch_bytes, alignment, memory);
  check(lla_batch_init(context, &limits, batch_memory, batch_bytes, &batch, &error));
  check(lla_layer_workspace(layer, &limits, LLA_PASS_FORWARD, &workspace_bytes, &alignment, &error));
  workspace = take(workspace_bytes, alignment, memory);
  before = memory->allocations;
  rows.sequences = 1, rows.rows_per_sequence = ROWS;
  check(lla_batch_plan(batch, NULL, &rows, NULL, &error)); /* no state: the sequence starts empty */
  arguments.batch = batch;
  arguments.io = io;
  arguments.io_count = sizeof io / sizeof io[0];
  arguments.workspace = workspace;
  arguments.workspace_bytes = workspace_bytes;
  if (way < 2) {
    check(lla_layer_forward(layer, &arguments, &error));
  } else {
    check(lla_layer_forward_tasks(layer, &arguments, &tasks, &error));
    if (pthread_barrier_init(&barrier, NULL, THREADS) || run(THREADS, take_part, tasks, &unused)) exit(1);
    pthread_barrier_destroy(&barrier);
  }
  if (memory->allocations != before) exit(1);
  give_back(workspace, workspace_bytes, alignment, memory);
  give_back(batch_memory, batch_bytes, alignment, memory);
  lla_layer_release(layer);
  lla_context_release(context);
}

int main(void) {
  meter memory = {0, 0};
  long hook_calls = 0;
  int way, i, same;
  for (i = 0; i < ROWS * HEADS * DIM; ++i) q[i] = (float)((i * 7919) % 1000) / 1000.0f - 0.5f;
  for (way = 0; way < 3; ++way) attend(way, &memory, &hook_calls);
  same = !memcmp(y[0], y[1], sizeof y[0]) && !memcmp(y[0], y[2], sizeof y[0]);
  printf("%ld allocations, %ld still live; the hook was called %ld times; outputs %s\n", memory.allocations, memory.live,
         hook_calls, same ? "have the same bits" : "DIFFER");
  return same && memory.live == 0 && hook_calls > 0 && y[0][0] != 0 ? 0 : 1;
}
