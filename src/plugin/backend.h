// SPDX-License-Identifier: Apache-2.0
// The one interface between the core and a backend: a table of kernels, best first. A kernel is phases of independent tasks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plugin/problem.h"

namespace lla {

enum class Op : int32_t {
  MixerForward,         // const MixerForward*
  MixerBackward,        // const MixerBackward*
  ConvolutionForward,   // const Convolution*
  ConvolutionBackward,  // const Convolution*
  GatesForward,         // const Gates*
  GatesBackward,        // const Gates*
  L2NormForward,        // const L2Norm*
  L2NormBackward,       // const L2Norm*
  GatedNormForward,     // const GatedNorm*
  GatedNormBackward,    // const GatedNorm*
  ProjectionForward,    // const Projection*
  ProjectionBackward,   // const Projection*
  RowsFill,             // const RowsFill*
};

// Memory that a kernel needs; `shared` is one piece for the call, `per_thread` one for each worker. Both 64-byte aligned.
struct Need {
  int64_t shared = 0, per_thread = 0;
};

struct Scratch {
  char* shared = nullptr;
  char* thread = nullptr;  // of the worker that runs the task
};

struct Kernel {
  Op op;
  const char* name;  // "cpu.scalar_gate.forward.avx2"
  // Whether the kernel takes the problem. Looks at shapes and types; views may be empty when a layer is created.
  bool (*accepts)(const void* problem);
  // Memory for any problem of this shape within the limits; never falls when a limit rises. Views are not looked at.
  // Sets need->shared to a negative number if a size overflows.
  void (*measure)(const void* problem, const Limits& limits, Need* need);
  int32_t (*phases)(const void* problem);
  int64_t (*tasks)(const void* problem, int32_t phase);
  // Runs one task. Never fails, allocates, waits or throws. Bits do not depend on threads or on other sequences.
  void (*run)(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
  // Mixers: bytes of the `saved` buffer within the limits (negative: overflow); null: nothing to save.
  int64_t (*saved_bytes)(const void* problem, const Limits& limits);
  // Device backends, instead of phases, tasks and run: puts the work on the stream; `scratch` is Need::shared bytes of
  // device memory. Never allocates, waits, or reads what lies on the device. Returns an lla_status.
  int32_t (*launch)(const void* problem, const Limits& limits, char* scratch, void* stream) = nullptr;
  // Device backends: makes sure that the kernels are on the device, so that the first launch does not load them.
  int32_t (*load)() = nullptr;
};

struct Backend {
  const char* name;       // "cpu"
  const char* isa;        // "avx2"
  int32_t compute_dtype;  // of intermediates between the steps of a cell: LLA_F32, reference: LLA_F64
  const Kernel* kernels;  // best first
  int64_t kernel_count;
};

// First kernel of the backend that takes the problem; null if there is none.
inline const Kernel* find_kernel(const Backend& backend, Op op, const void* problem) {
  for (int64_t i = 0; i < backend.kernel_count; ++i) {
    const Kernel& kernel = backend.kernels[i];
    if (kernel.op == op && kernel.accepts(problem)) return &kernel;
  }
  return nullptr;
}

// The two backends of the core library.
const Backend& reference_backend();
// `isa`: LLA_ISA_..., at most what cpu_isa() returns; LLA_ISA_DEFAULT = the best.
const Backend& cpu_backend(int32_t isa);
// The best instruction set of this CPU.
int32_t cpu_isa();
const char* isa_name(int32_t isa);

}  // namespace lla
