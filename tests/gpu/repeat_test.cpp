// SPDX-License-Identifier: Apache-2.0
// The same bits, forward and backward: over 100 repeats, on two threads with two streams each at once, alone and in a ragged
// batch, and in the first call that a new thread makes.
#if defined(LLA_WITH_CUDART)
#include <cuda_runtime.h>
#endif

#include <array>
#include <thread>

#include "device_model.h"
#include "needs_device.h"

namespace {

using device::Bytes;
using device::Limits;
using device::Model;
using device::Piece;
using device::Tensors;

// A stream of its own where there is a device; the emulation has none.
struct Stream {
  void* handle = nullptr;
#if defined(LLA_WITH_CUDART)
  Stream() {
    cudaStream_t stream = nullptr;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess)
      handle = stream;
    else
      cudaGetLastError();
  }
  ~Stream() {
    if (handle) cudaStreamDestroy(static_cast<cudaStream_t>(handle));
  }
#endif
};

struct Case {
  lla_layer_desc desc;
  lla_dtype dtype;
  std::string name;
};

std::vector<Case> cases(bool emulated) {
  std::vector<Case> list;
  for (const lla_mixer rule : {LLA_SCALAR_GATE, LLA_DELTA_RULE}) {
    for (const int64_t levels : {12, 0}) {
      for (const lla_dtype dtype : {LLA_F32, LLA_BF16}) {
        const bool delta = rule == LLA_DELTA_RULE;
        const int64_t heads = emulated ? 2 : 4, key = emulated ? 32 : 128, value = emulated ? 16 : delta ? 128 : 64;
        list.push_back({device::mixer(rule, heads, delta ? heads : 1, key, value, levels), dtype,
                        std::string(delta ? "delta rule" : "scalar gate") + (levels ? "" : ", linear") +
                            (dtype == LLA_F32 ? ", fp32" : ", bf16")});
      }
    }
  }
  return list;
}

std::vector<Piece> ragged(bool emulated) {
  std::vector<Piece> pieces;
  uint64_t sequence = 1;
  for (const int64_t count :
       emulated ? std::vector<int64_t>{70, 1, 0, 64} : std::vector<int64_t>{600, 1, 0, 64, 333, 700, 63})
    pieces.push_back({sequence++, 0, count});
  return pieces;
}

Limits limits_of(const std::vector<Piece>& pieces, lla_dtype dtype) {
  Limits limits;
  limits.sequences = static_cast<int64_t>(pieces.size());
  limits.rows = 0;
  for (const Piece& p : pieces) {
    limits.rows += p.count;
    limits.rows_per_sequence = limits.length = std::max(limits.length, p.count);
  }
  limits.backward = true;
  limits.dtype = dtype;
  return limits;
}

void run(Model* model) {
  model->forward();
  model->backward();
}

bool is_finite(const Tensors& results, lla_dtype dtype) {
  for (const auto& [role, bytes] : results) {
    const bool wide = dtype == LLA_F32 || role == LLA_GATE || role == LLA_WRITE || role == LLA_LAMBDA;
    for (size_t i = 0, size = wide ? 4 : 2; i + size <= bytes.size(); i += size) {
      uint16_t top;  // sign, exponent and the first bits of the fraction
      std::memcpy(&top, bytes.data() + i + size - 2, 2);
      if ((top & 0x7f80) == 0x7f80) return false;
    }
  }
  return true;
}

class Repeat : public NeedsDevice {
 protected:
  void SetUp() override {
    NeedsDevice::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    context = device::open_context(LLA_BACKEND_CUDA);
    emulated = device::is_emulated(context);
  }
  void TearDown() override { lla_context_release(context); }
  lla_context* context = nullptr;
  bool emulated = false;
};

TEST_F(Repeat, HundredTimes) {
  const std::vector<Piece> pieces = ragged(emulated);
  for (const Case& c : cases(emulated)) {
    Model model;
    model.open(context, c.desc, limits_of(pieces, c.dtype));
    model.load(pieces);
    Tensors first;
    for (int repeat = 0; repeat < (emulated ? 2 : 100); ++repeat) {
      if (repeat % 10 < 2) model.spoil();  // what memory held before does not matter
      run(&model);
      Tensors results;
      model.read(true, &results);
      if (HasFatalFailure()) return;
      if (repeat == 0) {
        first = results;
        ASSERT_TRUE(is_finite(first, c.dtype)) << c.name;
      }
      for (const auto& [role, bytes] : results)
        ASSERT_TRUE(bytes == first[role]) << c.name << ", role " << role << ", " << repeat;
    }
  }
}

