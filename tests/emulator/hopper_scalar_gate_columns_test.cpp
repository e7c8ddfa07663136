// SPDX-License-Identifier: Apache-2.0
// The kernels of the scalar gate's Hopper backward that are about factors, gradients of nodes, and sources: each alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "hopper_scalar_gate_backward_testing.h"

namespace {

using namespace hopper_backward_testing;

// Shapes that are not tiles; slices; types; positions; padding and empty sequences; absent factors.
std::vector<Options> cases() {
  Options log;
  log.levels = 12;
  log.parts = {{270}, {0}, {128}};
  Options linear = log;
  linear.levels = 0;
  linear.parts = {{230, 50}, {1}, {50, 0, true}};
  Options groups = log;
  groups.heads = 6, groups.groups = 2, groups.key_dim = 96, groups.value_dim = 40, groups.cyclic = true;
  groups.parts = {{150, 1000}, {17, 120}};
  groups.factor_type = LLA_BF16;
  groups.accumulate = true;
  Options slice = log;
  slice.heads = 11, slice.key_dim = 64, slice.value_dim = 24, slice.parts = {{140, 250}, {9, 5}};
  slice.part_begin = 1, slice.part_count = 1;
  slice.boxes = false;
  slice.factor_type = LLA_F16;
  Options narrow = log;
  narrow.heads = 4, narrow.groups = 4, narrow.key_dim = 40, narrow.value_dim = 64, narrow.levels = 9, narrow.absorb = true;
  narrow.parts = {{390}, {30, 100}};
  narrow.part_begin = 1, narrow.part_count = 2;
  Options hard = log;
  hard.hard = 0.02;
  hard.heads = 1;
  hard.parts = {{270, 128}};
  Options bare = linear;
  bare.gate = bare.write = false;
  bare.heads = 3, bare.groups = 3, bare.key_dim = 64;
  return {log, linear, groups, slice, narrow, hard, bare};
}

TEST(HopperScalarGateFactors, OfRowsAndNodes) {
  std::vector<Options> all = cases();
  Options deep = all[0];
  deep.heads = 1;
  deep.levels = 20;
  deep.parts = {{128 * 37 + 3, 128 * 5 + 7}, {128 * 9, 128 * 1023 - 64}};
  all.push_back(deep);
  for (size_t i = 0; i < all.size(); ++i) {
    Problem p(all[i]);
    EXPECT_LT(factors_error(p), 1e-5) << i;
  }
}

TEST(HopperScalarGateNodeReaders, GradientsFromReaders) {
  const std::vector<Options> all = cases();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].levels == 0) continue;  // with later states at once: NodeGradients
    Problem p(all[i]);
    EXPECT_LT(readers_error(p), 5e-3) << i;
  }
}

// Nodes with readers in several pieces, of which the first or last may be partial.
TEST(HopperScalarGateNodeReaders, Pieces) {
  Options o;
  o.heads = 1, o.key_dim = 8, o.value_dim = 8, o.levels = 20;
  o.parts = {{128 * 75 + 30, 128 * 53 + 100}, {128 * 3, 128 * 127 - 5}};
  Problem p(o);
  EXPECT_LT(readers_error(p), 5e-3);
}

TEST(HopperScalarGateNodeGradients, Down) {
  std::vector<Options> all = cases();
  Options deep;
  deep.heads = 1, deep.key_dim = 8, deep.value_dim = 8, deep.levels = 20;
  deep.parts = {{128 * 75 + 30, 128 * 30 + 100}, {128 * 3, 128 * 1023 - 5}};
  all.push_back(deep);
  deep.levels = 0;  // two segments, three, and one
  deep.parts = {{128 * 5 + 30, 128 * 126 + 100}, {128 * 133, 128 * 254 - 5}, {128 * 3, 0}};
  all.push_back(deep);
  deep.key_dim = 128;
  all.push_back(deep);
  deep.parts = {{128 * 9, 100}};  // one task: in two halves
  all.push_back(deep);
  for (size_t i = 0; i < all.size(); ++i) {
    Problem p(all[i]);
    double flows = 0;
    EXPECT_LT(down_error(p, &flows), 5e-3) << i;
    EXPECT_LT(flows, 5e-3) << i;
  }
}

TEST(HopperScalarGateColumns, GradientsOfSources) {
  const std::vector<Options> all = cases();
  for (size_t i = 0; i < all.size(); ++i) {
    Problem p(all[i]);
    const ColumnErrors errors = columns_errors(p);
    EXPECT_LT(errors.dk, 6e-3) << i;
    EXPECT_LT(errors.dv, 6e-3) << i;
    EXPECT_LT(errors.dwrite, 6e-3) << i;
    EXPECT_LT(errors.others, 6e-3) << i;
  }
}

// A slice of one part adds it to the parts of the slices before it.
TEST(HopperScalarGateColumns, PartsAddUp) {
  Options o = cases()[0];
  o.heads = 9, o.key_dim = 64, o.value_dim = 8, o.parts = {{90, 30}};
  o.part_begin = 1, o.part_count = 1;
  Problem p(o);
  p.in.adds = true;
  float* parts = p.dk_parts->host<float>();
  const auto size = static_cast<size_t>(p.in.places * kBlock * p.key_dim);
  std::fill(parts, parts + size, 100.0f);
  p.dk_parts->to_device();
  p.fill_factors();
  p.fill_nodes(p.grads);
  EXPECT_EQ(launch_column_gradients(p.in, p.key_dim, nullptr), LLA_OK);
  p.dk_parts->to_host();
  const std::vector<float> added(parts, parts + size);
  p.in.adds = false;
  EXPECT_EQ(launch_column_gradients(p.in, p.key_dim, nullptr), LLA_OK);
  p.dk_parts->to_host();
  for (size_t i = 0; i < size; ++i) {
    if (added[i] == 100.0f) continue;
    ASSERT_EQ(added[i], 100.0f + parts[i]) << i;
  }
  EXPECT_NE(added[40 * 64], 100.0f);
}

TEST(HopperScalarGateColumns, AbsentOutputs) {
  Problem p(cases()[0]);
  p.fill_factors();
  p.fill_nodes(p.grads);
  p.in.dk = p.in.dv = p.in.dwrite = View();
  EXPECT_EQ(launch_column_gradients(p.in, p.key_dim, nullptr), LLA_OK);
}

}  // namespace
