// SPDX-License-Identifier: Apache-2.0
// Queries walk back through the nodes of their past: y += lambda (X N), X <- X Phi.
#include "cuda/portable/delta_rule_walk.h"
#include "cuda/portable/delta_rule_wide.h"

namespace lla::cuda {

namespace {

template <bool kExact, bool kNarrow>
__global__ void __launch_bounds__(kThreads) delta_rule_read(DeltaInputs in, DeltaScratch scratch, View y) {
  const int64_t heads = scratch.pass_heads, dk = in.shape.key_dim, dv = in.shape.value_dim, most = in.most_chunks();
  constexpr int64_t kWidth = kSides<kNarrow> * kTile;
  const int64_t parts = kNarrow ? (dv + kWidth - 1) / kWidth : 1;
  const int64_t tasks = in.batch.count * most * heads * parts;
  const ReadMemory memory = read_memory(dk, kSideStride<kNarrow>);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t part = task % parts, head = scratch.first_head + task / parts % heads,
                  number = task / parts / heads % most;
    const Sequence& sequence = in.batch.sequences[task / parts / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.count) continue;
    const int64_t chunk = chunks.range.first + number;
    const ChunkSpan span(sequence, in.chunk, chunk);
    if (span.hi <= span.lo) continue;
    const auto query_row = [&](int r) -> float* {
      return r >= span.lo && r < span.hi ? scratch.query_at(span.row(sequence, r), head) : nullptr;
    };
    const auto output_row = [&](int r) -> float* {
      return r >= span.lo && r < span.hi ? scratch.output_at(span.row(sequence, r), head) : nullptr;
    };
    const auto y_row = [&](int r) -> Target {
      if (r < span.lo || r >= span.hi) return {};
      return {y.at(sequence.index, span.row(sequence, r), head), y.dtype};
    };

    for (int64_t column = 0; column < dk; column += kTile) {
      load_tile(memory.x + column, memory.stride, column, dk, [&](int r) -> Elements { return {query_row(r), LLA_F32}; });
    }
    TileSum sum[kSides<kNarrow>];
    if constexpr (kNarrow) {
      read_sum<kNarrow>(memory, part * kWidth, dv, sum[0], output_row);
      read_sum<kNarrow>(memory, part * kWidth + kTile, dv, sum[1], output_row);
    }
    DeltaWalk walk(in, scratch, chunks, head, chunk, false);
    DeltaStep step;
    while (walk.next(&step)) {
      __syncthreads();
      if (threadIdx.x < kTile) {
        const int r = threadIdx.x;
        float weight = 0;
        if (r >= span.lo && r < span.hi) {
          weight = step.column < 0 ? 1.0f
                                   : load_element(in.lambda.at(sequence.index, span.row(sequence, r), head), in.lambda.dtype,
                                                  step.column);
        }
        memory.weights[r] = weight;
      }
      if constexpr (kNarrow) {
        read_product<kExact, kNarrow, true>(memory, dk, step.content, step.stride, part * kWidth, dv, sum);
      } else {
        for (int64_t column = 0; column < dv; column += kTile) {
          read_sum<kNarrow>(memory, column, dv, sum[0], output_row);
          read_product<kExact, kNarrow, true>(memory, dk, step.content, step.stride, column, dv, sum);
          write_sum<kNarrow>(memory, column, dv, sum[0], [&](int r) -> Target { return {output_row(r)}; });
        }
      }
      if (step.transition) read_transition<kExact, kNarrow>(memory, dk, step.transition, scratch.key_stride, query_row);
    }
    if constexpr (kNarrow) {
      write_sum<kNarrow>(memory, part * kWidth, dv, sum[0], y_row);
      write_sum<kNarrow>(memory, part * kWidth + kTile, dv, sum[1], y_row);
    } else {
      for (int64_t column = 0; column < dv; column += kTile) {
        read_sum<kNarrow>(memory, column, dv, sum[0], output_row);
        write_sum<kNarrow>(memory, column, dv, sum[0], y_row);
      }
    }
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_read(const DeltaInputs& in, const DeltaScratch& scratch, const View& y, bool exact, void* stream) {
  const int64_t dk = in.shape.key_dim, tasks = in.batch.count * in.most_chunks() * scratch.pass_heads;
  if (exact && dk <= kWide && in.shape.value_dim <= kWide) return launch_delta_read_narrow(in, scratch, y, stream);
  if (dk <= kNarrowDim) {
    const int64_t parts = (in.shape.value_dim + 2 * kTile - 1) / (2 * kTile);
    return launch(exact ? delta_rule_read<true, true> : delta_rule_read<false, true>, tasks * parts, kThreads,
                  read_bytes<true>(dk), stream, in, scratch, y);
  }
  return launch(exact ? delta_rule_read<true, false> : delta_rule_read<false, false>, tasks, kThreads, read_bytes<false>(dk),
                stream, in, scratch, y);
}

int32_t load_delta_read() {
  int32_t status = load_kernel(delta_rule_read<true, true>);
  if (!status) status = load_kernel(delta_rule_read<false, true>);
  if (!status) status = load_kernel(delta_rule_read<true, false>);
  if (!status) status = load_kernel(delta_rule_read<false, false>);
  return status ? status : load_delta_read_narrow();
}

}  // namespace lla::cuda
