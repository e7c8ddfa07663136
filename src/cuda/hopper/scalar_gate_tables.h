// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: the factors of a block's rows, by two warps, each for 64 rows, two of them a lane's.
#pragma once

#include "cuda/common/element.h"
#include "cuda/common/reduce.h"
#include "cuda/common/tail_rows.h"
#include "cuda/hopper/scalar_gate_sweep.h"

namespace lla::cuda::hopper {

// exp(x) for x <= 0, -inf included, with a relative error of about |x| 2^-24: the products that follow have operands of two
// bytes.
__device__ __forceinline__ float quick_decay(float x) {
#if defined(LLA_CUDA_EMULATED)
  return decay_of(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
#endif
}

__device__ __forceinline__ void bring_near(const void* data) {
#if defined(LLA_CUDA_EMULATED)
  (void)data;
#else
  asm volatile("prefetch.global.L2 [%0];" ::"l"(data));
#endif
}

// One head's column of a tensor of factors, seen from a lane's first row of a block. Elements are loaded as they are, so
// that nothing waits for them, and read later. kWide: all tensors of factors are fp32 and λ has a
// column for each level inside a block, so that no branches are needed.
template <bool kWide>
struct FactorColumn {
  const View& view;  // a parameter of the kernel: what follows from it need not be kept
  const char* data = nullptr;

  explicit __device__ __forceinline__ FactorColumn(const View& tensor) : view(tensor) {}
  __device__ __forceinline__ FactorColumn(const View& tensor, const Task& task, int64_t row) : view(tensor) {
    move_to(task.index, row, task.head);
  }
  __device__ __forceinline__ void move_to(int64_t sequence, int64_t row, int64_t head) {
    if (present()) data = static_cast<const char*>(view.at(sequence, row, head));
  }
  __device__ __forceinline__ bool present() const { return view.present(); }
  __device__ __forceinline__ bool wide() const { return kWide || view.dtype == LLA_F32; }
  __device__ __forceinline__ int element_bytes() const { return wide() ? 4 : 2; }
  __device__ __forceinline__ int row_bytes() const { return static_cast<int>(view.row_stride) * element_bytes(); }
  __device__ __forceinline__ void next_block() {
    if (present()) data += kBlock * row_bytes();
  }
  __device__ __forceinline__ const char* row(int offset) const { return data + offset * row_bytes(); }
  __device__ __forceinline__ uint32_t load(const char* at) const {
    return wide() ? *reinterpret_cast<const uint32_t*>(at) : *reinterpret_cast<const unsigned short*>(at);
  }
  __device__ __forceinline__ float read(uint32_t loaded) const {
    return wide() ? __uint_as_float(loaded) : view.dtype == LLA_BF16 ? from_bf16(loaded) : from_f16(loaded);
  }
};

// Four bytes to shared memory: there after finish_copies().
__device__ __forceinline__ void copy_float(float* to, const char* from) {
#if defined(LLA_CUDA_EMULATED)
  *to = *reinterpret_cast<const float*>(from);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
#endif
}
__device__ __forceinline__ void finish_copies() {
#if !defined(LLA_CUDA_EMULATED)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

template <bool kWide>
struct Factors {
  const MixerShape& shape;
  FactorColumn<kWide> gate, write, lambda;

  __device__ __forceinline__ Factors(const SweepParameters& in, const Task& task, int64_t row)
      : shape(in.shape), gate(in.gate, task, row), write(in.write, task, row), lambda(in.lambda, task, row) {}
  __device__ __forceinline__ float scale() const { return static_cast<float>(shape.scale); }
  __device__ __forceinline__ int lambda_bytes() const { return static_cast<int>(shape.levels) * lambda.element_bytes(); }
  // λ's last column, where higher levels read it; else above all.
  __device__ __forceinline__ int last_column() const { return shape.absorb ? static_cast<int>(shape.levels) - 1 : 1 << 20; }
  __device__ __forceinline__ int column(int level) const {
    return (kWide && level <= kInnerLevels) || level < last_column() ? level : last_column();
  }
  __device__ __forceinline__ void next_block() {
    gate.next_block();
    write.next_block();
    lambda.next_block();
  }
};

// What a lane loads of a block: its rows 64 half + lane and 32 more, and the gates of the other half. What is not there is
// zero.
struct RowFactors {
  uint32_t gate[2], other[2], write[2];
  uint32_t other_write[2];               // fp16
  uint32_t lambda[2][kInnerLevels + 1];  // of the levels inside the block that the row reads
  bool live[2];
};

// Of the rows `ahead` of those that `factors` stands at.
template <bool kWeights, bool kUnits, bool kWide>
__device__ __forceinline__ void load_rows(const Factors<kWide>& factors, const LiveRows& rows, int half, int ahead,
                                          RowFactors* to) {
  const int first = kHalf * half + static_cast<int>(threadIdx.x) % 32, over = kHalf - 2 * kHalf * half;
  const bool gates = factors.gate.present(), writes = factors.write.present();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = first + 32 * i, other = r + over, row = ahead + 32 * i;
    to->live[i] = r >= rows.lo && r < rows.hi;
    to->gate[i] = to->other[i] = to->write[i] = to->other_write[i] = 0;
    if (gates && to->live[i]) to->gate[i] = factors.gate.load(factors.gate.row(row));
    if (gates && other >= rows.lo && other < rows.hi) to->other[i] = factors.gate.load(factors.gate.row(row + over));
    if (writes && to->live[i]) to->write[i] = factors.write.load(factors.write.row(row));
    if constexpr (kUnits) {
      if (writes && other >= rows.lo && other < rows.hi)
        to->other_write[i] = factors.write.load(factors.write.row(row + over));
    }
    if constexpr (kWeights) {
      const char* from = factors.lambda.row(row);
#pragma unroll
      for (int l = 0; l <= kInnerLevels; ++l) {
        // Columns that the row does not read may not be there.
        const bool reads = to->live[i] && (kWide || ((2 * r + 1) >> l & 1) != 0);
        to->lambda[i][l] = 0;
        if (reads) to->lambda[i][l] = factors.lambda.load(from + factors.column(l) * factors.lambda.element_bytes());
      }
      if (to->live[i]) {  // what rows read of nodes, for later
        bring_near(from + factors.lambda_bytes() / 2);
        bring_near(from + factors.lambda_bytes() - 1);
      }
    }
  }
}

// Has what load_rows() will load brought from memory into the cache, for rows that come after the next.
template <bool kWeights, bool kWide>
__device__ __forceinline__ void bring_rows(const Factors<kWide>& factors, const LiveRows& rows, int half, int ahead) {
  const int first = kHalf * half + static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (first + 32 * i < rows.lo || first + 32 * i >= rows.hi) continue;
    const int row = ahead + 32 * i;
    if (factors.gate.present()) bring_near(factors.gate.row(row));
    if (factors.write.present()) bring_near(factors.write.row(row));
    if constexpr (kWeights) bring_near(factors.lambda.row(row));
  }
}

// The nodes of a history: lane e knows number e.
struct OldNodes {
  int count = 0;
  int first = -1;   // its first block; -1: the absorbing node
  float newer = 0;  // log decay from its end to that of the newest
  float unit = 1;   // fp16: of the copy that is read

