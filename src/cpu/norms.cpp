// SPDX-License-Identifier: Apache-2.0
// L2 norm of heads; skip connection, output gate and RMS norm; and the gradients (docs/mathematics.md).
#include <cmath>
#include <initializer_list>

#include "cpu/parts.h"

namespace lla::cpu {
namespace {

constexpr int64_t kRows = 16;           // live rows of a task
constexpr int64_t kGradientRows = 128;  // of a task that sums a part of the weights' gradients

// ---- L2 norm ----

bool accepts_l2(const void* problem) {
  const L2Norm& p = *static_cast<const L2Norm*>(problem);
  return narrow_types(p.x, p.y, p.dy, p.dx);
}

struct L2Arrays {
  float *x, *dy;
  void take(Carver* carver, const L2Norm& p) {
    x = carver->take(p.dim);
    dy = carver->take(p.dim);
  }
};

void measure_l2(const void* problem, const Limits&, Need* need) {
  Carver carver;
  L2Arrays().take(&carver, *static_cast<const L2Norm*>(problem));
  set_need(0, carver.bytes(), need);
}

int32_t one_phase(const void*) { return 1; }

int64_t l2_tasks(const void* problem, int32_t) {
  return ceil_div(live_numbers(static_cast<const L2Norm*>(problem)->batch), kRows);
}

float inverse_length(const Simd& simd, const L2Norm& p, const float* x) {
  return 1 / std::sqrt(simd.dot(x, x, p.dim) + float_of_epsilon(p.epsilon));
}

void store_head(const Simd& simd, const View& view, int64_t b, int64_t row, int64_t head, int64_t dim, const float* values) {
  if (view.accumulate) {
    simd.narrow_add(view.at(b, row, head), view.dtype, values, dim);
  } else {
    simd.narrow(view.at(b, row, head), view.dtype, values, dim);
  }
}

// Calls f(b, row, head) for the heads of a task's live rows.
template <class F>
void for_heads(const L2Norm& p, int64_t task, F f) {
  for_pieces(p.batch, task * kRows, (task + 1) * kRows, [&](const Piece& piece) {
    for (int64_t t = piece.first; t < piece.last; ++t) {
      for (int64_t h = 0; h < p.heads; ++h) f(piece.sequence->index, piece.row(t), h);
    }
  });
}

struct L2ForwardDriver {
  static constexpr Op kOp = Op::L2NormForward;
  static constexpr const char* kNames[] = LLA_CPU_KERNEL_NAMES("cpu.l2_norm.forward");
  static constexpr auto accepts = accepts_l2;
  static constexpr auto measure = measure_l2;
  static constexpr auto phases = one_phase;
  static constexpr auto tasks = l2_tasks;

  static void run(const Simd& simd, const void* problem, const Limits&, const Scratch& scratch, int32_t, int64_t task) {
    const L2Norm& p = *static_cast<const L2Norm*>(problem);
    Carver carver(scratch.thread);
    L2Arrays a;
    a.take(&carver, p);
    for_heads(p, task, [&](int64_t b, int64_t row, int64_t h) {
      simd.widen(a.x, p.x.at(b, row, h), p.x.dtype, p.dim);
      simd.scale(a.x, a.x, inverse_length(simd, p, a.x) * static_cast<float>(p.scale), p.dim);
      store_head(simd, p.y, b, row, h, p.dim, a.x);
    });
  }
};

struct L2BackwardDriver {
  static constexpr Op kOp = Op::L2NormBackward;
  static constexpr const char* kNames[] = LLA_CPU_KERNEL_NAMES("cpu.l2_norm.backward");
  static constexpr auto accepts = accepts_l2;
  static constexpr auto measure = measure_l2;
  static constexpr auto phases = one_phase;

  static int64_t tasks(const void* problem, int32_t phase) {
    return static_cast<const L2Norm*>(problem)->dx.present() ? l2_tasks(problem, phase) : 0;
  }

