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

constexpr int kRangeThreads = 256, kRangeWarps = kRangeThreads / 32;

// Bits of the largest magnitude of this thread's eights of columns of a block's rows.
__device__ __forceinline__ uint32_t largest_bits(const View& view, const BlockOfRows& block, int64_t head, int columns) {
  constexpr int kAhead = 4;
  const int chunks = columns / 8, count = (block.hi - block.lo) * chunks;
  const char* from = static_cast<const char*>(view.at(0, block.row, head));
  uint32_t low = 0, high = 0;
#pragma unroll 1
  for (int begin = static_cast<int>(threadIdx.x); begin < count; begin += kAhead * kRangeThreads) {
    uint4 loaded[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = begin + j * kRangeThreads, r = i / chunks;
      loaded[j] =
          i < count ? *reinterpret_cast<const uint4*>(from + (block.lo + r) * (2 * view.row_stride) + 16 * (i - r * chunks))
                    : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const uint32_t words[4] = {loaded[j].x, loaded[j].y, loaded[j].z, loaded[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low = max(low, words[i] & 0x7fffu);
        high = max(high, words[i] & 0x7fff0000u);
      }
    }
  }
  return max(low, high >> 16);
}

// Of an fp16 number: of the power of two above it; infinities and NaN count as the largest number.
__device__ __forceinline__ int exponent_of(uint32_t bits) {
  const int exponent = exponent_above(from_f16(bits));
  return exponent > 16 ? 16 : exponent;
}

// One block of threads: a block of rows, and v and dy of a head, or q and k of a group.
__global__ void __launch_bounds__(kRangeThreads)
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
    const int columns = static_cast<int>(is_head ? in.shape.value_dim : in.shape.key_dim);
    uint32_t bits[2] = {largest_bits(is_head ? rows.v : rows.q, block, head, columns),
                        largest_bits(is_head ? rows.dy : rows.k, block, head, columns)};
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

// ---- sums of factors
// -------------------------------------------------------------------------------------------------------

// Of a block and head, of magnitudes. In the place of row_reads, which nobody has written yet.
struct FactorSums {
  float fold_sum, fold_most;                              // of write strengths, decayed to the block's end
  float write_most, inner_most;                           // of write strengths; of λ at levels within the block
  float read_sum[kMostEntries], read_most[kMostEntries];  // of what rows read the node of an entry with, but for its decay
};
static_assert(sizeof(FactorSums) <= kBlock * sizeof(float), "place is kept for them");

__device__ __forceinline__ FactorSums* sums_of(const BackwardParameters& in, int64_t slot) {
  return reinterpret_cast<FactorSums*>(in.row_reads + slot * kBlock);
}

__device__ __forceinline__ float4 magnitudes(const float* column, int lane) {
  const float4 x = reinterpret_cast<const float4*>(column)[lane];
  return make_float4(fabsf(x.x), fabsf(x.y), fabsf(x.z), fabsf(x.w));
}
__device__ __forceinline__ float4 product(const float4& a, const float4& b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float sum_of(const float4& x) { return warp_sum((x.x + x.y) + (x.z + x.w)); }
__device__ __forceinline__ float most_of(const float4& x) { return warp_max(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w))); }

constexpr int kSumWarps = 8;

