// SPDX-License-Identifier: Apache-2.0
// The emulator itself and the tile products: fragment maps, barriers, early exits.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cuda/common/matrix.h"
#include "cuda/hopper/fragment.h"

namespace lla::cuda {
namespace {

template <bool kExact>
__global__ void product(const float* a, const float* b, float* c, int depth) {
  float* sa = reinterpret_cast<float*>(shared_memory());
  float* sb = sa + 64 * kAlong;
  for (int i = threadIdx.x; i < 64 * depth; i += blockDim.x) {
    sa[i / depth * kAlong + i % depth] = a[i];
    sb[i / 64 * kAcross + i % 64] = b[i];
  }
  __syncthreads();
  TileSum sum;
  sum.clear();
  multiply<kExact>(
      sum, depth, [&](int m, int k) { return sa[m * kAlong + k]; }, [&](int k, int n) { return sb[k * kAcross + n]; });
  sum.each([&](int row, int column, float& x) { c[row * 64 + column] = x; });
}

// Fragments filled by the maps of fragment.h: multiply_fragment() must mean the same elements.
__global__ void product_of_fragments(const float* a, const float* b, float* c) {
  const int lane = threadIdx.x % 32;
  unsigned fa[4], fb[2];
  float sum[4] = {};
  for (int i = 0; i < 4; ++i) fa[i] = to_tf32(a[hopper::mma_k8_a(lane, i).row * 8 + hopper::mma_k8_a(lane, i).column]);
  for (int i = 0; i < 2; ++i) fb[i] = to_tf32(b[hopper::mma_k8_b(lane, i).row * 8 + hopper::mma_k8_b(lane, i).column]);
  multiply_fragment(sum, fa, fb);
  for (int i = 0; i < 4; ++i) c[hopper::mma_sum(lane, i).row * 8 + hopper::mma_sum(lane, i).column] = sum[i];
}

TEST(Matrix, FragmentsAreTheOnesOfTheMaps) {
  std::mt19937 engine(2);
  std::vector<float> a(16 * 8), b(8 * 8), c(16 * 8, -1e9f);
  for (float& x : a) x = static_cast<float>(static_cast<int>(engine() % 64) - 32);
  for (float& x : b) x = static_cast<float>(static_cast<int>(engine() % 64) - 32);
  launch(product_of_fragments, 1, 32, 0, nullptr, (const float*)a.data(), (const float*)b.data(), c.data());
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      float sum = 0;
      for (int k = 0; k < 8; ++k) sum += a[row * 8 + k] * b[k * 8 + column];
      EXPECT_EQ(c[row * 8 + column], sum) << row << ' ' << column;
    }
}

TEST(Matrix, ProductsOfTiles) {
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  for (const int depth : {8, 40, 64}) {
    std::vector<float> a(64 * depth), b(depth * 64), c(64 * 64);
    for (float& x : a) x = normal(engine);
    for (float& x : b) x = normal(engine);
    for (const bool exact : {false, true}) {
      launch(exact ? product<true> : product<false>, 1, kThreads, 64 * (kAlong + kAcross) * 4, nullptr, (const float*)a.data(),
             (const float*)b.data(), c.data(), depth);
      double error = 0, norm = 0;
      for (int i = 0; i < 64; ++i) {
        for (int j = 0; j < 64; ++j) {
          double sum = 0;
          for (int k = 0; k < depth; ++k) sum += double(a[i * depth + k]) * b[k * 64 + j];
          error += (sum - c[i * 64 + j]) * (sum - c[i * 64 + j]);
          norm += sum * sum;
        }
      }
      const double relative = std::sqrt(error / norm);
      EXPECT_LT(relative, exact ? 1e-6 : 5e-4) << depth << exact;
      EXPECT_EQ(relative > 1e-5, !exact);  // tf32 rounds
    }
  }
}

__global__ void row_sums(float* out, int leave) {
  if (static_cast<int>(threadIdx.x) >= leave) return;  // threads that have left do not hold the others up
  __syncthreads();
  TileSum sum;
  sum.clear();
  sum.each([&](int row, int column, float& x) { x = row + 100 * column; });
  sum.row_sums([](int, int, float x) { return x; }, [&](int row, int half, float value) { out[2 * row + half] = value; });
}

TEST(Matrix, RowSums) {
  std::vector<float> out(128, -1);
  launch(row_sums, 1, kThreads + 32, 0, nullptr, out.data(), kThreads);
  for (int row = 0; row < 64; ++row) {
    EXPECT_EQ(out[2 * row], 32 * row + 100 * 31 * 16);
    EXPECT_EQ(out[2 * row + 1], 32 * row + 100 * (31 * 16 + 32 * 32));
  }
}

}  // namespace
}  // namespace lla::cuda
