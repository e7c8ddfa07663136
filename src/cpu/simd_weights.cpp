// SPDX-License-Identifier: Apache-2.0
// Products q.k of a chunk become weights: times decay, λ and write gate, vectors of columns at once.
#include <cstdint>

#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd_weights.cpp"
#include "cpu/simd_highway.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
#include "cpu/simd_functions.h"
namespace lla::cpu::HWY_NAMESPACE {
namespace {

constexpr int kInside = kLanes >= 16  ? 4
                        : kLanes >= 8 ? 3
                        : kLanes >= 4 ? 2
                        : kLanes >= 2 ? 1
                                      : 0;  // levels within a vector

// at[r][s]: the level that parts the rows r and s of a vector.
struct Levels {
  alignas(64) int32_t at[kLanes][kLanes];
  constexpr Levels() : at() {
    for (int r = 0; r < kLanes; ++r) {
      for (int s = 0; s < kLanes; ++s) {
        int length = 0;
        while ((r ^ s) >> length) ++length;
        at[r][s] = length;
      }
    }
  }
};
constexpr Levels kLevels;

}  // namespace

void weigh_rows(const ChunkWeights& w, int64_t begin, int64_t end, const float* from, float* to) {
  const D d;
  const hn::RebindToSigned<D> di;
  const int64_t c = w.grain;
  // Key-side factors at the levels within the vector of row t. The first row sets them, but not every compiler sees that.
  V inside[kInside + 1];
  for (V& factor : inside) factor = hn::Zero(d);
  for (int64_t t = begin; t < end; ++t, from += c, to += c) {
    const int64_t r = t % kLanes, block = t - r;
    const float* lambda = w.lambda ? w.lambda + (t - begin) * w.lambda_stride : nullptr;
    const auto row_factor = [&](int level) {
      const float factor = w.table[level * c + t] * w.scale;
      return lambda ? factor * lambda[level < w.columns ? level : w.columns - 1] : factor;
    };
    if (t == begin || r == 0) {  // older vectors keep their factors while t is in this one
      const V write = hn::LoadU(d, w.write + block);
      inside[0] = write;
      for (int l = 1; l <= kInside; ++l) inside[l] = hn::Mul(hn::LoadU(d, w.table + l * c + block), write);
      for (int l = kInside + 1; block >> (l - 1); ++l) {
        if (!(block >> (l - 1) & 1)) continue;
        const int64_t first = block >> l << l, last = first + (int64_t{1} << (l - 1));
        for (int64_t s = first; s < last; s += kLanes) {
          hn::StoreU(hn::Mul(hn::LoadU(d, w.table + l * c + s), hn::LoadU(d, w.write + s)), d, w.key + s);
        }
      }
    }
    for (int l = kInside + 1; block >> (l - 1); ++l) {
      if (!(block >> (l - 1) & 1)) continue;
      const int64_t first = block >> l << l, last = first + (int64_t{1} << (l - 1));
      const V factor = hn::Set(d, row_factor(l));
      for (int64_t s = first; s < last; s += kLanes) {
        hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, from + s), hn::LoadU(d, w.key + s)), factor), d, to + s);
      }
    }
    const auto level = hn::Load(di, kLevels.at[r]);
    V key = inside[0], factor = hn::Set(d, lambda ? w.scale * lambda[0] : w.scale);
    for (int l = 1; l <= kInside; ++l) {
      if (!(r >> (l - 1) & 1)) continue;
      const auto here = hn::RebindMask(d, hn::Eq(level, hn::Set(di, l)));
      key = hn::IfThenElse(here, inside[l], key);
      factor = hn::IfThenElse(here, hn::Set(d, row_factor(l)), factor);
    }
    const V weight = hn::Mul(hn::Mul(hn::LoadU(d, from + block), key), factor);
    hn::StoreU(hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(r + 1)), weight), d, to + block);
    for (int64_t s = block + kLanes; s < end; s += kLanes) hn::StoreU(hn::Zero(d), d, to + s);
  }
}

}  // namespace lla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
