// SPDX-License-Identifier: Apache-2.0
// On a device: a decode step that is captured once and replayed with other positions, borders and sequences, also planned
// and committed there with the host settling later; several streams and threads; the memory that a call takes. Needs a CUDA
// device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "lla/lla.h"
#include "needs_device.h"

namespace {

#define CALL(call)                                                                                    \
  do {                                                                                                \
    lla_error error = LLA_ERROR_INIT;                                                                 \
    const lla_status status_ = (call);                                                                \
    if (status_ != LLA_OK) FAIL() << #call << ": " << lla_status_name(status_) << ": " << error.text; \
  } while (0)

constexpr int64_t kHeads = 4, kGroups = 2, kKey = 32, kValue = 16, kSequences = 3, kPrefill = 100;

// A mixer with its state, batch and tensors [rows of all sequences] on the device.
struct Model {
  lla_context* context = nullptr;
  lla_layer* layer = nullptr;
  lla_state* state = nullptr;
  lla_batch* batch = nullptr;
  lla_batch_limits limits = LLA_BATCH_LIMITS_INIT;
  std::vector<std::vector<char>> batch_memory;
  std::vector<void*> device_memory;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  int64_t levels = 0, rows = 0;
  float *q = nullptr, *k = nullptr, *v = nullptr, *gate = nullptr, *write = nullptr, *lambda = nullptr, *y = nullptr;
  cudaStream_t stream = nullptr;

