// SPDX-License-Identifier: Apache-2.0
// The SIMD tables of every instruction set that this CPU has, against loops in double precision; the fixed order of sums.
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
#include "plugin/numeric.h"

namespace lla::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> random_floats(int64_t n, uint64_t seed, float lo = -1, float hi = 1) {
  std::mt19937_64 engine(seed);
  std::uniform_real_distribution<float> uniform(lo, hi);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = uniform(engine);
  return v;
}

bool same_bits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

class SimdTest : public testing::TestWithParam<int32_t> {
 protected:
  const Simd& s = simd(GetParam());
};

std::vector<int32_t> instruction_sets() {
  std::vector<int32_t> sets = {LLA_ISA_BASELINE};
  const int32_t best = cpu_isa();
  if (best == LLA_ISA_AVX2 || best == LLA_ISA_AVX512) sets.push_back(LLA_ISA_AVX2);
  if (best == LLA_ISA_AVX512) sets.push_back(LLA_ISA_AVX512);
  if (best == LLA_ISA_NEON) sets.push_back(LLA_ISA_NEON);
  return sets;
}

TEST_P(SimdTest, NamesItself) {
  EXPECT_EQ(s.isa, GetParam());
  EXPECT_STREQ(s.name, isa_name(GetParam()));
  EXPECT_EQ(simd(LLA_ISA_DEFAULT).isa, cpu_isa());
}

struct Size {
  int64_t m, n, k;
};

std::vector<Size> product_sizes() {
  std::vector<Size> sizes;
  for (int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 64}) {
    for (int64_t n : {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 130}) {
      for (int64_t k : {0, 1, 2, 7, 8, 15, 17, 31, 64, 67}) sizes.push_back({m, n, k});
    }
  }
  sizes.push_back({70, 100, 300});
  sizes.push_back({37, 53, 769});
  sizes.push_back({65, 49, 1601});
  sizes.push_back({1, 1100, 300});
  return sizes;
}

// A random walk of k roundings of partial sums of about sqrt(k); the bound that always holds is k * k / 4 * 2^-24.
double tolerance(int64_t k) { return 0x1p-24 * static_cast<double>(k + 4); }

// Everything outside the operands is NaN, and c has a frame that must stay as it was.
TEST_P(SimdTest, DotProductMatchesDouble) {
  for (const Size& z : product_sizes()) {
    for (const bool accumulate : {false, true}) {
      const int64_t lda = z.k + 3, ldb = z.k + 5, ldc = z.n + 2;
      std::vector<float> a(static_cast<size_t>(z.m * lda + 1), kNan), b(static_cast<size_t>(z.n * ldb + 1), kNan);
      const std::vector<float> ra = random_floats(z.m * z.k, 1), rb = random_floats(z.n * z.k, 2);
      for (int64_t i = 0; i < z.m; ++i) std::copy_n(ra.begin() + i * z.k, z.k, a.begin() + i * lda);
      for (int64_t j = 0; j < z.n; ++j) std::copy_n(rb.begin() + j * z.k, z.k, b.begin() + j * ldb);
      std::vector<float> c = random_floats(z.m * ldc, 3);
      const std::vector<float> before = c;
      s.dot_product(z.m, z.n, z.k, a.data(), lda, b.data(), ldb, c.data(), ldc, accumulate);
      for (int64_t i = 0; i < z.m; ++i) {
        for (int64_t j = 0; j < ldc; ++j) {
          const size_t at = static_cast<size_t>(i * ldc + j);
          if (j >= z.n) {
            ASSERT_TRUE(same_bits(c[at], before[at]));
            continue;
          }
          double want = accumulate ? before[at] : 0.0;
          for (int64_t p = 0; p < z.k; ++p) {
            want += static_cast<double>(ra[static_cast<size_t>(i * z.k + p)]) * rb[static_cast<size_t>(j * z.k + p)];
          }
          ASSERT_NEAR(c[at], want, tolerance(z.k)) << z.m << " " << z.n << " " << z.k;
        }
      }
    }
  }
}

