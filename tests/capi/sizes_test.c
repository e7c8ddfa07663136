/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that a caller must provide: workspaces grow with the rows, not with the shape of the batch, and a slot with the
 * nodes that it holds, not with its length. */
#include "rig.h"
#include "testing.h"

static size_t workspace_of(const lla_layer *layer, int64_t sequences, int64_t rows, int64_t longest, lla_pass pass) {
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  size_t bytes = 0;
  limits.max_sequences = sequences;
  limits.max_rows = rows;
  limits.max_rows_per_sequence = longest;
  limits.max_length = longest;
  OK(lla_layer_workspace(layer, &limits, pass, &bytes, NULL, &error));
  return bytes;
}

/* Probes A6, M1, S8. */
static void workspaces_grow_with_the_rows(void **unused) {
  static const lla_mixer mixers[2] = {LLA_SCALAR_GATE, LLA_DELTA_RULE};
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_context *context;
  int m, linear, pass;
  (void)unused;
  options.backend = LLA_BACKEND_CPU;
  OK(lla_context_create(&options, &context, &error));
  for (m = 0; m < 2; ++m) {
    for (linear = 0; linear < 2; ++linear) {
      const int wide = sizeof(size_t) > 4; /* what fits into an address space of 32 bits is smaller */
      const int64_t heads = wide ? 32 : 2, dk = wide ? 256 : 64, dv = dk, rows = 1 << 17;
      const lla_layer_desc d = mixer_desc(mixers[m], heads, heads, dk, dv, linear ? 0 : 19);
      /* What a matrix of each chunk and head would take: more than a few of these is a table of all pairs in disguise. */
      const double chunk_matrices = (double)(rows / 64) * (double)(heads * dk * dv) * 4;
      lla_layer *layer;
      OK(lla_layer_create(context, &d, &layer, &error));
      for (pass = LLA_PASS_FORWARD; pass <= LLA_PASS_BACKWARD; ++pass) {
        const size_t one = workspace_of(layer, 1, rows, rows, pass), half = workspace_of(layer, 1, rows / 2, rows / 2, pass);
        const size_t odd = workspace_of(layer, 1, rows + 1, rows + 1, pass);
        const size_t packed = workspace_of(layer, 513, 32768 + 512 * 64, 32768, pass);
        const size_t alone = workspace_of(layer, 1, 32768 + 512 * 64, 32768 + 512 * 64, pass);
        if ((double)one > 2.5 * chunk_matrices)
          stop_test("mixer %d, pass %d: %zu bytes for %d rows, a matrix a chunk is %.0f", m, pass, one, (int)rows,
                    chunk_matrices);
        if ((double)one > 2.2 * (double)half)
          stop_test("mixer %d, pass %d: %zu bytes, half the rows %zu", m, pass, one, half);
        if ((double)odd > 1.02 * (double)one) stop_test("mixer %d, pass %d: %zu bytes, one row more %zu", m, pass, one, odd);
        /* One long sequence among many short ones: not so many times the longest. */
        if ((double)packed > 2.2 * (double)alone)
          stop_test("mixer %d, pass %d: %zu bytes packed, %zu for one sequence of as many rows", m, pass, packed, alone);
      }
      lla_layer_release(layer);
    }
  }
  lla_context_release(context);
}

/* However large the limits: a size that can be in memory and does not fall when they grow, or a refusal. */
static void sizes_fit_into_memory_or_are_refused(void **unused) {
  enum { kWorkspaceForward, kWorkspaceBackward, kSaved, kBatch, kKinds };
  static const lla_mixer mixers[2] = {LLA_SCALAR_GATE, LLA_DELTA_RULE};
  lla_context *context;
  int m, log, kind;
  (void)unused;
  OK(lla_context_create(NULL, &context, &error));
  for (m = 0; m < 2; ++m) {
    const lla_layer_desc d = mixer_desc(mixers[m], 32, 32, 256, 256, 62);
    size_t before[kKinds] = {0};
    int refused[kKinds] = {0};
    lla_layer *layer;
    OK(lla_layer_create(context, &d, &layer, &error));
    for (log = 4; log < 62; ++log) {
      lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
      limits.max_sequences = limits.max_rows = (int64_t)1 << log;
      limits.max_rows_per_sequence = limits.max_length = (int64_t)1 << (log / 2);
      for (kind = 0; kind < kKinds; ++kind) {
        size_t bytes = 0;
        const lla_status status =
            kind == kBatch ? lla_batch_size(context, &limits, &bytes, NULL, NULL)
            : kind == kSaved
                ? lla_layer_saved_size(layer, &limits, &bytes, NULL, NULL)
                : lla_layer_workspace(layer, &limits, kind == kWorkspaceForward ? LLA_PASS_FORWARD : LLA_PASS_BACKWARD,
                                      &bytes, NULL, NULL);
        CHECK(status == (refused[kind] ? LLA_SIZE_OVERFLOW : status == LLA_OK ? LLA_OK : LLA_SIZE_OVERFLOW));
        refused[kind] = status != LLA_OK;
        if (status != LLA_OK) continue;
        if (bytes < before[kind] || bytes > (size_t)PTRDIFF_MAX)
          stop_test("mixer %d, kind %d, 2^%d rows: %zu bytes, half of them %zu", m, kind, log, bytes, before[kind]);
        before[kind] = bytes;
      }
    }
    CHECK(refused[kSaved] && refused[kBatch]); /* workspaces are sized by the longest sequence */
    lla_layer_release(layer);
  }
  lla_context_release(context);
}

/* Probe M4. */
static void slots_grow_with_their_nodes(void **unused) {
  enum { kLong = 16383, kHeads = 2, kDk = 16, kDv = 16 };
  const lla_layer_desc d = mixer_desc(LLA_SCALAR_GATE, kHeads, 1, kDk, kDv, 15);
  const int64_t node = kHeads * (kDk * kDv + 1) * 4; /* content and log decay */
  lla_state_desc state = LLA_STATE_DESC_INIT;
  size_t before, after, young;
  rig r;
  (void)unused;
  state.slots = 2;
  rig_open(&r, NULL, &d, 1, &state, 1, 2048, 0);
  rig_append_to(&r, 0, 1, kLong, 2048);
  rig_append_to(&r, 1, 1, 127, 127);
  OK(lla_state_export_size(r.state, 0, &before, &error));
  OK(lla_state_export_size(r.state, 1, &young, &error));
  CHECK(rig_query(&r, LLA_STATE_SLOT_NODES, 0) == 8 && rig_query(&r, LLA_STATE_SLOT_NODES, 1) == 1); /* 255 chunks, and 1 */
  CHECK((int64_t)before - (int64_t)young == 7 * node); /* both have 63 rows in their tails */
  rig_append(&r, 0, 1, 1);
  OK(lla_state_export_size(r.state, 0, &after, &error));
  CHECK(rig_query(&r, LLA_STATE_SLOT_NODES, 0) == 1); /* 256 chunks */
  CHECK((int64_t)after < (int64_t)young && (int64_t)after > node);
  CHECK(rig_query(&r, LLA_STATE_SLOT_BYTES, 0) < rig_query(&r, LLA_STATE_SLOT_BYTES, 1) + node);
  rig_close(&r);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(workspaces_grow_with_the_rows),
                                     cmocka_unit_test(sizes_fit_into_memory_or_are_refused),
                                     cmocka_unit_test(slots_grow_with_their_nodes)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
