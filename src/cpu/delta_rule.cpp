// SPDX-License-Identifier: Apache-2.0
// The table of the delta rule's kernels, one pair per instruction set.
#include "cpu/delta_rule.h"

#include <initializer_list>

#include "cpu/arithmetic.h"
#include "cpu/mixers.h"
#include "lla/context.h"

namespace lla::cpu {

namespace {

bool is_taken(const View& view) { return view.dtype == LLA_F32 || view.dtype == LLA_BF16 || view.dtype == LLA_F16; }

template <class Problem>
bool accepts_inputs(const Problem& p) {
  return p.shape.mixer == LLA_DELTA_RULE && is_taken(p.q) && is_taken(p.k) && is_taken(p.v) && is_taken(p.gate) &&
         is_taken(p.write) && is_taken(p.lambda) && p.state.node_layout.dtype != LLA_F64 &&
         p.state.tail_layout.dtype != LLA_F64;
}

bool accepts_forward(const void* problem) {
  const auto& p = *static_cast<const MixerForward*>(problem);
  return accepts_inputs(p) && is_taken(p.y);
}

bool accepts_backward(const void* problem) {
  const auto& p = *static_cast<const MixerBackward*>(problem);
  for (const View* view : {&p.dy, &p.dq, &p.dk, &p.dv, &p.dgate, &p.dwrite, &p.dlambda}) {
    if (!is_taken(*view)) return false;
  }
  return accepts_inputs(p) && p.gradient.node_layout.dtype != LLA_F64 && p.gradient.tail_layout.dtype != LLA_F64;
}

void measure_forward(const void* problem, const Limits& limits, Need* need) {
  measure_delta_forward(*static_cast<const MixerForward*>(problem), limits, need);
}
void measure_backward(const void* problem, const Limits& limits, Need* need) {
  measure_delta_backward(*static_cast<const MixerBackward*>(problem), limits, need);
}

int32_t forward_phases(const void*) { return 1; }
int32_t backward_phases(const void* problem) {
  return delta_backward_phases(*static_cast<const MixerBackward*>(problem));
}

int64_t forward_tasks(const void* problem, int32_t) {
  const auto& p = *static_cast<const MixerForward*>(problem);
  return p.batch.count * p.shape.heads;
}
int64_t backward_tasks(const void* problem, int32_t phase) {
  return delta_backward_tasks(*static_cast<const MixerBackward*>(problem), phase);
}

template <int isa>
void run_forward(const void* problem, const Limits& limits, const Scratch& scratch, int32_t, int64_t task) {
  const Arithmetic arithmetic;
  run_delta_forward(simd(isa), *static_cast<const MixerForward*>(problem), limits, scratch, task);
}
template <int isa>
void run_backward(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task) {
  const Arithmetic arithmetic;
  run_delta_backward(simd(isa), *static_cast<const MixerBackward*>(problem), limits, scratch, phase, task);
}

int64_t forward_saved(const void* problem, const Limits& limits) {
  return delta_saved_bytes(static_cast<const MixerForward*>(problem)->shape, limits);
}
int64_t backward_saved(const void* problem, const Limits& limits) {
  return delta_saved_bytes(static_cast<const MixerBackward*>(problem)->shape, limits);
}

template <int isa>
constexpr Kernel forward_kernel(const char* name) {
  return Kernel{Op::MixerForward, name,  accepts_forward,  measure_forward,
                forward_phases,   forward_tasks, run_forward<isa>, forward_saved};
}
template <int isa>
constexpr Kernel backward_kernel(const char* name) {
  return Kernel{Op::MixerBackward, name,  accepts_backward,  measure_backward,
                backward_phases,   backward_tasks, run_backward<isa>, backward_saved};
}

constexpr Kernel kBaseline[] = {forward_kernel<LLA_ISA_BASELINE>("cpu.delta_rule.forward.baseline"),
                                backward_kernel<LLA_ISA_BASELINE>("cpu.delta_rule.backward.baseline")};
constexpr Kernel kAvx2[] = {forward_kernel<LLA_ISA_AVX2>("cpu.delta_rule.forward.avx2"),
                            backward_kernel<LLA_ISA_AVX2>("cpu.delta_rule.backward.avx2")};
constexpr Kernel kAvx512[] = {forward_kernel<LLA_ISA_AVX512>("cpu.delta_rule.forward.avx512"),
                              backward_kernel<LLA_ISA_AVX512>("cpu.delta_rule.backward.avx512")};
constexpr Kernel kNeon[] = {forward_kernel<LLA_ISA_NEON>("cpu.delta_rule.forward.neon"),
                            backward_kernel<LLA_ISA_NEON>("cpu.delta_rule.backward.neon")};

}  // namespace

const Kernel* delta_rule_kernels(int isa, int64_t* count) {
  *count = 2;
  switch (isa) {
    case LLA_ISA_AVX2: return kAvx2;
    case LLA_ISA_AVX512: return kAvx512;
    case LLA_ISA_NEON: return kNeon;
    default: return kBaseline;
  }
}

}  // namespace lla::cpu
