// SPDX-License-Identifier: Apache-2.0
// The language-model example: gradients against central differences in double precision, configurations, and resumed
// training.
#include "model.h"

#include <gtest/gtest.h>

#include <cmath>

#include "error.h"
#include "random.h"
#include "training.h"

namespace {

using lm::BlockKind;

const char* const kModels[] = {
    R"({"model_type": "log_linear_mamba2", "vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_heads": 4,
        "head_dim": 6, "state_size": 5, "n_groups": 2, "expand": 2, "norm_eps": 1e-5, "intermediate_size": 14,
        "use_bias": true, "D_has_hdim": true})",
    R"({"model_type": "mamba2", "vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_heads": 3, "head_dim": 8,
        "state_size": 4, "expand": 2, "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, Infinity],
        "tie_word_embeddings": true})",
    R"({"model_type": "h_gated_deltanet", "vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_heads": 2,
        "num_v_heads": 4, "head_dim": 5, "expand_v": 2, "norm_eps": 1e-6, "intermediate_size": 14,
        "allow_neg_eigval": true})",
    R"({"model_type": "gated_deltanet", "vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_heads": 2,
        "head_dim": 5, "expand_v": 1, "norm_eps": 1e-6, "intermediate_size": 14})"};

lm::ModelConfig config_of(const std::string& json) {
  std::map<std::string, lm::Tensor> shapes;
  if (json.find("log_linear") != std::string::npos) shapes["backbone.layers.0.mixer.L"] = lm::Tensor(LLA_F32, {4, 6});
  if (json.find("h_gated") != std::string::npos) shapes["model.layers.0.attn.L"] = lm::Tensor(LLA_F32, {4, 6});
  return lm::read_config(json, shapes);
}

lm::Context context_on(lm::Threads& threads, lla_backend backend) {
  const lla_parallel hook = threads.hook();
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = backend;
  options.parallel = &hook;
  return lm::make_context(options);
}

class Gradients : public testing::TestWithParam<const char*> {};

TEST_P(Gradients, AgreeWithCentralDifferences) {
  lm::Threads threads(2);
  const lm::Context context = context_on(threads, LLA_BACKEND_REFERENCE);
  const lm::ModelConfig config = config_of(GetParam());
  std::map<std::string, lm::Tensor> weights = lm::initial_parameters(config, 3);
  for (auto& [name, tensor] : weights) {
    // Away from zeros and ones, so that no gradient is trivially right.
    std::vector<double> values = tensor.values();
    lm::Random random(5, name.size());
    for (double& v : values) v += 0.1 * random.normal();
    tensor = lm::Tensor::of(values, LLA_F64, tensor.shape);
  }
  lm::Model model(context.get(), threads, config, weights, LLA_F64, 4);
  model.make_gradients(LLA_F64);
  model.zero_gradients();
  constexpr int64_t kBatch = 2, kRows = 13;
  std::vector<int32_t> ids, targets;
  lm::Random random(8, 1);
  for (int64_t i = 0; i < kBatch * kRows; ++i) {
    ids.push_back(static_cast<int32_t>(random.below(config.vocab)));
    targets.push_back(i == 3 ? -1 : static_cast<int32_t>(random.below(config.vocab)));
  }
  lm::ModelRun run(model, {kBatch, kRows, true, 0, 0});
  run.forward(ids.data(), kBatch, kRows);
  const double loss = run.loss(targets.data());
  run.forward(ids.data(), kBatch, kRows);
  EXPECT_DOUBLE_EQ(run.backward(targets.data()), loss);

  for (lm::Parameter& p : model.parameters()) {
    // The derivative along a random direction of this one parameter.
    lm::Random direction(17, p.info.name.size());
    auto* w = reinterpret_cast<double*>(p.value.data());
    const auto* g = reinterpret_cast<const double*>(p.gradient.data());
    std::vector<double> d(static_cast<size_t>(p.value.count()));
    double expected = 0, size = 0;
    for (size_t i = 0; i < d.size(); ++i) {
      d[i] = direction.normal();
      expected += d[i] * g[i];
      size += std::fabs(d[i] * g[i]);
    }
    const std::vector<double> before(w, w + d.size());
    const auto slope = [&](double h) {
      double side[2];
      for (int s = 0; s < 2; ++s) {
        for (size_t i = 0; i < d.size(); ++i) w[i] = before[i] + (s ? h : -h) * d[i];
        run.forward(ids.data(), kBatch, kRows);
        side[s] = run.loss(targets.data());
      }
      return (side[1] - side[0]) / (2 * h);
    };
    // Two steps together cancel the error of second order.
    const double difference = (4 * slope(5e-6) - slope(1e-5)) / 3;
    std::copy(before.begin(), before.end(), w);
    EXPECT_NEAR(difference, expected, 1e-6 * size + 1e-9) << p.info.name;
    EXPECT_GT(size, 0) << p.info.name << " has no gradient at all";
  }
}

