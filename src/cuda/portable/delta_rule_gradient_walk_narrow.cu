// SPDX-License-Identifier: Apache-2.0
// The walks of queries of delta_rule_gradient_walk.cu for key and value dimensions of at most 128: X, and later dX and dy,
// stay in shared memory.
#include "cuda/portable/delta_rule_gradient.h"
#include "cuda/portable/delta_rule_wide.h"

namespace lla::cuda {

namespace {

constexpr int kMostSteps = 64;
constexpr int kBuffers = 2;
constexpr int kStage = kWideTileAlong;  // kWideTileAcross is less
static_assert(kStage >= kWideTileAcross);
constexpr int kFloats = 2 * kTile * kWideAlong + kBuffers * kStage + kTile + 4 * kTile;
constexpr size_t kBytes = kFloats * sizeof(float) + kMostSteps * sizeof(DeltaStep);

template <bool kExact>
__global__ void __launch_bounds__(kWideThreads, kExact ? 1 : 2)
    delta_rule_walks_narrow(DeltaInputs in, DeltaGradients scratch, View dy) {
  float* x = reinterpret_cast<float*>(shared_memory());  // [64][kWideAlong], later dX
  float* given = x + kTile * kWideAlong;                 // dy
  float* stages = given + kTile * kWideAlong;
  float* weights = stages + kBuffers * kStage;  // [64]
  float* dots = weights + kTile;                // [64][4]
  DeltaStep* steps = reinterpret_cast<DeltaStep*>(dots + 4 * kTile);
  const DeltaScratch& nodes = scratch.nodes;
  const int64_t heads = nodes.pass_heads, most = in.most_chunks(), tasks = in.batch.count * most * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_parts = (dk + kWideDepth - 1) / kWideDepth, value_parts = (dv + kWideDepth - 1) / kWideDepth;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);

  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = nodes.first_head + task % heads, number = task / heads % most;
    const Sequence& sequence = in.batch.sequences[task / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.count) continue;
    const int64_t chunk = chunks.range.first + number;
    const ChunkSpan span(sequence, in.chunk, chunk);
    if (span.hi <= span.lo) continue;
    const auto there = [&](int r) { return r >= span.lo && r < span.hi; };
    const auto row = [&](int r) { return span.row(sequence, r); };

    load_tile<true>(x, kWideAlong, 0, dk, [&](int r) -> Elements {
      return {there(r) ? scratch.x_at(0, row(r), head) : nullptr, LLA_F32};
    });
    load_tile<true>(given, kWideAlong, 0, dv, [&](int r) -> Elements {
      if (!there(r)) return {};
      return {dy.at(sequence.index, row(r), head), dy.dtype};
    });
    for (int64_t n = threadIdx.x; n < (span.hi - span.lo) * scratch.levels; n += kWideThreads) {
      scratch.lambda[nodes.place(row(span.lo + static_cast<int>(n / scratch.levels)), head) * scratch.levels +
                     n % scratch.levels] = 0;
    }
    int count = 0, moves = 0;  // nodes, and transitions between them
    {
      DeltaWalk walk(in, nodes, chunks, head, chunk, false);
      DeltaStep step;
      while (walk.next(&step)) {
        if (threadIdx.x == 0) steps[count] = step;
        ++count;
        if (step.transition) ++moves;
      }
    }
    __syncthreads();

    // X <- X Phi, and where each step's X is kept.
    const int all = moves * key_parts;
    const auto stage = [&](int i) { return stages + i % kBuffers * kStage; };
    const auto bring_move = [&](int i) {
      if (i < all) {
        const FloatMatrix matrix{{steps[i / key_parts].transition, LLA_F32}, nodes.key_stride, dk, dk};
        bring_tile<kWideDepth, kWide>(stage(i), kWideAcross, matrix, i % key_parts * kWideDepth, 0);
      }
      commit_copies();
    };
    WarpSum<2, 4> sum(32 * (warp / 4), 32 * (warp % 4));
    const auto put = [&](auto base_of) {  // into x and to scratch memory
      sum.each_pair([&](int m, int n, float p, float q) {
        *reinterpret_cast<float2*>(x + m * kWideAlong + n) = make_float2(p, q);
        if (there(m) && n < dk) *reinterpret_cast<float2*>(base_of(row(m)) + n) = make_float2(p, q);
      });
    };
    bring_move(0);
    for (int move = 0, i = 0; move < moves; ++move) {
      sum.clear();
      for (int part = 0; part < key_parts; ++part, ++i) {
        wait_copies<0>();
        __syncthreads();
        bring_move(i + 1);
        const float *from = x + part * kWideDepth, *tile = stage(i);
        sum.template add<kExact>(
            kWideDepth, [&](int m, int k) { return from[m * kWideAlong + k]; },
            [&](int k, int n) { return tile[k * kWideAcross + n]; });
      }
      __syncthreads();
      put([&](int64_t r) { return scratch.x_at(move + 1, r, head); });
    }
    wait_copies<0>();
    __syncthreads();

