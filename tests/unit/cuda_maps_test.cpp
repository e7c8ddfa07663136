// SPDX-License-Identifier: Apache-2.0
// The maps of the Hopper kernels, as pure functions: swizzled tiles, wgmma descriptors, and the elements that threads hold.
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <vector>

#include "cuda/hopper/descriptor.h"
#include "cuda/hopper/fragment.h"
#include "cuda/hopper/swizzle.h"

namespace lla::cuda::hopper {
namespace {

TEST(Swizzle, IsItsOwnInverseWithinAnAtom) {
  std::set<uint32_t> seen;
  for (uint32_t offset = 0; offset < 4 * kSwizzleAtom; ++offset) {
    const uint32_t place = swizzle(offset);
    EXPECT_EQ(place / kSwizzleAtom, offset / kSwizzleAtom);
    EXPECT_EQ(place / kSwizzleRow, offset / kSwizzleRow);
    EXPECT_EQ(swizzle(place), offset);
    seen.insert(place);
  }
  EXPECT_EQ(seen.size(), 4 * kSwizzleAtom);
}

TEST(Swizzle, KeepsChunksWhole) {
  for (uint32_t offset = 0; offset < 2 * kSwizzleAtom; ++offset) {
    const uint32_t within = offset % kSwizzleChunk;
    EXPECT_EQ(swizzle(offset), swizzle(offset - within) + within);
  }
}

TEST(Swizzle, SpreadsAColumnOfChunksOverAllBanks) {
  for (uint32_t chunk = 0; chunk < 8; ++chunk) {
    std::set<uint32_t> bank_groups;
    for (uint32_t row = 0; row < 8; ++row) bank_groups.insert(swizzle(row * kSwizzleRow + chunk * kSwizzleChunk) % 128 / 16);
    EXPECT_EQ(bank_groups.size(), 8u);
  }
}

TEST(Swizzle, ByHand) {
  static_assert(swizzle(0) == 0 && swizzle(112) == 112);
  static_assert(swizzle(128) == 128 + 16);               // row 1: chunk 0 at 1
  static_assert(swizzle(128 + 16) == 128);               // and 1 at 0
  static_assert(swizzle(5 * 128 + 48) == 5 * 128 + 96);  // row 5: chunk 3 at 3 ^ 5 = 6
  static_assert(swizzle(1024 + 32) == 1024 + 32);
}

template <class Tile>
void covers_exactly_once() {
  std::vector<int> times(Tile::kBytes);
  for (int row = 0; row < Tile::kRows; ++row)
    for (int column = 0; column < Tile::kColumns; ++column)
      for (int byte = 0; byte < Tile::kElementBytes; ++byte) ++times.at(Tile::offset(row, column) + byte);
  for (int count : times) ASSERT_EQ(count, 1);
}

TEST(SwizzledTile, CoversItsBytesExactlyOnce) {
  covers_exactly_once<SwizzledTile<8, 64>>();
  covers_exactly_once<SwizzledTile<64, 64>>();
  covers_exactly_once<SwizzledTile<64, 128>>();
  covers_exactly_once<SwizzledTile<128, 256>>();
  covers_exactly_once<SwizzledTile<64, 96, 4>>();
}

TEST(SwizzledTile, ByHand) {
  using Tile = SwizzledTile<64, 128>;
  static_assert(Tile::kPanelBytes == 8192 && Tile::kPanels == 2 && Tile::kBytes == 16384);
  static_assert(Tile::offset(0, 64) == 8192);
  static_assert(Tile::offset(9, 3) == 9 * 128 + 16 + 6);
  static_assert(Tile::offset(63, 127) == 8192 + 63 * 128 + 14);  // chunk 7 of row 7: 7 ^ 7 = 0
  static_assert(SwizzledTile<64, 64, 4>::offset(2, 33) == 8192 + 2 * 128 + 2 * 16 + 4);
}

// What the hardware reads, given the fields: eights of outer indices or of k at the stated strides from an atom's rows.
uint32_t read_by_hardware(uint64_t descriptor, Major major, uint32_t outer, uint32_t k) {
  const uint32_t start = static_cast<uint32_t>(descriptor & 0x3fff) * 16;
  const uint32_t leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) * 16;
  const uint32_t stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) * 16;
  if (major == Major::kDepth) return swizzle(start + outer / 8 * stride + outer % 8 * 128 + k * 2);
  return swizzle(start + outer / 64 * leading + outer % 64 * 2 + k / 8 * stride + k % 8 * 128);
}

