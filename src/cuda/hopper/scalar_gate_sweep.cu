// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: the sweep's kernel, the nodes of whole segments, and the launch.
#include <algorithm>
#include <cstdlib>

#include "cuda/hopper/capability.h"
#include "cuda/hopper/register_budget.h"
#include "cuda/hopper/scalar_gate_multiply.h"
#include "cuda/hopper/scalar_gate_nodes.h"
#include "cuda/hopper/scalar_gate_sweep.h"
#include "cuda/hopper/scalar_gate_tables.h"
#include "cuda/hopper/scalar_gate_views.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kGroupRegisters[4] = {96, 136, 136, 144};
static_assert(registers_suffice(kGroupRegisters), "more registers than a block has");

constexpr int kLinearSegmentLog = 7;  // always the same: a linear state's bits depend on where segments end
// Log-linear: nodes have the same bits however sequences are cut. Shorter segments fill the device with few sequences.
constexpr int kSegmentLog = 5, kShortSegmentLog = 3;
constexpr int kMostSlots = 7;                         // levels of nodes that shared memory can hold
constexpr int64_t kShortScratch = int64_t{32} << 20;  // that shorter segments may take

// One thread: brings q, k and v of all blocks of all tasks.
template <int kKeyDim, bool kNodesOnly>
__device__ void copy_rows(const SweepParameters& in, char* shared, Barriers* barriers) {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;
  Turn turn;
  for (int64_t number = blockIdx.x; number < in.tasks; number += gridDim.x) {
    const Task task = find_task(in, number);
    if (kNodesOnly && task.last) continue;
    for (int block = task.first; block < task.end; ++block) {
      const int row = LiveRows(task, block).row;
      const auto copy = [&](char* to, const CUtensorMap* map, Barrier* full, Barrier* free) {
        wait(free, turn.phase ^ 1);
        arrive_expect_bytes(full, RowTile::kBytes);
        for (int panel = 0; panel < RowTile::kPanels; ++panel)
          load_box(to + panel * RowTile::kPanelBytes, map, {64 * panel, row, task.group}, full);
      };
      const int i = turn.index;
      if constexpr (!kNodesOnly) copy(shared + in.layout.q(i), &in.q, &barriers->q_full[i], &barriers->q_free[i]);
      copy(shared + in.layout.k(i), &in.k, &barriers->k_full[i], &barriers->k_free[i]);
      wait(&barriers->v_free[i], turn.phase ^ 1);
      arrive_expect_bytes(&barriers->v_full[i], kBlock * kSwizzleRow);
      load_box(shared + in.layout.v(i), &in.v, {kColumns * task.tile, row, task.head}, &barriers->v_full[i]);
      turn.next(in.layout.stages);
    }
  }
}

// One thread: brings the nodes of older segments and of the history, for each block anew.
template <int kKeyDim>
__device__ void copy_nodes(const SweepParameters& in, char* shared, Barriers* barriers) {
  Turn turn;
  for (int64_t number = blockIdx.x; number < in.tasks; number += gridDim.x) {
    const Task task = find_task(in, number);
    const auto next = [&] {
      wait(&barriers->ring_free[turn.index], turn.phase ^ 1);
      arrive_expect_bytes(&barriers->ring_full[turn.index], in.layout.node_bytes);
    };
    for (int block = task.first; block < task.end; ++block) {
      for (uint32_t left = task.upper(); left; left &= left - 1) {
        const int u = __ffsll(left) - 1;
        const int64_t place = in.place(task.places + task.upper_end(u), task.head, task.tile);
        next();
        load_box(shared + in.layout.ring_slot(turn.index), &in.nodes, {0, static_cast<int32_t>(place * kKeyDim)},
                 &barriers->ring_full[turn.index]);
        turn.next(in.layout.ring);
      }
      for (int entry = 0; entry < task.old_count(); ++entry) {
        int level;
        const int32_t id = in.batch.sequences[task.sequence].history.node[task.old_level(entry, in.grain_shift, &level)];
        next();
        load_box(shared + in.layout.ring_slot(turn.index), &in.old_nodes,
                 {kColumns * task.tile, 0, static_cast<int32_t>(in.state.layer_head(task.head)), id},
                 &barriers->ring_full[turn.index]);
        turn.next(in.layout.ring);
      }
    }
  }
}

