// SPDX-License-Identifier: Apache-2.0
// The delta rule for tensors of 16-bit types and dimensions of at most 128: operands in fp16 beside a scale, a power of two,
// for each row or matrix. That is the precision of tf32 at half the bytes and twice the speed. Tiles lie in shared memory as
// ldmatrix reads them without bank conflicts.
#pragma once

#include "cuda/common/reduce.h"
#include "cuda/portable/delta_rule.h"
#include "cuda/portable/delta_rule_wide.h"

namespace lla::cuda {

// ---- scratch memory -----------------------------------------------------------------------------------------------------

// As DeltaScratch, in fp16. Scales stand in arrays of their own; a value is its half times the scale. Without a tree:
// `content` is [dv][key_stride] there, first the chunk's own N^T and then, in the place of the chunk before, the state S^T
// at a chunk's start with a scale for each row; `transition` is what a chunk erases, D in S <- whole (S - D S) + N.
struct DeltaHalfScratch {
  bool tree = true;  // else linear as told above
  static constexpr int32_t kType = LLA_F16;
  using Element = unsigned short;
  int64_t heads = 0, first_head = 0, pass_heads = 0;
  int64_t key_dim = 0, value_dim = 0, key_stride = 0, value_stride = 0;
  Element* content = nullptr;
  Element* transition = nullptr;
  int64_t level_offset[kDeltaLevels] = {};
  Element* query = nullptr;
  Element* output = nullptr;
  Element* inverse = nullptr;  // [chunk of first_place()][head][64][64] of X, for backward; null: not wanted
  float* inverse_scale = nullptr;
  float* content_scale = nullptr;     // [slot][head]
  float* transition_scale = nullptr;  // [place][head]
  float* whole = nullptr;             // [slot][head], linear only: decay over the chunk
  float* state_scale = nullptr;       // [slot][head][128], linear only: of the rows of S^T
  float* query_scale = nullptr;       // [row][head]
  float* output_scale = nullptr;

  LLA_HOST_DEVICE int64_t place(int64_t i, int64_t head) const { return i * heads + head - first_head; }
  LLA_HOST_DEVICE int64_t content_size() const { return key_stride * value_stride; }
  LLA_HOST_DEVICE int64_t transition_size() const { return key_dim * key_stride; }
  LLA_HOST_DEVICE Element* content_at(int64_t slot, int64_t head) const {
    return content + place(slot, head) * content_size();
  }
  LLA_HOST_DEVICE float* content_scale_at(int64_t slot, int64_t head) const { return content_scale + place(slot, head); }
  LLA_HOST_DEVICE int64_t transition_place(int level, int64_t slot, int64_t sequence, int64_t head) const {
    return place(level_offset[level] + (slot >> level) + sequence, head);
  }
  LLA_HOST_DEVICE Element* transition_at(int level, int64_t slot, int64_t sequence, int64_t head) const {
    return transition + transition_place(level, slot, sequence, head) * transition_size();
  }
  LLA_HOST_DEVICE float* transition_scale_at(int level, int64_t slot, int64_t sequence, int64_t head) const {
    return transition_scale + transition_place(level, slot, sequence, head);
  }
};

// ---- numbers ------------------------------------------------------------------------------------------------------------

constexpr float kTwo36 = 68719476736.0f;  // 64 products of two halves below 2^15 are less than this

__device__ __forceinline__ float2 unpack_halves(unsigned both) {
  return make_float2(from_f16(both & 0xffffu), from_f16(both >> 16));
}

// Numbers up to `most` times `to` are less than 2^15 and, if they are not below 2^-28 most, as precise as halves can be.
struct HalfScale {
  float to, back;

