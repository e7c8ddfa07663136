// SPDX-License-Identifier: Apache-2.0
// Life of a layer: creation in the context's memory, references.
#include "cells/layer.h"

#include <cstdio>
#include <cstring>
#include <new>

#include "cells/program.h"
#include "core/error.h"

namespace lla {

namespace {

// Says which kernels the layer got; a step that is left to the reference on another backend is worth a warning.
void log_kernels(const Layer& layer) {
  const Context& context = *layer.context;
  if (!context.log.write) return;
  const bool is_reference = std::strcmp(context.backend->name, "reference") == 0;
  for (const lla_pass pass : {LLA_PASS_FORWARD, LLA_PASS_BACKWARD}) {
    const char* names[kMaxSteps];
    const int64_t count = step_kernels(layer, pass, names);
    for (int64_t i = 0; i < count; ++i) {
      const bool fallback = !is_reference && std::strncmp(names[i], "reference.", 10) == 0;
      char line[160];
      std::snprintf(line, sizeof line, "layer: %s step %lld: %s", pass == LLA_PASS_FORWARD ? "forward" : "backward",
                    static_cast<long long>(i), names[i]);
      context.write_log(fallback ? LLA_LOG_WARNING : LLA_LOG_INFO, line);
    }
  }
}

}  // namespace

lla_status create_layer(Context* context, const lla_layer_desc& description, Layer** layer, lla_error* error) noexcept {
  *layer = nullptr;
  Layer described;
  LLA_TRY(describe_layer(context, description, &described, error));
  void* memory = context->allocate(sizeof(Layer));
  if (!memory) return fail(error, LLA_OUT_OF_MEMORY, "layer: the allocator gave no %zu bytes", sizeof(Layer));
  Layer* created = ::new (memory) Layer();
  created->context = context;
  created->description = described.description;
  created->rules = described.rules;
  created->shape = described.shape;
  created->history = described.history;
  created->stateful = described.stateful;
  retain(context);
  log_kernels(*created);
  *layer = created;
  return LLA_OK;
}

void retain(Layer* layer) noexcept {
  if (layer) layer->references.fetch_add(1, std::memory_order_relaxed);
}

void release(Layer* layer) noexcept {
  if (!layer || layer->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  Context* context = layer->context;
  layer->~Layer();
  context->release(layer, sizeof(Layer));
  release(context);
}

}  // namespace lla
