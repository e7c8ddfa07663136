// SPDX-License-Identifier: Apache-2.0
// Golden files of whole blocks: outputs through a state and without one, gradients of input and weights.
#include <algorithm>
#include <cstring>

#include "config.h"
#include "report.h"

namespace conformance {
namespace {

using lm::Tensor;

class BlockCase {
 public:
  BlockCase(const lm::TensorFile& file, const Options& options)
      : config_(lm::read_golden_config(file.metadata, file.tensors)) {
    x_ = file.at("in.x").converted(options.dtype);
    if (x_.shape.size() != 3) throw lm::Error("in.x must have three axes");
    batch_size_ = x_.shape[0];
    rows_ = x_.shape[1];
    y_ = Tensor(options.dtype, x_.shape);
    dx_ = Tensor(options.wide(), x_.shape);
    if (file.find("in.do")) dy_ = file.at("in.do").converted(options.dtype);
    for (const lm::ParameterInfo& info : lm::block_parameters(config_)) {
      const Tensor& w = file.at("w." + info.name);
      if (w.shape != info.shape) throw lm::Error("tensor 'w." + info.name + "' has shape " + lm::shape_text(w.shape));
      // Matrices are exact in bfloat16; gate parameters are not and stay in fp32, as models keep them.
      const bool rounded = info.kind == lm::ParameterKind::Matrix || info.kind == lm::ParameterKind::Convolution ||
                           info.kind == lm::ParameterKind::OutputProjection;
      names_.push_back(info.name);
      roles_.push_back(info.role);
      weights_.push_back(rounded ? w.converted(options.dtype) : w);
      gradients_.emplace_back(options.wide(), info.shape);
    }
    // The model of a block rounds nothing inside, so that the block does not either unless it is asked to.
    layer_ = lm::make_layer(options.context, lm::block_description(config_, options.grain, options.inner));
    limits_.max_sequences = batch_size_;
    limits_.max_rows = batch_size_ * rows_;
    limits_.max_rows_per_sequence = rows_;
    limits_.max_length = rows_;
    batch_ = lm::Batch(options.context, limits_);
    workspace_ = lm::Buffer(std::max(lm::workspace_bytes(layer_.get(), limits_, LLA_PASS_FORWARD),
                                     lm::workspace_bytes(layer_.get(), limits_, LLA_PASS_BACKWARD)));
    lla_state_desc d = LLA_STATE_DESC_INIT;
    d.slots = batch_size_;
    d.max_length = rows_;
    lla_layer* layers[] = {layer_.get()};
    lla_state* state = nullptr;
    LM_CALL(lla_state_create, layers, int64_t{1}, &d, static_cast<const lla_block_memory*>(nullptr), int64_t{0}, &state);
    state_.reset(state);
  }

  int64_t rows() const { return rows_; }
  bool has_gradients() const { return !dy_.shape.empty(); }
  std::vector<double> y() const { return y_.values(); }
  const Tensor& dx() const { return dx_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<Tensor>& gradients() const { return gradients_; }

  void append(const std::vector<Piece>& pieces) {
    std::memset(y_.data(), 0xff, y_.bytes.size());
    for (const Piece& piece : pieces) {
      forward(piece, state_.get());
      LM_CALL(lla_state_commit, state_.get(), batch_.get(), lm::no_index(), static_cast<void*>(nullptr));
    }
  }

  void run_stateless() {
    std::memset(y_.data(), 0xff, y_.bytes.size());
    forward({0, rows_}, nullptr);
  }

  // Of the last stateless run. Gradients start as NaN, so that one that is not written is seen.
  void backward() {
    std::vector<lla_binding> gradients;
    for (size_t i = 0; i < gradients_.size(); ++i) {
      std::memset(gradients_[i].data(), 0xff, gradients_[i].bytes.size());
      gradients.push_back(lla_bind(roles_[i], gradients_[i].view()));
    }
    std::memset(dx_.data(), 0xff, dx_.bytes.size());
    gradients.push_back(lla_bind(LLA_X, dx_.view()));
    const std::vector<lla_binding> weights = weight_bindings();
    const lla_binding io[] = {lla_bind(LLA_X, x_.view())};
    const lla_binding outputs[] = {lla_bind(LLA_Y, dy_.view())};
    lla_backward_args a = LLA_BACKWARD_ARGS_INIT;
    a.batch = batch_.get();
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
    LM_CALL(lla_layer_backward, layer_.get(), &a);
  }

 private:
  std::vector<lla_binding> weight_bindings() const {
    std::vector<lla_binding> weights;
    for (size_t i = 0; i < weights_.size(); ++i) weights.push_back(lla_bind(roles_[i], weights_[i].view()));
    return weights;
  }

  void forward(const Piece& piece, lla_state* state) {
    lla_rows r = LLA_ROWS_INIT;
    r.sequences = batch_size_;
    r.rows_per_sequence = piece.end - piece.begin;
    LM_CALL(lla_batch_plan, batch_.get(), state, &r, static_cast<void*>(nullptr));
    const lla_binding io[] = {lla_bind(LLA_X, slice(x_, piece.begin, piece.end)),
                              lla_bind(LLA_Y, slice(y_, piece.begin, piece.end))};
    const std::vector<lla_binding> weights = weight_bindings();
    lla_forward_args a = LLA_FORWARD_ARGS_INIT;
    a.batch = batch_.get();
    a.state = state;
    a.io = io;
    a.io_count = 2;
    a.weights = weights.data();
    a.weight_count = static_cast<int64_t>(weights.size());
    a.workspace = workspace_.data();
    a.workspace_bytes = workspace_.bytes();
    LM_CALL(lla_layer_forward, layer_.get(), &a);
  }

  lm::ModelConfig config_;
  int64_t batch_size_ = 0, rows_ = 0;
  Tensor x_, y_, dx_, dy_;
  std::vector<std::string> names_;
  std::vector<lla_role> roles_;
  std::vector<Tensor> weights_, gradients_;
  lm::Layer layer_;
  lla_batch_limits limits_ = LLA_BATCH_LIMITS_INIT;
  lm::State state_;
  lm::Batch batch_;
  lm::Buffer workspace_;
};

}  // namespace

void run_block(const lm::TensorFile& file, const std::string& name, const Options& options, Report* report) {
  const double tolerance = tolerance_of(options, CaseKind::Block, name);
  const std::vector<double> reference = file.at("out.y").values();
  BlockCase block(file, options);
  block.append(pieces_of(options, block.rows()));
  report->check("out.y", relative_error(block.y(), reference), tolerance);
  block.run_stateless();
  report->check("stateless.out.y", relative_error(block.y(), reference), tolerance);
  if (!block.has_gradients()) return;
  block.backward();
  const double gradient_tolerance = tolerance_of(options, CaseKind::BlockGradient, name);
  report->check("grad.x", relative_error(block.dx().values(), file.at("grad.x").values()), gradient_tolerance);
  for (size_t i = 0; i < block.names().size(); ++i) {
    const std::string tensor = "grad.w." + block.names()[i];
    report->check(tensor, relative_error(block.gradients()[i].values(), file.at(tensor).values()), gradient_tolerance);
  }
}

}  // namespace conformance