  void open(lla_mixer mixer, int64_t max_rows, int64_t length, bool replay) {
    rows = max_rows;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
    options.backend = LLA_BACKEND_CUDA;
    CALL(lla_context_create(&options, &context, &error));
    lla_layer_desc d = LLA_LAYER_DESC_INIT;
    d.kind = LLA_LAYER_MIXER;
    d.mixer = mixer;
    d.heads = kHeads;
    d.groups = kGroups;
    d.key_dim = kKey;
    d.value_dim = kValue;
    d.levels = levels = lla_levels_needed(length);
    d.lambda_form = LLA_LAMBDA_READY;
    d.write_form = LLA_WRITE_READY;
    CALL(lla_layer_create(context, &d, &layer, &error));
    lla_state_desc s = LLA_STATE_DESC_INIT;
    s.slots = kSequences;
    s.max_length = length;
    s.node_blocks = 400;
    CALL(lla_state_create(&layer, 1, &s, nullptr, 0, &state, &error));
    limits.max_sequences = kSequences;
    limits.max_rows = kSequences * max_rows;
    limits.max_rows_per_sequence = max_rows;
    limits.max_length = length;
    limits.replay = replay;
    add_batch();
    CALL(lla_layer_workspace(layer, &limits, LLA_PASS_FORWARD, &workspace_bytes, nullptr, &error));
    ASSERT_EQ(cudaMalloc(&workspace, workspace_bytes + 1), cudaSuccess);
    const int64_t n = kSequences * max_rows;
    for (auto [pointer, width] : {std::pair{&q, kGroups * kKey},
                                  {&k, kGroups * kKey},
                                  {&v, kHeads * kValue},
                                  {&gate, kHeads},
                                  {&write, kHeads},
                                  {&lambda, kHeads * levels},
                                  {&y, kHeads * kValue}}) {
      ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(pointer), static_cast<size_t>(n * width) * 4), cudaSuccess);
      ASSERT_EQ(cudaMemset(*pointer, 0xff, static_cast<size_t>(n * width) * 4), cudaSuccess);
    }
  }
  // Makes one more batch, which becomes the one that is used.
  void add_batch() {
    size_t bytes = 0, device_bytes = 0;
    CALL(lla_batch_size(context, &limits, &bytes, nullptr, &error));
    char* memory = batch_memory.emplace_back(bytes + 64).data();
    CALL(lla_batch_init(context, &limits, memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64, bytes, &batch,
                        &error));
    CALL(lla_batch_device_size(context, &limits, &device_bytes, nullptr, &error));
    ASSERT_EQ(cudaMalloc(&device_memory.emplace_back(), device_bytes), cudaSuccess);
    CALL(lla_batch_bind_device(batch, device_memory.back(), device_bytes, &error));
  }
  void close() {
    cudaStreamSynchronize(stream);
    lla_batch_discard(batch);
    lla_state_release(state);
    lla_layer_release(layer);
    lla_context_release(context);
    for (void* p : device_memory) cudaFree(p);
    for (void* p : {workspace, static_cast<void*>(q), static_cast<void*>(k), static_cast<void*>(v), static_cast<void*>(gate),
                    static_cast<void*>(write), static_cast<void*>(lambda), static_cast<void*>(y)})
      cudaFree(p);
    cudaStreamDestroy(stream);
  }
  void send(float* to, const std::vector<float>& from) {
    ASSERT_EQ(cudaMemcpyAsync(to, from.data(), from.size() * 4, cudaMemcpyHostToDevice, stream), cudaSuccess);
  }
  // Inputs of rows that do not depend on how the sequence is cut: seeded by sequence and position.
  void fill(const std::vector<int64_t>& positions, int64_t count) {
    std::vector<float> hq, hk, hv, hg, hw, hl;
    for (int64_t b = 0; b < kSequences; ++b) {
      for (int64_t r = 0; r < count; ++r) {
        std::mt19937 engine(static_cast<unsigned>(b * 1000003 + positions[static_cast<size_t>(b)] + r));
        std::normal_distribution<float> normal;
        std::uniform_real_distribution<float> uniform;
        for (int64_t i = 0; i < kGroups * kKey; ++i) hq.push_back(normal(engine));
        for (int64_t i = 0; i < kGroups * kKey; ++i) hk.push_back(normal(engine) * 0.17f);
        for (int64_t i = 0; i < kHeads * kValue; ++i) hv.push_back(normal(engine));
        for (int64_t i = 0; i < kHeads; ++i) hg.push_back(-0.05f * uniform(engine));
        for (int64_t i = 0; i < kHeads; ++i) hw.push_back(uniform(engine));
        for (int64_t i = 0; i < kHeads * levels; ++i) hl.push_back(uniform(engine));
      }
    }
    send(q, hq), send(k, hk), send(v, hv), send(gate, hg), send(write, hw), send(lambda, hl);
    cudaStreamSynchronize(stream);  // the vectors end here
  }
  void plan(int64_t count, const std::vector<int64_t>& slots) {
    lla_rows r = LLA_ROWS_INIT;
    r.sequences = kSequences;
    r.rows_per_sequence = count;
    r.slot_in = {slots.data(), LLA_I64, LLA_HOST};
    CALL(lla_batch_plan(batch, state, &r, stream, &error));
  }
  void forward(int64_t count) {
    const int64_t n = kSequences * count;
    const lla_binding io[] = {lla_bind(LLA_Q, lla_tensor_of(q, LLA_F32, n, kGroups, kKey, -1)),
                              lla_bind(LLA_K, lla_tensor_of(k, LLA_F32, n, kGroups, kKey, -1)),
                              lla_bind(LLA_V, lla_tensor_of(v, LLA_F32, n, kHeads, kValue, -1)),
                              lla_bind(LLA_GATE, lla_tensor_of(gate, LLA_F32, n, kHeads, -1, -1)),
                              lla_bind(LLA_WRITE, lla_tensor_of(write, LLA_F32, n, kHeads, -1, -1)),
                              lla_bind(LLA_LAMBDA, lla_tensor_of(lambda, LLA_F32, n, kHeads, levels, -1)),
                              lla_bind(LLA_Y, lla_tensor_of(y, LLA_F32, n, kHeads, kValue, -1))};
    lla_forward_args a = LLA_FORWARD_ARGS_INIT;
    a.batch = batch;
    a.state = state;
    a.io = io;
    a.io_count = 7;
    a.workspace = workspace;
    a.workspace_bytes = workspace_bytes;
    a.stream = stream;
    CALL(lla_layer_forward(layer, &a, &error));
  }
  void commit() { CALL(lla_state_commit(state, batch, {nullptr, 0, 0}, stream, &error)); }
  std::vector<float> outputs(int64_t count) {
    std::vector<float> host(static_cast<size_t>(kSequences * count * kHeads * kValue));
    cudaMemcpyAsync(host.data(), y, host.size() * 4, cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    return host;
  }
};

const std::vector<int64_t> kSlots{0, 1, 2};

using Device = NeedsDevice;

