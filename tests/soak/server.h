// SPDX-License-Identifier: Apache-2.0
// A server in small: sequences arrive, wait, are served in ragged batches, drafted, forked, cached as prefixes, taken back,
// swapped out and in, dropped and computed again, and leave. A seed decides everything.
#pragma once

#include <thread>

#include "model.h"

namespace soak {

struct Counts {
  int64_t arrivals = 0, finished = 0, rows = 0, drafts = 0, rejected = 0, forks = 0, reorders = 0, snapshots = 0,
          prefixes = 0, truncations = 0, exports = 0, restores = 0, drops = 0, shortages = 0, discards = 0, together = 0;
};

class Server {
 public:
  Server(const Model& model, uint64_t seed, Counts* counts)
      : random_(seed),
        counts_(counts),
        engine_(model, static_cast<int32_t>(1 + random_.below(3)), &meter_),
        judge_(model, &judge_meter_),
        slot_count_(6 + random_.below(12)) {
    // Node blocks for two sequences at their worst; every second server has more, but never enough for all.
    lla_state* one = engine_.make_state(1, 0);
    const int64_t worst = query(one, LLA_STATE_NODE_BLOCKS);
    lla_state_release(one);
    state_ = engine_.make_state(slot_count_, worst * (random_.one_in(2) ? 2 : 2 + random_.below(slot_count_ - 2)));
    taken_.assign(static_cast<size_t>(slot_count_), false);
    for (auto& step : steps_) step = std::make_unique<Step>(engine_, kSequences, kRows, kSnapshots);
  }
  ~Server() {
    steps_[0].reset();
    steps_[1].reset();
    lla_state_release(state_);
  }
  double worst() const { return worst_; }

  void step() {
    if (static_cast<int64_t>(sequences_.size()) < 2 * slot_count_ && random_.one_in(3)) arrive();
    while (random_.one_in(2) && restore()) {
    }
    switch (random_.below(9)) {
      case 0:
      case 1:
        truncate();
        break;
      case 2:
        reorder();
        break;
      case 3:
        swap_out(pick_resident());
        break;
      case 4:
        if (random_.one_in(3)) drop(pick_resident());
        break;
      case 5:
        forget();
        break;
      default:
        break;
    }
    serve();
    for (size_t i = sequences_.size(); i-- > 0;) {
      Sequence& s = *sequences_[i];
      if (s.slot >= 0) PROMISE(length(s.slot) == s.history.length());
      if (s.slot >= 0 && s.history.length() >= s.target && s.pending.empty()) {
        check(s.history, s.slot);
        ++counts_->finished;
        release(s.slot);
        sequences_.erase(sequences_.begin() + static_cast<ptrdiff_t>(i));
      }
    }
  }
  // Looks at what is left, and lets everything go.
  void close() {
    for (auto& s : sequences_) {
      if (s->slot < 0 && !s->image.empty() && free_slots() == 0) continue;
      if (s->slot < 0 && !s->image.empty() && !bring_back(*s)) continue;
      if (s->slot < 0) continue;
      check(s->history, s->slot);
      release(s->slot);
    }
    for (const Cached& c : cache_) {
      check(c.history, c.slot);
      release(c.slot);
    }
    sequences_.clear();
    cache_.clear();
    PROMISE(query(state_, LLA_STATE_FREE_NODE_BLOCKS) == query(state_, LLA_STATE_NODE_BLOCKS));
  }
  // What the contexts took, to be looked at when they are gone.
  static int64_t outstanding() { return meter_.outstanding + judge_meter_.outstanding; }

 private:
  static constexpr int64_t kSequences = 8, kRows = 400, kSnapshots = 4;
  struct Sequence {
    History history;
    int64_t target = 1, slot = -1;
    std::vector<Token> pending;  // of a prompt, or of a history that is computed again
    std::vector<char> image;     // where it is while it has no slot
    bool busy = false;           // in a planned batch
  };
  struct Cached {
    History history;
    int64_t slot;
    bool busy = false;
  };
  struct Entry {
    Sequence* sequence = nullptr;  // none: padding
    const Cached* prefix = nullptr;
    int64_t in = -1, out = -1, count = 0, accepted = 0, gap = 0, row = 0;
    bool from_pending = false;
    std::vector<Token> tokens;
    int64_t snapshot_rows = -1, snapshot_slot = -1;
  };
  struct Flight {
    std::vector<Entry> entries;
    std::vector<Token> row_tokens;
    bool planned = false;
  };

