// SPDX-License-Identifier: Apache-2.0
// Gradients inside a chunk: from those of its outputs, of its queries as nodes see them, and of its own node, to those of its
// rows. Gates: a decay over an interval belongs to all gates of the interval, so that nothing is subtracted.
#include "cuda/portable/delta_rule_chunk.h"
#include "cuda/portable/delta_rule_gradient.h"

namespace lla::cuda {

namespace {

constexpr int kTileFloats = kTile * kAcross;
constexpr int kFloats = 5 * kTileFloats + DeltaRows::kFloats + 64 * 8 + 7 * 64 + 4;

// Where the gradients of the call's rows go.
struct RowTargets {
  View dy, v, gate, write, lambda;
  SlotMemory state;  // of gradients
};

struct ChunkMemory {
  float *x, *r, *t, *a, *b;  // tiles: X, R, and three more
  float* level;              // [64][8] sums over the levels at which a row reads its chunk
  float* pair;               // [64] gate: what rows read from rows of the chunk
  float* into;               // [64][2] what rows read through their decay from the chunk's start
  float* out;                // [64][2] what rows give through their decay to the chunk's end
  float* write;              // [64][2] gradient of the write strength
  float* whole;              // [4] per warp: through the decay over the chunk
};

// sum (+)= to rows of scratch memory, through tile `stage`. Begins and ends with barriers.
template <class Row>
__device__ __forceinline__ void put_rows(TileSum& sum, float* stage, int64_t at, int64_t columns, bool adds, Row row) {
  __syncthreads();
  put_sum(sum, stage, kAcross);
  __syncthreads();
  store_tile(stage, kAcross, at, columns, [&](int r) -> Target { return {row(r), LLA_F32, adds}; });
  __syncthreads();
}

// dots[row][half] += sums of a .* b over 64 columns of rows.
__device__ __forceinline__ void add_row_dots(const float* a, int stride_a, const float* b, int stride_b, float* dots) {
  const int row = threadIdx.x / 2, half = threadIdx.x % 2;
  float sum = 0;
  for (int c = 0; c < 32; ++c) {
    const int column = 32 * half + (c + row) % 32;  // rows begin at different banks
    sum += a[row * stride_a + column] * b[row * stride_b + column];
  }
  dots[2 * row + half] += sum;
}

template <bool kExact>
struct ChunkGradient {
  const DeltaInputs& in;
  const DeltaGradients& scratch;
  const RowTargets& targets;
  const DeltaSequence& chunks;
  const ChunkSource& source;
  const DeltaRows& rows;
  const ChunkMemory& memory;
  int64_t head, group, slot, place;
  int depth;  // of sums over rows

  __device__ __forceinline__ bool is_query(int r) const { return r >= source.span.lo && r < source.span.hi; }
  __device__ __forceinline__ int64_t row(int r) const { return source.span.row(source.sequence, r); }
  __device__ __forceinline__ Elements key(int r) const { return source.k(in.k, group, r); }
  __device__ __forceinline__ Elements value(int r) const { return source.v(in.v, head, r); }
  __device__ __forceinline__ Elements query(int r) const {
    if (!is_query(r)) return {};
    return {in.q.at(source.sequence.index, row(r), group), in.q.dtype};
  }
  __device__ __forceinline__ Elements dy(int r) const {
    if (!is_query(r)) return {};
    return {targets.dy.at(source.sequence.index, row(r), head), targets.dy.dtype};
  }
  __device__ __forceinline__ Elements seen(int r) const {  // what nodes see of a query
    if (!is_query(r)) return {};
    return {scratch.nodes.query_at(row(r), head), LLA_F32};
  }
  __device__ __forceinline__ float* dseen(int r) const { return is_query(r) ? scratch.dx_at(0, row(r), head) : nullptr; }
  __device__ __forceinline__ float* place_of(float* base, int r, int64_t stride) const {
    return r < source.span.hi ? base + scratch.nodes.place(place + r, head) * stride : nullptr;
  }
  __device__ __forceinline__ float* dkey(int r) const { return place_of(scratch.key, r, scratch.nodes.key_stride); }
  __device__ __forceinline__ float* derase(int r) const { return place_of(scratch.erase, r, scratch.nodes.key_stride); }
  __device__ __forceinline__ float* dvalue(int r) const { return place_of(scratch.value, r, scratch.nodes.value_stride); }

