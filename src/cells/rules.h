// SPDX-License-Identifier: Apache-2.0
// Which tensors a layer takes: one rule per role, from the checked description.
#pragma once

#include <cstdint>

#include "lla/layer.h"

namespace lla {

constexpr int32_t kFirstWeightRole = LLA_WEIGHT_CONV;
constexpr int32_t kIoRoles = LLA_LAMBDA_OUT + 1;
constexpr int32_t kWeightRoles = LLA_WEIGHT_PROJ_BIAS - kFirstWeightRole + 1;
constexpr int kMaxIoRules = 10;
constexpr int kMaxWeightRules = 20;

// A tensor over rows: [N, dims...], or [B, T, dims...] in a uniform batch.
struct IoRule {
  lla_role role = 0;
  bool output = false;
  bool required = false;
  bool spare_columns = false;  // the last axis may be longer than dims says
  int rank = 1;                // axes after the rows: 1 or 2
  int64_t dims[2] = {0, 0};
  int64_t head_dim = 1;  // rank 1: distance of two heads within a row
};

struct WeightRule {
  lla_role role = 0;
  bool required = false;
  bool convolution = false;  // [channels, 1, W] is accepted too
  int rank = 1;              // 1 or 2
  int64_t dims[2] = {0, 0};
  int64_t other_dim = 0;  // rank 1: another accepted length; 0: none
};

struct LayerRules {
  IoRule io[kMaxIoRules];
  int io_count = 0;
  WeightRule weights[kMaxWeightRules];
  int weight_count = 0;
};

void fill_rules(const lla_layer_desc& description, LayerRules* rules) noexcept;
// "LLA_Q"; "a role" for a number that is none.
const char* role_name(lla_role role) noexcept;
inline bool is_weight_role(lla_role role) { return role >= kFirstWeightRole; }

}  // namespace lla
