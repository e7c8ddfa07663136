// SPDX-License-Identifier: Apache-2.0
//! The C interface of lla 0.1, declared in the order of its headers, which are its documentation. `tests/layout.rs`
//! compares sizes, offsets, numbers and names with the headers that are installed.
#![allow(non_camel_case_types)]

use std::os::raw::{c_char, c_void};

/// Defines numbers of a type, and lists them for the test.
macro_rules! constants {
    ($($type:ident { $($name:ident = $value:literal,)* })*) => {
        $($(pub const $name: $type = $value;)*)*
        #[doc(hidden)]
        pub const CONSTANTS: &[(&str, i64)] = &[$($((stringify!($name), $name as i64),)*)*];
    };
}

/// Defines structs, a zeroed `Default` that sets `struct_size` where there is one, and lists their fields for the test.
macro_rules! structs {
    ($($name:ident($value:ident $($size:ident)?) { $($field:ident: $type:ty,)* })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name { $(pub $field: $type,)* }

            impl Default for $name {
                #[allow(unused_mut)]
                fn default() -> Self {
                    // SAFETY: numbers, pointers and optional functions, for all of which zero is a value.
                    let mut $value: Self = unsafe { std::mem::zeroed() };
                    $($value.$size = std::mem::size_of::<Self>();)?
                    $value
                }
            }
        )*

        #[doc(hidden)]
        pub fn layouts() -> Vec<(&'static str, usize, Vec<(&'static str, usize)>)> {
            vec![$({
                let value = $name::default();
                let base = &value as *const $name as usize;
                let fields = vec![$((stringify!($field), std::ptr::addr_of!(value.$field) as usize - base),)*];
                (stringify!($name), std::mem::size_of::<$name>(), fields)
            },)*]
        }
    };
}

pub type lla_status = i32;
pub type lla_dtype = i32;
pub type lla_role = i32;
pub type lla_location = i32;
pub type lla_backend = i32;
pub type lla_isa = i32;
pub type lla_determinism = i32;
pub type lla_log_level = i32;
pub type lla_context_key = i32;
pub type lla_layer_kind = i32;
pub type lla_mixer = i32;
pub type lla_head_map = i32;
pub type lla_lambda_form = i32;
pub type lla_level_overflow = i32;
pub type lla_gate_form = i32;
pub type lla_write_form = i32;
pub type lla_norm_form = i32;
pub type lla_activation = i32;
pub type lla_layer_key = i32;
pub type lla_pass = i32;
pub type lla_state_kind = i32;
pub type lla_block_kind = i32;
pub type lla_state_key = i32;
pub type lla_state_part = i32;

pub const LLA_MAX_RANK: usize = 6;
pub const LLA_ERROR_TEXT_SIZE: usize = 244;
pub const LLA_TAG_SIZE: usize = 64;

