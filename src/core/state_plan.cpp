// SPDX-License-Identifier: Apache-2.0
// Sizes of a state: checks a layer group against a description, and lays its blocks out.
#include <algorithm>

#include "core/checked.h"
#include "core/error.h"
#include "core/fenwick.h"
#include "core/state.h"

namespace lla {

namespace {

constexpr int64_t kMostLayers = 65536;
constexpr int64_t kMostBlocks = INT32_MAX;
constexpr int64_t kDefaultLength = int64_t{1} << 20;
constexpr int64_t kLongest = int64_t{1} << 61;
constexpr int64_t kDefaultDraft = 16;

long long ll(int64_t x) { return static_cast<long long>(x); }

bool is_reference(const Context& context) { return context.backend->compute_dtype == LLA_F64; }

const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case LLA_F32:
      return "LLA_F32";
    case LLA_BF16:
      return "LLA_BF16";
    case LLA_F16:
      return "LLA_F16";
    case LLA_F64:
      return "LLA_F64";
    default:
      return "an unknown type";
  }
}

// Whether every number of type `from` is one of type `to`.
bool holds_dtype(int32_t to, int32_t from) {
  if (to == from || to == LLA_F64) return true;
  return to == LLA_F32 && from != LLA_F64;
}

bool absorbs(const LayerHistory& history) { return uses_node(history, kAbsorbed); }

int32_t node_dtype_of(const StatePlan& plan, const LayerHistory& history) {
  return absorbs(history) && plan.node_dtype == LLA_BF16 ? static_cast<int32_t>(LLA_F32) : plan.node_dtype;
}

lla_status plan_dtypes(const Context& context, const LayerHistory* histories, const lla_state_desc& description,
                       StatePlan* plan, lla_error* error) {
  const bool reference = is_reference(context);
  const int32_t best = reference ? LLA_F64 : LLA_F32;
  const int32_t node = description.node_dtype, tail = description.tail_dtype;
  if (node != LLA_DTYPE_DEFAULT && node != LLA_F32 && node != LLA_BF16 && !(node == LLA_F64 && reference))
    return fail(error, LLA_DTYPE_MISMATCH, "description->node_dtype: %s is no type of nodes here", dtype_name(node));
  if (tail != LLA_DTYPE_DEFAULT && tail != LLA_F32 && tail != LLA_BF16 && tail != LLA_F16 && !(tail == LLA_F64 && reference))
    return fail(error, LLA_DTYPE_MISMATCH, "description->tail_dtype: %s is no type of tails here", dtype_name(tail));
  const bool gradient = plan->kind == LLA_STATE_GRADIENT;
  plan->node_dtype = gradient || node == LLA_DTYPE_DEFAULT ? best : node;
  plan->tail_dtype = gradient || tail == LLA_DTYPE_DEFAULT ? best : tail;
  for (int64_t i = 0; i < plan->layers && !gradient; ++i) {
    const int32_t inner = histories[i].inner_dtype;
    if (histories[i].has_mixer && inner != LLA_DTYPE_DEFAULT && !holds_dtype(plan->tail_dtype, inner))
      return fail(error, LLA_DTYPE_MISMATCH,
                  "description->tail_dtype: %s cannot hold the %s that layers[%lld] hands its mixer",
                  dtype_name(plan->tail_dtype), dtype_name(inner), ll(i));
  }
  return LLA_OK;
}

lla_status plan_length(const LayerHistory* histories, const lla_state_desc& description, StatePlan* plan, lla_error* error) {
  if (description.max_length < 0 || description.max_length > kLongest)
    return fail(error, LLA_INVALID_ARGUMENT, "description->max_length is %lld, not 0 ... 2^61", ll(description.max_length));
  plan->max_length = description.max_length ? description.max_length : kDefaultLength;
  int64_t apart = 0;  // most levels that a layer keeps apart
  for (int64_t i = 0; i < plan->layers; ++i) {
    const LayerHistory& history = histories[i];
    if (!history.has_mixer) continue;
    const MixerShape& shape = history.shape;
    apart = std::max<int64_t>(apart, shape.separate_levels());
    plan->uses_absorbed = plan->uses_absorbed || absorbs(history);
    if (shape.mixer == LLA_DELTA_RULE && shape.separate_levels() > 0) plan->rewrites_nodes = true;
    if (shape.levels == 0 || shape.absorb) continue;
    const int64_t allowed = length_allowed(shape.levels);
    if (description.max_length > allowed)
      return fail(error, LLA_LEVELS_EXCEEDED,
                  "description->max_length is %lld, but the %lld levels of layers[%lld] end at length %lld",
                  ll(description.max_length), ll(shape.levels), ll(i), ll(allowed));
    plan->max_length = std::min(plan->max_length, allowed);
  }
  plan->node_levels = std::min<int64_t>(apart, bit_length(plan->max_length / plan->grain));
  if (apart == kNodeLevels && bit_length(plan->max_length / plan->grain) > kNodeLevels)
    return fail(error, LLA_LEVELS_EXCEEDED, "description->max_length is %lld, more than 2^%d chunks of %lld rows",
                ll(plan->max_length), kNodeLevels, ll(plan->grain));
  return LLA_OK;
}

