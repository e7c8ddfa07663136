/* SPDX-License-Identifier: Apache-2.0 */
/* Pins the binary interface: sizes and offsets of every public struct with 64 and with 32 bits, and the number of every
 * constant. A line may be added here, never changed. Compiles as C11 and as C++. */
#include <lla/lla.h>

#ifdef __cplusplus
#define LLA_ASSERT(condition, text) static_assert(condition, text)
#else
#define LLA_ASSERT(condition, text) _Static_assert(condition, text)
#endif
#define LLA_SIZE(type, size) LLA_ASSERT(sizeof(type) == (size), "size of " #type)
#define LLA_AT(type, field, offset) LLA_ASSERT(offsetof(type, field) == (offset), "offset of " #type "." #field)
/* With 32 bits there are two: where 64-bit numbers lie on multiples of 4 (x86), and of 8 (Arm and others). */
struct of_64_bits {
  char first;
  int64_t second;
};
#define LLA_EITHER(by_4, by_8) (offsetof(struct of_64_bits, second) == 4 ? (by_4) : (by_8))
#define LLA_SIZE32(type, by_4, by_8) LLA_ASSERT(sizeof(type) == LLA_EITHER(by_4, by_8), "size of " #type)
#define LLA_AT32(type, field, by_4, by_8) \
  LLA_ASSERT(offsetof(type, field) == LLA_EITHER(by_4, by_8), "offset of " #type "." #field)
#define LLA_IS(constant, number) LLA_ASSERT((constant) == (number), #constant)

LLA_SIZE(lla_status, 4);
LLA_SIZE(lla_dtype, 4);
LLA_SIZE(lla_role, 4);
LLA_SIZE(lla_location, 4);
LLA_SIZE(lla_backend, 4);
LLA_SIZE(lla_isa, 4);
LLA_SIZE(lla_determinism, 4);
LLA_SIZE(lla_log_level, 4);
LLA_SIZE(lla_context_key, 4);
LLA_SIZE(lla_layer_kind, 4);
LLA_SIZE(lla_mixer, 4);
LLA_SIZE(lla_head_map, 4);
LLA_SIZE(lla_lambda_form, 4);
LLA_SIZE(lla_level_overflow, 4);
LLA_SIZE(lla_gate_form, 4);
LLA_SIZE(lla_write_form, 4);
LLA_SIZE(lla_norm_form, 4);
LLA_SIZE(lla_activation, 4);
LLA_SIZE(lla_layer_key, 4);
LLA_SIZE(lla_pass, 4);
LLA_SIZE(lla_state_kind, 4);
LLA_SIZE(lla_block_kind, 4);
LLA_SIZE(lla_state_key, 4);
LLA_SIZE(lla_state_part, 4);

#if UINTPTR_MAX > 0xffffffffu

LLA_SIZE(lla_batch_limits, 56);
LLA_AT(lla_batch_limits, struct_size, 0);
LLA_AT(lla_batch_limits, max_sequences, 8);
LLA_AT(lla_batch_limits, max_rows, 16);
LLA_AT(lla_batch_limits, max_rows_per_sequence, 24);
LLA_AT(lla_batch_limits, max_length, 32);
LLA_AT(lla_batch_limits, max_snapshots, 40);
LLA_AT(lla_batch_limits, replay, 48);
LLA_AT(lla_batch_limits, reserved, 52);

LLA_SIZE(lla_rows, 208);
LLA_AT(lla_rows, struct_size, 0);
LLA_AT(lla_rows, sequences, 8);
LLA_AT(lla_rows, rows_per_sequence, 16);
LLA_AT(lla_rows, total_rows, 24);
LLA_AT(lla_rows, offsets, 32);
LLA_AT(lla_rows, counts, 48);
LLA_AT(lla_rows, slot_in, 64);
LLA_AT(lla_rows, slot_out, 80);
LLA_AT(lla_rows, expected_positions, 96);
LLA_AT(lla_rows, snapshots, 112);
LLA_AT(lla_rows, snapshot_sequences, 120);
LLA_AT(lla_rows, snapshot_rows, 136);
LLA_AT(lla_rows, snapshot_slots, 152);
LLA_AT(lla_rows, gradient_state, 168);
LLA_AT(lla_rows, initial_gradient_slots, 176);
LLA_AT(lla_rows, final_gradient_slots, 192);

LLA_SIZE(lla_allocator, 32);
LLA_AT(lla_allocator, struct_size, 0);
LLA_AT(lla_allocator, allocate, 8);
LLA_AT(lla_allocator, release, 16);
LLA_AT(lla_allocator, user, 24);

LLA_SIZE(lla_parallel, 32);
LLA_AT(lla_parallel, struct_size, 0);
LLA_AT(lla_parallel, max_threads, 8);
LLA_AT(lla_parallel, reserved, 12);
LLA_AT(lla_parallel, run, 16);
LLA_AT(lla_parallel, user, 24);

LLA_SIZE(lla_log, 32);
LLA_AT(lla_log, struct_size, 0);
LLA_AT(lla_log, level, 8);
LLA_AT(lla_log, reserved, 12);
LLA_AT(lla_log, write, 16);
LLA_AT(lla_log, user, 24);

LLA_SIZE(lla_context_options, 56);
LLA_AT(lla_context_options, struct_size, 0);
LLA_AT(lla_context_options, backend, 8);
LLA_AT(lla_context_options, device, 12);
LLA_AT(lla_context_options, isa, 16);
LLA_AT(lla_context_options, determinism, 20);
LLA_AT(lla_context_options, threads, 24);
LLA_AT(lla_context_options, reserved, 28);
LLA_AT(lla_context_options, allocator, 32);
LLA_AT(lla_context_options, parallel, 40);
LLA_AT(lla_context_options, log, 48);

LLA_SIZE(lla_layer_desc, 184);
LLA_AT(lla_layer_desc, struct_size, 0);
LLA_AT(lla_layer_desc, kind, 8);
LLA_AT(lla_layer_desc, mixer, 12);
LLA_AT(lla_layer_desc, heads, 16);
LLA_AT(lla_layer_desc, groups, 24);
LLA_AT(lla_layer_desc, key_dim, 32);
LLA_AT(lla_layer_desc, value_dim, 40);
LLA_AT(lla_layer_desc, hidden, 48);
LLA_AT(lla_layer_desc, outputs, 56);
LLA_AT(lla_layer_desc, grain, 64);
LLA_AT(lla_layer_desc, levels, 72);
LLA_AT(lla_layer_desc, lambda_form, 80);
LLA_AT(lla_layer_desc, level_overflow, 84);
LLA_AT(lla_layer_desc, gate_form, 88);
LLA_AT(lla_layer_desc, write_form, 92);
LLA_AT(lla_layer_desc, head_map, 96);
LLA_AT(lla_layer_desc, qk_norm, 100);
LLA_AT(lla_layer_desc, scale, 104);
LLA_AT(lla_layer_desc, lambda_scale, 112);
LLA_AT(lla_layer_desc, qk_norm_epsilon, 120);
LLA_AT(lla_layer_desc, dt_min, 128);
LLA_AT(lla_layer_desc, dt_max, 136);
LLA_AT(lla_layer_desc, conv_width, 144);
LLA_AT(lla_layer_desc, conv_activation, 152);
LLA_AT(lla_layer_desc, norm_form, 156);
LLA_AT(lla_layer_desc, norm_group, 160);
LLA_AT(lla_layer_desc, norm_epsilon, 168);
LLA_AT(lla_layer_desc, inner_dtype, 176);
LLA_AT(lla_layer_desc, reserved, 180);

LLA_SIZE(lla_forward_args, 104);
LLA_AT(lla_forward_args, struct_size, 0);
LLA_AT(lla_forward_args, batch, 8);
LLA_AT(lla_forward_args, state, 16);
LLA_AT(lla_forward_args, layer_index, 24);
LLA_AT(lla_forward_args, io, 32);
LLA_AT(lla_forward_args, io_count, 40);
LLA_AT(lla_forward_args, weights, 48);
LLA_AT(lla_forward_args, weight_count, 56);
LLA_AT(lla_forward_args, workspace, 64);
LLA_AT(lla_forward_args, workspace_bytes, 72);
LLA_AT(lla_forward_args, saved, 80);
LLA_AT(lla_forward_args, saved_bytes, 88);
LLA_AT(lla_forward_args, stream, 96);

LLA_SIZE(lla_backward_args, 136);
LLA_AT(lla_backward_args, struct_size, 0);
LLA_AT(lla_backward_args, batch, 8);
LLA_AT(lla_backward_args, state, 16);
LLA_AT(lla_backward_args, layer_index, 24);
LLA_AT(lla_backward_args, io, 32);
LLA_AT(lla_backward_args, io_count, 40);
LLA_AT(lla_backward_args, weights, 48);
LLA_AT(lla_backward_args, weight_count, 56);
LLA_AT(lla_backward_args, outputs, 64);
LLA_AT(lla_backward_args, output_count, 72);
LLA_AT(lla_backward_args, gradients, 80);
LLA_AT(lla_backward_args, gradient_count, 88);
LLA_AT(lla_backward_args, workspace, 96);
LLA_AT(lla_backward_args, workspace_bytes, 104);
LLA_AT(lla_backward_args, saved, 112);
LLA_AT(lla_backward_args, saved_bytes, 120);
LLA_AT(lla_backward_args, stream, 128);

LLA_SIZE(lla_state_desc, 56);
LLA_AT(lla_state_desc, struct_size, 0);
LLA_AT(lla_state_desc, kind, 8);
LLA_AT(lla_state_desc, node_dtype, 12);
LLA_AT(lla_state_desc, tail_dtype, 16);
LLA_AT(lla_state_desc, reserved, 20);
LLA_AT(lla_state_desc, slots, 24);
LLA_AT(lla_state_desc, max_length, 32);
LLA_AT(lla_state_desc, max_draft, 40);
LLA_AT(lla_state_desc, node_blocks, 48);

LLA_SIZE(lla_block_geometry, 64);
LLA_AT(lla_block_geometry, struct_size, 0);
LLA_AT(lla_block_geometry, count, 8);
LLA_AT(lla_block_geometry, bytes, 16);
LLA_AT(lla_block_geometry, alignment, 24);
LLA_AT(lla_block_geometry, head_bytes, 32);
LLA_AT(lla_block_geometry, blocks_per_fold, 40);
LLA_AT(lla_block_geometry, record_bytes, 48);
LLA_AT(lla_block_geometry, layout, 56);

LLA_SIZE(lla_block_memory, 32);
LLA_AT(lla_block_memory, layer_index, 0);
LLA_AT(lla_block_memory, kind, 8);
LLA_AT(lla_block_memory, reserved, 12);
LLA_AT(lla_block_memory, base, 16);
LLA_AT(lla_block_memory, stride, 24);

LLA_SIZE(lla_image_info, 112);
LLA_AT(lla_image_info, struct_size, 0);
LLA_AT(lla_image_info, bytes, 8);
LLA_AT(lla_image_info, position, 16);
LLA_AT(lla_image_info, layers, 24);
LLA_AT(lla_image_info, grain, 32);
LLA_AT(lla_image_info, format, 40);
LLA_AT(lla_image_info, reserved, 44);
LLA_AT(lla_image_info, tag, 48);

LLA_SIZE(lla_error, 256);
LLA_AT(lla_error, struct_size, 0);
LLA_AT(lla_error, code, 8);
LLA_AT(lla_error, text, 12);

LLA_SIZE(lla_tensor, 112);
LLA_AT(lla_tensor, data, 0);
LLA_AT(lla_tensor, dtype, 8);
LLA_AT(lla_tensor, rank, 12);
LLA_AT(lla_tensor, dims, 16);
LLA_AT(lla_tensor, strides, 64);

LLA_SIZE(lla_binding, 120);
LLA_AT(lla_binding, role, 0);
LLA_AT(lla_binding, flags, 4);
LLA_AT(lla_binding, tensor, 8);

LLA_SIZE(lla_index, 16);
LLA_AT(lla_index, data, 0);
LLA_AT(lla_index, dtype, 8);
LLA_AT(lla_index, location, 12);
#else

LLA_SIZE32(lla_batch_limits, 52, 56);
LLA_AT32(lla_batch_limits, struct_size, 0, 0);
LLA_AT32(lla_batch_limits, max_sequences, 4, 8);
LLA_AT32(lla_batch_limits, max_rows, 12, 16);
LLA_AT32(lla_batch_limits, max_rows_per_sequence, 20, 24);
LLA_AT32(lla_batch_limits, max_length, 28, 32);
LLA_AT32(lla_batch_limits, max_snapshots, 36, 40);
LLA_AT32(lla_batch_limits, replay, 44, 48);
LLA_AT32(lla_batch_limits, reserved, 48, 52);

LLA_SIZE32(lla_rows, 160, 168);
LLA_AT32(lla_rows, struct_size, 0, 0);
LLA_AT32(lla_rows, sequences, 4, 8);
LLA_AT32(lla_rows, rows_per_sequence, 12, 16);
LLA_AT32(lla_rows, total_rows, 20, 24);
LLA_AT32(lla_rows, offsets, 28, 32);
LLA_AT32(lla_rows, counts, 40, 44);
LLA_AT32(lla_rows, slot_in, 52, 56);
LLA_AT32(lla_rows, slot_out, 64, 68);
LLA_AT32(lla_rows, expected_positions, 76, 80);
LLA_AT32(lla_rows, snapshots, 88, 96);
LLA_AT32(lla_rows, snapshot_sequences, 96, 104);
LLA_AT32(lla_rows, snapshot_rows, 108, 116);
LLA_AT32(lla_rows, snapshot_slots, 120, 128);
LLA_AT32(lla_rows, gradient_state, 132, 140);
LLA_AT32(lla_rows, initial_gradient_slots, 136, 144);
LLA_AT32(lla_rows, final_gradient_slots, 148, 156);

LLA_SIZE32(lla_allocator, 16, 16);
LLA_AT32(lla_allocator, struct_size, 0, 0);
LLA_AT32(lla_allocator, allocate, 4, 4);
LLA_AT32(lla_allocator, release, 8, 8);
LLA_AT32(lla_allocator, user, 12, 12);

LLA_SIZE32(lla_parallel, 20, 20);
LLA_AT32(lla_parallel, struct_size, 0, 0);
LLA_AT32(lla_parallel, max_threads, 4, 4);
LLA_AT32(lla_parallel, reserved, 8, 8);
LLA_AT32(lla_parallel, run, 12, 12);
LLA_AT32(lla_parallel, user, 16, 16);

LLA_SIZE32(lla_log, 20, 20);
LLA_AT32(lla_log, struct_size, 0, 0);
LLA_AT32(lla_log, level, 4, 4);
LLA_AT32(lla_log, reserved, 8, 8);
LLA_AT32(lla_log, write, 12, 12);
LLA_AT32(lla_log, user, 16, 16);

LLA_SIZE32(lla_context_options, 40, 40);
LLA_AT32(lla_context_options, struct_size, 0, 0);
LLA_AT32(lla_context_options, backend, 4, 4);
LLA_AT32(lla_context_options, device, 8, 8);
LLA_AT32(lla_context_options, isa, 12, 12);
LLA_AT32(lla_context_options, determinism, 16, 16);
LLA_AT32(lla_context_options, threads, 20, 20);
LLA_AT32(lla_context_options, reserved, 24, 24);
LLA_AT32(lla_context_options, allocator, 28, 28);
LLA_AT32(lla_context_options, parallel, 32, 32);
LLA_AT32(lla_context_options, log, 36, 36);

LLA_SIZE32(lla_layer_desc, 180, 184);
LLA_AT32(lla_layer_desc, struct_size, 0, 0);
LLA_AT32(lla_layer_desc, kind, 4, 4);
LLA_AT32(lla_layer_desc, mixer, 8, 8);
LLA_AT32(lla_layer_desc, heads, 12, 16);
LLA_AT32(lla_layer_desc, groups, 20, 24);
LLA_AT32(lla_layer_desc, key_dim, 28, 32);
LLA_AT32(lla_layer_desc, value_dim, 36, 40);
LLA_AT32(lla_layer_desc, hidden, 44, 48);
LLA_AT32(lla_layer_desc, outputs, 52, 56);
LLA_AT32(lla_layer_desc, grain, 60, 64);
LLA_AT32(lla_layer_desc, levels, 68, 72);
LLA_AT32(lla_layer_desc, lambda_form, 76, 80);
LLA_AT32(lla_layer_desc, level_overflow, 80, 84);
LLA_AT32(lla_layer_desc, gate_form, 84, 88);
LLA_AT32(lla_layer_desc, write_form, 88, 92);
LLA_AT32(lla_layer_desc, head_map, 92, 96);
LLA_AT32(lla_layer_desc, qk_norm, 96, 100);
LLA_AT32(lla_layer_desc, scale, 100, 104);
LLA_AT32(lla_layer_desc, lambda_scale, 108, 112);
LLA_AT32(lla_layer_desc, qk_norm_epsilon, 116, 120);
LLA_AT32(lla_layer_desc, dt_min, 124, 128);
LLA_AT32(lla_layer_desc, dt_max, 132, 136);
LLA_AT32(lla_layer_desc, conv_width, 140, 144);
LLA_AT32(lla_layer_desc, conv_activation, 148, 152);
LLA_AT32(lla_layer_desc, norm_form, 152, 156);
LLA_AT32(lla_layer_desc, norm_group, 156, 160);
LLA_AT32(lla_layer_desc, norm_epsilon, 164, 168);
LLA_AT32(lla_layer_desc, inner_dtype, 172, 176);
LLA_AT32(lla_layer_desc, reserved, 176, 180);

LLA_SIZE32(lla_forward_args, 64, 80);
LLA_AT32(lla_forward_args, struct_size, 0, 0);
LLA_AT32(lla_forward_args, batch, 4, 4);
LLA_AT32(lla_forward_args, state, 8, 8);
LLA_AT32(lla_forward_args, layer_index, 12, 16);
LLA_AT32(lla_forward_args, io, 20, 24);
LLA_AT32(lla_forward_args, io_count, 24, 32);
LLA_AT32(lla_forward_args, weights, 32, 40);
LLA_AT32(lla_forward_args, weight_count, 36, 48);
LLA_AT32(lla_forward_args, workspace, 44, 56);
LLA_AT32(lla_forward_args, workspace_bytes, 48, 60);
LLA_AT32(lla_forward_args, saved, 52, 64);
LLA_AT32(lla_forward_args, saved_bytes, 56, 68);
LLA_AT32(lla_forward_args, stream, 60, 72);

LLA_SIZE32(lla_backward_args, 88, 112);
LLA_AT32(lla_backward_args, struct_size, 0, 0);
LLA_AT32(lla_backward_args, batch, 4, 4);
LLA_AT32(lla_backward_args, state, 8, 8);
LLA_AT32(lla_backward_args, layer_index, 12, 16);
LLA_AT32(lla_backward_args, io, 20, 24);
LLA_AT32(lla_backward_args, io_count, 24, 32);
LLA_AT32(lla_backward_args, weights, 32, 40);
LLA_AT32(lla_backward_args, weight_count, 36, 48);
LLA_AT32(lla_backward_args, outputs, 44, 56);
LLA_AT32(lla_backward_args, output_count, 48, 64);
LLA_AT32(lla_backward_args, gradients, 56, 72);
LLA_AT32(lla_backward_args, gradient_count, 60, 80);
LLA_AT32(lla_backward_args, workspace, 68, 88);
LLA_AT32(lla_backward_args, workspace_bytes, 72, 92);
LLA_AT32(lla_backward_args, saved, 76, 96);
LLA_AT32(lla_backward_args, saved_bytes, 80, 100);
LLA_AT32(lla_backward_args, stream, 84, 104);

LLA_SIZE32(lla_state_desc, 52, 56);
LLA_AT32(lla_state_desc, struct_size, 0, 0);
LLA_AT32(lla_state_desc, kind, 4, 4);
LLA_AT32(lla_state_desc, node_dtype, 8, 8);
LLA_AT32(lla_state_desc, tail_dtype, 12, 12);
LLA_AT32(lla_state_desc, reserved, 16, 16);
LLA_AT32(lla_state_desc, slots, 20, 24);
LLA_AT32(lla_state_desc, max_length, 28, 32);
LLA_AT32(lla_state_desc, max_draft, 36, 40);
LLA_AT32(lla_state_desc, node_blocks, 44, 48);

LLA_SIZE32(lla_block_geometry, 60, 64);
LLA_AT32(lla_block_geometry, struct_size, 0, 0);
LLA_AT32(lla_block_geometry, count, 4, 8);
LLA_AT32(lla_block_geometry, bytes, 12, 16);
LLA_AT32(lla_block_geometry, alignment, 20, 24);
LLA_AT32(lla_block_geometry, head_bytes, 28, 32);
LLA_AT32(lla_block_geometry, blocks_per_fold, 36, 40);
LLA_AT32(lla_block_geometry, record_bytes, 44, 48);
LLA_AT32(lla_block_geometry, layout, 52, 56);

LLA_SIZE32(lla_block_memory, 28, 32);
LLA_AT32(lla_block_memory, layer_index, 0, 0);
LLA_AT32(lla_block_memory, kind, 8, 8);
LLA_AT32(lla_block_memory, reserved, 12, 12);
LLA_AT32(lla_block_memory, base, 16, 16);
LLA_AT32(lla_block_memory, stride, 20, 24);

LLA_SIZE32(lla_image_info, 108, 112);
LLA_AT32(lla_image_info, struct_size, 0, 0);
LLA_AT32(lla_image_info, bytes, 4, 8);
LLA_AT32(lla_image_info, position, 12, 16);
LLA_AT32(lla_image_info, layers, 20, 24);
LLA_AT32(lla_image_info, grain, 28, 32);
LLA_AT32(lla_image_info, format, 36, 40);
LLA_AT32(lla_image_info, reserved, 40, 44);
LLA_AT32(lla_image_info, tag, 44, 48);

LLA_SIZE32(lla_error, 252, 252);
LLA_AT32(lla_error, struct_size, 0, 0);
LLA_AT32(lla_error, code, 4, 4);
LLA_AT32(lla_error, text, 8, 8);

LLA_SIZE32(lla_tensor, 108, 112);
LLA_AT32(lla_tensor, data, 0, 0);
LLA_AT32(lla_tensor, dtype, 4, 4);
LLA_AT32(lla_tensor, rank, 8, 8);
LLA_AT32(lla_tensor, dims, 12, 16);
LLA_AT32(lla_tensor, strides, 60, 64);

LLA_SIZE32(lla_binding, 116, 120);
LLA_AT32(lla_binding, role, 0, 0);
LLA_AT32(lla_binding, flags, 4, 4);
LLA_AT32(lla_binding, tensor, 8, 8);

LLA_SIZE32(lla_index, 12, 12);
LLA_AT32(lla_index, data, 0, 0);
LLA_AT32(lla_index, dtype, 4, 4);
LLA_AT32(lla_index, location, 8, 8);

#endif

LLA_IS(LLA_VERSION_MAJOR, 0);
LLA_IS(LLA_ABI_VERSION, 0);
LLA_IS(LLA_OK, 0);
LLA_IS(LLA_INVALID_ARGUMENT, 10);
LLA_IS(LLA_NULL_POINTER, 11);
LLA_IS(LLA_STRUCT_VERSION, 12);
LLA_IS(LLA_SHAPE_MISMATCH, 13);
LLA_IS(LLA_DTYPE_MISMATCH, 14);
LLA_IS(LLA_MISALIGNED, 15);
LLA_IS(LLA_BUFFER_TOO_SMALL, 16);
LLA_IS(LLA_WRONG_CONTEXT, 17);
LLA_IS(LLA_SIZE_OVERFLOW, 18);
LLA_IS(LLA_MISSING_ROLE, 19);
LLA_IS(LLA_LEVELS_EXCEEDED, 30);
LLA_IS(LLA_STATE_INCOMPATIBLE, 31);
LLA_IS(LLA_DATA_CORRUPT, 32);
LLA_IS(LLA_BUSY, 33);
LLA_IS(LLA_NO_BLOCKS, 34);
LLA_IS(LLA_POSITION_MISMATCH, 35);
LLA_IS(LLA_SLOT_IN_USE, 36);
LLA_IS(LLA_ROLLBACK_LIMIT, 37);
LLA_IS(LLA_UNSUPPORTED, 50);
LLA_IS(LLA_NOT_IMPLEMENTED, 51);
LLA_IS(LLA_NO_DEVICE, 52);
LLA_IS(LLA_DRIVER_TOO_OLD, 53);
LLA_IS(LLA_BACKEND_MISSING, 54);
LLA_IS(LLA_BACKEND_MISMATCH, 55);
LLA_IS(LLA_FORKED, 56);
LLA_IS(LLA_OUT_OF_MEMORY, 70);
LLA_IS(LLA_OUT_OF_DEVICE_MEMORY, 71);
LLA_IS(LLA_THREADS_FAILED, 72);
LLA_IS(LLA_DEVICE_ERROR, 90);
LLA_IS(LLA_CAPTURE_UNSAFE, 91);
LLA_IS(LLA_INTERNAL, 110);
LLA_IS(LLA_ERROR_TEXT_SIZE, 244);
LLA_IS(LLA_DTYPE_DEFAULT, 0);
LLA_IS(LLA_F32, 1);
LLA_IS(LLA_BF16, 2);
LLA_IS(LLA_F16, 3);
LLA_IS(LLA_F64, 4);
LLA_IS(LLA_I32, 5);
LLA_IS(LLA_I64, 6);
LLA_IS(LLA_MAX_RANK, 6);
LLA_IS(LLA_Q, 1);
LLA_IS(LLA_K, 2);
LLA_IS(LLA_V, 3);
LLA_IS(LLA_GATE, 4);
LLA_IS(LLA_WRITE, 5);
LLA_IS(LLA_LAMBDA, 6);
LLA_IS(LLA_Z, 7);
LLA_IS(LLA_X, 8);
LLA_IS(LLA_Y, 9);
LLA_IS(LLA_SKIP_INPUT, 10);
LLA_IS(LLA_GATE_OUT, 11);
LLA_IS(LLA_WRITE_OUT, 12);
LLA_IS(LLA_LAMBDA_OUT, 13);
LLA_IS(LLA_WEIGHT_CONV, 100);
LLA_IS(LLA_WEIGHT_CONV_BIAS, 101);
LLA_IS(LLA_WEIGHT_CONV_Q, 102);
LLA_IS(LLA_WEIGHT_CONV_K, 103);
LLA_IS(LLA_WEIGHT_CONV_V, 104);
LLA_IS(LLA_WEIGHT_CONV_Q_BIAS, 105);
LLA_IS(LLA_WEIGHT_CONV_K_BIAS, 106);
LLA_IS(LLA_WEIGHT_CONV_V_BIAS, 107);
LLA_IS(LLA_WEIGHT_DT_BIAS, 108);
LLA_IS(LLA_WEIGHT_A_LOG, 109);
LLA_IS(LLA_WEIGHT_LAMBDA, 110);
LLA_IS(LLA_WEIGHT_SKIP, 111);
LLA_IS(LLA_WEIGHT_NORM, 112);
LLA_IS(LLA_WEIGHT_IN_PROJ, 120);
LLA_IS(LLA_WEIGHT_IN_PROJ_BIAS, 121);
LLA_IS(LLA_WEIGHT_OUT_PROJ, 122);
LLA_IS(LLA_WEIGHT_OUT_PROJ_BIAS, 123);
LLA_IS(LLA_WEIGHT_Q_PROJ, 124);
LLA_IS(LLA_WEIGHT_K_PROJ, 125);
LLA_IS(LLA_WEIGHT_V_PROJ, 126);
LLA_IS(LLA_WEIGHT_GATE_PROJ, 127);
LLA_IS(LLA_WEIGHT_WRITE_PROJ, 128);
LLA_IS(LLA_WEIGHT_Z_PROJ, 129);
LLA_IS(LLA_WEIGHT_LAMBDA_PROJ, 130);
LLA_IS(LLA_WEIGHT_PROJ, 131);
LLA_IS(LLA_WEIGHT_PROJ_BIAS, 132);
LLA_IS(LLA_ACCUMULATE, 1);
LLA_IS(LLA_HOST, 0);
LLA_IS(LLA_DEVICE, 1);
LLA_IS(LLA_BACKEND_AUTO, 0);
LLA_IS(LLA_BACKEND_CPU, 1);
LLA_IS(LLA_BACKEND_CUDA, 2);
LLA_IS(LLA_BACKEND_REFERENCE, 3);
LLA_IS(LLA_ISA_DEFAULT, 0);
LLA_IS(LLA_ISA_BASELINE, 1);
LLA_IS(LLA_ISA_AVX2, 2);
LLA_IS(LLA_ISA_AVX512, 3);
LLA_IS(LLA_ISA_NEON, 4);
LLA_IS(LLA_DETERMINISM_DEFAULT, 0);
LLA_IS(LLA_DETERMINISM_RUN_TO_RUN, 1);
LLA_IS(LLA_DETERMINISM_BATCH_INVARIANT, 2);
LLA_IS(LLA_DETERMINISM_SPLIT_INVARIANT, 3);
LLA_IS(LLA_LOG_ERROR, 1);
LLA_IS(LLA_LOG_WARNING, 2);
LLA_IS(LLA_LOG_INFO, 3);
LLA_IS(LLA_CONTEXT_BACKEND_NAME, 1);
LLA_IS(LLA_CONTEXT_ISA_NAME, 2);
LLA_IS(LLA_CONTEXT_THREADS, 3);
LLA_IS(LLA_CONTEXT_DETERMINISM, 4);
LLA_IS(LLA_CONTEXT_FALLBACK_REASON, 5);
LLA_IS(LLA_CONTEXT_DEVICE_NAME, 6);
LLA_IS(LLA_LAYER_MIXER, 1);
LLA_IS(LLA_LAYER_CELL, 2);
LLA_IS(LLA_LAYER_MAMBA2, 3);
LLA_IS(LLA_LAYER_GATED_DELTANET, 4);
LLA_IS(LLA_LAYER_CONVOLUTION, 5);
LLA_IS(LLA_LAYER_GATES, 6);
LLA_IS(LLA_LAYER_L2_NORM, 7);
LLA_IS(LLA_LAYER_GATED_NORM, 8);
LLA_IS(LLA_LAYER_PROJECTION, 9);
LLA_IS(LLA_SCALAR_GATE, 1);
LLA_IS(LLA_DELTA_RULE, 2);
LLA_IS(LLA_HEAD_MAP_BLOCKED, 0);
LLA_IS(LLA_HEAD_MAP_CYCLIC, 1);
LLA_IS(LLA_LAMBDA_NONE, 0);
LLA_IS(LLA_LAMBDA_READY, 1);
LLA_IS(LLA_LAMBDA_SOFTPLUS, 2);
LLA_IS(LLA_LAMBDA_BOUNDED, 3);
LLA_IS(LLA_LAMBDA_PRODUCT, 4);
LLA_IS(LLA_LEVELS_ERROR, 0);
LLA_IS(LLA_LEVELS_ABSORB, 1);
LLA_IS(LLA_GATE_LOG, 0);
LLA_IS(LLA_GATE_SOFTPLUS, 1);
LLA_IS(LLA_WRITE_NONE, 0);
LLA_IS(LLA_WRITE_READY, 1);
LLA_IS(LLA_WRITE_SIGMOID, 2);
LLA_IS(LLA_WRITE_TWO_SIGMOID, 3);
LLA_IS(LLA_WRITE_STEP, 4);
LLA_IS(LLA_NORM_NONE, 0);
LLA_IS(LLA_NORM_GATE_FIRST, 1);
LLA_IS(LLA_NORM_NORM_FIRST, 2);
LLA_IS(LLA_ACTIVATION_SILU, 0);
LLA_IS(LLA_ACTIVATION_NONE, 1);
LLA_IS(LLA_LAYER_STEP_COUNT, 1);
LLA_IS(LLA_LAYER_STEP_KERNEL, 2);
LLA_IS(LLA_LAYER_BACKWARD_STEP_COUNT, 3);
LLA_IS(LLA_LAYER_BACKWARD_STEP_KERNEL, 4);
LLA_IS(LLA_LAYER_INTERMEDIATE_BYTES, 5);
LLA_IS(LLA_LAYER_LEVELS, 6);
LLA_IS(LLA_LAYER_MAX_LENGTH, 7);
LLA_IS(LLA_PASS_FORWARD, 1);
LLA_IS(LLA_PASS_BACKWARD, 2);
LLA_IS(LLA_STATE_VALUE, 0);
LLA_IS(LLA_STATE_GRADIENT, 1);
LLA_IS(LLA_BLOCK_NODE, 0);
LLA_IS(LLA_BLOCK_TAIL, 1);
LLA_IS(LLA_BLOCK_CONV, 2);
LLA_IS(LLA_STATE_SLOTS, 1);
LLA_IS(LLA_STATE_MAX_LENGTH, 2);
LLA_IS(LLA_STATE_NODE_BLOCKS, 3);
LLA_IS(LLA_STATE_FREE_NODE_BLOCKS, 4);
LLA_IS(LLA_STATE_LAYERS, 5);
LLA_IS(LLA_STATE_GRAIN, 6);
LLA_IS(LLA_STATE_SLOT_NODES, 7);
LLA_IS(LLA_STATE_SLOT_BYTES, 8);
LLA_IS(LLA_STATE_POOL_BYTES, 9);
LLA_IS(LLA_STATE_MAX_DRAFT, 10);
LLA_IS(LLA_PART_NODE, 1);
LLA_IS(LLA_PART_NODE_DECAY, 2);
LLA_IS(LLA_PART_ABSORBED, 3);
LLA_IS(LLA_PART_TAIL_K, 4);
LLA_IS(LLA_PART_TAIL_V, 5);
LLA_IS(LLA_PART_TAIL_GATE, 6);
LLA_IS(LLA_PART_TAIL_WRITE, 7);
LLA_IS(LLA_PART_CONV, 8);
LLA_IS(LLA_TAG_SIZE, 64);
LLA_IS(LLA_FAULT_ROWS, 1u);
LLA_IS(LLA_FAULT_SLOT, 2u);
LLA_IS(LLA_FAULT_POSITION, 4u);
LLA_IS(LLA_FAULT_LENGTH, 8u);
LLA_IS(LLA_FAULT_DESTINATION, 16u);
LLA_IS(LLA_FAULT_SNAPSHOT, 32u);
LLA_IS(LLA_FAULT_ACCEPTED, 64u);
LLA_IS(LLA_FAULT_MOVED, 128u);
LLA_IS(LLA_FAULT_BLOCKS, 256u);

/* Every initialiser is one of its struct, sets the size, and leaves the rest 0. */
static const lla_error error_init = LLA_ERROR_INIT;
static const lla_context_options context_options_init = LLA_CONTEXT_OPTIONS_INIT;
static const lla_batch_limits batch_limits_init = LLA_BATCH_LIMITS_INIT;
static const lla_rows rows_init = LLA_ROWS_INIT;
static const lla_layer_desc layer_desc_init = LLA_LAYER_DESC_INIT;
static const lla_forward_args forward_args_init = LLA_FORWARD_ARGS_INIT;
static const lla_backward_args backward_args_init = LLA_BACKWARD_ARGS_INIT;
static const lla_state_desc state_desc_init = LLA_STATE_DESC_INIT;
static const lla_block_geometry block_geometry_init = LLA_BLOCK_GEOMETRY_INIT;

static int is_init(const void *data, size_t size) {
  const unsigned char *bytes = (const unsigned char *)data;
  const size_t *struct_size = (const size_t *)data;
  size_t i;
  for (i = sizeof(size_t); i < size; ++i) {
    if (bytes[i] != 0) return 0;
  }
  return *struct_size == size;
}

int main(void) {
  return is_init(&error_init, sizeof error_init) && is_init(&context_options_init, sizeof context_options_init) &&
                 is_init(&batch_limits_init, sizeof batch_limits_init) && is_init(&rows_init, sizeof rows_init) &&
                 is_init(&layer_desc_init, sizeof layer_desc_init) &&
                 is_init(&forward_args_init, sizeof forward_args_init) &&
                 is_init(&backward_args_init, sizeof backward_args_init) &&
                 is_init(&state_desc_init, sizeof state_desc_init) &&
                 is_init(&block_geometry_init, sizeof block_geometry_init)
             ? 0
             : 1;
}
