// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward, last steps: gradients of gates from flows, sums over the heads of groups, and the launch.
#include "cuda/common/scratch_limit.h"
#include "cuda/portable/scalar_gate_backward.h"

namespace lla::cuda::scalar_gate {

namespace {

// Turns the flow that a chunk reads of an entry into that of this and all later chunks that read the same node. One thread:
// one entry of one head.
__global__ void __launch_bounds__(kThreads) sum_reads(const __grid_constant__ Backward a, int64_t tasks) {
  constexpr int kAhead = 8;
  const Inputs& in = a.in;
  for (int64_t task = int64_t{blockIdx.x} * kThreads + threadIdx.x; task < tasks; task += int64_t{gridDim.x} * kThreads) {
    const int64_t head = task % in.shape.heads, b = task / in.shape.heads / a.levels;
    const int index = static_cast<int>(task / in.shape.heads % a.levels), level = a.level_of_index(index);
    const Walk walk(in, b);
    const int64_t place = in.geometry.places.first(in.batch, b), first = walk.range.first;
    float sum = 0;
    for (int64_t c1 = walk.range.count; c1 > 0; c1 -= kAhead) {
      float read[kAhead];
      bool there[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t c = c1 - 1 - i;
        there[i] = c >= 0 && ((past_of(in.geometry, first, first + c) >> level) & 1);
        const ChunkSpan span(walk.sequence, in.geometry.chunk, first + max(c, int64_t{0}));
        read[i] = there[i] && span.lo < span.hi ? *a.reads_at(place + c, index, head) : 0;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        sum = there[i] ? sum + read[i] : 0;
        if (there[i]) *a.reads_at(place + c1 - 1 - i, index, head) = sum;
      }
    }
  }
}

// Flow of entry `level` of the past of `chunk` that crosses the start of that chunk. Reads are summed already.
__device__ __forceinline__ float crossing(const Backward& a, const Walk& walk, int64_t b, int64_t chunk, int level,
                                          int64_t head) {
  const Inputs& in = a.in;
  const int64_t first = walk.range.first, order = chunk - first;
  const int64_t end = in.geometry.linear ? chunk : level == kOldest ? 0 : bucket_end(chunk, level);
  const float* flows = end <= first ? a.scratch.old_flows + ((b * in.shape.heads + head) * a.levels + a.index_of(level)) * 2
                                    : a.scratch.flows + (walk.slot_of(end - 1) * in.shape.heads + head) * 2;
  float sum = flows[0];
  if (chunk <= final_end(in, walk.sequence, level, end)) sum += flows[1];
  if (order < walk.range.count) sum += *a.reads_at(in.geometry.places.first(in.batch, b) + order, a.index_of(level), head);
  return sum;
}

// Gradient that the final state's log decays give to the gates of a chunk.
__device__ __forceinline__ float decay_gradient(const Backward& a, const Walk& walk, int64_t chunk, int64_t head) {
  const Sequence& sequence = walk.sequence;
  const int64_t chunks = final_chunks(a.in, sequence);
  if (sequence.final_gradient.tail < 0 || !a.gradient.nodes.base || chunk >= chunks) return 0;
  const int level = a.in.geometry.linear ? kOldest : highest_bit(chunk ^ chunks);
  const int32_t id =
      sequence.final_gradient.node[level >= a.in.geometry.apart ? kAbsorbed : level - a.in.geometry.chunk.ratio_log];
  return id < 0 ? 0 : load_element(a.gradient.node_decay(id, head), LLA_F32, 0);
}

// Gradients of gates. One warp: one chunk and head.
__global__ void __launch_bounds__(kThreads) gate_gradients(const __grid_constant__ Backward a, int64_t tasks) {
  const Inputs& in = a.in;
  const int lane = threadIdx.x % 32;
  for (int64_t task = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; task < tasks;
       task += int64_t{gridDim.x} * (kThreads / 32)) {
    const int64_t head = task % in.shape.heads;
    int64_t place;
    const int64_t b = in.geometry.places.find(in.batch, task / in.shape.heads, &place);
    const Walk walk(in, b);
    const Sequence& sequence = walk.sequence;
    const int64_t order = place - in.geometry.places.first(in.batch, b), chunk = walk.range.first + order;
    if (order >= walk.range.count) continue;
    const ChunkSpan span(sequence, in.geometry.chunk, chunk);
    const SlotImage &initial = sequence.initial_gradient, &final = sequence.final_gradient;
    if (span.lo >= span.hi && initial.tail < 0) continue;

    float at_end = 0;  // flow across the end of the chunk; an incomplete one has none
    if (walk.makes(chunk)) {
      const uint64_t past = past_of(in.geometry, walk.range.first, chunk + 1);
      for (int round = 0; round < 2; ++round) {
        const int level = 32 * round + lane;
        if ((past >> level) & 1) at_end += crossing(a, walk, b, chunk + 1, level, head);
      }
      at_end = warp_sum(at_end);
    }
    const float* rows = a.scratch.rows + (place * in.shape.heads + head) * 64;
    float low = rows[lane], high = rows[lane + 32];  // become sums over the row and the later ones
    for (int d = 1; d < 32; d *= 2) {
      const float more_low = __shfl_down_sync(kAllLanes, low, d), more_high = __shfl_down_sync(kAllLanes, high, d);
      if (lane + d < 32) {
        low += more_low;
        high += more_high;
      }
    }
    low += __shfl_sync(kAllLanes, high, 0);
    const float of_decay = decay_gradient(a, walk, chunk, head);
    const ChunkSource source{sequence, in.state, in.shape.grain, span};
    for (int half = 0; half < 2; ++half) {
      const int r = lane + 32 * half;
      if (r >= span.hi) continue;
      // Nothing crosses a gate that lets nothing through.
      float x = decay_of(source.gate(in.gate, head, r)) == 0 ? 0 : at_end + (half == 0 ? low : high);
      x += of_decay;
      const auto ring = [&](const SlotImage& image) {
        return (image.tail_origin + (span.begin + r) % in.shape.grain) % a.gradient.tail_layout.capacity;
      };
      if (final.tail >= 0 && chunk >= final_chunks(in, sequence) && span.begin + r >= final.start)
        x += load_element(a.gradient.tail_gate(final.tail, head, ring(final)), LLA_F32, 0);
      if (r >= span.lo) {
        if (a.dgate.present())
          put_element(a.dgate.at(sequence.index, span.row(sequence, r), head), a.dgate.dtype, 0, x, a.dgate.accumulate);
      } else if (initial.tail >= 0) {
        const bool exists = sequence.history.tail >= 0 && span.begin + r >= sequence.history.start;
        store_element(a.gradient.tail_gate(initial.tail, head, ring(initial)), LLA_F32, 0, exists ? x : 0);
      }
    }
  }
}

// Gradients of the log decays of the history's nodes: what older ones send past them. One thread: one head of a sequence.
__global__ void __launch_bounds__(kThreads) initial_decays(const __grid_constant__ Backward a, int64_t tasks) {
  const Inputs& in = a.in;
  const Geometry& geometry = in.geometry;
  for (int64_t task = int64_t{blockIdx.x} * kThreads + threadIdx.x; task < tasks; task += int64_t{gridDim.x} * kThreads) {
    const int64_t head = task % in.shape.heads, b = task / in.shape.heads;
    const Walk walk(in, b);
    const SlotImage& initial = walk.sequence.initial_gradient;
    if (walk.sequence.padding || initial.tail < 0) continue;
    const int64_t first = walk.range.first;
    const uint64_t past = past_of(geometry, first, first);
    const int64_t chunks = final_chunks(in, walk.sequence);
    for (int state_level = 0; state_level < kNodes; ++state_level) {
      const int32_t id = initial.node[state_level];
      const int level = state_level == kAbsorbed ? kOldest : state_level + geometry.chunk.ratio_log;
      if (id < 0 || (level == kOldest ? !geometry.absorbs : level >= geometry.apart)) continue;
      float sum = 0;
      if ((past >> level) & 1) {
        // The chunk that follows a node lies before the reads of all older ones, which later rows make.
        const int64_t end = geometry.linear ? first : level == kOldest ? 0 : bucket_end(first, level);
        for (uint64_t older = level == kOldest ? 0 : past & ~((uint64_t{2} << level) - 1); older; older &= older - 1) {
          const int other = __ffsll(static_cast<long long>(older)) - 1;
          const int64_t other_end = other == kOldest ? 0 : bucket_end(first, other);
          const float* flows = a.scratch.old_flows + ((b * in.shape.heads + head) * a.levels + a.index_of(other)) * 2;
          sum += flows[0];
          if (end <= final_end(in, walk.sequence, other, other_end)) sum += flows[1];
          if (walk.range.count > 0) sum += *a.reads_at(geometry.places.first(in.batch, b), a.index_of(other), head);
        }
        const bool absorbed = level == kOldest;
        if (!absorbed && end <= chunks) sum += decay_gradient(a, walk, end - 1, head);
        const int32_t final_id = walk.sequence.final_gradient.node[kAbsorbed];
        if (absorbed && walk.sequence.final_gradient.tail >= 0 && final_id >= 0)
          sum += load_element(a.gradient.node_decay(final_id, head), LLA_F32, 0);
      }
      store_element(a.gradient.node_decay(id, head), LLA_F32, 0, sum);
    }
  }
}

// Gradients of q and k: sums over the parts of a group, in order. One block: one chunk and group.
__global__ void __launch_bounds__(kThreads) sum_parts(const __grid_constant__ Backward a, int64_t tasks) {
  const Inputs& in = a.in;
  const int64_t groups = in.shape.groups, width = in.shape.key_dim, parts = a.parts / groups;
  const int64_t places = in.geometry.places.count(in.batch.total_rows, in.batch.count);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t group = task % groups;
    int64_t place;
    const int64_t b = in.geometry.places.find(in.batch, task / groups, &place);
    const Walk walk(in, b);
    const Sequence& sequence = walk.sequence;
    const int64_t order = place - in.geometry.places.first(in.batch, b), chunk = walk.range.first + order;
    if (order >= walk.range.count) continue;
    const ChunkSpan span(sequence, in.geometry.chunk, chunk);
    const SlotImage &initial = sequence.initial_gradient, &final = sequence.final_gradient;
    if (span.lo >= span.hi && initial.tail < 0) continue;
    const int64_t stride = places * a.part_size();
    for (int64_t i = threadIdx.x; i < span.hi * width; i += kThreads) {
      const int r = static_cast<int>(i / width);
      const int64_t e = i % width, at = (group * parts * places + place) * a.part_size() + a.part_index(r, e);
      const auto ring = [&](const SlotImage& image) {
        return (image.tail_origin + (span.begin + r) % in.shape.grain) % a.gradient.tail_layout.capacity;
      };
      const int64_t in_group = place * a.part_size() + a.part_index(r, e);
      float dk = a.resumes_group ? a.scratch.dk_sums[in_group] : 0;
      float dq = a.resumes_group && a.dq.present() ? a.scratch.dq_sums[in_group] : 0;
      for (int64_t part = 0; part < parts; ++part) dk += a.scratch.dk[at + part * stride];
      for (int64_t part = 0; a.dq.present() && part < parts; ++part) dq += a.scratch.dq[at + part * stride];
      if (!a.ends_group) {
        a.scratch.dk_sums[in_group] = dk;
        a.scratch.dq_sums[in_group] = dq;
        continue;
      }
      if (final.tail >= 0 && chunk >= final_chunks(in, sequence) && span.begin + r >= final.start)
        dk += load_element(a.gradient.tail_k(final.tail, group, ring(final)), a.gradient.tail_layout.dtype, e);
      if (r < span.lo) {
        const bool exists = sequence.history.tail >= 0 && span.begin + r >= sequence.history.start;
        if (initial.tail >= 0)
          store_element(a.gradient.tail_k(initial.tail, group, ring(initial)), a.gradient.tail_layout.dtype, e,
                        exists ? dk : 0);
        continue;
      }
      const int64_t row = span.row(sequence, r);
      if (a.dk.present()) put_element(a.dk.at(sequence.index, row, group), a.dk.dtype, e, dk, a.dk.accumulate);
      if (a.dq.present()) put_element(a.dq.at(sequence.index, row, group), a.dq.dtype, e, dq, a.dq.accumulate);
    }
  }
}

}  // namespace

