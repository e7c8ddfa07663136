// SPDX-License-Identifier: Apache-2.0
// The two matrix products, register-tiled. What makes up an element is the same in every tile: dot_product sums lanes of k
// in blocks of kDotDepth and adds the lanes up in pairs, outer_product adds one product after the other.
#include <cstdint>

#include "core/contract.h"
#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd_products.cpp"
#include "cpu/simd_highway.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
#include "cpu/simd_functions.h"
namespace lla::cpu::HWY_NAMESPACE {
namespace {

#if defined(__GNUC__) && !defined(__clang__)
#define LLA_ONCE __attribute__((noinline, noclone))  // in the library once, not once for each kind of caller
#else
#define LLA_ONCE __attribute__((noinline))
#endif
#define LLA_UNROLL _Pragma("GCC unroll 16")
// Checks of pointer arithmetic in the unrolled loops would take minutes to compile; address checks stay.
#define LLA_TILE __attribute__((no_sanitize("undefined"))) HWY_INLINE

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON  // 32 registers
constexpr int kDotRows = 6, kOuterVectors = 2;
#else
constexpr int kDotRows = 3, kOuterVectors = 2;
#endif
constexpr int kDotColumns = 4;        // one 128-bit store
constexpr int64_t kDotPanel = 48;     // columns whose rows of b stay in the second-level cache
constexpr int64_t kOuterDepth = 256;  // rows of a packed panel of b
constexpr int64_t kPackDepth = 16;    // below, packing costs more than it saves
constexpr int kWideVectors = 8;       // of a panel for one row of c, or half of one for two
// Rows of b that one row of c takes at once if it has more columns than a panel. AVX-512 asks for b as many rows ahead; with
// narrower vectors that and anything but nearly one address after the other keeps the CPU from seeing what comes (Zen 3: 75
// % instead of 95 % of a read loop's rate).
#if HWY_TARGET == HWY_AVX3
constexpr int64_t kRowDepth = 16;
#else
constexpr int64_t kRowDepth = 2;
#endif
constexpr int64_t kRowColumns = 4 * kWideVectors * kLanes;
constexpr int64_t kOuterColumns = kOuterVectors * kLanes;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// What the sums of a product begin with: rows as far apart as those of c, times a factor; null: zeros.
struct Start {
  const float* rows;
  float factor;
  Start at(int64_t offset) const { return {rows ? rows + offset : nullptr, factor}; }
};

// A product of nothing (k = 0), whose operands may be null, so that not even an address is made of them.
LLA_ONCE void only_start(int64_t m, int64_t n, float* c, int64_t ldc, const Start& start) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) c[i * ldc + j] = start.rows ? start.rows[i * ldc + j] * start.factor : 0.0f;
  }
}

// ---- dot_product ----

using D4 = hn::CappedTag<float, 4>;

// {sum of v0, sum of v1, sum of v2, sum of v3}, each summed over its lanes in the same order.
HWY_INLINE hn::Vec<D4> sums_of_four(V v0, V v1, V v2, V v3) {
  const D d;
  const hn::Repartition<double, D> dd;
  const V a = hn::Add(hn::InterleaveLower(d, v0, v1), hn::InterleaveUpper(d, v0, v1));
  const V b = hn::Add(hn::InterleaveLower(d, v2, v3), hn::InterleaveUpper(d, v2, v3));
  const auto a2 = hn::BitCast(dd, a), b2 = hn::BitCast(dd, b);
  const V c = hn::Add(hn::BitCast(d, hn::InterleaveLower(dd, a2, b2)), hn::BitCast(d, hn::InterleaveUpper(dd, a2, b2)));
#if HWY_TARGET == HWY_AVX3
  const hn::Half<D> dh;
  const D4 d4;
  const auto half = hn::Add(hn::LowerHalf(dh, c), hn::UpperHalf(dh, c));
  return hn::Add(hn::LowerHalf(d4, half), hn::UpperHalf(d4, half));
#elif HWY_TARGET == HWY_AVX2
  const D4 d4;
  return hn::Add(hn::LowerHalf(d4, c), hn::UpperHalf(d4, c));
#else
  return c;
#endif
}

HWY_INLINE V load_vector(const float* p) { return hn::LoadU(D(), p); }
HWY_INLINE V load_vector(const uint16_t* p) { return load_bf16(p); }
HWY_INLINE V load_last(const float* p, int64_t count) { return load_first(p, count); }
HWY_INLINE V load_last(const uint16_t* p, int64_t count) {
  alignas(64) uint16_t lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return load_bf16(lanes);
}