  // dx = scale * r * (dy - u (u . dy)), u = r x, r = 1 / |x|.
  static void run(const Simd& simd, const void* problem, const Limits&, const Scratch& scratch, int32_t, int64_t task) {
    const L2Norm& p = *static_cast<const L2Norm*>(problem);
    Carver carver(scratch.thread);
    L2Arrays a;
    a.take(&carver, p);
    for_heads(p, task, [&](int64_t b, int64_t row, int64_t h) {
      simd.widen(a.x, p.x.at(b, row, h), p.x.dtype, p.dim);
      simd.widen(a.dy, p.dy.at(b, row, h), p.dy.dtype, p.dim);
      const float r = inverse_length(simd, p, a.x);
      simd.scale(a.x, a.x, r, p.dim);
      simd.add_scaled(a.dy, a.x, -simd.dot(a.x, a.dy, p.dim), p.dim);
      simd.scale(a.dy, a.dy, r * static_cast<float>(p.scale), p.dim);
      store_head(simd, p.dx, b, row, h, p.dim, a.dy);
    });
  }
};

// ---- gated norm ----

bool gate_first(const GatedNorm& p) { return p.form == LLA_NORM_GATE_FIRST; }
bool normed(const GatedNorm& p) { return p.form != LLA_NORM_NONE; }
int64_t group_of(const GatedNorm& p) { return normed(p) ? p.group : p.width; }

bool accepts_norm(const void* problem) {
  const GatedNorm& p = *static_cast<const GatedNorm*>(problem);
  return narrow_types(p.x, p.skip, p.z, p.y, p.dy, p.dx, p.dskip, p.dz, p.d, p.weight, p.dd, p.dweight);
}

// One row: y = a * r * weight * after; a is what enters the norm, r = 1 / root mean square of a group, after = the gate if
// it comes last, else 1.
struct NormArrays {
  float *d, *weight;                 // [width], repeated over heads or groups
  float *u, *skip, *z, *gate, *a;    // [width]
  float *dy, *du, *dgate, *sigmoid;  // [width], backward
  float* ones;                       // [width]

  void take(Carver* carver, const GatedNorm& p) {
    for (float** array : {&d, &weight, &u, &skip, &z, &gate, &a, &dy, &du, &dgate, &sigmoid, &ones}) {
      *array = carver->take(p.width);
    }
  }

  void load(const Simd& simd, const GatedNorm& p) const {
    fill(ones, p.width, 1);
    fill(d, p.width, 1);
    fill(weight, p.width, 1);
    if (p.d.present() && p.skip_per_channel) {
      load_weight(simd, p.d, 0, 0, p.width, d);
    } else if (p.d.present()) {
      for (int64_t h = 0; h < p.heads; ++h) {
        float of_head;
        load_weight(simd, p.d, 0, h, 1, &of_head);
        fill(d + h * p.value_dim, p.value_dim, of_head);
      }
    }
    if (!normed(p) || !p.weight.present()) return;
    if (!p.weight_per_group) return load_weight(simd, p.weight, 0, 0, p.width, weight);
    for (int64_t i = 0; i < p.width; i += p.group) load_weight(simd, p.weight, 0, 0, p.group, weight + i);
  }

  void load_row_inputs(const Simd& simd, const GatedNorm& p, int64_t b, int64_t row) const {
    load_row(simd, p.x, b, row, p.heads, p.value_dim, u);
    if (p.skip.present()) {
      load_row(simd, p.skip, b, row, p.heads, p.value_dim, skip);
      simd.multiply_add(u, d, skip, p.width);
    }
    if (p.z.present()) {
      load_span(simd, p.z, b, row, 0, p.width, z);
      simd.silu(gate, z, p.width);
    } else {
      fill(gate, p.width, 1);
    }
    simd.multiply(a, u, gate_first(p) ? gate : ones, p.width);
  }

  float inverse_rms(const Simd& simd, const GatedNorm& p, int64_t begin) const {
    const float squares = simd.dot(a + begin, a + begin, p.group);
    return 1 / std::sqrt(squares / static_cast<float>(p.group) + float_of_epsilon(p.epsilon));
  }
};

struct NormForwardDriver {
  static constexpr Op kOp = Op::GatedNormForward;
  static constexpr const char* kNames[] = LLA_CPU_KERNEL_NAMES("cpu.gated_norm.forward");
  static constexpr auto accepts = accepts_norm;
  static constexpr auto phases = one_phase;

