// SPDX-License-Identifier: Apache-2.0
// Which tensors a configuration consists of, and the description of its block for lla.
#include <algorithm>
#include <cmath>
#include <set>

#include "config.h"
#include "error.h"

namespace lm {

std::vector<ParameterInfo> block_parameters(const ModelConfig& c) {
  using K = ParameterKind;
  std::vector<ParameterInfo> p;
  const auto add = [&](const char* name, std::vector<int64_t> shape, K kind, lla_role role) {
    p.push_back({name, std::move(shape), kind, role});
  };
  const int64_t d = c.inner(), keys = c.groups * c.key_dim, h = c.heads, w = c.conv_width;
  if (c.block == BlockKind::Mamba2) {
    const int64_t channels = d + 2 * keys;
    add("in_proj.weight", {d + channels + h + h * c.levels, c.hidden}, K::Matrix, LLA_WEIGHT_IN_PROJ);
    if (c.bias) add("in_proj.bias", {d + channels + h + h * c.levels}, K::Bias, LLA_WEIGHT_IN_PROJ_BIAS);
    add("conv1d.weight", {channels, 1, w}, K::Convolution, LLA_WEIGHT_CONV);
    if (c.conv_bias) add("conv1d.bias", {channels}, K::Bias, LLA_WEIGHT_CONV_BIAS);
    add("dt_bias", {h}, K::DtBias, LLA_WEIGHT_DT_BIAS);
    add("A_log", {h}, K::ALog, LLA_WEIGHT_A_LOG);
    add("D", {c.skip_per_channel ? d : h}, K::Skip, LLA_WEIGHT_SKIP);
    if (c.levels) add("L", {h, c.levels}, K::LevelScale, LLA_WEIGHT_LAMBDA);
    add("norm.weight", {d}, K::Norm, LLA_WEIGHT_NORM);
    add("out_proj.weight", {c.hidden, d}, K::OutputProjection, LLA_WEIGHT_OUT_PROJ);
    if (c.bias) add("out_proj.bias", {c.hidden}, K::Bias, LLA_WEIGHT_OUT_PROJ_BIAS);
  } else {
    add("q_proj.weight", {keys, c.hidden}, K::Matrix, LLA_WEIGHT_Q_PROJ);
    add("k_proj.weight", {keys, c.hidden}, K::Matrix, LLA_WEIGHT_K_PROJ);
    add("v_proj.weight", {d, c.hidden}, K::Matrix, LLA_WEIGHT_V_PROJ);
    add("q_conv1d.weight", {keys, 1, w}, K::Convolution, LLA_WEIGHT_CONV_Q);
    add("k_conv1d.weight", {keys, 1, w}, K::Convolution, LLA_WEIGHT_CONV_K);
    add("v_conv1d.weight", {d, 1, w}, K::Convolution, LLA_WEIGHT_CONV_V);
    add("a_proj.weight", {h, c.hidden}, K::Matrix, LLA_WEIGHT_GATE_PROJ);
    add("b_proj.weight", {h, c.hidden}, K::Matrix, LLA_WEIGHT_WRITE_PROJ);
    if (c.output_gate) add("g_proj.weight", {d, c.hidden}, K::Matrix, LLA_WEIGHT_Z_PROJ);
    if (c.levels) {
      add("l_proj.weight", {h * c.levels, c.hidden}, K::Matrix, LLA_WEIGHT_LAMBDA_PROJ);
      add("L", {h, c.levels}, K::LevelScale, LLA_WEIGHT_LAMBDA);
    }
    add("dt_bias", {h}, K::DtBias, LLA_WEIGHT_DT_BIAS);
    add("A_log", {h}, K::ALog, LLA_WEIGHT_A_LOG);
    add("o_norm.weight", {c.value_dim}, K::Norm, LLA_WEIGHT_NORM);
    add("o_proj.weight", {c.hidden, d}, K::OutputProjection, LLA_WEIGHT_OUT_PROJ);
  }
  return p;
}

std::vector<ParameterInfo> model_parameters(const ModelConfig& c) {
  using K = ParameterKind;
  std::vector<ParameterInfo> p;
  p.push_back({c.root + c.embedding_name + ".weight", {c.vocab, c.hidden}, K::Matrix, 0});
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const std::string prefix = c.layer_prefix(layer);
    p.push_back({prefix + c.mixer_norm_name + ".weight", {c.hidden}, K::Norm, 0});
    for (ParameterInfo info : block_parameters(c)) {
      info.name = prefix + c.mixer_name + "." + info.name;
      p.push_back(std::move(info));
    }
    if (c.mlp > 0) {
      p.push_back({prefix + "mlp_norm.weight", {c.hidden}, K::Norm, 0});
      p.push_back({prefix + "mlp.gate_proj.weight", {c.mlp, c.hidden}, K::Matrix, 0});
      p.push_back({prefix + "mlp.up_proj.weight", {c.mlp, c.hidden}, K::Matrix, 0});
      p.push_back({prefix + "mlp.down_proj.weight", {c.hidden, c.mlp}, K::OutputProjection, 0});
    }
  }
  p.push_back({c.root + c.final_norm_name + ".weight", {c.hidden}, K::Norm, 0});
  if (!c.tied) p.push_back({"lm_head.weight", {c.vocab, c.hidden}, K::Matrix, 0});
  return p;
}

