// SPDX-License-Identifier: Apache-2.0
// Layer: a checked description. Every kind is a short program of backend steps, see program.h.
#pragma once

#include <atomic>
#include <cstdint>

#include "cells/rules.h"
#include "core/context.h"
#include "core/state.h"
#include "lla/layer.h"

namespace lla {

struct Layer {
  std::atomic<int64_t> references{1};
  Context* context = nullptr;
  lla_layer_desc description{};  // every default filled in, the forms of a block's cell set
  LayerRules rules;              // its tensors
  MixerShape shape;              // mixer, cell, block
  LayerHistory history;          // what a state keeps for it
  bool stateful = false;         // mixer, cell, block, convolution
};

// Checks the description, fills the defaults in, and makes sure that the backend has a kernel for each step.
lla_status describe_layer(Context* context, const lla_layer_desc& description, Layer* layer, lla_error* error) noexcept;
lla_status create_layer(Context* context, const lla_layer_desc& description, Layer** layer, lla_error* error) noexcept;
void retain(Layer* layer) noexcept;
void release(Layer* layer) noexcept;

}  // namespace lla
