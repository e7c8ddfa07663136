// SPDX-License-Identifier: Apache-2.0
// The layer under the Hopper kernels, on the emulator: the products that tests/gpu/hopper_test.cu makes on a device, copies
// across the edges of tensors, a pipeline of copies, numbered barriers; and that mistakes are found.
#include "../gpu/hopper_test.cu"

#include <gtest/gtest.h>

#include "cuda/hopper/named_barrier.h"

namespace lla::cuda::hopper {
namespace {

class InOrder : public testing::TestWithParam<emulator::Order> {
  void SetUp() override { emulator::order = GetParam(); }
  void TearDown() override { emulator::order = emulator::Order::kMixed; }
};
INSTANTIATE_TEST_SUITE_P(Hopper, InOrder,
                         testing::Values(emulator::Order::kMixed, emulator::Order::kEarly, emulator::Order::kLate));

TEST_P(InOrder, Products) {
  EXPECT_EQ(failures<32>() + failures<64>() + failures<128>() + failures<256>(), 0);
  EXPECT_EQ(failures_f16<32>() + failures_f16<64>() + failures_f16<128>() + failures_f16<256>(), 0);
}

// ---- copies ----------------------------------------------------------------------------------------------------------------

// Copies the box at `at` of one tensor to `plain` as it lies in the tile, in box order, and by a bulk store to another tensor.
template <int kRank, int kColumns, int kElementBytes>
__global__ void copy_box(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to, const int32_t* at,
                         int rows, char* plain) {
  using Tile = SwizzledTile<8, kColumns, kElementBytes>;  // the offsets do not depend on the number of rows: one panel
  char* tile = shared_memory();
  Barrier* full = reinterpret_cast<Barrier*>(tile + 64 * 1024);
  int32_t place[kRank];
  for (int axis = 0; axis < kRank; ++axis) place[axis] = at[axis];
  if (threadIdx.x == 0) {
    prefetch_map(&from);
    init_barrier(full, 1);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    arrive_expect_bytes(full, rows * kSwizzleRow);
    load_box(tile, &from, place, full);
  }
  wait(full, 0);
  for (int i = threadIdx.x; i < rows * kColumns; i += blockDim.x)
    std::memcpy(plain + i * kElementBytes, tile + Tile::offset(i / kColumns, i % kColumns), kElementBytes);
  fence_shared_writes();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_box(&to, place, tile);
    commit_stores();
    wait_stores<0>();
  }
}

template <int kRank, class Element>
void round_trip(TensorType type, const int64_t (&extents)[kRank], const int32_t (&box)[kRank], const int32_t (&at)[kRank]) {
  int64_t strides[kRank - 1], size = sizeof(Element), elements = 1;
  int rows = 1;
  for (int axis = 0; axis < kRank; ++axis) {
    if (axis > 0) strides[axis - 1] = size;
    size = (size * extents[axis] + 15) / 16 * 16 + (axis == 0 ? 16 : 0);  // rows have a gap between them
    if (axis > 0) rows *= box[axis];
  }
  elements = size / static_cast<int64_t>(sizeof(Element));
  std::vector<Element> from(static_cast<size_t>(elements)), to(from.size(), 7), expected(to), plain(rows * box[0]);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<Element>(i % 60000 + 1);
  TensorView<kRank> view = {type, from.data(), {}, {}, {}};
  for (int axis = 0; axis < kRank; ++axis) {
    view.extents[axis] = extents[axis];
    view.box[axis] = box[axis];
    if (axis > 0) view.strides[axis - 1] = strides[axis - 1];
  }
  CUtensorMap maps[2];
  ASSERT_EQ(make_map(view, &maps[0]), LLA_OK);
  view.data = to.data();
  ASSERT_EQ(make_map(view, &maps[1]), LLA_OK);
  constexpr int kColumns = 128 / static_cast<int>(sizeof(Element));
  const int32_t* const place = at;
  void (*const kernel)(CUtensorMap, CUtensorMap, const int32_t*, int, char*) = copy_box<kRank, kColumns, sizeof(Element)>;
  ASSERT_EQ(launch(kernel, 1, 64, 65 * 1024, nullptr, maps[0], maps[1], place, rows, reinterpret_cast<char*>(plain.data())),
            LLA_OK);
  for (int i = 0; i < rows * box[0]; ++i) {
    int64_t offset = 0;
    bool inside = true;
    for (int axis = 0, left = i; axis < kRank; ++axis) {
      const int64_t coordinate = at[axis] + left % box[axis];
      left /= box[axis];
      inside = inside && coordinate >= 0 && coordinate < extents[axis];
      offset += coordinate * (axis == 0 ? static_cast<int64_t>(sizeof(Element)) : strides[axis - 1]);
    }
    const auto index = static_cast<size_t>(offset) / sizeof(Element);
    ASSERT_EQ(plain[i], inside ? from[index] : 0) << "element " << i;
    if (inside) expected[index] = from[index];
  }
  EXPECT_EQ(to, expected);
}

TEST_P(InOrder, CopiesAcrossTheEdges) {
  round_trip<2, uint16_t>(TensorType::kBf16, {64, 100}, {64, 32}, {0, 16});
  round_trip<2, uint16_t>(TensorType::kF16, {40, 100}, {64, 32}, {0, 80});
  round_trip<2, uint16_t>(TensorType::kBf16, {200, 20}, {64, 64}, {-3, -5});
  round_trip<2, float>(TensorType::kF32, {50, 9}, {32, 16}, {32, -2});
  round_trip<3, uint16_t>(TensorType::kBf16, {96, 7, 33}, {64, 4, 8}, {64, 5, 28});
  round_trip<3, float>(TensorType::kF32, {96, 7, 33}, {32, 1, 16}, {31, 3, -1});
  round_trip<4, uint16_t>(TensorType::kF16, {80, 5, 6, 3}, {64, 3, 4, 2}, {32, -1, 4, 1});
  round_trip<4, uint16_t>(TensorType::kBf16, {80, 5, 6, 3}, {64, 3, 4, 2}, {-500, 0, 0, 0});
}

TEST(Hopper, MapsThatAreRefused) {
  alignas(16) static char data[4096];
  const TensorView<2> good = {TensorType::kBf16, data, {64, 16}, {128}, {64, 8}};
  CUtensorMap map;
  EXPECT_EQ(make_map(good, &map), LLA_OK);
  TensorView<2> bad = good;
  bad.data = data + 8;
  EXPECT_EQ(make_map(bad, &map), LLA_INTERNAL);
  bad = good;
  bad.strides[0] = 120;
  EXPECT_EQ(make_map(bad, &map), LLA_INTERNAL);
  bad = good;
  bad.box[0] = 32;
  EXPECT_EQ(make_map(bad, &map), LLA_INTERNAL);
}

// ---- a pipeline ------------------------------------------------------------------------------------------------------------

constexpr int kStages = 4, kSteps = 50, kStageRows = 16;
enum Mistake : int { kNone, kNoFullWait, kNoFreeWait, kFewBytes, kNoArrival };

// One warp copies 50 tiles through 4 stages, others add up the elements of each tile into sums[step].
__global__ void pipeline(const __grid_constant__ CUtensorMap map, float* sums, int mistake) {
  constexpr uint32_t kStageBytes = kStageRows * kSwizzleRow;
  char* stages = shared_memory();
  Barrier* full = reinterpret_cast<Barrier*>(stages + kStages * kStageBytes);
  Barrier* free = full + kStages;
  float* partial = reinterpret_cast<float*>(free + kStages);
  const int warps = static_cast<int>(blockDim.x) / 32 - 1;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(full + stage, 1);
      init_barrier(free + stage, static_cast<uint32_t>(warps));
    }
    publish_barriers();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (warp == warps) {
    if (!elect_lane()) return;
    for (int step = 0; step < kSteps; ++step) {
      const int stage = step % kStages;
      if (mistake != kNoFreeWait) wait(free + stage, (step / kStages & 1) ^ 1);
      arrive_expect_bytes(full + stage, mistake == kFewBytes ? kStageBytes + 16 : kStageBytes);
      load_box(stages + stage * kStageBytes, &map, {0, step * kStageRows}, full + stage);
    }
    return;
  }
  using Tile = SwizzledTile<kStageRows, 32, 4>;
  for (int step = 0; step < kSteps; ++step) {
    const int stage = step % kStages;
    if (mistake != kNoFullWait) wait(full + stage, step / kStages & 1);
    float sum = 0;
    for (int row = warp; row < kStageRows; row += warps)
      sum += *reinterpret_cast<const float*>(stages + stage * kStageBytes + Tile::offset(row, lane));
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    if (lane == 0) partial[warp] = sum;
    if (lane == 0 && !(mistake == kNoArrival && step == 7)) arrive(free + stage);
    sync_some(3, 32 * warps);
    if (threadIdx.x == 0) {
      float all = 0;
      for (int w = 0; w < warps; ++w) all += partial[w];
      sums[step] = all;
    }
    sync_some(3, 32 * warps);
  }
}

