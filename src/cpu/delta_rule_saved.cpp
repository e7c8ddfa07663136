// SPDX-License-Identifier: Apache-2.0
// The layout of the memory that forward leaves for backward. The numbers of nodes are sums of popcounts of piece numbers.
#include "cpu/delta_rule_saved.h"

#include <algorithm>
#include <bit>

namespace lla::cpu {

namespace {

// Pieces from one set to the next, as a power of two: the more nodes there are, the fewer sets. It depends on the layer and
// not on the limits, so that more memory is asked for where these are wider. Backward replays all other pieces.
int log2_every(const DeltaShape& shape) { return shape.levels <= 13 ? 1 : shape.levels <= 15 ? 2 : 3; }
int64_t every(const DeltaShape& shape) { return int64_t{1} << log2_every(shape); }

int64_t popcount(int64_t x) { return std::popcount(static_cast<uint64_t>(x)); }
int64_t below(int bits) { return (int64_t{1} << bits) - 1; }

// Sum of the popcounts of the lowest `bits` bits of 0, ..., n - 1.
int64_t ones_before(int64_t n, int bits) {
  int64_t sum = 0;
  for (int b = 0; b < bits && n >> b != 0; ++b) {
    sum += ((n >> (b + 1)) << b) + std::max<int64_t>(0, (n & below(b + 1)) - (int64_t{1} << b));
  }
  return sum;
}
// The same of j / 2 for j < n.
int64_t paired_ones_before(int64_t n, int bits) {
  return 2 * ones_before(n / 2, bits) + (n & 1) * popcount(n / 2 & below(bits));
}

// Of n numbers in a row, n < 2^most, of `bits` bits: by how much the sum of popcounts can exceed the average, bits / 2 each.
// Twice that. The most is reached by the last numbers.
int64_t excess(int64_t bits, int64_t most) {
  int64_t sum = 0;
  for (int64_t b = std::min(bits, most) - 1; b >= 0; --b) {
    if (bits <= b) continue;
    sum += (bits - b) << b;
    bits -= 2;
  }
  return sum;
}

// Bits of a piece number that say which nodes there are at sets; which have a Z at the end of the piece before: entry 0 is
// what that piece itself wrote then.
int set_bits(const DeltaShape& shape) { return std::max(0, shape.separate - log2_every(shape)); }
int z_bits(const DeltaShape& shape) { return std::max(0, shape.separate - 1); }

// Memory for the first sequences of a batch, one head of each.
class Layout {
 public:
  Layout(const DeltaShape& shape, const MixerShape& mixer, const Limits& limits)
      : shape_(shape),
        sets_(shape, mixer, limits, every(shape), set_bits(shape), every(shape), 1),
        records_(shape, mixer, limits, 1, z_bits(shape), 2, 2) {}

  Size sets(int64_t row, int64_t sequences) const { return sets_.nodes(row, sequences) * shape_.key_dim * shape_.value_dim; }
  Size triangles(int64_t row, int64_t sequences) const {
    return records_.count(row, sequences) * delta_triangle_floats(shape_);
  }
  Size z(int64_t row, int64_t sequences) const { return records_.nodes(row, sequences) * shape_.rows * shape_.value_dim; }
  Size floats(int64_t row, int64_t sequences) const {
    return sets(row, sequences) + triangles(row, sequences) + z(row, sequences);
  }

 private:
  // Things that there are at every `distance`-th piece, each with as many nodes as the piece number over `unit` has ones.
  class Counts {
   public:
    Counts(const DeltaShape& shape, const MixerShape& mixer, const Limits& limits, int64_t distance, int bits, int64_t unit,
           int64_t copies)
        : rows_(shape.rows * distance),
          spare_(mixer.grain / rows_ + 2),
          bits_(std::min<int64_t>(bits,
                                  bit_length(std::max<int64_t>(0, delta_longest(mixer, limits) - 1) / shape.rows / unit))),
          always_(shape.has_absorbed()) {
      const int64_t longest = limits.rows_per_sequence / rows_ + spare_;
      excess_ = copies * excess(bits_, bit_length((longest + copies - 1) / copies));
      const Size average = Size(excess_) * limits.sequences, dense = count(limits.rows, limits.sequences) * bits_;
      is_dense_ = !average.valid() || (dense.valid() && average.value() >= dense.value());
    }
    // More than a sequence's rows alone suggest: its first chunk may be cut.
    Size count(int64_t row, int64_t sequences) const { return Size(row / rows_) + Size(sequences) * spare_; }
    Size nodes(int64_t row, int64_t sequences) const {
      const Size n = count(row, sequences);
      Size twice = n * (is_dense_ ? 2 * bits_ : bits_);
      if (!is_dense_) twice += Size(sequences) * excess_;
      return n * always_ + twice / 2;
    }

   private:
    int64_t rows_, spare_, bits_, always_, excess_ = 0;
    bool is_dense_ = false;
  };

