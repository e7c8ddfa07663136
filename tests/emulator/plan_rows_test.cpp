// SPDX-License-Identifier: Apache-2.0
// Plans and commits that are made on the device against those of the host: the same arrays and the same records for random
// batches, however late the host settles.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>

#include "cuda/common/scalar_gate_routes.h"
#include "device_plan_testing.h"

namespace core_testing {
namespace {

struct Step {
  std::vector<int64_t> offsets, count, in, out, expected, accepted, snapshot_sequence, snapshot_rows, snapshot_slot;
  int64_t total = 0, rows_per_sequence = 0;
  bool uniform = false;

  lla_rows rows() const {
    lla_rows r = LLA_ROWS_INIT;
    r.sequences = static_cast<int64_t>(in.size());
    r.rows_per_sequence = rows_per_sequence;
    r.total_rows = total;
    if (!uniform) r.offsets = index_of(offsets);
    r.counts = index_of(count);
    r.slot_in = index_of(in);
    r.slot_out = index_of(out);
    r.expected_positions = index_of(expected);
    r.snapshots = static_cast<int64_t>(snapshot_slot.size());
    r.snapshot_sequences = index_of(snapshot_sequence);
    r.snapshot_rows = index_of(snapshot_rows);
    r.snapshot_slots = index_of(snapshot_slot);
    return r;
  }
};

constexpr int64_t kSlots = 9, kMostSequences = 5, kSnapshots = 3, kLate = 3;

// A state whose steps the host plans and commits, and one whose steps the device does.
class Twins {
 public:
  Twins(const Group& group, int64_t grain, int64_t max_draft, uint64_t seed) : random_(seed), grain_(grain) {
    host_context_ = reference_context();
    device_context_ = device_context();
    lla_state_desc description = LLA_STATE_DESC_INIT;
    description.slots = kSlots;
    description.max_length = 40 * grain;
    description.max_draft = max_draft;
    description.node_blocks = 3000;
    host_ = make_state(host_context_.get(), group.layers, description);
    device_ = make_state(device_context_.get(), group.layers, description);
    lla_batch_limits limits = limits_of(kMostSequences, kMostSequences * 9 * grain + 60, kSnapshots);
    limits.max_rows_per_sequence = 9 * grain;
    host_batch_ = std::make_unique<BatchOwner>(host_context_.get(), limits);
    for (int64_t i = 0; i <= kLate; ++i) ring_.push_back(std::make_unique<DeviceBatch>(device_context_.get(), limits));
  }
  ~Twins() { settle_all(); }

  void step() {
    Step s = choose();
    Error error;
    const lla_status planned = plan_batch(host_batch_->get(), host_.get(), s.rows(), nullptr, nullptr, &error);
    ASSERT_EQ(planned, LLA_OK) << error.text;
    DeviceBatch* batch = ring_.front().get();
    while (outstanding_.size() > static_cast<size_t>(kLate) ||
           (!outstanding_.empty() && outstanding_.front().batch == batch))
      settle();
    const bool by_host = random_.one_in(6);
    if (by_host) settle_all();
    lla_rows rows = s.rows();
    const std::vector<int32_t> narrow_in(s.in.begin(), s.in.end());
    if (!by_host) {
      const int64_t which = 1 + random_.below(31);
      if ((which & 1) && !s.uniform) rows.offsets = on_device(s.offsets);
      if (which & 2) rows.counts = on_device(s.count);
      if (which & 4) rows.slot_in = on_device(narrow_in);
      if (which & 8) rows.slot_out = on_device(s.out);
      if ((which & 16) || which == 1) rows.expected_positions = on_device(s.expected);
    }
    const lla_status status = plan_batch(batch->get(), device_.get(), rows, nullptr, nullptr, &error);
    ASSERT_EQ(status, LLA_OK) << error.text;
    ASSERT_EQ(batch->get()->on_device, !by_host);
    for (int64_t b = 0; b < rows.sequences; ++b) {
      compare(host_batch_->get()->sequences[b], batch->sequence(b));
      if (testing::Test::HasFatalFailure()) return;
    }
    compare_slack(*batch->get());

    ASSERT_EQ(commit_batch(host_.get(), host_batch_->get(), index_of(s.accepted), nullptr, &error), LLA_OK) << error.text;
    const bool there = by_host || !random_.one_in(4);
    ASSERT_EQ(
        commit_batch(device_.get(), batch->get(), there ? on_device(s.accepted) : index_of(s.accepted), nullptr, &error),
        LLA_OK)
        << error.text;
    outstanding_.push_back({batch, s.accepted, !by_host});
    ring_.push_back(std::move(ring_.front()));
    ring_.pop_front();
    for (int64_t slot = 0; slot < kSlots; ++slot) {
      if (device_->record(slot).device_version != device_->record(slot).version) continue;
      compare_image(host_->record(slot).image, device_->device_records()[slot]);
    }
    if (random_.one_in(3)) settle();
    if (random_.one_in(10)) move_by_host();
  }

