// SPDX-License-Identifier: Apache-2.0
// Parameters and layers of a model.
#include "model.h"

#include <cstring>

#include "error.h"
#include "safetensors.h"

namespace lm {

Model::Model(lla_context* context, Threads& threads, const ModelConfig& config, const std::map<std::string, Tensor>& tensors,
             lla_dtype activation, int64_t grain)
    : context_(context), threads_(threads), config_(config), activation_(activation) {
  check_parameters(config, tensors, {"in.", "out.", "grad."});
  for (const ParameterInfo& info : model_parameters(config)) {
    Parameter p;
    p.info = info;
    p.value = tensors.at(info.name);
    p.device_value = DeviceBuffer::beside_host(context, p.value.bytes.size());
    parameters_.push_back(std::move(p));
  }
  send_values();
  // The order of model_parameters(): embedding, then block by block, then final norm and head.
  size_t next = 1;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    Block b;
    b.mixer_norm = next++;
    b.mixer = next;
    b.mixer_count = block_parameters(config).size();
    next += b.mixer_count;
    if (config.mlp > 0) {
      b.mlp_norm = next++;
      b.gate = next++;
      b.up = next++;
      b.down = next++;
    }
    blocks_.push_back(b);
  }
  final_norm_ = next++;
  head_ = config.tied ? embedding_ : next;

  // The public classes round q, k and v to the activations' type inside a block. A backend that keeps them unrounded is at
  // least as exact.
  lla_layer_desc mixer = block_description(config, grain, LLA_DTYPE_DEFAULT);
  if (activation == LLA_BF16 || activation == LLA_F16) {
    mixer.inner_dtype = activation;
    if (lla_layer_supported(context, &mixer, nullptr) == LLA_OK)
      tail_dtype_ = activation;
    else
      mixer.inner_dtype = LLA_DTYPE_DEFAULT;
  }
  mixer_layer_ = make_layer(context, mixer);
  lla_layer_desc norm = LLA_LAYER_DESC_INIT;
  norm.kind = LLA_LAYER_GATED_NORM;
  norm.heads = 1;
  norm.value_dim = config.hidden;
  norm.hidden = config.hidden;
  norm.norm_form = LLA_NORM_NORM_FIRST;
  norm.norm_epsilon = config.norm_epsilon;
  norm_layer_ = make_layer(context, norm);
  const auto projection = [&](int64_t inputs, int64_t outputs) {
    lla_layer_desc d = LLA_LAYER_DESC_INIT;
    d.kind = LLA_LAYER_PROJECTION;
    d.hidden = inputs;
    d.outputs = outputs;
    return make_layer(context, d);
  };
  if (config.mlp > 0) {
    up_layer_ = projection(config.hidden, config.mlp);
    down_layer_ = projection(config.mlp, config.hidden);
  }
  head_layer_ = projection(config.hidden, config.vocab);
}

std::map<std::string, Tensor> Model::tensors() const {
  std::map<std::string, Tensor> all;
  for (const Parameter& p : parameters_) all[p.info.name] = p.value;
  return all;
}

void Model::make_gradients(lla_dtype dtype) {
  for (Parameter& p : parameters_) {
    p.gradient = Tensor(dtype, p.info.shape);
    p.device_gradient = DeviceBuffer::beside_host(context_, p.gradient.bytes.size());
  }
}

void Model::zero_gradients() {
  for (Parameter& p : parameters_) std::memset(p.gradient.data(), 0, p.gradient.bytes.size());
}

void Model::send_values() {
  for (const Parameter& p : parameters_) p.device_value.send(p.value.data());
}

void Model::send_gradients() {
  for (const Parameter& p : parameters_) p.device_gradient.send(p.gradient.data());
}

void Model::fetch_gradients() {
  for (Parameter& p : parameters_) p.device_gradient.fetch(p.gradient.data());
  wait_for_device(context_);
}

Checkpoint load_checkpoint(const std::string& folder) {
  Checkpoint checkpoint;
  TensorFile file = read_safetensors(folder + "/model.safetensors");
  const std::string config = folder + "/config.json", text = read_file(config);
  try {
    checkpoint.config = read_config(text, file.tensors);
  } catch (const Error& e) {
    throw Error(config + ": " + e.what());
  }
  checkpoint.tensors = std::move(file.tensors);
  checkpoint.metadata = std::move(file.metadata);
  check_parameters(checkpoint.config, checkpoint.tensors);
  return checkpoint;
}

}  // namespace lm
