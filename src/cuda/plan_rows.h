// SPDX-License-Identifier: Apache-2.0
// Plans and commits on the device, as the plugin's table has them.
#pragma once

#include "plugin/device_plan.h"

namespace lla::cuda {

int32_t put_records(SlotImage* records, const int32_t* slots, const SlotImage* images, int64_t count, void* stream);
int32_t plan(const PlanRequest* request, void* stream);
int32_t commit(const CommitRequest* request, void* stream);
int32_t copy_forks(const CommitRequest* request, const SlotMemory* layer, void* stream);
int32_t load_plan_kernels();

}  // namespace lla::cuda
