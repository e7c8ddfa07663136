// SPDX-License-Identifier: Apache-2.0
// The matrix tiles of x86 CPUs as a unit for tiled_product. Outside of Highway's targets, so that the product, which has no
// other target than the tiles either, takes each instruction in place of a call.
#pragma once

#include "cpu/tiles_product.h"

#if LLA_HAS_TILES
namespace lla::cpu {
namespace {

// All eight tiles: 16 rows of 64 bytes.
struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr Configuration kConfiguration;

LLA_TILE_CODE void begin_tiles() { asm volatile("ldtilecfg %0" : : "m"(kConfiguration)); }
LLA_TILE_CODE void end_tiles() { asm volatile("tilerelease"); }

struct TileUnit {
  template <int kTile>
  LLA_TILE_CODE static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  LLA_TILE_CODE static void load(const void* from, int64_t row_distance) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(row_distance) : "memory");
  }
  template <int kTile>
  LLA_TILE_CODE static void store(void* to, int64_t row_distance) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(to), "r"(row_distance) : "memory");
  }
  template <int kSum, int kLeft, int kRight>
  LLA_TILE_CODE static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
  }
};

}  // namespace
}  // namespace lla::cpu
#endif
