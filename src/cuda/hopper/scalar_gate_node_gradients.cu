// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: the gradient of each node from those of the nodes that take it in, besides its readers;
// the flow through it.
#include "cuda/common/reduce.h"
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_fragments.h"
#include "cuda/hopper/scalar_gate_walk.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kDownThreads = 256, kDownElements = 8;
constexpr int kDownPiece = kDownThreads * kDownElements;  // elements of a node that a block of threads takes down
constexpr int kWindowLog = 5, kWindow = 1 << kWindowLog;  // steps of a log-linear walk
constexpr int kQuad = 4;  // steps whose levels are known, but for the newest's; so many are on their way

template <Half kType>
__device__ __forceinline__ float element_of(const uint32_t (&pairs)[4], int i) {
  return i % 2 == 0 ? low_of<kType>(pairs[i / 2]) : high_of<kType>(pairs[i / 2]);
}

// This thread's elements of the steps of a walk.
template <Half kType>
struct DownWalk {
  static constexpr int kLanes = 8;  // that sum the flow of a step
  using Elements = float[kDownElements];

  const BackwardParameters& in;
  const int shift, pieces, piece, head, first, begin, end;  // steps [begin, end); step x: block ((x + 1) << shift) - 1
  const int64_t places;
  float* flows;  // [step of a window][kDownThreads + kLanes]: no two of a warp's lanes meet in a bank

  struct Loaded {
    uint4 own = {0, 0, 0, 0}, node = {0, 0, 0, 0};
    float up = 0;
  };
  __device__ __forceinline__ bool has(int x) const { return x >= begin && x < end; }
  __device__ __forceinline__ int64_t slot_of(int x) const { return in.slot(places + ((x + 1) << shift) - 1 - first, head); }
  __device__ __forceinline__ uint4* at(unsigned short* memory, int x) const {
    return reinterpret_cast<uint4*>(memory + (slot_of(x) * pieces + piece) * kDownPiece) + threadIdx.x;
  }
  __device__ __forceinline__ Loaded load(int x) const {
    Loaded loaded;
    if (!has(x)) return loaded;
    loaded.own = *at(in.grads_memory, x);
    loaded.node = *at(in.nodes_memory, x);
    loaded.up = (kType == Half::kF16 ? in.downs : in.up)[slot_of(x)];
    return loaded;
  }
  __device__ __forceinline__ void read(const Loaded& loaded, Elements& sum) const {
    const uint32_t own[4] = {loaded.own.x, loaded.own.y, loaded.own.z, loaded.own.w};
#pragma unroll
    for (int i = 0; i < kDownElements; ++i) sum[i] = element_of<kType>(own, i);
  }
  // The gradient of a node whose parent's is there; zero: it has none.
  __device__ __forceinline__ void visit(int x, const Loaded& loaded, const Elements& parent, Elements& sum) const {
    const uint32_t node[4] = {loaded.node.x, loaded.node.y, loaded.node.z, loaded.node.w};
    float flow = 0;
    read(loaded, sum);
#pragma unroll
    for (int i = 0; i < kDownElements; ++i) {
      const float more = loaded.up * parent[i];
      flow = fmaf(element_of<kType>(node, i), more, flow);
      sum[i] += more;
    }
    *at(in.grads_memory, x) = make_uint4(pack<kType>(sum[0], sum[1]), pack<kType>(sum[2], sum[3]),
                                         pack<kType>(sum[4], sum[5]), pack<kType>(sum[6], sum[7]));
    flows[x % kWindow * (kDownThreads + kLanes) + threadIdx.x] = flow;
  }
  // After all steps of a window: the flows of this piece go to row_others(), which nobody needs yet.
  __device__ __forceinline__ void sum_window(int window) const {
    __syncthreads();
    static_assert(kDownThreads == kWindow * kLanes, "a thread sums for one step");
    const int step = static_cast<int>(threadIdx.x) / kLanes, x = window * kWindow + step;
    const float* from = flows + step * (kDownThreads + kLanes) + threadIdx.x % kLanes;
    const bool mine = has(x) && step + 1 < kWindow;
    float flow = 0;
    for (int i = 0; mine && i < kDownThreads; i += kLanes) flow += from[i];
    for (int d = kLanes / 2; d > 0; d /= 2) flow += __shfl_xor_sync(kAllLanes, flow, d);
    if (mine && threadIdx.x % kLanes == 0) in.row_others(slot_of(x))[piece] = flow;
    __syncthreads();
  }
};

