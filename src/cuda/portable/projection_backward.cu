// SPDX-License-Identifier: Apache-2.0
// Gradients of a projection's weight, dy^T x, and bias: sums over rows, by splits of the rows that are then added in order.
#include "cuda/common/reduce.h"
#include "cuda/portable/projection.h"

namespace lla::cuda {

int32_t launch_projection_rows_gradient(const Projection& p, void* workspace, void* stream);  // projection.cu
int32_t load_projection_rows_gradient();

namespace {

constexpr int64_t kPiece = 256;  // rows whose places are looked up at once; a split is a whole number of pieces
constexpr int64_t kBlocksWanted = 512;
constexpr int kBiasRowsLog = 8;  // rows of a block of the bias

// Splits of the rows: enough for the chip if the weight has few tiles. Never falls when rows are added.
int64_t splits_of(const Projection& p, int64_t rows) {
  const int64_t tiles = tiles_of(p.outputs, kTileRows) * tiles_of(p.inputs, kTileColumns);
  const int64_t wanted = tiles_of(kBlocksWanted, tiles), most = tiles_of(rows, kPiece);
  return wanted < most ? wanted : most > 0 ? most : 1;
}

// Task: a tile of one split. partials [split][outputs][inputs]; null: there is one split, which is the result.
template <bool kExact>
__global__ void __launch_bounds__(kProjectionThreads)
    projection_weight_gradient(Projection p, int64_t column_tiles, int64_t tiles_per_split, int64_t splits,
                               float* partials) {
  __shared__ const void* dy_rows[kPiece];
  __shared__ const void* x_rows[kPiece];
  float* tiles = reinterpret_cast<float*>(shared_memory());
  const int64_t pieces = (p.batch.total_rows + kPiece - 1) / kPiece;
  for (int64_t task = blockIdx.x; task < splits * tiles_per_split; task += gridDim.x) {
    const int64_t split = task / tiles_per_split, tile = task - split * tiles_per_split;
    const int64_t output = tile / column_tiles * kTileRows, input = tile % column_tiles * kTileColumns;
    TileSum sum;
    sum.clear();
    for (int64_t piece = pieces * split / splits; piece < pieces * (split + 1) / splits; ++piece) {
      const int64_t first = piece * kPiece;
      for (int r = threadIdx.x; r < kPiece; r += kProjectionThreads) {
        const Sequence* sequence = sequence_of_row(p.batch, first + r);
        dy_rows[r] = sequence ? p.dy.at(sequence->index, first + r, 0) : nullptr;
        x_rows[r] = sequence ? p.x.at(sequence->index, first + r, 0) : nullptr;
      }
      __syncthreads();
      const int64_t left = p.batch.total_rows - first;
      auto a = across<kTileRows>(p.dy.dtype, output, p.outputs, [&](int64_t r) { return dy_rows[r]; });
      auto b = across<kTileColumns>(p.x.dtype, input, p.inputs, [&](int64_t r) { return x_rows[r]; });
      multiply_deep<kExact>(sum, a, b, tiles, left < kPiece ? left : kPiece);
    }
    hand_out(sum, tiles, [&](int row, int column, float4 x) {
      const int64_t o = output + row, i = input + column, left = p.inputs - i;
      if (o >= p.outputs || left <= 0) return;
      if (partials)
        put4(partials + (split * p.outputs + o) * p.inputs, LLA_F32, i, left, x, false);
      else
        put4(p.dweight.at(o), p.dweight.dtype, i, left, x, p.dweight.accumulate);
    });
  }
}

// A warp has 32 outputs of every eighth row of a place; partials [place][outputs].
__global__ void __launch_bounds__(kProjectionThreads)
    projection_bias_gradient(Projection p, RowBlocks blocks, int64_t column_blocks, float* partials) {
  constexpr int kWarps = kProjectionThreads / 32;
  __shared__ float sums[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t task = blockIdx.x; task < blocks.tasks * column_blocks; task += gridDim.x) {
    const int64_t place = task / column_blocks, o = (task - place * column_blocks) * 32 + lane;
    const RowBlock block = blocks.find(p.batch, place);
    float sum = 0;
    for (int r = warp; r < block.rows && o < p.outputs; r += kWarps)
      sum += load_element(p.dy.at(block.sequence->index, block.first + r, 0), p.dy.dtype, o);
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && o < p.outputs) {
      for (int w = 1; w < kWarps; ++w) sum += sums[w][lane];
      partials[place * p.outputs + o] = sum;
    }
    __syncthreads();
  }
}

struct StoreMatrix {
  Matrix to;
  int64_t columns;
  __device__ void operator()(int64_t i, float sum) const {
    const int64_t row = i / columns;
    put_element(to.at(row), to.dtype, i - row * columns, sum, to.accumulate);
  }
};

struct Arrays {
  float* workspace = nullptr;
  float* bias = nullptr;
  float* weight = nullptr;

