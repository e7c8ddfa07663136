// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: which calls sweeps take, how sequences are cut, and the launch.
#include <algorithm>
#include <cstdlib>

#include "cuda/hopper/capability.h"
#include "cuda/hopper/scalar_gate_sweep.h"
#include "cuda/hopper/scalar_gate_views.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kLinearSegmentLog = 7;  // always the same: a linear state's bits depend on where segments end
// Log-linear, the longest: nodes have the same bits however sequences are cut.
constexpr int kSegmentLog = 5;
constexpr int kMostSlots = 7;                         // levels of nodes that shared memory can hold
constexpr int64_t kShortScratch = int64_t{48} << 20;  // that shorter segments may take

bool is_half(const MixerForward& p) { return p.q.dtype == LLA_F16; }

// How sequences are cut.
struct Cut {
  int levels;                // of nodes that are read
  int segment_log = kWhole;  // of blocks
  int64_t segments = 1;      // of one sequence
  int ring = 0;              // tiles for nodes that come from memory

  int slots() const { return segmented() ? segment_log : levels < 1 ? 1 : levels; }
  bool segmented() const { return segment_log != kWhole; }
};

// The scratch of segments; without memory it only counts.
// `half`: fp16.
Size carve(const MixerShape& shape, bool half, int64_t rows, int64_t sequences, int segment_log, char* memory,
           SweepParameters* to) {
  const Size places = (Size(rows >> (kBlockLog + segment_log)) + Size(sequences) * 2) * shape.heads * tiles_of(shape);
  const Size node = places * key_columns(shape) * kColumns;
  Size used;
  const auto take = [&](Size count, int64_t bytes) {
    char* here = memory ? memory + used.value() : nullptr;
    used += (count * bytes).aligned(256);
    return here;
  };
  char* sums = take(node, 4);
  char* decays = take(places, 8);
  char *upper = nullptr, *upper_decays = nullptr;
  if (shape.levels > 0) {
    upper = take(node, 2);
    upper_decays = take(places, 4);
  }
  char *sum_weights = nullptr, *upper_weights = nullptr;
  if (half) {
    sum_weights = take(places, 4);
    if (shape.levels > 0) upper_weights = take(places, 4);
  }
  if (to) {
    to->sums = reinterpret_cast<float*>(sums);
    to->sum_decay = reinterpret_cast<float*>(decays);
    to->upper = reinterpret_cast<unsigned short*>(upper);
    to->upper_decay = reinterpret_cast<float*>(upper_decays);
    to->sum_weight = reinterpret_cast<float*>(sum_weights);
    to->upper_weight = reinterpret_cast<float*>(upper_weights);
  }
  return used;
}

// Blocks that a sequence touches at most, those of its history's raw rows included.
int64_t most_blocks(const MixerShape& shape, int64_t most_rows, int64_t most_length) {
  const int64_t raw = std::max(std::min(shape.grain, kMostTail) >> kBlockLog, int64_t{1}) - 1;
  return std::min(blocks_of(most_rows, most_length) + raw, (most_length + kBlock - 1) >> kBlockLog);
}

// Linear: whether sequences are cut depends on the batch's longest one, but one for which it makes a difference, because it
// is longer than a segment, always is. Log-linear: as is fastest, by the number of blocks that multiprocessors work on one
// after the other; it changes no bit. The emulated device does as the environment says.
Cut choose_cut(const MixerShape& shape, bool half, const BatchView& batch, int old_entries) {
  const int64_t by_position = (batch.most_length + kBlock - 1) >> kBlockLog,
                blocks = old_entries > 0 ? most_blocks(shape, batch.most_rows, batch.most_length)
                                         : blocks_of(batch.most_rows, batch.most_length);
  const auto segments_of = [&](int log) {
    const int64_t whole = (int64_t{1} << log) - 1;
    return std::min(((blocks + whole - 1) >> log) + 1, (by_position + whole) >> log);
  };
  Cut best;
  best.levels = node_levels(blocks, batch.most_length);
  // Tiles of the ring, which nodes of histories need too, beside so many slots; -1: shared memory does not suffice.
  const auto ring_beside = [&](int slots, bool segmented) {
    SharedLayout layout;
    layout.units = half;
    layout.slots = slots;
    layout.ring = segmented || old_entries > 0 ? kRing : 0;
    const int least = layout.ring > 0 ? 1 : 0;
    for (; layout.ring >= least; --layout.ring) {
      if (layout.fit(key_columns(shape), best.levels + old_entries)) return layout.ring;
    }
    return -1;
  };
  if (shape.levels == 0) {
    if (segments_of(kLinearSegmentLog) > 1) best.segment_log = kLinearSegmentLog;
  } else {
    const int64_t units = multiprocessors();
    const int64_t of_head = ((batch.total_rows >> kBlockLog) + 1) * tiles_of(shape), work = of_head * shape.heads;  // blocks
    // Tasks of n blocks, one after the other on each unit.
    const auto rounds_of = [&](int64_t all, int64_t n) { return std::max<int64_t>(1, (all / n + units - 1) / units) * n; };
    const auto rounds = [&](int64_t n) { return rounds_of(work, n); };
    const int64_t pairs = of_head * shape.groups * pairs_of_group(shape);
    const bool equal = batch.total_rows == batch.count * batch.most_rows;
    // In twelfths of the time of a block: segments also make their nodes ahead, two heads in a third of it, and need two
    // more launches.
    int64_t least = INT64_MAX;
    if (best.levels <= kMostSlots && ring_beside(best.slots(), false) >= 0)
      least = 12 * (equal || work <= units * blocks ? rounds(blocks) : work / units + blocks);
    for (int log = kSegmentLog; log >= kShortSegmentLog; --log) {
      if (best.levels <= log || ring_beside(log, true) < 0) continue;
      const Size scratch = carve(shape, half, batch.total_rows, batch.count, log, nullptr, nullptr);
      if (log < kSegmentLog && (!scratch.valid() || scratch.value() > kShortScratch)) continue;
      const int64_t blocks_of_task = int64_t{1} << log;
      const int64_t steps = 12 * rounds(blocks_of_task) + 4 * rounds_of(pairs, blocks_of_task) + 18;
      if (steps < least) best.segment_log = log, least = steps;
    }
  }
#if defined(LLA_CUDA_EMULATED)
  if (const char* log = std::getenv("LLA_EMULATED_SEGMENT_LOG"); log && shape.levels > 0) best.segment_log = std::atoi(log);
#endif
  if (best.segmented()) best.segments = segments_of(best.segment_log);
  if (shape.levels > 0) best.ring = ring_beside(best.slots(), best.segmented());
  return best;
}

}  // namespace