// Rows a[0..Rows) times rows b[0..columns) over `k` <= kDotDepth; columns <= 4. Missing columns repeat the last one. B:
// float, or uint16_t for bf16.
template <int Rows, class B>
LLA_TILE void dot_tile(int64_t columns, int64_t k, const float* a, int64_t lda, const B* b, int64_t ldb, float* c,
                       int64_t ldc, bool accumulate) {
  const D d;
  const D4 d4;
  const B* rows[kDotColumns];
  LLA_UNROLL for (int j = 0; j < kDotColumns; ++j) rows[j] = b + min(j, columns - 1) * ldb;
  V sums[Rows][kDotColumns];
  LLA_UNROLL for (int i = 0; i < Rows; ++i) { LLA_UNROLL for (int j = 0; j < kDotColumns; ++j) sums[i][j] = hn::Zero(d); }
  int64_t p = 0;
  for (; p + kLanes <= k; p += kLanes) {
    V vb[kDotColumns];
    LLA_UNROLL for (int j = 0; j < kDotColumns; ++j) vb[j] = load_vector(rows[j] + p);
    LLA_UNROLL for (int i = 0; i < Rows; ++i) {
      const V va = hn::LoadU(d, a + i * lda + p);
      LLA_UNROLL for (int j = 0; j < kDotColumns; ++j) sums[i][j] = hn::MulAdd(va, vb[j], sums[i][j]);
    }
  }
  if (p < k) {
    V vb[kDotColumns];
    LLA_UNROLL for (int j = 0; j < kDotColumns; ++j) vb[j] = load_last(rows[j] + p, k - p);
    LLA_UNROLL for (int i = 0; i < Rows; ++i) {
      const V va = load_first(a + i * lda + p, k - p);
      LLA_UNROLL for (int j = 0; j < kDotColumns; ++j) sums[i][j] = hn::MulAdd(va, vb[j], sums[i][j]);
    }
  }
  LLA_UNROLL for (int i = 0; i < Rows; ++i) {
    auto total = sums_of_four(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    float* out = c + i * ldc;
    if (columns == kDotColumns) {
      if (accumulate) total = hn::Add(hn::LoadU(d4, out), total);
      hn::StoreU(total, d4, out);
    } else {
      alignas(16) float lanes[4];
      hn::Store(total, d4, lanes);
      for (int64_t j = 0; j < columns; ++j) out[j] = accumulate ? out[j] + lanes[j] : lanes[j];
    }
  }
}

using DotTile = void (*)(int64_t, int64_t, const float*, int64_t, const float*, int64_t, float*, int64_t, bool);

template <int Rows>
void dot_panel(int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
               bool accumulate) {
  for (int64_t j = 0; j < n; j += kDotColumns) {
    dot_tile<Rows>(min(kDotColumns, n - j), k, a, lda, b + j * ldb, ldb, c + j, ldc, accumulate);
  }
}

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr DotTile kDotPanels[kDotRows] = {dot_panel<1>, dot_panel<2>, dot_panel<3>,
                                          dot_panel<4>, dot_panel<5>, dot_panel<6>};
#else
constexpr DotTile kDotPanels[kDotRows] = {dot_panel<1>, dot_panel<2>, dot_panel<3>};
#endif

// Rows of bf16 numbers in b, each from its first to its last: they come from memory, which likes long runs.
template <int Rows>
void dot_bf16(int64_t n, int64_t k, const float* a, int64_t lda, const uint16_t* b, int64_t ldb, float* c, int64_t ldc) {
  for (int64_t j = 0; j < n; j += kDotColumns, b += kDotColumns * ldb) {
    for (int64_t p = 0; p < k; p += kDotDepth) {
      dot_tile<Rows>(min(kDotColumns, n - j), min(kDotDepth, k - p), a + p, lda, b + p, ldb, c + j, ldc, p > 0);
    }
  }
}

// ---- dot_product of many rows: b is transposed once, then one lane of k after the other ----

constexpr int64_t kManyRows = 4 * kOuterRows;  // below, transposing costs more than it saves
constexpr int64_t kLaneSteps = (kDotDepth + kLanes - 1) / kLanes;
// The lanes in the order in which sums_of_four adds them in pairs: number n and n + 1, then those pairs, and so on.
constexpr int lane_of(int n) {
  const int in_four = (n & 1) << 1 | (n >> 1 & 1);  // 0, 2, 1, 3
  if (kLanes <= 8) return (n & 4) | in_four;
  return (n >> 2 & 1) << 3 | (n >> 3 & 1) << 2 | in_four;  // 128-bit blocks: 0, 2, 1, 3
}
constexpr int kLaneLevels = kLanes >= 16 ? 4 : kLanes >= 8 ? 3 : kLanes >= 4 ? 2 : kLanes >= 2 ? 1 : 0;

// out[j*ldo + i] = a[i*lda + j] for i, j < 4.
HWY_INLINE void transpose_4x4(const float* a, int64_t lda, float* out, int64_t ldo) {
  const D4 d4;
  const hn::Repartition<double, D4> dd;
  const auto r0 = hn::LoadU(d4, a), r1 = hn::LoadU(d4, a + lda);
  const auto r2 = hn::LoadU(d4, a + 2 * lda), r3 = hn::LoadU(d4, a + 3 * lda);
  const auto a0 = hn::BitCast(dd, hn::InterleaveLower(d4, r0, r1)), a1 = hn::BitCast(dd, hn::InterleaveUpper(d4, r0, r1));
  const auto b0 = hn::BitCast(dd, hn::InterleaveLower(d4, r2, r3)), b1 = hn::BitCast(dd, hn::InterleaveUpper(d4, r2, r3));
  hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(dd, a0, b0)), d4, out);
  hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(dd, a0, b0)), d4, out + ldo);
  hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(dd, a1, b1)), d4, out + 2 * ldo);
  hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(dd, a1, b1)), d4, out + 3 * ldo);
}

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
// The same for i, j < 8, with vectors of two blocks: that of rows i and that of rows i + 4.
HWY_INLINE void transpose_8x8(const float* a, int64_t lda, float* out, int64_t ldo) {
  using D8 = hn::CappedTag<float, 8>;
  const D8 d8;
  const hn::Repartition<double, D8> dd;
  const D4 d4;
  LLA_UNROLL for (int half = 0; half < 8; half += 4) {  // of the columns
    hn::Vec<D8> r[4];
    LLA_UNROLL for (int i = 0; i < 4; ++i) {
      const float* from = a + i * lda + half;
      r[i] = hn::Combine(d8, hn::LoadU(d4, from + 4 * lda), hn::LoadU(d4, from));
    }
    const auto a0 = hn::BitCast(dd, hn::InterleaveLower(d8, r[0], r[1]));
    const auto a1 = hn::BitCast(dd, hn::InterleaveUpper(d8, r[0], r[1]));
    const auto b0 = hn::BitCast(dd, hn::InterleaveLower(d8, r[2], r[3]));
    const auto b1 = hn::BitCast(dd, hn::InterleaveUpper(d8, r[2], r[3]));
    float* to = out + half * ldo;
    hn::StoreU(hn::BitCast(d8, hn::InterleaveLower(dd, a0, b0)), d8, to);
    hn::StoreU(hn::BitCast(d8, hn::InterleaveUpper(dd, a0, b0)), d8, to + ldo);
    hn::StoreU(hn::BitCast(d8, hn::InterleaveLower(dd, a1, b1)), d8, to + 2 * ldo);
    hn::StoreU(hn::BitCast(d8, hn::InterleaveUpper(dd, a1, b1)), d8, to + 3 * ldo);
  }
}
#endif

