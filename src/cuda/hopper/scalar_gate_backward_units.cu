// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper in fp16: units of nodes, of their gradients and of operands. Three launches: the largest
// elements of the rows of each block; sums and maxima of its factors; and from these, along a sequence, bounds of everything
// that is rounded.
#include "cuda/common/element.h"
#include "cuda/common/reduce.h"
#include "cuda/hopper/scalar_gate_backward.h"

namespace lla::cuda::hopper {

namespace {

// ---- largest elements
// ------------------------------------------------------------------------------------------------------

constexpr int kMostKeyColumns = 128;
constexpr int kRangeThreads = 256, kRangeWarps = kRangeThreads / 32;

// A thread's eights of columns of a block's rows: one of kChunks of a row, of rows that are a step apart.
template <int kChunks>
struct RangeRows {
  static constexpr int kStep = kRangeThreads / kChunks, kCount = kBlock / kStep;
  uint4 loaded[kCount];

  __device__ __forceinline__ void load(const View& view, const BlockOfRows& block, int64_t head, int columns) {
    const int chunk = static_cast<int>(threadIdx.x) % kChunks, first = static_cast<int>(threadIdx.x) / kChunks;
    const char* from = static_cast<const char*>(view.at(0, block.row + first, head)) + 16 * chunk;
    const int64_t step = 2 * kStep * view.row_stride;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = first + kStep * i;
      loaded[i] = r >= block.lo && r < block.hi && 8 * chunk < columns ? *reinterpret_cast<const uint4*>(from + i * step)
                                                                       : make_uint4(0, 0, 0, 0);
    }
  }
  // Bits of the largest magnitude.
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t low = 0, high = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const uint32_t words[4] = {loaded[j].x, loaded[j].y, loaded[j].z, loaded[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low = max(low, words[i] & 0x7fffu);
        high = max(high, words[i] & 0x7fff0000u);
      }
    }
    return max(low, high >> 16);
  }
};

// Of an fp16 number: of the power of two above it; infinities and NaN count as the largest number.
__device__ __forceinline__ int exponent_of(uint32_t bits) {
  const int exponent = exponent_above(from_f16(bits));
  return exponent > 16 ? 16 : exponent;
}

// One block of threads: a block of rows, and v and dy of a head, or q and k of a group.
__global__ void __launch_bounds__(kRangeThreads, 4)
    find_ranges(const __grid_constant__ BackwardParameters in, const __grid_constant__ RangeViews rows, int64_t tasks) {
  __shared__ uint32_t largest[kRangeWarps][2];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int each = in.head_count + in.group_count();
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    BlockOfRows block;
    if (!find_block(in, task / each, &block)) continue;
    const int i = static_cast<int>(task % each);
    const bool is_head = i < in.head_count;
    const int head = is_head ? in.head_of(in.head_begin + i) : in.first_group() + i - in.head_count;
    uint32_t bits[2];
    if (is_head) {
      const int columns = static_cast<int>(in.shape.value_dim);
      RangeRows<kColumns / 8> v, dy;  // all on their way at once
      v.load(rows.v, block, head, columns);
      dy.load(rows.dy, block, head, columns);
      bits[0] = v.largest();
      bits[1] = dy.largest();
    } else {
      const int columns = static_cast<int>(in.shape.key_dim);
      RangeRows<kMostKeyColumns / 8> some;
      some.load(rows.q, block, head, columns);
      bits[0] = some.largest();
      some.load(rows.k, block, head, columns);
      bits[1] = some.largest();
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      bits[0] = max(bits[0], __shfl_xor_sync(kAllLanes, bits[0], d));
      bits[1] = max(bits[1], __shfl_xor_sync(kAllLanes, bits[1], d));
    }
    if (lane == 0) {
      largest[warp][0] = bits[0];
      largest[warp][1] = bits[1];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < kRangeWarps; ++w) {
        bits[0] = max(bits[0], largest[w][0]);
        bits[1] = max(bits[1], largest[w][1]);
      }
      BlockRange& to = is_head ? in.head_ranges[in.slot(block.place, in.head_begin + i)]
                               : in.group_ranges[in.group_place(block.place, head)];
      to.first = static_cast<signed char>(exponent_of(bits[0]));
      to.second = static_cast<signed char>(exponent_of(bits[1]));
    }
    __syncthreads();
  }
}

