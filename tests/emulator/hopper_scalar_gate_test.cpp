// SPDX-License-Identifier: Apache-2.0
// The scalar gate's Hopper kernels on the emulator against the reference, and what they leave to the portable ones.
#include <cstdlib>

#include "cuda/common/scalar_gate_routes.h"
#include "cuda/hopper/scalar_gate_sweep.h"
#include "cuda/hopper/scalar_gate_views.h"
#include "scalar_gate_testing.h"

namespace {

using namespace scalar_gate_testing;

// The emulated device is a Hopper one while a test runs.
class HopperScalarGate : public ::testing::Test {
 protected:
  void SetUp() override { setenv("LLA_EMULATED_HOPPER", "1", 1); }
  void TearDown() override { unsetenv("LLA_EMULATED_HOPPER"); }
};

Kernels hopper_kernels() {
  Kernels k;
  const cuda::KernelTable table = cuda::scalar_gate_kernels();
  for (int64_t i = 0; i < table.count; ++i) {
    if (std::string(table.kernels[i].name) == "cuda.scalar_gate.forward.hopper") k.forward = &table.kernels[i];
  }
  return k;
}

Case make_case(int64_t heads, int64_t groups, int64_t dk, int64_t dv, int64_t levels, std::vector<Part> parts) {
  Case c;
  c.shape = make_shape(heads, groups, dk, dv, 64, levels, false, false, 0.125);
  c.inputs.dtype = c.out_dtype = LLA_BF16;
  c.parts = std::move(parts);
  c.forward_only = true;
  return c;
}

// Rows of bf16 and of fp16, of which half as many bits are lost eight times over.
void check(Case c) {
  for (const int32_t dtype : {LLA_BF16, LLA_F16}) {
    c.inputs.dtype = c.out_dtype = dtype;
    SCOPED_TRACE(describe(c));
    const Kernels hopper = hopper_kernels();
    ASSERT_NE(hopper.forward, nullptr);
    const Values got = run_case(hopper, c), want = run_case(reference_kernels(), c);
    EXPECT_LT(norm_error(got.at("y"), want.at("y")), dtype == LLA_BF16 ? 4e-3 : 6e-4);
  }
}

TEST_F(HopperScalarGate, LogLinear) { check(make_case(2, 1, 128, 64, 10, {{300}, {64}, {1}, {128}})); }

TEST_F(HopperScalarGate, Linear) { check(make_case(2, 2, 128, 64, 0, {{300}, {129}})); }

// Rows, columns and heads that fill no tile; one group for several heads, in either order.
TEST_F(HopperScalarGate, OddShapes) {
  Case c = make_case(4, 2, 96, 40, 10, {{200}, {17}});
  c.inputs.pad = 8;
  check(c);
  c = make_case(4, 2, 64, 72, 10, {{260}});
  c.shape.head_map = LLA_HEAD_MAP_CYCLIC;
  check(c);
  check(make_case(2, 1, 64, 64, 0, {{260}}));
}

// Gates of -inf and -700, and none at all; no write strength.
TEST_F(HopperScalarGate, HardGates) {
  Case c = make_case(2, 1, 128, 64, 10, {{400}});
  c.inputs.hard = 0.05;
  check(c);
  c.shape.levels = 0;
  check(c);
  c.inputs.gate = c.inputs.write = false;
  check(c);
  c.shape.levels = 10;
  check(c);
}

// Contents of nodes and states far beyond the largest fp16 number (16 384 rows of 16 each are 131 072 half the time), and
// far below the least that keeps its bits. Outputs are of ordinary size.
TEST_F(HopperScalarGate, SumsBeyondTheRangeOfRows) {
  Case c = make_case(1, 1, 64, 32, 16, {{16384 + 300}});
  c.inputs.lift = 4;
  c.inputs.decay = 1e-6;
  c.inputs.lambda_size = 0.005;
  for (const char* log : {"5", "3"}) {
    SCOPED_TRACE(log);
    setenv("LLA_EMULATED_SEGMENT_LOG", log, 1);
    check(c);
  }
  unsetenv("LLA_EMULATED_SEGMENT_LOG");
  c.shape.levels = 0;
  c.shape.scale = 1e-4;
  check(c);
  c = make_case(1, 1, 64, 32, 15, {{3000}});
  c.inputs.write_size = 1e-6;
  c.inputs.decay = 0.002;
  c.shape.scale = 1e5;
  check(c);
  c.shape.levels = 0;
  check(c);
  c.inputs.write_size = 1e6;
  c.shape.scale = 1e-7;
  check(c);
  c.shape.levels = 15;
  check(c);
  // Scores beyond the range, too.
  c.inputs.write_size = 1;
  c.inputs.query_size = 1e4;
  c.inputs.lift = 2;
  c.shape.scale = 1e-5;
  check(c);
}

// An empty past: the call begins within a block, at any node level.
TEST_F(HopperScalarGate, Positions) {
  check(make_case(1, 1, 128, 64, 15, {{300, 1000}, {200, 64}, {70, 130}, {400, 8192 - 200}}));
  check(make_case(1, 1, 128, 64, 0, {{300, 1000}, {70, 130}, {300, 16384 - 100}}));
}

// Queries and keys of more columns than one sweep takes; outputs that are added to what is there.
TEST_F(HopperScalarGate, WideKeys) {
  Case c = make_case(2, 1, 256, 64, 10, {{300}, {64, 70}});
  check(c);
  c.shape.levels = 0;
  check(c);
  c = make_case(2, 2, 136, 72, 10, {{200}});
  c.accumulate = true;
  check(c);
  c.shape.key_dim = 40;
  check(c);
}

// Without a state it makes no difference how long the chunks are that a state would keep apart.
TEST_F(HopperScalarGate, Grains) {
  for (const int64_t grain : {1, 16, 128, 256}) {
    Case c = make_case(1, 1, 128, 64, 10, {{300, 192}, {70}});
    c.shape.grain = grain;
    check(c);
  }
}

TEST_F(HopperScalarGate, Absorbing) {
  Case c = make_case(1, 1, 128, 64, 4, {{700}});
  c.shape.absorb = true;
  check(c);
}

// Few long sequences go in segments; a sequence's bits are those of the sweep as a whole.
TEST_F(HopperScalarGate, Segments) {
  Case c = make_case(1, 1, 64, 32, 15, {{4096 * 2 + 150}, {4096 + 128, 500}});
  check(c);
  c.shape.levels = 0;
  c.parts = {{16384 + 200}};
  check(c);
}

// With states: long sequences are swept over, short ones are not; states of both are stored.
Part fresh_part(int64_t rows, int64_t position = 0) { return {rows, position, position, false, true}; }

void check_states(Case c) {
  const int32_t tails = c.tail_dtype;
  for (const int32_t dtype : {LLA_BF16, LLA_F16}) {
    c.inputs.dtype = c.out_dtype = dtype;
    c.tail_dtype = tails == LLA_BF16 ? dtype : tails;
    SCOPED_TRACE(describe(c));
    const Values got = run_case(hopper_kernels(), c), want = run_case(reference_kernels(), c);
    const double bound = dtype == LLA_BF16 || c.node_dtype == LLA_BF16 ? 4e-3 : 6e-4;  // by the narrower of rows and nodes
    EXPECT_LT(norm_error(got.at("y"), want.at("y")), bound);
    EXPECT_LT(norm_error(got.at("state"), want.at("state")), bound);
    EXPECT_LT(max_error(got.at("state scalars"), want.at("state scalars")), 1e-5);
  }
}

TEST_F(HopperScalarGate, States) {
  // Borders: each of four (even places), or the last one only.
  Case c =
      make_case(2, 1, 128, 64, 12,
                {fresh_part(300), fresh_part(700), {200, 100, 0}, fresh_part(900, 192), fresh_part(100), fresh_part(128)});
  check_states(c);
  c.shape.levels = 0;
  check_states(c);
  // A slot that has blocks, but no rows.
  c = make_case(4, 2, 64, 72, 12, {{250, 0, 0}, {1000, 70, 70}});
  c.shape.head_map = LLA_HEAD_MAP_CYCLIC;
  c.node_dtype = c.tail_dtype = LLA_BF16;
  check_states(c);
  c.shape.grain = 128;
  check_states(c);
  c.shape.levels = 9;
  c.shape.absorb = true;
  check_states(c);
}

// Nodes of several runs, of levels that are kept apart or not.
TEST_F(HopperScalarGate, StatesOfLongSequences) {
  Case c = make_case(1, 1, 40, 24, 16,
                     {fresh_part(128), fresh_part(3 * 4096 + 1500), fresh_part(150), fresh_part(4096 + 200, 3000)});
  c.inputs.decay = 0.0005;  // the oldest rows still matter
  check_states(c);
  c.shape.levels = 0;
  check_states(c);
  c.shape.levels = 10;
  c.shape.absorb = true;
  check_states(c);
}

// Histories that end with a block and a chunk.
TEST_F(HopperScalarGate, Histories) {
  Case c = make_case(
      2, 1, 128, 64, 15,
      {{300, 128 * 5, 0}, {700, 128 * 11, 0}, {200, 192, 0}, fresh_part(150), {130, 128 * 21, 0}, {900, 128 * 64, 0}});
  c.inputs.decay = 0.002;
  c.node_dtype = LLA_BF16;
  check_states(c);
  c.shape.levels = 0;
  check_states(c);  // at this decay what the reference rounds at each chunk is soon gone
  c.node_dtype = LLA_F32;
  check_states(c);
  c.shape.levels = 15;  // nodes in fp32 become copies in the rows' type
  check_states(c);
}

TEST_F(HopperScalarGate, HistoriesOfOtherShapes) {
  Case c = make_case(4, 2, 40, 72, 15, {{250, 128 * 3, 0}, {500, 256 * 5, 0}, {150, 100, 0}, {200, 128 * 63, 0}});
  c.inputs.decay = 0.002;
  c.node_dtype = c.tail_dtype = LLA_BF16;
  c.shape.head_map = LLA_HEAD_MAP_CYCLIC;
  for (const int64_t grain : {64, 128, 256}) {
    c.shape.grain = grain;
    check_states(c);
  }
  c.shape.grain = 64;
  c.shape.levels = 9;
  c.shape.absorb = true;
  check_states(c);
  c.factor_dtype = LLA_BF16;
  c.shape.levels = 11;
  check_states(c);
}

// Histories that end anywhere: within the first or second half of a block, of chunks of half a block, one, or several, with
// rows that are still raw before and in the sequence's first block; in all node levels of the first block.
TEST_F(HopperScalarGate, HistoriesWithinBlocks) {
  for (const int64_t grain : {64, 128, 256, 512}) {
    Case c = make_case(2, 1, 128, 64, 15,
                       {{300, 5000, 0},
                        {128, 17, 0},
                        {700, 128 * 11 + 64, 0},
                        {200, 128 * 5 + 127, 0},
                        {131, 1023, 0},
                        fresh_part(150),
                        {20, 700, 0},
                        {450, 4096 - 1, 0}});
    c.shape.grain = grain;
    c.inputs.decay = 0.002;
    c.node_dtype = LLA_BF16;
    check_states(c);
    c.tail_dtype = LLA_BF16;
    check_states(c);
    c.shape.levels = 0;
    c.inputs.decay = 0.02;  // the reference rounds a narrow state at each chunk
    check_states(c);
    c.node_dtype = LLA_F32;
    c.tail_dtype = LLA_F16;
    c.inputs.decay = 0.002;
    check_states(c);
  }
}

// Copies of a history's nodes in the rows' type: the same bits whether all heads go at once or in slices.
TEST_F(HopperScalarGate, CopiesOfNodes) {
  Case c = make_case(6, 2, 40, 72, 15, {{300, 5000, 0}, {150, 128 * 5, 0}});
  c.inputs.decay = 0.002;
  for (const int64_t scratch : {0, 1 << 16}) {
    for (const bool absorb : {false, true}) {
      for (const bool cyclic : {false, true}) {
        c.shape.absorb = absorb;
        c.shape.levels = absorb ? 9 : 15;
        c.shape.head_map = cyclic ? LLA_HEAD_MAP_CYCLIC : LLA_HEAD_MAP_BLOCKED;
        const Values whole = run_case(hopper_kernels(), c);
        if (scratch == 0) check_states(c);
        setenv("LLA_EMULATED_SCRATCH", std::to_string(scratch).c_str(), 1);
        const Values sliced = run_case(hopper_kernels(), c);
        unsetenv("LLA_EMULATED_SCRATCH");
        for (const char* name : {"y", "state", "state scalars"}) EXPECT_EQ(whole.at(name), sliced.at(name)) << name;
      }
    }
  }
}

// Copies take more scratch than all else of a call of few rows. Sequences of few rows, as in steps, have none.
TEST_F(HopperScalarGate, CopiesOfNodesOfFewRows) {
  Case c = make_case(2, 1, 128, 64, 15, {{128, 128 * 127, 0}});
  c.inputs.decay = 0.002;
  check_states(c);
  c = make_case(2, 1, 64, 32, 15, {{1, 77, 0}, {200, 5000, 0}, {2, 300, 0}, {1, 64, 0}, {130, 700, 0}, {1, 900, 0}});
  c.inputs.decay = 0.002;
  check_states(c);
}

// Rows of a history that have gates and write strengths where the call has none, and the other way about; narrow factors;
// levels that are absorbed, down to those inside a block.
TEST_F(HopperScalarGate, HistoriesWithinBlocksOfOtherShapes) {
  Case c = make_case(4, 2, 40, 72, 15, {{250, 200, 0}, {500, 256 * 5 + 100, 0}, {150, 128 * 63 - 1, 0}});
  c.inputs.decay = 0.002;
  c.node_dtype = c.tail_dtype = LLA_BF16;
  c.shape.head_map = LLA_HEAD_MAP_CYCLIC;
  for (const int64_t grain : {64, 256}) {
    c.shape.grain = grain;
    c.shape.absorb = false;
    c.shape.levels = 15;
    c.factor_dtype = LLA_BF16;
    check_states(c);
    c.shape.absorb = true;
    for (const int64_t levels : {12, 9, 8, 4}) {
      c.shape.levels = levels;
      check_states(c);
    }
    c.factor_dtype = LLA_F32;
    c.inputs.write = false;
    check_states(c);
    c.inputs.gate = false;
    check_states(c);
    c.inputs.gate = c.inputs.write = true;
    c.inputs.hard = 0.01;
    check_states(c);
    c.inputs.hard = 0;
  }
}

// What decides who works on a sequence.
TEST_F(HopperScalarGate, Routes) {
  MixerShape shape = make_shape(1, 1, 64, 64, 64, 10);
  SlotMemory state;
  state.node_layout.dtype = LLA_BF16;
  Sequence s = plain_sequence(0, 128);
  s.history.tail = 3;
  EXPECT_TRUE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
  s.rows = 127;
  EXPECT_FALSE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
  s.rows = 500;
  s.position = s.history.position = 256;
  EXPECT_TRUE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
  s.position = s.history.position = 777;
  EXPECT_TRUE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
  shape.grain = 256;
  EXPECT_TRUE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
  state.tail_layout.dtype = LLA_BF16;
  EXPECT_TRUE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
  shape.levels = 0;
  EXPECT_FALSE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_F16)));  // bf16 rows may be too large for fp16
  state.tail_layout.dtype = LLA_F32;
  EXPECT_TRUE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_F16)));
  shape.levels = 10;
  shape.grain = 512;
  EXPECT_FALSE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
  s.position = s.history.position = 4096;
  EXPECT_TRUE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
  shape.grain = 64;
  state.node_layout.dtype = LLA_F32;
  EXPECT_TRUE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
  shape.levels = 0;
  EXPECT_TRUE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
  s.history.start = 64;
  EXPECT_FALSE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
  s.history.start = 4096;
  EXPECT_TRUE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
  s.nodes_to_store_count = 5;
  EXPECT_FALSE(cuda::takes_sweep(s, cuda::sweep_routes(shape, state, LLA_BF16)));
}

