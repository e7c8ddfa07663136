// SPDX-License-Identifier: Apache-2.0
// Binds and checks the tensors of a call.
#include "cells/binding.h"

#include "cells/span.h"
#include "core/error.h"
#include "core/fenwick.h"

namespace lla {
namespace {

constexpr int kMaxSpans = 2 * (kMaxIoRules + kMaxWeightRules);
// Stands for the memory of a tensor without elements, so that it still counts as given.
alignas(64) char nothing[64];

long long ll(int64_t x) { return static_cast<long long>(x); }

struct Spans {
  Span span[kMaxSpans];
  int count = 0;
  void add(const Span& s) {
    if (count < kMaxSpans) span[count++] = s;
  }
};

class Binder {
 public:
  Binder(const Layer& layer, const Batch& batch, lla_error* error)
      : layer_(layer),
        rules_(layer.rules),
        batch_(batch),
        error_(error),
        wide_(layer.context->backend->compute_dtype == LLA_F64) {}

  // Inputs and, with `outputs`, outputs.
  lla_status io(const char* array, const lla_binding* list, int64_t count, bool inputs, bool outputs, bool written,
                Tensors* tensors) {
    LLA_TRY(check_list(array, list, count));
    for (int64_t i = 0; i < count; ++i) {
      const lla_binding& b = list[i];
      const IoRule* rule = io_rule(b.role);
      if (!rule || (rule->output ? !outputs : !inputs)) return unknown(array, b.role, i);
      if (b.flags != 0) return bad_flags(array, b);
      const bool output = rule->output && written;
      LLA_TRY(bind_view(array, *rule, b, output, false, &tensors->view(b.role)));
    }
    for (int i = 0; i < rules_.io_count; ++i) {
      const IoRule& rule = rules_.io[i];
      if (rule.required && (rule.output ? outputs : inputs) && !tensors->view(rule.role).present()) {
        return missing(array, rule.role);
      }
    }
    return LLA_OK;
  }

  lla_status weights(const lla_binding* list, int64_t count, Tensors* tensors) {
    LLA_TRY(check_list("weights", list, count));
    for (int64_t i = 0; i < count; ++i) {
      const lla_binding& b = list[i];
      const WeightRule* rule = weight_rule(b.role);
      if (!rule) return unknown("weights", b.role, i);
      if (b.flags != 0) return bad_flags("weights", b);
      LLA_TRY(bind_matrix("weights", *rule, b, false, tensors, &tensors->weight(b.role)));
    }
    for (int i = 0; i < rules_.weight_count; ++i) {
      const WeightRule& rule = rules_.weights[i];
      if (rule.required && !tensors->weight(rule.role).present()) return missing("weights", rule.role);
    }
    if (layer_.description.kind == LLA_LAYER_GATED_NORM) {
      if (tensors->weight(LLA_WEIGHT_SKIP).present() && !tensors->view(LLA_SKIP_INPUT).present()) {
        return missing("io", LLA_SKIP_INPUT);
      }
      if (tensors->view(LLA_SKIP_INPUT).present() && !tensors->weight(LLA_WEIGHT_SKIP).present()) {
        return missing("weights", LLA_WEIGHT_SKIP);
      }
    }
    return LLA_OK;
  }

  lla_status gradients(const lla_binding* list, int64_t count, const Tensors& values, Tensors* tensors) {
    const char* array = "gradients";
    LLA_TRY(check_list(array, list, count));
    tensors->skip_per_channel = values.skip_per_channel;
    tensors->norm_per_group = values.norm_per_group;
    for (int64_t i = 0; i < count; ++i) {
      const lla_binding& b = list[i];
      if ((b.flags & ~LLA_ACCUMULATE) != 0) return bad_flags(array, b);
      const IoRule* input = io_rule(b.role);
      const WeightRule* weight = weight_rule(b.role);
      if ((!input || input->output) && !weight) return unknown(array, b.role, i);
      const bool given = input ? values.view(b.role).present() : values.weight(b.role).present();
      if (!given) {
        return fail(error_, LLA_INVALID_ARGUMENT, "gradients: %s is not among the inputs and weights of this call",
                    role_name(b.role));
      }
      if (input) {
        LLA_TRY(bind_view(array, *input, b, true, true, &tensors->view(b.role)));
        tensors->view(b.role).accumulate = (b.flags & LLA_ACCUMULATE) != 0;
      } else {
        LLA_TRY(bind_matrix(array, *weight, b, true, tensors, &tensors->weight(b.role)));
        tensors->weight(b.role).accumulate = (b.flags & LLA_ACCUMULATE) != 0;
      }
    }
    return LLA_OK;
  }

