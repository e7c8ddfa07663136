// SPDX-License-Identifier: Apache-2.0
// Reads of nodes and their transitions (docs/mathematics.md). Nodes that merge are summed first and advanced once:
// with Z = to_end U - gamma (w K) S, the new node is gamma S + Kt^T Z.
#include "cpu/delta_rule_nodes.h"

#include <algorithm>

namespace lla::cpu {

namespace {

float lambda_of(const DeltaShape& shape, const DeltaPiece& piece, int64_t row, int64_t column) {
  return column < 0 ? 1.0f : piece.lambda[row * shape.levels + column];
}

// Adds the piece's own write to z.
void add_writes(const Simd& simd, const DeltaShape& shape, const DeltaPiece& piece, float* z) {
  const int64_t dv = shape.value_dim;
  for (int64_t s = 0; s < piece.n; ++s) simd.add_scaled(z + s * dv, piece.u + s * dv, piece.to_end[s], dv);
}

// out = gamma * content + Kt^T z.
void advance(const Simd& simd, const DeltaShape& shape, const DeltaPiece& piece, const float* content, const float* z,
             float* out) {
  const int64_t dk = shape.key_dim, dv = shape.value_dim;
  simd.outer_product_onto(dk, dv, piece.n, piece.kt, 1, dk, z, dv, out, dv, content, piece.gamma);
}

// Sum of the nodes that merge, null if there is none. `out` is used if there are several, and may be one of them.
const float* sum_sources(const Simd& simd, const DeltaShape& shape, int64_t index, const DeltaMerge& merge,
                         const DeltaNodes& nodes, float* out) {
  const float* sum = nullptr;
  const auto add = [&](int e) {
    if (!merge.takes(e) || !nodes.content[e]) return;
    if (!sum) {
      sum = nodes.content[e];
      return;
    }
    if (sum != out) {
      std::copy(sum, sum + shape.node_size(), out);
      sum = out;
    }
    simd.add_scaled(out, nodes.content[e], 1, shape.node_size());
  };
  if (merge.target == kDeltaAbsorbed && nodes.content[kDeltaAbsorbed]) sum = nodes.content[kDeltaAbsorbed];
  for_live_entries(shape, index, [&](int e) {
    if (e != kDeltaAbsorbed) add(e);
  });
  return sum;
}

void finish_merge(const DeltaShape& shape, int64_t index, const DeltaMerge& merge, DeltaNodes* nodes) {
  for_live_entries(shape, index, [&](int e) {
    if (merge.takes(e)) nodes->content[e] = nullptr;
  });
  nodes->content[merge.target] = nodes->buffer[merge.target];
}

}  // namespace

void set_buffers(const DeltaShape& shape, float* set, int64_t slots, DeltaNodes* nodes) {
  if (!set) return;  // memory is being measured
  for (int64_t e = 0; e < slots; ++e) nodes->buffer[e] = set + e * shape.node_size();
  if (shape.has_absorbed()) nodes->buffer[kDeltaAbsorbed] = set + (slots - 1) * shape.node_size();
}

void use_buffers(const DeltaShape& shape, int64_t index, DeltaNodes* nodes) {
  std::fill(nodes->content, nodes->content + kDeltaEntries, nullptr);
  for_live_entries(shape, index, [&](int e) { nodes->content[e] = nodes->buffer[e]; });
}

void carve_node_scratch(const DeltaShape& shape, DeltaArena* arena, DeltaNodeScratch* scratch) {
  scratch->product = arena->floats(Size(2 * shape.rows) * shape.value_dim);
  scratch->z = arena->floats(Size(shape.rows) * shape.value_dim);
}

void pass_nodes(const Simd& simd, const DeltaShape& shape, const DeltaPiece& piece, int64_t index, bool fold,
                const DeltaNodeScratch& scratch, const DeltaRecord& keep, DeltaNodes* nodes, float* y) {
  const int64_t n = piece.n, m = piece.m, dk = shape.key_dim, dv = shape.value_dim;
  const DeltaMerge merge(shape, index);
  int sources = 0;
  for_live_entries(shape, index, [&](int e) { sources += nodes->content[e] != nullptr && merge.takes(e); });

  bool merged = false;
  for_live_entries(shape, index, [&](int e) {
    const float* content = nodes->content[e];
    if (!content) {
      float* kept = fold && !merge.takes(e) ? keep.z_of(shape, e) : nullptr;
      if (kept) std::fill(kept, kept + n * dv, 0.0f);
      return;
    }
    const bool alone = fold && (!merge.takes(e) || sources == 1);
    const int64_t rows = alone ? m + n : m;  // A and -w K are read together
    if (rows == 0) return;
    simd.outer_product(rows, dv, dk, piece.a, dk, 1, content, dv, scratch.product, dv, false);
    const int64_t column = shape.column_of_entry(e);
    for (int64_t i = 0; i < m; ++i) {
      const float weight = piece.into[i] * lambda_of(shape, piece, i, column);
      simd.add_scaled(y + i * dv, scratch.product + i * dv, weight, dv);
    }
    if (!alone) return;
    const bool is_source = merge.takes(e);
    const int to = is_source ? merge.target : e;
    float *read = scratch.product + m * dv, *kept = keep.z_of(shape, to), *z = kept ? kept : read;
    simd.scale(z, read, piece.gamma, n * dv);
    if (is_source) add_writes(simd, shape, piece, z);
    advance(simd, shape, piece, content, z, nodes->buffer[to]);
    if (is_source) {
      merged = true;
    } else {
      nodes->content[e] = nodes->buffer[e];
    }
  });
  if (!fold) return;
  if (!merged) {
    float* out = nodes->buffer[merge.target];
    const float* sum = sum_sources(simd, shape, index, merge, *nodes, out);
    float *kept = keep.z_of(shape, merge.target), *z = kept ? kept : scratch.z;
    if (sum) {
      simd.outer_product(n, dv, dk, piece.kb, dk, 1, sum, dv, scratch.z, dv, false);
      simd.scale(z, scratch.z, piece.gamma, n * dv);
    } else {
      std::fill(z, z + n * dv, 0.0f);
    }
    add_writes(simd, shape, piece, z);
    advance(simd, shape, piece, sum, z, out);
  }
  finish_merge(shape, index, merge, nodes);
}

void replay_nodes(const Simd& simd, const DeltaShape& shape, const DeltaPiece& piece, const DeltaRecord& record,
                  const DeltaNodeScratch& scratch, DeltaNodes* nodes) {
  const DeltaMerge merge(shape, record.index);
  // What was saved has to come from far. Products read and write strips of it and would wait for each; a copy does not.
  const auto take_z = [&](int to) {
    const float* z = record.z_of(shape, to);
    if (z) std::copy(z, z + piece.n * shape.value_dim, scratch.z);
    return z != nullptr;
  };
  const auto advance_copy = [&](const float* content, float* out) {
    if (content && content != out) std::copy(content, content + shape.node_size(), out);
    advance(simd, shape, piece, content ? out : nullptr, scratch.z, out);
  };
  for_live_entries(shape, record.index, [&](int e) {
    if (merge.takes(e) || !nodes->content[e]) return;
    take_z(e);
    advance_copy(nodes->content[e], nodes->buffer[e]);
    nodes->content[e] = nodes->buffer[e];
  });
  float* out = nodes->buffer[merge.target];
  const float* sum = sum_sources(simd, shape, record.index, merge, *nodes, out);
  if (!take_z(merge.target)) {
    std::fill(scratch.z, scratch.z + piece.n * shape.value_dim, 0.0f);
    add_writes(simd, shape, piece, scratch.z);
  }
  advance_copy(sum, out);
  finish_merge(shape, record.index, merge, nodes);
}

void carve_node_gradient_scratch(const DeltaShape& shape, DeltaArena* arena, DeltaNodeGradientScratch* scratch) {
  const Size values = Size(shape.rows) * shape.value_dim;
  for (float** rows : {&scratch->z, &scratch->dz, &scratch->weighed}) *rows = arena->floats(values);
  scratch->arriving = arena->floats(values * 2);
  scratch->read = arena->floats(Size(2 * shape.rows) * shape.key_dim);
  scratch->sum = arena->floats(Size(shape.key_dim) * shape.value_dim);
  scratch->row_gate = arena->floats(shape.rows);
  scratch->write_gate = arena->floats(shape.rows);
}

void pass_nodes_backward(const Simd& simd, const DeltaShape& shape, const DeltaPiece& piece, int64_t index, bool fold,
                         const DeltaNodes& nodes, const DeltaRecord& record, const DeltaNodeGradientScratch& scratch,
                         DeltaNodes* gradients, DeltaPieceGradient* out) {
  const int64_t n = piece.n, m = piece.m, dk = shape.key_dim, dv = shape.value_dim, size = shape.node_size();
  float *row_gate = scratch.row_gate, *write_gate = scratch.write_gate, *dz = scratch.dz;
  bool has_da = false, has_dkb = false, has_dkt = false, has_du = false;  // something to add to
  std::fill(out->dwrite, out->dwrite + n, 0.0f);
  std::fill(out->dlambda, out->dlambda + m * shape.levels, 0.0f);
  std::fill(row_gate, row_gate + m, 0.0f);
  std::fill(write_gate, write_gate + n, 0.0f);
  float gamma_gate = 0;

  for (int64_t i = 0; i < m; ++i) simd.scale(scratch.arriving + i * dv, out->dy + i * dv, piece.into[i], dv);

  // What entry `to` was advanced with, but for the product with the node itself: its gradient at the piece's end goes to Kt,
  // and to the piece's writes if they went into it. Leaves the gradient of Z in dz.
  const auto advance_backward = [&](int to, const float* from, bool is_target) {
    const float* dnode = gradients->buffer[to];
    simd.outer_product(n, dv, dk, piece.kt, dk, 1, dnode, dv, dz, dv, false);
    const float* z = from || is_target ? record.z_of(shape, to) : nullptr;
    if (!z) {
      z = scratch.z;
      if (from) {
        simd.outer_product(n, dv, dk, piece.kb, dk, 1, from, dv, scratch.z, dv, false);
        simd.scale(scratch.z, scratch.z, piece.gamma, n * dv);
      } else {
        std::fill(scratch.z, scratch.z + n * dv, 0.0f);
      }
      if (is_target) add_writes(simd, shape, piece, scratch.z);
    }
    if (is_target) {
      for (int64_t s = 0; s < n; ++s) {
        write_gate[s] = piece.to_end[s] * simd.dot(dz + s * dv, piece.u + s * dv, dv);
        simd.scale(out->du + s * dv, dz + s * dv, piece.to_end[s], dv);
      }
      has_du = true;
    }
    simd.outer_product_transposed(n, dk, dv, z, dv, dnode, dv, out->dkt, dk, has_dkt);
    has_dkt = true;
  };
  // From the products `read` of the arriving gradients with a node that row by row has the weights of a λ column.
  const auto take_reads = [&](int64_t column, const float* read) {
    for (int64_t i = 0; i < m; ++i) {
      const float weight = lambda_of(shape, piece, i, column);
      const float dweight = simd.dot(piece.a + i * dk, read + i * dk, dk);
      if (column >= 0) out->dlambda[i * shape.levels + column] += dweight;
      row_gate[i] += weight * dweight;
      if (read == out->da && weight == 1) continue;  // there already
      const auto take = has_da ? simd.add_scaled : simd.scale;
      take(out->da + i * dk, read + i * dk, weight, dk);
    }
    has_da = true;
  };
  // The arriving gradients times a column of λ.
  const auto weigh_arriving = [&](int64_t column) {
    if (column < 0) return scratch.arriving;
    for (int64_t i = 0; i < m; ++i) {
      simd.scale(scratch.weighed + i * dv, scratch.arriving + i * dv, lambda_of(shape, piece, i, column), dv);
    }
    return scratch.weighed;
  };
  // Entry e, which alone becomes entry `to`: its transition and its reads, which share a product.
  const auto go_back_alone = [&](int e, int to, bool is_target) {
    const float *from = nodes.content[e], *after = gradients->buffer[to];
    float* dnode = gradients->buffer[e];
    const int64_t column = shape.column_of_entry(e);
    advance_backward(to, from, is_target);
    simd.scale(scratch.arriving + m * dv, dz, piece.gamma, n * dv);
    const bool in_place = !has_da && !has_dkb && out->dkb == out->da + m * dk;
    float *const read = in_place ? out->da : scratch.read, *const of_kb = read + m * dk;
    simd.outer_product_transposed(m + n, dk, dv, scratch.arriving, dv, from, dv, read, dk, false);
    if (has_dkb) {
      simd.add_scaled(out->dkb, of_kb, 1, n * dk);
    } else if (!in_place) {
      std::copy(of_kb, of_kb + n * dk, out->dkb);
    }
    has_dkb = true;
    // The gate's share is taken from the gradient that has come through the transition, element by element: as a difference
    // of sums it would be rounding where the piece erases what it finds.
    gamma_gate += simd.outer_products(dk, dv, {n, piece.kb, 1, dk, scratch.arriving + m * dv, dv},
                                      {m, piece.a, 1, dk, weigh_arriving(column), dv}, dnode, dv, after, piece.gamma, from);
    take_reads(column, read);
    gradients->content[to] = nullptr;
    gradients->content[e] = dnode;
  };

  // The same without the reads: of entry e, which came from `from`, a sum of others perhaps, null for zero. `onward`:
  // somebody takes the gradient of what it came from.
  const auto go_back_in_place = [&](int e, const float* from, bool is_target, bool onward) {
    float* node = gradients->buffer[e];
    advance_backward(e, from, is_target);
    if (!onward) return;
    simd.scale(dz, dz, piece.gamma, n * dv);
    if (from) simd.outer_product_transposed(n, dk, dv, dz, dv, from, dv, out->dkb, dk, has_dkb);
    has_dkb = has_dkb || from;
    gamma_gate += simd.outer_products(dk, dv, {n, piece.kb, 1, dk, dz, dv}, {}, node, dv, node, piece.gamma, from);
  };

  uint64_t done = 0;  // entries whose reads are done
  if (fold) {
    const DeltaMerge merge(shape, index);
    int sources = 0, source = 0;
    for_live_entries(shape, index, [&](int e) {
      if (!merge.takes(e)) {
        if (!gradients->content[e]) return;
        if (!nodes.content[e]) return go_back_in_place(e, nullptr, false, true);
        go_back_alone(e, e, false);
        done |= uint64_t{1} << e;
        return;
      }
      ++sources;
      source = e;
    });
    const bool arrives = gradients->content[merge.target] != nullptr;
    if (arrives && sources == 1 && nodes.content[source]) {
      go_back_alone(source, merge.target, true);
      done |= uint64_t{1} << source;
    } else {
      float* shared = gradients->buffer[merge.target];
      if (arrives) {
        go_back_in_place(merge.target, sum_sources(simd, shape, index, merge, nodes, scratch.sum), true, sources > 0);
      }
      for_live_entries(shape, index, [&](int e) {
        if (!merge.takes(e) || e == merge.target) return;
        gradients->content[e] = arrives ? gradients->buffer[e] : nullptr;
        if (!arrives) return;
        if (m == 0) {
          std::copy(shared, shared + size, gradients->buffer[e]);
        } else {
          gradients->content[e] = shared;  // the reads, which add to it, put the sum where it belongs
        }
      });
      if (!delta_is_live(shape, index, merge.target)) gradients->content[merge.target] = nullptr;
    }
  }

  // The other reads.
  for_live_entries(shape, index, [&](int e) {
    if (m == 0 || (done >> e & 1)) return;
    const int64_t column = shape.column_of_entry(e);
    if (const float* content = nodes.content[e]) {
      simd.outer_product_transposed(m, dk, dv, scratch.arriving, dv, content, dv, scratch.read, dk, false);
      take_reads(column, scratch.read);
    }
    simd.outer_product_onto(dk, dv, m, piece.a, 1, dk, weigh_arriving(column), dv, gradients->buffer[e], dv,
                            gradients->content[e], 1);
    gradients->content[e] = gradients->buffer[e];
  });

  if (!has_da) std::fill(out->da, out->da + m * dk, 0.0f);
  if (!has_dkb) std::fill(out->dkb, out->dkb + n * dk, 0.0f);
  if (!has_dkt && fold) std::fill(out->dkt, out->dkt + n * dk, 0.0f);
  if (!has_du) std::fill(out->du, out->du + n * dv, 0.0f);

  // A decay over an interval belongs to all gates of the interval: reads [0, t], writes (s, n), transitions [0, n).
  float before = 0, after = 0;
  for (int64_t t = 0; t < n; ++t) {
    out->dgate[t] = gamma_gate + before;
    before += write_gate[t];
  }
  for (int64_t t = n - 1; t >= 0; --t) {
    if (t >= piece.lo()) after += row_gate[t - piece.lo()];
    out->dgate[t] += after;
  }
}

}  // namespace lla::cpu
