// SPDX-License-Identifier: Apache-2.0
// Row-wise arithmetic. Each row is done by one thread in one order, so that results do not depend on the number of threads.
#include "rowmath.h"

#include <bit>
#include <cfloat>
#include <cmath>
#include <type_traits>
#include <vector>

#include "loops.h"

namespace lm {
namespace {

static_assert(FLT_EVAL_METHOD == 0 || FLT_EVAL_METHOD == 16,
              "sums of floats must be floats; on 32-bit x86: -msse2 -mfpmath=sse");

// exp to float accuracy in a form that compilers turn into SIMD code.
LM_LOOP float fast_exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the nearest integer moves into the low bits
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) - 0x4b400000u + 127u) << 23;
  return p * std::bit_cast<float>(exponent);
}
LM_LOOP double fast_exp(double x) { return std::exp(x); }

// A row as numbers of type T: the row itself if it has that type, else a copy in `scratch`.
template <class T>
const T* in(const Rows& rows, int64_t r, std::vector<T>* scratch) {
  if (rows.dtype == (std::is_same_v<T, float> ? LLA_F32 : LLA_F64)) return static_cast<const T*>(rows.row(r));
  scratch->resize(static_cast<size_t>(rows.width));
  load(rows.row(r), rows.dtype, rows.width, scratch->data());
  return scratch->data();
}
template <class T>
void out(const std::vector<T>& values, const Rows& rows, int64_t r) {
  store(values.data(), rows.width, rows.dtype, rows.row(r));
}

// Calls body(begin, end, T{}) for pieces of rows, T = the type to compute in.
template <class F>
void by_rows(Threads& threads, const Rows& rows, const F& body) {
  threads.for_pieces(rows.count, 16, [&](int64_t begin, int64_t end) {
    if (rows.dtype == LLA_F64)
      body(begin, end, double{});
    else
      body(begin, end, float{});
  });
}

struct Add {
  template <class T>
  static LM_LOOP void run(size_t n, const T* x, const T* y, T* sum) {
    for (size_t i = 0; i < n; ++i) sum[i] = x[i] + y[i];
  }
};

struct GateProduct {
  template <class T>
  static LM_LOOP void run(size_t n, const T* gate, const T* up, T* product) {
    for (size_t i = 0; i < n; ++i) product[i] = gate[i] / (T(1) + fast_exp(-gate[i])) * up[i];
  }
};

struct GateProductBackward {
  template <class T>
  static LM_LOOP void run(size_t n, const T* dy, const T* gate, const T* up, T* dgate, T* dup) {
    for (size_t i = 0; i < n; ++i) {
      const T s = T(1) / (T(1) + fast_exp(-gate[i]));
      dgate[i] = dy[i] * up[i] * s * (T(1) + gate[i] * (T(1) - s));
      dup[i] = dy[i] * gate[i] * s;
    }
  }
};

// *top = the largest of x, e = exp(x - top), *sum = the sum of e: by eights, so that neither waits for its own last step.
struct Softmax {
  template <class T>
  static LM_LOOP void run(size_t n, const T* x, T* e, T* top, double* sum) {
    constexpr size_t kLanes = 8;
    T most[kLanes];
    double sums[kLanes] = {};
    for (size_t lane = 0; lane < kLanes; ++lane) most[lane] = x[0];
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) most[lane] = x[i + lane] > most[lane] ? x[i + lane] : most[lane];
    }
    for (; i < n; ++i) most[0] = x[i] > most[0] ? x[i] : most[0];
    for (size_t lane = 1; lane < kLanes; ++lane) most[0] = most[lane] > most[0] ? most[lane] : most[0];
    const T largest = *top = most[0];
    for (i = 0; i < n; ++i) e[i] = fast_exp(x[i] - largest);
    for (i = 0; i + kLanes <= n; i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += static_cast<double>(e[i + lane]);
    }
    for (; i < n; ++i) sums[0] += static_cast<double>(e[i]);
    for (size_t lane = 1; lane < kLanes; ++lane) sums[0] += sums[lane];
    *sum = sums[0];
  }
};

struct Scale {
  template <class T>
  static LM_LOOP void run(size_t n, T scale, T* x) {
    for (size_t i = 0; i < n; ++i) x[i] *= scale;
  }
};

}  // namespace