  // No written tensor may touch one that is read, or another written one.
  lla_status overlaps() const {
    for (int i = 0; i < written_.count; ++i) {
      for (int j = i + 1; j < written_.count; ++j) {
        const Span& a = written_.span[i];
        const Span& b = written_.span[j];
        if (!spans_overlap(a, b)) continue;
        return fail(error_, LLA_INVALID_ARGUMENT, "%s: %s overlaps %s: %s", a.name.array, role_name(a.name.role),
                    b.name.array, role_name(b.name.role));
      }
      for (int j = 0; j < read_.count; ++j) {
        const Span& w = written_.span[i];
        const Span& r = read_.span[j];
        if (!spans_overlap(w, r)) continue;
        return fail(error_, LLA_INVALID_ARGUMENT, "%s: %s overlaps %s: %s", w.name.array, role_name(w.name.role),
                    r.name.array, role_name(r.name.role));
      }
    }
    return LLA_OK;
  }

  lla_status levels() const {
    const MixerShape& shape = layer_.shape;
    if (!layer_.stateful || shape.levels == 0 || shape.absorb) return LLA_OK;
    if (batch_.on_device) {  // lengths are known there alone: the longest that the batch allows
      const int64_t most = batch_.device_view.most_length, needed = levels_needed(most);
      if (needed <= shape.levels && bit_length(most / shape.grain) <= kNodeLevels) return LLA_OK;
      return fail(error_, LLA_LEVELS_EXCEEDED, "batch: its max_length %lld needs %lld levels, the layer has %lld", ll(most),
                  ll(needed), ll(shape.levels));
    }
    for (int64_t i = 0; i < batch_.view.count; ++i) {
      const Sequence& s = batch_.view.sequences[i];
      if (s.padding || s.rows == 0) continue;
      if (bit_length((s.position + s.rows) / shape.grain) > kNodeLevels) {
        return fail(error_, LLA_LEVELS_EXCEEDED, "batch: sequence %lld reaches length %lld, more than 2^%d chunks",
                    ll(s.index), ll(s.position + s.rows), kNodeLevels);
      }
      const int64_t needed = levels_needed(s.position + s.rows);
      if (needed > shape.levels) {
        return fail(error_, LLA_LEVELS_EXCEEDED,
                    "batch: sequence %lld reaches length %lld and needs %lld levels, the layer has %lld", ll(s.index),
                    ll(s.position + s.rows), ll(needed), ll(shape.levels));
      }
    }
    return LLA_OK;
  }

  // Rows that the state keeps must not be of a wider type than its tail.
  lla_status tail_types(const SlotMemory* memory, const Tensors& t) const {
    if (!memory) return LLA_OK;
    const lla_layer_desc& d = layer_.description;
    const int32_t tail = d.kind == LLA_LAYER_CONVOLUTION ? memory->conv_layout.dtype : memory->tail_layout.dtype;
    const bool mixer = d.kind == LLA_LAYER_MIXER, cell = d.kind == LLA_LAYER_CELL;
    if (d.kind == LLA_LAYER_CONVOLUTION) return fits(LLA_X, t, tail, true);
    if (!mixer && !cell) return LLA_OK;
    const bool conv = d.conv_width > 0;
    if (conv) LLA_TRY(fits(LLA_Q, t, tail, true));
    // What passed a convolution or norm is of the inner type, to which the state was matched when it was created.
    LLA_TRY(fits(LLA_K, t, tail, conv || d.qk_norm != 0));
    LLA_TRY(fits(LLA_V, t, tail, conv));
    if (d.gate_form == LLA_GATE_LOG) LLA_TRY(fits(LLA_GATE, t, tail, true));
    if (d.write_form == LLA_WRITE_READY) LLA_TRY(fits(LLA_WRITE, t, tail, true));
    return LLA_OK;
  }

 private:
  const IoRule* io_rule(lla_role role) const {
    for (int i = 0; i < rules_.io_count; ++i) {
      if (rules_.io[i].role == role) return &rules_.io[i];
    }
    return nullptr;
  }
  const WeightRule* weight_rule(lla_role role) const {
    for (int i = 0; i < rules_.weight_count; ++i) {
      if (rules_.weights[i].role == role) return &rules_.weights[i];
    }
    return nullptr;
  }

