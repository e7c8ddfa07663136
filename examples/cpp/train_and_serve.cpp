// SPDX-License-Identifier: Apache-2.0
// Trains a small model on the text "hello ", then serves it: prompt, decoding, a fork, and a slot that is saved and loaded.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <lla/lla.hpp>
#include <string>
#include <vector>

namespace {

const std::string kAlphabet = "helo ", kText = "hello ";
constexpr std::int64_t kHeads = 2, kDim = 8, kRows = 192, kSteps = 150, kMaxLength = 1024, kMaxLevels = 11;
const lla::tag kTag{"hello model"};

using values = std::vector<float>;
using tokens = std::vector<std::size_t>;

tokens text_tokens(std::size_t count, std::size_t start = 0) {
  tokens result;
  for (std::size_t i = 0; i < count; ++i) result.push_back(kAlphabet.find(kText[(start + i) % kText.size()]));
  return result;
}

void require(bool condition, const char *what) {
  std::printf("%-60s %s\n", what, condition ? "ok" : "NO");
  if (!condition) std::exit(1);
}

// Four tables give each token its q, k, v and lambda; a mixer looks back; a matrix turns its output into scores of the next
// token.
class model {
 public:
  explicit model(const lla::context &context) {
    lla::layer_desc description;
    description.kind = LLA_LAYER_MIXER;
    description.mixer = LLA_SCALAR_GATE;
    description.heads = kHeads;
    description.key_dim = description.value_dim = kDim;
    description.lambda_form = LLA_LAMBDA_READY;
    description.levels = kMaxLevels;
    layer_ = lla::layer(context, description);
    for (table &t : tables_) {
      t.value.resize(kAlphabet.size() * static_cast<std::size_t>(kHeads * t.width));
      for (float &x : t.value) x = t.role == LLA_LAMBDA ? 1.0f : noise();
    }
    head_.resize(kAlphabet.size() * kOutput);
    for (float &x : head_) x = noise();
  }
  const lla::layer &layer() const { return layer_; }

  // The outputs of rows that the batch has planned.
  values forward(lla::batch &batch, const tokens &rows) {
    const std::int64_t count = static_cast<std::int64_t>(rows.size());
    values y(rows.size() * kOutput);
    std::vector<lla_binding> io = inputs(rows);
    io.push_back(lla::bind(LLA_Y, y.data(), {count, kHeads, kDim}));
    layer_.forward(batch, io);
    return y;
  }

  // Scores of what may follow a row.
  values scores(const float *y) const {
    values result(kAlphabet.size());
    for (std::size_t i = 0; i < result.size(); ++i) {
      for (std::size_t j = 0; j < kOutput; ++j) result[i] += head_[i * kOutput + j] * y[j];
    }
    return result;
  }

  // One step down the gradient of the cross entropy; returns the loss before it.
  double step(lla::batch &batch, const tokens &rows, const tokens &targets, float rate) {
    const std::int64_t count = static_cast<std::int64_t>(rows.size());
    const values y = forward(batch, rows);
    values dy(y.size()), new_head = head_;
    double loss = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      values p = scores(&y[r * kOutput]);
      const float largest = *std::max_element(p.begin(), p.end());
      float sum = 0;
      for (float &x : p) sum += x = std::exp(x - largest);
      for (std::size_t i = 0; i < p.size(); ++i) {
        p[i] /= sum;
        if (i == targets[r]) loss -= std::log(p[i]) / static_cast<double>(count);
        const float gradient = (p[i] - (i == targets[r] ? 1.0f : 0.0f)) / static_cast<float>(count);
        for (std::size_t j = 0; j < kOutput; ++j) {
          dy[r * kOutput + j] += gradient * head_[i * kOutput + j];
          new_head[i * kOutput + j] -= rate * gradient * y[r * kOutput + j];
        }
      }
    }
    head_ = new_head;

    const std::vector<lla_binding> io = inputs(rows);
    const lla_binding output[] = {lla::bind(LLA_Y, dy.data(), {count, kHeads, kDim})};
    std::vector<lla_binding> gradients;
    for (table &t : tables_) {
      t.gradient.resize(t.rows.size());
      gradients.push_back(lla::bind(t.role, t.gradient.data(), {count, kHeads, t.width}));
    }
    layer_.backward(batch, io, {}, output, gradients);
    for (table &t : tables_) {
      const std::size_t width = static_cast<std::size_t>(kHeads * t.width);
      for (std::size_t i = 0; i < t.gradient.size(); ++i)
        t.value[rows[i / width] * width + i % width] -= rate * t.gradient[i];
    }
    return loss;
  }

  static constexpr std::size_t kOutput = kHeads * kDim;

 private:
  struct table {
    lla_role role;
    std::int64_t width;
    values value, rows, gradient;
  };

  float noise() {
    seed_ = seed_ * 1664525u + 1013904223u;
    return static_cast<float>(seed_ >> 8) / 16777216.0f - 0.5f;
  }

