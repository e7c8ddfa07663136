// SPDX-License-Identifier: Apache-2.0
// The reference's convolution: formula, gradients, history rings, and gradients handed over from piece to piece.
#include <gtest/gtest.h>

#include "reference_case.h"

namespace reference_test {
namespace {

struct ConvState {
  ConvState(int64_t channels, int64_t capacity, int64_t blocks) {
    memory.conv_layout = {channels, capacity, LLA_F64};
    data.assign(static_cast<size_t>(memory.conv_layout.bytes() * blocks / 8), NAN);
    memory.convs = {reinterpret_cast<char*>(data.data()), memory.conv_layout.bytes()};
  }
  double* at(const SlotImage& image, int64_t channel, int64_t back) {
    const int64_t capacity = memory.conv_layout.capacity;
    return reinterpret_cast<double*>(memory.conv(image.tail, channel, (image.conv_origin - back + 4 * capacity) % capacity));
  }
  Values data;
  lla::SlotMemory memory;
};

struct ConvCase {
  int64_t width, channels;
  int32_t activation;
  bool bias;
  int64_t first_channel;
};

class Convolution : public testing::TestWithParam<ConvCase> {
 protected:
  static constexpr int64_t kRows = 23;
  void SetUp() override {
    const ConvCase& n = GetParam();
    Random random(37);
    x = random.normal(kRows * n.channels);
    dy = random.normal(kRows * n.channels);
    weight = random.normal(n.channels * n.width);
    if (n.bias) bias = random.normal(n.channels);
  }
  lla::Convolution problem(const std::vector<Sequence>& sequences, Values* y) const {
    const ConvCase& n = GetParam();
    lla::Convolution p;
    p.channels = n.channels;
    p.width = n.width;
    p.activation = n.activation;
    p.first_channel = n.first_channel;
    p.batch.sequences = sequences.data();
    p.batch.count = static_cast<int64_t>(sequences.size());
    p.batch.total_rows = kRows;
    p.x = view(x, 1, n.channels);
    p.weight = matrix(weight, n.width);
    p.bias = matrix(bias, 1);
    if (y) {
      y->resize(x.size());
      p.y = view(*y, 1, n.channels);
    }
    return p;
  }
  std::vector<Sequence> one() const {
    std::vector<Sequence> sequences(1);
    sequences[0].rows = kRows;
    return sequences;
  }
  Values x, dy, weight, bias;
};

TEST_P(Convolution, FormulaAndGradients) {
  const ConvCase& n = GetParam();
  const std::vector<Sequence> sequences = one();
  Values y;
  lla::Convolution p = problem(sequences, &y);
  const auto loss = [&] {
    run_kernel(lla::Op::ConvolutionForward, p);
    return dot(y, dy);
  };
  loss();
  for (int64_t t = 0; t < kRows; ++t) {
    for (int64_t c = 0; c < n.channels; ++c) {
      double sum = n.bias ? bias[static_cast<size_t>(c)] : 0;
      for (int64_t i = 0; i < n.width; ++i) {
        const int64_t from = t - n.width + 1 + i;
        if (from >= 0) sum += weight[static_cast<size_t>(c * n.width + i)] * x[static_cast<size_t>(from * n.channels + c)];
      }
      const double expected = n.activation == LLA_ACTIVATION_SILU ? sum * sigmoid(sum) : sum;
      ASSERT_NEAR(y[static_cast<size_t>(t * n.channels + c)], expected, 1e-13);
    }
  }
  Values dx(x.size(), NAN), dweight(weight.size(), NAN), dbias(bias.size(), NAN);
  p.dy = view(dy, 1, n.channels);
  p.dx = view(dx, 1, n.channels);
  p.dweight = matrix(dweight, n.width);
  p.dbias = matrix(dbias, 1);
  run_kernel(lla::Op::ConvolutionBackward, p);
  check("x", &x, dx, loss);
  check("weight", &weight, dweight, loss);
  if (n.bias) check("bias", &bias, dbias, loss);
}

// Cut anywhere: the same outputs by the ring, and the same gradients handed over from piece to piece.
TEST_P(Convolution, PiecesEqualOneCall) {
  const ConvCase& n = GetParam();
  Values whole, pieces, dx(x.size(), NAN), dweight(weight.size(), 0.0);
  const std::vector<Sequence> sequences = one();
  lla::Convolution p = problem(sequences, &whole);
  run_kernel(lla::Op::ConvolutionForward, p);
  p.dy = view(dy, 1, n.channels);
  p.dx = view(dx, 1, n.channels);
  p.dweight = matrix(dweight, n.width);
  run_kernel(lla::Op::ConvolutionBackward, p);

  for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{23}, {1, 2, 3, 3, 5, 9, 23}, {11, 22, 23}}) {
    const int64_t reach = n.width - 1, capacity = 2 * reach + 8;
    ConvState state(n.channels + n.first_channel, capacity, 16), gradient(n.channels + n.first_channel, capacity, 16);
    std::vector<SlotImage> images(1);
    images[0].tail = 0;
    images[0].conv_origin = 3 % static_cast<int32_t>(capacity);
    for (int64_t cut : cuts) {
      const SlotImage& from = images.back();
      SlotImage to = from;
      to.position = cut;
      to.tail = from.tail + 1;  // a fork each time, so that all histories stay
      to.conv_rows = static_cast<int32_t>(std::min(reach, cut));
      to.conv_origin = static_cast<int32_t>((from.conv_origin + 5) % capacity);
      const int64_t ring = (to.conv_origin - to.conv_rows + capacity) % capacity;
      const lla::RowsToStore rows = {to.tail, static_cast<int32_t>(ring), cut - to.conv_rows, cut};
      std::vector<Sequence> piece(1);
      piece[0].row_begin = piece[0].position = from.position;
      piece[0].rows = cut - from.position;
      piece[0].history = from;
      piece[0].conv_to_store = &rows;
      piece[0].conv_to_store_count = 1;
      lla::Convolution q = problem(piece, &pieces);
      q.state = state.memory;
      run_kernel(lla::Op::ConvolutionForward, q);
      images.push_back(to);
    }
    EXPECT_EQ(pieces, whole);

    Values dx_pieces(x.size(), NAN), dweight_pieces(weight.size(), 0.0);
    SlotImage handed;
    for (size_t i = cuts.size(); i-- > 0;) {
      std::vector<Sequence> piece(1);
      piece[0].row_begin = piece[0].position = images[i].position;
      piece[0].rows = cuts[i] - images[i].position;
      piece[0].history = images[i];
      piece[0].final_gradient = handed;
      piece[0].initial_gradient = images[i];
      lla::Convolution q = problem(piece, nullptr);
      q.state = state.memory;
      q.gradient = gradient.memory;
      q.dy = view(dy, 1, n.channels);
      q.dx = view(dx_pieces, 1, n.channels);
      q.dweight = matrix(dweight_pieces, n.width);
      q.dweight.accumulate = true;
      run_kernel(lla::Op::ConvolutionBackward, q);
      handed = images[i];
    }
    EXPECT_LE(relative_error(dx_pieces, dx), 1e-14);
    EXPECT_LE(relative_error(dweight_pieces, dweight), 1e-14);
  }
}

