// SPDX-License-Identifier: Apache-2.0
// delta_rule_chunk.cu for key and value dimensions of at most 128: K, then Q and V, stay in shared memory as a whole.
#include "cuda/portable/delta_rule_chunk.h"
#include "cuda/portable/delta_rule_wide.h"

namespace lla::cuda {

namespace {

// X and R lie side by side, so that Kt fits into their place.
constexpr int kXFloats = kTile * kAcross, kRFloats = kTile * kAlong;
static_assert(kXFloats + kRFloats >= kTile * kWideAcross);
constexpr int kFloats = 2 * kTile * kWideAlong + kXFloats + kRFloats + DeltaRows::kFloats + 64;

template <bool kExact>
__global__ void __launch_bounds__(kWideThreads, kExact ? 1 : 2)
    delta_rule_chunks_narrow(DeltaInputs in, DeltaScratch scratch, bool reads) {
  float* keys = reinterpret_cast<float*>(shared_memory());  // [64][kWideAlong]
  float* other = keys + kTile * kWideAlong;                 // Q, then V
  float* x = other + kTile * kWideAlong;                    // [64][kAcross]
  float* r = x + kXFloats;                                  // [64][kAlong]
  const DeltaRows rows(r + kRFloats);
  float* factor = r + kRFloats + DeltaRows::kFloats;  // write strength times decay to the end
  const int64_t heads = scratch.pass_heads, most = in.most_chunks(), tasks = in.batch.count * most * heads;
  const int dk = static_cast<int>(in.shape.key_dim), dv = static_cast<int>(in.shape.value_dim);
  const int key_depth = delta_depth(0, dk) + (dk > kTile ? delta_depth(kTile, dk) : 0);
  const float scale = static_cast<float>(in.shape.scale);
  const int warp = threadIdx.x / 32;

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
    const auto bring_values = [&] {
      load_rows<true>(other, kWideAlong, CallRows(in.v, sequence, span, head), 0, dv);
      load_tail_rows<true>(other, kWideAlong, span.lo, 0, dv, [&](int i) { return source.v(in.v, head, i); });
    };
    const int depth = delta_depth(0, span.hi);  // of sums over rows

    load_rows<true>(keys, kWideAlong, CallRows(in.k, sequence, span, group), 0, dk);
    load_tail_rows<true>(keys, kWideAlong, span.lo, 0, dk, [&](int i) { return source.k(in.k, group, i); });
    if (queries) load_rows<true>(other, kWideAlong, CallRows(in.q, sequence, span, group), 0, dk);
    // Rows of scratch memory, as if row 0 belonged to the call too.
    const int64_t first_row = span.row(sequence, 0);
    const int query_stride = static_cast<int>(heads * scratch.key_stride),
              output_stride = static_cast<int>(heads * scratch.value_stride);
    delta_load_rows(in, source, head, rows);
    // Triangles of K K^T, by the first four warps, and of Q K^T, by the others.
    WarpSum<2, 4> square(32 * (warp / 2 % 2), 32 * (warp % 2));
    square.clear();
    const float* left = warp < 4 ? keys : other;
    if (warp < 4 || queries) {
      square.template add<kExact>(
          key_depth, [&](int m, int k) { return left[m * kWideAlong + k]; },
          [&](int k, int n) { return keys[n * kWideAlong + k]; });
    }
    if (warp < 4) {
      square.each_pair([&](int i, int s, float g, float h) {
        x[i * kAcross + s] = s < i ? rows.write[i] * g : 0.0f;
        x[i * kAcross + s + 1] = s + 1 < i ? rows.write[i] * h : 0.0f;
      });
    }
    if (threadIdx.x < 64) factor[threadIdx.x] = rows.write[threadIdx.x] * rows.to_end(threadIdx.x);
    __syncthreads();
    delta_invert(x, r, span.hi);

    if (queries) {
      if (warp >= 4) {
        square.each_pair([&](int i, int s, float p, float h) {
          r[i * kAlong + s] = s <= i ? scale * p : 0.0f;
          r[i * kAlong + s + 1] = s + 1 <= i ? scale * h : 0.0f;
        });
      }
      __syncthreads();
      WarpSum<2, 2> inside(32 * (warp / 4), 16 * (warp % 4));
      inside.clear();
      inside.template add<kExact>(
          depth, [&](int m, int k) { return r[m * kAlong + k]; }, [&](int k, int n) { return x[k * kAcross + n]; });
      __syncthreads();
      inside.each_pair([&](int i, int s, float y, float z) {
        r[i * kAlong + s] = s <= i ? y : 0.0f;
        r[i * kAlong + s + 1] = s + 1 <= i ? z : 0.0f;
      });
      __syncthreads();
      // Qt = into (scale Q - R (w K))
      WarpSum<2, 4> sum(32 * (warp / 4), 32 * (warp % 4));
      sum.clear();
      sum.template add<kExact>(
          depth, [&](int m, int k) { return r[m * kAlong + k]; },
          [&](int k, int n) { return rows.write[k] * keys[k * kWideAlong + n]; });
      float* query = scratch.query_at(first_row, head);
      sum.each_pair([&](int i, int n, float y, float z) {
        if (i < span.lo || i >= span.hi || n >= dk) return;
        const float* q = other + i * kWideAlong + n;
        const float into = rows.into(i);
        *reinterpret_cast<float2*>(query + i * query_stride + n) =
            make_float2(into * (scale * q[0] - y), into * (scale * q[1] - z));
      });
    }
    __syncthreads();
    bring_values();
    if (queries) {
      // (R .* decay .* lambda) (w V)
      if (scratch.output) {
#pragma unroll 1
        for (int n = threadIdx.x; n < kTile * kTile; n += kWideThreads) {
          const int i = n / kTile, s = n % kTile;
          if (s <= i) r[i * kAlong + s] *= rows.weight(i, s);
        }
        __syncthreads();
        WarpSum<2, 4> sum(32 * (warp / 4), 32 * (warp % 4));
        sum.clear();
        sum.template add<kExact>(
            depth, [&](int m, int k) { return r[m * kAlong + k]; },
            [&](int k, int n) { return rows.write[k] * other[k * kWideAlong + n]; });
        float* output = scratch.output_at(first_row, head);
        sum.each_pair([&](int i, int n, float y, float z) {
          if (i < span.lo || i >= span.hi || n >= dv) return;
          *reinterpret_cast<float2*>(output + i * output_stride + n) = make_float2(y, z);
        });
      }
    }

    if (full) {
      // N = (to_end Kt)^T (w V), Phi = whole (I - Kt^T (w K))
      float* kt = x;
      {
        WarpSum<2, 4> sum(32 * (warp / 4), 32 * (warp % 4));
        sum.clear();
        sum.template add<kExact>(
            depth, [&](int m, int k) { return x[k * kAcross + m]; }, [&](int k, int n) { return keys[k * kWideAlong + n]; });
        __syncthreads();
        sum.each_pair([&](int s, int n, float y, float z) {
          *reinterpret_cast<float2*>(kt + s * kWideAcross + n) = make_float2(y, z);
        });
      }
      __syncthreads();
      const auto across = [&](int m, int k) { return kt[k * kWideAcross + m]; };
      float* content = scratch.content_at(chunks.slot + number, head);
      float* transition = scratch.transition_at(0, chunks.slot + number, sequence.index, head);
      const int key_stride = static_cast<int>(scratch.key_stride), value_stride = static_cast<int>(scratch.value_stride);
      const float whole = rows.whole();
      WideSum node;
      node.clear();
      node.template add<kExact>(depth, across, [&](int k, int n) { return factor[k] * other[k * kWideAlong + n]; });
      node.each_pair([&](int m, int n, float y, float z) {
        if (m < dk && n < dv) *reinterpret_cast<float2*>(content + m * value_stride + n) = make_float2(y, z);
      });
      node.clear();
      node.template add<kExact>(depth, across, [&](int k, int n) { return rows.write[k] * keys[k * kWideAlong + n]; });
      node.each_pair([&](int m, int n, float y, float z) {
        if (m >= dk || n >= dk) return;
        *reinterpret_cast<float2*>(transition + m * key_stride + n) =
            make_float2(whole * ((m == n ? 1.0f : 0.0f) - y), whole * ((m == n + 1 ? 1.0f : 0.0f) - z));
      });
    }
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_chunks_narrow(const DeltaInputs& in, const DeltaScratch& scratch, bool reads, bool exact,
                                   void* stream) {
  return launch(exact ? delta_rule_chunks_narrow<true> : delta_rule_chunks_narrow<false>,
                in.batch.count * in.most_chunks() * scratch.pass_heads, kWideThreads, kFloats * sizeof(float), stream, in,
                scratch, reads);
}

int32_t load_delta_chunks_narrow() {
  const int32_t status = load_kernel(delta_rule_chunks_narrow<true>);
  return status ? status : load_kernel(delta_rule_chunks_narrow<false>);
}

}  // namespace lla::cuda
