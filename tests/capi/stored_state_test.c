/* SPDX-License-Identifier: Apache-2.0 */
/* Files of exported states (tests/data/states) that an earlier build wrote, perhaps an earlier version on another machine:
 * they are read, say what they hold, come out again byte for byte, and go on as a fresh run of the same rows does.
 *
 *   capi_stored_state_test write FOLDER    writes the files that are not there. One that is there is never written again:
 *                                          a new case gets a new file, and so does a new format.
 */
#include <math.h>

#include "rig.h"
#include "testing.h"

#ifndef LLA_TEST_DATA
#define LLA_TEST_DATA "tests/data"
#endif

enum { kRows = 91, kMore = 60, kGrain = 16, kLongest = 256 }; /* 5 chunks: nodes 0 and 2; 11 rows of tail */

typedef struct stored {
  const char *name;
  lla_mixer mixer;
  int cell; /* with convolutions */
  int64_t levels;
  lla_level_overflow overflow;
  lla_dtype node_dtype;
  double tolerance;     /* of outputs that follow, relative to the largest; nodes of bf16 are rounded where they are made */
  lla_dtype tail_dtype; /* of 16 bits: q, k and v come in this type too; 0: fp32, or the reference's fp64 */
  lla_backend backend;
} stored;

static const stored cases[] = {
    {"scalar_linear_f32", LLA_SCALAR_GATE, 0, 0, 0, LLA_F32, 1e-5, 0, LLA_BACKEND_CPU},
    {"scalar_log_linear_f32", LLA_SCALAR_GATE, 0, 9, 0, LLA_F32, 1e-5, 0, LLA_BACKEND_CPU},
    {"scalar_log_linear_bf16", LLA_SCALAR_GATE, 0, 9, 0, LLA_BF16, 1e-2, 0, LLA_BACKEND_CPU},
    {"scalar_absorb_f32", LLA_SCALAR_GATE, 0, 6, LLA_LEVELS_ABSORB, LLA_F32, 1e-5, 0, LLA_BACKEND_CPU},
    {"delta_linear_f32", LLA_DELTA_RULE, 0, 0, 0, LLA_F32, 1e-5, 0, LLA_BACKEND_CPU},
    {"delta_log_linear_f32", LLA_DELTA_RULE, 0, 9, 0, LLA_F32, 1e-5, 0, LLA_BACKEND_CPU},
    {"delta_log_linear_bf16", LLA_DELTA_RULE, 0, 9, 0, LLA_BF16, 1e-2, 0, LLA_BACKEND_CPU},
    {"delta_cell_log_linear_f32", LLA_DELTA_RULE, 1, 9, 0, LLA_F32, 1e-5, 0, LLA_BACKEND_CPU},
    {"scalar_log_linear_tail_bf16", LLA_SCALAR_GATE, 0, 9, 0, LLA_F32, 1e-5, LLA_BF16, LLA_BACKEND_CPU},
    {"scalar_log_linear_tail_f16", LLA_SCALAR_GATE, 0, 9, 0, LLA_F32, 1e-5, LLA_F16, LLA_BACKEND_CPU},
    {"delta_log_linear_tail_bf16", LLA_DELTA_RULE, 0, 9, 0, LLA_BF16, 1e-2, LLA_BF16, LLA_BACKEND_CPU},
    {"delta_log_linear_tail_f16", LLA_DELTA_RULE, 0, 9, 0, LLA_F32, 1e-5, LLA_F16, LLA_BACKEND_CPU},
    {"delta_absorb_f32", LLA_DELTA_RULE, 0, 6, LLA_LEVELS_ABSORB, LLA_F32, 1e-5, 0, LLA_BACKEND_CPU},
    {"scalar_log_linear_f64", LLA_SCALAR_GATE, 0, 9, 0, LLA_F64, 1e-6, 0, LLA_BACKEND_REFERENCE},
    {"delta_log_linear_f64", LLA_DELTA_RULE, 0, 9, 0, LLA_F64, 1e-6, 0, LLA_BACKEND_REFERENCE},
    {"delta_linear_f64", LLA_DELTA_RULE, 0, 0, 0, LLA_F64, 1e-6, 0, LLA_BACKEND_REFERENCE},
};
enum { kCases = sizeof cases / sizeof cases[0] };

