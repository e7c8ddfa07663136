// SPDX-License-Identifier: Apache-2.0
// The layer groups that the planner is compared with its model on: each kind of layer alone, and mixed.
#pragma once

#include <vector>

#include "core_testing.h"

namespace core_testing {

struct Group {
  const char* name;
  std::vector<LayerHistory> layers;
};

inline LayerHistory sized(LayerHistory history, int64_t heads = 1, int64_t groups = 1) {
  history.shape.heads = heads;
  history.shape.groups = groups;
  history.shape.key_dim = 2;
  history.shape.value_dim = 2;
  return history;
}

inline std::vector<Group> groups_of(int64_t grain) {
  const int64_t many = 14;
  const int64_t absorbing = 4 + log2_of(grain);  // two levels apart
  const LayerHistory scalar = sized(mixer(LLA_SCALAR_GATE, grain, many));
  const LayerHistory delta = sized(mixer(LLA_DELTA_RULE, grain, many));
  const LayerHistory linear = sized(mixer(LLA_SCALAR_GATE, grain, 0));
  const LayerHistory absorbing_scalar = sized(mixer(LLA_SCALAR_GATE, grain, absorbing, true));
  const LayerHistory absorbing_delta = sized(mixer(LLA_DELTA_RULE, grain, absorbing, true));
  return {
      {"scalar", {sized(scalar, 2, 1)}},
      {"delta", {delta, sized(delta, 2, 2)}},
      {"linear", {linear, sized(mixer(LLA_DELTA_RULE, grain, 0))}},
      {"absorbing scalar", {absorbing_scalar}},
      {"absorbing delta", {absorbing_delta}},
      {"convolution", {convolution(grain, 3, 4)}},
      {"all", {with_convolution(scalar, 2, 4), absorbing_delta, convolution(grain, 1, 2), with_convolution(linear, 2, 3)}},
      {"scalar and absorbing with convolution", {with_convolution(scalar, 1, 5), absorbing_scalar}},
  };
}

}  // namespace core_testing
