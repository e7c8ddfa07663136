// SPDX-License-Identifier: Apache-2.0
// The 64-bit words by which wgmma finds an operand in shared memory, for SwizzledTile of 2-byte elements. Plain C++: pure
// functions.
#pragma once

#include <cstdint>

#include "cuda/hopper/swizzle.h"

namespace lla::cuda::hopper {

// What runs contiguously in an operand's tile: the depth k that is summed over (tile [row of A or column of B][k]), or the
// outer index (tile [k][row of A or column of B]). The values are the instruction's transposition bit.
enum class Major : int { kDepth = 0, kOuter = 1 };

constexpr int kDepthStep = 16;  // k of one instruction with 2-byte elements

// The operand that starts at `address` (in shared memory, multiple of 1024). panel_bytes: SwizzledTile::kPanelBytes.
// Depth-major: eights of outer indices are an atom apart; one instruction's depth never leaves a panel, so nothing says how
// far panels are apart. Outer-major: eights of k are an atom apart, and 64 outer indices a panel.
constexpr uint64_t describe(uint32_t address, Major major, uint32_t panel_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  const uint64_t leading = major == Major::kOuter ? panel_bytes : kSwizzleChunk;
  return kSwizzle128 | uint64_t{kSwizzleAtom / 16} << 32 | leading / 16 << 16 | (address & 0x3ffffu) / 16;
}

// Bytes from the tile's start to the operand at depth k (a multiple of 16). Within a row of the tile the start need not be a
// whole atom: the hardware swizzles the bits of the sum.
constexpr uint32_t depth_offset(Major major, uint32_t k, uint32_t panel_bytes) {
  return major == Major::kOuter ? k * kSwizzleRow : k / 64 * panel_bytes + k % 64 * 2;
}

// Bytes from the tile's start to outer index i: a multiple of 8 if the depth runs contiguously, else of 64.
constexpr uint32_t outer_offset(Major major, uint32_t i, uint32_t panel_bytes) {
  return major == Major::kOuter ? i / 64 * panel_bytes : i * kSwizzleRow;
}

// A descriptor moved by some bytes. Shared addresses have 18 bits, so the sum stays within the address field.
constexpr uint64_t moved(uint64_t descriptor, uint32_t bytes) { return descriptor + bytes / 16; }

}  // namespace lla::cuda::hopper
