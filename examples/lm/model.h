// SPDX-License-Identifier: Apache-2.0
// A language model on lla's blocks: parameters and layers (Model), and the buffers and batches of one way of running it
// (ModelRun): training without a state, or serving with one.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "config.h"
#include "handles.h"
#include "rowmath.h"
#include "threads.h"

namespace lm {

struct Parameter {
  ParameterInfo info;
  Tensor value;
  Tensor gradient;                             // made by Model::make_gradients()
  DeviceBuffer device_value, device_gradient;  // empty on the CPU

  lla_tensor value_view() const { return view_of(value, device_value); }  // what lla takes
  lla_tensor gradient_view() const { return view_of(gradient, device_gradient); }

 private:
  static lla_tensor view_of(const Tensor& host, const DeviceBuffer& device) {
    lla_tensor view = host.view();
    if (device) view.data = device.data();
    return view;
  }
};

class Model {
 public:
  // `activation`: type of everything between the layers. `tensors` must hold the parameters (names as in the config).
  Model(lla_context* context, Threads& threads, const ModelConfig& config, const std::map<std::string, Tensor>& tensors,
        lla_dtype activation = LLA_F32, int64_t grain = 64);

  const ModelConfig& config() const { return config_; }
  lla_context* context() const { return context_; }
  Threads& threads() const { return threads_; }
  lla_dtype activation() const { return activation_; }
  std::vector<Parameter>& parameters() { return parameters_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  std::map<std::string, Tensor> tensors() const;
  void make_gradients(lla_dtype dtype);  // LLA_F32 or LLA_F64
  void zero_gradients();
  // The host's values and gradients are the ones that count. Who changes values sends them to the device;
  // ModelRun::backward() sends and fetches the gradients. On the CPU these do nothing.
  void send_values();
  void send_gradients();
  void fetch_gradients();

 private:
  friend class ModelRun;
  struct Block {  // indices into parameters_
    size_t mixer_norm = 0, mixer = 0, mixer_count = 0, mlp_norm = 0, gate = 0, up = 0, down = 0;
  };

  lla_context* context_;
  Threads& threads_;
  ModelConfig config_;
  lla_dtype activation_, tail_dtype_ = LLA_DTYPE_DEFAULT;  // tail: of the states' raw rows
  std::vector<Parameter> parameters_;
  std::vector<Block> blocks_;
  size_t embedding_ = 0, final_norm_ = 0, head_ = 0;
  // One of each: layers own no weights, so that all blocks share them.
  Layer norm_layer_, mixer_layer_, up_layer_, down_layer_, head_layer_;
};

class ModelRun {
 public:
  struct Options {
    int64_t sequences = 1;   // most sequences of a call
    int64_t rows = 1;        // most rows of a sequence and call
    bool training = false;   // keeps what backward() needs; no state
    int64_t slots = 0;       // > 0: sequences have histories
    int64_t max_length = 0;  // of a history
  };
  ModelRun(Model& model, const Options& options);

  // Runs `sequences` sequences of `rows` tokens. Without a state they start at position 0; with one, sequence b continues
  // slot slots[b] (no `slots`: slot b) and commit() makes the rows part of it. Returns the logits of all rows, or of the
  // last row of each sequence. They stay valid until the next call.
  Rows forward(const int32_t* ids, int64_t sequences, int64_t rows, const int64_t* slots = nullptr, bool last_only = false);
  void commit();
  // Mean loss of the last forward() over targets >= 0; losses of single rows go to `losses` if it is not null.
  double loss(const int32_t* targets, std::vector<double>* losses = nullptr);
  // Adds the gradient of that mean loss to the parameters' gradients.
  double backward(const int32_t* targets);

  lla_state* state() const { return state_.get(); }
  int64_t state_bytes(int64_t slot) const;

 private:
  struct Saved {  // what one block keeps for backward(); serving reuses one for all blocks
    RowBuffer input, normed, middle, mlp_normed, gate, up, product;
    DeviceBuffer mixer;
  };
  struct Bindings;

  // Between host and device; nothing on the CPU.
  void send(const Rows& rows);
  void fetch(const Rows& rows);
  void keep(const Rows& from, const Rows& to);  // a copy where lla computes
  void norm(size_t weight, const Rows& x, const Rows& y);
  void norm_backward(size_t weight, const Rows& x, const Rows& dy, const Rows& dx);
  void project(const Layer& layer, size_t weight, const Rows& x, const Rows& y);
  void project_backward(const Layer& layer, size_t weight, const Rows& x, const Rows& dy, const Rows& dx, bool accumulate);
  void plan_rows(int64_t rows);
  lla_binding weight(size_t index, lla_role role) const;
  lla_binding weight_gradient(size_t index, lla_role role);
  void run_forward(lla_layer* layer, lla_batch* batch, lla_state* state, int64_t layer_index, const Rows& x, const Rows& y,
                   const std::vector<lla_binding>& weights, const DeviceBuffer* saved);
  void run_backward(lla_layer* layer, lla_batch* batch, const Rows& x, const Rows& dy, const Rows& dx, bool accumulate,
                    const std::vector<lla_binding>& weights, std::vector<lla_binding> gradients, const DeviceBuffer* saved);
  std::vector<lla_binding> mixer_weights(size_t block) const;

  Model& model_;
  Options options_;
  State state_;  // before the batches: they give their plans back to it
  Batch mixer_batch_, rows_batch_;
  int64_t planned_rows_ = -1;
  DeviceBuffer workspace_;
  std::vector<Saved> saved_;
  RowBuffer stream_, branch_, final_, last_, logits_;  // stream: h
  RowBuffer dstream_, dnormed_, dproduct_;             // training
  std::vector<int32_t> ids_;
  int64_t sequences_ = 0, rows_ = 0, logit_rows_ = 0;
  bool forwarded_ = false;
};

// The checkpoint of a folder: config.json and model.safetensors.
struct Checkpoint {
  ModelConfig config;
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
};
Checkpoint load_checkpoint(const std::string& folder);

}  // namespace lm