  // Looks the rows' inputs up.
  std::vector<lla_binding> inputs(const tokens &rows) {
    const std::int64_t count = static_cast<std::int64_t>(rows.size());
    std::vector<lla_binding> io;
    for (table &t : tables_) {
      const std::size_t width = static_cast<std::size_t>(kHeads * t.width);
      t.rows.resize(rows.size() * width);
      for (std::size_t i = 0; i < t.rows.size(); ++i) t.rows[i] = t.value[rows[i / width] * width + i % width];
      io.push_back(lla::bind(t.role, t.rows.data(), {count, kHeads, t.width}));
    }
    gate_.assign(rows.size() * kHeads, -0.1f);
    io.push_back(lla::bind(LLA_GATE, gate_.data(), {count, kHeads}));
    return io;
  }

  lla::layer layer_;
  std::array<table, 4> tables_{{{LLA_Q, kDim, {}, {}, {}},
                                {LLA_K, kDim, {}, {}, {}},
                                {LLA_V, kDim, {}, {}, {}},
                                {LLA_LAMBDA, kMaxLevels, {}, {}, {}}}};
  values head_, gate_;
  std::uint32_t seed_ = 1;
};

// Appends rows to slots of a state.
class server {
 public:
  server(const lla::context &context, model &served, std::int64_t slots) : model_(served) {
    lla::state_desc description;
    description.slots = slots;
    description.max_length = kMaxLength;
    state_ = lla::state({&served.layer(), 1}, description);
    lla::batch_limits limits;
    limits.max_sequences = 1;
    limits.max_rows = 128;
    batch_ = lla::batch(context, limits);
  }
  lla::state &state() { return state_; }

  // Appends tokens; returns the scores of what may follow the last one.
  values append(std::int64_t slot, const tokens &rows) {
    lla::rows step;
    step.sequences = 1;
    step.rows_per_sequence = static_cast<std::int64_t>(rows.size());
    step.slot_in = lla::indices(&slot);
    batch_.plan(state_, step);
    const values y = model_.forward(batch_, rows);
    state_.commit(batch_);
    return model_.scores(&y[y.size() - model::kOutput]);
  }

  // Continues a slot by its likeliest tokens.
  std::string decode(std::int64_t slot, values &scores, int count) {
    std::string text;
    for (int i = 0; i < count; ++i) {
      const tokens next = {static_cast<std::size_t>(std::max_element(scores.begin(), scores.end()) - scores.begin())};
      text += kAlphabet[next[0]];
      scores = append(slot, next);
    }
    return text;
  }

 private:
  model &model_;
  lla::state state_;
  lla::batch batch_;
};

void run() {
  lla::context_options options;
  options.backend = LLA_BACKEND_CPU;  // the tensors are host memory
  options.threads = 2;
  const lla::context context(options);
  model trained(context);

  lla::batch_limits limits;
  limits.max_sequences = 1;
  limits.max_rows = limits.max_length = kRows;
  lla::batch batch(context, limits);
  lla::rows rows;
  rows.sequences = 1;
  rows.rows_per_sequence = kRows;
  batch.plan(lla::state(), rows);  // once: every step of training has the same rows, and no history
  const tokens inputs = text_tokens(kRows), targets = text_tokens(kRows, 1);
  double first = 0, last = 0;
  for (int i = 0; i < kSteps; ++i) {
    last = trained.step(batch, inputs, targets, 0.3f);
    if (i == 0) first = last;
  }
  std::printf("lla %s: loss %.3f, after %d steps %.3f\n", lla_version_string(), first, static_cast<int>(kSteps), last);
  require(last < 0.1 * first, "the loss falls");

  server one(context, trained, 2), other(context, trained, 1);
  values scores = one.append(0, text_tokens(100)), scores_fork = scores, scores_loaded = scores;
  require(one.state().length(0) == 100, "the prompt is in slot 0");
  one.state().fork(0, 1);

  const lla::host_memory image = one.state().save(0, kTag);
  const char *path = "lla_slot_cpp.bin";
  std::ofstream(path, std::ios::binary).write(image.data(), static_cast<std::streamsize>(image.size()));
  std::vector<char> read;
  {
    std::ifstream file(path, std::ios::binary);
    read.assign(std::istreambuf_iterator<char>(file), {});
  }
  std::remove(path);
  other.state().load(0, read, kTag);

  const std::string text = one.decode(0, scores, 30);
  std::printf("\"...hell\" goes on: \"%s\"\n", text.c_str());
  require(text == "o hello hello hello hello hell", "it goes on as it was taught");
  require(one.decode(1, scores_fork, 30) == text && scores_fork == scores, "the fork gives the same, bit by bit");
  require(other.decode(0, scores_loaded, 30) == text && scores_loaded == scores,
          "so does the slot that was saved and loaded");

  read[read.size() / 2] ^= 1;
  lla::error reason;
  require(other.state().load(0, read, kTag, reason) == LLA_DATA_CORRUPT, "a damaged image is refused by a status");
  try {
    other.state().truncate(0, 1000);
    require(false, "beyond the end");
  } catch (const lla::failure &failure) {
    std::printf("%s: %s\n", failure.name(), failure.what());
    require(failure.status() == LLA_INVALID_ARGUMENT, "or by an exception");
  }
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception &problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
  }
  return 0;
}
