// SPDX-License-Identifier: Apache-2.0
// Steps (scalar_gate_step.cu) where queries, keys, values and tails are bf16 and everything lies in whole pieces of 16
// bytes: few instructions, since a step is as fast as they let the nodes be read. A warp works on rows of its own, of the
// tail and of all nodes: it copies them through slots of its own of a ring and multiplies them by tensor cores, fp32 nodes
// aside. Scores stay in the registers that the product with the values wants.
#include <cstddef>

#include "cuda/common/warp_matrix.h"
#include "cuda/portable/scalar_gate.h"
#include "cuda/portable/scalar_gate_fold.h"
#include "cuda/portable/scalar_gate_step.h"

namespace lla::cuda::scalar_gate {

namespace {

// The ring: in each slot every warp has a part of its own, 16 rows of 64 bf16 columns or 8 of fp32 ones.
constexpr int kPartBytes = 2048, kSlotBytes = kWarps * kPartBytes;
constexpr int kSlots = 6, kFoldSlots = 3;  // a step that completes a chunk makes its content in the place of the last ones
using Content = ContentShared<false>;
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
  __device__ __forceinline__ void multiply(int column, int dim, float (&low)[4], float (&high)[4]) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (column + 32 * i >= dim) break;
      multiply_bf16(low, {q[i].x, 0, q[i].y, 0}, k[0][i].x, k[0][i].y);
      multiply_bf16(high, {q[i].x, 0, q[i].y, 0}, k[1][i].x, k[1][i].y);
      multiply_bf16(low, {q[i].z, 0, q[i].w, 0}, k[0][i].z, k[0][i].w);
      multiply_bf16(high, {q[i].z, 0, q[i].w, 0}, k[1][i].z, k[1][i].w);
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
__device__ __forceinline__ void store_bf16_rows(const Inputs& in, const Step& step, const Rows& rows, const Distances& at,
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

// Adds a chunk's content to 16 rows of a node, those of the warp among the 64 columns of keys: the products and sums of
// longer calls. A lane has pairs (l / 4 + 8 h, 8 n + 2 (l % 4)) in x[n / 2][4 (n % 2) + 2 h]. `values`, `keys`: the warp's
// own parts.
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
      multiply_bf16(reinterpret_cast<float(&)[4]>(x[m][0]), a, b[0], b[2]);
      multiply_bf16(reinterpret_cast<float(&)[4]>(x[m][4]), a, b[1], b[3]);
    }
  }
}

// The nodes' part of the rows' sums, and what a border makes of the nodes.
template <int kRows, bool kWide, bool kFolds, class CopyKeys>
__device__ __forceinline__ void read_nodes(const Inputs& in, const Step& step, const StepShared<kRows>& shared,
                                           const unsigned short* query, Ring<kWide>& ring, Content& content,
                                           ColumnSums<kRows>& sums, float (&wide)[kRows][4], CopyKeys copy_keys) {
  constexpr int kCount = kFolds ? kFoldSlots : kSlots, kTileRows = Ring<kWide>::kTileRows,
                kPieceRows = Ring<kWide>::kPieceRows;
  constexpr int kLaneColumns = Ring<kWide>::kLaneColumns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = static_cast<int>(in.shape.key_dim);
  const int pair = kRows == 1 ? 0 : lane % 2 * 2;
  const int row = warp * kTileRows + lane / Ring<kWide>::kRowLanes;  // the lane's first one, in a tile of the block
  const int column = lane % Ring<kWide>::kRowLanes * kLaneColumns;
  const float into_even = shared.into[pair], into_odd = kRows == 1 ? 0 : shared.into[pair + 1];
  const SharedPlace place = ring.part + matrix_place();
  const Border border(in.geometry, step.span.begin >> in.geometry.chunk.rows_log);
  const int merges = kFolds ? __popcll(border.merged & step.history.live) : 0;  // nodes, the newest ones
#pragma unroll 1
  for (int k0 = 0; k0 < dim; k0 += kWarps * kTileRows) {
    const bool mine = kWide || k0 + warp * kTileRows < dim;
    float merged[kFolds ? 4 : 1][kFolds ? kLaneColumns : 1] = {};
    if constexpr (kFolds && kWide) {
      if (k0 % 64 == 0)
        make_content<false>(in, step.sequence, step.span, step.head, step.group, k0, step.v0, shared.content, content);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* from = content.product + (k0 % 64 + row + kPieceRows * i) * Content::kStride + column;
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) merged[i][j] = from[j];
      }
    } else if constexpr (kFolds) {
      if (k0 >= 128) wait_all_copies();
      __syncthreads();
      if (mine) add_content(merged, ring.part + kFactored, ring.part + kKeys + k0 / 64 % 2 * kSlotBytes);
      if (k0 + 128 < dim) {
        __syncthreads();
        copy_keys(k0 + 128, kKeys + k0 / 64 % 2 * kSlotBytes);
      }
    }
    unsigned q[2] = {};
    float factor[kWide ? 4 : 1][kRows];
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) factor[i][r] = from_bf16(query[r * dim + k0 + row + kPieceRows * i]);
      }
    } else if (mine) {
      const unsigned short* from = query + lane / 4 % kRows * dim + k0 + warp * kTileRows + 2 * (lane % 4);
      if (lane / 4 < kRows) q[0] = load_pair(from, 0, true), q[1] = load_pair(from, 8, true);
    }
