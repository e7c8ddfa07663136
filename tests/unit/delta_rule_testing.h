// SPDX-License-Identifier: Apache-2.0
// Helpers for the tests of the CPU's delta rule: unit keys, batches with histories and gradients of states, random trials.
#pragma once

#include <gtest/gtest.h>

#include "cpu/mixers.h"
#include "golden.h"
#include "lla/context.h"
#include "mixer_testing.h"

namespace delta_rule_testing {

using namespace mixer_testing;
using Values = std::vector<double>;

inline std::vector<int32_t> instruction_sets() {
  std::vector<int32_t> sets = {LLA_ISA_BASELINE};
  const int32_t best = cpu_isa();
  if (best == LLA_ISA_AVX2 || best == LLA_ISA_AVX512) sets.push_back(LLA_ISA_AVX2);
  if (best == LLA_ISA_AVX512) sets.push_back(LLA_ISA_AVX512);
  if (best == LLA_ISA_NEON) sets.push_back(LLA_ISA_NEON);
  return sets;
}

inline const Kernel& kernel_of(int32_t isa, Op op) {
  int64_t count = 0;
  const Kernel* kernels = cpu::delta_rule_kernels(isa, &count);
  for (int64_t i = 0; i < count; ++i) {
    if (kernels[i].op == op) return kernels[i];
  }
  return kernels[0];
}

inline MixerShape shape_of(int64_t heads, int64_t groups, int64_t dk, int64_t dv, int64_t grain, int64_t levels,
                           bool absorb = false) {
  MixerShape s;
  s.mixer = LLA_DELTA_RULE;
  s.heads = heads;
  s.groups = groups;
  s.key_dim = dk;
  s.value_dim = dv;
  s.grain = grain;
  s.levels = levels;
  s.absorb = absorb;
  s.scale = 0.75;
  return s;
}

// Keys of length one: longer ones make the delta rule grow without bound.
inline void make_unit(Tensor& k) {
  for (int64_t r = 0; r < k.rows; ++r) {
    for (int64_t h = 0; h < k.heads; ++h) {
      double sum = 0;
      for (int64_t i = 0; i < k.dim; ++i) sum += k.get(r, h, i) * k.get(r, h, i);
      for (int64_t i = 0; i < k.dim; ++i) k.set(r, h, i, k.get(r, h, i) / std::sqrt(sum));
    }
  }
}
inline void make_unit(Memory& m, const SlotImage& image) {
  const int32_t type = m.memory.tail_layout.dtype;
  const int64_t dk = m.shape.key_dim;
  for (int64_t p = std::max(image.position / m.shape.grain * m.shape.grain, image.start); p < image.position; ++p) {
    const int64_t ring = (image.tail_origin + p % m.shape.grain) % m.memory.tail_layout.capacity;
    for (int64_t g = 0; g < m.shape.groups; ++g) {
      char* k = m.memory.tail_k(image.tail, g, ring);
      double sum = 0;
      for (int64_t i = 0; i < dk; ++i) sum += std::pow(load_element<double>(k, type, i), 2);
      for (int64_t i = 0; i < dk; ++i) store_element<double>(k, type, i, load_element<double>(k, type, i) / std::sqrt(sum));
    }
  }
}

// Nodes of the delta rule have no decay of their own.
inline void clear_decays(Memory& m, const SlotImage& image) {
  for (int32_t id : image.node) {
    for (int64_t h = 0; id >= 0 && h < m.shape.heads; ++h) {
      store_element<double>(m.memory.node_decay(id, h), LLA_F32, 0, 0.0);
    }
  }
}

inline Tensors unit_tensors(Random& random, const MixerShape& shape, int64_t rows, const Inputs& in) {
  Tensors t = random_tensors(random, shape, rows, in);
  make_unit(t.k);
  return t;
}

// The same tensors with outputs in double, for the reference.
inline Tensors with_double_outputs(const Tensors& t) {
  Tensors r = t;
  for (Tensor* x : {&r.y, &r.dq, &r.dk, &r.dv, &r.dgate, &r.dwrite, &r.dlambda}) {
    if (!x->empty()) *x = Tensor(LLA_F64, x->rows, x->heads, x->dim);
  }
  return r;
}

struct Named {
  const char* name;
  Values values;
};
inline std::vector<Named> gradients_of(const Tensors& t) {
  return {{"dq", t.dq.values()},       {"dk", t.dk.values()},         {"dv", t.dv.values()},
          {"dgate", t.dgate.values()}, {"dwrite", t.dwrite.values()}, {"dlambda", t.dlambda.values()}};
}
inline void expect_close(const std::vector<Named>& a, const std::vector<Named>& b, double tolerance,
                         const std::string& where, double gate_size = 0) {
  for (size_t i = 0; i < a.size(); ++i) {
    // Gradients that are zero but for rounding (a unit key of one element erases everything) count as of size 1e-2.
    const double size = std::string(a[i].name) == "dgate" ? gate_size : 0;
    const double floor = std::max(size, 1e-2 * std::sqrt(static_cast<double>(b[i].values.size())));
    const double error = golden::relative_error(a[i].values, b[i].values, floor);
    EXPECT_LE(error, tolerance) << a[i].name << " " << where;
  }
}

struct Part {
  int64_t start, position, rows;
  bool history = true, padding = false;
};

// Everything that a slot holds; gates of -inf and -700 are brought to the size of the rest.
inline void append_values(const Memory& m, const SlotImage& image, Values* out) {
  const SlotValues one = slot_values(m, image);
  out->insert(out->end(), one.content.begin(), one.content.end());
  for (double x : one.scalars) out->push_back(std::isinf(x) ? -2 : x < -100 ? x / 700 : x);
}

// A batch with histories and states' gradients, on one backend's memory. Two with the same seed hold the same numbers.
struct Step {
  Step(uint64_t seed, const MixerShape& shape, const std::vector<Part>& parts, int32_t node_dtype, int32_t tail_dtype)
      : memory(shape, 400, 40, 8, node_dtype, tail_dtype), gradient(shape, 400, 40) {
    memory.rewrites_all = true;
    Random random(seed);
    appends.resize(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      const Part& part = parts[i];
      const int64_t begin = rows;
      rows += part.rows;
      Append& append = appends[i];
      if (part.history) {
        const SlotImage before = memory.random_slot(random, part.position, part.start);
        make_unit(memory, before);
        clear_decays(memory, before);
        const bool every_fold = i % 2 == 0 && shape.grain >= 16;
        append.plan(memory, before, static_cast<int64_t>(i), begin, part.rows, every_fold, i % 3 == 1);
        Sequence& s = append.sequence;
        s.final_gradient = gradient.random_slot(random, part.position + part.rows, part.start);
        s.initial_gradient = gradient.empty_slot(part.position);
        s.initial_gradient.start = part.start;
        s.initial_gradient.tail_origin = 1 % static_cast<int32_t>(gradient.memory.tail_layout.capacity);
        for (int b = 0; b < kNodes; ++b) {
          if (gradient.live(part.position / shape.grain, b, part.start)) s.initial_gradient.node[b] = gradient.next_node++;
        }
      } else {
        append.sequence = plain_sequence(begin, part.rows, part.position);
        append.sequence.index = static_cast<int64_t>(i);
      }
      append.sequence.padding = part.padding;
      sequences.push_back(append.sequence);
    }
  }
  Values slots() const {
    Values out;
    for (const Append& append : appends) {
      if (append.sequence.history.tail < 0 || append.sequence.padding) continue;
      append_values(memory, append.after, &out);
    }
    return out;
  }
  Values initial_gradients() const {
    Values out;
    for (const Sequence& s : sequences) {
      if (s.initial_gradient.tail < 0 || s.padding) continue;
      append_values(gradient, s.initial_gradient, &out);
    }
    return out;
  }

