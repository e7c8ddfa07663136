// SPDX-License-Identifier: Apache-2.0
// Times oneDNN's product y [m][n] = x [m][k] W^T, W [n][k] as it is laid out by a caller, or reordered once as oneDNN likes
// it ("any"). Prints JSON.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <oneapi/dnnl/dnnl.hpp>

#include "timing.h"

namespace {

using dnnl::memory;

void fill(memory& m, memory::data_type type, int64_t count) {
  uint64_t state = 88172645463325252u;
  for (int64_t i = 0; i < count; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    const float x = static_cast<float>(state >> 40) / 8388608.0f - 1;
    if (type == memory::data_type::f32) {
      static_cast<float*>(m.get_data_handle())[i] = x;
    } else {
      uint32_t bits = 0;
      std::memcpy(&bits, &x, sizeof bits);
      static_cast<uint16_t*>(m.get_data_handle())[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: %s f32|bf16 M N K plain|any SECONDS   (threads: OMP_NUM_THREADS)\n", argv[0]);
    return 2;
  }
  const auto type = std::strcmp(argv[1], "bf16") == 0 ? memory::data_type::bf16 : memory::data_type::f32;
  const int64_t m = std::atoll(argv[2]), n = std::atoll(argv[3]), k = std::atoll(argv[4]);
  const bool any = std::strcmp(argv[5], "any") == 0;
  const double seconds = std::atof(argv[6]);
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const memory::desc x_desc({m, k}, type, memory::format_tag::ab), plain({k, n}, type, memory::format_tag::ba),
      y_desc({m, n}, type, memory::format_tag::ab);
  const memory::desc w_desc = any ? memory::desc({k, n}, type, memory::format_tag::any) : plain;
  const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(x_desc, w_desc, y_desc), engine);
  memory x(x_desc, engine), w(plain, engine), y(y_desc, engine), packed(pd.weights_desc(), engine);
  fill(x, type, m * k);
  fill(w, type, n * k);
  dnnl::reorder(w, packed).execute(stream, w, packed);
  stream.wait();
  const dnnl::matmul product(pd);
  const auto run = [&] {
    product.execute(stream, {{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, packed}, {DNNL_ARG_DST, y}});
    stream.wait();
  };
  const bench::Timing time = bench::measure(seconds, run);
  std::printf(
      "{\"peer\": \"onednn\", \"kernel\": \"%s\", \"dtype\": \"%s\", \"m\": %lld, \"n\": %lld, \"k\": %lld, "
      "\"weights\": \"%s\", \"runs\": %lld, \"median_seconds\": %.9f, \"fastest_seconds\": %.9f, \"processor_seconds\": "
      "%.9f, \"gflops\": %.1f}\n",
      pd.impl_info_str(), argv[1], static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k), argv[5],
      static_cast<long long>(time.runs), time.median, time.fastest, time.processor,
      2e-9 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) / time.median);
  return 0;
}