  __device__ __forceinline__ explicit HalfScale(float most) {
    unsigned exponent = __float_as_uint(most) >> 23 & 255u;
    exponent = exponent < 16 ? 16 : exponent > 254 ? 254 : exponent;
    back = __uint_as_float((exponent - 14) << 23);
    to = __uint_as_float((268 - exponent) << 23);
  }
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
// The same in all threads; `memory` has a place for each warp. Contains two barriers.
__device__ __forceinline__ float block_max(float x, float* memory) {
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = x;
  __syncthreads();
  for (unsigned w = 0; w < blockDim.x / 32; ++w) x = fmaxf(x, memory[w]);
  return x;
}

// The warp's number, in a way that tells the compiler that all lanes have the same.
__device__ __forceinline__ int warp_number() { return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0); }

// ---- tiles --------------------------------------------------------------------------------------------------------------

constexpr int kHalfRow = 2 * kWide;          // bytes of a row of 128 halves
constexpr int kHalfTile = kWide * kHalfRow;  // of 128 rows
constexpr int kHalfRows = kTile * kHalfRow;  // of 64 rows

#if defined(LLA_CUDA_EMULATED)
using SharedAddress = uintptr_t;
inline SharedAddress shared_address(const void* p) { return reinterpret_cast<uintptr_t>(p); }
#else
using SharedAddress = unsigned;
__device__ __forceinline__ SharedAddress shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
#endif

// Bytes from a tile's start (a multiple of 1024) to the 16-byte piece `piece` of a row.
template <int kRowBytes = kHalfRow>
__device__ __forceinline__ int half_place(int row, int piece) {
  return row * kRowBytes + ((piece ^ (row & 7)) << 4);
}

// Four 8 x 8 matrices of halves, whose rows the lanes give the addresses of (PTX ldmatrix.x4).
template <bool kTransposed>
__device__ __forceinline__ void load_fragment(unsigned (&to)[4], SharedAddress row) {
#if defined(LLA_CUDA_EMULATED)
  const char* all = emulator::warp_meet(&row, sizeof row);
  const int lane = emulator::lane();
  const auto at = [&](int matrix, int r, int column) -> unsigned {
    SharedAddress from;
    std::memcpy(&from, all + 64 * (8 * matrix + r), sizeof from);
    return reinterpret_cast<const unsigned short*>(from)[column];
  };
  for (int i = 0; i < 4; ++i) {
    const int r = lane / 4, c = 2 * (lane % 4);
    to[i] = kTransposed ? at(i, c, r) | at(i, c + 1, r) << 16 : at(i, r, c) | at(i, r, c + 1) << 16;
  }
#else
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
#endif
}

// c[16 x 8] += a[16 x 16] b[16 x 8] of a warp (PTX mma.m16n8k16, fp16, sums in fp32).
__device__ __forceinline__ void multiply_halves(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if defined(LLA_CUDA_EMULATED)
  unsigned give[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const char* all = emulator::warp_meet(give, sizeof give);
  const auto half = [all](int lane, int i) { return from_f16(reinterpret_cast<const unsigned short*>(all + 64 * lane)[i]); };
  const int l = emulator::lane();
  for (int i = 0; i < 4; ++i) {
    const int row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      sum += half(row % 8 * 4 + k % 8 / 2, 2 * (row / 8 + 2 * (k / 8)) + k % 2) *
             half(column * 4 + k % 8 / 2, 8 + 2 * (k / 8) + k % 2);
    }
    c[i] += sum;
  }
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// How a tile holds an operand: A by rows, or B by columns, that run along the depth; or the depth's rows.
enum class Stored { kAlongDepth, kByDepth };

// The address that this lane gives for a 16 x 16 block of A at the tile's first row (column); moved_rows() and piece bits
// (XOR 32 for each 16 columns of the tile) move it.
template <Stored kStored, int kRowBytes = kHalfRow>
__device__ __forceinline__ SharedAddress left_address(const char* tile) {
  const int lane = threadIdx.x % 32;
  return shared_address(tile) + (kStored == Stored::kAlongDepth
                                     ? half_place<kRowBytes>(lane % 16, lane / 16)
                                     : half_place<kRowBytes>(lane % 8 + 8 * (lane / 16), lane / 8 % 2));
}
// The same for B: registers 0, 1 then are eight columns, 2, 3 the next eight.
template <Stored kStored, int kRowBytes = kHalfRow>
__device__ __forceinline__ SharedAddress right_address(const char* tile) {
  const int lane = threadIdx.x % 32;
  return shared_address(tile) + (kStored == Stored::kByDepth
                                     ? half_place<kRowBytes>(lane % 16, lane / 16)
                                     : half_place<kRowBytes>(lane % 8 + 8 * (lane / 16), lane / 8 % 2));
}
// Block (rows16, columns16) of a tile, in sixteens of rows and of columns as they are stored.
template <int kRowBytes = kHalfRow>
__device__ __forceinline__ SharedAddress block_address(SharedAddress base, int rows16, int columns16) {
  return (base ^ static_cast<SharedAddress>(columns16 << 5)) + static_cast<SharedAddress>(rows16 * 16 * kRowBytes);
}

// Sixteen rows of a product with up to 16 kPairs columns, held by a warp: c[j] are columns 8 j ... of rows lane / 4 and
// lane / 4 + 8.
template <int kPairs>
struct RowSum {
  float c[2 * kPairs][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < 2 * kPairs; ++j)
#pragma unroll
      for (int q = 0; q < 4; ++q) c[j][q] = 0;
  }
  // += A B for a depth of 16 `steps` (at most kSteps), from block `depth16` of B on. left(k) gives A's fragments. Those of B
  // come two ahead of their use; what lies behind the depth may be read, but takes no part.
  template <Stored kStored, int kSteps, class Left>
  __device__ __forceinline__ void add(SharedAddress right, int steps, Left left, int depth16 = 0) {
    unsigned b[3][4];
    const auto fetch = [&](int t) {
      if constexpr (kStored == Stored::kByDepth)
        load_fragment<true>(b[t % 3], block_address(right, depth16 + t / kPairs, t % kPairs));
      else
        load_fragment<false>(b[t % 3], block_address(right, t % kPairs, depth16 + t / kPairs));
    };
    fetch(0);
    fetch(1);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k >= steps) break;
      const unsigned(&a)[4] = left(k);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int t = k * kPairs + j;
        if (t + 2 < kSteps * kPairs) fetch(t + 2);
        multiply_halves(c[2 * j], a, b[t % 3][0], b[t % 3][1]);
        multiply_halves(c[2 * j + 1], a, b[t % 3][2], b[t % 3][3]);
      }
    }
  }
  // Largest magnitudes of the two rows.
  __device__ __forceinline__ void row_most(float (&most)[2]) const {
    most[0] = most[1] = 0;
#pragma unroll
    for (int j = 0; j < 2 * kPairs; ++j)
#pragma unroll
      for (int q = 0; q < 4; ++q) most[q / 2] = fmaxf(most[q / 2], fabsf(c[j][q]));
    most[0] = quad_max(most[0]), most[1] = quad_max(most[1]);
  }
  // As the left operand of the next product: depth 16 i ... is a[i]. Rows times scale[0] and scale[1].
  __device__ __forceinline__ void pack(unsigned (&a)[kPairs][4], float scale0, float scale1) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      a[i][0] = f16_pair(c[2 * i][0] * scale0, c[2 * i][1] * scale0);
      a[i][1] = f16_pair(c[2 * i][2] * scale1, c[2 * i][3] * scale1);
      a[i][2] = f16_pair(c[2 * i + 1][0] * scale0, c[2 * i + 1][1] * scale0);
      a[i][3] = f16_pair(c[2 * i + 1][2] * scale1, c[2 * i + 1][3] * scale1);
    }
  }
};
using WideRows = RowSum<8>;

