// SPDX-License-Identifier: Apache-2.0
// A small model for the soak: a group of unlike layers whose rows are functions of a token, and the two judges of a history:
// the same calls made alone, and all its rows in one pass.
#pragma once

#include <algorithm>
#include <cmath>

#include "../fuzz/api_shapes.h"

namespace soak {

using fuzz::Block;
using Token = uint8_t;

constexpr int64_t kTokens = 256, kLongest = 1500, kMostRows = 220, kDraft = 16;

[[noreturn]] inline void differs(const char* what, int64_t row, double amount) {
  std::fprintf(stderr, "%s: row %lld, by %g\n", what, static_cast<long long>(row), amount);
  std::abort();
}

// Numbers that a seed decides.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  float unit() { return static_cast<float>(next() >> 40) * (1.0f / 16777216.0f); }

 private:
  uint64_t state_;
};

// What a sequence has been through: calls of so many rows, of which a first part stayed.
enum class Kept { kAll, kAccepted, kSnapshot, kTruncated };
struct Piece {
  int64_t begin, accepted;
  std::vector<Token> offered;
  Kept how = Kept::kAll;
};
struct History {
  std::vector<Piece> pieces;
  std::vector<Token> tokens;   // of the rows that stayed
  std::vector<float> outputs;  // of the same rows: all layers, one after the other
  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
};

struct Form {
  int64_t grain = 64;
  lla_dtype node_dtype = LLA_F32;
  bool squared = false;  // other widths
};

inline std::vector<lla_layer_desc> descriptions(const Form& form) {
  const int64_t levels = lla_levels_needed(kLongest), w = form.squared ? 1 : 0;
  std::vector<lla_layer_desc> all = {fuzz::mixer(LLA_SCALAR_GATE, 3, 1, w ? 16 : 12, w ? 16 : 20, levels, form.grain),
                                     fuzz::mixer(LLA_DELTA_RULE, 2, 2, w ? 32 : 16, w ? 24 : 16, levels, form.grain),
                                     fuzz::mixer(LLA_DELTA_RULE, 2, 1, 16, w ? 5 : 8, 0, form.grain),
                                     fuzz::mixer(LLA_SCALAR_GATE, 2, 1, 8, w ? 33 : 7, 4, form.grain),
                                     fuzz::mixer(LLA_DELTA_RULE, 2, 1, 16, 16, levels, form.grain)};
  all[3].level_overflow = LLA_LEVELS_ABSORB;
  lla_layer_desc& cell = all[4];
  cell.kind = LLA_LAYER_CELL;
  cell.lambda_form = LLA_LAMBDA_SOFTPLUS;
  cell.gate_form = LLA_GATE_SOFTPLUS;
  cell.write_form = LLA_WRITE_SIGMOID;
  cell.qk_norm = 1;
  cell.conv_width = 4;
  cell.norm_form = LLA_NORM_NORM_FIRST;
  cell.norm_group = cell.value_dim;
  return all;
}

inline float value_of(const lla_layer_desc& d, lla_role role, Token token, float u) {
  const bool mixer = d.kind == LLA_LAYER_MIXER;
  switch (role) {
    case LLA_Q:
    case LLA_K:
      return (2 * u - 1) * (mixer ? 1.5f / std::sqrt(static_cast<float>(d.key_dim)) : 1);
    case LLA_GATE:
      if (token == 0) return mixer ? -700.0f : 30.0f;  // everything before it is forgotten
      return mixer ? -0.2f * u : 2 * u - 3;
    case LLA_WRITE:
    case LLA_LAMBDA:
      return mixer ? u : 2 * u - 1;
    default:
      return 2 * u - 1;
  }
}
inline float weight_of(lla_role role, float u) {
  switch (role) {
    case LLA_WEIGHT_DT_BIAS:
      return u - 2;
    case LLA_WEIGHT_A_LOG:
      return u;
    case LLA_WEIGHT_LAMBDA:
    case LLA_WEIGHT_NORM:
    case LLA_WEIGHT_SKIP:
      return u + 0.5f;
    default:
      return u - 0.5f;
  }
}

