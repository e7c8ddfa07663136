// SPDX-License-Identifier: Apache-2.0
// Copies of a layer's blocks between device and host.
#include "core/staged_layer.h"

#include "core/error.h"

namespace lla {

lla_status StagedLayer::open(const SlotMemory& memory, const SlotImage& image, Blocks blocks, bool load,
                             lla_error* error) noexcept {
  device_ = staged_ = memory;
  original_ = image_ = image;
  blocks_ = blocks;
  if (!context_.device) return LLA_OK;
  LLA_TRY(check_capture(context_, stream_, error));

  int64_t nodes = 0;
  for (int32_t& id : image_.node) {
    if (id < 0) continue;
    id = blocks.nodes ? static_cast<int32_t>(nodes++) : -1;
  }
  const bool tail = blocks.rows && image.tail >= 0 && memory.tails.base;
  const bool conv = blocks.rows && image.tail >= 0 && memory.convs.base;
  if (!memory.nodes.base) nodes = 0;
  const int64_t node_bytes = memory.node_layout.bytes();
  const int64_t tail_bytes = tail ? memory.tail_layout.bytes() : 0, conv_bytes = conv ? memory.conv_layout.bytes() : 0;
  if (!buffer_.allocate(&context_, nodes * node_bytes + tail_bytes + conv_bytes))
    return fail(error, LLA_OUT_OF_MEMORY, "no memory for a copy of the slot's blocks");
  char* at = buffer_.data();
  staged_.nodes = {nodes > 0 ? at : nullptr, node_bytes};
  at += nodes * node_bytes;
  staged_.tails = {tail ? at : nullptr, tail_bytes};
  at += tail_bytes;
  staged_.convs = {conv ? at : nullptr, conv_bytes};
  if (image_.tail >= 0) image_.tail = 0;
  if (!load) return LLA_OK;
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
