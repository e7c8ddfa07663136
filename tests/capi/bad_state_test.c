/* SPDX-License-Identifier: Apache-2.0 */
/* States: descriptions, memory, slots, parts, images and layer descriptions that are refused, by name, with nothing changed.
 */
#include <math.h>

#include "bad_input.h"

/* Probes I7, S13. */
static void layer_descriptions(void **unused) {
  lla_context *context = NULL;
  const lla_layer_desc mixer = victim_mixer(), cell = cell_desc(2, 2, 8, 8, 8), block = mamba2_desc(2, 1, 8, 8, 12, 8);
  lla_layer_desc d;
  lla_layer *layer = NULL;
  (void)unused;
  OK(lla_context_create(NULL, &context, &error));
#define BAD(base, field, value, status)                                 \
  d = base;                                                             \
  d.field = (value);                                                    \
  FAILS(status, #field, lla_layer_create(context, &d, &layer, &error)); \
  FAILS(status, #field, lla_layer_supported(context, &d, &error))
  BAD(mixer, kind, 0, LLA_INVALID_ARGUMENT);
  BAD(mixer, kind, 10, LLA_INVALID_ARGUMENT);
  BAD(mixer, kind, -1, LLA_INVALID_ARGUMENT);
  BAD(mixer, mixer, 0, LLA_INVALID_ARGUMENT);
  BAD(mixer, mixer, 3, LLA_INVALID_ARGUMENT);
  BAD(mixer, heads, 0, LLA_INVALID_ARGUMENT);
  BAD(mixer, heads, -4, LLA_INVALID_ARGUMENT);
  BAD(mixer, groups, 3, LLA_INVALID_ARGUMENT);
  BAD(mixer, groups, -1, LLA_INVALID_ARGUMENT);
  BAD(mixer, groups, 8, LLA_INVALID_ARGUMENT);
  BAD(mixer, key_dim, 0, LLA_INVALID_ARGUMENT);
  BAD(mixer, value_dim, -1, LLA_INVALID_ARGUMENT);
  BAD(mixer, hidden, 4, LLA_INVALID_ARGUMENT);
  BAD(mixer, outputs, 4, LLA_INVALID_ARGUMENT);
  BAD(mixer, grain, 48, LLA_INVALID_ARGUMENT);
  BAD(mixer, grain, 8192, LLA_INVALID_ARGUMENT);
  BAD(mixer, grain, -64, LLA_INVALID_ARGUMENT);
  BAD(mixer, levels, 0, LLA_INVALID_ARGUMENT);
  BAD(mixer, levels, 63, LLA_INVALID_ARGUMENT);
  BAD(mixer, levels, -1, LLA_INVALID_ARGUMENT);
  BAD(mixer, lambda_form, 5, LLA_INVALID_ARGUMENT);
  BAD(mixer, lambda_form, LLA_LAMBDA_SOFTPLUS, LLA_INVALID_ARGUMENT);
  BAD(mixer, level_overflow, 2, LLA_INVALID_ARGUMENT);
  BAD(mixer, gate_form, LLA_GATE_SOFTPLUS, LLA_INVALID_ARGUMENT);
  BAD(mixer, write_form, LLA_WRITE_SIGMOID, LLA_INVALID_ARGUMENT);
  BAD(mixer, head_map, 2, LLA_INVALID_ARGUMENT);
  BAD(mixer, conv_width, 4, LLA_INVALID_ARGUMENT);
  BAD(mixer, reserved, 1, LLA_INVALID_ARGUMENT);
  BAD(cell, qk_norm, 2, LLA_INVALID_ARGUMENT);
  BAD(cell, gate_form, 2, LLA_INVALID_ARGUMENT);
  BAD(cell, write_form, 5, LLA_INVALID_ARGUMENT);
  BAD(cell, qk_norm_epsilon, -1e-6, LLA_INVALID_ARGUMENT);
  BAD(cell, dt_min, -0.1, LLA_INVALID_ARGUMENT);
  BAD(cell, conv_width, -1, LLA_INVALID_ARGUMENT);
  BAD(cell, conv_activation, 2, LLA_INVALID_ARGUMENT);
  BAD(cell, norm_form, 3, LLA_INVALID_ARGUMENT);
  BAD(cell, norm_group, 5, LLA_INVALID_ARGUMENT);
  BAD(cell, norm_epsilon, -1, LLA_INVALID_ARGUMENT);
  BAD(cell, inner_dtype, 42, LLA_INVALID_ARGUMENT);
  BAD(block, hidden, 0, LLA_INVALID_ARGUMENT);
  BAD(block, scale, 0.5, LLA_INVALID_ARGUMENT);
  BAD(block, mixer, LLA_DELTA_RULE, LLA_INVALID_ARGUMENT);
  CHECK(layer == NULL);
  d = mixer;
  d.heads = d.groups = d.key_dim = d.value_dim = (int64_t)1 << 40;
  FAILS(LLA_SIZE_OVERFLOW, "", lla_layer_create(context, &d, &layer, &error));
  d = mixer;
  d.scale = NAN;
  FAILS(LLA_INVALID_ARGUMENT, "scale", lla_layer_create(context, &d, &layer, &error));
  CHECK(layer == NULL);
  lla_context_release(context);
}

static void state_descriptions(void **unused) {
  const lla_layer_desc desc = victim_mixer();
  lla_layer_desc part = LLA_LAYER_DESC_INIT, coarse = desc;
  const lla_state_desc good = LLA_STATE_DESC_INIT;
  lla_state_desc d;
  victim v;
  lla_layer *layer, *none = NULL, *group[2];
  lla_state *state = NULL;
  lla_block_geometry geometry = LLA_BLOCK_GEOMETRY_INIT;
  (void)unused;
  victim_open(&v, &desc);
  layer = v.r.layer[0].layer;
#define BAD_STATE(field, value, status)                                            \
  d = good;                                                                        \
  d.field = (value);                                                               \
  FAILS(status, #field, lla_state_create(&layer, 1, &d, NULL, 0, &state, &error)); \
  FAILS(status, #field, lla_state_geometry(&layer, 1, &d, 0, LLA_BLOCK_NODE, &geometry, &error))
  BAD_STATE(kind, 2, LLA_INVALID_ARGUMENT);
  BAD_STATE(kind, -1, LLA_INVALID_ARGUMENT);
  BAD_STATE(node_dtype, LLA_F16, LLA_DTYPE_MISMATCH);
  BAD_STATE(node_dtype, LLA_F64, LLA_DTYPE_MISMATCH);
  BAD_STATE(node_dtype, 77, LLA_DTYPE_MISMATCH);
  BAD_STATE(tail_dtype, LLA_I32, LLA_DTYPE_MISMATCH);
  BAD_STATE(tail_dtype, LLA_F64, LLA_DTYPE_MISMATCH);
  BAD_STATE(reserved, 1, LLA_INVALID_ARGUMENT);
  BAD_STATE(slots, -1, LLA_INVALID_ARGUMENT);
  BAD_STATE(slots, INT64_MAX, LLA_INVALID_ARGUMENT);
  BAD_STATE(max_length, -1, LLA_INVALID_ARGUMENT);
  BAD_STATE(max_length, 129, LLA_LEVELS_EXCEEDED);
  BAD_STATE(max_draft, -1, LLA_INVALID_ARGUMENT);
  BAD_STATE(max_draft, INT64_MAX, LLA_INVALID_ARGUMENT);
  BAD_STATE(node_blocks, -1, LLA_INVALID_ARGUMENT);
  BAD_STATE(node_blocks, INT64_MAX, LLA_INVALID_ARGUMENT);
  FAILS(LLA_INVALID_ARGUMENT, "layer_count", lla_state_create(&layer, 0, NULL, NULL, 0, &state, &error));
  FAILS(LLA_INVALID_ARGUMENT, "layer_count", lla_state_create(&layer, -1, NULL, NULL, 0, &state, &error));
  FAILS(LLA_INVALID_ARGUMENT, "layer_count", lla_state_create(&layer, 65537, NULL, NULL, 0, &state, &error));
  FAILS(LLA_INVALID_ARGUMENT, "layer_count", lla_state_geometry(&layer, 0, NULL, 0, 0, &geometry, &error));
  FAILS(LLA_INVALID_ARGUMENT, "layer_index", lla_state_geometry(&layer, 1, NULL, 1, 0, &geometry, &error));
  FAILS(LLA_INVALID_ARGUMENT, "layer_index", lla_state_geometry(&layer, 1, NULL, -1, 0, &geometry, &error));
  FAILS(LLA_INVALID_ARGUMENT, "kind", lla_state_geometry(&layer, 1, NULL, 0, 3, &geometry, &error));
  FAILS(LLA_INVALID_ARGUMENT, "kind", lla_state_geometry(&layer, 1, NULL, 0, -1, &geometry, &error));
  FAILS(LLA_INVALID_ARGUMENT, "memory", lla_state_create(&layer, 1, NULL, NULL, -1, &state, &error));
  CHECK(geometry.bytes == 0 && state == NULL);
  /* Layers that do not belong into one group. */
  part.kind = LLA_LAYER_L2_NORM;
  part.heads = 2;
  part.key_dim = 8;
  OK(lla_layer_create(v.r.context, &part, &none, &error));
  group[0] = layer;
  group[1] = none;
  FAILS(LLA_INVALID_ARGUMENT, "layers[1]", lla_state_create(group, 2, NULL, NULL, 0, &state, &error));
  lla_layer_release(none);
  coarse.grain = 32;
  OK(lla_layer_create(v.r.context, &coarse, &none, &error));
  group[1] = none;
  FAILS(LLA_STATE_INCOMPATIBLE, "layers[1]", lla_state_create(group, 2, NULL, NULL, 0, &state, &error));
  lla_layer_release(none);
  CHECK(state == NULL);
  victim_close(&v);
}

/* Memory of the caller: what does not fit is refused; what fits is used, and the padding between blocks is not touched. */
static void block_memory(void **unused) {
  const lla_layer_desc desc = cell_desc(2, 2, 8, 8, 8);
  lla_state_desc state_desc = LLA_STATE_DESC_INIT;
  lla_block_geometry geometry[3];
  lla_block_memory memory[3], bad[4];
  lla_state *state = NULL;
  char *base[3];
  rig r, plain;
  int k;
  (void)unused;
  state_desc.slots = 3;
  state_desc.max_length = 128;
  rig_open(&r, NULL, &desc, 1, NULL, 1, 100, 0);
  for (k = 0; k < 3; ++k) {
    const lla_block_geometry init = LLA_BLOCK_GEOMETRY_INIT;
    geometry[k] = init;
    OK(lla_state_geometry(&r.layer[0].layer, 1, &state_desc, 0, k, &geometry[k], &error));
    CHECK(geometry[k].bytes > 0 && geometry[k].count > 0 && geometry[k].alignment >= 1 && geometry[k].alignment <= 64);
    CHECK(k == LLA_BLOCK_NODE ? geometry[k].head_bytes > 0 : geometry[k].head_bytes == 0);
    memory[k].layer_index = 0;
    memory[k].kind = k;
    memory[k].reserved = 0;
    memory[k].stride = (geometry[k].bytes + geometry[k].alignment - 1) / geometry[k].alignment * geometry[k].alignment +
                       2 * geometry[k].alignment;
    base[k] = (char *)take((size_t)(memory[k].stride * geometry[k].count));
    memset(base[k], 0xee, (size_t)(memory[k].stride * geometry[k].count));
    memory[k].base = base[k];
  }
#define REFUSED(status, word, count) \
  FAILS(status, word, lla_state_create(&r.layer[0].layer, 1, &state_desc, bad, count, &state, &error))
  memcpy(bad, memory, sizeof memory);
  REFUSED(LLA_MISSING_ROLE, "memory", 2);
  bad[1].base = base[1] + 8;
  REFUSED(LLA_MISALIGNED, "memory[1].base", 3);
  memcpy(bad, memory, sizeof memory);
  bad[2].stride += 8;
  REFUSED(LLA_MISALIGNED, "memory[2].stride", 3);
  memcpy(bad, memory, sizeof memory);
  bad[0].stride = 0;
  REFUSED(LLA_INVALID_ARGUMENT, "memory[0].stride", 3);
  bad[0].stride = -64;
  REFUSED(LLA_INVALID_ARGUMENT, "memory[0].stride", 3);
  bad[0].stride = INT64_MAX / 64 * 64;
  REFUSED(LLA_SIZE_OVERFLOW, "memory[0].stride", 3);
  memcpy(bad, memory, sizeof memory);
  bad[0].layer_index = 1;
  REFUSED(LLA_INVALID_ARGUMENT, "memory[0].layer_index", 3);
  memcpy(bad, memory, sizeof memory);
  bad[0].kind = 3;
  REFUSED(LLA_INVALID_ARGUMENT, "memory[0].kind", 3);
  memcpy(bad, memory, sizeof memory);
  bad[3] = bad[0];
  REFUSED(LLA_INVALID_ARGUMENT, "memory[3]", 4);
  bad[0].reserved = 1;
  REFUSED(LLA_INVALID_ARGUMENT, "memory[0].reserved", 3);
  CHECK(state == NULL);

  OK(lla_state_create(&r.layer[0].layer, 1, &state_desc, memory, 3, &r.state, &error));
  rig_open(&plain, NULL, &desc, 1, &state_desc, 1, 100, 0);
  for (k = 0; k < 3; ++k) {
    rig_append(&r, k, 5, 100 - k);
    rig_append(&plain, k, 5, 100 - k);
    rig_check_same_slot(&r, k, &plain, k, "slot in memory of the caller");
  }
  for (k = 0; k < 3; ++k) {
    int64_t block, i;
    for (block = 0; block < geometry[k].count; ++block) {
      for (i = geometry[k].bytes; i < memory[k].stride; ++i)
        CHECK((unsigned char)base[k][block * memory[k].stride + i] == 0xee);
    }
  }
  rig_close(&plain);
  rig_close(&r);
  for (k = 0; k < 3; ++k) free(base[k]);
}

static void slots(void **unused) {
  const lla_layer_desc desc = victim_mixer();
  static const int64_t numbers[4] = {-1, -2, VICTIM_SLOTS, INT64_MAX};
  const int64_t zero = 0, bad_positions[2] = {0, -1}, far[1] = {129};
  int64_t pair[2] = {0, 1}, twice[2] = {2, 2};
  int64_t value = 4242;
  size_t bytes = 4242;
  char buffer[64];
  victim v;
  lla_state *s;
  lla_tensor tensor;
  int i;
  (void)unused;
  victim_open(&v, &desc);
  s = v.r.state;
  tensor = lla_tensor_of(buffer, LLA_F32, 6, 2, 8, -1);
  for (i = 0; i < 4; ++i) {
    const int64_t slot = numbers[i];
    FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_length(s, slot, &value, &error));
    FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_min_length(s, slot, &value, &error));
    FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_truncate(s, slot, 0, NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_query(s, LLA_STATE_SLOT_NODES, slot, &value, &error));
    FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_query(s, LLA_STATE_SLOT_BYTES, slot, &value, &error));
    FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_read(s, slot, 0, LLA_PART_TAIL_K, 0, &tensor, NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_write(s, slot, 0, LLA_PART_TAIL_K, 0, &tensor, NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_import_linear(s, slot, 0, 0, &tensor, 1, NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_export_size(s, slot, &bytes, &error));
    FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_pack(s, slot, buffer, sizeof buffer, NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "slot", lla_state_unpack(s, slot, buffer, sizeof buffer, NULL, &error));
    if (slot != -1) FAILS(LLA_INVALID_ARGUMENT, "slots[0]", lla_state_reset(s, index64(&slot), 1, no_index(), NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "sources[0]", lla_state_fork(s, index64(&slot), index64(&zero), 1, NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "targets[0]", lla_state_fork(s, index64(&zero), index64(&slot), 1, NULL, &error));
  }
  for (i = 0; i < 3; ++i) {
    static const int64_t layers[3] = {-1, 1, INT64_MIN};
    FAILS(LLA_INVALID_ARGUMENT, "layer_index", lla_state_read(s, 0, layers[i], LLA_PART_TAIL_K, 0, &tensor, NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "layer_index", lla_state_write(s, 0, layers[i], LLA_PART_TAIL_K, 0, &tensor, NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "layer_index", lla_state_import_linear(s, 0, layers[i], 0, &tensor, 1, NULL, &error));
  }
  FAILS(LLA_INVALID_ARGUMENT, "key", lla_state_query(s, 0, 0, &value, &error));
  FAILS(LLA_INVALID_ARGUMENT, "key", lla_state_query(s, 11, 0, &value, &error));
  OK(lla_state_reset(s, index64(numbers), 1, no_index(), NULL, &error)); /* -1 is skipped */
  FAILS(LLA_INVALID_ARGUMENT, "count", lla_state_reset(s, index64(pair), -1, no_index(), NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "positions[1]", lla_state_reset(s, index64(pair), 2, index64(bad_positions), NULL, &error));
  FAILS(LLA_LEVELS_EXCEEDED, "positions[0]", lla_state_reset(s, index64(pair), 1, index64(far), NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "count", lla_state_fork(s, index64(pair), index64(pair), -1, NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "targets[1]", lla_state_fork(s, index64(pair), index64(twice), 2, NULL, &error));
  {
    lla_index index = index64(pair);
    index.dtype = LLA_F32;
    FAILS(LLA_DTYPE_MISMATCH, "slots", lla_state_reset(s, index, 1, no_index(), NULL, &error));
    FAILS(LLA_DTYPE_MISMATCH, "positions", lla_state_reset(s, index64(twice), 1, index, NULL, &error));
    FAILS(LLA_DTYPE_MISMATCH, "sources", lla_state_fork(s, index, index64(twice), 1, NULL, &error));
    FAILS(LLA_DTYPE_MISMATCH, "targets", lla_state_fork(s, index64(pair), index, 1, NULL, &error));
    index = index64(pair);
    index.location = LLA_DEVICE;
    FAILS(LLA_INVALID_ARGUMENT, "slots", lla_state_reset(s, index, 1, no_index(), NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "targets", lla_state_fork(s, index64(pair), index, 1, NULL, &error));
  }
  CHECK(value == 4242 && bytes == 4242);
  victim_close(&v);
}

static void parts(void **unused) {
  const lla_layer_desc desc = victim_mixer(); /* H 4, G 2, dk 8, dv 12; slot 0 at 70: node 0 and 6 tail rows */
  static const lla_state_part wrong[6] = {0, 9, -1, LLA_PART_CONV, LLA_PART_ABSORBED, LLA_PART_NODE_DECAY};
  victim v;
  lla_tensor k, node;
  float *data;
  lla_state *s;
  int i;
  (void)unused;
  victim_open(&v, &desc);
  s = v.r.state;
  data = (float *)take(4096 * sizeof(float));
  k = lla_tensor_of(data, LLA_F32, 6, 2, 8, -1);
  node = lla_tensor_of(data, LLA_F32, 4, 8, 12, -1);
  OK(lla_state_read(s, 0, 0, LLA_PART_TAIL_K, 0, &k, NULL, &error));
  OK(lla_state_write(s, 0, 0, LLA_PART_TAIL_K, 0, &k, NULL, &error));
  OK(lla_state_read(s, 0, 0, LLA_PART_NODE, 0, &node, NULL, &error));
  OK(lla_state_write(s, 0, 0, LLA_PART_NODE, 0, &node, NULL, &error));
  victim_check(&v); /* what was read, written back */
  for (i = 0; i < 5; ++i) {
    FAILS(LLA_INVALID_ARGUMENT, "part", lla_state_read(s, 0, 0, wrong[i], 0, &node, NULL, &error));
    FAILS(LLA_INVALID_ARGUMENT, "part", lla_state_write(s, 0, 0, wrong[i], 0, &node, NULL, &error));
  }
  FAILS(LLA_INVALID_ARGUMENT, "index", lla_state_read(s, 0, 0, LLA_PART_NODE, -1, &node, NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "index", lla_state_read(s, 0, 0, LLA_PART_NODE, 62, &node, NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "index", lla_state_read(s, 0, 0, LLA_PART_TAIL_K, 1, &k, NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "index", lla_state_write(s, 1, 0, LLA_PART_NODE, 0, &node, NULL, &error)); /* no such node */
  OK(lla_state_read(s, 1, 0, LLA_PART_NODE, 0, &node, NULL, &error));                                    /* reads as zero */
  for (i = 0; i < 4 * 8 * 12; ++i) CHECK(data[i] == 0.0f);
#define BAD_TENSOR(change, status)                                                           \
  do {                                                                                       \
    lla_tensor t = k;                                                                        \
    change;                                                                                  \
    FAILS(status, "tensor", lla_state_read(s, 0, 0, LLA_PART_TAIL_K, 0, &t, NULL, &error));  \
    FAILS(status, "tensor", lla_state_write(s, 0, 0, LLA_PART_TAIL_K, 0, &t, NULL, &error)); \
  } while (0)
  BAD_TENSOR(t.rank = 2, LLA_SHAPE_MISMATCH);
  BAD_TENSOR(t.rank = 0, LLA_SHAPE_MISMATCH);
  BAD_TENSOR(t.rank = 7, LLA_SHAPE_MISMATCH);
  BAD_TENSOR(t.dims[0] = 5, LLA_SHAPE_MISMATCH);
  BAD_TENSOR(t.dims[0] = 7, LLA_SHAPE_MISMATCH);
  BAD_TENSOR(t.dims[1] = INT64_MAX, LLA_SHAPE_MISMATCH);
  BAD_TENSOR(t.dims[2] = -1, LLA_SHAPE_MISMATCH);
  BAD_TENSOR(t.dtype = LLA_I32, LLA_DTYPE_MISMATCH);
  BAD_TENSOR(t.dtype = 0, LLA_DTYPE_MISMATCH);
  BAD_TENSOR(t.data = NULL, LLA_NULL_POINTER);
  BAD_TENSOR(t.data = (char *)t.data + 1, LLA_MISALIGNED);
  FAILS(LLA_UNSUPPORTED, "layer_index", lla_state_import_linear(s, 0, 0, 64, &node, 1, NULL, &error));
  free(data);
  victim_close(&v);
}

static void linear_imports(void **unused) {
  const lla_layer_desc desc = mixer_desc(LLA_SCALAR_GATE, 2, 1, 4, 4, 0);
  victim v;
  float data[32] = {0};
  lla_tensor matrix = lla_tensor_of(data, LLA_F32, 2, 4, 4, -1);
  (void)unused;
  victim_open(&v, &desc);
  FAILS(LLA_INVALID_ARGUMENT, "position", lla_state_import_linear(v.r.state, 0, 0, -1, &matrix, 1, NULL, &error));
  FAILS(LLA_LEVELS_EXCEEDED, "position", lla_state_import_linear(v.r.state, 0, 0, 129, &matrix, 1, NULL, &error));
  FAILS(LLA_POSITION_MISMATCH, "position", lla_state_import_linear(v.r.state, 0, 0, 69, &matrix, 0, NULL, &error));
  matrix.dims[2] = 5;
  FAILS(LLA_SHAPE_MISMATCH, "tensor", lla_state_import_linear(v.r.state, 0, 0, 64, &matrix, 1, NULL, &error));
  victim_close(&v);
}

static void images(void **unused) {
  const lla_layer_desc desc = victim_mixer(), wider = mixer_desc(LLA_DELTA_RULE, 4, 2, 8, 16, 8);
  victim v, w;
  unsigned char *image, *copy;
  size_t bytes, i;
  lla_image_info info;
  (void)unused;
  victim_open(&v, &desc);
  victim_open(&w, &wider);
  image = (unsigned char *)rig_pack(&v.r, 0, &bytes);
  copy = (unsigned char *)take(bytes + 16);
  FAILS(LLA_BUFFER_TOO_SMALL, "bytes", lla_state_pack(v.r.state, 0, copy, bytes - 1, NULL, &error));
  FAILS(LLA_BUFFER_TOO_SMALL, "bytes", lla_state_pack(v.r.state, 0, copy, 0, NULL, &error));
  for (i = 0; i < bytes + 16; ++i) CHECK(copy[i] == 0xa5);
  FAILS(LLA_INVALID_ARGUMENT, "stream", lla_state_pack(v.r.state, 0, copy, bytes, &v, &error));
  FAILS(LLA_DATA_CORRUPT, "buffer", lla_state_check(image, bytes, NULL, NULL, &error)); /* packed, not sealed */
  FAILS(LLA_DATA_CORRUPT, "buffer", lla_state_unpack(v.r.state, 0, copy, bytes, NULL, &error));
  FAILS(LLA_DATA_CORRUPT, "buffer", lla_state_seal(copy, bytes, NULL, &error));
  OK(lla_state_seal(image, bytes, NULL, &error));
  OK(lla_state_check(image, bytes, NULL, NULL, &error));
  memset(&info, 0x42, sizeof info);
  info.struct_size = sizeof info;
  /* Any byte that is wrong, any length that is short. */
  for (i = 0; i < bytes; ++i) {
    lla_status status;
    image[i] ^= 0x10;
    status = lla_state_check(image, bytes, NULL, &info, NULL);
    CHECK(status == LLA_DATA_CORRUPT || status == LLA_STATE_INCOMPATIBLE);
    image[i] ^= 0x10;
  }
  for (i = 0; i < bytes; i += i < 300 ? 1 : 97) {
    CHECK(lla_state_check(image, i, NULL, &info, NULL) == LLA_DATA_CORRUPT);
    CHECK(lla_state_unpack(v.r.state, 2, image, i, NULL, NULL) == LLA_DATA_CORRUPT);
  }
  CHECK(info.position != 70); /* not filled by a check that failed */
  /* Bytes of any alignment are read. */
  memcpy(copy + 1, image, bytes);
  OK(lla_state_check(copy + 1, bytes, NULL, &info, &error));
  CHECK(info.position == 70);
  OK(lla_state_unpack(v.r.state, 2, copy + 1, bytes, NULL, &error));
  rig_check_same_slot(&v.r, 2, &v.r, 0, "imported slot");
  rig_reset(&v.r, 2);
  /* A state of other layers. */
  FAILS(LLA_STATE_INCOMPATIBLE, "buffer", lla_state_unpack(w.r.state, 0, image, bytes, NULL, &error));
  FAILS(LLA_INVALID_ARGUMENT, "stream", lla_state_unpack(v.r.state, 0, image, bytes, &v, &error));
  /* A state that is too short, or has too few blocks. */
  {
    lla_state_desc state = LLA_STATE_DESC_INIT;
    lla_state *small = NULL;
    int64_t length = -1;
    state.max_length = 69;
    OK(lla_state_create(&v.r.layer[0].layer, 1, &state, NULL, 0, &small, &error));
    FAILS(LLA_LEVELS_EXCEEDED, "buffer", lla_state_unpack(small, 0, image, bytes, NULL, &error));
    OK(lla_state_length(small, 0, &length, &error));
    CHECK(length == 0);
    lla_state_release(small);
  }
  free(image);
  free(copy);
  victim_close(&w);
  victim_close(&v);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(layer_descriptions),
                                     cmocka_unit_test(state_descriptions),
                                     cmocka_unit_test(block_memory),
                                     cmocka_unit_test(slots),
                                     cmocka_unit_test(parts),
                                     cmocka_unit_test(linear_imports),
                                     cmocka_unit_test(images)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
