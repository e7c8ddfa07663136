// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: gradients of rows, bf16.
#include "cuda/hopper/scalar_gate_row_gradients_kernels.h"

namespace lla::cuda::hopper {

template int32_t launch_row_gradients<Half::kBf16>(const BackwardParameters& in, int key_dim, void* stream);
template int32_t load_row_gradients<Half::kBf16>();

}  // namespace lla::cuda::hopper
