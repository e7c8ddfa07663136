// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: gradients of queries and of λ, and what rows read.
//
// One block of threads works on one block of rows and one part of a group's heads, one head after the other. The first
// warpgroup brings things; each of the two others has half of the rows, whose queries and their gradient stay in registers.
// Nodes come first: then the keys, which all heads share, may still be on their way.
#include <type_traits>

#include "cuda/common/reduce.h"
#include "cuda/hopper/capability.h"
#include "cuda/hopper/fragment.h"
#include "cuda/hopper/register_budget.h"
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_fragments.h"
#include "cuda/hopper/tile_rows.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kRowThreads = 384;
constexpr int kGroupRegisters[3] = {56, 224, 224};
static_assert(registers_suffice(kGroupRegisters), "more registers than a block has");

constexpr int kHeadStages = 2;            // of what belongs to one head
constexpr int kMostNodes = 4;             // in the ring
constexpr int kFinishers = 2;             // warps of the first group
constexpr int kInner = kInnerLevels + 1;  // levels within a block

constexpr int kClearBarrier = 1, kFlowBarrier = 2;  // numbered ones

struct RowLayout {
  int ring = 0;
  int staged = 0;  // floats of a row in the staging: sums of levels within the block, of entries; odd, for the banks' sake
  uint32_t node_bytes = 0, value_bytes = kBlock * kSwizzleRow, factor_bytes = 0, staging_bytes = 0;
  uint32_t k_begin = 0, head_begin = 0, ring_begin = 0, factors_begin = 0, staging_begin = 0, flows_begin = 0;
  uint32_t barriers_begin = 0, bytes = 0;

  // False if it does not fit.
  bool place(int key_dim, int entries, int64_t bytes_of_factors, int nodes) {
    const uint32_t row_bytes = kBlock * static_cast<uint32_t>(key_dim) * 2;
    ring = nodes;
    staged = (kInner + entries) | 1;
    node_bytes = static_cast<uint32_t>(key_dim) * kSwizzleRow;
    factor_bytes = static_cast<uint32_t>(bytes_of_factors);
    staging_bytes = static_cast<uint32_t>(kBlock * staged * 4);
    k_begin = row_bytes;
    head_begin = 2 * row_bytes;
    ring_begin = head_begin + 2 * kHeadStages * value_bytes;
    factors_begin = ring_begin + static_cast<uint32_t>(ring) * node_bytes;
    staging_begin = factors_begin + kHeadStages * factor_bytes;
    flows_begin = staging_begin + kHeadStages * staging_bytes;
    barriers_begin = flows_begin + kHeadStages * kFinishers * kMostEntries * 4;
    bytes = barriers_begin + 256;
    return bytes <= kMostShared;
  }
  LLA_HOST_DEVICE uint32_t v(int stage) const { return head_begin + 2 * static_cast<uint32_t>(stage) * value_bytes; }
  LLA_HOST_DEVICE uint32_t dy(int stage) const { return v(stage) + value_bytes; }
  LLA_HOST_DEVICE uint32_t node(int i) const { return ring_begin + static_cast<uint32_t>(i) * node_bytes; }
  LLA_HOST_DEVICE uint32_t factors(int stage) const { return factors_begin + static_cast<uint32_t>(stage) * factor_bytes; }
  // [128][staged]: gradients of a row's λ at the levels, before those that share a column are added up.
  LLA_HOST_DEVICE uint32_t staging(int stage) const { return staging_begin + static_cast<uint32_t>(stage) * staging_bytes; }
  // [finisher][entry]
  LLA_HOST_DEVICE uint32_t flows(int stage) const {
    return flows_begin + static_cast<uint32_t>(stage) * kFinishers * kMostEntries * 4;
  }
};

struct RowBarriers {
  Barrier q_full, q_free, k_full, k_free;
  Barrier head_full[kHeadStages], tiles_free[kHeadStages], factors_free[kHeadStages];  // of v and dy; of factors
  Barrier staged_full[kHeadStages], staged_free[kHeadStages];
  Barrier node_full[kMostNodes], node_free[kMostNodes];
};
static_assert(sizeof(RowBarriers) <= 256, "place is kept for them");

struct RowTask {
  BlockOfRows block;
  int part = 0, first = 0, end = 0;  // heads
  uint32_t reads = 0;                // levels of the nodes
};

// Calls work(task) for this block's tasks, one of each round. Every other round goes backwards: otherwise some blocks would
// always get those rows that read the most nodes, as bits of their numbers would not change.
template <bool kLinear, class Work>
__device__ __forceinline__ void each_task(const BackwardParameters& in, int tasks, Work work) {
  const int blocks = static_cast<int>(gridDim.x);
  int turn = static_cast<int>(blockIdx.x);
#pragma unroll 1
  for (int begin = 0; begin < tasks; begin += blocks) {
    const int number = begin + turn;
    turn = blocks - 1 - turn;
    RowTask task;
    if (number >= tasks || !find_block(in, number / in.part_count, &task.block)) continue;
    task.part = in.part_begin + number % in.part_count;
    task.first = in.part_first(task.part);
    task.end = in.part_end(task.part);
    task.reads = task.block.reads(kLinear);
    work(task);
  }
}

