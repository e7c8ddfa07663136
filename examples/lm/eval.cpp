// SPDX-License-Identifier: Apache-2.0
// lm eval: loss of one or two models on a text, and how it falls with the position in the context.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "arguments.h"
#include "commands.h"
#include "error.h"
#include "safetensors.h"
#include "svg.h"
#include "training.h"

namespace lm {
namespace {

struct Bucket {
  int64_t begin, end;  // positions
};

// Buckets of growing width: `per_octave` of them from each power of two to the next.
std::vector<Bucket> position_buckets(int64_t length, int per_octave) {
  std::vector<Bucket> buckets;
  int64_t begin = 0;
  for (int k = 0; begin < length; ++k) {
    const auto edge = static_cast<int64_t>(std::ceil(8 * std::exp2(static_cast<double>(k) / per_octave)));
    const int64_t end = std::min(edge, length);
    if (end > begin) buckets.push_back({begin, end});
    begin = std::max(begin, end);
  }
  return buckets;
}

double mean_loss(const Evaluation& e, const Bucket& bucket) {
  double sum = 0;
  int64_t count = 0;
  for (int64_t i = bucket.begin; i < bucket.end; ++i) {
    const double x = e.by_position[static_cast<size_t>(i)];
    if (std::isnan(x)) continue;
    sum += x;
    ++count;
  }
  return count ? sum / static_cast<double>(count) : NAN;
}

std::string label(const ModelConfig& c) {
  return std::string(c.levels ? "log-linear " : "linear ") + (c.block == BlockKind::Mamba2 ? "Mamba-2" : "Gated DeltaNet");
}

}  // namespace

int eval_command(int count, char** words) {
  Arguments a(
      "lm eval --model DIR [--model DIR2 ...] --data FILE [--data FILE ...] [options]",
      "Prints the loss of models on a text, as a whole and by position in the context. Of each file the last tenth is\n"
      "read, which lm train holds out.");
  a.option("model", "DIR", "", "checkpoint folder; several are compared side by side");
  a.option("data", "FILE", "", "text; may be given several times");
  a.flag("whole", "read the whole files, not the last tenth");
  a.option("length", "N", "", "tokens of a window (default: the first model's training context)");
  a.option("stride", "N", "", "distance of the windows for the means by position (default: such that there are 128)");
  a.option("batch", "N", "4", "windows at once");
  a.option("svg", "FILE", "", "also draw the loss by position");
  Machine::add_options(&a);
  if (!a.parse(count, words)) return 0;

  const std::vector<std::string> folders = a.all("model");
  if (folders.empty()) throw Error("--model is needed; --help lists the options");
  Text text = read_text(a.all("data"));
  if (a.flagged("whole")) text.held_out = text.training + text.held_out;
  Machine machine(a);
  const int64_t batch = a.integer("batch", 1, 4096);

  std::vector<std::string> names;
  std::vector<Evaluation> results;  // by position
  int64_t length = 0, stride = 0;
  for (const std::string& folder : folders) {
    Checkpoint checkpoint = load_checkpoint(folder);
    if (checkpoint.config.vocab < 256)
      throw Error(folder + ": its vocabulary is smaller than 256, so that it cannot read bytes");
    if (length == 0) length = checkpoint.config.context > 0 ? checkpoint.config.context : 1024;
    if (a.given("length")) length = a.integer("length", 2, 1 << 24);
    checkpoint.config.absorb = checkpoint.config.levels > 0 && lla_levels_needed(length) > checkpoint.config.levels;
    Model model(machine.context.get(), machine.threads, checkpoint.config, checkpoint.tensors);
    ModelRun run(model, {batch, length, false, 0, 0});
    stride = a.given("stride") ? a.integer("stride", 1, 1 << 24)
                               : std::clamp<int64_t>(static_cast<int64_t>(text.held_out.size()) / 128, 1, length);
    const Evaluation whole = evaluate(run, text.held_out, batch, length, length, 0);
    results.push_back(stride == length ? whole : evaluate(run, text.held_out, batch, length, stride, 0));
    names.push_back(label(checkpoint.config));
    std::printf("%s: %s: held-out loss %.4f nats per byte (%.4f bits), %lld bytes, windows of %lld\n", folder.c_str(),
                names.back().c_str(), whole.loss, whole.loss / std::log(2.0), static_cast<long long>(whole.tokens),
                static_cast<long long>(length));
  }

  // Models of one kind are told apart by their folders.
  std::vector<std::string> sorted = names;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) names = folders;

  std::printf("\nby position, over windows that begin every %lld bytes\n%-16s", static_cast<long long>(stride), "position");
  for (const std::string& name : names) std::printf("  %24s", name.c_str());
  std::printf("\n");
  for (const Bucket& bucket : position_buckets(length, 1)) {
    char range[40];
    std::snprintf(range, sizeof range, "%lld-%lld", static_cast<long long>(bucket.begin),
                  static_cast<long long>(bucket.end - 1));
    std::printf("%-16s", range);
    for (const Evaluation& e : results) std::printf("  %24.4f", mean_loss(e, bucket));
    std::printf("\n");
  }

  if (a.given("svg")) {
    Plot plot;
    plot.title = "Held-out loss by position in the context";
    plot.x_label = "position (bytes)";
    plot.y_label = "loss (nats per byte)";
    plot.log2_x = true;
    for (size_t i = 0; i < results.size(); ++i) {
      Series series{names[i], {}};
      for (const Bucket& bucket : position_buckets(length, 2)) {
        const double y = mean_loss(results[i], bucket);
        if (!std::isnan(y)) series.points.emplace_back(0.5 * static_cast<double>(bucket.begin + bucket.end), y);
      }
      plot.series.push_back(std::move(series));
    }
    write_file_atomically(a.text("svg"), svg_plot(plot));
    std::printf("\nplot: %s\n", a.text("svg").c_str());
  }
  return 0;
}

}  // namespace lm
