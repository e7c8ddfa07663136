// SPDX-License-Identifier: Apache-2.0
// lm train: trains a byte-level model on text, writes checkpoints, resumes them with the same bits.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "arguments.h"
#include "commands.h"
#include "error.h"
#include "safetensors.h"
#include "training.h"

namespace lm {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Everything that decides the course of a training run. Written with each checkpoint.
struct Plan {
  std::vector<std::string> data;
  int64_t context = 256, batch = 8, steps = 0, warm_up = 40, eval_every = 100, save_every = 200;
  double minutes = 0, passes = 0, learning_rate = 4e-3, weight_decay = 0.1;
  uint64_t seed = 1;

  json to_json() const {
    return {{"data", data},
            {"context", context},
            {"batch", batch},
            {"steps", steps},
            {"warm_up", warm_up},
            {"eval_every", eval_every},
            {"save_every", save_every},
            {"learning_rate", learning_rate},
            {"weight_decay", weight_decay},
            {"seed", seed}};
  }
  void from_json(const json& j) {
    j.at("data").get_to(data);
    j.at("context").get_to(context);
    j.at("batch").get_to(batch);
    j.at("steps").get_to(steps);
    j.at("warm_up").get_to(warm_up);
    j.at("eval_every").get_to(eval_every);
    j.at("save_every").get_to(save_every);
    j.at("learning_rate").get_to(learning_rate);
    j.at("weight_decay").get_to(weight_decay);
    j.at("seed").get_to(seed);
  }
};

void make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) throw Error(path + ": cannot be made: " + std::strerror(errno));
}

// One file holds all that a resumed run needs, so that a crash between two files cannot mix two steps; config.json and
// model.safetensors are what other programs read.
void save(const std::string& folder, const Model& model, AdamW& optimizer, const Plan& plan, int64_t step) {
  TensorFile weights, training;
  weights.tensors = model.tensors();
  weights.metadata = {{"format", "pt"}, {"step", std::to_string(step)}};
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    const Parameter& p = model.parameters()[i];
    training.tensors["weight." + p.info.name] = p.value;
    training.tensors["first." + p.info.name] = optimizer.first()[i];
    training.tensors["second." + p.info.name] = optimizer.second()[i];
  }
  const std::string config = write_config(model.config());
  training.metadata = {{"step", std::to_string(step)}, {"plan", plan.to_json().dump()}, {"config", config}};
  write_file_atomically(folder + "/config.json", config);
  write_safetensors(folder + "/model.safetensors", weights);
  write_safetensors(folder + "/training.safetensors", training);
}

struct Resumed {
  ModelConfig config;
  std::map<std::string, Tensor> weights;
  TensorFile file;
  int64_t step = 0;
};

Resumed load_training(const std::string& folder, Plan* plan) {
  Resumed r;
  const std::string path = folder + "/training.safetensors";
  r.file = read_safetensors(path);
  for (const auto& [name, tensor] : r.file.tensors) {
    if (name.rfind("weight.", 0) == 0) r.weights[name.substr(7)] = tensor;
  }
  try {
    r.config = read_config(r.file.meta("config"), r.weights);
  } catch (const Error& e) {
    throw Error(path + ": " + e.what());
  }
  try {
    plan->from_json(json::parse(r.file.meta("plan")));
    r.step = std::stoll(r.file.meta("step"));
  } catch (const std::exception&) {
    throw Error(path + ": its plan cannot be read");
  }
  return r;
}

// Progress: one line that is rewritten on a terminal, a plain line now and then elsewhere.
class Progress {
 public:
  Progress() : terminal_(::isatty(STDOUT_FILENO) != 0) {}
  void show(int64_t step, int64_t steps, double loss, double rate, double tokens_per_second) {
    if (!terminal_) return;
    constexpr int kWidth = 24;
    const double done = steps > 0 ? static_cast<double>(step) / static_cast<double>(steps) : 0;
    char bar[kWidth + 1];
    for (int i = 0; i < kWidth; ++i) bar[i] = i < std::lround(done * kWidth) ? '#' : '.';
    bar[kWidth] = 0;
    std::printf("\r[%s] step %lld/%lld  loss %.3f  lr %.1e  %.0f tokens/s ", bar, static_cast<long long>(step),
                static_cast<long long>(steps), loss, rate, tokens_per_second);
    std::fflush(stdout);
  }
  void line(const char* text) {
    std::printf("%s%s\n", terminal_ ? "\r\033[K" : "", text);
    std::fflush(stdout);
  }

 private:
  bool terminal_;
};

