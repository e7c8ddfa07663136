// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper in fp16, whose numbers end at 65504 and lose bits below 6e-5: the units, powers of two, in
// which nodes, their gradients and operands are. They follow from the factors and the largest elements of each block's rows,
// so that whatever is rounded stays below 2^kTop, and as near to it as what is known allows.
#pragma once

#include "cuda/common/units.h"
#include "plugin/problem.h"

namespace lla::cuda::hopper {

constexpr int kTop = 15;
constexpr int kLeastUnit = -80, kMostUnit = 80;

// Of a block and head: exponents of units.
struct alignas(8) BlockUnits {
  signed char fold = 0;    // of the keys that are folded into the block's node; linear: of the state's sums
  signed char node = 0;    // of that node
  signed char reader = 0;  // of dy of the rows that read it; linear: of the sums of its gradient
  signed char grad = 0;    // of its gradient
  // Of gradients of scores, and of values that are multiplied by the gradient of the node. Heads whose dq and dk are summed
  // up together have the largest of theirs.
  signed char scores = 0;
  signed char weights = 0;  // of what is multiplied by dy
  signed char unused[2] = {0, 0};
};

// Exponents of powers of two above the largest elements of a block's rows, q and k of a group or v and dy of a head.
struct alignas(2) BlockRange {
  signed char first = 0, second = 0;
};

// 2^(from - to): what sums in one unit are multiplied by to be in another.
__device__ __forceinline__ float unit_ratio(int from, int to) {
  const int exponent = from - to;
  return power_of_two(exponent < -126 ? -126 : exponent > 126 ? 126 : exponent);
}

// The tensors whose largest elements are looked for.
struct RangeViews {
  View q, k, v, dy;
};

}  // namespace lla::cuda::hopper