// Lane q of each quad gives x[j], part q of piece j, and gets piece q as a whole.
__device__ __forceinline__ uint4 exchange_pieces(unsigned x0, unsigned x1, unsigned x2, unsigned x3) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  unsigned got = __shfl_xor_sync(kAllLanes, odd ? x0 : x1, 1);
  if (odd)
    x0 = got;
  else
    x1 = got;
  got = __shfl_xor_sync(kAllLanes, odd ? x2 : x3, 1);
  if (odd)
    x2 = got;
  else
    x3 = got;
  got = __shfl_xor_sync(kAllLanes, high ? x0 : x2, 2);
  if (high)
    x0 = got;
  else
    x2 = got;
  got = __shfl_xor_sync(kAllLanes, high ? x1 : x3, 2);
  if (high)
    x1 = got;
  else
    x3 = got;
  uint4 piece;
  piece.x = x0, piece.y = x1, piece.z = x2, piece.w = x3;
  return piece;
}

// Hands out packed rows by pieces: f(half, piece, 16 bytes), half 0 or 1 being row lane / 4 or lane / 4 + 8.
template <class F>
__device__ __forceinline__ void each_piece(const unsigned (&a)[8][4], F f) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int group = 0; group < 4; ++group)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      f(half, 4 * group + q,
        exchange_pieces(a[2 * group][half], a[2 * group][2 + half], a[2 * group + 1][half], a[2 * group + 1][2 + half]));
}

// Packed rows into a tile.
__device__ __forceinline__ void put_rows_into(char* tile, int row, const unsigned (&a)[8][4]) {
  const int first = row + static_cast<int>(threadIdx.x % 32 / 4);
  each_piece(
      a, [&](int half, int piece, uint4 x) { *reinterpret_cast<uint4*>(tile + half_place(first + 8 * half, piece)) = x; });
}