  void settle_all() {
    while (!outstanding_.empty()) settle();
  }
  void finish() {
    settle_all();
    for (int64_t slot = 0; slot < kSlots; ++slot) {
      compare_image(host_->record(slot).image, device_->record(slot).image);
      const SlotRecord& record = device_->record(slot);
      EXPECT_TRUE(record.device_version != record.version || same_image(record.image, device_->device_records()[slot]));
    }
    EXPECT_EQ(host_->free_nodes(), device_->free_nodes());
  }

 private:
  struct Outstanding {
    DeviceBatch* batch;
    std::vector<int64_t> accepted;
    bool on_device;
  };

  Step choose() {
    Step s;
    std::vector<int64_t> free;
    for (int64_t slot = 0; slot < kSlots; ++slot) free.push_back(slot);
    const auto take = [&](bool empty, int64_t not_this) -> int64_t {
      std::vector<size_t> fitting;
      for (size_t i = 0; i < free.size(); ++i) {
        if (free[i] != not_this && (!empty || host_->record(free[i]).holds_nothing())) fitting.push_back(i);
      }
      if (fitting.empty()) return -1;
      const size_t i = fitting[static_cast<size_t>(random_.below(static_cast<int64_t>(fitting.size())))];
      const int64_t slot = free[i];
      free.erase(free.begin() + static_cast<std::ptrdiff_t>(i));
      return slot;
    };
    const StatePlan& plan = host_->plan();
    s.uniform = random_.one_in(3);
    s.rows_per_sequence = s.uniform ? 1 + random_.below(plan.max_draft + 3) : 0;
    int64_t row = s.uniform ? 0 : random_.below(3);
    const int64_t sequences = 1 + random_.below(kMostSequences);
    for (int64_t b = 0; b < sequences; ++b) {
      int64_t in = -1, out = -1;
      if (!random_.one_in(7)) {
        if (random_.one_in(4)) {
          in = random_.below(kSlots);
          out = take(true, in);
          if (out < 0) in = -1;
        } else {
          in = out = take(false, -1);
        }
      }
      const int64_t position = in < 0 ? 0 : host_->record(in).image.position;
      int64_t count = random_.one_in(3) ? random_.below(8 * grain_) : random_.below(plan.max_draft + 1);
      count = std::min({count, plan.max_length - position, 9 * grain_});
      if (s.uniform) count = std::min(count, s.rows_per_sequence);
      s.in.push_back(in);
      s.out.push_back(out);
      s.count.push_back(count);
      s.offsets.push_back(row);
      s.expected.push_back(position);
      int64_t kept = count <= plan.max_draft ? random_.below(count + 1) : random_.one_in(4) ? 0 : count;
      s.accepted.push_back(kept);
      row += s.uniform ? s.rows_per_sequence : count + (random_.one_in(3) ? 2 : 0);
    }
    s.offsets.push_back(row);
    s.total = row + random_.below(3);
    if (s.total == 0) s.total = 1;
    for (int64_t i = 0; i < kSnapshots && sequences > 0; ++i) {
      const int64_t b = random_.below(sequences);
      if (s.in[static_cast<size_t>(b)] < 0 || random_.one_in(2)) continue;
      const int64_t slot = take(true, -1);
      if (slot < 0) continue;
      s.snapshot_sequence.push_back(b);
      s.snapshot_rows.push_back(random_.below(s.count[static_cast<size_t>(b)] + 1));
      s.snapshot_slot.push_back(slot);
    }
    return s;
  }