// One thread: brings queries, keys and what belongs to each head.
template <int kKeyDim, bool kLinear>
__device__ void copy_rows(const BackwardParameters& in, const RowLayout& layout, char* shared, RowBarriers* barriers,
                          int tasks) {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;
  Turn stage, once;
  each_task<kLinear>(in, tasks, [&](const RowTask& task) {
    const int group = in.group_of(task.first), row = task.block.row;
    const auto copy = [&](char* to, const CUtensorMap* map, Barrier* full, Barrier* free) {
      wait(free, once.phase ^ 1);
      arrive_expect_bytes(full, RowTile::kBytes);
      for (int panel = 0; panel < RowTile::kPanels; ++panel)
        load_box(to + panel * RowTile::kPanelBytes, map, {64 * panel, row, group}, full);
    };
    const uint32_t factor_bytes = static_cast<uint32_t>(BlockFactors::bytes(__popcll(task.reads), kLinear));
    copy(shared, &in.q, &barriers->q_full, &barriers->q_free);
    if (in.adds && in.dq.present())  // what the end of the task waits for
      prefetch_bytes(part_sums<kKeyDim>(in, in.dq_parts, task.block, task.part), kBlock * kKeyDim * 4);
    for (int i = task.first; i < task.end; ++i) {
      const int head = in.head_of(i);
      Barrier* full = &barriers->head_full[stage.index];
      wait(&barriers->tiles_free[stage.index], stage.phase ^ 1);
      arrive_expect_bytes(full, 2 * layout.value_bytes + factor_bytes);
      load_box(shared + layout.dy(stage.index), &in.dy, {0, row, head}, full);
      load_box(shared + layout.v(stage.index), &in.v, {0, row, head}, full);
      wait(&barriers->factors_free[stage.index], stage.phase ^ 1);
      load_bytes(shared + layout.factors(stage.index), in.factors(in.slot(task.block.place, i)), factor_bytes, full);
      if (i == task.first) copy(shared + layout.k_begin, &in.k, &barriers->k_full, &barriers->k_free);
      stage.next(kHeadStages);
    }
    once.next(1);
  });
}

// One thread: brings the nodes.
template <int kKeyDim, bool kLinear>
__device__ void copy_nodes(const BackwardParameters& in, const RowLayout& layout, char* shared, RowBarriers* barriers,
                           int tasks) {
  Turn ring;
  each_task<kLinear>(in, tasks, [&](const RowTask& task) {
    for (int i = task.first; i < task.end; ++i) {
      for (uint32_t left = task.reads; left; left &= left - 1) {
        const int end = task.block.node_end(__ffsll(left) - 1, kLinear);
        const int64_t slot = in.slot(task.block.place_of(end), i);
        wait(&barriers->node_free[ring.index], ring.phase ^ 1);
        arrive_expect_bytes(&barriers->node_full[ring.index], layout.node_bytes);
        load_box(shared + layout.node(ring.index), &in.nodes, {0, static_cast<int32_t>(slot * kKeyDim)},
                 &barriers->node_full[ring.index]);
        ring.next(layout.ring);
      }
    }
  });
}

// What becomes of the gradients of a head's λ: flows and dlambda. A warp of its own for each half of the rows.
template <bool kLinear>
struct Finisher {
  const BackwardParameters& in;
  const RowLayout& layout;
  char* shared;
  RowBarriers* barriers;
  const int half, lane;

