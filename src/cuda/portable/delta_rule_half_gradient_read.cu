// SPDX-License-Identifier: Apache-2.0
// delta_rule_gradient_read.cu on halves, for calls without states: from the gradients of a chunk's outputs, and of its
// queries as nodes see them, to those of q and lambda, and to what they give to k, v, gates and the inverse.
#include "cuda/portable/delta_rule_half_gradient_chunk.h"

namespace lla::cuda {

namespace {

struct ReadShared {
  char *queries, *keys, *values, *dy;  // [64][128] halves
  char* seen;                          // [64][128] halves: gradient of what nodes see, times the decay into a row
  char *x, *p, *r, *w, *dr, *dp;       // [64][64] halves
  float* tables;
  float* level;   // [64][8]: what rows read at each level of their chunk, over lambda
  float* into;    // [64]: gate: what rows read through their decay from the chunk's start
  float* pair;    // [4][64]: gate: what rows read from rows of the chunk, by sixteens of rows
  float* factor;  // [64]
  float* most;    // [16]

  static constexpr size_t kBytes = 5 * kHalfRows + 6 * kSquare + (DeltaRows::kFloats + 512 + 6 * 64 + 16) * sizeof(float);
  __device__ __forceinline__ ReadShared() {
    queries = shared_memory(), keys = queries + kHalfRows, values = keys + kHalfRows, dy = values + kHalfRows;
    seen = dy + kHalfRows;
    x = seen + kHalfRows, p = x + kSquare, r = p + kSquare, w = r + kSquare, dr = w + kSquare, dp = dr + kSquare;
    tables = reinterpret_cast<float*>(dp + kSquare);
    level = tables + DeltaRows::kFloats;
    into = level + 512, pair = into + 64, factor = pair + 256, most = factor + 64;
  }
};

// Sums of a row over the levels of its pairs, into out[8], and over all gates between: `gates` are the terms times lambda,
// pair[t] becomes the sum over rows i >= t of this warp's sixteen, and their columns s < t.
__device__ __forceinline__ void level_sums(const RowSum<4>& terms, int row0, float* level) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + 8 * half;
    float sums[7] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = terms.c[j][2 * half], y = terms.c[j][2 * half + 1];
      if (j == row >> 3) {
        const int at = local_level(row, 8 * j + 2 * (lane % 4)), next = local_level(row, 8 * j + 2 * (lane % 4) + 1);
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[n] += (at == n ? x : 0.0f) + (next == n ? y : 0.0f);
      } else {
        const int at = local_level(row, 8 * j);
#pragma unroll
        for (int n = 4; n < 7; ++n) sums[n] += at == n ? x + y : 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < 7; ++n) {
      float sum = sums[n];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (lane % 4 == 0) level[row * 8 + n] = sum;
    }
  }
}
__device__ __forceinline__ void pair_sums(const RowSum<4>& terms, int row0, float* pair) {
  const int lane = threadIdx.x % 32, q = lane % 4;
  float before[2] = {0, 0};  // over the columns left of 8 j
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float column[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x = terms.c[j][2 * half], y = terms.c[j][2 * half + 1];
      float scan = x + y;  // over the quad's lanes up to this one
      float other = __shfl_up_sync(kAllLanes, scan, 1);
      if (q >= 1) scan += other;
      other = __shfl_up_sync(kAllLanes, scan, 2);
      if (q >= 2) scan += other;
      const float whole = __shfl_sync(kAllLanes, scan, lane | 3);
      const float left = __shfl_up_sync(kAllLanes, scan, 1);
      const float here = before[half] + (q >= 1 ? left : 0.0f);
      const int row = row0 + 8 * half, t = 8 * j + 2 * q;
      if (t <= row) column[0] += here;
      if (t + 1 <= row) column[1] += here + x;
      before[half] += whole;
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int distance = 4; distance < 32; distance <<= 1) column[n] += __shfl_xor_sync(kAllLanes, column[n], distance);
    }
    if (lane < 4) pair[8 * j + 2 * lane] = column[0], pair[8 * j + 2 * lane + 1] = column[1];
  }
}

