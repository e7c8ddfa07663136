// SPDX-License-Identifier: Apache-2.0
// L2 norm over the last axis, times a scale, and its gradient (docs/mathematics.md).
#include "cuda/common/reduce.h"
#include "cuda/common/row_blocks.h"
#include "cuda/portable/parts_kernels.h"

namespace lla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsLog = 3;  // rows of a block

__device__ __forceinline__ float dot(const float4& a, const float4& b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

// Calls f(e, count) for the elements of a row that a lane has.
template <class F>
__device__ __forceinline__ void for_lane(int dim, F f) {
  for (int e = 4 * (threadIdx.x % 32); e < dim; e += 128) f(e, min(4, dim - e));
}

// A warp has a row of one head. Elements are read again for the result, by the lane that read them before.
template <bool kBackward>
__global__ void __launch_bounds__(kThreads) l2_norm(L2Norm p, RowBlocks blocks) {
  const int dim = static_cast<int>(p.dim), heads = static_cast<int>(p.heads);
  const float epsilon = float_of_epsilon(p.epsilon), scale = static_cast<float>(p.scale);
  for (int64_t task = blockIdx.x; task < blocks.tasks; task += gridDim.x) {
    const RowBlock block = blocks.find(p.batch, task);
    for (int64_t i = threadIdx.x / 32; i < static_cast<int64_t>(block.rows) * heads; i += kThreads / 32) {
      const int64_t b = block.sequence->index, r = i / heads, row = block.first + r, h = i - r * heads;
      const void* x = p.x.at(b, row, h);
      float squares = 0, along = 0;  // along: row . dy
      if constexpr (kBackward) {
        const void* dy = p.dy.at(b, row, h);
        for_lane(dim, [&](int e, int count) {
          const float4 value = load4(x, p.x.dtype, e, count);
          squares += dot(value, value);
          along += dot(value, load4(dy, p.dy.dtype, e, count));
        });
        const float inverse = 1 / sqrtf(warp_sum(squares) + epsilon), pull = warp_sum(along) * inverse * inverse;
        const float factor = scale * inverse;
        for_lane(dim, [&](int e, int count) {
          const float4 value = load4(x, p.x.dtype, e, count), d = load4(dy, p.dy.dtype, e, count);
          put4(p.dx.at(b, row, h), p.dx.dtype, e, count,
               make_float4(factor * (d.x - value.x * pull), factor * (d.y - value.y * pull), factor * (d.z - value.z * pull),
                           factor * (d.w - value.w * pull)),
               p.dx.accumulate);
        });
      } else {
        for_lane(dim, [&](int e, int count) {
          const float4 value = load4(x, p.x.dtype, e, count);
          squares += dot(value, value);
        });
        const float factor = scale / sqrtf(warp_sum(squares) + epsilon);
        for_lane(dim, [&](int e, int count) {
          const float4 value = load4(x, p.x.dtype, e, count);
          put4(p.y.at(b, row, h), p.y.dtype, e, count,
               make_float4(factor * value.x, factor * value.y, factor * value.z, factor * value.w), p.y.accumulate);
        });
      }
    }
  }
}

bool accepts_types(const L2Norm& p) {
  return narrow_types(p.x, p.y, p.dy, p.dx) && p.dim < kMostColumns && p.heads < kMostColumns;
}

}  // namespace

bool L2NormForward::accepts(const void* problem) { return accepts_types(*static_cast<const L2Norm*>(problem)); }
void L2NormForward::measure(const void* problem, const Limits& limits, Need* need) { needs_nothing(problem, limits, need); }
int32_t L2NormForward::launch(const void* problem, const Limits&, char*, void* stream) {
  const L2Norm& p = *static_cast<const L2Norm*>(problem);
  const RowBlocks blocks(p.batch, kRowsLog, false);
  return cuda::launch(l2_norm<false>, blocks.tasks, kThreads, 0, stream, p, blocks);
}
int32_t L2NormForward::load() { return load_kernel(l2_norm<false>); }

bool L2NormBackward::accepts(const void* problem) { return accepts_types(*static_cast<const L2Norm*>(problem)); }
void L2NormBackward::measure(const void* problem, const Limits& limits, Need* need) { needs_nothing(problem, limits, need); }
int32_t L2NormBackward::launch(const void* problem, const Limits&, char*, void* stream) {
  const L2Norm& p = *static_cast<const L2Norm*>(problem);
  if (!p.dx.present()) return LLA_OK;
  const RowBlocks blocks(p.batch, kRowsLog, false);
  return cuda::launch(l2_norm<true>, blocks.tasks, kThreads, 0, stream, p, blocks);
}
int32_t L2NormBackward::load() { return load_kernel(l2_norm<true>); }

}  // namespace lla::cuda
