// SPDX-License-Identifier: Apache-2.0
// Tiles of 64 x 64 elements in shared memory and their products by 128 threads: fp32 elements with split tf32 products, or,
// where all tensors are bf16, bf16 elements with bf16 products. Tiles are filled asynchronously where possible.
#pragma once

#include <type_traits>

#include "cuda/common/async_copy.h"
#include "cuda/common/chunk.h"
#include "cuda/common/matrix.h"

namespace lla::cuda::scalar_gate {

constexpr int kStride = 72;  // elements between rows: no bank conflicts of bf16 in either direction

template <bool kExact>
using TileElement = std::conditional_t<kExact, float, unsigned short>;

template <bool kExact>
struct alignas(16) Tile {
  TileElement<kExact> data[64 * kStride];
};

// Elements (row, column) and (row, column + 1), column even.
template <bool kExact>
__device__ __forceinline__ float2 read_pair(const Tile<kExact>& tile, int row, int column) {
  if constexpr (kExact) {
    return *reinterpret_cast<const float2*>(tile.data + row * kStride + column);
  } else {
    const unsigned both = *reinterpret_cast<const unsigned*>(tile.data + row * kStride + column);
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
  }
}
template <bool kExact>
__device__ __forceinline__ void write_pair(Tile<kExact>& tile, int row, int column, float x, float y) {
  if constexpr (kExact) {
    *reinterpret_cast<float2*>(tile.data + row * kStride + column) = make_float2(x, y);
  } else {
    *reinterpret_cast<unsigned*>(tile.data + row * kStride + column) = bf16_pair(x, y);
  }
}

// A barrier of the block after which the tiles that were being filled are there.
__device__ __forceinline__ void arrive() {
  wait_all_copies();
  __syncthreads();
}

// Fills a tile with 64 rows of 64 columns from column `column` on, of `columns` in all; what is not there is zero. row(r)
// gives the elements of column 0. Complete after arrive().
template <bool kExact, class Row>
__device__ __forceinline__ void fill_tile(Tile<kExact>& tile, int64_t column, int64_t columns, Row row) {
  if constexpr (kExact) {
    load_tile(tile.data, kStride, column, columns, row);
  } else {
    const int c = 8 * (threadIdx.x % 8), first = threadIdx.x / 8;
    const int64_t left = columns - column - c;
    unsigned short* to = tile.data + first * kStride + c;
    const char* data[4];
    int32_t dtype = LLA_BF16;
    bool plain = left >= 8;
    bool found = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Elements elements = row(first + 16 * i);
      data[i] = left > 0 ? static_cast<const char*>(elements.data) : nullptr;
      if (!data[i]) continue;
      data[i] += (column + c) * (elements.dtype == LLA_F32 ? 4 : 2);
      plain = plain && (!found || elements.dtype == dtype) && (reinterpret_cast<uintptr_t>(data[i]) & 15) == 0;
      dtype = elements.dtype;
      found = true;
    }
    if (plain && dtype == LLA_BF16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (data[i])
          copy_async16(to + 16 * i * kStride, data[i]);
        else
          *reinterpret_cast<uint4*>(to + 16 * i * kStride) = uint4{0, 0, 0, 0};
      }
    } else if (plain && dtype == LLA_F32) {
      float4 x[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i][0] = x[i][1] = make_float4(0, 0, 0, 0);
        if (data[i]) {
          x[i][0] = reinterpret_cast<const float4*>(data[i])[0];
          x[i][1] = reinterpret_cast<const float4*>(data[i])[1];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<uint4*>(to + 16 * i * kStride) =
            uint4{bf16_pair(x[i][0].x, x[i][0].y), bf16_pair(x[i][0].z, x[i][0].w), bf16_pair(x[i][1].x, x[i][1].y),
                  bf16_pair(x[i][1].z, x[i][1].w)};
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const Elements elements = row(first + 16 * i);
#pragma unroll 1
        for (int e = 0; e < 8; ++e) {
          const float x = elements.data && e < left ? load_element(elements.data, elements.dtype, column + c + e) : 0;
          to[16 * i * kStride + e] = static_cast<unsigned short>(to_bf16(x));
        }
      }
    }
  }
}

#if !defined(LLA_CUDA_EMULATED)
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], const unsigned short* from) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(from));
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}
#endif

enum class Layout { Along, Across };  // A: stored [m][k], [k][m]; B: [n][k], [k][n]

