// SPDX-License-Identifier: Apache-2.0
// What all reference kernels share: elements as doubles, scratch arrays, and how rows are cut into tasks.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/checked.h"
#include "core/contract.h"
#include "plugin/backend.h"

namespace lla::reference {

// ---- elements ----

inline double load(const View& view, int64_t sequence, int64_t row, int64_t head, int64_t i = 0) {
  return load_element<double>(view.at(sequence, row, head), view.dtype, i);
}

// Stores or, if the view accumulates, adds.
inline void store(const View& view, int64_t sequence, int64_t row, int64_t head, int64_t i, double value) {
  void* data = view.at(sequence, row, head);
  if (view.accumulate) value += load_element<double>(data, view.dtype, i);
  store_element(data, view.dtype, i, value);
}

inline void load_row(const View& view, int64_t sequence, int64_t row, int64_t head, int64_t count, double* out) {
  const void* data = view.at(sequence, row, head);
  for (int64_t i = 0; i < count; ++i) out[i] = load_element<double>(data, view.dtype, i);
}

inline void store_row(const View& view, int64_t sequence, int64_t row, int64_t head, int64_t count, const double* values) {
  for (int64_t i = 0; i < count; ++i) store(view, sequence, row, head, i, values[i]);
}

// Element (i, j) of a weight that is given.
inline double load(const Matrix& matrix, int64_t i, int64_t j) {
  return load_element<double>(matrix.at(i), matrix.dtype, j);
}

inline void store(const Matrix& matrix, int64_t i, int64_t j, double value) {
  void* data = matrix.at(i);
  if (matrix.accumulate) value += load_element<double>(data, matrix.dtype, j);
  store_element(data, matrix.dtype, j, value);
}

// ---- vectors ----

inline double dot(const double* a, const double* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

inline void add_scaled(double* out, double factor, const double* a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] += factor * a[i];
}

inline void fill(double* out, int64_t count, double value) {
  for (int64_t i = 0; i < count; ++i) out[i] = value;
}

// ---- functions ----

inline double sigmoid(double x) {
  if (x >= 0) return 1 / (1 + std::exp(-x));
  const double e = std::exp(x);
  return e / (1 + e);
}
inline double silu(double x) { return x * sigmoid(x); }
inline double silu_slope(double x) {
  const double s = sigmoid(x);
  return s * (1 + x * (1 - s));
}
inline double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

// ---- scratch ----

// Hands out arrays of doubles from a block of memory, or, without memory, only counts. One function that takes arrays serves
// both measure and run, so that the two cannot disagree.
class Carver {
 public:
  explicit Carver(char* memory = nullptr) : memory_(memory) {}
  double* take(Size count) {
    char* here = memory_ ? memory_ + used_.value() : nullptr;
    used_ += (count * Size(sizeof(double))).aligned(kAlignment);
    return reinterpret_cast<double*>(here);
  }
  // Bytes taken; negative if they overflow.
  int64_t bytes() const { return used_.valid() ? used_.value() : -1; }

 private:
  char* memory_;
  Size used_;
};

// A need of `thread` bytes per thread; a negative number is an overflow.
inline Need need_per_thread(int64_t thread) {
  Need need;
  if (thread < 0)
    need.shared = -1;
  else
    need.per_thread = thread;
  return need;
}

// ---- tasks ----

constexpr int64_t kRowsPerTask = 32;

// A run of rows of one sequence: rows begin ... end - 1 of the row axis.
struct RowBlock {
  const Sequence* sequence = nullptr;
  int64_t begin = 0, end = 0;
};

inline int64_t blocks_per_sequence(const BatchView& batch) {
  int64_t most = 0;
  for (int64_t b = 0; b < batch.count; ++b) {
    if (batch.sequences[b].rows > most) most = batch.sequences[b].rows;
  }
  return (most + kRowsPerTask - 1) / kRowsPerTask;
}

inline int64_t row_blocks(const BatchView& batch) { return batch.count * blocks_per_sequence(batch); }

// Block `index` of row_blocks(); empty where a sequence is shorter, or padding.
inline RowBlock row_block(const BatchView& batch, int64_t index) {
  const int64_t blocks = blocks_per_sequence(batch);
  LLA_CONTRACT(blocks > 0);  // no rows: no block
  const Sequence& sequence = batch.sequences[index / blocks];
  const int64_t first = (index % blocks) * kRowsPerTask;
  RowBlock block;
  block.sequence = &sequence;
  if (sequence.padding || first >= sequence.rows) return block;
  block.begin = sequence.row_begin + first;
  block.end = sequence.row_begin + (first + kRowsPerTask < sequence.rows ? first + kRowsPerTask : sequence.rows);
  return block;
}

}  // namespace lla::reference