// A warp: one block and head.
__global__ void __launch_bounds__(32 * kSumWarps)
    sum_factors(const __grid_constant__ BackwardParameters in, int64_t count, int64_t tasks) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t n = task * kSumWarps + threadIdx.x / 32;
    BlockOfRows block;
    if (n >= count || !find_block(in, n / in.head_count, &block)) continue;
    const int64_t slot = in.slot(block.place, in.head_begin + static_cast<int>(n % in.head_count));
    const BlockFactors& factors = *in.factors(slot);
    FactorSums* to = sums_of(in, slot);
    const float4 write = magnitudes(factors.write, lane), start = magnitudes(factors.start, lane);
    const float4 fold = product(magnitudes(factors.fold, lane), write);
    const float fold_sum = sum_of(fold), fold_most = most_of(fold), write_most = most_of(write);
    float inner_most = 1;
    if (!in.linear) {
      float4 inner = magnitudes(factors.lambda(0), lane);
#pragma unroll
      for (int level = 1; level <= kInnerLevels; ++level) {
        const float4 x = magnitudes(factors.lambda(level), lane);
        inner = make_float4(fmaxf(inner.x, x.x), fmaxf(inner.y, x.y), fmaxf(inner.z, x.z), fmaxf(inner.w, x.w));
      }
      inner_most = most_of(inner);
    }
    if (lane == 0) {
      to->fold_sum = fold_sum;
      to->fold_most = fold_most;
      to->write_most = write_most;
      to->inner_most = inner_most;
    }
    const int entries = __popcll(block.reads(in.linear));
#pragma unroll 1
    for (int entry = 0; entry < entries; ++entry) {
      float4 read = start;
      if (!in.linear) read = product(read, magnitudes(factors.lambda(kInnerLevels + 1 + entry), lane));
      const float sum = sum_of(read), most = most_of(read);
      if (lane == 0) {
        to->read_sum[entry] = sum;
        to->read_most[entry] = most;
      }
    }
  }
}

// ---- units
// -----------------------------------------------------------------------------------------------------------------