ModelConfig new_config(const Arguments& a, const Plan& plan) {
  ModelConfig c;
  const std::string block = a.text("block");
  if (block != "mamba2" && block != "gdn") throw Error("--block must be mamba2 or gdn, not '" + block + "'");
  const bool linear = a.flagged("linear");
  c.block = block == "mamba2" ? BlockKind::Mamba2 : BlockKind::GatedDeltaNet;
  c.model_type =
      block == "mamba2" ? (linear ? "mamba2mlp" : "log_linear_mamba2") : (linear ? "gated_deltanet" : "h_gated_deltanet");
  c.vocab = 256;
  c.hidden = a.integer("hidden", 8, 65536);
  c.layers = a.integer("layers", 1, 1000);
  c.heads = a.integer("heads", 1, 4096);
  c.key_dim = a.integer("state", 1, 512);
  c.levels = linear ? 0 : a.integer("levels", 1, 62);
  c.context = plan.context;
  if (!linear && c.levels < lla_levels_needed(plan.context)) {
    throw Error("--levels must be at least " + std::to_string(lla_levels_needed(plan.context)) + " for a context of " +
                std::to_string(plan.context));
  }
  if (c.block == BlockKind::Mamba2) {
    if (2 * c.hidden % c.heads != 0) throw Error("--heads must divide twice --hidden");
    c.value_dim = 2 * c.hidden / c.heads;
    c.groups = 1;
    c.norm_epsilon = 1e-5;
  } else {
    c.value_dim = 2 * c.key_dim;
    c.groups = c.heads;
    c.conv_bias = false;
    c.norm_epsilon = 1e-6;
  }
  c.mlp = a.given("mlp") ? a.integer("mlp", 1, 1 << 20) : 2 * c.hidden;
  // The names of the published files, as reading the config back would set them.
  std::map<std::string, Tensor> shapes;
  if (!linear) {
    const std::string name = c.block == BlockKind::Mamba2 ? "backbone.layers.0.mixer.L" : "model.layers.0.attn.L";
    shapes[name] = Tensor(LLA_F32, {c.heads, c.levels});
  }
  return read_config(write_config(c), shapes);
}

class Trainer {
  static constexpr int64_t kCalibration = 23;  // steps of which all but the first three are timed

 public:
  Trainer(Machine& machine, const ModelConfig& config, const std::map<std::string, Tensor>& weights, const Plan& plan,
          std::string folder)
      : plan_(plan),
        folder_(std::move(folder)),
        text_(read_text(plan.data)),
        model_(machine.context.get(), machine.threads, config, weights),
        optimizer_(model_, optimizer_options(plan)),
        run_(model_, {plan.batch, plan.context, true, 0, 0}) {
    model_.make_gradients(LLA_F32);
  }
  AdamW& optimizer() { return optimizer_; }
  Model& model() { return model_; }
  const Text& text() const { return text_; }

  // From after step `step` to the end of the plan, or to step `stop_after` if that is not 0.
  int train(int64_t step, int64_t stop_after) {
    if (stop_after != 0 && plan_.steps == 0) throw Error("--stop-after needs --steps");
    if (plan_.steps == 0 && most_steps() <= kCalibration) set_steps(most_steps());
    const double bigram = bigram_loss(text_);
    print_start(step, bigram);
    const Clock::time_point start = Clock::now();
    double smooth = 0, window_loss = 0;
    int64_t window_steps = 0, window_first = step;
    Clock::time_point window_start = start;
    double pure_seconds = 0;  // of the calibration steps
    int64_t pure_steps = 0;
    while (plan_.steps == 0 || step < plan_.steps) {
      ++step;
      const Clock::time_point step_start = Clock::now();
      const double rate = learning_rate_at(step, plan_.warm_up, plan_.steps, plan_.learning_rate);
      const double loss = one_step(step, rate);
      if (!std::isfinite(loss))
        throw Error("the loss is no number at step " + std::to_string(step) + "; try a smaller --lr");
      smooth = smooth == 0 ? loss : 0.95 * smooth + 0.05 * loss;
      window_loss += loss;
      ++window_steps;
      if (plan_.steps == 0 && step > 3) {
        pure_seconds += seconds_since(step_start);
        // --minutes: the speed of the first steps tells how many fit, and from then on the number is fixed.
        ++pure_steps;
        if (step == kCalibration) fix_steps(seconds_since(start), pure_seconds / static_cast<double>(pure_steps), step);
      }
      const double elapsed = std::max(seconds_since(window_start), 1e-9);
      progress_.show(step, plan_.steps, smooth, rate,
                     static_cast<double>((step - window_first) * plan_.batch * plan_.context) / elapsed);
      const bool last = plan_.steps != 0 && step == plan_.steps;
      if (step % plan_.eval_every == 0 || last) {
        const double speed = static_cast<double>(window_steps * plan_.batch * plan_.context) / elapsed;
        report(step, window_loss / static_cast<double>(window_steps), rate, speed, seconds_since(start), bigram, last);
        window_loss = 0;
        window_steps = 0;
        window_first = step;
        window_start = Clock::now();
      }
      const bool stop = step == stop_after;
      if ((step % plan_.save_every == 0 && plan_.steps != 0) || last || stop) save(folder_, model_, optimizer_, plan_, step);
      if (stop && !last) {
        progress_.line("stopped as asked; --resume goes on");
        break;
      }
    }
    std::printf("checkpoint: %s (config.json, model.safetensors, training.safetensors)\n", folder_.c_str());
    return 0;
  }

