// SPDX-License-Identifier: Apache-2.0
// Batch planning: index arrays with any numbers in them, forks, snapshots, several batches in flight, beside a model that
// knows which plans are allowed and where every slot stands. No kernel runs: contents stay undefined, and nobody reads them.
#include <algorithm>

#include "fuzz.h"

namespace {

using fuzz::Input;
using fuzz::Numbers;

constexpr int64_t kGrain = 4, kSlots = 5, kLongest = 64, kDraft = 3, kBatches = 2;

struct Slot {
  int64_t position = 0, start = 0;
  int64_t appends = 0;    // planned batches that append to it in place
  bool reserved = false;  // receives a fork or snapshot of a planned batch
  int64_t version = 0;
  bool empty() const { return position == start; }
};

struct Snapshot {
  int64_t sequence, rows, slot;
};

struct Planned {
  int64_t in, out, rows, version_in, version_out;
};

struct Model {
  Slot slots[kSlots];
};

struct Flight {
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  std::unique_ptr<fuzz::Block> memory;
  lla_batch* batch = nullptr;
  bool planned = false;
  std::vector<Planned> sequences;
  std::vector<Snapshot> snapshots;
  std::vector<int64_t> snapshot_versions;
};

struct World {
  lla_context* context = nullptr;
  lla_layer* layers[3] = {};
  World() {
    lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
    options.backend = LLA_BACKEND_CPU;
    FUZZ_OK(lla_context_create(&options, &context, &error));
    lla_layer_desc convolution = LLA_LAYER_DESC_INIT;
    convolution.kind = LLA_LAYER_CONVOLUTION;
    convolution.hidden = 1;
    convolution.conv_width = 3;
    convolution.grain = kGrain;
    const lla_layer_desc descs[3] = {fuzz::mixer(LLA_SCALAR_GATE, 1, 1, 1, 1, 7, kGrain),
                                     fuzz::mixer(LLA_DELTA_RULE, 1, 1, 1, 1, 7, kGrain), convolution};
    for (int i = 0; i < 3; ++i) FUZZ_OK(lla_layer_create(context, &descs[i], &layers[i], &error));
  }
};

World& world() {
  static World* w = new World;
  return *w;
}

struct Run {
  Input in;
  lla_state* state = nullptr;
  Model model;
  Flight flights[kBatches];

  Run(const uint8_t* data, size_t size) : in(data, size) {
    lla_state_desc d = LLA_STATE_DESC_INIT;
    d.slots = kSlots;
    d.max_length = kLongest;
    d.max_draft = kDraft;
    if (in.one_in(2)) d.node_blocks = 1 + in.below(12);  // may run out
    FUZZ_OK(lla_state_create(world().layers, in.one_in(2) ? 3 : 1, &d, nullptr, 0, &state, &error));
    for (Flight& f : flights) make_batch(f);
  }
  ~Run() { lla_state_release(state); }

  int64_t query(lla_state_key key, int64_t slot = 0) {
    int64_t value = -1;
    FUZZ_OK(lla_state_query(state, key, slot, &value, &error));
    return value;
  }

  void make_batch(Flight& f) {
    f.limits.max_sequences = in.below(7);
    f.limits.max_rows = in.below(40);
    f.limits.max_rows_per_sequence = in.one_in(3) ? in.below(12) : 0;
    f.limits.max_length = in.one_in(4) ? 1 + in.below(kLongest) : kLongest;
    f.limits.max_snapshots = in.below(4);
    f.limits.replay = static_cast<int32_t>(in.below(2));
    size_t bytes = 0, alignment = 0;
    FUZZ_OK(lla_batch_size(world().context, &f.limits, &bytes, &alignment, &error));
    f.memory = std::make_unique<fuzz::Block>(bytes);
    if (bytes)
      PROMISE(FUZZ_CALL(lla_batch_init(world().context, &f.limits, f.memory->data(), bytes - 1, &f.batch, &error)) ==
              LLA_BUFFER_TOO_SMALL);
    FUZZ_OK(lla_batch_init(world().context, &f.limits, f.memory->data(), bytes, &f.batch, &error));
  }

