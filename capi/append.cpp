// SPDX-License-Identifier: Apache-2.0
// lla_append(): plan, forward and commit of one slot in one call.
#include "capi/handles.h"
#include "lla/layer.h"

using namespace lla;
using namespace lla::capi;

namespace {

// Memory of the context for the duration of a call.
class Loan {
 public:
  // `device`: of the backend's memory, else the host's.
  Loan(const Context* context, bool device) : context_(context), device_(device) {}
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  ~Loan() {
    if (device_)
      release_memory(*context_, memory_, bytes_);
    else
      context_->release(memory_, bytes_);
  }
  bool take(size_t bytes) noexcept {
    memory_ = device_ ? allocate_memory(*context_, bytes) : context_->allocate(bytes);
    bytes_ = bytes;
    return memory_ != nullptr;
  }
  void* memory() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  const Context* context_;
  bool device_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

// Length of the row axis of the first input: [N, ...], or [1, N, ...] of one rank more.
lla_status count_rows(const Layer& layer, const lla_binding* io, int64_t io_count, const char* function, int64_t* rows,
                      lla_error* error) noexcept {
  const bool by_head = layer.description.kind == LLA_LAYER_MIXER || layer.description.kind == LLA_LAYER_CELL;
  const lla_role role = by_head ? LLA_Q : LLA_X;
  const char* name = by_head ? "LLA_Q" : "LLA_X";
  const int32_t rank = by_head ? 3 : 2;
  for (int64_t i = 0; i < io_count; ++i) {
    if (io[i].role != role) continue;
    const lla_tensor& tensor = io[i].tensor;
    const bool batched = tensor.rank == rank + 1;
    if (tensor.rank != rank && !batched)
      return fail(error, LLA_SHAPE_MISMATCH, "%s: %s has rank %d, not %d", function, name, static_cast<int>(tensor.rank),
                  static_cast<int>(rank));
    if (batched && tensor.dims[0] != 1)
      return fail(error, LLA_SHAPE_MISMATCH, "%s: %s holds %lld sequences, one slot takes 1", function, name,
                  static_cast<long long>(tensor.dims[0]));
    *rows = tensor.dims[batched ? 1 : 0];
    if (*rows < 0) return fail(error, LLA_SHAPE_MISMATCH, "%s: a dimension of %s is negative", function, name);
    return LLA_OK;
  }
  return fail(error, LLA_MISSING_ROLE, "%s: %s is not bound", function, name);
}

}  // namespace

lla_status lla_append(const lla_layer* layer, lla_state* state, int64_t slot, const lla_binding* io, int64_t io_count,
                      const lla_binding* weights, int64_t weight_count, void* stream, lla_error* error) {
  LLA_REQUIRE(layer);
  LLA_REQUIRE(state);
  LLA_REQUIRE(io);
  const Layer& known = *unwrap(layer);
  const StateHandle& handle = *unwrap(state);
  LLA_TRY(check_context(handle.context, known.context, __func__, "state", error));
  if (handle.layer_count != 1)
    return fail(error, LLA_STATE_INCOMPATIBLE, "%s: state is of %lld layers, not of one", __func__,
                static_cast<long long>(handle.layer_count));
  LLA_TRY(check_slot(*handle.state, slot, __func__, error));
  LLA_TRY(check_array(io, io_count, __func__, "io", "io_count", error));
  LLA_TRY(check_array(weights, weight_count, __func__, "weights", "weight_count", error));
  int64_t count = 0;
  LLA_TRY(count_rows(known, io, io_count, __func__, &count, error));

  lla_batch_limits wanted = LLA_BATCH_LIMITS_INIT;
  wanted.max_sequences = 1;
  wanted.max_rows = count;
  wanted.max_length = handle.state->plan().max_length;
  Limits limits;
  LLA_TRY(read_limits(wanted, &limits, error));
  LLA_ON_DEVICE(known.context, stream);
  LLA_TRY(check_capture(*known.context, stream, error));
  size_t batch_bytes = 0, device_bytes = 0, workspace_bytes = 0;
  LLA_TRY(batch_size(limits, known.context->device != nullptr, &batch_bytes, error));
  LLA_TRY(batch_device_size(*known.context, limits, &device_bytes, error));
  LLA_TRY(measure_program(known, limits, LLA_PASS_FORWARD, &workspace_bytes, error));
  Loan batch_memory(known.context, false), device_memory(known.context, true), workspace(known.context, true);
  if (!batch_memory.take(batch_bytes)) return fail(error, LLA_OUT_OF_MEMORY, "%s: no memory for a batch", __func__);
  if ((device_bytes > 0 && !device_memory.take(device_bytes)) || !workspace.take(workspace_bytes))
    return fail(error, known.context->device ? LLA_OUT_OF_DEVICE_MEMORY : LLA_OUT_OF_MEMORY,
                "%s: no memory for plan and workspace", __func__);

  Batch* batch = nullptr;
  LLA_TRY(init_batch(known.context, limits, batch_memory.memory(), batch_bytes, &batch, error));
  if (device_bytes > 0) LLA_TRY(bind_device_memory(batch, device_memory.memory(), device_bytes, error));
  lla_rows rows = LLA_ROWS_INIT;
  rows.sequences = 1;
  rows.rows_per_sequence = count;
  rows.total_rows = count;
  rows.slot_in = {&slot, LLA_I64, LLA_HOST};
  LLA_TRY(plan_batch(batch, handle.state, rows, nullptr, stream, error));

  lla_forward_args arguments = LLA_FORWARD_ARGS_INIT;
  arguments.batch = wrap(batch);
  arguments.state = state;
  arguments.io = io;
  arguments.io_count = io_count;
  arguments.weights = weights;
  arguments.weight_count = weight_count;
  arguments.workspace = workspace.memory();
  arguments.workspace_bytes = workspace_bytes;
  arguments.stream = stream;
  lla_status status = run_forward(known, arguments, batch, handle.state, error);
  if (status == LLA_OK) status = commit_batch(handle.state, batch, {nullptr, 0, 0}, stream, error);
  // The memory goes back at the end of the call, so the work must have finished.
  const lla_status waited = wait_for(*known.context, stream, status == LLA_OK ? error : nullptr);
  if (status == LLA_OK) status = waited;
  if (status != LLA_OK) discard_batch(batch);
  return status;
}
