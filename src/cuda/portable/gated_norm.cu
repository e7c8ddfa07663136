// SPDX-License-Identifier: Apache-2.0
// Skip connection, output gate and RMS norm, and their gradients (docs/mathematics.md).
//
// A row is cut into spans, the groups of the norm (the whole row if there is none). A team, a warp or for long spans a
// block, has one span; what it needs twice it reads twice, each element by the same thread.
#include "cuda/common/reduce.h"
#include "cuda/common/row_blocks.h"
#include "cuda/portable/parts_kernels.h"

namespace lla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTeams = kThreads / 32;                     // of warps in a block
constexpr int64_t kMostOfWarp = 512;                      // elements of a span
constexpr int64_t kMostInShared = 8192;                   // elements of a span whose sums over rows fit into shared memory
constexpr int kForwardRowsLog = 2, kBackwardRowsLog = 6;  // rows of a block

LLA_HOST_DEVICE inline bool normed(const GatedNorm& p) { return p.form != LLA_NORM_NONE; }
LLA_HOST_DEVICE inline int64_t span_of(const GatedNorm& p) { return normed(p) ? p.group : p.width; }

// Four neighbours of a row.
struct Four {
  float x[4];

  __device__ __forceinline__ Four(float4 v) : x{v.x, v.y, v.z, v.w} {}
  __device__ __forceinline__ explicit Four(float v) : x{v, v, v, v} {}
  __device__ __forceinline__ float4 packed() const { return make_float4(x[0], x[1], x[2], x[3]); }
};

// The tensors of one row.
struct Row {
  const GatedNorm& p;
  int64_t b, row;
  bool gate_first;

  __device__ __forceinline__ Row(const GatedNorm& p_, int64_t b_, int64_t row_)
      : p(p_), b(b_), row(row_), gate_first(p_.form == LLA_NORM_GATE_FIRST) {}
  __device__ __forceinline__ FlatRow heads(const View& view) const {
    return {view, b, row, p.width / p.value_dim, p.value_dim};
  }
  __device__ __forceinline__ FlatRow plain(const View& view) const { return {view, b, row, 1, p.width}; }
};

// What a row holds at elements e ... e + count - 1; what does not exist is zero.
struct Inputs {
  Four u, skip, z, gate, d, weight;  // u = x + d * skip, gate = silu(z)

  __device__ __forceinline__ Inputs(const Row& r, int e, int count) : u(0), skip(0), z(0), gate(1), d(1), weight(1) {
    const GatedNorm& p = r.p;
    u = r.heads(p.x).load(e, count);
    if (p.skip.present()) {
      skip = r.heads(p.skip).load(e, count);
      if (p.d.present()) {
        if (p.skip_per_channel) {
          d = load4(p.d.data, p.d.dtype, e, count);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            d.x[i] = i < count ? load_element(p.d.data, p.d.dtype, (e + i) / static_cast<int>(p.value_dim)) : 0;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) u.x[i] += d.x[i] * skip.x[i];
    }
    if (p.z.present()) {
      z = r.plain(p.z).load(e, count);
#pragma unroll
      for (int i = 0; i < 4; ++i) gate.x[i] = silu(z.x[i]);
    }
    if (normed(p) && p.weight.present())
      weight = load4(p.weight.data, p.weight.dtype, p.weight_per_group ? e % static_cast<int>(p.group) : e, count);
  }
  // What enters the norm.
  __device__ __forceinline__ float a(const Row& r, int i) const { return r.gate_first ? u.x[i] * gate.x[i] : u.x[i]; }
  // What stands behind it.
  __device__ __forceinline__ float after(const Row& r, int i) const { return r.gate_first ? 1 : gate.x[i]; }
};

// One span of a row and the thread's elements of it.
template <bool kBlock>
struct Span {
  int begin, size;