void check_parameters(const ModelConfig& config, const std::map<std::string, Tensor>& tensors,
                      const std::vector<std::string>& ignored) {
  std::set<std::string> known;
  for (const ParameterInfo& info : model_parameters(config)) {
    known.insert(info.name);
    const auto it = tensors.find(info.name);
    if (it == tensors.end()) throw Error("the weights have no tensor '" + info.name + "'");
    if (it->second.shape != info.shape) {
      throw Error("tensor '" + info.name + "' has shape " + shape_text(it->second.shape) + ", the configuration says " +
                  shape_text(info.shape));
    }
    if (it->second.dtype == LLA_I32 || it->second.dtype == LLA_I64) throw Error("tensor '" + info.name + "' holds integers");
  }
  for (const auto& entry : tensors) {
    const std::string& name = entry.first;
    const bool pass =
        std::any_of(ignored.begin(), ignored.end(), [&](const std::string& p) { return name.rfind(p, 0) == 0; });
    if (pass || known.count(name) || (config.tied && name == "lm_head.weight")) continue;
    throw Error("the weights have a tensor '" + name + "' that the configuration does not know");
  }
}

lla_layer_desc block_description(const ModelConfig& c, int64_t grain, lla_dtype inner_dtype) {
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = c.block == BlockKind::Mamba2 ? LLA_LAYER_MAMBA2 : LLA_LAYER_GATED_DELTANET;
  d.heads = c.heads;
  d.groups = c.groups;
  d.key_dim = c.key_dim;
  d.value_dim = c.value_dim;
  d.hidden = c.hidden;
  d.grain = grain;
  d.levels = c.levels;
  d.lambda_form = c.levels ? LLA_LAMBDA_SOFTPLUS : LLA_LAMBDA_NONE;
  d.level_overflow = c.levels && c.absorb ? LLA_LEVELS_ABSORB : LLA_LEVELS_ERROR;
  d.conv_width = c.conv_width;
  d.norm_epsilon = c.norm_epsilon;
  d.inner_dtype = inner_dtype;
  if (c.block == BlockKind::Mamba2) {
    d.dt_min = c.dt_min;
    d.dt_max = c.dt_max;
    d.norm_group = c.norm_group;
    if (c.norm_before_gate) d.norm_form = LLA_NORM_NORM_FIRST;
  } else if (c.negative_eigenvalues) {
    d.write_form = LLA_WRITE_TWO_SIGMOID;
  }
  return d;
}

}  // namespace lm
