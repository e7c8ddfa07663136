// SPDX-License-Identifier: Apache-2.0
// The whole interface as a sequence of calls: contexts whose memory runs out and whose threads refuse, layers of every kind
// with odd numbers in their descriptions, states, batches, tensors that are nearly right. Every call gives a status with a
// text, writes nothing when it fails, and in the end every byte has gone back.
#include <algorithm>

#include "api_device.h"
#include "api_shapes.h"

namespace {

using fuzz::Bindings;
using fuzz::Block;
using fuzz::Input;
using fuzz::kMostBytes;

constexpr int64_t kContexts = 2, kLayers = 4, kStates = 2, kBatches = 2;

struct Held {
  fuzz::Meter meter;
  fuzz::Crew crew;
  lla_context* context = nullptr;
};

struct HeldLayer {
  lla_layer* layer = nullptr;
  Held* held = nullptr;  // its context's hooks
  lla_layer_desc desc = LLA_LAYER_DESC_INIT;
};

struct HeldState {
  lla_state* state = nullptr;
  std::vector<lla_layer_desc> descs;
  std::vector<lla_layer*> layers;  // a reference of its own for each
  std::vector<std::unique_ptr<Block>> memory;
};

struct HeldBatch {
  lla_batch* batch = nullptr;
  lla_context* context = nullptr;  // a reference of its own
  std::unique_ptr<Block> memory;
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  int64_t rows = 0;
  int state = -1, gradient = -1;  // which of the states, or none
};

struct Run {
  Input in;
  std::vector<std::unique_ptr<Held>> all;  // hooks stay: layers and states keep released contexts alive
  Held* held[kContexts] = {};
  HeldLayer layers[kLayers];
  HeldState states[kStates];
  HeldBatch batches[kBatches];

  Run(const uint8_t* data, size_t size) : in(data, size) {}
  int64_t pick(int64_t n) { return in.below(n); }
  // Some keys of each object, others for other inputs: asking for all of them takes as long as the rest.
  bool asks(int key) const { return (in.left() + static_cast<size_t>(key + 1)) % 4 == 0; }

  // ---- contexts ---------------------------------------------------------------------------------------------------------
  void make_context(int i) {
    if (held[i]) return;
    all.push_back(std::make_unique<Held>());
    Held& h = *all.back();
    h.meter.fail_at = in.one_in(6) ? 1 + in.byte() % 40 : 0;
    h.crew.threads = static_cast<int32_t>(1 + in.below(3));
    h.crew.manner = static_cast<int>(in.below(4));
    h.crew.refuse_at = in.one_in(4) ? 1 + in.below(20) : 0;
    lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
    lla_allocator allocator = h.meter.hook();
    lla_parallel parallel{sizeof parallel, h.crew.threads, 0, fuzz::Crew::run, &h.crew};
    lla_log log{sizeof log, LLA_LOG_INFO, 0,
                [](lla_log_level level, const char* text, void*) {
                  PROMISE(level >= LLA_LOG_ERROR && level <= LLA_LOG_INFO && text && !std::strchr(text, '\n'));
                },
                nullptr};
    options.allocator = &allocator;
    options.backend = in.one_in(3) ? LLA_BACKEND_REFERENCE : LLA_BACKEND_CPU;
    options.isa = static_cast<lla_isa>(in.below(4));
    if (in.one_in(2)) options.parallel = &parallel;
    if (in.one_in(4)) options.log = &log;
    if (in.one_in(20)) options.backend = static_cast<lla_backend>(in.number());
    if (in.one_in(20)) options.isa = static_cast<lla_isa>(in.number());
    if (in.one_in(20)) options.determinism = static_cast<lla_determinism>(in.number());
    if (in.one_in(20)) options.device = static_cast<int32_t>(in.number());
    if (in.one_in(20)) parallel.max_threads = static_cast<int32_t>(std::min<int64_t>(in.number(), 3));
    if (in.one_in(30)) allocator.release = nullptr;
    const lla_status status = FUZZ_CALL(lla_context_create(&options, &h.context, &error));
    PROMISE((status == LLA_OK) == (h.context != nullptr));
    PROMISE(status == LLA_OK || h.meter.outstanding == 0);
    if (status != LLA_OK) return;
    h.crew.threads = parallel.max_threads;
    held[i] = &h;
    char text[300];
    for (int key = -1; key < 9; ++key) {
      size_t size = in.one_in(3) ? pick(12) : sizeof text;
      const size_t given = size;
      char* const to = in.one_in(5) ? nullptr : text;
      if (!asks(key)) continue;
      const lla_status asked = FUZZ_CALL(lla_context_query(h.context, key, to, &size, &error));
      PROMISE(asked == LLA_OK || asked == LLA_INVALID_ARGUMENT || (asked == LLA_BUFFER_TOO_SMALL && size > given));
    }
  }
  void release_context(int i) {
    if (!held[i]) return;
    lla_context_release(held[i]->context);  // batches, layers and states keep what they need
    held[i]->context = nullptr;
    held[i] = nullptr;
  }

