// SPDX-License-Identifier: Apache-2.0
// Times of a piece of work that is repeated.
#pragma once

#include <cstdint>
#include <functional>

namespace bench {

struct Timing {
  double median = 0, fastest = 0;  // seconds by the clock
  double processor = 0;            // least processor time of a run, all threads of the process together
  int64_t runs = 0;
};

// Two runs of warm-up; at least 5 runs, then until `seconds` are over.
Timing measure(double seconds, const std::function<void()>& body);

}  // namespace bench
