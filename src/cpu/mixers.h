// SPDX-License-Identifier: Apache-2.0
// The kernels of the two mixers, by instruction set, best first. Implemented in scalar_gate*.cpp and delta_rule*.cpp.
#pragma once

#include <cstdint>

#include "plugin/backend.h"

namespace lla::cpu {

// Forward and backward kernels for `isa` (LLA_ISA_BASELINE ... LLA_ISA_NEON); *count receives their number.
const Kernel* scalar_gate_kernels(int isa, int64_t* count);
const Kernel* delta_rule_kernels(int isa, int64_t* count);

}  // namespace lla::cpu
