// SPDX-License-Identifier: Apache-2.0
// Times a projection.
#include "projection_bench.h"

#include <vector>

#include "error.h"
#include "handles.h"
#include "random.h"
#include "tensor.h"

namespace bench {

Timing measure_projection(lla_context* context, lla_dtype dtype, int64_t rows, int64_t outputs, int64_t inputs,
                          double seconds) {
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = LLA_LAYER_PROJECTION;
  d.hidden = inputs;
  d.outputs = outputs;
  const lm::Layer layer = lm::make_layer(context, d);
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  limits.max_sequences = 1;
  limits.max_rows = rows;
  const lm::Batch batch(context, limits);
  const lm::Buffer workspace(lm::workspace_bytes(layer.get(), limits, LLA_PASS_FORWARD));
  lm::Random random(1, 1);
  const auto make = [&](int64_t height) {
    std::vector<double> values(static_cast<size_t>(height * inputs));
    for (double& v : values) v = 2 * random.uniform() - 1;
    return lm::Tensor::of(values, dtype, {height, inputs});
  };
  const lm::Tensor x = make(rows), w = make(outputs), y(dtype, {rows, outputs});
  lla_rows r = LLA_ROWS_INIT;
  r.sequences = 1;
  r.rows_per_sequence = rows;
  LM_CALL(lla_batch_plan, batch.get(), static_cast<lla_state*>(nullptr), &r, static_cast<void*>(nullptr));
  const lla_binding io[] = {lla_bind(LLA_X, x.view()), lla_bind(LLA_Y, y.view())};
  const lla_binding weights[] = {lla_bind(LLA_WEIGHT_PROJ, w.view())};
  lla_forward_args a = LLA_FORWARD_ARGS_INIT;
  a.batch = batch.get();
  a.io = io;
  a.io_count = 2;
  a.weights = weights;
  a.weight_count = 1;
  a.workspace = workspace.data();
  a.workspace_bytes = workspace.bytes();
  return measure(seconds, [&] { LM_CALL(lla_layer_forward, layer.get(), &a); });
}

}  // namespace bench
