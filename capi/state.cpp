// SPDX-License-Identifier: Apache-2.0
// state.h: creating states, moving histories between slots, reading, writing, exporting and importing them.
#include "lla/state.h"

#include <new>

#include "capi/handles.h"
#include "capi/struct_size.h"

using namespace lla;
using namespace lla::capi;

namespace {

constexpr int64_t kMostLayers = 65536;

// The histories of a group's layers one after the other, as the core wants them.
class Group {
 public:
  lla_status read(lla_layer* const* layers, int64_t count, const char* function, lla_error* error) noexcept {
    if (count < 1 || count > kMostLayers)
      return fail(error, LLA_INVALID_ARGUMENT, "%s: layer_count is %lld", function, static_cast<long long>(count));
    for (int64_t i = 0; i < count; ++i) {
      if (!layers[i]) return fail(error, LLA_NULL_POINTER, "%s: layers[%lld] is NULL", function, static_cast<long long>(i));
      const Layer& layer = *unwrap(layers[i]);
      if (i == 0) context_ = layer.context;
      if (layer.context != context_)
        return fail(error, LLA_WRONG_CONTEXT, "%s: layers[%lld] is of another context", function, static_cast<long long>(i));
      if (!layer.stateful)
        return fail(error, LLA_INVALID_ARGUMENT, "%s: layers[%lld] has no history", function, static_cast<long long>(i));
    }
    histories_ = few_;
    if (count > kFew) {
      if (!many_.allocate(context_, count))
        return fail(error, LLA_OUT_OF_MEMORY, "%s: no memory for the layers' histories", function);
      histories_ = many_.data();
    }
    for (int64_t i = 0; i < count; ++i) histories_[i] = unwrap(layers[i])->history;
    return LLA_OK;
  }
  Context* context() const { return context_; }
  const LayerHistory* histories() const { return histories_; }

 private:
  static constexpr int64_t kFew = 64;
  Context* context_ = nullptr;
  LayerHistory* histories_ = nullptr;
  LayerHistory few_[kFew];
  Array<LayerHistory> many_;
};

lla_status read_description(const lla_state_desc* given, const char* function, lla_state_desc* known,
                            lla_error* error) noexcept {
  *known = LLA_STATE_DESC_INIT;
  return given ? read_struct(given, function, "description", known, error) : LLA_OK;
}

size_t handle_bytes(int64_t layer_count) noexcept {
  return sizeof(StateHandle) + static_cast<size_t>(layer_count) * sizeof(Layer*);
}

void destroy(StateHandle* handle) noexcept {
  {
    const DeviceScope scope(handle->context);
    handle->state->destroy();
  }
  for (int64_t i = 0; i < handle->layer_count; ++i) release(handle->layers[i]);
  Context* context = handle->context;
  const size_t bytes = handle_bytes(handle->layer_count);
  handle->~StateHandle();
  context->release(handle, bytes);
  release(context);
}

// A slot and a layer of the group, both in range.
lla_status check_place(const StateHandle& handle, int64_t slot, int64_t layer_index, const char* function,
                       lla_error* error) noexcept {
  LLA_TRY(check_slot(*handle.state, slot, function, error));
  return check_layer_index(handle.layer_count, layer_index, function, error);
}

}  // namespace

lla_status lla_state_geometry(lla_layer* const* layers, int64_t layer_count, const lla_state_desc* description,
                              int64_t layer_index, lla_block_kind kind, lla_block_geometry* geometry, lla_error* error) {
  LLA_REQUIRE(layers);
  LLA_REQUIRE(geometry);
  Group group;
  LLA_TRY(group.read(layers, layer_count, __func__, error));
  lla_state_desc known;
  LLA_TRY(read_description(description, __func__, &known, error));
  LLA_TRY(check_layer_index(layer_count, layer_index, __func__, error));
  if (kind < LLA_BLOCK_NODE || kind > LLA_BLOCK_CONV)
    return fail(error, LLA_INVALID_ARGUMENT, "%s: kind %d is unknown", __func__, static_cast<int>(kind));
  lla_block_geometry answer;
  LLA_TRY(read_struct(geometry, __func__, "geometry", &answer, error));
  StatePlan plan;
  LLA_TRY(plan_state(*group.context(), group.histories(), layer_count, known, &plan, error));
  LLA_TRY(block_geometry(plan, group.histories()[layer_index], kind, &answer, error));
  write_struct(answer, geometry);
  return LLA_OK;
}

