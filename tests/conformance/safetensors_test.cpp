// SPDX-License-Identifier: Apache-2.0
// The safetensors reader against damaged files: every one is either refused with an Error or read to something consistent.
#include "safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "error.h"
#include "random.h"

namespace {

std::string file_of(const std::string& header, const std::string& data) {
  std::string out;
  const uint64_t length = header.size();
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>((length >> (8 * i)) & 255));
  return out + header + data;
}

lm::TensorFile sample() {
  lm::TensorFile file;
  file.tensors["a"] = lm::Tensor::of({1, 2, 3, 4, 5, 6}, LLA_F32, {2, 3});
  file.tensors["b"] = lm::Tensor::of({0.5, -0.25}, LLA_BF16, {2});
  file.tensors["empty"] = lm::Tensor(LLA_F64, {0, 4});
  file.tensors["scalar"] = lm::Tensor::of({7}, LLA_F64, {});
  file.metadata["format"] = "pt";
  return file;
}

// The message of the refusal, empty if the bytes were accepted.
std::string refusal(std::string_view bytes) {
  try {
    lm::parse_safetensors(bytes, "test");
    return "";
  } catch (const lm::Error& e) {
    return e.what();
  }
}

TEST(Safetensors, ReadsWhatItWrote) {
  const lm::TensorFile file = sample(), again = lm::parse_safetensors(lm::format_safetensors(file), "test");
  ASSERT_EQ(again.tensors.size(), file.tensors.size());
  for (const auto& [name, tensor] : file.tensors) {
    EXPECT_EQ(again.at(name).dtype, tensor.dtype);
    EXPECT_EQ(again.at(name).shape, tensor.shape);
    EXPECT_EQ(again.at(name).bytes, tensor.bytes);
  }
  EXPECT_EQ(again.metadata, file.metadata);
  EXPECT_THROW(again.at("missing"), lm::Error);
}

TEST(Safetensors, FilesAreLittleEndianEverywhere) {
  lm::TensorFile file;
  file.tensors["a"] = lm::Tensor::of({1, -2}, LLA_F32, {2});
  const std::string bytes = lm::format_safetensors(file);
  EXPECT_EQ(bytes.substr(bytes.size() - 8), std::string("\0\0\x80\x3f\0\0\0\xc0", 8));
  EXPECT_EQ(lm::parse_safetensors(bytes, "test").at("a").f32()[1], -2.0f);
}

TEST(Safetensors, RefusesWhatIsWrongAndSaysWhy) {
  const std::string four(4, '\0'), eight(8, '\0');
  const auto one = [](const std::string& entry) { return "{\"a\":" + entry + "}"; };
  EXPECT_NE(refusal("").find("length field"), std::string::npos);
  EXPECT_NE(refusal(std::string(8, '\xff')).find("longer than the file"), std::string::npos);
  EXPECT_NE(refusal(file_of("nonsense", "")).find("no JSON object"), std::string::npos);
  EXPECT_NE(refusal(file_of("[1,2]", "")).find("no JSON object"), std::string::npos);
  EXPECT_NE(refusal(file_of(std::string(100000, '['), "")).find("too deeply"), std::string::npos);
  EXPECT_NE(refusal(file_of(one("7"), "")).find("missing"), std::string::npos);
  EXPECT_NE(refusal(file_of(one("{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}"), four)).find("F33"),
            std::string::npos);
  EXPECT_NE(refusal(file_of(one("{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}"), four)).find("integer"),
            std::string::npos);
  EXPECT_NE(refusal(file_of(one("{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}"), four)).find("integer"),
            std::string::npos);
  EXPECT_NE(refusal(file_of(one("{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}"), four))
                .find("overflows"),
            std::string::npos);
  EXPECT_NE(refusal(file_of(one("{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}"), four)).find("disagree"),
            std::string::npos);
  EXPECT_NE(refusal(file_of(one("{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}"), four)).find("outside"),
            std::string::npos);
  EXPECT_NE(refusal(file_of(one("{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}"), eight)).find("outside"),
            std::string::npos);
  EXPECT_NE(refusal(file_of(one("{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}"), eight)).find("hole"),
            std::string::npos);
  EXPECT_NE(refusal(file_of(one("{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}"), eight)).find("after the last"),
            std::string::npos);
  EXPECT_NE(refusal(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                            "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
                            eight))
                .find("overlaps"),
            std::string::npos);
  EXPECT_NE(refusal(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                            "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
                            eight))
                .find("twice"),
            std::string::npos);
  EXPECT_NE(refusal(file_of("{\"__metadata__\":{\"x\":1}}", "")).find("no text"), std::string::npos);
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string bytes = lm::format_safetensors(sample());
  for (size_t n = 0; n < bytes.size(); ++n) {
    // Not a std::string, which has a NUL behind its bytes: a sanitizer sees a read behind these.
    const auto cut = std::make_unique<char[]>(n);
    std::memcpy(cut.get(), bytes.data(), n);
    EXPECT_NE(refusal({cut.get(), n}), "") << n << " bytes were accepted";
  }
  EXPECT_NE(refusal(bytes + '\0'), "");
}