// Bits of rows that read a history do not depend on how the call is cut.
TEST_F(HopperScalarGate, HistoriesInSegments) {
  Case c = make_case(1, 1, 64, 32, 15, {{128 * 20 + 50, 128 * 13, 0}, {4096, 128 * 8 + 77, 0}});
  c.inputs.decay = 0.002;
  c.node_dtype = LLA_BF16;
  std::vector<double> first;
  for (const char* log : {"30", "5", "4", "3"}) {
    SCOPED_TRACE(log);
    setenv("LLA_EMULATED_SEGMENT_LOG", log, 1);
    if (first.empty()) check_states(c);
    const std::vector<double> y = run_case(hopper_kernels(), c).at("y");
    if (first.empty()) first = y;
    EXPECT_EQ(y, first);
  }
  unsetenv("LLA_EMULATED_SEGMENT_LOG");
  c.shape.levels = 0;
  c.node_dtype = LLA_F32;  // the reference rounds narrow states at each chunk, a sweep at the end only
  c.parts = {{16384 + 300, 128 * 100 + 70, 0}};
  check_states(c);
}

// A sequence's bits, and its state's, are the same beside others that the portable kernels work on, and in slices of heads.
TEST_F(HopperScalarGate, StatesDoNotDependOnTheBatch) {
  Case c = make_case(3, 1, 64, 64, 12, {{1, 100, 0}, fresh_part(450)});
  const Values beside = run_case(hopper_kernels(), c);
  setenv("LLA_EMULATED_SCRATCH", "1", 1);
  const Values sliced = run_case(hopper_kernels(), c);
  unsetenv("LLA_EMULATED_SCRATCH");
  for (const char* name : {"y", "state", "state scalars"}) EXPECT_EQ(beside.at(name), sliced.at(name)) << name;
}

