// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: what the rows of a block get as sources, dk, dv and dwrite, and what others read of them.
// The mirror of the forward within a block: rows of the products here are sources. Sources of the first half are read by all
// rows, so that they are twice the work: each warpgroup weighs what one half of the second half's rows read of them.
#pragma once

#include "cuda/hopper/capability.h"
#include "cuda/hopper/fragment.h"
#include "cuda/hopper/scalar_gate_column_tasks.h"
#include "cuda/hopper/scalar_gate_head_units.h"
#include "cuda/hopper/tile_rows.h"

namespace lla::cuda::hopper {

namespace {

template <Half kType, int kKeyDim>
struct ColumnSweep {
  static constexpr bool kUnits = kType == Half::kF16;
  using Units = SourceUnits<kType>;
  using Layout = ColumnLayout<kKeyDim>;
  using RowTile = typename Layout::RowTile;
  using ValueTile = typename Layout::ValueTile;
  using NodeTile = typename Layout::NodeTile;
  const BackwardParameters& in;
  char* shared;
  ColumnBarriers* barriers;
  const int half, warp, lane;  // half: the warpgroup, whose sources these are; warp: of the warpgroup
  Turn stage, across;
  uint32_t phase = 0;       // of q and k
  float keys[kKeyDim / 2];  // dk, of all heads so far
  int unit = 0;             // fp16: of dk

  using Quarter = float[16];  // 64 sources with 32 rows of a warpgroup
  // Of the second half's rows, those with which this warpgroup weighs the first half's sources.
  __device__ __forceinline__ int first_across() const { return kHalf + kHalf / 2 * half; }

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
      multiply<kType, Major::kDepth, Major::kOuter>(sum, moved(k, depth_offset(Major::kDepth, depth, RowTile::kPanelBytes)),
                                                    moved(node, depth_offset(Major::kOuter, depth, NodeTile::kPanelBytes)),
                                                    depth > 0);
    commit_products();
  }

  // Of the half with itself: k q^T.
  __device__ __forceinline__ void issue_scores(Sums& scores) const {
    const uint64_t k = operand<RowTile>(shared + Layout::kK, Major::kDepth, kHalf * half, 0);
    const uint64_t q = operand<RowTile>(shared + Layout::kQ, Major::kDepth, kHalf * half, 0);
    make_fresh(scores);
    fence_products(scores);
#pragma unroll
    for (int depth = 0; depth < kKeyDim; depth += kDepthStep)
      multiply<kType, Major::kDepth, Major::kDepth>(
          scores, moved(k, depth_offset(Major::kDepth, depth, RowTile::kPanelBytes)),
          moved(q, depth_offset(Major::kDepth, depth, RowTile::kPanelBytes)), depth > 0);
    commit_products();
  }
  // v dy^T.
  __device__ __forceinline__ void issue_reads(Sums& reads) const {
    const uint64_t v = operand<ValueTile>(tile(Layout::kV), Major::kDepth, kHalf * half, 0);
    const uint64_t dy = operand<ValueTile>(tile(Layout::kDy), Major::kDepth, kHalf * half, 0);
    make_fresh(reads);
    fence_products(reads);
#pragma unroll
    for (int depth = 0; depth < kColumns; depth += kDepthStep)
      multiply<kType, Major::kDepth, Major::kDepth>(
          reads, moved(v, depth_offset(Major::kDepth, depth, ValueTile::kPanelBytes)),
          moved(dy, depth_offset(Major::kDepth, depth, ValueTile::kPanelBytes)), depth > 0);
    commit_products();
  }

