// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward of the rows of a chunk, once the gradients of nodes are there.
#include <new>

#include "cuda/portable/scalar_gate_backward.h"

namespace lla::cuda::scalar_gate {

namespace {

// What a block works on. In shared memory, as what all threads hold alike would cost registers all the way.
struct Task {
  Walk walk;
  ChunkSpan span;
  int64_t place, chunk, head, part;
  uint64_t past;
  float scale;
  bool first_of_part;  // sums of the part begin with this head
  bool reads, full;    // has rows of the call; makes a node
  ChunkRows queries, keys, values, dys;

  __device__ Task(const Backward& a, const Walk& of, const ChunkSpan& rows, int64_t place_, int64_t chunk_, int64_t head_,
                  int64_t part_, bool first)
      : walk(of),
        span(rows),
        place(place_),
        chunk(chunk_),
        head(head_),
        part(part_),
        past(past_of(a.in.geometry, of.range.first, chunk_)),
        scale(static_cast<float>(a.in.shape.scale)),
        first_of_part(first),
        reads(rows.lo < rows.hi),
        full(of.makes(chunk_)),
        queries(call_rows(a.in, of.sequence, rows, a.in.q, a.in.shape.group_of(head_))),
        keys(key_rows(a.in, of.sequence, rows, head_)),
        values(value_rows(a.in, of.sequence, rows, head_)),
        dys(call_rows(a.in, of.sequence, rows, a.dy, head_)) {}

  // Whether local row r < span.lo is one of the history's.
  __device__ bool is_old(int r) const {
    const SlotImage& history = walk.sequence.history;
    return history.tail >= 0 && span.begin + r >= history.start;
  }
  // Ring index of local row r in the tail of a gradient.
  __device__ int64_t ring(const Backward& a, const SlotImage& image, int r) const {
    return (image.tail_origin + (span.begin + r) % a.in.shape.grain) % a.gradient.tail_layout.capacity;
  }
  // Whether the final state's gradient has local row r in its tail.
  __device__ bool is_final(const Backward& a, int r) const {
    const SlotImage& final = walk.sequence.final_gradient;
    return final.tail >= 0 && chunk >= final_chunks(a.in, walk.sequence) && r < span.hi && span.begin + r >= final.start;
  }
};

struct ChunkShared {
  float weight_gradient[64 * kAlong];  // [i][s]: gradient of q_i . k_s
  float weight[64 * kAcross];          // [i][s]: with which row i reads v_s, without the write strength
  float tile[3][64 * kAcross];
  ChunkDecays decays;  // row factors times scale
  float lambda[7][64];
  float level_read[7][2][64];  // of a row at a level: sum of dy . v with all factors but λ; by halves of columns
  float column_sum[2][64];     // of a column without the diagonal and the write strength; by halves of rows
  float leaf_dot[2][64];       // k . (gradient of the leaf) v, by halves of columns
  float diagonal[64];
  Past past;
  alignas(16) char task[sizeof(Task)];
  float dynamic[1];  // [entries][64] weights, then [entries][2][64] products of queries with nodes and dy

  __device__ float* weights() { return dynamic; }
  __device__ float* products(const Backward& a) { return dynamic + a.in.most_entries * 64; }
};

size_t chunk_bytes(const Backward& a) { return sizeof(ChunkShared) + static_cast<size_t>(a.in.most_entries) * 3 * 64 * 4; }

// Like load_tile(), with the description of the rows in shared memory: it would cost registers all the way otherwise.
__device__ __forceinline__ void load_rows(float* tile, int stride, int64_t column, int64_t columns, const ChunkRows& rows) {
  const ChunkRows copy = rows;
  load_tile(tile, stride, column, columns, copy);
}

// Sums over rows, without those that f leaves out: put(half of the rows, column, sum).
template <class Value, class Put>
__device__ __forceinline__ void column_sums(TileSum& tile, Value value, Put put) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = 32 * (warp / 2) + lane / 4, column = 32 * (warp % 2) + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          sum += value(row + 16 * i + 8 * half, column + 8 * j + q, tile.c[i][j][2 * half + q]);
      sum += __shfl_xor_sync(kAllLanes, sum, 4);
      sum += __shfl_xor_sync(kAllLanes, sum, 8);
      sum += __shfl_xor_sync(kAllLanes, sum, 16);
      if (lane / 4 == 0) put(warp / 2, column + 8 * j + q, sum);
    }
}