TEST_P(Gradients, AreTheSameInFloatOnTheCpu) {
  lm::Threads threads(2);
  const lm::ModelConfig config = config_of(GetParam());
  const std::map<std::string, lm::Tensor> weights = lm::initial_parameters(config, 3);
  std::vector<int32_t> ids;
  lm::Random random(8, 1);
  for (int64_t i = 0; i < 2 * 13; ++i) ids.push_back(static_cast<int32_t>(random.below(config.vocab)));
  std::vector<std::vector<double>> gradients[2];
  for (const int cpu : {0, 1}) {
    const lm::Context context = context_on(threads, cpu ? LLA_BACKEND_CPU : LLA_BACKEND_REFERENCE);
    lm::Model model(context.get(), threads, config, weights, cpu ? LLA_F32 : LLA_F64, 4);
    model.make_gradients(cpu ? LLA_F32 : LLA_F64);
    model.zero_gradients();
    lm::ModelRun run(model, {2, 13, true, 0, 0});
    run.forward(ids.data(), 2, 13);
    run.backward(ids.data());
    for (const lm::Parameter& p : model.parameters()) gradients[cpu].push_back(p.gradient.values());
  }
  double difference = 0, size = 0;
  for (size_t k = 0; k < gradients[0].size(); ++k) {
    for (size_t i = 0; i < gradients[0][k].size(); ++i) {
      difference += std::pow(gradients[0][k][i] - gradients[1][k][i], 2);
      size += std::pow(gradients[0][k][i], 2);
    }
  }
  EXPECT_LT(std::sqrt(difference / size), 2e-5);
}

INSTANTIATE_TEST_SUITE_P(Models, Gradients, testing::ValuesIn(kModels));

TEST(Config, WritesWhatItReads) {
  for (const char* text : kModels) {
    const lm::ModelConfig a = config_of(text);
    std::map<std::string, lm::Tensor> weights;
    for (const lm::ParameterInfo& info : lm::model_parameters(a)) weights[info.name] = lm::Tensor(LLA_F32, info.shape);
    const lm::ModelConfig b = lm::read_config(lm::write_config(a), weights);
    const std::vector<lm::ParameterInfo> pa = lm::model_parameters(a), pb = lm::model_parameters(b);
    ASSERT_EQ(pa.size(), pb.size());
    for (size_t i = 0; i < pa.size(); ++i) {
      EXPECT_EQ(pa[i].name, pb[i].name);
      EXPECT_EQ(pa[i].shape, pb[i].shape);
    }
    EXPECT_EQ(a.norm_epsilon, b.norm_epsilon);
    EXPECT_EQ(a.norm_group, b.norm_group);
    EXPECT_EQ(a.tied, b.tied);
    EXPECT_EQ(a.negative_eigenvalues, b.negative_eigenvalues);
    EXPECT_NO_THROW(lm::check_parameters(b, weights));
    weights["surplus"] = lm::Tensor(LLA_F32, {1});
    EXPECT_THROW(lm::check_parameters(b, weights), lm::Error);
  }
}