int32_t launch_flows(const Backward& a, void* stream) {
  const Inputs& in = a.in;
  const BatchView& batch = in.batch;
  const auto blocks = [](int64_t tasks, int64_t per_block) { return (tasks + per_block - 1) / per_block; };
  const int64_t heads = in.shape.heads, places = in.geometry.places.tasks(batch);
  const int64_t reads = batch.count * a.levels * heads, gates = places * heads, sums = places * in.shape.groups;
  int32_t status = LLA_OK;
  if (!in.geometry.linear) status = launch(sum_reads, blocks(reads, kThreads), kThreads, 0, stream, a, reads);
  if (status == LLA_OK) status = launch(gate_gradients, blocks(gates, kThreads / 32), kThreads, 0, stream, a, gates);
  if (status == LLA_OK && a.gradient.nodes.base)
    status = launch(initial_decays, blocks(batch.count * heads, kThreads), kThreads, 0, stream, a, batch.count * heads);
  if (status == LLA_OK && a.ends_part) status = launch(sum_parts, sums, kThreads, 0, stream, a, sums);
  return status;
}

int32_t load_flows() {
  int32_t status = load_kernel(sum_reads);
  if (status == LLA_OK) status = load_kernel(gate_gradients);
  if (status == LLA_OK) status = load_kernel(initial_decays);
  if (status == LLA_OK) status = load_kernel(sum_parts);
  return status;
}

