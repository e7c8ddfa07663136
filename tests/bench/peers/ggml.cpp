// SPDX-License-Identifier: Apache-2.0
// Times the operators of ggml's CPU backend that do what the linear mixers do: ssm_scan and gated_delta_net. Prints JSON.
#include "ggml.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ggml-cpu.h"
#include "timing.h"

namespace {

uint64_t random_state = 88172645463325252u;
float random_unit() {  // [0, 1)
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<float>(random_state >> 40) / 16777216.0f;
}

// Values low + width * [0, 1).
ggml_tensor* tensor(ggml_context* context, std::vector<int64_t> shape, float low, float width) {
  ggml_tensor* t = ggml_new_tensor(context, GGML_TYPE_F32, static_cast<int>(shape.size()), shape.data());
  float* data = ggml_get_data_f32(t);
  for (int64_t i = 0; i < ggml_nelements(t); ++i) data[i] = low + width * random_unit();
  return t;
}

int64_t number(const char* text) { return std::strtoll(text, nullptr, 10); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    std::fprintf(stderr, "usage: %s scan|delta TOKENS HEADS DK DV THREADS SECONDS   (scan: one group)\n", argv[0]);
    return 2;
  }
  const bool scan = std::strcmp(argv[1], "scan") == 0;
  const int64_t tokens = number(argv[2]), heads = number(argv[3]), dk = number(argv[4]), dv = number(argv[5]);
  const int threads = static_cast<int>(number(argv[6]));
  const double seconds = std::strtod(argv[7], nullptr);
  ggml_init_params params = {};
  params.mem_size = size_t{1} << 30;
  ggml_context* context = ggml_init(params);
  const float spread = 1.7f / std::sqrt(static_cast<float>(dk));  // keys of about length 1
  ggml_tensor* out = nullptr;
  if (scan) {
    ggml_tensor* state = tensor(context, {dk, dv, heads, 1}, -1, 2);
    ggml_tensor* x = tensor(context, {dv, heads, tokens, 1}, -1.7f, 3.4f);
    ggml_tensor* dt = tensor(context, {heads, tokens, 1}, -2, 2);  // softplus is part of the operator
    ggml_tensor* a = tensor(context, {1, heads}, -0.5f, 0.4f);
    ggml_tensor* b = tensor(context, {dk, 1, tokens, 1}, -spread, 2 * spread);
    ggml_tensor* c = tensor(context, {dk, 1, tokens, 1}, -spread, 2 * spread);
    ggml_tensor* ids = ggml_new_tensor_1d(context, GGML_TYPE_I32, 1);
    *static_cast<int32_t*>(ids->data) = 0;
    out = ggml_ssm_scan(context, state, x, dt, a, b, c, ids, 1);
  } else {
    if (dk != dv) {
      std::fprintf(stderr, "the operator has square states only\n");
      return 2;
    }
    ggml_tensor* q = tensor(context, {dk, heads, tokens, 1}, -spread, 2 * spread);
    ggml_tensor* k = tensor(context, {dk, heads, tokens, 1}, -spread, 2 * spread);
    ggml_tensor* v = tensor(context, {dv, heads, tokens, 1}, -1.7f, 3.4f);
    ggml_tensor* gate = tensor(context, {1, heads, tokens, 1}, -0.1f, 0.1f);
    ggml_tensor* write = tensor(context, {1, heads, tokens, 1}, 0, 0.9f);
    ggml_tensor* state = tensor(context, {dv, dv, heads, 1}, -1, 2);
    out = ggml_gated_delta_net(context, q, k, v, gate, write, state, 1);
  }
  ggml_cgraph* graph = ggml_new_graph(context);
  ggml_build_forward_expand(graph, out);
  ggml_threadpool_params pool_params = ggml_threadpool_params_default(threads);
  ggml_threadpool* pool = ggml_threadpool_new(&pool_params);
  ggml_cplan plan = ggml_graph_plan(graph, threads, pool);
  std::vector<uint8_t> work(plan.work_size);
  plan.work_data = work.data();
  const bench::Timing time = bench::measure(seconds, [&] { ggml_graph_compute(graph, &plan); });
  double sum = 0;
  const float* y = ggml_get_data_f32(out);
  for (int64_t i = 0; i < heads * dv * tokens; ++i) sum += static_cast<double>(y[i]);
  std::printf(
      "{\"peer\": \"ggml\", \"operator\": \"%s\", \"tokens\": %lld, \"heads\": %lld, \"threads\": %d, \"runs\": %lld, "
      "\"median_seconds\": %.9f, \"fastest_seconds\": %.9f, \"processor_seconds\": %.9f, \"sum\": %.6g}\n",
      argv[1], static_cast<long long>(tokens), static_cast<long long>(heads), threads, static_cast<long long>(time.runs),
      time.median, time.fastest, time.processor, sum);
  ggml_threadpool_free(pool);
  ggml_free(context);
  return std::isfinite(sum) ? 0 : 1;
}
