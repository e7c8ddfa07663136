// SPDX-License-Identifier: Apache-2.0
// What the kernels of the delta rule share: inputs, scratch, and the walk over the nodes of a chunk's past. Every full chunk
// makes a node (content N, transition Phi): S at its end = Phi S at its start + N. Nodes of 2^b chunks are joined in a tree.
#pragma once

#include "cuda/common/chunk.h"
#include "cuda/common/matrix.h"

namespace lla::cuda {

constexpr int64_t kDeltaMostDim = 512;  // key and value dimensions
constexpr int kDeltaLevels = 50;        // of nodes, in chunks
constexpr int64_t kDeltaSpills = 512;   // blocks with a place of their own, if a query does not fit into registers

// Everything that forward and backward read.
struct DeltaInputs {
  MixerShape shape;
  ChunkShape chunk;
  BatchView batch;
  View q, k, v, gate, write, lambda;
  SlotMemory state;
  int separate = 0;  // node levels of the state that are kept apart

  template <class Problem>
  explicit DeltaInputs(const Problem& p)
      : shape(p.shape),
        chunk(p.shape.grain),
        batch(p.batch),
        q(p.q),
        k(p.k),
        v(p.v),
        gate(p.gate),
        write(p.write),
        lambda(p.lambda),
        state(p.state),
        separate(p.shape.separate_levels()) {}
  LLA_HOST_DEVICE int64_t most_chunks() const { return chunk.most_chunks(batch.most_rows); }
  // Full chunks of one sequence, at most.
  LLA_HOST_DEVICE int64_t most_full() const { return (batch.most_rows + shape.grain - 1) / chunk.rows; }
  LLA_HOST_DEVICE bool absorbs() const { return shape.levels == 0 || shape.absorb; }
};

// Nodes and rows in scratch memory, in floats. Rows of matrices are `key_stride` or `value_stride` long.
struct DeltaScratch {
  static constexpr int32_t kType = LLA_F32;
  // A pass works on some heads only, so that the memory has a bound: heads first_head ... first_head + pass_heads - 1.
  int64_t heads = 0, first_head = 0, pass_heads = 0;
  int64_t key_dim = 0, key_stride = 0, value_stride = 0;
  // Content of the node that ends with a chunk: [slot][head][dk][value_stride]. A node takes the place of its right half,
  // which nobody reads but the node itself.
  float* content = nullptr;
  // Transitions of all levels: [level][slot >> level, and one more for each sequence][head][dk][key_stride].
  float* transition = nullptr;
  int64_t level_offset[kDeltaLevels] = {};
  float* query = nullptr;   // [row][head][key_stride]: what the nodes see of a query
  float* output = nullptr;  // [row][head][value_stride]: what a query reads inside its chunk; null: not wanted
  float* spill = nullptr;   // [block][64][key_stride + value_stride]

  LLA_HOST_DEVICE int64_t place(int64_t i, int64_t head) const { return i * heads + head - first_head; }
  LLA_HOST_DEVICE int64_t content_size() const { return key_dim * value_stride; }
  LLA_HOST_DEVICE int64_t transition_size() const { return key_dim * key_stride; }
  LLA_HOST_DEVICE float* content_at(int64_t slot, int64_t head) const {
    return content + place(slot, head) * content_size();
  }
  LLA_HOST_DEVICE float* transition_at(int level, int64_t slot, int64_t sequence, int64_t head) const {
    return transition + place(level_offset[level] + (slot >> level) + sequence, head) * transition_size();
  }
  // Numbers stand as they are.
  LLA_HOST_DEVICE float* content_scale_at(int64_t, int64_t) const { return nullptr; }
  LLA_HOST_DEVICE float* transition_scale_at(int, int64_t, int64_t, int64_t) const { return nullptr; }
  LLA_HOST_DEVICE float* query_at(int64_t row, int64_t head) const { return query + place(row, head) * key_stride; }
  LLA_HOST_DEVICE float* output_at(int64_t row, int64_t head) const { return output + place(row, head) * value_stride; }
};

// The chunks of one sequence and where their nodes lie.
struct DeltaSequence {
  const Sequence& sequence;
  ChunkRange range;
  int64_t slot;  // of the first chunk

