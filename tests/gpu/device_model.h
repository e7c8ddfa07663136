// SPDX-License-Identifier: Apache-2.0
// One layer on one backend with its weights, state, batch and rows, in memory of that backend. Inputs are functions of
// sequence and position, so that a test says only which rows go where, however a sequence is cut.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "../capi/mixer_desc.h"

#define CALL(call)                                                                                 \
  do {                                                                                             \
    lla_error error = LLA_ERROR_INIT;                                                              \
    const lla_status status_ = (call);                                                             \
    ASSERT_EQ(status_, LLA_OK) << #call << ": " << lla_status_name(status_) << ": " << error.text; \
  } while (0)

namespace device {

using Bytes = std::vector<char>;
using Tensors = std::map<lla_role, Bytes>;

// Uniform in [0, 1).
inline float unit(uint64_t series, uint64_t i) {
  uint64_t x = (series * 0x9e3779b97f4a7c15u + i + 1) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 29)) * 0x94d049bb133111ebu;
  return static_cast<float>((x ^ (x >> 32)) >> 40 & 0xffffff) / 16777216.0f;
}
inline uint64_t series_of(uint64_t sequence, int64_t position, lla_role role) {
  return (sequence * 1000003 + static_cast<uint64_t>(position)) * 257 + static_cast<uint64_t>(role);
}

