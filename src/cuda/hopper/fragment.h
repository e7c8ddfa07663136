// SPDX-License-Identifier: Apache-2.0
// Which element of a matrix a thread holds, for mma, wgmma, ldmatrix and stmatrix. Plain C++: pure functions. `lane` is the
// thread's number in its warp, `thread` in its warpgroup of 128, i the element's number in the thread's fragment, in the
// order of the registers (two 2-byte elements in one, the lower half first).
#pragma once

namespace lla::cuda::hopper {

struct Place {
  int row, column;
  friend constexpr bool operator==(const Place& a, const Place& b) { return a.row == b.row && a.column == b.column; }
};

// mma.m16n8k8 with tf32: A 16 x 8 (4 elements a thread), B 8 x 8 (2).
constexpr Place mma_k8_a(int lane, int i) { return {lane / 4 + 8 * (i % 2), lane % 4 + 4 * (i / 2)}; }
constexpr Place mma_k8_b(int lane, int i) { return {lane % 4 + 4 * i, lane / 4}; }

// mma.m16n8k16 with bf16 or fp16: A 16 x 16 (8 elements), B 16 x 8 (4).
constexpr Place mma_k16_a(int lane, int i) { return {lane / 4 + 8 * (i / 2 % 2), 2 * (lane % 4) + i % 2 + 8 * (i / 4)}; }
constexpr Place mma_k16_b(int lane, int i) { return {2 * (lane % 4) + i % 2 + 8 * (i / 2), lane / 4}; }

// The accumulator of both, 16 x 8 (4 elements).
constexpr Place mma_sum(int lane, int i) { return {lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2}; }

// wgmma.m64nNk16: the accumulator 64 x N (N / 2 elements); warp w of the group has rows 16 w ....
constexpr Place wgmma_sum(int thread, int i) {
  const int lane = thread % 32;
  return {16 * (thread / 32) + lane / 4 + 8 * (i / 2 % 2), 2 * (lane % 4) + i % 2 + 8 * (i / 4)};
}

// The same with A in registers, 64 x 16 (8 elements). It is the place of the accumulator's elements 8 s + i less 16 s
// columns: a sum, rounded in place, is the A operand of the next product at depth 16 s.
constexpr Place wgmma_a(int thread, int i) { return wgmma_sum(thread, i); }

// ldmatrix and stmatrix move matrices of 8 x 8 2-byte elements. Lane l gives the address of row matrix_row(l).row of matrix
// number matrix_row(l).column, and holds elements i = 0, 1 of every matrix in that matrix's register.
constexpr Place matrix_row(int lane) { return {lane % 8, lane / 8}; }
constexpr Place matrix_element(int lane, int i) { return {lane / 4, 2 * (lane % 4) + i}; }
constexpr Place matrix_element_transposed(int lane, int i) { return {2 * (lane % 4) + i, lane / 4}; }

// Addresses that a lane gives to a four-matrix move, as (row, first of 8 columns) in a 16 x 16 block, so that the registers
// are in the order of mma_k16_a and wgmma_a, or of elements 8 s ... 8 s + 7 of an accumulator:
// - the block stored [row][column]: plain move;
constexpr Place block_row(int lane) { return {lane % 16, 8 * (lane / 16)}; }
// - the block stored [column][row], the address being that of (column, first of 8 rows): .trans.
constexpr Place block_row_transposed(int lane) { return {lane % 8 + 8 * (lane / 16), 8 * (lane / 8 % 2)}; }
// Registers 0, 1 and 2, 3 are then mma_k16_b of two neighbouring eights of columns, in a block of 16 x 16 of B
// - stored [k][column]: .trans at block_row(lane);
// - stored [column][k]: plain at block_row_transposed(lane).

}  // namespace lla::cuda::hopper