 private:
  static AdamW::Options optimizer_options(const Plan& plan) {
    AdamW::Options o;
    o.weight_decay = plan.weight_decay;
    return o;
  }

  double one_step(int64_t step, double rate) {
    const std::vector<int32_t> windows = random_windows(text_.training, plan_.batch, plan_.context, plan_.seed, step);
    std::vector<int32_t> ids, targets;
    for (int64_t b = 0; b < plan_.batch; ++b) {
      const auto begin = windows.begin() + b * (plan_.context + 1);
      ids.insert(ids.end(), begin, begin + plan_.context);
      targets.insert(targets.end(), begin + 1, begin + plan_.context + 1);
    }
    model_.zero_gradients();
    run_.forward(ids.data(), plan_.batch, plan_.context);
    const double loss = run_.backward(targets.data());
    optimizer_.step(step, rate);
    return loss;
  }

  // Steps after which the text has been read as often as --passes allows: more only teaches it by heart.
  int64_t most_steps() const {
    const double steps =
        plan_.passes * static_cast<double>(text_.training.size()) / static_cast<double>(plan_.batch * plan_.context);
    return std::max<int64_t>(1, static_cast<int64_t>(std::min(steps, 1e15)));
  }

  void set_steps(int64_t steps) {
    plan_.steps = steps;
    plan_.eval_every = std::max<int64_t>(1, (steps + 9) / 10);
    plan_.save_every = plan_.eval_every;
  }

  void fix_steps(double spent, double per_step, int64_t step) {
    // A twentieth of the time is left for evaluation and checkpoints.
    const double left = std::max(0.0, plan_.minutes * 60 - spent) * 0.95;
    const int64_t in_time = step + std::max<int64_t>(1, static_cast<int64_t>(left / per_step));
    set_steps(std::min(in_time, most_steps()));
    char text[160];
    std::snprintf(text, sizeof text, "%.0f ms per step: %lld steps, %s", per_step * 1e3, static_cast<long long>(plan_.steps),
                  plan_.steps == in_time ? "what fits into the time" : "after which the text has been read --passes times");
    progress_.line(text);
  }

  void print_start(int64_t step, double bigram) {
    int64_t parameters = 0;
    for (const Parameter& p : model_.parameters()) parameters += p.value.count();
    const ModelConfig& c = model_.config();
    std::printf("%s: %lld layers, hidden %lld, %lld heads of %lld x %lld, %s, %.2f M parameters, on %s\n",
                c.model_type.c_str(), static_cast<long long>(c.layers), static_cast<long long>(c.hidden),
                static_cast<long long>(c.heads), static_cast<long long>(c.key_dim), static_cast<long long>(c.value_dim),
                c.levels ? (std::to_string(c.levels) + " levels").c_str() : "linear", static_cast<double>(parameters) * 1e-6,
                describe_machine(model_.context()).c_str());
    std::printf("text: %zu bytes for training, %zu held out; byte bigrams reach %.3f nats per byte on the held-out part\n",
                text_.training.size(), text_.held_out.size(), bigram);
    if (step > 0) std::printf("resumed after step %lld\n", static_cast<long long>(step));
    std::fflush(stdout);
  }

  void report(int64_t step, double loss, double rate, double speed, double seconds, double bigram, bool last) {
    // Between reports a sample of the held-out part will do; the final figure is over all of it.
    const Evaluation e =
        evaluate(run_, text_.held_out, plan_.batch, plan_.context, plan_.context, last ? 0 : 4 * plan_.batch);
    char text[200];
    std::snprintf(text, sizeof text, "step %5lld  loss %.3f  held-out %.3f  lr %.1e  %.0f tokens/s  %.0f s",
                  static_cast<long long>(step), loss, e.loss, rate, speed, seconds);
    progress_.line(text);
    if (!last) return;
    std::snprintf(text, sizeof text, "held-out loss %.4f nats per byte (byte bigrams: %.4f), %lld bytes", e.loss, bigram,
                  static_cast<long long>(e.tokens));
    progress_.line(text);
  }

  Plan plan_;
  std::string folder_;
  Text text_;
  Model model_;
  AdamW optimizer_;
  ModelRun run_;
  Progress progress_;
};

}  // namespace

