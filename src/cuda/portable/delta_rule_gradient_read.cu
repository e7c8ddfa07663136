// SPDX-License-Identifier: Apache-2.0
// Gradients inside a chunk, first half: from those of its outputs, and of its queries as nodes see them, to those of q and
// lambda, and to what they give to k, v, gates and the inverse.
#include "cuda/portable/delta_rule_gradient_chunk.h"

namespace lla::cuda {

namespace {

template <bool kExact>
struct ReadGradient : ChunkGradient<kExact> {
  using Chunk = ChunkGradient<kExact>;
  using Chunk::in, Chunk::scratch, Chunk::targets, Chunk::source, Chunk::rows, Chunk::memory, Chunk::head, Chunk::slot,
      Chunk::depth;

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

  // What comes from the outputs and from queries as nodes see them. Sets the gradients of q (in place of dseen), and of
  // value, erase and key in part, and that of X.
  __device__ __forceinline__ void from_queries() const {
    const int64_t dk = in.shape.key_dim, dv = in.shape.value_dim;
    const float scale = static_cast<float>(in.shape.scale);
    float *a = memory.a, *b = memory.b, *t = memory.t, *x = memory.x, *r = memory.r;
    // y = W (w V), W = R .* decay .* lambda
    TileSum dr;
    dr.clear();
    for (int64_t at = 0; at < dv; at += kTile) {
      __syncthreads();
      this->load_dy(a, kAlong, at);
      this->load_values(b, kAlong, at);
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
      this->load_dy(a, kAcross, at);
      __syncthreads();
      TileSum sum;
      sum.clear();
      multiply<kExact>(
          sum, depth, [&](int m, int k) { return t[k * kAcross + m]; }, [&](int k, int n) { return a[k * kAcross + n]; });
      put_rows(sum, b, at, dv, false, [&](int i) { return this->dvalue(i); });
    }
    // seen = into .* (scale Q - R (w K))
    for (int64_t at = 0; at < dk; at += kTile) {
      __syncthreads();
      this->load_dseen(a, kAlong, at);
      this->load_keys(b, kAlong, at);
      this->load_seen(t, kAlong, at);
      __syncthreads();
      multiply<kExact>(
          dr, delta_depth(at, dk), [&](int m, int k) { return -rows.into(m) * a[m * kAlong + k]; },
          [&](int k, int n) { return rows.write[n] * b[n * kAlong + k]; });
      add_row_dots(a, kAlong, t, kAlong, memory.into);
    }
    __syncthreads();
    // R = P X
    dr.each([&](int i, int s, float& d) { t[i * kAcross + s] = s <= i ? d : 0.0f; });
    load_tile(a, kAcross, 0, in.chunk.rows, [&](int i) -> Elements { return {this->dinverse(i), LLA_F32}; });
    __syncthreads();
    TileSum square;
    square.clear();
    multiply<kExact>(
        square, depth, [&](int m, int k) { return a[k * kAcross + m]; }, [&](int k, int n) { return t[k * kAcross + n]; });
    put_rows(square, b, 0, in.chunk.rows, false, [&](int i) { return this->dinverse(i); });
    square.clear();
    multiply<kExact>(
        square, depth, [&](int m, int k) { return t[m * kAcross + k]; }, [&](int k, int n) { return x[n * kAcross + k]; });
    __syncthreads();
    square.each([&](int i, int s, float& d) { t[i * kAcross + s] = s <= i ? d : 0.0f; });
    // P = tril(scale Q K^T)
    for (int64_t at = 0; at < dk; at += kTile) {
      __syncthreads();
      this->load_keys(a, kAcross, at);
      this->load_dseen(b, kAcross, at);
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
      put_rows(dq, a, at, dk, false, [&](int i) { return this->dseen(i); });
      put_rows(erase, b, at, dk, false, [&](int i) { return this->derase(i); });
      this->load_queries(a, kAcross, at);
      __syncthreads();
      dq.clear();
      multiply<kExact>(
          dq, depth, [&](int m, int k) { return t[k * kAcross + m]; },
          [&](int k, int n) { return scale * a[k * kAcross + n]; });
      put_rows(dq, b, at, dk, false, [&](int i) { return this->dkey(i); });
    }
  }

  // What rows read, as far as gates and lambda have a part in it.
  __device__ __forceinline__ void finish() const {
    if (static_cast<int>(threadIdx.x) < source.span.hi) {
      const int i = threadIdx.x;
      float after = 0;
      for (int s = kTile - 1; s >= i; --s) after += memory.into[2 * s] + memory.into[2 * s + 1];
      *this->dgate(i) = memory.pair[i] + after;
    }
    if (!targets.lambda.present() || scratch.levels == 0) return;
    const Sequence& sequence = source.sequence;
    const ChunkSpan& span = source.span;
    const int64_t queries = span.hi - span.lo;
    for (int64_t n = threadIdx.x; n < queries * scratch.levels; n += kThreads) {
      const int i = span.lo + static_cast<int>(n / scratch.levels);
      const int64_t column = n % scratch.levels;
      float sum = scratch.lambda[scratch.nodes.place(this->row(i), head) * scratch.levels + column];
      for (int level = 0; level < 7; ++level) {
        const bool live = level == 0 || ((i >> (level - 1)) & 1) != 0;
        if (live && in.shape.column(level) == column) sum += memory.level[i * 8 + level];
      }
      put_element(targets.lambda.at(sequence.index, this->row(i), head), targets.lambda.dtype, column, sum,
                  targets.lambda.accumulate);
    }
  }
};

template <bool kExact>
__global__ void __launch_bounds__(kThreads, 2)
    delta_rule_read_gradients(DeltaInputs in, DeltaGradients scratch, RowTargets targets) {
  const ChunkMemory memory(5);
  const DeltaRows rows(memory.tables);
  const int64_t heads = scratch.nodes.pass_heads, most = in.most_chunks(), tasks = in.batch.count * most * heads;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.nodes.first_head + task % heads, number = task / heads % most;
    const Sequence& sequence = in.batch.sequences[task / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.count) continue;
    const ChunkSpan span(sequence, in.chunk, chunks.range.first + number);
    const bool queries = span.hi > span.lo;
    if (!queries) continue;
    const ChunkSource source{sequence, in.state, in.shape.grain, span};
    const int64_t place = (in.chunk.first_place(sequence) + number) * in.chunk.rows;
    const ReadGradient<kExact> chunk{{in, scratch, targets, source, rows, memory, head, in.shape.group_of(head),
                                      chunks.slot + number, place, delta_depth(0, span.hi)}};
    chunk.template prepare<true>();
    chunk.from_queries();
    chunk.finish();
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_read_gradients(const DeltaInputs& in, const DeltaGradients& scratch, const MixerBackward& problem,
                                    bool exact, void* stream) {
  const RowTargets targets{problem.dy, problem.dv, problem.dgate, problem.dwrite, problem.dlambda, problem.gradient};
  return launch(exact ? delta_rule_read_gradients<true> : delta_rule_read_gradients<false>,
                in.batch.count * in.most_chunks() * scratch.nodes.pass_heads, kThreads, ChunkMemory::bytes(5), stream, in,
                scratch, targets);
}

int32_t load_delta_read_gradients() {
  const int32_t status = load_kernel(delta_rule_read_gradients<true>);
  return status ? status : load_kernel(delta_rule_read_gradients<false>);
}

}  // namespace lla::cuda
