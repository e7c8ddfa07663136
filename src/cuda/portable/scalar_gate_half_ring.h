// SPDX-License-Identifier: Apache-2.0
// What a step of bf16 or fp16 rows reads: the ring in which each warp has rows of its own, and products with what lies
// there.
#pragma once

#include <cstddef>

#include "cuda/common/warp_matrix.h"
#include "cuda/portable/scalar_gate.h"
#include "cuda/portable/scalar_gate_fold.h"
#include "cuda/portable/scalar_gate_step.h"

namespace lla::cuda::scalar_gate::half_step {

// The ring: in each slot every warp has a part of its own, 16 rows of 64 columns of two bytes or 8 of fp32 ones.
constexpr int kPartBytes = 2048, kSlotBytes = kWarps * kPartBytes;
constexpr int kSlots = 6, kFoldSlots = 3;  // a step that completes a chunk makes its content in the place of the last ones
using Content = ContentShared<false>;
static_assert(sizeof(ExactContent) <= sizeof(Content), "it stands in the same place");
constexpr int kFoldBytes = kFoldSlots * kSlotBytes + static_cast<int>(sizeof(Content));
constexpr int kRingBytes = kSlots * kSlotBytes > kFoldBytes ? kSlots* kSlotBytes : kFoldBytes;
// There: the chunk's values times their factors, and 64 columns of its keys, twice; all as a slot has the values.
constexpr int kFactored = kFoldSlots * kSlotBytes, kKeys = kFactored + kSlotBytes;
static_assert(kKeys + 2 * kSlotBytes <= kRingBytes);
constexpr int kRecordWords = offsetof(Sequence, conv_to_store) / 4;  // what steps need of a sequence's record

// The call's tensors, in the order of Inputs, and the output.
enum Tensor : int { kQuery, kKey, kValue, kGate, kWrite, kLambda, kOutput, kTensors };

// Behind the ring.
template <int kRows>
struct alignas(16) StepShared {
  alignas(16) unsigned record[kRecordWords];
  const char* node[kNodes];     // nodes of the past, newest first
  const char* row[kTensors];    // where the call's first row of the head or of its group begins; null: not given
  float weight[kNodes][kRows];  // λ times the decay from the node's end to the chunk's start
  float factor[64][kRows];      // of the chunk's rows: write strength times decay to the call's rows
  float lambda[8][kRows];       // of the levels inside a chunk
  float into[kRows];            // decay from the chunk's start into the row
  // Of a step that completes its chunk: its rows' factors; of the past's nodes log decays, and, if they are merged, decays
  // to the chunk's end; log decay of the new node.
  float content[64], past[kNodes], merged[kNodes], total;
};

// What would cost much arithmetic in each block: distances in bytes within a state.
struct Distances {
  float scale;
  int64_t node_head = 0, node_decay = 0;
  int64_t keys = 0, values = 0, values_begin = 0, gates = 0, gates_begin = 0, writes_begin = 0;

  explicit Distances(const Inputs& in) : Distances(in.state, static_cast<float>(in.shape.scale)) {}
  Distances(const SlotMemory& state, float scale)
      : scale(scale),
        node_head(state.node_layout.head_bytes()),
        node_decay(state.node_layout.decay_offset()),
        keys(state.tail_layout.k_span()),
        values(state.tail_layout.v_span()),
        values_begin(state.tail_layout.v_offset(0, 0)),
        gates(state.tail_layout.gate_span()),
        gates_begin(state.tail_layout.gate_offset(0, 0)),
        writes_begin(state.tail_layout.write_offset(0, 0)) {}
};

// The rows of the chunk's tensors: of the call from local row lo on, before it of the tail.
struct Rows {
  int begin, lo, hi;     // what lies before `begin` is zero
  int origin, capacity;  // ring index of local row 0
  const char* tail;