int train_command(int count, char** words) {
  Arguments a("lm train --data FILE [--data FILE ...] --out DIR [options]",
              "Trains a byte-level language model. The last tenth of each file is held out. DIR receives config.json and\n"
              "model.safetensors, by the names of the published model classes, and training.safetensors for --resume.");
  a.option("data", "FILE", "", "text to train on; may be given several times");
  a.option("out", "DIR", "", "folder of the checkpoint");
  a.flag("resume", "go on from the checkpoint in --out, with the same bits as an uninterrupted run");
  a.option("block", "KIND", "mamba2", "mamba2 or gdn");
  a.flag("linear", "the linear model instead of the log-linear one");
  a.option("layers", "N", "2", "layers");
  a.option("hidden", "N", "128", "width of the model");
  a.option("heads", "N", "4", "value heads");
  a.option("state", "N", "64", "key size of a head (gdn: the value size is twice that)");
  a.option("mlp", "N", "", "width of the MLP (default twice the model's)");
  a.option("levels", "N", "15", "level weights per head; 15 serve 16384 tokens");
  a.option("context", "N", "256", "tokens of a training window");
  a.option("batch", "N", "8", "windows per step");
  a.option("steps", "N", "", "steps to train");
  a.option("minutes", "X", "2", "time to train, if --steps is not given");
  a.option("passes", "X", "5", "with --minutes: end sooner when the text has been read so often");
  a.option("lr", "X", "4e-3", "highest learning rate");
  a.option("warm-up", "N", "40", "steps until it is reached");
  a.option("weight-decay", "X", "0.1", "decoupled weight decay of the matrices");
  a.option("eval-every", "N", "100", "steps between two looks at the held-out text (--minutes: a tenth of the run)");
  a.option("save-every", "N", "200", "steps between two checkpoints (--minutes: a tenth of the run)");
  a.option("stop-after", "N", "", "write a checkpoint after step N and stop there");
  Machine::add_options(&a);
  a.option("seed", "N", "1", "seed of initial values and windows");
  if (!a.parse(count, words)) return 0;

  const std::string folder = a.required("out");
  Machine machine(a);
  const int64_t stop_after = a.given("stop-after") ? a.integer("stop-after", 1, int64_t{1} << 40) : 0;
  Plan plan;
  if (a.flagged("resume")) {
    for (const char* fixed : {"block", "linear", "layers", "hidden", "heads", "state", "mlp", "levels", "context", "batch",
                              "minutes", "passes", "lr", "warm-up", "weight-decay", "seed"}) {
      if (a.given(fixed)) throw Error("--" + std::string(fixed) + " cannot change with --resume");
    }
    Resumed resumed = load_training(folder, &plan);
    if (a.given("data")) plan.data = a.all("data");
    // More steps than planned: the schedule then ends later, so that this is a longer run and not the same one.
    if (a.given("steps")) plan.steps = a.integer("steps", 1, int64_t{1} << 40);
    if (resumed.step >= plan.steps)
      throw Error("the run is complete at step " + std::to_string(resumed.step) + "; --steps N makes it longer");
    Trainer trainer(machine, resumed.config, resumed.weights, plan, folder);
    const std::vector<Parameter>& parameters = trainer.model().parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      for (const bool second : {false, true}) {
        const Tensor& t = resumed.file.at((second ? "second." : "first.") + parameters[i].info.name);
        if (t.shape != parameters[i].info.shape || t.dtype != LLA_F32)
          throw Error("the optimizer's state does not fit the model");
        (second ? trainer.optimizer().second() : trainer.optimizer().first())[i] = t;
      }
    }
    return trainer.train(resumed.step, stop_after);
  }

  plan.data = a.all("data");
  if (plan.data.empty()) throw Error("--data is needed; --help lists the options");
  plan.context = a.integer("context", 2, 1 << 20);
  plan.batch = a.integer("batch", 1, 1 << 16);
  if (a.given("steps")) plan.steps = a.integer("steps", 1, int64_t{1} << 40);
  plan.minutes = a.number("minutes", 0.01, 1e6);
  plan.passes = a.number("passes", 0.01, 1e9);
  plan.learning_rate = a.number("lr", 0, 10);
  plan.warm_up = a.integer("warm-up", 0, 1 << 30);
  plan.weight_decay = a.number("weight-decay", 0, 10);
  plan.eval_every = a.integer("eval-every", 1, int64_t{1} << 40);
  plan.save_every = a.integer("save-every", 1, int64_t{1} << 40);
  plan.seed = static_cast<uint64_t>(a.integer("seed", 0, INT64_MAX));
  const ModelConfig config = new_config(a, plan);
  make_folder(folder);
  Trainer trainer(machine, config, initial_parameters(config, plan.seed), plan, folder);
  return trainer.train(0, stop_after);
}

}  // namespace lm
