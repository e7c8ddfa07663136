// SPDX-License-Identifier: Apache-2.0
// Golden files of mixers: outputs through a state (whole or in pieces), the state itself, outputs and gradients of a call
// without a state, and gradients through states at a cut.
#include <algorithm>
#include <cstring>
#include <map>

#include "fenwick_state.h"
#include "report.h"

namespace conformance {
namespace {

using lm::Tensor;

struct Input {
  lla_role role;
  std::string name;  // "q"
  Tensor value;
  Tensor gradient;
};

// One mixer on one file's data.
class MixerCase {
 public:
  MixerCase(const lm::TensorFile& file, const Options& options, bool linear) : options_(options) {
    const std::string kind = file.meta("mixer");
    if (kind != "scalar_gate" && kind != "delta_rule") throw lm::Error("mixer '" + kind + "' is not known");
    const Tensor& q = file.at("in.q");
    const Tensor& v = file.at("in.v");
    if (q.shape.size() != 4 || v.shape.size() != 4) throw lm::Error("in.q and in.v must have four axes");
    batch_size_ = q.shape[0];
    rows_ = q.shape[1];
    shape_.mixer = kind == "scalar_gate" ? LLA_SCALAR_GATE : LLA_DELTA_RULE;
    shape_.groups = q.shape[2];
    shape_.key_dim = q.shape[3];
    shape_.heads = v.shape[2];
    shape_.value_dim = v.shape[3];
    shape_.grain = options.grain;
    shape_.levels = linear ? 0 : file.at("in.lam").shape.back();
    shape_.absorb = !linear && file.meta("levels_policy") == "absorb";
    shape_.has_write = file.find("in.beta") != nullptr;

    const auto add = [&](lla_role role, const char* name, bool rounded) {
      const Tensor& t = file.at(std::string("in.") + name);
      Tensor value = rounded ? t.converted(options.dtype) : t;
      inputs_.push_back({role, name, std::move(value), Tensor(options.wide(), t.shape)});
    };
    add(LLA_Q, "q", true);
    add(LLA_K, "k", true);
    add(LLA_V, "v", true);
    add(LLA_GATE, "g", false);
    if (shape_.has_write) add(LLA_WRITE, "beta", false);
    if (!linear) add(LLA_LAMBDA, "lam", false);
    if (file.find("in.do")) dy_ = file.at("in.do").converted(options.dtype);
    y_ = Tensor(options.dtype, v.shape);

    lla_layer_desc d = LLA_LAYER_DESC_INIT;
    d.kind = LLA_LAYER_MIXER;
    d.mixer = shape_.mixer;
    d.heads = shape_.heads;
    d.groups = shape_.groups;
    d.key_dim = shape_.key_dim;
    d.value_dim = shape_.value_dim;
    d.grain = shape_.grain;
    d.levels = shape_.levels;
    d.lambda_form = linear ? LLA_LAMBDA_NONE : LLA_LAMBDA_READY;
    d.level_overflow = shape_.absorb ? LLA_LEVELS_ABSORB : LLA_LEVELS_ERROR;
    d.write_form = shape_.has_write ? LLA_WRITE_READY : LLA_WRITE_NONE;
    d.scale = std::stod(file.meta("scale", "1"));
    layer_ = lm::make_layer(options.context, d);

    limits_.max_sequences = batch_size_;
    limits_.max_rows = batch_size_ * rows_;
    limits_.max_rows_per_sequence = rows_;
    limits_.max_length = rows_;
    batch_ = lm::Batch(options.context, limits_);
    workspace_ = lm::Buffer(std::max(lm::workspace_bytes(layer_.get(), limits_, LLA_PASS_FORWARD),
                                     lm::workspace_bytes(layer_.get(), limits_, LLA_PASS_BACKWARD)));
    const size_t saved = lm::saved_bytes(layer_.get(), limits_);
    if (saved) saved_ = lm::Buffer(saved);
    state_ = make_state(LLA_STATE_VALUE);
  }

  const StateShape& shape() const { return shape_; }
  int64_t batch_size() const { return batch_size_; }
  const lla_state* state() const { return state_.get(); }
  bool has_gradients() const { return dy_.count() > 0 && !dy_.shape.empty(); }
  std::vector<Input>& inputs() { return inputs_; }
  std::vector<double> y() const { return y_.values(); }

  // Appends all rows to empty slots, in pieces. Outputs start as NaN, so that a row that nobody writes is seen.
  void append(const std::vector<Piece>& pieces) {
    LM_CALL(lla_state_reset, state_.get(), lm::no_index(), int64_t{0}, lm::no_index(), static_cast<void*>(nullptr));
    std::memset(y_.data(), 0xff, y_.bytes.size());
    for (const Piece& piece : pieces) {
      plan(piece, state_.get(), nullptr, false, false);
      forward(piece, state_.get(), nullptr);
      LM_CALL(lla_state_commit, state_.get(), batch_.get(), lm::no_index(), static_cast<void*>(nullptr));
    }
  }

