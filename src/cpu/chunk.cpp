// SPDX-License-Identifier: Apache-2.0
// Gathers the rows of a chunk from call tensors and tail rings, and moves nodes and tail rows between blocks and floats.
#include "cpu/chunk.h"

#include <algorithm>
#include <cstring>

#include "core/fenwick.h"

namespace lla::cpu {

namespace {

constexpr int64_t kBuffer = 256;  // elements converted at once
constexpr int64_t kCacheLine = 64;

int64_t align16(int64_t floats) { return (floats + 15) & ~int64_t{15}; }

// Ring index of position `p` of the slot's current chunk.
int64_t ring_index(const SlotMemory& memory, const SlotImage& image, int64_t grain, int64_t p) {
  const int64_t chunk_start = image.position / grain * grain;
  return (image.tail_origin + p - chunk_start) % memory.tail_layout.capacity;
}

// Position from which the tail ring holds rows.
int64_t first_held(const Sequence& s, int64_t grain) {
  if (s.history.tail < 0) return s.position;
  return std::max(s.history.start, s.position / grain * grain);
}

bool is_first_of_group(const MixerShape& shape, int64_t head) {
  return shape.head_map == LLA_HEAD_MAP_CYCLIC ? head < shape.groups : head % (shape.heads / shape.groups) == 0;
}

// Converts n elements of one type to another.
void convert(const Simd& simd, void* out, int32_t out_dtype, const void* in, int32_t in_dtype, int64_t n) {
  if (out_dtype == in_dtype) {
    std::memcpy(out, in, static_cast<size_t>(n * dtype_size(in_dtype)));
    return;
  }
  float buffer[kBuffer];
  for (int64_t i = 0; i < n; i += kBuffer) {
    const int64_t count = std::min(kBuffer, n - i);
    simd.widen(buffer, offset_elements(in, in_dtype, i), in_dtype, count);
    simd.narrow(offset_elements(out, out_dtype, i), out_dtype, buffer, count);
  }
}

}  // namespace

int64_t chunk_floats(const MixerShape& shape) {
  const int64_t c = shape.grain;
  return 2 * align16(c * shape.key_dim) + align16(c * shape.value_dim) + 2 * align16(c) + align16(c * shape.levels);
}

void gather_view(const Simd& simd, const View& view, const Sequence& s, int64_t row, int64_t rows, int64_t head, int64_t dim,
                 float* out) {
  if (rows <= 0) return;
  if (view.row_stride == dim) {
    simd.widen(out, view.at(s.index, row, head), view.dtype, rows * dim);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) simd.widen(out + i * dim, view.at(s.index, row + i, head), view.dtype, dim);
}

bool is_run(const View& view, int64_t rows, int64_t dim) {
  return view.dtype == LLA_F32 && (view.row_stride == dim || rows == 1);
}

const float* rows_of(const Simd& simd, const View& view, const Sequence& s, int64_t row, int64_t rows, int64_t head,
                     int64_t dim, float* buffer) {
  if (is_run(view, rows, dim)) return static_cast<const float*>(view.at(s.index, row, head));
  if (!buffer) return nullptr;
  gather_view(simd, view, s, row, rows, head, dim, buffer);
  return buffer;
}

void prefetch_view(const View& view, const Sequence& s, int64_t row, int64_t rows, int64_t head, int64_t dim) {
  if (!view.present() || view.row_stride == dim) return;
  const int64_t first = std::max(row, s.row_begin), last = std::min(row + rows, s.row_begin + s.rows);
  const int64_t bytes = dim * dtype_size(view.dtype);
  for (int64_t r = first; r < last; ++r) {
    const char* data = static_cast<const char*>(view.at(s.index, r, head));
    for (int64_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(data + at, 0, 2);
  }
}

void gather_scalars(const View& view, const Sequence& s, int64_t row, int64_t rows, int64_t head, float absent, float* out) {
  if (!view.present()) {
    std::fill(out, out + rows, absent);
    return;
  }
  const char* data = static_cast<const char*>(view.at(s.index, row, head));
  const int64_t step = view.row_stride * dtype_size(view.dtype);
  for (int64_t i = 0; i < rows; ++i) out[i] = load_element<float>(data + i * step, view.dtype, 0);
}

TailRows tail_rows(const MixerShape& shape, const SlotMemory& state, const Sequence& s) {
  TailRows rows;
  const int64_t lo = s.position % shape.grain;
  rows.first = first_held(s, shape.grain) - (s.position - lo);
  rows.last = lo;
  if (rows.first >= rows.last) {
    rows.first = rows.last = lo;
    return rows;
  }
  const int64_t capacity = state.tail_layout.capacity;
  rows.ring[0] = ring_index(state, s.history, shape.grain, s.position - lo + rows.first);
  rows.count[0] = std::min(rows.last - rows.first, capacity - rows.ring[0]);
  rows.count[1] = rows.last - rows.first - rows.count[0];
  return rows;
}

void gather_tail(const Simd& simd, const MixerShape& shape, const SlotMemory& state, const Sequence& s, int64_t head,
                 const TailRows& rows, float* k, float* v, float* gate, float* write) {
  const int64_t dk = shape.key_dim, dv = shape.value_dim, group = shape.group_of(head);
  const int32_t dtype = state.tail_layout.dtype, gate_dtype = state.tail_layout.gate_dtype(), id = s.history.tail;
  if (k) std::fill(k, k + rows.first * dk, 0.0f);
  if (v) std::fill(v, v + rows.first * dv, 0.0f);
  if (gate) std::fill(gate, gate + rows.first, 0.0f);
  if (write) std::fill(write, write + rows.first, 0.0f);
  int64_t at = rows.first;
  for (int part = 0; part < 2; ++part) {
    const int64_t ring = rows.ring[part], count = rows.count[part];
    if (count == 0) continue;
    if (k) simd.widen(k + at * dk, state.tail_k(id, group, ring), dtype, count * dk);
    if (v) simd.widen(v + at * dv, state.tail_v(id, head, ring), dtype, count * dv);
    if (gate) simd.widen(gate + at, state.tail_gate(id, head, ring), gate_dtype, count);
    if (write) simd.widen(write + at, state.tail_write(id, head, ring), gate_dtype, count);
    at += count;
  }
}

void gather_chunk(const Simd& simd, const MixerInputs& in, const Sequence& s, int64_t head, int64_t index, float* memory,
                  Chunk* chunk, const ChunkParts& parts) {
  const MixerShape& shape = *in.shape;
  const int64_t c = shape.grain, dk = shape.key_dim, dv = shape.value_dim, group = shape.group_of(head);
  const int64_t start = index * c;
  chunk->index = index;
  const RowRange own = rows_of_call(s, c, index);
  chunk->lo = own.begin;
  chunk->hi = own.end;
  chunk->row = s.row_begin + start + chunk->lo - s.position;
  const int64_t lo = chunk->lo, rows = chunk->hi - chunk->lo, row = chunk->row;

  chunk->q = memory;
  chunk->k = chunk->q + align16(c * dk);
  chunk->v = chunk->k + align16(c * dk);
  chunk->gate = chunk->v + align16(c * dv);
  chunk->write = chunk->gate + align16(c);
  chunk->lambda = shape.levels > 0 ? chunk->write + align16(c) : nullptr;

  if (parts.queries) {
    gather_view(simd, *in.q, s, row, rows, group, dk, chunk->q);
    if (shape.scale != 1) simd.scale(chunk->q, chunk->q, static_cast<float>(shape.scale), rows * dk);
  }
  if (lo > 0) {
    gather_tail(simd, shape, *in.state, s, head, tail_rows(shape, *in.state, s), parts.tail ? chunk->k : nullptr,
                parts.tail && parts.values ? chunk->v : nullptr, chunk->gate, parts.values ? chunk->write : nullptr);
  }
  gather_view(simd, *in.k, s, row, rows, group, dk, chunk->k + lo * dk);
  gather_scalars(*in.gate, s, row, rows, head, 0.0f, chunk->gate + lo);
  if (parts.values) {
    gather_view(simd, *in.v, s, row, rows, head, dv, chunk->v + lo * dv);
    gather_scalars(*in.write, s, row, rows, head, 1.0f, chunk->write + lo);
  }
  if (parts.queries && chunk->lambda) gather_view(simd, *in.lambda, s, row, rows, head, shape.levels, chunk->lambda);
}

int64_t column_of_node(const MixerShape& shape, int b) {
  if (shape.levels == 0) return -1;
  return b == kAbsorbed ? shape.levels - 1 : shape.column(node_column(b, shape.grain));
}

void store_tail(const Simd& simd, const MixerForward& problem, const Sequence& s, int64_t head) {
  const MixerShape& shape = problem.shape;
  const SlotMemory& state = problem.state;
  if (!state.tails.base) return;
  const TailLayout& layout = state.tail_layout;
  const int64_t dk = shape.key_dim, dv = shape.value_dim, group = shape.group_of(head);
  const bool with_k = is_first_of_group(shape, head);
  const int64_t held = first_held(s, shape.grain);
  for (int64_t n = 0; n < s.tail_to_store_count; ++n) {
    const RowsToStore& store = s.tail_to_store[n];
    if (store.block < 0) continue;
    for (int64_t p = std::max(store.first, held); p < store.last; ++p) {
      const int64_t to = (store.ring + p - store.first) % layout.capacity;
      char* gate = state.tail_gate(store.block, head, to);
      char* write = state.tail_write(store.block, head, to);
      if (p < s.position) {  // the slot's own ring
        const int64_t from = ring_index(state, s.history, shape.grain, p);
        if (store.block == s.history.tail && from == to) continue;
        const size_t gate_bytes = static_cast<size_t>(dtype_size(layout.gate_dtype()));
        if (with_k) {
          std::memcpy(state.tail_k(store.block, group, to), state.tail_k(s.history.tail, group, from),
                      static_cast<size_t>(dk * dtype_size(layout.dtype)));
        }
        std::memcpy(state.tail_v(store.block, head, to), state.tail_v(s.history.tail, head, from),
                    static_cast<size_t>(dv * dtype_size(layout.dtype)));
        std::memcpy(gate, state.tail_gate(s.history.tail, head, from), gate_bytes);
        std::memcpy(write, state.tail_write(s.history.tail, head, from), gate_bytes);
        continue;
      }
      const int64_t row = s.row_begin + p - s.position;
      if (with_k) {
        convert(simd, state.tail_k(store.block, group, to), layout.dtype, problem.k.at(s.index, row, group), problem.k.dtype,
                dk);
      }
      const View& v = problem.v;
      convert(simd, state.tail_v(store.block, head, to), layout.dtype, v.at(s.index, row, head), v.dtype, dv);
      float g = 0, w = 1;
      gather_scalars(problem.gate, s, row, 1, head, 0.0f, &g);
      gather_scalars(problem.write, s, row, 1, head, 1.0f, &w);
      store_element<float>(gate, layout.gate_dtype(), 0, g);
      store_element<float>(write, layout.gate_dtype(), 0, w);
    }
  }
}

void load_node(const Simd& simd, const SlotMemory& memory, int32_t id, int64_t head, float* content, float* log_decay) {
  const NodeLayout& layout = memory.node_layout;
  if (content) simd.widen(content, memory.node(id, head), layout.dtype, layout.key_dim * layout.value_dim);
  if (log_decay) *log_decay = load_element<float>(memory.node_decay(id, head), layout.decay_dtype(), 0);
}

void store_node(const Simd& simd, const SlotMemory& memory, int32_t id, int64_t head, const float* content,
                float log_decay) {
  const NodeLayout& layout = memory.node_layout;
  simd.narrow(memory.node(id, head), layout.dtype, content, layout.key_dim * layout.value_dim);
  store_element<float>(memory.node_decay(id, head), layout.decay_dtype(), 0, log_decay);
}

void round_node(const Simd& simd, const SlotMemory& memory, float* content) {
  const NodeLayout& layout = memory.node_layout;
  if (!memory.nodes.base || layout.dtype == LLA_F32 || layout.dtype == LLA_F64) return;
  const int64_t n = layout.key_dim * layout.value_dim;
  uint16_t buffer[kBuffer];
  for (int64_t i = 0; i < n; i += kBuffer) {
    const int64_t count = std::min(kBuffer, n - i);
    simd.narrow(buffer, layout.dtype, content + i, count);
    simd.widen(content + i, buffer, layout.dtype, count);
  }
}

}  // namespace lla::cpu
