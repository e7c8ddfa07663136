// SPDX-License-Identifier: Apache-2.0
// Reads and writes safetensors files. The reader trusts nothing in a file: every length, offset, shape and type is checked.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "tensor.h"

namespace lm {

struct TensorFile {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;

  const Tensor* find(const std::string& name) const;
  const Tensor& at(const std::string& name) const;  // throws Error if there is none
  std::string meta(const std::string& key, const std::string& otherwise = "") const;
};

// Throws Error with the reason. `origin` stands in front of the message.
TensorFile parse_safetensors(std::string_view bytes, const std::string& origin);
TensorFile read_safetensors(const std::string& path);
// The file's bytes: names sorted, data aligned to 8 bytes.
std::string format_safetensors(const TensorFile& file);
// Written beside the target, flushed to the disk, then renamed over it: a reader sees the old file or the new one.
void write_safetensors(const std::string& path, const TensorFile& file);

std::string read_file(const std::string& path);
void write_file_atomically(const std::string& path, std::string_view bytes);

}  // namespace lm
