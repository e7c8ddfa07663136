// SPDX-License-Identifier: Apache-2.0
// The product of Tiles over a unit of eight tiles (0 to 3 sums, 4 and 5 left factors, 6 and 7 right ones), so that a test
// can bring a unit in software.
#pragma once

#include "cpu/tiles.h"

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define LLA_HAS_TILES 1
#define LLA_TILE_CODE __attribute__((target("amx-tile,amx-bf16")))
#else
#define LLA_HAS_TILES 0
#define LLA_TILE_CODE
#endif

namespace lla::cpu {

// Rows x Columns tiles of c.
template <class Unit, int Rows, int Columns>
LLA_TILE_CODE void product_of_tiles(int64_t k, const uint16_t* a, int64_t a_next, int64_t lda, const uint32_t* b,
                                    int64_t b_next, int64_t block, float* c, int64_t ldc) {
  const int64_t a_bytes = lda * 2, b_bytes = kTileRows * 4, c_bytes = ldc * 4;
  const int parts = a_next || b_next ? kParts : 1;
  const uint16_t* left = a;
  const uint32_t* right = b;
  Unit::template load<4>(left, a_bytes);
  if constexpr (Rows > 1) Unit::template load<5>(left + kTileRows * lda, a_bytes);
  Unit::template load<6>(right, b_bytes);
  if constexpr (Columns > 1) Unit::template load<7>(right + block, b_bytes);
  Unit::template zero<0>();
  if constexpr (Columns > 1) Unit::template zero<1>();
  if constexpr (Rows > 1) Unit::template zero<2>();
  if constexpr (Rows > 1 && Columns > 1) Unit::template zero<3>();
  int part = 0;
  for (int64_t p = 0; p < k;) {
    const bool whole = ++part == parts;  // the next factors are other rows and columns, not other parts
    if (whole) {
      part = 0;
      p += kTileDepth;
    }
    const bool more = p < k, more_left = more && (whole || a_next), more_right = more && (whole || b_next);
    left = a + p + part * a_next;
    right = b + p / 2 * kTileRows + part * b_next;
    // A factor is loaded as soon as its last product has begun.
    Unit::template multiply<0, 4, 6>();
    if constexpr (Rows > 1) Unit::template multiply<2, 5, 6>();
    if (more_right) Unit::template load<6>(right, b_bytes);
    if constexpr (Columns > 1) Unit::template multiply<1, 4, 7>();
    if (more_left) Unit::template load<4>(left, a_bytes);
    if constexpr (Rows > 1 && Columns > 1) Unit::template multiply<3, 5, 7>();
    if constexpr (Columns > 1) {
      if (more_right) Unit::template load<7>(right + block, b_bytes);
    }
    if constexpr (Rows > 1) {
      if (more_left) Unit::template load<5>(left + kTileRows * lda, a_bytes);
    }
  }
  Unit::template store<0>(c, c_bytes);
  if constexpr (Columns > 1) Unit::template store<1>(c + kTileRows, c_bytes);
  if constexpr (Rows > 1) Unit::template store<2>(c + kTileRows * ldc, c_bytes);
  if constexpr (Rows > 1 && Columns > 1) Unit::template store<3>(c + kTileRows * ldc + kTileRows, c_bytes);
}

template <class Unit>
LLA_TILE_CODE void tiled_product(int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t a_next, int64_t lda,
                                 const uint32_t* b, int64_t b_next, int64_t block, float* c, int64_t ldc) {
  for (int64_t i = 0; i < m; i += 2 * kTileRows) {
    for (int64_t j = 0; j < n; j += 2 * kTileRows) {
      const int64_t skip = j / kTileRows * block;
      const bool two_rows = i + kTileRows < m, two_columns = j + kTileRows < n;
      const auto product = two_rows      ? two_columns ? product_of_tiles<Unit, 2, 2> : product_of_tiles<Unit, 2, 1>
                                : two_columns ? product_of_tiles<Unit, 1, 2>
                                         : product_of_tiles<Unit, 1, 1>;
      product(k, a + i * lda, a_next, lda, b + skip, b_next, block, c + i * ldc + j, ldc);
    }
  }
}

}  // namespace lla::cpu