// A decode step captured at its first position, replayed 5000 times over borders and carries, one sequence resting at times:
// the same bits as steps that are launched.
TEST_F(Device, CapturedDecode) {
  for (const lla_mixer mixer : {LLA_SCALAR_GATE, LLA_DELTA_RULE}) {
    constexpr int64_t kSteps = 5000;
    Model plain, graph;
    plain.open(mixer, kPrefill, 8192, true);
    graph.open(mixer, kPrefill, 8192, true);
    if (HasFatalFailure()) return;
    std::vector<int64_t> positions(kSequences, 0);
    for (Model* m : {&plain, &graph}) {
      m->fill(positions, kPrefill);
      m->plan(kPrefill, kSlots);
      m->forward(kPrefill);
      m->commit();
    }
    for (int64_t& p : positions) p += kPrefill;
    if (HasFatalFailure()) return;
    cudaGraphExec_t executable = nullptr;
    for (int64_t step = 0; step < kSteps; ++step) {
      std::vector<int64_t> slots = kSlots;
      if (step % 7 == 3) slots[static_cast<size_t>(step % kSequences)] = -1;  // this one rests: padding
      for (Model* m : {&plain, &graph}) m->fill(positions, 1);
      plain.plan(1, slots);
      plain.forward(1);
      plain.commit();
      graph.plan(1, slots);
      if (!executable) {
        cudaGraph_t captured = nullptr;
        ASSERT_EQ(cudaStreamBeginCapture(graph.stream, cudaStreamCaptureModeGlobal), cudaSuccess);
        graph.forward(1);
        ASSERT_EQ(cudaStreamEndCapture(graph.stream, &captured), cudaSuccess);
        ASSERT_EQ(cudaGraphInstantiate(&executable, captured, 0), cudaSuccess);
        cudaGraphDestroy(captured);
      }
      ASSERT_EQ(cudaGraphLaunch(executable, graph.stream), cudaSuccess);
      graph.commit();
      if (HasFatalFailure()) return;
      if (step % 50 == 0 || step > kSteps - 10) {
        const std::vector<float> a = plain.outputs(1), b = graph.outputs(1);
        ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0) << "step " << step;
        for (const float x : a) ASSERT_TRUE(std::isfinite(x)) << "step " << step;
      }
      for (int64_t b = 0; b < kSequences; ++b) positions[static_cast<size_t>(b)] += slots[static_cast<size_t>(b)] >= 0;
    }
    cudaGraphExecDestroy(executable);
    plain.close();
    graph.close();
  }
}

