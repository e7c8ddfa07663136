// SPDX-License-Identifier: Apache-2.0
// The exported image of a slot, byte by byte, and its checksum. Everything is little-endian and packed.
//
//   header   kHeaderBytes, fields at the offsets below
//   layers   kLayerBytes each: what must be equal in the state that imports
//   content  by layer: the nodes that the layer uses, from level 0 up, the absorbing one last: content [H, dk, dv], then log
//            decays [H] (0 for the delta rule); tail rows k [G, m, dk], v [H, m, dv], gate [H, m], write [H, m], m rows from
//            the start of the chunk (or of the sequence) on; convolution inputs [channels, conv_rows], oldest first
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lla::image {

constexpr char kMagic[8] = {'l', 'l', 'a', 's', 't', 'a', 't', 'e'};
constexpr uint32_t kFormat = 1;
constexpr uint32_t kByteOrder = 0x01020304u;
constexpr uint32_t kSealed = 1;

constexpr int64_t kMagicAt = 0;
constexpr int64_t kFormatAt = 8;      // u32
constexpr int64_t kByteOrderAt = 12;  // u32
constexpr int64_t kBytesAt = 16;      // u64, of the whole image
constexpr int64_t kChecksumAt = 24;   // u64, of the whole image with this field 0
constexpr int64_t kSealAt = 32;       // u32: kSealed, 0 before the seal
constexpr int64_t kKindAt = 36;       // u32
constexpr int64_t kPositionAt = 40;   // i64
constexpr int64_t kStartAt = 48;      // i64
constexpr int64_t kLayersAt = 56;     // i64
constexpr int64_t kGrainAt = 64;      // i64
constexpr int64_t kConvRowsAt = 72;   // i64
constexpr int64_t kNodesAt = 80;      // u64: bit b: node b is there
constexpr int64_t kFloorAt = 88;      // i64
constexpr int64_t kTagAt = 96;        // LLA_TAG_SIZE bytes
constexpr int64_t kHeaderBytes = 160;
constexpr int64_t kLayerBytes = 96;

inline void put(char* to, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<char>(value >> (8 * i));
}
inline uint64_t get(const char* from, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(static_cast<unsigned char>(from[i])) << (8 * i);
  return value;
}

// Copies elements between memory and the image; the two directions are the same.
inline void copy_elements(char* to, const char* from, int64_t size, int64_t elements) {
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(to, from, static_cast<size_t>(size * elements));
  } else {
    for (int64_t i = 0; i < elements; ++i) {
      for (int64_t j = 0; j < size; ++j) to[i * size + j] = from[i * size + size - 1 - j];
    }
  }
}

// Four sums of 64-bit words in turn. Each step maps a sum, and also a word, one to one, so that a change within one word
// always changes the result.
inline uint64_t checksum(const char* data, int64_t bytes) {
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15u;
  uint64_t sums[4] = {1, 2, 3, 4};
  const auto mix = [](uint64_t sum, uint64_t word) { return std::rotl((sum ^ word) * kFactor, 29); };
  const auto word_at = [](const char* from) {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
    return word;
  };
  int64_t at = 0;
  for (; at + 32 <= bytes; at += 32) {
    for (int lane = 0; lane < 4; ++lane) {
      const int64_t here = at + 8 * lane;
      sums[lane] = mix(sums[lane], here == kChecksumAt ? 0 : word_at(data + here));
    }
  }
  char rest[32] = {};
  std::memcpy(rest, data + at, static_cast<size_t>(bytes - at));
  for (int lane = 0; lane < 4; ++lane) sums[lane] = mix(sums[lane], word_at(rest + 8 * lane));
  uint64_t result = static_cast<uint64_t>(bytes);
  for (const uint64_t sum : sums) result = mix(result, sum);
  return mix(result, result >> 32);
}

}  // namespace lla::image
