// SPDX-License-Identifier: Apache-2.0
// A state's records on a device, and what the host knows of slots whose commits happened there.
#include "core/error.h"
#include "core/state.h"

namespace lla {

lla_status State::check_current(int64_t slot, const char* name, lla_error* error) const noexcept {
  if (is_current(slot)) return LLA_OK;
  return fail(error, LLA_BUSY, "%s: commits of slot %lld on the device are not settled: lla_state_settle() comes first",
              name, static_cast<long long>(slot));
}

uint64_t State::begin_commit(bool known) noexcept {
  if (!known) {
    unsettled_unknown_.fetch_add(1, std::memory_order_relaxed);
    unknown_commits_.fetch_add(1, std::memory_order_relaxed);
  }
  return commits_.fetch_add(1, std::memory_order_relaxed) + 1;
}

void State::end_settle(bool known) noexcept {
  if (!known) unsettled_unknown_.fetch_sub(1, std::memory_order_relaxed);
  settled_.fetch_add(1, std::memory_order_relaxed);
}

void State::position_range(int64_t slot, int64_t* low, int64_t* high) const noexcept {
  const SlotRecord& record = records_[slot];
  *low = 0;
  *high = plan_.max_length;
  if (record.arrivals > 0 || unsettled_unknown_.load(std::memory_order_relaxed) > 0) return;
  *low = record.image.position;
  *high = record.image.position + record.pending;
}

lla_status State::put_records(const int32_t* slots, const SlotImage* images, int count, void* stream,
                              lla_error* error) noexcept {
  const int32_t status = context_->device->put_records(device_records_, slots, images, count, stream);
  if (status == LLA_OK) return LLA_OK;
  for (int i = 0; i < count; ++i) records_[slots[i]].device_version = records_[slots[i]].version - 1;
  return device_status(*context_, status, "the records of slots cannot be sent", error);
}

}  // namespace lla
