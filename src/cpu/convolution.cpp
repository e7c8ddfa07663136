// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution with its history ring, and its gradients (docs/mathematics.md; rings: plugin/slot.h). Rows
// are vectors over a block of channels.
#include "cpu/parts.h"

namespace lla::cpu {
namespace {

constexpr int64_t kRows = 64;      // rows that are held as floats at once
constexpr int64_t kChannels = 64;  // channels of a task

// A block of channels of a problem.
struct Block {
  const Convolution* p;
  int64_t first, channels;  // within the stream

  Block(const Convolution& problem, int64_t index)
      : p(&problem), first(index * kChannels), channels(least(kChannels, problem.channels - index * kChannels)) {}
};

int64_t block_count(const Convolution& p) { return ceil_div(p.channels, kChannels); }

bool accepts(const void* problem) {
  const Convolution& p = *static_cast<const Convolution*>(problem);
  return narrow_types(p.x, p.y, p.weight, p.bias, p.dy, p.dx, p.dweight, p.dbias);
}

// Element of channel 0 of the block for the row `back` >= 1 rows before the image's position; null if the image does not
// hold it. Other channels follow `capacity` elements apart.
char* ring_row(const Block& block, const SlotMemory& memory, const SlotImage& image, int64_t back) {
  if (image.tail < 0 || !memory.convs.base || back > image.conv_rows || image.position - back < image.start) return nullptr;
  const int64_t capacity = memory.conv_layout.capacity;
  const int64_t ring = (image.conv_origin + capacity - back % capacity) % capacity;
  return memory.conv(image.tail, block.p->first_channel + block.first, ring);
}

float ring_value(const SlotMemory& memory, const char* row, int64_t channel) {
  return load_element<float>(row, memory.conv_layout.dtype, channel * memory.conv_layout.capacity);
}

void load_ring_row(const Block& block, const SlotMemory& memory, const SlotImage& image, int64_t back, float* out) {
  const char* row = ring_row(block, memory, image, back);
  for (int64_t c = 0; c < block.channels; ++c) out[c] = row ? ring_value(memory, row, c) : 0;
}

// Row t of the sequence, which may be negative: a row of the history.
void load_input(const Simd& simd, const Block& block, const Sequence& s, int64_t t, float* out) {
  if (t < 0) {
    load_ring_row(block, block.p->state, s.history, -t, out);
  } else {
    load_span(simd, block.p->x, s.index, s.row_begin + t, block.first, block.channels, out);
  }
}

// Taps [W][channels] and bias [channels] as floats.
void load_weights(const Simd& simd, const Block& block, float* taps, float* bias) {
  const Convolution& p = *block.p;
  for (int64_t c = 0; c < block.channels; ++c) {
    for (int64_t i = 0; i < p.width; ++i) {
      taps[i * block.channels + c] = load_element<float>(p.weight.at(block.first + c), p.weight.dtype, i);
    }
  }
  if (p.bias.present()) {
    load_weight(simd, p.bias, 0, block.first, block.channels, bias);
  } else {
    fill(bias, block.channels, 0);
  }
}

// What a row hands to the activation; `x` holds the W rows that end with it.
void sum_of_taps(const Simd& simd, const Block& block, const float* taps, const float* bias, const float* x, float* out) {
  const int64_t n = block.channels;
  for (int64_t c = 0; c < n; ++c) out[c] = bias[c];
  for (int64_t i = 0; i < block.p->width; ++i) simd.multiply_add(out, taps + i * n, x + i * n, n);
}

// Rows that later calls need go into the rings that the plan names.
void store_history(const Block& block, const Sequence& s) {
  const Convolution& p = *block.p;
  const ConvLayout& layout = p.state.conv_layout;
  for (int64_t i = 0; i < s.conv_to_store_count; ++i) {
    const RowsToStore& plan = s.conv_to_store[i];
    for (int64_t position = plan.first; position < plan.last; ++position) {
      const int64_t ring = (plan.ring + position - plan.first) % layout.capacity;
      char* to = p.state.conv(plan.block, p.first_channel + block.first, ring);
      if (position >= s.position) {
        const void* from = p.x.at(s.index, s.row_begin + position - s.position, 0);
        for (int64_t c = 0; c < block.channels; ++c) {
          store_element(to, layout.dtype, c * layout.capacity, load_element<float>(from, p.x.dtype, block.first + c));
        }
      } else if (const char* from = ring_row(block, p.state, s.history, s.position - position)) {
        for (int64_t c = 0; c < block.channels; ++c) {
          const int64_t at = c * layout.capacity;
          store_element(to, layout.dtype, at, load_element<double>(from, layout.dtype, at));
        }
      }
    }
  }
}

struct ForwardDriver {
  static constexpr Op kOp = Op::ConvolutionForward;
  static constexpr const char* kNames[] = LLA_CPU_KERNEL_NAMES("cpu.convolution.forward");