  const DeltaShape& shape_;
  Counts sets_, records_;
};

// Which of the nodes that a piece number has is entry e; the absorbed one is the last.
int64_t place(const DeltaShape& shape, int64_t index, int entry) {
  return popcount(index & below(entry == kDeltaAbsorbed ? shape.separate : entry));
}

}  // namespace

float* DeltaRecord::z_of(const DeltaShape& shape, int to) const {
  if (!z || to == 0) return nullptr;
  return z + place(shape, (index + 1) & ~int64_t{1}, to) * shape.rows * shape.value_dim;
}

int64_t delta_triangle_floats(const DeltaShape& shape) { return shape.rows * (shape.rows + 1); }

void store_triangles(const DeltaPiece& piece, float* out) {
  const int64_t n = piece.n, lo = piece.lo(), ld = piece.ld;
  for (int64_t t = 0; t < n; ++t) out = std::copy(piece.x + t * ld, piece.x + t * ld + t + 1, out);
  for (int64_t t = lo; t < n; ++t) out = std::copy(piece.r + (t - lo) * ld, piece.r + (t - lo) * ld + t + 1, out);
}

void load_triangles(const float* in, DeltaPiece* piece) {
  const int64_t n = piece->n, lo = piece->lo(), ld = piece->ld;
  const auto load = [&](int64_t t, float* row) {
    std::copy(in, in + t + 1, row);
    std::fill(row + t + 1, row + n, 0.0f);
    in += t + 1;
  };
  for (int64_t t = 0; t < n; ++t) load(t, piece->x + t * ld);
  for (int64_t t = lo; t < n; ++t) load(t, piece->r + (t - lo) * ld);
}

void store_set(const DeltaShape& shape, const DeltaNodes& nodes, int64_t index, float* set) {
  const int64_t size = shape.node_size();
  for_live_entries(shape, index, [&](int e) {
    float* out = set + place(shape, index, e) * size;
    if (nodes.content[e]) {
      std::copy(nodes.content[e], nodes.content[e] + size, out);
    } else {
      std::fill(out, out + size, 0.0f);
    }
  });
}

void use_set(const DeltaShape& shape, int64_t index, const float* set, DeltaNodes* nodes) {
  std::fill(nodes->content, nodes->content + kDeltaEntries, nullptr);
  for_live_entries(shape, index, [&](int e) { nodes->content[e] = set + place(shape, index, e) * shape.node_size(); });
}

DeltaSaved::DeltaSaved(const DeltaShape& shape, const MixerShape& mixer, const Limits& limits, const void* saved,
                       const Sequence& s, int64_t order, int64_t head)
    : shape_(shape), every_(every(shape)) {
  if (!saved || s.padding || s.rows <= 0) return;
  first_ = s.position / mixer.grain * shape.per_chunk;
  last_ = (s.position + s.rows - 1) / shape.rows;
  const int64_t sets = floats_of_sets(last_ / every_ * every_ + every_), z = floats_of_z(last_);
  const int64_t triangles = (last_ + 1 - first_) * delta_triangle_floats(shape);
  const int64_t before = Layout(shape, mixer, limits).floats(s.row_begin, order).value();
  sets_ = static_cast<float*>(const_cast<void*>(saved)) + before * mixer.heads + head * (sets + triangles + z);
  triangles_ = sets_ + sets;
  z_ = triangles_ + triangles;
}

int64_t DeltaSaved::floats_of_sets(int64_t index) const {
  const int64_t begin = first_ / every_ + 1, end = index / every_;
  const int64_t nodes = ones_before(end, set_bits(shape_)) - ones_before(begin, set_bits(shape_));
  return (nodes + (end - begin) * shape_.has_absorbed()) * shape_.node_size();
}

int64_t DeltaSaved::floats_of_z(int64_t index) const {
  const int64_t nodes = paired_ones_before(index + 1, z_bits(shape_)) - paired_ones_before(first_ + 1, z_bits(shape_));
  return (nodes + (index - first_) * shape_.has_absorbed()) * shape_.rows * shape_.value_dim;
}

float* DeltaSaved::set(int64_t index) const {
  return sets_ && index > first_ && index % every_ == 0 ? sets_ + floats_of_sets(index) : nullptr;
}

DeltaRecord DeltaSaved::record(int64_t index) const {
  if (!sets_) return {};
  return {triangles_ + (index - first_) * delta_triangle_floats(shape_), index < last_ ? z_ + floats_of_z(index) : nullptr,
          index};
}

int64_t DeltaSaved::start_of(int64_t index) const { return std::max(first_, index / every_ * every_); }

int64_t delta_saved_bytes(const MixerShape& mixer, const Limits& limits) {
  const DeltaShape shape(mixer);
  const Size bytes = Layout(shape, mixer, limits).floats(limits.rows, limits.sequences) * mixer.heads * 4;
  return bytes.valid() ? bytes.value() : -1;
}

}  // namespace lla::cpu
