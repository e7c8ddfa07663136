// SPDX-License-Identifier: Apache-2.0
// Contexts: choices, refusals, hooks; every byte goes through the allocator.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "core_testing.h"

using namespace core_testing;

namespace {

struct Counts {
  std::atomic<int64_t> live{0}, calls{0};
  int64_t fail_at = -1;
};

void* counted_allocate(size_t bytes, size_t alignment, void* user) {
  Counts& counts = *static_cast<Counts*>(user);
  if (counts.calls++ == counts.fail_at) return nullptr;
  counts.live += static_cast<int64_t>(bytes);
  EXPECT_GT(bytes, 0u);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
void counted_release(void* memory, size_t bytes, size_t, void* user) {
  EXPECT_NE(memory, nullptr);
  static_cast<Counts*>(user)->live -= static_cast<int64_t>(bytes);
  std::free(memory);
}

lla_context_options defaults() {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  return options;
}

void refuse(const lla_context_options& options, lla_status status, const char* text) {
  Error error;
  Context* context = nullptr;
  EXPECT_EQ(create_context(options, &context, &error), status) << text;
  EXPECT_EQ(context, nullptr);
  EXPECT_NE(std::string(error.text).find(text), std::string::npos) << error.text;
}

TEST(ContextTest, AutoTakesTheCpuAndSaysWhy) {
  unsetenv("LLA_MAX_ISA");
  const ContextPointer context = make_context(defaults());
  EXPECT_EQ(context->kind, LLA_BACKEND_CPU);
  EXPECT_STREQ(context->backend->name, "cpu");
  EXPECT_STREQ(context->backend->isa, isa_name(cpu_isa()));
  EXPECT_NE(std::strstr(context->fallback_reason, "cuda"), nullptr);
  EXPECT_EQ(context->determinism, LLA_DETERMINISM_BATCH_INVARIANT);
  EXPECT_EQ(context->threads(), 1);
}

TEST(ContextTest, NamedBackendsNeedNoExcuse) {
  EXPECT_STREQ(cpu_context()->fallback_reason, "");
  const ContextPointer reference = reference_context();
  EXPECT_EQ(reference->kind, LLA_BACKEND_REFERENCE);
  EXPECT_STREQ(reference->backend->name, "reference");
  EXPECT_STREQ(reference->fallback_reason, "");
}

TEST(ContextTest, RefusesWhatIsOutOfItsDomain) {
  lla_context_options options = defaults();
  options.backend = 4;
  refuse(options, LLA_INVALID_ARGUMENT, "backend");
  options = defaults();
  options.backend = LLA_BACKEND_CUDA;
  refuse(options, LLA_BACKEND_MISSING, "cuda");
  options = defaults();
  options.device = -1;
  refuse(options, LLA_INVALID_ARGUMENT, "device");
  options = defaults();
  options.isa = 5;
  refuse(options, LLA_INVALID_ARGUMENT, "isa");
  options = defaults();
  options.isa = cpu_isa() == LLA_ISA_NEON ? LLA_ISA_AVX2 : LLA_ISA_NEON;
  refuse(options, LLA_UNSUPPORTED, "isa");
  options = defaults();
  options.determinism = 4;
  refuse(options, LLA_INVALID_ARGUMENT, "determinism");
  options.determinism = LLA_DETERMINISM_SPLIT_INVARIANT;
  refuse(options, LLA_UNSUPPORTED, "determinism");
  options = defaults();
  options.threads = -1;
  refuse(options, LLA_INVALID_ARGUMENT, "threads");
  options = defaults();
  options.reserved = 1;
  refuse(options, LLA_INVALID_ARGUMENT, "reserved");
}

int32_t run_backwards(int64_t count, lla_task task, void* argument, void*) {
  for (int64_t i = count - 1; i >= 0; --i) task(i, 2, argument);
  return 0;
}

TEST(ContextTest, RefusesIncompleteHooks) {
  lla_context_options options = defaults();
  lla_allocator allocator = {sizeof(lla_allocator), counted_allocate, nullptr, nullptr};
  options.allocator = &allocator;
  refuse(options, LLA_INVALID_ARGUMENT, "allocator");
  allocator = {sizeof(lla_allocator), nullptr, counted_release, nullptr};
  refuse(options, LLA_INVALID_ARGUMENT, "allocator");
  options = defaults();
  lla_parallel parallel = {sizeof(lla_parallel), 3, 0, nullptr, nullptr};
  options.parallel = &parallel;
  refuse(options, LLA_INVALID_ARGUMENT, "parallel");
  parallel = {sizeof(lla_parallel), 0, 0, run_backwards, nullptr};
  refuse(options, LLA_INVALID_ARGUMENT, "max_threads");
  parallel = {sizeof(lla_parallel), 1, 1, run_backwards, nullptr};
  refuse(options, LLA_INVALID_ARGUMENT, "reserved");
  options = defaults();
  lla_log log = {sizeof(lla_log), LLA_LOG_INFO, 0, nullptr, nullptr};
  options.log = &log;
  refuse(options, LLA_INVALID_ARGUMENT, "log");
  log = {sizeof(lla_log), 4, 0, [](lla_log_level, const char*, void*) {}, nullptr};
  refuse(options, LLA_INVALID_ARGUMENT, "level");
}

TEST(ContextTest, EnvironmentLowersTheInstructionSetAndNeverRaisesIt) {
  const auto isa_with = [](const char* text, int32_t asked) {
    setenv("LLA_MAX_ISA", text, 1);
    lla_context_options options = defaults();
    options.isa = asked;
    const std::string name = make_context(options)->backend->isa;
    unsetenv("LLA_MAX_ISA");
    return name;
  };
  const std::string best = isa_name(cpu_isa()), baseline = isa_name(LLA_ISA_BASELINE);
  EXPECT_EQ(isa_with("baseline", LLA_ISA_DEFAULT), baseline);
  EXPECT_EQ(isa_with("baseline", cpu_isa()), baseline);
  EXPECT_EQ(isa_with("nonsense", LLA_ISA_DEFAULT), best);
  EXPECT_EQ(isa_with("", LLA_ISA_DEFAULT), best);
  EXPECT_EQ(isa_with(isa_name(cpu_isa()), LLA_ISA_BASELINE), baseline);
  EXPECT_EQ(isa_with(cpu_isa() == LLA_ISA_NEON ? "avx2" : "neon", LLA_ISA_DEFAULT), best);
}

TEST(ContextTest, CallersThreadsComeBeforeAnOwnPool) {
  lla_parallel parallel = {sizeof(lla_parallel), 3, 0, run_backwards, nullptr};
  lla_context_options options = defaults();
  options.parallel = &parallel;
  options.threads = 8;
  const ContextPointer context = make_context(options);
  EXPECT_EQ(context->threads(), 3);
  EXPECT_EQ(context->pool, nullptr);
  EXPECT_EQ(context->parallel.run, run_backwards);
}

TEST(ContextTest, RunsSeriallyWithoutThreads) {
  const ContextPointer context = cpu_context();
  std::vector<int64_t> order;
  const auto task = [](int64_t i, int32_t thread, void* argument) {
    EXPECT_EQ(thread, 0);
    static_cast<std::vector<int64_t>*>(argument)->push_back(i);
  };
  EXPECT_EQ(context->parallel.run(4, task, &order, context->parallel.user), 0);
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3}));
}

