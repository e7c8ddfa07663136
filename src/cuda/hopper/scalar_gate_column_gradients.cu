// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: what the rows of a block get as sources, dk, dv and dwrite, and what others read of them.
// The mirror of the forward within a block: rows of the products here are sources.
#include "cuda/hopper/capability.h"
#include "cuda/hopper/register_budget.h"
#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_multiply.h"
#include "cuda/hopper/tile_rows.h"

namespace lla::cuda::hopper {

namespace {

constexpr int kColumnThreads = 384;  // warpgroups: one that brings tiles, two that multiply, each for 64 sources
constexpr int kColumnWarps = 8;      // that multiply
constexpr int kHeadStages = 2;
constexpr int kGroupRegisters[3] = {40, 232, 232};
static_assert(registers_suffice(kGroupRegisters), "more registers than a block has");

// Shared memory: q and k stay for all heads of a part; the rest comes for each head, and its factors last.
template <int kKeyDim>
struct ColumnLayout {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;     // q, k: [row][dk]
  using ValueTile = SwizzledTile<kBlock, kColumns>;  // v, dy: [row][dv]
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;  // [dk][dv]
  static constexpr uint32_t kQ = 0, kK = RowTile::kBytes, kHeads = 2 * RowTile::kBytes;
  static constexpr uint32_t kV = 0, kDy = ValueTile::kBytes, kNode = 2 * ValueTile::kBytes;  // in a stage
  static constexpr uint32_t kStageBytes = kNode + NodeTile::kBytes;
  static constexpr uint32_t kStaging = kHeads + kHeadStages * kStageBytes;
  static constexpr uint32_t kSources = kStaging + kColumnWarps * kStagingBytes;
  static constexpr uint32_t kBarriers = kSources + kHeadStages * sizeof(SourceFactors);
  static constexpr uint32_t kBytes = kBarriers + 64;
};

struct ColumnBarriers {
  Barrier rows_full, rows_free;  // q and k
  Barrier full[kHeadStages], sources_full[kHeadStages], free[kHeadStages];
};
static_assert(sizeof(ColumnBarriers) <= 64, "place is kept for them");

// Task: a block and a part of the heads.
__device__ __forceinline__ bool find_task(const BackwardParameters& in, int64_t number, BlockOfRows* block, int* part) {
  *part = in.part_begin + static_cast<int>(number % in.part_count);
  return find_block(in, number / in.part_count, block);
}

// One thread: brings q, k, v, dy and the gradients of nodes.
template <int kKeyDim>
__device__ void copy_tiles(const BackwardParameters& in, int64_t tasks, char* shared, ColumnBarriers* barriers) {
  using Layout = ColumnLayout<kKeyDim>;
  using RowTile = typename Layout::RowTile;
  Turn stage;
  uint32_t phase = 0;
  for (int64_t number = blockIdx.x; number < tasks; number += gridDim.x) {
    BlockOfRows block;
    int part;
    if (!find_task(in, number, &block, &part)) continue;
    const int first = in.part_first(part), end = in.part_end(part);
    for (int i = first; i < end; ++i) {
      char* to = shared + Layout::kHeads + stage.index * Layout::kStageBytes;
      Barrier* full = &barriers->full[stage.index];
      wait(&barriers->free[stage.index], stage.phase ^ 1);
      arrive_expect_bytes(full, Layout::kStageBytes);
      const int head = in.head_of(i);
      load_box(to + Layout::kV, &in.v, {0, block.row, head}, full);
      load_box(to + Layout::kDy, &in.dy, {0, block.row, head}, full);
      // No node: a box before the tensor, zeros.
      const int64_t slot = block.makes ? in.slot(block.place, i) : -1;
      load_box(to + Layout::kNode, &in.grads, {0, static_cast<int32_t>(slot * kKeyDim)}, full);
      stage.next(kHeadStages);
      if (i > first) continue;
      wait(&barriers->rows_free, phase ^ 1);
      arrive_expect_bytes(&barriers->rows_full, 2 * RowTile::kBytes);
      for (int panel = 0; panel < RowTile::kPanels; ++panel) {
        const uint32_t at = panel * RowTile::kPanelBytes;
        load_box(shared + Layout::kQ + at, &in.q, {64 * panel, block.row, in.group_of(i)}, &barriers->rows_full);
        load_box(shared + Layout::kK + at, &in.k, {64 * panel, block.row, in.group_of(i)}, &barriers->rows_full);
      }
      phase ^= 1;
    }
  }
}

// One warp: brings the factors.
template <int kKeyDim>
__device__ void copy_sources(const BackwardParameters& in, int64_t tasks, char* shared, ColumnBarriers* barriers) {
  using Layout = ColumnLayout<kKeyDim>;
  constexpr int kPieces = sizeof(SourceFactors) / 16, kEach = kPieces / 32;
  static_assert(kPieces % 32 == 0, "a lane has as many as the others");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Turn stage;
  for (int64_t number = blockIdx.x; number < tasks; number += gridDim.x) {
    BlockOfRows block;
    int part;
    if (!find_task(in, number, &block, &part)) continue;
    const int end = in.part_end(part);
    for (int i = in.part_first(part); i < end; ++i) {
      const uint4* from = reinterpret_cast<const uint4*>(in.sources + in.slot(block.place, i)) + lane;
      uint4* to = reinterpret_cast<uint4*>(shared + Layout::kSources + stage.index * sizeof(SourceFactors)) + lane;
      wait(&barriers->free[stage.index], stage.phase ^ 1);
#pragma unroll
      for (int begin = 0; begin < kEach; begin += 2) {
        const uint4 one = from[32 * begin], two = from[32 * begin + 32];
        to[32 * begin] = one;
        to[32 * begin + 32] = two;
      }
      release(&barriers->sources_full[stage.index]);
      stage.next(kHeadStages);
    }
  }
}

template <int kKeyDim, int kPart>
struct ColumnSweep {
  using Layout = ColumnLayout<kKeyDim>;
  using RowTile = typename Layout::RowTile;
  using ValueTile = typename Layout::ValueTile;
  using NodeTile = typename Layout::NodeTile;
  static constexpr int kSources = kHalf * kPart;  // the first