template <int kKeyDim, bool kLinear, bool kNodesOnly>
__global__ void __launch_bounds__(kSweepThreads, 1) sweep(const __grid_constant__ SweepParameters in) {
  char* shared = shared_memory();
  Barriers* barriers = reinterpret_cast<Barriers*>(shared + in.layout.barriers_begin);
  constexpr int kNodeWarps = kNodesOnly ? kKeyDim / 16 : 4, kReaders = kNodesOnly ? kNodeWarps : kRowWarps + kNodeWarps;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMostStages; ++i) {
      init_barrier(&barriers->q_full[i], 1);
      init_barrier(&barriers->k_full[i], 1);
      init_barrier(&barriers->v_full[i], 1);
      init_barrier(&barriers->q_free[i], kRowWarps);
      init_barrier(&barriers->k_free[i], kReaders);
      init_barrier(&barriers->v_free[i], kReaders);
    }
    for (int i = 0; i < 2; ++i) {
      init_barrier(&barriers->tables_full[i], 2);
      init_barrier(&barriers->tables_free[i], kReaders);
      init_barrier(&barriers->reads_done[i], kRowWarps);
    }
    for (int i = 0; i < kRing; ++i) {
      init_barrier(&barriers->ring_full[i], 1);
      init_barrier(&barriers->ring_free[i], kRowWarps);
    }
    for (int i = 0; i < kNodeTurns; ++i) init_barrier(&barriers->node_done[i], kNodeWarps);
    publish_barriers();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4) {
    keep_registers<kGroupRegisters[0]>();
    if constexpr (!kNodesOnly) {
      if (warp > 0) wait_for_kernel_before();  // the rows' copies need not
    }
    if (warp == 0) {
      if (threadIdx.x == 0) copy_rows<kKeyDim, kNodesOnly>(in, shared, barriers);
    } else if (warp == 3) {
      if constexpr (!kLinear && !kNodesOnly) {
        if (in.layout.ring > 0 && threadIdx.x % 32 == 0) copy_nodes<kKeyDim>(in, shared, barriers);
      }
    } else {
      make_tables<kLinear, kNodesOnly>(in, shared, barriers, warp - 1);
    }
  } else if (warp < 12) {
    take_registers<kGroupRegisters[1]>();
    if constexpr (!kNodesOnly)
      RowSweep<kKeyDim, kLinear>(in, shared, barriers).run();
    else if (kNodeWarps == 8 && warp >= 8)
      NodeSweep<kKeyDim, kLinear, true>(in, shared, barriers, 0).run();
  } else {
    take_registers<kGroupRegisters[3]>();
    if constexpr (kLinear && !kNodesOnly) wait_for_kernel_before();
    NodeSweep<kKeyDim, kLinear, kNodesOnly>(in, shared, barriers, kNodesOnly ? kNodeWarps / 8 : 0).run();
  }
}

constexpr int kJoinThreads = 256;

