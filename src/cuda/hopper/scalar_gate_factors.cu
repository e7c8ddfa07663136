// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: the factors of the rows of each block and head, and decays between nodes.
#include "cuda/common/element.h"
#include "cuda/common/reduce.h"
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_tables.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kHeads = 8;  // of a task, one for each warp: rows of neighbouring heads share sectors of memory
constexpr int kThreads = 32 * kHeads;
// Gate, write strength and λ of a head's rows in shared memory, by columns: element r of a column at staged_row(r), so that
// neither the rows of one column nor the columns of one row meet in a bank.
constexpr int kPitch = kBlock + 1;
constexpr int kGate = 0, kWrite = 1, kLambda = 2;
__device__ __forceinline__ int staged_row(int r) { return r % 4 * 32 + r / 4; }

// A tensor of factors whose elements are read as they are, then converted: many loads are under way at once.
struct Elements {
  bool wide, bf16;

  __device__ __forceinline__ explicit Elements(const View& view)
      : wide(view.dtype == LLA_F32), bf16(view.dtype == LLA_BF16) {}
  __device__ __forceinline__ int bytes() const { return wide ? 4 : 2; }
  __device__ __forceinline__ uint32_t load(const char* at) const {
    return wide ? *reinterpret_cast<const uint32_t*>(at) : *reinterpret_cast<const unsigned short*>(at);
  }
  __device__ __forceinline__ float read(uint32_t loaded) const {
    return wide ? __uint_as_float(loaded) : bf16 ? from_bf16(loaded) : from_f16(loaded);
  }
};

// Rows first + step i of a column that starts at local row 0, to shared memory; zeros for rows that are not the call's.
template <int kCount>
__device__ __forceinline__ void stage_column(const View& view, const char* from, const BlockOfRows& block, int first,
                                             int step, float* to) {
  const Elements elements(view);
  const int64_t row_bytes = view.row_stride * elements.bytes();
  uint32_t loaded[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int r = first + step * i;
    loaded[i] = r >= block.lo && r < block.hi ? elements.load(from + r * row_bytes) : 0;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[staged_row(first + step * i)] = elements.read(loaded[i]);
}

// Columns of λ that the block's rows read at most.
__device__ __forceinline__ int columns_of(const BackwardParameters& in, const BlockOfRows& block) {
  if (in.linear) return 0;
  const uint32_t reads = block.reads(false);
  const int levels = kInnerLevels + 1 + (reads == 0 ? 0 : 32 - __clz(static_cast<int>(reads)));
  return levels < in.shape.levels ? levels : static_cast<int>(in.shape.levels);
}

__device__ __forceinline__ void stage(const BackwardParameters& in, const BlockOfRows& block, int first_head, int heads,
                                      int columns, float* staged) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int size = (kLambda + columns) * kPitch;  // of a head
  const int head = thread % kHeads;
  if (head < heads) {
    const int h = in.head_of(first_head + head);
    const auto stage_factor = [&](const View& view, int column) {
      if (view.present())
        stage_column<kBlock * kHeads / kThreads>(view, static_cast<const char*>(view.at(block.index, block.row, h)), block,
                                                 thread / kHeads, kThreads / kHeads, staged + head * size + column * kPitch);
    };
    stage_factor(in.gate, kGate);
    stage_factor(in.write, kWrite);
  }
  const int bytes = Elements(in.lambda).bytes();
#pragma unroll 1
  for (int j = lane; j < heads * columns; j += 32) {
    const int of = j / columns, column = j - of * columns;
    const char* from =
        static_cast<const char*>(in.lambda.at(block.index, block.row, in.head_of(first_head + of))) + column * bytes;
    float* to = staged + of * size + (kLambda + column) * kPitch;
    constexpr int kCount = 8;
#pragma unroll 1
    for (int first = warp; first < kBlock; first += kCount * kHeads)
      stage_column<kCount>(in.lambda, from, block, first, kHeads, to);
  }
}

// Four rows of a lane.
using Rows = float[4];

__device__ __forceinline__ void put_rows(float* column, const Rows& x) {
  reinterpret_cast<float4*>(column)[threadIdx.x % 32] = make_float4(x[0], x[1], x[2], x[3]);
}

// Of magnitudes of all rows of the block, by a warp.
struct Magnitudes {
  float sum = 0, most = 0;

  __device__ __forceinline__ void take(float x) {
    sum += fabsf(x);
    most = fmaxf(most, fabsf(x));
  }
  __device__ __forceinline__ void put(float* to_sum, float* to_most) const {
    const float of_all = warp_sum(sum), largest = warp_max(most);
    if (threadIdx.x % 32 != 0) return;
    if (to_sum) *to_sum = of_all;
    *to_most = largest;
  }
};

