// SPDX-License-Identifier: Apache-2.0
// The Hopper kernel for the gradients of queries and λ, alone: the factors and nodes that other kernels would have left are
// computed here, and so are the gradients, in double precision, by their definition.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cuda/hopper/scalar_gate_backward.h"
#include "plugin/numeric.h"

namespace {

using namespace lla;
using namespace lla::cuda::hopper;

constexpr double kNone = std::numeric_limits<double>::infinity();

struct Part {
  int64_t rows, position = 0;
  bool padding = false;
};

struct Case {
  int64_t heads = 2, groups = 1, dk = 128, dv = 64, levels = 12;  // levels 0: linear
  std::vector<Part> parts;
  int32_t head_map = LLA_HEAD_MAP_BLOCKED;
  bool absorb = false, accumulate = false, hard = false, write = true, dq = true, dlambda = true;
  int32_t lambda_dtype = LLA_F32;
  int slices = 1;
};

int level_of(int64_t t, int64_t s) {
  int level = 0;
  for (int64_t differ = t ^ s; differ; differ >>= 1) ++level;
  return level;
}

class Problem {
 public:
  explicit Problem(const Case& test) : c(test), random(7) {
    int64_t row = 3, most_blocks = 1;
    for (size_t b = 0; b < c.parts.size(); ++b) {
      Sequence sequence;
      sequence.row_begin = row;
      sequence.rows = c.parts[b].rows;
      sequence.position = c.parts[b].position;
      sequence.padding = c.parts[b].padding;
      sequences.push_back(sequence);
      row += sequence.rows + 5;
      most_blocks = std::max(most_blocks, (sequence.position + sequence.rows + 127) / 128 - sequence.position / 128);
    }
    rows = row;
    key_dim = c.dk <= 64 ? 64 : 128;
    levels = std::max<int64_t>(c.levels, 1);
    fill();
    in.shape.heads = c.heads;
    in.shape.groups = c.groups;
    in.shape.key_dim = c.dk;
    in.shape.value_dim = c.dv;
    in.shape.levels = c.levels;
    in.shape.absorb = c.absorb;
    in.shape.head_map = c.head_map;
    in.shape.scale = scale;
    in.linear = c.levels == 0;
    in.batch.sequences = sequences.data();
    in.batch.count = static_cast<int64_t>(sequences.size());
    in.batch.total_rows = rows;
    in.blocks = most_blocks + 1;
    in.places = (rows >> kBlockLog) + 2 * in.batch.count;
    in.members = static_cast<int>(c.heads / c.groups);
    in.bundle = std::min(in.members, kBundle);
    in.parts_of_group = (in.members + in.bundle - 1) / in.bundle;
    for (int64_t b = 0; b < in.batch.count; ++b)
      each_block(b, [&](const BlockOfRows& block) {
        in.entries = std::max(in.entries, __builtin_popcount(block.reads(in.linear)));
      });
    in.factor_bytes = BlockFactors::bytes(in.entries, in.linear);
    in.dq = view(dq, LLA_BF16, c.dk, c.groups, c.dq);
    in.dlambda = view(dlambda, c.lambda_dtype, levels, c.heads, c.dlambda && !in.linear);
    const auto map = [&](const std::vector<uint16_t>& data, int64_t dim, int64_t heads) {
      CUtensorMap to;
      auto* begin = const_cast<uint16_t*>(data.data());
      const TensorView<3> rows_view{
          TensorType::kBf16, begin, {dim, rows, heads}, {2 * dim * heads, 2 * dim}, {64, kBlock, 1}};
      EXPECT_EQ(make_map(rows_view, &to), LLA_OK);
      return to;
    };
    in.q = map(q, c.dk, c.groups);
    in.k = map(k, c.dk, c.groups);
    in.v = map(v, c.dv, c.heads);
    in.dy = map(dy, c.dv, c.heads);
  }

  void run() {
    const int parts = in.parts_of_group * static_cast<int>(c.groups);
    for (int slice = 0; slice < c.slices; ++slice) {
      in.part_begin = parts * slice / c.slices;
      in.part_count = parts * (slice + 1) / c.slices - in.part_begin;
      in.head_begin = in.part_first(in.part_begin);
      in.head_count = in.part_end(in.part_begin + in.part_count - 1) - in.head_begin;
      run_slice();
    }
    compare();
  }

