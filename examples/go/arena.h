/* SPDX-License-Identifier: Apache-2.0 */
/* C memory of a batch: everything that the library reads during a call, so that no Go pointer stands in it. */
#ifndef LLA_GO_ARENA_H
#define LLA_GO_ARENA_H

#include <lla/lla.h>
#include <stdlib.h>

enum { LLA_GO_BINDINGS = 48, LLA_GO_GROUPS = 4, LLA_GO_INDICES = 7 };

typedef struct lla_go_arena {
  lla_rows rows;
  lla_forward_args forward;
  lla_backward_args backward;
  lla_binding bindings[LLA_GO_GROUPS][LLA_GO_BINDINGS]; /* io, weights, outputs, gradients */
  int64_t *indices[LLA_GO_INDICES]; /* offsets, slots in and out, accepted, snapshots: sequence, row, slot */
} lla_go_arena;

static inline void *lla_go_allocate(size_t bytes, size_t alignment) {
  void *memory = NULL;
  if (alignment < sizeof(void *)) alignment = sizeof(void *);
  return posix_memalign(&memory, alignment, bytes ? bytes : 1) ? NULL : memory;
}

static inline lla_index lla_go_index(const int64_t *data) {
  const lla_index index = {data, LLA_I64, LLA_HOST};
  return index;
}

static inline lla_status lla_go_fork(lla_state *state, int64_t source, int64_t target, lla_error *error) {
  return lla_state_fork(state, lla_go_index(&source), lla_go_index(&target), 1, NULL, error);
}

static inline lla_status lla_go_reset(lla_state *state, int64_t slot, int64_t position, lla_error *error) {
  return lla_state_reset(state, lla_go_index(&slot), 1, lla_go_index(&position), NULL, error);
}

#endif