constants! {
    i32 {
        LLA_VERSION_MAJOR = 0, LLA_VERSION_MINOR = 1, LLA_VERSION_PATCH = 0, LLA_ABI_VERSION = 0,
    }
    lla_status {
        LLA_OK = 0, LLA_INVALID_ARGUMENT = 10, LLA_NULL_POINTER = 11, LLA_STRUCT_VERSION = 12,
        LLA_SHAPE_MISMATCH = 13, LLA_DTYPE_MISMATCH = 14, LLA_MISALIGNED = 15, LLA_BUFFER_TOO_SMALL = 16,
        LLA_WRONG_CONTEXT = 17, LLA_SIZE_OVERFLOW = 18, LLA_MISSING_ROLE = 19, LLA_LEVELS_EXCEEDED = 30,
        LLA_STATE_INCOMPATIBLE = 31, LLA_DATA_CORRUPT = 32, LLA_BUSY = 33, LLA_NO_BLOCKS = 34,
        LLA_POSITION_MISMATCH = 35, LLA_SLOT_IN_USE = 36, LLA_ROLLBACK_LIMIT = 37, LLA_UNSUPPORTED = 50,
        LLA_NOT_IMPLEMENTED = 51, LLA_NO_DEVICE = 52, LLA_DRIVER_TOO_OLD = 53, LLA_BACKEND_MISSING = 54,
        LLA_BACKEND_MISMATCH = 55, LLA_FORKED = 56, LLA_OUT_OF_MEMORY = 70, LLA_OUT_OF_DEVICE_MEMORY = 71,
        LLA_THREADS_FAILED = 72, LLA_DEVICE_ERROR = 90, LLA_CAPTURE_UNSAFE = 91, LLA_INTERNAL = 110,
    }
    lla_dtype {
        LLA_DTYPE_DEFAULT = 0, LLA_F32 = 1, LLA_BF16 = 2, LLA_F16 = 3, LLA_F64 = 4, LLA_I32 = 5, LLA_I64 = 6,
    }
    lla_role {
        LLA_Q = 1, LLA_K = 2, LLA_V = 3, LLA_GATE = 4, LLA_WRITE = 5, LLA_LAMBDA = 6, LLA_Z = 7, LLA_X = 8, LLA_Y = 9,
        LLA_SKIP_INPUT = 10, LLA_GATE_OUT = 11, LLA_WRITE_OUT = 12, LLA_LAMBDA_OUT = 13, LLA_WEIGHT_CONV = 100,
        LLA_WEIGHT_CONV_BIAS = 101, LLA_WEIGHT_CONV_Q = 102, LLA_WEIGHT_CONV_K = 103, LLA_WEIGHT_CONV_V = 104,
        LLA_WEIGHT_CONV_Q_BIAS = 105, LLA_WEIGHT_CONV_K_BIAS = 106, LLA_WEIGHT_CONV_V_BIAS = 107,
        LLA_WEIGHT_DT_BIAS = 108, LLA_WEIGHT_A_LOG = 109, LLA_WEIGHT_LAMBDA = 110, LLA_WEIGHT_SKIP = 111,
        LLA_WEIGHT_NORM = 112, LLA_WEIGHT_IN_PROJ = 120, LLA_WEIGHT_IN_PROJ_BIAS = 121, LLA_WEIGHT_OUT_PROJ = 122,
        LLA_WEIGHT_OUT_PROJ_BIAS = 123, LLA_WEIGHT_Q_PROJ = 124, LLA_WEIGHT_K_PROJ = 125, LLA_WEIGHT_V_PROJ = 126,
        LLA_WEIGHT_GATE_PROJ = 127, LLA_WEIGHT_WRITE_PROJ = 128, LLA_WEIGHT_Z_PROJ = 129,
        LLA_WEIGHT_LAMBDA_PROJ = 130, LLA_WEIGHT_PROJ = 131, LLA_WEIGHT_PROJ_BIAS = 132,
    }
    i32 {
        LLA_ACCUMULATE = 1,
    }
    lla_location {
        LLA_HOST = 0, LLA_DEVICE = 1,
    }
    lla_backend {
        LLA_BACKEND_AUTO = 0, LLA_BACKEND_CPU = 1, LLA_BACKEND_CUDA = 2, LLA_BACKEND_REFERENCE = 3,
    }
    lla_isa {
        LLA_ISA_DEFAULT = 0, LLA_ISA_BASELINE = 1, LLA_ISA_AVX2 = 2, LLA_ISA_AVX512 = 3, LLA_ISA_NEON = 4,
    }
    lla_determinism {
        LLA_DETERMINISM_DEFAULT = 0, LLA_DETERMINISM_RUN_TO_RUN = 1, LLA_DETERMINISM_BATCH_INVARIANT = 2,
        LLA_DETERMINISM_SPLIT_INVARIANT = 3,
    }
    lla_log_level {
        LLA_LOG_ERROR = 1, LLA_LOG_WARNING = 2, LLA_LOG_INFO = 3,
    }
    lla_context_key {
        LLA_CONTEXT_BACKEND_NAME = 1, LLA_CONTEXT_ISA_NAME = 2, LLA_CONTEXT_THREADS = 3, LLA_CONTEXT_DETERMINISM = 4,
        LLA_CONTEXT_FALLBACK_REASON = 5, LLA_CONTEXT_DEVICE_NAME = 6,
    }
    lla_layer_kind {
        LLA_LAYER_MIXER = 1, LLA_LAYER_CELL = 2, LLA_LAYER_MAMBA2 = 3, LLA_LAYER_GATED_DELTANET = 4,
        LLA_LAYER_CONVOLUTION = 5, LLA_LAYER_GATES = 6, LLA_LAYER_L2_NORM = 7, LLA_LAYER_GATED_NORM = 8,
        LLA_LAYER_PROJECTION = 9,
    }
    lla_mixer {
        LLA_SCALAR_GATE = 1, LLA_DELTA_RULE = 2,
    }
    lla_head_map {
        LLA_HEAD_MAP_BLOCKED = 0, LLA_HEAD_MAP_CYCLIC = 1,
    }
    lla_lambda_form {
        LLA_LAMBDA_NONE = 0, LLA_LAMBDA_READY = 1, LLA_LAMBDA_SOFTPLUS = 2, LLA_LAMBDA_BOUNDED = 3,
        LLA_LAMBDA_PRODUCT = 4,
    }
    lla_level_overflow {
        LLA_LEVELS_ERROR = 0, LLA_LEVELS_ABSORB = 1,
    }
    lla_gate_form {
        LLA_GATE_LOG = 0, LLA_GATE_SOFTPLUS = 1,
    }
    lla_write_form {
        LLA_WRITE_NONE = 0, LLA_WRITE_READY = 1, LLA_WRITE_SIGMOID = 2, LLA_WRITE_TWO_SIGMOID = 3, LLA_WRITE_STEP = 4,
    }
    lla_norm_form {
        LLA_NORM_NONE = 0, LLA_NORM_GATE_FIRST = 1, LLA_NORM_NORM_FIRST = 2,
    }
    lla_activation {
        LLA_ACTIVATION_SILU = 0, LLA_ACTIVATION_NONE = 1,
    }
    lla_layer_key {
        LLA_LAYER_STEP_COUNT = 1, LLA_LAYER_STEP_KERNEL = 2, LLA_LAYER_BACKWARD_STEP_COUNT = 3,
        LLA_LAYER_BACKWARD_STEP_KERNEL = 4, LLA_LAYER_INTERMEDIATE_BYTES = 5, LLA_LAYER_LEVELS = 6,
        LLA_LAYER_MAX_LENGTH = 7,
    }
    lla_pass {
        LLA_PASS_FORWARD = 1, LLA_PASS_BACKWARD = 2,
    }
    lla_state_kind {
        LLA_STATE_VALUE = 0, LLA_STATE_GRADIENT = 1,
    }
    lla_block_kind {
        LLA_BLOCK_NODE = 0, LLA_BLOCK_TAIL = 1, LLA_BLOCK_CONV = 2,
    }
    lla_state_key {
        LLA_STATE_SLOTS = 1, LLA_STATE_MAX_LENGTH = 2, LLA_STATE_NODE_BLOCKS = 3, LLA_STATE_FREE_NODE_BLOCKS = 4,
        LLA_STATE_LAYERS = 5, LLA_STATE_GRAIN = 6, LLA_STATE_SLOT_NODES = 7, LLA_STATE_SLOT_BYTES = 8,
        LLA_STATE_POOL_BYTES = 9, LLA_STATE_MAX_DRAFT = 10,
    }
    u32 {
        LLA_FAULT_ROWS = 1, LLA_FAULT_SLOT = 2, LLA_FAULT_POSITION = 4, LLA_FAULT_LENGTH = 8, LLA_FAULT_DESTINATION = 16,
        LLA_FAULT_SNAPSHOT = 32, LLA_FAULT_ACCEPTED = 64, LLA_FAULT_MOVED = 128, LLA_FAULT_BLOCKS = 256,
    }
    lla_state_part {
        LLA_PART_NODE = 1, LLA_PART_NODE_DECAY = 2, LLA_PART_ABSORBED = 3, LLA_PART_TAIL_K = 4, LLA_PART_TAIL_V = 5,
        LLA_PART_TAIL_GATE = 6, LLA_PART_TAIL_WRITE = 7, LLA_PART_CONV = 8,
    }
}

