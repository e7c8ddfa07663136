// SPDX-License-Identifier: Apache-2.0
// Span: the memory that a tensor covers, checked for overflow, and whether two tensors share an element.
#pragma once

#include <cstdint>

#include "lla/types.h"

namespace lla {

// Names a tensor in messages.
struct TensorName {
  const char* array;  // "io", "weights", "outputs", "gradients"
  lla_role role;
};

struct Span {
  TensorName name;
  uintptr_t begin, end;  // equal: no memory
  // If > 0, every row begins at `begin` plus a multiple of this and covers `row_bytes` from there.
  uint64_t row_distance, row_bytes;
};

// Checks rank, sizes, strides, type, alignment and pointer of a tensor whose first `row_axes` axes count rows. `written`:
// no two elements may coincide. `wide`: LLA_F64 is accepted.
lla_status check_tensor(const TensorName& name, const lla_tensor& tensor, int row_axes, bool written, bool wide, Span* span,
                        lla_error* error) noexcept;
// Conservative: false only if no byte can be shared.
bool spans_overlap(const Span& a, const Span& b) noexcept;

}  // namespace lla
