// SPDX-License-Identifier: Apache-2.0
// What a device that breaks does to a caller: a stand-in for one, in host memory, of which every single call fails in turn.
// And a process that was forked, to which no device belongs.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "capi/handles.h"
#include "core_testing.h"

using namespace core_testing;

namespace {

int64_t calls = 0, fail_at = -1;  // of functions that can fail
bool breaks() { return calls++ == fail_at; }
bool capturing = false;
const void* out_of_reach = nullptr;
int32_t result() { return breaks() ? LLA_DEVICE_ERROR : LLA_OK; }

const Plugin& device() {
  static const Plugin made = [] {
    Plugin p{};
    p.name = "stand-in";
    p.enter = [](int32_t, int32_t* previous) {
      *previous = 7;
      return result();
    };
    p.leave = [](int32_t previous) { EXPECT_EQ(previous, 7); };
    p.allocate = [](size_t bytes) -> void* { return breaks() ? nullptr : std::aligned_alloc(64, (bytes + 64) / 64 * 64); };
    p.release = [](void* memory) { std::free(memory); };
    p.copy = [](void* to, const void* from, size_t bytes, void*) {
      const int32_t status = result();
      if (bytes) std::memcpy(to, from, status == LLA_OK ? bytes : bytes / 2);  // it breaks half-way
      return status;
    };
    p.upload = p.copy;
    p.clear = [](void* at, size_t bytes, void*) {
      const int32_t status = result();
      if (status == LLA_OK && bytes) std::memset(at, 0, bytes);
      return status;
    };
    p.wait = [](void*) { return result(); };
    p.is_capturing = [](void*) { return capturing; };
    p.reaches = [](const void* memory) { return memory != out_of_reach; };
    p.put_records = [](SlotImage* records, const int32_t* slots, const SlotImage* images, int64_t count, void*) {
      const int32_t status = result();
      for (int64_t i = 0; status == LLA_OK && i < count; ++i) records[slots[i]] = images[i];
      return status;
    };
    p.describe_error = [](char* text, size_t capacity) { std::snprintf(text, capacity, "it broke"); };
    return p;
  }();
  return made;
}

// The kernels of the reference backend as ones that are launched: each runs at once, whole.
constexpr size_t kMostKernels = 32;
template <size_t kNumber>
int32_t launch(const void* problem, const Limits& limits, char* scratch, void*) {
  if (breaks()) return LLA_DEVICE_ERROR;
  const Kernel& kernel = reference_backend().kernels[kNumber];
  Need need;
  kernel.measure(problem, limits, &need);
  std::vector<char> own(static_cast<size_t>(need.per_thread) + 1);
  for (int32_t phase = 0; phase < kernel.phases(problem); ++phase) {
    for (int64_t task = 0; task < kernel.tasks(problem, phase); ++task)
      kernel.run(problem, limits, {scratch, own.data()}, phase, task);
  }
  return LLA_OK;
}
template <size_t... kNumbers>
const Backend& backend(std::index_sequence<kNumbers...>) {
  static const auto kernels = [] {
    std::vector<Kernel> made(reference_backend().kernels, reference_backend().kernels + reference_backend().kernel_count);
    decltype(&launch<0>) launches[] = {&launch<kNumbers>...};
    EXPECT_LE(made.size(), kMostKernels);
    for (size_t i = 0; i < made.size(); ++i) made[i].launch = launches[i];
    return made;
  }();
  static const Backend made = {"stand-in", "none", LLA_F32, kernels.data(), static_cast<int64_t>(kernels.size())};
  return made;
}

// A context whose device is the stand-in.
ContextPointer context_of_device() {
  ContextPointer context = reference_context();
  context->backend = &backend(std::make_index_sequence<kMostKernels>());
  context->device = &device();
  context->process = static_cast<int32_t>(getpid());
  return context;
}

constexpr int64_t kRows = 70, kHeads = 1, kWidth = 4;  // a chunk and a tail

// The life of a state on the device: calls that can fail, in their order, and what comes out.
struct Life {
  ContextPointer owner = context_of_device();
  lla_context* context = capi::wrap(owner.get());
  lla_layer* layer = nullptr;
  lla_state* state = nullptr;
  lla_batch* batch = nullptr;
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  lla_rows rows = LLA_ROWS_INIT;
  std::unique_ptr<void, decltype(&std::free)> batch_memory{nullptr, &std::free}, workspace{nullptr, &std::free};
  void* plan_memory = nullptr;
  size_t plan_bytes = 0, workspace_bytes = 0;
  std::vector<float> x, y;
  std::vector<char> image;
  const std::vector<int64_t> zero = {0}, one = {1};

