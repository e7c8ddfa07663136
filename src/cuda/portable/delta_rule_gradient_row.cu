// SPDX-License-Identifier: Apache-2.0
// Gradients inside a chunk, second half: what comes from the chunk's own node, through the inverse, and the gradients of
// rows.
#include "cuda/portable/delta_rule_gradient_chunk.h"

namespace lla::cuda {

namespace {

template <bool kExact>
struct RowGradient : ChunkGradient<kExact> {
  using Chunk = ChunkGradient<kExact>;
  using Chunk::in, Chunk::scratch, Chunk::targets, Chunk::source, Chunk::rows, Chunk::memory, Chunk::head, Chunk::slot,
      Chunk::depth;

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
        CallRows from(base + m0 * stride, stride, source.span);
        from.lo = 0, from.hi = static_cast<int>(dk - m0 < kTile ? dk - m0 : kTile);
        return from;
      };
      __syncthreads();
      this->load_keys(a, kAcross, m0);
      __syncthreads();
      TileSum sum, dkt;
      sum.clear();
      dkt.clear();
      multiply<kExact>(
          sum, depth, [&](int m, int k) { return x[k * kAcross + m]; }, [&](int k, int n) { return a[k * kAcross + n]; });
      put_sum(sum, kt, kAcross);
      for (int64_t at = 0; at < dv; at += kTile) {
        __syncthreads();
        this->load_values(a, kAlong, at);
        this->load_call(b, kAlong, at, dv, matrix(dcontent, nodes.value_stride));
        __syncthreads();
        multiply<kExact>(
            dkt, delta_depth(at, dv), [&](int s, int k) { return rows.to_end(s) * rows.write[s] * a[s * kAlong + k]; },
            [&](int k, int n) { return b[n * kAlong + k]; });
        sum.clear();
        multiply<kExact>(
            sum, delta_depth(m0, dk), [&](int s, int k) { return rows.to_end(s) * kt[s * kAcross + k]; },
            [&](int k, int n) { return b[k * kAlong + n]; });
        put_rows(sum, a, at, dv, adds || m0 > 0, [&](int i) { return this->dvalue(i); });
      }
      dkt.row_sums([&](int s, int m, float d) { return d * kt[s * kAcross + m]; },
                   [&](int s, int half, float d) { memory.out[2 * s + half] += d; });
      for (int64_t at = 0; at < dk; at += kTile) {
        __syncthreads();
        this->load_keys(a, kAlong, at);
        this->load_call(b, kAlong, at, dk, matrix(dtransition, nodes.key_stride));
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
        put_rows(sum, a, at, dk, adds || m0 > 0, [&](int i) { return this->derase(i); });
      }
      __syncthreads();
      put_sum(dkt, b, kAcross);
      this->load_keys(a, kAlong, m0);
      __syncthreads();
      multiply<kExact>(
          dx, delta_depth(m0, dk), [&](int m, int k) { return a[m * kAlong + k]; },
          [&](int k, int n) { return b[n * kAcross + k]; });
      sum.clear();
      multiply<kExact>(
          sum, depth, [&](int m, int k) { return x[m * kAcross + k]; }, [&](int k, int n) { return b[k * kAcross + n]; });
      put_rows(sum, a, m0, dk, adds, [&](int i) { return this->dkey(i); });
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
        sum, depth, [&](int m, int k) { return x[k * kAcross + m]; },
        [&](int k, int n) { return k < n ? 0.0f : t[k * kAcross + n]; });
    put_sum(sum, a, kAcross);
    __syncthreads();
    sum.clear();
    multiply<kExact>(
        sum, depth, [&](int m, int k) { return -a[m * kAcross + k]; }, [&](int k, int n) { return x[n * kAcross + k]; });
    sum.each([&](int i, int s, float& d) { t[i * kAcross + s] = s < i ? d : 0.0f; });
    for (int64_t at = 0; at < dk; at += kTile) {
      __syncthreads();
      this->load_keys(a, kAcross, at);
      load_tile(b, kAcross, at, dk, [&](int i) -> Elements { return {adds ? this->derase(i) : nullptr, LLA_F32}; });
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
      put_rows(sum, b, at, dk, adds, [&](int i) { return this->dkey(i); });
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
      load_tile(a, kAcross, at, dv, [&](int i) -> Elements { return {there ? this->dvalue(i) : nullptr, LLA_F32}; });
      this->load_values(b, kAcross, at);
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
          return {targets.v.at(sequence.index, this->row(i), head), targets.v.dtype, targets.v.accumulate};
        }
        if (!initial) return {};
        return {state.tail_v(sequence.initial_gradient.tail, head, initial_ring(i)), layout.dtype};
      });
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < span.hi) {
      const int i = threadIdx.x;
      float gate = memory.whole[0] + memory.whole[1] + memory.whole[2] + memory.whole[3];
      float before = 0;
      for (int s = 0; s < i; ++s) before += memory.out[2 * s] + memory.out[2 * s + 1];
      gate += before;
      if (span.hi > span.lo) gate += *this->dgate(i);
      float write = memory.write[2 * i] + memory.write[2 * i + 1];
      if (has_final(i)) {
        const int32_t tail = sequence.final_gradient.tail;
        gate += *reinterpret_cast<const float*>(state.tail_gate(tail, head, final_ring(i)));
        write += *reinterpret_cast<const float*>(state.tail_write(tail, head, final_ring(i)));
      }
      if (i >= span.lo) {
        const View &to_gate = targets.gate, &to_write = targets.write;
        if (to_gate.present())
          put_element(to_gate.at(sequence.index, this->row(i), head), to_gate.dtype, 0, gate, to_gate.accumulate);
        if (to_write.present())
          put_element(to_write.at(sequence.index, this->row(i), head), to_write.dtype, 0, write, to_write.accumulate);
      } else if (initial) {
        const bool real = source.in_tail(i);
        const int32_t tail = sequence.initial_gradient.tail;
        *reinterpret_cast<float*>(state.tail_gate(tail, head, initial_ring(i))) = real ? gate : 0.0f;
        *reinterpret_cast<float*>(state.tail_write(tail, head, initial_ring(i))) = real ? write : 0.0f;
      }
    }
  }
};