  // Entries as the array should have them, now and then with one that it should not.
  Numbers numbers(std::vector<int64_t> values) {
    const bool narrow = in.one_in(2);
    if (!values.empty() && in.one_in(8))
      values[static_cast<size_t>(in.below(static_cast<int64_t>(values.size())))] = in.number();
    return Numbers(values, narrow);
  }

  void let_go(Flight& f) {
    if (!f.planned) return;
    for (const Planned& p : f.sequences) {
      if (p.in < 0) continue;
      if (p.in == p.out)
        --model.slots[p.out].appends;
      else
        model.slots[p.out].reserved = false;
    }
    for (const Snapshot& s : f.snapshots) model.slots[s.slot].reserved = false;
    f.planned = false;
    f.sequences.clear();
    f.snapshots.clear();
    f.snapshot_versions.clear();
  }

  void plan(Flight& f) {
    const int64_t n = in.one_in(10) ? in.number() : in.below(f.limits.max_sequences + 1);
    // Arrays of the size that the largest allowed number of sequences has: with more, none may be read.
    const auto entries = static_cast<size_t>(std::clamp<int64_t>(n, 0, f.limits.max_sequences));
    lla_rows rows = LLA_ROWS_INIT;
    rows.sequences = n;
    const bool with_state = !in.one_in(8);
    std::vector<int64_t> offsets{in.one_in(4) ? in.below(3) : 0}, counts, ins, outs, positions;
    const int64_t first = in.below(kSlots);
    const bool one_each = !in.one_in(4);
    for (size_t b = 0; b < entries; ++b) {
      const int64_t room = in.below(6), any = in.index(kSlots),
                    slot = one_each && any >= 0 ? (first + static_cast<int64_t>(b)) % kSlots : any;
      offsets.push_back(offsets.back() + room);
      counts.push_back(in.one_in(2) ? room : in.below(room + 1));
      ins.push_back(slot);
      outs.push_back(in.one_in(3) ? in.index(kSlots) : slot);
      positions.push_back(slot >= 0 && slot < kSlots && with_state ? model.slots[slot].position : in.below(40));
    }
    Numbers a_offsets, a_counts, a_in, a_out, a_positions, a_sequences, a_rows, a_slots;
    if (in.one_in(2))
      a_offsets = numbers(offsets);
    else
      rows.rows_per_sequence = in.one_in(9) ? in.number() : in.below(8);
    if (in.one_in(2)) a_counts = numbers(counts);
    if (!in.one_in(4)) a_in = numbers(ins);
    if (in.one_in(2)) a_out = numbers(outs);
    if (in.one_in(3)) a_positions = numbers(positions);
    if (in.one_in(4)) rows.total_rows = in.one_in(4) ? in.number() : offsets.back() + in.below(5);
    if (in.one_in(2)) {
      rows.snapshots = in.one_in(10) ? in.number() : in.below(f.limits.max_snapshots + 1);
      const auto count = static_cast<size_t>(std::clamp<int64_t>(rows.snapshots, 0, f.limits.max_snapshots));
      std::vector<int64_t> sequences, kept, slots;
      for (size_t i = 0; i < count; ++i) {
        sequences.push_back(in.index(n > 0 && n < 100 ? n : 1));
        kept.push_back(in.index(4));
        slots.push_back(in.index(kSlots));
      }
      if (!in.one_in(12)) a_sequences = numbers(sequences);
      a_rows = numbers(kept);
      a_slots = numbers(slots);
    }
    rows.offsets = a_offsets.index();
    rows.counts = a_counts.index();
    rows.slot_in = a_in.index();
    rows.slot_out = a_out.index();
    rows.expected_positions = a_positions.index();
    rows.snapshot_sequences = a_sequences.index();
    rows.snapshot_rows = a_rows.index();
    rows.snapshot_slots = a_slots.index();

    const int64_t free_before = query(LLA_STATE_FREE_NODE_BLOCKS);
    const bool was_planned = f.planned;
    let_go(f);
    std::vector<Planned> sequences;
    std::vector<Snapshot> snapshots;
    const bool allowed = is_allowed(f, rows, with_state, a_offsets, a_counts, a_in, a_out, a_positions, a_sequences, a_rows,
                                    a_slots, &sequences, &snapshots);
    const lla_status status = FUZZ_CALL(lla_batch_plan(f.batch, with_state ? state : nullptr, &rows, nullptr, &error));
    if (status == LLA_NO_BLOCKS)
      PROMISE(allowed && with_state);
    else
      PROMISE((status == LLA_OK) == allowed);
    if (status != LLA_OK || !with_state) {
      PROMISE(query(LLA_STATE_FREE_NODE_BLOCKS) >= free_before);
      PROMISE(was_planned || query(LLA_STATE_FREE_NODE_BLOCKS) == free_before);
      return;
    }
    f.planned = true;
    f.sequences = sequences;
    f.snapshots = snapshots;
    for (Planned& p : f.sequences) {
      if (p.in < 0) continue;
      p.version_in = model.slots[p.in].version;
      p.version_out = model.slots[p.out].version;
      if (p.in == p.out)
        ++model.slots[p.out].appends;
      else
        model.slots[p.out].reserved = true;
    }
    for (const Snapshot& s : f.snapshots) {
      f.snapshot_versions.push_back(model.slots[s.slot].version);
      model.slots[s.slot].reserved = true;
    }
  }