// loss = <y, dy> + <final ring, dring>: the gradient of the initial ring, through a call that is shorter than the ring.
TEST_P(Convolution, InitialAndFinalRing) {
  const ConvCase& n = GetParam();
  const int64_t reach = n.width - 1, capacity = 2 * reach + 8;
  for (int64_t rows : {int64_t{0}, int64_t{1}, reach, int64_t{9}}) {
    ConvState state(n.channels + n.first_channel, capacity, 2), gradient(n.channels + n.first_channel, capacity, 2);
    Random random(38);
    SlotImage from, to;
    from.tail = 0;
    from.position = 12;
    from.conv_rows = static_cast<int32_t>(reach);
    from.conv_origin = 1;
    to.tail = 1;
    to.position = 12 + rows;
    to.conv_rows = static_cast<int32_t>(reach);
    to.conv_origin = static_cast<int32_t>(reach);
    const lla::RowsToStore store = {1, 0, to.position - reach, to.position};
    std::vector<Sequence> sequences(1);
    sequences[0].position = 12;
    sequences[0].rows = rows;
    sequences[0].history = from;
    sequences[0].conv_to_store = &store;
    sequences[0].conv_to_store_count = 1;
    for (int64_t c = 0; c < n.channels; ++c) {
      for (int64_t back = 1; back <= reach; ++back) {
        *state.at(from, n.first_channel + c, back) = random.uniform(-1, 1);
        *gradient.at(to, n.first_channel + c, back) = random.uniform(-1, 1);
      }
    }
    Values y;
    lla::Convolution p = problem(sequences, &y);
    p.state = state.memory;
    const auto loss = [&] {
      run_kernel(lla::Op::ConvolutionForward, p);
      double sum = 0;
      for (int64_t i = 0; i < rows * n.channels; ++i) sum += y[static_cast<size_t>(i)] * dy[static_cast<size_t>(i)];
      for (int64_t c = 0; c < n.channels; ++c) {
        for (int64_t back = 1; back <= reach; ++back) {
          sum += *state.at(to, n.first_channel + c, back) * *gradient.at(to, n.first_channel + c, back);
        }
      }
      return sum;
    };
    Values ring, dring, dx(x.size(), 0.0);
    sequences[0].initial_gradient = from;
    sequences[0].final_gradient = to;
    p.gradient = gradient.memory;
    p.dy = view(dy, 1, n.channels);
    p.dx = view(dx, 1, n.channels);
    run_kernel(lla::Op::ConvolutionBackward, p);
    for (int64_t c = 0; c < n.channels; ++c) {
      for (int64_t back = 1; back <= reach; ++back) {
        double* value = state.at(from, n.first_channel + c, back);
        const double kept = *value, step = 1e-5;
        *value = kept + step;
        const double above = loss();
        *value = kept - step;
        const double below = loss();
        *value = kept;
        ring.push_back((above - below) / (2 * step));
        dring.push_back(*gradient.at(from, n.first_channel + c, back));
      }
    }
    EXPECT_LE(relative_error(dring, ring), 1e-8) << rows;
    check("x", &x, dx, loss);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Convolution,
                         testing::Values(ConvCase{4, 5, LLA_ACTIVATION_SILU, true, 0},
                                         ConvCase{4, 40, LLA_ACTIVATION_SILU, false, 7},
                                         ConvCase{3, 2, LLA_ACTIVATION_NONE, true, 1},
                                         ConvCase{1, 3, LLA_ACTIVATION_NONE, false, 0}));

}  // namespace
}  // namespace reference_test
