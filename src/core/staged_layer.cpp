// SPDX-License-Identifier: Apache-2.0
// Copies of a layer's blocks between device and host.
#include "core/staged_layer.h"

#include <algorithm>

#include "core/error.h"

namespace lla {

StagedLayer::Bytes StagedLayer::bytes_of(const SlotMemory& memory, const SlotImage& image, Blocks blocks) {
  Bytes bytes;
  for (const int32_t id : image.node) {
    if (id >= 0 && blocks.nodes && memory.nodes.base) bytes.nodes += memory.node_layout.bytes();
  }
  const bool rows = blocks.rows && image.tail >= 0;
  if (rows && memory.tails.base) bytes.tail = memory.tail_layout.bytes();
  if (rows && memory.convs.base) bytes.conv = memory.conv_layout.bytes();
  return bytes;
}

lla_status StagedLayer::reserve(const SlotMemory& memory, const SlotImage& image, Blocks blocks, lla_error* error) noexcept {
  if (!context_.device) return LLA_OK;
  LLA_TRY(check_capture(context_, stream_, error));
  const Bytes bytes = bytes_of(memory, image, blocks);
  const int64_t total = bytes.nodes + bytes.tail + bytes.conv;
  if (total > buffer_.size() && !buffer_.allocate(&context_, total))
    return fail(error, LLA_OUT_OF_MEMORY, "no memory for a copy of the slot's blocks");
  return LLA_OK;
}

lla_status StagedLayer::open(const SlotMemory& memory, const SlotImage& image, Blocks blocks, bool load,
                             lla_error* error) noexcept {
  device_ = staged_ = memory;
  original_ = image_ = image;
  if (!context_.device) return LLA_OK;
  LLA_TRY(reserve(memory, image, blocks, error));

  int32_t nodes = 0;
  for (int32_t& id : image_.node) {
    if (id >= 0) id = blocks.nodes ? nodes++ : -1;
  }
  const Bytes bytes = bytes_of(memory, image, blocks);
  char* at = buffer_.data();
  staged_.nodes = {bytes.nodes > 0 ? at : nullptr, memory.node_layout.bytes()};
  at += bytes.nodes;
  staged_.tails = {bytes.tail > 0 ? at : nullptr, bytes.tail};
  at += bytes.tail;
  staged_.convs = {bytes.conv > 0 ? at : nullptr, bytes.conv};
  if (image_.tail >= 0) image_.tail = 0;
  if (!load) {  // what the caller does not fill is zero
    std::fill(buffer_.data(), at + bytes.conv, '\0');
    return LLA_OK;
  }
  LLA_TRY(each_block(
      [&](char* device, char* host, int64_t bytes) { return copy_memory(context_, host, device, bytes, stream_, error); }));
  return wait_for(context_, stream_, error);
}

lla_status StagedLayer::store(lla_error* error) noexcept {
  if (!context_.device) return LLA_OK;
  LLA_TRY(each_block(
      [&](char* device, char* host, int64_t bytes) { return copy_memory(context_, device, host, bytes, stream_, error); }));
  return wait_for(context_, stream_, error);
}

template <class Copy>
lla_status StagedLayer::each_block(Copy copy) noexcept {
  for (int b = 0; b < kNodes && staged_.nodes.base; ++b) {
    if (image_.node[b] < 0) continue;
    LLA_TRY(copy(device_.nodes.block(original_.node[b]), staged_.nodes.block(image_.node[b]), device_.node_layout.bytes()));
  }
  if (staged_.tails.base)
    LLA_TRY(copy(device_.tails.block(original_.tail), staged_.tails.block(0), device_.tail_layout.bytes()));
  if (staged_.convs.base)
    LLA_TRY(copy(device_.convs.block(original_.tail), staged_.convs.block(0), device_.conv_layout.bytes()));
  return LLA_OK;
}

}  // namespace lla