  // What lla_rows says of a plan, written down once more. No entry behind those it names is read. Probe G4.
  bool is_allowed(const Flight& f, const lla_rows& rows, bool with_state, const Numbers& offsets, const Numbers& counts,
                  const Numbers& ins, const Numbers& outs, const Numbers& positions, const Numbers& snapshot_sequences,
                  const Numbers& snapshot_rows, const Numbers& snapshot_slots, std::vector<Planned>* sequences,
                  std::vector<Snapshot>* snapshots) {
    const int64_t n = rows.sequences, per_sequence = rows.rows_per_sequence;
    const int64_t most = f.limits.max_rows_per_sequence ? f.limits.max_rows_per_sequence : f.limits.max_rows;
    if (n < 0 || n > f.limits.max_sequences || rows.snapshots < 0 || rows.snapshots > f.limits.max_snapshots) return false;
    if (per_sequence < 0 || rows.total_rows < 0) return false;
    if (!with_state &&
        (ins.given() || outs.given() || snapshot_sequences.given() || snapshot_rows.given() || snapshot_slots.given()))
      return false;
    if (rows.snapshots > 0 && !snapshot_sequences.given()) return false;
    if (with_state && !ins.given() && n > kSlots) return false;
    int64_t end = 0;
    bool named[kSlots] = {};
    std::vector<int64_t> taken_rows;
    for (int64_t b = 0; b < n; ++b) {
      const auto i = static_cast<size_t>(b);
      int64_t begin = 0, next = 0;
      if (offsets.given()) {
        begin = offsets.at(i);
        next = offsets.at(i + 1);
      } else if (__builtin_mul_overflow(b, per_sequence, &begin) || __builtin_add_overflow(begin, per_sequence, &next)) {
        return false;  // beyond every limit
      }
      if (begin < 0 || next < begin || next > f.limits.max_rows) return false;
      const int64_t count = counts.given() ? counts.at(i) : next - begin;
      if (count < 0 || count > next - begin || count > most) return false;
      end = next;
      taken_rows.push_back(count);
    }
    const int64_t total = rows.total_rows ? rows.total_rows : end;
    if (total < end || total > f.limits.max_rows) return false;
    for (int64_t b = 0; b < n; ++b) {
      const auto i = static_cast<size_t>(b);
      const int64_t count = taken_rows[i];
      if (!with_state) {
        const int64_t at = positions.given() ? positions.at(i) : 0;
        if (at < 0 || at > f.limits.max_length - count) return false;
        sequences->push_back({-1, -1, count, 0, 0});
        continue;
      }
      const int64_t in_slot = ins.given() ? ins.at(i) : b, out_slot = outs.given() ? outs.at(i) : in_slot;
      if (in_slot == -1) {
        if (out_slot != -1) return false;
        sequences->push_back({-1, -1, 0, 0, 0});
        continue;
      }
      if (in_slot < 0 || in_slot >= kSlots || out_slot < 0 || out_slot >= kSlots || named[out_slot]) return false;
      named[out_slot] = true;
      const Slot& from = model.slots[in_slot];
      const Slot& to = model.slots[out_slot];
      if (to.reserved) return false;
      if (in_slot != out_slot && (to.appends > 0 || !to.empty())) return false;
      if (positions.given() && positions.at(i) != from.position) return false;
      if (from.position + count > std::min(kLongest, f.limits.max_length)) return false;
      sequences->push_back({in_slot, out_slot, count, 0, 0});
    }
    for (int64_t k = 0; k < rows.snapshots; ++k) {
      const auto i = static_cast<size_t>(k);
      const Snapshot s{snapshot_sequences.at(i), snapshot_rows.at(i), snapshot_slots.at(i)};
      if (s.sequence < 0 || s.sequence >= n || (*sequences)[static_cast<size_t>(s.sequence)].in < 0) return false;
      if (s.rows < 0 || s.rows > taken_rows[static_cast<size_t>(s.sequence)]) return false;
      if (s.slot < 0 || s.slot >= kSlots || named[s.slot]) return false;
      named[s.slot] = true;
      const Slot& to = model.slots[s.slot];
      if (to.reserved || to.appends > 0 || !to.empty()) return false;
      snapshots->push_back(s);
    }
    return true;
  }