// Begins to bring a matrix [rows][stride] of halves into a tile, what is beyond its end zero. By kThreadCount threads.
template <int kThreadCount = kWideThreads, int kRows = kWide>
__device__ __forceinline__ void bring_halves(char* tile, const void* matrix, int rows, int stride) {
  const int piece = threadIdx.x % 16, first = threadIdx.x / 16;
  const char* from = static_cast<const char*>(matrix) + first * stride * 2 + piece * 16;
  const bool inside = 8 * piece < stride;
#pragma unroll
  for (int i = 0; i < kRows / (kThreadCount / 16); ++i) {
    const int r = first + i * (kThreadCount / 16);
    const bool there = inside && r < rows;
    copy_async16(tile + half_place(r, piece),
                 reinterpret_cast<const float*>(there ? from + i * (kThreadCount / 16) * stride * 2 : matrix),
                 there ? 16 : 0);
  }
}

// A matrix of any type into a tile as halves; returns its scale. Contains barriers. `memory` as block_max().
template <int kThreadCount = kWideThreads>
__device__ __forceinline__ float put_matrix(char* tile, const Elements& matrix, int64_t stride, int rows, int columns,
                                            float* memory) {
  const int piece = threadIdx.x % 16, first = threadIdx.x / 16;
  const auto load = [&](int r, float4* x) {
    x[0] = x[1] = make_float4(0, 0, 0, 0);
    const int left = columns - 8 * piece;
    if (!matrix.data || r >= rows || left <= 0) return;
    const Elements from = delta_row(matrix, r, stride);
    x[0] = load4(from.data, from.dtype, 8 * piece, left);
    if (left > 4) x[1] = load4(from.data, from.dtype, 8 * piece + 4, left - 4);
  };
  float most = 0;
  float4 x[2];
#pragma unroll 1
  for (int r = first; r < rows; r += kThreadCount / 16) {
    load(r, x);
    for (const float4& y : x) most = fmaxf(fmaxf(fmaxf(most, fabsf(y.x)), fabsf(y.y)), fmaxf(fabsf(y.z), fabsf(y.w)));
  }
  const HalfScale scale(block_max(most, memory));
#pragma unroll 1
  for (int r = first; r < kWide; r += kThreadCount / 16) {
    load(r, x);
    uint4 out;
    out.x = f16_pair(x[0].x * scale.to, x[0].y * scale.to), out.y = f16_pair(x[0].z * scale.to, x[0].w * scale.to);
    out.z = f16_pair(x[1].x * scale.to, x[1].y * scale.to), out.w = f16_pair(x[1].z * scale.to, x[1].w * scale.to);
    *reinterpret_cast<uint4*>(tile + half_place(r, piece)) = out;
  }
  return scale.back;
}