  const BackwardParameters& in;
  char* shared;
  ColumnBarriers* barriers;
  const int warp, lane;
  Turn stage;
  uint32_t phase = 0;       // of q and k
  float keys[kKeyDim / 2];  // dk, of all heads so far

  // What a thread has of a head; [2]: of its sources first() and 8 on.
  struct Scalars {
    float others[2] = {0, 0}, self[2] = {0, 0};  // flow of what others, the node's readers too, and the row itself read
  };

  __device__ __forceinline__ ColumnSweep(const BackwardParameters& parameters, char* memory, ColumnBarriers* all)
      : in(parameters),
        shared(memory),
        barriers(all),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32 % 4, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ int first() const { return kSources + 16 * warp + lane / 4; }
  __device__ __forceinline__ char* tile(uint32_t place) const {
    return shared + Layout::kHeads + stage.index * Layout::kStageBytes + place;
  }
  __device__ __forceinline__ const SourceFactors& sources() const {
    return *reinterpret_cast<const SourceFactors*>(shared + Layout::kSources + stage.index * sizeof(SourceFactors));
  }
  // An operand's descriptor. Its address is made anew each time: kept in registers over all heads, descriptors would leave
  // no room for the sums.
  template <class Tile>
  __device__ __forceinline__ uint64_t operand(const char* tile, Major major, int outer, int depth) const {
    uint32_t address[1] = {shared_address(tile)};
    pin(address);
    return moved(describe(address[0], major, Tile::kPanelBytes),
                 outer_offset(major, static_cast<uint32_t>(outer), Tile::kPanelBytes) +
                     depth_offset(major, static_cast<uint32_t>(depth), Tile::kPanelBytes));
  }

  // The sources' v, 16 columns, in the places of sums.
  __device__ __forceinline__ void load_values(int step, uint32_t (&value)[4]) const {
    const Place at = block_row(lane);
    load_matrices<false>(value, shared_address(tile(Layout::kV)) + (kSources + 16 * warp) * kSwizzleRow +
                                    ValueTile::offset(at.row, kDepthStep * step + at.column));
  }

