// SPDX-License-Identifier: Apache-2.0
// Matrix product with a weight, y = x W^T + bias, and its gradients.
#include "reference/common.h"
#include "reference/kernels.h"

namespace lla::reference {
namespace {

constexpr int64_t kColumnsPerTask = 64;  // outputs of y or of dx

int64_t column_blocks(int64_t columns) { return (columns + kColumnsPerTask - 1) / kColumnsPerTask; }
int64_t column_end(int64_t begin, int64_t columns) {
  return begin + kColumnsPerTask < columns ? begin + kColumnsPerTask : columns;
}

void reverse_input(const Projection& p, double* dx, int64_t task) {
  const RowBlock block = row_block(p.batch, task / column_blocks(p.inputs));
  if (block.begin == block.end) return;
  const int64_t b = block.sequence->index, first = task % column_blocks(p.inputs) * kColumnsPerTask;
  const int64_t columns = column_end(first, p.inputs) - first;
  fill(dx, (block.end - block.begin) * columns, 0);
  for (int64_t o = 0; o < p.outputs; ++o) {
    double weight[kColumnsPerTask];
    for (int64_t i = 0; i < columns; ++i) weight[i] = load(p.weight, o, first + i);
    for (int64_t row = block.begin; row < block.end; ++row) {
      add_scaled(dx + (row - block.begin) * columns, load(p.dy, b, row, 0, o), weight, columns);
    }
  }
  for (int64_t row = block.begin; row < block.end; ++row) {
    for (int64_t i = 0; i < columns; ++i) store(p.dx, b, row, 0, first + i, dx[(row - block.begin) * columns + i]);
  }
}

void reverse_weight(const Projection& p, double* dweight, int64_t output) {
  fill(dweight, p.inputs, 0);
  double dbias = 0;
  for (int64_t s = 0; s < p.batch.count; ++s) {
    const Sequence& sequence = p.batch.sequences[s];
    for (int64_t t = 0; !sequence.padding && t < sequence.rows; ++t) {
      const int64_t row = sequence.row_begin + t;
      const double dy = load(p.dy, sequence.index, row, 0, output);
      dbias += dy;
      for (int64_t i = 0; p.dweight.present() && i < p.inputs; ++i) dweight[i] += dy * load(p.x, sequence.index, row, 0, i);
    }
  }
  for (int64_t i = 0; p.dweight.present() && i < p.inputs; ++i) store(p.dweight, output, i, dweight[i]);
  if (p.dbias.present()) store(p.dbias, 0, output, dbias);
}

}  // namespace

void ProjectionForwardKernel::measure(const void* problem, const Limits&, Need* need) {
  const Projection& p = *static_cast<const Projection*>(problem);
  Carver carver;
  carver.take(Size(kRowsPerTask) * p.inputs);
  carver.take(p.inputs);
  *need = need_per_thread(carver.bytes());
}

int64_t ProjectionForwardKernel::tasks(const void* problem, int32_t) {
  const Projection& p = *static_cast<const Projection*>(problem);
  return row_blocks(p.batch) * column_blocks(p.outputs);
}

void ProjectionForwardKernel::run(const void* problem, const Limits&, const Scratch& scratch, int32_t, int64_t task) {
  const Projection& p = *static_cast<const Projection*>(problem);
  const RowBlock block = row_block(p.batch, task / column_blocks(p.outputs));
  if (block.begin == block.end) return;
  const int64_t b = block.sequence->index, first = task % column_blocks(p.outputs) * kColumnsPerTask;
  Carver carver(scratch.thread);
  double* x = carver.take(Size(kRowsPerTask) * p.inputs);
  double* weight = carver.take(p.inputs);
  for (int64_t row = block.begin; row < block.end; ++row)
    load_row(p.x, b, row, 0, p.inputs, x + (row - block.begin) * p.inputs);
  for (int64_t o = first; o < column_end(first, p.outputs); ++o) {
    for (int64_t i = 0; i < p.inputs; ++i) weight[i] = load(p.weight, o, i);
    const double bias = p.bias.present() ? load(p.bias, 0, o) : 0;
    for (int64_t row = block.begin; row < block.end; ++row) {
      store(p.y, b, row, 0, o, dot(x + (row - block.begin) * p.inputs, weight, p.inputs) + bias);
    }
  }
}

// Phase 0: dx. Phase 1: one output's row of the weight, sums over all live rows in order.
void ProjectionBackwardKernel::measure(const void* problem, const Limits&, Need* need) {
  const Projection& p = *static_cast<const Projection*>(problem);
  Carver carver;
  carver.take(Size(kRowsPerTask) * kColumnsPerTask);
  carver.take(p.inputs);
  *need = need_per_thread(carver.bytes());
}

int64_t ProjectionBackwardKernel::tasks(const void* problem, int32_t phase) {
  const Projection& p = *static_cast<const Projection*>(problem);
  if (phase == 0) return p.dx.present() ? row_blocks(p.batch) * column_blocks(p.inputs) : 0;
  return p.dweight.present() || p.dbias.present() ? p.outputs : 0;
}

void ProjectionBackwardKernel::run(const void* problem, const Limits&, const Scratch& scratch, int32_t phase, int64_t task) {
  const Projection& p = *static_cast<const Projection*>(problem);
  Carver carver(scratch.thread);
  double* dx = carver.take(Size(kRowsPerTask) * kColumnsPerTask);
  double* dweight = carver.take(p.inputs);
  if (phase == 0)
    reverse_input(p, dx, task);
  else
    reverse_weight(p, dweight, task);
}

}  // namespace lla::reference