// 64 rows of a tensor of a 16-bit type that come into a tile as they are, and then are made halves with a scale for each
// row. By 256 threads, sixteen to a row; a thread works on the pieces that it has brought.
__device__ __forceinline__ bool has_plain_rows(const CallRows& rows, int columns) {
  return rows.dtype != LLA_F32 && columns % 8 == 0 &&
         ((reinterpret_cast<uintptr_t>(rows.data) | static_cast<uint64_t>(rows.stride)) & 15) == 0;
}
__device__ __forceinline__ void bring_raw_rows(char* tile, const CallRows& rows, int columns) {
  const int piece = threadIdx.x % 16, first = threadIdx.x / 16;
  const bool inside = has_plain_rows(rows, columns) && 8 * piece < columns;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = first + 16 * i;
    float* to = reinterpret_cast<float*>(tile + half_place(r, piece));
    if (inside && r >= rows.lo && r < rows.hi)
      copy_async16(to, rows.data + r * rows.stride + 16 * piece, 16);
    else
      *reinterpret_cast<float4*>(to) = make_float4(0, 0, 0, 0);
  }
}
// Rows of a 16-bit type that bring_raw_rows() could not bring, as they are.
__device__ __forceinline__ void put_raw_rows(char* tile, const CallRows& rows, int columns) {
  const int piece = threadIdx.x % 16, left = columns - 8 * piece;
  if (has_plain_rows(rows, columns) || left <= 0) return;
#pragma unroll 1
  for (int r = threadIdx.x / 16; r < rows.hi; r += 16) {
    if (r < rows.lo) continue;
    const unsigned short* from = reinterpret_cast<const unsigned short*>(rows.data + r * rows.stride) + 8 * piece;
    unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < 8; ++n)
      if (n < left) words[n / 2] |= static_cast<unsigned>(from[n]) << 16 * (n % 2);
    uint4 raw;
    raw.x = words[0], raw.y = words[1], raw.z = words[2], raw.w = words[3];
    *reinterpret_cast<uint4*>(tile + half_place(r, piece)) = raw;
  }
}
// Makes a tile of 64 raw rows halves with one scale, which is returned. Contains barriers.
__device__ __forceinline__ float scale_tile(char* tile, int32_t dtype, float* memory) {
  const int piece = threadIdx.x % 16, first = threadIdx.x / 16;
  const auto get = [&](unsigned both) {
    return dtype == LLA_BF16 ? make_float2(from_bf16(both & 0xffffu), from_bf16(both >> 16)) : unpack_halves(both);
  };
  float most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 raw = *reinterpret_cast<const uint4*>(tile + half_place(first + 16 * i, piece));
    for (const unsigned both : {raw.x, raw.y, raw.z, raw.w}) {
      const float2 x = get(both);
      most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
    }
  }
  const HalfScale scale(block_max(most, memory));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint4* at = reinterpret_cast<uint4*>(tile + half_place(first + 16 * i, piece));
    const uint4 raw = *at;
    const auto scaled = [&](unsigned both) {
      const float2 x = get(both);
      return f16_pair(x.x * scale.to, x.y * scale.to);
    };
    uint4 out;
    out.x = scaled(raw.x), out.y = scaled(raw.y), out.z = scaled(raw.z), out.w = scaled(raw.w);
    *at = out;
  }
  return scale.back;
}
__device__ __forceinline__ uint4 scaled_piece(const float (&x)[8], float* back) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(x[i]));
#pragma unroll
  for (int distance = 8; distance > 0; distance >>= 1) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, distance));
  const HalfScale scale(most);
  *back = scale.back;
  uint4 out;
  out.x = f16_pair(x[0] * scale.to, x[1] * scale.to), out.y = f16_pair(x[2] * scale.to, x[3] * scale.to);
  out.z = f16_pair(x[4] * scale.to, x[5] * scale.to), out.w = f16_pair(x[6] * scale.to, x[7] * scale.to);
  return out;
}
// row(r): elements of a row that could not come as it is, of the tail for example.
template <class Row>
__device__ __forceinline__ void scale_rows(char* tile, float* scales, int32_t dtype, int slow_rows, int columns, Row row) {
  const int piece = threadIdx.x % 16, first = threadIdx.x / 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = first + 16 * i;
    uint4* place = reinterpret_cast<uint4*>(tile + half_place(r, piece));
    const uint4 raw = *place;
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
    float x[8], back;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 halves = unpack_halves(words[n]);
      x[2 * n] = dtype == LLA_BF16 ? __uint_as_float(words[n] << 16) : halves.x;
      x[2 * n + 1] = dtype == LLA_BF16 ? __uint_as_float(words[n] & 0xffff0000u) : halves.y;
    }
    *place = scaled_piece(x, &back);
    if (piece == 0) scales[r] = back;
  }
#pragma unroll 1
  for (int r = first; r < (slow_rows + 1) / 2 * 2; r += 16) {  // both rows of a warp, for its shuffles
    const Elements from = r < slow_rows ? row(r) : Elements();
    const int left = columns - 8 * piece;
    float4 low = make_float4(0, 0, 0, 0), high = low;
    if (from.data && left > 0) low = load4(from.data, from.dtype, 8 * piece, left);
    if (from.data && left > 4) high = load4(from.data, from.dtype, 8 * piece + 4, left - 4);
    const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float back;
    const uint4 out = scaled_piece(x, &back);
    if (r >= slow_rows) continue;
    *reinterpret_cast<uint4*>(tile + half_place(r, piece)) = out;
    if (piece == 0) scales[r] = back;
  }
}

// ---- launches -----------------------------------------------------------------------------------------------------------
int32_t launch_delta_half_chunks(const DeltaInputs& in, const DeltaHalfScratch& scratch, void* stream);
int32_t launch_delta_half_nodes(const DeltaInputs& in, const DeltaHalfScratch& scratch, void* stream);
int32_t launch_delta_half_read(const DeltaInputs& in, const DeltaHalfScratch& scratch, const View& y, void* stream);
int32_t launch_delta_half_store(const DeltaInputs& in, const DeltaHalfScratch& scratch, void* stream);
int32_t launch_delta_half_scan(const DeltaInputs& in, const DeltaHalfScratch& scratch, void* stream);
int32_t launch_delta_half_linear_read(const DeltaInputs& in, const DeltaHalfScratch& scratch, const View& y, void* stream);
int32_t load_delta_half_chunks();
int32_t load_delta_half_nodes();
int32_t load_delta_half_read();
int32_t load_delta_half_scan();

}  // namespace lla::cuda