  // k times the node's gradient.
  __device__ __forceinline__ void issue_node(Sums& sum) {
    const uint64_t k = operand<RowTile>(shared + Layout::kK, Major::kDepth, kSources, 0);
    const uint64_t node = operand<NodeTile>(tile(Layout::kNode), Major::kOuter, 0, 0);
    make_fresh(sum);
    fence_products(sum);
#pragma unroll
    for (int depth = 0; depth < kKeyDim; depth += kDepthStep)
      multiply<Half::kBf16, Major::kDepth, Major::kOuter>(
          sum, moved(k, depth_offset(Major::kDepth, depth, RowTile::kPanelBytes)),
          moved(node, depth_offset(Major::kOuter, depth, NodeTile::kPanelBytes)), depth > 0);
    commit_products();
  }

  // Of the sources with the rows of half `part`: k q^T and v dy^T.
  __device__ __forceinline__ void issue_scores(Sums& scores, Sums& reads, int part) {
    const uint64_t k = operand<RowTile>(shared + Layout::kK, Major::kDepth, kSources, 0);
    const uint64_t q = operand<RowTile>(shared + Layout::kQ, Major::kDepth, kHalf * part, 0);
    const uint64_t v = operand<ValueTile>(tile(Layout::kV), Major::kDepth, kSources, 0);
    const uint64_t dy = operand<ValueTile>(tile(Layout::kDy), Major::kDepth, kHalf * part, 0);
    make_fresh(scores);
    make_fresh(reads);
    fence_products(scores, reads);
#pragma unroll
    for (int depth = 0; depth < kKeyDim; depth += kDepthStep)
      multiply<Half::kBf16, Major::kDepth, Major::kDepth>(
          scores, moved(k, depth_offset(Major::kDepth, depth, RowTile::kPanelBytes)),
          moved(q, depth_offset(Major::kDepth, depth, RowTile::kPanelBytes)), depth > 0);
#pragma unroll
    for (int depth = 0; depth < kColumns; depth += kDepthStep)
      multiply<Half::kBf16, Major::kDepth, Major::kDepth>(
          reads, moved(v, depth_offset(Major::kDepth, depth, ValueTile::kPanelBytes)),
          moved(dy, depth_offset(Major::kDepth, depth, ValueTile::kPanelBytes)), depth > 0);
    commit_products();
  }

  // Of the rows of half `part`: dy times their weights, to dv, and q times the gradients of scores, to dk.
  __device__ __forceinline__ void issue_values(Sums& values, const uint32_t (&weights)[4][4], int part) {
    const uint64_t dy = operand<ValueTile>(tile(Layout::kDy), Major::kOuter, 0, kHalf * part);
    fence_products(values);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply<Half::kBf16, Major::kOuter>(
          values, weights[step], moved(dy, depth_offset(Major::kOuter, kDepthStep * step, ValueTile::kPanelBytes)), true);
    commit_products();
  }
  __device__ __forceinline__ void issue_keys(const uint32_t (&gradients)[4][4], int part) {
    const uint64_t q = operand<RowTile>(shared + Layout::kQ, Major::kOuter, 0, kHalf * part);
    fence_products(keys);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply<Half::kBf16, Major::kOuter>(
          keys, gradients[step], moved(q, depth_offset(Major::kOuter, kDepthStep * step, RowTile::kPanelBytes)), true);
    commit_products();
  }

  // value: v times write strength and fold; times the node's gradient, to dk.
  __device__ __forceinline__ void issue_folded(const uint32_t (&value)[4][4]) {
    const uint64_t node = operand<NodeTile>(tile(Layout::kNode), Major::kDepth, 0, 0);
    fence_products(keys);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply<Half::kBf16, Major::kDepth>(
          keys, value[step], moved(node, depth_offset(Major::kDepth, kDepthStep * step, NodeTile::kPanelBytes)), true);
    commit_products();
  }

