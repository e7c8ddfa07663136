// SPDX-License-Identifier: Apache-2.0
// Repeats and times a piece of work.
#include "timing.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <vector>

namespace bench {
namespace {

double processor_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace

Timing measure(double seconds, const std::function<void()>& body) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < 2; ++i) body();
  std::vector<double> times;
  double processor = 0;
  const Clock::time_point start = Clock::now();
  while (times.size() < 5 ||
         (std::chrono::duration<double>(Clock::now() - start).count() < seconds && times.size() < 100000)) {
    const double processor_begin = processor_seconds();
    const Clock::time_point begin = Clock::now();
    body();
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    const double spent = processor_seconds() - processor_begin;
    processor = times.size() == 1 ? spent : std::min(processor, spent);
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), processor, static_cast<int64_t>(times.size())};
}

}  // namespace bench
