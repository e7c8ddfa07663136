// SPDX-License-Identifier: Apache-2.0
// lm generate: continues a prompt. The prompt is appended to a state in pieces, then one token at a time.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "arguments.h"
#include "commands.h"
#include "error.h"
#include "random.h"
#include "safetensors.h"
#include "training.h"

namespace lm {
namespace {

// Draws a token. Temperature 0 takes the most likely one; top_k 0 draws from all.
int32_t sample(const Rows& logits, double temperature, int64_t top_k, Random* random) {
  std::vector<double> x(static_cast<size_t>(logits.width));
  load(logits.row(0), logits.dtype, logits.width, x.data());
  if (temperature == 0) return static_cast<int32_t>(std::max_element(x.begin(), x.end()) - x.begin());
  std::vector<int32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  const size_t keep = top_k > 0 ? std::min(x.size(), static_cast<size_t>(top_k)) : x.size();
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(keep), order.end(),
                    [&](int32_t a, int32_t b) {
                      const double xa = x[static_cast<size_t>(a)], xb = x[static_cast<size_t>(b)];
                      return xa != xb ? xa > xb : a < b;
                    });
  const double top = x[static_cast<size_t>(order[0])];
  double sum = 0;
  for (size_t i = 0; i < keep; ++i) sum += std::exp((x[static_cast<size_t>(order[i])] - top) / temperature);
  double u = random->uniform() * sum;
  for (size_t i = 0; i < keep; ++i) {
    u -= std::exp((x[static_cast<size_t>(order[i])] - top) / temperature);
    if (u < 0) return order[i];
  }
  return order[0];
}

using Clock = std::chrono::steady_clock;
double seconds_between(Clock::time_point a, Clock::time_point b) { return std::chrono::duration<double>(b - a).count(); }

}  // namespace

int generate_command(int count, char** words) {
  Arguments a("lm generate --model DIR --prompt TEXT [options]",
              "Continues a prompt byte by byte. Text goes to the standard output, figures to the standard error output.");
  a.option("model", "DIR", "", "checkpoint folder");
  a.option("prompt", "TEXT", "", "text to continue");
  a.option("prompt-file", "FILE", "", "file with the text to continue");
  a.option("tokens", "N", "200", "bytes to generate");
  a.option("temperature", "X", "0.8", "0 takes the most likely byte");
  a.option("top-k", "N", "40", "draw from the N most likely bytes; 0: from all");
  a.option("seed", "N", "1", "seed of the draws");
  a.option("piece", "ROWS", "256", "rows of the prompt that are appended at once");
  Machine::add_options(&a);
  if (!a.parse(count, words)) return 0;

  std::string prompt = a.given("prompt-file") ? read_file(a.text("prompt-file")) : a.text("prompt");
  if (prompt.empty()) throw Error("--prompt or --prompt-file is needed, and must not be empty; --help lists the options");
  const int64_t tokens = a.integer("tokens", 0, 1 << 30), piece = a.integer("piece", 1, 1 << 20);
  const int64_t top_k = a.integer("top-k", 0, 1 << 30);
  const double temperature = a.number("temperature", 0, 1000);
  Random random(static_cast<uint64_t>(a.integer("seed", 0, INT64_MAX)), 7);
  Checkpoint checkpoint = load_checkpoint(a.required("model"));
  ModelConfig& config = checkpoint.config;
  if (config.vocab < 256) throw Error("the model's vocabulary is smaller than 256, so that it cannot read bytes");
  const auto prompt_length = static_cast<int64_t>(prompt.size());
  const int64_t length = prompt_length + std::max<int64_t>(tokens, 1);
  // A sequence longer than the levels reach is read through the last one.
  config.absorb = config.levels > 0 && lla_levels_needed(length) > config.levels;

  Machine machine(a);
  Model model(machine.context.get(), machine.threads, config, checkpoint.tensors);
  ModelRun run(model, {1, std::min(piece, prompt_length), false, 1, length});
  std::vector<int32_t> ids;
  for (const char c : prompt) ids.push_back(static_cast<unsigned char>(c));

  const Clock::time_point start = Clock::now();
  Rows logits;
  for (int64_t at = 0; at < prompt_length; at += piece) {
    logits = run.forward(ids.data() + at, 1, std::min(piece, prompt_length - at), nullptr, true);
    run.commit();
  }
  const Clock::time_point prefilled = Clock::now();
  std::fwrite(prompt.data(), 1, prompt.size(), stdout);
  for (int64_t i = 0; i < tokens; ++i) {
    const int32_t next = sample(logits, temperature, top_k, &random);
    std::putchar(next < 256 ? next : '?');
    std::fflush(stdout);
    logits = run.forward(&next, 1, 1, nullptr, true);
    run.commit();
  }
  const Clock::time_point done = Clock::now();
  std::printf("\n");
  std::fflush(stdout);

  int64_t position = 0;
  LM_CALL(lla_state_length, static_cast<const lla_state*>(run.state()), int64_t{0}, &position);
  const double state_kib = static_cast<double>(run.state_bytes(0)) / 1024;
  const double cache_kib = 2.0 * static_cast<double>(config.layers * config.hidden * 4 * position) / 1024;
  std::fprintf(stderr, "prefill: %lld tokens, %.0f tokens/s\n", static_cast<long long>(prompt_length),
               static_cast<double>(prompt_length) / std::max(seconds_between(start, prefilled), 1e-9));
  std::fprintf(stderr, "decode:  %lld tokens, %.0f tokens/s\n", static_cast<long long>(tokens),
               static_cast<double>(tokens) / std::max(seconds_between(prefilled, done), 1e-9));
  std::fprintf(stderr,
               "state at %lld tokens: %.1f KiB; keys and values of a Transformer of this width and length: %.1f KiB\n",
               static_cast<long long>(position), state_kib, cache_kib);
  return 0;
}

}  // namespace lm