TEST(Descriptor, FindsTheTilesElements) {
  constexpr uint32_t kBase = 3 * 65536 + 2048;
  using ByDepth = SwizzledTile<128, 192>;  // [outer][k]
  using ByOuter = SwizzledTile<192, 128>;  // [k][outer]
  for (uint32_t step = 0; step < 192; step += kDepthStep)
    for (uint32_t first : {0u, 64u})
      for (uint32_t outer = 0; outer < 64; ++outer)
        for (uint32_t k = 0; k < 16; ++k) {
          const int i = static_cast<int>(first + outer), j = static_cast<int>(step + k);
          uint64_t d = describe(kBase, Major::kDepth, ByDepth::kPanelBytes);
          d = moved(d, depth_offset(Major::kDepth, step, ByDepth::kPanelBytes));
          d = moved(d, outer_offset(Major::kDepth, first, ByDepth::kPanelBytes));
          ASSERT_EQ(read_by_hardware(d, Major::kDepth, outer, k), kBase + ByDepth::offset(i, j));
          d = describe(kBase, Major::kOuter, ByOuter::kPanelBytes);
          d = moved(d, depth_offset(Major::kOuter, step, ByOuter::kPanelBytes));
          d = moved(d, outer_offset(Major::kOuter, first, ByOuter::kPanelBytes));
          ASSERT_EQ(read_by_hardware(d, Major::kOuter, outer, k), kBase + ByOuter::offset(j, i));
          EXPECT_EQ(d >> 62, 1u);
          EXPECT_EQ(d >> 49 & 7, 0u);
        }
}

void fills(int rows, int columns, int threads, int each, const std::function<Place(int, int)>& map) {
  std::vector<int> times(static_cast<size_t>(rows * columns));
  for (int thread = 0; thread < threads; ++thread)
    for (int i = 0; i < each; ++i) {
      const Place place = map(thread, i);
      ASSERT_TRUE(place.row >= 0 && place.row < rows && place.column >= 0 && place.column < columns);
      ++times[static_cast<size_t>(place.row * columns + place.column)];
    }
  for (int count : times) ASSERT_EQ(count, 1);
}

TEST(Fragment, EachElementHasOneHolder) {
  fills(16, 8, 32, 4, mma_k8_a);
  fills(8, 8, 32, 2, mma_k8_b);
  fills(16, 16, 32, 8, mma_k16_a);
  fills(16, 8, 32, 4, mma_k16_b);
  fills(16, 8, 32, 4, mma_sum);
  fills(64, 16, 128, 8, wgmma_a);
  for (int columns : {32, 64, 128, 256}) fills(64, columns, 128, columns / 2, wgmma_sum);
  fills(8, 8, 32, 2, matrix_element);
  fills(8, 8, 32, 2, matrix_element_transposed);
}