// ---- units
// -----------------------------------------------------------------------------------------------------------------

// The unit in which what is bounded by bound 2^exponent is below 2^kTop.
__device__ __forceinline__ int unit_for(float bound, int exponent) {
  const int above = static_cast<int>(__float_as_uint(bound) >> 23) - 126 + exponent - kTop;  // zero: the least
  return above < kLeastUnit ? kLeastUnit : above > kMostUnit ? kMostUnit : above;
}

// A sequence and head.
struct UnitWalk {
  const BackwardParameters& in;
  const BlockOfRows& first;
  const int number;  // of the head

  __device__ __forceinline__ int64_t slot(int block) const { return in.slot(first.place_of(block), number); }
  __device__ __forceinline__ BlockRange values(int block) const { return in.head_ranges[slot(block)]; }  // v, dy
  __device__ __forceinline__ BlockRange keys(int block) const {                                          // q, k
    return in.group_ranges[in.group_place(first.place_of(block), in.group_of(number))];
  }
  __device__ __forceinline__ FactorSums& sums(int block) const { return *in.factor_sums(slot(block)); }
  __device__ __forceinline__ BlockUnits& units(int block) const { return in.units[slot(block)]; }
  // The block whose node takes in that of another one.
  __device__ __forceinline__ int parent(int block) const { return block + (1 << trailing_ones_of_block(block)); }
};

// What rows read a node with: the bound of what they give to its gradient, and the largest weight of one's dy.
struct Readers {
  float sum = 0, most = 0;

  __device__ __forceinline__ void take(const UnitWalk& walk, int reader, int entry) {
    const int dy = walk.values(reader).second, q = walk.keys(reader).first;
    const FactorSums& sums = walk.sums(reader);
    const float decay = walk.in.factors(walk.slot(reader))->newer[entry];
    sum = fmaf(decay * sums.read_sum[entry], power_of_two(q + dy), sum);
    most = fmaxf(most, decay * sums.read_most[entry] * power_of_two(dy));
  }
  __device__ __forceinline__ void put(const UnitWalk& walk, int node) const {
    walk.sums(node).grad_bound = sum;
    walk.units(node).reader = static_cast<signed char>(unit_for(most, 0));
  }
};

constexpr int kMostWalkThreads = 1024;

// Along a sequence.
struct BoundWalk : UnitWalk {
  float *bounds, *decays, *carries;  // [block - first block]; linear only; [/ 32]

  __device__ __forceinline__ float& bound(int block) const { return bounds[block - first.first]; }
  template <class Work>
  __device__ __forceinline__ void each_block(Work work) const {
    for (int block = first.first + static_cast<int>(threadIdx.x); block < first.end; block += static_cast<int>(blockDim.x))
      work(block);
    __syncthreads();
  }

  // Sums over the last 2^d blocks up to one, if it is the last of 2^d.
  __device__ __forceinline__ void sum_tree() const {
    for (int d = 0; (2 << d) <= first.end; ++d) {
      const int step = 2 << d;
      for (int block = (first.first & -step) + step - 1 + static_cast<int>(threadIdx.x) * step; block < first.end;
           block += static_cast<int>(blockDim.x) * step) {
        const int child = block - (1 << d);
        if (child >= first.first) bound(block) = fmaf(in.up[slot(child)], bound(child), bound(block));
      }
      __syncthreads();
    }
  }