 private:
  const Case& c;
  BackwardParameters in;
  std::vector<Sequence> sequences;
  int64_t rows = 0, key_dim = 0, levels = 0;
  double scale = 0.25;
  std::mt19937 random;
  std::vector<uint16_t> q, k, v, dy;
  std::vector<double> gate, write, lambda;  // [row][head], lambda [row][head][level]
  std::vector<char> dq, dlambda;            // as tensors
  std::vector<char> dq_before, dlambda_before;
  std::vector<double> want_dq, want_dlambda, got_dq;
  std::vector<double> got_reads, want_reads, got_row_reads, want_row_reads;

  double normal() { return std::normal_distribution<double>()(random); }
  View view(std::vector<char>& data, int32_t dtype, int64_t dim, int64_t heads, bool present) {
    View to;
    data.resize(static_cast<size_t>(rows * heads * dim * dtype_size(dtype)));
    for (int64_t i = 0; i < rows * heads * dim; ++i)
      store_element<double>(data.data(), dtype, i, static_cast<double>(static_cast<int>(random() % 64)) / 16);
    (&data == &dq ? dq_before : dlambda_before) = data;
    if (!present) return to;
    to.data = data.data();
    to.dtype = dtype;
    to.accumulate = c.accumulate;
    to.row_stride = heads * dim;
    to.head_stride = dim;
    return to;
  }

  void fill() {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    std::vector<bool> live(static_cast<size_t>(rows));
    for (const Sequence& s : sequences)
      for (int64_t r = 0; r < s.rows && !s.padding; ++r) live[static_cast<size_t>(s.row_begin + r)] = true;
    const auto tensor = [&](std::vector<uint16_t>& to, int64_t width, double size) {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < width; ++i)
          to.push_back(float_to_bf16(static_cast<float>(live[static_cast<size_t>(r)] ? size * normal() : nan)));
    };
    tensor(q, c.groups * c.dk, 1);
    tensor(k, c.groups * c.dk, 1 / std::sqrt(static_cast<double>(c.dk)));
    tensor(v, c.heads * c.dv, 1);
    tensor(dy, c.heads * c.dv, 1);
    for (int64_t i = 0; i < rows * c.heads; ++i) {
      gate.push_back(-0.02 * std::fabs(normal()));
      if (c.hard && random() % 20 == 0) gate.back() = random() % 2 ? -kNone : -700;
      write.push_back(c.write ? 0.5 + 0.1 * normal() : 1);
      for (int64_t l = 0; l < levels; ++l) lambda.push_back(c.levels ? 1 + 0.3 * normal() : 1);
    }
    want_dq.resize(static_cast<size_t>(rows * c.groups * c.dk));
    got_dq.resize(want_dq.size());
    want_dlambda.resize(static_cast<size_t>(rows * c.heads * levels));
  }

  double gate_of(const Sequence& s, int64_t position, int64_t head) const {
    const int64_t r = position - s.position;
    return r < 0 || r >= s.rows ? 0 : gate[static_cast<size_t>((s.row_begin + r) * c.heads + head)];
  }
  // Decay from position `from` into `to`: gates after `from`, that of `to` included.
  double decay(const Sequence& s, int64_t from, int64_t to, int64_t head) const {
    double sum = 0;
    for (int64_t p = from + 1; p <= to; ++p) sum += gate_of(s, p, head);
    return std::exp(sum);
  }
  double write_of(const Sequence& s, int64_t position, int64_t head) const {
    return write[static_cast<size_t>((s.row_begin + position - s.position) * c.heads + head)];
  }
  int64_t column(int level) const { return c.levels == 0 ? 0 : c.absorb && level > c.levels - 1 ? c.levels - 1 : level; }
  double lambda_of(const Sequence& s, int64_t position, int64_t head, int level) const {
    return lambda[static_cast<size_t>(((s.row_begin + position - s.position) * c.heads + head) * levels + column(level))];
  }
  static double number(const std::vector<uint16_t>& of, int64_t i) { return bf16_to_float(of[static_cast<size_t>(i)]); }

  template <class Work>
  void each_block(int64_t b, Work work) {
    for (int64_t n = 0; n < in.blocks; ++n) {
      BlockOfRows block;
      if (find_block(in, b * in.blocks + n, &block)) work(block);
    }
  }

