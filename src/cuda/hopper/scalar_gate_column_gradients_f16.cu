// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: gradients of sources, fp16.
#include "cuda/hopper/scalar_gate_column_gradients_kernels.h"

namespace lla::cuda::hopper {

template int32_t launch_column_gradients<Half::kF16>(const BackwardParameters& in, int key_dim, void* stream);
template int32_t load_column_gradients<Half::kF16>();

}  // namespace lla::cuda::hopper
