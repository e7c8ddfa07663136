// SPDX-License-Identifier: Apache-2.0
// Log gate, write strength and λ from their raw projections, and the gradients (docs/mathematics.md). All in fp32.
#include <initializer_list>

#include "cpu/parts.h"

namespace lla::cpu {
namespace {

constexpr int64_t kForwardRows = 16;   // live rows of a task
constexpr int64_t kBackwardRows = 64;  // likewise; each task sums its rows' part of the weights' gradients

bool accepts(const void* problem) {
  const Gates& p = *static_cast<const Gates*>(problem);
  return narrow_types(p.gate, p.write, p.lambda, p.gate_out, p.write_out, p.lambda_out, p.dgate_out, p.dwrite_out,
                      p.dlambda_out, p.dgate, p.dwrite, p.dlambda, p.dt_bias, p.a_log, p.lambda_weight, p.ddt_bias, p.da_log,
                      p.dlambda_weight);
}

bool uses_step(const Gates& p) { return p.gate_form == LLA_GATE_SOFTPLUS; }

// Weights as floats, and arrays for one row.
struct Arrays {
  float *bias, *rate;            // [H]: of dt; minus the decay rate
  float* lambda_weight;          // [H * L]: P, or for the bounded form minus its exponential
  float *raw, *step, *result;    // [H]
  float *raw_lambda, *lambda;    // [H * L]
  // backward only
  float *dgate, *dwrite, *slope;         // [H]
  float *dlambda, *lambda_slope;         // [H * L]

  void take(Carver* carver, const Gates& p) {
    for (float** array : {&bias, &rate, &raw, &step, &result, &dgate, &dwrite, &slope}) *array = carver->take(p.heads);
    const Size levels = Size(p.heads) * Size(p.levels);
    for (float** array : {&lambda_weight, &raw_lambda, &lambda, &dlambda, &lambda_slope}) *array = carver->take(levels);
  }

  void load(const Simd& simd, const Gates& p) const {
    fill(bias, p.heads, 0);
    if (p.dt_bias.present()) load_weight(simd, p.dt_bias, 0, 0, p.heads, bias);
    fill(rate, p.heads, 0);
    if (p.a_log.present()) load_weight(simd, p.a_log, 0, 0, p.heads, rate);
    simd.exp(rate, rate, p.heads);
    simd.scale(rate, rate, -1, p.heads);
    const int64_t levels = p.heads * p.levels;
    fill(lambda_weight, levels, 1);
    for (int64_t h = 0; p.lambda_weight.present() && h < p.heads; ++h) {
      load_weight(simd, p.lambda_weight, h, 0, p.levels, lambda_weight + h * p.levels);
    }
    if (p.lambda_form == LLA_LAMBDA_BOUNDED) {
      simd.exp(lambda_weight, lambda_weight, levels);
      simd.scale(lambda_weight, lambda_weight, -1, levels);
    }
  }

  // raw <- raw gate + bias, step <- dt before its limits.
  void free_step(const Simd& simd, const Gates& p, int64_t b, int64_t row) const {
    load_row(simd, p.gate, b, row, p.heads, 1, raw);
    simd.add_scaled(raw, bias, 1, p.heads);
    simd.softplus(step, raw, p.heads);
  }
};

struct ForwardDriver {
  static constexpr Op kOp = Op::GatesForward;
  static constexpr const char* kNames[] = LLA_CPU_KERNEL_NAMES("cpu.gates.forward");

  static bool accepts(const void* problem) { return cpu::accepts(problem); }
  static void measure(const void* problem, const Limits&, Need* need) {
    Carver carver;
    Arrays().take(&carver, *static_cast<const Gates*>(problem));
    set_need(0, carver.bytes(), need);
  }
  static int32_t phases(const void*) { return 1; }
  static int64_t tasks(const void* problem, int32_t) {
    return ceil_div(live_numbers(static_cast<const Gates*>(problem)->batch), kForwardRows);
  }

