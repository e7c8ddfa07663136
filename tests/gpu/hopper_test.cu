// SPDX-License-Identifier: Apache-2.0
// The layer under the Hopper kernels, on a device: bulk tensor loads -> wgmma (every width, both majors, A from shared memory
// and from registers) -> bulk tensor stores, in a warp-specialised block. Operands are multiples of 1/16 so small that float64
// and fp32 sums are both exact: every element must be equal. What is outside the result must stay untouched. The emulator runs
// the same cases (tests/emulator/hopper_test.cpp).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cuda/hopper/descriptor.h"
#include "cuda/hopper/fragment.h"
#include "cuda/hopper/matrix_copy.h"
#include "cuda/hopper/mbarrier.h"
#include "cuda/hopper/register_budget.h"
#include "cuda/hopper/swizzle.h"
#include "cuda/hopper/tma.h"
#include "cuda/hopper/wgmma.h"
#include "plugin/numeric.h"

namespace lla::cuda::hopper {
namespace {

constexpr int kRows = 128, kDepth = 128, kTiles = 3;  // one block: 128 x N, depth 3 x 128; a multiplying warpgroup has 64 rows
constexpr int kAllDepth = kDepth * kTiles;
constexpr int kRowOffset = 8;      // the result's first row in A
constexpr int kClippedRows = 125;  // of the 2-byte result: the last three rows of the box lie beyond the tensor
constexpr int kThreads = 384;

template <Half kTypeOf, int kWidth, Major kMajorA, Major kMajorB, bool kRegisterA>
struct Case {
  static constexpr Half kType = kTypeOf;
  static constexpr int kColumns = kWidth;
  static constexpr Major kA = kMajorA, kB = kMajorB;
  static constexpr bool kARegisters = kRegisterA;
  static constexpr int kPaddedColumns = kColumns < 64 ? 64 : kColumns;  // a panel is 64 elements wide
  using TileA = std::conditional_t<kA == Major::kDepth, SwizzledTile<kRows, kDepth>, SwizzledTile<kDepth, kRows>>;
  using TileB = std::conditional_t<kB == Major::kDepth, SwizzledTile<kColumns, kDepth>, SwizzledTile<kDepth, kPaddedColumns>>;
  using Wide = SwizzledTile<kRows, kColumns, 4>;
  using Narrow = SwizzledTile<kRows, kPaddedColumns, 2>;
  static constexpr uint32_t kSharedBytes = TileA::kBytes + TileB::kBytes + kRows * kPaddedColumns * 4 + 1024;
};

constexpr int kGroupRegisters[3] = {40, 232, 232};
static_assert(registers_suffice(kGroupRegisters), "more registers than a block has");

template <class C>
__device__ void produce(char* a_tile, char* b_tile, Barrier* full, Barrier* free, const CUtensorMap& a, const CUtensorMap& b) {
  for (int tile = 0; tile < kTiles; ++tile) {
    wait(free, (tile & 1) ^ 1);
    arrive_expect_bytes(full, C::TileA::kBytes + C::TileB::kBytes);
    const int depth = tile * kDepth;
    for (int panel = 0; panel < C::TileA::kPanels; ++panel) {
      char* to = a_tile + panel * C::TileA::kPanelBytes;
      if constexpr (C::kA == Major::kDepth)
        load_box(to, &a, {depth + 64 * panel, kRowOffset}, full);
      else
        load_box(to, &a, {kRowOffset + 64 * panel, depth, 1, 1}, full);
    }
    for (int panel = 0; panel < C::TileB::kPanels; ++panel) {
      char* to = b_tile + panel * C::TileB::kPanelBytes;
      if constexpr (C::kB == Major::kDepth)
        load_box(to, &b, {depth + 64 * panel, 0, 1}, full);
      else
        load_box(to, &b, {64 * panel, depth, 1}, full);
    }
  }
}

template <class C>
__device__ void consume(char* a_tile, char* b_tile, char* result, Barrier* full, Barrier* free, const CUtensorMap& wide,
                        const CUtensorMap& narrow) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int group_row = 64 * (static_cast<int>(threadIdx.x) / 128 - 1);
  float sum[C::kColumns / 2];
  const uint64_t a = moved(describe(shared_address(a_tile), C::kA, C::TileA::kPanelBytes),
                           outer_offset(C::kA, group_row, C::TileA::kPanelBytes));
  const uint64_t b = describe(shared_address(b_tile), C::kB, C::TileB::kPanelBytes);
  for (int tile = 0; tile < kTiles; ++tile) {
    wait(full, tile & 1);
    uint32_t registers[kDepth / kDepthStep][4];
    if constexpr (C::kARegisters) {
#pragma unroll
      for (int step = 0; step < kDepth / kDepthStep; ++step) {
        const int row = group_row + 16 * warp, k = step * kDepthStep;
        if constexpr (C::kA == Major::kDepth) {
          const Place at = block_row(lane);
          load_matrices<false>(registers[step], shared_address(a_tile) + C::TileA::offset(row + at.row, k + at.column));
        } else {
          const Place at = block_row_transposed(lane);
          load_matrices<true>(registers[step], shared_address(a_tile) + C::TileA::offset(k + at.row, row + at.column));
        }
        pin(registers[step]);
      }
    }
    fence_products(sum);
#pragma unroll
    for (int step = 0; step < kDepth / kDepthStep; ++step) {
      const uint64_t b_step = moved(b, depth_offset(C::kB, step * kDepthStep, C::TileB::kPanelBytes));
      if constexpr (C::kARegisters)
        multiply<C::kType, C::kB>(sum, registers[step], b_step, tile > 0 || step > 0);
      else
        multiply<C::kType, C::kA, C::kB>(sum, moved(a, depth_offset(C::kA, step * kDepthStep, C::TileA::kPanelBytes)), b_step,
                                         tile > 0 || step > 0);
    }
    commit_products();
    wait_products<0>(sum);
    if constexpr (C::kARegisters) {
#pragma unroll
      for (int step = 0; step < kDepth / kDepthStep; ++step) pin(registers[step]);
    }
    arrive(free);
  }
  // The sums as they are; then, from the same shared memory, rounded.
#pragma unroll
  for (int i = 0; i < C::kColumns / 2; i += 2) {
    const Place at = wgmma_sum(thread, i);
    *reinterpret_cast<float2*>(result + C::Wide::offset(group_row + at.row, at.column)) = make_float2(sum[i], sum[i + 1]);
  }
  fence_shared_writes();
  sync_some(1, 256);
  if (threadIdx.x == 128) {
    for (int panel = 0; panel < C::Wide::kPanels; ++panel) {
      if constexpr (C::kB == Major::kDepth)
        store_box(&wide, {32 * panel, 0}, result + panel * C::Wide::kPanelBytes);
      else
        store_box(&wide, {32 * panel, 0, 1}, result + panel * C::Wide::kPanelBytes);
    }
    commit_stores();
    wait_stores_read<0>();
  }
  sync_some(1, 256);
#pragma unroll
  for (int step = 0; step < C::kColumns / 16; ++step) {
    uint32_t both[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) both[i] = pack<C::kType>(sum[8 * step + 2 * i], sum[8 * step + 2 * i + 1]);
    const Place at = block_row(lane);
    const uint32_t to = C::Narrow::offset(group_row + 16 * warp + at.row, 16 * step + at.column);
    store_matrices<false>(shared_address(result) + to, both);
  }
  fence_shared_writes();
  sync_some(1, 256);
  if (threadIdx.x == 128) {
    for (int panel = 0; panel < C::Narrow::kPanels; ++panel)
      store_box(&narrow, {64 * panel, 0, 1, 1}, result + panel * C::Narrow::kPanelBytes);
    commit_stores();
    wait_stores<0>();
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
            const __grid_constant__ CUtensorMap wide, const __grid_constant__ CUtensorMap narrow) {
  char* a_tile = shared_memory();
  char* b_tile = a_tile + C::TileA::kBytes;
  char* result = b_tile + C::TileB::kBytes;
  Barrier* full = reinterpret_cast<Barrier*>(result + kRows * C::kPaddedColumns * 4);
  Barrier* free = full + 1;
  if (threadIdx.x == 0) {
    prefetch_map(&a);
    prefetch_map(&b);
    init_barrier(full, 1);
    init_barrier(free, 256);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    keep_registers<kGroupRegisters[0]>();
    if (threadIdx.x == 0) produce<C>(a_tile, b_tile, full, free, a, b);
  } else {
    take_registers<kGroupRegisters[1]>();
    consume<C>(a_tile, b_tile, result, full, free, wide, narrow);
  }
}

double value_of(int row, int column, unsigned seed) {
  const unsigned mixed = (static_cast<unsigned>(row) * 2654435761u ^ static_cast<unsigned>(column) * 40503u ^ seed) * 2246822519u;
  return (static_cast<int>(mixed >> 16 & 31) - 15) / 16.0;
}

uint16_t round_to(Half type, double x) {
  const auto y = static_cast<float>(x);
  return type == Half::kBf16 ? float_to_bf16(y) : float_to_f16(y);
}

bool works(cudaError_t error, const char* what) {
  if (error != cudaSuccess) std::printf("%s: %s\n", what, cudaGetErrorString(error));
  return error == cudaSuccess;
}

bool copy(void* to, const void* from, size_t bytes) {
  return works(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, nullptr), "copy") &&
         works(cudaStreamSynchronize(nullptr), "copy");
}

struct DeviceBytes {
  char* data = nullptr;
  size_t size;
  DeviceBytes(size_t bytes, int fill) : size(bytes) {
    void* memory = nullptr;
    works(cudaMalloc(&memory, bytes), "cudaMalloc");
    data = static_cast<char*>(memory);
    works(cudaMemsetAsync(data, fill, bytes, nullptr), "cudaMemset");
  }
  ~DeviceBytes() { cudaFree(data); }
};

template <class C>
bool run() {
  constexpr TensorType kType = C::kType == Half::kBf16 ? TensorType::kBf16 : TensorType::kF16;
  constexpr int kAllRows = kRows + kRowOffset, n = C::kColumns;
  // A as a 2-D tensor or as the last of 2 x 2 planes, B as the second of two planes. Other planes are NaN.
  const size_t a_plane = size_t{kAllRows} * kAllDepth, b_plane = size_t{n} * kAllDepth;
  const bool a_deep = C::kA == Major::kDepth, b_deep = C::kB == Major::kDepth;
  std::vector<uint16_t> a(a_plane * 4, 0xffff), b(b_plane * 2, 0xffff);
  uint16_t* a_values = a.data() + (a_deep ? 0 : 3 * a_plane);
  for (int row = 0; row < kAllRows; ++row)
    for (int k = 0; k < kAllDepth; ++k)
      a_values[a_deep ? row * kAllDepth + k : k * kAllRows + row] = round_to(C::kType, value_of(row, k, 1));
  for (int column = 0; column < n; ++column)
    for (int k = 0; k < kAllDepth; ++k)
      b[b_plane + (b_deep ? column * kAllDepth + k : k * n + column)] = round_to(C::kType, value_of(column, k, 2));
  DeviceBytes da(a.size() * 2, 0), db(b.size() * 2, 0);
  const size_t wide_plane = size_t{kRows} * n, narrow_plane = size_t{kRows} * n;  // planes of the 2-byte result are not clipped
  DeviceBytes dw(wide_plane * 2 * 4, 0xff), dn(narrow_plane * 4 * 2, 0xff);
  copy(da.data, a.data(), da.size);
  copy(db.data, b.data(), db.size);

  CUtensorMap maps[4];
  int32_t status[4];
  const int64_t a_bytes = a_plane * 2, b_bytes = b_plane * 2, w_bytes = wide_plane * 4, n_bytes = narrow_plane * 2;
  if (a_deep)
    status[0] = make_map<2>({kType, da.data, {kAllDepth, kAllRows}, {kAllDepth * 2}, {64, kRows}}, &maps[0]);
  else
    status[0] = make_map<4>(
        {kType, da.data, {kAllRows, kAllDepth, 2, 2}, {kAllRows * 2, a_bytes, 2 * a_bytes}, {64, kDepth, 1, 1}}, &maps[0]);
  if (b_deep)
    status[1] = make_map<3>({kType, db.data, {kAllDepth, n, 2}, {kAllDepth * 2, b_bytes}, {64, n, 1}}, &maps[1]);
  else
    status[1] = make_map<3>({kType, db.data, {n, kAllDepth, 2}, {n * 2, b_bytes}, {64, kDepth, 1}}, &maps[1]);
  if (b_deep)
    status[2] = make_map<2>({TensorType::kF32, dw.data, {n, kRows}, {n * 4}, {32, kRows}}, &maps[2]);
  else
    status[2] = make_map<3>({TensorType::kF32, dw.data, {n, kRows, 2}, {n * 4, w_bytes}, {32, kRows, 1}}, &maps[2]);
  status[3] =
      make_map<4>({kType, dn.data, {n, kClippedRows, 2, 2}, {n * 2, n_bytes, 2 * n_bytes}, {64, kRows, 1, 1}}, &maps[3]);
  for (int32_t s : status)
    if (s != LLA_OK) return std::printf("a tensor map could not be made: %d\n", s), false;

  const int32_t launched = launch(product<C>, 1, kThreads, C::kSharedBytes, nullptr, maps[0], maps[1], maps[2], maps[3]);
  if (launched != LLA_OK) return std::printf("launch: %s\n", last_error_text), false;
  if (!works(cudaStreamSynchronize(nullptr), "kernel")) return false;
  std::vector<float> wide(dw.size / 4);
  std::vector<uint16_t> narrow(dn.size / 2);
  copy(wide.data(), dw.data, dw.size);
  copy(narrow.data(), dn.data, dn.size);

  std::vector<float> expected_wide(wide.size());
  std::vector<uint16_t> expected_narrow(narrow.size(), 0xffff);
  std::memset(expected_wide.data(), 0xff, dw.size);
  for (int row = 0; row < kRows; ++row)
    for (int column = 0; column < n; ++column) {
      double sum = 0;
      for (int k = 0; k < kAllDepth; ++k) sum += value_of(row + kRowOffset, k, 1) * value_of(column, k, 2);
      expected_wide[(b_deep ? 0 : wide_plane) + row * n + column] = static_cast<float>(sum);
      if (row < kClippedRows) expected_narrow[3 * narrow_plane + row * n + column] = round_to(C::kType, sum);
    }
  size_t wrong_wide = 0, wrong_narrow = 0;
  for (size_t i = 0; i < wide.size(); ++i) {
    const float both[2] = {wide[i], expected_wide[i]};
    wrong_wide += !(both[0] == both[1] || std::memcmp(&both[0], &both[1], 4) == 0);
  }
  for (size_t i = 0; i < narrow.size(); ++i) {
    const bool zeros = ((narrow[i] | expected_narrow[i]) & 0x7fff) == 0;  // of any sign
    wrong_narrow += narrow[i] != expected_narrow[i] && !zeros;
  }
  const bool good = wrong_wide == 0 && wrong_narrow == 0;
  std::printf("%s %s n%d A %s from %s, B %s: %zu and %zu wrong elements of %zu and %zu\n", good ? "ok  " : "FAIL",
              C::kType == Half::kBf16 ? "bf16" : "fp16", n, a_deep ? "[row][k]" : "[k][row]",
              C::kARegisters ? "registers" : "shared memory", b_deep ? "[column][k]" : "[k][column]", wrong_wide, wrong_narrow,
              wide.size(), narrow.size());
  return good;
}

template <int n>
int failures() {
  constexpr Half kType = Half::kBf16;
  int bad = 0;
  bad += !run<Case<kType, n, Major::kDepth, Major::kDepth, false>>();
  bad += !run<Case<kType, n, Major::kDepth, Major::kOuter, false>>();
  bad += !run<Case<kType, n, Major::kOuter, Major::kDepth, false>>();
  bad += !run<Case<kType, n, Major::kOuter, Major::kOuter, false>>();
  bad += !run<Case<kType, n, Major::kDepth, Major::kDepth, true>>();
  bad += !run<Case<kType, n, Major::kDepth, Major::kOuter, true>>();
  bad += !run<Case<kType, n, Major::kOuter, Major::kDepth, true>>();
  bad += !run<Case<kType, n, Major::kOuter, Major::kOuter, true>>();
  return bad;
}

// Only the type differs: each instruction once.
template <int n>
int failures_f16() {
  return !run<Case<Half::kF16, n, Major::kOuter, Major::kDepth, false>>() +
         !run<Case<Half::kF16, n, Major::kDepth, Major::kOuter, true>>();
}

}  // namespace
}  // namespace lla::cuda::hopper

#if !defined(LLA_CUDA_EMULATED)
int main() {
  using namespace lla::cuda::hopper;
  cudaDeviceProp properties;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0 || cudaGetDeviceProperties(&properties, 0) != cudaSuccess ||
      properties.major != 9) {
    std::printf("skipped: LLA_NO_DEVICE of compute capability 9.0\n");
    return count == 0 && std::getenv("LLA_REQUIRE_DEVICE") ? 1 : 0;
  }
  int bad = 0;
  bad += failures<32>() + failures<64>() + failures<128>() + failures<256>();
  bad += failures_f16<32>() + failures_f16<64>() + failures_f16<128>() + failures_f16<256>();
  std::printf("%d of 40 cases failed\n", bad);
  return bad != 0;
}
#endif