  // Row_reads, and the flow of the reads of each entry.
  __device__ __forceinline__ void store_flows(int stage, int64_t slot, int count) const {
    const BlockFactors& f = *reinterpret_cast<const BlockFactors*>(shared + layout.factors(stage));
    const float* staging = reinterpret_cast<const float*>(shared + layout.staging(stage));
    float* flows = reinterpret_cast<float*>(shared + layout.flows(stage));
    const int first = kHalf * half + lane;
    float read[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = first + 32 * h;
#pragma unroll
      for (int l = 1; l < kInner; ++l)
        read[h] = fmaf(kLinear ? 1.0f : f.lambda(l)[r], staging[r * layout.staged + l], read[h]);
    }
    // Two entries at a time: sixteen lanes add up each.
    const bool upper = lane >= 16;
#pragma unroll 1
    for (int entry = 0; entry < count; entry += 2) {
      float flow[2] = {0, 0};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (entry + e >= count) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int r = first + 32 * h;
          const float x =
              staging[r * layout.staged + kInner + entry + e] * (kLinear ? 1.0f : f.lambda(kInner + entry + e)[r]);
          read[h] += x;
          flow[e] += x;
        }
      }
      float sum = (upper ? flow[1] : flow[0]) + __shfl_xor_sync(kAllLanes, upper ? flow[0] : flow[1], 16);
#pragma unroll
      for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
      if (lane % 16 == 0) flows[half * kMostEntries + entry + lane / 16] = sum;
    }
    in.row_reads[slot * kBlock + first] = read[0];
    in.row_reads[slot * kBlock + first + 32] = read[1];
    if (count == 0) return;
    sync_some(kFlowBarrier, 32 * kFinishers);
    if (half == 0 && lane < count) in.reads[slot * kMostEntries + lane] = flows[lane] + flows[kMostEntries + lane];
  }

  __device__ __forceinline__ void store_lambda(int stage, const RowTask& task, int head) const {
    const int levels = static_cast<int>(in.shape.levels), staged = kInner + __popcll(task.reads);
    float* staging = reinterpret_cast<float*>(shared + layout.staging(stage)) + kHalf * half * layout.staged;
    // The first of a row's sums that belongs to a level or a higher one.
    const auto place = [&](int level) {
      if (level <= kInner) return level;
      return level - kInner > 31 ? staged : kInner + __popcll(task.reads & ((uint32_t{1} << (level - kInner)) - 1));
    };
    if (in.shape.absorb && staged > place(levels - 1) + 1) {  // several are the last column's
#pragma unroll 1
      for (int r = lane; r < kHalf; r += 32) {
        float* sums = staging + r * layout.staged;
#pragma unroll 1
        for (int n = place(levels - 1) + 1; n < staged; ++n) sums[place(levels - 1)] += sums[n];
      }
      __syncwarp();
    }
    const uint32_t live = live_rows(task);
    const int step = 2 * static_cast<int>(in.dlambda.row_stride);
#pragma unroll 1
    for (int column = lane % 16; column < levels; column += 16) {
      const int at = place(column);
      const bool is_read = at < staged && (column == levels - 1 || place(column + 1) > at);
      float* sums = staging + lane / 16 * layout.staged + (is_read ? at : 0);
      const int64_t element = task.block.index * in.dlambda.sequence_stride + head * in.dlambda.head_stride + column +
                              (task.block.row + kHalf * half + lane / 16) * in.dlambda.row_stride;
      if (in.dlambda.accumulate) {
        if (!is_read) continue;
        add_column(sums, element, step, live);
      }
      if (in.dlambda.dtype == LLA_F32)
        store_column<8>(static_cast<float*>(in.dlambda.data) + element, step, sums, is_read, live,
                        [](float x) { return x; });
      else
        store_column<4>(static_cast<unsigned short*>(in.dlambda.data) + element, step, sums, is_read, live, [&](float x) {
          return static_cast<unsigned short>(in.dlambda.dtype == LLA_BF16 ? pack<Half::kBf16>(x, 0)
                                                                          : pack<Half::kF16>(x, 0));
        });
    }
  }

  // Sixteen lanes are for the columns of a row, so that a lane has every other row. Bit i: its row 2 i is the call's.
  __device__ __forceinline__ uint32_t live_rows(const RowTask& task) const {
    const int from = task.block.lo - kHalf * half - lane / 16, to = task.block.hi - kHalf * half - lane / 16;
    const auto below = [](int row) {  // rows 2 i < row
      const int count = row <= 0 ? 0 : (row + 1) / 2;
      return count >= 32 ? ~uint32_t{0} : (uint32_t{1} << count) - 1;
    };
    return below(to) & ~below(from);
  }
  // Stores, or zeroes, a column of a lane's rows. In few instructions: two warps do this for what eight compute.
  template <int kAhead, class Element, class Convert>
  __device__ __forceinline__ void store_column(Element* to, int step, const float* sums, bool is_read, uint32_t live,
                                               Convert convert) const {
#pragma unroll 1
    for (int begin = 0; begin < kHalf / 2; begin += kAhead, live >>= kAhead) {
      float x[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i, sums += 2 * layout.staged) x[i] = is_read ? *sums : 0.0f;
#pragma unroll
      for (int i = 0; i < kAhead; ++i, to += step) {
        if (live >> i & 1) *to = convert(x[i]);
      }
    }
  }
  // Adds what is already there to the staged sums.
  __device__ __forceinline__ void add_column(float* sums, int64_t element, int step, uint32_t live) const {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int begin = 0; begin < kHalf / 2; begin += kAhead, live >>= kAhead, element += kAhead * step) {
      float x[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        x[i] = live >> i & 1 ? load_element(in.dlambda.data, in.dlambda.dtype, element + i * step) : 0.0f;
#pragma unroll
      for (int i = 0; i < kAhead; ++i, sums += 2 * layout.staged) *sums += x[i];
    }
  }

  __device__ __forceinline__ void run(int tasks) const {
    Turn stage;
    each_task<kLinear>(in, tasks, [&](const RowTask& task) {
#pragma unroll 1
      for (int i = task.first; i < task.end; ++i) {
        wait(&barriers->staged_full[stage.index], stage.phase);
        store_flows(stage.index, in.slot(task.block.place, i), __popcll(task.reads));
        release(&barriers->factors_free[stage.index]);
        if constexpr (!kLinear) {
          if (in.dlambda.present()) {
            store_lambda(stage.index, task, in.head_of(i));
          }
        }
        release(&barriers->staged_free[stage.index]);
        stage.next(kHeadStages);
      }
    });
  }
};

