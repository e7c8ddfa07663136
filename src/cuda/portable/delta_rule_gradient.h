// SPDX-License-Identifier: Apache-2.0
// What the backward kernels of the delta rule share. Forward's nodes are made again; then queries walk back and forth
// through them (gradients of queries and of lambda), nodes sum over their readers, gradients go down the tree, and end in
// chunks.
#pragma once

#include "cuda/portable/delta_rule_half_gradient.h"

namespace lla::cuda {

// Scratch memory of backward. Step s of a chunk (or of the border at which the final state's nodes stand) is the s-th node
// of the call that it reads; X of step s is what that node sees, dX its gradient.
struct DeltaGradients {
  // On halves; then only lambda and what follows it here, dx of step 0, and the counts and strides of nodes are in use.
  DeltaHalfGradients halves;
  DeltaScratch nodes;
  int64_t steps = 0, rows = 0, groups = 0, levels = 0;
  float* x = nullptr;         // [step - 1][row][head][key_stride]; step 0 is nodes.query
  float* dx = nullptr;        // [step][row][head][key_stride]; in the end step 0 is the gradient of q, without scale
  float* border_x = nullptr;  // [sequence][step][head][dk][key_stride]
  float* border_dx = nullptr;
  float* content = nullptr;    // [slot][head][dk][value_stride]
  float* transition[2] = {};   // [slot][head][dk][key_stride], of even and odd levels
  float* lambda = nullptr;     // [row][head][levels], through nodes
  float* key = nullptr;        // [place][head][key_stride] of k, a place for each row of each chunk
  float* erase = nullptr;      // [place][head][key_stride] of w k where it erases
  float* value = nullptr;      // [place][head][value_stride] of w v
  float* inverse = nullptr;    // [place][head][rows of a chunk] of X, from what queries read
  float* gate = nullptr;       // [place][head], likewise
  float* query_sum = nullptr;  // [row][group][key_stride] of the passes so far
  float* key_sum = nullptr;    // [place][group][key_stride]

  LLA_HOST_DEVICE float* x_at(int64_t step, int64_t row, int64_t head) const {
    return step == 0 ? nodes.query_at(row, head) : x + nodes.place((step - 1) * rows + row, head) * nodes.key_stride;
  }
  LLA_HOST_DEVICE float* dx_at(int64_t step, int64_t row, int64_t head) const {
    return dx + nodes.place(step * rows + row, head) * nodes.key_stride;
  }
  LLA_HOST_DEVICE float* border_at(float* base, int64_t sequence, int64_t step, int64_t head) const {
    return base + nodes.place(sequence * (steps + 1) + step, head) * nodes.transition_size();
  }
  LLA_HOST_DEVICE float* content_at(int64_t slot, int64_t head) const {
    return content + nodes.place(slot, head) * nodes.content_size();
  }
  LLA_HOST_DEVICE float* transition_at(int level, int64_t slot, int64_t head) const {
    return transition[level & 1] + nodes.place(slot, head) * nodes.transition_size();
  }
};

// Steps that a chunk, or the border after `full` chunks, takes through nodes of the call at most.
LLA_HOST_DEVICE inline int64_t delta_most_steps(int64_t full) {
  int64_t bits = 0;
  for (int64_t n = full + 1; n > 0; n >>= 1) ++bits;
  return bits;
}

// The chunk number at which the final state's nodes stand.
LLA_HOST_DEVICE inline int64_t delta_border(const Sequence& sequence, const ChunkShape& chunk) {
  return (sequence.position + sequence.rows) >> (chunk.rows_log + chunk.ratio_log) << chunk.ratio_log;
}

// Contents of the gradient of the final state's entry; null: zero.
__device__ __forceinline__ Elements delta_final_node(const SlotMemory& gradient, const Sequence& sequence, int entry,
                                                     int64_t head) {
  const int32_t id = gradient.nodes.base && sequence.final_gradient.tail >= 0 ? sequence.final_gradient.node[entry] : -1;
  if (id < 0) return {};
  return {gradient.node(id, head), gradient.node_layout.dtype};
}

// Ring index in the tail of a gradient's image.
__device__ __forceinline__ int64_t delta_gradient_ring(const SlotImage& image, const TailLayout& layout, int64_t grain,
                                                       int64_t position) {
  return (image.tail_origin + position % grain) % layout.capacity;
}

// Whether the gradient of the final state has a row for a position.
__device__ __forceinline__ bool delta_has_final_row(const SlotMemory& gradient, const Sequence& sequence, int64_t grain,
                                                    int64_t position) {
  const int64_t end = sequence.position + sequence.rows;
  return gradient.tails.base && sequence.final_gradient.tail >= 0 && position >= sequence.final_gradient.start &&
         position >= end - end % grain && position < end;
}

// Launches, in the order in which they follow forward's nodes.
int32_t launch_delta_walks(const DeltaInputs& in, const DeltaGradients& scratch, const View& dy, const SlotMemory& gradient,
                           bool exact, void* stream);
// Of queries only, for dimensions of at most 128.
int32_t launch_delta_walks_narrow(const DeltaInputs& in, const DeltaGradients& scratch, const View& dy, bool exact,
                                  void* stream);
int32_t launch_delta_node_gradients(const DeltaInputs& in, const DeltaGradients& scratch, const View& dy,
                                    const SlotMemory& gradient, bool exact, void* stream);
int32_t launch_delta_read_gradients(const DeltaInputs& in, const DeltaGradients& scratch, const MixerBackward& problem,
                                    bool exact, void* stream);
int32_t launch_delta_row_gradients(const DeltaInputs& in, const DeltaGradients& scratch, const MixerBackward& problem,
                                   bool exact, void* stream);
// Of calls without states, on halves.
int32_t launch_delta_half_read_gradients(const DeltaInputs& in, const DeltaGradients& scratch, const MixerBackward& problem,
                                         void* stream);
int32_t load_delta_half_read_gradients();
int32_t launch_delta_half_row_gradients(const DeltaInputs& in, const DeltaGradients& scratch, const MixerBackward& problem,
                                        void* stream);
int32_t load_delta_half_row_gradients();
int32_t launch_delta_group_sums(const DeltaInputs& in, const DeltaGradients& scratch, const MixerBackward& problem,
                                void* stream);
int32_t load_delta_walks();
int32_t load_delta_walks_narrow();
int32_t load_delta_node_gradients();
int32_t load_delta_read_gradients();
int32_t load_delta_row_gradients();
int32_t load_delta_group_sums();

}  // namespace lla::cuda