__global__ void __launch_bounds__(kWideThreads, 1)
    delta_rule_half_read_gradients(DeltaInputs in, DeltaGradients scratch, View dy, View dlambda) {
  const ReadShared shared;
  const DeltaRows rows(shared.tables);
  const DeltaScratch& floats = scratch.nodes;
  const DeltaHalfGradients& halves = scratch.halves;
  const DeltaHalfScratch& nodes = halves.nodes;
  const int64_t heads = floats.pass_heads, most = in.most_chunks(), tasks = in.batch.count * most * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_stride = static_cast<int>(nodes.key_stride);
  const int key_steps = (dk + 15) / 16, value_steps = (dv + 15) / 16;
  const float scale = static_cast<float>(in.shape.scale);
  const int warp = warp_number(), lane = static_cast<int>(threadIdx.x % 32), part = warp % 4;
  const bool squares = warp >= 4;  // works on the gradients of R and P
  const int row0 = 16 * part + lane / 4, row1 = row0 + 8;

  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = floats.first_head + task % heads, number = task / heads % most;
    const Sequence& sequence = in.batch.sequences[task / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.count) continue;
    const ChunkSpan span(sequence, in.chunk, chunks.range.first + number);
    if (span.hi <= span.lo) continue;
    const ChunkSource source{sequence, in.state, in.shape.grain, span};
    const int64_t group = in.shape.group_of(head), first_row = span.row(sequence, 0);
    const int64_t chunk_place = in.chunk.first_place(sequence) + number, place = chunk_place * in.chunk.rows;
    const int depth16 = (span.hi + 15) / 16;
    const auto place_of = [&](float* base, int r, int64_t stride) {
      return r < span.hi ? base + floats.place(place + r, head) * stride : nullptr;
    };
    const auto there = [&](int r) { return r >= span.lo && r < span.hi; };

    {
      const CallRows q(in.q, sequence, span, group), k(in.k, sequence, span, group), v(in.v, sequence, span, head),
          given(dy, sequence, span, head);
      bring_raw_rows(shared.queries, q, dk);
      bring_raw_rows(shared.keys, k, dk);
      bring_raw_rows(shared.values, v, dv);
      bring_raw_rows(shared.dy, given, dv);
      const unsigned short* x = nodes.inverse + nodes.place(chunk_place, head) * (kTile * kTile);
      for (int n = static_cast<int>(threadIdx.x); n < 512; n += kWideThreads)
        copy_async16(shared.x + half_place<kSquareRow>(n / 8, n % 8), reinterpret_cast<const float*>(x + 8 * n), 16);
      commit_copies();
      delta_load_rows(in, source, head, rows);
      if (threadIdx.x < 64) {
        const int r = static_cast<int>(threadIdx.x);
        const float factor = there(r) ? halves.seen_scale[nodes.place(first_row + r, head)] * rows.into(r) : 0.0f;
        shared.factor[r] = factor;
        const float biggest = warp_max(factor);
        if (lane == 0) shared.most[8 + warp] = biggest;
      }
      put_raw_rows(shared.queries, q, dk);
      put_raw_rows(shared.keys, k, dk);
      put_raw_rows(shared.values, v, dv);
      put_raw_rows(shared.dy, given, dv);
      wait_copies<0>();
    }
    const float query_scale = scale_tile(shared.queries, in.q.dtype, shared.most),
                key_scale = scale_tile(shared.keys, in.k.dtype, shared.most),
                value_scale = scale_tile(shared.values, in.v.dtype, shared.most),
                dy_scale = scale_tile(shared.dy, dy.dtype, shared.most);
    const float inverse_scale = nodes.inverse_scale[nodes.place(chunk_place, head)];
    // The gradient of what nodes see, with one scale.
    const HalfScale seen_by(fmaxf(shared.most[8], shared.most[9]) * 0x1p15f);
    {
      const int piece = static_cast<int>(threadIdx.x % 16);
#pragma unroll 2
      for (int i = 0; i < 4; ++i) {
        const int r = static_cast<int>(threadIdx.x / 16) + 16 * i;
        uint4 a = {0, 0, 0, 0}, b = a;
        const bool is = there(r) && 8 * piece < key_stride;
        const int64_t at = nodes.place(first_row + r, head);
        if (is) {
          a = *reinterpret_cast<const uint4*>(halves.seen + at * key_stride + 8 * piece);
          b = *reinterpret_cast<const uint4*>(nodes.query + at * key_stride + 8 * piece);
        }
        const float f = shared.factor[r] * seen_by.to;
        const unsigned from[4] = {a.x, a.y, a.z, a.w}, with[4] = {b.x, b.y, b.z, b.w};
        unsigned to[4];
        float dot = 0;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float2 y = unpack_halves(from[n]), z = unpack_halves(with[n]);
          dot += y.x * z.x + y.y * z.y;
          to[n] = f16_pair(f * y.x, f * y.y);
        }
#pragma unroll
        for (int distance = 8; distance > 0; distance >>= 1) dot += __shfl_xor_sync(kAllLanes, dot, distance);
        if (piece == 0) shared.into[r] = there(r) ? dot * halves.seen_scale[at] * nodes.query_scale[at] : 0.0f;
        uint4 out;
        out.x = to[0], out.y = to[1], out.z = to[2], out.w = to[3];
        *reinterpret_cast<uint4*>(shared.seen + half_place(r, piece)) = out;
      }
    }
    __syncthreads();

    // P = tril(scale Q K^T), R = P X
    const float p_scale = scale * query_scale * key_scale * 0x1p22f;
    unsigned p[4][4];
    RowSum<4> r, square;
    multiply_tile<4, Stored::kAlongDepth>(square, shared.queries, shared.keys, part, key_steps);
    keep_lower(square, row0, false);
    square.pack(p, 0x1p-22f, 0x1p-22f);
    r.clear();
    {
      const SharedAddress right = right_address<Stored::kByDepth, kSquareRow>(shared.x);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k > part) break;