// Written out from the tables of the PTX ISA ("Matrix fragments for mma.m16n8k8", "... m16n8k16", "Asynchronous warpgroup
// level matrix fragments"): rows group = lane >> 2 and group + 8, columns by lane % 4.
TEST(Fragment, TablesByHand) {
  const Place k8_a[2][4] = {{{0, 0}, {8, 0}, {0, 4}, {8, 4}}, {{3, 1}, {11, 1}, {3, 5}, {11, 5}}};  // lanes 0 and 13
  const Place k8_b[2][2] = {{{0, 0}, {4, 0}}, {{1, 3}, {5, 3}}};
  const Place k16_a[2][8] = {{{0, 0}, {0, 1}, {8, 0}, {8, 1}, {0, 8}, {0, 9}, {8, 8}, {8, 9}},
                             {{3, 2}, {3, 3}, {11, 2}, {11, 3}, {3, 10}, {3, 11}, {11, 10}, {11, 11}}};
  const Place k16_b[2][4] = {{{0, 0}, {1, 0}, {8, 0}, {9, 0}}, {{2, 3}, {3, 3}, {10, 3}, {11, 3}}};
  const Place sum[2][4] = {{{0, 0}, {0, 1}, {8, 0}, {8, 1}}, {{3, 2}, {3, 3}, {11, 2}, {11, 3}}};
  for (int row = 0; row < 2; ++row) {
    const int lane = 13 * row;
    for (int i = 0; i < 2; ++i) EXPECT_EQ(mma_k8_b(lane, i), k8_b[row][i]);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(mma_k8_a(lane, i), k8_a[row][i]);
      EXPECT_EQ(mma_k16_b(lane, i), k16_b[row][i]);
      EXPECT_EQ(mma_sum(lane, i), sum[row][i]);
    }
    for (int i = 0; i < 8; ++i) EXPECT_EQ(mma_k16_a(lane, i), k16_a[row][i]);
  }
  // wgmma: thread 77 is lane 13 of warp 2.
  const Place wide[8] = {{35, 2}, {35, 3}, {43, 2}, {43, 3}, {35, 10}, {35, 11}, {43, 10}, {43, 11}};
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(wgmma_a(77, i), wide[i]);
    EXPECT_EQ(wgmma_sum(77, i), wide[i]);
    EXPECT_EQ(wgmma_sum(77, i + 120), (Place{wide[i].row, wide[i].column + 240}));
  }
  EXPECT_EQ(wgmma_sum(127, 127), (Place{63, 255}));
}

TEST(Fragment, ASumIsTheNextProductsA) {
  for (int thread = 0; thread < 128; ++thread)
    for (int step = 0; step < 16; ++step)
      for (int i = 0; i < 8; ++i) {
        const Place from = wgmma_sum(thread, 8 * step + i), to = wgmma_a(thread, i);
        EXPECT_EQ(from, (Place{to.row, to.column + 16 * step}));
      }
}

// Where in a 16 x 16 block, as stored, a lane finds element i of the registers of a four-matrix load: the address comes from
// the lane that gives that row.
Place loaded(int lane, int i, bool transposed, Place (*address)(int)) {
  const Place within = transposed ? matrix_element_transposed(lane, i % 2) : matrix_element(lane, i % 2);
  const int giver = within.row + 8 * (i / 2);
  EXPECT_EQ(matrix_row(giver), (Place{within.row, i / 2}));
  const Place row = address(giver);
  return {row.row, row.column + within.column};
}

TEST(Fragment, MatrixLoadsGiveOperands) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 8; ++i) {
      const Place a = mma_k16_a(lane, i);
      EXPECT_EQ(loaded(lane, i, false, block_row), a);
      EXPECT_EQ(loaded(lane, i, true, block_row_transposed), (Place{a.column, a.row}));
      const Place part = mma_k16_b(lane, i % 4), b = {part.row, part.column + 8 * (i / 4)};
      EXPECT_EQ(loaded(lane, i, true, block_row), b);
      EXPECT_EQ(loaded(lane, i, false, block_row_transposed), (Place{b.column, b.row}));
    }
}

// The chunks that the 8 lanes of one matrix touch in a swizzled tile lie in different banks: no conflicts.
TEST(Fragment, MatrixLoadsFromSwizzledTilesHaveNoConflicts) {
  using Tile = SwizzledTile<64, 128>;
  for (auto address : {block_row, block_row_transposed})
    for (int row : {0, 16, 48})
      for (int column = 0; column < 128; column += 16)
        for (int matrix = 0; matrix < 4; ++matrix) {
          std::set<uint32_t> bank_groups;
          for (int lane = 8 * matrix; lane < 8 * matrix + 8; ++lane) {
            const uint32_t offset = Tile::offset(row + address(lane).row, column + address(lane).column);
            EXPECT_EQ(offset % 16, 0u);
            bank_groups.insert(offset % 128 / 16);
          }
          EXPECT_EQ(bank_groups.size(), 8u);
        }
}

}  // namespace
}  // namespace lla::cuda::hopper
