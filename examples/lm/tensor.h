// SPDX-License-Identifier: Apache-2.0
// A tensor that owns its elements, of any of lla's float types or a plain integer type, and conversions between them.
#pragma once

#include <lla/lla.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace lm {

float bf16_to_float(uint16_t bits);
uint16_t float_to_bf16(float x);
float f16_to_float(uint16_t bits);
uint16_t float_to_f16(float x);
// Rounded once, not by way of a rounded float.
uint16_t double_to_bf16(double x);
uint16_t double_to_f16(double x);

// `count` elements of type `dtype` (a float type, LLA_I32 or LLA_I64) to double or float and back.
void load(const void* data, lla_dtype dtype, int64_t count, double* out);
void load(const void* data, lla_dtype dtype, int64_t count, float* out);
void store(const double* values, int64_t count, lla_dtype dtype, void* data);
void store(const float* values, int64_t count, lla_dtype dtype, void* data);

const char* dtype_name(lla_dtype dtype);  // "f32"
// LLA_DTYPE_DEFAULT if the name is none of f64, f32, bf16, f16.
lla_dtype dtype_by_name(const std::string& name);

struct Tensor {
  lla_dtype dtype = LLA_F32;
  std::vector<int64_t> shape;
  std::vector<unsigned char> bytes;

  Tensor() = default;
  // All elements zero.
  Tensor(lla_dtype type, std::vector<int64_t> dims);
  static Tensor of(const std::vector<double>& values, lla_dtype type, std::vector<int64_t> dims);

  int64_t count() const;
  void* data() { return bytes.data(); }
  const void* data() const { return bytes.data(); }
  float* f32() { return reinterpret_cast<float*>(bytes.data()); }
  const float* f32() const { return reinterpret_cast<const float*>(bytes.data()); }
  std::vector<double> values() const;
  Tensor converted(lla_dtype type) const;
  // What lla takes; the data stay here.
  lla_tensor view() const;
};

std::string shape_text(const std::vector<int64_t>& shape);  // "[2, 300]"

}  // namespace lm
