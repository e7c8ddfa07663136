// SPDX-License-Identifier: Apache-2.0
// Programs: sizes that never fall, exact workspaces, the order and status of argument checks, tasks and threads, kernels by
// name.
#include <atomic>
#include <thread>

#include "cells_testing.h"

namespace {

using namespace cells_testing;

std::vector<lla_layer_desc> descriptions() {
  std::vector<lla_layer_desc> list;
  for (lla_layer_kind kind = LLA_LAYER_MIXER; kind <= LLA_LAYER_PROJECTION; ++kind) {
    lla_layer_desc d = description_of(kind);
    const bool op = kind <= LLA_LAYER_GATED_DELTANET;
    if (op || (kind >= LLA_LAYER_GATES && kind <= LLA_LAYER_GATED_NORM)) d.heads = 4;
    if (op || kind == LLA_LAYER_L2_NORM) d.key_dim = 8;
    if (op || kind == LLA_LAYER_GATED_NORM) d.value_dim = 6;
    if (kind <= LLA_LAYER_CELL) d.mixer = kind == LLA_LAYER_MIXER ? LLA_SCALAR_GATE : LLA_DELTA_RULE;
    if (op || kind == LLA_LAYER_GATES) {
      d.levels = 7;
      d.lambda_form = kind == LLA_LAYER_MIXER ? LLA_LAMBDA_READY : LLA_LAMBDA_SOFTPLUS;
    }
    if (op) d.grain = 8;
    if (kind == LLA_LAYER_CELL) {
      d.conv_width = 4;
      d.qk_norm = 1;
      d.gate_form = LLA_GATE_SOFTPLUS;
      d.write_form = LLA_WRITE_SIGMOID;
      d.norm_form = LLA_NORM_NORM_FIRST;
    }
    if (kind == LLA_LAYER_MAMBA2 || kind == LLA_LAYER_GATED_DELTANET || kind == LLA_LAYER_CONVOLUTION ||
        kind == LLA_LAYER_PROJECTION) {
      d.hidden = 10;
    }
    if (kind == LLA_LAYER_PROJECTION) d.outputs = 5;
    list.push_back(d);
  }
  return list;
}

class Programs : public testing::TestWithParam<lla_backend> {
 protected:
  ContextPointer context_ = make_context(GetParam());
  size_t bytes(const Layer& layer, const Limits& limits, lla_pass pass) {
    size_t bytes = 0;
    Error error;
    EXPECT_EQ(measure_program(layer, limits, pass, &bytes, &error), LLA_OK) << error.text;
    return bytes;
  }
};

TEST_P(Programs, SizesNeverFall) {
  const int64_t sizes[] = {0, 1, 2, 7, 64, 65, 1000};
  for (const lla_layer_desc& d : descriptions()) {
    const LayerPointer layer = make_layer(context_, d);
    for (const lla_pass pass : {LLA_PASS_FORWARD, LLA_PASS_BACKWARD}) {
      for (int64_t Limits::*field :
           {&Limits::sequences, &Limits::rows, &Limits::rows_per_sequence, &Limits::length, &Limits::snapshots}) {
        for (const int64_t base : {int64_t{1}, int64_t{100}}) {
          size_t last = 0, last_saved = 0;
          for (const int64_t size : sizes) {
            Limits limits{base, base, base, base, 0};
            limits.*field = size;
            const size_t now = bytes(*layer, limits, pass);
            EXPECT_GE(now, last) << d.kind << " " << size;
            last = now;
            size_t saved = 0;
            Error error;
            EXPECT_EQ(measure_saved(*layer, limits, &saved, &error), LLA_OK) << error.text;
            EXPECT_GE(saved, last_saved);
            last_saved = saved;
          }
        }
      }
    }
    size_t unused = 0;
    Error error;
    EXPECT_EQ(measure_program(*layer, Limits{}, 3, &unused, &error), LLA_INVALID_ARGUMENT);
  }
}

TEST_P(Programs, HugeLimitsOverflow) {
  for (const lla_layer_desc& d : descriptions()) {
    if (d.kind != LLA_LAYER_CELL && d.kind != LLA_LAYER_MAMBA2 && d.kind != LLA_LAYER_GATED_DELTANET) continue;
    const LayerPointer layer = make_layer(context_, d);
    for (const lla_pass pass : {LLA_PASS_FORWARD, LLA_PASS_BACKWARD}) {
      const int64_t huge = int64_t{1} << 60;
      size_t size = 0;
      Error error;
      EXPECT_EQ(measure_program(*layer, Limits{1, huge, 1, 1, 0}, pass, &size, &error), LLA_SIZE_OVERFLOW);
    }
  }
}

// Calls in a workspace of exactly the size asked for leave its surroundings alone (forward() and backward() check), and one
// byte less is refused.
TEST_P(Programs, ExactWorkspaces) {
  for (const lla_layer_desc& d : descriptions()) {
    const LayerPointer layer = make_layer(context_, d);
    for (const int64_t rows : {1, 9, 30}) {
      RandomCall c(*layer, rows, LLA_F32, 31);
      Random random(32);
      Plan plan(context_, 3, rows);
      plan.plan(Plan::uniform(1, rows));
      Error error;
      ASSERT_EQ(forward(*layer, plan, c.forward(), &error), LLA_OK) << error.text;
      const std::vector<Tensor> dy = c.like(true, LLA_F32, &random), g = c.like(false, LLA_F32);
      const Bindings b = c.backward(dy, g);
      ASSERT_EQ(backward(*layer, plan, b, &error), LLA_OK) << error.text;
      Setting less;
      less.short_by = 1;
      EXPECT_EQ(forward(*layer, plan, c.forward(), &error, less), LLA_BUFFER_TOO_SMALL);
      EXPECT_EQ(backward(*layer, plan, b, &error, less), LLA_BUFFER_TOO_SMALL);
    }
  }
}

// All types of tensors fit into the workspace that was measured without knowing them.
TEST_P(Programs, EveryTypeFits) {
  for (const lla_layer_desc& d : descriptions()) {
    const LayerPointer layer = make_layer(context_, d);
    for (const lla_dtype dtype : {LLA_F32, LLA_BF16, LLA_F16}) {
      RandomCall c(*layer, 12, dtype, 33);
      Random random(34);
      Plan plan(context_, 2, 12);
      plan.plan(Plan::uniform(2, 6));
      Error error;
      EXPECT_EQ(forward(*layer, plan, c.forward(), &error), LLA_OK) << error.text;
      const std::vector<Tensor> dy = c.like(true, dtype, &random), g = c.like(false, dtype);
      const Bindings b = c.backward(dy, g);
      EXPECT_EQ(backward(*layer, plan, b, &error), LLA_OK) << error.text;
    }
  }
}

TEST_P(Programs, StepsHaveNames) {
  for (const lla_layer_desc& d : descriptions()) {
    const LayerPointer layer = make_layer(context_, d);
    for (const lla_pass pass : {LLA_PASS_FORWARD, LLA_PASS_BACKWARD}) {
      const int64_t count = step_count(*layer, pass);
      ASSERT_GE(count, 1);
      EXPECT_EQ(count == 1, d.kind == LLA_LAYER_MIXER || d.kind >= LLA_LAYER_CONVOLUTION);
      for (int64_t i = 0; i < count; ++i) {
        const char* name = step_kernel(*layer, pass, i);
        ASSERT_NE(name, nullptr);
        EXPECT_NE(std::string(name).find('.'), std::string::npos) << name;
      }
      EXPECT_EQ(step_kernel(*layer, pass, count), nullptr);
      EXPECT_EQ(step_kernel(*layer, pass, -1), nullptr);
    }
    EXPECT_EQ(step_kernel(*layer, 0, 0), nullptr);
    const int64_t size = dtype_size(context_->backend->compute_dtype);
    // Mamba-2: projection, three streams, gate, write, λ, the mixer's output, y.
    if (d.kind == LLA_LAYER_MAMBA2) {
      const int64_t values = 24, keys = 32, projected = 2 * values + 2 * keys + 4 + 28;
      EXPECT_EQ(intermediate_bytes_per_row(*layer), size * (projected + values + 2 * keys + 8 + 28 + keys + values));
    }
    EXPECT_EQ(intermediate_bytes_per_row(*layer) == 0, d.kind == LLA_LAYER_MIXER || d.kind >= LLA_LAYER_CONVOLUTION);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Programs, testing::Values(LLA_BACKEND_REFERENCE, LLA_BACKEND_CPU),
                         [](const testing::TestParamInfo<lla_backend>& info) {
                           return info.param == LLA_BACKEND_CPU ? "cpu" : "reference";
                         });

// ---- argument checks
// -------------------------------------------------------------------------------------------------------

class Arguments : public testing::Test {
 protected:
  Arguments() {
    lla_layer_desc d = descriptions()[0];
    layer_ = make_layer(context_, d);
    d.heads = 8;
    other_layer_ = make_layer(context_, d);
    call_ = std::make_unique<RandomCall>(*layer_, 4, LLA_F32, 41);
    bindings_ = call_->forward();
    arguments_.io = bindings_.io.data();
    arguments_.io_count = static_cast<int64_t>(bindings_.io.size());
    arguments_.workspace = workspace_.data();
    arguments_.workspace_bytes = workspace_.bytes();
    plan_.plan(Plan::uniform(1, 4));
  }
  lla_status prepare(State* state = nullptr, Plan* plan = nullptr) {
    error_ = Error();
    Program* program = nullptr;
    return prepare_forward(*layer_, arguments_, (plan ? plan : &plan_)->batch(), state, &program, &error_);
  }
  void names(const char* text) { EXPECT_NE(std::string(error_.text).find(text), std::string::npos) << error_.text; }

  ContextPointer context_ = make_context(LLA_BACKEND_REFERENCE);
  LayerPointer layer_, other_layer_;
  std::unique_ptr<RandomCall> call_;
  Bindings bindings_;
  lla_forward_args arguments_ = LLA_FORWARD_ARGS_INIT;
  Memory workspace_{1 << 20};
  Plan plan_{context_, 1, 4};
  Error error_;
};

TEST_F(Arguments, GoodOnesPass) { EXPECT_EQ(prepare(), LLA_OK) << error_.text; }

TEST_F(Arguments, Contexts) {
  const ContextPointer other = make_context(LLA_BACKEND_REFERENCE);
  Plan foreign(other, 1, 4);
  foreign.plan(Plan::uniform(1, 4));
  EXPECT_EQ(prepare(nullptr, &foreign), LLA_WRONG_CONTEXT);
  names("batch");
}

TEST_F(Arguments, UnplannedBatches) {
  Plan unplanned(context_, 1, 4);
  EXPECT_EQ(prepare(nullptr, &unplanned), LLA_BUSY);
}

TEST_F(Arguments, LayerIndexAndHistory) {
  arguments_.layer_index = 1;
  EXPECT_EQ(prepare(), LLA_INVALID_ARGUMENT);
  names("layer_index");
  arguments_.layer_index = 0;
  StateRig own(context_, *layer_, 1, 8), foreign(context_, *other_layer_, 1, 8);
  Plan plan(context_, 1, 4, 8);
  plan.plan(Plan::uniform(1, 4), own.get());
  EXPECT_EQ(prepare(own.get(), &plan), LLA_OK) << error_.text;
  for (const int64_t index : {int64_t{-1}, int64_t{1}, INT64_MAX}) {
    arguments_.layer_index = index;
    EXPECT_EQ(prepare(own.get(), &plan), LLA_INVALID_ARGUMENT);
    names("layer_index");
  }
  arguments_.layer_index = 0;
  plan.plan(Plan::uniform(1, 4), foreign.get());
  EXPECT_EQ(prepare(foreign.get(), &plan), LLA_STATE_INCOMPATIBLE);
  names("state");
}

TEST_F(Arguments, GradientStatesBelongToTheLayer) {
  StateRig gradient(context_, *other_layer_, 1, 8, LLA_STATE_GRADIENT);
  lla_rows rows = Plan::uniform(1, 4);
  const std::vector<int64_t> zero{0};
  rows.initial_gradient_slots = {zero.data(), LLA_I64, LLA_HOST};
  StateRig state(context_, *other_layer_, 1, 8);
  Plan plan(context_, 1, 4, 8);
  plan.plan(rows, state.get(), gradient.get());
  Random random(42);
  Setting setting;
  setting.state = state.get();
  const std::vector<Tensor> dy = call_->like(true, LLA_F32, &random), g = call_->like(false, LLA_F32);
  const Bindings b = call_->backward(dy, g);
  EXPECT_EQ(backward(*layer_, plan, b, &error_, setting), LLA_STATE_INCOMPATIBLE);
}

TEST_F(Arguments, Workspace) {
  arguments_.workspace = nullptr;
  EXPECT_EQ(prepare(), LLA_NULL_POINTER);
  names("workspace");
  arguments_.workspace = workspace_.data() + 8;
  EXPECT_EQ(prepare(), LLA_MISALIGNED);
  names("workspace");
  arguments_.workspace = workspace_.data();
  arguments_.workspace_bytes = 0;
  EXPECT_EQ(prepare(), LLA_BUFFER_TOO_SMALL);
  names("workspace_bytes");
}

TEST_F(Arguments, Saved) {
  arguments_.saved_bytes = 1;
  EXPECT_EQ(prepare(), LLA_INVALID_ARGUMENT);
  names("saved_bytes");
  Memory saved(1 << 16);
  arguments_.saved = saved.data() + 4;
  EXPECT_EQ(prepare(), LLA_MISALIGNED);
  names("saved");
}

// A refused call has written nothing, not even into its workspace.
TEST_F(Arguments, NothingIsWrittenOnFailure) {
  for (size_t i = 0; i < bindings_.io.size(); ++i) {
    const lla_binding good = bindings_.io[i];
    bindings_.io[i].tensor.dims[1] += 1;
    std::memset(workspace_.data(), 0x5b, workspace_.bytes());
    EXPECT_EQ(prepare(), LLA_SHAPE_MISMATCH);
    for (size_t j = 0; j < workspace_.bytes(); ++j) ASSERT_EQ(workspace_.data()[j], 0x5b);
    bindings_.io[i] = good;
  }
}

// ---- tasks and threads
// -----------------------------------------------------------------------------------------------------

struct Hook {
  enum Mode { kAll, kRefuse, kSkipLast, kTwice, kWrongThread, kShifted } mode = kAll;
  int64_t calls = 0;
};

int32_t run_hook(int64_t count, lla_task task, void* argument, void* user) {
  Hook& hook = *static_cast<Hook*>(user);
  ++hook.calls;
  if (hook.mode == Hook::kRefuse) return 7;
  const int64_t end = hook.mode == Hook::kSkipLast ? count - 1 : count;
  const int64_t shift = hook.mode == Hook::kShifted ? 1 : 0;
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < 3; ++t) {
    threads.emplace_back([=] {
      for (int64_t i = t; i < end; i += 3) task(i + shift, hook.mode == Hook::kWrongThread ? 3 : t, argument);
    });
  }
  for (std::thread& t : threads) t.join();
  if (hook.mode == Hook::kTwice) task(0, 0, argument);
  return 0;
}

class Threads : public testing::Test {
 protected:
  void SetUp() override {
    lla_parallel parallel{};
    parallel.struct_size = sizeof(parallel);
    parallel.max_threads = 3;
    parallel.run = run_hook;
    parallel.user = &hook_;
    context_ = make_context(LLA_BACKEND_REFERENCE, 0, &parallel);
    layer_ = make_layer(context_, descriptions()[LLA_LAYER_MAMBA2 - 1]);
    plan_ = std::make_unique<Plan>(context_, 2, 40);
    plan_->plan(Plan::uniform(2, 20));
  }
  Hook hook_;
  ContextPointer context_;
  LayerPointer layer_;
  std::unique_ptr<Plan> plan_;
  Error error_;
};

TEST_F(Threads, HooksThatDoNotDoTheirWork) {
  RandomCall c(*layer_, 40, LLA_F32, 51);
  for (const auto mode : {Hook::kAll, Hook::kRefuse, Hook::kSkipLast, Hook::kTwice, Hook::kWrongThread, Hook::kShifted}) {
    hook_.mode = mode;
    EXPECT_EQ(forward(*layer_, *plan_, c.forward(), &error_), mode == Hook::kAll ? LLA_OK : LLA_THREADS_FAILED) << mode;
  }
  EXPECT_GT(hook_.calls, 6);
}

// The tasks of a program, run by hand in any order, give the bits of run_program; what is out of range does nothing.
TEST_F(Threads, TasksByHand) {
  RandomCall c(*layer_, 40, LLA_F32, 52);
  ASSERT_EQ(forward(*layer_, *plan_, c.forward(), &error_), LLA_OK) << error_.text;
  const std::vector<double> expected = c.tensor(LLA_Y).values();
  c.tensor(LLA_Y).fill(NAN);
  size_t bytes = 0;
  ASSERT_EQ(measure_program(*layer_, plan_->limits(), LLA_PASS_FORWARD, &bytes, &error_), LLA_OK);
  Memory workspace(bytes);
  const Bindings b = c.forward();
  lla_forward_args a = LLA_FORWARD_ARGS_INIT;
  a.io = b.io.data();
  a.io_count = static_cast<int64_t>(b.io.size());
  a.weights = b.weights.data();
  a.weight_count = static_cast<int64_t>(b.weights.size());
  a.workspace = workspace.data();
  a.workspace_bytes = bytes;
  Program* program = nullptr;
  ASSERT_EQ(prepare_forward(*layer_, a, plan_->batch(), nullptr, &program, &error_), LLA_OK) << error_.text;
  ASSERT_GT(program->phases, 3);
  for (int64_t phase = 0; phase < program->phases; ++phase) {
    const int64_t tasks = task_count(*program, phase);
    run_task(program, phase, -1, 0);
    run_task(program, phase, tasks, 0);
    run_task(program, phase, INT64_MAX, 0);
    run_task(program, phase, 0, -1);
    run_task(program, phase, 0, 3);
    for (int64_t task = tasks - 1; task >= 0; --task) run_task(program, phase, task, static_cast<int32_t>(task % 3));
  }
  run_task(program, -1, 0, 0);
  run_task(program, program->phases, 0, 0);
  EXPECT_EQ(task_count(*program, -1), 0);
  EXPECT_EQ(task_count(*program, program->phases), 0);
  EXPECT_TRUE(workspace.guards_hold());
  EXPECT_EQ(c.tensor(LLA_Y).values(), expected);
}

// ---- measuring
// -------------------------------------------------------------------------------------------------------------

// Kernels that serve other types may need more; the measure covers them all.
int32_t dtype_of_q(const void* problem) { return static_cast<const MixerForward*>(problem)->q.dtype; }
template <int32_t kDtype, int64_t kShared, int64_t kThread>
Kernel mixer_for(const char* name) {
  return {Op::MixerForward,
          name,
          [](const void* p) { return dtype_of_q(p) == kDtype; },
          [](const void*, const Limits& limits, Need* need) {
            need->shared = kShared * limits.rows;
            need->per_thread = kThread;
          },
          [](const void*) { return 1; },
          [](const void*, int32_t) { return int64_t{1}; },
          [](const void*, const Limits&, const Scratch& scratch, int32_t, int64_t) {
            if (kThread) std::memset(scratch.thread, 1, kThread);
          },
          [](const void*, const Limits& limits) { return kShared * limits.rows; }};
}

TEST(Measure, CoversEveryKernel) {
  std::vector<Kernel> kernels = {mixer_for<LLA_F32, 0, 0>("f32"), mixer_for<LLA_BF16, 128, 0>("bf16"),
                                 mixer_for<LLA_F16, 0, 4096>("f16")};
  for (int64_t i = 0; i < reference_backend().kernel_count; ++i) kernels.push_back(reference_backend().kernels[i]);
  Backend backend = reference_backend();
  backend.compute_dtype = LLA_F32;
  backend.kernels = kernels.data();
  backend.kernel_count = static_cast<int64_t>(kernels.size());
  const ContextPointer context = make_context(LLA_BACKEND_REFERENCE);
  context->backend = &backend;
  const LayerPointer layer = make_layer(context, descriptions()[0]);
  Error error;
  size_t bytes = 0, saved = 0;
  ASSERT_EQ(measure_program(*layer, Limits{1, 100, 100, 100, 0}, LLA_PASS_FORWARD, &bytes, &error), LLA_OK);
  ASSERT_EQ(measure_saved(*layer, Limits{1, 100, 100, 100, 0}, &saved, &error), LLA_OK);
  EXPECT_EQ(bytes, (sizeof(Program) + 63) / 64 * 64 + 12800 + 4096);
  EXPECT_EQ(saved, 12800u);
  EXPECT_STREQ(step_kernel(*layer, LLA_PASS_FORWARD, 0), "f32");
}

// Every worker has scratch of its own, aligned, inside the workspace and apart from the shared piece.
char* seen_shared = nullptr;
char* seen_thread[3] = {};
TEST(Measure, ScratchOfWorkers) {
  Kernel kernel = mixer_for<LLA_F32, 0, 0>("scratch");
  kernel.measure = [](const void*, const Limits&, Need* need) { *need = {100, 72}; };
  kernel.tasks = [](const void*, int32_t) { return int64_t{3}; };
  kernel.run = [](const void*, const Limits&, const Scratch& scratch, int32_t, int64_t task) {
    seen_shared = scratch.shared;
    seen_thread[task] = scratch.thread;
    std::memset(scratch.shared, 1, 100);
    std::memset(scratch.thread, 2, 72);
  };
  std::vector<Kernel> kernels = {kernel};
  for (int64_t i = 0; i < reference_backend().kernel_count; ++i) kernels.push_back(reference_backend().kernels[i]);
  Backend backend = reference_backend();
  backend.compute_dtype = LLA_F32;
  backend.kernels = kernels.data();
  backend.kernel_count = static_cast<int64_t>(kernels.size());
  const ContextPointer context = make_context(LLA_BACKEND_REFERENCE, 3);
  context->backend = &backend;
  const LayerPointer layer = make_layer(context, descriptions()[0]);
  RandomCall c(*layer, 4, LLA_F32, 61);
  Plan plan(context, 1, 4);
  plan.plan(Plan::uniform(1, 4));
  size_t bytes = 0;
  Error error;
  ASSERT_EQ(measure_program(*layer, plan.limits(), LLA_PASS_FORWARD, &bytes, &error), LLA_OK);
  Memory workspace(bytes);
  const Bindings b = c.forward();
  lla_forward_args a = LLA_FORWARD_ARGS_INIT;
  a.io = b.io.data();
  a.io_count = static_cast<int64_t>(b.io.size());
  a.workspace = workspace.data();
  a.workspace_bytes = bytes;
  Program* program = nullptr;
  ASSERT_EQ(prepare_forward(*layer, a, plan.batch(), nullptr, &program, &error), LLA_OK) << error.text;
  for (int32_t t = 0; t < 3; ++t) run_task(program, 0, t, t);
  EXPECT_TRUE(workspace.guards_hold());
  EXPECT_EQ(seen_shared, workspace.data() + (sizeof(Program) + 63) / 64 * 64);
  const int64_t distance = seen_thread[1] - seen_thread[0];  // other kernels may have needed more
  EXPECT_GE(distance, 128);
  EXPECT_EQ(distance % 64, 0);
  EXPECT_GE(seen_thread[0] - seen_shared, 128);
  EXPECT_EQ(seen_thread[2] - seen_thread[1], distance);
  EXPECT_EQ(seen_thread[2] + distance, workspace.data() + bytes);
}

TEST(Measure, KernelsThatOverflow) {
  std::vector<Kernel> kernels = {mixer_for<LLA_F32, -1, 0>("f32")};
  for (int64_t i = 0; i < reference_backend().kernel_count; ++i) kernels.push_back(reference_backend().kernels[i]);
  Backend backend = reference_backend();
  backend.kernels = kernels.data();
  backend.kernel_count = static_cast<int64_t>(kernels.size());
  Context context;
  context.backend = &backend;
  context.parallel.max_threads = 1;
  Layer layer;
  Error error;
  EXPECT_EQ(describe_layer(&context, descriptions()[0], &layer, &error), LLA_SIZE_OVERFLOW);
}

}  // namespace