// A warpgroup's half of the rows.
template <int kKeyDim, bool kLinear>
struct RowGradients {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;     // q, k: [row][dk]
  using ValueTile = SwizzledTile<kBlock, kColumns>;  // v, dy: [row][dv]
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;  // [dk][dv]
  static constexpr int kSteps = kKeyDim / kDepthStep, kValueSteps = kColumns / kDepthStep;
  static constexpr int kParts = kKeyDim / 64;  // of 64 rows of a node
  template <int kValue>
  using Number = std::integral_constant<int, kValue>;

  const BackwardParameters& in;
  const RowLayout& layout;
  char* shared;
  RowBarriers* barriers;
  const int half, warp, lane;  // half: the warpgroup; warp: of the warpgroup
  Turn stage, once;
  Turn arrived, ring;  // of nodes: the next whose products begin, and the next to give back
  uint32_t query[kSteps][4];
  uint32_t dy[kValueSteps][4];
  float gradient[kKeyDim / 2];

  __device__ __forceinline__ RowGradients(const BackwardParameters& parameters, const RowLayout& places, char* memory,
                                          RowBarriers* all)
      : in(parameters),
        layout(places),
        shared(memory),
        barriers(all),
        half(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32 % 4, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  // The warp's first row; a lane has elements of the rows lane / 4 and 8 more, and in the end the sums of one of the two.
  __device__ __forceinline__ int first_row() const { return kHalf * half + 16 * warp; }
  __device__ __forceinline__ int own_row() const { return lane / 4 + 8 * (lane % 2); }
  __device__ __forceinline__ float own_of(const float (&rows)[2]) const { return lane % 2 == 0 ? rows[0] : rows[1]; }
  // Sums over the four lanes that share the two rows.
  __device__ __forceinline__ float sum_own(const float (&rows)[2]) const {
    const float sum = own_of(rows) + __shfl_xor_sync(kAllLanes, lane % 2 == 0 ? rows[1] : rows[0], 1);
    return sum + __shfl_xor_sync(kAllLanes, sum, 2);
  }
  __device__ __forceinline__ const BlockFactors& factors() const {
    return *reinterpret_cast<const BlockFactors*>(shared + layout.factors(stage.index));
  }
  // Of the warp's first row.
  __device__ __forceinline__ float* staging() const {
    return reinterpret_cast<float*>(shared + layout.staging(stage.index)) + first_row() * layout.staged;
  }

  template <class Tile, int kCount>
  __device__ __forceinline__ void load_rows(uint32_t (&to)[kCount][4], uint32_t begin) {
    const uint32_t tile = shared_address(shared + begin);
    const Place at = block_row(lane);
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
      load_matrices<false>(to[step], tile + Tile::offset(first_row() + at.row, kDepthStep * step + at.column));
      pin(to[step]);
    }
  }

  __device__ __forceinline__ static bool is_partial(const BlockOfRows& block) { return block.lo > 0 || block.hi < kBlock; }
  // Zeroes the rows of two tiles that are not the call's.
  __device__ __forceinline__ void clear_dead(const BlockOfRows& block, uint32_t a, uint32_t b, int panels) const {
    if (!is_partial(block)) return;
    constexpr int kThreads = 32 * kRowWarps;
    const int thread = static_cast<int>(threadIdx.x) - (kRowThreads - kThreads);
    clear_rows<kBlock>(shared + a, panels, block.lo, block.hi, thread, kThreads);
    clear_rows<kBlock>(shared + b, panels, block.lo, block.hi, thread, kThreads);
    fence_shared_writes();
    sync_some(kClearBarrier, kThreads);
  }

  // ---- products ----------------------------------------------------------------------------------------------------------

