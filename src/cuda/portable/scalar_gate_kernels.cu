// SPDX-License-Identifier: Apache-2.0
// The scalar gate's entries in the backend's table.
#include "cuda/backend.h"
#include "cuda/hopper/scalar_gate_kernels.h"
#include "cuda/portable/scalar_gate.h"

namespace lla::cuda {

namespace {

using namespace scalar_gate;

constexpr int64_t kMostDim = 512, kMostGrain = 4096;

bool is_supported(int32_t dtype) { return dtype == LLA_F32 || dtype == LLA_BF16 || dtype == LLA_F16; }

template <class Problem>
bool accepts_common(const Problem& p) {
  const MixerShape& s = p.shape;
  if (s.mixer != LLA_SCALAR_GATE || s.key_dim < 1 || s.key_dim > kMostDim || s.value_dim < 1 || s.value_dim > kMostDim)
    return false;
  if (s.grain < 1 || s.grain > kMostGrain || (s.grain & (s.grain - 1)) != 0) return false;
  for (const View* view : {&p.q, &p.k, &p.v, &p.gate, &p.write, &p.lambda}) {
    if (!is_supported(view->dtype)) return false;
  }
  return is_supported(p.state.node_layout.dtype) && is_supported(p.state.tail_layout.dtype);
}

bool accepts_forward(const void* problem) {
  const MixerForward& p = *static_cast<const MixerForward*>(problem);
  return accepts_common(p) && is_supported(p.y.dtype);
}

bool accepts_backward(const void* problem) {
  const MixerBackward& p = *static_cast<const MixerBackward*>(problem);
  if (!accepts_common(p)) return false;
  for (const View* view : {&p.dy, &p.dq, &p.dk, &p.dv, &p.dgate, &p.dwrite, &p.dlambda}) {
    if (!is_supported(view->dtype)) return false;
  }
  return is_supported(p.gradient.node_layout.dtype) && is_supported(p.gradient.tail_layout.dtype);
}

constexpr Kernel kKernels[] = {
    {Op::MixerForward, "cuda.scalar_gate.forward.hopper", hopper::accepts_scalar_gate_forward,
     hopper::measure_scalar_gate_forward, nullptr, nullptr, nullptr, nullptr, hopper::launch_scalar_gate_forward,
     hopper::load_scalar_gate_forward},
    {Op::MixerForward, "cuda.scalar_gate.forward.portable", accepts_forward, measure_forward, nullptr, nullptr, nullptr,
     nullptr, launch_forward, load_forward},
    {Op::MixerBackward, "cuda.scalar_gate.backward.hopper", hopper::accepts_scalar_gate_backward,
     hopper::measure_scalar_gate_backward, nullptr, nullptr, nullptr, nullptr, hopper::launch_scalar_gate_backward,
     hopper::load_scalar_gate_backward},
    {Op::MixerBackward, "cuda.scalar_gate.backward.portable", accepts_backward, measure_backward, nullptr, nullptr, nullptr,
     nullptr, launch_backward, load_backward},
};

}  // namespace

KernelTable scalar_gate_kernels() { return {kKernels, sizeof kKernels / sizeof kKernels[0]}; }

}  // namespace lla::cuda
