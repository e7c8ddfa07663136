// SPDX-License-Identifier: Apache-2.0
// Gradients of the causal convolution: of its rows, of the histories' rings, and of the weights as sums over blocks of rows.
#include "cuda/common/reduce.h"
#include "cuda/portable/convolution.h"

namespace lla::cuda {
namespace {

constexpr int kRowsLog = 6;  // rows of a block

// What a row's sum of taps receives. For 0 <= t < sequence.rows.
__device__ __forceinline__ float tap_gradient(const Convolution& p, const Sequence& sequence, int64_t channel, int64_t t) {
  const float dy = load_element(p.dy.at(sequence.index, sequence.row_begin + t, 0), p.dy.dtype, channel);
  if (p.activation != LLA_ACTIVATION_SILU) return dy;
  float sum = p.bias.present() ? load_element(p.bias.data, p.bias.dtype, channel) : 0;
  for (int64_t i = 0; i < p.width; ++i) {
    sum +=
        load_element(p.weight.at(channel), p.weight.dtype, i) * convolution_input(p, sequence, channel, t - p.width + 1 + i);
  }
  return dy * silu_slope(sum);
}

// Gradient of input row t >= -(width - 1) of the sequence; taps(t) is tap_gradient().
template <class Taps>
__device__ __forceinline__ float input_gradient(const Convolution& p, const Sequence& sequence, int64_t channel, int64_t t,
                                                Taps taps) {
  const int64_t back = sequence.rows - t;
  float sum = back < p.width ? ring_value(p, p.gradient, sequence.final_gradient, channel, back) : 0;
  for (int64_t i = t < 0 ? -t : 0; i < p.width && t + i < sequence.rows; ++i) {
    sum += load_element(p.weight.at(channel), p.weight.dtype, p.width - 1 - i) * taps(t + i);
  }
  return sum;
}

// Gradient of the history that the sequence began with.
template <class Taps>
__device__ void write_initial_gradient(const Convolution& p, const Sequence& sequence, int64_t channel, Taps taps) {
  const SlotImage& initial = sequence.initial_gradient;
  if (initial.tail < 0) return;
  for (int64_t back = 1; back <= initial.conv_rows; ++back) {
    char* element = ring_element(p, p.gradient, initial, channel, back);
    if (!element) continue;
    const float value = back < p.width ? input_gradient(p, sequence, channel, -back, taps) : 0;
    store_element(element, p.gradient.conv_layout.dtype, 0, value);
  }
}

// One block of rows of one channel, in one pass with the last rows in registers. sums: gradients of the taps and the bias.
template <int kWidth>
__device__ __forceinline__ void reverse(const Convolution& p, const RowBlock& block, int64_t channel,
                                        float (&sums)[kWidth + 1]) {
  const Sequence& sequence = *block.sequence;
  const bool activate = p.activation == LLA_ACTIVATION_SILU;
  const float bias = p.bias.present() ? load_element(p.bias.data, p.bias.dtype, channel) : 0;
  float w[kWidth], window[kWidth], taps[kWidth];  // of rows t - kWidth + 1 ... t
  window[0] = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    w[i] = load_element(p.weight.at(channel), p.weight.dtype, i);
    if (i > 0) window[i] = convolution_input(p, sequence, channel, block.offset - kWidth + i);
    taps[i] = 0;
  }
  // Rows after the block's own make the gradients of its last ones.
  for (int r = 0; r < block.rows + kWidth - 1; r += kConvolutionBatch) {
    const int64_t left = sequence.rows - block.offset - r;
    const int count = left < kConvolutionBatch ? max(0, static_cast<int>(left)) : kConvolutionBatch;
    float x[kConvolutionBatch], dy[kConvolutionBatch];
    load_rows(x, p.x, sequence, channel, block.offset + r, count);
    load_rows(dy, p.dy, sequence, channel, block.offset + r, count);
#pragma unroll
    for (int j = 0; j < kConvolutionBatch; ++j) {
#pragma unroll
      for (int i = 0; i + 1 < kWidth; ++i) window[i] = window[i + 1], taps[i] = taps[i + 1];
      window[kWidth - 1] = x[j];
      float sum = bias;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum += w[i] * window[i];
      const float tap = j >= count ? 0 : activate ? dy[j] * silu_slope(sum) : dy[j];
      taps[kWidth - 1] = tap;
      if (r + j < block.rows) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sums[i] += tap * window[i];
        sums[kWidth] += tap;
      }
      const int done = r + j - kWidth + 1;
      if (p.dx.present() && done >= 0 && done < block.rows) {
        const int64_t back = sequence.rows - block.offset - done;
        float dx = back < kWidth ? ring_value(p, p.gradient, sequence.final_gradient, channel, back) : 0;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) dx += w[kWidth - 1 - i] * taps[i];
        put_element(p.dx.at(sequence.index, block.first + done, 0), p.dx.dtype, channel, dx, p.dx.accumulate);
      }
    }
  }
}