static void open_case(rig *r, const stored *c) {
  lla_layer_desc d = c->cell ? cell_desc(2, 1, 4, 3, c->levels) : mixer_desc(c->mixer, 2, 1, 4, 3, c->levels);
  lla_state_desc state = LLA_STATE_DESC_INIT;
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = c->backend;
  d.grain = kGrain;
  d.level_overflow = c->overflow;
  state.slots = 2;
  state.max_length = kLongest;
  state.node_dtype = c->node_dtype;
  state.tail_dtype = c->tail_dtype;
  rig_open(r, &options, &d, 1, &state, 1, kRows, 0);
}

/* Of numbers between 2^-14 and 2^15; smaller ones become 0. Digits that do not fit are cut off. */
static uint16_t narrow(float x, lla_dtype dtype) {
  uint32_t bits, sign, exponent;
  memcpy(&bits, &x, sizeof bits);
  if (dtype == LLA_BF16) return (uint16_t)(bits >> 16);
  sign = bits >> 31 << 15;
  exponent = bits >> 23 & 0xff;
  return (uint16_t)(exponent < 113 ? sign : sign | (exponent - 112) << 10 | (bits >> 13 & 0x3ff));
}

/* The next rows of slot 0; with a tail of 16 bits they come in its type. */
static void append(rig *r, const stored *c, uint64_t seed, int64_t count) {
  const int64_t slot = 0;
  lla_rows rows = LLA_ROWS_INIT;
  lla_forward_args a;
  lla_binding io[RIG_IO];
  void *made[RIG_IO] = {NULL};
  int64_t i, k;
  if (!c->tail_dtype) {
    rig_append(r, 0, seed, count);
    return;
  }
  rows.sequences = 1;
  rows.rows_per_sequence = count;
  rows.slot_in = index64(&slot);
  rig_set_rows(r, count);
  rig_fill(r, 0, seed, rig_length(r, 0), count);
  rig_plan(r, &rows);
  a = rig_forward_args(r, 0);
  for (i = 0; i < a.io_count; ++i) {
    const int64_t numbers = count * r->layer[0].width[i];
    io[i] = a.io[i];
    if (io[i].role != LLA_Q && io[i].role != LLA_K && io[i].role != LLA_V) continue;
    made[i] = take((size_t)numbers * sizeof(uint16_t));
    for (k = 0; k < numbers; ++k) ((uint16_t *)made[i])[k] = narrow(((const float *)io[i].tensor.data)[k], c->tail_dtype);
    io[i].tensor.data = made[i];
    io[i].tensor.dtype = c->tail_dtype;
  }
  a.io = io;
  OK(lla_layer_forward(r->layer[0].layer, &a, &error));
  rig_commit(r, NULL);
  for (i = 0; i < RIG_IO; ++i) free(made[i]);
}

static void make_tag(const stored *c, char tag[LLA_TAG_SIZE]) {
  memset(tag, 0, LLA_TAG_SIZE);
  snprintf(tag, LLA_TAG_SIZE, "lla stored state: %s", c->name);
}

static void path_of(const char *folder, const stored *c, char *path, size_t size) {
  CHECK(snprintf(path, size, "%s/%s.bin", folder, c->name) < (int)size);
}

static void write_files(const char *folder) {
  int i;
  for (i = 0; i < kCases; ++i) {
    char path[1024], tag[LLA_TAG_SIZE];
    size_t bytes;
    void *image;
    FILE *file;
    rig r;
    path_of(folder, &cases[i], path, sizeof path);
    file = fopen(path, "rb");
    if (file) { /* what is there stays */
      fclose(file);
      continue;
    }
    open_case(&r, &cases[i]);
    append(&r, &cases[i], (uint64_t)i, kRows);
    image = rig_pack(&r, 0, &bytes);
    make_tag(&cases[i], tag);
    OK(lla_state_seal(image, bytes, tag, &error));
    file = fopen(path, "wb");
    if (!file || fwrite(image, 1, bytes, file) != bytes || fclose(file) != 0) {
      perror(path);
      exit(1);
    }
    free(image);
    rig_close(&r);
  }
}

