// SPDX-License-Identifier: Apache-2.0
// y = x W^T + bias for sequences of few rows: the weight streams from memory straight into fragments.
#include <algorithm>

#include "cuda/portable/projection.h"

namespace lla::cuda {
namespace {

constexpr int kRows = 16, kOutputs = 16;  // of a block
constexpr int kWarps = 8;                 // share the depth: a warp has every eighth step of 32
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

struct FewTile {
  float sums[kWarps][kRows][kOutputs + 1];
  const Sequence* sequences[kRows];
};

// The sequence of a row, if it has few.
__device__ __forceinline__ const Sequence* few_at(const BatchView& batch, int64_t row) {
  const Sequence* sequence = sequence_of_row(batch, row);
  return sequence && has_few_rows(*sequence) ? sequence : nullptr;
}

// Outputs first_output ... of rows first_row ... Ends with a barrier.
template <bool kExact>
__device__ __forceinline__ void multiply_few(const Projection& p, FewTile& tile, int64_t first_row, int64_t first_output) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < kRows) tile.sequences[threadIdx.x] = few_at(p.batch, first_row + threadIdx.x);
  __syncthreads();
  const void *x_rows[2], *w_rows[2];  // of this lane: rows lane / 4 and lane / 4 + 8 of either operand
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = lane / 4 + 8 * i;
    x_rows[i] = tile.sequences[r] ? p.x.at(tile.sequences[r]->index, first_row + r, 0) : nullptr;
    w_rows[i] = first_output + r < p.outputs ? p.weight.at(first_output + r) : nullptr;
  }
  float c[2][4] = {};
#pragma unroll 2
  for (int64_t step = 32 * warp; step < p.inputs; step += 32 * kWarps) {
    const int64_t k = step + 8 * (lane % 4);
    Eight x[2], w[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) w[i].fetch(w_rows[i], p.weight.dtype, k, p.inputs);
#pragma unroll
    for (int i = 0; i < 2; ++i) x[i].fetch(x_rows[i], p.x.dtype, k, p.inputs);
    float xs[2][8], ws[2][8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[i].widen(p.x.dtype, xs[i]);
      w[i].widen(p.weight.dtype, ws[i]);
    }
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
      for (int n = 0; n < 2; ++n) {
        unsigned fb[2], rb[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float value = ws[n][2 * q + i];
          fb[i] = to_tf32(value);
          rb[i] = to_tf32(value - __uint_as_float(fb[i]));
        }
        if constexpr (kExact) {
          multiply_fragment(c[n], ra, fb);
          multiply_fragment(c[n], fa, rb);
        }
        multiply_fragment(c[n], fa, fb);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) tile.sums[warp][lane / 4 + 8 * (i / 2)][8 * n + 2 * (lane % 4) + i % 2] = c[n][i];
  __syncthreads();
  const int r = threadIdx.x / kOutputs, column = threadIdx.x % kOutputs;
  const int64_t o = first_output + column;
  if (tile.sequences[r] && o < p.outputs) {
    float sum = tile.sums[0][r][column];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += tile.sums[w][r][column];
    if (p.bias.present()) sum += load_element(p.bias.data, p.bias.dtype, o);
    put_element(p.y.at(tile.sequences[r]->index, first_row + r, 0), p.y.dtype, o, sum, p.y.accumulate);
  }
  __syncthreads();
}

template <bool kExact>
__global__ void __launch_bounds__(kThreadsOfFew) projection_few(Projection p, int64_t output_blocks, int64_t tasks) {
  __shared__ FewTile tile;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t row_block = task / output_blocks;
    multiply_few<kExact>(p, tile, row_block * kRows, (task - row_block * output_blocks) * kOutputs);
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
  __shared__ FewTile tile;
  __shared__ unsigned found[kWarps];
  for (int64_t task = blockIdx.x; task < output_blocks * shares; task += gridDim.x) {
    const int64_t share = task / output_blocks, block = task - share * output_blocks;
    int64_t count = 0;
    for (int64_t row = 0; row < p.batch.total_rows; row += kThreadsOfFew * kRows) {
      const unsigned of_warp = __ballot_sync(0xffffffffu, any_few_at(p.batch, row + threadIdx.x * kRows));
      if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = of_warp;
      __syncthreads();
      for (int w = 0; w < kWarps; ++w) {
        for (unsigned tiles = found[w]; tiles; tiles &= tiles - 1) {
          const int i = 32 * w + __ffsll(static_cast<long long>(tiles)) - 1;
          if (count++ % shares == share) multiply_few<kExact>(p, tile, row + i * kRows, block * kOutputs);
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace

int32_t launch_projection_few(const Projection& p, bool among_many, void* stream) {
  const int64_t output_blocks = tiles_of(p.outputs, kOutputs);
  if (among_many) {
    const auto kernel = exact(p.x, p.weight) ? projection_few_among_many<true> : projection_few_among_many<false>;
    const int64_t shares = std::min<int64_t>(p.batch.count, 8);
    return cuda::launch(kernel, output_blocks * shares, kThreadsOfFew, 0, stream, p, output_blocks, shares);
  }
  const int64_t tasks = tiles_of(p.batch.total_rows, kRows) * output_blocks;
  const auto kernel = exact(p.x, p.weight) ? projection_few<true> : projection_few<false>;
  return cuda::launch(kernel, tasks, kThreadsOfFew, 0, stream, p, output_blocks, tasks);
}

int32_t load_projection_few() {
  return first_failure([] { return load_kernel(projection_few<true>); }, [] { return load_kernel(projection_few<false>); },
                       [] { return load_kernel(projection_few_among_many<true>); },
                       [] { return load_kernel(projection_few_among_many<false>); });
}

}  // namespace lla::cuda
