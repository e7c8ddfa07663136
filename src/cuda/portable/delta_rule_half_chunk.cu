// SPDX-License-Identifier: Apache-2.0
// delta_rule_chunk.cu on halves: four warps make what queries read, the other four the transposed inverse's rows of keys;
// then all of them the chunk's node.
#include "cuda/portable/delta_rule_chunk.h"
#include "cuda/portable/delta_rule_half.h"

namespace lla::cuda {

namespace {

constexpr int kInverseRow = 128;  // bytes of a row of the inverse in halves

struct ChunkShared {
  char *keys, *queries, *values;         // [64][128] halves, scaled by rows, one after the other
  char *left_content, *left_transition;  // [64][128] halves: rows of Kt with what weighs them in N and in Phi
  float *x, *temporary;                  // the inverse, in the place of both, until it is in halves
  char* inverse;                         // [64][64] halves: X(i, s) times the scale of key i
  float* tables;
  float *key_scale, *query_scale, *value_scale;  // one after the other
  float *content_factor, *transition_factor, *output_factor, *most;

  static constexpr size_t kBytes = 5 * kHalfRows + kTile * kInverseRow + (DeltaRows::kFloats + 6 * 64 + 32) * sizeof(float);
  static_assert(2 * kHalfRows >= (kTile * kAcross + 32 * 36) * 4);

