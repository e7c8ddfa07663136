// SPDX-License-Identifier: Apache-2.0
// Product of rows with a weight, y = x W^T + bias, and the gradient of the rows, dx = dy W; the table of the projections.
#include "cuda/backend.h"
#include "cuda/portable/projection.h"

namespace lla::cuda {
namespace {

// The rows of a tile. A row that no live sequence has, or none of those asked for, is zero and is not stored.
struct TileOfRows {
  const void* from[kTileRows];
  void* to[kTileRows];

  // False: the tile has no row.
  template <class Asked>
  __device__ __forceinline__ bool fill(const BatchView& batch, const View& in, const View& out, int64_t first, Asked asked) {
    bool any = false;
    for (int r = threadIdx.x; r < kTileRows; r += kProjectionThreads) {
      const Sequence* sequence = sequence_of_row(batch, first + r);
      if (sequence && !asked(*sequence)) sequence = nullptr;
      from[r] = sequence ? in.at(sequence->index, first + r, 0) : nullptr;
      to[r] = sequence ? out.at(sequence->index, first + r, 0) : nullptr;
      any = any || sequence;
    }
    return __syncthreads_or(any);
  }
};

template <bool kExact>
__global__ void __launch_bounds__(kProjectionThreads) projection_forward(Projection p, int64_t column_tiles, int64_t tasks) {
  __shared__ TileOfRows rows;
  float* tiles = reinterpret_cast<float*>(shared_memory());
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t row_tile = task / column_tiles, first = (task - row_tile * column_tiles) * kTileColumns;
    if (!rows.fill(p.batch, p.x, p.y, row_tile * kTileRows, [](const Sequence& s) { return !has_few_rows(s); })) continue;
    Along<kTileRows> a(p.x.dtype, [&](int r) { return rows.from[r]; });
    Along<kTileColumns> b(p.weight.dtype,
                          [&](int r) -> const void* { return first + r < p.outputs ? p.weight.at(first + r) : nullptr; });
    TileSum sum;
    sum.clear();
    multiply_deep<kExact>(sum, a, b, tiles, p.inputs);
    hand_out(sum, tiles, [&](int row, int column, float4 x) {
      const int64_t o = first + column, left = p.outputs - o;
      if (!rows.to[row] || left <= 0) return;
      if (p.bias.present()) {
        const float4 bias = load4(p.bias.data, p.bias.dtype, o, left);
        x = make_float4(x.x + bias.x, x.y + bias.y, x.z + bias.z, x.w + bias.w);
      }
      put4(rows.to[row], p.y.dtype, o, left, x, p.y.accumulate);
    });
  }
}

template <bool kExact>
__global__ void __launch_bounds__(kProjectionThreads)
    projection_rows_gradient(Projection p, int64_t column_tiles, int64_t tasks) {
  __shared__ TileOfRows rows;
  float* tiles = reinterpret_cast<float*>(shared_memory());
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t row_tile = task / column_tiles, first = (task - row_tile * column_tiles) * kTileColumns;
    if (!rows.fill(p.batch, p.dy, p.dx, row_tile * kTileRows, [](const Sequence&) { return true; })) continue;
    Along<kTileRows> a(p.dy.dtype, [&](int r) { return rows.from[r]; });
    auto b = across<kTileColumns>(p.weight.dtype, first, p.inputs, [&](int64_t o) -> const void* { return p.weight.at(o); });
    TileSum sum;
    sum.clear();
    multiply_deep<kExact>(sum, a, b, tiles, p.outputs);
    hand_out(sum, tiles, [&](int row, int column, float4 x) {
      const int64_t i = first + column, left = p.inputs - i;
      if (rows.to[row] && left > 0) put4(rows.to[row], p.dx.dtype, i, left, x, p.dx.accumulate);
    });
  }
}

}  // namespace

