// SPDX-License-Identifier: Apache-2.0
// How kernels cut a sequence into chunks, and where a chunk's rows and the nodes of its past lie.
//
// Kernels work on chunks of C = min(grain, 64) rows, numbered absolutely: chunk i holds positions i C ... (i + 1) C - 1. A
// call's first chunk is the first one of the grain in which its first position lies, so that raw rows of the tail belong to
// its chunks and older rows to nodes. Node levels here count chunks of C rows: the state's level b is level b + ratio_log.
#pragma once

#include "cuda/common/element.h"

namespace lla::cuda {

constexpr int kMostChunk = 64;  // rows

LLA_HOST_DEVICE inline int log2_of_power(int64_t power_of_two) {
  int log2 = 0;
  while ((int64_t{1} << log2) < power_of_two) ++log2;
  return log2;
}

// What follows from the grain alone.
struct ChunkShape {
  int rows = 0, rows_log = 0;    // C
  int ratio = 1, ratio_log = 0;  // grain / C

  ChunkShape() = default;
  LLA_HOST_DEVICE explicit ChunkShape(int64_t grain)
      : rows(grain < kMostChunk ? static_cast<int>(grain) : kMostChunk),
        rows_log(log2_of_power(rows)),
        ratio(static_cast<int>(grain / rows)),
        ratio_log(log2_of_power(ratio)) {}
  // Most chunks that one sequence of `most_rows` rows touches, raw rows of its tail included.
  LLA_HOST_DEVICE int64_t most_chunks(int64_t most_rows) const { return (most_rows + rows - 1) / rows + ratio; }
  // Slots for the nodes of full chunks that all sequences together need, and the first one of a sequence. A sequence that
  // begins at row r and has n rows fills at most floor(n / C) + ratio chunks, so the ranges of two sequences never meet.
  LLA_HOST_DEVICE int64_t slots(int64_t total_rows, int64_t sequences) const {
    return total_rows / rows + sequences * ratio;
  }
  LLA_HOST_DEVICE int64_t first_slot(const Sequence& sequence) const {
    return sequence.row_begin / rows + sequence.index * ratio;
  }
  // For rows of all chunks, incomplete ones included (one more chunk for each sequence).
  LLA_HOST_DEVICE int64_t places(int64_t total_rows, int64_t sequences) const {
    return total_rows / rows + sequences * (ratio + 1);
  }
  LLA_HOST_DEVICE int64_t first_place(const Sequence& sequence) const {
    return sequence.row_begin / rows + sequence.index * (ratio + 1);
  }
};

// The chunks of one sequence.
struct ChunkRange {
  int64_t first = 0;  // number of the first chunk; all its older nodes belong to the history
  int64_t count = 0;  // chunks with rows of the call or of the tail
  int64_t full = 0;   // of these, complete: they make nodes

  LLA_HOST_DEVICE ChunkRange(const Sequence& sequence, const ChunkShape& shape) {
    first = (sequence.position >> (shape.rows_log + shape.ratio_log)) << shape.ratio_log;
    const int64_t end = sequence.position + sequence.rows;
    count = ((end + shape.rows - 1) >> shape.rows_log) - first;
    full = (end >> shape.rows_log) - first;
  }
};

// One chunk. Local rows [0, lo) are history (raw rows of the tail), [lo, hi) belong to the call.
struct ChunkSpan {
  int64_t begin = 0;  // position of local row 0
  int lo = 0, hi = 0;

  LLA_HOST_DEVICE ChunkSpan(int64_t first, int low, int high) : begin(first), lo(low), hi(high) {}
  LLA_HOST_DEVICE ChunkSpan(const Sequence& sequence, const ChunkShape& shape, int64_t chunk)
      : begin(chunk << shape.rows_log) {
    const int64_t before = sequence.position - begin, end = sequence.position + sequence.rows - begin;
    lo = before <= 0 ? 0 : before < shape.rows ? static_cast<int>(before) : shape.rows;
    hi = end <= 0 ? 0 : end < shape.rows ? static_cast<int>(end) : shape.rows;
  }
  // Row of the tensors' row axis that local row r (>= lo) is.
  LLA_HOST_DEVICE int64_t row(const Sequence& sequence, int r) const {
    return sequence.row_begin + begin + r - sequence.position;
  }
};

// A run of elements of one type; null: they are zero.
struct Elements {
  const void* data = nullptr;
  int32_t dtype = LLA_F32;
};

// Where the rows of a chunk lie: in the call's tensors or in the tail.
struct ChunkSource {
  const Sequence& sequence;
  const SlotMemory& state;
  int64_t grain;
  ChunkSpan span;

