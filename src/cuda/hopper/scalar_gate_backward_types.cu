// SPDX-License-Identifier: Apache-2.0
// Scalar gate backward on Hopper: kernels of either type of rows, which have files of their own.
#include "cuda/hopper/scalar_gate_backward.h"

namespace lla::cuda::hopper {

int32_t launch_row_gradients(const BackwardParameters& in, int key_dim, void* stream) {
  return in.f16 ? launch_row_gradients<Half::kF16>(in, key_dim, stream)
                : launch_row_gradients<Half::kBf16>(in, key_dim, stream);
}
int32_t load_row_gradients() {
  const int32_t status = load_row_gradients<Half::kBf16>();
  return status == LLA_OK ? load_row_gradients<Half::kF16>() : status;
}

int32_t launch_column_gradients(const BackwardParameters& in, int key_dim, void* stream) {
  return in.f16 ? launch_column_gradients<Half::kF16>(in, key_dim, stream)
                : launch_column_gradients<Half::kBf16>(in, key_dim, stream);
}
int32_t load_column_gradients() {
  const int32_t status = load_column_gradients<Half::kBf16>();
  return status == LLA_OK ? load_column_gradients<Half::kF16>() : status;
}

int32_t launch_block_nodes(const BackwardParameters& in, int key_dim, void* stream) {
  return in.f16 ? launch_block_nodes<Half::kF16>(in, key_dim, stream) : launch_block_nodes<Half::kBf16>(in, key_dim, stream);
}
int32_t load_block_nodes() {
  const int32_t status = load_block_nodes<Half::kBf16>();
  return status == LLA_OK ? load_block_nodes<Half::kF16>() : status;
}

int32_t launch_node_readers(const BackwardParameters& in, int key_dim, void* stream) {
  if (in.linear) return in.blocks < 2 ? LLA_OK : launch_state_gradients(in, key_dim, stream);
  return in.f16 ? launch_node_readers<Half::kF16>(in, key_dim, stream)
                : launch_node_readers<Half::kBf16>(in, key_dim, stream);
}
int32_t load_node_readers() {
  const int32_t status = load_node_readers<Half::kBf16>();
  return status == LLA_OK ? load_node_readers<Half::kF16>() : status;
}

int32_t launch_state_gradients(const BackwardParameters& in, int key_dim, void* stream) {
  return in.f16 ? launch_state_gradients<Half::kF16>(in, key_dim, stream)
                : launch_state_gradients<Half::kBf16>(in, key_dim, stream);
}
int32_t load_state_gradients() {
  const int32_t status = load_state_gradients<Half::kBf16>();
  return status == LLA_OK ? load_state_gradients<Half::kF16>() : status;
}

}  // namespace lla::cuda::hopper