  // ---- layers -----------------------------------------------------------------------------------------------------------
  void make_layer(HeldLayer& l) {
    Held* const h = held[in.calm ? 0 : pick(kContexts)];
    if (l.layer || !h) return;
    const lla_layer_desc d = fuzz::any_description(in);
    const lla_status supported = FUZZ_CALL(lla_layer_supported(h->context, &d, &error));
    const lla_status status = FUZZ_CALL(lla_layer_create(h->context, &d, &l.layer, &error));
    PROMISE(status == supported || status == LLA_OUT_OF_MEMORY);
    PROMISE((status == LLA_OK) == (l.layer != nullptr));
    if (status != LLA_OK) return;
    l.held = h;
    l.desc = d;
    char text[300];
    for (int key = -1; key < 9; ++key) {
      size_t size = in.one_in(3) ? pick(12) : sizeof text;
      const int64_t index = in.one_in(4) ? in.number() : 0;
      char* const to = in.one_in(5) ? nullptr : text;
      if (asks(key)) (void)FUZZ_CALL(lla_layer_query(l.layer, key, index, to, &size, &error));
    }
  }

  // ---- states -----------------------------------------------------------------------------------------------------------
  void make_state(HeldState& s) {
    if (s.state) return;
    std::vector<lla_layer*> group;
    std::vector<lla_layer_desc> descs;
    for (int64_t n = 1 + pick(3); n > 0; --n) {
      int64_t which = pick(kLayers);
      for (int64_t tries = 0; tries < kLayers && !layers[which].layer; ++tries) which = (which + 1) % kLayers;
      const HeldLayer& l = layers[which];
      if (!l.layer) return;
      group.push_back(l.layer);
      descs.push_back(l.desc);
    }
    lla_state_desc d = LLA_STATE_DESC_INIT;
    d.slots = in.calm ? 4 : pick(5);
    d.max_length = in.one_in(2) ? 1 + pick(100) : 0;
    d.max_draft = in.one_in(2) ? pick(10) : 0;
    d.node_blocks = in.one_in(3) ? pick(20) : 0;
    d.kind = in.one_in(8) ? LLA_STATE_GRADIENT : LLA_STATE_VALUE;
    d.node_dtype = in.one_in(3) ? static_cast<lla_dtype>(in.below(6)) : 0;
    d.tail_dtype = in.one_in(3) ? static_cast<lla_dtype>(in.below(6)) : 0;
    if (in.one_in(10)) {
      int64_t* fields[] = {&d.slots, &d.max_length, &d.max_draft, &d.node_blocks};
      *fields[in.below(4)] = in.number();
    }
    std::vector<lla_block_memory> memory;
    std::vector<std::unique_ptr<Block>> blocks;
    if (in.one_in(3)) {
      for (size_t i = 0; i < group.size(); ++i) {
        for (lla_block_kind kind = LLA_BLOCK_NODE; kind <= LLA_BLOCK_CONV; ++kind) {
          lla_block_geometry g = LLA_BLOCK_GEOMETRY_INIT;
          const lla_status status = FUZZ_CALL(lla_state_geometry(group.data(), static_cast<int64_t>(group.size()), &d,
                                                                 static_cast<int64_t>(i), kind, &g, &error));
          if (status != LLA_OK || g.bytes == 0 || g.count == 0) continue;
          PROMISE(g.bytes > 0 && g.count > 0 && g.alignment > 0);
          const int64_t stride = g.bytes + (in.one_in(3) ? g.alignment : 0);
          if (stride > kMostBytes || g.count > kMostBytes / stride) return;
          blocks.push_back(std::make_unique<Block>(static_cast<size_t>((g.count - 1) * stride + g.bytes)));
          memory.push_back({static_cast<int64_t>(i), kind, 0, blocks.back()->data(), stride});
        }
      }
      if (in.one_in(6) && !memory.empty())
        fuzz::spoil(in, &memory[static_cast<size_t>(pick(static_cast<int64_t>(memory.size())))]);
    }
    // A commit without a forward that went well is a mistake, which leaves what the memory held.
    for (const auto& h : all) h->meter.fill = true;
    const bool defaults = in.one_in(9) && memory.empty();  // memory has the geometry of `d`
    const lla_status status =
        FUZZ_CALL(lla_state_create(group.data(), static_cast<int64_t>(group.size()), defaults ? nullptr : &d, memory.data(),
                                   static_cast<int64_t>(memory.size()), &s.state, &error));
    for (const auto& h : all) h->meter.fill = false;
    PROMISE((status == LLA_OK) == (s.state != nullptr));
    if (status != LLA_OK) return;
    s.descs = descs;
    s.memory = std::move(blocks);
    for (lla_layer* l : group) s.layers.push_back(lla_layer_retain(l));
  }
  void release_state(int i) {
    HeldState& s = states[i];
    for (HeldBatch& b : batches) {
      if (b.state != i && b.gradient != i) continue;
      lla_batch_discard(b.batch);
      b.state = b.gradient = -1;
    }
    lla_state_release(s.state);
    for (lla_layer* l : s.layers) lla_layer_release(l);
    s = HeldState();
  }
  int64_t slots(const HeldState& s) {
    int64_t value = 0;
    FUZZ_OK(lla_state_query(s.state, LLA_STATE_SLOTS, 0, &value, &error));
    return value;
  }
  // The bytes of every slot, and what is free.
  std::vector<char> fingerprint(const HeldState& s) {
    std::vector<char> all;
    for (int64_t slot = 0, n = slots(s); slot < n; ++slot) {
      size_t bytes = 0;
      FUZZ_OK(lla_state_export_size(s.state, slot, &bytes, &error));
      const Block image(bytes);
      FUZZ_OK(lla_state_pack(s.state, slot, image.data(), bytes, nullptr, &error));
      all.insert(all.end(), image.data(), image.data() + bytes);
    }
    int64_t free = 0;
    FUZZ_OK(lla_state_query(s.state, LLA_STATE_FREE_NODE_BLOCKS, 0, &free, &error));
    all.push_back(static_cast<char>(free));
    return all;
  }

