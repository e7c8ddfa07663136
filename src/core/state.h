// SPDX-License-Identifier: Apache-2.0
// State of a layer group: records of slots, pools of blocks, reference counts. No arithmetic on contents; see slot.h for how
// they lie in memory.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/context.h"
#include "core/error.h"
#include "core/index_array.h"
#include "core/mutex.h"
#include "lla/state.h"
#include "plugin/plan_rows.h"

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
struct StatePlan : PlanShape {
  lla_state_kind kind = LLA_STATE_VALUE;
  int64_t layers = 0, node_blocks = 0;
  int32_t node_dtype = LLA_F32, tail_dtype = LLA_F32;
};

// A draft may cross so many chunk borders, so that a batch's size does not depend on the state.
constexpr int64_t kMostDraftChunks = 64;
// Number of the order of elements inside blocks (slot.h).
constexpr int64_t kBlockLayout = 1;

// Checks a group and a description against each other and fills the plan. `histories` [layers].
lla_status plan_state(const Context& context, const LayerHistory* histories, int64_t layers,
                      const lla_state_desc& description, StatePlan* plan, lla_error* error) noexcept;
// Geometry of one layer's blocks (struct_size is not touched).
lla_status block_geometry(const StatePlan& plan, const LayerHistory& history, lla_block_kind kind,
                          lla_block_geometry* geometry, lla_error* error) noexcept;
// Layouts of one layer's blocks.
void lay_out(const StatePlan& plan, const LayerHistory& history, SlotMemory* memory) noexcept;

// Whether the layer keeps node `b` (kAbsorbed included) in a block of its own.
inline bool uses_node(const LayerHistory& history, int b) {
  if (!history.has_mixer) return false;
  const int apart = history.shape.separate_levels();
  return b == kAbsorbed ? apart < kNodeLevels : b < apart;
}
// Whether node `b` of the image means something to the layer. The absorbing node of a layer that keeps `apart` levels exists
// only once 2^apart chunks are full; before, the block that other layers of the group need holds nothing of this one.
inline bool holds_node(const LayerHistory& history, const SlotImage& image, int b) {
  if (image.node[b] < 0 || !uses_node(history, b)) return false;
  if (b != kAbsorbed) return true;
  const int apart = history.shape.separate_levels();
  return apart == 0 || ((image.position / history.grain) >> apart) != 0;
}

// One slot. `version` changes with every change of the slot, so that a stale batch is noticed.
struct SlotRecord {
  SlotImage image;
  uint64_t version = 0;
  bool reserved = false;  // receives the fork or snapshot of a planned batch
  int32_t appends = 0;    // planned batches that append to it in place
  // Scratch of one call that changes the slot.
  uint64_t mark = 0;      // equal to the call's stamp: the call has named this slot already
  int32_t heir = -1;      // fork: who takes this slot's tail over
  SlotImage next;         // what the image becomes
  // On a device: the version that the device's record has, and commits there that are not settled: then `image` is behind, and
  // the slot stands at most `pending` rows farther; anywhere, if some of them make it a fork or snapshot.
  uint64_t device_version = ~uint64_t{0};
  int32_t behind = 0, arrivals = 0;
  int64_t pending = 0;

  bool holds_nothing() const { return lla::holds_nothing(image); }
};

