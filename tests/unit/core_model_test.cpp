// SPDX-License-Identifier: Apache-2.0
// The planner against a model that keeps the rows themselves. A pretended kernel carries plans out on real state memory,
// with sums over row numbers in place of matrices; after every step each slot must describe exactly its rows.
#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "core_model_groups.h"
#include "core_testing.h"

using namespace core_testing;

namespace {

// What a node holds: the sum of the numbers of its rows, how many, the sum of number * position, and the border at which it
// was written last (which only rewriting layers check). Its log decay: again how many rows.
constexpr int kContent = 4;
using Content = std::array<double, kContent>;

// A slot as it should be.
struct ModelSlot {
  int64_t start = 0;
  std::vector<int64_t> rows;  // numbers of the rows from `start` on
  int64_t position() const { return start + static_cast<int64_t>(rows.size()); }
  int64_t at(int64_t p) const { return rows[static_cast<size_t>(p - start)]; }
  bool empty() const { return rows.empty(); }
};

class Simulation {
 public:
  Simulation(const Group& group, int64_t grain, int64_t slots, int64_t max_draft, uint64_t seed)
      : random_(seed), context_(reference_context()), layers_(group.layers), grain_(grain), model_(slots) {
    lla_state_desc description = LLA_STATE_DESC_INIT;
    description.slots = slots;
    description.max_draft = max_draft;
    description.max_length = 32 * grain;
    state_ = make_state(context_.get(), layers_, description);
    poison();
    for (int i = 0; i < 2; ++i) batches_.push_back(std::make_unique<BatchOwner>(context_.get(), limits_of(6, 4096, 4)));
  }

  void step();
  void finish();

 private:
  struct Planned {
    std::vector<int64_t> in, out, begin, count;
    std::vector<int64_t> snapshot_sequence, snapshot_rows, snapshot_slot;
    std::vector<int64_t> numbers;  // of the rows on the row axis
  };

  const StatePlan& plan() const { return state_->plan(); }
  int64_t slots() const { return plan().slots; }
  void poison();
  bool plan_step(BatchOwner* batch, Planned* step, const std::set<int64_t>& taken);
  void forward(const Batch& batch, const Planned& step);
  void commit(BatchOwner* batch, const Planned& step, bool ran);
  void step_batches();
  void step_reorder();
  void step_truncate();
  void step_reset();
  void step_copy();

  Content read_node(int64_t layer, int32_t id, int64_t head) const;
  Content sum(const ModelSlot& slot, int64_t first, int64_t last) const;
  void store_nodes(const Sequence& sequence, const Planned& step, int64_t layer);
  void store_tail(const Sequence& sequence, const Planned& step, int64_t layer);
  void store_conv(const Sequence& sequence, const Planned& step, int64_t layer);
  void check_slot(int64_t slot) const;
  void check_layer(int64_t slot, int64_t layer) const;
  void check_all() const;
  double& tail_value(int64_t layer, int32_t block, int64_t kind, int64_t head, int64_t ring, int64_t i) const;

