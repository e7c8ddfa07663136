// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper, last steps: gradients of gates from flows, sums of dq and dk over parts of groups.
#include "cuda/common/element.h"
#include "cuda/common/reduce.h"
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_fold.h"

namespace lla::cuda::hopper {

namespace {

// Blocks that follow each other, from a multiple on: one for each lane; a level of nodes has a warp.
constexpr int kWindow = 32;

// Flow that crosses the start of block `reader`, of the node of level `level` that the block reads; 0: of none. All lanes of
// the window come together, lane i with its block i.
__device__ __forceinline__ float crossing(const BackwardParameters& in, const BlockOfRows& first, int number, int level,
                                          int reader) {
  const int lane = static_cast<int>(threadIdx.x) % 32, end = first.end;
  const auto slot = [&](int block) { return in.slot(first.place_of(block), number); };
  // What the block reads of the node: newer nodes are the entries before it.
  const auto read = [&](int block) {
    return in.reads[slot(block) * kMostEntries + __popcll(static_cast<uint32_t>(block) & ((uint32_t{1} << level) - 1))];
  };
  if (in.linear) {
    if (level > 0 || reader <= first.first || reader >= end) return 0;
    const float through = reader + 1 < end ? in.through[slot(reader - 1)] : 0.0f;
    return in.reads[slot(reader) * kMostEntries] + through;
  }
  const int begin = reader >> level << level;  // of the readers; the node ends before it
  const bool reads = ((reader >> level) & 1) != 0 && begin > first.first && reader < end;
  float sum = reads ? read(reader) : 0.0f;  // then with the later readers
  const int size = level < 5 ? 1 << level : kWindow;
#pragma unroll
  for (int d = 1; d < kWindow; d *= 2) {
    const float later = __shfl_down_sync(kAllLanes, sum, d);
    if (lane % size + d < size) sum += later;
  }
  if (level > 5) {  // readers behind the window; where one lane reads, all do that have a block
    const int window = reader - lane, to = min(begin + (1 << level), end);
    const bool any = ((window >> level) & 1) != 0 && (window >> level << level) > first.first;
    float behind = 0;
    for (int block = window + kWindow + lane; any && block < to; block += kWindow) behind += read(block);
    sum += warp_sum(behind);
  }
  if (!reads) return 0;
  const bool goes_on = begin + (1 << level) < end;  // the node that takes it in ends with the last reader
  return sum + (goes_on ? in.through[slot(begin - 1)] : 0.0f);
}

// Windows of the blocks that follow one that a sequence touches.
LLA_HOST_DEVICE inline int64_t windows_of(const BackwardParameters& in) { return (in.blocks + 2 * kWindow - 2) / kWindow; }

constexpr int kFlowWarps = kMostEntries;

// Flows that cross the ends of blocks, to the place of their decays, which nobody needs any more. One block of threads: the
// blocks whose ends a window's blocks begin at, of one head.
__global__ void __launch_bounds__(32 * kFlowWarps)
    cross_ends(const __grid_constant__ BackwardParameters in, int windows, int tasks) {
  __shared__ float flows[kMostEntries][kWindow];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int task = static_cast<int>(blockIdx.x); task < tasks; task += static_cast<int>(gridDim.x)) {
    const int n = task / in.head_count, number = in.head_begin + task - n * in.head_count, b = n / windows;
    BlockOfRows first;
    if (!find_block(in, b, 0, &first)) continue;
    const int window = ((first.first + 1) / kWindow + n - b * windows) * kWindow;
    if (window > first.end) continue;
    flows[warp][lane] = crossing(in, first, number, warp, window + lane);
    __syncthreads();
    const int block = window + lane - 1;
    if (warp == 0 && block >= first.first && block < first.end) {
      float sum = 0;
#pragma unroll
      for (int level = 0; level < kMostEntries; ++level) sum += flows[level][lane];
      in.totals[in.slot(first.place_of(block), number)] = sum;
    }
    __syncthreads();
  }
}

constexpr int kGateHeads = 8;  // of a task, one for each warp: rows of neighbouring heads share sectors of memory
constexpr int kGateThreads = 32 * kGateHeads, kGateRows = kBlock * kGateHeads / kGateThreads;  // rows of a thread

// A warp's block and head: four rows a lane. `rows`: gates, then their gradients.
__device__ __forceinline__ void put_gates(const BackwardParameters& in, const BlockOfRows& block, int64_t slot,
                                          float* rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float4 of_reads = reinterpret_cast<const float4*>(in.row_reads + slot * kBlock)[lane];
  const float4 of_others = reinterpret_cast<const float4*>(in.row_others(slot))[lane];
  const float at_end = in.totals[slot];
  // Flow of what a row reads less that of what others read of it; then with the later rows.
  float sum[4] = {of_reads.x - of_others.x, of_reads.y - of_others.y, of_reads.z - of_others.z, of_reads.w - of_others.w};
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    const int r = 4 * lane + i;
    sum[i] = (r >= block.lo && r < block.hi ? sum[i] : 0.0f) + (i < 3 ? sum[i + 1] : 0.0f);
  }
  float later = __shfl_down_sync(kAllLanes, sum[0], 1);  // of the lanes behind
  if (lane == 31) later = 0;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float more = __shfl_down_sync(kAllLanes, later, d);
    if (lane + d < 32) later += more;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& row = rows[4 * lane + i];
    // Nothing crosses a gate that lets nothing through.
    row = decay_of(row) == 0 ? 0.0f : sum[i] + later + at_end;
  }
}

