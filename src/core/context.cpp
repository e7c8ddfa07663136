// SPDX-License-Identifier: Apache-2.0
// Creating and releasing contexts: choice of the backend and of the instruction set, hooks and their defaults.
#include "core/context.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/checked.h"
#include "core/error.h"
#include "core/plugin_loader.h"
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

// The plugin, if it has a device of this number; else why not.
lla_status find_device(int32_t number, const Plugin** plugin, char* reason, size_t capacity) {
  LLA_TRY(cuda_plugin(plugin, reason, capacity));
  int32_t devices = 0;
  LLA_TRY((*plugin)->count_devices(&devices, reason, capacity));
  if (number < devices) return LLA_OK;
  std::snprintf(reason, capacity, "cuda: there is no device %d, only %d", static_cast<int>(number),
                static_cast<int>(devices));
  return LLA_NO_DEVICE;
}

lla_status open_device(Context* context, int32_t number, char* reason, size_t capacity) {
  const Plugin* plugin = nullptr;
  LLA_TRY(find_device(number, &plugin, reason, capacity));
  LLA_TRY(plugin->open_device(number, context->device_name, sizeof context->device_name, reason, capacity));
  context->kind = LLA_BACKEND_CUDA;
  context->backend = plugin->backend;
  context->device = plugin;
  context->device_number = number;
  context->process = static_cast<int32_t>(getpid());
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

DeviceScope::DeviceScope(const Context* context) noexcept : context_(context) {
  if (!context_->device) return;
  status_ = context_->process != static_cast<int32_t>(getpid())
                ? LLA_FORKED
                : context_->device->enter(context_->device_number, &previous_);
}

DeviceScope::~DeviceScope() {
  if (context_->device && status_ == LLA_OK) context_->device->leave(previous_);
}

lla_status DeviceScope::check(lla_error* error) const noexcept {
  if (status_ == LLA_FORKED)
    return fail(error, status_, "context: its device belongs to the process that made it, not to a fork of it");
  return device_status(*context_, status_, "the device cannot be used", error);
}

lla_status device_status(const Context& context, int32_t status, const char* what, lla_error* error) noexcept {
  if (status == LLA_OK) return LLA_OK;
  char text[120] = "";
  context.device->describe_error(text, sizeof text);
  return fail(error, status, "%s: %s: %s", context.device->name, what, text);
}

lla_status copy_memory(const Context& context, void* to, const void* from, int64_t bytes, void* stream,
                       lla_error* error) noexcept {
  if (context.device) {
    // Memory that the device does not reach would have to be there, unchanged, whenever the graph runs.
    if (!context.device->reaches(to) || !context.device->reaches(from)) LLA_TRY(check_capture(context, stream, error));
    return device_status(context, context.device->copy(to, from, static_cast<size_t>(bytes), stream), "copy", error);
  }
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  return LLA_OK;
}

lla_status clear_memory(const Context& context, void* at, int64_t bytes, void* stream, lla_error* error) noexcept {
  if (context.device)
    return device_status(context, context.device->clear(at, static_cast<size_t>(bytes), stream), "clear", error);
  if (bytes > 0) std::memset(at, 0, static_cast<size_t>(bytes));
  return LLA_OK;
}

lla_status wait_for(const Context& context, void* stream, lla_error* error) noexcept {
  LLA_TRY(check_capture(context, stream, error));
  return context.device ? device_status(context, context.device->wait(stream), "wait", error) : LLA_OK;
}

lla_status check_capture(const Context& context, void* stream, lla_error* error) noexcept {
  if (!context.device || !context.device->is_capturing(stream)) return LLA_OK;
  return fail(error, LLA_CAPTURE_UNSAFE, "stream: it is being captured into a graph, and this call would wait for it");
}

void* allocate_memory(const Context& context, size_t bytes) noexcept {
  return context.device ? context.device->allocate(bytes) : context.allocate(bytes);
}

void release_memory(const Context& context, void* memory, size_t bytes) noexcept {
  if (!memory) return;
  if (context.device)
    context.device->release(memory);
  else
    context.release(memory, bytes);
}

bool reaches_memory(const Context& context, const void* memory) noexcept {
  return !context.device || !memory || context.device->reaches(memory);
}

lla_status backend_available(lla_backend backend, char* reason, size_t capacity) noexcept {
  if (backend == LLA_BACKEND_CUDA) {
    const Plugin* plugin = nullptr;
    return find_device(0, &plugin, reason, capacity);
  }
  if (backend >= LLA_BACKEND_AUTO && backend <= LLA_BACKEND_REFERENCE) return LLA_OK;
  std::snprintf(reason, capacity, "there is no backend of this number");
  return LLA_INVALID_ARGUMENT;
}

lla_status create_context(const lla_context_options& options, Context** context, lla_error* error) noexcept {
  LLA_TRY(check_options(options, error));
  int32_t isa = LLA_ISA_DEFAULT;
  if (options.backend == LLA_BACKEND_AUTO || options.backend == LLA_BACKEND_CPU) LLA_TRY(choose_isa(options, &isa, error));

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
  } else if (options.backend != LLA_BACKEND_CPU) {
    const lla_status status = open_device(made, options.device, made->fallback_reason, sizeof made->fallback_reason);
    if (status != LLA_OK && options.backend == LLA_BACKEND_CUDA) {
      char reason[sizeof made->fallback_reason];
      std::memcpy(reason, made->fallback_reason, sizeof reason);
      destroy(made);
      return fail(error, status, "options->backend: %s", reason);
    }
  }
  if (!made->backend) {
    made->kind = LLA_BACKEND_CPU;
    made->backend = &cpu_backend(isa);
  }

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
