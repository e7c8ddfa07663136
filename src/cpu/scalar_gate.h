// SPDX-License-Identifier: Apache-2.0
// What the scalar gate's forward and backward share: scratch layout, a chunk's operands, its decay factors, and the nodes.
//
// Decays inside a chunk are exponentials of two sums of g: if t and s < t part at level l, the midpoint m of their bucket
// pair lies between them and D_ts = exp(g_{s+1} + ... + g_{m-1}) * exp(g_m + ... + g_t). Each row has one of the two factors
// per level, so a chunk needs C log2(C) exponentials, every one of a sum over its own interval.
#pragma once

#include <cstdint>

#include "core/fenwick.h"
#include "cpu/chunk.h"
#include "cpu/simd.h"
#include "cpu/tiles.h"
#include "plugin/backend.h"
#include "plugin/problem.h"

namespace lla::cpu::scalar_gate {

constexpr int64_t kRowBlock = 64;       // rows whose products with the chunk are held at once
constexpr int64_t kTriangleBlock = 16;  // rows that share the end of their columns
constexpr int64_t kSplits = 8;          // tasks into which the work that heads share is cut

// Lays float arrays out in scratch; without a base it only counts.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  float* floats(int64_t count) {
    const int64_t at = bytes_;
    int64_t bytes = 0;
    if (count < 0 || __builtin_mul_overflow(count, int64_t{4}, &bytes) ||
        __builtin_add_overflow(bytes, int64_t{63}, &bytes) ||
        __builtin_add_overflow(bytes_, bytes & ~int64_t{63}, &bytes_)) {
      overflow_ = true;
      bytes_ = 0;
    }
    return base_ ? reinterpret_cast<float*>(base_ + at) : nullptr;
  }
  int64_t bytes() const { return overflow_ ? -1 : bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
  bool overflow_ = false;
};

// Product that saturates, so that a size that overflows is noticed by the Carver.
inline int64_t times(int64_t a, int64_t b) {
  int64_t r = 0;
  return a < 0 || b < 0 || __builtin_mul_overflow(a, b, &r) ? -1 : r;
}

// Sizes that follow from the shape.
struct Sizes {
  explicit Sizes(const MixerShape& s)
      : grain(s.grain),
        key_dim(s.key_dim),
        value_dim(s.value_dim),
        levels(s.levels),
        log2_grain(log2_of(s.grain)),
        absorb(s.absorb),
        separate(s.separate_levels()),
        node(times(s.key_dim, s.value_dim)) {}
  int64_t grain, key_dim, value_dim, levels;
  int log2_grain;
  bool absorb;
  int separate;  // node levels that are kept apart
  int64_t node;  // floats of a node's content
  // Floats of a node with its log decay, as in the saved buffer.
  int64_t node_span() const { return node < 0 ? -1 : (node + 1 + 15) & ~int64_t{15}; }
  int64_t row_block() const { return grain < kRowBlock ? grain : kRowBlock; }
};

// Up to three runs of rows that together are the local rows [first, last) of a chunk.
struct Rows {
  struct Part {
    int64_t first = 0, last = 0;
    const float* data = nullptr;
  };
  Part part[3];
  int parts = 0;
  // Appends a run; joins it to the one before if it follows it in memory.
  void add(int64_t first, int64_t last, const float* data, int64_t dim);
};

// Operands of one chunk of one head. Local rows as in Chunk: [0, lo) are history, [lo, hi) belong to the call. Arrays that
// need no conversion are read where they lie.
struct Operands {
  int64_t index = 0, lo = 0, hi = 0;
  int64_t row = 0;                // absolute row of local row lo
  const float* q = nullptr;       // [hi - lo][dk], not scaled
  Rows k, v;                      // local rows; zero rows at the front may be missing
  const float* lambda = nullptr;  // [hi - lo][L]; null: linear
  float* gate = nullptr;          // [hi]
  float* write = nullptr;         // [hi]
};

struct OperandBuffers {
  float *q = nullptr, *k = nullptr, *v = nullptr, *lambda = nullptr, *gate = nullptr, *write = nullptr;
  void carve(const Sizes& sizes, Carver* carver);
};

// Fills q, k and the positions only, for work that the heads of a group share. `head`: any of them. What has no buffer is
// not wanted.
void load_keys(const Simd& simd, const MixerInputs& in, const Sequence& s, int64_t head, int64_t index, bool whole,
               const OperandBuffers& buffers, Operands* operands);
// `whole`: k and v become one run that starts at local row 0.
void load_operands(const Simd& simd, const MixerInputs& in, const Sequence& s, int64_t head, int64_t index, bool whole,
                   const OperandBuffers& buffers, Operands* operands);