  // This thread's four scores with eight n of rows: of its half's, or, from the first half to the second, across. Rows
  // before the warp's sources have none: some other ones, which the mask makes zero.
  __device__ __forceinline__ float4& own_scores(int n) const {
    float4* own = reinterpret_cast<float4*>(shared + Layout::kScores + half * Layout::kOwnBytes) + warp * (9 - warp) * 32;
    return own[32 * max(n - 2 * warp, 0) + lane];
  }
  __device__ __forceinline__ float4& scores_across(int n) const {
    return reinterpret_cast<float4*>(shared + Layout::kScoresAcross)[128 * (4 * half + n) + 32 * warp + lane];
  }
  // Of the first half's sources (of a tile [row][depth]) with the rows across of which this warpgroup has the weights.
  template <class Tile, int kDepth>
  __device__ __forceinline__ void issue_across_sums(Quarter& sums, const char* sources, const char* rows) const {
    const uint64_t a = operand<Tile>(sources, Major::kDepth, 0, 0);
    const uint64_t b = operand<Tile>(rows, Major::kDepth, first_across(), 0);
    make_fresh(sums);
    fence_products(sums);
#pragma unroll
    for (int depth = 0; depth < kDepth; depth += kDepthStep)
      multiply<kType, Major::kDepth, Major::kDepth>(sums, moved(a, depth_offset(Major::kDepth, depth, Tile::kPanelBytes)),
                                                    moved(b, depth_offset(Major::kDepth, depth, Tile::kPanelBytes)),
                                                    depth > 0);
    commit_products();
  }

