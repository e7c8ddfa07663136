// SPDX-License-Identifier: Apache-2.0
// Finds and opens the device plugin in the library's private folder, once per process. It is never unloaded.
#pragma once

#include "lla/status.h"
#include "plugin/plugin.h"

namespace lla {

// The CUDA plugin, or why there is none: LLA_BACKEND_MISSING (no file) or LLA_BACKEND_MISMATCH (of another build).
lla_status cuda_plugin(const Plugin** plugin, char* reason, size_t capacity) noexcept;

}  // namespace lla