  // dy times 64 rows of [...][dv] at `from`: rows of v, or of a node.
  __device__ __forceinline__ void issue_values(Sums& sum, uint64_t from) {
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step)
      multiply<Half::kBf16, Major::kDepth>(
          sum, dy[step], moved(from, depth_offset(Major::kDepth, step * kDepthStep, ValueTile::kPanelBytes)), step > 0);
    commit_products();
  }
  __device__ __forceinline__ uint64_t values(int piece) const {
    return moved(describe(shared_address(shared + layout.v(stage.index)), Major::kDepth, ValueTile::kPanelBytes),
                 outer_offset(Major::kDepth, static_cast<uint32_t>(kHalf * piece), ValueTile::kPanelBytes));
  }
  __device__ __forceinline__ uint64_t node(int slot, int part) const {
    return moved(describe(shared_address(shared + layout.node(slot)), Major::kDepth, NodeTile::kPanelBytes),
                 outer_offset(Major::kDepth, static_cast<uint32_t>(64 * part), NodeTile::kPanelBytes));
  }

  // Queries times the keys of half `piece`.
  __device__ __forceinline__ void issue_scores(Sums& sum, int piece) {
    const uint64_t k = moved(describe(shared_address(shared + layout.k_begin), Major::kDepth, RowTile::kPanelBytes),
                             outer_offset(Major::kDepth, static_cast<uint32_t>(kHalf * piece), RowTile::kPanelBytes));
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      multiply<Half::kBf16, Major::kDepth>(
          sum, query[step], moved(k, depth_offset(Major::kDepth, step * kDepthStep, RowTile::kPanelBytes)), step > 0);
    commit_products();
  }

  // Adds weights times these keys to the gradient.
  __device__ __forceinline__ void issue_keys(const uint32_t (&weights)[4][4], int piece) {
    const uint64_t k = moved(describe(shared_address(shared + layout.k_begin), Major::kOuter, RowTile::kPanelBytes),
                             depth_offset(Major::kOuter, static_cast<uint32_t>(kHalf * piece), RowTile::kPanelBytes));
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply<Half::kBf16, Major::kOuter>(
          gradient, weights[step], moved(k, depth_offset(Major::kOuter, step * kDepthStep, RowTile::kPanelBytes)), true);
    commit_products();
  }

  // ---- nodes -------------------------------------------------------------------------------------------------------------

  // 64 columns of dy times a node: adds them to the gradient, and their products with the queries.
  template <int kPart>
  __device__ __forceinline__ void add_node(const Sums& z, const float (&weight)[2], float (&dot)[2]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int h = i / 2 % 2, e = 32 * kPart + i;
      const uint32_t pair = query[e / 8][e % 8 / 2];
      gradient[e] = fmaf(weight[h], z[i], gradient[e]);
      dot[h] = fmaf(i % 2 == 0 ? low_of(pair) : high_of(pair), z[i], dot[h]);
    }
  }

  // Leaves what an entry gives to the gradient of λ.
  __device__ __forceinline__ void finish_node(int entry, const float (&dot)[2]) const {
    const float own = sum_own(dot);
    const BlockFactors& f = factors();
    if (lane % 4 >= 2) return;
    float base = f.start[first_row() + own_row()];
    if constexpr (!kLinear) base *= f.newer[entry];
    staging()[own_row() * layout.staged + kInner + entry] = base * own;
  }

  // Products number kNumber of kEntries nodes, in x and y by turns, or, after these, with the block's first half.
  template <int kNumber, int kEntries>
  __device__ __forceinline__ void issue_number(Sums& sum) {
    if constexpr (kNumber >= kEntries * kParts) {
      if constexpr (kNumber % 2 == 1) wait(&barriers->k_full, once.phase);
    } else if constexpr (kNumber % kParts == 0) {
      wait(&barriers->node_full[arrived.index], arrived.phase);
    }
    if constexpr (kParts == 1) make_fresh(sum);
    fence_products(sum);
    if constexpr (kNumber >= kEntries * kParts) {
      if constexpr (kNumber % 2 == 0)
        issue_values(sum, values(0));
      else
        issue_scores(sum, 0);
    } else {
      issue_values(sum, node(arrived.index, kNumber % kParts));
      if constexpr (kNumber % kParts == kParts - 1) arrived.next(layout.ring);
    }
  }

  // Reads kEntries nodes from `entry` on. While products are added, the next ones run: it is written out, as no product may
  // be under way where the compiler sees a choice of registers. kLast: ends with the products with the first half's values
  // in x, and with its keys in y.
  template <int kEntries, bool kLast>
  __device__ __forceinline__ void read_nodes(Sums& x, Sums& y, int entry) {
    constexpr int kCount = kEntries * kParts;
    const BlockFactors& f = factors();
    const int r = first_row() + lane / 4;
    const float* lambda = f.lambda(kInner) + r;
    float weight[2], dot[2];
    issue_number<0, kEntries>(x);
    issue_number<1, kEntries>(y);
    const auto add = [&](auto number) {
      constexpr int kNumber = decltype(number)::value;
      if constexpr (kNumber < kCount) {
        Sums& sum = kNumber % 2 == 0 ? x : y;
        if constexpr (kNumber % kParts == 0) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            dot[h] = 0;
            weight[h] = f.start[r + 8 * h];
            if constexpr (!kLinear)
              weight[h] *= f.newer[entry + kNumber / kParts] * lambda[(entry + kNumber / kParts) * kBlock + 8 * h];
          }
        }
        wait_products<kLast || kNumber + 1 < kCount ? 1 : 0>(sum);
        add_node<kNumber % kParts>(sum, weight, dot);
        if constexpr (kLast || kNumber + 2 < kCount) issue_number<kNumber + 2, kEntries>(sum);
        if constexpr (kNumber % kParts == kParts - 1) {
          release(&barriers->node_free[ring.index]);
          ring.next(layout.ring);
          finish_node(entry + kNumber / kParts, dot);
        }
      }
    };
    add(Number<0>{});
    add(Number<1>{});
    add(Number<2>{});
    add(Number<3>{});
    if constexpr (kLast) wait_products<0>(x, y);
  }

  // ---- rows of the block -------------------------------------------------------------------------------------------------

  // From products of dy and values, and scores: their gradient, rounded, and what rows read at the levels, without λ. Eights
  // of columns left of the row's own are at one level.
  struct Reads {
    float level[2][kInner];  // [row lane / 4 or 8 more]
  };
  __device__ __forceinline__ static float lambda_of(const BlockFactors& f, int level, int row) {
    return kLinear ? 1.0f : f.lambda(level)[row];
  }

  // Factors of two columns at a level: this lane's of eight n of half `piece`.
  __device__ __forceinline__ float2 columns(const BlockFactors& f, int level, int piece, int n) const {
    const int at = kHalf * piece + 8 * n + 2 * (lane % 4);
    const float2 decay = *reinterpret_cast<const float2*>(&f.level[level - 1][at]);
    const float2 write = *reinterpret_cast<const float2*>(&f.write[at]);
    return make_float2(decay.x * write.x, decay.y * write.y);
  }

  // Columns 8 n ... 8 n + 7, all at one level; row: factors of the two rows.
  __device__ __forceinline__ static void mask_eight(const Sums& product, const Sums& score, int n, float2 column,
                                                    const float (&row)[2], uint32_t (&weights)[4][4], float (&sum)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int e = 4 * n + 2 * h;
      const float x = column.x * product[e], y = column.y * product[e + 1];
      sum[h] = fmaf(y, score[e + 1], fmaf(x, score[e], sum[h]));
      weights[n / 2][2 * (n % 2) + h] = pack<Half::kBf16>(row[h] * x, row[h] * y);
    }
  }

  // The first half, for rows of the second: all at level 7.
  __device__ __forceinline__ void mask_first(const Sums& product, const Sums& score, const BlockFactors& f,
                                             uint32_t (&weights)[4][4], Reads* reads) const {
    const float* level = f.level[kInnerLevels - 1];
    const int r = first_row() + lane / 4;
    const float a[2] = {level[r], level[r + 8]};
    const float row[2] = {a[0] * lambda_of(f, kInnerLevels, r), a[1] * lambda_of(f, kInnerLevels, r + 8)};
    float sum[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < 8; ++n) mask_eight(product, score, n, columns(f, kInnerLevels, 0, n), row, weights, sum);
    reads->level[0][kInnerLevels] = a[0] * sum[0];
    reads->level[1][kInnerLevels] = a[1] * sum[1];
  }

  // An eight of its own row's: row lane / 4, columns 2 (lane % 4) and the next.
  template <int kSide>
  __device__ __forceinline__ uint32_t mask_diagonal(const Sums& product, const Sums& score, int n, const BlockFactors& f,
                                                    Reads* reads) const {
    const int first = first_row() + 8 * kSide, row = first + lane / 4;
    const float scale = static_cast<float>(in.shape.scale);
    float weight[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int e = 4 * n + 2 * kSide + odd, column = 2 * (lane % 4) + odd, differ = lane / 4 ^ column;
      const int l = differ >= 4 ? 3 : differ >= 2 ? 2 : differ;
      const float* level = f.level[differ == 0 ? 0 : l - 1];
      const float pair = level[row] * level[first + column];  // also where it is not asked for: no branches
      const float base = column > lane / 4 ? 0.0f : (differ == 0 ? scale : pair) * f.write[first + column];
      const float x = base * product[e], read = x * score[e];
      weight[odd] = lambda_of(f, l, row) * x;
#pragma unroll
      for (int i = 0; i < 4; ++i) reads->level[kSide][i] += i == l ? read : 0.0f;
    }
    return pack<Half::kBf16>(weight[0], weight[1]);
  }

  // The half with itself.
  __device__ __forceinline__ void mask_own(const Sums& product, const Sums& score, const BlockFactors& f,
                                           uint32_t (&weights)[4][4], Reads* reads) const {
    const int r = first_row() + lane / 4;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (pair > warp) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[pair][i] = 0;
      } else if (pair < warp) {
        const bool far = (pair ^ warp) >= 2;
        const int l = far ? 6 : 5;
        const float* level = f.level[l - 1];
        const float a[2] = {level[r], level[r + 8]};
        const float row[2] = {a[0] * lambda_of(f, l, r), a[1] * lambda_of(f, l, r + 8)};
        float sum[2] = {0, 0};
        mask_eight(product, score, 2 * pair, columns(f, l, half, 2 * pair), row, weights, sum);
        mask_eight(product, score, 2 * pair + 1, columns(f, l, half, 2 * pair + 1), row, weights, sum);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          reads->level[h][6] += far ? a[h] * sum[h] : 0.0f;
          reads->level[h][5] += far ? 0.0f : a[h] * sum[h];
        }
      } else {
        const float* level = f.level[3];
        const float a[2] = {0, level[r + 8]}, row[2] = {0, a[1] * lambda_of(f, 4, r + 8)};
        float sum[2] = {0, 0};
        mask_eight(product, score, 2 * pair, columns(f, 4, half, 2 * pair), row, weights, sum);
        reads->level[1][4] = a[1] * sum[1];
        weights[pair][0] = mask_diagonal<0>(product, score, 2 * pair, f, reads);
        weights[pair][2] = 0;
        weights[pair][3] = mask_diagonal<1>(product, score, 2 * pair + 1, f, reads);
      }
    }
  }

  // Sums over the four lanes of a row; of each row a lane gets levels 2 (lane % 4) and the next.
  __device__ __forceinline__ void sum_lanes(const Reads& reads, float (&to)[2][2]) const {
    const bool high = (lane & 2) != 0, odd = (lane & 1) != 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low_level = reads.level[h][i], high_level = reads.level[h][4 + i];
        four[i] = (high ? high_level : low_level) + __shfl_xor_sync(kAllLanes, high ? low_level : high_level, 2);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        to[h][i] = (odd ? four[2 + i] : four[i]) + __shfl_xor_sync(kAllLanes, odd ? four[i] : four[2 + i], 1);
    }
  }

  // ---- results -----------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void stage_levels(const Reads& reads) const {
    float sums[2][2];
    sum_lanes(reads, sums);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* to = staging() + (lane / 4 + 8 * h) * layout.staged + 2 * (lane % 4);
      to[0] = sums[h][0];
      to[1] = sums[h][1];
    }
  }

  __device__ __forceinline__ void store_rows(const RowTask& task) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row() + lane / 4 + 8 * h;
      if (row < task.block.lo || row >= task.block.hi) continue;
      uint32_t* to =
          static_cast<uint32_t*>(in.dq.at(task.block.index, task.block.row + row, in.group_of(task.first))) + lane % 4;
