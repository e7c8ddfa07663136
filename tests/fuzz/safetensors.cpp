// SPDX-License-Identifier: Apache-2.0
// The safetensors reader of the language-model example: any bytes are refused with an Error, or read to tensors that agree
// with themselves and survive being written and read again.
#include "safetensors.h"

#include <string>

#include "error.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Not a std::string: behind its bytes stands a NUL that nobody may count on.
  const fuzz::Block copy(size);
  if (size) std::memcpy(copy.data(), data, size);
  lm::TensorFile file;
  try {
    file = lm::parse_safetensors({copy.data(), size}, "file");
  } catch (const lm::Error& e) {
    PROMISE(std::strncmp(e.what(), "file: ", 6) == 0);
    return 0;
  }
  size_t total = 0;
  for (const auto& [name, tensor] : file.tensors) {
    PROMISE(tensor.bytes.size() == static_cast<size_t>(tensor.count()) * lla_dtype_size(tensor.dtype));
    total += tensor.bytes.size();
    PROMISE(static_cast<int64_t>(tensor.values().size()) == tensor.count());
    if (!tensor.shape.empty() && tensor.shape.size() <= LLA_MAX_RANK) PROMISE(tensor.view().dims[0] == tensor.shape[0]);
  }
  PROMISE(total + 8 <= size);
  const lm::TensorFile again = lm::parse_safetensors(lm::format_safetensors(file), "again");
  PROMISE(again.metadata == file.metadata && again.tensors.size() == file.tensors.size());
  for (const auto& [name, tensor] : file.tensors) {
    const lm::Tensor& other = again.at(name);
    PROMISE(other.dtype == tensor.dtype && other.shape == tensor.shape && other.bytes == tensor.bytes);
  }
  return 0;
}
