// SPDX-License-Identifier: Apache-2.0
// Matrix product with a weight, y = x W^T + bias, and its gradients, tile by tile; operands are widened block by block.
#include "cpu/parts.h"
#include "cpu/projection_tiles.h"

namespace lla::cpu {
namespace {

constexpr int64_t kForwardRows = 128;  // live rows of a tile of y: a transposed block of the weight serves them all
constexpr int64_t kFewRows = 4;        // so few read a bf16 weight as it lies
constexpr int64_t kFewInputs = kForwardRows * kDotDepth / kFewRows;  // whose rows the scratch holds from end to end
constexpr int64_t kRows = 64;                                        // live rows of a tile of dx
constexpr int64_t kOutputs = 64;                                     // outputs of a tile of y or of the weight's gradient
constexpr int64_t kInputs = 128;                                     // inputs of a tile of dx or of the weight's gradient
constexpr int64_t kDepth = 256;  // outputs (of dx) or live rows (of the weight's gradient) that are widened at once

bool accepts(const void* problem) {
  const Projection& p = *static_cast<const Projection*>(problem);
  return narrow_types(p.x, p.y, p.weight, p.bias, p.dy, p.dx, p.dweight, p.dbias);
}

// Copies columns [first, first + columns) of the numbers [begin, end) to rows of `out`, one after the other; says how many.
int64_t gather(const Simd& simd, const BatchView& batch, const View& view, int64_t begin, int64_t end, int64_t first,
               int64_t columns, float* out) {
  int64_t rows = 0;
  for_pieces(batch, begin, end, [&](const Piece& piece) {
    for (int64_t t = piece.first; t < piece.last; ++t, ++rows) {
      load_span(simd, view, piece.sequence->index, piece.row(t), first, columns, out + rows * columns);
    }
  });
  return rows;
}

// If the rows of [begin, end) are floats at one distance, returns the first one's `first` column and the distance.
const float* in_place(const BatchView& batch, const View& view, int64_t begin, int64_t end, int64_t first, int64_t* stride,
                      int64_t* rows) {
  if (view.dtype != LLA_F32) return nullptr;
  const float* start = nullptr;
  int64_t pieces = 0;
  for_pieces(batch, begin, end, [&](const Piece& piece) {
    if (piece.rows() == 0) return;
    if (pieces++ == 0) {
      start = static_cast<const float*>(view.at(piece.sequence->index, piece.row(piece.first), 0)) + first;
      *rows = piece.rows();
    }
  });
  *stride = view.row_stride;
  return pieces == 1 ? start : nullptr;
}

// A block of rows as floats: where they are, or gathered into `memory`.
struct Operand {
  const float* data = nullptr;
  int64_t stride = 0, rows = 0;
};

Operand rows_of(const Simd& simd, const BatchView& batch, const View& view, int64_t begin, int64_t end, int64_t first,
                int64_t columns, float* memory) {
  Operand o;
  o.data = in_place(batch, view, begin, end, first, &o.stride, &o.rows);
  if (o.data) return o;
  o.rows = gather(simd, batch, view, begin, end, first, columns, memory);
  o.data = memory;
  o.stride = columns;
  return o;
}

Operand weight_block(const Simd& simd, const Matrix& weight, int64_t i, int64_t rows, int64_t first, int64_t columns,
                     float* memory) {
  Operand o;
  o.rows = rows;
  if (weight.dtype == LLA_F32) {
    o.data = static_cast<const float*>(weight.at(i, first));
    o.stride = weight.row_stride;
    return o;
  }
  for (int64_t r = 0; r < rows; ++r) load_weight(simd, weight, i + r, first, columns, memory + r * columns);
  o.data = memory;
  o.stride = columns;
  return o;
}

// Where a tile's rows are made: in place, if they are written once and plain, or in `memory`.
struct Target {
  float* data = nullptr;
  int64_t stride = 0;
  bool direct = false;
};

Target target_of(const BatchView& batch, const View& view, int64_t begin, int64_t end, int64_t first, int64_t columns,
                 bool once, float* memory) {
  Target t;
  int64_t rows = 0;
  if (once && !view.accumulate) t.data = const_cast<float*>(in_place(batch, view, begin, end, first, &t.stride, &rows));
  t.direct = t.data != nullptr;
  if (!t.direct) t = Target{memory, columns, false};
  return t;
}

// Writes a tile's rows to the rows of a view.
void scatter(const Simd& simd, const BatchView& batch, const View& view, int64_t begin, int64_t end, int64_t first,
             int64_t columns, const float* tile) {
  int64_t rows = 0;
  for_pieces(batch, begin, end, [&](const Piece& piece) {
    for (int64_t t = piece.first; t < piece.last; ++t, ++rows) {
      store_span(simd, view, piece.sequence->index, piece.row(t), first, columns, tile + rows * columns);
    }
  });
}

struct ForwardDriver {
  static constexpr Op kOp = Op::ProjectionForward;
  static constexpr const char* kNames[] = LLA_CPU_KERNEL_NAMES("cpu.projection.forward");