lla_status lla_state_create(lla_layer* const* layers, int64_t layer_count, const lla_state_desc* description,
                            const lla_block_memory* memory, int64_t memory_count, lla_state** state, lla_error* error) {
  LLA_REQUIRE(layers);
  LLA_REQUIRE(state);
  Group group;
  LLA_TRY(group.read(layers, layer_count, __func__, error));
  lla_state_desc known;
  LLA_TRY(read_description(description, __func__, &known, error));
  LLA_TRY(check_array(memory, memory_count, __func__, "memory", "memory_count", error));
  for (int64_t i = 0; i < memory_count; ++i) {
    if (!memory[i].base)
      return fail(error, LLA_NULL_POINTER, "%s: memory[%lld].base is NULL", __func__, static_cast<long long>(i));
  }
  Context* context = group.context();
  LLA_ON_DEVICE(context, nullptr);
  void* bytes = context->allocate(handle_bytes(layer_count));
  if (!bytes) return fail(error, LLA_OUT_OF_MEMORY, "%s: no memory for the state", __func__);
  State* created = nullptr;
  const lla_status status =
      State::create(context, group.histories(), layer_count, known, memory, memory_count, &created, error);
  if (status != LLA_OK) {
    context->release(bytes, handle_bytes(layer_count));
    return status;
  }
  StateHandle* handle = ::new (bytes) StateHandle;
  handle->context = context;
  retain(context);
  handle->state = created;
  handle->layers = reinterpret_cast<Layer**>(handle + 1);
  handle->layer_count = layer_count;
  for (int64_t i = 0; i < layer_count; ++i) {
    handle->layers[i] = unwrap(layers[i]);
    retain(handle->layers[i]);
  }
  *state = wrap(handle);
  return LLA_OK;
}

lla_state* lla_state_retain(lla_state* state) {
  if (state) unwrap(state)->references.fetch_add(1, std::memory_order_relaxed);
  return state;
}

void lla_state_release(lla_state* state) {
  if (state && unwrap(state)->references.fetch_sub(1, std::memory_order_acq_rel) == 1) destroy(unwrap(state));
}

lla_status lla_state_commit(lla_state* state, lla_batch* batch, lla_index accepted, void* stream, lla_error* error) {
  LLA_REQUIRE(state);
  LLA_REQUIRE(batch);
  LLA_TRY(check_batch_handle(batch, __func__, "batch", error));
  LLA_ON_DEVICE(unwrap(state)->context, stream);
  if (accepted.data) LLA_TRY(check_index(accepted, "accepted", unwrap(state)->context, error));
  return commit_batch(unwrap(state)->state, unwrap(batch), accepted, stream, error);
}

lla_status lla_state_settle(lla_state* state, lla_batch* batch, lla_index accepted, int64_t* released, lla_error* error) {
  LLA_REQUIRE(state);
  LLA_REQUIRE(batch);
  LLA_TRY(check_batch_handle(batch, __func__, "batch", error));
  if (accepted.data) LLA_TRY(check_index(accepted, "accepted", nullptr, error));
  return settle_batch(unwrap(state)->state, unwrap(batch), accepted, released, error);
}

lla_status lla_state_reset(lla_state* state, lla_index slots, int64_t count, lla_index positions, void* stream,
                           lla_error* error) {
  LLA_REQUIRE(state);
  if (slots.data) LLA_TRY(check_index(slots, "slots", nullptr, error));
  if (slots.data && count < 0) return negative_count(error, __func__, "count", count);
  if (positions.data) LLA_TRY(check_index(positions, "positions", nullptr, error));
  LLA_ON_DEVICE(unwrap(state)->context, stream);
  return unwrap(state)->state->reset(slots, count, positions, error);
}

lla_status lla_state_fork(lla_state* state, lla_index sources, lla_index targets, int64_t count, void* stream,
                          lla_error* error) {
  LLA_REQUIRE(state);
  LLA_TRY(check_array(sources.data, count, __func__, "sources.data", "count", error));
  LLA_TRY(check_array(targets.data, count, __func__, "targets.data", "count", error));
  if (count == 0) return LLA_OK;
  LLA_TRY(check_index(sources, "sources", nullptr, error));
  LLA_TRY(check_index(targets, "targets", nullptr, error));
  LLA_ON_DEVICE(unwrap(state)->context, stream);
  return unwrap(state)->state->fork(sources, targets, count, stream, error);
}

lla_status lla_state_truncate(lla_state* state, int64_t slot, int64_t position, void* stream, lla_error* error) {
  LLA_REQUIRE(state);
  LLA_TRY(check_slot(*unwrap(state)->state, slot, __func__, error));
  LLA_ON_DEVICE(unwrap(state)->context, stream);
  return unwrap(state)->state->truncate(slot, position, error);
}

