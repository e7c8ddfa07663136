// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: the gradient of each node from those of the nodes that take it in, besides its readers;
// the flow through it.
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_fragments.h"
#include "cuda/hopper/scalar_gate_walk.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kDownThreads = 256, kDownElements = 8;
constexpr int kDownPiece = kDownThreads * kDownElements;  // elements of a node that a block of threads takes down
constexpr int kWindowLog = 5, kWindow = 1 << kWindowLog;  // steps of a log-linear walk
constexpr int kQuad = 4;  // steps whose levels are known, but for the newest's; so many are on their way

// This thread's elements of the steps of a walk.
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
    loaded.up = in.up[slot_of(x)];
    return loaded;
  }
  __device__ __forceinline__ void read(const Loaded& loaded, Elements& sum) const {
    const uint32_t own[4] = {loaded.own.x, loaded.own.y, loaded.own.z, loaded.own.w};
#pragma unroll
    for (int i = 0; i < kDownElements; ++i) sum[i] = i % 2 == 0 ? low_of(own[i / 2]) : high_of(own[i / 2]);
  }
  // The gradient of a node whose parent's is there; zero: it has none.
  __device__ __forceinline__ void visit(int x, const Loaded& loaded, const Elements& parent, Elements& sum) const {
    const uint32_t node[4] = {loaded.node.x, loaded.node.y, loaded.node.z, loaded.node.w};
    float flow = 0;
    read(loaded, sum);
#pragma unroll
    for (int i = 0; i < kDownElements; ++i) {
      const float more = loaded.up * parent[i];
      flow = fmaf(i % 2 == 0 ? low_of(node[i / 2]) : high_of(node[i / 2]), more, flow);
      sum[i] += more;
    }
    *at(in.grads_memory, x) = make_uint4(pack<Half::kBf16>(sum[0], sum[1]), pack<Half::kBf16>(sum[2], sum[3]),
                                         pack<Half::kBf16>(sum[4], sum[5]), pack<Half::kBf16>(sum[6], sum[7]));
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
__global__ void __launch_bounds__(kDownThreads, 2)
    walk_down(const __grid_constant__ BackwardParameters in, int shift, int pieces, int64_t windows, int64_t tasks) {
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
    DownWalk::Loaded coming[kQuad];
#pragma unroll
    for (int j = 0; j < kQuad; ++j) coming[j] = walk.load((end - 1) / kQuad * kQuad + j);
    // Of the latest node above level 0, above level 1, above level 2 + i. None: zero.
    DownWalk::Elements near[2] = {}, above[kWindowLog - 2] = {};
#pragma unroll 1
    for (int first = (end - 1) / kQuad * kQuad; first + kQuad > begin; first -= kQuad) {
      const int level = 2 + trailing_ones_of_block(first / kQuad % (kWindow / kQuad));  // of the last of the four
#pragma unroll
      for (int j = kQuad - 1; j >= 0; --j) {
        const int x = first + j;
        const DownWalk::Loaded loaded = coming[j];
        coming[j] = walk.load(x - kQuad);
        if (!walk.has(x)) continue;
        DownWalk::Elements sum;
        if (j == 3) {
          if (level >= kWindowLog) {
            walk.read(loaded, sum);
          } else {
            DownWalk::Elements parent;
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

// The sums over the warp of kWalkSteps numbers a lane: lane 4 i has number i's.
__device__ __forceinline__ float sum_steps(float (&x)[kWalkSteps]) {
  static_assert(kWalkSteps == 8, "three halvings");
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 4; half >= 1; half /= 2) {
    const bool upper = (lane & (4 * half)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float keep = upper ? x[half + i] : x[i], give = upper ? x[i] : x[half + i];
      x[i] = keep + __shfl_xor_sync(kAllLanes, give, 4 * half);
    }
  }
  x[0] += __shfl_xor_sync(kAllLanes, x[0], 2);
  return x[0] + __shfl_xor_sync(kAllLanes, x[0], 1);
}

// Linear: from the newest state to the oldest. A round: each warp takes kWalkSteps blocks, the first warp the newest ones,
// and begins with what the warps before it leave. Flows go to row_others(), which nobody needs yet.
__global__ void __launch_bounds__(32 * kWalkWarps)
    walk_back(const __grid_constant__ BackwardParameters in, int64_t node_size, int64_t tasks) {
  __shared__ Elements sums[kWalkWarps][32];
  __shared__ float decays[kWalkWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    Walk walk;
    if (!walk.find(in, task, node_size)) continue;
    const int first = walk.first.first;
    Elements gradient = {};  // of the state after the round
    for (int end = walk.first.end - 1; end > first; end -= warps * kWalkSteps) {
      const int from = end - (warp + 1) * kWalkSteps;  // step i: block from + i
      uint4 own[kWalkSteps], node[kWalkSteps];
      float up[kWalkSteps];
#pragma unroll
      for (int i = 0; i < kWalkSteps; ++i) {
        const bool there = from + i >= first;
        const int64_t slot = there ? walk.slot(in, from + i) : 0;
        own[i] = there ? *walk.at(in.grads_memory, slot) : make_uint4(0, 0, 0, 0);
        node[i] = there ? *walk.at(in.nodes_memory, slot) : make_uint4(0, 0, 0, 0);
        up[i] = there ? in.up[slot] : 1.0f;
      }
      Elements sum = {};
      float product = 1;
#pragma unroll
      for (int i = kWalkSteps - 1; i >= 0; --i) {
        sum.step(up[i], own[i]);
        product *= up[i];
      }
      sums[warp][lane] = sum;
      if (lane == 0) decays[warp] = product;
      __syncthreads();
#pragma unroll 1
      for (int w = 0; w < warps; ++w) {
        if (w == warp) sum = gradient;
        gradient.pass(decays[w], sums[w][lane]);
      }
      float flow[kWalkSteps];
#pragma unroll
      for (int i = kWalkSteps - 1; i >= 0; --i) {
        flow[i] = up[i] * sum.dot(node[i]);
        sum.step(up[i], own[i]);
        if (from + i >= first) *walk.at(in.grads_memory, walk.slot(in, from + i)) = sum.packed();
      }
      const float of_step = sum_steps(flow);
      const int block = from + lane / 4;
      if (lane % 4 == 0 && block >= first) in.row_others(walk.slot(in, block))[walk.piece()] = of_step;
      __syncthreads();
    }
  }
}

constexpr int kFlowThreads = 256;

// Sums of the flows of a node's pieces. One thread: one block and head.
__global__ void __launch_bounds__(kFlowThreads)
    sum_flows(const __grid_constant__ BackwardParameters in, int pieces, int64_t count) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kFlowThreads + threadIdx.x;
  BlockOfRows block;
  if (n >= count || !find_block(in, n / in.head_count, &block) || !block.makes) return;
  const int64_t slot = in.slot(block.place, in.head_begin + static_cast<int>(n % in.head_count));
  float flow = 0;
  for (int i = 0; i < pieces; ++i) flow += in.row_others(slot)[i];
  in.through[slot] = flow;
}

}  // namespace

int32_t launch_node_gradients(const BackwardParameters& in, int key_dim, void* stream) {
  if (in.blocks < 2) return LLA_OK;
  const int64_t size = int64_t{key_dim} * kColumns, count = in.batch.count * in.blocks * in.head_count;
  const int pieces = static_cast<int>(size) / (in.linear ? kWarpElements : kDownPiece);
  const int64_t walks = in.batch.count * in.head_count * pieces;
  int32_t status = LLA_OK;
  if (in.linear) {
    status = launch(walk_back, walks, 32 * walk_warps(in), 0, stream, in, size, walks);
  } else {
    for (int shift = 2 * kWindowLog; shift >= 0 && status == LLA_OK; shift -= kWindowLog) {
      if ((in.batch.most_length - 1) >> kBlockLog < int64_t{1} << shift) continue;
      const int64_t windows = (in.blocks >> (shift + kWindowLog)) + 2, tasks = walks * windows;
      status = launch(walk_down, tasks, kDownThreads, 0, stream, in, shift, pieces, windows, tasks);
    }
  }
  if (status != LLA_OK) return status;
  return launch(sum_flows, (count + kFlowThreads - 1) / kFlowThreads, kFlowThreads, 0, stream, in, pieces, count);
}

int32_t load_node_gradients() {
  int32_t status = load_kernel(walk_down);
  if (status == LLA_OK) status = load_kernel(walk_back);
  return status == LLA_OK ? load_kernel(sum_flows) : status;
}

}  // namespace lla::cuda::hopper
