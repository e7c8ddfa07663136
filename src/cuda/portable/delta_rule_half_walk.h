// SPDX-License-Identifier: Apache-2.0
// Rows that walk through nodes on halves, the stages through which nodes come, products of nodes, and rows of outputs.
#pragma once

#include "cuda/portable/delta_rule_half.h"

namespace lla::cuda {

// Sixteen rows X of a warp: halves and a scale for each of the two rows of a lane.
struct WalkingRows {
  unsigned x[8][4];
  float scale[2];

  __device__ __forceinline__ void set(WideRows& sum, float f0, float f1) {
    float most[2];
    sum.row_most(most);
    const HalfScale by0(most[0]), by1(most[1]);
    sum.pack(x, by0.to, by1.to);
    scale[0] = by0.back * f0, scale[1] = by1.back * f1;
  }
  template <Stored kStored>
  __device__ __forceinline__ void multiply(WideRows& sum, const char* tile, int steps) const {
    const SharedAddress right = right_address<kStored>(tile);
    sum.clear();
    sum.template add<kStored, 8>(right, steps, [&](int k) -> const unsigned(&)[4] { return x[k]; });
  }
};

constexpr int kMostHalfSteps = 64;
constexpr int kHalfStages = 4;

// The matrices of a list of steps, content and transition in turns, brought into stages one after the other.
struct HalfStages {
  char* tiles;
  const DeltaStep* steps;
  float* most;
  int dk, dv, key_stride, value_stride;
  int step = 0, brought = 0, used = 0;
  bool transition = false;
  float history_scale[kHalfStages] = {};  // of contents that are no halves

  __device__ __forceinline__ void bring() {
    if (step >= 0 && steps[step].level < 0) step = -1;
    if (step >= 0) {
      const DeltaStep& now = steps[step];
      char* tile = tiles + brought % kHalfStages * kHalfTile;
      if (transition) {
        bring_halves(tile, now.transition, dk, key_stride);
      } else if (now.content_scale) {
        bring_halves(tile, now.content.data, dk, value_stride);
      } else {
        history_scale[brought % kHalfStages] = put_matrix(tile, now.content, now.stride, dk, dv, most);
      }
      ++brought;
      transition = !transition && now.transition;
      if (!transition) ++step;
    }
    commit_copies();
  }
  // The next tile, and brings one more in the place of the last.
  __device__ __forceinline__ const char* next() {
    wait_copies<kHalfStages - 2>();
    __syncthreads();
    bring();
    return tiles + used++ % kHalfStages * kHalfTile;
  }
};

// 128 x 128 elements by a block: a warp has rows 32 (warp / 2) ... and columns 64 (warp % 2) ... of the product.
struct HalfSum {
  RowSum<4> rows[2];

  // = A B for a depth of 16 `steps`. The next fragments come while these are being multiplied.
  template <Stored kLeft, Stored kRight>
  __device__ __forceinline__ void multiply(const char* left_tile, const char* right_tile, int steps) {
    constexpr bool kLeftAlong = kLeft == Stored::kAlongDepth, kRightAlong = kRight == Stored::kAlongDepth;
    const int warp = warp_number();
    const SharedAddress left = left_address<kLeft>(left_tile), right = right_address<kRight>(right_tile);
    const int m16 = warp / 2 * 2, n16 = warp % 2 * 4;
    unsigned a[2][2][4], b[2][4];
    const auto fetch_left = [&](int k, int i) {
      load_fragment<!kLeftAlong>(a[k % 2][i],
                                 kLeftAlong ? block_address(left, m16 + i, k) : block_address(left, k, m16 + i));
    };
    const auto fetch_right = [&](int t) {
      load_fragment<!kRightAlong>(
          b[t % 2], kRightAlong ? block_address(right, n16 + t % 4, t / 4) : block_address(right, t / 4, n16 + t % 4));
    };
    rows[0].clear(), rows[1].clear();
    fetch_left(0, 0);
    fetch_left(0, 1);
    fetch_right(0);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k >= steps) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int next = 4 * k + j + 1;
        if (next < 32) fetch_right(next);
        if (j >= 2 && k < 7) fetch_left(k + 1, j - 2);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          multiply_halves(rows[i].c[2 * j], a[k % 2][i], b[j % 2][0], b[j % 2][1]);
          multiply_halves(rows[i].c[2 * j + 1], a[k % 2][i], b[j % 2][2], b[j % 2][3]);
        }
      }
    }
  }
  // = f sum + g old, in units of `unit`, which is returned: neither part overflows. `old`: a matrix of halves.
  __device__ __forceinline__ float add_halves(float f, const unsigned short* old, float g, int rows_count, int stride) {
    const float unit = fmaxf(f * 0x1p22f, g);
    const float by_sum = unit > 0 ? f / unit : 0.0f, by_old = unit > 0 ? g / unit : 0.0f;
    each_pair([&](int m, int n, float& x, float& y) {
      float2 before = make_float2(0, 0);
      if (m < rows_count && n < stride) before = unpack_halves(*reinterpret_cast<const unsigned*>(old + m * stride + n));
      x = by_sum * x + by_old * before.x, y = by_sum * y + by_old * before.y;
    });
    return unit;
  }
  // f(row, column, x, y) for neighbours in a row.
  template <class F>
  __device__ __forceinline__ void each_pair(F f) {
    const int warp = warp_number(), lane = static_cast<int>(threadIdx.x % 32);
    const int row = 32 * (warp / 2) + lane / 4, column = 64 * (warp % 2) + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 8; ++j)
          f(row + 16 * i + 8 * half, column + 8 * j, rows[i].c[j][2 * half], rows[i].c[j][2 * half + 1]);
  }
  // Writes the sum, times `by`, as a matrix of halves beside its scale. Contains barriers.
  __device__ __forceinline__ void put(float by, unsigned short* out, float* scale_out, int rows_count, int stride,
                                      float* most) {
    float biggest = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) biggest = fmaxf(biggest, fabsf(rows[i].c[j][q]));
    const HalfScale scale(block_max(biggest, most));
    if (threadIdx.x == 0) *scale_out = scale.back * by;
    const int warp = warp_number(), lane = static_cast<int>(threadIdx.x % 32);
    const int row = 32 * (warp / 2) + lane / 4, column = 64 * (warp % 2) + 8 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int group = 0; group < 2; ++group)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto pair = [&](int j) {
            return f16_pair(rows[i].c[4 * group + j][2 * half] * scale.to,
                            rows[i].c[4 * group + j][2 * half + 1] * scale.to);
          };
          const uint4 x = exchange_pieces(pair(0), pair(1), pair(2), pair(3));
          const int r = row + 16 * i + 8 * half, c = column + 32 * group;
          if (r < rows_count && c < stride) *reinterpret_cast<uint4*>(out + r * stride + c) = x;
        }
  }
};