  Life() {
    for (int64_t i = 0; i < kRows * kHeads * kWidth; ++i) x.push_back(static_cast<float>(i * 31 % 101) / 300);
    y.resize(x.size());
    limits.max_sequences = 1;
    limits.max_rows = kRows;
    rows.sequences = 1;
    rows.rows_per_sequence = kRows;
  }
  ~Life() {
    lla_batch_discard(batch);
    lla_state_release(state);
    lla_layer_release(layer);
    lla_device_release(context, plan_memory, plan_bytes);
  }
  lla_binding bind(lla_role role, std::vector<float>& data) {
    return lla_bind(role, lla_tensor_of(data.data(), LLA_F32, kRows, kHeads, kWidth, -1));
  }
  lla_status forward(lla_error* error) {
    const lla_binding io[] = {bind(LLA_Q, x), bind(LLA_K, x), bind(LLA_V, x), bind(LLA_Y, y)};
    lla_forward_args call = LLA_FORWARD_ARGS_INIT;
    call.batch = batch;
    call.state = state;
    call.io = io;
    call.io_count = 4;
    call.workspace = workspace.get();
    call.workspace_bytes = workspace_bytes;
    return lla_layer_forward(layer, &call, error);
  }
  void prepare_host() {
    lla_layer_desc d = LLA_LAYER_DESC_INIT;
    d.kind = LLA_LAYER_MIXER;
    d.mixer = LLA_DELTA_RULE;
    d.heads = kHeads;
    d.key_dim = d.value_dim = kWidth;
    Error error;
    ASSERT_EQ(lla_layer_create(context, &d, &layer, &error), LLA_OK) << error.text;
    size_t bytes = 0;
    ASSERT_EQ(lla_batch_size(context, &limits, &bytes, nullptr, &error), LLA_OK) << error.text;
    batch_memory.reset(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
    ASSERT_EQ(lla_batch_init(context, &limits, batch_memory.get(), bytes, &batch, &error), LLA_OK) << error.text;
    ASSERT_EQ(lla_batch_device_size(context, &limits, &plan_bytes, nullptr, &error), LLA_OK) << error.text;
    ASSERT_EQ(lla_layer_workspace(layer, &limits, LLA_PASS_FORWARD, &workspace_bytes, nullptr, &error), LLA_OK)
        << error.text;
    workspace.reset(std::aligned_alloc(64, (workspace_bytes + 64) / 64 * 64));
  }
  using Call = std::function<lla_status(lla_error*)>;
  std::vector<std::pair<const char*, Call>> steps() {
    lla_state_desc description = LLA_STATE_DESC_INIT;
    description.slots = 2;
    const lla_index none{};
    return {
        {"device_allocate", [this](lla_error* e) { return lla_device_allocate(context, plan_bytes, &plan_memory, e); }},
        {"bind_device", [this](lla_error* e) { return lla_batch_bind_device(batch, plan_memory, plan_bytes, e); }},
        {"state_create",
         [this, description](lla_error* e) { return lla_state_create(&layer, 1, &description, nullptr, 0, &state, e); }},
        {"plan", [this](lla_error* e) { return lla_batch_plan(batch, state, &rows, nullptr, e); }},
        {"forward", [this](lla_error* e) { return forward(e); }},
        {"collect", [this](lla_error* e) { return lla_batch_collect(batch, nullptr, e); }},
        {"commit", [this, none](lla_error* e) { return lla_state_commit(state, batch, none, nullptr, e); }},
        {"fork", [this](lla_error* e) { return lla_state_fork(state, index_of(zero), index_of(one), 1, nullptr, e); }},
        {"truncate", [this](lla_error* e) { return lla_state_truncate(state, 1, kRows - 2, nullptr, e); }},
        {"pack",
         [this](lla_error* e) {
           size_t bytes = 0;
           const lla_status status = lla_state_export_size(state, 0, &bytes, e);
           image.resize(bytes);
           return status == LLA_OK ? lla_state_pack(state, 0, image.data(), bytes, nullptr, e) : status;
         }},
        {"reset", [this, none](lla_error* e) { return lla_state_reset(state, index_of(zero), 1, none, nullptr, e); }},
        {"unpack",
         [this](lla_error* e) {
           const char tag[LLA_TAG_SIZE] = {};
           const lla_status status = lla_state_seal(image.data(), image.size(), tag, e);
           return status == LLA_OK ? lla_state_unpack(state, 0, image.data(), image.size(), nullptr, e) : status;
         }},
        {"copy", [this](lla_error* e) { return lla_device_copy(context, y.data(), y.data(), 4, nullptr, e); }},
        {"wait", [this](lla_error* e) { return lla_device_wait(context, nullptr, e); }},
    };
  }
};

TEST(DeviceErrors, EveryCallThatFailsIsToldAndMayBeRepeated) {
  std::vector<float> expected;
  std::vector<char> image;
  int64_t count = 0;
  for (int64_t at = -1; at < count || at < 0; ++at) {
    Life life;
    fail_at = -1;
    life.prepare_host();
    calls = 0;
    fail_at = at;
    int failures = 0;
    for (const auto& [name, call] : life.steps()) {
      Error error;
      lla_status status = call(&error);
      if (status != LLA_OK) {
        ++failures;
        EXPECT_TRUE(status == LLA_DEVICE_ERROR || status == LLA_OUT_OF_DEVICE_MEMORY) << name << " " << status;
        EXPECT_EQ(error.code, status) << name;
        EXPECT_NE(std::strstr(error.text, status == LLA_DEVICE_ERROR ? "it broke" : "no memory"), nullptr) << error.text;
        fail_at = -1;
        status = call(&error);  // nothing was done by halves
      }
      ASSERT_EQ(status, LLA_OK) << name << " after call " << at << ": " << error.text;
    }
    EXPECT_EQ(failures, at < 0 ? 0 : 1) << "call " << at;
    fail_at = -1;
    if (at < 0) {
      count = calls;
      expected = life.y;
      image = life.image;
      EXPECT_GT(count, 20);
    }
    EXPECT_EQ(life.y, expected) << at;
    EXPECT_EQ(life.image, image) << at;
  }
}

// A stream that is captured: what waits for it is told so and does nothing, all else goes on.
TEST(DeviceErrors, WhatWaitsIsNotCaptured) {
  const std::vector<std::string> waits = {"pack", "unpack", "wait"};
  std::vector<float> expected;
  std::vector<char> image;
  for (const bool captures : {false, true}) {
    Life life;
    fail_at = -1;
    life.prepare_host();
    for (const auto& [name, call] : life.steps()) {
      capturing = captures;
      Error error;
      lla_status status = call(&error);
      if (captures && std::count(waits.begin(), waits.end(), name) > 0) {
        EXPECT_EQ(status, LLA_CAPTURE_UNSAFE) << name;
        EXPECT_EQ(error.code, status) << name;
        EXPECT_NE(std::strstr(error.text, "stream"), nullptr) << error.text;
        capturing = false;
        status = call(&error);
      }
      ASSERT_EQ(status, LLA_OK) << name << ": " << error.text;
    }
    const lla_binding io[] = {life.bind(LLA_Q, life.x), life.bind(LLA_K, life.x), life.bind(LLA_V, life.x),
                              life.bind(LLA_Y, life.y)};
    Error error;
    int64_t before = 0, after = 0;
    ASSERT_EQ(lla_state_length(life.state, 1, &before, &error), LLA_OK) << error.text;
    capturing = captures;
    const std::vector<float> untouched = life.y;
    if (captures) {
      const int64_t calls_before = calls;
      EXPECT_EQ(lla_append(life.layer, life.state, 1, io, 4, nullptr, 0, nullptr, &error), LLA_CAPTURE_UNSAFE);
      EXPECT_EQ(calls, calls_before + 1);  // it entered the device, and asked nothing more of it
      EXPECT_EQ(life.y, untouched);
      out_of_reach = life.x.data();
      EXPECT_EQ(lla_device_copy(life.context, life.y.data(), life.x.data(), 4, nullptr, &error), LLA_CAPTURE_UNSAFE);
      EXPECT_EQ(life.y, untouched);
      out_of_reach = nullptr;
      EXPECT_EQ(lla_state_length(life.state, 1, &after, &error), LLA_OK) << error.text;
      EXPECT_EQ(after, before);
    }
    capturing = false;
    EXPECT_EQ(lla_append(life.layer, life.state, 1, io, 4, nullptr, 0, nullptr, &error), LLA_OK) << error.text;
    if (!captures) {
      expected = life.y;
      image = life.image;
    }
    EXPECT_EQ(life.y, expected);
    EXPECT_EQ(life.image, image);
  }
}

// What is refused before the device is asked, because its stream is captured or the host has no memory for copies, leaves
// slots, blocks, records and the caller's buffers as they were.
TEST(DeviceErrors, ARefusalChangesNothing) {
  enum class Past { Shared, Empty };  // slots that share nodes and have rows; slots at a position with nothing before it
  for (const Past past : {Past::Shared, Past::Empty}) {
    Life life;
    fail_at = -1;
    life.prepare_host();
    for (const auto& [name, call] : life.steps()) {
      Error error;
      ASSERT_EQ(call(&error), LLA_OK) << name << ": " << error.text;
    }
    Error error;
    const std::vector<int64_t> slots = {0, 1}, positions = {64, 66};
    if (past == Past::Shared)
      ASSERT_EQ(lla_state_fork(life.state, index_of(life.one), index_of(life.zero), 1, nullptr, &error), LLA_OK);
    else
      ASSERT_EQ(lla_state_reset(life.state, index_of(slots), 2, index_of(positions), nullptr, &error), LLA_OK);

    State& state = *capi::unwrap(life.state)->state;
    const auto facts = [&] {
      std::vector<int64_t> all = {query(state, LLA_STATE_FREE_NODE_BLOCKS)};
      for (int64_t slot = 0; slot < 2; ++slot) {
        all.insert(all.end(), {query(state, LLA_STATE_SLOT_NODES, slot), state.record(slot).image.position,
                               state.min_length(slot), static_cast<int64_t>(state.record(slot).version)});
        size_t bytes = 0;
        EXPECT_EQ(lla_state_export_size(life.state, slot, &bytes, nullptr), LLA_OK);
        std::vector<char> packed(bytes);
        EXPECT_EQ(lla_state_pack(life.state, slot, packed.data(), bytes, nullptr, nullptr), LLA_OK);
        all.insert(all.end(), packed.begin(), packed.end());
      }
      return all;
    };
    const std::vector<int64_t> before = facts();

    std::vector<float> node(kHeads * kWidth * kWidth, 3), rows(6 * kHeads * kWidth, 3);
    const std::vector<float> node_given = node, rows_given = rows;
    std::vector<char> buffer(life.image.size() * 2, 7);
    const std::vector<char> buffer_given = buffer;
    const lla_tensor matrix = lla_tensor_of(node.data(), LLA_F32, kHeads, kWidth, kWidth, -1);
    const int64_t tail = state.record(1).image.position - 64;
    const lla_tensor keys = lla_tensor_of(rows.data(), LLA_F32, tail, kHeads, kWidth, -1);
    lla_state* const slots_of = life.state;
    const auto read = [&](int64_t slot, lla_state_part part, const lla_tensor& to) {
      return [=](lla_error* e) { return lla_state_read(slots_of, slot, 0, part, 0, &to, nullptr, e); };
    };
    const auto write = [&](int64_t slot, lla_state_part part, const lla_tensor& from) {
      return [=](lla_error* e) { return lla_state_write(slots_of, slot, 0, part, 0, &from, nullptr, e); };
    };
    const auto import = [&](int64_t slot, int64_t position, int32_t reset) {
      return [=](lla_error* e) { return lla_state_import_linear(slots_of, slot, 0, position, &matrix, reset, nullptr, e); };
    };
    const std::vector<std::pair<std::string, Life::Call>> refused = {
        {"read a node", read(0, LLA_PART_ABSORBED, matrix)},
        {"read rows", read(1, LLA_PART_TAIL_K, keys)},
        {"write a node", write(0, LLA_PART_ABSORBED, matrix)},
        {"write rows", write(1, LLA_PART_TAIL_K, keys)},
        {"import", import(1, 128, 1)},
        {"import on top", import(0, state.record(0).image.position, 0)},
        {"pack", [&](lla_error* e) { return lla_state_pack(slots_of, 1, buffer.data(), buffer.size(), nullptr, e); }},
        {"unpack",
         [&](lla_error* e) { return lla_state_unpack(slots_of, 1, life.image.data(), life.image.size(), nullptr, e); }},
    };
    for (const auto& [name, call] : refused) {
      capturing = true;
      EXPECT_EQ(call(&error), LLA_CAPTURE_UNSAFE) << name;
      capturing = false;
      EXPECT_EQ(facts(), before) << name << " of a captured stream";
      const auto allocate = life.owner->allocator.allocate;
      life.owner->allocator.allocate = [](size_t, size_t, void*) -> void* { return nullptr; };
      const lla_status status = call(&error);
      life.owner->allocator.allocate = allocate;
      EXPECT_TRUE(status == LLA_OUT_OF_MEMORY || (name == "read a node" && past == Past::Empty)) << name << " " << status;
      EXPECT_EQ(facts(), before) << name << " without memory";
      if (status == LLA_OUT_OF_MEMORY) {
        EXPECT_TRUE(node == node_given && rows == rows_given && buffer == buffer_given) << name;
      }
      node = node_given;
    }
    for (const auto& [name, call] : refused) EXPECT_EQ(call(&error), LLA_OK) << name << ": " << error.text;
  }
}

// A fork that breaks half-way: no slot holds a mixture. Sources are as they were; a target is, too, or is empty.
TEST(DeviceErrors, AForkThatBreaksLeavesNoMixture) {
  for (int64_t at = 0, failures = 0;; ++at) {
    Life life;
    fail_at = -1;
    life.prepare_host();
    Error error;
    for (const auto& [name, call] : life.steps()) ASSERT_EQ(call(&error), LLA_OK) << name << ": " << error.text;
    State& state = *capi::unwrap(life.state)->state;
    const auto pack = [&](int64_t slot) {
      size_t bytes = 0;
      EXPECT_EQ(lla_state_export_size(life.state, slot, &bytes, nullptr), LLA_OK);
      std::vector<char> packed(bytes);
      EXPECT_EQ(lla_state_pack(life.state, slot, packed.data(), bytes, nullptr, nullptr), LLA_OK);
      return packed;
    };
    const std::vector<char> source = pack(0), target = pack(1);
    ASSERT_NE(source, target);
    const uint64_t version = state.record(1).version;
    const auto fork = [&] {
      return lla_state_fork(life.state, index_of(life.zero), index_of(life.one), 1, nullptr, &error);
    };
    calls = 0;
    fail_at = at;
    const lla_status status = fork();
    fail_at = -1;
    EXPECT_EQ(pack(0), source);
    if (status == LLA_OK) {
      EXPECT_EQ(pack(1), source);
      EXPECT_GE(failures, 2);  // entering the device, and the copy
      break;
    }
    ++failures;
    EXPECT_EQ(status, LLA_DEVICE_ERROR);
    if (state.record(1).holds_nothing())
      EXPECT_NE(state.record(1).version, version);
    else
      EXPECT_EQ(pack(1), target);
    EXPECT_EQ(fork(), LLA_OK) << error.text;
    EXPECT_EQ(pack(1), source);
  }
}

// A size that cannot be is refused without a word in the caller's number.
TEST(DeviceErrors, ARefusedSizeIsNotWritten) {
  Life life;
  fail_at = -1;
  lla_batch_limits limits = life.limits;
  limits.max_sequences = INT64_MAX / 2;
  size_t bytes = 77, alignment = 78;
  Error error;
  EXPECT_EQ(lla_batch_size(life.context, &limits, &bytes, &alignment, &error), LLA_SIZE_OVERFLOW);
  EXPECT_EQ(lla_batch_device_size(life.context, &limits, &bytes, &alignment, &error), LLA_SIZE_OVERFLOW);
  EXPECT_EQ(bytes, 77u);
  EXPECT_EQ(alignment, 78u);
}

// Which memory is short is told apart, and the slot is as it was.
TEST(DeviceErrors, AppendNamesTheMemoryThatIsShort) {
  Life life;
  fail_at = -1;
  life.prepare_host();
  Error error;
  for (const auto& [name, call] : life.steps()) ASSERT_EQ(call(&error), LLA_OK) << name << ": " << error.text;
  const lla_binding io[] = {life.bind(LLA_Q, life.x), life.bind(LLA_K, life.x), life.bind(LLA_V, life.x),
                            life.bind(LLA_Y, life.y)};
  const auto append = [&] { return lla_append(life.layer, life.state, 1, io, 4, nullptr, 0, nullptr, &error); };
  int64_t before = 0, after = 0;
  ASSERT_EQ(lla_state_length(life.state, 1, &before, &error), LLA_OK) << error.text;
  const auto allocate = life.owner->allocator.allocate;
  life.owner->allocator.allocate = [](size_t, size_t, void*) -> void* { return nullptr; };
  EXPECT_EQ(append(), LLA_OUT_OF_MEMORY);
  life.owner->allocator.allocate = allocate;
  for (int64_t at = 1; at <= 2; ++at) {  // entering the device is the first call, plan and workspace are the next
    calls = 0;
    fail_at = at;
    EXPECT_EQ(append(), LLA_OUT_OF_DEVICE_MEMORY) << at;
    fail_at = -1;
  }
  ASSERT_EQ(lla_state_length(life.state, 1, &after, &error), LLA_OK) << error.text;
  EXPECT_EQ(after, before);
  EXPECT_EQ(append(), LLA_OK) << error.text;
}

TEST(DeviceErrors, AForkHasNoDevice) {
  Life life;
  fail_at = -1;
  life.prepare_host();
  const auto steps = life.steps();
  for (const auto& [name, call] : steps) {
    Error error;
    ASSERT_EQ(call(&error), LLA_OK) << name << ": " << error.text;
  }
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int wrong = 0;
    for (const auto& [name, call] : steps) {
      Error error;
      if (std::strcmp(name, "bind_device") == 0 || std::strcmp(name, "commit") == 0) continue;  // host alone; needs a plan
      const lla_status status = call(&error);
      if (status == LLA_FORKED && std::strstr(error.text, "fork")) continue;
      std::fprintf(stderr, "%s in a fork: %s (%s)\n", name, lla_status_name(status), error.text);
      ++wrong;
    }
    _exit(wrong);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
