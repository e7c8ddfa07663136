// SPDX-License-Identifier: Apache-2.0
// Random numbers from counters: the n-th number of a stream depends on seed, stream and n alone, so that training resumes
// without a generator's state.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace lm {

inline uint64_t mix_bits(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : key_(mix_bits(mix_bits(seed) ^ (stream * 0xd1342543de82ef95u))) {}
  uint64_t bits() { return mix_bits(key_ ^ mix_bits(counter_++)); }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(uniform() * static_cast<double>(n)); }

 private:
  uint64_t key_, counter_ = 0;
};

}  // namespace lm
