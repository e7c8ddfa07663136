// SPDX-License-Identifier: Apache-2.0
// Packing of the operands of tiles, once per Highway target (hence no include guard). To be included after
// cpu/simd_functions.h.

namespace lla::cpu::HWY_NAMESPACE {
namespace {

using DWord = hn::RebindToUnsigned<D>;
using Words = hn::Vec<DWord>;
using DHalf = hn::Rebind<uint16_t, D>;

// The parts of x: its upper half, which bf16 holds, the upper half of the exact rest, and that of the next rest, which has
// no more than 8 of the 24 bits left. Infinity leaves nothing.
HWY_INLINE void take_parts(V x, V parts[kParts]) {
  const D d;
  const DWord words;
  const auto less_upper_half = [&](V v) HWY_ATTR {
    return hn::Sub(v, hn::BitCast(d, hn::And(hn::BitCast(words, v), hn::Set(words, 0xffff0000u))));
  };
  static_assert(kParts == 3);
  parts[0] = x;
  parts[1] = hn::IfThenZeroElse(hn::IsInf(x), less_upper_half(x));
  parts[2] = less_upper_half(parts[1]);
}

// Words of two upper halves, in this order in memory.
HWY_INLINE Words pair_of(V first, V second) {
  const DWord words;
  if constexpr (std::endian::native == std::endian::big)
    return hn::Or(hn::And(hn::BitCast(words, first), hn::Set(words, 0xffff0000u)),
                  hn::ShiftRight<16>(hn::BitCast(words, second)));
  const hn::Repartition<uint16_t, D> halves;
  const Words low = hn::ShiftRight<16>(hn::BitCast(words, first));
  return hn::BitCast(words, hn::OddEven(hn::BitCast(halves, second), hn::BitCast(halves, low)));
}

void split_rows(int64_t m, int64_t n, const float* a, int64_t lda, uint16_t* out, int64_t next, int64_t ldo) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; j += kLanes) {
      V parts[kParts];
      take_parts(hn::LoadU(D(), a + i * lda + j), parts);
      for (int part = 0; part < kParts; ++part) {
        const Words half = hn::ShiftRight<16>(hn::BitCast(DWord(), parts[part]));
        hn::StoreU(hn::TruncateTo(DHalf(), half), DHalf(), out + part * next + i * ldo + j);
      }
    }
  }
}

void pack_pairs(int64_t k, int64_t n, const uint16_t* b, int64_t ldb, uint32_t* out, int64_t block) {
  const DWord words;
  for (int64_t p = 0; p < k; p += 2) {
    for (int64_t j = 0; j < n; j += kLanes) {
      const uint16_t* from = b + p * ldb + j;
      Words first = hn::PromoteTo(words, hn::LoadU(DHalf(), from));
      Words second = hn::PromoteTo(words, hn::LoadU(DHalf(), from + ldb));
      if constexpr (std::endian::native == std::endian::big) std::swap(first, second);
      hn::StoreU(hn::Or(first, hn::ShiftLeft<16>(second)), words, out + j / 16 * block + p * 8 + j % 16);
    }
  }
}

// load(p, j): numbers j ... of row p.
template <class Load>
HWY_INLINE void split_and_pack(int64_t k, int64_t n, uint32_t* out, int64_t next, int64_t block, Load load) {
  for (int64_t p = 0; p < k; p += 2) {
    for (int64_t j = 0; j < n; j += kLanes) {
      V first[kParts], second[kParts];
      take_parts(load(p, j), first);
      take_parts(load(p + 1, j), second);
      uint32_t* to = out + j / 16 * block + p * 8 + j % 16;
      for (int part = 0; part < kParts; ++part) hn::StoreU(pair_of(first[part], second[part]), DWord(), to + part * next);
    }
  }
}

void split_pack_pairs(int64_t k, int64_t n, const float* b, int64_t ldb, uint32_t* out, int64_t next, int64_t block) {
  split_and_pack(k, n, out, next, block, [=](int64_t p, int64_t j) HWY_ATTR { return hn::LoadU(D(), b + p * ldb + j); });
}

void scale_split_pack_pairs(int64_t k, int64_t n, const uint16_t* b, int64_t ldb, const float* scale, uint32_t* out,
                            int64_t next, int64_t block) {
  split_and_pack(k, n, out, next, block,
                 [=](int64_t p, int64_t j) HWY_ATTR { return hn::Mul(load_bf16(b + p * ldb + j), hn::Set(D(), scale[p])); });
}

}  // namespace
}  // namespace lla::cpu::HWY_NAMESPACE