  static void measure(const void* problem, const Limits&, Need* need) {
    Carver carver;
    NormArrays().take(&carver, *static_cast<const GatedNorm*>(problem));
    set_need(0, carver.bytes(), need);
  }
  static int64_t tasks(const void* problem, int32_t) {
    return ceil_div(live_numbers(static_cast<const GatedNorm*>(problem)->batch), kRows);
  }

  static void run_row(const Simd& simd, const GatedNorm& p, const NormArrays& a, int64_t b, int64_t row) {
    a.load_row_inputs(simd, p, b, row);
    for (int64_t i = 0; normed(p) && i < p.width; i += p.group) {
      simd.scale(a.a + i, a.a + i, a.inverse_rms(simd, p, i), p.group);
    }
    if (normed(p)) simd.multiply(a.a, a.a, a.weight, p.width);
    if (!gate_first(p) && p.z.present()) simd.multiply(a.a, a.a, a.gate, p.width);
    store_row(simd, p.y, b, row, p.heads, p.value_dim, a.a);
  }

  static void run(const Simd& simd, const void* problem, const Limits&, const Scratch& scratch, int32_t, int64_t task) {
    const GatedNorm& p = *static_cast<const GatedNorm*>(problem);
    Carver carver(scratch.thread);
    NormArrays a;
    a.take(&carver, p);
    a.load(simd, p);
    for_pieces(p.batch, task * kRows, (task + 1) * kRows, [&](const Piece& piece) {
      for (int64_t t = piece.first; t < piece.last; ++t) run_row(simd, p, a, piece.sequence->index, piece.row(t));
    });
  }
};

// Phase 0: gradients of the inputs, and per task the sums of the weights' gradients over its rows, by element of the row.
// Phase 1: the sums of these sums in order of the rows, then over heads or groups.
struct NormBackwardDriver {
  static constexpr Op kOp = Op::GatedNormBackward;
  static constexpr const char* kNames[] = LLA_CPU_KERNEL_NAMES("cpu.gated_norm.backward");
  static constexpr auto accepts = accepts_norm;

  struct Sums {
    float *d, *weight;  // [width]
    void take(Carver* carver, const GatedNorm& p) {
      d = carver->take(p.width);
      weight = carver->take(p.width);
    }
  };
  static Size sums_bytes(const GatedNorm& p) {
    Carver carver;
    Sums().take(&carver, p);
    return Size(carver.bytes());
  }
  static bool wants_sums(const GatedNorm& p) { return p.dd.present() || p.dweight.present(); }
  static Sums sums_of(const GatedNorm& p, const Scratch& scratch, int64_t task) {
    Carver carver(scratch.shared + task * sums_bytes(p).value());
    Sums sums;
    sums.take(&carver, p);
    return sums;
  }

  static void measure(const void* problem, const Limits& limits, Need* need) {
    const GatedNorm& p = *static_cast<const GatedNorm*>(problem);
    Carver carver;
    NormArrays().take(&carver, p);
    const Size numbers = most_live_numbers(limits);
    const Size shared = Size(numbers.valid() ? ceil_div(numbers.value(), kGradientRows) + 1 : -1) * sums_bytes(p);
    set_need(shared.valid() ? shared.value() : -1, carver.bytes(), need);
  }
  static int32_t phases(const void*) { return 2; }
  static int64_t tasks(const void* problem, int32_t phase) {
    const GatedNorm& p = *static_cast<const GatedNorm*>(problem);
    if (phase == 1) return wants_sums(p) ? 1 : 0;
    return ceil_div(live_numbers(p.batch), kGradientRows);
  }

