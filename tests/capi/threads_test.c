/* SPDX-License-Identifier: Apache-2.0 */
/* The same bits for any number of threads, whoever owns them; disjoint slots at once; a hook that fails; life after fork().
 */
#include "testing.h"

#include <pthread.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rig.h"

/* -- the caller's threads ---------------------------------------------------------------------------------------------- */

/* How a hook goes about its tasks. */
typedef enum order { kTogether, kForward, kBackward, kInsideOut, kOneEach, kOrders } order;

typedef struct crew {
  int32_t threads;
  int64_t calls;
  int64_t fail_at; /* call that drops tasks and says so; 0: none */
  int drop_all;    /* that call runs none of its tasks, not all but the last */
  int silent;      /* and says that it ran all of them */
  order how;
} crew;

typedef struct shift {
  pthread_mutex_t mutex;
  int64_t next, count;
  lla_task task;
  void *argument;
} shift;

typedef struct worker {
  shift *shift;
  int32_t thread;
  pthread_t id;
} worker;

static void *work(void *argument) {
  worker *w = (worker *)argument;
  shift *s = w->shift;
  if (w->thread > 0) in_worker = 1;
  for (;;) {
    int64_t task;
    pthread_mutex_lock(&s->mutex);
    task = s->next++;
    pthread_mutex_unlock(&s->mutex);
    if (task >= s->count) return NULL;
    s->task(task, w->thread, s->argument);
  }
}

/* One thread, which calls itself by any of the numbers that there are. */
static void run_in_order(const crew *c, int64_t count, lla_task task, void *argument) {
  int64_t i;
  for (i = 0; i < count; ++i) {
    switch (c->how) {
      case kForward:
        task(i, c->threads - 1, argument);
        break;
      case kBackward:
        task(count - 1 - i, 0, argument);
        break;
      case kInsideOut:
        task((count + (i % 2 ? -i - 1 : i)) / 2, (int32_t)(i % c->threads), argument);
        break;
      default: /* every second one first */
        task(2 * i < count ? 2 * i : 2 * (i - (count + 1) / 2) + 1, (int32_t)((count - i) % c->threads), argument);
    }
  }
}

static int32_t run_crew(int64_t count, lla_task task, void *argument, void *user) {
  crew *c = (crew *)user;
  shift s = {PTHREAD_MUTEX_INITIALIZER, 0, 0, NULL, NULL};
  worker workers[16];
  int32_t i;
  ++c->calls;
  if (c->calls == c->fail_at) count = c->drop_all ? 0 : count - 1;
  if (c->how != kTogether) {
    run_in_order(c, count, task, argument);
    return c->calls == c->fail_at && !c->silent ? -1 : 0;
  }
  s.count = count;
  s.task = task;
  s.argument = argument;
  for (i = 0; i < c->threads; ++i) {
    workers[i].shift = &s;
    workers[i].thread = i;
  }
  for (i = 1; i < c->threads; ++i) {
    if (pthread_create(&workers[i].id, NULL, work, &workers[i]) != 0) abort();
  }
  work(&workers[0]);
  for (i = 1; i < c->threads; ++i) pthread_join(workers[i].id, NULL);
  return c->calls == c->fail_at && !c->silent;
}

typedef enum manner { kAlone, kHook, kPool, kTasks } manner;

typedef struct team {
  manner how;
  crew crew;
  lla_parallel parallel;
  lla_context_options options;
} team;

static void make_team(team *t, manner how, int32_t threads) {
  const lla_context_options plain = LLA_CONTEXT_OPTIONS_INIT;
  memset(t, 0, sizeof *t);
  t->how = how;
  t->options = plain;
  t->crew.threads = threads;
  t->parallel.struct_size = sizeof t->parallel;
  t->parallel.max_threads = threads;
  t->parallel.run = run_crew;
  t->parallel.user = &t->crew;
  if (how == kHook || how == kTasks) t->options.parallel = &t->parallel;
  if (how == kPool) t->options.threads = threads;
}