  static void run_row(const Simd& simd, const Gates& p, const Arrays& a, int64_t b, int64_t row) {
    if (uses_step(p)) {
      a.free_step(simd, p, b, row);
      const float low = static_cast<float>(p.dt_min), high = static_cast<float>(p.dt_max);
      for (int64_t h = 0; h < p.heads; ++h) {
        if (a.step[h] < low) a.step[h] = low;
        if (a.step[h] > high) a.step[h] = high;
      }
    }
    if (p.gate_out.present()) {
      if (uses_step(p)) {
        simd.multiply(a.result, a.rate, a.step, p.heads);
      } else {
        load_row(simd, p.gate, b, row, p.heads, 1, a.result);
      }
      store_row(simd, p.gate_out, b, row, p.heads, 1, a.result);
    }
    if (p.write_out.present()) {
      if (p.write_form == LLA_WRITE_STEP) {
        store_row(simd, p.write_out, b, row, p.heads, 1, a.step);
      } else {
        load_row(simd, p.write, b, row, p.heads, 1, a.result);
        if (p.write_form == LLA_WRITE_SIGMOID || p.write_form == LLA_WRITE_TWO_SIGMOID) {
          simd.sigmoid(a.result, a.result, p.heads);
          if (p.write_form == LLA_WRITE_TWO_SIGMOID) simd.scale(a.result, a.result, 2, p.heads);
        }
        store_row(simd, p.write_out, b, row, p.heads, 1, a.result);
      }
    }
    if (p.lambda_out.present()) run_lambda(simd, p, a, b, row);
  }

  static void run_lambda(const Simd& simd, const Gates& p, const Arrays& a, int64_t b, int64_t row) {
    const int64_t n = p.heads * p.levels;
    load_row(simd, p.lambda, b, row, p.heads, p.levels, a.lambda);
    switch (p.lambda_form) {
      case LLA_LAMBDA_SOFTPLUS:
        simd.multiply(a.lambda, a.lambda, a.lambda_weight, n);
        simd.softplus(a.lambda, a.lambda, n);
        break;
      case LLA_LAMBDA_BOUNDED:
        simd.softplus(a.lambda, a.lambda, n);
        simd.multiply(a.lambda, a.lambda, a.lambda_weight, n);
        simd.exp(a.lambda, a.lambda, n);
        break;
      case LLA_LAMBDA_PRODUCT: simd.multiply(a.lambda, a.lambda, a.lambda_weight, n); break;
      default: break;
    }
    if (p.lambda_scale != 1) simd.scale(a.lambda, a.lambda, static_cast<float>(p.lambda_scale), n);
    store_row(simd, p.lambda_out, b, row, p.heads, p.levels, a.lambda);
  }

  static void run(const Simd& simd, const void* problem, const Limits&, const Scratch& scratch, int32_t, int64_t task) {
    const Gates& p = *static_cast<const Gates*>(problem);
    Carver carver(scratch.thread);
    Arrays a;
    a.take(&carver, p);
    a.load(simd, p);
    for_pieces(p.batch, task * kForwardRows, (task + 1) * kForwardRows, [&](const Piece& piece) {
      for (int64_t t = piece.first; t < piece.last; ++t) run_row(simd, p, a, piece.sequence->index, piece.row(t));
    });
  }
};

// Phase 0: gradients of the inputs, and per task the sums of the weights' gradients over its rows. Phase 1: the sums of
// these sums, in order of the rows.
struct BackwardDriver {
  static constexpr Op kOp = Op::GatesBackward;
  static constexpr const char* kNames[] = LLA_CPU_KERNEL_NAMES("cpu.gates.backward");

  struct Sums {
    float *dt_bias, *a_log, *lambda_weight;
    void take(Carver* carver, const Gates& p) {
      dt_bias = carver->take(p.heads);
      a_log = carver->take(p.heads);
      lambda_weight = carver->take(Size(p.heads) * Size(p.levels));
    }
    void clear(const Gates& p) const {
      fill(dt_bias, p.heads, 0);
      fill(a_log, p.heads, 0);
      fill(lambda_weight, p.heads * p.levels, 0);
    }
  };
  static Size sums_bytes(const Gates& p) {
    Carver carver;
    Sums().take(&carver, p);
    return Size(carver.bytes());
  }
  static bool wants_sums(const Gates& p) {
    return p.ddt_bias.present() || p.da_log.present() || p.dlambda_weight.present();
  }
  static Sums sums_of(const Gates& p, const Scratch& scratch, int64_t task) {
    Carver carver(scratch.shared + task * sums_bytes(p).value());
    Sums sums;
    sums.take(&carver, p);
    return sums;
  }