__device__ __forceinline__ void fill_tables(const Backward& a, const Task& t, ChunkShared& shared) {
  const Inputs& in = a.in;
  if (threadIdx.x < 32) fill_decays(in, t.walk.sequence, t.span, t.head, &shared.decays);
  if (threadIdx.x / 32 == 1) list_past(in, t.walk, t.chunk, t.head, t.past, &shared.past);
  __syncthreads();
  const int r = threadIdx.x % 64, half = threadIdx.x / 64;
  const bool live = r >= t.span.lo && r < t.span.hi;
  const void* row =
      live && in.shape.levels > 0 ? in.lambda.at(t.walk.sequence.index, t.span.row(t.walk.sequence, r), t.head) : nullptr;
  for (int l = half; l <= 6; l += 2) {
    const bool read = live && (l == 0 || ((r >> (l - 1)) & 1));
    shared.lambda[l][r] = !read ? 0 : row ? load_element(row, in.lambda.dtype, in.shape.column(l)) : 1;
    if (l > 0) shared.decays.row[l][r] *= t.scale;
    shared.level_read[l][0][r] = shared.level_read[l][1][r] = 0;
  }
  shared.leaf_dot[half][r] = shared.column_sum[half][r] = 0;
  if (half == 0) shared.diagonal[r] = 0;
  const int entries = t.reads ? __popcll(t.past) : 0;
  for (int e = half; e < entries; e += 2) {
    shared.weights()[e * 64 + r] = a.weight_rows(t.place, t.head, e)[r];
    shared.products(a)[e * 128 + r] = shared.products(a)[e * 128 + 64 + r] = 0;
  }
}

// The products of the chunk's rows with each other, forward and backward.
template <bool kExact>
__device__ __forceinline__ void fill_products(const Backward& a, const Task& t, ChunkShared& shared) {
  const MixerShape& shape = a.in.shape;
  TileSum product;
  const auto multiply_rows = [&](int64_t columns, const ChunkRows& left, const ChunkRows& right) {
    product.clear();
    for (int64_t c0 = 0; c0 < columns; c0 += kTile) {
      load_rows(shared.tile[0], kAlong, c0, columns, left);
      load_rows(shared.tile[1], kAlong, c0, columns, right);
      __syncthreads();
      multiply<kExact>(
          product, depth_of(columns - c0), [&](int m, int k) { return shared.tile[0][m * kAlong + k]; },
          [&](int k, int n) { return shared.tile[1][n * kAlong + k]; });
      __syncthreads();
    }
  };
  const auto position = [&](int i, int s) { return i == s ? 0 : local_level(i, s); };
  multiply_rows(shape.key_dim, t.queries, t.keys);
  // Every thread finds its own elements again below.
  product.each([&](int i, int s, float& x) { shared.weight[i * kAcross + s] = x; });
  multiply_rows(shape.value_dim, t.dys, t.values);
  product.each([&](int i, int s, float& x) {
    float base = 0, lambda = 0;
    if (i >= s) {
      const int l = position(i, s);
      base = l == 0 ? t.scale : shared.decays.row[l][i] * shared.decays.key[l][s];
      lambda = shared.lambda[l][i];
    }
    const float match = shared.weight[i * kAcross + s], value = x;
    shared.weight_gradient[i * kAlong + s] = lambda * base * shared.decays.write[s] * value;
    shared.weight[i * kAcross + s] = lambda * base * match;
    x = i >= s ? base * match * value : 0;
    if (i == s) shared.diagonal[i] = lambda * x;
  });
#pragma unroll 1
  for (int l = 0; l <= 6; ++l) {
    product.row_sums([&](int i, int s, float x) { return i >= s && position(i, s) == l ? x * shared.decays.write[s] : 0; },
                     [&](int i, int half, float sum) { shared.level_read[l][half][i] = sum; });
  }
  column_sums(
      product, [&](int i, int s, float x) { return i > s ? x * shared.lambda[local_level(i, s)][i] : 0; },
      [&](int half, int s, float sum) { shared.column_sum[half][s] = sum; });
  __syncthreads();
}

// Adds 64 x 64 elements to the sums of a part.
__device__ __forceinline__ void add_to_part(const Backward& a, const Task& t, float* sums, int64_t k0, TileSum& sum) {
  const MixerShape& shape = a.in.shape;
  const int rows = a.in.geometry.chunk.rows;
  const int64_t places = a.in.geometry.places.count(a.in.batch.total_rows, a.in.batch.count);
  float* out = sums + ((t.part * places + t.place) * rows) * shape.key_dim + k0;
  sum.each([&](int row, int column, float& x) {
    if (row >= rows || k0 + column >= shape.key_dim) return;
    float* at = out + row * shape.key_dim + column;
    *at = t.first_of_part ? x : *at + x;
  });
}

