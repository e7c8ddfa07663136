// SPDX-License-Identifier: Apache-2.0
// delta_rule_gradient_nodes.cu on halves: what nodes get from their readers, then down the tree what comes through the nodes
// that they were joined into.
#include "cuda/common/warp_matrix.h"
#include "cuda/portable/delta_rule_half_gradient.h"
#include "cuda/portable/delta_rule_half_walk.h"

namespace lla::cuda {

namespace {

// ---- readers ------------------------------------------------------------------------------------------------------------

constexpr int kReaderStages = 3;
constexpr int kReaderStage = 3 * kHalfRows;  // X, dX and lambda dy of a chunk
constexpr size_t kReaderBytes = kReaderStages * kReaderStage + 64;

// A full chunk is the last one of one node that is a left half: its readers are the chunks of the right half. Nodes with
// many readers come first. What a reader gives: X^T (lambda dy) to the content, by the even warps, X^T dX to the transition,
// by the odd ones; a warp has 32 rows.
__global__ void __launch_bounds__(kWideThreads, 1)
    delta_rule_half_readers(DeltaInputs in, DeltaHalfGradients scratch, View dy, int numbers_log) {
  char* memory = shared_memory();
  float* most_of_warps = reinterpret_cast<float*>(memory + kReaderStages * kReaderStage);
  const DeltaHalfScratch& nodes = scratch.nodes;
  const int64_t heads = nodes.pass_heads, most = int64_t{1} << numbers_log, tasks = in.batch.count * most * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_stride = static_cast<int>(nodes.key_stride), value_stride = static_cast<int>(nodes.value_stride);
  const int warp = warp_number(), lane = static_cast<int>(threadIdx.x % 32);
  const int piece = static_cast<int>(threadIdx.x % 16), first_row = static_cast<int>(threadIdx.x / 16);
  const bool transition = warp % 2 == 1;

  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = nodes.first_head + task % heads, rank = task / heads / in.batch.count;
    const Sequence& sequence = in.batch.sequences[task / heads % in.batch.count];
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
    const int64_t lambda_column = in.shape.levels == 0 ? -1 : in.shape.column(level + in.chunk.rows_log + 1);
    const auto reads_on = [&](int64_t chunk) { return delta_reads_on(chunk, level, chunks.range.first); };

    int64_t chunk = end;
    float weight[2][4];  // lambda of this thread's rows of the chunks on their way
    const auto bring = [&](int stage, float(&weights)[4]) {
      if (chunk < last) {
        const ChunkSpan span(sequence, in.chunk, chunk);  // all rows of readers belong to the call
        const int64_t base = span.row(sequence, 0), step = delta_steps_before(chunk, level);
        char* x = memory + stage * kReaderStage;
        const int64_t stride = heads * key_stride;
        const unsigned short *x_rows = scratch.x_at(step, base, head), *dx_rows = scratch.dx_at(step + 1, base, head);
        const bool on = reads_on(chunk);
        const CallRows given(dy, sequence, span, head);
        const bool plain = has_plain_rows(given, dv);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = first_row + 16 * i, place = half_place(r, piece);
          const bool there = r < span.hi;
          const auto copy = [&](char* to, const void* from, bool wanted) {
            if (wanted)
              copy_async16(to + place, from, 16);
            else
              *reinterpret_cast<float4*>(to + place) = make_float4(0, 0, 0, 0);
          };
          copy(x, x_rows + r * stride + 8 * piece, there && 8 * piece < key_stride);
          copy(x + kHalfRows, dx_rows + r * stride + 8 * piece, there && on && 8 * piece < key_stride);
          copy(x + 2 * kHalfRows, given.data + r * given.stride + 16 * piece, there && plain && 8 * piece < dv);
          if (!plain && there && 8 * piece < dv) {
            const int left = dv - 8 * piece;
            const char* from = given.data + r * given.stride;
            const float4 a = load4(from, given.dtype, 8 * piece, left),
                         b = left > 4 ? load4(from, given.dtype, 8 * piece + 4, left - 4) : make_float4(0, 0, 0, 0);
            const auto pair = [&](float p, float q) {
              return given.dtype == LLA_BF16 ? to_bf16(p) | to_bf16(q) << 16 : f16_pair(p, q);
            };
            uint4 raw;
            raw.x = pair(a.x, a.y), raw.y = pair(a.z, a.w), raw.z = pair(b.x, b.y), raw.w = pair(b.z, b.w);
            *reinterpret_cast<uint4*>(x + 2 * kHalfRows + place) = raw;
          }
          weights[i] = lambda_column < 0 || !there
                           ? 1.0f
                           : load_element(in.lambda.at(sequence.index, base + r, head), in.lambda.dtype, lambda_column);
        }
        ++chunk;
      }
      commit_copies();
    };
    // This thread's pieces of dy, once there, times lambda.
    const auto weigh = [&](int stage, const float(&weights)[4]) {
      if (dy.dtype == LLA_BF16 && lambda_column < 0) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint4* at =
            reinterpret_cast<uint4*>(memory + stage * kReaderStage + 2 * kHalfRows + half_place(first_row + 16 * i, piece));
        const uint4 raw = *at;
        const auto times = [&](unsigned both) {
          const float2 halves = unpack_halves(both);
          const float p = dy.dtype == LLA_BF16 ? from_bf16(both & 0xffffu) : halves.x,
                      q = dy.dtype == LLA_BF16 ? from_bf16(both >> 16) : halves.y;
          return bf16_pair(weights[i] * p, weights[i] * q);
        };
        uint4 out;
        out.x = times(raw.x), out.y = times(raw.y), out.z = times(raw.z), out.w = times(raw.w);
        *at = out;
      }
    };
    WideRows sum[2];
    sum[0].clear(), sum[1].clear();
    __syncthreads();
    bring(0, weight[0]);
    bring(1, weight[1]);
    int stage = 0;
    for (int64_t reader = end; reader < last; ++reader) {
      wait_copies<1>();
      weigh(stage, weight[0]);
#pragma unroll
      for (int i = 0; i < 4; ++i) weight[0][i] = weight[1][i];
      __syncthreads();
      bring(stage == 0 ? 2 : stage - 1, weight[1]);
      if (!transition || reads_on(reader)) {
        const char* x = memory + stage * kReaderStage;
        const SharedAddress left = left_address<Stored::kByDepth>(x),
                            right = right_address<Stored::kByDepth>(x + (transition ? 1 : 2) * kHalfRows);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          unsigned a[2][4], b[2][4];
          load_fragment<true>(a[0], block_address(left, k, warp / 2 * 2));
          load_fragment<true>(a[1], block_address(left, k, warp / 2 * 2 + 1));
          load_fragment<true>(b[0], block_address(right, k, 0));
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            if (j < 7) load_fragment<true>(b[(j + 1) % 2], block_address(right, k, j + 1));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              multiply_half<LLA_BF16>(sum[i].c[2 * j], a[i], b[j % 2][0], b[j % 2][1]);
              multiply_half<LLA_BF16>(sum[i].c[2 * j + 1], a[i], b[j % 2][2], b[j % 2][3]);
            }
          }
        }
      }
      stage = stage == 2 ? 0 : stage + 1;
    }
    wait_copies<0>();
    float biggest = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) biggest = fmaxf(biggest, fabsf(sum[i].c[j][q]));
    biggest = warp_max(biggest);
    if (lane == 0) most_of_warps[warp] = biggest;
    __syncthreads();
    for (int w = warp % 2; w < 8; w += 2) biggest = fmaxf(biggest, most_of_warps[w]);
    const HalfScale scale(biggest);
    unsigned short* out = transition ? scratch.transition_at(level, slot, head) : scratch.content_at(slot, head);
    const int stride = transition ? key_stride : value_stride;
    if (lane == 0 && warp < 2)
      *(transition ? scratch.transition_scale_at(level, slot, head) : scratch.content_scale_at(slot, head)) = scale.back;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned packed[8][4];
      sum[i].pack(packed, scale.to, scale.to);
      const int m0 = 32 * (warp / 2) + 16 * i + lane / 4;
      each_piece(packed, [&](int half, int at, uint4 y) {
        const int m = m0 + 8 * half;
        if (m < dk && 8 * at < stride) *reinterpret_cast<uint4*>(out + m * stride + 8 * at) = y;
      });
    }
    __syncthreads();
  }
}

