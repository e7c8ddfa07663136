// SPDX-License-Identifier: Apache-2.0
// How a slot's history lies in blocks: plain layout arithmetic shared by the core, which plans, and the backends, which
// read and write. No floating-point work.
//
// Three kinds of blocks, each in a pool of its own per layer (base + id * stride):
//   node  per head one span: S [dk][dv] in the node type, then one log decay P (float; double if the node type is F64).
//   tail  raw rows as a ring of `capacity` rows: k [G][capacity][dk], v [H][capacity][dv] in the tail type, then
//         gate [H][capacity] and write [H][capacity] (float; double if the tail type is F64).
//   conv  raw convolution inputs as a ring: [channels][capacity] (float; double if the tail type is F64).
//
// Rings. A slot that stands at position n, with a = floor(n / C) * C, holds the rows [a, n) of its tail; row p lies at ring
// index (tail_origin + p - a) mod capacity. Of the convolution it holds `conv_rows` rows before n; row n - i (i >= 1) lies
// at ring index (conv_origin - i) mod conv_capacity. Rows before `start` count as zero and are never read.
// Capacities leave room for uncommitted rows beside committed ones, so that an append destroys nothing:
//   tail: C + max(C, max_draft);  conv: 2 * (W - 1) + C + max(C, max_draft).
#pragma once

#include <cstdint>

#include "plugin/numeric.h"

namespace lla {

constexpr int kNodeLevels = 48;          // separate node levels that a record can hold
constexpr int kAbsorbed = kNodeLevels;   // index of the one node of linear layers and of absorbing ones
constexpr int kNodes = kNodeLevels + 1;  // entries of a record

LLA_HOST_DEVICE inline int64_t align64(int64_t bytes) { return (bytes + 63) & ~int64_t{63}; }

struct NodeLayout {
  int64_t heads = 0, key_dim = 0, value_dim = 0;
  int32_t dtype = LLA_F32;

  LLA_HOST_DEVICE int32_t decay_dtype() const { return dtype == LLA_F64 ? LLA_F64 : LLA_F32; }
  LLA_HOST_DEVICE int64_t decay_offset() const {  // within a head's span
    return (key_dim * value_dim * dtype_size(dtype) + 7) & ~int64_t{7};
  }
  LLA_HOST_DEVICE int64_t head_bytes() const { return align64(decay_offset() + 8); }
  LLA_HOST_DEVICE int64_t bytes() const { return heads * head_bytes(); }
};

struct TailLayout {
  int64_t heads = 0, groups = 0, key_dim = 0, value_dim = 0, capacity = 0;
  int32_t dtype = LLA_F32;

  LLA_HOST_DEVICE int32_t gate_dtype() const { return dtype == LLA_F64 ? LLA_F64 : LLA_F32; }
  LLA_HOST_DEVICE int64_t k_span() const { return align64(capacity * key_dim * dtype_size(dtype)); }
  LLA_HOST_DEVICE int64_t v_span() const { return align64(capacity * value_dim * dtype_size(dtype)); }
  LLA_HOST_DEVICE int64_t gate_span() const { return align64(capacity * dtype_size(gate_dtype())); }
  LLA_HOST_DEVICE int64_t k_offset(int64_t group, int64_t ring) const {
    return group * k_span() + ring * key_dim * dtype_size(dtype);
  }
  LLA_HOST_DEVICE int64_t v_offset(int64_t head, int64_t ring) const {
    return groups * k_span() + head * v_span() + ring * value_dim * dtype_size(dtype);
  }
  LLA_HOST_DEVICE int64_t gate_offset(int64_t head, int64_t ring) const {
    return groups * k_span() + heads * v_span() + head * gate_span() + ring * dtype_size(gate_dtype());
  }
  LLA_HOST_DEVICE int64_t write_offset(int64_t head, int64_t ring) const { return gate_offset(heads + head, ring); }
  LLA_HOST_DEVICE int64_t bytes() const { return gate_offset(2 * heads, 0); }
};

struct ConvLayout {
  int64_t channels = 0, capacity = 0;
  int32_t dtype = LLA_F32;

