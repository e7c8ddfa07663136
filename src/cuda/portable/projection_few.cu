// SPDX-License-Identifier: Apache-2.0
// y = x W^T + bias for sequences of few rows: the weight streams from memory straight into fragments.
#include <algorithm>

#include "cuda/portable/projection.h"

namespace lla::cuda {
namespace {

constexpr int kRows = 16, kOutputs = 8;  // of a tile: of one product of fragments
constexpr int kOutputTiles = 2;          // of a block
constexpr int kWarps = 8;                // share the depth: a warp has every eighth step of 32
constexpr int kThreadsOfFew = 32 * kWarps;

// Elements 8 * (lane % 4) ... + 7 of a step. Which index of the depth a fragment's column stands for is free, as long as
// both operands agree: the q-th product takes elements 2 q and 2 q + 1 of every lane.
struct Eight {
  uint4 low, high;

  __device__ __forceinline__ void fetch(const void* row, int32_t dtype, int64_t k, int64_t depth) {
    low = row && k < depth ? load4_raw(row, dtype, k, depth - k) : uint4{0, 0, 0, 0};
    high = row && k + 4 < depth ? load4_raw(row, dtype, k + 4, depth - k - 4) : uint4{0, 0, 0, 0};
  }
  __device__ __forceinline__ void widen(int32_t dtype, float (&x)[8]) const {
    const float4 a = widen4(low, dtype), b = widen4(high, dtype);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  }
};

// The sequence of a row, if it has few.
__device__ __forceinline__ const Sequence* few_at(const BatchView& batch, int64_t row) {
  const Sequence* sequence = sequence_of_row(batch, row);
  return sequence && has_few_rows(*sequence) ? sequence : nullptr;
}

// A block's tiles. How many there are makes no difference to an element's sum, but the weight's elements are read once for
// all tiles of rows. More than two, or more of outputs, keep too few blocks busy.
template <int kRowTiles>
struct FewTiles {
  float sums[kWarps][kRows][kOutputTiles * kOutputs + 1];
  const void* from[kRowTiles * kRows];
  void* to[kRowTiles * kRows];
};

// Outputs first_output ... of rows first_row ... Ends with a barrier.
template <bool kExact, int kRowTiles>
__device__ __forceinline__ void multiply_few(const Projection& p, FewTiles<kRowTiles>& tiles, int64_t first_row,
                                             int64_t first_output) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < kRowTiles * kRows) {
    const int64_t row = first_row + threadIdx.x;
    const Sequence* sequence = few_at(p.batch, row);
    tiles.from[threadIdx.x] = sequence ? p.x.at(sequence->index, row, 0) : nullptr;
    tiles.to[threadIdx.x] = sequence ? p.y.at(sequence->index, row, 0) : nullptr;
  }
  __syncthreads();
  const void* w_rows[kOutputTiles];  // of this lane: one of each tile
#pragma unroll
  for (int n = 0; n < kOutputTiles; ++n) {
    const int64_t output = first_output + n * kOutputs + lane / 4;
    w_rows[n] = output < p.outputs ? p.weight.at(output) : nullptr;
  }
  float c[kRowTiles][kOutputTiles][4] = {};
#pragma unroll(kRowTiles == 1 ? 2 : 1)
  for (int64_t step = 32 * warp; step < p.inputs; step += 32 * kWarps) {
    const int64_t k = step + 8 * (lane % 4);
    float ws[kOutputTiles][8];
    {
      Eight w[kOutputTiles];
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) w[n].fetch(w_rows[n], p.weight.dtype, k, p.inputs);
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) w[n].widen(p.weight.dtype, ws[n]);
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      Eight x[2];  // of rows lane / 4 and lane / 4 + 8
      float xs[2][8];
#pragma unroll
      for (int i = 0; i < 2; ++i) x[i].fetch(tiles.from[m * kRows + lane / 4 + 8 * i], p.x.dtype, k, p.inputs);
#pragma unroll
      for (int i = 0; i < 2; ++i) x[i].widen(p.x.dtype, xs[i]);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        unsigned fa[4], ra[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = xs[i % 2][2 * q + i / 2];
          fa[i] = to_tf32(value);
          ra[i] = to_tf32(value - __uint_as_float(fa[i]));
        }
#pragma unroll
        for (int n = 0; n < kOutputTiles; ++n) {
          unsigned fb[2], rb[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float value = ws[n][2 * q + i];
            fb[i] = to_tf32(value);
            rb[i] = to_tf32(value - __uint_as_float(fb[i]));
          }
          if constexpr (kExact) {
            multiply_fragment(c[m][n], ra, fb);
            multiply_fragment(c[m][n], fa, rb);
          }
          multiply_fragment(c[m][n], fa, fb);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kOutputTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        tiles.sums[warp][lane / 4 + 8 * (i / 2)][kOutputs * n + 2 * (lane % 4) + i % 2] = c[m][n][i];
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kOutputTiles * kOutputs; i += kThreadsOfFew) {
      const int r = i / (kOutputTiles * kOutputs), column = i % (kOutputTiles * kOutputs);
      const int64_t o = first_output + column;
      void* const to = tiles.to[m * kRows + r];
      if (!to || o >= p.outputs) continue;
      float sum = tiles.sums[0][r][column];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) sum += tiles.sums[w][r][column];
      if (p.bias.present()) sum += load_element(p.bias.data, p.bias.dtype, o);
      put_element(to, p.y.dtype, o, sum, p.y.accumulate);
    }
    __syncthreads();
  }
}

