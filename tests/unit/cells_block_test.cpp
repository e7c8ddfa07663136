// SPDX-License-Identifier: Apache-2.0
// Whole blocks against golden vectors: outputs and gradients on both backends, in pieces through a state, and what must not
// change a single bit (a saved buffer, the number of threads, which gradients are wanted).
#include "cells_testing.h"

namespace {

using namespace cells_testing;

struct NamedRole {
  const char* name;
  lla_role role;
};

constexpr NamedRole kMamba2Roles[] = {
    {"in_proj.weight", LLA_WEIGHT_IN_PROJ},
    {"conv1d.weight", LLA_WEIGHT_CONV},
    {"conv1d.bias", LLA_WEIGHT_CONV_BIAS},
    {"dt_bias", LLA_WEIGHT_DT_BIAS},
    {"A_log", LLA_WEIGHT_A_LOG},
    {"D", LLA_WEIGHT_SKIP},
    {"L", LLA_WEIGHT_LAMBDA},
    {"norm.weight", LLA_WEIGHT_NORM},
    {"out_proj.weight", LLA_WEIGHT_OUT_PROJ},
};
constexpr NamedRole kGdnRoles[] = {
    {"q_proj.weight", LLA_WEIGHT_Q_PROJ},
    {"k_proj.weight", LLA_WEIGHT_K_PROJ},
    {"v_proj.weight", LLA_WEIGHT_V_PROJ},
    {"a_proj.weight", LLA_WEIGHT_GATE_PROJ},
    {"b_proj.weight", LLA_WEIGHT_WRITE_PROJ},
    {"g_proj.weight", LLA_WEIGHT_Z_PROJ},
    {"l_proj.weight", LLA_WEIGHT_LAMBDA_PROJ},
    {"q_conv1d.weight", LLA_WEIGHT_CONV_Q},
    {"k_conv1d.weight", LLA_WEIGHT_CONV_K},
    {"v_conv1d.weight", LLA_WEIGHT_CONV_V},
    {"A_log", LLA_WEIGHT_A_LOG},
    {"dt_bias", LLA_WEIGHT_DT_BIAS},
    {"L", LLA_WEIGHT_LAMBDA},
    {"o_norm.weight", LLA_WEIGHT_NORM},
    {"o_proj.weight", LLA_WEIGHT_OUT_PROJ},
};

// A golden block as a layer with its tensors.
struct Block {
  golden::File file;
  lla_layer_desc description = LLA_LAYER_DESC_INIT;
  std::vector<NamedRole> roles;  // those in the file
  int64_t sequences = 0, rows = 0, hidden = 0;

