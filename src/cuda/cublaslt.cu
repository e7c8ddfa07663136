// SPDX-License-Identifier: Apache-2.0
// cuBLASLt by dlopen: one handle for each device, descriptors on the stack, algorithms in a table of fixed size.
#include "cuda/common/platform.h"
#include "cuda/cublaslt.h"
#include "lla/types.h"

#if !defined(LLA_CUDA_EMULATED) && __has_include(<cublasLt.h>)
#include <cublasLt.h>
#include <dlfcn.h>

#include <atomic>

#include "core/mutex.h"

namespace lla::cuda {
namespace {

constexpr int kMostDevices = 64, kMostAlgorithms = 256;
constexpr int64_t kNominalRows = 4096;  // that algorithms are chosen for
constexpr uint32_t kBytesAligned = 16;  // of all operands

// The functions, under the names that they have in the library.
struct Library {
#define LLA_SYMBOL(name) decltype(&::name) name = nullptr
  LLA_SYMBOL(cublasLtCreate);
  LLA_SYMBOL(cublasLtMatmul);
  LLA_SYMBOL(cublasLtMatmulAlgoGetHeuristic);
  LLA_SYMBOL(cublasLtMatmulDescInit_internal);
  LLA_SYMBOL(cublasLtMatmulDescSetAttribute);
  LLA_SYMBOL(cublasLtMatrixLayoutInit_internal);
  LLA_SYMBOL(cublasLtMatmulPreferenceInit_internal);
  LLA_SYMBOL(cublasLtMatmulPreferenceSetAttribute);
#undef LLA_SYMBOL

  bool open() {
#define LLA_TEXT_OF(value) #value
#define LLA_TEXT(macro) LLA_TEXT_OF(macro)
    void* library = dlopen("libcublasLt.so." LLA_TEXT(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);
#undef LLA_TEXT
#undef LLA_TEXT_OF
    if (!library) return false;
    bool complete = true;
#define LLA_SYMBOL(name)                                             \
  name = reinterpret_cast<decltype(&::name)>(dlsym(library, #name)); \
  complete = complete && name != nullptr
    LLA_SYMBOL(cublasLtCreate);
    LLA_SYMBOL(cublasLtMatmul);
    LLA_SYMBOL(cublasLtMatmulAlgoGetHeuristic);
    LLA_SYMBOL(cublasLtMatmulDescInit_internal);
    LLA_SYMBOL(cublasLtMatmulDescSetAttribute);
    LLA_SYMBOL(cublasLtMatrixLayoutInit_internal);
    LLA_SYMBOL(cublasLtMatmulPreferenceInit_internal);
    LLA_SYMBOL(cublasLtMatmulPreferenceSetAttribute);
#undef LLA_SYMBOL
    return complete;  // stays open for good, like the handles
  }
};

// Everything that an algorithm is chosen by.
struct Choice {
  int32_t device = 0;
  int32_t dtypes[3] = {};
  int32_t flags = 0;
  int64_t sizes[3] = {};

  bool operator==(const Choice& other) const = default;
};

Mutex mutex;  // of all that follows
Library library;
bool tried = false, opened = false;
cublasLtHandle_t handles[kMostDevices] = {};
struct {
  Choice choice;
  bool usable = false;
  cublasLtMatmulAlgo_t algorithm = {};
} algorithms[kMostAlgorithms];
int algorithms_made = 0;  // ever; the oldest makes room

cublasLtHandle_t handle_of(int device) { return device < kMostDevices ? handles[device] : nullptr; }

bool device_type(int32_t dtype, cudaDataType* type) {
  switch (dtype) {
    case LLA_F32:
      *type = CUDA_R_32F;
      return true;
    case LLA_BF16:
      *type = CUDA_R_16BF;
      return true;
    case LLA_F16:
      *type = CUDA_R_16F;
      return true;
    default:
      return false;
  }
}

bool aligned(const DenseMatrix& matrix) {
  const int64_t size = matrix.dtype == LLA_F32 ? 4 : 2;
  return matrix.data && reinterpret_cast<uintptr_t>(matrix.data) % kBytesAligned == 0 &&
         matrix.row_stride * size % kBytesAligned == 0 && matrix.row_stride >= matrix.columns;
}

// Descriptors of a product. cuBLASLt counts in columns: a row-major matrix is its transpose there, so that it is asked for
// out^T = b^T a^T, with b first.
struct Descriptors {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t first, second, out;

  // `rows`: taken for the number of rows of the call, which lie as near as they may; 0: what there is.
  bool make(const DenseProduct& p, int64_t rows) {
    const bool nominal = rows > 0;
    const auto layout = [nominal](cublasLtMatrixLayoutOpaque_t* to, const DenseMatrix& matrix, int64_t matrix_rows) {
      cudaDataType type;
      const int64_t step = kBytesAligned / (matrix.dtype == LLA_F32 ? 4 : 2);
      const int64_t stride = nominal ? (matrix.columns + step - 1) / step * step : matrix.row_stride;
      return device_type(matrix.dtype, &type) &&
             library.cublasLtMatrixLayoutInit_internal(to, sizeof(*to), type, static_cast<uint64_t>(matrix.columns),
                                                       static_cast<uint64_t>(matrix_rows), stride) == CUBLAS_STATUS_SUCCESS;
    };
    const cublasOperation_t operations[2] = {p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                                             p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N};
    const auto set = [this](cublasLtMatmulDescAttributes_t attribute, const void* value, size_t bytes) {
      return library.cublasLtMatmulDescSetAttribute(&product, attribute, value, bytes) == CUBLAS_STATUS_SUCCESS;
    };
    if (library.cublasLtMatmulDescInit_internal(&product, sizeof(product), CUBLAS_COMPUTE_32F, CUDA_R_32F) !=
        CUBLAS_STATUS_SUCCESS)
      return false;
    if (!set(CUBLASLT_MATMUL_DESC_TRANSA, &operations[0], sizeof(operations[0])) ||
        !set(CUBLASLT_MATMUL_DESC_TRANSB, &operations[1], sizeof(operations[1])))
      return false;
    if (p.bias) {
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
      cudaDataType type;
      if (!device_type(p.out.dtype, &type) || !set(CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)) ||
          !set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias, sizeof(p.bias)) ||
          !set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof(type)))
        return false;
    }
    return layout(&first, p.b, nominal && p.over_rows ? rows : p.b.rows) &&
           layout(&second, p.a, nominal ? rows : p.a.rows) &&
           layout(&out, p.out, nominal && !p.over_rows ? rows : p.out.rows);
  }
};

// The best algorithm for a nominal number of rows. Sums over the depth stay in one block unless rows are summed.
bool choose(cublasLtHandle_t handle, const DenseProduct& p, cublasLtMatmulAlgo_t* algorithm) {
  Descriptors d;
  cublasLtMatmulPreferenceOpaque_t preference;
  if (!d.make(p, kNominalRows) ||
      library.cublasLtMatmulPreferenceInit_internal(&preference, sizeof(preference)) != CUBLAS_STATUS_SUCCESS)
    return false;
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    return library.cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)) ==
           CUBLAS_STATUS_SUCCESS;
  };
  const uint64_t workspace = kCublasltWorkspace;
  const uint32_t reductions =
      p.over_rows ? CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
  if (!set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace) ||
      !set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions) ||
      !set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kBytesAligned) ||
      !set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kBytesAligned) ||
      !set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kBytesAligned) ||
      !set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kBytesAligned))
    return false;
  cublasLtMatmulHeuristicResult_t result;
  int found = 0;
  if (library.cublasLtMatmulAlgoGetHeuristic(handle, &d.product, &d.first, &d.second, &d.out, &d.out, &preference, 1,
                                             &result, &found) != CUBLAS_STATUS_SUCCESS ||
      found < 1 || result.state != CUBLAS_STATUS_SUCCESS || result.workspaceSize > static_cast<size_t>(kCublasltWorkspace))
    return false;
  *algorithm = result.algo;
  return true;
}

