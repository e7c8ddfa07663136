// SPDX-License-Identifier: Apache-2.0
// Fenwick arithmetic on positions: levels, buckets, chunks. Integers only (docs/mathematics.md).
#pragma once

#include <bit>
#include <cstdint>

namespace lla {

inline int64_t bit_length(int64_t x) { return 64 - std::countl_zero(static_cast<uint64_t>(x)); }

// λ columns that `length` tokens need.
inline int64_t levels_needed(int64_t length) { return length <= 1 ? 1 : 1 + bit_length(length - 1); }

// Longest sequence that `levels` columns allow, INT64_MAX from 63 columns on; the inverse of levels_needed.
inline int64_t length_allowed(int64_t levels) {
  if (levels <= 0) return 0;
  return levels >= 63 ? INT64_MAX : int64_t{1} << (levels - 1);
}

// Level at which the query at position t reads the key at position s <= t.
inline int64_t level_of(int64_t t, int64_t s) { return bit_length(t ^ s); }

// Trailing ones of a chunk index: how many nodes the chunk's node merges with when it fills up, and the level of the merged
// node.
inline int trailing_ones(int64_t chunk) { return std::countr_one(static_cast<uint64_t>(chunk)); }

inline int log2_of(int64_t power_of_two) { return std::countr_zero(static_cast<uint64_t>(power_of_two)); }

// Column of λ with which a row reads node `b` (a bucket of 2^b chunks of `grain` rows).
inline int64_t node_column(int b, int64_t grain) { return b + log2_of(grain) + 1; }

}  // namespace lla
