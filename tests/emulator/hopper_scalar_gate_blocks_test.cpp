// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper, kernels alone: nodes of blocks, gradients of gates, sums over parts of groups.
#include <cstdlib>

#include "cuda/hopper/scalar_gate_backward.h"
#include "cuda/hopper/scalar_gate_views.h"
#include "scalar_gate_testing.h"

namespace {

using namespace scalar_gate_testing;
using namespace lla::cuda::hopper;

double from_half(unsigned short bits) { return load_element<double>(&bits, LLA_BF16, 0); }

// A problem's parameters with scratch of its own for one slice; arrays begin with NaN.
struct Blocks {
  BackwardParameters in;
  std::vector<Sequence> sequences;
  int key_dim = 64;
  std::vector<BlockFactors> factors;
  std::vector<float> totals, up, reads, through, row_reads, dq_parts, dq_sums;
  std::vector<unsigned short> nodes;
  Tensor k, v, gate, dgate, dq;
  Random random{7};

  Blocks(const MixerShape& shape, const std::vector<Part>& parts, int head_begin, int head_count) {
    in.shape = shape;
    in.linear = shape.levels == 0;
    int64_t row = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      sequences.push_back(plain_sequence(row, parts[i].rows, parts[i].position));
      sequences.back().padding = parts[i].fork;
      row += parts[i].rows + kSlack;
    }
    in.batch.sequences = sequences.data();
    in.batch.count = static_cast<int64_t>(sequences.size());
    in.batch.total_rows = row;
    bound(&in.batch);
    key_dim = key_columns(shape);
    in.places = (row >> kBlockLog) + 2 * in.batch.count;
    in.blocks = blocks_of(in.batch.most_rows, in.batch.most_length);
    in.entries = kMostEntries;
    in.members = static_cast<int>(shape.heads / shape.groups);
    in.bundle = std::min(in.members, 2);
    in.parts_of_group = (in.members + in.bundle - 1) / in.bundle;
    in.head_begin = head_begin;
    in.head_count = head_count;
    while (in.part_first(in.part_begin) < head_begin) ++in.part_begin;
    while (in.part_count == 0 || in.part_end(in.part_begin + in.part_count - 1) < head_begin + head_count) ++in.part_count;
    const size_t slots = static_cast<size_t>(in.places * head_count);
    const auto fill = [&](std::vector<float>* to, size_t count, auto value) {
      to->resize(count);
      for (float& x : *to) x = static_cast<float>(value());
    };
    const auto share = [&] { return random.uniform() < 0.1 ? 0 : random.uniform(); };
    const auto normal = [&] { return random.normal(); };
    factors.resize(slots);
    fill(&totals, slots, normal);
    fill(&up, slots, share);
    fill(&reads, slots * kMostEntries, normal);
    fill(&through, slots, normal);
    fill(&row_reads, slots * kBlock, normal);
    for (BlockFactors& of : factors) {
      for (int r = 0; r < kBlock; ++r) {
        of.fold[r] = static_cast<float>(share());
        of.write[r] = static_cast<float>(random.uniform());
        of.start[r] = static_cast<float>(normal());  // flow of what others read of a row
      }
    }
    nodes.assign(slots * static_cast<size_t>(key_dim) * kColumns, 0x7fff);
    in.factors_memory = reinterpret_cast<char*>(factors.data());
    in.factor_bytes = static_cast<int64_t>(sizeof(BlockFactors));
    in.totals = totals.data();
    in.up = up.data();
    in.reads = reads.data();
    in.through = through.data();
    in.row_reads = row_reads.data();
    in.nodes_memory = nodes.data();
    TensorView<2> rows_of_nodes{TensorType::kBf16,
                                nodes.data(),
                                {kColumns, static_cast<int64_t>(slots) * key_dim},
                                {2 * kColumns},
                                {kColumns, key_dim}};
    EXPECT_EQ(make_map(rows_of_nodes, &in.nodes), LLA_OK);
    rows_of_nodes.box[1] = 64;
    EXPECT_EQ(make_map(rows_of_nodes, &in.node_halves), LLA_OK);
    k = Tensor(LLA_BF16, row, shape.groups, shape.key_dim);
    v = Tensor(LLA_BF16, row, shape.heads, shape.value_dim);
    gate = Tensor(LLA_F32, row, shape.heads, 1);
    dgate = Tensor(LLA_F32, row, shape.heads, 1);
    for (Tensor* t : {&k, &v, &gate}) t->fill(normal);
    each_block([&](const Sequence& s, int64_t, int64_t, int64_t) {
      for (Tensor* t : {&k, &v}) {  // rows of no sequence
        for (int64_t r = s.row_begin + s.rows; r < s.row_begin + s.rows + kSlack; ++r) {
          for (int64_t h = 0; h < t->heads; ++h) {
            for (int64_t d = 0; d < t->dim; ++d) t->set(r, h, d, NAN);
          }
        }
      }
    });
    in.gate = gate.view();
    EXPECT_EQ(make_map(rows_view(k.view(), shape.key_dim, row, shape.groups), &in.k), LLA_OK);
    EXPECT_EQ(make_map(rows_view(v.view(), shape.value_dim, row, shape.heads), &in.v), LLA_OK);
  }

