// SPDX-License-Identifier: Apache-2.0
// Operations on vectors of floats: sums in a fixed order, scaled sums, exponential and what is made from it.
#include <cfloat>
#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd_vectors.cpp"
#include "cpu/simd_highway.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
#include "cpu/simd_functions.h"
namespace lla::cpu::HWY_NAMESPACE {
namespace {

// Sum over the lanes: halves on halves.
HWY_INLINE float sum_of_lanes(V v) {
  alignas(64) float lanes[kLanes];
  hn::Store(v, D(), lanes);
  for (int64_t width = kLanes / 2; width >= 1; width /= 2) {
    for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// out[i] = f(a[i]) for vectors, the last one padded with zeros.
template <class F>
HWY_INLINE void map(float* out, const float* a, int64_t n, F f) {
  const D d;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(f(hn::LoadU(d, a + i)), d, out + i);
  if (i < n) store_first(f(load_first(a + i, n - i)), out + i, n - i);
}

template <class F>
HWY_INLINE void map2(float* out, const float* a, const float* b, int64_t n, F f) {
  const D d;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(f(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, out + i);
  if (i < n) store_first(f(load_first(a + i, n - i), load_first(b + i, n - i)), out + i, n - i);
}

static_assert(FLT_EVAL_METHOD == 0 || FLT_EVAL_METHOD == 16,
              "sums of floats must be floats; on 32-bit x86: -msse2 -mfpmath=sse");

// e^x = 2^n e^r, |r| <= ln(2) / 2, e^r = 1 + r + r^2 q(r). Results below the smallest normal number are 0.
HWY_INLINE V exp_of(V x) {
  const D d;
  const hn::RebindToSigned<D> di;
  const V clamped = hn::Min(hn::Max(x, hn::Set(d, -104.0f)), hn::Set(d, 89.0f));
  const V magic = hn::Set(d, 0x1.8p23f);  // rounds to an integer and leaves it in the low bits
  const V shifted = hn::MulAdd(clamped, hn::Set(d, 0x1.715476p+0f), magic);
  const V n = hn::Sub(shifted, magic);
  V r = hn::NegMulAdd(n, hn::Set(d, 0x1.63p-1f), clamped);
  r = hn::NegMulAdd(n, hn::Set(d, -0x1.bd0106p-13f), r);
  V q = hn::Set(d, 0x1.6d117cp-10f);
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.120be2p-7f));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.555518p-5f));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.5554dcp-3f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.5f));
  const V e = hn::Add(hn::MulAdd(hn::Mul(r, r), q, r), hn::Set(d, 1.0f));
  // 2^n in two factors, for n from -150 to 128.
  const auto exponent = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, magic));
  const auto first = hn::ShiftRight<1>(exponent);
  const auto second = hn::Sub(exponent, first);
  const auto bias = hn::Set(di, 127);
  const V scale1 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(first, bias)));
  const V scale2 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(second, bias)));
  V y = hn::Mul(hn::Mul(e, scale1), scale2);
  y = hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -0x1.5d589ep+6f)), y);  // ln(2^-126)
  return hn::IfThenElse(hn::Eq(x, x), y, x);                          // NaN stays
}

HWY_INLINE V sigmoid_of(V x) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exp_of(hn::Neg(x))));
}

HWY_INLINE V silu_of(V x) {
  const D d;
  const V y = hn::Div(x, hn::Add(hn::Set(d, 1.0f), exp_of(hn::Neg(x))));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -104.0f)), y);  // not -inf / inf
}

// max(x, 0) + log(1 + y), y = e^-|x| in [0, 1]; log(1 + y) = 2 atanh(s), s = y / (2 + y), a series in s^2 <= 1/9.
HWY_INLINE V softplus_of(V x) {
  const D d;
  const V y = exp_of(hn::Neg(hn::Abs(x)));
  const V s = hn::Div(y, hn::Add(hn::Set(d, 2.0f), y));
  const V u = hn::Mul(s, s);
  V q = hn::Set(d, 0x1.dba26p-4f);
  q = hn::MulAdd(q, u, hn::Set(d, 0x1.bc8cf8p-4f));
  q = hn::MulAdd(q, u, hn::Set(d, 0x1.24c926p-3f));
  q = hn::MulAdd(q, u, hn::Set(d, 0x1.9998d4p-3f));
  q = hn::MulAdd(q, u, hn::Set(d, 0x1.555556p-2f));
  const V two_s = hn::Add(s, s);
  const V log = hn::MulAdd(hn::Mul(two_s, u), q, two_s);
  const V z = hn::Add(hn::Max(x, hn::Zero(d)), log);
  return hn::IfThenElse(hn::Eq(x, x), z, x);
}

}  // namespace

float dot(const float* a, const float* b, int64_t n) {
  const D d;
  V s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    s0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), s0);
    s1 = hn::MulAdd(hn::LoadU(d, a + i + kLanes), hn::LoadU(d, b + i + kLanes), s1);
    s2 = hn::MulAdd(hn::LoadU(d, a + i + 2 * kLanes), hn::LoadU(d, b + i + 2 * kLanes), s2);
    s3 = hn::MulAdd(hn::LoadU(d, a + i + 3 * kLanes), hn::LoadU(d, b + i + 3 * kLanes), s3);
  }
  for (; i + kLanes <= n; i += kLanes) s0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), s0);
  if (i < n) s1 = hn::MulAdd(load_first(a + i, n - i), load_first(b + i, n - i), s1);
  return sum_of_lanes(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
}