// ---- down the tree ------------------------------------------------------------------------------------------------------

constexpr size_t kSplitBytes = 5 * kHalfTile + 64;

// From the nodes of 2^level chunks to their halves: dN_left += Phi_right^T dN, dPhi_left += Phi_right^T dPhi, dPhi_right =
// dN N_left^T + dPhi Phi_left^T; dN_right = dN stands in its place already.
__global__ void __launch_bounds__(kWideThreads, 1)
    delta_rule_half_split(DeltaInputs in, DeltaHalfGradients scratch, int level) {
  char* right = shared_memory();
  char *dcontent = right + kHalfTile, *dtransition = dcontent + kHalfTile, *content = dtransition + kHalfTile,
       *transition = content + kHalfTile;
  float* most_of_warps = reinterpret_cast<float*>(transition + kHalfTile);
  const DeltaHalfScratch& nodes = scratch.nodes;
  const int64_t heads = nodes.pass_heads, most = (in.most_full() >> level) + 1, tasks = in.batch.count * most * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_stride = static_cast<int>(nodes.key_stride), value_stride = static_cast<int>(nodes.value_stride);
  const int key_steps = (dk + 15) / 16, value_steps = (dv + 15) / 16;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = nodes.first_head + task % heads, number = task / heads % most;
    const Sequence& sequence = in.batch.sequences[task / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    const int64_t first = chunks.range.first, end = ((first >> level) + number + 1) << level;
    if (end > first + chunks.range.full) continue;
    const int64_t middle = end - (int64_t{1} << (level - 1));
    const int64_t slot = chunks.slot_of(end - 1);
    const unsigned short* whole = scratch.transition_at(level, slot, head);
    unsigned short* to_right = scratch.transition_at(level - 1, slot, head);
    float* to_right_scale = scratch.transition_scale_at(level - 1, slot, head);
    if (middle <= first) {  // the left half is history, and that is empty
      for (int64_t n = threadIdx.x; n < nodes.transition_size() / 8; n += kWideThreads)
        reinterpret_cast<uint4*>(to_right)[n] = reinterpret_cast<const uint4*>(whole)[n];
      if (threadIdx.x == 0) *to_right_scale = *scratch.transition_scale_at(level, slot, head);
      continue;
    }
    bring_halves(right, chunks.transition(nodes, level - 1, end, head), dk, key_stride);
    bring_halves(dcontent, scratch.content_at(slot, head), dk, value_stride);
    commit_copies();
    bring_halves(dtransition, whole, dk, key_stride);
    commit_copies();
    bring_halves(content, chunks.content(nodes, middle, head), dk, value_stride);
    bring_halves(transition, chunks.transition(nodes, level - 1, middle, head), dk, key_stride);
    commit_copies();
    const float right_scale = *chunks.transition_scale(nodes, level - 1, end, head),
                dcontent_scale = *scratch.content_scale_at(slot, head),
                dtransition_scale = *scratch.transition_scale_at(level, slot, head),
                content_scale = *chunks.content_scale(nodes, middle, head),
                transition_scale = *chunks.transition_scale(nodes, level - 1, middle, head);
    const int64_t left_slot = chunks.slot_of(middle - 1);
    HalfSum sum;
    wait_copies<2>();
    __syncthreads();
    {
      sum.multiply<Stored::kByDepth, Stored::kByDepth>(right, dcontent, key_steps);
      unsigned short* to = scratch.content_at(left_slot, head);
      float* scale = scratch.content_scale_at(left_slot, head);
      const float unit = sum.add_halves(right_scale * dcontent_scale, to, *scale, dk, value_stride);
      sum.put(unit, to, scale, dk, value_stride, most_of_warps);
    }
    wait_copies<1>();
    __syncthreads();
    {
      sum.multiply<Stored::kByDepth, Stored::kByDepth>(right, dtransition, key_steps);
      unsigned short* to = scratch.transition_at(level - 1, left_slot, head);
      float* scale = scratch.transition_scale_at(level - 1, left_slot, head);
      const float unit = sum.add_halves(right_scale * dtransition_scale, to, *scale, dk, key_stride);
      sum.put(unit, to, scale, dk, key_stride, most_of_warps);
    }
    wait_copies<0>();
    __syncthreads();
    {
      sum.multiply<Stored::kAlongDepth, Stored::kAlongDepth>(dcontent, content, value_steps);
      HalfSum other;
      other.multiply<Stored::kAlongDepth, Stored::kAlongDepth>(dtransition, transition, key_steps);
      const float f = dcontent_scale * content_scale, g = dtransition_scale * transition_scale, unit = fmaxf(f, g);
      const float by = unit > 0 ? f / unit : 0.0f, other_by = unit > 0 ? g / unit : 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) sum.rows[i].c[j][q] = by * sum.rows[i].c[j][q] + other_by * other.rows[i].c[j][q];
      sum.put(unit, to_right, to_right_scale, dk, key_stride, most_of_warps);
    }
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_half_node_gradients(const DeltaInputs& in, const DeltaHalfGradients& scratch, const View& dy,
                                         void* stream) {
  const int64_t all = in.batch.count * scratch.nodes.pass_heads;
  if (in.most_full() == 0) return LLA_OK;
  int numbers_log = 0;
  while ((int64_t{1} << numbers_log) < in.most_full()) ++numbers_log;
  int32_t status =
      launch(delta_rule_half_readers, all << numbers_log, kWideThreads, kReaderBytes, stream, in, scratch, dy, numbers_log);
  int level = 0;
  while ((in.batch.most_length >> in.chunk.rows_log >> level) > 0) ++level;
  for (--level; level > 0 && !status; --level) {
    status = launch(delta_rule_half_split, all * ((in.most_full() >> level) + 1), kWideThreads, kSplitBytes, stream, in,
                    scratch, level);
  }
  return status;
}

int32_t load_delta_half_node_gradients() {
  const int32_t status = load_kernel(delta_rule_half_readers);
  return status ? status : load_kernel(delta_rule_half_split);
}

}  // namespace lla::cuda