TEST_P(SimdTest, OuterProductMatchesDouble) {
  for (const Size& z : product_sizes()) {
    for (const bool transposed : {false, true}) {
      for (const bool accumulate : {false, true}) {
        const int64_t lda = (transposed ? z.m : z.k) + 3, ldb = z.n + 5, ldc = z.n + 2;
        const int64_t a_row = transposed ? 1 : lda, a_col = transposed ? lda : 1;
        std::vector<float> a(static_cast<size_t>((transposed ? z.k : z.m) * lda + 1), kNan);
        std::vector<float> b(static_cast<size_t>(z.k * ldb + 1), kNan);
        const std::vector<float> ra = random_floats(z.m * z.k, 4), rb = random_floats(z.n * z.k, 5);
        for (int64_t i = 0; i < z.m; ++i) {
          for (int64_t p = 0; p < z.k; ++p) {
            a[static_cast<size_t>(i * a_row + p * a_col)] = ra[static_cast<size_t>(i * z.k + p)];
          }
        }
        for (int64_t p = 0; p < z.k; ++p) std::copy_n(rb.begin() + p * z.n, z.n, b.begin() + p * ldb);
        std::vector<float> c = random_floats(z.m * ldc, 6);
        const std::vector<float> before = c;
        s.outer_product(z.m, z.n, z.k, a.data(), a_row, a_col, b.data(), ldb, c.data(), ldc, accumulate);
        for (int64_t i = 0; i < z.m; ++i) {
          for (int64_t j = 0; j < ldc; ++j) {
            const size_t at = static_cast<size_t>(i * ldc + j);
            if (j >= z.n) {
              ASSERT_TRUE(same_bits(c[at], before[at]));
              continue;
            }
            double want = accumulate ? before[at] : 0.0;
            for (int64_t p = 0; p < z.k; ++p) {
              want += static_cast<double>(ra[static_cast<size_t>(i * z.k + p)]) * rb[static_cast<size_t>(p * z.n + j)];
            }
            ASSERT_NEAR(c[at], want, tolerance(z.k)) << z.m << " " << z.n << " " << z.k;
          }
        }
      }
    }
  }
}

// An element has the same bits alone and within a large product.
TEST_P(SimdTest, ProductBitsDoNotDependOnTheTile) {
  for (const int64_t k : {5, 64, 67, 1000}) {
    const int64_t m = 71, n = 83;
    const std::vector<float> a = random_floats(m * k, 7), b = random_floats(n * k, 8), start = random_floats(m * n, 9);
    for (const bool accumulate : {false, true}) {
      std::vector<float> rows = start, outer = start;
      s.dot_product(m, n, k, a.data(), k, b.data(), k, rows.data(), n, accumulate);
      s.outer_product(m, n, k, a.data(), k, 1, b.data(), n, outer.data(), n, accumulate);  // b read as [k][n]
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          const size_t at = static_cast<size_t>(i * n + j);
          float one = start[at];
          s.dot_product(1, 1, k, a.data() + i * k, k, b.data() + j * k, k, &one, 1, accumulate);
          ASSERT_TRUE(same_bits(one, rows[at])) << i << " " << j;
          one = start[at];
          s.outer_product(1, 1, k, a.data() + i * k, k, 1, b.data() + j, n, &one, 1, accumulate);
          ASSERT_TRUE(same_bits(one, outer[at])) << i << " " << j;
        }
      }
      for (const int64_t some : {1, 2, 3, 4, 5, 6, 7, 8, 9, 40}) {  // some rows, all columns
        std::vector<float> part = start, part_outer = start;
        s.dot_product(some, n, k, a.data(), k, b.data(), k, part.data(), n, accumulate);
        s.outer_product(some, n, k, a.data(), k, 1, b.data(), n, part_outer.data(), n, accumulate);
        ASSERT_EQ(0, std::memcmp(part.data(), rows.data(), static_cast<size_t>(some * n) * sizeof(float)));
        ASSERT_EQ(0, std::memcmp(part_outer.data(), outer.data(), static_cast<size_t>(some * n) * sizeof(float)));
      }
    }
  }
}

// Numbers of type bf16 as they lie, and the same widened first; c's frame stays as it was.
TEST_P(SimdTest, DotProductOfNarrowNumbers) {
  for (const Size& z : product_sizes()) {
    const int64_t ldb = z.k + 5, ldc = z.n + 2;
    const std::vector<float> a = random_floats(z.m * z.k, 35), values = random_floats(z.n * z.k, 36);
    std::vector<uint16_t> narrow(static_cast<size_t>(z.n * ldb - 5), float_to_bf16(kNan));
    std::vector<float> widened(static_cast<size_t>(z.n * ldb), kNan);
    for (int64_t j = 0; j < z.n; ++j) {
      for (int64_t p = 0; p < z.k; ++p) {
        const uint16_t bits = float_to_bf16(values[static_cast<size_t>(j * z.k + p)]);
        narrow[static_cast<size_t>(j * ldb + p)] = bits;
        widened[static_cast<size_t>(j * ldb + p)] = bf16_to_float(bits);
      }
    }
    std::vector<float> c = random_floats(z.m * ldc, 37), want = c;
    s.dot_product_bf16(z.m, z.n, z.k, a.data(), z.k, narrow.data(), ldb, c.data(), ldc);
    s.dot_product(z.m, z.n, z.k, a.data(), z.k, widened.data(), ldb, want.data(), ldc, false);
    ASSERT_EQ(0, std::memcmp(c.data(), want.data(), c.size() * sizeof(float))) << z.m << " " << z.n << " " << z.k;
  }
}

