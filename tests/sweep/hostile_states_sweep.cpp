// SPDX-License-Identifier: Apache-2.0
// Hostile uses of states: random call sequences against a simple model, mixed groups, poisoned slots, caller's pools with
// gaps, damaged images. Committed rows must equal one pass without a state.
#include <cstdlib>

#include "hostile.h"

namespace {

using namespace hostile;
using sweep::Context;
using sweep::Layer;
using sweep::State;

constexpr int64_t kGrain = 4, kPool = 512, kMaxRows = 64;

// A group of unlike layers, each with its own rows of input, drawn from a pool of tokens.
struct Group {
  std::vector<Problem> problems;
  std::vector<Layer> layers;
  explicit Group(const Context& context) {
    lla_layer_desc absorbing = mixer(LLA_SCALAR_GATE, 4, 2, 1, 5, 3, kGrain);
    absorbing.level_overflow = LLA_LEVELS_ABSORB;
    lla_layer_desc absorbing_delta = mixer(LLA_DELTA_RULE, 4, 1, 1, 5, 3, kGrain);
    absorbing_delta.level_overflow = LLA_LEVELS_ABSORB;
    for (const lla_layer_desc& d :
         {mixer(LLA_SCALAR_GATE, 0, 2, 2, 5, 3, kGrain), absorbing, mixer(LLA_SCALAR_GATE, 10, 2, 1, 5, 3, kGrain),
          mixer(LLA_DELTA_RULE, 10, 2, 1, 5, 3, kGrain), mixer(LLA_DELTA_RULE, 0, 1, 1, 5, 3, kGrain), absorbing_delta,
          mamba2(10, 2, 1, 5, 3, 6, kGrain), convolution(5, kGrain), cell(LLA_DELTA_RULE, 10, 2, 1, 5, 3, kGrain)}) {
      problems.push_back(problem_of(d, kPool, static_cast<unsigned>(problems.size())));
      layers.push_back(sweep::make_layer(context, d));
    }
  }
  std::vector<lla_layer*> handles() const {
    std::vector<lla_layer*> h;
    for (const Layer& l : layers) h.push_back(l.get());
    return h;
  }
  Tensors rows_of(size_t layer, const std::vector<int64_t>& tokens) const {
    Tensors t;
    for (const auto& [role, b] : problems[layer].tensors) {
      std::vector<int64_t> dims = b.dims;
      dims[0] = static_cast<int64_t>(tokens.size());
      Buffer x(b.dtype, dims);
      const size_t n = b.row_size();
      for (size_t r = 0; r < tokens.size(); ++r)
        for (size_t i = 0; i < n; ++i)
          x.f32[r * n + i] = tokens[r] < 0 ? std::nanf("") : b.f32[static_cast<size_t>(tokens[r]) * n + i];
      t[role] = x;
    }
    return t;
  }
};

struct History {
  int64_t start = 0;
  std::vector<int64_t> tokens;
  std::vector<std::vector<std::vector<float>>> y;  // [row][layer] outputs
  int64_t position() const { return start + static_cast<int64_t>(tokens.size()); }
};

// A state and what it should hold.
class Model {
 public:
  Model(lla_context* context, Group& group, const lla_state_desc& d, unsigned seed, bool caller_memory = false)
      : context_(context),
        group_(group),
        engine_(seed),
        slots_(static_cast<size_t>(d.slots)),
        max_draft_(d.max_draft ? d.max_draft : 16) {
    auto layers = group.handles();
    std::vector<lla_block_memory> memory;
    if (caller_memory) {
      for (size_t i = 0; i < layers.size(); ++i) {
        for (lla_block_kind kind : {LLA_BLOCK_NODE, LLA_BLOCK_TAIL, LLA_BLOCK_CONV}) {
          lla_block_geometry g = LLA_BLOCK_GEOMETRY_INIT;
          SWEEP_CALL(lla_state_geometry(layers.data(), static_cast<int64_t>(layers.size()), &d, static_cast<int64_t>(i),
                                        kind, &g, &error));
          if (!g.bytes) continue;
          const int64_t stride = (2 * g.bytes + g.alignment - 1) / g.alignment * g.alignment;
          pools_.push_back({std::make_unique<Guarded>(static_cast<size_t>(stride * (g.count - 1) + g.bytes), true,
                                                      static_cast<size_t>(g.alignment)),
                            g.bytes, stride, g.count});
          memory.push_back({static_cast<int64_t>(i), kind, 0, pools_.back().memory->data(), stride});
        }
      }
    }
    lla_state* state = nullptr;
    SWEEP_CALL(lla_state_create(layers.data(), static_cast<int64_t>(layers.size()), &d, memory.data(),
                                static_cast<int64_t>(memory.size()), &state, &error));
    state_.reset(state);
    limits_.max_sequences = d.slots + 2;
    limits_.max_rows = kMaxRows;
    limits_.max_length = query(LLA_STATE_MAX_LENGTH);
    limits_.max_snapshots = 4;
    size_t bytes = 0, alignment = 0;
    SWEEP_CALL(lla_batch_size(context, &limits_, &bytes, &alignment, &error));
    batch_memory_ = std::make_unique<Guarded>(bytes, true, alignment);
    SWEEP_CALL(lla_batch_init(context, &limits_, batch_memory_->data(), bytes, &batch_, &error));
    for (lla_layer* l : layers) {
      SWEEP_CALL(lla_layer_workspace(l, &limits_, LLA_PASS_FORWARD, &bytes, &alignment, &error));
      workspaces_.push_back(std::make_unique<Guarded>(bytes, true, 64));
    }
  }
  ~Model() { lla_batch_discard(batch_); }
  int64_t query(lla_state_key key, int64_t slot = 0) const {
    int64_t value = -1;
    SWEEP_CALL(lla_state_query(state_.get(), key, slot, &value, &error));
    return value;
  }
  lla_state* state() const { return state_.get(); }
  int64_t pick(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  int64_t size() const { return static_cast<int64_t>(slots_.size()); }
  History& slot(int64_t s) { return slots_[static_cast<size_t>(s)]; }
  std::map<lla_status, int64_t> statuses;

  // One step with random rows, forks, snapshots and accepted counts.
  void step() {
    const int64_t n = pick(size() + 2);
    std::vector<int64_t> offsets{0}, counts, in, out, expected, snap_seq, snap_rows, snap_slots, tokens;
    std::vector<bool> taken(slots_.size());
    const int64_t longest = pick(4) ? 6 : 20;
    bool valid = true, drafts = pick(2);
    for (int64_t b = 0; b < n; ++b) {
      // Several sequences may start from one slot; each slot receives at most one.
      int64_t s = pick(8) ? pick(size()) : -1, t = s >= 0 && !pick(4) ? pick(size()) : s;
      if (t >= 0 && taken[static_cast<size_t>(t)] && pick(50)) s = t = -1;
      if (t >= 0 && taken[static_cast<size_t>(t)]) valid = false;
      if (t >= 0) taken[static_cast<size_t>(t)] = true;
      if (!pick(200)) s = t = size() + pick(3), valid = false;
      int64_t rows = pick(5) ? pick(longest) : 0;
      if (offsets.back() + rows + 2 > kMaxRows) rows = 0;
      counts.push_back(rows);
      in.push_back(s);
      out.push_back(t);
      int64_t at = s >= 0 && s < size() ? slot(s).position() : pick(9);
      if (s >= 0 && s < size() && !pick(200)) ++at, valid = false;
      expected.push_back(at);
      for (int64_t r = 0; r < rows; ++r) tokens.push_back(s < 0 ? -1 : pick(kPool));
      offsets.push_back(offsets.back() + rows);
      if (s >= 0 && s < size() && !pick(8) && snap_slots.size() < 4) {
        const int64_t target = pick(size());
        if (!taken[static_cast<size_t>(target)] && slot(target).position() == 0) {
          taken[static_cast<size_t>(target)] = true;
          snap_seq.push_back(b);
          snap_rows.push_back(pick(rows + 1));
          snap_slots.push_back(target);
        }
      }
    }
    const int64_t slack = pick(3);
    for (int64_t i = 0; i < slack && static_cast<int64_t>(tokens.size()) < kMaxRows; ++i) tokens.push_back(-1);
    lla_rows rows = packed(offsets);
    rows.total_rows = static_cast<int64_t>(tokens.size());
    rows.slot_in = sweep::index_of(in);
    rows.slot_out = sweep::index_of(out);
    if (n) rows.expected_positions = sweep::index_of(expected);
    if (n == 0) rows.sequences = 0;
    rows.snapshots = static_cast<int64_t>(snap_seq.size());
    if (rows.snapshots) {
      rows.snapshot_sequences = sweep::index_of(snap_seq);
      rows.snapshot_rows = sweep::index_of(snap_rows);
      rows.snapshot_slots = sweep::index_of(snap_slots);
    }
    lla_error error = LLA_ERROR_INIT;
    const lla_status planned = lla_batch_plan(batch_, state(), &rows, nullptr, &error);
    ++statuses[planned];
    if (planned) {
      bool reason = planned == LLA_NO_BLOCKS || planned == LLA_SLOT_IN_USE || planned == LLA_LEVELS_EXCEEDED || !valid;
      EXPECT_TRUE(reason) << lla_status_name(planned) << " " << error.text;
      return;
    }
    EXPECT_TRUE(valid) << "an invalid plan was accepted: " << testing::PrintToString(in) << " to "
                       << testing::PrintToString(out) << ", snapshots to " << testing::PrintToString(snap_slots);
    if (!valid) return;
    if (!pick(10)) return lla_batch_discard(batch_);
    std::vector<std::vector<std::vector<float>>> y(tokens.size());
    for (size_t layer = 0; layer < group_.layers.size(); ++layer) {
      Tensors t = group_.rows_of(layer, tokens);
      Buffer& out_rows = t[LLA_Y];
      fill_rows(out_rows, 0, out_rows.dims[0], kNaN);
      std::vector<lla_binding> io, w;
      std::vector<std::unique_ptr<Placed>> placed;
      Placed* result = nullptr;
      for (const auto& [role, b] : t) {
        placed.push_back(std::make_unique<Placed>(b, Layout::kEnd, 0, role != LLA_Y));
        io.push_back(lla_bind(role, placed.back()->tensor()));
        if (role == LLA_Y) result = placed.back().get();
      }
      for (auto& [role, b] : group_.problems[layer].weights) w.push_back(lla_bind(role, b.all()));
      lla_forward_args a = LLA_FORWARD_ARGS_INIT;
      a.batch = batch_;
      a.state = state();
      a.layer_index = static_cast<int64_t>(layer);
      a.io = io.data();
      a.io_count = static_cast<int64_t>(io.size());
      a.weights = w.data();
      a.weight_count = static_cast<int64_t>(w.size());
      std::memset(workspaces_[layer]->data(), 0xff, workspaces_[layer]->bytes());
      a.workspace = workspaces_[layer]->data();
      a.workspace_bytes = workspaces_[layer]->bytes();
      SWEEP_CALL(lla_layer_forward(group_.layers[layer].get(), &a, &error));
      const Buffer got = result->get();
      const size_t width = got.row_size();
      for (size_t r = 0; r < tokens.size(); ++r) {
        y[r].emplace_back(got.f32.begin() + static_cast<long>(r * width),
                          got.f32.begin() + static_cast<long>((r + 1) * width));
        if (tokens[r] >= 0) continue;
        for (float x : y[r].back()) EXPECT_EQ(x, 0) << "slack or padding row is not zero";
      }
    }
    std::vector<int64_t> accepted(static_cast<size_t>(n));
    bool partial_ok = true;
    for (size_t b = 0; b < accepted.size(); ++b) {
      accepted[b] = drafts ? pick(counts[b] + 1) : counts[b];
      if (in[b] >= 0 && accepted[b] != 0 && accepted[b] != counts[b] && counts[b] > max_draft_) partial_ok = false;
    }
    const lla_status committed = lla_state_commit(
        state(), batch_, drafts && n ? sweep::index_of(accepted) : lla_index{nullptr, 0, 0}, nullptr, &error);
    if (committed) {
      EXPECT_FALSE(partial_ok) << lla_status_name(committed) << error.text;
      lla_batch_discard(batch_);
      return;
    }
    EXPECT_TRUE(partial_ok) << "a partial acceptance beyond max_draft was taken";
    std::vector<History> old = slots_;
    const auto grown = [&](size_t b, int64_t keep) {
      History h = old[static_cast<size_t>(in[b])];
      for (int64_t r = 0; r < keep; ++r) {
        h.tokens.push_back(tokens[static_cast<size_t>(offsets[b] + r)]);
        h.y.push_back(y[static_cast<size_t>(offsets[b] + r)]);
      }
      return h;
    };
    for (size_t b = 0; b < accepted.size(); ++b)
      if (in[b] >= 0) slot(out[b]) = grown(b, accepted[b]);
    for (size_t i = 0; i < snap_seq.size(); ++i) {
      const size_t b = static_cast<size_t>(snap_seq[i]);
      if (snap_rows[i] <= accepted[b]) slot(snap_slots[i]) = grown(b, snap_rows[i]);
    }
  }
  void reset() {
    const std::vector<int64_t> s{pick(size()), pick(3) ? -1 : pick(size())}, p{pick(2) ? 0 : pick(30), 0};
    lla_error error = LLA_ERROR_INIT;
    const lla_status status = lla_state_reset(state(), sweep::index_of(s), 2, sweep::index_of(p), nullptr, &error);
    ++statuses[status];
    ASSERT_EQ(status, LLA_OK);  // of a slot named twice the last entry holds
    slot(s[0]) = History{p[0], {}, {}};
    if (s[1] >= 0) slot(s[1]) = History{p[1], {}, {}};
  }
  void fork() {
    std::vector<int64_t> from, to;
    std::vector<bool> used(slots_.size());
    bool valid = true;
    for (int64_t i = 0, n = pick(size() + 1); i < n; ++i) {
      int64_t t = pick(size());
      if (used[static_cast<size_t>(t)]) {
        if (pick(20)) continue;
        valid = false;
      }
      used[static_cast<size_t>(t)] = true;
      from.push_back(pick(size()));
      to.push_back(t);
    }
    const lla_status status = lla_state_fork(state(), sweep::index_of(from), sweep::index_of(to),
                                             static_cast<int64_t>(from.size()), nullptr, nullptr);
    ++statuses[status];
    if (from.empty()) return;
    EXPECT_EQ(status == LLA_OK, valid) << lla_status_name(status);
    if (status) return;
    const std::vector<History> old = slots_;
    for (size_t i = 0; i < from.size(); ++i) slot(to[i]) = old[static_cast<size_t>(from[i])];
  }
  void truncate() {
    const int64_t s = pick(size()), now = slot(s).position(), to = now - pick(8) + (pick(20) ? 0 : 9);
    int64_t low = -1;
    SWEEP_CALL(lla_state_min_length(state(), s, &low, &error));
    EXPECT_TRUE(low >= slot(s).start && low <= now &&
                (slot(s).tokens.empty() || low <= std::max(slot(s).start, now / kGrain * kGrain + kGrain)))
        << low << " of " << now << " from " << slot(s).start;
    const lla_status status = lla_state_truncate(state(), s, to, nullptr, nullptr);
    ++statuses[status];
    EXPECT_EQ(status == LLA_OK, to >= low && to <= now)
        << lla_status_name(status) << " to " << to << " of " << now << " low " << low;
    if (status) return;
    slot(s).tokens.resize(static_cast<size_t>(to - slot(s).start));
    slot(s).y.resize(slot(s).tokens.size());
  }
  std::vector<char> image_of(int64_t s) {
    size_t bytes = 0;
    SWEEP_CALL(lla_state_export_size(state(), s, &bytes, &error));
    Guarded image(bytes, true, 1);
    SWEEP_CALL(lla_state_pack(state(), s, image.data(), bytes, nullptr, &error));
    SWEEP_CALL(lla_state_seal(image.data(), bytes, nullptr, &error));
    EXPECT_TRUE(image.outside_untouched());
    return std::vector<char>(image.data(), image.data() + bytes);
  }
  void move_by_image(Model& target) {
    const int64_t from = pick(size()), to = pick(target.size());
    const std::vector<char> bytes = image_of(from);
    Guarded image(bytes.size(), true, 1);
    std::memcpy(image.data(), bytes.data(), bytes.size());
    SWEEP_CALL(lla_state_check(image.data(), bytes.size(), nullptr, nullptr, &error));
    const lla_status status = lla_state_unpack(target.state(), to, image.data(), bytes.size(), nullptr, nullptr);
    ++target.statuses[status];
    EXPECT_TRUE(status == LLA_OK || status == LLA_NO_BLOCKS) << lla_status_name(status);
    if (!status) target.slot(to) = History(slot(from));
  }
  void check_positions() {
    for (int64_t s = 0; s < size(); ++s) {
      int64_t length = -1;
      SWEEP_CALL(lla_state_length(state(), s, &length, &error));
      ASSERT_EQ(length, slot(s).position()) << "slot " << s;
    }
  }
  // All outputs that led to slot s, against one pass without a state.
  void check_outputs(int64_t s) {
    const History& h = slot(s);
    if (h.tokens.empty()) return;
    const std::vector<int64_t> start{h.start};
    for (size_t layer = 0; layer < group_.layers.size(); ++layer) {
      Call c;
      c.context = context_;
      c.layer = group_.layers[layer].get();
      c.tensors = group_.rows_of(layer, h.tokens);
      c.weights = group_.problems[layer].weights;
      c.rows = uniform_rows(1, static_cast<int64_t>(h.tokens.size()));
      c.rows.expected_positions = sweep::index_of(start);
      c.max_length = h.position();
      c.saved = false;
      const Outcome o = run(c);
      ASSERT_EQ(o.status, LLA_OK) << o.text;
      const size_t width = o.y.row_size();
      for (size_t r = 0; r < h.tokens.size(); ++r)
        for (size_t i = 0; i < width; ++i)
          ASSERT_NEAR(h.y[r][layer][i], o.y.f32[r * width + i], 2e-5 * (1 + std::fabs(o.y.f32[r * width + i])))
              << "slot " << s << " layer " << layer << " row " << r << " of " << h.tokens.size() << " from " << h.start;
    }
  }
  void check_gaps() {
    for (const auto& p : pools_) {
      EXPECT_TRUE(p.memory->outside_untouched());
      for (int64_t i = 0; i + 1 < p.count; ++i)
        for (int64_t b = p.bytes; b < p.stride; ++b)
          ASSERT_EQ(p.memory->data()[i * p.stride + b], '\xff') << "a gap between blocks was written";
    }
    EXPECT_TRUE(batch_memory_->outside_untouched());
  }
  void check_no_leak() {
    lla_batch_discard(batch_);
    SWEEP_CALL(lla_state_reset(state(), {nullptr, 0, 0}, 0, {nullptr, 0, 0}, nullptr, &error));
    EXPECT_EQ(query(LLA_STATE_FREE_NODE_BLOCKS), query(LLA_STATE_NODE_BLOCKS));
  }
  void random_call() {
    switch (pick(12)) {
      case 0:
        return reset();
      case 1:
        return fork();
      case 2:
      case 3:
        return truncate();
      case 4:
        return move_by_image(*this);
      default:
        return step();
    }
  }

 private:
  struct PoolMemory {
    std::unique_ptr<Guarded> memory;
    int64_t bytes, stride, count;
  };
  lla_context* context_;
  Group& group_;
  std::mt19937 engine_;
  std::vector<History> slots_;
  int64_t max_draft_;
  std::vector<PoolMemory> pools_;
  State state_;
  lla_batch_limits limits_ = LLA_BATCH_LIMITS_INIT;
  std::unique_ptr<Guarded> batch_memory_;
  lla_batch* batch_ = nullptr;
  std::vector<std::unique_ptr<Guarded>> workspaces_;
};

int64_t calls() {
  const char* n = std::getenv("LLA_HOSTILE_CALLS");
  return n ? std::atoll(n) : 3000;
}
void random_calls(lla_backend backend, int64_t node_blocks, int64_t max_draft, bool caller_memory, unsigned seed,
                  int64_t n) {
  const Context context = sweep::make_context(backend);
  Group group(context);
  lla_state_desc d = LLA_STATE_DESC_INIT;
  d.slots = 6;
  d.max_draft = max_draft;
  d.node_blocks = node_blocks;
  Model model(context.get(), group, d, seed, caller_memory);
  for (int64_t i = 0; i < n && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE("call " + std::to_string(i) + " seed " + std::to_string(seed));
    model.random_call();
    model.check_positions();
    if (i % 50 == 49) model.check_outputs(model.pick(model.size()));
  }
  if (testing::Test::HasFailure()) return;
  for (int64_t s = 0; s < model.size(); ++s) model.check_outputs(s);
  model.check_gaps();
  model.check_no_leak();
  EXPECT_GT(model.statuses[LLA_OK], n / 2);
}

// Probe D11.
TEST(HostileStates, RandomCalls) { random_calls(LLA_BACKEND_CPU, 0, 0, false, 1, calls()); }
// Probe E6.
TEST(HostileStates, RandomCallsInCallersMemory) { random_calls(LLA_BACKEND_CPU, 0, 3, true, 2, calls()); }
// Probe G11.
TEST(HostileStates, RandomCallsWithFewBlocks) { random_calls(LLA_BACKEND_CPU, 25, 8, true, 3, calls()); }
TEST(HostileStates, RandomCallsOnTheReference) { random_calls(LLA_BACKEND_REFERENCE, 0, 5, true, 4, calls() / 2); }

// Damaged images, checksum damaged too or made right again: a status, never a read beyond the image, never a broken state.
TEST(HostileStates, DamagedImages) {
  const Context context = sweep::make_context(LLA_BACKEND_CPU);
  Group group(context);
  lla_state_desc d = LLA_STATE_DESC_INIT;
  d.slots = 4;
  Model model(context.get(), group, d, 9);
  for (int i = 0; i < 60; ++i) model.step();
  std::mt19937_64 engine(7);
  int64_t taken = 0;
  for (int64_t i = 0, n = calls() * 10; i < n; ++i) {
    if (i % 500 == 0) model.step();
    const std::vector<char> good = model.image_of(i % 4);
    size_t bytes = good.size();
    const bool cut = engine() % 4 == 0;
    if (cut) bytes = engine() % (bytes + 1);
    Guarded image(bytes, true, 1);
    std::memcpy(image.data(), good.data(), bytes);
    const size_t reach = engine() % 3 ? std::min<size_t>(bytes, 160 + 9 * 96) : bytes;
    if (reach)
      for (int m = 0; m < 1 + static_cast<int>(engine() % 3); ++m) {
        const size_t at = engine() % reach;
        switch (engine() % 4) {
          case 0:
            image.data()[at] ^= static_cast<char>(1 << engine() % 8);
            break;
          case 1:
            image.data()[at] = static_cast<char>(engine());
            break;
          case 2:
            std::memset(image.data() + at / 8 * 8, engine() % 2 ? 0xff : 0, std::min<size_t>(8, bytes - at / 8 * 8));
            break;
          default:
            image.data()[at] = 0x7f;
            break;
        }
      }
    const bool same = bytes == good.size() && !std::memcmp(image.data(), good.data(), bytes);
    const lla_status raw = lla_state_check(image.data(), bytes, nullptr, nullptr, nullptr);
    EXPECT_TRUE(same || raw == LLA_DATA_CORRUPT || raw == LLA_STATE_INCOMPATIBLE) << lla_status_name(raw);
    (void)lla_state_seal(image.data(), bytes, nullptr, nullptr);
    const lla_status sealed = lla_state_check(image.data(), bytes, nullptr, nullptr, nullptr);
    // Unpack trusts the checksum only: whatever passes must be harmless.
    const lla_status status = lla_state_unpack(model.state(), 3, image.data(), bytes, nullptr, nullptr);
    if (status == LLA_OK) {
      ++taken;
      EXPECT_EQ(sealed, LLA_OK);
      int64_t length = 0;
      SWEEP_CALL(lla_state_length(model.state(), 3, &length, &error));
      model.slot(3) = History{length, {}, {}};
      if (length < 900 && i % 7 == 0) model.step();  // appending to it must stay inside its memory
      const std::vector<int64_t> slots{3};
      SWEEP_CALL(lla_state_reset(model.state(), sweep::index_of(slots), 1, {nullptr, 0, 0}, nullptr, &error));
      model.slot(3) = History{};
    }
    if (i % 50 == 0) model.check_positions();
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(taken, 0);
  model.check_no_leak();
}

}  // namespace
