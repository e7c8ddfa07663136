// SPDX-License-Identifier: Apache-2.0
// Writes gradients of rows and of initial states, reads those of final states, sums the parts of a group.
#include "cpu/delta_rule_gradient.h"

#include <algorithm>

namespace lla::cpu {

namespace {

bool wants_initial(const Sequence& s) { return s.initial_gradient.tail >= 0; }

int64_t ring_of(const SlotMemory& memory, const SlotImage& image, int64_t row_in_chunk) {
  return (image.tail_origin + row_in_chunk) % memory.tail_layout.capacity;
}

// Where a row of floats can be put at once; null: it is converted, or added to what is there.
float* in_place(const View& view, const Sequence& s, int64_t row, int64_t head) {
  const bool plain = view.present() && view.dtype == LLA_F32 && !view.accumulate;
  return plain ? static_cast<float*>(view.at(s.index, row, head)) : nullptr;
}

void write(const Simd& simd, const View& view, const Sequence& s, int64_t row, int64_t head, const float* in, int64_t n) {
  if (!view.present()) return;
  void* out = view.at(s.index, row, head);
  if (view.accumulate) {
    simd.narrow_add(out, view.dtype, in, n);
  } else {
    simd.narrow(out, view.dtype, in, n);
  }
}

// Rows of the parts' gradients: every sequence has room for the history's rows before its own.
Size partial_rows(const MixerShape& mixer, const Limits& limits) {
  return Size(limits.rows) + Size(limits.sequences) * mixer.grain;
}
Size partial_floats(const MixerShape& mixer, const Limits& limits) {  // of dq or dk of one part
  return (partial_rows(mixer, limits) * mixer.key_dim * 4).aligned(kAlignment);
}
float* partial(const MixerShape& mixer, const Limits& limits, const Scratch& scratch, const Sequence& s, int64_t order,
               int64_t group, int64_t part, int which) {
  const int64_t number = (group * delta_parts(mixer) + part) * 2 + which;
  float* base = reinterpret_cast<float*>(scratch.shared + number * partial_floats(mixer, limits).value());
  return base + (s.row_begin + order * mixer.grain) * mixer.key_dim;
}

// The gradient of the final tail's row `local` of its chunk, added to the row's gradients (null ones are not wanted).
void add_final_row(const DeltaHead& head, const MixerBackward& problem, int64_t local, float* row, float* dk, float* dv,
                   float* dgate, float* dwrite) {
  const Simd& simd = head.simd;
  const SlotMemory& memory = problem.gradient;
  const SlotImage& image = head.sequence.final_gradient;
  const int64_t ring = ring_of(memory, image, local), group = problem.shape.group_of(head.head);
  const int32_t dtype = memory.tail_layout.dtype, gate_dtype = memory.tail_layout.gate_dtype();
  if (dk) {
    simd.widen(row, memory.tail_k(image.tail, group, ring), dtype, head.shape.key_dim);
    simd.add_scaled(dk, row, 1, head.shape.key_dim);
  }
  simd.widen(row, memory.tail_v(image.tail, head.head, ring), dtype, head.shape.value_dim);
  simd.add_scaled(dv, row, 1, head.shape.value_dim);
  *dgate += load_element<float>(memory.tail_gate(image.tail, head.head, ring), gate_dtype, 0);
  *dwrite += load_element<float>(memory.tail_write(image.tail, head.head, ring), gate_dtype, 0);
}

void write_initial_k(const Simd& simd, const SlotMemory& memory, const SlotImage& image, int64_t group, int64_t local,
                     const float* dk) {
  const TailLayout& layout = memory.tail_layout;
  simd.narrow(memory.tail_k(image.tail, group, ring_of(memory, image, local)), layout.dtype, dk, layout.key_dim);
}

void write_initial_row(const DeltaHead& head, const SlotMemory& memory, int64_t local, const float* dv, float dgate,
                       float dwrite) {
  const SlotImage& image = head.sequence.initial_gradient;
  const TailLayout& layout = memory.tail_layout;
  const int64_t ring = ring_of(memory, image, local);
  head.simd.narrow(memory.tail_v(image.tail, head.head, ring), layout.dtype, dv, layout.value_dim);
  store_element<float>(memory.tail_gate(image.tail, head.head, ring), layout.gate_dtype(), 0, dgate);
  store_element<float>(memory.tail_write(image.tail, head.head, ring), layout.gate_dtype(), 0, dwrite);
}

}  // namespace

int64_t delta_partial_bytes(const MixerShape& mixer, const Limits& limits) {
  if (mixer.heads == mixer.groups) return 0;
  const Size bytes = partial_floats(mixer, limits) * 2 * mixer.groups * delta_parts(mixer);
  return bytes.valid() ? bytes.value() : -1;
}

DeltaRowsOut::DeltaRowsOut(const MixerShape& mixer, const Limits& limits, const Scratch& scratch, const Sequence& s,
                           int64_t order, int64_t group, int64_t part, bool first_of_part, bool first_head)
    : add(!first_of_part), first_of_group(first_head) {
  if (mixer.heads == mixer.groups) return;
  dq = partial(mixer, limits, scratch, s, order, group, part, 0);
  dk = partial(mixer, limits, scratch, s, order, group, part, 1);
}

void write_piece_gradient(const DeltaHead& head, const MixerBackward& problem, const DeltaRowsOut& out, int64_t index,
                          float* row, DeltaPieceGradient* gradient) {
  const Simd& simd = head.simd;
  const MixerShape& mixer = problem.shape;
  const Sequence& s = head.sequence;
  const Chunk& chunk = head.chunk;
  const int64_t dk = head.shape.key_dim, dv = head.shape.value_dim, group = mixer.group_of(head.head);
  const int64_t begin = head.row_in_chunk(index);
  const int64_t from_start = (index - head.first_piece()) * head.shape.rows;
  const bool with_final = !chunk.complete(mixer.grain) && s.final_gradient.tail >= 0;
  const int64_t held = chunk.lo > 0 ? tail_rows(mixer, problem.state, s).first : 0;  // rows before it do not exist

  for (int64_t r = 0; r < head.piece.n; ++r) {
    const int64_t local = begin + r;
    if (local < held) continue;
    float *dk_row = gradient->dk + r * dk, *dv_row = gradient->du + r * dv;
    const bool of_call = local >= chunk.lo;
    const int64_t absolute = chunk.row + local - chunk.lo;
    // The gradient of v is that of U times the write gate.
    float* const placed = of_call && !with_final ? in_place(problem.dv, s, absolute, head.head) : nullptr;
    simd.scale(placed ? placed : dv_row, dv_row, head.piece.write[r], dv);
    if (with_final && chunk.index * mixer.grain + local >= s.final_gradient.start) {  // earlier ones were never written
      add_final_row(head, problem, local, row, out.first_of_group ? dk_row : nullptr, dv_row, gradient->dgate + r,
                    gradient->dwrite + r);
    }
    if (out.dk) {
      float* to = out.dk + (from_start + r) * dk;
      if (out.add) {
        simd.add_scaled(to, dk_row, 1, dk);
      } else {
        std::copy(dk_row, dk_row + dk, to);
      }
    }
    if (!of_call) {
      if (!wants_initial(s)) continue;
      if (!out.dk) write_initial_k(simd, problem.gradient, s.initial_gradient, group, local, dk_row);
      write_initial_row(head, problem.gradient, local, dv_row, gradient->dgate[r], gradient->dwrite[r]);
      continue;
    }
    const int64_t query = r - head.piece.lo();
    float *const dq_row = gradient->da + query * dk, *const part = out.dq ? out.dq + (from_start + r) * dk : nullptr;
    float* const placed_q = part ? part : in_place(problem.dq, s, absolute, group);
    const auto scale = static_cast<float>(mixer.scale);
    if (part && out.add) {
      simd.add_scaled(part, dq_row, scale, dk);
    } else {
      simd.scale(placed_q ? placed_q : dq_row, dq_row, scale, dk);
    }
    if (!placed_q) write(simd, problem.dq, s, absolute, group, dq_row, dk);
    if (!part) write(simd, problem.dk, s, absolute, group, dk_row, dk);
    if (!placed) write(simd, problem.dv, s, absolute, head.head, dv_row, dv);
    write(simd, problem.dgate, s, absolute, head.head, gradient->dgate + r, 1);
    write(simd, problem.dwrite, s, absolute, head.head, gradient->dwrite + r, 1);
    write(simd, problem.dlambda, s, absolute, head.head, gradient->dlambda + query * mixer.levels, mixer.levels);
  }
}

void pass_through_gradient(const DeltaHead& head, const MixerBackward& problem, const DeltaRowsOut& out, float* row) {
  const Sequence& s = head.sequence;
  if (!wants_initial(s)) return;
  const Simd& simd = head.simd;
  const SlotMemory& memory = problem.gradient;
  const bool with_final = s.final_gradient.tail >= 0;
  const int64_t index = head.first_piece(), size = head.shape.node_size();
  for (int b = 0; b < kNodes; ++b) {
    const int entry = entry_of_node(head.shape, problem.shape, b);
    if (s.initial_gradient.node[b] < 0 || entry < 0) continue;
    // In blocks of a row, since there is no room for a node here.
    char* to = memory.node(s.initial_gradient.node[b], head.head);
    const int32_t dtype = memory.node_layout.dtype;
    const bool given = with_final && s.final_gradient.node[b] >= 0 && delta_is_live(head.shape, index, entry);
    for (int64_t i = 0; i < size; i += head.shape.value_dim) {
      std::fill(row, row + head.shape.value_dim, 0.0f);
      if (given) {
        const char* from = memory.node(s.final_gradient.node[b], head.head);
        simd.widen(row, offset_elements(from, dtype, i), dtype, head.shape.value_dim);
      }
      simd.narrow(offset_elements(to, dtype, i), dtype, row, head.shape.value_dim);
    }
    char* decay = memory.node_decay(s.initial_gradient.node[b], head.head);
    store_element<float>(decay, memory.node_layout.decay_dtype(), 0, 0.0f);
  }
  const TailRows rows = tail_rows(problem.shape, problem.state, s);
  const int64_t group = problem.shape.group_of(head.head);
  const int32_t dtype = memory.tail_layout.dtype, gate_dtype = memory.tail_layout.gate_dtype();
  const SlotImage& image = s.final_gradient;
  const int64_t chunk_start = s.position / problem.shape.grain * problem.shape.grain;
  for (int64_t local = rows.first; local < rows.last; ++local) {
    const bool given = with_final && chunk_start + local >= image.start;  // earlier ones were never written
    const int64_t ring = given ? ring_of(memory, image, local) : 0;
    if (out.first_of_group) {
      std::fill(row, row + head.shape.key_dim, 0.0f);
      if (given) simd.widen(row, memory.tail_k(image.tail, group, ring), dtype, head.shape.key_dim);
      write_initial_k(simd, memory, s.initial_gradient, group, local, row);
    }
    std::fill(row, row + head.shape.value_dim, 0.0f);
    float dgate = 0, dwrite = 0;
    if (given) {
      simd.widen(row, memory.tail_v(image.tail, head.head, ring), dtype, head.shape.value_dim);
      dgate = load_element<float>(memory.tail_gate(image.tail, head.head, ring), gate_dtype, 0);
      dwrite = load_element<float>(memory.tail_write(image.tail, head.head, ring), gate_dtype, 0);
    }
    write_initial_row(head, memory, local, row, dgate, dwrite);
  }
}

void add_final_nodes(const DeltaHead& head, const MixerBackward& problem, int64_t index, float* temporary,
                     DeltaNodes* gradients) {
  const SlotImage& image = head.sequence.final_gradient;
  if (image.tail < 0) return;
  for (int b = 0; b < kNodes; ++b) {
    const int entry = entry_of_node(head.shape, problem.shape, b);
    if (image.node[b] < 0 || entry < 0 || !delta_is_live(head.shape, index, entry)) continue;
    const bool empty = !gradients->content[entry];
    load_node(head.simd, problem.gradient, image.node[b], head.head, empty ? gradients->buffer[entry] : temporary, nullptr);
    if (!empty) head.simd.add_scaled(gradients->buffer[entry], temporary, 1, head.shape.node_size());
    gradients->content[entry] = gradients->buffer[entry];
  }
}

void write_initial_nodes(const DeltaHead& head, const MixerBackward& problem, int64_t index, const DeltaNodes& gradients) {
  const SlotImage& image = head.sequence.initial_gradient;
  if (image.tail < 0) return;
  for (int b = 0; b < kNodes; ++b) {
    const int entry = entry_of_node(head.shape, problem.shape, b);
    if (image.node[b] < 0 || entry < 0) continue;
    float* out = gradients.buffer[entry];
    if (!delta_is_live(head.shape, index, entry) || !gradients.content[entry]) {
      std::fill(out, out + head.shape.node_size(), 0.0f);
    }
    store_node(head.simd, problem.gradient, image.node[b], head.head, out, 0.0f);
  }
}

void reduce_parts(const Simd& simd, const MixerInputs& in, const MixerBackward& problem, const Limits& limits,
                  const Scratch& scratch, int64_t order, int64_t group) {
  const MixerShape& mixer = *in.shape;
  const Sequence& s = problem.batch.sequences[order];
  const int64_t dk = mixer.key_dim, lo = s.position % mixer.grain, parts = delta_parts(mixer);
  const int64_t held = tail_rows(mixer, problem.state, s).first;
  float* row = reinterpret_cast<float*>(scratch.thread);
  const auto sum = [&](int which, int64_t r) {
    for (int64_t part = 0; part < parts; ++part) {
      const float* from = partial(mixer, limits, scratch, s, order, group, part, which) + r * dk;
      if (part == 0) {
        std::copy(from, from + dk, row);
      } else {
        simd.add_scaled(row, from, 1, dk);
      }
    }
  };
  for (int64_t r = held; r < lo; ++r) {
    if (!wants_initial(s)) break;
    sum(1, r);
    write_initial_k(simd, problem.gradient, s.initial_gradient, group, r, row);
  }
  for (int64_t i = 0; i < s.rows; ++i) {
    if (problem.dq.present()) {
      sum(0, lo + i);
      write(simd, problem.dq, s, s.row_begin + i, group, row, dk);
    }
    if (problem.dk.present()) {
      sum(1, lo + i);
      write(simd, problem.dk, s, s.row_begin + i, group, row, dk);
    }
  }
}

}  // namespace lla::cpu
