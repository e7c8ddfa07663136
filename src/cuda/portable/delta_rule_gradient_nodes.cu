// SPDX-License-Identifier: Apache-2.0
// Gradients of nodes: first what their own readers give them, then down the tree what comes through the nodes that they were
// joined into: dN_left += Phi_right^T dN, dN_right = dN, dPhi_left += Phi_right^T dPhi, dPhi_right = dN N_left^T + dPhi
// Phi_left^T. At last the nodes of the history.
#include "cuda/portable/delta_rule_gradient.h"
#include "cuda/portable/delta_rule_wide.h"

namespace lla::cuda {

namespace {

constexpr int kFloats = 2 * kTile * kAcross + kTile;

struct NodeMemory {
  float* a;        // [64][kAcross]
  float* b;        // [64][kAcross]
  float* weights;  // [64]
};

__device__ __forceinline__ NodeMemory node_memory() {
  float* memory = reinterpret_cast<float*>(shared_memory());
  return {memory, memory + kTile * kAcross, memory + 2 * kTile * kAcross};
}

// sum += A^T B over the first `depth` of 64 rows.
template <bool kExact, class ARow, class BRow>
__device__ __forceinline__ void add_outer(const NodeMemory& memory, TileSum& sum, ARow row_of_a, int64_t a_column,
                                          int64_t a_columns, BRow row_of_b, int64_t b_column, int64_t b_columns, int depth) {
  load_tile(memory.a, kAcross, a_column, a_columns, row_of_a);
  load_tile(memory.b, kAcross, b_column, b_columns, row_of_b);
  __syncthreads();
  multiply<kExact>(
      sum, depth, [&](int m, int k) { return memory.a[k * kAcross + m]; },
      [&](int k, int n) { return memory.weights[k] * memory.b[k * kAcross + n]; });
  __syncthreads();
}

// What the chunks first ... last - 1, and the border, give to a node of the given level that they read: X^T (lambda dy), or,
// for its transition, X^T dX. `entry` is the one of the final state that the border would store it in. steps(chunk): how
// many nodes of the call are read before. Begins after a barrier, ends with one.
template <bool kExact, class Steps>
__device__ __forceinline__ void add_readers(const NodeMemory& memory, const DeltaInputs& in, const DeltaGradients& scratch,
                                            const View& dy, const SlotMemory& gradient, const DeltaSequence& chunks,
                                            int64_t head, int64_t first, int64_t last, bool border, int64_t lambda_column,
                                            int entry, Steps steps, bool transition, int level, int64_t row, int64_t column,
                                            TileSum& sum) {
  const Sequence& sequence = chunks.sequence;
  const int64_t dk = in.shape.key_dim, dv = in.shape.value_dim, columns = transition ? dk : dv;
  const bool all_on = sequence.initial_gradient.tail >= 0 || (in.state.nodes.base && sequence.history.tail >= 0);
  for (int64_t chunk = first; chunk < last; ++chunk) {
    const ChunkSpan span(sequence, in.chunk, chunk);
    if (span.hi <= span.lo) continue;
    if (transition && !all_on && !delta_reads_on(chunk, level, chunks.range.first)) continue;
    const int64_t step = steps(chunk);
    const auto there = [&](int r) { return r >= span.lo && r < span.hi; };
    if (threadIdx.x < kTile) {
      const int r = threadIdx.x;
      float weight = 0;
      if (there(r)) {
        weight = transition || lambda_column < 0 ? 1.0f
                                                 : load_element(in.lambda.at(sequence.index, span.row(sequence, r), head),
                                                                in.lambda.dtype, lambda_column);
      }
      memory.weights[r] = weight;
    }
    add_outer<kExact>(
        memory, sum,
        [&](int r) -> Elements {
          if (!there(r)) return {};
          return {scratch.x_at(step, span.row(sequence, r), head), LLA_F32};
        },
        row, dk,
        [&](int r) -> Elements {
          if (!there(r)) return {};
          if (transition) return {scratch.dx_at(step + 1, span.row(sequence, r), head), LLA_F32};
          return {dy.at(sequence.index, span.row(sequence, r), head), dy.dtype};
        },
        column, columns, delta_depth(0, span.hi));
  }
  if (!border || sequence.final_gradient.tail < 0 || !gradient.nodes.base) return;
  const int64_t chunk = delta_border(sequence, in.chunk);
  if (transition && !all_on && !delta_reads_on(chunk, level, chunks.range.first)) return;
  const Elements given = delta_final_node(gradient, sequence, entry, head);
  if (!transition && !given.data) return;
  const int64_t step = steps(chunk);
  if (threadIdx.x < kTile) memory.weights[threadIdx.x] = 1;
  for (int64_t at = 0; at < dk; at += kTile) {
    const auto row_of = [&](float* base, int64_t s, int r) -> Elements {
      if (at + r >= dk) return {};
      return {scratch.border_at(base, sequence.index, s, head) + (at + r) * scratch.nodes.key_stride, LLA_F32};
    };
    add_outer<kExact>(
        memory, sum, [&](int r) { return row_of(scratch.border_x, step, r); }, row, dk,
        [&](int r) -> Elements {
          if (transition) return row_of(scratch.border_dx, step + 1, r);
          if (at + r >= dk) return {};
          return delta_row(given, at + r, dv);
        },
        column, columns, delta_depth(at, dk));
  }
}

// A full chunk is the last one of one node that is a left half: its readers are the chunks of the right half. Nodes with
// many readers come first. What a reader gives: X^T (lambda dy) to the content, X^T dX to the transition.
template <bool kExact>
__global__ void __launch_bounds__(kWideThreads, kExact ? 1 : 2)
    delta_rule_readers(DeltaInputs in, DeltaGradients scratch, View dy, SlotMemory gradient, int numbers_log) {
  float* memory = reinterpret_cast<float*>(shared_memory());
  const DeltaScratch& nodes = scratch.nodes;
  const int64_t heads = nodes.pass_heads, dk = in.shape.key_dim, dv = in.shape.value_dim;
  const int64_t key_tiles = (dk + kWide - 1) / kWide, value_tiles = (dv + kWide - 1) / kWide;
  const int64_t tiles = key_tiles * (value_tiles + key_tiles), most = int64_t{1} << numbers_log;
  const int64_t tasks = in.batch.count * most * heads * tiles;
  const int c = 4 * static_cast<int>(threadIdx.x % 32), first_row = static_cast<int>(threadIdx.x / 32);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t tile = task % tiles, head = nodes.first_head + task / tiles % heads;
    const int64_t rank = task / tiles / heads / in.batch.count;
    const Sequence& sequence = in.batch.sequences[task / tiles / heads % in.batch.count];
    if (sequence.padding) continue;
    // Ranks 0, 1, 2 ... are the numbers (counted from 1) most, most / 2, most / 4, 3 most / 4, most / 8 ...
    int64_t number = most - 1;
    if (rank > 0) {
      const int high = 63 - __clzll(static_cast<long long>(rank));
      number = ((2 * (rank - (int64_t{1} << high)) + 1) << (numbers_log - high - 1)) - 1;
    }
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.full) continue;
    const int64_t end = chunks.range.first + number + 1, slot = chunks.slot + number;
    const int level = __ffsll(static_cast<long long>(end)) - 1;
    const int64_t after = chunks.range.first + chunks.range.count, last = min(end + (int64_t{1} << level), after);
    const bool transition = tile / key_tiles >= value_tiles;
    const int64_t row = tile % key_tiles * kWide;
    const int64_t column = (tile / key_tiles - (transition ? value_tiles : 0)) * kWide, columns = transition ? dk : dv;
    const bool all_on = sequence.initial_gradient.tail >= 0 || (in.state.nodes.base && sequence.history.tail >= 0);
    const int64_t lambda_column = in.shape.levels == 0 ? -1 : in.shape.column(level + in.chunk.rows_log + 1);
    const auto reads = [&](int64_t chunk) {
      return !transition || all_on || delta_reads_on(chunk, level, chunks.range.first);
    };