// out[t - t0][s] = q_t . k_s for the rows [t0, t1) and all s < t1 (columns of zero rows at the front are not set).
void products_of_rows(const Simd& simd, const Operands& operands, int64_t key_dim, int64_t t0, int64_t t1, float* out,
                      int64_t ldo);

// Decay factors of a chunk.
struct Factors {
  float* table = nullptr;   // [log2(C) + 1][C]: entry (l, x) is row x's factor at level l >= 1 (see above)
  float* prefix = nullptr;  // [C]: from the chunk's start into row t
  float* key = nullptr;     // [C]: of row t now being worked on, the factors of all s <= t, and 1 at t
  float* suffix = nullptr;  // [C]: from row s to the chunk's end
  float total = 0;          // sum of g over the chunk
  void carve(const Sizes& sizes, Carver* carver);
};

// Fills table and prefix for the rows [lo, hi).
void fill_factors(const Simd& simd, const Sizes& sizes, const float* gate, int64_t lo, int64_t hi, Factors* factors);
// Fills suffix and total of a complete chunk.
void fill_suffix(const Simd& simd, const Sizes& sizes, const float* gate, Factors* factors);
// Sets `key` for row t from nothing, or from what it was for row t - 1. Times `write` if that is not null.
void first_keys(const Factors& factors, int64_t grain, int64_t t, const float* write);
void next_keys(const Factors& factors, int64_t grain, int64_t t, const float* write);

// A node of the past. content null: there is none.
struct Node {
  const float* content = nullptr;
  float log_decay = 0;
  int buffer = -1;  // of the pool, -1: not the pool's
};

// The nodes of one head while its chunks are walked, and buffers for new ones.
struct Nodes {
  Node node[kNodes];
  float* pool = nullptr;
  uint64_t used = 0;

  // Buffers that a sequence of at most `length` rows needs: its nodes and one new.
  static int64_t buffers(const Sizes& sizes, int64_t length);
  // Takes the nodes of the history: in place if they are fp32, else converted.
  void load(const Simd& simd, const Sizes& sizes, const SlotMemory& memory, const SlotImage& image, int64_t head);
  int take();
  void free(int b);
};

// What the rows of a chunk read: the nodes that are there, newest first. Bits of `also`: nodes to list even if empty.
struct Reads {
  int count = 0;
  int level[kNodes];             // index of the node
  const float* content[kNodes];  // null: empty
  int64_t column[kNodes];        // of λ
  float factor[kNodes];          // decay over all newer nodes
};
void list_reads(const Simd& simd, const MixerShape& shape, const Sizes& sizes, const Node* nodes, uint64_t also,
                Reads* reads);

// Folds a complete chunk (factors.key is overwritten): its content goes to `content` and swallows the nodes of the trailing
// ones of its index. `scaled` [C][dv] is overwritten. `buffer` is where content lies (-1: not in the pool).
void fold_chunk(const Simd& simd, const Sizes& sizes, const SlotMemory& state, const Operands& operands,
                const Factors& factors, float* scaled, float* content, int buffer, Nodes* nodes);
// The part of it after the chunk's own content.
void join_nodes(const Simd& simd, const Sizes& sizes, const SlotMemory& state, const Operands& operands,
                const Factors& factors, float* content, int buffer, Nodes* nodes);
// Whether the layer keeps a node of this index at all.
inline bool keeps_node(const Sizes& sizes, int b) {
  return b == kAbsorbed ? sizes.separate < kNodeLevels : b < sizes.separate;
}
// Index of the node that chunk number `index` creates.
inline int created_node(const Sizes& sizes, int64_t index) {
  const int ones = trailing_ones(index);
  return ones < sizes.separate ? ones : kAbsorbed;
}

// Products q.k of all rows of the call with the rows of their chunks, which the heads of a group share: shared scratch of a
// first phase. Row r of the row axis has grain columns, those up to its own are set.
struct Products {
  float* data = nullptr;         // [G][rows][C]; null: every head computes its own
  uint16_t* key_rows = nullptr;  // [G][rows][dk] for tiles: k^T [dk][C] of every whole chunk
  int64_t rows = 0;
  int64_t first = 0;  // row of the row axis with which they begin
  void carve(const MixerShape& shape, const Limits& limits, bool on_tiles, Carver* carver);
  float* row(const MixerShape& shape, int64_t group, int64_t r) const {
    return data ? data + (group * rows + r - first) * shape.grain : nullptr;
  }
  uint16_t* keys(const MixerShape& shape, int64_t group, int64_t r) const {
    return key_rows ? key_rows + (group * rows + r - first) * shape.key_dim : nullptr;
  }
};
// A row has a product with every row of its chunk before it: in longer chunks they take more memory than they save time.
constexpr int64_t kMostColumns = 256;
inline bool shares_products(const MixerShape& shape) { return shape.heads > shape.groups && shape.grain <= kMostColumns; }
// For chunk number `index` of a sequence and one group.
void fill_chunk_products(const Simd& simd, const MixerInputs& in, const Sequence& s, int64_t group, int64_t index,
                         const OperandBuffers& buffers, const Products& products);