  static bool accepts(const void* problem) { return cpu::accepts(problem); }
  static void measure(const void* problem, const Limits& limits, Need* need) {
    const Gates& p = *static_cast<const Gates*>(problem);
    Carver carver;
    Arrays().take(&carver, p);
    const Size numbers = most_live_numbers(limits);
    const Size shared = Size(numbers.valid() ? ceil_div(numbers.value(), kBackwardRows) + 1 : -1) * sums_bytes(p);
    set_need(shared.valid() ? shared.value() : -1, carver.bytes(), need);
  }
  static int32_t phases(const void*) { return 2; }
  static int64_t tasks(const void* problem, int32_t phase) {
    const Gates& p = *static_cast<const Gates*>(problem);
    if (phase == 1) return wants_sums(p) ? 1 : 0;
    return ceil_div(live_numbers(p.batch), kBackwardRows);
  }

  // A result whose gradient is 0 sends back 0, whatever it is.
  static void reverse_gate(const Simd& simd, const Gates& p, const Arrays& a, const Sums& sums, int64_t b, int64_t row) {
    fill(a.dgate, p.heads, 0);
    if (p.dgate_out.present()) load_row(simd, p.dgate_out, b, row, p.heads, 1, a.dgate);
    if (uses_step(p)) {
      fill(a.dwrite, p.heads, 0);
      if (p.write_form == LLA_WRITE_STEP && p.dwrite_out.present()) {
        load_row(simd, p.dwrite_out, b, row, p.heads, 1, a.dwrite);
      }
      a.free_step(simd, p, b, row);
      simd.sigmoid(a.slope, a.raw, p.heads);
      const float low = static_cast<float>(p.dt_min), high = static_cast<float>(p.dt_max);
      for (int64_t h = 0; h < p.heads; ++h) {
        float step = a.step[h], slope = a.slope[h];
        if (step < low) step = low, slope = 0;
        if (step > high) step = high, slope = 0;
        const float dgate = a.dgate[h];
        if (dgate != 0) sums.a_log[h] += a.rate[h] * step * dgate;
        const float dstep = (dgate == 0 ? 0 : a.rate[h] * dgate) + a.dwrite[h];
        const float draw = dstep == 0 ? 0 : dstep * slope;
        sums.dt_bias[h] += draw;
        a.dgate[h] = draw;
      }
    }
    if (p.dgate.present()) store_row(simd, p.dgate, b, row, p.heads, 1, a.dgate);
  }

  static void reverse_write(const Simd& simd, const Gates& p, const Arrays& a, int64_t b, int64_t row) {
    fill(a.dwrite, p.heads, 0);
    if (p.dwrite_out.present()) load_row(simd, p.dwrite_out, b, row, p.heads, 1, a.dwrite);
    if (p.write_form == LLA_WRITE_SIGMOID || p.write_form == LLA_WRITE_TWO_SIGMOID) {
      const float factor = p.write_form == LLA_WRITE_TWO_SIGMOID ? 2 : 1;
      load_row(simd, p.write, b, row, p.heads, 1, a.raw);
      simd.sigmoid(a.slope, a.raw, p.heads);                  // s
      simd.scale(a.raw, a.raw, -1, p.heads);
      simd.sigmoid(a.raw, a.raw, p.heads);                    // 1 - s, without cancellation
      for (int64_t h = 0; h < p.heads; ++h) {
        a.dwrite[h] = a.dwrite[h] == 0 ? 0 : a.dwrite[h] * a.slope[h] * a.raw[h] * factor;
      }
    }
    store_row(simd, p.dwrite, b, row, p.heads, 1, a.dwrite);
  }

