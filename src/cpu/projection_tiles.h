// SPDX-License-Identifier: Apache-2.0
// y = x W^T + bias of bf16 rows and a bf16 weight on matrix tiles, or by dot products in vectors. The weight is the left
// factor, as it lies in memory, for one row as for many; the rows are packed once, in a phase of their own.
#pragma once

#include "cpu/parts.h"
#include "cpu/tiles.h"

namespace lla::cpu {

struct TiledProjection {
  static bool accepts(const void* problem);
  static void measure(const void* problem, const Limits& limits, Need* need);
  static int32_t phases(const void* problem);
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const Simd& simd, const Tiles& tiles, const void* problem, const Limits& limits, const Scratch& scratch,
                  int32_t phase, int64_t task);
  static void run_on_tiles(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
  static void run_on_dots(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

constexpr Kernel kTiledProjection = {Op::ProjectionForward,         "cpu.projection.forward.tiles.avx512",
                                     TiledProjection::accepts,      TiledProjection::measure,
                                     TiledProjection::phases,       TiledProjection::tasks,
                                     TiledProjection::run_on_tiles, nullptr};
constexpr Kernel kDotProjection = {Op::ProjectionForward,        "cpu.projection.forward.dots.avx512",
                                   TiledProjection::accepts,     TiledProjection::measure,
                                   TiledProjection::phases,      TiledProjection::tasks,
                                   TiledProjection::run_on_dots, nullptr};

}  // namespace lla::cpu
