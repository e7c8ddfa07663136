// SPDX-License-Identifier: Apache-2.0
// One way of running a model: its batches, workspace and activations, forward and backward.
#include <algorithm>
#include <cstring>

#include "model.h"

namespace lm {

ModelRun::ModelRun(Model& model, const Options& options) : model_(model), options_(options) {
  const ModelConfig& c = model.config();
  const int64_t total = options.sequences * options.rows;
  const lla_dtype type = model.activation();
  if (options.slots > 0) {
    std::vector<lla_layer*> layers(static_cast<size_t>(c.layers), model.mixer_layer_.get());
    lla_state_desc d = LLA_STATE_DESC_INIT;
    d.slots = options.slots;
    d.max_length = options.max_length;
    d.tail_dtype = model.tail_dtype_;
    lla_state* state = nullptr;
    LM_CALL(lla_state_create, layers.data(), c.layers, &d, static_cast<const lla_block_memory*>(nullptr), int64_t{0},
            &state);
    state_.reset(state);
  }
  lla_batch_limits mixer_limits = LLA_BATCH_LIMITS_INIT;
  mixer_limits.max_sequences = options.sequences;
  mixer_limits.max_rows = total;
  mixer_limits.max_rows_per_sequence = options.rows;
  mixer_limits.max_length = options.slots > 0 ? options.max_length : options.rows;
  mixer_batch_ = Batch(model.context(), mixer_limits);
  lla_batch_limits row_limits = LLA_BATCH_LIMITS_INIT;
  row_limits.max_sequences = 1;
  row_limits.max_rows = total;
  rows_batch_ = Batch(model.context(), row_limits);

  size_t bytes = 0;
  for (const lla_pass pass : {LLA_PASS_FORWARD, LLA_PASS_BACKWARD}) {
    if (pass == LLA_PASS_BACKWARD && !options.training) continue;
    bytes = std::max(bytes, workspace_bytes(model.mixer_layer_.get(), mixer_limits, pass));
    for (const Layer* layer : {&model.norm_layer_, &model.up_layer_, &model.down_layer_, &model.head_layer_}) {
      if (*layer) bytes = std::max(bytes, workspace_bytes(layer->get(), row_limits, pass));
    }
  }
  workspace_ = DeviceBuffer(model.context(), bytes);

  saved_.resize(options.training ? static_cast<size_t>(c.layers) : 1);
  for (Saved& s : saved_) {
    if (options.training) {
      s.input = RowBuffer(model.context(), total, c.hidden, type);
      s.middle = RowBuffer(model.context(), total, c.hidden, type);
      const size_t mixer_bytes = saved_bytes(model.mixer_layer_.get(), mixer_limits);
      if (mixer_bytes) s.mixer = DeviceBuffer(model.context(), mixer_bytes);
    }
    s.normed = RowBuffer(model.context(), total, c.hidden, type);
    if (c.mlp > 0) {
      s.mlp_normed = RowBuffer(model.context(), total, c.hidden, type);
      s.gate = RowBuffer(model.context(), total, c.mlp, type);
      s.up = RowBuffer(model.context(), total, c.mlp, type);
      s.product = RowBuffer(model.context(), total, c.mlp, type);
    }
  }
  stream_ = RowBuffer(model.context(), total, c.hidden, type);
  branch_ = RowBuffer(model.context(), total, c.hidden, type);
  final_ = RowBuffer(model.context(), total, c.hidden, type);
  last_ = RowBuffer(model.context(), options.sequences, c.hidden, type);
  logits_ = RowBuffer(model.context(), total, c.vocab, type);
  if (options.training) {
    dstream_ = RowBuffer(model.context(), total, c.hidden, type);
    dnormed_ = RowBuffer(model.context(), total, c.hidden, type);
    if (c.mlp > 0) dproduct_ = RowBuffer(model.context(), total, c.mlp, type);
  }
}

lla_binding ModelRun::weight(size_t index, lla_role role) const {
  return lla_bind(role, model_.parameters_[index].value_view());
}

lla_binding ModelRun::weight_gradient(size_t index, lla_role role) {
  lla_binding b = lla_bind(role, model_.parameters_[index].gradient_view());
  b.flags = LLA_ACCUMULATE;
  return b;
}

std::vector<lla_binding> ModelRun::mixer_weights(size_t block) const {
  const Model::Block& b = model_.blocks_[block];
  std::vector<lla_binding> weights;
  for (size_t i = b.mixer; i < b.mixer + b.mixer_count; ++i) weights.push_back(weight(i, model_.parameters_[i].info.role));
  return weights;
}

void ModelRun::run_forward(lla_layer* layer, lla_batch* batch, lla_state* state, int64_t layer_index, const Rows& x,
                           const Rows& y, const std::vector<lla_binding>& weights, const DeviceBuffer* saved) {
  const lla_binding io[] = {lla_bind(LLA_X, x.view()), lla_bind(LLA_Y, y.view())};
  lla_forward_args a = LLA_FORWARD_ARGS_INIT;
  a.batch = batch;
  a.state = state;
  a.layer_index = layer_index;
  a.io = io;
  a.io_count = 2;
  a.weights = weights.data();
  a.weight_count = static_cast<int64_t>(weights.size());
  a.workspace = workspace_.data();
  a.workspace_bytes = workspace_.bytes();
  if (saved && saved->bytes()) {
    a.saved = saved->data();
    a.saved_bytes = saved->bytes();
  }
  LM_CALL(lla_layer_forward, layer, &a);
}

void ModelRun::run_backward(lla_layer* layer, lla_batch* batch, const Rows& x, const Rows& dy, const Rows& dx,
                            bool accumulate, const std::vector<lla_binding>& weights, std::vector<lla_binding> gradients,
                            const DeviceBuffer* saved) {
  const lla_binding io[] = {lla_bind(LLA_X, x.view())};
  const lla_binding outputs[] = {lla_bind(LLA_Y, dy.view())};
  gradients.push_back(lla_bind(LLA_X, dx.view()));
  if (accumulate) gradients.back().flags = LLA_ACCUMULATE;
  lla_backward_args a = LLA_BACKWARD_ARGS_INIT;
  a.batch = batch;
  a.io = io;
  a.io_count = 1;
  a.weights = weights.data();
  a.weight_count = static_cast<int64_t>(weights.size());
  a.outputs = outputs;
  a.output_count = 1;
  a.gradients = gradients.data();
  a.gradient_count = static_cast<int64_t>(gradients.size());
  a.workspace = workspace_.data();
  a.workspace_bytes = workspace_.bytes();
  if (saved && saved->bytes()) {
    a.saved = saved->data();
    a.saved_bytes = saved->bytes();
  }
  LM_CALL(lla_layer_backward, layer, &a);
}

void ModelRun::send(const Rows& rows) {
  if (rows.device)
    LM_CALL(lla_device_copy, model_.context(), rows.device, static_cast<const void*>(rows.data), rows.bytes(),
            static_cast<void*>(nullptr));
}

void ModelRun::fetch(const Rows& rows) {
  if (!rows.device) return;
  LM_CALL(lla_device_copy, model_.context(), rows.data, static_cast<const void*>(rows.device), rows.bytes(),
          static_cast<void*>(nullptr));
  wait_for_device(model_.context());
}

void ModelRun::keep(const Rows& from, const Rows& to) {
  LM_CALL(lla_device_copy, model_.context(), to.lla_data(), static_cast<const void*>(from.lla_data()), from.bytes(),
          static_cast<void*>(nullptr));
}

void ModelRun::norm(size_t index, const Rows& x, const Rows& y) {
  run_forward(model_.norm_layer_.get(), rows_batch_.get(), nullptr, 0, x, y, {weight(index, LLA_WEIGHT_NORM)}, nullptr);
}

void ModelRun::norm_backward(size_t index, const Rows& x, const Rows& dy, const Rows& dx) {
  // The residual stream goes on beside the norm, so that the norm's gradient is added to the stream's.
  run_backward(model_.norm_layer_.get(), rows_batch_.get(), x, dy, dx, true, {weight(index, LLA_WEIGHT_NORM)},
               {weight_gradient(index, LLA_WEIGHT_NORM)}, nullptr);
}

void ModelRun::project(const Layer& layer, size_t index, const Rows& x, const Rows& y) {
  run_forward(layer.get(), rows_batch_.get(), nullptr, 0, x, y, {weight(index, LLA_WEIGHT_PROJ)}, nullptr);
}

void ModelRun::project_backward(const Layer& layer, size_t index, const Rows& x, const Rows& dy, const Rows& dx,
                                bool accumulate) {
  run_backward(layer.get(), rows_batch_.get(), x, dy, dx, accumulate, {weight(index, LLA_WEIGHT_PROJ)},
               {weight_gradient(index, LLA_WEIGHT_PROJ)}, nullptr);
}

void ModelRun::plan_rows(int64_t rows) {
  if (planned_rows_ == rows) return;
  planned_rows_ = -1;
  lla_rows r = LLA_ROWS_INIT;
  r.sequences = 1;
  r.rows_per_sequence = rows;
  LM_CALL(lla_batch_plan, rows_batch_.get(), static_cast<lla_state*>(nullptr), &r, static_cast<void*>(nullptr));
  planned_rows_ = rows;
}

Rows ModelRun::forward(const int32_t* ids, int64_t sequences, int64_t rows, const int64_t* slots, bool last_only) {
  const ModelConfig& c = model_.config();
  Threads& threads = model_.threads();
  const int64_t n = sequences * rows;
  if (sequences < 1 || rows < 1 || sequences > options_.sequences || rows > options_.rows)
    throw Error("more rows than planned for");
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] < 0 || ids[i] >= c.vocab) throw Error("token " + std::to_string(ids[i]) + " is not in the vocabulary");
  }
  forwarded_ = false;
  ids_.assign(ids, ids + n);
  sequences_ = sequences;
  rows_ = rows;

  lla_rows r = LLA_ROWS_INIT;
  r.sequences = sequences;
  r.rows_per_sequence = rows;
  if (slots) r.slot_in = index_of(slots);
  LM_CALL(lla_batch_plan, mixer_batch_.get(), state_.get(), &r, static_cast<void*>(nullptr));
  plan_rows(n);

  const Rows h = stream_.rows(n), branch = branch_.rows(n);
  const size_t row_bytes = static_cast<size_t>(c.hidden) * lla_dtype_size(h.dtype);
  embed(threads, ids, model_.parameters_[model_.embedding_].value, h);
  for (size_t layer = 0; layer < model_.blocks_.size(); ++layer) {
    const Model::Block& b = model_.blocks_[layer];
    Saved& s = saved_[options_.training ? layer : 0];
    send(h);
    if (options_.training) keep(h, s.input.rows(n));
    norm(b.mixer_norm, h, s.normed.rows(n));
    run_forward(model_.mixer_layer_.get(), mixer_batch_.get(), state_.get(), state_ ? static_cast<int64_t>(layer) : 0,
                s.normed.rows(n), branch, mixer_weights(layer), options_.training ? &s.mixer : nullptr);
    fetch(branch);
    add(threads, branch, h);
    if (c.mlp == 0) continue;
    send(h);
    if (options_.training) keep(h, s.middle.rows(n));
    norm(b.mlp_norm, h, s.mlp_normed.rows(n));
    project(model_.up_layer_, b.gate, s.mlp_normed.rows(n), s.gate.rows(n));
    project(model_.up_layer_, b.up, s.mlp_normed.rows(n), s.up.rows(n));
    fetch(s.gate.rows(n));
    fetch(s.up.rows(n));
    gate_product(threads, s.gate.rows(n), s.up.rows(n), s.product.rows(n));
    send(s.product.rows(n));
    project(model_.down_layer_, b.down, s.product.rows(n), branch);
    fetch(branch);
    add(threads, branch, h);
  }
  Rows top = h;
  logit_rows_ = n;
  if (last_only) {  // serving: the head is needed for the last row of each sequence only
    top = last_.rows(sequences);
    for (int64_t b = 0; b < sequences; ++b) std::memcpy(top.row(b), h.row((b + 1) * rows - 1), row_bytes);
    logit_rows_ = sequences;
    plan_rows(sequences);
  }
  send(top);
  norm(model_.final_norm_, top, final_.rows(logit_rows_));
  project(model_.head_layer_, model_.head_, final_.rows(logit_rows_), logits_.rows(logit_rows_));
  fetch(logits_.rows(logit_rows_));
  forwarded_ = true;
  return logits_.rows(logit_rows_);
}

