// SPDX-License-Identifier: Apache-2.0
// Tiles of the projections' products: 128 x 64 by a block of 256 threads (multiply() puts warps 4 ... 7 below the first
// four). While one step of 32 is multiplied from shared memory, the next one is on its way into registers.
#pragma once

#include "cuda/common/matrix.h"
#include "cuda/common/row_blocks.h"
#include "cuda/cublaslt.h"
#include "cuda/portable/parts_kernels.h"

namespace lla::cuda {

constexpr int kProjectionThreads = 256;
constexpr int kTileRows = 128, kTileColumns = 64, kStep = 32;

// Up to four elements as they lie in memory.
__device__ __forceinline__ uint4 load4_raw(const void* data, int32_t dtype, int64_t i, int64_t count) {
  uint4 raw{0, 0, 0, 0};
  if (dtype == LLA_F32) {
    const unsigned* p = static_cast<const unsigned*>(data) + i;
    if (count >= 4 && (reinterpret_cast<uintptr_t>(p) & 15) == 0) return *reinterpret_cast<const uint4*>(p);
    raw.x = p[0];
    if (count > 1) raw.y = p[1];
    if (count > 2) raw.z = p[2];
    if (count > 3) raw.w = p[3];
    return raw;
  }
  const unsigned short* p = static_cast<const unsigned short*>(data) + i;
  if (count >= 4 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) {
    const uint2 both = *reinterpret_cast<const uint2*>(p);
    raw.x = both.x;
    raw.y = both.y;
    return raw;
  }
  raw.x = p[0];
  if (count > 1) raw.x |= static_cast<unsigned>(p[1]) << 16;
  if (count > 2) raw.y = p[2];
  if (count > 3) raw.y |= static_cast<unsigned>(p[3]) << 16;
  return raw;
}

__device__ __forceinline__ float4 widen4(uint4 raw, int32_t dtype) {
  if (dtype == LLA_F32)
    return make_float4(__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w));
  if (dtype == LLA_BF16)
    return make_float4(from_bf16(raw.x & 0xffffu), from_bf16(raw.x >> 16), from_bf16(raw.y & 0xffffu),
                       from_bf16(raw.y >> 16));
  return make_float4(from_f16(raw.x & 0xffffu), from_f16(raw.x >> 16), from_f16(raw.y & 0xffffu), from_f16(raw.y >> 16));
}

// An operand whose rows run along the depth: tile[row][depth]. row(r) is the start of row r of the tile, null: zeros.
template <int kRows>
struct Along {
  static constexpr int kLoads = kRows * kStep / 4 / kProjectionThreads, kStride = kStep + 4;
  static constexpr int kFloats = kRows * kStride;
  const void* rows[kLoads];
  int32_t dtype;
  uint4 raw[kLoads];

  template <class RowStart>
  __device__ __forceinline__ Along(int32_t dtype_, RowStart row) : dtype(dtype_) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) rows[j] = row(static_cast<int>(threadIdx.x / 8 + 32 * j));
  }
  __device__ __forceinline__ void fetch(int64_t k, int64_t depth) {
    const int64_t at = k + 4 * (threadIdx.x % 8);
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      raw[j] = rows[j] && at < depth ? load4_raw(rows[j], dtype, at, depth - at) : uint4{0, 0, 0, 0};
  }
  __device__ __forceinline__ void put(float* tile) const {
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      *reinterpret_cast<float4*>(tile + (threadIdx.x / 8 + 32 * j) * kStride + 4 * (threadIdx.x % 8)) =
          widen4(raw[j], dtype);
  }
  static __device__ __forceinline__ float at(const float* tile, int outer, int k) { return tile[outer * kStride + k]; }
};

// An operand whose rows run across it, one for each index of the depth: tile[depth][column]. row(k) is where column 0 of row
// k of the whole depth lies, null: zeros; columns `first` ... are the tile's, of `columns` in all.
template <int kColumns, class RowStart>
struct Across {
  static constexpr int kLoads = kStep * kColumns / 4 / kProjectionThreads, kStride = kColumns + 8;
  static constexpr int kFloats = kStep * kStride, kLanes = kColumns / 4, kRows = kProjectionThreads / kLanes;
  RowStart row;
  int32_t dtype;
  int64_t first, columns;
  uint4 raw[kLoads];