// The same decode with drafts of one token that may be rejected: positions and accepted counts (and once the slots) lie on
// the device, which plans and commits; the host learns of a step when two more have been launched. One graph for each of the
// three batches that take turns.
TEST_F(Device, CapturedDecodeSettledLate) {
  constexpr int64_t kSteps = 5000, kRing = 3;
  for (const lla_mixer mixer : {LLA_SCALAR_GATE, LLA_DELTA_RULE}) {
    const bool slots_there = mixer == LLA_DELTA_RULE;
    struct Turn {
      lla_batch* batch = nullptr;
      cudaGraphExec_t executable = nullptr;
      cudaEvent_t committed = nullptr;
    } turns[kRing];
    struct Arrays {
      int64_t slots[kSequences], positions[kSequences];
      int32_t accepted[kSequences];
    };
    Arrays* there = nullptr;
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&there), sizeof(Arrays)), cudaSuccess);
    cudaStream_t side = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), cudaSuccess);
    Model plain, graph;
    plain.open(mixer, kPrefill, 8192, true);
    graph.open(mixer, kPrefill, 8192, true);
    if (HasFatalFailure()) return;
    std::vector<int64_t> positions(kSequences, 0);
    for (Model* m : {&plain, &graph}) {
      m->fill(positions, kPrefill);
      m->plan(kPrefill, kSlots);
      m->forward(kPrefill);
      m->commit();
    }
    for (int64_t& p : positions) p += kPrefill;
    for (int64_t i = 0; i < kRing; ++i) {
      if (i > 0) graph.add_batch();
      turns[i].batch = graph.batch;
      ASSERT_EQ(cudaEventCreateWithFlags(&turns[i].committed, cudaEventDisableTiming), cudaSuccess);
    }
    if (HasFatalFailure()) return;
    const auto settle = [&](Turn& turn) {
      ASSERT_EQ(cudaEventSynchronize(turn.committed), cudaSuccess);
      CALL(lla_batch_collect(turn.batch, side, &error));
      ASSERT_EQ(lla_batch_faults(turn.batch), 0u);
      CALL(lla_state_settle(graph.state, turn.batch, {nullptr, 0, 0}, nullptr, &error));
    };
    std::mt19937 engine(5);
    for (int64_t step = 0; step < kSteps; ++step) {
      Turn& turn = turns[step % kRing];
      Arrays arrays;
      for (int64_t b = 0; b < kSequences; ++b) {
        const bool rests = step % 7 == 3 && step % kSequences == b;
        arrays.slots[b] = rests ? -1 : b;
        arrays.positions[b] = positions[static_cast<size_t>(b)];
        arrays.accepted[b] = !rests && engine() % 8 != 0;
      }
      for (Model* m : {&plain, &graph}) m->fill(positions, 1);
      const std::vector<int64_t> slots(arrays.slots, arrays.slots + kSequences);
      plain.plan(1, slots);
      plain.forward(1);
      CALL(lla_state_commit(plain.state, plain.batch, {arrays.accepted, LLA_I32, LLA_HOST}, plain.stream, &error));

      if (step >= kRing) settle(turn);
      if (HasFatalFailure()) return;
      ASSERT_EQ(cudaMemcpyAsync(there, &arrays, sizeof arrays, cudaMemcpyHostToDevice, graph.stream), cudaSuccess);
      graph.batch = turn.batch;
      lla_rows r = LLA_ROWS_INIT;
      r.sequences = kSequences;
      r.rows_per_sequence = 1;
      if (slots_there)
        r.slot_in = {there->slots, LLA_I64, LLA_DEVICE};
      else
        r.slot_in = {arrays.slots, LLA_I64, LLA_HOST};
      r.expected_positions = {there->positions, LLA_I64, LLA_DEVICE};
      CALL(lla_batch_plan(graph.batch, graph.state, &r, graph.stream, &error));
      if (!turn.executable) {
        cudaGraph_t captured = nullptr;
        ASSERT_EQ(cudaStreamBeginCapture(graph.stream, cudaStreamCaptureModeGlobal), cudaSuccess);
        graph.forward(1);
        ASSERT_EQ(cudaStreamEndCapture(graph.stream, &captured), cudaSuccess);
        ASSERT_EQ(cudaGraphInstantiate(&turn.executable, captured, 0), cudaSuccess);
        cudaGraphDestroy(captured);
      }
      ASSERT_EQ(cudaGraphLaunch(turn.executable, graph.stream), cudaSuccess);
      CALL(lla_state_commit(graph.state, graph.batch, {there->accepted, LLA_I32, LLA_DEVICE}, graph.stream, &error));
      ASSERT_EQ(cudaEventRecord(turn.committed, graph.stream), cudaSuccess);
      if (step % 50 == 0 || step > kSteps - 10) {
        const std::vector<float> a = plain.outputs(1), b = graph.outputs(1);
        ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0) << "step " << step;
      }
      for (int64_t b = 0; b < kSequences; ++b) positions[static_cast<size_t>(b)] += arrays.accepted[b];
    }
    for (int64_t step = kSteps; step < kSteps + kRing; ++step) settle(turns[step % kRing]);
    if (HasFatalFailure()) return;
    for (int64_t slot = 0; slot < kSequences; ++slot) {
      std::vector<char> images[2];
      for (int i = 0; i < 2; ++i) {
        const Model& m = i == 0 ? plain : graph;
        int64_t length = 0;
        size_t bytes = 0;
        CALL(lla_state_length(m.state, slot, &length, &error));
        EXPECT_EQ(length, positions[static_cast<size_t>(slot)]);
        CALL(lla_state_export_size(m.state, slot, &bytes, &error));
        images[i].resize(bytes);
        CALL(lla_state_pack(m.state, slot, images[i].data(), bytes, m.stream, &error));
      }
      EXPECT_EQ(images[0], images[1]) << "slot " << slot;
    }
    for (Turn& turn : turns) {
      cudaGraphExecDestroy(turn.executable);
      cudaEventDestroy(turn.committed);
    }
    cudaFree(there);
    cudaStreamDestroy(side);
    plain.close();
    graph.close();
  }
}

