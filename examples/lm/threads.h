// SPDX-License-Identifier: Apache-2.0
// The program's own threads. lla runs its tasks on them through the thread hook, and the loops of the example run on them
// too, so that there is one pool and not two.
#pragma once

#include <lla/lla.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace lm {

class Threads {
 public:
  explicit Threads(int32_t count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int32_t count() const { return static_cast<int32_t>(workers_.size()) + 1; }
  // The hook for lla_context_options::parallel; it refers to this object.
  lla_parallel hook();
  // Calls body(begin, end) for pieces of `grain` items of 0 ... items - 1. The pieces do not depend on the number of
  // threads.
  void for_pieces(int64_t items, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

 private:
  void run(int64_t count, lla_task task, void* argument);
  void run_job(int64_t first, uint32_t count, lla_task task, void* argument);
  void work(int32_t thread);
  void take_tasks(int32_t thread);

  std::vector<std::thread> workers_;
  // Number of the job in the upper half, tasks that nobody has taken yet in the lower. Taking a task is one exchange that
  // fails if the job has changed; the fields below cannot change while a taken task is not done.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<uint32_t> done_{0};
  std::atomic<uint32_t> round_{0};  // what sleeping workers watch
  std::atomic<bool> stop_{false};
  int64_t first_ = 0;
  uint32_t count_ = 0;
  lla_task task_ = nullptr;
  void* argument_ = nullptr;
};

}  // namespace lm
