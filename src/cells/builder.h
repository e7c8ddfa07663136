// SPDX-License-Identifier: Apache-2.0
// Builder: lays out the intermediate rows of a program and adds its steps. Without a program it only measures: tensors are
// empty, sizes come from the limits, and every optional step is taken.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cells/binding.h"
#include "cells/program.h"
#include "core/checked.h"

namespace lla {

// Calls f(View&) for every view of a problem.
template <class F>
void each_view(MixerForward& p, F f) {
  for (View* v : {&p.q, &p.k, &p.v, &p.gate, &p.write, &p.lambda, &p.y}) f(*v);
}
template <class F>
void each_view(MixerBackward& p, F f) {
  for (View* v :
       {&p.q, &p.k, &p.v, &p.gate, &p.write, &p.lambda, &p.dy, &p.dq, &p.dk, &p.dv, &p.dgate, &p.dwrite, &p.dlambda})
    f(*v);
}
template <class F>
void each_view(Convolution& p, F f) {
  for (View* v : {&p.x, &p.y, &p.dy, &p.dx}) f(*v);
}
template <class F>
void each_view(Gates& p, F f) {
  for (View* v : {&p.gate, &p.write, &p.lambda, &p.gate_out, &p.write_out, &p.lambda_out, &p.dgate_out, &p.dwrite_out,
                  &p.dlambda_out, &p.dgate, &p.dwrite, &p.dlambda}) {
    f(*v);
  }
}
template <class F>
void each_view(L2Norm& p, F f) {
  for (View* v : {&p.x, &p.y, &p.dy, &p.dx}) f(*v);
}
template <class F>
void each_view(GatedNorm& p, F f) {
  for (View* v : {&p.x, &p.skip, &p.z, &p.y, &p.dy, &p.dx, &p.dskip, &p.dz}) f(*v);
}
template <class F>
void each_view(Projection& p, F f) {
  for (View* v : {&p.x, &p.y, &p.dy, &p.dx}) f(*v);
}
template <class F>
void each_view(RowsFill& p, F f) {
  for (View* v : {&p.x, &p.y}) f(*v);
}

// Gives all tensors of a problem one type, as a caller may, and the weights to which a kernel is bound by its type.
template <class P>
void set_dtype(P& p, int32_t dtype) {
  each_view(p, [dtype](View& v) { v.dtype = dtype; });
}
inline void set_dtype(Projection& p, int32_t dtype) {
  set_dtype<Projection>(p, dtype);
  p.weight.dtype = dtype;
}

class Builder {
 public:
  // Measures. `names`: room for kMaxSteps names, which receives those of the steps' kernels; null: nobody asks.
  Builder(const Layer& layer, const Limits& limits, const char** names = nullptr);
  // Builds into `program`; the rows begin right after it.
  Builder(const Layer& layer, const Batch& batch, int64_t layer_index, Program* program);
  // Runs on a device: every step is put on the stream as it is added. `measured` knows where the scratch begins.
  Builder(const Layer& layer, const Batch& batch, int64_t layer_index, const Builder& measured, void* workspace,
          void* stream);

  const Layer& layer;
  const lla_layer_desc& d;  // of the layer
  const bool measuring;
  BatchView batch;        // of the call
  BatchView quiet_batch;  // the same without anything to store: recomputing changes no state
  SlotMemory state, gradient;
  bool gradient_state = false;  // gradients of states are wanted or given
  // The saved buffer, if there is one: rows that backward reads again (kept_rows), then the mixer's own part.
  void* saved_out = nullptr;       // forward writes it
  const void* saved_in = nullptr;  // backward reads it: kept rows are there already
  bool mixer_saves = false;        // it has a part of the mixer's

  // Whether something optional is to be done.
  bool wants(const View& view) const { return measuring || view.present(); }
  bool wants(const Matrix& matrix) const { return measuring || matrix.present(); }

