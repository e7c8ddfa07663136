// SPDX-License-Identifier: Apache-2.0
// Raw rows that a history keeps of its last chunk, as kernels whose operands have two bytes read them.
#pragma once

#include "cuda/common/async_copy.h"
#include "cuda/common/element.h"
#include "plugin/slot.h"

namespace lla::cuda {

// By their distance from the chunk's first row.
struct TailRows {
  const SlotMemory& state;
  const SlotImage& history;

  __device__ __forceinline__ int64_t ring(int row) const {
    const int64_t at = static_cast<int64_t>(history.tail_origin) + row;
    return at >= state.tail_layout.capacity ? at - state.tail_layout.capacity : at;
  }
  __device__ __forceinline__ const char* key(int64_t group, int row) const {
    return state.tail_k(history.tail, group, ring(row));
  }
  __device__ __forceinline__ const char* value(int64_t head, int row) const {
    return state.tail_v(history.tail, head, ring(row));
  }
  __device__ __forceinline__ float gate(int64_t head, int row) const {
    return load_element(state.tail_gate(history.tail, head, ring(row)), LLA_F32, 0);
  }
  __device__ __forceinline__ float write(int64_t head, int row) const {
    return load_element(state.tail_write(history.tail, head, ring(row)), LLA_F32, 0);
  }
  // Elements 8 eight ... 8 eight + 7 of a row to 16 bytes of shared memory, as a type of two bytes. Complete after
  // wait_all_copies().
  __device__ __forceinline__ void copy_eight(void* to, int32_t dtype, const char* row, int eight) const {
    const int32_t kept = state.tail_layout.dtype;
    if (kept == dtype) {
      copy_async16(to, row + 16 * eight);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < 8; ++i) store_element(to, dtype, i, load_element(row, kept, 8 * eight + i));
  }
};

}  // namespace lla::cuda
