// SPDX-License-Identifier: Apache-2.0
// Counts of operations and bytes.
#include "counts.h"

#include <algorithm>
#include <bit>

namespace bench {
namespace {

// Average number of live nodes that the rows of one sequence read: popcount of the chunk index.
double mean_live_nodes(int64_t tokens, int64_t grain) {
  double sum = 0;
  for (int64_t at = 0; at < tokens; at += grain) {
    sum += static_cast<double>(std::popcount(static_cast<uint64_t>(at / grain)) * std::min(grain, tokens - at));
  }
  return sum / static_cast<double>(tokens);
}

double forward_flops(const Shape& s) {  // per token and head
  const auto c = static_cast<double>(std::min(s.grain, s.tokens)), dk = static_cast<double>(s.key_dim);
  const auto dv = static_cast<double>(s.value_dim), r = static_cast<double>(s.groups) / static_cast<double>(s.heads);
  const double live = s.linear ? 1 : mean_live_nodes(s.tokens, s.grain);
  const double nodes = 2 * live * dk * dv;  // reading them
  if (!s.delta) return 2 * c * (r * dk + dv) + 2 * dk * dv + nodes;
  // The delta rule also moves the live nodes through the chunk's transition: twice a product of their size.
  return 2 * c * (2 * r * dk + 2 * dk + dv) + 8.0 / 3.0 * c * c + 2 * dk * dv + 3 * nodes;
}

double backward_flops(const Shape& s) {
  const auto c = static_cast<double>(std::min(s.grain, s.tokens)), dk = static_cast<double>(s.key_dim);
  const auto dv = static_cast<double>(s.value_dim), r = static_cast<double>(s.groups) / static_cast<double>(s.heads);
  // m levels, of which half are live on average; a linear model counts as one state.
  const double m = 2 * mean_live_nodes(s.tokens, s.grain);
  if (!s.delta) return 2 * c * (3 * r * dk + 2 * dv) + (s.linear ? 10 : 2 * m + 6) * dk * dv;
  return 2 * c * (4 * r * dk + 8 * dk + 2 * dv) + 12 * c * c + (s.linear ? 22 : 10 * m + 6) * dk * dv;
}

}  // namespace

Counts count_work(const Shape& s, const std::string& pass, int64_t position, int64_t element_bytes, int64_t levels) {
  const auto e = static_cast<double>(element_bytes), dk = static_cast<double>(s.key_dim),
             dv = static_cast<double>(s.value_dim);
  const auto h = static_cast<double>(s.heads), g = static_cast<double>(s.groups);
  const double tokens = static_cast<double>(s.batch) * static_cast<double>(s.tokens);
  Counts counts;
  if (pass == "checks") return counts;
  if (pass == "decode") {
    // Live nodes and the raw rows of the tail are read once; the new row is written.
    const double nodes = s.linear ? (position >= s.grain ? 1 : 0)
                                  : static_cast<double>(std::popcount(static_cast<uint64_t>(position / s.grain)));
    const auto tail = static_cast<double>(position % s.grain);
    const double per_head = nodes * 2 * dk * dv + tail * 2 * (dk + dv) + (s.delta ? tail * 4 * dk : 0);
    counts.flops = static_cast<double>(s.batch) * h * per_head;
    counts.bytes =
        static_cast<double>(s.batch) * (h * nodes * 4 * dk * dv + tail * (e * (g * dk + h * dv) + 8 * h) +
                                        e * (2 * g * dk + 2 * h * dv) + 4 * h * (1 + static_cast<double>(levels)));
    return counts;
  }
  const double gates = 4 * h * (1 + (s.delta ? 1 : 0) + static_cast<double>(levels));
  const double forward_bytes = e * (2 * g * dk + 2 * h * dv) + gates;
  // Inputs and the output's gradient are read, gradients (fp32) are written.
  const double backward_bytes = e * (2 * g * dk + 2 * h * dv) + gates + 4 * (2 * g * dk + h * dv) + gates;
  if (pass != "backward") {
    counts.flops += tokens * h * forward_flops(s);
    counts.bytes += tokens * forward_bytes;
  }
  if (pass != "forward") {
    counts.flops += tokens * h * backward_flops(s);
    counts.bytes += tokens * backward_bytes;
  }
  return counts;
}

Counts count_projection(int64_t rows, int64_t outputs, int64_t inputs, int64_t element_bytes) {
  const auto m = static_cast<double>(rows), n = static_cast<double>(outputs), k = static_cast<double>(inputs);
  return {2 * m * n * k, static_cast<double>(element_bytes) * (m * k + n * k + m * n)};
}

}  // namespace bench
