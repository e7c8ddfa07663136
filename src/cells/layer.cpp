// SPDX-License-Identifier: Apache-2.0
// Life of a layer: creation in the context's memory, references.
#include "cells/layer.h"

#include <new>

#include "core/error.h"

namespace lla {

lla_status create_layer(Context* context, const lla_layer_desc& description, Layer** layer, lla_error* error) noexcept {
  *layer = nullptr;
  Layer described;
  LLA_TRY(describe_layer(context, description, &described, error));
  void* memory = context->allocate(sizeof(Layer));
  if (!memory) return fail(error, LLA_OUT_OF_MEMORY, "layer: the allocator gave no %zu bytes", sizeof(Layer));
  Layer* created = ::new (memory) Layer();
  created->context = context;
  created->description = described.description;
  created->shape = described.shape;
  created->history = described.history;
  created->stateful = described.stateful;
  retain(context);
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
