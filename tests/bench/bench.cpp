// SPDX-License-Identifier: Apache-2.0
// lla-bench: times one mixer through the public C interface and sets it against peaks that it measures on the same machine.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>
#include <nlohmann/json.hpp>

#include "arguments.h"
#include "counts.h"
#include "error.h"
#include "handles.h"
#include "random.h"
#include "safetensors.h"
#include "tensor.h"
#include "threads.h"

namespace bench {
namespace {

using lm::Tensor;
using Clock = std::chrono::steady_clock;

struct Settings {
  Shape shape;
  std::string pass = "forward";
  lla_dtype dtype = LLA_F32;
  int64_t position = 0;
  double seconds = 1;
};

struct Timing {
  double median = 0, fastest = 0;
  int64_t runs = 0;
};

// Median after warm-up; at least 5 runs, then until `seconds` are over.
Timing measure(double seconds, const std::function<void()>& body) {
  for (int i = 0; i < 2; ++i) body();
  std::vector<double> times;
  const Clock::time_point start = Clock::now();
  while (times.size() < 5 ||
         (std::chrono::duration<double>(Clock::now() - start).count() < seconds && times.size() < 100000)) {
    const Clock::time_point begin = Clock::now();
    body();
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), static_cast<int64_t>(times.size())};
}

// Rate of a large LLA_LAYER_PROJECTION: the best that the library's own matrix product does here, in FLOP/s.
double measure_product_peak(lla_context* context, lla_dtype dtype, double seconds) {
  constexpr int64_t kRows = 512, kWidth = 512;
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = LLA_LAYER_PROJECTION;
  d.hidden = kWidth;
  d.outputs = kWidth;
  const lm::Layer layer = lm::make_layer(context, d);
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  limits.max_sequences = 1;
  limits.max_rows = kRows;
  const lm::Batch batch(context, limits);
  const lm::Buffer workspace(lm::workspace_bytes(layer.get(), limits, LLA_PASS_FORWARD));
  std::vector<double> values(static_cast<size_t>(kRows * kWidth));
  lm::Random random(1, 1);
  for (double& v : values) v = random.normal();
  const Tensor x = Tensor::of(values, dtype, {kRows, kWidth}), w = Tensor::of(values, dtype, {kWidth, kWidth});
  const Tensor y(dtype, {kRows, kWidth});
  lla_rows rows = LLA_ROWS_INIT;
  rows.sequences = 1;
  rows.rows_per_sequence = kRows;
  LM_CALL(lla_batch_plan, batch.get(), static_cast<lla_state*>(nullptr), &rows, static_cast<void*>(nullptr));
  const lla_binding io[] = {lla_bind(LLA_X, x.view()), lla_bind(LLA_Y, y.view())};
  const lla_binding weights[] = {lla_bind(LLA_WEIGHT_PROJ, w.view())};
  lla_forward_args a = LLA_FORWARD_ARGS_INIT;
  a.batch = batch.get();
  a.io = io;
  a.io_count = 2;
  a.weights = weights;
  a.weight_count = 1;
  a.workspace = workspace.data();
  a.workspace_bytes = workspace.bytes();
  const Timing t = measure(seconds, [&] { LM_CALL(lla_layer_forward, layer.get(), &a); });
  return 2.0 * kRows * kWidth * kWidth / t.fastest;
}

// Bytes per second of a loop that all threads run over memory far larger than the caches.
double measure_memory_peak(lm::Threads& threads, double seconds) {
  constexpr int64_t kWords = int64_t{1} << 25, kPiece = int64_t{1} << 16;  // 256 MiB
  const lm::Buffer memory(static_cast<size_t>(kWords) * 8);
  auto* words = static_cast<uint64_t*>(memory.data());
  threads.for_pieces(kWords, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) words[i] = static_cast<uint64_t>(i);
  });
  std::vector<uint64_t> sums(static_cast<size_t>(kWords / kPiece));
  const Timing t = measure(seconds, [&] {
    threads.for_pieces(kWords, kPiece, [&](int64_t begin, int64_t end) {
      uint64_t lanes[8] = {};
      for (int64_t i = begin; i < end; i += 8) {
        for (int64_t j = 0; j < 8; ++j) lanes[j] += words[i + j];
      }
      uint64_t sum = 0;
      for (const uint64_t lane : lanes) sum += lane;
      sums[static_cast<size_t>(begin / kPiece)] = sum;
    });
  });
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  if (total != static_cast<uint64_t>(kWords) / 2 * static_cast<uint64_t>(kWords - 1))
    throw lm::Error("the memory loop read something else");
  return static_cast<double>(kWords) * 8 / t.fastest;
}

