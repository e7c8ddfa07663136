// SPDX-License-Identifier: Apache-2.0
// Walks over the raw rows that a slot holds in one layer: the same order for copies, exports and imports.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/state.h"

namespace lla {

// `count` rows of a ring from index `first` on, in one or two runs: visit(index, rows).
template <class Visit>
void visit_ring(int64_t capacity, int64_t first, int64_t count, Visit visit) {
  const int64_t before_wrap = std::min(count, capacity - first);
  if (before_wrap > 0) visit(first, before_wrap);
  if (count > before_wrap) visit(int64_t{0}, count - before_wrap);
}

// Calls visit(pool, offset in the block, dtype, elements) for every run of the rows that `image` holds: k by group, v, gate
// and write by head, convolution inputs by channel, each from the oldest row to the newest.
template <class Visit>
void visit_rows(const StatePlan& plan, const SlotMemory& memory, const SlotImage& image, Visit visit) {
  if (memory.tails.base) {
    const TailLayout& layout = memory.tail_layout;
    const int64_t chunk = plan.chunk_start(image.position), from = std::max(chunk, image.start);
    const int64_t count = std::max<int64_t>(0, image.position - from);
    const int64_t first = (image.tail_origin + from - chunk) % layout.capacity;
    for (int64_t g = 0; g < layout.groups; ++g) {
      visit_ring(layout.capacity, first, count, [&](int64_t ring, int64_t rows) {
        visit(memory.tails, layout.k_offset(g, ring), layout.dtype, rows * layout.key_dim);
      });
    }
    for (int64_t h = 0; h < layout.heads; ++h) {
      visit_ring(layout.capacity, first, count, [&](int64_t ring, int64_t rows) {
        visit(memory.tails, layout.v_offset(h, ring), layout.dtype, rows * layout.value_dim);
      });
    }
    for (int64_t h = 0; h < 2 * layout.heads; ++h) {  // the write strengths follow the gates
      visit_ring(layout.capacity, first, count, [&](int64_t ring, int64_t rows) {
        visit(memory.tails, layout.gate_offset(h, ring), layout.gate_dtype(), rows);
      });
    }
  }
  if (memory.convs.base) {
    const ConvLayout& layout = memory.conv_layout;
    const int64_t first = (image.conv_origin + layout.capacity - image.conv_rows) % layout.capacity;
    for (int64_t c = 0; c < layout.channels; ++c) {
      visit_ring(layout.capacity, first, image.conv_rows,
                 [&](int64_t ring, int64_t rows) { visit(memory.convs, layout.offset(c, ring), layout.dtype, rows); });
    }
  }
}

}  // namespace lla
