// SPDX-License-Identifier: Apache-2.0
// Queries walk through the nodes of their past and back: dX = lambda dy N^T + dX' Phi^T, dlambda = <X, dy N^T>. So do the
// rows of the unit matrix from the border at which the final state's nodes stand.
#include "cuda/portable/delta_rule_gradient.h"
#include "cuda/portable/delta_rule_wide.h"

namespace lla::cuda {

namespace {

constexpr int kMostRecords = 64;
constexpr int kFloats = 2 * kTile * kAcross + 3 * kTile;
constexpr int kBytes = kFloats * sizeof(float) + kMostRecords * sizeof(DeltaStep);

struct WalkMemory {
  float* a;        // [64][kAcross]
  float* b;        // [64][kAcross]
  float* weights;  // [64]
  float* dots;     // [64][2]
  DeltaStep* steps;
};

__device__ __forceinline__ WalkMemory walk_memory() {
  WalkMemory memory;
  memory.a = reinterpret_cast<float*>(shared_memory());
  memory.b = memory.a + kTile * kAcross;
  memory.weights = memory.b + kTile * kAcross;
  memory.dots = memory.weights + kTile;
  memory.steps = reinterpret_cast<DeltaStep*>(memory.dots + 2 * kTile);
  return memory;
}

// sum += rows of A [64][depth] times B, or B's transpose: B has `rows` rows of `columns`, the sum's columns begin at `at`.
template <bool kExact, bool kTransposed, class ARow>
__device__ __forceinline__ void walk_product(const WalkMemory& memory, TileSum& sum, ARow row_of_a, const Elements& b,
                                             int64_t stride, int64_t rows, int64_t columns, int64_t at) {
  const int64_t depth = kTransposed ? columns : rows;
  for (int64_t k = 0; k < depth; k += kTile) {
    const int64_t first = kTransposed ? at : k;
    __syncthreads();
    load_tile(memory.a, kAlong, k, depth, row_of_a);
    load_tile(memory.b, kTransposed ? kAlong : kAcross, kTransposed ? k : at, columns, [&](int r) -> Elements {
      if (first + r >= rows) return {};
      return delta_row(b, first + r, stride);
    });
    __syncthreads();
    multiply<kExact>(
        sum, delta_depth(k, depth), [&](int m, int i) { return memory.a[m * kAlong + i]; },
        [&](int i, int n) { return kTransposed ? memory.b[n * kAlong + i] : memory.b[i * kAcross + n]; });
  }
}

template <class Row>
__device__ __forceinline__ void walk_store(const WalkMemory& memory, TileSum& sum, int64_t at, int64_t columns, Row row) {
  __syncthreads();
  put_sum(sum, memory.a, kAlong);
  __syncthreads();
  store_tile(memory.a, kAlong, at, columns, [&](int r) -> Target { return {row(r)}; });
}

// x(step, r), dx(step, r): rows of scratch memory, null where there is none. dy(step, r): gradient of what step's node
// gives.
template <bool kExact, class X, class Dx, class Dy, class Weight, class AddWeight>
__device__ __forceinline__ void walk_both_ways(const DeltaInputs& in, const DeltaGradients& scratch,
                                               DeltaWalk<DeltaScratch>& walk, const WalkMemory& memory, X x, Dx dx, Dy dy,
                                               Weight weight, AddWeight add_weight) {
  const int64_t dk = in.shape.key_dim, dv = in.shape.value_dim, key_stride = scratch.nodes.key_stride;
  int count = 0, moves = 0;  // nodes, and transitions between them
  DeltaStep step;
  __syncthreads();
  while (walk.next(&step)) {
    if (threadIdx.x == 0) memory.steps[count] = step;
    ++count;
    if (!step.transition) continue;
    for (int64_t at = 0; at < dk; at += kTile) {
      TileSum sum;
      sum.clear();
      walk_product<kExact, false>(
          memory, sum,
          [&](int r) -> Elements {
            return {x(moves, r), LLA_F32};
          },
          {step.transition, LLA_F32}, key_stride, dk, dk, at);
      walk_store(memory, sum, at, dk, [&](int r) { return x(moves + 1, r); });
    }
    ++moves;
  }
  __syncthreads();
  // What the history's nodes see is the X after the last move; their gradients add up there.
  if (count == moves) {
    for (int64_t at = 0; at < dk; at += kTile) {
      TileSum sum;
      sum.clear();
      walk_store(memory, sum, at, dk, [&](int r) { return dx(moves, r); });
    }
  }
  for (int n = count - 1; n >= 0; --n) {
    step = memory.steps[n];
    const int place = n < moves ? n : moves;
    const bool adds = n >= moves && n < count - 1;
    __syncthreads();
    if (threadIdx.x < kTile) memory.weights[threadIdx.x] = weight(step, threadIdx.x);
    memory.dots[threadIdx.x] = 0;
    for (int64_t at = 0; at < dk; at += kTile) {
      TileSum sum;
      sum.clear();
      walk_product<kExact, true>(
          memory, sum, [&](int r) { return dy(step, r); }, step.content, step.stride, dk, dv, at);
      if (step.column >= 0) {
        __syncthreads();
        load_tile(memory.a, kAlong, at, dk, [&](int r) -> Elements { return {x(place, r), LLA_F32}; });
        __syncthreads();
        sum.row_sums([&](int m, int i, float value) { return value * memory.a[m * kAlong + i]; },
                     [&](int m, int half, float value) { memory.dots[2 * m + half] += value; });
      }
      sum.each([&](int m, int, float& value) { value *= memory.weights[m]; });
      if (step.transition) {
        walk_product<kExact, true>(
            memory, sum,
            [&](int r) -> Elements {
              return {dx(place + 1, r), LLA_F32};
            },
            {step.transition, LLA_F32}, key_stride, dk, dk, at);
      }
      if (adds) {
        __syncthreads();
        load_tile(memory.b, kAlong, at, dk, [&](int r) -> Elements { return {dx(place, r), LLA_F32}; });
        __syncthreads();
        sum.each([&](int m, int i, float& value) { value += memory.b[m * kAlong + i]; });
      }
      walk_store(memory, sum, at, dk, [&](int r) { return dx(place, r); });
    }
    __syncthreads();
    if (step.column >= 0 && threadIdx.x < kTile)
      add_weight(threadIdx.x, step.column, memory.dots[2 * threadIdx.x] + memory.dots[2 * threadIdx.x + 1]);
  }
}

template <bool kExact>
__global__ void __launch_bounds__(kThreads) delta_rule_walks(DeltaInputs in, DeltaGradients scratch, View dy) {
  const WalkMemory memory = walk_memory();
  const int64_t heads = scratch.nodes.pass_heads, most = in.most_chunks(), tasks = in.batch.count * most * heads;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.nodes.first_head + task % heads, number = task / heads % most;
    const Sequence& sequence = in.batch.sequences[task / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.count) continue;
    const int64_t chunk = chunks.range.first + number;
    const ChunkSpan span(sequence, in.chunk, chunk);
    if (span.hi <= span.lo) continue;
    const auto there = [&](int r) { return r >= span.lo && r < span.hi; };
    const auto row = [&](int r) { return span.row(sequence, r); };
    for (int64_t n = threadIdx.x; n < (span.hi - span.lo) * scratch.levels; n += kThreads) {
      scratch.lambda[scratch.nodes.place(row(span.lo + static_cast<int>(n / scratch.levels)), head) * scratch.levels +
                     n % scratch.levels] = 0;
    }
    DeltaWalk walk(in, scratch.nodes, chunks, head, chunk, false);
    walk_both_ways<kExact>(
        in, scratch, walk, memory,
        [&](int64_t step, int r) -> float* { return there(r) ? scratch.x_at(step, row(r), head) : nullptr; },
        [&](int64_t step, int r) -> float* { return there(r) ? scratch.dx_at(step, row(r), head) : nullptr; },
        [&](const DeltaStep&, int r) -> Elements {
          if (!there(r)) return {};
          return {dy.at(sequence.index, row(r), head), dy.dtype};
        },
        [&](const DeltaStep& step, int r) -> float {
          if (!there(r)) return 0;
          if (step.column < 0) return 1;
          return load_element(in.lambda.at(sequence.index, row(r), head), in.lambda.dtype, step.column);
        },
        [&](int r, int64_t column, float value) {
          if (there(r)) scratch.lambda[scratch.nodes.place(row(r), head) * scratch.levels + column] += value;
        });
    __syncthreads();
  }
}

template <bool kExact>
__global__ void __launch_bounds__(kThreads)
    delta_rule_border_walks(DeltaInputs in, DeltaGradients scratch, SlotMemory gradient) {
  const WalkMemory memory = walk_memory();
  const int64_t heads = scratch.nodes.pass_heads, dk = in.shape.key_dim, parts = (dk + kTile - 1) / kTile;
  const int64_t tasks = in.batch.count * heads * parts;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t first = task % parts * kTile, head = scratch.nodes.first_head + task / parts % heads;
    const Sequence& sequence = in.batch.sequences[task / parts / heads];
    if (sequence.padding || sequence.final_gradient.tail < 0) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    const auto matrix_row = [&](float* base, int64_t step, int r) -> float* {
      if (first + r >= dk) return nullptr;
      return scratch.border_at(base, sequence.index, step, head) + (first + r) * scratch.nodes.key_stride;
    };
    for (int64_t n = threadIdx.x; n < kTile * dk; n += kThreads) {
      const int r = static_cast<int>(n / dk);
      if (first + r < dk) matrix_row(scratch.border_x, 0, r)[n % dk] = first + r == n % dk ? 1.0f : 0.0f;
    }
    DeltaWalk walk(in, scratch.nodes, chunks, head, delta_border(sequence, in.chunk), false);
    walk_both_ways<kExact>(
        in, scratch, walk, memory, [&](int64_t step, int r) { return matrix_row(scratch.border_x, step, r); },
        [&](int64_t step, int r) { return matrix_row(scratch.border_dx, step, r); },
        [&](const DeltaStep& step, int r) -> Elements {
          if (first + r >= dk) return {};
          return delta_row(delta_final_node(gradient, sequence, step.entry, head), first + r, in.shape.value_dim);
        },
        [](const DeltaStep&, int) { return 1.0f; }, [](int, int64_t, float) {});
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_walks(const DeltaInputs& in, const DeltaGradients& scratch, const View& dy, const SlotMemory& gradient,
                           bool exact, void* stream) {
  const int64_t heads = scratch.nodes.pass_heads;
  const bool narrow = in.shape.key_dim <= kWide && in.shape.value_dim <= kWide;
  int32_t status = narrow ? launch_delta_walks_narrow(in, scratch, dy, exact, stream)
                          : launch(exact ? delta_rule_walks<true> : delta_rule_walks<false>,
                                   in.batch.count * in.most_chunks() * heads, kThreads, kBytes, stream, in, scratch, dy);
  if (status || !gradient.nodes.base) return status;
  return launch(exact ? delta_rule_border_walks<true> : delta_rule_border_walks<false>,
                in.batch.count * heads * ((in.shape.key_dim + kTile - 1) / kTile), kThreads, kBytes, stream, in, scratch,
                gradient);
}

int32_t load_delta_walks() {
  int32_t status = load_kernel(delta_rule_walks<true>);
  if (!status) status = load_kernel(delta_rule_walks<false>);
  if (!status) status = load_kernel(delta_rule_border_walks<true>);
  if (!status) status = load_kernel(delta_rule_border_walks<false>);
  return status ? status : load_delta_walks_narrow();
}

}  // namespace lla::cuda
