// SPDX-License-Identifier: Apache-2.0
// The same wrapper without exceptions: statuses, and an error that explains them. Compiles with -fno-exceptions -fno-rtti.
#include <cstdio>
#include <lla/lla.hpp>

namespace {

constexpr std::int64_t kRows = 70, kHeads = 2, kDim = 8;
float q[kRows * kHeads * kDim], y[kRows * kHeads * kDim], dq[kRows * kHeads * kDim];

lla_status run(lla::error &reason) {
  lla::context context;
  lla::layer layer;
  lla::state state;
  lla::batch batch;
  lla::batch_limits limits;
  lla::layer_desc description;
  lla::context_options options;
  lla::rows rows;
  lla::host_memory image;
  std::int64_t length = 0;
  lla_status status;

  options.backend = LLA_BACKEND_CPU;
  description.kind = LLA_LAYER_MIXER;
  description.mixer = LLA_SCALAR_GATE;
  description.heads = kHeads;
  description.key_dim = description.value_dim = kDim;
  limits.max_sequences = 1;
  limits.max_rows = rows.rows_per_sequence = kRows;
  rows.sequences = 1;
  if ((status = context.create(options, reason)) != LLA_OK) return status;
  if ((status = layer.create(context, description, reason)) != LLA_OK) return status;
  if ((status = state.create({&layer, 1}, lla::state_desc(), reason)) != LLA_OK) return status;
  if ((status = batch.create(context, limits, reason)) != LLA_OK) return status;

  const lla_binding io[] = {lla::bind(LLA_Q, q, {kRows, kHeads, kDim}), lla::bind(LLA_K, q, {kRows, kHeads, kDim}),
                            lla::bind(LLA_V, q, {kRows, kHeads, kDim}), lla::bind(LLA_Y, y, {kRows, kHeads, kDim})};
  const lla_binding gradient[] = {lla::bind(LLA_Q, dq, {kRows, kHeads, kDim})};
  if ((status = batch.plan(state, rows, reason)) != LLA_OK) return status;
  if ((status = layer.forward(batch, io, {}, 0, reason)) != LLA_OK) return status;
  if ((status = layer.backward(batch, {io, 3}, {}, {&io[3], 1}, gradient, 0, reason)) != LLA_OK) return status;
  if ((status = state.commit(batch, {}, reason)) != LLA_OK) return status;
  if ((status = state.length(0, length, reason)) != LLA_OK) return status;
  std::printf("%d rows of %d\n", static_cast<int>(length), static_cast<int>(kRows));
  if ((status = state.save(0, lla::tag("zeros"), image, reason)) != LLA_OK) return status;
  if ((status = state.clear(0, 0, reason)) != LLA_OK) return status;
  if ((status = state.load(0, image, lla::tag("zeros"), reason)) != LLA_OK) return status;
  if ((status = state.append(layer, 0, io, {}, reason)) != LLA_OK) return status;
  context = lla::context();             // released in any order: what still needs it keeps it
  return state.truncate(0, 1, reason);  // before the chunk that began at 128: refused, and nothing has changed
}

}  // namespace

int main() {
  lla::error reason;
  const lla_status status = run(reason);
  std::printf("%s: %s\n", reason.name(), reason.text);
  return status == LLA_ROLLBACK_LIMIT ? 0 : 1;
}
