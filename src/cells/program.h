// SPDX-License-Identifier: Apache-2.0
// Program: the steps of one call on one layer, with all pointers bound, laid out in the caller's workspace.
//
// Workspace = [Program][intermediate rows][shared scratch of the neediest step][threads * scratch of the neediest step].
// The same builder makes the program of a real call and, with empty tensors and the limits as sizes, the measure of it, so
// that a query and a call cannot disagree.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cells/layer.h"
#include "core/batch.h"
#include "plugin/backend.h"

namespace lla {

constexpr int kMaxSteps = 48;

union StepProblem {
  MixerForward mixer_forward;
  MixerBackward mixer_backward;
  Convolution convolution;
  Gates gates;
  L2Norm l2_norm;
  GatedNorm gated_norm;
  Projection projection;
  RowsFill rows_fill;
  StepProblem() {}
};

// No initialisers: a program is placed in the workspace at every call, and only the steps that it has are filled in.
struct Step {
  const Kernel* kernel;
  Op op;
  int32_t first_phase;  // number of the step's first phase in the whole program
  int32_t phases;
  StepProblem problem;
};

struct Program {
  uint64_t magic = 0;
  int32_t steps = 0, phases = 0, threads = 1;
  Limits limits;
  char* shared = nullptr;
  char* thread_scratch = nullptr;
  int64_t thread_bytes = 0;
  Step step[kMaxSteps];
};

// Whether the backend has a kernel for every step of forward and backward.
lla_status check_programs(const Layer& layer, lla_error* error) noexcept;
// Sizes of workspace and saved buffer.
lla_status measure_program(const Layer& layer, const Limits& limits, lla_pass pass, size_t* bytes,
                           lla_error* error) noexcept;
lla_status measure_saved(const Layer& layer, const Limits& limits, size_t* bytes, lla_error* error) noexcept;
// Check every argument against the layer and the batch, then build the program in the workspace. Nothing but the workspace
// is written. `state` and `gradient_state` memory come from the batch.
lla_status prepare_forward(const Layer& layer, const lla_forward_args& arguments, Batch* batch, State* state,
                           Program** program, lla_error* error) noexcept;
lla_status prepare_backward(const Layer& layer, const lla_backward_args& arguments, Batch* batch, State* state,
                            Program** program, lla_error* error) noexcept;
// Check every argument, then compute: through the context's threads, or on the stream of its device.
lla_status run_forward(const Layer& layer, const lla_forward_args& arguments, Batch* batch, State* state,
                       lla_error* error) noexcept;
lla_status run_backward(const Layer& layer, const lla_backward_args& arguments, Batch* batch, State* state,
                        lla_error* error) noexcept;
// Runs all phases through the context's threads.
lla_status run_program(const Context& context, Program* program, lla_error* error) noexcept;
int64_t task_count(const Program& program, int64_t phase) noexcept;
void run_task(Program* program, int64_t phase, int64_t task, int32_t thread) noexcept;
// The kernels that forward or backward consists of: how many, and their names in one go. 0 if there is no such pass.
int64_t step_kernels(const Layer& layer, lla_pass pass, const char* (&names)[kMaxSteps]) noexcept;
int64_t step_count(const Layer& layer, lla_pass pass) noexcept;
// One of the names; null if `index` is out of range.
const char* step_kernel(const Layer& layer, lla_pass pass, int64_t index) noexcept;
int64_t intermediate_bytes_per_row(const Layer& layer) noexcept;

}  // namespace lla
