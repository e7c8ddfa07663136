// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution with its history ring, and its gradients (docs/mathematics.md; rings: plugin/slot.h).
#include "reference/common.h"
#include "reference/kernels.h"

namespace lla::reference {
namespace {

constexpr int64_t kChannelsPerTask = 32;

int64_t channel_blocks(const Convolution& p) { return (p.channels + kChannelsPerTask - 1) / kChannelsPerTask; }
int64_t channel_end(const Convolution& p, int64_t begin) {
  return begin + kChannelsPerTask < p.channels ? begin + kChannelsPerTask : p.channels;
}

// Arrays of one channel of one sequence. Entry W - 1 + t belongs to row t of the call, entries before it to the history.
struct Channel {
  double* x = nullptr;        // [W - 1 + rows]
  double* dx = nullptr;       // [W - 1 + rows]
  double* weight = nullptr;   // [W]
  double* dweight = nullptr;  // [W]

  void take(Carver* carver, const Convolution& p, const Limits& limits) {
    x = carver->take(Size(limits.rows_per_sequence) + p.width);
    dx = carver->take(Size(limits.rows_per_sequence) + p.width);
    weight = carver->take(p.width);
    dweight = carver->take(p.width);
  }
};

// Element of an image's ring for the row `back` >= 1 rows before the image's position; null if the image does not hold it.
char* ring_element(const Convolution& p, const SlotMemory& memory, const SlotImage& image, int64_t channel, int64_t back) {
  if (image.tail < 0 || !memory.convs.base || back > image.conv_rows || image.position - back < image.start) return nullptr;
  const int64_t capacity = memory.conv_layout.capacity;
  return memory.conv(image.tail, p.first_channel + channel, (image.conv_origin + capacity - back % capacity) % capacity);
}

double ring_value(const Convolution& p, const SlotMemory& memory, const SlotImage& image, int64_t channel, int64_t back) {
  const char* element = ring_element(p, memory, image, channel, back);
  return element ? load_element<double>(element, memory.conv_layout.dtype, 0) : 0;
}

void load_channel(const Convolution& p, const Sequence& sequence, int64_t c, const Channel& channel) {
  const int64_t history = p.width - 1;
  for (int64_t i = 0; i < history; ++i) channel.x[i] = ring_value(p, p.state, sequence.history, c, history - i);
  for (int64_t t = 0; t < sequence.rows; ++t) {
    channel.x[history + t] = load(p.x, sequence.index, sequence.row_begin + t, 0, c);
  }
  for (int64_t i = 0; i < p.width; ++i) channel.weight[i] = load(p.weight, c, i);
}

// What row t hands to the activation.
double sum_of_taps(const Convolution& p, const Channel& channel, double bias, int64_t t) {
  return bias + dot(channel.weight, channel.x + t, p.width);
}

void store_history(const Convolution& p, const Sequence& sequence, int64_t c) {
  const ConvLayout& layout = p.state.conv_layout;
  for (int64_t i = 0; i < sequence.conv_to_store_count; ++i) {
    const RowsToStore& plan = sequence.conv_to_store[i];
    for (int64_t row = plan.first; row < plan.last; ++row) {
      double value = 0;
      if (row >= sequence.position) {
        value = load(p.x, sequence.index, sequence.row_begin + row - sequence.position, 0, c);
      } else {
        const char* element = ring_element(p, p.state, sequence.history, c, sequence.position - row);
        if (!element) continue;
        value = load_element<double>(element, layout.dtype, 0);
      }
      const int64_t ring = (plan.ring + row - plan.first) % layout.capacity;
      store_element(p.state.conv(plan.block, p.first_channel + c, ring), layout.dtype, 0, value);
    }
  }
}

// One sequence of one channel: adds to the weight's gradient, writes the rows' and the history's.
void reverse_sequence(const Convolution& p, const Sequence& sequence, int64_t c, const Channel& channel, double* dbias) {
  const int64_t history = p.width - 1, entries = history + sequence.rows;
  load_channel(p, sequence, c, channel);
  const double bias = p.bias.present() ? load(p.bias, 0, c) : 0;
  for (int64_t i = 0; i < entries; ++i) channel.dx[i] = 0;
  for (int64_t back = 1; back <= history; ++back) {
    channel.dx[entries - back] = ring_value(p, p.gradient, sequence.final_gradient, c, back);
  }
  for (int64_t t = 0; t < sequence.rows; ++t) {
    double dsum = load(p.dy, sequence.index, sequence.row_begin + t, 0, c);
    if (p.activation == LLA_ACTIVATION_SILU) dsum *= silu_slope(sum_of_taps(p, channel, bias, t));
    *dbias += dsum;
    add_scaled(channel.dweight, dsum, channel.x + t, p.width);
    add_scaled(channel.dx + t, dsum, channel.weight, p.width);
  }
  for (int64_t t = 0; p.dx.present() && t < sequence.rows; ++t) {
    store(p.dx, sequence.index, sequence.row_begin + t, 0, c, channel.dx[history + t]);
  }
  const SlotImage& initial = sequence.initial_gradient;
  for (int64_t back = 1; initial.tail >= 0 && back <= initial.conv_rows; ++back) {
    char* element = ring_element(p, p.gradient, initial, c, back);
    const double value = back <= history ? channel.dx[history - back] : 0;
    if (element) store_element(element, p.gradient.conv_layout.dtype, 0, value);
  }
}

}  // namespace

void ConvolutionForwardKernel::measure(const void* problem, const Limits& limits, Need* need) {
  Carver carver;
  Channel().take(&carver, *static_cast<const Convolution*>(problem), limits);
  *need = need_per_thread(carver.bytes());
}

int64_t ConvolutionForwardKernel::tasks(const void* problem, int32_t) {
  const Convolution& p = *static_cast<const Convolution*>(problem);
  return p.batch.count * channel_blocks(p);
}

void ConvolutionForwardKernel::run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t,
                                   int64_t task) {
  const Convolution& p = *static_cast<const Convolution*>(problem);
  const Sequence& sequence = p.batch.sequences[task / channel_blocks(p)];
  if (sequence.padding) return;
  Carver carver(scratch.thread);
  Channel channel;
  channel.take(&carver, p, limits);
  const int64_t begin = task % channel_blocks(p) * kChannelsPerTask;
  for (int64_t c = begin; c < channel_end(p, begin); ++c) {
    load_channel(p, sequence, c, channel);
    const double bias = p.bias.present() ? load(p.bias, 0, c) : 0;
    for (int64_t t = 0; t < sequence.rows; ++t) {
      const double sum = sum_of_taps(p, channel, bias, t);
      store(p.y, sequence.index, sequence.row_begin + t, 0, c, p.activation == LLA_ACTIVATION_SILU ? silu(sum) : sum);
    }
    if (p.state.convs.base) store_history(p, sequence, c);
  }
}

