// SPDX-License-Identifier: Apache-2.0
// Gradients of the delta rule inside a piece (docs/mathematics.md). The gate's gradient is summed interval by interval, so that
// nothing is subtracted: g_u receives every pair (t, s) with s < u <= t once.
#include <algorithm>

#include "cpu/delta_rule_piece.h"

namespace lla::cpu {

namespace {

// dlambda[column] += sums of row [0, t] over the levels at which row t reads.
void sum_levels(const Simd& simd, const DeltaShape& shape, const float* row, int64_t t, float* dlambda) {
  for (int64_t level = 1; (int64_t{1} << (level - 1)) <= t; ++level) {
    const int64_t width = int64_t{1} << (level - 1);
    if (t & width) dlambda[shape.column(level)] += simd.sum(row + ((t >> level) << level), width);
  }
  dlambda[shape.column(0)] += row[t];
}

// Through the weights (R .* D .* λ): dr, dlambda, dgate and the weights themselves, which take the place of `decay`.
void weights_backward(const Simd& simd, const DeltaShape& shape, DeltaPiece* piece, DeltaPieceGradient* gradient) {
  const int64_t n = piece->n, m = piece->m, lo = piece->lo(), ld = piece->ld, dv = shape.value_dim;
  lower_dots(simd, m, lo, dv, gradient->dy, dv, piece->u, dv, gradient->dw, ld, false);
  float* column = gradient->column;  // of row u: sums over the rows t >= u of what they read from s
  std::fill(column, column + n, 0.0f);
  for (int64_t t = n - 1; t >= 0; --t) {
    if (t >= lo) {
      const int64_t i = t - lo;
      float *dr = gradient->dr + i * ld, *dw = gradient->dw + i * ld, *weight = piece->decay + i * ld;
      const float* r = piece->r + i * ld;
      simd.multiply(dr, dw, weight, t + 1);
      simd.multiply(dw, dr, r, t + 1);
      simd.multiply(weight, weight, r, t + 1);
      if (piece->lambda) {
        const float* lambda = piece->lambda + i * shape.levels;
        sum_levels(simd, shape, dw, t, gradient->dlambda + i * shape.levels);
        for (float* row : {dr, dw, weight}) weigh_levels(simd, shape, lambda, t, row);
      }
      std::fill(dr + t + 1, dr + n, 0.0f);
      std::fill(weight + t + 1, weight + n, 0.0f);
      simd.add_scaled(column, dw, 1, t);
    }
    gradient->dgate[t] += simd.sum(column, t);
  }
  lower_transposed_times(simd, m, lo, dv, piece->decay, ld, gradient->dy, dv, gradient->du, dv, true);
}

// Through the inverse: on entry dx holds the gradient of X (below the diagonal; what is above has no effect), on exit that
// of stril(w K K^T) times w; the gradient of w by that product is added to dwrite.
void inverse_backward(const Simd& simd, DeltaPiece* piece, DeltaPieceGradient* gradient) {
  const int64_t n = piece->n, ld = piece->ld;
  float* dx = gradient->dx;
  lower_transposed_times(simd, n, 0, n, piece->x, ld, dx, ld, piece->temporary, ld, false);
  lower_dots(simd, n, 0, n, piece->temporary, ld, piece->x, ld, dx, ld, false);
  for (int64_t t = 0; t < n; ++t) {
    float* row = dx + t * ld;
    gradient->dwrite[t] -= simd.dot(row, piece->gram + t * ld, t);
    simd.scale(row, row, -piece->write[t], t);
    row[t] = 0;
  }
}

}  // namespace

void carve_piece_gradient(const DeltaShape& shape, DeltaArena* arena, DeltaPieceGradient* gradient) {
  const int64_t c = shape.rows, dk = shape.key_dim;
  gradient->da = arena->floats(2 * c * dk);
  gradient->dkt = arena->floats(c * dk);
  gradient->du = arena->floats(c * shape.value_dim);
  gradient->dk = arena->floats(c * dk);
  gradient->dgate = arena->floats(c);
  gradient->dwrite = arena->floats(c);
  gradient->dlambda = arena->floats(c * shape.levels);
  for (float** matrix : {&gradient->dr, &gradient->dw, &gradient->dx}) *matrix = arena->floats(c * c);
  gradient->column = arena->floats(c);
}

void piece_backward(const Simd& simd, const DeltaShape& shape, bool folded, DeltaPiece* piece,
                    DeltaPieceGradient* gradient) {
  const int64_t n = piece->n, m = piece->m, lo = piece->lo(), ld = piece->ld, dk = shape.key_dim, dv = shape.value_dim;
  float *dr = gradient->dr, *dp = gradient->dw, *dx = gradient->dx;
  if (m > 0) {
    weights_backward(simd, shape, piece, gradient);
    // A = Q + R Kb
    lower_dots(simd, m, lo, dk, gradient->da, dk, piece->kb, dk, dr, ld, true);
    lower_transposed_times(simd, m, lo, dk, piece->r, ld, gradient->da, dk, gradient->dkb, dk, true);
    // R = P X
    lower_dots(simd, m, lo, n, dr, ld, piece->x, ld, dp, ld, false);
    lower_transposed_times(simd, m, lo, n, piece->p, ld, dr, ld, dx, ld, false);
  } else {
    for (int64_t t = 0; t < n; ++t) std::fill(dx + t * ld, dx + t * ld + n, 0.0f);
  }
  if (folded) lower_dots(simd, n, 0, dk, piece->k, dk, gradient->dkt, dk, dx, ld, true);  // Kt = X^T K
  inverse_backward(simd, piece, gradient);
  lower_times(simd, n, 0, dk, dx, ld, piece->k, dk, gradient->dk, dk, false);
  lower_transposed_times(simd, n, 0, dk, dx, ld, piece->k, dk, gradient->dk, dk, true);
  if (m > 0) {  // P = tril(Q K^T)
    lower_transposed_times(simd, m, lo, dk, dp, ld, piece->q, dk, gradient->dk, dk, true);
    lower_times(simd, m, lo, dk, dp, ld, piece->k, dk, gradient->da, dk, true);
  }
  if (folded) lower_times(simd, n, 0, dk, piece->x, ld, gradient->dkt, dk, gradient->dk, dk, true);
  for (int64_t t = 0; t < n; ++t) {
    const float write = piece->write[t];
    float* du = gradient->du + t * dv;
    simd.add_scaled(gradient->dk + t * dk, gradient->dkb + t * dk, -write, dk);
    gradient->dwrite[t] += simd.dot(du, piece->v + t * dv, dv) - simd.dot(gradient->dkb + t * dk, piece->k + t * dk, dk);
    simd.scale(du, du, write, dv);
  }
}

}  // namespace lla::cpu