// packed[lane][step][column] = b[column][step * kLanes + lane] for kOuterColumns columns and `k` <= kDotDepth.
LLA_TILE void pack_lanes(int64_t k, const float* b, int64_t ldb, float* packed) {
  int64_t p = 0;
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  for (; p + 8 <= k; p += 8) {
    float* to = packed + (p % kLanes * kLaneSteps + p / kLanes) * kOuterColumns;
    for (int64_t j = 0; j < kOuterColumns; j += 8) {
      transpose_8x8(b + j * ldb + p, ldb, to + j, kLaneSteps * kOuterColumns);
    }
  }
#endif
  if (kLanes >= 4) {
    for (; p + 4 <= k; p += 4) {
      float* to = packed + (p % kLanes * kLaneSteps + p / kLanes) * kOuterColumns;
      for (int64_t j = 0; j < kOuterColumns; j += 4) {
        transpose_4x4(b + j * ldb + p, ldb, to + j, kLaneSteps * kOuterColumns);
      }
    }
  }
  for (; p < k; ++p) {
    float* to = packed + (p % kLanes * kLaneSteps + p / kLanes) * kOuterColumns;
    for (int64_t j = 0; j < kOuterColumns; ++j) to[j] = b[j * ldb + p];
  }
}

// Rows of a times kOuterColumns packed rows of b: the same sums as in dot_tile, a vector holding columns instead of lanes.
template <int Rows>
LLA_TILE void lanes_tile(int64_t k, const float* a, int64_t lda, const float* packed, float* c, int64_t ldc,
                         bool accumulate) {
  const D d;
  const int64_t steps = k / kLanes, rest = k % kLanes;
  alignas(64) float pending[kLaneLevels][Rows][kOuterColumns];  // sums of 1, 2, 4, ... lanes that wait for their neighbours
  for (int n = 0; n < kLanes; ++n) {
    const int lane = lane_of(n);
    const float *b = packed + lane * kLaneSteps * kOuterColumns, *from = a + lane;
    V sums[Rows][kOuterVectors];
    LLA_UNROLL for (int i = 0; i < Rows; ++i) {
      LLA_UNROLL for (int j = 0; j < kOuterVectors; ++j) sums[i][j] = hn::Zero(d);
    }
    for (int64_t q = 0; q < steps + (lane < rest); ++q) {
      V vb[kOuterVectors];
      LLA_UNROLL for (int j = 0; j < kOuterVectors; ++j) vb[j] = hn::Load(d, b + q * kOuterColumns + j * kLanes);
      LLA_UNROLL for (int i = 0; i < Rows; ++i) {
        const V va = hn::Set(d, from[i * lda + q * kLanes]);
        LLA_UNROLL for (int j = 0; j < kOuterVectors; ++j) sums[i][j] = hn::MulAdd(va, vb[j], sums[i][j]);
      }
    }
    if (rest > 0 && lane >= rest) {  // as dot_tile adds the product of zeros
      LLA_UNROLL for (int i = 0; i < Rows; ++i) {
        LLA_UNROLL for (int j = 0; j < kOuterVectors; ++j) sums[i][j] = hn::Add(sums[i][j], hn::Zero(d));
      }
    }
    int level = 0;
    for (; n >> level & 1; ++level) {
      LLA_UNROLL for (int i = 0; i < Rows; ++i) {
        LLA_UNROLL for (int j = 0; j < kOuterVectors; ++j) {
          sums[i][j] = hn::Add(hn::Load(d, pending[level][i] + j * kLanes), sums[i][j]);
        }
      }
    }
    LLA_UNROLL for (int i = 0; i < Rows; ++i) {
      LLA_UNROLL for (int j = 0; j < kOuterVectors; ++j) {
        float* out = c + i * ldc + j * kLanes;
        if (n + 1 < kLanes)
          hn::Store(sums[i][j], d, pending[level][i] + j * kLanes);
        else
          hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, out), sums[i][j]) : sums[i][j], d, out);
      }
    }
  }
}

