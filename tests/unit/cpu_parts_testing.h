// SPDX-License-Identifier: Apache-2.0
// Helpers for the tests of the CPU's part kernels: batches with rows that no sequence owns, tensors between NaN, results for
// the CPU and for the reference in double, and running a kernel.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "lla/context.h"
#include "plugin/backend.h"

namespace lla::parts_testing {

inline const double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int kTested = 0, kReference = 1;

inline std::vector<int32_t> instruction_sets() {
  std::vector<int32_t> sets = {LLA_ISA_BASELINE};
  const int32_t best = cpu_isa();
  if (best == LLA_ISA_AVX2 || best == LLA_ISA_AVX512) sets.push_back(LLA_ISA_AVX2);
  if (best == LLA_ISA_AVX512) sets.push_back(LLA_ISA_AVX512);
  if (best == LLA_ISA_NEON) sets.push_back(LLA_ISA_NEON);
  return sets;
}

// ---- batches ----

struct Batch {
  std::vector<Sequence> sequences;
  std::vector<RowRange> slack;
  int64_t total_rows = 0;
  bool per_sequence = false;  // tensors are [B, T, ...] with a gap behind each sequence

  BatchView view() const {
    BatchView v;
    v.sequences = sequences.data();
    v.count = static_cast<int64_t>(sequences.size());
    v.total_rows = total_rows;
    v.slack = slack.data();
    v.slack_count = static_cast<int64_t>(slack.size());
    return v;
  }
  Limits limits() const {
    Limits l;
    l.sequences = static_cast<int64_t>(sequences.size());
    l.rows = l.rows_per_sequence = total_rows;
    l.length = 1 << 20;
    return l;
  }
  bool live(int64_t row) const {
    for (const Sequence& s : sequences) {
      if (!s.padding && row >= s.row_begin && row < s.row_begin + s.rows) return true;
    }
    return false;
  }
  // The sequence whose span of the row axis holds a row.
  int64_t owner(int64_t row) const {
    int64_t owner = 0;
    for (const Sequence& s : sequences) {
      if (s.row_begin <= row) owner = s.index;
    }
    return owner;
  }
};

// Sequences of `rows` rows each (negative: padding), with slack rows before the first, between some, and at the end.
inline Batch packed(const std::vector<int64_t>& rows) {
  Batch batch;
  batch.total_rows = 2;
  batch.slack.push_back({0, 2});
  for (size_t i = 0; i < rows.size(); ++i) {
    Sequence s;
    s.index = static_cast<int64_t>(i);
    s.row_begin = batch.total_rows;
    s.rows = std::abs(rows[i]);
    s.padding = rows[i] < 0;
    batch.total_rows += s.rows;
    if (s.padding) batch.slack.push_back({s.row_begin, batch.total_rows});
    batch.sequences.push_back(s);
  }
  batch.slack.push_back({batch.total_rows, batch.total_rows + 3});
  batch.total_rows += 3;
  return batch;
}

inline Batch uniform(int64_t count, int64_t rows, int64_t padding) {
  Batch batch;
  batch.per_sequence = true;
  for (int64_t i = 0; i < count; ++i) {
    Sequence s;
    s.index = i;
    s.row_begin = i * rows;
    s.rows = rows;
    s.padding = i == padding;
    if (s.padding) batch.slack.push_back({s.row_begin, s.row_begin + rows});
    batch.sequences.push_back(s);
  }
  batch.total_rows = count * rows;
  return batch;
}

inline std::vector<Batch> batches() {
  return {packed({5, -3, 0, 70, 1, 18}), packed(std::vector<int64_t>(90, 1)), uniform(3, 33, 1), packed({0}), packed({-2})};
}

// ---- tensors ----

// Live rows hold numbers, all else NaN; a result may touch live rows only.
struct Tensor {
  std::vector<char> bytes, before;
  View view;
  Matrix matrix;
  int64_t heads = 1, dim = 0;
};

class Parts {
 public:
  explicit Parts(const Batch& batch, uint64_t seed = 1) : batch_(batch), engine_(seed) {}

