// SPDX-License-Identifier: Apache-2.0
// Backward of the delta rule. One task per sequence, group and part of the group's heads walks its heads' pieces in reverse;
// a second phase sums the parts' gradients of q and k. Node sets and records come from `saved` or from sweeps that keep
// some.
#include <algorithm>

#include "cpu/delta_rule.h"
#include "cpu/delta_rule_gradient.h"

namespace lla::cpu {

namespace {

// Pieces from one kept node set to the next when nothing was saved: about the square root of the number of pieces.
int64_t segment_pieces(int64_t pieces) {
  int64_t segment = 32;  // more than from one saved set to the next
  while (segment * segment < pieces) segment *= 2;
  return segment;
}

int64_t most_pieces(const DeltaShape& shape, const MixerShape& mixer, const Limits& limits) {
  return (limits.rows_per_sequence + mixer.grain - 1) / shape.rows + 1;
}

struct BackwardScratch {
  DeltaNodes gradients;
  DeltaPieceGradient piece;
  DeltaNodeGradientScratch nodes;
  float* dy = nullptr;
  float* row = nullptr;          // [max(dk, dv)]
  float* sets = nullptr;         // node sets of the pieces of a segment
  float* keys = nullptr;         // Kt of these pieces
  float* records = nullptr;      // of these pieces, if nothing was saved
  float* checkpoints = nullptr;  // node sets at the starts of segments, from the second on
  int64_t slots = 0;             // of each of these sets
  int64_t segment = 0;
  int64_t record_size = 0;
};

void carve_backward(const DeltaShape& shape, const MixerShape& mixer, const Limits& limits, DeltaArena* arena,
                    DeltaHead* head, BackwardScratch* scratch) {
  carve_head(shape, mixer, arena, head);
  carve_piece_gradient(shape, arena, &scratch->piece);
  carve_node_gradient_scratch(shape, arena, &scratch->nodes);
  scratch->dy = arena->floats(Size(shape.rows) * shape.value_dim);
  scratch->row = arena->floats(std::max(shape.key_dim, shape.value_dim));
  const int64_t pieces = most_pieces(shape, mixer, limits);
  scratch->segment = segment_pieces(pieces);
  scratch->slots = delta_slots(shape, delta_longest(mixer, limits) / shape.rows);
  const Size set = Size(scratch->slots) * shape.key_dim * shape.value_dim;
  float* gradients = arena->floats(set);
  set_buffers(shape, gradients, scratch->slots, &scratch->gradients);
  scratch->sets = arena->floats(set * std::min(pieces, scratch->segment));
  scratch->keys = arena->floats(Size(shape.rows) * shape.key_dim * std::min(pieces, scratch->segment));
  scratch->record_size = delta_triangle_floats(shape) + scratch->slots * shape.rows * shape.value_dim;
  scratch->records = arena->floats(Size(scratch->record_size) * std::min(pieces, scratch->segment));
  scratch->checkpoints = arena->floats(set * (pieces / scratch->segment));
}

// One head's backward sweep.
struct HeadBackward {
  DeltaHead* head;
  BackwardScratch* scratch;
  const MixerBackward* problem;
  const DeltaRowsOut* out;
  int64_t set_size;

  float* set(int64_t number) const { return scratch->sets + number * set_size; }

  // Of piece `number` of the segment, which is piece `index`.
  float* keys(int64_t number) const { return scratch->keys + number * head->shape.rows * head->shape.key_dim; }
  DeltaRecord scratch_record(int64_t number, int64_t index) const {
    float* memory = scratch->records + number * scratch->record_size;
    return {memory, memory + delta_triangle_floats(head->shape), index};
  }

  // Moves the nodes from the start of piece `index` to its end, as forward did, and keeps a record if there is room for one.
  void advance(int64_t index, const DeltaRecord& keep) const {
    gather_chunk_of(head, index);
    select_piece(head, index);
    DeltaPiece& piece = head->piece;
    if (!keep.triangles) piece.m = 0;
    prepare_rows(head->simd, head->shape, true, &piece);
    solve_piece(head->simd, head->shape, &piece);
    if (keep.triangles) store_triangles(piece, keep.triangles);
    finish_keys(head->simd, head->shape, &piece);
    forget_queries(&piece);
    pass_nodes(head->simd, head->shape, piece, index, true, head->node_scratch, keep, &head->nodes, nullptr);
    if ((index + 1) % head->shape.per_chunk == 0) round_nodes(head, index + 1);
  }

