// SPDX-License-Identifier: Apache-2.0
// Sizes on a device, against the CPU backend: every length from 1 to 300, long sequences, many short ones, empty ones, tensors of
// more than 2^31 elements; and small calls for the memory checkers. Needs a CUDA device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "lla/lla.h"
#include "needs_device.h"

namespace {

#define CALL(call)                                                                                        \
  do {                                                                                                    \
    lla_error error = LLA_ERROR_INIT;                                                                     \
    const lla_status status_ = (call);                                                                    \
    ASSERT_EQ(status_, LLA_OK) << #call << ": " << lla_status_name(status_) << ": " << error.text; \
  } while (0)

struct Shape {
  lla_mixer mixer = LLA_SCALAR_GATE;
  int64_t heads = 1, groups = 1, key = 16, value = 16;
  bool levels = true;
  std::vector<int64_t> lengths;  // of the sequences

  int64_t rows() const {
    int64_t sum = 0;
    for (const int64_t n : lengths) sum += n;
    return sum;
  }
  int64_t longest() const {
    int64_t most = 1;
    for (const int64_t n : lengths) most = std::max(most, n);
    return most;
  }
};

using Values = std::map<lla_role, std::vector<float>>;

Values random_values(const Shape& s, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  const size_t n = static_cast<size_t>(s.rows());
  Values v;
  const auto make = [&](lla_role role, int64_t width, auto draw) {
    std::vector<float>& x = v[role];
    x.resize(n * static_cast<size_t>(width));
    for (float& e : x) e = draw();
  };
  make(LLA_Q, s.groups * s.key, [&] { return normal(engine); });
  make(LLA_K, s.groups * s.key, [&] { return normal(engine) / std::sqrt(static_cast<float>(s.key)); });
  make(LLA_V, s.heads * s.value, [&] { return normal(engine); });
  make(LLA_GATE, s.heads, [&] { return -0.03f * uniform(engine); });
  make(LLA_WRITE, s.heads, [&] { return 0.1f + 0.8f * uniform(engine); });
  if (s.levels) make(LLA_LAMBDA, s.heads * lla_levels_needed(s.longest()), [&] { return 0.2f + uniform(engine); });
  return v;
}

int64_t inner(const Shape& s, lla_role role, int64_t* last) {
  switch (role) {
    case LLA_Q:
    case LLA_K: *last = s.key; return s.groups;
    case LLA_V:
    case LLA_Y: *last = s.value; return s.heads;
    case LLA_LAMBDA: *last = lla_levels_needed(s.longest()); return s.heads;
    default: *last = -1; return s.heads;
  }
}

lla_tensor tensor_of(const Shape& s, lla_role role, void* data) {
  int64_t last = 0;
  const int64_t heads = inner(s, role, &last);
  return lla_tensor_of(data, LLA_F32, s.rows(), heads, last, -1);
}

// Outputs of forward and, with `dy`, gradients of all inputs. All tensors are fresh memory of exactly their size, filled with
// NaN where the call writes.
void compute(lla_backend backend, const Shape& s, const Values& inputs, const std::vector<float>* dy, Values* results) {
  lla_context* context = nullptr;
  lla_layer* layer = nullptr;
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = backend;
  options.threads = 8;
  CALL(lla_context_create(&options, &context, &error));
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = LLA_LAYER_MIXER;
  d.mixer = s.mixer;
  d.heads = s.heads;
  d.groups = s.groups;
  d.key_dim = s.key;
  d.value_dim = s.value;
  d.write_form = LLA_WRITE_READY;
  if (s.levels) {
    d.lambda_form = LLA_LAMBDA_READY;
    d.levels = lla_levels_needed(s.longest());
  }
  CALL(lla_layer_create(context, &d, &layer, &error));
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  limits.max_sequences = static_cast<int64_t>(s.lengths.size());
  limits.max_rows = s.rows();
  limits.max_rows_per_sequence = limits.max_length = s.longest();
  size_t batch_bytes = 0, device_bytes = 0, forward_bytes = 0, backward_bytes = 0;
  CALL(lla_batch_size(context, &limits, &batch_bytes, nullptr, &error));
  CALL(lla_batch_device_size(context, &limits, &device_bytes, nullptr, &error));
  CALL(lla_layer_workspace(layer, &limits, LLA_PASS_FORWARD, &forward_bytes, nullptr, &error));
  CALL(lla_layer_workspace(layer, &limits, LLA_PASS_BACKWARD, &backward_bytes, nullptr, &error));
  const size_t workspace_bytes = dy ? std::max(forward_bytes, backward_bytes) : forward_bytes;
  std::vector<char> batch_memory(batch_bytes + 64);
  lla_batch* batch = nullptr;
  CALL(lla_batch_init(context, &limits, batch_memory.data() + (64 - reinterpret_cast<uintptr_t>(batch_memory.data()) % 64) % 64,
                      batch_bytes, &batch, &error));
  std::vector<std::pair<void*, size_t>> blocks;
  const auto take = [&](size_t bytes) {
    void* memory = nullptr;
    EXPECT_EQ(lla_device_allocate(context, bytes, &memory, nullptr), LLA_OK) << bytes;
    blocks.push_back({memory, bytes});
    return memory;
  };
  void* device_memory = device_bytes ? take(device_bytes) : nullptr;
  if (device_bytes) CALL(lla_batch_bind_device(batch, device_memory, device_bytes, &error));
  void* workspace = take(workspace_bytes);
  std::vector<int64_t> offsets{0};
  for (const int64_t n : s.lengths) offsets.push_back(offsets.back() + n);
  lla_rows rows = LLA_ROWS_INIT;
  rows.sequences = limits.max_sequences;
  rows.offsets = {offsets.data(), LLA_I64, LLA_HOST};
  CALL(lla_batch_plan(batch, nullptr, &rows, nullptr, &error));

  std::vector<lla_binding> io, gradients;
  std::map<lla_role, void*> outputs;
  const auto fresh = [&](lla_role role, size_t count) {
    const std::vector<float> nothing(count, NAN);
    void* memory = take(count * 4);
    EXPECT_EQ(lla_device_copy(context, memory, nothing.data(), count * 4, nullptr, nullptr), LLA_OK);
    outputs[role] = memory;
    (*results)[role].resize(count);
    return memory;
  };
  for (const auto& [role, values] : inputs) {
    void* memory = take(values.size() * 4);
    CALL(lla_device_copy(context, memory, values.data(), values.size() * 4, nullptr, &error));
    io.push_back(lla_bind(role, tensor_of(s, role, memory)));
    if (dy) gradients.push_back(lla_bind(role, tensor_of(s, role, fresh(role, values.size()))));
  }
  const size_t y_count = static_cast<size_t>(s.rows() * s.heads * s.value);
  std::vector<lla_binding> forward_io = io;
  forward_io.push_back(lla_bind(LLA_Y, tensor_of(s, LLA_Y, fresh(LLA_Y, y_count))));
  lla_forward_args f = LLA_FORWARD_ARGS_INIT;
  f.batch = batch;
  f.io = forward_io.data();
  f.io_count = static_cast<int64_t>(forward_io.size());
  f.workspace = workspace;
  f.workspace_bytes = workspace_bytes;
  CALL(lla_layer_forward(layer, &f, &error));
  if (dy) {
    void* memory = take(y_count * 4);
    CALL(lla_device_copy(context, memory, dy->data(), y_count * 4, nullptr, &error));
    const lla_binding out = lla_bind(LLA_Y, tensor_of(s, LLA_Y, memory));
    lla_backward_args b = LLA_BACKWARD_ARGS_INIT;
    b.batch = batch;
    b.io = io.data();
    b.io_count = static_cast<int64_t>(io.size());
    b.outputs = &out;
    b.output_count = 1;
    b.gradients = gradients.data();
    b.gradient_count = static_cast<int64_t>(gradients.size());
    b.workspace = workspace;
    b.workspace_bytes = workspace_bytes;
    CALL(lla_layer_backward(layer, &b, &error));
  }
  for (const auto& [role, memory] : outputs)
    CALL(lla_device_copy(context, (*results)[role].data(), memory, (*results)[role].size() * 4, nullptr, &error));
  CALL(lla_device_wait(context, nullptr, &error));
  for (const auto& [memory, bytes] : blocks) lla_device_release(context, memory, bytes);
  lla_batch_discard(batch);
  lla_layer_release(layer);
  lla_context_release(context);
}

double error_of(const std::vector<float>& x, const std::vector<float>& reference) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    error += (double(x[i]) - reference[i]) * (double(x[i]) - reference[i]);
    norm += double(reference[i]) * reference[i];
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

void expect_close(const Shape& s, bool backward, double tolerance, const std::string& what) {
  const Values inputs = random_values(s, 7);
  Values dy_values;
  std::mt19937 engine(8);
  std::normal_distribution<float> normal;
  std::vector<float> dy(static_cast<size_t>(s.rows() * s.heads * s.value));
  for (float& x : dy) x = normal(engine);
  Values fast, reference;
  compute(LLA_BACKEND_CUDA, s, inputs, backward ? &dy : nullptr, &fast);
  if (testing::Test::HasFatalFailure()) return;
  compute(LLA_BACKEND_CPU, s, inputs, backward ? &dy : nullptr, &reference);
  if (testing::Test::HasFatalFailure()) return;
  double worst = 0;
  for (const auto& [role, values] : reference) {
    const double error = error_of(fast[role], values);
    worst = error > worst || std::isnan(error) ? error : worst;
    EXPECT_LE(error, tolerance) << what << ", role " << role;
  }
  if (s.rows() > 1000) std::printf("%s: %lld rows, worst error %.2e\n", what.c_str(), static_cast<long long>(s.rows()), worst);
}

constexpr lla_mixer kMixers[] = {LLA_SCALAR_GATE, LLA_DELTA_RULE};

using Sizes = NeedsDevice;

TEST_F(Sizes, EveryLength) {
  for (const lla_mixer mixer : kMixers) {
    for (int64_t n = 1; n <= 300; ++n) {
      expect_close({mixer, 3, 1, 20, 24, true, {n}}, true, 5e-5, "length " + std::to_string(n));
      if (HasFailure()) return;
    }
  }
}

TEST_F(Sizes, LongSequences) {
  for (const lla_mixer mixer : kMixers) {
    const std::string name = mixer == LLA_DELTA_RULE ? "delta rule" : "scalar gate";
    expect_close({mixer, 4, 2, 32, 32, true, {4096, 16384}}, true, 5e-5, name);
    expect_close({mixer, 1, 1, 16, 16, true, {131072}}, true, 5e-5, name);
    expect_close({mixer, 1, 1, 16, 16, false, {131072}}, true, 5e-5, name + ", linear");
    expect_close({mixer, 1, 1, 16, 16, true, {1048576}}, false, 5e-5, name);
  }
}

TEST_F(Sizes, ManySequences) {
  for (const lla_mixer mixer : kMixers) {
    expect_close({mixer, 64, 1, 8, 8, true, std::vector<int64_t>(1024, 5)}, true, 5e-5, "1024 sequences x 64 heads");
    std::vector<int64_t> ragged;
    for (int64_t i = 0; i < 700; ++i) ragged.push_back(i % 5 == 0 ? 0 : i % 97);
    expect_close({mixer, 2, 2, 16, 8, true, ragged}, true, 5e-5, "ragged with empty sequences");
  }
}

// v and y of 131072 x 1024 x 17 > 2^31 elements; every head has the same values, so that all must give head 0's bits.
TEST_F(Sizes, MoreThanTwoToThe31Elements) {
  Shape one{LLA_SCALAR_GATE, 1, 1, 8, 17, false, {131072}};
  const Values inputs = random_values(one, 9);
  Values reference;
  compute(LLA_BACKEND_CPU, one, inputs, nullptr, &reference);
  if (HasFatalFailure()) return;
  const int64_t heads = 1024, rows = 131072;
  lla_context* context = nullptr;
  lla_layer* layer = nullptr;
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  options.backend = LLA_BACKEND_CUDA;
  CALL(lla_context_create(&options, &context, &error));
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = LLA_LAYER_MIXER;
  d.mixer = LLA_SCALAR_GATE;
  d.heads = heads;
  d.groups = 1;
  d.key_dim = 8;
  d.value_dim = 17;
  CALL(lla_layer_create(context, &d, &layer, &error));
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  limits.max_sequences = 1;
  limits.max_rows = limits.max_length = rows;
  size_t bytes = 0, device_bytes = 0, workspace_bytes = 0;
  CALL(lla_batch_size(context, &limits, &bytes, nullptr, &error));
  CALL(lla_batch_device_size(context, &limits, &device_bytes, nullptr, &error));
  CALL(lla_layer_workspace(layer, &limits, LLA_PASS_FORWARD, &workspace_bytes, nullptr, &error));
  std::vector<char> memory(bytes + 64);
  lla_batch* batch = nullptr;
  CALL(lla_batch_init(context, &limits, memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64, bytes, &batch,
                      &error));
  const size_t value_bytes = static_cast<size_t>(rows * heads * 17) * 4;
  char *plan, *workspace, *q, *k, *v, *gate, *y, *first;
  for (auto [pointer, size] : {std::pair{&plan, device_bytes}, {&workspace, workspace_bytes}, {&q, inputs.at(LLA_Q).size() * 4},
                               {&k, inputs.at(LLA_K).size() * 4}, {&v, value_bytes}, {&gate, static_cast<size_t>(rows * heads) * 4},
                               {&y, value_bytes}, {&first, static_cast<size_t>(rows) * 17 * 4}})
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(pointer), size), cudaSuccess) << size;
  CALL(lla_batch_bind_device(batch, plan, device_bytes, &error));
  cudaMemcpy(q, inputs.at(LLA_Q).data(), inputs.at(LLA_Q).size() * 4, cudaMemcpyHostToDevice);
  cudaMemcpy(k, inputs.at(LLA_K).data(), inputs.at(LLA_K).size() * 4, cudaMemcpyHostToDevice);
  std::vector<float> scaled = inputs.at(LLA_V);  // the layer has no write strength: it goes into the values
  for (size_t i = 0; i < scaled.size(); ++i) scaled[i] *= inputs.at(LLA_WRITE)[i / 17];
  cudaMemcpy(first, scaled.data(), scaled.size() * 4, cudaMemcpyHostToDevice);
  std::vector<float> gates(static_cast<size_t>(rows * heads));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads; ++h) gates[static_cast<size_t>(r * heads + h)] = inputs.at(LLA_GATE)[static_cast<size_t>(r)];
  cudaMemcpy(gate, gates.data(), gates.size() * 4, cudaMemcpyHostToDevice);
  for (int64_t h = 0; h < heads; ++h)
    ASSERT_EQ(cudaMemcpy2D(v + h * 17 * 4, static_cast<size_t>(heads) * 17 * 4, first, 17 * 4, 17 * 4, static_cast<size_t>(rows),
                           cudaMemcpyDeviceToDevice),
              cudaSuccess);
  lla_rows r = LLA_ROWS_INIT;
  r.sequences = 1;
  r.rows_per_sequence = rows;
  CALL(lla_batch_plan(batch, nullptr, &r, nullptr, &error));
  const lla_binding io[] = {lla_bind(LLA_Q, lla_tensor_of(q, LLA_F32, rows, 1, 8, -1)), lla_bind(LLA_K, lla_tensor_of(k, LLA_F32, rows, 1, 8, -1)),
                            lla_bind(LLA_V, lla_tensor_of(v, LLA_F32, rows, heads, 17, -1)),
                            lla_bind(LLA_GATE, lla_tensor_of(gate, LLA_F32, rows, heads, -1, -1)),
                            lla_bind(LLA_Y, lla_tensor_of(y, LLA_F32, rows, heads, 17, -1))};
  lla_forward_args f = LLA_FORWARD_ARGS_INIT;
  f.batch = batch;
  f.io = io;
  f.io_count = 5;
  f.workspace = workspace;
  f.workspace_bytes = workspace_bytes;
  CALL(lla_layer_forward(layer, &f, &error));
  CALL(lla_device_wait(context, nullptr, &error));
  std::vector<float> head(static_cast<size_t>(rows) * 17), zero;
  for (const int64_t h : {int64_t{0}, int64_t{1}, int64_t{511}, int64_t{1000}, heads - 1}) {
    ASSERT_EQ(cudaMemcpy2D(head.data(), 17 * 4, y + h * 17 * 4, static_cast<size_t>(heads) * 17 * 4, 17 * 4, static_cast<size_t>(rows),
                           cudaMemcpyDeviceToHost),
              cudaSuccess);
    if (h == 0) zero = head;
    EXPECT_EQ(std::memcmp(head.data(), zero.data(), head.size() * 4), 0) << "head " << h;
  }
  EXPECT_LE(error_of(zero, reference[LLA_Y]), 5e-5);
  for (char* p : {plan, workspace, q, k, v, gate, y, first}) cudaFree(p);
  lla_batch_discard(batch);
  lla_layer_release(layer);
  lla_context_release(context);
}

// Small calls with all their memory of its own, for the memory checkers.
TEST_F(Sizes, SanitizedSmall) {
  for (const lla_mixer mixer : kMixers) {
    expect_close({mixer, 3, 1, 20, 24, true, {70, 0, 1, 130}}, true, 5e-5, "small");
    expect_close({mixer, 2, 2, 64, 64, false, {200}}, true, 5e-5, "small, linear");
  }
}

}  // namespace