  // An intermediate tensor [limits.rows, heads, dim].
  View rows(int64_t heads, int64_t dim, int32_t dtype);
  View rows(int64_t heads, int64_t dim) { return rows(heads, dim, compute_dtype()); }
  // The same in the type that the rows around a cell's mixer have.
  View inner_rows(int64_t heads, int64_t dim) { return rows(heads, dim, d.inner_dtype); }
  // Inner rows that forward leaves for backward: in the saved buffer, or in the workspace if there is none.
  View kept_rows(int64_t heads, int64_t dim) { return keep(inner_rows(heads, dim), heads, dim); }
  // The same with rows of the workspace that are there anyway.
  View keep(const View& otherwise, int64_t heads, int64_t dim);
  // The mixer's part, once all rows that are kept have been laid out.
  void* mixer_saved_out() const {
    return saved_out && mixer_saves ? static_cast<char*>(saved_out) + kept_.value() : nullptr;
  }
  const void* mixer_saved_in() const {
    return saved_in && mixer_saves ? static_cast<const char*>(saved_in) + kept_.value() : nullptr;
  }
  // Room for the sequences of quiet_batch; filled in when the batch has a state.
  void quieten();
  int32_t compute_dtype() const { return backend_.compute_dtype; }

  // Adds a step.
  template <class P>
  void add(Op op, P problem) {
    if (measuring) {
      const Kernel* kernel = measure(op, problem);
      if (!kernel) return;
      if (names_ && steps_ < kMaxSteps) names_[steps_] = kernel->name;
      ++steps_;
    } else {
      build(op, problem);
    }
  }
  // Adds a step that only some calls need; it is measured but not listed among the layer's steps.
  template <class P>
  void add_at_times(Op op, P problem) {
    if (measuring)
      measure(op, problem);
    else
      build(op, problem);
  }
  // Zeroes the slack rows of a caller's tensor, unless it accumulates.
  void fill(const View& view, int64_t heads, int64_t dim);
  // y (+)= x on live rows.
  void copy(const View& x, const View& y, int64_t heads, int64_t dim);

  // After the last step. `threads` times the scratch of one thread is part of the size.
  lla_status finish(lla_error* error);
  int64_t bytes() const { return total_; }  // of the whole workspace
  int64_t saved_bytes() const { return (kept_ + Size(saved_)).value(); }
  int64_t mixer_saved_bytes() const { return saved_; }
  int64_t row_bytes() const { return row_bytes_; }  // of intermediates, per row
  int64_t steps() const { return steps_; }
  // Building: the scratch sizes that were measured.
  void reserve(const Builder& measured);

 private:
  template <class P>
  const Kernel* measure(Op op, P& problem) {
    const Kernel* first = find_kernel(backend_, op, &problem);
    if (!first) {
      not_found(op);
      return nullptr;
    }
    account(*first, &problem);
    // The caller's tensors may have any type, and another kernel may serve it.
    for (const int32_t dtype : {LLA_F32, LLA_BF16, LLA_F16, LLA_F64}) {
      if (dtype == LLA_F64 && compute_dtype() != LLA_F64) continue;
      set_dtype(problem, dtype);
      const Kernel* kernel = find_kernel(backend_, op, &problem);
      if (kernel && kernel != first) account(*kernel, &problem);
    }
    return first;
  }
  template <class P>
  void build(Op op, P& problem) {
    if (!program_) return launch(op, find_kernel(backend_, op, &problem), &problem);
    Step* step = next_step(op, find_kernel(backend_, op, &problem), &problem);
    if (!step) return;
    ::new (static_cast<void*>(&step->problem)) P(problem);
    number_phases(step);
  }
  void not_found(Op op);
  void launch(Op op, const Kernel* kernel, const void* problem);
  void account(const Kernel& kernel, const void* problem);
  Step* next_step(Op op, const Kernel* kernel, const void* problem);
  void number_phases(Step* step);
  char* take(Size bytes);
  void use_states(const Batch& planned, int64_t layer_index);

  const Backend& backend_;
  const Limits limits_;
  char* memory_ = nullptr;  // the workspace; null while measuring
  Program* program_ = nullptr;
  int64_t uniform_rows_ = 0;
  int64_t sequences_ = 0;    // planned
  Size used_;                // bytes from the start of the workspace
  Size kept_;                // bytes of kept rows from the start of the saved buffer
  char* scratch_ = nullptr;  // on a device
  void* stream_ = nullptr;
  int32_t launched_ = LLA_OK;
  Size shared_ = 0, per_thread_ = 0;
  bool overflow_ = false, too_many_ = false;
  bool missing_ = false;
  Op missing_op_{};
  int64_t total_ = 0, saved_ = 0, row_bytes_ = 0, steps_ = 0;
  const char** names_ = nullptr;
};

}  // namespace lla
