// SPDX-License-Identifier: Apache-2.0
// Helpers for the tests of the CUDA backend's parts: a batch with the bounds that devices need, and running a kernel against
// the reference.
#pragma once

#include "cpu_parts_testing.h"
#include "cuda/backend.h"

namespace lla::parts_testing {

// With everything that the host of a device backend knows.
inline BatchView device_view(const Batch& batch) {
  BatchView v = batch.view();
  v.least_rows = v.total_rows;
  for (const Sequence& s : batch.sequences) {
    if (!s.padding) v.least_rows = std::min(v.least_rows, s.rows);
    v.most_rows = std::max(v.most_rows, s.rows);
    v.most_length = std::max(v.most_length, s.position + s.rows);
    v.most_conv_to_store = std::max(v.most_conv_to_store, s.conv_to_store_count);
  }
  return v;
}

inline const Kernel* cuda_kernel(Op op, const void* problem) {
  for (const cuda::KernelTable& table : {cuda::part_kernels(), cuda::projection_kernels()}) {
    for (int64_t i = 0; i < table.count; ++i) {
      if (table.kernels[i].op == op && table.kernels[i].accepts(problem)) return &table.kernels[i];
    }
  }
  return nullptr;
}

// Scratch starts as garbage of NaN and must be enough.
inline void run_cuda(Op op, const void* problem, const Limits& limits) {
  const Kernel* kernel = cuda_kernel(op, problem);
  ASSERT_NE(kernel, nullptr);
  ASSERT_EQ(kernel->load(), LLA_OK);
  Need need;
  kernel->measure(problem, limits, &need);
  ASSERT_GE(need.shared, 0);
  ASSERT_EQ(need.per_thread, 0);
  const size_t bytes = static_cast<size_t>(need.shared);
  std::vector<char> memory(bytes + 256, static_cast<char>(0xff));
  char* base = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  ASSERT_EQ(kernel->launch(problem, limits, base, nullptr), LLA_OK);
  for (char* p = base + bytes; p < memory.data() + memory.size(); ++p) {
    ASSERT_EQ(*p, static_cast<char>(0xff)) << kernel->name << " wrote past its scratch";
  }
}

// Runs the kernel and the reference's, and compares; under wider limits the bits are the same.
template <class Problem>
void check_cuda(Parts* parts, Op op, const Problem (&problem)[2], double tolerance, const std::string& what) {
  const Kernel* reference = find_kernel(reference_backend(), op, &problem[kReference]);
  Limits limits = parts->batch().limits();
  limits.rows_per_sequence = problem[kTested].batch.most_rows;
  run_cuda(op, &problem[kTested], limits);
  run(*reference, &problem[kReference], parts->batch().limits());
  parts->compare(tolerance, what);
  const auto first = parts->results();
  parts->reset_results();
  limits.rows = limits.rows * 2 + 1000;
  limits.sequences += 7;
  run_cuda(op, &problem[kTested], limits);
  ASSERT_TRUE(parts->results() == first) << what << ": bits depend on the limits";
}

// For the cases of every backend.
struct CudaParts {
  BatchView view(const Batch& batch) const { return device_view(batch); }
  void run(Op op, const void* problem, const Limits& limits) const { run_cuda(op, problem, limits); }
  template <class Problem>
  void check(Parts* parts, Op op, const Problem (&problem)[2], double tolerance, const std::string& what) const {
    check_cuda(parts, op, problem, tolerance, what);
  }
};

}  // namespace lla::parts_testing
