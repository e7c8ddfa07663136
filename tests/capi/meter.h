/* SPDX-License-Identifier: Apache-2.0 */
/* An allocator hook that counts, checks what comes back, and fails the allocation that the test names. */
#ifndef LLA_METER_H
#define LLA_METER_H

#include "testing.h"

typedef struct meter {
  int64_t count;       /* allocations so far */
  int64_t fail_at;     /* this one gets NULL; 0: none */
  int64_t outstanding; /* blocks that were not given back */
  size_t bytes;        /* of those */
} meter;

/* In front of each block stands what it was asked for, so that the release can be checked. */
typedef struct label {
  size_t bytes, alignment;
  char *start;
} label;

static inline void *metered_allocate(size_t bytes, size_t alignment, void *user) {
  meter *m = (meter *)user;
  char *start, *block;
  label note;
  CHECK(bytes > 0 && alignment > 0 && (alignment & (alignment - 1)) == 0);
  if (++m->count == m->fail_at) return NULL;
  start = (char *)malloc(bytes + 2 * alignment + sizeof(label));
  CHECK(start != NULL);
  block = (char *)(((uintptr_t)start + sizeof(label) + alignment - 1) / alignment * alignment);
  note.bytes = bytes;
  note.alignment = alignment;
  note.start = start;
  memcpy(block - sizeof note, &note, sizeof note);
  memset(block, 0xcd, bytes);
  ++m->outstanding;
  m->bytes += bytes;
  return block;
}

static inline void metered_release(void *memory, size_t bytes, size_t alignment, void *user) {
  meter *m = (meter *)user;
  label note;
  CHECK(memory != NULL);
  memcpy(&note, (char *)memory - sizeof note, sizeof note);
  CHECK(note.bytes == bytes && note.alignment == alignment);
  --m->outstanding;
  m->bytes -= bytes;
  free(note.start);
}

static inline lla_allocator allocator_of(meter *m) {
  lla_allocator allocator;
  memset(&allocator, 0, sizeof allocator);
  allocator.struct_size = sizeof allocator;
  allocator.allocate = metered_allocate;
  allocator.release = metered_release;
  allocator.user = m;
  return allocator;
}

#endif
