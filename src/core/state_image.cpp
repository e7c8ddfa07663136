// SPDX-License-Identifier: Apache-2.0
// Export and import of a slot: packing, sealing, checking untrusted bytes, unpacking.
#include <algorithm>
#include <cstring>

#include "core/checked.h"
#include "core/error.h"
#include "core/image_format.h"
#include "core/staged_layer.h"
#include "core/state.h"
#include "core/state_rows.h"

namespace lla {

namespace {

using namespace image;

long long ll(int64_t x) { return static_cast<long long>(x); }

int64_t get_signed(const char* from) { return static_cast<int64_t>(get(from, 8)); }

// Calls visit(memory, bytes of an element, elements) for everything that `image` holds in one layer, in the order of the
// format. `memory` is null for elements that an image has and blocks have not: zeros.
template <class Visit>
void visit_contents(const StatePlan& plan, const LayerHistory& history, const SlotMemory& memory, const SlotImage& image,
                    Visit visit) {
  const NodeLayout& layout = memory.node_layout;
  const int64_t decay_size = dtype_size(layout.decay_dtype());
  for (int b = 0; b < kNodes; ++b) {
    if (!holds_node(history, image, b)) continue;
    const int32_t id = image.node[b];
    for (int64_t h = 0; h < layout.heads; ++h) {
      visit(memory.node(id, h), dtype_size(layout.dtype), layout.key_dim * layout.value_dim);
    }
    for (int64_t h = 0; h < layout.heads; ++h) {
      visit(history.shape.mixer == LLA_DELTA_RULE ? nullptr : memory.node_decay(id, h), decay_size, int64_t{1});
    }
  }
  visit_rows(plan, memory, image, [&](const Pool& pool, int64_t offset, int32_t dtype, int64_t elements) {
    visit(pool.block(image.tail) + offset, dtype_size(dtype), elements);
  });
}

// The image with the nodes alone that mean something to the layer.
SlotImage held_image(const LayerHistory& history, const SlotImage& image) {
  SlotImage held = image;
  for (int b = 0; b < kNodes; ++b) {
    if (!holds_node(history, image, b)) held.node[b] = -1;
  }
  return held;
}

void describe_layer(const StatePlan& plan, const LayerHistory& history, const SlotMemory& memory, char* to) {
  std::memset(to, 0, static_cast<size_t>(kLayerBytes));
  const MixerShape& shape = history.shape;
  if (history.has_mixer) {
    put(to + 0, static_cast<uint64_t>(shape.mixer), 4);
    put(to + 4, static_cast<uint64_t>(shape.head_map), 4);
    put(to + 8, static_cast<uint64_t>(shape.heads), 8);
    put(to + 16, static_cast<uint64_t>(shape.groups), 8);
    put(to + 24, static_cast<uint64_t>(shape.key_dim), 8);
    put(to + 32, static_cast<uint64_t>(shape.value_dim), 8);
    put(to + 40, static_cast<uint64_t>(shape.levels), 8);
    put(to + 48, shape.absorb ? 1 : 0, 4);
    put(to + 52, static_cast<uint64_t>(memory.node_layout.dtype), 4);
    put(to + 56, static_cast<uint64_t>(memory.tail_layout.dtype), 4);
  }
  if (history.conv_channels > 0) {
    put(to + 60, static_cast<uint64_t>(memory.conv_layout.dtype), 4);
    put(to + 64, static_cast<uint64_t>(history.conv_channels), 8);
    put(to + 72, static_cast<uint64_t>(history.conv_width), 8);
  }
  put(to + 80, static_cast<uint64_t>(plan.conv_reach), 8);
  put(to + 88, static_cast<uint64_t>(kBlockLayout), 8);
}

uint64_t node_bits(const SlotImage& image) {
  uint64_t bits = 0;
  for (int b = 0; b < kNodes; ++b) bits |= static_cast<uint64_t>(image.node[b] >= 0) << b;
  return bits;
}

int64_t image_bytes(const StatePlan& plan, const LayerHistory* histories, const SlotMemory* memory, const SlotImage& image) {
  int64_t bytes = kHeaderBytes + plan.layers * kLayerBytes;
  for (int64_t i = 0; i < plan.layers; ++i) {
    visit_contents(plan, histories[i], memory[i], image,
                   [&](const char*, int64_t size, int64_t elements) { bytes += size * elements; });
  }
  return bytes;
}

// Magic, byte order, format and size of bytes that may be anything.
lla_status check_header(const void* buffer, size_t bytes, bool sealed, int64_t* size, lla_error* error) {
  const char* data = static_cast<const char*>(buffer);
  if (bytes < static_cast<size_t>(kHeaderBytes))
    return fail(error, LLA_DATA_CORRUPT, "buffer: %zu bytes are less than the header of an image", bytes);
  if (std::memcmp(data + kMagicAt, kMagic, sizeof kMagic) != 0)
    return fail(error, LLA_DATA_CORRUPT, "buffer is not an image of a state");
  if (get(data + kByteOrderAt, 4) != kByteOrder)
    return fail(error, LLA_STATE_INCOMPATIBLE, "buffer: the image has another byte order");
  if (get(data + kFormatAt, 4) != kFormat)
    return fail(error, LLA_STATE_INCOMPATIBLE, "buffer: the image has format %llu, this library knows %llu",
                static_cast<unsigned long long>(get(data + kFormatAt, 4)), static_cast<unsigned long long>(kFormat));
  const uint64_t claimed = get(data + kBytesAt, 8);
  if (claimed < static_cast<uint64_t>(kHeaderBytes) || claimed > static_cast<uint64_t>(INT64_MAX))
    return fail(error, LLA_DATA_CORRUPT, "buffer: the image's size is damaged");
  if (sealed && claimed > bytes)
    return fail(error, LLA_DATA_CORRUPT, "buffer: the image has %llu bytes, %zu are there",
                static_cast<unsigned long long>(claimed), bytes);
  const uint64_t seal = get(data + kSealAt, 4);
  if (sealed ? seal != kSealed : seal > kSealed)
    return fail(error, LLA_DATA_CORRUPT, "buffer: the image is %s", seal == 0 ? "packed, but not sealed" : "damaged");
  *size = static_cast<int64_t>(claimed);
  return LLA_OK;
}

}  // namespace

lla_status State::export_size(int64_t slot, size_t* bytes, lla_error* error) const noexcept {
  LLA_TRY(check_slot(slot, "slot", error));
  LLA_TRY(check_current(slot, "slot", error));
  *bytes = static_cast<size_t>(image_bytes(plan_, histories_.data(), memory_.data(), records_[slot].image));
  return LLA_OK;
}

lla_status State::pack(int64_t slot, void* buffer, size_t bytes, void* stream, lla_error* error) const noexcept {
  size_t needed = 0;
  LLA_TRY(export_size(slot, &needed, error));
  if (bytes < needed) return fail(error, LLA_BUFFER_TOO_SMALL, "bytes = %zu, but the image has %zu", bytes, needed);
  const SlotImage& image = records_[slot].image;
  StagedLayer staged(*context_, stream);
  for (int64_t i = 0; i < plan_.layers; ++i)
    LLA_TRY(staged.reserve(memory_[i], held_image(histories_[i], image), {}, error));
  char* data = static_cast<char*>(buffer);
  std::memset(data, 0, static_cast<size_t>(kHeaderBytes));
  std::memcpy(data + kMagicAt, kMagic, sizeof kMagic);
  put(data + kFormatAt, kFormat, 4);
  put(data + kByteOrderAt, kByteOrder, 4);
  put(data + kBytesAt, needed, 8);
  put(data + kKindAt, static_cast<uint64_t>(plan_.kind), 4);
  put(data + kPositionAt, static_cast<uint64_t>(image.position), 8);
  put(data + kStartAt, static_cast<uint64_t>(image.start), 8);
  put(data + kLayersAt, static_cast<uint64_t>(plan_.layers), 8);
  put(data + kGrainAt, static_cast<uint64_t>(plan_.grain), 8);
  put(data + kConvRowsAt, static_cast<uint64_t>(image.conv_rows), 8);
  put(data + kNodesAt, node_bits(image), 8);
  put(data + kFloorAt, static_cast<uint64_t>(image.floor), 8);
  char* at = data + kHeaderBytes;
  for (int64_t i = 0; i < plan_.layers; ++i, at += kLayerBytes) describe_layer(plan_, histories_[i], memory_[i], at);
  for (int64_t i = 0; i < plan_.layers; ++i) {
    LLA_TRY(staged.open(memory_[i], held_image(histories_[i], image), {}, true, error));
    visit_contents(plan_, histories_[i], staged.memory(), staged.image(), [&](const char* memory, int64_t size, int64_t elements) {
      if (memory)
        copy_elements(at, memory, size, elements);
      else
        std::memset(at, 0, static_cast<size_t>(size * elements));
      at += size * elements;
    });
  }
  return LLA_OK;
}

lla_status State::read_contents(const SlotImage& image, const char* at, StagedLayer* staged, void* stream,
                                lla_error* error) noexcept {
  for (const int32_t id : image.node) {
    if (id >= 0) LLA_TRY(clear_node(id, stream, error));  // also what only some of the layers hold
  }
  for (int64_t i = 0; i < plan_.layers; ++i) {
    LLA_TRY(staged->open(memory_[i], held_image(histories_[i], image), {}, false, error));
    visit_contents(plan_, histories_[i], staged->memory(), staged->image(), [&](char* memory, int64_t element, int64_t elements) {
      if (memory) copy_elements(memory, at, element, elements);
      at += element * elements;
    });
    LLA_TRY(staged->store(error));
  }
  return LLA_OK;
}

lla_status seal_image(void* buffer, size_t bytes, const char* tag, lla_error* error) noexcept {
  int64_t size = 0;
  LLA_TRY(check_header(buffer, bytes, false, &size, error));
  if (static_cast<uint64_t>(size) > bytes)
    return fail(error, LLA_BUFFER_TOO_SMALL, "bytes = %zu, but the image has %lld", bytes, ll(size));
  char* data = static_cast<char*>(buffer);
  if (tag)
    std::memcpy(data + kTagAt, tag, LLA_TAG_SIZE);
  else
    std::memset(data + kTagAt, 0, LLA_TAG_SIZE);
  put(data + kSealAt, kSealed, 4);
  put(data + kChecksumAt, checksum(data, size), 8);
  return LLA_OK;
}

lla_status check_image(const void* buffer, size_t bytes, const char* tag, lla_image_info* info, lla_error* error) noexcept {
  int64_t size = 0;
  LLA_TRY(check_header(buffer, bytes, true, &size, error));
  const char* data = static_cast<const char*>(buffer);
  if (get(data + kChecksumAt, 8) != checksum(data, size))
    return fail(error, LLA_DATA_CORRUPT, "buffer: the image's checksum is wrong");
  if (tag && std::memcmp(data + kTagAt, tag, LLA_TAG_SIZE) != 0)
    return fail(error, LLA_STATE_INCOMPATIBLE, "tag: the image carries another one");
  if (info) {
    if (info->struct_size < sizeof(lla_image_info))
      return fail(error, LLA_STRUCT_VERSION, "info->struct_size is %zu, less than %zu", info->struct_size,
                  sizeof(lla_image_info));
    info->bytes = size;
    info->position = get_signed(data + kPositionAt);
    info->layers = get_signed(data + kLayersAt);
    info->grain = get_signed(data + kGrainAt);
    info->format = static_cast<int32_t>(kFormat);
    info->reserved = 0;
    std::memcpy(info->tag, data + kTagAt, LLA_TAG_SIZE);
  }
  return LLA_OK;
}

lla_status State::unpack(int64_t slot, const void* buffer, size_t bytes, void* stream, lla_error* error) noexcept {
  LLA_TRY(check_slot(slot, "slot", error));
  LLA_TRY(check_current(slot, "slot", error));
  int64_t size = 0;
  LLA_TRY(check_header(buffer, bytes, true, &size, error));
  const char* data = static_cast<const char*>(buffer);
  const int64_t layers = get_signed(data + kLayersAt), grain = get_signed(data + kGrainAt);
  if (get(data + kKindAt, 4) != static_cast<uint64_t>(plan_.kind))
    return fail(error, LLA_STATE_INCOMPATIBLE, "buffer: the image is of another kind of state");
  if (layers != plan_.layers || grain != plan_.grain)
    return fail(error, LLA_STATE_INCOMPATIBLE, "buffer: the image has %lld layers of grain %lld, the state %lld of %lld",
                ll(layers), ll(grain), ll(plan_.layers), ll(plan_.grain));
  if (size < kHeaderBytes + layers * kLayerBytes)
    return fail(error, LLA_DATA_CORRUPT, "buffer: the image is too short for its %lld layers", ll(layers));
  const char* at = data + kHeaderBytes;
  for (int64_t i = 0; i < layers; ++i, at += kLayerBytes) {
    char expected[kLayerBytes];
    describe_layer(plan_, histories_[i], memory_[i], expected);
    if (std::memcmp(at, expected, sizeof expected) != 0)
      return fail(error, LLA_STATE_INCOMPATIBLE, "buffer: layer %lld of the image has other sizes or types", ll(i));
  }

  // The record. Sizes follow from it, so nothing is read before they are known to fit.
  SlotRecord& record = records_[slot];
  SlotImage image = empty_image(get_signed(data + kPositionAt), record.image.tail);
  image.start = get_signed(data + kStartAt);
  image.floor = get_signed(data + kFloorAt);
  const int64_t conv_rows = get_signed(data + kConvRowsAt);
  const uint64_t nodes = get(data + kNodesAt, 8);
  if (image.position < 0 || image.start < 0 || image.start > image.position || image.floor < 0 ||
      image.floor > image.position)
    return fail(error, LLA_DATA_CORRUPT, "buffer: the image's position is damaged");
  if (image.position > plan_.max_length)
    return fail(error, LLA_LEVELS_EXCEEDED, "buffer: position %lld is beyond the state's max_length %lld",
                ll(image.position), ll(plan_.max_length));
  const int64_t since_start = image.position - image.start;
  const int64_t least = plan_.conv_capacity ? std::min(plan_.conv_reach, since_start) : 0;
  if (conv_rows < least || conv_rows > std::min(plan_.conv_needed(image.position), since_start))
    return fail(error, LLA_DATA_CORRUPT, "buffer: the image's convolution rows are damaged");
  const uint64_t levels = (uint64_t{1} << plan_.node_levels) - 1;
  const uint64_t possible =
      (static_cast<uint64_t>(image.position / plan_.grain) & levels) | (plan_.uses_absorbed ? uint64_t{1} << kAbsorbed : 0);
  if (nodes & ~possible) return fail(error, LLA_DATA_CORRUPT, "buffer: the image's list of nodes is damaged");
  image.conv_rows = image.conv_origin = static_cast<int32_t>(conv_rows);
  for (int b = 0; b < kNodes; ++b) {
    if ((nodes >> b) & 1) image.node[b] = 0;  // any block: only the size is wanted
  }
  if (image_bytes(plan_, histories_.data(), memory_.data(), image) != size)
    return fail(error, LLA_DATA_CORRUPT, "buffer: the image's size does not fit its contents");
  StagedLayer staged(*context_, stream);
  for (int64_t i = 0; i < layers; ++i)
    LLA_TRY(staged.reserve(memory_[i], held_image(histories_[i], image), {}, error));

  int next = 0;
  const auto give = [&](int64_t, int32_t id) {
    while (image.node[next] < 0) ++next;
    image.node[next++] = id;
  };
  if (!exchange_nodes(
          1, [&](int64_t) { return slot; }, std::popcount(nodes), give))
    return fail(error, LLA_NO_BLOCKS, "the state's %lld node blocks do not suffice for the image", ll(plan_.node_blocks));
  record.image = image;
  touch(&record);
  const lla_status status = read_contents(image, at, &staged, stream, error);
  if (status == LLA_OK) return LLA_OK;
  release_nodes(image);  // the device failed half-way: the slot is empty
  record.image = empty_image(image.position, image.tail);
  return status;
}

}  // namespace lla
