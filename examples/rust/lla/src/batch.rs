// SPDX-License-Identifier: Apache-2.0
//! Batch and step: which rows belong to which slot, and what is computed for them.
use std::marker::PhantomData;
use std::ptr;

use lla_sys as sys;

use crate::context::Context;
use crate::error::{check, int, Error, Result};
use crate::layer::{Layer, Pass};
use crate::memory::Memory;
use crate::state::{index, Slot, State};
use crate::tensor::{bindings, Operands, View, ViewMut};

/// The largest step that a batch will hold. 0 in the last three means their default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    /// Sequences, idle ones included.
    pub sequences: usize,
    /// Rows of all sequences together.
    pub rows: usize,
    /// Rows of one sequence.
    pub rows_per_sequence: usize,
    /// Longest sequence after the step; set it when training.
    pub length: usize,
    /// Snapshots of all sequences together.
    pub snapshots: usize,
}

/// One sequence of a step: its rows follow those of the sequences before it. It borrows its slots as long as the step lives:
///
/// ```compile_fail
/// # fn f(one: &mut lla::Batch, other: &mut lla::Batch, slot: &mut lla::Slot) -> lla::Result<()> {
/// let step = one.plan([lla::Sequence::append(slot, 1)])?;
/// other.plan([lla::Sequence::append(slot, 1)])?;
/// step.commit()
/// # }
/// ```
pub struct Sequence<'a> {
    rows: usize,
    from: Option<&'a Slot>,
    slot: Option<&'a mut Slot>,
    idle: bool,
    snapshots: Vec<(usize, &'a mut Slot)>,
}

impl<'a> Sequence<'a> {
    /// Rows that a slot receives.
    pub fn append(slot: &'a mut Slot, rows: usize) -> Self {
        Sequence { slot: Some(slot), ..Self::alone(rows) }
    }

    /// Rows that follow the history of one slot and are kept, with it, in another one, which must be empty.
    pub fn fork(from: &'a Slot, to: &'a mut Slot, rows: usize) -> Self {
        Sequence { from: Some(from), ..Self::append(to, rows) }
    }

    /// Rows without history, which are not kept: training.
    pub fn alone(rows: usize) -> Self {
        Sequence { rows, from: None, slot: None, idle: false, snapshots: Vec::new() }
    }

    /// Padding in a step with slots: inputs are not read, outputs are zero.
    pub fn idle(rows: usize) -> Self {
        Sequence { idle: true, ..Self::alone(rows) }
    }

    /// An empty slot receives the history as it stands after `row` rows of this sequence, when the step is committed.
    pub fn snapshot(mut self, row: usize, slot: &'a mut Slot) -> Self {
        self.snapshots.push((row, slot));
        self
    }
}

/// Memory in which steps are planned and computed. It grows to the needs of the layers; after that a step does not allocate.
pub struct Batch {
    raw: *mut sys::lla_batch, // inside `memory`
    limits: sys::lla_batch_limits,
    state: Option<State>, // of the last plan: lives as long as the plan
    workspace: Memory,
    arrays: Arrays,
    _memory: Memory,
    _context: Context,
}

/// Index arrays of a plan, kept for the next one.
#[derive(Default)]
struct Arrays {
    offsets: Vec<i64>,
    slots_in: Vec<i64>,
    slots_out: Vec<i64>,
    snapshot_sequences: Vec<i64>,
    snapshot_rows: Vec<i64>,
    snapshot_slots: Vec<i64>,
    accepted: Vec<i64>,
}

// SAFETY: a batch belongs to one thread at a time, whichever that is; it is not Sync.
unsafe impl Send for Batch {}