__device__ __forceinline__ void set_all(float (&to)[kDownElements], const float (&from)[kDownElements]) {
#pragma unroll
  for (int i = 0; i < kDownElements; ++i) to[i] = from[i];
}

// Log-linear: walks over kWindow of the nodes that end with multiples of 2^shift blocks, from the newest to the oldest,
// those of the kWindowLog lowest levels; the others were done by a walk with a higher shift. One block of threads: a piece
// of the nodes.
template <Half kType>
__global__ void __launch_bounds__(kDownThreads, 2)
    walk_down(const __grid_constant__ BackwardParameters in, int shift, int pieces, int64_t windows, int64_t tasks) {
  using DownWalk = DownWalk<kType>;
  __shared__ float flows[kWindow * (kDownThreads + DownWalk::kLanes)];
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t n = task / pieces / in.head_count;
    BlockOfRows block;
    if (!find_block(in, n / windows * in.blocks, &block)) continue;
    int begin = block.first >> shift, end = (block.end - 1) >> shift;  // later blocks make no nodes
    const int window = (begin >> kWindowLog) + static_cast<int>(n % windows);
    begin = max(begin, window << kWindowLog);
    end = min(end, (window + 1) << kWindowLog);
    if (begin >= end) continue;
    const int head = in.head_begin + static_cast<int>(task / pieces % in.head_count);
    const DownWalk walk{in,  shift,       pieces, static_cast<int>(task % pieces), head, block.first, begin,
                        end, block.place, flows};
    typename DownWalk::Loaded coming[kQuad];
#pragma unroll
    for (int j = 0; j < kQuad; ++j) coming[j] = walk.load((end - 1) / kQuad * kQuad + j);
    // Of the latest node above level 0, above level 1, above level 2 + i. None: zero.
    typename DownWalk::Elements near[2] = {}, above[kWindowLog - 2] = {};
#pragma unroll 1
    for (int first = (end - 1) / kQuad * kQuad; first + kQuad > begin; first -= kQuad) {
      const int level = 2 + trailing_ones_of_block(first / kQuad % (kWindow / kQuad));  // of the last of the four
#pragma unroll
      for (int j = kQuad - 1; j >= 0; --j) {
        const int x = first + j;
        const typename DownWalk::Loaded loaded = coming[j];
        coming[j] = walk.load(x - kQuad);
        if (!walk.has(x)) continue;
        typename DownWalk::Elements sum;
        if (j == 3) {
          if (level >= kWindowLog) {
            walk.read(loaded, sum);
          } else {
            typename DownWalk::Elements parent;
            set_all(parent, above[0]);
#pragma unroll
            for (int i = 1; i < kWindowLog - 2; ++i) {
              if (level == 2 + i) set_all(parent, above[i]);
            }
            walk.visit(x, loaded, parent, sum);
          }
          set_all(near[0], sum);
          set_all(near[1], sum);
#pragma unroll
          for (int i = 0; i < kWindowLog - 2; ++i) {
            if (2 + i < level) set_all(above[i], sum);
          }
        } else {
          walk.visit(x, loaded, near[j % 2], sum);
          if (j == 1) set_all(near[0], sum);
        }
      }
      if (first % kWindow == 0 || first <= begin) walk.sum_window(first / kWindow);
    }
  }
}

// Linear: adds what the segments behind leave to the gradients of a segment's states; the flow through it goes to
// row_others(), which nobody needs yet.
template <Half kType>
__global__ void __launch_bounds__(32 * kWalkWarps)
    carry_gradients(const __grid_constant__ BackwardParameters in, int64_t node_size, int64_t tasks) {
  constexpr bool kUnits = kType == Half::kF16;
  __shared__ float decays[kSegment];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    Walk walk;
    if (!walk.find(in, task, node_size)) continue;
    const int first = walk.first.first, last = walk.first.end - 2;
    int behind = last >> kSegmentLog << kSegmentLog;  // first block of the segment behind
    if (behind <= first) continue;
    // fp16: units are left aside here.
    const auto unit_of = [&](int block) { return kUnits ? power_of_two(in.units[walk.slot(in, block)].grad) : 1.0f; };
    Elements<kType> carry = {};
    carry.add(unit_of(behind), *walk.at(in.grads_memory, walk.slot(in, behind)));
    while (behind > first) {
      const int begin = max(first, behind - kSegment), count = behind - begin;
      if (warp == 0) walk.put_decays(in, begin, count, true, decays);
      const uint4 next = *walk.at(in.grads_memory, walk.slot(in, begin));
      __syncthreads();
#pragma unroll 2
      for (int i = warp; i < count; i += kWalkWarps) {
        const int64_t slot = walk.slot(in, begin + i);
        uint4* at = walk.at(in.grads_memory, slot);
        const uint4 own = *at, node = *walk.at(in.nodes_memory, slot);
        float flow = warp_sum(decays[i] * carry.dot(node));
        Elements<kType> sum = carry;
        if constexpr (kUnits) {
          const BlockUnits units = in.units[slot];
          flow *= power_of_two(units.node);
          sum.step(decays[i], own, power_of_two(units.grad));
          *at = sum.packed(power_of_two(-units.grad));
        } else {
          sum.step(decays[i], own);
          *at = sum.packed();
        }
        if (threadIdx.x % 32 == 0) in.row_others(slot)[walk.piece()] = flow;
      }
      carry.step(decays[0], next, unit_of(begin));
      behind = begin;
      __syncthreads();
    }
  }
}