template <bool kExact>
__global__ void __launch_bounds__(kThreads, 2)
    delta_rule_row_gradients(DeltaInputs in, DeltaGradients scratch, RowTargets targets) {
  const ChunkMemory memory(4);
  const DeltaRows rows(memory.tables);
  const int64_t heads = scratch.nodes.pass_heads, most = in.most_chunks(), tasks = in.batch.count * most * heads;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = scratch.nodes.first_head + task % heads, number = task / heads % most;
    const Sequence& sequence = in.batch.sequences[task / heads / most];
    if (sequence.padding) continue;
    const DeltaSequence chunks(sequence, in.chunk);
    if (number >= chunks.range.count) continue;
    const ChunkSpan span(sequence, in.chunk, chunks.range.first + number);
    const bool full = number<chunks.range.full, queries = span.hi> span.lo;
    const ChunkSource source{sequence, in.state, in.shape.grain, span};
    const int64_t place = (in.chunk.first_place(sequence) + number) * in.chunk.rows;
    const RowGradient<kExact> chunk{{in, scratch, targets, source, rows, memory, head, in.shape.group_of(head),
                                     chunks.slot + number, place, delta_depth(0, span.hi)}};
    chunk.template prepare<false>();
    TileSum dx;
    if (queries) {
      load_tile(memory.t, kAcross, 0, in.chunk.rows, [&](int i) -> Elements { return {chunk.dinverse(i), LLA_F32}; });
      __syncthreads();
      get_sum(dx, memory.t, kAcross);
    } else {
      dx.clear();
    }
    if (full) chunk.from_node(dx, queries);
    chunk.finish_keys(dx, queries || full);
    chunk.finish_rows(queries || full);
    __syncthreads();
  }
}

}  // namespace

int32_t launch_delta_row_gradients(const DeltaInputs& in, const DeltaGradients& scratch, const MixerBackward& problem,
                                   bool exact, void* stream) {
  const RowTargets targets{problem.dy, problem.dv, problem.dgate, problem.dwrite, problem.dlambda, problem.gradient};
  return launch(exact ? delta_rule_row_gradients<true> : delta_rule_row_gradients<false>,
                in.batch.count * in.most_chunks() * scratch.nodes.pass_heads, kThreads, ChunkMemory::bytes(4), stream, in,
                scratch, targets);
}

int32_t load_delta_row_gradients() {
  const int32_t status = load_kernel(delta_rule_row_gradients<true>);
  return status ? status : load_kernel(delta_rule_row_gradients<false>);
}

}  // namespace lla::cuda