  __device__ Rows(const Inputs& in, const Sequence& sequence, const ChunkSpan& span)
      : begin(span.lo), lo(span.lo), hi(span.hi) {
    const SlotImage& history = sequence.history;
    origin = history.tail_origin;
    capacity = static_cast<int>(in.state.tail_layout.capacity);
    tail = history.tail >= 0 ? in.state.tails.block(history.tail) : nullptr;
    if (lo > 0 && history.tail >= 0) {
      const int64_t before = history.start - span.begin;
      begin = before <= 0 ? 0 : before < lo ? static_cast<int>(before) : lo;
    }
  }
  // Of a tail's row.
  __device__ __forceinline__ int ring(int r) const {
    const int at = origin + r;
    return at >= capacity ? at - capacity : at;
  }
  // Where local row r begins, or, if there is none, some row that is: `call` is the call's first one, `at` the tail's.
  template <int kRows>
  __device__ __forceinline__ const char* find(int r, const char* call, int64_t row_stride, const char* at, int width) const {
    const int s = max(min(r, hi - 1), begin);
    if constexpr (kRows == 1) return s >= lo ? call : at + ring(s) * (2 * width);
    return s >= lo ? call + (s - lo) * (2 * row_stride) : at + ring(s) * (2 * width);
  }
};

// Two neighbouring elements of a row, which is aligned if all of the call's are.
__device__ __forceinline__ unsigned load_pair(const void* row, int column, bool aligned) {
  const unsigned short* from = static_cast<const unsigned short*>(row) + column;
  return aligned ? *reinterpret_cast<const unsigned*>(from) : from[0] | static_cast<unsigned>(from[1]) << 16;
}
__device__ __forceinline__ uint4 load_piece(const void* row, int column, bool aligned) {
  const unsigned short* from = static_cast<const unsigned short*>(row) + column;
  if (aligned) return *reinterpret_cast<const uint4*>(from);
  return uint4{load_pair(from, 0, false), load_pair(from, 2, false), load_pair(from, 4, false), load_pair(from, 6, false)};
}

// Products of a warp's 16 keys with the queries: lane l gets those of query l / 4 with keys 2 * (l % 4) + i % 2 + 8 * (i /
// 2). A lane's 16 bytes of a row are the operands of two products; in which order elements are added up does not matter, as
// long as it is the same for both operands.
struct KeyProduct {
  static constexpr int kAtOnce = 4;  // pieces of a row: each 32 columns in the lanes that share it
  const char *query, *key[2];
  uint4 q[kAtOnce], k[2][kAtOnce];

  __device__ __forceinline__ void load(int column, int dim, bool aligned) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int c = min(column + 32 * i, dim - 32) + 8 * static_cast<int>(threadIdx.x % 4);
      q[i] = load_piece(query, c, aligned);
      k[0][i] = load_piece(key[0], c, aligned);
      k[1][i] = load_piece(key[1], c, aligned);
    }
  }
  template <int32_t kDtype>
  __device__ __forceinline__ void multiply(int column, int dim, float (&low)[4], float (&high)[4]) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (column + 32 * i >= dim) break;
      multiply_half<kDtype>(low, {q[i].x, 0, q[i].y, 0}, k[0][i].x, k[0][i].y);
      multiply_half<kDtype>(high, {q[i].x, 0, q[i].y, 0}, k[1][i].x, k[1][i].y);
      multiply_half<kDtype>(low, {q[i].z, 0, q[i].w, 0}, k[0][i].z, k[0][i].w);
      multiply_half<kDtype>(high, {q[i].z, 0, q[i].w, 0}, k[1][i].z, k[1][i].w);
    }
  }
};

// Copies four pieces, `step` bytes apart, to places 512 bytes apart, of which every second one has its eights of columns
// swapped.
template <int kSwap>
__device__ __forceinline__ void copy_pieces(bool go, SharedPlace to, const char* from, int64_t step) {
#if defined(LLA_CUDA_EMULATED)
  for (int i = 0; i < 4 && go; ++i)
    copy_async16(reinterpret_cast<void*>((i % 2 ? to ^ kSwap : to) + static_cast<SharedPlace>(512 * i)), from + i * step);
#else
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %8, 0;\n"
      "@p cp.async.cg.shared.global [%0], [%4], 16;\n@p cp.async.cg.shared.global [%1+512], [%5], 16;\n"
      "@p cp.async.cg.shared.global [%2+1024], [%6], 16;\n@p cp.async.cg.shared.global [%3+1536], [%7], 16;\n}" ::"r"(to),
      "r"(to ^ kSwap), "r"(to), "r"(to ^ kSwap), "l"(from), "l"(from + step), "l"(from + 2 * step), "l"(from + 3 * step),
      "r"(static_cast<int>(go))
      : "memory");
