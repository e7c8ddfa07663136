// SPDX-License-Identifier: Apache-2.0
// batch.h: sizing, making, planning and discarding batches.
#include "lla/batch.h"

#include "capi/handles.h"
#include "capi/struct_size.h"
#include "core/checked.h"

using namespace lla;
using namespace lla::capi;

lla_status lla_batch_size(const lla_context* context, const lla_batch_limits* limits, size_t* bytes, size_t* alignment,
                          lla_error* error) {
  LLA_REQUIRE(context);
  LLA_REQUIRE(limits);
  LLA_REQUIRE(bytes);
  lla_batch_limits known;
  LLA_TRY(read_struct(limits, __func__, "limits", &known, error));
  Limits plain;
  LLA_TRY(read_limits(known, &plain, error));
  size_t size = 0;
  LLA_TRY(batch_size(plain, unwrap(context)->device != nullptr, &size, error));
  *bytes = size;
  if (alignment) *alignment = static_cast<size_t>(kAlignment);
  return LLA_OK;
}

lla_status lla_batch_init(lla_context* context, const lla_batch_limits* limits, void* memory, size_t bytes,
                          lla_batch** batch, lla_error* error) {
  LLA_REQUIRE(context);
  LLA_REQUIRE(limits);
  LLA_REQUIRE(memory);
  LLA_REQUIRE(batch);
  lla_batch_limits known;
  LLA_TRY(read_struct(limits, __func__, "limits", &known, error));
  Limits plain;
  LLA_TRY(read_limits(known, &plain, error));
  Batch* made = nullptr;
  LLA_TRY(init_batch(unwrap(context), plain, memory, bytes, &made, error));
  *batch = wrap(made);
  return LLA_OK;
}

lla_status lla_batch_device_size(const lla_context* context, const lla_batch_limits* limits, size_t* bytes,
                                 size_t* alignment, lla_error* error) {
  LLA_REQUIRE(context);
  LLA_REQUIRE(limits);
  LLA_REQUIRE(bytes);
  lla_batch_limits known;
  LLA_TRY(read_struct(limits, __func__, "limits", &known, error));
  Limits plain;
  LLA_TRY(read_limits(known, &plain, error));
  LLA_TRY(batch_device_size(*unwrap(context), plain, bytes, error));
  if (alignment) *alignment = static_cast<size_t>(kAlignment);
  return LLA_OK;
}

lla_status lla_batch_bind_device(lla_batch* batch, void* memory, size_t bytes, lla_error* error) {
  LLA_REQUIRE(batch);
  LLA_TRY(check_batch_handle(batch, __func__, "batch", error));
  if (!unwrap(batch)->context->device) return LLA_OK;
  LLA_REQUIRE(memory);
  return bind_device_memory(unwrap(batch), memory, bytes, error);
}

lla_status lla_batch_plan(lla_batch* batch, lla_state* state, const lla_rows* rows, void* stream, lla_error* error) {
  LLA_REQUIRE(batch);
  LLA_TRY(check_batch_handle(batch, __func__, "batch", error));
  // A refused plan leaves the batch unplanned, whatever the reason.
  Batch* known_batch = unwrap(batch);
  discard_batch(known_batch);
  LLA_REQUIRE(rows);
  LLA_ON_DEVICE(known_batch->context, stream);
  lla_rows known;
  LLA_TRY(read_struct(rows, __func__, "rows", &known, error));
  State* planned = nullptr;
  State* gradients = nullptr;
  if (state) {
    LLA_TRY(check_context(unwrap(state)->context, known_batch->context, __func__, "state", error));
    planned = unwrap(state)->state;
  }
  if (known.gradient_state) {
    LLA_TRY(
        check_context(unwrap(known.gradient_state)->context, known_batch->context, __func__, "rows->gradient_state", error));
    gradients = unwrap(known.gradient_state)->state;
  }
  return plan_batch(known_batch, planned, known, gradients, stream, error);
}

void lla_batch_discard(lla_batch* batch) {
  if (batch && is_batch(batch)) discard_batch(unwrap(batch));
}

lla_status lla_batch_collect(lla_batch* batch, void* stream, lla_error* error) {
  LLA_REQUIRE(batch);
  LLA_TRY(check_batch_handle(batch, __func__, "batch", error));
  LLA_ON_DEVICE(unwrap(batch)->context, stream);
  return collect_batch(unwrap(batch), stream, error);
}

uint32_t lla_batch_faults(const lla_batch* batch) { return batch && is_batch(batch) ? unwrap(batch)->faults : 0; }