/// Objects of the library: only pointers to them exist here.
macro_rules! opaque {
    ($($name:ident)*) => { $(
        #[repr(C)]
        pub struct $name {
            _private: [u8; 0],
            _marker: std::marker::PhantomData<(*mut u8, std::marker::PhantomPinned)>,
        }
    )* };
}
opaque! { lla_context lla_layer lla_state lla_batch lla_tasks }

pub type lla_task = Option<unsafe extern "C" fn(task: i64, thread: i32, argument: *mut c_void)>;
pub type lla_allocate = Option<unsafe extern "C" fn(bytes: usize, alignment: usize, user: *mut c_void) -> *mut c_void>;
pub type lla_deallocate =
    Option<unsafe extern "C" fn(memory: *mut c_void, bytes: usize, alignment: usize, user: *mut c_void)>;
pub type lla_run =
    Option<unsafe extern "C" fn(count: i64, task: lla_task, argument: *mut c_void, user: *mut c_void) -> i32>;
pub type lla_write = Option<unsafe extern "C" fn(level: lla_log_level, text: *const c_char, user: *mut c_void)>;

structs! {
    lla_error(value struct_size) {
        struct_size: usize, code: lla_status, text: [c_char; LLA_ERROR_TEXT_SIZE],
    }
    lla_tensor(value) {
        data: *mut c_void, dtype: lla_dtype, rank: i32, dims: [i64; LLA_MAX_RANK], strides: [i64; LLA_MAX_RANK],
    }
    lla_binding(value) {
        role: lla_role, flags: i32, tensor: lla_tensor,
    }
    lla_index(value) {
        data: *const c_void, dtype: lla_dtype, location: lla_location,
    }
    lla_allocator(value struct_size) {
        struct_size: usize, allocate: lla_allocate, release: lla_deallocate, user: *mut c_void,
    }
    lla_parallel(value struct_size) {
        struct_size: usize, max_threads: i32, reserved: i32, run: lla_run, user: *mut c_void,
    }
    lla_log(value struct_size) {
        struct_size: usize, level: lla_log_level, reserved: i32, write: lla_write, user: *mut c_void,
    }
    lla_context_options(value struct_size) {
        struct_size: usize, backend: lla_backend, device: i32, isa: lla_isa, determinism: lla_determinism,
        threads: i32, reserved: i32, allocator: *const lla_allocator, parallel: *const lla_parallel,
        log: *const lla_log,
    }
    lla_batch_limits(value struct_size) {
        struct_size: usize, max_sequences: i64, max_rows: i64, max_rows_per_sequence: i64, max_length: i64,
        max_snapshots: i64, replay: i32, reserved: i32,
    }
    lla_rows(value struct_size) {
        struct_size: usize, sequences: i64, rows_per_sequence: i64, total_rows: i64, offsets: lla_index,
        counts: lla_index, slot_in: lla_index, slot_out: lla_index, expected_positions: lla_index, snapshots: i64,
        snapshot_sequences: lla_index, snapshot_rows: lla_index, snapshot_slots: lla_index,
        gradient_state: *mut lla_state, initial_gradient_slots: lla_index, final_gradient_slots: lla_index,
    }
    lla_layer_desc(value struct_size) {
        struct_size: usize, kind: lla_layer_kind, mixer: lla_mixer, heads: i64, groups: i64, key_dim: i64,
        value_dim: i64, hidden: i64, outputs: i64, grain: i64, levels: i64, lambda_form: lla_lambda_form,
        level_overflow: lla_level_overflow, gate_form: lla_gate_form, write_form: lla_write_form,
        head_map: lla_head_map, qk_norm: i32, scale: f64, lambda_scale: f64, qk_norm_epsilon: f64, dt_min: f64,
        dt_max: f64, conv_width: i64, conv_activation: lla_activation, norm_form: lla_norm_form, norm_group: i64,
        norm_epsilon: f64, inner_dtype: lla_dtype, reserved: i32,
    }
    lla_forward_args(value struct_size) {
        struct_size: usize, batch: *mut lla_batch, state: *mut lla_state, layer_index: i64, io: *const lla_binding,
        io_count: i64, weights: *const lla_binding, weight_count: i64, workspace: *mut c_void, workspace_bytes: usize,
        saved: *mut c_void, saved_bytes: usize, stream: *mut c_void,
    }
    lla_backward_args(value struct_size) {
        struct_size: usize, batch: *mut lla_batch, state: *mut lla_state, layer_index: i64, io: *const lla_binding,
        io_count: i64, weights: *const lla_binding, weight_count: i64, outputs: *const lla_binding, output_count: i64,
        gradients: *const lla_binding, gradient_count: i64, workspace: *mut c_void, workspace_bytes: usize,
        saved: *const c_void, saved_bytes: usize, stream: *mut c_void,
    }
    lla_state_desc(value struct_size) {
        struct_size: usize, kind: lla_state_kind, node_dtype: lla_dtype, tail_dtype: lla_dtype, reserved: i32,
        slots: i64, max_length: i64, max_draft: i64, node_blocks: i64,
    }
    lla_block_geometry(value struct_size) {
        struct_size: usize, count: i64, bytes: i64, alignment: i64, head_bytes: i64, blocks_per_fold: i64,
        record_bytes: i64, layout: i64,
    }
    lla_block_memory(value) {
        layer_index: i64, kind: lla_block_kind, reserved: i32, base: *mut c_void, stride: i64,
    }
    lla_image_info(value struct_size) {
        struct_size: usize, bytes: i64, position: i64, layers: i64, grain: i64, format: i32, reserved: i32,
        tag: [c_char; LLA_TAG_SIZE],
    }
}