  // Tables and X; with `queries` also R and, in `score`, P.
  __device__ __forceinline__ void prepare(bool queries, TileSum& score) const {
    const int64_t dk = in.shape.key_dim;
    const float scale = static_cast<float>(in.shape.scale);
    float *a = memory.a, *b = memory.b, *x = memory.x;
    TileSum gram;
    gram.clear();
    score.clear();
    for (int64_t at = 0; at < dk; at += kTile) {
      __syncthreads();
      load_tile(a, kAlong, at, dk, [&](int r) { return key(r); });
      if (queries) load_tile(b, kAlong, at, dk, [&](int r) { return query(r); });
      __syncthreads();
      const auto across = [&](int k, int n) { return a[n * kAlong + k]; };
      multiply<kExact>(gram, delta_depth(at, dk), [&](int m, int k) { return a[m * kAlong + k]; }, across);
      if (queries) multiply<kExact>(score, delta_depth(at, dk), [&](int m, int k) { return b[m * kAlong + k]; }, across);
    }
    delta_load_rows(in, source, head, rows);
    gram.each([&](int i, int s, float& g) { x[i * kAcross + s] = s < i ? rows.write[i] * g : 0.0f; });
    score.each([&](int i, int s, float& p) { p = s <= i ? scale * p : 0.0f; });
    if (queries) put_sum(score, b, kAlong);
    for (int n = threadIdx.x; n < 64 * 8 + 7 * 64 + 4; n += kThreads) memory.level[n] = 0;
    __syncthreads();
    delta_invert(x, memory.t, source.span.hi);
    if (!queries) return;
    TileSum sum;
    sum.clear();
    multiply<kExact>(
        sum, depth, [&](int m, int k) { return b[m * kAlong + k]; }, [&](int k, int n) { return x[k * kAcross + n]; });
    sum.each([&](int i, int s, float& r) { memory.r[i * kAcross + s] = s <= i ? r : 0.0f; });
    __syncthreads();
  }

  // Level sums of tile `a` (R .* decay .* dW), and what its elements, times lambda, give to the gates between s and i.
  __device__ __forceinline__ void pair_sums() const {
    float* a = memory.a;
    if (threadIdx.x < kTile) {
      const int i = threadIdx.x;
      float before = 0;
      for (int s = 0; s <= i; ++s) {
        const float x = a[i * kAlong + s];
        const int level = local_level(i, s);
        memory.level[i * 8 + level] += x;
        a[i * kAlong + s] = before;
        before += x * rows.lambda[i * 8 + level];
      }
    }
    __syncthreads();
    if (threadIdx.x < kTile) {
      const int t = threadIdx.x;
      float sum = 0;
      for (int i = t; i < kTile; ++i) sum += a[i * kAlong + t];
      memory.pair[t] = sum;
    }
  }

