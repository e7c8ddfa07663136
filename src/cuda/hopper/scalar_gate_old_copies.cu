// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: nodes of histories in the rows' type, where the state has them in another. A sweep reads
// them again for each block of rows, and its products want operands of one type.
#include "cuda/hopper/scalar_gate_fragments.h"
#include "cuda/hopper/scalar_gate_sweep.h"
#include "cuda/hopper/scalar_gate_views.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kCopyThreads = 256, kFours = 8;  // of columns, at most, that a thread has
constexpr int64_t kMostBlocksOfCopies = 2048;

// One block of threads: one node of one head, 64 columns of values.
template <Half kType>
__global__ void __launch_bounds__(kCopyThreads)
    copy_nodes_of_histories(const __grid_constant__ SweepParameters in, int key_dim, int64_t tasks) {
  __shared__ float of_warps[kCopyThreads / 32];
  const int64_t heads_and_tiles = in.shape.heads * in.tiles;
  for (int64_t number = blockIdx.x; number < tasks; number += gridDim.x) {
    const int entry = static_cast<int>(number % in.old_entries);
    const int64_t rest = number / in.old_entries, b = rest / heads_and_tiles;
    const Task task = find_task(in, (b * in.segments) * heads_and_tiles + rest % heads_and_tiles);
    if (task.rows == 0 || entry >= task.old_count()) continue;
    int level;
    const int32_t id = in.batch.sequences[b].history.node[task.old_level(entry, in.grain_shift, &level)];
    const char* node = in.state.node(id, task.head);
    const int64_t value_dim = in.shape.value_dim;
    float4 four[kFours];
    float most = 0;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kCopyThreads, row = at / 16;
      const int64_t column = kColumns * task.tile + 4 * (at % 16);
      four[i] = make_float4(0, 0, 0, 0);
      if (row < in.shape.key_dim && column < value_dim)
        four[i] = load4(node, in.state.node_layout.dtype, row * value_dim + column, value_dim - column);
      most = fmaxf(most, fmaxf(fmaxf(fabsf(four[i].x), fabsf(four[i].y)), fmaxf(fabsf(four[i].z), fabsf(four[i].w))));
    }
    const int64_t place = in.old_place(task.old_number, entry, task.head, task.tile);
    float unit = 1;
    if constexpr (kType == Half::kF16) {
      most = warp_max(most);
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
      __syncthreads();
#pragma unroll
      for (int w = 0; w < kCopyThreads / 32; ++w) most = fmaxf(most, of_warps[w]);
      __syncthreads();
      if (threadIdx.x == 0) in.old_largest[place] = most;
      unit = power_of_two(-exponent_above(most));
    }
    uint2* to = reinterpret_cast<uint2*>(in.old_copies + place * key_dim * kColumns);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kCopyThreads;
      if (at < key_dim * 16)
        to[at] =
            make_uint2(pack<kType>(unit * four[i].x, unit * four[i].y), pack<kType>(unit * four[i].z, unit * four[i].w));
    }
  }
}

}  // namespace

Size old_copies_bytes(const MixerShape& shape, const Limits& limits) {
  const Size places = Size(old_sequences(limits.sequences, limits.rows)) * old_entries_of(shape, limits.length) *
                      shape.heads * tiles_of(shape);
  return (places * key_columns(shape) * kColumns * 2).aligned(256) + (places * 4).aligned(256);
}

int32_t launch_old_copies(const SweepParameters& in, int key_dim, bool half, void* stream) {
  const int64_t tasks = in.batch.count * in.old_entries * in.shape.heads * in.tiles;
  const int64_t blocks = tasks < kMostBlocksOfCopies ? tasks : kMostBlocksOfCopies;  // most tasks may be of steps
  return half ? launch(copy_nodes_of_histories<Half::kF16>, blocks, kCopyThreads, 0, stream, in, key_dim, tasks)
              : launch(copy_nodes_of_histories<Half::kBf16>, blocks, kCopyThreads, 0, stream, in, key_dim, tasks);
}

int32_t load_old_copies() {
  const int32_t status = load_kernel(copy_nodes_of_histories<Half::kBf16>);
  return status == LLA_OK ? load_kernel(copy_nodes_of_histories<Half::kF16>) : status;
}

}  // namespace lla::cuda::hopper
