// SPDX-License-Identifier: Apache-2.0
// Checks every field of a layer description, fills the defaults in, and derives the mixer's shape and the history that a
// state keeps for the layer.
#include <cmath>
#include <cstring>

#include "cells/layer.h"
#include "cells/program.h"
#include "core/checked.h"
#include "core/error.h"

namespace lla {
namespace {

enum Field : uint32_t {
  kMixer = 1u << 0,
  kHeads = 1u << 1,
  kGroups = 1u << 2,
  kKeyDim = 1u << 3,
  kValueDim = 1u << 4,
  kHidden = 1u << 5,
  kOutputs = 1u << 6,
  kGrain = 1u << 7,
  kLevels = 1u << 8,
  kLambdaForm = 1u << 9,
  kLevelOverflow = 1u << 10,
  kGateForm = 1u << 11,
  kWriteForm = 1u << 12,
  kHeadMap = 1u << 13,
  kQkNorm = 1u << 14,
  kScale = 1u << 15,
  kLambdaScale = 1u << 16,
  kQkNormEpsilon = 1u << 17,
  kDtMin = 1u << 18,
  kDtMax = 1u << 19,
  kConvWidth = 1u << 20,
  kConvActivation = 1u << 21,
  kNormForm = 1u << 22,
  kNormGroup = 1u << 23,
  kNormEpsilon = 1u << 24,
  kInnerDtype = 1u << 25,
};

enum class FieldType { Int32, Int64, Double };

struct FieldInfo {
  uint32_t field;
  const char* name;
  size_t offset;
  FieldType type;
};

#define LLA_FIELD(field, name, type) \
  { field, #name, offsetof(lla_layer_desc, name), FieldType::type }
constexpr FieldInfo kFields[] = {
    LLA_FIELD(kMixer, mixer, Int32),
    LLA_FIELD(kHeads, heads, Int64),
    LLA_FIELD(kGroups, groups, Int64),
    LLA_FIELD(kKeyDim, key_dim, Int64),
    LLA_FIELD(kValueDim, value_dim, Int64),
    LLA_FIELD(kHidden, hidden, Int64),
    LLA_FIELD(kOutputs, outputs, Int64),
    LLA_FIELD(kGrain, grain, Int64),
    LLA_FIELD(kLevels, levels, Int64),
    LLA_FIELD(kLambdaForm, lambda_form, Int32),
    LLA_FIELD(kLevelOverflow, level_overflow, Int32),
    LLA_FIELD(kGateForm, gate_form, Int32),
    LLA_FIELD(kWriteForm, write_form, Int32),
    LLA_FIELD(kHeadMap, head_map, Int32),
    LLA_FIELD(kQkNorm, qk_norm, Int32),
    LLA_FIELD(kScale, scale, Double),
    LLA_FIELD(kLambdaScale, lambda_scale, Double),
    LLA_FIELD(kQkNormEpsilon, qk_norm_epsilon, Double),
    LLA_FIELD(kDtMin, dt_min, Double),
    LLA_FIELD(kDtMax, dt_max, Double),
    LLA_FIELD(kConvWidth, conv_width, Int64),
    LLA_FIELD(kConvActivation, conv_activation, Int32),
    LLA_FIELD(kNormForm, norm_form, Int32),
    LLA_FIELD(kNormGroup, norm_group, Int64),
    LLA_FIELD(kNormEpsilon, norm_epsilon, Double),
    LLA_FIELD(kInnerDtype, inner_dtype, Int32),
};
#undef LLA_FIELD

constexpr uint32_t kOperator =
    kHeads | kGroups | kKeyDim | kValueDim | kGrain | kLevels | kLambdaForm | kLevelOverflow | kHeadMap;
constexpr uint32_t kForms = kMixer | kGateForm | kWriteForm | kQkNorm | kScale | kLambdaScale | kNormForm;
constexpr uint32_t kAroundMixer =
    kQkNormEpsilon | kDtMin | kDtMax | kConvWidth | kConvActivation | kNormGroup | kNormEpsilon | kInnerDtype;

struct KindInfo {
  const char* name;
  uint32_t fields;
};

// Kinds by number; entry 0 is none.
constexpr KindInfo kKinds[] = {
    {"", 0},
    {"LLA_LAYER_MIXER", kOperator | kMixer | kGateForm | kWriteForm | kScale},
    {"LLA_LAYER_CELL", kOperator | kForms | kAroundMixer},
    {"LLA_LAYER_MAMBA2", kOperator | kForms | (kAroundMixer & ~kQkNormEpsilon) | kHidden},
    {"LLA_LAYER_GATED_DELTANET", kOperator | kForms | kAroundMixer | kHidden},
    {"LLA_LAYER_CONVOLUTION", kHidden | kGrain | kConvWidth | kConvActivation},
    {"LLA_LAYER_GATES", kHeads | kLevels | kLambdaForm | kGateForm | kWriteForm | kLambdaScale | kDtMin | kDtMax},
    {"LLA_LAYER_L2_NORM", kHeads | kKeyDim | kScale | kQkNormEpsilon},
    {"LLA_LAYER_GATED_NORM", kHeads | kValueDim | kHidden | kNormForm | kNormGroup | kNormEpsilon},
    {"LLA_LAYER_PROJECTION", kHidden | kOutputs},
};
constexpr int32_t kKindCount = sizeof(kKinds) / sizeof(kKinds[0]);
constexpr int64_t kMaxGrain = 4096;
constexpr int64_t kMaxConvWidth = 4096;
constexpr int64_t kMaxLevels = 62;

class Checker {
 public:
  Checker(const Context& context, lla_layer_desc* d, lla_error* error) : context_(context), d_(*d), error_(error) {}

  lla_status check() {
    if (d_.kind < 1 || d_.kind >= kKindCount) {
      return fail(error_, LLA_INVALID_ARGUMENT, "description: kind %d is none", d_.kind);
    }
    fields_ = kKinds[d_.kind].fields;
    if (d_.reserved != 0) return integer("reserved", d_.reserved, "must be 0");
    LLA_TRY(unused_fields());
    LLA_TRY(block_forms());
    LLA_TRY(sizes());
    LLA_TRY(lambda());
    LLA_TRY(gates());
    LLA_TRY(norms());
    LLA_TRY(convolution());
    LLA_TRY(scales());
    LLA_TRY(inner_type());
    return overflow();
  }

 private:
  bool uses(uint32_t field) const { return (fields_ & field) != 0; }
  bool is_block() const { return d_.kind == LLA_LAYER_MAMBA2 || d_.kind == LLA_LAYER_GATED_DELTANET; }
  lla_status integer(const char* name, int64_t value, const char* rule) {
    return fail(error_, LLA_INVALID_ARGUMENT, "description: %s %s, is %lld", name, rule, static_cast<long long>(value));
  }
  lla_status number(const char* name, double value, const char* rule) {
    return fail(error_, LLA_INVALID_ARGUMENT, "description: %s %s, is %g", name, rule, value);
  }

  lla_status unused_fields() {
    for (const FieldInfo& f : kFields) {
      if (uses(f.field)) continue;
      const char* at = reinterpret_cast<const char*>(&d_) + f.offset;
      int64_t whole = 0;
      double real = 0;
      int32_t narrow = 0;
      if (f.type == FieldType::Int32) std::memcpy(&narrow, at, sizeof(narrow)), whole = narrow;
      if (f.type == FieldType::Int64) std::memcpy(&whole, at, sizeof(whole));
      if (f.type == FieldType::Double) std::memcpy(&real, at, sizeof(real));
      if (whole == 0 && real == 0) continue;
      if (f.type == FieldType::Double) {
        return fail(error_, LLA_INVALID_ARGUMENT, "description: %s must be 0 for %s, is %g", f.name, kKinds[d_.kind].name,
                    real);
      }
      return fail(error_, LLA_INVALID_ARGUMENT, "description: %s must be 0 for %s, is %lld", f.name, kKinds[d_.kind].name,
                  static_cast<long long>(whole));
    }
    return LLA_OK;
  }

  // A form that a block sets itself may be 0 or what the block sets.
  lla_status imply(const char* name, int32_t* field, int32_t value) {
    if (*field != 0 && *field != value) {
      return fail(error_, LLA_INVALID_ARGUMENT, "description: %s must be 0 or %d for %s, is %d", name, value,
                  kKinds[d_.kind].name, *field);
    }
    *field = value;
    return LLA_OK;
  }
  lla_status imply(const char* name, double* field, double value) {
    if (*field != 0 && *field != value) {
      return fail(error_, LLA_INVALID_ARGUMENT, "description: %s must be 0 or %.17g for %s, is %g", name, value,
                  kKinds[d_.kind].name, *field);
    }
    *field = value;
    return LLA_OK;
  }

  lla_status block_forms() {
    if (d_.kind == LLA_LAYER_MAMBA2) {
      LLA_TRY(imply("mixer", &d_.mixer, LLA_SCALAR_GATE));
      LLA_TRY(imply("gate_form", &d_.gate_form, LLA_GATE_SOFTPLUS));
      LLA_TRY(imply("write_form", &d_.write_form, LLA_WRITE_STEP));
      LLA_TRY(imply("qk_norm", &d_.qk_norm, 0));
      LLA_TRY(imply("scale", &d_.scale, 1.0));
      LLA_TRY(imply("lambda_scale", &d_.lambda_scale, 1.0));
      if (d_.norm_form == 0) d_.norm_form = LLA_NORM_GATE_FIRST;
    }
    if (d_.kind == LLA_LAYER_GATED_DELTANET) {
      LLA_TRY(imply("mixer", &d_.mixer, LLA_DELTA_RULE));
      LLA_TRY(imply("gate_form", &d_.gate_form, LLA_GATE_SOFTPLUS));
      if (d_.write_form != LLA_WRITE_TWO_SIGMOID) LLA_TRY(imply("write_form", &d_.write_form, LLA_WRITE_SIGMOID));
      LLA_TRY(imply("qk_norm", &d_.qk_norm, 1));
      LLA_TRY(imply("norm_form", &d_.norm_form, LLA_NORM_NORM_FIRST));
      if (d_.key_dim < 1) return integer("key_dim", d_.key_dim, "must be at least 1");
      const double root = std::sqrt(static_cast<double>(d_.key_dim));
      LLA_TRY(imply("scale", &d_.scale, 1 / root));
      // The published layer divides λ by the scale of q, so that the two cancel.
      LLA_TRY(imply("lambda_scale", &d_.lambda_scale, d_.lambda_form == LLA_LAMBDA_NONE ? 1.0 : root));
      if (d_.norm_group != 0 && d_.norm_group != d_.value_dim) {
        return integer("norm_group", d_.norm_group, "must be 0 or value_dim for LLA_LAYER_GATED_DELTANET");
      }
      d_.norm_group = d_.value_dim;
    }
    return LLA_OK;
  }

  lla_status sizes() {
    if (uses(kMixer) && d_.mixer != LLA_SCALAR_GATE && d_.mixer != LLA_DELTA_RULE) {
      return integer("mixer", d_.mixer, "must be LLA_SCALAR_GATE or LLA_DELTA_RULE");
    }
    if (d_.kind == LLA_LAYER_GATED_NORM && d_.heads == 0 && d_.value_dim == 0) {
      if (d_.hidden < 1) return integer("hidden", d_.hidden, "must be at least 1");
      d_.heads = 1;
      d_.value_dim = d_.hidden;
    }
    if (uses(kHeads) && d_.heads < 1) return integer("heads", d_.heads, "must be at least 1");
    if (uses(kGroups)) {
      if (d_.groups == 0) d_.groups = d_.heads;
      if (d_.groups < 1 || d_.heads % d_.groups != 0) return integer("groups", d_.groups, "must divide heads");
    }
    if (uses(kKeyDim) && d_.key_dim < 1) return integer("key_dim", d_.key_dim, "must be at least 1");
    if (uses(kValueDim) && d_.value_dim < 1) return integer("value_dim", d_.value_dim, "must be at least 1");
    if (d_.kind == LLA_LAYER_GATED_NORM) {
      const Size width = Size(d_.heads) * Size(d_.value_dim);
      if (!width.valid()) return fail(error_, LLA_SIZE_OVERFLOW, "description: heads * value_dim overflows");
      if (d_.hidden == 0) d_.hidden = width.value();
      if (d_.hidden != width.value()) return integer("hidden", d_.hidden, "must be heads * value_dim");
    }
    if (uses(kHidden) && d_.hidden < 1) return integer("hidden", d_.hidden, "must be at least 1");
    if (uses(kOutputs) && d_.outputs < 1) return integer("outputs", d_.outputs, "must be at least 1");
    if (uses(kGrain)) {
      if (d_.grain == 0) d_.grain = 64;
      if (d_.grain < 1 || d_.grain > kMaxGrain || (d_.grain & (d_.grain - 1)) != 0) {
        return integer("grain", d_.grain, "must be a power of two up to 4096");
      }
    }
    if (uses(kHeadMap) && d_.head_map != LLA_HEAD_MAP_BLOCKED && d_.head_map != LLA_HEAD_MAP_CYCLIC) {
      return integer("head_map", d_.head_map, "must be LLA_HEAD_MAP_BLOCKED or LLA_HEAD_MAP_CYCLIC");
    }
    return LLA_OK;
  }

  lla_status lambda() {
    if (!uses(kLambdaForm)) return LLA_OK;
    if (d_.lambda_form < LLA_LAMBDA_NONE || d_.lambda_form > LLA_LAMBDA_PRODUCT) {
      return integer("lambda_form", d_.lambda_form, "is none");
    }
    if (d_.kind == LLA_LAYER_MIXER && d_.lambda_form > LLA_LAMBDA_READY) {
      return integer("lambda_form", d_.lambda_form, "of a mixer must be LLA_LAMBDA_NONE or LLA_LAMBDA_READY");
    }
    if (d_.level_overflow != LLA_LEVELS_ERROR && d_.level_overflow != LLA_LEVELS_ABSORB) {
      return integer("level_overflow", d_.level_overflow, "must be LLA_LEVELS_ERROR or LLA_LEVELS_ABSORB");
    }
    if (d_.lambda_form == LLA_LAMBDA_NONE) {
      if (d_.levels != 0) return integer("levels", d_.levels, "must be 0 without a lambda_form");
      if (d_.level_overflow != 0) return integer("level_overflow", d_.level_overflow, "must be 0 without a lambda_form");
    } else if (d_.levels < 1 || d_.levels > kMaxLevels) {
      return integer("levels", d_.levels, "must be 1 ... 62 with a lambda_form");
    }
    return LLA_OK;
  }

  lla_status gates() {
    if (!uses(kGateForm)) return LLA_OK;
    if (d_.gate_form != LLA_GATE_LOG && d_.gate_form != LLA_GATE_SOFTPLUS)
      return integer("gate_form", d_.gate_form, "is none");
    if (d_.write_form < LLA_WRITE_NONE || d_.write_form > LLA_WRITE_STEP) {
      return integer("write_form", d_.write_form, "is none");
    }
    if (d_.kind == LLA_LAYER_MIXER) {
      if (d_.gate_form != LLA_GATE_LOG) return integer("gate_form", d_.gate_form, "of a mixer must be LLA_GATE_LOG");
      if (d_.write_form > LLA_WRITE_READY) {
        return integer("write_form", d_.write_form, "of a mixer must be LLA_WRITE_NONE or LLA_WRITE_READY");
      }
      return LLA_OK;
    }
    if (d_.write_form == LLA_WRITE_STEP && d_.gate_form != LLA_GATE_SOFTPLUS) {
      return integer("write_form", d_.write_form, "LLA_WRITE_STEP needs LLA_GATE_SOFTPLUS");
    }
    if (d_.gate_form != LLA_GATE_SOFTPLUS) {
      if (d_.dt_min != 0) return number("dt_min", d_.dt_min, "must be 0 without LLA_GATE_SOFTPLUS");
      if (d_.dt_max != 0) return number("dt_max", d_.dt_max, "must be 0 without LLA_GATE_SOFTPLUS");
    }
    if (!(d_.dt_min >= 0) || std::isinf(d_.dt_min)) return number("dt_min", d_.dt_min, "must be finite and not negative");
    if (d_.dt_max == 0) d_.dt_max = INFINITY;
    if (!(d_.dt_max >= d_.dt_min)) return number("dt_max", d_.dt_max, "must not be less than dt_min");
    return LLA_OK;
  }

  lla_status norms() {
    if (uses(kQkNorm) && d_.qk_norm != 0 && d_.qk_norm != 1) return integer("qk_norm", d_.qk_norm, "must be 0 or 1");
    if (uses(kQkNormEpsilon)) {
      if (uses(kQkNorm) && d_.qk_norm == 0 && d_.qk_norm_epsilon != 0) {
        return number("qk_norm_epsilon", d_.qk_norm_epsilon, "must be 0 without qk_norm");
      }
      if (d_.qk_norm_epsilon == 0) d_.qk_norm_epsilon = 1e-6;
      if (!(d_.qk_norm_epsilon > 0) || std::isinf(d_.qk_norm_epsilon)) {
        return number("qk_norm_epsilon", d_.qk_norm_epsilon, "must be positive");
      }
    }
    if (!uses(kNormForm)) return LLA_OK;
    if (d_.norm_form < LLA_NORM_NONE || d_.norm_form > LLA_NORM_NORM_FIRST)
      return integer("norm_form", d_.norm_form, "is none");
    if (d_.norm_form == LLA_NORM_NONE) {
      if (d_.norm_group != 0) return integer("norm_group", d_.norm_group, "must be 0 without a norm_form");
      if (d_.norm_epsilon != 0) return number("norm_epsilon", d_.norm_epsilon, "must be 0 without a norm_form");
    }
    const Size width = Size(d_.heads) * Size(d_.value_dim);
    if (!width.valid()) return fail(error_, LLA_SIZE_OVERFLOW, "description: heads * value_dim overflows");
    if (d_.norm_group == 0) d_.norm_group = width.value();
    if (d_.norm_group < 1 || width.value() % d_.norm_group != 0) {
      return integer("norm_group", d_.norm_group, "must divide heads * value_dim");
    }
    if (d_.norm_epsilon == 0) d_.norm_epsilon = 1e-5;
    if (!(d_.norm_epsilon > 0) || std::isinf(d_.norm_epsilon)) {
      return number("norm_epsilon", d_.norm_epsilon, "must be positive");
    }
    return LLA_OK;
  }

  lla_status convolution() {
    if (!uses(kConvWidth)) return LLA_OK;
    if (d_.conv_activation != LLA_ACTIVATION_SILU && d_.conv_activation != LLA_ACTIVATION_NONE) {
      return integer("conv_activation", d_.conv_activation, "must be LLA_ACTIVATION_SILU or LLA_ACTIVATION_NONE");
    }
    if (d_.conv_width == 0 && d_.kind == LLA_LAYER_CELL) {
      if (d_.conv_activation != 0) return integer("conv_activation", d_.conv_activation, "must be 0 without conv_width");
      return LLA_OK;
    }
    if (d_.conv_width == 0) d_.conv_width = 4;
    if (d_.conv_width < 1 || d_.conv_width > kMaxConvWidth)
      return integer("conv_width", d_.conv_width, "must be 1 ... 4096");
    return LLA_OK;
  }

  lla_status scales() {
    if (uses(kScale)) {
      if (!std::isfinite(d_.scale)) return number("scale", d_.scale, "must be finite");
      if (d_.scale == 0) d_.scale = 1;
    }
    if (uses(kLambdaScale)) {
      if (!std::isfinite(d_.lambda_scale)) return number("lambda_scale", d_.lambda_scale, "must be finite");
      if (d_.lambda_form == LLA_LAMBDA_NONE && d_.lambda_scale != 0 && d_.lambda_scale != 1) {
        return number("lambda_scale", d_.lambda_scale, "must be 0 without a lambda_form");
      }
      if (d_.lambda_scale == 0) d_.lambda_scale = 1;
    }
    return LLA_OK;
  }

  lla_status inner_type() {
    if (!uses(kInnerDtype)) return LLA_OK;
    const int32_t compute = context_.backend->compute_dtype;
    if (d_.inner_dtype == LLA_DTYPE_DEFAULT) d_.inner_dtype = compute;
    if (!is_float_dtype(d_.inner_dtype)) return integer("inner_dtype", d_.inner_dtype, "must be a floating-point type");
    const bool narrow = d_.inner_dtype == LLA_BF16 || d_.inner_dtype == LLA_F16;
    if (d_.inner_dtype != LLA_F32 && d_.inner_dtype != compute && !(narrow && compute == LLA_F32)) {
      return fail(error_, LLA_NOT_IMPLEMENTED, "description: inner_dtype %d is not implemented by backend %s",
                  d_.inner_dtype, context_.backend->name);
    }
    return LLA_OK;
  }

  // Every size in bytes that follows from the description alone.
  lla_status overflow() {
    const Size heads = d_.heads, groups = d_.groups, key = d_.key_dim, value = d_.value_dim;
    const Size hidden = d_.hidden, outputs = d_.outputs, levels = d_.levels, width = d_.conv_width, bytes = 8;
    const Size channels = d_.kind == LLA_LAYER_CONVOLUTION ? hidden : Size(2) * groups * key + heads * value;
    Size total = heads * (key * value * bytes + Size(72)) + heads * levels * bytes;
    total += channels * (Size(2) * width + Size(d_.grain)) * bytes;
    total += (heads * value + channels + heads + heads * levels) * (hidden + Size(1)) * bytes;
    total += outputs * hidden * bytes;
    if (!total.valid()) return fail(error_, LLA_SIZE_OVERFLOW, "description: its sizes do not fit into memory");
    return LLA_OK;
  }

  const Context& context_;
  lla_layer_desc& d_;
  lla_error* error_;
  uint32_t fields_ = 0;
};

bool has_mixer(int32_t kind) {
  return kind == LLA_LAYER_MIXER || kind == LLA_LAYER_CELL || kind == LLA_LAYER_MAMBA2 || kind == LLA_LAYER_GATED_DELTANET;
}

}  // namespace

lla_status describe_layer(Context* context, const lla_layer_desc& description, Layer* layer, lla_error* error) noexcept {
  lla_layer_desc d = description;
  d.struct_size = sizeof(d);
  LLA_TRY(Checker(*context, &d, error).check());
  layer->context = context;
  layer->description = d;
  fill_rules(d, &layer->rules);
  layer->stateful = has_mixer(d.kind) || d.kind == LLA_LAYER_CONVOLUTION;
  layer->shape = MixerShape();
  layer->history = LayerHistory();
  if (has_mixer(d.kind)) {
    MixerShape& shape = layer->shape;
    shape.mixer = d.mixer;
    shape.head_map = d.head_map;
    shape.heads = d.heads;
    shape.groups = d.groups;
    shape.key_dim = d.key_dim;
    shape.value_dim = d.value_dim;
    shape.grain = d.grain;
    shape.levels = d.levels;
    shape.absorb = d.level_overflow == LLA_LEVELS_ABSORB;
    shape.scale = d.scale;
  }
  if (layer->stateful) {
    LayerHistory& history = layer->history;
    history.has_mixer = has_mixer(d.kind);
    history.shape = layer->shape;
    history.has_write = history.has_mixer && d.write_form != LLA_WRITE_NONE;
    history.conv_width = d.conv_width;
    if (d.kind == LLA_LAYER_CONVOLUTION)
      history.conv_channels = d.hidden;
    else if (d.conv_width > 0)
      history.conv_channels = 2 * d.groups * d.key_dim + d.heads * d.value_dim;
    history.grain = d.grain;
    // A tail narrower than what lies between the steps of a cell would lose something.
    const bool any = d.kind == LLA_LAYER_MIXER || d.kind == LLA_LAYER_CONVOLUTION;
    history.inner_dtype = any ? LLA_DTYPE_DEFAULT : d.inner_dtype;
  }
  return check_programs(*layer, error);
}

}  // namespace lla
