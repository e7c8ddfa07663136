// SPDX-License-Identifier: Apache-2.0
// Steps (scalar_gate_step.cu) where queries, keys, values and tails are bf16, or all are fp16, and everything lies in whole
// pieces of 16 bytes: few instructions, since a step is as fast as they let the nodes be read. A warp works on rows of its
// own, of the tail and of all nodes, which are bf16 or fp32: it copies them through slots of its own of a ring and
// multiplies them by tensor cores, fp32 nodes aside. Scores stay in the registers that the product with the values wants.
// For the files that have one type's kernels.
#pragma once

#include "cuda/common/units.h"
#include "cuda/portable/scalar_gate_half_ring.h"
#include "cuda/portable/scalar_gate_half_tables.h"

namespace lla::cuda::scalar_gate {

namespace {

using namespace half_step;

template <int32_t kDtype>
__device__ __forceinline__ float from_half(unsigned bits) {
  return kDtype == LLA_BF16 ? from_bf16(bits) : from_f16(bits);
}
template <int32_t kDtype>
__device__ __forceinline__ unsigned pair_of(float low, float high) {
  return kDtype == LLA_BF16 ? bf16_pair(low, high) : f16_pair(low, high);
}
template <int32_t kDtype>
__device__ __forceinline__ float2 numbers_of(unsigned pair) {
  if constexpr (kDtype == LLA_BF16) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  return make_float2(from_f16(pair & 0xffffu), from_f16(pair >> 16));
}

// 64 rows of a chunk's content, from k0 on, in fp32: with the products of longer calls.
template <int32_t kDtype>
__device__ __forceinline__ void make_product(const Inputs& in, const Step& step, int k0, const float* factors,
                                             Content& content) {
  if constexpr (kDtype == LLA_BF16)
    make_content<false>(in, step.sequence, step.span, step.head, step.group, k0, step.v0, factors, content);
  else
    make_exact_content(in, step.sequence, step.span, step.head, step.group, k0, step.v0, factors,
                       reinterpret_cast<ExactContent&>(content));
}
// What a warp has of it, as add_content() gives it.
__device__ __forceinline__ void get_product(const float* product, float (&x)[4][8]) {
  const int lane = threadIdx.x % 32, row = 16 * (threadIdx.x / 32) + lane / 4;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair =
          *reinterpret_cast<const float2*>(product + (row + 8 * half) * Content::kStride + 8 * n + 2 * (lane % 4));
      x[n / 2][n % 2 * 4 + 2 * half] = pair.x, x[n / 2][n % 2 * 4 + 2 * half + 1] = pair.y;
    }
  }
}

// The nodes' part of the rows' sums, and what a border makes of the nodes.
template <int32_t kDtype, int kRows, bool kWide, bool kFolds, class CopyKeys>
__device__ __forceinline__ void read_nodes(const Inputs& in, const Step& step, const StepShared<kRows>& shared,
                                           const unsigned short* query, Ring<kWide>& ring, Content& content,
                                           ColumnSums<kRows>& sums, float (&wide)[kRows][4], CopyKeys copy_keys) {
  constexpr int kCount = kFolds ? kFoldSlots : kSlots, kTileRows = Ring<kWide>::kTileRows,
                kPieceRows = Ring<kWide>::kPieceRows;
  constexpr int kLaneColumns = Ring<kWide>::kLaneColumns;
  constexpr bool kProduct = kFolds && (kWide || kDtype == LLA_F16);  // a chunk's content is made in fp32
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
    if constexpr (kProduct) {
      if (k0 % 64 == 0) make_product<kDtype>(in, step, k0, shared.content, content);
    }
    if constexpr (kProduct && !kWide) {
      if (mine) get_product(content.product, merged);
    } else if constexpr (kProduct) {
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
    unsigned q[2] = {}, q_rest[2] = {};  // fp16: as two bf16 numbers each, which is exact
    float factor[kWide ? 4 : 1][kRows];
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) factor[i][r] = from_half<kDtype>(query[r * dim + k0 + row + kPieceRows * i]);
      }
    } else if (mine) {
      const unsigned short* from = query + lane / 4 % kRows * dim + k0 + warp * kTileRows + 2 * (lane % 4);
      if (lane / 4 < kRows) q[0] = load_pair(from, 0, true), q[1] = load_pair(from, 8, true);
      if constexpr (kDtype == LLA_F16) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float2 x = numbers_of<LLA_F16>(q[n]);
          q[n] = bf16_pair(x.x, x.y);
          const float2 taken = numbers_of<LLA_BF16>(q[n]);
          q_rest[n] = bf16_pair(x.x - taken.x, x.y - taken.y);
        }
      }
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
          multiply_half<LLA_BF16>(c, a, q[0], q[1]);
          if constexpr (kDtype == LLA_F16) multiply_half<LLA_BF16>(c, a, q_rest[0], q_rest[1]);
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
              const float2 numbers = numbers_of<LLA_BF16>(pair);
              even = fmaf(decay, numbers.x, even);
              odd = fmaf(decay, numbers.y, odd);
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
      if constexpr (kProduct) __syncthreads();
    }
  }
}