bool accepts_sweep(const MixerForward& p) {
  const MixerShape& s = p.shape;
  if (s.mixer != LLA_SCALAR_GATE || s.key_dim < 1 || s.key_dim % 8 != 0) return false;
  if (s.value_dim < 1 || s.value_dim % 8 != 0) return false;
  if (p.q.dtype != LLA_BF16 && p.q.dtype != LLA_F16) return false;
  for (const View* view : {&p.k, &p.v, &p.y}) {
    if (view->dtype != p.q.dtype) return false;
  }
  for (const View* view : {&p.gate, &p.write, &p.lambda}) {
    if (!is_factor(*view)) return false;
  }
  if (p.batch.most_length > kMostLength) return false;
  const int64_t rows = p.batch.total_rows;
  if (rows > (int64_t{1} << 31) - 2 * kBlock) return false;
  return can_copy(p.q, s.key_dim, rows, s.groups) && can_copy(p.k, s.key_dim, rows, s.groups) &&
         can_copy(p.v, s.value_dim, rows, s.heads) && can_store(p.y) && is_hopper();
}

// Of all ways in which batches within the limits may be cut.
void measure_sweep(const MixerForward& p, const Limits& limits, Need* need) {
  const auto bytes = [&](int log) {
    return carve(p.shape, is_half(p), limits.rows, limits.sequences, log, nullptr, nullptr);
  };
  const int64_t blocks = most_blocks(p.shape, limits.rows_per_sequence, limits.length);
  const int levels = node_levels(blocks, limits.length);
  need->shared = 0;
  if (p.shape.levels == 0) {
    const Size used = bytes(kLinearSegmentLog);
    if (limits.length > kBlock << kLinearSegmentLog) need->shared = used.valid() ? used.value() : -1;
    return;
  }
  for (int log = kShortSegmentLog; log <= kSegmentLog && log < levels; ++log) {
    const Size used = bytes(log);
    if (log < kSegmentLog)
      need->shared = std::max(need->shared, used.valid() ? std::min(used.value(), kShortScratch) : kShortScratch);
    else
      need->shared = used.valid() ? std::max(need->shared, used.value()) : -1;
  }
  const int64_t copies = sliced_bytes(
      p.shape.heads,
      [&](int64_t heads) {
        MixerShape slice = p.shape;
        slice.heads = heads;
        return old_copies_bytes(slice, limits);
      },
      most_old_copies());
  // Wider keys, and chunks of fewer rows, are the portable kernels' where there is a state.
  if (p.shape.key_dim > kMostKeyDim || p.shape.grain % kHalf != 0) return;
  if (need->shared >= 0) need->shared = copies >= 0 ? (Size(need->shared).aligned(256) + copies).value() : -1;
}

