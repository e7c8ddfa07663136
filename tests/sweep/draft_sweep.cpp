// SPDX-License-Identifier: Apache-2.0
// Drafts of 1 ... 16 rows around chunk borders and carries, every number accepted: the state and what comes afterwards have
// the bits of a sequence that never drafted.
#include "harness.h"

namespace sweep {
namespace {

std::vector<char> image(lla_state* state, int64_t slot) {
  size_t bytes = 0;
  SWEEP_CALL(lla_state_export_size(state, slot, &bytes, &error));
  std::vector<char> buffer(bytes);
  SWEEP_CALL(lla_state_pack(state, slot, buffer.data(), bytes, nullptr, &error));
  return buffer;
}

class Draft : public testing::TestWithParam<MixerCase> {};

// Probe H3.
TEST_P(Draft, EveryAcceptedCount) {
  const MixerCase c = GetParam();
  constexpr int64_t kAfter = 20;
  const int64_t g = c.grain, rows = 8 * g + 80;
  Context context = make_context(LLA_BACKEND_CPU);
  Layer layer = make_layer(context, describe(c, rows));
  State state = make_state(layer, 3, LLA_STATE_VALUE, 16);
  Tensors tensors = mixer_tensors(c, rows, LLA_F32, 11), none;
  Runner runner(context.get(), layer.get());
  const auto step = [&](int64_t begin, int64_t end, int64_t in, int64_t out) {
    Step s;
    s.begin = begin;
    s.end = end;
    s.slot_in = in;
    s.slot_out = out;
    s.state = state.get();
    return s;
  };
  const auto reset = [&](int64_t slot) {
    std::vector<int64_t> slots{slot};
    SWEEP_CALL(lla_state_reset(state.get(), index_of(slots), 1, lla_index{nullptr, 0, 0}, nullptr, &error));
  };
  const auto fork = [&](int64_t from, int64_t to) {
    std::vector<int64_t> source{from}, target{to};
    SWEEP_CALL(lla_state_fork(state.get(), index_of(source), index_of(target), 1, nullptr, &error));
  };
  int64_t drafts = 0;
  // Inside a chunk, on its border, and where carries of one, two and three levels fall into the draft.
  for (int64_t position : {int64_t{0}, g - 2, g - 1, g, 2 * g - 3, 4 * g - 8, 8 * g - 8}) {
    reset(0);
    runner.append(step(0, position, 0, 0), tensors, none);
    for (int64_t length = 1; length <= 16; ++length) {
      for (int64_t accepted = 0; accepted <= length; ++accepted) {
        // Slot 1 drafts, with rejected rows that differ from those that come later; slot 2 never does.
        fork(0, 1);
        fork(0, 2);
        Tensors draft = tensors;
        for (auto& [role, buffer] : draft)
          for (size_t i = static_cast<size_t>(position + accepted) * buffer.row_size(); i < buffer.count(); ++i)
            buffer.set(i, role == LLA_GATE ? -3.0 : 0.5 * buffer.get(i) + 0.1);
        Step s = step(position, position + length, 1, 1);
        runner.forward(s, draft, none);
        runner.commit(s, accepted);
        for (int64_t r = position; r < position + accepted; ++r) runner.append(step(r, r + 1, 2, 2), tensors, none);
        ASSERT_EQ(image(state.get(), 1), image(state.get(), 2)) << position << " + " << accepted << " of " << length;
        if (length % 5 && accepted != length) continue;
        Tensors after = tensors;
        for (int64_t r = position + accepted; r < position + accepted + kAfter; ++r) {
          runner.append(step(r, r + 1, 1, 1), after, none);
          runner.append(step(r, r + 1, 2, 2), tensors, none);
        }
        const size_t begin = static_cast<size_t>(position + accepted) * tensors[LLA_Y].row_size();
        const size_t end = begin + static_cast<size_t>(kAfter) * tensors[LLA_Y].row_size();
        for (size_t i = begin; i < end; ++i) ASSERT_EQ(after[LLA_Y].get(i), tensors[LLA_Y].get(i));
        ASSERT_EQ(image(state.get(), 1), image(state.get(), 2));
        ++drafts;
      }
    }
  }
  ASSERT_GT(drafts, 100);
  int64_t free_blocks = 0, all = 0;  // nothing leaks
  for (int64_t slot : {0, 1, 2}) reset(slot);
  SWEEP_CALL(lla_state_query(state.get(), LLA_STATE_FREE_NODE_BLOCKS, 0, &free_blocks, &error));
  SWEEP_CALL(lla_state_query(state.get(), LLA_STATE_NODE_BLOCKS, 0, &all, &error));
  EXPECT_EQ(free_blocks, all);
}

std::vector<MixerCase> cases() {
  std::vector<MixerCase> all;
  for (lla_mixer mixer : {LLA_SCALAR_GATE, LLA_DELTA_RULE})
    for (bool log_linear : {true, false})
      for (int64_t grain : {64, 16, 4}) {
        MixerCase c;
        c.mixer = mixer;
        c.log_linear = log_linear;
        c.grain = grain;
        all.push_back(c);
      }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Mixers, Draft, testing::ValuesIn(cases()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace sweep
