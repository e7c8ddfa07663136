// SPDX-License-Identifier: Apache-2.0
//! Trains a small model on the text "hello ", then serves it: prompt, decoding, a fork, and a slot that is saved and loaded.
use std::error::Error;
use std::{env, fs, process};

use lla::{Batch, Context, Lambda, Layer, LayerDescription, Limits, Role, Sequence, Slot, State, StateDescription};
use lla::{Step, Tag, View, ViewMut};

const ALPHABET: &[u8] = b"helo ";
const TEXT: &[u8] = b"hello ";
const HEADS: usize = 2;
const DIM: usize = 8;
const OUTPUT: usize = HEADS * DIM;
const ROWS: usize = 192;
const STEPS: usize = 150;
const RATE: f32 = 0.3;

/// The rows of one input of the mixer, by token.
struct Table {
    role: Role,
    width: usize,
    values: Vec<f32>,
}

/// Tables give each token its q, k, v and λ; a mixer looks back; a matrix turns its output into scores of the next token.
struct Model {
    layer: Layer,
    tables: Vec<Table>,
    head: Vec<f32>,
}

fn text(start: usize, count: usize) -> Vec<usize> {
    let letter = |i| TEXT[i % TEXT.len()];
    (start..start + count).map(|i| ALPHABET.iter().position(|&a| a == letter(i)).unwrap()).collect()
}

fn argmax(scores: &[f32]) -> usize {
    (0..scores.len()).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap()
}

impl Table {
    fn rows(&self, tokens: &[usize]) -> Vec<f32> {
        let size = HEADS * self.width;
        tokens.iter().flat_map(|&token| self.values[token * size..][..size].iter().copied()).collect()
    }

    fn descend(&mut self, tokens: &[usize], gradients: &[f32]) {
        let size = HEADS * self.width;
        for (&token, gradient) in tokens.iter().zip(gradients.chunks(size)) {
            let row = &mut self.values[token * size..][..size];
            row.iter_mut().zip(gradient).for_each(|(x, g)| *x -= RATE * g);
        }
    }
}

impl Model {
    fn new(context: &Context) -> lla::Result<Self> {
        let levels = lla::levels_needed(1024);
        let layer = context.layer(&LayerDescription {
            heads: HEADS,
            key_dim: DIM,
            value_dim: DIM,
            lambda: Lambda::Ready,
            levels,
            ..Default::default()
        })?;
        let mut seed = 1u32;
        let mut noise = |count: usize| -> Vec<f32> {
            let mut draw = || {
                seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
                (seed >> 8) as f32 / 16777216.0 - 0.5
            };
            (0..count).map(|_| draw()).collect()
        };
        let mut table = |role, width| Table { role, width, values: noise(ALPHABET.len() * HEADS * width) };
        let mut tables =
            vec![table(Role::Q, DIM), table(Role::K, DIM), table(Role::V, DIM), table(Role::Lambda, levels)];
        tables[3].values.fill(1.0);
        Ok(Model { layer, tables, head: noise(ALPHABET.len() * OUTPUT) })
    }

    /// The mixer's outputs for the rows of a step, and the inputs that they came from.
    fn forward(&self, step: &mut Step<'_>, tokens: &[usize]) -> lla::Result<(Vec<f32>, Vec<Vec<f32>>)> {
        let inputs: Vec<_> = self.tables.iter().map(|table| table.rows(tokens)).collect();
        let (gate, mut y) = (vec![-0.1; tokens.len() * HEADS], vec![0.0; tokens.len() * OUTPUT]);
        let output = ViewMut::new(Role::Y, &mut y, &[tokens.len(), HEADS, DIM])?;
        step.forward(&self.layer, 0, &self.views(&inputs, &gate)?, &[], &mut [output])?;
        Ok((y, inputs))
    }

    fn views<'a>(&self, inputs: &'a [Vec<f32>], gate: &'a [f32]) -> lla::Result<Vec<View<'a>>> {
        let rows = gate.len() / HEADS;
        let tables = self.tables.iter().zip(inputs);
        let mut views = vec![View::new(Role::Gate, gate, &[rows, HEADS])?];
        for (table, input) in tables {
            views.push(View::new(table.role, input, &[rows, HEADS, table.width])?);
        }
        Ok(views)
    }

    /// Scores of what may follow a row.
    fn scores(&self, y: &[f32]) -> Vec<f32> {
        self.head.chunks(OUTPUT).map(|weights| weights.iter().zip(y).map(|(w, y)| w * y).sum()).collect()
    }

