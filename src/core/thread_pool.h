// SPDX-License-Identifier: Apache-2.0
// A context's own workers. One call at a time spreads over them; a second caller meanwhile runs its tasks alone, and so does
// a process that was forked, since its workers stayed behind in the parent.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>

#include "core/context.h"
#include "core/mutex.h"

namespace lla {

class ThreadPool {
 public:
  // Starts threads - 1 workers (the calling thread is the first worker). `context` has its allocator and outlives the pool.
  static lla_status create(const Context* context, int32_t threads, ThreadPool** pool, lla_error* error) noexcept;
  // Joins the workers, unless they belong to the parent of a forked process, and frees the pool.
  void destroy() noexcept;

  // Runs every task and returns when the last one has returned.
  void run(int64_t count, lla_task task, void* argument) noexcept;
  // The same as lla_parallel::run, `user` being the pool.
  static int32_t run_hook(int64_t count, lla_task task, void* argument, void* user) noexcept;

 private:
  struct Worker {
    ThreadPool* pool = nullptr;
    int32_t index = 0;
    pthread_t thread{};
  };

  ThreadPool() = default;
  static void* enter(void* worker);
  void serve(int32_t index) noexcept;
  void take_tasks(int32_t index, int64_t count, lla_task task, void* argument) noexcept;
  void stop(int32_t started) noexcept;
  size_t bytes() const;
  Worker* workers() { return reinterpret_cast<Worker*>(this + 1); }

  const Context* context_ = nullptr;
  int32_t threads_ = 1;  // the calling thread included
  pid_t process_ = 0;    // that started the workers

  std::atomic<bool> busy_{false};  // a call is spread over the workers
  Mutex mutex_;
  Condition wake_, done_;
  // Written under the mutex. The two atomics are also watched without it for a moment before a thread goes to sleep.
  std::atomic<uint64_t> calls_{0};  // calls begun, and one for the end
  std::atomic<int32_t> joined_{0};  // workers inside the present call
  bool open_ = false;               // workers may still join it
  bool stop_ = false;
  int64_t count_ = 0;
  lla_task task_ = nullptr;
  void* argument_ = nullptr;

  alignas(64) std::atomic<int64_t> next_{0};  // first task that nobody has taken
};

}  // namespace lla