  // What comes from the outputs and from queries as nodes see them. Sets the gradients of q (in place of dseen), and of value,
  // erase and key in part; adds to dx, the gradient of X.
  __device__ __forceinline__ void from_queries(TileSum& score, TileSum& dx) const {
    const int64_t dk = in.shape.key_dim, dv = in.shape.value_dim;
    const float scale = static_cast<float>(in.shape.scale);
    float *a = memory.a, *b = memory.b, *t = memory.t, *x = memory.x, *r = memory.r;
    // y = W (w V), W = R .* decay .* lambda
    TileSum dr;
    dr.clear();
    for (int64_t at = 0; at < dv; at += kTile) {
      __syncthreads();
      load_tile(a, kAlong, at, dv, [&](int i) { return dy(i); });
      load_tile(b, kAlong, at, dv, [&](int i) { return value(i); });
      __syncthreads();
      multiply<kExact>(
          dr, delta_depth(at, dv), [&](int m, int k) { return a[m * kAlong + k]; },
          [&](int k, int n) { return rows.write[n] * b[n * kAlong + k]; });
    }
    __syncthreads();
    dr.each([&](int i, int s, float& d) {
      const bool lower = s <= i;
      const float inside = lower ? r[i * kAcross + s] : 0.0f, decay = lower ? rows.decay(i, s) : 0.0f;
      const float lambda = lower ? rows.lambda[i * 8 + local_level(i, s)] : 0.0f;
      t[i * kAcross + s] = inside * decay * lambda;
      a[i * kAlong + s] = inside * decay * d;
      d *= decay * lambda;
    });
    __syncthreads();
    pair_sums();
    for (int64_t at = 0; at < dv; at += kTile) {
      __syncthreads();
      load_tile(a, kAcross, at, dv, [&](int i) { return dy(i); });
      __syncthreads();
      TileSum sum;
      sum.clear();
      multiply<kExact>(
          sum, depth, [&](int m, int k) { return t[k * kAcross + m]; }, [&](int k, int n) { return a[k * kAcross + n]; });
      put_rows(sum, b, at, dv, false, [&](int i) { return dvalue(i); });
    }
    // seen = into .* (scale Q - R (w K))
    for (int64_t at = 0; at < dk; at += kTile) {
      __syncthreads();
      load_tile(a, kAlong, at, dk, [&](int i) -> Elements { return {dseen(i), LLA_F32}; });
      load_tile(b, kAlong, at, dk, [&](int i) { return key(i); });
      load_tile(t, kAlong, at, dk, [&](int i) { return seen(i); });
      __syncthreads();
      multiply<kExact>(
          dr, delta_depth(at, dk), [&](int m, int k) { return -rows.into(m) * a[m * kAlong + k]; },
          [&](int k, int n) { return rows.write[n] * b[n * kAlong + k]; });
      add_row_dots(a, kAlong, t, kAlong, memory.into);
    }
    __syncthreads();
    // R = P X
    dr.each([&](int i, int s, float& d) { t[i * kAcross + s] = s <= i ? d : 0.0f; });
    put_sum(score, a, kAcross);
    __syncthreads();
    multiply<kExact>(
        dx, depth, [&](int m, int k) { return a[k * kAcross + m]; }, [&](int k, int n) { return t[k * kAcross + n]; });
    score.clear();
    multiply<kExact>(
        score, depth, [&](int m, int k) { return t[m * kAcross + k]; }, [&](int k, int n) { return x[n * kAcross + k]; });
    __syncthreads();
    score.each([&](int i, int s, float& d) { t[i * kAcross + s] = s <= i ? d : 0.0f; });
    // P = tril(scale Q K^T)
    for (int64_t at = 0; at < dk; at += kTile) {
      __syncthreads();
      load_tile(a, kAcross, at, dk, [&](int i) { return key(i); });
      load_tile(b, kAcross, at, dk, [&](int i) -> Elements { return {dseen(i), LLA_F32}; });
      __syncthreads();
      TileSum dq, erase;
      dq.clear();
      erase.clear();
      multiply<kExact>(
          dq, depth, [&](int m, int k) { return t[m * kAcross + k]; }, [&](int k, int n) { return a[k * kAcross + n]; });
      dq.each([&](int i, int n, float& d) { d += rows.into(i) * b[i * kAcross + n]; });
      multiply<kExact>(
          erase, depth, [&](int m, int k) { return r[k * kAcross + m]; },
          [&](int k, int n) { return -rows.into(k) * b[k * kAcross + n]; });
      put_rows(dq, a, at, dk, false, [&](int i) { return dseen(i); });
      put_rows(erase, b, at, dk, false, [&](int i) { return derase(i); });
      load_tile(a, kAcross, at, dk, [&](int i) { return query(i); });
      __syncthreads();
      dq.clear();
      multiply<kExact>(
          dq, depth, [&](int m, int k) { return t[k * kAcross + m]; }, [&](int k, int n) { return scale * a[k * kAcross + n]; });
      put_rows(dq, b, at, dk, false, [&](int i) { return dkey(i); });
    }
  }

