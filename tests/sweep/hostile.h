// SPDX-License-Identifier: Apache-2.0
// Hostile calls: every buffer of a call stands between inaccessible pages, surrounded by NaN, with any strides.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "harness.h"

namespace hostile {

using sweep::Buffer;
using sweep::Tensors;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kPage = 4096;

// Bytes that end (or begin) at an inaccessible page. All other accessible bytes are 0xff, a NaN in every float type.
class Guarded {
 public:
  Guarded(size_t bytes, bool at_end, size_t alignment = 4) : bytes_(bytes) {
    inner_ = (bytes + alignment + kPage - 1) / kPage * kPage;
    base_ = static_cast<char*>(mmap(nullptr, inner_ + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + kPage, inner_, PROT_READ | PROT_WRITE);
    std::memset(base_ + kPage, 0xff, inner_);
    data_ = at_end ? base_ + kPage + (inner_ - bytes) / alignment * alignment : base_ + kPage;
  }
  ~Guarded() { munmap(base_, inner_ + 2 * kPage); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool outside_untouched() const {
    for (const char* p = base_ + kPage; p < base_ + kPage + inner_; ++p) {
      if ((p < data_ || p >= data_ + bytes_) && *p != '\xff') return false;
    }
    return true;
  }

 private:
  char *base_, *data_;
  size_t bytes_, inner_;
};

enum class Layout { kEnd, kBegin, kPadded };

// A copy of a Buffer in guarded memory, in a layout.
class Placed {
 public:
  // `split` > 0: the first axis is cut into [split, rest].
  Placed(const Buffer& b, Layout layout, int64_t split, bool fill) : shape_(b) {
    std::vector<int64_t> dims = b.dims;
    if (split > 0) {
      dims.insert(dims.begin(), split);
      dims[1] /= split;
    }
    tensor_.dtype = b.dtype;
    tensor_.rank = static_cast<int32_t>(dims.size());
    int64_t stride = 1, reach = 1;
    for (int i = tensor_.rank - 1; i >= 0; --i) {
      const int64_t d = dims[static_cast<size_t>(i)];
      tensor_.dims[i] = d;
      tensor_.strides[i] = stride;
      reach += (d - 1) * stride;
      if (d == 0) empty_ = true;
      stride *= d;
      if (layout == Layout::kPadded) stride += 3;
    }
    element_ = lla_dtype_size(b.dtype);
    memory_ =
        std::make_unique<Guarded>(empty_ ? 0 : static_cast<size_t>(reach) * element_, layout != Layout::kBegin, element_);
    tensor_.data = memory_->data();
    if (fill) {
      for_each([&](size_t i, char* p) {
        if (element_ == 8)
          std::memcpy(p, &b.f64[i], 8);
        else
          std::memcpy(p, &b.f32[i], 4);
      });
    }
  }
  lla_tensor tensor() const { return tensor_; }
  Buffer get() {
    Buffer b(shape_.dtype, shape_.dims);
    for_each([&](size_t i, char* p) {
      if (element_ == 8)
        std::memcpy(&b.f64[i], p, 8);
      else
        std::memcpy(&b.f32[i], p, 4);
    });
    return b;
  }
  // Nothing but elements was written.
  bool gaps_untouched() {
    for_each([&](size_t, char* p) { std::memset(p, 0xff, element_); });
    for (size_t i = 0; i < memory_->bytes(); ++i)
      if (memory_->data()[i] != '\xff') return false;
    return memory_->outside_untouched();
  }

 private:
  template <class F>
  void for_each(F&& f) {
    if (empty_) return;
    int64_t at[LLA_MAX_RANK] = {};
    for (size_t i = 0, n = shape_.count(); i < n; ++i) {
      int64_t offset = 0;
      for (int a = 0; a < tensor_.rank; ++a) offset += at[a] * tensor_.strides[a];
      f(i, memory_->data() + offset * static_cast<int64_t>(element_));
      for (int a = tensor_.rank - 1; a >= 0 && ++at[a] == tensor_.dims[a]; --a) at[a] = 0;
    }
  }

  Buffer shape_;
  lla_tensor tensor_{};
  std::unique_ptr<Guarded> memory_;
  size_t element_ = 4;
  bool empty_ = false;
};

struct Call {
  lla_context* context = nullptr;
  lla_layer* layer = nullptr;
  Tensors tensors, weights;  // inputs, and LLA_Y for its shape
  lla_rows rows = LLA_ROWS_INIT;
  lla_state* state = nullptr;
  int64_t layer_index = 0, max_length = 0;
  Layout layout = Layout::kEnd;
  int64_t split = 0;  // > 0: tensors [B, T, ...]
  bool commit = false, saved = true;
  const Buffer* dy = nullptr;  // given: backward too
};
struct Outcome {
  lla_status status = LLA_OK;
  std::string text;
  Buffer y;
  Tensors gradients, weight_gradients;
};

inline Outcome run(const Call& c) {
  Outcome out;
  lla_error error = LLA_ERROR_INIT;
  const bool end = c.layout != Layout::kBegin;
  const auto failed = [&](lla_status s) {
    out.status = s;
    out.text = error.text;
    return out;
  };
#define HOSTILE_TRY(call)                                \
  do {                                                   \
    if (const lla_status s_ = (call)) return failed(s_); \
  } while (0)
  const Buffer& shape = c.tensors.at(LLA_Y);
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  limits.max_sequences = c.rows.sequences;
  limits.max_rows = shape.dims[0];
  limits.max_length = c.max_length;
  limits.max_snapshots = c.rows.snapshots;
  size_t bytes = 0, alignment = 0;
  HOSTILE_TRY(lla_batch_size(c.context, &limits, &bytes, &alignment, &error));
  Guarded batch_memory(bytes, end, alignment);
  lla_batch* batch = nullptr;
  HOSTILE_TRY(lla_batch_init(c.context, &limits, batch_memory.data(), bytes, &batch, &error));
  HOSTILE_TRY(lla_batch_plan(batch, c.state, &c.rows, nullptr, &error));
  std::map<lla_role, std::unique_ptr<Placed>> in, w, g;
  std::vector<lla_binding> io, weights, gradients;
  for (const auto& [role, b] : c.tensors) {
    in[role] = std::make_unique<Placed>(b, c.layout, c.split, role != LLA_Y);
    io.push_back(lla_bind(role, in[role]->tensor()));
  }
  for (const auto& [role, b] : c.weights) {
    w[role] = std::make_unique<Placed>(b, c.layout, 0, true);
    weights.push_back(lla_bind(role, w[role]->tensor()));
  }
  HOSTILE_TRY(lla_layer_saved_size(c.layer, &limits, &bytes, &alignment, &error));
  Guarded saved(bytes, end, alignment);
  HOSTILE_TRY(lla_layer_workspace(c.layer, &limits, LLA_PASS_FORWARD, &bytes, &alignment, &error));
  {
    Guarded workspace(bytes, end, alignment);
    lla_forward_args a = LLA_FORWARD_ARGS_INIT;
    a.batch = batch;
    a.state = c.state;
    a.layer_index = c.layer_index;
    a.io = io.data();
    a.io_count = static_cast<int64_t>(io.size());
    a.weights = weights.data();
    a.weight_count = static_cast<int64_t>(weights.size());
    a.workspace = workspace.data();
    a.workspace_bytes = bytes;
    if (c.saved && saved.bytes()) {
      a.saved = saved.data();
      a.saved_bytes = saved.bytes();
    }
    HOSTILE_TRY(lla_layer_forward(c.layer, &a, &error));
    EXPECT_TRUE(workspace.outside_untouched()) << "workspace overrun";
  }
  EXPECT_TRUE(saved.outside_untouched()) << "saved overrun";
  out.y = in[LLA_Y]->get();
  EXPECT_TRUE(in[LLA_Y]->gaps_untouched()) << "y overrun";
  if (c.dy) {
    Placed dy(*c.dy, c.layout, c.split, true);
    lla_binding output = lla_bind(LLA_Y, dy.tensor());
    std::vector<lla_binding> inputs;
    for (const auto& [role, b] : c.tensors) {
      if (role == LLA_Y) continue;
      inputs.push_back(lla_bind(role, in[role]->tensor()));
      g[role] = std::make_unique<Placed>(b, c.layout, c.split, false);
      gradients.push_back(lla_bind(role, g[role]->tensor()));
    }
    for (const auto& [role, b] : c.weights) {
      g[role] = std::make_unique<Placed>(b, c.layout, 0, false);
      gradients.push_back(lla_bind(role, g[role]->tensor()));
    }
    HOSTILE_TRY(lla_layer_workspace(c.layer, &limits, LLA_PASS_BACKWARD, &bytes, &alignment, &error));
    Guarded workspace(bytes, end, alignment);
    lla_backward_args a = LLA_BACKWARD_ARGS_INIT;
    a.batch = batch;
    a.state = c.state;
    a.layer_index = c.layer_index;
    a.io = inputs.data();
    a.io_count = static_cast<int64_t>(inputs.size());
    a.weights = weights.data();
    a.weight_count = static_cast<int64_t>(weights.size());
    a.outputs = &output;
    a.output_count = 1;
    a.gradients = gradients.data();
    a.gradient_count = static_cast<int64_t>(gradients.size());
    a.workspace = workspace.data();
    a.workspace_bytes = bytes;
    if (c.saved && saved.bytes()) {
      a.saved = saved.data();
      a.saved_bytes = saved.bytes();
    }
    HOSTILE_TRY(lla_layer_backward(c.layer, &a, &error));
    EXPECT_TRUE(workspace.outside_untouched()) << "workspace overrun";
    for (auto& [role, p] : g) {
      (c.weights.count(role) ? out.weight_gradients : out.gradients)[role] = p->get();
      EXPECT_TRUE(p->gaps_untouched()) << "overrun of gradient " << role;
    }
  }
  if (c.commit)
    HOSTILE_TRY(lla_state_commit(c.state, batch, {nullptr, 0, 0}, nullptr, &error));
  else
    lla_batch_discard(batch);
  EXPECT_TRUE(batch_memory.outside_untouched()) << "batch overrun";
#undef HOSTILE_TRY
  return out;
}

inline Tensors to_double(const Tensors& t) {
  Tensors r;
  for (const auto& [role, b] : t) {
    r[role] = Buffer(LLA_F64, b.dims);
    for (size_t i = 0; i < b.count(); ++i) r[role].f64[i] = b.get(i);
  }
  return r;
}
inline Buffer to_double(const Buffer& b) {
  Buffer r(LLA_F64, b.dims);
  for (size_t i = 0; i < b.count(); ++i) r.f64[i] = b.get(i);
  return r;
}
inline bool finite(const Buffer& b) {
  for (size_t i = 0; i < b.count(); ++i)
    if (!std::isfinite(b.get(i))) return false;
  return true;
}
// The rows [begin, begin + count) alone.
inline Buffer slice(const Buffer& b, int64_t begin, int64_t count) {
  std::vector<int64_t> dims = b.dims;
  dims[0] = count;
  Buffer r(b.dtype, dims);
  const size_t n = b.row_size();
  for (size_t i = 0; i < static_cast<size_t>(count) * n; ++i) r.set(i, b.get(static_cast<size_t>(begin) * n + i));
  return r;
}
inline Tensors slice(const Tensors& t, int64_t begin, int64_t count) {
  Tensors r;
  for (const auto& [role, b] : t) r[role] = slice(b, begin, count);
  return r;
}
inline void fill_rows(Buffer& b, int64_t begin, int64_t count, double x) {
  for (size_t i = static_cast<size_t>(begin) * b.row_size(); i < static_cast<size_t>(begin + count) * b.row_size(); ++i)
    b.set(i, x);
}

// Random tensors and weights of a mixer, cell, Mamba-2 block or convolution.
struct Problem {
  lla_layer_desc desc;
  Tensors tensors, weights;
};
inline Problem problem_of(const lla_layer_desc& d, int64_t rows, unsigned seed, lla_dtype type = LLA_F32) {
  Problem p{d, {}, {}};
  std::mt19937 engine(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::normal_distribution<double> normal;
  const int64_t h = d.heads, g = d.groups ? d.groups : h, dk = d.key_dim, dv = d.value_dim, l = d.levels;
  const auto add = [&](Tensors& t, lla_role role, std::vector<int64_t> dims, double low, double high) {
    Buffer& b = t[role] = Buffer(type, std::move(dims));
    for (size_t i = 0; i < b.count(); ++i) b.set(i, low + (high - low) * uniform(engine));
  };
  if (d.kind == LLA_LAYER_CONVOLUTION) {
    add(p.tensors, LLA_X, {rows, d.hidden}, -1, 1);
    add(p.tensors, LLA_Y, {rows, d.hidden}, 0, 0);
    add(p.weights, LLA_WEIGHT_CONV, {d.hidden, 4}, -0.5, 0.5);
    return p;
  }
  if (d.kind == LLA_LAYER_PROJECTION || d.kind == LLA_LAYER_L2_NORM || d.kind == LLA_LAYER_GATED_NORM) {
    std::vector<int64_t> x{rows, d.hidden}, y{rows, d.kind == LLA_LAYER_PROJECTION ? d.outputs : d.hidden};
    if (d.kind == LLA_LAYER_L2_NORM) x = y = {rows, h, dk};
    add(p.tensors, LLA_X, x, -1, 1);
    add(p.tensors, LLA_Y, y, 0, 0);
    if (d.kind == LLA_LAYER_PROJECTION) add(p.weights, LLA_WEIGHT_PROJ, {d.outputs, d.hidden}, -1, 1);
    if (d.kind == LLA_LAYER_PROJECTION) add(p.weights, LLA_WEIGHT_PROJ_BIAS, {d.outputs}, -1, 1);
    if (d.kind == LLA_LAYER_GATED_NORM) {
      add(p.tensors, LLA_Z, {rows, d.hidden}, -1, 1);
      add(p.tensors, LLA_SKIP_INPUT, {rows, h, dv}, -1, 1);
      add(p.weights, LLA_WEIGHT_SKIP, {h}, -1, 1);
      add(p.weights, LLA_WEIGHT_NORM, {d.hidden}, 0.5, 1.5);
    }
    return p;
  }
  const bool cell = d.kind == LLA_LAYER_CELL, deltanet = d.kind == LLA_LAYER_GATED_DELTANET;
  if (deltanet) {
    add(p.tensors, LLA_X, {rows, d.hidden}, -1, 1);
    add(p.tensors, LLA_Y, {rows, d.hidden}, 0, 0);
    for (auto [role, n] : {std::pair<lla_role, int64_t>{LLA_WEIGHT_Q_PROJ, g * dk},
                           {LLA_WEIGHT_K_PROJ, g * dk},
                           {LLA_WEIGHT_V_PROJ, h * dv},
                           {LLA_WEIGHT_GATE_PROJ, h},
                           {LLA_WEIGHT_WRITE_PROJ, h},
                           {LLA_WEIGHT_Z_PROJ, h * dv},
                           {LLA_WEIGHT_LAMBDA_PROJ, h * l}})
      if (n) add(p.weights, role, {n, d.hidden}, -0.3, 0.3);
    add(p.weights, LLA_WEIGHT_CONV_Q, {g * dk, 4}, -0.5, 0.5);
    add(p.weights, LLA_WEIGHT_CONV_K, {g * dk, 4}, -0.5, 0.5);
    add(p.weights, LLA_WEIGHT_CONV_V, {h * dv, 4}, -0.5, 0.5);
    add(p.weights, LLA_WEIGHT_OUT_PROJ, {d.hidden, h * dv}, -0.3, 0.3);
  } else if (d.kind == LLA_LAYER_MAMBA2) {
    add(p.tensors, LLA_X, {rows, d.hidden}, -1, 1);
    add(p.tensors, LLA_Y, {rows, d.hidden}, 0, 0);
    add(p.weights, LLA_WEIGHT_IN_PROJ, {2 * h * dv + 2 * g * dk + h + h * l, d.hidden}, -0.3, 0.3);
    add(p.weights, LLA_WEIGHT_CONV, {h * dv + 2 * g * dk, 4}, -0.5, 0.5);
    add(p.weights, LLA_WEIGHT_SKIP, {h}, 0.5, 1.5);
    add(p.weights, LLA_WEIGHT_OUT_PROJ, {d.hidden, h * dv}, -0.3, 0.3);
  } else {
    add(p.tensors, LLA_Q, {rows, g, dk}, -1, 1);
    add(p.tensors, LLA_K, {rows, g, dk}, -1, 1);
    add(p.tensors, LLA_V, {rows, h, dv}, -1, 1);
    add(p.tensors, LLA_GATE, {rows, h}, cell ? -2 : -0.2, cell ? 2 : 0);
    if (d.write_form == LLA_WRITE_READY || d.write_form == LLA_WRITE_SIGMOID) add(p.tensors, LLA_WRITE, {rows, h}, 0.1, 0.9);
    if (l) add(p.tensors, LLA_LAMBDA, {rows, h, l}, 0.2, 1.2);
    if (cell) {
      add(p.tensors, LLA_Z, {rows, h * dv}, -1, 1);
      add(p.tensors, LLA_Y, {rows, h * dv}, 0, 0);
      if (d.conv_width) {
        add(p.weights, LLA_WEIGHT_CONV_Q, {g * dk, d.conv_width}, -0.5, 0.5);
        add(p.weights, LLA_WEIGHT_CONV_K, {g * dk, d.conv_width}, -0.5, 0.5);
        add(p.weights, LLA_WEIGHT_CONV_V, {h * dv, d.conv_width}, -0.5, 0.5);
      }
    } else {
      add(p.tensors, LLA_Y, {rows, h, dv}, 0, 0);
      Buffer& k = p.tensors[LLA_K];  // unit keys
      for (size_t r = 0, n = static_cast<size_t>(dk); r < k.count() / n; ++r) {
        double norm = 0;
        for (size_t i = 0; i < n; ++i) norm += k.get(r * n + i) * k.get(r * n + i);
        for (size_t i = 0; i < n; ++i) k.set(r * n + i, k.get(r * n + i) / std::sqrt(norm));
      }
    }
  }
  const bool block = deltanet || d.kind == LLA_LAYER_MAMBA2;
  if (block || d.gate_form == LLA_GATE_SOFTPLUS) {
    add(p.weights, LLA_WEIGHT_DT_BIAS, {h}, -2, -1);
    add(p.weights, LLA_WEIGHT_A_LOG, {h}, 0, 1);
  }
  if (l && (block || d.lambda_form != LLA_LAMBDA_READY)) add(p.weights, LLA_WEIGHT_LAMBDA, {h, l}, 0.5, 1.5);
  if (block || d.norm_form) add(p.weights, LLA_WEIGHT_NORM, {deltanet ? dv : h * dv}, 0.5, 1.5);
  return p;
}
inline lla_layer_desc mixer(lla_mixer kind, int64_t levels, int64_t heads, int64_t groups, int64_t dk, int64_t dv,
                            int64_t grain = 64) {
  lla_layer_desc d = mixer_desc(kind, heads, groups, dk, dv, levels);
  d.grain = grain;
  return d;
}
inline lla_layer_desc cell(lla_mixer kind, int64_t levels, int64_t heads, int64_t groups, int64_t dk, int64_t dv,
                           int64_t grain) {
  lla_layer_desc d = mixer(kind, levels, heads, groups, dk, dv, grain);
  d.kind = LLA_LAYER_CELL;
  d.gate_form = LLA_GATE_SOFTPLUS;
  d.write_form = kind == LLA_DELTA_RULE ? LLA_WRITE_SIGMOID : LLA_WRITE_STEP;
  if (levels) d.lambda_form = kind == LLA_DELTA_RULE ? LLA_LAMBDA_BOUNDED : LLA_LAMBDA_SOFTPLUS;
  d.qk_norm = kind == LLA_DELTA_RULE;
  d.conv_width = 4;
  d.norm_form = LLA_NORM_NORM_FIRST;
  return d;
}
inline lla_layer_desc mamba2(int64_t levels, int64_t heads, int64_t groups, int64_t dk, int64_t dv, int64_t hidden,
                             int64_t grain) {
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = LLA_LAYER_MAMBA2;
  d.heads = heads;
  d.groups = groups;
  d.key_dim = dk;
  d.value_dim = dv;
  d.grain = grain;
  d.levels = levels;
  d.lambda_form = levels ? LLA_LAMBDA_SOFTPLUS : LLA_LAMBDA_NONE;
  d.hidden = hidden;
  return d;
}
inline lla_layer_desc deltanet(int64_t levels, int64_t heads, int64_t groups, int64_t dk, int64_t dv, int64_t hidden,
                               int64_t grain) {
  lla_layer_desc d = mamba2(levels, heads, groups, dk, dv, hidden, grain);
  d.kind = LLA_LAYER_GATED_DELTANET;
  if (levels) d.lambda_form = LLA_LAMBDA_BOUNDED;
  return d;
}
inline lla_layer_desc part(lla_layer_kind kind, int64_t hidden, int64_t outputs, int64_t heads, int64_t dk, int64_t dv) {
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = kind;
  d.hidden = hidden;
  d.outputs = outputs;
  d.heads = heads;
  d.key_dim = dk;
  d.value_dim = dv;
  return d;
}
inline lla_layer_desc convolution(int64_t channels, int64_t grain) {
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = LLA_LAYER_CONVOLUTION;
  d.hidden = channels;
  d.grain = grain;
  return d;
}

// One sequence per entry of `lengths`, one after the other. `offsets` must live as long as the rows.
inline lla_rows packed(const std::vector<int64_t>& offsets) {
  lla_rows r = LLA_ROWS_INIT;
  r.sequences = static_cast<int64_t>(offsets.size()) - 1;
  r.offsets = sweep::index_of(offsets);
  return r;
}
inline lla_rows uniform_rows(int64_t sequences, int64_t rows) {
  lla_rows r = LLA_ROWS_INIT;
  r.sequences = sequences;
  r.rows_per_sequence = rows;
  return r;
}
// The λ entries that a position never reads become `x`.
inline void set_dead_levels(Buffer& lambda, const std::vector<int64_t>& positions, double x) {
  const int64_t h = lambda.dims[1], l = lambda.dims[2];
  for (size_t r = 0; r < positions.size(); ++r)
    for (int64_t a = 0; a < h; ++a)
      for (int64_t b = 1; b < l; ++b)
        if (b > 62 || !(positions[r] >> (b - 1) & 1))
          lambda.set((r * h + a) * static_cast<size_t>(l) + static_cast<size_t>(b), x);
}

}  // namespace hostile
