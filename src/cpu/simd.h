// SPDX-License-Identifier: Apache-2.0
// The SIMD operations of the CPU backend, one table per instruction set. Everything above them is plain C++ that takes a
// table.
//
// Order of sums is fixed and part of the contract: the bits of one output element depend on the operands and the instruction
// set, never on m, n, the tile that it falls into, or the thread.
#pragma once

#include <cstdint>

namespace lla::cpu {

// dot_product sums k in blocks of this length, so a caller may cut k there (with `accumulate` from the second cut on) and
// gets the same bits. outer_product may be cut anywhere.
constexpr int64_t kDotDepth = 384;

// What turns products q.k of a chunk into weights of the scalar gate. Level l >= 1 parts the rows t and s, bit_length(t ^ s)
// = l; both have a factor of the decay between them.
struct ChunkWeights {
  int64_t grain = 0;             // C, a multiple of kWeightsGrain
  const float* table = nullptr;  // [log2(C) + 1][C]: (l, x) is row x's factor at level l
  const float* write = nullptr;  // [C]
  float* key = nullptr;          // [C], overwritten
  float scale = 1;
  const float* lambda = nullptr;  // of the first row; null: 1
  int64_t lambda_stride = 0;
  int64_t columns = 0;  // of λ; levels beyond read the last one
};
constexpr int64_t kWeightsGrain = 16;

// A product of outer_products: sum_p a[i*a_row + p*a_col] * b[p*ldb + j], p < k <= kProductDepth.
struct OuterProduct {
  int64_t k = 0;
  const float* a = nullptr;
  int64_t a_row = 0, a_col = 0;
  const float* b = nullptr;
  int64_t ldb = 0;
};
constexpr int64_t kProductDepth = 128;

struct Simd {
  int32_t isa;           // LLA_ISA_...
  const char* name;      // "avx2"
  int64_t rows_of_tile;  // of outer_product: triangles are cut into as many rows

  // ---- products. No operand may overlap c. Rows may have any distance (lda, ldb, ldc in elements). Any of m, n, k may be
  // 0; with k = 0 the sums are empty and a and b may be null, with m = 0 or n = 0 c too. ----
  // c[i][j] (+)= sum_p a[i*lda + p] * b[j*ldb + p], p < k: rows times rows (y = x W^T).
  void (*dot_product)(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                      int64_t ldc, bool accumulate);
  // The same bits, of bf16 numbers in b, for few rows of a: nothing is widened in memory first.
  void (*dot_product_bf16)(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const uint16_t* b, int64_t ldb,
                           float* c, int64_t ldc);
  // c[i][j] (+)= sum_p a[i*a_row + p*a_col] * b[p*ldb + j], p < k: a sum of outer products in order of p
  // (a_row = lda, a_col = 1: A B;  a_row = 1, a_col = lda: A^T B).
  void (*outer_product)(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b,
                        int64_t ldb, float* c, int64_t ldc, bool accumulate);
  // The same, added to factor * base[i][j] instead, whose rows have c's distance. base may be c, or null: zero.
  void (*outer_product_onto)(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b,
                             int64_t ldb, float* c, int64_t ldc, const float* base, float factor);
  // Two products in one pass over c: c = factor * base + first, and then c += second; the bits are those of two passes.
  // Returns the sum of c[i][j] * weigh[i][j] over what stood between the two, 0 if weigh is null. base as above; the rows of
  // weigh have c's distance.
  float (*outer_products)(int64_t m, int64_t n, const OuterProduct& first, const OuterProduct& second, float* c, int64_t ldc,
                          const float* base, float factor, const float* weigh);
  // What outer_product makes of the transposed b: c[i][j] (+)= sum_p a[i*lda + p] * b[j*ldb + p], one p after the other. For
  // many rows; dot_product's order is another one.
  void (*outer_product_transposed)(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                                   float* c, int64_t ldc, bool accumulate);

  // c[i][j] += scale[i] * sum_p a[i*lda + p] * b[p*ldb + j]. The sum is cut, and added to c, after every 256 p.
  void (*outer_product_scaled)(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                               float* c, int64_t ldc, const float* scale);

  // out[j*ldo + i] = a[i*lda + j], i < rows, j < columns.
  void (*transpose)(int64_t rows, int64_t columns, const float* a, int64_t lda, float* out, int64_t ldo);

  // ---- types ----
  void (*widen)(float* out, const void* in, int32_t dtype, int64_t n);       // to float
  void (*narrow)(void* out, int32_t dtype, const float* in, int64_t n);      // from float, nearest even
  void (*narrow_add)(void* out, int32_t dtype, const float* in, int64_t n);  // out = round(out + in)

  // ---- vectors of n floats ----
  float (*dot)(const float* a, const float* b, int64_t n);
  float (*sum)(const float* a, int64_t n);
  void (*scale)(float* out, const float* a, float s, int64_t n);       // out = s * a (in place allowed)
  void (*add_scaled)(float* out, const float* a, float s, int64_t n);  // out += s * a
  // For rows of n floats, one after the other: out = scale[row] * a, out += scale[row] * a.
  void (*scale_rows)(int64_t rows, float* out, const float* a, const float* scale, int64_t n);
  void (*add_scaled_rows)(int64_t rows, float* out, const float* a, const float* scale, int64_t n);
  // dots[row] = dot(q, e), and out += scale[row] * e unless out is null.
  void (*dot_and_add_rows)(int64_t rows, float* dots, float* out, const float* q, const float* e, const float* scale,
                           int64_t n);
  void (*multiply)(float* out, const float* a, const float* b, int64_t n);      // out = a * b (in place allowed)
  void (*multiply_add)(float* out, const float* a, const float* b, int64_t n);  // out += a * b
  // For the scalar gate's backward: with w = products * key, p = factor * w (p may be products) and left += factor * x * w.
  // Then x = factor * x * key * write, and the sum of the old x * w * write is returned.
  float (*weigh_gradient)(float* x, float* p, float* left, const float* products, const float* key, const float* write,
                          float factor, int64_t n);
  // Rows [begin, end) of q.k, `from` [end - begin][C], which may be `to`: times decay, λ, scale and write up to the
  // diagonal, zeros from there to `end`. What `from` holds behind the diagonal is not used.
  void (*weigh_rows)(const ChunkWeights& weights, int64_t begin, int64_t end, const float* from, float* to);
  void (*exp)(float* out, const float* a, int64_t n);  // relative error <= 2e-7; exp(-inf) = 0, large negative -> 0
  void (*sigmoid)(float* out, const float* a, int64_t n);
  void (*silu)(float* out, const float* a, int64_t n);      // a * sigmoid(a)
  void (*softplus)(float* out, const float* a, int64_t n);  // log(1 + e^a), accurate for large |a|
};

// The table of an instruction set that this CPU has.
const Simd& simd(int32_t isa);

}  // namespace lla::cpu
