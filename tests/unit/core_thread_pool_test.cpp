// SPDX-License-Identifier: Apache-2.0
// The own pool: every task once, worker ids never shared, several callers, nesting, fork, failure to start.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "core_testing.h"

using namespace core_testing;

// GCC says it with a macro, Clang with a feature.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LLA_ADDRESS_SANITIZER
#elif __has_feature(thread_sanitizer)
#define LLA_THREAD_SANITIZER
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define LLA_ADDRESS_SANITIZER
#elif defined(__SANITIZE_THREAD__)
#define LLA_THREAD_SANITIZER
#endif

namespace {

ContextPointer pool_context(int32_t threads) {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = LLA_BACKEND_REFERENCE;
  options.threads = threads;
  return make_context(options);
}

// One run: counts how often each task came and whether a worker id was used twice at once.
struct Job {
  explicit Job(int64_t tasks, int32_t threads) : times(static_cast<size_t>(tasks)), busy(static_cast<size_t>(threads)) {}
  std::vector<std::atomic<int32_t>> times;
  std::vector<std::atomic<int32_t>> busy;
  std::atomic<int32_t> errors{0};
  std::atomic<int64_t> noise{0};  // a little work

  static void task(int64_t i, int32_t thread, void* argument) {
    Job& run = *static_cast<Job*>(argument);
    if (thread < 0 || thread >= static_cast<int32_t>(run.busy.size())) {
      ++run.errors;
      return;
    }
    if (run.busy[static_cast<size_t>(thread)].fetch_add(1) != 0) ++run.errors;
    ++run.times[static_cast<size_t>(i)];
    for (int spin = 0; spin < 50; ++spin) run.noise.fetch_add(1, std::memory_order_relaxed);
    run.busy[static_cast<size_t>(thread)].fetch_sub(1);
  }
  void execute(const Context& context) {
    EXPECT_EQ(context.parallel.run(static_cast<int64_t>(times.size()), task, this, context.parallel.user), 0);
    for (const auto& count : times) ASSERT_EQ(count, 1);
    EXPECT_EQ(errors, 0);
  }
};

TEST(ThreadPoolTest, RunsEveryTaskOnce) {
  for (const int32_t threads : {2, 3, 7}) {
    const ContextPointer context = pool_context(threads);
    EXPECT_EQ(context->threads(), threads);
    for (int repeat = 0; repeat < 200; ++repeat) {
      for (const int64_t tasks : {0, 1, 2, 5, 40}) Job(tasks, threads).execute(*context);
    }
  }
}

TEST(ThreadPoolTest, OneThreadNeedsNoPool) {
  const ContextPointer context = pool_context(1);
  EXPECT_EQ(context->pool, nullptr);
  Job(10, 1).execute(*context);
}

TEST(ThreadPoolTest, SpreadsTasksOverWorkers) {
  const ContextPointer context = pool_context(2);
  // Each task waits for the other: only two workers at once can finish them.
  std::atomic<int> arrived{0};
  const auto task = [](int64_t, int32_t, void* argument) {
    auto& count = *static_cast<std::atomic<int>*>(argument);
    ++count;
    while (count < 2) std::this_thread::yield();
  };
  EXPECT_EQ(context->parallel.run(2, task, &arrived, context->parallel.user), 0);
  EXPECT_EQ(arrived, 2);
}

TEST(ThreadPoolTest, ServesSeveralCallersAtOnce) {
  const ContextPointer context = pool_context(3);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 300; ++repeat) Job(1 + repeat % 17, 3).execute(*context);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(ThreadPoolTest, ATaskMayRunTasks) {
  const ContextPointer context = pool_context(3);
  std::atomic<int> sum{0};
  struct Outer {
    const Context* context;
    std::atomic<int>* sum;
  } outer = {context.get(), &sum};
  const auto inner = [](int64_t i, int32_t thread, void* argument) {
    EXPECT_EQ(thread, 0);
    *static_cast<std::atomic<int>*>(argument) += static_cast<int>(i);
  };
  static const lla_task inner_task = inner;
  const auto task = [](int64_t, int32_t, void* argument) {
    const Outer& known = *static_cast<Outer*>(argument);
    known.context->parallel.run(4, inner_task, known.sum, known.context->parallel.user);
  };
  EXPECT_EQ(context->parallel.run(5, task, &outer, context->parallel.user), 0);
  EXPECT_EQ(sum, 5 * 6);
}

// Runs `body` in a forked child; true if it returned true in time.
template <class Body>
bool in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(body() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(ThreadPoolTest, AForkedChildRunsSeriallyAndReleasesWithoutWaiting) {
  ContextPointer context = pool_context(3);
  Job(20, 3).execute(*context);
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::atomic<bool> stop{false};
    // The fork may fall into the middle of another thread's run.
    std::thread other([&] {
      while (!stop) Job(9, 3).execute(*context);
    });
    const bool ok = in_child([&] {
      std::vector<int64_t> order;
      const auto task = [](int64_t i, int32_t thread, void* argument) {
        if (thread == 0) static_cast<std::vector<int64_t>*>(argument)->push_back(i);
      };
      context->parallel.run(5, task, &order, context->parallel.user);
      Context* inherited = context.release();
      release(inherited);
#ifndef LLA_THREAD_SANITIZER                   // which lets no forked child start threads
      ContextPointer fresh = pool_context(2);  // a child may have a pool of its own
      Job job(10, 2);
      job.execute(*fresh);
      if (job.errors != 0) return false;
#endif
      return order == std::vector<int64_t>{0, 1, 2, 3, 4};
    });
    stop = true;
    other.join();
    EXPECT_TRUE(ok);
  }
}

#if !defined(LLA_ADDRESS_SANITIZER) && !defined(LLA_THREAD_SANITIZER)  // they need more address space than is left here
TEST(ThreadPoolTest, FailureToStartIsReportedAndLeavesNothingBehind) {
  const bool ok = in_child([] {
    const rlimit limit = {size_t{1} << 30, size_t{1} << 30};
    if (setrlimit(RLIMIT_AS, &limit) != 0) return false;
    lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
    options.backend = LLA_BACKEND_REFERENCE;
    options.threads = 2000;  // stacks of 8 MiB each
    for (int repeat = 0; repeat < 3; ++repeat) {
      Context* context = nullptr;
      Error error;
      if (create_context(options, &context, &error) != LLA_OUT_OF_MEMORY || context) return false;
      if (std::string(error.text).find("threads") == std::string::npos) return false;
    }
    options.threads = 4;  // and there is room again
    Context* context = nullptr;
    if (create_context(options, &context, nullptr) != LLA_OK) return false;
    release(context);
    return true;
  });
  EXPECT_TRUE(ok);
}
#endif

}  // namespace
