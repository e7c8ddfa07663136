// SPDX-License-Identifier: Apache-2.0
// 64-bit size arithmetic that remembers an overflow, and knows what fits into an address space of 32 bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lla {

// A non-negative size; once an operation overflows, it stays invalid.
class Size {
 public:
  constexpr Size(int64_t value = 0) : value_(value), valid_(value >= 0) {}
  friend Size operator+(Size a, Size b) {
    Size r;
    r.valid_ = a.valid_ && b.valid_ && !__builtin_add_overflow(a.value_, b.value_, &r.value_);
    return r;
  }
  friend Size operator*(Size a, Size b) {
    Size r;
    r.valid_ = a.valid_ && b.valid_ && !__builtin_mul_overflow(a.value_, b.value_, &r.value_);
    return r;
  }
  friend Size operator/(Size a, int64_t b) {  // rounded down
    a.value_ /= b;
    return a;
  }
  Size& operator+=(Size b) { return *this = *this + b; }
  // Rounded up to a multiple of a power of two.
  Size aligned(int64_t alignment) const {
    Size r = *this + Size(alignment - 1);
    r.value_ &= ~(alignment - 1);
    return r;
  }
  // Whether it is the size of something that can be in memory.
  bool valid() const { return valid_ && value_ <= PTRDIFF_MAX; }
  int64_t value() const { return value_; }

 private:
  int64_t value_;
  bool valid_;
};

constexpr int64_t kAlignment = 64;  // of every buffer that lla lays out

}  // namespace lla
