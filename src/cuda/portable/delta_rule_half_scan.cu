// SPDX-License-Identifier: Apache-2.0
// Linear layers of the delta rule on halves: one state S goes from chunk to chunk, S <- whole (S - D S) + N, in fp32 but for
// the product; then every chunk reads the one at its start.
#include "cuda/portable/delta_rule_half_walk.h"

namespace lla::cuda {

namespace {

constexpr int kScanThreads = 128;
constexpr int kScanColumns = 64;  // of S, of a block; a warp keeps sixteen of them, transposed
constexpr int kScanStages = 3;
constexpr size_t kScanBytes = kScanStages * kHalfTile;
constexpr int kReadThreads = 128;
constexpr size_t kReadBytes = kHalfTile + 64;

__device__ __forceinline__ Elements first_state(const DeltaInputs& in, const Sequence& sequence, int64_t head) {
  const int32_t id = delta_history_node(in, sequence, kAbsorbed);
  if (id < 0) return {};
  return {in.state.node(id, head), in.state.node_layout.dtype};
}

__global__ void __launch_bounds__(kScanThreads, 2) delta_rule_half_scan(DeltaInputs in, DeltaHalfScratch scratch) {
  char* tiles = shared_memory();
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_stride = static_cast<int>(scratch.key_stride), key_steps = (dk + 15) / 16;
  const int64_t heads = scratch.pass_heads, parts = (dv + kScanColumns - 1) / kScanColumns;
  const int64_t tasks = in.batch.count * heads * parts;
  const int warp = warp_number(), lane = static_cast<int>(threadIdx.x % 32);
  const bool stores = in.batch.stores && in.state.nodes.base;

  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.first_head + task / parts % heads;
    const Sequence& sequence = in.batch.sequences[task / parts / heads];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t first = chunks.range.first, full = chunks.range.full;
    const int column = static_cast<int>(task % parts) * kScanColumns + 16 * warp + lane / 4;  // and column + 8
    int64_t plan = 0;
    WideRows state, product;
    state.clear();
    const Elements before = first_state(in, sequence, head);
    if (before.data) {
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int n = column + 8 * (q / 2), m = 8 * j + 2 * (lane % 4) + q % 2;
          if (n < dv && m < dk) state.c[j][q] = load_element(before.data, before.dtype, m * dv + n);
        }
    }
    const auto store = [&](int64_t chunk) {  // what stands at the start of a chunk
      for (; stores && plan < sequence.nodes_to_store_count; ++plan) {
        const NodesToStore& to = sequence.nodes_to_store[plan];
        const int64_t at = to.position >> in.chunk.rows_log;
        if (at > chunk) return;
        if (at < chunk || to.node[kAbsorbed] < 0 || ((to.write >> kAbsorbed) & 1) == 0) continue;
        char* node = in.state.node(to.node[kAbsorbed], head);
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const int n = column + 8 * (q / 2), m = 8 * j + 2 * (lane % 4) + q % 2;
            if (n < dv && m < dk) store_element(node, in.state.node_layout.dtype, m * dv + n, state.c[j][q]);
          }
        if (threadIdx.x == 0 && task % parts == 0)
          *reinterpret_cast<float*>(in.state.node_decay(to.node[kAbsorbed], head)) = 0;
      }
    };
    store(first);
    const auto bring = [&](int64_t n) {
      if (n < full) {
        bring_halves<kScanThreads>(tiles + n % kScanStages * kHalfTile,
                                   scratch.transition_at(0, chunks.slot + n, sequence.index, head), dk, key_stride);
      }
      commit_copies();
    };
    bring(0);
    bring(1);
    for (int64_t n = 0; n < full; ++n) {
      const int64_t slot = chunks.slot + n;
      unsigned short* content = scratch.content_at(slot, head) + column * key_stride;
      unsigned own[2][16];  // N^T
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const bool there = column + 8 * half < dv && 8 * j < key_stride;
          own[half][j] =
              there ? *reinterpret_cast<const unsigned*>(content + 8 * half * key_stride + 8 * j + 2 * (lane % 4)) : 0;
        }
      const float content_scale = *scratch.content_scale_at(slot, head),
                  erased = *scratch.transition_scale_at(0, slot, sequence.index, head),
                  whole = scratch.whole[scratch.place(slot, head)];
      WalkingRows rows;
      rows.set(state, 1, 1);
      wait_copies<kScanStages - 2>();
      __syncthreads();
      bring(n + kScanStages - 1);
      rows.multiply<Stored::kAlongDepth>(product, tiles + n % kScanStages * kHalfTile, key_steps);
      const float f[2] = {rows.scale[0] * erased, rows.scale[1] * erased};
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 add = unpack_halves(own[half][j]);
          float &x = state.c[j][2 * half], &y = state.c[j][2 * half + 1];
          x = whole * (x - f[half] * product.c[j][2 * half]) + content_scale * add.x;
          y = whole * (y - f[half] * product.c[j][2 * half + 1]) + content_scale * add.y;
        }
      store(first + n + 1);
      if (n + 1 == chunks.range.count) continue;  // nobody reads it
      rows.set(state, 1, 1);
      each_piece(rows.x, [&](int half, int piece, uint4 x) {
        if (column + 8 * half < dv && 8 * piece < key_stride)
          *reinterpret_cast<uint4*>(content + 8 * half * key_stride + 8 * piece) = x;
      });
      if (lane % 4 == 0) {
        float* scales = scratch.state_scale + scratch.place(slot, head) * kWide;
        scales[column] = rows.scale[0], scales[column + 8] = rows.scale[1];
      }
    }
    wait_copies<0>();
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kReadThreads, 3)
    delta_rule_half_linear_read(DeltaInputs in, DeltaHalfScratch scratch, View y) {
  char* tile = shared_memory();
  float* most = reinterpret_cast<float*>(tile + kHalfTile);
  const int64_t heads = scratch.pass_heads, most_chunks = in.most_chunks(), tasks = in.batch.count * most_chunks * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_stride = static_cast<int>(scratch.key_stride), key_steps = (dk + 15) / 16;
  const int warp = warp_number(), lane = static_cast<int>(threadIdx.x % 32);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.first_head + task % heads, number = task / heads % most_chunks;
    const Sequence& sequence = in.batch.sequences[task / heads / most_chunks];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.count) continue;
    const ChunkSpan span(sequence, in.chunk, chunks.range.first + number);
    if (span.hi <= span.lo) continue;
    int64_t row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 16 * warp + lane / 4 + 8 * i;
      row[i] = r >= span.lo && r < span.hi ? span.row(sequence, r) : -1;
    }
    const int64_t slot = chunks.slot + number - 1;
    if (number > 0) bring_halves<kReadThreads>(tile, scratch.content_at(slot, head), dv, key_stride);
    commit_copies();
    WalkingRows rows;
    WideRows sum, product;
    get_queries(scratch, row, head, rows, sum);
    if (number > 0) {
      wait_copies<0>();
      __syncthreads();
      rows.multiply<Stored::kAlongDepth>(product, tile, key_steps);
      const float* scales = scratch.state_scale + scratch.place(slot, head) * kWide;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float2 by = *reinterpret_cast<const float2*>(scales + 8 * j + 2 * (lane % 4));
        const bool there = 8 * j < dv;
#pragma unroll
        for (int q = 0; q < 4; ++q)
          sum.c[j][q] += there ? rows.scale[q / 2] * (q % 2 ? by.y : by.x) * product.c[j][q] : 0.0f;
      }
    } else if (const Elements before = first_state(in, sequence, head); before.data) {
      const float scale = put_matrix<kReadThreads>(tile, before, dv, dk, dv, most);
      __syncthreads();
      rows.multiply<Stored::kByDepth>(product, tile, key_steps);
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) sum.c[j][q] += rows.scale[q / 2] * scale * product.c[j][q];
    }
    put_outputs(sum, y, sequence.index, row, head, dv);
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_half_scan(const DeltaInputs& in, const DeltaHalfScratch& scratch, void* stream) {
  const int64_t parts = (in.shape.value_dim + kScanColumns - 1) / kScanColumns;
  return launch(delta_rule_half_scan, in.batch.count * scratch.pass_heads * parts, kScanThreads, kScanBytes, stream, in,
                scratch);
}

int32_t launch_delta_half_linear_read(const DeltaInputs& in, const DeltaHalfScratch& scratch, const View& y, void* stream) {
  return launch(delta_rule_half_linear_read, in.batch.count * in.most_chunks() * scratch.pass_heads, kReadThreads,
                kReadBytes, stream, in, scratch, y);
}

int32_t load_delta_half_scan() {
  const int32_t status = load_kernel(delta_rule_half_scan);
  return status ? status : load_kernel(delta_rule_half_linear_read);
}

}  // namespace lla::cuda
