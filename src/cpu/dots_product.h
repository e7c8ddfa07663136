// SPDX-License-Identifier: Apache-2.0
// The product of Tiles by dot products of bf16 pairs in vectors, once per Highway target (hence no include guard), over a
// unit, so that a test can bring one in software. To be included after cpu/tiles_packing.h.

#ifndef LLA_UNROLL
#define LLA_UNROLL _Pragma("GCC unroll 16")
// Checks of pointer arithmetic in the unrolled loops would take minutes to compile; address checks stay.
#define LLA_TILE __attribute__((no_sanitize("undefined"))) HWY_INLINE
#endif

namespace lla::cpu::HWY_NAMESPACE {
namespace {

// Rows x 16 Blocks elements of c. Unit::dot(sum, a, b) is sum and the products of the halves of each word.
template <class Unit, int Rows, int Blocks>
LLA_TILE void dots_tile(int64_t k, const uint16_t* a, int64_t a_next, int64_t lda, const uint32_t* b, int64_t b_next,
                        int64_t block, float* c, int64_t ldc) {
  constexpr int kVectors = static_cast<int>(kTileRows / kLanes);  // of a block
  const D d;
  const DWord words;
  V sums[Rows][Blocks * kVectors];
  LLA_UNROLL for (int i = 0; i < Rows; ++i) {
    LLA_UNROLL for (int j = 0; j < Blocks * kVectors; ++j) sums[i][j] = hn::Zero(d);
  }
  const int parts = a_next || b_next ? kParts : 1;
  for (int64_t p = 0; p < k; p += kTileDepth) {
    for (int part = 0; part < parts; ++part) {
      const uint16_t* left = a + p + part * a_next;
      const uint32_t* right = b + p / 2 * kTileRows + part * b_next;
      if constexpr (Blocks == 1) {  // few columns wait for a: the next rows are asked for
        LLA_UNROLL for (int i = 0; i < Rows; ++i) __builtin_prefetch(left + (Rows + i) * lda, 0, 2);
      }
      for (int64_t q = 0; q < kTileDepth / 2; ++q) {
        Words vb[Blocks * kVectors];
        LLA_UNROLL for (int j = 0; j < Blocks * kVectors; ++j) {
          vb[j] = hn::LoadU(words, right + j / kVectors * block + q * kTileRows + j % kVectors * kLanes);
        }
        LLA_UNROLL for (int i = 0; i < Rows; ++i) {
          uint32_t pair;
          std::memcpy(&pair, left + i * lda + 2 * q, sizeof pair);
          const Words va = hn::Set(words, pair);
          LLA_UNROLL for (int j = 0; j < Blocks * kVectors; ++j) sums[i][j] = Unit::dot(sums[i][j], va, vb[j]);
        }
      }
    }
  }
  LLA_UNROLL for (int i = 0; i < Rows; ++i) {
    LLA_UNROLL for (int j = 0; j < Blocks * kVectors; ++j) hn::StoreU(sums[i][j], d, c + i * ldc + j * kLanes);
  }
}

template <class Unit>
void dots_product(int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t a_next, int64_t lda, const uint32_t* b,
                  int64_t b_next, int64_t block, float* c, int64_t ldc) {
  constexpr int kRows = 8;  // with two blocks: sixteen sums are on their way at once, as with one
  const int64_t pairs = n / (2 * kTileRows) * (2 * kTileRows);
  for (int64_t i = 0; i < m && pairs > 0; i += kRows) {
    for (int64_t j = 0; j < pairs; j += 2 * kTileRows) {
      dots_tile<Unit, kRows, 2>(k, a + i * lda, a_next, lda, b + j / kTileRows * block, b_next, block, c + i * ldc + j, ldc);
    }
  }
  for (int64_t i = 0; i < m && pairs < n; i += 2 * kRows) {
    dots_tile<Unit, 2 * kRows, 1>(k, a + i * lda, a_next, lda, b + pairs / kTileRows * block, b_next, block,
                                  c + i * ldc + pairs, ldc);
  }
}

}  // namespace
}  // namespace lla::cpu::HWY_NAMESPACE
