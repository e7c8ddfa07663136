// SPDX-License-Identifier: Apache-2.0
// What the kernels of the parts share: live rows as one numbering, rows as floats, scratch, and kernel tables from drivers.
#pragma once

#include <cstdint>

#include "core/checked.h"
#include "core/contract.h"
#include "cpu/arithmetic.h"
#include "cpu/simd.h"
#include "lla/context.h"
#include "plugin/backend.h"

namespace lla::cpu {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
template <class T>
inline T least(T a, T b) {
  return a < b ? a : b;
}

// ---- live rows ----

// Live rows are numbered through the batch, sequence after sequence; one without rows has one empty number, so that what
// happens once per sequence happens for it too. Blocks of numbers are tasks: a step of many one-row sequences has as few as
// one long sequence. What is computed for a row does not depend on the block.
inline int64_t live_numbers(const BatchView& batch) {
  int64_t total = 0;
  for (int64_t i = 0; i < batch.count; ++i) {
    if (!batch.sequences[i].padding) total += batch.sequences[i].rows > 0 ? batch.sequences[i].rows : 1;
  }
  return total;
}
// At most so many within the limits.
inline Size most_live_numbers(const Limits& limits) { return Size(limits.rows) + Size(limits.sequences); }

// Rows [first, last) of one sequence, counted from the sequence's first row of the call.
struct Piece {
  const Sequence* sequence = nullptr;
  int64_t first = 0, last = 0;
  bool begins = false;  // the piece holds the sequence's first number

  int64_t rows() const { return last - first; }
  int64_t row(int64_t t) const { return sequence->row_begin + t; }
};

// Calls f(piece) for the sequences that have numbers in [begin, end), in order.
template <class F>
inline void for_pieces(const BatchView& batch, int64_t begin, int64_t end, F f) {
  int64_t number = 0;
  for (int64_t i = 0; i < batch.count && number < end; ++i) {
    const Sequence& s = batch.sequences[i];
    if (s.padding) continue;
    const int64_t numbers = s.rows > 0 ? s.rows : 1;
    if (number + numbers > begin) {
      Piece piece;
      piece.sequence = &s;
      piece.first = begin > number ? begin - number : 0;
      piece.begins = piece.first == 0;
      piece.last = least(s.rows, end - number);
      f(piece);
    }
    number += numbers;
  }
}

// ---- rows as floats ----

// Types that the CPU kernels take; the reference takes the rest.
inline bool narrow_type(const View& view) { return view.dtype != LLA_F64; }
inline bool narrow_type(const Matrix& matrix) { return matrix.dtype != LLA_F64; }
template <class... T>
inline bool narrow_types(const T&... operands) {
  return (narrow_type(operands) && ...);
}

// Elements [first, first + count) of a row with one head.
inline void load_span(const Simd& simd, const View& view, int64_t sequence, int64_t row, int64_t first, int64_t count,
                      float* out) {
  simd.widen(out, offset_elements(view.at(sequence, row, 0), view.dtype, first), view.dtype, count);
}

inline void store_span(const Simd& simd, const View& view, int64_t sequence, int64_t row, int64_t first, int64_t count,
                       const float* values) {
  void* to = offset_elements(view.at(sequence, row, 0), view.dtype, first);
  if (view.accumulate) {
    simd.narrow_add(to, view.dtype, values, count);
  } else {
    simd.narrow(to, view.dtype, values, count);
  }
}

// A row of `heads` times `dim` elements, whatever their distance.
inline void load_row(const Simd& simd, const View& view, int64_t sequence, int64_t row, int64_t heads, int64_t dim,
                     float* out) {
  if (heads == 1 || view.head_stride == dim) return load_span(simd, view, sequence, row, 0, heads * dim, out);
  for (int64_t h = 0; h < heads; ++h) simd.widen(out + h * dim, view.at(sequence, row, h), view.dtype, dim);
}

inline void store_row(const Simd& simd, const View& view, int64_t sequence, int64_t row, int64_t heads, int64_t dim,
                      const float* values) {
  if (heads == 1 || view.head_stride == dim) return store_span(simd, view, sequence, row, 0, heads * dim, values);
  for (int64_t h = 0; h < heads; ++h) {
    void* to = view.at(sequence, row, h);
    if (view.accumulate) {
      simd.narrow_add(to, view.dtype, values + h * dim, dim);
    } else {
      simd.narrow(to, view.dtype, values + h * dim, dim);
    }
  }
}

// Columns [first, first + count) of a weight's row.
inline void load_weight(const Simd& simd, const Matrix& matrix, int64_t i, int64_t first, int64_t count, float* out) {
  simd.widen(out, matrix.at(i, first), matrix.dtype, count);
}

inline void store_weight(const Simd& simd, const Matrix& matrix, int64_t i, int64_t first, int64_t count,
                         const float* values) {
  if (matrix.accumulate) {
    simd.narrow_add(matrix.at(i, first), matrix.dtype, values, count);
  } else {
    simd.narrow(matrix.at(i, first), matrix.dtype, values, count);
  }
}

inline void fill(float* out, int64_t count, float value) {
  LLA_CONTRACT(out || count <= 0);
  for (int64_t i = 0; i < count; ++i) out[i] = value;
}

// ---- scratch ----

// Hands out 64-byte aligned arrays of floats; without memory it only counts, so that measure and run share one function.
class Carver {
 public:
  explicit Carver(char* memory = nullptr) : memory_(memory) {}
  float* take(Size count) {
    char* here = memory_ ? memory_ + used_.value() : nullptr;
    used_ += (count * Size(static_cast<int64_t>(sizeof(float)))).aligned(kAlignment);
    return reinterpret_cast<float*>(here);
  }
  int64_t bytes() const { return used_.valid() ? used_.value() : -1; }  // negative: overflow

