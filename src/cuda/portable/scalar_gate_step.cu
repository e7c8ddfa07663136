// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward of few rows, as in decoding: the rows of a sequence that appends at most kStepRows rows without
// leaving its chunk. Their products are sums over what is read once, the raw rows of the tail and the nodes of the past:
// time is the nodes' bytes. Each thread streams pieces of its own through shared memory, several stages ahead, from the
// moment it knows the sequence; what the rows read them with is made meanwhile. A step that completes a chunk makes its node
// from the same stream. For any shapes and types; rows of 2 bytes have scalar_gate_half_step.h.
#include "cuda/portable/scalar_gate.h"
#include "cuda/portable/scalar_gate_columns.h"
#include "cuda/portable/scalar_gate_fold.h"
#include "cuda/portable/scalar_gate_stream.h"

namespace lla::cuda::scalar_gate {

namespace {

constexpr int kMostColumns = 80;  // of λ, that can be read: levels inside a chunk and 64 entries
// What one block needs. Before it, aligned to 128 bytes, the ring; behind it the queries [dk, filled up to a multiple of
// 64][kRows].
template <int kRows>
struct alignas(16) StepShared {
  float part[2 * kWarps][kRows][64];  // sums of the warps
  const char* node[kWarps][64];       // nodes of the past, newest first; each warp has a list of its own
  float weight[64][kRows];            // with which the rows read them
  float score[64][kRows];             // with which they read the chunk's own values
  float lambda[kMostColumns][kRows];  // of the levels that there are, times the scale
  float decay[64][kRows];             // from the chunk's rows to the call's
  float into[kRows];                  // decay from the chunk's start into the row
  float write[64];
  float newer[64];  // log decays from the ends of the past's entries to the chunk's start
  float past[64];   // over these entries
  // Of a chunk that is completed: its rows' factors, decays from the ends of nodes that are merged to its end, and the log
  // decay of the new node.
  float content[64], factor[64], total;
};

template <int kRows>
__device__ __forceinline__ void add_scaled(float (&sum)[kRows][kColumns], const float (&x)[kColumns],
                                           const float (&factor)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sum[r][j] = fmaf(factor[r], x[j], sum[r][j]);
  }
}
template <int kCount>
__device__ __forceinline__ void get_floats(const float* from, float (&x)[kCount]) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 y = *reinterpret_cast<const float4*>(from + i);
      x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = from[i];
  }
}

// By one warp: the decays of a chunk's rows. Row i reads row s with a sum over what lies between them, which is of the same
// bits whether row i comes alone or with others.
template <int kRows>
__device__ __forceinline__ void list_row_decays(const Inputs& in, const Step& step, StepShared<kRows>& shared) {
  const Sequence& sequence = step.sequence;
  const ChunkSpan& span = step.span;
  const ChunkSource source{sequence, in.state, in.shape.grain, span};
  const int lane = threadIdx.x % 32;
  float gate[2] = {0, 0}, write[2] = {0, 0}, new_gate = 0, new_write = 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = lane + 32 * half;
    if (r >= span.lo || !source.in_tail(r)) continue;
    const int64_t ring = source.ring(r);
    gate[half] = *reinterpret_cast<const float*>(in.state.tail_gate(sequence.history.tail, step.head, ring));
    write[half] = *reinterpret_cast<const float*>(in.state.tail_write(sequence.history.tail, step.head, ring));
  }
  if (lane < span.hi - span.lo) {
    const int64_t row = sequence.row_begin + lane;
    if (in.gate.present()) new_gate = load_element(in.gate.at(sequence.index, row, step.head), in.gate.dtype, 0);
    if (in.write.present()) new_write = load_element(in.write.at(sequence.index, row, step.head), in.write.dtype, 0);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = lane + 32 * half;
    const float x = __shfl_sync(kAllLanes, new_gate, r - span.lo), z = __shfl_sync(kAllLanes, new_write, r - span.lo);
    if (r >= span.lo && r < span.hi) gate[half] = x, write[half] = z;
    shared.write[r] = write[half];
  }
