// SPDX-License-Identifier: Apache-2.0
// Stores the raw rows that a plan asks for in the tail rings: from the call's tensors, older ones from the history's ring.
#include "cuda/portable/delta_rule.h"

namespace lla::cuda {

namespace {

__global__ void __launch_bounds__(kThreads) delta_rule_tail(DeltaInputs in) {
  const MixerShape& shape = in.shape;
  const SlotMemory& state = in.state;
  const TailLayout& layout = state.tail_layout;
  const int64_t heads = shape.heads, dk = shape.key_dim, dv = shape.value_dim, most = in.batch.most_tail_to_store;
  const int64_t tasks = in.batch.count * most * heads;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t head = task % heads, number = task / heads % most;
    const Sequence& sequence = in.batch.sequences[task / heads / most];
    if (sequence.padding || number >= sequence.tail_to_store_count) continue;
    const RowsToStore& plan = sequence.tail_to_store[number];
    const SlotImage& history = sequence.history;
    const int64_t group = shape.group_of(head);
    bool first_of_group = true;
    for (int64_t h = 0; h < head; ++h) first_of_group = first_of_group && shape.group_of(h) != group;
    const int64_t width = (first_of_group ? dk : 0) + dv + 2, elements = (plan.last - plan.first) * width;
    for (int64_t n = threadIdx.x; n < elements; n += kThreads) {
      const int64_t p = plan.first + n / width, ring = (plan.ring + n / width) % layout.capacity;
      int64_t e = n % width;  // v, then gate and write, then k
      const bool own = p >= sequence.position;
      if (!own && (history.tail < 0 || p < history.start)) continue;
      const int64_t row = sequence.row_begin + p - sequence.position;
      const int64_t from = own ? 0 : (history.tail_origin + p % shape.grain) % layout.capacity;
      if (e < dv) {
        const float x = own ? load_element(in.v.at(sequence.index, row, head), in.v.dtype, e)
                            : load_element(state.tail_v(history.tail, head, from), layout.dtype, e);
        store_element(state.tail_v(plan.block, head, ring), layout.dtype, e, x);
      } else if ((e -= dv) < 2) {
        const View& view = e == 0 ? in.gate : in.write;
        const auto place = [&](int32_t block, int64_t at) {
          return reinterpret_cast<float*>(e == 0 ? state.tail_gate(block, head, at) : state.tail_write(block, head, at));
        };
        float x = static_cast<float>(e);  // not given: log gate 0, write strength 1
        if (!own)
          x = *place(history.tail, from);
        else if (view.present())
          x = load_element(view.at(sequence.index, row, head), view.dtype, 0);
        *place(plan.block, ring) = x;
      } else {
        e -= 2;
        const float x = own ? load_element(in.k.at(sequence.index, row, group), in.k.dtype, e)
                            : load_element(state.tail_k(history.tail, group, from), layout.dtype, e);
        store_element(state.tail_k(plan.block, group, ring), layout.dtype, e, x);
      }
    }
  }
}

}  // namespace

int32_t launch_delta_store_tail(const DeltaInputs& in, void* stream) {
  return launch(delta_rule_tail, in.batch.count * in.batch.most_tail_to_store * in.shape.heads, kThreads, 0, stream, in);
}

int32_t load_delta_store_tail() { return load_kernel(delta_rule_tail); }

}  // namespace lla::cuda