// c + scale * a b, row by row, with the same bits for one row and many; c's frame stays as it was.
TEST_P(SimdTest, ScaledOuterProduct) {
  for (const Size& z : product_sizes()) {
    const int64_t ldc = z.n + 2;
    const std::vector<float> a = random_floats(z.m * z.k, 31), b = random_floats(z.k * z.n, 32);
    const std::vector<float> factor = random_floats(z.m, 33), before = random_floats(z.m * ldc, 34);
    std::vector<float> c = before, rows = before;
    s.outer_product_scaled(z.m, z.n, z.k, a.data(), z.k, b.data(), z.n, c.data(), ldc, factor.data());
    for (int64_t i = 0; i < z.m; ++i) {
      s.outer_product_scaled(1, z.n, z.k, a.data() + i * z.k, z.k, b.data(), z.n, rows.data() + i * ldc, ldc,
                             factor.data() + i);
      for (int64_t j = 0; j < ldc; ++j) {
        const size_t at = static_cast<size_t>(i * ldc + j);
        ASSERT_TRUE(same_bits(c[at], rows[at])) << z.m << " " << z.n << " " << z.k;
        if (j >= z.n) {
          ASSERT_TRUE(same_bits(c[at], before[at]));
          continue;
        }
        double sum = 0;
        for (int64_t p = 0; p < z.k; ++p) {
          sum += static_cast<double>(a[static_cast<size_t>(i * z.k + p)]) * b[static_cast<size_t>(p * z.n + j)];
        }
        ASSERT_NEAR(c[at], before[at] + sum * factor[static_cast<size_t>(i)], tolerance(z.k))
            << z.m << " " << z.n << " " << z.k;
      }
    }
  }
}

// The product on something else than c, and the one with b transposed, have the bits of what they replace.
TEST_P(SimdTest, OuterProductsOfOtherKinds) {
  for (const Size& z : product_sizes()) {
    const int64_t ldc = z.n + 2, lda = z.k + 1, ldb = z.k + 3;
    const std::vector<float> a = random_floats(z.m * lda, 51), transposed = random_floats(z.n * ldb, 52);
    const std::vector<float> base = random_floats(z.m * ldc, 53), before = random_floats(z.m * ldc, 54);
    std::vector<float> b(static_cast<size_t>(z.k * z.n));
    for (int64_t p = 0; p < z.k; ++p) {
      for (int64_t j = 0; j < z.n; ++j) b[static_cast<size_t>(p * z.n + j)] = transposed[static_cast<size_t>(j * ldb + p)];
    }
    const auto with_frame = [&](std::vector<float> c) {
      for (int64_t i = 0; i < z.m; ++i) std::copy_n(before.begin() + i * ldc + z.n, 2, c.begin() + i * ldc + z.n);
      return c;
    };
    for (const bool accumulate : {false, true}) {
      std::vector<float> c = before, want = before;
      s.outer_product_transposed(z.m, z.n, z.k, a.data(), lda, transposed.data(), ldb, c.data(), ldc, accumulate);
      s.outer_product(z.m, z.n, z.k, a.data(), lda, 1, b.data(), z.n, want.data(), ldc, accumulate);
      ASSERT_EQ(c, want) << z.m << " " << z.n << " " << z.k;
    }
    std::vector<float> c = before, want = base;
    for (float& x : want) x *= 0.7f;
    s.outer_product_onto(z.m, z.n, z.k, a.data(), lda, 1, b.data(), z.n, c.data(), ldc, base.data(), 0.7f);
    s.outer_product(z.m, z.n, z.k, a.data(), lda, 1, b.data(), z.n, want.data(), ldc, true);
    ASSERT_EQ(c, with_frame(want)) << z.m << " " << z.n << " " << z.k;
    c = base;  // the base is c itself
    s.outer_product_onto(z.m, z.n, z.k, a.data(), lda, 1, b.data(), z.n, c.data(), ldc, c.data(), 0.7f);
    for (int64_t i = 0; i < z.m; ++i) std::copy_n(before.begin() + i * ldc + z.n, 2, c.begin() + i * ldc + z.n);
    ASSERT_EQ(c, with_frame(want)) << z.m << " " << z.n << " " << z.k;
    c = want = before;  // no base: zero
    s.outer_product_onto(z.m, z.n, z.k, a.data(), lda, 1, b.data(), z.n, c.data(), ldc, nullptr, 0.7f);
    s.outer_product(z.m, z.n, z.k, a.data(), lda, 1, b.data(), z.n, want.data(), ldc, false);
    ASSERT_EQ(c, want) << z.m << " " << z.n << " " << z.k;
  }
}

