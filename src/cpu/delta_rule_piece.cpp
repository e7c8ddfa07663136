// SPDX-License-Identifier: Apache-2.0
// Forward mathematics of the delta rule inside a piece: triangular products, the inverse, decays, weights of levels.
#include "cpu/delta_rule_piece.h"

#include <algorithm>

#include "core/fenwick.h"

namespace lla::cpu {

namespace {

constexpr int64_t kBlock = 16;  // rows of a block that is inverted alone

// Rows of a piece. Longer pieces read nodes of fewer levels, shorter ones have smaller triangles; measured.
int64_t piece_rows(const MixerShape& shape) { return std::min<int64_t>(shape.grain, shape.levels == 0 ? 32 : 64); }

// Inverse of one diagonal block of at most kBlock rows, in place. Whole rows of a copy keep the inner loop free of ends.
void invert_block(int64_t n, float* x, int64_t ld) {
  float inverse[kBlock][kBlock] = {};
  for (int64_t t = 0; t < n; ++t) {
    float row[kBlock] = {};
    for (int64_t s = 0; s < t; ++s) {
      const float coefficient = x[t * ld + s];
      for (int64_t j = 0; j < kBlock; ++j) row[j] += coefficient * inverse[s][j];
    }
    row[t] = 1;
    std::copy(row, row + kBlock, inverse[t]);
  }
  for (int64_t t = 0; t < n; ++t) std::copy(inverse[t], inverse[t] + n, x + t * ld);
}

// Decays: each is the exponential of the sum of g over its own interval, a running sum from its source on.
void set_decays(const Simd& simd, bool fold, DeltaPiece* piece) {
  const int64_t n = piece->n, lo = piece->lo();
  float* run = piece->to_end;  // sums of g over (s, t]
  float start = 0;             // over [0, t]
  for (int64_t t = 0; t < n; ++t) {
    const float g = piece->gate[t];
    for (int64_t s = 0; s < t; ++s) run[s] += g;
    run[t] = 0;
    start += g;
    if (t >= lo) {
      simd.exp(piece->decay + (t - lo) * piece->ld, run, t + 1);
      piece->into[t - lo] = start;
    }
  }
  if (piece->m > 0) simd.exp(piece->into, piece->into, piece->m);
  if (fold) {
    simd.exp(piece->to_end, run, n);
    simd.exp(&piece->gamma, &start, 1);
  }
}

}  // namespace

DeltaShape::DeltaShape(const MixerShape& shape)
    : key_dim(shape.key_dim),
      value_dim(shape.value_dim),
      levels(shape.levels),
      rows(piece_rows(shape)),
      per_chunk(shape.grain / rows),
      log2_rows(log2_of(rows)),
      log2_per_chunk(log2_of(per_chunk)),
      separate(0),
      absorb(shape.absorb) {
  if (levels > 0) {
    separate =
        absorb ? static_cast<int>(std::clamp<int64_t>(levels - 2 - log2_rows, 0, kDeltaAbsorbed - 1)) : kDeltaAbsorbed - 1;
  }
}

void carve_piece(const DeltaShape& shape, DeltaArena* arena, DeltaPiece* piece) {
  const int64_t c = shape.rows, dk = shape.key_dim;
  piece->ld = c;
  for (float** matrix : {&piece->x, &piece->p, &piece->r, &piece->decay}) *matrix = arena->floats(c * c);
  piece->into = arena->floats(c);
  piece->to_end = arena->floats(c);
  piece->operands = arena->floats(2 * c * dk);
  piece->kt = arena->floats(c * dk);
  piece->u = arena->floats(c * shape.value_dim);
  piece->temporary = arena->floats(2 * c * c);
}

void lower_dots(const Simd& simd, int64_t m, int64_t lo, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                float* c, int64_t ldc, bool accumulate) {
  const int64_t block = simd.rows_of_tile;
  for (int64_t i = 0; i < m; i += block) {
    const int64_t rows = std::min(block, m - i), columns = std::min((lo + i + rows + 3) & ~int64_t{3}, lo + m);
    simd.dot_product(rows, columns, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, accumulate);
    for (int64_t t = i; t < i + rows; ++t) std::fill(c + t * ldc + lo + t + 1, c + t * ldc + lo + m, 0.0f);
  }
}

void lower_times(const Simd& simd, int64_t m, int64_t lo, int64_t n, const float* a, int64_t lda, const float* b,
                 int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  const int64_t block = simd.rows_of_tile;
  for (int64_t i = 0; i < m; i += block) {
    const int64_t rows = std::min(block, m - i);
    simd.outer_product(rows, n, lo + i + rows, a + i * lda, lda, 1, b, ldb, c + i * ldc, ldc, accumulate);
  }
}

void lower_transposed_times(const Simd& simd, int64_t m, int64_t lo, int64_t n, const float* a, int64_t lda, const float* b,
                            int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  const int64_t block = simd.rows_of_tile;
  for (int64_t s = 0; s < lo + m; s += block) {
    const int64_t rows = std::min(block, lo + m - s), first = std::max<int64_t>(0, s - lo);
    simd.outer_product(rows, n, m - first, a + first * lda + s, 1, lda, b + first * ldb, ldb, c + s * ldc, ldc, accumulate);
  }
}

void invert_unit_lower(const Simd& simd, int64_t n, float* x, int64_t ld, float* temporary) {
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t rows = std::min(kBlock, n - at);
    invert_block(rows, x + at * ld + at, ld);
    for (int64_t t = at; t < at + rows; ++t) std::fill(x + t * ld + at + rows, x + t * ld + n, 0.0f);
  }
  // Joins two neighbouring inverses: the block below the diagonal is X22 M21 X11.
  for (int64_t size = kBlock; size < n; size *= 2) {
    for (int64_t at = 0; at + size < n; at += 2 * size) {
      const int64_t below = at + size, rows = std::min(size, n - below);
      float* corner = x + below * ld + at;
      simd.outer_product(rows, size, size, corner, ld, 1, x + at * ld + at, ld, temporary, size, false);
      lower_times(simd, rows, 0, size, x + below * ld + below, ld, temporary, size, corner, ld, false);
    }
  }
}

