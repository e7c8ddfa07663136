// SPDX-License-Identifier: Apache-2.0
// Conversions between float and the stored types, in integer arithmetic: the same bits as plugin/numeric.h on every target.
#include <cstdint>

#include "plugin/numeric.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd_convert.cpp"
#include "cpu/simd_highway.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
#include "cpu/simd_functions.h"
namespace lla::cpu::HWY_NAMESPACE {
namespace {

using DU = hn::RebindToUnsigned<D>;
using VU = hn::Vec<DU>;
using D16 = hn::Rebind<uint16_t, D>;

HWY_INLINE VU set(uint32_t x) { return hn::Set(DU(), x); }

HWY_INLINE VU load16(const uint16_t* p) { return hn::PromoteTo(DU(), hn::LoadU(D16(), p)); }

HWY_INLINE void store16(VU v, uint16_t* p) { hn::StoreU(hn::TruncateTo(D16(), v), D16(), p); }

HWY_INLINE V from_bf16(VU h) { return hn::BitCast(D(), hn::ShiftLeft<16>(h)); }

HWY_INLINE V from_f16(VU h) {
  const D d;
  const DU du;
  const VU sign = hn::ShiftLeft<16>(hn::And(h, set(0x8000u)));
  const VU magnitude = hn::ShiftLeft<13>(hn::And(h, set(0x7fffu)));
  const VU exponent = hn::And(magnitude, set(0x0f800000u));
  const VU normal = hn::Add(magnitude, set(112u << 23));
  const VU special = hn::Add(normal, set(112u << 23));  // infinity and NaN
  // Subnormal: the mantissa behind the exponent of 2^-14, less 2^-14.
  const V small = hn::Sub(hn::BitCast(d, hn::Add(magnitude, set(113u << 23))), hn::BitCast(d, set(113u << 23)));
  VU bits = hn::IfThenElse(hn::Eq(exponent, set(0x0f800000u)), special, normal);
  bits = hn::IfThenElse(hn::Eq(exponent, hn::Zero(du)), hn::BitCast(du, small), bits);
  return hn::BitCast(d, hn::Or(bits, sign));
}

HWY_INLINE VU to_bf16(V x) {
  const VU bits = hn::BitCast(DU(), x);
  const VU high = hn::ShiftRight<16>(bits);
  const VU rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(set(0x7fffu), hn::And(high, set(1)))));
  return hn::IfThenElse(hn::RebindMask(DU(), hn::Eq(x, x)), rounded, hn::Or(high, set(0x0040u)));
}

HWY_INLINE VU to_f16(V x) {
  const D d;
  const DU du;
  const VU bits = hn::BitCast(du, x);
  const VU sign = hn::And(hn::ShiftRight<16>(bits), set(0x8000u));
  const VU magnitude = hn::And(bits, set(0x7fffffffu));
  const V absolute = hn::BitCast(d, magnitude);
  const VU odd = hn::And(hn::ShiftRight<13>(magnitude), set(1));
  VU half = hn::ShiftRight<13>(hn::Sub(hn::Add(magnitude, hn::Add(set(0xfffu), odd)), set(0x38000000u)));
  // Subnormal: adding 1/2 rounds to a multiple of 2^-24.
  const VU half_one = hn::BitCast(du, hn::Set(d, 0.5f));
  const VU small = hn::Sub(hn::BitCast(du, hn::Add(absolute, hn::Set(d, 0.5f))), half_one);
  half = hn::IfThenElse(hn::RebindMask(du, hn::Lt(absolute, hn::BitCast(d, set(0x38800000u)))), small, half);
  half = hn::IfThenElse(hn::RebindMask(du, hn::Ge(absolute, hn::BitCast(d, set(0x477ff000u)))), set(0x7c00u), half);
  half = hn::IfThenElse(hn::RebindMask(du, hn::Eq(x, x)), half, set(0x7e00u));
  return hn::Or(half, sign);
}

template <bool BF16>
void widen16(float* out, const uint16_t* in, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const VU h = load16(in + i);
    hn::StoreU(BF16 ? from_bf16(h) : from_f16(h), D(), out + i);
  }
  if (i < n) {
    alignas(64) uint16_t lanes[kLanes] = {};
    for (int64_t j = i; j < n; ++j) lanes[j - i] = in[j];
    const VU h = load16(lanes);
    store_first(BF16 ? from_bf16(h) : from_f16(h), out + i, n - i);
  }
}

template <bool BF16, bool Add>
void narrow16(uint16_t* out, const float* in, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    V x = hn::LoadU(D(), in + i);
    if (Add) x = hn::Add(BF16 ? from_bf16(load16(out + i)) : from_f16(load16(out + i)), x);
    store16(BF16 ? to_bf16(x) : to_f16(x), out + i);
  }
  if (i < n) {
    alignas(64) uint16_t lanes[kLanes] = {};
    V x = load_first(in + i, n - i);
    if (Add) {
      for (int64_t j = i; j < n; ++j) lanes[j - i] = out[j];
      x = hn::Add(BF16 ? from_bf16(load16(lanes)) : from_f16(load16(lanes)), x);
    }
    store16(BF16 ? to_bf16(x) : to_f16(x), lanes);
    for (int64_t j = i; j < n; ++j) out[j] = lanes[j - i];
  }
}

}  // namespace

void widen(float* out, const void* in, int32_t dtype, int64_t n) {
  switch (dtype) {
    case LLA_BF16: widen16<true>(out, static_cast<const uint16_t*>(in), n); break;
    case LLA_F16: widen16<false>(out, static_cast<const uint16_t*>(in), n); break;
    case LLA_F64:
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<const double*>(in)[i]);
      break;
    default:
      if (n > 0) std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
  }
}

void narrow(void* out, int32_t dtype, const float* in, int64_t n) {
  switch (dtype) {
    case LLA_BF16: narrow16<true, false>(static_cast<uint16_t*>(out), in, n); break;
    case LLA_F16: narrow16<false, false>(static_cast<uint16_t*>(out), in, n); break;
    case LLA_F64:
      for (int64_t i = 0; i < n; ++i) static_cast<double*>(out)[i] = static_cast<double>(in[i]);
      break;
    default:
      if (n > 0) std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
  }
}

void narrow_add(void* out, int32_t dtype, const float* in, int64_t n) {
  switch (dtype) {
    case LLA_BF16: narrow16<true, true>(static_cast<uint16_t*>(out), in, n); break;
    case LLA_F16: narrow16<false, true>(static_cast<uint16_t*>(out), in, n); break;
    case LLA_F64:
      for (int64_t i = 0; i < n; ++i) static_cast<double*>(out)[i] += static_cast<double>(in[i]);
      break;
    default: add_scaled(static_cast<float*>(out), in, 1.0f, n);
  }
}

}  // namespace lla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