void lanes_rows(int64_t rows, int64_t k, const float* a, int64_t lda, const float* packed, float* c, int64_t ldc,
                bool accumulate) {
  switch (rows) {
#define LLA_CASE(count)                                       \
  case count:                                                 \
    lanes_tile<count>(k, a, lda, packed, c, ldc, accumulate); \
    break;
    LLA_CASE(1)
    LLA_CASE(2)
    LLA_CASE(3)
    LLA_CASE(4)
    LLA_CASE(5)
    LLA_CASE(6)
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
    LLA_CASE(7)
    LLA_CASE(8)
#endif
#undef LLA_CASE
    default:
      break;
  }
}

#if HWY_TARGET == HWY_AVX2
// Short sums of rows of a that lie close together: lanes would take too few steps each, and the tiles of few rows are
// faster, if the rows of b that they take in turn stay in the first-level cache. The bits are the same.
constexpr int64_t kShortDepth = kDotDepth / 2, kCloseRows = 2 * kDotDepth;
constexpr int64_t kShortColumns = 16;

LLA_ONCE void dot_short(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                        int64_t ldc, bool accumulate) {
  const D d;
  alignas(64) float packed[kShortColumns * kShortDepth];
  for (int64_t j = 0; j < n; j += kShortColumns) {
    const int64_t columns = min(kShortColumns, n - j);
    const float* rows = b + j * ldb;
    int64_t stride = ldb;
    if (ldb > k) {
      for (int64_t column = 0; column < columns; ++column) {
        const float* from = rows + column * ldb;
        float* to = packed + column * kShortDepth;
        int64_t p = 0;
        for (; p + kLanes <= k; p += kLanes) hn::Store(hn::LoadU(d, from + p), d, to + p);
        if (p < k) hn::Store(load_first(from + p, k - p), d, to + p);
      }
      rows = packed;
      stride = kShortDepth;
    }
    for (int64_t i = 0; i < m; i += kDotRows) {
      kDotPanels[min(kDotRows, m - i) - 1](columns, k, a + i * lda, lda, rows, stride, c + i * ldc + j, ldc, accumulate);
    }
  }
}
#endif

// ---- outer_product ----

// Rows of c times `Vectors` vectors of columns, the last one with `last` columns (kLanes: whole), over p < k. With `scale`
// row i of the sums is added to c times scale[i].
template <int Rows, int Vectors>
LLA_TILE void outer_tile(int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t ldb,
                         bool b_is_padded, float* c, int64_t ldc, int64_t last, const Start& start, const float* scale) {
  const D d;
  V sums[Rows][Vectors];
  if (!start.rows || scale) {
    LLA_UNROLL for (int i = 0; i < Rows; ++i) { LLA_UNROLL for (int j = 0; j < Vectors; ++j) sums[i][j] = hn::Zero(d); }
  } else {
    const V factor = hn::Set(d, start.factor);
    LLA_UNROLL for (int i = 0; i < Rows; ++i) {
      LLA_UNROLL for (int j = 0; j < Vectors; ++j) {
        const float* from = start.rows + i * ldc + j * kLanes;
        sums[i][j] = hn::Mul(j + 1 < Vectors || last == kLanes ? hn::LoadU(d, from) : load_first(from, last), factor);
      }
    }
  }
  if (last == kLanes || b_is_padded) {
    for (int64_t p = 0; p < k; ++p) {
      V vb[Vectors];
      LLA_UNROLL for (int j = 0; j < Vectors; ++j) vb[j] = hn::LoadU(d, b + p * ldb + j * kLanes);
      LLA_UNROLL for (int i = 0; i < Rows; ++i) {
        const V va = hn::Set(d, a[i * a_row + p * a_col]);
        LLA_UNROLL for (int j = 0; j < Vectors; ++j) sums[i][j] = hn::MulAdd(va, vb[j], sums[i][j]);
      }
    }
  } else {
    for (int64_t p = 0; p < k; ++p) {
      V vb[Vectors];
      LLA_UNROLL for (int j = 0; j < Vectors - 1; ++j) vb[j] = hn::LoadU(d, b + p * ldb + j * kLanes);
      vb[Vectors - 1] = load_first(b + p * ldb + (Vectors - 1) * kLanes, last);
      LLA_UNROLL for (int i = 0; i < Rows; ++i) {
        const V va = hn::Set(d, a[i * a_row + p * a_col]);
        LLA_UNROLL for (int j = 0; j < Vectors; ++j) sums[i][j] = hn::MulAdd(va, vb[j], sums[i][j]);
      }
    }
  }
  if (scale) {
    LLA_UNROLL for (int i = 0; i < Rows; ++i) {
      const V factor = hn::Set(d, scale[i]);
      LLA_UNROLL for (int j = 0; j < Vectors; ++j) {
        const float* from = c + i * ldc + j * kLanes;
        const V old = j + 1 < Vectors || last == kLanes ? hn::LoadU(d, from) : load_first(from, last);
        sums[i][j] = hn::MulAdd(sums[i][j], factor, old);
      }
    }
  }
  LLA_UNROLL for (int i = 0; i < Rows; ++i) {
    LLA_UNROLL for (int j = 0; j < Vectors; ++j) {
      float* to = c + i * ldc + j * kLanes;
      if (j + 1 < Vectors || last == kLanes)
        hn::StoreU(sums[i][j], d, to);
      else
        store_first(sums[i][j], to, last);
    }
  }
}

