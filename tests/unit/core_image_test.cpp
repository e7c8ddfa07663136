// SPDX-License-Identifier: Apache-2.0
// Exported images: round trips, refusals of damaged, cut, foreign and hostile bytes.
#include <cstring>

#include "core/image_format.h"
#include "core_testing.h"

using namespace core_testing;

namespace {

class ImageTest : public testing::Test {
 protected:
  ImageTest() {
    LayerHistory log_linear = with_convolution(mixer(LLA_SCALAR_GATE, 4, 8), 3, 4);
    log_linear.shape.heads = 2;
    log_linear.shape.key_dim = 3;
    log_linear.shape.value_dim = 2;
    layers_ = {log_linear, mixer(LLA_DELTA_RULE, 4, 0), mixer(LLA_DELTA_RULE, 4, 7), convolution(4, 1, 2)};
    description_.slots = 3;
    description_.max_length = 60;
    state_ = make_state(context_.get(), layers_, description_);
    fill(state_.get(), 0, 27);
  }
  // A slot with contents: six chunks (nodes 1 and 2) and three rows.
  static void fill(State* state, int64_t slot, int64_t position) {
    ASSERT_EQ(state->reset(&slot, 1, &position, nullptr), LLA_OK);
    float next = 1;
    const auto write = [&](int64_t layer, lla_state_part part, int64_t index, int64_t d0, int64_t d1, int64_t d2) {
      std::vector<float> values(200);
      for (float& value : values) value = next++;
      Error error;
      EXPECT_EQ(
          state->write(slot, layer, part, index, lla_tensor_of(values.data(), LLA_F32, d0, d1, d2, -1), nullptr, &error),
          LLA_OK)
          << error.text;
    };
    for (int64_t b = 1; b <= 2; ++b) {
      write(0, LLA_PART_NODE, b, 2, 3, 2);
      write(0, LLA_PART_NODE_DECAY, b, 2, -1, -1);
      write(2, LLA_PART_NODE, b, 1, 1, 1);
    }
    write(1, LLA_PART_ABSORBED, 0, 1, 1, 1);
    const int64_t rows = position % 4;
    for (int64_t layer = 0; layer < 3 && rows > 0; ++layer) {
      const int64_t heads = layer == 0 ? 2 : 1, dk = layer == 0 ? 3 : 1, dv = layer == 0 ? 2 : 1;
      write(layer, LLA_PART_TAIL_K, 0, rows, layer == 0 ? 1 : 1, dk);
      write(layer, LLA_PART_TAIL_V, 0, rows, heads, dv);
      write(layer, LLA_PART_TAIL_GATE, 0, rows, heads, -1);
      write(layer, LLA_PART_TAIL_WRITE, 0, rows, heads, -1);
    }
    write(0, LLA_PART_CONV, 0, 3, 3, -1);
    write(3, LLA_PART_CONV, 0, 1, 1, -1);
  }
  static std::vector<char> image_of(const State& state, int64_t slot, const char* tag = nullptr) {
    size_t bytes = 0;
    EXPECT_EQ(state.export_size(slot, &bytes, nullptr), LLA_OK);
    std::vector<char> image(bytes);
    EXPECT_EQ(state.pack(slot, image.data(), bytes, nullptr, nullptr), LLA_OK);
    EXPECT_EQ(seal_image(image.data(), bytes, tag, nullptr), LLA_OK);
    return image;
  }
  lla_status check(const std::vector<char>& image) {
    return check_image(image.data(), image.size(), nullptr, nullptr, &error_);
  }
  lla_status unpack(const std::vector<char>& image, int64_t slot = 1) {
    return state_->unpack(slot, image.data(), image.size(), nullptr, &error_);
  }
  static void reseal(std::vector<char>* image) {
    ASSERT_EQ(seal_image(image->data(), image->size(), image->data() + image::kTagAt, nullptr), LLA_OK);
  }

