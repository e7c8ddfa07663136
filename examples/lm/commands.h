// SPDX-License-Identifier: Apache-2.0
// The sub-commands. Each takes the words after its name and returns the exit code; failures are thrown as Error.
#pragma once

#include <cstdint>
#include <string>

#include "handles.h"
#include "threads.h"

namespace lm {

int train_command(int count, char** words);
int eval_command(int count, char** words);
int generate_command(int count, char** words);

// Threads and context of a command. The context runs lla's tasks on the threads.
struct Machine {
  explicit Machine(int64_t thread_count, lla_backend backend = LLA_BACKEND_CPU);
  Threads threads;
  Context context;
};
// "cpu (avx2, 2 threads)"
std::string describe_machine(lla_context* context);
int64_t default_threads();

}  // namespace lm
