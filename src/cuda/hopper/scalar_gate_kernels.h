// SPDX-License-Identifier: Apache-2.0
// The scalar gate's kernels for Hopper, for the backend's table.
#pragma once

#include "plugin/backend.h"

namespace lla::cuda::hopper {

bool accepts_scalar_gate_forward(const void* problem);
void measure_scalar_gate_forward(const void* problem, const Limits& limits, Need* need);
int32_t launch_scalar_gate_forward(const void* problem, const Limits& limits, char* scratch, void* stream);
int32_t load_scalar_gate_forward();

bool accepts_scalar_gate_backward(const void* problem);
void measure_scalar_gate_backward(const void* problem, const Limits& limits, Need* need);
int32_t launch_scalar_gate_backward(const void* problem, const Limits& limits, char* scratch, void* stream);
int32_t load_scalar_gate_backward();

}  // namespace lla::cuda::hopper
