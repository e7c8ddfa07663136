// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper, last steps: gradients of gates from flows, sums of dq and dk over parts of groups.
#include "cuda/common/element.h"
#include "cuda/common/reduce.h"
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_fold.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kWindow =
    32;  // blocks that follow each other, from a multiple on: one for each lane; a level of nodes has a warp

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

// A warp's block: four rows a lane.
struct GateRows {
  float sum[4];  // flow of what a row reads less that of what others read of it
  float gate[4];
  int live = 0;  // bits

  __device__ __forceinline__ GateRows(const BackwardParameters& in, const BlockOfRows& block, int number) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t slot = in.slot(block.place, number);
    const float4 of_reads = reinterpret_cast<const float4*>(in.row_reads + slot * kBlock)[lane];
    const float4 of_others = reinterpret_cast<const float4*>(in.row_others(slot))[lane];
    const float reads[4] = {of_reads.x, of_reads.y, of_reads.z, of_reads.w};
    const float others[4] = {of_others.x, of_others.y, of_others.z, of_others.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * lane + i;
      const bool lives = r >= block.lo && r < block.hi;
      live |= lives ? 1 << i : 0;
      sum[i] = lives ? reads[i] - others[i] : 0.0f;
      gate[i] = lives && in.gate.present()
                    ? load_element(in.gate.at(block.index, block.row + r, in.head_of(number)), in.gate.dtype, 0)
                    : 0.0f;
    }
  }

  // at_end: flow that crosses the block's end.
  __device__ __forceinline__ void put(const BackwardParameters& in, const BlockOfRows& block, int number, float at_end) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 2; i >= 0; --i) sum[i] += sum[i + 1];
    float later = __shfl_down_sync(kAllLanes, sum[0], 1);  // of the lanes behind
    if (lane == 31) later = 0;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float more = __shfl_down_sync(kAllLanes, later, d);
      if (lane + d < 32) later += more;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(live >> i & 1)) continue;
      // Nothing crosses a gate that lets nothing through.
      const float x = decay_of(gate[i]) == 0 ? 0.0f : sum[i] + later + at_end;
      put_element(in.dgate.at(block.index, block.row + 4 * lane + i, in.head_of(number)), in.dgate.dtype, 0, x,
                  in.dgate.accumulate);
    }
  }
};

// Windows of the blocks that follow one that a sequence touches.
LLA_HOST_DEVICE inline int64_t windows_of(const BackwardParameters& in) { return (in.blocks + 2 * kWindow - 2) / kWindow; }

constexpr int kFlowWarps = kMostEntries, kRounds = kWindow / kFlowWarps;

// One block of threads: the blocks whose ends a window's blocks begin at, of one head.
__global__ void __launch_bounds__(32 * kFlowWarps, 3)
    gate_flows(const __grid_constant__ BackwardParameters in, int windows, int tasks) {
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
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      const int place = round * kFlowWarps + warp, at = window + place - 1;  // the warp's block
      if (at < first.first || at >= first.end) continue;
      BlockOfRows block = first;
      block.move_to(at);
      float at_end = 0;
#pragma unroll
      for (int level = 0; level < kMostEntries; ++level) at_end += flows[level][place];
      GateRows(in, block, number).put(in, block, number, at_end);
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
template <int kKeyDim>
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
          sum[2 * j] += low_of(pairs[j]);
          sum[2 * j + 1] += high_of(pairs[j]);
        }
      }
      *out = make_uint4(pack<Half::kBf16>(sum[0], sum[1]), pack<Half::kBf16>(sum[2], sum[3]),
                        pack<Half::kBf16>(sum[4], sum[5]), pack<Half::kBf16>(sum[6], sum[7]));
    }
  }
}

}  // namespace

int32_t launch_block_flows(const BackwardParameters& in, void* stream) {
  const int64_t windows = windows_of(in), tasks = in.batch.count * windows * in.head_count;
  if (tasks >= int64_t{1} << 30) return LLA_INTERNAL;
  return launch(gate_flows, tasks, 32 * kFlowWarps, 0, stream, in, static_cast<int>(windows), static_cast<int>(tasks));
}

int32_t launch_part_sums(const BackwardParameters& in, const View& to, const float* parts, float* sums, int key_dim,
                         void* stream) {
  const int64_t pieces = kBlock * key_dim / kChunk / kSumThreads,
                tasks = in.batch.count * in.blocks * groups_of(in) * pieces;
  return launch(key_dim == 64 ? sum_parts<64> : sum_parts<128>, tasks, kSumThreads, 0, stream, in, to, parts, sums, tasks);
}

int32_t load_block_flows() {
  int32_t status = load_kernel(gate_flows);
  if (status == LLA_OK) status = load_kernel(sum_parts<64>);
  if (status == LLA_OK) status = load_kernel(sum_parts<128>);
  return status;
}

}  // namespace lla::cuda::hopper