#pragma unroll 1
  for (int r = 0; r < kRows; ++r) {
    const int i = span.lo + r;
    float low = lane <= i ? gate[0] : 0, high = lane + 32 <= i ? gate[1] : 0;  // sums of these and the later rows
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float x = __shfl_down_sync(kAllLanes, low, d), z = __shfl_down_sync(kAllLanes, high, d);
      if (lane + d < 32) low += x, high += z;
    }
    low += __shfl_sync(kAllLanes, high, 0);
    const float after_low = __shfl_down_sync(kAllLanes, low, 1), after_high = __shfl_down_sync(kAllLanes, high, 1);
    const float first_high = __shfl_sync(kAllLanes, high, 0);
    shared.decay[lane][r] = decay_of(lane < 31 ? after_low : first_high);
    shared.decay[lane + 32][r] = decay_of(lane < 31 ? after_high : 0);
    if (lane == 0) shared.into[r] = decay_of(low);
  }
  if (!step.folds) return;
  const float total = list_content_factors(gate, write, shared.content);
  if (lane == 0) shared.total = total;
}

// With what the rows read: a warp for each kind.
template <int kRows>
__device__ __forceinline__ void prepare_step(const Inputs& in, const Step& step, StepShared<kRows>& shared, float* query) {
  const Sequence& sequence = step.sequence;
  const int lane = threadIdx.x % 32, count = static_cast<int>(sequence.rows);
  if (threadIdx.x / 32 == 0) {
    step.history.list_decays(in, step.head, shared.past, shared.newer);
  } else if (threadIdx.x / 32 == 1) {
    list_row_decays(in, step, shared);
  } else if (threadIdx.x / 32 == 2) {
    const int dim = static_cast<int>(in.shape.key_dim);
#pragma unroll 1
    for (int i = lane; i < (dim + 63) / 64 * (64 / kColumns) * kRows; i += 32) {
      const int r = i % kRows, column = kColumns * (i / kRows);
      float x[kColumns] = {};
      if (r < count)
        load_columns(in.q.at(sequence.index, sequence.row_begin + r, step.group), in.q.dtype, column, dim - column, x);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) query[(column + j) * kRows + r] = x[j];
    }
  } else {
    const int levels = static_cast<int>(min(in.shape.levels, int64_t{kMostColumns}));
#pragma unroll 1
    for (int i = lane; i < levels * kRows; i += 32) {
      const int c = i / kRows, r = i % kRows;
      const int64_t position = sequence.position + r;  // whose pairs with the past have no level above its bit length
      if (r < count && (c == 0 || c == in.shape.levels - 1 || (c <= 62 && position >> (c - 1) != 0)))
        shared.lambda[c][r] =
            static_cast<float>(in.shape.scale) *
            load_element(in.lambda.at(sequence.index, sequence.row_begin + r, step.head), in.lambda.dtype, c);
    }
    if (in.batch.stores && in.state.tails.base) store_rows(in, step);
  }
}

// Puts the sums of a warp, whose threads have runs of columns of some rows each, all added up.
template <int kRows>
__device__ __forceinline__ void put_runs(const float (&sum)[kRows][kColumns], float (&part)[kRows][64]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float total = sum[r][j];
#pragma unroll
      for (int d = kAcross; d < 32; d *= 2) total += __shfl_xor_sync(kAllLanes, total, d);
      if (threadIdx.x % 32 < kAcross) part[r][threadIdx.x % kAcross * kColumns + j] = total;
    }
  }
}

// Products of rows with tiles of nodes by tensor cores, where both are bf16. A warp multiplies the rows of the tile that it
// has copied: each lane gets sums for columns 16 m + lane / 4 (+ 8) and rows 2 (lane % 4) and the next one.
template <int kRows>
struct TensorProduct {
  unsigned query[2];  // of the warp's rows of the tile
  int at;             // where the lane's row of eight columns lies in a stage

