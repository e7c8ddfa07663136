// SPDX-License-Identifier: Apache-2.0
// Zeroes rows that belong to no live sequence and, if asked, copies live rows into another type.
#include <cstring>

#include "cpu/parts.h"

namespace lla::cpu {
namespace {

constexpr int64_t kRows = 32;

// Calls f(b, row) for the slack rows of one range; b is the sequence (of any kind) in whose span the row lies.
template <class F>
void for_slack(const BatchView& batch, const RowRange& range, F f) {
  int64_t next = 0, b = 0;  // sequences come by rising row_begin
  for (int64_t row = range.begin; row < range.end; ++row) {
    while (next < batch.count && batch.sequences[next].row_begin <= row) b = batch.sequences[next++].index;
    f(b, row);
  }
}

void clear_row(const View& view, int64_t b, int64_t row, int64_t heads, int64_t dim) {
  const auto clear = [&](int64_t head, int64_t count) {  // zero bytes are zero in every type
    if (count > 0) std::memset(view.at(b, row, head), 0, static_cast<size_t>(count * dtype_size(view.dtype)));
  };
  if (heads == 1 || view.head_stride == dim) return clear(0, heads * dim);
  for (int64_t h = 0; h < heads; ++h) clear(h, dim);
}

struct Driver {
  static constexpr Op kOp = Op::RowsFill;
  static constexpr const char* kNames[] = LLA_CPU_KERNEL_NAMES("cpu.rows.fill");

  static bool accepts(const void* problem) {
    const RowsFill& p = *static_cast<const RowsFill*>(problem);
    return narrow_types(p.x, p.y);
  }
  static void measure(const void* problem, const Limits&, Need* need) {
    const RowsFill& p = *static_cast<const RowsFill*>(problem);
    Carver carver;
    carver.take(Size(p.heads) * Size(p.dim));
    set_need(0, carver.bytes(), need);
  }
  static int32_t phases(const void*) { return 1; }
  static int64_t tasks(const void* problem, int32_t) {
    const RowsFill& p = *static_cast<const RowsFill*>(problem);
    return p.batch.slack_count + (p.copy ? ceil_div(live_numbers(p.batch), kRows) : 0);
  }

  static void run(const Simd& simd, const void* problem, const Limits&, const Scratch& scratch, int32_t, int64_t task) {
    const RowsFill& p = *static_cast<const RowsFill*>(problem);
    if (task < p.batch.slack_count) {
      if (p.y.accumulate) return;  // adds zero
      for_slack(p.batch, p.batch.slack[task], [&](int64_t b, int64_t row) { clear_row(p.y, b, row, p.heads, p.dim); });
      return;
    }
    float* values = Carver(scratch.thread).take(Size(p.heads) * Size(p.dim));
    const int64_t begin = (task - p.batch.slack_count) * kRows;
    for_pieces(p.batch, begin, begin + kRows, [&](const Piece& piece) {
      for (int64_t t = piece.first; t < piece.last; ++t) {
        load_row(simd, p.x, piece.sequence->index, piece.row(t), p.heads, p.dim, values);
        store_row(simd, p.y, piece.sequence->index, piece.row(t), p.heads, p.dim, values);
      }
    });
  }
};

}  // namespace

const Kernel* rows_fill_kernels(int isa, int64_t* count) { return DriverTable<Driver>::of(isa, count); }

}  // namespace lla::cpu