  OldNodes() = default;
  __device__ __forceinline__ OldNodes(const SweepParameters& in, const Task& task) : count(task.old_count()) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float decay = 0;
    if (lane < count) {
      int level;
      const int in_state = task.old_level(lane, in.grain_shift, &level);
      if (level < kMostLevels) first = task.base / kHalf >> (level + 1) << (level + 1) >> 1;
      decay =
          load_element(in.state.node_decay(in.batch.sequences[task.sequence].history.node[in_state], task.head), LLA_F32, 0);
    }
    if (in.old_largest && lane < count)
      unit = power_of_two(exponent_above(in.old_largest[in.old_place(task.old_number, lane, task.head, task.tile)]));
    float sum = 0;
#pragma unroll 1
    for (int e = 0; e < count; ++e) {
      if (lane == e) newer = sum;
      sum += __shfl_sync(kAllLanes, decay, e);
    }
  }
  // At which level rows of a block read number e. The node of a block's first half, in this block: at that of halves.
  __device__ __forceinline__ int level_of(int block, int e) const {
    const int begin = __shfl_sync(kAllLanes, first, e);
    return begin < 0 ? 1 << 20 : kInnerLevels + 32 - __clz(block ^ begin);
  }
};

// λ of a lane's two rows with which they read the nodes in `reads` and of the history, as it is, behind the tables.
template <bool kWide>
__device__ __forceinline__ void copy_weights(const Factors<kWide>& factors, const RowFactors& row, int first, uint32_t reads,
                                             int block, const OldNodes& old, Tables* tables) {
  const char* from[2] = {factors.lambda.row(0), factors.lambda.row(32)};
  float* entry = reinterpret_cast<float*>(tables + 1) + first;
  const auto copy = [&](int level) {
    const int offset = factors.column(level) * factors.lambda.element_bytes();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!row.live[i]) continue;
      if (factors.lambda.wide())
        copy_float(entry + 32 * i, from[i] + offset);
      else
        entry[32 * i] = factors.lambda.read(factors.lambda.load(from[i] + offset));
    }
    entry += kBlock;
  };
