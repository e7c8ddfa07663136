// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: what becomes of the gradients of a head's λ that the rows leave in shared memory.
#pragma once

#include "cuda/common/element.h"
#include "cuda/hopper/scalar_gate_row_tasks.h"

namespace lla::cuda::hopper {

// Makes flows and dlambda of them. A warp of its own for each half of the rows.
template <bool kLinear>
struct Finisher {
  const BackwardParameters& in;
  const RowLayout& layout;
  char* shared;
  RowBarriers* barriers;
  const int half, lane;

  // Row_reads, and the flow of the reads of each entry.
  __device__ __forceinline__ void store_flows(int stage, int64_t slot, int count) const {
    const BlockFactors& f = *reinterpret_cast<const BlockFactors*>(shared + layout.factors(stage));
    const float* staging = reinterpret_cast<const float*>(shared + layout.staging(stage));
    float* flows = reinterpret_cast<float*>(shared + layout.flows(stage));
    const int first = kHalf * half + lane;
    float read[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = first + 32 * h;
#pragma unroll
      for (int l = 1; l < kInner; ++l)
        read[h] = fmaf(kLinear ? 1.0f : f.lambda(l)[r], staging[r * layout.staged + l], read[h]);
    }
    // Two entries at a time: sixteen lanes add up each.
    const bool upper = lane >= 16;
#pragma unroll 1
    for (int entry = 0; entry < count; entry += 2) {
      float flow[2] = {0, 0};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (entry + e >= count) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int r = first + 32 * h;
          const float x =
              staging[r * layout.staged + kInner + entry + e] * (kLinear ? 1.0f : f.lambda(kInner + entry + e)[r]);
          read[h] += x;
          flow[e] += x;
        }
      }
      float sum = (upper ? flow[1] : flow[0]) + __shfl_xor_sync(kAllLanes, upper ? flow[0] : flow[1], 16);
#pragma unroll
      for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
      if (lane % 16 == 0) flows[half * kMostEntries + entry + lane / 16] = sum;
    }
    in.row_reads[slot * kBlock + first] = read[0];
    in.row_reads[slot * kBlock + first + 32] = read[1];
    if (count == 0) return;
    sync_some(kFlowBarrier, 32 * kFinishers);
    if (half == 0 && lane < count) in.reads[slot * kMostEntries + lane] = flows[lane] + flows[kMostEntries + lane];
  }

  __device__ __forceinline__ void store_lambda(int stage, const RowTask& task, int head) const {
    const int levels = static_cast<int>(in.shape.levels), staged = kInner + __popcll(task.reads);
    float* staging = reinterpret_cast<float*>(shared + layout.staging(stage)) + kHalf * half * layout.staged;
    // The first of a row's sums that belongs to a level or a higher one.
    const auto place = [&](int level) {
      if (level <= kInner) return level;
      return level - kInner > 31 ? staged : kInner + __popcll(task.reads & ((uint32_t{1} << (level - kInner)) - 1));
    };
    if (in.shape.absorb && staged > place(levels - 1) + 1) {  // several are the last column's
#pragma unroll 1
      for (int r = lane; r < kHalf; r += 32) {
        float* sums = staging + r * layout.staged;
#pragma unroll 1
        for (int n = place(levels - 1) + 1; n < staged; ++n) sums[place(levels - 1)] += sums[n];
      }
      __syncwarp();
    }
    const uint32_t live = live_rows(task);
    const int step = 2 * static_cast<int>(in.dlambda.row_stride);
#pragma unroll 1
    for (int column = lane % 16; column < levels; column += 16) {
      const int at = place(column);
      const bool is_read = at < staged && (column == levels - 1 || place(column + 1) > at);
      float* sums = staging + lane / 16 * layout.staged + (is_read ? at : 0);
      const int64_t element = task.block.index * in.dlambda.sequence_stride + head * in.dlambda.head_stride + column +
                              (task.block.row + kHalf * half + lane / 16) * in.dlambda.row_stride;
      if (in.dlambda.accumulate) {
        if (!is_read) continue;
        add_column(sums, element, step, live);
      }
      if (in.dlambda.dtype == LLA_F32)
        store_column<8>(static_cast<float*>(in.dlambda.data) + element, step, sums, is_read, live,
                        [](float x) { return x; });
      else
        store_column<4>(static_cast<unsigned short*>(in.dlambda.data) + element, step, sums, is_read, live, [&](float x) {
          return static_cast<unsigned short>(in.dlambda.dtype == LLA_BF16 ? pack<Half::kBf16>(x, 0)
                                                                          : pack<Half::kF16>(x, 0));
        });
    }
  }

  // Sixteen lanes are for the columns of a row, so that a lane has every other row. Bit i: its row 2 i is the call's.
  __device__ __forceinline__ uint32_t live_rows(const RowTask& task) const {
    const int from = task.block.lo - kHalf * half - lane / 16, to = task.block.hi - kHalf * half - lane / 16;
    const auto below = [](int row) {  // rows 2 i < row
      const int count = row <= 0 ? 0 : (row + 1) / 2;
      return count >= 32 ? ~uint32_t{0} : (uint32_t{1} << count) - 1;
    };
    return below(to) & ~below(from);
  }
  // Stores, or zeroes, a column of a lane's rows. In few instructions: two warps do this for what eight compute.
  template <int kAhead, class Element, class Convert>
  __device__ __forceinline__ void store_column(Element* to, int step, const float* sums, bool is_read, uint32_t live,
                                               Convert convert) const {
#pragma unroll 1
    for (int begin = 0; begin < kHalf / 2; begin += kAhead, live >>= kAhead) {
      float x[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i, sums += 2 * layout.staged) x[i] = is_read ? *sums : 0.0f;
#pragma unroll
      for (int i = 0; i < kAhead; ++i, to += step) {
        if (live >> i & 1) *to = convert(x[i]);
      }
    }
  }
  // Adds what is already there to the staged sums.
  __device__ __forceinline__ void add_column(float* sums, int64_t element, int step, uint32_t live) const {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int begin = 0; begin < kHalf / 2; begin += kAhead, live >>= kAhead, element += kAhead * step) {
      float x[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        x[i] = live >> i & 1 ? load_element(in.dlambda.data, in.dlambda.dtype, element + i * step) : 0.0f;
#pragma unroll
      for (int i = 0; i < kAhead; ++i, sums += 2 * layout.staged) *sums += x[i];
    }
  }

  __device__ __forceinline__ void run(int tasks) const {
    Turn stage;
    each_task<kLinear>(in, tasks, [&](const RowTask& task) {
#pragma unroll 1
      for (int i = task.first; i < task.end; ++i) {
        wait(&barriers->staged_full[stage.index], stage.phase);
        store_flows(stage.index, in.slot(task.block.place, i), __popcll(task.reads));
        release(&barriers->factors_free[stage.index]);
        if constexpr (!kLinear) {
          if (in.dlambda.present()) {
            store_lambda(stage.index, task, in.head_of(i));
          }
        }
        release(&barriers->staged_free[stage.index]);
        stage.next(kHeadStages);
      }
    });
  }
};

}  // namespace lla::cuda::hopper
