// SPDX-License-Identifier: Apache-2.0
// The little arithmetic of a language model that is not lla's: embedding, residual sums, the gate of the MLP, the loss.
// Everything works row by row in float (double for LLA_F64 rows), rounds once on storing, and runs on the program's threads.
#pragma once

#include <lla/lla.h>

#include <cstdint>

#include "handles.h"
#include "tensor.h"
#include "threads.h"

namespace lm {

// Rows [count, width] of one element type, one after the other. On a device they exist twice: `data` is the host's.
struct Rows {
  void* data = nullptr;
  lla_dtype dtype = LLA_F32;
  int64_t count = 0, width = 0;
  void* device = nullptr;  // null on the CPU

  size_t bytes() const { return static_cast<size_t>(count * width) * lla_dtype_size(dtype); }
  void* lla_data() const { return device ? device : data; }  // where lla reads and writes
  lla_tensor view() const { return lla_tensor_of(lla_data(), dtype, count, width, -1, -1); }
  void* row(int64_t r) const { return static_cast<char*>(data) + static_cast<size_t>(r * width) * lla_dtype_size(dtype); }
};

// Memory for up to `capacity` rows. Pages of the host's half that nobody touches cost nothing.
class RowBuffer {
 public:
  RowBuffer() = default;
  RowBuffer(lla_context* context, int64_t capacity, int64_t width, lla_dtype dtype)
      : memory_(static_cast<size_t>(capacity * width) * lla_dtype_size(dtype)),
        device_(DeviceBuffer::beside_host(context, memory_.bytes())),
        width_(width),
        dtype_(dtype) {}
  Rows rows(int64_t count) const { return {memory_.data(), dtype_, count, width_, device_.data()}; }

 private:
  Buffer memory_;
  DeviceBuffer device_;
  int64_t width_ = 0;
  lla_dtype dtype_ = LLA_F32;
};

void embed(Threads& threads, const int32_t* ids, const Tensor& table, const Rows& out);
// gradient[ids[r]] += dy[r]; gradient is [vocab, width] in LLA_F32 or LLA_F64.
void embed_backward(Threads& threads, const int32_t* ids, const Rows& dy, Tensor* gradient);
void add(Threads& threads, const Rows& x, const Rows& sum);  // sum += x
// y = silu(gate) * up
void gate_product(Threads& threads, const Rows& gate, const Rows& up, const Rows& y);
// Overwrites gate and up with their gradients.
void gate_product_backward(Threads& threads, const Rows& dy, const Rows& gate, const Rows& up);
// losses[r] = -log softmax(logits[r])[targets[r]]; a target < 0 counts as nothing. With `gradient_scale` != 0 the logits are
// overwritten with gradient_scale * d loss / d logits.
void cross_entropy(Threads& threads, const Rows& logits, const int32_t* targets, double gradient_scale, double* losses);

}  // namespace lm
