// SPDX-License-Identifier: Apache-2.0
//! What the crate promises beside numbers: threads, drops in any order, errors, drafts, snapshots, a log that may panic.
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;

use lla::{
    Backend, Batch, Context, Error, Layer, LayerDescription, Limits, LogLevel, Mixer, Pass, Role, Sequence, Slot,
};
use lla::{State, StateDescription, Step, Tag, View, ViewMut, Write};

const HEADS: usize = 2;
const DIM: usize = 4;
const WIDTH: usize = HEADS * DIM;

fn context() -> Context {
    Context::builder().threads(2).build().unwrap()
}

fn layer(context: &Context) -> Layer {
    let description = LayerDescription { heads: HEADS, key_dim: DIM, value_dim: DIM, ..Default::default() };
    context.layer(&description).unwrap()
}

fn batch(context: &Context) -> Batch {
    Batch::new(context, &Limits { sequences: 4, rows: 256, snapshots: 1, ..Default::default() }).unwrap()
}

/// Rows first ... first + count - 1 of one endless sequence.
fn rows(first: usize, count: usize) -> Vec<f32> {
    (first * WIDTH..(first + count) * WIDTH).map(|i| (i * 31 % 101) as f32 / 250.0 - 0.2).collect()
}

fn forward(step: &mut Step<'_>, layer: &Layer, x: &[f32]) -> Result<Vec<f32>, Error> {
    let shape = [x.len() / WIDTH, HEADS, DIM];
    let mut y = vec![0.0; x.len()];
    let inputs = [View::new(Role::Q, x, &shape)?, View::new(Role::K, x, &shape)?, View::new(Role::V, x, &shape)?];
    step.forward(layer, 0, &inputs, &[], &mut [ViewMut::new(Role::Y, &mut y, &shape)?])?;
    Ok(y)
}

fn append(batch: &mut Batch, layer: &Layer, slot: &mut Slot, first: usize, count: usize) {
    let mut step = batch.plan([Sequence::append(slot, count)]).unwrap();
    forward(&mut step, layer, &rows(first, count)).unwrap();
    step.commit().unwrap();
}

fn image(slot: &Slot) -> Vec<u8> {
    slot.save(&Tag::default()).unwrap()
}

#[test]
fn handles_are_shared_and_slots_are_sent() {
    fn shared<T: Send + Sync>() {}
    fn sent<T: Send>() {}
    shared::<Context>();
    shared::<Layer>();
    shared::<State>();
    shared::<Error>();
    sent::<Slot>();
    sent::<Batch>();
}

#[test]
fn slots_are_used_at_once() {
    let context = context();
    let layer = layer(&context);
    let (_, slots) = State::new(&[&layer], &StateDescription { slots: 4, ..Default::default() }).unwrap();
    let workers: Vec<_> = slots
        .into_iter()
        .map(|mut slot| {
            let (context, layer) = (context.clone(), layer.clone());
            thread::spawn(move || {
                let mut batch = batch(&context);
                (0..50).for_each(|i| append(&mut batch, &layer, &mut slot, i * 3, 3));
                image(&slot)
            })
        })
        .collect();
    let images: Vec<_> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
    assert!(images.iter().all(|image| *image == images[0]));
}

#[test]
fn everything_is_dropped_in_any_order() {
    let context = context();
    let layer = layer(&context);
    let mut batch = batch(&context);
    drop(context);
    let (state, mut slots) = State::new(&[&layer], &StateDescription { slots: 2, ..Default::default() }).unwrap();
    drop(state);
    let mut slot = slots.pop().unwrap();
    drop(slots);
    append(&mut batch, &layer, &mut slot, 0, 70);
    drop(layer);
    drop(batch.plan([Sequence::append(&mut slot, 1)]).unwrap()); // planned, not committed
    std::mem::forget(batch.plan([Sequence::append(&mut slot, 1)]).unwrap()); // still planned
    assert_eq!(slot.position().unwrap(), 70);
    drop(slot);
    drop(batch); // last: it holds the state of its plan
}

