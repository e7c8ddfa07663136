// SPDX-License-Identifier: Apache-2.0
// context.h: creating contexts and asking them.
#include "lla/context.h"

#include <cstring>

#include "capi/handles.h"
#include "capi/query.h"
#include "capi/struct_size.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

using namespace lla;
using namespace lla::capi;

namespace {

constexpr size_t kCpuNameBytes = 64;

// The processor's own name; on architectures that do not tell it, the architecture's.
void read_cpu_name(char (&name)[kCpuNameBytes]) noexcept {
  std::memset(name, 0, sizeof name);
#if defined(__x86_64__) || defined(__i386__)
  unsigned words[4];
  if (__get_cpuid(0x80000000u, &words[0], &words[1], &words[2], &words[3]) && words[0] >= 0x80000004u) {
    for (unsigned leaf = 0; leaf < 3; ++leaf) {
      __get_cpuid(0x80000002u + leaf, &words[0], &words[1], &words[2], &words[3]);
      std::memcpy(name + leaf * sizeof words, words, sizeof words);
    }
    const char* first = name;
    while (*first == ' ') ++first;
    std::memmove(name, first, std::strlen(first) + 1);
    size_t length = std::strlen(name);
    while (length > 0 && name[length - 1] == ' ') name[--length] = 0;
  }
#endif
  if (name[0] == 0) {
#if defined(__x86_64__)
    std::strcpy(name, "x86_64 processor");
#elif defined(__aarch64__)
    std::strcpy(name, "aarch64 processor");
#else
    std::strcpy(name, "processor");
#endif
  }
}

}  // namespace

lla_status lla_context_create(const lla_context_options* options, lla_context** context, lla_error* error) {
  LLA_REQUIRE(context);
  lla_context_options known = LLA_CONTEXT_OPTIONS_INIT;
  lla_allocator allocator;
  lla_parallel parallel;
  lla_log log;
  if (options) {
    LLA_TRY(read_struct(options, __func__, "options", &known, error));
    if (known.allocator) {
      LLA_TRY(read_struct(known.allocator, __func__, "options->allocator", &allocator, error));
      known.allocator = &allocator;
    }
    if (known.parallel) {
      LLA_TRY(read_struct(known.parallel, __func__, "options->parallel", &parallel, error));
      known.parallel = &parallel;
    }
    if (known.log) {
      LLA_TRY(read_struct(known.log, __func__, "options->log", &log, error));
      known.log = &log;
    }
  }
  Context* created = nullptr;
  LLA_TRY(create_context(known, &created, error));
  *context = wrap(created);
  return LLA_OK;
}

lla_context* lla_context_retain(lla_context* context) {
  if (context) retain(unwrap(context));
  return context;
}

void lla_context_release(lla_context* context) {
  if (context) release(unwrap(context));
}

lla_status lla_context_query(const lla_context* context, lla_context_key key, void* value, size_t* size, lla_error* error) {
  LLA_REQUIRE(context);
  LLA_REQUIRE(size);
  const Context& known = *unwrap(context);
  switch (key) {
    case LLA_CONTEXT_BACKEND_NAME:
      return answer_text(known.backend->name, value, size, __func__, error);
    case LLA_CONTEXT_ISA_NAME:
      return answer_text(known.backend->isa, value, size, __func__, error);
    case LLA_CONTEXT_THREADS:
      return answer_number<int32_t>(known.threads(), value, size, __func__, error);
    case LLA_CONTEXT_DETERMINISM:
      return answer_number<int32_t>(known.determinism, value, size, __func__, error);
    case LLA_CONTEXT_FALLBACK_REASON:
      return answer_text(known.fallback_reason, value, size, __func__, error);
    case LLA_CONTEXT_DEVICE_NAME: {
      if (known.device) return answer_text(known.device_name, value, size, __func__, error);
      char name[kCpuNameBytes];
      read_cpu_name(name);
      return answer_text(name, value, size, __func__, error);
    }
    default:
      return fail(error, LLA_INVALID_ARGUMENT, "%s: key %d is unknown", __func__, static_cast<int>(key));
  }
}

lla_status lla_backend_available(lla_backend backend, char* reason, size_t capacity) {
  char text[200] = "";
  const lla_status status = backend_available(backend, text, sizeof text);
  if (reason && capacity > 0) {
    const size_t length = std::strlen(text) < capacity ? std::strlen(text) : capacity - 1;
    std::memcpy(reason, text, length);
    reason[length] = 0;
  }
  return status;
}