bool pipeline_works(int mistake) {
  std::vector<float> data(kSteps * kStageRows * 32), expected(kSteps, 0.0f), sums(kSteps, -1.0f);
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<float>(i * 7 % 1000);
    expected[i / (kStageRows * 32)] += data[i];
  }
  CUtensorMap map;
  const TensorView<2> view = {TensorType::kF32, data.data(), {32, kSteps * kStageRows}, {128}, {32, kStageRows}};
  if (make_map(view, &map) != LLA_OK || launch(pipeline, 1, 128, 16 * 1024, nullptr, map, sums.data(), mistake) != LLA_OK)
    return false;
  return sums == expected;
}

TEST_P(InOrder, Pipeline) { EXPECT_TRUE(pipeline_works(kNone)); }

TEST(Hopper, MistakesOfAPipeline) {
  EXPECT_DEATH(pipeline_works(kNoFullWait), "more arrivals than the barrier.s");
  EXPECT_DEATH(pipeline_works(kNoFreeWait), "more arrivals than the barrier's|not waited|deadlock");
  EXPECT_DEATH(pipeline_works(kFewBytes),
               "deadlock(.|\n)*parity 0 at barrier address 9216, where 0 of 1 arrivals and 16 bytes are missing");
  EXPECT_DEATH(pipeline_works(kNoArrival), "deadlock");
}