  lla_status check_list(const char* array, const lla_binding* list, int64_t count) const {
    if (count < 0) return fail(error_, LLA_INVALID_ARGUMENT, "%s: count must not be negative, is %lld", array, ll(count));
    if (count > 0 && !list) return fail(error_, LLA_NULL_POINTER, "%s is NULL, its count is %lld", array, ll(count));
    return LLA_OK;
  }
  lla_status unknown(const char* array, lla_role role, int64_t index) const {
    return fail(error_, LLA_INVALID_ARGUMENT, "%s[%lld]: %s (%d) has no place here", array, ll(index), role_name(role),
                role);
  }
  lla_status missing(const char* array, lla_role role) const {
    return fail(error_, LLA_MISSING_ROLE, "%s: %s is missing", array, role_name(role));
  }
  lla_status bad_flags(const char* array, const lla_binding& b) const {
    return fail(error_, LLA_INVALID_ARGUMENT, "%s: %s: flags %d are not allowed here", array, role_name(b.role), b.flags);
  }
  lla_status check_reach(const char* array, lla_role role, const lla_tensor& tensor) const {
    if (reaches_memory(*layer_.context, tensor.data)) return LLA_OK;
    return fail(error_, LLA_INVALID_ARGUMENT, "%s: %s is not memory of the device", array, role_name(role));
  }
  lla_status bad_dim(const char* array, lla_role role, int axis, int64_t is, int64_t wanted, const char* least) const {
    return fail(error_, LLA_SHAPE_MISMATCH, "%s: %s: dims[%d] must be %s%lld, is %lld", array, role_name(role), axis, least,
                ll(wanted), ll(is));
  }

  bool narrow(int32_t dtype, int32_t tail, bool converted) const {
    if (dtype == LLA_F64) return tail == LLA_F64;
    return converted || tail == LLA_F64 || tail == LLA_F32 || dtype == tail;
  }
  lla_status fits(lla_role role, const Tensors& t, int32_t tail, bool converted) const {
    const View& view = t.view(role);
    if (!view.present() || narrow(view.dtype, tail, converted)) return LLA_OK;
    return fail(error_, LLA_DTYPE_MISMATCH, "io: %s: dtype %d is wider than the state's tail, dtype %d", role_name(role),
                view.dtype, tail);
  }

  lla_status bind_view(const char* array, const IoRule& rule, const lla_binding& b, bool written, bool exact, View* view) {
    if (view->present()) return fail(error_, LLA_MISSING_ROLE, "%s: %s is given twice", array, role_name(b.role));
    const lla_tensor& t = b.tensor;
    const int64_t rows = batch_.view.total_rows, sequences = batch_.view.count;
    const bool uniform = batch_.uniform && sequences * batch_.uniform_rows == rows;
    const int lead = uniform && t.rank == rule.rank + 2 ? 2 : 1;
    if (t.rank != rule.rank + lead) {
      return fail(error_, LLA_SHAPE_MISMATCH, "%s: %s: rank must be %d%s, is %d", array, role_name(b.role), rule.rank + 1,
                  uniform ? " (or one more)" : "", t.rank);
    }
    const int64_t row_dims[2] = {lead == 2 ? sequences : rows, batch_.uniform_rows};
    for (int i = 0; i < lead; ++i) {
      if (t.dims[i] != row_dims[i]) return bad_dim(array, b.role, i, t.dims[i], row_dims[i], "");
    }
    for (int i = 0; i < rule.rank; ++i) {
      const int64_t is = t.dims[lead + i];
      if (is == rule.dims[i]) continue;
      const bool spare = rule.spare_columns && !exact && i == rule.rank - 1;
      if (!spare || is < rule.dims[i]) {
        return bad_dim(array, b.role, lead + i, is, rule.dims[i], spare ? "at least " : "");
      }
    }
    Span span;
    LLA_TRY(check_tensor({array, b.role}, t, lead, written, wide_, &span, error_));
    LLA_TRY(check_reach(array, b.role, t));
    (written ? written_ : read_).add(span);
    view->data = t.data ? t.data : nothing;
    view->dtype = t.dtype;
    view->row_stride = t.dims[lead - 1] > 1 ? t.strides[lead - 1] : 0;
    if (lead == 2 && t.dims[0] > 1) view->sequence_stride = t.strides[0] - t.dims[1] * view->row_stride;
    view->head_stride = rule.rank == 1 ? rule.head_dim : t.dims[lead] > 1 ? t.strides[lead] : rule.dims[1];
    return LLA_OK;
  }