float sum(const float* a, int64_t n) {
  const D d;
  V s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    s0 = hn::Add(hn::LoadU(d, a + i), s0);
    s1 = hn::Add(hn::LoadU(d, a + i + kLanes), s1);
    s2 = hn::Add(hn::LoadU(d, a + i + 2 * kLanes), s2);
    s3 = hn::Add(hn::LoadU(d, a + i + 3 * kLanes), s3);
  }
  for (; i + kLanes <= n; i += kLanes) s0 = hn::Add(hn::LoadU(d, a + i), s0);
  if (i < n) s1 = hn::Add(load_first(a + i, n - i), s1);
  return sum_of_lanes(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
}

void scale(float* out, const float* a, float s, int64_t n) {
  const V vs = hn::Set(D(), s);
  map(out, a, n, [vs](V x) HWY_ATTR { return hn::Mul(x, vs); });
}

void add_scaled(float* out, const float* a, float s, int64_t n) {
  const V vs = hn::Set(D(), s);
  map2(out, a, out, n, [vs](V x, V y) HWY_ATTR { return hn::MulAdd(x, vs, y); });
}

void scale_rows(int64_t rows, float* out, const float* a, const float* scale, int64_t n) {
  for (int64_t row = 0; row < rows; ++row) {
    const V vs = hn::Set(D(), scale[row]);
    map(out + row * n, a + row * n, n, [vs](V x) HWY_ATTR { return hn::Mul(x, vs); });
  }
}

void add_scaled_rows(int64_t rows, float* out, const float* a, const float* scale, int64_t n) {
  for (int64_t row = 0; row < rows; ++row) {
    const V vs = hn::Set(D(), scale[row]);
    map2(out + row * n, a + row * n, out + row * n, n, [vs](V x, V y) HWY_ATTR { return hn::MulAdd(x, vs, y); });
  }
}

void dot_and_add_rows(int64_t rows, float* dots, float* out, const float* q, const float* e, const float* scale, int64_t n) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = e + row * n;
    dots[row] = dot(q + row * n, from, n);
    if (out) add_scaled(out + row * n, from, scale[row], n);
  }
}

void multiply(float* out, const float* a, const float* b, int64_t n) {
  map2(out, a, b, n, [](V x, V y) HWY_ATTR { return hn::Mul(x, y); });
}

void multiply_add(float* out, const float* a, const float* b, int64_t n) {
  const D d;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), hn::LoadU(d, out + i)), d, out + i);
  }
  if (i < n) {
    store_first(hn::MulAdd(load_first(a + i, n - i), load_first(b + i, n - i), load_first(out + i, n - i)), out + i, n - i);
  }
}

float weigh_gradient(float* x, float* p, float* left, const float* products, const float* key, const float* write,
                     float factor, int64_t n) {
  const D d;
  const V f = hn::Set(d, factor);
  V sum = hn::Zero(d);
  const auto step = [&](V vx, V vp, V vk, V vw, V vl, V* out_x, V* out_p, V* out_left) HWY_ATTR {
    const V weight = hn::Mul(vp, vk), product = hn::Mul(vx, weight);
    *out_x = hn::Mul(hn::Mul(hn::Mul(vx, vw), vk), f);
    *out_p = hn::Mul(weight, f);
    *out_left = hn::MulAdd(product, f, vl);
    sum = hn::MulAdd(product, vw, sum);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    V to_x, to_p, to_left;
    step(hn::LoadU(d, x + i), hn::LoadU(d, products + i), hn::LoadU(d, key + i), hn::LoadU(d, write + i),
         hn::LoadU(d, left + i), &to_x, &to_p, &to_left);
    hn::StoreU(to_x, d, x + i);
    hn::StoreU(to_p, d, p + i);
    hn::StoreU(to_left, d, left + i);
  }
  if (i < n) {
    const int64_t rest = n - i;
    V to_x, to_p, to_left;
    step(load_first(x + i, rest), load_first(products + i, rest), load_first(key + i, rest), load_first(write + i, rest),
         load_first(left + i, rest), &to_x, &to_p, &to_left);
    store_first(to_x, x + i, rest);
    store_first(to_p, p + i, rest);
    store_first(to_left, left + i, rest);
  }
  return sum_of_lanes(sum);
}

void exp(float* out, const float* a, int64_t n) {
  map(out, a, n, [](V x) HWY_ATTR { return exp_of(x); });
}

void sigmoid(float* out, const float* a, int64_t n) {
  map(out, a, n, [](V x) HWY_ATTR { return sigmoid_of(x); });
}

void silu(float* out, const float* a, int64_t n) {
  map(out, a, n, [](V x) HWY_ATTR { return silu_of(x); });
}

void softplus(float* out, const float* a, int64_t n) {
  map(out, a, n, [](V x) HWY_ATTR { return softplus_of(x); });
}

}  // namespace lla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