  void fill_factors(const Sequence& s, const BlockOfRows& block, int64_t head, BlockFactors* to) const {
    std::memset(static_cast<void*>(to), 0, static_cast<size_t>(in.factor_bytes));
    const int64_t begin = int64_t{block.block} * kBlock;
    const uint32_t reads = block.reads(in.linear);
    int entry = 0;
    for (uint32_t left = reads; left; left &= left - 1, ++entry) {
      const int u = __builtin_ctz(left);
      const int64_t end = (int64_t{block.node_end(u, in.linear)} + 1) * kBlock - 1;
      to->newer[entry] = static_cast<float>(decay(s, end, begin - 1, head));
      for (int r = block.lo; r < block.hi && !in.linear; ++r)
        to->lambda(kInnerLevels + 1 + entry)[r] = static_cast<float>(lambda_of(s, begin + r, head, u + 8));
    }
    for (int r = block.lo; r < block.hi; ++r) {
      const double w = write_of(s, begin + r, head);
      for (int l = 1; l <= kInnerLevels; ++l) {
        const int64_t size = int64_t{1} << (l - 1), middle = begin + (r & -(2 * size)) + size;
        const bool upper = (r >> (l - 1)) & 1;
        to->level[l - 1][r] = static_cast<float>(upper ? scale * decay(s, middle - 1, begin + r, head)
                                                       : decay(s, begin + r, middle - 1, head));
        if (upper && !in.linear) to->lambda(l)[r] = static_cast<float>(lambda_of(s, begin + r, head, l));
      }
      to->write[r] = static_cast<float>(w);
      if (!in.linear) to->lambda(0)[r] = static_cast<float>(lambda_of(s, begin + r, head, 0));
      to->start[r] = static_cast<float>(scale * decay(s, begin - 1, begin + r, head));
    }
  }

  void fill_node(const Sequence& s, const BlockOfRows& block, int64_t head, uint16_t* to) const {
    const int64_t group = in.shape.group_of(head), end = (int64_t{block.block} + 1) * kBlock - 1;
    const int64_t size = in.linear ? end + 1 : kBlock << __builtin_ctz(~block.block);
    std::vector<double> sum(static_cast<size_t>(c.dk * c.dv));
    double factor = 1;
    for (int64_t p = end; p > end - size && p >= s.position; factor *= std::exp(gate_of(s, p, head)), --p) {
      const int64_t row = s.row_begin + p - s.position;
      for (int64_t i = 0; i < c.dk; ++i)
        for (int64_t j = 0; j < c.dv; ++j)
          sum[static_cast<size_t>(i * c.dv + j)] += factor * write_of(s, p, head) *
                                                    number(k, (row * c.groups + group) * c.dk + i) *
                                                    number(v, (row * c.heads + head) * c.dv + j);
    }
    std::fill(to, to + key_dim * kColumns, uint16_t{0});
    for (int64_t i = 0; i < c.dk; ++i)
      for (int64_t j = 0; j < c.dv; ++j)
        to[i * kColumns + j] = float_to_bf16(static_cast<float>(sum[static_cast<size_t>(i * c.dv + j)]));
  }

