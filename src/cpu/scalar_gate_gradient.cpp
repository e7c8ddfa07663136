// SPDX-License-Identifier: Apache-2.0
// Reverse mode of the scalar gate inside one chunk of one head.
#include "cpu/scalar_gate_gradient.h"

#include <algorithm>

namespace lla::cpu::scalar_gate {

namespace {

// Row t: q.k (`products`, which may be p) and x = dy.v become the row of weights p (without write strength) and the gradient
// of q.k in x. `w`: write strengths.
void gradient_row(const Simd& simd, const MixerShape& shape, const Factors& f, const ChunkGradient& g, int64_t t,
                  const float* lambda, float* dlambda, const float* w, float scale, const float* products, float* p,
                  float* x) {
  const int64_t c = shape.grain;
  {
    const float factor = lambda ? scale * lambda[0] : scale, product = x[t] * products[t];
    g.write[t] += product * factor;
    if (dlambda) dlambda[0] += product * w[t] * scale;
    p[t] = products[t] * factor;
    x[t] *= w[t] * factor;
  }
  for (int l = 1; int64_t{1} << (l - 1) <= t; ++l) {
    if (!(t >> (l - 1) & 1)) continue;
    const int64_t begin = t >> l << l, end = begin + (int64_t{1} << (l - 1));
    const int64_t column = shape.column(l);
    const float plain = f.table[l * c + t] * scale, factor = lambda ? plain * lambda[column] : plain;
    const float sum = simd.weigh_gradient(x + begin, p + begin, g.table + l * c + begin, products + begin, f.key + begin,
                                          w + begin, factor, end - begin);
    g.table[l * c + t] = sum * factor;
    if (dlambda) dlambda[column] += sum * plain;
  }
}

}  // namespace

void GradientBuffers::carve(const Sizes& s, Carver* carver) {
  p = carver->floats(times(s.row_block(), s.grain));
  x = carver->floats(times(s.row_block(), s.grain));
  z = carver->floats(s.grain);
  weight = carver->floats(s.grain);
  dy = carver->floats(times(s.row_block(), s.value_dim));
  e = carver->floats(times(s.row_block(), s.key_dim));
  scaled = carver->floats(times(s.grain, s.value_dim));
  product = carver->floats(times(s.grain, s.value_dim));
  v = carver->floats(times(s.value_dim, s.grain));
  node = carver->floats(s.node);
}

namespace {

// Calls f(s0, s1, from) for runs of keys: those before t0 are read by all rows from t0 on, later ones by the rows from their
// own block on.
template <class F>
void for_keys(int64_t t0, int64_t t1, F f) {
  if (t0 > 0) f(int64_t{0}, t0, t0);
  for (int64_t s0 = t0; s0 < t1; s0 += kTriangleBlock) f(s0, std::min(s0 + kTriangleBlock, t1), s0);
}

}  // namespace

void gradient_of_products(const Simd& simd, const Sizes& sizes, const Operands& o, int64_t t0, int64_t t1, const float* x,
                          float* dq, bool add_q, float* dk_out) {
  const int64_t c = sizes.grain, dk = sizes.key_dim;
  const float *k = o.k.part[0].data, *q = o.q + (t0 - o.lo) * dk;
  for (int64_t i0 = t0; dq && i0 < t1; i0 += kTriangleBlock) {
    const int64_t i1 = std::min(i0 + kTriangleBlock, t1);
    simd.outer_product(i1 - i0, dk, i1, x + (i0 - t0) * c, c, 1, k, dk, dq + (i0 - t0) * dk, dk, add_q);
  }
  if (!dk_out) return;
  for_keys(t0, t1, [&](int64_t s0, int64_t s1, int64_t from) {
    simd.outer_product(s1 - s0, dk, t1 - from, x + (from - t0) * c + s0, 1, c, q + (from - t0) * dk, dk, dk_out + s0 * dk,
                       dk, true);
  });
}

void gradient_inside(const Simd& simd, const MixerShape& shape, const Sizes& sizes, const Operands& o, const Factors& f,
                     const float* products, const float* kept, int64_t t0, int64_t t1, const float* dy,
                     const GradientBuffers& b, const ChunkGradient& g) {
  const int64_t c = sizes.grain, dk = sizes.key_dim, dv = sizes.value_dim;
  const float scale = static_cast<float>(shape.scale);
  for (int64_t i0 = t0; i0 < t1; i0 += kTriangleBlock) {
    const int64_t i1 = std::min(i0 + kTriangleBlock, t1), rows = i1 - i0;
    float *p = b.p + (i0 - t0) * c, *x = b.x + (i0 - t0) * c;
    if (!products && !kept) products_of_rows(simd, o, dk, i0, i1, p, c);
    simd.outer_product(rows, i1, dv, dy + (i0 - t0) * dv, dv, 1, b.v, c, x, c, false);
    for (int64_t t = i0; t < i1; ++t) {
      if (t == o.lo)
        first_keys(f, c, t, nullptr);
      else
        next_keys(f, c, t, nullptr);
      const float* lambda = o.lambda ? o.lambda + (t - o.lo) * sizes.levels : nullptr;
      float* dlambda = o.lambda ? g.lambda + (t - t0) * sizes.levels : nullptr;
      float *p_row = p + (t - i0) * c, *x_row = x + (t - i0) * c;
      const float* from = products ? products + (t - t0) * c : kept ? kept + kept_products(i0) + (t - i0) * i1 : p_row;
      gradient_row(simd, shape, f, g, t, lambda, dlambda, o.write, scale, from, p_row, x_row);
      std::fill(p_row + t + 1, p_row + i1, 0.0f);
      std::fill(x_row + t + 1, x_row + i1, 0.0f);
    }
  }
  for_keys(t0, t1, [&](int64_t s0, int64_t s1, int64_t from) {
    const float* weights = b.p + (from - t0) * c + s0;
    simd.outer_product(s1 - s0, dv, t1 - from, weights, 1, c, dy + (from - t0) * dv, dv, b.product + s0 * dv, dv, false);
  });
  simd.add_scaled_rows(t1, g.v, b.product, o.write, dv);
}

float gradient_of_read(const Simd& simd, const MixerShape& shape, const Sizes& sizes, const Operands& o, const Factors& f,
                       const Reads& reads, int n, const float* transposed, int64_t t0, int64_t t1, const float* dy,
                       float* dnode, bool started, const GradientBuffers& b, const ChunkGradient& g) {
  const int64_t dk = sizes.key_dim, dv = sizes.value_dim, rows = t1 - t0;
  const float scale = static_cast<float>(shape.scale);
  const float* q = o.q + (t0 - o.lo) * dk;
  float *weight = b.weight, sum = 0;
  for (int64_t i = 0; i < rows; ++i) {
    weight[i] = f.prefix[t0 + i] * reads.factor[n] * scale;
    if (o.lambda) weight[i] *= o.lambda[(t0 + i - o.lo) * sizes.levels + reads.column[n]];
  }
  if (transposed) {
    simd.outer_product(rows, dk, dv, dy, dv, 1, transposed, dk, b.e, dk, false);
    float* products = b.z;
    simd.dot_and_add_rows(rows, products, g.q, q, b.e, weight, dk);
    for (int64_t i = 0; i < rows; ++i) {
      const float plain = f.prefix[t0 + i] * reads.factor[n] * scale;
      if (o.lambda) g.lambda[i * sizes.levels + reads.column[n]] += products[i] * plain;
      g.prefix[t0 + i] += products[i] * weight[i];
      sum += products[i] * weight[i];
    }
  }
  if (dnode) {
    simd.scale_rows(rows, b.scaled, dy, weight, dv);
    simd.outer_product(dk, dv, rows, q, 1, dk, b.scaled, dv, dnode, dv, started);
  }
  return sum;
}

void gradient_of_content(const Simd& simd, const Sizes& sizes, const Operands& o, const Factors& f, const float* dh,
                         float dlog_decay, bool add_k, const GradientBuffers& b, const ChunkGradient& g) {
  const int64_t c = sizes.grain, dk = sizes.key_dim, dv = sizes.value_dim;
  for (int64_t s = 0; s < c; ++s) g.gate[s] += dlog_decay;
  if (!dh) return;
  const float *k = o.k.part[0].data, *v = o.v.part[0].data;
  simd.outer_product(c, dv, dk, k, dk, 1, dh, dv, b.product, dv, false);
  for (int64_t s = 0; s < c; ++s) b.weight[s] = f.suffix[s] * o.write[s];
  simd.dot_and_add_rows(c, b.z, g.v, v, b.product, b.weight, dv);
  float suffix = 0;  // sum of the gradients of the logs of suffix[s] over s < u
  for (int64_t s = 0; s < c; ++s) {
    g.write[s] += f.suffix[s] * b.z[s];
    g.gate[s] += suffix;
    suffix += b.weight[s] * b.z[s];
  }
  if (!g.k) return;
  simd.scale_rows(c, b.scaled, v, b.weight, dv);
  simd.outer_product_transposed(c, dk, dv, b.scaled, dv, dh, dv, g.k, dk, add_k);
}

void gradient_of_factors(const Sizes& sizes, const Operands& o, const ChunkGradient& g) {
  const int64_t c = sizes.grain, hi = o.hi;
  for (int l = 1; l <= sizes.log2_grain; ++l) {
    const int64_t half = int64_t{1} << (l - 1);
    const float* row = g.table + l * c;
    for (int64_t x = o.lo >> l << l; x + half < hi; x += 2 * half) {
      const int64_t middle = x + half, end = std::min(x + 2 * half, hi);
      float sum = 0;  // row s < u of the left half decays by g_u
      for (int64_t u = x; u < middle; ++u) {
        g.gate[u] += sum;
        g.write[u] += row[u];
        sum += row[u] * o.write[u];
      }
      sum = 0;  // row t >= u of the right half decays by g_u
      for (int64_t u = end - 1; u >= middle; --u) {
        sum += row[u];
        g.gate[u] += sum;
      }
    }
  }
  float sum = 0;
  for (int64_t u = hi - 1; u >= 0; --u) {
    sum += g.prefix[u];
    g.gate[u] += sum;
  }
}

}  // namespace lla::cpu::scalar_gate
