// SPDX-License-Identifier: Apache-2.0
// The gradient slots of a batch: the last step of planning.
#pragma once

#include "core/batch.h"

namespace lla {

// Whether `gradient` is a state of gradients of `state`.
lla_status check_gradient_state(const State* state, const State& gradient, lla_error* error) noexcept;
// Looks final gradients up and gives the slots of initial gradients their shape, all contents zero: the same position, start
// and nodes as the history, in blocks of their own. Either everything changes or, on failure, nothing.
lla_status plan_gradients(Batch* batch, const lla_rows& rows, void* stream, lla_error* error) noexcept;

}  // namespace lla
