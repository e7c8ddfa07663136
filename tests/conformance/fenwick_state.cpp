// SPDX-License-Identifier: Apache-2.0
// Composes nodes and tail rows into token-granular blocks (docs/mathematics.md).
#include "fenwick_state.h"

#include <bit>
#include <cmath>

#include "error.h"

namespace conformance {
namespace {

std::vector<double> read_part(const lla_state* state, int64_t slot, int64_t layer, lla_state_part part, int64_t index,
                              std::vector<int64_t> shape) {
  int64_t count = 1;
  for (const int64_t d : shape) count *= d;
  std::vector<double> values(static_cast<size_t>(count));
  shape.resize(4, -1);
  const lla_tensor tensor = lla_tensor_of(values.data(), LLA_F64, shape[0], shape[1], shape[2], shape[3]);
  LM_CALL(lla_state_read, state, slot, layer, part, index, &tensor, static_cast<void*>(nullptr));
  return values;
}

struct Tail {
  std::vector<double> k, v, gate, write;
};

}  // namespace

bool is_summed(const StateShape& shape, int j) { return shape.levels == 0 || (shape.absorb && j + 1 >= shape.levels - 1); }

std::map<int, std::vector<double>> canonical_state(const lla_state* state, int64_t slot, int64_t layer_index,
                                                   const StateShape& shape) {
  const int64_t h = shape.heads, dk = shape.key_dim, dv = shape.value_dim, c = shape.grain;
  const auto size = static_cast<size_t>(h * dk * dv);
  int64_t n = 0;
  LM_CALL(lla_state_length, state, slot, &n);
  const int64_t chunks = n / c, m = n % c;
  const int log2_grain = std::countr_zero(static_cast<uint64_t>(c));

  std::map<int, std::vector<double>> blocks;
  // Nodes, newest (lowest bit) first. A node of the scalar gate stands as it was at its own end: the decays of the newer
  // ones bring it to the last chunk border. The delta rule's nodes stand there already.
  std::vector<double> newer(static_cast<size_t>(h), 0.0);
  for (int b = 0; b < 62; ++b) {
    if (!((chunks >> b) & 1) || is_summed(shape, b + log2_grain)) continue;
    std::vector<double> node = read_part(state, slot, layer_index, LLA_PART_NODE, b, {h, dk, dv});
    if (shape.mixer == LLA_SCALAR_GATE) {
      const std::vector<double> decay = read_part(state, slot, layer_index, LLA_PART_NODE_DECAY, b, {h});
      for (int64_t i = 0; i < static_cast<int64_t>(size); ++i)
        node[static_cast<size_t>(i)] *= std::exp(newer[static_cast<size_t>(i / (dk * dv))]);
      for (int64_t i = 0; i < h; ++i) newer[static_cast<size_t>(i)] += decay[static_cast<size_t>(i)];
    }
    blocks[b + log2_grain] = std::move(node);
  }
  bool sums = shape.levels == 0;
  for (int j = 0; j < 62; ++j) sums = sums || (((n >> j) & 1) && is_summed(shape, j));
  if (sums) {
    std::vector<double> node(size, 0.0);
    bool has_node = false;
    for (int b = 0; b < 62; ++b) has_node = has_node || (((chunks >> b) & 1) && is_summed(shape, b + log2_grain));
    if (has_node) {
      node = read_part(state, slot, layer_index, LLA_PART_ABSORBED, 0, {h, dk, dv});
      if (shape.mixer == LLA_SCALAR_GATE) {
        for (size_t i = 0; i < size; ++i) node[i] *= std::exp(newer[i / static_cast<size_t>(dk * dv)]);
      }
    }
    blocks[kSummed] = std::move(node);
  }

  // The tail, row by row: every block goes through the row's transition, then the row is written to its own block, that of a
  // set bit of m, the oldest rows belonging to the highest bit.
  if (m == 0) return blocks;
  Tail tail;
  tail.k = read_part(state, slot, layer_index, LLA_PART_TAIL_K, 0, {m, shape.groups, dk});
  tail.v = read_part(state, slot, layer_index, LLA_PART_TAIL_V, 0, {m, h, dv});
  tail.gate = read_part(state, slot, layer_index, LLA_PART_TAIL_GATE, 0, {m, h});
  tail.write = shape.has_write ? read_part(state, slot, layer_index, LLA_PART_TAIL_WRITE, 0, {m, h})
                               : std::vector<double>(static_cast<size_t>(m * h), 1.0);
  std::vector<double> projected(static_cast<size_t>(dv));
  int64_t end = 0;  // of the block that the row belongs to
  int j = log2_grain;
  for (int64_t row = 0; row < m; ++row) {
    while (row >= end) {
      --j;
      if ((m >> j) & 1) end += int64_t{1} << j;
    }
    std::vector<double>& own = blocks[is_summed(shape, j) ? kSummed : j];
    own.resize(size, 0.0);
    for (int64_t head = 0; head < h; ++head) {
      const double* k = &tail.k[static_cast<size_t>((row * shape.groups + head / (h / shape.groups)) * dk)];
      const double* v = &tail.v[static_cast<size_t>((row * h + head) * dv)];
      const double decay = std::exp(tail.gate[static_cast<size_t>(row * h + head)]);
      const double strength = tail.write[static_cast<size_t>(row * h + head)];
      for (auto& [index, block] : blocks) {
        double* s = &block[static_cast<size_t>(head * dk * dv)];
        projected.assign(static_cast<size_t>(dv), 0.0);
        if (shape.mixer == LLA_DELTA_RULE) {
          for (int64_t a = 0; a < dk; ++a) {
            for (int64_t i = 0; i < dv; ++i) projected[static_cast<size_t>(i)] += strength * k[a] * s[a * dv + i];
          }
        }
        for (int64_t a = 0; a < dk; ++a) {
          for (int64_t i = 0; i < dv; ++i)
            s[a * dv + i] = decay * (s[a * dv + i] - k[a] * projected[static_cast<size_t>(i)]);
        }
      }
      double* s = &own[static_cast<size_t>(head * dk * dv)];
      for (int64_t a = 0; a < dk; ++a) {
        for (int64_t i = 0; i < dv; ++i) s[a * dv + i] += strength * k[a] * v[i];
      }
    }
  }
  return blocks;
}

}  // namespace conformance