// Two products in one pass have the bits of two passes, and the sum between them is that of what the first pass leaves.
TEST_P(SimdTest, TwoOuterProducts) {
  std::vector<Size> sizes;
  for (const int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 15, 16, 25, 30, 33, 70}) {
    for (const int64_t n : {1, 7, 16, 33, 64, 100}) {
      for (const int64_t k : {0, 1, 6, 32}) sizes.push_back({m, n, k});
    }
  }
  for (const Size& z : sizes) {
    for (const int64_t other : {int64_t{0}, int64_t{5}, kProductDepth}) {
      SCOPED_TRACE(testing::Message() << z.m << " " << z.n << " " << z.k << " " << other);
      const int64_t ldc = z.n + 3, lda = z.k + 2, columns = z.m + 1, ldb = z.n + 1;
      const std::vector<float> a = random_floats(z.m * lda, 71), b = random_floats(z.k * ldb, 72);
      const std::vector<float> at = random_floats(other * columns, 73), b2 = random_floats(other * z.n, 74);
      const std::vector<float> base = random_floats(z.m * ldc, 75), before = random_floats(z.m * ldc, 76);
      const std::vector<float> weigh = random_floats(z.m * ldc, 77);
      const OuterProduct first = {z.k, z.k > 0 ? a.data() : nullptr, lda, 1, z.k > 0 ? b.data() : nullptr, ldb};
      const OuterProduct second = {other, other > 0 ? at.data() : nullptr, 1, columns, other > 0 ? b2.data() : nullptr, z.n};
      for (const bool with_base : {true, false}) {
        std::vector<float> c = before, want = before;
        const float* const from = with_base ? base.data() : nullptr;
        s.outer_product_onto(z.m, z.n, first.k, first.a, lda, 1, first.b, ldb, want.data(), ldc, from, 0.7f);
        double sum = 0, size = 0;
        for (int64_t i = 0; i < z.m; ++i) {
          for (int64_t j = 0; j < z.n; ++j) {
            const double term = double{want[static_cast<size_t>(i * ldc + j)]} * weigh[static_cast<size_t>(i * ldc + j)];
            sum += term;
            size += std::abs(term);
          }
        }
        s.outer_product(z.m, z.n, second.k, second.a, 1, columns, second.b, z.n, want.data(), ldc, true);
        const float got = s.outer_products(z.m, z.n, first, second, c.data(), ldc, from, 0.7f, weigh.data());
        ASSERT_EQ(c, want);
        ASSERT_NEAR(got, sum, 1e-6 * size);
        c = with_base ? base : before;  // in place, without weights
        for (int64_t i = 0; i < z.m; ++i) std::copy_n(before.begin() + i * ldc + z.n, 3, c.begin() + i * ldc + z.n);
        ASSERT_EQ(s.outer_products(z.m, z.n, first, second, c.data(), ldc, with_base ? c.data() : nullptr, 0.7f, nullptr),
                  0);
        ASSERT_EQ(c, want);
      }
    }
  }
}

// Empty sums of operands that are null, as those of an empty std::vector: c becomes what the sum is added to. Under the
// sanitizers this also shows that no address is made of null. Products of no rows or columns touch nothing, not even c.
TEST_P(SimdTest, ProductsOfNothing) {
  const Size empty[] = {{0, 0, 0}, {0, 0, 5}, {0, 70, 5}, {70, 0, 5}, {0, 70, 0}, {70, 0, 0}};
  std::vector<Size> sizes(std::begin(empty), std::end(empty));
  for (const int64_t m : {1, 2, 3, 24, 70}) {
    for (const int64_t n : {1, 7, 16, 33, 64, 130, 700}) sizes.push_back({m, n, 0});
  }
  for (const Size& z : sizes) {
    const bool none = z.m == 0 || z.n == 0;
    const int64_t ldc = z.n + 2, lda = 3, ldb = z.n + 5;
    const std::vector<float> before = random_floats(none ? 0 : z.m * ldc, 61),
                             base = random_floats(none ? 0 : z.m * ldc, 62);
    const std::vector<float> factor = random_floats(z.m, 63);
    std::vector<float> c;
    const auto expect = [&](const auto& want) {  // of c's element `at`
      for (int64_t at = 0; at < static_cast<int64_t>(c.size()); ++at) {
        const float value = at % ldc < z.n ? want(static_cast<size_t>(at)) : before[static_cast<size_t>(at)];
        ASSERT_EQ(c[static_cast<size_t>(at)], value) << z.m << " " << z.n << " " << z.k << " at " << at;
      }
    };
    const auto zero = [](size_t) { return 0.0f; };
    const auto as_before = [&](size_t at) { return before[at]; };
    const auto scaled_base = [&](size_t at) { return base[at] * 0.7f; };
    for (const bool accumulate : {false, true}) {
      const auto check = [&] { return accumulate ? expect(as_before) : expect(zero); };
      c = before;
      s.dot_product(z.m, z.n, z.k, nullptr, lda, nullptr, ldb, c.data(), ldc, accumulate);
      check();
      c = before;
      s.outer_product(z.m, z.n, z.k, nullptr, lda, 1, nullptr, ldb, c.data(), ldc, accumulate);
      check();
      c = before;
      s.outer_product(z.m, z.n, z.k, nullptr, 1, lda, nullptr, ldb, c.data(), ldc, accumulate);
      check();
      c = before;
      s.outer_product_transposed(z.m, z.n, z.k, nullptr, lda, nullptr, ldb, c.data(), ldc, accumulate);
      check();
    }
    c = before;
    s.dot_product_bf16(z.m, z.n, z.k, nullptr, lda, nullptr, ldb, c.data(), ldc);
    expect(zero);
    c = before;
    s.outer_product_onto(z.m, z.n, z.k, nullptr, lda, 1, nullptr, ldb, c.data(), ldc, base.data(), 0.7f);
    expect(scaled_base);
    c = before;
    s.outer_product_onto(z.m, z.n, z.k, nullptr, lda, 1, nullptr, ldb, c.data(), ldc, nullptr, 0.7f);
    expect(zero);
    c = before;
    s.outer_product_scaled(z.m, z.n, z.k, nullptr, lda, nullptr, ldb, c.data(), ldc, factor.data());
    expect(as_before);
    if (z.m == 0 || z.n == 0) s.transpose(z.m, z.n, nullptr, lda, nullptr, ldb);
  }
}