  struct Arrays {
    float *tile, *x, *weight, *bias;
    void take(Carver* carver, const Projection& p) {
      const int64_t depth = least(p.inputs, kDotDepth), outputs = least(p.outputs, kOutputs);
      tile = carver->take(kForwardRows * outputs);
      const int64_t many = kForwardRows * depth, few = kFewRows * least(p.inputs, kFewInputs);
      x = carver->take(many > few ? many : few);
      weight = carver->take(outputs * depth);
      bias = carver->take(outputs);
    }
  };

  static bool accepts(const void* problem) { return cpu::accepts(problem); }
  static void measure(const void* problem, const Limits&, Need* need) {
    Carver carver;
    Arrays().take(&carver, *static_cast<const Projection*>(problem));
    set_need(0, carver.bytes(), need);
  }
  static int32_t phases(const void*) { return 1; }
  static int64_t tasks(const void* problem, int32_t) {
    const Projection& p = *static_cast<const Projection*>(problem);
    return ceil_div(live_numbers(p.batch), kForwardRows) * ceil_div(p.outputs, kOutputs);
  }

  // One tile of y. Neighbouring tasks share the weights' block.
  static void run(const Simd& simd, const void* problem, const Limits&, const Scratch& scratch, int32_t, int64_t task) {
    const Projection& p = *static_cast<const Projection*>(problem);
    Carver carver(scratch.thread);
    Arrays a;
    a.take(&carver, p);
    const int64_t numbers = live_numbers(p.batch), blocks = ceil_div(numbers, kForwardRows);
    const int64_t begin = task % blocks * kForwardRows, end = least(numbers, begin + kForwardRows);
    const int64_t first = task / blocks * kOutputs, outputs = least(kOutputs, p.outputs - first);
    const bool few = p.weight.dtype == LLA_BF16 && end - begin <= kFewRows && p.inputs <= kFewInputs;
    const Target y = target_of(p.batch, p.y, begin, end, first, outputs, few || p.inputs <= kDotDepth, a.tile);
    int64_t rows = 0, at = 0;
    do {
      const int64_t depth = few ? p.inputs : least(kDotDepth, p.inputs - at);
      const Operand x = rows_of(simd, p.batch, p.x, begin, end, at, depth, a.x);
      rows = x.rows;
      if (rows == 0) return;
      if (few) {
        simd.dot_product_bf16(rows, outputs, depth, x.data, x.stride, static_cast<const uint16_t*>(p.weight.at(first)),
                              p.weight.row_stride, y.data, y.stride);
      } else {
        const Operand w = weight_block(simd, p.weight, first, outputs, at, depth, a.weight);
        simd.dot_product(rows, outputs, depth, x.data, x.stride, w.data, w.stride, y.data, y.stride, at > 0);
      }
      at += depth;
    } while (at < p.inputs);
    if (p.bias.present()) {
      load_weight(simd, p.bias, 0, first, outputs, a.bias);
      for (int64_t r = 0; r < rows; ++r) simd.add_scaled(y.data + r * y.stride, a.bias, 1, outputs);
    }
    if (!y.direct) scatter(simd, p.batch, p.y, begin, end, first, outputs, a.tile);
  }
};

struct BackwardDriver {
  static constexpr Op kOp = Op::ProjectionBackward;
  static constexpr const char* kNames[] = LLA_CPU_KERNEL_NAMES("cpu.projection.backward");

  struct Arrays {
    float *tile, *left, *right;
    void take(Carver* carver) {
      tile = carver->take(kRows * kInputs);
      left = carver->take(kDepth * kOutputs);
      right = carver->take(kDepth * kInputs);
    }
  };
  static_assert(kRows == kOutputs);  // `left` holds [kRows][kDepth] of dx, or [kDepth][kOutputs]

  static bool accepts(const void* problem) { return cpu::accepts(problem); }
  static void measure(const void*, const Limits&, Need* need) {
    Carver carver;
    Arrays().take(&carver);
    set_need(0, carver.bytes(), need);
  }
  static int32_t phases(const void*) { return 1; }