#pragma unroll 1
  for (; reads; reads &= reads - 1) copy(__ffsll(reads) + kInnerLevels);
#pragma unroll 1
  for (int e = 0; e < old.count; ++e) copy(old.level_of(block, e));
}

// Sums of the decays of newer nodes go on one by one from this level: the nodes of a segment know the sum of those below
// alone, and a join of segments adds the others with the bits of a sweep over the whole sequence.
constexpr int kSerialLevel = 3;
static_assert(kSerialLevel <= kShortSegmentLog, "a segment knows all nodes below that level");

// What a table warp knows of the nodes: lane b holds the log decay of level b.
struct NodeDecays {
  float decay = 0;
  uint32_t present = 0;
  float last[2] = {0, 0};  // log decays over the last block and of the nodes that it merged
  // fp16. Lane b: weight of the node of level b, whose unit follows from it; linear, all lanes: of the state.
  float weight = 0;
  float latest = 0;  // of the node, or state, that the last block has made
  int fold = 0;      // linear: exponent of the unit in which the state's sums are

  // After a block that makes a node, of this level. `merge`: a lane's decay of its node to the block's end; `of_block`:
  // weight of the block's own rows.
  template <bool kLinear, bool kUnits>
  __device__ __forceinline__ void take(int lane, int level, float block_total, float newer, float merge, float of_block) {
    if constexpr (kLinear) {
      decay += block_total;
      if constexpr (kUnits) weight = latest = fmaf(merge, weight, of_block);
    } else {
      const float of_merged = __shfl_sync(kAllLanes, newer, level & 31), merged = block_total + of_merged;
      last[0] = block_total, last[1] = of_merged;
      if constexpr (kUnits) {
        latest = of_block;
#pragma unroll 1
        for (uint32_t left = present & ((uint32_t{1} << level) - 1); left; left &= left - 1) {
          const int child = __ffsll(left) - 1;
          latest = fmaf(__shfl_sync(kAllLanes, merge, child), __shfl_sync(kAllLanes, weight, child), latest);
        }
        if (lane == level) weight = latest;
      }
      if (lane == level) decay = merged;
      present = (present >> level << level) | uint32_t{1} << level;
    }
  }
};

// Of a lane's node: the sum of the decays of all newer ones. `of_call`: of all of them.
__device__ __forceinline__ float decays_of_newer(const NodeDecays& nodes, int lane, float* of_call) {
  const float own = (nodes.present >> lane) & 1 ? nodes.decay : 0.0f;
  float sum = own;
#pragma unroll
  for (int d = 1; d < kSerialLevel; d *= 2) {
    const float below = __shfl_up_sync(kAllLanes, sum, d);
    if (lane >= d) sum += below;
  }
  float newer = __shfl_up_sync(kAllLanes, sum, 1);
  if (lane == 0) newer = 0;
  float below = __shfl_sync(kAllLanes, sum, kSerialLevel - 1);
  if (lane > kSerialLevel) newer = below;
#pragma unroll 1
  for (int level = kSerialLevel; nodes.present >> level != 0; ++level) {
    below += __shfl_sync(kAllLanes, own, level);
    if (lane > level) newer = below;
  }
  *of_call = below;
  return newer;
}

