// SPDX-License-Identifier: Apache-2.0
// Starting and ending workers, and handing the tasks of a call out.
#include "core/thread_pool.h"

#include <unistd.h>

#include <csignal>
#include <new>

#include "core/error.h"

namespace lla {

namespace {

constexpr int kSpins = 400;  // glances before a thread goes to sleep: phases of one call follow each other closely

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

size_t ThreadPool::bytes() const { return sizeof(ThreadPool) + static_cast<size_t>(threads_ - 1) * sizeof(Worker); }

lla_status ThreadPool::create(const Context* context, int32_t threads, ThreadPool** pool, lla_error* error) noexcept {
  static_assert(sizeof(ThreadPool) % alignof(Worker) == 0);
  const size_t bytes = sizeof(ThreadPool) + static_cast<size_t>(threads - 1) * sizeof(Worker);
  void* memory = context->allocate(bytes);
  if (!memory) return fail(error, LLA_OUT_OF_MEMORY, "threads: no memory for a pool of %d", static_cast<int>(threads));
  ThreadPool* made = ::new (memory) ThreadPool;
  made->context_ = context;
  made->threads_ = threads;
  made->process_ = getpid();
  for (int32_t i = 0; i < threads - 1; ++i) {
    Worker* worker = ::new (static_cast<void*>(made->workers() + i)) Worker;
    worker->pool = made;
    worker->index = i + 1;
  }
  // The workers run lla's tasks only: signals are for the caller's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int32_t started = 0;
  int failure = 0;
  while (started < threads - 1 && failure == 0) {
    Worker* worker = made->workers() + started;
    failure = pthread_create(&worker->thread, nullptr, enter, worker);
    if (failure == 0) ++started;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failure != 0) {
    made->stop(started);
    made->~ThreadPool();
    context->release(memory, bytes);
    return fail(error, LLA_OUT_OF_MEMORY, "threads: the system starts only %d of %d workers (error %d)",
                static_cast<int>(started) + 1, static_cast<int>(threads), failure);
  }
  *pool = made;
  return LLA_OK;
}

void ThreadPool::destroy() noexcept {
  const Context* context = context_;
  const size_t size = bytes();
  // In a forked child the mutex may be held for ever by a thread that does not exist here: only the memory is given back.
  if (getpid() == process_) {
    stop(threads_ - 1);
    this->~ThreadPool();
  }
  context->release(this, size);
}

void ThreadPool::stop(int32_t started) noexcept {
  {
    const Lock lock(mutex_);
    stop_ = true;
    calls_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (int32_t i = 0; i < started; ++i) pthread_join(workers()[i].thread, nullptr);
}

void* ThreadPool::enter(void* worker) {
  Worker* self = static_cast<Worker*>(worker);
  self->pool->serve(self->index);
  return nullptr;
}

void ThreadPool::serve(int32_t index) noexcept {
  uint64_t seen = 0;
  for (;;) {
    for (int i = 0; i < kSpins && calls_.load(std::memory_order_acquire) == seen; ++i) pause();
    int64_t count;
    lla_task task;
    void* argument;
    {
      const Lock lock(mutex_);
      while (calls_.load(std::memory_order_relaxed) == seen) wake_.wait(mutex_);
      if (stop_) return;
      seen = calls_.load(std::memory_order_relaxed);
      if (!open_) continue;  // came too late: the others have done it all
      count = count_;
      task = task_;
      argument = argument_;
      joined_.fetch_add(1, std::memory_order_relaxed);
    }
    take_tasks(index, count, task, argument);
    const Lock lock(mutex_);
    if (joined_.fetch_sub(1, std::memory_order_release) == 1 && !open_) done_.notify_one();
  }
}

void ThreadPool::take_tasks(int32_t index, int64_t count, lla_task task, void* argument) noexcept {
  for (;;) {
    const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= count) return;
    task(i, index, argument);
  }
}

void ThreadPool::run(int64_t count, lla_task task, void* argument) noexcept {
  if (count <= 0) return;
  if (count == 1 || getpid() != process_ || busy_.exchange(true, std::memory_order_acquire)) {
    for (int64_t i = 0; i < count; ++i) task(i, 0, argument);
    return;
  }
  {
    const Lock lock(mutex_);
    count_ = count;
    task_ = task;
    argument_ = argument;
    next_.store(0, std::memory_order_relaxed);
    open_ = true;
    calls_.fetch_add(1, std::memory_order_release);
  }
  if (count - 1 < threads_ - 1) {
    for (int64_t i = 0; i < count - 1; ++i) wake_.notify_one();
  } else {
    wake_.notify_all();
  }
  take_tasks(0, count, task, argument);
  for (int i = 0; i < kSpins && joined_.load(std::memory_order_acquire) != 0; ++i) pause();
  {
    const Lock lock(mutex_);
    open_ = false;
    while (joined_.load(std::memory_order_acquire) != 0) done_.wait(mutex_);
  }
  busy_.store(false, std::memory_order_release);
}

int32_t ThreadPool::run_hook(int64_t count, lla_task task, void* argument, void* user) noexcept {
  static_cast<ThreadPool*>(user)->run(count, task, argument);
  return 0;
}

}  // namespace lla