// Tasks: places, then the sequences' initial gradients; each by blocks of channels. Partial sums are [place][tap][channel],
// the bias as the last tap.
template <int kWidth>
__global__ void __launch_bounds__(kConvolutionChannels)
    convolution_backward(Convolution p, RowBlocks blocks, int64_t columns, int64_t tasks, float* partials) {
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t part = task / columns, channel = (task - part * columns) * kConvolutionChannels + threadIdx.x;
    if (channel >= p.channels) continue;
    if (part < blocks.tasks) {
      const RowBlock block = blocks.find(p.batch, part);
      float sums[kWidth + 1] = {};
      if (block.rows > 0) reverse<kWidth>(p, block, channel, sums);
      if (partials) {
#pragma unroll
        for (int i = 0; i <= kWidth; ++i) partials[(part * (kWidth + 1) + i) * p.channels + channel] = sums[i];
      }
    } else {
      const Sequence& sequence = p.batch.sequences[part - blocks.tasks];
      if (sequence.padding) continue;
      write_initial_gradient(p, sequence, channel, [&](int64_t t) { return tap_gradient(p, sequence, channel, t); });
    }
  }
}

// Wide convolutions: first the taps' gradients [row][channel], then what follows from them.
__global__ void __launch_bounds__(kConvolutionChannels)
    wide_tap_gradients(Convolution p, RowBlocks blocks, int64_t columns, float* taps) {
  for (int64_t task = blockIdx.x; task < blocks.tasks * columns; task += gridDim.x) {
    const int64_t part = task / columns, channel = (task - part * columns) * kConvolutionChannels + threadIdx.x;
    if (channel >= p.channels) continue;
    const RowBlock block = blocks.find(p.batch, part);
    for (int r = 0; r < block.rows; ++r) {
      taps[(block.first + r) * p.channels + channel] = tap_gradient(p, *block.sequence, channel, block.offset + r);
    }
  }
}

__global__ void __launch_bounds__(kConvolutionChannels)
    wide_backward(Convolution p, RowBlocks blocks, int64_t columns, int64_t tasks, const float* taps, float* partials) {
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t part = task / columns, channel = (task - part * columns) * kConvolutionChannels + threadIdx.x;
    if (channel >= p.channels) continue;
    const auto taps_of = [&](const Sequence& sequence) {
      return [&](int64_t t) { return taps[(sequence.row_begin + t) * p.channels + channel]; };
    };
    if (part >= blocks.tasks) {
      const Sequence& sequence = p.batch.sequences[part - blocks.tasks];
      if (!sequence.padding) write_initial_gradient(p, sequence, channel, taps_of(sequence));
      continue;
    }
    const RowBlock block = blocks.find(p.batch, part);
    for (int r = 0; p.dx.present() && r < block.rows; ++r) {
      const float dx = input_gradient(p, *block.sequence, channel, block.offset + r, taps_of(*block.sequence));
      put_element(p.dx.at(block.sequence->index, block.first + r, 0), p.dx.dtype, channel, dx, p.dx.accumulate);
    }
    if (!partials) continue;
    for (int64_t i = 0; i <= p.width; ++i) {
      float sum = 0;
      for (int r = 0; r < block.rows; ++r) {
        const float x =
            i == p.width ? 1 : convolution_input(p, *block.sequence, channel, block.offset + r - p.width + 1 + i);
        sum += taps[(block.first + r) * p.channels + channel] * x;
      }
      partials[(part * (p.width + 1) + i) * p.channels + channel] = sum;
    }
  }
}

