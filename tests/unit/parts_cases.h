// SPDX-License-Identifier: Apache-2.0
// Cases of the parts for every backend: slack rows, strided rows between NaN, tensors [B, T, ...], several types, histories.
// What is tested is a CpuParts (cpu_parts_testing.h) or a CudaParts (cuda_parts_testing.h).
#pragma once

#include "cpu_parts_testing.h"

namespace lla::parts_testing {

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
  float* at(int32_t block, int64_t channel, int64_t ring) {
    return reinterpret_cast<float*>(slots.conv(block, channel, ring));
  }
};

inline void expect_same_rings(const Rings& a, const Rings& b, double tolerance, const std::string& what) {
  for (size_t i = 0; i < a.memory.size() / 4; ++i) {
    const float x = load_element<float>(a.memory.data(), LLA_F32, static_cast<int64_t>(i));
    const float y = load_element<float>(b.memory.data(), LLA_F32, static_cast<int64_t>(i));
    if (std::isnan(x) && std::isnan(y)) continue;
    ASSERT_NEAR(x, y, tolerance * (1 + std::fabs(y))) << what << " " << i;
  }
}

template <class Tested>
void check_convolution(const Tested& tested) {
  const int64_t stream = 3;
  for (Batch batch : batches()) {
    for (size_t turn = 0; turn < 2; ++turn) {
      for (const auto& size : {std::pair<int64_t, int64_t>{5, 1}, {70, 4}, {66, 2}, {3, 90}}) {
        const int64_t channels = size.first, width = size.second;
        for (const bool with_state : {false, true}) {
          const Types& type = kTypes[(2 * turn + with_state + static_cast<size_t>(width)) % 4];
          const bool silu = channels != 66;
          const int64_t capacity = 2 * width + 5;
          const int64_t blocks = static_cast<int64_t>(batch.sequences.size()) * 4;
          std::mt19937_64 engine(5);
          std::normal_distribution<float> normal;
          Rings state(channels + stream + 2, capacity, blocks, kNan), gradient(state);
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
          Convolution& p = problem[kTested];
          p.channels = channels;
          p.width = width;
          p.activation = silu ? LLA_ACTIVATION_SILU : LLA_ACTIVATION_NONE;
          p.first_channel = stream;
          p.batch = tested.view(batch);
          p.x = parts.in(1, channels, type.rows);
          p.weight = parts.in_weight(channels, width, type.weights);
          if (silu) p.bias = parts.in_weight(1, channels, type.weights);
          Rings reference_state = state, reference_gradient = gradient;
          if (with_state) p.state = state.slots;
          Convolution& r = problem[kReference] = p;
          if (with_state) r.state = reference_state.slots;
          parts.out(&p.y, &r.y, 1, channels, type.results, false);
          tested.check(&parts, Op::ConvolutionForward, problem, 3e-6, what);
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
          tested.check(&back, Op::ConvolutionBackward, problem, 6e-6, what);
          expect_same_rings(gradient, reference_gradient, 2e-5, what + " gradient ring");
        }
      }
    }
  }
}

// ---- gates ----

template <class Tested>
void check_gates(const Tested& tested) {
  for (const Batch& batch : batches()) {
    for (const Types& type : kTypes) {
      for (const bool by_heads : {false, true}) {
        for (int form = 0; form < 4; ++form) {
          const int64_t heads = 7, levels = form == 3 ? 1 : 12;
          const int32_t write_forms[] = {LLA_WRITE_STEP, LLA_WRITE_SIGMOID, LLA_WRITE_TWO_SIGMOID, LLA_WRITE_READY};
          const int32_t lambda_forms[] = {LLA_LAMBDA_SOFTPLUS, LLA_LAMBDA_BOUNDED, LLA_LAMBDA_PRODUCT, LLA_LAMBDA_READY};
          Gates problem[2];
          Gates& p = problem[kTested];
          p.heads = heads;
          p.levels = levels;
          p.gate_form = form == 3 ? LLA_GATE_LOG : LLA_GATE_SOFTPLUS;
          p.write_form = write_forms[form];
          p.lambda_form = lambda_forms[form];
          if (form == 1) p.dt_min = 0.3, p.dt_max = 1.5;
          if (form != 1) p.lambda_scale = 1.75;
          p.batch = tested.view(batch);
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
          tested.check(&parts, Op::GatesForward, problem, 2e-6, what);

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
          tested.check(&back, Op::GatesBackward, problem, 4e-6, what);
        }
      }
    }
  }
}

// A raw gate of any size gives an exact gate, a clamped one no gradient, and a gradient of 0 meets anything.
template <class Tested>
void check_gates_at_their_ends(const Tested& tested) {
  const Batch batch = packed({4});
  Gates p;
  p.heads = 1;
  p.levels = 1;
  p.gate_form = LLA_GATE_SOFTPLUS;
  p.write_form = LLA_WRITE_SIGMOID;
  p.lambda_form = LLA_LAMBDA_SOFTPLUS;
  p.dt_max = 50;
  p.batch = tested.view(batch);
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
  tested.run(Op::GatesForward, &p, batch.limits());
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
  tested.run(Op::GatesBackward, &p, batch.limits());
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(dgate[2 + i], 0);
    EXPECT_EQ(dwrite[2 + i], 0);
    EXPECT_EQ(dlambda[2 + i], 0);
  }
  EXPECT_EQ(dlambda_weight, 0);
}

// ---- norms ----

