// SPDX-License-Identifier: Apache-2.0
// Skip connection, output gate and RMS norm, and their gradients (docs/mathematics.md).
#include "reference/common.h"
#include "reference/kernels.h"

namespace lla::reference {
namespace {

// One row: y = a * r * weight * after, where a is what enters the norm and r = 1 / its root mean square by group.
struct Row {
  double* u = nullptr;                                         // [width] x + D * skip
  double* gate = nullptr;                                      // [width] silu(z)
  double* weight = nullptr;                                    // [width]
  double* a = nullptr;                                         // [width] u * gate if the gate comes first, else u
  double* r = nullptr;                                         // [width] the same for all elements of a group
  double *du = nullptr, *dgate = nullptr, *dweight = nullptr;  // [width]

  void take(Carver* carver, const GatedNorm& p) {
    u = carver->take(p.width);
    gate = carver->take(p.width);
    weight = carver->take(p.width);
    a = carver->take(p.width);
    r = carver->take(p.width);
    du = carver->take(p.width);
    dgate = carver->take(p.width);
    dweight = carver->take(p.width);
  }
};

bool gate_first(const GatedNorm& p) { return p.form == LLA_NORM_GATE_FIRST; }
int64_t skip_index(const GatedNorm& p, int64_t e) { return p.skip_per_channel ? e : e / p.value_dim; }
int64_t weight_index(const GatedNorm& p, int64_t e) { return p.weight_per_group ? e % p.group : e; }
double skip_weight(const GatedNorm& p, int64_t e) { return p.d.present() ? load(p.d, 0, skip_index(p, e)) : 1; }
// Element e of a tensor [N, heads, value_dim].
double element(const View& view, const GatedNorm& p, int64_t b, int64_t row, int64_t e) {
  return load(view, b, row, e / p.value_dim, e % p.value_dim);
}

void forward_row(const GatedNorm& p, int64_t b, int64_t row, const Row& x) {
  const bool normed = p.form != LLA_NORM_NONE;
  for (int64_t e = 0; e < p.width; ++e) {
    x.u[e] = element(p.x, p, b, row, e);
    if (p.skip.present()) x.u[e] += skip_weight(p, e) * element(p.skip, p, b, row, e);
    x.gate[e] = p.z.present() ? silu(load(p.z, b, row, 0, e)) : 1;
    x.weight[e] = normed && p.weight.present() ? load(p.weight, 0, weight_index(p, e)) : 1;
    x.a[e] = gate_first(p) ? x.u[e] * x.gate[e] : x.u[e];
    x.r[e] = 1;
  }
  for (int64_t begin = 0; normed && begin < p.width; begin += p.group) {
    const double squares = dot(x.a + begin, x.a + begin, p.group);
    fill(x.r + begin, p.group, 1 / std::sqrt(squares / static_cast<double>(p.group) + p.epsilon));
  }
}

// Gradients of u, gate and weight; forward_row() comes first.
void reverse_row(const GatedNorm& p, int64_t b, int64_t row, const Row& x) {
  const bool normed = p.form != LLA_NORM_NONE;
  const int64_t group = normed ? p.group : p.width;
  for (int64_t begin = 0; begin < p.width; begin += group) {
    double along = 0;  // of the gradient and a
    for (int64_t e = begin; e < begin + group; ++e) {
      const double after = gate_first(p) ? 1 : x.gate[e], dy = element(p.dy, p, b, row, e);
      x.dweight[e] = dy * after * x.a[e] * x.r[e];
      x.dgate[e] = dy * x.weight[e] * x.a[e] * x.r[e];
      x.du[e] = dy * x.weight[e] * after;
      along += x.du[e] * x.a[e];
    }
    for (int64_t e = begin; e < begin + group; ++e) {
      const double r = x.r[e];
      double da = r * x.du[e];
      if (normed) da -= r * r * r * along / static_cast<double>(group) * x.a[e];
      x.du[e] = gate_first(p) ? da * x.gate[e] : da;
      if (gate_first(p)) x.dgate[e] = da * x.u[e];
    }
  }
}

}  // namespace

void GatedNormForwardKernel::measure(const void* problem, const Limits&, Need* need) {
  Carver carver;
  Row().take(&carver, *static_cast<const GatedNorm*>(problem));
  *need = need_per_thread(carver.bytes());
}

int64_t GatedNormForwardKernel::tasks(const void* problem, int32_t) {
  return row_blocks(static_cast<const GatedNorm*>(problem)->batch);
}

void GatedNormForwardKernel::run(const void* problem, const Limits&, const Scratch& scratch, int32_t, int64_t task) {
  const GatedNorm& p = *static_cast<const GatedNorm*>(problem);
  Carver carver(scratch.thread);
  Row x;
  x.take(&carver, p);
  const RowBlock block = row_block(p.batch, task);
  for (int64_t row = block.begin; row < block.end; ++row) {
    const int64_t b = block.sequence->index;
    forward_row(p, b, row, x);
    for (int64_t e = 0; e < p.width; ++e) {
      const double after = gate_first(p) ? 1 : x.gate[e];
      store(p.y, b, row, e / p.value_dim, e % p.value_dim, x.a[e] * x.r[e] * x.weight[e] * after);
    }
  }
}

void GatedNormBackwardKernel::measure(const void* problem, const Limits&, Need* need) {
  const GatedNorm& p = *static_cast<const GatedNorm*>(problem);
  Carver carver;
  Row().take(&carver, p);
  carver.take(p.width);
  carver.take(p.width);
  *need = need_per_thread(carver.bytes());
}

// Phase 0: gradients of the inputs, by rows. Phase 1: gradients of the weights, sums over all live rows in order.
int64_t GatedNormBackwardKernel::tasks(const void* problem, int32_t phase) {
  const GatedNorm& p = *static_cast<const GatedNorm*>(problem);
  if (phase == 0) return p.dx.present() || p.dskip.present() || p.dz.present() ? row_blocks(p.batch) : 0;
  return p.dd.present() || p.dweight.present() ? 1 : 0;
}

void GatedNormBackwardKernel::run(const void* problem, const Limits&, const Scratch& scratch, int32_t phase, int64_t task) {
  const GatedNorm& p = *static_cast<const GatedNorm*>(problem);
  Carver carver(scratch.thread);
  Row x;
  x.take(&carver, p);
  if (phase == 0) {
    const RowBlock block = row_block(p.batch, task);
    for (int64_t row = block.begin; row < block.end; ++row) {
      const int64_t b = block.sequence->index;
      forward_row(p, b, row, x);
      reverse_row(p, b, row, x);
      for (int64_t e = 0; e < p.width; ++e) {
        const int64_t h = e / p.value_dim, i = e % p.value_dim;
        if (p.dx.present()) store(p.dx, b, row, h, i, x.du[e]);
        if (p.dskip.present()) store(p.dskip, b, row, h, i, skip_weight(p, e) * x.du[e]);
        if (p.dz.present()) store(p.dz, b, row, 0, e, x.dgate[e] * silu_slope(load(p.z, b, row, 0, e)));
      }
    }
    return;
  }
  double* dweight = carver.take(p.width);
  double* dd = carver.take(p.width);
  fill(dweight, p.width, 0);
  fill(dd, p.width, 0);
  for (int64_t s = 0; s < p.batch.count; ++s) {
    const Sequence& sequence = p.batch.sequences[s];
    for (int64_t t = 0; !sequence.padding && t < sequence.rows; ++t) {
      const int64_t b = sequence.index, row = sequence.row_begin + t;
      forward_row(p, b, row, x);
      reverse_row(p, b, row, x);
      for (int64_t e = 0; e < p.width; ++e) {
        dweight[weight_index(p, e)] += x.dweight[e];
        if (p.skip.present()) dd[skip_index(p, e)] += x.du[e] * element(p.skip, p, b, row, e);
      }
    }
  }
  const int64_t weights = p.weight_per_group ? p.group : p.width, skips = p.skip_per_channel ? p.width : p.heads;
  for (int64_t i = 0; p.dweight.present() && i < weights; ++i) store(p.dweight, 0, i, dweight[i]);
  for (int64_t i = 0; p.dd.present() && i < skips; ++i) store(p.dd, 0, i, dd[i]);
}

}  // namespace lla::reference
