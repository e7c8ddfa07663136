// SPDX-License-Identifier: Apache-2.0
// safetensors: 8 bytes little-endian header length, a JSON header, then the data.
#include "safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "error.h"

namespace lm {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeader = 100'000'000;  // as the format's definition says
constexpr size_t kMaxRank = 16;

struct TypeName {
  const char* name;
  lla_dtype dtype;
};
constexpr TypeName kTypes[] = {{"F32", LLA_F32}, {"F64", LLA_F64}, {"BF16", LLA_BF16},
                               {"F16", LLA_F16}, {"I32", LLA_I32}, {"I64", LLA_I64}};

[[noreturn]] void refuse(const std::string& origin, const std::string& reason) {
  throw Error(origin + ": not a valid safetensors file: " + reason);
}

// A non-negative JSON integer.
bool read_size(const json& value, uint64_t* out) {
  if (!value.is_number_unsigned()) return false;
  *out = value.get<uint64_t>();
  return true;
}

// Copies elements between memory and a file, which is little-endian; the two directions are the same.
void copy_elements(void* to, const void* from, size_t bytes, size_t element) {
  if (bytes == 0) return;
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(to, from, bytes);
  } else {
    const auto* source = static_cast<const unsigned char*>(from);
    for (size_t i = 0; i < bytes; i += element) {
      std::reverse_copy(source + i, source + i + element, static_cast<unsigned char*>(to) + i);
    }
  }
}

struct Span {
  uint64_t begin = 0, end = 0;
  const std::string* name = nullptr;
};

Span read_entry(const std::string& name, const json& entry, std::string_view data, const std::string& origin, Tensor* out) {
  const auto bad = [&](const std::string& reason) { refuse(origin, "tensor '" + name + "': " + reason); };
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets")) {
    bad("dtype, shape or data_offsets is missing");
  }
  const json& type = entry["dtype"];
  const json& shape = entry["shape"];
  const json& offsets = entry["data_offsets"];
  if (!type.is_string()) bad("dtype is no text");
  const std::string type_name = type.get<std::string>();
  const auto found =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeName& t) { return type_name == t.name; });
  if (found == std::end(kTypes)) bad("element type '" + type_name.substr(0, 20) + "' is not supported");
  if (!shape.is_array() || shape.size() > kMaxRank) bad("shape is no list of at most 16 sizes");
  const size_t element = lla_dtype_size(found->dtype);
  uint64_t bytes = element;
  bool empty = false;
  std::vector<int64_t> dims;
  for (const json& size : shape) {
    uint64_t d = 0;
    if (!read_size(size, &d) || d > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      bad("a size is no integer >= 0");
    dims.push_back(static_cast<int64_t>(d));
    if (d == 0)
      empty = true;
    else if (bytes > std::numeric_limits<uint64_t>::max() / d)
      bad("its size overflows");
    else
      bytes *= d;
  }
  if (empty) bytes = 0;
  Span span;
  if (!offsets.is_array() || offsets.size() != 2 || !read_size(offsets[0], &span.begin) ||
      !read_size(offsets[1], &span.end)) {
    bad("data_offsets is no pair of integers >= 0");
  }
  if (span.begin > span.end || span.end > data.size()) bad("its data lie outside the file");
  if (span.end - span.begin != bytes) bad("shape and data_offsets disagree");
  out->dtype = found->dtype;
  out->shape = std::move(dims);
  out->bytes.resize(bytes);
  copy_elements(out->bytes.data(), data.data() + span.begin, out->bytes.size(), element);
  return span;
}

}  // namespace

const Tensor* TensorFile::find(const std::string& name) const {
  const auto it = tensors.find(name);
  return it == tensors.end() ? nullptr : &it->second;
}

const Tensor& TensorFile::at(const std::string& name) const {
  const Tensor* t = find(name);
  if (!t) throw Error("tensor '" + name + "' is missing");
  return *t;
}

std::string TensorFile::meta(const std::string& key, const std::string& otherwise) const {
  const auto it = metadata.find(key);
  return it == metadata.end() ? otherwise : it->second;
}