template <class Tested>
void check_l2_norm(const Tested& tested) {
  for (const Batch& batch : batches()) {
    for (const Types& type : kTypes) {
      for (const auto& [heads, dim] : {std::pair<int64_t, int64_t>{1, 1}, {3, 17}, {4, 128}}) {
        for (const bool by_heads : {false, true}) {
          Parts parts(batch);
          L2Norm problem[2];
          L2Norm& p = problem[kTested];
          p.heads = heads;
          p.dim = dim;
          p.scale = 0.125;
          p.batch = tested.view(batch);
          p.x = parts.in(heads, dim, type.rows, 1, by_heads);
          L2Norm& r = problem[kReference] = p;
          parts.out(&p.y, &r.y, heads, dim, type.results, false, by_heads);
          tested.check(&parts, Op::L2NormForward, problem, 1e-6, "l2");
          Parts back(batch);
          p.y = View();
          p.epsilon = dim == 1 ? 0.5 : 1e-6;  // of one element without it nothing but rounding is left
          p.x = back.in(heads, dim, type.rows, 1, by_heads);
          p.dy = back.in(heads, dim, type.rows, 1, by_heads);
          r = p;
          back.out(&p.dx, &r.dx, heads, dim, type.results, by_heads, by_heads);
          tested.check(&back, Op::L2NormBackward, problem, 3e-6, "l2");
        }
      }
    }
  }
}

template <class Tested>
void check_gated_norm(const Tested& tested) {
  for (const Batch& batch : batches()) {
    for (int form : {LLA_NORM_NONE, LLA_NORM_GATE_FIRST, LLA_NORM_NORM_FIRST}) {
      for (int variant = 0; variant < 8; ++variant) {
        const Types& type = kTypes[variant % 4];
        const bool with_skip = variant & 1, with_z = variant & 2, shared = variant & 4;
        const int64_t heads = 4, value_dim = 19, width = heads * value_dim;
        Parts parts(batch);
        GatedNorm problem[2];
        GatedNorm& p = problem[kTested];
        p.form = form;
        p.width = width;
        p.heads = heads;
        p.value_dim = value_dim;
        p.group = shared ? value_dim : width;
        p.weight_per_group = shared;
        p.skip_per_channel = with_z;
        p.batch = tested.view(batch);
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
        tested.check(&parts, Op::GatedNormForward, problem, 2e-6, what);
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
        tested.check(&back, Op::GatedNormBackward, problem, 6e-6, what);
      }
    }
  }
}

// Any positive epsilon keeps rows of zeros zero, also one that a float, or one of a kernel's arithmetic, does not have.
template <class Tested>
void check_norms_of_zeros(const Tested& tested) {
  const Batch batch = packed({5});
  for (const double epsilon : {0x1p-126, 1e-40, 1e-60, 1e-300}) {
    Parts parts(batch);
    L2Norm problem[2];
    L2Norm& p = problem[kTested];
    p.heads = 2;
    p.dim = 17;
    p.epsilon = epsilon;
    p.batch = tested.view(batch);
    p.x = parts.in(2, 17, LLA_F32, 0);
    problem[kReference] = p;
    parts.out(&p.y, &problem[kReference].y, 2, 17, LLA_F32, false);
    tested.check(&parts, Op::L2NormForward, problem, 0, "l2 of zeros");

    Parts rows(batch);
    GatedNorm norms[2];
    GatedNorm& n = norms[kTested];
    n.form = LLA_NORM_NORM_FIRST;
    n.heads = 2;
    n.value_dim = 17;
    n.width = n.group = 34;
    n.epsilon = epsilon;
    n.batch = tested.view(batch);
    n.x = rows.in(2, 17, LLA_F32, 0);
    n.weight = rows.in_weight(1, 34, LLA_F32);
    norms[kReference] = n;
    rows.out(&n.y, &norms[kReference].y, 2, 17, LLA_F32, false);
    tested.check(&rows, Op::GatedNormForward, norms, 0, "gated norm of zeros");
  }
}

// ---- rows ----

template <class Tested>
void check_rows_fill_copies(const Tested& tested) {
  for (const Batch& batch : batches()) {
    for (const Types& type : kTypes) {
      for (const bool accumulate : {false, true}) {
        for (const bool by_heads : {false, true}) {
          Batch without_slack = batch;
          without_slack.slack.clear();
          Parts parts(without_slack);
          RowsFill problem[2];
          RowsFill& p = problem[kTested];
          p.heads = 3;
          p.dim = 13;
          p.copy = true;
          p.batch = tested.view(without_slack);
          p.x = parts.in(3, 13, type.rows, 1, by_heads);
          RowsFill& r = problem[kReference] = p;
          parts.out(&p.y, &r.y, 3, 13, type.results, accumulate, !by_heads);
          tested.check(&parts, Op::RowsFill, problem, 1e-7, "rows");
        }
      }
    }
  }
}

template <class Tested>
void check_rows_fill_clears_slack(const Tested& tested) {
  for (const Batch& batch : batches()) {
    for (const int32_t dtype : {LLA_F32, LLA_BF16}) {
      for (const bool by_heads : {false, true}) {
        RowsFill p;
        p.heads = 3;
        p.dim = 5;
        p.batch = tested.view(batch);
        p.y.dtype = dtype;
        p.y.head_stride = by_heads ? 6 : 5;
        p.y.row_stride = 20;
        p.y.sequence_stride = batch.per_sequence ? 7 : 0;
        p.sequence_rows = batch.per_sequence ? batch.sequences[0].rows : 0;
        std::vector<char> bytes(static_cast<size_t>((batch.total_rows * 20 + 2000) * 4), 1);
        p.y.data = bytes.data();
        tested.run(Op::RowsFill, &p, batch.limits());
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
        tested.run(Op::RowsFill, &p, batch.limits());
        EXPECT_TRUE(bytes == std::vector<char>(bytes.size(), 1));
      }
    }
  }
}

}  // namespace lla::parts_testing