  __device__ __forceinline__ ChunkShared() {
    keys = shared_memory();
    queries = keys + kHalfRows, values = queries + kHalfRows;
    left_content = values + kHalfRows, left_transition = left_content + kHalfRows;
    x = reinterpret_cast<float*>(left_content), temporary = x + kTile * kAcross;
    inverse = left_transition + kHalfRows;
    tables = reinterpret_cast<float*>(inverse + kTile * kInverseRow);
    key_scale = tables + DeltaRows::kFloats;
    query_scale = key_scale + 64, value_scale = query_scale + 64;
    content_factor = value_scale + 64, transition_factor = content_factor + 64;
    output_factor = transition_factor + 64, most = output_factor + 64;
  }
};

// Rows of packed halves to scratch memory, one row for each of 64.
template <class Row>
__device__ __forceinline__ void store_rows(const unsigned (&a)[8][4], int row, int columns, Row row_of) {
  const int first = row + static_cast<int>(threadIdx.x % 32 / 4);
  unsigned short* to[2] = {row_of(first), row_of(first + 8)};
  each_piece(a, [&](int half, int piece, uint4 x) {
    if (to[half] && 8 * piece < columns) *reinterpret_cast<uint4*>(to[half] + 8 * piece) = x;
  });
}

__global__ void __launch_bounds__(kWideThreads, 2) delta_rule_half_chunks(DeltaInputs in, DeltaHalfScratch scratch) {
  const ChunkShared shared;
  const DeltaRows rows(shared.tables);
  const int64_t heads = scratch.pass_heads, most = in.most_chunks(), tasks = in.batch.count * most * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_stride = static_cast<int>(scratch.key_stride), value_stride = static_cast<int>(scratch.value_stride);
  const float scale = static_cast<float>(in.shape.scale);
  const bool linear = !scratch.tree;
  const int warp = warp_number(), lane = static_cast<int>(threadIdx.x % 32), part = warp % 4;
  const bool asks = warp >= 4;  // works on queries, rows 16 part ...
  const int key_steps = (dk + 15) / 16;

  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.first_head + task % heads, number = task / heads % most;
    const Sequence& sequence = in.batch.sequences[task / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.count) continue;
    const ChunkSpan span(sequence, in.chunk, chunks.range.first + number);
    const bool full = number<chunks.range.full, queries = span.hi> span.lo;
    if (!full && !queries) continue;
    const ChunkSource source{sequence, in.state, in.shape.grain, span};
    const int64_t group = in.shape.group_of(head);
    const int depth16 = (span.hi + 15) / 16;  // of sums over rows

    bring_raw_rows(shared.keys, CallRows(in.k, sequence, span, group), dk);
    bring_raw_rows(shared.queries, CallRows(in.q, sequence, span, group), dk);
    bring_raw_rows(shared.values, CallRows(in.v, sequence, span, head), dv);
    commit_copies();
    delta_load_rows(in, source, head, rows);
    // lambda with the decay from the level's middle into a row
    for (int n = static_cast<int>(threadIdx.x); n < 512; n += kWideThreads) {
      const int level = n % 8;
      if (level > 0 && level < 7) rows.lambda[n] *= rows.prefix[(level - 1) * 64 + n / 8];
    }
    wait_copies<0>();
#pragma unroll 1
    for (int t = 0; t < 3; ++t) {
      const View& view = t == 0 ? in.k : t == 1 ? in.q : in.v;
      const int64_t of = t == 2 ? head : group;
      const int columns = t == 2 ? dv : dk;
      const bool plain = has_plain_rows(CallRows(view, sequence, span, of), columns);
      scale_rows(shared.keys + t * kHalfRows, shared.key_scale + 64 * t, view.dtype, plain ? span.lo : span.hi, columns,
                 [&](int r) -> Elements {
                   if (t == 0) return source.k(view, of, r);
                   if (t == 2) return source.v(view, of, r);
                   if (r < span.lo) return {};
                   return {view.at(sequence.index, span.row(sequence, r), of), view.dtype};
                 });
    }
    __syncthreads();
    if (threadIdx.x < 64) {
      const int s = static_cast<int>(threadIdx.x);
      const float output = rows.write[s] * shared.value_scale[s], content = output * rows.to_end(s),
                  transition = rows.write[s] * shared.key_scale[s];
      shared.output_factor[s] = output, shared.content_factor[s] = content, shared.transition_factor[s] = transition;
      const float most_content = warp_max(fabsf(content)), most_transition = warp_max(fabsf(transition));
      if (lane == 0) shared.most[8 + warp] = most_content, shared.most[10 + warp] = most_transition;
    }

    // Lower triangles of K K^T and of P = Q K^T.
    unsigned p[4][4];
    {
      RowSum<4> square;
      square.clear();
      const SharedAddress left = left_address<Stored::kAlongDepth>(asks ? shared.queries : shared.keys),
                          right = right_address<Stored::kAlongDepth>(shared.keys);
#pragma unroll 1
      for (int k = 0; k < key_steps; ++k) {
        unsigned a[4], b[4][4];
        load_fragment<false>(a, block_address(left, part, k));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j <= part) load_fragment<false>(b[j], block_address(right, j, k));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j > part) break;
          multiply_halves(square.c[2 * j], a, b[j][0], b[j][1]);
          multiply_halves(square.c[2 * j + 1], a, b[j][2], b[j][3]);
        }
      }
      const int i = 16 * part + lane / 4;
      if (asks) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            if (8 * j + 2 * (lane % 4) + q % 2 > i + 8 * (q / 2)) square.c[j][q] = 0;
          }
      } else {
        const float low = rows.write[i] * shared.key_scale[i], high = rows.write[i + 8] * shared.key_scale[i + 8];
        float2 across[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) across[j] = *reinterpret_cast<const float2*>(shared.key_scale + 8 * j + 2 * (lane % 4));
        float* x = shared.x + i * kAcross + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int s = 8 * j + 2 * (lane % 4);
          const float(&c)[4] = square.c[j];
          *reinterpret_cast<float2*>(x + 8 * j) =
              make_float2(s < i ? low * across[j].x * c[0] : 0.0f, s + 1 < i ? low * across[j].y * c[1] : 0.0f);
          *reinterpret_cast<float2*>(x + 8 * kAcross + 8 * j) =
              make_float2(s < i + 8 ? high * across[j].x * c[2] : 0.0f, s + 1 < i + 8 ? high * across[j].y * c[3] : 0.0f);
        }
      }
      square.pack(p, 0x1p-22f, 0x1p-22f);  // below 2^15
    }
    __syncthreads();
    delta_invert(shared.x, shared.temporary, span.hi);

    float inverse_back;
    {
      const int i = static_cast<int>(threadIdx.x / 4), first = 16 * static_cast<int>(threadIdx.x % 4);
      float4 x[4];
      float biggest = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        x[n] = *reinterpret_cast<const float4*>(shared.x + i * kAcross + first + 4 * n);
        biggest = fmaxf(fmaxf(fmaxf(biggest, fabsf(x[n].x)), fabsf(x[n].y)), fmaxf(fabsf(x[n].z), fabsf(x[n].w)));
      }
      const float key = shared.key_scale[i];
      const HalfScale by(block_max(i < span.hi ? biggest * key : 0.0f, shared.most));
      inverse_back = by.back;
      const float to = i < span.hi ? key * by.to : 0.0f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint4 out;
        out.x = f16_pair(x[2 * n].x * to, x[2 * n].y * to), out.y = f16_pair(x[2 * n].z * to, x[2 * n].w * to);
        out.z = f16_pair(x[2 * n + 1].x * to, x[2 * n + 1].y * to);
        out.w = f16_pair(x[2 * n + 1].z * to, x[2 * n + 1].w * to);
        *reinterpret_cast<uint4*>(shared.inverse + half_place<kInverseRow>(i, first / 8 + n)) = out;
      }
    }
    if (scratch.inverse) {
      const int i = static_cast<int>(threadIdx.x / 4), first = 16 * static_cast<int>(threadIdx.x % 4);
      const float* x = shared.x + i * kAcross + first;
      float biggest = 0;
#pragma unroll
      for (int n = 0; n < 16; ++n) biggest = fmaxf(biggest, fabsf(x[n]));
      const HalfScale by(block_max(i < span.hi ? biggest : 0.0f, shared.most));
      const float to = i < span.hi ? by.to : 0.0f;
      const int64_t place = scratch.place(in.chunk.first_place(sequence) + number, head);
      unsigned short* out = scratch.inverse + place * (kTile * kTile) + i * kTile + first;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint4 y;
        y.x = f16_pair(x[8 * n] * to, x[8 * n + 1] * to), y.y = f16_pair(x[8 * n + 2] * to, x[8 * n + 3] * to);
        y.z = f16_pair(x[8 * n + 4] * to, x[8 * n + 5] * to), y.w = f16_pair(x[8 * n + 6] * to, x[8 * n + 7] * to);
        *reinterpret_cast<uint4*>(out + 8 * n) = y;
      }
      if (threadIdx.x == 0) scratch.inverse_scale[place] = by.back;
    }
    __syncthreads();  // the inverse in fp32 is no longer needed, either
    const HalfScale content_by(fmaxf(shared.most[8], shared.most[9])),
        transition_by(fmaxf(shared.most[10], shared.most[11]));

    const int64_t row0 = span.row(sequence, 0);
    if (asks) {
      if (queries) {
        const int i0 = 16 * part + lane / 4, i1 = i0 + 8;
        const auto there = [&](int i) { return i >= span.lo && i < span.hi; };
        RowSum<4> r;  // R = P X
        r.clear();
        {
          const SharedAddress right = right_address<Stored::kByDepth, kInverseRow>(shared.inverse);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (k > part) break;
            unsigned b[4][4];
#pragma unroll
            for (int j = 0; j <= k; ++j) load_fragment<true>(b[j], block_address<kInverseRow>(right, k, j));
#pragma unroll
            for (int j = 0; j <= k; ++j) {
              multiply_halves(r.c[2 * j], p[k], b[j][0], b[j][1]);
              multiply_halves(r.c[2 * j + 1], p[k], b[j][2], b[j][3]);
            }
          }
        }
        const float f0 = scale * inverse_back * 0x1p22f * shared.query_scale[i0],
                    f1 = scale * inverse_back * 0x1p22f * shared.query_scale[i1];
        // R with what weighs its columns, as left operands: for Qt = into (scale Q - R (w K)), then for (R .* decay .*
        // lambda) (w V).
        unsigned left[4][4], later[4][4];
        float back[2], later_back[2];
        const auto weigh = [&](const float* factors, bool levels, unsigned(&to)[4][4], float(&to_back)[2]) {
          RowSum<4> weighed;
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * (lane % 4));
#pragma unroll
            for (int q = 0; q < 4; ++q) {
              const int i = q < 2 ? i0 : i1, s = 8 * j + 2 * (lane % 4) + q % 2;
              float weight = q % 2 ? factor.y : factor.x;
              if (levels) {
                const int level = s <= i ? local_level(i, s) : 0;
                weight *= rows.lambda[i * 8 + level] * (level > 0 ? rows.suffix[(level - 1) * 64 + s] : 1.0f);
              }
              weighed.c[j][q] = s <= i && there(i) ? r.c[j][q] * weight : 0.0f;
            }
          }
          float biggest[2];
          weighed.row_most(biggest);
          const HalfScale by0(biggest[0]), by1(biggest[1]);
          weighed.pack(to, by0.to, by1.to);
          to_back[0] = by0.back * f0, to_back[1] = by1.back * f1;
        };
        weigh(shared.transition_factor, false, left, back);
        weigh(shared.output_factor, true, later, later_back);