typedef struct phase {
  lla_tasks *tasks;
  int64_t number;
} phase;

static void run_one(int64_t task, int32_t thread, void *argument) {
  const phase *p = (const phase *)argument;
  lla_tasks_run(p->tasks, p->number, task, thread);
}

/* An engine's own threads run the tasks, with a barrier (the join of the crew) between phases. */
static void run_tasks(team *t, lla_tasks *tasks) {
  phase p;
  CHECK(lla_tasks_phases(tasks) > 0);
  CHECK(lla_tasks_count(tasks, -1) == 0 && lla_tasks_count(tasks, lla_tasks_phases(tasks)) == 0);
  p.tasks = tasks;
  for (p.number = 0; p.number < lla_tasks_phases(tasks); ++p.number) {
    const int64_t count = lla_tasks_count(tasks, p.number);
    run_crew(count, run_one, &p, &t->crew);
    lla_tasks_run(tasks, p.number, count, 0); /* none of these does anything */
    lla_tasks_run(tasks, p.number, -1, 0);
    lla_tasks_run(tasks, p.number, 0, t->crew.threads);
    lla_tasks_run(tasks, p.number, 0, -1);
  }
}

static void forward(team *t, rig *r) {
  lla_forward_args arguments = rig_forward_args(r, 0);
  if (t->how == kTasks) {
    lla_tasks *tasks = NULL;
    OK(lla_layer_forward_tasks(r->layer[0].layer, &arguments, &tasks, &error));
    run_tasks(t, tasks);
  } else {
    OK(lla_layer_forward(r->layer[0].layer, &arguments, &error));
  }
}

static void backward(team *t, rig *r) {
  lla_binding list[RIG_IO + RIG_WEIGHTS];
  lla_backward_args arguments = rig_backward_args(r, 0);
  arguments.gradients = list;
  arguments.gradient_count = rig_list_gradients(r, 0, list);
  if (t->how == kTasks) {
    lla_tasks *tasks = NULL;
    OK(lla_layer_backward_tasks(r->layer[0].layer, &arguments, &tasks, &error));
    run_tasks(t, tasks);
  } else {
    OK(lla_layer_backward(r->layer[0].layer, &arguments, &error));
  }
}

/* -- the same bits ----------------------------------------------------------------------------------------------------- */

typedef struct bits {
  char *data;
  size_t size, room;
} bits;

static void keep(bits *b, const void *data, size_t size) {
  CHECK(b->size + size <= b->room);
  memcpy(b->data + b->size, data, size);
  b->size += size;
}

#define ROWS 215

static const lla_state_desc small_state = {sizeof(lla_state_desc), 0, 0, 0, 0, 4, 1024, 0, 0};

/* Outputs, states and gradients of a layer in three ragged sequences, with and without state. */
static bits fingerprint(team *t, const lla_layer_desc *desc) {
  static const int64_t offsets[4] = {0, 130, 131, 212};
  bits b = {NULL, 0, (size_t)1 << 22};
  lla_rows rows = LLA_ROWS_INIT;
  rig r;
  int64_t i;
  b.data = (char *)take(b.room);
  rows.sequences = 3;
  rows.total_rows = ROWS;
  rows.offsets = index64(offsets);

  rig_open(&r, &t->options, desc, 1, &small_state, 3, ROWS, 0);
  for (i = 0; i < 3; ++i) {
    int64_t s;
    rig_set_rows(&r, ROWS);
    for (s = 0; s < 3; ++s) rig_fill(&r, offsets[s], (uint64_t)s, rig_length(&r, s), offsets[s + 1] - offsets[s]);
    rig_plan(&r, &rows);
    forward(t, &r);
    rig_commit(&r, NULL);
    keep(&b, rig_output(&r, 0, 0), (size_t)(ROWS * rig_output_width(&r, 0)) * sizeof(float));
  }
  for (i = 0; i < 3; ++i) {
    size_t bytes;
    void *image = rig_pack(&r, i, &bytes);
    keep(&b, image, bytes);
    free(image);
  }
  rig_close(&r);

  rig_open(&r, &t->options, desc, 1, NULL, 3, ROWS, 0);
  rig_set_rows(&r, ROWS);
  for (i = 0; i < 3; ++i) rig_fill(&r, offsets[i], (uint64_t)i, 0, offsets[i + 1] - offsets[i]);
  rig_plan(&r, &rows);
  forward(t, &r);
  rig_fill_output_gradient(&r, 0, 3, ROWS);
  backward(t, &r);
  for (i = 0; i + 1 < r.layer[0].io_count; ++i)
    keep(&b, r.layer[0].gradient[i].tensor.data, (size_t)(ROWS * r.layer[0].width[i]) * sizeof(float));
  for (i = 0; i < r.layer[0].weight_count; ++i)
    keep(&b, r.layer[0].weight_gradient[i].tensor.data, (size_t)r.layer[0].weight_size[i] * sizeof(float));
  rig_close(&r);
  return b;
}