#pragma unroll
      for (int n = 0; n < kKeyDim / 8; ++n) {
        if (8 * n >= static_cast<int>(in.shape.key_dim)) continue;
        const uint32_t old = in.dq.accumulate ? to[4 * n] : 0;
        to[4 * n] = pack<Half::kBf16>(low_of(old) + gradient[4 * n + 2 * h], high_of(old) + gradient[4 * n + 2 * h + 1]);
      }
    }
  }

  __device__ __forceinline__ void store_gradient(const RowTask& task) const {
    if (!in.dq.present()) return;
    if (in.parts_of_group == 1) return store_rows(task);
    store_sums<kKeyDim>(part_sums<kKeyDim>(in, in.dq_parts, task.block, task.part) + first_row() * kKeyDim, gradient,
                        in.adds);
  }

  // ---- the loops ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void run_head(const RowTask& task) {
    wait(&barriers->head_full[stage.index], stage.phase);
    clear_dead(task.block, layout.v(stage.index), layout.dy(stage.index), 1);
    load_rows<ValueTile>(dy, layout.dy(stage.index));
    wait(&barriers->staged_free[stage.index], stage.phase ^ 1);
    Sums x, y;
    make_fresh(x);
    make_fresh(y);
    const int count = __popcll(task.reads);
    int entry = 0;