  // Input; `spread` scales the numbers.
  View in(int64_t heads, int64_t dim, int32_t dtype, double spread = 1, bool by_heads = false) {
    return make(heads, dim, dtype, by_heads, [&] { return spread * normal_(engine_); }).view;
  }
  Matrix in_weight(int64_t rows, int64_t columns, int32_t dtype, double spread = 1) {
    return make_weight(rows, columns, dtype, [&] { return spread * normal_(engine_); }).matrix;
  }
  // A result for the CPU and one for the reference in double; `accumulate`: both start from the same numbers.
  void out(View* cpu, View* reference, int64_t heads, int64_t dim, int32_t dtype, bool accumulate, bool by_heads = false) {
    Tensor& a = make(heads, dim, dtype, by_heads, [&] { return normal_(engine_); });
    Tensor& b = make(heads, dim, LLA_F64, by_heads, [] { return 0.0; });
    each(a, [&](int64_t s, int64_t r, int64_t h, int64_t i) {
      store_element(b.view.at(s, r, h), LLA_F64, i, load_element<double>(a.view.at(s, r, h), dtype, i));
    });
    a.view.accumulate = b.view.accumulate = accumulate;
    a.before = a.bytes;
    *cpu = a.view;
    *reference = b.view;
    pairs_.push_back({&a, &b});
  }
  void out_weight(Matrix* cpu, Matrix* reference, int64_t rows, int64_t columns, int32_t dtype, bool accumulate) {
    Tensor& a = make_weight(rows, columns, dtype, [&] { return normal_(engine_); });
    Tensor& b = make_weight(rows, columns, LLA_F64, [] { return 0.0; });
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        store_element(b.matrix.at(i), LLA_F64, j, load_element<double>(a.matrix.at(i), dtype, j));
      }
    }
    a.matrix.accumulate = b.matrix.accumulate = accumulate;
    a.before = a.bytes;
    *cpu = a.matrix;
    *reference = b.matrix;
    weight_pairs_.push_back({&a, &b});
  }

  // Results against the reference: relative to the element and to the tensor's root mean square.
  void compare(double tolerance, const std::string& what) {
    for (const auto& pair : pairs_) {
      Tensor *a = pair.first, *b = pair.second;
      double squares = 0, count = 0;
      const auto want = [b](int64_t s, int64_t r, int64_t h, int64_t i) {
        return load_element<double>(b->view.at(s, r, h), LLA_F64, i);
      };
      each(*a, [&](int64_t s, int64_t r, int64_t h, int64_t i) {
        if (std::isfinite(want(s, r, h, i))) squares += want(s, r, h, i) * want(s, r, h, i), ++count;
      });
      const double rms = std::sqrt(squares / std::max(count, 1.0));
      std::vector<char> rest = a->bytes;
      each(*a, [&](int64_t s, int64_t r, int64_t h, int64_t i) {
        check(load_element<double>(a->view.at(s, r, h), a->view.dtype, i), want(s, r, h, i), rms, a->view.dtype, tolerance,
              what);
        const size_t at = static_cast<size_t>(static_cast<char*>(a->view.at(s, r, h)) - a->bytes.data());
        const size_t size = static_cast<size_t>(dtype_size(a->view.dtype));
        const size_t from = at + static_cast<size_t>(i) * size;
        std::memcpy(rest.data() + from, a->before.data() + from, size);
      });
      ASSERT_TRUE(rest == a->before) << what << ": wrote outside the live rows";
    }
    for (auto [a, b] : weight_pairs_) {
      const int64_t rows = a->heads, columns = a->dim;
      double squares = 0;
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) squares += std::pow(load_element<double>(b->matrix.at(i), LLA_F64, j), 2);
      }
      const double rms = std::sqrt(squares / static_cast<double>(rows * columns));
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          check(load_element<double>(a->matrix.at(i), a->matrix.dtype, j), load_element<double>(b->matrix.at(i), LLA_F64, j),
                rms, a->matrix.dtype, tolerance, what);
        }
      }
    }
  }

  std::vector<std::vector<char>> results() const {
    std::vector<std::vector<char>> all;
    for (auto [a, b] : pairs_) all.push_back(a->bytes);
    for (auto [a, b] : weight_pairs_) all.push_back(a->bytes);
    return all;
  }
  void reset_results() {
    for (auto [a, b] : pairs_) std::copy(a->before.begin(), a->before.end(), a->bytes.begin());
    for (auto [a, b] : weight_pairs_) std::copy(a->before.begin(), a->before.end(), a->bytes.begin());
  }
  const Batch& batch() const { return batch_; }

 private:
  template <class F>
  Tensor& make(int64_t heads, int64_t dim, int32_t dtype, bool by_heads, F number) {
    Tensor& t = tensors_.emplace_back();
    t.heads = heads;
    t.dim = dim;
    t.view.dtype = dtype;
    t.view.head_stride = by_heads ? dim + 1 : dim;
    t.view.row_stride = heads * t.view.head_stride + 3;
    t.view.sequence_stride = batch_.per_sequence ? 7 : 0;
    const int64_t elements = batch_.total_rows * t.view.row_stride + 7 * static_cast<int64_t>(batch_.sequences.size()) + 1;
    t.bytes.resize(static_cast<size_t>(elements * dtype_size(dtype)));
    t.view.data = t.bytes.data();
    for (int64_t i = 0; i < elements; ++i) store_element(t.view.data, dtype, i, kNan);
    each(t, [&](int64_t s, int64_t r, int64_t h, int64_t i) { store_element(t.view.at(s, r, h), dtype, i, number()); });
    return t;
  }
  template <class F>
  Tensor& make_weight(int64_t rows, int64_t columns, int32_t dtype, F number) {
    Tensor& t = tensors_.emplace_back();
    t.heads = rows;
    t.dim = columns;
    t.matrix.dtype = dtype;
    t.matrix.row_stride = columns + 2;
    t.bytes.resize(static_cast<size_t>(rows * t.matrix.row_stride * dtype_size(dtype)));
    t.matrix.data = t.bytes.data();
    for (int64_t i = 0; i < rows * t.matrix.row_stride; ++i) store_element(t.matrix.data, dtype, i, kNan);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) store_element(t.matrix.at(i), dtype, j, number());
    }
    return t;
  }
  template <class F>
  void each(const Tensor& t, F f) const {
    for (const Sequence& s : batch_.sequences) {
      for (int64_t r = 0; !s.padding && r < s.rows; ++r) {
        for (int64_t h = 0; h < t.heads; ++h) {
          for (int64_t i = 0; i < t.dim; ++i) f(s.index, s.row_begin + r, h, i);
        }
      }
    }
  }
  static void check(double got, double want, double rms, int32_t dtype, double tolerance, const std::string& what) {
    if (got == want || (std::isnan(got) && std::isnan(want))) return;
    const double ulp = dtype == LLA_BF16 ? 0x1p-8 : dtype == LLA_F16 ? 0x1p-11 : 0;
    ASSERT_LE(std::fabs(got - want), (tolerance + ulp) * std::fabs(want) + tolerance * rms + (dtype == LLA_F16 ? 6e-8 : 0))
        << what << " got " << got << " want " << want;
  }

  const Batch& batch_;
  std::mt19937_64 engine_;
  std::normal_distribution<double> normal_;
  std::deque<Tensor> tensors_;
  std::vector<std::pair<Tensor*, Tensor*>> pairs_, weight_pairs_;
};