  // ---- batches ----------------------------------------------------------------------------------------------------------
  void make_batch(HeldBatch& b) {
    Held* const h = held[in.calm ? 0 : pick(kContexts)];
    if (b.batch || !h) return;
    b.limits = LLA_BATCH_LIMITS_INIT;
    b.limits.max_sequences = in.calm ? 4 : in.below(5);
    b.limits.max_rows = in.calm ? 24 : in.below(30);
    b.limits.max_length = in.one_in(2) ? 1 + in.below(100) : 0;
    b.limits.max_snapshots = in.below(3);
    if (in.one_in(10)) {
      int64_t* fields[] = {&b.limits.max_sequences, &b.limits.max_rows, &b.limits.max_rows_per_sequence,
                           &b.limits.max_length, &b.limits.max_snapshots};
      *fields[in.below(5)] = in.number();
    }
    size_t bytes = 0, alignment = 0;
    if (FUZZ_CALL(lla_batch_size(h->context, &b.limits, &bytes, &alignment, &error)) != LLA_OK || bytes > size_t{kMostBytes})
      return;
    PROMISE(alignment >= 1 && alignment <= 64);
    b.memory = std::make_unique<Block>(bytes);
    const size_t given = in.one_in(20) ? in.below(200) : bytes;
    const lla_status status = FUZZ_CALL(lla_batch_init(h->context, &b.limits, b.memory->data() + (in.one_in(30) ? 8 : 0),
                                                       std::min(given, bytes), &b.batch, &error));
    PROMISE((status == LLA_OK) == (b.batch != nullptr));
    if (status == LLA_OK) b.context = lla_context_retain(h->context);
    b.state = b.gradient = -1;
    b.rows = 0;
  }
  void drop_batch(HeldBatch& b) {
    lla_batch_discard(b.batch);
    lla_context_release(b.context);
    b = HeldBatch();
  }
  void plan(HeldBatch& b) {
    if (!b.batch) return;
    const int which = in.one_in(3) ? -1 : static_cast<int>(pick(kStates));
    lla_state* state = which >= 0 ? states[which].state : nullptr;
    lla_rows rows = LLA_ROWS_INIT;
    rows.sequences = std::min<int64_t>(in.below(5), in.one_in(9) ? 4 : b.limits.max_sequences);
    const auto n = static_cast<size_t>(std::max<int64_t>(rows.sequences, 0));
    std::vector<int64_t> offsets{0}, in_slots, out_slots, initial, final;
    for (size_t i = 0; i < n; ++i) {
      offsets.push_back(offsets.back() + in.below(9));
      in_slots.push_back(in.one_in(6) ? -1 : in.below(4));
      out_slots.push_back(in.one_in(4) ? in.below(4) : in_slots.back());
      initial.push_back(in.below(3) - 1);
      final.push_back(in.below(3) - 1);
    }
    const fuzz::Numbers a_offsets(offsets, in.one_in(2)), a_in(in_slots, in.one_in(2)), a_out(out_slots, false),
        a_initial(initial, true), a_final(final, false);
    if (in.one_in(2))
      rows.offsets = a_offsets.index();
    else
      rows.rows_per_sequence = in.below(9);
    if (in.one_in(3)) rows.total_rows = in.below(30);
    if (state && !in.one_in(4)) rows.slot_in = a_in.index();
    if (state && in.one_in(3)) rows.slot_out = a_out.index();
    int gradient = -1;
    if (state && in.one_in(5)) {
      gradient = static_cast<int>(pick(kStates));
      rows.gradient_state = states[gradient].state;
      rows.initial_gradient_slots = a_initial.index();
      rows.final_gradient_slots = a_final.index();
    }
    const int64_t end = rows.offsets.data ? offsets.back() : rows.sequences * rows.rows_per_sequence;
    if (b.state >= 0 && states[b.state].state) {  // planning drops the old plan first; what is then must stay if it fails
      lla_batch_discard(b.batch);
    }
    const bool look = state && in.one_in(4);
    const std::vector<char> before = look ? fingerprint(states[which]) : std::vector<char>();
    const lla_status status = FUZZ_CALL(lla_batch_plan(b.batch, state, &rows, nullptr, &error));
    if (look && status != LLA_OK) PROMISE(fingerprint(states[which]) == before);
    b.state = b.gradient = -1;
    b.rows = 0;
    if (status != LLA_OK) return;
    b.state = state ? which : -1;
    b.gradient = gradient;
    b.rows = rows.total_rows ? rows.total_rows : end;
  }