// ---- numbered barriers -----------------------------------------------------------------------------------------------------

// Two groups of 64 threads hand a number to and fro: each waits where the other arrives.
__global__ void hand_over(int* log, int rounds, int mistake) {
  constexpr int kPing = 1, kPong = 2;
  int* shared = reinterpret_cast<int*>(shared_memory());
  if (threadIdx.x == 0) *shared = 0;
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    if (threadIdx.x < 64) {
      if (threadIdx.x == 0) *shared += 1;
      arrive_at<kPing>(128);
      sync_at<kPong>(mistake == 1 ? 96 : 128);
      if (threadIdx.x == 1) log[2 * round + 1] = *shared;
      sync_some(4, 64);
    } else {
      sync_at<kPing>(128);
      if (threadIdx.x == 64) log[2 * round] = *shared;
      if (threadIdx.x == 64) *shared *= 2;
      if (!(mistake == 2 && round == 3)) arrive_at<kPong>(128);
    }
  }
}

TEST(Hopper, NumberedBarriers) {
  constexpr int kRounds = 20;
  int log[2 * kRounds] = {}, *const to = log, value = 0;
  ASSERT_EQ(launch(hand_over, 3, 128, 64, nullptr, to, kRounds, 0), LLA_OK);
  for (int round = 0; round < kRounds; ++round) {
    EXPECT_EQ(log[2 * round], value += 1);
    EXPECT_EQ(log[2 * round + 1], value *= 2);
  }
  EXPECT_DEATH(launch(hand_over, 1, 128, 64, nullptr, to, kRounds, 1), "barrier 2 for (96|128) threads, where others came for");
  EXPECT_DEATH(launch(hand_over, 1, 128, 64, nullptr, to, kRounds, 2), "deadlock(.|\n)*barrier 2, where 64 of 128 have come");
}