  // Tasks: tiles of dx, then tiles of the weight's gradient, then blocks of the bias's.
  static int64_t input_tasks(const Projection& p) {
    return p.dx.present() ? ceil_div(live_numbers(p.batch), kRows) * ceil_div(p.inputs, kInputs) : 0;
  }
  static int64_t weight_tasks(const Projection& p) {
    return p.dweight.present() ? ceil_div(p.outputs, kOutputs) * ceil_div(p.inputs, kInputs) : 0;
  }
  static int64_t tasks(const void* problem, int32_t) {
    const Projection& p = *static_cast<const Projection*>(problem);
    return input_tasks(p) + weight_tasks(p) + (p.dbias.present() ? ceil_div(p.outputs, kOutputs) : 0);
  }

  static void run_input(const Simd& simd, const Projection& p, const Arrays& a, int64_t task) {
    const int64_t numbers = live_numbers(p.batch), blocks = ceil_div(numbers, kRows);
    const int64_t begin = task % blocks * kRows, end = least(numbers, begin + kRows);
    const int64_t first = task / blocks * kInputs, inputs = least(kInputs, p.inputs - first);
    const Target dx = target_of(p.batch, p.dx, begin, end, first, inputs, p.outputs <= kDepth, a.tile);
    for (int64_t o = 0; o < p.outputs; o += kDepth) {
      const int64_t depth = least(kDepth, p.outputs - o);
      const Operand dy = rows_of(simd, p.batch, p.dy, begin, end, o, depth, a.left);
      if (dy.rows == 0) return;
      const Operand w = weight_block(simd, p.weight, o, depth, first, inputs, a.right);
      simd.outer_product(dy.rows, inputs, depth, dy.data, dy.stride, 1, w.data, w.stride, dx.data, dx.stride, o > 0);
    }
    if (!dx.direct) scatter(simd, p.batch, p.dx, begin, end, first, inputs, a.tile);
  }

  // All live rows in their order.
  static void run_weight(const Simd& simd, const Projection& p, const Arrays& a, int64_t task) {
    const int64_t blocks = ceil_div(p.inputs, kInputs), numbers = live_numbers(p.batch);
    const int64_t output = task / blocks * kOutputs, outputs = least(kOutputs, p.outputs - output);
    const int64_t input = task % blocks * kInputs, inputs = least(kInputs, p.inputs - input);
    fill(a.tile, outputs * inputs, 0);
    for (int64_t begin = 0; begin < numbers; begin += kDepth) {
      const int64_t end = least(numbers, begin + kDepth);
      const Operand dy = rows_of(simd, p.batch, p.dy, begin, end, output, outputs, a.left);
      const Operand x = rows_of(simd, p.batch, p.x, begin, end, input, inputs, a.right);
      simd.outer_product(outputs, inputs, dy.rows, dy.data, 1, dy.stride, x.data, x.stride, a.tile, inputs, true);
    }
    for (int64_t o = 0; o < outputs; ++o) store_weight(simd, p.dweight, output + o, input, inputs, a.tile + o * inputs);
  }

  static void run_bias(const Simd& simd, const Projection& p, const Arrays& a, int64_t task) {
    const int64_t output = task * kOutputs, outputs = least(kOutputs, p.outputs - output);
    fill(a.tile, outputs, 0);
    for_pieces(p.batch, 0, live_numbers(p.batch), [&](const Piece& piece) {
      for (int64_t t = piece.first; t < piece.last; ++t) {
        load_span(simd, p.dy, piece.sequence->index, piece.row(t), output, outputs, a.left);
        simd.add_scaled(a.tile, a.left, 1, outputs);
      }
    });
    store_weight(simd, p.dbias, 0, output, outputs, a.tile);
  }

  static void run(const Simd& simd, const void* problem, const Limits&, const Scratch& scratch, int32_t, int64_t task) {
    const Projection& p = *static_cast<const Projection*>(problem);
    Carver carver(scratch.thread);
    Arrays a;
    a.take(&carver);
    const int64_t of_input = input_tasks(p), of_weight = weight_tasks(p);
    if (task < of_input) {
      run_input(simd, p, a, task);
    } else if (task < of_input + of_weight) {
      run_weight(simd, p, a, task - of_input);
    } else {
      run_bias(simd, p, a, task - of_input - of_weight);
    }
  }
};

}  // namespace

const Kernel* projection_kernels(int isa, int64_t* count) {
  if (isa == LLA_ISA_AVX512 && (tiles() || bf16_dots())) {
    static constexpr Kernel kForward = driver_kernel<ForwardDriver, LLA_ISA_AVX512>(),
                            kBackward = driver_kernel<BackwardDriver, LLA_ISA_AVX512>();
    static constexpr Kernel kOnTiles[] = {kTiledProjection, kForward, kBackward};
    static constexpr Kernel kByDots[] = {kDotProjection, kForward, kBackward};
    *count = 3;
    return tiles() ? kOnTiles : kByDots;
  }
  return DriverTable<ForwardDriver, BackwardDriver>::of(isa, count);
}

}  // namespace lla::cpu