  // ---- calls ------------------------------------------------------------------------------------------------------------
  // A step as a server makes it: plan, forward of every layer, commit.
  void serve(HeldBatch& b) {
    plan(b);
    if (b.state < 0) return;
    for (size_t i = 0; i < states[b.state].layers.size(); ++i) compute(b, false, static_cast<int64_t>(i));
    commit(b);
  }
  // Of one layer, of any if it is not given.
  void compute(HeldBatch& b, bool backward, int64_t layer_index = -1) {
    if (!b.batch) return;
    HeldLayer alone = layers[pick(kLayers)];
    if (b.state >= 0 && !in.one_in(8)) {
      const HeldState& s = states[b.state];
      if (layer_index < 0) layer_index = pick(static_cast<int64_t>(s.layers.size()));
      alone.layer = s.layers[static_cast<size_t>(layer_index)];
      alone.desc = s.descs[static_cast<size_t>(layer_index)];
    }
    if (!alone.layer) return;
    layer_index = std::max<int64_t>(layer_index, 0);
    const lla_pass pass = backward ? LLA_PASS_BACKWARD : LLA_PASS_FORWARD;
    size_t bytes = 0, saved_bytes = 0, alignment = 0;
    if (FUZZ_CALL(lla_layer_workspace(alone.layer, &b.limits, pass, &bytes, &alignment, &error)) != LLA_OK) return;
    if (FUZZ_CALL(lla_layer_saved_size(alone.layer, &b.limits, &saved_bytes, nullptr, &error)) != LLA_OK) return;
    if (bytes > size_t{kMostBytes} || saved_bytes > size_t{kMostBytes}) return;
    static constexpr lla_dtype kTypes[] = {LLA_F32, LLA_F32, LLA_F32, LLA_BF16, LLA_F16, LLA_F64};
    const fuzz::Shapes shapes = fuzz::shapes_of(alone.desc, b.rows);
    Bindings io, weights, outputs, gradients;
    const lla_dtype common = kTypes[in.below(6)];
    for (size_t i = 0; i < shapes.all.size(); ++i) {
      const fuzz::Shape& shape = shapes.all[i];
      if (shape.optional && in.one_in(2)) continue;
      const lla_dtype dtype = in.one_in(12) ? kTypes[in.below(6)] : common;
      const bool output = i >= shapes.outputs && i < shapes.weights;
      Bindings& where = i >= shapes.weights ? weights : output && backward ? outputs : io;
      if (!where.add(in, shape, dtype)) return;
      if (backward && !output && !in.one_in(4)) {
        if (!gradients.add(in, shape, in.one_in(12) ? kTypes[in.below(6)] : dtype, in.one_in(4) ? LLA_ACCUMULATE : 0))
          return;
      }
    }
    if (in.one_in(4)) {
      Bindings* lists[] = {&io, &weights, &outputs, &gradients};
      lists[in.below(4)]->spoil(in);
    }
    const Block workspace(bytes + 64), saved(saved_bytes);
    const bool with_saved = saved_bytes > 0 && !backward && in.one_in(2);
    const auto arguments = [&](auto a) {
      a.batch = b.batch;
      a.state = b.state >= 0 && !in.one_in(30) ? states[b.state].state : nullptr;
      a.layer_index = in.one_in(30) ? in.number() : layer_index;
      a.io = io.data();
      a.io_count = io.size();
      a.weights = weights.data();
      a.weight_count = weights.size();
      a.workspace = workspace.data() + 64 - (in.one_in(30) ? 8 : 0);
      a.workspace_bytes = in.one_in(20) ? bytes - std::min<size_t>(bytes, 1 + in.below(9)) : bytes;
      if (with_saved) {
        a.saved = saved.data();
        a.saved_bytes = saved_bytes - (in.one_in(20) ? 1 : 0);
      }
      return a;
    };
    const auto before_io = io.contents(), before_gradients = gradients.contents();
    const std::vector<char> before = b.state >= 0 && in.one_in(4) ? fingerprint(states[b.state]) : std::vector<char>();
    lla_status status;
    lla_tasks* tasks = nullptr;
    const bool by_tasks = in.one_in(4);
    if (!backward) {
      const lla_forward_args a = arguments(lla_forward_args LLA_FORWARD_ARGS_INIT);
      status = by_tasks ? FUZZ_CALL(lla_layer_forward_tasks(alone.layer, &a, &tasks, &error))
                        : FUZZ_CALL(lla_layer_forward(alone.layer, &a, &error));
    } else {
      lla_backward_args a = arguments(lla_backward_args LLA_BACKWARD_ARGS_INIT);
      a.outputs = outputs.data();
      a.output_count = outputs.size();
      a.gradients = gradients.data();
      a.gradient_count = gradients.size();
      status = by_tasks ? FUZZ_CALL(lla_layer_backward_tasks(alone.layer, &a, &tasks, &error))
                        : FUZZ_CALL(lla_layer_backward(alone.layer, &a, &error));
    }
    PROMISE(!by_tasks || (status == LLA_OK) == (tasks != nullptr));
    if (status != LLA_OK && status != LLA_THREADS_FAILED)
      PROMISE(io.contents() == before_io && gradients.contents() == before_gradients);
    for (int64_t phase = 0; phase < lla_tasks_phases(tasks); ++phase) {
      for (int64_t i = lla_tasks_count(tasks, phase); i >= -1; --i) lla_tasks_run(tasks, phase, i, 0);
      lla_tasks_run(tasks, phase, 0, in.one_in(2) ? -1 : INT32_MAX);
    }
    if (!before.empty()) PROMISE(fingerprint(states[b.state]) == before);
  }
  void commit(HeldBatch& b) {
    if (!b.batch || b.state < 0) return;
    std::vector<int64_t> accepted;
    for (int64_t i = 0; i < std::clamp<int64_t>(b.limits.max_sequences, 0, 100); ++i) accepted.push_back(in.index(6));
    const fuzz::Numbers given(accepted, in.one_in(2));
    const HeldState& s = states[in.one_in(9) ? pick(kStates) : b.state];
    if (!s.state) return;
    const std::vector<char> before = fingerprint(s);
    const lla_status status =
        FUZZ_CALL(lla_state_commit(s.state, b.batch, in.one_in(2) ? given.index() : lla_index{}, nullptr, &error));
    if (status != LLA_OK) PROMISE(fingerprint(s) == before);
    int64_t released = 0;
    (void)FUZZ_CALL(lla_state_settle(s.state, b.batch, {nullptr, 0, 0}, &released, &error));
  }
  void append() {
    const HeldLayer& l = layers[pick(kLayers)];
    const HeldState& s = states[pick(kStates)];
    if (!l.layer || !s.state) return;
    const fuzz::Shapes shapes = fuzz::shapes_of(l.desc, in.below(20));
    Bindings io, weights;
    for (size_t i = 0; i < shapes.all.size(); ++i) {
      if (!(i >= shapes.weights ? weights : io).add(in, shapes.all[i], LLA_F32)) return;
    }
    if (in.one_in(4)) (in.one_in(2) ? io : weights).spoil(in);
    const std::vector<char> before = fingerprint(s);
    const fuzz::ShortOfMemory shortage(l.held->meter, in);
    const lla_status status = FUZZ_CALL(lla_append(l.layer, s.state, in.index(slots(s)), io.data(), io.size(),
                                                   weights.data(), weights.size(), nullptr, &error));
    if (status != LLA_OK) PROMISE(fingerprint(s) == before);
  }

