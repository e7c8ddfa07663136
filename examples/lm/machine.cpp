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

lla_backend backend_of(const Arguments& a) {
  const std::string device = a.text("device");
  if (device == "cpu") return LLA_BACKEND_CPU;
  if (device == "cuda") return LLA_BACKEND_CUDA;
  throw Error("--device must be cpu or cuda, not '" + device + "'");
}

int64_t threads_of(const Arguments& a) {
  if (a.given("threads")) return a.integer("threads", 1, 1024);
  return std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 256);
}

}  // namespace

void Machine::add_options(Arguments* arguments) {
  arguments->option("threads", "N", "", "threads (default: all cores)");
  arguments->option("device", "NAME", "cpu", "cpu or cuda");
}

Machine::Machine(const Arguments& arguments)
    : threads(static_cast<int32_t>(threads_of(arguments))), context(context_on(threads, backend_of(arguments))) {}

std::string describe_machine(lla_context* context) {
  int32_t threads = 0;
  size_t size = sizeof threads;
  LM_CALL(lla_context_query, context, LLA_CONTEXT_THREADS, static_cast<void*>(&threads), &size);
  const bool device = has_device_memory(context);
  return context_text(context, LLA_CONTEXT_BACKEND_NAME) + " (" +
         context_text(context, device ? LLA_CONTEXT_DEVICE_NAME : LLA_CONTEXT_ISA_NAME) + ", " + std::to_string(threads) +
         (threads == 1 ? " thread)" : " threads)");
}

}  // namespace lm
