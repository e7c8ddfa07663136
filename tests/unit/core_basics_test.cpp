// SPDX-License-Identifier: Apache-2.0
// Fenwick arithmetic against brute force, and the text of errors.
#include <cstring>
#include <set>

#include "core_testing.h"

using namespace core_testing;

namespace {

TEST(Fenwick, LevelsMatchTheBucketsThatPeelingFinds) {
  for (int64_t t = 0; t < 300; ++t) {
    // From t down: each step cuts the block of the lowest set bit off; its level is 1 + the number of that bit.
    EXPECT_EQ(level_of(t, t), 0);
    int64_t end = t;
    while (end > 0) {
      const int64_t size = end & -end;
      int64_t bit = 0;
      while ((int64_t{1} << bit) != size) ++bit;
      for (int64_t s = end - size; s < end; ++s) EXPECT_EQ(level_of(t, s), bit + 1) << t << " " << s;
      end -= size;
    }
  }
}

// Probe A2.
TEST(Fenwick, LevelsNeededAreOneMoreThanTheHighestUsed) {
  int64_t highest = 0;
  for (int64_t length = 1; length < 600; ++length) {
    for (int64_t s = 0; s < length; ++s) highest = std::max(highest, level_of(length - 1, s));
    EXPECT_EQ(levels_needed(length), highest + 1) << length;
  }
  EXPECT_EQ(levels_needed(0), 1);
  EXPECT_EQ(levels_needed(int64_t{1} << 31), 32);
  EXPECT_EQ(levels_needed((int64_t{1} << 31) + 1), 33);
}

TEST(Fenwick, LengthAllowedInvertsLevelsNeeded) {
  EXPECT_EQ(length_allowed(0), 0);
  for (int64_t levels = 1; levels < 62; ++levels) {
    EXPECT_EQ(levels_needed(length_allowed(levels)), levels);
    EXPECT_EQ(levels_needed(length_allowed(levels) + 1), levels + 1);
  }
  EXPECT_EQ(length_allowed(63), INT64_MAX);
}

TEST(Fenwick, FoldsMergeTrailingOnes) {
  std::multiset<int64_t> nodes;  // levels
  for (int64_t chunk = 0; chunk < 1000; ++chunk) {
    int64_t level = 0;
    while (nodes.count(level)) nodes.erase(level++);
    EXPECT_EQ(trailing_ones(chunk), level);
    nodes.insert(level);
    for (int64_t b = 0; b < 12; ++b) EXPECT_EQ(nodes.count(b), static_cast<size_t>(((chunk + 1) >> b) & 1));
  }
}

TEST(Fenwick, NodesAreReadThroughTheColumnOfTheirRows) {
  for (int64_t grain = 1; grain <= 8; grain *= 2) {
    for (int64_t t = 0; t < 200; ++t) {
      const int64_t chunks = t / grain;
      for (int b = 0; b < 8; ++b) {
        if (!((chunks >> b) & 1)) continue;
        const int64_t first = ((chunks >> (b + 1)) << (b + 1)) * grain, rows = grain << b;
        for (int64_t s = first; s < first + rows; ++s) EXPECT_EQ(level_of(t, s), node_column(b, grain));
      }
    }
  }
}

TEST(ErrorText, FormatsAndReturnsTheStatus) {
  Error error;
  EXPECT_EQ(fail(&error, LLA_NO_BLOCKS, "slot[%d] = %s", 3, "x"), LLA_NO_BLOCKS);
  EXPECT_EQ(error.code, LLA_NO_BLOCKS);
  EXPECT_STREQ(error.text, "slot[3] = x");
  EXPECT_EQ(fail(nullptr, LLA_BUSY, "nobody reads this"), LLA_BUSY);
}

TEST(ErrorText, IsCutToTheField) {
  Error error;
  const std::string longer(1000, 'a');
  fail(&error, LLA_INTERNAL, "%s", longer.c_str());
  EXPECT_EQ(std::string(error.text), std::string(LLA_ERROR_TEXT_SIZE - 1, 'a'));
}

TEST(ErrorText, NeverWritesBehindTheCallersStruct) {
  for (size_t size = 0; size <= sizeof(lla_error); ++size) {
    Error error;
    std::memset(error.text, '#', sizeof error.text);
    error.struct_size = size;
    error.code = -1;
    fail(&error, LLA_BUSY, "%s", std::string(1000, 'a').c_str());
    const size_t room = size > offsetof(lla_error, text) ? size - offsetof(lla_error, text) : 0;
    EXPECT_EQ(error.code, room ? LLA_BUSY : -1);
    for (size_t i = room; i < sizeof error.text; ++i) ASSERT_EQ(error.text[i], '#') << size;
    if (room) {
      EXPECT_EQ(std::strlen(error.text), room - 1);
    }
  }
}

TEST(ErrorText, DoesNotCutACharacterInTwo) {
  for (size_t before = LLA_ERROR_TEXT_SIZE - 6; before < LLA_ERROR_TEXT_SIZE; ++before) {
    for (const char* character : {"\xce\xbb", "\xe2\x82\xac", "\xf0\x9f\x98\x80"}) {  // 2, 3 and 4 bytes
      Error error;
      const std::string text = std::string(before, 'a') + character;
      fail(&error, LLA_BUSY, "%s", text.c_str());
      const std::string cut = error.text;
      const size_t kept = std::min<size_t>(before, LLA_ERROR_TEXT_SIZE - 1);
      EXPECT_EQ(cut, text.size() < LLA_ERROR_TEXT_SIZE ? text : std::string(kept, 'a'));
    }
  }
}

TEST(SizeArithmetic, RemembersOverflow) {
  EXPECT_TRUE((Size(3) * 4 + 5).valid());
  EXPECT_EQ((Size(3) * 4 + 5).value(), 17);
  EXPECT_EQ(Size(65).aligned(64).value(), 128);
  EXPECT_FALSE(Size(-1).valid());
  EXPECT_FALSE((Size(INT64_MAX) + 1).valid());
  EXPECT_FALSE((Size(INT64_MAX / 2) * 3 * 0).valid());
  EXPECT_FALSE(Size(INT64_MAX).aligned(64).valid());
}

}  // namespace