 private:
  char* memory_;
  Size used_;
};

inline void set_need(int64_t shared, int64_t per_thread, Need* need) {
  if (shared < 0 || per_thread < 0) {
    need->shared = -1;
    need->per_thread = 0;
  } else {
    need->shared = shared;
    need->per_thread = per_thread;
  }
}

// ---- kernel tables ----

// A driver is a struct of static functions: accepts, measure, phases, tasks as in Kernel, and run with a table in front.
template <class Driver, int32_t kIsa>
void run_driver(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task) {
  const Arithmetic arithmetic;
  Driver::run(simd(kIsa), problem, limits, scratch, phase, task);
}

template <class Driver, int32_t kIsa>
constexpr Kernel driver_kernel() {
  return {Driver::kOp,    Driver::kNames[kIsa - LLA_ISA_BASELINE], Driver::accepts, Driver::measure, Driver::phases,
          Driver::tasks, run_driver<Driver, kIsa>,                 nullptr};
}

// The names of a driver's kernels, by instruction set.
#define LLA_CPU_KERNEL_NAMES(text) {text ".baseline", text ".avx2", text ".avx512", text ".neon"}

// One kernel per driver and instruction set.
template <class... Drivers>
struct DriverTable {
  static constexpr int64_t kCount = sizeof...(Drivers);
  static constexpr Kernel kKernels[4][sizeof...(Drivers)] = {{driver_kernel<Drivers, LLA_ISA_BASELINE>()...},
                                                             {driver_kernel<Drivers, LLA_ISA_AVX2>()...},
                                                             {driver_kernel<Drivers, LLA_ISA_AVX512>()...},
                                                             {driver_kernel<Drivers, LLA_ISA_NEON>()...}};
  static const Kernel* of(int isa, int64_t* count) {
    *count = kCount;
    return kKernels[isa - LLA_ISA_BASELINE];
  }
};

// Kernels of each part for `isa` (LLA_ISA_BASELINE ... LLA_ISA_NEON); *count receives their number.
const Kernel* projection_kernels(int isa, int64_t* count);
const Kernel* convolution_kernels(int isa, int64_t* count);
const Kernel* gates_kernels(int isa, int64_t* count);
const Kernel* norm_kernels(int isa, int64_t* count);
const Kernel* rows_fill_kernels(int isa, int64_t* count);

}  // namespace lla::cpu