// Every multiprocessor busy, shared memory full, copies racing with readers: what a kernel gives away too early is
// overwritten.
TEST_F(Repeat, HundredTimesOnAFullDevice) {
  // The emulator, where there is no such race, shows that the calls are right.
  const int64_t delta_heads = emulated ? 2 : 16, scalar_heads = emulated ? 2 : 48, key = emulated ? 32 : 128;
  std::vector<Piece> pieces;
  for (const int64_t rows : emulated ? std::vector<int64_t>{70, 130} : std::vector<int64_t>{1024, 1100, 1024, 4096})
    pieces.push_back({static_cast<uint64_t>(pieces.size() + 1), 0, rows});
  for (const int64_t levels : {13, 0}) {
    for (const bool delta : {false, true}) {
      const std::string name = std::string(delta ? "delta rule" : "scalar gate") + (levels ? "" : ", linear");
      const lla_layer_desc desc = delta ? device::mixer(LLA_DELTA_RULE, delta_heads, delta_heads, key, key, levels)
                                        : device::mixer(LLA_SCALAR_GATE, scalar_heads, 1, key, key / 2, levels);
      Limits limits = limits_of(pieces, LLA_BF16);
      limits.backward = false;
      Model model;
      model.open(context, desc, limits);
      model.load(pieces);
      Tensors first;
      for (int repeat = 0; repeat < (emulated ? 2 : 100); ++repeat) {
        model.forward();
        Tensors results;
        model.read(false, &results);
        if (HasFatalFailure()) return;
        if (repeat == 0) first = results;
        ASSERT_TRUE(results == first) << name << ", " << repeat;
      }
    }
  }
}

TEST_F(Repeat, AloneAndInARaggedBatch) {
  const std::vector<Piece> pieces = ragged(emulated);
  for (const Case& c : cases(emulated)) {
    const Limits limits = limits_of(pieces, c.dtype);
    Model batch, alone;
    batch.open(context, c.desc, limits);
    alone.open(context, c.desc, limits);
    batch.load(pieces);
    run(&batch);
    Tensors together;
    batch.read(true, &together);
    int64_t row = 0;
    for (const Piece& p : pieces) {
      if (p.count == 0) continue;
      alone.load({p});
      run(&alone);
      Tensors single;
      alone.read(true, &single);
      if (HasFatalFailure()) return;
      for (const auto& [role, bytes] : single) {
        const size_t width = bytes.size() / static_cast<size_t>(p.count), first = static_cast<size_t>(row) * width;
        ASSERT_LE(first + bytes.size(), together[role].size());
        ASSERT_EQ(std::memcmp(bytes.data(), together[role].data() + first, bytes.size()), 0)
            << c.name << ", role " << role << ", " << p.count << " rows";
      }
      row += p.count;
    }
  }
}

// Blocks: their projections have other kernels for few rows than for many. Behind the batch are rows of no sequence.
TEST_F(Repeat, BlocksAloneAndInARaggedBatch) {
  std::vector<Piece> pieces;
  for (const int64_t rows :
       emulated ? std::vector<int64_t>{1, 33, 0, 16, 1} : std::vector<int64_t>{1, 600, 3, 0, 16, 17, 1, 333})
    pieces.push_back({static_cast<uint64_t>(pieces.size() + 1), 0, rows});
  const int64_t slack = 5;
  for (const lla_layer_kind kind : {LLA_LAYER_MAMBA2, LLA_LAYER_GATED_DELTANET}) {
    for (const lla_dtype dtype : {LLA_F32, LLA_BF16}) {
      const std::string name =
          std::string(kind == LLA_LAYER_MAMBA2 ? "Mamba-2" : "Gated DeltaNet") + (dtype == LLA_F32 ? ", fp32" : ", bf16");
      const int64_t hidden = emulated ? 32 : 512, key = emulated ? 16 : 128, value = emulated ? 16 : 64;
      const lla_layer_desc desc = device::block(kind, hidden, emulated ? 2 : 8, key, value, 12);
      Limits limits = limits_of(pieces, dtype);
      limits.rows += slack;
      Model batch, alone;
      batch.open(context, desc, limits);
      alone.open(context, desc, limits);
      batch.load(pieces, slack);
      run(&batch);
      Tensors together;
      batch.read(true, &together);
      if (HasFatalFailure()) return;
      // The sum over all rows too: those of no sequence are not in it.
      for (const lla_role role : {LLA_X, LLA_Y, LLA_WEIGHT_OUT_PROJ})
        ASSERT_TRUE(is_finite({{role, together[role]}}, dtype)) << name << ", role " << role;
      int64_t row = 0;
      for (const Piece& p : pieces) {
        if (p.count == 0) continue;
        alone.load({p});
        run(&alone);
        Tensors single;
        alone.read(true, &single);
        if (HasFatalFailure()) return;
        for (const lla_role role : {LLA_X, LLA_Y}) {
          const Bytes &part = single[role], &whole = together[role];
          const size_t first = part.size() / static_cast<size_t>(p.count) * static_cast<size_t>(row);
          ASSERT_LE(first + part.size(), whole.size());
          EXPECT_EQ(std::memcmp(part.data(), whole.data() + first, part.size()), 0)
              << name << ", role " << role << ", " << p.count << " rows";
        }
        row += p.count;
      }
    }
  }
}