  // ---- contents of states -----------------------------------------------------------------------------------------------
  void slots_call(const HeldState& s) {
    const int64_t n = slots(s);
    std::vector<int64_t> from, to;
    for (int64_t i = in.below(4); i > 0; --i) {
      from.push_back(in.index(n));
      to.push_back(in.one_in(3) ? in.number() : in.index(n));
    }
    const fuzz::Numbers a(from, in.one_in(2)), b(to, in.one_in(2));
    const auto count = static_cast<int64_t>(from.size());
    const std::vector<char> before = fingerprint(s);
    lla_status status;
    switch (in.below(3)) {
      case 0:
        status = FUZZ_CALL(lla_state_reset(s.state, a.index(), in.one_in(20) ? -1 : count,
                                           in.one_in(2) ? b.index() : lla_index{}, nullptr, &error));
        break;
      case 1:
        status = FUZZ_CALL(lla_state_fork(s.state, a.index(), b.index(), in.one_in(20) ? -1 : count, nullptr, &error));
        break;
      default: {
        int64_t at = 0, slot = in.index(n);
        (void)FUZZ_CALL(lla_state_length(s.state, slot, &at, &error));
        status =
            FUZZ_CALL(lla_state_truncate(s.state, slot, in.one_in(4) ? in.number() : at - in.below(6), nullptr, &error));
      }
    }
    if (status != LLA_OK) PROMISE(fingerprint(s) == before);
  }
  void contents_call(const HeldState& s) {
    const int64_t slot = in.index(slots(s));
    const int64_t layer_index = in.one_in(20) ? in.number() : pick(static_cast<int64_t>(s.layers.size()));
    const lla_layer_desc& d =
        s.descs[static_cast<size_t>(std::clamp<int64_t>(layer_index, 0, static_cast<int64_t>(s.descs.size()) - 1))];
    int64_t at = 0, grain = 1;
    FUZZ_OK(lla_state_query(s.state, LLA_STATE_GRAIN, 0, &grain, &error));
    (void)FUZZ_CALL(lla_state_length(s.state, slot, &at, &error));
    const int64_t rows = at % grain, h = d.heads, g = d.groups ? d.groups : h;
    const lla_state_part part =
        in.one_in(20) ? static_cast<lla_state_part>(in.number()) : static_cast<lla_state_part>(1 + in.below(8));
    fuzz::Shape shape{LLA_X, false, {h, d.key_dim, d.value_dim}};
    if (part == LLA_PART_NODE_DECAY) shape.dims = {h};
    if (part == LLA_PART_TAIL_K) shape.dims = {rows, g, d.key_dim};
    if (part == LLA_PART_TAIL_V) shape.dims = {rows, h, d.value_dim};
    if (part == LLA_PART_TAIL_GATE || part == LLA_PART_TAIL_WRITE) shape.dims = {rows, h};
    if (part == LLA_PART_CONV)
      shape.dims = {(d.conv_width ? d.conv_width : 4) - 1,
                    d.kind == LLA_LAYER_CONVOLUTION ? d.hidden : h * d.value_dim + 2 * g * d.key_dim};
    static constexpr lla_dtype kTypes[] = {LLA_F32, LLA_BF16, LLA_F16, LLA_F64};
    Bindings tensor;
    if (!tensor.add(in, shape, kTypes[in.below(4)])) return;
    if (in.one_in(5)) tensor.spoil(in);
    if (tensor.size() == 0) return;
    const lla_tensor& t = tensor.data()[0].tensor;
    for (int32_t i = 0; i < std::min(t.rank, LLA_MAX_RANK); ++i) {
      if (t.strides[i] < 0) return;  // nobody checks that a stride stays inside the memory
    }
    const std::vector<char> before = fingerprint(s);
    const int64_t index = in.one_in(3) ? in.number() : in.below(4);
    const bool writes = in.one_in(2);
    lla_status status;
    if (in.one_in(5))
      status = FUZZ_CALL(lla_state_import_linear(s.state, slot, layer_index, in.number(), &t,
                                                 static_cast<int32_t>(in.below(2)), nullptr, &error));
    else if (writes)
      status = FUZZ_CALL(lla_state_write(s.state, slot, layer_index, part, index, &t, nullptr, &error));
    else
      status = FUZZ_CALL(lla_state_read(s.state, slot, layer_index, part, index, &t, nullptr, &error));
    if (status != LLA_OK) PROMISE(fingerprint(s) == before);
  }
  void image_call(const HeldState& s) {
    const int64_t slot = in.index(slots(s));
    size_t bytes = 0;
    if (FUZZ_CALL(lla_state_export_size(s.state, slot, &bytes, &error)) != LLA_OK) return;
    const Block image(bytes);
    FUZZ_OK(lla_state_pack(s.state, slot, image.data(), bytes, nullptr, &error));
    FUZZ_OK(lla_state_seal(image.data(), bytes, nullptr, &error));
    FUZZ_OK(lla_state_check(image.data(), bytes, nullptr, nullptr, &error));
    const HeldState& target = states[pick(kStates)];
    if (!target.state) return;
    const std::vector<char> before = fingerprint(target);
    const size_t cut = in.one_in(4) ? in.byte() * bytes / 256 : bytes;
    const lla_status status =
        FUZZ_CALL(lla_state_unpack(target.state, in.index(slots(target)), image.data(), cut, nullptr, &error));
    if (status != LLA_OK) PROMISE(fingerprint(target) == before);
    PROMISE(cut == bytes || status != LLA_OK);
  }
  void query(const HeldState& s) {
    int64_t value = 0;
    for (int key = -1; key < 12; ++key) (void)FUZZ_CALL(lla_state_query(s.state, key, in.index(slots(s)), &value, &error));
    (void)FUZZ_CALL(lla_state_min_length(s.state, in.index(slots(s)), &value, &error));
  }