  // The mask of the sources with the rows of their own half, in the places of sums. Eights of rows after the source's own
  // are at one level.
  __device__ __forceinline__ void mask_own(const SourceFactors& factors, Sums& mask) const {
    const float* level = &factors.level[0][kSources];  // and the diagonal behind the last level
    const float *mine = level + 16 * warp + lane / 4, *rows = level + 2 * (lane % 4);
    float of_source[2][3], of_own[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int l = 0; l < 3; ++l) of_source[h][l] = mine[(3 + l) * kBlock + 8 * h];
      of_own[h][0] = own_factor(level + 16 * warp + 8 * h, 0);
      of_own[h][1] = own_factor(level + 16 * warp + 8 * h, 1);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      // Sixteens of rows: before the source's, its own, next to it in its thirty-two, or beyond.
      const int apart = n / 2 ^ warp, l = apart >= 2 ? 2 : apart;
      const bool before = n / 2 < warp;
      const float2 a = *reinterpret_cast<const float2*>(rows + (3 + l) * kBlock + 8 * n);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float b = before ? 0.0f : apart >= 2 ? of_source[h][2] : apart == 1 ? of_source[h][1] : of_source[h][0];
        float x = b * a.x, y = b * a.y;
        if (n % 2 == h) {
          x = apart == 0 ? of_own[h][0] : x;
          y = apart == 0 ? of_own[h][1] : y;
        } else if (n % 2 < h) {
          x = apart == 0 ? 0.0f : x;
          y = apart == 0 ? 0.0f : y;
        }
        mask[4 * n + 2 * h] = x;
        mask[4 * n + 2 * h + 1] = y;
      }
    }
  }
  // The mask in an eight of its own source's: source lane / 4, row 2 (lane % 4) + odd.
  __device__ __forceinline__ float own_factor(const float* level, int odd) const {
    const int source = lane / 4, row = 2 * (lane % 4) + odd, differ = row ^ source;
    const int at = (differ == 0 ? kInnerLevels : differ >= 4 ? 2 : differ >= 2 ? 1 : 0) * kBlock;
    return row < source ? 0.0f : level[at + row] * (differ == 0 ? 1.0f : level[at + source]);
  }