// What works on many rows does for each what its counterpart for one row does.
TEST_P(SimdTest, RowsAreIndependent) {
  const int64_t rows = 5;
  for (int64_t n : {1, 7, 8, 31, 64, 131}) {
    const std::vector<float> a = random_floats(rows * n, 41), e = random_floats(rows * n, 42),
                             start = random_floats(rows * n, 43);
    const std::vector<float> factor = random_floats(rows, 44);
    std::vector<float> scaled = start, added = start, both = start, dots(static_cast<size_t>(rows)), other_dots = dots;
    s.scale_rows(rows, scaled.data(), a.data(), factor.data(), n);
    s.add_scaled_rows(rows, added.data(), e.data(), factor.data(), n);
    s.dot_and_add_rows(rows, dots.data(), both.data(), a.data(), e.data(), factor.data(), n);
    s.dot_and_add_rows(rows, other_dots.data(), nullptr, a.data(), e.data(), factor.data(), n);
    EXPECT_EQ(added, both);
    EXPECT_EQ(dots, other_dots);
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<float> one(static_cast<size_t>(n));
      const float f = factor[static_cast<size_t>(row)];
      s.scale(one.data(), a.data() + row * n, f, n);
      ASSERT_EQ(0, std::memcmp(one.data(), scaled.data() + row * n, static_cast<size_t>(n) * sizeof(float)));
      std::copy_n(start.begin() + row * n, n, one.begin());
      s.add_scaled(one.data(), e.data() + row * n, f, n);
      ASSERT_EQ(0, std::memcmp(one.data(), added.data() + row * n, static_cast<size_t>(n) * sizeof(float)));
      ASSERT_TRUE(same_bits(dots[static_cast<size_t>(row)], s.dot(a.data() + row * n, e.data() + row * n, n)));
    }
  }
}

