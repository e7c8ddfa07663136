// SPDX-License-Identifier: Apache-2.0
//! State: the histories of many sequences for a group of layers, and its slots.
use std::cell::Cell;
use std::marker::PhantomData;
use std::os::raw::c_char;
use std::ptr;
use std::sync::Arc;

use lla_sys as sys;

use crate::error::{check, int, Error, Result};
use crate::layer::Layer;
use crate::tensor::{Operands, View, ViewMut};

/// Type in which a part of a state is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub enum Storage {
    /// `F32`; on the reference backend `F64`.
    #[default]
    Default = sys::LLA_DTYPE_DEFAULT,
    /// IEEE binary32.
    F32 = sys::LLA_F32,
    /// bfloat16.
    Bf16 = sys::LLA_BF16,
    /// IEEE binary16 (tails only).
    F16 = sys::LLA_F16,
    /// IEEE binary64 (reference backend only).
    F64 = sys::LLA_F64,
}

/// Description of a state. 0 in a field means its default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateDescription {
    /// Sequences; default 1.
    pub slots: usize,
    /// Longest sequence; default: what the layers' levels allow, at most 2^20.
    pub max_length: usize,
    /// Longest append of which a part may be accepted; default 16.
    pub max_draft: usize,
    /// Size of the node pool; default: enough for every slot at its worst.
    pub node_blocks: usize,
    /// Type of the nodes.
    pub nodes: Storage,
    /// Type of the raw keys and values of the tail; rows of a wider type are refused.
    pub tail: Storage,
}

#[derive(Debug)]
struct Inner {
    raw: *mut sys::lla_state,
    _layers: Vec<Layer>,
}

// SAFETY: calls that name disjoint slots may run at once, and only the one `Slot` of a number names it.
unsafe impl Send for Inner {}
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: our reference.
        unsafe { sys::lla_state_release(self.raw) }
    }
}

/// The histories of many sequences for a group of layers. A clone is one more reference.
#[derive(Clone, Debug)]
pub struct State(Arc<Inner>);

impl State {
    /// Creates a state and hands its slots out, all of them empty. Each slot exists once and can go to another thread.
    pub fn new(layers: &[&Layer], description: &StateDescription) -> Result<(State, Vec<Slot>)> {
        let handles: Vec<_> = layers.iter().map(|layer| layer.raw()).collect();
        let description = sys::lla_state_desc {
            node_dtype: description.nodes as i32,
            tail_dtype: description.tail as i32,
            slots: int(description.slots)?,
            max_length: int(description.max_length)?,
            max_draft: int(description.max_draft)?,
            node_blocks: int(description.node_blocks)?,
            ..Default::default()
        };
        let (count, mut raw) = (handles.len() as i64, ptr::null_mut());
        // SAFETY: `count` handles; the state takes references of its own.
        check(|error| unsafe {
            sys::lla_state_create(handles.as_ptr(), count, &description, ptr::null(), 0, &mut raw, error)
        })?;
        let state = State(Arc::new(Inner { raw, _layers: layers.iter().map(|&layer| layer.clone()).collect() }));
        let slots = (0..state.query(sys::LLA_STATE_SLOTS)?)
            .map(|number| Slot { state: state.clone(), number, one_thread: PhantomData })
            .collect();
        Ok((state, slots))
    }

    /// Node blocks that are free.
    pub fn free_node_blocks(&self) -> Result<usize> {
        self.query(sys::LLA_STATE_FREE_NODE_BLOCKS).map(|count| count as usize)
    }

    /// Longest sequence.
    pub fn max_length(&self) -> Result<usize> {
        self.query(sys::LLA_STATE_MAX_LENGTH).map(|length| length as usize)
    }

    fn query(&self, key: sys::lla_state_key) -> Result<i64> {
        let mut value = 0;
        // SAFETY: keys about the whole state name no slot.
        check(|error| unsafe { sys::lla_state_query(self.raw(), key, 0, &mut value, error) })?;
        Ok(value)
    }

    pub(crate) fn raw(&self) -> *mut sys::lla_state {
        self.0.raw
    }

    pub(crate) fn is(&self, other: &State) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Names model and prompt in a saved slot: 64 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag(pub [u8; sys::LLA_TAG_SIZE]);

impl Default for Tag {
    fn default() -> Self {
        Tag([0; sys::LLA_TAG_SIZE])
    }
}

impl From<&str> for Tag {
    /// Cut if longer, filled up with zeros.
    fn from(text: &str) -> Self {
        let mut tag = Tag::default();
        tag.0.iter_mut().zip(text.bytes()).for_each(|(to, byte)| *to = byte);
        tag
    }
}

/// One history of a state. It can go to another thread, but not be used by two at once:
///
/// ```compile_fail
/// fn shared<T: Sync>() {}
/// shared::<lla::Slot>();
/// ```
#[derive(Debug)]
pub struct Slot {
    state: State,
    number: i64,
    one_thread: PhantomData<Cell<()>>, // can be sent, not shared: calls on one slot must not run at once
}

impl Slot {
    /// The state that it belongs to.
    pub fn state(&self) -> &State {
        &self.state
    }

