// SPDX-License-Identifier: Apache-2.0
// What a model is: sizes, forms and tensor names, read from the config.json of the published model classes (or the metadata
// of a golden file) and written back.
#pragma once

#include <lla/lla.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tensor.h"

namespace lm {

enum class BlockKind { Mamba2, GatedDeltaNet };

struct ModelConfig {
  BlockKind block = BlockKind::Mamba2;
  std::string model_type;  // as in config.json
  int64_t vocab = 0, hidden = 0, layers = 0;
  int64_t heads = 0;   // value heads
  int64_t groups = 1;  // key/query heads
  int64_t key_dim = 0, value_dim = 0;
  int64_t conv_width = 4;
  int64_t levels = 0;   // λ columns; 0: linear
  bool absorb = false;  // longer sequences than the levels allow read the last column
  int64_t mlp = 0;      // width of the MLP; 0: none
  double norm_epsilon = 1e-5;
  bool tied = false;    // the head is the embedding
  int64_t context = 0;  // training context, for information; 0: unknown
  // Mamba-2
  bool bias = false, conv_bias = true;
  bool norm_before_gate = false;
  int64_t norm_group = 0;  // elements per RMS of the gated norm; 0: the whole row
  bool skip_per_channel = false;
  double dt_min = 0, dt_max = 0;  // limits of dt; dt_max 0: none
  // Gated DeltaNet
  bool output_gate = true;  // g_proj
  bool negative_eigenvalues = false;
  // names
  std::string root, mixer_name, mixer_norm_name, final_norm_name, embedding_name = "embeddings";

  int64_t inner() const { return heads * value_dim; }
  std::string layer_prefix(int64_t layer) const { return root + "layers." + std::to_string(layer) + "."; }
};

// Reads config.json (text). `tensors` supplies what no field says: the number of λ columns. Throws Error on what is not
// supported, naming the field. `model_class` may be empty.
ModelConfig read_config(const std::string& json_text, const std::map<std::string, Tensor>& tensors,
                        const std::string& model_class = "");
// Reads the metadata of a golden file of kind block_* (layers = 1, names without prefix) or model_*.
ModelConfig read_golden_config(const std::map<std::string, std::string>& metadata,
                               const std::map<std::string, Tensor>& tensors);
// config.json that read_config() and the published classes take.
std::string write_config(const ModelConfig& config);

// What becomes of a parameter in training.
enum class ParameterKind { Matrix, Convolution, Bias, Norm, ALog, DtBias, Skip, LevelScale, OutputProjection };

struct ParameterInfo {
  std::string name;
  std::vector<int64_t> shape;
  ParameterKind kind = ParameterKind::Matrix;
  lla_role role = 0;  // in its block; 0 for what belongs to none
};

// Parameters of one block, names without prefix.
std::vector<ParameterInfo> block_parameters(const ModelConfig& config);
// All parameters of the model, full names, in the order of use.
std::vector<ParameterInfo> model_parameters(const ModelConfig& config);
// Throws Error if a tensor is missing, has another shape, or is one that the model does not know (names that begin with one
// of `ignored` are passed over).
void check_parameters(const ModelConfig& config, const std::map<std::string, Tensor>& tensors,
                      const std::vector<std::string>& ignored = {});
// The layer that lla computes a block with.
lla_layer_desc block_description(const ModelConfig& config, int64_t grain, lla_dtype inner_dtype);

// Width of the MLP by the published rule.
int64_t default_mlp_width(int64_t hidden, double ratio);

}  // namespace lm