  // Linear: bounds become sums with those before, or behind, decayed. In steps that depend on the sequence alone: first of
  // 32 blocks, then over these.
  __device__ __forceinline__ void scan(bool backwards) const {
    const int count = first.end - first.first, chunks = (count + 31) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const auto at = [&](int i) { return backwards ? count - 1 - i : i; };
    for (int chunk = static_cast<int>(threadIdx.x) / 32; chunk < chunks; chunk += static_cast<int>(blockDim.x) / 32) {
      const int i = 32 * chunk + lane;
      float decay = 0, sum = 0;
      if (i < count) {
        if (i > 0) decay = in.up[slot(first.first + (backwards ? at(i) : i - 1))];
        sum = bounds[at(i)];
      }
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const float other_decay = __shfl_up_sync(kAllLanes, decay, d), other = __shfl_up_sync(kAllLanes, sum, d);
        if (lane >= d) {
          sum = fmaf(decay, other, sum);
          decay *= other_decay;
        }
      }
      if (i < count) {
        bounds[at(i)] = sum;
        decays[i] = decay;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      float carry = 0;
      for (int chunk = 0; chunk < chunks; ++chunk) {
        carries[chunk] = carry;
        const int last = min(32 * chunk + 31, count - 1);
        carry = fmaf(decays[last], carry, bounds[at(last)]);
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
      bounds[at(i)] = fmaf(decays[i], carries[i / 32], bounds[at(i)]);
    __syncthreads();
  }

  __device__ __forceinline__ void run() const {
    each_block(
        [&](int block) { bound(block) = sums(block).fold_sum * power_of_two(keys(block).second + values(block).first); });
    if (in.linear)
      scan(false);
    else
      sum_tree();
    each_block([&](int block) {
      BlockUnits units;
      const int node = unit_for(bound(block), 0), fold = unit_for(sums(block).fold_most, keys(block).second);
      units.node = static_cast<signed char>(node);
      // A state's sums would leave fp32's range in the unit of rows that weigh nothing beside it.
      units.fold = static_cast<signed char>(in.linear ? max(fold, node - 8) : fold);
      this->units(block) = units;
    });
    if (!in.linear) return;
    each_block([&](int block) {
      Readers readers;
      if (block + 1 < first.end) readers.take(*this, block + 1, 0);
      readers.put(*this, block);
      bound(block) = readers.sum;
    });
    scan(true);
    each_block([&](int block) { sums(block).grad_bound = bound(block); });
  }
};

// Units of nodes; linear: bounds of their gradients. One block of threads: a sequence and head.
__global__ void __launch_bounds__(kMostWalkThreads)
    bound_nodes(const __grid_constant__ BackwardParameters in, int64_t tasks) {
  float* bounds = reinterpret_cast<float*>(shared_memory());
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    BlockOfRows first;
    if (!find_block(in, task / in.head_count, 0, &first)) continue;
    const int number = in.head_begin + static_cast<int>(task % in.head_count);
    BoundWalk{{in, first, number}, bounds, bounds + in.blocks, bounds + 2 * in.blocks}.run();
  }
}

// Log-linear: bounds of what readers give to gradients of nodes. One block of threads: kReaderWindow blocks of a sequence
// and head, from a multiple on. Nodes that more than kFewReaders blocks read have a warp.
constexpr int kFewReaders = 4, kReaderWarps = 8, kReaderWindow = kReaderWarps * 2 * kFewReaders;

__global__ void __launch_bounds__(32 * kReaderWarps)
    bound_readers(const __grid_constant__ BackwardParameters in, int windows, int64_t tasks) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t n = task / in.head_count;
    BlockOfRows first;
    if (!find_block(in, n / windows, 0, &first)) continue;
    const UnitWalk walk{in, first, in.head_begin + static_cast<int>(task % in.head_count)};
    const int window = (first.first / kReaderWindow + static_cast<int>(n % windows)) * kReaderWindow;
    const auto read = [&](int node, int from, int step) {
      const int level = trailing_ones_of_block(node), end = min(node + 1 + (1 << level), first.end);
      Readers readers;
#pragma unroll 4
      for (int reader = node + 1 + from; reader < end; reader += step)
        readers.take(walk, reader, __popcll(static_cast<uint32_t>(reader) & ((uint32_t{1} << level) - 1)));
      return readers;
    };
    const int own = window + thread, shared = window + (warp + 1) * 2 * kFewReaders - 1;
    if (thread < kReaderWindow && own >= first.first && own < first.end && 1 << trailing_ones_of_block(own) <= kFewReaders)
      read(own, 0, 1).put(walk, own);
    if (shared < first.first || shared >= first.end) continue;
    Readers readers = read(shared, lane, 32);
    readers.sum = warp_sum(readers.sum);
    readers.most = warp_max(readers.most);
    if (lane == 0) readers.put(walk, shared);
  }
}

// The bounds of the gradients of a block's node, with what comes by the nodes that take it in, and of the first of these.
__device__ __forceinline__ void bound_gradients(const UnitWalk& walk, int block, float (&bounds)[2]) {
  constexpr int kMost = kMostEntries + 1;
  float own[kMost], up[kMost];  // all on their way at once
  int ancestor = block;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const bool exists = ancestor < walk.first.end;
    own[i] = exists ? walk.sums(ancestor).grad_bound : 0.0f;
    up[i] = exists ? walk.in.up[walk.slot(ancestor)] : 0.0f;
    if (exists) ancestor = walk.parent(ancestor);
  }
  bounds[0] = bounds[1] = 0;
