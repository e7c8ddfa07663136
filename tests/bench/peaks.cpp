// SPDX-License-Identifier: Apache-2.0
// Loops that do nothing but multiply-adds, or nothing but reads.
#include "peaks.h"

#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "error.h"
#include "handles.h"
#include "timing.h"

namespace bench {
namespace {

constexpr int64_t kSteps = 40000;

#if defined(__aarch64__)
float32x4_t vfmaq_reversed(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
#endif

// Chains of multiply-adds, enough of them to fill the units in spite of their latency, and few enough for the registers.
#define LLA_BENCH_CHAINS(name, attributes, Vector, chains, set, multiply_add)                                    \
  attributes float name(float start) {                                                                           \
    Vector sums[chains];                                                                                         \
    for (int i = 0; i < (chains); ++i) sums[i] = set(start + static_cast<float>(i));                             \
    const Vector factor = set(0.999f), term = set(0.001f);                                                       \
    for (int64_t step = 0; step < kSteps; ++step) {                                                              \
      _Pragma("GCC unroll 32") for (int i = 0; i < (chains); ++i) sums[i] = multiply_add(sums[i], factor, term); \
    }                                                                                                            \
    float total = 0;                                                                                             \
    for (int i = 0; i < (chains); ++i) total += sums[i][0];                                                      \
    return total;                                                                                                \
  }

// Sums of words, vector by vector.
#define LLA_BENCH_READ(name, attributes, bytes)                              \
  attributes uint64_t name(const uint64_t* words, int64_t count) {           \
    typedef uint64_t Vector __attribute__((vector_size(bytes)));             \
    constexpr int64_t kLanes = (bytes) / 8;                                  \
    Vector sums[4] = {};                                                     \
    for (int64_t i = 0; i < count; i += 4 * kLanes) {                        \
      _Pragma("GCC unroll 4") for (int64_t j = 0; j < 4; ++j) {              \
        sums[j] += *reinterpret_cast<const Vector*>(words + i + j * kLanes); \
      }                                                                      \
    }                                                                        \
    sums[0] += sums[1] + sums[2] + sums[3];                                  \
    uint64_t total = 0;                                                      \
    for (int64_t j = 0; j < kLanes; ++j) total += sums[0][j];                \
    return total;                                                            \
  }

LLA_BENCH_READ(read_baseline, , 16)
#if defined(__x86_64__)
#define LLA_BENCH_AVX2 __attribute__((target("avx2,fma")))
#define LLA_BENCH_AVX512 __attribute__((target("avx512f")))
LLA_BENCH_CHAINS(chains_avx2, LLA_BENCH_AVX2, __m256, 12, _mm256_set1_ps, _mm256_fmadd_ps)
LLA_BENCH_CHAINS(chains_avx512, LLA_BENCH_AVX512, __m512, 24, _mm512_set1_ps, _mm512_fmadd_ps)
LLA_BENCH_READ(read_avx2, LLA_BENCH_AVX2, 32)
LLA_BENCH_READ(read_avx512, LLA_BENCH_AVX512, 64)
#elif defined(__aarch64__)
LLA_BENCH_CHAINS(chains_neon, , float32x4_t, 24, vdupq_n_f32, vfmaq_reversed)
#endif

// A run without what else the machine did. The processor time of threads on other cores comes too late to be of use.
double undisturbed(const Timing& t, const lm::Threads& threads) { return threads.count() == 1 ? t.processor : t.fastest; }

struct Loop {
  float (*run)(float) = nullptr;
  double flops = 0;
  uint64_t (*read)(const uint64_t*, int64_t) = read_baseline;
};

Loop loop_of(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx2") return {chains_avx2, 2.0 * kSteps * 12 * 8, read_avx2};
  if (isa == "avx512") return {chains_avx512, 2.0 * kSteps * 24 * 16, read_avx512};
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
  return loop.flops * threads.count() / undisturbed(t, threads);
}

double measure_memory_peak(lm::Threads& threads, const std::string& isa, double seconds) {
  constexpr int64_t kWords = int64_t{1} << 26, kPiece = int64_t{1} << 16;  // 512 MiB: more than caches hold
  const auto read = loop_of(isa).read;
  const lm::Buffer memory(static_cast<size_t>(kWords) * 8);
  auto* words = static_cast<uint64_t*>(memory.data());
  threads.for_pieces(kWords, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) words[i] = static_cast<uint64_t>(i);
  });
  std::vector<uint64_t> sums(static_cast<size_t>(kWords / kPiece));
  const Timing t = measure(seconds, [&] {
    threads.for_pieces(kWords, kPiece, [&](int64_t begin, int64_t end) {
      sums[static_cast<size_t>(begin / kPiece)] = read(words + begin, end - begin);
    });
  });
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  if (total != static_cast<uint64_t>(kWords) / 2 * static_cast<uint64_t>(kWords - 1))
    throw lm::Error("the memory loop read something else");
  return static_cast<double>(kWords) * 8 / undisturbed(t, threads);
}

}  // namespace bench