    pub(crate) fn number(&self) -> i64 {
        self.number
    }

    /// Rows that it holds.
    pub fn position(&self) -> Result<usize> {
        let mut position = 0;
        // SAFETY: this object alone names the slot; so also below.
        check(|error| unsafe { sys::lla_state_length(self.state.raw(), self.number, &mut position, error) })?;
        Ok(position as usize)
    }

    /// Empties it; it may stand at any position, its past counts as zero.
    pub fn reset(&mut self, position: usize) -> Result<()> {
        let position = [int(position)?];
        check(|error| unsafe {
            let (slots, positions) = (index(&[self.number]), index(&position));
            sys::lla_state_reset(self.state.raw(), slots, 1, positions, ptr::null_mut(), error)
        })
    }

    /// Takes rows back, down to the start of the current chunk.
    pub fn truncate(&mut self, position: usize) -> Result<()> {
        let position = int(position)?;
        check(|error| unsafe {
            sys::lla_state_truncate(self.state.raw(), self.number, position, ptr::null_mut(), error)
        })
    }

    /// Becomes a copy of another slot of the state. Nodes are shared; it costs about one tail.
    pub fn fork_from(&mut self, source: &Slot) -> Result<()> {
        if !self.state.is(&source.state) {
            return Err(Error::new(sys::LLA_STATE_INCOMPATIBLE, "source: a slot of another state"));
        }
        check(|error| unsafe {
            let (sources, targets) = (index(&[source.number]), index(&[self.number]));
            sys::lla_state_fork(self.state.raw(), sources, targets, 1, ptr::null_mut(), error)
        })
    }

    /// Takes over the state of another library for one linear layer: a matrix `[H, dk, dv]`, of any role and strides, that has
    /// seen `position` rows. `reset` empties the slot first; it is for the first layer that is imported into it.
    pub fn import_linear(&mut self, layer_index: usize, position: usize, matrix: &View<'_>, reset: bool) -> Result<()> {
        let (state, layer_index, position) = (self.state.raw(), int(layer_index)?, int(position)?);
        let (matrix, reset) = (matrix.tensor(), i32::from(reset));
        check(|error| unsafe {
            let stream = ptr::null_mut();
            sys::lla_state_import_linear(state, self.number, layer_index, position, matrix, reset, stream, error)
        })
    }

    /// The history of all layers as bytes, sealed with a checksum.
    pub fn save(&self, tag: &Tag) -> Result<Vec<u8>> {
        let (state, mut bytes) = (self.state.raw(), 0);
        check(|error| unsafe { sys::lla_state_export_size(state, self.number, &mut bytes, error) })?;
        let mut image = vec![0u8; bytes];
        let buffer = image.as_mut_ptr().cast();
        check(|error| unsafe { sys::lla_state_pack(state, self.number, buffer, bytes, ptr::null_mut(), error) })?;
        check(|error| unsafe { sys::lla_state_seal(buffer, bytes, tag.0.as_ptr() as *const c_char, error) })?;
        Ok(image)
    }

    /// Becomes what `save` gave, of a state with the same layers. Damaged bytes or another tag are refused.
    pub fn load(&mut self, image: &[u8], tag: &Tag) -> Result<()> {
        let (buffer, bytes) = (image.as_ptr().cast(), image.len());
        let tag = tag.0.as_ptr() as *const c_char;
        check(|error| unsafe { sys::lla_state_check(buffer, bytes, tag, ptr::null_mut(), error) })?;
        check(|error| unsafe {
            sys::lla_state_unpack(self.state.raw(), self.number, buffer, bytes, ptr::null_mut(), error)
        })
    }

    /// Plans, appends and commits rows in one call, for a state of one layer. For first programs: it allocates.
    pub fn append(
        &mut self,
        layer: &Layer,
        inputs: &[View<'_>],
        weights: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
    ) -> Result<()> {
        let operands = Operands::new(inputs, weights, outputs)?;
        let (layer, state, number) = (layer.raw(), self.state.raw(), self.number);
        let ((io, count), (weights, weight_count)) = (operands.io(), operands.weights());
        check(|error| unsafe {
            sys::lla_append(layer, state, number, io, count, weights, weight_count, ptr::null_mut(), error)
        })
    }
}

/// Integers in host memory, which must outlive the call; none of them: not given.
pub(crate) fn index(values: &[i64]) -> sys::lla_index {
    let data = if values.is_empty() { ptr::null() } else { values.as_ptr().cast() };
    sys::lla_index { data, dtype: sys::LLA_I64, location: sys::LLA_HOST }
}