static void check_threads(const lla_layer_desc *desc) {
  static const int32_t counts[3] = {1, 2, 7};
  static const manner manners[3] = {kHook, kPool, kTasks};
  team t;
  bits expected;
  int i, k;
  make_team(&t, kAlone, 1);
  expected = fingerprint(&t, desc);
  for (i = 0; i < 3; ++i) {
    for (k = 0; k < 3; ++k) {
      char what[64];
      bits now;
      make_team(&t, manners[i], counts[k]);
      now = fingerprint(&t, desc);
      snprintf(what, sizeof what, "manner %d with %d threads", (int)manners[i], (int)counts[k]);
      CHECK(now.size == expected.size);
      check_equal_bytes(now.data, expected.data, now.size, what);
      CHECK(manners[i] == kPool || counts[k] == 1 || t.crew.calls > 0);
      free(now.data);
    }
  }
  free(expected.data);
}

/* Tasks in any order, and all of them on one thread under any number: the contract asks for no more. */
static void orders_have_the_same_bits(void **unused) {
  static const int32_t counts[2] = {2, 3}; /* a hook of one thread is not asked */
  lla_layer_desc layers[4];
  int l, k;
  (void)unused;
  layers[0] = mixer_desc(LLA_SCALAR_GATE, 6, 2, 16, 24, lla_levels_needed(1024));
  layers[1] = mixer_desc(LLA_DELTA_RULE, 4, 2, 16, 16, lla_levels_needed(1024));
  layers[2] = cell_desc(4, 2, 16, 16, lla_levels_needed(1024));
  layers[3] = mamba2_desc(4, 1, 16, 16, 40, lla_levels_needed(1024));
  for (l = 0; l < 4; ++l) {
    team t;
    bits expected;
    int how;
    make_team(&t, kAlone, 1);
    expected = fingerprint(&t, &layers[l]);
    for (how = kForward; how < kOrders; ++how) {
      for (k = 0; k < 2; ++k) {
        char what[64];
        bits now;
        make_team(&t, kHook, counts[k]);
        t.crew.how = (order)how;
        now = fingerprint(&t, &layers[l]);
        snprintf(what, sizeof what, "layer %d, order %d, %d thread numbers", l, how, (int)counts[k]);
        CHECK(now.size == expected.size && t.crew.calls > 0);
        check_equal_bytes(now.data, expected.data, now.size, what);
        free(now.data);
      }
    }
    free(expected.data);
  }
}

static void mixers_have_the_same_bits(void **unused) {
  const lla_layer_desc scalar = mixer_desc(LLA_SCALAR_GATE, 6, 2, 16, 24, lla_levels_needed(1024));
  const lla_layer_desc delta = mixer_desc(LLA_DELTA_RULE, 4, 2, 16, 16, lla_levels_needed(1024));
  const lla_layer_desc linear = mixer_desc(LLA_DELTA_RULE, 3, 3, 16, 16, 0);
  (void)unused;
  check_threads(&scalar);
  check_threads(&delta);
  check_threads(&linear);
}

