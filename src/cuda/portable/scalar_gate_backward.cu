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
  bool first;          // of the heads that the block works on: no rows are there yet
  bool first_of_part;  // sums of the part begin with this head
  bool reads, full;    // has rows of the call; makes a node
  ChunkRows queries, keys, values, dys;

  __device__ Task(const Backward& a, const Walk& of, const ChunkSpan& rows, int64_t place_, int64_t chunk_, int64_t head_,
                  int64_t part_, bool first_)
      : walk(of),
        span(rows),
        place(place_),
        chunk(chunk_),
        head(head_),
        part(part_),
        past(past_of(a.in.geometry, of.range.first, chunk_)),
        scale(static_cast<float>(a.in.shape.scale)),
        first(first_),
        first_of_part(first_ && !a.resumes_part),
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

// Tiles of queries and keys that stay while the block works on all its heads, if the rows are not wider.
template <bool kExact>
constexpr int kKept = kExact ? 1 : 2;

template <bool kExact>
struct ChunkShared {
  Tile<kExact> query[kKept<kExact>], key[kKept<kExact>];
  Tile<kExact> dy, value;
  Tile<kExact> weight_gradient;  // [i][s]: gradient of q_i . k_s
  Tile<kExact> node[2];          // [1]: first with which row i reads v_s, without the write strength
  ChunkDecays decays;            // row factors times scale
  float lambda[7][64];
  float level_read[7][2][64];  // of a row at a level: sum of dy . v with all factors but λ; by halves of columns
  float column_sum[2][64];     // of a column without the diagonal and the write strength; by halves of rows
  float leaf_dot[2][64];       // k . (gradient of the leaf) v, by halves of columns
  float diagonal[64];
  float end_write[64];  // factors of the leaf's rows
  Past past;
  alignas(16) char task[sizeof(Task)];
  float dynamic[1];  // [entries][64] weights, then [entries][2][64] products of queries with nodes and dy

  __device__ float* weights() { return dynamic; }
  __device__ float* products(const Backward& a) { return dynamic + a.in.most_entries * 64; }
};

size_t chunk_bytes(const Backward& a, bool exact) {
  return (exact ? sizeof(ChunkShared<true>) : sizeof(ChunkShared<false>)) +
         static_cast<size_t>(a.in.most_entries) * 3 * 64 * 4;
}

// With the description of the rows in shared memory: it would cost registers all the way otherwise.
template <bool kExact>
__device__ __forceinline__ void fill_rows(Tile<kExact>& tile, int64_t column, int64_t columns, const ChunkRows& rows) {
  const ChunkRows copy = rows;
  fill_tile<kExact>(tile, column, columns, copy);
}

// The tile of queries or keys from column k0 on; complete after arrive(). `filled`: all that can stay is there.
template <bool kExact>
__device__ __forceinline__ Tile<kExact>& kept_tile(Tile<kExact> (&tiles)[kKept<kExact>], int64_t k0, int64_t columns,
                                                   const ChunkRows& rows, bool filled) {
  const bool stays = columns <= kTile * kKept<kExact>;
  Tile<kExact>& tile = tiles[stays ? k0 / kTile : 0];
  if (!stays || !filled) fill_rows<kExact>(tile, k0, columns, rows);
  return tile;
}

// Sums over rows: put(half of the rows, column, sum).
template <class Put>
__device__ __forceinline__ void column_sums(const TileSum& tile, Put put) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = 32 * (warp % 2) + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      float sum = tile.c[0][j][q] + tile.c[0][j][2 + q] + tile.c[1][j][q] + tile.c[1][j][2 + q];
      sum += __shfl_xor_sync(kAllLanes, sum, 4);
      sum += __shfl_xor_sync(kAllLanes, sum, 8);
      sum += __shfl_xor_sync(kAllLanes, sum, 16);
      if (lane / 4 == 0) put(warp / 2, column + 8 * j + q, sum);
    }
}