  void settle() {
    if (outstanding_.empty()) return;
    const Outstanding o = outstanding_.front();
    outstanding_.pop_front();
    Error error;
    bool given = true;
    if (o.on_device || random_.one_in(2)) {
      ASSERT_EQ(collect_batch(o.batch->get(), nullptr, &error), LLA_OK) << error.text;
      given = random_.one_in(2);
    }
    int64_t released = -1;
    ASSERT_EQ(settle_batch(device_.get(), o.batch->get(), given ? index_of(o.accepted) : lla_index{nullptr, 0, 0}, &released,
                           &error),
              LLA_OK)
        << error.text;
    EXPECT_EQ(o.batch->get()->faults, 0u);
  }

  // Both hosts change slots; the device hears of it with the next plan.
  void move_by_host() {
    settle_all();
    Error error;
    const int64_t a = random_.below(kSlots), b = random_.below(kSlots), c = random_.below(kSlots);
    const std::vector<int64_t> emptied{a}, from{b, c}, to{c, b};
    for (State* state : {host_.get(), device_.get()}) {
      ASSERT_EQ(state->reset(index_of(emptied), 1, {}, &error), LLA_OK) << error.text;
      if (b == c) continue;
      ASSERT_EQ(state->fork(index_of(from), index_of(to), 2, nullptr, &error), LLA_OK) << error.text;
    }
  }

  // Node blocks of the two states stand for each other from the plan that writes them on.
  void compare_nodes(const int32_t* host, const int32_t* device) {
    for (int b = 0; b < kNodes; ++b) {
      ASSERT_EQ(host[b] < 0, device[b] < 0);
      ASSERT_EQ(host[b] < 0 ? device[b] : twin_[host[b]], device[b]);
    }
  }
  void compare_image(const SlotImage& host, const SlotImage& device) {
    SlotImage same = device;
    std::memcpy(same.node, host.node, sizeof same.node);
    EXPECT_TRUE(same_image(host, same)) << host.position << " " << device.position;
    compare_nodes(host.node, device.node);
  }
  void compare(const Sequence& host, const Sequence& device) {
    ASSERT_EQ(host.index, device.index);
    ASSERT_EQ(host.padding, device.padding);
    ASSERT_EQ(host.rows, device.rows);
    if (host.padding) return;
    ASSERT_EQ(host.row_begin, device.row_begin);
    ASSERT_EQ(host.position, device.position);
    compare_image(host.history, device.history);
    ASSERT_EQ(host.nodes_to_store_count, device.nodes_to_store_count);
    for (int64_t i = 0; i < host.nodes_to_store_count; ++i) {
      const NodesToStore &a = host.nodes_to_store[i], &b = device.nodes_to_store[i];
      ASSERT_EQ(a.position, b.position);
      ASSERT_EQ(a.write, b.write);
      for (int n = 0; n < kNodes; ++n) {
        if ((a.write >> n) & 1) twin_[a.node[n]] = b.node[n];
      }
      compare_nodes(a.node, b.node);
    }
    compare_rows(host.tail_to_store, host.tail_to_store_count, device.tail_to_store, device.tail_to_store_count);
    compare_rows(host.conv_to_store, host.conv_to_store_count, device.conv_to_store, device.conv_to_store_count);
    ASSERT_LT(device.initial_gradient.tail, 0);
    ASSERT_LT(device.final_gradient.tail, 0);
  }
  static void compare_rows(const RowsToStore* host, int64_t host_count, const RowsToStore* device, int64_t device_count) {
    ASSERT_EQ(host_count, device_count);
    for (int64_t i = 0; i < host_count; ++i) {
      ASSERT_EQ(host[i].block, device[i].block);
      ASSERT_EQ(host[i].ring, device[i].ring);
      ASSERT_EQ(host[i].first, device[i].first);
      ASSERT_EQ(host[i].last, device[i].last);
    }
  }
  void compare_slack(const Batch& batch) {
    const BatchView &host = (*host_batch_)->view, &device = batch.device_view;
    int64_t found = 0;
    for (int64_t i = 0; i < device.slack_count; ++i) {
      const RowRange range = device.slack[i];
      if (range.begin >= range.end) continue;
      ASSERT_LT(found, host.slack_count);
      ASSERT_EQ(range.begin, host.slack[found].begin);
      ASSERT_EQ(range.end, host.slack[found++].end);
    }
    ASSERT_EQ(found, host.slack_count);
    ASSERT_EQ(host.total_rows, device.total_rows);
  }