// However sequences are cut, their bits are the same: whole (30), or in segments of 2^n blocks; long enough to read a node
// of several segments, which is joined more than once.
TEST_F(HopperScalarGate, BitsDoNotDependOnSegments) {
  struct Way {
    const char* name;
    std::vector<Part> parts;
    std::vector<const char*> logs;
  };
  for (const Way& way :
       {Way{"short", {{700, 1200}, {17}}, {"30", "3"}}, Way{"long", {{8192 + 100, 300}, {17}}, {"30", "5", "4", "3"}},
        Way{"longer", {{16384 + 400, 300}}, {"5", "4", "3"}}}) {
    SCOPED_TRACE(way.name);
    Case c = make_case(2, 1, 128, 64, 16, way.parts);
    c.inputs.decay = 0.0005;  // nodes of several segments still matter, and so do the last bits of their decays
    for (const int32_t dtype : {LLA_BF16, LLA_F16}) {
      c.inputs.dtype = c.out_dtype = dtype;
      std::vector<double> first;
      for (const char* log : way.logs) {
        SCOPED_TRACE(log);
        setenv("LLA_EMULATED_SEGMENT_LOG", log, 1);
        const std::vector<double> y = run_case(hopper_kernels(), c).at("y");
        if (first.empty()) first = y;
        EXPECT_TRUE(y == first);
      }
    }
  }
  unsetenv("LLA_EMULATED_SEGMENT_LOG");
}

