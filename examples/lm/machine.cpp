// SPDX-License-Identifier: Apache-2.0
// Threads and context of a command.
#include <algorithm>
#include <thread>

#include "commands.h"

namespace lm {
namespace {

Context context_on(Threads& threads, lla_backend backend) {
  const lla_parallel hook = threads.hook();
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = backend;
  options.parallel = &hook;
  return make_context(options);
}

std::string context_text(lla_context* context, lla_context_key key) {
  char text[200] = {};
  size_t size = sizeof text;
  LM_CALL(lla_context_query, context, key, static_cast<void*>(text), &size);
  return text;
}

}  // namespace

Machine::Machine(int64_t thread_count, lla_backend backend)
    : threads(static_cast<int32_t>(thread_count)), context(context_on(threads, backend)) {}

std::string describe_machine(lla_context* context) {
  int32_t threads = 0;
  size_t size = sizeof threads;
  LM_CALL(lla_context_query, context, LLA_CONTEXT_THREADS, static_cast<void*>(&threads), &size);
  return context_text(context, LLA_CONTEXT_BACKEND_NAME) + " (" + context_text(context, LLA_CONTEXT_ISA_NAME) + ", " +
         std::to_string(threads) + (threads == 1 ? " thread)" : " threads)");
}

int64_t default_threads() { return std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 256); }

}  // namespace lm