// sum += a b over k in 0 ... depth - 1, a multiple of 8; rows up to the next multiple of 16 must hold numbers. kHalf: what
// is in the tiles is fp16 in place of bf16.
template <bool kExact, Layout kA, Layout kB, bool kHalf = false>
__device__ __forceinline__ void multiply_tiles(TileSum& sum, int depth, const Tile<kExact>& a, const Tile<kExact>& b) {
  if constexpr (kExact) {
    multiply<true>(
        sum, depth, [&](int m, int k) { return a.data[kA == Layout::Along ? m * kStride + k : k * kStride + m]; },
        [&](int k, int n) { return b.data[kB == Layout::Along ? n * kStride + k : k * kStride + n]; });
  } else {
#if defined(LLA_CUDA_EMULATED)
    const auto from_half = [](unsigned bits) { return kHalf ? from_f16(bits) : from_bf16(bits); };
    sum.each([&](int m, int n, float& x) {
      for (int k = 0; k < (depth + 15) / 16 * 16; ++k) {
        x += from_half(a.data[kA == Layout::Along ? m * kStride + k : k * kStride + m]) *
             from_half(b.data[kB == Layout::Along ? n * kStride + k : k * kStride + n]);
      }
    });
#else
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int m0 = 32 * (warp / 2), n0 = 32 * (warp % 2);
    const unsigned short* from_a = kA == Layout::Along
                                       ? a.data + (m0 + lane % 16) * kStride + lane / 16 * 8
                                       : a.data + (lane / 16 * 8 + lane % 8) * kStride + m0 + lane / 8 % 2 * 8;
    const unsigned short* from_b = kB == Layout::Along
                                       ? b.data + (n0 + lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8
                                       : b.data + (lane % 16) * kStride + n0 + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < 64; k += 16) {
      if (k >= depth) break;
      unsigned fa[2][4], fb[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        load_matrices<kA == Layout::Across>(fa[i],
                                            from_a + (kA == Layout::Along ? 16 * i * kStride + k : k * kStride + 16 * i));
        load_matrices<kB == Layout::Across>(fb[i],
                                            from_b + (kB == Layout::Along ? 16 * i * kStride + k : k * kStride + 16 * i));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float(&c)[4] = sum.c[i][j];
          const unsigned *x = fa[i], *y = &fb[j / 2][j % 2 * 2];
          if constexpr (kHalf)
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
          else
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
        }
    }
#endif
  }
}

// f(row, column, x&, y&) for pairs of neighbours in a row.
template <class F>
__device__ __forceinline__ void each_pair(TileSum& sum, F f) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = 32 * (warp / 2) + lane / 4, column = 32 * (warp % 2) + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        f(row + 16 * i + 8 * half, column + 8 * j, sum.c[i][j][2 * half], sum.c[i][j][2 * half + 1]);
}

// Puts the products of rows with rows into a tile, times factor(row, column, level) where row >= column, else zero. The
// level (0: the same row) is for the most part a constant.
template <bool kExact, class Factor>
__device__ __forceinline__ void put_levels(Tile<kExact>& tile, const TileSum& products, Factor factor) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = 32 * (warp / 2) + lane / 4, column0 = 32 * (warp % 2) + 2 * (lane % 4);
#pragma unroll
  for (int block = 0; block < 4; ++block)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float x[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int row = row0 + 8 * block, column = column0 + 8 * j + q;
        int level = block > j ? ((block ^ j) > 1 ? 5 : 4) : -1;
        if (block == j) level = row % 8 >= column % 8 ? local_level(row % 8, column % 8) : -1;
        if (warp == 2) level = 6;
        if (warp == 1) level = -1;
        x[q] = level < 0 ? 0 : factor(row, column, level) * products.c[block / 2][j][block % 2 * 2 + q];
      }
      write_pair<kExact>(tile, row0 + 8 * block, column0 + 8 * j, x[0], x[1]);
    }
}

// sum += factors[row] product
__device__ __forceinline__ void add_rows_scaled(TileSum& sum, const TileSum& product, const float* factors) {
  const int first = 32 * (threadIdx.x / 64) + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = factors[first + 16 * i + 8 * half];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum.c[i][j][2 * half] += factor * product.c[i][j][2 * half];
        sum.c[i][j][2 * half + 1] += factor * product.c[i][j][2 * half + 1];
      }
    }
}

// put(row, half of the columns, sum over the columns of product . tile).
template <bool kExact, class Put>
__device__ __forceinline__ void row_products(const TileSum& product, const Tile<kExact>& tile, Put put) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = 32 * (warp / 2) + lane / 4, column = 32 * (warp % 2) + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 16 * i + 8 * half;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = read_pair<kExact>(tile, r, column + 8 * j);
        sum += x.x * product.c[i][j][2 * half] + x.y * product.c[i][j][2 * half + 1];
      }
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (lane % 4 == 0) put(r, warp % 2, sum);
    }
}

// Puts an accumulator into a tile.
template <bool kExact>
__device__ __forceinline__ void put_tile(Tile<kExact>& tile, TileSum& sum) {
  each_pair(sum, [&](int row, int column, float x, float y) { write_pair<kExact>(tile, row, column, x, y); });
}

// Stores rows lo ... hi - 1 and `columns` (a multiple of 8) columns of a bf16 tile to rows that are `bytes` apart, aligned
// to 16 bytes.
__device__ __forceinline__ void store_tile(const Tile<false>& tile, char* base, int64_t bytes, int lo, int hi, int columns) {
  const int c = 8 * (threadIdx.x % 8), first = threadIdx.x / 8;
  if (c >= columns) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = first + 16 * i;
    if (r >= lo && r < hi)
      *reinterpret_cast<uint4*>(base + r * bytes + 2 * c) = *reinterpret_cast<const uint4*>(tile.data + r * kStride + c);
  }
}
__device__ __forceinline__ bool is_aligned16(const void* base, int64_t bytes) {
  return ((reinterpret_cast<uintptr_t>(base) | static_cast<uintptr_t>(bytes)) & 15) == 0;
}

}  // namespace lla::cuda::scalar_gate