// The sum over the rows of a warp's lanes with the bits of sums over aligned blocks of 2, 4, ... of them.
__device__ __forceinline__ float sum_of_rows(float x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

// fp16: the units of a block. Write strengths and scale are replaced by what they are in these. `most`: the largest write
// strength of raw rows of the other half.
template <bool kLinear, bool kWide>
__device__ __forceinline__ void choose_units(const Factors<kWide>& factors, const RowFactors& row, int first, float most,
                                             float (&write)[2], float (&scale)[2], int* fold, int (&exponent)[2]) {
  const bool writes = factors.write.present();
  if (!writes) most = fmaxf(most, 1.0f);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    most = fmaxf(most, fabsf(write[i]));
    if (writes) most = fmaxf(most, fabsf(factors.write.read(row.other_write[i])));
  }
  *fold = exponent_above(warp_max(most));
  // Of a row, that of its largest λ inside the block, and four more: scores that large have room.
  constexpr int kRoom = 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float of_row = kLinear ? 1.0f : 0.0f;
    if constexpr (!kLinear) {
#pragma unroll
      for (int l = 0; l <= kInnerLevels; ++l) {
        const bool reads = ((2 * (first + 32 * i) + 1) >> l & 1) != 0;
        if (reads) of_row = fmaxf(of_row, fabsf(factors.lambda.read(row.lambda[i][l])));
      }
    }
    const int of_weights = exponent_above(of_row * fabsf(scale[i])) + kRoom;
    scale[i] *= power_of_two(-of_weights);
    write[i] *= power_of_two(-*fold);
    exponent[i] = of_weights + *fold;
  }
}

// Whether a row stands in the upper half of its aligned block of 2^(d + 1) rows.
__device__ __forceinline__ bool is_upper(int d, int row) { return ((row >> d) & 1) != 0; }

// A block's raw rows of the history's tail, as seen from a lane's row r: gates and write strengths of r, then of the row
// with the same place in the other half. They wait in columns of the block's tables that nobody but the lane fills, from the
// task's beginning on: there are tables for two blocks, and a history has raw rows in no more (kMostTail).
constexpr int kRawGate = 0, kRawWrite = 2;
__device__ __forceinline__ bool is_raw(const LiveRows& rows, int r) { return r >= rows.from && r < rows.lo; }

__device__ __forceinline__ void stage_raw_rows(const SweepParameters& in, const Task& task, const LiveRows& rows, int block,
                                               int half, Tables* tables) {
  const TailRows tail{in.state, in.batch.sequences[task.sequence].history};
  const int first = kHalf * half + static_cast<int>(threadIdx.x) % 32, distance = (block << kBlockLog) - task.base;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int r = first + 32 * (i % 2), from = i < 2 ? r : r ^ kHalf;
    if (!is_raw(rows, from)) continue;
    tables->level[kRawGate + i / 2][r] = tail.gate(task.head, distance + from);
    tables->level[kRawWrite + i / 2][r] = tail.write(task.head, distance + from);
  }
}
// Gives the largest write strength of the other half's.
__device__ __forceinline__ float read_raw_rows(const LiveRows& rows, int first, const Tables& tables, float (&gate)[2],
                                               float (&other)[2], float (&write)[2]) {
  float most = 0;
  if (rows.from == rows.lo) return most;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = first + 32 * i;
    if (is_raw(rows, r)) gate[i] = tables.level[kRawGate][r], write[i] = tables.level[kRawWrite][r];
    if (is_raw(rows, r ^ kHalf)) {
      other[i] = tables.level[kRawGate + 1][r];
      most = fmaxf(most, fabsf(tables.level[kRawWrite + 1][r]));
    }
  }
  return most;
}