// After the sweeps over all segments but the last for their sums: the nodes that end with segments, or, linear, the states
// before them. One thread: four elements of a sequence's nodes, in order. As a sweep over the whole sequence does it, to the
// bit.
template <bool kLinear>
__global__ void __launch_bounds__(kJoinThreads)
    join_segments(const __grid_constant__ SweepParameters in, int64_t size, int64_t blocks, int64_t tasks) {
  let_next_kernel_begin();  // it waits before it reads what comes from here
  wait_for_kernel_before();
  for (int64_t number = blockIdx.x; number < tasks; number += gridDim.x) {
    const int64_t element = number % blocks * kJoinThreads + threadIdx.x;
    const int64_t tile = number / blocks % in.tiles, head = number / blocks / in.tiles % in.shape.heads;
    const int64_t b = number / blocks / in.tiles / in.shape.heads;
    const Sequence& sequence = in.batch.sequences[b];
    if (!in.takes(sequence) || sequence.rows <= 0 || 4 * element >= size) continue;
    const int64_t oldest = sequence.position >> (kBlockLog + in.segment_log);
    const int64_t count = ((sequence.position + sequence.rows - 1) >> (kBlockLog + in.segment_log)) - oldest;
    const int64_t places = in.first_place(sequence, b);
    if constexpr (kLinear) {
      float4 state = make_float4(0, 0, 0, 0);
      if (const LinearState old(in, sequence, head, tile); old.is_there()) {
        const int row = static_cast<int>(4 * element / kColumns), column = static_cast<int>(4 * element % kColumns);
        state =
            make_float4(old.get(row, column), old.get(row, column + 1), old.get(row, column + 2), old.get(row, column + 3));
      }
      for (int64_t i = 0; i <= count; ++i) {
        const int64_t place = in.place(places + i, head, tile);
        float4* at = reinterpret_cast<float4*>(in.sums + place * size) + element;
        float4 sum = state;
        if (i < count) {
          sum = *at;
          const float decay = decay_of(in.sum_decay[2 * place]);
          sum = make_float4(fmaf(decay, state.x, sum.x), fmaf(decay, state.y, sum.y), fmaf(decay, state.z, sum.z),
                            fmaf(decay, state.w, sum.w));
        }
        *at = state;
        state = sum;
      }
    } else {
      // Of the newest node of each level, which are what is joined: what other blocks of threads write is not there yet.
      float latest[kMostLevels];  // log decays
      uint2 contents[kMostLevels];
      constexpr int kAhead = 4;  // segments whose sums are under way
      float4 sums[kAhead] = {};
      float2 decays[kAhead] = {};
      const auto load_sum = [&](int64_t i, float4* content, float2* decay) {
        if (i >= count) return;
        const int64_t place = in.place(places + i, head, tile);
        *content = reinterpret_cast<const float4*>(in.sums + place * size)[element];
        *decay = reinterpret_cast<const float2*>(in.sum_decay)[place];
      };
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load_sum(i, &sums[i], &decays[i]);
      uint32_t present = 0;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t place = in.place(places + i, head, tile), segment = oldest + i;
        const int level = __ffsll(~segment) - 1;
        float4 sum = sums[0];
        const float total = decays[0].x;
        float newer = decays[0].y;
#pragma unroll
        for (int n = 0; n + 1 < kAhead; ++n) sums[n] = sums[n + 1], decays[n] = decays[n + 1];
        load_sum(i + kAhead, &sums[kAhead - 1], &decays[kAhead - 1]);
        // The child of level u ends 2^u segments before; a sequence may begin behind it.
        for (int u = 0; u < level && (present >> u & 1) != 0; ++u) {
          const float factor = quick_decay(total + newer);
          const uint2 x = contents[u];
          sum = make_float4(fmaf(factor, low_of(x.x), sum.x), fmaf(factor, high_of(x.x), sum.y),
                            fmaf(factor, low_of(x.y), sum.z), fmaf(factor, high_of(x.y), sum.w));
          newer += latest[u];
        }
        const float decay = total + newer;
        latest[level] = decay;
        contents[level] = make_uint2(pack<Half::kBf16>(sum.x, sum.y), pack<Half::kBf16>(sum.z, sum.w));
        present = (present >> level << level) | uint32_t{1} << level;
        reinterpret_cast<uint2*>(in.upper + place * size)[element] = contents[level];
        if (element == 0) in.upper_decay[place] = decay;
      }
    }
  }
}

int64_t tiles_of(const MixerShape& shape) { return (shape.value_dim + kColumns - 1) / kColumns; }
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
Size carve(const MixerShape& shape, int64_t rows, int64_t sequences, int segment_log, char* memory, SweepParameters* to) {
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
  if (to) {
    to->sums = reinterpret_cast<float*>(sums);
    to->sum_decay = reinterpret_cast<float*>(decays);
    to->upper = reinterpret_cast<unsigned short*>(upper);
    to->upper_decay = reinterpret_cast<float*>(upper_decays);
  }
  return used;
}

