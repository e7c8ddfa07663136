// SPDX-License-Identifier: Apache-2.0
// A mutex and a condition that cannot throw, as those of the standard library may. Their calls fail for misuse alone.
#pragma once

#include <pthread.h>

namespace lla {

class Mutex {
 public:
  constexpr Mutex() = default;  // objects with static storage need no start-up code, and none at the exit
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() noexcept { pthread_mutex_lock(&mutex_); }
  void unlock() noexcept { pthread_mutex_unlock(&mutex_); }

 private:
  friend class Condition;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

// Holds a mutex for as long as it lives.
class Lock {
 public:
  explicit Lock(Mutex& mutex) noexcept : mutex_(mutex) { mutex_.lock(); }
  ~Lock() { mutex_.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  Mutex& mutex_;
};

class Condition {
 public:
  constexpr Condition() = default;
  ~Condition() { pthread_cond_destroy(&condition_); }  // waits for wakers that are still inside
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  // The caller holds the mutex, and looks again at what it waits for.
  void wait(Mutex& mutex) noexcept { pthread_cond_wait(&condition_, &mutex.mutex_); }
  void notify_one() noexcept { pthread_cond_signal(&condition_); }
  void notify_all() noexcept { pthread_cond_broadcast(&condition_); }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

}  // namespace lla
