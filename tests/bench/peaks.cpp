// SPDX-License-Identifier: Apache-2.0
// Loops that do nothing but multiply-adds, or nothing but reads.
#include "peaks.h"

#include <vector>

#include "error.h"
#include "handles.h"
#include "timing.h"

namespace bench {
namespace {

constexpr int64_t kSteps = 40000;

// Chains of multiply-adds, enough of them to fill the units in spite of their latency, and few enough for the registers.
#define LLA_BENCH_CHAINS(name, attributes, bytes, chains)                                            \
  attributes float name(float start) {                                                               \
    typedef float Vector __attribute__((vector_size(bytes)));                                        \
    Vector sums[chains];                                                                             \
    for (int i = 0; i < (chains); ++i) sums[i] = Vector{} + (start + static_cast<float>(i));         \
    const Vector factor = Vector{} + 0.999f, term = Vector{} + 0.001f;                               \
    for (int64_t step = 0; step < kSteps; ++step) {                                                  \
      _Pragma("GCC unroll 32") for (int i = 0; i < (chains); ++i) sums[i] = sums[i] * factor + term; \
    }                                                                                                \
    float total = 0;                                                                                 \
    for (int i = 0; i < (chains); ++i) total += sums[i][0];                                          \
    return total;                                                                                    \
  }

#if defined(__x86_64__)
LLA_BENCH_CHAINS(chains_avx2, __attribute__((target("avx2,fma"))), 32, 12)
LLA_BENCH_CHAINS(chains_avx512, __attribute__((target("avx512f,prefer-vector-width=512"))), 64, 24)
#elif defined(__aarch64__)
LLA_BENCH_CHAINS(chains_neon, , 16, 24)
#endif

struct Loop {
  float (*run)(float) = nullptr;
  double flops = 0;
};

Loop loop_of(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx2") return {chains_avx2, 2.0 * kSteps * 12 * 8};
  if (isa == "avx512") return {chains_avx512, 2.0 * kSteps * 24 * 16};
#elif defined(__aarch64__)
  if (isa == "neon") return {chains_neon, 2.0 * kSteps * 24 * 4};
#endif
  (void)isa;
  return {};
}

}  // namespace

double measure_multiply_add_peak(lm::Threads& threads, const std::string& isa, double seconds) {
  const Loop loop = loop_of(isa);
  if (!loop.run) return 0;
  std::vector<float> totals(static_cast<size_t>(threads.count()));
  const Timing t = measure(seconds, [&] {
    threads.for_pieces(threads.count(), 1, [&](int64_t begin, int64_t) {
      totals[static_cast<size_t>(begin)] = loop.run(static_cast<float>(begin));
    });
  });
  for (const float total : totals) {
    if (!(total > 0)) throw lm::Error("the multiply-add loop computed something else");
  }
  return loop.flops * threads.count() / t.fastest;
}

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

}  // namespace bench