// Rows of every token for every input, and the weights; the same for everybody who serves a form.
class Model {
 public:
  explicit Model(const Form& form) : form_(form), descs_(descriptions(form)) {
    Random random(form.grain * 8 + form.squared);
    for (const lla_layer_desc& d : descs_) {
      const fuzz::Shapes shapes = fuzz::shapes_of(d, kTokens);
      Layer layer;
      for (size_t i = 0; i < shapes.all.size(); ++i) {
        const fuzz::Shape& shape = shapes.all[i];
        Array a{shape.role, shape.dims, {}};
        const bool input = i < shapes.outputs;
        if (!input && i < shapes.weights) {
          layer.output = a;
          width_ += a.width();
          continue;
        }
        a.values.resize(static_cast<size_t>(a.dims[0] * a.width()));
        for (size_t k = 0; k < a.values.size(); ++k) {
          const auto token = static_cast<Token>(static_cast<int64_t>(k) / a.width());
          a.values[k] = input ? value_of(d, a.role, token, random.unit()) : weight_of(a.role, random.unit());
        }
        (input ? layer.inputs : layer.weights).push_back(a);
      }
      layers_.push_back(layer);
    }
  }
  struct Array {
    lla_role role;
    std::vector<int64_t> dims;
    std::vector<float> values;
    int64_t width() const {
      int64_t n = 1;
      for (size_t i = 1; i < dims.size(); ++i) n *= dims[i];
      return n;
    }
  };
  struct Layer {
    std::vector<Array> inputs, weights;
    Array output;
  };
  const Form& form() const { return form_; }
  const std::vector<lla_layer_desc>& descs() const { return descs_; }
  const std::vector<Layer>& layers() const { return layers_; }
  int64_t width() const { return width_; }  // outputs of one row in all layers

 private:
  Form form_;
  std::vector<lla_layer_desc> descs_;
  std::vector<Layer> layers_;
  int64_t width_ = 0;
};

inline lla_binding bind_rows(const Model::Array& a, float* data, int64_t rows) {
  const auto dim = [&](size_t i) { return i < a.dims.size() ? a.dims[i] : -1; };
  return lla_bind(a.role, lla_tensor_of(data, LLA_F32, rows, dim(1), dim(2), -1));
}

// Layers of a model in a context with so many threads, and the allocator that its memory comes from.
class Engine {
 public:
  Engine(const Model& model, int32_t threads, fuzz::Meter* meter) : model_(model) {
    lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
    const lla_allocator allocator = meter->hook();
    options.backend = LLA_BACKEND_CPU;
    options.threads = threads;
    options.allocator = &allocator;
    FUZZ_OK(lla_context_create(&options, &context_, &error));
    for (const lla_layer_desc& d : model.descs()) {
      lla_layer* layer = nullptr;
      FUZZ_OK(lla_layer_create(context_, &d, &layer, &error));
      layers_.push_back(layer);
    }
  }
  ~Engine() {
    for (lla_layer* layer : layers_) lla_layer_release(layer);
    lla_context_release(context_);
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  lla_state* make_state(int64_t slots, int64_t node_blocks) const {
    lla_state_desc d = LLA_STATE_DESC_INIT;
    d.slots = slots;
    d.max_length = kLongest;
    d.max_draft = kDraft;
    d.node_blocks = node_blocks;
    d.node_dtype = model_.form().node_dtype;
    lla_state* state = nullptr;
    FUZZ_OK(lla_state_create(layers_.data(), count(), &d, nullptr, 0, &state, &error));
    return state;
  }
  const Model& model() const { return model_; }
  lla_context* context() const { return context_; }
  const std::vector<lla_layer*>& layers() const { return layers_; }
  int64_t count() const { return static_cast<int64_t>(layers_.size()); }

 private:
  const Model& model_;
  lla_context* context_ = nullptr;
  std::vector<lla_layer*> layers_;
};

// A batch with its rows and workspace. Blocks have exactly the bytes that were asked for.
class Step {
 public:
  Step(const Engine& engine, int64_t sequences, int64_t rows, int64_t snapshots) : engine_(engine), rows_(rows) {
    lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
    limits.max_sequences = sequences;
    limits.max_rows = rows;
    limits.max_length = kLongest;
    limits.max_snapshots = snapshots;
    size_t bytes = 0, most = 0;
    FUZZ_OK(lla_batch_size(engine.context(), &limits, &bytes, nullptr, &error));
    memory_ = std::make_unique<Block>(bytes);
    FUZZ_OK(lla_batch_init(engine.context(), &limits, memory_->data(), bytes, &batch_, &error));
    for (lla_layer* layer : engine.layers()) {
      FUZZ_OK(lla_layer_workspace(layer, &limits, LLA_PASS_FORWARD, &bytes, nullptr, &error));
      most = std::max(most, bytes);
    }
    workspace_ = std::make_unique<Block>(most);
  }
  ~Step() { lla_batch_discard(batch_); }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  lla_batch* batch() const { return batch_; }

