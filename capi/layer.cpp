// SPDX-License-Identifier: Apache-2.0
// layer.h: creating and asking layers; forward, backward and their tasks. lla_append() is in append.cpp.
#include "lla/layer.h"

#include "capi/handles.h"
#include "capi/query.h"
#include "capi/struct_size.h"
#include "core/checked.h"
#include "core/fenwick.h"

using namespace lla;
using namespace lla::capi;

namespace {

// The longest sequence that the λ columns of a layer allow.
int64_t max_length(const Layer& layer) noexcept {
  const lla_layer_desc& description = layer.description;
  if (description.lambda_form == LLA_LAMBDA_NONE || description.level_overflow == LLA_LEVELS_ABSORB) return INT64_MAX;
  return length_allowed(description.levels);
}

lla_status answer_kernel(const Layer& layer, lla_pass pass, int64_t index, void* value, size_t* size, const char* function,
                         lla_error* error) noexcept {
  const char* name = index < 0 ? nullptr : step_kernel(layer, pass, index);
  if (!name)
    return fail(error, LLA_INVALID_ARGUMENT, "%s: index is %lld, the layer has %lld steps", function,
                static_cast<long long>(index), static_cast<long long>(step_count(layer, pass)));
  return answer_text(name, value, size, function, error);
}

// Handles and pointers that forward and backward have in common; values and tensors are checked where the call is prepared.
template <class Arguments>
lla_status check_call(const Layer& layer, const Arguments& arguments, const char* function, Batch** batch, State** state,
                      lla_error* error) noexcept {
  if (!arguments.batch) return null_pointer(error, function, "arguments->batch");
  LLA_TRY(check_batch_handle(arguments.batch, function, "arguments->batch", error));
  *batch = unwrap(arguments.batch);
  LLA_TRY(check_context((*batch)->context, layer.context, function, "arguments->batch", error));
  *state = nullptr;
  if (arguments.state) {
    LLA_TRY(check_context(unwrap(arguments.state)->context, layer.context, function, "arguments->state", error));
    *state = unwrap(arguments.state)->state;
  }
  LLA_TRY(check_array(arguments.io, arguments.io_count, function, "arguments->io", "arguments->io_count", error));
  LLA_TRY(check_array(arguments.weights, arguments.weight_count, function, "arguments->weights", "arguments->weight_count",
                      error));
  if (!arguments.workspace) return null_pointer(error, function, "arguments->workspace");
  return check_stream(layer.context, arguments.stream, function, error);
}

// A call whose handles are checked.
template <class Arguments>
struct Call {
  Arguments arguments;
  Batch* batch = nullptr;
  State* state = nullptr;
};

lla_status read_call(const lla_layer* layer, const lla_forward_args* given, const char* function,
                     Call<lla_forward_args>* call, lla_error* error) noexcept {
  LLA_TRY(read_struct(given, function, "arguments", &call->arguments, error));
  return check_call(*unwrap(layer), call->arguments, function, &call->batch, &call->state, error);
}

lla_status read_call(const lla_layer* layer, const lla_backward_args* given, const char* function,
                     Call<lla_backward_args>* call, lla_error* error) noexcept {
  LLA_TRY(read_struct(given, function, "arguments", &call->arguments, error));
  const lla_backward_args& known = call->arguments;
  LLA_TRY(check_call(*unwrap(layer), known, function, &call->batch, &call->state, error));
  LLA_TRY(check_array(known.outputs, known.output_count, function, "arguments->outputs", "arguments->output_count", error));
  return check_array(known.gradients, known.gradient_count, function, "arguments->gradients", "arguments->gradient_count",
                     error);
}

lla_status check_has_tasks(const Context& context, const char* function, lla_error* error) noexcept {
  if (context.device) return fail(error, LLA_UNSUPPORTED, "%s: a device runs no tasks of the caller", function);
  return LLA_OK;
}

}  // namespace

lla_status lla_layer_create(lla_context* context, const lla_layer_desc* description, lla_layer** layer, lla_error* error) {
  LLA_REQUIRE(context);
  LLA_REQUIRE(description);
  LLA_REQUIRE(layer);
  lla_layer_desc known;
  LLA_TRY(read_struct(description, __func__, "description", &known, error));
  Layer* created = nullptr;
  LLA_TRY(create_layer(unwrap(context), known, &created, error));
  *layer = wrap(created);
  return LLA_OK;
}

lla_layer* lla_layer_retain(lla_layer* layer) {
  if (layer) retain(unwrap(layer));
  return layer;
}

void lla_layer_release(lla_layer* layer) {
  if (layer) release(unwrap(layer));
}

lla_status lla_layer_supported(lla_context* context, const lla_layer_desc* description, lla_error* error) {
  LLA_REQUIRE(context);
  LLA_REQUIRE(description);
  lla_layer_desc known;
  LLA_TRY(read_struct(description, __func__, "description", &known, error));
  Layer layer;
  return describe_layer(unwrap(context), known, &layer, error);
}

