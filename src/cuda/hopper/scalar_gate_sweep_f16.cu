// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: the sweeps of fp16 rows.
#include "cuda/hopper/scalar_gate_sweep_kernels.h"

namespace lla::cuda::hopper {

template int32_t launch_sweeps<Half::kF16>(SweepParameters* in, int key_dim, bool segmented, void* stream);
template int32_t load_sweeps<Half::kF16>();

}  // namespace lla::cuda::hopper
