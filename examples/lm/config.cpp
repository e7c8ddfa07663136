// SPDX-License-Identifier: Apache-2.0
// Reads and writes configurations of the published model classes.
#include "config.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "error.h"

namespace lm {
namespace {

using nlohmann::json;

// JSON as Python writes it may hold Infinity and NaN, which are no JSON. Outside of texts they become 1e308 and null.
std::string plain_json(const std::string& text) {
  std::string out;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '\\' && i + 1 < text.size()) {
      out += c;
      out += text[++i];
      continue;
    }
    if (c == '"') quoted = !quoted;
    if (!quoted && text.compare(i, 8, "Infinity") == 0) {
      out += "1e308";
      i += 7;
    } else if (!quoted && text.compare(i, 3, "NaN") == 0) {
      out += "null";
      i += 2;
    } else {
      out += c;
    }
  }
  return out;
}

// Fields of a config with their types checked.
class Fields {
 public:
  explicit Fields(json object) : object_(std::move(object)) {}

  bool has(const char* name) const { return object_.contains(name) && !object_.at(name).is_null(); }
  int64_t integer(const char* name, std::optional<int64_t> otherwise = std::nullopt) const {
    if (!has(name)) return missing(name, otherwise);
    const json& value = object_.at(name);
    if (!value.is_number_integer()) throw Error(std::string("config: ") + name + " must be an integer");
    const int64_t n = value.get<int64_t>();
    if (n < 0 || n > (int64_t{1} << 40)) throw Error(std::string("config: ") + name + " is out of range");
    return n;
  }
  double number(const char* name, std::optional<double> otherwise = std::nullopt) const {
    if (!has(name)) return missing(name, otherwise);
    return to_number(object_.at(name), name);
  }
  bool flag(const char* name, bool otherwise) const {
    if (!has(name)) return otherwise;
    if (!object_.at(name).is_boolean()) throw Error(std::string("config: ") + name + " must be true or false");
    return object_.at(name).get<bool>();
  }
  std::string text(const char* name, const std::string& otherwise) const {
    if (!has(name)) return otherwise;
    if (!object_.at(name).is_string()) throw Error(std::string("config: ") + name + " must be a text");
    return object_.at(name).get<std::string>();
  }
  // A pair of numbers, infinite ones allowed.
  std::optional<std::pair<double, double>> pair(const char* name) const {
    if (!has(name)) return std::nullopt;
    const json& value = object_.at(name);
    if (!value.is_array() || value.size() != 2) throw Error(std::string("config: ") + name + " must be a pair of numbers");
    return std::pair{to_number(value[0], name), to_number(value[1], name)};
  }

 private:
  static double to_number(const json& value, const char* name) {
    if (value.is_object() && value.contains("__float__") && value["__float__"] == "Infinity") return INFINITY;
    if (!value.is_number()) throw Error(std::string("config: ") + name + " must be a number");
    const double x = value.get<double>();
    return x >= 1e300 ? INFINITY : x;
  }
  template <class T>
  static T missing(const char* name, const std::optional<T>& otherwise) {
    if (!otherwise) throw Error(std::string("config: ") + name + " is missing");
    return *otherwise;
  }
  json object_;
};

void name_tensors(ModelConfig* c, bool short_norm_name) {
  const bool mamba = c->block == BlockKind::Mamba2;
  c->root = mamba ? "backbone." : "model.";
  c->mixer_name = mamba ? "mixer" : "attn";
  c->mixer_norm_name = short_norm_name ? "norm" : mamba ? "mixer_norm" : "attn_norm";
  c->final_norm_name = mamba ? "norm_f" : "norm";
}

// λ columns: those of the parameter L, which no field of a config names.
int64_t columns_of(const std::map<std::string, Tensor>& tensors, const std::string& name) {
  const auto it = tensors.find(name);
  if (it == tensors.end()) return 0;
  if (it->second.shape.size() != 2) throw Error("tensor '" + name + "' must have two axes");
  return it->second.shape[1];
}

