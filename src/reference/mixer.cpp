// SPDX-License-Identifier: Apache-2.0
// Rows of a chunk, nodes of the past, and the fold of a full chunk (docs/mathematics.md).
#include "reference/mixer.h"

#include "core/fenwick.h"

namespace lla::reference {

void ChunkRows::take(Carver* carver, const MixerShape& shape) {
  k = carver->take(Size(shape.grain) * shape.key_dim);
  v = carver->take(Size(shape.grain) * shape.value_dim);
  gate = carver->take(shape.grain);
  write = carver->take(shape.grain);
}

void load_chunk(const MixerInputs& in, const Sequence& sequence, int64_t head, const ChunkSpan& span,
                const ChunkRows& rows) {
  const int64_t dk = in.shape.key_dim, dv = in.shape.value_dim, group = in.shape.group_of(head);
  const SlotImage& history = sequence.history;
  const TailLayout& layout = in.state.tail_layout;
  for (int64_t r = 0; r < span.hi; ++r) {
    double* k = rows.k + r * dk;
    double* v = rows.v + r * dv;
    if (r >= span.lo) {
      const int64_t row = sequence.row_begin + span.begin + r - sequence.position;
      load_row(in.k, sequence.index, row, group, dk, k);
      load_row(in.v, sequence.index, row, head, dv, v);
      rows.gate[r] = in.gate.present() ? load(in.gate, sequence.index, row, head) : 0;
      rows.write[r] = in.write.present() ? load(in.write, sequence.index, row, head) : 1;
    } else if (history.tail >= 0 && span.begin + r >= history.start) {
      const int64_t ring = tail_ring(history, layout, in.shape.grain, span.begin + r);
      const void* tail_k = in.state.tail_k(history.tail, group, ring);
      const void* tail_v = in.state.tail_v(history.tail, head, ring);
      for (int64_t i = 0; i < dk; ++i) k[i] = load_element<double>(tail_k, layout.dtype, i);
      for (int64_t i = 0; i < dv; ++i) v[i] = load_element<double>(tail_v, layout.dtype, i);
      rows.gate[r] = load_element<double>(in.state.tail_gate(history.tail, head, ring), layout.gate_dtype(), 0);
      rows.write[r] = load_element<double>(in.state.tail_write(history.tail, head, ring), layout.gate_dtype(), 0);
    } else {
      fill(k, dk, 0);
      fill(v, dv, 0);
      rows.gate[r] = rows.write[r] = 0;
    }
  }
}

void Nodes::take(Carver* carver, const MixerShape& shape, const Limits& limits) {
  const int64_t reachable = bit_length(limits.length / shape.grain);
  separate = shape.separate_levels();
  if (separate > reachable) separate = static_cast<int>(reachable);
  linear = shape.levels == 0;
  absorbs = linear || shape.absorb;
  size = (Size(shape.key_dim) * shape.value_dim).value();
  content = carver->take(Size(count()) * shape.key_dim * shape.value_dim);
  log_decay = carver->take(count());
}

int Nodes::target(int64_t chunk) const {
  const int level = trailing_ones(chunk);
  return level < separate ? level : separate;
}

int64_t Nodes::column(int j, const MixerShape& shape) const {
  if (shape.levels == 0) return -1;
  return j < separate ? shape.column(node_column(j, shape.grain)) : shape.levels - 1;
}

void load_node(const SlotMemory& memory, int32_t id, int64_t head, double* content, double* log_decay) {
  const NodeLayout& layout = memory.node_layout;
  const void* data = memory.node(id, head);
  for (int64_t i = 0; i < layout.key_dim * layout.value_dim; ++i) content[i] = load_element<double>(data, layout.dtype, i);
  *log_decay = load_element<double>(memory.node_decay(id, head), layout.decay_dtype(), 0);
}

void store_node(const SlotMemory& memory, int32_t id, int64_t head, const double* content, double log_decay) {
  const NodeLayout& layout = memory.node_layout;
  void* data = memory.node(id, head);
  for (int64_t i = 0; i < layout.key_dim * layout.value_dim; ++i) store_element(data, layout.dtype, i, content[i]);
  store_element(memory.node_decay(id, head), layout.decay_dtype(), 0, log_decay);
}

void load_nodes(const SlotMemory& memory, const int32_t* ids, int64_t head, int64_t chunks, const Nodes& nodes) {
  for (int j = 0; j < nodes.count(); ++j) {
    if (!nodes.live(j, chunks)) continue;
    const int32_t id = memory.nodes.base ? nodes.id(ids, j) : -1;
    if (id >= 0) {
      load_node(memory, id, head, nodes.at(j), &nodes.log_decay[j]);
    } else {
      fill(nodes.at(j), nodes.size, 0);
      nodes.log_decay[j] = 0;
    }
  }
}

namespace {

double rounded(int32_t dtype, double value) {
  double memory = 0;
  store_element(&memory, dtype, 0, value);
  return load_element<double>(&memory, dtype, 0);
}

// Takes a matrix [dk][dv] through the rows of a chunk, column by column: S <- exp(g) (I - w k k^T) S, or without the
// bracket for the scalar gate; with `writes` also + w k v^T.
void pass_rows(const MixerShape& shape, const ChunkRows& rows, bool writes, double* matrix, double* column) {
  const int64_t dk = shape.key_dim, dv = shape.value_dim;
  for (int64_t c = 0; c < dv; ++c) {
    for (int64_t i = 0; i < dk; ++i) column[i] = matrix[i * dv + c];
    for (int64_t r = 0; r < shape.grain; ++r) {
      const double* k = rows.k + r * dk;
      const double decay = std::exp(rows.gate[r]);
      const double erased = shape.mixer == LLA_DELTA_RULE ? rows.write[r] * dot(k, column, dk) : 0;
      const double written = writes ? rows.write[r] * rows.v[r * dv + c] : 0;
      for (int64_t i = 0; i < dk; ++i) column[i] = decay * (column[i] - erased * k[i]) + written * k[i];
    }
    for (int64_t i = 0; i < dk; ++i) matrix[i * dv + c] = column[i];
  }
}

}  // namespace

void fold_chunk(const MixerInputs& in, const ChunkRows& rows, int64_t chunk, const Nodes& nodes, double* content,
                double* column) {
  const MixerShape& shape = in.shape;
  const bool delta = shape.mixer == LLA_DELTA_RULE;
  fill(content, nodes.size, 0);
  pass_rows(shape, rows, true, content, column);
  double log_decay = 0;
  if (!delta) {
    for (int64_t r = 0; r < shape.grain; ++r) log_decay += rows.gate[r];
  }

  // The chunk's own content, then the nodes that it merges with, from the newest to the oldest.
  const int target = nodes.target(chunk);
  for (int j = 0; j < nodes.count(); ++j) {
    if (!nodes.live(j, chunk)) continue;
    if (delta) pass_rows(shape, rows, false, nodes.at(j), column);
    if (j > target) continue;
    add_scaled(content, delta ? 1 : std::exp(log_decay), nodes.at(j), nodes.size);
    if (!delta) log_decay += nodes.log_decay[j];
  }
  for (int64_t i = 0; i < nodes.size; ++i) nodes.at(target)[i] = content[i];
  nodes.log_decay[target] = log_decay;

  if (!in.state.nodes.base) return;
  const NodeLayout& layout = in.state.node_layout;
  for (int j = 0; j < nodes.count(); ++j) {
    if (!nodes.live(j, chunk + 1)) continue;
    for (int64_t i = 0; i < nodes.size; ++i) nodes.at(j)[i] = rounded(layout.dtype, nodes.at(j)[i]);
    nodes.log_decay[j] = rounded(layout.decay_dtype(), nodes.log_decay[j]);
  }
}

}  // namespace lla::reference
