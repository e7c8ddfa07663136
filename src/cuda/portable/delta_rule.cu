// SPDX-License-Identifier: Apache-2.0
// The delta rule's table of kernels, and how its scratch memory is laid out.
#include "core/checked.h"
#include "cuda/backend.h"
#include "cuda/portable/delta_rule_gradient.h"

namespace lla::cuda {

namespace {

// Hands out arrays of floats; without memory it only counts.
class Carver {
 public:
  explicit Carver(char* memory) : memory_(memory) {}
  float* take(Size floats) { return reinterpret_cast<float*>(take_bytes(floats * Size(sizeof(float)))); }
  unsigned short* take_halves(Size halves) { return reinterpret_cast<unsigned short*>(take_bytes(halves * 2)); }
  int64_t bytes() const { return used_.valid() ? used_.value() : -1; }

 private:
  char* take_bytes(Size bytes) {
    char* here = memory_ ? memory_ + used_.value() : nullptr;
    used_ += bytes.aligned(256);
    return here;
  }

  char* memory_;
  Size used_;
};

int64_t padded(int64_t columns) { return (columns + 3) & ~int64_t{3}; }

int64_t bits_of(int64_t x) {
  int64_t bits = 0;
  while (x > 0) x >>= 1, ++bits;
  return bits;
}

// Memory above which heads are worked on in several passes.
constexpr int64_t kMostBytes = int64_t{8} << 30;

struct Counts {
  Size slots, places, rows, sequences;
  int64_t full = 0;    // chunks of one sequence that fill up, at most
  int64_t levels = 1;  // of nodes whose transition is not that of their right half
  bool valid = false;

