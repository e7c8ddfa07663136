// SPDX-License-Identifier: Apache-2.0
// Backward of the delta rule on halves, for calls without states: the walks of queries and the gradients of nodes. Rows that
// nodes see, and their gradients, are kept in bf16: sums over them have no common scale.
#pragma once

#include "cuda/portable/delta_rule_half.h"

namespace lla::cuda {

// As DeltaGradients.
struct DeltaHalfGradients {
  using Element = DeltaHalfScratch::Element;
  DeltaHalfScratch nodes;
  int64_t steps = 0, rows = 0, levels = 0;
  Element* x = nullptr;     // bf16 [step][row][head][key_stride]
  Element* dx = nullptr;    // bf16 [step - 1][row][head][key_stride]
  Element* seen = nullptr;  // halves [row][head][key_stride]: the gradient of step 0
  float* seen_scale = nullptr;
  Element* content = nullptr;  // [slot][head]
  float* content_scale = nullptr;
  Element* transition[2] = {};  // [slot][head], of even and odd levels
  float* transition_scale[2] = {};
  float* lambda = nullptr;  // [row][head][levels], through nodes

  LLA_HOST_DEVICE Element* x_at(int64_t step, int64_t row, int64_t head) const {
    return x + nodes.place(step * rows + row, head) * nodes.key_stride;
  }
  LLA_HOST_DEVICE Element* dx_at(int64_t step, int64_t row, int64_t head) const {
    return dx + nodes.place((step - 1) * rows + row, head) * nodes.key_stride;
  }
  LLA_HOST_DEVICE Element* content_at(int64_t slot, int64_t head) const {
    return content + nodes.place(slot, head) * nodes.content_size();
  }
  LLA_HOST_DEVICE float* content_scale_at(int64_t slot, int64_t head) const {
    return content_scale + nodes.place(slot, head);
  }
  LLA_HOST_DEVICE Element* transition_at(int level, int64_t slot, int64_t head) const {
    return transition[level & 1] + nodes.place(slot, head) * nodes.transition_size();
  }
  LLA_HOST_DEVICE float* transition_scale_at(int level, int64_t slot, int64_t head) const {
    return transition_scale[level & 1] + nodes.place(slot, head);
  }
};

int32_t launch_delta_half_walks(const DeltaInputs& in, const DeltaHalfGradients& scratch, const View& dy, void* stream);
int32_t launch_delta_half_node_gradients(const DeltaInputs& in, const DeltaHalfGradients& scratch, const View& dy,
                                         void* stream);
int32_t load_delta_half_walks();
int32_t load_delta_half_node_gradients();

}  // namespace lla::cuda