  explicit Block(const std::string& name) : file(golden::load(name)) {
    EXPECT_TRUE(file.valid) << file.error;
    const bool mamba2 = file.text("block") == "mamba2";
    lla_layer_desc& d = description;
    d.kind = mamba2 ? LLA_LAYER_MAMBA2 : LLA_LAYER_GATED_DELTANET;
    d.heads = file.integer("num_heads");
    if (mamba2) {
      d.value_dim = file.integer("head_dim");
      d.key_dim = file.integer("state_size");
      d.groups = file.integer("n_groups");
    } else {
      d.key_dim = file.integer("head_dim");
      d.value_dim = d.key_dim * file.integer("expand_v");
    }
    d.hidden = hidden = file.integer("hidden_size");
    d.norm_epsilon = file.number("norm_eps");
    if (file.has("w.L")) {
      d.lambda_form = LLA_LAMBDA_SOFTPLUS;
      d.levels = file.integer("L");
    }
    sequences = file.integer("B");
    rows = file.integer("T");
    for (const NamedRole& r : mamba2 ? std::vector<NamedRole>(std::begin(kMamba2Roles), std::end(kMamba2Roles))
                                     : std::vector<NamedRole>(std::begin(kGdnRoles), std::end(kGdnRoles))) {
      if (file.has(std::string("w.") + r.name)) roles.push_back(r);
    }
  }
  const golden::Tensor& weight(const NamedRole& r) const { return file.tensor(std::string("w.") + r.name); }
  Tensor input(lla_dtype dtype) const { return Tensor(dtype, {sequences * rows, hidden}, file["in.x"]); }
  void bind_weights(lla_dtype dtype, Bindings* b, std::vector<Tensor>* keep) const {
    for (const NamedRole& r : roles) {
      keep->push_back(Tensor(dtype, weight(r).shape, weight(r).data));
      b->add_weight(r.role, keep->back());
    }
  }
};

struct Case {
  const char* name;
  lla_backend backend;
  double forward, gradient;
};
constexpr int64_t kGrains[] = {1, 8, 64};

class Blocks : public testing::TestWithParam<Case> {
 protected:
  lla_dtype dtype() const { return GetParam().backend == LLA_BACKEND_REFERENCE ? LLA_F64 : LLA_F32; }
  ContextPointer context(int threads = 1) const { return make_context(GetParam().backend, threads); }
};

TEST_P(Blocks, OutputsAgree) {
  const std::string wanted = GetParam().name;
  for (const char* suffix : {"", "_linear", "_grad"}) {
    if (wanted == "block_mamba2" && suffix == std::string("_linear")) continue;  // there is no such file
    for (const int64_t grain : kGrains) {
      Block block(wanted + suffix);
      block.description.grain = grain;
      const ContextPointer c = context();
      const LayerPointer layer = make_layer(c, block.description);
      Bindings b;
      std::vector<Tensor> keep;
      block.bind_weights(dtype(), &b, &keep);
      const Tensor x = block.input(dtype());
      Tensor y(dtype(), {block.sequences * block.rows, block.hidden}, 3);
      b.add_io(LLA_X, x);
      b.add_io(LLA_Y, y);
      Plan plan(c, block.sequences, block.sequences * block.rows);
      plan.plan(Plan::uniform(block.sequences, block.rows));
      Error error;
      ASSERT_EQ(forward(*layer, plan, b, &error), LLA_OK) << error.text;
      EXPECT_LE(error_of(y, block.file["out.y"]), GetParam().forward) << block.file.text("block") << suffix << " " << grain;
      EXPECT_TRUE(y.pads_hold());
    }
  }
}

// All gradients, or only that of the role `only`. `spoil`: what forward saved turns into NaN before backward reads it.
std::vector<Tensor> gradients_of(const Block& block, const Layer& layer, const ContextPointer& c, lla_dtype dtype,
                                 bool saved, bool accumulate, lla_role only = 0, bool spoil = false) {
  Bindings b, f;
  std::vector<Tensor> keep, result;
  block.bind_weights(dtype, &b, &keep);
  f.weights = b.weights;
  const Tensor x = block.input(dtype), y(dtype, {block.sequences * block.rows, block.hidden});
  b.add_io(LLA_X, x);
  f.add_io(LLA_X, x);
  f.add_io(LLA_Y, y);
  const Tensor dy(dtype, {block.sequences * block.rows, block.hidden}, block.file["in.do"]);
  b.add_output(LLA_Y, dy);
  result.push_back(Tensor(dtype, {block.sequences * block.rows, block.hidden}));
  for (const NamedRole& r : block.roles) result.push_back(Tensor(dtype, block.weight(r).shape));
  for (size_t i = 0; i < result.size(); ++i) {
    const lla_role role = i == 0 ? LLA_X : block.roles[i - 1].role;
    if (accumulate) result[i].fill(0.25);
    if (only == 0 || only == role) b.add_gradient(role, result[i], accumulate);
  }
  Plan plan(c, block.sequences, block.sequences * block.rows);
  plan.plan(Plan::uniform(block.sequences, block.rows));
  size_t bytes = 0;
  Error error;
  EXPECT_EQ(measure_saved(layer, plan.limits(), &bytes, &error), LLA_OK) << error.text;
  Memory memory(bytes);
  Setting setting;
  if (saved && bytes > 0) {
    setting.saved = &memory;
    EXPECT_EQ(forward(layer, plan, f, &error, setting), LLA_OK) << error.text;
    EXPECT_TRUE(memory.guards_hold());
    if (spoil) std::memset(memory.data(), 0xff, bytes);
  }
  EXPECT_EQ(backward(layer, plan, b, &error, setting), LLA_OK) << error.text;
  return result;
}

TEST_P(Blocks, GradientsAgree) {
  for (const int64_t grain : kGrains) {
    Block block(std::string(GetParam().name) + "_grad");
    block.description.grain = grain;
    const ContextPointer c = context();
    const LayerPointer layer = make_layer(c, block.description);
    const std::vector<Tensor> g = gradients_of(block, *layer, c, dtype(), false, false);
    EXPECT_LE(error_of(g[0], block.file["grad.x"]), GetParam().gradient);
    for (size_t i = 0; i < block.roles.size(); ++i) {
      EXPECT_LE(error_of(g[i + 1], block.file[std::string("grad.w.") + block.roles[i].name]), GetParam().gradient)
          << block.roles[i].name << " grain " << grain;
    }
  }
}

TEST_P(Blocks, GradientsAccumulate) {
  const Block block(std::string(GetParam().name) + "_grad");
  const ContextPointer c = context();
  const LayerPointer layer = make_layer(c, block.description);
  const std::vector<Tensor> g = gradients_of(block, *layer, c, dtype(), false, true);
  for (size_t i = 0; i < g.size(); ++i) {
    std::vector<double> expected =
        i == 0 ? block.file["grad.x"] : block.file[std::string("grad.w.") + block.roles[i - 1].name];
    for (double& e : expected) e += 0.25;
    EXPECT_LE(error_of(g[i], expected), GetParam().gradient) << i;
  }
}

TEST_P(Blocks, SavedOrRecomputedAndAnyThreadsGiveTheSameBits) {
  const Block block(std::string(GetParam().name) + "_grad");
  const ContextPointer c = context(), many = context(3);
  const LayerPointer layer = make_layer(c, block.description), threaded = make_layer(many, block.description);
  const std::vector<Tensor> a = gradients_of(block, *layer, c, dtype(), false, false);
  const std::vector<Tensor> s = gradients_of(block, *layer, c, dtype(), true, false);
  const std::vector<Tensor> t = gradients_of(block, *threaded, many, dtype(), false, false);
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(a[i].same_bytes(s[i])) << i;
    EXPECT_TRUE(a[i].same_bytes(t[i])) << i;
  }
}

