// SPDX-License-Identifier: Apache-2.0
// The scalar gate's entries in the kernel tables, one pair per instruction set.
#include "cpu/arithmetic.h"
#include "cpu/mixers.h"
#include "cpu/scalar_gate.h"
#include "cpu/simd.h"
#include "lla/context.h"

namespace lla::cpu {

namespace {

using namespace scalar_gate;

const MixerForward& forward_of(const void* problem) { return *static_cast<const MixerForward*>(problem); }
const MixerBackward& backward_of(const void* problem) { return *static_cast<const MixerBackward*>(problem); }

bool forward_accepts(const void* problem) { return accepts_forward(forward_of(problem)); }
bool forward_accepts_tiles(const void* problem) { return accepts_tiles(forward_of(problem)); }
template <bool on_tiles>
void forward_measure(const void* problem, const Limits& limits, Need* need) {
  measure_forward(forward_of(problem), limits, on_tiles, need);
}
int32_t forward_phases(const void* problem) { return phases_forward(forward_of(problem)); }
int64_t forward_tasks(const void* problem, int32_t phase) { return tasks_forward(forward_of(problem), phase); }
int64_t forward_saved(const void* problem, const Limits& limits) { return saved_bytes(forward_of(problem).shape, limits); }
template <int isa>
void forward_run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task) {
  const Arithmetic arithmetic;
  run_forward(simd(isa), nullptr, forward_of(problem), limits, scratch, phase, task);
}
void forward_on_tiles(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task) {
  const Arithmetic arithmetic;
  run_forward(simd(LLA_ISA_AVX512), tiles(), forward_of(problem), limits, scratch, phase, task);
}

bool backward_accepts(const void* problem) { return accepts_backward(backward_of(problem)); }
bool backward_accepts_tiles(const void* problem) { return accepts_tiles(backward_of(problem)); }
template <bool on_tiles>
void backward_measure(const void* problem, const Limits& limits, Need* need) {
  measure_backward(backward_of(problem), limits, on_tiles, need);
}
int32_t backward_phases(const void* problem) { return phases_backward(backward_of(problem)); }
int64_t backward_tasks(const void* problem, int32_t phase) { return tasks_backward(backward_of(problem), phase); }
template <int isa>
void backward_run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task) {
  const Arithmetic arithmetic;
  run_backward(simd(isa), nullptr, backward_of(problem), limits, scratch, phase, task);
}
void backward_on_tiles(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task) {
  const Arithmetic arithmetic;
  run_backward(simd(LLA_ISA_AVX512), tiles(), backward_of(problem), limits, scratch, phase, task);
}

struct Names {
  const char *forward, *backward;
};
constexpr Names kBaseline = {"cpu.scalar_gate.forward.baseline", "cpu.scalar_gate.backward.baseline"};
constexpr Names kAvx2 = {"cpu.scalar_gate.forward.avx2", "cpu.scalar_gate.backward.avx2"};
constexpr Names kAvx512 = {"cpu.scalar_gate.forward.avx512", "cpu.scalar_gate.backward.avx512"};
constexpr Names kNeon = {"cpu.scalar_gate.forward.neon", "cpu.scalar_gate.backward.neon"};

template <int isa, const Names& names>
constexpr Kernel kForward = {Op::MixerForward, names.forward, forward_accepts,  forward_measure<false>,
                             forward_phases,   forward_tasks, forward_run<isa>, forward_saved};
template <int isa, const Names& names>
constexpr Kernel kBackward = {Op::MixerBackward, names.backward, backward_accepts,  backward_measure<false>,
                              backward_phases,   backward_tasks, backward_run<isa>, nullptr};
template <int isa, const Names& names>
constexpr Kernel kKernels[2] = {kForward<isa, names>, kBackward<isa, names>};
constexpr Kernel kOnTiles[4] = {{Op::MixerForward, "cpu.scalar_gate.forward.tiles.avx512", forward_accepts_tiles,
                                 forward_measure<true>, forward_phases, forward_tasks, forward_on_tiles, forward_saved},
                                {Op::MixerBackward, "cpu.scalar_gate.backward.tiles.avx512", backward_accepts_tiles,
                                 backward_measure<true>, backward_phases, backward_tasks, backward_on_tiles, nullptr},
                                kForward<LLA_ISA_AVX512, kAvx512>,
                                kBackward<LLA_ISA_AVX512, kAvx512>};

}  // namespace

const Kernel* scalar_gate_kernels(int isa, int64_t* count) {
  if (isa == LLA_ISA_AVX512 && tiles()) {
    *count = 4;
    return kOnTiles;
  }
  *count = 2;
  switch (isa) {
    case LLA_ISA_AVX2:
      return kKernels<LLA_ISA_AVX2, kAvx2>;
    case LLA_ISA_AVX512:
      return kKernels<LLA_ISA_AVX512, kAvx512>;
    case LLA_ISA_NEON:
      return kKernels<LLA_ISA_NEON, kNeon>;
    default:
      return kKernels<LLA_ISA_BASELINE, kBaseline>;
  }
}

}  // namespace lla::cpu