static void cells_have_the_same_bits(void **unused) {
  const lla_layer_desc cell = cell_desc(4, 2, 16, 16, lla_levels_needed(1024));
  (void)unused;
  check_threads(&cell);
}

static void blocks_have_the_same_bits(void **unused) {
  const lla_layer_desc block = mamba2_desc(4, 1, 16, 16, 40, lla_levels_needed(1024));
  (void)unused;
  check_threads(&block);
}

/* -- disjoint slots ---------------------------------------------------------------------------------------------------- */

static void *serve_slot(void *argument) {
  rig *r = (rig *)argument;
  const int64_t slot = r->layer[1].width[0] < 0 ? 1 : 0; /* the sign marks whose rig it is */
  int i;
  in_worker = 1;
  if (slot) r->layer[1].width[0] = -r->layer[1].width[0];
  for (i = 0; i < 12; ++i) {
    rig_append(r, slot, 40 + (uint64_t)slot, 37);
    rig_append(r, slot, 40 + (uint64_t)slot, 1);
    rig_run(r, slot, 99, 5); /* dropped */
    lla_batch_discard(r->batch);
  }
  return NULL;
}

/* Probe G8. */
static void disjoint_slots_at_once(void **unused) {
  int pools;
  (void)unused;
  for (pools = 0; pools < 2; ++pools) {
    lla_layer_desc layers[2];
    team t;
    rig first, second, alone;
    pthread_t threads[2];
    int64_t slot;
    layers[0] = mixer_desc(LLA_SCALAR_GATE, 4, 2, 16, 16, lla_levels_needed(1024));
    layers[1] = mixer_desc(LLA_DELTA_RULE, 2, 2, 16, 16, lla_levels_needed(1024));
    make_team(&t, pools ? kPool : kAlone, 3);
    rig_open(&first, &t.options, layers, 2, &small_state, 1, 64, 0);
    rig_share(&second, &first);
    second.layer[1].width[0] = -second.layer[1].width[0];
    if (pthread_create(&threads[0], NULL, serve_slot, &first) != 0) abort();
    if (pthread_create(&threads[1], NULL, serve_slot, &second) != 0) abort();
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    rig_open(&alone, NULL, layers, 2, &small_state, 1, 64, 0);
    for (slot = 0; slot < 2; ++slot) {
      int i;
      for (i = 0; i < 12; ++i) {
        rig_append(&alone, slot, 40 + (uint64_t)slot, 37);
        rig_append(&alone, slot, 40 + (uint64_t)slot, 1);
      }
      rig_check_same_slot(&first, slot, &alone, slot, "slot that was served beside another");
    }
    CHECK(rig_query(&first, LLA_STATE_FREE_NODE_BLOCKS, 0) == rig_query(&alone, LLA_STATE_FREE_NODE_BLOCKS, 0));
    rig_close(&second);
    rig_close(&first);
    rig_close(&alone);
  }
}

/* -- failures and fork() ----------------------------------------------------------------------------------------------- */