// Every slot at its worst: all its nodes, and those that one append makes beside them.
lla_status plan_blocks(const lla_state_desc& description, StatePlan* plan, lla_error* error) {
  const int64_t live = plan->live_nodes();
  const int64_t borders = (plan->grain - 1 + plan->max_draft) / plan->grain;
  const int64_t per_border =
      plan->rewrites_nodes ? live : std::min<int64_t>(plan->node_levels, 1) + (plan->uses_absorbed ? 1 : 0);
  const int64_t fresh = std::max(live, borders * per_border);
  const Size blocks = Size(plan->slots) * Size(live + fresh);
  if (description.node_blocks < 0 || description.node_blocks > kMostBlocks)
    return fail(error, LLA_INVALID_ARGUMENT, "description->node_blocks is %lld, not 0 ... 2^31 - 1",
                ll(description.node_blocks));
  if (description.node_blocks == 0 && (!blocks.valid() || blocks.value() > kMostBlocks))
    return fail(error, LLA_SIZE_OVERFLOW, "description->node_blocks: %lld slots would need more than 2^31 - 1 blocks",
                ll(plan->slots));
  plan->node_blocks = description.node_blocks ? description.node_blocks : blocks.value();
  return LLA_OK;
}

// Bytes of one block; invalid if they overflow. Only a block whose size is valid may be laid out by slot.h.
Size checked_bytes(const StatePlan& plan, const LayerHistory& history, lla_block_kind kind) {
  const MixerShape& shape = history.shape;
  const int64_t tail_size = dtype_size(plan.tail_dtype), gate_size = plan.tail_dtype == LLA_F64 ? 8 : 4;
  if (kind == LLA_BLOCK_CONV) {
    if (history.conv_channels == 0) return 0;
    return (Size(history.conv_channels) * plan.conv_capacity * gate_size).aligned(kAlignment);
  }
  if (!history.has_mixer) return 0;
  if (kind == LLA_BLOCK_NODE) {
    const Size content = Size(shape.key_dim) * shape.value_dim * dtype_size(node_dtype_of(plan, history));
    return Size(shape.heads) * (content.aligned(8) + 8).aligned(kAlignment);
  }
  const Size k = (Size(plan.tail_capacity) * shape.key_dim * tail_size).aligned(kAlignment);
  const Size v = (Size(plan.tail_capacity) * shape.value_dim * tail_size).aligned(kAlignment);
  const Size gate = (Size(plan.tail_capacity) * gate_size).aligned(kAlignment);
  return Size(shape.groups) * k + Size(shape.heads) * v + Size(2) * shape.heads * gate;
}

int64_t block_count(const StatePlan& plan, lla_block_kind kind) {
  return kind == LLA_BLOCK_NODE ? plan.node_blocks : plan.slots;
}

}  // namespace