template <bool kExact>
__device__ __forceinline__ void fill_tables(const Backward& a, const Task& t, ChunkShared<kExact>& shared) {
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
  if (half == 0) {
    shared.diagonal[r] = 0;
    shared.end_write[r] = shared.decays.key[7][r] * shared.decays.write[r];
  }
  const int entries = t.reads ? __popcll(t.past) : 0;
  for (int e = half; e < entries; e += 2) {
    shared.weights()[e * 64 + r] = a.weight_rows(t.place, t.head, e)[r];
    shared.products(a)[e * 128 + r] = shared.products(a)[e * 128 + 64 + r] = 0;
  }
}

// The products of the chunk's rows with each other, forward and backward.
template <bool kExact>
__device__ __forceinline__ void fill_products(const Backward& a, const Task& t, ChunkShared<kExact>& shared) {
  const MixerShape& shape = a.in.shape;
  const bool filled = !t.first;
  TileSum match, product;
  match.clear();
  product.clear();
  for (int64_t k0 = 0; k0 < shape.key_dim; k0 += kTile) {
    const Tile<kExact>& query = kept_tile<kExact>(shared.query, k0, shape.key_dim, t.queries, filled);
    const Tile<kExact>& key = kept_tile<kExact>(shared.key, k0, shape.key_dim, t.keys, filled);
    arrive();
    multiply_tiles<kExact, Layout::Along, Layout::Along>(match, depth_of(shape.key_dim - k0), query, key);
    if (shape.key_dim > kTile) __syncthreads();
  }
  for (int64_t v0 = 0; v0 < shape.value_dim; v0 += kTile) {
    if (v0 > 0) {  // the first ones are there
      fill_rows<kExact>(shared.dy, v0, shape.value_dim, t.dys);
      fill_rows<kExact>(shared.value, v0, shape.value_dim, t.values);
      arrive();
    }
    multiply_tiles<kExact, Layout::Along, Layout::Along>(product, depth_of(shape.value_dim - v0), shared.dy, shared.value);
    if (shape.value_dim > kTile) __syncthreads();
  }
  // Level sums of a thread's four rows: inside blocks of 8 rows, and levels 4 and 5 of blocks (6 for the lower left warp).
  constexpr int kSums = 6;
  float level_sum[4][kSums];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int l = 0; l < kSums; ++l) level_sum[i][l] = 0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = 32 * (warp / 2) + lane / 4, column0 = 32 * (warp % 2) + 2 * (lane % 4);
#pragma unroll
  for (int block = 0; block < 4; ++block)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float gradient[2], weight[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int i = row0 + 8 * block, s = column0 + 8 * j + q;
        const int far = block > j ? ((block ^ j) > 1 ? 5 : 4) : -1;
        int l = far;
        if (block == j) l = i % 8 >= s % 8 ? local_level(i % 8, s % 8) : -1;
        if (warp == 2) l = 6;
        if (warp == 1) l = -1;
        float& x = product.c[block / 2][j][block % 2 * 2 + q];
        const float value = x, matched = match.c[block / 2][j][block % 2 * 2 + q];
        gradient[q] = weight[q] = x = 0;
        if (l < 0) continue;
        const float base = l == 0 ? t.scale : shared.decays.row[l][i] * shared.decays.key[l][s];
        const float lambda = shared.lambda[l][i], write = shared.decays.write[s];
        gradient[q] = lambda * base * write * value;
        weight[q] = lambda * base * matched;
        const float read = base * matched * value;
        x = l == 0 ? 0 : lambda * read;
        if (l == 0) shared.diagonal[i] = lambda * read;
        if (block == j && warp != 2) {
#pragma unroll
          for (int level = 0; level < 4; ++level) level_sum[block][level] += l == level ? read * write : 0;
        } else {
          level_sum[block][block > j ? far : 5] += read * write;
        }
      }
      write_pair<kExact>(shared.weight_gradient, row0 + 8 * block, column0 + 8 * j, gradient[0], gradient[1]);
      write_pair<kExact>(shared.node[1], row0 + 8 * block, column0 + 8 * j, weight[0], weight[1]);
    }
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (warp == 1) continue;
    if (warp == 2) {
      float sum = level_sum[block][4] + level_sum[block][5];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (lane % 4 == 0) shared.level_read[6][0][row0 + 8 * block] = sum;
      continue;
    }
#pragma unroll
    for (int l = 0; l < kSums; ++l) {
      float sum = level_sum[block][l];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (lane % 4 == 0) shared.level_read[l][warp % 2][row0 + 8 * block] = sum;
    }
  }
  column_sums(product, [&](int half, int s, float sum) { shared.column_sum[half][s] = sum; });
  __syncthreads();
}

