// SPDX-License-Identifier: Apache-2.0
// What every case shares: the options of a run, errors, tolerances, and the report with one line per tensor.
#pragma once

#include <lla/lla.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "handles.h"
#include "safetensors.h"
#include "threads.h"

namespace conformance {

struct Options {
  lla_backend backend = LLA_BACKEND_CPU;
  lla_dtype dtype = LLA_F32;
  lla_dtype inner = LLA_DTYPE_DEFAULT;  // of the rows inside golden blocks
  int64_t grain = 64;
  std::vector<int64_t> splits;  // rising; the rows after the last one are appended one by one
  std::optional<double> tolerance;
  lla_context* context = nullptr;
  lm::Threads* threads = nullptr;

  // Type of gradients and of outputs that are not rounded to the rows' type.
  lla_dtype wide() const { return dtype == LLA_F64 ? LLA_F64 : LLA_F32; }
};

enum class CaseKind { Mixer, Block, BlockGradient, Model, Interop };

class Report {
 public:
  void begin(const std::string& name) { name_ = name; }
  // One line: passed if error <= tolerance (a NaN fails).
  void check(const std::string& tensor, double error, double tolerance);
  // A failure without a number.
  void fail(const std::string& what, const std::string& reason);
  void finish() const;
  int64_t passed() const { return passed_; }
  int64_t failed() const { return failed_; }

 private:
  std::string name_;
  int64_t passed_ = 0, failed_ = 0;
};

// ||x - reference|| / max(||reference||, least); the numerator alone if the denominator is zero.
double relative_error(const std::vector<double>& x, const std::vector<double>& reference, double least = 0);
double norm(const std::vector<double>& x);

// The default tolerance of a kind of case; --tolerance wins.
double tolerance_of(const Options& options, CaseKind kind, const std::string& name);

// A tensor [B, T, ...] cut to the rows begin ... end - 1 of each sequence, as a view of the same memory.
lla_tensor slice(const lm::Tensor& tensor, int64_t begin, int64_t end);

// The pieces in which `rows` rows are appended: one without splits.
struct Piece {
  int64_t begin, end;
};
std::vector<Piece> pieces_of(const Options& options, int64_t rows);

// Cases. `name` is the file's name without folder and ending.
void run_mixer(const lm::TensorFile& file, const std::string& name, const Options& options, Report* report);
void run_block(const lm::TensorFile& file, const std::string& name, const Options& options, Report* report);
void run_model(const lm::TensorFile& file, const Options& options, Report* report);
void run_interop(const lm::TensorFile& file, const Options& options, Report* report);

}  // namespace conformance
