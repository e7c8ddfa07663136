// SPDX-License-Identifier: Apache-2.0
//! Log-linear and linear attention on the CPU: a safe interface to lla.
//!
//! | type | what | threads |
//! |---|---|---|
//! | [`Context`] | which backend computes, with how many threads | shared, `Clone` is a reference |
//! | [`Layer`] | description of a mixer, cell, block or part; owns no weights | shared, `Clone` is a reference |
//! | [`State`] | histories of many sequences for a group of layers | shared, `Clone` is a reference |
//! | [`Slot`] | one history of a state | one thread at a time; different slots at once |
//! | [`Batch`] | memory in which steps are planned | one thread at a time |
//! | [`Step`] | a planned step: forward, backward, commit | while it lives its slots are borrowed |
//!
//! The library allows calls at once as long as they name different slots. Here the borrow checker sees to it: a step borrows
//! the slots that it reads and writes. Everything may be dropped in any order; what still needs a parent keeps it.
//!
//! Tensors are slices with a shape ([`View`], [`ViewMut`]) in a [`Role`]. Contexts compute in host memory; for GPUs, own
//! allocators and threads, and gradients of states use `lla-sys`.
//!
//! ```
//! use lla::{Batch, Context, LayerDescription, Lambda, Limits, Role, Sequence, State, StateDescription, View, ViewMut};
//!
//! # fn main() -> lla::Result<()> {
//! let context = Context::new()?;
//! let layer = context.layer(&LayerDescription {
//!     heads: 2, key_dim: 16, value_dim: 24, lambda: Lambda::Ready, levels: lla::levels_needed(4096), ..Default::default()
//! })?;
//! let (_state, mut slots) = State::new(&[&layer], &StateDescription::default())?;
//! let mut batch = Batch::new(&context, &Limits { sequences: 1, rows: 100, ..Default::default() })?;
//!
//! let (q, v) = (vec![0.1f32; 100 * 2 * 16], vec![0.1f32; 100 * 2 * 24]); // 100 rows: a prompt, a piece of one, or one token
//! let (gate, lambda, mut y) = (vec![-0.1f32; 100 * 2], vec![1.0f32; 100 * 2 * 13], vec![0.0f32; 100 * 2 * 24]);
//! let mut step = batch.plan([Sequence::append(&mut slots[0], 100)])?;
//! step.forward(
//!     &layer,
//!     0,
//!     &[
//!         View::new(Role::Q, &q, &[100, 2, 16])?,
//!         View::new(Role::K, &q, &[100, 2, 16])?,
//!         View::new(Role::V, &v, &[100, 2, 24])?,
//!         View::new(Role::Gate, &gate, &[100, 2])?,
//!         View::new(Role::Lambda, &lambda, &[100, 2, 13])?,
//!     ],
//!     &[],
//!     &mut [ViewMut::new(Role::Y, &mut y, &[100, 2, 24])?],
//! )?;
//! step.commit()?;
//! assert_eq!(slots[0].position()?, 100);
//! # Ok(()) }
//! ```
#![deny(missing_docs)]

mod batch;
mod context;
mod error;
mod layer;
mod memory;
mod state;
mod tensor;

pub use batch::{Batch, Limits, Sequence, Step};
pub use context::{Backend, Context, ContextBuilder, LogLevel};
pub use error::{Error, Result};
pub use layer::{
    Activation, Gate, HeadMap, Kind, Lambda, Layer, LayerDescription, LevelOverflow, Mixer, NormForm, Pass, Write,
};
pub use state::{Slot, State, StateDescription, Storage, Tag};
pub use tensor::{Bf16, Element, Role, View, ViewMut, F16};

/// λ columns that a sequence of a given length needs.
pub fn levels_needed(length: usize) -> usize {
    // SAFETY: no preconditions.
    unsafe { lla_sys::lla_levels_needed(length as i64) as usize }
}

/// Version of the loaded library.
pub fn version() -> &'static str {
    // SAFETY: static text, never NULL.
    unsafe { error::static_text(lla_sys::lla_version_string()) }
}
