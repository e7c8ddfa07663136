// SPDX-License-Identifier: Apache-2.0
// Parts of a training program: initial values, AdamW, the learning-rate schedule, the text and what one reads off it without
// a model.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model.h"

namespace lm {

// Initial values as the published models draw them.
std::map<std::string, Tensor> initial_parameters(const ModelConfig& config, uint64_t seed);

// AdamW with decoupled decay; decays, gates, levels, norms and biases are not decayed.
class AdamW {
 public:
  struct Options {
    double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, weight_decay = 0.1, clip = 1.0;
  };
  AdamW(Model& model, const Options& options);
  // Clips the gradients to the norm `clip` and takes step number `step` (1, 2, ...). Returns the norm before clipping.
  double step(int64_t step, double learning_rate);
  std::vector<Tensor>& first() { return first_; }
  std::vector<Tensor>& second() { return second_; }

 private:
  Model& model_;
  Options options_;
  std::vector<Tensor> first_, second_;  // moments, fp32
};

// Linear warm-up to `peak`, then a cosine down to a tenth of it.
double learning_rate_at(int64_t step, int64_t warm_up, int64_t steps, double peak);

// Bytes of one or more files, of each the first nine tenths for training, the rest held out.
struct Text {
  std::string training, held_out;
};
Text read_text(const std::vector<std::string>& paths);

// Mean loss in nats of a byte-bigram model with add-one smoothing, counted on the training part.
double bigram_loss(const Text& text);

// Token windows [count][length + 1] of the training part for one step, the same for the same seed and step.
std::vector<int32_t> random_windows(const std::string& text, int64_t count, int64_t length, uint64_t seed, int64_t step);

// Loss over a text in windows of `length` tokens, one every `stride` tokens: the mean, and the mean at each position of a
// window. With stride = length every byte counts once; a smaller one sees each byte at several positions, which makes the
// means by position smoother.
struct Evaluation {
  double loss = 0;
  int64_t tokens = 0;
  std::vector<double> by_position;
};
// `run` must not have a state and must take `length` rows. At most `max_windows` windows, spread evenly; 0: all.
Evaluation evaluate(ModelRun& run, const std::string& text, int64_t sequences, int64_t length, int64_t stride,
                    int64_t max_windows);

}  // namespace lm
