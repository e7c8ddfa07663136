// SPDX-License-Identifier: Apache-2.0
//! Tensors: borrowed slices with a shape, in a role.
use std::marker::PhantomData;
use std::os::raw::c_void;

use lla_sys as sys;

use crate::error::{int, Error, Result};

/// A bfloat16, as its bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// An IEEE binary16, as its bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

mod sealed {
    pub trait Sealed {}
}

/// Types that tensors consist of.
pub trait Element: sealed::Sealed + Copy + 'static {
    #[doc(hidden)]
    const DTYPE: sys::lla_dtype;
}

macro_rules! elements {
    ($($type:ty = $dtype:ident)*) => { $(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: sys::lla_dtype = sys::$dtype;
        }
    )* };
}
elements! { f32 = LLA_F32  f64 = LLA_F64  Bf16 = LLA_BF16  F16 = LLA_F16 }

macro_rules! roles {
    ($($(#[$doc:meta])* $name:ident = $number:ident,)*) => {
        /// What a tensor is to a layer. Shapes: N rows, H heads, G groups, dk and dv key and value size, L λ columns.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(i32)]
        pub enum Role { $($(#[$doc])* $name = sys::$number,)* }
    };
}
roles! {
    /// Queries `[N, G, dk]`.
    Q = LLA_Q,
    /// Keys `[N, G, dk]`.
    K = LLA_K,
    /// Values `[N, H, dv]`.
    V = LLA_V,
    /// Log gate `[N, H]`, or what the gate form makes it from.
    Gate = LLA_GATE,
    /// Write strength `[N, H]`, or what the write form makes it from.
    Write = LLA_WRITE,
    /// Level weights `[N, H, L]`, or what the λ form makes them from.
    Lambda = LLA_LAMBDA,
    /// Output gate `[N, H * dv]`.
    Z = LLA_Z,
    /// Input of a block or part `[N, hidden]`.
    X = LLA_X,
    /// Output: mixer `[N, H, dv]`, cell [N, H * dv], block [N, hidden].
    Y = LLA_Y,
    /// Value of the skip connection of a gated norm `[N, H, dv]`.
    SkipInput = LLA_SKIP_INPUT,
    /// Output of the part `Gates`: log gate `[N, H]`.
    GateOut = LLA_GATE_OUT,
    /// Output of the part `Gates`: write strength `[N, H]`.
    WriteOut = LLA_WRITE_OUT,
    /// Output of the part `Gates`: λ `[N, H, L]`.
    LambdaOut = LLA_LAMBDA_OUT,
    /// Convolution of one stream `[channels, W]`.
    WeightConv = LLA_WEIGHT_CONV,
    /// Its bias `[channels]`.
    WeightConvBias = LLA_WEIGHT_CONV_BIAS,
    /// Convolution of the queries `[G * dk, W]`.
    WeightConvQ = LLA_WEIGHT_CONV_Q,
    /// Convolution of the keys `[G * dk, W]`.
    WeightConvK = LLA_WEIGHT_CONV_K,
    /// Convolution of the values `[H * dv, W]`.
    WeightConvV = LLA_WEIGHT_CONV_V,
    /// Bias of the queries' convolution `[G * dk]`.
    WeightConvQBias = LLA_WEIGHT_CONV_Q_BIAS,
    /// Bias of the keys' convolution `[G * dk]`.
    WeightConvKBias = LLA_WEIGHT_CONV_K_BIAS,
    /// Bias of the values' convolution `[H * dv]`.
    WeightConvVBias = LLA_WEIGHT_CONV_V_BIAS,
    /// Bias added to the raw gate `[H]`.
    WeightDtBias = LLA_WEIGHT_DT_BIAS,
    /// Log of the decay rate `[H]`.
    WeightALog = LLA_WEIGHT_A_LOG,
    /// Parameter of the λ form `[H, L]`.
    WeightLambda = LLA_WEIGHT_LAMBDA,
    /// Skip D: `[H]` or `[H * dv]`.
    WeightSkip = LLA_WEIGHT_SKIP,
    /// Scale of the gated norm: `[H * dv]` or `[norm_group]`.
    WeightNorm = LLA_WEIGHT_NORM,
    /// Mamba-2: input projection.
    WeightInProj = LLA_WEIGHT_IN_PROJ,
    /// Its bias.
    WeightInProjBias = LLA_WEIGHT_IN_PROJ_BIAS,
    /// Output projection `[hidden, H * dv]`.
    WeightOutProj = LLA_WEIGHT_OUT_PROJ,
    /// Its bias `[hidden]`.
    WeightOutProjBias = LLA_WEIGHT_OUT_PROJ_BIAS,
    /// Gated DeltaNet: queries `[G * dk, hidden]`.
    WeightQProj = LLA_WEIGHT_Q_PROJ,
    /// Gated DeltaNet: keys `[G * dk, hidden]`.
    WeightKProj = LLA_WEIGHT_K_PROJ,
    /// Gated DeltaNet: values `[H * dv, hidden]`.
    WeightVProj = LLA_WEIGHT_V_PROJ,
    /// Gated DeltaNet: raw gate `[H, hidden]`.
    WeightGateProj = LLA_WEIGHT_GATE_PROJ,
    /// Gated DeltaNet: raw write strength `[H, hidden]`.
    WeightWriteProj = LLA_WEIGHT_WRITE_PROJ,
    /// Gated DeltaNet: output gate `[H * dv, hidden]`.
    WeightZProj = LLA_WEIGHT_Z_PROJ,
    /// Gated DeltaNet: raw λ `[H * L, hidden]`.
    WeightLambdaProj = LLA_WEIGHT_LAMBDA_PROJ,
    /// Part `Projection`: `[outputs, hidden]`.
    WeightProj = LLA_WEIGHT_PROJ,
    /// Its bias `[outputs]`.
    WeightProjBias = LLA_WEIGHT_PROJ_BIAS,
}

/// A tensor that is read. The same bytes as an `lla_binding`, so that slices of views are arrays of bindings.
#[repr(transparent)]
pub struct View<'a> {
    binding: sys::lla_binding,
    data: PhantomData<&'a [u8]>,
}

/// A tensor that is written.
#[repr(transparent)]
pub struct ViewMut<'a> {
    binding: sys::lla_binding,
    data: PhantomData<&'a mut [u8]>,
}

impl<'a> View<'a> {
    /// A contiguous tensor: `data.len()` must be the product of `shape`.
    pub fn new<T: Element>(role: Role, data: &'a [T], shape: &[usize]) -> Result<Self> {
        let binding = contiguous(role, data.as_ptr(), data.len(), shape)?;
        Ok(View { binding, data: PhantomData })
    }

    /// A part of a larger tensor: `strides` in elements, the last axis contiguous.
    pub fn strided<T: Element>(role: Role, data: &'a [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        let mut binding = describe(role, data.as_ptr(), shape)?;
        if strides.len() != shape.len() {
            return Err(Error::new(
                sys::LLA_SHAPE_MISMATCH,
                format!("{role:?}: {} strides for {shape:?}", strides.len()),
            ));
        }
        let mut last = Some(0usize);
        for (axis, (&size, &stride)) in shape.iter().zip(strides).enumerate() {
            binding.tensor.strides[axis] = int(stride)?;
            last = last.zip(size.saturating_sub(1).checked_mul(stride)).and_then(|(sum, step)| sum.checked_add(step));
        }
        if !shape.contains(&0) && last.map_or(true, |last| last >= data.len()) {
            let text = format!("{role:?}: {shape:?} with strides {strides:?} leaves its {} elements", data.len());
            return Err(Error::new(sys::LLA_SHAPE_MISMATCH, text));
        }
        Ok(View { binding, data: PhantomData })
    }

    pub(crate) fn tensor(&self) -> &sys::lla_tensor {
        &self.binding.tensor
    }
}

impl<'a> ViewMut<'a> {
    /// A contiguous tensor that is overwritten: `data.len()` must be the product of `shape`.
    pub fn new<T: Element>(role: Role, data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        let binding = contiguous(role, data.as_mut_ptr(), data.len(), shape)?;
        Ok(ViewMut { binding, data: PhantomData })
    }

    /// A gradient is added to what the tensor holds, instead of overwriting it.
    pub fn accumulate(mut self) -> Self {
        self.binding.flags = sys::LLA_ACCUMULATE;
        self
    }
}

/// Shape, type and address; strides are left 0.
fn describe<T: Element>(role: Role, data: *const T, shape: &[usize]) -> Result<sys::lla_binding> {
    if shape.is_empty() || shape.len() > sys::LLA_MAX_RANK {
        return Err(Error::new(sys::LLA_SHAPE_MISMATCH, format!("{role:?}: {} dimensions", shape.len())));
    }
    let mut binding = sys::lla_binding { role: role as i32, ..Default::default() };
    binding.tensor.data = data as *mut c_void;
    binding.tensor.dtype = T::DTYPE;
    binding.tensor.rank = shape.len() as i32;
    for (to, &size) in binding.tensor.dims.iter_mut().zip(shape) {
        *to = int(size)?;
    }
    Ok(binding)
}

fn contiguous<T: Element>(role: Role, data: *const T, elements: usize, shape: &[usize]) -> Result<sys::lla_binding> {
    let mut binding = describe(role, data, shape)?;
    let mut stride = Some(1usize);
    for (axis, &size) in shape.iter().enumerate().rev() {
        binding.tensor.strides[axis] = int(stride.unwrap_or(0))?;
        stride = stride.and_then(|stride| stride.checked_mul(size));
    }
    if stride != Some(elements) {
        return Err(Error::new(sys::LLA_SHAPE_MISMATCH, format!("{role:?}: {elements} elements are not {shape:?}")));
    }
    Ok(binding)
}

/// Bindings and their number, for the library.
pub(crate) fn bindings(views: &[View<'_>]) -> (*const sys::lla_binding, i64) {
    (views.as_ptr().cast(), views.len() as i64)
}

/// Whether a forward call writes a tensor of this role.
fn is_output(binding: &sys::lla_binding) -> bool {
    [sys::LLA_Y, sys::LLA_GATE_OUT, sys::LLA_WRITE_OUT, sys::LLA_LAMBDA_OUT].contains(&binding.role)
}

/// Most inputs and outputs that a call can have.
const MAX_IO: usize = 16;

/// The tensors of a forward call: inputs and outputs in one array. What is only read never stands in a role that is written.
pub(crate) struct Operands<'a> {
    io: [sys::lla_binding; MAX_IO],
    io_count: usize,
    weights: &'a [View<'a>],
}

impl<'a> Operands<'a> {
    pub(crate) fn new(inputs: &[View<'_>], weights: &'a [View<'a>], outputs: &mut [ViewMut<'_>]) -> Result<Self> {
        let io_count = inputs.len() + outputs.len();
        if inputs.iter().chain(weights).any(|view| is_output(&view.binding)) {
            return Err(Error::new(sys::LLA_INVALID_ARGUMENT, "inputs: a role that the call writes"));
        }
        if io_count > MAX_IO || !outputs.iter().all(|view| is_output(&view.binding)) {
            return Err(Error::new(sys::LLA_INVALID_ARGUMENT, "outputs: a role that the call reads, or too many"));
        }
        let mut io = [sys::lla_binding::default(); MAX_IO];
        let all = inputs.iter().map(|view| view.binding).chain(outputs.iter().map(|view| view.binding));
        io.iter_mut().zip(all).for_each(|(to, binding)| *to = binding);
        Ok(Operands { io, io_count, weights })
    }

    pub(crate) fn io(&self) -> (*const sys::lla_binding, i64) {
        (self.io.as_ptr(), self.io_count as i64)
    }

    pub(crate) fn weights(&self) -> (*const sys::lla_binding, i64) {
        bindings(self.weights)
    }
}
