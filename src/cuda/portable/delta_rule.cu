// SPDX-License-Identifier: Apache-2.0
// The delta rule's table of kernels, and how its scratch memory is laid out.
#include "core/checked.h"
#include "cuda/backend.h"
#include "cuda/portable/delta_rule.h"

namespace lla::cuda {

namespace {

// Hands out arrays of floats; without memory it only counts.
class Carver {
 public:
  explicit Carver(char* memory) : memory_(memory) {}
  float* take(Size floats) {
    char* here = memory_ ? memory_ + used_.value() : nullptr;
    used_ += (floats * Size(sizeof(float))).aligned(256);
    return reinterpret_cast<float*>(here);
  }
  int64_t bytes() const { return used_.valid() ? used_.value() : -1; }

 private:
  char* memory_;
  Size used_;
};

int64_t padded(int64_t columns) { return (columns + 3) & ~int64_t{3}; }

int64_t bits_of(int64_t x) {
  int64_t bits = 0;
  while (x > 0) x >>= 1, ++bits;
  return bits;
}

void carve(const MixerShape& shape, const Limits& limits, Carver* carver, DeltaScratch* scratch) {
  const ChunkShape chunk(shape.grain);
  scratch->heads = shape.heads;
  scratch->key_dim = shape.key_dim;
  scratch->key_stride = padded(shape.key_dim);
  scratch->value_stride = padded(shape.value_dim);
  const Size slots = Size(limits.rows / chunk.rows) + Size(limits.sequences) * chunk.ratio;
  const Size heads(shape.heads), dk(shape.key_dim), key_row(scratch->key_stride), value_row(scratch->value_stride);
  scratch->content = carver->take(slots * heads * dk * value_row);
  // A node that begins before the call has a transition of its own only above the levels that fit into the call.
  const Size rows = Size(limits.rows_per_sequence) + shape.grain;
  const int64_t full = rows.valid() ? (rows.value() - 1) / chunk.rows : 0;
  const int64_t levels = full > 0 ? bits_of(full - 1) + 1 : 1;
  Size nodes(rows.valid() && levels <= kDeltaLevels ? 0 : -1);
  for (int64_t level = 0; level < levels && nodes.valid() && slots.valid(); ++level) {
    scratch->level_offset[level] = nodes.value();
    nodes += Size(slots.value() >> level) + Size(limits.sequences) + 1;
  }
  scratch->transition = carver->take(nodes * heads * dk * key_row);
  scratch->query = carver->take(Size(limits.rows) * heads * key_row);
  scratch->output = carver->take(Size(limits.rows) * heads * value_row);
  if (shape.key_dim > 2 * kTile) scratch->spill = carver->take((key_row + value_row) * kTile * kDeltaSpills);
}

bool takes_dtype(int32_t dtype) { return dtype == LLA_F32 || dtype == LLA_BF16 || dtype == LLA_F16; }

bool takes_shape(const MixerShape& shape, const SlotMemory& state) {
  return shape.mixer == LLA_DELTA_RULE && shape.key_dim <= kDeltaMostDim && shape.value_dim <= kDeltaMostDim &&
         takes_dtype(state.node_layout.dtype) && takes_dtype(state.tail_layout.dtype);
}

template <class... Views>
bool take_views(const Views&... views) {
  return (takes_dtype(views.dtype) && ...);
}

template <class... Views>
bool any_is_exact(const Views&... views) {
  return ((views.dtype == LLA_F32) || ...);
}

// ---- forward ------------------------------------------------------------------------------------------------------------

bool accepts_forward(const void* problem) {
  const MixerForward& p = *static_cast<const MixerForward*>(problem);
  return takes_shape(p.shape, p.state) && take_views(p.q, p.k, p.v, p.gate, p.write, p.lambda, p.y);
}

void measure_forward(const void* problem, const Limits& limits, Need* need) {
  *need = Need();
  need->shared = delta_scratch_bytes(static_cast<const MixerForward*>(problem)->shape, limits);
}

int32_t launch_forward(const void* problem, const Limits& limits, char* memory, void* stream) {
  const MixerForward& p = *static_cast<const MixerForward*>(problem);
  const DeltaInputs in(p);
  const DeltaScratch scratch = delta_scratch(p.shape, limits, memory);
  const bool exact = any_is_exact(p.q, p.k, p.v, p.y);
  int32_t status = launch_delta_chunks(in, scratch, true, exact, stream);
  if (!status) status = launch_delta_nodes(in, scratch, exact, stream);
  if (!status) status = launch_delta_read(in, scratch, p.y, exact, stream);
  if (!status && in.batch.stores && in.state.nodes.base) status = launch_delta_store_nodes(in, scratch, exact, stream);
  if (!status && in.batch.stores && in.state.tails.base) status = launch_delta_store_tail(in, stream);
  return status;
}

int32_t load_forward() {
  int32_t status = load_delta_chunks();
  if (!status) status = load_delta_nodes();
  if (!status) status = load_delta_read();
  if (!status) status = load_delta_store_nodes();
  if (!status) status = load_delta_store_tail();
  return status;
}

const Kernel kKernels[] = {
    {Op::MixerForward, "cuda.delta_rule.forward.portable", accepts_forward, measure_forward, nullptr, nullptr, nullptr, nullptr,
     launch_forward, load_forward},
};

}  // namespace

int64_t delta_scratch_bytes(const MixerShape& shape, const Limits& limits) {
  Carver carver(nullptr);
  DeltaScratch scratch;
  carve(shape, limits, &carver, &scratch);
  return carver.bytes();
}

DeltaScratch delta_scratch(const MixerShape& shape, const Limits& limits, char* memory) {
  Carver carver(memory);
  DeltaScratch scratch;
  carve(shape, limits, &carver, &scratch);
  return scratch;
}

KernelTable delta_rule_kernels() { return {kKernels, static_cast<int64_t>(sizeof kKernels / sizeof kKernels[0])}; }

}  // namespace lla::cuda