// One block of threads: one block of rows, kGateHeads heads of the slice.
__global__ void __launch_bounds__(kGateThreads)
    put_gate_gradients(const __grid_constant__ BackwardParameters in, int chunks, int64_t tasks) {
  __shared__ float rows[kGateHeads][kBlock + 4];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t n = task / chunks;
    BlockOfRows block;
    if (!find_block(in, n, &block)) continue;
    const int first = static_cast<int>(task - n * chunks) * kGateHeads, heads = min(kGateHeads, in.head_count - first);
    // This thread's head, and its rows thread / kGateHeads + kBlock / kGateRows i.
    const int own = thread % kGateHeads, head = own < heads ? in.head_of(in.head_begin + first + own) : 0;
    const auto row_of = [&](int i) { return thread / kGateHeads + kBlock / kGateRows * i; };
    const auto live = [&](int r) { return own < heads && r >= block.lo && r < block.hi; };
    float gate[kGateRows];
#pragma unroll
    for (int i = 0; i < kGateRows; ++i)
      gate[i] = live(row_of(i)) && in.gate.present()
                    ? load_element(in.gate.at(block.index, block.row + row_of(i), head), in.gate.dtype, 0)
                    : 0.0f;
#pragma unroll
    for (int i = 0; i < kGateRows; ++i) rows[own][row_of(i)] = gate[i];
    __syncthreads();
    if (warp < heads) put_gates(in, block, in.slot(block.place, in.head_begin + first + warp), rows[warp]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kGateRows; ++i) {
      if (live(row_of(i)))
        put_element(in.dgate.at(block.index, block.row + row_of(i), head), in.dgate.dtype, 0, rows[own][row_of(i)],
                    in.dgate.accumulate);
    }
    __syncthreads();
  }
}

constexpr int kSumThreads = 256, kChunk = 8;  // columns of a thread

__device__ __forceinline__ void add_chunk(float (&sum)[kChunk], const float* from, bool adds) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  const float x[kChunk] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kChunk; ++i) sum[i] = adds ? sum[i] + x[i] : x[i];
}

// Groups of which the slice has parts.
LLA_HOST_DEVICE inline int groups_of(const BackwardParameters& in) {
  return (in.part_begin + in.part_count - 1) / in.parts_of_group - in.part_begin / in.parts_of_group + 1;
}