#pragma unroll 1
        for (int output = 0; output < (scratch.output ? 2 : 1); ++output) {
          WideRows sum;
          sum.clear();
          sum.add<Stored::kByDepth, 4>(right_address<Stored::kByDepth>(output ? shared.values : shared.keys), part + 1,
                                       [&](int k) -> const unsigned(&)[4] { return left[k]; });
          if (output) {
#pragma unroll
            for (int j = 0; j < 16; ++j)
#pragma unroll
              for (int q = 0; q < 4; ++q) sum.c[j][q] *= back[q / 2];
          } else {
            const float q0 = rows.into(i0) * scale * shared.query_scale[i0],
                        q1 = rows.into(i1) * scale * shared.query_scale[i1];
            const float r0 = rows.into(i0) * back[0], r1 = rows.into(i1) * back[1];
#pragma unroll
            for (int j = 0; j < 16; ++j) {
              const float2 low =
                  unpack_halves(*reinterpret_cast<const unsigned*>(shared.queries + half_place(i0, j) + 4 * (lane % 4)));
              const float2 high =
                  unpack_halves(*reinterpret_cast<const unsigned*>(shared.queries + half_place(i1, j) + 4 * (lane % 4)));
              float(&c)[4] = sum.c[j];
              c[0] = q0 * low.x - r0 * c[0], c[1] = q0 * low.y - r0 * c[1];
              c[2] = q1 * high.x - r1 * c[2], c[3] = q1 * high.y - r1 * c[3];
            }
          }
          unsigned short* rows_of = output ? scratch.output : scratch.query;
          float* scales = output ? scratch.output_scale : scratch.query_scale;
          const int stride = output ? value_stride : key_stride;
          float biggest[2];
          sum.row_most(biggest);
          const HalfScale by0(biggest[0]), by1(biggest[1]);
          unsigned packed[8][4];
          sum.pack(packed, by0.to, by1.to);
          store_rows(packed, 16 * part, stride, [&](int i) -> unsigned short* {
            return there(i) ? rows_of + scratch.place(row0 + i, head) * stride : nullptr;
          });
          if (lane % 4 == 0) {
            if (there(i0)) scales[scratch.place(row0 + i0, head)] = by0.back;
            if (there(i1)) scales[scratch.place(row0 + i1, head)] = by1.back;
          }
#pragma unroll
          for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int n = 0; n < 4; ++n) left[k][n] = later[k][n];
          back[0] = later_back[0], back[1] = later_back[1];
        }
      }
    } else if (full) {
      // Kt = X^T K; its rows, weighed, stay below 2^15.
      WideRows sum;
      sum.clear();
      const SharedAddress left = left_address<Stored::kByDepth, kInverseRow>(shared.inverse),
                          right = right_address<Stored::kByDepth>(shared.keys);
#pragma unroll 1
      for (int k = part; k < depth16; ++k) {
        unsigned a[4];
        load_fragment<true>(a, block_address<kInverseRow>(left, k, part));
        sum.add<Stored::kByDepth, 1>(
            right, 1, [&](int) -> const unsigned(&)[4] { return a; }, k);
      }
      const int s0 = 16 * part + lane / 4, s1 = s0 + 8;
      unsigned packed[8][4];
      const float content = content_by.to / kTwo36, transition = transition_by.to / kTwo36;
      sum.pack(packed, shared.content_factor[s0] * content, shared.content_factor[s1] * content);
      put_rows_into(shared.left_content, 16 * part, packed);
      sum.pack(packed, shared.transition_factor[s0] * transition, shared.transition_factor[s1] * transition);
      put_rows_into(shared.left_transition, 16 * part, packed);
    }
    __syncthreads();

    if (full) {
      // N = (to_end Kt)^T (w V), Phi = whole (I - Kt^T (w K)); linear: N^T and Kt^T (w K).
      const int64_t slot = chunks.slot + number;
      unsigned short* content = scratch.content_at(slot, head);
      unsigned short* transition = scratch.transition_at(0, slot, sequence.index, head);
      const float erased = inverse_back * transition_by.back * kTwo36;
      const HalfScale transition_to(linear ? 0.0f : 1.0f + erased * kTwo36);
      if (threadIdx.x == 0) {
        *scratch.content_scale_at(slot, head) = inverse_back * content_by.back * kTwo36 * 0x1p21f;
        *scratch.transition_scale_at(0, slot, sequence.index, head) =
            linear ? erased * 0x1p21f : transition_to.back * rows.whole();
        if (linear) scratch.whole[scratch.place(slot, head)] = rows.whole();
      }
      const float by = linear ? 0x1p-21f : -erased * transition_to.to, one = linear ? 0.0f : transition_to.to;
      // Sixteen tiles of sixteen rows; those who have worked on queries do fewer.
      for (int tile = asks ? 12 + part : part; tile < (asks ? 16 : 12); tile += 4) {
        const bool is_content = tile < 8;
        const int m16 = tile % 8;
        const int rows_left = (is_content && linear ? dv : dk) - 16 * m16;
        if (rows_left <= 0) continue;
        const char* left_tile = is_content ? linear ? shared.values : shared.left_content : shared.left_transition;
        const char* right_tile = is_content ? linear ? shared.left_content : shared.values : shared.keys;
        WideRows sum;
        sum.clear();
        const SharedAddress left = left_address<Stored::kByDepth>(left_tile),
                            right = right_address<Stored::kByDepth>(right_tile);
        unsigned a[4][4];
#pragma unroll
        for (int k = 0; k < 4; ++k) load_fragment<true>(a[k], block_address(left, k, m16));
        sum.add<Stored::kByDepth, 4>(right, depth16, [&](int k) -> const unsigned(&)[4] { return a[k]; });
        const int m0 = 16 * m16 + lane / 4;
        unsigned packed[8][4];
        const float f = is_content ? 0x1p-21f : by, diagonal = is_content ? 0.0f : one;
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const bool here = m0 + 8 * (q / 2) == 8 * j + 2 * (lane % 4) + q % 2;
            sum.c[j][q] = (here ? diagonal : 0.0f) + f * sum.c[j][q];
          }
        sum.pack(packed, 1.0f, 1.0f);
        unsigned short* out = is_content ? content : transition;
        const int stride = is_content && !linear ? value_stride : key_stride, last = is_content && linear ? dv : dk;
        store_rows(packed, 16 * m16, stride, [&](int m) { return m < last ? out + m * stride : nullptr; });
      }
    }
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_half_chunks(const DeltaInputs& in, const DeltaHalfScratch& scratch, void* stream) {
  return launch(delta_rule_half_chunks, in.batch.count * in.most_chunks() * scratch.pass_heads, kWideThreads,
                ChunkShared::kBytes, stream, in, scratch);
}

int32_t load_delta_half_chunks() { return load_kernel(delta_rule_half_chunks); }

}  // namespace lla::cuda
