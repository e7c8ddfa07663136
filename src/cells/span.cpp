// SPDX-License-Identifier: Apache-2.0
// Checks of one tensor on its own, and overlap of two.
#include "cells/span.h"

#include "cells/rules.h"
#include "core/checked.h"
#include "core/error.h"
#include "plugin/numeric.h"

namespace lla {
namespace {

struct Axis {
  int64_t dim = 0, stride = 0;
};

// Whether no two index tuples give one element: each axis steps over what the finer axes cover.
bool elements_distinct(const lla_tensor& tensor) {
  Axis axes[LLA_MAX_RANK];
  int count = 0;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.dims[i] <= 1) continue;
    int at = count++;
    for (; at > 0 && axes[at - 1].stride > tensor.strides[i]; --at) axes[at] = axes[at - 1];
    axes[at].dim = tensor.dims[i];
    axes[at].stride = tensor.strides[i];
  }
  int64_t extent = 1;
  for (int i = 0; i < count; ++i) {
    if (axes[i].stride < extent) return false;
    extent += (axes[i].dim - 1) * axes[i].stride;
  }
  return true;
}

Size extent_of(const lla_tensor& tensor, int first_axis) {
  Size extent = 1;
  for (int i = first_axis; i < tensor.rank; ++i) {
    if (tensor.dims[i] > 1) extent += Size(tensor.dims[i] - 1) * Size(tensor.strides[i]);
  }
  return extent;
}

}  // namespace

lla_status check_tensor(const TensorName& name, const lla_tensor& t, int row_axes, bool written, bool wide, Span* span,
                        lla_error* error) noexcept {
  const char* array = name.array;
  const char* role = role_name(name.role);
  *span = Span{name, 0, 0, 0, 0};
  if (!is_float_dtype(t.dtype)) {
    return fail(error, LLA_DTYPE_MISMATCH, "%s: %s: dtype %d is not a floating-point type", array, role, t.dtype);
  }
  if (t.dtype == LLA_F64 && !wide) {
    return fail(error, LLA_DTYPE_MISMATCH, "%s: %s: LLA_F64 is for the reference backend only", array, role);
  }
  bool empty = false;
  for (int i = 0; i < t.rank; ++i) {
    if (t.dims[i] < 0) {
      return fail(error, LLA_SHAPE_MISMATCH, "%s: %s: dims[%d] is %lld", array, role, i, static_cast<long long>(t.dims[i]));
    }
    empty = empty || t.dims[i] == 0;
  }
  for (int i = 0; i < t.rank; ++i) {
    if (t.dims[i] > 1 && t.strides[i] < 0) {
      return fail(error, LLA_SHAPE_MISMATCH, "%s: %s: strides[%d] must not be negative, is %lld", array, role, i,
                  static_cast<long long>(t.strides[i]));
    }
  }
  const int last = t.rank - 1;
  if (t.dims[last] > 1 && t.strides[last] != 1) {
    return fail(error, LLA_SHAPE_MISMATCH, "%s: %s: strides[%d] must be 1, is %lld", array, role, last,
                static_cast<long long>(t.strides[last]));
  }
  if (empty) return LLA_OK;
  const int64_t size = dtype_size(t.dtype);
  const Size bytes = extent_of(t, 0) * Size(size);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data);
  if (!bytes.valid() || begin + static_cast<uintptr_t>(bytes.value()) < begin) {
    return fail(error, LLA_SIZE_OVERFLOW, "%s: %s: its strides reach beyond the address space", array, role);
  }
  if (!t.data) return fail(error, LLA_NULL_POINTER, "%s: %s: data is NULL", array, role);
  if (begin % static_cast<uintptr_t>(size) != 0) {
    return fail(error, LLA_MISALIGNED, "%s: %s: data must be aligned to %lld bytes", array, role,
                static_cast<long long>(size));
  }
  if (written && !elements_distinct(t)) {
    return fail(error, LLA_SHAPE_MISMATCH, "%s: %s: its strides let elements coincide, and it is written", array, role);
  }
  span->begin = begin;
  span->end = begin + static_cast<uintptr_t>(bytes.value());
  if (row_axes > 0) {
    const int64_t distance = t.dims[row_axes - 1] > 1 ? t.strides[row_axes - 1] : row_axes > 1 ? t.strides[0] : 0;
    const bool lattice = row_axes < 2 || t.dims[0] <= 1 || (distance > 0 && t.strides[0] % distance == 0);
    const Size row = extent_of(t, row_axes) * Size(size);
    if (distance > 0 && lattice && row.valid()) {
      span->row_distance = static_cast<uint64_t>(distance) * static_cast<uint64_t>(size);
      span->row_bytes = static_cast<uint64_t>(row.value());
    }
  }
  return LLA_OK;
}

bool spans_overlap(const Span& a, const Span& b) noexcept {
  if (a.begin == a.end || b.begin == b.end) return false;
  if (a.end <= b.begin || b.end <= a.begin) return false;
  // Two columns of one fused buffer: rows at the same distance that lie beside each other.
  const uint64_t distance = a.row_distance;
  if (distance == 0 || distance != b.row_distance || a.row_bytes > distance || b.row_bytes > distance) return true;
  const uint64_t from =
      a.begin < b.begin ? (b.begin - a.begin) % distance : (distance - (a.begin - b.begin) % distance) % distance;
  return !(from >= a.row_bytes && from + b.row_bytes <= distance);
}

}  // namespace lla