  void step() {
    HeldState& s = states[pick(kStates)];
    HeldBatch& b = batches[pick(kBatches)];
    switch (in.below(28)) {
      case 0:
        return make_context(static_cast<int>(pick(kContexts)));
      case 1:
        if (in.one_in(4)) return release_context(static_cast<int>(pick(kContexts)));
        return fuzz::device_calls(b.batch   ? b.context
                                  : held[0] ? held[0]->context
                                            : nullptr,
                                  b.batch, b.limits,
                                  in.left());  // no byte of its own: those behind keep their meaning
      case 2:
      case 3:
        return make_layer(layers[pick(kLayers)]);
      case 4: {
        HeldLayer& l = layers[pick(kLayers)];
        lla_layer_release(l.layer);
        l = HeldLayer();
        return;
      }
      case 5:
        return make_state(s);
      case 6:
        return in.one_in(3) ? release_state(static_cast<int>(&s - states)) : (void)0;
      case 7:
        return make_batch(b);
      case 8:
        return in.one_in(3) ? drop_batch(b) : lla_batch_discard(b.batch);
      case 9:
        return append();
      case 10:
      case 11:
      case 12:
        return plan(b);
      case 13:
      case 14:
      case 15:
        return compute(b, false);
      case 16:
        return compute(b, true);
      case 17:
      case 18:
        return commit(b);
      case 19:
        return s.state ? slots_call(s) : (void)0;
      case 20:
      case 21:
        return s.state ? contents_call(s) : (void)0;
      case 22:
        return s.state ? image_call(s) : (void)0;
      case 23:
      case 24:
      case 25:
      case 26:
        return serve(b);
      default:
        return s.state ? query(s) : (void)0;
    }
  }
  void run() {
    in.calm = !in.one_in(4);  // mostly something to work with
    for (int i = 0; i < kContexts; ++i) {
      if (i == 0 || !in.calm) make_context(i);
    }
    for (HeldLayer& l : layers) make_layer(l);
    make_state(states[0]);
    make_batch(batches[0]);
    in.calm = false;
    for (int steps = 0; steps < 80 && !in.empty(); ++steps) step();
    // What is planned must go before its states; the rest in any order.
    for (HeldBatch& b : batches) drop_batch(b);
    const bool contexts_first = in.one_in(2);
    for (int i = 0; i < kContexts && contexts_first; ++i) release_context(i);
    for (HeldLayer& l : layers) lla_layer_release(l.layer);
    for (int i = 0; i < kStates; ++i) release_state(i);
    for (int i = 0; i < kContexts; ++i) release_context(i);
    for (const auto& h : all) PROMISE(h->meter.outstanding == 0);
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Run(data, size).run();
  return 0;
}
