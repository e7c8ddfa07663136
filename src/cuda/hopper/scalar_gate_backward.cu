// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: which problems it takes, its scratch, and the launch, slice by slice.
#include <algorithm>

#include "cuda/common/scratch_limit.h"
#include "cuda/hopper/capability.h"
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_kernels.h"
#include "cuda/hopper/scalar_gate_views.h"

namespace lla::cuda::hopper {

namespace {

// Blocks of threads that fill the device for long: larger slices of a group would only write more parts.
constexpr int64_t kFill = 512;

// What sizes depend on. None of them, nor any size, falls when a limit rises.
struct Extent {
  int64_t places, piece_places, blocks;
  int entries, piece_levels;
  bool linear, f16;

  // Of some sequences, each with places of its own.
  Extent each(int64_t sequences) const {
    Extent some = *this;
    some.places = sequences * blocks;
    some.piece_places = sequences * BackwardParameters::pieces_of(blocks);
    return some;
  }

  Extent(const MixerShape& shape, int32_t dtype, int64_t rows, int64_t sequences, int64_t most_rows, int64_t most_length)
      : places((rows >> kBlockLog) + 2 * sequences),
        piece_places(BackwardParameters::piece_places(rows, sequences)),
        blocks(blocks_of(most_rows, most_length)),
        entries(shape.levels == 0 ? 1 : node_levels(blocks, most_length)),
        piece_levels(BackwardParameters::piece_levels_of(most_length, shape.levels == 0)),
        linear(shape.levels == 0),
        f16(dtype == LLA_F16) {}
};

// Heads and parts of a shape. They say in which order the parts of dq and dk are summed: nothing else may change them.
struct Parts {
  int key_dim, members, bundle, of_group, count;

