// SPDX-License-Identifier: Apache-2.0
// The walks of queries of delta_rule_gradient_walk.cu on halves: forth, X <- X Phi, then back, dX = lambda dy N^T + dX'
// Phi^T. A block works on two neighbouring chunks, a warp on sixteen rows, as in delta_rule_half_read.cu.
#include "cuda/portable/delta_rule_half_gradient.h"
#include "cuda/portable/delta_rule_half_walk.h"

namespace lla::cuda {

namespace {

constexpr size_t kBytes = kHalfStages * kHalfTile + kMostHalfSteps * sizeof(DeltaStep) + 64;

// The matrices of the way forth, then those of the way back.
struct WalkStages {
  char* tiles;
  const DeltaStep* steps;
  int count, moves, dk, key_stride, value_stride;
  int step = 0, brought = 0, used = 0;
  bool back = false, transition = true;

  __device__ __forceinline__ void bring() {
    if (!back && step >= moves) back = true, step = count - 1, transition = false;
    if (step >= 0) {
      char* tile = tiles + brought++ % kHalfStages * kHalfTile;
      if (transition)
        bring_halves(tile, steps[step].transition, dk, key_stride);
      else
        bring_halves(tile, steps[step].content.data, dk, value_stride);
      if (!back) {
        ++step;
      } else {
        transition = !transition && steps[step].transition;
        if (!transition) --step;
      }
    }
    commit_copies();
  }
  __device__ __forceinline__ const char* next() {
    wait_copies<kHalfStages - 2>();
    __syncthreads();
    bring();
    return tiles + used++ % kHalfStages * kHalfTile;
  }
};

// Rows to scratch memory in bf16; null: nowhere.
__device__ __forceinline__ void put_bf16(const WideRows& sum, unsigned short* row0, unsigned short* row1, int stride) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int group = 0; group < 4; ++group)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto pair = [&](int j) { return bf16_pair(sum.c[4 * group + j][2 * half], sum.c[4 * group + j][2 * half + 1]); };
      const uint4 x = exchange_pieces(pair(0), pair(1), pair(2), pair(3));
      unsigned short* to = half ? row1 : row0;
      if (to && 32 * group + 8 * q < stride) *reinterpret_cast<uint4*>(to + 32 * group + 8 * q) = x;
    }
}

__global__ void __launch_bounds__(kWideThreads, 1)
    delta_rule_half_walks(DeltaInputs in, DeltaHalfGradients scratch, View dy, int64_t most_pairs) {
  char* tiles = shared_memory();
  DeltaStep* steps = reinterpret_cast<DeltaStep*>(tiles + kHalfStages * kHalfTile);
  const DeltaHalfScratch& nodes = scratch.nodes;
  const int64_t heads = nodes.pass_heads, tasks = in.batch.count * most_pairs * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_stride = static_cast<int>(nodes.key_stride), value_stride = static_cast<int>(nodes.value_stride);
  const int warp = warp_number(), lane = static_cast<int>(threadIdx.x % 32), column0 = 2 * (lane % 4);
  const int key_steps = (dk + 15) / 16, value_steps = (dv + 15) / 16;

  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = nodes.first_head + task % heads, number = task / heads % most_pairs;
    const Sequence& sequence = in.batch.sequences[task / heads / most_pairs];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t even = ((chunks.range.first >> 1) + number) << 1, after = chunks.range.first + chunks.range.count;
    if (even >= after) continue;
    const ChunkSpan low(sequence, in.chunk, even), high(sequence, in.chunk, even + 1);
    const bool has_low = even >= chunks.range.first && low.hi > low.lo, has_high = even + 1 < after && high.hi > high.lo;
    if (!has_low && !has_high) continue;
    const bool odd = warp >= 4;
    const ChunkSpan& span = odd ? high : low;
    const bool has = odd ? has_high : has_low;
    int64_t row[2];  // of the two rows of this lane; -1: none
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 16 * (warp % 4) + lane / 4 + 8 * i;
      row[i] = has && r >= span.lo && r < span.hi ? span.row(sequence, r) : -1;
    }

    int count = 0, moves = 0;
    {
      DeltaWalk walk(in, nodes, chunks, head, has_high ? even + 1 : even, false);
      DeltaStep step;
      while (walk.next(&step)) {
        if (threadIdx.x == 0) steps[count] = step;
        ++count;
        if (step.transition) ++moves;
      }
    }
    __syncthreads();
    WalkStages stages{tiles, steps, count, moves, dk, key_stride, value_stride};
    for (int i = 0; i < kHalfStages - 1; ++i) stages.bring();
    // The even chunk does not read the odd one's neighbour, itself.
    const int before = !odd && has_high && count > 0 && steps[0].level == 0 ? 1 : 0;
    const auto x_row = [&](int i, int64_t step) { return row[i] < 0 ? nullptr : scratch.x_at(step, row[i], head); };

    WalkingRows rows;
    WideRows sum, product;
    float* lambda[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t place = nodes.place(row[i] < 0 ? 0 : row[i], head);
      const unsigned short* x = nodes.query + place * key_stride;
      rows.scale[i] = row[i] < 0 ? 0.0f : nodes.query_scale[place];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        unsigned& both = rows.x[j / 2][2 * (j % 2) + i];
        both = row[i] >= 0 && 8 * j < key_stride ? *reinterpret_cast<const unsigned*>(x + 8 * j + column0) : 0;
        const float2 values = unpack_halves(both);
        sum.c[j][2 * i] = values.x * rows.scale[i], sum.c[j][2 * i + 1] = values.y * rows.scale[i];
      }
      lambda[i] = scratch.lambda + place * scratch.levels;
      if (row[i] >= 0 && lane % 4 == 0) {
#pragma unroll 1
        for (int n = 0; n < scratch.levels; ++n) lambda[i][n] = 0;
      }
    }
    put_bf16(sum, x_row(0, 0), x_row(1, 0), key_stride);