  void change(int64_t slot, int64_t position, int64_t start) {
    model.slots[slot].position = position;
    model.slots[slot].start = start;
    ++model.slots[slot].version;
  }

  void commit(Flight& f) {
    std::vector<int64_t> accepted;
    for (const Planned& p : f.sequences) accepted.push_back(in.one_in(3) ? in.index(p.rows + 1) : p.rows);
    Numbers given;
    if (in.one_in(2)) given = Numbers(accepted, in.one_in(2));
    bool allowed = f.planned, moved = false;
    for (size_t b = 0; b < f.sequences.size(); ++b) {
      const Planned& p = f.sequences[b];
      accepted[b] = given.given() ? given.at(b) : p.rows;
      if (p.in < 0) continue;
      moved = moved || model.slots[p.in].version != p.version_in || model.slots[p.out].version != p.version_out;
      if (accepted[b] < 0 || accepted[b] > p.rows || (accepted[b] != 0 && accepted[b] != p.rows && p.rows > kDraft))
        allowed = false;
    }
    for (size_t i = 0; i < f.snapshots.size(); ++i)
      moved = moved || model.slots[f.snapshots[i].slot].version != f.snapshot_versions[i];
    const lla_status status = FUZZ_CALL(lla_state_commit(state, f.batch, given.index(), nullptr, &error));
    PROMISE((status == LLA_OK) == (allowed && !moved));
    PROMISE(!(moved && f.planned) || status == LLA_BUSY);
    if (status != LLA_OK) return;
    const Model before = model;
    const Flight was{f.limits, nullptr, nullptr, false, f.sequences, f.snapshots, {}};
    let_go(f);
    for (size_t b = 0; b < was.sequences.size(); ++b) {
      const Planned& p = was.sequences[b];
      if (p.in < 0 || (p.in == p.out && accepted[b] == 0)) continue;
      change(p.out, before.slots[p.in].position + accepted[b], before.slots[p.in].start);
    }
    for (const Snapshot& s : was.snapshots) {
      const Planned& p = was.sequences[static_cast<size_t>(s.sequence)];
      if (s.rows <= accepted[static_cast<size_t>(s.sequence)])
        change(s.slot, before.slots[p.in].position + s.rows, before.slots[p.in].start);
    }
    PROMISE(FUZZ_CALL(lla_state_commit(state, f.batch, {nullptr, 0, 0}, nullptr, &error)) == LLA_BUSY);
    FUZZ_OK(lla_state_settle(state, f.batch, {nullptr, 0, 0}, nullptr, &error));
  }