  lla_status bind_matrix(const char* array, const WeightRule& rule, const lla_binding& b, bool written, Tensors* tensors,
                         Matrix* matrix) {
    if (matrix->present()) return fail(error_, LLA_MISSING_ROLE, "%s: %s is given twice", array, role_name(b.role));
    const lla_tensor& t = b.tensor;
    const bool middle = rule.convolution && t.rank == 3;
    if (t.rank != rule.rank && !middle) {
      return fail(error_, LLA_SHAPE_MISMATCH, "%s: %s: rank must be %d%s, is %d", array, role_name(b.role), rule.rank,
                  rule.convolution ? " or 3" : "", t.rank);
    }
    if (rule.rank == 1) {
      bool other = t.dims[0] == rule.other_dim && rule.other_dim != rule.dims[0] && rule.other_dim > 0;
      if (t.dims[0] != rule.dims[0] && !other) return bad_dim(array, b.role, 0, t.dims[0], rule.dims[0], "");
      bool* flag = b.role == LLA_WEIGHT_SKIP   ? &tensors->skip_per_channel
                   : b.role == LLA_WEIGHT_NORM ? &tensors->norm_per_group
                                               : &other;
      if (!written) *flag = other;
      if (*flag != other) {  // a gradient has the shape of its weight
        return bad_dim(array, b.role, 0, t.dims[0], other ? rule.dims[0] : rule.other_dim, "");
      }
    } else {
      if (t.dims[0] != rule.dims[0]) return bad_dim(array, b.role, 0, t.dims[0], rule.dims[0], "");
      if (middle && t.dims[1] != 1) return bad_dim(array, b.role, 1, t.dims[1], 1, "");
      const int last = t.rank - 1;
      if (t.dims[last] != rule.dims[1]) return bad_dim(array, b.role, last, t.dims[last], rule.dims[1], "");
    }
    Span span;
    LLA_TRY(check_tensor({array, b.role}, t, rule.rank == 2 ? 1 : 0, written, wide_, &span, error_));
    LLA_TRY(check_reach(array, b.role, t));
    (written ? written_ : read_).add(span);
    matrix->data = t.data ? t.data : nothing;
    matrix->dtype = t.dtype;
    matrix->row_stride = rule.rank == 2 && t.dims[0] > 1 ? t.strides[0] : 0;
    return LLA_OK;
  }

  const Layer& layer_;
  const LayerRules& rules_;
  const Batch& batch_;
  lla_error* error_;
  const bool wide_;
  Spans read_, written_;
};

}  // namespace

lla_status bind_forward(const Layer& layer, const Batch& batch, const SlotMemory* memory, const lla_forward_args& arguments,
                        CallTensors* tensors, lla_error* error) noexcept {
  Binder binder(layer, batch, error);
  Tensors& values = tensors->values;
  LLA_TRY(binder.io("io", arguments.io, arguments.io_count, true, true, true, &values));
  LLA_TRY(binder.weights(arguments.weights, arguments.weight_count, &values));
  LLA_TRY(binder.levels());
  LLA_TRY(binder.tail_types(memory, values));
  return binder.overlaps();
}

lla_status bind_backward(const Layer& layer, const Batch& batch, const SlotMemory* memory,
                         const lla_backward_args& arguments, CallTensors* tensors, lla_error* error) noexcept {
  Binder binder(layer, batch, error);
  Tensors& values = tensors->values;
  LLA_TRY(binder.io("io", arguments.io, arguments.io_count, true, false, false, &values));
  LLA_TRY(binder.weights(arguments.weights, arguments.weight_count, &values));
  LLA_TRY(binder.io("outputs", arguments.outputs, arguments.output_count, false, true, false, &tensors->output_gradients));
  LLA_TRY(binder.gradients(arguments.gradients, arguments.gradient_count, values, &tensors->gradients));
  LLA_TRY(binder.levels());
  LLA_TRY(binder.tail_types(memory, values));
  return binder.overlaps();
}

}  // namespace lla
