// SPDX-License-Identifier: Apache-2.0
// The table of the reference backend: the model of correctness, in double precision, and the last resort for every
// operation.
#include "plugin/backend.h"

#include "reference/common.h"
#include "reference/kernels.h"

namespace lla {
namespace reference {
namespace {

bool accepts(const void*) { return true; }
int32_t one_phase(const void*) { return 1; }
int32_t two_phases(const void*) { return 2; }
void needs_nothing(const void*, const Limits&, Need* need) { *need = Need{}; }

template <class Functions>
constexpr Kernel kernel(Op op, const char* name, decltype(Kernel::measure) measure, decltype(Kernel::phases) phases) {
  return {op, name, accepts, measure, phases, Functions::tasks, Functions::run, nullptr};
}

constexpr Kernel kKernels[] = {
    kernel<MixerForwardKernel>(Op::MixerForward, "reference.mixer.forward", MixerForwardKernel::measure, one_phase),
    kernel<MixerBackwardKernel>(Op::MixerBackward, "reference.mixer.backward", MixerBackwardKernel::measure, one_phase),
    kernel<ConvolutionForwardKernel>(Op::ConvolutionForward, "reference.convolution.forward",
                                     ConvolutionForwardKernel::measure, one_phase),
    kernel<ConvolutionBackwardKernel>(Op::ConvolutionBackward, "reference.convolution.backward",
                                      ConvolutionBackwardKernel::measure, one_phase),
    kernel<GatesForwardKernel>(Op::GatesForward, "reference.gates.forward", needs_nothing, one_phase),
    kernel<GatesBackwardKernel>(Op::GatesBackward, "reference.gates.backward", GatesBackwardKernel::measure, one_phase),
    kernel<L2NormForwardKernel>(Op::L2NormForward, "reference.l2_norm.forward", needs_nothing, one_phase),
    kernel<L2NormBackwardKernel>(Op::L2NormBackward, "reference.l2_norm.backward", needs_nothing, one_phase),
    kernel<GatedNormForwardKernel>(Op::GatedNormForward, "reference.gated_norm.forward", GatedNormForwardKernel::measure,
                                   one_phase),
    kernel<GatedNormBackwardKernel>(Op::GatedNormBackward, "reference.gated_norm.backward", GatedNormBackwardKernel::measure,
                                    two_phases),
    kernel<ProjectionForwardKernel>(Op::ProjectionForward, "reference.projection.forward", ProjectionForwardKernel::measure,
                                    one_phase),
    kernel<ProjectionBackwardKernel>(Op::ProjectionBackward, "reference.projection.backward",
                                     ProjectionBackwardKernel::measure, two_phases),
    kernel<RowsFillKernel>(Op::RowsFill, "reference.rows.fill", needs_nothing, one_phase),
};

constexpr Backend kBackend = {"reference", "scalar", LLA_F64, kKernels, sizeof(kKernels) / sizeof(kKernels[0])};

}  // namespace
}  // namespace reference

const Backend& reference_backend() { return reference::kBackend; }

}  // namespace lla