  LLA_HOST_DEVICE int64_t offset(int64_t channel, int64_t ring) const {
    return (channel * capacity + ring) * dtype_size(dtype);
  }
  LLA_HOST_DEVICE int64_t bytes() const { return align64(channels * capacity * dtype_size(dtype)); }
};

// Memory of one layer's pools. `base` null: the layer has no such block (or the call no state).
struct Pool {
  char* base = nullptr;
  int64_t stride = 0;
  LLA_HOST_DEVICE char* block(int32_t id) const { return base + static_cast<int64_t>(id) * stride; }
};

struct SlotMemory {
  NodeLayout node_layout;
  TailLayout tail_layout;
  ConvLayout conv_layout;
  Pool nodes, tails, convs;
  // A problem may be a slice of the layer's heads: its head h is the layer's head first_head + h * head_step, its group g
  // the layer's group first_group + g.
  int64_t first_head = 0, head_step = 1, first_group = 0;

  LLA_HOST_DEVICE int64_t layer_head(int64_t head) const { return first_head + head * head_step; }
  LLA_HOST_DEVICE char* node(int32_t id, int64_t head) const {
    return nodes.block(id) + layer_head(head) * node_layout.head_bytes();
  }
  LLA_HOST_DEVICE char* node_decay(int32_t id, int64_t head) const { return node(id, head) + node_layout.decay_offset(); }
  LLA_HOST_DEVICE char* tail_k(int32_t id, int64_t group, int64_t ring) const {
    return tails.block(id) + tail_layout.k_offset(first_group + group, ring);
  }
  LLA_HOST_DEVICE char* tail_v(int32_t id, int64_t head, int64_t ring) const {
    return tails.block(id) + tail_layout.v_offset(layer_head(head), ring);
  }
  LLA_HOST_DEVICE char* tail_gate(int32_t id, int64_t head, int64_t ring) const {
    return tails.block(id) + tail_layout.gate_offset(layer_head(head), ring);
  }
  LLA_HOST_DEVICE char* tail_write(int32_t id, int64_t head, int64_t ring) const {
    return tails.block(id) + tail_layout.write_offset(layer_head(head), ring);
  }
  LLA_HOST_DEVICE char* conv(int32_t id, int64_t channel, int64_t ring) const {
    return convs.block(id) + conv_layout.offset(channel, ring);
  }
};

// A history at one position, by block ids. The same for all layers of a group.
struct SlotImage {
  int64_t position = 0;
  int64_t start = 0;        // everything before is zero
  int64_t floor = 0;        // the slot is not to be taken back below this position (kernels do not look at it)
  int32_t tail = -1;        // block id of tail and conv; -1 = there is no history at all
  int32_t tail_origin = 0;  // ring index of the first row of the position's own chunk
  int32_t conv_origin = 0;  // ring index of the next row
  int32_t conv_rows = 0;    // rows before `position` that the conv ring holds
  int32_t node[kNodes];     // block id of node b, -1 = zero; bit b of floor(position / C) is set where it is >= 0

  // Whether anything came before: a slot that was never written may have blocks already.
  LLA_HOST_DEVICE bool has_past() const { return tail >= 0 && start < position; }

  LLA_HOST_DEVICE SlotImage() {
    for (int32_t& id : node) id = -1;
  }
};

// Rows [first, last) of the sequence are to be stored in ring block `block`, row `first` at ring index `ring`. Rows before
// the call's first position come from the slot's own ring, later ones from the call's tensors; rows before `start` are
// skipped.
struct RowsToStore {
  int32_t block = -1;
  int32_t ring = 0;
  int64_t first = 0, last = 0;
};

// When the sequence has reached `position` (a multiple of C), its nodes are to stand in these blocks. Bit b of `write` set:
// the block is fresh and the kernel writes it (all heads); clear: the block holds that node already, nothing to do. A layer
// ignores entries that it does not use (linear layers use kAbsorbed only). Entry -1: no node of that level.
// Chunks are numbered absolutely: position / C.
struct NodesToStore {
  int64_t position = 0;
  uint64_t write = 0;
  int32_t node[kNodes];
};

}  // namespace lla