    // Tiles of the readers' rows, one after the other.
    int64_t chunk = end;
    int at = 0, brought = 0, used = 0;
    const auto stage = [&](int i) { return memory + i % kWideBuffers * 2 * kWideTileAcross; };
    const auto bring = [&] {
      while (chunk < last && !reads(chunk)) ++chunk;
      if (chunk < last) {
        const ChunkSpan span(sequence, in.chunk, chunk);  // all rows of readers belong to the call
        const int64_t rows = span.hi - span.lo, base = span.row(sequence, span.lo), step = delta_steps_before(chunk, level);
        float* x = stage(brought++);
        bring_tile<kWideDepth, kWide>(
            x, kWideAcross, {{scratch.x_at(step, base, head), LLA_F32}, heads * nodes.key_stride, rows, dk}, at, row);
        float* y = x + kWideTileAcross;
        if (transition) {
          bring_tile<kWideDepth, kWide>(y, kWideAcross,
                                        {{scratch.dx_at(step + 1, base, head), LLA_F32}, heads * nodes.key_stride, rows, dk},
                                        at, column);
        } else {
          constexpr int kMine = kWideDepth / 8;
          float4 given[kMine];
          float weight[kMine];
          const int64_t left = columns - column - c;
#pragma unroll
          for (int i = 0; i < kMine; ++i) {
            const int64_t r = at + first_row + 8 * i;
            const bool there = r < rows && left > 0;
            weight[i] = !there || lambda_column < 0
                            ? 1.0f
                            : load_element(in.lambda.at(sequence.index, base + r, head), in.lambda.dtype, lambda_column);
            given[i] =
                there ? load4(dy.at(sequence.index, base + r, head), dy.dtype, column + c, left) : make_float4(0, 0, 0, 0);
          }
#pragma unroll
          for (int i = 0; i < kMine; ++i)
            *reinterpret_cast<float4*>(y + (first_row + 8 * i) * kWideAcross + c) =
                make_float4(weight[i] * given[i].x, weight[i] * given[i].y, weight[i] * given[i].z, weight[i] * given[i].w);
        }
        at += kWideDepth;
        if (at >= rows) at = 0, ++chunk;
      }
      commit_copies();
    };
    WideSum sum;
    sum.clear();
    __syncthreads();
    bring();
    bring();
    while (used < brought) {
      wait_copies<1>();
      __syncthreads();
      const float *x = stage(used++), *y = x + kWideTileAcross;
      bring();
      sum.template add<kExact>(
          kWideDepth, [&](int m, int k) { return x[k * kWideAcross + m]; },
          [&](int k, int n) { return y[k * kWideAcross + n]; });
    }
    wait_copies<0>();
    const int64_t border = delta_border(sequence, in.chunk);
    if (sequence.final_gradient.tail >= 0 && gradient.nodes.base && ((border >> level) & 1) != 0 &&
        bucket_end(border, level) == end && reads(border)) {
      const int entry = level - in.chunk.ratio_log < in.separate ? level - in.chunk.ratio_log : kAbsorbed;
      const int64_t step = delta_steps_before(border, level);
      const FloatMatrix seen{
          {scratch.border_at(scratch.border_x, sequence.index, step, head), LLA_F32}, nodes.key_stride, dk, dk};
      FloatMatrix given{delta_final_node(gradient, sequence, entry, head), dv, dk, dv};
      if (transition)
        given = {{scratch.border_at(scratch.border_dx, sequence.index, step + 1, head), LLA_F32}, nodes.key_stride, dk, dk};
      if (given.elements.data) add_wide_product<kExact, true, false>(memory, sum, seen, given, row, column, dk);
    }
    if (transition)
      put_wide(sum, scratch.transition_at(level, slot, head), nodes.key_stride, row, dk, column, dk, false);
    else
      put_wide(sum, scratch.content_at(slot, head), nodes.value_stride, row, dk, column, dv, false);
  }
}

