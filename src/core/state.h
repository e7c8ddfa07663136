// SPDX-License-Identifier: Apache-2.0
// State of a layer group: records of slots, pools of blocks, reference counts. No arithmetic on contents; see slot.h for how
// they lie in memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/context.h"
#include "lla/state.h"
#include "plugin/slot.h"

namespace lla {

// What the state needs to know about one layer of its group.
struct LayerHistory {
  bool has_mixer = false;
  MixerShape shape;            // if has_mixer
  bool has_write = false;      // mixer with a write strength (the tail keeps it in any case)
  int64_t conv_channels = 0;   // all streams together, q, k, v; 0: no convolution
  int64_t conv_width = 0;
  int64_t grain = 64;
  int32_t inner_dtype = LLA_F32;  // narrowest tail type that loses nothing (LLA_DTYPE_DEFAULT for a mixer: any)
};

// Sizes that follow from the group and the description.
struct StatePlan {
  lla_state_kind kind = LLA_STATE_VALUE;
  int64_t layers = 0, slots = 0, max_length = 0, max_draft = 0, node_blocks = 0;
  int64_t grain = 64;
  int32_t node_dtype = LLA_F32, tail_dtype = LLA_F32;
  int64_t node_levels = 0;     // separate levels that max_length can reach in any layer
  bool uses_absorbed = false;  // some layer is linear or absorbing
  bool rewrites_nodes = false; // some layer (log-linear delta rule) rewrites all live nodes at each fold
  int64_t tail_capacity = 0, conv_capacity = 0;  // conv: of the widest convolution of the group
};

// Checks a group and a description against each other and fills the plan. `histories` [layers].
lla_status plan_state(const Context& context, const LayerHistory* histories, int64_t layers, const lla_state_desc& description,
                      StatePlan* plan, lla_error* error) noexcept;
// Geometry of one layer's blocks (struct_size is not touched).
lla_status block_geometry(const StatePlan& plan, const LayerHistory& history, lla_block_kind kind,
                          lla_block_geometry* geometry, lla_error* error) noexcept;

// One slot. `version` changes with every change of the slot, so that a stale batch is noticed.
struct SlotRecord {
  SlotImage image;
  uint64_t version = 0;
  bool reserved = false;  // a planned batch writes into it
};

class State {
 public:
  // Creates with all slots empty at position 0. `memory` as in lla_state_create().
  static lla_status create(Context* context, const LayerHistory* histories, int64_t layers,
                           const lla_state_desc& description, const lla_block_memory* memory, int64_t memory_count,
                           State** state, lla_error* error) noexcept;
  void destroy() noexcept;  // frees everything, releases the context

  Context* context() const { return context_; }
  const StatePlan& plan() const { return plan_; }
  const LayerHistory& history(int64_t layer) const { return histories_[layer]; }
  const SlotMemory& memory(int64_t layer) const { return memory_[layer]; }
  const SlotRecord& record(int64_t slot) const { return records_[slot]; }
  SlotRecord& record(int64_t slot) { return records_[slot]; }
  // Empty: holds no rows and no reservation (position == start, no nodes).
  bool is_empty(int64_t slot) const;

  // Node blocks. A new block has one reference; -1 if the pool is exhausted. Thread safe.
  int32_t take_node() noexcept;
  void retain_node(int32_t id) noexcept;
  // Returns 1 if the block went back to the pool.
  int64_t release_node(int32_t id) noexcept;
  int64_t free_nodes() const noexcept;
  bool node_is_shared(int32_t id) const noexcept;

  // The functions of state.h, arguments already unpacked from lla_index into int64 arrays by `IndexReader` (capi).
  lla_status reset(const int64_t* slots, int64_t count, const int64_t* positions, lla_error* error) noexcept;
  lla_status fork(const int64_t* sources, const int64_t* targets, int64_t count, lla_error* error) noexcept;
  lla_status truncate(int64_t slot, int64_t position, lla_error* error) noexcept;
  int64_t min_length(int64_t slot) const;
  lla_status query(lla_state_key key, int64_t slot, int64_t* value, lla_error* error) const noexcept;
  lla_status read(int64_t slot, int64_t layer, lla_state_part part, int64_t index, const lla_tensor& tensor,
                  lla_error* error) const noexcept;
  lla_status write(int64_t slot, int64_t layer, lla_state_part part, int64_t index, const lla_tensor& tensor,
                   lla_error* error) noexcept;
  lla_status import_linear(int64_t slot, int64_t layer, int64_t position, const lla_tensor& matrix, bool reset,
                           lla_error* error) noexcept;
  lla_status export_size(int64_t slot, size_t* bytes, lla_error* error) const noexcept;
  lla_status pack(int64_t slot, void* buffer, size_t bytes, lla_error* error) const noexcept;
  lla_status unpack(int64_t slot, const void* buffer, size_t bytes, lla_error* error) noexcept;

  std::atomic<int64_t> references{1};

 private:
  friend class BatchPlanner;
  State() = default;

  Context* context_ = nullptr;
  StatePlan plan_;
  Array<LayerHistory> histories_;
  Array<SlotMemory> memory_;
  Array<SlotRecord> records_;
  Array<int32_t> node_references_;
  Array<int32_t> free_list_;
  int64_t free_count_ = 0;
  mutable std::mutex mutex_;  // free list and reference counts
  struct OwnedPool {
    void* memory = nullptr;
    int64_t bytes = 0;
  };
  Array<OwnedPool> owned_;
};

// Pure functions on images (state_image.cpp).
lla_status seal_image(void* buffer, size_t bytes, const char* tag, lla_error* error) noexcept;
lla_status check_image(const void* buffer, size_t bytes, const char* tag, lla_image_info* info, lla_error* error) noexcept;

}  // namespace lla
