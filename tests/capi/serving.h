/* SPDX-License-Identifier: Apache-2.0 */
/* The group of layers that the tests of serving share, and how they keep and compare outputs. */
#ifndef LLA_SERVING_H
#define LLA_SERVING_H

#include "rig.h"

#define LONGEST 8192

static inline void open_group(rig *r, int64_t slots, int64_t node_blocks, int64_t max_sequences, int64_t max_rows,
                              int64_t max_snapshots) {
  lla_layer_desc layers[4];
  lla_state_desc state = LLA_STATE_DESC_INIT;
  const int64_t levels = lla_levels_needed(LONGEST);
  layers[0] = mixer_desc(LLA_SCALAR_GATE, 3, 1, 12, 20, levels);
  layers[1] = mixer_desc(LLA_DELTA_RULE, 2, 2, 16, 16, levels);
  layers[2] = mixer_desc(LLA_DELTA_RULE, 2, 1, 16, 8, 0);
  layers[3] = cell_desc(2, 2, 8, 16, levels);
  state.slots = slots;
  state.max_length = LONGEST;
  state.node_blocks = node_blocks;
  rig_open(r, NULL, layers, 4, &state, max_sequences, max_rows, max_snapshots);
}

static inline size_t output_bytes(const rig *r, int64_t layer) { return (size_t)rig_output_width(r, layer) * sizeof(float); }

static inline void check_zero_row(const rig *r, int64_t row) {
  static const float zero[256];
  int64_t layer;
  for (layer = 0; layer < r->layer_count; ++layer)
    check_equal_bytes(rig_output(r, layer, row), zero, output_bytes(r, layer), "row of zeros");
}

static inline void copy_slot(rig *r, int64_t from, int64_t to) {
  OK(lla_state_fork(r->state, index64(&from), index64(&to), 1, NULL, &error));
}

/* Outputs of all layers for rows first ... first + count - 1, one after the other; the caller frees them. */
static inline char *keep_outputs(const rig *r, int64_t first, int64_t count, size_t *bytes) {
  int64_t layer, row;
  size_t at = 0, width = 0;
  char *kept;
  for (layer = 0; layer < r->layer_count; ++layer) width += output_bytes(r, layer);
  *bytes = width * (size_t)count;
  kept = (char *)take(*bytes);
  for (row = first; row < first + count; ++row) {
    for (layer = 0; layer < r->layer_count; ++layer) {
      memcpy(kept + at, rig_output(r, layer, row), output_bytes(r, layer));
      at += output_bytes(r, layer);
    }
  }
  return kept;
}

static inline void check_outputs(const rig *r, int64_t first, int64_t count, const char *expected, const char *what) {
  size_t bytes;
  char *now = keep_outputs(r, first, count, &bytes);
  check_equal_bytes(now, expected, bytes, what);
  free(now);
}

#endif
