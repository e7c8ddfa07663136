// SPDX-License-Identifier: Apache-2.0
// Mixer backward: reverse mode through the forward's own recurrences (docs/mathematics.md). One task is one group of one
// sequence, with all its heads in order, so that the sums over a group have one fixed order.
#include "core/fenwick.h"
#include "reference/kernels.h"
#include "reference/mixer.h"

namespace lla::reference {
namespace {

struct Workspace {
  ChunkRows rows, gradient;     // of one chunk and head
  Nodes nodes;                  // contents before each chunk: [chunks] sets one after the other
  Nodes adjoint;                // gradients of the nodes, one set
  double* dq = nullptr;         // [rows][dk] of the group, without scale
  double* dk = nullptr;         // [grain + rows][dk] of the group, from the start of the first chunk on
  double* content = nullptr;    // [dk][dv]
  double* x = nullptr;          // [grain + 1][dk] a query, or a column of a node, on its way through the transitions
  double* dx = nullptr;         // [dk]
  double* dy = nullptr;         // [dv]
  double* dlambda = nullptr;    // [L]
  double* log_decay = nullptr;  // [grain] of row s on its way to the query

  void take(Carver* carver, const MixerShape& shape, const Limits& limits) {
    rows.take(carver, shape);
    gradient.take(carver, shape);
    adjoint.take(carver, shape, limits);
    const Size chunks(limits.rows_per_sequence / shape.grain + 2);
    nodes = adjoint;
    nodes.content = carver->take(chunks * nodes.count() * shape.key_dim * shape.value_dim);
    nodes.log_decay = carver->take(chunks * nodes.count());
    dq = carver->take(Size(limits.rows_per_sequence) * shape.key_dim);
    dk = carver->take((Size(limits.rows_per_sequence) + shape.grain) * shape.key_dim);
    content = carver->take(Size(shape.key_dim) * shape.value_dim);
    x = carver->take((Size(shape.grain) + 1) * shape.key_dim);
    dx = carver->take(shape.key_dim);
    dy = carver->take(shape.value_dim);
    dlambda = carver->take(shape.levels);
    log_decay = carver->take(shape.grain);
  }
  // The set of nodes before the c-th chunk of the call.
  Nodes before(int64_t c) const {
    LLA_CONTRACT(nodes.content && nodes.log_decay);
    Nodes set = nodes;
    set.content += c * nodes.count() * nodes.size;
    set.log_decay += c * nodes.count();
    return set;
  }
};

// Everything of one head that the functions below work on.
struct Head {
  const MixerBackward& problem;
  const MixerShape& shape;
  const Sequence& sequence;
  int64_t head;
  const Workspace& work;
  bool delta;