  // What comes from the chunk's own node: N = (to_end Kt)^T (w V), Phi = whole (I - Kt^T (w K)), Kt = X^T K. `adds`: to what
  // is there already.
  __device__ __forceinline__ void from_node(TileSum& dx, bool adds) const {
    const int64_t dk = in.shape.key_dim, dv = in.shape.value_dim;
    const DeltaScratch& nodes = scratch.nodes;
    float *a = memory.a, *b = memory.b, *kt = memory.t, *x = memory.x;
    const float *dcontent = scratch.content_at(slot, head), *dtransition = scratch.transition_at(0, slot, head);
    const float* transition = nodes.transition_at(0, slot, source.sequence.index, head);
    const float whole = rows.whole();
    float through_whole = 0;
    for (int64_t m0 = 0; m0 < dk; m0 += kTile) {
      const auto matrix = [&](const float* base, int64_t stride) {
        return [=](int r) -> Elements {
          if (m0 + r >= dk) return {};
          return {base + (m0 + r) * stride, LLA_F32};
        };
      };
      __syncthreads();
      load_tile(a, kAcross, m0, dk, [&](int i) { return key(i); });
      __syncthreads();
      TileSum sum, dkt;
      sum.clear();
      dkt.clear();
      multiply<kExact>(
          sum, depth, [&](int m, int k) { return x[k * kAcross + m]; }, [&](int k, int n) { return a[k * kAcross + n]; });
      put_sum(sum, kt, kAcross);
      for (int64_t at = 0; at < dv; at += kTile) {
        __syncthreads();
        load_tile(a, kAlong, at, dv, [&](int i) { return value(i); });
        load_tile(b, kAlong, at, dv, matrix(dcontent, nodes.value_stride));
        __syncthreads();
        multiply<kExact>(
            dkt, delta_depth(at, dv), [&](int s, int k) { return rows.to_end(s) * rows.write[s] * a[s * kAlong + k]; },
            [&](int k, int n) { return b[n * kAlong + k]; });
        sum.clear();
        multiply<kExact>(
            sum, delta_depth(m0, dk), [&](int s, int k) { return rows.to_end(s) * kt[s * kAcross + k]; },
            [&](int k, int n) { return b[k * kAlong + n]; });
        put_rows(sum, a, at, dv, adds || m0 > 0, [&](int i) { return dvalue(i); });
      }
      dkt.row_sums([&](int s, int m, float d) { return d * kt[s * kAcross + m]; },
                   [&](int s, int half, float d) { memory.out[2 * s + half] += d; });
      for (int64_t at = 0; at < dk; at += kTile) {
        __syncthreads();
        load_tile(a, kAlong, at, dk, [&](int i) { return key(i); });
        load_tile(b, kAlong, at, dk, matrix(dtransition, nodes.key_stride));
        __syncthreads();
        multiply<kExact>(
            dkt, delta_depth(at, dk), [&](int s, int k) { return -whole * rows.write[s] * a[s * kAlong + k]; },
            [&](int k, int n) { return b[n * kAlong + k]; });
        sum.clear();
        multiply<kExact>(
            sum, delta_depth(m0, dk), [&](int s, int k) { return -whole * kt[s * kAcross + k]; },
            [&](int k, int n) { return b[k * kAlong + n]; });
        for (int n = threadIdx.x; n < kTile * kTile; n += kThreads) {
          const int64_t i = m0 + n / kTile, j = at + n % kTile;
          if (i < dk && j < dk) through_whole += b[n / kTile * kAlong + n % kTile] * transition[i * nodes.key_stride + j];
        }
        put_rows(sum, a, at, dk, adds || m0 > 0, [&](int i) { return derase(i); });
      }
      __syncthreads();
      put_sum(dkt, b, kAcross);
      load_tile(a, kAlong, m0, dk, [&](int i) { return key(i); });
      __syncthreads();
      multiply<kExact>(
          dx, delta_depth(m0, dk), [&](int m, int k) { return a[m * kAlong + k]; },
          [&](int k, int n) { return b[n * kAcross + k]; });
      sum.clear();
      multiply<kExact>(
          sum, depth, [&](int m, int k) { return x[m * kAcross + k]; }, [&](int k, int n) { return b[k * kAcross + n]; });
      put_rows(sum, a, m0, dk, adds, [&](int i) { return dkey(i); });
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) through_whole += __shfl_xor_sync(kAllLanes, through_whole, lanes);
    if (threadIdx.x % 32 == 0) memory.whole[threadIdx.x / 32] = through_whole;
  }