void read_mamba2(const Fields& f, ModelConfig* c, bool log_linear_type) {
  // `mamba2` is the name of a class without an MLP and with `norm`; the log-linear classes and `mamba2mlp` have both.
  const bool plain = c->model_type == "mamba2";
  name_tensors(c, plain);
  c->heads = f.integer("num_heads");
  c->value_dim = f.integer("head_dim", 64);
  c->key_dim = f.integer("state_size", 128);
  c->groups = f.integer("n_groups", 1);
  c->conv_width = f.integer("conv_kernel", 4);
  c->bias = f.flag("use_bias", false);
  c->conv_bias = f.flag("use_conv_bias", true);
  if (!f.flag("rmsnorm", true)) throw Error("config: rmsnorm = false is not supported");
  c->norm_before_gate = f.flag("norm_before_gate", false);
  c->skip_per_channel = f.flag("D_has_hdim", false);
  // The classes that call the field norm_eps norm over groups of d / n_groups, the others over the whole row.
  const bool grouped = f.has("norm_eps");
  c->norm_epsilon = f.number(grouped ? "norm_eps" : "layer_norm_epsilon", 1e-5);
  if (c->groups < 1 || c->heads % c->groups != 0) throw Error("config: n_groups must divide num_heads");
  if (grouped && c->groups > 1) c->norm_group = c->inner() / c->groups;
  const double expand = f.number("expand", 2.0);
  if (std::fabs(expand * static_cast<double>(c->hidden) - static_cast<double>(c->inner())) > 0.5) {
    throw Error("config: num_heads * head_dim must be expand * hidden_size");
  }
  for (const char* name : {"time_step_limit", "dt_limit"}) {
    if (const auto limit = f.pair(name)) {
      c->dt_min = limit->first;
      c->dt_max = std::isinf(limit->second) ? 0 : limit->second;
      if (!(c->dt_min >= 0) || (c->dt_max != 0 && c->dt_max < c->dt_min)) {
        throw Error(std::string("config: ") + name + " is not a range of numbers >= 0");
      }
    }
  }
  if (!plain) {
    const int64_t width = default_mlp_width(c->hidden, f.number("hidden_ratio", 4.0));
    c->mlp = f.integer("intermediate_size", width);
  }
  if (log_linear_type && c->levels == 0)
    throw Error("a log-linear model needs the tensors '" + c->layer_prefix(0) + "mixer.L'");
}

void read_gated_deltanet(const Fields& f, ModelConfig* c) {
  name_tensors(c, false);
  c->groups = f.integer("num_heads");
  c->heads = f.integer("num_v_heads", c->groups);
  c->key_dim = f.integer("head_dim", 256);
  const double value_dim = f.number("expand_v", 2.0) * static_cast<double>(c->key_dim);
  c->value_dim = static_cast<int64_t>(value_dim);
  if (static_cast<double>(c->value_dim) != value_dim) throw Error("config: expand_v * head_dim is no integer");
  if (c->groups < 1 || c->heads % c->groups != 0) throw Error("config: num_heads must divide num_v_heads");
  if (!f.flag("use_short_conv", true)) throw Error("config: use_short_conv = false is not supported");
  if (f.flag("conv_bias", false)) throw Error("config: conv_bias = true is not supported");
  c->conv_width = f.integer("conv_size", 4);
  c->conv_bias = false;
  c->output_gate = f.flag("use_gate", true);
  c->negative_eigenvalues = f.flag("allow_neg_eigval", false);
  c->norm_epsilon = f.number("norm_eps", 1e-6);
  c->mlp = f.integer("intermediate_size", default_mlp_width(c->hidden, f.number("hidden_ratio", 4.0)));
}

}  // namespace

int64_t default_mlp_width(int64_t hidden, double ratio) {
  const double width = std::floor(static_cast<double>(hidden) * ratio * 2.0 / 3.0);
  return 256 * ((static_cast<int64_t>(width) + 255) / 256);
}