  // Outputs without a state. `save` also fills the saved buffer.
  void run_stateless(bool save) {
    std::memset(y_.data(), 0xff, y_.bytes.size());
    plan({0, rows_}, nullptr, nullptr, false, false);
    forward({0, rows_}, nullptr, save ? &saved_ : nullptr);
  }

  // Gradients of the rows of the last stateless plan.
  void gradients_stateless(bool use_saved) {
    clear_gradients();
    backward({0, rows_}, nullptr, use_saved ? &saved_ : nullptr);
  }

  // Gradients with the sequence cut at `cut`: the right piece gives the gradient of the state at the cut, the left one takes
  // it.
  void gradients_cut(int64_t cut) {
    clear_gradients();
    const lm::State gradient_state = make_state(LLA_STATE_GRADIENT);
    const Piece left{0, cut}, right{cut, rows_};
    append({left});
    plan(right, state_.get(), gradient_state.get(), true, false);
    backward(right, state_.get(), nullptr);
    LM_CALL(lla_state_reset, state_.get(), lm::no_index(), int64_t{0}, lm::no_index(), static_cast<void*>(nullptr));
    plan(left, state_.get(), gradient_state.get(), false, true);
    backward(left, state_.get(), nullptr);
    lla_batch_discard(batch_.get());
  }

 private:
  lm::State make_state(lla_state_kind kind) {
    lla_state_desc d = LLA_STATE_DESC_INIT;
    d.kind = kind;
    d.slots = batch_size_;
    d.max_length = rows_;
    if (options_.dtype == LLA_BF16 || options_.dtype == LLA_F16) d.tail_dtype = options_.dtype;
    if (kind == LLA_STATE_GRADIENT) d.tail_dtype = LLA_DTYPE_DEFAULT;
    lla_layer* layers[] = {layer_.get()};
    lla_state* state = nullptr;
    LM_CALL(lla_state_create, layers, int64_t{1}, &d, static_cast<const lla_block_memory*>(nullptr), int64_t{0}, &state);
    return lm::State(state);
  }

  void clear_gradients() {
    for (Input& input : inputs_) std::memset(input.gradient.data(), 0xff, input.gradient.bytes.size());
  }

  void plan(const Piece& piece, lla_state* state, lla_state* gradient_state, bool initial, bool final) {
    std::vector<int64_t> slots;
    for (int64_t b = 0; b < batch_size_; ++b) slots.push_back(b);
    lla_rows r = LLA_ROWS_INIT;
    r.sequences = batch_size_;
    r.rows_per_sequence = piece.end - piece.begin;
    r.gradient_state = gradient_state;
    if (initial) r.initial_gradient_slots = lm::index_of(slots.data());
    if (final) r.final_gradient_slots = lm::index_of(slots.data());
    LM_CALL(lla_batch_plan, batch_.get(), state, &r, static_cast<void*>(nullptr));
  }

  std::vector<lla_binding> input_bindings(const Piece& piece) const {
    std::vector<lla_binding> io;
    for (const Input& input : inputs_) io.push_back(lla_bind(input.role, slice(input.value, piece.begin, piece.end)));
    return io;
  }

  void forward(const Piece& piece, lla_state* state, lm::Buffer* saved) {
    std::vector<lla_binding> io = input_bindings(piece);
    io.push_back(lla_bind(LLA_Y, slice(y_, piece.begin, piece.end)));
    lla_forward_args a = LLA_FORWARD_ARGS_INIT;
    a.batch = batch_.get();
    a.state = state;
    a.io = io.data();
    a.io_count = static_cast<int64_t>(io.size());
    a.workspace = workspace_.data();
    a.workspace_bytes = workspace_.bytes();
    if (saved && saved->bytes()) {
      a.saved = saved->data();
      a.saved_bytes = saved->bytes();
    }
    LM_CALL(lla_layer_forward, layer_.get(), &a);
  }

  void backward(const Piece& piece, lla_state* state, const lm::Buffer* saved) {
    const std::vector<lla_binding> io = input_bindings(piece);
    const lla_binding outputs[] = {lla_bind(LLA_Y, slice(dy_, piece.begin, piece.end))};
    std::vector<lla_binding> gradients;
    for (const Input& input : inputs_)
      gradients.push_back(lla_bind(input.role, slice(input.gradient, piece.begin, piece.end)));
    lla_backward_args a = LLA_BACKWARD_ARGS_INIT;
    a.batch = batch_.get();
    a.state = state;
    a.io = io.data();
    a.io_count = static_cast<int64_t>(io.size());
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
    LM_CALL(lla_layer_backward, layer_.get(), &a);
  }