// All m rows of up to kOuterColumns columns.
template <int Vectors>
void outer_panel(int64_t m, int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t ldb,
                 bool b_is_padded, float* c, int64_t ldc, int64_t last, const Start& start, const float* scale) {
  // Sums of one or two rows wait for each other: the last seven or eight rows are two tiles of three and four.
  constexpr int kHalf = 4;
  const bool halves = kOuterRows == 6 && m > kOuterRows && m % kOuterRows > 0 && m % kOuterRows <= 2;
  const int64_t whole = m / kOuterRows * kOuterRows - (halves ? kOuterRows : 0);
  int64_t i = 0;
  for (; i < whole; i += kOuterRows) {
    outer_tile<kOuterRows, Vectors>(k, a + i * a_row, a_row, a_col, b, ldb, b_is_padded, c + i * ldc, ldc, last,
                                    start.at(i * ldc), scale ? scale + i : nullptr);
  }
  if (halves) {
    outer_tile<kHalf, Vectors>(k, a + i * a_row, a_row, a_col, b, ldb, b_is_padded, c + i * ldc, ldc, last,
                               start.at(i * ldc), scale ? scale + i : nullptr);
    i += kHalf;
  }
  const float *rest = a + i * a_row, *rest_scale = scale ? scale + i : nullptr;
  float* out = c + i * ldc;
  const Start rest_start = start.at(i * ldc);
  switch (m - i) {
#define LLA_CASE(rows)                                                                                             \
  case rows:                                                                                                       \
    outer_tile<rows, Vectors>(k, rest, a_row, a_col, b, ldb, b_is_padded, out, ldc, last, rest_start, rest_scale); \
    break;
    LLA_CASE(1)
    LLA_CASE(2)
    LLA_CASE(3)
    LLA_CASE(4)
    LLA_CASE(5)
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
    LLA_CASE(6)
    LLA_CASE(7)
#endif
#undef LLA_CASE
    default:
      break;
  }
}

}  // namespace