TEST(Config, RefusesWhatIsNotSupported) {
  const auto with = [](const std::string& field) {
    std::string text = kModels[3];
    text.insert(1, field + ", ");
    return text;
  };
  const auto message = [&](const std::string& json) -> std::string {
    try {
      config_of(json);
      return "";
    } catch (const lm::Error& e) {
      return e.what();
    }
  };
  EXPECT_EQ(message(kModels[3]), "");
  EXPECT_NE(message(with(R"("attn": {"layers": [1]})")).find("attn"), std::string::npos);
  EXPECT_NE(message(with(R"("attnres_block_size": 4)")).find("attnres"), std::string::npos);
  EXPECT_NE(message(with(R"("use_short_conv": false)")).find("use_short_conv"), std::string::npos);
  EXPECT_NE(message(with(R"("hidden_act": "gelu")")).find("gelu"), std::string::npos);
  EXPECT_NE(message(R"({"model_type": "llama"})").find("llama"), std::string::npos);
  EXPECT_NE(message(R"({"model_type": "mamba2", "vocab_size": "x"})").find("vocab_size"), std::string::npos);
  EXPECT_NE(message("{").find("JSON"), std::string::npos);
}

// A run of 6 steps, and one of 3 whose weights and moments are carried into a new one, must agree bit for bit.
TEST(Training, ResumesWithTheSameBits) {
  lm::Threads threads(2);
  const lm::Context context = context_on(threads, LLA_BACKEND_CPU);
  const lm::ModelConfig config = config_of(kModels[0]);
  std::string text;
  for (int i = 0; i < 400; ++i) text.push_back(static_cast<char>((i * i / 7 + i) % 11));
  const auto train = [&](lm::Model& model, lm::AdamW& optimizer, int64_t first, int64_t last) {
    lm::ModelRun run(model, {2, 16, true, 0, 0});
    for (int64_t step = first; step <= last; ++step) {
      const std::vector<int32_t> windows = lm::random_windows(text, 2, 16, 1, step);
      std::vector<int32_t> ids, targets;
      for (size_t b = 0; b < 2; ++b) {
        ids.insert(ids.end(), windows.begin() + static_cast<std::ptrdiff_t>(17 * b),
                   windows.begin() + static_cast<std::ptrdiff_t>(17 * b + 16));
        targets.insert(targets.end(), windows.begin() + static_cast<std::ptrdiff_t>(17 * b + 1),
                       windows.begin() + static_cast<std::ptrdiff_t>(17 * b + 17));
      }
      model.zero_gradients();
      run.forward(ids.data(), 2, 16);
      run.backward(targets.data());
      optimizer.step(step, lm::learning_rate_at(step, 2, 6, 1e-2));
    }
  };
  const auto make = [&](const std::map<std::string, lm::Tensor>& weights) {
    auto model = std::make_unique<lm::Model>(context.get(), threads, config, weights);
    model->make_gradients(LLA_F32);
    return model;
  };
  const auto whole = make(lm::initial_parameters(config, 1));
  lm::AdamW whole_optimizer(*whole, {});
  train(*whole, whole_optimizer, 1, 6);
  const auto first = make(lm::initial_parameters(config, 1));
  lm::AdamW first_optimizer(*first, {});
  train(*first, first_optimizer, 1, 3);
  const auto second = make(first->tensors());
  lm::AdamW second_optimizer(*second, {});
  second_optimizer.first() = first_optimizer.first();
  second_optimizer.second() = first_optimizer.second();
  train(*second, second_optimizer, 4, 6);
  for (const auto& [name, tensor] : whole->tensors()) EXPECT_EQ(tensor.bytes, second->tensors().at(name).bytes) << name;
}

}  // namespace
