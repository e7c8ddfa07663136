// SPDX-License-Identifier: Apache-2.0
// Mathematics of the delta rule inside a piece: a run of rows of one chunk that is processed with one triangular inverse.
//
// Long chunks are cut into pieces, whose nodes are chunk nodes of a finer grain (docs/mathematics.md, "Kt" form):
//   Kb = -w K,  X = (I - stril(Kb K^T))^-1,  R = tril(Q K^T) X,  Kt = X^T K,  U = w V,  A = Q + R Kb.
#pragma once

#include <cstdint>

#include "core/checked.h"
#include "cpu/simd.h"
#include "plugin/problem.h"

namespace lla::cpu {

// Carves float arrays from scratch memory; with a null base it only counts.
class DeltaArena {
 public:
  explicit DeltaArena(char* base) : base_(base) {}
  float* floats(Size count) {
    const Size at = bytes_;
    bytes_ += (count * 4).aligned(kAlignment);
    return base_ ? reinterpret_cast<float*>(base_ + at.value()) : nullptr;
  }
  int64_t bytes() const { return bytes_.valid() ? bytes_.value() : -1; }

 private:
  char* base_;
  Size bytes_;
};

// How a mixer's chunks are cut into pieces. A piece's node "entry" e < separate is the bucket of 2^e pieces.
constexpr int kDeltaEntries = 64;
constexpr int kDeltaAbsorbed = 63;  // the entry that everything from `separate` on is summed in
struct DeltaShape {
  explicit DeltaShape(const MixerShape& shape);
  int64_t key_dim, value_dim, levels;
  int64_t rows;       // of a piece
  int64_t per_chunk;  // pieces of a chunk, a power of two
  int log2_rows, log2_per_chunk;
  int separate;
  bool absorb;

  bool has_absorbed() const { return separate < kDeltaAbsorbed - 1; }
  int64_t node_size() const { return key_dim * value_dim; }
  int64_t column(int64_t level) const { return absorb && level > levels - 1 ? levels - 1 : level; }
  // λ column with which rows read an entry; -1: linear, weight 1.
  int64_t column_of_entry(int entry) const {
    if (levels == 0) return -1;
    return entry == kDeltaAbsorbed ? levels - 1 : column(entry + log2_rows + 1);
  }
};

// One piece of one head: rows [0, n), the last m of which are queries (m may be 0).
struct DeltaPiece {
  int64_t n = 0, m = 0;
  // Rows, borrowed: q [m][dk] (scaled), k [n][dk], v [n][dv], gate [n], write [n], lambda [m][L] (null: linear).
  const float *q = nullptr, *k = nullptr, *v = nullptr, *gate = nullptr, *write = nullptr, *lambda = nullptr;

  int64_t ld = 0;              // row distance of the triangular matrices
  float* x = nullptr;          // [n] X
  float* p = nullptr;          // [m] tril(Q K^T)
  float* r = nullptr;          // [m] R
  float* decay = nullptr;      // [m] D: decay from row s to row t, s <= t; not set above the diagonal
  float* into = nullptr;       // [m] decay from the piece's start into row t
  float* to_end = nullptr;     // [n] decay from row s to the piece's end
  float gamma = 1;             // decay over the piece
  float* a = nullptr;          // [m][dk] A, in `operands`, directly followed by
  float* kb = nullptr;         // [n][dk] Kb
  float* kt = nullptr;         // [n][dk] Kt
  float* u = nullptr;          // [n][dv] U
  float* operands = nullptr;   // [2 ld][dk]
  float* temporary = nullptr;  // [2 ld][ld]

  int64_t lo() const { return n - m; }
};

// Sets the arrays that the functions below fill. Rows and counts are set for each piece by the caller.
void carve_piece(const DeltaShape& shape, DeltaArena* arena, DeltaPiece* piece);
// In this order: decays (`fold`: also those to the piece's end), Kb and U; X and R; what the queries need, A; and what the
// nodes need at the piece's end, Kt.
void prepare_rows(const Simd& simd, const DeltaShape& shape, bool fold, DeltaPiece* piece);
void solve_piece(const Simd& simd, const DeltaShape& shape, DeltaPiece* piece);
// What replay_nodes needs beside X and Kt: gamma and, with `writes`, U and the decays to the piece's end.
void prepare_replay(const Simd& simd, const DeltaShape& shape, bool writes, DeltaPiece* piece);
// Without queries from here on.
inline void forget_queries(DeltaPiece* piece) {
  piece->a = piece->kb;
  piece->m = 0;
}
void finish_queries(const Simd& simd, const DeltaShape& shape, DeltaPiece* piece);
void finish_keys(const Simd& simd, const DeltaShape& shape, DeltaPiece* piece);
// y [m][dv] = (R .* D .* λ) U. Overwrites `decay` with the weights.
void read_inside_piece(const Simd& simd, const DeltaShape& shape, DeltaPiece* piece, float* y);

// row[s] *= λ of the level at which row t reads row s, s <= t.
void weigh_levels(const Simd& simd, const DeltaShape& shape, const float* lambda, int64_t t, float* row);

// Gradients inside a piece. The caller has put the gradients that come through nodes into da, dkb, dkt, du, dgate, dlambda.
struct DeltaPieceGradient {
  const float* dy = nullptr;                          // [m][dv]
  float* da = nullptr;                                // [m][dk], directly followed by
  float* dkb = nullptr;                               // [n][dk]
  float* dkt = nullptr;                               // [n][dk]
  float* du = nullptr;                                // [n][dv]; times the write gate it is the gradient of v
  float* dk = nullptr;                                // [n][dk]; `da` becomes the gradient of the scaled q
  float* dgate = nullptr;                             // [n]
  float* dwrite = nullptr;                            // [n]
  float* dlambda = nullptr;                           // [m][L]
  float *dr = nullptr, *dw = nullptr, *dm = nullptr;  // [ld][ld]
  float* column = nullptr;                            // [ld]
};
void carve_piece_gradient(const DeltaShape& shape, DeltaArena* arena, DeltaPieceGradient* gradient);
void piece_backward(const Simd& simd, const DeltaShape& shape, bool folded, DeltaPiece* piece, DeltaPieceGradient* gradient);

// Products with lower triangular matrices: rows i of [0, m) stand at lo + i and have columns [0, lo + i].
// c[i][s] (+)= a_i . b_s (k terms); zero above the diagonal, up to column lo + m.
void lower_dots(const Simd& simd, int64_t m, int64_t lo, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                float* c, int64_t ldc, bool accumulate);
// c[i][j] (+)= sum_s a[i][s] b[s][j], j < n.
void lower_times(const Simd& simd, int64_t m, int64_t lo, int64_t n, const float* a, int64_t lda, const float* b,
                 int64_t ldb, float* c, int64_t ldc, bool accumulate);
// c[s][j] (+)= sum_i a[i][s] b[i][j], s < lo + m, j < n.
void lower_transposed_times(const Simd& simd, int64_t m, int64_t lo, int64_t n, const float* a, int64_t lda, const float* b,
                            int64_t ldb, float* c, int64_t ldc, bool accumulate);

// x [n][ld]: on entry M below the diagonal; on exit (I - M)^-1, zeros above the diagonal. `temporary` [ld][ld].
void invert_unit_lower(const Simd& simd, int64_t n, float* x, int64_t ld, float* temporary);

}  // namespace lla::cpu