// Every (t, s) by its own level; NaN in what is not to be read: λ of dead levels, factors of other rows, behind the
// diagonal.
TEST_P(SimdTest, WeighRows) {
  for (const int64_t c : {16, 32, 64, 256}) {
    int64_t levels = 1;
    while (int64_t{1} << (levels - 1) < c) ++levels;
    const std::vector<float> gates = random_floats(levels * c, 51, 0, 1), write = random_floats(c, 52),
                             products = random_floats(c * c, 53);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, c}, {0, 16}, {c - 16, c}, {5, 11}, {c - 1, c}}) {
      for (const int64_t columns : {int64_t{0}, int64_t{3}, levels}) {
        const int64_t rows = end - begin, stride = columns + 2;
        std::vector<float> lambda = random_floats(rows * stride, 54), from(static_cast<size_t>(rows * c), kNan);
        for (int64_t t = begin; t < end; ++t) {
          for (int64_t s = 0; s <= t; ++s)
            from[static_cast<size_t>((t - begin) * c + s)] = products[static_cast<size_t>(t * c + s)];
          for (int64_t l = 1; l < columns && columns == levels; ++l) {
            if (!(t >> (l - 1) & 1)) lambda[static_cast<size_t>((t - begin) * stride + l)] = kNan;
          }
        }
        std::vector<float> table(static_cast<size_t>(levels * c), kNan), key(static_cast<size_t>(c), kNan),
            to(from.size(), 7);
        const auto level_of = [](int64_t t, int64_t s) { return std::bit_width(static_cast<uint64_t>(t ^ s)); };
        for (int64_t t = begin; t < end; ++t) {
          for (int64_t s = 0; s < t; ++s) {
            for (const int64_t x : {t, s}) {
              const size_t at = static_cast<size_t>(level_of(t, s) * c + x);
              table[at] = gates[at];
            }
          }
        }
        ChunkWeights w;
        w.grain = c;
        w.table = table.data();
        w.write = write.data();
        w.key = key.data();
        w.scale = 0.75f;
        w.lambda = columns > 0 ? lambda.data() : nullptr;
        w.lambda_stride = stride;
        w.columns = columns;
        s.weigh_rows(w, begin, end, from.data(), to.data());
        for (int64_t t = begin; t < end; ++t) {
          for (int64_t x = 0; x < end; ++x) {
            double want = 0;
            if (x <= t) {
              const int64_t l = level_of(t, x);
              want = 0.75 * from[static_cast<size_t>((t - begin) * c + x)] * write[static_cast<size_t>(x)];
              if (l > 0)
                want *= static_cast<double>(table[static_cast<size_t>(l * c + t)]) * table[static_cast<size_t>(l * c + x)];
              if (columns > 0) want *= lambda[static_cast<size_t>((t - begin) * stride + std::min<int64_t>(l, columns - 1))];
            }
            ASSERT_NEAR(to[static_cast<size_t>((t - begin) * c + x)], want, 0x1p-21 * std::fabs(want))
                << c << " " << t << " " << x;
          }
        }
        s.weigh_rows(w, begin, end, from.data(), from.data());  // in place
        for (int64_t t = 0; t < rows; ++t) {
          ASSERT_EQ(0, std::memcmp(from.data() + t * c, to.data() + t * c, static_cast<size_t>(end) * sizeof(float)));
        }
      }
    }
  }
}

// Cutting k where simd.h allows it changes no bit.
TEST_P(SimdTest, ProductsMayBeCut) {
  const int64_t m = 7, n = 21, k = 2 * kDotDepth + 77;
  const std::vector<float> a = random_floats(m * k, 16), b = random_floats(n * k, 17);
  std::vector<float> whole(static_cast<size_t>(m * n)), cut(whole);
  s.dot_product(m, n, k, a.data(), k, b.data(), k, whole.data(), n, false);
  for (int64_t p = 0; p < k; p += kDotDepth) {
    s.dot_product(m, n, std::min(kDotDepth, k - p), a.data() + p, k, b.data() + p, k, cut.data(), n, p > 0);
  }
  EXPECT_EQ(whole, cut);
  s.outer_product(m, n, k, a.data(), k, 1, b.data(), n, whole.data(), n, false);
  for (int64_t p = 0; p < k; p += 100) {
    s.outer_product(m, n, std::min<int64_t>(100, k - p), a.data() + p, k, 1, b.data() + p * n, n, cut.data(), n, p > 0);
  }
  EXPECT_EQ(whole, cut);
}

TEST_P(SimdTest, VectorsMatchDouble) {
  for (int64_t n = 0; n < 150; ++n) {
    const std::vector<float> a = random_floats(n, 10), b = random_floats(n, 11), start = random_floats(n + 1, 12);
    double dot = 0, sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      dot += static_cast<double>(a[static_cast<size_t>(i)]) * b[static_cast<size_t>(i)];
      sum += a[static_cast<size_t>(i)];
    }
    EXPECT_NEAR(s.dot(a.data(), b.data(), n), dot, 4e-6);
    EXPECT_NEAR(s.sum(a.data(), n), sum, 4e-6);
    const auto check = [&](auto run, auto want) {
      std::vector<float> out = start;
      run(out.data());
      EXPECT_TRUE(same_bits(out[static_cast<size_t>(n)], start[static_cast<size_t>(n)]));
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) EXPECT_NEAR(out[i], want(i), 3e-7) << n;
    };
    check([&](float* out) { s.scale(out, a.data(), 0.3f, n); }, [&](size_t i) { return a[i] * 0.3f; });
    check([&](float* out) { s.add_scaled(out, a.data(), 0.3f, n); }, [&](size_t i) { return start[i] + a[i] * 0.3f; });
    check([&](float* out) { s.multiply(out, a.data(), b.data(), n); }, [&](size_t i) { return a[i] * b[i]; });
    check([&](float* out) { s.multiply_add(out, a.data(), b.data(), n); }, [&](size_t i) { return start[i] + a[i] * b[i]; });
    check([&](float* out) { s.scale(out, out, 0.3f, n); }, [&](size_t i) { return start[i] * 0.3f; });
    check([&](float* out) { s.multiply(out, out, b.data(), n); }, [&](size_t i) { return start[i] * b[i]; });
  }
}

