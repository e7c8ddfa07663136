/* SPDX-License-Identifier: Apache-2.0 */
/* Histories: a prompt is saved to a file and loaded, forked, extended by a draft of which a part is accepted, and rolled
 * back. Every way of getting to a position gives the same state, bit by bit. */
#define _POSIX_C_SOURCE 200112L /* posix_memalign() */
#include <lla/lla.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 2, DIM = 16, PROMPT = 150, DRAFT = 5, ACCEPTED = 2, MAX_ROWS = 160 };
enum { kPrompt, kLoaded, kFork, kPlain, SLOTS };

static lla_error error = LLA_ERROR_INIT;

static void check(lla_status status) {
  if (status == LLA_OK) return;
  fprintf(stderr, "%s: %s\n", lla_status_name(status), error.text);
  exit(1);
}

static void require(int condition, const char *what) {
  printf("%-60s %s\n", what, condition ? "ok" : "NO");
  if (!condition) exit(1);
}
static lla_context *context;
static lla_layer *layer;
static lla_state *state;
static float q[MAX_ROWS][HEADS][DIM], y[MAX_ROWS][HEADS][DIM], gate[MAX_ROWS][HEADS];

static lla_index index_of(const int64_t *data) {
  const lla_index index = {data, LLA_I64, LLA_HOST};
  return index;
}

/* Appends `count` rows of token values at the slot's position, of which the first `accepted` are right and are kept. */
static void append(int64_t slot, int64_t count, int64_t accepted) {
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  lla_rows rows = LLA_ROWS_INIT;
  lla_forward_args arguments = LLA_FORWARD_ARGS_INIT;
  const lla_tensor tokens = lla_tensor_of(q, LLA_F32, count, HEADS, DIM, -1);
  const lla_binding io[] = {lla_bind(LLA_Q, tokens), lla_bind(LLA_K, tokens), lla_bind(LLA_V, tokens),
                            lla_bind(LLA_GATE, lla_tensor_of(gate, LLA_F32, count, HEADS, -1, -1)),
                            lla_bind(LLA_Y, lla_tensor_of(y, LLA_F32, count, HEADS, DIM, -1))};
  lla_batch *batch;
  void *memory, *workspace;
  size_t bytes, alignment;
  int64_t position, r;
  int i;
  check(lla_state_length(state, slot, &position, &error));
  for (r = 0; r < count; ++r) {
    const int64_t token = r < accepted ? position + r : 999;
    for (i = 0; i < HEADS * DIM; ++i) (&q[r][0][0])[i] = (float)((token * 31 + i * 17) % 101) / 250.0f - 0.2f;
    for (i = 0; i < HEADS; ++i) gate[r][i] = -0.02f;
  }
  limits.max_sequences = 1;
  limits.max_rows = count;
  check(lla_batch_size(context, &limits, &bytes, &alignment, &error));
  if (posix_memalign(&memory, alignment, bytes)) exit(1);
  check(lla_batch_init(context, &limits, memory, bytes, &batch, &error));
  check(lla_layer_workspace(layer, &limits, LLA_PASS_FORWARD, &bytes, &alignment, &error));
  if (posix_memalign(&workspace, alignment, bytes)) exit(1);
  rows.sequences = 1;
  rows.rows_per_sequence = count;
  rows.slot_in = index_of(&slot);
  check(lla_batch_plan(batch, state, &rows, NULL, &error));
  arguments.batch = batch;
  arguments.state = state;
  arguments.io = io;
  arguments.io_count = sizeof io / sizeof io[0];
  arguments.workspace = workspace;
  arguments.workspace_bytes = bytes;
  check(lla_layer_forward(layer, &arguments, &error));
  check(lla_state_commit(state, batch, index_of(&accepted), NULL, &error));
  free(memory), free(workspace);
}

/* The exported bytes of a slot. */
static char *image_of(int64_t slot, size_t *bytes) {
  char *image;
  check(lla_state_export_size(state, slot, bytes, &error));
  if (!(image = (char *)malloc(*bytes))) exit(1);
  check(lla_state_pack(state, slot, image, *bytes, NULL, &error));
  return image;
}

static int same(int64_t a, int64_t b) {
  size_t bytes_a, bytes_b;
  char *image_a = image_of(a, &bytes_a), *image_b = image_of(b, &bytes_b);
  const int equal = bytes_a == bytes_b && !memcmp(image_a, image_b, bytes_a);
  free(image_a);
  free(image_b);
  return equal;
}

static void save_and_load(void) {
  const char *name = "lla_saved_slot.bin";
  const char tag[LLA_TAG_SIZE] = "example model, example prompt";
  size_t bytes, read;
  char *image = image_of(kPrompt, &bytes);
  FILE *file = fopen(name, "wb");
  check(lla_state_seal(image, bytes, tag, &error));
  if (!file || fwrite(image, 1, bytes, file) != bytes || fclose(file)) exit(1);
  memset(image, 0, bytes);
  if (!(file = fopen(name, "rb"))) exit(1);
  read = fread(image, 1, bytes, file);
  fclose(file);
  remove(name);
  check(lla_state_check(image, read, tag, NULL, &error)); /* bytes from outside: never unpack them unchecked */
  check(lla_state_unpack(state, kLoaded, image, read, NULL, &error));
  image[bytes / 2] ^= 1;
  require(lla_state_check(image, read, tag, NULL, NULL) == LLA_DATA_CORRUPT, "a damaged image is refused");
  free(image);
}

int main(void) {
  lla_layer_desc description = LLA_LAYER_DESC_INIT;
  lla_state_desc slots = LLA_STATE_DESC_INIT;
  const int64_t from = kPrompt, to = kFork;
  int64_t i;
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = LLA_BACKEND_CPU; /* the tensors below are host memory */
  check(lla_context_create(&options, &context, &error));
  description.kind = LLA_LAYER_MIXER;
  description.mixer = LLA_SCALAR_GATE;
  description.heads = HEADS;
  description.key_dim = description.value_dim = DIM;
  check(lla_layer_create(context, &description, &layer, &error));
  slots.slots = SLOTS;
  check(lla_state_create(&layer, 1, &slots, NULL, 0, &state, &error));

  append(kPrompt, PROMPT, PROMPT);
  save_and_load();
  require(same(kPrompt, kLoaded), "a slot that was saved and loaded is the same");
  check(lla_state_fork(state, index_of(&from), index_of(&to), 1, NULL, &error));
  require(same(kPrompt, kFork), "a fork is the same");

  append(kFork, DRAFT, ACCEPTED); /* three of five drafted tokens are wrong */
  append(kPlain, PROMPT, PROMPT);
  for (i = 0; i < ACCEPTED; ++i) append(kPlain, 1, 1);
  require(same(kFork, kPlain), "two accepted of five drafted = two decoded one by one");
  require(!same(kPrompt, kFork), "the slot that was forked from has not moved");

  check(lla_state_truncate(state, kFork, PROMPT, NULL, &error));
  require(same(kPrompt, kFork), "rolled back, the fork is the same as its origin");
  require(lla_state_truncate(state, kFork, 127, NULL, NULL) == LLA_ROLLBACK_LIMIT, "behind the chunk that began at 128: refused");

  lla_state_release(state);
  lla_layer_release(layer);
  lla_context_release(context);
  return 0;
}