// Linear: whether sequences are cut depends on the batch's longest one, but one for which it makes a difference, because it
// is longer than a segment, always is. Log-linear: as is fastest, by the number of blocks that multiprocessors work on one
// after the other; it changes no bit. The emulated device does as the environment says.
Cut choose_cut(const MixerShape& shape, const BatchView& batch, int old_entries) {
  const int64_t by_position = (batch.most_length + kBlock - 1) >> kBlockLog,
                blocks = blocks_of(batch.most_rows, batch.most_length);
  const auto segments_of = [&](int log) {
    const int64_t whole = (int64_t{1} << log) - 1;
    return std::min(((blocks + whole - 1) >> log) + 1, (by_position + whole) >> log);
  };
  Cut best;
  best.levels = node_levels(blocks, batch.most_length);
  // Tiles of the ring, which nodes of histories need too, beside so many slots; -1: shared memory does not suffice.
  const auto ring_beside = [&](int slots, bool segmented) {
    SharedLayout layout;
    layout.slots = slots;
    layout.ring = segmented || old_entries > 0 ? kRing : 0;
    const int least = layout.ring > 0 ? 1 : 0;
    for (; layout.ring >= least; --layout.ring) {
      if (layout.fit(key_columns(shape), best.levels + old_entries, false)) return layout.ring;
    }
    return -1;
  };
  if (shape.levels == 0) {
    if (segments_of(kLinearSegmentLog) > 1) best.segment_log = kLinearSegmentLog;
  } else {
    const int64_t units = multiprocessors();
    const int64_t work = ((batch.total_rows >> kBlockLog) + 1) * shape.heads * tiles_of(shape);  // blocks
    // Tasks of n blocks, one after the other on each unit.
    const auto rounds = [&](int64_t n) { return std::max<int64_t>(1, (work / n + units - 1) / units) * n; };
    const bool equal = batch.total_rows == batch.count * batch.most_rows;
    // In quarters of the time of a block: segments also make their nodes ahead, in a third of it, and need two more
    // launches.
    int64_t least = INT64_MAX;
    if (best.levels <= kMostSlots && ring_beside(best.slots(), false) >= 0)
      least = 4 * (equal || work <= units * blocks ? rounds(blocks) : work / units + blocks);
    for (int log = kSegmentLog; log >= kShortSegmentLog; --log) {
      if (best.levels <= log || ring_beside(log, true) < 0) continue;
      const Size scratch = carve(shape, batch.total_rows, batch.count, log, nullptr, nullptr);
      if (log < kSegmentLog && (!scratch.valid() || scratch.value() > kShortScratch)) continue;
      const int64_t steps = rounds(int64_t{1} << log) * 16 / 3 + 6;
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

template <int kKeyDim, bool kLinear>
int32_t launch_sweeps(SweepParameters* in, bool segmented, void* stream) {
  const int64_t most = multiprocessors();
  const auto blocks = [&](int64_t tasks) { return tasks < most ? tasks : most; };
  int32_t status = LLA_OK;
  if (segmented) {
    const int64_t size = int64_t{kKeyDim} * kColumns, parts = size / 4 / kJoinThreads;
    const int64_t joins = in->batch.count * in->shape.heads * in->tiles * parts;
    SweepParameters nodes = *in;
    nodes.layout.ring = 0;
    if (!nodes.layout.fit(kKeyDim, 0, true)) return LLA_INTERNAL;
    status = launch(sweep<kKeyDim, kLinear, true>, blocks(in->tasks), kSweepThreads, nodes.layout.bytes, stream, nodes);
    if (status == LLA_OK)
      status = launch_early(join_segments<kLinear>, joins, kJoinThreads, 0, stream, *in, size, parts, joins);
  }
  if (status == LLA_OK)
    status =
        segmented
            ? launch_early(sweep<kKeyDim, kLinear, false>, blocks(in->tasks), kSweepThreads, in->layout.bytes, stream, *in)
            : launch(sweep<kKeyDim, kLinear, false>, blocks(in->tasks), kSweepThreads, in->layout.bytes, stream, *in);
  return status;
}

template <int kKeyDim>
int32_t load_sweeps() {
  int32_t status = load_kernel(sweep<kKeyDim, true, true>);
  if (status == LLA_OK) status = load_kernel(sweep<kKeyDim, true, false>);
  if (status == LLA_OK) status = load_kernel(sweep<kKeyDim, false, true>);
  if (status == LLA_OK) status = load_kernel(sweep<kKeyDim, false, false>);
  return status;
}

}  // namespace

bool accepts_sweep(const MixerForward& p) {
  const MixerShape& s = p.shape;
  if (s.mixer != LLA_SCALAR_GATE || s.key_dim < 1 || s.key_dim % 8 != 0) return false;
  if (s.value_dim < 1 || s.value_dim % 8 != 0) return false;
  for (const View* view : {&p.q, &p.k, &p.v, &p.y}) {
    if (view->dtype != LLA_BF16) return false;
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
  const auto bytes = [&](int log) { return carve(p.shape, limits.rows, limits.sequences, log, nullptr, nullptr); };
  const int64_t blocks = blocks_of(limits.rows_per_sequence, limits.length);
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
}

int32_t launch_sweep(const MixerForward& p, bool routes, char* scratch, void* stream) {
  const MixerShape& shape = p.shape;
  const BatchView& batch = p.batch;
  if (batch.count == 0 || batch.most_rows == 0) return LLA_OK;
  const bool linear = shape.levels == 0;
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
    in.route = sweep_routes(shape, p.state);
    in.state = p.state;
    in.grain_shift = bits(shape.grain) - 1 - kBlockLog;
    in.apart = linear ? 0 : std::min(shape.separate_levels() + in.grain_shift, 31);
    if (in.route.histories && batch.past_alignment != kNoPast)
      in.old_entries = linear ? 1 : bits(batch.most_length >> kBlockLog) + 1;
  }
  const Cut cut = choose_cut(shape, batch, linear ? 0 : in.old_entries);
  const int levels = cut.levels;
  const bool segmented = cut.segmented();
  const int64_t sweeps = batch.count * shape.heads * in.tiles;
  SharedLayout& layout = in.layout;
  if (segmented) {
    in.segment_log = cut.segment_log;
    in.segments = cut.segments;
    carve(shape, batch.total_rows, batch.count, cut.segment_log, scratch, &in);
  }
  layout.slots = linear ? 2 : cut.slots();
  layout.ring = cut.ring;
  if (cut.ring < 0 || !layout.fit(key_dim, linear ? 0 : levels + in.old_entries, false)) return LLA_INTERNAL;
  in.tasks = sweeps * in.segments;
  if (in.tasks >= int64_t{1} << 30) return LLA_INTERNAL;

  int32_t status = make_map(rows_view(p.q, shape.key_dim, batch.total_rows, shape.groups), &in.q);
  if (status == LLA_OK) status = make_map(rows_view(p.k, shape.key_dim, batch.total_rows, shape.groups), &in.k);
  if (status == LLA_OK) status = make_map(rows_view(p.v, shape.value_dim, batch.total_rows, shape.heads), &in.v);
  if (status != LLA_OK) return status;
  if (!linear && in.old_entries > 0) {
    const NodeLayout& nodes = p.state.node_layout;
    const TensorView<4> view{TensorType::kBf16,
                             p.state.nodes.base,
                             {shape.value_dim, shape.key_dim, nodes.heads, int64_t{1} << 30},
                             {2 * shape.value_dim, nodes.head_bytes(), p.state.nodes.stride},
                             {kColumns, key_dim, 1, 1}};
    status = make_map(view, &in.old_nodes);
    if (status != LLA_OK) return status;
  }
  if (!linear && segmented) {
    const int64_t places = ((batch.total_rows >> (kBlockLog + in.segment_log)) + 2 * batch.count) * shape.heads * in.tiles;
    TensorView<2> nodes{TensorType::kBf16, in.upper, {kColumns, places * key_dim}, {2 * kColumns}, {64, key_dim}};
    status = make_map(nodes, &in.nodes);
    if (status != LLA_OK) return status;
  }
  if (key_dim == 64)
    return linear ? launch_sweeps<64, true>(&in, segmented, stream) : launch_sweeps<64, false>(&in, segmented, stream);
  return linear ? launch_sweeps<128, true>(&in, segmented, stream) : launch_sweeps<128, false>(&in, segmented, stream);
}

int32_t load_sweep() {
  int32_t status = load_sweeps<64>();
  if (status == LLA_OK) status = load_sweeps<128>();
  if (status == LLA_OK) status = load_kernel(join_segments<true>);
  if (status == LLA_OK) status = load_kernel(join_segments<false>);
  return status;
}

}  // namespace lla::cuda::hopper