// The mixer with random data of a plausible kind.
class MixerBench {
 public:
  MixerBench(lla_context* context, const Settings& s) : settings_(s) {
    const Shape& h = s.shape;
    const bool decode = s.pass == "decode";
    rows_ = decode ? 1 : h.tokens;
    const int64_t filled = decode ? s.position : 0, length = filled + (decode ? h.tokens : rows_);
    lla_layer_desc d = LLA_LAYER_DESC_INIT;
    d.kind = LLA_LAYER_MIXER;
    d.mixer = h.delta ? LLA_DELTA_RULE : LLA_SCALAR_GATE;
    d.heads = h.heads;
    d.groups = h.groups;
    d.key_dim = h.key_dim;
    d.value_dim = h.value_dim;
    d.grain = h.grain;
    d.levels = h.linear ? 0 : lla_levels_needed(length);
    d.lambda_form = h.linear ? LLA_LAMBDA_NONE : LLA_LAMBDA_READY;
    d.write_form = h.delta ? LLA_WRITE_READY : LLA_WRITE_NONE;
    layer_ = lm::make_layer(context, d);
    // Decode needs a history: it is appended in pieces of up to 512 rows from the same tensors.
    const int64_t made = decode ? std::clamp<int64_t>(filled, 1, 512) : rows_;
    make_tensors(made, d.levels);
    limits_.max_sequences = h.batch;
    limits_.max_rows = h.batch * made;
    limits_.max_rows_per_sequence = made;
    limits_.max_length = length;
    batch_ = lm::Batch(context, limits_);
    size_t bytes = lm::workspace_bytes(layer_.get(), limits_, LLA_PASS_FORWARD);
    if (!decode) bytes = std::max(bytes, lm::workspace_bytes(layer_.get(), limits_, LLA_PASS_BACKWARD));
    workspace_ = lm::Buffer(bytes);
    const size_t saved = decode ? 0 : lm::saved_bytes(layer_.get(), limits_);
    if (saved) saved_ = lm::Buffer(saved);
    if (!decode) {
      plan(rows_, nullptr);
      return;
    }
    lla_state_desc sd = LLA_STATE_DESC_INIT;
    sd.slots = h.batch;
    sd.max_length = length;
    if (s.dtype == LLA_BF16 || s.dtype == LLA_F16) sd.tail_dtype = s.dtype;
    lla_layer* layers[] = {layer_.get()};
    lla_state* state = nullptr;
    LM_CALL(lla_state_create, layers, int64_t{1}, &sd, static_cast<const lla_block_memory*>(nullptr), int64_t{0}, &state);
    state_.reset(state);
    for (int64_t at = 0; at < filled; at += made) {
      const int64_t n = std::min(made, filled - at);
      plan(n, state_.get());
      forward(n, false);
      LM_CALL(lla_state_commit, state_.get(), batch_.get(), lm::no_index(), static_cast<void*>(nullptr));
    }
  }

  // One timed piece of work.
  void run() {
    if (settings_.pass == "decode") {
      // The row is not committed, so that every run stands at the same position.
      plan(1, state_.get());
      forward(1, false);
    } else if (settings_.pass == "forward") {
      forward(rows_, false);
    } else if (settings_.pass == "backward") {
      backward();
    } else {
      forward(rows_, true);
      backward();
    }
  }
  // What backward alone needs beforehand.
  void prepare() {
    if (settings_.pass == "backward") forward(rows_, true);
  }
  int64_t levels() const { return inputs_.back().role == LLA_LAMBDA ? inputs_.back().value.shape.back() : 0; }