class StagedLayer;

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
  // Every change of a slot's image by the host ends with this.
  void touch(SlotRecord* record) noexcept {
    ++record->version;
    changes_.fetch_add(1, std::memory_order_relaxed);
  }
  uint64_t changes() const { return changes_.load(std::memory_order_relaxed); }

  // Commits on the device. Whether the host's record is up to date, and a refusal if it is not; who commits gets a turn, and
  // settles when it comes. `known`: the host knows the slots; else they may be any.
  bool is_current(int64_t slot) const {
    return unsettled_unknown_.load(std::memory_order_relaxed) == 0 && records_[slot].behind == 0;
  }
  lla_status check_current(int64_t slot, const char* name, lla_error* error) const noexcept;
  uint64_t begin_commit(bool known) noexcept;
  bool is_turn(uint64_t turn) const { return turn == settled_.load(std::memory_order_relaxed) + 1; }
  void end_settle(bool known) noexcept;
  uint64_t unknown_commits() const { return unknown_commits_.load(std::memory_order_relaxed); }
  // Where a slot may stand on the device.
  void position_range(int64_t slot, int64_t* low, int64_t* high) const noexcept;
  // Records on the device [slots]; null on the CPU. send_records() brings those of slot_of(0 ... count - 1) up to date; -1 is
  // skipped.
  SlotImage* device_records() const { return device_records_; }
  template <class SlotOf>
  lla_status send_records(int64_t count, SlotOf slot_of, void* stream, lla_error* error) noexcept {
    constexpr int kMost = 60;
    int32_t slots[kMost];
    SlotImage images[kMost];
    int held = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = slot_of(i);
      if (slot >= 0 && records_[slot].device_version != records_[slot].version) {
        slots[held] = static_cast<int32_t>(slot);
        images[held++] = records_[slot].image;
        records_[slot].device_version = records_[slot].version;
      }
      if (held == kMost || (held > 0 && i + 1 == count)) {
        LLA_TRY(put_records(slots, images, held, stream, error));
        held = 0;
      }
    }
    return LLA_OK;
  }

  // Empty: holds no rows and no reservation (position == start, no nodes).
  bool is_empty(int64_t slot) const;
  // An empty image at a position; the slot keeps its block `tail`.
  static SlotImage empty_image(int64_t position, int32_t tail);
  // A number that no other call of this state has.
  uint64_t new_stamp() noexcept { return stamps_.fetch_add(1, std::memory_order_relaxed) + 1; }

  // Node blocks. A new block has one reference; -1 if the pool is exhausted. Thread safe.
  int32_t take_node() noexcept;
  void retain_node(int32_t id) noexcept;
  // Returns 1 if the block went back to the pool.
  int64_t release_node(int32_t id) noexcept;
  int64_t free_nodes() const noexcept;
  bool node_is_shared(int32_t id) const noexcept;
  void retain_nodes(const SlotImage& image) noexcept;
  int64_t release_nodes(const SlotImage& image) noexcept;
  // Gives the nodes of the slots' images back and takes `count` fresh ones, or does neither (false) if there are not enough.
  // `slot_of(i)` for i in 0 ... slots - 1: the i-th slot, or -1.
  template <class SlotOf, class Give>
  bool exchange_nodes(int64_t slots, SlotOf slot_of, int64_t count, Give give) noexcept {
    const Lock lock(mutex_);
    int64_t available = free_count_;
    for (int64_t i = 0; i < slots; ++i) available += sole_nodes_locked(slot_of(i));
    if (available < count) return false;
    for (int64_t i = 0; i < slots; ++i) drop_nodes_locked(slot_of(i));
    for (int64_t i = 0; i < count; ++i) give(i, take_locked());
    return true;
  }
  // Zeroes a node block, and a slot's tail and conv block, in all layers.
  lla_status clear_node(int32_t id, void* stream, lla_error* error) noexcept;
  lla_status clear_rows(int32_t tail, void* stream, lla_error* error) noexcept;
  // Copies the rows that `image` holds from its tail and conv block to another one, to the same places.
  lla_status copy_rows(const SlotImage& image, int32_t to, void* stream, lla_error* error) noexcept;

  // The functions of state.h. Arrays have passed check_index().
  lla_status reset(IndexArray slots, int64_t count, IndexArray positions, lla_error* error) noexcept;
  lla_status fork(IndexArray sources, IndexArray targets, int64_t count, void* stream, lla_error* error) noexcept;
  lla_status truncate(int64_t slot, int64_t position, lla_error* error) noexcept;
  int64_t min_length(int64_t slot) const;
  lla_status query(lla_state_key key, int64_t slot, int64_t* value, lla_error* error) const noexcept;
  lla_status read(int64_t slot, int64_t layer, lla_state_part part, int64_t index, const lla_tensor& tensor, void* stream,
                  lla_error* error) const noexcept;
  lla_status write(int64_t slot, int64_t layer, lla_state_part part, int64_t index, const lla_tensor& tensor, void* stream,
                   lla_error* error) noexcept;
  lla_status import_linear(int64_t slot, int64_t layer, int64_t position, const lla_tensor& matrix, bool reset,
                           void* stream, lla_error* error) noexcept;
  lla_status export_size(int64_t slot, size_t* bytes, lla_error* error) const noexcept;
  lla_status pack(int64_t slot, void* buffer, size_t bytes, void* stream, lla_error* error) const noexcept;
  lla_status unpack(int64_t slot, const void* buffer, size_t bytes, void* stream, lla_error* error) noexcept;

  std::atomic<int64_t> references{1};

 private:
  State() = default;
  lla_status check_slot(int64_t slot, const char* name, lla_error* error) const noexcept;
  size_t record_bytes() const { return static_cast<size_t>(plan_.slots) * sizeof(SlotImage); }
  lla_status put_records(const int32_t* slots, const SlotImage* images, int count, void* stream, lla_error* error) noexcept;
  int32_t take_locked() noexcept;
  int64_t release_locked(int32_t id) noexcept;
  int64_t sole_nodes_locked(int64_t slot) const noexcept;
  void drop_nodes_locked(int64_t slot) noexcept;
  lla_status take_pools(const lla_block_memory* memory, int64_t memory_count, lla_error* error) noexcept;
  // A block of node `b` that only this slot has, zeroed if there was none.
  lla_status own_node(SlotRecord* record, int b, void* stream, int32_t* id, lla_error* error) noexcept;
  // Fills the blocks of `image` from the contents of an exported image, through `staged`.
  lla_status read_contents(const SlotImage& image, const char* at, StagedLayer* staged, void* stream, lla_error* error) noexcept;
  // Lets a slot hold rows from `start` on that it did not hold: they are zero in all layers.
  lla_status extend_back(SlotImage* image, int64_t start, void* stream, lla_error* error) noexcept;

  Context* context_ = nullptr;
  StatePlan plan_;
  Array<LayerHistory> histories_;
  Array<SlotMemory> memory_;
  Array<SlotRecord> records_;
  Array<int32_t> node_references_;
  Array<int32_t> free_list_;
  int64_t free_count_ = 0;
  mutable Mutex mutex_;  // free list and reference counts
  std::atomic<uint64_t> stamps_{0};
  SlotImage* device_records_ = nullptr;
  std::atomic<uint64_t> changes_{0}, commits_{0}, settled_{0}, unknown_commits_{0};
  std::atomic<int64_t> unsettled_unknown_{0};
  int64_t slot_bytes_ = 0, node_bytes_ = 0, pool_bytes_ = 0;  // of one slot's rows, of one node, of everything; all layers
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