// Largest error of f relative to the double result over [lo, hi]; results below the smallest normal number count as 0.
template <class Want>
double worst_error(void (*f)(float*, const float*, int64_t), float lo, float hi, Want want) {
  const int64_t n = 200003;
  std::vector<float> x(static_cast<size_t>(n)), y(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    x[static_cast<size_t>(i)] =
        static_cast<float>(lo + (static_cast<double>(hi) - lo) * static_cast<double>(i) / static_cast<double>(n - 1));
  }
  f(y.data(), x.data(), n);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double w = want(static_cast<double>(x[i]));
    if (std::fabs(w) < 1.2e-38) {
      EXPECT_LT(std::fabs(static_cast<double>(y[i])), 1.3e-38) << x[i];
    } else {
      worst = std::max(worst, std::fabs(y[i] - w) / std::fabs(w));
    }
  }
  return worst;
}

TEST_P(SimdTest, ExponentialsAreAccurate) {
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  const auto silu = [](double x) { return x / (1 + std::exp(-x)); };
  const auto softplus = [](double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); };
  const auto exponential = [](double x) { return std::exp(x); };
  EXPECT_LT(worst_error(s.exp, -87.3f, 0.0f, exponential), 2e-7);
  EXPECT_LT(worst_error(s.exp, -1.0f, 1.0f, exponential), 2e-7);
  EXPECT_LT(worst_error(s.exp, 0.0f, 88.7f, exponential), 2e-7);
  EXPECT_LT(worst_error(s.sigmoid, -86.0f, 86.0f, sigmoid), 4e-7);
  EXPECT_LT(worst_error(s.silu, -80.0f, 86.0f, silu), 4e-7);
  EXPECT_LT(worst_error(s.silu, -1.0f, 1.0f, silu), 4e-7);
  EXPECT_LT(worst_error(s.softplus, -86.0f, 30.0f, softplus), 4e-7);
  EXPECT_LT(worst_error(s.softplus, -2.0f, 2.0f, softplus), 4e-7);
}

TEST_P(SimdTest, ExponentialsOfSpecialValues) {
  const std::vector<float> x = {0.0f,    -0.0f,  -kInf, kInf,  kNan,   -87.4f, -104.0f,
                                -700.0f, -3e38f, 3e38f, 89.0f, 1e-30f, -1e-30f};
  std::vector<float> y(x.size());
  const int64_t n = static_cast<int64_t>(x.size());
  s.exp(y.data(), x.data(), n);
  const std::vector<float> e = {1, 1, 0, kInf, kNan, 0, 0, 0, 0, kInf, kInf, 1, 1};
  for (size_t i = 0; i < e.size(); ++i) EXPECT_TRUE(std::isnan(e[i]) ? std::isnan(y[i]) : y[i] == e[i]) << x[i];
  s.sigmoid(y.data(), x.data(), n);
  const std::vector<float> g = {0.5f, 0.5f, 0, 1, kNan, 0, 0, 0, 0, 1, 1, 0.5f, 0.5f};
  for (size_t i = 0; i < g.size(); ++i) {
    EXPECT_TRUE(std::isnan(g[i]) ? std::isnan(y[i]) : std::fabs(y[i] - g[i]) < 1e-37f) << x[i];
  }
  s.silu(y.data(), x.data(), n);
  const std::vector<float> u = {0, 0, 0, kInf, kNan, 0, 0, 0, 0, 3e38f, 89, 5e-31f, -5e-31f};
  for (size_t i = 0; i < u.size(); ++i) {
    const float error = std::fabs(y[i] - u[i]);
    EXPECT_TRUE(std::isnan(u[i]) ? std::isnan(y[i]) : y[i] == u[i] || error <= 3e-7f * std::fabs(u[i]) || error < 1e-34f)
        << x[i] << " " << y[i];
  }
  s.softplus(y.data(), x.data(), n);
  const float ln2 = 0.69314718f;
  const std::vector<float> p = {ln2, ln2, 0, kInf, kNan, 0, 0, 0, 0, 3e38f, 89, ln2, ln2};
  for (size_t i = 0; i < p.size(); ++i) {
    EXPECT_TRUE(std::isnan(p[i]) ? std::isnan(y[i]) : y[i] == p[i] || std::fabs(y[i] - p[i]) < 1e-7f) << x[i];
  }
}

