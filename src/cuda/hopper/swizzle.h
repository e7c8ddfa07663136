// SPDX-License-Identifier: Apache-2.0
// Where the elements of a tile lie in shared memory under the 128-byte swizzle, as the bulk tensor copies write and the
// tensor cores read it. Plain C++: pure functions.
#pragma once

#include <cstdint>

namespace lla::cuda::hopper {

constexpr uint32_t kSwizzleChunk = 16;   // bytes that stay together
constexpr uint32_t kSwizzleRow = 128;    // bytes of a row: 8 chunks, all 32 banks
constexpr uint32_t kSwizzleAtom = 1024;  // 8 rows. The pattern repeats; it is one of addresses, so tiles start at multiples

// Byte `offset` of the plain order [row][128 bytes] moves here. The chunk's number is combined with the row's: a column of
// chunks, which would be 8 accesses to the same 4 banks, is spread over all banks. Its own inverse.
constexpr uint32_t swizzle(uint32_t offset) { return offset ^ ((offset / kSwizzleRow % 8) * kSwizzleChunk); }

// A tile of rows x columns elements. A swizzled row holds 128 bytes only, so a wider tile is cut into panels of that width,
// each with all rows, one after the other: panel p holds columns p * kPanelColumns ....
template <int kRowCount, int kColumnCount, int kElementSize = 2>
struct SwizzledTile {
  static constexpr int kRows = kRowCount, kColumns = kColumnCount, kElementBytes = kElementSize;
  static constexpr int kPanelColumns = static_cast<int>(kSwizzleRow) / kElementBytes;
  static constexpr int kPanels = kColumns / kPanelColumns;
  static constexpr uint32_t kPanelBytes = kRows * kSwizzleRow;
  static constexpr uint32_t kBytes = kPanels * kPanelBytes;
  static_assert(kElementBytes == 2 || kElementBytes == 4, "elements have 2 or 4 bytes");
  static_assert(kRows % 8 == 0, "every panel must start at a whole atom");
  static_assert(kColumns % kPanelColumns == 0, "columns come in whole panels");

  static constexpr uint32_t offset(int row, int column) {
    const auto r = static_cast<uint32_t>(row), c = static_cast<uint32_t>(column), panel = uint32_t{kPanelColumns};
    return c / panel * kPanelBytes + swizzle(r * kSwizzleRow + c % panel * kElementBytes);
  }
};

}  // namespace lla::cuda::hopper