  ContextPointer context_ = cpu_context();
  std::vector<LayerHistory> layers_;
  lla_state_desc description_ = LLA_STATE_DESC_INIT;
  StatePointer state_;
  Error error_;
};

TEST_F(ImageTest, RoundTripsBitForBit) {
  const std::vector<char> image = image_of(*state_, 0);
  EXPECT_EQ(check(image), LLA_OK) << error_.text;
  ASSERT_EQ(unpack(image), LLA_OK) << error_.text;
  EXPECT_EQ(image_of(*state_, 1), image);
  const SlotImage& copy = state_->record(1).image;
  EXPECT_EQ(copy.position, 27);
  EXPECT_EQ(copy.start, 24);
  EXPECT_NE(copy.node[1], state_->record(0).image.node[1]);
  EXPECT_EQ(state_->min_length(1), state_->min_length(0));
  // Into another state, onto a slot that holds something.
  const StatePointer other = make_state(context_.get(), layers_, description_);
  fill(other.get(), 2, 25);
  const int64_t free = other->free_nodes();
  ASSERT_EQ(other->unpack(2, image.data(), image.size(), nullptr, &error_), LLA_OK) << error_.text;
  EXPECT_EQ(image_of(*other, 2), image);
  EXPECT_EQ(other->free_nodes(), free);
  // Bytes need no alignment, and may be followed by others.
  std::vector<char> shifted(image.size() + 3, 'x');
  std::copy(image.begin(), image.end(), shifted.begin() + 1);
  EXPECT_EQ(check_image(shifted.data() + 1, image.size() + 2, nullptr, nullptr, &error_), LLA_OK);
  EXPECT_EQ(state_->unpack(2, shifted.data() + 1, image.size() + 2, nullptr, &error_), LLA_OK);
  EXPECT_EQ(image_of(*state_, 2), image);
}

// Probe H9.
TEST_F(ImageTest, EmptySlotsHaveImages) {
  const int64_t slot = 2, position = 9;
  ASSERT_EQ(state_->reset(&slot, 1, &position, nullptr), LLA_OK);
  const std::vector<char> image = image_of(*state_, 2);
  ASSERT_EQ(unpack(image, 0), LLA_OK);
  EXPECT_TRUE(state_->is_empty(0));
  EXPECT_EQ(state_->record(0).image.position, 9);
}

TEST_F(ImageTest, SizeGrowsWithLiveNodesOnly) {
  size_t full = 0, few = 0;
  const int64_t slot = 2;
  const auto size_at = [&](int64_t position, size_t* bytes) {
    ASSERT_EQ(state_->reset(&slot, 1, &position, nullptr), LLA_OK);
    for (int b = 0; b < 4; ++b) {
      if (((position / 4) >> b) & 1) {
        float values[12] = {};
        ASSERT_EQ(state_->write(2, 0, LLA_PART_NODE, b, lla_tensor_of(values, LLA_F32, 2, 3, 2, -1), nullptr, nullptr),
                  LLA_OK);
      }
    }
    ASSERT_EQ(state_->export_size(2, bytes, nullptr), LLA_OK);
  };
  size_at(28, &full);  // nodes 0, 1, 2
  size_at(32, &few);   // node 3
  EXPECT_EQ(full - few, 2 * ((12 + 2) * 4 + 4 + 4));
}

TEST_F(ImageTest, CarriesTheTagAndTellsAboutItself) {
  char tag[LLA_TAG_SIZE];
  for (int i = 0; i < LLA_TAG_SIZE; ++i) tag[i] = static_cast<char>(i + 1);
  const std::vector<char> image = image_of(*state_, 0, tag);
  lla_image_info info = {};
  info.struct_size = sizeof info;
  ASSERT_EQ(check_image(image.data(), image.size(), tag, &info, nullptr), LLA_OK);
  EXPECT_EQ(info.bytes, static_cast<int64_t>(image.size()));
  EXPECT_EQ(info.position, 27);
  EXPECT_EQ(info.layers, 4);
  EXPECT_EQ(info.grain, 4);
  EXPECT_EQ(info.format, 1);
  EXPECT_EQ(std::memcmp(info.tag, tag, sizeof tag), 0);
  EXPECT_EQ(check_image(image.data(), image.size(), nullptr, nullptr, nullptr), LLA_OK);
  tag[63] ^= 1;
  EXPECT_EQ(check_image(image.data(), image.size(), tag, nullptr, &error_), LLA_STATE_INCOMPATIBLE);
  EXPECT_STREQ(error_.text, "tag: the image carries another one");
  info.struct_size = 8;
  EXPECT_EQ(check_image(image.data(), image.size(), nullptr, &info, nullptr), LLA_STRUCT_VERSION);
}

// Probe H9.
TEST_F(ImageTest, AnUnsealedImageIsNoImage) {
  size_t bytes = 0;
  ASSERT_EQ(state_->export_size(0, &bytes, nullptr), LLA_OK);
  std::vector<char> image(bytes);
  EXPECT_EQ(state_->pack(0, image.data(), bytes - 1, nullptr, nullptr), LLA_BUFFER_TOO_SMALL);
  ASSERT_EQ(state_->pack(0, image.data(), bytes, nullptr, nullptr), LLA_OK);
  EXPECT_EQ(check(image), LLA_DATA_CORRUPT);
  EXPECT_EQ(unpack(image), LLA_DATA_CORRUPT);
  EXPECT_EQ(seal_image(image.data(), bytes - 1, nullptr, nullptr), LLA_BUFFER_TOO_SMALL);
  EXPECT_EQ(seal_image(image.data(), 10, nullptr, nullptr), LLA_DATA_CORRUPT);
  std::vector<char> noise(bytes, 'n');
  EXPECT_EQ(seal_image(noise.data(), bytes, nullptr, nullptr), LLA_DATA_CORRUPT);
}

TEST_F(ImageTest, EveryFlippedBitIsFound) {
  std::vector<char> image = image_of(*state_, 0);
  for (size_t i = 0; i < image.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      image[i] = static_cast<char>(image[i] ^ (1 << bit));
      ASSERT_NE(check(image), LLA_OK) << "byte " << i << " bit " << bit;
      image[i] = static_cast<char>(image[i] ^ (1 << bit));
    }
  }
  EXPECT_EQ(check(image), LLA_OK);
}