template <bool kExact, int kRowTiles>
__global__ void __launch_bounds__(kThreadsOfFew) projection_few(Projection p, int64_t output_blocks, int64_t tasks) {
  __shared__ FewTiles<kRowTiles> tiles;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t row_block = task / output_blocks, output_block = task - row_block * output_blocks;
    multiply_few<kExact>(p, tiles, row_block * kRowTiles * kRows, output_block * kOutputTiles * kOutputs);
  }
}

// Whether one of kRows rows has few beside it: mostly one look, at the long sequence that holds them all.
__device__ __forceinline__ bool any_few_at(const BatchView& batch, int64_t first_row) {
  const int64_t end = min(first_row + kRows, batch.total_rows);
  for (int64_t row = first_row; row < end;) {
    const Sequence* sequence = sequence_of_row(batch, row);
    if (sequence && has_few_rows(*sequence)) return true;
    row = sequence ? sequence->row_begin + sequence->rows : row + 1;
  }
  return false;
}

// The blocks of some outputs share the tiles of rows: block s of `shares` has every shares-th one that has such rows. A
// thread looks at one tile.
template <bool kExact>
__global__ void __launch_bounds__(kThreadsOfFew)
    projection_few_among_many(Projection p, int64_t output_blocks, int64_t shares) {
  __shared__ FewTiles<1> tiles;
  __shared__ unsigned found[kWarps];
  for (int64_t task = blockIdx.x; task < output_blocks * shares; task += gridDim.x) {
    const int64_t share = task / output_blocks, block = task - share * output_blocks;
    int64_t count = 0;
    for (int64_t row = 0; row < p.batch.total_rows; row += kThreadsOfFew * kRows) {
      const unsigned of_warp = __ballot_sync(0xffffffffu, any_few_at(p.batch, row + threadIdx.x * kRows));
      if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = of_warp;
      __syncthreads();
      for (int w = 0; w < kWarps; ++w) {
        for (unsigned left = found[w]; left; left &= left - 1) {
          const int i = 32 * w + __ffsll(static_cast<long long>(left)) - 1;
          if (count++ % shares == share) multiply_few<kExact>(p, tiles, row + i * kRows, block * kOutputTiles * kOutputs);
        }
      }
      __syncthreads();
    }
  }
}

template <int kRowTiles>
int32_t launch_tiles(const Projection& p, void* stream) {
  const int64_t output_blocks = tiles_of(p.outputs, kOutputTiles * kOutputs);
  const int64_t tasks = tiles_of(p.batch.total_rows, kRowTiles * kRows) * output_blocks;
  const auto kernel = exact(p.x, p.weight) ? projection_few<true, kRowTiles> : projection_few<false, kRowTiles>;
  return cuda::launch(kernel, tasks, kThreadsOfFew, 0, stream, p, output_blocks, tasks);
}
template <int kRowTiles>
int32_t load_tiles() {
  return first_failure([] { return load_kernel(projection_few<true, kRowTiles>); },
                       [] { return load_kernel(projection_few<false, kRowTiles>); });
}

}  // namespace

int32_t launch_projection_few(const Projection& p, bool among_many, void* stream) {
  if (among_many) {
    const int64_t output_blocks = tiles_of(p.outputs, kOutputTiles * kOutputs), shares = std::min<int64_t>(p.batch.count, 8);
    const auto kernel = exact(p.x, p.weight) ? projection_few_among_many<true> : projection_few_among_many<false>;
    return cuda::launch(kernel, output_blocks * shares, kThreadsOfFew, 0, stream, p, output_blocks, shares);
  }
  return p.batch.total_rows <= kRows ? launch_tiles<1>(p, stream) : launch_tiles<2>(p, stream);
}

int32_t load_projection_few() {
  return first_failure([] { return load_tiles<1>(); }, [] { return load_tiles<2>(); },
                       [] { return load_kernel(projection_few_among_many<true>); },
                       [] { return load_kernel(projection_few_among_many<false>); });
}

}  // namespace lla::cuda