#pragma unroll 1
    for (int node = 0; node < ring.count && mine; ++node) {
      const float* weight = shared.weight[node];
      const int slot = ring.template next<kCount>();
      if constexpr (kWide) {
        const float even = weight[0] * shared.into[0];
        float w[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) w[r] = r == 0 ? even : weight[r] * shared.into[r];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 x = get_piece(ring.piece(slot, i));
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const float f = w[r] * factor[i][r];
            wide[r][0] = fmaf(f, x.x, wide[r][0]), wide[r][1] = fmaf(f, x.y, wide[r][1]);
            wide[r][2] = fmaf(f, x.z, wide[r][2]), wide[r][3] = fmaf(f, x.w, wide[r][3]);
          }
        }
      } else {
        const float even = weight[pair] * into_even, odd = kRows == 1 ? 0 : weight[pair + 1] * into_odd;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          unsigned a[4];
          float c[4] = {};
          load_transposed(a, (place + slot) ^ (32 * m));
          multiply_bf16(c, a, q[0], q[1]);
          sums.add(m, c, even, odd);
        }
      }
      if constexpr (kFolds) {
        if (node >= merges) continue;
        const float decay = shared.merged[node];
        if constexpr (kWide) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float4 x = get_piece(ring.piece(slot, i));
            merged[i][0] = fmaf(decay, x.x, merged[i][0]),
            merged[i][1] = fmaf(decay, x.y, merged[i][1]);  // as longer calls do
            merged[i][2] = fmaf(decay, x.z, merged[i][2]), merged[i][3] = fmaf(decay, x.w, merged[i][3]);
          }
        } else {
#pragma unroll
          for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const unsigned pair = get_word(((ring.part + slot + pair_place()) ^ (16 * n)) + 1024 * half);
              float(&x)[8] = merged[n / 2];
              float &even = x[n % 2 * 4 + 2 * half], &odd = x[n % 2 * 4 + 2 * half + 1];
              even = fmaf(decay, __uint_as_float(pair << 16), even);
              odd = fmaf(decay, __uint_as_float(pair & 0xffff0000u), odd);
            }
          }
        }
      }
    }
    if constexpr (kFolds) {
      if (mine) {
        each_node_to_store(in.geometry, step.sequence, border, [&](int32_t id, int level) {
          if (!border.is_new(level)) return;
          char* to = in.state.node(id, step.head);
          if constexpr (kWide) {
            if (column >= step.columns) return;
#pragma unroll
            for (int i = 0; i < 4; ++i)
              *reinterpret_cast<float4*>(to + int64_t{k0 + row + kPieceRows * i} * ring.row_bytes + (step.v0 + column) * 4) =
                  make_float4(merged[i][0], merged[i][1], merged[i][2], merged[i][3]);
          } else {
#pragma unroll
            for (int n = 0; n < 8; ++n) {
              if (8 * n >= step.columns) break;
#pragma unroll
              for (int half = 0; half < 2; ++half)
                *reinterpret_cast<unsigned*>(to + int64_t{k0 + warp * kTileRows + lane / 4 + 8 * half} * ring.row_bytes +
                                             (step.v0 + 8 * n + 2 * (lane % 4)) * 2) =
                    to_bf16(merged[n / 2][n % 2 * 4 + 2 * half]) | to_bf16(merged[n / 2][n % 2 * 4 + 2 * half + 1]) << 16;
            }
          }
        });
      }
      if constexpr (kWide) __syncthreads();
    }
  }
}

