// SPDX-License-Identifier: Apache-2.0
// One product with a weight, y = x W^T, through the public interface.
#pragma once

#include <lla/lla.h>

#include <cstdint>

#include "timing.h"

namespace bench {

// Times an LLA_LAYER_PROJECTION of `rows` rows with a weight [outputs][inputs], all tensors of type `dtype`.
Timing measure_projection(lla_context* context, lla_dtype dtype, int64_t rows, int64_t outputs, int64_t inputs,
                          double seconds);

}  // namespace bench
