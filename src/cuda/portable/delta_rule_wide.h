// SPDX-License-Identifier: Apache-2.0
// Products by blocks of 256 threads: warps with tiles of a shape of their own, and matrices of scratch memory that come into
// shared memory while the tiles before them are being multiplied.
#pragma once

#include "cuda/common/async_copy.h"
#include "cuda/portable/delta_rule.h"

namespace lla::cuda {

constexpr int kWideThreads = 256;
constexpr int kWide = 128;             // rows and columns of a product
constexpr int kWideAlong = kWide + 4;  // row distances as kAlong and kAcross
constexpr int kWideAcross = kWide + 8;

// A warp's part of a product: 16 kRows rows from `row` on, 8 kColumns columns from `column` on.
template <int kRows, int kColumns>
struct WarpSum {
  float c[kRows][kColumns][4];
  int row, column;

  __device__ __forceinline__ WarpSum(int first_row, int first_column) : row(first_row), column(first_column) {}
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) c[i][j][q] = 0;
  }
  // f(row, column, x, y) for neighbours (column, column + 1).
  template <class F>
  __device__ __forceinline__ void each_pair(F f) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
          f(row + lane / 4 + 16 * i + 8 * half, column + 2 * (lane % 4) + 8 * j, c[i][j][2 * half], c[i][j][2 * half + 1]);
  }
  // sum += a b over k in 0 ... depth - 1, as multiply().
  template <bool kExact, class A, class B>
  __device__ __forceinline__ void add(int depth, A a, B b) {
    const int lane = threadIdx.x % 32, m0 = row + lane / 4, n0 = column + lane / 4, k0 = lane % 4;
#pragma unroll 2
    for (int k = 0; k < depth; k += 8) {
      unsigned fa[kRows][4], ra[kRows][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float x = a(m0 + 16 * i + 8 * (q % 2), k + k0 + 4 * (q / 2));
          fa[i][q] = to_tf32(x);
          if constexpr (kExact) ra[i][q] = to_tf32(x - __uint_as_float(fa[i][q]));
        }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        unsigned fb[2], rb[2];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const float x = b(k + k0 + 4 * q, n0 + 8 * j);
          fb[q] = to_tf32(x);
          if constexpr (kExact) rb[q] = to_tf32(x - __uint_as_float(fb[q]));
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if constexpr (kExact) {
            multiply_fragment(c[i][j], ra[i], fb);
            multiply_fragment(c[i][j], fa[i], rb);
          }
          multiply_fragment(c[i][j], fa[i], fb);
        }
      }
    }
  }
};

// A sum of 128 x 128 elements by a block.
struct WideSum : WarpSum<2, 8> {
  __device__ __forceinline__ WideSum()
      : WarpSum(32 * static_cast<int>(threadIdx.x / 64), 64 * static_cast<int>(threadIdx.x / 32 % 2)) {}
};

// A matrix in memory.
struct FloatMatrix {
  Elements elements;  // null: zero
  int64_t stride = 0, rows = 0, columns = 0;

  // Whether its rows can be copied as they are.
  __device__ __forceinline__ bool plain() const {
    return elements.data && elements.dtype == LLA_F32 && stride % 4 == 0 &&
           (reinterpret_cast<uintptr_t>(elements.data) & 15) == 0;
  }
};

// Begins to bring kRows x kColumns elements of a matrix from (row, column) on, what is beyond its end zero.
template <int kRows, int kColumns>
__device__ __forceinline__ void bring_tile(float* tile, int tile_stride, const FloatMatrix& matrix, int64_t row,
                                           int64_t column) {
  constexpr int kAcrossThreads = kColumns / 4, kStep = kWideThreads / kAcrossThreads;
  const int c = 4 * static_cast<int>(threadIdx.x % kAcrossThreads), first = static_cast<int>(threadIdx.x / kAcrossThreads);
  const int64_t left = matrix.columns - column - c, rows = matrix.rows - row;
  if (matrix.plain()) {
    const float* base = static_cast<const float*>(matrix.elements.data);
    const float* from = base + row * matrix.stride + column + c;
    const int bytes = left <= 0 ? 0 : left < 4 ? 4 * static_cast<int>(left) : 16;
#pragma unroll
    for (int r = first; r < kRows; r += kStep) {
      const bool there = r < rows && bytes > 0;
      copy_async16(tile + r * tile_stride + c, there ? from + r * matrix.stride : base, there ? bytes : 0);
    }
    return;
  }
  constexpr int kMine = kRows / kStep;
  float4 x[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    x[i] = make_float4(0, 0, 0, 0);
    if (!matrix.elements.data || first + i * kStep >= rows || left <= 0) continue;
    const Elements from = delta_row(matrix.elements, row + first + i * kStep, matrix.stride);
    x[i] = load4(from.data, from.dtype, column + c, left);
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) *reinterpret_cast<float4*>(tile + (first + i * kStep) * tile_stride + c) = x[i];
}

