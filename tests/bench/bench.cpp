// SPDX-License-Identifier: Apache-2.0
// lla-bench: times one mixer through the public C interface and sets it against peaks that it measures on the same machine.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>

#include "arguments.h"
#include "counts.h"
#include "error.h"
#include "handles.h"
#include "peaks.h"
#include "projection_bench.h"
#include "random.h"
#include "safetensors.h"
#include "tensor.h"
#include "threads.h"
#include "timing.h"

namespace bench {
namespace {

using lm::Tensor;

struct Settings {
  Shape shape;
  std::string pass = "forward";
  lla_dtype dtype = LLA_F32;
  int64_t position = 0;
  double seconds = 1;

  bool decodes() const { return pass == "decode" || pass == "checks"; }
};

constexpr int kChecks = 1000;  // calls in one timed run of --pass checks

// The mixer with random data of a plausible kind.
class MixerBench {
 public:
  MixerBench(lla_context* context, const Settings& s) : settings_(s) {
    const Shape& h = s.shape;
    const bool decode = s.decodes();
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
    // Decode needs a history: one sequence gets it, in pieces of about 512 rows from the same tensors, the others a copy.
    const int64_t made = !decode ? rows_ : (std::clamp<int64_t>(filled, 1, 512) + h.batch - 1) / h.batch;
    make_tensors(made, d.levels);
    limits_.max_sequences = h.batch;
    limits_.max_rows = h.batch * made;
    limits_.max_rows_per_sequence = decode ? h.batch * made : made;
    limits_.max_length = length;
    batch_ = lm::Batch(context, limits_);
    size_t bytes = lm::workspace_bytes(layer_.get(), limits_, LLA_PASS_FORWARD);
    const bool trains = s.pass == "backward" || s.pass == "both";
    if (trains) bytes = std::max(bytes, lm::workspace_bytes(layer_.get(), limits_, LLA_PASS_BACKWARD));
    workspace_ = lm::Buffer(bytes);
    const size_t saved = !trains ? 0 : lm::saved_bytes(layer_.get(), limits_);
    if (saved) saved_ = lm::Buffer(saved);
    if (!decode) {
      plan(h.batch, rows_, nullptr);
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
    for (int64_t at = 0; at < filled; at += h.batch * made) {
      const int64_t n = std::min(h.batch * made, filled - at);
      plan(1, n, state);
      forward(1, n, false);
      LM_CALL(lla_state_commit, state, batch_.get(), lm::no_index(), static_cast<void*>(nullptr));
    }
    if (h.batch > 1) copy_first_slot();
  }

  // One timed piece of work.
  void run() {
    if (settings_.pass == "checks") {
      for (int i = 0; i < kChecks; ++i) check();
    } else if (settings_.pass == "decode") {
      // The row is not committed, so that every run stands at the same position.
      plan(settings_.shape.batch, 1, state_.get());
      forward(settings_.shape.batch, 1, false);
    } else if (settings_.pass == "forward") {
      forward(settings_.shape.batch, rows_, false);
    } else if (settings_.pass == "backward") {
      backward();
    } else {
      forward(settings_.shape.batch, rows_, true);
      backward();
    }
  }
  // What backward alone needs beforehand.
  void prepare() {
    if (settings_.pass == "backward") forward(settings_.shape.batch, rows_, true);
    if (settings_.pass != "checks") return;
    plan(settings_.shape.batch, 1, state_.get());
    checked_io_ = bindings(settings_.shape.batch, 1);
  }
  // What a sequence's state holds.
  int64_t state_bytes() const {
    int64_t bytes = 0;
    if (state_) LM_CALL(lla_state_query, state_.get(), LLA_STATE_SLOT_BYTES, int64_t{0}, &bytes);
    return bytes;
  }
  size_t workspace_bytes() const { return workspace_.bytes(); }
  size_t saved_bytes() const { return saved_.bytes(); }
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
      inputs_.push_back({role, t, settings_.decodes() ? Tensor() : Tensor(LLA_F32, shape)});
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
    if (!settings_.decodes()) dy_ = Tensor::of(values, settings_.dtype, y_.shape);
  }