// sum += A B over `depth`, A and B given by their tiles: load(at) fills both, a and b read them.
template <bool kExact, class Load, class A, class B>
__device__ __forceinline__ void add_product(TileSum& sum, int64_t depth, Load load, A a, B b) {
  for (int64_t at = 0; at < depth; at += kTile) {
    __syncthreads();
    load(at);
    __syncthreads();
    multiply<kExact>(sum, delta_depth(at, depth), a, b);
  }
}

__device__ __forceinline__ void load_matrix(float* tile, int stride, const Elements& matrix, int64_t matrix_stride,
                                            int64_t row, int64_t rows, int64_t column, int64_t columns) {
  load_tile(tile, stride, column, columns, [&](int r) -> Elements {
    if (row + r >= rows) return {};
    return delta_row(matrix, row + r, matrix_stride);
  });
}

// sum += tiles of left^T right ([dk][dk] and [dk][columns]).
template <bool kExact>
__device__ __forceinline__ void add_transposed(const NodeMemory& memory, TileSum& sum, const float* left, int64_t dk,
                                               int64_t left_stride, const float* right, int64_t right_stride,
                                               int64_t columns, int64_t row, int64_t column) {
  add_product<kExact>(
      sum, dk,
      [&](int64_t at) {
        load_matrix(memory.a, kAcross, {left, LLA_F32}, left_stride, at, dk, row, dk);
        load_matrix(memory.b, kAcross, {right, LLA_F32}, right_stride, at, dk, column, columns);
      },
      [&](int m, int k) { return memory.a[k * kAcross + m]; }, [&](int k, int n) { return memory.b[k * kAcross + n]; });
}

