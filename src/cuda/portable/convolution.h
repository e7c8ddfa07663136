// SPDX-License-Identifier: Apache-2.0
// Inputs of the causal convolution: rows of the call and, before them, rows of the history ring (plugin/slot.h).
#pragma once

#include "cuda/common/row_blocks.h"
#include "cuda/portable/parts_kernels.h"

namespace lla::cuda {

constexpr int kConvolutionChannels = 128;  // of a block, one for each thread
constexpr int kConvolutionBatch = 8;       // rows that a thread has in flight

inline int64_t convolution_columns(const Convolution& p) {
  return (p.channels + kConvolutionChannels - 1) / kConvolutionChannels;
}

// Element of an image's ring for the row `back` >= 1 rows before the image's position; null if the image does not hold it.
__device__ __forceinline__ char* ring_element(const Convolution& p, const SlotMemory& memory, const SlotImage& image,
                                              int64_t channel, int64_t back) {
  if (image.tail < 0 || !memory.convs.base || back > image.conv_rows || image.position - back < image.start) return nullptr;
  const int64_t capacity = memory.conv_layout.capacity;
  int64_t ring = image.conv_origin - back;
  if (ring < 0) ring = (ring % capacity + capacity) % capacity;
  return memory.conv(image.tail, p.first_channel + channel, ring);
}

__device__ __forceinline__ float ring_value(const Convolution& p, const SlotMemory& memory, const SlotImage& image,
                                            int64_t channel, int64_t back) {
  const char* element = ring_element(p, memory, image, channel, back);
  return element ? load_element(element, memory.conv_layout.dtype, 0) : 0;
}

// Input row t of the sequence, counted from the call's first one: rows before it are the history's.
__device__ __forceinline__ float convolution_input(const Convolution& p, const Sequence& sequence, int64_t channel,
                                                   int64_t t) {
  if (t < 0) return ring_value(p, p.state, sequence.history, channel, -t);
  return load_element(p.x.at(sequence.index, sequence.row_begin + t, 0), p.x.dtype, channel);
}

// Rows t ... t + kConvolutionBatch - 1 of one channel, of which `count` exist; all loads are under way before the first is
// used.
__device__ __forceinline__ void load_rows(float (&values)[kConvolutionBatch], const View& view, const Sequence& sequence,
                                          int64_t channel, int64_t t, int count) {
  const void* data = offset_elements(view.at(sequence.index, sequence.row_begin + t, 0), view.dtype, channel);
  if (view.dtype == LLA_F32) {
#pragma unroll
    for (int i = 0; i < kConvolutionBatch; ++i)
      values[i] = i < count ? static_cast<const float*>(data)[i * view.row_stride] : 0;
  } else {
    unsigned bits[kConvolutionBatch];
#pragma unroll
    for (int i = 0; i < kConvolutionBatch; ++i)
      bits[i] = i < count ? static_cast<const unsigned short*>(data)[i * view.row_stride] : 0;
#pragma unroll
    for (int i = 0; i < kConvolutionBatch; ++i) values[i] = view.dtype == LLA_BF16 ? from_bf16(bits[i]) : from_f16(bits[i]);
  }
}

}  // namespace lla::cuda
