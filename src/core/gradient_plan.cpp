// SPDX-License-Identifier: Apache-2.0
// Checks the gradient slots of a batch and shapes those that receive gradients.
#include "core/gradient_plan.h"

#include <algorithm>

#include "core/batch_records.h"
#include "core/error.h"

namespace lla {

namespace {

long long ll(int64_t x) { return static_cast<long long>(x); }

bool same_history(const LayerHistory& a, const LayerHistory& b) {
  if (a.has_mixer != b.has_mixer || a.conv_channels != b.conv_channels) return false;
  if (a.conv_channels > 0 && a.conv_width != b.conv_width) return false;
  if (!a.has_mixer) return true;
  const MixerShape &x = a.shape, &y = b.shape;
  return x.mixer == y.mixer && x.head_map == y.head_map && x.heads == y.heads && x.groups == y.groups &&
         x.key_dim == y.key_dim && x.value_dim == y.value_dim && x.levels == y.levels && x.absorb == y.absorb;
}

// Checks one entry; -1 is passed on.
lla_status read_slot(const State& state, const lla_index& index, const char* name, int64_t b, int64_t* slot,
                     lla_error* error) {
  *slot = index.data ? index_at(index, b) : -1;
  if (*slot >= -1 && *slot < state.plan().slots) return LLA_OK;
  return fail(error, LLA_INVALID_ARGUMENT, "%s[%lld] = %lld is not below the gradient state's %lld slots", name, ll(b),
              ll(*slot), ll(state.plan().slots));
}

lla_status claim(State* state, uint64_t stamp, const char* name, int64_t b, int64_t slot, lla_error* error) {
  SlotRecord& record = state->record(slot);
  if (record.mark == stamp)
    return fail(error, LLA_INVALID_ARGUMENT, "%s[%lld] = %lld has another role in this batch already", name, ll(b),
                ll(slot));
  record.mark = stamp;
  return LLA_OK;
}

SlotImage initial_image(const StatePlan& plan, const SlotImage& history, int32_t tail) {
  SlotImage image = State::empty_image(history.position, tail);
  image.start = history.start;
  if (plan.conv_capacity) {
    image.conv_rows = static_cast<int32_t>(std::min(plan.conv_reach, history.position - history.start));
    image.conv_origin = image.conv_rows;
  }
  return image;
}

}  // namespace

lla_status check_gradient_state(const State* state, const State& gradient, lla_error* error) noexcept {
  if (!state) return fail(error, LLA_INVALID_ARGUMENT, "gradient_state is given, but no state");
  if (gradient.context() != state->context())
    return fail(error, LLA_WRONG_CONTEXT, "gradient_state is of another context than the state");
  const StatePlan &a = state->plan(), &b = gradient.plan();
  if (b.kind != LLA_STATE_GRADIENT)
    return fail(error, LLA_STATE_INCOMPATIBLE, "gradient_state is not of kind LLA_STATE_GRADIENT");
  if (a.layers != b.layers || a.grain != b.grain)
    return fail(error, LLA_STATE_INCOMPATIBLE, "gradient_state has %lld layers of grain %lld, the state %lld of %lld",
                ll(b.layers), ll(b.grain), ll(a.layers), ll(a.grain));
  for (int64_t i = 0; i < a.layers; ++i) {
    if (!same_history(state->history(i), gradient.history(i)))
      return fail(error, LLA_STATE_INCOMPATIBLE, "gradient_state and state have different layers %lld", ll(i));
  }
  return LLA_OK;
}

lla_status plan_gradients(Batch* batch, const lla_rows& rows, void* stream, lla_error* error) noexcept {
  State& gradient = *batch->gradient_state;
  const StatePlan& plan = gradient.plan();
  const uint64_t stamp = gradient.new_stamp();
  const int64_t count = batch->view.count;
  int64_t blocks = 0;
  for (int64_t b = 0; b < count; ++b) {
    Sequence& sequence = batch->sequences[b];
    if (sequence.padding) continue;
    int64_t initial = -1, final = -1;
    LLA_TRY(read_slot(gradient, rows.initial_gradient_slots, "initial_gradient_slots", b, &initial, error));
    LLA_TRY(read_slot(gradient, rows.final_gradient_slots, "final_gradient_slots", b, &final, error));
    if (initial >= 0) {
      LLA_TRY(claim(&gradient, stamp, "initial_gradient_slots", b, initial, error));
      if (sequence.position > plan.max_length)
        return fail(error, LLA_LEVELS_EXCEEDED,
                    "sequence %lld: position %lld is beyond the gradient state's max_length %lld", ll(b),
                    ll(sequence.position), ll(plan.max_length));
      for (int32_t id : sequence.history.node) blocks += id >= 0;
    }
    if (final >= 0) {
      LLA_TRY(claim(&gradient, stamp, "final_gradient_slots", b, final, error));
      const SlotRecord& record = gradient.record(final);
      if (record.holds_nothing()) continue;  // zero, wherever it stands
      if (record.image.position != sequence.position + sequence.rows)
        return fail(error, LLA_POSITION_MISMATCH,
                    "final_gradient_slots[%lld] = %lld stands at %lld, but the rows of sequence %lld end at %lld", ll(b),
                    ll(final), ll(record.image.position), ll(b), ll(sequence.position + sequence.rows));
      sequence.final_gradient = record.image;
    }
  }
  const auto initial_slot = [&](int64_t b) -> int64_t {
    if (batch->sequences[b].padding || !rows.initial_gradient_slots.data) return -1;
    return index_at(rows.initial_gradient_slots, b);
  };
  int64_t b = 0, node = 0;  // the fresh blocks go to the sequences' nodes in order
  const auto give = [&](int64_t, int32_t id) {
    while (initial_slot(b) < 0 || batch->sequences[b].history.node[node] < 0) {
      if (initial_slot(b) < 0 || ++node == kNodes) {
        ++b;
        node = 0;
      }
    }
    batch->sequences[b].initial_gradient.node[node] = id;
    if (++node == kNodes) {
      ++b;
      node = 0;
    }
  };
  if (!gradient.exchange_nodes(count, initial_slot, blocks, give))
    return fail(error, LLA_NO_BLOCKS, "the gradient state has not the %lld node blocks that the initial gradients need",
                ll(blocks));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = initial_slot(i);
    if (slot < 0) continue;
    SlotRecord& record = gradient.record(slot);
    SlotImage& image = batch->sequences[i].initial_gradient;
    SlotImage shaped = initial_image(plan, batch->sequences[i].history, record.image.tail);
    std::copy(std::begin(image.node), std::end(image.node), shaped.node);
    image = record.image = shaped;
    ++record.version;
    for (int32_t id : image.node) {
      if (id >= 0) LLA_TRY(gradient.clear_node(id, stream, error));
    }
    LLA_TRY(gradient.clear_rows(image.tail, stream, error));
  }
  return LLA_OK;
}

}  // namespace lla