// 64 rows of a tensor that are `stride` apart, row 0 at `data`; only rows [lo, hi) exist.
struct CallRows {
  const char* data = nullptr;
  int32_t dtype = LLA_F32;
  int64_t stride = 0;
  int lo = 0, hi = 0;

  __device__ __forceinline__ CallRows(const float* base, int64_t row_stride, const ChunkSpan& span)
      : data(reinterpret_cast<const char*>(base)), stride(4 * row_stride), lo(span.lo), hi(span.hi) {}
  __device__ __forceinline__ CallRows(const View& view, const Sequence& sequence, const ChunkSpan& span, int64_t head)
      : dtype(view.dtype), stride(view.row_stride * (view.dtype == LLA_F32 ? 4 : 2)), lo(span.lo), hi(span.hi) {
    data = static_cast<const char*>(view.at(sequence.index, span.row(sequence, 0), head));
  }
};

// Fills tile [64][tile_stride] with 64 columns of rows from `at` on, of `columns` in all, or, if wide, 128; what is not
// there is zero. Much less code than load_tile(), which instruction caches are thankful for. No barrier.
template <bool kWideRows>
__device__ __forceinline__ void load_rows(float* tile, int tile_stride, const CallRows& rows, int at, int columns) {
  constexpr int kMine = 8;
  constexpr int kAcrossThreads = kWideRows ? 32 : 16;
  const int c = 4 * static_cast<int>(threadIdx.x % kAcrossThreads), first = static_cast<int>(threadIdx.x / kAcrossThreads);
  const int left = columns - at - c;
  const int size = rows.dtype == LLA_F32 ? 4 : 2;
  const char* from = rows.data + first * rows.stride + (at + c) * size;
  float* to = tile + first * tile_stride + c;
  const int64_t step = 8 * rows.stride;
  if (columns % 4 == 0 &&
      ((reinterpret_cast<uintptr_t>(rows.data) | static_cast<uint64_t>(rows.stride)) & (4 * size - 1)) == 0) {
    if (size == 2) {
      uint2 x[kMine];
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int r = first + 8 * i;
        x[i] = r >= rows.lo && r < rows.hi && left > 0 ? *reinterpret_cast<const uint2*>(from + i * step) : make_uint2(0, 0);
      }
      const bool bf16 = rows.dtype == LLA_BF16;
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const unsigned a = x[i].x & 0xffffu, b = x[i].x >> 16, d = x[i].y & 0xffffu, e = x[i].y >> 16;
        *reinterpret_cast<float4*>(to + 8 * i * tile_stride) =
            bf16 ? make_float4(from_bf16(a), from_bf16(b), from_bf16(d), from_bf16(e))
                 : make_float4(from_f16(a), from_f16(b), from_f16(d), from_f16(e));
      }
    } else {
      float4 x[kMine];
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int r = first + 8 * i;
        x[i] = r >= rows.lo && r < rows.hi && left > 0 ? *reinterpret_cast<const float4*>(from + i * step)
                                                       : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) *reinterpret_cast<float4*>(to + 8 * i * tile_stride) = x[i];
    }
    return;
  }