  // `tile`: queries of its rows.
  __device__ __forceinline__ explicit TensorProduct(const float* tile) {
    const int lane = threadIdx.x % 32, r = lane / 4, k = lane / 16 * 8 + lane % 8;
    at = threadIdx.x / 32 * 512 + piece_offset(k / 4, k % 4, lane / 8 % 2);
#if !defined(LLA_CUDA_EMULATED)
    asm volatile("" : "+r"(at));  // not to be made anew for each node
#endif
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = 2 * (lane % 4) + 8 * i;  // of the warp's 16 rows: 4 of every kLanes
      const float* from = tile + (threadIdx.x / 32 * 4 + pair % 4 + pair / 4 * kLanes) * kRows + r;
      query[i] = r < kRows ? bf16_pair(from[0], from[kRows]) : 0;
    }
  }
  // Adds the products with a tile, times the rows' weights.
  __device__ __forceinline__ void add(const char* stage, const float (&weight)[kRows], float (&sum)[kRows][kColumns]) const {
    const int lane = threadIdx.x % 32;
    float even = weight[0], odd = 0;
    if constexpr (kRows == 4) even = lane % 2 ? weight[2] : weight[0], odd = lane % 2 ? weight[3] : weight[1];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float x[4] = {};
#if defined(LLA_CUDA_EMULATED)
      for (int k = 0; k < 16; ++k)
        for (int i = 0; i < 4; ++i) {
          const int column = 16 * m + lane / 4 + 8 * (i / 2), r = 2 * (lane % 4) + i % 2;
          const auto* run = reinterpret_cast<const unsigned short*>(stage + threadIdx.x / 32 * 512 +
                                                                    piece_offset(k / 4, k % 4, column / 8));
          const unsigned pair = __shfl_sync(kAllLanes, query[k / 8], 4 * r + k % 8 / 2);
          x[i] += from_bf16(run[column % 8]) * from_bf16(k % 2 ? pair >> 16 : pair & 0xffffu);
        }
#else
      unsigned a[4];
      load_matrices<true>(a, reinterpret_cast<const unsigned short*>(stage + (at ^ 32 * m)));
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(query[0]), "r"(query[1]));
#endif
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (float* c = sum_of(sum, m, i)) *c = fmaf(i % 2 ? odd : even, x[i], *c);
      }
    }
  }
  __device__ __forceinline__ static void put(float (&sum)[kRows][kColumns], float (&part)[kRows][64]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 2 * (lane % 4) + i % 2;
        if (const float* c = sum_of(sum, m, i); c && r < kRows) part[r][16 * m + lane / 4 + 8 * (i / 2)] = *c;
      }
    }
  }

 private:
  // Where sum i of matrix m stands; null: it is of no row.
  static __device__ __forceinline__ float* sum_of(float (&sum)[kRows][kColumns], int m, int i) {
    if constexpr (kRows == 1)
      return i % 2 ? nullptr : &sum[0][2 * m + i / 2];
    else
      return &sum[m / 2][m % 2 * 4 + i];
  }
};

