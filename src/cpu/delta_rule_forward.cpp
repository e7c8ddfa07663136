// SPDX-License-Identifier: Apache-2.0
// Forward of the delta rule: one task per sequence and head walks the sequence's pieces in order.
#include <algorithm>

#include "cpu/delta_rule.h"

namespace lla::cpu {

namespace {

constexpr int64_t kFewRows = 4;    // queries of an incomplete chunk that are folded back row by row, without an inverse
constexpr int64_t kRowsAhead = 4;  // by which keys are asked for
constexpr int64_t kCacheLine = 64;

struct ForwardScratch {
  DeltaNodes nodes;
  float* y = nullptr;                            // [max(piece rows, kFewRows)][dv]
  float* folded = nullptr;                       // [kFewRows][dk] queries after the fold
  float *weight = nullptr, *exponent = nullptr;  // [grain]
};

void carve_forward(const DeltaShape& shape, const MixerShape& mixer, const Limits& limits, DeltaArena* arena,
                   DeltaHead* head, ForwardScratch* scratch) {
  carve_head(shape, mixer, arena, head);
  const int64_t slots = delta_slots(shape, delta_longest(mixer, limits) / shape.rows);
  float* set = arena->floats(Size(slots) * shape.key_dim * shape.value_dim);
  set_buffers(shape, set, slots, &head->nodes);
  scratch->y = arena->floats(Size(std::max(shape.rows, kFewRows)) * shape.value_dim);
  scratch->folded = arena->floats(Size(kFewRows) * shape.key_dim);
  scratch->weight = arena->floats(mixer.grain);
  scratch->exponent = arena->floats(mixer.grain);
}

void write_rows(const DeltaHead& head, const View& view, int64_t row, int64_t rows, const float* y) {
  const int64_t dv = head.shape.value_dim;
  for (int64_t i = 0; i < rows; ++i) {
    head.simd.narrow(view.at(head.sequence.index, row + i, head.head), view.dtype, y + i * dv, dv);
  }
}

// Rows [first, last) of a chunk where they lie.
struct RowsInPlace {
  int64_t first = 0, last = 0;
  const float *k = nullptr, *v = nullptr;
};

void prefetch_row(const float* row, int64_t n) {
  for (int64_t i = 0; i < n; i += kCacheLine / 4) __builtin_prefetch(row + i);
}

// The rows of the gathered chunk, oldest first; those of the tail in the tail if they were left there.
int list_rows(const DeltaHead& head, bool tail_in_place, RowsInPlace parts[3]) {
  const Chunk& chunk = head.chunk;
  const int64_t dk = head.shape.key_dim, dv = head.shape.value_dim;
  int count = 0;
  int64_t at = 0;
  if (tail_in_place) {
    const SlotMemory& state = *head.in.state;
    const int64_t group = head.in.shape->group_of(head.head);
    const int32_t id = head.sequence.history.tail;
    const TailRows tail = tail_rows(*head.in.shape, state, head.sequence);
    at = tail.first;
    for (int part = 0; part < 2; ++part) {
      if (tail.count[part] == 0) continue;
      parts[count++] = {at, at + tail.count[part], reinterpret_cast<const float*>(state.tail_k(id, group, tail.ring[part])),
                        reinterpret_cast<const float*>(state.tail_v(id, head.head, tail.ring[part]))};
      at += tail.count[part];
    }
    at = chunk.lo;
  }
  parts[count++] = {at, chunk.hi, chunk.k + at * dk, chunk.v + at * dv};
  return count;
}

// Outputs of the last, incomplete chunk when it has few queries: each query goes back through the rows
// (docs/mathematics.md). Most of the time of a step goes into reading rows and nodes, so that rows are not copied.
void read_few_rows(DeltaHead* head, const ForwardScratch& scratch, int64_t index, const View& out) {
  const Simd& simd = head->simd;
  const DeltaShape& shape = head->shape;
  const Chunk& chunk = head->chunk;
  const bool in_place = head->in.state->tail_layout.dtype == LLA_F32 && head->in.state->tails.base;
  gather_chunk(simd, head->in, head->sequence, head->head, index / shape.per_chunk, head->chunk_memory, &head->chunk,
               {.tail = !in_place});
  head->gathered = !in_place;
  RowsInPlace parts[3];
  const int count = list_rows(*head, in_place && chunk.lo > 0, parts);
  const int64_t dk = shape.key_dim, dv = shape.value_dim, m = chunk.hi - chunk.lo;
  DeltaPiece& piece = head->piece;
  for (int64_t i = 0; i < m; ++i) {
    const int64_t t = chunk.lo + i;
    float *x = scratch.folded + i * dk, *weight = scratch.weight, *y = scratch.y + i * dv;
    std::copy(chunk.q + i * dk, chunk.q + (i + 1) * dk, x);
    std::fill(weight, weight + parts[0].first, 0.0f);
    float sum = 0;
    for (int number = count - 1; number >= 0; --number) {
      const RowsInPlace& part = parts[number];
      for (int64_t s = std::min(t + 1, part.last) - 1; s >= part.first; --s) {
        const float* k = part.k + (s - part.first) * dk;
        // The sums below wait for each other; the memory can work meanwhile.
        if (i == 0 && s - kRowsAhead >= part.first) prefetch_row(k - kRowsAhead * dk, dk);
        weight[s] = chunk.write[s] * simd.dot(x, k, dk);
        simd.add_scaled(x, k, -weight[s], dk);
        scratch.exponent[s] = sum;
        sum += chunk.gate[s];
      }
    }
    std::fill(scratch.exponent, scratch.exponent + parts[0].first, 0.0f);
    simd.exp(scratch.exponent, scratch.exponent, t + 1);
    simd.exp(piece.into + i, &sum, 1);
    simd.multiply(weight, weight, scratch.exponent, t + 1);
    if (chunk.lambda) weigh_levels(simd, shape, chunk.lambda + i * shape.levels, t, weight);
    for (int number = 0; number < count; ++number) {
      const RowsInPlace& part = parts[number];
      const int64_t rows = std::min(t + 1, part.last) - part.first;
      simd.outer_product(1, dv, rows, weight + part.first, rows, 1, part.v, dv, y, dv, number > 0);
    }
  }
  piece.n = piece.m = m;
  piece.a = scratch.folded;
  piece.lambda = chunk.lambda;
  pass_nodes(simd, shape, piece, index, false, head->node_scratch, DeltaRecord(), &head->nodes, scratch.y);
  write_rows(*head, out, chunk.row, m, scratch.y);
}

// Stores the nodes that the plan wants at piece `index`, the start of a chunk. Entries that are not live are zero.
void store_nodes(DeltaHead* head, const MixerForward& problem, int64_t index) {
  const Sequence& s = head->sequence;
  for (int64_t i = 0; i < s.nodes_to_store_count; ++i) {
    const NodesToStore& store = s.nodes_to_store[i];
    if (store.position != index * head->shape.rows) continue;
    for (int b = 0; b < kNodes; ++b) {
      const int entry = entry_of_node(head->shape, problem.shape, b);
      if (store.node[b] < 0 || entry < 0 || ((store.write >> b) & 1) == 0) continue;
      const float* content = delta_is_live(head->shape, index, entry) ? head->nodes.content[entry] : nullptr;
      if (!content) {
        float* zero = head->nodes.buffer[entry];
        std::fill(zero, zero + head->shape.node_size(), 0.0f);
        content = zero;
      }
      store_node(head->simd, problem.state, store.node[b], head->head, content, 0.0f);
    }
  }
}

}  // namespace

void measure_delta_forward(const MixerForward& problem, const Limits& limits, Need* need) {
  const DeltaShape shape(problem.shape);
  DeltaArena arena(nullptr);
  const MixerInputs in{};
  const Sequence sequence;
  DeltaHead head(simd(LLA_ISA_BASELINE), shape, in, sequence, 0);
  ForwardScratch scratch;
  carve_forward(shape, problem.shape, limits, &arena, &head, &scratch);
  need->per_thread = arena.bytes();
  need->shared = arena.bytes() < 0 ? -1 : 0;
}

void run_delta_forward(const Simd& simd, const MixerForward& problem, const Limits& limits, const Scratch& scratch,
                       int64_t task) {
  const MixerShape& mixer = problem.shape;
  const int64_t order = task / mixer.heads;
  const Sequence& s = problem.batch.sequences[order];
  if (s.padding) return;
  const DeltaShape shape(mixer);
  const MixerInputs in{&mixer,        &problem.q,     &problem.k,      &problem.v,
                       &problem.gate, &problem.write, &problem.lambda, &problem.state};
  DeltaArena arena(scratch.thread);
  DeltaHead head(simd, shape, in, s, task % mixer.heads);
  ForwardScratch own;
  carve_forward(shape, mixer, limits, &arena, &head, &own);
  if (s.rows > 0) {
    const DeltaSaved saved(shape, mixer, limits, problem.saved, s, order, head.head);
    load_history(&head, false);
    const int64_t first = head.first_piece(), last = head.last_piece();
    bool read = false;  // few rows, whose outputs are written
    for (int64_t index = first; index <= last; ++index) {
      if (float* set = saved.set(index)) store_set(shape, head.nodes, index, set);
      const RowRange rows = rows_of_call(s, mixer.grain, index / shape.per_chunk);
      const bool chunk_complete = rows.end == mixer.grain;
      if (!read && !chunk_complete && rows.end - rows.begin <= kFewRows) {
        read_few_rows(&head, own, index, problem.y);
        read = true;
      }
      if (read && !problem.saved) break;
      gather_chunk_of(&head, index);
      select_piece(&head, index);
      DeltaPiece& piece = head.piece;
      const bool fold = index < last || (chunk_complete && s.nodes_to_store_count > 0);
      prepare_rows(simd, shape, fold, &piece);
      solve_piece(simd, shape, &piece);
      const DeltaRecord record = saved.record(index);
      if (record.triangles) store_triangles(piece, record.triangles);
      if (fold) finish_keys(simd, shape, &piece);
      if (read) {
        forget_queries(&piece);
      } else if (piece.m > 0) {
        finish_queries(simd, shape, &piece);
        read_inside_piece(simd, shape, &piece, own.y);
      }
      pass_nodes(simd, shape, piece, index, fold, head.node_scratch, record, &head.nodes, own.y);
      const int64_t first_row = std::max(head.row_in_chunk(index), head.chunk.lo) - head.chunk.lo;
      write_rows(head, problem.y, head.chunk.row + first_row, piece.m, own.y);
      if (fold && (index + 1) % shape.per_chunk == 0) {
        round_nodes(&head, index + 1);
        store_nodes(&head, problem, index + 1);
      }
    }
  }
  store_tail(simd, problem, s, head.head);
}

}  // namespace lla::cpu
