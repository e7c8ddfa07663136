// SPDX-License-Identifier: Apache-2.0
// The tiles of x86 CPUs (AMX): what they are told, and whether a process may use them.
#include "cpu/tiles.h"

#include <bit>
#include <cstring>
#include <utility>

#include "cpu/tiles_unit.h"
#include "plugin/backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tiles.cpp"
#include "cpu/simd_highway.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#if LLA_HAS_TILES && HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
#include "cpu/simd_functions.h"
#include "cpu/tiles_packing.h"
// and what needs both
#include "cpu/dots_product.h"
namespace lla::cpu::HWY_NAMESPACE {
namespace {

// The instruction of AVX512_BF16, which Highway has for newer targets alone.
struct DotUnit {
  static HWY_INLINE V dot(V sum, Words a, Words b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    return sum;
  }
};
void nothing() {}

constexpr Tiles kTiles = {begin_tiles, end_tiles,        tiled_product<TileUnit>, split_rows,
                          pack_pairs,  split_pack_pairs, scale_split_pack_pairs};
constexpr Tiles kDots = {nothing,    nothing,          dots_product<DotUnit>, split_rows,
                         pack_pairs, split_pack_pairs, scale_split_pack_pairs};

}  // namespace

const Tiles* tiles_table() { return &kTiles; }
const Tiles* dots_table() { return &kDots; }

}  // namespace lla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE
#include "lla/context.h"

#if LLA_HAS_TILES && defined(__linux__) && (HWY_TARGETS & HWY_AVX3)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace lla::cpu {
namespace {

bool may_use_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (cpu_isa() != LLA_ISA_AVX512 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kTilesForBf16 = 1u << 22 | 1u << 24;
  if ((d & kTilesForBf16) != kTilesForBf16) return false;
  // Linux saves the tiles of processes that asked for it. It refuses where a thread's signal stack would be too small.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Intel's are half as fast as multiply-adds in fp32, AMD's twice.
bool has_fast_dots() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (cpu_isa() != LLA_ISA_AVX512 || !__get_cpuid(0, &a, &b, &c, &d)) return false;
  const bool amd = b == signature_AMD_ebx && d == signature_AMD_edx && c == signature_AMD_ecx;
  return amd && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

}  // namespace

const Tiles* tiles() {
  static const bool usable = may_use_tiles();
  return usable ? N_AVX3::tiles_table() : nullptr;
}

const Tiles* bf16_dots() {
  static const bool usable = has_fast_dots();
  return usable ? N_AVX3::dots_table() : nullptr;
}

}  // namespace lla::cpu
#else
namespace lla::cpu {

const Tiles* tiles() { return nullptr; }
const Tiles* bf16_dots() { return nullptr; }

}  // namespace lla::cpu
#endif
#endif
