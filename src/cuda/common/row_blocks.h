// SPDX-License-Identifier: Apache-2.0
// How kernels that work on rows cut the rows of a batch into blocks, and a row of several heads as one run of elements.
#pragma once

#include "cuda/common/element.h"

namespace lla::cuda {

// A run of rows of one sequence: `rows` rows of the row axis from `first` on, which are the sequence's rows from `offset`
// on.
struct RowBlock {
  const Sequence* sequence = nullptr;
  int64_t first = 0, offset = 0;
  int rows = 0;  // 0: there is nothing to do
};

// Blocks of 2^rows_log rows; they begin anew with each sequence. Block j of sequence i has place row_begin / rows + i + j, a
// number that no other block has, below total_rows / rows + count. Tasks are either the places, whose sequence is searched
// for, or, where sequences are about equally long, all blocks that a sequence could have.
struct RowBlocks {
  int rows_log = 0;
  int64_t tasks = 0;
  int64_t per_sequence = 0;  // 0: tasks are places

  static int64_t places(int rows_log, int64_t total_rows, int64_t sequences) { return (total_rows >> rows_log) + sequences; }

  RowBlocks() = default;
  RowBlocks(const BatchView& batch, int log2_of_rows, bool by_place) : rows_log(log2_of_rows) {
    tasks = places(rows_log, batch.total_rows, batch.count);
    if (by_place) return;
    const int64_t most = (batch.most_rows + (int64_t{1} << rows_log) - 1) >> rows_log;
    if (most > 0 && batch.count > 2 * tasks / most) return;
    per_sequence = most;
    tasks = batch.count * most;
  }

  __device__ __forceinline__ int64_t first_place(const BatchView& batch, int64_t i) const {
    return (batch.sequences[i].row_begin >> rows_log) + i;
  }
  __device__ __forceinline__ RowBlock find(const BatchView& batch, int64_t task) const {
    int64_t i = 0, j = 0;
    if (per_sequence > 0) {
      i = per_sequence == 1 ? task : task / per_sequence;
      j = task - i * per_sequence;
    } else {
      for (int64_t end = batch.count; end - i > 1;) {
        const int64_t middle = (i + end) >> 1;
        if (first_place(batch, middle) <= task)
          i = middle;
        else
          end = middle;
      }
      j = task - first_place(batch, i);
    }
    RowBlock block;
    block.sequence = &batch.sequences[i];
    block.offset = j << rows_log;
    const int64_t left = block.sequence->rows - block.offset;
    if (j < 0 || left <= 0 || block.sequence->padding) return block;
    block.first = block.sequence->row_begin + block.offset;
    block.rows = static_cast<int>(left < (int64_t{1} << rows_log) ? left : int64_t{1} << rows_log);
    return block;
  }
};

// The live sequence that row `row` of the row axis belongs to; null: none. Tried first is where a batch of equally long
// sequences has it.
__device__ __forceinline__ const Sequence* sequence_of_row(const BatchView& batch, int64_t row) {
  if (row >= batch.total_rows || batch.count == 0) return nullptr;
  const auto holds = [row](const Sequence& s) { return s.row_begin <= row && row - s.row_begin < s.rows; };
  int64_t i = row * batch.count / batch.total_rows;
  if (!holds(batch.sequences[i])) {
    i = 0;
    for (int64_t end = batch.count; end - i > 1;) {
      const int64_t middle = (i + end) >> 1;
      if (batch.sequences[middle].row_begin <= row)
        i = middle;
      else
        end = middle;
    }
    if (!holds(batch.sequences[i])) return nullptr;
  }
  return batch.sequences[i].padding ? nullptr : &batch.sequences[i];
}

// Stores elements i ... i + count - 1 (count 1 ... 4) or, if asked to, adds to them.
__device__ __forceinline__ void put4(void* data, int32_t dtype, int64_t i, int64_t count, float4 value, bool accumulate) {
  if (count >= 4 && !accumulate) {
    if (dtype == LLA_F32) {
      float* p = static_cast<float*>(data) + i;
      if ((reinterpret_cast<uintptr_t>(p) & 15) == 0) {
        *reinterpret_cast<float4*>(p) = value;
        return;
      }
    } else {
      unsigned short* p = static_cast<unsigned short*>(data) + i;
      if ((reinterpret_cast<uintptr_t>(p) & 7) == 0) {
        uint2 both;
        if (dtype == LLA_BF16) {
          both.x = to_bf16(value.x) | to_bf16(value.y) << 16;
          both.y = to_bf16(value.z) | to_bf16(value.w) << 16;
        } else {
          both.x = to_f16(value.x) | to_f16(value.y) << 16;
          both.y = to_f16(value.z) | to_f16(value.w) << 16;
        }
        *reinterpret_cast<uint2*>(p) = both;
        return;
      }
    }
  }
#pragma unroll 1  // seldom needed: little code
  for (int64_t j = 0; j < (count < 4 ? count : 4); ++j) {
    put_element(data, dtype, i + j, value.x, accumulate);
    value = make_float4(value.y, value.z, value.w, 0);
  }
}

// A row of heads of `dim` elements each, whatever the heads' distance, as one run of elements.
struct FlatRow {
  void* base;
  int32_t dtype;
  bool accumulate, flat;
  int dim;
  int64_t head_stride;

  __device__ __forceinline__ FlatRow(const View& view, int64_t sequence, int64_t row, int64_t heads, int64_t dim_)
      : base(view.at(sequence, row, 0)),
        dtype(view.dtype),
        accumulate(view.accumulate),
        flat(heads == 1 || view.head_stride == dim_),
        dim(static_cast<int>(dim_)),
        head_stride(view.head_stride) {}
  __device__ __forceinline__ int64_t offset(int e) const { return flat ? e : e / dim * head_stride + e % dim; }
  // Elements e ... e + count - 1, count 1 ... 4; the others are zero.
  __device__ __forceinline__ float4 load(int e, int count) const {
    if (flat || e % dim + count <= dim) return load4(base, dtype, offset(e), count);
    float4 x = make_float4(0, 0, 0, 0);
#pragma unroll 1  // seldom needed: little code
    for (int j = 0; j < 4; ++j) x = make_float4(x.y, x.z, x.w, j < count ? load_element(base, dtype, offset(e + j)) : 0);
    return x;
  }
  __device__ __forceinline__ void put(int e, int count, float4 x) const {
    if (flat || e % dim + count <= dim) return put4(base, dtype, offset(e), count, x, accumulate);
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      put_element(base, dtype, offset(e + j), x.x, accumulate);
      x = make_float4(x.y, x.z, x.w, 0);
    }
  }
};

}  // namespace lla::cuda