  static void reverse_lambda(const Simd& simd, const Gates& p, const Arrays& a, const Sums& sums, int64_t b, int64_t row) {
    const int64_t n = p.heads * p.levels;
    fill(a.dlambda, n, 0);
    if (p.dlambda_out.present()) {
      load_row(simd, p.dlambda_out, b, row, p.heads, p.levels, a.dlambda);
      if (p.lambda_scale != 1) simd.scale(a.dlambda, a.dlambda, static_cast<float>(p.lambda_scale), n);
      load_row(simd, p.lambda, b, row, p.heads, p.levels, a.raw_lambda);
      const float *raw = a.raw_lambda, *weight = a.lambda_weight;
      switch (p.lambda_form) {
        case LLA_LAMBDA_SOFTPLUS:
          simd.multiply(a.lambda_slope, raw, weight, n);
          simd.sigmoid(a.lambda_slope, a.lambda_slope, n);
          for (int64_t i = 0; i < n; ++i) {
            const float d = a.dlambda[i] * a.lambda_slope[i];
            if (a.dlambda[i] == 0) continue;
            sums.lambda_weight[i] += d * raw[i];
            a.dlambda[i] = d * weight[i];
          }
          break;
        case LLA_LAMBDA_BOUNDED:  // weight is -exp(P)
          simd.sigmoid(a.lambda_slope, raw, n);
          simd.softplus(a.raw_lambda, raw, n);
          simd.multiply(a.lambda, a.raw_lambda, weight, n);  // log of the value
          simd.multiply(a.raw_lambda, a.raw_lambda, weight, n);
          simd.exp(a.lambda, a.lambda, n);
          for (int64_t i = 0; i < n; ++i) {
            const float d = a.dlambda[i] * a.lambda[i];
            if (a.dlambda[i] == 0) continue;
            sums.lambda_weight[i] += d == 0 ? 0 : d * a.raw_lambda[i];
            a.dlambda[i] = d * weight[i] * a.lambda_slope[i];
          }
          break;
        case LLA_LAMBDA_PRODUCT:
          for (int64_t i = 0; i < n; ++i) {
            if (a.dlambda[i] == 0) continue;
            sums.lambda_weight[i] += a.dlambda[i] * raw[i];
            a.dlambda[i] *= weight[i];
          }
          break;
        default: break;
      }
    }
    if (p.dlambda.present()) store_row(simd, p.dlambda, b, row, p.heads, p.levels, a.dlambda);
  }

  static void run(const Simd& simd, const void* problem, const Limits&, const Scratch& scratch, int32_t phase,
                  int64_t task) {
    const Gates& p = *static_cast<const Gates*>(problem);
    if (phase == 1) return reduce(simd, p, scratch);
    Carver carver(scratch.thread);
    Arrays a;
    a.take(&carver, p);
    a.load(simd, p);
    const Sums sums = sums_of(p, scratch, task);
    sums.clear(p);
    const bool gate = p.dgate.present() || p.ddt_bias.present() || p.da_log.present();
    const bool lambda = p.dlambda.present() || p.dlambda_weight.present();
    for_pieces(p.batch, task * kBackwardRows, (task + 1) * kBackwardRows, [&](const Piece& piece) {
      for (int64_t t = piece.first; t < piece.last; ++t) {
        const int64_t b = piece.sequence->index, row = piece.row(t);
        if (gate) reverse_gate(simd, p, a, sums, b, row);
        if (p.dwrite.present()) reverse_write(simd, p, a, b, row);
        if (lambda) reverse_lambda(simd, p, a, sums, b, row);
      }
    });
  }

  static void reduce(const Simd& simd, const Gates& p, const Scratch& scratch) {
    const Sums total = sums_of(p, scratch, 0);
    const int64_t count = tasks(&p, 0);
    if (count == 0) total.clear(p);
    for (int64_t i = 1; i < count; ++i) {
      const Sums sums = sums_of(p, scratch, i);
      simd.add_scaled(total.dt_bias, sums.dt_bias, 1, p.heads);
      simd.add_scaled(total.a_log, sums.a_log, 1, p.heads);
      simd.add_scaled(total.lambda_weight, sums.lambda_weight, 1, p.heads * p.levels);
    }
    if (p.ddt_bias.present()) store_weight(simd, p.ddt_bias, 0, 0, p.heads, total.dt_bias);
    if (p.da_log.present()) store_weight(simd, p.da_log, 0, 0, p.heads, total.a_log);
    for (int64_t h = 0; p.dlambda_weight.present() && h < p.heads; ++h) {
      store_weight(simd, p.dlambda_weight, h, 0, p.levels, total.lambda_weight + h * p.levels);
    }
  }
};

}  // namespace

const Kernel* gates_kernels(int isa, int64_t* count) { return DriverTable<ForwardDriver, BackwardDriver>::of(isa, count); }

}  // namespace lla::cpu