  // The same from forward's record.
  void replay(const DeltaRecord& record) const {
    const bool writes = !record.z_of(head->shape, DeltaMerge(head->shape, record.index).target);
    if ((record.index + 1) % head->shape.per_chunk != 0) {  // the next piece needs all of the chunk
      gather_chunk_of(head, record.index);
    } else {
      gather_chunk(head->simd, head->in, head->sequence, head->head, record.index / head->shape.per_chunk,
                   head->chunk_memory, &head->chunk, {.queries = false, .values = writes});
      head->gathered = false;
    }
    select_piece(head, record.index);
    head->piece.m = 0;
    prepare_replay(head->simd, head->shape, writes, &head->piece);
    load_triangles(record.triangles, &head->piece);
    finish_keys(head->simd, head->shape, &head->piece);
    replay_nodes(head->simd, head->shape, head->piece, record, head->node_scratch, &head->nodes);
    if ((record.index + 1) % head->shape.per_chunk == 0) round_nodes(head, record.index + 1);
  }

  void keep_checkpoints(int64_t first, int64_t last, int64_t segment) const {
    set_buffers(head->shape, set(0), scratch->slots, &head->nodes);
    load_history(head, true);
    const int64_t final = first + (last - first) / segment * segment;
    for (int64_t index = first; index < final; ++index) {
      advance(index, DeltaRecord());
      const int64_t done = index + 1 - first;
      if (done % segment == 0) {
        store_set(head->shape, head->nodes, index + 1, scratch->checkpoints + (done / segment - 1) * set_size);
      }
    }
  }

  // Asks for the rows that a piece's gradients are written to.
  void prefetch_results(int64_t row, int64_t rows) const {
    const Sequence& s = head->sequence;
    if (!out->dq) {
      const int64_t group = head->in.shape->group_of(head->head);
      prefetch_view(problem->dq, s, row, rows, group, head->shape.key_dim);
      prefetch_view(problem->dk, s, row, rows, group, head->shape.key_dim);
    }
    prefetch_view(problem->dv, s, row, rows, head->head, head->shape.value_dim);
  }

  // `keys`: its Kt if that is there already.
  void backward_piece(int64_t index, const DeltaRecord& record, float* keys) const {
    const DeltaShape& shape = head->shape;
    gather_chunk_of(head, index);
    select_piece(head, index);
    DeltaPiece& piece = head->piece;
    const int64_t query = std::max(head->row_in_chunk(index), head->chunk.lo) - head->chunk.lo;
    const int64_t row = head->chunk.row + query;
    prefetch_results(row, piece.m);
    bool fold = false;
    if (piece.n == shape.rows) {
      for_live_entries(shape, index + 1, [&](int e) { fold = fold || scratch->gradients.content[e]; });
    }
    prepare_rows(head->simd, shape, fold, &piece);
    if (record.triangles) {
      load_triangles(record.triangles, &piece);
    } else {
      solve_piece(head->simd, shape, &piece);
    }
    if (piece.m > 0) finish_queries(head->simd, shape, &piece);
    float* const own_keys = piece.kt;
    if (keys) {
      piece.kt = keys;
    } else if (fold) {
      finish_keys(head->simd, shape, &piece);
    }
    DeltaPieceGradient& gradient = scratch->piece;
    gradient.dy = rows_of(head->simd, problem->dy, head->sequence, row, piece.m, head->head, shape.value_dim, scratch->dy);
    gradient.dkb = gradient.da + piece.m * shape.key_dim;
    pass_nodes_backward(head->simd, shape, piece, index, fold, head->nodes, record, scratch->nodes, &scratch->gradients,
                        &gradient);
    piece_backward(head->simd, shape, fold, &piece, &gradient);
    piece.kt = own_keys;
    write_piece_gradient(*head, *problem, *out, index, scratch->row, &gradient);
  }