  __device__ __forceinline__ Across(int32_t dtype_, int64_t first_, int64_t columns_, RowStart row_)
      : row(row_), dtype(dtype_), first(first_), columns(columns_) {}
  __device__ __forceinline__ void fetch(int64_t k, int64_t depth) {
    const int64_t column = first + 4 * (threadIdx.x % kLanes);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int64_t r = k + threadIdx.x / kLanes + kRows * j;
      const void* start = r < depth && column < columns ? row(r) : nullptr;
      raw[j] = start ? load4_raw(start, dtype, column, columns - column) : uint4{0, 0, 0, 0};
    }
  }
  __device__ __forceinline__ void put(float* tile) const {
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      *reinterpret_cast<float4*>(tile + (threadIdx.x / kLanes + kRows * j) * kStride + 4 * (threadIdx.x % kLanes)) =
          widen4(raw[j], dtype);
  }
  static __device__ __forceinline__ float at(const float* tile, int outer, int k) { return tile[k * kStride + outer]; }
};
template <int kColumns, class RowStart>
__device__ __forceinline__ Across<kColumns, RowStart> across(int32_t dtype, int64_t first, int64_t columns, RowStart row) {
  return {dtype, first, columns, row};
}

// sum += a b over the depth. Ends with a barrier.
template <bool kExact, class A, class B>
__device__ __forceinline__ void multiply_deep(TileSum& sum, A& a, B& b, float* tiles, int64_t depth) {
  float *tile_a = tiles, *tile_b = tiles + A::kFloats;
  a.fetch(0, depth);
  b.fetch(0, depth);
  for (int64_t k = 0; k < depth; k += kStep) {
    a.put(tile_a);
    b.put(tile_b);
    __syncthreads();
    if (k + kStep < depth) {
      a.fetch(k + kStep, depth);
      b.fetch(k + kStep, depth);
    }
    multiply<kExact>(
        sum, kStep, [&](int m, int n) { return A::at(tile_a, m, n); }, [&](int n, int m) { return B::at(tile_b, m, n); });
    __syncthreads();
  }
}

constexpr int kResultStride = kTileColumns + 4;
constexpr size_t kTileBytes = sizeof(float) * kTileRows * kResultStride;  // the result, or both operands

// Hands the result out in pieces of four neighbours: put(row, column, float4). Ends with a barrier.
template <class Put>
__device__ __forceinline__ void hand_out(TileSum& sum, float* tile, Put put) {
  sum.each([&](int row, int column, float& x) { tile[row * kResultStride + column] = x; });
  __syncthreads();
  for (int i = threadIdx.x; i < kTileRows * kTileColumns / 4; i += kProjectionThreads) {
    const int row = i / (kTileColumns / 4), column = 4 * (i % (kTileColumns / 4));
    put(row, column, *reinterpret_cast<const float4*>(tile + row * kResultStride + column));
  }
  __syncthreads();
}

inline int64_t tiles_of(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// Whether products need more than tf32 operands.
inline bool exact(const View& rows, const Matrix& weight) { return rows.dtype == LLA_F32 || weight.dtype == LLA_F32; }

// Forward, sequences of at most so many rows go the way of few rows, whatever else is in the batch.
constexpr int64_t kFewRows = 16;
__device__ __forceinline__ bool has_few_rows(const Sequence& sequence) { return sequence.rows <= kFewRows; }
inline bool may_have_few_rows(const BatchView& batch) { return batch.least_rows <= kFewRows; }

// Products over the rows are for cuBLASLt where every row is live. Those that make rows compute the others too, from
// whatever is there: outputs are zeroed where no sequence is, but what accumulates must stay as it is.
inline bool all_rows_live(const BatchView& batch) { return batch.slack_count == 0; }
inline bool may_make_all_rows(const BatchView& batch, const View& out, bool scratch) {
  return all_rows_live(batch) || !out.accumulate || scratch;
}
// Rows that lie at their number times a stride; no data, which is refused, where they do not.
inline DenseMatrix dense(const View& view, int64_t rows, int64_t columns) {  // a single row has no stride
  return {view.sequence_stride == 0 ? view.data : nullptr, view.dtype, rows, columns, rows > 1 ? view.row_stride : columns};
}
inline DenseMatrix dense(const Matrix& matrix, int64_t rows, int64_t columns) {
  return {matrix.data, matrix.dtype, rows, columns, rows > 1 ? matrix.row_stride : columns};
}
// Scratch for it, in floats, and where in the scratch it begins.
inline Size dense_workspace() { return kCublasltWorkspace / 4 + 64; }
inline void* dense_workspace(float* scratch) {
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch) + 255) & ~uintptr_t{255});
}

// Few rows meet a large weight (projection_few.cu). `among_many`: of the batch's sequences those alone that have few.
int32_t launch_projection_few(const Projection& p, bool among_many, void* stream);
int32_t load_projection_few();

}  // namespace lla::cuda