// 64 x 64 elements of the sums of a part over its heads. Sums of whole chunks of 64 rows lie in the order of the threads.
__device__ __forceinline__ float* part_of(const Backward& a, const Task& t, float* sums, int64_t k0) {
  const int64_t places = a.in.geometry.places.count(a.in.batch.total_rows, a.in.batch.count);
  float* part = sums + (t.part * places + t.place) * a.part_size();
  return a.in.geometry.chunk.rows == kTile ? part + k0 * kTile + 4 * threadIdx.x : part + k0;
}
__device__ __forceinline__ void load_part(const Backward& a, const Task& t, float* sums, int64_t k0, TileSum& sum) {
  sum.clear();
  if (t.first_of_part) return;
  const float* from = part_of(a, t, sums, k0);
  if (a.in.geometry.chunk.rows == kTile) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(from + 4 * kThreads * i);
      float(&c)[4] = sum.c[i / 4][i % 4];
      c[0] = x.x;
      c[1] = x.y;
      c[2] = x.z;
      c[3] = x.w;
    }
    return;
  }
  const int64_t width = a.in.shape.key_dim;
  sum.each([&](int row, int column, float& x) {
    if (row < a.in.geometry.chunk.rows && k0 + column < width) x = from[row * width + column];
  });
}
__device__ __forceinline__ void store_part(const Backward& a, const Task& t, float* sums, int64_t k0, TileSum& sum) {
  float* to = part_of(a, t, sums, k0);
  if (a.in.geometry.chunk.rows == kTile) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float(&c)[4] = sum.c[i / 4][i % 4];
      *reinterpret_cast<float4*>(to + 4 * kThreads * i) = make_float4(c[0], c[1], c[2], c[3]);
    }
    return;
  }
  const int64_t width = a.in.shape.key_dim;
  sum.each([&](int row, int column, float& x) {
    if (row < a.in.geometry.chunk.rows && k0 + column < width) to[row * width + column] = x;
  });
}

template <bool kExact>
__device__ __forceinline__ void query_gradients(const Backward& a, const Task& t, ChunkShared<kExact>& shared) {
  const Inputs& in = a.in;
  const MixerShape& shape = in.shape;
  const bool wide = shape.value_dim > kTile;
  for (int64_t k0 = 0; k0 < shape.key_dim; k0 += kTile) {
    uint64_t left = t.past;
    int entry = -1, side = 0;
    const NodeSource* source = nullptr;
    // The next entry that is there; its first tile is filled.
    const auto fill_next = [&](int to) {
      for (; left; left &= left - 1) {
        source = &shared.past.node[__ffsll(static_cast<long long>(left)) - 1];
        ++entry;
        if (!source->data) continue;
        left &= left - 1;
        if (!wide) fill_node_tile<kExact>(in, shared.node[to], *source, k0, 0);
        return entry;
      }
      return -1;
    };
    int next = fill_next(0);
    const Tile<kExact>& query = kept_tile<kExact>(shared.query, k0, shape.key_dim, t.queries, true);
    const Tile<kExact>& key = kept_tile<kExact>(shared.key, k0, shape.key_dim, t.keys, true);
    TileSum sum;
    load_part(a, t, a.scratch.dq, k0, sum);
    arrive();
    multiply_tiles<kExact, Layout::Along, Layout::Across>(sum, depth_of(t.span.hi), shared.weight_gradient, key);
    while (next >= 0) {
      const int now = next;
      TileSum product;
      product.clear();
      if (!wide) {
        next = fill_next(side ^ 1);
        multiply_tiles<kExact, Layout::Along, Layout::Along>(product, depth_of(shape.value_dim), shared.dy,
                                                             shared.node[side]);
      } else {
        const NodeSource& node = *source;
        for (int64_t v0 = 0; v0 < shape.value_dim; v0 += kTile) {
          fill_rows<kExact>(shared.dy, v0, shape.value_dim, t.dys);
          fill_node_tile<kExact>(in, shared.node[0], node, k0, v0);
          arrive();
          multiply_tiles<kExact, Layout::Along, Layout::Along>(product, depth_of(shape.value_dim - v0), shared.dy,
                                                               shared.node[0]);
          __syncthreads();
        }
        next = fill_next(0);
      }
      row_products<kExact>(product, query,
                           [&](int i, int half, float x) { shared.products(a)[now * 128 + half * 64 + i] += x; });
      add_rows_scaled(sum, product, shared.weights() + now * 64);
      arrive();
      side ^= 1;
    }
    __syncthreads();
    if (a.dq.present()) store_part(a, t, a.scratch.dq, k0, sum);
  }
}

