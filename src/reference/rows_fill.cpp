// SPDX-License-Identifier: Apache-2.0
// Zeroes rows that belong to no live sequence and, if asked, copies live rows into another type.
#include "reference/common.h"
#include "reference/kernels.h"

namespace lla::reference {

int64_t RowsFillKernel::tasks(const void* problem, int32_t) {
  const RowsFill& p = *static_cast<const RowsFill*>(problem);
  return p.batch.slack_count + (p.copy ? row_blocks(p.batch) : 0);
}

void RowsFillKernel::run(const void* problem, const Limits&, const Scratch&, int32_t, int64_t task) {
  const RowsFill& p = *static_cast<const RowsFill*>(problem);
  if (task < p.batch.slack_count) {
    if (p.y.accumulate) return;  // adds zero
    const RowRange& range = p.batch.slack[task];
    for (int64_t row = range.begin; row < range.end; ++row) {
      const int64_t b = p.sequence_rows > 0 ? row / p.sequence_rows : 0;
      for (int64_t h = 0; h < p.heads; ++h) {
        for (int64_t i = 0; i < p.dim; ++i) store(p.y, b, row, h, i, 0);
      }
    }
    return;
  }
  const RowBlock block = row_block(p.batch, task - p.batch.slack_count);
  for (int64_t row = block.begin; row < block.end; ++row) {
    const int64_t b = block.sequence->index;
    for (int64_t h = 0; h < p.heads; ++h) {
      for (int64_t i = 0; i < p.dim; ++i) store(p.y, b, row, h, i, load(p.x, b, row, h, i));
    }
  }
}

}  // namespace lla::reference