 private:
  struct Input {
    lla_role role;
    Tensor value, gradient;
  };

  void make_tensors(int64_t rows, int64_t levels) {
    const Shape& h = settings_.shape;
    lm::Random random(1, 2);
    const auto add = [&](lla_role role, lla_dtype dtype, std::vector<int64_t> shape, auto value) {
      std::vector<double> values;
      Tensor t(dtype, shape);
      for (int64_t i = 0; i < t.count(); ++i) values.push_back(value());
      t = Tensor::of(values, dtype, shape);
      inputs_.push_back({role, t, settings_.pass == "decode" ? Tensor() : Tensor(LLA_F32, shape)});
    };
    const auto normal = [&] {
      return random.normal() / std::sqrt(static_cast<double>(h.key_dim));
    };  // keys of about length 1
    add(LLA_Q, settings_.dtype, {h.batch, rows, h.groups, h.key_dim}, normal);
    add(LLA_K, settings_.dtype, {h.batch, rows, h.groups, h.key_dim}, normal);
    add(LLA_V, settings_.dtype, {h.batch, rows, h.heads, h.value_dim}, [&] { return random.normal(); });
    add(LLA_GATE, LLA_F32, {h.batch, rows, h.heads}, [&] { return -0.1 * random.uniform(); });
    if (h.delta) add(LLA_WRITE, LLA_F32, {h.batch, rows, h.heads}, [&] { return 0.9 * random.uniform(); });
    if (levels) add(LLA_LAMBDA, LLA_F32, {h.batch, rows, h.heads, levels}, [&] { return random.uniform(); });
    y_ = Tensor(settings_.dtype, {h.batch, rows, h.heads, h.value_dim});
    std::vector<double> values(static_cast<size_t>(y_.count()));
    for (double& v : values) v = random.normal();
    if (settings_.pass != "decode") dy_ = Tensor::of(values, settings_.dtype, y_.shape);
  }

  void plan(int64_t rows, lla_state* state) {
    lla_rows r = LLA_ROWS_INIT;
    r.sequences = settings_.shape.batch;
    r.rows_per_sequence = rows;
    LM_CALL(lla_batch_plan, batch_.get(), state, &r, static_cast<void*>(nullptr));
  }

  static lla_tensor first_rows(const Tensor& t, int64_t rows) {
    lla_tensor view = t.view();
    view.dims[1] = rows;
    return view;
  }

  void forward(int64_t rows, bool save) {
    std::vector<lla_binding> io;
    for (const Input& input : inputs_) io.push_back(lla_bind(input.role, first_rows(input.value, rows)));
    io.push_back(lla_bind(LLA_Y, first_rows(y_, rows)));
    lla_forward_args a = LLA_FORWARD_ARGS_INIT;
    a.batch = batch_.get();
    a.state = state_.get();
    a.io = io.data();
    a.io_count = static_cast<int64_t>(io.size());
    a.workspace = workspace_.data();
    a.workspace_bytes = workspace_.bytes();
    if (save && saved_.bytes()) {
      a.saved = saved_.data();
      a.saved_bytes = saved_.bytes();
    }
    LM_CALL(lla_layer_forward, layer_.get(), &a);
  }

  void backward() {
    std::vector<lla_binding> io, gradients;
    for (const Input& input : inputs_) {
      io.push_back(lla_bind(input.role, input.value.view()));
      gradients.push_back(lla_bind(input.role, input.gradient.view()));
    }
    const lla_binding outputs[] = {lla_bind(LLA_Y, dy_.view())};
    lla_backward_args a = LLA_BACKWARD_ARGS_INIT;
    a.batch = batch_.get();
    a.io = io.data();
    a.io_count = static_cast<int64_t>(io.size());
    a.outputs = outputs;
    a.output_count = 1;
    a.gradients = gradients.data();
    a.gradient_count = static_cast<int64_t>(gradients.size());
    a.workspace = workspace_.data();
    a.workspace_bytes = workspace_.bytes();
    if (saved_.bytes()) {
      a.saved = saved_.data();
      a.saved_bytes = saved_.bytes();
    }
    LM_CALL(lla_layer_backward, layer_.get(), &a);
  }