// A thread: one chunk of a row of a group.
template <Half kType, int kKeyDim>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts(const __grid_constant__ BackwardParameters in, const View to, const float* parts, float* sums, int64_t tasks) {
  constexpr int kChunks = kKeyDim / kChunk, kSize = kBlock * kKeyDim, kPieces = kSize / kChunk / kSumThreads;
  const int per_group = in.parts_of_group, first_group = in.part_begin / per_group, groups = groups_of(in);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    BlockOfRows block;
    const int64_t n = task / kPieces;
    if (!find_block(in, n / groups, &block)) continue;
    const int group = first_group + static_cast<int>(n % groups);
    const int begin = max(in.part_begin, group * per_group);
    const int end = min(in.part_begin + in.part_count, (group + 1) * per_group);
    // Without sums, the one part of a slice has the earlier ones in it.
    const bool begins = !sums || begin == group * per_group, ends = end == (group + 1) * per_group;
    const int i = static_cast<int>(task % kPieces) * kSumThreads + static_cast<int>(threadIdx.x);
    const int r = i / kChunks, column = i % kChunks * kChunk;
    if (r < block.lo || r >= block.hi) continue;
    const float* from = parts + ((begin - in.part_begin) * in.places + block.place) * kSize + i * kChunk;
    float* at = sums + block.place * kSize + i * kChunk;
    float sum[kChunk];
    add_chunk(sum, begins ? from : at, false);
#pragma unroll 4
    for (int part = begins ? 1 : 0; part < end - begin; ++part) add_chunk(sum, from + part * in.places * kSize, true);
    if (!ends) {
      float4* out = reinterpret_cast<float4*>(at);
      out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else if (column < in.shape.key_dim) {
      uint4* out = reinterpret_cast<uint4*>(static_cast<unsigned short*>(to.at(block.index, block.row + r, group)) + column);
      if (to.accumulate) {
        const uint4 old = *out;
        const uint32_t pairs[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum[2 * j] += low_of<kType>(pairs[j]);
          sum[2 * j + 1] += high_of<kType>(pairs[j]);
        }
      }
      *out = make_uint4(pack<kType>(sum[0], sum[1]), pack<kType>(sum[2], sum[3]), pack<kType>(sum[4], sum[5]),
                        pack<kType>(sum[6], sum[7]));
    }
  }
}

}  // namespace

int32_t launch_block_flows(const BackwardParameters& in, void* stream) {
  const int64_t windows = windows_of(in), tasks = in.batch.count * windows * in.head_count;
  const int64_t chunks = (in.head_count + kGateHeads - 1) / kGateHeads, blocks = in.batch.count * in.blocks * chunks;
  if (tasks >= int64_t{1} << 30) return LLA_INTERNAL;
  const int32_t status =
      launch(cross_ends, tasks, 32 * kFlowWarps, 0, stream, in, static_cast<int>(windows), static_cast<int>(tasks));
  if (status != LLA_OK) return status;
  return launch(put_gate_gradients, blocks, kGateThreads, 0, stream, in, static_cast<int>(chunks), blocks);
}

int32_t launch_part_sums(const BackwardParameters& in, const View& to, const float* parts, float* sums, int key_dim,
                         void* stream) {
  const int64_t pieces = kBlock * key_dim / kChunk / kSumThreads,
                tasks = in.batch.count * in.blocks * groups_of(in) * pieces;
  auto* kernel = in.f16 ? (key_dim == 64 ? sum_parts<Half::kF16, 64> : sum_parts<Half::kF16, 128>)
                        : (key_dim == 64 ? sum_parts<Half::kBf16, 64> : sum_parts<Half::kBf16, 128>);
  return launch(kernel, tasks, kSumThreads, 0, stream, in, to, parts, sums, tasks);
}

int32_t load_block_flows() {
  int32_t status = load_kernel(cross_ends);
  if (status == LLA_OK) status = load_kernel(put_gate_gradients);
  for (auto* kernel :
       {sum_parts<Half::kBf16, 64>, sum_parts<Half::kBf16, 128>, sum_parts<Half::kF16, 64>, sum_parts<Half::kF16, 128>}) {
    if (status == LLA_OK) status = load_kernel(kernel);
  }
  return status;
}

}  // namespace lla::cuda::hopper