// One block: one step of one head, 64 columns of values. Blocks run along heads of a group, groups and columns, sequences:
// what heads share is near.
template <int kRows, bool kWide>
__global__ void __launch_bounds__(kThreads, kRows > 1 ? 3 : 4)
    step_bf16_rows(const __grid_constant__ Inputs in, const __grid_constant__ Distances at, const __grid_constant__ View y,
                   int64_t first, bool rows_aligned) {
  char* const memory = shared_memory();
  auto& shared = *reinterpret_cast<StepShared<kRows>*>(memory + kRingBytes);
  unsigned short* const query = reinterpret_cast<unsigned short*>(&shared + 1);  // [kRows][dk]
  const MixerShape& shape = in.shape;
  const bool aligned = kRows == 1 || rows_aligned;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int groups = static_cast<int>(shape.groups), members = gridDim.x;
  const int part = blockIdx.y >= shape.groups ? blockIdx.y / groups : 0, group = blockIdx.y - part * groups;
  const int head = shape.head_map == LLA_HEAD_MAP_CYCLIC ? blockIdx.x * groups + group : group * members + blockIdx.x;
  const int dim = static_cast<int>(shape.key_dim), value_dim = static_cast<int>(shape.value_dim), v0 = 64 * part;
  const Sequence& record = in.batch.sequences[first + blockIdx.z];
  const History::Ids ids(in, record.history);
  const int64_t chunk = record.position >> in.geometry.chunk.rows_log;
  if (threadIdx.x < kRecordWords) shared.record[threadIdx.x] = reinterpret_cast<const unsigned*>(&record)[threadIdx.x];
  const History history(ids, past_of(in.geometry, chunk, chunk));
  if (warp == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (history.id[half] >= 0)
        shared.node[history.rank(lane + 32 * half)] =
            in.state.nodes.base + history.id[half] * in.state.nodes.stride + head * at.node_head;
    }
  }
  if (warp == 1 && lane < kTensors) {
    const View& view = lane == kOutput ? y : (&in.q)[lane];
    const int64_t row = record.index * view.sequence_stride + record.row_begin * view.row_stride +
                        (lane <= kKey ? group : head) * view.head_stride + (lane == kValue || lane == kOutput ? v0 : 0);
    shared.row[lane] =
        view.present() ? static_cast<const char*>(view.data) + row * (view.dtype == LLA_F32 ? 4 : 2) : nullptr;
  }
  __syncthreads();
  const Sequence& sequence = *reinterpret_cast<const Sequence*>(shared.record);  // as far as it has been copied
  if (!takes_step(in.geometry, sequence)) return;
  const int lo = static_cast<int>(sequence.position) & (in.geometry.chunk.rows - 1);
  const ChunkSpan span(sequence.position - lo, lo, lo + static_cast<int>(sequence.rows));
  const Step step{
      sequence,
      span,
      history,
      head,
      group,
      v0,
      min(value_dim - v0, 64),
      in.batch.stores && in.state.nodes.base && sequence.nodes_to_store_count > 0 && span.hi == in.geometry.chunk.rows};
  const char* const* nodes = shared.node;

  // The warp's rows of values and of the nodes are on their way into the ring, its keys into registers.
  const Rows rows(in, sequence, span);
  const int count = static_cast<int>(sequence.rows), s0 = 16 * warp;
  const bool reads_rows = s0 < rows.hi && s0 + 16 > rows.begin;
  float low[4] = {}, high[4] = {};
  KeyProduct keys;
  keys.query = shared.row[kQuery] + (kRows == 1 ? 0 : min(lane / 4, count - 1) * in.q.row_stride * 2);
  if (reads_rows) {
    const char* call = shared.row[kKey];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      keys.key[i] = rows.find<kRows>(s0 + 8 * i + lane / 4, call, in.k.row_stride, rows.tail + group * at.keys, dim);
    keys.load(0, dim, aligned);
  }
  Ring<kWide> ring(memory, nodes, history.count(), dim, value_dim, v0, step.folds ? kFoldSlots : kSlots);
  const auto copy_keys = [&](int k0, int to) {
    copy_rows<kRows>(memory + to + warp * kPartBytes, rows, shared.row[kKey] + k0 * 2, in.k.row_stride,
                     rows.tail + (rows.begin < rows.lo ? group * at.keys + k0 * 2 : 0), dim, dim - k0, aligned);
  };
  if (reads_rows || step.folds)
    copy_rows<kRows>(memory + warp * kPartBytes, rows, shared.row[kValue], in.v.row_stride,
                     rows.tail + (rows.begin < rows.lo ? at.values_begin + head * at.values + v0 * 2 : 0), value_dim,
                     step.columns, aligned);
  if (!kWide && step.folds) {
    copy_keys(0, kKeys);
    if (dim > 64) copy_keys(64, kKeys + kSlotBytes);
  }
  commit_copies();