constexpr int kUnitThreads = 256, kUnitWarps = kUnitThreads / 32;
constexpr int kFewReaders = 4;  // of a node, which one thread adds up

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
  float* bounds;     // [block - first block]

  __device__ __forceinline__ int64_t slot(int block) const { return in.slot(first.place_of(block), number); }
  __device__ __forceinline__ float& bound(int block) const { return bounds[block - first.first]; }
  __device__ __forceinline__ BlockRange values(int block) const { return in.head_ranges[slot(block)]; }  // v, dy
  __device__ __forceinline__ BlockRange keys(int block) const {                                          // q, k
    return in.group_ranges[in.group_place(first.place_of(block), in.group_of(number))];
  }
  __device__ __forceinline__ FactorSums& sums(int block) const { return *sums_of(in, slot(block)); }
  __device__ __forceinline__ BlockUnits& units(int block) const { return in.units[slot(block)]; }
  // The block whose node takes in that of another one.
  __device__ __forceinline__ int parent(int block) const {
    return in.linear ? block + 1 : block + (1 << trailing_ones_of_block(block));
  }
  template <class Work>
  __device__ __forceinline__ void each_block(Work work) const {
    for (int block = first.first + static_cast<int>(threadIdx.x); block < first.end; block += kUnitThreads) work(block);
  }

  // ---- bounds of nodes
  // -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ float own_bound(int block) const {
    return sums(block).fold_sum * power_of_two(keys(block).second + values(block).first);
  }
  __device__ __forceinline__ void bound_nodes() const {
    each_block([&](int block) { bound(block) = own_bound(block); });
    __syncthreads();
    if (in.linear) return scan(false);
    // Of the last 2^d blocks up to one, if it is the last of 2^d.
    for (int d = 0; (2 << d) <= first.end; ++d) {
      const int step = 2 << d;
      for (int block = (first.first & -step) + step - 1 + static_cast<int>(threadIdx.x) * step; block < first.end;
           block += kUnitThreads * step) {
        const int child = block - (1 << d);
        if (child >= first.first) bound(block) = fmaf(in.up[slot(child)], bound(child), bound(block));
      }
      __syncthreads();
    }
  }

  // Linear: bounds become sums of those before, or behind, decayed. A thread has neighbouring blocks.
  __device__ __forceinline__ void scan(bool backwards) const {
    __shared__ float decays[kUnitThreads], sums[kUnitThreads];
    const int count = first.end - first.first, share = (count + kUnitThreads - 1) / kUnitThreads;
    const int thread = static_cast<int>(threadIdx.x), begin = min(thread * share, count), end = min(begin + share, count);
    const auto block_of = [&](int i) { return backwards ? first.end - 1 - i : first.first + i; };
    // Decay from the block before, on the way, to this one.
    const auto decay_to = [&](int i) { return i == 0 ? 0.0f : in.up[slot(backwards ? block_of(i) : block_of(i) - 1)]; };
    float decay = 1, sum = 0;
    for (int i = begin; i < end; ++i) {
      const float step = decay_to(i);
      decay *= step;
      sum = fmaf(sum, step, bound(block_of(i)));
    }
    decays[thread] = decay;
    sums[thread] = sum;
    __syncthreads();
    if (thread == 0) {
      float before = 0;
      for (int t = 0; t < kUnitThreads; ++t) {
        const float own = sums[t], next = fmaf(before, decays[t], own);
        sums[t] = before;
        before = next;
      }
    }
    __syncthreads();
    sum = sums[thread];
    for (int i = begin; i < end; ++i) {
      sum = fmaf(sum, decay_to(i), bound(block_of(i)));
      bound(block_of(i)) = sum;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void put_nodes() const {
    each_block([&](int block) {
      BlockUnits units;
      const int node = unit_for(bound(block), 0), fold = unit_for(sums(block).fold_most, keys(block).second);
      units.node = static_cast<signed char>(node);
      // A state's sums leave fp32's range if the block's own rows weigh nothing beside it.
      units.fold = static_cast<signed char>(in.linear ? max(fold, node - 8) : fold);
      this->units(block) = units;
    });
    __syncthreads();
    each_block([&](int block) {
      const int next = parent(block);
      in.joins[slot(block)] = next < first.end ? in.up[slot(block)] * unit_ratio(units(block).node, units(next).node) : 0.0f;
    });
  }

  // ---- bounds of gradients
  // -------------------------------------------------------------------------------------------------

  struct Readers {
    float sum = 0, most = 0;

    __device__ __forceinline__ void take(const UnitWalk& walk, int reader, int entry) {
      const int dy = walk.values(reader).second, q = walk.keys(reader).first;
      const FactorSums& sums = walk.sums(reader);
      const float decay = walk.in.factors(walk.slot(reader))->newer[entry];
      sum = fmaf(decay * sums.read_sum[entry], power_of_two(q + dy), sum);
      most = fmaxf(most, decay * sums.read_most[entry] * power_of_two(dy));
    }
  };
  __device__ __forceinline__ int readers_end(int node) const {
    const int to = in.linear ? node + 2 : node + 1 + (1 << trailing_ones_of_block(node));
    return min(to, first.end);
  }
  __device__ __forceinline__ Readers read_by(int node, int from, int step) const {
    const int level = in.linear ? 0 : trailing_ones_of_block(node);
    Readers readers;
    for (int reader = node + 1 + from; reader < readers_end(node); reader += step)
      readers.take(*this, reader, in.linear ? 0 : __popcll(static_cast<uint32_t>(reader) & ((uint32_t{1} << level) - 1)));
    return readers;
  }
  __device__ __forceinline__ void put_readers(int node, const Readers& readers) const {
    bound(node) = readers.sum;
    units(node).reader = static_cast<signed char>(unit_for(readers.most, 0));
  }
  __device__ __forceinline__ void bound_gradients() const {
    each_block([&](int block) {
      if (in.linear || 1 << trailing_ones_of_block(block) <= kFewReaders) put_readers(block, read_by(block, 0, 1));
    });
    // Those that end with multiples of 2 kFewReaders blocks have more: a warp each.
    constexpr int kStep = 2 * kFewReaders;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    for (int node = (first.first & -kStep) + kStep - 1 + warp * kStep; node < first.end && !in.linear;
         node += kUnitWarps * kStep) {
      Readers readers = read_by(node, lane, 32);
      readers.sum = warp_sum(readers.sum);
      readers.most = warp_max(readers.most);
      if (lane == 0) put_readers(node, readers);
    }
    __syncthreads();
    if (in.linear) scan(true);
  }

  // The bound of a node's gradient: log-linear, with what comes by the nodes that take it in.
  __device__ __forceinline__ float with_parents(int node) const {
    float sum = bound(node), decay = 1;
    for (int block = node; !in.linear && parent(block) < first.end; block = parent(block)) {
      decay *= in.up[slot(block)];
      sum = fmaf(decay, bound(parent(block)), sum);
    }
    return sum;
  }
  __device__ __forceinline__ void put_gradients() const {
    const float scale = fabsf(static_cast<float>(in.shape.scale));
    each_block([&](int block) {
      BlockUnits& units = this->units(block);
      const BlockRange of_values = values(block), of_keys = keys(block);
      const FactorSums& sums = this->sums(block);
      const int grad = unit_for(with_parents(block), 0);
      if (in.linear) units.reader = static_cast<signed char>(max(static_cast<int>(units.reader), grad - 8));
      units.grad = static_cast<signed char>(grad);
      // Products with 64 values, or 128 keys, each.
      const int inner = unit_for(scale * sums.inner_most * sums.write_most, of_values.first + of_values.second + 6);
      const int folded = unit_for(sums.fold_most, of_values.first + grad);
      units.scores = static_cast<signed char>(max(inner, folded));
      units.weights = static_cast<signed char>(unit_for(scale * sums.inner_most, of_keys.first + of_keys.second + 7));
    });
    __syncthreads();
    each_block([&](int block) {
      const int next = parent(block);
      in.downs[slot(block)] = next < first.end ? in.up[slot(block)] * unit_ratio(units(next).grad, units(block).grad) : 0.0f;
      // Rows read nodes in their units.
      int entry = 0;
      BlockOfRows reader = first;
      reader.block = block;
      for (uint32_t left = reader.reads(in.linear); left; left &= left - 1, ++entry)
        in.factors(slot(block))->newer[entry] *= power_of_two(units(reader.node_end(__ffsll(left) - 1, in.linear)).node);
    });
  }
};

// One block of threads: a sequence and head.
__global__ void __launch_bounds__(kUnitThreads) choose_units(const __grid_constant__ BackwardParameters in, int64_t tasks) {
  float* bounds = reinterpret_cast<float*>(shared_memory());
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    BlockOfRows first;
    if (!find_block(in, task / in.head_count, 0, &first)) continue;
    const UnitWalk walk{in, first, in.head_begin + static_cast<int>(task % in.head_count), bounds};
    walk.bound_nodes();
    walk.put_nodes();
    __syncthreads();
    walk.bound_gradients();
    walk.put_gradients();
    __syncthreads();
  }
}

}  // namespace

int32_t launch_backward_units(const BackwardParameters& in, const RangeViews& rows, void* stream) {
  const int64_t blocks = in.batch.count * in.blocks, ranges = blocks * (in.head_count + in.group_count());
  int32_t status = launch(find_ranges, ranges, kRangeThreads, 0, stream, in, rows, ranges);
  if (status != LLA_OK) return status;
  const int64_t count = blocks * in.head_count, sums = (count + kSumWarps - 1) / kSumWarps;
  status = launch(sum_factors, sums, 32 * kSumWarps, 0, stream, in, count, sums);
  if (status != LLA_OK) return status;
  const int64_t walks = in.batch.count * in.head_count;
  return launch(choose_units, walks, kUnitThreads, static_cast<size_t>(in.blocks) * sizeof(float), stream, in, walks);
}

int32_t load_backward_units() {
  int32_t status = load_kernel(find_ranges);
  if (status == LLA_OK) status = load_kernel(sum_factors);
  return status == LLA_OK ? load_kernel(choose_units) : status;
}

}  // namespace lla::cuda::hopper