  struct Arrays {
    float *x, *taps, *bias, *out;
    void take(Carver* carver, const Convolution& p) {
      const int64_t channels = least(kChannels, p.channels);
      x = carver->take((Size(kRows) + Size(p.width)) * channels);
      taps = carver->take(Size(p.width) * channels);
      bias = carver->take(channels);
      out = carver->take(channels);
    }
  };

  static bool accepts(const void* problem) { return cpu::accepts(problem); }
  static void measure(const void* problem, const Limits&, Need* need) {
    Carver carver;
    Arrays().take(&carver, *static_cast<const Convolution*>(problem));
    set_need(0, carver.bytes(), need);
  }
  static int32_t phases(const void*) { return 1; }
  static int64_t tasks(const void* problem, int32_t) {
    const Convolution& p = *static_cast<const Convolution*>(problem);
    return ceil_div(live_numbers(p.batch), kRows) * block_count(p);
  }

  static void run(const Simd& simd, const void* problem, const Limits&, const Scratch& scratch, int32_t, int64_t task) {
    const Convolution& p = *static_cast<const Convolution*>(problem);
    Carver carver(scratch.thread);
    Arrays a;
    a.take(&carver, p);
    const Block block(p, task % block_count(p));
    const int64_t n = block.channels, begin = task / block_count(p) * kRows;
    load_weights(simd, block, a.taps, a.bias);
    for_pieces(p.batch, begin, begin + kRows, [&](const Piece& piece) {
      const Sequence& s = *piece.sequence;
      const int64_t before = p.width - 1;
      for (int64_t i = 0; piece.rows() > 0 && i < before + piece.rows(); ++i) {
        load_input(simd, block, s, piece.first - before + i, a.x + i * n);
      }
      for (int64_t t = piece.first; t < piece.last; ++t) {
        sum_of_taps(simd, block, a.taps, a.bias, a.x + (t - piece.first) * n, a.out);
        if (p.activation == LLA_ACTIVATION_SILU) simd.silu(a.out, a.out, n);
        store_span(simd, p.y, s.index, piece.row(t), block.first, n, a.out);
      }
      if (piece.begins && p.state.convs.base) store_history(block, s);
    });
  }
};

struct BackwardDriver {
  static constexpr Op kOp = Op::ConvolutionBackward;
  static constexpr const char* kNames[] = LLA_CPU_KERNEL_NAMES("cpu.convolution.backward");

  struct Arrays {
    float *x, *dx, *taps, *bias, *dtaps, *dbias, *sum, *sigmoid, *dsum;
    void take(Carver* carver, const Convolution& p) {
      const int64_t channels = least(kChannels, p.channels);
      x = carver->take((Size(kRows) + Size(p.width)) * channels);
      dx = carver->take((Size(kRows) + Size(p.width)) * channels);
      taps = carver->take(Size(p.width) * channels);
      dtaps = carver->take(Size(p.width) * channels);
      bias = carver->take(channels);
      dbias = carver->take(channels);
      sum = carver->take(channels);
      sigmoid = carver->take(channels);
      dsum = carver->take(channels);
    }
  };

  static bool accepts(const void* problem) { return cpu::accepts(problem); }
  static void measure(const void* problem, const Limits&, Need* need) {
    Carver carver;
    Arrays().take(&carver, *static_cast<const Convolution*>(problem));
    set_need(0, carver.bytes(), need);
  }
  static int32_t phases(const void*) { return 1; }
  static int64_t tasks(const void* problem, int32_t) { return block_count(*static_cast<const Convolution*>(problem)); }

  // Gradient of one row's sum, from that of its output.
  static void reverse_activation(const Simd& simd, const Block& block, const Arrays& a, const float* x) {
    if (block.p->activation != LLA_ACTIVATION_SILU) return;
    sum_of_taps(simd, block, a.taps, a.bias, x, a.sum);
    simd.sigmoid(a.sigmoid, a.sum, block.channels);
    for (int64_t c = 0; c < block.channels; ++c) a.dsum[c] *= a.sigmoid[c] * (1 + a.sum[c] * (1 - a.sigmoid[c]));
  }

  // Where the gradients of inputs stand in line: entry e belongs to row e - (W - 1) of the sequence. Before the first row is
  // the history, and the last W - 1 entries start from the gradient of the final state.
  static void start_entries(const Block& block, const Sequence& s, int64_t first, int64_t last, float* out) {
    for (int64_t e = first; e < last; ++e, out += block.channels) {
      if (e >= s.rows) {
        load_ring_row(block, block.p->gradient, s.final_gradient, s.rows + block.p->width - 1 - e, out);
      } else {
        fill(out, block.channels, 0);
      }
    }
  }