  // The first half's sources with the second half's rows are all at level 7: the rows' factors.
  __device__ __forceinline__ void load_second(const SourceFactors& factors, float (&rows)[16]) const {
    const float* level = factors.level[kInnerLevels - 1] + kHalf + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 a = *reinterpret_cast<const float2*>(level + 8 * n);
      rows[2 * n] = a.x;
      rows[2 * n + 1] = a.y;
    }
  }

  // What the rows read of the sources, and the operands of the sums that follow.
  template <bool kOwn, class Mask>
  __device__ __forceinline__ void weigh(const Sums& scores, const Sums& reads, const float (&write)[2], Scalars* scalars,
                                        uint32_t (&weights)[4][4], uint32_t (&gradients)[4][4], Mask mask) const {
    // What a row reads of itself counts apart: this lane has the element `differs` of a pair, if any, in eight 2 warp + h.
    const int differs = lane / 4 ^ 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int e = 4 * n + 2 * h;
        const float a = mask(e), b = mask(e + 1), x = a * scores[e], y = b * scores[e + 1];
        if (kOwn && n % 2 == h) {
          const float one = x * reads[e], two = y * reads[e + 1];
          const bool own = n / 2 == warp;
          scalars->self[h] += own && differs == 0 ? one : own && differs == 1 ? two : 0.0f;
          scalars->others[h] += own && differs == 0 ? 0.0f : one;
          scalars->others[h] += own && differs == 1 ? 0.0f : two;
        } else {
          scalars->others[h] = fmaf(x, reads[e], scalars->others[h]);
          scalars->others[h] = fmaf(y, reads[e + 1], scalars->others[h]);
        }
        weights[n / 2][2 * (n % 2) + h] = pack<Half::kBf16>(x, y);
        gradients[n / 2][2 * (n % 2) + h] = pack<Half::kBf16>(write[h] * a * reads[e], write[h] * b * reads[e + 1]);
      }
    }
  }

  // k times the node's gradient, decayed from the source to the block's end; its share in what is read of the source.
  __device__ __forceinline__ void fold_values(Sums& sum, const SourceFactors& factors, Scalars* scalars) const {
    const float fold[2] = {factors.fold[first()], factors.fold[first() + 8]};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t value[4];
      load_values(step, value);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = 8 * step + 2 * i;
        float& others = scalars->others[i % 2];
        sum[e] *= fold[i % 2];
        sum[e + 1] *= fold[i % 2];
        others = fmaf(sum[e], low_of(value[i]), others);
        others = fmaf(sum[e + 1], high_of(value[i]), others);
      }
    }
  }

  // v times write strength and decay to the block's end.
  __device__ __forceinline__ void load_folded_values(const SourceFactors& factors, uint32_t (&value)[4][4]) const {
    const float scale[2] = {factors.write[first()] * factors.fold[first()],
                            factors.write[first() + 8] * factors.fold[first() + 8]};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      load_values(step, value[step]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t& pair = value[step][i];
        pair = pack<Half::kBf16>(low_of(pair) * scale[i % 2], high_of(pair) * scale[i % 2]);
      }
    }
  }

  __device__ __forceinline__ void store_scalars(const BlockOfRows& block, int number, int head, const Scalars& scalars,
                                                const float (&write)[2]) const {
    const auto row_sum = [](float x) {
      x += __shfl_xor_sync(kAllLanes, x, 1);
      return x + __shfl_xor_sync(kAllLanes, x, 2);
    };
    const int64_t slot = in.slot(block.place, number);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float others = row_sum(scalars.others[h]), self = row_sum(scalars.self[h]);
      const int r = first() + 8 * h;
      if (lane % 4 != h) continue;
      in.row_others[slot * kBlock + r] = write[h] * others;
      if (in.dwrite.present() && r >= block.lo && r < block.hi)
        put_element(in.dwrite.at(block.index, block.row + r, head), in.dwrite.dtype, 0, others + self, in.dwrite.accumulate);
    }
  }

  template <class Element>
  __device__ __forceinline__ void store(const View& view, const BlockOfRows& block, int head, int column, int columns,
                                        Element element) const {
    char* to = static_cast<char*>(view.at(block.index, block.row, head)) + 2 * column;
    store_rows(to, 2 * view.row_stride, view.accumulate, columns - column, kSources + 16 * warp, block.lo, block.hi,
               shared + Layout::kStaging + (4 * kPart + warp) * kStagingBytes, element);
  }

  __device__ __forceinline__ void clear(char* tile, int panels, const BlockOfRows& block) const {
    clear_rows<kBlock>(tile, panels, block.lo, block.hi, static_cast<int>(threadIdx.x) - 128, 256);
  }

  template <class... Registers>
  __device__ __forceinline__ static void pin_all(Registers&... registers) {
#pragma unroll
    for (int i = 0; i < 4; ++i) (pin(registers[i]), ...);
  }

  __device__ __forceinline__ void run_head(const BlockOfRows& block, int number, int head) {
    wait(&barriers->full[stage.index], stage.phase);
    if (block.lo > 0 || block.hi < kBlock) {
      clear(tile(Layout::kV), 1, block);
      clear(tile(Layout::kDy), 1, block);
      fence_shared_writes();
      sync_some(1, 256);
    }
    Sums values, scores, reads;
    uint32_t weights[4][4], gradients[4][4];
    Scalars scalars;
    issue_scores(scores, reads, kPart);
    wait(&barriers->sources_full[stage.index], stage.phase);
    const SourceFactors& factors = sources();
    const float write[2] = {factors.write[first()], factors.write[first() + 8]};
    // Factors are fetched while products run.
    Sums mask;
    mask_own(factors, mask);
    wait_products<0>(scores, reads);
    weigh<true>(scores, reads, write, &scalars, weights, gradients, [&](int e) { return mask[e]; });
    issue_node(values);
    issue_keys(gradients, kPart);
    wait_products<1>(values);
    fold_values(values, factors, &scalars);
    wait_products<0>(keys);
    pin_all(gradients);
    issue_values(values, weights, kPart);
    if constexpr (kPart == 0) {
      wait_products<0>(values);
      pin_all(weights);
      issue_scores(scores, reads, 1);
      wait_products<0>(scores, reads);
      const float sources[2] = {factors.level[kInnerLevels - 1][first()], factors.level[kInnerLevels - 1][first() + 8]};
      float rows[16];
      load_second(factors, rows);
      weigh<false>(scores, reads, write, &scalars, weights, gradients,
                   [&](int e) { return rows[e / 4 * 2 + e % 2] * sources[e / 2 % 2]; });
      issue_values(values, weights, 1);
      issue_keys(gradients, 1);
    }
    uint32_t value[4][4];
    load_folded_values(factors, value);
    issue_folded(value);
    store_scalars(block, number, head, scalars, write);
    wait_products<0>(values, keys);
    pin_all(weights, gradients, value);
    release(&barriers->free[stage.index]);
    stage.next(kHeadStages);
    if (in.dv.present())
      store(in.dv, block, head, 0, static_cast<int>(in.shape.value_dim),
            [&](int i) { return write[i / 2 % 2] * values[i]; });
  }

  __device__ __forceinline__ void store_keys(const BlockOfRows& block, int part) const {
    if (!in.dk.present()) return;
    if (in.parts_of_group == 1) {
      const int columns = static_cast<int>(in.shape.key_dim);
#pragma unroll
      for (int column = 0; column < kKeyDim; column += 64) {
        if (column < columns) store(in.dk, block, part, column, columns, [&](int i) { return keys[column / 2 + i]; });
      }
      return;
    }
    store_sums<kKeyDim>(in.dk_parts + ((part - in.part_begin) * in.places + block.place) * (kBlock * kKeyDim) +
                            (kSources + 16 * warp) * kKeyDim,
                        keys, in.adds);
  }

  __device__ __forceinline__ void run(int64_t tasks) {
#pragma unroll 1
    for (int64_t number = blockIdx.x; number < tasks; number += gridDim.x) {
      BlockOfRows block;
      int part;
      if (!find_task(in, number, &block, &part)) continue;
#pragma unroll
      for (float& x : keys) x = 0;
      wait(&barriers->rows_full, phase);
      if (block.lo > 0 || block.hi < kBlock) {
        clear(shared + Layout::kQ, RowTile::kPanels, block);
        clear(shared + Layout::kK, RowTile::kPanels, block);
        // The heads' own tiles follow, with a barrier.
      }
      const int first = in.part_first(part), end = in.part_end(part);
      // Members of a group are a step apart.
      const int step = in.shape.head_map == LLA_HEAD_MAP_CYCLIC ? static_cast<int>(in.shape.groups) : 1;
      int head = in.head_of(first);
#pragma unroll 1
      for (int number = first; number < end; ++number, head += step) run_head(block, number, head);
      release(&barriers->rows_free);
      phase ^= 1;
      store_keys(block, part);
    }
  }
};