#pragma unroll 1
  for (int slot = kSlotBytes; slot < ring.last; slot += kSlotBytes) ring.copy_next(slot);
  if (reads_rows) {
    keys.multiply(0, dim, low, high);
    keys.load(32 * KeyProduct::kAtOnce, dim, aligned);
  }
  float loaded[kLoaded];
  NodeWeights<kRows> node_weights{loaded};
  RowFactors<kRows> row_factors{loaded};
  LocalLambda<kRows> local_lambda{loaded};
  RowStore row_store{loaded};
  bool is_stored = !in.batch.stores || in.state.tails.base == nullptr;
  if (warp == 0)
    node_weights.load(in, step, at, shared, 0);
  else if (warp == 1)
    row_factors.load(in, step, at, rows, shared);
  else if (warp == 2)
    local_lambda.load(in, step, shared);
  else if (kRows == 1 && !is_stored)
    row_store.load(step);
  if (reads_rows) {
#pragma unroll 1
    for (int c = 32 * KeyProduct::kAtOnce; c < dim; c += 32 * KeyProduct::kAtOnce) {
      keys.multiply(c, dim, low, high);
      if (c + 32 * KeyProduct::kAtOnce < dim) keys.load(c + 32 * KeyProduct::kAtOnce, dim, aligned);
    }
  }
  if (warp == 0) {
    node_weights.list(in, step, at, shared);
  } else if (warp == 1) {
    row_factors.list(in, step, rows, shared);
  } else if (warp == 2) {
    local_lambda.list(in, step, at, shared);
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      const char* from = shared.row[kQuery] + min(r, count - 1) * in.q.row_stride * 2;
#pragma unroll 1
      for (int i = 8 * lane; i < dim; i += 8 * 32)
        *reinterpret_cast<uint4*>(query + r * dim + i) = r < count ? load_piece(from, i, aligned) : uint4{0, 0, 0, 0};
    }
  } else if (kRows == 1 && !is_stored) {
    is_stored = row_store.store(in, step, at, shared.row, aligned);
  }
  __syncthreads();

  if (step.folds && threadIdx.x == kThreads - 1) {  // in the order of longer calls
    for (uint64_t rest = Border(in.geometry, chunk).merged; rest; rest &= rest - 1) {
      const int level = __ffsll(static_cast<long long>(rest)) - 1;
      if (!history.has(level)) continue;
      shared.merged[history.rank(level)] = decay_of(shared.total);
      shared.total += shared.past[history.rank(level)];
    }
  }
  ColumnSums<kRows> sums;
  const int slot = step.folds ? ring.template next<kFoldSlots>() : ring.template next<kSlots>();
  if (reads_rows) {
    const int r = lane / 4 % kRows, i = rows.lo + lane / 4;
    float weight[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int s = s0 + 2 * (lane % 4) + n % 2 + 8 * (n / 2);
      const float product = n < 2 ? low[n % 2] : high[n % 2];
      weight[n] = 0;
      if (lane / 4 < count && s <= i && s >= rows.begin)
        weight[n] = product * shared.lambda[local_level(i, s)][r] * shared.factor[s][r];
    }
    // In two bf16 numbers each: 16 bits of the weight.
    unsigned whole[2], rest[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      whole[n] = bf16_pair(weight[2 * n], weight[2 * n + 1]);
      rest[n] = bf16_pair(weight[2 * n] - __uint_as_float(whole[n] << 16),
                          weight[2 * n + 1] - __uint_as_float(whole[n] & 0xffff0000u));
    }
    const SharedPlace place = ring.part + matrix_place();
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      unsigned a[4];
      float c[4] = {};
      load_transposed(a, (place + slot) ^ (32 * m));
      multiply_bf16(c, a, whole[0], whole[1]);
      multiply_bf16(c, a, rest[0], rest[1]);
      sums.add(m, c, 1, 1);
    }
  }
  if (!kWide && step.folds) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int offset = warp * kPartBytes + ((128 * (lane / 8) + 16 * (lane % 8 ^ lane / 8)) ^ (i % 2 * 64)) + 512 * i;
      const float factor = shared.content[s0 + 4 * i + lane / 8];
      float x[kColumns];
      get_columns<LLA_BF16>(memory + offset, memory + offset, x);
      *reinterpret_cast<uint4*>(memory + kFactored + offset) =
          uint4{bf16_pair(factor * x[0], factor * x[1]), bf16_pair(factor * x[2], factor * x[3]),
                bf16_pair(factor * x[4], factor * x[5]), bf16_pair(factor * x[6], factor * x[7])};
    }
  }
  if (warp == kWarps - 1 && !is_stored) store_bf16_rows(in, step, rows, at, shared.row, aligned);
  float wide[kRows][4] = {};
  auto& content = *reinterpret_cast<Content*>(memory + kFoldSlots * kSlotBytes);
  if (step.folds) {
    read_nodes<kRows, kWide, true>(in, step, shared, query, ring, content, sums, wide, copy_keys);
    finish_border(
        in, step, nodes, [&](int level) { return shared.past[history.rank(level)]; }, shared.total);
  } else {
    read_nodes<kRows, kWide, false>(in, step, shared, query, ring, content, sums, wide, copy_keys);
  }
  wait_copies<0>();
  __syncwarp();
  const auto part_of = [&](int w, int i) { return reinterpret_cast<float(*)[64]>(memory + w * kPartBytes + i * 1024); };
  sums.put(part_of(warp, 0));
  if constexpr (kWide) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float total = wide[r][j] + __shfl_xor_sync(kAllLanes, wide[r][j], 16);
        if (lane < 16) part_of(warp, 1)[r][4 * lane + j] = total;
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * 64; i += kThreads) {
    const int r = i / 64, c = i % 64;
    if (r >= count || c >= step.columns) continue;
    float total = 0;
#pragma unroll
    for (int n = 0; n < (kWide ? 2 : 1) * kWarps; ++n) total += part_of(n % kWarps, n / kWarps)[r][c];
    put_element(const_cast<char*>(shared.row[kOutput]), y.dtype, r * y.row_stride + c, total, y.accumulate);
  }
}