// Cut in each way that batches may be, against the reference.
TEST_F(HopperScalarGate, EachCut) {
  for (const char* log : {"5", "4", "3"}) {
    SCOPED_TRACE(log);
    setenv("LLA_EMULATED_SEGMENT_LOG", log, 1);
    check(make_case(2, 1, 128, 64, 15, {{4096 + 300, 1000}, {64}}));
  }
  unsetenv("LLA_EMULATED_SEGMENT_LOG");
}

// In segments of 1024 rows calls have the bits of sweeps over whole sequences, and those are right.
void check_segments(Case c) {
  const int32_t tails = c.tail_dtype;
  for (const int32_t dtype : {LLA_BF16, LLA_F16}) {
    c.inputs.dtype = c.out_dtype = dtype;
    if (tails == LLA_BF16) c.tail_dtype = dtype;
    SCOPED_TRACE(describe(c));
    setenv("LLA_EMULATED_SEGMENT_LOG", "30", 1);
    const Values whole = run_case(hopper_kernels(), c), want = run_case(reference_kernels(), c);
    EXPECT_LT(norm_error(whole.at("y"), want.at("y")), dtype == LLA_BF16 || c.node_dtype == LLA_BF16 ? 4e-3 : 6e-4);
    setenv("LLA_EMULATED_SEGMENT_LOG", "3", 1);
    EXPECT_TRUE(run_case(hopper_kernels(), c) == whole);
    unsetenv("LLA_EMULATED_SEGMENT_LOG");
  }
}

