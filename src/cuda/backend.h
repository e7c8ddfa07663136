// SPDX-License-Identifier: Apache-2.0
// The kernels of the CUDA backend, by family; each family is a table, best kernel first.
#pragma once

#include "plugin/backend.h"

namespace lla::cuda {

struct KernelTable {
  const Kernel* kernels = nullptr;
  int64_t count = 0;
};

KernelTable scalar_gate_kernels();  // portable/scalar_gate_*.cu
KernelTable delta_rule_kernels();   // portable/delta_rule_*.cu
KernelTable part_kernels();         // portable/: convolution, gates, norms, rows_fill
KernelTable projection_kernels();   // portable/projection.cu

// Everything together.
const Backend& backend();

}  // namespace lla::cuda