  Random random_;
  ContextPointer context_;
  std::vector<LayerHistory> layers_;
  int64_t grain_;
  StatePointer state_;
  std::vector<ModelSlot> model_;
  std::vector<std::unique_ptr<BatchOwner>> batches_;
  int64_t next_number_ = 1;
};

// Memory that nobody wrote must never count.
void Simulation::poison() {
  for (int64_t layer = 0; layer < plan().layers; ++layer) {
    const SlotMemory& memory = state_->memory(layer);
    const auto fill = [](const Pool& pool, int64_t blocks) {
      double* data = reinterpret_cast<double*>(pool.base);
      if (data) std::fill(data, data + blocks * pool.stride / 8, NAN);
    };
    fill(memory.nodes, plan().node_blocks);
    fill(memory.tails, slots());
    fill(memory.convs, slots());
  }
}

// kind 0: k, 1: v, 2: gate, 3: write.
double& Simulation::tail_value(int64_t layer, int32_t block, int64_t kind, int64_t head, int64_t ring, int64_t i) const {
  const SlotMemory& memory = state_->memory(layer);
  char* data = kind == 0   ? memory.tail_k(block, head, ring)
               : kind == 1 ? memory.tail_v(block, head, ring)
               : kind == 2 ? memory.tail_gate(block, head, ring)
                           : memory.tail_write(block, head, ring);
  return reinterpret_cast<double*>(data)[i];
}

// The value that a row leaves at a place of its tail or convolution.
double row_value(int64_t number, int64_t kind, int64_t head, int64_t i) {
  return static_cast<double>(number * 64 + kind * 16 + head * 4 + i);
}

Content Simulation::read_node(int64_t layer, int32_t id, int64_t head) const {
  const SlotMemory& memory = state_->memory(layer);
  Content content{};
  if (id < 0) return content;
  std::copy_n(reinterpret_cast<const double*>(memory.node(id, head)), kContent, content.data());
  return content;
}

Content Simulation::sum(const ModelSlot& slot, int64_t first, int64_t last) const {
  Content content{};
  for (int64_t p = std::max(first, slot.start); p < std::min(last, slot.position()); ++p) {
    const double number = static_cast<double>(slot.at(p));
    content[0] += number;
    content[1] += 1;
    content[2] += number * static_cast<double>(p);
  }
  return content;
}

// Carries out what the plan asks for, reading nothing but the history's blocks and the call's rows.
void Simulation::forward(const Batch& batch, const Planned& step) {
  for (int64_t b = 0; b < batch.view.count; ++b) {
    const Sequence& sequence = batch.view.sequences[b];
    if (sequence.padding) {
      EXPECT_EQ(sequence.nodes_to_store_count + sequence.tail_to_store_count + sequence.conv_to_store_count, 0);
      continue;
    }
    for (int64_t layer = 0; layer < plan().layers; ++layer) {
      if (layers_[static_cast<size_t>(layer)].has_mixer) {
        store_nodes(sequence, step, layer);
        store_tail(sequence, step, layer);
      }
      if (layers_[static_cast<size_t>(layer)].conv_channels) store_conv(sequence, step, layer);
    }
  }
}

void Simulation::store_nodes(const Sequence& sequence, const Planned& step, int64_t layer) {
  const LayerHistory& history = layers_[static_cast<size_t>(layer)];
  const SlotImage& old = sequence.history;
  const SlotMemory& memory = state_->memory(layer);
  const int64_t old_chunks = old.position / grain_, begin = old_chunks * grain_;
  int64_t last_border = begin;
  for (int64_t n = 0; n < sequence.nodes_to_store_count; ++n) {
    const NodesToStore& nodes = sequence.nodes_to_store[n];
    ASSERT_GT(nodes.position, std::max(last_border, sequence.position));
    ASSERT_LE(nodes.position, sequence.position + sequence.rows);
    ASSERT_EQ(nodes.position % grain_, 0);
    last_border = nodes.position;
    const int64_t chunks = nodes.position / grain_;
    const int apart = history.shape.separate_levels();
    for (int b = 0; b < kNodes; ++b) {
      if (!uses_node(history, b) || !((nodes.write >> b) & 1)) continue;
      ASSERT_GE(nodes.node[b], 0);
      const bool absorbing = b == kAbsorbed;
      ASSERT_TRUE(absorbing || ((chunks >> b) & 1));
      if (absorbing && (chunks >> apart) == 0) continue;
      const int64_t first_chunk = absorbing ? 0 : (chunks >> (b + 1)) << (b + 1);
      const int64_t last_chunk = absorbing ? (chunks >> apart) << apart : first_chunk + (int64_t{1} << b);
      for (int64_t h = 0; h < history.shape.heads; ++h) {
        Content content{};
        const auto add = [&](const Content& part) {
          for (size_t i = 0; i < 3; ++i) content[i] += part[i];
        };
        // Nodes of the history that lie inside.
        for (int level = 0; level < kNodeLevels; ++level) {
          if (level >= apart || !((old_chunks >> level) & 1)) continue;
          const int64_t first = (old_chunks >> (level + 1)) << (level + 1);
          if (first >= first_chunk && first + (int64_t{1} << level) <= last_chunk) add(read_node(layer, old.node[level], h));
        }
        if (absorbing && holds_node(history, old, kAbsorbed)) add(read_node(layer, old.node[kAbsorbed], h));
        // Rows: those of the tail, then the call's.
        for (int64_t p = std::max(begin, first_chunk * grain_); p < last_chunk * grain_; ++p) {
          double number = 0;
          if (p < sequence.position) {
            if (p < old.start) continue;
            const int64_t ring = (old.tail_origin + p - begin) % memory.tail_layout.capacity;
            number = std::floor(tail_value(layer, old.tail, 2, h, ring, 0) / 64);
          } else {
            number = static_cast<double>(step.numbers[static_cast<size_t>(sequence.row_begin + p - sequence.position)]);
          }
          add({number, 1, number * static_cast<double>(p), 0});
        }
        content[3] = static_cast<double>(nodes.position);
        std::copy_n(content.data(), kContent, reinterpret_cast<double*>(memory.node(nodes.node[b], h)));
        *reinterpret_cast<double*>(memory.node_decay(nodes.node[b], h)) = content[1];
      }
    }
  }
}

void Simulation::store_tail(const Sequence& sequence, const Planned& step, int64_t layer) {
  const SlotMemory& memory = state_->memory(layer);
  const TailLayout& layout = memory.tail_layout;
  const SlotImage& old = sequence.history;
  for (int64_t n = 0; n < sequence.tail_to_store_count; ++n) {
    const RowsToStore& store = sequence.tail_to_store[n];
    ASSERT_LT(store.first, store.last);
    ASSERT_LE(store.last - store.first, layout.capacity);
    ASSERT_GE(store.first, old.position / grain_ * grain_);
    ASSERT_LE(store.last, sequence.position + sequence.rows);
    for (int64_t p = store.first; p < store.last; ++p) {
      if (p < old.start) continue;
      const int64_t to = (store.ring + p - store.first) % layout.capacity;
      const int64_t from = (old.tail_origin + p - old.position / grain_ * grain_) % layout.capacity;
      for (int64_t kind = 0; kind < 4; ++kind) {
        const int64_t heads = kind == 0 ? layout.groups : layout.heads;
        const int64_t dim = kind == 0 ? layout.key_dim : kind == 1 ? layout.value_dim : 1;
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t i = 0; i < dim; ++i) {
            const double value =
                p < sequence.position
                    ? tail_value(layer, old.tail, kind, h, from, i)
                    : row_value(step.numbers[static_cast<size_t>(sequence.row_begin + p - sequence.position)], kind, h, i);
            tail_value(layer, store.block, kind, h, to, i) = value;
          }
        }
      }
    }
  }
}