  Memory memory, gradient;
  std::vector<Append> appends;
  std::vector<Sequence> sequences;
  int64_t rows = 0;
};

struct Result {
  Tensors t;
  Values slots, initial;
  std::vector<Named> named(bool states) const {
    std::vector<Named> out = gradients_of(t);
    out.push_back({"y", t.y.values()});
    if (states) out.push_back({"slots", slots});
    if (states) out.push_back({"initial gradient", initial});
    return out;
  }
};

enum class Saved { No, Yes };

inline Result run_step(const Kernel* forward, const Kernel* backward, Step& step, Tensors t, Saved keep = Saved::No,
                       bool reverse = false) {
  Result result;
  result.t = std::move(t);
  Limits limits = limits_of(step.sequences, result.t.q.rows);
  MixerForward f = forward_problem(step.memory.shape, result.t, step.sequences);
  f.state = step.memory.memory;
  if (!forward) forward = find_kernel(reference_backend(), Op::MixerForward, &f);
  const int64_t bytes = forward->saved_bytes ? forward->saved_bytes(&f, limits) : 0;
  constexpr int64_t kBehind = 4096;  // nothing is written there
  Buffer saved(bytes + kBehind);
  if (keep == Saved::Yes) f.saved = saved.data();
  run_kernel(*forward, &f, limits, reverse);
  EXPECT_TRUE(std::all_of(saved.data() + bytes, saved.data() + bytes + kBehind, [](char x) { return x == char(0xff); }));
  MixerBackward b = backward_problem(step.memory.shape, result.t, step.sequences);
  b.state = step.memory.memory;
  b.gradient = step.gradient.memory;
  if (keep == Saved::Yes) b.saved = saved.data();
  if (!backward) backward = find_kernel(reference_backend(), Op::MixerBackward, &b);
  run_kernel(*backward, &b, limits, reverse);
  result.slots = step.slots();
  result.initial = step.initial_gradients();
  return result;
}

struct Trial {
  MixerShape shape;
  std::vector<Part> parts;
  Inputs in;
  int32_t node_dtype = LLA_F32, tail_dtype = LLA_F32;
};

inline Trial random_trial(Random& random, int number) {
  const int64_t dims[] = {1, 3, 16, 48, 64, 128}, grains[] = {1, 4, 16, 64, 128, 256};
  const int64_t pairs[][2] = {{1, 1}, {2, 2}, {4, 2}, {3, 1}, {12, 1}};
  Trial trial;
  const bool small = random.below(3) > 0;  // of large ones only few, for time
  const int64_t* pair = pairs[random.below(small ? 5 : 3)];
  const int64_t most = small ? 3 : 6, grain = grains[random.below(6)];
  trial.shape = shape_of(pair[0], pair[1], dims[random.below(most)], dims[random.below(most)], grain, 0);
  const int kind = number % 4;
  if (kind > 0) trial.shape.levels = kind == 1 ? 1 + random.below(7) : 12;
  trial.shape.absorb = kind == 1;
  trial.shape.head_map = random.below(2) ? LLA_HEAD_MAP_CYCLIC : LLA_HEAD_MAP_BLOCKED;
  trial.in.gate = random.below(4) > 0;
  trial.in.write = random.below(4) > 0;
  trial.in.pad = random.below(2) * 5;
  const int64_t sequences = 1 + random.below(4);
  for (int64_t i = 0; i < sequences; ++i) {
    Part part;
    part.position = random.below(2) ? random.below(400) : grain * random.below(4);
    part.start = random.below(3) ? 0 : random.below(part.position + 1);
    part.rows = random.below(3) ? random.below(300) : random.below(6);
    part.history = random.below(4) > 0;
    part.padding = random.below(8) == 0;
    trial.parts.push_back(part);
  }
  return trial;
}

inline std::string describe(const Trial& t, int number) {
  std::string text = std::string("trial ") + std::to_string(number) + " H" + std::to_string(t.shape.heads) + " G" +
                     std::to_string(t.shape.groups) + " dk" + std::to_string(t.shape.key_dim) + " dv" +
                     std::to_string(t.shape.value_dim) + " C" + std::to_string(t.shape.grain) + " L" +
                     std::to_string(t.shape.levels) + (t.shape.absorb ? " absorb" : "");
  for (const Part& p : t.parts) {
    text += " [" + std::to_string(p.start) + " " + std::to_string(p.position) + "+" + std::to_string(p.rows) +
            (p.history ? "" : " empty") + (p.padding ? " padding" : "") + "]";
  }
  return text;
}

}  // namespace delta_rule_testing