  // `tokens` of all rows of the row axis, in the order in which they stand there. Outputs end up in outputs().
  void forward(lla_state* state, const std::vector<Token>& tokens, bool backwards = false) {
    const Model& model = engine_.model();
    const auto n = static_cast<int64_t>(tokens.size());
    PROMISE(n <= rows_);
    outputs_.assign(tokens.size() * static_cast<size_t>(model.width()), NAN);
    for (int64_t i = 0; i < engine_.count(); ++i) {
      const int64_t which = backwards ? engine_.count() - 1 - i : i;
      const Model::Layer& layer = model.layers()[static_cast<size_t>(which)];
      std::vector<Block> blocks;
      std::vector<lla_binding> io, weights;
      for (const Model::Array& a : layer.inputs) {
        const auto bytes = static_cast<size_t>(a.width()) * sizeof(float);
        blocks.emplace_back(bytes * tokens.size());
        for (size_t r = 0; r < tokens.size(); ++r)
          std::memcpy(blocks.back().data() + r * bytes, a.values.data() + tokens[r] * a.width(), bytes);
        io.push_back(bind_rows(a, reinterpret_cast<float*>(blocks.back().data()), n));
      }
      const auto width = static_cast<size_t>(layer.output.width());
      Block y(width * tokens.size() * sizeof(float));
      std::memset(y.data(), 0xff, y.size());  // NaN
      io.push_back(bind_rows(layer.output, reinterpret_cast<float*>(y.data()), n));
      for (const Model::Array& a : layer.weights)
        weights.push_back(bind_rows(a, const_cast<float*>(a.values.data()), a.dims[0]));
      lla_forward_args a = LLA_FORWARD_ARGS_INIT;
      a.batch = batch_;
      a.state = state;
      a.layer_index = state ? which : 0;
      a.io = io.data();
      a.io_count = static_cast<int64_t>(io.size());
      a.weights = weights.data();
      a.weight_count = static_cast<int64_t>(weights.size());
      a.workspace = workspace_->data();
      a.workspace_bytes = workspace_->size();
      FUZZ_OK(lla_layer_forward(engine_.layers()[static_cast<size_t>(which)], &a, &error));
      size_t at = 0;
      for (int64_t before = 0; before < which; ++before)
        at += static_cast<size_t>(model.layers()[static_cast<size_t>(before)].output.width());
      for (size_t r = 0; r < tokens.size(); ++r)
        std::memcpy(outputs_.data() + r * static_cast<size_t>(model.width()) + at, y.data() + r * width * sizeof(float),
                    width * sizeof(float));
    }
  }
  const std::vector<float>& outputs() const { return outputs_; }

 private:
  const Engine& engine_;
  int64_t rows_;
  std::unique_ptr<Block> memory_, workspace_;
  lla_batch* batch_ = nullptr;
  std::vector<float> outputs_;
};

inline lla_index index_of(const std::vector<int64_t>& values) { return {values.data(), LLA_I64, LLA_HOST}; }

inline std::vector<char> image_of(lla_state* state, int64_t slot, const char* tag = nullptr) {
  size_t bytes = 0;
  FUZZ_OK(lla_state_export_size(state, slot, &bytes, &error));
  const Block image(bytes);
  FUZZ_OK(lla_state_pack(state, slot, image.data(), bytes, nullptr, &error));
  FUZZ_OK(lla_state_seal(image.data(), bytes, tag, &error));
  return {image.data(), image.data() + bytes};
}

// Looks at finished histories, in a context of its own with one thread.
class Judge {
 public:
  Judge(const Model& model, fuzz::Meter* meter)
      : engine_(model, 1, meter), state_(engine_.make_state(2, 0)), step_(engine_, 1, kLongest, 1) {}
  ~Judge() { lla_state_release(state_); }

