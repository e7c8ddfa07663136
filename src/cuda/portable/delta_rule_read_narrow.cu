// SPDX-License-Identifier: Apache-2.0
// delta_rule_read.cu for key and value dimensions of at most 128 in fp32; types of 16 bits have delta_rule_half_read.cu. A
// block works on two neighbouring chunks: all that the even one reads the odd one reads as well, and one node more, the even
// one's own.
#include "cuda/portable/delta_rule_wide.h"

namespace lla::cuda {

namespace {

constexpr int kMostSteps = 64;
constexpr int kStage = kWideDepth * kWideAcross;
constexpr int kFloats = kWide * kWideAlong + kWideBuffers * kStage + kWide;
constexpr size_t kBytes = kFloats * sizeof(float) + kMostSteps * sizeof(DeltaStep);

__global__ void __launch_bounds__(kWideThreads, 1)
    delta_rule_read_narrow(DeltaInputs in, DeltaScratch scratch, View y, int64_t most_pairs) {
  float* x = reinterpret_cast<float*>(shared_memory());  // [128][kWideAlong]
  float* stages = x + kWide * kWideAlong;
  float* weights = stages + kWideBuffers * kStage;  // [128]
  DeltaStep* steps = reinterpret_cast<DeltaStep*>(weights + kWide);
  const int64_t heads = scratch.pass_heads, tasks = in.batch.count * most_pairs * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int parts = (dk + kWideDepth - 1) / kWideDepth;
  const int c = 4 * static_cast<int>(threadIdx.x % 32), first_row = static_cast<int>(threadIdx.x / 32);

  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.first_head + task % heads, number = task / heads % most_pairs;
    const Sequence& sequence = in.batch.sequences[task / heads / most_pairs];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t even = ((chunks.range.first >> 1) + number) << 1, after = chunks.range.first + chunks.range.count;
    if (even >= after) continue;
    // Row r of the block is row r % 64 of chunk even + r / 64.
    const ChunkSpan low(sequence, in.chunk, even), high(sequence, in.chunk, even + 1);
    const bool has_low = even >= chunks.range.first && low.hi > low.lo, has_high = even + 1 < after && high.hi > high.lo;
    if (!has_low && !has_high) continue;
    const auto row_of = [&](int r) -> int64_t {  // -1: none
      if (r < kTile) return has_low && r >= low.lo && r < low.hi ? low.row(sequence, r) : -1;
      r -= kTile;
      return has_high && r >= high.lo && r < high.hi ? high.row(sequence, r) : -1;
    };

    {  // X, and the list of nodes
      DeltaWalk walk(in, scratch, chunks, head, has_high ? even + 1 : even, false);
      DeltaStep step;
#pragma unroll 4
      for (int r = first_row; r < kWide; r += 8) {
        const int64_t row = row_of(r);
        const int bytes = row < 0 || c >= dk ? 0 : dk - c < 4 ? 4 * (dk - c) : 16;
        copy_async16(x + r * kWideAlong + c, bytes ? scratch.query_at(row, head) + c : scratch.query, bytes);
      }
      int count = 0;
      while (walk.next(&step)) {
        if (threadIdx.x == 0) steps[count] = step;
        ++count;
      }
      if (threadIdx.x == 0) steps[count].level = -1;
    }
    __syncthreads();

    // Tiles of the nodes' matrices, one after the other; `ahead` is the next one to bring.
    struct Place {
      int step = 0, part = 0;
      bool transition = false;
    } ahead;
    int brought = 0;
    const auto bring = [&] {
      if (ahead.step >= 0 && steps[ahead.step].level < 0) ahead.step = -1;
      if (ahead.step >= 0) {
        const DeltaStep& step = steps[ahead.step];
        const FloatMatrix matrix = ahead.transition ? FloatMatrix{{step.transition, LLA_F32}, scratch.key_stride, dk, dk}
                                                    : FloatMatrix{step.content, step.stride, dk, dv};
        bring_tile<kWideDepth, kWide>(stages + brought % kWideBuffers * kStage, kWideAcross, matrix, ahead.part * kWideDepth,
                                      0);
        ++brought;
        if (++ahead.part == parts) {
          ahead.part = 0;
          ahead.transition = !ahead.transition && step.transition;
          if (!ahead.transition) ++ahead.step;
        }
      }
      commit_copies();
    };
    bring();
    bring();
    WideSum sum;
    sum.each_pair([&](int m, int n, float& p, float& q) {
      const int64_t row = row_of(m);
      float2 both = make_float2(0, 0);
      if (row >= 0 && n < dv) both = *reinterpret_cast<const float2*>(scratch.output_at(row, head) + n);
      p = both.x, q = both.y;
    });
    int used = 0;
    for (int s = 0; steps[s].level >= 0; ++s) {
      const DeltaStep& step = steps[s];
      const bool reads = step.level > 0 || threadIdx.x >= kWideThreads / 2;  // warps of the odd chunk read its neighbour
      if (threadIdx.x < kWide) {
        const int64_t row = row_of(threadIdx.x);
        float weight = 0;
        if (row >= 0) {
          weight =
              step.column < 0 ? 1.0f : load_element(in.lambda.at(sequence.index, row, head), in.lambda.dtype, step.column);
        }
        weights[threadIdx.x] = weight;
      }
      for (int part = 0; part < parts; ++part) {
        wait_copies<1>();
        __syncthreads();
        bring();
        const float* tile = stages + used++ % kWideBuffers * kStage;
        const float* from = x + part * kWideDepth;
        if (!reads) continue;
        sum.add<true>(
            kWideDepth, [&](int m, int k) { return weights[m] * from[m * kWideAlong + k]; },
            [&](int k, int n) { return tile[k * kWideAcross + n]; });
      }
      if (!step.transition) {
        __syncthreads();  // the weights have been read
        continue;
      }
      WideSum next;
      next.clear();
      for (int part = 0; part < parts; ++part) {
        wait_copies<1>();
        __syncthreads();
        bring();
        const float* tile = stages + used++ % kWideBuffers * kStage;
        const float* from = x + part * kWideDepth;
        if (!reads) continue;
        next.add<true>(
            kWideDepth, [&](int m, int k) { return from[m * kWideAlong + k]; },
            [&](int k, int n) { return tile[k * kWideAcross + n]; });
      }
      __syncthreads();
      if (reads) {
        next.each_pair(
            [&](int m, int n, float p, float q) { *reinterpret_cast<float2*>(x + m * kWideAlong + n) = make_float2(p, q); });
      }
    }
    wait_copies<0>();
    __syncthreads();
    sum.each_pair(
        [&](int m, int n, float p, float q) { *reinterpret_cast<float2*>(x + m * kWideAlong + n) = make_float2(p, q); });
    __syncthreads();
    for (int r = first_row; r < kWide; r += 8) {
      const int64_t row = row_of(r);
      if (row >= 0 && c < dv)
        store4({y.at(sequence.index, row, head), y.dtype}, c, dv - c,
               *reinterpret_cast<const float4*>(x + r * kWideAlong + c));
    }
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_read_narrow(const DeltaInputs& in, const DeltaScratch& scratch, const View& y, void* stream) {
  const int64_t most_pairs = in.most_chunks() / 2 + 1;
  return launch(delta_rule_read_narrow, in.batch.count * most_pairs * scratch.pass_heads, kWideThreads, kBytes, stream, in,
                scratch, y, most_pairs);
}

int32_t load_delta_read_narrow() { return load_kernel(delta_rule_read_narrow); }

}  // namespace lla::cuda
