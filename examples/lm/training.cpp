// SPDX-License-Identifier: Apache-2.0
// Text, loss without a model, evaluation, learning-rate schedule.
#include "training.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "error.h"
#include "random.h"
#include "safetensors.h"

namespace lm {
namespace {

int32_t byte_at(const std::string& text, size_t i) { return static_cast<unsigned char>(text[i]); }

}  // namespace

Text read_text(const std::vector<std::string>& paths) {
  if (paths.empty()) throw Error("no text given");
  Text text;
  for (const std::string& path : paths) {
    const std::string bytes = read_file(path);
    const size_t cut = bytes.size() - bytes.size() / 10;
    text.training += bytes.substr(0, cut);
    text.held_out += bytes.substr(cut);
  }
  return text;
}

double bigram_loss(const Text& text) {
  std::vector<double> pairs(256 * 256, 1.0), totals(256, 256.0);
  for (size_t i = 1; i < text.training.size(); ++i) {
    const auto a = static_cast<size_t>(byte_at(text.training, i - 1)), b = static_cast<size_t>(byte_at(text.training, i));
    pairs[a * 256 + b] += 1;
    totals[a] += 1;
  }
  double sum = 0;
  for (size_t i = 1; i < text.held_out.size(); ++i) {
    const auto a = static_cast<size_t>(byte_at(text.held_out, i - 1)), b = static_cast<size_t>(byte_at(text.held_out, i));
    sum -= std::log(pairs[a * 256 + b] / totals[a]);
  }
  return text.held_out.size() > 1 ? sum / static_cast<double>(text.held_out.size() - 1) : 0;
}

std::vector<int32_t> random_windows(const std::string& text, int64_t count, int64_t length, uint64_t seed, int64_t step) {
  const auto size = static_cast<int64_t>(text.size());
  if (size < length + 1) throw Error("the text is shorter than one window of " + std::to_string(length + 1) + " bytes");
  Random random(seed, 1'000'000'007u + static_cast<uint64_t>(step));
  std::vector<int32_t> tokens;
  tokens.reserve(static_cast<size_t>(count * (length + 1)));
  for (int64_t b = 0; b < count; ++b) {
    const int64_t begin = random.below(size - length);
    for (int64_t i = 0; i <= length; ++i) tokens.push_back(byte_at(text, static_cast<size_t>(begin + i)));
  }
  return tokens;
}

double learning_rate_at(int64_t step, int64_t warm_up, int64_t steps, double peak) {
  if (step <= warm_up) return peak * static_cast<double>(step) / static_cast<double>(std::max<int64_t>(warm_up, 1));
  if (steps == 0) return peak;  // not known yet
  const double done = static_cast<double>(step - warm_up) / static_cast<double>(std::max<int64_t>(steps - warm_up, 1));
  return peak * (0.1 + 0.45 * (1.0 + std::cos(std::numbers::pi * std::min(done, 1.0))));
}

Evaluation evaluate(ModelRun& run, const std::string& text, int64_t sequences, int64_t length, int64_t stride,
                    int64_t max_windows) {
  const auto size = static_cast<int64_t>(text.size());
  if (size < 2) throw Error("there is no held-out text");
  // The last window may be shorter; overlapping ones stop where the first would be.
  std::vector<int64_t> begins;
  for (int64_t begin = 0; begin + 1 < size && (begin == 0 || stride >= length || begin + length < size); begin += stride) {
    begins.push_back(begin);
  }
  if (max_windows > 0 && static_cast<int64_t>(begins.size()) > max_windows) {
    std::vector<int64_t> some;
    const auto all = static_cast<int64_t>(begins.size());
    for (int64_t i = 0; i < max_windows; ++i) some.push_back(begins[static_cast<size_t>(i * all / max_windows)]);
    begins = some;
  }
  Evaluation result;
  std::vector<double> sums(static_cast<size_t>(length), 0.0), losses;
  std::vector<int64_t> counts(static_cast<size_t>(length), 0);
  for (size_t first = 0; first < begins.size(); first += static_cast<size_t>(sequences)) {
    const size_t count = std::min(static_cast<size_t>(sequences), begins.size() - first);
    // Tokens after the end of the text are zeros without a target; rows read no later ones, so that they change nothing.
    std::vector<int32_t> ids(count * static_cast<size_t>(length), 0), targets(ids.size(), -1);
    for (size_t b = 0; b < count; ++b) {
      for (int64_t i = 0; i < length && begins[first + b] + i + 1 < size; ++i) {
        const size_t at = b * static_cast<size_t>(length) + static_cast<size_t>(i);
        const auto source = static_cast<size_t>(begins[first + b] + i);
        ids[at] = byte_at(text, source);
        targets[at] = byte_at(text, source + 1);
      }
    }
    run.forward(ids.data(), static_cast<int64_t>(count), length);
    run.loss(targets.data(), &losses);
    for (size_t i = 0; i < targets.size(); ++i) {
      if (targets[i] < 0) continue;
      sums[i % static_cast<size_t>(length)] += losses[i];
      ++counts[i % static_cast<size_t>(length)];
    }
  }
  double sum = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    sum += sums[i];
    result.tokens += counts[i];
    result.by_position.push_back(counts[i] ? sums[i] / static_cast<double>(counts[i]) : NAN);
  }
  result.loss = sum / static_cast<double>(result.tokens);
  return result;
}

}  // namespace lm
