// SPDX-License-Identifier: Apache-2.0
// delta_rule_read.cu and delta_rule_store.cu on halves: rows walk back through the nodes of their past. A warp keeps sixteen
// of them in registers, and a block works on two neighbouring chunks: all that the even one reads the odd one reads as well,
// and one node more, the even one's own.
#include "cuda/portable/delta_rule_half_walk.h"

namespace lla::cuda {

namespace {

constexpr size_t kBytes = kHalfStages * kHalfTile + kMostHalfSteps * sizeof(DeltaStep) + 64;

__global__ void __launch_bounds__(kWideThreads, 1)
    delta_rule_half_read(DeltaInputs in, DeltaHalfScratch scratch, View y, int64_t most_pairs) {
  char* tiles = shared_memory();
  DeltaStep* steps = reinterpret_cast<DeltaStep*>(tiles + kHalfStages * kHalfTile);
  float* most = reinterpret_cast<float*>(steps + kMostHalfSteps);
  const int64_t heads = scratch.pass_heads, tasks = in.batch.count * most_pairs * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_stride = static_cast<int>(scratch.key_stride), value_stride = static_cast<int>(scratch.value_stride);
  const int warp = warp_number(), lane = static_cast<int>(threadIdx.x % 32);
  const int key_steps = (dk + 15) / 16;

  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.first_head + task % heads, number = task / heads % most_pairs;
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

    {
      DeltaWalk walk(in, scratch, chunks, head, has_high ? even + 1 : even, false);
      DeltaStep step;
      int count = 0;
      while (walk.next(&step)) {
        if (threadIdx.x == 0) steps[count] = step;
        ++count;
      }
      if (threadIdx.x == 0) steps[count].level = -1;
    }
    __syncthreads();
    HalfStages stages{tiles, steps, most, dk, dv, key_stride, value_stride};
    for (int i = 0; i < kHalfStages - 1; ++i) stages.bring();

    WalkingRows rows;
    WideRows sum;
    get_queries(scratch, row, head, rows, sum);
    WideRows product;
    for (int s = 0; steps[s].level >= 0; ++s) {
      const DeltaStep& step = steps[s];
      const bool reads = step.level > 0 || odd;  // an odd chunk reads its neighbour
      float weight[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weight[i] = 0;
        if (row[i] < 0) continue;
        weight[i] =
            step.column < 0 ? 1.0f : load_element(in.lambda.at(sequence.index, row[i], head), in.lambda.dtype, step.column);
      }
      const float content_scale = step.content_scale ? *step.content_scale : 0.0f,
                  transition_scale = step.transition ? *step.transition_scale : 0.0f;
      const float history_scale = stages.history_scale[stages.used % kHalfStages];
      const char* tile = stages.next();
      if (reads) {
        rows.multiply<Stored::kByDepth>(product, tile, key_steps);
        const float by = step.content_scale ? content_scale : history_scale;
        const float f[2] = {weight[0] * rows.scale[0] * by, weight[1] * rows.scale[1] * by};
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) sum.c[j][q] += f[q / 2] * product.c[j][q];
      }
      if (!step.transition) continue;
      tile = stages.next();
      if (reads) {
        rows.multiply<Stored::kByDepth>(product, tile, key_steps);
        rows.set(product, rows.scale[0] * transition_scale, rows.scale[1] * transition_scale);
      }
    }
    wait_copies<0>();
    put_outputs(sum, y, sequence.index, row, head, dv);
    __syncthreads();
  }
}

