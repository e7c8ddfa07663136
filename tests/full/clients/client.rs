// SPDX-License-Identifier: Apache-2.0
// The same in Rust, without the crates: the few declarations that it needs, written down from the headers.
use std::ffi::CStr;
use std::os::raw::{c_char, c_void};
use std::ptr::{null, null_mut};

#[repr(C)]
#[derive(Clone, Copy)]
struct Tensor {
    data: *mut f32,
    dtype: i32,
    rank: i32,
    dims: [i64; 6],
    strides: [i64; 6],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Binding {
    role: i32,
    flags: i32,
    tensor: Tensor,
}

#[repr(C)]
struct ContextOptions {
    struct_size: usize,
    backend: i32,
    rest: [i32; 5],
    hooks: [*const c_void; 3],
}

#[repr(C)]
struct LayerDescription {
    struct_size: usize,
    kind: i32,
    mixer: i32,
    heads: i64,
    groups: i64,
    key_dim: i64,
    value_dim: i64,
    hidden: i64,
    outputs: i64,
    grain: i64,
    levels: i64,
    lambda_form: i32,
    rest: [i32; 5],
    numbers: [f64; 5],
    convolution: [i64; 2],
    norm: [i64; 3],
}

#[repr(C)]
struct Error {
    struct_size: usize,
    code: i32,
    text: [c_char; 244],
}

#[link(name = "lla")]
extern "C" {
    fn lla_version_string() -> *const c_char;
    fn lla_levels_needed(length: i64) -> i64;
    fn lla_context_create(options: *const ContextOptions, context: *mut *mut c_void, error: *mut Error) -> i32;
    fn lla_context_release(context: *mut c_void);
    fn lla_layer_create(
        context: *mut c_void,
        description: *const LayerDescription,
        layer: *mut *mut c_void,
        error: *mut Error,
    ) -> i32;
    fn lla_layer_release(layer: *mut c_void);
    fn lla_state_create(
        layers: *const *mut c_void,
        count: i64,
        description: *const c_void,
        memory: *const c_void,
        memory_count: i64,
        state: *mut *mut c_void,
        error: *mut Error,
    ) -> i32;
    fn lla_state_release(state: *mut c_void);
    fn lla_append(
        layer: *const c_void,
        state: *mut c_void,
        slot: i64,
        io: *const Binding,
        io_count: i64,
        weights: *const Binding,
        weight_count: i64,
        stream: *mut c_void,
        error: *mut Error,
    ) -> i32;
}

fn bind(role: i32, data: &mut [f32], last: i64) -> Binding {
    let tensor = Tensor {
        data: data.as_mut_ptr(),
        dtype: 1,
        rank: 3,
        dims: [4, 1, last, 0, 0, 0],
        strides: [last, last, 1, 0, 0, 0],
    };
    Binding { role, flags: 0, tensor }
}

fn main() {
    let (mut context, mut layer, mut state) = (null_mut(), null_mut(), null_mut());
    let mut error = Error { struct_size: std::mem::size_of::<Error>(), code: 0, text: [0; 244] };
    unsafe {
        let check = |status: i32, error: &Error| {
            assert_eq!(status, 0, "{}", CStr::from_ptr(error.text.as_ptr()).to_string_lossy());
        };
        let options = ContextOptions {
            struct_size: std::mem::size_of::<ContextOptions>(),
            backend: 1,
            rest: [0; 5],
            hooks: [null(); 3],
        };
        check(lla_context_create(&options, &mut context, &mut error), &error);
        let levels = lla_levels_needed(4);
        let mut description: LayerDescription = std::mem::zeroed();
        description.struct_size = std::mem::size_of::<LayerDescription>();
        description.kind = 1;
        description.mixer = 1;
        description.heads = 1;
        description.key_dim = 1;
        description.value_dim = 1;
        description.levels = levels;
        description.lambda_form = 1;
        check(lla_layer_create(context, &description, &mut layer, &mut error), &error);
        check(lla_state_create(&layer, 1, null(), null(), 0, &mut state, &mut error), &error);
        let (mut ones, mut y) = (vec![1f32; 4 * levels as usize], [0f32; 4]);
        let io = [
            bind(1, &mut ones, 1),
            bind(2, &mut ones, 1),
            bind(3, &mut ones, 1),
            bind(6, &mut ones, levels),
            bind(9, &mut y, 1),
        ];
        check(lla_append(layer, state, 0, io.as_ptr(), 5, null(), 0, null_mut(), &mut error), &error);
        let version = CStr::from_ptr(lla_version_string()).to_string_lossy();
        println!("lla {version}: {} {} {} {}", y[0], y[1], y[2], y[3]);
        lla_state_release(state);
        lla_layer_release(layer);
        lla_context_release(context);
    }
}