  // Scores of the part, once for all heads.
  __device__ __forceinline__ void make_scores() const {
    Sums sums;
    issue_scores(sums);
    wait_products<0>(sums);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n >= 2 * warp) own_scores(n) = make_float4(sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]);
    }
    Quarter across;
    issue_across_sums<RowTile, kKeyDim>(across, shared + Layout::kK, shared + Layout::kQ);
    wait_products<0>(across);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      scores_across(n) = make_float4(across[4 * n], across[4 * n + 1], across[4 * n + 2], across[4 * n + 3]);
  }

  // Of this half's rows: dy times their weights, to dv, and q times the gradients of scores, to dk.
  __device__ __forceinline__ void issue_values(Sums& values, const uint32_t (&weights)[4][4]) {
    const uint64_t dy = operand<ValueTile>(tile(Layout::kDy), Major::kOuter, 0, kHalf * half);
    fence_products(values);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply<kType, Major::kOuter>(
          values, weights[step], moved(dy, depth_offset(Major::kOuter, kDepthStep * step, ValueTile::kPanelBytes)), true);
    commit_products();
  }
  __device__ __forceinline__ void issue_keys(const uint32_t (&gradients)[4][4]) {
    const uint64_t q = operand<RowTile>(shared + Layout::kQ, Major::kOuter, 0, kHalf * half);
    fence_products(keys);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply<kType, Major::kOuter>(keys, gradients[step],
                                     moved(q, depth_offset(Major::kOuter, kDepthStep * step, RowTile::kPanelBytes)), true);
    commit_products();
  }
  // The same across, by the first warpgroup: its own weights, then the other's.
  template <class Tile, int kCount>
  __device__ __forceinline__ void issue_across(float (&sums)[kCount], const uint32_t (&own)[2][4], uint32_t others,
                                               const char* rows) {
    const uint64_t b = operand<Tile>(rows, Major::kOuter, 0, kHalf);
    const uint64_t a = operand<typename Layout::AcrossTile>(shared + others, Major::kDepth, 0, 0);
    fence_products(sums);
#pragma unroll
    for (int step = 0; step < 2; ++step)
      multiply<kType, Major::kOuter>(sums, own[step],
                                     moved(b, depth_offset(Major::kOuter, kDepthStep * step, Tile::kPanelBytes)), true);
#pragma unroll
    for (int step = 0; step < 2; ++step)
      multiply<kType, Major::kDepth, Major::kOuter>(
          sums, moved(a, depth_offset(Major::kDepth, kDepthStep * step, Layout::AcrossTile::kPanelBytes)),
          moved(b, depth_offset(Major::kOuter, kHalf / 2 + kDepthStep * step, Tile::kPanelBytes)), true);
    commit_products();
  }

  // value: v times write strength and fold; times the node's gradient, to dk.
  __device__ __forceinline__ void issue_folded(const uint32_t (&value)[4][4]) {
    const uint64_t node = operand<NodeTile>(tile(Layout::kNode), Major::kDepth, 0, 0);
    fence_products(keys);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply<kType, Major::kDepth>(
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

  // What the rows read of the sources, and the operands of the sums that follow. fp16: `write` has the unit of scores in it.
  template <bool kOwn, int kSteps, class Mask>
  __device__ __forceinline__ void weigh(const float (&reads)[8 * kSteps], const float (&write)[2], const Units& units,
                                        Scalars* scalars, uint32_t (&weights)[kSteps][4], uint32_t (&gradients)[kSteps][4],
                                        Mask mask) const {
    // What a row reads of itself counts apart: this lane has the element `differs` of a pair, if any, in eight 2 warp + h.
    const int differs = lane / 4 ^ 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
      const float4 four = kOwn ? own_scores(n) : scores_across(n);
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
        weights[n / 2][2 * (n % 2) + h] = pack<kType>(units.weights(x), units.weights(y));
        gradients[n / 2][2 * (n % 2) + h] = pack<kType>(write[h] * a * reads[e], write[h] * b * reads[e + 1]);
      }
    }
  }

  // What the rows across read of the first half's sources: all at level 7.
  __device__ __forceinline__ void weigh_across(const SourceFactors& factors, const Quarter& reads, const Units& units,
                                               float (&others)[2], uint32_t (&weights)[2][4],
                                               uint32_t (&gradients)[2][4]) const {
    const int source = 16 * warp + lane / 4;
    const float *level = factors.level[kInnerLevels - 1], *at = level + first_across() + 2 * (lane % 4);
    const float sources[2] = {level[source], level[source + 8]};
    const float write[2] = {units.scores(factors.write[source]), units.scores(factors.write[source + 8])};
    float rows[8];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 a = *reinterpret_cast<const float2*>(at + 8 * n);
      rows[2 * n] = a.x;
      rows[2 * n + 1] = a.y;
    }
    Scalars scalars;
    weigh<false, 2>(reads, write, units, &scalars, weights, gradients,
                    [&](int e) { return rows[e / 4 * 2 + e % 2] * sources[e / 2 % 2]; });
    others[0] = scalars.others[0];
    others[1] = scalars.others[1];
  }
  // By the second warpgroup. Nobody else writes here, and who reads waits for `across_full`.
  __device__ __forceinline__ void hand_over(const float (&of_sources)[2], const uint32_t (&weights)[2][4],
                                            const uint32_t (&gradients)[2][4]) const {
    wait(&barriers->across_free, across.phase ^ 1);
    const float others = sum_lanes(of_sources);
    if (lane % 4 < 2) reinterpret_cast<float*>(shared + Layout::kOthers)[16 * warp + lane / 4 + 8 * (lane % 2)] = others;
    const Place at = block_row(lane);
    const uint32_t to = shared_address(shared + Layout::kWeights);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32_t place = Layout::AcrossTile::offset(16 * warp + at.row, kDepthStep * step + at.column);
      store_matrices<false>(to + place, weights[step]);
      store_matrices<false>(to + (Layout::kGradients - Layout::kWeights) + place, gradients[step]);
    }
    fence_shared_writes();
    release(&barriers->across_full);
  }

  // k times the node's gradient, decayed from the source to the block's end; its share in what is read of the source. And v
  // times write strength and that decay.
  __device__ __forceinline__ void fold_values(Sums& sum, const SourceFactors& factors, const float (&write)[2],
                                              const Units& units, Scalars* scalars, uint32_t (&value)[4][4]) const {
    const float decay[2] = {factors.fold[first()], factors.fold[first() + 8]};
    const float scale[2] = {units.folded(write[0] * decay[0]), units.folded(write[1] * decay[1])};
    const float fold[2] = {units.node(decay[0]), units.node(decay[1])};
    float of_node[2] = {0, 0};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      load_values(step, value[step]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = 8 * step + 2 * i;
        uint32_t& pair = value[step][i];
        float& others = kUnits ? of_node[i % 2] : scalars->others[i % 2];
        const float low = low_of<kType>(pair), high = high_of<kType>(pair);
        sum[e] *= fold[i % 2];
        sum[e + 1] *= fold[i % 2];
        others = fmaf(sum[e], low, others);
        others = fmaf(sum[e + 1], high, others);
        pair = pack<kType>(low * scale[i % 2], high * scale[i % 2]);
      }
    }