template <bool kExact>
__device__ __forceinline__ void query_gradients(const Backward& a, const Task& t, ChunkShared& shared) {
  const Inputs& in = a.in;
  const MixerShape& shape = in.shape;
  bool dy_there = false;
  for (int64_t k0 = 0; k0 < shape.key_dim; k0 += kTile) {
    TileSum sum;
    sum.clear();
    load_rows(shared.tile[0], kAcross, k0, shape.key_dim, t.keys);
    __syncthreads();
    multiply<kExact>(
        sum, depth_of(t.span.hi), [&](int m, int k) { return shared.weight_gradient[m * kAlong + k]; },
        [&](int k, int n) { return shared.tile[0][k * kAcross + n]; });
    __syncthreads();
    load_rows(shared.tile[0], kAlong, k0, shape.key_dim, t.queries);
    int entry = 0;
    for (uint64_t left = t.past; left; left &= left - 1, ++entry) {
      const NodeSource& node = shared.past.node[__ffsll(static_cast<long long>(left)) - 1];
      if (!node.data) continue;
      TileSum product;
      product.clear();
      for (int64_t v0 = 0; v0 < shape.value_dim; v0 += kTile) {
        if (!dy_there) load_rows(shared.tile[1], kAlong, v0, shape.value_dim, t.dys);
        dy_there = shape.value_dim <= kTile;
        load_node_tile(in, shared.tile[2], kAlong, node, k0, v0);
        __syncthreads();
        multiply<kExact>(
            product, depth_of(shape.value_dim - v0), [&](int m, int k) { return shared.tile[1][m * kAlong + k]; },
            [&](int k, int n) { return shared.tile[2][n * kAlong + k]; });
        __syncthreads();
      }
      product.row_sums([&](int i, int c, float x) { return x * shared.tile[0][i * kAlong + c]; },
                       [&](int i, int half, float x) { shared.products(a)[entry * 128 + half * 64 + i] += x; });
      const RowFactors factors(shared.weights() + entry * 64);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) sum.c[i][j][q] += factors.factor[2 * i + q / 2] * product.c[i][j][q];
    }
    __syncthreads();
    if (a.dq.present()) add_to_part(a, t, a.scratch.dq, k0, sum);
  }
}

template <bool kExact>
__device__ __forceinline__ void key_gradients(const Backward& a, const Task& t, ChunkShared& shared) {
  const Inputs& in = a.in;
  const MixerShape& shape = in.shape;
  NodeSource leaf;
  if (t.full) leaf.data = node_at(in, a.scratch.grads, t.walk.slot_of(t.chunk), t.head);
  leaf.row = in.geometry.node_row;
  bool values_there = false;
  for (int64_t k0 = 0; k0 < shape.key_dim; k0 += kTile) {
    TileSum sum;
    sum.clear();
    if (t.reads) {
      load_rows(shared.tile[0], kAcross, k0, shape.key_dim, t.queries);
      __syncthreads();
      multiply<kExact>(
          sum, depth_of(t.span.hi), [&](int m, int k) { return shared.weight_gradient[k * kAlong + m]; },
          [&](int k, int n) { return shared.tile[0][k * kAcross + n]; });
      __syncthreads();
    }
    if (t.full) {
      TileSum product;
      product.clear();
      load_rows(shared.tile[0], kAlong, k0, shape.key_dim, t.keys);
      for (int64_t v0 = 0; v0 < shape.value_dim; v0 += kTile) {
        if (!values_there) load_rows(shared.tile[1], kAlong, v0, shape.value_dim, t.values);
        values_there = shape.value_dim <= kTile;
        load_node_tile(in, shared.tile[2], kAlong, leaf, k0, v0);
        __syncthreads();
        multiply<kExact>(
            product, depth_of(shape.value_dim - v0), [&](int m, int k) { return shared.tile[1][m * kAlong + k]; },
            [&](int k, int n) { return shared.tile[2][n * kAlong + k]; });
        __syncthreads();
      }
      product.row_sums([&](int s, int c, float x) { return x * shared.tile[0][s * kAlong + c]; },
                       [&](int s, int half, float x) { shared.leaf_dot[half][s] += x; });
      const RowFactors end(shared.decays.key[7]), write(shared.decays.write);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q)
            sum.c[i][j][q] += end.factor[2 * i + q / 2] * write.factor[2 * i + q / 2] * product.c[i][j][q];
      __syncthreads();
    }
    add_to_part(a, t, a.scratch.dk, k0, sum);
  }
}

