// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution with its history ring (docs/mathematics.md).
#include "cuda/portable/convolution.h"

namespace lla::cuda {
namespace {

constexpr int kRowsLog = 5;  // rows of a block

// Copies the rows of one plan into the ring that is to hold them.
__device__ inline void store_rows(const Convolution& p, const Sequence& sequence, const RowsToStore& plan, int64_t channel) {
  const ConvLayout& layout = p.state.conv_layout;
  for (int64_t row = plan.first; row < plan.last; ++row) {
    const int64_t t = row - sequence.position;
    float value = 0;
    if (t < 0) {
      const char* element = ring_element(p, p.state, sequence.history, channel, -t);
      if (!element) continue;
      value = load_element(element, layout.dtype, 0);
    } else {
      value = convolution_input(p, sequence, channel, t);
    }
    const int64_t ring = (plan.ring + row - plan.first) % layout.capacity;
    store_element(p.state.conv(plan.block, p.first_channel + channel, ring), layout.dtype, 0, value);
  }
}

// A thread walks down a channel. kWidth 1 ... 4: the last inputs are in registers; 0: any width, inputs are read again.
template <int kWidth>
__device__ __forceinline__ void convolve(const Convolution& p, const RowBlock& block, int64_t channel) {
  const Sequence& sequence = *block.sequence;
  const bool activate = p.activation == LLA_ACTIVATION_SILU;
  const float bias = p.bias.present() ? load_element(p.bias.data, p.bias.dtype, channel) : 0;
  const void* weight = p.weight.at(channel);
  if constexpr (kWidth == 0) {
    for (int r = 0; r < block.rows; ++r) {
      float sum = bias;
      for (int64_t i = 0; i < p.width; ++i) {
        sum += load_element(weight, p.weight.dtype, i) *
               convolution_input(p, sequence, channel, block.offset + r - p.width + 1 + i);
      }
      put_element(p.y.at(sequence.index, block.first + r, 0), p.y.dtype, channel, activate ? silu(sum) : sum,
                  p.y.accumulate);
    }
  } else {
    float w[kWidth], window[kWidth];  // window: rows t - kWidth + 1 ... t
#pragma unroll
    for (int i = 0; i < kWidth; ++i) w[i] = load_element(weight, p.weight.dtype, i);
    window[0] = 0;
#pragma unroll
    for (int i = 1; i < kWidth; ++i) window[i] = convolution_input(p, sequence, channel, block.offset - kWidth + i);
    for (int r = 0; r < block.rows; r += kConvolutionBatch) {
      float x[kConvolutionBatch];
      load_rows(x, p.x, sequence, channel, block.offset + r, block.rows - r);
#pragma unroll
      for (int j = 0; j < kConvolutionBatch; ++j) {
#pragma unroll
        for (int i = 0; i + 1 < kWidth; ++i) window[i] = window[i + 1];
        window[kWidth - 1] = x[j];
        float sum = bias;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum += w[i] * window[i];
        if (r + j < block.rows) {
          put_element(p.y.at(sequence.index, block.first + r + j, 0), p.y.dtype, channel, activate ? silu(sum) : sum,
                      p.y.accumulate);
        }
      }
    }
  }
}

// Tasks: blocks of rows, then the rows to store of each sequence; each by blocks of channels.
template <int kWidth>
__global__ void __launch_bounds__(kConvolutionChannels)
    convolution_forward(Convolution p, RowBlocks blocks, int64_t columns, int64_t tasks, int64_t stores_per_sequence) {
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t part = task / columns, channel = (task - part * columns) * kConvolutionChannels + threadIdx.x;
    if (channel >= p.channels) continue;
    if (part < blocks.tasks) {
      const RowBlock block = blocks.find(p.batch, part);
      if (block.rows > 0) convolve<kWidth>(p, block, channel);
    } else {
      const int64_t i = (part - blocks.tasks) / stores_per_sequence, plan = (part - blocks.tasks) % stores_per_sequence;
      const Sequence& sequence = p.batch.sequences[i];
      if (!sequence.padding && plan < sequence.conv_to_store_count)
        store_rows(p, sequence, sequence.conv_to_store[plan], channel);
    }
  }
}

}  // namespace

bool ConvolutionForward::accepts(const void* problem) {
  const Convolution& p = *static_cast<const Convolution*>(problem);
  return narrow_types(p.x, p.y, p.weight, p.bias, p.state.conv_layout);
}

void ConvolutionForward::measure(const void* problem, const Limits& limits, Need* need) {
  needs_nothing(problem, limits, need);
}

int32_t ConvolutionForward::launch(const void* problem, const Limits&, char*, void* stream) {
  const Convolution& p = *static_cast<const Convolution*>(problem);
  const RowBlocks blocks(p.batch, kRowsLog, false);
  const int64_t columns = convolution_columns(p);
  const int64_t stores = p.batch.stores && p.state.convs.base ? p.batch.most_conv_to_store : 0;
  const int64_t tasks = (blocks.tasks + p.batch.count * stores) * columns;
  const auto kernel = p.width == 1   ? convolution_forward<1>
                      : p.width == 2 ? convolution_forward<2>
                      : p.width == 3 ? convolution_forward<3>
                      : p.width == 4 ? convolution_forward<4>
                                     : convolution_forward<0>;
  return cuda::launch(kernel, tasks, kConvolutionChannels, 0, stream, p, blocks, columns, tasks, stores);
}

int32_t ConvolutionForward::load() {
  return first_failure(
      [] { return load_kernel(convolution_forward<0>); }, [] { return load_kernel(convolution_forward<1>); },
      [] { return load_kernel(convolution_forward<2>); }, [] { return load_kernel(convolution_forward<3>); },
      [] { return load_kernel(convolution_forward<4>); });
}

}  // namespace lla::cuda