namespace {

// Of slices of this many heads.
Size backward_bytes(const MixerBackward& p, const Limits& limits, int64_t heads) {
  Backward a(p, kBundle, limits);
  Carver carver;
  a.take(&carver, limits, heads, heads < a.members);
  return carver.used;
}

// One slice of the heads.
int32_t launch_slice(Backward& a, int32_t dy_dtype, void* stream) {
  const bool exact = a.in.exact() || dy_dtype != LLA_BF16;
  if (!exact && !a.in.state.nodes.base && !a.gradient.nodes.base) a.in.geometry.scratch_dtype = LLA_BF16;
  int32_t status = launch_nodes(a.in, exact, stream);
  if (status == LLA_OK) status = launch_node_gradients(a, exact, stream);
  if (status == LLA_OK) status = launch_chunk_gradients(a, exact, stream);
  if (status == LLA_OK) status = launch_flows(a, stream);
  if (status == LLA_OK) status = launch_old_node_gradients(a, exact, stream);
  return status;
}

}  // namespace

void measure_backward(const void* problem, const Limits& limits, Need* need) {
  const MixerBackward& p = *static_cast<const MixerBackward*>(problem);
  const auto bytes_of = [&](int64_t heads) { return backward_bytes(p, limits, heads); };
  need->shared = sliced_bytes(p.shape.heads, bytes_of);
}

