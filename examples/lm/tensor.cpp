// SPDX-License-Identifier: Apache-2.0
// Element types and owned tensors.
#include "tensor.h"

#include <bit>
#include <cmath>

#include "error.h"

namespace lm {

float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float f16_to_float(uint16_t bits) {
  const uint32_t exponent = (bits >> 10) & 31u, mantissa = bits & 1023u;
  float magnitude;
  if (exponent == 0)
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  else if (exponent < 31)
    magnitude = std::ldexp(static_cast<float>(mantissa | 1024u), static_cast<int>(exponent) - 25);
  else
    magnitude = mantissa ? NAN : INFINITY;
  return bits & 0x8000u ? -magnitude : magnitude;
}

uint16_t double_to_f16(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000u : 0;
  const double a = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7e00u;
  if (a >= 65520.0) return sign | 0x7c00u;
  // The last place of a float16 is 2^-24 below 2^-14 and 2^(e - 10) from there on.
  int exponent = 0;
  std::frexp(a, &exponent);
  const int place = a < 0x1p-14 ? -24 : exponent - 11;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(a, -place)), place);
  if (rounded < 0x1p-14) return sign | static_cast<uint16_t>(std::ldexp(rounded, 24));
  std::frexp(rounded, &exponent);
  const auto mantissa = static_cast<uint16_t>(std::ldexp(rounded, 11 - exponent));  // 1024 ... 2047
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + (mantissa - 1024));
}

uint16_t float_to_f16(float x) { return double_to_f16(x); }

uint16_t double_to_bf16(double x) {
  float f = static_cast<float>(x);
  if (std::isfinite(f) && f != 0 && static_cast<double>(f) != x) {
    // Not exact: make the float's last bit odd, so that the second rounding sees on which side of it the number lies.
    uint32_t bits = std::bit_cast<uint32_t>(f);
    if (!(bits & 1u)) {
      bits = std::fabs(static_cast<double>(f)) > std::fabs(x) ? bits - 1 : bits + 1;
      f = std::bit_cast<float>(bits);
    }
  }
  return float_to_bf16(f);
}

namespace {

template <class T>
void load_as(const void* data, lla_dtype dtype, int64_t count, T* out) {
  const auto each = [&](auto element, auto convert) {
    using E = decltype(element);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(&element, static_cast<const char*>(data) + i * static_cast<int64_t>(sizeof(E)), sizeof(E));
      out[i] = static_cast<T>(convert(element));
    }
  };
  switch (dtype) {
    case LLA_F32:
      each(float{}, [](float x) { return x; });
      break;
    case LLA_F64:
      each(double{}, [](double x) { return x; });
      break;
    case LLA_BF16:
      each(uint16_t{}, bf16_to_float);
      break;
    case LLA_F16:
      each(uint16_t{}, f16_to_float);
      break;
    case LLA_I32:
      each(int32_t{}, [](int32_t x) { return x; });
      break;
    case LLA_I64:
      each(int64_t{}, [](int64_t x) { return x; });
      break;
    default:
      throw Error("unknown element type");
  }
}

template <class T>
void store_as(const T* values, int64_t count, lla_dtype dtype, void* data) {
  const auto each = [&](auto convert) {
    for (int64_t i = 0; i < count; ++i) {
      const auto element = convert(values[i]);
      std::memcpy(static_cast<char*>(data) + i * static_cast<int64_t>(sizeof(element)), &element, sizeof(element));
    }
  };
  switch (dtype) {
    case LLA_F32:
      each([](T x) { return static_cast<float>(x); });
      break;
    case LLA_F64:
      each([](T x) { return static_cast<double>(x); });
      break;
    case LLA_BF16:
      each([](T x) { return double_to_bf16(static_cast<double>(x)); });
      break;
    case LLA_F16:
      each([](T x) { return double_to_f16(static_cast<double>(x)); });
      break;
    default:
      throw Error("numbers cannot be stored in this element type");
  }
}

}  // namespace

void load(const void* data, lla_dtype dtype, int64_t count, double* out) { load_as(data, dtype, count, out); }
void load(const void* data, lla_dtype dtype, int64_t count, float* out) { load_as(data, dtype, count, out); }
void store(const double* values, int64_t count, lla_dtype dtype, void* data) { store_as(values, count, dtype, data); }
void store(const float* values, int64_t count, lla_dtype dtype, void* data) { store_as(values, count, dtype, data); }

const char* dtype_name(lla_dtype dtype) {
  switch (dtype) {
    case LLA_F32:
      return "f32";
    case LLA_F64:
      return "f64";
    case LLA_BF16:
      return "bf16";
    case LLA_F16:
      return "f16";
    case LLA_I32:
      return "i32";
    case LLA_I64:
      return "i64";
    default:
      return "?";
  }
}

lla_dtype dtype_by_name(const std::string& name) {
  for (const lla_dtype dtype : {LLA_F64, LLA_F32, LLA_BF16, LLA_F16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  return LLA_DTYPE_DEFAULT;
}

Tensor::Tensor(lla_dtype type, std::vector<int64_t> dims) : dtype(type), shape(std::move(dims)) {
  bytes.resize(static_cast<size_t>(count()) * lla_dtype_size(dtype));
}

Tensor Tensor::of(const std::vector<double>& values, lla_dtype type, std::vector<int64_t> dims) {
  Tensor t(type, std::move(dims));
  if (t.count() != static_cast<int64_t>(values.size())) throw Error("shape and number of values differ");
  store(values.data(), t.count(), type, t.data());
  return t;
}

int64_t Tensor::count() const {
  int64_t n = 1;
  for (const int64_t d : shape) n *= d;
  return n;
}

std::vector<double> Tensor::values() const {
  std::vector<double> out(static_cast<size_t>(count()));
  load(data(), dtype, count(), out.data());
  return out;
}

Tensor Tensor::converted(lla_dtype type) const {
  if (type == dtype) return *this;
  return of(values(), type, shape);
}

lla_tensor Tensor::view() const {
  lla_tensor t{};
  t.data = const_cast<unsigned char*>(bytes.data());
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  if (t.rank < 1 || t.rank > LLA_MAX_RANK) throw Error("a tensor of shape " + shape_text(shape) + " cannot be passed on");
  int64_t stride = 1;
  for (int32_t i = t.rank - 1; i >= 0; --i) {
    t.dims[i] = shape[static_cast<size_t>(i)];
    t.strides[i] = stride;
    stride *= t.dims[i];
  }
  return t;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace lm
