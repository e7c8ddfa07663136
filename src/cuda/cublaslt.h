// SPDX-License-Identifier: Apache-2.0
// Products of row-major matrices by cuBLASLt, which is opened at run time where it is installed.
#pragma once

#include <cstdint>

namespace lla::cuda {

constexpr int64_t kCublasltWorkspace = int64_t{32} << 20;  // bytes of device memory that a product may use

// A row-major matrix of LLA_F32, LLA_BF16 or LLA_F16.
struct DenseMatrix {
  void* data = nullptr;
  int32_t dtype = 0;
  int64_t rows = 0, columns = 0, row_stride = 0;
};

// out (+)= a b + bias, with a or b transposed if asked to; the bias, one number for each column of `out`, may be missing and
// has out's type. Sums are in fp32. How many rows a call has must not choose the algorithm, nor how far apart they lie, so that
// a row's bits do not depend on it: rows are the depth of the product if `over_rows`, else the rows of `out`.
struct DenseProduct {
  DenseMatrix a, b, out;
  bool transpose_a = false, transpose_b = false, accumulate = false, over_rows = false;
  const void* bias = nullptr;
};

// Makes cuBLASLt ready on the current device, if it is installed. Called when a layer with projections is created: who has
// none does not wait for its library.
void load_cublaslt();
// Puts the product on the stream; false: nothing was done, and another kernel has to do it. `workspace` is
// kCublasltWorkspace bytes, 256-byte aligned. Allocates nothing.
bool launch_cublaslt(const DenseProduct& product, void* workspace, void* stream);

}  // namespace lla::cuda
