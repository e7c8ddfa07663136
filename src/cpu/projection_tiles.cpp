// SPDX-License-Identifier: Apache-2.0
// The product of a projection on matrix tiles.
#include "cpu/projection_tiles.h"

#include <cstring>

namespace lla::cpu {
namespace {

constexpr int64_t kRows = 128, kOutputs = 64;  // of a tile of y

int64_t padded(int64_t rows) { return ceil_div(rows, kTileRows) * kTileRows; }

// Live rows in blocks of 16, each [inputs / 2][16] words; shared.
Size packed_floats(const Projection& p, const Limits& limits) {
  return (most_live_numbers(limits) + Size(kTileRows)) * Size(p.inputs / 2);
}

struct Arrays {
  float *rows, *products, *tile, *bias;
  void take(Carver* carver, const Projection& p) {
    rows = carver->take(Size(kTileRows) * Size(p.inputs / 2));
    products = carver->take((kOutputs + kTileRows) * kRows);
    tile = carver->take(kRows * kOutputs);
    bias = carver->take(kOutputs);
  }
};

void pack_rows(const Simd& simd, const Projection& p, const Arrays& a, int64_t block, float* packed) {
  const int64_t words = p.inputs / 2, begin = block * kTileRows;
  int64_t row = 0;
  for_pieces(p.batch, begin, least(live_numbers(p.batch), begin + kTileRows), [&](const Piece& piece) {
    for (int64_t t = piece.first; t < piece.last; ++t, ++row) {
      std::memcpy(a.rows + row * words, p.x.at(piece.sequence->index, piece.row(t), 0), static_cast<size_t>(words) * 4);
    }
  });
  std::memset(a.rows + row * words, 0, static_cast<size_t>((kTileRows - row) * words) * 4);
  simd.transpose(kTileRows, words, a.rows, words, packed + block * words * kTileRows, kTileRows);
}

void multiply_rows(const Simd& simd, const Tiles& tiles, const Projection& p, const Arrays& a, int64_t task,
                   const float* packed) {
  const int64_t numbers = live_numbers(p.batch), blocks = ceil_div(numbers, kRows), words = p.inputs / 2;
  LLA_CONTRACT(blocks > 0);  // no rows: no task
  const int64_t begin = task % blocks * kRows, end = least(numbers, begin + kRows);
  const int64_t first = task / blocks * kOutputs, outputs = least(kOutputs, p.outputs - first);
  const int64_t columns = padded(end - begin), whole = outputs / kTileRows * kTileRows;
  const auto* right = reinterpret_cast<const uint32_t*>(packed + begin * words);
  float* products = a.products + kTileRows * kRows;
  const auto multiply = [&](int64_t at, int64_t count) {
    const auto* left = static_cast<const uint16_t*>(p.weight.at(first + at));
    tiles.product(count, columns, p.inputs, left, 0, p.weight.row_stride, right, 0, words * kTileRows, products + at * kRows,
                  kRows);
  };
  tiles.begin();
  if (whole > 0) multiply(0, whole);
  if (whole < outputs)
    multiply(outputs - kTileRows, kTileRows);  // the last 16 once more, so that no row beyond them is read
  tiles.end();

  simd.transpose(outputs, columns, products, kRows, a.tile, outputs);
  const bool biased = p.bias.present();
  if (biased) load_weight(simd, p.bias, 0, first, outputs, a.bias);
  for (int64_t at = begin; at < end; at += kTileRows) {
    float* tile = a.tile + (at - begin) * outputs;
    for_pieces(p.batch, at, least(end, at + kTileRows), [&](const Piece& piece) {
      for (int64_t t = piece.first; t < piece.last; ++t, tile += outputs) {
        if (biased) simd.add_scaled(tile, a.bias, 1, outputs);
        store_span(simd, p.y, piece.sequence->index, piece.row(t), first, outputs, tile);
      }
    });
  }
}

}  // namespace

bool TiledProjection::accepts(const void* problem) {
  const Projection& p = *static_cast<const Projection*>(problem);
  return narrow_types(p.y, p.bias) && p.x.dtype == LLA_BF16 && p.weight.dtype == LLA_BF16 && p.inputs % kTileDepth == 0 &&
         p.outputs >= kTileRows;
}

void TiledProjection::measure(const void* problem, const Limits& limits, Need* need) {
  const Projection& p = *static_cast<const Projection*>(problem);
  Carver shared, thread;
  shared.take(packed_floats(p, limits));
  Arrays().take(&thread, p);
  set_need(shared.bytes(), thread.bytes(), need);
}

int32_t TiledProjection::phases(const void*) { return 2; }

int64_t TiledProjection::tasks(const void* problem, int32_t phase) {
  const Projection& p = *static_cast<const Projection*>(problem);
  const int64_t numbers = live_numbers(p.batch);
  return phase == 0 ? ceil_div(numbers, kTileRows) : ceil_div(numbers, kRows) * ceil_div(p.outputs, kOutputs);
}

void TiledProjection::run(const Simd& simd, const Tiles& tiles, const void* problem, const Limits& limits,
                          const Scratch& scratch, int32_t phase, int64_t task) {
  const Projection& p = *static_cast<const Projection*>(problem);
  Carver shared(scratch.shared), thread(scratch.thread);
  float* packed = shared.take(packed_floats(p, limits));
  Arrays a;
  a.take(&thread, p);
  if (phase == 0)
    pack_rows(simd, p, a, task, packed);
  else
    multiply_rows(simd, tiles, p, a, task, packed);
}

void TiledProjection::run_on_tiles(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase,
                                   int64_t task) {
  const Arithmetic arithmetic;
  run(simd(LLA_ISA_AVX512), *tiles(), problem, limits, scratch, phase, task);
}

void TiledProjection::run_on_dots(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase,
                                  int64_t task) {
  const Arithmetic arithmetic;
  run(simd(LLA_ISA_AVX512), *bf16_dots(), problem, limits, scratch, phase, task);
}

}  // namespace lla::cpu
