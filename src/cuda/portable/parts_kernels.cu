// SPDX-License-Identifier: Apache-2.0
// The table of the parts' kernels.
#include "cuda/backend.h"
#include "cuda/portable/parts_kernels.h"

namespace lla::cuda {

KernelTable part_kernels() {
  static constexpr Kernel kKernels[] = {
      part_kernel<ConvolutionForward>(Op::ConvolutionForward, "cuda.convolution.forward.portable"),
      part_kernel<ConvolutionBackward>(Op::ConvolutionBackward, "cuda.convolution.backward.portable"),
      part_kernel<GatesForward>(Op::GatesForward, "cuda.gates.forward.portable"),
      part_kernel<GatesBackward>(Op::GatesBackward, "cuda.gates.backward.portable"),
      part_kernel<L2NormForward>(Op::L2NormForward, "cuda.l2_norm.forward.portable"),
      part_kernel<L2NormBackward>(Op::L2NormBackward, "cuda.l2_norm.backward.portable"),
      part_kernel<GatedNormForward>(Op::GatedNormForward, "cuda.gated_norm.forward.portable"),
      part_kernel<GatedNormBackward>(Op::GatedNormBackward, "cuda.gated_norm.backward.portable"),
      part_kernel<RowsFillAll>(Op::RowsFill, "cuda.rows.fill.portable"),
  };
  return {kKernels, sizeof(kKernels) / sizeof(kKernels[0])};
}

}  // namespace lla::cuda