template <bool kExact>
__device__ __forceinline__ void value_gradients(const Backward& a, const Task& t, ChunkShared& shared) {
  const Inputs& in = a.in;
  const MixerShape& shape = in.shape;
  NodeSource leaf;
  if (t.full) leaf.data = node_at(in, a.scratch.grads, t.walk.slot_of(t.chunk), t.head);
  leaf.row = in.geometry.node_row;
  for (int64_t v0 = 0; v0 < shape.value_dim; v0 += kTile) {
    TileSum sum;
    sum.clear();
    if (t.reads) {
      load_rows(shared.tile[1], kAcross, v0, shape.value_dim, t.dys);
      __syncthreads();
      multiply<kExact>(
          sum, depth_of(t.span.hi), [&](int m, int k) { return shared.weight[k * kAcross + m]; },
          [&](int k, int n) { return shared.tile[1][k * kAcross + n]; });
    }
    for (int64_t k0 = 0; t.full && k0 < shape.key_dim; k0 += kTile) {
      load_rows(shared.tile[0], kAlong, k0, shape.key_dim, t.keys);
      load_node_tile(in, shared.tile[2], kAcross, leaf, k0, v0);
      __syncthreads();
      const RowFactors end(shared.decays.key[7]);
      multiply<kExact>(
          sum, depth_of(shape.key_dim - k0), [&](int m, int k) { return end(m) * shared.tile[0][m * kAlong + k]; },
          [&](int k, int n) { return shared.tile[2][k * kAcross + n]; });
      __syncthreads();
    }
    __syncthreads();
    sum.each([&](int row, int column, float& x) { shared.tile[1][row * kAlong + column] = shared.decays.write[row] * x; });
    __syncthreads();
    const int c = 4 * (threadIdx.x % 16);
    const SlotImage &initial = t.walk.sequence.initial_gradient, &final = t.walk.sequence.final_gradient;
    for (int r = threadIdx.x / 16; r < t.span.hi; r += 8) {
      const void* more = t.is_final(a, r) ? a.gradient.tail_v(final.tail, t.head, t.ring(a, final, r)) : nullptr;
      for (int i = 0; i < 4 && v0 + c + i < shape.value_dim; ++i) {
        const int64_t e = v0 + c + i;
        float x = shared.tile[1][r * kAlong + c + i];
        if (more) x += load_element(more, a.gradient.tail_layout.dtype, e);
        if (r >= t.span.lo) {
          if (a.dv.present())
            put_element(a.dv.at(t.walk.sequence.index, t.span.row(t.walk.sequence, r), t.head), a.dv.dtype, e, x,
                        a.dv.accumulate);
        } else if (initial.tail >= 0) {
          store_element(a.gradient.tail_v(initial.tail, t.head, t.ring(a, initial, r)), a.gradient.tail_layout.dtype, e,
                        t.is_old(r) ? x : 0);
        }
      }
    }
    __syncthreads();
  }
}

