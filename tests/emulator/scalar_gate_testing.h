// SPDX-License-Identifier: Apache-2.0
// Cases of the scalar gate's tests on the emulator: problems, their batches as the core would fill them in, and their
// results.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "cuda/backend.h"
#include "mixer_testing.h"

namespace scalar_gate_testing {

using namespace lla;
using namespace mixer_testing;

using Values = std::map<std::string, std::vector<double>>;

struct Kernels {
  const Kernel *forward = nullptr, *backward = nullptr;
};

inline Kernels cuda_kernels() {
  Kernels k;
  const cuda::KernelTable table = cuda::scalar_gate_kernels();
  for (int64_t i = 0; i < table.count; ++i) {
    if (table.kernels[i].op == Op::MixerForward) k.forward = &table.kernels[i];
    if (table.kernels[i].op == Op::MixerBackward) k.backward = &table.kernels[i];
  }
  return k;
}

inline Kernels reference_kernels() {
  MixerForward forward;
  MixerBackward backward;
  return Kernels{find_kernel(reference_backend(), Op::MixerForward, &forward),
                 find_kernel(reference_backend(), Op::MixerBackward, &backward)};
}

inline void run(const Kernel& kernel, const void* problem, const Limits& limits) {
  ASSERT_TRUE(kernel.accepts(problem));
  if (!kernel.launch) return run_kernel(kernel, problem, limits);
  Need need;
  if (kernel.op == Op::MixerForward) {  // as the core does it: before there is a state
    MixerForward bare = *static_cast<const MixerForward*>(problem);
    bare.state = SlotMemory();
    kernel.measure(&bare, limits, &need);
  } else {
    kernel.measure(problem, limits, &need);
  }
  ASSERT_GE(need.shared, 0);
  constexpr int64_t kBehind = 1 << 16;
  Buffer scratch(need.shared + kBehind);  // NaN
  ASSERT_EQ(kernel.launch(problem, limits, scratch.data(), nullptr), LLA_OK);
  const char* behind = scratch.data() + need.shared;
  EXPECT_TRUE(std::all_of(behind, behind + kBehind, [](char c) { return c == static_cast<char>(0xff); }))
      << "scratch overrun";
}

// What the core fills in for device backends.
inline void bound(BatchView* batch) {
  for (int64_t i = 0; i < batch->count; ++i) {
    const Sequence& s = batch->sequences[i];
    batch->most_rows = std::max(batch->most_rows, s.rows);
    batch->most_length = std::max(batch->most_length, s.position + s.rows);
    batch->most_nodes_to_store = std::max(batch->most_nodes_to_store, s.nodes_to_store_count);
    batch->most_tail_to_store = std::max(batch->most_tail_to_store, s.tail_to_store_count);
  }
}

inline MixerShape make_shape(int64_t heads, int64_t groups, int64_t dk, int64_t dv, int64_t grain, int64_t levels,
                             bool absorb = false, bool cyclic = false, double scale = 1) {
  MixerShape s;
  s.heads = heads;
  s.groups = groups;
  s.key_dim = dk;
  s.value_dim = dv;
  s.grain = grain;
  s.levels = levels;
  s.absorb = absorb;
  s.head_map = cyclic ? LLA_HEAD_MAP_CYCLIC : LLA_HEAD_MAP_BLOCKED;
  s.scale = scale;
  return s;
}

// One sequence of a case: `rows` rows from `position` on. `start` < 0: no state.
struct Part {
  int64_t rows, position = 0, start = -1;
  bool fork = false;
  bool fresh = false;  // with a state to be written, but without a history; `start` is the position
};

struct Case {
  MixerShape shape;
  Inputs inputs;
  std::vector<Part> parts;
  int32_t out_dtype = LLA_F32, node_dtype = LLA_F32, tail_dtype = LLA_F32;
  int32_t factor_dtype = LLA_F32;  // of gate, write, λ and their gradients
  bool accumulate = false, forward_only = false;
  std::vector<std::string> absent;  // gradients that nobody wants: "dq"
  uint64_t seed = 1;
};

inline void convert(Tensor* t, int32_t dtype) {
  if (t->empty()) return;
  Tensor to(dtype, t->rows, t->heads, t->dim, t->pad);
  for (int64_t r = 0; r < t->rows; ++r) {
    for (int64_t h = 0; h < t->heads; ++h) {
      for (int64_t i = 0; i < t->dim; ++i) to.set(r, h, i, t->get(r, h, i));
    }
  }
  *t = to;
}

constexpr int64_t kSlack = 3;  // rows of no sequence between two sequences

// Everything that forward and backward of a case give: outputs, states, gradients.
inline Values run_case(const Kernels& kernels, const Case& c) {
  const MixerShape& shape = c.shape;
  Random random(c.seed);
  int64_t rows = 0;
  bool state = false;
  for (const Part& part : c.parts) {
    rows += part.rows + kSlack;
    state |= part.start >= 0;
  }
  Tensors t = random_tensors(random, shape, rows, c.inputs);
  for (Tensor* factor : {&t.gate, &t.write, &t.lambda, &t.dgate, &t.dwrite, &t.dlambda}) convert(factor, c.factor_dtype);
  for (Tensor* out : {&t.y, &t.dq, &t.dk, &t.dv}) {
    *out = Tensor(c.out_dtype, out->rows, out->heads, out->dim, out->pad);
    if (c.accumulate) out->fill([&] { return random.normal(); });
  }
  if (c.accumulate) {
    for (Tensor* out : {&t.dgate, &t.dwrite, &t.dlambda}) out->fill([&] { return random.normal(); });
  }
  Memory memory(shape, 400, 40, 8, c.node_dtype, c.tail_dtype);
  Memory gradient(shape, 400, 40);
  std::vector<Append> appends(c.parts.size());
  std::vector<Sequence> sequences;
  int64_t row = 0;
  for (size_t i = 0; i < c.parts.size(); ++i) {
    const Part& part = c.parts[i];
    if (part.start >= 0) {
      SlotImage before;
      before.position = before.start = part.position;
      if (!part.fresh) before = memory.random_slot(random, part.position, part.start, c.inputs.decay);
      appends[i].plan(memory, before, static_cast<int64_t>(i), row, part.rows, i % 2 == 0, part.fork || part.fresh);
      sequences.push_back(appends[i].sequence);
      Sequence& s = sequences.back();
      s.initial_gradient = gradient.random_slot(random, part.position, part.start);
      s.final_gradient = gradient.random_slot(random, part.position + part.rows, part.start);
    } else {
      sequences.push_back(plain_sequence(row, part.rows, part.position));
      sequences.back().index = static_cast<int64_t>(i);
      // With another part's state: the gradient of the past that this sequence does not have, as a left neighbour needs it.
      if (state) sequences.back().initial_gradient = gradient.random_slot(random, part.position, 0);
    }
    row += part.rows + kSlack;
  }
  // Rows of no sequence, and λ columns that no row reads, hold NaN.
  for (Tensor* in : {&t.q, &t.k, &t.v, &t.dy, &t.gate, &t.write, &t.lambda}) {
    for (const Sequence& s : sequences) {
      for (int64_t r = s.row_begin + s.rows; r < s.row_begin + s.rows + kSlack && !in->empty(); ++r) {
        for (int64_t h = 0; h < in->heads; ++h) {
          for (int64_t d = 0; d < in->dim; ++d) in->set(r, h, d, NAN);
        }
      }
    }
  }
  for (size_t i = 0; i < c.parts.size() && shape.levels > 0; ++i) {
    for (int64_t r = 0; r < c.parts[i].rows; ++r) {
      const int64_t p = c.parts[i].position + r;
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t l = 0; l < shape.levels; ++l) {
          bool live = l == 0;
          for (int64_t level = 1; level < 63; ++level) live |= (p >> (level - 1) & 1) && shape.column(level) == l;
          if (!live) t.lambda.set(sequences[i].row_begin + r, h, l, NAN);
        }
      }
    }
  }
  const Limits limits = limits_of(sequences, rows);
  MixerForward forward = forward_problem(shape, t, sequences);
  bound(&forward.batch);
  if (state) forward.state = memory.memory;
  run(*kernels.forward, &forward, limits);
  Values out;
  out["y"] = t.y.values();
  const auto append = [](std::vector<double>& to, const std::vector<double>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  for (size_t i = 0; i < c.parts.size(); ++i) {
    if (c.parts[i].start < 0) continue;
    const SlotValues state_values = slot_values(memory, appends[i].after);
    append(out["state"], state_values.content);
    append(out["state scalars"], state_values.scalars);
  }
  if (c.forward_only || !kernels.backward) return out;

  MixerBackward backward = backward_problem(shape, t, sequences);
  bound(&backward.batch);
  backward.batch.stores = false;
  const std::pair<const char*, View*> gradients[] = {{"dq", &backward.dq},         {"dk", &backward.dk},
                                                     {"dv", &backward.dv},         {"dgate", &backward.dgate},
                                                     {"dwrite", &backward.dwrite}, {"dlambda", &backward.dlambda}};
  for (const auto& [name, view] : gradients) {
    view->accumulate = c.accumulate;
    if (std::find(c.absent.begin(), c.absent.end(), name) != c.absent.end()) *view = View();
  }
  if (state) {
    backward.state = memory.memory;
    backward.gradient = gradient.memory;
  }
  run(*kernels.backward, &backward, limits);
  out["dq"] = t.dq.values();
  out["dk"] = t.dk.values();
  out["dv"] = t.dv.values();
  if (c.inputs.gate) out["dgate"] = t.dgate.values();
  if (c.inputs.write) out["dwrite"] = t.dwrite.values();
  if (shape.levels > 0) out["dlambda"] = t.dlambda.values();
  for (const Sequence& s : sequences) {
    if (s.initial_gradient.tail < 0) continue;
    const SlotValues gradient_values = slot_values(gradient, s.initial_gradient);
    append(out["dstate"], gradient_values.content);
    append(out["dstate scalars"], gradient_values.scalars);
  }
  return out;
}

inline std::string describe(const Case& c) {
  const MixerShape& s = c.shape;
  std::string text = "H " + std::to_string(s.heads) + " G " + std::to_string(s.groups) + " dk " + std::to_string(s.key_dim) +
                     " dv " + std::to_string(s.value_dim) + " C " + std::to_string(s.grain) + " L " +
                     std::to_string(s.levels) + (s.absorb ? " absorb" : "") + (c.inputs.gate ? "" : " no gate") +
                     (c.inputs.write ? " write" : "") + " hard " + std::to_string(c.inputs.hard) + " type " +
                     std::to_string(c.inputs.dtype);
  for (const Part& p : c.parts) {
    text += " [" + std::to_string(p.position) + " + " + std::to_string(p.rows) + ", start " + std::to_string(p.start) + "]";
  }
  return text;
}

}  // namespace scalar_gate_testing
