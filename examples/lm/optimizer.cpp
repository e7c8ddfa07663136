// SPDX-License-Identifier: Apache-2.0
// Initial values and AdamW.
#include <algorithm>
#include <cmath>

#include "loops.h"
#include "random.h"
#include "training.h"

namespace lm {
namespace {

// What a step of AdamW is made with.
struct StepSizes {
  float scale, b1, b2, c1, c2, rate, epsilon;  // scale: of the gradients; c: corrections of the means' start from zero
};

struct AdamWLoop {
  static LM_LOOP void run(int64_t n, StepSizes z, float keep, const float* g, float* m, float* v, float* w) {
    for (int64_t i = 0; i < n; ++i) {
      const float gradient = g[i] * z.scale;
      m[i] = z.b1 * m[i] + (1.0f - z.b1) * gradient;
      v[i] = z.b2 * v[i] + (1.0f - z.b2) * gradient * gradient;
      w[i] = keep * w[i] - z.rate * (m[i] * z.c1) / (std::sqrt(v[i] * z.c2) + z.epsilon);
    }
  }
};

}  // namespace

std::map<std::string, Tensor> initial_parameters(const ModelConfig& config, uint64_t seed) {
  std::map<std::string, Tensor> tensors;
  uint64_t stream = 0;
  for (const ParameterInfo& info : model_parameters(config)) {
    Random random(seed, ++stream);
    Tensor t(LLA_F32, info.shape);
    float* w = t.f32();
    const int64_t n = t.count();
    switch (info.kind) {
      case ParameterKind::Matrix:
      case ParameterKind::Convolution: {
        // The published 0.02 is meant for wide models; a narrow one learns faster from 1 / sqrt(inputs), and a convolution
        // of four taps needs taps of about a half.
        int64_t inputs = 1;
        for (size_t i = 1; i < info.shape.size(); ++i) inputs *= info.shape[i];
        const bool table = info.shape.front() == config.vocab && info.name.find("embedding") != std::string::npos;
        const double spread = table ? 0.1 : 1.0 / std::sqrt(static_cast<double>(inputs));
        for (int64_t i = 0; i < n; ++i) w[i] = static_cast<float>(spread * random.normal());
        break;
      }
      case ParameterKind::OutputProjection: {
        const double bound = 1.0 / std::sqrt(static_cast<double>(info.shape[1]) * 2.0 * static_cast<double>(config.layers));
        for (int64_t i = 0; i < n; ++i) w[i] = static_cast<float>(bound * (2.0 * random.uniform() - 1.0));
        break;
      }
      case ParameterKind::Bias:
        break;  // zero
      case ParameterKind::Norm:
      case ParameterKind::Skip:
      case ParameterKind::LevelScale:
        for (int64_t i = 0; i < n; ++i) w[i] = 1;
        break;
      case ParameterKind::ALog:
        for (int64_t i = 0; i < n; ++i) {
          const double rate =
              config.block == BlockKind::Mamba2 ? static_cast<double>(i + 1) : 16.0 * (1.0 - random.uniform());
          w[i] = static_cast<float>(std::log(rate));
        }
        break;
      case ParameterKind::DtBias:
        for (int64_t i = 0; i < n; ++i) {
          const double dt = std::max(1e-4, std::exp(std::log(1e-3) + random.uniform() * (std::log(1e-1) - std::log(1e-3))));
          w[i] = static_cast<float>(dt + std::log(-std::expm1(-dt)));  // inverse of softplus
        }
        break;
    }
    tensors[info.name] = std::move(t);
  }
  return tensors;
}

AdamW::AdamW(Model& model, const Options& options) : model_(model), options_(options) {
  for (const Parameter& p : model.parameters()) {
    first_.emplace_back(LLA_F32, p.info.shape);
    second_.emplace_back(LLA_F32, p.info.shape);
  }
}

double AdamW::step(int64_t step, double learning_rate) {
  constexpr int64_t kPiece = 4096;
  std::vector<Parameter>& parameters = model_.parameters();
  double squares = 0;
  std::vector<double> partial;
  for (const Parameter& p : parameters) {
    const int64_t n = p.value.count();
    partial.assign(static_cast<size_t>((n + kPiece - 1) / kPiece), 0.0);
    model_.threads().for_pieces(n, kPiece, [&](int64_t begin, int64_t end) {
      double sum = 0;
      for (int64_t i = begin; i < end; ++i)
        sum += static_cast<double>(p.gradient.f32()[i]) * static_cast<double>(p.gradient.f32()[i]);
      partial[static_cast<size_t>(begin / kPiece)] = sum;
    });
    for (const double x : partial) squares += x;
  }
  const double norm = std::sqrt(squares);
  StepSizes sizes;
  sizes.scale = static_cast<float>(norm > options_.clip ? options_.clip / norm : 1.0);
  sizes.b1 = static_cast<float>(options_.beta1);
  sizes.b2 = static_cast<float>(options_.beta2);
  sizes.c1 = static_cast<float>(1.0 / (1.0 - std::pow(options_.beta1, static_cast<double>(step))));
  sizes.c2 = static_cast<float>(1.0 / (1.0 - std::pow(options_.beta2, static_cast<double>(step))));
  sizes.rate = static_cast<float>(learning_rate);
  sizes.epsilon = static_cast<float>(options_.epsilon);
  for (size_t k = 0; k < parameters.size(); ++k) {
    Parameter& p = parameters[k];
    const bool decays = p.info.kind == ParameterKind::Matrix || p.info.kind == ParameterKind::Convolution ||
                        p.info.kind == ParameterKind::OutputProjection;
    const auto keep = static_cast<float>(decays ? 1.0 - learning_rate * options_.weight_decay : 1.0);
    model_.threads().for_pieces(p.value.count(), kPiece, [&](int64_t begin, int64_t end) {
      run_loop<AdamWLoop>(end - begin, sizes, keep, p.gradient.f32() + begin, first_[k].f32() + begin,
                          second_[k].f32() + begin, p.value.f32() + begin);
    });
  }
  model_.send_values();
  return norm;
}

}  // namespace lm