int32_t launch_sweep(const MixerForward& p, bool routes, char* scratch, void* stream) {
  const MixerShape& shape = p.shape;
  const BatchView& batch = p.batch;
  if (batch.count == 0 || batch.most_rows == 0) return LLA_OK;
  const bool linear = shape.levels == 0, half = is_half(p);
  const int key_dim = key_columns(shape);
  SweepParameters in;
  in.shape = shape;
  in.batch = batch;
  in.gate = p.gate;
  in.write = p.write;
  in.lambda = p.lambda;
  in.y = p.y;
  in.routes = routes;
  in.tiles = tiles_of(shape);
  if (routes) {
    in.route = sweep_routes(shape, p.state, p.q.dtype);
    in.state = p.state;
    in.grain_shift = bits(shape.grain / kHalf) - 1;
    in.apart = linear ? 0 : std::min(shape.separate_levels() + in.grain_shift, 31);
    if (batch.past_alignment != kNoPast) in.old_entries = old_entries_of(shape, batch.most_length);
  }
  const Cut cut = choose_cut(shape, half, batch, linear ? 0 : in.old_entries);
  const int levels = cut.levels;
  const bool segmented = cut.segmented();
  const int64_t sweeps = batch.count * shape.heads * in.tiles;
  SharedLayout& layout = in.layout;
  Size used;
  if (segmented) {
    in.segment_log = cut.segment_log;
    in.segments = cut.segments;
    used = carve(shape, half, batch.total_rows, batch.count, cut.segment_log, scratch, &in);
  }
  layout.units = half;
  layout.slots = linear ? 2 : cut.slots();
  layout.ring = cut.ring;
  if (cut.ring < 0 || !layout.fit(key_dim, linear ? 0 : levels + in.old_entries)) return LLA_INTERNAL;
  in.tasks = sweeps * in.segments;
  if (in.tasks >= int64_t{1} << 30) return LLA_INTERNAL;

  int32_t status = make_map(rows_view(p.q, shape.key_dim, batch.total_rows, shape.groups), &in.q);
  if (status == LLA_OK) status = make_map(rows_view(p.k, shape.key_dim, batch.total_rows, shape.groups), &in.k);
  if (status == LLA_OK) status = make_map(rows_view(p.v, shape.value_dim, batch.total_rows, shape.heads), &in.v);
  if (status != LLA_OK) return status;
  const bool copies = in.old_entries > 0 && copies_nodes(p) && old_sequences(batch.count, batch.total_rows) > 0;
  if (copies) {
    const int64_t sequences = old_sequences(batch.count, batch.total_rows);
    const int64_t places = sequences * in.old_entries * shape.heads * in.tiles;
    in.old_by_rows = sequences < batch.count;
    in.old_copies = reinterpret_cast<unsigned short*>(scratch + used.value());
    used += (Size(places) * key_dim * kColumns * 2).aligned(256);
    if (half) in.old_largest = reinterpret_cast<float*>(scratch + used.value());
    const int64_t of_head = int64_t{2} * key_dim * kColumns, heads = shape.heads * in.tiles;
    const TensorView<4> view{TensorType::kBf16,
                             in.old_copies,
                             {kColumns, key_dim, heads, sequences * in.old_entries},
                             {2 * kColumns, of_head, of_head * heads},
                             {kColumns, key_dim, 1, 1}};
    status = make_map(view, &in.old_nodes);
    if (status == LLA_OK) status = launch_old_copies(in, key_dim, half, stream);
    if (status != LLA_OK) return status;
  } else if (!linear && in.old_entries > 0) {
    const NodeLayout& nodes = p.state.node_layout;
    const TensorView<4> view{TensorType::kBf16,
                             p.state.nodes.base,
                             {shape.value_dim, shape.key_dim, nodes.heads, int64_t{1} << 30},
                             {2 * shape.value_dim, nodes.head_bytes(), p.state.nodes.stride},
                             {kColumns, key_dim, 1, 1}};
    status = make_map(view, &in.old_nodes);
    if (status != LLA_OK) return status;
  }
  if (segmented) {
    status = make_map(rows_view(p.k, shape.key_dim, batch.total_rows, shape.groups, kHalf), &in.half_k);
    if (status == LLA_OK)
      status = make_map(rows_view(p.v, shape.value_dim, batch.total_rows, shape.heads, kHalf), &in.half_v);
    if (status != LLA_OK) return status;
  }
  if (!linear && segmented) {
    const int64_t places = ((batch.total_rows >> (kBlockLog + in.segment_log)) + 2 * batch.count) * shape.heads * in.tiles;
    TensorView<2> nodes{TensorType::kBf16, in.upper, {kColumns, places * key_dim}, {2 * kColumns}, {64, key_dim}};
    status = make_map(nodes, &in.nodes);
    if (status != LLA_OK) return status;
  }
  return half ? launch_sweeps<Half::kF16>(&in, key_dim, segmented, stream)
              : launch_sweeps<Half::kBf16>(&in, key_dim, segmented, stream);
}

int32_t load_sweep() {
  int32_t status = load_old_copies();
  if (status == LLA_OK) status = load_sweeps<Half::kBf16>();
  return status == LLA_OK ? load_sweeps<Half::kF16>() : status;
}

}  // namespace lla::cuda::hopper