// One block: one step of one head, 64 columns of values. Blocks run along heads of a group, groups and columns, sequences:
// what heads share is near.
template <int32_t kDtype, int kRows, bool kWide>
__global__ void __launch_bounds__(kThreads, kRows > 1 ? 3 : 4)
    step_half_rows(const __grid_constant__ Inputs in, const __grid_constant__ Distances at, const __grid_constant__ View y,
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
  if (kDtype == LLA_BF16 && !kWide && step.folds) {
    copy_keys(0, kKeys);
    if (dim > 64) copy_keys(64, kKeys + kSlotBytes);
  }
  commit_copies();
#pragma unroll 1
  for (int slot = kSlotBytes; slot < ring.last; slot += kSlotBytes) ring.copy_next(slot);
  if (reads_rows) {
    keys.multiply<kDtype>(0, dim, low, high);
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
      keys.multiply<kDtype>(c, dim, low, high);
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
    // In two numbers each: 16 bits of a bf16 row's weight; of an fp16 row's, 22 bits in a unit of the row's own.
    float even = 1, odd = 1;
    if constexpr (kDtype == LLA_F16) {
      float most = fmaxf(fmaxf(fabsf(weight[0]), fabsf(weight[1])), fmaxf(fabsf(weight[2]), fabsf(weight[3])));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      const int unit = exponent_above(fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2)));
      even = power_of_two(__shfl_sync(kAllLanes, unit, 8 * (lane % 4)));
      odd = power_of_two(__shfl_sync(kAllLanes, unit, 8 * (lane % 4) + 4));
#pragma unroll
      for (int n = 0; n < 4; ++n) weight[n] *= power_of_two(-unit);
    }
    unsigned whole[2], rest[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      whole[n] = pair_of<kDtype>(weight[2 * n], weight[2 * n + 1]);
      const float2 taken = numbers_of<kDtype>(whole[n]);
      rest[n] = pair_of<kDtype>(weight[2 * n] - taken.x, weight[2 * n + 1] - taken.y);
    }
    const SharedPlace place = ring.part + matrix_place();
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      unsigned a[4];
      float c[4] = {};
      load_transposed(a, (place + slot) ^ (32 * m));
      multiply_half<kDtype>(c, a, whole[0], whole[1]);
      multiply_half<kDtype>(c, a, rest[0], rest[1]);
      sums.add(m, c, even, odd);
    }
  }
  if (kDtype == LLA_BF16 && !kWide && step.folds) {
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
  if (warp == kWarps - 1 && !is_stored) store_half_rows(in, step, rows, at, shared.row, aligned);
  float wide[kRows][4] = {};
  auto& content = *reinterpret_cast<Content*>(memory + kFoldSlots * kSlotBytes);
  if (step.folds) {
    read_nodes<kDtype, kRows, kWide, true>(in, step, shared, query, ring, content, sums, wide, copy_keys);
    finish_border(
        in, step, nodes, [&](int level) { return shared.past[history.rank(level)]; }, shared.total);
  } else {
    read_nodes<kDtype, kRows, kWide, false>(in, step, shared, query, ring, content, sums, wide, copy_keys);
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

template <int32_t kDtype, int kRows, bool kWide>
int32_t launch_rows(const Inputs& in, const View& y, bool aligned, void* stream) {
  const MixerShape& shape = in.shape;
  const int64_t bytes = sizeof(StepShared<kRows>) + kRingBytes + shape.key_dim * kRows * 2;
  int32_t status = LLA_OK;
  for (int64_t first = 0; first < in.batch.count && status == LLA_OK; first += kMostBlocksAcross) {
    const Grid grid{static_cast<unsigned>(shape.heads / shape.groups),
                    static_cast<unsigned>(shape.groups * tiles_of(shape.value_dim)),
                    static_cast<unsigned>(min(in.batch.count - first, kMostBlocksAcross))};
    status = launch_grid(step_half_rows<kDtype, kRows, kWide>, grid, kThreads, static_cast<size_t>(bytes), stream, in,
                         Distances(in), y, first, aligned);
  }
  return status;
}

}  // namespace

// A row has the same bits in either kernel; that for one row knows only aligned rows.
template <int32_t kDtype>
int32_t launch_half_steps(const Inputs& in, const View& y, void* stream) {
  const bool wide = in.state.nodes.base && in.state.node_layout.dtype == LLA_F32, aligned = are_aligned(in);
  if (in.batch.most_rows <= 1 && aligned)
    return wide ? launch_rows<kDtype, 1, true>(in, y, true, stream) : launch_rows<kDtype, 1, false>(in, y, true, stream);
  return wide ? launch_rows<kDtype, kStepRows, true>(in, y, aligned, stream)
              : launch_rows<kDtype, kStepRows, false>(in, y, aligned, stream);
}

template <int32_t kDtype>
int32_t load_half_steps() {
  for (const int32_t status :
       {load_kernel(step_half_rows<kDtype, 1, false>), load_kernel(step_half_rows<kDtype, 1, true>),
        load_kernel(step_half_rows<kDtype, kStepRows, false>), load_kernel(step_half_rows<kDtype, kStepRows, true>)}) {
    if (status != LLA_OK) return status;
  }
  return LLA_OK;
}

}  // namespace lla::cuda::scalar_gate