TEST(Safetensors, MutatedFilesAreRefusedOrConsistent) {
  const std::string bytes = lm::format_safetensors(sample());
  size_t header = 0;
  for (size_t i = 8; i-- > 0;) header = header << 8 | static_cast<unsigned char>(bytes[i]);
  lm::Random random(20240607, 1);
  constexpr char kUseful[] = "0123456789[]{}\":,-.eFBI_ \0\xff\\";
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string mutated = bytes;
    const int64_t changes = 1 + random.below(4);
    for (int64_t i = 0; i < changes; ++i) {
      const auto at = static_cast<size_t>(random.below(static_cast<int64_t>(8 + header)));
      switch (random.below(4)) {
        case 0:
          mutated[at % mutated.size()] = static_cast<char>(random.bits());
          break;
        case 1:
          mutated[at % mutated.size()] = kUseful[random.below(sizeof kUseful - 1)];
          break;
        case 2:
          mutated.erase(at % mutated.size(), 1 + static_cast<size_t>(random.below(8)));
          break;
        default:
          mutated.insert(at % mutated.size(), 1, kUseful[random.below(sizeof kUseful - 1)]);
          break;
      }
    }
    try {
      const lm::TensorFile file = lm::parse_safetensors(mutated, "test");
      size_t total = 0;
      for (const auto& [name, tensor] : file.tensors) {
        EXPECT_EQ(tensor.bytes.size(), static_cast<size_t>(tensor.count()) * lla_dtype_size(tensor.dtype));
        total += tensor.bytes.size();
      }
      EXPECT_LE(total, mutated.size());
    } catch (const lm::Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 10000);
}

TEST(ElementTypes, RoundOnceToNearestEven) {
  // Every finite half and bfloat16 survives the way through double, and midpoints go to the even neighbour.
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float f = lm::f16_to_float(half), b = lm::bf16_to_float(half);
    if (f == f) {
      EXPECT_EQ(lm::float_to_f16(f), half);
    }
    if (b == b) {
      EXPECT_EQ(lm::float_to_bf16(b), half);
      EXPECT_EQ(lm::double_to_bf16(b), half);
    }
  }
  EXPECT_EQ(lm::double_to_f16(1 + 0x1p-11), 0x3c00);            // midpoint, even below
  EXPECT_EQ(lm::double_to_f16(1 + 3 * 0x1p-11), 0x3c02);        // midpoint, even above
  EXPECT_EQ(lm::double_to_f16(1 + 0x1p-11 + 0x1p-40), 0x3c01);  // just above: a detour through float would lose it
  EXPECT_EQ(lm::double_to_bf16(1 + 0x1p-8 + 0x1p-40), 0x3f81);
  EXPECT_EQ(lm::double_to_bf16(1 + 0x1p-8), 0x3f80);
  EXPECT_EQ(lm::double_to_f16(65519), 0x7bff);
  EXPECT_EQ(lm::double_to_f16(65520), 0x7c00);
}

}  // namespace