TEST(ContextTest, LogsWhatWasChosen) {
  std::vector<std::string> lines;
  lla_log log = {sizeof(lla_log), LLA_LOG_INFO, 0,
                 [](lla_log_level level, const char* text, void* user) {
                   static_cast<std::vector<std::string>*>(user)->push_back(std::to_string(level) + text);
                 },
                 &lines};
  lla_context_options options = defaults();
  options.log = &log;
  make_context(options);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_NE(lines[0].find("2cuda"), std::string::npos);
  EXPECT_NE(lines[1].find("3backend cpu"), std::string::npos);
  lines.clear();
  log.level = LLA_LOG_ERROR;
  make_context(options);
  EXPECT_TRUE(lines.empty());
}

TEST(ContextTest, GivesEveryByteBackWhereverAllocationFails) {
  Counts counts;
  lla_allocator allocator = {sizeof(lla_allocator), counted_allocate, counted_release, &counts};
  lla_context_options options = defaults();
  options.allocator = &allocator;
  options.threads = 3;
  const std::vector<LayerHistory> layers = {with_convolution(mixer(LLA_DELTA_RULE, 4, 8), 6, 4),
                                            mixer(LLA_SCALAR_GATE, 4, 0)};
  bool done = false;
  int64_t failures = 0;
  for (int64_t at = 0; !done; ++at) {
    counts.calls = 0;
    counts.fail_at = at;
    Context* context = nullptr;
    State* state = nullptr;
    lla_status status = create_context(options, &context, nullptr);
    if (status == LLA_OK) {
      lla_state_desc description = LLA_STATE_DESC_INIT;
      description.slots = 3;
      status = State::create(context, layers.data(), 2, description, nullptr, 0, &state, nullptr);
      if (status == LLA_OK) state->destroy();
      release(context);
    }
    done = status == LLA_OK;
    if (!done) {
      EXPECT_EQ(status, LLA_OUT_OF_MEMORY);
      ++failures;
    }
    EXPECT_EQ(counts.live, 0) << at;
  }
  EXPECT_GE(failures, 8);
}

TEST(ContextTest, StatesKeepTheirContextAlive) {
  Context* context = reference_context().release();
  StatePointer state = make_state(context, {mixer(LLA_SCALAR_GATE, 4, 0)}, LLA_STATE_DESC_INIT);
  release(context);
  EXPECT_EQ(state->context()->references, 1);
  EXPECT_EQ(query(*state, LLA_STATE_SLOTS), 1);
}

}  // namespace
