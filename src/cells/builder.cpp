// SPDX-License-Identifier: Apache-2.0
// Memory layout of a program and bookkeeping of its steps.
#include "cells/builder.h"

#include <algorithm>

#include "core/error.h"

namespace lla {
namespace {

const char* op_name(Op op) {
  switch (op) {
    case Op::MixerForward:
      return "mixer forward";
    case Op::MixerBackward:
      return "mixer backward";
    case Op::ConvolutionForward:
      return "convolution forward";
    case Op::ConvolutionBackward:
      return "convolution backward";
    case Op::GatesForward:
      return "gates forward";
    case Op::GatesBackward:
      return "gates backward";
    case Op::L2NormForward:
      return "L2 norm forward";
    case Op::L2NormBackward:
      return "L2 norm backward";
    case Op::GatedNormForward:
      return "gated norm forward";
    case Op::GatedNormBackward:
      return "gated norm backward";
    case Op::ProjectionForward:
      return "projection forward";
    case Op::ProjectionBackward:
      return "projection backward";
    default:
      return "fill rows";
  }
}

// A program lies at the start of the workspace; on a device there is none.
Size header_bytes(const Layer& layer) { return layer.context->device ? Size(0) : Size(sizeof(Program)).aligned(kAlignment); }

}  // namespace

Builder::Builder(const Layer& l, const Limits& limits, const char** names)
    : layer(l),
      d(l.description),
      measuring(true),
      backend_(*l.context->backend),
      limits_(limits),
      used_(header_bytes(l)),
      names_(names) {}

Builder::Builder(const Layer& l, const Batch& planned, int64_t layer_index, Program* program)
    : layer(l),
      d(l.description),
      measuring(false),
      batch(planned.view),
      quiet_batch(planned.view),
      backend_(*l.context->backend),
      limits_(planned.limits),
      memory_(reinterpret_cast<char*>(program)),
      program_(program),
      uniform_rows_(planned.uniform ? planned.uniform_rows : 0),
      sequences_(planned.view.count),
      used_(header_bytes(l)) {
  use_states(planned, layer_index);
  program->limits = limits_;
  program->threads = l.context->threads();
}

Builder::Builder(const Layer& l, const Batch& planned, int64_t layer_index, const Builder& measured, void* workspace,
                 void* stream)
    : layer(l),
      d(l.description),
      measuring(false),
      batch(planned.device_view),
      quiet_batch(planned.device_view),
      backend_(*l.context->backend),
      limits_(planned.limits),
      memory_(static_cast<char*>(workspace)),
      uniform_rows_(planned.uniform ? planned.uniform_rows : 0),
      sequences_(planned.view.count),
      used_(header_bytes(l)),
      scratch_(static_cast<char*>(workspace) + measured.used_.value()),
      stream_(stream) {
  use_states(planned, layer_index);
  quiet_batch.stores = false;
  reserve(measured);
}

void Builder::use_states(const Batch& planned, int64_t layer_index) {
  if (layer.stateful && planned.state) state = planned.state->memory(layer_index);
  if (layer.stateful && planned.gradient_state) {
    gradient = planned.gradient_state->memory(layer_index);
    gradient_state = true;
  }
}

char* Builder::take(Size bytes) {
  const int64_t at = used_.value();
  used_ = (used_ + bytes).aligned(kAlignment);
  if (!used_.valid()) overflow_ = true;
  return measuring || overflow_ ? nullptr : memory_ + at;
}

View Builder::rows(int64_t heads, int64_t dim, int32_t dtype) {
  View view;
  view.dtype = dtype;
  view.row_stride = heads * dim;
  view.head_stride = dim;
  row_bytes_ += view.row_stride * dtype_size(dtype);
  view.data = take(Size(limits_.rows) * Size(view.row_stride) * Size(dtype_size(dtype)));
  return view;
}

View Builder::keep(const View& otherwise, int64_t heads, int64_t dim) {
  View view = otherwise;
  const int64_t at = kept_.value();
  kept_ = (kept_ + Size(limits_.rows) * Size(heads) * Size(dim) * Size(dtype_size(d.inner_dtype))).aligned(kAlignment);
  if (!kept_.valid()) overflow_ = true;
  // Backward only reads what it finds there.
  char* const saved = saved_out ? static_cast<char*>(saved_out) : static_cast<char*>(const_cast<void*>(saved_in));
  if (measuring || overflow_ || !saved) return view;
  view.dtype = d.inner_dtype;
  view.row_stride = heads * dim;
  view.head_stride = dim;
  view.data = saved + at;
  return view;
}

void Builder::quieten() {
  if (layer.context->device) return;  // there the batch itself says so
  char* memory = take(Size(limits_.sequences) * Size(sizeof(Sequence)));
  if (measuring || !memory) return;
  if (!state.nodes.base && !state.tails.base && !state.convs.base) return;
  Sequence* copies = reinterpret_cast<Sequence*>(memory);
  for (int64_t i = 0; i < sequences_; ++i) {
    Sequence* s = ::new (static_cast<void*>(copies + i)) Sequence(batch.sequences[i]);
    s->nodes_to_store = nullptr;
    s->nodes_to_store_count = 0;
    s->tail_to_store = nullptr;
    s->tail_to_store_count = 0;
    s->conv_to_store = nullptr;
    s->conv_to_store_count = 0;
  }
  quiet_batch.sequences = copies;
}

void Builder::fill(const View& view, int64_t heads, int64_t dim) {
  if (!measuring && (!view.present() || view.accumulate || batch.slack_count == 0)) return;
  RowsFill p;
  p.heads = heads;
  p.dim = dim;
  p.sequence_rows = view.sequence_stride != 0 ? uniform_rows_ : 0;
  p.batch = batch;
  p.y = view;
  add_at_times(Op::RowsFill, p);
}

void Builder::copy(const View& x, const View& y, int64_t heads, int64_t dim) {
  RowsFill p;
  p.heads = heads;
  p.dim = dim;
  p.copy = true;
  p.batch = batch;
  p.batch.slack = nullptr;  // fill() zeroes what is to be zero
  p.batch.slack_count = 0;
  p.x = x;
  p.y = y;
  add_at_times(Op::RowsFill, p);
}

void Builder::not_found(Op op) {
  if (!missing_) missing_op_ = op;
  missing_ = true;
}

// Sizes and kernels were checked when the call was measured, so that only the device itself can fail here.
void Builder::launch(Op op, const Kernel* kernel, const void* problem) {
  if (!kernel) return not_found(op);
  account(*kernel, problem);
  if (launched_ == LLA_OK) launched_ = kernel->launch(problem, limits_, scratch_, stream_);
}

void Builder::account(const Kernel& kernel, const void* problem) {
  Need need;
  kernel.measure(problem, limits_, &need);
  if (need.shared < 0 || need.per_thread < 0) {
    overflow_ = true;
    return;
  }
  shared_ = Size(std::max(shared_.value(), need.shared));
  per_thread_ = Size(std::max(per_thread_.value(), need.per_thread));
  if (kernel.op != Op::MixerForward || !kernel.saved_bytes) return;
  const int64_t saved = kernel.saved_bytes(problem, limits_);
  if (!Size(saved).valid())
    overflow_ = true;
  else
    saved_ = std::max(saved_, saved);
}

void Builder::reserve(const Builder& measured) {
  shared_ = measured.shared_;
  per_thread_ = measured.per_thread_;
  saved_ = measured.saved_;
}

Step* Builder::next_step(Op op, const Kernel* kernel, const void* problem) {
  if (!kernel) {
    not_found(op);
    return nullptr;
  }
  if (program_->steps == kMaxSteps) {
    too_many_ = true;
    return nullptr;
  }
  account(*kernel, problem);
  Step* step = ::new (static_cast<void*>(&program_->step[program_->steps++])) Step;
  step->kernel = kernel;
  step->op = op;
  step->first_phase = program_->phases;
  return step;
}

void Builder::number_phases(Step* step) {
  step->phases = step->kernel->phases(&step->problem);
  program_->phases += step->phases;
}

lla_status Builder::finish(lla_error* error) {
  if (missing_) {
    return fail(error, LLA_NOT_IMPLEMENTED, "description: backend %s has no kernel for this %s", backend_.name,
                op_name(missing_op_));
  }
  if (launched_ != LLA_OK) return device_status(*layer.context, launched_, "a kernel cannot be launched", error);
  if (too_many_) return fail(error, LLA_INTERNAL, "layer: more than %d steps", kMaxSteps);
  const int64_t threads = layer.context->device ? 0 : layer.context->threads();
  const Size shared_at = used_;
  const Size thread_bytes = per_thread_.aligned(kAlignment);
  const Size threads_at = shared_at + shared_.aligned(kAlignment);
  const Size total = threads_at + Size(threads) * thread_bytes;
  if (overflow_ || !total.valid() || !(kept_ + Size(saved_)).valid()) {
    return fail(error, LLA_SIZE_OVERFLOW, "limits: the workspace does not fit into memory");
  }
  total_ = total.value();
  if (program_) {
    program_->shared = reinterpret_cast<char*>(program_) + shared_at.value();
    program_->thread_scratch = reinterpret_cast<char*>(program_) + threads_at.value();
    program_->thread_bytes = thread_bytes.value();
  }
  return LLA_OK;
}

}  // namespace lla