inline void put(Bytes* bytes, size_t i, lla_dtype dtype, float value) {
  if (dtype == LLA_F32) {
    std::memcpy(bytes->data() + i * 4, &value, 4);
    return;
  }
  uint32_t bits;  // LLA_BF16: round to nearest even
  std::memcpy(&bits, &value, 4);
  const uint16_t rounded = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  std::memcpy(bytes->data() + i * 2, &rounded, 2);
}
inline std::vector<float> floats_of(const Bytes& bytes) {
  std::vector<float> values(bytes.size() / 4);
  std::memcpy(values.data(), bytes.data(), values.size() * 4);
  return values;
}
inline double error_of(const float* x, const float* reference, size_t count) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < count; ++i) {
    error += (double(x[i]) - reference[i]) * (double(x[i]) - reference[i]);
    norm += double(reference[i]) * reference[i];
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

// `count` rows of a sequence from `position` on; with a state they follow what `slot` holds.
struct Piece {
  uint64_t sequence;
  int64_t position, count, slot = 0;
};

inline lla_layer_desc mixer(lla_mixer rule, int64_t heads, int64_t groups, int64_t key, int64_t value, int64_t levels) {
  lla_layer_desc d = mixer_desc(rule, heads, groups, key, value, levels);
  d.write_form = LLA_WRITE_READY;
  return d;
}
inline lla_layer_desc block(lla_layer_kind kind, int64_t hidden, int64_t heads, int64_t key, int64_t value, int64_t levels) {
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = kind;
  d.hidden = hidden;
  d.heads = heads;
  d.groups = kind == LLA_LAYER_MAMBA2 ? 1 : heads;
  d.key_dim = key;
  d.value_dim = value;
  d.levels = levels;
  d.lambda_form = levels ? LLA_LAMBDA_SOFTPLUS : LLA_LAMBDA_NONE;
  return d;
}

struct Limits {
  int64_t sequences = 1, rows = 1, rows_per_sequence = 0, length = 0;  // 0: as many as `rows`
  int64_t slots = 0;                                                   // > 0: with a state
  bool backward = false;
  float decay = 0.06f;        // gates are between its negative and 0
  lla_dtype dtype = LLA_F32;  // of q, k, v, x, y and matrices; gates, write strengths, λ and other weights are LLA_F32
};

inline lla_context* open_context(lla_backend backend) {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = backend;
  options.threads = backend == LLA_BACKEND_CPU ? 8 : 0;
  lla_context* context = nullptr;
  lla_error error = LLA_ERROR_INIT;
  EXPECT_EQ(lla_context_create(&options, &context, &error), LLA_OK) << error.text;
  return context;
}

// Whether "the device" is the emulation on the CPU: tests are made smaller then.
inline bool is_emulated(const lla_context* context) {
  char name[200] = "";
  size_t size = sizeof name;
  return lla_context_query(context, LLA_CONTEXT_DEVICE_NAME, name, &size, nullptr) == LLA_OK &&
         std::strstr(name, "emulated");
}

class Model {
 public:
  Model() = default;
  Model(const Model&) = delete;
  ~Model() { close(); }

  void open(lla_context* context, const lla_layer_desc& desc, const Limits& limits, void* stream = nullptr) {
    context_ = lla_context_retain(context);
    lla_layer* layer = nullptr;
    CALL(lla_layer_create(context, &desc, &layer, &error));
    open(context, layer, desc, limits, stream);
    lla_layer_release(layer);
  }
  // On a layer that others use too.
  void open(lla_context* context, lla_layer* layer, const lla_layer_desc& desc, const Limits& limits, void* stream) {
    if (!context_) context_ = lla_context_retain(context);
    layer_ = lla_layer_retain(layer);
    desc_ = desc;
    limits_ = limits;
    stream_ = stream;
    list_tensors();
    if (limits.slots > 0) {
      lla_state_desc s = LLA_STATE_DESC_INIT;
      s.slots = limits.slots;
      s.max_length = limits.length;
      CALL(lla_state_create(&layer, 1, &s, nullptr, 0, &state_, &error));
    }
    lla_batch_limits b = batch_limits();
    size_t bytes = 0, device_bytes = 0, backward = 0;
    CALL(lla_batch_size(context, &b, &bytes, nullptr, &error));
    CALL(lla_batch_device_size(context, &b, &device_bytes, nullptr, &error));
    CALL(lla_layer_workspace(layer, &b, LLA_PASS_FORWARD, &workspace_bytes_, nullptr, &error));
    if (limits.backward) CALL(lla_layer_workspace(layer, &b, LLA_PASS_BACKWARD, &backward, nullptr, &error));
    workspace_bytes_ = std::max(workspace_bytes_, backward);
    if (limits.backward) CALL(lla_layer_saved_size(layer, &b, &saved_bytes_, nullptr, &error));
    batch_memory_.resize(bytes + 64);
    char* aligned = batch_memory_.data() + (64 - reinterpret_cast<uintptr_t>(batch_memory_.data()) % 64) % 64;
    CALL(lla_batch_init(context, &b, aligned, bytes, &batch_, &error));
    if (device_bytes) CALL(lla_batch_bind_device(batch_, take(device_bytes), device_bytes, &error));
    workspace_ = take(workspace_bytes_);
    if (saved_bytes_) saved_ = take(saved_bytes_);
    for (Tensor& t : tensors_) {
      const size_t size = size_of(t, limits.rows);
      t.data = take(size);
      if (limits.backward) t.gradient = take(size);
      if (t.weight) {
        Bytes host(size);
        for (size_t i = 0; i < size / lla_dtype_size(t.dtype); ++i)
          put(&host, i, t.dtype, t.low + (t.high - t.low) * unit(series_of(77, 0, t.role), i));
        send(t.data, host);
      }
    }
  }

  void close() {
    if (!context_) return;
    lla_device_wait(context_, stream_, nullptr);
    if (batch_) lla_batch_discard(batch_);
    for (const auto& [memory, bytes] : blocks_) lla_device_release(context_, memory, bytes);
    blocks_.clear();
    lla_state_release(state_);
    lla_layer_release(layer_);
    lla_context_release(context_);
    context_ = nullptr;
  }

  // Inputs and the gradient of the output for these pieces, one after the other, and their plan. `slack`: so many rows of no
  // sequence behind them, all NaN.
  void load(const std::vector<Piece>& pieces, int64_t slack = 0) {
    rows_ = 0;
    std::vector<int64_t> offsets{0}, slots;
    for (const Piece& p : pieces) {
      offsets.push_back(rows_ += p.count);
      slots.push_back(p.slot);
    }
    rows_ += slack;
    for (Tensor& t : tensors_) {
      if (t.weight) continue;
      const size_t width = static_cast<size_t>(t.d1 * std::max<int64_t>(1, t.d2));
      Bytes host(size_of(t, rows_), '\xff');
      size_t row = 0;
      for (const Piece& p : pieces) {
        for (int64_t r = 0; r < p.count; ++r, ++row) {
          const uint64_t series = series_of(p.sequence, p.position + r, t.role);
          for (size_t i = 0; i < width; ++i)
            put(&host, row * width + i, t.dtype, t.low + (t.high - t.low) * unit(series, i));
        }
      }
      send(t.role == LLA_Y ? t.gradient : t.data, host);
    }
    lla_rows rows = LLA_ROWS_INIT;
    rows.sequences = static_cast<int64_t>(pieces.size());
    rows.offsets = {offsets.data(), LLA_I64, LLA_HOST};
    rows.total_rows = rows_;
    if (state_) rows.slot_in = {slots.data(), LLA_I64, LLA_HOST};
    CALL(lla_batch_plan(batch_, state_, &rows, stream_, &error));
  }
  void forward() {
    std::vector<lla_binding> io, weights;
    for (const Tensor& t : tensors_) (t.weight ? weights : io).push_back(bind(t, t.data));
    lla_forward_args a = LLA_FORWARD_ARGS_INIT;
    a.batch = batch_;
    a.state = state_;
    a.io = io.data();
    a.io_count = static_cast<int64_t>(io.size());
    a.weights = weights.data();
    a.weight_count = static_cast<int64_t>(weights.size());
    a.workspace = workspace_;
    a.workspace_bytes = workspace_bytes_;
    a.saved = saved_;
    a.saved_bytes = saved_bytes_;
    a.stream = stream_;
    CALL(lla_layer_forward(layer_, &a, &error));
  }
  void backward() {
    std::vector<lla_binding> io, weights, gradients, outputs;
    for (const Tensor& t : tensors_) {
      if (t.role == LLA_Y) {
        outputs.push_back(bind(t, t.gradient));
      } else {
        (t.weight ? weights : io).push_back(bind(t, t.data));
        gradients.push_back(bind(t, t.gradient));
      }
    }
    lla_backward_args a = LLA_BACKWARD_ARGS_INIT;
    a.batch = batch_;
    a.io = io.data();
    a.io_count = static_cast<int64_t>(io.size());
    a.weights = weights.data();
    a.weight_count = static_cast<int64_t>(weights.size());
    a.outputs = outputs.data();
    a.output_count = static_cast<int64_t>(outputs.size());
    a.gradients = gradients.data();
    a.gradient_count = static_cast<int64_t>(gradients.size());
    a.workspace = workspace_;
    a.workspace_bytes = workspace_bytes_;
    a.saved = saved_;
    a.saved_bytes = saved_bytes_;
    a.stream = stream_;
    CALL(lla_layer_backward(layer_, &a, &error));
  }
  void commit() { CALL(lla_state_commit(state_, batch_, {nullptr, 0, 0}, stream_, &error)); }
  // All of the above for rows that are appended; outputs of one after the other.
  void append(const Piece& piece, std::vector<float>* outputs) {
    load({piece});
    forward();
    commit();
    Tensors results;
    read(false, &results);
    const std::vector<float> y = floats_of(results[LLA_Y]);
    outputs->insert(outputs->end(), y.begin(), y.end());
  }
  void empty() { CALL(lla_state_reset(state_, {nullptr, 0, 0}, 0, {nullptr, 0, 0}, stream_, &error)); }

  // The outputs, and with `gradients` all gradients, after all work on the stream.
  void read(bool gradients, Tensors* results) {
    for (const Tensor& t : tensors_) {
      if (t.role != LLA_Y && !gradients) continue;
      Bytes& host = (*results)[t.role];
      host.resize(size_of(t, rows_));
      CALL(lla_device_copy(context_, host.data(), t.role == LLA_Y ? t.data : t.gradient, host.size(), stream_, &error));
    }
    CALL(lla_device_wait(context_, stream_, &error));
  }
  // Puts NaN into everything that a call writes, workspace included.
  void spoil() {
    for (const Tensor& t : tensors_) {
      if (t.role != LLA_Y && !(t.gradient && limits_.backward)) continue;
      send(t.role == LLA_Y ? t.data : t.gradient, Bytes(size_of(t, limits_.rows), '\xff'));
    }
    send(workspace_, Bytes(workspace_bytes_, '\xff'));
  }

  void export_to(Bytes* image, int64_t slot = 0) {
    size_t bytes = 0;
    CALL(lla_state_export_size(state_, slot, &bytes, &error));
    image->assign(bytes, 0);
    CALL(lla_state_pack(state_, slot, image->data(), bytes, stream_, &error));
    const char tag[LLA_TAG_SIZE] = "handover";
    CALL(lla_state_seal(image->data(), bytes, tag, &error));
  }
  void import_from(const Bytes& image, int64_t slot = 0) {
    CALL(lla_state_check(image.data(), image.size(), nullptr, nullptr, &error));
    CALL(lla_state_unpack(state_, slot, image.data(), image.size(), stream_, &error));
  }

  size_t output_width() const {
    for (const Tensor& t : tensors_)
      if (t.role == LLA_Y) return static_cast<size_t>(t.d1 * std::max<int64_t>(1, t.d2));
    return 0;
  }
  size_t workspace_bytes() const { return workspace_bytes_; }
  size_t saved_bytes() const { return saved_bytes_; }
  // Of all memory that was taken for this model, without its state.
  size_t device_bytes() const {
    size_t sum = 0;
    for (const auto& block : blocks_) sum += block.second;
    return sum;
  }
  lla_layer* layer() const { return layer_; }

 private:
  struct Tensor {
    lla_role role;
    int64_t d1, d2;  // inputs [rows, d1 (, d2)], weights [d1 (, d2)]; d2 < 0: not there
    float low, high;
    lla_dtype dtype = LLA_F32;
    bool weight = false;
    void *data = nullptr, *gradient = nullptr;
  };

  lla_batch_limits batch_limits() const {
    lla_batch_limits b = LLA_BATCH_LIMITS_INIT;
    b.max_sequences = limits_.sequences;
    b.max_rows = limits_.rows;
    b.max_rows_per_sequence = limits_.rows_per_sequence;
    b.max_length = limits_.length;
    return b;
  }
  void list_tensors() {
    const int64_t h = desc_.heads, g = desc_.groups, dk = desc_.key_dim, dv = desc_.value_dim, levels = desc_.levels;
    const int64_t hidden = desc_.hidden;
    const auto input = [&](lla_role role, int64_t d1, int64_t d2, float low, float high, lla_dtype dtype = LLA_F32) {
      tensors_.push_back({role, d1, d2, low, high, dtype, false, nullptr, nullptr});
    };
    const auto weight = [&](lla_role role, int64_t d1, int64_t d2, float low, float high, lla_dtype dtype = LLA_F32) {
      tensors_.push_back({role, d1, d2, low, high, dtype, true, nullptr, nullptr});
    };
    const auto matrix = [&](lla_role role, int64_t d1, int64_t d2) { weight(role, d1, d2, -0.3f, 0.3f, limits_.dtype); };
    if (desc_.kind == LLA_LAYER_MIXER) {
      const float key = 1.6f / std::sqrt(static_cast<float>(dk));
      input(LLA_Q, g, dk, -1, 1, limits_.dtype);
      input(LLA_K, g, dk, -key, key, limits_.dtype);
      input(LLA_V, h, dv, -1, 1, limits_.dtype);
      input(LLA_GATE, h, -1, -limits_.decay, 0);
      input(LLA_WRITE, h, -1, 0.1f, 0.9f);
      if (levels) input(LLA_LAMBDA, h, levels, 0.2f, 1.2f);
      input(LLA_Y, h, dv, -1, 1, limits_.dtype);
      return;
    }
    input(LLA_X, hidden, -1, -1, 1, limits_.dtype);
    input(LLA_Y, hidden, -1, -1, 1, limits_.dtype);
    weight(LLA_WEIGHT_DT_BIAS, h, -1, -2, -1);
    weight(LLA_WEIGHT_A_LOG, h, -1, 0, 1);
    if (levels) weight(LLA_WEIGHT_LAMBDA, h, levels, 0.5f, 1.5f);
    if (desc_.kind == LLA_LAYER_MAMBA2) {
      const int64_t inner = h * dv, channels = inner + 2 * g * dk;
      matrix(LLA_WEIGHT_IN_PROJ, inner + channels + h + h * levels, hidden);
      weight(LLA_WEIGHT_CONV, channels, 4, -0.5f, 0.5f);
      weight(LLA_WEIGHT_CONV_BIAS, channels, -1, -0.1f, 0.1f);
      weight(LLA_WEIGHT_SKIP, h, -1, 0.5f, 1.5f);
      weight(LLA_WEIGHT_NORM, inner, -1, 0.5f, 1.5f);
      matrix(LLA_WEIGHT_OUT_PROJ, hidden, inner);
      return;
    }
    for (const auto& [projection, conv, width] : {std::tuple{LLA_WEIGHT_Q_PROJ, LLA_WEIGHT_CONV_Q, h * dk},
                                                  {LLA_WEIGHT_K_PROJ, LLA_WEIGHT_CONV_K, h * dk},
                                                  {LLA_WEIGHT_V_PROJ, LLA_WEIGHT_CONV_V, h * dv}}) {
      matrix(projection, width, hidden);
      weight(conv, width, 4, -0.5f, 0.5f);
    }
    matrix(LLA_WEIGHT_GATE_PROJ, h, hidden);
    matrix(LLA_WEIGHT_WRITE_PROJ, h, hidden);
    if (levels) matrix(LLA_WEIGHT_LAMBDA_PROJ, h * levels, hidden);
    matrix(LLA_WEIGHT_Z_PROJ, h * dv, hidden);
    weight(LLA_WEIGHT_NORM, dv, -1, 0.5f, 1.5f);
    matrix(LLA_WEIGHT_OUT_PROJ, hidden, h * dv);
  }
  static size_t size_of(const Tensor& t, int64_t rows) {
    return static_cast<size_t>((t.weight ? 1 : rows) * t.d1 * std::max<int64_t>(1, t.d2)) * lla_dtype_size(t.dtype);
  }
  lla_binding bind(const Tensor& t, void* data) const {
    return lla_bind(t.role, t.weight ? lla_tensor_of(data, t.dtype, t.d1, t.d2, -1, -1)
                                     : lla_tensor_of(data, t.dtype, rows_, t.d1, t.d2, -1));
  }
  void* take(size_t bytes) {
    void* memory = nullptr;
    EXPECT_EQ(lla_device_allocate(context_, bytes, &memory, nullptr), LLA_OK) << bytes;
    blocks_.push_back({memory, bytes});
    return memory;
  }
  void send(void* to, const Bytes& from) {
    if (!to || from.empty()) return;
    CALL(lla_device_copy(context_, to, from.data(), from.size(), stream_, &error));
    CALL(lla_device_wait(context_, stream_, &error));  // `from` may go away
  }

  lla_context* context_ = nullptr;
  lla_layer* layer_ = nullptr;
  lla_state* state_ = nullptr;
  lla_batch* batch_ = nullptr;
  lla_layer_desc desc_ = LLA_LAYER_DESC_INIT;
  Limits limits_;
  void *stream_ = nullptr, *workspace_ = nullptr, *saved_ = nullptr;
  size_t workspace_bytes_ = 0, saved_bytes_ = 0;
  int64_t rows_ = 0;
  std::vector<Tensor> tensors_;
  Bytes batch_memory_;
  std::vector<std::pair<void*, size_t>> blocks_;
};

}  // namespace device