#pragma unroll
    for (int h = 0; kUnits && h < 2; ++h) scalars->others[h] += units.values(of_node[h]);
  }

  // Four lanes share two sources: of each, the lanes with its parity get the sum.
  __device__ __forceinline__ float sum_lanes(const float (&x)[2]) const {
    const bool odd = (lane & 1) != 0;
    const float one = (odd ? x[1] : x[0]) + __shfl_xor_sync(kAllLanes, odd ? x[0] : x[1], 1);
    return one + __shfl_xor_sync(kAllLanes, one, 2);
  }

  __device__ __forceinline__ void store_scalars(const BlockOfRows& block, int number, int head, const Scalars& scalars,
                                                const float (&write)[2]) const {
    const bool odd = (lane & 1) != 0;
    float others = sum_lanes(scalars.others);
    const float self = sum_lanes(scalars.self);
    if (lane % 4 >= 2) return;
    if (half == 0) others += reinterpret_cast<const float*>(shared + Layout::kOthers)[first() + (odd ? 8 : 0)];
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
    store_rows<kType>(to, 2 * view.row_stride, view.accumulate, columns - column, first_source(), block.lo, block.hi, lane,
                      staging, place, element);
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
    Quarter reads_across;
    uint32_t weights[4][4], gradients[4][4], weights_across[2][4], gradients_across[2][4];
    Scalars scalars;
    const SourceFactors& factors = sources();
    const Units units(in, in.slot(block.place, number), unit);
    issue_across_sums<ValueTile, kColumns>(reads_across, tile(Layout::kV), tile(Layout::kDy));
    issue_reads(reads);
    issue_node(values);
    wait(&barriers->sources_full[stage.index], stage.phase);
    float others[2];
    wait_products<2>(reads_across);
    weigh_across(factors, reads_across, units, others, weights_across, gradients_across);
    if (half == 1) {
      hand_over(others, weights_across, gradients_across);
    } else {
      scalars.others[0] = others[0];
      scalars.others[1] = others[1];
    }
    const float write[2] = {factors.write[first()], factors.write[first() + 8]};
    // Factors are fetched while products run.
    Sums mask;
    mask_own(factors, mask);
    wait_products<1>(reads);
    const float of_scores[2] = {units.scores(write[0]), units.scores(write[1])};
    weigh<true, 4>(reads, of_scores, units, &scalars, weights, gradients, [&](int e) { return mask[e]; });
    issue_keys(gradients);
    wait_products<1>(values);
    uint32_t value[4][4];
    fold_values(values, factors, write, units, &scalars, value);
    issue_values(values, weights);
    issue_folded(value);
    if (half == 0) {
      wait(&barriers->across_full, across.phase);
      issue_across<ValueTile>(values, weights_across, Layout::kWeights, tile(Layout::kDy));
      issue_across<RowTile>(keys, gradients_across, Layout::kGradients, shared + Layout::kQ);
    }
    store_scalars(block, number, head, scalars, write);
    // The last product, for the keys, runs while dv is stored.
    wait_products<1>(values);
    pin_all(weights);
    pin(weights_across[0]);
    pin(weights_across[1]);
    const bool boxes = in.dv_boxes && block.lo == 0 && block.hi == kBlock;
    const float of_values[2] = {units.values(write[0]), units.values(write[1])};
    store_values(block, head, values, of_values, boxes);
    wait_products<0>(keys);
    pin_all(gradients, value);
    pin(gradients_across[0]);
    pin(gradients_across[1]);
    if (half == 0) release(&barriers->across_free);
    across.next(1);
    if (boxes && lane == 0) wait_stores_read<0>();
    release(&barriers->free[stage.index]);
    stage.next(kHeadStages);
  }

  // dv, by way of the place of v, which is not needed any more.
  __device__ __forceinline__ void store_values(const BlockOfRows& block, int head, const Sums& values,
                                               const float (&write)[2], bool boxes) const {
    if (!in.dv.present()) return;
    char* staging = tile(Layout::kV) + first_source() * kSwizzleRow;
    const auto place = [](int row, int chunk) { return ValueTile::offset(row, 8 * chunk); };
    const auto element = [&](int i) { return write[i / 2 % 2] * values[i]; };
    if (!boxes) {
      store(in.dv, block, head, 0, static_cast<int>(in.shape.value_dim), staging, place, element);
      fence_shared_writes();
      return;
    }
    put_rows<kType>(staging, lane, place, element);
    fence_shared_writes();
    __syncwarp();
    if (lane == 0) {
      store_box(&in.dv_rows, {0, block.row + first_source(), head}, staging);
      commit_stores();
    }
  }

  // Whether a task has all heads of a group, and stores dk itself.
  __device__ __forceinline__ bool whole() const { return in.parts_of_group == 1 || in.chained; }
  __device__ __forceinline__ void store_keys(const BlockOfRows& block, int part) const {
    if (!in.dk.present()) return;
    if (whole()) {
      const int columns = static_cast<int>(in.shape.key_dim), group = in.group_of(in.part_first(part));
#pragma unroll
      for (int column = 0; column < kKeyDim; column += 64) {
        if (column >= columns) continue;
        // By way of the sources' keys, which nobody needs any more.
        store(
            in.dk, block, group, column, columns,
            shared + Layout::kK + column / 64 * RowTile::kPanelBytes + first_source() * kSwizzleRow,
            [](int row, int chunk) { return ValueTile::offset(row, 8 * chunk); },
            [&](int i) { return keys[column / 2 + i]; });
      }
      fence_shared_writes();
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
      const int first = in.part_first(part), end = in.task_end(in.chained, part);
      // Members of a group are a step apart.
      const int step = in.shape.head_map == LLA_HEAD_MAP_CYCLIC ? static_cast<int>(in.shape.groups) : 1;
      int head = in.head_of(first);
#pragma unroll 1
      for (int number = first; number < end; ++number, head += step) {
        if (kUnits && (number - first) % in.bundle == 0) unit = unit_of_heads(in, block.place, number, end, lane);
        run_head(block, number, head);
        const int done = number + 1 - first;
        if (in.chained && in.dk.present() && (done % in.bundle == 0 || number + 1 == end)) {
          leave_unit<kType>(keys, unit);
          float* sums = in.dk_chain + static_cast<int64_t>(blockIdx.x) * (kBlock * kKeyDim);
          chain_sums<32 * kColumnWarps>(reinterpret_cast<float4*>(sums) + threadIdx.x - 128, keys, done > in.bundle,
                                        number + 1 < end);
        }
      }
      if (!in.chained) leave_unit<kType>(keys, unit);
      if (!whole()) release(&barriers->rows_free);
      store_keys(block, part);
      if (whole()) release(&barriers->rows_free);
      phase ^= 1;
    }
    if (lane == 0) wait_stores<0>();
  }
};

template <Half kType, int kKeyDim>
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
    init_barrier(&barriers->across_full, kColumnWarps / 2);
    init_barrier(&barriers->across_free, kColumnWarps / 2);
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
    ColumnSweep<kType, kKeyDim>(in, shared, barriers).run(tasks);
  }
}

template <Half kType, int kKeyDim>
int32_t launch_columns(const BackwardParameters& in, void* stream) {
  const int64_t tasks = in.batch.count * in.blocks * in.tasks_of_block(in.chained), most = multiprocessors();
  return launch(column_gradients<kType, kKeyDim>, tasks < most ? tasks : most, kColumnThreads, ColumnLayout<kKeyDim>::kBytes,
                stream, in, tasks);
}

}  // namespace

template <Half kType>
int32_t launch_column_gradients(const BackwardParameters& in, int key_dim, void* stream) {
  return key_dim == 64 ? launch_columns<kType, 64>(in, stream) : launch_columns<kType, 128>(in, stream);
}

template <Half kType>
int32_t load_column_gradients() {
  const int32_t status = load_kernel(column_gradients<kType, 64>);
  return status == LLA_OK ? load_kernel(column_gradients<kType, 128>) : status;
}

}  // namespace lla::cuda::hopper
