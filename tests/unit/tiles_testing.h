// SPDX-License-Identifier: Apache-2.0
// Matrix tiles in software, so that what is computed on them is tested on any CPU: the same loops over a unit of plain
// arrays, and packing element by element.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/tiles_product.h"

namespace lla::cpu::tiles_testing {

inline float from_half(uint16_t h) { return std::bit_cast<float>(static_cast<uint32_t>(h) << 16); }
inline uint16_t to_half(float x) {
  const uint32_t rounded = std::bit_cast<uint32_t>(x) + 0x8000u;
  const bool finite = std::isfinite(std::bit_cast<float>(rounded & 0xffff0000u));
  return static_cast<uint16_t>((finite ? rounded : std::bit_cast<uint32_t>(x)) >> 16);
}
// Takes the upper half off x.
inline uint16_t take_half(float* x) {
  const uint16_t half = static_cast<uint16_t>(std::bit_cast<uint32_t>(*x) >> 16);
  *x = std::isinf(*x) ? 0 : *x - from_half(half);
  return half;
}

struct SoftwareUnit {
  static inline thread_local float sums[4][16][16];
  static inline thread_local uint16_t halves[8][16][32];

  template <int kTile>
  static void zero() {
    std::memset(sums[kTile], 0, sizeof sums[kTile]);
  }
  template <int kTile>
  static void load(const void* from, int64_t row_distance) {
    for (int r = 0; r < 16; ++r) std::memcpy(halves[kTile][r], static_cast<const char*>(from) + r * row_distance, 64);
  }
  template <int kTile>
  static void store(void* to, int64_t row_distance) {
    for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(to) + r * row_distance, sums[kTile][r], 64);
  }
  template <int kSum, int kLeft, int kRight>
  static void multiply() {
    for (int i = 0; i < 16; ++i) {
      for (int p = 0; p < 16; ++p) {
        for (int j = 0; j < 16; ++j) {
          for (int half = 0; half < 2; ++half) {
            const float a = from_half(halves[kLeft][i][2 * p + half]), b = from_half(halves[kRight][p][2 * j + half]);
            sums[kSum][i][j] = std::fma(a, b, sums[kSum][i][j]);
          }
        }
      }
    }
  }
};

inline void nothing() {}
inline void split_rows(int64_t m, int64_t n, const float* a, int64_t lda, uint16_t* out, int64_t next, int64_t ldo) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float x = a[i * lda + j];
      for (int part = 0; part < kParts; ++part) out[part * next + i * ldo + j] = take_half(&x);
    }
  }
}
template <class F>
void pack_words(int64_t k, int64_t n, uint32_t* out, int64_t block, F half_at) {
  for (int64_t p = 0; p < k; p += 2) {
    for (int64_t j = 0; j < n; ++j) {
      const uint16_t pair[2] = {half_at(p, j), half_at(p + 1, j)};  // in this order in memory, whichever its bytes have
      std::memcpy(out + j / 16 * block + p / 2 * 16 + j % 16, pair, sizeof pair);
    }
  }
}
inline void pack(int64_t k, int64_t n, const uint16_t* b, int64_t ldb, uint32_t* out, int64_t block) {
  pack_words(k, n, out, block, [&](int64_t p, int64_t j) { return b[p * ldb + j]; });
}
inline void split_pack(int64_t k, int64_t n, const float* b, int64_t ldb, uint32_t* out, int64_t next, int64_t block) {
  for (int part = 0; part < kParts; ++part) {
    pack_words(k, n, out + part * next, block, [&](int64_t p, int64_t j) {
      float x = b[p * ldb + j];
      uint16_t half = 0;
      for (int i = 0; i <= part; ++i) half = take_half(&x);
      return half;
    });
  }
}

inline void scale_split_pack(int64_t k, int64_t n, const uint16_t* b, int64_t ldb, const float* scale, uint32_t* out,
                             int64_t next, int64_t block) {
  std::vector<float> scaled(static_cast<size_t>(k * n));
  for (int64_t p = 0; p < k; ++p) {
    for (int64_t j = 0; j < n; ++j) scaled[static_cast<size_t>(p * n + j)] = from_half(b[p * ldb + j]) * scale[p];
  }
  split_pack(k, n, scaled.data(), n, out, next, block);
}

inline constexpr Tiles kSoftwareTiles = {nothing,    nothing,         tiled_product<SoftwareUnit>, split_rows, pack,
                                         split_pack, scale_split_pack};

}  // namespace lla::cpu::tiles_testing