  // visit(sequence, block, first of the sequence's blocks, end) of all blocks.
  template <class Visit>
  void each_block(Visit visit) {
    for (int64_t b = 0; b < in.batch.count; ++b) {
      const Sequence& s = sequences[static_cast<size_t>(b)];
      if (s.padding || s.rows == 0) continue;
      const int64_t first = s.position >> kBlockLog, end = (s.position + s.rows + kBlock - 1) >> kBlockLog;
      for (int64_t block = first; block < end; ++block) visit(s, block, first, end);
    }
  }
  size_t slot(const Sequence& s, int64_t block, int number) const {
    const int64_t first = s.position >> kBlockLog;
    return static_cast<size_t>(in.slot(in.first_place(s, &s - sequences.data()) + block - first, number));
  }
  // What block `reader` reads: visit(node's last block, entry).
  template <class Visit>
  void each_read(int64_t reader, int64_t first, Visit visit) const {
    if (in.linear) {
      if (reader > first) visit(reader - 1, 0);
      return;
    }
    int entry = 0;
    for (int u = 0; u < 20; ++u) {
      const int64_t node = (reader >> u << u) - 1;
      if (((reader >> u) & 1) && node >= first) visit(node, entry++);
    }
  }
  int64_t parent(int64_t block) const {
    int ones = 0;
    while ((block >> ones) & 1) ++ones;
    return in.linear ? block + 1 : block + (int64_t{1} << ones);
  }
};

MixerShape shape_of(int64_t heads, int64_t groups, int64_t dk, int64_t dv, bool linear, bool cyclic = false) {
  return make_shape(heads, groups, dk, dv, 64, linear ? 0 : 20, false, cyclic);
}