  template <class F>
  __device__ __forceinline__ void each(F f) const {
    constexpr int kTeam = kBlock ? kThreads : 32;
    for (int i = 4 * (threadIdx.x % kTeam); i < size; i += 4 * kTeam) f(begin + i, min(4, size - i));
  }
  // Sums over the team; the same bits everywhere.
  __device__ __forceinline__ void add_up(float* first, float* second, float (*warps)[2]) const {
    *first = warp_sum(*first);
    *second = warp_sum(*second);
    if constexpr (kBlock) {
      __syncthreads();  // the sums of the span before have been read
      if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32][0] = *first;
        warps[threadIdx.x / 32][1] = *second;
      }
      __syncthreads();
      *first = *second = 0;
      for (int w = 0; w < kTeams; ++w) *first += warps[w][0], *second += warps[w][1];
    }
  }
};

// Spans by blocks of rows; a block of warps has kTeams neighbouring spans of its rows at a time.
template <bool kBlock>
__global__ void __launch_bounds__(kThreads) gated_norm_forward(GatedNorm p, RowBlocks blocks) {
  __shared__ float warps[kTeams][2];
  const int size = static_cast<int>(span_of(p)), spans = static_cast<int>(p.width / size);
  for (int64_t task = blockIdx.x; task < blocks.tasks; task += gridDim.x) {
    const RowBlock block = blocks.find(p.batch, task);
    const int64_t items = static_cast<int64_t>(block.rows) * spans;
    for (int64_t item = kBlock ? 0 : threadIdx.x / 32; item < items; item += kBlock ? 1 : kTeams) {
      const int64_t r = item / spans;
      const Row row(p, block.sequence->index, block.first + r);
      const Span<kBlock> span{static_cast<int>(item - r * spans) * size, size};
      const FlatRow y = row.heads(p.y);
      float squares = 0, unused = 0, inverse = 1;
#pragma unroll 1
      for (int pass = normed(p) ? 0 : 1; pass < 2; ++pass) {
        span.each([&](int e, int count) {
          const Inputs in(row, e, count);
          Four out(0);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float a = in.a(row, i);
            squares += a * a;
            out.x[i] = a * inverse * in.weight.x[i] * in.after(row, i);
          }
          if (pass == 1) y.put(e, count, out.packed());
        });
        if (pass == 1) break;
        span.add_up(&squares, &unused, warps);
        inverse = 1 / sqrtf(squares / static_cast<float>(size) + float_of_epsilon(p.epsilon));
      }
    }
  }
}

// A team has one span of all rows of a place. What it adds to the gradients of weight and D stands in `sums` [2][size],
// element by element of the thread that owns it, and goes to partials [place][2][width] at the end.
template <bool kBlock>
__device__ __forceinline__ void reverse_rows(const GatedNorm& p, const RowBlock& block, const Span<kBlock>& span,
                                             float* sums, int64_t sums_stride, float (*warps)[2]) {
  if (sums) {
    span.each([&](int e, int count) {
      for (int i = 0; i < count; ++i) sums[e - span.begin + i] = sums[sums_stride + e - span.begin + i] = 0;
    });
  }
  for (int r = 0; r < block.rows; ++r) {
    const Row row(p, block.sequence->index, block.first + r);
    const FlatRow dys = row.heads(p.dy);
    float squares = 0, along = 0;  // along: gradient of what the norm gives, times what enters it
    float inverse = 1, pull = 0;
#pragma unroll 1
    for (int pass = normed(p) ? 0 : 1; pass < 2; ++pass) {
      span.each([&](int e, int count) {
        const Inputs in(row, e, count);
        const Four dy = dys.load(e, count);
        if (pass == 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float a = in.a(row, i);
            squares += a * a;
            along += dy.x[i] * in.weight.x[i] * in.after(row, i) * a;
          }
          return;
        }
        Four du(0), dskip(0), dz(0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float a = in.a(row, i), behind = dy.x[i] * in.weight.x[i];
          const float da = inverse * (behind * in.after(row, i) - a * pull);
          du.x[i] = row.gate_first ? da * in.gate.x[i] : da;
          dskip.x[i] = in.d.x[i] * du.x[i];
          dz.x[i] = (row.gate_first ? da * in.u.x[i] : behind * a * inverse) * silu_slope(in.z.x[i]);
          if (sums && i < count) {
            sums[e - span.begin + i] += dy.x[i] * in.after(row, i) * a * inverse;
            sums[sums_stride + e - span.begin + i] += du.x[i] * in.skip.x[i];
          }
        }
        if (p.dx.present()) row.heads(p.dx).put(e, count, du.packed());
        if (p.dskip.present()) row.heads(p.dskip).put(e, count, dskip.packed());
        if (p.dz.present()) row.plain(p.dz).put(e, count, dz.packed());
      });
      if (pass == 1) break;
      span.add_up(&squares, &along, warps);
      const float size = static_cast<float>(span.size);
      inverse = 1 / sqrtf(squares / size + float_of_epsilon(p.epsilon));
      pull = inverse * inverse * along / size;
    }
  }
}

