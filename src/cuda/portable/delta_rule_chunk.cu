// SPDX-License-Identifier: Apache-2.0
// The delta rule, chunk by chunk: X = (I + stril(w K K^T))^-1, R = tril(scale Q K^T) X, Kt = X^T K. Makes what queries read
// inside their chunk, what older nodes see of them, and the node of a full chunk.
#include "cuda/portable/delta_rule_chunk.h"
#include "cuda/portable/delta_rule_wide.h"

namespace lla::cuda {

namespace {

constexpr int kFloats = 3 * kTile * kAcross + DeltaRows::kFloats + 2 * 64;

template <bool kExact>
__global__ void __launch_bounds__(kThreads, 3) delta_rule_chunks(DeltaInputs in, DeltaScratch scratch, bool reads) {
  float* t0 = reinterpret_cast<float*>(shared_memory());
  float* t1 = t0 + kTile * kAcross;
  float* t2 = t1 + kTile * kAcross;
  const DeltaRows rows(t2 + kTile * kAcross);
  float* factor = t2 + kTile * kAcross + DeltaRows::kFloats;  // write strength times decay to the end
  const int64_t heads = scratch.pass_heads, dk = in.shape.key_dim, dv = in.shape.value_dim, most = in.most_chunks();
  const float scale = static_cast<float>(in.shape.scale);
  const int64_t tasks = in.batch.count * most * heads;

  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.first_head + task % heads, number = task / heads % most;
    const Sequence& sequence = in.batch.sequences[task / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.count) continue;
    const ChunkSpan span(sequence, in.chunk, chunks.range.first + number);
    const bool full = number < chunks.range.full, queries = reads && span.hi > span.lo;
    if (!full && !queries) continue;
    const ChunkSource source{sequence, in.state, in.shape.grain, span};
    const int64_t group = in.shape.group_of(head);
    const auto key = [&](int r) { return source.k(in.k, group, r); };
    const auto value = [&](int r) { return source.v(in.v, head, r); };
    const auto query = [&](int r) -> Elements {
      if (r < span.lo || r >= span.hi) return {};
      return {in.q.at(sequence.index, span.row(sequence, r), group), in.q.dtype};
    };

    const int depth = delta_depth(0, span.hi);  // of sums over rows

    // Triangles of K K^T and Q K^T.
    TileSum gram, score;
    gram.clear();
    score.clear();
    for (int64_t at = 0; at < dk; at += kTile) {
      __syncthreads();
      load_tile(t0, kAlong, at, dk, key);
      if (queries) load_tile(t1, kAlong, at, dk, query);
      __syncthreads();
      const auto across = [&](int k, int n) { return t0[n * kAlong + k]; };
      const int columns = delta_depth(at, dk);
      multiply<kExact>(
          gram, columns, [&](int m, int k) { return t0[m * kAlong + k]; }, across);
      if (queries)
        multiply<kExact>(
            score, columns, [&](int m, int k) { return t1[m * kAlong + k]; }, across);
    }
    delta_load_rows(in, source, head, rows);
    gram.each([&](int i, int s, float& x) { t0[i * kAcross + s] = s < i ? rows.write[i] * x : 0.0f; });
    if (threadIdx.x < 64) factor[threadIdx.x] = rows.write[threadIdx.x] * rows.to_end(threadIdx.x);
    if (queries) score.each([&](int i, int s, float& x) { t1[i * kAlong + s] = s <= i ? scale * x : 0.0f; });
    __syncthreads();
    delta_invert(t0, t2, span.hi);

    if (queries) {
      TileSum sum;
      sum.clear();
      multiply<kExact>(
          sum, depth, [&](int m, int k) { return t1[m * kAlong + k]; }, [&](int k, int n) { return t0[k * kAcross + n]; });
      __syncthreads();
      sum.each([&](int i, int s, float& x) { t1[i * kAlong + s] = s <= i ? x : 0.0f; });
      // Qt = into (scale Q - R (w K))
      for (int64_t at = 0; at < dk; at += kTile) {
        load_tile(t2, kAcross, at, dk, key);
        __syncthreads();
        sum.clear();
        multiply<kExact>(
            sum, depth, [&](int m, int k) { return t1[m * kAlong + k]; },
            [&](int k, int n) { return rows.write[k] * t2[k * kAcross + n]; });
        __syncthreads();
        load_tile(t2, kAcross, at, dk, query);
        __syncthreads();
        sum.each([&](int i, int n, float& x) {
          float& q = t2[i * kAcross + n];
          q = rows.into(i) * (scale * q - x);
        });
        __syncthreads();
        store_tile(t2, kAcross, at, dk, [&](int r) -> Target {
          if (r < span.lo || r >= span.hi) return {};
          return {scratch.query_at(span.row(sequence, r), head)};
        });
        __syncthreads();
      }
      // (R .* decay .* lambda) (w V)
      if (scratch.output) {
        for (int n = threadIdx.x; n < kTile * kTile; n += kThreads) {
          const int i = n / kTile, s = n % kTile;
          if (s <= i) t1[i * kAlong + s] *= rows.weight(i, s);
        }
        for (int64_t at = 0; at < dv; at += kTile) {
          load_tile(t2, kAcross, at, dv, value);
          __syncthreads();
          sum.clear();
          multiply<kExact>(
              sum, depth, [&](int m, int k) { return t1[m * kAlong + k]; },
              [&](int k, int n) { return rows.write[k] * t2[k * kAcross + n]; });
          __syncthreads();
          put_sum(sum, t2, kAcross);
          __syncthreads();
          store_tile(t2, kAcross, at, dv, [&](int r) -> Target {
            if (r < span.lo || r >= span.hi) return {};
            return {scratch.output_at(span.row(sequence, r), head)};
          });
          __syncthreads();
        }
      }
    }

    if (full) {
      // N = (to_end Kt)^T (w V), Phi = whole (I - Kt^T (w K))
      float* content = scratch.content_at(chunks.slot + number, head);
      float* transition = scratch.transition_at(0, chunks.slot + number, sequence.index, head);
      const int key_stride = static_cast<int>(scratch.key_stride), value_stride = static_cast<int>(scratch.value_stride);
      const float whole = rows.whole();
      for (int64_t along = 0; along < dk; along += kTile) {
        load_tile(t2, kAcross, along, dk, key);
        __syncthreads();
        TileSum sum;
        sum.clear();
        multiply<kExact>(
            sum, depth, [&](int m, int k) { return t0[k * kAcross + m]; },
            [&](int k, int n) { return t2[k * kAcross + n]; });
        sum.each([&](int s, int n, float& x) { t1[s * kAcross + n] = x; });
        __syncthreads();
        const auto kt = [&](int m, int k) { return t1[k * kAcross + m]; };
        for (int64_t at = 0; at < dv; at += kTile) {
          float* to_content = content + along * value_stride + at;
          load_tile(t2, kAcross, at, dv, value);
          __syncthreads();
          sum.clear();
          multiply<kExact>(sum, depth, kt, [&](int k, int n) { return factor[k] * t2[k * kAcross + n]; });
          each_pair(sum, [&](int m, int n, float x, float y) {
            if (along + m < dk && at + n < dv)
              *reinterpret_cast<float2*>(to_content + m * value_stride + n) = make_float2(x, y);
          });
          __syncthreads();
        }
        for (int64_t at = 0; at < dk; at += kTile) {
          float* to_transition = transition + along * key_stride + at;
          const int diagonal = static_cast<int>(along - at);
          load_tile(t2, kAcross, at, dk, key);
          __syncthreads();
          sum.clear();
          multiply<kExact>(sum, depth, kt, [&](int k, int n) { return rows.write[k] * t2[k * kAcross + n]; });
          each_pair(sum, [&](int m, int n, float x, float y) {
            if (along + m >= dk || at + n >= dk) return;
            const float one = m + diagonal == n ? 1.0f : 0.0f, next = m + diagonal == n + 1 ? 1.0f : 0.0f;
            *reinterpret_cast<float2*>(to_transition + m * key_stride + n) =
                make_float2(whole * (one - x), whole * (next - y));
          });
          __syncthreads();
        }
      }
    }
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_chunks(const DeltaInputs& in, const DeltaScratch& scratch, bool reads, bool exact, void* stream) {
  if (in.shape.key_dim <= kWide && in.shape.value_dim <= kWide)
    return launch_delta_chunks_narrow(in, scratch, reads, exact, stream);
  return launch(exact ? delta_rule_chunks<true> : delta_rule_chunks<false>,
                in.batch.count * in.most_chunks() * scratch.pass_heads, kThreads, kFloats * sizeof(float), stream, in,
                scratch, reads);
}

int32_t load_delta_chunks() {
  int32_t status = load_kernel(delta_rule_chunks<true>);
  if (!status) status = load_kernel(delta_rule_chunks<false>);
  return status ? status : load_delta_chunks_narrow();
}

}  // namespace lla::cuda
