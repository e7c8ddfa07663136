// SPDX-License-Identifier: Apache-2.0
// Reading and writing the parts of a slot as tensors.
#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/staged_layer.h"
#include "core/state.h"

namespace lla {

namespace {

long long ll(int64_t x) { return static_cast<long long>(x); }

// A part as a box of elements. row(i, j) is where `dims[2]` contiguous elements lie, or null where they count as zero.
struct Part {
  int32_t rank = 1;
  int64_t dims[3] = {1, 1, 1};  // a dimension beyond the rank is 1
  int32_t dtype = LLA_F32;
  lla_state_part part = 0;
  int64_t first = 0;  // tail and convolution: position of row 0
};

lla_status check_tensor(const Part& part, const lla_tensor& tensor, lla_error* error) {
  if (!is_float_dtype(tensor.dtype))
    return fail(error, LLA_DTYPE_MISMATCH, "tensor: element type %d is no floating-point type",
                static_cast<int>(tensor.dtype));
  if (tensor.rank != part.rank)
    return fail(error, LLA_SHAPE_MISMATCH, "tensor has rank %d, this part has %d", static_cast<int>(tensor.rank),
                static_cast<int>(part.rank));
  int64_t elements = 1;
  for (int32_t i = 0; i < part.rank; ++i) {
    if (tensor.dims[i] != part.dims[i])
      return fail(error, LLA_SHAPE_MISMATCH, "tensor: dimension %d is %lld, this part has %lld", static_cast<int>(i),
                  ll(tensor.dims[i]), ll(part.dims[i]));
    elements *= part.dims[i];
  }
  if (elements > 0 && !tensor.data) return fail(error, LLA_NULL_POINTER, "tensor->data is NULL");
  if (reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(dtype_size(tensor.dtype)) != 0)
    return fail(error, LLA_MISALIGNED, "tensor->data is not aligned to its element type");
  return LLA_OK;
}

int64_t stride_of(const lla_tensor& tensor, int32_t axis) { return axis < tensor.rank ? tensor.strides[axis] : 0; }

// Calls visit(element of the tensor, pointer to the part's element or null, its index there) for every element.
template <class Row, class Visit>
void visit_elements(const Part& part, const lla_tensor& tensor, Row row, Visit visit) {
  const int64_t s0 = stride_of(tensor, 0), s1 = stride_of(tensor, 1), s2 = stride_of(tensor, 2);
  for (int64_t i = 0; i < part.dims[0]; ++i) {
    for (int64_t j = 0; j < part.dims[1]; ++j) {
      char* data = row(i, j);
      for (int64_t k = 0; k < part.dims[2]; ++k) visit(i * s0 + j * s1 + k * s2, data, k);
    }
  }
}

// The box of a part of one layer, whatever the slot holds.
lla_status describe_part(const StatePlan& plan, const LayerHistory& history, const SlotMemory& memory,
                         const SlotImage& image, lla_state_part part, int64_t index, Part* out, lla_error* error) {
  const MixerShape& shape = history.shape;
  const NodeLayout& nodes = memory.node_layout;
  const TailLayout& tail = memory.tail_layout;
  const int64_t rows = image.position % plan.grain;
  Part box;
  box.part = part;
  box.first = plan.chunk_start(image.position);
  if (part < LLA_PART_NODE || part > LLA_PART_CONV)
    return fail(error, LLA_INVALID_ARGUMENT, "part: there is no part %d", static_cast<int>(part));
  if (part == LLA_PART_CONV ? history.conv_channels == 0 : !history.has_mixer)
    return fail(error, LLA_INVALID_ARGUMENT, "part: the layer has no %s", part == LLA_PART_CONV ? "convolution" : "mixer");
  const bool node = part == LLA_PART_NODE || part == LLA_PART_NODE_DECAY;
  if (node && (index < 0 || index >= shape.separate_levels()))
    return fail(error, LLA_INVALID_ARGUMENT, "index = %lld, but the layer keeps %d node levels apart", ll(index),
                shape.separate_levels());
  if (!node && index != 0) return fail(error, LLA_INVALID_ARGUMENT, "index = %lld is not 0", ll(index));
  if (part == LLA_PART_ABSORBED && !uses_node(history, kAbsorbed))
    return fail(error, LLA_INVALID_ARGUMENT, "part: the layer is neither linear nor absorbing");
  const auto set = [&](int32_t rank, int64_t d0, int64_t d1, int64_t d2, int32_t dtype) {
    box.rank = rank;
    box.dims[0] = d0;
    box.dims[1] = d1;
    box.dims[2] = d2;
    box.dtype = dtype;
  };
  switch (part) {
    case LLA_PART_NODE:
    case LLA_PART_ABSORBED:
      set(3, shape.heads, shape.key_dim, shape.value_dim, nodes.dtype);
      break;
    case LLA_PART_NODE_DECAY:
      set(1, shape.heads, 1, 1, nodes.decay_dtype());
      break;
    case LLA_PART_TAIL_K:
      set(3, rows, shape.groups, shape.key_dim, tail.dtype);
      break;
    case LLA_PART_TAIL_V:
      set(3, rows, shape.heads, shape.value_dim, tail.dtype);
      break;
    case LLA_PART_TAIL_GATE:
    case LLA_PART_TAIL_WRITE:
      set(2, rows, shape.heads, 1, tail.gate_dtype());
      break;
    default:
      set(2, history.conv_width - 1, history.conv_channels, 1, memory.conv_layout.dtype);
      box.first = image.position - (history.conv_width - 1);
  }
  *out = box;
  return LLA_OK;
}

// Where row (i, j) of the box lies; null where it counts as zero. `node`: block of the node, or -1.
char* locate(const StatePlan& plan, const SlotMemory& memory, const SlotImage& image, const Part& part, int32_t node,
             int64_t i, int64_t j) {
  const int64_t position = part.first + i;
  const int64_t tail_ring = (image.tail_origin + i) % plan.tail_capacity;
  switch (part.part) {
    case LLA_PART_NODE:
    case LLA_PART_ABSORBED:
      return node < 0 ? nullptr
                      : memory.node(node, i) + j * memory.node_layout.value_dim * dtype_size(memory.node_layout.dtype);
    case LLA_PART_NODE_DECAY:
      return node < 0 ? nullptr : memory.node_decay(node, i);
    case LLA_PART_CONV: {
      const int64_t back = image.position - position;
      if (position < image.start || back > image.conv_rows) return nullptr;
      return memory.conv(image.tail, j, (image.conv_origin - back + plan.conv_capacity) % plan.conv_capacity);
    }
    default:
      break;
  }
  if (position < image.start) return nullptr;
  switch (part.part) {
    case LLA_PART_TAIL_K:
      return memory.tail_k(image.tail, j, tail_ring);
    case LLA_PART_TAIL_V:
      return memory.tail_v(image.tail, j, tail_ring);
    case LLA_PART_TAIL_GATE:
      return memory.tail_gate(image.tail, j, tail_ring);
    default:
      return memory.tail_write(image.tail, j, tail_ring);
  }
}

int node_of(lla_state_part part, int64_t index) { return part == LLA_PART_ABSORBED ? kAbsorbed : static_cast<int>(index); }

bool is_node(lla_state_part part) { return part <= LLA_PART_ABSORBED; }

// The image with block `node` (or none) as its only node, at level 0.
SlotImage only_node(const SlotImage& image, int32_t node) {
  SlotImage only = image;
  for (int32_t& id : only.node) id = -1;
  only.node[0] = node;
  return only;
}

// Overwrites the box, in block `node` or in the rows, through `staged`.
lla_status put_elements(const StatePlan& plan, const SlotMemory& memory, const SlotImage& image, const Part& box,
                        int32_t node, const lla_tensor& tensor, StagedLayer* staged, lla_error* error) {
  const bool of_node = is_node(box.part);
  LLA_TRY(staged->open(memory, only_node(image, node), {of_node, !of_node}, true, error));
  const int32_t staged_node = node < 0 ? -1 : staged->image().node[0];
  visit_elements(
      box, tensor,
      [&](int64_t i, int64_t j) { return locate(plan, staged->memory(), staged->image(), box, staged_node, i, j); },
      [&](int64_t element, char* data, int64_t k) {
        if (data) store_element<double>(data, box.dtype, k, load_element<double>(tensor.data, tensor.dtype, element));
      });
  return staged->store(error);
}

}  // namespace

lla_status State::own_node(SlotRecord* record, int b, void* stream, int32_t* id, lla_error* error) noexcept {
  const int32_t old = record->image.node[b];
  *id = old;
  if (old >= 0 && !node_is_shared(old)) return LLA_OK;
  *id = take_node();
  if (*id < 0) return fail(error, LLA_NO_BLOCKS, "the state's %lld node blocks are all in use", ll(plan_.node_blocks));
  lla_status status = LLA_OK;
  if (old < 0) status = clear_node(*id, stream, error);
  for (int64_t i = 0; old >= 0 && i < plan_.layers && status == LLA_OK; ++i) {
    const SlotMemory& memory = memory_[i];
    if (!memory.nodes.base) continue;
    status =
        copy_memory(*context_, memory.nodes.block(*id), memory.nodes.block(old), memory.node_layout.bytes(), stream, error);
  }
  if (status != LLA_OK) {
    release_node(*id);
    return status;
  }
  if (old >= 0) release_node(old);
  record->image.node[b] = *id;
  touch(record);
  return LLA_OK;
}

lla_status State::extend_back(SlotImage* image, int64_t start, void* stream, lla_error* error) noexcept {
  if (start >= image->start) return LLA_OK;
  const int64_t position = image->position, old_start = image->start, old_conv = image->conv_rows;
  int32_t conv_rows = image->conv_rows;
  // A ring that does not reach back to the old start has all that the convolutions ask for.
  if (plan_.conv_capacity && old_conv == position - old_start)
    conv_rows = static_cast<int32_t>(std::min(position - start, plan_.conv_needed(position)));
  const auto clear = [](char* data, int32_t dtype, int64_t elements) {
    std::memset(data, 0, static_cast<size_t>(elements * dtype_size(dtype)));
  };
  const int64_t chunk = plan_.chunk_start(position);
  StagedLayer staged(*context_, stream);
  for (int64_t layer = 0; layer < plan_.layers; ++layer) {
    LLA_TRY(staged.open(memory_[layer], *image, {false, true}, true, error));
    const SlotMemory& memory = staged.memory();
    const int32_t tail = staged.image().tail;
    if (memory.tails.base) {
      const TailLayout& layout = memory.tail_layout;
      for (int64_t p = std::max(chunk, start); p < old_start; ++p) {
        const int64_t ring = (image->tail_origin + p - chunk) % layout.capacity;
        for (int64_t g = 0; g < layout.groups; ++g) clear(memory.tail_k(tail, g, ring), layout.dtype, layout.key_dim);
        for (int64_t h = 0; h < layout.heads; ++h) {
          clear(memory.tail_v(tail, h, ring), layout.dtype, layout.value_dim);
          clear(memory.tail_gate(tail, h, ring), layout.gate_dtype(), 1);
          clear(memory.tail_write(tail, h, ring), layout.gate_dtype(), 1);
        }
      }
    }
    if (memory.convs.base) {
      const ConvLayout& layout = memory.conv_layout;
      for (int64_t back = old_conv + 1; back <= conv_rows; ++back) {
        const int64_t ring = (image->conv_origin - back + layout.capacity) % layout.capacity;
        for (int64_t c = 0; c < layout.channels; ++c) clear(memory.conv(tail, c, ring), layout.dtype, 1);
      }
    }
    LLA_TRY(staged.store(error));
  }
  image->start = start;
  image->conv_rows = conv_rows;
  return LLA_OK;
}

lla_status State::read(int64_t slot, int64_t layer, lla_state_part part, int64_t index, const lla_tensor& tensor,
                       void* stream, lla_error* error) const noexcept {
  LLA_TRY(check_slot(slot, "slot", error));
  LLA_TRY(check_current(slot, "slot", error));
  const LayerHistory& history = histories_[layer];
  const SlotMemory& memory = memory_[layer];
  const SlotImage& image = records_[slot].image;
  Part box;
  LLA_TRY(describe_part(plan_, history, memory, image, part, index, &box, error));
  LLA_TRY(check_tensor(box, tensor, error));
  int32_t node = -1;
  if (is_node(part) && holds_node(history, image, node_of(part, index))) node = image.node[node_of(part, index)];
  // The delta rule's nodes carry their decay already.
  if (part == LLA_PART_NODE_DECAY && history.shape.mixer == LLA_DELTA_RULE) node = -1;
  StagedLayer staged(*context_, stream);
  LLA_TRY(staged.open(memory, only_node(image, node), {is_node(part), !is_node(part)}, true, error));
  const int32_t staged_node = node < 0 ? -1 : staged.image().node[0];
  visit_elements(
      box, tensor,
      [&](int64_t i, int64_t j) { return locate(plan_, staged.memory(), staged.image(), box, staged_node, i, j); },
      [&](int64_t element, const char* data, int64_t k) {
        store_element<double>(tensor.data, tensor.dtype, element, data ? load_element<double>(data, box.dtype, k) : 0.0);
      });
  return LLA_OK;
}

lla_status State::write(int64_t slot, int64_t layer, lla_state_part part, int64_t index, const lla_tensor& tensor,
                        void* stream, lla_error* error) noexcept {
  LLA_TRY(check_slot(slot, "slot", error));
  LLA_TRY(check_current(slot, "slot", error));
  const LayerHistory& history = histories_[layer];
  const SlotMemory& memory = memory_[layer];
  SlotRecord& record = records_[slot];
  SlotImage& image = record.image;
  Part box;
  LLA_TRY(describe_part(plan_, history, memory, image, part, index, &box, error));
  LLA_TRY(check_tensor(box, tensor, error));
  if (part == LLA_PART_NODE_DECAY && history.shape.mixer == LLA_DELTA_RULE)
    return fail(error, LLA_INVALID_ARGUMENT, "part: nodes of the delta rule carry their decay already");
  StagedLayer staged(*context_, stream);
  int32_t node = -1;
  if (is_node(part)) {
    const int b = node_of(part, index);
    const int64_t chunks = image.position / plan_.grain;
    const int apart = history.shape.separate_levels();
    if (b < kAbsorbed ? ((chunks >> b) & 1) == 0 : apart > 0 && (chunks >> apart) == 0)
      return fail(error, LLA_INVALID_ARGUMENT, "index = %lld: a slot at position %lld has no such node", ll(index),
                  ll(image.position));
    LLA_TRY(staged.reserve(memory, only_node(image, 0), {true, false}, error));
    LLA_TRY(own_node(&record, b, stream, &node, error));
  } else {
    LLA_TRY(staged.reserve(memory, image, {false, true}, error));
    if (box.dims[0] > 0) {
      LLA_TRY(extend_back(&image,
                          std::max<int64_t>(0, part == LLA_PART_CONV ? image.position - plan_.conv_reach : box.first),
                          stream, error));
      // Nobody knows the inputs before those W - 1, which earlier positions would ask for.
      if (part == LLA_PART_CONV) image.floor = image.position;
      touch(&record);
    }
  }
  LLA_TRY(put_elements(plan_, memory, image, box, node, tensor, &staged, error));
  touch(&record);
  return LLA_OK;
}

lla_status State::import_linear(int64_t slot, int64_t layer, int64_t position, const lla_tensor& matrix, bool reset,
                                void* stream, lla_error* error) noexcept {
  LLA_TRY(check_slot(slot, "slot", error));
  LLA_TRY(check_current(slot, "slot", error));
  const LayerHistory& history = histories_[layer];
  SlotRecord& record = records_[slot];
  if (!history.has_mixer || history.shape.levels != 0)
    return fail(error, LLA_UNSUPPORTED, "layer_index = %lld is not a linear layer", ll(layer));
  if (position < 0) return fail(error, LLA_INVALID_ARGUMENT, "position = %lld is negative", ll(position));
  if (position > plan_.max_length)
    return fail(error, LLA_LEVELS_EXCEEDED, "position = %lld is beyond the state's max_length %lld", ll(position),
                ll(plan_.max_length));
  Part box;
  LLA_TRY(describe_part(plan_, history, memory_[layer], record.image, LLA_PART_ABSORBED, 0, &box, error));
  LLA_TRY(check_tensor(box, matrix, error));
  if (!reset) {
    if (record.image.position != position)
      return fail(error, LLA_POSITION_MISMATCH, "position = %lld, but slot %lld stands at %lld", ll(position), ll(slot),
                  ll(record.image.position));
    return write(slot, layer, LLA_PART_ABSORBED, 0, matrix, stream, error);
  }
  StagedLayer staged(*context_, stream);
  LLA_TRY(staged.reserve(memory_[layer], only_node(record.image, 0), {true, false}, error));
  int32_t node = -1;
  if (!exchange_nodes(
          1, [&](int64_t) { return slot; }, 1, [&](int64_t, int32_t id) { node = id; }))
    return fail(error, LLA_NO_BLOCKS, "the state's %lld node blocks are all in use", ll(plan_.node_blocks));
  record.image = empty_image(position, record.image.tail);
  record.image.node[kAbsorbed] = node;
  touch(&record);
  LLA_TRY(clear_node(node, stream, error));
  return put_elements(plan_, memory_[layer], record.image, box, node, matrix, &staged, error);
}

}  // namespace lla