lla_status plan_state(const Context& context, const LayerHistory* histories, int64_t layers,
                      const lla_state_desc& description, StatePlan* plan, lla_error* error) noexcept {
  StatePlan made;
  if (layers < 1 || layers > kMostLayers)
    return fail(error, LLA_INVALID_ARGUMENT, "layer_count is %lld, not 1 ... %lld", ll(layers), ll(kMostLayers));
  if (description.kind != LLA_STATE_VALUE && description.kind != LLA_STATE_GRADIENT)
    return fail(error, LLA_INVALID_ARGUMENT, "description->kind: there is no kind %d", static_cast<int>(description.kind));
  if (description.reserved != 0) return fail(error, LLA_INVALID_ARGUMENT, "description->reserved is not 0");
  if (description.slots < 0 || description.slots > kMostBlocks)
    return fail(error, LLA_INVALID_ARGUMENT, "description->slots is %lld, not 0 ... 2^31 - 1", ll(description.slots));
  made.kind = description.kind;
  made.layers = layers;
  made.slots = description.slots ? description.slots : 1;
  made.grain = histories[0].grain;
  for (int64_t i = 0; i < layers; ++i) {
    const LayerHistory& history = histories[i];
    if (!history.has_mixer && history.conv_channels == 0)
      return fail(error, LLA_INVALID_ARGUMENT, "layers[%lld] has no history", ll(i));
    if (history.grain != made.grain)
      return fail(error, LLA_STATE_INCOMPATIBLE, "layers[%lld] has grain %lld, layers[0] has %lld", ll(i), ll(history.grain),
                  ll(made.grain));
    if (history.conv_channels > 0) made.conv_reach = std::max(made.conv_reach, history.conv_width - 1);
  }
  const int64_t most_draft = kMostDraftChunks * made.grain;
  if (description.max_draft < 0 || description.max_draft > most_draft)
    return fail(error, LLA_INVALID_ARGUMENT, "description->max_draft is %lld, not 0 ... %lld (%lld chunks)",
                ll(description.max_draft), ll(most_draft), ll(kMostDraftChunks));
  made.max_draft = description.max_draft ? description.max_draft : kDefaultDraft;
  made.tail_capacity = made.grain + std::max(made.grain, made.max_draft);
  for (int64_t i = 0; i < layers; ++i) {
    if (histories[i].conv_channels == 0) continue;
    const Size capacity = Size(2) * made.conv_reach + made.tail_capacity;
    if (!capacity.valid() || capacity.value() > INT32_MAX)
      return fail(error, LLA_SIZE_OVERFLOW, "the convolution of layers[%lld] is too wide", ll(i));
    made.conv_capacity = capacity.value();
  }
  LLA_TRY(plan_dtypes(context, histories, description, &made, error));
  LLA_TRY(plan_length(histories, description, &made, error));
  LLA_TRY(plan_blocks(description, &made, error));
  for (int64_t i = 0; i < layers; ++i) {
    for (lla_block_kind kind = LLA_BLOCK_NODE; kind <= LLA_BLOCK_CONV; ++kind) {
      const Size pool = checked_bytes(made, histories[i], kind) * block_count(made, kind);
      if (!pool.valid()) return fail(error, LLA_SIZE_OVERFLOW, "the blocks of layers[%lld] do not fit into memory", ll(i));
    }
  }
  *plan = made;
  return LLA_OK;
}

lla_status block_geometry(const StatePlan& plan, const LayerHistory& history, lla_block_kind kind,
                          lla_block_geometry* geometry, lla_error* error) noexcept {
  if (kind < LLA_BLOCK_NODE || kind > LLA_BLOCK_CONV)
    return fail(error, LLA_INVALID_ARGUMENT, "kind: there is no kind %d", static_cast<int>(kind));
  SlotMemory memory;
  lay_out(plan, history, &memory);
  geometry->count = block_count(plan, kind);
  geometry->bytes = checked_bytes(plan, history, kind).value();
  geometry->alignment = kAlignment;
  geometry->head_bytes = kind == LLA_BLOCK_NODE && history.has_mixer ? memory.node_layout.head_bytes() : 0;
  geometry->blocks_per_fold = 0;
  if (kind == LLA_BLOCK_NODE) {
    geometry->blocks_per_fold =
        plan.rewrites_nodes ? plan.live_nodes() : std::min<int64_t>(plan.node_levels, 1) + (plan.uses_absorbed ? 1 : 0);
  }
  geometry->record_bytes = sizeof(SlotRecord);
  geometry->layout = kBlockLayout;
  return LLA_OK;
}

void lay_out(const StatePlan& plan, const LayerHistory& history, SlotMemory* memory) noexcept {
  const MixerShape& shape = history.shape;
  if (history.has_mixer) {
    memory->node_layout = {shape.heads, shape.key_dim, shape.value_dim, node_dtype_of(plan, history)};
    memory->tail_layout = {shape.heads, shape.groups, shape.key_dim, shape.value_dim, plan.tail_capacity, plan.tail_dtype};
  }
  if (history.conv_channels > 0) {
    const int32_t dtype = plan.tail_dtype == LLA_F64 ? LLA_F64 : LLA_F32;
    memory->conv_layout = {history.conv_channels, plan.conv_capacity, dtype};
  }
}

}  // namespace lla