#[test]
fn drafts_forks_and_snapshots() {
    let context = context();
    let layer = layer(&context);
    let mut batch = batch(&context);
    let (state, mut slots) = State::new(&[&layer], &StateDescription { slots: 4, ..Default::default() }).unwrap();
    let (mut fork, mut snapshot) = (slots.pop().unwrap(), slots.pop().unwrap());
    let (mut plain, mut prompt) = (slots.pop().unwrap(), slots.pop().unwrap());
    append(&mut batch, &layer, &mut prompt, 0, 100);
    append(&mut batch, &layer, &mut plain, 0, 102);

    let draft: Vec<f32> = rows(100, 2).into_iter().chain(rows(900, 3)).collect(); // three of five are wrong
    let mut step = batch.plan([Sequence::fork(&prompt, &mut fork, 5)]).unwrap();
    forward(&mut step, &layer, &draft).unwrap();
    assert_eq!(step.commit_part(&[2, 0]).unwrap_err().name(), "LLA_INVALID_ARGUMENT");
    let mut step = batch.plan([Sequence::fork(&prompt, &mut fork, 5)]).unwrap();
    forward(&mut step, &layer, &draft).unwrap();
    step.commit_part(&[2]).unwrap();
    assert_eq!(image(&fork), image(&plain));
    assert_eq!(prompt.position().unwrap(), 100);

    fork.truncate(100).unwrap();
    assert_eq!(image(&fork), image(&prompt));
    assert_eq!(fork.truncate(50).unwrap_err().name(), "LLA_ROLLBACK_LIMIT");

    plain.reset(0).unwrap();
    let mut step =
        batch.plan([Sequence::append(&mut plain, 150).snapshot(100, &mut snapshot), Sequence::idle(2)]).unwrap();
    let y = forward(&mut step, &layer, &rows(0, 152)).unwrap();
    step.commit().unwrap();
    assert!(y[150 * WIDTH..].iter().all(|&x| x == 0.0));
    assert_eq!(image(&snapshot), image(&prompt));
    let before = state.free_node_blocks().unwrap();
    plain.reset(7).unwrap();
    assert!(plain.position().unwrap() == 7 && state.free_node_blocks().unwrap() > before);
}

#[test]
fn states_of_other_libraries() {
    let context = context();
    let layer = layer(&context);
    let mut batch = batch(&context);
    let (_, mut slots) = State::new(&[&layer], &StateDescription::default()).unwrap();
    let slot = &mut slots[0];
    let theirs = rows(5, DIM); // [H, dv, dk], read as [H, dk, dv]
    let matrix = View::strided(Role::X, &theirs, &[HEADS, DIM, DIM], &[DIM * DIM, 1, DIM]).unwrap();
    slot.import_linear(0, 70, &matrix, true).unwrap();
    let x = rows(3, 1);
    let mut step = batch.plan([Sequence::append(slot, 1)]).unwrap();
    let y = forward(&mut step, &layer, &x).unwrap();
    step.commit().unwrap();
    assert_eq!(slot.position().unwrap(), 71);
    for h in 0..HEADS {
        let row = &x[h * DIM..][..DIM];
        for j in 0..DIM {
            let expected: f32 = (0..DIM).map(|i| row[i] * (theirs[(h * DIM + j) * DIM + i] + row[i] * row[j])).sum();
            assert!((y[h * DIM + j] - expected).abs() < 1e-6);
        }
    }
    assert_eq!(slot.import_linear(0, 3, &matrix, false).unwrap_err().name(), "LLA_POSITION_MISMATCH");
    let short = View::new(Role::X, &theirs[..DIM], &[1, DIM, 1]).unwrap();
    assert_eq!(slot.import_linear(0, 3, &short, true).unwrap_err().name(), "LLA_SHAPE_MISMATCH");
    assert_eq!(slot.position().unwrap(), 71);
}