// By a warp, from the head's staged columns; a lane has rows 4 lane ... 4 lane + 3. kSums: FactorSums too.
template <bool kSums>
__device__ __forceinline__ void make_factors(const BackwardParameters& in, const BlockOfRows& block, int64_t slot,
                                             const float* staged) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float scale = static_cast<float>(in.shape.scale);
  BlockFactors& factors = *in.factors(slot);
  Rows prefix, suffix, write, values;
  bool live[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    live[i] = 4 * lane + i >= block.lo && 4 * lane + i < block.hi;
    prefix[i] = in.gate.present() ? staged[kGate * kPitch + 32 * i + lane] : 0.0f;
    suffix[i] = 0;
    write[i] = !live[i] ? 0.0f : in.write.present() ? staged[kWrite * kPitch + 32 * i + lane] : 1.0f;
  }
  // λ of a level of the live rows.
  const auto weight = [&](int level, int i) {
    return !live[i] ? 0.0f : in.linear ? 1.0f : staged[(kLambda + in.shape.column(level)) * kPitch + 32 * i + lane];
  };
  const auto each = [&](auto of) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = of(i);
  };
  FactorSums* sums = in.factor_sums(slot);
  Magnitudes writes, inner, folded;
  const auto take = [&](Magnitudes& to) {
#pragma unroll
    for (int i = 0; kSums && i < 4; ++i) to.take(values[i]);
  };
  if (!in.linear) {
    each([&](int i) { return weight(0, i); });
    put_rows(factors.lambda(0), values);
    take(inner);
  }
  put_rows(factors.write, write);
  // Sums over the row's aligned block of 2^d rows: up to and with the row, and after it. No sum is a difference of two.
#pragma unroll
  for (int d = 0; d < kInnerLevels; ++d) {
    each([&](int i) {
      const bool upper = is_upper(d, 4 * lane + i);
      const float decay = live[i] ? quick_decay(upper ? prefix[i] : suffix[i]) : 0.0f;
      return upper ? scale * decay : decay;
    });
    put_rows(factors.level[d], values);
    if (!in.linear) {
      each([&](int i) { return is_upper(d, 4 * lane + i) ? weight(d + 1, i) : 0.0f; });
      put_rows(factors.lambda(d + 1), values);
      take(inner);
    }
    if (d == 0) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        suffix[i] += prefix[i + 1];
        prefix[i + 1] += prefix[i];
      }
    } else if (d == 1) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        suffix[i] += prefix[3];
      }
      prefix[2] += prefix[1];
      prefix[3] += prefix[1];
    } else {
      const int size = 1 << (d - 2), start = lane / size * size;
      const float left = __shfl_sync(kAllLanes, prefix[3], (start - 1) & 31);
      const float right = __shfl_sync(kAllLanes, prefix[3], (start + 2 * size - 1) & 31);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (lane & size)
          prefix[i] += left;
        else
          suffix[i] += right;
      }
    }
  }
  each([&](int i) { return live[i] ? scale * quick_decay(prefix[i]) : 0.0f; });
  put_rows(factors.start, values);
  Rows start;
  if constexpr (kSums) {
#pragma unroll
    for (int i = 0; i < 4; ++i) start[i] = values[i];
  }
  each([&](int i) { return live[i] ? quick_decay(suffix[i]) : 0.0f; });
  put_rows(factors.fold, values);
  if (lane == 31) in.totals[slot] = prefix[3];
  if constexpr (kSums) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      writes.take(write[i]);
      folded.take(write[i] * values[i]);
    }
    folded.put(&sums->fold_sum, &sums->fold_most);
    writes.put(nullptr, &sums->write_most);
    if (in.linear) {
      Magnitudes reads;
#pragma unroll
      for (int i = 0; i < 4; ++i) reads.take(start[i]);
      reads.put(&sums->read_sum[0], &sums->read_most[0]);
      inner.most = 1;
    }
    inner.put(nullptr, &sums->inner_most);
  }
  if (in.linear) return;
  int entry = kInnerLevels + 1;
#pragma unroll 1
  for (uint32_t left = block.reads(false); left; left &= left - 1, ++entry) {
    const int level = __ffsll(left) + kInnerLevels;
    each([&](int i) { return weight(level, i); });
    put_rows(factors.lambda(entry), values);
    if constexpr (kSums) {
      Magnitudes reads;
#pragma unroll
      for (int i = 0; i < 4; ++i) reads.take(start[i] * values[i]);
      reads.put(&sums->read_sum[entry - kInnerLevels - 1], &sums->read_most[entry - kInnerLevels - 1]);
    }
  }
}

// One block of threads: one block of rows, kHeads heads of the slice.
template <bool kSums>
__global__ void __launch_bounds__(kThreads, 3)
    make_factors_of_rows(const __grid_constant__ BackwardParameters in, int64_t chunks, int64_t tasks) {
  float* staged = reinterpret_cast<float*>(shared_memory());
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    BlockOfRows block;
    if (!find_block(in, task / chunks, &block)) continue;
    const int first = static_cast<int>(task % chunks) * kHeads;
    const int heads = min(kHeads, in.head_count - first), columns = columns_of(in, block);
    stage(in, block, in.head_begin + first, heads, columns, staged);
    __syncthreads();
    const int head = static_cast<int>(threadIdx.x) / 32;
    if (head < heads)
      make_factors<kSums>(in, block, in.slot(block.place, in.head_begin + first + head),
                          staged + head * (kLambda + columns) * kPitch);
    __syncthreads();
  }
}

