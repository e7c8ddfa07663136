// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: nodes of blocks, bf16.
#include "cuda/hopper/scalar_gate_block_nodes_kernels.h"

namespace lla::cuda::hopper {

template int32_t launch_block_nodes<Half::kBf16>(const BackwardParameters& in, int key_dim, void* stream);
template int32_t load_block_nodes<Half::kBf16>();

}  // namespace lla::cuda::hopper
