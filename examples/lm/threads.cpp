// SPDX-License-Identifier: Apache-2.0
// A pool in which every worker takes part in every job and takes the next task until none is left.
#include "threads.h"

#include <algorithm>

namespace lm {

Threads::Threads(int32_t count) {
  for (int32_t i = 1; i < count; ++i) workers_.emplace_back([this, i] { work(i); });
}

Threads::~Threads() {
  stop_ = true;
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Threads::work(int32_t thread) {
  uint32_t seen = 0;
  while (true) {
    round_.wait(seen, std::memory_order_acquire);
    seen = round_.load(std::memory_order_acquire);
    if (stop_) return;
    take_tasks(thread);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
  }
}

void Threads::take_tasks(int32_t thread) {
  while (true) {
    const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= tasks_) return;
    task_(i, thread, argument_);
  }
}

void Threads::run(int64_t count, lla_task task, void* argument) {
  if (count <= 1 || workers_.empty()) {
    for (int64_t i = 0; i < count; ++i) task(i, 0, argument);
    return;
  }
  tasks_ = count;
  task_ = task;
  argument_ = argument;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int32_t>(workers_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  take_tasks(0);
  for (int32_t left = busy_.load(std::memory_order_acquire); left != 0; left = busy_.load(std::memory_order_acquire)) {
    busy_.wait(left, std::memory_order_acquire);
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
  run((items + grain - 1) / grain, [](int64_t i, int32_t, void* argument) {
    const Job& j = *static_cast<const Job*>(argument);
    (*j.body)(i * j.grain, std::min(j.items, (i + 1) * j.grain));
  }, &job);
}

}  // namespace lm
