// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: the nodes of segments of bf16 rows.
#include "cuda/hopper/scalar_gate_segment_nodes_kernels.h"

namespace lla::cuda::hopper {

template int32_t launch_segment_nodes<Half::kBf16>(const SweepParameters& in, int key_dim, void* stream);
template int32_t load_segment_nodes<Half::kBf16>();

}  // namespace lla::cuda::hopper