void check_nodes(Blocks b) {
  ASSERT_EQ(launch_block_nodes(b.in, b.key_dim, nullptr), LLA_OK);
  const int64_t dk = b.in.shape.key_dim, dv = b.in.shape.value_dim;
  double error = 0, norm = 0;
  for (int number = b.in.head_begin; number < b.in.head_begin + b.in.head_count; ++number) {
    const int head = b.in.head_of(number), group = b.in.group_of(number);
    std::map<std::pair<const Sequence*, int64_t>, std::vector<double>> nodes;
    b.each_block([&](const Sequence& s, int64_t block, int64_t first, int64_t end) {
      if (block + 1 >= end) return;
      const size_t slot = b.slot(s, block, number);
      std::vector<double>& node = nodes[{&s, block}];
      node.assign(static_cast<size_t>(dk * dv), 0);
      for (int r = 0; r < kBlock; ++r) {
        const int64_t position = block * kBlock + r;
        if (position < s.position) continue;
        const int64_t row = s.row_begin + position - s.position;
        const double factor = double{b.factors[slot].fold[r]} * b.factors[slot].write[r];
        for (int64_t i = 0; i < dk * dv; ++i)
          node[static_cast<size_t>(i)] += factor * b.k.get(row, group, i / dv) * b.v.get(row, head, i % dv);
      }
      for (int64_t child = first; child < block; ++child) {
        if (b.parent(child) != block) continue;
        const std::vector<double>& from = nodes[{&s, child}];
        for (size_t i = 0; i < node.size(); ++i) node[i] += double{b.up[b.slot(s, child, number)]} * from[i];
      }
      for (int64_t i = 0; i < dk * dv; ++i) {
        const size_t at = (slot * static_cast<size_t>(b.key_dim) + static_cast<size_t>(i / dv)) * kColumns;
        const double got = from_half(b.nodes[at + static_cast<size_t>(i % dv)]), want = node[static_cast<size_t>(i)];
        error += (got - want) * (got - want);
        norm += want * want;
      }
      for (int64_t i = 0; i < int64_t{b.key_dim} * kColumns; ++i) {  // what a tensor does not have is zero
        const size_t at = slot * static_cast<size_t>(b.key_dim) * kColumns + static_cast<size_t>(i);
        if (i / kColumns >= dk || i % kColumns >= dv) {
          ASSERT_EQ(b.nodes[at] & 0x7fff, 0);
        }
      }
    });
  }
  EXPECT_LT(std::sqrt(error / norm), 5e-3);
}

const std::vector<Part> kRagged = {{500}, {0}, {130, 1000}, {1}, {300, 0, -1, true}, {700, 128 * 6 + 5}};

TEST(HopperScalarGateBlocks, Nodes) {
  check_nodes(Blocks(shape_of(4, 2, 40, 8, false), kRagged, 0, 4));
  check_nodes(Blocks(shape_of(6, 2, 128, 64, false, true), kRagged, 2, 3));
  check_nodes(Blocks(shape_of(1, 1, 64, 64, false), {{128 * 34 + 1}}, 0, 1));
  check_nodes(Blocks(shape_of(1, 1, 8, 8, false), {{128 * 300, 128 * 3 + 5}}, 0, 1));
  check_nodes(Blocks(shape_of(1, 1, 64, 64, false), {{128 * 20, 128 * 60 + 77}, {10}}, 0, 1));
}

TEST(HopperScalarGateBlocks, States) {
  check_nodes(Blocks(shape_of(4, 2, 40, 8, true), kRagged, 0, 4));
  check_nodes(Blocks(shape_of(2, 2, 128, 64, true), {{128 * 3, 50}}, 1, 1));
  check_nodes(Blocks(shape_of(1, 1, 64, 64, true), {{128 * 70 + 5, 100}, {300}}, 0, 1));
  // Over segments.
  check_nodes(Blocks(shape_of(1, 1, 64, 64, true), {{128 * 5, 128 * 126 + 9}, {300, 128 * 127}}, 0, 1));
  check_nodes(Blocks(shape_of(1, 1, 128, 8, true), {{128 * 5, 128 * 126 + 9}, {300, 128 * 127}}, 0, 1));
  check_nodes(Blocks(shape_of(1, 1, 8, 8, true), {{128 * 133, 128 * 254}}, 0, 1));
}