// ---- products at the wrong time --------------------------------------------------------------------------------------------

enum ProductMistake : int { kRight, kEarlyRead, kEarlyOverwrite, kNoWait, kHalfGroup };

// result[64 x 32] = A B of ones, depth 16: 16 everywhere.
__global__ void small_product(float* result, int mistake) {
  using Tile = SwizzledTile<64, 64>;
  char* a = shared_memory();
  char* b = a + Tile::kBytes;
  for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) {
    const uint16_t one = 0x3f80;
    std::memcpy(a + Tile::offset(i / 64, i % 64), &one, 2);
    std::memcpy(b + Tile::offset(i / 64, i % 64), &one, 2);
  }
  fence_shared_writes();
  __syncthreads();
  if (mistake == kHalfGroup && threadIdx.x >= 64) return;
  float sum[16];
  for (float& x : sum) x = 1000;
  fence_products(sum);
  const uint64_t from_a = describe(shared_address(a), Major::kDepth, Tile::kPanelBytes);
  const uint64_t from_b = describe(shared_address(b), Major::kDepth, Tile::kPanelBytes);
  multiply<Half::kBf16, Major::kDepth, Major::kDepth>(sum, from_a, from_b, false);
  commit_products();
  if (mistake == kEarlyRead)
    for (int i = 0; i < 16; ++i) result[i * 128 + threadIdx.x] = sum[i];
  if (mistake == kEarlyOverwrite) std::memset(a + threadIdx.x * 64, 0, 64);
  if (mistake != kNoWait) wait_products<0>(sum);
  if (mistake != kEarlyRead)
    for (int i = 0; i < 16; ++i) result[i * 128 + threadIdx.x] = sum[i];
}

TEST(Hopper, MistakesOfProducts) {
  std::vector<float> result(64 * 32);
  const auto works = [&result](int mistake) {
    std::fill(result.begin(), result.end(), 0.0f);
    EXPECT_EQ(launch(small_product, 1, 128, 32 * 1024, nullptr, result.data(), mistake), LLA_OK);
    return std::all_of(result.begin(), result.end(), [](float x) { return x == 16; });
  };
  emulator::order = emulator::Order::kLate;
  EXPECT_TRUE(works(kRight));
  EXPECT_FALSE(works(kEarlyRead));
  EXPECT_FALSE(works(kEarlyOverwrite));
  EXPECT_DEATH(works(kNoWait), "ends before its warpgroup has waited for its products");
  EXPECT_DEATH(works(kHalfGroup), "ends before its warpgroup has waited for its products");
  emulator::order = emulator::Order::kMixed;
}

// All the shared memory that a block can have.
__global__ void fill_shared(int* result) {
  char* memory = shared_memory();
  for (size_t i = threadIdx.x; i < emulator::kSharedBytes; i += blockDim.x) memory[i] = static_cast<char>(i % 251);
  __syncthreads();
  int wrong = 0;
  for (size_t i = threadIdx.x; i < emulator::kSharedBytes; i += blockDim.x) wrong += memory[i] != static_cast<char>(i % 251);
  result[threadIdx.x] = wrong;
}

TEST(Hopper, SharedMemory) {
  int wrong[128], *const to = wrong;
  EXPECT_EQ(launch(fill_shared, 1, 128, 227 * 1024, nullptr, to), LLA_OK);
  for (int x : wrong) EXPECT_EQ(x, 0);
}

}  // namespace
}  // namespace lla::cuda::hopper