  LLA_HOST_DEVICE DeltaSequence(const Sequence& s, const ChunkShape& chunk)
      : sequence(s), range(s, chunk), slot(chunk.first_slot(s)) {}
  LLA_HOST_DEVICE int64_t slot_of(int64_t last_chunk) const { return slot + last_chunk - range.first; }
  template <class Scratch>
  LLA_HOST_DEVICE auto content(const Scratch& scratch, int64_t end, int64_t head) const {
    return scratch.content_at(slot_of(end - 1), head);
  }
  template <class Scratch>
  LLA_HOST_DEVICE float* content_scale(const Scratch& scratch, int64_t end, int64_t head) const {
    return scratch.content_scale_at(slot_of(end - 1), head);
  }
  // Transition of the node of 2^level chunks that ends before chunk `end`, as far as it belongs to the call.
  template <class Scratch>
  LLA_HOST_DEVICE auto transition(const Scratch& scratch, int level, int64_t end, int64_t head) const {
    return scratch.transition_at(own_level(level, end), slot_of(end - 1), sequence.index, head);
  }
  template <class Scratch>
  LLA_HOST_DEVICE float* transition_scale(const Scratch& scratch, int level, int64_t end, int64_t head) const {
    return scratch.transition_scale_at(own_level(level, end), slot_of(end - 1), sequence.index, head);
  }
  LLA_HOST_DEVICE int own_level(int level, int64_t end) const {
    // A node that begins before the call has the transition of its right half if the left half is history.
    while (end - (int64_t{1} << level) < range.first) {
      const int64_t middle = end - (int64_t{1} << (level - 1));
      if (middle > range.first) break;
      --level;
    }
    return level;
  }
};

// A node that a chunk reads.
struct DeltaStep {
  Elements content;                  // null: zero
  int64_t stride = 0;                // of the content's rows
  const void* transition = nullptr;  // over the node, of the scratch memory's type; null: no more needed
  const float *content_scale = nullptr, *transition_scale = nullptr;  // null: 1
  int64_t column = -1;                                                // of lambda; -1: weight 1
  int entry = 0;                                                      // of the state's nodes: what would be stored there
  int level = 0;                                                      // in chunks; what is absorbed has kDeltaLevels
};

// Block id of an entry of the history; -1: zero.
__device__ __forceinline__ int32_t delta_history_node(const DeltaInputs& in, const Sequence& sequence, int entry) {
  return in.state.nodes.base && sequence.history.tail >= 0 ? sequence.history.node[entry] : -1;
}

// Bits of a chunk's number whose nodes belong to the call, in part at least: all up to the highest one in which it differs
// from the call's first chunk.
__device__ __forceinline__ uint64_t delta_own_bits(int64_t chunk, int64_t first) {
  const int64_t differs = chunk ^ first;
  return differs == 0 ? 0 : static_cast<uint64_t>(chunk) & (~uint64_t{0} >> __clzll(differs));
}
// Whether a chunk reads another node of the call after that of a level.
__device__ __forceinline__ bool delta_reads_on(int64_t chunk, int level, int64_t first) {
  return (delta_own_bits(chunk, first) >> level) > 1;
}
// How many nodes of the call a chunk reads before that of a level.
__device__ __forceinline__ int delta_steps_before(int64_t chunk, int level) {
  return __popcll(static_cast<unsigned long long>(chunk) & ((uint64_t{1} << level) - 1));
}

// The nodes that chunk `chunk` reads, newest first. Nodes of the history stand at the start of the call's first chunk.
template <class Scratch>
struct DeltaWalk {
  const DeltaInputs& in;
  const Scratch& scratch;
  const DeltaSequence& chunks;
  int64_t head, chunk;
  bool zeros;  // tells of nodes that are zero too
  bool history, absorbed;
  uint64_t bits;