void Simulation::store_conv(const Sequence& sequence, const Planned& step, int64_t layer) {
  const SlotMemory& memory = state_->memory(layer);
  const int64_t capacity = memory.conv_layout.capacity;
  const SlotImage& old = sequence.history;
  for (int64_t n = 0; n < sequence.conv_to_store_count; ++n) {
    const RowsToStore& store = sequence.conv_to_store[n];
    ASSERT_LT(store.first, store.last);
    ASSERT_LE(store.last - store.first, capacity);
    ASSERT_GE(store.first, old.position - old.conv_rows);
    ASSERT_LE(store.last, sequence.position + sequence.rows);
    for (int64_t p = store.first; p < store.last; ++p) {
      ASSERT_GE(p, old.start);
      const int64_t to = (store.ring + p - store.first) % capacity;
      const int64_t from = (old.conv_origin - (old.position - p) + 2 * capacity) % capacity;
      for (int64_t c = 0; c < memory.conv_layout.channels; ++c) {
        double* target = reinterpret_cast<double*>(memory.conv(store.block, c, to));
        *target = p < sequence.position
                      ? *reinterpret_cast<double*>(memory.conv(old.tail, c, from))
                      : row_value(step.numbers[static_cast<size_t>(sequence.row_begin + p - sequence.position)], 0, c, 0);
      }
    }
  }
}

// ---- what every slot must say
// ---------------------------------------------------------------------------------------------