  static int64_t query(const lla_state* state, lla_state_key key) {
    int64_t value = -1;
    FUZZ_OK(lla_state_query(state, key, 0, &value, &error));
    return value;
  }
  int64_t length(int64_t slot) const {
    int64_t value = -1;
    FUZZ_OK(lla_state_length(state_, slot, &value, &error));
    return value;
  }

  // ---- slots ------------------------------------------------------------------------------------------------------------
  int64_t free_slots() const { return std::count(taken_.begin(), taken_.end(), false); }
  int64_t take_slot() {
    int64_t skip = free_slots();
    if (skip == 0) return -1;
    skip = random_.below(skip);
    for (size_t i = 0;; ++i) {
      if (taken_[i] || skip-- > 0) continue;
      taken_[i] = true;
      return static_cast<int64_t>(i);
    }
  }
  void reset(int64_t slot) {
    const std::vector<int64_t> slots{slot};
    FUZZ_OK(lla_state_reset(state_, index_of(slots), 1, {nullptr, 0, 0}, nullptr, &error));
  }
  void release(int64_t slot) {
    reset(slot);
    taken_[static_cast<size_t>(slot)] = false;
  }
  std::vector<Sequence*> resident() const {
    std::vector<Sequence*> all;
    for (const auto& s : sequences_) {
      if (s->slot >= 0 && !s->busy) all.push_back(s.get());
    }
    return all;
  }
  Sequence* pick_resident() {
    const std::vector<Sequence*> all = resident();
    return all.empty() ? nullptr : all[static_cast<size_t>(random_.below(static_cast<int64_t>(all.size())))];
  }
  Cached* pick_cached() {
    if (cache_.empty()) return nullptr;
    auto at = cache_.begin();
    std::advance(at, random_.below(static_cast<int64_t>(cache_.size())));
    return &*at;
  }