  // The calls of the history once more, nobody beside it: the same bits. Leaves the history in slot 0.
  // Probe L2.
  void alone(const History& h) {
    const std::vector<int64_t> zero{0}, one{1};
    FUZZ_OK(lla_state_reset(state_, {nullptr, 0, 0}, 0, {nullptr, 0, 0}, nullptr, &error));
    int64_t at = 0;
    for (const Piece& p : h.pieces) {
      PROMISE(p.begin == at && p.accepted <= static_cast<int64_t>(p.offered.size()));
      const std::vector<int64_t> accepted{p.accepted};
      lla_rows rows = LLA_ROWS_INIT;
      rows.sequences = 1;
      rows.rows_per_sequence = static_cast<int64_t>(p.offered.size());
      rows.slot_in = index_of(zero);
      const std::vector<int64_t> position{at};
      rows.expected_positions = index_of(position);
      const bool snapshot = p.how == Kept::kSnapshot && rows.rows_per_sequence > kDraft;
      if (snapshot) {
        rows.snapshots = 1;
        rows.snapshot_sequences = index_of(zero);
        rows.snapshot_rows = index_of(accepted);
        rows.snapshot_slots = index_of(one);
      }
      FUZZ_OK(lla_batch_plan(step_.batch(), state_, &rows, nullptr, &error));
      step_.forward(state_, p.offered);
      const bool partly = rows.rows_per_sequence <= kDraft;
      FUZZ_OK(
          lla_state_commit(state_, step_.batch(), partly ? index_of(accepted) : lla_index{nullptr, 0, 0}, nullptr, &error));
      at += p.accepted;
      if (snapshot) {
        FUZZ_OK(lla_state_fork(state_, index_of(one), index_of(zero), 1, nullptr, &error));
        FUZZ_OK(lla_state_reset(state_, index_of(one), 1, {nullptr, 0, 0}, nullptr, &error));
      } else if (!partly && p.accepted < rows.rows_per_sequence) {
        FUZZ_OK(lla_state_truncate(state_, 0, at, nullptr, &error));
      }
      const auto width = static_cast<size_t>(engine_.model().width());
      for (int64_t r = 0; r < p.accepted; ++r) {
        if (std::memcmp(step_.outputs().data() + static_cast<size_t>(r) * width,
                        h.outputs.data() + static_cast<size_t>(p.begin + r) * width, width * sizeof(float)))
          differs("not the bits of the same calls alone", p.begin + r, distance(h, p.begin + r, step_.outputs(), r));
      }
    }
    PROMISE(at == h.length());
  }
  lla_state* state() const { return state_; }

  // All rows in one call without a state: the same numbers but for the rounding that another cut makes. Returns the largest
  // distance of a row, relative to the RMS of all rows, over the layers.
  double one_pass(const History& h, double tolerance) {
    if (h.length() == 0) return 0;
    lla_rows rows = LLA_ROWS_INIT;
    rows.sequences = 1;
    rows.rows_per_sequence = h.length();
    FUZZ_OK(lla_batch_plan(step_.batch(), nullptr, &rows, nullptr, &error));
    step_.forward(nullptr, h.tokens);
    lla_batch_discard(step_.batch());
    double worst = 0;
    size_t begin = 0;
    const auto width = static_cast<size_t>(engine_.model().width());
    for (const Model::Layer& layer : engine_.model().layers()) {
      const auto w = static_cast<size_t>(layer.output.width());
      double total = 0;
      std::vector<double> errors;
      for (size_t r = 0; r < h.tokens.size(); ++r) {
        double e = 0;
        for (size_t i = r * width + begin; i < r * width + begin + w; ++i) {
          const double x = step_.outputs()[i], delta = x - static_cast<double>(h.outputs[i]);
          total += x * x;
          e += delta * delta;
        }
        errors.push_back(std::sqrt(e));
      }
      const double rms = std::sqrt(total / static_cast<double>(h.tokens.size()));
      for (size_t r = 0; r < errors.size(); ++r) {
        const double error = errors[r] / rms;
        if (!(error <= tolerance)) differs("not the numbers of one pass", static_cast<int64_t>(r), error);
        worst = std::max(worst, error);
      }
      begin += w;
    }
    return worst;
  }

 private:
  double distance(const History& h, int64_t row, const std::vector<float>& other, int64_t other_row) const {
    const auto width = static_cast<size_t>(engine_.model().width());
    double worst = 0;
    for (size_t i = 0; i < width; ++i) {
      const double delta = std::fabs(static_cast<double>(h.outputs[static_cast<size_t>(row) * width + i]) -
                                     static_cast<double>(other[static_cast<size_t>(other_row) * width + i]));
      if (!(delta <= worst)) worst = delta;
    }
    return worst;
  }
  Engine engine_;
  lla_state* state_;
  Step step_;
};

}  // namespace soak