void dot_product(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                 int64_t ldc, bool accumulate) {
  if (m <= 0 || n <= 0) return;
  if (k <= 0) return only_start(m, n, c, ldc, {accumulate ? c : nullptr, 1});
#if HWY_TARGET == HWY_AVX2
  if (m >= kManyRows && k <= kShortDepth && lda <= kCloseRows) {
    dot_short(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
    return;
  }
#endif
  const int64_t whole = m < kManyRows || kLanes < 4 ? 0 : n - n % kOuterColumns;  // columns for lanes_tile
  alignas(64) float packed[kLanes * kLaneSteps * kOuterColumns];
  int64_t p = 0;
  do {
    const int64_t depth = min(kDotDepth, k - p);
    const bool add = accumulate || p > 0;
    for (int64_t j = 0; j < whole; j += kOuterColumns) {
      pack_lanes(depth, b + j * ldb + p, ldb, packed);
      for (int64_t i = 0; i < m; i += kOuterRows) {
        lanes_rows(min(kOuterRows, m - i), depth, a + i * lda + p, lda, packed, c + i * ldc + j, ldc, add);
      }
    }
    for (int64_t j = whole; j < n; j += kDotPanel) {
      const int64_t columns = min(kDotPanel, n - j);
      for (int64_t i = 0; i < m; i += kDotRows) {
        kDotPanels[min(kDotRows, m - i) - 1](columns, depth, a + i * lda + p, lda, b + j * ldb + p, ldb, c + i * ldc + j,
                                             ldc, add);
      }
    }
    p += kDotDepth;
  } while (p < k);
}

void dot_product_bf16(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const uint16_t* b, int64_t ldb, float* c,
                      int64_t ldc) {
  if (n <= 0) return;
  if (k <= 0) return only_start(m, n, c, ldc, {nullptr, 1});
  for (int64_t i = 0; i < m; i += 2) {
    if (i + 2 <= m)
      dot_bf16<2>(n, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc);
    else
      dot_bf16<1>(n, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc);
  }
}

namespace {

void pair_tile(int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t ldb, float* c, int64_t ldc,
               const Start& start, const float* scale) {
  outer_tile<2, kWideVectors / 2>(k, a, a_row, a_col, b, ldb, false, c, ldc, kLanes, start, scale);
}

// packed[p][j] = b[j][p] for p < k and j < columns, zero up to kOuterColumns.
LLA_ONCE void pack_transposed(int64_t columns, int64_t k, const float* b, int64_t ldb, float* packed) {
  transpose(columns, k, b, ldb, packed, kOuterColumns);
  for (int64_t p = 0; p < k && columns < kOuterColumns; ++p) {
    for (int64_t j = columns; j < kOuterColumns; ++j) packed[p * kOuterColumns + j] = 0;
  }
}

// One row of c, Vectors of it.
template <int Vectors>
LLA_TILE void row_tile(int64_t k, const float* a, int64_t a_col, const float* b, int64_t ldb, float* c, bool accumulate) {
  const D d;
  V sums[Vectors];
  LLA_UNROLL for (int j = 0; j < Vectors; ++j) sums[j] = accumulate ? hn::LoadU(d, c + j * kLanes) : hn::Zero(d);
  for (int64_t p = 0; p < k; ++p) {
    const float* row = b + p * ldb;
#if HWY_TARGET == HWY_AVX3
    LLA_UNROLL for (int j = 0; j < Vectors; ++j) __builtin_prefetch(row + kRowDepth * ldb + j * kLanes);
#endif
    const V va = hn::Set(d, a[p * a_col]);
    LLA_UNROLL for (int j = 0; j < Vectors; ++j) sums[j] = hn::MulAdd(va, hn::LoadU(d, row + j * kLanes), sums[j]);
  }
  LLA_UNROLL for (int j = 0; j < Vectors; ++j) hn::StoreU(sums[j], d, c + j * kLanes);
}

// One row of c, whole vectors of it, from b, which comes from memory: all columns of some rows, then the next rows.
LLA_ONCE void row_product(int64_t n, int64_t k, const float* a, int64_t a_col, const float* b, int64_t ldb, float* c,
                          bool accumulate) {
  const int64_t step = n > kWideVectors * kLanes ? kRowDepth : k;
  int64_t p = 0;
  do {
    const int64_t depth = min(step, k - p);
    const bool add = accumulate || p > 0;
    int64_t j = 0;
    const auto take = [&](auto tile, int64_t columns) {
      for (; j + columns <= n; j += columns) tile(depth, a + p * a_col, a_col, b + p * ldb + j, ldb, c + j, add);
    };
    take(row_tile<kWideVectors>, kWideVectors * kLanes);
    take(row_tile<kWideVectors / 2>, kWideVectors / 2 * kLanes);
    take(row_tile<kWideVectors / 4>, kWideVectors / 4 * kLanes);
    take(row_tile<1>, kLanes);
    p += depth;
  } while (p < k);
}

enum class Layout { Plain, Transposed };  // of b: [k][n], [n][k]

LLA_ONCE void outer_any(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b,
                        int64_t ldb, Layout layout, float* c, int64_t ldc, const Start& start, const float* scale) {
  if (m <= 0 || n <= 0) return;
  LLA_CONTRACT(c);
  if (k <= 0) return only_start(m, n, c, ldc, scale ? Start{c, 1} : start);
  const D d;
  const bool transposed = layout == Layout::Transposed;
  // A panel of b is read once for every kOuterRows rows of c; if these are many and its rows lie apart, it is packed first.
  const bool pack = transposed || (m > 4 * kOuterRows && k > kPackDepth && ldb > kOuterColumns);
  alignas(64) float packed[kOuterDepth * kOuterColumns];
  int64_t j = 0;
  // One or two rows: more columns at once, so that several sums are under way. Scaled sums are cut as below.
  const int64_t cut = scale ? kOuterDepth : k, whole = transposed ? 0 : n - n % kLanes;
  for (; m == 1 && j < whole; j += min(kRowColumns, whole - j)) {
    const int64_t columns = min(kRowColumns, whole - j);
    if (!scale) {
      if (start.rows && (start.rows != c || start.factor != 1)) {
        for (int64_t at = j; at < j + columns; at += kLanes) {
          hn::StoreU(hn::Mul(hn::LoadU(d, start.rows + at), hn::Set(d, start.factor)), d, c + at);
        }
      }
      row_product(columns, k, a, a_col, b + j, ldb, c + j, start.rows != nullptr);
      continue;
    }
    alignas(64) float sums[kRowColumns];
    int64_t p = 0;
    do {
      row_product(columns, min(cut, k - p), a + p * a_col, a_col, b + p * ldb + j, ldb, sums, false);
      const V factor = hn::Set(d, *scale);
      for (int64_t at = 0; at < columns; at += kLanes) {
        hn::StoreU(hn::MulAdd(hn::Load(d, sums + at), factor, hn::LoadU(d, c + j + at)), d, c + j + at);
      }
      p += cut;
    } while (p < k);
  }
  const auto start_of = [&](int64_t p) { return p > 0 ? Start{c + j, 1} : start.at(j); };
  for (constexpr int64_t kPair = kWideVectors / 2 * kLanes; m == 2 && j + kPair <= n && !transposed; j += kPair) {
    int64_t p = 0;
    do {
      pair_tile(min(cut, k - p), a + p * a_col, a_row, a_col, b + p * ldb + j, ldb, c + j, ldc, start_of(p), scale);
      p += cut;
    } while (p < k);
  }
  for (; j < n; j += kOuterColumns) {
    const int64_t columns = min(kOuterColumns, n - j);
    const int64_t vectors = (columns + kLanes - 1) / kLanes;
    const int64_t last = columns - (vectors - 1) * kLanes;
    int64_t p = 0;
    do {
      const int64_t depth = min(kOuterDepth, k - p);
      const float* panel = transposed ? b + j * ldb + p : b + p * ldb + j;
      int64_t stride = ldb;
      if (transposed) {
        pack_transposed(columns, depth, panel, ldb, packed);
      } else if (pack) {
        for (int64_t row = 0; row < depth; ++row) {
          for (int64_t v = 0; v < vectors; ++v) {
            const float* from = panel + row * ldb + v * kLanes;
            hn::Store(v + 1 < vectors || last == kLanes ? hn::LoadU(d, from) : load_first(from, last), d,
                      packed + row * kOuterColumns + v * kLanes);
          }
        }
      }
      if (pack) {
        panel = packed;
        stride = kOuterColumns;
      }
      if (vectors == kOuterVectors) {
        outer_panel<kOuterVectors>(m, depth, a + p * a_col, a_row, a_col, panel, stride, pack, c + j, ldc, last, start_of(p),
                                   scale);
      } else {
        outer_panel<1>(m, depth, a + p * a_col, a_row, a_col, panel, stride, pack, c + j, ldc, last, start_of(p), scale);
      }
      p += kOuterDepth;
    } while (p < k);
  }
}

}  // namespace

void outer_product(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b,
                   int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  outer_any(m, n, k, a, a_row, a_col, b, ldb, Layout::Plain, c, ldc, {accumulate ? c : nullptr, 1}, nullptr);
}

void outer_product_onto(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b,
                        int64_t ldb, float* c, int64_t ldc, const float* base, float factor) {
  outer_any(m, n, k, a, a_row, a_col, b, ldb, Layout::Plain, c, ldc, {base, factor}, nullptr);
}

void outer_product_transposed(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                              float* c, int64_t ldc, bool accumulate) {
  outer_any(m, n, k, a, lda, 1, b, ldb, Layout::Transposed, c, ldc, {accumulate ? c : nullptr, 1}, nullptr);
}

// ---- outer_products ----

namespace {

// Whole vectors of columns.
template <int Rows>
LLA_TILE void products_tile(const OuterProduct& first, const OuterProduct& second, int64_t i0, float* c, int64_t ldc,
                            const Start& start, const float* weigh, float* total) {
  const D d;
  V sums[Rows][kOuterVectors];
  const V factor = hn::Set(d, start.factor);
  LLA_UNROLL for (int i = 0; i < Rows; ++i) {
    LLA_UNROLL for (int j = 0; j < kOuterVectors; ++j) {
      sums[i][j] = start.rows ? hn::Mul(hn::LoadU(d, start.rows + (i0 + i) * ldc + j * kLanes), factor) : hn::Zero(d);
    }
  }
  const auto add = [&](const OuterProduct& product) {
    const float *a = product.a + i0 * product.a_row, *b = product.b;
    for (int64_t p = 0; p < product.k; ++p) {
      V vb[kOuterVectors];
      LLA_UNROLL for (int j = 0; j < kOuterVectors; ++j) vb[j] = hn::LoadU(d, b + p * product.ldb + j * kLanes);
      LLA_UNROLL for (int i = 0; i < Rows; ++i) {
        const V va = hn::Set(d, a[i * product.a_row + p * product.a_col]);
        LLA_UNROLL for (int j = 0; j < kOuterVectors; ++j) sums[i][j] = hn::MulAdd(va, vb[j], sums[i][j]);
      }
    }
  };
  if (first.k > 0) add(first);
  if (weigh) {
    LLA_UNROLL for (int j = 0; j < kOuterVectors; ++j) {
      float* to = total + j * kLanes;
      V weighed = hn::Load(d, to);
      LLA_UNROLL for (int i = 0; i < Rows; ++i) {
        weighed = hn::MulAdd(sums[i][j], hn::LoadU(d, weigh + (i0 + i) * ldc + j * kLanes), weighed);
      }
      hn::Store(weighed, d, to);
    }
  }
  if (second.k > 0) add(second);
  LLA_UNROLL for (int i = 0; i < Rows; ++i) {
    LLA_UNROLL for (int j = 0; j < kOuterVectors; ++j) hn::StoreU(sums[i][j], d, c + (i0 + i) * ldc + j * kLanes);
  }
}

// In two passes.
LLA_ONCE float products_apart(int64_t m, int64_t n, const OuterProduct& first, const OuterProduct& second, int64_t i0,
                              int64_t j0, float* c, int64_t ldc, const Start& start, const float* weigh) {
  const auto pass = [&](const OuterProduct& product, const Start& from) {
    const int64_t k = product.k;
    outer_any(m, n, k, k > 0 ? product.a + i0 * product.a_row : nullptr, product.a_row, product.a_col,
              k > 0 ? product.b + j0 : nullptr, product.ldb, Layout::Plain, c, ldc, from, nullptr);
  };
  pass(first, start);
  float sum = 0;
  for (int64_t i = 0; i < m && weigh; ++i) sum += dot(c + i * ldc, weigh + i * ldc, n);
  if (second.k > 0) pass(second, {c, 1});
  return sum;
}

// A panel's rows of b, one after the other.
OuterProduct packed_panel(const OuterProduct& product, int64_t column, float* memory) {
  const D d;
  OuterProduct panel = product;
  if (product.k <= 0) return panel;
  panel.b += column;
  if (!memory) return panel;
  for (int64_t row = 0; row < product.k; ++row) {
    for (int64_t j = 0; j < kOuterColumns; j += kLanes) {
      hn::Store(hn::LoadU(d, panel.b + row * product.ldb + j), d, memory + row * kOuterColumns + j);
    }
  }
  panel.b = memory;
  panel.ldb = kOuterColumns;
  return panel;
}

}  // namespace

float outer_products(int64_t m, int64_t n, const OuterProduct& first, const OuterProduct& second, float* c, int64_t ldc,
                     const float* base, float factor, const float* weigh) {
  if (m <= 0 || n <= 0) return 0;
  constexpr int64_t kHalf = 4;  // the last seven or eight rows of six are two tiles
  alignas(64) float packed[2][kProductDepth * kOuterColumns];
  alignas(64) float total[kOuterColumns] = {};
  const bool pack = m > 4 * kOuterRows;
  const int64_t whole = n - n % kOuterColumns;
  const Start start = {base, factor};
  int64_t i = 0;
  for (int64_t j = 0; j < whole; j += kOuterColumns) {
    const OuterProduct one = packed_panel(first, j, pack ? packed[0] : nullptr);
    const OuterProduct other = packed_panel(second, j, pack ? packed[1] : nullptr);
    const float* weights = weigh ? weigh + j : nullptr;
    for (i = 0; m - i >= kOuterRows && (kOuterRows != 6 || m - i == 6 || m - i > 8); i += kOuterRows) {
      products_tile<kOuterRows>(one, other, i, c + j, ldc, start.at(j), weights, total);
    }
    for (; m - i >= kHalf; i += kHalf) products_tile<kHalf>(one, other, i, c + j, ldc, start.at(j), weights, total);
  }
  float sum = 0;
  for (const float x : total) sum += x;
  const auto rest = [&](int64_t i0, int64_t rows, int64_t j0, int64_t columns) {
    const int64_t at = i0 * ldc + j0;
    return products_apart(rows, columns, first, second, i0, j0, c + at, ldc, start.at(at), weigh ? weigh + at : nullptr);
  };
  if (whole > 0 && i < m) sum += rest(i, m - i, 0, whole);
  if (whole < n) sum += rest(0, m, whole, n - whole);
  return sum;
}

LLA_ONCE void transpose(int64_t rows, int64_t columns, const float* a, int64_t lda, float* out, int64_t ldo) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  constexpr int64_t kStep = 8;
  constexpr auto step = transpose_8x8;
#else
  constexpr int64_t kStep = 4;
  constexpr auto step = transpose_4x4;
#endif
  const int64_t row_end = kLanes >= 4 ? rows / kStep * kStep : 0, column_end = kLanes >= 4 ? columns / kStep * kStep : 0;
  for (int64_t i0 = 0; i0 < row_end; i0 += 16) {  // whole cache lines of either side
    for (int64_t j0 = 0; j0 < column_end; j0 += 16) {
      for (int64_t j = j0; j < min(j0 + 16, column_end); j += kStep) {
        for (int64_t i = i0; i < min(i0 + 16, row_end); i += kStep) step(a + i * lda + j, lda, out + j * ldo + i, ldo);
      }
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < row_end ? column_end : 0; j < columns; ++j) out[j * ldo + i] = a[i * lda + j];
  }
}

void outer_product_scaled(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                          float* c, int64_t ldc, const float* scale) {
  outer_any(m, n, k, a, lda, 1, b, ldb, Layout::Plain, c, ldc, {c, 1}, scale);
}

}  // namespace lla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