  int64_t first() const { return first_chunk(sequence, shape.grain); }
  int64_t row(const ChunkSpan& span, int64_t r) const { return sequence.row_begin + span.begin + r - sequence.position; }
  // Gradient of the key of a chunk's local row (a sum over the group).
  double* dk(const ChunkSpan& span, int64_t r) const {
    return work.dk + (span.begin - first() * shape.grain + r) * shape.key_dim;
  }
};

// Adds the gradients of the final state's raw rows (v, gate, write).
void add_final_tail(const Head& h, const ChunkSpan& span) {
  const SlotImage& final = h.sequence.final_gradient;
  const SlotMemory& memory = h.problem.gradient;
  const TailLayout& layout = memory.tail_layout;
  const int64_t dv = h.shape.value_dim;
  for (int64_t r = 0; r < span.hi; ++r) {
    if (span.begin + r < final.start) continue;
    const int64_t ring = tail_ring(final, layout, h.shape.grain, span.begin + r);
    const void* v = memory.tail_v(final.tail, h.head, ring);
    for (int64_t i = 0; i < dv; ++i) h.work.gradient.v[r * dv + i] += load_element<double>(v, layout.dtype, i);
    h.work.gradient.gate[r] += load_element<double>(memory.tail_gate(final.tail, h.head, ring), layout.gate_dtype(), 0);
    h.work.gradient.write[r] += load_element<double>(memory.tail_write(final.tail, h.head, ring), layout.gate_dtype(), 0);
  }
}

// Reverse of the way of one matrix through a full chunk, column by column: `start` [dk][dv] before the chunk (null: zero),
// `adjoint` its gradient after the chunk on entry and before it on return. Adds the gradients of the rows.
void reverse_rows(const Head& h, const ChunkSpan& span, bool writes, const double* start, double* adjoint) {
  const ChunkRows& rows = h.work.rows;
  const ChunkRows& gradient = h.work.gradient;
  const int64_t dk = h.shape.key_dim, dv = h.shape.value_dim, grain = h.shape.grain;
  double* y = h.work.dx;
  for (int64_t c = 0; c < dv; ++c) {
    for (int64_t i = 0; i < dk; ++i) h.work.x[i] = start ? start[i * dv + c] : 0;
    for (int64_t r = 0; r < grain; ++r) {
      const double* k = rows.k + r * dk;
      const double* x = h.work.x + r * dk;
      const double decay = std::exp(rows.gate[r]);
      const double erased = h.delta ? rows.write[r] * dot(k, x, dk) : 0;
      const double written = writes ? rows.write[r] * rows.v[r * dv + c] : 0;
      for (int64_t i = 0; i < dk; ++i) h.work.x[(r + 1) * dk + i] = decay * (x[i] - erased * k[i]) + written * k[i];
    }
    for (int64_t i = 0; i < dk; ++i) y[i] = adjoint[i * dv + c];
    for (int64_t r = grain - 1; r >= 0; --r) {
      const double* k = rows.k + r * dk;
      const double* x = h.work.x + r * dk;
      double* dk_row = h.dk(span, r);
      const double write = rows.write[r], decay = std::exp(rows.gate[r]), ky = dot(k, y, dk);
      if (writes) {
        const double v = rows.v[r * dv + c];
        gradient.v[r * dv + c] += write * ky;
        gradient.write[r] += ky * v;
        add_scaled(dk_row, write * v, y, dk);
      }
      if (decay == 0) {
        fill(y, dk, 0);
        continue;
      }
      gradient.gate[r] += decay * dot(y, x, dk);
      if (h.delta) {
        const double kx = dot(k, x, dk);
        gradient.gate[r] -= decay * write * kx * ky;
        gradient.write[r] -= decay * kx * ky;
        add_scaled(dk_row, -decay * write * kx, y, dk);
        add_scaled(dk_row, -decay * write * ky, x, dk);
        add_scaled(y, -write * ky, k, dk);
      }
      for (int64_t i = 0; i < dk; ++i) y[i] *= decay;
    }
    for (int64_t i = 0; i < dk; ++i) adjoint[i * dv + c] = y[i];
  }
}

// Reverse of fold_chunk(): turns the gradients of the nodes after the chunk into those of the nodes before it.
void reverse_fold(const Head& h, const ChunkSpan& span, const Nodes& nodes) {
  const Nodes& adjoint = h.work.adjoint;
  const ChunkRows& rows = h.work.rows;
  double* merged = h.work.content;
  const int target = nodes.target(span.index);
  for (int64_t i = 0; i < nodes.size; ++i) merged[i] = adjoint.at(target)[i];

  if (h.delta) {
    for (int j = 0; j < nodes.count(); ++j) {
      if (!nodes.live(j, span.index)) continue;
      for (int64_t i = 0; j <= target && i < nodes.size; ++i) adjoint.at(j)[i] = merged[i];
      reverse_rows(h, span, false, nodes.at(j), adjoint.at(j));
    }
  } else {
    double log_decay[kNodes] = {};  // of node j over everything newer that it merges with
    double sum = 0;
    for (int64_t r = 0; r < h.shape.grain; ++r) sum += rows.gate[r];
    for (int j = 0; j <= target; ++j) {
      log_decay[j] = sum;
      if (nodes.live(j, span.index)) sum += nodes.log_decay[j];
    }
    double older = adjoint.log_decay[target];  // gradient of the log decays of everything newer than node j
    for (int j = target; j >= 0; --j) {
      if (!nodes.live(j, span.index)) continue;
      const double decay = std::exp(log_decay[j]);
      adjoint.log_decay[j] = older;
      if (decay != 0) older += decay * dot(merged, nodes.at(j), nodes.size);
      for (int64_t i = 0; i < nodes.size; ++i) adjoint.at(j)[i] = decay == 0 ? 0 : decay * merged[i];
    }
    for (int64_t r = 0; r < h.shape.grain; ++r) h.work.gradient.gate[r] += older;
  }
  reverse_rows(h, span, true, nullptr, merged);
}

// Reverse of one output row.
void reverse_row(const Head& h, const ChunkSpan& span, const Nodes& nodes, int64_t t) {
  const MixerBackward& problem = h.problem;
  const MixerShape& shape = h.shape;
  const Workspace& work = h.work;
  const ChunkRows& rows = work.rows;
  const ChunkRows& gradient = work.gradient;
  const Nodes& adjoint = work.adjoint;
  const int64_t dk = shape.key_dim, dv = shape.value_dim, b = h.sequence.index, row = h.row(span, t);
  const auto weight = [&](int64_t column) { return column < 0 ? 1 : load(problem.lambda, b, row, h.head, column); };
  const auto add_weight = [&](int64_t column, double value) {
    if (column >= 0) work.dlambda[column] += value;
  };
  load_row(problem.dy, b, row, h.head, dv, work.dy);
  fill(work.dlambda, shape.levels, 0);

  // The query's way back: x + (t - s) * dk is what row s sees, the last one what the nodes see.
  load_row(problem.q, b, row, shape.group_of(h.head), dk, work.x);
  for (int64_t i = 0; i < dk; ++i) work.x[i] *= shape.scale;
  double sum = 0;
  for (int64_t s = t; s >= 0; --s) {
    const double* k = rows.k + s * dk;
    const double* x = work.x + (t - s) * dk;
    const double erased = h.delta ? rows.write[s] * dot(k, x, dk) : 0;
    for (int64_t i = 0; i < dk; ++i) work.x[(t - s + 1) * dk + i] = x[i] - erased * k[i];
    work.log_decay[s] = sum;
    sum += rows.gate[s];
  }

  double dgate = 0;  // gradient of the log decays that contain the gate of the row at hand
  fill(work.dx, dk, 0);
  const double* x = work.x + (t + 1) * dk;
  for (int j = 0; j < nodes.count(); ++j) {
    if (!nodes.live(j, span.index)) continue;
    const double decay = std::exp(sum);
    if (!h.delta) sum += nodes.log_decay[j];
    if (decay == 0) continue;
    const int64_t column = nodes.column(j, shape);
    const double factor = weight(column) * decay;
    double read = 0;
    for (int64_t i = 0; i < dk; ++i) {
      const double element = dot(nodes.at(j) + i * dv, work.dy, dv);
      read += x[i] * element;
      work.dx[i] += factor * element;
      add_scaled(adjoint.at(j) + i * dv, factor * x[i], work.dy, dv);
    }
    add_weight(column, decay * read);
    dgate += factor * read;
    for (int newer = 0; !h.delta && newer < j; ++newer) {
      if (nodes.live(newer, span.index)) adjoint.log_decay[newer] += factor * read;
    }
  }

  for (int64_t s = 0; s <= t; ++s) {
    const double* k = rows.k + s * dk;
    const double* v = rows.v + s * dv;
    x = work.x + (t - s) * dk;
    double* dk_row = h.dk(span, s);
    const double write = rows.write[s], match = dot(k, x, dk), decay = std::exp(work.log_decay[s]);
    gradient.gate[s] += dgate;
    if (h.delta) {
      const double kdx = dot(k, work.dx, dk);
      gradient.write[s] -= match * kdx;
      add_scaled(dk_row, -write * match, work.dx, dk);
      add_scaled(dk_row, -write * kdx, x, dk);
      add_scaled(work.dx, -write * kdx, k, dk);
    }
    if (decay == 0) continue;
    const int64_t column = shape.levels == 0 ? -1 : shape.column(level_of(t, s));
    const double factor = weight(column) * decay, value = dot(v, work.dy, dv);
    add_weight(column, decay * match * write * value);
    gradient.write[s] += factor * match * value;
    add_scaled(gradient.v + s * dv, factor * match * write, work.dy, dv);
    add_scaled(dk_row, factor * write * value, x, dk);
    add_scaled(work.dx, factor * write * value, k, dk);
    dgate += factor * match * write * value;
  }
  add_scaled(work.dq + (row - h.sequence.row_begin) * dk, 1, work.dx, dk);
  if (problem.dlambda.present()) store_row(problem.dlambda, b, row, h.head, shape.levels, work.dlambda);
}

// Writes the gradients of a chunk's rows: the call's into its tensors, the history's into the initial gradient.
void store_rows(const Head& h, const ChunkSpan& span) {
  const MixerBackward& problem = h.problem;
  const ChunkRows& gradient = h.work.gradient;
  const int64_t dv = h.shape.value_dim, b = h.sequence.index;
  for (int64_t r = span.lo; r < span.hi; ++r) {
    const int64_t row = h.row(span, r);
    if (problem.dv.present()) store_row(problem.dv, b, row, h.head, dv, gradient.v + r * dv);
    if (problem.dgate.present()) store(problem.dgate, b, row, h.head, 0, gradient.gate[r]);
    if (problem.dwrite.present()) store(problem.dwrite, b, row, h.head, 0, gradient.write[r]);
  }
  const SlotImage& initial = h.sequence.initial_gradient;
  if (initial.tail < 0) return;
  const SlotImage& history = h.sequence.history;
  const TailLayout& layout = problem.gradient.tail_layout;
  for (int64_t r = 0; r < span.lo; ++r) {
    const bool exists = history.tail >= 0 && span.begin + r >= history.start;
    const int64_t ring = tail_ring(initial, layout, h.shape.grain, span.begin + r);
    char* v = problem.gradient.tail_v(initial.tail, h.head, ring);
    for (int64_t i = 0; i < dv; ++i) store_element(v, layout.dtype, i, exists ? gradient.v[r * dv + i] : 0.0);
    store_element(problem.gradient.tail_gate(initial.tail, h.head, ring), layout.gate_dtype(), 0,
                  exists ? gradient.gate[r] : 0.0);
    store_element(problem.gradient.tail_write(initial.tail, h.head, ring), layout.gate_dtype(), 0,
                  exists ? gradient.write[r] : 0.0);
  }
}

void backward_head(const Head& h) {
  const MixerInputs in(h.problem);
  const Workspace& work = h.work;
  const int64_t grain = h.shape.grain, first = h.first(), chunks = chunk_count(h.sequence, grain);
  const Nodes& adjoint = work.adjoint;

  // Forward once more: the nodes before each chunk.
  load_nodes(h.problem.state, h.sequence.history.node, h.head, first, work.before(0));
  for (int64_t c = 0; c + 1 < chunks; ++c) {
    const Nodes from = work.before(c), to = work.before(c + 1);
    for (int64_t i = 0; i < from.count() * from.size; ++i) to.content[i] = from.content[i];
    for (int64_t j = 0; j < from.count(); ++j) to.log_decay[j] = from.log_decay[j];
    load_chunk(in, h.sequence, h.head, ChunkSpan(h.sequence, grain, first + c), work.rows);
    fold_chunk(in, work.rows, first + c, to, work.content, work.dx);
  }

  const SlotImage& final = h.sequence.final_gradient;
  fill(adjoint.content, adjoint.count() * adjoint.size, 0);
  fill(adjoint.log_decay, adjoint.count(), 0);
  if (final.tail >= 0) {
    load_nodes(h.problem.gradient, final.node, h.head, (h.sequence.position + h.sequence.rows) / grain, adjoint);
  }
  for (int64_t c = chunks - 1; c >= 0; --c) {
    const ChunkSpan span(h.sequence, grain, first + c);
    load_chunk(in, h.sequence, h.head, span, work.rows);
    fill(work.gradient.v, span.hi * h.shape.value_dim, 0);
    fill(work.gradient.gate, span.hi, 0);
    fill(work.gradient.write, span.hi, 0);
    if (span.hi == grain)
      reverse_fold(h, span, work.before(c));
    else if (final.tail >= 0)
      add_final_tail(h, span);
    for (int64_t t = span.hi - 1; t >= span.lo; --t) reverse_row(h, span, work.before(c), t);
    store_rows(h, span);
  }

  const SlotImage& initial = h.sequence.initial_gradient;
  if (initial.tail < 0) return;
  for (int j = 0; j < adjoint.count(); ++j) {
    const int32_t id = adjoint.id(initial.node, j);
    if (id < 0) continue;
    if (!adjoint.live(j, first)) fill(adjoint.at(j), adjoint.size, 0);
    store_node(h.problem.gradient, id, h.head, adjoint.at(j), h.delta || !adjoint.live(j, first) ? 0 : adjoint.log_decay[j]);
  }
}

}  // namespace

void MixerBackwardKernel::measure(const void* problem, const Limits& limits, Need* need) {
  Carver carver;
  Workspace().take(&carver, static_cast<const MixerBackward*>(problem)->shape, limits);
  *need = need_per_thread(carver.bytes());
}

int64_t MixerBackwardKernel::tasks(const void* problem, int32_t) {
  const MixerBackward& p = *static_cast<const MixerBackward*>(problem);
  return p.batch.count * p.shape.groups;
}

void MixerBackwardKernel::run(const void* problem_pointer, const Limits& limits, const Scratch& scratch, int32_t,
                              int64_t task) {
  const MixerBackward& problem = *static_cast<const MixerBackward*>(problem_pointer);
  const MixerShape& shape = problem.shape;
  const Sequence& sequence = problem.batch.sequences[task / shape.groups];
  const int64_t group = task % shape.groups, dk = shape.key_dim, grain = shape.grain;
  if (sequence.padding) return;

  Workspace work;
  Carver carver(scratch.thread);
  work.take(&carver, shape, limits);
  const int64_t begin = first_chunk(sequence, grain) * grain, history_rows = sequence.position - begin;
  const int64_t end = sequence.position + sequence.rows;
  fill(work.dq, sequence.rows * dk, 0);
  fill(work.dk, (history_rows + sequence.rows) * dk, 0);

  const SlotMemory& memory = problem.gradient;
  const TailLayout& layout = memory.tail_layout;
  const SlotImage& final = sequence.final_gradient;
  for (int64_t p = end - end % grain; final.tail >= 0 && p < end; ++p) {
    if (p < final.start) continue;
    const void* k = memory.tail_k(final.tail, group, tail_ring(final, layout, grain, p));
    for (int64_t i = 0; i < dk; ++i) work.dk[(p - begin) * dk + i] += load_element<double>(k, layout.dtype, i);
  }
  for (int64_t head = 0; head < shape.heads; ++head) {
    if (shape.group_of(head) != group) continue;
    backward_head({problem, shape, sequence, head, work, shape.mixer == LLA_DELTA_RULE});
  }
  for (int64_t r = 0; r < sequence.rows; ++r) {
    const int64_t row = sequence.row_begin + r;
    for (int64_t i = 0; i < dk; ++i) work.dq[r * dk + i] *= shape.scale;
    if (problem.dq.present()) store_row(problem.dq, sequence.index, row, group, dk, work.dq + r * dk);
    if (problem.dk.present()) store_row(problem.dk, sequence.index, row, group, dk, work.dk + (history_rows + r) * dk);
  }
  const SlotImage& initial = sequence.initial_gradient;
  for (int64_t p = begin; initial.tail >= 0 && p < sequence.position; ++p) {
    const bool exists = sequence.history.tail >= 0 && p >= sequence.history.start;
    char* k = memory.tail_k(initial.tail, group, tail_ring(initial, layout, grain, p));
    for (int64_t i = 0; i < dk; ++i) store_element(k, layout.dtype, i, exists ? work.dk[(p - begin) * dk + i] : 0.0);
  }
}

}  // namespace lla::reference