  // ---- what happens between steps
  // -----------------------------------------------------------------------------------------
  Token token() { return static_cast<Token>(random_.one_in(200) ? 0 : 1 + random_.below(kTokens - 1)); }
  void arrive() {
    auto s = std::make_unique<Sequence>();
    const Cached* prefix = random_.one_in(2) ? pick_cached() : nullptr;
    if (prefix && (prefix->history.length() == 0 || free_slots() == 0)) prefix = nullptr;
    for (int64_t n = 1 + random_.below(random_.one_in(3) ? 400 : 60); n > 0; --n) s->pending.push_back(token());
    s->target = static_cast<int64_t>(s->pending.size()) + (prefix ? prefix->history.length() : 0) + random_.below(150);
    s->target = std::min(s->target, kLongest);
    if (prefix) {  // begins where the prefix ends
      s->slot = take_slot();
      copy(prefix->slot, s->slot);
      s->history = prefix->history;
      const int64_t room = s->target - s->history.length();
      if (static_cast<int64_t>(s->pending.size()) > room) s->pending.resize(static_cast<size_t>(room));
      ++counts_->prefixes;
    }
    sequences_.push_back(std::move(s));
    ++counts_->arrivals;
  }
  void copy(int64_t from, int64_t to) {
    const std::vector<int64_t> source{from}, target{to};
    FUZZ_OK(lla_state_fork(state_, index_of(source), index_of(target), 1, nullptr, &error));
  }
  // Gives a waiting sequence a slot, and what it held. False if there is none, or no room.
  bool restore() {
    for (auto& s : sequences_) {
      if (s->slot < 0) return free_slots() > 1 && bring_back(*s);
    }
    return false;
  }
  bool bring_back(Sequence& s) {
    s.slot = take_slot();
    if (s.image.empty()) return true;  // empty, as the slot is
    lla_image_info info = LLA_IMAGE_INFO_INIT;
    FUZZ_OK(lla_state_check(s.image.data(), s.image.size(), kTag, &info, &error));
    PROMISE(info.position == s.history.length());
    const lla_status status = FUZZ_CALL(lla_state_unpack(state_, s.slot, s.image.data(), s.image.size(), nullptr, &error));
    PROMISE(status == LLA_OK || status == LLA_NO_BLOCKS);
    if (status != LLA_OK) {
      PROMISE(length(s.slot) == 0);
      taken_[static_cast<size_t>(s.slot)] = false;
      s.slot = -1;
      return false;
    }
    PROMISE(image_of(state_, s.slot, kTag) == s.image);
    s.image.clear();
    ++counts_->restores;
    return true;
  }
  // Probe H10.
  void swap_out(Sequence* s) {
    if (!s) return;
    if (s->history.length() > 0) {
      s->image = image_of(state_, s->slot, kTag);
      ++counts_->exports;
    }
    release(s->slot);
    s->slot = -1;
    // Whoever went last comes back last.
    for (size_t i = 0; i + 1 < sequences_.size(); ++i) {
      if (sequences_[i].get() == s) std::swap(sequences_[i], sequences_[i + 1]);
    }
  }
  // Forgets a sequence's state, not its tokens.
  void drop(Sequence* s) {
    if (!s) return;
    release(s->slot);
    s->slot = -1;
    s->pending.insert(s->pending.begin(), s->history.tokens.begin(), s->history.tokens.end());
    s->history = History();
    ++counts_->drops;
  }
  void truncate() {
    Sequence* const s = pick_resident();
    if (!s) return;
    int64_t low = -1;
    FUZZ_OK(lla_state_min_length(state_, s->slot, &low, &error));
    PROMISE(low <= s->history.length());
    if (low > 0) PROMISE(FUZZ_CALL(lla_state_truncate(state_, s->slot, low - 1, nullptr, &error)) == LLA_ROLLBACK_LIMIT);
    const int64_t to = low + random_.below(s->history.length() - low + 1);
    FUZZ_OK(lla_state_truncate(state_, s->slot, to, nullptr, &error));
    if (to == s->history.length()) return;
    History& h = s->history;
    while (!h.pieces.empty() && h.pieces.back().begin >= to) h.pieces.pop_back();
    if (!h.pieces.empty()) {
      Piece& last = h.pieces.back();
      if (last.accepted > to - last.begin && last.how != Kept::kSnapshot) last.how = Kept::kTruncated;
      last.accepted = to - last.begin;
    }
    h.tokens.resize(static_cast<size_t>(to));
    h.outputs.resize(static_cast<size_t>(to * engine_.model().width()));
    ++counts_->truncations;
  }
  // Some slots become copies of others, all at once: beams.
  // Probe H11.
  void reorder() {
    const std::vector<Sequence*> all = resident();
    if (all.size() < 2) return;
    std::vector<int64_t> sources, targets;
    std::vector<History> histories;
    std::vector<Sequence*> changed;
    for (size_t i = 0; i < std::min<size_t>(all.size(), 4); ++i) {
      const auto from = static_cast<size_t>(random_.below(static_cast<int64_t>(all.size())));
      if (all[from]->history.length() > all[i]->target) continue;
      sources.push_back(all[from]->slot);
      targets.push_back(all[i]->slot);
      histories.push_back(all[from]->history);
      changed.push_back(all[i]);
    }
    FUZZ_OK(
        lla_state_fork(state_, index_of(sources), index_of(targets), static_cast<int64_t>(sources.size()), nullptr, &error));
    for (size_t i = 0; i < changed.size(); ++i) {
      changed[i]->history = histories[i];
      const int64_t room = changed[i]->target - histories[i].length();
      if (static_cast<int64_t>(changed[i]->pending.size()) > room) changed[i]->pending.resize(static_cast<size_t>(room));
    }
    ++counts_->reorders;
  }
  // A cached prefix goes; now and then it is looked at once more before.
  bool forget() {
    for (auto at = cache_.begin(); at != cache_.end(); ++at) {
      if (at->busy || (cache_.size() > 1 && random_.one_in(2))) continue;
      if (random_.one_in(4)) check(at->history, at->slot);
      release(at->slot);
      cache_.erase(at);
      return true;
    }
    return false;
  }