    /// One step down the gradient of the cross entropy; returns the loss before it.
    fn train(&mut self, batch: &mut Batch, tokens: &[usize], targets: &[usize]) -> lla::Result<f32> {
        let count = tokens.len();
        let mut step = batch.plan([Sequence::alone(count)])?;
        let (y, inputs) = self.forward(&mut step, tokens)?;
        let (mut dy, mut head, mut loss) = (vec![0.0; y.len()], self.head.clone(), 0.0);
        for ((y, dy), &target) in y.chunks(OUTPUT).zip(dy.chunks_mut(OUTPUT)).zip(targets) {
            let scores = self.scores(y);
            let largest = scores[argmax(&scores)];
            let sum: f32 = scores.iter().map(|score| (score - largest).exp()).sum();
            loss -= (scores[target] - largest - sum.ln()) / count as f32;
            for (i, score) in scores.iter().enumerate() {
                let probability = (score - largest).exp() / sum;
                let gradient = (probability - if i == target { 1.0 } else { 0.0 }) / count as f32;
                for j in 0..OUTPUT {
                    dy[j] += gradient * self.head[i * OUTPUT + j];
                    head[i * OUTPUT + j] -= RATE * gradient * y[j];
                }
            }
        }
        self.head = head;

        let gate = vec![-0.1; count * HEADS];
        let mut gradients: Vec<_> = inputs.iter().map(|input| vec![0.0; input.len()]).collect();
        let mut wanted = Vec::new();
        for (table, gradient) in self.tables.iter().zip(&mut gradients) {
            wanted.push(ViewMut::new(table.role, gradient, &[count, HEADS, table.width])?);
        }
        let dy = View::new(Role::Y, &dy, &[count, HEADS, DIM])?;
        step.backward(&self.layer, 0, &self.views(&inputs, &gate)?, &[], &[dy], &mut wanted)?;
        self.tables.iter_mut().zip(&gradients).for_each(|(table, gradient)| table.descend(tokens, gradient));
        Ok(loss)
    }

    /// Appends tokens to a slot; returns the scores of what may follow the last one.
    fn append(&self, batch: &mut Batch, slot: &mut Slot, tokens: &[usize]) -> lla::Result<Vec<f32>> {
        let mut step = batch.plan([Sequence::append(slot, tokens.len())])?;
        let (y, _) = self.forward(&mut step, tokens)?;
        step.commit()?;
        Ok(self.scores(&y[y.len() - OUTPUT..]))
    }

    /// Continues a slot by its likeliest tokens; returns text and last scores.
    fn decode(&self, batch: &mut Batch, slot: &mut Slot, scores: &[f32]) -> lla::Result<(String, Vec<f32>)> {
        let (mut text, mut scores) = (String::new(), scores.to_vec());
        for _ in 0..30 {
            let token = argmax(&scores);
            text.push(ALPHABET[token] as char);
            scores = self.append(batch, slot, &[token])?;
        }
        Ok((text, scores))
    }
}

fn require(condition: bool, what: &str) {
    println!("{what:<60} {}", if condition { "ok" } else { "NO" });
    if !condition {
        process::exit(1);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let context = Context::builder().threads(2).build()?;
    let mut model = Model::new(&context)?;
    let mut batch = Batch::new(&context, &Limits { sequences: 1, rows: ROWS, length: ROWS, ..Default::default() })?;
    let (tokens, targets) = (text(0, ROWS), text(1, ROWS));
    let losses = (0..STEPS).map(|_| model.train(&mut batch, &tokens, &targets)).collect::<lla::Result<Vec<_>>>()?;
    println!("lla {}: loss {:.3}, after {STEPS} steps {:.3}", lla::version(), losses[0], losses[STEPS - 1]);
    require(losses[STEPS - 1] < 0.1 * losses[0], "the loss falls");

    let (_, mut slots) = State::new(&[&model.layer], &StateDescription { slots: 2, ..Default::default() })?;
    let (prompt, fork) = slots.split_at_mut(1);
    let (prompt, fork) = (&mut prompt[0], &mut fork[0]);
    let scores = model.append(&mut batch, prompt, &text(0, 100))?;
    require(prompt.position()? == 100, "the prompt is in its slot");
    fork.fork_from(prompt)?;

    let (path, tag) = (env::temp_dir().join(format!("lla_slot_{}.bin", process::id())), Tag::from("hello model"));
    fs::write(&path, prompt.save(&tag)?)?;
    let mut image = fs::read(&path)?;
    fs::remove_file(&path)?;
    let (_, mut loaded) = State::new(&[&model.layer], &StateDescription::default())?;
    loaded[0].load(&image, &tag)?;

    let (continued, last) = model.decode(&mut batch, prompt, &scores)?;
    println!("\"...hell\" goes on: \"{continued}\"");
    require(continued == "o hello hello hello hello hell", "it goes on as it was taught");
    require(
        model.decode(&mut batch, fork, &scores)? == (continued.clone(), last.clone()),
        "the fork: same text, same bits",
    );
    require(
        model.decode(&mut batch, &mut loaded[0], &scores)? == (continued, last),
        "so does what was saved and loaded",
    );

    let middle = image.len() / 2;
    image[middle] ^= 1;
    let error = fork.load(&image, &tag).unwrap_err();
    println!("{error}");
    require(error.name() == "LLA_DATA_CORRUPT", "a damaged image is refused");
    Ok(())
}
