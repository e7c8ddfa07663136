// SPDX-License-Identifier: Apache-2.0
// The CPU backends: for each instruction set one table of kernels, SIMD first, the reference behind it as the last resort.
#include "plugin/backend.h"

#include <initializer_list>

#include "cpu/mixers.h"
#include "cpu/parts.h"

namespace lla {
namespace {

constexpr int64_t kMostKernels = 64;

struct Table {
  Kernel kernels[kMostKernels];
  Backend backend;

  explicit Table(int32_t isa) {
    int64_t filled = 0;
    const auto append = [&](const Kernel* kernel, int64_t count) {
      for (int64_t i = 0; i < count && filled < kMostKernels; ++i) kernels[filled++] = kernel[i];
    };
    for (const auto of : {cpu::scalar_gate_kernels, cpu::delta_rule_kernels, cpu::projection_kernels,
                          cpu::convolution_kernels, cpu::gates_kernels, cpu::norm_kernels, cpu::rows_fill_kernels}) {
      int64_t count = 0;
      const Kernel* kernel = of(isa, &count);
      append(kernel, count);
    }
    append(reference_backend().kernels, reference_backend().kernel_count);
    backend = {"cpu", isa_name(isa), LLA_F32, kernels, filled};
  }
};

// Filled on first use, under the lock that C++ puts around it; nothing to destroy.
template <int32_t kIsa>
const Backend& backend_of() {
  static const Table table(kIsa);
  return table.backend;
}

}  // namespace

const Backend& cpu_backend(int32_t isa) {
  switch (isa == LLA_ISA_DEFAULT ? cpu_isa() : isa) {
    case LLA_ISA_AVX2:
      return backend_of<LLA_ISA_AVX2>();
    case LLA_ISA_AVX512:
      return backend_of<LLA_ISA_AVX512>();
    case LLA_ISA_NEON:
      return backend_of<LLA_ISA_NEON>();
    default:
      return backend_of<LLA_ISA_BASELINE>();
  }
}

}  // namespace lla