struct StoreWeights {
  Matrix weight, bias;
  int64_t channels, width;

  __device__ void operator()(int64_t column, float sum) const {
    const int64_t tap = column / channels, channel = column % channels;
    if (tap < width) {
      if (weight.present()) put_element(weight.at(channel), weight.dtype, tap, sum, weight.accumulate);
    } else if (bias.present()) {
      put_element(bias.data, bias.dtype, channel, sum, bias.accumulate);
    }
  }
};

struct Arrays {
  float* partials = nullptr;
  float* taps = nullptr;

  void take(FloatCarver* carver, const Convolution& p, Size rows, Size sequences) {
    Size places = sequences;
    places += Size(rows.value() >> kRowsLog);
    partials = carver->take(places * Size(p.width + 1) * Size(p.channels));
    if (p.width > 4) taps = carver->take(rows * Size(p.channels));
  }
};

}  // namespace

bool ConvolutionBackward::accepts(const void* problem) {
  const Convolution& p = *static_cast<const Convolution*>(problem);
  return narrow_types(p.x, p.weight, p.bias, p.dy, p.dx, p.dweight, p.dbias, p.state.conv_layout, p.gradient.conv_layout);
}

void ConvolutionBackward::measure(const void* problem, const Limits& limits, Need* need) {
  FloatCarver carver;
  Arrays().take(&carver, *static_cast<const Convolution*>(problem), limits.rows, limits.sequences);
  *need = carver.need();
}

int32_t ConvolutionBackward::launch(const void* problem, const Limits&, char* scratch, void* stream) {
  const Convolution& p = *static_cast<const Convolution*>(problem);
  FloatCarver carver(scratch);
  Arrays arrays;
  arrays.take(&carver, p, p.batch.total_rows, p.batch.count);
  const RowBlocks blocks(p.batch, kRowsLog, true);
  const int64_t columns = convolution_columns(p);
  const int64_t initials = p.gradient.convs.base ? p.batch.count : 0;
  const int64_t tasks = (blocks.tasks + initials) * columns;
  float* partials = p.dweight.present() || p.dbias.present() ? arrays.partials : nullptr;
  int32_t status = LLA_OK;
  if (p.width <= 4) {
    const auto kernel = p.width == 1   ? convolution_backward<1>
                        : p.width == 2 ? convolution_backward<2>
                        : p.width == 3 ? convolution_backward<3>
                                       : convolution_backward<4>;
    status = cuda::launch(kernel, tasks, kConvolutionChannels, 0, stream, p, blocks, columns, tasks, partials);
  } else {
    status = cuda::launch(wide_tap_gradients, blocks.tasks * columns, kConvolutionChannels, 0, stream, p, blocks, columns,
                          arrays.taps);
    if (status != LLA_OK) return status;
    status = cuda::launch(wide_backward, tasks, kConvolutionChannels, 0, stream, p, blocks, columns, tasks,
                          static_cast<const float*>(arrays.taps), partials);
  }
  if (status != LLA_OK || !partials) return status;
  const StoreWeights store{p.dweight, p.dbias, p.channels, p.width};
  return launch_sum_partials(partials, blocks.tasks, (p.width + 1) * p.channels, store, stream);
}

int32_t ConvolutionBackward::load() {
  return first_failure([] { return load_kernel(convolution_backward<1>); },
                       [] { return load_kernel(convolution_backward<2>); },
                       [] { return load_kernel(convolution_backward<3>); },
                       [] { return load_kernel(convolution_backward<4>); }, [] { return load_kernel(wide_tap_gradients); },
                       [] { return load_kernel(wide_backward); }, [] { return load_kernel(sum_partials<StoreWeights>); });
}

}  // namespace lla::cuda