#pragma unroll 1
    for (; entry + 1 < count; ++entry) read_nodes<1, false>(x, y, entry);
    if (entry + 1 == count)
      read_nodes<1, true>(x, y, entry);
    else
      read_nodes<0, true>(x, y, entry);
    const BlockFactors& f = factors();
    Reads reads;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int l = 0; l < kInner; ++l) reads.level[h][l] = 0;
    uint32_t weights[4][4];
    if (half == 1) {
      mask_first(x, y, f, weights, &reads);
      fence_products(gradient);
      issue_keys(weights, 0);
      fence_products(x, y);
      issue_values(x, values(1));
      issue_scores(y, 1);
      wait_products<0>(gradient, x, y);
#pragma unroll
      for (int n = 0; n < 4; ++n) pin(weights[n]);
    }
    release(&barriers->tiles_free[stage.index]);
    mask_own(x, y, f, weights, &reads);
    fence_products(gradient);
    issue_keys(weights, half);
    stage_levels(reads);
    wait_products<0>(gradient);
#pragma unroll
    for (int n = 0; n < 4; ++n) pin(weights[n]);
    release(&barriers->staged_full[stage.index]);
    release(&barriers->factors_free[stage.index]);
    stage.next(kHeadStages);
  }

  __device__ __forceinline__ void run(int tasks) {
    each_task<kLinear>(in, tasks, [&](const RowTask& task) {
      wait(&barriers->q_full, once.phase);
      if (is_partial(task.block)) wait(&barriers->k_full, once.phase);
      clear_dead(task.block, 0, layout.k_begin, RowTile::kPanels);
      load_rows<RowTile>(query, 0);
#pragma unroll
      for (int e = 0; e < kKeyDim / 2; ++e) gradient[e] = 0;
#pragma unroll 1
      for (int i = task.first; i < task.end; ++i) {
        run_head(task);
        if (i == task.first) release(&barriers->q_free);  // products with the queries are through
      }
      release(&barriers->k_free);
      once.next(1);
      store_gradient(task);
    });
  }
};