void embed(Threads& threads, const int32_t* ids, const Tensor& table, const Rows& y) {
  const Rows source{const_cast<void*>(table.data()), table.dtype, table.shape[0], table.shape[1]};
  by_rows(threads, y, [&](int64_t begin, int64_t end, auto type) {
    using T = decltype(type);
    std::vector<T> values(static_cast<size_t>(y.width));
    for (int64_t r = begin; r < end; ++r) {
      load(source.row(ids[r]), source.dtype, y.width, values.data());
      out(values, y, r);
    }
  });
}

void embed_backward(Threads& threads, const int32_t* ids, const Rows& dy, Tensor* gradient) {
  // Threads share the columns, not the rows: two rows may have the same id.
  const int64_t width = dy.width;
  threads.for_pieces(width, 32, [&](int64_t begin, int64_t end) {
    std::vector<double> row(static_cast<size_t>(end - begin));
    for (int64_t r = 0; r < dy.count; ++r) {
      load(static_cast<char*>(dy.row(r)) + static_cast<size_t>(begin) * lla_dtype_size(dy.dtype), dy.dtype, end - begin,
           row.data());
      for (int64_t i = begin; i < end; ++i) {
        const int64_t at = ids[r] * width + i;
        const double value = row[static_cast<size_t>(i - begin)];
        if (gradient->dtype == LLA_F64)
          reinterpret_cast<double*>(gradient->data())[at] += value;
        else
          gradient->f32()[at] += static_cast<float>(value);
      }
    }
  });
}

void add(Threads& threads, const Rows& x, const Rows& sum) {
  by_rows(threads, sum, [&](int64_t begin, int64_t end, auto type) {
    using T = decltype(type);
    std::vector<T> a, b, total(static_cast<size_t>(sum.width));
    for (int64_t r = begin; r < end; ++r) {
      const T* px = in(x, r, &a);
      const T* ps = in(sum, r, &b);
      run_loop<Add>(total.size(), px, ps, total.data());
      out(total, sum, r);
    }
  });
}

void gate_product(Threads& threads, const Rows& gate, const Rows& up, const Rows& y) {
  by_rows(threads, y, [&](int64_t begin, int64_t end, auto type) {
    using T = decltype(type);
    std::vector<T> a, b, product(static_cast<size_t>(y.width));
    for (int64_t r = begin; r < end; ++r) {
      const T* g = in(gate, r, &a);
      const T* u = in(up, r, &b);
      run_loop<GateProduct>(product.size(), g, u, product.data());
      out(product, y, r);
    }
  });
}

void gate_product_backward(Threads& threads, const Rows& dy, const Rows& gate, const Rows& up) {
  by_rows(threads, dy, [&](int64_t begin, int64_t end, auto type) {
    using T = decltype(type);
    const auto width = static_cast<size_t>(dy.width);
    std::vector<T> a, b, c, dgate(width), dup(width);
    for (int64_t r = begin; r < end; ++r) {
      const T* d = in(dy, r, &a);
      const T* g = in(gate, r, &b);
      const T* u = in(up, r, &c);
      run_loop<GateProductBackward>(width, d, g, u, dgate.data(), dup.data());
      out(dgate, gate, r);
      out(dup, up, r);
    }
  });
}

void cross_entropy(Threads& threads, const Rows& logits, const int32_t* targets, double gradient_scale, double* losses) {
  by_rows(threads, logits, [&](int64_t begin, int64_t end, auto type) {
    using T = decltype(type);
    const auto width = static_cast<size_t>(logits.width);
    std::vector<T> a, e(width);
    for (int64_t r = begin; r < end; ++r) {
      const T* x = in(logits, r, &a);
      const bool counts = targets[r] >= 0;
      T top = 0;
      double sum = 0;
      run_loop<Softmax>(width, x, e.data(), &top, &sum);
      losses[r] = counts ? std::log(sum) - static_cast<double>(x[targets[r]] - top) : 0;
      if (gradient_scale == 0) continue;
      const T scale = counts ? static_cast<T>(gradient_scale / sum) : T(0);
      run_loop<Scale>(width, scale, e.data());
      if (counts) e[static_cast<size_t>(targets[r])] -= static_cast<T>(gradient_scale);
      out(e, logits, r);
    }
  });
}

}  // namespace lm