  static void emit_entries(const Simd& simd, const Block& block, const Sequence& s, int64_t first, int64_t last,
                           const float* values) {
    const Convolution& p = *block.p;
    const int64_t before = p.width - 1;
    for (int64_t e = first; e < last; ++e, values += block.channels) {
      if (e >= before) {
        if (p.dx.present()) {
          store_span(simd, p.dx, s.index, s.row_begin + e - before, block.first, block.channels, values);
        }
      } else if (char* row = ring_row(block, p.gradient, s.initial_gradient, before - e)) {
        const ConvLayout& layout = p.gradient.conv_layout;
        for (int64_t c = 0; c < block.channels; ++c) store_element(row, layout.dtype, c * layout.capacity, values[c]);
      }
    }
  }

  // The initial gradient holds zeros where it has more rows than a convolution of this width can reach.
  static void clear_beyond(const Block& block, const Sequence& s) {
    const Convolution& p = *block.p;
    for (int64_t back = p.width; s.initial_gradient.tail >= 0 && back <= s.initial_gradient.conv_rows; ++back) {
      char* row = ring_row(block, p.gradient, s.initial_gradient, back);
      const ConvLayout& layout = p.gradient.conv_layout;
      for (int64_t c = 0; row && c < block.channels; ++c) store_element(row, layout.dtype, c * layout.capacity, 0.0f);
    }
  }

  static void reverse_sequence(const Simd& simd, const Block& block, const Sequence& s, const Arrays& a) {
    const Convolution& p = *block.p;
    const int64_t n = block.channels, before = p.width - 1;
    start_entries(block, s, 0, before, a.dx);
    for (int64_t i = 0; i < before; ++i) load_input(simd, block, s, i - before, a.x + i * n);
    for (int64_t t0 = 0; t0 < s.rows; t0 += kRows) {
      const int64_t rows = least(kRows, s.rows - t0);
      for (int64_t i = 0; i < rows; ++i) load_input(simd, block, s, t0 + i, a.x + (before + i) * n);
      start_entries(block, s, t0 + before, t0 + before + rows, a.dx + before * n);
      for (int64_t i = 0; i < rows; ++i) {
        load_span(simd, p.dy, s.index, s.row_begin + t0 + i, block.first, n, a.dsum);
        reverse_activation(simd, block, a, a.x + i * n);
        simd.add_scaled(a.dbias, a.dsum, 1, n);
        for (int64_t tap = 0; tap < p.width; ++tap) {
          simd.multiply_add(a.dtaps + tap * n, a.dsum, a.x + (i + tap) * n, n);
          simd.multiply_add(a.dx + (i + tap) * n, a.dsum, a.taps + tap * n, n);
        }
      }
      emit_entries(simd, block, s, t0, t0 + rows, a.dx);
      for (int64_t i = 0; i < before * n; ++i) {  // the last W - 1 rows move to the front
        a.x[i] = a.x[rows * n + i];
        a.dx[i] = a.dx[rows * n + i];
      }
    }
    emit_entries(simd, block, s, s.rows, s.rows + before, a.dx);
    clear_beyond(block, s);
  }

  // A block of channels, all sequences in their order, so that the sums over rows have one order.
  static void run(const Simd& simd, const void* problem, const Limits&, const Scratch& scratch, int32_t, int64_t task) {
    const Convolution& p = *static_cast<const Convolution*>(problem);
    Carver carver(scratch.thread);
    Arrays a;
    a.take(&carver, p);
    const Block block(p, task);
    load_weights(simd, block, a.taps, a.bias);
    fill(a.dtaps, p.width * block.channels, 0);
    fill(a.dbias, block.channels, 0);
    for (int64_t i = 0; i < p.batch.count; ++i) {
      if (!p.batch.sequences[i].padding) reverse_sequence(simd, block, p.batch.sequences[i], a);
    }
    for (int64_t c = 0; p.dweight.present() && c < block.channels; ++c) {
      for (int64_t tap = 0; tap < p.width; ++tap) {
        store_weight(simd, p.dweight, block.first + c, tap, 1, a.dtaps + tap * block.channels + c);
      }
    }
    if (p.dbias.present()) store_weight(simd, p.dbias, 0, block.first, block.channels, a.dbias);
  }
};

}  // namespace

const Kernel* convolution_kernels(int isa, int64_t* count) {
  return DriverTable<ForwardDriver, BackwardDriver>::of(isa, count);
}

}  // namespace lla::cpu
