// SPDX-License-Identifier: Apache-2.0
// With what a step of bf16 or fp16 rows reads, a warp for each kind, and what its tail stores.
#pragma once

#include <cstddef>

#include "cuda/portable/scalar_gate_half_ring.h"

namespace lla::cuda::scalar_gate::half_step {

// Bits of 4 or of 2 bytes, or 0 where there is nothing: no branch, after which they would be waited for.
__device__ __forceinline__ float load_word(bool go, const char* from) {
#if defined(LLA_CUDA_EMULATED)
  return go ? *reinterpret_cast<const float*>(from) : 0;
#else
  unsigned bits;
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.u32 %0, [%1];\n}"
               : "=&r"(bits)
               : "l"(from), "r"(static_cast<int>(go)));
  return __uint_as_float(bits);
#endif
}
__device__ __forceinline__ float load_half(bool go, const char* from) {
#if defined(LLA_CUDA_EMULATED)
  return __uint_as_float(go ? *reinterpret_cast<const unsigned short*>(from) : 0);
#else
  unsigned bits;
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.u16 %0, [%1];\n}"
               : "=&r"(bits)
               : "l"(from), "r"(static_cast<int>(go)));
  return __uint_as_float(bits);
#endif
}
// An element of a factor of some row, of either size; a register for each, so that neither load waits for the other.
struct Factor {
  float &word, &half;

  __device__ __forceinline__ void load(bool go, const View& view, const char* first, int row, int i = 0) const {
    const bool is_word = view.dtype == LLA_F32;
    const char* from = first + (row * view.row_stride + i) * (is_word ? 4 : 2);
    word = load_word(go && is_word, from);
    half = load_half(go && !is_word, from);
  }
  __device__ __forceinline__ float value(const View& view) const {
    const unsigned bits = __float_as_uint(half);
    return view.dtype == LLA_F32 ? word : view.dtype == LLA_BF16 ? from_bf16(bits) : from_f16(bits);
  }
};

// What the rows read the nodes and each other with is made by a warp for each kind: all of them load first, and go on when
// the keys are multiplied. What they have loaded stands in the same registers.
constexpr int kLoaded = 9;

// What the nodes are read with. A lane has an entry of the past; the oldest one is the last lane's if no level needs that.
template <int kRows>
struct NodeWeights {
  float (&x)[kLoaded];

  __device__ __forceinline__ float& decay() const { return x[0]; }
  __device__ __forceinline__ Factor lambda(int r) const { return {x[1 + 2 * r], x[2 + 2 * r]}; }

  static __device__ __forceinline__ bool in_one(uint64_t live) { return (live << 1 >> 32) == 0; }
  static __device__ __forceinline__ int level(uint64_t live, int half) {
    const int lane = threadIdx.x % 32;
    return lane == 31 && in_one(live) ? kOldest : lane + 32 * half;
  }
  __device__ __forceinline__ void load(const Inputs& in, const Step& step, const Distances& at,
                                       const StepShared<kRows>& shared, int half) {
    const int entry = level(step.history.live, half);
    const bool is_live = step.history.has(entry);
    const int column = static_cast<int>(entry_column(in, entry));
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      lambda(r).load(is_live && in.shape.levels > 0 && r < step.sequence.rows, in.lambda, shared.row[kLambda], r, column);
    decay() = load_word(is_live, shared.node[is_live ? step.history.rank(entry) : 0] + at.node_decay);
  }
  __device__ __forceinline__ void list(const Inputs& in, const Step& step, const Distances& at, StepShared<kRows>& shared) {
    const int lane = threadIdx.x % 32;
    float carry = 0;
#pragma unroll 1
    for (int half = 0;; ++half) {
      const int entry = level(step.history.live, half), rank = step.history.rank(entry);
      float sum = decay();  // of this and the newer ones
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const float other = __shfl_up_sync(kAllLanes, sum, d);
        if (lane >= d) sum += other;
      }
      const float before = __shfl_up_sync(kAllLanes, sum, 1), newer = decay_of(lane == 0 ? carry : carry + before);
      carry += __shfl_sync(kAllLanes, sum, 31);
      if (step.history.has(entry)) {
        if (step.folds) shared.past[rank] = decay();
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          shared.weight[rank][r] = at.scale * (in.shape.levels > 0 ? lambda(r).value(in.lambda) : 1) * newer;
      }
      if (half == 1 || in_one(step.history.live)) break;
      load(in, step, at, shared, 1);
    }
  }
};

// What the chunk's rows are read with. Row i reads row s with a sum over what lies between them, which is of the same bits
// whether row i comes alone or with others.
template <int kRows>
struct RowFactors {
  float (&x)[kLoaded];

