// SPDX-License-Identifier: Apache-2.0
// Layers of every kind with odd numbers in their descriptions, which tensors each takes, and bindings of them with memory of
// their own that can be spoiled.
#pragma once

#include <algorithm>

#include "fuzz.h"

namespace fuzz {

constexpr int64_t kMostBytes = int64_t{1} << 20;

struct Shape {
  lla_role role;
  bool optional;
  std::vector<int64_t> dims;
};

// Inputs, then the outputs from `outputs` on, then the weights from `weights` on.
struct Shapes {
  std::vector<Shape> all;
  size_t outputs = 0, weights = 0;
};

inline Shapes shapes_of(const lla_layer_desc& d, int64_t n) {
  const int64_t h = d.heads, g = d.groups ? d.groups : h, dk = d.key_dim, dv = d.value_dim, l = d.levels,
                w = d.conv_width ? d.conv_width : 4;
  Shapes s;
  const auto add = [&](lla_role role, std::vector<int64_t> dims, bool optional = false) {
    s.all.push_back({role, optional, std::move(dims)});
  };
  const auto outputs = [&] { s.outputs = s.all.size(); };
  const auto weights = [&] { s.weights = s.all.size(); };
  switch (d.kind) {
    case LLA_LAYER_MIXER:
    case LLA_LAYER_CELL: {
      const bool cell = d.kind == LLA_LAYER_CELL;
      add(LLA_Q, {n, g, dk});
      add(LLA_K, {n, g, dk});
      add(LLA_V, {n, h, dv});
      add(LLA_GATE, {n, h}, !cell);
      if (d.write_form == LLA_WRITE_READY || d.write_form == LLA_WRITE_SIGMOID || d.write_form == LLA_WRITE_TWO_SIGMOID)
        add(LLA_WRITE, {n, h});
      if (d.lambda_form) add(LLA_LAMBDA, {n, h, l});
      if (cell) add(LLA_Z, {n, h * dv}, true);
      outputs();
      if (cell)
        add(LLA_Y, {n, h * dv});
      else
        add(LLA_Y, {n, h, dv});
      weights();
      if (cell && d.conv_width) {
        add(LLA_WEIGHT_CONV_Q, {g * dk, w});
        add(LLA_WEIGHT_CONV_K, {g * dk, w});
        add(LLA_WEIGHT_CONV_V, {h * dv, w});
        add(LLA_WEIGHT_CONV_V_BIAS, {h * dv}, true);
      }
      if (cell && d.gate_form == LLA_GATE_SOFTPLUS) {
        add(LLA_WEIGHT_A_LOG, {h});
        add(LLA_WEIGHT_DT_BIAS, {h}, true);
      }
      if (cell && d.lambda_form > LLA_LAMBDA_READY) add(LLA_WEIGHT_LAMBDA, {h, l});
      if (cell) add(LLA_WEIGHT_SKIP, {h}, true);
      if (cell && d.norm_form) add(LLA_WEIGHT_NORM, {h * dv}, true);
      return s;
    }
    case LLA_LAYER_MAMBA2:
    case LLA_LAYER_GATED_DELTANET: {
      const int64_t hidden = d.hidden, channels = h * dv + 2 * g * dk;
      add(LLA_X, {n, hidden});
      outputs();
      add(LLA_Y, {n, hidden});
      weights();
      if (d.kind == LLA_LAYER_MAMBA2) {
        add(LLA_WEIGHT_IN_PROJ, {h * dv + channels + h + h * l, hidden});
        add(LLA_WEIGHT_CONV, {channels, w});
        add(LLA_WEIGHT_CONV_BIAS, {channels}, true);
        add(LLA_WEIGHT_SKIP, {h}, true);
      } else {
        add(LLA_WEIGHT_Q_PROJ, {g * dk, hidden});
        add(LLA_WEIGHT_K_PROJ, {g * dk, hidden});
        add(LLA_WEIGHT_V_PROJ, {h * dv, hidden});
        add(LLA_WEIGHT_GATE_PROJ, {h, hidden});
        add(LLA_WEIGHT_WRITE_PROJ, {h, hidden});
        add(LLA_WEIGHT_Z_PROJ, {h * dv, hidden}, true);
        if (d.lambda_form) add(LLA_WEIGHT_LAMBDA_PROJ, {h * l, hidden});
        add(LLA_WEIGHT_CONV_Q, {g * dk, w});
        add(LLA_WEIGHT_CONV_K, {g * dk, w});
        add(LLA_WEIGHT_CONV_V, {h * dv, w});
      }
      add(LLA_WEIGHT_DT_BIAS, {h});
      add(LLA_WEIGHT_A_LOG, {h});
      if (d.lambda_form) add(LLA_WEIGHT_LAMBDA, {h, l});
      add(LLA_WEIGHT_NORM, {d.kind == LLA_LAYER_MAMBA2 ? h * dv : dv}, true);
      add(LLA_WEIGHT_OUT_PROJ, {hidden, h * dv});
      return s;
    }
    case LLA_LAYER_CONVOLUTION:
      add(LLA_X, {n, d.hidden});
      outputs();
      add(LLA_Y, {n, d.hidden});
      weights();
      add(LLA_WEIGHT_CONV, {d.hidden, w});
      add(LLA_WEIGHT_CONV_BIAS, {d.hidden}, true);
      return s;
    case LLA_LAYER_GATES:
      add(LLA_GATE, {n, h});
      if (d.write_form && d.write_form != LLA_WRITE_STEP) add(LLA_WRITE, {n, h});
      if (d.lambda_form) add(LLA_LAMBDA, {n, h, l});
      outputs();
      add(LLA_GATE_OUT, {n, h});
      if (d.write_form) add(LLA_WRITE_OUT, {n, h});
      if (d.lambda_form) add(LLA_LAMBDA_OUT, {n, h, l});
      weights();
      if (d.gate_form == LLA_GATE_SOFTPLUS) {
        add(LLA_WEIGHT_A_LOG, {h});
        add(LLA_WEIGHT_DT_BIAS, {h}, true);
      }
      if (d.lambda_form > LLA_LAMBDA_READY) add(LLA_WEIGHT_LAMBDA, {h, l});
      return s;
    case LLA_LAYER_L2_NORM:
      add(LLA_X, {n, h, dk});
      outputs();
      add(LLA_Y, {n, h, dk});
      weights();
      return s;
    case LLA_LAYER_GATED_NORM:
      add(LLA_X, {n, d.hidden});
      add(LLA_SKIP_INPUT, {n, h, dv}, true);
      add(LLA_Z, {n, d.hidden}, true);
      outputs();
      add(LLA_Y, {n, d.hidden});
      weights();
      add(LLA_WEIGHT_SKIP, {h}, true);
      add(LLA_WEIGHT_NORM, {d.hidden}, true);
      return s;
    default:
      add(LLA_X, {n, d.hidden});
      outputs();
      add(LLA_Y, {n, d.outputs});
      weights();
      add(LLA_WEIGHT_PROJ, {d.outputs, d.hidden});
      add(LLA_WEIGHT_PROJ_BIAS, {d.outputs}, true);
      return s;
  }
}

// Bindings with memory of their own, right but for what the input spoils.
class Bindings {
 public:
  // False if the tensors would be too large for a test.
  bool add(Input& in, const Shape& shape, lla_dtype dtype, int32_t flags = 0) {
    int64_t elements = 1;
    for (const int64_t d : shape.dims) {
      if (d < 0 || d > kMostBytes || elements * d > kMostBytes) return false;
      elements *= d;
    }
    lla_tensor t{};
    t.dtype = dtype;
    t.rank = static_cast<int32_t>(shape.dims.size());
    const int64_t pad = in.one_in(8) ? in.below(4) : 0;  // between rows
    int64_t stride = 1, reach = elements > 0;
    for (int32_t i = t.rank - 1; i >= 0; --i) {
      t.dims[i] = shape.dims[static_cast<size_t>(i)];
      t.strides[i] = stride;
      if (elements > 0) reach += (t.dims[i] - 1) * stride;
      stride = stride * t.dims[i] + pad;
    }
    blocks_.push_back(std::make_unique<Block>(static_cast<size_t>(reach) * lla_dtype_size(dtype)));
    std::memset(blocks_.back()->data(), in.one_in(16) ? 0xff : 0x3c, blocks_.back()->size());  // small numbers, or NaN
    t.data = blocks_.back()->data();
    list_.push_back(lla_bind(shape.role, t));
    list_.back().flags = flags;
    return true;
  }
  // One thing about the bindings becomes wrong, in ways that never make right numbers point outside the memory.
  void spoil(Input& in) {
    if (list_.empty()) return;
    lla_binding& b = list_[static_cast<size_t>(in.below(static_cast<int64_t>(list_.size())))];
    const int64_t axis = in.below(LLA_MAX_RANK);
    static constexpr lla_dtype kNoTensor[] = {0, -1, LLA_I32, LLA_I64, 7, INT32_MAX};
    switch (in.below(10)) {
      case 0:
        b.role = static_cast<lla_role>(in.number());
        break;
      case 1:
        b.flags = static_cast<int32_t>(in.number());
        break;
      case 2:
        b.tensor.data = nullptr;
        break;
      case 3:
        b.tensor.dtype = kNoTensor[in.below(6)];
        break;
      case 4:
        b.tensor.rank = static_cast<int32_t>(in.number() % 9) - 1;
        break;
      case 5:
        b.tensor.dims[axis] = std::min<int64_t>(in.number(), b.tensor.dims[axis] - 1);  // smaller, or negative
        break;
      case 6:
        b.tensor.strides[axis] = axis < b.tensor.rank && b.tensor.dims[axis] > 1 ? -in.below(3) : in.number();
        break;
      case 7:
        b.tensor.data = static_cast<char*>(b.tensor.data) + 1;
        if (b.tensor.dtype == LLA_F32) break;
        b.tensor.data = nullptr;
        break;
      case 8:
        list_.push_back(b);
        break;
      default:
        list_.erase(list_.begin() + (&b - list_.data()));
    }
  }
  const lla_binding* data() const { return list_.data(); }
  int64_t size() const { return static_cast<int64_t>(list_.size()); }
  std::vector<std::vector<char>> contents() const {
    std::vector<std::vector<char>> all;
    for (const auto& b : blocks_) all.emplace_back(b->data(), b->data() + b->size());
    return all;
  }

