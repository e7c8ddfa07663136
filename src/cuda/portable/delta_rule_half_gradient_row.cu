// SPDX-License-Identifier: Apache-2.0
// delta_rule_gradient_row.cu on halves, for calls without states: what comes from the chunk's own node, through the inverse,
// and the gradients of rows. Warps 0 ... 3 work on values and keys, 4 ... 7 on transitions and what erases, sixteen rows
// each.
#include "cuda/portable/delta_rule_half_gradient_chunk.h"

namespace lla::cuda {

namespace {

struct RowShared {
  char *keys, *values;           // [64][128] halves
  char *dcontent, *dtransition;  // [128][128] halves
  char* dkt;                     // [64][128] halves: gradient of Kt = X^T K
  char *x, *dx, *dgram;          // [64][64] halves: X, its gradient, that of w K K^T times w
  float *first_stage, *stage;    // [64][128] at stage_place(): in the place of dkt, dx and dgram, later of dcontent
  float* tables;
  float *out, *write_value, *write_erase;  // [64]
  float *whole, *most;                     // [8]

  static constexpr size_t kBytes =
      3 * kHalfRows + 2 * kHalfTile + 3 * kSquare + (DeltaRows::kFloats + 3 * 64 + 16) * sizeof(float);
  static_assert(kHalfRows + 2 * kSquare >= kTile * kWide * 4);
  __device__ __forceinline__ RowShared() {
    keys = shared_memory(), values = keys + kHalfRows, dcontent = values + kHalfRows, dtransition = dcontent + kHalfTile;
    x = dtransition + kHalfTile, dkt = x + kSquare, dx = dkt + kHalfRows, dgram = dx + kSquare;
    first_stage = reinterpret_cast<float*>(dkt), stage = reinterpret_cast<float*>(dcontent);
    tables = reinterpret_cast<float*>(dgram + kSquare);
    out = tables + DeltaRows::kFloats, write_value = out + 64, write_erase = write_value + 64;
    whole = write_erase + 64, most = whole + 8;
  }
};

// Floats of one group of warps for the other. Columns are permuted so that rows begin at different banks.
__device__ __forceinline__ int stage_place(int row, int column) { return row * kWide + (column ^ (row & 7) << 3); }
__device__ __forceinline__ void add_stage(WideRows& sum, const float* stage, int row) {
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 x = *reinterpret_cast<const float2*>(
          stage + stage_place(row + 8 * half, 8 * j + 2 * static_cast<int>(threadIdx.x % 4)));
      sum.c[j][2 * half] += x.x, sum.c[j][2 * half + 1] += x.y;
    }
}

// Where the gradients of the call's rows go.
struct Targets {
  View v, gate, write;
};

__global__ void __launch_bounds__(kWideThreads, 1)
    delta_rule_half_row_gradients(DeltaInputs in, DeltaGradients scratch, Targets targets) {
  const RowShared shared;
  const DeltaRows rows(shared.tables);
  const DeltaScratch& floats = scratch.nodes;
  const DeltaHalfGradients& halves = scratch.halves;
  const DeltaHalfScratch& nodes = halves.nodes;
  const int64_t heads = floats.pass_heads, most = in.most_chunks(), tasks = in.batch.count * most * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_stride = static_cast<int>(nodes.key_stride), value_stride = static_cast<int>(nodes.value_stride);
  const int key_steps = (dk + 15) / 16, value_steps = (dv + 15) / 16;
  const int warp = warp_number(), lane = static_cast<int>(threadIdx.x % 32), part = warp % 4;
  const bool erases = warp >= 4;
  const int row0 = 16 * part + lane / 4, row1 = row0 + 8;

  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = floats.first_head + task % heads, number = task / heads % most;
    const Sequence& sequence = in.batch.sequences[task / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.count) continue;
    const ChunkSpan span(sequence, in.chunk, chunks.range.first + number);
    const bool full = number<chunks.range.full, queries = span.hi> span.lo;
    if (!full && !queries) continue;
    const ChunkSource source{sequence, in.state, in.shape.grain, span};
    const int64_t group = in.shape.group_of(head), slot = chunks.slot + number;
    const int64_t chunk_place = in.chunk.first_place(sequence) + number, place = chunk_place * in.chunk.rows;
    const int depth16 = (span.hi + 15) / 16;
    // Row r of an array with a place for each row of each chunk; null: none.
    const auto place_of = [&](float* base, int r, int64_t stride) {
      return r < span.hi ? base + floats.place(place + r, head) * stride : nullptr;
    };
    const auto given = [&](float* base, int r, int64_t stride) { return queries ? place_of(base, r, stride) : nullptr; };

    {
      const CallRows k(in.k, sequence, span, group), v(in.v, sequence, span, head);
      bring_raw_rows(shared.keys, k, dk);
      bring_raw_rows(shared.values, v, dv);
      const unsigned short* x = nodes.inverse + nodes.place(chunk_place, head) * (kTile * kTile);
      for (int n = static_cast<int>(threadIdx.x); n < 512; n += kWideThreads)
        copy_async16(shared.x + half_place<kSquareRow>(n / 8, n % 8), reinterpret_cast<const float*>(x + 8 * n), 16);
      if (full) {
        bring_halves(shared.dcontent, halves.content_at(slot, head), dk, value_stride);
        bring_halves(shared.dtransition, halves.transition_at(0, slot, head), dk, key_stride);
      }
      commit_copies();
      delta_load_rows(in, source, head, rows);
      if (threadIdx.x < 64) shared.out[threadIdx.x] = 0;
      if (threadIdx.x < 8) shared.whole[threadIdx.x] = 0;
      put_raw_rows(shared.keys, k, dk);
      put_raw_rows(shared.values, v, dv);
      wait_copies<0>();
    }
    const float key_scale = scale_tile(shared.keys, in.k.dtype, shared.most),
                value_scale = scale_tile(shared.values, in.v.dtype, shared.most);
    const float inverse_scale = nodes.inverse_scale[nodes.place(chunk_place, head)];
    __syncthreads();
    const float write[2] = {rows.write[row0], rows.write[row1]};

    WideRows sum, kept;  // kept: gradient of keys, or of what erases
    kept.clear();
    const auto finish_values = [&] {  // sum: the gradient of w V
      add_floats(sum, given(scratch.value, row0, floats.value_stride), given(scratch.value, row1, floats.value_stride), dv);
      float dots[2];
      row_dots(sum, shared.values, row0, dots);
      if (lane % 4 == 0) shared.write_value[row0] = dots[0] * value_scale, shared.write_value[row1] = dots[1] * value_scale;
      scale_rows_of(sum, write[0], write[1]);
      if (!targets.v.present()) return;
      const int64_t to[2] = {row0 >= span.lo && row0 < span.hi ? span.row(sequence, row0) : -1,
                             row1 >= span.lo && row1 < span.hi ? span.row(sequence, row1) : -1};
      put_outputs(sum, targets.v, sequence.index, to, head, dv);
    };
    // N = (to_end Kt)^T (w V), Phi = whole (I - Kt^T (w K)), Kt = X^T K
    WalkingRows kt;
    float content_scale = 0, transition_scale = 0;
    if (full) {
      content_scale = *halves.content_scale_at(slot, head), transition_scale = *halves.transition_scale_at(0, slot, head);
      {
        float through_whole = 0;
        const unsigned short* transition = nodes.transition_at(0, slot, sequence.index, head);
        const int piece = static_cast<int>(threadIdx.x % 16);
#pragma unroll 2
        for (int r = static_cast<int>(threadIdx.x / 16); r < dk; r += 16) {
          if (8 * piece >= key_stride) break;
          const uint4 a = *reinterpret_cast<const uint4*>(transition + r * key_stride + 8 * piece),
                      b = *reinterpret_cast<const uint4*>(shared.dtransition + half_place(r, piece));
          const unsigned left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const float2 p = unpack_halves(left[n]), q = unpack_halves(right[n]);
            through_whole += p.x * q.x + p.y * q.y;
          }
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance >>= 1)
          through_whole += __shfl_xor_sync(kAllLanes, through_whole, distance);
        if (lane == 0)
          shared.whole[warp] = through_whole * transition_scale * *nodes.transition_scale_at(0, slot, sequence.index, head);
      }
      multiply_square<8, kHalfRow>(sum, shared.x, shared.keys, part, depth16);
      kt.set(sum, inverse_scale * key_scale, inverse_scale * key_scale);
    }
    if (!erases) {
      const float end[2] = {rows.to_end(row0), rows.to_end(row1)};
      if (full) {
        kt.multiply<Stored::kByDepth>(sum, shared.dcontent, key_steps);
        scale_rows_of(sum, end[0] * kt.scale[0] * content_scale, end[1] * kt.scale[1] * content_scale);
      } else {
        sum.clear();
      }
      finish_values();
      if (full) {
        multiply_tile<8, Stored::kAlongDepth>(sum, shared.values, shared.dcontent, part, value_steps);
        const float f = value_scale * content_scale;
        scale_rows_of(sum, end[0] * write[0] * f, end[1] * write[1] * f);
        float dots[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < 8; ++k)
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const float2 x = unpack_halves(kt.x[k][n]);
            const float(&c)[4] = sum.c[2 * k + n / 2];
            dots[n % 2] += c[2 * (n % 2)] * x.x + c[2 * (n % 2) + 1] * x.y;
          }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          dots[half] += __shfl_xor_sync(kAllLanes, dots[half], 1);
          dots[half] += __shfl_xor_sync(kAllLanes, dots[half], 2);
        }
        if (lane % 4 == 0) shared.out[row0] = dots[0] * kt.scale[0], shared.out[row1] = dots[1] * kt.scale[1];
      }
    } else {
      if (full) {
        kt.multiply<Stored::kByDepth>(kept, shared.dtransition, key_steps);
        const float f = -rows.whole() * transition_scale;
        scale_rows_of(kept, f * kt.scale[0], f * kt.scale[1]);
        multiply_tile<8, Stored::kAlongDepth>(sum, shared.keys, shared.dtransition, part, key_steps);
        scale_rows_of(sum, f * key_scale * write[0], f * key_scale * write[1]);
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            *reinterpret_cast<float2*>(shared.first_stage + stage_place(row0 + 8 * half, 8 * j + 2 * (lane % 4))) =
                make_float2(sum.c[j][2 * half], sum.c[j][2 * half + 1]);
      }
      sum.clear();  // what comes to X from the node
    }
    if (full) {
      __syncthreads();
      if (!erases) {
        add_stage(sum, shared.first_stage, row0);
        const float biggest = most_of(sum);
        if (lane == 0) shared.most[part] = biggest;
      }
      __syncthreads();
      const HalfScale by(most_of_four(shared.most));
      if (!erases) {
        unsigned packed[8][4];
        sum.pack(packed, by.to, by.to);
        put_rows_into(shared.dkt, 16 * part, packed);
      }
      __syncthreads();
      if (!erases) {  // through Kt to K
        const SharedAddress left = left_address<Stored::kAlongDepth, kSquareRow>(shared.x),
                            right = right_address<Stored::kByDepth>(shared.dkt);
#pragma unroll 1
        for (int k = 0; k <= part; ++k) {
          unsigned a[4];
          load_fragment<false>(a, block_address<kSquareRow>(left, part, k));
          kept.add<Stored::kByDepth, 1>(
              right, 1, [&](int) -> const unsigned(&)[4] { return a; }, k);
        }
        scale_rows_of(kept, inverse_scale * by.back, inverse_scale * by.back);
      } else {  // and to X
        RowSum<4> dx;
        multiply_tile<4, Stored::kAlongDepth>(dx, shared.keys, shared.dkt, part, key_steps);
        scale_rows_of(dx, key_scale * by.back, key_scale * by.back);
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) sum.c[j][q] = dx.c[j][q];
      }
    }

    // X = (I + stril((w K) K^T))^-1
    RowSum<4> square;
    float square_most = 0;
    if (erases) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) square.c[j][q] = sum.c[j][q];
      add_floats(square, given(scratch.inverse, row0, kTile), given(scratch.inverse, row1, kTile), kTile);
      keep_lower(square, row0, false);
      square_most = most_of(square);
      if (lane == 0) shared.most[4 + part] = square_most;
    }
    __syncthreads();
    const HalfScale dx_by(most_of_four(shared.most + 4));
    if (erases) put_square(shared.dx, row0, square, dx_by.to);
    __syncthreads();
    unsigned erased[4][4];
    float erased_back[2] = {0, 0};
    if (erases) {
      multiply_square<4, kSquareRow>(square, shared.x, shared.dx, part, depth16);
      float biggest[2];
      square.row_most(biggest);
      const HalfScale by0(biggest[0]), by1(biggest[1]);
      square.pack(erased, by0.to, by1.to);
      square.clear();
      add_by_square(square, erased, shared.x, 4);
      const float f = -inverse_scale * dx_by.back * inverse_scale;
      scale_rows_of(square, f * by0.back, f * by1.back);
      keep_lower(square, row0, true);
      square.row_most(biggest);
      const HalfScale to0(biggest[0]), to1(biggest[1]);
      square.pack(erased, to0.to, to1.to);
      erased_back[0] = to0.back * key_scale, erased_back[1] = to1.back * key_scale;
      scale_rows_of(square, write[0], write[1]);
      square_most = most_of(square);
      if (lane == 0) shared.most[part] = square_most;
    }
    __syncthreads();
    const HalfScale gram_by(most_of_four(shared.most));
    if (erases) put_square(shared.dgram, row0, square, gram_by.to);
    __syncthreads();
    if (erases) {
      sum.clear();
      sum.add<Stored::kByDepth, 4>(right_address<Stored::kByDepth>(shared.keys), part + 1,
                                   [&](int k) -> const unsigned(&)[4] { return erased[k]; });
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) kept.c[j][q] += erased_back[q / 2] * sum.c[j][q];
      add_floats(kept, given(scratch.erase, row0, floats.key_stride), given(scratch.erase, row1, floats.key_stride), dk);
      float dots[2];
      row_dots(kept, shared.keys, row0, dots);
      if (lane % 4 == 0) shared.write_erase[row0] = dots[0] * key_scale, shared.write_erase[row1] = dots[1] * key_scale;
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<float2*>(shared.stage + stage_place(row0 + 8 * half, 8 * j + 2 * (lane % 4))) =
              make_float2(write[half] * kept.c[j][2 * half], write[half] * kept.c[j][2 * half + 1]);
    } else {
      multiply_square<8, kHalfRow>(sum, shared.dgram, shared.keys, part, depth16);
      const float f = gram_by.back * key_scale;
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) kept.c[j][q] += f * sum.c[j][q];
      add_floats(kept, given(scratch.key, row0, floats.key_stride), given(scratch.key, row1, floats.key_stride), dk);
    }
    __syncthreads();
    if (!erases) {
      add_stage(kept, shared.stage, row0);
      put_floats(kept, place_of(scratch.key, row0, floats.key_stride), place_of(scratch.key, row1, floats.key_stride), dk);
    } else if (static_cast<int>(threadIdx.x) < 128 + 64) {
      const int i = static_cast<int>(threadIdx.x) - 128;
      if (i >= span.lo && i < span.hi) {
        float gate = *place_of(scratch.gate, i, 1);
        for (int w = 0; w < 8; ++w) gate += shared.whole[w];
        for (int s = 0; s < i; ++s) gate += shared.out[s];
        const int64_t row = span.row(sequence, i);
        const View &to_gate = targets.gate, &to_write = targets.write;
        if (to_gate.present())
          put_element(to_gate.at(sequence.index, row, head), to_gate.dtype, 0, gate, to_gate.accumulate);
        if (to_write.present())
          put_element(to_write.at(sequence.index, row, head), to_write.dtype, 0,
                      shared.write_value[i] + shared.write_erase[i], to_write.accumulate);
      }
    }
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_half_row_gradients(const DeltaInputs& in, const DeltaGradients& scratch, const MixerBackward& problem,
                                        void* stream) {
  const Targets targets{problem.dv, problem.dgate, problem.dwrite};
  return launch(delta_rule_half_row_gradients, in.batch.count * in.most_chunks() * scratch.nodes.pass_heads, kWideThreads,
                RowShared::kBytes, stream, in, scratch, targets);
}

int32_t load_delta_half_row_gradients() { return load_kernel(delta_rule_half_row_gradients); }

}  // namespace lla::cuda