  Counts(const MixerShape& shape, const Limits& limits) : rows(limits.rows), sequences(limits.sequences) {
    const ChunkShape chunk(shape.grain);
    slots = Size(limits.rows / chunk.rows) + sequences * chunk.ratio;
    places = (Size(limits.rows / chunk.rows) + sequences * (chunk.ratio + 1)) * chunk.rows;
    const Size most = Size(limits.rows_per_sequence) + shape.grain;
    if (!most.valid() || !slots.valid() || !places.valid()) return;
    full = (most.value() - 1) / chunk.rows;
    // A node that begins before the call has a transition of its own only below the levels that fit into the call.
    if (full > 0) levels = bits_of(full - 1) + 1;
    valid = levels <= kDeltaLevels;
  }
};

// Everything of forward, for `heads` heads at a time.
void carve_nodes(const MixerShape& shape, const Counts& counts, int64_t heads, bool output, Carver* carver,
                 DeltaScratch* scratch) {
  scratch->heads = heads;
  scratch->key_dim = shape.key_dim;
  scratch->key_stride = padded(shape.key_dim);
  scratch->value_stride = padded(shape.value_dim);
  const Size dk(shape.key_dim), key_row(scratch->key_stride), value_row(scratch->value_stride);
  scratch->content = carver->take(counts.slots * heads * dk * value_row);
  Size nodes(counts.valid ? 0 : -1);
  for (int64_t level = 0; level < counts.levels && nodes.valid(); ++level) {
    scratch->level_offset[level] = nodes.value();
    nodes += Size(counts.slots.value() >> level) + counts.sequences + 1;
  }
  scratch->transition = carver->take(nodes * heads * dk * key_row);
  scratch->query = carver->take(counts.rows * heads * key_row);
  if (!output) return;
  scratch->output = carver->take(counts.rows * heads * value_row);
  if (shape.key_dim > 2 * kTile) scratch->spill = carver->take((key_row + value_row) * kTile * kDeltaSpills);
}

// Everything of forward on halves.
void carve_halves(const MixerShape& shape, const Counts& counts, int64_t heads, bool tree, bool output, Carver* carver,
                  DeltaHalfScratch* scratch) {
  scratch->tree = tree;
  scratch->heads = heads;
  scratch->key_dim = shape.key_dim;
  scratch->value_dim = shape.value_dim;
  scratch->key_stride = (shape.key_dim + 7) & ~int64_t{7};
  scratch->value_stride = (shape.value_dim + 7) & ~int64_t{7};
  const Size key_row(scratch->key_stride), value_row(scratch->value_stride);
  const Size slots = counts.slots * heads, rows = counts.rows * heads;
  scratch->content = carver->take_halves(slots * key_row * value_row);
  scratch->content_scale = carver->take(slots);
  Size nodes(counts.valid ? 0 : -1);
  for (int64_t level = 0; level < (tree ? counts.levels : 1) && nodes.valid(); ++level) {
    scratch->level_offset[level] = nodes.value();
    nodes += Size(counts.slots.value() >> level) + counts.sequences + 1;
  }
  scratch->transition = carver->take_halves(nodes * heads * shape.key_dim * key_row);
  scratch->transition_scale = carver->take(nodes * heads);
  if (!tree) {
    scratch->whole = carver->take(slots);
    scratch->state_scale = carver->take(slots * kWide);
  }
  scratch->query = carver->take_halves(rows * key_row);
  scratch->query_scale = carver->take(rows);
  if (!output) return;
  scratch->output = carver->take_halves(rows * value_row);
  scratch->output_scale = carver->take(rows);
}

// What the kernels inside a chunk leave behind, and the gradients of q.
void carve_rows(const MixerShape& shape, const Counts& counts, int64_t heads, int64_t inverse_row, Carver* carver,
                DeltaGradients* scratch) {
  scratch->rows = counts.rows.valid() ? counts.rows.value() : 0;
  scratch->groups = shape.groups;
  scratch->levels = shape.levels;
  const Size key_row = Size(scratch->nodes.key_stride), value_row = Size(scratch->nodes.value_stride);
  scratch->lambda = carver->take(counts.rows * heads * shape.levels);
  scratch->key = carver->take(counts.places * heads * key_row);
  scratch->erase = carver->take(counts.places * heads * key_row);
  scratch->value = carver->take(counts.places * heads * value_row);
  scratch->inverse = carver->take(counts.places * heads * inverse_row);
  scratch->gate = carver->take(counts.places * heads);
  if (shape.heads == shape.groups) return;
  scratch->query_sum = carver->take(counts.rows * shape.groups * key_row);
  scratch->key_sum = carver->take(counts.places * shape.groups * key_row);
}

void carve_half_gradients(const MixerShape& shape, const Counts& counts, int64_t heads, Carver* carver,
                          DeltaGradients* scratch) {
  scratch->nodes.heads = heads;
  scratch->nodes.key_dim = shape.key_dim;
  scratch->nodes.key_stride = padded(shape.key_dim);
  scratch->nodes.value_stride = padded(shape.value_dim);
  DeltaHalfGradients& halves = scratch->halves;
  carve_halves(shape, counts, heads, true, false, carver, &halves.nodes);
  halves.steps = delta_most_steps(counts.full);
  halves.rows = counts.rows.valid() ? counts.rows.value() : 0;
  halves.levels = shape.levels;
  const Size key_row(halves.nodes.key_stride), value_row(halves.nodes.value_stride), steps(halves.steps);
  const Size rows = counts.rows * heads, slots = counts.slots * heads;
  halves.x = carver->take_halves((steps + 1) * rows * key_row);
  halves.dx = carver->take_halves(steps * rows * key_row);
  halves.seen = carver->take_halves(rows * key_row);
  halves.seen_scale = carver->take(rows);
  halves.content = carver->take_halves(slots * key_row * value_row);
  halves.content_scale = carver->take(slots);
  for (int i = 0; i < 2; ++i) {
    halves.transition[i] = carver->take_halves(slots * shape.key_dim * key_row);
    halves.transition_scale[i] = carver->take(slots);
  }
  const Size chunks = (Size(counts.places.valid() ? counts.places.value() / ChunkShape(shape.grain).rows : -1)) * heads;
  halves.nodes.inverse = carver->take_halves(chunks * (kTile * kTile));
  halves.nodes.inverse_scale = carver->take(chunks);
  scratch->dx = carver->take(rows * scratch->nodes.key_stride);
  carve_rows(shape, counts, heads, kTile, carver, scratch);
  halves.lambda = scratch->lambda;
}

void carve_gradients(const MixerShape& shape, const Counts& counts, int64_t heads, Carver* carver, DeltaGradients* scratch) {
  DeltaScratch& nodes = scratch->nodes;
  carve_nodes(shape, counts, heads, false, carver, &nodes);
  scratch->steps = delta_most_steps(counts.full);
  const Size key_row = Size(nodes.key_stride), value_row = Size(nodes.value_stride), steps(scratch->steps);
  const Size key_matrix = Size(shape.key_dim) * key_row, value_matrix = Size(shape.key_dim) * value_row;
  scratch->x = carver->take(steps * counts.rows * heads * key_row);
  scratch->dx = carver->take((steps + 1) * counts.rows * heads * key_row);
  scratch->border_x = carver->take(counts.sequences * (steps + 1) * heads * key_matrix);
  scratch->border_dx = carver->take(counts.sequences * (steps + 1) * heads * key_matrix);
  scratch->content = carver->take(counts.slots * heads * value_matrix);
  for (float*& transition : scratch->transition) transition = carver->take(counts.slots * heads * key_matrix);
  carve_rows(shape, counts, heads, ChunkShape(shape.grain).rows, carver, scratch);
}

int64_t forward_bytes(const MixerShape& shape, const Counts& counts, int64_t heads) {
  Carver carver(nullptr);
  DeltaScratch scratch;
  carve_nodes(shape, counts, heads, true, &carver, &scratch);
  return carver.bytes();
}

int64_t half_bytes(const MixerShape& shape, const Counts& counts, int64_t heads) {
  Carver carver(nullptr);
  DeltaHalfScratch scratch;
  carve_halves(shape, counts, heads, shape.levels > 0, true, &carver, &scratch);
  return carver.bytes();
}

int64_t half_backward_bytes(const MixerShape& shape, const Counts& counts, int64_t heads) {
  Carver carver(nullptr);
  DeltaGradients scratch;
  carve_half_gradients(shape, counts, heads, &carver, &scratch);
  return carver.bytes();
}

int64_t backward_bytes(const MixerShape& shape, const Counts& counts, int64_t heads) {
  Carver carver(nullptr);
  DeltaGradients scratch;
  carve_gradients(shape, counts, heads, &carver, &scratch);
  return carver.bytes();
}

using BytesOf = int64_t (*)(const MixerShape&, const Counts&, int64_t);

// All heads at once, or as many as fit into kMostBytes. Never falls when a limit rises.
int64_t bytes_needed(const MixerShape& shape, const Limits& limits, BytesOf bytes) {
  const Counts counts(shape, limits);
  const int64_t all = bytes(shape, counts, shape.heads), one = bytes(shape, counts, 1);
  if (one < 0) return -1;
  if (all >= 0 && all <= kMostBytes) return all;
  const int64_t bound = one > kMostBytes ? one : kMostBytes;
  return all >= 0 && all < bound ? all : bound;
}

int64_t heads_at_once(const MixerShape& shape, const Counts& counts, BytesOf bytes) {
  int64_t heads = shape.heads;
  for (; heads > 1; --heads) {
    const int64_t needed = bytes(shape, counts, heads);
    if (needed >= 0 && needed <= kMostBytes) break;
  }
  return heads;
}

// Calls f() for pass after pass, until one fails.
template <class Scratch, class F>
int32_t for_passes(const MixerShape& shape, int64_t heads, Scratch* scratch, F f) {
  for (int64_t first = 0; first < shape.heads; first += heads) {
    scratch->first_head = first;
    scratch->pass_heads = shape.heads - first < heads ? shape.heads - first : heads;
    const int32_t status = f();
    if (status) return status;
  }
  return LLA_OK;
}

bool takes_dtype(int32_t dtype) { return dtype == LLA_F32 || dtype == LLA_BF16 || dtype == LLA_F16; }

bool takes_shape(const MixerShape& shape, const SlotMemory& state) {
  return shape.mixer == LLA_DELTA_RULE && shape.key_dim <= kDeltaMostDim && shape.value_dim <= kDeltaMostDim &&
         takes_dtype(state.node_layout.dtype) && takes_dtype(state.tail_layout.dtype);
}

template <class... Views>
bool take_views(const Views&... views) {
  return (takes_dtype(views.dtype) && ...);
}

template <class... Views>
bool any_is_exact(const Views&... views) {
  return ((views.dtype == LLA_F32) || ...);
}

// ---- forward ------------------------------------------------------------------------------------------------------------

bool accepts_forward(const void* problem) {
  const MixerForward& p = *static_cast<const MixerForward*>(problem);
  return takes_shape(p.shape, p.state) && take_views(p.q, p.k, p.v, p.gate, p.write, p.lambda, p.y);
}

// Of two ways to do the same; negative: too much.
int64_t greater_need(int64_t a, int64_t b) { return a < 0 || b < 0 ? -1 : a > b ? a : b; }

bool fits_halves(const MixerShape& shape) { return shape.key_dim <= kWide && shape.value_dim <= kWide; }

// The sequences of a batch once more, cut into pieces.
Size pieces_bytes(const Limits& limits) { return (Size(limits.sequences) * Size(sizeof(Sequence))).aligned(256); }

void measure_forward(const void* problem, const Limits& limits, Need* need) {
  *need = Need();
  const MixerShape& shape = static_cast<const MixerForward*>(problem)->shape;
  int64_t bytes = bytes_needed(shape, limits, forward_bytes);
  if (fits_halves(shape)) bytes = greater_need(bytes, bytes_needed(shape, limits, half_bytes));
  const Size all = pieces_bytes(limits) + Size(bytes);
  need->shared = all.valid() ? all.value() : -1;
}

int32_t launch_halves(const MixerForward& p, const DeltaInputs& in, const Counts& counts, char* memory, void* stream) {
  const int64_t heads = heads_at_once(p.shape, counts, half_bytes);
  Carver carver(memory);
  DeltaHalfScratch scratch;
  carve_halves(p.shape, counts, heads, p.shape.levels > 0, true, &carver, &scratch);
  return for_passes(p.shape, heads, &scratch, [&] {
    int32_t status = launch_delta_half_chunks(in, scratch, stream);
    if (p.shape.levels == 0) {
      if (!status) status = launch_delta_half_scan(in, scratch, stream);
      return status ? status : launch_delta_half_linear_read(in, scratch, p.y, stream);
    }
    if (!status) status = launch_delta_half_nodes(in, scratch, stream);
    if (!status) status = launch_delta_half_read(in, scratch, p.y, stream);
    if (!status && in.batch.stores && in.state.nodes.base) status = launch_delta_half_store(in, scratch, stream);
    return status;
  });
}

int32_t launch_exact(const MixerForward& p, const DeltaInputs& in, const Counts& counts, bool exact, char* memory,
                     void* stream) {
  const int64_t heads = heads_at_once(p.shape, counts, forward_bytes);
  Carver carver(memory);
  DeltaScratch scratch;
  carve_nodes(p.shape, counts, heads, true, &carver, &scratch);
  return for_passes(p.shape, heads, &scratch, [&] {
    int32_t status = launch_delta_chunks(in, scratch, true, exact, stream);
    if (!status) status = launch_delta_nodes(in, scratch, exact, stream);
    if (!status) status = launch_delta_read(in, scratch, p.y, exact, stream);
    if (!status && in.batch.stores && in.state.nodes.base) status = launch_delta_store_nodes(in, scratch, exact, stream);
    return status;
  });
}

int32_t launch_forward(const void* problem, const Limits& limits, char* memory, void* stream) {
  const MixerForward& p = *static_cast<const MixerForward*>(problem);
  DeltaInputs in(p);
  const Counts counts(p.shape, limits);
  const bool exact = any_is_exact(p.q, p.k, p.v, p.y), halves = !exact && fits_halves(p.shape);
  char* scratch = memory + pieces_bytes(limits).value();
  const auto run = [&] {
    return halves ? launch_halves(p, in, counts, scratch, stream) : launch_exact(p, in, counts, exact, scratch, stream);
  };
  int32_t status = LLA_OK;
  const int64_t drafted = (p.shape.grain - 1 + in.batch.max_draft) / p.shape.grain;  // borders that a draft crosses at most
  const int64_t stored = in.batch.stores && in.state.nodes.base ? in.batch.most_nodes_to_store : 0;
  const int64_t borders = stored < drafted ? stored : drafted;
  if (borders <= 1) {
    status = run();
  } else {
    Sequence* pieces = reinterpret_cast<Sequence*>(memory);
    for (int64_t piece = 0; piece <= borders && !status; ++piece) {
      in.batch = p.batch;
      status = launch_delta_pieces(in, piece, pieces, stream);
      in.batch.sequences = pieces;
      if (piece > 0) {
        in.batch.most_rows = p.batch.most_rows < p.shape.grain ? p.batch.most_rows : p.shape.grain;
        in.batch.most_nodes_to_store = 1;
      }
      if (!status) status = run();
    }
    in.batch = p.batch;
  }
  if (status || !in.batch.stores || !in.state.tails.base) return status;
  return launch_delta_store_tail(in, stream);
}

int32_t load_forward() {
  int32_t status = load_delta_chunks();
  if (!status) status = load_delta_nodes();
  if (!status) status = load_delta_read();
  if (!status) status = load_delta_store_nodes();
  if (!status) status = load_delta_store_tail();
  if (!status) status = load_delta_pieces();
  if (!status) status = load_delta_half_chunks();
  if (!status) status = load_delta_half_nodes();
  if (!status) status = load_delta_half_read();
  if (!status) status = load_delta_half_scan();
  return status;
}

// ---- backward -----------------------------------------------------------------------------------------------------------

bool accepts_backward(const void* problem) {
  const MixerBackward& p = *static_cast<const MixerBackward*>(problem);
  return takes_shape(p.shape, p.state) && takes_dtype(p.gradient.node_layout.dtype) &&
         takes_dtype(p.gradient.tail_layout.dtype) && take_views(p.q, p.k, p.v, p.gate, p.write, p.lambda, p.dy) &&
         take_views(p.dq, p.dk, p.dv, p.dgate, p.dwrite, p.dlambda);
}

void measure_backward(const void* problem, const Limits& limits, Need* need) {
  *need = Need();
  const MixerShape& shape = static_cast<const MixerBackward*>(problem)->shape;
  need->shared = bytes_needed(shape, limits, backward_bytes);
  if (fits_halves(shape)) need->shared = greater_need(need->shared, bytes_needed(shape, limits, half_backward_bytes));
}

int32_t launch_half_backward(const MixerBackward& p, const DeltaInputs& in, const Counts& counts, char* memory,
                             void* stream) {
  const int64_t heads = heads_at_once(p.shape, counts, half_backward_bytes);
  Carver carver(memory);
  DeltaGradients scratch;
  carve_half_gradients(p.shape, counts, heads, &carver, &scratch);
  DeltaHalfScratch& nodes = scratch.halves.nodes;
  return for_passes(p.shape, heads, &scratch.nodes, [&] {
    nodes.first_head = scratch.nodes.first_head;
    nodes.pass_heads = scratch.nodes.pass_heads;
    int32_t status = launch_delta_half_chunks(in, nodes, stream);
    if (!status) status = launch_delta_half_nodes(in, nodes, stream);
    if (!status) status = launch_delta_half_walks(in, scratch.halves, p.dy, stream);
    if (!status) status = launch_delta_half_node_gradients(in, scratch.halves, p.dy, stream);
    if (!status) status = launch_delta_half_read_gradients(in, scratch, p, stream);
    if (!status) status = launch_delta_half_row_gradients(in, scratch, p, stream);
    if (!status) status = launch_delta_group_sums(in, scratch, p, stream);
    return status;
  });
}

int32_t launch_backward(const void* problem, const Limits& limits, char* memory, void* stream) {
  const MixerBackward& p = *static_cast<const MixerBackward*>(problem);
  const DeltaInputs in(p);
  const Counts counts(p.shape, limits);
  const bool exact = any_is_exact(p.q, p.k, p.v, p.dy);
  const bool stateless = !p.state.nodes.base && !p.state.tails.base && !p.gradient.nodes.base && !p.gradient.tails.base;
  if (!exact && stateless && fits_halves(p.shape)) return launch_half_backward(p, in, counts, memory, stream);
  const int64_t heads = heads_at_once(p.shape, counts, backward_bytes);
  Carver carver(memory);
  DeltaGradients scratch;
  carve_gradients(p.shape, counts, heads, &carver, &scratch);
  return for_passes(p.shape, heads, &scratch.nodes, [&] {
    int32_t status = launch_delta_chunks(in, scratch.nodes, true, exact, stream);
    if (!status) status = launch_delta_nodes(in, scratch.nodes, exact, stream);
    if (!status) status = launch_delta_walks(in, scratch, p.dy, p.gradient, exact, stream);
    if (!status) status = launch_delta_node_gradients(in, scratch, p.dy, p.gradient, exact, stream);
    if (!status) status = launch_delta_read_gradients(in, scratch, p, exact, stream);
    if (!status) status = launch_delta_row_gradients(in, scratch, p, exact, stream);
    if (!status) status = launch_delta_group_sums(in, scratch, p, stream);
    return status;
  });
}

int32_t load_backward() {
  int32_t status = load_delta_chunks();
  if (!status) status = load_delta_nodes();
  if (!status) status = load_delta_walks();
  if (!status) status = load_delta_node_gradients();
  if (!status) status = load_delta_read_gradients();
  if (!status) status = load_delta_row_gradients();
  if (!status) status = load_delta_group_sums();
  if (!status) status = load_delta_half_chunks();
  if (!status) status = load_delta_half_nodes();
  if (!status) status = load_delta_half_walks();
  if (!status) status = load_delta_half_node_gradients();
  if (!status) status = load_delta_half_read_gradients();
  if (!status) status = load_delta_half_row_gradients();
  return status;
}

const Kernel kKernels[] = {
    {Op::MixerForward, "cuda.delta_rule.forward.portable", accepts_forward, measure_forward, nullptr, nullptr, nullptr,
     nullptr, launch_forward, load_forward},
    {Op::MixerBackward, "cuda.delta_rule.backward.portable", accepts_backward, measure_backward, nullptr, nullptr, nullptr,
     nullptr, launch_backward, load_backward},
};

}  // namespace

KernelTable delta_rule_kernels() { return {kKernels, static_cast<int64_t>(sizeof kKernels / sizeof kKernels[0])}; }

}  // namespace lla::cuda