constexpr int kFlowThreads = 256;

// Sums of the flows of a node's pieces. One thread: one block and head.
template <Half kType>
__global__ void __launch_bounds__(kFlowThreads)
    sum_flows(const __grid_constant__ BackwardParameters in, int pieces, int64_t count) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kFlowThreads + threadIdx.x;
  BlockOfRows block;
  if (n >= count || !find_block(in, n / in.head_count, &block) || !block.makes) return;
  const int64_t slot = in.slot(block.place, in.head_begin + static_cast<int>(n % in.head_count));
  float flow = 0;
  if (in.linear) {  // what the segment's own states get, then what comes from segments behind
    for (int i = kFlowPlace; i < kMostEntries; ++i) flow += in.factors(slot)->newer[i];
    if (block.block >> kSegmentLog == (block.end - 2) >> kSegmentLog) pieces = 0;
  }
  for (int i = 0; i < pieces; ++i) flow += in.row_others(slot)[i];
  if constexpr (kType == Half::kF16) {  // of the walk down, which knows no units
    const BlockUnits units = in.units[slot];
    if (!in.linear) flow *= unit_ratio(units.node, -units.grad);
  }
  in.through[slot] = flow;
}

template <Half kType>
int32_t launch_down(const BackwardParameters& in, int key_dim, void* stream) {
  const int64_t size = int64_t{key_dim} * kColumns, count = in.batch.count * in.blocks * in.head_count;
  const int pieces = static_cast<int>(size) / (in.linear ? kWarpElements : kDownPiece);
  const int64_t walks = in.batch.count * in.head_count * pieces;
  int32_t status = LLA_OK;
  if (in.linear) {
    if (in.batch.most_length > int64_t{kSegment} << kBlockLog)
      status = launch(carry_gradients<kType>, walks, 32 * kWalkWarps, 0, stream, in, size, walks);
  } else {
    for (int shift = 2 * kWindowLog; shift >= 0 && status == LLA_OK; shift -= kWindowLog) {
      if ((in.batch.most_length - 1) >> kBlockLog < int64_t{1} << shift) continue;
      const int64_t windows = (in.blocks >> (shift + kWindowLog)) + 2, tasks = walks * windows;
      status = launch(walk_down<kType>, tasks, kDownThreads, 0, stream, in, shift, pieces, windows, tasks);
    }
  }
  if (status != LLA_OK) return status;
  return launch(sum_flows<kType>, (count + kFlowThreads - 1) / kFlowThreads, kFlowThreads, 0, stream, in, pieces, count);
}

template <Half kType>
int32_t load_down() {
  int32_t status = load_kernel(walk_down<kType>);
  if (status == LLA_OK) status = load_kernel(carry_gradients<kType>);
  return status == LLA_OK ? load_kernel(sum_flows<kType>) : status;
}

}  // namespace

int32_t launch_node_gradients(const BackwardParameters& in, int key_dim, void* stream) {
  if (in.blocks < 2) return LLA_OK;
  return in.f16 ? launch_down<Half::kF16>(in, key_dim, stream) : launch_down<Half::kBf16>(in, key_dim, stream);
}

int32_t load_node_gradients() {
  const int32_t status = load_down<Half::kBf16>();
  return status == LLA_OK ? load_down<Half::kF16>() : status;
}

}  // namespace lla::cuda::hopper
