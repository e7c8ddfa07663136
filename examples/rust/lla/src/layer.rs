// SPDX-License-Identifier: Apache-2.0
//! Layers: mixers, cells, blocks and their parts.
use std::os::raw::c_void;
use std::ptr;
use std::sync::Arc;

use lla_sys as sys;

use crate::context::Context;
use crate::error::{check, int, Result};

macro_rules! forms {
    ($($(#[$about:meta])* $type:ident { $($(#[$doc:meta])* $name:ident = $number:ident,)* })*) => { $(
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(i32)]
        pub enum $type { $($(#[$doc])* $name = sys::$number,)* }
    )* };
}
forms! {
    /// What a layer is.
    Kind {
        /// The operator alone: Q, K, V, Gate [, Write] [, Lambda] -> Y.
        #[default]
        Mixer = LLA_LAYER_MIXER,
        /// Convolution, gates, λ, norms and skip around a mixer.
        Cell = LLA_LAYER_CELL,
        /// Mamba-2 block: X -> Y.
        Mamba2 = LLA_LAYER_MAMBA2,
        /// Gated DeltaNet block: X -> Y.
        GatedDeltaNet = LLA_LAYER_GATED_DELTANET,
        /// Causal depthwise convolution: X -> Y.
        Convolution = LLA_LAYER_CONVOLUTION,
        /// Gates from raw projections.
        Gates = LLA_LAYER_GATES,
        /// L2 norm over the last axis: X -> Y.
        L2Norm = LLA_LAYER_L2_NORM,
        /// Skip, output gate and RMS norm.
        GatedNorm = LLA_LAYER_GATED_NORM,
        /// Matrix product with a weight: X -> Y.
        Projection = LLA_LAYER_PROJECTION,
    }
    /// Interaction of a mixer.
    Mixer {
        /// Linear attention, RetNet, Mamba-2.
        #[default]
        ScalarGate = LLA_SCALAR_GATE,
        /// DeltaNet, Gated DeltaNet.
        DeltaRule = LLA_DELTA_RULE,
    }
    /// Which key/query group a value head uses.
    HeadMap {
        /// h / (H / G).
        #[default]
        Blocked = LLA_HEAD_MAP_BLOCKED,
        /// h mod G.
        Cyclic = LLA_HEAD_MAP_CYCLIC,
    }
    /// Where λ comes from.
    Lambda {
        /// There is none: the linear model.
        #[default]
        None = LLA_LAMBDA_NONE,
        /// The tensor is λ itself.
        Ready = LLA_LAMBDA_READY,
        /// softplus(P * raw).
        Softplus = LLA_LAMBDA_SOFTPLUS,
        /// exp(-exp(P) * softplus(raw)).
        Bounded = LLA_LAMBDA_BOUNDED,
        /// P * raw.
        Product = LLA_LAMBDA_PRODUCT,
    }
    /// What happens to levels beyond the last λ column.
    LevelOverflow {
        /// Refused.
        #[default]
        Error = LLA_LEVELS_ERROR,
        /// They read the last column.
        Absorb = LLA_LEVELS_ABSORB,
    }
    /// Where the log gate comes from.
    Gate {
        /// The tensor is the log gate itself.
        #[default]
        Log = LLA_GATE_LOG,
        /// -exp(A_log) * clamp(softplus(raw + dt_bias)).
        Softplus = LLA_GATE_SOFTPLUS,
    }
    /// Where the write strength comes from.
    Write {
        /// There is none (1).
        #[default]
        None = LLA_WRITE_NONE,
        /// The tensor is the write strength itself.
        Ready = LLA_WRITE_READY,
        /// sigmoid(raw).
        Sigmoid = LLA_WRITE_SIGMOID,
        /// 2 * sigmoid(raw).
        TwoSigmoid = LLA_WRITE_TWO_SIGMOID,
        /// The dt of `Gate::Softplus`.
        Step = LLA_WRITE_STEP,
    }
    /// Order of the output gate and the norm.
    NormForm {
        /// No norm.
        #[default]
        None = LLA_NORM_NONE,
        /// rmsnorm(y * silu(z)).
        GateFirst = LLA_NORM_GATE_FIRST,
        /// rmsnorm(y) * silu(z).
        NormFirst = LLA_NORM_NORM_FIRST,
    }
    /// Activation after a convolution.
    Activation {
        /// x * sigmoid(x).
        #[default]
        Silu = LLA_ACTIVATION_SILU,
        /// None.
        None = LLA_ACTIVATION_NONE,
    }
}

/// Direction of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Pass {
    /// Outputs.
    Forward = sys::LLA_PASS_FORWARD,
    /// Gradients.
    Backward = sys::LLA_PASS_BACKWARD,
}

/// Description of a layer. 0 in a field means its default; see `lla_layer_desc` in the header for each.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct LayerDescription {
    pub kind: Kind,
    /// Mixer and cell: which interaction (blocks imply it).
    pub mixer: Mixer,
    pub heads: usize,
    pub groups: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub hidden: usize,
    pub outputs: usize,
    pub grain: usize,
    pub levels: usize,
    pub lambda: Lambda,
    pub level_overflow: LevelOverflow,
    pub gate: Gate,
    pub write: Write,
    pub head_map: HeadMap,
    pub qk_norm: bool,
    pub scale: f64,
    pub lambda_scale: f64,
    pub qk_norm_epsilon: f64,
    pub dt_min: f64,
    pub dt_max: f64,
    pub conv_width: usize,
    pub conv_activation: Activation,
    pub norm: NormForm,
    pub norm_group: usize,
    pub norm_epsilon: f64,
}

impl LayerDescription {
    fn raw(&self) -> Result<sys::lla_layer_desc> {
        let has_mixer = matches!(self.kind, Kind::Mixer | Kind::Cell);
        Ok(sys::lla_layer_desc {
            kind: self.kind as i32,
            mixer: if has_mixer { self.mixer as i32 } else { 0 },
            heads: int(self.heads)?,
            groups: int(self.groups)?,
            key_dim: int(self.key_dim)?,
            value_dim: int(self.value_dim)?,
            hidden: int(self.hidden)?,
            outputs: int(self.outputs)?,
            grain: int(self.grain)?,
            levels: int(self.levels)?,
            lambda_form: self.lambda as i32,
            level_overflow: self.level_overflow as i32,
            gate_form: self.gate as i32,
            write_form: self.write as i32,
            head_map: self.head_map as i32,
            qk_norm: self.qk_norm.into(),
            scale: self.scale,
            lambda_scale: self.lambda_scale,
            qk_norm_epsilon: self.qk_norm_epsilon,
            dt_min: self.dt_min,
            dt_max: self.dt_max,
            conv_width: int(self.conv_width)?,
            conv_activation: self.conv_activation as i32,
            norm_form: self.norm as i32,
            norm_group: int(self.norm_group)?,
            norm_epsilon: self.norm_epsilon,
            ..Default::default()
        })
    }
}

#[derive(Debug)]
struct Inner {
    raw: *mut sys::lla_layer,
    _context: Context,
}

// SAFETY: a layer is immutable and used by any number of threads at once.
unsafe impl Send for Inner {}
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: our reference.
        unsafe { sys::lla_layer_release(self.raw) }
    }
}