#pragma unroll
  for (int i = kMost - 1; i >= 0; --i) {
    bounds[1] = bounds[0];
    bounds[0] = fmaf(up[i], bounds[0], own[i]);
  }
}

constexpr int kUnitThreads = 128;

// Everything else. One thread: a block and head.
__global__ void __launch_bounds__(kUnitThreads) choose_units(const __grid_constant__ BackwardParameters in, int64_t count) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kUnitThreads + threadIdx.x;
  BlockOfRows own;
  if (n >= count || !find_block(in, n / in.head_count, &own)) return;
  const UnitWalk walk{in, own, in.head_begin + static_cast<int>(n % in.head_count)};
  const int block = own.block;
  const int64_t slot = walk.slot(block);
  BlockUnits& units = walk.units(block);  // others read what it says of the node
  const BlockRange values = walk.values(block), keys = walk.keys(block);
  const FactorSums& sums = walk.sums(block);
  const float scale = fabsf(static_cast<float>(in.shape.scale));
  float bounds[2] = {sums.grad_bound, 0};
  if (!in.linear) bound_gradients(walk, block, bounds);
  const int grad = unit_for(bounds[0], 0);
  units.grad = static_cast<signed char>(grad);
  if (in.linear) {
    units.reader = static_cast<signed char>(max(static_cast<int>(units.reader), grad - 8));  // as `fold`
  } else {
    const int parent = walk.parent(block);
    const float up = parent < own.end ? in.up[slot] : 0.0f;
    in.joins[slot] = parent < own.end ? up * unit_ratio(units.node, walk.units(parent).node) : 0.0f;
    in.downs[slot] = up * unit_ratio(unit_for(bounds[1], 0), grad);
  }
  // Products with 64 values, or 128 keys, each.
  const int inner = unit_for(scale * sums.inner_most * sums.write_most, values.first + values.second + 6);
  const int folded = unit_for(sums.fold_most, values.first + grad);
  units.scores = static_cast<signed char>(max(inner, folded));
  units.weights = static_cast<signed char>(unit_for(scale * sums.inner_most, keys.first + keys.second + 7));
  // Rows read nodes in their units.
  float* newer = in.factors(slot)->newer;
  int entry = 0;
  for (uint32_t left = own.reads(in.linear); left; left &= left - 1, ++entry)
    newer[entry] *= power_of_two(walk.units(own.node_end(__ffsll(left) - 1, in.linear)).node);
}

}  // namespace

int32_t launch_backward_units(const BackwardParameters& in, const RangeViews& rows, void* stream) {
  const int64_t blocks = in.batch.count * in.blocks, ranges = blocks * (in.head_count + in.group_count());
  int32_t status = launch(find_ranges, ranges, kRangeThreads, 0, stream, in, rows, ranges);
  const int64_t walks = in.batch.count * in.head_count, longest = (in.blocks + 31) / 32;
  const int threads = static_cast<int>(longest < kMostWalkThreads / 32 ? 32 * longest : kMostWalkThreads);  // no bit knows
  const auto bounds = static_cast<size_t>(in.linear ? 2 * in.blocks + longest : in.blocks) * sizeof(float);
  if (status == LLA_OK) status = launch(bound_nodes, walks, threads, bounds, stream, in, walks);
  if (status == LLA_OK && !in.linear) {
    const int windows = static_cast<int>((in.blocks + 2 * kReaderWindow - 2) / kReaderWindow);
    status = launch(bound_readers, walks * windows, 32 * kReaderWarps, 0, stream, in, windows, walks * windows);
  }
  const int64_t count = blocks * in.head_count;
  if (status == LLA_OK)
    status = launch(choose_units, (count + kUnitThreads - 1) / kUnitThreads, kUnitThreads, 0, stream, in, count);
  return status;
}

int32_t load_backward_units() {
  int32_t status = load_kernel(find_ranges);
  if (status == LLA_OK) status = load_kernel(bound_nodes);
  if (status == LLA_OK) status = load_kernel(bound_readers);
  return status == LLA_OK ? load_kernel(choose_units) : status;
}

}  // namespace lla::cuda::hopper