  void copy_first_slot() {
    void* const no_stream = nullptr;
    size_t bytes = 0;
    LM_CALL(lla_state_export_size, state_.get(), int64_t{0}, &bytes);
    const lm::Buffer image(bytes);
    LM_CALL(lla_state_pack, state_.get(), int64_t{0}, image.data(), bytes, no_stream);
    LM_CALL(lla_state_seal, image.data(), bytes, static_cast<const char*>(nullptr));
    for (int64_t slot = 1; slot < settings_.shape.batch; ++slot) {
      LM_CALL(lla_state_unpack, state_.get(), slot, image.data(), bytes, no_stream);
    }
  }

  void plan(int64_t sequences, int64_t rows, lla_state* state) {
    lla_rows r = LLA_ROWS_INIT;
    r.sequences = sequences;
    r.rows_per_sequence = rows;
    LM_CALL(lla_batch_plan, batch_.get(), state, &r, static_cast<void*>(nullptr));
  }

  static lla_tensor first_rows(const Tensor& t, int64_t sequences, int64_t rows) {
    lla_tensor view = t.view();
    view.dims[0] = sequences;
    view.dims[1] = rows;
    return view;
  }

  std::vector<lla_binding> bindings(int64_t sequences, int64_t rows) const {
    std::vector<lla_binding> io;
    for (const Input& input : inputs_) io.push_back(lla_bind(input.role, first_rows(input.value, sequences, rows)));
    io.push_back(lla_bind(LLA_Y, first_rows(y_, sequences, rows)));
    return io;
  }

  lla_forward_args arguments(const std::vector<lla_binding>& io) const {
    lla_forward_args a = LLA_FORWARD_ARGS_INIT;
    a.batch = batch_.get();
    a.state = state_.get();
    a.io = io.data();
    a.io_count = static_cast<int64_t>(io.size());
    a.workspace = workspace_.data();
    a.workspace_bytes = workspace_.bytes();
    return a;
  }

  // All that a step does before its tasks: the arguments are checked and the tasks prepared.
  void check() {
    const lla_forward_args a = arguments(checked_io_);
    lla_tasks* tasks = nullptr;
    LM_CALL(lla_layer_forward_tasks, layer_.get(), &a, &tasks);
  }