  __device__ __forceinline__ float& gate(int half) const { return x[half]; }
  __device__ __forceinline__ float& write(int half) const { return x[2 + half]; }
  __device__ __forceinline__ Factor new_gate() const { return {x[4], x[5]}; }
  __device__ __forceinline__ Factor new_write() const { return {x[6], x[7]}; }

  __device__ __forceinline__ void load(const Inputs& in, const Step& step, const Distances& at, const Rows& rows,
                                       const StepShared<kRows>& shared) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane + 32 * half;
      const bool is_there = r >= rows.begin && r < rows.lo;
      const char* from = rows.tail + (is_there ? at.gates_begin + step.head * at.gates + 4 * rows.ring(r) : 0);
      gate(half) = load_word(is_there, from);
      write(half) = load_word(is_there, from + (is_there ? at.writes_begin - at.gates_begin : 0));
    }
    const bool is_new = lane < rows.hi - rows.lo;
    new_gate().load(is_new && in.gate.present(), in.gate, shared.row[kGate], lane);
    new_write().load(is_new && in.write.present(), in.write, shared.row[kWrite], lane);
  }
  __device__ __forceinline__ void list(const Inputs& in, const Step& step, const Rows& rows, StepShared<kRows>& shared) {
    const int lane = threadIdx.x % 32;
    const float its_gate = in.gate.present() ? new_gate().value(in.gate) : 0;
    const float its_write = in.write.present() ? new_write().value(in.write) : 1;
    float gates[2], writes[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane + 32 * half;
      const float g = __shfl_sync(kAllLanes, its_gate, r - rows.lo), w = __shfl_sync(kAllLanes, its_write, r - rows.lo);
      const bool is_new = r >= rows.lo && r < rows.hi;
      gates[half] = is_new ? g : gate(half), writes[half] = is_new ? w : write(half);
    }
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      const int i = rows.lo + r;
      float low = lane <= i ? gates[0] : 0, high = lane + 32 <= i ? gates[1] : 0;  // sums of these and the later rows
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const float x = __shfl_down_sync(kAllLanes, low, d), z = __shfl_down_sync(kAllLanes, high, d);
        if (lane + d < 32) low += x, high += z;
      }
      const float first_high = __shfl_sync(kAllLanes, high, 0);
      low += first_high;
      const float after_low = __shfl_down_sync(kAllLanes, low, 1), after_high = __shfl_down_sync(kAllLanes, high, 1);
      shared.factor[lane][r] = writes[0] * decay_of(lane < 31 ? after_low : first_high);
      shared.factor[lane + 32][r] = writes[1] * decay_of(lane < 31 ? after_high : 0);
      if (lane == 0) shared.into[r] = decay_of(low);
    }
    if (!step.folds) return;
    const float total = list_content_factors(gates, writes, shared.content);
    if (lane == 0) shared.total = total;
  }
};

// λ of the levels inside the chunk, times the scale.
template <int kRows>
struct LocalLambda {
  float (&x)[kLoaded];

  __device__ __forceinline__ Factor lambda() const { return {x[0], x[1]}; }

  static __device__ __forceinline__ bool is_level(const Inputs& in, const Step& step) {
    const int lane = threadIdx.x % 32;
    return lane / kRows <= in.geometry.chunk.rows_log && lane % kRows < step.sequence.rows;
  }
  __device__ __forceinline__ void load(const Inputs& in, const Step& step, const StepShared<kRows>& shared) {
    const int level = threadIdx.x % 32 / kRows, r = threadIdx.x % 32 % kRows;
    // A row has no pairs of levels above its position's bit length.
    const bool go =
        is_level(in, step) && in.shape.levels > 0 && (level == 0 || (step.sequence.position + r) >> (level - 1) != 0);
    lambda().load(go, in.lambda, shared.row[kLambda], r, static_cast<int>(in.shape.column(level)));
  }
  __device__ __forceinline__ void list(const Inputs& in, const Step& step, const Distances& at,
                                       StepShared<kRows>& shared) const {
    if (is_level(in, step))
      shared.lambda[threadIdx.x % 32 / kRows][threadIdx.x % 32 % kRows] =
          at.scale * (in.shape.levels > 0 ? lambda().value(in.lambda) : 1);
  }
};

// What the tail stores of a step of one row: a lane has a piece of the values or of the keys or, the last two, a factor.
struct RowStore {
  float (&x)[kLoaded];  // the plan