// From the nodes of 2^level chunks to their halves.
template <bool kExact>
__global__ void __launch_bounds__(kWideThreads, kExact ? 1 : 2)
    delta_rule_split(DeltaInputs in, DeltaGradients scratch, int level) {
  float* memory = reinterpret_cast<float*>(shared_memory());
  const DeltaScratch& nodes = scratch.nodes;
  const int64_t heads = nodes.pass_heads, dk = in.shape.key_dim, dv = in.shape.value_dim;
  const int64_t key_tiles = (dk + kWide - 1) / kWide, value_tiles = (dv + kWide - 1) / kWide;
  const int64_t tiles = key_tiles * (value_tiles + 2 * key_tiles), most = (in.most_full() >> level) + 1;
  const int64_t tasks = in.batch.count * most * heads * tiles;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t tile = task % tiles, head = nodes.first_head + task / tiles % heads, number = task / tiles / heads % most;
    const Sequence& sequence = in.batch.sequences[task / tiles / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t first = chunks.range.first, end = ((first >> level) + number + 1) << level;
    if (end > first + chunks.range.full) continue;
    const int64_t middle = end - (int64_t{1} << (level - 1));
    const bool own_left = middle > first;  // else the left half is history
    const int64_t slot = chunks.slot_of(end - 1), left_slot = chunks.slot_of(middle - 1);
    const int64_t row = tile % key_tiles * kWide, part = tile / key_tiles;
    const FloatMatrix dcontent{{scratch.content_at(slot, head), LLA_F32}, nodes.value_stride, dk, dv};
    const FloatMatrix dtransition{{scratch.transition_at(level, slot, head), LLA_F32}, nodes.key_stride, dk, dk};
    WideSum sum;
    sum.clear();
    if (part < value_tiles + key_tiles) {
      if (!own_left) continue;
      const bool content = part < value_tiles;
      const int64_t column = (part - (content ? 0 : value_tiles)) * kWide, columns = content ? dv : dk;
      const FloatMatrix right{{chunks.transition(nodes, level - 1, end, head), LLA_F32}, nodes.key_stride, dk, dk};
      add_wide_product<kExact, true, false>(memory, sum, right, content ? dcontent : dtransition, row, column, dk);
      put_wide(sum, content ? scratch.content_at(left_slot, head) : scratch.transition_at(level - 1, left_slot, head),
               content ? nodes.value_stride : nodes.key_stride, row, dk, column, columns, true);
      continue;
    }
    const int64_t column = (part - value_tiles - key_tiles) * kWide;
    FloatMatrix left{{}, nodes.value_stride, dk, dv};
    if (own_left) {
      left.elements = {chunks.content(nodes, middle, head), LLA_F32};
    } else {
      const int entry = level - 1 - in.chunk.ratio_log;
      const int32_t id = entry < in.separate ? delta_history_node(in, sequence, entry) : -1;
      if (id >= 0) left.elements = {in.state.node(id, head), in.state.node_layout.dtype};
      left.stride = dv;
    }
    if (left.elements.data) add_wide_product<kExact, false, true>(memory, sum, dcontent, left, row, column, dv);
    if (own_left) {
      const FloatMatrix before{{chunks.transition(nodes, level - 1, middle, head), LLA_F32}, nodes.key_stride, dk, dk};
      add_wide_product<kExact, false, true>(memory, sum, dtransition, before, row, column, dk);
    } else {
      const float* whole = scratch.transition_at(level, slot, head) + row * nodes.key_stride + column;
      sum.each_pair([&](int m, int n, float& x, float& y) {
        if (row + m >= dk || column + n >= dk) return;
        x += whole[m * nodes.key_stride + n];
        if (column + n + 1 < dk) y += whole[m * nodes.key_stride + n + 1];
      });
    }
    put_wide(sum, scratch.transition_at(level - 1, slot, head), nodes.key_stride, row, dk, column, dk, false);
  }
}

