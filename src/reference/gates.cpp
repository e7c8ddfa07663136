// SPDX-License-Identifier: Apache-2.0
// Log gate, write strength and λ from their raw projections, and the gradients (docs/mathematics.md).
#include "reference/common.h"
#include "reference/kernels.h"

namespace lla::reference {
namespace {

// The step dt of one row and head, and how it depends on the raw gate.
struct Step {
  double dt = 0, slope = 0;  // slope: of dt over raw gate or bias; 0 where a limit holds
};

Step step(const Gates& p, int64_t b, int64_t row, int64_t h) {
  const double raw = load(p.gate, b, row, h) + (p.dt_bias.present() ? load(p.dt_bias, 0, h) : 0);
  const double free = softplus(raw);
  if (free < p.dt_min) return {p.dt_min, 0};
  if (free > p.dt_max) return {p.dt_max, 0};
  return {free, sigmoid(raw)};
}

double decay_rate(const Gates& p, int64_t h) { return p.a_log.present() ? std::exp(load(p.a_log, 0, h)) : 1; }

double write_strength(const Gates& p, int64_t b, int64_t row, int64_t h) {
  switch (p.write_form) {
    case LLA_WRITE_SIGMOID:
      return sigmoid(load(p.write, b, row, h));
    case LLA_WRITE_TWO_SIGMOID:
      return 2 * sigmoid(load(p.write, b, row, h));
    case LLA_WRITE_STEP:
      return step(p, b, row, h).dt;
    default:
      return load(p.write, b, row, h);
  }
}

double level_weight(const Gates& p, int64_t b, int64_t row, int64_t h, int64_t l) {
  const double raw = load(p.lambda, b, row, h, l);
  switch (p.lambda_form) {
    case LLA_LAMBDA_SOFTPLUS:
      return p.lambda_scale * softplus(load(p.lambda_weight, h, l) * raw);
    case LLA_LAMBDA_BOUNDED:
      return p.lambda_scale * std::exp(-std::exp(load(p.lambda_weight, h, l)) * softplus(raw));
    case LLA_LAMBDA_PRODUCT:
      return p.lambda_scale * load(p.lambda_weight, h, l) * raw;
    default:
      return p.lambda_scale * raw;
  }
}

struct Sums {
  double dt_bias = 0, a_log = 0;
  double* lambda_weight = nullptr;  // [levels]
};

// A result whose gradient is 0 sends back 0, whatever it is: columns of dead levels may hold anything.
void reverse_gate(const Gates& p, int64_t b, int64_t row, int64_t h, Sums* sums) {
  const double dgate = p.dgate_out.present() ? load(p.dgate_out, b, row, h) : 0;
  double draw = 0;
  if (p.gate_form == LLA_GATE_LOG) {
    draw = dgate;
  } else {
    const Step s = step(p, b, row, h);
    double ddt = dgate == 0 ? 0 : -decay_rate(p, h) * dgate;
    if (p.write_form == LLA_WRITE_STEP && p.dwrite_out.present()) ddt += load(p.dwrite_out, b, row, h);
    draw = ddt == 0 ? 0 : ddt * s.slope;
    if (dgate != 0) sums->a_log += -decay_rate(p, h) * s.dt * dgate;
    sums->dt_bias += draw;
  }
  if (p.dgate.present()) store(p.dgate, b, row, h, 0, draw);
}

void reverse_write(const Gates& p, int64_t b, int64_t row, int64_t h) {
  const double dwrite = p.dwrite_out.present() ? load(p.dwrite_out, b, row, h) : 0;
  double draw = dwrite;
  if (dwrite != 0 && (p.write_form == LLA_WRITE_SIGMOID || p.write_form == LLA_WRITE_TWO_SIGMOID)) {
    const double s = sigmoid(load(p.write, b, row, h));
    draw = dwrite * s * (1 - s) * (p.write_form == LLA_WRITE_TWO_SIGMOID ? 2 : 1);
  }
  store(p.dwrite, b, row, h, 0, draw);
}

void reverse_lambda(const Gates& p, int64_t b, int64_t row, int64_t h, Sums* sums) {
  for (int64_t l = 0; l < p.levels; ++l) {
    const double dlambda = p.dlambda_out.present() ? p.lambda_scale * load(p.dlambda_out, b, row, h, l) : 0;
    double draw = 0, dweight = 0;
    if (dlambda != 0) {
      const double raw = load(p.lambda, b, row, h, l);
      const double weight = p.lambda_weight.present() ? load(p.lambda_weight, h, l) : 1;
      switch (p.lambda_form) {
        case LLA_LAMBDA_SOFTPLUS: {
          const double slope = sigmoid(weight * raw);
          draw = dlambda * slope * weight;
          dweight = dlambda * slope * raw;
          break;
        }
        case LLA_LAMBDA_BOUNDED: {
          const double rate = std::exp(weight), value = std::exp(-rate * softplus(raw));
          draw = -dlambda * value * rate * sigmoid(raw);
          dweight = -dlambda * value * rate * softplus(raw);
          break;
        }
        case LLA_LAMBDA_PRODUCT:
          draw = dlambda * weight;
          dweight = dlambda * raw;
          break;
        default:
          draw = dlambda;
      }
    }
    if (p.dlambda.present()) store(p.dlambda, b, row, h, l, draw);
    sums->lambda_weight[l] += dweight;
  }
}

}  // namespace

int64_t GatesForwardKernel::tasks(const void* problem, int32_t) {
  return row_blocks(static_cast<const Gates*>(problem)->batch);
}

void GatesForwardKernel::run(const void* problem, const Limits&, const Scratch&, int32_t, int64_t task) {
  const Gates& p = *static_cast<const Gates*>(problem);
  const RowBlock block = row_block(p.batch, task);
  for (int64_t row = block.begin; row < block.end; ++row) {
    const int64_t b = block.sequence->index;
    for (int64_t h = 0; h < p.heads; ++h) {
      if (p.gate_out.present()) {
        const bool ready = p.gate_form == LLA_GATE_LOG;
        store(p.gate_out, b, row, h, 0, ready ? load(p.gate, b, row, h) : -decay_rate(p, h) * step(p, b, row, h).dt);
      }
      if (p.write_out.present()) store(p.write_out, b, row, h, 0, write_strength(p, b, row, h));
      for (int64_t l = 0; p.lambda_out.present() && l < p.levels; ++l) {
        store(p.lambda_out, b, row, h, l, level_weight(p, b, row, h, l));
      }
    }
  }
}

void GatesBackwardKernel::measure(const void* problem, const Limits&, Need* need) {
  Carver carver;
  carver.take(static_cast<const Gates*>(problem)->levels);
  *need = need_per_thread(carver.bytes());
}

int64_t GatesBackwardKernel::tasks(const void* problem, int32_t) { return static_cast<const Gates*>(problem)->heads; }

// One head, all live rows in order.
void GatesBackwardKernel::run(const void* problem, const Limits&, const Scratch& scratch, int32_t, int64_t h) {
  const Gates& p = *static_cast<const Gates*>(problem);
  Carver carver(scratch.thread);
  Sums sums;
  sums.lambda_weight = carver.take(p.levels);
  fill(sums.lambda_weight, p.levels, 0);
  const bool gate = p.dgate.present() || p.ddt_bias.present() || p.da_log.present();
  const bool lambda = p.dlambda.present() || p.dlambda_weight.present();
  for (int64_t s = 0; s < p.batch.count; ++s) {
    const Sequence& sequence = p.batch.sequences[s];
    for (int64_t t = 0; !sequence.padding && t < sequence.rows; ++t) {
      const int64_t b = sequence.index, row = sequence.row_begin + t;
      if (gate) reverse_gate(p, b, row, h, &sums);
      if (p.dwrite.present()) reverse_write(p, b, row, h);
      if (lambda) reverse_lambda(p, b, row, h, &sums);
    }
  }
  if (p.ddt_bias.present()) store(p.ddt_bias, 0, h, sums.dt_bias);
  if (p.da_log.present()) store(p.da_log, 0, h, sums.a_log);
  for (int64_t l = 0; p.dlambda_weight.present() && l < p.levels; ++l) store(p.dlambda_weight, h, l, sums.lambda_weight[l]);
}

}  // namespace lla::reference
