// SPDX-License-Identifier: Apache-2.0
// Gradients of the delta rule inside a piece (docs/mathematics.md). The gate's gradient is summed interval by interval, so
// that nothing is subtracted: g_u receives every pair (t, s) with s < u <= t once.
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

// Products of two lower triangular matrices: rows i of [0, m) stand at lo + i.
// c = tril(A B^T), b [lo + m][lo + m].
void lower_dots_of_lower(const Simd& simd, int64_t m, int64_t lo, const float* a, const float* b, float* c, int64_t ld) {
  const int64_t block = simd.rows_of_tile;
  for (int64_t i = 0; i < m; i += block) {
    const int64_t rows = std::min(block, m - i), columns = lo + i + rows;
    simd.dot_product(rows, columns, columns, a + i * ld, ld, b, ld, c + i * ld, ld, false);
    for (int64_t t = i; t < i + rows; ++t) std::fill(c + t * ld + lo + t + 1, c + t * ld + lo + m, 0.0f);
  }
}
// The lower triangle of A^T B; what stands above it is not set.
void lower_of_transposed_times(const Simd& simd, int64_t m, int64_t lo, const float* a, const float* b, float* c,
                               int64_t ld) {
  const int64_t block = simd.rows_of_tile;
  for (int64_t s = 0; s < lo + m; s += block) {
    const int64_t rows = std::min(block, lo + m - s), first = std::max<int64_t>(0, s - lo);
    simd.outer_product(rows, s + rows, m - first, a + first * ld + s, 1, ld, b + first * ld, ld, c + s * ld, ld, false);
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
  for (float** matrix : {&gradient->dr, &gradient->dw, &gradient->dm}) *matrix = arena->floats(c * c);
  gradient->column = arena->floats(c);
}

void piece_backward(const Simd& simd, const DeltaShape& shape, bool folded, DeltaPiece* piece,
                    DeltaPieceGradient* gradient) {
  const int64_t n = piece->n, m = piece->m, lo = piece->lo(), ld = piece->ld, dk = shape.key_dim, dv = shape.value_dim;
  float *dr = gradient->dr, *dp = gradient->dw, *dm = gradient->dm;
  if (m > 0) {
    weights_backward(simd, shape, piece, gradient);
    // A = Q + R Kb
    lower_dots(simd, m, lo, dk, gradient->da, dk, piece->kb, dk, dr, ld, true);
    // R = P X
    lower_dots_of_lower(simd, m, lo, dr, piece->x, dp, ld);
  }
  // The gradient of M = stril(Kb K^T), with X = (I - M)^-1, is X^T dX X^T. R = P X has its share of dX, P^T dR, so that of
  // dM is R^T dP; that of Kt = X^T K is K dKt^T, and Kt (X dKt)^T.
  if (folded) {
    lower_times(simd, n, 0, dk, piece->x, ld, gradient->dkt, dk, gradient->dk, dk, false);
  } else {
    std::fill(gradient->dk, gradient->dk + n * dk, 0.0f);
  }
  if (m > 0) lower_of_transposed_times(simd, m, lo, piece->r, dp, dm, ld);
  if (folded) lower_dots(simd, n, 0, dk, piece->kt, dk, gradient->dk, dk, dm, ld, m > 0);
  for (int64_t t = 0; t < n; ++t) std::fill(dm + t * ld + (m > 0 || folded ? t : 0), dm + t * ld + n, 0.0f);
  // Both of A = Q + R Kb and M = stril(Kb K^T), both of M and P = tril(Q K^T).
  for (int64_t s = 0; s < n; s += simd.rows_of_tile) {
    const int64_t rows = std::min(simd.rows_of_tile, n - s), first = std::max<int64_t>(0, s - lo), queries = m - first;
    const OuterProduct of_r = {queries, piece->r + first * ld + s, 1, ld, gradient->da + first * dk, dk};
    const OuterProduct of_m = {s + rows, dm + s * ld, ld, 1, piece->k, dk};
    float* dkb = gradient->dkb + s * dk;
    simd.outer_products(rows, dk, of_r, of_m, dkb, dk, dkb, 1, nullptr);
  }
  for (int64_t s = 0; s < n; s += simd.rows_of_tile) {
    const int64_t rows = std::min(simd.rows_of_tile, n - s), first = std::max<int64_t>(0, s - lo), queries = m - first;
    const OuterProduct of_m = {n - s, dm + s * ld + s, 1, ld, piece->kb + s * dk, dk};
    const OuterProduct of_p = {queries, dp + first * ld + s, 1, ld, piece->q + first * dk, dk};
    float* dk_rows = gradient->dk + s * dk;
    simd.outer_products(rows, dk, of_m, of_p, dk_rows, dk, dk_rows, 1, nullptr);
  }
  if (m > 0) lower_times(simd, m, lo, dk, dp, ld, piece->k, dk, gradient->da, dk, true);
  for (int64_t t = 0; t < n; ++t) {
    const float write = piece->write[t];
    const float* du = gradient->du + t * dv;
    simd.add_scaled(gradient->dk + t * dk, gradient->dkb + t * dk, -write, dk);
    gradient->dwrite[t] += simd.dot(du, piece->v + t * dv, dv) - simd.dot(gradient->dkb + t * dk, piece->k + t * dk, dk);
  }
}

}  // namespace lla::cpu
