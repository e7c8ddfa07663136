// SPDX-License-Identifier: Apache-2.0
// Matrix tiles: the packing of every instruction set against loops, products in software and on the CPU's tiles, if it has
// them, against double precision, and the kernels that use them on tiles in software.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu/simd.h"
#include "lla/context.h"
#include "plugin/backend.h"
#include "tests/unit/tiles_testing.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/unit/cpu_tiles_test.cpp"
#include "cpu/simd_highway.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
#include "cpu/simd_functions.h"
#include "cpu/tiles_packing.h"
// and what needs both
#include "cpu/dots_product.h"
namespace lla::cpu::HWY_NAMESPACE {

void no_tiles() {}
struct SoftwareDotUnit {
  static HWY_INLINE V dot(V sum, Words a, Words b) {
    const auto half = [](Words words) { return hn::BitCast(D(), words); };
    const Words upper = hn::Set(DWord(), 0xffff0000u);
    sum = hn::MulAdd(half(hn::ShiftLeft<16>(a)), half(hn::ShiftLeft<16>(b)), sum);
    return hn::MulAdd(half(hn::And(a, upper)), half(hn::And(b, upper)), sum);
  }
};
constexpr Tiles kPacking = {no_tiles,   no_tiles,         dots_product<SoftwareDotUnit>, split_rows,
                            pack_pairs, split_pack_pairs, scale_split_pack_pairs};
const Tiles* packing() { return &kPacking; }

}  // namespace lla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lla::cpu {
namespace {

using tiles_testing::kSoftwareTiles;

std::vector<float> random_floats(int64_t n, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = normal(engine);
  return v;
}
std::vector<uint16_t> random_halves(int64_t n, uint64_t seed) {
  std::vector<uint16_t> out;
  for (const float x : random_floats(n, seed)) out.push_back(tiles_testing::to_half(x));
  return out;
}

std::vector<const Tiles*> packings() {
  std::vector<const Tiles*> all;
#if HWY_TARGETS & HWY_EMU128
  all.push_back(N_EMU128::packing());
#endif
#if HWY_TARGETS & HWY_AVX2
  if (cpu_isa() == LLA_ISA_AVX2 || cpu_isa() == LLA_ISA_AVX512) all.push_back(N_AVX2::packing());
#endif
#if HWY_TARGETS & HWY_AVX3
  if (cpu_isa() == LLA_ISA_AVX512) all.push_back(N_AVX3::packing());
#endif
#if HWY_TARGETS & HWY_NEON
  all.push_back(N_NEON::packing());
#endif
  return all;
}

TEST(CpuTiles, Packing) {
  constexpr int64_t kRows = 10, kColumns = 48, kStride = 53, kBlock = kRows / 2 * 16 + 3;
  std::vector<float> a = random_floats(kRows * kStride, 1);
  const float special[] = {0.0f,
                           -0.0f,
                           std::numeric_limits<float>::infinity(),
                           -std::numeric_limits<float>::infinity(),
                           3.4e38f,
                           -3.4e38f,
                           1e-40f,
                           1.00390625f,
                           3.39e38f,
                           1.5f,
                           std::bit_cast<float>(0x7fffffffu),
                           std::bit_cast<float>(0x7f800001u)};
  std::copy(std::begin(special), std::end(special), a.begin() + 7);
  const std::vector<uint16_t> b = random_halves(kRows * kStride, 2);
  ASSERT_FALSE(packings().empty());
  for (const Tiles* t : packings()) {
    std::vector<uint16_t> parts(kParts * kRows * kStride, 7), parts2 = parts;
    t->split_rows(kRows, kColumns, a.data(), kStride, parts.data(), kRows * kStride, kStride);
    kSoftwareTiles.split_rows(kRows, kColumns, a.data(), kStride, parts2.data(), kRows * kStride, kStride);
    EXPECT_EQ(parts, parts2);
    std::vector<uint32_t> words(kParts * 3 * kBlock, 7), words2 = words;
    t->pack(kRows, kColumns, b.data(), kStride, words.data(), kBlock);
    kSoftwareTiles.pack(kRows, kColumns, b.data(), kStride, words2.data(), kBlock);
    EXPECT_EQ(words, words2);
    t->split_pack(kRows, kColumns, a.data(), kStride, words.data(), 3 * kBlock, kBlock);
    kSoftwareTiles.split_pack(kRows, kColumns, a.data(), kStride, words2.data(), 3 * kBlock, kBlock);
    EXPECT_EQ(words, words2);
    const float* scale = a.data() + 2 * kStride;
    t->scale_split_pack(kRows, kColumns, b.data(), kStride, scale, words.data(), 3 * kBlock, kBlock);
    kSoftwareTiles.scale_split_pack(kRows, kColumns, b.data(), kStride, scale, words2.data(), 3 * kBlock, kBlock);
    EXPECT_EQ(words, words2);
  }
  for (const float x : a) {  // the parts are all of it, NaN too
    float rest = x, sum = 0;
    for (int part = 0; part < kParts; ++part) sum += tiles_testing::from_half(tiles_testing::take_half(&rest));
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(sum));
    } else if (std::fabs(x) > 1e-30f) {
      EXPECT_EQ(sum, x);
    }
  }
}

void expect_product(const Tiles& t, int64_t m, int64_t n, int64_t k, int split) {
  const int64_t lda = k + 8, ldc = n + 5, block = k / 2 * 16, a_size = m * lda, b_size = n / 16 * block;
  const std::vector<float> a = random_floats(a_size, 3), b = random_floats(k * n, 4);
  std::vector<uint16_t> a_parts(static_cast<size_t>(kParts * a_size));
  std::vector<uint32_t> b_parts(static_cast<size_t>(kParts * b_size));
  kSoftwareTiles.split_rows(1, a_size, a.data(), 0, a_parts.data(), a_size, 0);
  kSoftwareTiles.split_pack(k, n, b.data(), n, b_parts.data(), b_size, block);
  std::vector<float> c(static_cast<size_t>(m * ldc), 7.0f);
  t.begin();
  t.product(m, n, k, a_parts.data(), split == 1 ? a_size : 0, lda, b_parts.data(), split == 2 ? b_size : 0, block, c.data(),
            ldc);
  t.end();
  const auto value = [](float x, bool whole) -> double {  // what is not split is the first part
    return whole ? x : tiles_testing::from_half(tiles_testing::take_half(&x));
  };
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < ldc; ++j) {
      double want = 0, size = 0;
      for (int64_t p = 0; p < k && j < n; ++p) {
        const double product =
            value(a[static_cast<size_t>(i * lda + p)], split == 1) * value(b[static_cast<size_t>(p * n + j)], split == 2);
        want += product;
        size += std::fabs(product);
      }
      if (j >= n) want = 7;
      ASSERT_NEAR(c[static_cast<size_t>(i * ldc + j)], want, size * 0x1p-26 * static_cast<double>(kParts * k))
          << m << " " << n << " " << k << " split " << split << " at " << i << " " << j;
    }
  }
}

TEST(CpuTiles, Products) {
  std::vector<const Tiles*> all = packings();  // with dot products in software
  all.push_back(&kSoftwareTiles);
  for (const Tiles* t : {tiles(), bf16_dots()}) {
    if (t) all.push_back(t);
  }
  for (const Tiles* t : all) {
    for (int64_t m : {16, 32, 48}) {
      for (int64_t n : {16, 32, 80}) {
        for (int64_t k : {32, 96}) {
          for (int split = 0; split < 3; ++split) expect_product(*t, m, n, k, split);
        }
      }
    }
  }
}

}  // namespace
}  // namespace lla::cpu
#endif