// Fills the tables of one block; `half` is the warp's.
template <bool kLinear, bool kUnits, bool kWide>
__device__ __forceinline__ void fill_tables(const Factors<kWide>& factors, const RowFactors& row, const LiveRows& rows,
                                            int block, int half, bool makes, const OldNodes& old, NodeDecays* nodes,
                                            Tables* tables, Units* units) {
  const int lane = static_cast<int>(threadIdx.x) % 32, first = kHalf * half + lane;
  float scale[2] = {factors.scale(), factors.scale()};
  if constexpr (!kLinear)
    copy_weights(factors, row, first, nodes->present & static_cast<uint32_t>(block), block, old, tables);
  float prefix[2], suffix[2] = {0, 0}, write[2], other[2];  // what was not loaded is zero
  const bool writes = factors.write.present();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    prefix[i] = factors.gate.read(row.gate[i]);
    other[i] = factors.gate.read(row.other[i]);
    write[i] = writes ? factors.write.read(row.write[i]) : row.live[i] ? 1.0f : 0.0f;
  }
  [[maybe_unused]] const float of_raw = read_raw_rows(rows, first, *tables, prefix, other, write);
  int fold = 0, exponent[2] = {0, 0};
  if constexpr (kUnits) {
    choose_units<kLinear>(factors, row, first, of_raw, write, scale, &fold, exponent);
#pragma unroll
    for (int i = 0; i < 2; ++i) units->row[first + 32 * i] = power_of_two(exponent[i]);
  }
  const float other_total = sum_of_rows(other[0]) + sum_of_rows(other[1]);
  const auto lambda = [&](int i, int level) {
    return kLinear ? (row.live[i] ? 1.0f : 0.0f) : factors.lambda.read(row.lambda[i][level]);
  };
#pragma unroll
  for (int i = 0; i < 2; ++i) tables->diagonal[first + 32 * i] = lambda(i, 0) * scale[i] * write[i];
    // Sums over the row's aligned block of 2^d rows: up to and with the row, and after it. No sum is a difference of two.
#pragma unroll
  for (int d = 0; d < kInnerLevels; ++d) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool upper = is_upper(d, first + 32 * i);
      const float weight = upper ? scale[i] * lambda(i, d + 1) : write[i];
      tables->level[d][first + 32 * i] = weight * quick_decay(upper ? prefix[i] : suffix[i]);
    }
    if (d < 5) {
      const int start = lane >> d << d, size = 1 << d;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float left = __shfl_sync(kAllLanes, prefix[i], (start - 1) & 31);
        const float right = __shfl_sync(kAllLanes, prefix[i], (start + 2 * size - 1) & 31);
        if (lane & size)
          prefix[i] += left;
        else
          suffix[i] += right;
      }
    } else if (d == 5) {
      const float left = __shfl_sync(kAllLanes, prefix[0], 31), right = __shfl_sync(kAllLanes, prefix[1], 31);
      prefix[1] += left;
      suffix[0] += right;
    }
  }
  const float total = __shfl_sync(kAllLanes, prefix[1], 31);
  const float block_total = half == 0 ? total + other_total : other_total + total;

  float newer = 0, of_call = 0;
  if constexpr (!kLinear) newer = decays_of_newer(*nodes, lane, &of_call);
  const float merge = quick_decay(block_total + newer);
  const float of_block = power_of_two(fold + kBlockLog);  // fp16: weight of the block's own rows, at most
  const int of_node = kUnits ? exponent_above(nodes->weight) : 0;
  if (half == 0) {
    tables->merge[lane] = kUnits ? merge * power_of_two((kLinear ? nodes->fold : of_node) - fold) : merge;
  }
  if constexpr (!kLinear) {
    const uint32_t reads = nodes->present & static_cast<uint32_t>(block);
    if (half == 0 && ((reads >> lane) & 1))
      tables->newer[__popcll(reads & ((uint32_t{1} << lane) - 1))] =
          kUnits ? quick_decay(newer) * power_of_two(of_node) : quick_decay(newer);
    if (half == 0 && lane < old.count) {
      const float decay = quick_decay(of_call + old.newer);
      tables->newer[__popcll(reads) + lane] = kUnits ? decay * old.unit : decay;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    tables->fold[first + 32 * i] = write[i] * quick_decay(half == 0 ? suffix[i] + other_total : suffix[i]);
    const float decay = quick_decay(half == 0 ? prefix[i] : other_total + prefix[i]);
    tables->start[first + 32 * i] =
        kUnits ? scale[i] * decay * power_of_two((kLinear ? of_node : 0) - fold) : scale[i] * decay;
  }
  if constexpr (!kLinear) finish_copies();
  if (!makes) return;
  if constexpr (kUnits) nodes->fold = fold;
  nodes->take<kLinear, kUnits>(lane, trailing_ones_of_block(block), block_total, newer, merge, of_block);
  if constexpr (kUnits) {
    if (half == 0 && lane == 0) units->node = power_of_two(fold - exponent_above(nodes->latest));
  }
}