void ConvolutionBackwardKernel::measure(const void* problem, const Limits& limits, Need* need) {
  Carver carver;
  Channel().take(&carver, *static_cast<const Convolution*>(problem), limits);
  *need = need_per_thread(carver.bytes());
}

int64_t ConvolutionBackwardKernel::tasks(const void* problem, int32_t) {
  return channel_blocks(*static_cast<const Convolution*>(problem));
}

// A block of channels, all sequences in order, so that the sums over rows have one fixed order.
void ConvolutionBackwardKernel::run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t,
                                    int64_t task) {
  const Convolution& p = *static_cast<const Convolution*>(problem);
  Carver carver(scratch.thread);
  Channel channel;
  channel.take(&carver, p, limits);
  const int64_t begin = task * kChannelsPerTask;
  for (int64_t c = begin; c < channel_end(p, begin); ++c) {
    double dbias = 0;
    fill(channel.dweight, p.width, 0);
    for (int64_t s = 0; s < p.batch.count; ++s) {
      if (!p.batch.sequences[s].padding) reverse_sequence(p, p.batch.sequences[s], c, channel, &dbias);
    }
    for (int64_t i = 0; p.dweight.present() && i < p.width; ++i) store(p.dweight, c, i, channel.dweight[i]);
    if (p.dbias.present()) store(p.dbias, 0, c, dbias);
  }
}

}  // namespace lla::reference