#pragma unroll
        for (int j = 0; j <= k; ++j) {
          unsigned b[4];
          load_fragment<true>(b, block_address<kSquareRow>(right, k, j));
          multiply_halves(r.c[2 * j], p[k], b[0], b[1]);
          multiply_halves(r.c[2 * j + 1], p[k], b[2], b[3]);
        }
      }
    }
    scale_rows_of(r, p_scale * inverse_scale, p_scale * inverse_scale);
    keep_lower(r, row0, false);
    RowSum<4> dr;  // gradient of R
    if (!squares) {
      put_square(shared.p, row0, square, 0x1p-22f);
      const float biggest = most_of(r);
      if (lane == 0) shared.most[part] = biggest;
    } else {
      // y = W (w V), W = R .* decay .* lambda
      multiply_tile<4, Stored::kAlongDepth>(dr, shared.dy, shared.values, part, value_steps);
      RowSum<4> terms;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int i = row0 + 8 * (q / 2), s = 8 * j + 2 * (lane % 4) + q % 2;
          const bool lower = s <= i && there(i);
          const float decay = lower ? rows.decay(i, s) : 0.0f,
                      lambda = lower ? rows.lambda[i * 8 + local_level(i, s)] : 0.0f;
          const float d = dr.c[j][q] * (dy_scale * value_scale) * rows.write[s] * decay;
          terms.c[j][q] = lower ? r.c[j][q] * d : 0.0f;
          square.c[j][q] = lower ? terms.c[j][q] * lambda : 0.0f;
          dr.c[j][q] = lower ? d * lambda : 0.0f;
          r.c[j][q] = lower ? r.c[j][q] * decay * lambda : 0.0f;
        }
      level_sums(terms, row0, shared.level);
      pair_sums(square, row0, shared.pair + 64 * part);
      const float biggest = most_of(r);
      if (lane == 0) shared.most[4 + part] = biggest;
    }
    __syncthreads();
    const HalfScale r_by(most_of_four(shared.most)), w_by(most_of_four(shared.most + 4));
    put_square(squares ? shared.w : shared.r, row0, r, squares ? w_by.to : r_by.to);
    __syncthreads();

    unsigned left[4][4];
    float back[2] = {0, 0};
    WideRows sum;
    if (!squares) {
      multiply_square<8, kHalfRow>(sum, shared.w, shared.dy, part, depth16);
      scale_rows_of(sum, w_by.back * dy_scale, w_by.back * dy_scale);
      put_floats(sum, place_of(scratch.value, row0, floats.value_stride), place_of(scratch.value, row1, floats.value_stride),
                 dv);
      // seen = into .* (scale Q - R (w K))
      multiply_square<8, kHalfRow>(sum, shared.r, shared.seen, part, depth16);
      scale_rows_of(sum, -r_by.back * seen_by.back, -r_by.back * seen_by.back);
      put_floats(sum, place_of(scratch.erase, row0, floats.key_stride), place_of(scratch.erase, row1, floats.key_stride),
                 dk);
    } else {
      multiply_tile<4, Stored::kAlongDepth>(square, shared.seen, shared.keys, part, key_steps);
      const float f = -seen_by.back * key_scale;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) dr.c[j][q] += f * rows.write[8 * j + 2 * (lane % 4) + q % 2] * square.c[j][q];
      keep_lower(dr, row0, false);
      float biggest[2];
      dr.row_most(biggest);
      const HalfScale by0(biggest[0]), by1(biggest[1]);
      dr.pack(left, by0.to, by1.to);
      back[0] = by0.back * inverse_scale, back[1] = by1.back * inverse_scale;
      const float all = warp_max(fmaxf(biggest[0], biggest[1]));
      if (lane == 0) shared.most[part] = all;
    }
    __syncthreads();
    const HalfScale dr_by(most_of_four(shared.most));
    if (squares) {
      put_square(shared.dr, row0, dr, dr_by.to);
      // P = R X^-1
      square.clear();
      add_by_square(square, left, shared.x, 4);
      scale_rows_of(square, back[0], back[1]);
      keep_lower(square, row0, false);
      float biggest[2];
      square.row_most(biggest);
      const HalfScale by0(biggest[0]), by1(biggest[1]);
      square.pack(left, by0.to, by1.to);
      back[0] = by0.back * key_scale, back[1] = by1.back * key_scale;
      const float all = warp_max(fmaxf(biggest[0], biggest[1]));
      if (lane == 0) shared.most[4 + part] = all;
    }
    __syncthreads();
    const HalfScale dp_by(most_of_four(shared.most + 4));
    if (squares) put_square(shared.dp, row0, square, dp_by.to);
    __syncthreads();
    if (squares) {
      sum.clear();
      sum.add<Stored::kByDepth, 4>(right_address<Stored::kByDepth>(shared.keys), part + 1,
                                   [&](int k) -> const unsigned(&)[4] { return left[k]; });
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 y = unpack_halves(
              *reinterpret_cast<const unsigned*>(shared.seen + half_place(row0 + 8 * half, j) + 4 * (lane % 4)));
          float &a = sum.c[j][2 * half], &b = sum.c[j][2 * half + 1];
          a = back[half] * a + seen_by.back * y.x, b = back[half] * b + seen_by.back * y.y;
        }
      put_floats(sum, there(row0) ? scratch.dx_at(0, first_row + row0, head) : nullptr,
                 there(row1) ? scratch.dx_at(0, first_row + row1, head) : nullptr, dk);
    } else {
      multiply_square<4, kSquareRow>(square, shared.p, shared.dr, part, depth16);
      scale_rows_of(square, p_scale * dr_by.back, p_scale * dr_by.back);
      put_floats(square, place_of(scratch.inverse, row0, kTile), place_of(scratch.inverse, row1, kTile), kTile);
      multiply_square<8, kHalfRow>(sum, shared.dp, shared.queries, part, depth16);
      const float f = dp_by.back * scale * query_scale;
      scale_rows_of(sum, f, f);
      put_floats(sum, place_of(scratch.key, row0, floats.key_stride), place_of(scratch.key, row1, floats.key_stride), dk);
    }
    if (static_cast<int>(threadIdx.x) < span.hi) {
      const int i = static_cast<int>(threadIdx.x);
      float gate = shared.pair[i] + shared.pair[64 + i] + shared.pair[128 + i] + shared.pair[192 + i];
      for (int s = span.hi - 1; s >= i; --s) gate += shared.into[s];
      *place_of(scratch.gate, i, 1) = gate;
    }
    if (dlambda.present() && scratch.levels > 0) {
      const int levels = static_cast<int>(scratch.levels), queries = span.hi - span.lo;
      for (int n = static_cast<int>(threadIdx.x); n < queries * levels; n += kWideThreads) {
        const int i = span.lo + n / levels, column = n % levels;
        float total = halves.lambda[nodes.place(first_row + i, head) * levels + column];
        for (int level = 0; level < 7; ++level) {
          const bool live = level == 0 || ((i >> (level - 1)) & 1) != 0;
          if (live && in.shape.column(level) == column) total += shared.level[i * 8 + level];
        }
        put_element(dlambda.at(sequence.index, first_row + i, head), dlambda.dtype, column, total, dlambda.accumulate);
      }
    }
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_half_read_gradients(const DeltaInputs& in, const DeltaGradients& scratch, const MixerBackward& problem,
                                         void* stream) {
  return launch(delta_rule_half_read_gradients, in.batch.count * in.most_chunks() * scratch.nodes.pass_heads, kWideThreads,
                ReadShared::kBytes, stream, in, scratch, problem.dy, problem.dlambda);
}

int32_t load_delta_half_read_gradients() { return load_kernel(delta_rule_half_read_gradients); }

}  // namespace lla::cuda