void ModelRun::commit() {
  if (!state_ || !forwarded_) throw Error("nothing to commit");
  LM_CALL(lla_state_commit, state_.get(), mixer_batch_.get(), no_index(), static_cast<void*>(nullptr));
  forwarded_ = false;
}

double ModelRun::loss(const int32_t* targets, std::vector<double>* losses) {
  std::vector<double> own;
  std::vector<double>& rows = losses ? *losses : own;
  rows.resize(static_cast<size_t>(logit_rows_));
  cross_entropy(model_.threads(), logits_.rows(logit_rows_), targets, 0, rows.data());
  double sum = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < logit_rows_; ++i) {
    sum += rows[static_cast<size_t>(i)];
    if (targets[i] >= 0) ++count;
  }
  return count ? sum / static_cast<double>(count) : 0;
}

double ModelRun::backward(const int32_t* targets) {
  if (!options_.training || !forwarded_) throw Error("backward() needs a forward() of a training run");
  const ModelConfig& c = model_.config();
  Threads& threads = model_.threads();
  const int64_t n = logit_rows_;
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += targets[i] >= 0;
  if (count == 0) throw Error("backward() without a target");
  std::vector<double> losses(static_cast<size_t>(n));
  const Rows dlogits = logits_.rows(n);  // overwritten in place
  cross_entropy(threads, dlogits, targets, 1.0 / static_cast<double>(count), losses.data());

  const Rows dh = dstream_.rows(n), dnormed = dnormed_.rows(n);
  std::memset(dh.data, 0, dh.bytes());
  model_.send_gradients();
  send(dlogits);
  send(dh);
  project_backward(model_.head_layer_, model_.head_, final_.rows(n), dlogits, dnormed, false);
  norm_backward(model_.final_norm_, stream_.rows(n), dnormed, dh);
  for (size_t layer = model_.blocks_.size(); layer-- > 0;) {
    const Model::Block& b = model_.blocks_[layer];
    Saved& s = saved_[layer];
    if (c.mlp > 0) {
      const Rows dproduct = dproduct_.rows(n), gate = s.gate.rows(n), up = s.up.rows(n);
      project_backward(model_.down_layer_, b.down, s.product.rows(n), dh, dproduct, false);
      fetch(dproduct);
      gate_product_backward(threads, dproduct, gate, up);
      send(gate);
      send(up);
      project_backward(model_.up_layer_, b.gate, s.mlp_normed.rows(n), gate, dnormed, false);
      project_backward(model_.up_layer_, b.up, s.mlp_normed.rows(n), up, dnormed, true);
      norm_backward(b.mlp_norm, s.middle.rows(n), dnormed, dh);
    }
    std::vector<lla_binding> gradients;
    for (size_t i = b.mixer; i < b.mixer + b.mixer_count; ++i) {
      gradients.push_back(weight_gradient(i, model_.parameters_[i].info.role));
    }
    run_backward(model_.mixer_layer_.get(), mixer_batch_.get(), s.normed.rows(n), dh, dnormed, false, mixer_weights(layer),
                 std::move(gradients), &s.mixer);
    norm_backward(b.mixer_norm, s.input.rows(n), dnormed, dh);
  }
  fetch(dh);
  model_.fetch_gradients();
  embed_backward(threads, ids_.data(), dh, &model_.parameters_[model_.embedding_].gradient);
  forwarded_ = false;
  double sum = 0;
  for (const double x : losses) sum += x;
  return sum / static_cast<double>(count);
}

int64_t ModelRun::state_bytes(int64_t slot) const {
  int64_t bytes = 0;
  LM_CALL(lla_state_query, state_.get(), LLA_STATE_SLOT_BYTES, slot, &bytes);
  return bytes;
}

}  // namespace lm
