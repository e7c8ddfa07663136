// SPDX-License-Identifier: Apache-2.0
// What the machine can do: multiply-adds in registers and reads of memory.
#pragma once

#include <string>

#include "threads.h"

namespace bench {

// FLOP/s of independent fp32 multiply-adds in registers on all threads, with the vectors of the instruction
// set of that name (LLA_CONTEXT_ISA_NAME); 0 if this program has no such loop.
double measure_multiply_add_peak(lm::Threads& threads, const std::string& isa, double seconds);
// Bytes per second of a loop that all threads run over memory far larger than the caches.
double measure_memory_peak(lm::Threads& threads, const std::string& isa, double seconds);

}  // namespace bench
