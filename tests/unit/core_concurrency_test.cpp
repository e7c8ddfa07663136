// SPDX-License-Identifier: Apache-2.0
// Calls on disjoint slots of one state from several threads: the pool of nodes is shared, nothing is lost (run under the
// thread sanitizer as well).
#include <atomic>
#include <thread>

#include "core_testing.h"

using namespace core_testing;

namespace {

TEST(ConcurrencyTest, DisjointSlotsMayBeUsedAtOnce) {
  constexpr int64_t kThreads = 4, kSlots = 4;  // of each thread
  const ContextPointer context = reference_context();
  lla_state_desc description = LLA_STATE_DESC_INIT;
  description.slots = kThreads * kSlots;
  description.max_length = 64;
  description.max_draft = 6;
  const StatePointer state = make_state(
      context.get(), {with_convolution(mixer(LLA_SCALAR_GATE, 2, 8), 2, 4), mixer(LLA_DELTA_RULE, 2, 0)}, description);
  std::atomic<int64_t> commits{0};
  const auto work = [&](int64_t first) {
    Random random(static_cast<uint64_t>(first) + 3);
    BatchOwner batch(context.get(), limits_of(1, 20, 1));
    for (int step = 0; step < 600; ++step) {
      const int64_t slot = first + random.below(kSlots), other = first + random.below(kSlots);
      const int64_t position = random.below(30);
      switch (random.below(8)) {
        case 0:
          EXPECT_EQ(state->reset(&slot, 1, &position, nullptr), LLA_OK);
          break;
        case 1:
          EXPECT_EQ(state->fork(&slot, &other, 1, nullptr, nullptr), LLA_OK);
          break;
        case 2:
          state->truncate(slot, state->min_length(slot), nullptr);
          break;
        case 3: {
          size_t bytes = 0;
          ASSERT_EQ(state->export_size(slot, &bytes, nullptr), LLA_OK);
          EXPECT_GT(bytes, 0u);
          EXPECT_GE(query(*state, LLA_STATE_FREE_NODE_BLOCKS), 0);
          break;
        }
        default: {
          lla_rows rows = LLA_ROWS_INIT;
          const std::vector<int64_t> in = {slot}, zero = {0}, count = {random.below(12)}, snapshot = {other};
          rows.sequences = 1;
          rows.rows_per_sequence = 12;
          rows.counts = index_of(count);
          rows.slot_in = index_of(in);
          if (other != slot && state->is_empty(other)) {
            rows.snapshots = 1;
            rows.snapshot_sequences = index_of(zero);
            rows.snapshot_rows = index_of(zero);
            rows.snapshot_slots = index_of(snapshot);
          }
          const lla_status status = plan_batch(batch.get(), state.get(), rows, nullptr, nullptr, nullptr);
          if (status == LLA_LEVELS_EXCEEDED) break;
          ASSERT_EQ(status, LLA_OK);
          if (random.one_in(4)) {
            discard_batch(batch.get());
          } else {
            ASSERT_EQ(commit_batch(state.get(), batch.get(), {nullptr, 0, 0}, nullptr, nullptr), LLA_OK);
            ++commits;
          }
        }
      }
    }
  };
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) threads.emplace_back(work, i * kSlots);
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(commits, 100);
  ASSERT_EQ(state->reset(nullptr, 0, nullptr, nullptr), LLA_OK);
  EXPECT_EQ(state->free_nodes(), state->plan().node_blocks);
}

}  // namespace