// What waits for a stream that is captured says so and leaves the capture whole.
TEST_F(Device, WhatWaitsIsNotCaptured) {
  Model plain, graph;
  for (Model* m : {&plain, &graph}) {
    m->open(LLA_SCALAR_GATE, kPrefill, 512, true);
    if (HasFatalFailure()) return;
    m->fill({0, 0, 0}, kPrefill);
    m->plan(kPrefill, kSlots);
    m->forward(kPrefill);
    m->commit();
    m->fill({kPrefill, kPrefill, kPrefill}, 1);
    m->plan(1, kSlots);
  }
  plain.forward(1);
  plain.commit();
  size_t bytes = 0;
  CALL(lla_state_export_size(graph.state, 0, &bytes, &error));
  std::vector<char> image(bytes);
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(graph.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  graph.forward(1);
  const auto unsafe = [&](const char* call, lla_status status) { EXPECT_EQ(status, LLA_CAPTURE_UNSAFE) << call; };
  unsafe("wait", lla_device_wait(graph.context, graph.stream, nullptr));
  unsafe("pack", lla_state_pack(graph.state, 0, image.data(), bytes, graph.stream, nullptr));
  unsafe("copy", lla_device_copy(graph.context, image.data(), graph.y, 4, graph.stream, nullptr));
  const lla_binding io[] = {lla_bind(LLA_Q, lla_tensor_of(graph.q, LLA_F32, 1, kGroups, kKey, -1)),
                            lla_bind(LLA_K, lla_tensor_of(graph.k, LLA_F32, 1, kGroups, kKey, -1)),
                            lla_bind(LLA_V, lla_tensor_of(graph.v, LLA_F32, 1, kHeads, kValue, -1)),
                            lla_bind(LLA_GATE, lla_tensor_of(graph.gate, LLA_F32, 1, kHeads, -1, -1)),
                            lla_bind(LLA_WRITE, lla_tensor_of(graph.write, LLA_F32, 1, kHeads, -1, -1)),
                            lla_bind(LLA_LAMBDA, lla_tensor_of(graph.lambda, LLA_F32, 1, kHeads, graph.levels, -1)),
                            lla_bind(LLA_Y, lla_tensor_of(graph.y, LLA_F32, 1, kHeads, kValue, -1))};
  unsafe("append", lla_append(graph.layer, graph.state, 0, io, 7, nullptr, 0, graph.stream, nullptr));
  ASSERT_EQ(cudaStreamEndCapture(graph.stream, &captured), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, captured, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, graph.stream), cudaSuccess);
  graph.commit();
  EXPECT_EQ(plain.outputs(1), graph.outputs(1));
  CALL(lla_state_export_size(graph.state, 0, &bytes, &error));  // of one row more
  image.resize(bytes);
  CALL(lla_state_pack(graph.state, 0, image.data(), bytes, graph.stream, &error));
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(captured);
  plain.close();
  graph.close();
}

// The same rows on two threads with a stream each, over and over: the same bits every time.
TEST_F(Device, TwoThreadsTwoStreams) {
  std::vector<float> results[2];
  bool same[2] = {true, true};
  std::thread threads[2];
  for (int t = 0; t < 2; ++t) {
    threads[t] = std::thread([&, t] {
      Model m;
      m.open(LLA_SCALAR_GATE, 300, 512, false);
      for (int repeat = 0; repeat < 50; ++repeat) {
        lla_state_reset(m.state, {nullptr, 0, 0}, 0, {nullptr, 0, 0}, m.stream, nullptr);
        m.fill({0, 0, 0}, 300);
        m.plan(300, kSlots);
        m.forward(300);
        m.commit();
        const std::vector<float> y = m.outputs(300);
        if (repeat == 0) results[t] = y;
        same[t] = same[t] && std::memcmp(y.data(), results[t].data(), y.size() * 4) == 0;
      }
      m.close();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(same[0] && same[1]);
  ASSERT_EQ(results[0].size(), results[1].size());
  EXPECT_EQ(std::memcmp(results[0].data(), results[1].data(), results[0].size() * 4), 0);
}

// A call takes no memory of the device, and leaves the current device as it was.
TEST_F(Device, ExecuteAllocatesNothing) {
  Model m;
  m.open(LLA_DELTA_RULE, 300, 512, false);
  if (HasFatalFailure()) return;
  m.fill({0, 0, 0}, 300);
  m.plan(300, kSlots);
  m.forward(300);
  m.commit();
  cudaStreamSynchronize(m.stream);
  size_t before = 0, after = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  for (int i = 0; i < 20; ++i) {
    lla_state_reset(m.state, {nullptr, 0, 0}, 0, {nullptr, 0, 0}, m.stream, nullptr);
    m.plan(300, kSlots);
    m.forward(300);
    m.commit();
  }
  cudaStreamSynchronize(m.stream);
  ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  EXPECT_EQ(before, after);
  int device = -1;
  ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 0);
  m.close();
}

}  // namespace