// Two columns of a row.
__device__ __forceinline__ void put_pair(void* row, int32_t dtype, int column, int columns, float x, float y,
                                         bool adds = false) {
  put_element(row, dtype, column, x, adds);
  if (column + 1 < columns) put_element(row, dtype, column + 1, y, adds);
}

// Queries as nodes see them, and what they read inside their chunk. row[i] < 0: none.
__device__ __forceinline__ void get_queries(const DeltaHalfScratch& scratch, const int64_t (&row)[2], int64_t head,
                                            WalkingRows& rows, WideRows& sum) {
  const int lane = threadIdx.x % 32, key_stride = static_cast<int>(scratch.key_stride),
            value_stride = static_cast<int>(scratch.value_stride);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t place = scratch.place(row[i] < 0 ? 0 : row[i], head);
    const unsigned short *x = scratch.query + place * key_stride, *out = scratch.output + place * value_stride;
    rows.scale[i] = row[i] < 0 ? 0.0f : scratch.query_scale[place];
    const float output_scale = row[i] < 0 ? 0.0f : scratch.output_scale[place];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int column = 8 * j + 2 * (lane % 4);
      rows.x[j / 2][2 * (j % 2) + i] =
          row[i] >= 0 && 8 * j < key_stride ? *reinterpret_cast<const unsigned*>(x + column) : 0;
      const float2 both =
          unpack_halves(row[i] >= 0 && 8 * j < value_stride ? *reinterpret_cast<const unsigned*>(out + column) : 0);
      sum.c[j][2 * i] = both.x * output_scale, sum.c[j][2 * i + 1] = both.y * output_scale;
    }
  }
}

// Rows of a tensor.
__device__ __forceinline__ void put_outputs(const WideRows& sum, const View& y, int64_t sequence, const int64_t (&row)[2],
                                            int64_t head, int dv) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    void* to = row[i] < 0 ? nullptr : y.at(sequence, row[i], head);
    const bool plain = y.dtype != LLA_F32 && !y.accumulate && dv % 8 == 0 && (reinterpret_cast<uintptr_t>(to) & 15) == 0;
    const auto pack = [&](int j) {
      const float p = sum.c[j][2 * i], q = sum.c[j][2 * i + 1];
      return y.dtype == LLA_BF16 ? bf16_pair(p, q) : f16_pair(p, q);
    };
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      const uint4 x = exchange_pieces(pack(4 * group), pack(4 * group + 1), pack(4 * group + 2), pack(4 * group + 3));
      const int column = 32 * group + 8 * (lane % 4);
      if (to && plain && column < dv) *reinterpret_cast<uint4*>(static_cast<unsigned short*>(to) + column) = x;
    }
    if (to && !plain) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int column = 8 * j + 2 * (lane % 4);
        if (column < dv) put_pair(to, y.dtype, column, dv, sum.c[j][2 * i], sum.c[j][2 * i + 1], y.accumulate);
      }
    }
  }
}

}  // namespace lla::cuda