  void run(const DeltaSaved& saved) const {
    const DeltaShape& shape = head->shape;
    const int64_t first = head->first_piece(), last = head->last_piece(), boundary = head->end_boundary();
    const int64_t segment = scratch->segment;
    if (!problem->saved && last - first >= segment) keep_checkpoints(first, last, segment);
    std::fill(scratch->gradients.content, scratch->gradients.content + kDeltaEntries, nullptr);
    for (int64_t end = last; end >= first;) {
      const int64_t start = problem->saved ? saved.start_of(end) : first + (end - first) / segment * segment;
      const float* kept = nullptr;
      if (start > first) {
        kept = problem->saved ? saved.set(start) : scratch->checkpoints + ((start - first) / segment - 1) * set_size;
      }
      // Contents at the start of each piece of the segment; those of the first lie elsewhere.
      set_buffers(shape, set(0), scratch->slots, &head->nodes);
      if (kept) {
        use_set(shape, start, kept, &head->nodes);
      } else {
        load_history(head, true);
      }
      const DeltaNodes at_start = head->nodes;
      for (int64_t index = start; index < end; ++index) {
        set_buffers(shape, set(index + 1 - start), scratch->slots, &head->nodes);
        float* const own_keys = head->piece.kt;
        head->piece.kt = keys(index - start);
        if (problem->saved) {
          replay(saved.record(index));
        } else {
          advance(index, scratch_record(index - start, index));
        }
        head->piece.kt = own_keys;
      }
      for (int64_t index = end; index >= start; --index) {
        if (index + 1 == boundary) add_final_nodes(*head, *problem, boundary, scratch->nodes.sum, &scratch->gradients);
        if (index == start) {
          head->nodes = at_start;
        } else {
          set_buffers(shape, set(index - start), scratch->slots, &head->nodes);
          use_buffers(shape, index, &head->nodes);
        }
        const bool has_keys = index < end;
        DeltaRecord record = problem->saved ? saved.record(index) : DeltaRecord();
        if (!problem->saved && has_keys) record = scratch_record(index - start, index);
        backward_piece(index, record, has_keys ? keys(index - start) : nullptr);
      }
      end = start - 1;
    }
    if (boundary == first) add_final_nodes(*head, *problem, boundary, scratch->nodes.sum, &scratch->gradients);
    write_initial_nodes(*head, *problem, first, scratch->gradients);
  }
};

}  // namespace

void measure_delta_backward(const MixerBackward& problem, const Limits& limits, Need* need) {
  const MixerShape& mixer = problem.shape;
  const DeltaShape shape(mixer);
  const MixerInputs in{};
  const Sequence sequence;
  DeltaArena arena(nullptr);
  DeltaHead head(simd(LLA_ISA_BASELINE), shape, in, sequence, 0);
  BackwardScratch scratch;
  carve_backward(shape, mixer, limits, &arena, &head, &scratch);
  need->per_thread = arena.bytes();
  need->shared = arena.bytes() < 0 ? -1 : delta_partial_bytes(mixer, limits);
}

int32_t delta_backward_phases(const MixerBackward& problem) { return problem.shape.heads > problem.shape.groups ? 2 : 1; }

int64_t delta_backward_tasks(const MixerBackward& problem, int32_t phase) {
  const int64_t groups = problem.batch.count * problem.shape.groups;
  return phase == 0 ? groups * delta_parts(problem.shape) : groups;
}

void run_delta_backward(const Simd& simd, const MixerBackward& problem, const Limits& limits, const Scratch& scratch,
                        int32_t phase, int64_t task) {
  const MixerShape& mixer = problem.shape;
  const DeltaShape shape(mixer);
  const MixerInputs in{&mixer,        &problem.q,     &problem.k,      &problem.v,
                       &problem.gate, &problem.write, &problem.lambda, &problem.state};
  const int64_t parts = phase == 0 ? delta_parts(mixer) : 1;
  const int64_t part = task % parts, group = task / parts % mixer.groups, order = task / parts / mixer.groups;
  const Sequence& s = problem.batch.sequences[order];
  if (s.padding) return;
  if (phase == 1) {
    if (s.rows > 0) reduce_parts(simd, in, problem, limits, scratch, order, group);
    return;
  }
  const int64_t share = mixer.heads / mixer.groups, first = share * part / parts, last = share * (part + 1) / parts;
  for (int64_t j = first; j < last; ++j) {
    DeltaArena arena(scratch.thread);
    const bool cyclic = mixer.head_map == LLA_HEAD_MAP_CYCLIC;
    DeltaHead head(simd, shape, in, s, cyclic ? j * mixer.groups + group : group * share + j);
    BackwardScratch own;
    carve_backward(shape, mixer, limits, &arena, &head, &own);
    const DeltaRowsOut out(mixer, limits, scratch, s, order, group, part, j == first, j == 0);
    if (s.rows <= 0) {
      pass_through_gradient(head, problem, out, own.row);
      continue;
    }
    const HeadBackward sweep{&head, &own, &problem, &out, own.slots * shape.node_size()};
    sweep.run(DeltaSaved(shape, mixer, limits, problem.saved, s, order, head.head));
  }
}

}  // namespace lla::cpu