  void take(FloatCarver* carver, const Projection& p, int64_t rows, int64_t sequences) {
    workspace = carver->take(dense_workspace());
    bias = carver->take((Size(rows >> kBiasRowsLog) + Size(sequences)) * Size(p.outputs));
    const int64_t splits = splits_of(p, rows);
    if (splits > 1) weight = carver->take(Size(splits) * Size(p.outputs) * Size(p.inputs));
  }
};

int32_t launch_weight_gradient(const Projection& p, float* partials, void* workspace, void* stream) {
  if (all_rows_live(p.batch)) {
    DenseProduct product;
    product.a = dense(p.dy, p.batch.total_rows, p.outputs);
    product.transpose_a = true;
    product.b = dense(p.x, p.batch.total_rows, p.inputs);
    product.over_rows = true;
    product.out = dense(p.dweight, p.outputs, p.inputs);
    product.accumulate = p.dweight.accumulate;
    if (launch_cublaslt(product, workspace, stream)) return LLA_OK;
  }
  const int64_t splits = splits_of(p, p.batch.total_rows), column_tiles = tiles_of(p.inputs, kTileColumns);
  const int64_t tiles = tiles_of(p.outputs, kTileRows) * column_tiles;
  const bool exact_rows = p.dy.dtype == LLA_F32 || p.x.dtype == LLA_F32;
  const auto kernel = exact_rows ? projection_weight_gradient<true> : projection_weight_gradient<false>;
  const int32_t status =
      cuda::launch(kernel, splits * tiles, kProjectionThreads, kTileBytes, stream, p, column_tiles, tiles, splits, partials);
  if (status != LLA_OK || splits == 1) return status;
  return launch_sum_partials(partials, splits, p.outputs * p.inputs, StoreMatrix{p.dweight, p.inputs}, stream);
}

}  // namespace

bool ProjectionBackward::accepts(const void* problem) {
  const Projection& p = *static_cast<const Projection*>(problem);
  load_cublaslt();
  return narrow_types(p.x, p.weight, p.dy, p.dx, p.dweight, p.dbias);
}

void ProjectionBackward::measure(const void* problem, const Limits& limits, Need* need) {
  FloatCarver carver;
  Arrays().take(&carver, *static_cast<const Projection*>(problem), limits.rows, limits.sequences);
  *need = carver.need();
}

int32_t ProjectionBackward::launch(const void* problem, const Limits&, char* scratch, void* stream) {
  const Projection& p = *static_cast<const Projection*>(problem);
  FloatCarver carver(scratch);
  Arrays arrays;
  arrays.take(&carver, p, p.batch.total_rows, p.batch.count);
  void* workspace = dense_workspace(arrays.workspace);
  int32_t status = p.dx.present() ? launch_projection_rows_gradient(p, workspace, stream) : LLA_OK;
  if (status == LLA_OK && p.dweight.present()) status = launch_weight_gradient(p, arrays.weight, workspace, stream);
  if (status == LLA_OK && p.dbias.present()) {
    const RowBlocks blocks(p.batch, kBiasRowsLog, true);
    const int64_t column_blocks = tiles_of(p.outputs, 32);
    status = cuda::launch(projection_bias_gradient, blocks.tasks * column_blocks, kProjectionThreads, 0, stream, p, blocks,
                          column_blocks, arrays.bias);
    if (status == LLA_OK)
      status = launch_sum_partials(arrays.bias, blocks.tasks, p.outputs, StoreMatrix{p.dbias, p.outputs}, stream);
  }
  return status;
}

int32_t ProjectionBackward::load() {
  return first_failure(
      [] { return load_projection_rows_gradient(); }, [] { return load_kernel(projection_weight_gradient<true>); },
      [] { return load_kernel(projection_weight_gradient<false>); }, [] { return load_kernel(projection_bias_gradient); },
      [] { return load_kernel(sum_partials<StoreMatrix>); });
}

}  // namespace lla::cuda