  // ---- steps
  // --------------------------------------------------------------------------------------------------------------
  void serve() {
    std::vector<Sequence*> all = resident();
    for (size_t i = all.size(); i > 1; --i)
      std::swap(all[i - 1], all[static_cast<size_t>(random_.below(static_cast<int64_t>(i)))]);
    Flight flights[2];
    const size_t both = random_.one_in(2) ? 2 : 1;
    for (size_t i = 0; i < all.size(); ++i) {
      Flight& f = flights[i % both];
      if (static_cast<int64_t>(f.entries.size()) < kSequences && !random_.one_in(5)) add(f, all[i]);
    }
    for (size_t i = 0; i < both; ++i) plan(flights[i], *steps_[i]);
    if (random_.one_in(4)) swap_out(pick_resident());  // somebody else, meanwhile
    const bool backwards[2] = {random_.one_in(2), random_.one_in(2)};
    const auto forward = [&](size_t i) {
      if (flights[i].planned) steps_[i]->forward(state_, flights[i].row_tokens, backwards[i]);
    };
    if (both == 2 && random_.one_in(2)) {
      std::thread other(forward, 1);
      forward(0);
      other.join();
      ++counts_->together;
    } else {
      forward(0);
      forward(1);
    }
    const size_t first = static_cast<size_t>(random_.below(2));
    finish(flights[first], *steps_[first]);
    finish(flights[1 - first], *steps_[1 - first]);
  }
  void add(Flight& f, Sequence* s) {
    if (random_.one_in(8)) f.entries.push_back(padding());
    if (static_cast<int64_t>(f.entries.size()) >= kSequences) return;
    Entry e;
    e.sequence = s;
    e.in = e.out = s->slot;
    const int64_t at = s->history.length(), waiting = static_cast<int64_t>(s->pending.size());
    e.from_pending = waiting > 0;
    int64_t most = random_.one_in(3) ? kMostRows : random_.one_in(2) ? kDraft : random_.one_in(4) ? 0 : 1;
    if (!e.from_pending) most = std::min(most, kDraft);
    most = std::min(most, e.from_pending ? waiting : s->target - at);
    int64_t used = 0;
    for (const Entry& other : f.entries) used += other.count + other.gap;
    most = std::min(most, kRows - used - 4);
    if (most < 0) return;
    e.count = most > kDraft ? most - random_.below(most / 2) : most > 1 ? 1 + random_.below(most) : most;
    for (int64_t i = 0; i < e.count; ++i) e.tokens.push_back(e.from_pending ? s->pending[static_cast<size_t>(i)] : token());
    e.accepted = e.count;
    if (e.count <= kDraft && e.count > 1 && random_.one_in(2)) e.accepted = random_.below(e.count + 1);
    if (e.count > kDraft && random_.one_in(15)) e.accepted = 0;
    e.gap = random_.one_in(4) ? random_.below(4) : 0;
    if (random_.one_in(10) && static_cast<int64_t>(sequences_.size()) < 3 * slot_count_) {
      const int64_t slot = take_slot();
      if (slot >= 0) e.out = slot;
    }
    if (random_.one_in(6) && static_cast<int64_t>(cache_.size()) < slot_count_ / 3) {
      int64_t wanted = 0;
      for (const Entry& other : f.entries) wanted += other.snapshot_slot >= 0;
      e.snapshot_slot = wanted < kSnapshots ? take_slot() : -1;
      if (e.snapshot_slot >= 0) e.snapshot_rows = random_.below(e.count + 1);
    }
    s->busy = true;
    f.entries.push_back(e);
  }
  Entry padding() {
    Entry e;
    e.count = random_.below(3);
    for (int64_t i = 0; i < e.count; ++i) e.tokens.push_back(token());
    return e;
  }
  void take_back(Entry& e) {
    if (!e.sequence) return;
    e.sequence->busy = false;
    if (e.out != e.in) taken_[static_cast<size_t>(e.out)] = false;
    if (e.snapshot_slot >= 0) taken_[static_cast<size_t>(e.snapshot_slot)] = false;
  }
  // Makes room when there are too few node blocks: somebody goes, or the batch gets smaller.
  void plan(Flight& f, Step& step) {
    while (!f.entries.empty()) {
      std::vector<int64_t> offsets{0}, counts, ins, outs, positions, snapshot_sequences, snapshot_rows, snapshot_slots;
      f.row_tokens.clear();
      for (Entry& e : f.entries) {
        e.row = offsets.back();
        f.row_tokens.insert(f.row_tokens.end(), e.tokens.begin(), e.tokens.end());
        for (int64_t i = 0; i < e.gap; ++i) f.row_tokens.push_back(token());
        offsets.push_back(static_cast<int64_t>(f.row_tokens.size()));
        counts.push_back(e.count);
        ins.push_back(e.in);
        outs.push_back(e.out);
        positions.push_back(e.sequence ? e.sequence->history.length() : 0);
        if (e.snapshot_slot < 0) continue;
        snapshot_sequences.push_back(static_cast<int64_t>(ins.size()) - 1);
        snapshot_rows.push_back(e.snapshot_rows);
        snapshot_slots.push_back(e.snapshot_slot);
      }
      lla_rows rows = LLA_ROWS_INIT;
      rows.sequences = static_cast<int64_t>(f.entries.size());
      rows.offsets = index_of(offsets);
      rows.counts = index_of(counts);
      rows.slot_in = index_of(ins);
      rows.slot_out = index_of(outs);
      rows.expected_positions = index_of(positions);
      rows.snapshots = static_cast<int64_t>(snapshot_rows.size());
      rows.snapshot_sequences = index_of(snapshot_sequences);
      rows.snapshot_rows = index_of(snapshot_rows);
      rows.snapshot_slots = index_of(snapshot_slots);
      const lla_status status = FUZZ_CALL(lla_batch_plan(step.batch(), state_, &rows, nullptr, &error));
      if (status == LLA_OK) {
        f.planned = true;
        return;
      }
      PROMISE(status == LLA_NO_BLOCKS);
      ++counts_->shortages;
      if (random_.one_in(2) && forget()) continue;
      Sequence* const s = pick_resident();
      if (s && random_.one_in(3)) {
        drop(s);
      } else if (s) {
        swap_out(s);
      } else if (!forget()) {
        take_back(f.entries.back());
        f.entries.pop_back();
      }
    }
  }
  void finish(Flight& f, Step& step) {
    if (!f.planned) return;
    const auto width = static_cast<size_t>(engine_.model().width());
    for (const Entry& e : f.entries) {
      const int64_t first = e.sequence ? e.row + e.count : e.row, last = e.row + e.count + e.gap;
      for (int64_t r = first; r < last; ++r) {  // rows of nobody are zero
        for (size_t i = 0; i < width; ++i) PROMISE(step.outputs()[static_cast<size_t>(r) * width + i] == 0);
      }
    }
    if (random_.one_in(20)) {
      lla_batch_discard(step.batch());
      for (Entry& e : f.entries) take_back(e);
      ++counts_->discards;
      return;
    }
    std::vector<int64_t> accepted;
    for (const Entry& e : f.entries) accepted.push_back(e.sequence ? e.accepted : 0);
    FUZZ_OK(lla_state_commit(state_, step.batch(), index_of(accepted), nullptr, &error));
    for (Entry& e : f.entries) {
      if (e.sequence) take_over(e, step);
    }
  }
  // The books after a commit.
  void take_over(Entry& e, const Step& step) {
    Sequence& s = *e.sequence;
    s.busy = false;
    if (e.snapshot_slot >= 0) {
      if (e.snapshot_rows <= e.accepted) {
        cache_.push_back({s.history, e.snapshot_slot});
        extend(&cache_.back().history, e, e.snapshot_rows, Kept::kSnapshot, step);
        PROMISE(length(e.snapshot_slot) == cache_.back().history.length());
        ++counts_->snapshots;
      } else {
        PROMISE(length(e.snapshot_slot) == 0);
        taken_[static_cast<size_t>(e.snapshot_slot)] = false;
      }
    }
    counts_->rows += e.accepted;
    counts_->drafts += e.count > 1 && e.count <= kDraft;
    counts_->rejected += e.count - e.accepted;
    Sequence* receiver = &s;
    if (e.out != e.in) {
      sequences_.push_back(std::make_unique<Sequence>());
      receiver = sequences_.back().get();
      receiver->history = s.history;
      receiver->target = s.target;
      receiver->slot = e.out;
      receiver->pending = s.pending;
      ++counts_->forks;
    }
    extend(&receiver->history, e, e.accepted, e.accepted < e.count ? Kept::kAccepted : Kept::kAll, step);
    if (e.from_pending) receiver->pending.erase(receiver->pending.begin(), receiver->pending.begin() + e.accepted);
  }
  void extend(History* h, const Entry& e, int64_t kept, Kept how, const Step& step) {
    if (kept == 0) return;
    h->pieces.push_back({h->length(), kept, e.tokens, how});
    h->tokens.insert(h->tokens.end(), e.tokens.begin(), e.tokens.begin() + kept);
    const auto width = engine_.model().width();
    const float* outputs = step.outputs().data() + e.row * width;
    h->outputs.insert(h->outputs.end(), outputs, outputs + kept * width);
  }
  void check(const History& h, int64_t slot) {
    judge_.alone(h);
    if (image_of(state_, slot) != image_of(judge_.state(), 0))
      differs("not the state of the same calls alone", h.length(), 0);
    worst_ = std::max(worst_, judge_.one_pass(h, engine_.model().form().node_dtype == LLA_F32 ? 3e-6 : 2e-2));
  }

  static constexpr char kTag[LLA_TAG_SIZE] = "soak";
  static inline fuzz::Meter meter_{0, 0, 0, SIZE_MAX}, judge_meter_{0, 0, 0, SIZE_MAX};
  Random random_;
  Counts* counts_;
  Engine engine_;
  Judge judge_;
  int64_t slot_count_;
  lla_state* state_ = nullptr;
  std::unique_ptr<Step> steps_[2];
  std::vector<bool> taken_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<Cached> cache_;
  double worst_ = 0;
};

}  // namespace soak