#endif
}

// A warp's part of the ring, and the order in which it is filled: values of the tail, then a tile of each node, then the
// next tile of each.
template <bool kWide>
struct Ring {
  static constexpr int kTileRows = kWide ? 8 : 16;  // of a warp
  static constexpr int kPieceRows = kWide ? 2 : 4;  // of one piece of each lane
  static constexpr int kLaneColumns = kWide ? 4 : 8, kRowLanes = 64 / kLaneColumns;
  static constexpr int kSwap = kWide ? 0 : 64;
  const char* const* nodes;
  int row_bytes, count;     // of a node's row; nodes
  int node = 0, left;       // the one whose tile is copied next; tiles that are to be copied
  const char* from;         // that node, if there is one
  int offset, tile_bytes;   // of the lane's first piece in a node; from a tile to the next one
  SharedPlace part, first;  // in slot 0, and the lane's first piece there
  int use = 0, last;        // slot that is used next, and the one before it

  __device__ Ring(char* ring, const char* const* list, int nodes_count, int dim, int value_dim, int v0, int slots)
      : nodes(list), row_bytes(value_dim * (kWide ? 4 : 2)), count(nodes_count), last((slots - 1) * kSlotBytes) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    from = nodes[0];
    const int row = lane / kRowLanes, column = v0 + lane % kRowLanes * kLaneColumns;
    part = shared_place(ring) + warp * kPartBytes;
    first = part + (kWide ? 16 * lane : 128 * row + 16 * (lane % 8 ^ row));
    offset = (warp * kTileRows + row) * row_bytes + column * (kWide ? 4 : 2);
    tile_bytes = kWarps * kTileRows * row_bytes;
    left = column < value_dim ? (dim - warp * kTileRows + kWarps * kTileRows - 1) / (kWarps * kTileRows) * count : 0;
  }
  // The lane's piece i of a slot.
  __device__ __forceinline__ SharedPlace piece(int slot, int i) const {
    return ((first + slot) ^ (i % 2 ? kSwap : 0)) + 512 * i;
  }
  __device__ __forceinline__ void copy_next(int slot) {
    copy_pieces<kSwap>(left > 0, first + slot, from + offset, int64_t{kPieceRows} * row_bytes);
    commit_copies();
    --left;
    const bool is_last = ++node >= count;
    node = is_last ? 0 : node;
    offset += is_last ? tile_bytes : 0;
    from = nodes[node];
  }
  // The next slot that is filled; its warp sees what each lane has copied. The one before it has been read.
  template <int kCount>
  __device__ __forceinline__ int next() {
    wait_copies<kCount - 2>();
    __syncwarp();
    copy_next(last);
    last = use;
    use = use == (kCount - 1) * kSlotBytes ? 0 : use + kSlotBytes;
    return last;
  }
};

__device__ __forceinline__ float4 get_piece(SharedPlace at) {
#if defined(LLA_CUDA_EMULATED)
  return *reinterpret_cast<const float4*>(at);
#else
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at) : "memory");
  return x;
#endif
}