  // Ring index of local row r < lo.
  __device__ __forceinline__ int64_t ring(int r) const {
    // Little code: it stands wherever rows are loaded. The grain is a power of two.
    const uint32_t place =
        static_cast<uint32_t>(sequence.history.tail_origin) + static_cast<uint32_t>((span.begin + r) & (grain - 1));
    return place % static_cast<uint32_t>(state.tail_layout.capacity);
  }
  // Whether local row r < lo is in the tail; older rows than the history's start are zero.
  __device__ __forceinline__ bool in_tail(int r) const {
    return sequence.history.tail >= 0 && span.begin + r >= sequence.history.start;
  }
  __device__ __forceinline__ Elements k(const View& tensor, int64_t group, int r) const {
    if (r >= span.hi) return {};
    if (r >= span.lo) return {tensor.at(sequence.index, span.row(sequence, r), group), tensor.dtype};
    if (!in_tail(r)) return {};
    return {state.tail_k(sequence.history.tail, group, ring(r)), state.tail_layout.dtype};
  }
  __device__ __forceinline__ Elements v(const View& tensor, int64_t head, int r) const {
    if (r >= span.hi) return {};
    if (r >= span.lo) return {tensor.at(sequence.index, span.row(sequence, r), head), tensor.dtype};
    if (!in_tail(r)) return {};
    return {state.tail_v(sequence.history.tail, head, ring(r)), state.tail_layout.dtype};
  }
  // Log gate; rows that are not there have 0.
  __device__ __forceinline__ float gate(const View& tensor, int64_t head, int r) const {
    if (r >= span.hi) return 0;
    if (r >= span.lo)
      return tensor.present() ? load_element(tensor.at(sequence.index, span.row(sequence, r), head), tensor.dtype, 0) : 0;
    if (!in_tail(r)) return 0;
    return load_element(state.tail_gate(sequence.history.tail, head, ring(r)), LLA_F32, 0);
  }
  // Write strength; rows that are not there have 0.
  __device__ __forceinline__ float write(const View& tensor, int64_t head, int r) const {
    if (r >= span.hi) return 0;
    if (r >= span.lo)
      return tensor.present() ? load_element(tensor.at(sequence.index, span.row(sequence, r), head), tensor.dtype, 0) : 1;
    if (!in_tail(r)) return 0;
    return load_element(state.tail_write(sequence.history.tail, head, ring(r)), LLA_F32, 0);
  }
};

// Fills tile[64][stride] with 64 rows of 64 columns from column `column` on, of `columns` in all; what is not there is zero.
// row(r) gives the elements of column 0. By a block of 128 threads, or, if wide, 128 columns by 256; no barrier. All
// addresses first, then all loads, then the stores: eight loads of a thread are on their way at once.
template <bool kWide = false, class Row>
__device__ __forceinline__ void load_tile(float* tile, int stride, int64_t column, int64_t columns, Row row) {
  constexpr int kRows = 8;  // of a thread
  constexpr int kAcrossThreads = kWide ? 32 : 16;
  const int c = 4 * static_cast<int>(threadIdx.x % kAcrossThreads), first = static_cast<int>(threadIdx.x / kAcrossThreads);
  const int64_t left = columns - column - c;
  const void* data[kRows];
  int32_t dtype = LLA_F32;
  bool plain = left >= 4;  // one type, aligned, four columns
  bool found = false;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const Elements elements = row(first + 8 * i);
    data[i] = left > 0 ? elements.data : nullptr;
    if (!data[i]) continue;
    const int64_t size = elements.dtype == LLA_F32 ? 4 : 2;
    data[i] = static_cast<const char*>(data[i]) + (column + c) * size;
    plain = plain && (!found || elements.dtype == dtype) && (reinterpret_cast<uintptr_t>(data[i]) & (4 * size - 1)) == 0;
    dtype = elements.dtype;
    found = true;
  }
  if (plain && dtype == LLA_F32) {
    float4 x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] = data[i] ? *static_cast<const float4*>(data[i]) : make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) *reinterpret_cast<float4*>(tile + (first + 8 * i) * stride + c) = x[i];
  } else if (plain) {
    uint2 x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] = data[i] ? *static_cast<const uint2*>(data[i]) : make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      *reinterpret_cast<float4*>(tile + (first + 8 * i) * stride + c) =
          dtype == LLA_BF16 ? make_float4(from_bf16(x[i].x & 0xffffu), from_bf16(x[i].x >> 16), from_bf16(x[i].y & 0xffffu),
                                          from_bf16(x[i].y >> 16))
                            : make_float4(from_f16(x[i].x & 0xffffu), from_f16(x[i].x >> 16), from_f16(x[i].y & 0xffffu),
                                          from_f16(x[i].y >> 16));
  } else {
#pragma unroll 1
    for (int r = first; r < 64; r += 8) {
      const Elements elements = row(r);
      *reinterpret_cast<float4*>(tile + r * stride + c) =
          elements.data && left > 0 ? load4(elements.data, elements.dtype, column + c, left) : make_float4(0, 0, 0, 0);
    }
  }
}

// The bucket of level j of the past of chunk i (bit j of i must be set): it ends with chunk bucket_end() - 1.
LLA_HOST_DEVICE inline int64_t bucket_end(int64_t i, int j) { return ((i >> (j + 1)) << (j + 1)) + (int64_t{1} << j); }

// Level of the pair of local rows i >= s.
__device__ __forceinline__ int local_level(int i, int s) { return 32 - __clz(i ^ s); }

}  // namespace lla::cuda