  // By the group's first head.
  static __device__ __forceinline__ bool stores_keys(const Step& step) { return step.v0 == 0 && blockIdx.x == 0; }
  __device__ __forceinline__ void load(const Step& step) {
    static_assert(sizeof(RowsToStore) == 24 && offsetof(RowsToStore, first) == 8);
    const char* plan = reinterpret_cast<const char*>(step.sequence.tail_to_store);
#pragma unroll
    for (int i = 0; i < 6; ++i)
      x[i] = load_word(step.sequence.tail_to_store_count > 0, plan + (step.sequence.tail_to_store_count > 0 ? 4 * i : 0));
  }
  // False: there is more to be stored than this.
  __device__ __forceinline__ bool store(const Inputs& in, const Step& step, const Distances& at, const char* const* first,
                                        bool aligned) const {
    const Sequence& sequence = step.sequence;
    const int lane = threadIdx.x % 32, values = step.columns / 8, keys = static_cast<int>(in.shape.key_dim) / 8;
    if (sequence.tail_to_store_count == 0) return true;
    const auto word = [&](int i) { return static_cast<int64_t>(__float_as_uint(x[i])); };
    const int64_t row = word(2) | word(3) << 32, end = word(4) | word(5) << 32;
    if (sequence.tail_to_store_count > 1 || row != sequence.position || end != row + 1 || values + keys > 30) return false;
    char* const to = in.state.tails.block(static_cast<int32_t>(word(0)));
    const int ring = static_cast<int>(word(1));
    if (lane >= 30) {
      const char* from = first[lane == 31 ? kGate : kWrite];
      const float factor = from ? load_element(from, lane == 31 ? in.gate.dtype : in.write.dtype, 0) : lane == 31 ? 0 : 1;
      if (step.v0 == 0)
        *reinterpret_cast<float*>(to + (lane == 31 ? at.gates_begin : at.writes_begin) + step.head * at.gates + 4 * ring) =
            factor;
      return true;
    }
    const bool value = lane < values;
    if (!value && (lane >= values + keys || !stores_keys(step))) return true;
    const int64_t place = value ? at.values_begin + step.head * at.values : step.group * at.keys;
    const int width = static_cast<int>(value ? in.shape.value_dim : in.shape.key_dim),
              column = 8 * (value ? lane : lane - values);
    *reinterpret_cast<uint4*>(to + place + (ring * width + column + (value ? step.v0 : 0)) * 2) =
        load_piece(first[value ? kValue : kKey], column, aligned);
    return true;
  }
};

// By one warp: copies rows into the ring blocks of the tail, as store_rows() does.
__device__ __forceinline__ void store_half_rows(const Inputs& in, const Step& step, const Rows& rows, const Distances& at,
                                                const char* const* first, bool aligned) {
  const Sequence& sequence = step.sequence;
  const int lane = threadIdx.x % 32, head = step.head, group = step.group, dim = static_cast<int>(in.shape.key_dim);
  const int value_dim = static_cast<int>(in.shape.value_dim);
  const int values = step.columns / 8, parts = values + (RowStore::stores_keys(step) ? dim / 8 : 0);
  for (int64_t item = 0; item < sequence.tail_to_store_count; ++item) {
    const RowsToStore plan = sequence.tail_to_store[item];
    char* const to = in.state.tails.block(plan.block);
    int ring = plan.ring;
    for (int64_t p = plan.first; p < plan.last; ++p, ring = ring + 1 == rows.capacity ? 0 : ring + 1) {
      const int s = static_cast<int>(p - step.span.begin), row = s - rows.lo;
      const bool is_new = row >= 0;
      if (!is_new && (s < rows.begin || rows.ring(s) == ring) && (s < rows.begin || plan.block == sequence.history.tail))
        continue;
      const int from_ring = is_new ? 0 : rows.ring(s);
      for (int piece = lane; piece < parts; piece += 32) {
        const bool value = piece < values;
        const int column = 8 * (value ? piece : piece - values) + (value ? step.v0 : 0);
        const int64_t place = value ? at.values_begin + head * at.values : group * at.keys;
        const int width = value ? value_dim : dim;
        const View& tensor = value ? in.v : in.k;
        const uint4 x = is_new ? load_piece(first[value ? kValue : kKey] + row * tensor.row_stride * 2,
                                            column - (value ? step.v0 : 0), aligned)
                               : load_piece(rows.tail + place, from_ring * width + column, true);
        *reinterpret_cast<uint4*>(to + place + (ring * width + column) * 2) = x;
      }
      if (step.v0 != 0 || lane < 30) continue;
      const bool is_gate = lane == 31;
      const View& tensor = is_gate ? in.gate : in.write;
      const int64_t place = (is_gate ? at.gates_begin : at.writes_begin) + head * at.gates;
      float x = is_gate ? 0 : 1;
      if (!is_new)
        x = *reinterpret_cast<const float*>(rows.tail + place + 4 * from_ring);
      else if (tensor.present())
        x = load_element(first[is_gate ? kGate : kWrite], tensor.dtype, row * tensor.row_stride);
      *reinterpret_cast<float*>(to + place + 4 * ring) = x;
    }
  }
}

}  // namespace lla::cuda::scalar_gate::half_step