template <int kKeyDim, bool kLinear>
__global__ void __launch_bounds__(kRowThreads, 1)
    row_gradients(const __grid_constant__ BackwardParameters in, const __grid_constant__ RowLayout layout, int tasks) {
  char* shared = shared_memory();
  RowBarriers* barriers = reinterpret_cast<RowBarriers*>(shared + layout.barriers_begin);
  if (threadIdx.x == 0) {
    init_barrier(&barriers->q_full, 1);
    init_barrier(&barriers->k_full, 1);
    init_barrier(&barriers->q_free, kRowWarps);
    init_barrier(&barriers->k_free, kRowWarps);
    for (int i = 0; i < kHeadStages; ++i) {
      init_barrier(&barriers->head_full[i], 1);
      init_barrier(&barriers->tiles_free[i], kRowWarps);
      init_barrier(&barriers->factors_free[i], kRowWarps + kFinishers);
      init_barrier(&barriers->staged_full[i], kRowWarps);
      init_barrier(&barriers->staged_free[i], kFinishers);
    }
    for (int i = 0; i < kMostNodes; ++i) {
      init_barrier(&barriers->node_full[i], 1);
      init_barrier(&barriers->node_free[i], kRowWarps);
    }
    publish_barriers();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4) {
    keep_registers<kGroupRegisters[0]>();
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) copy_rows<kKeyDim, kLinear>(in, layout, shared, barriers, tasks);
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) copy_nodes<kKeyDim, kLinear>(in, layout, shared, barriers, tasks);
    } else {
      Finisher<kLinear>{in, layout, shared, barriers, warp - kFinishers, static_cast<int>(threadIdx.x) % 32}.run(tasks);
    }
  } else {
    take_registers<kGroupRegisters[1]>();
    RowGradients<kKeyDim, kLinear>(in, layout, shared, barriers).run(tasks);
  }
}

template <int kKeyDim>
int32_t launch_rows(const BackwardParameters& in, void* stream) {
  RowLayout layout;
  int nodes = kMostNodes;
  while (nodes > 0 && !layout.place(kKeyDim, in.entries, in.factor_bytes, nodes)) --nodes;
  if (nodes == 0) return LLA_INTERNAL;
  const int64_t tasks = in.batch.count * in.blocks * in.part_count, most = multiprocessors();
  if (tasks >= int64_t{1} << 30) return LLA_INTERNAL;
  return launch(in.linear ? row_gradients<kKeyDim, true> : row_gradients<kKeyDim, false>, tasks < most ? tasks : most,
                kRowThreads, layout.bytes, stream, in, layout, static_cast<int>(tasks));
}

}  // namespace

int32_t launch_row_gradients(const BackwardParameters& in, int key_dim, void* stream) {
  return key_dim == 64 ? launch_rows<64>(in, stream) : launch_rows<128>(in, stream);
}

int32_t load_row_gradients() {
  int32_t status = load_kernel(row_gradients<64, false>);
  if (status == LLA_OK) status = load_kernel(row_gradients<64, true>);
  if (status == LLA_OK) status = load_kernel(row_gradients<128, false>);
  if (status == LLA_OK) status = load_kernel(row_gradients<128, true>);
  return status;
}

}  // namespace lla::cuda::hopper