  void run_slice() {
    const auto slots = static_cast<size_t>(in.places * in.head_count);
    std::vector<float4> factors(slots * static_cast<size_t>(in.factor_bytes) / 16);
    std::vector<float4> nodes(slots * static_cast<size_t>(key_dim) * kColumns / 8);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> reads(slots * kMostEntries, nan), row_reads(slots * kBlock, nan);
    std::vector<float> parts(in.parts_of_group > 1 ? static_cast<size_t>(in.part_count * in.places * kBlock * key_dim) : 0,
                             nan);
    std::fill(nodes.begin(), nodes.end(), float4{nan, nan, nan, nan});
    in.factors_memory = reinterpret_cast<char*>(factors.data());
    in.nodes_memory = reinterpret_cast<unsigned short*>(nodes.data());
    in.reads = reads.data();
    in.row_reads = row_reads.data();
    in.dq_parts = parts.data();
    const TensorView<2> view{TensorType::kBf16,
                             nodes.data(),
                             {kColumns, static_cast<int64_t>(slots) * key_dim},
                             {2 * kColumns},
                             {64, static_cast<int32_t>(key_dim)}};
    ASSERT_EQ(make_map(view, &in.nodes), LLA_OK);
    const auto each = [&](auto work) {
      for (int64_t b = 0; b < in.batch.count; ++b)
        each_block(b, [&](const BlockOfRows& block) {
          for (int i = in.head_begin; i < in.head_begin + in.head_count; ++i)
            work(sequences[static_cast<size_t>(b)], block, i, in.slot(block.place, i));
        });
    };
    each([&](const Sequence& s, const BlockOfRows& block, int i, int64_t slot) {
      fill_factors(s, block, in.head_of(i), in.factors(slot));
      if (block.makes) fill_node(s, block, in.head_of(i), in.nodes_memory + slot * key_dim * kColumns);
    });
    ASSERT_EQ(launch_row_gradients(in, static_cast<int>(key_dim), nullptr), LLA_OK);
    each([&](const Sequence& s, const BlockOfRows& block, int i, int64_t slot) {
      for (int r = 0; r < kBlock; ++r) got_row_reads.push_back(row_reads[static_cast<size_t>(slot * kBlock + r)]);
      const int entries = __builtin_popcount(block.reads(in.linear));
      for (int e = 0; e < entries; ++e) got_reads.push_back(reads[static_cast<size_t>(slot * kMostEntries + e)]);
      expect(s, block, in.head_of(i), entries);
    });
    if (in.parts_of_group == 1 || !c.dq) return;
    for (int part = 0; part < in.part_count; ++part)
      for (int64_t b = 0; b < in.batch.count; ++b)
        each_block(b, [&](const BlockOfRows& block) {
          const float* from = parts.data() + (part * in.places + block.place) * kBlock * key_dim;
          for (int r = block.lo; r < block.hi; ++r)
            for (int64_t j = 0; j < c.dk; ++j)
              got_dq[static_cast<size_t>(
                  ((block.row + r) * c.groups + in.group_of(in.part_first(in.part_begin + part))) * c.dk + j)] +=
                  from[r * key_dim + j];
        });
  }

  // What the rows of a block should give.
  void expect(const Sequence& s, const BlockOfRows& block, int64_t head, int entries) {
    const int64_t group = in.shape.group_of(head), begin = int64_t{block.block} * kBlock;
    const uint32_t reads = block.reads(in.linear);
    const size_t first_read = want_reads.size(), first_row = want_row_reads.size();
    want_reads.resize(first_read + static_cast<size_t>(entries));
    want_row_reads.resize(first_row + kBlock);
    for (int r = block.lo; r < block.hi; ++r) {
      const int64_t t = begin + r, row = block.row + r;
      double log_decay = 0;
      for (int64_t p = t; p >= s.position; log_decay += gate_of(s, p, head), --p) {
        const int64_t source = s.row_begin + p - s.position;
        double match = 0, value = 0;
        for (int64_t j = 0; j < c.dk; ++j)
          match += number(q, (row * c.groups + group) * c.dk + j) * number(k, (source * c.groups + group) * c.dk + j);
        for (int64_t j = 0; j < c.dv; ++j)
          value += number(dy, (row * c.heads + head) * c.dv + j) * number(v, (source * c.heads + head) * c.dv + j);
        const int level = level_of(t, p);
        const double base = scale * write_of(s, p, head) * std::exp(log_decay), weight = base * lambda_of(s, t, head, level);
        for (int64_t j = 0; j < c.dk; ++j)
          want_dq[static_cast<size_t>((row * c.groups + group) * c.dk + j)] +=
              weight * value * number(k, (source * c.groups + group) * c.dk + j);
        want_dlambda[static_cast<size_t>((row * c.heads + head) * levels + column(level))] += base * match * value;
        if (p == t) continue;
        want_row_reads[first_row + static_cast<size_t>(r)] += weight * match * value;
        if (level <= kInnerLevels) continue;
        const int entry = in.linear ? 0 : __builtin_popcount(reads & ((1u << (level - 8)) - 1));
        want_reads[first_read + static_cast<size_t>(entry)] += weight * match * value;
      }
    }
  }

