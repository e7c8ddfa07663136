// SPDX-License-Identifier: Apache-2.0
// Reads golden vectors (safetensors files) for unit tests: every tensor as doubles with its shape, and the metadata.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plugin/numeric.h"

namespace golden {

struct Tensor {
  std::string dtype;  // as in the file: "F32"
  std::vector<int64_t> shape;
  std::vector<double> data;  // row-major; integers too

  int64_t size() const { return static_cast<int64_t>(data.size()); }
  std::vector<float> floats() const { return std::vector<float>(data.begin(), data.end()); }
};

// A file. Check `valid` first: a file that is missing or malformed has no tensors and says why in `error`.
struct File {
  bool valid = false;
  std::string error;
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;

  bool has(const std::string& name) const { return tensors.count(name) != 0; }
  const Tensor& tensor(const std::string& name) const { return tensors.at(name); }
  const std::vector<double>& operator[](const std::string& name) const { return tensors.at(name).data; }
  int64_t integer(const std::string& key) const { return std::strtoll(metadata.at(key).c_str(), nullptr, 10); }
  double number(const std::string& key) const { return std::strtod(metadata.at(key).c_str(), nullptr); }
  const std::string& text(const std::string& key) const { return metadata.at(key); }
};

inline int64_t element_size(const std::string& dtype) {
  if (dtype == "F64" || dtype == "I64") return 8;
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "F16" || dtype == "BF16") return 2;
  return 0;
}

inline double element(const std::string& dtype, const char* bytes) {
  const auto as = [bytes](auto value) {
    char copy[sizeof(value)];  // the file is little-endian
    std::memcpy(copy, bytes, sizeof(value));
    if (std::endian::native == std::endian::big) std::reverse(copy, copy + sizeof(value));
    std::memcpy(&value, copy, sizeof(value));
    return value;
  };
  if (dtype == "F64") return as(double{});
  if (dtype == "F32") return as(float{});
  if (dtype == "I64") return static_cast<double>(as(int64_t{}));
  if (dtype == "I32") return as(int32_t{});
  if (dtype == "BF16") return lla::bf16_to_float(as(uint16_t{}));
  return lla::f16_to_float(as(uint16_t{}));
}

// Reads a file by its full path.
inline File read(const std::string& path) {
  File file;
  std::ifstream stream(path, std::ios::binary);
  if (!stream) {
    file.error = "cannot open " + path;
    return file;
  }
  const std::vector<char> bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  uint64_t header_bytes = 0;
  for (size_t i = std::min<size_t>(8, bytes.size()); i-- > 0;)
    header_bytes = header_bytes << 8 | static_cast<unsigned char>(bytes[i]);
  if (bytes.size() < 8 || header_bytes > bytes.size() - 8) {
    file.error = "no header in " + path;
    return file;
  }
  const char* data = bytes.data() + 8 + static_cast<size_t>(header_bytes);
  const uint64_t data_bytes = bytes.size() - 8 - header_bytes;
  const nlohmann::json header = nlohmann::json::parse(bytes.data() + 8, data, nullptr, false);
  if (!header.is_object()) {
    file.error = "header of " + path + " is no JSON object";
    return file;
  }
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      for (const auto& [key, value] : entry.items()) file.metadata[key] = value.get<std::string>();
      continue;
    }
    Tensor tensor;
    tensor.dtype = entry.at("dtype").get<std::string>();
    tensor.shape = entry.at("shape").get<std::vector<int64_t>>();
    const uint64_t begin = entry.at("data_offsets").at(0).get<uint64_t>();
    const uint64_t end = entry.at("data_offsets").at(1).get<uint64_t>();
    int64_t count = 1;
    for (int64_t dim : tensor.shape) count *= dim;
    const int64_t size = element_size(tensor.dtype);
    if (size == 0 || begin > end || end > data_bytes || static_cast<uint64_t>(count * size) != end - begin) {
      file.error = "tensor " + name + " of " + path + " is malformed";
      return file;
    }
    tensor.data.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      tensor.data[static_cast<size_t>(i)] = element(tensor.dtype, data + begin + static_cast<uint64_t>(i * size));
    }
    file.tensors[name] = std::move(tensor);
  }
  file.valid = true;
  return file;
}

#ifdef LLA_TEST_DATA
// Reads a file of the golden vectors by its name without the ending: load("scalar_tiny").
inline File load(const std::string& name) { return read(std::string(LLA_TEST_DATA) + "/" + name + ".safetensors"); }
#endif

inline double norm(const std::vector<double>& x) {
  double sum = 0;
  for (double value : x) sum += value * value;
  return std::sqrt(sum);
}

// ||x - reference|| / max(||reference||, floor). Infinite if the sizes differ or x is not finite.
template <class T>
inline double relative_error(const std::vector<T>& x, const std::vector<double>& reference, double floor = 0) {
  if (x.size() != reference.size()) return INFINITY;
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double difference = static_cast<double>(x[i]) - reference[i];
    if (!std::isfinite(difference)) return INFINITY;
    sum += difference * difference;
  }
  const double size = std::fmax(norm(reference), floor);
  return sum == 0 ? 0 : std::sqrt(sum) / size;
}

// ||rowsum(a * b)|| over rows of `dim`: the natural size of gate and write gradients (a = gradient of o, b = o).
inline double row_dot_norm(const std::vector<double>& a, const std::vector<double>& b, int64_t dim) {
  double sum = 0;
  for (size_t row = 0; row + static_cast<size_t>(dim) <= a.size(); row += static_cast<size_t>(dim)) {
    double dot = 0;
    for (size_t i = 0; i < static_cast<size_t>(dim); ++i) dot += a[row + i] * b[row + i];
    sum += dot * dot;
  }
  return std::sqrt(sum);
}

}  // namespace golden
