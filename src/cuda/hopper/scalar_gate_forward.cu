// SPDX-License-Identifier: Apache-2.0
// Scalar gate forward on Hopper: calls without states are sweeps; in those with states, the sequences that takes_sweep()
// names are, and the portable kernels work on all others.
#include <algorithm>

#include "cuda/hopper/capability.h"
#include "cuda/hopper/scalar_gate_kernels.h"
#include "cuda/hopper/scalar_gate_sweep.h"
#include "cuda/hopper/scalar_gate_views.h"
#include "cuda/portable/head_slices.h"
#include "cuda/portable/scalar_gate.h"

namespace lla::cuda::hopper {

namespace {

bool has_state(const MixerForward& p) { return p.state.nodes.base || p.state.tails.base; }

// Of a call with a state: whether a sequence may take a sweep, and states have whole chunks of the sums' size.
bool may_sweep(const MixerForward& p) {
  return p.batch.most_rows >= kSweepRows && p.shape.grain % kHalf == 0 && p.shape.key_dim <= kMostKeyDim;
}

// In slices of heads, if there are many nodes of histories to be copied.
int32_t launch_slices(const MixerForward& p, bool routes, char* scratch, void* stream) {
  Limits limits;
  limits.sequences = p.batch.count;
  limits.rows = p.batch.total_rows;
  limits.length = p.batch.most_length;
  const bool copies = routes && p.batch.past_alignment != kNoPast && copies_nodes(p);
  HeadSlices slices(p.shape, 1);
  slices.choose([&](int64_t heads) {
    MixerShape slice = p.shape;
    slice.heads = heads;
    return !copies || fits_scratch(old_copies_bytes(slice, limits), most_old_copies());
  });
  int32_t status = LLA_OK;
  for (HeadSlice slice = slices.first(); slice.count > 0 && status == LLA_OK; slice = slices.next(slice))
    status = launch_sweep(slices.problem_of(p, slice), routes, scratch, stream);
  return status;
}

// Piece by piece of dk, the later ones added to y.
int32_t launch_sweeps(const MixerForward& p, bool routes, char* scratch, void* stream) {
  int32_t status = LLA_OK;
  for (int64_t column = 0; column < p.shape.key_dim && status == LLA_OK; column += kMostKeyDim) {
    MixerForward piece = p;
    piece.shape.key_dim = std::min(p.shape.key_dim - column, kMostKeyDim);
    piece.q = columns_from(p.q, column);
    piece.k = columns_from(p.k, column);
    piece.y.accumulate = p.y.accumulate || column > 0;
    status = launch_slices(piece, routes, scratch, stream);
  }
  return status;
}

}  // namespace

bool accepts_scalar_gate_forward(const void* problem) {
  const MixerForward& p = *static_cast<const MixerForward*>(problem);
  return accepts_sweep(p) && (!has_state(p) || may_sweep(p));
}

// The portable kernels' scratch counts too: with a state they work on what is left.
void measure_scalar_gate_forward(const void* problem, const Limits& limits, Need* need) {
  const MixerForward& p = *static_cast<const MixerForward*>(problem);
  Need of_sweep, of_others;
  measure_sweep(p, limits, &of_sweep);
  scalar_gate::measure_forward(problem, limits, &of_others);
  const int64_t of_nodes = scalar_gate::state_nodes_bytes(p.shape, limits);
  const bool valid = of_sweep.shared >= 0 && of_others.shared >= 0 && of_nodes >= 0;
  need->shared = valid ? std::max({of_sweep.shared, of_others.shared, of_nodes}) : -1;
}

int32_t launch_scalar_gate_forward(const void* problem, const Limits&, char* scratch, void* stream) {
  const MixerForward& p = *static_cast<const MixerForward*>(problem);
  if (!has_state(p)) return launch_sweeps(p, false, scratch, stream);
  int32_t status = scalar_gate::launch_beside_sweeps(p, scratch, stream);
  if (status == LLA_OK) status = launch_sweeps(p, true, scratch, stream);
  if (status == LLA_OK) status = scalar_gate::launch_state_nodes(p, scratch, stream);
  return status;
}

int32_t load_scalar_gate_forward() {
  if (!is_hopper()) return LLA_OK;
  int32_t status = load_sweep();
  if (status == LLA_OK) status = scalar_gate::load_state_nodes();
  return status;
}

}  // namespace lla::cuda::hopper