static void *read_whole(const stored *c, size_t *bytes) {
  char path[1024];
  void *data;
  long size;
  FILE *file;
  path_of(LLA_TEST_DATA "/states", c, path, sizeof path);
  file = fopen(path, "rb");
  if (!file) stop_test("%s cannot be opened", path);
  CHECK(fseek(file, 0, SEEK_END) == 0);
  size = ftell(file);
  CHECK(size > 0 && fseek(file, 0, SEEK_SET) == 0);
  data = take((size_t)size);
  CHECK(fread(data, 1, (size_t)size, file) == (size_t)size);
  fclose(file);
  *bytes = (size_t)size;
  return data;
}

static void close_to(const stored *c, const float *x, const float *expected, int64_t count, const char *what) {
  double largest = 0, worst = 0;
  int64_t i;
  for (i = 0; i < count; ++i) {
    const double distance = fabs((double)x[i] - (double)expected[i]);
    CHECK(isfinite(x[i]));
    if (fabs((double)expected[i]) > largest) largest = fabs((double)expected[i]);
    if (distance > worst) worst = distance;
  }
  if (!(largest > 0) || worst > c->tolerance * largest)
    stop_test("%s: %s: off by %g of %g, more than %g", c->name, what, worst, largest, c->tolerance);
}

/* A part of slot 0 of both, as floats. */
static void check_part(const stored *c, const rig *a, const rig *b, lla_state_part part, int64_t index, int64_t d0,
                       int64_t d1, int64_t d2, const char *what) {
  static float x[4096], y[4096];
  const lla_tensor tx = lla_tensor_of(x, LLA_F32, d0, d1, d2, -1), ty = lla_tensor_of(y, LLA_F32, d0, d1, d2, -1);
  const int64_t count = d0 * (d1 < 0 ? 1 : d1) * (d2 < 0 ? 1 : d2);
  CHECK(count <= 4096);
  OK(lla_state_read(a->state, 0, 0, part, index, &tx, NULL, &error));
  OK(lla_state_read(b->state, 0, 0, part, index, &ty, NULL, &error));
  close_to(c, x, y, count, what);
}