bool ProjectionForward::accepts(const void* problem) {
  const Projection& p = *static_cast<const Projection*>(problem);
  load_cublaslt();
  return narrow_types(p.x, p.y, p.weight, p.bias);
}

void ProjectionForward::measure(const void*, const Limits&, Need* need) {
  FloatCarver carver;
  carver.take(dense_workspace());
  *need = carver.need();
}

namespace {

int32_t launch_projection_many(const Projection& p, char* scratch, void* stream) {
  // Rows of short sequences are computed too; they are overwritten.
  const bool overwritten = !p.y.accumulate || !may_have_few_rows(p.batch);
  if (may_make_all_rows(p.batch, p.y, false) && overwritten && (!p.bias.present() || p.bias.dtype == p.y.dtype)) {
    DenseProduct product;
    product.a = dense(p.x, p.batch.total_rows, p.inputs);
    product.b = dense(p.weight, p.outputs, p.inputs);
    product.transpose_b = true;
    product.out = dense(p.y, p.batch.total_rows, p.outputs);
    product.accumulate = p.y.accumulate;
    product.bias = p.bias.data;
    if (launch_cublaslt(product, dense_workspace(reinterpret_cast<float*>(scratch)), stream)) return LLA_OK;
  }
  const int64_t column_tiles = tiles_of(p.outputs, kTileColumns),
                tasks = tiles_of(p.batch.total_rows, kTileRows) * column_tiles;
  const auto kernel = exact(p.x, p.weight) ? projection_forward<true> : projection_forward<false>;
  return cuda::launch(kernel, tasks, kProjectionThreads, kTileBytes, stream, p, column_tiles, tasks);
}

}  // namespace

// By the rows of each sequence, so that its bits do not depend on the others.
int32_t ProjectionForward::launch(const void* problem, const Limits&, char* scratch, void* stream) {
  const Projection& p = *static_cast<const Projection*>(problem);
  const bool many = p.batch.most_rows > kFewRows;
  if (many) {
    const int32_t status = launch_projection_many(p, scratch, stream);
    if (status != LLA_OK) return status;
  }
  return may_have_few_rows(p.batch) ? launch_projection_few(p, many, stream) : LLA_OK;
}

int32_t ProjectionForward::load() {
  return first_failure([] { return load_kernel(projection_forward<true>); },
                       [] { return load_kernel(projection_forward<false>); }, [] { return load_projection_few(); });
}

int32_t launch_projection_rows_gradient(const Projection& p, void* workspace, void* stream) {
  if (may_make_all_rows(p.batch, p.dx, p.dx_is_scratch)) {
    DenseProduct product;
    product.a = dense(p.dy, p.batch.total_rows, p.outputs);
    product.b = dense(p.weight, p.outputs, p.inputs);
    product.out = dense(p.dx, p.batch.total_rows, p.inputs);
    product.accumulate = p.dx.accumulate;
    if (launch_cublaslt(product, workspace, stream)) return LLA_OK;
  }
  const int64_t column_tiles = tiles_of(p.inputs, kTileColumns),
                tasks = tiles_of(p.batch.total_rows, kTileRows) * column_tiles;
  const auto kernel = exact(p.dy, p.weight) ? projection_rows_gradient<true> : projection_rows_gradient<false>;
  return cuda::launch(kernel, tasks, kProjectionThreads, kTileBytes, stream, p, column_tiles, tasks);
}

int32_t load_projection_rows_gradient() {
  return first_failure([] { return load_kernel(projection_rows_gradient<true>); },
                       [] { return load_kernel(projection_rows_gradient<false>); });
}

KernelTable projection_kernels() {
  static constexpr Kernel kKernels[] = {
      part_kernel<ProjectionForward>(Op::ProjectionForward, "cuda.projection.forward.portable"),
      part_kernel<ProjectionBackward>(Op::ProjectionBackward, "cuda.projection.backward.portable"),
  };
  return {kKernels, sizeof(kKernels) / sizeof(kKernels[0])};
}

}  // namespace lla::cuda
