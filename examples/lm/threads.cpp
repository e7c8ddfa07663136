// SPDX-License-Identifier: Apache-2.0
// A pool in which whoever is awake takes the next task: a job does not wait for a worker that the system has not scheduled.
#include "threads.h"

#include <algorithm>

namespace lm {
namespace {

// Glances before a thread sleeps: the calls of a decoded token follow each other within microseconds, and waking takes
// longer.
constexpr int kGlances = 1000;

template <class F>
bool soon(F happened) {
  for (int i = 0; i < kGlances; ++i) {
    if (happened()) return true;
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  return false;
}

}  // namespace

Threads::Threads(int32_t count) {
  for (int32_t i = 1; i < count; ++i) workers_.emplace_back([this, i] { work(i); });
}

Threads::~Threads() {
  stop_.store(true);
  round_.fetch_add(1);
  round_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Threads::work(int32_t thread) {
  while (!stop_.load()) {
    const uint32_t seen = round_.load();
    take_tasks(thread);
    if (!soon([&] { return round_.load(std::memory_order_acquire) != seen; })) {
      round_.wait(seen);  // returns at once if there has been a job since
    }
  }
}

void Threads::take_tasks(int32_t thread) {
  while (true) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    const auto left = static_cast<uint32_t>(ticket);
    if (left == 0) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
    const uint32_t count = count_;
    task_(first_ + (count - left), thread, argument_);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) done_.notify_one();
  }
}

void Threads::run(int64_t count, lla_task task, void* argument) {
  if (count <= 1 || workers_.empty()) {
    for (int64_t i = 0; i < count; ++i) task(i, 0, argument);
    return;
  }
  constexpr int64_t kMost = 1 << 30;
  for (int64_t first = 0; first < count; first += kMost) {
    run_job(first, static_cast<uint32_t>(std::min(kMost, count - first)), task, argument);
  }
}

void Threads::run_job(int64_t first, uint32_t count, lla_task task, void* argument) {
  first_ = first;
  count_ = count;
  task_ = task;
  argument_ = argument;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store((job << 32) | count, std::memory_order_release);
  round_.fetch_add(1);
  round_.notify_all();
  take_tasks(0);
  if (soon([&] { return done_.load(std::memory_order_acquire) == count; })) return;
  for (uint32_t done = done_.load(std::memory_order_acquire); done != count; done = done_.load(std::memory_order_acquire)) {
    done_.wait(done, std::memory_order_acquire);
  }
}

lla_parallel Threads::hook() {
  lla_parallel parallel{};
  parallel.struct_size = sizeof parallel;
  parallel.max_threads = count();
  parallel.run = [](int64_t count, lla_task task, void* argument, void* user) -> int32_t {
    static_cast<Threads*>(user)->run(count, task, argument);
    return 0;
  };
  parallel.user = this;
  return parallel;
}

void Threads::for_pieces(int64_t items, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  struct Job {
    int64_t items, grain;
    const std::function<void(int64_t, int64_t)>* body;
  } job{items, grain, &body};
  run((items + grain - 1) / grain,
      [](int64_t i, int32_t, void* argument) {
        const Job& j = *static_cast<const Job*>(argument);
        (*j.body)(i * j.grain, std::min(j.items, (i + 1) * j.grain));
      },
      &job);
}

}  // namespace lm