template <bool kExact>
__device__ __forceinline__ NodeSource leaf_of(const Backward& a, const Task& t) {
  NodeSource leaf;
  if (t.full) leaf.data = node_at(a.in, a.scratch.grads, t.walk.slot_of(t.chunk), t.head);
  leaf.dtype = a.in.geometry.scratch_dtype;
  leaf.row = a.in.geometry.node_row;
  return leaf;
}

template <bool kExact>
__device__ __forceinline__ void key_gradients(const Backward& a, const Task& t, ChunkShared<kExact>& shared) {
  const Inputs& in = a.in;
  const MixerShape& shape = in.shape;
  const NodeSource leaf = leaf_of<kExact>(a, t);
  const bool wide = shape.value_dim > kTile;
  if (t.full && !wide) fill_node_tile<kExact>(in, shared.node[0], leaf, 0, 0);
  int side = 0;
  for (int64_t k0 = 0; k0 < shape.key_dim; k0 += kTile, side ^= 1) {
    const bool kept = t.reads;  // by fill_products
    const Tile<kExact>& key = kept_tile<kExact>(shared.key, k0, shape.key_dim, t.keys, kept);
    const Tile<kExact>* query = &key;
    if (t.reads) query = &kept_tile<kExact>(shared.query, k0, shape.key_dim, t.queries, true);
    TileSum sum;
    load_part(a, t, a.scratch.dk, k0, sum);
    arrive();
    if (t.full && !wide && k0 + kTile < shape.key_dim)
      fill_node_tile<kExact>(in, shared.node[side ^ 1], leaf, k0 + kTile, 0);
    if (t.full) {
      TileSum product;
      product.clear();
      if (!wide) {
        multiply_tiles<kExact, Layout::Along, Layout::Along>(product, depth_of(shape.value_dim), shared.value,
                                                             shared.node[side]);
      } else {
        for (int64_t v0 = 0; v0 < shape.value_dim; v0 += kTile) {
          fill_rows<kExact>(shared.value, v0, shape.value_dim, t.values);
          fill_node_tile<kExact>(in, shared.node[0], leaf, k0, v0);
          arrive();
          multiply_tiles<kExact, Layout::Along, Layout::Along>(product, depth_of(shape.value_dim - v0), shared.value,
                                                               shared.node[0]);
          __syncthreads();
        }
      }
      row_products<kExact>(product, key, [&](int s, int half, float x) { shared.leaf_dot[half][s] += x; });
      add_rows_scaled(sum, product, shared.end_write);
    }
    if (t.reads)
      multiply_tiles<kExact, Layout::Across, Layout::Across>(sum, depth_of(t.span.hi), shared.weight_gradient, *query);
    store_part(a, t, a.scratch.dk, k0, sum);
    __syncthreads();
  }
}