  Random random_;
  int64_t grain_;
  ContextPointer host_context_, device_context_;
  StatePointer host_, device_;
  std::unique_ptr<BatchOwner> host_batch_;
  std::deque<std::unique_ptr<DeviceBatch>> ring_;
  std::deque<Outstanding> outstanding_;
  std::map<int32_t, int32_t> twin_;
};

TEST(PlanRows, DeviceAndHostPlanTheSame) {
  for (const int64_t grain : {4, 16}) {
    uint64_t seed = 1;
    for (const Group& group : groups_of(grain)) {
      for (const int64_t draft : {int64_t{2}, 3 * grain}) {
        Twins twins(group, grain, draft, ++seed);
        for (int i = 0; i < 120; ++i) {
          twins.step();
          if (HasFatalFailure() || HasFailure())
            FAIL() << group.name << ", grain " << grain << ", draft " << draft << ", step " << i;
        }
        twins.finish();
        if (HasFailure()) FAIL() << group.name << ", grain " << grain << ", draft " << draft;
      }
    }
  }
}

// What the kernels' launches are chosen by, seen from outside: all sequences take sweeps, or the launch says that some do
// not.
TEST(PlanRows, RoutesOfABatch) {
  ContextPointer context = device_context();
  lla_state_desc description = LLA_STATE_DESC_INIT;
  description.slots = 3;
  description.max_length = 2048;
  description.max_draft = 2;
  StatePointer state = make_state(context.get(), {sized(mixer(LLA_SCALAR_GATE, 64, 12))}, description);
  int both[2] = {0, 0};
  std::vector<int64_t> position{0, 0, 0};
  const std::vector<int64_t> slots{0, 1, 2};
  for (const bool there : {false, false, true}) {
    for (const std::vector<int64_t>& counts : std::vector<std::vector<int64_t>>{
             {256, 128, 384}, {128, 128, 128}, {128, 256, 0}, {64, 128, 128}, {192, 128, 128}, {128, 128, 127}, {0, 0, 1}}) {
      DeviceBatch batch(context.get(), limits_of(3, 1024));
      std::vector<int64_t> offsets{0};
      for (const int64_t count : counts) offsets.push_back(offsets.back() + count);
      lla_rows rows = LLA_ROWS_INIT;
      rows.sequences = 3;
      rows.total_rows = offsets.back();
      rows.offsets = index_of(offsets);
      rows.slot_in = rows.slot_out = index_of(slots);
      rows.expected_positions = there ? on_device(position) : index_of(position);
      Error error;
      ASSERT_EQ(plan_batch(batch.get(), state.get(), rows, nullptr, nullptr, &error), LLA_OK) << error.text;
      ASSERT_EQ(batch.get()->on_device, there);
      for (const int64_t border : {1, 128, 256, 512}) {
        const cuda::SweepRoutes routes{border};
        bool all = true;
        for (int64_t b = 0; b < 3; ++b) all = all && cuda::takes_sweep(batch.sequence(b), routes);
        const bool said = cuda::all_take_sweeps(batch.get()->device_view, routes);
        // A plan of the device is not known to the host.
        if (there)
          EXPECT_TRUE(all || !said);
        else
          EXPECT_EQ(all, said) << border << " " << position[0] << " " << position[1] << " " << position[2] << " "
                               << counts[2];
        ++both[all];
      }
      ASSERT_EQ(commit_batch(state.get(), batch.get(), {nullptr, 0, 0}, nullptr, &error), LLA_OK) << error.text;
      if (there) {
        int64_t released = -1;
        ASSERT_EQ(collect_batch(batch.get(), nullptr, &error), LLA_OK) << error.text;
        ASSERT_EQ(settle_batch(state.get(), batch.get(), lla_index{nullptr, 0, 0}, &released, &error), LLA_OK) << error.text;
      }
      for (size_t b = 0; b < 3; ++b) position[b] += counts[b];
    }
    Error error;
    ASSERT_EQ(state->reset(index_of(slots), 3, {}, &error), LLA_OK) << error.text;
    position = {0, 0, 0};
  }
  EXPECT_GT(both[0], 20);
  EXPECT_GT(both[1], 10);
}

}  // namespace
}  // namespace core_testing
