// SPDX-License-Identifier: Apache-2.0
// L2 norm over the last axis, times a scale, and its gradient (docs/mathematics.md).
#include "reference/common.h"
#include "reference/kernels.h"

namespace lla::reference {
namespace {

// 1 / the length of a head's row.
double inverse_length(const L2Norm& p, int64_t b, int64_t row, int64_t head) {
  double sum = 0;
  for (int64_t i = 0; i < p.dim; ++i) sum += load(p.x, b, row, head, i) * load(p.x, b, row, head, i);
  return 1 / std::sqrt(sum + p.epsilon);
}

}  // namespace

int64_t L2NormForwardKernel::tasks(const void* problem, int32_t) {
  return row_blocks(static_cast<const L2Norm*>(problem)->batch);
}

void L2NormForwardKernel::run(const void* problem, const Limits&, const Scratch&, int32_t, int64_t task) {
  const L2Norm& p = *static_cast<const L2Norm*>(problem);
  const RowBlock block = row_block(p.batch, task);
  for (int64_t row = block.begin; row < block.end; ++row) {
    const int64_t b = block.sequence->index;
    for (int64_t h = 0; h < p.heads; ++h) {
      const double r = inverse_length(p, b, row, h);
      for (int64_t i = 0; i < p.dim; ++i) store(p.y, b, row, h, i, p.scale * (load(p.x, b, row, h, i) * r));
    }
  }
}

int64_t L2NormBackwardKernel::tasks(const void* problem, int32_t) {
  return row_blocks(static_cast<const L2Norm*>(problem)->batch);
}

void L2NormBackwardKernel::run(const void* problem, const Limits&, const Scratch&, int32_t, int64_t task) {
  const L2Norm& p = *static_cast<const L2Norm*>(problem);
  if (!p.dx.present()) return;
  const RowBlock block = row_block(p.batch, task);
  for (int64_t row = block.begin; row < block.end; ++row) {
    const int64_t b = block.sequence->index;
    for (int64_t h = 0; h < p.heads; ++h) {
      const double r = inverse_length(p, b, row, h);
      double along = 0;  // unit row . dy
      for (int64_t i = 0; i < p.dim; ++i) along += load(p.x, b, row, h, i) * r * load(p.dy, b, row, h, i);
      for (int64_t i = 0; i < p.dim; ++i) {
        const double unit = load(p.x, b, row, h, i) * r;
        store(p.dx, b, row, h, i, p.scale * r * (load(p.dy, b, row, h, i) - unit * along));
      }
    }
  }
}

}  // namespace lla::reference