template <bool kBlock>
__global__ void __launch_bounds__(kThreads, 2)
    gated_norm_backward(GatedNorm p, RowBlocks blocks, int64_t span_blocks, bool in_shared, float* partials) {
  __shared__ float warps[kTeams][2];
  const int size = static_cast<int>(span_of(p)), spans = static_cast<int>(p.width / size);
  const int team = kBlock ? 0 : threadIdx.x / 32;
  for (int64_t task = blockIdx.x; task < blocks.tasks * span_blocks; task += gridDim.x) {
    const int64_t place = task / span_blocks;
    const int number = static_cast<int>(task - place * span_blocks) * (kBlock ? 1 : kTeams) + team;
    if (number >= spans) continue;
    const RowBlock block = blocks.find(p.batch, place);
    const Span<kBlock> span{number * size, size};
    float* partial = partials ? partials + place * 2 * p.width + span.begin : nullptr;
    if (!partial || !in_shared) {
      reverse_rows<kBlock>(p, block, span, partial, p.width, warps);
      continue;
    }
    float* sums = reinterpret_cast<float*>(shared_memory()) + 2 * size * team;
    reverse_rows<kBlock>(p, block, span, sums, size, warps);
    span.each([&](int e, int count) {
      for (int i = e - span.begin; i < e - span.begin + count; ++i) {
        partial[i] = sums[i];
        partial[p.width + i] = sums[size + i];
      }
    });
  }
}

// Where a weight has its own element for every element of the row, sums over rows are its gradient; else they go to totals
// [2][width] and are added up there.
struct StoreColumns {
  Matrix weight, d;
  float* totals;
  int64_t width;
  bool weight_direct, d_direct;

  __device__ void operator()(int64_t column, float sum) const {
    if (column < width ? !weight.present() : !d.present()) return;
    if (column < width ? !weight_direct : !d_direct)
      totals[column] = sum;
    else if (column < width)
      put_element(weight.data, weight.dtype, column, sum, weight.accumulate);
    else
      put_element(d.data, d.dtype, column - width, sum, d.accumulate);
  }
};

// to[i] = the sum of totals[i * stride + j * step] over j < terms.
__global__ void __launch_bounds__(kThreads)
    add_columns(Matrix to, const float* totals, int64_t outputs, int64_t stride, int64_t terms, int64_t step) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < outputs;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    float sum = 0;
    for (int64_t j = 0; j < terms; ++j) sum += totals[i * stride + j * step];
    put_element(to.data, to.dtype, i, sum, to.accumulate);
  }
}

bool accepts_types(const GatedNorm& p) {
  return narrow_types(p.x, p.skip, p.z, p.y, p.d, p.weight, p.dy, p.dx, p.dskip, p.dz, p.dd, p.dweight) &&
         p.width < kMostColumns;
}

struct Arrays {
  float* partials = nullptr;
  float* totals = nullptr;