// The loop of a table warp over all tasks.
template <bool kLinear, bool kUnits, bool kWide>
__device__ __forceinline__ void make_all_tables(const SweepParameters& in, char* shared, Barriers* barriers, int half) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Turn turn;
  for (int64_t number = blockIdx.x; number < in.tasks; number += gridDim.x) {
    const Task task = find_task(in, number);
    if (task.first >= task.end) continue;
    Factors<kWide> factors(in, task, LiveRows(task, task.first).row + kHalf * half + lane);
    NodeDecays nodes;
    OldNodes old;
    if constexpr (!kLinear) {
      if (task.old_count() > 0) old = OldNodes(in, task);
      const uint32_t upper = task.upper();
      const int u = lane - in.segment_log;
      if (u >= 0 && ((upper >> u) & 1))
        nodes.decay = in.upper_decay[in.place(task.places + task.upper_end(u), task.head, task.tile)];
      if constexpr (kUnits) {
        if (u >= 0 && ((upper >> u) & 1))
          nodes.weight = in.upper_weight[in.place(task.places + task.upper_end(u), task.head, task.tile)];
      }
      nodes.present = upper != 0 ? upper << in.segment_log : 0;
    }
    if constexpr (kUnits && kLinear) nodes.weight = weight_before(in, task);
    constexpr bool kWeights = !kLinear;
    if (number + gridDim.x < in.tasks) {  // the first rows of the task after this one would be waited for
      const Task after = find_task(in, number + gridDim.x);
      if (after.first < after.end) {
        const LiveRows rows(after, after.first);
        bring_rows<kWeights>(Factors<kWide>(in, after, rows.row + kHalf * half + lane), rows, half, 0);
      }
    }
    RowFactors row, next;
    Turn ahead = turn;
#pragma unroll 1
    for (int block = task.first; block < task.end; ++block) {
      const LiveRows rows(task, block);
      if (rows.from == rows.lo) break;
      wait(&barriers->tables_free[ahead.index], ahead.phase ^ 1);
      stage_raw_rows(in, task, rows, block, half, reinterpret_cast<Tables*>(shared + in.layout.tables(ahead.index)));
      ahead.next(2);
    }
    load_rows<kWeights, kUnits>(factors, LiveRows(task, task.first), half, 0, &row);
#pragma unroll 1
    for (int block = task.first; block < task.end; ++block) {
      const bool makes = LiveRows(task, block).hi == kBlock && block + 1 < task.end;
      if (block + 1 < task.end) load_rows<kWeights, kUnits>(factors, LiveRows(task, block + 1), half, kBlock, &next);
      wait(&barriers->tables_free[turn.index], turn.phase ^ 1);
      Tables* tables = reinterpret_cast<Tables*>(shared + in.layout.tables(turn.index));
      Units* units = reinterpret_cast<Units*>(shared + in.layout.units_of(turn.index));
      fill_tables<kLinear, kUnits>(factors, row, LiveRows(task, block), block, half, makes, old, &nodes, tables, units);
      factors.next_block();
      row = next;
      __syncwarp();
      if (lane == 0) arrive(&barriers->tables_full[turn.index]);
      turn.next(2);
    }
  }
}

template <bool kLinear, bool kUnits>
__device__ __forceinline__ void make_tables(const SweepParameters& in, char* shared, Barriers* barriers, int half) {
  const auto wide = [](const View& view) { return !view.present() || view.dtype == LLA_F32; };
  const bool whole = in.shape.levels > kInnerLevels + (in.shape.absorb ? 1 : 0);
  if (wide(in.gate) && wide(in.write) && (kLinear || (whole && wide(in.lambda))))
    make_all_tables<kLinear, kUnits, true>(in, shared, barriers, half);
  else
    make_all_tables<kLinear, kUnits, false>(in, shared, barriers, half);
}

}  // namespace lla::cuda::hopper
