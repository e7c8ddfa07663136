// SPDX-License-Identifier: Apache-2.0
// Zeroes rows that belong to no live sequence and, if asked, copies live rows into another type.
#include "cuda/common/row_blocks.h"
#include "cuda/portable/parts_kernels.h"

namespace lla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsLog = 4;            // rows of a block that copies
constexpr int64_t kMostPerRange = 64;  // blocks for one range of slack rows

int64_t blocks_per_range(const RowsFill& p) {
  return p.batch.total_rows < kMostPerRange ? p.batch.total_rows : kMostPerRange;
}

__global__ void __launch_bounds__(kThreads) clear_slack(RowsFill p, int64_t per_range) {
  const int width = static_cast<int>(p.heads * p.dim);
  for (int64_t task = blockIdx.x; task < p.batch.slack_count * per_range; task += gridDim.x) {
    const int64_t i = task / per_range;
    const RowRange range = p.batch.slack[i];
    for (int64_t row = range.begin + task - i * per_range; row < range.end; row += per_range) {
      const FlatRow y(p.y, p.sequence_rows > 0 ? row / p.sequence_rows : 0, row, p.heads, p.dim);
      for (int e = 4 * threadIdx.x; e < width; e += 4 * kThreads) y.put(e, min(4, width - e), make_float4(0, 0, 0, 0));
    }
  }
}

__global__ void __launch_bounds__(kThreads) copy_rows(RowsFill p, RowBlocks blocks) {
  const int width = static_cast<int>(p.heads * p.dim), quads = (width + 3) / 4;
  for (int64_t task = blockIdx.x; task < blocks.tasks; task += gridDim.x) {
    const RowBlock block = blocks.find(p.batch, task);
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(block.rows) * quads; i += kThreads) {
      const int r = static_cast<int>(i / quads), e = 4 * static_cast<int>(i - static_cast<int64_t>(r) * quads);
      const int64_t b = block.sequence->index, row = block.first + r;
      const FlatRow x(p.x, b, row, p.heads, p.dim), y(p.y, b, row, p.heads, p.dim);
      const int count = min(4, width - e);
      y.put(e, count, x.load(e, count));
    }
  }
}

}  // namespace

bool RowsFillAll::accepts(const void* problem) {
  const RowsFill& p = *static_cast<const RowsFill*>(problem);
  return narrow_types(p.x, p.y) && p.heads * p.dim < kMostColumns;
}

void RowsFillAll::measure(const void* problem, const Limits& limits, Need* need) { needs_nothing(problem, limits, need); }

int32_t RowsFillAll::launch(const void* problem, const Limits&, char*, void* stream) {
  const RowsFill& p = *static_cast<const RowsFill*>(problem);
  if (p.batch.slack_count > 0 && !p.y.accumulate) {
    const int64_t per_range = blocks_per_range(p);
    const int32_t status = cuda::launch(clear_slack, p.batch.slack_count * per_range, kThreads, 0, stream, p, per_range);
    if (status != LLA_OK) return status;
  }
  if (!p.copy) return LLA_OK;
  const RowBlocks blocks(p.batch, kRowsLog, false);
  return cuda::launch(copy_rows, blocks.tasks, kThreads, 0, stream, p, blocks);
}

int32_t RowsFillAll::load() {
  return first_failure([] { return load_kernel(clear_slack); }, [] { return load_kernel(copy_rows); });
}

}  // namespace lla::cuda