  // X = (I + stril((w K) K^T))^-1, and all that is left to do for the rows of k. `adds`: to what is there already.
  __device__ __forceinline__ void finish_keys(TileSum& dx, bool adds) const {
    const int64_t dk = in.shape.key_dim;
    float *a = memory.a, *b = memory.b, *t = memory.t, *x = memory.x;
    __syncthreads();
    put_sum(dx, t, kAcross);
    __syncthreads();
    TileSum sum;
    sum.clear();
    multiply<kExact>(
        sum, depth, [&](int m, int k) { return x[k * kAcross + m]; }, [&](int k, int n) { return k < n ? 0.0f : t[k * kAcross + n]; });
    put_sum(sum, a, kAcross);
    __syncthreads();
    sum.clear();
    multiply<kExact>(
        sum, depth, [&](int m, int k) { return -a[m * kAcross + k]; }, [&](int k, int n) { return x[n * kAcross + k]; });
    sum.each([&](int i, int s, float& d) { t[i * kAcross + s] = s < i ? d : 0.0f; });
    for (int64_t at = 0; at < dk; at += kTile) {
      __syncthreads();
      load_tile(a, kAcross, at, dk, [&](int i) { return key(i); });
      load_tile(b, kAcross, at, dk, [&](int i) -> Elements { return {adds ? derase(i) : nullptr, LLA_F32}; });
      __syncthreads();
      TileSum erase;
      erase.clear();
      sum.clear();
      multiply<kExact>(
          erase, depth, [&](int m, int k) { return t[m * kAcross + k]; }, [&](int k, int n) { return a[k * kAcross + n]; });
      multiply<kExact>(
          sum, depth, [&](int m, int k) { return t[k * kAcross + m]; },
          [&](int k, int n) { return rows.write[k] * a[k * kAcross + n]; });
      erase.each([&](int i, int n, float& d) { d += b[i * kAcross + n]; });
      erase.row_sums([&](int i, int n, float d) { return d * a[i * kAcross + n]; },
                     [&](int i, int half, float d) { memory.write[2 * i + half] += d; });
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const int row = 32 * (threadIdx.x / 64) + threadIdx.x % 32 / 4 + 16 * i + 8 * (q / 2);
            sum.c[i][j][q] += rows.write[row] * erase.c[i][j][q];
          }
      put_rows(sum, b, at, dk, adds, [&](int i) { return dkey(i); });
    }
  }