ModelConfig read_config(const std::string& json_text, const std::map<std::string, Tensor>& tensors,
                        const std::string& model_class) {
  const json parsed = json::parse(plain_json(json_text), nullptr, false);
  if (parsed.is_discarded() || !parsed.is_object()) throw Error("config: is no JSON object");
  const Fields f(parsed);
  ModelConfig c;
  c.model_type = f.text("model_type", "");
  if (c.model_type.empty()) {
    if (model_class == "LogLinearMamba2ForCausalLM")
      c.model_type = "log_linear_mamba2";
    else if (model_class == "Mamba2ForCausalLM")
      c.model_type = "mamba2";
    else if (model_class == "GatedDeltaNetForCausalLM")
      c.model_type = "gated_deltanet";
    else
      throw Error("config: model_type is missing");
  }
  const bool log_linear_mamba2 = c.model_type == "log_linear_mamba2" || c.model_type == "hattention";
  const bool mamba2 = log_linear_mamba2 || c.model_type == "mamba2" || c.model_type == "mamba2mlp";
  const bool log_linear_gdn = c.model_type == "h_gated_deltanet";
  if (!mamba2 && !log_linear_gdn && c.model_type != "gated_deltanet") {
    throw Error("config: model_type '" + c.model_type +
                "' is not supported (log_linear_mamba2, hattention, mamba2, mamba2mlp, "
                "h_gated_deltanet, gated_deltanet are)");
  }
  if (f.has("attn")) throw Error("config: attn (a hybrid with softmax attention layers) is not supported");
  if (f.has("attnres_block_size")) throw Error("config: attnres_block_size (attention residuals) is not supported");
  const std::string activation = f.text("hidden_act", mamba2 ? "silu" : "swish");
  if (activation != "silu" && activation != "swish") throw Error("config: hidden_act '" + activation + "' is not supported");

  c.block = mamba2 ? BlockKind::Mamba2 : BlockKind::GatedDeltaNet;
  c.vocab = f.integer("vocab_size");
  c.hidden = f.integer("hidden_size");
  c.layers = f.integer("num_hidden_layers");
  c.tied = f.flag("tie_word_embeddings", false);
  c.context = f.integer("max_position_embeddings", 0);
  if (c.vocab < 1 || c.hidden < 1 || c.layers < 1)
    throw Error("config: vocab_size, hidden_size and num_hidden_layers must be >= 1");
  name_tensors(&c, false);
  const std::string scale = c.layer_prefix(0) + c.mixer_name + ".L";
  if (log_linear_mamba2 || log_linear_gdn)
    c.levels = columns_of(tensors, scale);
  else if (tensors.count(scale))
    throw Error("config: model_type '" + c.model_type + "' is linear but there is a tensor '" + scale + "'");
  if (mamba2)
    read_mamba2(f, &c, log_linear_mamba2);
  else
    read_gated_deltanet(f, &c);
  if (log_linear_gdn && c.levels == 0) throw Error("a log-linear model needs the tensors '" + scale + "'");
  if (tensors.count(c.root + "embedding.weight")) c.embedding_name = "embedding";  // an older name
  return c;
}

