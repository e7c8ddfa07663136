// SPDX-License-Identifier: Apache-2.0
// The tables of SIMD operations, one per instruction set, and the choice among them.
#include "cpu/simd.h"

#include "lla/context.h"
#include "plugin/backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd.cpp"
#include "cpu/simd_highway.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
#include "cpu/simd_functions.h"
namespace lla::cpu::HWY_NAMESPACE {
namespace {

#if HWY_TARGET == HWY_AVX2
constexpr int32_t kIsa = LLA_ISA_AVX2;
constexpr const char* kName = "avx2";
#elif HWY_TARGET == HWY_AVX3
constexpr int32_t kIsa = LLA_ISA_AVX512;
constexpr const char* kName = "avx512";
#elif HWY_TARGET == HWY_NEON
constexpr int32_t kIsa = LLA_ISA_NEON;
constexpr const char* kName = "neon";
#else
constexpr int32_t kIsa = LLA_ISA_BASELINE;
constexpr const char* kName = "baseline";
#endif

constexpr Simd kTable = {kIsa,
                         kName,
                         kOuterRows,
                         dot_product,
                         dot_product_bf16,
                         outer_product,
                         outer_product_onto,
                         outer_products,
                         outer_product_transposed,
                         outer_product_scaled,
                         transpose,
                         widen,
                         narrow,
                         narrow_add,
                         dot,
                         sum,
                         scale,
                         add_scaled,
                         scale_rows,
                         add_scaled_rows,
                         dot_and_add_rows,
                         multiply,
                         multiply_add,
                         weigh_gradient,
                         weigh_rows,
                         HWY_NAMESPACE::exp,
                         sigmoid,
                         silu,
                         softplus};

}  // namespace

const Simd* table() { return &kTable; }

}  // namespace lla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lla::cpu {

const Simd& simd(int32_t isa) {
  if (isa == LLA_ISA_DEFAULT) isa = cpu_isa();
#if HWY_TARGETS & HWY_AVX3
  if (isa == LLA_ISA_AVX512) return *N_AVX3::table();
#endif
#if HWY_TARGETS & HWY_AVX2
  if (isa == LLA_ISA_AVX2) return *N_AVX2::table();
#endif
#if HWY_TARGETS & HWY_NEON
  if (isa == LLA_ISA_NEON) return *N_NEON::table();
#endif
#if HWY_TARGETS & HWY_EMU128
  return *N_EMU128::table();
#else
  return *N_SCALAR::table();
#endif
}

}  // namespace lla::cpu
#endif