// The nodes' part of the rows' sums, and what a border makes of the nodes. Columns that are not there are garbage here,
// which nobody stores.
template <int kRows, bool kExact, bool kFolds>
__device__ __forceinline__ void read_nodes(const Inputs& in, const Step& step, const StepShared<kRows>& shared,
                                           const float* query, const char* ring, ContentShared<kExact>& content,
                                           Stream<kExact>& stream, float (&part)[kRows][64]) {
  constexpr int kStages = kFolds ? StepRing<kExact>::kFoldStages : StepRing<kExact>::kStages;
  const Border border(in.geometry, step.span.begin >> in.geometry.chunk.rows_log);
  const int merges = __popcll(border.merged & step.history.live);  // nodes, the newest ones
  const int32_t dtype = in.state.node_layout.dtype;
  const int dim = static_cast<int>(in.shape.key_dim), runs = kPieces / pieces_of(dtype);
  const bool tensor = !kExact && dtype == LLA_BF16;
  float sum[kRows][kColumns] = {};
#pragma unroll 1
  for (int k0 = 0; k0 < dim; k0 += kLanes * runs) {
    float q[kPieces][kRows], merged[kFolds ? kPieces : 1][kColumns];
    const int row = k0 + stream.lane;
    if constexpr (kFolds) {
      if (k0 % 64 == 0)
        make_content<kExact>(in, step.sequence, step.span, step.head, step.group, k0, step.v0, shared.content, content);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const char* from =
            reinterpret_cast<const char*>(content.product + (row % 64 + kLanes * i) * content.kStride + stream.place);
        if (i < runs) get_columns<LLA_F32>(from, from + 16, merged[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i < runs) get_floats(query + (row + kLanes * i) * kRows, q[i]);
    }
    const TensorProduct<kRows> product(query + (tensor ? k0 : 0) * kRows);
#pragma unroll 1
    for (int node = 0; node < stream.nodes_count; ++node) {
      float weight[kRows];
      get_floats(shared.weight[node], weight);
      const int stage = stream.template next_node<kStages>();
      const auto each_run = [&](auto type, auto f) {
        constexpr int32_t kDtype = decltype(type)::kDtype;
#pragma unroll
        for (int i = 0; i < kPieces / pieces_of(kDtype); ++i) {
          float x[kColumns];
          get_columns<kDtype>(stream.low(stage, pieces_of(kDtype), i), stream.high(stage, pieces_of(kDtype), i), x);
          f(i, x);
        }
      };
      with_dtype(dtype, [&](auto type) {
        if constexpr (!kExact && decltype(type)::kDtype == LLA_BF16) {
          product.add(ring + stage * kStageBytes, weight, sum);
        } else {
          each_run(type, [&](int i, const float(&x)[kColumns]) {
            float factor[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) factor[r] = weight[r] * q[i][r];
            add_scaled<kRows>(sum, x, factor);
          });
        }
        if constexpr (kFolds) {
          if (node >= merges) return;
          const float decay = shared.factor[node];
          each_run(type, [&](int i, const float(&x)[kColumns]) {
#pragma unroll
            for (int j = 0; j < kColumns; ++j) merged[i][j] = fmaf(decay, x[j], merged[i][j]);  // as longer calls do
          });
        }
      });
    }
    if constexpr (kFolds) {
      each_node_to_store(in.geometry, step.sequence, border, [&](int32_t id, int level) {
        if (!border.is_new(level)) return;
        char* to = in.state.node(id, step.head);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          if (i < runs && row + kLanes * i < dim)
            store_columns(to + (row + kLanes * i) * in.shape.value_dim * dtype_size(dtype), dtype, step.v0 + stream.place,
                          step.columns - stream.place, merged[i]);
        }
      });
      __syncthreads();
    }
  }
  if (tensor)
    TensorProduct<kRows>::put(sum, part);
  else
    put_runs(sum, part);
}