TEST_F(ImageTest, EveryTruncationIsFound) {
  const std::vector<char> image = image_of(*state_, 0);
  for (size_t size = 0; size < image.size(); ++size) {
    const std::vector<char> cut(image.begin(), image.begin() + static_cast<std::ptrdiff_t>(size));  // no byte behind it
    ASSERT_EQ(check(cut), LLA_DATA_CORRUPT) << size;
    ASSERT_EQ(unpack(cut), LLA_DATA_CORRUPT) << size;
  }
}

TEST_F(ImageTest, SwappedWordsAreFound) {
  const std::vector<char> image = image_of(*state_, 0);
  for (size_t i = image::kHeaderBytes; i + 16 <= image.size(); i += 8) {
    for (const size_t distance : {8, 32}) {
      if (i + distance + 8 > image.size()) continue;
      std::vector<char> swapped = image;
      std::swap_ranges(swapped.begin() + static_cast<std::ptrdiff_t>(i),
                       swapped.begin() + static_cast<std::ptrdiff_t>(i + 8),
                       swapped.begin() + static_cast<std::ptrdiff_t>(i + distance));
      ASSERT_TRUE(swapped == image || check(swapped) != LLA_OK) << i;
    }
  }
}

TEST_F(ImageTest, ForeignFormatsAreNamed) {
  std::vector<char> image = image_of(*state_, 0);
  image::put(image.data() + image::kFormatAt, 2, 4);
  EXPECT_EQ(check(image), LLA_STATE_INCOMPATIBLE);
  EXPECT_STREQ(error_.text, "buffer: the image has format 2, this library knows 1");
  image = image_of(*state_, 0);
  image::put(image.data() + image::kByteOrderAt, 0x04030201u, 4);
  EXPECT_EQ(check(image), LLA_STATE_INCOMPATIBLE);
}

// Probe E7.
TEST_F(ImageTest, OtherGroupsAreRefused) {
  const std::vector<char> image = image_of(*state_, 0);
  const auto into = [&](const std::vector<LayerHistory>& layers, const lla_state_desc& description) {
    const StatePointer other = make_state(context_.get(), layers, description);
    return other->unpack(0, image.data(), image.size(), nullptr, &error_);
  };
  EXPECT_EQ(into(layers_, description_), LLA_OK);
  auto layers = layers_;
  layers[0].shape.value_dim = 3;
  EXPECT_EQ(into(layers, description_), LLA_STATE_INCOMPATIBLE);
  EXPECT_STREQ(error_.text, "buffer: layer 0 of the image has other sizes or types");
  layers = layers_;
  layers[1].shape.mixer = LLA_SCALAR_GATE;
  EXPECT_EQ(into(layers, description_), LLA_STATE_INCOMPATIBLE);
  layers = layers_;
  layers[3].conv_channels = 2;
  EXPECT_EQ(into(layers, description_), LLA_STATE_INCOMPATIBLE);
  layers = layers_;
  layers.pop_back();
  EXPECT_EQ(into(layers, description_), LLA_STATE_INCOMPATIBLE);
  auto description = description_;
  description.tail_dtype = LLA_BF16;
  EXPECT_EQ(into(layers_, description), LLA_STATE_INCOMPATIBLE);
  description = description_;
  description.kind = LLA_STATE_GRADIENT;
  EXPECT_EQ(into(layers_, description), LLA_STATE_INCOMPATIBLE);
  description = description_;
  description.max_length = 26;
  EXPECT_EQ(into(layers_, description), LLA_LEVELS_EXCEEDED);
  description = description_;
  description.node_blocks = 2;
  EXPECT_EQ(into(layers_, description), LLA_NO_BLOCKS);
}

