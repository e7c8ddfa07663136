// SPDX-License-Identifier: Apache-2.0
// Packing of the operands of tiles, once per Highway target (hence no include guard). To be included after
// cpu/simd_functions.h.

namespace lla::cpu::HWY_NAMESPACE {
namespace {

using DWord = hn::RebindToUnsigned<D>;
using Words = hn::Vec<DWord>;
using DHalf = hn::Rebind<uint16_t, D>;

// The upper half of x as bf16, rounded (cut off where that would be infinite), and x less it; what is not finite leaves
// nothing.
HWY_INLINE Words upper_half(V* x) {
  const D d;
  const DWord words;
  const Words upper = hn::Set(words, 0xffff0000u), bits = hn::BitCast(words, *x);
  const V rounded = hn::BitCast(d, hn::And(hn::Add(bits, hn::Set(words, 0x8000u)), upper));
  const auto is_finite = hn::Le(hn::Abs(rounded), hn::Set(d, 3.4028235e38f));
  const V high = hn::IfThenElse(is_finite, rounded, hn::BitCast(d, hn::And(bits, upper)));
  const V rest = hn::Sub(*x, high);
  *x = hn::IfThenElseZero(hn::Eq(rest, rest), rest);
  return hn::BitCast(words, high);
}

void split_rows(int64_t m, int64_t n, const float* a, int64_t lda, uint16_t* out, int64_t next, int64_t ldo) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; j += kLanes) {
      V x = hn::LoadU(D(), a + i * lda + j);
      for (int part = 0; part < kParts; ++part) {
        const Words half = hn::ShiftRight<16>(upper_half(&x));
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
      const Words first = hn::PromoteTo(words, hn::LoadU(DHalf(), from));
      const Words second = hn::PromoteTo(words, hn::LoadU(DHalf(), from + ldb));
      hn::StoreU(hn::Or(first, hn::ShiftLeft<16>(second)), words, out + j / 16 * block + p * 8 + j % 16);
    }
  }
}

void split_pack_pairs(int64_t k, int64_t n, const float* b, int64_t ldb, uint32_t* out, int64_t next, int64_t block) {
  for (int64_t p = 0; p < k; p += 2) {
    for (int64_t j = 0; j < n; j += kLanes) {
      const float* from = b + p * ldb + j;
      V first = hn::LoadU(D(), from), second = hn::LoadU(D(), from + ldb);
      uint32_t* to = out + j / 16 * block + p * 8 + j % 16;
      for (int part = 0; part < kParts; ++part) {
        const Words low = hn::ShiftRight<16>(upper_half(&first)), high = upper_half(&second);
        hn::StoreU(hn::Or(low, high), DWord(), to + part * next);
      }
    }
  }
}

}  // namespace
}  // namespace lla::cpu::HWY_NAMESPACE