  static double norm_error(const std::vector<double>& got, const std::vector<double>& want) {
    double error = 0, size = 1e-30;
    for (size_t i = 0; i < got.size(); ++i) {
      error += (got[i] - want[i]) * (got[i] - want[i]);
      size += want[i] * want[i];
    }
    return std::sqrt(error / size);
  }
  // A tensor against what it should have become; rows that are not the call's must be as before.
  void compare_tensor(const std::vector<char>& got, const std::vector<char>& before, std::vector<double> want, int32_t dtype,
                      int64_t width) const {
    std::vector<double> values(want.size());
    for (int64_t row = 0; row < rows; ++row) {
      bool live = false;
      for (const Sequence& s : sequences) live = live || (!s.padding && row >= s.row_begin && row < s.row_begin + s.rows);
      for (int64_t i = row * width; i < (row + 1) * width; ++i) {
        const auto at = static_cast<size_t>(i);
        values[at] = load_element<double>(got.data(), dtype, i);
        if (!live || c.accumulate) want[at] += load_element<double>(before.data(), dtype, i);
        if (!live) {
          ASSERT_EQ(values[at], want[at]) << "row " << row;
        }
      }
    }
    EXPECT_LT(norm_error(values, want), 6e-3);
  }
  void compare() const {
    EXPECT_LT(norm_error(got_row_reads, want_row_reads), 5e-3);
    EXPECT_LT(norm_error(got_reads, want_reads), 8e-3);
    if (!c.dq)
      EXPECT_EQ(dq, dq_before);
    else if (in.parts_of_group == 1)
      compare_tensor(dq, dq_before, want_dq, LLA_BF16, c.groups * c.dk);
    else
      EXPECT_LT(norm_error(got_dq, want_dq), 5e-3);
    if (in.dlambda.present())
      compare_tensor(dlambda, dlambda_before, want_dlambda, c.lambda_dtype, c.heads * levels);
    else
      EXPECT_EQ(dlambda, dlambda_before);
  }
};

void check(const Case& c) {
  for (auto order : {emulator::Order::kMixed, emulator::Order::kLate}) {
    SCOPED_TRACE(testing::Message() << "heads " << c.heads << " dk " << c.dk << " dv " << c.dv << " levels " << c.levels
                                    << " order " << static_cast<int>(order));
    emulator::order = order;
    Problem(c).run();
    emulator::order = emulator::Order::kMixed;
    if (c.parts.size() != 4) break;  // once in the other order will do
  }
}

TEST(HopperRowGradients, LogLinear) { check({.parts = {{300}, {64}, {1}, {128}}}); }

TEST(HopperRowGradients, Linear) {
  check({.levels = 0, .parts = {{300}, {129, 64}}});
  check({.dk = 64, .levels = 0, .parts = {{260}}});
}

TEST(HopperRowGradients, OddShapes) {
  check({.heads = 4, .groups = 2, .dk = 96, .dv = 40, .parts = {{200}, {17}}});
  check({.heads = 4, .groups = 2, .dk = 40, .dv = 8, .parts = {{200}}, .head_map = LLA_HEAD_MAP_CYCLIC});
  check({.dk = 64, .parts = {{520}}});
}

// The call begins within a block, at any node level.
TEST(HopperRowGradients, Positions) {
  check({.heads = 1, .levels = 15, .parts = {{150, 1000}, {100, 64}, {70, 130}, {300, 8192 - 200}}});
}

// More heads in a group than one block of threads sums up; in slices, too.
TEST(HopperRowGradients, Parts) {
  check({.heads = 10, .dk = 64, .dv = 16, .parts = {{140}}});
  check({.heads = 20, .groups = 2, .dk = 64, .dv = 16, .parts = {{140}}, .slices = 2});
  check({.heads = 6, .groups = 3, .dk = 64, .dv = 16, .parts = {{140}}, .slices = 3});
}

TEST(HopperRowGradients, Absorbing) {
  check({.heads = 1, .dk = 64, .levels = 4, .parts = {{700}}, .absorb = true});
  check({.heads = 1, .dk = 64, .levels = 9, .parts = {{700}}, .absorb = true});
  check({.heads = 1, .dk = 64, .levels = 1, .parts = {{200}}, .absorb = true});
}

TEST(HopperRowGradients, ManyColumns) { check({.heads = 1, .dk = 64, .levels = 40, .parts = {{200}}}); }

TEST(HopperRowGradients, HardGates) {
  check({.parts = {{300}}, .hard = true});
  check({.levels = 0, .parts = {{300}}, .hard = true, .write = false});
}

TEST(HopperRowGradients, Outputs) {
  check({.parts = {{200}}, .accumulate = true});
  check({.parts = {{200}}, .accumulate = true, .lambda_dtype = LLA_BF16});
  check({.dk = 64, .parts = {{200}}, .lambda_dtype = LLA_F16});
  check({.dk = 64, .parts = {{200}}, .dq = false});
  check({.dk = 64, .parts = {{200}}, .dlambda = false});
}

TEST(HopperRowGradients, EmptySequences) { check({.dk = 64, .parts = {{0}, {130}, {200, 0, true}, {5}}}); }

}  // namespace
