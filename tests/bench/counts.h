// SPDX-License-Identifier: Apache-2.0
// Work of a call by the formulas of docs/mathematics.md: what any chunkwise implementation has to do, not what one happens
// to do.
#pragma once

#include <cstdint>
#include <string>

namespace bench {

struct Shape {
  bool delta = false, linear = false;
  int64_t batch = 1, tokens = 1, heads = 1, groups = 1, key_dim = 1, value_dim = 1, grain = 64;
};

struct Counts {
  double flops = 0;  // 2 per multiply-add
  double bytes = 0;  // read and written at least once
};

// `pass`: forward, backward, both, decode (one token per sequence at `position`), checks (nothing). `element_bytes` of q, k,
// v, y; gates and λ are fp32.
Counts count_work(const Shape& shape, const std::string& pass, int64_t position, int64_t element_bytes, int64_t levels);
// y [rows][outputs] = x [rows][inputs] W^T.
Counts count_projection(int64_t rows, int64_t outputs, int64_t inputs, int64_t element_bytes);

}  // namespace bench