static void a_failing_hook_fails_the_call(void **unused) {
  const lla_layer_desc desc = cell_desc(2, 2, 16, 16, lla_levels_needed(1024));
  team t;
  rig r, alone;
  int64_t n;
  (void)unused;
  make_team(&t, kHook, 2);
  rig_open(&r, &t.options, &desc, 1, &small_state, 1, 80, 0);
  rig_open(&alone, NULL, &desc, 1, &small_state, 1, 80, 0);
  rig_append(&r, 0, 5, 50);
  rig_append(&alone, 0, 5, 50);
  t.crew.calls = 0;
  rig_run(&r, 0, 5, 80);
  CHECK(t.crew.calls > 1);
  for (n = t.crew.calls; n >= 1; --n) {
    const lla_forward_args arguments = rig_forward_args(&r, 0);
    t.crew.calls = 0;
    t.crew.fail_at = n;
    FAILS(LLA_THREADS_FAILED, "", lla_layer_forward(r.layer[0].layer, &arguments, &error));
    CHECK(rig_length(&r, 0) == 50);
  }
  t.crew.fail_at = 0;
  rig_check_same_slot(&r, 0, &alone, 0, "slot after calls that failed");
  rig_append(&r, 0, 5, 80);
  rig_append(&alone, 0, 5, 80);
  rig_check_same_slot(&r, 0, &alone, 0, "slot after calls that failed and one that did not");
  { /* lla_append() fails likewise, and changes nothing. */
    lla_binding io[RIG_IO];
    int64_t i, count = r.layer[0].io_count;
    memcpy(io, r.layer[0].io, sizeof io);
    for (i = 0; i < count; ++i) io[i].tensor.dims[0] = 70;
    t.crew.calls = 0;
    t.crew.fail_at = 2;
    FAILS(LLA_THREADS_FAILED, "",
          lla_append(r.layer[0].layer, r.state, 0, io, count, r.layer[0].weight, r.layer[0].weight_count, NULL, &error));
    t.crew.fail_at = 0;
    CHECK(rig_length(&r, 0) == 130);
    rig_check_same_slot(&r, 0, &alone, 0, "slot after lla_append() failed");
    CHECK(rig_query(&r, LLA_STATE_FREE_NODE_BLOCKS, 0) == rig_query(&alone, LLA_STATE_FREE_NODE_BLOCKS, 0));
  }
  rig_close(&r);
  rig_close(&alone);
}

/* Each phase of forward and backward of a block refused once, with some of its tasks run or none, by a hook that says so or one
 * that does not: the state stays as it was, and the same call with threads that work has the bits that it always has. */
static void refusals_leave_no_trace(void **unused) {
  static const order orders[3] = {kTogether, kBackward, kInsideOut};
  const lla_layer_desc desc = mamba2_desc(3, 1, 8, 8, 20, lla_levels_needed(1024));
  int variant;
  (void)unused;
  for (variant = 0; variant < 12; ++variant) {
    lla_binding list[RIG_IO + RIG_WEIGHTS];
    lla_forward_args forward_args;
    lla_backward_args backward_args;
    lla_rows rows = LLA_ROWS_INIT;
    team t;
    rig r, alone;
    int64_t n, calls, i;
    make_team(&t, kHook, 2);
    t.crew.how = orders[variant / 4];
    t.crew.drop_all = variant / 2 % 2;
    t.crew.silent = variant % 2;
    rig_open(&r, &t.options, &desc, 1, &small_state, 1, 80, 0);
    rig_open(&alone, NULL, &desc, 1, &small_state, 1, 80, 0);
    rig_append(&r, 0, 5, 50);
    rig_append(&alone, 0, 5, 50);
    rig_run(&r, 0, 5, 80);
    rig_run(&alone, 0, 5, 80);
    forward_args = rig_forward_args(&r, 0);
    t.crew.calls = 0;
    OK(lla_layer_forward(r.layer[0].layer, &forward_args, &error));
    calls = t.crew.calls;
    CHECK(calls > 3);
    for (n = 1; n <= calls; ++n) {
      t.crew.calls = 0;
      t.crew.fail_at = n;
      FAILS(LLA_THREADS_FAILED, "", lla_layer_forward(r.layer[0].layer, &forward_args, &error));
      CHECK(t.crew.calls == n); /* nothing is run after a refusal */
      t.crew.fail_at = 0;
      CHECK(rig_length(&r, 0) == 50);
      memset(rig_output(&r, 0, 0), 0xff, (size_t)(80 * rig_output_width(&r, 0)) * sizeof(float));
      OK(lla_layer_forward(r.layer[0].layer, &forward_args, &error));
      check_equal_bytes(rig_output(&r, 0, 0), rig_output(&alone, 0, 0), (size_t)(80 * rig_output_width(&r, 0)) * sizeof(float),
                        "output after a refusal");
    }
    rig_commit(&r, NULL);
    rig_commit(&alone, NULL);
    rig_check_same_slot(&r, 0, &alone, 0, "slot after refusals");
    rows.sequences = 1;
    rows.rows_per_sequence = 80;
    rig_plan(&r, &rows);
    rig_plan(&alone, &rows);
    rig_fill_output_gradient(&r, 0, 3, 80);
    rig_fill_output_gradient(&alone, 0, 3, 80);
    backward_args = rig_backward_args(&alone, 0);
    backward_args.gradients = list;
    backward_args.gradient_count = rig_list_gradients(&alone, 0, list);
    OK(lla_layer_backward(alone.layer[0].layer, &backward_args, &error));
    backward_args = rig_backward_args(&r, 0);
    backward_args.gradients = list;
    backward_args.gradient_count = rig_list_gradients(&r, 0, list);
    t.crew.calls = 0;
    OK(lla_layer_backward(r.layer[0].layer, &backward_args, &error));
    calls = t.crew.calls;
    CHECK(calls > 3);
    for (n = 1; n <= calls; ++n) {
      t.crew.calls = 0;
      t.crew.fail_at = n;
      FAILS(LLA_THREADS_FAILED, "", lla_layer_backward(r.layer[0].layer, &backward_args, &error));
      CHECK(t.crew.calls == n);
      t.crew.fail_at = 0;
      for (i = 0; i + 1 < r.layer[0].io_count; ++i)
        memset(r.layer[0].gradient[i].tensor.data, 0xff, (size_t)(80 * r.layer[0].width[i]) * sizeof(float));
      OK(lla_layer_backward(r.layer[0].layer, &backward_args, &error));
      for (i = 0; i + 1 < r.layer[0].io_count; ++i)
        check_equal_bytes(r.layer[0].gradient[i].tensor.data, alone.layer[0].gradient[i].tensor.data,
                          (size_t)(80 * r.layer[0].width[i]) * sizeof(float), "gradient of an input after a refusal");
      for (i = 0; i < r.layer[0].weight_count; ++i)
        check_equal_bytes(r.layer[0].weight_gradient[i].tensor.data, alone.layer[0].weight_gradient[i].tensor.data,
                          (size_t)r.layer[0].weight_size[i] * sizeof(float), "gradient of a weight after a refusal");
    }
    rig_close(&r);
    rig_close(&alone);
  }
}