    // Back. What the history's nodes see is the X after the last move; their gradients add up there.
    sum.clear();
    if (count == moves) put([&](int64_t r) { return scratch.dx_at(moves, r, head); });
    int step_ahead = count - 1, part_ahead = 0, brought = 0, used = 0;
    bool transition_ahead = false;
    const auto bring = [&] {
      if (step_ahead >= 0) {
        const DeltaStep& step = steps[step_ahead];
        const FloatMatrix matrix = transition_ahead ? FloatMatrix{{step.transition, LLA_F32}, nodes.key_stride, dk, dk}
                                                    : FloatMatrix{step.content, step.stride, dk, dv};
        bring_tile<kWide, kWideDepth>(stage(brought++), kWideDepth + 4, matrix, 0, part_ahead * kWideDepth);
        if (++part_ahead == (transition_ahead ? key_parts : value_parts)) {
          part_ahead = 0;
          transition_ahead = !transition_ahead && step.transition;
          if (!transition_ahead) --step_ahead;
        }
      }
      commit_copies();
    };
    const auto add = [&](const float* from, int parts) {
      for (int part = 0; part < parts; ++part) {
        wait_copies<0>();
        __syncthreads();
        const float *left = from + part * kWideDepth, *tile = stage(used++);
        bring();
        sum.template add<kExact>(
            kWideDepth, [&](int m, int k) { return left[m * kWideAlong + k]; },
            [&](int k, int n) { return tile[n * (kWideDepth + 4) + k]; });
      }
    };
    bring();
    for (int n = count - 1; n >= 0; --n) {
      const DeltaStep& step = steps[n];
      const int place = n < moves ? n : moves;
      const bool adds = n >= moves && n < count - 1;
      if (threadIdx.x < kTile) {
        const int r = threadIdx.x;
        weights[r] = !there(r) ? 0.0f
                     : step.column < 0
                         ? 1.0f
                         : load_element(in.lambda.at(sequence.index, row(r), head), in.lambda.dtype, step.column);
      }
      sum.clear();
      add(given, value_parts);
      if (step.column >= 0) {
        float sums[2][2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int m = sum.row + lane / 4 + 16 * i + 8 * half;
            if (!there(m)) continue;
            const float* seen = scratch.x_at(place, row(m), head);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int at = sum.column + 2 * (lane % 4) + 8 * j;
              if (at < dk) sums[i][half] += sum.c[i][j][2 * half] * seen[at];
              if (at + 1 < dk) sums[i][half] += sum.c[i][j][2 * half + 1] * seen[at + 1];
            }
          }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float one = sums[i][half];
            one += __shfl_xor_sync(kAllLanes, one, 1);
            one += __shfl_xor_sync(kAllLanes, one, 2);
            if (lane % 4 == 0) dots[4 * (sum.row + lane / 4 + 16 * i + 8 * half) + warp % 4] = one;
          }
      }
      sum.each_pair([&](int m, int, float& p, float& q) { p *= weights[m], q *= weights[m]; });
      if (step.transition) add(x, key_parts);
      if (adds) {
        sum.each_pair(
            [&](int m, int at, float& p, float& q) { p += x[m * kWideAlong + at], q += x[m * kWideAlong + at + 1]; });
      }
      __syncthreads();
      put([&](int64_t r) { return scratch.dx_at(place, r, head); });
      if (step.column >= 0 && threadIdx.x < kTile && there(threadIdx.x)) {
        const float* four = dots + 4 * threadIdx.x;
        scratch.lambda[nodes.place(row(threadIdx.x), head) * scratch.levels + step.column] +=
            (four[0] + four[1]) + (four[2] + four[3]);
      }
    }
    wait_copies<0>();
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_walks_narrow(const DeltaInputs& in, const DeltaGradients& scratch, const View& dy, bool exact,
                                  void* stream) {
  return launch(exact ? delta_rule_walks_narrow<true> : delta_rule_walks_narrow<false>,
                in.batch.count * in.most_chunks() * scratch.nodes.pass_heads, kWideThreads, kBytes, stream, in, scratch, dy);
}

int32_t load_delta_walks_narrow() {
  const int32_t status = load_kernel(delta_rule_walks_narrow<true>);
  return status ? status : load_kernel(delta_rule_walks_narrow<false>);
}

}  // namespace lla::cuda