 private:
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<lla_binding> list_;
};

// One number of a state's memory becomes wrong, in ways that never make right ones point outside of it.
inline void spoil(Input& in, lla_block_memory* m) {
  switch (in.below(5)) {
    case 0:
      m->layer_index = in.number();
      break;
    case 1:
      m->kind = static_cast<lla_block_kind>(in.number());
      break;
    case 2:
      m->base = nullptr;
      break;
    case 3:
      m->stride = std::min(in.number(), m->stride);
      break;
    default:
      m->base = static_cast<char*>(m->base) + 4;
  }
}

// A layer of any kind, mostly one that can be made.
inline lla_layer_desc any_description(Input& in) {
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = static_cast<lla_layer_kind>(1 + in.below(in.calm ? 5 : 9));
  d.mixer = static_cast<lla_mixer>(1 + in.below(2));
  d.heads = 1 + in.below(4);
  d.groups = in.one_in(3) ? d.heads : 1;
  d.key_dim = 1 + in.below(5);
  d.value_dim = 1 + in.below(5);
  d.grain = in.calm || !in.one_in(4) ? 4 : int64_t{1} << in.below(4);
  d.levels = in.one_in(2) ? 0 : 1 + in.below(8);
  d.lambda_form = d.levels ? LLA_LAMBDA_READY : LLA_LAMBDA_NONE;
  d.level_overflow = d.levels && in.one_in(3) ? LLA_LEVELS_ABSORB : LLA_LEVELS_ERROR;
  switch (d.kind) {
    case LLA_LAYER_MIXER:
      d.write_form = d.mixer == LLA_DELTA_RULE ? LLA_WRITE_READY : static_cast<lla_write_form>(in.below(2));
      d.head_map = static_cast<lla_head_map>(in.below(2));
      break;
    case LLA_LAYER_CELL:
      if (d.levels) d.lambda_form = static_cast<lla_lambda_form>(1 + in.below(4));
      d.gate_form = static_cast<lla_gate_form>(in.below(2));
      d.write_form = d.mixer == LLA_DELTA_RULE ? static_cast<lla_write_form>(1 + in.below(3))
                                               : static_cast<lla_write_form>(in.below(5));
      d.qk_norm = static_cast<int32_t>(in.below(2));
      d.conv_width = in.below(5);
      d.norm_form = static_cast<lla_norm_form>(in.below(3));
      break;
    case LLA_LAYER_MAMBA2:
    case LLA_LAYER_GATED_DELTANET:
      d.mixer = 0;
      if (d.levels) d.lambda_form = static_cast<lla_lambda_form>(2 + in.below(3));
      d.hidden = 1 + in.below(6);
      break;
    case LLA_LAYER_GATES:
      d.mixer = 0;
      d.groups = d.key_dim = d.value_dim = d.grain = 0;
      d.level_overflow = 0;
      if (d.levels) d.lambda_form = static_cast<lla_lambda_form>(1 + in.below(4));
      d.gate_form = static_cast<lla_gate_form>(in.below(2));
      d.write_form = static_cast<lla_write_form>(in.below(5));
      break;
    default: {
      const lla_layer_desc full = d;
      d = LLA_LAYER_DESC_INIT;
      d.kind = full.kind;
      if (d.kind == LLA_LAYER_CONVOLUTION) {
        d.hidden = full.heads;
        d.conv_width = 1 + in.below(5);
        d.grain = full.grain;
      } else if (d.kind == LLA_LAYER_L2_NORM) {
        d.heads = full.heads;
        d.key_dim = full.key_dim;
      } else if (d.kind == LLA_LAYER_GATED_NORM) {
        d.heads = full.heads;
        d.value_dim = full.value_dim;
        d.hidden = d.heads * d.value_dim;
        d.norm_form = static_cast<lla_norm_form>(in.below(3));
      } else {
        d.hidden = full.heads;
        d.outputs = full.key_dim;
      }
    }
  }
  if (in.one_in(6)) {  // any number in any field
    auto* words = reinterpret_cast<char*>(&d);
    const int64_t value = in.number();
    const int64_t at = 8 + in.byte() % ((static_cast<int64_t>(sizeof d) - 8) / 4) * 4;
    std::memcpy(words + at, &value, at % 8 == 0 && at + 8 <= static_cast<int64_t>(sizeof d) && in.one_in(2) ? 8 : 4);
  }
  if (in.one_in(60)) d.struct_size = static_cast<size_t>(std::min<int64_t>(in.number(), sizeof d));
  return d;
}

}  // namespace fuzz