// The nodes of a border: rows of the unit matrix walk back through its past as queries do, so that each content is brought
// to the border, X N; what is absorbed is summed. One block for each plan and head: the 128 rows of X.
__global__ void __launch_bounds__(kWideThreads, 1) delta_rule_half_store(DeltaInputs in, DeltaHalfScratch scratch) {
  char* tile = shared_memory();
  float* most = reinterpret_cast<float*>(tile + kHalfTile);
  const int64_t heads = scratch.pass_heads, most_plans = in.batch.most_nodes_to_store,
                tasks = in.batch.count * most_plans * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_stride = static_cast<int>(scratch.key_stride), value_stride = static_cast<int>(scratch.value_stride);
  const int lane = static_cast<int>(threadIdx.x % 32), row0 = 16 * static_cast<int>(threadIdx.x / 32) + lane / 4;
  const int key_steps = (dk + 15) / 16;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.first_head + task % heads, number = task / heads % most_plans;
    const Sequence& sequence = in.batch.sequences[task / heads / most_plans];
    if (sequence.padding || number >= sequence.nodes_to_store_count) continue;
    const NodesToStore& plan = sequence.nodes_to_store[number];
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t chunk = plan.position >> in.chunk.rows_log;
    if (plan.write == 0 || chunk > chunks.range.first + chunks.range.full) continue;

    const auto wanted = [&](int entry) { return plan.node[entry] >= 0 && ((plan.write >> entry) & 1) != 0; };
    const auto store = [&](const WideRows& sum, int entry) {
      char* node = in.state.node(plan.node[entry], head);
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = row0 + 8 * half, column = 8 * j + 2 * (lane % 4);
          if (r < dk && column < dv) {
            const int32_t dtype = in.state.node_layout.dtype;
            put_pair(offset_elements(static_cast<void*>(node), dtype, r * dv), dtype, column, dv, sum.c[j][2 * half],
                     sum.c[j][2 * half + 1]);
          }
        }
      if (threadIdx.x == 0) *reinterpret_cast<float*>(in.state.node_decay(plan.node[entry], head)) = 0;
    };
    WalkingRows rows;
    WideRows sum, product;
    sum.clear();
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int q = 0; q < 4; ++q) product.c[j][q] = row0 + 8 * (q / 2) == 8 * j + 2 * (lane % 4) + q % 2 ? 1.0f : 0.0f;
    rows.set(product, 1, 1);
    // Levels rise, so that what is absorbed comes last.
    DeltaWalk walk(in, scratch, chunks, head, chunk, true);
    DeltaStep step;
    while (walk.next(&step)) {
      if (wanted(step.entry)) {
        float scale = 0;
        if (step.content_scale) {
          bring_halves(tile, step.content.data, dk, value_stride);
          scale = *step.content_scale;
        } else {
          scale = put_matrix(tile, step.content, step.stride, dk, dv, most);
        }
        commit_copies();
        wait_copies<0>();
        __syncthreads();
        rows.multiply<Stored::kByDepth>(product, tile, key_steps);
        const bool sums = step.entry == kAbsorbed;
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            float& c = product.c[j][q];
            c *= rows.scale[q / 2] * scale;
            if (sums) sum.c[j][q] += c;
          }
        if (!sums) store(product, step.entry);
        __syncthreads();
      }
      if (step.transition) {
        bring_halves(tile, step.transition, dk, key_stride);
        commit_copies();
        wait_copies<0>();
        __syncthreads();
        rows.multiply<Stored::kByDepth>(product, tile, key_steps);
        rows.set(product, rows.scale[0] * *step.transition_scale, rows.scale[1] * *step.transition_scale);
        __syncthreads();
      }
    }
    if (in.shape.absorb && (chunk >> in.chunk.ratio_log >> in.separate) != 0 && wanted(kAbsorbed)) store(sum, kAbsorbed);
  }
}

}  // namespace

int32_t launch_delta_half_read(const DeltaInputs& in, const DeltaHalfScratch& scratch, const View& y, void* stream) {
  const int64_t most_pairs = in.most_chunks() / 2 + 1;
  return launch(delta_rule_half_read, in.batch.count * most_pairs * scratch.pass_heads, kWideThreads, kBytes, stream, in,
                scratch, y, most_pairs);
}

int32_t launch_delta_half_store(const DeltaInputs& in, const DeltaHalfScratch& scratch, void* stream) {
  return launch(delta_rule_half_store, in.batch.count * in.batch.most_nodes_to_store * scratch.pass_heads, kWideThreads,
                size_t{kHalfTile + 64}, stream, in, scratch);
}

int32_t load_delta_half_read() {
  const int32_t status = load_kernel(delta_rule_half_read);
  return status ? status : load_kernel(delta_rule_half_store);
}

}  // namespace lla::cuda