// A sequence that is cut to fill the device when it is alone, and is not when others fill it. Little decay, so that
// everything that is far away matters.
TEST_F(Repeat, AloneAndInAFullBatch) {
  const int64_t heads = emulated ? 2 : 48, key = emulated ? 32 : 128;
  for (const int64_t rows : emulated ? std::vector<int64_t>{300} : std::vector<int64_t>{2048, 8192, 16384}) {
    std::vector<Piece> pieces;
    for (uint64_t i = 1; i <= (emulated ? 2 : 65536 / static_cast<uint64_t>(rows)); ++i) pieces.push_back({i, 0, rows});
    Limits limits = limits_of(pieces, LLA_BF16);
    limits.backward = false;
    limits.decay = 0.001;
    const lla_layer_desc desc = device::mixer(LLA_SCALAR_GATE, heads, 1, key, key / 2, 15);
    Model batch, alone;
    batch.open(context, desc, limits);
    alone.open(context, desc, limits);
    batch.load(pieces);
    batch.forward();
    Tensors together;
    batch.read(false, &together);
    for (size_t i = 0; i < pieces.size(); i += pieces.size() - 1) {
      alone.load({pieces[i]});
      alone.forward();
      Tensors single;
      alone.read(false, &single);
      if (HasFatalFailure()) return;
      const Bytes &part = single[LLA_Y], &whole = together[LLA_Y];
      ASSERT_LE((i + 1) * part.size(), whole.size());
      EXPECT_EQ(std::memcmp(part.data(), whole.data() + i * part.size(), part.size()), 0) << rows << " rows, sequence " << i;
    }
  }
}

TEST_F(Repeat, TwoThreadsWithTwoStreams) {
  const std::vector<Piece> pieces = ragged(emulated);
  for (const Case& c : cases(emulated)) {
    if (emulated && (c.dtype != LLA_F32 || !c.desc.levels)) continue;
    const Limits limits = limits_of(pieces, c.dtype);
    Model owner;  // of the layer that all use
    owner.open(context, c.desc, limits);
    owner.load(pieces);
    run(&owner);
    Tensors expected;
    owner.read(true, &expected);
    if (HasFatalFailure()) return;
    std::array<bool, 2> same = {false, false};
    std::array<std::thread, 2> threads;
    for (size_t t = 0; t < threads.size(); ++t) {
      threads[t] = std::thread([&, t] {
        Stream streams[2];
        Model models[2];
        for (int s = 0; s < 2; ++s) {
          models[s].open(context, owner.layer(), c.desc, limits, streams[s].handle);
          models[s].load(pieces);
        }
        bool all = true;
        for (int repeat = 0; repeat < (emulated ? 1 : 25) && all; ++repeat) {
          for (Model& model : models) run(&model);  // the second begins while the first is at work
          for (Model& model : models) {
            Tensors results;
            model.read(true, &results);
            all = all && results == expected;
          }
        }
        same[t] = all;
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_TRUE(same[0] && same[1]) << c.name;
  }
}

// A thread that never used the device before has no context of the driver yet: the very first thing that it does here is a
// call of the library, as when a framework computes gradients on a thread of its own.
TEST_F(Repeat, FirstCallOfAThread) {
  const Case c = cases(emulated)[0];
  const std::vector<Piece> pieces = ragged(emulated);
  Model model;
  model.open(context, c.desc, limits_of(pieces, c.dtype));
  model.load(pieces);
  run(&model);
  Tensors expected, results;
  model.read(true, &expected);
  model.spoil();
  if (HasFatalFailure()) return;
  std::thread([&] { model.forward(); }).join();
  std::thread([&] { model.backward(); }).join();
  model.read(true, &results);
  EXPECT_TRUE(results == expected);
  std::thread([&] { model.load(pieces); }).join();
  std::thread([&] {
    lla_layer* layer = nullptr;
    CALL(lla_layer_create(context, &c.desc, &layer, &error));
    lla_layer_release(layer);
  }).join();
}

}  // namespace