#pragma unroll 1
  for (int r = first; r < kTile; r += 8) {
    *reinterpret_cast<float4*>(tile + r * tile_stride + c) =
        r >= rows.lo && r < rows.hi && left > 0 ? load4(rows.data + r * rows.stride, rows.dtype, at + c, left)
                                                : make_float4(0, 0, 0, 0);
  }
}
// Then rows [0, lo), which row(r) tells the elements of. By the threads that have made them zero.
template <bool kWideRows, class Row>
__device__ __forceinline__ void load_tail_rows(float* tile, int tile_stride, int lo, int at, int columns, Row row) {
  constexpr int kAcrossThreads = kWideRows ? 32 : 16;
  const int c = 4 * static_cast<int>(threadIdx.x % kAcrossThreads), left = columns - at - c;
#pragma unroll 1
  for (int r = static_cast<int>(threadIdx.x / kAcrossThreads); r < lo; r += 8) {
    const Elements from = row(r);
    if (from.data && left > 0)
      *reinterpret_cast<float4*>(tile + r * tile_stride + c) = load4(from.data, from.dtype, at + c, left);
  }
}

constexpr int kWideDepth = 32;  // of a tile
constexpr int kWideBuffers = 3;
constexpr int kWideTileAlong = kWide * (kWideDepth + 4), kWideTileAcross = kWideDepth * kWideAcross;

// sum += op(A) op(B) over `depth`: rows of op(A) from `row` on, columns of op(B) from `column` on. Transposed: the matrix in
// memory is the transpose. `memory`: kWideBuffers times two tiles. Begins with a barrier; ends without.
constexpr size_t kWideProductBytes = kWideBuffers * 2 * kWideTileAlong * sizeof(float);
template <bool kExact, bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void add_wide_product(float* memory, WideSum& sum, const FloatMatrix& a, const FloatMatrix& b,
                                                 int64_t row, int64_t column, int64_t depth) {
  constexpr int kStrideA = kTransposedA ? kWideAcross : kWideDepth + 4,
                kStrideB = kTransposedB ? kWideDepth + 4 : kWideAcross;
  const auto tile_a = [&](int i) { return memory + i % kWideBuffers * 2 * kWideTileAlong; };
  const int count = static_cast<int>((depth + kWideDepth - 1) / kWideDepth);
  const auto bring = [&](int i) {
    if (i < count) {
      const int64_t at = i * kWideDepth;
      if constexpr (kTransposedA)
        bring_tile<kWideDepth, kWide>(tile_a(i), kStrideA, a, at, row);
      else
        bring_tile<kWide, kWideDepth>(tile_a(i), kStrideA, a, row, at);
      if constexpr (kTransposedB)
        bring_tile<kWide, kWideDepth>(tile_a(i) + kWideTileAlong, kStrideB, b, column, at);
      else
        bring_tile<kWideDepth, kWide>(tile_a(i) + kWideTileAlong, kStrideB, b, at, column);
    }
    commit_copies();
  };
  __syncthreads();
  bring(0);
  bring(1);
  for (int i = 0; i < count; ++i) {
    wait_copies<1>();
    __syncthreads();
    bring(i + 2);
    const float *x = tile_a(i), *y = x + kWideTileAlong;
    sum.template add<kExact>(
        kWideDepth, [&](int m, int k) { return kTransposedA ? x[k * kStrideA + m] : x[m * kStrideA + k]; },
        [&](int k, int n) { return kTransposedB ? y[n * kStrideB + k] : y[k * kStrideB + n]; });
  }
  wait_copies<0>();
}

// out (+)= sum, of a matrix [rows][stride] of floats.
__device__ __forceinline__ void put_wide(WideSum& sum, float* out, int64_t stride, int64_t row, int64_t rows, int64_t column,
                                         int64_t columns, bool adds) {
  float* base = out + row * stride + column;
  const int rows_left = static_cast<int>(rows - row < kWide ? rows - row : kWide);
  const int columns_left = static_cast<int>(columns - column < kWide ? columns - column : kWide);
  sum.each_pair([&](int m, int n, float x, float y) {
    if (m >= rows_left || n >= columns_left) return;
    float2* to = reinterpret_cast<float2*>(base + m * stride + n);
    *to = adds ? make_float2(to->x + x, to->y + y) : make_float2(x, y);
  });
}

// launch_delta_chunks() and launch_delta_read() for dimensions of at most 128.
int32_t launch_delta_chunks_narrow(const DeltaInputs& in, const DeltaScratch& scratch, bool reads, bool exact, void* stream);
int32_t launch_delta_read_narrow(const DeltaInputs& in, const DeltaScratch& scratch, const View& y, void* stream);
int32_t load_delta_chunks_narrow();
int32_t load_delta_read_narrow();

}  // namespace lla::cuda
