// SPDX-License-Identifier: Apache-2.0
// lla-conformance: runs golden files through the public C interface and compares tensor by tensor.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <filesystem>

#include "arguments.h"
#include "report.h"

namespace conformance {
namespace {

std::vector<int64_t> integers(const std::string& text) {
  std::vector<int64_t> values;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    int64_t value = 0;
    const auto [stop, code] = std::from_chars(text.data() + at, text.data() + end, value);
    if (code != std::errc() || stop != text.data() + end || value < 0)
      throw lm::Error("--split must be a list like 10,64,65");
    values.push_back(value);
    at = end + 1;
  }
  std::sort(values.begin(), values.end());
  return values;
}

// Files to run: those named, and those ending in .safetensors below folders, by name.
std::vector<std::filesystem::path> find_files(const std::vector<std::string>& paths) {
  std::vector<std::filesystem::path> files;
  for (const std::string& path : paths) {
    if (!std::filesystem::exists(path)) throw lm::Error(path + ": there is no such file or folder");
    if (!std::filesystem::is_directory(path)) {
      files.emplace_back(path);
      continue;
    }
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
      if (entry.is_regular_file() && entry.path().extension() == ".safetensors") files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

void run_file(const std::filesystem::path& path, const Options& options, Report* report) {
  const std::string name = path.stem().string();
  report->begin(name);
  try {
    const lm::TensorFile file = lm::read_safetensors(path.string());
    if (file.metadata.count("mixer"))
      run_mixer(file, name, options, report);
    else if (file.metadata.count("block"))
      run_block(file, name, options, report);
    else if (file.metadata.count("model"))
      run_model(file, options, report);
    else if (file.metadata.count("class"))
      run_interop(file, options, report);
    else
      throw lm::Error("its metadata say nothing about what it is");
  } catch (const std::exception& e) {
    report->fail("-", e.what());
  }
}

int run(int argc, char** argv) {
  lm::Arguments a("lla-conformance [options] PATH...",
                  "Runs golden files (or all below a folder) and compares every tensor. One line per tensor, then a total.\n"
                  "Exit code 1 if anything failed or nothing was run.");
  a.option("backend", "NAME", "cpu", "reference, cpu or cuda");
  a.option("dtype", "TYPE", "f32", "f64 (reference only), f32, bf16 or f16");
  a.option("inner", "TYPE", "", "type of the rows inside blocks (default: not rounded)");
  a.option("grain", "C", "64", "rows of a chunk");
  a.option("split", "N,N,...", "", "cut each sequence there and append the rest row by row");
  a.option("tolerance", "X", "", "for every tensor (default: by backend, type and case)");
  a.option("threads", "N", "1", "threads");
  if (!a.parse(argc - 1, argv + 1, true)) return 0;

  Options options;
  const std::string backend = a.text("backend");
  if (backend == "reference")
    options.backend = LLA_BACKEND_REFERENCE;
  else if (backend == "cpu")
    options.backend = LLA_BACKEND_CPU;
  else if (backend == "cuda")
    options.backend = LLA_BACKEND_CUDA;
  else
    throw lm::Error("--backend must be reference, cpu or cuda, not '" + backend + "'");
  options.dtype = lm::dtype_by_name(a.text("dtype"));
  if (options.dtype == LLA_DTYPE_DEFAULT)
    throw lm::Error("--dtype must be f64, f32, bf16 or f16, not '" + a.text("dtype") + "'");
  if (a.given("inner")) {
    options.inner = lm::dtype_by_name(a.text("inner"));
    if (options.inner == LLA_DTYPE_DEFAULT)
      throw lm::Error("--inner must be f64, f32, bf16 or f16, not '" + a.text("inner") + "'");
  }
  options.grain = a.integer("grain", 1, 4096);
  options.splits = integers(a.text("split"));
  if (a.given("tolerance")) options.tolerance = a.number("tolerance", 0, 1e9);

  lm::Threads threads(static_cast<int32_t>(a.integer("threads", 1, 1024)));
  const lla_parallel hook = threads.hook();
  lla_context_options context_options = LLA_CONTEXT_OPTIONS_INIT;
  context_options.backend = options.backend;
  context_options.parallel = &hook;
  const lm::Context context = lm::make_context(context_options);
  options.context = context.get();
  options.threads = &threads;

  Report report;
  for (const std::filesystem::path& path : find_files(a.positional())) run_file(path, options, &report);
  report.finish();
  return report.failed() == 0 && report.passed() > 0 ? 0 : 1;
}

}  // namespace
}  // namespace conformance

int main(int argc, char** argv) {
  try {
    return conformance::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "lla-conformance: %s\n", e.what());
    return 1;
  }
}