// Bytes with a right checksum, but a record that contradicts itself: refused before a content byte is read.
TEST_F(ImageTest, ContradictionsAreRefusedAndChangeNothing) {
  const std::vector<char> good = image_of(*state_, 0);
  ASSERT_EQ(unpack(good), LLA_OK);
  const auto refused = [&](int64_t at, uint64_t value, lla_status status) {
    std::vector<char> image = good;
    image::put(image.data() + at, value, 8);
    reseal(&image);
    EXPECT_EQ(check(image), LLA_OK);
    EXPECT_EQ(unpack(image), status) << at << " " << value << " " << error_.text;
    EXPECT_TRUE(image_of(*state_, 1) == good);
  };
  refused(image::kPositionAt, 26, LLA_DATA_CORRUPT);
  refused(image::kPositionAt, 30, LLA_DATA_CORRUPT);
  refused(image::kPositionAt, 61, LLA_LEVELS_EXCEEDED);
  refused(image::kPositionAt, UINT64_MAX, LLA_DATA_CORRUPT);
  refused(image::kPositionAt, uint64_t{1} << 62, LLA_LEVELS_EXCEEDED);
  refused(image::kStartAt, 25, LLA_DATA_CORRUPT);
  refused(image::kStartAt, 28, LLA_DATA_CORRUPT);
  refused(image::kStartAt, UINT64_MAX, LLA_DATA_CORRUPT);
  refused(image::kFloorAt, 28, LLA_DATA_CORRUPT);
  refused(image::kFloorAt, UINT64_MAX, LLA_DATA_CORRUPT);
  refused(image::kConvRowsAt, 2, LLA_DATA_CORRUPT);
  refused(image::kConvRowsAt, 4, LLA_DATA_CORRUPT);
  refused(image::kConvRowsAt, uint64_t{1} << 40, LLA_DATA_CORRUPT);
  refused(image::kNodesAt, 6, LLA_DATA_CORRUPT);                               // without the absorbing one
  refused(image::kNodesAt, 7 | (uint64_t{1} << kAbsorbed), LLA_DATA_CORRUPT);  // a node too many
  refused(image::kNodesAt, 6 | (uint64_t{1} << 63), LLA_DATA_CORRUPT);
  refused(image::kLayersAt, 3, LLA_STATE_INCOMPATIBLE);
  refused(image::kLayersAt, UINT64_MAX, LLA_STATE_INCOMPATIBLE);
  refused(image::kGrainAt, 0, LLA_STATE_INCOMPATIBLE);
  refused(image::kBytesAt, image::kHeaderBytes, LLA_DATA_CORRUPT);
}

// Random damage with a right checksum must never crash or read outside (run under the sanitizers).
TEST_F(ImageTest, RandomDamageIsHarmless) {
  const std::vector<char> good = image_of(*state_, 0);
  Random random(5);
  int64_t accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::vector<char> image = good;
    const int64_t end = random.one_in(2) ? image::kHeaderBytes : static_cast<int64_t>(image.size());
    for (int64_t changes = 1 + random.below(4); changes > 0; --changes)
      image[static_cast<size_t>(random.below(end))] = static_cast<char>(random.bits());
    if (seal_image(image.data(), image.size(), nullptr, nullptr) != LLA_OK) continue;
    if (check(image) != LLA_OK) continue;
    if (unpack(image) == LLA_OK) ++accepted;
    // Whatever came in can be exported and dropped again.
    image_of(*state_, 1);
  }
  EXPECT_GT(accepted, 0);  // damage in the contents alone is not to be seen without the checksum
  ASSERT_EQ(state_->reset(nullptr, 0, nullptr, nullptr), LLA_OK);
  EXPECT_EQ(state_->free_nodes(), state_->plan().node_blocks);
}

}  // namespace
