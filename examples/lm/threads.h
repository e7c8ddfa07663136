// SPDX-License-Identifier: Apache-2.0
// The program's own threads. lla runs its tasks on them through the thread hook, and the loops of the example run on them too,
// so that there is one pool and not two.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include <lla/lla.h>

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
  // Calls body(begin, end) for pieces of `grain` items of 0 ... items - 1. The pieces do not depend on the number of threads.
  void for_pieces(int64_t items, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

 private:
  void run(int64_t count, lla_task task, void* argument);
  void work(int32_t thread);
  void take_tasks(int32_t thread);

  std::vector<std::thread> workers_;
  std::atomic<uint32_t> round_{0};  // grows with each job; the workers sleep on it
  std::atomic<int32_t> busy_{0};    // workers that have not finished the job yet
  std::atomic<int64_t> next_{0};
  int64_t tasks_ = 0;
  lla_task task_ = nullptr;
  void* argument_ = nullptr;
  bool stop_ = false;
};

}  // namespace lm