  Settings settings_;
  int64_t rows_ = 0;
  std::vector<Input> inputs_;
  Tensor y_, dy_;
  lm::Layer layer_;
  lla_batch_limits limits_ = LLA_BATCH_LIMITS_INIT;
  lm::State state_;  // before the batch, which gives its plan back to it
  lm::Batch batch_;
  lm::Buffer workspace_, saved_;
};

std::string context_text(lla_context* context, lla_context_key key) {
  char text[200] = {};
  size_t size = sizeof text;
  LM_CALL(lla_context_query, context, key, static_cast<void*>(text), &size);
  return text;
}

int run(int argc, char** argv) {
  lm::Arguments a(
      "lla-bench [options]",
      "Times one mixer. Peaks are measured in the same run: of arithmetic, the rate of a 512 x 512 x 512 projection by\n"
      "the same library and number of threads (not the processor's theoretical peak); of memory, a read loop.");
  a.option("mixer", "NAME", "scalar", "scalar or delta");
  a.flag("linear", "the linear model, without levels");
  a.option("batch", "N", "1", "sequences");
  a.option("tokens", "N", "2048", "tokens of a sequence (decode: 1 at a time)");
  a.option("heads", "N", "8", "value heads");
  a.option("groups", "N", "1", "key/query groups");
  a.option("dk", "N", "128", "key size");
  a.option("dv", "N", "64", "value size");
  a.option("dtype", "TYPE", "f32", "f32, bf16 or f16");
  a.option("pass", "NAME", "forward", "forward, backward, both or decode");
  a.option("position", "P", "1000", "decode: tokens of history");
  a.option("threads", "N", "1", "threads");
  a.option("grain", "C", "64", "rows of a chunk");
  a.option("backend", "NAME", "cpu", "cpu or reference");
  a.option("seconds", "X", "1", "time to measure for");
  a.option("json", "FILE", "", "also write the figures as JSON");
  if (!a.parse(argc - 1, argv + 1)) return 0;

  Settings s;
  Shape& h = s.shape;
  const std::string mixer = a.text("mixer"), backend = a.text("backend");
  if (mixer != "scalar" && mixer != "delta") throw lm::Error("--mixer must be scalar or delta, not '" + mixer + "'");
  if (backend != "cpu" && backend != "reference")
    throw lm::Error("--backend must be cpu or reference, not '" + backend + "'");
  h.delta = mixer == "delta";
  h.linear = a.flagged("linear");
  h.batch = a.integer("batch", 1, 1 << 20);
  h.tokens = a.integer("tokens", 1, 1 << 26);
  h.heads = a.integer("heads", 1, 4096);
  h.groups = a.integer("groups", 1, 4096);
  if (h.heads % h.groups != 0) throw lm::Error("--groups must divide --heads");
  h.key_dim = a.integer("dk", 1, 512);
  h.value_dim = a.integer("dv", 1, 512);
  h.grain = a.integer("grain", 1, 4096);
  s.dtype = lm::dtype_by_name(a.text("dtype"));
  if (s.dtype == LLA_DTYPE_DEFAULT || s.dtype == LLA_F64) throw lm::Error("--dtype must be f32, bf16 or f16");
  s.pass = a.text("pass");
  if (s.pass != "forward" && s.pass != "backward" && s.pass != "both" && s.pass != "decode") {
    throw lm::Error("--pass must be forward, backward, both or decode, not '" + s.pass + "'");
  }
  s.position = a.integer("position", 0, 1 << 30);
  s.seconds = a.number("seconds", 0, 3600);
  if (s.pass == "decode") h.tokens = 1;

  lm::Threads threads(static_cast<int32_t>(a.integer("threads", 1, 1024)));
  const lla_parallel hook = threads.hook();
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = backend == "cpu" ? LLA_BACKEND_CPU : LLA_BACKEND_REFERENCE;
  options.parallel = &hook;
  const lm::Context context = lm::make_context(options);

  const double product_peak = measure_product_peak(context.get(), s.dtype, std::min(s.seconds, 0.5));
  const double memory_peak = measure_memory_peak(threads, std::min(s.seconds, 0.5));
  MixerBench mixer_bench(context.get(), s);
  mixer_bench.prepare();
  const Timing t = measure(s.seconds, [&] { mixer_bench.run(); });
  const Counts counts =
      count_work(h, s.pass, s.position, static_cast<int64_t>(lla_dtype_size(s.dtype)), mixer_bench.levels());
  const double flop_rate = counts.flops / t.median, byte_rate = counts.bytes / t.median;
  const int64_t tokens = h.batch * h.tokens;

  std::printf(
      "%s%s %s, batch %lld, %lld tokens%s, %lld heads, %lld groups, dk %lld, dv %lld, grain %lld, %s, %s (%s), %d threads\n",
      mixer.c_str(), h.linear ? " linear" : "", s.pass.c_str(), static_cast<long long>(h.batch),
      static_cast<long long>(h.tokens), s.pass == "decode" ? (" at position " + std::to_string(s.position)).c_str() : "",
      static_cast<long long>(h.heads), static_cast<long long>(h.groups), static_cast<long long>(h.key_dim),
      static_cast<long long>(h.value_dim), static_cast<long long>(h.grain), lm::dtype_name(s.dtype), backend.c_str(),
      context_text(context.get(), LLA_CONTEXT_ISA_NAME).c_str(), threads.count());
  std::printf("time       %.3f ms (median of %lld, fastest %.3f), %.0f tokens/s\n", t.median * 1e3,
              static_cast<long long>(t.runs), t.fastest * 1e3, static_cast<double>(tokens) / t.median);
  std::printf("arithmetic %.3f GFLOP counted, %.1f GFLOP/s, %.0f %% of the %.1f GFLOP/s of a 512 x 512 x 512 projection\n",
              counts.flops * 1e-9, flop_rate * 1e-9, 100 * flop_rate / product_peak, product_peak * 1e-9);
  std::printf("memory     %.3f MB at least, %.2f GB/s, %.0f %% of the %.1f GB/s of a read loop\n", counts.bytes * 1e-6,
              byte_rate * 1e-9, 100 * byte_rate / memory_peak, memory_peak * 1e-9);
  if (byte_rate > memory_peak)
    std::printf("           (more than 100 %%: the working set stayed in the caches between runs)\n");
  if (a.given("json")) {
    const nlohmann::json j = {{"mixer", mixer},
                              {"linear", h.linear},
                              {"pass", s.pass},
                              {"batch", h.batch},
                              {"tokens", h.tokens},
                              {"position", s.position},
                              {"heads", h.heads},
                              {"groups", h.groups},
                              {"dk", h.key_dim},
                              {"dv", h.value_dim},
                              {"grain", h.grain},
                              {"levels", mixer_bench.levels()},
                              {"dtype", lm::dtype_name(s.dtype)},
                              {"backend", backend},
                              {"isa", context_text(context.get(), LLA_CONTEXT_ISA_NAME)},
                              {"device", context_text(context.get(), LLA_CONTEXT_DEVICE_NAME)},
                              {"threads", threads.count()},
                              {"version", lla_version_string()},
                              {"source", lla_source_id()},
                              {"runs", t.runs},
                              {"median_seconds", t.median},
                              {"fastest_seconds", t.fastest},
                              {"tokens_per_second", static_cast<double>(tokens) / t.median},
                              {"flops", counts.flops},
                              {"bytes", counts.bytes},
                              {"flops_per_second", flop_rate},
                              {"bytes_per_second", byte_rate},
                              {"projection_flops_per_second", product_peak},
                              {"read_bytes_per_second", memory_peak}};
    lm::write_file_atomically(a.text("json"), j.dump(2) + "\n");
  }
  return 0;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  try {
    return bench::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "lla-bench: %s\n", e.what());
    return 1;
  }
}
