// SPDX-License-Identifier: Apache-2.0
// The sub-commands. Each takes the words after its name and returns the exit code; failures are thrown as Error.
#pragma once

#include <cstdint>
#include <string>

#include "arguments.h"
#include "handles.h"
#include "threads.h"

namespace lm {

int train_command(int count, char** words);
int eval_command(int count, char** words);
int generate_command(int count, char** words);

// Threads and context of a command, from its options --threads and --device. On the CPU lla's tasks run on the threads, too.
struct Machine {
  static void add_options(Arguments* arguments);
  explicit Machine(const Arguments& arguments);
  Threads threads;
  Context context;
};
// "cpu (avx2, 2 threads)"
std::string describe_machine(lla_context* context);

}  // namespace lm