template <int kKeyDim>
__global__ void __launch_bounds__(kColumnThreads, 1)
    column_gradients(const __grid_constant__ BackwardParameters in, int64_t tasks) {
  using Layout = ColumnLayout<kKeyDim>;
  char* shared = shared_memory();
  ColumnBarriers* barriers = reinterpret_cast<ColumnBarriers*>(shared + Layout::kBarriers);
  if (threadIdx.x == 0) {
    init_barrier(&barriers->rows_full, 1);
    init_barrier(&barriers->rows_free, kColumnWarps);
    for (int i = 0; i < kHeadStages; ++i) {
      init_barrier(&barriers->full[i], 1);
      init_barrier(&barriers->sources_full[i], 1);
      init_barrier(&barriers->free[i], kColumnWarps);
    }
    publish_barriers();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4) {
    keep_registers<kGroupRegisters[0]>();
    if (threadIdx.x == 0) copy_tiles<kKeyDim>(in, tasks, shared, barriers);
    if (warp == 1) copy_sources<kKeyDim>(in, tasks, shared, barriers);
  } else if (warp < 8) {
    take_registers<kGroupRegisters[1]>();
    ColumnSweep<kKeyDim, 0>(in, shared, barriers).run(tasks);
  } else {
    take_registers<kGroupRegisters[2]>();
    ColumnSweep<kKeyDim, 1>(in, shared, barriers).run(tasks);
  }
}

template <int kKeyDim>
int32_t launch_columns(const BackwardParameters& in, void* stream) {
  const int64_t tasks = in.batch.count * in.blocks * in.part_count, most = multiprocessors();
  return launch(column_gradients<kKeyDim>, tasks < most ? tasks : most, kColumnThreads, ColumnLayout<kKeyDim>::kBytes,
                stream, in, tasks);
}

}  // namespace

int32_t launch_column_gradients(const BackwardParameters& in, int key_dim, void* stream) {
  return key_dim == 64 ? launch_columns<64>(in, stream) : launch_columns<128>(in, stream);
}

int32_t load_column_gradients() {
  const int32_t status = load_kernel(column_gradients<64>);
  return status == LLA_OK ? load_kernel(column_gradients<128>) : status;
}

}  // namespace lla::cuda::hopper