  static void run_row(const Simd& simd, const GatedNorm& p, const NormArrays& a, const Sums& sums, int64_t b, int64_t row) {
    a.load_row_inputs(simd, p, b, row);
    load_row(simd, p.dy, b, row, p.heads, p.value_dim, a.dy);
    const float* after = gate_first(p) ? a.ones : a.gate;
    const int64_t group = group_of(p);
    for (int64_t i = 0; i < p.width; i += group) {
      const float r = normed(p) ? a.inverse_rms(simd, p, i) : 1;
      // a.sigmoid holds dy * a * r for a moment: what the gradients of weight and gate have in common.
      float* common = a.sigmoid + i;
      simd.multiply(common, a.dy + i, a.a + i, group);
      simd.scale(common, common, r, group);
      simd.multiply_add(sums.weight + i, common, after + i, group);
      simd.multiply(a.dgate + i, common, a.weight + i, group);
      simd.multiply(a.du + i, a.dy + i, a.weight + i, group);
      simd.multiply(a.du + i, a.du + i, after + i, group);
      const float along = normed(p) ? simd.dot(a.du + i, a.a + i, group) : 0;
      simd.scale(a.du + i, a.du + i, r, group);
      if (normed(p)) simd.add_scaled(a.du + i, a.a + i, -(r * r * r * (along / static_cast<float>(group))), group);
    }
    if (gate_first(p)) {
      simd.multiply(a.dgate, a.du, a.u, p.width);
      simd.multiply(a.du, a.du, a.gate, p.width);
    }
    if (p.dx.present()) store_row(simd, p.dx, b, row, p.heads, p.value_dim, a.du);
    if (p.dz.present()) {
      simd.sigmoid(a.sigmoid, a.z, p.width);
      for (int64_t e = 0; e < p.width; ++e) a.dgate[e] *= a.sigmoid[e] * (1 + a.z[e] * (1 - a.sigmoid[e]));
      store_span(simd, p.dz, b, row, 0, p.width, a.dgate);
    }
    if (p.skip.present()) simd.multiply_add(sums.d, a.du, a.skip, p.width);
    if (p.dskip.present()) {
      simd.multiply(a.du, a.du, a.d, p.width);
      store_row(simd, p.dskip, b, row, p.heads, p.value_dim, a.du);
    }
  }

  static void run(const Simd& simd, const void* problem, const Limits&, const Scratch& scratch, int32_t phase,
                  int64_t task) {
    const GatedNorm& p = *static_cast<const GatedNorm*>(problem);
    if (phase == 1) return reduce(simd, p, scratch);
    Carver carver(scratch.thread);
    NormArrays a;
    a.take(&carver, p);
    a.load(simd, p);
    const Sums sums = sums_of(p, scratch, task);
    fill(sums.d, p.width, 0);
    fill(sums.weight, p.width, 0);
    for_pieces(p.batch, task * kGradientRows, (task + 1) * kGradientRows, [&](const Piece& piece) {
      for (int64_t t = piece.first; t < piece.last; ++t) run_row(simd, p, a, sums, piece.sequence->index, piece.row(t));
    });
  }

  static void reduce(const Simd& simd, const GatedNorm& p, const Scratch& scratch) {
    LLA_CONTRACT(scratch.shared);
    const Sums total = sums_of(p, scratch, 0);
    const int64_t count = tasks(&p, 0);
    if (count == 0) {
      fill(total.d, p.width, 0);
      fill(total.weight, p.width, 0);
    }
    for (int64_t i = 1; i < count; ++i) {
      const Sums sums = sums_of(p, scratch, i);
      simd.add_scaled(total.d, sums.d, 1, p.width);
      simd.add_scaled(total.weight, sums.weight, 1, p.width);
    }
    int64_t weights = p.width, skips = p.width;
    if (p.weight_per_group) {
      weights = p.group;
      for (int64_t i = p.group; i < p.width; i += p.group) simd.add_scaled(total.weight, total.weight + i, 1, p.group);
    }
    if (!p.skip_per_channel) {
      skips = p.heads;
      for (int64_t h = 0; h < p.heads; ++h) total.d[h] = simd.sum(total.d + h * p.value_dim, p.value_dim);
    }
    if (p.dweight.present()) store_weight(simd, p.dweight, 0, 0, weights, total.weight);
    if (p.dd.present()) store_weight(simd, p.dd, 0, 0, skips, total.d);
  }
};

}  // namespace

const Kernel* norm_kernels(int isa, int64_t* count) {
  return DriverTable<L2ForwardDriver, L2BackwardDriver, NormForwardDriver, NormBackwardDriver>::of(isa, count);
}

}  // namespace lla::cpu