// The output projection reads what follows the mixer: neither its output nor the gate's projection is made again.
TEST_P(Blocks, SavedRowsAreNotComputedAgain) {
  const Block block(std::string(GetParam().name) + "_grad");
  const ContextPointer c = context();
  const LayerPointer layer = make_layer(c, block.description);
  const std::vector<Tensor> g = gradients_of(block, *layer, c, dtype(), true, false, LLA_WEIGHT_OUT_PROJ, true);
  for (size_t i = 0; i < block.roles.size(); ++i) {
    if (block.roles[i].role == LLA_WEIGHT_OUT_PROJ) {
      EXPECT_TRUE(std::isnan(g[i + 1].get(0)));
    }
  }
}

TEST_P(Blocks, OneGradientAloneHasTheSameBits) {
  const Block block(std::string(GetParam().name) + "_grad");
  const ContextPointer c = context();
  const LayerPointer layer = make_layer(c, block.description);
  const std::vector<Tensor> all = gradients_of(block, *layer, c, dtype(), false, false);
  for (size_t i = 0; i < all.size(); ++i) {
    const lla_role role = i == 0 ? LLA_X : block.roles[i - 1].role;
    const std::vector<Tensor> one = gradients_of(block, *layer, c, dtype(), false, false, role);
    EXPECT_TRUE(all[i].same_bytes(one[i])) << role;
    for (size_t j = 0; j < one.size(); ++j) {
      if (j != i) {
        EXPECT_TRUE(std::isnan(one[j].get(0))) << j;
      }
    }
  }
}

lla_index index_of(const std::vector<int64_t>& values) { return {values.data(), LLA_I64, LLA_HOST}; }

// Rows [begin, end) of a tensor [N, width] of one sequence.
lla_tensor some_rows(const Tensor& t, int64_t begin, int64_t end) {
  lla_tensor v = t.view();
  v.data = offset_elements(v.data, v.dtype, begin * v.strides[0]);
  v.dims[0] = end - begin;
  return v;
}

TEST_P(Blocks, PiecesThroughAStateAgree) {
  for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{36}, {1, 2, 3, 36}, {8, 16, 17, 36}, {7, 35, 36}}) {
    Block block(std::string(GetParam().name) + "_grad");
    block.description.grain = 8;
    const ContextPointer c = context();
    const LayerPointer layer = make_layer(c, block.description);
    StateRig state(c, *layer, 2, 64);
    Bindings weights;
    std::vector<Tensor> keep;
    block.bind_weights(dtype(), &weights, &keep);
    const Tensor x = block.input(dtype()), y(dtype(), {block.rows, block.hidden});
    Plan plan(c, 1, block.rows, 64);
    Error error;
    Setting setting;
    setting.state = state.get();
    for (int64_t begin = 0, i = 0; begin < block.rows; begin = cuts[static_cast<size_t>(i++)]) {
      const int64_t end = cuts[static_cast<size_t>(i)];
      plan.plan(Plan::uniform(1, end - begin), state.get());
      Bindings b = weights;
      b.io.push_back(lla_bind(LLA_X, some_rows(x, begin, end)));
      b.io.push_back(lla_bind(LLA_Y, some_rows(y, begin, end)));
      ASSERT_EQ(forward(*layer, plan, b, &error, setting), LLA_OK) << error.text;
      ASSERT_EQ(commit_batch(state.get(), plan.batch(), lla_index{}, nullptr, &error), LLA_OK) << error.text;
    }
    EXPECT_LE(error_of(y, block.file["out.y"]), GetParam().forward) << cuts.size();
  }
}