// Part `split` of kSplits of the chunks of a sequence: f(index).
template <class F>
void for_chunks_of_split(const Sequence& s, int64_t grain, int64_t split, F f) {
  const int64_t first = first_chunk(s, grain), chunks = chunk_count(s, grain);
  for (int64_t i = split * chunks / kSplits; i < (split + 1) * chunks / kSplits; ++i) f(first + i);
}
void fill_products(const Simd& simd, const MixerInputs& in, const Sequence& s, int64_t group, int64_t split,
                   const OperandBuffers& buffers, const Products& products);
// Head number `i` of a group.
inline int64_t head_of(const MixerShape& shape, int64_t group, int64_t i) {
  return shape.head_map == LLA_HEAD_MAP_CYCLIC ? i * shape.groups + group : group * (shape.heads / shape.groups) + i;
}

// First slot of a sequence in the saved buffer; one slot per complete chunk, each with all heads.
inline int64_t saved_slot(const MixerShape& shape, const Sequence& s, int64_t order) {
  return s.row_begin / shape.grain + 2 * order;
}
// Heads that share no products leave theirs, q.k, behind the node, if the chunk is whole and not on tiles: blocks of
// kTriangleBlock rows, each up to its last column.
inline bool keeps_products(const MixerShape& shape) { return shape.heads == shape.groups && shape.grain <= kMostColumns; }
// Where the block that begins with row `begin` begins.
inline int64_t kept_products(int64_t begin) { return begin * (begin + kTriangleBlock) / 2; }
// Floats of a slot of one head.
int64_t saved_span(const MixerShape& shape);
int64_t saved_bytes(const MixerShape& shape, const Limits& limits);

inline bool is_mixer_dtype(const View& view) {
  return view.dtype == LLA_F32 || view.dtype == LLA_BF16 || view.dtype == LLA_F16;
}
inline int64_t longest(const Limits& limits) {
  return limits.length > limits.rows_per_sequence ? limits.length : limits.rows_per_sequence;
}
inline MixerInputs inputs_of(const MixerForward& p) {
  return MixerInputs{&p.shape, &p.q, &p.k, &p.v, &p.gate, &p.write, &p.lambda, &p.state};
}
inline MixerInputs inputs_of(const MixerBackward& p) {
  return MixerInputs{&p.shape, &p.q, &p.k, &p.v, &p.gate, &p.write, &p.lambda, &p.state};
}

// The kernels, all on a table of SIMD operations.
bool accepts_forward(const MixerForward& problem);
// Whether products can be made on tiles: of bf16 rows, in chunks of whole tiles. A chunk that the call does not have from
// its first row to its last is computed as without them. Backward uses them where it computes forward's nodes once more.
bool accepts_tiles(const MixerForward& problem);
bool accepts_tiles(const MixerBackward& problem);
inline bool is_whole(const Sizes& sizes, const Sequence& s, int64_t index) {
  return s.position <= index * sizes.grain && (index + 1) * sizes.grain <= s.position + s.rows;
}
void measure_forward(const MixerForward& problem, const Limits& limits, bool on_tiles, Need* need);
int32_t phases_forward(const MixerForward& problem);
int64_t tasks_forward(const MixerForward& problem, int32_t phase);
// `tiles`: null, or where on_tiles was measured.
void run_forward(const Simd& simd, const Tiles* tiles, const MixerForward& problem, const Limits& limits,
                 const Scratch& scratch, int32_t phase, int64_t task);

bool accepts_backward(const MixerBackward& problem);
void measure_backward(const MixerBackward& problem, const Limits& limits, bool on_tiles, Need* need);
int32_t phases_backward(const MixerBackward& problem);
int64_t tasks_backward(const MixerBackward& problem, int32_t phase);
void run_backward(const Simd& simd, const Tiles* tiles, const MixerBackward& problem, const Limits& limits,
                  const Scratch& scratch, int32_t phase, int64_t task);

}  // namespace lla::cpu::scalar_gate
