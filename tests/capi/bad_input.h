/* SPDX-License-Identifier: Apache-2.0 */
/* A small model for tests of refused calls: it remembers its outputs and slots, and proves at the end that no refused call
 * has touched them. */
#ifndef LLA_BAD_INPUT_H
#define LLA_BAD_INPUT_H

#include "rig.h"

typedef struct victim {
  rig r;
  lla_context *other_context;
  void *image[2];
  size_t image_bytes[2];
  int64_t free_blocks;
} victim;

#define VICTIM_ROWS 4
#define VICTIM_SLOTS 4

static inline void victim_remember(victim *v) {
  int64_t slot, io;
  for (slot = 0; slot < 2; ++slot) {
    free(v->image[slot]);
    v->image[slot] = rig_pack(&v->r, slot, &v->image_bytes[slot]);
  }
  v->free_blocks = rig_query(&v->r, LLA_STATE_FREE_NODE_BLOCKS, 0);
  io = v->r.layer[0].io_count - 1;
  memset(v->r.layer[0].io[io].tensor.data, 0x5a, (size_t)(v->r.max_rows * v->r.layer[0].width[io]) * sizeof(float));
}

/* Slot 0 stands at 70, slot 1 at 10, slots 2 and 3 are empty; inputs of VICTIM_ROWS rows for slot 0 are ready. */
static inline void victim_open(victim *v, const lla_layer_desc *desc) {
  lla_state_desc state = LLA_STATE_DESC_INIT;
  memset(v, 0, sizeof *v);
  state.slots = VICTIM_SLOTS;
  state.max_length = 128;
  rig_open(&v->r, NULL, desc, 1, &state, 3, 80, 2);
  OK(lla_context_create(NULL, &v->other_context, &error));
  rig_append(&v->r, 0, 1, 70);
  rig_append(&v->r, 1, 2, 10);
  rig_set_rows(&v->r, VICTIM_ROWS);
  rig_fill(&v->r, 0, 1, 70, VICTIM_ROWS);
  victim_remember(v);
}

static inline lla_layer_desc victim_mixer(void) { return mixer_desc(LLA_DELTA_RULE, 4, 2, 8, 12, 8); }

/* Plans VICTIM_ROWS rows on slot 0. */
static inline void victim_plan(victim *v) {
  static const int64_t slot = 0;
  lla_rows rows = LLA_ROWS_INIT;
  rows.sequences = 1;
  rows.rows_per_sequence = VICTIM_ROWS;
  rows.slot_in = index64(&slot);
  rig_plan(&v->r, &rows);
}

static inline void victim_check(victim *v) {
  int64_t slot, i;
  const int64_t io = v->r.layer[0].io_count - 1;
  const unsigned char *output = (const unsigned char *)v->r.layer[0].io[io].tensor.data;
  for (slot = 0; slot < 2; ++slot) {
    size_t bytes;
    void *image = rig_pack(&v->r, slot, &bytes);
    CHECK(bytes == v->image_bytes[slot]);
    check_equal_bytes(image, v->image[slot], bytes, "slot after a refused call");
    free(image);
  }
  CHECK(rig_length(&v->r, 2) == 0 && rig_length(&v->r, 3) == 0);
  for (i = 0; i < v->r.max_rows * v->r.layer[0].width[io] * (int64_t)sizeof(float); ++i) CHECK(output[i] == 0x5a);
}

static inline void victim_close(victim *v) {
  lla_batch_discard(v->r.batch);
  victim_check(v);
  CHECK(rig_query(&v->r, LLA_STATE_FREE_NODE_BLOCKS, 0) == v->free_blocks);
  free(v->image[0]);
  free(v->image[1]);
  lla_context_release(v->other_context);
  rig_close(&v->r);
}

#endif