bool algorithm_of(int device, const DenseProduct& p, cublasLtMatmulAlgo_t* algorithm) {
  Choice choice;
  choice.device = device;
  choice.flags = p.transpose_a | p.transpose_b << 1 | p.accumulate << 2 | p.over_rows << 3 | (p.bias != nullptr) << 4;
  const DenseMatrix* matrices[] = {&p.a, &p.b, &p.out};
  for (int i = 0; i < 3; ++i) {
    choice.dtypes[i] = matrices[i]->dtype;
    choice.sizes[i] = matrices[i]->columns;
  }
  const Lock lock(mutex);
  const int made = algorithms_made < kMostAlgorithms ? algorithms_made : kMostAlgorithms;
  for (int i = 0; i < made; ++i) {
    if (!(algorithms[i].choice == choice)) continue;
    *algorithm = algorithms[i].algorithm;
    return algorithms[i].usable;
  }
  auto& entry = algorithms[algorithms_made % kMostAlgorithms];
  algorithms_made = algorithms_made + 1 < 2 * kMostAlgorithms ? algorithms_made + 1 : kMostAlgorithms;
  entry.choice = choice;
  entry.usable = choose(handle_of(device), p, &entry.algorithm);
  *algorithm = entry.algorithm;
  return entry.usable;
}

}  // namespace

void load_cublaslt() {
  static std::atomic<uint64_t> done{0};  // a bit for each device
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return;
  const uint64_t bit = uint64_t{1} << device;
  if (done.load(std::memory_order_acquire) & bit) return;
  const Lock lock(mutex);
  if (!tried) {
    tried = true;
    opened = library.open();
  }
  if (opened && !handles[device] && library.cublasLtCreate(&handles[device]) != CUBLAS_STATUS_SUCCESS) handles[device] = nullptr;
  done.fetch_or(bit, std::memory_order_release);
}

bool launch_cublaslt(const DenseProduct& p, void* workspace, void* stream) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  {
    const Lock lock(mutex);
    if (!opened || !handle_of(device)) return false;
  }
  const bool types = p.a.dtype == p.b.dtype && (p.out.dtype == p.a.dtype || p.out.dtype == LLA_F32);
  const bool empty = p.out.rows == 0 || p.out.columns == 0 || p.a.rows == 0 || p.a.columns == 0;
  if (!types || empty || !aligned(p.a) || !aligned(p.b) || !aligned(p.out)) return false;
  if (p.bias && reinterpret_cast<uintptr_t>(p.bias) % kBytesAligned != 0) return false;
  cublasLtMatmulAlgo_t algorithm;
  Descriptors d;
  if (!algorithm_of(device, p, &algorithm) || !d.make(p, 0)) return false;
  const float one = 1, before = p.accumulate ? 1.0f : 0.0f;
  return library.cublasLtMatmul(handle_of(device), &d.product, &one, p.b.data, &d.first, p.a.data, &d.second, &before,
                                p.out.data, &d.out, p.out.data, &d.out, &algorithm, workspace,
                                static_cast<size_t>(kCublasltWorkspace),
                                static_cast<cudaStream_t>(stream)) == CUBLAS_STATUS_SUCCESS;
}

}  // namespace lla::cuda

#else

namespace lla::cuda {
void load_cublaslt() {}
bool launch_cublaslt(const DenseProduct&, void*, void*) { return false; }
}  // namespace lla::cuda

#endif
