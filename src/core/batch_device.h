// SPDX-License-Identifier: Apache-2.0
// A batch's memory on a device, and bounds of what is launched with it.
#pragma once

#include <cstdint>

#include "core/batch.h"
#include "core/checked.h"

namespace lla {

// Where the arrays of a plan lie in the device's memory.
struct DeviceLayout {
  int64_t sequences = 0, nodes = 0, rows = 0, slack = 0, planned = 0, accepted = 0, request = 0;
  Size bytes = 0;

  explicit DeviceLayout(const Limits& limits);
};

// Bounds that hold for every plan of the batch with these numbers of sequences and rows. Slack ranges that are not there are
// empty ones.
void widen(const Batch* batch, BatchView* view);

}  // namespace lla
