// SPDX-License-Identifier: Apache-2.0
// Programs: measured from the description, checked and built for a call, asked about, and run.
#include "cells/program.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "cells/cell.h"
#include "core/error.h"

namespace lla {
namespace {

constexpr uint64_t kProgramMagic = 0x6d6172676f72'70ull;

long long ll(int64_t x) { return static_cast<long long>(x); }

void add_steps(Builder& b, lla_pass pass, const CallTensors& call) {
  const bool forward = pass == LLA_PASS_FORWARD;
  switch (b.d.kind) {
    case LLA_LAYER_CELL:
      forward ? add_cell_forward(b, call) : add_cell_backward(b, call);
      break;
    case LLA_LAYER_MAMBA2:
      forward ? add_mamba2_forward(b, call) : add_mamba2_backward(b, call);
      break;
    case LLA_LAYER_GATED_DELTANET:
      forward ? add_gated_deltanet_forward(b, call) : add_gated_deltanet_backward(b, call);
      break;
    default:
      forward ? add_part_forward(b, call) : add_part_backward(b, call);
  }
  // Rows of no sequence: zero in every output, and in every gradient that does not accumulate.
  const LayerRules& rules = b.layer.rules;
  for (int i = 0; i < rules.io_count; ++i) {
    const IoRule& rule = rules.io[i];
    if (rule.output != forward) continue;
    const View& view = forward ? call.values.view(rule.role) : call.gradients.view(rule.role);
    if (!b.wants(view)) continue;
    if (rule.rank == 2)
      b.fill(view, rule.dims[0], rule.dims[1]);
    else
      b.fill(view, 1, rule.dims[0]);
  }
}

constexpr CallTensors kNoTensors;

lla_status measure(Builder& b, lla_pass pass, lla_error* error) {
  add_steps(b, pass, kNoTensors);
  return b.finish(error);
}

constexpr Limits kSmallest{1, 1, 1, 1, 0};

bool same_shape(const MixerShape& a, const MixerShape& b) {
  return a.mixer == b.mixer && a.head_map == b.head_map && a.heads == b.heads && a.groups == b.groups &&
         a.key_dim == b.key_dim && a.value_dim == b.value_dim && a.grain == b.grain && a.levels == b.levels &&
         a.absorb == b.absorb && a.scale == b.scale;
}

bool same_history(const LayerHistory& a, const LayerHistory& b) {
  return a.has_mixer == b.has_mixer && (!a.has_mixer || same_shape(a.shape, b.shape)) && a.has_write == b.has_write &&
         a.conv_channels == b.conv_channels && a.conv_width == b.conv_width && a.grain == b.grain &&
         a.inner_dtype == b.inner_dtype;
}

lla_status check_member(const Layer& layer, const State* state, int64_t layer_index, const char* name, lla_error* error) {
  if (!state) return LLA_OK;
  if (state->context() != layer.context) return fail(error, LLA_WRONG_CONTEXT, "%s belongs to another context", name);
  if (layer_index < 0 || layer_index >= state->plan().layers) {
    return fail(error, LLA_INVALID_ARGUMENT, "layer_index must be 0 ... %lld, is %lld", ll(state->plan().layers - 1),
                ll(layer_index));
  }
  if (layer.stateful && !same_history(state->history(layer_index), layer.history)) {
    return fail(error, LLA_STATE_INCOMPATIBLE, "%s was made for another layer at layer_index %lld", name, ll(layer_index));
  }
  return LLA_OK;
}

// What forward and backward calls share, up to the tensors. `measured` receives the sizes.
template <class Arguments>
lla_status check_call(const Layer& layer, const Arguments& arguments, const Batch& batch, const State* state, lla_pass pass,
                      Builder* measured, lla_error* error) {
  if (batch.context != layer.context) return fail(error, LLA_WRONG_CONTEXT, "batch belongs to another context");
  LLA_TRY(check_batch(batch, state, error));
  LLA_TRY(check_member(layer, state, arguments.layer_index, "state", error));
  const State* gradients = pass == LLA_PASS_BACKWARD ? batch.gradient_state : nullptr;
  LLA_TRY(check_member(layer, gradients, arguments.layer_index, "gradient_state", error));
  if (!state && !gradients && arguments.layer_index != 0) {
    return fail(error, LLA_INVALID_ARGUMENT, "layer_index must be 0 without a state, is %lld", ll(arguments.layer_index));
  }

  LLA_TRY(measure(*measured, pass, error));
  if (!arguments.workspace) return fail(error, LLA_NULL_POINTER, "workspace is NULL");
  if (reinterpret_cast<uintptr_t>(arguments.workspace) % kAlignment != 0) {
    return fail(error, LLA_MISALIGNED, "workspace must be aligned to %lld bytes", ll(kAlignment));
  }
  if (!reaches_memory(*layer.context, arguments.workspace)) {
    return fail(error, LLA_INVALID_ARGUMENT, "workspace is not memory of the device");
  }
  if (arguments.workspace_bytes < static_cast<size_t>(measured->bytes())) {
    return fail(error, LLA_BUFFER_TOO_SMALL, "workspace_bytes must be at least %lld, is %zu", ll(measured->bytes()),
                arguments.workspace_bytes);
  }
  if (!arguments.saved) {
    if (arguments.saved_bytes == 0) return LLA_OK;
    return fail(error, LLA_INVALID_ARGUMENT, "saved_bytes must be 0 without saved, is %zu", arguments.saved_bytes);
  }
  if (reinterpret_cast<uintptr_t>(arguments.saved) % kAlignment != 0) {
    return fail(error, LLA_MISALIGNED, "saved must be aligned to %lld bytes", ll(kAlignment));
  }
  if (!reaches_memory(*layer.context, arguments.saved)) {
    return fail(error, LLA_INVALID_ARGUMENT, "saved is not memory of the device");
  }
  size_t saved = 0;
  LLA_TRY(measure_saved(layer, batch.limits, &saved, error));
  if (arguments.saved_bytes < saved) {
    return fail(error, LLA_BUFFER_TOO_SMALL, "saved_bytes must be at least %zu, is %zu", saved, arguments.saved_bytes);
  }
  return LLA_OK;
}

lla_status check_forward(const Layer& layer, const lla_forward_args& arguments, const Batch& batch, const State* state,
                         Builder* measured, CallTensors* call, lla_error* error) {
  LLA_TRY(check_call(layer, arguments, batch, state, LLA_PASS_FORWARD, measured, error));
  const SlotMemory* memory = state && layer.stateful ? &state->memory(arguments.layer_index) : nullptr;
  return bind_forward(layer, batch, memory, arguments, call, error);
}

// `saved`: measures what forward left, if it left anything.
lla_status check_backward(const Layer& layer, const lla_backward_args& arguments, const Batch& batch, const State* state,
                          Builder* measured, Builder* saved, CallTensors* call, lla_error* error) {
  LLA_TRY(check_call(layer, arguments, batch, state, LLA_PASS_BACKWARD, measured, error));
  const SlotMemory* memory = state && layer.stateful ? &state->memory(arguments.layer_index) : nullptr;
  LLA_TRY(bind_backward(layer, batch, memory, arguments, call, error));
  return arguments.saved ? measure(*saved, LLA_PASS_FORWARD, error) : LLA_OK;
}

// Tells a forward program, or a backward one, where the saved buffer is.
void use_saved_out(Builder* b, const Builder& measured, const lla_forward_args& arguments) {
  b->saved_out = measured.saved_bytes() > 0 ? arguments.saved : nullptr;
  b->mixer_saves = measured.mixer_saved_bytes() > 0;
}
void use_saved_in(Builder* b, const Builder& forward, const lla_backward_args& arguments) {
  b->saved_in = arguments.saved && forward.saved_bytes() > 0 ? arguments.saved : nullptr;
  b->mixer_saves = forward.mixer_saved_bytes() > 0;
}

lla_status build(Builder& b, const Builder& measured, lla_pass pass, const CallTensors& call, size_t workspace_bytes,
                 lla_error* error) {
  b.reserve(measured);
  add_steps(b, pass, call);
  LLA_TRY(b.finish(error));
  if (static_cast<size_t>(b.bytes()) > workspace_bytes) {
    return fail(error, LLA_INTERNAL, "workspace: the call needs %lld bytes, the query said %lld", ll(b.bytes()),
                ll(measured.bytes()));
  }
  return LLA_OK;
}

Program* place_program(void* workspace) {
  Program* program = ::new (workspace) Program;
  program->magic = kProgramMagic;
  return program;
}

const Step* step_of(const Program& program, int64_t phase) {
  if (phase < 0 || phase >= program.phases) return nullptr;
  for (int32_t i = 0; i < program.steps; ++i) {
    const Step& step = program.step[i];
    if (phase < step.first_phase + step.phases) return &step;
  }
  return nullptr;
}

struct PhaseRun {
  Program* program;
  int64_t phase, tasks;
  std::atomic<int64_t> done{0};
};

void run_of_phase(int64_t task, int32_t thread, void* argument) {
  PhaseRun& run = *static_cast<PhaseRun*>(argument);
  const Program& program = *run.program;
  if (thread < 0 || thread >= program.threads || task < 0 || task >= run.tasks) return;
  run_task(run.program, run.phase, task, thread);
  run.done.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

lla_status check_programs(const Layer& layer, lla_error* error) noexcept {
  for (const lla_pass pass : {LLA_PASS_FORWARD, LLA_PASS_BACKWARD}) {
    Builder b(layer, kSmallest);
    LLA_TRY(measure(b, pass, error));
  }
  return LLA_OK;
}

lla_status measure_program(const Layer& layer, const Limits& limits, lla_pass pass, size_t* bytes,
                           lla_error* error) noexcept {
  if (pass != LLA_PASS_FORWARD && pass != LLA_PASS_BACKWARD) {
    return fail(error, LLA_INVALID_ARGUMENT, "pass must be LLA_PASS_FORWARD or LLA_PASS_BACKWARD, is %d", pass);
  }
  Builder b(layer, limits);
  LLA_TRY(measure(b, pass, error));
  *bytes = static_cast<size_t>(b.bytes());
  return LLA_OK;
}

lla_status measure_saved(const Layer& layer, const Limits& limits, size_t* bytes, lla_error* error) noexcept {
  Builder b(layer, limits);
  LLA_TRY(measure(b, LLA_PASS_FORWARD, error));
  *bytes = static_cast<size_t>(b.saved_bytes());
  return LLA_OK;
}

lla_status prepare_forward(const Layer& layer, const lla_forward_args& arguments, Batch* batch, State* state,
                           Program** program, lla_error* error) noexcept {
  Builder measured(layer, batch->limits);
  CallTensors call;
  LLA_TRY(check_forward(layer, arguments, *batch, state, &measured, &call, error));
  Program* placed = place_program(arguments.workspace);
  Builder b(layer, *batch, arguments.layer_index, placed);
  use_saved_out(&b, measured, arguments);
  LLA_TRY(build(b, measured, LLA_PASS_FORWARD, call, arguments.workspace_bytes, error));
  *program = placed;
  return LLA_OK;
}

lla_status prepare_backward(const Layer& layer, const lla_backward_args& arguments, Batch* batch, State* state,
                            Program** program, lla_error* error) noexcept {
  Builder measured(layer, batch->limits), forward(layer, batch->limits);
  CallTensors call;
  LLA_TRY(check_backward(layer, arguments, *batch, state, &measured, &forward, &call, error));
  Program* placed = place_program(arguments.workspace);
  Builder b(layer, *batch, arguments.layer_index, placed);
  use_saved_in(&b, forward, arguments);
  LLA_TRY(build(b, measured, LLA_PASS_BACKWARD, call, arguments.workspace_bytes, error));
  *program = placed;
  return LLA_OK;
}

lla_status run_forward(const Layer& layer, const lla_forward_args& arguments, Batch* batch, State* state,
                       lla_error* error) noexcept {
  if (!layer.context->device) {
    Program* program = nullptr;
    LLA_TRY(prepare_forward(layer, arguments, batch, state, &program, error));
    return run_program(*layer.context, program, error);
  }
  Builder measured(layer, batch->limits);
  CallTensors call;
  LLA_TRY(check_forward(layer, arguments, *batch, state, &measured, &call, error));
  Builder b(layer, *batch, arguments.layer_index, measured, arguments.workspace, arguments.stream);
  use_saved_out(&b, measured, arguments);
  add_steps(b, LLA_PASS_FORWARD, call);
  return b.finish(error);
}

lla_status run_backward(const Layer& layer, const lla_backward_args& arguments, Batch* batch, State* state,
                        lla_error* error) noexcept {
  if (!layer.context->device) {
    Program* program = nullptr;
    LLA_TRY(prepare_backward(layer, arguments, batch, state, &program, error));
    return run_program(*layer.context, program, error);
  }
  Builder measured(layer, batch->limits), forward(layer, batch->limits);
  CallTensors call;
  LLA_TRY(check_backward(layer, arguments, *batch, state, &measured, &forward, &call, error));
  Builder b(layer, *batch, arguments.layer_index, measured, arguments.workspace, arguments.stream);
  use_saved_in(&b, forward, arguments);
  add_steps(b, LLA_PASS_BACKWARD, call);
  return b.finish(error);
}

int64_t task_count(const Program& program, int64_t phase) noexcept {
  const Step* step = step_of(program, phase);
  return step ? step->kernel->tasks(&step->problem, static_cast<int32_t>(phase) - step->first_phase) : 0;
}

void run_task(Program* program, int64_t phase, int64_t task, int32_t thread) noexcept {
  const Step* step = step_of(*program, phase);
  if (!step || task < 0 || thread < 0 || thread >= program->threads) return;
  const int32_t own_phase = static_cast<int32_t>(phase) - step->first_phase;
  if (task >= step->kernel->tasks(&step->problem, own_phase)) return;
  Scratch scratch;
  scratch.shared = program->shared;
  scratch.thread = program->thread_scratch + thread * program->thread_bytes;
  step->kernel->run(&step->problem, program->limits, scratch, own_phase, task);
}

lla_status run_program(const Context& context, Program* program, lla_error* error) noexcept {
  if (program->magic != kProgramMagic) return fail(error, LLA_INTERNAL, "workspace: there is no program");
  for (int64_t phase = 0; phase < program->phases; ++phase) {
    const int64_t tasks = task_count(*program, phase);
    if (tasks == 1 || context.threads() == 1) {
      for (int64_t task = 0; task < tasks; ++task) run_task(program, phase, task, 0);
    } else if (tasks > 1) {
      PhaseRun run{program, phase, tasks};
      const int32_t failed = context.parallel.run(tasks, run_of_phase, &run, context.parallel.user);
      if (failed || run.done.load(std::memory_order_relaxed) != tasks) {
        context.write_log(LLA_LOG_ERROR, "parallel: the thread hook did not run every task");
        return fail(error, LLA_THREADS_FAILED, "parallel: run returned %d after %lld of %lld tasks", failed,
                    ll(run.done.load()), ll(tasks));
      }
    }
  }
  return LLA_OK;
}

int64_t step_kernels(const Layer& layer, lla_pass pass, const char* (&names)[kMaxSteps]) noexcept {
  if (pass != LLA_PASS_FORWARD && pass != LLA_PASS_BACKWARD) return 0;
  Builder b(layer, kSmallest, names);
  return measure(b, pass, nullptr) == LLA_OK ? std::min<int64_t>(b.steps(), kMaxSteps) : 0;
}

int64_t step_count(const Layer& layer, lla_pass pass) noexcept {
  const char* names[kMaxSteps];
  return step_kernels(layer, pass, names);
}

const char* step_kernel(const Layer& layer, lla_pass pass, int64_t index) noexcept {
  const char* names[kMaxSteps];
  return index >= 0 && index < step_kernels(layer, pass, names) ? names[index] : nullptr;
}

int64_t intermediate_bytes_per_row(const Layer& layer) noexcept {
  Builder b(layer, kSmallest);
  return measure(b, LLA_PASS_FORWARD, nullptr) == LLA_OK ? b.row_bytes() : 0;
}

}  // namespace lla
