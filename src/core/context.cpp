// SPDX-License-Identifier: Apache-2.0
// Creating and releasing contexts: choice of the backend and of the instruction set, hooks and their defaults.
#include "core/context.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/checked.h"
#include "core/error.h"
#include "core/thread_pool.h"

namespace lla {

namespace {

constexpr int32_t kMostThreads = 4096;

void* default_allocate(size_t bytes, size_t alignment, void*) {
  void* memory = nullptr;
  return posix_memalign(&memory, alignment, bytes) == 0 ? memory : nullptr;
}

void default_release(void* memory, size_t, size_t, void*) { std::free(memory); }

int32_t run_serially(int64_t count, lla_task task, void* argument, void*) {
  for (int64_t i = 0; i < count; ++i) task(i, 0, argument);
  return 0;
}

// The instruction set that LLA_MAX_ISA names; 0: none (not set, unknown, or a set-user-id process).
int32_t isa_of_environment() {
  const char* text = secure_getenv("LLA_MAX_ISA");
  if (!text) return LLA_ISA_DEFAULT;
  if (std::strcmp(text, "baseline") == 0) return LLA_ISA_BASELINE;
  if (std::strcmp(text, "avx2") == 0) return LLA_ISA_AVX2;
  if (std::strcmp(text, "avx512") == 0) return LLA_ISA_AVX512;
  if (std::strcmp(text, "neon") == 0) return LLA_ISA_NEON;
  return LLA_ISA_DEFAULT;
}

// Whether a CPU whose best instruction set is `best` has `isa`.
bool has_isa(int32_t best, int32_t isa) {
  if (isa == LLA_ISA_BASELINE) return true;
  return best == LLA_ISA_NEON ? isa == LLA_ISA_NEON : isa <= best;
}

lla_status check_options(const lla_context_options& options, lla_error* error) {
  if (options.backend < LLA_BACKEND_AUTO || options.backend > LLA_BACKEND_REFERENCE)
    return fail(error, LLA_INVALID_ARGUMENT, "options->backend: there is no backend %d", static_cast<int>(options.backend));
  if (options.device < 0)
    return fail(error, LLA_INVALID_ARGUMENT, "options->device is negative (%d)", static_cast<int>(options.device));
  if (options.isa < LLA_ISA_DEFAULT || options.isa > LLA_ISA_NEON)
    return fail(error, LLA_INVALID_ARGUMENT, "options->isa: there is no instruction set %d", static_cast<int>(options.isa));
  if (options.determinism < LLA_DETERMINISM_DEFAULT || options.determinism > LLA_DETERMINISM_SPLIT_INVARIANT)
    return fail(error, LLA_INVALID_ARGUMENT, "options->determinism: there is no promise %d",
                static_cast<int>(options.determinism));
  if (options.threads < 0 || options.threads > kMostThreads)
    return fail(error, LLA_INVALID_ARGUMENT, "options->threads is %d, not 0 ... %d", static_cast<int>(options.threads),
                static_cast<int>(kMostThreads));
  if (options.reserved != 0) return fail(error, LLA_INVALID_ARGUMENT, "options->reserved is not 0");
  if (const lla_allocator* hook = options.allocator) {
    if (!hook->allocate || !hook->release)
      return fail(error, LLA_INVALID_ARGUMENT, "options->allocator lacks %s", hook->allocate ? "release" : "allocate");
  }
  if (const lla_parallel* hook = options.parallel) {
    if (!hook->run) return fail(error, LLA_INVALID_ARGUMENT, "options->parallel lacks run");
    if (hook->max_threads < 1)
      return fail(error, LLA_INVALID_ARGUMENT, "options->parallel->max_threads is %d, less than 1",
                  static_cast<int>(hook->max_threads));
    if (hook->reserved != 0) return fail(error, LLA_INVALID_ARGUMENT, "options->parallel->reserved is not 0");
  }
  if (const lla_log* hook = options.log) {
    if (!hook->write) return fail(error, LLA_INVALID_ARGUMENT, "options->log lacks write");
    if (hook->level < LLA_LOG_ERROR || hook->level > LLA_LOG_INFO)
      return fail(error, LLA_INVALID_ARGUMENT, "options->log->level: there is no level %d", static_cast<int>(hook->level));
    if (hook->reserved != 0) return fail(error, LLA_INVALID_ARGUMENT, "options->log->reserved is not 0");
  }
  if (options.determinism == LLA_DETERMINISM_SPLIT_INVARIANT)
    return fail(error, LLA_UNSUPPORTED, "options->determinism: no backend offers LLA_DETERMINISM_SPLIT_INVARIANT yet");
  if (options.backend == LLA_BACKEND_CUDA)
    return fail(error, LLA_BACKEND_MISSING, "options->backend: cuda: the plugin is not installed");
  return LLA_OK;
}

// The CPU backend's instruction set: what was asked for, lowered by the environment.
lla_status choose_isa(const lla_context_options& options, int32_t* isa, lla_error* error) {
  const int32_t best = cpu_isa();
  if (options.isa != LLA_ISA_DEFAULT && !has_isa(best, options.isa))
    return fail(error, LLA_UNSUPPORTED, "options->isa: this CPU has %s at most", isa_name(best));
  *isa = options.isa == LLA_ISA_DEFAULT ? best : options.isa;
  const int32_t cap = isa_of_environment();
  if (cap != LLA_ISA_DEFAULT && has_isa(best, cap) && cap < *isa) *isa = cap;
  return LLA_OK;
}

void destroy(Context* context) {
  if (context->pool) context->pool->destroy();
  const lla_allocator allocator = context->allocator;
  context->~Context();
  allocator.release(context, sizeof(Context), static_cast<size_t>(kAlignment), allocator.user);
}

}  // namespace

void* Context::allocate(size_t bytes) const noexcept {
  return allocator.allocate(bytes ? bytes : 1, static_cast<size_t>(kAlignment), allocator.user);
}

void Context::release(void* memory, size_t bytes) const noexcept {
  if (memory) allocator.release(memory, bytes ? bytes : 1, static_cast<size_t>(kAlignment), allocator.user);
}

void Context::write_log(lla_log_level level, const char* text) const noexcept {
  if (log.write && level <= log.level) log.write(level, text, log.user);
}

lla_status create_context(const lla_context_options& options, Context** context, lla_error* error) noexcept {
  LLA_TRY(check_options(options, error));
  int32_t isa = LLA_ISA_DEFAULT;
  if (options.backend != LLA_BACKEND_REFERENCE) LLA_TRY(choose_isa(options, &isa, error));

  lla_allocator allocator = {sizeof(lla_allocator), default_allocate, default_release, nullptr};
  if (options.allocator) allocator = *options.allocator;
  void* memory = allocator.allocate(sizeof(Context), static_cast<size_t>(kAlignment), allocator.user);
  if (!memory) return fail(error, LLA_OUT_OF_MEMORY, "no memory for the context");
  Context* made = ::new (memory) Context;
  made->allocator = allocator;
  if (options.log) made->log = *options.log;
  if (options.backend == LLA_BACKEND_REFERENCE) {
    made->kind = LLA_BACKEND_REFERENCE;
    made->backend = &reference_backend();
  } else {
    made->kind = LLA_BACKEND_CPU;
    made->backend = &cpu_backend(isa);
  }
  if (options.backend == LLA_BACKEND_AUTO)
    std::snprintf(made->fallback_reason, sizeof made->fallback_reason, "cuda: the plugin is not installed");

  if (options.parallel) {
    made->parallel = *options.parallel;
  } else if (options.threads > 1) {
    const lla_status status = ThreadPool::create(made, options.threads, &made->pool, error);
    if (status != LLA_OK) {
      destroy(made);
      return status;
    }
    made->parallel = {sizeof(lla_parallel), options.threads, 0, ThreadPool::run_hook, made->pool};
  } else {
    made->parallel = {sizeof(lla_parallel), 1, 0, run_serially, nullptr};
  }

  if (made->fallback_reason[0]) made->write_log(LLA_LOG_WARNING, made->fallback_reason);
  char line[96];
  std::snprintf(line, sizeof line, "backend %s, instruction set %s, threads %d", made->backend->name, made->backend->isa,
                static_cast<int>(made->threads()));
  made->write_log(LLA_LOG_INFO, line);
  *context = made;
  return LLA_OK;
}

void retain(Context* context) noexcept { context->references.fetch_add(1, std::memory_order_relaxed); }

void release(Context* context) noexcept {
  if (context->references.fetch_sub(1, std::memory_order_acq_rel) == 1) destroy(context);
}

}  // namespace lla
