// SPDX-License-Identifier: Apache-2.0
// Reverse mode of the scalar gate inside one chunk of one head (docs/mathematics.md): what its rows read of the chunk and of
// the nodes, and what the chunk's content was made of.
#pragma once

#include "cpu/scalar_gate.h"

namespace lla::cpu::scalar_gate {

// Gradients of a chunk's operands, collected in floats. Local rows; all are added to.
struct ChunkGradient {
  float* q = nullptr;       // [row block][dk]; null: not wanted
  float* k = nullptr;       // [C][dk]; null: not wanted
  float* v = nullptr;       // [C][dv]
  float* gate = nullptr;    // [C]
  float* write = nullptr;   // [C]
  float* lambda = nullptr;  // [row block][L]
  float* table = nullptr;   // [log2(C) + 1][C], of the logs of Factors::table, left halves before the write strength
  float* prefix = nullptr;  // [C], of the logs of Factors::prefix
};

struct GradientBuffers {
  float *p = nullptr, *x = nullptr;  // [row block][C]: q.k, dy.v
  float* z = nullptr;                // [C]
  float* weight = nullptr;           // [C]
  float* dy = nullptr;               // [row block][dv]
  float* e = nullptr;                // [row block][dk]: dy S^T
  float* scaled = nullptr;           // [C][dv]
  float* product = nullptr;          // [C][dv]
  // Transposed operands, so that every product is a sum of outer products, the faster kind by far where sums are short.
  float* v = nullptr;     // [dv][C]: of the chunk
  float* node = nullptr;  // [dv][dk]
  void carve(const Sizes& sizes, Carver* carver);
};

// Gradient with respect to one node: content null stands for zero.
struct NodeGradient {
  float* content = nullptr;
  float log_decay = 0;
};

// Rows [t0, t1) read the chunk's own rows. dy [t1 - t0][dv]. k and v of the operands are whole, buffers.v is v transposed.
// q.k may be there already: `products` [t1 - t0][C], or `kept` as forward left it (of the whole chunk). Leaves the gradient
// of q.k in buffers.x, zeros above the diagonal.
void gradient_inside(const Simd& simd, const MixerShape& shape, const Sizes& sizes, const Operands& operands,
                     const Factors& factors, const float* products, const float* kept, int64_t t0, int64_t t1,
                     const float* dy, const GradientBuffers& buffers, const ChunkGradient& gradient);
// From the gradient x [t1 - t0][C] of q.k of the rows [t0, t1) to those of q (rows [t0, t1); added to with `add_q`) and k
// (added to), null: not wanted.
void gradient_of_products(const Simd& simd, const Sizes& sizes, const Operands& operands, int64_t t0, int64_t t1,
                          const float* x, float* dq, bool add_q, float* dk);
// Rows [t0, t1) read node `n` of the list, the transpose of which is `transposed` [dv][dk]. Adds to dnode [dk][dv] if that
// is not null (`started`: it holds something). Returns the gradient of the log of the node's factor.
float gradient_of_read(const Simd& simd, const MixerShape& shape, const Sizes& sizes, const Operands& operands,
                       const Factors& factors, const Reads& reads, int n, const float* transposed, int64_t t0, int64_t t1,
                       const float* dy, float* dnode, bool started, const GradientBuffers& buffers,
                       const ChunkGradient& gradient);
// The chunk's content has the gradient dh [dk][dv] (null: zero), and its log decay dlog_decay. Without `add_k` gradient.k is
// overwritten, if dh is not null.
void gradient_of_content(const Simd& simd, const Sizes& sizes, const Operands& operands, const Factors& factors,
                         const float* dh, float dlog_decay, bool add_k, const GradientBuffers& buffers,
                         const ChunkGradient& gradient);
// Turns the gradients of the factors' logs into those of the gates of rows [0, hi).
void gradient_of_factors(const Sizes& sizes, const Operands& operands, const ChunkGradient& gradient);

}  // namespace lla::cpu::scalar_gate
