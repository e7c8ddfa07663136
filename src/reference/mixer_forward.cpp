// SPDX-License-Identifier: Apache-2.0
// Mixer forward, token by token in double: one task is one head of one sequence (docs/mathematics.md).
#include "core/fenwick.h"
#include "reference/kernels.h"
#include "reference/mixer.h"

namespace lla::reference {
namespace {

struct Workspace {
  ChunkRows rows;
  Nodes nodes;
  double* content = nullptr;  // [dk][dv] of the chunk that fills up
  double* column = nullptr;   // [dk]
  double* x = nullptr;        // [dk] the query on its way back through the transitions
  double* o = nullptr;        // [dv]

  void take(Carver* carver, const MixerShape& shape, const Limits& limits) {
    rows.take(carver, shape);
    nodes.take(carver, shape, limits);
    content = carver->take(Size(shape.key_dim) * shape.value_dim);
    column = carver->take(shape.key_dim);
    x = carver->take(shape.key_dim);
    o = carver->take(shape.value_dim);
  }
};

void forward_row(const MixerForward& problem, const Sequence& sequence, int64_t head, const ChunkSpan& span, int64_t t,
                 const Workspace& work) {
  const MixerShape& shape = problem.shape;
  const int64_t dk = shape.key_dim, dv = shape.value_dim;
  const bool delta = shape.mixer == LLA_DELTA_RULE;
  const int64_t row = sequence.row_begin + span.begin + t - sequence.position;
  const auto weight = [&](int64_t column) {
    return column < 0 ? 1 : load(problem.lambda, sequence.index, row, head, column);
  };

  load_row(problem.q, sequence.index, row, shape.group_of(head), dk, work.x);
  for (int64_t i = 0; i < dk; ++i) work.x[i] *= shape.scale;
  fill(work.o, dv, 0);

  double log_decay = 0;  // sum of the gates of the rows after s up to t
  for (int64_t s = t; s >= 0; --s) {
    const double* k = work.rows.k + s * dk;
    const double match = dot(work.x, k, dk);
    const double write = work.rows.write[s];
    const int64_t column = shape.levels == 0 ? -1 : shape.column(level_of(t, s));
    add_scaled(work.o, weight(column) * match * write * std::exp(log_decay), work.rows.v + s * dv, dv);
    if (delta) add_scaled(work.x, -write * match, k, dk);
    log_decay += work.rows.gate[s];
  }
  for (int j = 0; j < work.nodes.count(); ++j) {
    if (!work.nodes.live(j, span.index)) continue;
    const double factor = weight(work.nodes.column(j, shape)) * std::exp(log_decay);
    for (int64_t i = 0; i < dk; ++i) add_scaled(work.o, factor * work.x[i], work.nodes.at(j) + i * dv, dv);
    if (!delta) log_decay += work.nodes.log_decay[j];
  }
  store_row(problem.y, sequence.index, row, head, dv, work.o);
}

void store_nodes(const MixerForward& problem, const NodesToStore& plan, int64_t head, const Nodes& nodes, int64_t chunks) {
  for (int j = 0; j < nodes.count(); ++j) {
    const int32_t id = nodes.id(plan.node, j);
    const int bit = j < nodes.separate ? j : kAbsorbed;
    if (id < 0 || !((plan.write >> bit) & 1)) continue;
    if (nodes.live(j, chunks)) store_node(problem.state, id, head, nodes.at(j), nodes.log_decay[j]);
  }
}

// The raw rows that the plan asks for: v, gate and write of the head; k with the first head of its group.
void store_tail(const MixerForward& problem, const Sequence& sequence, int64_t head) {
  const MixerShape& shape = problem.shape;
  const SlotMemory& state = problem.state;
  const TailLayout& layout = state.tail_layout;
  const SlotImage& history = sequence.history;
  const int64_t dk = shape.key_dim, dv = shape.value_dim, group = shape.group_of(head);
  bool stores_k = true;
  for (int64_t h = 0; h < head; ++h) stores_k = stores_k && shape.group_of(h) != group;

  for (int64_t i = 0; i < sequence.tail_to_store_count; ++i) {
    const RowsToStore& plan = sequence.tail_to_store[i];
    for (int64_t p = plan.first; p < plan.last; ++p) {
      const int64_t ring = (plan.ring + p - plan.first) % layout.capacity;
      const auto put = [&](char* to, int32_t dtype, int64_t element, double value) {
        store_element(to, dtype, element, value);
      };
      char* k = state.tail_k(plan.block, group, ring);
      char* v = state.tail_v(plan.block, head, ring);
      char* gate = state.tail_gate(plan.block, head, ring);
      char* write = state.tail_write(plan.block, head, ring);
      if (p >= sequence.position) {
        const int64_t row = sequence.row_begin + p - sequence.position, b = sequence.index;
        for (int64_t e = 0; stores_k && e < dk; ++e) put(k, layout.dtype, e, load(problem.k, b, row, group, e));
        for (int64_t e = 0; e < dv; ++e) put(v, layout.dtype, e, load(problem.v, b, row, head, e));
        put(gate, layout.gate_dtype(), 0, problem.gate.present() ? load(problem.gate, b, row, head) : 0);
        put(write, layout.gate_dtype(), 0, problem.write.present() ? load(problem.write, b, row, head) : 1);
      } else if (history.tail >= 0 && p >= history.start) {
        const int64_t from = tail_ring(history, layout, shape.grain, p);
        const auto copy = [](char* to, const char* source, int64_t bytes) {
          if (to != source) std::memcpy(to, source, static_cast<size_t>(bytes));
        };
        if (stores_k) copy(k, state.tail_k(history.tail, group, from), dk * dtype_size(layout.dtype));
        copy(v, state.tail_v(history.tail, head, from), dv * dtype_size(layout.dtype));
        copy(gate, state.tail_gate(history.tail, head, from), dtype_size(layout.gate_dtype()));
        copy(write, state.tail_write(history.tail, head, from), dtype_size(layout.gate_dtype()));
      }
    }
  }
}

}  // namespace

void MixerForwardKernel::measure(const void* problem, const Limits& limits, Need* need) {
  Carver carver;
  Workspace().take(&carver, static_cast<const MixerForward*>(problem)->shape, limits);
  *need = need_per_thread(carver.bytes());
}

int64_t MixerForwardKernel::tasks(const void* problem, int32_t) {
  const MixerForward& p = *static_cast<const MixerForward*>(problem);
  return p.batch.count * p.shape.heads;
}

void MixerForwardKernel::run(const void* problem_pointer, const Limits& limits, const Scratch& scratch, int32_t,
                             int64_t task) {
  const MixerForward& problem = *static_cast<const MixerForward*>(problem_pointer);
  const MixerShape& shape = problem.shape;
  const Sequence& sequence = problem.batch.sequences[task / shape.heads];
  const int64_t head = task % shape.heads;
  if (sequence.padding) return;

  Workspace work;
  Carver carver(scratch.thread);
  work.take(&carver, shape, limits);
  const MixerInputs in(problem);
  const int64_t first = first_chunk(sequence, shape.grain);
  load_nodes(problem.state, sequence.history.node, head, first, work.nodes);
  int64_t stored = 0;
  for (int64_t c = first; c < first + chunk_count(sequence, shape.grain); ++c) {
    const ChunkSpan span(sequence, shape.grain, c);
    load_chunk(in, sequence, head, span, work.rows);
    for (int64_t t = span.lo; t < span.hi; ++t) forward_row(problem, sequence, head, span, t, work);
    if (span.hi < shape.grain) break;
    fold_chunk(in, work.rows, c, work.nodes, work.content, work.column);
    const int64_t position = span.begin + shape.grain;
    for (; stored < sequence.nodes_to_store_count && sequence.nodes_to_store[stored].position <= position; ++stored) {
      store_nodes(problem, sequence.nodes_to_store[stored], head, work.nodes, c + 1);
    }
  }
  if (problem.state.tails.base) store_tail(problem, sequence, head);
}

}  // namespace lla::reference
