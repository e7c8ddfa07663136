// SPDX-License-Identifier: Apache-2.0
// Cuts a sequence everywhere: however the rows come in, the outputs are those of one pass.
#include "harness.h"

namespace sweep {
namespace {

class Split : public testing::TestWithParam<MixerCase> {
 protected:
  void SetUp() override {
    case_ = GetParam();
    context_ = make_context(LLA_BACKEND_CPU);
    layer_ = make_layer(context_, describe(case_, kRows));
    state_ = make_state(layer_, 1);
    tensors_ = mixer_tensors(case_, kRows, LLA_F32, 7);
    Runner whole(context_.get(), layer_.get());
    Step step;
    step.end = kRows;
    whole.forward(step, tensors_, none_);
    one_pass_ = tensors_[LLA_Y];
  }
  // Empties the slot, and poisons the output so that a row nobody writes is noticed.
  void reset() {
    SWEEP_CALL(lla_state_reset(state_.get(), lla_index{nullptr, 0, 0}, 0, lla_index{nullptr, 0, 0}, nullptr, &error));
    for (float& x : tensors_[LLA_Y].f32) x = NAN;
  }
  // A NaN stays.
  static void keep_worst(double e, double* worst) {
    if (!(e <= *worst)) *worst = e;
  }
  void append(Runner& runner, int64_t begin, int64_t end) {
    Step step;
    step.begin = begin;
    step.end = end;
    step.state = state_.get();
    runner.append(step, tensors_, none_);
  }
  double tolerance() const { return case_.keys == Keys::Repeated ? 5e-5 : 3e-6; }

  static constexpr int64_t kRows = 703;
  MixerCase case_;
  Context context_;
  Layer layer_;
  State state_;
  Tensors tensors_, none_;
  Buffer one_pass_;
};

// Probes F1, S10.
TEST_P(Split, EveryCutOf130Rows) {
  Runner runner(context_.get(), layer_.get());
  double worst = 0;
  for (int64_t cut = 0; cut <= 130; ++cut) {
    reset();
    append(runner, 0, cut);
    append(runner, cut, 130);
    keep_worst(row_error(tensors_[LLA_Y], one_pass_, 0, 130), &worst);
    ASSERT_LE(worst, tolerance()) << "cut at " << cut;
  }
  std::printf("%s: every cut of 130 rows: %.2e\n", case_.name().c_str(), worst);
}

// Probes F3, F7, S1.
TEST_P(Split, EveryPrefixThenThreeRows) {
  Runner runner(context_.get(), layer_.get());
  double worst = 0;
  for (int64_t prefix = 1; prefix <= 700; ++prefix) {
    reset();
    append(runner, 0, prefix);
    for (int64_t r = prefix; r < prefix + 3; ++r) append(runner, r, r + 1);
    keep_worst(row_error(tensors_[LLA_Y], one_pass_, 0, prefix + 3), &worst);
    ASSERT_LE(worst, tolerance()) << "prefix " << prefix;
  }
  std::printf("%s: prefixes 1 ... 700, then 3 rows: %.2e\n", case_.name().c_str(), worst);
}

TEST_P(Split, SingleRows) {
  Runner runner(context_.get(), layer_.get());
  reset();
  for (int64_t r = 0; r < 700; ++r) append(runner, r, r + 1);
  const double worst = row_error(tensors_[LLA_Y], one_pass_, 0, 700);
  EXPECT_LE(worst, tolerance());
  std::printf("%s: 700 single rows: %.2e\n", case_.name().c_str(), worst);
}

// Probe F2.
TEST_P(Split, RandomPieces) {
  Runner runner(context_.get(), layer_.get());
  std::mt19937 engine(3);
  for (int trial = 0; trial < 20; ++trial) {
    reset();
    for (int64_t r = 0; r < kRows;) {
      const int64_t end = std::min<int64_t>(kRows, r + 1 + static_cast<int64_t>(engine() % (trial % 2 ? 200 : 20)));
      append(runner, r, end);
      r = end;
    }
    ASSERT_LE(row_error(tensors_[LLA_Y], one_pass_, 0, kRows), tolerance()) << "trial " << trial;
  }
}

std::vector<MixerCase> cases() {
  std::vector<MixerCase> all;
  for (lla_mixer mixer : {LLA_SCALAR_GATE, LLA_DELTA_RULE})
    for (bool log_linear : {true, false})
      for (Keys keys : {Keys::Random, Keys::Repeated})
        for (int64_t grain : {64, 16}) {
          MixerCase c;
          c.mixer = mixer;
          c.log_linear = log_linear;
          c.keys = keys;
          c.grain = grain;
          all.push_back(c);
        }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Mixers, Split, testing::ValuesIn(cases()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace sweep