// One block: one step of one head, 64 columns of values. No loop over tasks: what it needs would stay in registers.
template <int kRows, bool kExact>
__global__ void __launch_bounds__(kThreads, kRows > 1 ? 2
                                            : kExact  ? 3
                                                      : 4)
    step_rows(const __grid_constant__ Inputs in, const View y, int64_t first) {
  char* const ring = shared_memory();
  auto& shared = *reinterpret_cast<StepShared<kRows>*>(ring + StepRing<kExact>::kBytes);
  float* const query = reinterpret_cast<float*>(&shared + 1);
  const MixerShape& shape = in.shape;
  const uint32_t heads = static_cast<uint32_t>(shape.heads), parts = tiles_of(shape.value_dim);
  const uint32_t groups = static_cast<uint32_t>(shape.groups), members = heads / groups;
  const bool cyclic = shape.head_map == LLA_HEAD_MAP_CYCLIC;
  const uint32_t number = blockIdx.x % heads, part = blockIdx.x / heads % parts;
  const Sequence& sequence = in.batch.sequences[first + blockIdx.x / heads / parts];
  // Heads of a group are neighbours.
  const int group = static_cast<int>(number / members), head = cyclic ? number % members * groups + group : number;
  const int v0 = static_cast<int>(part) * 64;
  const int64_t chunk = sequence.position >> in.geometry.chunk.rows_log;
  const History history(History::Ids(in, sequence.history), past_of(in.geometry, chunk, chunk));
  if (!takes_step(in.geometry, sequence)) return;
  const ChunkSpan span(sequence, in.geometry.chunk, chunk);
  const Step step{
      sequence,
      span,
      history,
      head,
      group,
      v0,
      min(static_cast<int>(shape.value_dim) - v0, 64),
      in.batch.stores && in.state.nodes.base && sequence.nodes_to_store_count > 0 && span.hi == in.geometry.chunk.rows};
  history.list_nodes(in, head, shared.node[threadIdx.x / 32]);
  Stream<kExact> stream(in, step, shared.node[threadIdx.x / 32], ring);
  prepare_step<kRows>(in, step, shared, query);
  __syncthreads();

  const int count = static_cast<int>(sequence.rows);
  const auto lambda_of = [&](int r, int64_t column) {
    return shape.levels == 0 ? static_cast<float>(shape.scale) : shared.lambda[column][r];
  };
  for (int i = threadIdx.x; i < 64 * kRows; i += kThreads) {
    const int level = i / kRows, r = i % kRows;
    if (history.has(level))
      shared.weight[history.rank(level)][r] =
          r < count ? lambda_of(r, entry_column(in, level)) * shared.into[r] * decay_of(shared.newer[level]) : 0;
  }
  if (step.folds && threadIdx.x == kThreads - 1) {  // in the order of longer calls
    for (uint64_t rest = Border(in.geometry, chunk).merged; rest; rest &= rest - 1) {
      const int level = __ffsll(static_cast<long long>(rest)) - 1;
      if (!history.has(level)) continue;
      shared.factor[history.rank(level)] = decay_of(shared.total);
      shared.total += shared.past[level];
    }
  }
  const auto dtype_of = [&](int s, const View& tensor) { return s < span.lo ? in.state.tail_layout.dtype : tensor.dtype; };
  const auto is_there = [&](int s) { return s >= stream.values.begin && s < span.hi; };
  float dot[kRows] = {}, sum[kRows][kColumns] = {};
#pragma unroll 1
  for (int n = 0; n < stream.row_stages(); ++n) {
    const int stage = stream.next();
    if (n < stream.key_stages) {
      const int s = stream.key_row();
      if (is_there(s)) {
#pragma unroll 1
        for (int i = 0; i < kPieces / stream.key_pieces; ++i) {
          const int column = stream.key_column(n, i);
          if (column >= stream.dim) break;
          float x[kColumns], q[kColumns * kRows];
          get_columns(stream.low(stage, stream.key_pieces, i), stream.high(stage, stream.key_pieces, i), dtype_of(s, in.k),
                      x);
          get_floats(query + column * kRows, q);
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) dot[r] = fmaf(x[j], q[j * kRows + r], dot[r]);
          }
        }
      }
      if (n + 1 < stream.key_stages) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int i = span.lo + r;
        const float product = dot[r] + __shfl_xor_sync(kAllLanes, dot[r], 1);
        if (threadIdx.x % 2 != 0) continue;
        float weight = 0;
        if (r < count && s <= i)
          weight = product * lambda_of(r, shape.column(local_level(i, s))) * (shared.write[s] * shared.decay[s][r]);
        shared.score[s][r] = weight;
      }
      __syncthreads();
    } else {
#pragma unroll 1
      for (int i = 0; i < kPieces / stream.value_pieces; ++i) {
        const int row = stream.value_row(n - stream.key_stages, i);
        if (!is_there(row)) continue;
        float x[kColumns], score[kRows];
        get_floats(shared.score[row], score);
        get_columns(stream.low(stage, stream.value_pieces, i), stream.high(stage, stream.value_pieces, i),
                    dtype_of(row, in.v), x);
        add_scaled<kRows>(sum, x, score);
      }
    }
  }
  put_runs(sum, shared.part[threadIdx.x / 32]);
  auto& of_nodes = shared.part[kWarps + threadIdx.x / 32];
  auto& content = *reinterpret_cast<ContentShared<kExact>*>(ring + StepRing<kExact>::kFoldStages * kStageBytes);
  if (step.folds) {
    read_nodes<kRows, kExact, true>(in, step, shared, query, ring, content, stream, of_nodes);
    finish_border(
        in, step, shared.node[0], [&](int level) { return shared.past[level]; }, shared.total);
  } else if (history.live) {
    read_nodes<kRows, kExact, false>(in, step, shared, query, ring, content, stream, of_nodes);
  }
  wait_copies<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * 64; i += kThreads) {
    const int r = i / 64, c = i % 64;
    if (r >= count || c >= step.columns) continue;
    float total = 0;
#pragma unroll
    for (int w = 0; w < 2 * kWarps; ++w) {
      if (w < kWarps || step.folds || history.live) total += shared.part[w][r][c];
    }
    put_element(y.at(sequence.index, sequence.row_begin + r, head), y.dtype, v0 + c, total, y.accumulate);
  }
}