TEST_P(SimdTest, ExpOfElementDoesNotDependOnItsPlace) {
  const std::vector<float> x = random_floats(77, 13, -20, 3);
  std::vector<float> y(x.size());
  s.exp(y.data(), x.data(), 77);
  for (size_t i = 0; i < x.size(); ++i) {
    float one;
    s.exp(&one, &x[i], 1);
    EXPECT_TRUE(same_bits(one, y[i]));
  }
}

TEST_P(SimdTest, WidensEveryValueOf16Bits) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> out(all.size());
  for (const int32_t dtype : {LLA_BF16, LLA_F16}) {
    s.widen(out.data(), all.data(), dtype, 65536);
    for (size_t i = 0; i < all.size(); ++i) {
      const float want = dtype == LLA_BF16 ? bf16_to_float(all[i]) : f16_to_float(all[i]);
      ASSERT_TRUE(same_bits(out[i], want)) << dtype << " " << i;
    }
    for (int64_t n = 0; n < 40; ++n) {  // ends
      std::vector<float> part(static_cast<size_t>(n) + 1, 7.0f);
      s.widen(part.data(), all.data() + 0x3c01, dtype, n);
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_TRUE(same_bits(part[static_cast<size_t>(i)], out[static_cast<size_t>(0x3c01 + i)]));
      }
      ASSERT_EQ(part[static_cast<size_t>(n)], 7.0f);
    }
  }
}

// Around every 16-bit value: itself, the halfway points beside it and their neighbours, then random bits.
TEST_P(SimdTest, NarrowsToNearestEven) {
  for (const int32_t dtype : {LLA_BF16, LLA_F16}) {
    std::vector<float> in;
    for (uint32_t i = 0; i < 65536; ++i) {
      const uint16_t h = static_cast<uint16_t>(i);
      const uint32_t bits = std::bit_cast<uint32_t>(dtype == LLA_BF16 ? bf16_to_float(h) : f16_to_float(h));
      const uint32_t half = dtype == LLA_BF16 ? 0x8000u : 0x1000u;
      for (const uint32_t offset : {0u, 1u, half - 1, half, half + 1}) in.push_back(std::bit_cast<float>(bits + offset));
    }
    for (uint32_t i = 0; i < 4096; ++i) in.push_back(static_cast<float>(i) * 0x1p-26f);  // f16 subnormals and below
    std::mt19937 engine(14);
    for (int i = 0; i < 200000; ++i) in.push_back(std::bit_cast<float>(static_cast<uint32_t>(engine())));
    std::vector<uint16_t> out(in.size()), sum(in.size()), old(in.size());
    for (uint16_t& x : old) {  // finite
      x = static_cast<uint16_t>(engine());
      if (dtype == LLA_F16)
        x &= 0xbbffu;
      else
        x &= 0xbfffu;
    }
    sum = old;
    const int64_t n = static_cast<int64_t>(in.size());
    s.narrow(out.data(), dtype, in.data(), n);
    s.narrow_add(sum.data(), dtype, in.data(), n);
    for (size_t i = 0; i < in.size(); ++i) {
      const uint16_t want = dtype == LLA_BF16 ? float_to_bf16(in[i]) : float_to_f16(in[i]);
      ASSERT_EQ(out[i], want) << dtype << " " << std::bit_cast<uint32_t>(in[i]);
      const float total = (dtype == LLA_BF16 ? bf16_to_float(old[i]) : f16_to_float(old[i])) + in[i];
      if (std::isnan(total)) continue;  // which NaN a sum gives is up to the CPU
      ASSERT_EQ(sum[i], dtype == LLA_BF16 ? float_to_bf16(total) : float_to_f16(total)) << dtype << " " << in[i];
    }
    for (int64_t count = 0; count < 40; ++count) {
      std::vector<uint16_t> part(static_cast<size_t>(count) + 1, 0x1234), added(part);
      s.narrow(part.data(), dtype, in.data() + 100000, count);
      s.narrow_add(added.data(), dtype, in.data() + 100000, count);
      for (int64_t i = 0; i < count; ++i) ASSERT_EQ(part[static_cast<size_t>(i)], out[static_cast<size_t>(100000 + i)]);
      ASSERT_EQ(part[static_cast<size_t>(count)], 0x1234);
      ASSERT_EQ(added[static_cast<size_t>(count)], 0x1234);
    }
  }
}

TEST_P(SimdTest, FloatsPassThrough) {
  const std::vector<float> x = random_floats(37, 15);
  std::vector<float> out(37, 1.0f);
  s.widen(out.data(), x.data(), LLA_F32, 37);
  EXPECT_EQ(out, x);
  s.narrow_add(out.data(), LLA_F32, x.data(), 37);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(out[i], x[i] + x[i]);
  s.narrow(out.data(), LLA_F32, x.data(), 37);
  EXPECT_EQ(out, x);
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, SimdTest, testing::ValuesIn(instruction_sets()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace lla::cpu