lla_status lla_state_length(const lla_state* state, int64_t slot, int64_t* length, lla_error* error) {
  LLA_REQUIRE(state);
  LLA_REQUIRE(length);
  LLA_TRY(check_slot(*unwrap(state)->state, slot, __func__, error));
  *length = unwrap(state)->state->record(slot).image.position;
  return LLA_OK;
}

lla_status lla_state_min_length(const lla_state* state, int64_t slot, int64_t* length, lla_error* error) {
  LLA_REQUIRE(state);
  LLA_REQUIRE(length);
  LLA_TRY(check_slot(*unwrap(state)->state, slot, __func__, error));
  *length = unwrap(state)->state->min_length(slot);
  return LLA_OK;
}

lla_status lla_state_query(const lla_state* state, lla_state_key key, int64_t slot, int64_t* value, lla_error* error) {
  LLA_REQUIRE(state);
  LLA_REQUIRE(value);
  return unwrap(state)->state->query(key, slot, value, error);
}

lla_status lla_state_read(const lla_state* state, int64_t slot, int64_t layer_index, lla_state_part part, int64_t index,
                          const lla_tensor* tensor, void* stream, lla_error* error) {
  LLA_REQUIRE(state);
  LLA_REQUIRE(tensor);
  LLA_TRY(check_place(*unwrap(state), slot, layer_index, __func__, error));
  LLA_ON_DEVICE(unwrap(state)->context, stream);
  return unwrap(state)->state->read(slot, layer_index, part, index, *tensor, stream, error);
}

lla_status lla_state_write(lla_state* state, int64_t slot, int64_t layer_index, lla_state_part part, int64_t index,
                           const lla_tensor* tensor, void* stream, lla_error* error) {
  LLA_REQUIRE(state);
  LLA_REQUIRE(tensor);
  LLA_TRY(check_place(*unwrap(state), slot, layer_index, __func__, error));
  LLA_ON_DEVICE(unwrap(state)->context, stream);
  return unwrap(state)->state->write(slot, layer_index, part, index, *tensor, stream, error);
}

lla_status lla_state_import_linear(lla_state* state, int64_t slot, int64_t layer_index, int64_t position,
                                   const lla_tensor* matrix, int32_t reset, void* stream, lla_error* error) {
  LLA_REQUIRE(state);
  LLA_REQUIRE(matrix);
  LLA_TRY(check_place(*unwrap(state), slot, layer_index, __func__, error));
  LLA_ON_DEVICE(unwrap(state)->context, stream);
  return unwrap(state)->state->import_linear(slot, layer_index, position, *matrix, reset != 0, stream, error);
}

lla_status lla_state_export_size(const lla_state* state, int64_t slot, size_t* bytes, lla_error* error) {
  LLA_REQUIRE(state);
  LLA_REQUIRE(bytes);
  LLA_TRY(check_slot(*unwrap(state)->state, slot, __func__, error));
  return unwrap(state)->state->export_size(slot, bytes, error);
}

lla_status lla_state_pack(const lla_state* state, int64_t slot, void* buffer, size_t bytes, void* stream, lla_error* error) {
  LLA_REQUIRE(state);
  LLA_REQUIRE(buffer);
  LLA_TRY(check_slot(*unwrap(state)->state, slot, __func__, error));
  LLA_ON_DEVICE(unwrap(state)->context, stream);
  return unwrap(state)->state->pack(slot, buffer, bytes, stream, error);
}

lla_status lla_state_seal(void* buffer, size_t bytes, const char* tag, lla_error* error) {
  LLA_REQUIRE(buffer);
  return seal_image(buffer, bytes, tag, error);
}

lla_status lla_state_check(const void* buffer, size_t bytes, const char* tag, lla_image_info* info, lla_error* error) {
  LLA_REQUIRE(buffer);
  if (!info) return check_image(buffer, bytes, tag, nullptr, error);
  lla_image_info answer;
  LLA_TRY(read_struct(info, __func__, "info", &answer, error));
  LLA_TRY(check_image(buffer, bytes, tag, &answer, error));
  write_struct(answer, info);
  return LLA_OK;
}

lla_status lla_state_unpack(lla_state* state, int64_t slot, const void* buffer, size_t bytes, void* stream,
                            lla_error* error) {
  LLA_REQUIRE(state);
  LLA_REQUIRE(buffer);
  LLA_TRY(check_slot(*unwrap(state)->state, slot, __func__, error));
  LLA_ON_DEVICE(unwrap(state)->context, stream);
  return unwrap(state)->state->unpack(slot, buffer, bytes, stream, error);
}