TensorFile parse_safetensors(std::string_view bytes, const std::string& origin) {
  if (bytes.size() < 8) refuse(origin, "it is shorter than its length field");
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = (length << 8) | static_cast<unsigned char>(bytes[static_cast<size_t>(i)]);
  if (length > kMaxHeader || length > bytes.size() - 8) refuse(origin, "its header is longer than the file");
  const std::string_view text = bytes.substr(8, length);
  const std::string_view data = bytes.substr(8 + length);
  // The parser recurses with the nesting; a real header nests three deep, so that deep ones are refused on sight. A name
  // that occurs twice is refused too: which of the two counts would be a guess.
  bool too_deep = false, twice = false;
  std::vector<std::vector<std::string>> keys;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > 8) too_deep = true;
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end && !keys.empty()) {
      std::sort(keys.back().begin(), keys.back().end());
      if (std::adjacent_find(keys.back().begin(), keys.back().end()) != keys.back().end()) twice = true;
      keys.pop_back();
    }
    if (event == json::parse_event_t::key && !keys.empty()) keys.back().push_back(parsed.get<std::string>());
    return !too_deep;
  };
  const json header = json::parse(text.begin(), text.end(), watch, /*allow_exceptions=*/false);
  if (too_deep) refuse(origin, "its header nests too deeply");
  if (header.is_discarded() || !header.is_object()) refuse(origin, "its header is no JSON object");
  if (twice) refuse(origin, "a name occurs twice in its header");

  TensorFile file;
  std::vector<Span> spans;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) refuse(origin, "__metadata__ is no object");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) refuse(origin, "__metadata__ holds something that is no text");
        file.metadata[key] = value.get<std::string>();
      }
      continue;
    }
    const auto [it, inserted] = file.tensors.try_emplace(name);
    Span span = read_entry(name, entry, data, origin, &it->second);
    span.name = &it->first;
    spans.push_back(span);
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  uint64_t end = 0;
  for (const Span& span : spans) {
    if (span.begin < end) refuse(origin, "tensor '" + *span.name + "' overlaps another one");
    if (span.begin > end) refuse(origin, "there is a hole before tensor '" + *span.name + "'");
    end = span.end;
  }
  if (end != data.size()) refuse(origin, "there are bytes after the last tensor");
  return file;
}

std::string format_safetensors(const TensorFile& file) {
  json header = json::object();
  if (!file.metadata.empty()) header["__metadata__"] = file.metadata;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : file.tensors) {
    const lla_dtype dtype = tensor.dtype;
    const auto type =
        std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeName& t) { return t.dtype == dtype; });
    header[name] = {
        {"dtype", type->name}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string out;
  out.reserve(8 + text.size() + offset);
  const uint64_t length = text.size();
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>((length >> (8 * i)) & 255));
  out += text;
  for (const auto& [name, tensor] : file.tensors) {
    out.resize(out.size() + tensor.bytes.size());
    copy_elements(out.data() + out.size() - tensor.bytes.size(), tensor.bytes.data(), tensor.bytes.size(),
                  lla_dtype_size(tensor.dtype));
  }
  return out;
}

std::string read_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) throw Error(path + ": " + std::strerror(errno));
  std::string bytes;
  char piece[1 << 16];
  size_t n;
  while ((n = std::fread(piece, 1, sizeof piece, file.get())) > 0) bytes.append(piece, n);
  if (std::ferror(file.get())) throw Error(path + ": cannot be read: " + std::strerror(errno));
  return bytes;
}

void write_file_atomically(const std::string& path, std::string_view bytes) {
  const std::string temporary = path + ".new";
  const auto fail = [&](int fd) {
    const std::string reason = std::strerror(errno);
    if (fd >= 0) ::close(fd);
    ::unlink(temporary.c_str());
    throw Error(path + ": cannot be written: " + reason);
  };
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) fail(fd);
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::write(fd, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(fd);
    done += static_cast<size_t>(n);
  }
  if (::fsync(fd) != 0) fail(fd);
  if (::close(fd) != 0) fail(-1);
  if (::rename(temporary.c_str(), path.c_str()) != 0) fail(-1);
}

TensorFile read_safetensors(const std::string& path) { return parse_safetensors(read_file(path), path); }

void write_safetensors(const std::string& path, const TensorFile& file) {
  write_file_atomically(path, format_safetensors(file));
}

}  // namespace lm