/* Probe K1. */
static void a_forked_child_goes_on(void **unused) {
  static const manner manners[2] = {kAlone, kPool};
  const lla_layer_desc desc = mixer_desc(LLA_DELTA_RULE, 4, 2, 16, 16, lla_levels_needed(1024));
  int m;
  (void)unused;
  for (m = 0; m < 2; ++m) {
    team t;
    rig r, twin;
    pid_t child;
    int status = -1;
    make_team(&t, manners[m], 3);
    rig_open(&r, &t.options, &desc, 1, &small_state, 1, 100, 0);
    rig_open(&twin, NULL, &desc, 1, &small_state, 1, 100, 0);
    rig_append(&r, 0, 5, 100);
    rig_append(&twin, 0, 5, 100);
    rig_append(&twin, 0, 5, 90);
    fflush(NULL);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      in_worker = 1; /* a failed check ends the child */
      alarm(60);
      rig_append(&r, 0, 5, 90);
      rig_check_same_slot(&r, 0, &twin, 0, "slot in the child");
      rig_close(&r);
      _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    rig_append(&r, 0, 5, 90);
    rig_check_same_slot(&r, 0, &twin, 0, "slot in the parent");
    rig_close(&r);
    rig_close(&twin);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(mixers_have_the_same_bits),     cmocka_unit_test(cells_have_the_same_bits),
      cmocka_unit_test(blocks_have_the_same_bits),     cmocka_unit_test(disjoint_slots_at_once),
      cmocka_unit_test(a_failing_hook_fails_the_call), cmocka_unit_test(a_forked_child_goes_on),
      cmocka_unit_test(orders_have_the_same_bits),     cmocka_unit_test(refusals_leave_no_trace)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