template <int kRows, bool kExact>
int32_t launch_rows(const Inputs& in, const View& y, void* stream) {
  const int64_t of_sequence = in.shape.heads * tiles_of(in.shape.value_dim), most = kMostBlocks / of_sequence;
  const int64_t bytes =
      sizeof(StepShared<kRows>) + StepRing<kExact>::kBytes + ((in.shape.key_dim + 63) & ~int64_t{63}) * kRows * 4;
  int32_t status = LLA_OK;
  for (int64_t first = 0; first < in.batch.count && status == LLA_OK; first += most)
    status = launch(step_rows<kRows, kExact>, min(in.batch.count - first, most) * of_sequence, kThreads,
                    static_cast<size_t>(bytes), stream, in, y, first);
  return status;
}

// Shapes and types alone decide.
bool takes_half_steps(const Inputs& in) {
  const MixerShape& shape = in.shape;
  const int32_t dtype = in.k.dtype;
  if ((dtype != LLA_BF16 && dtype != LLA_F16) || in.q.dtype != dtype || in.v.dtype != dtype) return false;
  if (shape.key_dim % 32 != 0 || shape.value_dim % 8 != 0) return false;
  if (in.state.nodes.base && in.state.node_layout.dtype != LLA_BF16 && in.state.node_layout.dtype != LLA_F32) return false;
  if (in.state.tails.base && in.state.tail_layout.dtype != dtype) return false;
  return shape.heads <= kMostBlocks && shape.groups * tiles_of(shape.value_dim) <= kMostBlocksAcross;
}

}  // namespace

int32_t launch_steps(const Inputs& in, const View& y, void* stream) {
  if (takes_half_steps(in))
    return in.k.dtype == LLA_F16 ? launch_half_steps<LLA_F16>(in, y, stream) : launch_half_steps<LLA_BF16>(in, y, stream);
  if (in.batch.most_rows <= 1)
    return in.exact() ? launch_rows<1, true>(in, y, stream) : launch_rows<1, false>(in, y, stream);
  return in.exact() ? launch_rows<kStepRows, true>(in, y, stream) : launch_rows<kStepRows, false>(in, y, stream);
}

int32_t load_steps() {
  for (const int32_t status : {load_half_steps<LLA_BF16>(), load_half_steps<LLA_F16>(), load_kernel(step_rows<1, false>),
                               load_kernel(step_rows<1, true>), load_kernel(step_rows<kStepRows, false>),
                               load_kernel(step_rows<kStepRows, true>)}) {
    if (status != LLA_OK) return status;
  }
  return LLA_OK;
}

}  // namespace lla::cuda::scalar_gate