template <bool kExact>
__device__ __forceinline__ void value_gradients(const Backward& a, const Task& t, ChunkShared<kExact>& shared) {
  const Inputs& in = a.in;
  const MixerShape& shape = in.shape;
  const NodeSource leaf = leaf_of<kExact>(a, t);
  for (int64_t v0 = 0; v0 < shape.value_dim; v0 += kTile) {
    TileSum sum;
    sum.clear();
    if (t.reads && shape.value_dim > kTile) fill_rows<kExact>(shared.dy, v0, shape.value_dim, t.dys);
    for (int64_t k0 = 0; t.full && k0 < shape.key_dim; k0 += kTile) {
      const Tile<kExact>& key = kept_tile<kExact>(shared.key, k0, shape.key_dim, t.keys, t.reads);
      fill_node_tile<kExact>(in, shared.node[0], leaf, k0, v0);
      arrive();
      multiply_tiles<kExact, Layout::Along, Layout::Across>(sum, depth_of(shape.key_dim - k0), key, shared.node[0]);
      __syncthreads();
    }
    TileSum all;
    all.clear();
    add_rows_scaled(all, sum, shared.decays.key[7]);
    if (t.reads) {
      arrive();
      multiply_tiles<kExact, Layout::Across, Layout::Across>(all, depth_of(t.span.hi), shared.node[1], shared.dy);
    }
    const SlotImage &initial = t.walk.sequence.initial_gradient, &final = t.walk.sequence.final_gradient;
    const int columns = static_cast<int>(min(shape.value_dim - v0, int64_t{64}));
    const Sequence& sequence = t.walk.sequence;
    char* base = nullptr;
    int64_t bytes = 0;
    if (a.dv.present()) {
      base = static_cast<char*>(a.dv.at(sequence.index, t.span.row(sequence, 0), t.head)) + v0 * dtype_size(a.dv.dtype);
      bytes = a.dv.row_stride * dtype_size(a.dv.dtype);
    }
    bool plain = false;
    if constexpr (!kExact) {
      plain = base && a.dv.dtype == LLA_BF16 && !a.dv.accumulate && columns % 8 == 0 && t.span.lo == 0 && final.tail < 0 &&
              is_aligned16(base, bytes);
      if (plain) {
        each_pair(all, [&](int r, int c, float x, float y) {
          const float write = shared.decays.write[r];
          write_pair<false>(shared.node[0], r, c, write * x, write * y);
        });
        __syncthreads();
        store_tile(shared.node[0], base, bytes, 0, t.span.hi, columns);
      }
    }
    if (!plain) {
      each_pair(all, [&](int r, int c, float x, float y) {
        if (r >= t.span.hi) return;
        const void* more = t.is_final(a, r) ? a.gradient.tail_v(final.tail, t.head, t.ring(a, final, r)) : nullptr;
#pragma unroll 1
        for (int i = 0; i < 2 && c + i < columns; ++i) {
          const int64_t e = v0 + c + i;
          float value = shared.decays.write[r] * x;
          x = y;
          if (more) value += load_element(more, a.gradient.tail_layout.dtype, e);
          if (r >= t.span.lo) {
            if (base) put_element(base + r * bytes, a.dv.dtype, c + i, value, a.dv.accumulate);
          } else if (initial.tail >= 0) {
            store_element(a.gradient.tail_v(initial.tail, t.head, t.ring(a, initial, r)), a.gradient.tail_layout.dtype, e,
                          t.is_old(r) ? value : 0);
          }
        }
      });
    }
    __syncthreads();
  }
}

// λ and write strength, and the sums from which gates get theirs.
template <bool kExact>
__device__ __forceinline__ void scalar_gradients(const Backward& a, const Task& t, ChunkShared<kExact>& shared) {
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
  auto& shared = *reinterpret_cast<ChunkShared<kExact>*>(shared_memory());
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
      fill_rows<kExact>(shared.dy, 0, in.shape.value_dim, t.dys);
      fill_rows<kExact>(shared.value, 0, in.shape.value_dim, t.values);
      fill_tables<kExact>(a, t, shared);
      arrive();
      if (t.reads) fill_products<kExact>(a, t, shared);
      if (a.dv.present() || walk.sequence.initial_gradient.tail >= 0) value_gradients<kExact>(a, t, shared);
      if (t.reads) query_gradients<kExact>(a, t, shared);
      key_gradients<kExact>(a, t, shared);
      __syncthreads();
      scalar_gradients<kExact>(a, t, shared);
      __syncthreads();
    }
  }
}

}  // namespace

int32_t launch_chunk_gradients(const Backward& a, bool exact, void* stream) {
  const int64_t tasks = a.in.geometry.places.tasks(a.in.batch) * a.parts;
  return launch(exact ? chunk_gradients<true> : chunk_gradients<false>, tasks, kThreads, chunk_bytes(a, exact), stream, a,
                tasks);
}

int32_t load_chunk_gradients() {
  const int32_t status = load_kernel(chunk_gradients<true>);
  return status == LLA_OK ? load_kernel(chunk_gradients<false>) : status;
}

}  // namespace lla::cuda::scalar_gate