constexpr int kTreeThreads = 256, kTreeBlocks = 256;  // blocks of rows that a block of threads writes for

// `newer` and `up`, from sums of the blocks' totals over nodes. One block of threads: kTreeBlocks blocks of one sequence and
// head of the slice; each makes all sums anew, they are few.
__global__ void __launch_bounds__(kTreeThreads)
    make_decays_of_nodes(const __grid_constant__ BackwardParameters in, int64_t segments, int64_t tasks) {
  float* spans = reinterpret_cast<float*>(shared_memory());
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    BlockOfRows block;
    if (!find_block(in, task / in.head_count / segments * in.blocks, &block)) continue;
    const int head = in.head_begin + static_cast<int>(task % in.head_count), first = block.first, end = block.end;
    const int begin = first + static_cast<int>(task / in.head_count % segments) * kTreeBlocks;
    if (begin >= end) continue;
    const int64_t places = block.place;
    const auto slot_of = [&](int e) { return in.slot(places + e - first, head); };
    const auto set_up = [&](int e, float up) {
      if (e >= begin && e < begin + kTreeBlocks) in.up[slot_of(e)] = up;
    };
    for (int e = first + static_cast<int>(threadIdx.x); e < end; e += kTreeThreads) {
      spans[e - first] = in.totals[slot_of(e)];
      if ((in.linear ? e + 1 : e + (1 << trailing_ones_of_block(e))) >= end) set_up(e, 0);  // nothing takes it in
    }
    __syncthreads();
    if (in.linear) {
      for (int e = first + static_cast<int>(threadIdx.x); e + 1 < end; e += kTreeThreads)
        set_up(e, quick_decay(spans[e + 1 - first]));
    } else {
      // spans[e - first]: of the last 2^d blocks up to e, if e is the last of 2^d.
      for (int d = 0; (2 << d) <= end; ++d) {
        const int step = 2 << d;
        for (int e = (first & -step) + step - 1 + static_cast<int>(threadIdx.x) * step; e < end; e += kTreeThreads * step) {
          const int child = e - (1 << d);
          if (child < first) continue;
          const float own = spans[e - first];
          set_up(child, quick_decay(own));
          spans[e - first] = spans[child - first] + own;
        }
        __syncthreads();
      }
    }
    // A thread has four entries of a block.
    constexpr int kShares = kMostEntries / 4;
    for (int i = static_cast<int>(threadIdx.x); i < kTreeBlocks * kShares; i += kTreeThreads) {
      block.block = begin + i / kShares;
      const int share = i % kShares;
      if (block.block >= end) break;
      float newer[4] = {0, 0, 0, 0}, sum = 0;
      int entry = -4 * share;
      for (uint32_t left = block.reads(in.linear); left; left &= left - 1, ++entry) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (entry == j) newer[j] = quick_decay(sum);
        }
        if (!in.linear) sum += spans[block.node_end(__ffsll(left) - 1, false) - first];
      }
      reinterpret_cast<float4*>(in.factors(slot_of(block.block))->newer)[share] =
          make_float4(newer[0], newer[1], newer[2], newer[3]);
    }
    __syncthreads();
  }
}

}  // namespace

int32_t launch_factors(const BackwardParameters& in, void* stream) {
  int64_t columns = kInnerLevels + 1;
  for (int64_t n = (in.batch.most_length - 1) >> kBlockLog; n > 0; n >>= 1) ++columns;
  if (columns > in.shape.levels) columns = in.shape.levels;
  const int64_t chunks = (in.head_count + kHeads - 1) / kHeads, sequences = in.batch.count;
  const size_t staged = static_cast<size_t>(kHeads * (kLambda + columns) * kPitch) * sizeof(float);
  const int64_t segments = (in.blocks + kTreeBlocks - 1) / kTreeBlocks;
  const int64_t tasks = sequences * in.blocks * chunks, trees = sequences * segments * in.head_count;
  const int32_t status = launch(in.f16 ? make_factors_of_rows<true> : make_factors_of_rows<false>, tasks, kThreads, staged,
                                stream, in, chunks, tasks);
  if (status != LLA_OK) return status;
  return launch(make_decays_of_nodes, trees, kTreeThreads, static_cast<size_t>(in.blocks) * sizeof(float), stream, in,
                segments, trees);
}

int32_t load_factors() {
  int32_t status = load_kernel(make_factors_of_rows<false>);
  if (status == LLA_OK) status = load_kernel(make_factors_of_rows<true>);
  return status == LLA_OK ? load_kernel(make_decays_of_nodes) : status;
}

}  // namespace lla::cuda::hopper