  const Options& options_;
  StateShape shape_;
  int64_t batch_size_ = 0, rows_ = 0;
  std::vector<Input> inputs_;
  Tensor dy_, y_;
  lm::Layer layer_;
  lla_batch_limits limits_ = LLA_BATCH_LIMITS_INIT;
  lm::State state_;  // before the batch, which gives its plan back to it
  lm::Batch batch_;
  lm::Buffer workspace_, saved_;
};

// Joint error of the state over all live blocks and sequences; blocks that the layer keeps as a sum are compared as a sum.
double state_error(const lm::TensorFile& file, const MixerCase& mixer) {
  const StateShape& shape = mixer.shape();
  const auto size = static_cast<size_t>(shape.heads * shape.key_dim * shape.value_dim);
  std::vector<double> all, reference;
  for (int64_t b = 0; b < mixer.batch_size(); ++b) {
    std::map<int, std::vector<double>> expected;
    for (const auto& [name, tensor] : file.tensors) {
      if (name.rfind("state.block", 0) != 0) continue;
      const int j = std::stoi(name.substr(11));
      const std::vector<double> values = tensor.values();
      std::vector<double>& block = expected[is_summed(shape, j) ? kSummed : j];
      block.resize(size, 0.0);
      for (size_t i = 0; i < size; ++i) block[i] += values[static_cast<size_t>(b) * size + i];
    }
    std::map<int, std::vector<double>> found = canonical_state(mixer.state(), b, 0, shape);
    for (const auto& entry : found)
      expected[entry.first].resize(size, 0.0);  // a block that should not be there counts fully
    for (const auto& [j, block] : expected) {
      std::vector<double>& x = found[j];
      x.resize(size, 0.0);
      all.insert(all.end(), x.begin(), x.end());
      reference.insert(reference.end(), block.begin(), block.end());
    }
  }
  return relative_error(all, reference);
}

// Gate and write-strength gradients are sums of terms that cancel: they are judged against the size of the terms.
double gradient_scale(const lm::TensorFile& file, const std::string& name) {
  if (name != "g" && name != "beta") return 0;
  const std::vector<double> o = file.at("out.o").values(), dy = file.at("in.do").values();
  const auto dv = static_cast<size_t>(file.at("out.o").shape.back());
  std::vector<double> sums(o.size() / dv, 0.0);
  for (size_t i = 0; i < o.size(); ++i) sums[i / dv] += o[i] * dy[i];
  return norm(sums);
}

void check_gradients(const lm::TensorFile& file, MixerCase& mixer, const std::string& prefix, double tolerance,
                     Report* report) {
  for (const Input& input : mixer.inputs()) {
    const std::string name = "grad." + input.name;
    report->check(prefix + name,
                  relative_error(input.gradient.values(), file.at(name).values(), gradient_scale(file, input.name)),
                  tolerance);
  }
}

void run_form(const lm::TensorFile& file, const std::string& name, const Options& options, bool linear, Report* report) {
  const double tolerance = tolerance_of(options, CaseKind::Mixer, name);
  const std::string prefix = linear ? "linear." : "";
  const std::vector<double> reference = file.at("out.o").values();
  const int64_t rows = file.at("in.q").shape[1];
  MixerCase mixer(file, options, linear);
  mixer.append(pieces_of(options, rows));
  report->check(prefix + "out.o", relative_error(mixer.y(), reference), tolerance);
  report->check(prefix + "state", state_error(file, mixer), tolerance);
  mixer.run_stateless(false);
  report->check(prefix + "stateless.out.o", relative_error(mixer.y(), reference), tolerance);
  if (!mixer.has_gradients()) return;

  mixer.run_stateless(true);
  mixer.gradients_stateless(true);
  check_gradients(file, mixer, prefix, tolerance, report);
  std::vector<Tensor> with_saved;
  for (const Input& input : mixer.inputs()) with_saved.push_back(input.gradient);
  mixer.gradients_stateless(false);
  double differing = 0;
  for (size_t i = 0; i < with_saved.size(); ++i) differing += with_saved[i].bytes != mixer.inputs()[i].gradient.bytes;
  report->check(prefix + "grad, saved = recomputed", differing, 0);

  const int64_t cut = options.splits.empty() ? 0 : options.splits.front();
  if (cut > 0 && cut < rows) {
    mixer.gradients_cut(cut);
    check_gradients(file, mixer, prefix + "cut.", tolerance, report);
  }
}

}  // namespace

void run_mixer(const lm::TensorFile& file, const std::string& name, const Options& options, Report* report) {
  run_form(file, name, options, false, report);
  // With λ = 1 everywhere the levels do nothing, and the linear layer must say the same.
  const std::vector<double> lambda = file.at("in.lam").values();
  if (std::all_of(lambda.begin(), lambda.end(), [](double x) { return x == 1; }))
    run_form(file, name, options, true, report);
}

}  // namespace conformance