/* Probe H6. */
static void stored_states_are_read_and_go_on(void **unused) {
  int i;
  (void)unused;
  for (i = 0; i < kCases; ++i) {
    const stored *c = &cases[i];
    const uint64_t seed = (uint64_t)i;
    lla_image_info info = LLA_IMAGE_INFO_INIT;
    char tag[LLA_TAG_SIZE];
    size_t bytes, again;
    void *image = read_whole(c, &bytes), *out;
    int64_t width, row;
    rig r, fresh;
    make_tag(c, tag);
    OK(lla_state_check(image, bytes, tag, &info, &error));
    CHECK(info.bytes == (int64_t)bytes && info.position == kRows && info.layers == 1 && info.grain == kGrain &&
          info.format == 1);
    check_equal_bytes(info.tag, tag, sizeof tag, c->name);
    tag[LLA_TAG_SIZE - 1] ^= 1;
    FAILS(LLA_STATE_INCOMPATIBLE, "tag", lla_state_check(image, bytes, tag, NULL, &error));
    tag[LLA_TAG_SIZE - 1] ^= 1;
    open_case(&r, c);
    open_case(&fresh, c);
    OK(lla_state_unpack(r.state, 0, image, bytes, NULL, &error));
    CHECK(rig_length(&r, 0) == kRows);
    OK(lla_state_export_size(r.state, 0, &again, &error));
    CHECK(again == bytes);
    out = rig_pack(&r, 0, &again);
    OK(lla_state_seal(out, again, tag, &error));
    check_equal_bytes(out, image, bytes, c->name);
    free(out);
    /* What it holds is what the rows make. */
    append(&fresh, c, seed, kRows);
    if (c->levels && !c->overflow) {
      check_part(c, &r, &fresh, LLA_PART_NODE, 0, 2, 4, 3, "node 0");
      check_part(c, &r, &fresh, LLA_PART_NODE, 2, 2, 4, 3, "node 2");
      if (c->mixer == LLA_SCALAR_GATE) check_part(c, &r, &fresh, LLA_PART_NODE_DECAY, 2, 2, -1, -1, "decay of node 2");
    } else {
      check_part(c, &r, &fresh, LLA_PART_ABSORBED, 0, 2, 4, 3, "the one node");
    }
    check_part(c, &r, &fresh, LLA_PART_TAIL_K, 0, kRows % kGrain, 1, 4, "keys of the tail");
    check_part(c, &r, &fresh, LLA_PART_TAIL_V, 0, kRows % kGrain, 2, 3, "values of the tail");
    check_part(c, &r, &fresh, LLA_PART_TAIL_GATE, 0, kRows % kGrain, 2, -1, "gates of the tail");
    if (c->mixer == LLA_DELTA_RULE)
      check_part(c, &r, &fresh, LLA_PART_TAIL_WRITE, 0, kRows % kGrain, 2, -1, "write strengths of the tail");
    if (c->cell) check_part(c, &r, &fresh, LLA_PART_CONV, 0, 3, 2 * 4 + 2 * 3, -1, "inputs of the convolutions");
    /* And it goes on: one row, then over the next borders. */
    width = rig_output_width(&r, 0);
    append(&r, c, seed, 1);
    append(&fresh, c, seed, 1);
    close_to(c, rig_output(&r, 0, 0), rig_output(&fresh, 0, 0), width, "the next row");
    append(&r, c, seed, kMore);
    append(&fresh, c, seed, kMore);
    for (row = 0; row < kMore; ++row)
      close_to(c, rig_output(&r, 0, row), rig_output(&fresh, 0, row), width, "rows that follow");
    rig_close(&fresh);
    rig_close(&r);
    free(image);
  }
}

/* A stored file fits its own kind of state alone, and no piece of it passes for the whole. */
static void stored_states_are_told_apart(void **unused) {
  int i, k;
  (void)unused;
  for (i = 0; i < kCases; ++i) {
    size_t bytes, cut;
    char *image = (char *)read_whole(&cases[i], &bytes);
    rig same;
    for (k = 0; k < kCases; ++k) {
      rig r;
      if (k == i) continue;
      open_case(&r, &cases[k]);
      FAILS(LLA_STATE_INCOMPATIBLE, "buffer", lla_state_unpack(r.state, 1, image, bytes, NULL, &error));
      CHECK(rig_length(&r, 1) == 0);
      rig_close(&r);
    }
    open_case(&same, &cases[i]);
    for (cut = 0; cut < bytes; ++cut) {
      /* A block of its own for each length: a sanitizer sees a read behind it. */
      char *piece = (char *)malloc(cut ? cut : 1);
      memcpy(piece, image, cut);
      FAILS(LLA_DATA_CORRUPT, "buffer", lla_state_check(piece, cut, NULL, NULL, &error));
      FAILS(LLA_DATA_CORRUPT, "buffer", lla_state_unpack(same.state, 0, piece, cut, NULL, &error));
      CHECK(lla_state_seal(piece, cut, NULL, NULL) == (cut < 160 ? LLA_DATA_CORRUPT : LLA_BUFFER_TOO_SMALL));
      check_equal_bytes(piece, image, cut, "a piece that was not sealed");
      free(piece);
    }
    CHECK(rig_length(&same, 0) == 0);
    OK(lla_state_unpack(same.state, 0, image, bytes, NULL, &error));
    rig_close(&same);
    free(image);
  }
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(stored_states_are_read_and_go_on),
                                     cmocka_unit_test(stored_states_are_told_apart)};
  if (argc == 3 && !strcmp(argv[1], "write")) {
    write_files(argv[2]);
    return 0;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
