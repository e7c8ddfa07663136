// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: gradients of nodes from their readers, bf16.
#include "cuda/hopper/scalar_gate_node_readers_kernels.h"

namespace lla::cuda::hopper {

template int32_t launch_node_readers<Half::kBf16>(const BackwardParameters& in, int key_dim, void* stream);
template int32_t load_node_readers<Half::kBf16>();

}  // namespace lla::cuda::hopper
