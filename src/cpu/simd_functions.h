// SPDX-License-Identifier: Apache-2.0
// The functions behind the Simd tables, declared once per Highway target (hence no include guard), and partial vectors.
// To be included after hwy/highway.h, between HWY_BEFORE_NAMESPACE and HWY_AFTER_NAMESPACE.

namespace lla::cpu {
struct ChunkWeights;
struct OuterProduct;
}  // namespace lla::cpu
namespace lla::cpu::HWY_NAMESPACE {

void dot_product(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                 int64_t ldc, bool accumulate);
void dot_product_bf16(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const uint16_t* b, int64_t ldb, float* c,
                      int64_t ldc);
void outer_product(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b,
                   int64_t ldb, float* c, int64_t ldc, bool accumulate);
void outer_product_onto(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b,
                        int64_t ldb, float* c, int64_t ldc, const float* base, float factor);
float outer_products(int64_t m, int64_t n, const OuterProduct& first, const OuterProduct& second, float* c, int64_t ldc,
                     const float* base, float factor, const float* weigh);
void outer_product_transposed(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                              float* c, int64_t ldc, bool accumulate);
void outer_product_scaled(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                          float* c, int64_t ldc, const float* scale);
void transpose(int64_t rows, int64_t columns, const float* a, int64_t lda, float* out, int64_t ldo);
void widen(float* out, const void* in, int32_t dtype, int64_t n);
void narrow(void* out, int32_t dtype, const float* in, int64_t n);
void narrow_add(void* out, int32_t dtype, const float* in, int64_t n);
float dot(const float* a, const float* b, int64_t n);
float sum(const float* a, int64_t n);
void scale(float* out, const float* a, float s, int64_t n);
void add_scaled(float* out, const float* a, float s, int64_t n);
void scale_rows(int64_t rows, float* out, const float* a, const float* scale, int64_t n);
void add_scaled_rows(int64_t rows, float* out, const float* a, const float* scale, int64_t n);
void dot_and_add_rows(int64_t rows, float* dots, float* out, const float* q, const float* e, const float* scale, int64_t n);
void multiply(float* out, const float* a, const float* b, int64_t n);
void multiply_add(float* out, const float* a, const float* b, int64_t n);
float weigh_gradient(float* x, float* p, float* left, const float* products, const float* key, const float* write,
                     float factor, int64_t n);
void weigh_rows(const ChunkWeights& weights, int64_t begin, int64_t end, const float* from, float* to);
void exp(float* out, const float* a, int64_t n);
void sigmoid(float* out, const float* a, int64_t n);
void silu(float* out, const float* a, int64_t n);
void softplus(float* out, const float* a, int64_t n);

namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr int64_t kLanes = static_cast<int64_t>(HWY_LANES(float));
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON  // 32 registers
constexpr int kOuterRows = 8;                         // of a tile of outer_product
#else
constexpr int kOuterRows = 6;
#endif

// The first `count` < kLanes floats at p, zeros behind them. Reads nothing else.
HWY_INLINE V load_first(const float* p, int64_t count) {
  const D d;
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  return hn::MaskedLoad(hn::FirstN(d, static_cast<size_t>(count)), d, p);
#else
  alignas(64) float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return hn::Load(d, lanes);
#endif
}

// kLanes numbers of type bf16 as floats.
HWY_INLINE V load_bf16(const uint16_t* p) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> d16;
  return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, p))));
}

// Stores the first `count` < kLanes floats and writes nothing else.
HWY_INLINE void store_first(V v, float* p, int64_t count) {
  const D d;
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  hn::BlendedStore(v, hn::FirstN(d, static_cast<size_t>(count)), d, p);
#else
  alignas(64) float lanes[kLanes];
  hn::Store(v, d, lanes);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
#endif
}

}  // namespace
}  // namespace lla::cpu::HWY_NAMESPACE