  // Rows of v, and everything that is one number for each row.
  __device__ __forceinline__ void finish_rows(bool there) const {
    const int64_t dv = in.shape.value_dim, grain = in.shape.grain;
    const Sequence& sequence = source.sequence;
    const ChunkSpan& span = source.span;
    const SlotMemory& state = targets.state;
    const TailLayout& layout = state.tail_layout;
    const auto final_ring = [&](int r) {
      return delta_gradient_ring(sequence.final_gradient, layout, grain, span.begin + r);
    };
    const auto initial_ring = [&](int r) {
      return delta_gradient_ring(sequence.initial_gradient, layout, grain, span.begin + r);
    };
    const auto has_final = [&](int r) { return delta_has_final_row(state, sequence, grain, span.begin + r); };
    const bool initial = state.tails.base && sequence.initial_gradient.tail >= 0;
    float *a = memory.a, *b = memory.b, *t = memory.t;
    for (int64_t at = 0; at < dv; at += kTile) {
      __syncthreads();
      load_tile(a, kAcross, at, dv, [&](int i) -> Elements { return {there ? dvalue(i) : nullptr, LLA_F32}; });
      load_tile(b, kAcross, at, dv, [&](int i) { return value(i); });
      load_tile(t, kAcross, at, dv, [&](int i) -> Elements {
        if (i >= span.hi || !has_final(i)) return {};
        return {state.tail_v(sequence.final_gradient.tail, head, final_ring(i)), layout.dtype};
      });
      __syncthreads();
      add_row_dots(a, kAcross, b, kAcross, memory.write);
      __syncthreads();
      for (int n = threadIdx.x; n < kTile * kTile; n += kThreads) {
        const int i = n / kTile, c = n % kTile;
        const bool real = i >= span.lo || source.in_tail(i);
        a[i * kAcross + c] = real ? rows.write[i] * a[i * kAcross + c] + t[i * kAcross + c] : 0.0f;
      }
      __syncthreads();
      store_tile(a, kAcross, at, dv, [&](int i) -> Target {
        if (i >= span.hi) return {};
        if (i >= span.lo) {
          if (!targets.v.present()) return {};
          return {targets.v.at(sequence.index, row(i), head), targets.v.dtype, targets.v.accumulate};
        }
        if (!initial) return {};
        return {state.tail_v(sequence.initial_gradient.tail, head, initial_ring(i)), layout.dtype};
      });
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < span.hi) {
      const int i = threadIdx.x;
      float gate = memory.pair[i] + (memory.whole[0] + memory.whole[1] + memory.whole[2] + memory.whole[3]);
      float before = 0, after = 0;
      for (int s = 0; s < i; ++s) before += memory.out[2 * s] + memory.out[2 * s + 1];
      for (int s = kTile - 1; s >= i; --s) after += memory.into[2 * s] + memory.into[2 * s + 1];
      gate += before + after;
      float write = memory.write[2 * i] + memory.write[2 * i + 1];
      if (has_final(i)) {
        const int32_t tail = sequence.final_gradient.tail;
        gate += *reinterpret_cast<const float*>(state.tail_gate(tail, head, final_ring(i)));
        write += *reinterpret_cast<const float*>(state.tail_write(tail, head, final_ring(i)));
      }
      if (i >= span.lo) {
        const View &to_gate = targets.gate, &to_write = targets.write;
        if (to_gate.present())
          put_element(to_gate.at(sequence.index, row(i), head), to_gate.dtype, 0, gate, to_gate.accumulate);
        if (to_write.present())
          put_element(to_write.at(sequence.index, row(i), head), to_write.dtype, 0, write, to_write.accumulate);
      } else if (initial) {
        const bool real = source.in_tail(i);
        const int32_t tail = sequence.initial_gradient.tail;
        *reinterpret_cast<float*>(state.tail_gate(tail, head, initial_ring(i))) = real ? gate : 0.0f;
        *reinterpret_cast<float*>(state.tail_write(tail, head, initial_ring(i))) = real ? write : 0.0f;
      }
    }
    if (!targets.lambda.present() || scratch.levels == 0) return;
    const int64_t queries = span.hi > span.lo ? span.hi - span.lo : 0;
    for (int64_t n = threadIdx.x; n < queries * scratch.levels; n += kThreads) {
      const int i = span.lo + static_cast<int>(n / scratch.levels);
      const int64_t column = n % scratch.levels;
      float sum = scratch.lambda[scratch.nodes.place(row(i), head) * scratch.levels + column];
      for (int level = 0; level < 7; ++level) {
        const bool live = level == 0 || ((i >> (level - 1)) & 1) != 0;
        if (live && in.shape.column(level) == column) sum += memory.level[i * 8 + level];
      }
      put_element(targets.lambda.at(sequence.index, row(i), head), targets.lambda.dtype, column, sum,
                  targets.lambda.accumulate);
    }
  }
};

template <bool kExact>
__global__ void __launch_bounds__(kThreads, 2) delta_rule_chunk_gradients(DeltaInputs in, DeltaGradients scratch,
                                                                          RowTargets targets) {
  float* tiles = reinterpret_cast<float*>(shared_memory());
  float* tables = tiles + 5 * kTileFloats;
  const DeltaRows rows(tables);
  float* sums = tables + DeltaRows::kFloats;
  const ChunkMemory memory{tiles,       tiles + kTileFloats, tiles + 2 * kTileFloats, tiles + 3 * kTileFloats,
                           tiles + 4 * kTileFloats, sums, sums + 512, sums + 576, sums + 704, sums + 832, sums + 960};
  const int64_t heads = scratch.nodes.pass_heads, most = in.most_chunks(), tasks = in.batch.count * most * heads;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.nodes.first_head + task % heads, number = task / heads % most;
    const Sequence& sequence = in.batch.sequences[task / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.count) continue;
    const ChunkSpan span(sequence, in.chunk, chunks.range.first + number);
    const bool full = number < chunks.range.full, queries = span.hi > span.lo;
    const ChunkSource source{sequence, in.state, in.shape.grain, span};
    const int64_t place = (in.chunk.first_place(sequence) + number) * in.chunk.rows;
    const ChunkGradient<kExact> chunk{in,   scratch, targets, chunks, source, rows, memory, head, in.shape.group_of(head),
                                      chunks.slot + number, place, delta_depth(0, span.hi)};
    TileSum score, dx;
    dx.clear();
    chunk.prepare(queries, score);
    if (queries) chunk.from_queries(score, dx);
    if (full) chunk.from_node(dx, queries);
    chunk.finish_keys(dx, queries || full);
    chunk.finish_rows(queries || full);
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_chunk_gradients(const DeltaInputs& in, const DeltaGradients& scratch, const MixerBackward& problem,
                                     bool exact, void* stream) {
  const RowTargets targets{problem.dy, problem.dv, problem.dgate, problem.dwrite, problem.dlambda, problem.gradient};
  return launch(exact ? delta_rule_chunk_gradients<true> : delta_rule_chunk_gradients<false>,
                in.batch.count * in.most_chunks() * scratch.nodes.pass_heads, kThreads, kFloats * sizeof(float), stream, in,
                scratch, targets);
}

int32_t load_delta_chunk_gradients() {
  const int32_t status = load_kernel(delta_rule_chunk_gradients<true>);
  return status ? status : load_kernel(delta_rule_chunk_gradients<false>);
}

}  // namespace lla::cuda
