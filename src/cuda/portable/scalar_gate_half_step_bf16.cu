// SPDX-License-Identifier: Apache-2.0
// The kernels of steps of bf16 rows.
#include "cuda/portable/scalar_gate_half_step.h"

namespace lla::cuda::scalar_gate {

template int32_t launch_half_steps<LLA_BF16>(const Inputs& in, const View& y, void* stream);
template int32_t load_half_steps<LLA_BF16>();

}  // namespace lla::cuda::scalar_gate
