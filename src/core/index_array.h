// SPDX-License-Identifier: Apache-2.0
// IndexArray: numbers of either width in the caller's memory, read where they are.
#pragma once

#include <cstdint>

#include "lla/types.h"

namespace lla {

class IndexArray {
 public:
  IndexArray(const int64_t* data = nullptr) : data_(data) {}
  // A checked array (check_index), or one that is not given.
  IndexArray(const lla_index& index) : data_(index.data), narrow_(index.dtype == LLA_I32) {}

  explicit operator bool() const { return data_ != nullptr; }
  int64_t operator[](int64_t i) const {
    return narrow_ ? static_cast<const int32_t*>(data_)[i] : static_cast<const int64_t*>(data_)[i];
  }

 private:
  const void* data_;
  bool narrow_ = false;
};

}  // namespace lla
