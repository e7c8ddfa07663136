// SPDX-License-Identifier: Apache-2.0
// The reference mixers with a state: cuts anywhere change no bit, states are the canonical ones, gradients hand over.
#include <gtest/gtest.h>

#include "reference_case.h"

namespace reference_test {
namespace {

struct Kind {
  const char* name;
  int32_t mixer;
  int64_t levels;  // 8 = log-linear, fewer = absorbing, 0 = linear
};

const Kind kKinds[] = {
    {"scalar", LLA_SCALAR_GATE, 8},
    {"scalar_absorb", LLA_SCALAR_GATE, 5},
    {"scalar_absorb_inside", LLA_SCALAR_GATE, 2},
    {"scalar_linear", LLA_SCALAR_GATE, 0},
    {"delta", LLA_DELTA_RULE, 8},
    {"delta_absorb", LLA_DELTA_RULE, 5},
    {"delta_absorb_inside", LLA_DELTA_RULE, 2},
    {"delta_linear", LLA_DELTA_RULE, 0},
};

class State : public testing::TestWithParam<Kind> {
 protected:
  Case make(int64_t length, int64_t grain, uint32_t seed) const {
    return random_case(GetParam().mixer, length, grain, GetParam().levels, seed);
  }
};

// Runs the rows of sequence 0 in pieces that end at `cuts`; returns the image at the end.
SlotImage run_pieces(const Case& c, Pools* pools, SlotImage image, const std::vector<int64_t>& cuts, Values* y,
                     bool fork = false) {
  for (int64_t cut : cuts) {
    Append append = append_rows(c, pools, image, 0, cut - image.position, fork);
    forward(c, append.bound(), &pools->memory, y);
    image = append.after;
  }
  return image;
}

TEST_P(State, CutsChangeNoBit) {
  for (int64_t grain : {1, 4, 16}) {
    const Case c = make(71, grain, 11);
    const Values whole = forward(c);
    EXPECT_LE(relative_error(whole, direct_forward(c)), 1e-13);
    std::vector<int64_t> every_row;
    for (int64_t t = 1; t <= 71; ++t) every_row.push_back(t);
    for (const std::vector<int64_t>& cuts :
         {std::vector<int64_t>{71}, {3, 71}, {16, 71}, {48, 50, 71}, {5, 6, 31, 33, 64, 70, 71}, every_row}) {
      Pools pools(c.shape, LLA_F64, 1024);
      Values y;
      run_pieces(c, &pools, pools.image(0, 3), cuts, &y);
      EXPECT_EQ(y, whole) << "grain " << grain << ", " << cuts.size() << " pieces";
    }
  }
}

TEST_P(State, ForksLeaveTheirSourceAlone) {
  const Case c = make(60, 8, 12);
  const Values whole = forward(c);
  Pools pools(c.shape, LLA_F64, 1024, 64);
  Values y;
  const SlotImage source = run_pieces(c, &pools, pools.image(0), {29}, &y);
  const std::vector<double*> addresses = pools.numbers(source);
  Values before;
  for (double* number : addresses) before.push_back(*number);
  const SlotImage end = run_pieces(c, &pools, source, {29, 31, 40, 53, 60}, &y, true);  // the first fork has no rows
  EXPECT_EQ(y, whole);
  EXPECT_EQ(end.position, 60);
  for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(*addresses[i], before[i]);
  Values again;
  run_pieces(c, &pools, source, {60}, &again, true);
  for (size_t i = 29 * 12; i < whole.size(); ++i) EXPECT_EQ(again[i], whole[i]);
}

// A snapshot in the middle of an append continues like the sequence itself.
TEST_P(State, SnapshotsInsideAnAppend) {
  const Case c = make(60, 4, 13);
  const Values whole = forward(c);
  for (int64_t at : {10, 14, 16, 33, 60}) {
    Pools pools(c.shape, LLA_F64, 1024);
    Values y;
    const SlotImage start = run_pieces(c, &pools, pools.image(0, 2), {10}, &y);
    Append append = append_rows(c, &pools, start, 0, 50);
    Append snapshot;
    const SlotImage image = plan_image(c.shape, &pools, start, at - 10, true, &snapshot);
    append.nodes.insert(append.nodes.begin(), snapshot.nodes.begin(), snapshot.nodes.end());
    append.tails.insert(append.tails.begin(), snapshot.tails.begin(), snapshot.tails.end());
    forward(c, append.bound(), &pools.memory, &y);
    EXPECT_EQ(y, whole);
    Values again;
    run_pieces(c, &pools, image, {60}, &again, true);
    for (int64_t i = at * 12; i < 60 * 12; ++i) ASSERT_EQ(again[static_cast<size_t>(i)], whole[static_cast<size_t>(i)]);
  }
}

// Nodes in a narrow type are rounded at every fold, wherever calls end.
TEST_P(State, NarrowNodesDoNotSeeTheCuts) {
  Case c = make(70, 4, 14);
  for (const auto& [name, values] : c.in.all()) {
    for (double& value : *values) value = static_cast<float>(value);
  }
  for (int32_t dtype : {LLA_BF16, LLA_F32}) {
    Pools one(c.shape, dtype, 1024), many(c.shape, dtype, 1024);
    Values y, pieces;
    const SlotImage image = run_pieces(c, &one, one.image(0), {70}, &y);
    const SlotImage other = run_pieces(c, &many, many.image(0), {1, 6, 7, 8, 20, 33, 52, 69, 70}, &pieces);
    EXPECT_EQ(pieces, y);
    for (int b = 0; b < lla::kNodes; ++b) EXPECT_EQ(one.node(image, b, 3), many.node(other, b, 3));
    const double error = relative_error(y, forward(c));
    EXPECT_GT(error, 0);
    EXPECT_LE(error, dtype == LLA_BF16 ? 1e-2 : 1e-6);
  }
}

// An empty past at any position: rows before it count as zero.
TEST_P(State, EmptyPast) {
  Case c = make(90, 8, 15);
  Case tail = c;  // the same with everything before row 21 made harmless
  for (int64_t t = 0; t < 21; ++t) {
    for (int64_t i = 0; i < 10; ++i) tail.in.k[static_cast<size_t>(t * 10 + i)] = 0;
    for (int64_t i = 0; i < 12; ++i) tail.in.v[static_cast<size_t>(t * 12 + i)] = 0;
  }
  const Values expected = forward(tail);
  Sequence sequence;
  sequence.row_begin = sequence.position = 21;
  sequence.rows = 69;
  Values y(c.dy.size(), 0.0);
  forward(c, {sequence}, nullptr, &y);
  for (size_t i = 21 * 12; i < y.size(); ++i) ASSERT_NEAR(y[i], expected[i], 1e-13);

  Pools pools(c.shape, LLA_F64);
  SlotImage image;
  image.position = image.start = 21;
  image.tail = pools.take_tail();
  Values pieces(c.dy.size(), 0.0);
  run_pieces(c, &pools, image, {23, 24, 61, 90}, &pieces);
  EXPECT_EQ(pieces, y);
}

// Gradients of the same rows in one call and in several, with the gradient of the state handed over.
TEST_P(State, BackwardInSegments) {
  for (int64_t grain : {1, 4, 16}) {
    const Case c = make(67, grain, 16);
    Tensors whole = backward(c);
    for (const std::vector<int64_t>& cuts :
         {std::vector<int64_t>{32, 67}, {5, 67}, {48, 67}, {49, 51, 67}, {64, 67}, {66, 67}, {7, 7, 16, 18, 18, 48, 67}}) {
      Pools pools(c.shape, LLA_F64, 1024, 16), gradients(c.shape, LLA_F64, 1024, 16);
      std::vector<SlotImage> images = {pools.image(0)};
      Values y;
      // A copy of the state at each cut, since backward needs the histories from which the segments began.
      for (int64_t cut : cuts) {
        Append append = append_rows(c, &pools, images.back(), 0, cut - images.back().position, true);
        forward(c, append.bound(), &pools.memory, &y);
        images.push_back(append.after);
      }
      Tensors gradient;
      SlotImage handed;  // none: the final gradient of the last segment is zero
      for (size_t n = cuts.size(); n-- > 0;) {
        Sequence s;
        s.row_begin = s.position = images[n].position;
        s.rows = cuts[n] - s.position;
        s.history = images[n];
        s.final_gradient = handed;
        s.initial_gradient = gradients.image(s.position, static_cast<int32_t>(n) % static_cast<int32_t>(grain));
        backward(c, {s}, &pools.memory, &gradients.memory, &gradient);
        handed = s.initial_gradient;
      }
      for (size_t i = 0; i < whole.all().size(); ++i) {
        EXPECT_LE(relative_error(*gradient.all()[i].second, *whole.all()[i].second), 1e-11)
            << whole.all()[i].first << ", grain " << grain << ", first cut " << cuts[0];
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, State, testing::ValuesIn(kKinds), [](const auto& p) { return std::string(p.param.name); });

// The state of grain 1 is the canonical one; the scalar gate's nodes stand at their own end.
TEST(CanonicalState, GoldenBlocks) {
  for (const char* name : {"scalar_tiny", "scalar_groups", "scalar_no_gate", "scalar_signed_lambda", "scalar_absorb",
                           "scalar_linear", "scalar_mamba2_shape", "delta_tiny", "delta_groups", "delta_no_gate",
                           "delta_absorb", "delta_linear", "delta_gdn_shape"}) {
    SCOPED_TRACE(name);
    const golden::File file = golden::load(name);
    ASSERT_TRUE(file.valid) << file.error;
    for (bool linear : {false, true}) {
      const Case c = golden_case(file, 1, linear);
      const int apart = c.shape.separate_levels();
      Values blocks, expected;
      for (int64_t b = 0; b < c.sequences; ++b) {
        Pools pools(c.shape, LLA_F64, 64);
        Values y;
        Append append = append_rows(c, &pools, pools.image(0), b, c.length);
        forward(c, append.bound(), &pools.memory, &y);
        const int64_t size = c.shape.key_dim * c.shape.value_dim;
        for (int64_t h = 0; h < c.shape.heads; ++h) {
          Values absorbed(static_cast<size_t>(size), 0.0);
          double newer = 0;
          const auto collect = [&](int entry) {
            for (double value : pools.node(append.after, entry, h)) blocks.push_back(std::exp(newer) * value);
            newer += pools.node_decay(append.after, entry, h);
          };
          for (int j = 0; (c.length >> j) > 0; ++j) {
            if (!((c.length >> j) & 1)) continue;
            const Values& canonical = file["state.block" + std::to_string(j)];
            const auto begin = canonical.begin() + (b * c.shape.heads + h) * size;
            if (j < apart) {
              collect(j);
              expected.insert(expected.end(), begin, begin + size);
            } else {
              for (int64_t i = 0; i < size; ++i) absorbed[static_cast<size_t>(i)] += begin[i];
            }
          }
          if (c.shape.levels == 0 || c.shape.absorb) {
            collect(lla::kAbsorbed);
            expected.insert(expected.end(), absorbed.begin(), absorbed.end());
          }
        }
      }
      EXPECT_LE(relative_error(blocks, expected), 1e-12);
    }
  }
}

}  // namespace
}  // namespace reference_test