  void take(FloatCarver* carver, const GatedNorm& p, int64_t rows, int64_t sequences) {
    totals = carver->take(Size(2) * Size(p.width));
    partials = carver->take((Size(rows >> kBackwardRowsLog) + Size(sequences)) * Size(2) * Size(p.width));
  }
};

}  // namespace

bool GatedNormForward::accepts(const void* problem) { return accepts_types(*static_cast<const GatedNorm*>(problem)); }

void GatedNormForward::measure(const void* problem, const Limits& limits, Need* need) {
  needs_nothing(problem, limits, need);
}

int32_t GatedNormForward::launch(const void* problem, const Limits&, char*, void* stream) {
  const GatedNorm& p = *static_cast<const GatedNorm*>(problem);
  const bool block_team = span_of(p) > kMostOfWarp;
  const RowBlocks blocks(p.batch, block_team ? 0 : kForwardRowsLog, false);
  const auto kernel = block_team ? gated_norm_forward<true> : gated_norm_forward<false>;
  return cuda::launch(kernel, blocks.tasks, kThreads, 0, stream, p, blocks);
}

int32_t GatedNormForward::load() {
  return first_failure([] { return load_kernel(gated_norm_forward<true>); },
                       [] { return load_kernel(gated_norm_forward<false>); });
}

bool GatedNormBackward::accepts(const void* problem) { return accepts_types(*static_cast<const GatedNorm*>(problem)); }

void GatedNormBackward::measure(const void* problem, const Limits& limits, Need* need) {
  FloatCarver carver;
  Arrays().take(&carver, *static_cast<const GatedNorm*>(problem), limits.rows, limits.sequences);
  *need = carver.need();
}

int32_t GatedNormBackward::launch(const void* problem, const Limits&, char* scratch, void* stream) {
  const GatedNorm& p = *static_cast<const GatedNorm*>(problem);
  FloatCarver carver(scratch);
  Arrays arrays;
  arrays.take(&carver, p, p.batch.total_rows, p.batch.count);
  const RowBlocks blocks(p.batch, kBackwardRowsLog, true);
  float* partials = p.dweight.present() || p.dd.present() ? arrays.partials : nullptr;
  const int64_t size = span_of(p), spans = p.width / size;
  const bool block_team = size > kMostOfWarp, in_shared = partials && size <= kMostInShared;
  const int64_t span_blocks = block_team ? spans : (spans + kTeams - 1) / kTeams;
  const size_t shared = in_shared ? static_cast<size_t>(2 * size) * sizeof(float) * (block_team ? 1 : kTeams) : 0;
  const auto kernel = block_team ? gated_norm_backward<true> : gated_norm_backward<false>;
  int32_t status = cuda::launch(kernel, blocks.tasks * span_blocks, kThreads, shared, stream, p, blocks, span_blocks,
                                in_shared, partials);
  if (status != LLA_OK || !partials) return status;
  const StoreColumns store{p.dweight, p.dd, arrays.totals, p.width, !p.weight_per_group, p.skip_per_channel};
  status = launch_sum_partials(partials, blocks.tasks, 2 * p.width, store, stream);
  const float* totals = arrays.totals;
  if (status == LLA_OK && p.dweight.present() && !store.weight_direct) {
    status = cuda::launch(add_columns, (p.group + kThreads - 1) / kThreads, kThreads, 0, stream, p.dweight, totals, p.group,
                          int64_t{1}, p.width / p.group, p.group);
  }
  if (status == LLA_OK && p.dd.present() && !store.d_direct) {
    status = cuda::launch(add_columns, (p.heads + kThreads - 1) / kThreads, kThreads, 0, stream, p.dd, totals + p.width,
                          p.heads, p.value_dim, p.value_dim, int64_t{1});
  }
  return status;
}

int32_t GatedNormBackward::load() {
  return first_failure([] { return load_kernel(gated_norm_backward<true>); },
                       [] { return load_kernel(gated_norm_backward<false>); },
                       [] { return load_kernel(sum_partials<StoreColumns>); }, [] { return load_kernel(add_columns); });
}

}  // namespace lla::cuda
