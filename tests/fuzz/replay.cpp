// SPDX-License-Identifier: Apache-2.0
// Runs a harness on stored inputs, without a fuzzer: every file of the folders and every file named. Each file is also cut
// at a few lengths, since every prefix is an input.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz.h"

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i) {
    if (std::filesystem::is_directory(argv[i])) {
      for (const auto& entry : std::filesystem::directory_iterator(argv[i])) files.push_back(entry.path());
    } else {
      files.emplace_back(argv[i]);
    }
  }
  std::sort(files.begin(), files.end());
  size_t runs = 0;
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "%s cannot be read\n", path.c_str());
      return 1;
    }
    const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::fprintf(stderr, "%s\n", path.filename().c_str());  // the last line names the input that ended the program
    for (const size_t size : {bytes.size(), bytes.size() * 3 / 4, bytes.size() / 2, bytes.size() / 4}) {
      // A copy of its own for each length: a sanitizer sees the first byte behind it.
      const std::vector<uint8_t> input(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
      LLVMFuzzerTestOneInput(input.data(), input.size());
      ++runs;
    }
  }
  std::printf("%zu files, %zu runs\n", files.size(), runs);
  return files.empty();  // a corpus that was not found is no success
}
