// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of the parts against the reference backend in double precision, for every instruction set of this CPU: rows
// that no sequence owns, strided rows between NaN, tensors [B, T, ...], several types; and bits against other splits.
#include <gtest/gtest.h>

#include <algorithm>
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

namespace lla {
namespace {

const double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int kCpu = 0, kReference = 1;

std::vector<int32_t> instruction_sets() {
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
Batch packed(const std::vector<int64_t>& rows) {
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

Batch uniform(int64_t count, int64_t rows, int64_t padding) {
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

std::vector<Batch> batches() {
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
    for (auto [a, b] : pairs_) {
      double squares = 0, count = 0;
      const auto want = [&b = b](int64_t s, int64_t r, int64_t h, int64_t i) {
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
        std::memcpy(rest.data() + at + static_cast<size_t>(i) * size, a->before.data() + at + static_cast<size_t>(i) * size, size);
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
void run(const Kernel& kernel, const void* problem, const Limits& limits, Order order = Order::Forward) {
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

class PartsTest : public testing::TestWithParam<int32_t> {
 protected:
  // Runs the CPU's first kernel and the reference's, compares, and runs the tasks in reverse: same bits.
  template <class Problem>
  void check(Parts* parts, Op op, const Problem (&problem)[2], double tolerance, const std::string& what) {
    const Kernel* cpu = find_kernel(cpu_backend(GetParam()), op, &problem[kCpu]);
    const Kernel* reference = find_kernel(reference_backend(), op, &problem[kReference]);
    ASSERT_TRUE(cpu && reference);
    const std::string name = cpu->name;
    ASSERT_EQ(name.substr(name.rfind('.') + 1), isa_name(GetParam())) << name;
    const Limits limits = parts->batch().limits();
    run(*cpu, &problem[kCpu], limits);
    run(*reference, &problem[kReference], limits);
    parts->compare(tolerance, what + " " + name);
    const auto first = parts->results();
    parts->reset_results();
    run(*cpu, &problem[kCpu], limits, Order::Backward);
    ASSERT_TRUE(parts->results() == first) << name << ": bits depend on the order of tasks";
  }
};

struct Types {
  int32_t rows, weights, results;
};
// One after the other through the cases of a test.
const Types kTypes[] = {{LLA_F32, LLA_F32, LLA_F32}, {LLA_BF16, LLA_BF16, LLA_F32}, {LLA_F16, LLA_F32, LLA_BF16},
                        {LLA_F32, LLA_F16, LLA_F16}};

// ---- projection ----

TEST_P(PartsTest, Projection) {
  size_t turn = 0;
  for (const Batch& batch : batches()) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      for (const auto& [inputs, outputs] : {std::pair<int64_t, int64_t>{5, 3}, {130, 70}, {800, 129}}) {
        for (const bool accumulate : {false, true}) {
          if (repeat > 0 && inputs > 500) continue;
          const Types& type = kTypes[(turn++ + static_cast<size_t>(repeat)) % 4];
          Parts parts(batch);
          Projection problem[2];
          Projection& p = problem[kCpu];
          p.inputs = inputs;
          p.outputs = outputs;
          p.batch = batch.view();
          p.x = parts.in(1, inputs, type.rows);
          p.weight = parts.in_weight(outputs, inputs, type.weights);
          p.bias = accumulate ? Matrix() : parts.in_weight(1, outputs, type.weights);
          problem[kReference] = p;
          parts.out(&p.y, &problem[kReference].y, 1, outputs, type.results, accumulate);
          check(&parts, Op::ProjectionForward, problem, 4e-6, "projection");

          Parts back(batch);
          p.y = View();
          p.x = back.in(1, inputs, type.rows);
          p.weight = back.in_weight(outputs, inputs, type.weights);
          p.dy = back.in(1, outputs, type.rows);
          problem[kReference] = p;
          back.out(&p.dx, &problem[kReference].dx, 1, inputs, type.results, accumulate);
          back.out_weight(&p.dweight, &problem[kReference].dweight, outputs, inputs, type.results, accumulate);
          back.out_weight(&p.dbias, &problem[kReference].dbias, 1, outputs, type.results, accumulate);
          check(&back, Op::ProjectionBackward, problem, 4e-6, "projection");
        }
      }
    }
  }
}

// One at a time: what is not asked for is not touched, and the rest stays the same.
TEST_P(PartsTest, ProjectionGradientsAlone) {
  const Batch batch = packed({9, 80});
  for (int which = 0; which < 3; ++which) {
    Parts parts(batch);
    Projection problem[2];
    Projection& p = problem[kCpu];
    p.inputs = 70;
    p.outputs = 66;
    p.batch = batch.view();
    p.x = parts.in(1, 70, LLA_F32);
    p.weight = parts.in_weight(66, 70, LLA_F32);
    p.dy = parts.in(1, 66, LLA_F32);
    Projection& r = problem[kReference] = p;
    if (which == 0) parts.out(&p.dx, &r.dx, 1, 70, LLA_F32, false);
    if (which == 1) parts.out_weight(&p.dweight, &r.dweight, 66, 70, LLA_F32, false);
    if (which == 2) parts.out_weight(&p.dbias, &r.dbias, 1, 66, LLA_F32, false);
    check(&parts, Op::ProjectionBackward, problem, 4e-6, "projection");
  }
}

// A row's bits are the same alone and in a batch.
TEST_P(PartsTest, ProjectionOfARowDoesNotDependOnTheBatch) {
  for (const int32_t dtype : {LLA_F32, LLA_BF16}) {
    const int64_t inputs = 1000, outputs = 100;
    const Batch many = packed({70, 3, 64}), one = packed({1});
    Parts parts(many);
    Projection p;
    p.inputs = inputs;
    p.outputs = outputs;
    p.batch = many.view();
    p.x = parts.in(1, inputs, dtype);
    p.weight = parts.in_weight(outputs, inputs, dtype);
    View unused;
    parts.out(&p.y, &unused, 1, outputs, LLA_F32, false);
    const Kernel* kernel = find_kernel(cpu_backend(GetParam()), Op::ProjectionForward, &p);
    run(*kernel, &p, many.limits());
    for (const int64_t row : {2, 60, 71, 72, 138}) {
      Parts alone(one);
      Projection q = p;
      q.batch = one.view();
      q.x.data = p.x.at(0, row - 2, 0);
      alone.out(&q.y, &unused, 1, outputs, LLA_F32, false);
      run(*kernel, &q, one.limits());
      ASSERT_EQ(0, std::memcmp(q.y.at(0, 2, 0), p.y.at(0, row, 0), static_cast<size_t>(outputs) * sizeof(float))) << row;
    }
  }
}

// ---- convolution ----

// Conv rings of both backends: blocks of one pool, all NaN except where a test wrote.
struct Rings {
  std::vector<char> memory;
  SlotMemory slots;

  Rings(int64_t channels, int64_t capacity, int64_t blocks, double value) {
    slots.conv_layout.channels = channels;
    slots.conv_layout.capacity = capacity;
    slots.convs.stride = slots.conv_layout.bytes();
    memory.resize(static_cast<size_t>(slots.convs.stride * blocks));
    slots.convs.base = memory.data();
    for (size_t i = 0; i < memory.size() / 4; ++i) store_element(memory.data(), LLA_F32, static_cast<int64_t>(i), value);
  }
  Rings(const Rings& other) : memory(other.memory), slots(other.slots) { slots.convs.base = memory.data(); }
  float* at(int32_t block, int64_t channel, int64_t ring) { return reinterpret_cast<float*>(slots.conv(block, channel, ring)); }
};

void expect_same_rings(const Rings& a, const Rings& b, double tolerance, const std::string& what) {
  for (size_t i = 0; i < a.memory.size() / 4; ++i) {
    const float x = load_element<float>(a.memory.data(), LLA_F32, static_cast<int64_t>(i));
    const float y = load_element<float>(b.memory.data(), LLA_F32, static_cast<int64_t>(i));
    if (std::isnan(x) && std::isnan(y)) continue;
    ASSERT_NEAR(x, y, tolerance * (1 + std::fabs(y))) << what << " " << i;
  }
}

TEST_P(PartsTest, Convolution) {
  const int64_t stream = 3;
  for (Batch batch : batches()) {
    for (size_t turn = 0; turn < 2; ++turn) {
      for (const auto& [channels, width] : {std::pair<int64_t, int64_t>{5, 1}, {70, 4}, {66, 2}, {3, 90}}) {
        for (const bool with_state : {false, true}) {
          const Types& type = kTypes[(2 * turn + with_state + static_cast<size_t>(width)) % 4];
          const bool silu = channels != 66;
          const int64_t capacity = 2 * width + 5;
          const int64_t blocks = static_cast<int64_t>(batch.sequences.size()) * 4;
          std::mt19937_64 engine(5);
          std::normal_distribution<float> normal;
          Rings state(channels + stream + 2, capacity, blocks, kNan), gradient(channels + stream + 2, capacity, blocks, kNan);
          std::deque<RowsToStore> plans;
          const auto fill_rows = [&](Rings* rings, SlotImage* image, int32_t block, int64_t rows) {
            image->tail = block;
            image->conv_rows = static_cast<int32_t>(rows);
            image->conv_origin = static_cast<int32_t>(block % 7);  // rows wrap around the ring's end
            for (int64_t back = 1; back <= rows && image->position - back >= image->start; ++back) {
              for (int64_t c = 0; c < channels; ++c) {
                *rings->at(block, stream + c, (image->conv_origin + capacity - back) % capacity) = normal(engine);
              }
            }
          };
          for (Sequence& s : batch.sequences) {
            const int32_t block = static_cast<int32_t>(s.index * 4);
            s.position = with_state ? 3 + s.index * 2 : 0;
            s.history = s.initial_gradient = s.final_gradient = SlotImage();
            s.conv_to_store = nullptr;
            s.conv_to_store_count = 0;
            if (!with_state || s.padding) continue;
            if (s.index % 3 != 2) {  // otherwise an empty past
              s.history.position = s.position;
              s.history.start = s.index % 2 ? s.position - 2 : 0;
              fill_rows(&state, &s.history, block, std::min<int64_t>(s.position, width - 1 + s.index % 2));
            }
            s.initial_gradient.position = s.position;
            s.initial_gradient.start = s.history.start;
            s.initial_gradient.tail = block + 1;
            s.initial_gradient.conv_origin = 2;
            s.initial_gradient.conv_rows = static_cast<int32_t>(std::min<int64_t>(s.position, width + 1));
            if (s.index % 4 != 3) {
              s.final_gradient.position = s.position + s.rows;
              fill_rows(&gradient, &s.final_gradient, block + 2, std::min<int64_t>(s.position + s.rows, width - 1));
            }
            RowsToStore plan;  // the last W - 1 rows, from before the call too
            plan.block = block + 3;
            plan.ring = static_cast<int32_t>(capacity - 2);
            plan.last = s.position + s.rows;
            plan.first = std::max<int64_t>(0, plan.last - (width - 1) - 2);
            plans.push_back(plan);
            s.conv_to_store = &plans.back();
            s.conv_to_store_count = 1;
          }
          const std::string what = "convolution " + std::to_string(width);
          Parts parts(batch);
          Convolution problem[2];
          Convolution& p = problem[kCpu];
          p.channels = channels;
          p.width = width;
          p.activation = silu ? LLA_ACTIVATION_SILU : LLA_ACTIVATION_NONE;
          p.first_channel = stream;
          p.batch = batch.view();
          p.x = parts.in(1, channels, type.rows);
          p.weight = parts.in_weight(channels, width, type.weights);
          if (silu) p.bias = parts.in_weight(1, channels, type.weights);
          Rings reference_state = state, reference_gradient = gradient;
          if (with_state) p.state = state.slots;
          Convolution& r = problem[kReference] = p;
          if (with_state) r.state = reference_state.slots;
          parts.out(&p.y, &r.y, 1, channels, type.results, false);
          check(&parts, Op::ConvolutionForward, problem, 3e-6, what);
          expect_same_rings(state, reference_state, 0, what);

          Parts back(batch);
          p.y = View();
          p.x = back.in(1, channels, type.rows);
          p.weight = back.in_weight(channels, width, type.weights);
          if (silu) p.bias = back.in_weight(1, channels, type.weights);
          p.dy = back.in(1, channels, type.rows);
          p.gradient = with_state ? gradient.slots : SlotMemory();
          r = p;
          r.state = with_state ? reference_state.slots : SlotMemory();
          r.gradient = with_state ? reference_gradient.slots : SlotMemory();
          back.out(&p.dx, &r.dx, 1, channels, type.results, with_state);
          back.out_weight(&p.dweight, &r.dweight, channels, width, type.results, with_state);
          if (silu) back.out_weight(&p.dbias, &r.dbias, 1, channels, type.results, with_state);
          check(&back, Op::ConvolutionBackward, problem, 6e-6, what);
          expect_same_rings(gradient, reference_gradient, 2e-5, what + " gradient ring");
        }
      }
    }
  }
}

// ---- gates ----

TEST_P(PartsTest, Gates) {
  for (const Batch& batch : batches()) {
    for (const Types& type : kTypes) {
      for (const bool by_heads : {false, true}) {
        for (int form = 0; form < 4; ++form) {
          const int64_t heads = 7, levels = form == 3 ? 1 : 12;
          const int32_t write_forms[] = {LLA_WRITE_STEP, LLA_WRITE_SIGMOID, LLA_WRITE_TWO_SIGMOID, LLA_WRITE_READY};
          const int32_t lambda_forms[] = {LLA_LAMBDA_SOFTPLUS, LLA_LAMBDA_BOUNDED, LLA_LAMBDA_PRODUCT, LLA_LAMBDA_READY};
          Gates problem[2];
          Gates& p = problem[kCpu];
          p.heads = heads;
          p.levels = levels;
          p.gate_form = form == 3 ? LLA_GATE_LOG : LLA_GATE_SOFTPLUS;
          p.write_form = write_forms[form];
          p.lambda_form = lambda_forms[form];
          if (form == 1) p.dt_min = 0.3, p.dt_max = 1.5;
          if (form != 1) p.lambda_scale = 1.75;
          p.batch = batch.view();
          const auto inputs = [&](Parts* parts) {
            p.gate = parts->in(heads, 1, type.rows, 2, by_heads);
            p.write = form == 0 ? View() : parts->in(heads, 1, type.rows, 3, by_heads);
            p.lambda = parts->in(heads, levels, type.rows, 2, by_heads);
            if (form != 3) {
              p.dt_bias = parts->in_weight(1, heads, type.weights);
              p.a_log = parts->in_weight(1, heads, type.weights);
              p.lambda_weight = parts->in_weight(heads, levels, type.weights);
            }
          };
          Parts parts(batch);
          inputs(&parts);
          Gates& r = problem[kReference] = p;
          parts.out(&p.gate_out, &r.gate_out, heads, 1, type.results, false, by_heads);
          parts.out(&p.write_out, &r.write_out, heads, 1, type.results, false, by_heads);
          parts.out(&p.lambda_out, &r.lambda_out, heads, levels, type.results, false, by_heads);
          const std::string what = "gates " + std::to_string(form);
          check(&parts, Op::GatesForward, problem, 2e-6, what);

          Parts back(batch);
          inputs(&back);
          p.gate_out = p.write_out = p.lambda_out = View();
          p.dgate_out = form == 2 ? View() : back.in(heads, 1, type.rows, 1, by_heads);
          p.dwrite_out = form == 1 ? View() : back.in(heads, 1, type.rows, 1, by_heads);
          p.dlambda_out = form == 3 ? View() : back.in(heads, levels, type.rows, 1, by_heads);
          r = p;
          back.out(&p.dgate, &r.dgate, heads, 1, type.results, by_heads, by_heads);
          if (form != 0) back.out(&p.dwrite, &r.dwrite, heads, 1, type.results, by_heads, by_heads);
          back.out(&p.dlambda, &r.dlambda, heads, levels, type.results, by_heads, by_heads);
          if (form != 3) {
            back.out_weight(&p.ddt_bias, &r.ddt_bias, 1, heads, type.results, by_heads);
            back.out_weight(&p.da_log, &r.da_log, 1, heads, type.results, by_heads);
            back.out_weight(&p.dlambda_weight, &r.dlambda_weight, heads, levels, type.results, by_heads);
          }
          check(&back, Op::GatesBackward, problem, 4e-6, what);
        }
      }
    }
  }
}

// A raw gate of any size gives an exact gate, a clamped one no gradient, and a gradient of 0 meets anything.
TEST_P(PartsTest, GatesAtTheirEnds) {
  const Batch batch = packed({4});
  Gates p;
  p.heads = 1;
  p.levels = 1;
  p.gate_form = LLA_GATE_SOFTPLUS;
  p.write_form = LLA_WRITE_SIGMOID;
  p.lambda_form = LLA_LAMBDA_SOFTPLUS;
  p.dt_max = 50;
  p.batch = batch.view();
  const float inf = std::numeric_limits<float>::infinity();
  float raw[9] = {0, 0, -inf, -200, 100, inf, 0, 0, 0}, write[9] = {0, 0, -inf, -200, 100, inf, 0, 0, 0};
  float lambda[9] = {0, 0, NAN, NAN, NAN, NAN, 0, 0, 0}, weight = 1, zeros[9] = {}, ones[9];
  float gate_out[9], write_out[9], dgate[9], dwrite[9], dlambda[9], dlambda_weight = 7;
  std::fill(ones, ones + 9, 1.0f);
  const auto view = [](float* data) {
    View v;
    v.data = data;
    v.row_stride = v.head_stride = 1;
    return v;
  };
  p.gate = view(raw);
  p.write = view(write);
  p.lambda = view(lambda);
  p.lambda_weight.data = &weight;
  p.lambda_weight.row_stride = 1;
  p.gate_out = view(gate_out);
  p.write_out = view(write_out);
  run(*find_kernel(cpu_backend(GetParam()), Op::GatesForward, &p), &p, batch.limits());
  const float want_gate[] = {0, 0, -50, -50}, want_write[] = {0, 0, 1, 1};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(gate_out[2 + i], want_gate[i]);
    EXPECT_EQ(write_out[2 + i], want_write[i]);
  }
  p.dgate_out = p.dwrite_out = view(ones);
  p.dlambda_out = view(zeros);
  p.dgate = view(dgate);
  p.dwrite = view(dwrite);
  p.dlambda = view(dlambda);
  p.dlambda_weight.data = &dlambda_weight;
  p.dlambda_weight.row_stride = 1;
  run(*find_kernel(cpu_backend(GetParam()), Op::GatesBackward, &p), &p, batch.limits());
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(dgate[2 + i], 0);
    EXPECT_EQ(dwrite[2 + i], 0);
    EXPECT_EQ(dlambda[2 + i], 0);
  }
  EXPECT_EQ(dlambda_weight, 0);
}

// ---- norms ----

TEST_P(PartsTest, L2Norm) {
  for (const Batch& batch : batches()) {
    for (const Types& type : kTypes) {
      for (const auto& [heads, dim] : {std::pair<int64_t, int64_t>{1, 1}, {3, 17}, {4, 128}}) {
        for (const bool by_heads : {false, true}) {
          Parts parts(batch);
          L2Norm problem[2];
          L2Norm& p = problem[kCpu];
          p.heads = heads;
          p.dim = dim;
          p.scale = 0.125;
          p.batch = batch.view();
          p.x = parts.in(heads, dim, type.rows, 1, by_heads);
          L2Norm& r = problem[kReference] = p;
          parts.out(&p.y, &r.y, heads, dim, type.results, false, by_heads);
          check(&parts, Op::L2NormForward, problem, 1e-6, "l2");
          Parts back(batch);
          p.y = View();
          p.epsilon = dim == 1 ? 0.5 : 1e-6;  // of one element without it nothing but rounding is left
          p.x = back.in(heads, dim, type.rows, 1, by_heads);
          p.dy = back.in(heads, dim, type.rows, 1, by_heads);
          r = p;
          back.out(&p.dx, &r.dx, heads, dim, type.results, by_heads, by_heads);
          check(&back, Op::L2NormBackward, problem, 3e-6, "l2");
        }
      }
    }
  }
}

TEST_P(PartsTest, GatedNorm) {
  for (const Batch& batch : batches()) {
    for (int form : {LLA_NORM_NONE, LLA_NORM_GATE_FIRST, LLA_NORM_NORM_FIRST}) {
      for (int variant = 0; variant < 8; ++variant) {
        const Types& type = kTypes[variant % 4];
        const bool with_skip = variant & 1, with_z = variant & 2, shared = variant & 4;
        const int64_t heads = 4, value_dim = 19, width = heads * value_dim;
        Parts parts(batch);
        GatedNorm problem[2];
        GatedNorm& p = problem[kCpu];
        p.form = form;
        p.width = width;
        p.heads = heads;
        p.value_dim = value_dim;
        p.group = shared ? value_dim : width;
        p.weight_per_group = shared;
        p.skip_per_channel = with_z;
        p.batch = batch.view();
        const auto inputs = [&](Parts* from) {
          p.x = from->in(heads, value_dim, type.rows, 1, shared);
          if (with_skip) p.skip = from->in(heads, value_dim, type.rows, 1, !shared);
          if (with_skip && variant != 7) p.d = from->in_weight(1, p.skip_per_channel ? width : heads, type.weights);
          if (with_z) p.z = from->in(1, width, type.rows);
          if (form != LLA_NORM_NONE) p.weight = from->in_weight(1, shared ? p.group : width, type.weights);
        };
        inputs(&parts);
        GatedNorm& r = problem[kReference] = p;
        parts.out(&p.y, &r.y, heads, value_dim, type.results, false, !shared);
        const std::string what = "gated norm " + std::to_string(form) + " " + std::to_string(variant);
        check(&parts, Op::GatedNormForward, problem, 2e-6, what);
        Parts back(batch);
        inputs(&back);
        p.y = View();
        p.dy = back.in(heads, value_dim, type.rows, 1, shared);
        r = p;
        back.out(&p.dx, &r.dx, heads, value_dim, type.results, shared, shared);
        if (with_skip) back.out(&p.dskip, &r.dskip, heads, value_dim, type.results, shared, shared);
        if (with_z) back.out(&p.dz, &r.dz, 1, width, type.results, shared);
        if (p.d.present()) back.out_weight(&p.dd, &r.dd, 1, p.skip_per_channel ? width : heads, type.results, shared);
        if (form != LLA_NORM_NONE) {
          back.out_weight(&p.dweight, &r.dweight, 1, shared ? p.group : width, type.results, shared);
        }
        check(&back, Op::GatedNormBackward, problem, 6e-6, what);
      }
    }
  }
}

// ---- rows ----

TEST_P(PartsTest, RowsFillCopies) {
  for (const Batch& batch : batches()) {
    for (const Types& type : kTypes) {
      for (const bool accumulate : {false, true}) {
        for (const bool by_heads : {false, true}) {
          Batch without_slack = batch;
          without_slack.slack.clear();
          Parts parts(without_slack);
          RowsFill problem[2];
          RowsFill& p = problem[kCpu];
          p.heads = 3;
          p.dim = 13;
          p.copy = true;
          p.batch = without_slack.view();
          p.x = parts.in(3, 13, type.rows, 1, by_heads);
          RowsFill& r = problem[kReference] = p;
          parts.out(&p.y, &r.y, 3, 13, type.results, accumulate, !by_heads);
          check(&parts, Op::RowsFill, problem, 1e-7, "rows");
        }
      }
    }
  }
}

TEST_P(PartsTest, RowsFillClearsSlack) {
  for (const Batch& batch : batches()) {
    for (const int32_t dtype : {LLA_F32, LLA_BF16}) {
      for (const bool by_heads : {false, true}) {
        RowsFill p;
        p.heads = 3;
        p.dim = 5;
        p.batch = batch.view();
        p.y.dtype = dtype;
        p.y.head_stride = by_heads ? 6 : 5;
        p.y.row_stride = 20;
        p.y.sequence_stride = batch.per_sequence ? 7 : 0;
        std::vector<char> bytes(static_cast<size_t>((batch.total_rows * 20 + 2000) * 4), 1);
        p.y.data = bytes.data();
        run(*find_kernel(cpu_backend(GetParam()), Op::RowsFill, &p), &p, batch.limits());
        std::vector<char> want(bytes.size(), 1);
        for (const RowRange& range : batch.slack) {
          for (int64_t row = range.begin; row < range.end; ++row) {
            for (int64_t h = 0; h < 3; ++h) {
              View y = p.y;
              y.data = want.data();
              std::memset(y.at(batch.owner(row), row, h), 0, static_cast<size_t>(5 * dtype_size(dtype)));
            }
          }
        }
        EXPECT_TRUE(bytes == want);
        std::fill(bytes.begin(), bytes.end(), static_cast<char>(1));
        p.y.accumulate = true;  // adding zero changes nothing
        run(*find_kernel(cpu_backend(GetParam()), Op::RowsFill, &p), &p, batch.limits());
        EXPECT_TRUE(bytes == std::vector<char>(bytes.size(), 1));
      }
    }
  }
}

// ---- table ----

TEST_P(PartsTest, TableEndsInTheReference) {
  const Backend& backend = cpu_backend(GetParam());
  EXPECT_STREQ(backend.name, "cpu");
  EXPECT_STREQ(backend.isa, isa_name(GetParam()));
  EXPECT_EQ(&backend, &cpu_backend(GetParam()));
  const Backend& reference = reference_backend();
  ASSERT_GT(backend.kernel_count, reference.kernel_count);
  for (int64_t i = 0; i < reference.kernel_count; ++i) {
    EXPECT_EQ(backend.kernels[backend.kernel_count - reference.kernel_count + i].run, reference.kernels[i].run);
  }
  for (int64_t i = 0; i < backend.kernel_count - reference.kernel_count; ++i) {
    const std::string name = backend.kernels[i].name;
    EXPECT_EQ(name.substr(0, 4), "cpu.");
    EXPECT_EQ(name.substr(name.rfind('.') + 1), isa_name(GetParam()));
  }
  Projection p;
  p.x.dtype = LLA_F64;
  EXPECT_STREQ(find_kernel(backend, Op::ProjectionForward, &p)->name, "reference.projection.forward");
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, PartsTest, testing::ValuesIn(instruction_sets()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace lla
