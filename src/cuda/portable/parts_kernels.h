// SPDX-License-Identifier: Apache-2.0
// The kernels of the parts, and what they share: functions of one number, types, and the scratch layout.
#pragma once

#include "core/checked.h"
#include "cuda/common/element.h"
#include "plugin/backend.h"

namespace lla::cuda {

#define LLA_CUDA_PART(name)                                                                        \
  struct name {                                                                                    \
    static bool accepts(const void* problem);                                                      \
    static void measure(const void* problem, const Limits& limits, Need* need);                    \
    static int32_t launch(const void* problem, const Limits& limits, char* scratch, void* stream); \
    static int32_t load();                                                                         \
  }
LLA_CUDA_PART(ConvolutionForward);
LLA_CUDA_PART(ConvolutionBackward);
LLA_CUDA_PART(GatesForward);
LLA_CUDA_PART(GatesBackward);
LLA_CUDA_PART(L2NormForward);
LLA_CUDA_PART(L2NormBackward);
LLA_CUDA_PART(GatedNormForward);
LLA_CUDA_PART(GatedNormBackward);
LLA_CUDA_PART(ProjectionForward);
LLA_CUDA_PART(ProjectionBackward);
LLA_CUDA_PART(RowsFillAll);
#undef LLA_CUDA_PART

template <class Part>
constexpr Kernel part_kernel(Op op, const char* name) {
  return {op, name, Part::accepts, Part::measure, nullptr, nullptr, nullptr, nullptr, Part::launch, Part::load};
}

// Types that the kernels take.
template <class... Operands>
bool narrow_types(const Operands&... operands) {
  return ((operands.dtype != LLA_F64) && ...);
}

constexpr int64_t kMostColumns = int64_t{1} << 30;  // of a row: columns are counted in int

// Hands out 64-byte aligned arrays of floats; without memory it only counts, so that measure and launch share one function.
class FloatCarver {
 public:
  explicit FloatCarver(char* memory = nullptr) : memory_(memory) {}
  float* take(Size count) {
    char* here = memory_ ? memory_ + used_.value() : nullptr;
    used_ += (count * Size(static_cast<int64_t>(sizeof(float)))).aligned(kAlignment);
    return reinterpret_cast<float*>(here);
  }
  Need need() const {
    Need need;
    need.shared = used_.valid() ? used_.value() : -1;
    return need;
  }

 private:
  char* memory_;
  Size used_;
};

inline void needs_nothing(const void*, const Limits&, Need* need) { *need = Need{}; }

// The first failure of several calls.
template <class... Calls>
int32_t first_failure(Calls... calls) {
  int32_t status = LLA_OK;
  (void)((status = calls(), status == LLA_OK) && ...);
  return status;
}

__device__ __forceinline__ float sigmoid(float x) {
  const float e = expf(-fabsf(x)), r = 1 / (1 + e);
  return x >= 0 ? r : e * r;
}
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float silu_slope(float x) {
  const float s = sigmoid(x);
  return s * (1 + x * (1 - s));
}
__device__ __forceinline__ float softplus(float x) { return x > 0 ? x + log1pf(expf(-x)) : log1pf(expf(x)); }

}  // namespace lla::cuda
