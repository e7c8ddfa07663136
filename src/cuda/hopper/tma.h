// SPDX-License-Identifier: Apache-2.0
// Bulk tensor copies between global memory and 128-byte swizzled tiles of shared memory: the maps (host), loads that
// complete on a barrier, stores in groups.
#pragma once

#include "cuda/common/platform.h"
#include "cuda/hopper/mbarrier.h"
#include "cuda/hopper/swizzle.h"
#include "cuda/hopper/target.h"

#if !defined(LLA_CUDA_EMULATED)
#include <cuda.h>

#include <cuda/ptx>
#endif

namespace lla::cuda::hopper {

enum class TensorType : int { kBf16, kF16, kF32 };
constexpr int bytes_of(TensorType type) { return type == TensorType::kF32 ? 4 : 2; }

// A tensor in global memory and the box that one copy moves. Axis 0 is contiguous; strides are in bytes, of axes 1 ....
template <int kRank>
struct TensorView {
  static_assert(kRank >= 2 && kRank <= 4, "2, 3 or 4 axes");
  TensorType type;
  void* data;
  int64_t extents[kRank];  // elements; what a box has beyond them is read as zero and never written
  int64_t strides[kRank - 1];
  int32_t box[kRank];  // elements; box[0] spans 128 bytes (a panel) even if the tensor is narrower
};

// Whether the copy engine can take it: addresses and strides are multiples of 16 bytes, and everything is within its fields.
// Other tensors are for other kernels.
template <int kRank>
bool can_map(const TensorView<kRank>& view) {
  if (view.data == nullptr || reinterpret_cast<uintptr_t>(view.data) % 16 != 0) return false;
  if (view.box[0] * bytes_of(view.type) != static_cast<int32_t>(kSwizzleRow)) return false;
  for (int axis = 0; axis < kRank; ++axis) {
    if (view.extents[axis] < 1 || view.extents[axis] > int64_t{1} << 31) return false;
    if (view.box[axis] < 1 || view.box[axis] > 256) return false;
    if (axis > 0) {
      const int64_t stride = view.strides[axis - 1];
      if (stride < 16 || stride % 16 != 0 || stride >= int64_t{1} << 40) return false;
    }
  }
  return true;
}

#if defined(LLA_CUDA_EMULATED)
template <int kRank>
int32_t make_map(const TensorView<kRank>& view, CUtensorMap* map) {
  if (!can_map(view)) return LLA_INTERNAL;
  *map = {static_cast<char*>(view.data), {1, 1, 1, 1}, {bytes_of(view.type), 0, 0, 0}, {1, 1, 1, 1}, kRank};
  for (int axis = 0; axis < kRank; ++axis) {
    map->extents[axis] = view.extents[axis];
    map->box[axis] = view.box[axis];
    if (axis > 0) map->strides[axis] = view.strides[axis - 1];
  }
  return LLA_OK;
}
#else
// The encoder belongs to the driver. It is looked up at run time, so that nothing links with libcuda, which machines without
// a device do not have. Null: the driver has none.
using Encoder = decltype(&cuTensorMapEncodeTiled);
inline Encoder find_encoder() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
  if (status_of(error) != LLA_OK || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Encoder>(entry);
}

// Makes the map of a tensor for which can_map() holds. Host work only, about a microsecond; kernels take the map as a
// `const __grid_constant__ CUtensorMap` parameter. Returns an lla_status.
template <int kRank>
int32_t make_map(const TensorView<kRank>& view, CUtensorMap* map) {
  static const Encoder encode = find_encoder();
  if (encode == nullptr) return LLA_DRIVER_TOO_OLD;
  if (!can_map(view)) return LLA_INTERNAL;
  cuuint64_t extents[kRank], strides[kRank - 1];
  cuuint32_t box[kRank], steps[kRank];
  for (int axis = 0; axis < kRank; ++axis) {
    extents[axis] = static_cast<cuuint64_t>(view.extents[axis]);
    box[axis] = static_cast<cuuint32_t>(view.box[axis]);
    steps[axis] = 1;
    if (axis > 0) strides[axis - 1] = static_cast<cuuint64_t>(view.strides[axis - 1]);
  }
  const CUtensorMapDataType type = view.type == TensorType::kBf16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : view.type == TensorType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                   : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const CUresult result =
      encode(map, type, kRank, view.data, extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? LLA_OK : LLA_DEVICE_ERROR;
}
#endif

// Brings the map itself near, ahead of its first use. By one thread, as everything below.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  LLA_HOPPER((void)map, asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"));
}

// Loads the box whose first element is `at` (axis 0 first) to `to`, a multiple of 1024 bytes. Its bytes arrive on `barrier`.
template <int kRank>
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, const int32_t (&at)[kRank], Barrier* barrier) {
  static_assert(kRank >= 2 && kRank <= 4, "2, 3 or 4 axes");
  LLA_HOPPER(emulator::load_box(to, map, at, kRank, barrier),
             ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, map, at, barrier));
}

// Loads `bytes` as they lie; addresses and bytes are multiples of 16.
__device__ __forceinline__ void load_bytes(void* to, const void* from, uint32_t bytes, Barrier* barrier) {
  LLA_HOPPER(emulator::load_bytes(to, from, bytes, barrier),
             ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, to, from, bytes, barrier));
}

// Brings bytes, or a box, from memory into the cache.
__device__ __forceinline__ void prefetch_bytes(const void* from, uint32_t bytes) {
  LLA_HOPPER((void)from;
             (void)bytes,
             asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
                          : "memory"));
}
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, const int32_t (&at)[3]) {
  LLA_HOPPER((void)map;
             (void)at, asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map),
                                    "r"(at[0]), "r"(at[1]), "r"(at[2])
                                    : "memory"));
}

// Stores the box. Before: the writers of `from` have called fence_shared_writes(), and met this thread at a barrier.
template <int kRank>
__device__ __forceinline__ void store_box(const CUtensorMap* map, const int32_t (&at)[kRank], const void* from) {
  static_assert(kRank >= 2 && kRank <= 4, "2, 3 or 4 axes");
  LLA_HOPPER(emulator::store_box(map, at, kRank, from),
             ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, map, at, from));
}

// Closes a group of this thread's stores.
__device__ __forceinline__ void commit_stores() { LLA_HOPPER(emulator::commit_stores(), ptx::cp_async_bulk_commit_group()); }

// Waits until at most kGroups of this thread's latest groups have not been read from shared memory, which may then be
// overwritten. A thread must have waited for 0 before its block may end and its shared memory go to another.
template <int kGroups>
__device__ __forceinline__ void wait_stores_read() {
  LLA_HOPPER(emulator::wait_stores(kGroups), ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kGroups>{}));
}

// The same until they are written to global memory, visible to this thread.
template <int kGroups>
__device__ __forceinline__ void wait_stores() {
  LLA_HOPPER(emulator::wait_stores(kGroups), ptx::cp_async_bulk_wait_group(ptx::n32_t<kGroups>{}));
}

}  // namespace lla::cuda::hopper