void Simulation::check_layer(int64_t slot, int64_t layer) const {
  const ModelSlot& model = model_[static_cast<size_t>(slot)];
  const LayerHistory& history = layers_[static_cast<size_t>(layer)];
  const SlotImage& image = state_->record(slot).image;
  const SlotMemory& memory = state_->memory(layer);
  const int64_t chunks = image.position / grain_, begin = chunks * grain_;
  if (history.has_mixer) {
    const int apart = history.shape.separate_levels();
    const bool rewrites = history.shape.mixer == LLA_DELTA_RULE;
    for (int b = 0; b < kNodes; ++b) {
      const bool absorbing = b == kAbsorbed;
      if (!uses_node(history, b)) continue;
      const bool live = absorbing ? (chunks >> apart) != 0 : ((chunks >> b) & 1) != 0;
      if (!live) continue;
      const int64_t first = absorbing ? 0 : ((chunks >> (b + 1)) << (b + 1)) * grain_;
      const int64_t last = absorbing ? ((chunks >> apart) << apart) * grain_ : first + (grain_ << b);
      const Content expected = sum(model, first, last);
      // All is before the start: nothing is stored, unless rows since have folded the absorbing node anew.
      if (last <= model.start && image.node[b] < 0) continue;
      ASSERT_GE(image.node[b], 0) << "node " << b << " of slot " << slot;
      for (int64_t h = 0; h < history.shape.heads; ++h) {
        const Content content = read_node(layer, image.node[b], h);
        ASSERT_EQ(content[0], expected[0]) << "slot " << slot << " node " << b << " position " << image.position;
        ASSERT_EQ(content[1], expected[1]);
        ASSERT_EQ(content[2], expected[2]);
        ASSERT_TRUE(rewrites || *reinterpret_cast<double*>(memory.node_decay(image.node[b], h)) == expected[1]);
        ASSERT_TRUE(!(rewrites || absorbing) || content[3] == static_cast<double>(begin))
            << "slot " << slot << " node " << b;
      }
    }
    const TailLayout& layout = memory.tail_layout;
    for (int64_t p = std::max(begin, model.start); p < model.position(); ++p) {
      const int64_t ring = (image.tail_origin + p - begin) % layout.capacity;
      for (int64_t kind = 0; kind < 4; ++kind) {
        const int64_t heads = kind == 0 ? layout.groups : layout.heads;
        const int64_t dim = kind == 0 ? layout.key_dim : kind == 1 ? layout.value_dim : 1;
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t i = 0; i < dim; ++i) {
            ASSERT_EQ(tail_value(layer, image.tail, kind, h, ring, i), row_value(model.at(p), kind, h, i))
                << "slot " << slot << " row " << p << " of " << model.position();
          }
        }
      }
    }
  }
  if (history.conv_channels) {
    const int64_t capacity = memory.conv_layout.capacity;
    for (int64_t back = 1; back <= image.conv_rows; ++back) {
      const int64_t ring = (image.conv_origin - back + capacity) % capacity;
      for (int64_t c = 0; c < history.conv_channels; ++c) {
        ASSERT_EQ(*reinterpret_cast<double*>(memory.conv(image.tail, c, ring)),
                  row_value(model.at(model.position() - back), 0, c, 0))
            << "slot " << slot << " convolution row -" << back << " at " << model.position();
      }
    }
  }
}

void Simulation::check_slot(int64_t slot) const {
  const ModelSlot& model = model_[static_cast<size_t>(slot)];
  const SlotImage& image = state_->record(slot).image;
  ASSERT_EQ(image.position, model.position()) << "slot " << slot;
  ASSERT_EQ(image.start, model.start) << "slot " << slot;
  const int64_t begin = image.position / grain_ * grain_;
  if (plan().conv_capacity) {
    ASSERT_EQ(image.conv_rows, std::min(image.position - image.start, plan().conv_reach + image.position % grain_));
  }
  ASSERT_EQ(state_->min_length(slot), std::max(begin, model.start));
  for (int b = 0; b < kNodeLevels; ++b) {
    if (image.node[b] < 0) continue;
    ASSERT_LT(b, plan().node_levels);
    ASSERT_TRUE(((image.position / grain_) >> b) & 1);
  }
  for (int64_t layer = 0; layer < plan().layers; ++layer) ASSERT_NO_FATAL_FAILURE(check_layer(slot, layer));
}