  __device__ __forceinline__ DeltaWalk(const DeltaInputs& inputs, const Scratch& memory, const DeltaSequence& s,
                                       int64_t head_number, int64_t chunk_number, bool with_zeros)
      : in(inputs),
        scratch(memory),
        chunks(s),
        head(head_number),
        chunk(chunk_number),
        zeros(with_zeros),
        bits(static_cast<uint64_t>(chunk_number)) {
    const bool stored = in.state.nodes.base && s.sequence.history.tail >= 0;
    history = stored || s.sequence.initial_gradient.tail >= 0;
    const int64_t grains = s.range.first >> in.chunk.ratio_log;
    absorbed = stored && in.absorbs() && (in.shape.levels == 0 || (grains >> in.separate) != 0) &&
               s.sequence.history.node[kAbsorbed] >= 0;
  }
  __device__ __forceinline__ int64_t column(int level) const {
    return in.shape.levels == 0 ? -1 : in.shape.column(level + in.chunk.rows_log + 1);
  }
  __device__ __forceinline__ bool next(DeltaStep* step) {
    while (bits != 0) {
      const int level = __ffsll(static_cast<long long>(bits)) - 1;
      bits &= bits - 1;
      const int64_t end = bucket_end(chunk, level);
      const int entry = level - in.chunk.ratio_log;
      step->column = column(level);
      step->entry = entry < in.separate ? entry : kAbsorbed;
      step->level = level;
      if (end > chunks.range.first) {
        step->content = {chunks.content(scratch, end, head), Scratch::kType};
        step->content_scale = chunks.content_scale(scratch, end, head);
        step->stride = scratch.value_stride;
        const bool on = history || delta_reads_on(chunk, level, chunks.range.first);
        step->transition = on ? chunks.transition(scratch, level, end, head) : nullptr;
        step->transition_scale = on ? chunks.transition_scale(scratch, level, end, head) : nullptr;
        return true;
      }
      if (entry >= in.separate) continue;
      const int32_t id = delta_history_node(in, chunks.sequence, entry);
      if (id < 0 && !zeros) continue;
      set_history(id, step);
      return true;
    }
    if (!absorbed) return false;
    absorbed = false;
    set_history(chunks.sequence.history.node[kAbsorbed], step);
    step->column = in.shape.levels - 1;
    step->entry = kAbsorbed;
    step->level = kDeltaLevels;
    return true;
  }
  __device__ __forceinline__ void set_history(int32_t id, DeltaStep* step) const {
    step->content = {id < 0 ? nullptr : in.state.node(id, head), in.state.node_layout.dtype};
    step->stride = in.shape.value_dim;
    step->transition = nullptr;
    step->content_scale = step->transition_scale = nullptr;
  }
};

// f(row, column, x, y) for pairs of neighbours (column, column + 1) of a sum.
template <class F>
__device__ __forceinline__ void each_pair(TileSum& sum, F f) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = 32 * (warp / 2) + lane / 4, column = 32 * (warp % 2) + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        f(row + 16 * i + 8 * half, column + 8 * j, sum.c[i][j][2 * half], sum.c[i][j][2 * half + 1]);
}

// A run of elements to write; null: nowhere.
struct Target {
  void* data = nullptr;
  int32_t dtype = LLA_F32;
  bool accumulate = false;
};