// λ and write strength, and the sums from which gates get theirs.
__device__ __forceinline__ void scalar_gradients(const Backward& a, const Task& t, ChunkShared& shared) {
  const Inputs& in = a.in;
  const Sequence& sequence = t.walk.sequence;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int entry = 0;
  if (t.reads) {
    for (uint64_t left = t.past; left; left &= left - 1, ++entry) {
      if (entry % 4 != warp) continue;
      const int level = __ffsll(static_cast<long long>(left)) - 1;
      float sum = 0;
      for (int r = lane; r < 64; r += 32) {
        const float* product = shared.products(a) + entry * 128;
        sum += shared.weights()[entry * 64 + r] * (product[r] + product[64 + r]);
      }
      sum = warp_sum(sum);
      if (lane == 0) *a.reads_at(t.place, a.index_of(level), t.head) = sum;
    }
  }
  if (threadIdx.x < 64) {
    const int r = threadIdx.x;
    float read = 0;
    for (int l = 1; l <= 6; ++l) read += shared.lambda[l][r] * (shared.level_read[l][0][r] + shared.level_read[l][1][r]);
    for (int e = 0; t.reads && e < __popcll(t.past); ++e) {
      read += shared.weights()[e * 64 + r] * (shared.products(a)[e * 128 + r] + shared.products(a)[e * 128 + 64 + r]);
    }
    const float leaf = shared.decays.key[7][r] * (shared.leaf_dot[0][r] + shared.leaf_dot[1][r]);
    const float others = shared.column_sum[0][r] + shared.column_sum[1][r] + leaf;
    a.scratch.rows[(t.place * in.shape.heads + t.head) * 64 + r] = read - shared.decays.write[r] * others;
    if (r < t.span.hi) {
      const SlotImage &initial = sequence.initial_gradient, &final = sequence.final_gradient;
      float x = others + shared.diagonal[r];
      if (t.is_final(a, r)) x += load_element(a.gradient.tail_write(final.tail, t.head, t.ring(a, final, r)), LLA_F32, 0);
      if (r >= t.span.lo) {
        if (a.dwrite.present())
          put_element(a.dwrite.at(sequence.index, t.span.row(sequence, r), t.head), a.dwrite.dtype, 0, x,
                      a.dwrite.accumulate);
      } else if (initial.tail >= 0) {
        store_element(a.gradient.tail_write(initial.tail, t.head, t.ring(a, initial, r)), LLA_F32, 0, t.is_old(r) ? x : 0);
      }
    }
  }
  if (!t.reads || !a.dlambda.present()) return;
  const int levels = static_cast<int>(in.shape.levels), rows = t.span.hi - t.span.lo;
  for (int i = threadIdx.x; i < rows * levels; i += kThreads) {
    const int r = t.span.lo + i / levels, column = i % levels;
    float sum = 0;
    for (int l = 0; l <= 6; ++l) {
      if ((l == 0 || ((r >> (l - 1)) & 1)) && in.shape.column(l) == column)
        sum += shared.level_read[l][0][r] + shared.level_read[l][1][r];
    }
    int e = 0;
    for (uint64_t left = t.past; left; left &= left - 1, ++e) {
      const int level = __ffsll(static_cast<long long>(left)) - 1;
      if (entry_column(in, level) != column || !shared.past.node[level].data) continue;
      const float weight = t.scale * shared.decays.row[7][r] * decay_of(shared.past.newer[level]);
      sum += weight * (shared.products(a)[e * 128 + r] + shared.products(a)[e * 128 + 64 + r]);
    }
    put_element(a.dlambda.at(sequence.index, t.span.row(sequence, r), t.head), a.dlambda.dtype, column, sum,
                a.dlambda.accumulate);
  }
}

// One block: one chunk, the heads of one part of a group one after the other.
template <bool kExact>
__global__ void __launch_bounds__(kThreads, 2) chunk_gradients(const __grid_constant__ Backward a, int64_t tasks) {
  ChunkShared& shared = *reinterpret_cast<ChunkShared*>(shared_memory());
  const Inputs& in = a.in;
  const int64_t parts_of_group = a.parts / in.shape.groups;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t part = task % a.parts;
    int64_t place;
    const int64_t b = in.geometry.places.find(in.batch, task / a.parts, &place);
    const Walk walk(in, b);
    const int64_t order = place - in.geometry.places.first(in.batch, b), chunk = walk.range.first + order;
    if (order >= walk.range.count) continue;
    const ChunkSpan span(walk.sequence, in.geometry.chunk, chunk);
    if (span.lo >= span.hi && walk.sequence.initial_gradient.tail < 0) continue;
    const int64_t member = part % parts_of_group * a.bundle, end = min(member + a.bundle, a.members);
    for (int64_t i = member; i < end; ++i) {
      const int64_t head = in.head_of(part / parts_of_group * a.members + i);
      if (threadIdx.x == 0) new (shared.task) Task(a, walk, span, place, chunk, head, part, i == member);
      __syncthreads();
      const Task& t = *reinterpret_cast<const Task*>(shared.task);
      fill_tables(a, t, shared);
      __syncthreads();
      if (t.reads) fill_products<kExact>(a, t, shared);
      if (a.dv.present() || walk.sequence.initial_gradient.tail >= 0) value_gradients<kExact>(a, t, shared);
      if (t.reads) query_gradients<kExact>(a, t, shared);
      key_gradients<kExact>(a, t, shared);
      __syncthreads();
      scalar_gradients(a, t, shared);
      __syncthreads();
    }
  }
}

}  // namespace

int32_t launch_chunk_gradients(const Backward& a, bool exact, void* stream) {
  const int64_t tasks = a.in.geometry.places.tasks(a.in.batch) * a.parts;
  return launch(exact ? chunk_gradients<true> : chunk_gradients<false>, tasks, kThreads, chunk_bytes(a), stream, a, tasks);
}

int32_t load_chunk_gradients() {
  const int32_t status = load_kernel(chunk_gradients<true>);
  return status == LLA_OK ? load_kernel(chunk_gradients<false>) : status;
}

}  // namespace lla::cuda::scalar_gate