extern "C" {
    pub fn lla_version() -> i32;
    pub fn lla_version_string() -> *const c_char;
    pub fn lla_abi_version() -> i32;
    pub fn lla_source_id() -> *const c_char;
    pub fn lla_build_option_count() -> i64;
    pub fn lla_build_option(index: i64) -> *const c_char;
    pub fn lla_status_name(status: lla_status) -> *const c_char;
    pub fn lla_status_message(status: lla_status) -> *const c_char;
    pub fn lla_dtype_size(dtype: lla_dtype) -> usize;
    pub fn lla_levels_needed(length: i64) -> i64;
    pub fn lla_level_of(query: i64, key: i64) -> i64;
    pub fn lla_context_create(
        options: *const lla_context_options,
        context: *mut *mut lla_context,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_context_retain(context: *mut lla_context) -> *mut lla_context;
    pub fn lla_context_release(context: *mut lla_context);
    pub fn lla_context_query(
        context: *const lla_context,
        key: lla_context_key,
        value: *mut c_void,
        size: *mut usize,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_backend_available(backend: lla_backend, reason: *mut c_char, capacity: usize) -> lla_status;
    pub fn lla_device_allocate(
        context: *mut lla_context,
        bytes: usize,
        memory: *mut *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_device_release(context: *mut lla_context, memory: *mut c_void, bytes: usize);
    pub fn lla_device_copy(
        context: *mut lla_context,
        to: *mut c_void,
        from: *const c_void,
        bytes: usize,
        stream: *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_device_wait(context: *mut lla_context, stream: *mut c_void, error: *mut lla_error) -> lla_status;
    pub fn lla_batch_size(
        context: *const lla_context,
        limits: *const lla_batch_limits,
        bytes: *mut usize,
        alignment: *mut usize,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_batch_init(
        context: *mut lla_context,
        limits: *const lla_batch_limits,
        memory: *mut c_void,
        bytes: usize,
        batch: *mut *mut lla_batch,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_batch_device_size(
        context: *const lla_context,
        limits: *const lla_batch_limits,
        bytes: *mut usize,
        alignment: *mut usize,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_batch_bind_device(
        batch: *mut lla_batch,
        memory: *mut c_void,
        bytes: usize,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_batch_plan(
        batch: *mut lla_batch,
        state: *mut lla_state,
        rows: *const lla_rows,
        stream: *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_batch_discard(batch: *mut lla_batch);
    pub fn lla_batch_collect(batch: *mut lla_batch, stream: *mut c_void, error: *mut lla_error) -> lla_status;
    pub fn lla_batch_faults(batch: *const lla_batch) -> u32;
    pub fn lla_layer_create(
        context: *mut lla_context,
        description: *const lla_layer_desc,
        layer: *mut *mut lla_layer,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_layer_retain(layer: *mut lla_layer) -> *mut lla_layer;
    pub fn lla_layer_release(layer: *mut lla_layer);
    pub fn lla_layer_supported(
        context: *mut lla_context,
        description: *const lla_layer_desc,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_layer_query(
        layer: *const lla_layer,
        key: lla_layer_key,
        index: i64,
        value: *mut c_void,
        size: *mut usize,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_layer_workspace(
        layer: *const lla_layer,
        limits: *const lla_batch_limits,
        pass: lla_pass,
        bytes: *mut usize,
        alignment: *mut usize,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_layer_saved_size(
        layer: *const lla_layer,
        limits: *const lla_batch_limits,
        bytes: *mut usize,
        alignment: *mut usize,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_layer_forward(
        layer: *const lla_layer,
        arguments: *const lla_forward_args,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_layer_backward(
        layer: *const lla_layer,
        arguments: *const lla_backward_args,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_layer_forward_tasks(
        layer: *const lla_layer,
        arguments: *const lla_forward_args,
        tasks: *mut *mut lla_tasks,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_layer_backward_tasks(
        layer: *const lla_layer,
        arguments: *const lla_backward_args,
        tasks: *mut *mut lla_tasks,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_tasks_phases(tasks: *const lla_tasks) -> i64;
    pub fn lla_tasks_count(tasks: *const lla_tasks, phase: i64) -> i64;
    pub fn lla_tasks_run(tasks: *mut lla_tasks, phase: i64, task: i64, thread: i32);
    pub fn lla_append(
        layer: *const lla_layer,
        state: *mut lla_state,
        slot: i64,
        io: *const lla_binding,
        io_count: i64,
        weights: *const lla_binding,
        weight_count: i64,
        stream: *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_geometry(
        layers: *const *mut lla_layer,
        layer_count: i64,
        description: *const lla_state_desc,
        layer_index: i64,
        kind: lla_block_kind,
        geometry: *mut lla_block_geometry,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_create(
        layers: *const *mut lla_layer,
        layer_count: i64,
        description: *const lla_state_desc,
        memory: *const lla_block_memory,
        memory_count: i64,
        state: *mut *mut lla_state,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_retain(state: *mut lla_state) -> *mut lla_state;
    pub fn lla_state_release(state: *mut lla_state);
    pub fn lla_state_commit(
        state: *mut lla_state,
        batch: *mut lla_batch,
        accepted: lla_index,
        stream: *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_settle(
        state: *mut lla_state,
        batch: *mut lla_batch,
        accepted: lla_index,
        released: *mut i64,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_reset(
        state: *mut lla_state,
        slots: lla_index,
        count: i64,
        positions: lla_index,
        stream: *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_fork(
        state: *mut lla_state,
        sources: lla_index,
        targets: lla_index,
        count: i64,
        stream: *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_truncate(
        state: *mut lla_state,
        slot: i64,
        position: i64,
        stream: *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_length(state: *const lla_state, slot: i64, length: *mut i64, error: *mut lla_error) -> lla_status;
    pub fn lla_state_min_length(
        state: *const lla_state,
        slot: i64,
        length: *mut i64,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_query(
        state: *const lla_state,
        key: lla_state_key,
        slot: i64,
        value: *mut i64,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_read(
        state: *const lla_state,
        slot: i64,
        layer_index: i64,
        part: lla_state_part,
        index: i64,
        tensor: *const lla_tensor,
        stream: *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_write(
        state: *mut lla_state,
        slot: i64,
        layer_index: i64,
        part: lla_state_part,
        index: i64,
        tensor: *const lla_tensor,
        stream: *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_import_linear(
        state: *mut lla_state,
        slot: i64,
        layer_index: i64,
        position: i64,
        matrix: *const lla_tensor,
        reset: i32,
        stream: *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_export_size(
        state: *const lla_state,
        slot: i64,
        bytes: *mut usize,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_pack(
        state: *const lla_state,
        slot: i64,
        buffer: *mut c_void,
        bytes: usize,
        stream: *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_seal(buffer: *mut c_void, bytes: usize, tag: *const c_char, error: *mut lla_error) -> lla_status;
    pub fn lla_state_check(
        buffer: *const c_void,
        bytes: usize,
        tag: *const c_char,
        info: *mut lla_image_info,
        error: *mut lla_error,
    ) -> lla_status;
    pub fn lla_state_unpack(
        state: *mut lla_state,
        slot: i64,
        buffer: *const c_void,
        bytes: usize,
        stream: *mut c_void,
        error: *mut lla_error,
    ) -> lla_status;
}