// Gradients of the history's nodes, one block for each tile.
template <bool kExact>
__global__ void __launch_bounds__(kThreads)
    delta_rule_history(DeltaInputs in, DeltaGradients scratch, View dy, SlotMemory gradient) {
  const NodeMemory memory = node_memory();
  const DeltaScratch& nodes = scratch.nodes;
  const int64_t heads = nodes.pass_heads, dk = in.shape.key_dim, dv = in.shape.value_dim;
  const int64_t row_tiles = (dk + kTile - 1) / kTile, value_tiles = (dv + kTile - 1) / kTile,
                tiles = row_tiles * value_tiles;
  const int64_t tasks = in.batch.count * kNodes * heads * tiles;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t row = task % row_tiles * kTile, column = task / row_tiles % value_tiles * kTile;
    const int64_t head = nodes.first_head + task / tiles % heads;
    const int entry = static_cast<int>(task / tiles / heads % kNodes);
    const Sequence& sequence = in.batch.sequences[task / tiles / heads / kNodes];
    if (sequence.padding || sequence.initial_gradient.tail < 0) continue;
    const int32_t id = sequence.initial_gradient.node[entry];
    if (id < 0 || (entry == kAbsorbed ? !in.absorbs() : entry >= in.separate)) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t first = chunks.range.first, grains = first >> in.chunk.ratio_log;
    const int level = entry + in.chunk.ratio_log;
    const bool live =
        entry == kAbsorbed ? in.shape.levels == 0 || (grains >> in.separate) != 0 : ((grains >> entry) & 1) != 0;
    TileSum sum;
    sum.clear();
    if (live) {
      const int64_t border = delta_border(sequence, in.chunk);
      int64_t last = first + chunks.range.count, lambda_column = in.shape.levels - 1;
      bool at_border = true;
      if (entry != kAbsorbed) {
        const int64_t end = ((first >> (level + 1)) + 1) << (level + 1);
        at_border = border < end;
        last = min(last, end);
        lambda_column = in.shape.column(level + in.chunk.rows_log + 1);
      }
      add_readers<kExact>(
          memory, in, scratch, dy, gradient, chunks, head, first, last, at_border, lambda_column, entry,
          [&](int64_t chunk) { return __popcll(delta_own_bits(chunk, first)); }, false, level, row, column, sum);
      // The node that it was joined into.
      const int64_t joined = (((first >> (level + 1)) + 1) << (level + 1));
      if (entry != kAbsorbed && joined <= first + chunks.range.full) {
        add_transposed<kExact>(memory, sum, chunks.transition(nodes, level, joined, head), dk, nodes.key_stride,
                               scratch.content_at(chunks.slot_of(joined - 1), head), nodes.value_stride, dv, row, column);
      }
    }
    char* node = gradient.node(id, head);
    const int32_t dtype = gradient.node_layout.dtype;
    __syncthreads();
    put_sum(sum, memory.a, kAcross);
    __syncthreads();
    store_tile(memory.a, kAcross, column, dv, [&](int r) -> Target {
      if (row + r >= dk) return {};
      return {offset_elements(static_cast<void*>(node), dtype, (row + r) * dv), dtype};
    });
    if (threadIdx.x == 0 && row == 0 && column == 0) *reinterpret_cast<float*>(gradient.node_decay(id, head)) = 0;
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_node_gradients(const DeltaInputs& in, const DeltaGradients& scratch, const View& dy,
                                    const SlotMemory& gradient, bool exact, void* stream) {
  const int64_t row_tiles = (in.shape.key_dim + kTile - 1) / kTile, value_tiles = (in.shape.value_dim + kTile - 1) / kTile;
  const int64_t all = in.batch.count * scratch.nodes.pass_heads;
  constexpr size_t kBytes = kFloats * sizeof(float);
  const int64_t key_wides = (in.shape.key_dim + kWide - 1) / kWide, value_wides = (in.shape.value_dim + kWide - 1) / kWide;
  int numbers_log = 0;
  while ((int64_t{1} << numbers_log) < in.most_full()) ++numbers_log;
  int32_t status = LLA_OK;
  if (in.most_full() > 0) {
    status = launch(exact ? delta_rule_readers<true> : delta_rule_readers<false>,
                    (all << numbers_log) * key_wides * (value_wides + key_wides), kWideThreads, kWideProductBytes, stream,
                    in, scratch, dy, gradient, numbers_log);
  }
  int level = 0;
  while ((in.batch.most_length >> in.chunk.rows_log >> level) > 0) ++level;
  for (--level; level > 0 && !status && in.most_full() > 0; --level) {
    status = launch(exact ? delta_rule_split<true> : delta_rule_split<false>,
                    all * ((in.most_full() >> level) + 1) * key_wides * (value_wides + 2 * key_wides), kWideThreads,
                    kWideProductBytes, stream, in, scratch, level);
  }
  if (status || !gradient.nodes.base) return status;
  return launch(exact ? delta_rule_history<true> : delta_rule_history<false>, all * kNodes * row_tiles * value_tiles,
                kThreads, kBytes, stream, in, scratch, dy, gradient);
}

int32_t load_delta_node_gradients() {
  int32_t status = load_kernel(delta_rule_readers<true>);
  if (!status) status = load_kernel(delta_rule_readers<false>);
  if (!status) status = load_kernel(delta_rule_split<true>);
  if (!status) status = load_kernel(delta_rule_split<false>);
  if (!status) status = load_kernel(delta_rule_history<true>);
  if (!status) status = load_kernel(delta_rule_history<false>);
  return status;
}

}  // namespace lla::cuda