  explicit Parts(const MixerShape& shape) {
    key_dim = key_columns(shape);
    members = static_cast<int>(shape.heads / shape.groups);
    bundle = std::min(members, kBundle);
    of_group = (members + bundle - 1) / bundle;
    count = static_cast<int>(shape.groups) * of_group;
  }
  // Heads that a slice of n parts has at most.
  int heads(int n) const { return n >= of_group ? n / of_group * members : n * bundle; }
};

Size larger(const Size& a, const Size& b) { return a.valid() && b.valid() && a.value() < b.value() ? b : a; }

// Bytes of scratch of a slice of n parts: all of whole groups, or some of one group. With memory: carves it.
Size carve(const Extent& extent, const Parts& parts, int n, bool chained, char* memory, BackwardParameters* to) {
  Size used;
  const auto take = [&](Size bytes) {
    char* here = memory ? memory + used.value() : nullptr;
    used += bytes.aligned(256);
    return here;
  };
  const Size slots = Size(extent.places) * parts.heads(n);
  const int64_t factor_bytes = BlockFactors::bytes(extent.entries, extent.linear);
  const Size sums = Size(kBlock) * parts.key_dim * 4, part = sums * extent.places;
  const Size chains = chained ? sums * multiprocessors() : Size(0);
  const Size all_parts = n > 1 && parts.of_group > 1 && !(chained && extent.linear) ? larger(part * n, chains) : chains;
  const Size nodes = slots * parts.key_dim * kColumns * 2;
  BackwardParameters unused, &in = to ? *to : unused;
  in.factor_bytes = factor_bytes;
  in.factors_memory = take(slots * factor_bytes);
  in.totals = reinterpret_cast<float*>(take(slots * 4));
  in.up = reinterpret_cast<float*>(take(slots * 4));
  in.reads = reinterpret_cast<float*>(take(slots * kMostEntries * 4));
  in.through = reinterpret_cast<float*>(take(slots * 4));
  in.row_reads = reinterpret_cast<float*>(take(slots * kBlock * 4));
  if (extent.f16) {
    in.units = reinterpret_cast<BlockUnits*>(take(slots * static_cast<int64_t>(sizeof(BlockUnits))));
    in.joins = reinterpret_cast<float*>(take(slots * 4));
    in.downs = reinterpret_cast<float*>(take(slots * 4));
    in.head_ranges = reinterpret_cast<BlockRange*>(take(slots * static_cast<int64_t>(sizeof(BlockRange))));
    in.group_ranges = reinterpret_cast<BlockRange*>(take(slots * static_cast<int64_t>(sizeof(BlockRange))));  // not more
  }
  in.piece_levels = extent.piece_levels;
  in.node_pieces = reinterpret_cast<float*>(
      take(Size(extent.piece_places) * extent.piece_levels * parts.heads(n) * parts.key_dim * kColumns * 4));
  // With chains, these. The parts of dq are summed up before anybody writes gradients of nodes, those of dk when nobody
  // reads nodes any more.
  const Size either = larger(nodes, all_parts);
  char *of_nodes = take(either), *of_grads = take(either);
  in.nodes_memory = reinterpret_cast<unsigned short*>(of_nodes);
  in.grads_memory = reinterpret_cast<unsigned short*>(of_grads);
  if (n > 1 && parts.of_group > 1) {
    in.dq_parts = in.dq_chain = reinterpret_cast<float*>(of_grads);
    in.dk_parts = in.dk_chain = reinterpret_cast<float*>(of_nodes);
  }
  if (n < parts.of_group) {  // a part of its own is added to the sums where it is made
    (n > 1 ? in.dq_sums : in.dq_parts) = reinterpret_cast<float*>(take(part));
    (n > 1 ? in.dk_sums : in.dk_parts) = reinterpret_cast<float*>(take(part));
  }
  return used;
}

Size bytes_of(const Extent& extent, const Parts& parts, int n) { return carve(extent, parts, n, false, nullptr, nullptr); }

bool fits(const Extent& extent, const Parts& parts, int n) { return fits_scratch(bytes_of(extent, parts, n)); }

// Parts of a slice.
int choose_parts(const Extent& extent, const Parts& parts, int64_t blocks) {
  if (fits(extent, parts, parts.count)) return parts.count;
  int n = parts.count - parts.of_group;
  while (n > 0 && !fits(extent, parts, n)) n -= parts.of_group;
  if (n > 0) return n;
  n = static_cast<int>(std::min<int64_t>(parts.of_group - 1, (kFill + blocks - 1) / blocks));
  while (n > 1 && !fits(extent, parts, n)) --n;
  return std::max(n, 1);
}

// Sequences of a slice of whole groups in which tasks chain parts: as many as fit that fill the device well. 0: none. Only
// where all sequences have about the same length, and never more scratch than without.
int64_t choose_sequences(const Extent& extent, const Parts& parts, int64_t count) {
  if (parts.of_group == 1 || count * extent.blocks > extent.places) return 0;
  const Size all = bytes_of(extent, parts, parts.count);
  const int64_t groups = parts.count / parts.of_group, most = multiprocessors();
  int64_t best = 0;
  for (int64_t n = 1; n <= count; ++n) {
    const Size bytes = carve(extent.each(n), parts, parts.count, true, nullptr, nullptr);
    if (!fits_scratch(bytes) || (all.valid() && bytes.value() > all.value())) break;
    const int64_t tasks = n * extent.blocks * groups, rounds = (tasks + most - 1) / most;
    if (10 * tasks >= 9 * rounds * most) best = n;
  }
  return best;
}

// One slice. Kernels whose results nobody wants stay away.
int32_t launch_slice(const BackwardParameters& in, const RangeViews& ranges, int key_dim, void* stream) {
  const bool gates = in.dgate.present(), rows = gates || in.dq.present() || in.dlambda.present();
  const bool columns = gates || in.dk.present() || in.dv.present() || in.dwrite.present();
  const bool ends = (in.part_begin + in.part_count) % in.parts_of_group == 0;  // a group
  const bool sums = in.parts_of_group > 1 && (ends || in.dq_sums), dq_sums = sums && !in.chained_rows,
             dk_sums = sums && !in.chained;
  int32_t status = LLA_OK;
  const auto then = [&](bool wanted, auto step) {
    if (wanted && status == LLA_OK) status = step();
  };
  then(rows || columns, [&] { return launch_factors(in, stream); });
  then(in.f16 && (rows || columns), [&] { return launch_backward_units(in, ranges, stream); });
  then(rows || gates, [&] { return launch_block_nodes(in, key_dim, stream); });
  then(rows, [&] { return launch_row_gradients(in, key_dim, stream); });
  then(dq_sums && in.dq.present(), [&] { return launch_part_sums(in, in.dq, in.dq_parts, in.dq_sums, key_dim, stream); });
  then(columns, [&] { return launch_node_readers(in, key_dim, stream); });
  then(columns, [&] { return launch_node_gradients(in, key_dim, stream); });
  then(columns, [&] { return launch_column_gradients(in, key_dim, stream); });
  then(gates, [&] { return launch_block_flows(in, stream); });
  then(dk_sums && in.dk.present(), [&] { return launch_part_sums(in, in.dk, in.dk_parts, in.dk_sums, key_dim, stream); });
  return status;
}

// Keys of at most kMostKeyDim columns, values of at most kColumns.
int32_t launch_piece(const MixerBackward& p, char* scratch, void* stream) {
  const MixerShape& shape = p.shape;
  const BatchView& batch = p.batch;
  if (batch.count == 0 || batch.most_rows == 0) return LLA_OK;
  const Extent extent(shape, p.q.dtype, batch.total_rows, batch.count, batch.most_rows, batch.most_length);
  const Parts parts(shape);
  const int64_t sequences = choose_sequences(extent, parts, batch.count);
  const bool chained = sequences > 0;
  const int slice =
      chained ? parts.count : choose_parts(extent, parts, std::min(batch.count * extent.blocks, extent.places));
  BackwardParameters in;
  in.shape = shape;
  in.batch = batch;
  in.gate = p.gate;
  in.write = p.write;
  in.lambda = p.lambda;
  in.dq = p.dq;
  in.dk = p.dk;
  in.dv = p.dv;
  in.dgate = p.dgate;
  in.dwrite = p.dwrite;
  in.dlambda = p.dlambda;
  in.linear = extent.linear;
  in.f16 = extent.f16;
  in.places = chained ? extent.each(sequences).places : extent.places;
  in.chained = chained;
  in.chained_rows = chained && in.linear;
  in.blocks = extent.blocks;
  in.entries = extent.entries;
  in.members = parts.members;
  in.bundle = parts.bundle;
  in.parts_of_group = parts.of_group;
  carve(chained ? extent.each(sequences) : extent, parts, slice, chained, scratch, &in);
  const int64_t node_rows = in.places * parts.heads(slice) * parts.key_dim;
  if (in.entries > kMostEntries || node_rows >= int64_t{1} << 31) return LLA_INTERNAL;

  int32_t status = make_map(rows_view(p.q, shape.key_dim, batch.total_rows, shape.groups), &in.q);
  if (status == LLA_OK) status = make_map(rows_view(p.k, shape.key_dim, batch.total_rows, shape.groups), &in.k);
  if (status == LLA_OK) status = make_map(rows_view(p.v, shape.value_dim, batch.total_rows, shape.heads), &in.v);
  if (status == LLA_OK) status = make_map(rows_view(p.dy, shape.value_dim, batch.total_rows, shape.heads), &in.dy);
  const auto nodes_view = [&](unsigned short* memory, int rows) {
    return TensorView<2>{TensorType::kBf16, memory, {kColumns, node_rows}, {2 * kColumns}, {kColumns, rows}};
  };
  if (status == LLA_OK) status = make_map(nodes_view(in.nodes_memory, parts.key_dim), &in.nodes);
  if (status == LLA_OK) status = make_map(nodes_view(in.grads_memory, parts.key_dim), &in.grads);
  if (status == LLA_OK) status = make_map(nodes_view(in.nodes_memory, 64), &in.node_halves);
  if (status == LLA_OK) status = make_map(nodes_view(in.grads_memory, 64), &in.grad_halves);
  in.dv_boxes = p.dv.present() && !p.dv.accumulate && can_copy(p.dv, shape.value_dim, batch.total_rows, shape.heads);
  if (status == LLA_OK && in.dv_boxes)
    status = make_map(rows_view(p.dv, shape.value_dim, batch.total_rows, shape.heads, kWarpRows), &in.dv_rows);

  for (int64_t begin = 0; chained && begin < batch.count && status == LLA_OK; begin += sequences) {
    in.batch.sequences = batch.sequences + begin;
    in.batch.count = std::min(sequences, batch.count - begin);
    in.part_count = parts.count;
    in.head_count = static_cast<int>(shape.heads);
    status = launch_slice(in, {p.q, p.k, p.v, p.dy}, parts.key_dim, stream);
  }
  for (int begin = 0; !chained && begin < parts.count && status == LLA_OK; begin += in.part_count) {
    const int group_end = (begin / parts.of_group + 1) * parts.of_group;
    in.part_begin = begin;
    // Slices are whole groups, or lie within one.
    in.part_count = std::min(slice, (slice < parts.of_group ? group_end : parts.count) - begin);
    in.adds = slice == 1 && begin % parts.of_group > 0;
    in.head_begin = in.part_first(begin);
    in.head_count = in.part_end(begin + in.part_count - 1) - in.head_begin;
    status = launch_slice(in, {p.q, p.k, p.v, p.dy}, parts.key_dim, stream);
  }
  return status;
}

}  // namespace

bool accepts_scalar_gate_backward(const void* problem) {
  const MixerBackward& p = *static_cast<const MixerBackward*>(problem);
  const MixerShape& s = p.shape;
  if (s.mixer != LLA_SCALAR_GATE || s.key_dim < 1 || s.key_dim % 8 != 0) return false;
  if (s.value_dim < 1 || s.value_dim % 8 != 0) return false;
  if (p.q.dtype != LLA_BF16 && p.q.dtype != LLA_F16) return false;
  for (const View* view : {&p.k, &p.v, &p.dy}) {
    if (view->dtype != p.q.dtype) return false;
  }
  for (const View* view : {&p.gate, &p.write, &p.lambda}) {
    if (!is_factor(*view)) return false;
  }
  for (const View* view : {&p.dq, &p.dk, &p.dv}) {
    if (view->present() && (view->dtype != p.q.dtype || !can_store(*view))) return false;
  }
  for (const View* view : {&p.dgate, &p.dwrite, &p.dlambda}) {
    if (view->present() && !is_factor_type(view->dtype)) return false;
  }
  // Histories are for the portable kernels.
  if (p.state.nodes.base || p.state.tails.base || p.gradient.nodes.base || p.gradient.tails.base) return false;
  const int64_t rows = p.batch.total_rows;
  if (p.batch.most_length > kMostLength || rows > (int64_t{1} << 31) - 2 * kBlock) return false;
  return can_copy(p.q, s.key_dim, rows, s.groups) && can_copy(p.k, s.key_dim, rows, s.groups) &&
         can_copy(p.v, s.value_dim, rows, s.heads) && can_copy(p.dy, s.value_dim, rows, s.heads) && is_hopper();
}

// A launch takes as many parts as fit, and its batch may be smaller than the limits allow.
void measure_scalar_gate_backward(const void* problem, const Limits& limits, Need* need) {
  const MixerBackward& p = *static_cast<const MixerBackward*>(problem);
  const Extent extent(p.shape, p.q.dtype, limits.rows, limits.sequences, limits.rows_per_sequence, limits.length);
  const Parts parts(p.shape);
  const Size one = bytes_of(extent, parts, 1), all = bytes_of(extent, parts, parts.count);
  if (!one.valid()) {
    need->shared = -1;
    return;
  }
  need->shared = std::max(one.value(), all.valid() ? std::min(all.value(), most_scratch()) : most_scratch());
}

// Wider keys and values go in pieces: scores are sums over pieces of keys, products with dy sums over pieces of values, so
// that what each piece gives is added up.
int32_t launch_scalar_gate_backward(const void* problem, const Limits&, char* scratch, void* stream) {
  const MixerBackward& p = *static_cast<const MixerBackward*>(problem);
  int32_t status = LLA_OK;
  for (int64_t value = 0; value < p.shape.value_dim; value += kColumns) {
    for (int64_t key = 0; key < p.shape.key_dim && status == LLA_OK; key += kMostKeyDim) {
      MixerBackward piece = p;
      piece.shape.key_dim = std::min(p.shape.key_dim - key, kMostKeyDim);
      piece.shape.value_dim = std::min(p.shape.value_dim - value, int64_t{kColumns});
      for (View* view : {&piece.q, &piece.k, &piece.dq, &piece.dk}) *view = columns_from(*view, key);
      for (View* view : {&piece.v, &piece.dy, &piece.dv}) *view = columns_from(*view, value);
      for (View* view : {&piece.dq, &piece.dk}) view->accumulate |= value > 0;
      piece.dv.accumulate |= key > 0;
      for (View* view : {&piece.dgate, &piece.dwrite, &piece.dlambda}) view->accumulate |= key > 0 || value > 0;
      status = launch_piece(piece, scratch, stream);
    }
  }
  return status;
}

int32_t load_scalar_gate_backward() {
  if (!is_hopper()) return LLA_OK;
  for (const auto load : {load_factors, load_backward_units, load_block_nodes, load_node_readers, load_state_gradients,
                          load_node_gradients, load_row_gradients, load_column_gradients, load_block_flows}) {
    const int32_t status = load();
    if (status != LLA_OK) return status;
  }
  return LLA_OK;
}

}  // namespace lla::cuda::hopper