ModelConfig read_golden_config(const std::map<std::string, std::string>& metadata,
                               const std::map<std::string, Tensor>& tensors) {
  const auto get = [&](const char* key, const char* otherwise = nullptr) {
    const auto it = metadata.find(key);
    if (it != metadata.end()) return it->second;
    if (!otherwise) throw Error(std::string("metadata '") + key + "' is missing");
    return std::string(otherwise);
  };
  const auto integer = [&](const char* key, const char* otherwise = nullptr) {
    const std::string text = get(key, otherwise);
    try {
      return static_cast<int64_t>(std::stoll(text));
    } catch (const std::exception&) {
      throw Error(std::string("metadata '") + key + "' is no integer");
    }
  };
  ModelConfig c;
  const bool whole = metadata.count("model") != 0;
  const std::string kind = get(whole ? "model" : "block");
  if (kind != "mamba2" && kind != "gdn") throw Error("block '" + kind + "' is not supported");
  c.block = kind == "mamba2" ? BlockKind::Mamba2 : BlockKind::GatedDeltaNet;
  c.hidden = integer("hidden_size");
  c.layers = whole ? integer("num_hidden_layers") : 1;
  c.vocab = whole ? integer("vocab_size") : 0;
  c.mlp = whole ? integer("intermediate_size") : 0;
  c.norm_epsilon = std::stod(get("norm_eps"));
  name_tensors(&c, false);
  if (c.block == BlockKind::Mamba2) {
    c.heads = integer("num_heads");
    c.value_dim = integer("head_dim");
    c.key_dim = integer("state_size");
    c.groups = integer("n_groups", "1");
    if (get("grouped_norm", "False") == "True") c.norm_group = c.inner() / c.groups;
  } else {
    c.groups = integer("num_heads");
    c.heads = integer("num_v_heads", get("num_heads").c_str());
    c.key_dim = integer("head_dim");
    c.value_dim = integer("expand_v") * c.key_dim;
    c.conv_bias = false;
  }
  const std::string prefix = whole ? c.layer_prefix(0) + c.mixer_name + "." : std::string();
  const bool linear = tensors.count("w." + prefix + "L") == 0;
  c.levels = linear ? 0 : integer("L");
  c.model_type = c.block == BlockKind::Mamba2 ? (linear ? "mamba2mlp" : "log_linear_mamba2")
                                              : (linear ? "gated_deltanet" : "h_gated_deltanet");
  return c;
}

std::string write_config(const ModelConfig& c) {
  json j;
  j["model_type"] = c.model_type;
  j["vocab_size"] = c.vocab;
  j["hidden_size"] = c.hidden;
  j["num_hidden_layers"] = c.layers;
  j["tie_word_embeddings"] = c.tied;
  j["hidden_act"] = c.block == BlockKind::Mamba2 ? "silu" : "swish";
  if (c.context > 0) j["max_position_embeddings"] = c.context;
  if (c.mlp > 0) j["intermediate_size"] = c.mlp;
  if (c.block == BlockKind::Mamba2) {
    j["architectures"] = {c.model_type == "log_linear_mamba2" ? "LogLinearMamba2ForCausalLM" : "Mamba2ForCausalLM"};
    j["num_heads"] = c.heads;
    j["head_dim"] = c.value_dim;
    j["state_size"] = c.key_dim;
    j["n_groups"] = c.groups;
    j["expand"] = static_cast<double>(c.inner()) / static_cast<double>(c.hidden);
    if (c.inner() % c.hidden == 0) j["expand"] = c.inner() / c.hidden;
    j["conv_kernel"] = c.conv_width;
    j["use_bias"] = c.bias;
    j["use_conv_bias"] = c.conv_bias;
    j["rmsnorm"] = true;
    j["norm_before_gate"] = c.norm_before_gate;
    j["D_has_hdim"] = c.skip_per_channel;
    const bool whole_row = c.norm_group == 0 && c.groups > 1;
    j[whole_row ? "layer_norm_epsilon" : "norm_eps"] = c.norm_epsilon;
    if (c.model_type == "mamba2") j["layer_norm_epsilon"] = c.norm_epsilon;
    if (c.dt_min != 0 || c.dt_max != 0) j["time_step_limit"] = {c.dt_min, c.dt_max == 0 ? 1e308 : c.dt_max};
  } else {
    j["architectures"] = {c.levels ? "HGatedDeltaNetForCausalLM" : "GatedDeltaNetForCausalLM"};
    j["num_heads"] = c.groups;
    j["num_v_heads"] = c.heads;
    j["head_dim"] = c.key_dim;
    j["expand_v"] = static_cast<double>(c.value_dim) / static_cast<double>(c.key_dim);
    j["conv_size"] = c.conv_width;
    j["use_short_conv"] = true;
    j["use_gate"] = c.output_gate;
    j["allow_neg_eigval"] = c.negative_eigenvalues;
    j["norm_eps"] = c.norm_epsilon;
  }
  return j.dump(2) + "\n";
}

}  // namespace lm