// By one warp: begins to copy its 16 rows of the chunk to its part of a slot, 64 columns, of which `columns` exist; rows
// that are not there are zero. Places as in Rows::find().
template <int kRows>
__device__ __forceinline__ void copy_rows(char* part, const Rows& rows, const char* call, int64_t row_stride,
                                          const char* tail, int width, int columns, bool aligned) {
  const int lane = threadIdx.x % 32, first = 16 * static_cast<int>(threadIdx.x / 32) + lane / 8;
  const int place = 128 * (lane / 8) + 16 * (lane % 8 ^ lane / 8);
  if (lane % 8 * 8 >= columns) return;
  if (aligned) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + 4 * i;
      copy_async16(part + (place ^ (i % 2 * 64)) + 512 * i,
                   rows.find<kRows>(row, call, row_stride, tail, width) + lane % 8 * 16,
                   row >= rows.begin && row < rows.hi ? 16 : 0);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const int row = first + 4 * i;
      const char* from = rows.find<kRows>(row, call, row_stride, tail, width);
      *reinterpret_cast<uint4*>(part + (place ^ (i % 2 * 64)) + 512 * i) =
          row >= rows.begin && row < rows.hi ? load_piece(from, lane % 8 * 8, false) : uint4{0, 0, 0, 0};
    }
  }
}

// Sums of a warp for columns 16 m + l / 4 (+ 8) of lane l: of row 0 in lanes l % 4 = 0, or of rows 2 (l % 4) and the next
// one.
template <int kRows>
struct ColumnSums {
  float x[kRows == 1 ? 8 : 16] = {};

  __device__ __forceinline__ void add(int m, const float (&c)[4], float even, float odd) {
    if constexpr (kRows == 1) {
      x[2 * m] = fmaf(even, c[0], x[2 * m]), x[2 * m + 1] = fmaf(even, c[2], x[2 * m + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * m + i] = fmaf(i % 2 ? odd : even, c[i], x[4 * m + i]);
    }
  }
  __device__ __forceinline__ void put(float (*part)[64]) const {
    const int lane = threadIdx.x % 32, column = lane / 4, r = 2 * (lane % 4);
    if (r >= kRows) return;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      if constexpr (kRows == 1) {
        part[0][16 * m + column] = x[2 * m], part[0][16 * m + column + 8] = x[2 * m + 1];
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) part[r + i % 2][16 * m + column + 8 * (i / 2)] = x[4 * m + i];
      }
    }
  }
};

// Where lane l's row of matrix l / 8 lies in a part of the ring; eight columns further on it is at ^ 32.
__device__ __forceinline__ int matrix_place() {
  const int lane = threadIdx.x % 32;
  return 128 * (lane % 8 + lane / 16 * 8) + 16 * (lane / 8 % 2 ^ lane % 8);
}

__device__ __forceinline__ unsigned get_word(SharedPlace at) {
#if defined(LLA_CUDA_EMULATED)
  return *reinterpret_cast<const unsigned*>(at);
#else
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
#endif
}
// Where a lane's pair (l / 4, 2 (l % 4)) of a matrix lies in a part of the ring; eight columns further on it is at ^ 16.
__device__ __forceinline__ int pair_place() {
  const int lane = threadIdx.x % 32;
  return 128 * (lane / 4) + 16 * (lane / 4) + 4 * (lane % 4);
}

// bf16: adds a chunk's content to 16 rows of a node, those of the warp among the 64 columns of keys: the products and sums
// of longer calls. A lane has pairs (l / 4 + 8 h, 8 n + 2 (l % 4)) in x[n / 2][4 (n % 2) + 2 h]. `values`, `keys`: the
// warp's own parts.
__device__ __forceinline__ void add_content(float (&x)[4][8], SharedPlace values, SharedPlace keys) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int t = 0; t < 4; ++t) {  // 16 rows of the chunk, which one warp has copied
    const int part = (t - warp) * kPartBytes;
    unsigned a[4];
    load_transposed(a, (keys + part + matrix_place()) ^ (32 * warp));
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      unsigned b[4];
      load_transposed(b, (values + part + matrix_place()) ^ (32 * m));
      multiply_half<LLA_BF16>(reinterpret_cast<float(&)[4]>(x[m][0]), a, b[0], b[2]);
      multiply_half<LLA_BF16>(reinterpret_cast<float(&)[4]>(x[m][4]), a, b[1], b[3]);
    }
  }
}

}  // namespace lla::cuda::scalar_gate::half_step