  void reset() {
    const size_t count = static_cast<size_t>(in.below(4));
    std::vector<int64_t> slots, positions;
    bool allowed = true;
    for (size_t i = 0; i < count; ++i) {
      slots.push_back(in.index(kSlots));
      positions.push_back(in.one_in(9) ? in.number() : in.below(kLongest + 1));
    }
    const Numbers a_slots(slots, in.one_in(2)), a_positions(positions, in.one_in(2));
    for (size_t i = 0; i < count; ++i) {
      const int64_t slot = a_slots.at(i), position = a_positions.at(i);
      if (slot == -1) continue;
      if (slot < 0 || slot >= kSlots || position < 0 || position > kLongest) allowed = false;
    }
    const lla_status status = FUZZ_CALL(
        lla_state_reset(state, a_slots.index(), static_cast<int64_t>(count), a_positions.index(), nullptr, &error));
    PROMISE(status == LLA_OK ? allowed || count == 0 : !allowed);
    if (status != LLA_OK) return;
    for (size_t i = 0; i < count; ++i) {
      if (a_slots.at(i) >= 0) change(a_slots.at(i), a_positions.at(i), a_positions.at(i));
    }
  }

  void fork() {
    const size_t count = static_cast<size_t>(in.below(6));
    std::vector<int64_t> from, to;
    for (size_t i = 0; i < count; ++i) {
      from.push_back(in.index(kSlots));
      to.push_back(in.index(kSlots));
    }
    const Numbers a_from(from, in.one_in(2)), a_to(to, in.one_in(2));
    bool allowed = true, named[kSlots] = {};
    for (size_t i = 0; i < count; ++i) {
      const int64_t s = a_from.at(i), t = a_to.at(i);
      if (s < 0 || s >= kSlots || t < 0 || t >= kSlots || named[t]) {
        allowed = false;
        break;
      }
      named[t] = true;
    }
    const lla_status status =
        FUZZ_CALL(lla_state_fork(state, a_from.index(), a_to.index(), static_cast<int64_t>(count), nullptr, &error));
    PROMISE((status == LLA_OK) == allowed);
    if (status != LLA_OK) return;
    const Model before = model;
    for (size_t i = 0; i < count; ++i) {
      const Slot& s = before.slots[a_from.at(i)];
      if (a_from.at(i) != a_to.at(i)) change(a_to.at(i), s.position, s.start);
    }
  }

  void truncate() {
    const int64_t slot = in.below(kSlots), now = model.slots[slot].position,
                  to = in.one_in(9) ? in.number() : now - in.below(7);
    int64_t low = -1;
    FUZZ_OK(lla_state_min_length(state, slot, &low, &error));
    PROMISE(low >= model.slots[slot].start && low <= now);
    const lla_status status = FUZZ_CALL(lla_state_truncate(state, slot, to, nullptr, &error));
    PROMISE((status == LLA_OK) == (to >= low && to <= now));
    if (status == LLA_OK && to != now) change(slot, to, model.slots[slot].start);
  }

  void check() {
    for (int64_t s = 0; s < kSlots; ++s) {
      int64_t length = -1;
      FUZZ_OK(lla_state_length(state, s, &length, &error));
      PROMISE(length == model.slots[s].position);
      PROMISE(query(LLA_STATE_SLOT_NODES, s) <= 6);
    }
  }

  void run() {
    for (int steps = 0; steps < 60 && !in.empty(); ++steps) {
      Flight& f = flights[in.below(kBatches)];
      switch (in.below(9)) {
        case 0:
          reset();
          break;
        case 1:
          fork();
          break;
        case 2:
          truncate();
          break;
        case 3:
          lla_batch_discard(f.batch);
          let_go(f);
          break;
        case 4:
        case 5:
          commit(f);
          break;
        default:
          plan(f);
      }
      check();
    }
    for (Flight& f : flights) lla_batch_discard(f.batch);
    FUZZ_OK(lla_state_reset(state, {nullptr, 0, 0}, 0, {nullptr, 0, 0}, nullptr, &error));
    PROMISE(query(LLA_STATE_FREE_NODE_BLOCKS) == query(LLA_STATE_NODE_BLOCKS));
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Run(data, size).run();
  return 0;
}