/// A checked description with its kernels chosen. Owns no weight and no sequence; a clone is one more reference.
#[derive(Clone, Debug)]
pub struct Layer(Arc<Inner>);

impl Context {
    /// Creates a layer.
    pub fn layer(&self, description: &LayerDescription) -> Result<Layer> {
        let description = description.raw()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the description is read during the call.
        check(|error| unsafe { sys::lla_layer_create(self.raw(), &description, &mut raw, error) })?;
        Ok(Layer(Arc::new(Inner { raw, _context: self.clone() })))
    }
}

impl Layer {
    pub(crate) fn raw(&self) -> *mut sys::lla_layer {
        self.0.raw
    }

    /// Names of the kernels that a call consists of.
    pub fn kernels(&self, pass: Pass) -> Result<Vec<String>> {
        let (count_key, name_key) = match pass {
            Pass::Forward => (sys::LLA_LAYER_STEP_COUNT, sys::LLA_LAYER_STEP_KERNEL),
            Pass::Backward => (sys::LLA_LAYER_BACKWARD_STEP_COUNT, sys::LLA_LAYER_BACKWARD_STEP_KERNEL),
        };
        let query = |key, index, value: *mut c_void, size: &mut usize| {
            // SAFETY: `size` bytes are at `value`, or it is NULL.
            check(|error| unsafe { sys::lla_layer_query(self.raw(), key, index, value, size, error) })
        };
        let mut count = 0i64;
        query(count_key, 0, &mut count as *mut i64 as *mut c_void, &mut std::mem::size_of::<i64>())?;
        (0..count)
            .map(|index| {
                let mut size = 0;
                query(name_key, index, ptr::null_mut(), &mut size)?;
                let mut text = vec![0u8; size];
                query(name_key, index, text.as_mut_ptr().cast(), &mut size)?;
                text.retain(|&byte| byte != 0);
                Ok(String::from_utf8_lossy(&text).into_owned())
            })
            .collect()
    }
}
