// SPDX-License-Identifier: Apache-2.0
// A state's life, its pool of node blocks, and what moves histories between slots without looking inside.
#include "core/state.h"

#include <algorithm>
#include <cstring>

#include "core/checked.h"
#include "core/error.h"
#include "core/state_rows.h"

namespace lla {

namespace {

long long ll(int64_t x) { return static_cast<long long>(x); }

Pool& pool_of(SlotMemory& memory, lla_block_kind kind) {
  return kind == LLA_BLOCK_NODE ? memory.nodes : kind == LLA_BLOCK_TAIL ? memory.tails : memory.convs;
}

// The caller's entry for a layer and kind; null if there is none.
const lla_block_memory* find_memory(const lla_block_memory* memory, int64_t count, int64_t layer, lla_block_kind kind) {
  for (int64_t i = 0; i < count; ++i) {
    if (memory[i].layer_index == layer && memory[i].kind == kind) return memory + i;
  }
  return nullptr;
}

lla_status check_memory(const StatePlan& plan, const lla_block_memory* memory, int64_t count, lla_error* error) {
  for (int64_t i = 0; i < count; ++i) {
    const lla_block_memory& entry = memory[i];
    if (entry.layer_index < 0 || entry.layer_index >= plan.layers)
      return fail(error, LLA_INVALID_ARGUMENT, "memory[%lld].layer_index = %lld is not below the group's %lld layers", ll(i),
                  ll(entry.layer_index), ll(plan.layers));
    if (entry.kind < LLA_BLOCK_NODE || entry.kind > LLA_BLOCK_CONV)
      return fail(error, LLA_INVALID_ARGUMENT, "memory[%lld].kind: there is no kind %d", ll(i),
                  static_cast<int>(entry.kind));
    if (entry.reserved != 0) return fail(error, LLA_INVALID_ARGUMENT, "memory[%lld].reserved is not 0", ll(i));
    if (find_memory(memory, i, entry.layer_index, entry.kind))
      return fail(error, LLA_INVALID_ARGUMENT, "memory[%lld] names layer %lld and kind %d a second time", ll(i),
                  ll(entry.layer_index), static_cast<int>(entry.kind));
  }
  return LLA_OK;
}

}  // namespace

lla_status State::create(Context* context, const LayerHistory* histories, int64_t layers, const lla_state_desc& description,
                         const lla_block_memory* memory, int64_t memory_count, State** state, lla_error* error) noexcept {
  StatePlan plan;
  LLA_TRY(plan_state(*context, histories, layers, description, &plan, error));
  if (memory_count < 0 || (memory_count > 0) != (memory != nullptr))
    return fail(error, LLA_INVALID_ARGUMENT, "memory_count is %lld and memory is %s", ll(memory_count),
                memory ? "given" : "NULL");
  void* place = context->allocate(sizeof(State));
  if (!place) return fail(error, LLA_OUT_OF_MEMORY, "no memory for a state");
  State* made = ::new (place) State;
  made->context_ = context;
  made->plan_ = plan;
  retain(context);
  const bool enough = made->histories_.allocate(context, layers) && made->memory_.allocate(context, layers) &&
                      made->records_.allocate(context, plan.slots) &&
                      made->node_references_.allocate(context, plan.node_blocks) &&
                      made->free_list_.allocate(context, plan.node_blocks) && made->owned_.allocate(context, 3 * layers);
  lla_status status = enough ? LLA_OK
                             : fail(error, LLA_OUT_OF_MEMORY, "no memory for the records of %lld slots and %lld node blocks",
                                    ll(plan.slots), ll(plan.node_blocks));
  if (status == LLA_OK) {
    for (int64_t i = 0; i < layers; ++i) made->histories_[i] = histories[i];
    for (int64_t i = 0; i < plan.slots; ++i) made->records_[i].image = empty_image(0, static_cast<int32_t>(i));
    made->free_count_ = plan.node_blocks;
    for (int64_t i = 0; i < plan.node_blocks; ++i) made->free_list_[i] = static_cast<int32_t>(plan.node_blocks - 1 - i);
    status = made->take_pools(memory, memory_count, error);
    if (status == LLA_OK && context->device) {
      made->device_records_ = static_cast<SlotImage*>(allocate_memory(*context, made->record_bytes()));
      if (!made->device_records_)
        status = fail(error, LLA_OUT_OF_DEVICE_MEMORY, "no memory for the records of %lld slots", ll(plan.slots));
    }
  }
  if (status != LLA_OK) {
    made->destroy();
    return status;
  }
  *state = made;
  return LLA_OK;
}

lla_status State::take_pools(const lla_block_memory* memory, int64_t memory_count, lla_error* error) noexcept {
  LLA_TRY(check_memory(plan_, memory, memory_count, error));
  for (int64_t i = 0; i < plan_.layers; ++i) {
    SlotMemory& layer = memory_[i];
    lay_out(plan_, histories_[i], &layer);
    for (lla_block_kind kind = LLA_BLOCK_NODE; kind <= LLA_BLOCK_CONV; ++kind) {
      lla_block_geometry geometry = LLA_BLOCK_GEOMETRY_INIT;
      LLA_TRY(block_geometry(plan_, histories_[i], kind, &geometry, error));
      if (geometry.bytes == 0) continue;
      Pool& pool = pool_of(layer, kind);
      if (memory) {
        const lla_block_memory* entry = find_memory(memory, memory_count, i, kind);
        if (!entry)
          return fail(error, LLA_MISSING_ROLE, "memory has no entry for layer %lld and kind %d", ll(i),
                      static_cast<int>(kind));
        const long long number = ll(entry - memory);
        if (!entry->base) return fail(error, LLA_NULL_POINTER, "memory[%lld].base is NULL", number);
        if (reinterpret_cast<uintptr_t>(entry->base) % static_cast<uintptr_t>(geometry.alignment) != 0)
          return fail(error, LLA_MISALIGNED, "memory[%lld].base is not aligned to %lld bytes", number,
                      ll(geometry.alignment));
        if (entry->stride % geometry.alignment != 0)
          return fail(error, LLA_MISALIGNED, "memory[%lld].stride = %lld is no multiple of %lld", number, ll(entry->stride),
                      ll(geometry.alignment));
        if (entry->stride < geometry.bytes)
          return fail(error, LLA_INVALID_ARGUMENT, "memory[%lld].stride = %lld is less than the %lld bytes of a block",
                      number, ll(entry->stride), ll(geometry.bytes));
        if (!reaches_memory(*context_, entry->base))
          return fail(error, LLA_INVALID_ARGUMENT, "memory[%lld].base is not memory of the device", number);
        if (!(Size(entry->stride) * geometry.count).valid())
          return fail(error, LLA_SIZE_OVERFLOW, "memory[%lld].stride = %lld is too large", number, ll(entry->stride));
        pool = {static_cast<char*>(entry->base), entry->stride};
      } else {
        OwnedPool& owned = owned_[3 * i + kind];
        owned.bytes = geometry.bytes * geometry.count;
        owned.memory = allocate_memory(*context_, static_cast<size_t>(owned.bytes));
        if (!owned.memory)
          return fail(error, context_->device ? LLA_OUT_OF_DEVICE_MEMORY : LLA_OUT_OF_MEMORY, "no memory for %lld blocks of %lld bytes (layer %lld, kind %d)",
                      ll(geometry.count), ll(geometry.bytes), ll(i), static_cast<int>(kind));
        pool = {static_cast<char*>(owned.memory), geometry.bytes};
      }
      (kind == LLA_BLOCK_NODE ? node_bytes_ : slot_bytes_) += geometry.bytes;
      pool_bytes_ += pool.stride * geometry.count;
    }
  }
  return LLA_OK;
}

void State::destroy() noexcept {
  Context* context = context_;
  for (int64_t i = 0; i < owned_.size(); ++i) {
    release_memory(*context, owned_[i].memory, static_cast<size_t>(owned_[i].bytes));
  }
  if (device_records_) release_memory(*context, device_records_, record_bytes());
  this->~State();
  context->release(this, sizeof(State));
  lla::release(context);
}

// ---- node blocks --------------------------------------------------------------------------------------------------------

int32_t State::take_locked() noexcept {
  if (free_count_ == 0) return -1;
  const int32_t id = free_list_[--free_count_];
  node_references_[id] = 1;
  return id;
}

int64_t State::release_locked(int32_t id) noexcept {
  if (--node_references_[id] > 0) return 0;
  free_list_[free_count_++] = id;
  return 1;
}

int64_t State::sole_nodes_locked(int64_t slot) const noexcept {
  int64_t count = 0;
  if (slot < 0) return 0;
  for (int32_t id : records_[slot].image.node) count += id >= 0 && node_references_[id] == 1;
  return count;
}

void State::drop_nodes_locked(int64_t slot) noexcept {
  if (slot < 0) return;
  for (int32_t& id : records_[slot].image.node) {
    if (id >= 0) release_locked(id);
    id = -1;
  }
}

int32_t State::take_node() noexcept {
  const Lock lock(mutex_);
  return take_locked();
}

void State::retain_node(int32_t id) noexcept {
  const Lock lock(mutex_);
  ++node_references_[id];
}

int64_t State::release_node(int32_t id) noexcept {
  const Lock lock(mutex_);
  return release_locked(id);
}

int64_t State::free_nodes() const noexcept {
  const Lock lock(mutex_);
  return free_count_;
}

bool State::node_is_shared(int32_t id) const noexcept {
  const Lock lock(mutex_);
  return node_references_[id] > 1;
}

void State::retain_nodes(const SlotImage& image) noexcept {
  const Lock lock(mutex_);
  for (int32_t id : image.node) {
    if (id >= 0) ++node_references_[id];
  }
}

int64_t State::release_nodes(const SlotImage& image) noexcept {
  const Lock lock(mutex_);
  int64_t released = 0;
  for (int32_t id : image.node) {
    if (id >= 0) released += release_locked(id);
  }
  return released;
}

lla_status State::clear_node(int32_t id, void* stream, lla_error* error) noexcept {
  for (int64_t i = 0; i < plan_.layers; ++i) {
    const SlotMemory& memory = memory_[i];
    if (memory.nodes.base)
      LLA_TRY(clear_memory(*context_, memory.nodes.block(id), memory.node_layout.bytes(), stream, error));
  }
  return LLA_OK;
}

// ---- slots --------------------------------------------------------------------------------------------------------------

SlotImage State::empty_image(int64_t position, int32_t tail) {
  SlotImage image;
  image.position = image.start = position;
  image.tail = tail;
  return image;
}

bool State::is_empty(int64_t slot) const {
  const SlotRecord& record = records_[slot];
  return record.holds_nothing() && !record.reserved && record.appends == 0;
}

lla_status State::check_slot(int64_t slot, const char* name, lla_error* error) const noexcept {
  if (slot >= 0 && slot < plan_.slots) return LLA_OK;
  return fail(error, LLA_INVALID_ARGUMENT, "%s = %lld is not one of the state's %lld slots", name, ll(slot),
              ll(plan_.slots));
}

lla_status State::clear_rows(int32_t tail, void* stream, lla_error* error) noexcept {
  for (int64_t i = 0; i < plan_.layers; ++i) {
    const SlotMemory& memory = memory_[i];
    if (memory.tails.base)
      LLA_TRY(clear_memory(*context_, memory.tails.block(tail), memory.tail_layout.bytes(), stream, error));
    if (memory.convs.base)
      LLA_TRY(clear_memory(*context_, memory.convs.block(tail), memory.conv_layout.bytes(), stream, error));
  }
  return LLA_OK;
}

// On a device one copy of the whole block is cheaper than many of its runs.
lla_status State::copy_rows(const SlotImage& image, int32_t to, void* stream, lla_error* error) noexcept {
  if (image.tail == to) return LLA_OK;
  for (int64_t i = 0; i < plan_.layers; ++i) {
    const SlotMemory& memory = memory_[i];
    if (!context_->device) {
      visit_rows(plan_, memory, image, [&](const Pool& pool, int64_t offset, int32_t dtype, int64_t elements) {
        std::memcpy(pool.block(to) + offset, pool.block(image.tail) + offset,
                    static_cast<size_t>(elements * dtype_size(dtype)));
      });
      continue;
    }
    if (memory.tails.base)
      LLA_TRY(copy_memory(*context_, memory.tails.block(to), memory.tails.block(image.tail), memory.tail_layout.bytes(), stream,
                          error));
    if (memory.convs.base)
      LLA_TRY(copy_memory(*context_, memory.convs.block(to), memory.convs.block(image.tail), memory.conv_layout.bytes(), stream,
                          error));
  }
  return LLA_OK;
}

lla_status State::reset(IndexArray slots, int64_t count, IndexArray positions, lla_error* error) noexcept {
  const int64_t entries = slots ? count : plan_.slots;
  for (int64_t i = 0; i < entries; ++i) {
    const int64_t slot = slots ? slots[i] : i, position = positions ? positions[i] : 0;
    if (slot < -1 || slot >= plan_.slots)
      return fail(error, LLA_INVALID_ARGUMENT, "slots[%lld] = %lld is not below the state's %lld slots", ll(i), ll(slot),
                  ll(plan_.slots));
    if (slot == -1) continue;
    LLA_TRY(check_current(slot, "slots", error));
    if (position < 0) return fail(error, LLA_INVALID_ARGUMENT, "positions[%lld] = %lld is negative", ll(i), ll(position));
    if (position > plan_.max_length)
      return fail(error, LLA_LEVELS_EXCEEDED, "positions[%lld] = %lld is beyond the state's max_length %lld", ll(i),
                  ll(position), ll(plan_.max_length));
  }
  for (int64_t i = 0; i < entries; ++i) {
    const int64_t slot = slots ? slots[i] : i;
    if (slot < 0) continue;
    SlotRecord& record = records_[slot];
    release_nodes(record.image);
    record.image = empty_image(positions ? positions[i] : 0, record.image.tail);
    touch(&record);
  }
  return LLA_OK;
}

// Tails are one block per slot, so a fork is a permutation of blocks and copies into those that nobody wants any more: a
// target may take over the block of a source that is itself a target; every other target gets a left-over block and a copy.
lla_status State::fork(IndexArray sources, IndexArray targets, int64_t count, void* stream,
                       lla_error* error) noexcept {
  const uint64_t stamp = new_stamp();
  for (int64_t i = 0; i < count; ++i) {
    if (sources[i] < 0 || sources[i] >= plan_.slots)
      return fail(error, LLA_INVALID_ARGUMENT, "sources[%lld] = %lld is not one of the state's %lld slots", ll(i),
                  ll(sources[i]), ll(plan_.slots));
    if (targets[i] < 0 || targets[i] >= plan_.slots)
      return fail(error, LLA_INVALID_ARGUMENT, "targets[%lld] = %lld is not one of the state's %lld slots", ll(i),
                  ll(targets[i]), ll(plan_.slots));
    LLA_TRY(check_current(sources[i], "sources", error));
    LLA_TRY(check_current(targets[i], "targets", error));
    SlotRecord& target = records_[targets[i]];
    if (target.mark == stamp)
      return fail(error, LLA_INVALID_ARGUMENT, "targets[%lld] = %lld is named twice", ll(i), ll(targets[i]));
    target.mark = stamp;
    target.heir = -1;
  }
  // Who takes over whose block: a slot that keeps its history keeps its block.
  for (int64_t i = 0; i < count; ++i) {
    if (sources[i] == targets[i]) records_[sources[i]].heir = static_cast<int32_t>(targets[i]);
  }
  for (int64_t i = 0; i < count; ++i) {
    SlotRecord& source = records_[sources[i]];
    if (source.mark == stamp && source.heir < 0) source.heir = static_cast<int32_t>(targets[i]);
  }
  int64_t spare = 0;  // the next target whose block may be left over
  lla_status copied = LLA_OK;
  for (int64_t i = 0; i < count; ++i) {
    const SlotRecord& source = records_[sources[i]];
    SlotRecord& target = records_[targets[i]];
    target.next = source.image;
    retain_nodes(target.next);
    if (source.mark == stamp && source.heir == targets[i]) continue;
    while (records_[targets[spare]].heir >= 0) ++spare;
    target.next.tail = records_[targets[spare++]].image.tail;
    if (copied == LLA_OK) copied = copy_rows(source.image, target.next.tail, stream, error);
  }
  if (copied != LLA_OK) {  // the device failed half-way: targets whose rows may be overwritten are empty
    for (int64_t i = 0; i < count; ++i) release_nodes(records_[targets[i]].next);
    for (int64_t i = 0; i < spare; ++i) {
      SlotRecord& lost = records_[targets[i]];
      if (lost.heir >= 0) continue;
      release_nodes(lost.image);
      lost.image = empty_image(lost.image.position, lost.image.tail);
      touch(&lost);
    }
    return copied;
  }
  for (int64_t i = 0; i < count; ++i) {
    SlotRecord& target = records_[targets[i]];
    release_nodes(target.image);
    target.image = target.next;
    if (sources[i] != targets[i]) touch(&target);
  }
  return LLA_OK;
}

int64_t State::min_length(int64_t slot) const {
  const SlotImage& image = records_[slot].image;
  int64_t lowest = std::max({image.start, image.floor, plan_.chunk_start(image.position)});
  // The convolution must still find its inputs, or all that there ever were.
  const bool holds_all = image.conv_rows >= image.position - image.start;
  if (plan_.conv_capacity && !holds_all) lowest = std::max(lowest, image.position - (image.conv_rows - plan_.conv_reach));
  return std::min(lowest, image.position);
}

lla_status State::truncate(int64_t slot, int64_t position, lla_error* error) noexcept {
  LLA_TRY(check_slot(slot, "slot", error));
  LLA_TRY(check_current(slot, "slot", error));
  SlotRecord& record = records_[slot];
  SlotImage& image = record.image;
  if (position < 0 || position > image.position)
    return fail(error, LLA_INVALID_ARGUMENT, "position = %lld is not 0 ... %lld, where slot %lld stands", ll(position),
                ll(image.position), ll(slot));
  const int64_t lowest = min_length(slot);
  if (position < lowest)
    return fail(error, LLA_ROLLBACK_LIMIT, "position = %lld is before %lld, the last that slot %lld can go back to",
                ll(position), ll(lowest), ll(slot));
  const int64_t dropped = image.position - position;
  if (dropped == 0) return LLA_OK;
  image.position = position;
  if (plan_.conv_capacity) {
    const int64_t capacity = plan_.conv_capacity;
    image.conv_origin = static_cast<int32_t>(((image.conv_origin - dropped) % capacity + capacity) % capacity);
    image.conv_rows = static_cast<int32_t>(std::max<int64_t>(0, image.conv_rows - dropped));
  }
  touch(&record);
  return LLA_OK;
}

lla_status State::query(lla_state_key key, int64_t slot, int64_t* value, lla_error* error) const noexcept {
  switch (key) {
    case LLA_STATE_SLOTS:
      *value = plan_.slots;
      return LLA_OK;
    case LLA_STATE_MAX_LENGTH:
      *value = plan_.max_length;
      return LLA_OK;
    case LLA_STATE_NODE_BLOCKS:
      *value = plan_.node_blocks;
      return LLA_OK;
    case LLA_STATE_FREE_NODE_BLOCKS:
      *value = free_nodes();
      return LLA_OK;
    case LLA_STATE_LAYERS:
      *value = plan_.layers;
      return LLA_OK;
    case LLA_STATE_GRAIN:
      *value = plan_.grain;
      return LLA_OK;
    case LLA_STATE_POOL_BYTES:
      *value = pool_bytes_;
      return LLA_OK;
    case LLA_STATE_MAX_DRAFT:
      *value = plan_.max_draft;
      return LLA_OK;
    case LLA_STATE_SLOT_NODES:
    case LLA_STATE_SLOT_BYTES: {
      LLA_TRY(check_slot(slot, "slot", error));
      int64_t nodes = 0;
      for (int32_t id : records_[slot].image.node) nodes += id >= 0;
      *value = key == LLA_STATE_SLOT_NODES ? nodes : nodes * node_bytes_ + slot_bytes_;
      return LLA_OK;
    }
    default:
      return fail(error, LLA_INVALID_ARGUMENT, "key: there is no key %d", static_cast<int>(key));
  }
}

}  // namespace lla