int32_t launch_backward(const void* problem, const Limits&, char* scratch, void* stream) {
  const MixerBackward& p = *static_cast<const MixerBackward*>(problem);
  const Limits limits = Inputs(p).limits();
  HeadSlices slices(p.shape, kBundle);
  slices.choose([&](int64_t heads) { return fits_scratch(backward_bytes(p, limits, heads)); });
  int32_t status = LLA_OK;
  for (HeadSlice slice = slices.first(); slice.count > 0 && status == LLA_OK; slice = slices.next(slice)) {
    Backward a(slices.problem_of(p, slice), kBundle, limits);
    Carver carver{scratch, Size(0)};
    a.take(&carver, limits, a.in.shape.heads, slices.cuts_groups());
    a.resumes_part = !slices.begins_part(slice);
    a.resumes_group = slices.part_of(slice) > 0;
    a.ends_part = slices.ends_part(slice);
    a.ends_group = slices.ends_group(slice);
    status = launch_slice(a, p.dy.dtype, stream);
  }
  return status;
}

int32_t load_backward() {
  int32_t status = load_nodes_kernels();
  if (status == LLA_OK) status = load_node_gradients();
  if (status == LLA_OK) status = load_chunk_gradients();
  if (status == LLA_OK) status = load_flows();
  return status;
}

}  // namespace lla::cuda::scalar_gate