// ---- running a kernel ----

enum class Order { Forward, Backward };

// Runs all tasks as two threads in turns would; scratch starts as garbage of NaN.
inline void run(const Kernel& kernel, const void* problem, const Limits& limits, Order order = Order::Forward) {
  Need need;
  kernel.measure(problem, limits, &need);
  ASSERT_GE(need.shared, 0);
  const size_t shared = static_cast<size_t>(need.shared), thread = static_cast<size_t>(need.per_thread);
  std::vector<char> memory(shared + 2 * thread + 256, static_cast<char>(0xff));
  char* base = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  for (int32_t phase = 0; phase < kernel.phases(problem); ++phase) {
    const int64_t count = kernel.tasks(problem, phase);
    for (int64_t i = 0; i < count; ++i) {
      Scratch scratch;
      scratch.shared = base;
      scratch.thread = base + (shared + 63) / 64 * 64 + static_cast<size_t>(i % 2) * thread;
      kernel.run(problem, limits, scratch, phase, order == Order::Forward ? i : count - 1 - i);
    }
  }
  for (size_t i = static_cast<size_t>(base - memory.data()) + (shared + 63) / 64 * 64 + 2 * thread; i < memory.size(); ++i) {
    ASSERT_EQ(memory[i], static_cast<char>(0xff)) << "wrote past its scratch";
  }
}

// Kernels of one of the CPU's instruction sets.
struct CpuParts {
  int32_t isa;

  BatchView view(const Batch& batch) const { return batch.view(); }
  const Kernel* kernel(Op op, const void* problem) const { return find_kernel(cpu_backend(isa), op, problem); }
  void run(Op op, const void* problem, const Limits& limits) const {
    parts_testing::run(*kernel(op, problem), problem, limits);
  }
  // Runs the first kernel and the reference's, compares, and runs the tasks in reverse and in another rounding mode:
  // same bits.
  template <class Problem>
  void check(Parts* parts, Op op, const Problem (&problem)[2], double tolerance, const std::string& what) const {
    const Kernel* cpu = kernel(op, &problem[kTested]);
    const Kernel* reference = find_kernel(reference_backend(), op, &problem[kReference]);
    ASSERT_TRUE(cpu && reference);
    const std::string name = cpu->name;
    ASSERT_EQ(name.substr(name.rfind('.') + 1), isa_name(isa)) << name;
    const Limits limits = parts->batch().limits();
    parts_testing::run(*cpu, &problem[kTested], limits);
    parts_testing::run(*reference, &problem[kReference], limits);
    parts->compare(tolerance, what + " " + name);
    const auto first = parts->results();
    parts->reset_results();
    parts_testing::run(*cpu, &problem[kTested], limits, Order::Backward);
    ASSERT_TRUE(parts->results() == first) << name << ": bits depend on the order of tasks";
#if defined(__x86_64__) || defined(__aarch64__)
    parts->reset_results();
    std::fesetround(FE_UPWARD);
    parts_testing::run(*cpu, &problem[kTested], limits);
    const int left = std::fegetround();
    std::fesetround(FE_TONEAREST);
    ASSERT_EQ(left, FE_UPWARD) << name;
    ASSERT_TRUE(parts->results() == first) << name << ": bits depend on the host's rounding";
#endif
  }
};

class PartsTest : public testing::TestWithParam<int32_t> {
 protected:
  CpuParts tested() const { return {GetParam()}; }
};

struct Types {
  int32_t rows, weights, results;
};
// One after the other through the cases of a test.
const Types kTypes[] = {
    {LLA_F32, LLA_F32, LLA_F32}, {LLA_BF16, LLA_BF16, LLA_F32}, {LLA_F16, LLA_F32, LLA_BF16}, {LLA_F32, LLA_F16, LLA_F16}};

}  // namespace lla::parts_testing
