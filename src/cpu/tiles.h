// SPDX-License-Identifier: Apache-2.0
// Products of bf16 matrices on the matrix tiles that some CPUs have (AMX), and the packing of their operands.
//
// A bf16 product takes a pair of numbers from either side at once, so the right factor is packed in pairs of rows: word
// (p, j) of B holds B[2p][j] and B[2p + 1][j], in this order in memory; 16 columns make a block [k / 2][16], blocks follow
// each other. A factor in fp32 is split into three bf16 numbers, whose sum it is: nothing is rounded.
//
// Every element is summed in order of p, whatever m and n are.
#pragma once

#include <cstdint>

namespace lla::cpu {

constexpr int64_t kTileRows = 16, kTileDepth = 32;
constexpr int kParts = 3;  // of a split factor

struct Tiles {
  // Around the products of a task.
  void (*begin)();
  void (*end)();
  // c[i][j] = sum_p a[i*lda + p] * b[p][j]: m and n multiples of kTileRows, k of kTileDepth. A split factor has its parts
  // a_next or b_next elements apart, 0: it is not split; at most one is. `block`: words between two blocks of b.
  void (*product)(int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t a_next, int64_t lda, const uint32_t* b,
                  int64_t b_next, int64_t block, float* c, int64_t ldc);
  // Splits rows of a left factor; n a multiple of 16.
  void (*split_rows)(int64_t m, int64_t n, const float* a, int64_t lda, uint16_t* out, int64_t next, int64_t ldo);
  // Packs a right factor [k][n]; k even, n a multiple of 16.
  void (*pack)(int64_t k, int64_t n, const uint16_t* b, int64_t ldb, uint32_t* out, int64_t block);
  void (*split_pack)(int64_t k, int64_t n, const float* b, int64_t ldb, uint32_t* out, int64_t next, int64_t block);
  // The same of rows in bf16, row p times scale[p].
  void (*scale_split_pack)(int64_t k, int64_t n, const uint16_t* b, int64_t ldb, const float* scale, uint32_t* out,
                           int64_t next, int64_t block);
};

// Null unless this CPU has tiles for bf16 and the operating system lets the process use them.
const Tiles* tiles();
// The same by dot products of pairs in vectors (AVX512_BF16): for factors that are not split, which would take longer than
// in fp32. Null unless this CPU has them and they are faster than fp32.
const Tiles* bf16_dots();

}  // namespace lla::cpu