void Simulation::check_all() const {
  std::set<int32_t> tails;
  for (int64_t slot = 0; slot < slots(); ++slot) {
    ASSERT_NO_FATAL_FAILURE(check_slot(slot));
    tails.insert(state_->record(slot).image.tail);
  }
  ASSERT_EQ(static_cast<int64_t>(tails.size()), slots());
}

// ---- steps
// ----------------------------------------------------------------------------------------------------------------

bool Simulation::plan_step(BatchOwner* batch, Planned* step, const std::set<int64_t>& taken) {
  std::vector<int64_t> free;  // slots that this batch may write to
  for (int64_t slot = 0; slot < slots(); ++slot) {
    if (!taken.count(slot)) free.push_back(slot);
  }
  const auto take = [&](auto accept) -> int64_t {
    std::vector<size_t> fitting;
    for (size_t i = 0; i < free.size(); ++i) {
      if (accept(free[i])) fitting.push_back(i);
    }
    if (fitting.empty()) return -1;
    const size_t i = fitting[static_cast<size_t>(random_.below(static_cast<int64_t>(fitting.size())))];
    const int64_t slot = free[i];
    free.erase(free.begin() + static_cast<std::ptrdiff_t>(i));
    return slot;
  };
  const std::vector<int64_t> all = free;
  const auto is_empty = [&](int64_t slot) { return model_[static_cast<size_t>(slot)].empty(); };
  std::vector<int64_t> offsets, expected;
  int64_t row = random_.below(3);
  const int64_t sequences = random_.below(5);
  for (int64_t b = 0; b < sequences; ++b) {
    int64_t in = -1, out = -1;
    if (!random_.one_in(8)) {
      if (random_.one_in(3) && !all.empty()) {
        in = all[static_cast<size_t>(random_.below(static_cast<int64_t>(all.size())))];
        out = take([&](int64_t slot) { return slot != in && is_empty(slot); });
        if (out < 0) in = -1;
      } else {
        in = out = take([](int64_t) { return true; });
      }
    }
    int64_t count = 0;
    if (in >= 0) {
      const int64_t room = plan().max_length - model_[static_cast<size_t>(in)].position();
      const int64_t draft = random_.below(plan().max_draft + 1);
      count = std::min(room, random_.one_in(3) ? random_.below(6 * grain_ + plan().max_draft) : draft);
    } else {
      count = random_.below(4);
    }
    step->in.push_back(in);
    step->out.push_back(out);
    step->begin.push_back(row);
    step->count.push_back(count);
    offsets.push_back(row);
    expected.push_back(in < 0 ? 77 : model_[static_cast<size_t>(in)].position());
    row += count + (random_.one_in(3) ? 2 : 0);
  }
  offsets.push_back(row);
  for (int i = 0; i < 3; ++i) {
    const int64_t b = sequences ? random_.below(sequences) : 0;
    if (sequences == 0 || step->in[static_cast<size_t>(b)] < 0 || random_.one_in(2)) continue;
    const int64_t slot = take(is_empty);
    if (slot < 0) continue;
    step->snapshot_sequence.push_back(b);
    step->snapshot_rows.push_back(random_.below(step->count[static_cast<size_t>(b)] + 1));
    step->snapshot_slot.push_back(slot);
  }
  for (int64_t i = 0; i < row; ++i) step->numbers.push_back(next_number_++);

  lla_rows rows = LLA_ROWS_INIT;
  rows.sequences = sequences;
  rows.total_rows = row;
  rows.offsets = index_of(offsets);
  rows.counts = index_of(step->count);
  rows.slot_in = index_of(step->in);
  rows.slot_out = index_of(step->out);
  rows.expected_positions = index_of(expected);
  rows.snapshots = static_cast<int64_t>(step->snapshot_slot.size());
  rows.snapshot_sequences = index_of(step->snapshot_sequence);
  rows.snapshot_rows = index_of(step->snapshot_rows);
  rows.snapshot_slots = index_of(step->snapshot_slot);
  Error error;
  const lla_status status = plan_batch(batch->get(), state_.get(), rows, nullptr, nullptr, &error);
  EXPECT_EQ(status, LLA_OK) << error.text;
  if (status != LLA_OK) return false;
  // Every row is in a live sequence or slack, and only in one.
  std::vector<int> seen(static_cast<size_t>(row));
  const BatchView& view = (*batch)->view;
  for (int64_t b = 0; b < view.count; ++b) {
    for (int64_t i = 0; i < view.sequences[b].rows; ++i) ++seen[static_cast<size_t>(view.sequences[b].row_begin + i)];
  }
  for (int64_t i = 0; i < view.slack_count; ++i) {
    for (int64_t r = view.slack[i].begin; r < view.slack[i].end; ++r) ++seen[static_cast<size_t>(r)];
  }
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
  return true;
}