// Two pieces, the gradient of the state between them handed from the second to the first: the gradients of the whole.
TEST_P(Blocks, GradientsFlowThroughStates) {
  for (const int64_t cut : {1, 3, 8, 20, 35}) {
    Block block(std::string(GetParam().name) + "_grad");
    block.description.grain = 8;
    const ContextPointer c = context();
    const LayerPointer layer = make_layer(c, block.description);
    StateRig state(c, *layer, 2, 64), gradient(c, *layer, 1, 64, LLA_STATE_GRADIENT);
    Bindings weights;
    std::vector<Tensor> keep, g;
    block.bind_weights(dtype(), &weights, &keep);
    const Tensor x = block.input(dtype()), y(dtype(), {block.rows, block.hidden});
    const Tensor dy(dtype(), {block.rows, block.hidden}, block.file["in.do"]), dx(dtype(), {block.rows, block.hidden});
    for (const NamedRole& r : block.roles) {
      g.push_back(Tensor(dtype(), block.weight(r).shape));
      g.back().fill(0);
    }
    const auto bind = [&](int64_t begin, int64_t end, bool back) {
      Bindings b = weights;
      b.io.push_back(lla_bind(LLA_X, some_rows(x, begin, end)));
      if (!back) {
        b.io.push_back(lla_bind(LLA_Y, some_rows(y, begin, end)));
        return b;
      }
      b.outputs.push_back(lla_bind(LLA_Y, some_rows(dy, begin, end)));
      b.gradients.push_back(lla_bind(LLA_X, some_rows(dx, begin, end)));
      for (size_t i = 0; i < g.size(); ++i) b.add_gradient(block.roles[i].role, g[i], true);
      return b;
    };
    Setting setting;
    setting.state = state.get();
    Error error;
    Plan first(c, 1, block.rows, 64), second(c, 1, block.rows, 64);
    first.plan(Plan::uniform(1, cut), state.get());
    ASSERT_EQ(forward(*layer, first, bind(0, cut, false), &error, setting), LLA_OK) << error.text;
    ASSERT_EQ(commit_batch(state.get(), first.batch(), lla_index{}, nullptr, &error), LLA_OK) << error.text;

    const std::vector<int64_t> zero{0}, one{1};
    lla_rows rows = Plan::uniform(1, block.rows - cut);
    rows.slot_in = index_of(zero);
    rows.initial_gradient_slots = index_of(zero);
    second.plan(rows, state.get(), gradient.get());
    const std::string before = state.bytes();
    ASSERT_EQ(backward(*layer, second, bind(cut, block.rows, true), &error, setting), LLA_OK) << error.text;
    EXPECT_EQ(state.bytes(), before) << "backward wrote into the state";
    rows = Plan::uniform(1, cut);
    rows.slot_in = index_of(one);
    rows.final_gradient_slots = index_of(zero);
    first.plan(rows, state.get(), gradient.get());
    ASSERT_EQ(backward(*layer, first, bind(0, cut, true), &error, setting), LLA_OK) << error.text;
    EXPECT_EQ(state.bytes(), before) << "backward wrote into the state";

    EXPECT_LE(error_of(dx, block.file["grad.x"]), GetParam().gradient) << cut;
    for (size_t i = 0; i < g.size(); ++i) {
      EXPECT_LE(error_of(g[i], block.file[std::string("grad.w.") + block.roles[i].name]), GetParam().gradient)
          << block.roles[i].name << " cut " << cut;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Reference, Blocks,
                         testing::Values(Case{"block_mamba2", LLA_BACKEND_REFERENCE, 1e-10, 1e-7},
                                         Case{"block_gdn", LLA_BACKEND_REFERENCE, 1e-10, 1e-7}));
INSTANTIATE_TEST_SUITE_P(Cpu, Blocks,
                         testing::Values(Case{"block_mamba2", LLA_BACKEND_CPU, 2e-5, 2e-5},
                                         Case{"block_gdn", LLA_BACKEND_CPU, 2e-5, 2e-5}));

}  // namespace