#pragma unroll 1
    for (int move = 0; move < moves; ++move) {
      const float scale = *steps[move].transition_scale;
      const char* tile = stages.next();
      if (move < before) continue;
      rows.multiply<Stored::kByDepth>(product, tile, key_steps);
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) product.c[j][q] *= rows.scale[q / 2] * scale;
      put_bf16(product, x_row(0, move + 1 - before), x_row(1, move + 1 - before), key_stride);
      rows.set(product, 1, 1);
    }

    // Back.
    WalkingRows given;  // dy
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned short* from =
          row[i] < 0 ? nullptr : static_cast<const unsigned short*>(dy.at(sequence.index, row[i], head));
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const int column = 8 * j + column0 + q;
          const unsigned bits = from && column < dv ? from[column] : 0;
          sum.c[j][2 * i + q] = dy.dtype == LLA_BF16 ? from_bf16(bits) : from_f16(bits);
        }
    }
    given.set(sum, 1, 1);
    rows.scale[0] = rows.scale[1] = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k)
#pragma unroll
      for (int n = 0; n < 4; ++n) rows.x[k][n] = 0;
#pragma unroll 1
    for (int n = count - 1; n >= 0; --n) {
      const DeltaStep& step = steps[n];
      float weight[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weight[i] = row[i] < 0 ? 0.0f
                    : step.column < 0
                        ? 1.0f
                        : load_element(in.lambda.at(sequence.index, row[i], head), in.lambda.dtype, step.column);
      }
      const float content_scale = *step.content_scale, transition_scale = step.transition ? *step.transition_scale : 0.0f;
      const char* tile = stages.next();
      if (n >= before) {
        given.multiply<Stored::kAlongDepth>(sum, tile, value_steps);
        const float f[2] = {given.scale[0] * content_scale, given.scale[1] * content_scale};
        if (step.column >= 0) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const unsigned short* x = x_row(i, n - before);
            float dot = 0;
#pragma unroll
            for (int j = 0; j < 16; ++j) {
              const unsigned both = x && 8 * j < key_stride ? *reinterpret_cast<const unsigned*>(x + 8 * j + column0) : 0;
              dot += sum.c[j][2 * i] * from_bf16(both & 0xffffu) + sum.c[j][2 * i + 1] * from_bf16(both >> 16);
            }
            dot += __shfl_xor_sync(kAllLanes, dot, 1);
            dot += __shfl_xor_sync(kAllLanes, dot, 2);
            if (row[i] >= 0 && lane % 4 == 0) lambda[i][step.column] += f[i] * dot;
          }
        }
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) sum.c[j][q] *= weight[q / 2] * f[q / 2];
      }
      if (step.transition) {
        tile = stages.next();
        if (n >= before) {
          rows.multiply<Stored::kAlongDepth>(product, tile, key_steps);
#pragma unroll
          for (int j = 0; j < 16; ++j)
#pragma unroll
            for (int q = 0; q < 4; ++q) sum.c[j][q] += rows.scale[q / 2] * transition_scale * product.c[j][q];
        }
      }
      if (n < before) continue;
      rows.set(sum, 1, 1);
      if (n > before) {
        put_bf16(sum, row[0] < 0 ? nullptr : scratch.dx_at(n - before, row[0], head),
                 row[1] < 0 ? nullptr : scratch.dx_at(n - before, row[1], head), key_stride);
      }
    }
    wait_copies<0>();
    // What the first node's reader has given, or zero.
    unsigned short* seen[2] = {row[0] < 0 ? nullptr : scratch.seen + nodes.place(row[0], head) * key_stride,
                               row[1] < 0 ? nullptr : scratch.seen + nodes.place(row[1], head) * key_stride};
    each_piece(rows.x, [&](int half, int piece, uint4 x) {
      if (seen[half] && 8 * piece < key_stride) *reinterpret_cast<uint4*>(seen[half] + 8 * piece) = x;
    });
    if (lane % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (row[i] >= 0) scratch.seen_scale[nodes.place(row[i], head)] = rows.scale[i];
    }
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_half_walks(const DeltaInputs& in, const DeltaHalfGradients& scratch, const View& dy, void* stream) {
  const int64_t most_pairs = in.most_chunks() / 2 + 1;
  return launch(delta_rule_half_walks, in.batch.count * most_pairs * scratch.nodes.pass_heads, kWideThreads, kBytes, stream,
                in, scratch, dy, most_pairs);
}

int32_t load_delta_half_walks() { return load_kernel(delta_rule_half_walks); }

}  // namespace lla::cuda