// Nodes of segments are made for two heads of a group at a time: of an odd number the last is alone. Segments that begin
// with their sequence, in an odd or even block, or within it; sequences of one segment, or of none.
TEST_F(HopperScalarGate, SegmentsOfOddHeads) {
  Case c = make_case(3, 1, 128, 64, 15, {{0}, {2300, 700}, {1}, {1100, 900}, {1024}, {0}});
  c.inputs.decay = 0.0005;
  check_segments(c);
  c = make_case(6, 2, 40, 72, 15, {{1400, 1700}});
  c.shape.head_map = LLA_HEAD_MAP_CYCLIC;
  c.inputs.pad = 8;
  check_segments(c);
  c = make_case(2, 2, 136, 16, 15, {{1100}});
  c.accumulate = true;
  check_segments(c);
}

// Factors of other types, some or all absent, or hard.
TEST_F(HopperScalarGate, SegmentsOfOtherFactors) {
  Case c = make_case(3, 1, 64, 32, 15, {{1200, 900}});
  for (const int32_t dtype : {LLA_BF16, LLA_F16}) {
    c.factor_dtype = dtype;
    check_segments(c);
  }
  c.inputs.gate = false;
  check_segments(c);
  c.factor_dtype = LLA_F32;
  c.inputs.write = false;
  check_segments(c);
  c.inputs.gate = true;
  c.inputs.hard = 0.02;
  check_segments(c);
}

