// SPDX-License-Identifier: Apache-2.0
// Layer descriptions: every field of every kind, defaults, implied forms, derived shapes, refusals that name the field.
#include "cells_testing.h"

namespace {

using namespace cells_testing;

lla_layer_desc valid(lla_layer_kind kind) {
  lla_layer_desc d = description_of(kind);
  const bool op = kind <= LLA_LAYER_GATED_DELTANET;
  if (kind <= LLA_LAYER_CELL) d.mixer = LLA_SCALAR_GATE;
  if (op || kind == LLA_LAYER_GATES || kind == LLA_LAYER_L2_NORM || kind == LLA_LAYER_GATED_NORM) d.heads = 4;
  if (op || kind == LLA_LAYER_L2_NORM) d.key_dim = 9;
  if (op || kind == LLA_LAYER_GATED_NORM) d.value_dim = 6;
  if (kind == LLA_LAYER_MAMBA2 || kind == LLA_LAYER_GATED_DELTANET || kind == LLA_LAYER_CONVOLUTION ||
      kind == LLA_LAYER_PROJECTION) {
    d.hidden = 10;
  }
  if (kind == LLA_LAYER_PROJECTION) d.outputs = 3;
  return d;
}

class Describe : public testing::Test {
 protected:
  ContextPointer reference_ = make_context(LLA_BACKEND_REFERENCE);
  lla_status describe(const lla_layer_desc& d, Layer* layer = nullptr) {
    Layer own;
    error_ = Error();
    return describe_layer(reference_.get(), d, layer ? layer : &own, &error_);
  }
  void accepted(const lla_layer_desc& d) { EXPECT_EQ(describe(d), LLA_OK) << error_.text; }
  void refused(const lla_layer_desc& d, const char* text, lla_status status = LLA_INVALID_ARGUMENT) {
    EXPECT_EQ(describe(d), status) << text;
    EXPECT_NE(std::string(error_.text).find(text), std::string::npos) << error_.text << " should name " << text;
  }
  Error error_;
};

TEST_F(Describe, EveryKindHasADescription) {
  for (lla_layer_kind kind = LLA_LAYER_MIXER; kind <= LLA_LAYER_PROJECTION; ++kind) accepted(valid(kind));
  for (lla_layer_kind kind : {0, -1, 10, 1000}) {
    lla_layer_desc d = valid(LLA_LAYER_MIXER);
    d.kind = kind;
    refused(d, "kind");
  }
}

// The fields that a kind does not use, each set alone.
TEST_F(Describe, UnusedFieldsMustBeZero) {
  struct Field {
    const char* name;
    void (*set)(lla_layer_desc*);
    std::vector<lla_layer_kind> users;
  };
#define FIELD(name, value, ...)                                         \
  {                                                                     \
#name, [](lla_layer_desc * d) { d->name = value; }, { __VA_ARGS__ } \
  }
  const Field fields[] = {
      FIELD(mixer, 1, 1, 2, 3, 4),
      FIELD(heads, 4, 1, 2, 3, 4, 6, 7, 8),
      FIELD(groups, 2, 1, 2, 3, 4),
      FIELD(key_dim, 9, 1, 2, 3, 4, 7),
      FIELD(value_dim, 6, 1, 2, 3, 4, 8),
      FIELD(hidden, 24, 3, 4, 5, 8, 9),
      FIELD(outputs, 3, 9),
      FIELD(grain, 32, 1, 2, 3, 4, 5),
      FIELD(levels, 7, 1, 2, 3, 4, 6),
      FIELD(lambda_form, 1, 1, 2, 3, 4, 6),
      FIELD(level_overflow, 1, 1, 2, 3, 4),
      FIELD(gate_form, 1, 1, 2, 3, 4, 6),
      FIELD(write_form, 1, 1, 2, 3, 4, 6),
      FIELD(head_map, 1, 1, 2, 3, 4),
      FIELD(qk_norm, 1, 2, 3, 4),
      FIELD(scale, 0.5, 1, 2, 3, 4, 7),
      FIELD(lambda_scale, 0.5, 2, 3, 4, 6),
      FIELD(qk_norm_epsilon, 1e-6, 2, 4, 7),
      FIELD(dt_min, 0.5, 2, 3, 4, 6),
      FIELD(dt_max, 0.5, 2, 3, 4, 6),
      FIELD(conv_width, 3, 2, 3, 4, 5),
      FIELD(conv_activation, 1, 2, 3, 4, 5),
      FIELD(norm_form, 1, 2, 3, 4, 8),
      FIELD(norm_group, 6, 2, 3, 4, 8),
      FIELD(norm_epsilon, 1e-3, 2, 3, 4, 8),
      FIELD(inner_dtype, LLA_F32, 2, 3, 4),
  };
#undef FIELD
  for (const Field& f : fields) {
    for (lla_layer_kind kind = LLA_LAYER_MIXER; kind <= LLA_LAYER_PROJECTION; ++kind) {
      if (std::find(f.users.begin(), f.users.end(), kind) != f.users.end()) continue;
      lla_layer_desc d = valid(kind);
      f.set(&d);
      refused(d, f.name);
      EXPECT_NE(std::string(error_.text).find("must be 0 for LLA_LAYER_"), std::string::npos) << error_.text;
    }
  }
  lla_layer_desc d = valid(LLA_LAYER_MIXER);
  d.reserved = 1;
  refused(d, "reserved");
  d = valid(LLA_LAYER_GATES);
  d.scale = NAN;
  refused(d, "scale");
}

TEST_F(Describe, SizesAreChecked) {
  struct Field {
    const char* name;
    int64_t lla_layer_desc::*field;
    std::vector<lla_layer_kind> users;
  };
  const Field fields[] = {
      {"heads", &lla_layer_desc::heads, {1, 2, 3, 4, 6, 7}},
      {"key_dim", &lla_layer_desc::key_dim, {1, 2, 3, 4, 7}},
      {"value_dim", &lla_layer_desc::value_dim, {1, 2, 3, 4}},
      {"hidden", &lla_layer_desc::hidden, {3, 4, 5, 9}},
      {"outputs", &lla_layer_desc::outputs, {9}},
  };
  for (const Field& f : fields) {
    for (lla_layer_kind kind : f.users) {
      for (int64_t value : {int64_t{0}, int64_t{-1}, INT64_MIN}) {
        lla_layer_desc d = valid(kind);
        d.*f.field = value;
        refused(d, f.name);
      }
    }
  }
  for (int64_t groups : {3, 8, -1, -4}) {
    lla_layer_desc d = valid(LLA_LAYER_MIXER);
    d.groups = groups;
    refused(d, "groups");
  }
  for (int64_t grain : {-64, 3, 48, 8192}) {
    lla_layer_desc d = valid(LLA_LAYER_MIXER);
    d.grain = grain;
    refused(d, "grain");
  }
  for (int64_t grain : {1, 2, 16, 4096}) {
    lla_layer_desc d = valid(LLA_LAYER_MIXER);
    d.grain = grain;
    accepted(d);
  }
  for (int64_t width : {-1, 4097}) {
    lla_layer_desc d = valid(LLA_LAYER_CONVOLUTION);
    d.conv_width = width;
    refused(d, "conv_width");
  }
}

TEST_F(Describe, SizesThatOverflow) {
  const int64_t big = int64_t{1} << 40;
  for (int64_t lla_layer_desc::*field : {&lla_layer_desc::heads, &lla_layer_desc::key_dim, &lla_layer_desc::value_dim}) {
    lla_layer_desc d = valid(LLA_LAYER_CELL);
    d.*field = INT64_MAX / 2;
    if (field == &lla_layer_desc::heads) d.groups = 1;
    EXPECT_EQ(describe(d), LLA_SIZE_OVERFLOW);
  }
  lla_layer_desc d = valid(LLA_LAYER_PROJECTION);
  d.hidden = d.outputs = big;
  EXPECT_EQ(describe(d), LLA_SIZE_OVERFLOW);
  d = valid(LLA_LAYER_MAMBA2);
  d.hidden = d.heads = big;
  d.groups = 1;
  EXPECT_EQ(describe(d), LLA_SIZE_OVERFLOW);
  d = valid(LLA_LAYER_GATED_NORM);
  d.heads = d.value_dim = big;
  EXPECT_EQ(describe(d), LLA_SIZE_OVERFLOW);
}

TEST_F(Describe, Levels) {
  for (lla_layer_kind kind :
       {LLA_LAYER_MIXER, LLA_LAYER_CELL, LLA_LAYER_MAMBA2, LLA_LAYER_GATED_DELTANET, LLA_LAYER_GATES}) {
    lla_layer_desc d = valid(kind);
    d.lambda_form = LLA_LAMBDA_READY;
    for (int64_t levels : {int64_t{0}, int64_t{-1}, int64_t{63}, INT64_MAX}) {
      d.levels = levels;
      refused(d, "levels");
    }
    for (int64_t levels : {1, 15, 62}) {
      d.levels = levels;
      accepted(d);
    }
    d.lambda_form = LLA_LAMBDA_NONE;
    refused(d, "levels");
    d.levels = 4;
    for (lla_lambda_form form : {-1, 5}) {
      d.lambda_form = form;
      refused(d, "lambda_form");
    }
    for (lla_lambda_form form = LLA_LAMBDA_SOFTPLUS; form <= LLA_LAMBDA_PRODUCT; ++form) {
      d.lambda_form = form;
      if (kind == LLA_LAYER_MIXER)
        refused(d, "lambda_form");
      else
        accepted(d);
    }
    if (kind == LLA_LAYER_GATES) continue;
    d.lambda_form = LLA_LAMBDA_READY;
    d.level_overflow = LLA_LEVELS_ABSORB;
    accepted(d);
    d.level_overflow = 2;
    refused(d, "level_overflow");
    d.level_overflow = LLA_LEVELS_ABSORB;
    d.lambda_form = LLA_LAMBDA_NONE;
    d.levels = 0;
    refused(d, "level_overflow");
  }
}

TEST_F(Describe, Forms) {
  lla_layer_desc d = valid(LLA_LAYER_MIXER);
  for (lla_mixer mixer : {0, 3, -1}) {
    d.mixer = mixer;
    refused(d, "mixer");
  }
  d = valid(LLA_LAYER_MIXER);
  d.head_map = 2;
  refused(d, "head_map");
  d = valid(LLA_LAYER_MIXER);
  d.gate_form = LLA_GATE_SOFTPLUS;
  refused(d, "gate_form");
  for (lla_write_form form = LLA_WRITE_SIGMOID; form <= LLA_WRITE_STEP; ++form) {
    d = valid(LLA_LAYER_MIXER);
    d.write_form = form;
    refused(d, "write_form");
  }
  d = valid(LLA_LAYER_CELL);
  d.gate_form = 2;
  refused(d, "gate_form");
  d = valid(LLA_LAYER_CELL);
  d.write_form = 5;
  refused(d, "write_form");
  d.write_form = LLA_WRITE_STEP;
  refused(d, "write_form");
  d.gate_form = LLA_GATE_SOFTPLUS;
  accepted(d);
  d.dt_min = -0.5;
  refused(d, "dt_min");
  d.dt_min = NAN;
  refused(d, "dt_min");
  d.dt_min = 0.5;
  d.dt_max = 0.25;
  refused(d, "dt_max");
  d.dt_max = NAN;
  refused(d, "dt_max");
  d.dt_max = INFINITY;
  accepted(d);
  d = valid(LLA_LAYER_CELL);
  d.dt_min = 0.5;
  refused(d, "dt_min");
  d = valid(LLA_LAYER_CELL);
  d.dt_max = 0.5;
  refused(d, "dt_max");
  d = valid(LLA_LAYER_CELL);
  d.qk_norm = 2;
  refused(d, "qk_norm");
  d = valid(LLA_LAYER_CELL);
  d.qk_norm_epsilon = 1e-6;
  refused(d, "qk_norm_epsilon");
  d.qk_norm = 1;
  accepted(d);
  d.qk_norm_epsilon = -1;
  refused(d, "qk_norm_epsilon");
  d = valid(LLA_LAYER_CELL);
  d.norm_form = 3;
  refused(d, "norm_form");
  d.norm_form = LLA_NORM_NONE;
  d.norm_group = 6;
  refused(d, "norm_group");
  d.norm_form = LLA_NORM_GATE_FIRST;
  d.norm_group = 5;
  refused(d, "norm_group");
  d.norm_group = 12;
  accepted(d);
  for (double epsilon : {-1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    d.norm_epsilon = epsilon;
    refused(d, "norm_epsilon");
  }
  d = valid(LLA_LAYER_CELL);
  d.norm_epsilon = 1e-3;
  refused(d, "norm_epsilon");
  d = valid(LLA_LAYER_CELL);
  d.conv_activation = LLA_ACTIVATION_NONE;
  refused(d, "conv_activation");
  d.conv_width = 1;
  accepted(d);
  d.conv_activation = 2;
  refused(d, "conv_activation");
  d = valid(LLA_LAYER_CELL);
  d.scale = INFINITY;
  refused(d, "scale");
  d = valid(LLA_LAYER_CELL);
  d.lambda_scale = 2;
  refused(d, "lambda_scale");
  d = valid(LLA_LAYER_GATED_NORM);
  d.hidden = 23;
  refused(d, "hidden");
  d.hidden = 24;
  accepted(d);
  d = description_of(LLA_LAYER_GATED_NORM);
  refused(d, "hidden");
  d.hidden = 7;
  accepted(d);
}

TEST_F(Describe, InnerTypes) {
  const ContextPointer cpu = make_context(LLA_BACKEND_CPU);
  lla_layer_desc d = valid(LLA_LAYER_CELL);
  Layer layer;
  for (lla_dtype dtype : {LLA_DTYPE_DEFAULT, LLA_F32, LLA_BF16, LLA_F16}) {
    d.inner_dtype = dtype;
    EXPECT_EQ(describe_layer(cpu.get(), d, &layer, &error_), LLA_OK) << error_.text;
    EXPECT_EQ(layer.description.inner_dtype, dtype ? dtype : LLA_F32);
  }
  d.inner_dtype = LLA_F64;
  EXPECT_EQ(describe_layer(cpu.get(), d, &layer, &error_), LLA_NOT_IMPLEMENTED);
  // The reference rounds nothing to 16 bits.
  for (lla_dtype dtype : {LLA_DTYPE_DEFAULT, LLA_F32, LLA_F64}) {
    d.inner_dtype = dtype;
    accepted(d);
  }
  for (lla_dtype dtype : {LLA_BF16, LLA_F16}) {
    d.inner_dtype = dtype;
    refused(d, "inner_dtype", LLA_NOT_IMPLEMENTED);
  }
  for (lla_dtype dtype : {-1, LLA_I32, 99}) {
    d.inner_dtype = dtype;
    refused(d, "inner_dtype");
  }
}

TEST_F(Describe, DefaultsAndShapes) {
  Layer layer;
  lla_layer_desc d = valid(LLA_LAYER_MIXER);
  d.mixer = LLA_DELTA_RULE;
  d.write_form = LLA_WRITE_READY;
  d.lambda_form = LLA_LAMBDA_READY;
  d.levels = 9;
  d.level_overflow = LLA_LEVELS_ABSORB;
  d.head_map = LLA_HEAD_MAP_CYCLIC;
  d.groups = 2;
  ASSERT_EQ(describe(d, &layer), LLA_OK) << error_.text;
  EXPECT_EQ(layer.shape.mixer, LLA_DELTA_RULE);
  EXPECT_EQ(layer.shape.head_map, LLA_HEAD_MAP_CYCLIC);
  EXPECT_EQ(layer.shape.heads, 4);
  EXPECT_EQ(layer.shape.groups, 2);
  EXPECT_EQ(layer.shape.key_dim, 9);
  EXPECT_EQ(layer.shape.value_dim, 6);
  EXPECT_EQ(layer.shape.grain, 64);
  EXPECT_EQ(layer.shape.levels, 9);
  EXPECT_TRUE(layer.shape.absorb);
  EXPECT_EQ(layer.shape.scale, 1);
  EXPECT_TRUE(layer.stateful);
  EXPECT_TRUE(layer.history.has_mixer);
  EXPECT_TRUE(layer.history.has_write);
  EXPECT_EQ(layer.history.conv_channels, 0);
  EXPECT_EQ(layer.history.grain, 64);
  EXPECT_EQ(layer.history.inner_dtype, LLA_DTYPE_DEFAULT);

  ASSERT_EQ(describe(valid(LLA_LAYER_CELL), &layer), LLA_OK) << error_.text;
  EXPECT_EQ(layer.description.groups, 4);
  EXPECT_EQ(layer.description.norm_group, 24);
  EXPECT_EQ(layer.description.norm_epsilon, 1e-5);
  EXPECT_EQ(layer.description.qk_norm_epsilon, 1e-6);
  EXPECT_EQ(layer.description.lambda_scale, 1);
  EXPECT_EQ(layer.description.conv_width, 0);
  EXPECT_EQ(layer.description.dt_max, INFINITY);
  EXPECT_FALSE(layer.history.has_write);
  EXPECT_EQ(layer.history.inner_dtype, LLA_F64);

  ASSERT_EQ(describe(valid(LLA_LAYER_CONVOLUTION), &layer), LLA_OK) << error_.text;
  EXPECT_TRUE(layer.stateful);
  EXPECT_FALSE(layer.history.has_mixer);
  EXPECT_EQ(layer.history.conv_channels, 10);
  EXPECT_EQ(layer.history.conv_width, 4);

  for (lla_layer_kind kind : {LLA_LAYER_GATES, LLA_LAYER_L2_NORM, LLA_LAYER_GATED_NORM, LLA_LAYER_PROJECTION}) {
    ASSERT_EQ(describe(valid(kind), &layer), LLA_OK) << error_.text;
    EXPECT_FALSE(layer.stateful);
  }
}

TEST_F(Describe, BlocksSetTheFormsOfTheirCell) {
  Layer layer;
  lla_layer_desc d = valid(LLA_LAYER_MAMBA2);
  d.groups = 2;
  ASSERT_EQ(describe(d, &layer), LLA_OK) << error_.text;
  const lla_layer_desc& m = layer.description;
  EXPECT_EQ(m.mixer, LLA_SCALAR_GATE);
  EXPECT_EQ(m.gate_form, LLA_GATE_SOFTPLUS);
  EXPECT_EQ(m.write_form, LLA_WRITE_STEP);
  EXPECT_EQ(m.norm_form, LLA_NORM_GATE_FIRST);
  EXPECT_EQ(m.norm_group, 24);
  EXPECT_EQ(m.norm_epsilon, 1e-5);
  EXPECT_EQ(m.conv_width, 4);
  EXPECT_EQ(m.conv_activation, LLA_ACTIVATION_SILU);
  EXPECT_EQ(m.qk_norm, 0);
  EXPECT_EQ(m.scale, 1);
  EXPECT_EQ(layer.history.conv_channels, 24 + 2 * 2 * 9);
  EXPECT_TRUE(layer.history.has_write);
  for (lla_norm_form form : {LLA_NORM_GATE_FIRST, LLA_NORM_NORM_FIRST}) {
    d.norm_form = form;
    ASSERT_EQ(describe(d, &layer), LLA_OK) << error_.text;
    EXPECT_EQ(layer.description.norm_form, form);
  }
  d = valid(LLA_LAYER_MAMBA2);
  d.mixer = LLA_DELTA_RULE;
  refused(d, "mixer");
  d = valid(LLA_LAYER_MAMBA2);
  d.write_form = LLA_WRITE_SIGMOID;
  refused(d, "write_form");
  d = valid(LLA_LAYER_MAMBA2);
  d.qk_norm = 1;
  refused(d, "qk_norm");
  d = valid(LLA_LAYER_MAMBA2);
  d.scale = 0.5;
  refused(d, "scale");

  d = valid(LLA_LAYER_GATED_DELTANET);
  ASSERT_EQ(describe(d, &layer), LLA_OK) << error_.text;
  const lla_layer_desc& g = layer.description;
  EXPECT_EQ(g.mixer, LLA_DELTA_RULE);
  EXPECT_EQ(g.gate_form, LLA_GATE_SOFTPLUS);
  EXPECT_EQ(g.write_form, LLA_WRITE_SIGMOID);
  EXPECT_EQ(g.qk_norm, 1);
  EXPECT_EQ(g.qk_norm_epsilon, 1e-6);
  EXPECT_EQ(g.norm_form, LLA_NORM_NORM_FIRST);
  EXPECT_EQ(g.norm_group, 6);
  EXPECT_DOUBLE_EQ(g.scale, 1.0 / 3);
  EXPECT_EQ(layer.shape.scale, g.scale);
  EXPECT_EQ(g.lambda_scale, 1);
  d.lambda_form = LLA_LAMBDA_SOFTPLUS;
  d.levels = 5;
  d.write_form = LLA_WRITE_TWO_SIGMOID;
  ASSERT_EQ(describe(d, &layer), LLA_OK) << error_.text;
  EXPECT_DOUBLE_EQ(g.lambda_scale, 3);
  EXPECT_EQ(g.write_form, LLA_WRITE_TWO_SIGMOID);
  // What is filled in describes the same layer again.
  accepted(layer.description);
  d = valid(LLA_LAYER_GATED_DELTANET);
  d.write_form = LLA_WRITE_READY;
  refused(d, "write_form");
  d = valid(LLA_LAYER_GATED_DELTANET);
  d.norm_form = LLA_NORM_GATE_FIRST;
  refused(d, "norm_form");
  d = valid(LLA_LAYER_GATED_DELTANET);
  d.norm_group = 12;
  refused(d, "norm_group");
  d = valid(LLA_LAYER_GATED_DELTANET);
  d.gate_form = 2;
  refused(d, "gate_form");
}

TEST_F(Describe, LayersAreCountedAndComeFromTheAllocator) {
  struct Counter {
    int64_t live = 0, calls = 0, refuse_from = INT64_MAX;
  } counter;
  lla_allocator allocator{};
  allocator.struct_size = sizeof(allocator);
  allocator.user = &counter;
  allocator.allocate = [](size_t bytes, size_t alignment, void* user) -> void* {
    Counter& c = *static_cast<Counter*>(user);
    if (++c.calls > c.refuse_from) return nullptr;
    ++c.live;
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  };
  allocator.release = [](void* memory, size_t, size_t, void* user) {
    --static_cast<Counter*>(user)->live;
    std::free(memory);
  };
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = LLA_BACKEND_REFERENCE;
  options.allocator = &allocator;
  Context* context = nullptr;
  ASSERT_EQ(create_context(options, &context, &error_), LLA_OK) << error_.text;
  Layer* layer = nullptr;
  ASSERT_EQ(create_layer(context, valid(LLA_LAYER_MIXER), &layer, &error_), LLA_OK) << error_.text;
  release(context);  // the layer keeps it alive
  EXPECT_GT(counter.live, 0);
  retain(layer);
  release(layer);
  EXPECT_EQ(layer->shape.heads, 4);
  counter.refuse_from = counter.calls;
  Layer* none = layer;
  EXPECT_EQ(create_layer(context, valid(LLA_LAYER_MIXER), &none, &error_), LLA_OUT_OF_MEMORY);
  EXPECT_EQ(none, nullptr);
  release(layer);
  EXPECT_EQ(counter.live, 0);
}

// A backend without a kernel for one step of a layer refuses exactly the layers that take this step.
TEST_F(Describe, EveryStepNeedsAKernel) {
  const Backend& full = reference_backend();
  for (int64_t missing = 0; missing < full.kernel_count; ++missing) {
    std::vector<Kernel> kernels;
    for (int64_t i = 0; i < full.kernel_count; ++i) {
      if (i != missing) kernels.push_back(full.kernels[i]);
    }
    Backend backend = full;
    backend.kernels = kernels.data();
    backend.kernel_count = static_cast<int64_t>(kernels.size());
    Context context;
    context.backend = &backend;
    context.parallel.max_threads = 1;
    const Op op = full.kernels[missing].op;
    const auto refuses = [&](lla_layer_kind kind) {
      Layer layer;
      const lla_status status = describe_layer(&context, valid(kind), &layer, &error_);
      EXPECT_TRUE(status == LLA_OK || status == LLA_NOT_IMPLEMENTED) << error_.text;
      return status == LLA_NOT_IMPLEMENTED;
    };
    const bool fill = op == Op::RowsFill;
    EXPECT_EQ(refuses(LLA_LAYER_MIXER), fill || op == Op::MixerForward || op == Op::MixerBackward);
    EXPECT_EQ(refuses(LLA_LAYER_CONVOLUTION), fill || op == Op::ConvolutionForward || op == Op::ConvolutionBackward);
    EXPECT_EQ(refuses(LLA_LAYER_GATES), fill || op == Op::GatesForward || op == Op::GatesBackward);
    EXPECT_EQ(refuses(LLA_LAYER_L2_NORM), fill || op == Op::L2NormForward || op == Op::L2NormBackward);
    EXPECT_EQ(refuses(LLA_LAYER_GATED_NORM), fill || op == Op::GatedNormForward || op == Op::GatedNormBackward);
    EXPECT_EQ(refuses(LLA_LAYER_PROJECTION), fill || op == Op::ProjectionForward || op == Op::ProjectionBackward);
    EXPECT_EQ(refuses(LLA_LAYER_MAMBA2), op != Op::L2NormForward && op != Op::L2NormBackward);
    EXPECT_TRUE(refuses(LLA_LAYER_GATED_DELTANET));
  }
}

}  // namespace