impl Batch {
    /// A batch for steps up to `limits`.
    pub fn new(context: &Context, limits: &Limits) -> Result<Self> {
        let limits = sys::lla_batch_limits {
            max_sequences: int(limits.sequences)?,
            max_rows: int(limits.rows)?,
            max_rows_per_sequence: int(limits.rows_per_sequence)?,
            max_length: int(limits.length)?,
            max_snapshots: int(limits.snapshots)?,
            ..Default::default()
        };
        let mut memory = Memory::empty();
        // SAFETY: the memory has the size that the query gave, and does not move when its owner does.
        let raw = unsafe {
            memory.reserve(|bytes, alignment, error| {
                sys::lla_batch_size(context.raw(), &limits, bytes, alignment, error)
            })?;
            let mut raw = ptr::null_mut();
            check(|error| {
                sys::lla_batch_init(context.raw(), &limits, memory.pointer(), memory.bytes(), &mut raw, error)
            })?;
            raw
        };
        let (arrays, context) = (Arrays::default(), context.clone());
        Ok(Batch { raw, limits, state: None, workspace: Memory::empty(), arrays, _memory: memory, _context: context })
    }

    /// Makes room for a layer's calls now, so that the first step need not.
    pub fn reserve(&mut self, layer: &Layer, pass: Pass) -> Result<()> {
        let limits = &self.limits;
        // SAFETY: a query.
        self.workspace.reserve(|bytes, alignment, error| unsafe {
            sys::lla_layer_workspace(layer.raw(), limits, pass as i32, bytes, alignment, error)
        })
    }

    /// Plans a step, once for all layers. Its sequences all have slots of one state (or are idle), or all are `alone`.
    pub fn plan<'a>(&'a mut self, sequences: impl IntoIterator<Item = Sequence<'a>>) -> Result<Step<'a>> {
        let state = self.arrays.fill(sequences)?;
        let arrays = &self.arrays;
        let mut rows = sys::lla_rows {
            sequences: arrays.offsets.len() as i64 - 1,
            offsets: index(&arrays.offsets),
            snapshots: arrays.snapshot_slots.len() as i64,
            snapshot_sequences: index(&arrays.snapshot_sequences),
            snapshot_rows: index(&arrays.snapshot_rows),
            snapshot_slots: index(&arrays.snapshot_slots),
            ..Default::default()
        };
        if state.is_some() {
            (rows.slot_in, rows.slot_out) = (index(&arrays.slots_in), index(&arrays.slots_out));
        }
        let raw_state = state.as_ref().map_or(ptr::null_mut(), State::raw);
        // SAFETY: the arrays have the lengths that belong to these numbers; the old plan's state is still alive.
        let planned = check(|error| unsafe { sys::lla_batch_plan(self.raw, raw_state, &rows, ptr::null_mut(), error) });
        self.state = planned.is_ok().then_some(state).flatten();
        planned?;
        Ok(Step { batch: self, slots: PhantomData })
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        // SAFETY: its memory and the state of its plan are still alive.
        unsafe { sys::lla_batch_discard(self.raw) }
    }
}

impl Arrays {
    /// Writes the sequences down; returns the state of their slots.
    fn fill<'a>(&mut self, sequences: impl IntoIterator<Item = Sequence<'a>>) -> Result<Option<State>> {
        let arrays = [&mut self.offsets, &mut self.slots_in, &mut self.slots_out, &mut self.accepted];
        arrays.into_iter().for_each(Vec::clear);
        let arrays = [&mut self.snapshot_sequences, &mut self.snapshot_rows, &mut self.snapshot_slots];
        arrays.into_iter().for_each(Vec::clear);
        self.offsets.push(0);
        let (mut state, mut rows, mut alone): (Option<State>, usize, bool) = (None, 0, false);
        for (number, sequence) in sequences.into_iter().enumerate() {
            let target = sequence.slot.as_deref();
            let source = sequence.from.or(target);
            alone |= target.is_none() && !sequence.idle;
            let snapshots = sequence.snapshots.iter().map(|(_, slot)| &**slot);
            for slot in snapshots.chain(target).chain(source) {
                if !state.get_or_insert_with(|| slot.state().clone()).is(slot.state()) {
                    return Err(Error::new(sys::LLA_STATE_INCOMPATIBLE, "slots of two states in one step"));
                }
            }
            rows = rows.saturating_add(sequence.rows);
            self.offsets.push(int(rows)?);
            self.slots_in.push(source.map_or(-1, Slot::number));
            self.slots_out.push(target.map_or(-1, Slot::number));
            for (row, slot) in &sequence.snapshots {
                self.snapshot_sequences.push(number as i64);
                self.snapshot_rows.push(int(*row)?);
                self.snapshot_slots.push(slot.number());
            }
        }
        if alone && state.is_some() {
            return Err(Error::new(sys::LLA_INVALID_ARGUMENT, "sequences with and without slots in one step"));
        }
        Ok(state)
    }
}