// Whether rows of the call can be read in pieces of 16 bytes.
bool are_aligned(const Inputs& in) {
  bool aligned = true;
  for (const View* view : {&in.q, &in.k, &in.v}) {
    for (const int64_t stride : {view->sequence_stride, view->row_stride, view->head_stride}) aligned &= stride % 8 == 0;
    aligned &= (reinterpret_cast<uintptr_t>(view->data) & 15) == 0;
  }
  return aligned;
}

template <int kRows, bool kWide>
int32_t launch_rows(const Inputs& in, const View& y, bool aligned, void* stream) {
  const MixerShape& shape = in.shape;
  const int64_t bytes = sizeof(StepShared<kRows>) + kRingBytes + shape.key_dim * kRows * 2;
  int32_t status = LLA_OK;
  for (int64_t first = 0; first < in.batch.count && status == LLA_OK; first += kMostBlocksAcross) {
    const Grid grid{static_cast<unsigned>(shape.heads / shape.groups),
                    static_cast<unsigned>(shape.groups * tiles_of(shape.value_dim)),
                    static_cast<unsigned>(min(in.batch.count - first, kMostBlocksAcross))};
    status = launch_grid(step_bf16_rows<kRows, kWide>, grid, kThreads, static_cast<size_t>(bytes), stream, in, Distances(in),
                         y, first, aligned);
  }
  return status;
}

}  // namespace

bool takes_bf16_steps(const Inputs& in) {
  const MixerShape& shape = in.shape;
  if (in.exact() || shape.key_dim % 32 != 0 || shape.value_dim % 8 != 0) return false;
  if (in.state.nodes.base && in.state.node_layout.dtype != LLA_BF16 && in.state.node_layout.dtype != LLA_F32) return false;
  if (in.state.tails.base && in.state.tail_layout.dtype != LLA_BF16) return false;
  return shape.heads <= kMostBlocks && shape.groups * tiles_of(shape.value_dim) <= kMostBlocksAcross;
}

// A row has the same bits in either kernel; that for one row knows only aligned rows.
int32_t launch_bf16_steps(const Inputs& in, const View& y, void* stream) {
  const bool wide = in.state.nodes.base && in.state.node_layout.dtype == LLA_F32, aligned = are_aligned(in);
  if (in.batch.most_rows <= 1 && aligned)
    return wide ? launch_rows<1, true>(in, y, true, stream) : launch_rows<1, false>(in, y, true, stream);
  return wide ? launch_rows<kStepRows, true>(in, y, aligned, stream) : launch_rows<kStepRows, false>(in, y, aligned, stream);
}

int32_t load_bf16_steps() {
  for (const int32_t status :
       {load_kernel(step_bf16_rows<1, false>), load_kernel(step_bf16_rows<1, true>),
        load_kernel(step_bf16_rows<kStepRows, false>), load_kernel(step_bf16_rows<kStepRows, true>)}) {
    if (status != LLA_OK) return status;
  }
  return LLA_OK;
}

}  // namespace lla::cuda::scalar_gate
