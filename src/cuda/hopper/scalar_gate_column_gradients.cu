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
constexpr int kSourceWarps = 3;  // that bring factors
constexpr int kGroupRegisters[3] = {40, 232, 232};
static_assert(registers_suffice(kGroupRegisters), "more registers than a block has");

// Factors of a block's rows as its sources need them.
struct SourceFactors {
  // [l - 1][r]: rows whose bit l - 1 is set: scale λ times the decay from the middle into the row; the others: the decay
  // from the row to the middle.
  float level[kInnerLevels][kBlock];
  float diagonal[kBlock];  // scale times λ of level 0
  float write[kBlock];
  float fold[kBlock];  // decay from the row to the block's end
};

// Shared memory: q and k stay for all heads of a part, and so do scores, which do not depend on the head: each thread has
// its own ones, of one half of the rows or of both. The rest comes for each head.
template <int kKeyDim>
struct ColumnLayout {
  using RowTile = SwizzledTile<kBlock, kKeyDim>;     // q, k: [row][dk]
  using ValueTile = SwizzledTile<kBlock, kColumns>;  // v, dy: [row][dv]
  using NodeTile = SwizzledTile<kKeyDim, kColumns>;  // [dk][dv]
  static constexpr uint32_t kQ = 0, kK = RowTile::kBytes, kHeads = 2 * RowTile::kBytes;
  static constexpr uint32_t kV = 0, kDy = ValueTile::kBytes, kNode = 2 * ValueTile::kBytes;  // in a stage
  static constexpr uint32_t kStageBytes = kNode + NodeTile::kBytes;
  static constexpr uint32_t kSources = kHeads + kHeadStages * kStageBytes;
  static constexpr uint32_t kScores = kSources + kHeadStages * sizeof(SourceFactors);
  static constexpr uint32_t kScoreBytes = 128 * sizeof(float[32]);  // 64 x 64
  static constexpr uint32_t kBarriers = kScores + 3 * kScoreBytes;
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

// What a task waits for at its end, the sums of earlier parts, and at its start, q and k of the next one: into the cache.
template <int kKeyDim>
__device__ __forceinline__ void prefetch_rest(const BackwardParameters& in, int64_t tasks, int64_t number,
                                              const BlockOfRows& block, int part) {
  if (in.adds && in.dk.present()) prefetch_bytes(part_sums<kKeyDim>(in, in.dk_parts, block, part), kBlock * kKeyDim * 4);
  BlockOfRows next;
  if (number + gridDim.x >= tasks || !find_task(in, number + gridDim.x, &next, &part)) return;
  const int group = in.group_of(in.part_first(part));
  for (int column = 0; column < in.shape.key_dim; column += 64) {
    prefetch_box(&in.q, {column, next.row, group});
    prefetch_box(&in.k, {column, next.row, group});
  }
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
      prefetch_rest<kKeyDim>(in, tasks, number, block, part);
    }
  }
}