void Simulation::commit(BatchOwner* batch, const Planned& step, bool ran) {
  std::vector<int64_t> accepted;
  bool given = !ran || random_.one_in(2);
  for (size_t b = 0; b < step.in.size(); ++b) {
    const int64_t count = step.count[b];
    const bool draft = count <= plan().max_draft;
    accepted.push_back(!ran ? 0 : !given ? count : draft ? random_.below(count + 1) : random_.one_in(3) ? 0 : count);
    if (step.in[b] < 0) accepted[b] = 1000;  // padding: not looked at
  }
  Error error;
  ASSERT_EQ(commit_batch(state_.get(), batch->get(), given ? index_of(accepted) : lla_index{nullptr, 0, 0}, nullptr, &error),
            LLA_OK)
      << error.text;
  const std::vector<ModelSlot> before = model_;
  const auto extended = [&](size_t b, int64_t rows) {
    ModelSlot slot = before[static_cast<size_t>(step.in[b])];
    for (int64_t i = 0; i < rows; ++i) slot.rows.push_back(step.numbers[static_cast<size_t>(step.begin[b] + i)]);
    return slot;
  };
  for (size_t b = 0; b < step.in.size(); ++b) {
    if (step.in[b] >= 0) model_[static_cast<size_t>(step.out[b])] = extended(b, accepted[b]);
  }
  for (size_t i = 0; i < step.snapshot_slot.size(); ++i) {
    const size_t b = static_cast<size_t>(step.snapshot_sequence[i]);
    if (step.snapshot_rows[i] <= accepted[b])
      model_[static_cast<size_t>(step.snapshot_slot[i])] = extended(b, step.snapshot_rows[i]);
  }
  EXPECT_EQ(commit_batch(state_.get(), batch->get(), {nullptr, 0, 0}, nullptr, nullptr), LLA_BUSY);
}

// One or two batches on disjoint slots: planned, perhaps run, then committed or dropped.
void Simulation::step_batches() {
  std::set<int64_t> taken;
  std::vector<Planned> steps(random_.one_in(4) ? 2 : 1);
  for (size_t i = 0; i < steps.size(); ++i) {
    ASSERT_TRUE(plan_step(batches_[i].get(), &steps[i], taken));
    taken.insert(steps[i].in.begin(), steps[i].in.end());
    taken.insert(steps[i].out.begin(), steps[i].out.end());
    taken.insert(steps[i].snapshot_slot.begin(), steps[i].snapshot_slot.end());
  }
  ASSERT_NO_FATAL_FAILURE(check_all());
  for (size_t i = 0; i < steps.size(); ++i) {
    ASSERT_EQ(check_batch(*batches_[i]->get(), state_.get(), nullptr), LLA_OK);
    const bool ran = !random_.one_in(8);
    if (ran) forward(*batches_[i]->get(), steps[i]);
    ASSERT_FALSE(testing::Test::HasFatalFailure());
    ASSERT_NO_FATAL_FAILURE(check_all());  // an append destroys nothing
    if (random_.one_in(6)) {
      discard_batch(batches_[i]->get());
    } else {
      ASSERT_NO_FATAL_FAILURE(commit(batches_[i].get(), steps[i], ran));
    }
  }
}

void Simulation::step_reorder() {
  std::vector<int64_t> sources, targets, order(static_cast<size_t>(slots()));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[static_cast<size_t>(random_.below(static_cast<int64_t>(i)))]);
  const int64_t count = random_.below(slots() + 1);
  const std::vector<ModelSlot> before = model_;
  for (int64_t i = 0; i < count; ++i) {
    sources.push_back(random_.below(slots()));
    targets.push_back(order[static_cast<size_t>(i)]);
    model_[static_cast<size_t>(targets.back())] = before[static_cast<size_t>(sources.back())];
  }
  ASSERT_EQ(state_->fork(sources.data(), targets.data(), count, nullptr, nullptr), LLA_OK);
}