// Raw rows of histories in the first blocks of segments, for the two heads of a pair and for one alone.
TEST_F(HopperScalarGate, SegmentsOfHistories) {
  for (const int64_t grain : {64, 128, 256}) {
    Case c = make_case(3, 1, 64, 32, 15, {{1100, 128 * 13 + 77, 0}, {900, 255, 0}, {1, 99, 0}, {130, 1023, 0}});
    c.shape.grain = grain;
    c.inputs.decay = 0.002;
    c.node_dtype = LLA_BF16;
    if (grain != 128) c.tail_dtype = LLA_BF16;
    check_segments(c);
  }
}

// Linear layers, which are cut at multiples of 16 384 rows.
TEST_F(HopperScalarGate, LinearSegmentsOfOddHeads) {
  Case c = make_case(3, 1, 128, 72, 0, {{1100, 16384 - 700}, {70}});
  c.inputs.decay = 0.005;
  c.inputs.write_size = 0.01;  // another unit than 1
  c.shape.scale = 12.5;
  check(c);
  c.inputs.write_size = 1;
  c.shape.scale = 0.125;
  c.shape.head_map = LLA_HEAD_MAP_CYCLIC;
  c.shape.heads = 6;
  c.shape.groups = 2;
  c.shape.value_dim = 24;
  c.parts = {{600, 16384 - 300}};
  c.factor_dtype = LLA_BF16;
  check(c);
  c.shape = make_shape(3, 1, 64, 32, 256, 0);
  c.parts = {{700, 16384 - 300, 0}};
  c.inputs.decay = 0.02;
  check_states(c);
}

// Shared memory holds the weights of all nodes that rows of the longest sequence read, its history's included.
TEST_F(HopperScalarGate, LongestSequencesFit) {
  using namespace cuda::hopper;
  const int entries = node_levels(blocks_of(kMostLength, kMostLength), kMostLength) + bits(kMostLength / kHalf) + 1;
  EXPECT_EQ(entries, 31);
  SharedLayout layout;
  layout.units = true;  // fp16
  layout.slots = 5;     // of segments of 2^5 blocks
  layout.ring = 1;
  EXPECT_TRUE(layout.fit(128, entries));
}

TEST_F(HopperScalarGate, Refuses) {
  MixerForward p;
  p.shape = make_shape(2, 1, 128, 64, 64, 10);
  const Kernel& kernel = *hopper_kernels().forward;
  EXPECT_FALSE(kernel.accepts(&p));  // fp32
  for (View* view : {&p.q, &p.k, &p.v, &p.y}) view->dtype = LLA_BF16;
  EXPECT_TRUE(kernel.accepts(&p));
  unsetenv("LLA_EMULATED_HOPPER");
  EXPECT_FALSE(kernel.accepts(&p));
  setenv("LLA_EMULATED_HOPPER", "1", 1);
  alignas(16) char memory[64] = {};
  p.shape.grain = 32;
  EXPECT_TRUE(kernel.accepts(&p));
  p.state.nodes.base = memory;
  p.batch.most_rows = 128;
  EXPECT_FALSE(kernel.accepts(&p));
  p.shape.grain = 64;
  EXPECT_TRUE(kernel.accepts(&p));
  p.batch.most_rows = 127;
  EXPECT_FALSE(kernel.accepts(&p));
  p.state.nodes.base = nullptr;
  EXPECT_TRUE(kernel.accepts(&p));
  p.shape.key_dim = 256;
  EXPECT_TRUE(kernel.accepts(&p));
  p.state.nodes.base = memory;
  p.batch.most_rows = 128;
  EXPECT_FALSE(kernel.accepts(&p));
  p.state.nodes.base = nullptr;
  p.shape.key_dim = 132;
  EXPECT_FALSE(kernel.accepts(&p));
  p.shape.key_dim = 128;
  p.batch.total_rows = 10;
  p.q.data = memory + 2;
  p.q.row_stride = p.q.head_stride = 128;
  EXPECT_FALSE(kernel.accepts(&p));
  p.q.data = memory;
  EXPECT_TRUE(kernel.accepts(&p));
  p.q.row_stride = 132;
  EXPECT_FALSE(kernel.accepts(&p));
}

}  // namespace
