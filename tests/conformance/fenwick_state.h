// SPDX-License-Identifier: Apache-2.0
// The canonical token-granular state of one sequence, composed in double precision from what a slot holds.
#pragma once

#include <lla/lla.h>

#include <cstdint>
#include <map>
#include <vector>

namespace conformance {

struct StateShape {
  lla_mixer mixer = LLA_SCALAR_GATE;
  int64_t heads = 1, groups = 1, key_dim = 1, value_dim = 1, grain = 64;
  int64_t levels = 0;  // 0: linear
  bool absorb = false;
  bool has_write = false;
};

// Block j (2^j tokens, bit j of the position) [H, dk, dv], every transition up to the last token applied. What a layer keeps
// as one sum (linear layers, absorbed levels) is under the key kSummed, together with the tail's blocks of those levels.
constexpr int kSummed = -1;
std::map<int, std::vector<double>> canonical_state(const lla_state* state, int64_t slot, int64_t layer_index,
                                                   const StateShape& shape);
// Whether block j belongs to the sum.
bool is_summed(const StateShape& shape, int j);

}  // namespace conformance