lla_status lla_layer_query(const lla_layer* layer, lla_layer_key key, int64_t index, void* value, size_t* size,
                           lla_error* error) {
  LLA_REQUIRE(layer);
  LLA_REQUIRE(size);
  const Layer& known = *unwrap(layer);
  const DeviceScope scope(known.context);  // kernels are chosen by the device
  const bool by_index = key == LLA_LAYER_STEP_KERNEL || key == LLA_LAYER_BACKWARD_STEP_KERNEL;
  if (!by_index && index != 0)
    return fail(error, LLA_INVALID_ARGUMENT, "%s: index is %lld for a key without index", __func__,
                static_cast<long long>(index));
  int64_t number = 0;
  switch (key) {
    case LLA_LAYER_STEP_COUNT:
      number = step_count(known, LLA_PASS_FORWARD);
      break;
    case LLA_LAYER_STEP_KERNEL:
      return answer_kernel(known, LLA_PASS_FORWARD, index, value, size, __func__, error);
    case LLA_LAYER_BACKWARD_STEP_COUNT:
      number = step_count(known, LLA_PASS_BACKWARD);
      break;
    case LLA_LAYER_BACKWARD_STEP_KERNEL:
      return answer_kernel(known, LLA_PASS_BACKWARD, index, value, size, __func__, error);
    case LLA_LAYER_INTERMEDIATE_BYTES:
      number = intermediate_bytes_per_row(known);
      break;
    case LLA_LAYER_LEVELS:
      number = known.description.levels;
      break;
    case LLA_LAYER_MAX_LENGTH:
      number = max_length(known);
      break;
    default:
      return fail(error, LLA_INVALID_ARGUMENT, "%s: key %d is unknown", __func__, static_cast<int>(key));
  }
  return answer_number<int64_t>(number, value, size, __func__, error);
}

lla_status lla_layer_workspace(const lla_layer* layer, const lla_batch_limits* limits, lla_pass pass, size_t* bytes,
                               size_t* alignment, lla_error* error) {
  LLA_REQUIRE(layer);
  LLA_REQUIRE(limits);
  LLA_REQUIRE(bytes);
  lla_batch_limits known;
  LLA_TRY(read_struct(limits, __func__, "limits", &known, error));
  if (pass != LLA_PASS_FORWARD && pass != LLA_PASS_BACKWARD)
    return fail(error, LLA_INVALID_ARGUMENT, "%s: pass %d is unknown", __func__, static_cast<int>(pass));
  Limits plain;
  LLA_TRY(read_limits(known, &plain, error));
  size_t size = 0;
  const DeviceScope scope(unwrap(layer)->context);
  LLA_TRY(measure_program(*unwrap(layer), plain, pass, &size, error));
  *bytes = size;
  if (alignment) *alignment = static_cast<size_t>(kAlignment);
  return LLA_OK;
}

lla_status lla_layer_saved_size(const lla_layer* layer, const lla_batch_limits* limits, size_t* bytes, size_t* alignment,
                                lla_error* error) {
  LLA_REQUIRE(layer);
  LLA_REQUIRE(limits);
  LLA_REQUIRE(bytes);
  lla_batch_limits known;
  LLA_TRY(read_struct(limits, __func__, "limits", &known, error));
  Limits plain;
  LLA_TRY(read_limits(known, &plain, error));
  size_t size = 0;
  const DeviceScope scope(unwrap(layer)->context);
  LLA_TRY(measure_saved(*unwrap(layer), plain, &size, error));
  *bytes = size;
  if (alignment) *alignment = static_cast<size_t>(kAlignment);
  return LLA_OK;
}

lla_status lla_layer_forward(const lla_layer* layer, const lla_forward_args* arguments, lla_error* error) {
  LLA_REQUIRE(layer);
  LLA_REQUIRE(arguments);
  Call<lla_forward_args> call;
  LLA_TRY(read_call(layer, arguments, __func__, &call, error));
  LLA_ON_DEVICE(unwrap(layer)->context, call.arguments.stream);
  return run_forward(*unwrap(layer), call.arguments, call.batch, call.state, error);
}

lla_status lla_layer_backward(const lla_layer* layer, const lla_backward_args* arguments, lla_error* error) {
  LLA_REQUIRE(layer);
  LLA_REQUIRE(arguments);
  Call<lla_backward_args> call;
  LLA_TRY(read_call(layer, arguments, __func__, &call, error));
  LLA_ON_DEVICE(unwrap(layer)->context, call.arguments.stream);
  return run_backward(*unwrap(layer), call.arguments, call.batch, call.state, error);
}

lla_status lla_layer_forward_tasks(const lla_layer* layer, const lla_forward_args* arguments, lla_tasks** tasks,
                                   lla_error* error) {
  LLA_REQUIRE(layer);
  LLA_REQUIRE(arguments);
  LLA_REQUIRE(tasks);
  LLA_TRY(check_has_tasks(*unwrap(layer)->context, __func__, error));
  Call<lla_forward_args> call;
  LLA_TRY(read_call(layer, arguments, __func__, &call, error));
  Program* program = nullptr;
  LLA_TRY(prepare_forward(*unwrap(layer), call.arguments, call.batch, call.state, &program, error));
  *tasks = wrap(program);
  return LLA_OK;
}

lla_status lla_layer_backward_tasks(const lla_layer* layer, const lla_backward_args* arguments, lla_tasks** tasks,
                                    lla_error* error) {
  LLA_REQUIRE(layer);
  LLA_REQUIRE(arguments);
  LLA_REQUIRE(tasks);
  LLA_TRY(check_has_tasks(*unwrap(layer)->context, __func__, error));
  Call<lla_backward_args> call;
  LLA_TRY(read_call(layer, arguments, __func__, &call, error));
  Program* program = nullptr;
  LLA_TRY(prepare_backward(*unwrap(layer), call.arguments, call.batch, call.state, &program, error));
  *tasks = wrap(program);
  return LLA_OK;
}

int64_t lla_tasks_phases(const lla_tasks* tasks) { return tasks ? unwrap(tasks)->phases : 0; }

int64_t lla_tasks_count(const lla_tasks* tasks, int64_t phase) {
  return phase < 0 || phase >= lla_tasks_phases(tasks) ? 0 : task_count(*unwrap(tasks), phase);
}

void lla_tasks_run(lla_tasks* tasks, int64_t phase, int64_t task, int32_t thread) {
  if (tasks) run_task(unwrap(tasks), phase, task, thread);  // does nothing for numbers that are out of range
}
