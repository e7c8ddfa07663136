// SPDX-License-Identifier: Apache-2.0
// Golden files of whole models, and checkpoints of public model classes with the logits that those classes computed.
#include <algorithm>
#include <cmath>

#include "model.h"
#include "report.h"

namespace conformance {
namespace {

// Logits of all rows in pieces through a state, and at once without one, against out.logits.
void compare_logits(const lm::TensorFile& file, const lm::ModelConfig& config,
                    const std::map<std::string, lm::Tensor>& tensors, const Options& options, double tolerance,
                    Report* report) {
  const lm::Tensor& id_tensor = file.at("in.ids");
  if (id_tensor.shape.size() != 2 || (id_tensor.dtype != LLA_I64 && id_tensor.dtype != LLA_I32)) {
    throw lm::Error("in.ids must be integers with two axes");
  }
  const int64_t batch = id_tensor.shape[0], rows = id_tensor.shape[1], vocab = config.vocab;
  std::vector<int32_t> ids;
  for (const double id : id_tensor.values()) ids.push_back(static_cast<int32_t>(id));
  const std::vector<double> reference = file.at("out.logits").values();
  if (static_cast<int64_t>(reference.size()) != batch * rows * vocab) throw lm::Error("out.logits does not fit in.ids");

  lm::Model model(options.context, *options.threads, config, tensors, options.dtype, options.grain);
  std::vector<double> logits(reference.size(), NAN);
  {
    lm::ModelRun run(model, {batch, rows, false, batch, rows});
    for (const Piece& piece : pieces_of(options, rows)) {
      const int64_t n = piece.end - piece.begin;
      std::vector<int32_t> some;
      for (int64_t b = 0; b < batch; ++b) {
        some.insert(some.end(), ids.begin() + b * rows + piece.begin, ids.begin() + b * rows + piece.end);
      }
      const lm::Rows out = run.forward(some.data(), batch, n);
      run.commit();
      for (int64_t b = 0; b < batch; ++b) {
        lm::load(out.row(b * n), out.dtype, n * vocab, &logits[static_cast<size_t>((b * rows + piece.begin) * vocab)]);
      }
    }
  }
  report->check("out.logits", relative_error(logits, reference), tolerance);
  lm::ModelRun run(model, {batch, rows, false, 0, 0});
  const lm::Rows out = run.forward(ids.data(), batch, rows);
  lm::load(out.row(0), out.dtype, batch * rows * vocab, logits.data());
  report->check("stateless.out.logits", relative_error(logits, reference), tolerance);
}

}  // namespace

void run_model(const lm::TensorFile& file, const Options& options, Report* report) {
  const lm::ModelConfig config = lm::read_golden_config(file.metadata, file.tensors);
  std::map<std::string, lm::Tensor> tensors;
  for (const lm::ParameterInfo& info : lm::model_parameters(config)) {
    const bool rounded = info.kind == lm::ParameterKind::Matrix || info.kind == lm::ParameterKind::Convolution ||
                         info.kind == lm::ParameterKind::OutputProjection;
    const lm::Tensor& w = file.at("w." + info.name);
    tensors[info.name] = rounded ? w.converted(options.dtype) : w;
  }
  compare_logits(file, config, tensors, options, tolerance_of(options, CaseKind::Model, ""), report);
}

void run_interop(const lm::TensorFile& file, const Options& options, Report* report) {
  std::map<std::string, lm::Tensor> tensors = file.tensors;
  std::erase_if(tensors,
                [](const auto& entry) { return entry.first.rfind("in.", 0) == 0 || entry.first.rfind("out.", 0) == 0; });
  const lm::ModelConfig config = lm::read_config(file.meta("config"), tensors, file.meta("class"));
  // A class that computed in bfloat16 is followed in bfloat16, whatever was asked for.
  Options own = options;
  const std::string compute = file.meta("compute_dtype");
  if (compute == "bfloat16")
    own.dtype = LLA_BF16;
  else if (compute != "float32")
    throw lm::Error("compute_dtype '" + compute + "' is not known");
  if (own.dtype == LLA_BF16 || own.dtype == LLA_F16) {
    for (const lm::ParameterInfo& info : lm::model_parameters(config)) {
      if (info.kind != lm::ParameterKind::Matrix && info.kind != lm::ParameterKind::Convolution &&
          info.kind != lm::ParameterKind::OutputProjection)
        continue;
      const auto it = tensors.find(info.name);
      if (it != tensors.end()) it->second = it->second.converted(own.dtype);
    }
  }
  compare_logits(file, config, tensors, own, tolerance_of(own, CaseKind::Interop, ""), report);
}

}  // namespace conformance