void prepare_rows(const Simd& simd, const DeltaShape& shape, bool fold, DeltaPiece* piece) {
  const int64_t n = piece->n, dk = shape.key_dim, dv = shape.value_dim;
  set_decays(simd, fold, piece);
  piece->a = piece->operands;
  piece->kb = piece->a + piece->m * dk;
  for (int64_t t = 0; t < n; ++t) {
    simd.scale(piece->kb + t * dk, piece->k + t * dk, -piece->write[t], dk);
    simd.scale(piece->u + t * dv, piece->v + t * dv, piece->write[t], dv);
  }
}

void prepare_replay(const Simd& simd, const DeltaShape& shape, bool writes, DeltaPiece* piece) {
  const int64_t dv = shape.value_dim;
  if (writes) {
    set_decays(simd, true, piece);
    for (int64_t t = 0; t < piece->n; ++t) simd.scale(piece->u + t * dv, piece->v + t * dv, piece->write[t], dv);
    return;
  }
  float sum = 0;
  for (int64_t t = 0; t < piece->n; ++t) sum += piece->gate[t];
  simd.exp(&piece->gamma, &sum, 1);
}

void solve_piece(const Simd& simd, const DeltaShape& shape, DeltaPiece* piece) {
  const int64_t n = piece->n, m = piece->m, lo = piece->lo(), ld = piece->ld, dk = shape.key_dim;
  lower_dots(simd, n, 0, dk, piece->kb, dk, piece->k, dk, piece->x, ld, false);
  invert_unit_lower(simd, n, piece->x, ld, piece->temporary);
  if (m == 0) return;
  lower_dots(simd, m, lo, dk, piece->q, dk, piece->k, dk, piece->p, ld, false);
  for (int64_t i = 0; i < m; i += simd.rows_of_tile) {  // both factors are lower triangular
    const int64_t rows = std::min(simd.rows_of_tile, m - i), depth = lo + i + rows;
    simd.outer_product(rows, depth, depth, piece->p + i * ld, ld, 1, piece->x, ld, piece->r + i * ld, ld, false);
    for (int64_t t = i; t < i + rows; ++t) std::fill(piece->r + t * ld + depth, piece->r + t * ld + n, 0.0f);
  }
}

void finish_queries(const Simd& simd, const DeltaShape& shape, DeltaPiece* piece) {
  const int64_t m = piece->m, dk = shape.key_dim;
  for (int64_t i = 0; i < m; i += simd.rows_of_tile) {
    const int64_t rows = std::min(simd.rows_of_tile, m - i);
    simd.outer_product_onto(rows, dk, piece->lo() + i + rows, piece->r + i * piece->ld, piece->ld, 1, piece->kb, dk,
                            piece->a + i * dk, dk, piece->q + i * dk, 1);
  }
}

void finish_keys(const Simd& simd, const DeltaShape& shape, DeltaPiece* piece) {
  const int64_t dk = shape.key_dim;
  lower_transposed_times(simd, piece->n, 0, dk, piece->x, piece->ld, piece->k, dk, piece->kt, dk, false);
}

void weigh_levels(const Simd& simd, const DeltaShape& shape, const float* lambda, int64_t t, float* row) {
  for (int64_t level = 1; (int64_t{1} << (level - 1)) <= t; ++level) {
    const int64_t width = int64_t{1} << (level - 1);
    if ((t & width) == 0) continue;
    float* run = row + ((t >> level) << level);
    const float weight = lambda[shape.column(level)];
    if (width >= 8) {
      simd.scale(run, run, weight, width);
    } else {
      for (int64_t s = 0; s < width; ++s) run[s] *= weight;
    }
  }
  row[t] *= lambda[shape.column(0)];
}

void read_inside_piece(const Simd& simd, const DeltaShape& shape, DeltaPiece* piece, float* y) {
  const int64_t m = piece->m, lo = piece->lo(), ld = piece->ld, dv = shape.value_dim;
  for (int64_t i = 0; i < m; ++i) {
    float* weight = piece->decay + i * ld;
    const int64_t t = lo + i;
    simd.multiply(weight, weight, piece->r + i * ld, t + 1);
    if (piece->lambda) weigh_levels(simd, shape, piece->lambda + i * shape.levels, t, weight);
    std::fill(weight + t + 1, weight + piece->n, 0.0f);
  }
  lower_times(simd, m, lo, dv, piece->decay, ld, piece->u, dv, y, dv, false);
}

}  // namespace lla::cpu