__device__ __forceinline__ float4 times(const float4& a, const float4& b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

// Warp `number` of kSourceWarps: its share of the factors. A lane has rows 4 lane ... 4 lane + 3.
struct SourceShare {
  static constexpr int kLevels = 3;  // of a share; the last one has level 7 alone, and what else there is
  const int number, lane;

  __device__ __forceinline__ static float4& rows(float* column, int lane) { return reinterpret_cast<float4*>(column)[lane]; }
  __device__ __forceinline__ float4 rows(const float* column) const { return reinterpret_cast<const float4*>(column)[lane]; }
  // Of the rows that read at level l: λ; of the others: 1.
  __device__ __forceinline__ float4 weights(const BlockFactors& from, int l) const {
    const float4 lambda = rows(from.lambda(l));
    const auto of = [&](int i, float x) { return (4 * lane + i) >> (l - 1) & 1 ? x : 1.0f; };
    return make_float4(of(0, lambda.x), of(1, lambda.y), of(2, lambda.z), of(3, lambda.w));
  }

  __device__ __forceinline__ void copy(const BlockFactors& from, bool linear, float scale, SourceFactors* to) const {
    const int first = kLevels * number, count = number + 1 < kSourceWarps ? kLevels : kInnerLevels - first;
    float4 level[kLevels];
#pragma unroll
    for (int i = 0; i < kLevels; ++i) {
      if (i >= count) continue;
      level[i] = rows(from.level[first + i]);
      if (!linear) level[i] = times(level[i], weights(from, first + i + 1));
    }
    if (count < kLevels) {
      const float4 scales = make_float4(scale, scale, scale, scale);
      rows(to->diagonal, lane) = linear ? scales : times(scales, rows(from.lambda(0)));
      rows(to->write, lane) = rows(from.write);
      rows(to->fold, lane) = rows(from.fold);
    }
#pragma unroll
    for (int i = 0; i < kLevels; ++i) {
      if (i < count) rows(to->level[first + i], lane) = level[i];
    }
  }
};

// kSourceWarps warps: bring the factors.
template <int kKeyDim>
__device__ void copy_sources(const BackwardParameters& in, int64_t tasks, char* shared, ColumnBarriers* barriers,
                             int number) {
  using Layout = ColumnLayout<kKeyDim>;
  const SourceShare share{number, static_cast<int>(threadIdx.x) % 32};
  Turn stage;
  for (int64_t number = blockIdx.x; number < tasks; number += gridDim.x) {
    BlockOfRows block;
    int part;
    if (!find_task(in, number, &block, &part)) continue;
    const int end = in.part_end(part);
    for (int i = in.part_first(part); i < end; ++i) {
      if (share.number == 0 && share.lane == 0 && i + 1 < end)
        prefetch_bytes(in.factors(in.slot(block.place, i + 1)), static_cast<uint32_t>(in.factor_bytes));
      wait(&barriers->free[stage.index], stage.phase ^ 1);
      share.copy(*in.factors(in.slot(block.place, i)), in.linear, static_cast<float>(in.shape.scale),
                 reinterpret_cast<SourceFactors*>(shared + Layout::kSources) + stage.index);
      release(&barriers->sources_full[stage.index]);
      stage.next(kHeadStages);
    }
  }
}

template <int kKeyDim>
struct ColumnSweep {
  using Layout = ColumnLayout<kKeyDim>;
  using RowTile = typename Layout::RowTile;
  using ValueTile = typename Layout::ValueTile;
  using NodeTile = typename Layout::NodeTile;
  const BackwardParameters& in;
  char* shared;
  ColumnBarriers* barriers;
  const int half, warp, lane;  // half: the warpgroup, whose sources these are; warp: of the warpgroup
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
        half(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32 % 4, 0)),
        lane(own_lane()) {}

  // From a register: the compiler would ask for the thread's number anew each time, and wait for it.
  __device__ __forceinline__ static int own_lane() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return __shfl_sync(kAllLanes, lane, lane);
  }
  __device__ __forceinline__ int first_source() const { return kHalf * half + 16 * warp; }  // of the warp
  __device__ __forceinline__ int first() const { return first_source() + lane / 4; }
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
    load_matrices<false>(value, shared_address(tile(Layout::kV)) + first_source() * kSwizzleRow +
                                    ValueTile::offset(at.row, kDepthStep * step + at.column));
  }

  // k times the node's gradient.
  __device__ __forceinline__ void issue_node(Sums& sum) {
    const uint64_t k = operand<RowTile>(shared + Layout::kK, Major::kDepth, kHalf * half, 0);
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

  // Of the sources with the rows of half `part`: k q^T.
  __device__ __forceinline__ void issue_scores(Sums& scores, int part) const {
    const uint64_t k = operand<RowTile>(shared + Layout::kK, Major::kDepth, kHalf * half, 0);
    const uint64_t q = operand<RowTile>(shared + Layout::kQ, Major::kDepth, kHalf * part, 0);
    make_fresh(scores);
    fence_products(scores);
#pragma unroll
    for (int depth = 0; depth < kKeyDim; depth += kDepthStep)
      multiply<Half::kBf16, Major::kDepth, Major::kDepth>(
          scores, moved(k, depth_offset(Major::kDepth, depth, RowTile::kPanelBytes)),
          moved(q, depth_offset(Major::kDepth, depth, RowTile::kPanelBytes)), depth > 0);
    commit_products();
  }
  // v dy^T.
  __device__ __forceinline__ void issue_reads(Sums& reads, int part) const {
    const uint64_t v = operand<ValueTile>(tile(Layout::kV), Major::kDepth, kHalf * half, 0);
    const uint64_t dy = operand<ValueTile>(tile(Layout::kDy), Major::kDepth, kHalf * part, 0);
    make_fresh(reads);
    fence_products(reads);
#pragma unroll
    for (int depth = 0; depth < kColumns; depth += kDepthStep)
      multiply<Half::kBf16, Major::kDepth, Major::kDepth>(
          reads, moved(v, depth_offset(Major::kDepth, depth, ValueTile::kPanelBytes)),
          moved(dy, depth_offset(Major::kDepth, depth, ValueTile::kPanelBytes)), depth > 0);
    commit_products();
  }

  // This thread's scores with the rows of half `part`: four of them every 128 places.
  __device__ __forceinline__ float4* scores(int part) const {
    return reinterpret_cast<float4*>(shared + Layout::kScores + (half + part) * Layout::kScoreBytes) + 32 * warp + lane;
  }
  // Where the warp's own scores have room for 16 rows of 128 bytes.
  __device__ __forceinline__ static uint32_t score_place(int row, int chunk) {
    return static_cast<uint32_t>(row / 4 * 2048 + row % 4 * 128 + (chunk ^ row % 8) * 16);
  }
  // Scores of the part, once for all heads.
  __device__ __forceinline__ void make_scores() const {
#pragma unroll 1
    for (int part = half; part < 2; ++part) {
      Sums sums;
      issue_scores(sums, part);
      wait_products<0>(sums);
#pragma unroll
      for (int n = 0; n < 8; ++n)
        scores(part)[128 * n] = make_float4(sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]);
    }
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
    const float* level = &factors.level[0][kHalf * half];  // and the diagonal behind the last level
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
  // The mask in an eight of its own source's: source lane / 4, row 2 (lane % 4) + odd. Without branches: loads that are not
  // asked for cost less.
  __device__ __forceinline__ float own_factor(const float* level, int odd) const {
    const int source = lane / 4, row = 2 * (lane % 4) + odd, differ = row ^ source;
    const int at = (differ == 0 ? kInnerLevels : differ >= 4 ? 2 : differ >= 2 ? 1 : 0) * kBlock;
    float factors[2] = {level[at + row], level[at + source]};
    pin(factors);
    const float pair = factors[0] * factors[1];
    return row < source ? 0.0f : differ == 0 ? factors[0] : pair;
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
  __device__ __forceinline__ void weigh(const float4* scores, const Sums& reads, const float (&write)[2], Scalars* scalars,
                                        uint32_t (&weights)[4][4], uint32_t (&gradients)[4][4], Mask mask) const {
    // What a row reads of itself counts apart: this lane has the element `differs` of a pair, if any, in eight 2 warp + h.
    const int differs = lane / 4 ^ 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float4 four = scores[128 * n];
      const float score[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int e = 4 * n + 2 * h;
        const float a = mask(e), b = mask(e + 1), x = a * score[2 * h], y = b * score[2 * h + 1];
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

  // k times the node's gradient, decayed from the source to the block's end; its share in what is read of the source. And v
  // times write strength and that decay.
  __device__ __forceinline__ void fold_values(Sums& sum, const SourceFactors& factors, const float (&write)[2],
                                              Scalars* scalars, uint32_t (&value)[4][4]) const {
    const float fold[2] = {factors.fold[first()], factors.fold[first() + 8]};
    const float scale[2] = {write[0] * fold[0], write[1] * fold[1]};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      load_values(step, value[step]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = 8 * step + 2 * i;
        uint32_t& pair = value[step][i];
        float& others = scalars->others[i % 2];
        const float low = low_of(pair), high = high_of(pair);
        sum[e] *= fold[i % 2];
        sum[e + 1] *= fold[i % 2];
        others = fmaf(sum[e], low, others);
        others = fmaf(sum[e + 1], high, others);
        pair = pack<Half::kBf16>(low * scale[i % 2], high * scale[i % 2]);
      }
    }
  }

  __device__ __forceinline__ void store_scalars(const BlockOfRows& block, int number, int head, const Scalars& scalars,
                                                const float (&write)[2]) const {
    // Four lanes share two sources: each of the two even lanes gets the sums of one.
    const bool odd = (lane & 1) != 0;
    const auto sum = [&](const float(&x)[2]) {
      const float one = (odd ? x[1] : x[0]) + __shfl_xor_sync(kAllLanes, odd ? x[0] : x[1], 1);
      return one + __shfl_xor_sync(kAllLanes, one, 2);
    };
    const float others = sum(scalars.others), self = sum(scalars.self);
    if (lane % 4 >= 2) return;
    const int r = first() + (odd ? 8 : 0);
    in.row_others(in.slot(block.place, number))[r] = (odd ? write[1] : write[0]) * others;
    if (in.dwrite.present() && r >= block.lo && r < block.hi)
      put_element(in.dwrite.at(block.index, block.row + r, head), in.dwrite.dtype, 0, others + self, in.dwrite.accumulate);
  }

  // By way of the warp's own 16 rows of 128 bytes at `staging`.
  template <class Locate, class Element>
  __device__ __forceinline__ void store(const View& view, const BlockOfRows& block, int head, int column, int columns,
                                        char* staging, Locate place, Element element) const {
    char* to = static_cast<char*>(view.at(block.index, block.row, head)) + 2 * column;
    store_rows(to, 2 * view.row_stride, view.accumulate, columns - column, first_source(), block.lo, block.hi, lane, staging,
               place, element);
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
    Sums values, reads;
    uint32_t weights[4][4], gradients[4][4];
    Scalars scalars;
    issue_reads(reads, half);
    issue_node(values);
    wait(&barriers->sources_full[stage.index], stage.phase);
    const SourceFactors& factors = sources();
    const float write[2] = {factors.write[first()], factors.write[first() + 8]};
    // Factors are fetched while products run.
    Sums mask;
    mask_own(factors, mask);
    wait_products<1>(reads);
    weigh<true>(scores(half), reads, write, &scalars, weights, gradients, [&](int e) { return mask[e]; });
    issue_keys(gradients, half);
    wait_products<1>(values);
    uint32_t value[4][4];
    fold_values(values, factors, write, &scalars, value);
    issue_values(values, weights, half);
    issue_folded(value);
    if (half == 0) {
      issue_reads(reads, 1);
      const float sources[2] = {factors.level[kInnerLevels - 1][first()], factors.level[kInnerLevels - 1][first() + 8]};
      float rows[16];
      load_second(factors, rows);
      wait_products<0>(values, keys, reads);
      pin_all(weights, gradients, value);
      weigh<false>(scores(1), reads, write, &scalars, weights, gradients,
                   [&](int e) { return rows[e / 4 * 2 + e % 2] * sources[e / 2 % 2]; });
      issue_values(values, weights, 1);
      issue_keys(gradients, 1);
    }
    store_scalars(block, number, head, scalars, write);
    // The last product, for the keys, runs while dv is stored.
    wait_products<1>(values);
    pin_all(weights);
    if (in.dv.present()) {  // in the place of v, which is not needed any more
      store(
          in.dv, block, head, 0, static_cast<int>(in.shape.value_dim), tile(Layout::kV) + first_source() * kSwizzleRow,
          [](int row, int chunk) { return ValueTile::offset(row, 8 * chunk); },
          [&](int i) { return write[i / 2 % 2] * values[i]; });
      fence_shared_writes();
    }
    wait_products<0>(keys);
    pin_all(gradients, value);
    release(&barriers->free[stage.index]);
    stage.next(kHeadStages);
  }

  __device__ __forceinline__ void store_keys(const BlockOfRows& block, int part) const {
    if (!in.dk.present()) return;
    if (in.parts_of_group == 1) {
      const int columns = static_cast<int>(in.shape.key_dim);
#pragma unroll
      for (int column = 0; column < kKeyDim; column += 64) {
        if (column < columns)
          store(in.dk, block, part, column, columns, reinterpret_cast<char*>(scores(half) - lane), score_place,
                [&](int i) { return keys[column / 2 + i]; });
      }
      return;
    }
    store_sums<kKeyDim>(part_sums<kKeyDim>(in, in.dk_parts, block, part) + first_source() * kKeyDim, keys, in.adds);
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
        fence_shared_writes();
        sync_some(1, 256);
      }
      make_scores();
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
      init_barrier(&barriers->sources_full[i], kSourceWarps);
      init_barrier(&barriers->free[i], kColumnWarps);
    }
    publish_barriers();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4) {
    keep_registers<kGroupRegisters[0]>();
    if (threadIdx.x == 0) copy_tiles<kKeyDim>(in, tasks, shared, barriers);
    if (warp > 0) copy_sources<kKeyDim>(in, tasks, shared, barriers, warp - 1);
  } else {
    take_registers<kGroupRegisters[1]>();
    ColumnSweep<kKeyDim>(in, shared, barriers).run(tasks);
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