  void forward(int64_t sequences, int64_t rows, bool save) {
    const std::vector<lla_binding> io = bindings(sequences, rows);
    lla_forward_args a = arguments(io);
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
  std::vector<lla_binding> checked_io_;  // of --pass checks
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

struct Peaks {
  double multiply_add = 0, projection = 0, memory = 0;  // per second; 0: not measured
};

Peaks measure_peaks(lla_context* context, lm::Threads& threads, const Settings& s) {
  const std::string isa = context_text(context, LLA_CONTEXT_ISA_NAME);
  const double seconds = std::min(s.seconds, 0.5);
  constexpr int64_t kSize = 512;
  Peaks p;
  p.multiply_add = measure_multiply_add_peak(threads, isa, seconds);
  p.projection = 2.0 * kSize * kSize * kSize / measure_projection(context, s.dtype, kSize, kSize, kSize, seconds).fastest;
  p.memory = measure_memory_peak(threads, isa, seconds);
  return p;
}

void print_share(double rate, double peak, const char* of) {
  if (peak > 0) std::printf(", %.0f %% of %.1f (%s)", 100 * rate / peak, peak * 1e-9, of);
}

void print_figures(const Timing& t, const Counts& counts, int64_t tokens, const Peaks& peaks) {
  std::printf("time       %.4g ms (median of %lld, fastest %.4g), %.0f tokens/s; processor time at least %.4g ms\n",
              t.median * 1e3, static_cast<long long>(t.runs), t.fastest * 1e3, static_cast<double>(tokens) / t.median,
              t.processor * 1e3);
  const double flop_rate = counts.flops / t.median, byte_rate = counts.bytes / t.median;
  std::printf("arithmetic %.3f GFLOP counted, %.1f GFLOP/s", counts.flops * 1e-9, flop_rate * 1e-9);
  print_share(flop_rate, peaks.multiply_add, "multiply-adds in registers");
  print_share(flop_rate, peaks.projection, "projection 512 x 512 x 512");
  std::printf("\nmemory     %.3f MB at least, %.2f GB/s", counts.bytes * 1e-6, byte_rate * 1e-9);
  print_share(byte_rate, peaks.memory, "read loop");
  std::printf("\n");
  if (peaks.memory > 0 && byte_rate > peaks.memory)
    std::printf("           (more than 100 %%: the working set stayed in the caches between runs)\n");
}

nlohmann::json figures_of(const Timing& t, const Counts& counts, int64_t tokens, const Peaks& peaks) {
  return {{"runs", t.runs},
          {"median_seconds", t.median},
          {"fastest_seconds", t.fastest},
          {"processor_seconds", t.processor},
          {"tokens_per_second", static_cast<double>(tokens) / t.median},
          {"flops", counts.flops},
          {"bytes", counts.bytes},
          {"flops_per_second", counts.flops / t.median},
          {"bytes_per_second", counts.bytes / t.median},
          {"multiply_add_flops_per_second", peaks.multiply_add},
          {"projection_flops_per_second", peaks.projection},
          {"read_bytes_per_second", peaks.memory}};
}

int run(int argc, char** argv) {
  lm::Arguments a("lla-bench [options]",
                  "Times one mixer or one projection. Peaks are measured in the same run: of arithmetic, multiply-adds in "
                  "registers and a\n"
                  "512 x 512 x 512 projection by the same library and number of threads; of memory, a read loop.");
  a.option("mixer", "NAME", "scalar", "scalar, delta, or projection (y = x W^T alone)");
  a.flag("linear", "the linear model, without levels");
  a.option("batch", "N", "1", "sequences");
  a.option("tokens", "N", "2048", "tokens of a sequence (decode: 1 at a time), rows of a projection");
  a.option("heads", "N", "8", "value heads");
  a.option("groups", "N", "1", "key/query groups");
  a.option("dk", "N", "128", "key size");
  a.option("dv", "N", "64", "value size");
  a.option("inputs", "N", "1536", "projection: columns of x");
  a.option("outputs", "N", "6448", "projection: columns of y");
  a.option("dtype", "TYPE", "f32", "f32, bf16 or f16");
  a.option("pass", "NAME", "forward", "forward, backward, both, decode, or checks (a decode step without its tasks)");
  a.option("position", "P", "1000", "decode: tokens of history");
  a.option("threads", "N", "1", "threads");
  a.option("grain", "C", "64", "rows of a chunk");
  a.option("backend", "NAME", "cpu", "cpu or reference");
  a.option("seconds", "X", "1", "time to measure for");
  a.flag("no-peaks", "measure no peaks");
  a.option("json", "FILE", "", "also write the figures as JSON");
  if (!a.parse(argc - 1, argv + 1)) return 0;

  Settings s;
  Shape& h = s.shape;
  const std::string mixer = a.text("mixer"), backend = a.text("backend");
  if (mixer != "scalar" && mixer != "delta" && mixer != "projection")
    throw lm::Error("--mixer must be scalar, delta or projection, not '" + mixer + "'");
  if (backend != "cpu" && backend != "reference")
    throw lm::Error("--backend must be cpu or reference, not '" + backend + "'");
  const bool projection = mixer == "projection";
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
  const int64_t inputs = a.integer("inputs", 1, 1 << 20), outputs = a.integer("outputs", 1, 1 << 20);
  s.dtype = lm::dtype_by_name(a.text("dtype"));
  if (s.dtype == LLA_DTYPE_DEFAULT || s.dtype == LLA_F64) throw lm::Error("--dtype must be f32, bf16 or f16");
  s.pass = a.text("pass");
  if (s.pass != "forward" && s.pass != "backward" && s.pass != "both" && !s.decodes()) {
    throw lm::Error("--pass must be forward, backward, both, decode or checks, not '" + s.pass + "'");
  }
  if (projection && s.pass != "forward") throw lm::Error("a projection is timed forward only");
  s.position = a.integer("position", 0, 1 << 30);
  s.seconds = a.number("seconds", 0, 3600);
  if (s.decodes()) h.tokens = 1;

  lm::Threads threads(static_cast<int32_t>(a.integer("threads", 1, 1024)));
  const lla_parallel hook = threads.hook();
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = backend == "cpu" ? LLA_BACKEND_CPU : LLA_BACKEND_REFERENCE;
  options.parallel = &hook;
  const lm::Context context = lm::make_context(options);

  const Peaks peaks = a.flagged("no-peaks") ? Peaks() : measure_peaks(context.get(), threads, s);
  const std::string isa = context_text(context.get(), LLA_CONTEXT_ISA_NAME);
  const int64_t tokens = h.batch * h.tokens, element_bytes = static_cast<int64_t>(lla_dtype_size(s.dtype));
  nlohmann::json j = {{"mixer", mixer},
                      {"pass", s.pass},
                      {"tokens", h.tokens},
                      {"dtype", lm::dtype_name(s.dtype)},
                      {"backend", backend},
                      {"isa", isa},
                      {"device", context_text(context.get(), LLA_CONTEXT_DEVICE_NAME)},
                      {"threads", threads.count()},
                      {"version", lla_version_string()},
                      {"source", lla_source_id()}};
  if (projection) {
    const Timing t = measure_projection(context.get(), s.dtype, h.tokens, outputs, inputs, s.seconds);
    const Counts counts = count_projection(h.tokens, outputs, inputs, element_bytes);
    std::printf("projection, %lld rows, %lld inputs, %lld outputs, %s, %s (%s), %d threads\n",
                static_cast<long long>(h.tokens), static_cast<long long>(inputs), static_cast<long long>(outputs),
                lm::dtype_name(s.dtype), backend.c_str(), isa.c_str(), threads.count());
    print_figures(t, counts, h.tokens, peaks);
    j.update({{"inputs", inputs}, {"outputs", outputs}});
    j.update(figures_of(t, counts, h.tokens, peaks));
  } else {
    MixerBench mixer_bench(context.get(), s);
    mixer_bench.prepare();
    Timing t = measure(s.seconds, [&] { mixer_bench.run(); });
    if (s.pass == "checks") t = {t.median / kChecks, t.fastest / kChecks, t.processor / kChecks, t.runs * kChecks};
    const Counts counts = count_work(h, s.pass, s.position, element_bytes, mixer_bench.levels());
    std::printf(
        "%s%s %s, batch %lld, %lld tokens%s, %lld heads, %lld groups, dk %lld, dv %lld, grain %lld, %s, %s (%s), %d "
        "threads\n",
        mixer.c_str(), h.linear ? " linear" : "", s.pass.c_str(), static_cast<long long>(h.batch),
        static_cast<long long>(h.tokens), s.decodes() ? (" at position " + std::to_string(s.position)).c_str() : "",
        static_cast<long long>(h.heads), static_cast<long long>(h.groups), static_cast<long long>(h.key_dim),
        static_cast<long long>(h.value_dim), static_cast<long long>(h.grain), lm::dtype_name(s.dtype), backend.c_str(),
        isa.c_str(), threads.count());
    print_figures(t, counts, tokens, peaks);
    if (s.decodes()) std::printf("state      %.3f MB a sequence\n", static_cast<double>(mixer_bench.state_bytes()) * 1e-6);
    std::printf("workspace  %.3f MB, saved for backward %.3f MB\n",
                static_cast<double>(mixer_bench.workspace_bytes()) * 1e-6,
                static_cast<double>(mixer_bench.saved_bytes()) * 1e-6);
    j.update({{"linear", h.linear},
              {"batch", h.batch},
              {"position", s.position},
              {"heads", h.heads},
              {"groups", h.groups},
              {"dk", h.key_dim},
              {"dv", h.value_dim},
              {"grain", h.grain},
              {"levels", mixer_bench.levels()},
              {"workspace_bytes", mixer_bench.workspace_bytes()},
              {"saved_bytes", mixer_bench.saved_bytes()},
              {"state_bytes", mixer_bench.state_bytes()}});
    j.update(figures_of(t, counts, tokens, peaks));
  }
  if (a.given("json")) lm::write_file_atomically(a.text("json"), j.dump(2) + "\n");
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
