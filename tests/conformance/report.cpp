// SPDX-License-Identifier: Apache-2.0
// Errors, tolerances and the report.
#include "report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace conformance {

void Report::check(const std::string& tensor, double error, double tolerance) {
  const bool good = error <= tolerance;
  ++(good ? passed_ : failed_);
  std::printf("%s %-24s %-32s %.2e (tolerance %.0e)\n", good ? "ok  " : "FAIL", name_.c_str(), tensor.c_str(), error,
              tolerance);
}

void Report::fail(const std::string& what, const std::string& reason) {
  ++failed_;
  std::printf("FAIL %-24s %-32s %s\n", name_.c_str(), what.c_str(), reason.c_str());
}

void Report::finish() const {
  std::printf("%lld passed, %lld failed\n", static_cast<long long>(passed_), static_cast<long long>(failed_));
}

double norm(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return std::sqrt(sum);
}

double relative_error(const std::vector<double>& x, const std::vector<double>& reference, double least) {
  if (x.size() != reference.size()) return INFINITY;
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += (x[i] - reference[i]) * (x[i] - reference[i]);
  const double denominator = std::max(norm(reference), least);
  return denominator > 0 ? std::sqrt(sum) / denominator : std::sqrt(sum);
}

double tolerance_of(const Options& options, CaseKind kind, const std::string& name) {
  if (options.tolerance) return *options.tolerance;
  // The models' reference logits were computed in fp32 elsewhere, so that even double precision meets them to that only.
  if (kind == CaseKind::Interop) return options.dtype == LLA_BF16 || options.dtype == LLA_F16 ? 6e-2 : 5e-6;
  switch (options.dtype) {
    case LLA_F64:
      return kind == CaseKind::BlockGradient ? 1e-7 : 1e-10;
    // Without decay and with keys that come back, the delta rule amplifies rounding.
    case LLA_F32:
      return kind == CaseKind::Mixer && name.rfind("delta_no_gate", 0) == 0 ? 1e-4 : 2e-5;
    case LLA_BF16:
      return kind == CaseKind::Mixer ? 1e-2 : kind == CaseKind::Model ? 5e-2 : 2e-2;
    default:
      return kind == CaseKind::Mixer ? 2e-3 : kind == CaseKind::Model ? 1e-2 : 4e-3;  // fp16: three more bits
  }
}

lla_tensor slice(const lm::Tensor& tensor, int64_t begin, int64_t end) {
  lla_tensor view = tensor.view();
  view.data = static_cast<char*>(view.data) + static_cast<size_t>(begin * view.strides[1]) * lla_dtype_size(tensor.dtype);
  view.dims[1] = end - begin;
  return view;
}

std::vector<Piece> pieces_of(const Options& options, int64_t rows) {
  std::vector<Piece> pieces;
  int64_t at = 0;
  for (const int64_t split : options.splits) {
    if (split <= at || split >= rows) continue;
    pieces.push_back({at, split});
    at = split;
  }
  if (options.splits.empty())
    pieces.push_back({0, rows});
  else
    for (; at < rows; ++at) pieces.push_back({at, at + 1});
  return pieces;
}

}  // namespace conformance