// Writes elements i ... i + 3, of which `count` (1 ... 4) exist.
__device__ __forceinline__ void store4(const Target& to, int64_t i, int64_t count, float4 x) {
  if (to.dtype == LLA_F32 && count >= 4) {
    float* p = static_cast<float*>(to.data) + i;
    if ((reinterpret_cast<uintptr_t>(p) & 15) == 0) {
      if (to.accumulate) {
        const float4 old = *reinterpret_cast<const float4*>(p);
        x.x += old.x, x.y += old.y, x.z += old.z, x.w += old.w;
      }
      *reinterpret_cast<float4*>(p) = x;
      return;
    }
  } else if (to.dtype != LLA_F32 && count >= 4 && !to.accumulate) {
    unsigned short* p = static_cast<unsigned short*>(to.data) + i;
    if ((reinterpret_cast<uintptr_t>(p) & 7) == 0) {
      uint2 both;
      if (to.dtype == LLA_BF16) {
        both.x = to_bf16(x.x) | to_bf16(x.y) << 16, both.y = to_bf16(x.z) | to_bf16(x.w) << 16;
      } else {
        both.x = to_f16(x.x) | to_f16(x.y) << 16, both.y = to_f16(x.z) | to_f16(x.w) << 16;
      }
      *reinterpret_cast<uint2*>(p) = both;
      return;
    }
  }
  put_element(to.data, to.dtype, i, x.x, to.accumulate);
  if (count > 1) put_element(to.data, to.dtype, i + 1, x.y, to.accumulate);
  if (count > 2) put_element(to.data, to.dtype, i + 2, x.z, to.accumulate);
  if (count > 3) put_element(to.data, to.dtype, i + 3, x.w, to.accumulate);
}

// Writes the 64 columns of a tile in shared memory that become `column` ... of `columns`. row(r) gives the target of column
// 0.
template <class Row>
__device__ __forceinline__ void store_tile(const float* tile, int stride, int64_t column, int64_t columns, Row row) {
  const int c = 4 * (threadIdx.x % 16);
  const int64_t left = columns - column - c;
  if (left <= 0) return;
#pragma unroll 1
  for (int r = threadIdx.x / 16; r < kTile; r += 8) {
    const Target to = row(r);
    if (to.data) store4(to, column + c, left, *reinterpret_cast<const float4*>(tile + r * stride + c));
  }
}

// A sum into a tile in shared memory, and back.
__device__ __forceinline__ void put_sum(TileSum& sum, float* tile, int stride) {
  each_pair(
      sum, [&](int m, int n, float& x, float& y) { *reinterpret_cast<float2*>(tile + m * stride + n) = make_float2(x, y); });
}
__device__ __forceinline__ void get_sum(TileSum& sum, const float* tile, int stride) {
  each_pair(sum, [&](int m, int n, float& x, float& y) {
    const float2 pair = *reinterpret_cast<const float2*>(tile + m * stride + n);
    x = pair.x, y = pair.y;
  });
}

// Depth of a product over the 64 elements from `at` on, of `all`.
__device__ __forceinline__ int delta_depth(int64_t at, int64_t all) {
  const int64_t left = (all - at + 7) & ~int64_t{7};
  return left < kTile ? static_cast<int>(left) : kTile;
}

// Elements of row `row` of a matrix.
__device__ __forceinline__ Elements delta_row(const Elements& matrix, int64_t row, int64_t stride) {
  return {matrix.data ? offset_elements(matrix.data, matrix.dtype, row * stride) : nullptr, matrix.dtype};
}

// ---- launches -----------------------------------------------------------------------------------------------------------
// Chunk-local part: leaves of the tree, and, with `reads`, query and output rows.
int32_t launch_delta_chunks(const DeltaInputs& in, const DeltaScratch& scratch, bool reads, bool exact, void* stream);
// Joins leaves into nodes, and those with the history's.
int32_t launch_delta_nodes(const DeltaInputs& in, const DeltaScratch& scratch, bool exact, void* stream);
int32_t launch_delta_read(const DeltaInputs& in, const DeltaScratch& scratch, const View& y, bool exact, void* stream);
int32_t launch_delta_store_nodes(const DeltaInputs& in, const DeltaScratch& scratch, bool exact, void* stream);
// Piece `piece` of the sequences, cut at the borders where they store nodes, into pieces[sequence].
int32_t launch_delta_pieces(const DeltaInputs& in, int64_t piece, Sequence* pieces, void* stream);
int32_t launch_delta_store_tail(const DeltaInputs& in, void* stream);
int32_t load_delta_chunks();
int32_t load_delta_nodes();
int32_t load_delta_read();
int32_t load_delta_store_nodes();
int32_t load_delta_pieces();
int32_t load_delta_store_tail();

}  // namespace lla::cuda
