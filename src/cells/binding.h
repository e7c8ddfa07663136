// SPDX-License-Identifier: Apache-2.0
// Binding: turns the caller's arrays of (role, tensor) into views and matrices, checked against the layer and the batch.
#pragma once

#include "cells/layer.h"
#include "core/batch.h"

namespace lla {

// Tensors by role; what was not given is not present.
struct Tensors {
  View io[kIoRoles];
  Matrix weights[kWeightRoles];
  bool skip_per_channel = false;  // LLA_WEIGHT_SKIP is [H * dv], else [H]
  bool norm_per_group = false;    // LLA_WEIGHT_NORM is [norm_group], else [H * dv]

  View& view(lla_role role) { return io[role]; }
  const View& view(lla_role role) const { return io[role]; }
  Matrix& weight(lla_role role) { return weights[role - kFirstWeightRole]; }
  const Matrix& weight(lla_role role) const { return weights[role - kFirstWeightRole]; }
};

// Everything that one call reads and writes.
struct CallTensors {
  Tensors values;            // inputs, weights and, for forward, outputs
  Tensors output_gradients;  // backward: by role of the output
  Tensors gradients;         // backward: by role of the input or weight
};

// `memory`: of this layer in the batch's state, or null. Nothing is written but `tensors`.
lla_status bind_forward(const Layer& layer, const Batch& batch, const SlotMemory* memory, const lla_forward_args& arguments,
                        CallTensors* tensors, lla_error* error) noexcept;
lla_status bind_backward(const Layer& layer, const Batch& batch, const SlotMemory* memory,
                         const lla_backward_args& arguments, CallTensors* tensors, lla_error* error) noexcept;

}  // namespace lla