void check_gates(Blocks b, double hard = 0) {
  const double put = 0.5;
  b.gate.fill([&] { return b.random.uniform() < hard ? -INFINITY : -b.random.uniform(); });
  b.dgate.fill([&] { return put; });
  b.in.dgate = b.dgate.view(true);
  ASSERT_EQ(launch_block_flows(b.in, nullptr), LLA_OK);
  for (int number = b.in.head_begin; number < b.in.head_begin + b.in.head_count; ++number) {
    const int head = b.in.head_of(number);
    b.each_block([&](const Sequence& s, int64_t block, int64_t first, int64_t end) {
      double sum = 0;
      if (block + 1 < end) {
        b.each_read(block + 1, first, [&](int64_t node, int) {
          if (b.parent(node) + 1 < end) sum += b.through[b.slot(s, node, number)];
          for (int64_t reader = block + 1; reader < end; ++reader) {
            b.each_read(reader, first, [&](int64_t other, int entry) {
              if (other == node) sum += b.reads[b.slot(s, reader, number) * kMostEntries + static_cast<size_t>(entry)];
            });
          }
        });
      }
      for (int r = kBlock - 1; r >= 0; --r) {
        const int64_t row = s.row_begin + block * kBlock + r - s.position;
        if (row < s.row_begin || row >= s.row_begin + s.rows) continue;
        const size_t slot = b.slot(s, block, number);
        sum += double{b.row_reads[slot * kBlock + static_cast<size_t>(r)]} - b.factors[slot].start[r];
        const double want = put + (std::isinf(b.gate.get(row, head, 0)) ? 0 : sum);
        ASSERT_NEAR(b.dgate.get(row, head, 0), want, 2e-4) << "block " << block << " row " << r;
      }
    });
  }
  EXPECT_EQ(b.dgate.get(b.sequences[0].rows, 0, 0), put);  // a row of no sequence
}

TEST(HopperScalarGateBlocks, Gates) {
  for (const bool linear : {false, true}) {
    check_gates(Blocks(shape_of(4, 2, 8, 8, linear), kRagged, 0, 4), 0.02);
    check_gates(Blocks(shape_of(4, 2, 8, 8, linear, true), {{128 * 40 + 3, 128 * 22 + 60}, {100}}, 1, 2));
  }
  check_gates(Blocks(shape_of(1, 1, 8, 8, false), {{128 * 200 + 3, 128 * 60 + 60}}, 0, 1));
  check_gates(Blocks(shape_of(1, 1, 8, 8, false), {{128 * 140}}, 0, 1));
}

// Parts of groups of five heads in bundles of two, slice by slice.
void check_sums(bool accumulate, const std::vector<std::pair<int, int>>& slices) {
  Blocks b(shape_of(10, 2, 40, 8, false), kRagged, 0, 10);
  const size_t size = static_cast<size_t>(kBlock * b.key_dim), places = static_cast<size_t>(b.in.places);
  std::vector<float> all(6 * places * size), sums(places * size, NAN);
  for (float& x : all) x = static_cast<float>(b.random.normal());
  b.dq = Tensor(LLA_BF16, b.in.batch.total_rows, 2, 40, 8);
  b.dq.fill([] { return 1.0; });
  for (const auto& [begin, count] : slices) {
    b.in.part_begin = begin;
    b.in.part_count = count;
    ASSERT_EQ(launch_part_sums(b.in, b.dq.view(accumulate), all.data() + static_cast<size_t>(begin) * places * size,
                               sums.data(), b.key_dim, nullptr),
              LLA_OK);
  }
  b.each_block([&](const Sequence& s, int64_t block, int64_t, int64_t) {
    for (int r = 0; r < kBlock; ++r) {
      const int64_t row = s.row_begin + block * kBlock + r - s.position;
      if (row < s.row_begin || row >= s.row_begin + s.rows) continue;
      for (int64_t i = 0; i < 80; ++i) {
        const size_t place = b.slot(s, block, 0) / 10, at = place * size + static_cast<size_t>(r * b.key_dim + i % 40);
        float want = 0;
        for (size_t part = 0; part < 3; ++part) want += all[(3 * static_cast<size_t>(i / 40) + part) * places * size + at];
        if (accumulate) want += 1;
        ASSERT_EQ(b.dq.get(row, i / 40, i % 40), from_half(float_to_bf16(want)));
      }
    }
  });
  EXPECT_EQ(b.dq.get(b.sequences[0].rows, 0, 0), 1);  // a row of no sequence
}

TEST(HopperScalarGateBlocks, Sums) {
  check_sums(false, {{0, 6}});
  check_sums(true, {{0, 3}, {3, 3}});
  check_sums(false, {{0, 2}, {2, 1}, {3, 1}, {4, 1}, {5, 1}});
}

}  // namespace