/// A planned step. Dropped without a commit it leaves states as they were.
pub struct Step<'a> {
    batch: &'a mut Batch,
    slots: PhantomData<&'a mut Slot>,
}

impl Step<'_> {
    /// Computes the outputs of the step's rows for layer number `layer_index` of the state's group (0 without a state).
    pub fn forward(
        &mut self,
        layer: &Layer,
        layer_index: usize,
        inputs: &[View<'_>],
        weights: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
    ) -> Result<()> {
        self.batch.reserve(layer, Pass::Forward)?;
        let operands = Operands::new(inputs, weights, outputs)?;
        let ((io, io_count), (weights, weight_count)) = (operands.io(), operands.weights());
        let call = sys::lla_forward_args {
            batch: self.batch.raw,
            state: self.state(),
            layer_index: int(layer_index)?,
            io,
            io_count,
            weights,
            weight_count,
            workspace: self.batch.workspace.pointer(),
            workspace_bytes: self.batch.workspace.bytes(),
            ..Default::default()
        };
        // SAFETY: all pointers outlive the call; what it writes is borrowed mutably, in `outputs` and by this step.
        check(|error| unsafe { sys::lla_layer_forward(layer.raw(), &call, error) })
    }

    /// Computes gradients of the inputs and weights that `gradients` names, from those of the outputs.
    pub fn backward(
        &mut self,
        layer: &Layer,
        layer_index: usize,
        inputs: &[View<'_>],
        weights: &[View<'_>],
        output_gradients: &[View<'_>],
        gradients: &mut [ViewMut<'_>],
    ) -> Result<()> {
        self.batch.reserve(layer, Pass::Backward)?;
        let (io, io_count) = bindings(inputs);
        let (weights, weight_count) = bindings(weights);
        let (outputs, output_count) = bindings(output_gradients);
        let call = sys::lla_backward_args {
            batch: self.batch.raw,
            state: self.state(),
            layer_index: int(layer_index)?,
            io,
            io_count,
            weights,
            weight_count,
            outputs,
            output_count,
            gradients: gradients.as_ptr().cast(), // the same bytes as bindings
            gradient_count: gradients.len() as i64,
            workspace: self.batch.workspace.pointer(),
            workspace_bytes: self.batch.workspace.bytes(),
            ..Default::default()
        };
        // SAFETY: as for forward; what it writes is borrowed mutably in `gradients`.
        check(|error| unsafe { sys::lla_layer_backward(layer.raw(), &call, error) })
    }

    /// Makes all rows part of their sequences, for all layers.
    pub fn commit(self) -> Result<()> {
        self.commit_index(sys::lla_index::default())
    }

    /// Makes the first `accepted[b]` rows of each sequence b part of it; the others are dropped.
    pub fn commit_part(self, accepted: &[usize]) -> Result<()> {
        if accepted.len() + 1 != self.batch.arrays.offsets.len() {
            return Err(Error::new(sys::LLA_INVALID_ARGUMENT, "accepted: not one number for each sequence"));
        }
        for &count in accepted {
            self.batch.arrays.accepted.push(int(count)?);
        }
        let accepted = index(&self.batch.arrays.accepted);
        self.commit_index(accepted)
    }

    fn commit_index(self, accepted: sys::lla_index) -> Result<()> {
        // SAFETY: the array has an entry for each sequence.
        check(|error| unsafe { sys::lla_state_commit(self.state(), self.batch.raw, accepted, ptr::null_mut(), error) })
    }

    fn state(&self) -> *mut sys::lla_state {
        self.batch.state.as_ref().map_or(ptr::null_mut(), State::raw)
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        // SAFETY: batch and state are alive. After a commit there is nothing to give back.
        unsafe { sys::lla_batch_discard(self.batch.raw) }
    }
}
