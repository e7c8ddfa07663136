// SPDX-License-Identifier: Apache-2.0
// What src/cuda/hopper needs of the emulator: barriers in shared memory, bulk tensor copies, products of warpgroups, matrix
// moves, numbered barriers. Copies and products happen by themselves, at once or as late as their waits allow, which one by a
// fixed pseudo-random choice: a kernel that forgets a wait meets old numbers or overwritten ones. Mistakes that would hang or
// trap a device abort with a message. Link hopper_emulator.cpp.
#pragma once

#include "cuda_emulator.h"

// A tensor in memory and the box that one copy moves (the driver's own record is opaque).
struct CUtensorMap {
  char* data;
  int64_t extents[4], strides[4];  // strides[0] is the element's size
  int32_t box[4];
  int32_t rank;
};

namespace emulator {

// When copies and products happen. Tests of the emulator set it; it begins as kMixed.
enum class Order { kMixed, kEarly, kLate };
extern thread_local Order order;

// The dynamic shared memory begins at 1024, as on a device; static shared memory has bit 31.
uint32_t shared_address(const void* pointer);
char* shared_pointer(uint32_t address);

// The two floats, rounded to bf16 or fp16, in one word.
uint32_t pack_bf16(float low, float high);
uint32_t pack_f16(float low, float high);
// ldmatrix and stmatrix of 2 or 4 matrices.
void load_matrices(uint32_t* to, int count, bool transposed, uint32_t row);
void store_matrices(uint32_t row, const uint32_t* from, int count, bool transposed);

// ---- barriers --------------------------------------------------------------------------------------------------------------

void init_barrier(uint64_t* barrier, uint32_t arrivals);
void arrive(uint64_t* barrier, uint32_t bytes);  // with the announcement of bytes
void wait_parity(uint64_t* barrier, uint32_t parity);
void sync_number(int number, int threads);
void arrive_number(int number, int threads);

// ---- bulk tensor copies ----------------------------------------------------------------------------------------------------

void load_box(void* to, const CUtensorMap* map, const int32_t* at, int rank, uint64_t* barrier);
void load_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier);
void store_box(const CUtensorMap* map, const int32_t* at, int rank, const void* from);
void commit_stores();
void wait_stores(int groups);

// ---- products of a warpgroup -----------------------------------------------------------------------------------------------

struct ProductForm {
  int columns;
  bool bf16, a_outer, b_outer, a_registers;
  bool operator==(const ProductForm&) const = default;
};
// a_registers: this thread's four, or null; a, b: descriptors.
void multiply(const ProductForm& form, float* sum, const uint32_t* a_registers, uint64_t a, uint64_t b, bool accumulate);
void commit_products();
void wait_products(int groups);

}  // namespace emulator