void Simulation::step_truncate() {
  const int64_t slot = random_.below(slots());
  ModelSlot& model = model_[static_cast<size_t>(slot)];
  const int64_t lowest = std::max(model.position() / grain_ * grain_, model.start);
  const int64_t position = model.position() - random_.below(grain_ + 2);
  const lla_status status = state_->truncate(slot, position, nullptr);
  if (position < 0) {
    ASSERT_EQ(status, LLA_INVALID_ARGUMENT);
  } else if (position < lowest) {
    ASSERT_EQ(status, LLA_ROLLBACK_LIMIT);
  } else {
    ASSERT_EQ(status, LLA_OK);
    model.rows.resize(static_cast<size_t>(position - model.start));
  }
}

void Simulation::step_reset() {
  const int64_t slot = random_.below(slots()), position = random_.one_in(2) ? 0 : random_.below(plan().max_length + 1);
  ASSERT_EQ(state_->reset(&slot, 1, &position, nullptr), LLA_OK);
  model_[static_cast<size_t>(slot)] = ModelSlot{position, {}};
}

void Simulation::step_copy() {
  const int64_t from = random_.below(slots()), to = random_.below(slots());
  size_t bytes = 0;
  ASSERT_EQ(state_->export_size(from, &bytes, nullptr), LLA_OK);
  std::vector<char> image(bytes);
  ASSERT_EQ(state_->pack(from, image.data(), bytes, nullptr, nullptr), LLA_OK);
  ASSERT_EQ(seal_image(image.data(), bytes, nullptr, nullptr), LLA_OK);
  ASSERT_EQ(check_image(image.data(), bytes, nullptr, nullptr, nullptr), LLA_OK);
  Error error;
  ASSERT_EQ(state_->unpack(to, image.data(), bytes, nullptr, &error), LLA_OK) << error.text;
  model_[static_cast<size_t>(to)] = model_[static_cast<size_t>(from)];
}

void Simulation::step() {
  const int64_t kind = random_.below(20);
  if (kind < 13)
    step_batches();
  else if (kind < 15)
    step_reorder();
  else if (kind < 17)
    step_truncate();
  else if (kind < 19)
    step_reset();
  else
    step_copy();
  if (testing::Test::HasFatalFailure()) return;
  ASSERT_NO_FATAL_FAILURE(check_all());
  // No block is lost: what is not free is linked.
  std::set<int32_t> linked;
  for (int64_t slot = 0; slot < slots(); ++slot) {
    for (const int32_t id : state_->record(slot).image.node) {
      if (id >= 0) linked.insert(id);
    }
  }
  ASSERT_EQ(state_->free_nodes(), plan().node_blocks - static_cast<int64_t>(linked.size()));
}

void Simulation::finish() {
  ASSERT_EQ(state_->reset(nullptr, 0, nullptr, nullptr), LLA_OK);
  EXPECT_EQ(state_->free_nodes(), plan().node_blocks);
  for (int64_t slot = 0; slot < slots(); ++slot) EXPECT_TRUE(state_->is_empty(slot));
}

class ModelTest : public testing::TestWithParam<int64_t> {};

TEST_P(ModelTest, SlotsDescribeExactlyTheirRows) {
  const int64_t grain = GetParam();
  uint64_t seed = 1;
  for (const Group& group : groups_of(grain)) {
    for (const int64_t max_draft : {int64_t{1}, int64_t{3}, 2 * grain + 1}) {
      SCOPED_TRACE(std::string(group.name) + ", grain " + std::to_string(grain) + ", draft " + std::to_string(max_draft));
      Simulation simulation(group, grain, 7, max_draft, seed++);
      for (int step = 0; step < 700; ++step) {
        SCOPED_TRACE("step " + std::to_string(step));
        ASSERT_NO_FATAL_FAILURE(simulation.step());
      }
      ASSERT_NO_FATAL_FAILURE(simulation.finish());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Grains, ModelTest, testing::Values(1, 2, 4, 8));

}  // namespace