#[test]
fn errors_name_what_was_wrong() {
    let context = context();
    let layer = layer(&context);
    let mut batch = batch(&context);
    let error = context.layer(&LayerDescription { heads: 1, ..Default::default() }).unwrap_err();
    assert_eq!((error.name(), error.status()), ("LLA_INVALID_ARGUMENT", 10));
    assert!(error.message().contains("key_dim") && error.to_string().starts_with("LLA_INVALID_ARGUMENT: "));

    let x = rows(0, 3);
    assert_eq!(View::new(Role::Q, &x, &[2, HEADS, DIM]).err().unwrap().name(), "LLA_SHAPE_MISMATCH");
    assert!(View::strided(Role::Q, &x, &[3, HEADS, DIM], &[WIDTH, DIM, 1]).is_ok());
    assert!(View::strided(Role::Q, &x, &[1, HEADS, DIM], &[usize::MAX, usize::MAX, 1]).is_err());
    assert!(View::strided(Role::Q, &x, &[3, HEADS, DIM], &[WIDTH, DIM + 1, 1]).is_err());
    assert!(View::strided(Role::Q, &x, &[usize::MAX, HEADS, DIM], &[0, DIM, 1]).is_err());

    let (_, mut one) = State::new(&[&layer], &StateDescription::default()).unwrap();
    let (_, mut two) = State::new(&[&layer], &StateDescription::default()).unwrap();
    let step = batch.plan([Sequence::append(&mut one[0], 1), Sequence::append(&mut two[0], 1)]);
    assert_eq!(step.err().unwrap().name(), "LLA_STATE_INCOMPATIBLE");
    let mut step = batch.plan([Sequence::append(&mut one[0], 3)]).unwrap();
    assert_eq!(forward(&mut step, &layer, &x[..WIDTH]).unwrap_err().name(), "LLA_SHAPE_MISMATCH");
    let views = || View::new(Role::Y, &x, &[3, HEADS, DIM]).unwrap();
    assert!(step.forward(&layer, 0, &[views()], &[], &mut []).is_err(), "an output that is only borrowed");
    assert!(step.forward(&layer, 0, &[], &[views()], &mut []).is_err());
    drop(step);
    assert_eq!(one[0].position().unwrap(), 0);
    assert_eq!(one[0].load(b"no image", &Tag::default()).unwrap_err().name(), "LLA_DATA_CORRUPT");
}

#[test]
fn a_log_that_panics_does_not_unwind_into_the_library() {
    let lines = Arc::new(AtomicUsize::new(0));
    let heard = lines.clone();
    let log = move |_: LogLevel, _: &str| {
        heard.fetch_add(1, Ordering::SeqCst);
        panic!("in the log");
    };
    let context = Context::builder().log(LogLevel::Info, log).build().unwrap();
    let layer = layer(&context);
    drop(context);
    assert!(lines.load(Ordering::SeqCst) > 0);
    assert!(!layer.kernels(Pass::Forward).unwrap().is_empty());
    drop(layer);
    assert_eq!(Arc::strong_count(&lines), 1);
}

#[test]
fn gradients_by_differences() {
    let context = Context::builder().backend(Backend::Reference).build().unwrap();
    let description = LayerDescription { mixer: Mixer::DeltaRule, write: Write::Ready, heads: 1, ..Default::default() };
    let layer = context.layer(&LayerDescription { key_dim: 3, value_dim: 3, ..description }).unwrap();
    let mut batch = Batch::new(&context, &Limits { sequences: 2, rows: 5, ..Default::default() }).unwrap();
    let values: Vec<f64> = (0..15).map(|i| (i * 7 % 11) as f64 / 11.0 - 0.4).collect();
    let (gate, write) = ([-0.1; 5], [0.5; 5]);
    let mut step = batch.plan([Sequence::alone(2), Sequence::alone(3)]).unwrap();
    fn inputs<'a>(k: &'a [f64], x: &'a [f64], gate: &'a [f64], write: &'a [f64]) -> Vec<View<'a>> {
        let views = [(Role::Q, x), (Role::K, k), (Role::V, x)].map(|(role, x)| View::new(role, x, &[5, 1, 3]).unwrap());
        let gates = [(Role::Gate, gate), (Role::Write, write)].map(|(role, x)| View::new(role, x, &[5, 1]).unwrap());
        views.into_iter().chain(gates).collect()
    }
    let mut dk = [1.0; 15]; // is added to
    let wanted = ViewMut::new(Role::K, &mut dk, &[5, 1, 3]).unwrap().accumulate();
    let dy = View::new(Role::Y, &values, &[5, 1, 3]).unwrap();
    step.backward(&layer, 0, &inputs(&values, &values, &gate, &write), &[], &[dy], &mut [wanted]).unwrap();
    for i in 0..15 {
        let mut value = |h: f64| -> f64 {
            let (mut k, mut y) = (values.clone(), [0.0; 15]);
            k[i] += h;
            let output = ViewMut::new(Role::Y, &mut y, &[5, 1, 3]).unwrap();
            step.forward(&layer, 0, &inputs(&k, &values, &gate, &write), &[], &mut [output]).unwrap();
            y.iter().zip(&values).map(|(y, dy)| y * dy).sum()
        };
        let difference = (value(1e-6) - value(-1e-6)) / 2e-6;
        assert!((difference + 1.0 - dk[i]).abs() < 1e-7, "{difference} {}", dk[i]);
    }
}
