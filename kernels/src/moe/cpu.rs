//! Router and experts on f32 slices.
//!
//! A task takes a run of tokens, sorts their (token, slot) pairs by expert and works through the experts in order, a tile
//! of rows at a time: gate_up, GELU, down, added to the tokens' outputs. The tokens are the task's own, so nothing is
//! shared between tasks; all of them take the same time whatever the router chose; and each token's sum is in the order
//! of the experts' indices however the tokens are split.

use super::Shape;
use crate::flex::zeros;
use crate::glu::cpu::{geglu_backward_in_place, geglu_into};
use crate::matmul::{Matrix, Right, Weights, Write, matmul};
use crate::simd::{self, Isa, vectorised};
use rayon::prelude::*;
use std::ops::Range;

/// Most tokens of a task: the more, the more rows share one reading of an expert's weights.
const TASK_TOKENS: usize = 4096;
/// Most rows of a tile. An expert's rows are split evenly, since each tile packs the expert's weights anew.
const TILE_ROWS: usize = 384;
/// Rows of a task of the router.
const ROUTE_ROWS: usize = 64;

/// The experts' weights: `gate_up` is `[count, 2 intermediate, hidden]`, `down` `[count, hidden, intermediate]`.
#[derive(Clone, Copy)]
pub(crate) struct Bank<'a> {
    pub(crate) gate_up: Weights<'a>,
    pub(crate) down: Weights<'a>,
    pub(crate) count: usize,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
}

impl<'a> Bank<'a> {
    fn gate_up(&self, expert: usize) -> Right<'a> {
        let (rows, size) = (2 * self.intermediate, 2 * self.intermediate * self.hidden);
        self.gate_up.range(expert * size..(expert + 1) * size).matrix(rows, self.hidden)
    }

    fn down(&self, expert: usize) -> Right<'a> {
        let size = self.hidden * self.intermediate;
        self.down.range(expert * size..(expert + 1) * size).matrix(self.hidden, self.intermediate)
    }
}

/// The router's choice for some tokens, `[tokens, top_k]` each.
#[derive(Clone, Copy)]
pub(crate) struct Choice<'a> {
    pub(crate) weights: &'a [f32],
    pub(crate) experts: &'a [i32],
    pub(crate) top_k: usize,
}

/// The (token, slot) pairs of some tokens, sorted by expert and within an expert by token.
struct Assignments {
    /// Places `token * top_k + slot`.
    places: Vec<u32>,
    /// Where each expert's places start; one more entry than experts.
    starts: Vec<usize>,
}

impl Assignments {
    fn new(experts: &[i32], count: usize) -> Self {
        let mut starts = vec![0; count + 1];
        for &expert in experts {
            assert!((0..count as i32).contains(&expert), "the routing names expert {expert} of {count}");
            starts[expert as usize + 1] += 1;
        }
        for expert in 0..count {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        let mut places = vec![0; experts.len()];
        for (place, &expert) in experts.iter().enumerate() {
            places[next[expert as usize]] = place as u32;
            next[expert as usize] += 1;
        }
        Self { places, starts }
    }

    /// Calls `f` with each expert and each of its tiles of places, in order.
    fn for_each_tile(&self, mut f: impl FnMut(usize, &[u32])) {
        for (expert, bounds) in self.starts.windows(2).enumerate() {
            let places = &self.places[bounds[0]..bounds[1]];
            let tiles = places.len().div_ceil(TILE_ROWS).max(1);
            places.chunks(places.len().div_ceil(tiles).max(1)).for_each(|tile| f(expert, tile));
        }
    }

    /// Rows of the largest tile.
    fn tile_rows(&self) -> usize {
        self.starts.windows(2).map(|bounds| bounds[1] - bounds[0]).max().unwrap_or(0).min(TILE_ROWS)
    }
}

/// Copies the row of each place's token into `tile`, and returns the filled part.
fn gather<'a>(tile: &'a mut [f32], rows: &[f32], places: &[u32], top_k: usize, cols: usize) -> &'a mut [f32] {
    let tile = &mut tile[..places.len() * cols];
    for (row, &place) in tile.chunks_exact_mut(cols).zip(places) {
        row.copy_from_slice(&rows[place as usize / top_k * cols..][..cols]);
    }
    tile
}

/// Adds each row of `tile`, times the weight of its place, to the row of the place's token.
fn scatter_add(rows: &mut [f32], tile: &[f32], places: &[u32], choice: Choice, cols: usize) {
    let isa = Isa::detect();
    for (tile, &place) in tile.chunks_exact(cols).zip(places) {
        let place = place as usize;
        simd::add_scaled(isa, &mut rows[place / choice.top_k * cols..][..cols], choice.weights[place], tile);
    }
}

/// Most bytes that the gradient of the experts takes beside inputs and results on `threads` threads of a CPU, whatever the
/// router chose: the (token, slot) pairs of each task sorted by expert, and a tile of their rows. The forward pass takes less.
pub(crate) fn workspace_bytes(shape: &Shape, threads: usize) -> usize {
    let Shape { tokens, top_k, experts, hidden, intermediate } = *shape;
    let of_task = task_tokens(tokens, threads);
    let places = of_task * top_k * size_of::<u32>() + 2 * (experts + 1) * size_of::<usize>();
    // A token chooses an expert at most once.
    let rows = of_task.min(TILE_ROWS);
    let tile = (rows * (hidden + 3 * intermediate) + intermediate) * size_of::<f32>();
    tokens.div_ceil(of_task).min(threads) * (places + tile)
}

/// Tokens of a task: equal shares for the pool's threads. The split changes no bit of the result.
fn task_tokens(tokens: usize, threads: usize) -> usize {
    let rounds = tokens.div_ceil(threads * TASK_TOKENS).max(1);
    tokens.div_ceil(threads * rounds).max(1)
}

impl<'a> Choice<'a> {
    fn tokens(&self, range: Range<usize>) -> Self {
        let range = range.start * self.top_k..range.end * self.top_k;
        Self { weights: &self.weights[range.clone()], experts: &self.experts[range], top_k: self.top_k }
    }
}

/// The weighted sum of the chosen experts' outputs for each row of `x` `[n, hidden]`.
pub(crate) fn experts(x: &[f32], choice: Choice, bank: Bank) -> Vec<f32> {
    let mut out = zeros(x.len());
    let tokens = task_tokens(x.len() / bank.hidden, rayon::current_num_threads());
    let chunk = tokens * bank.hidden;
    out.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).enumerate().for_each(|(task, (out, x))| {
        let first = task * tokens;
        task_forward(x, choice.tokens(first..first + x.len() / bank.hidden), bank, out);
    });
    out
}

fn task_forward(x: &[f32], choice: Choice, bank: Bank, out: &mut [f32]) {
    let isa = Isa::detect();
    let (hidden, intermediate) = (bank.hidden, bank.intermediate);
    let assignments = Assignments::new(choice.experts, bank.count);
    let tile_rows = assignments.tile_rows();
    // The tile's input, later its output.
    let mut hidden_tile = vec![0f32; tile_rows * hidden];
    let mut gate_up_tile = vec![0f32; tile_rows * 2 * intermediate];
    let mut activation_tile = vec![0f32; tile_rows * intermediate];
    assignments.for_each_tile(|expert, places| {
        let rows = places.len();
        let input = gather(&mut hidden_tile, x, places, choice.top_k, hidden);
        let gate_up = &mut gate_up_tile[..rows * 2 * intermediate];
        matmul(Matrix::new(input, rows, hidden), bank.gate_up(expert).t(), gate_up, Write::Set);
        let activation = &mut activation_tile[..rows * intermediate];
        for (gate_up, activation) in
            gate_up.chunks_exact(2 * intermediate).zip(activation.chunks_exact_mut(intermediate))
        {
            let (gate, up) = gate_up.split_at(intermediate);
            geglu_into(isa, gate, up, activation);
        }
        let output = &mut hidden_tile[..rows * hidden];
        matmul(Matrix::new(activation, rows, intermediate), bank.down(expert).t(), output, Write::Set);
        scatter_add(out, output, places, choice, hidden);
    });
}

/// Gradients to x `[n, hidden]` and to the weights `[n, top_k]`.
pub(crate) fn experts_backward(x: &[f32], choice: Choice, bank: Bank, d_out: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let mut d_x = zeros(x.len());
    let mut d_weights = vec![0f32; choice.weights.len()];
    let tokens = task_tokens(x.len() / bank.hidden, rayon::current_num_threads());
    let chunk = tokens * bank.hidden;
    d_x.par_chunks_mut(chunk)
        .zip(d_weights.par_chunks_mut(tokens * choice.top_k))
        .zip(x.par_chunks(chunk).zip(d_out.par_chunks(chunk)))
        .enumerate()
        .for_each(|(task, ((d_x, d_weights), (x, d_out)))| {
            let first = task * tokens;
            task_backward(x, choice.tokens(first..first + x.len() / bank.hidden), bank, d_out, d_x, d_weights);
        });
    (d_x, d_weights)
}

fn task_backward(x: &[f32], choice: Choice, bank: Bank, d_out: &[f32], d_x: &mut [f32], d_weights: &mut [f32]) {
    let isa = Isa::detect();
    let (hidden, intermediate) = (bank.hidden, bank.intermediate);
    let assignments = Assignments::new(choice.experts, bank.count);
    let tile_rows = assignments.tile_rows();
    // In turn the tile's input, the gradient of its output, and the gradient of its input.
    let mut hidden_tile = vec![0f32; tile_rows * hidden];
    let mut gate_up_tile = vec![0f32; tile_rows * 2 * intermediate];
    let mut d_activation_tile = vec![0f32; tile_rows * intermediate];
    let mut activation = vec![0f32; intermediate];
    assignments.for_each_tile(|expert, places| {
        let rows = places.len();
        let input = gather(&mut hidden_tile, x, places, choice.top_k, hidden);
        let gate_up = &mut gate_up_tile[..rows * 2 * intermediate];
        matmul(Matrix::new(input, rows, hidden), bank.gate_up(expert).t(), gate_up, Write::Set);

        // The gradient of the output leaves out the routing weight until the end: what is wanted for the weight itself
        // is the product of the unweighted gradient with the activation.
        let d_output = gather(&mut hidden_tile, d_out, places, choice.top_k, hidden);
        let d_activation = &mut d_activation_tile[..rows * intermediate];
        matmul(Matrix::new(d_output, rows, hidden), bank.down(expert), d_activation, Write::Set);
        let activations = gate_up.chunks_exact_mut(2 * intermediate).zip(d_activation.chunks_exact(intermediate));
        for ((gate_up, d_activation), &place) in activations.zip(places) {
            let (gate, up) = gate_up.split_at_mut(intermediate);
            geglu_into(isa, gate, up, &mut activation);
            d_weights[place as usize] = dot(isa, &activation, d_activation);
            geglu_backward_in_place(isa, gate, up, d_activation);
        }

        let d_input = &mut hidden_tile[..rows * hidden];
        matmul(Matrix::new(gate_up, rows, 2 * intermediate), bank.gate_up(expert), d_input, Write::Set);
        scatter_add(d_x, d_input, places, choice, hidden);
    });
}

vectorised! {
    fn dot(a: &[f32], b: &[f32]) -> f32 {
        simd::dot(a, b)
    }
}

vectorised! {
    /// e^(logit - max) for a row of logits.
    fn exp_row(logits: &[f32], out: &mut [f32]) {
        let max = logits.iter().fold(f32::NEG_INFINITY, |max, &logit| if logit > max { logit } else { max });
        for (out, logit) in out.iter_mut().zip(logits) {
            *out = simd::exp(logit - max);
        }
    }
}

/// Weights and experts `[n, top_k]` for logits `[n, e]`, where `scale` is `[e]`.
pub(crate) fn route(logits: &[f32], scale: &[f32], top_k: usize) -> (Vec<f32>, Vec<i32>) {
    let isa = Isa::detect();
    let count = scale.len();
    let n = logits.len() / count;
    let (mut weights, mut experts) = (vec![0f32; n * top_k], vec![0i32; n * top_k]);
    weights
        .par_chunks_mut(ROUTE_ROWS * top_k)
        .zip(experts.par_chunks_mut(ROUTE_ROWS * top_k))
        .zip(logits.par_chunks(ROUTE_ROWS * count))
        .for_each(|((weights, experts), logits)| {
            let mut probabilities = vec![0f32; count];
            let rows = weights.chunks_exact_mut(top_k).zip(experts.chunks_exact_mut(top_k));
            for ((weights, experts), logits) in rows.zip(logits.chunks_exact(count)) {
                exp_row(isa, logits, &mut probabilities);
                choose(logits, experts);
                for (weight, &expert) in weights.iter_mut().zip(experts.iter()) {
                    *weight = probabilities[expert as usize];
                }
                // The softmax's own denominator cancels against this one.
                let sum: f32 = weights.iter().sum();
                for (weight, &expert) in weights.iter_mut().zip(experts.iter()) {
                    *weight = *weight / sum * scale[expert as usize];
                }
            }
        });
    (weights, experts)
}

/// The indices of the largest values, largest first, of equal ones the lower first. NaN counts as smaller than anything.
fn choose(values: &[f32], chosen: &mut [i32]) {
    let above = |a: f32, b: f32| a > b || (b.is_nan() && !a.is_nan());
    let mut found = 0;
    for (index, &value) in values.iter().enumerate() {
        let place = (0..found).find(|&place| above(value, values[chosen[place] as usize])).unwrap_or(found);
        if place < chosen.len() {
            found = (found + 1).min(chosen.len());
            chosen.copy_within(place..found - 1, place + 1);
            chosen[place] = index as i32;
        }
    }
}

/// Gradient of the weights to the logits `[n, e]`.
///
/// Among the chosen, weight / scale is the softmax q of their logits, so d_logit = q (g - sum of q g) with
/// g = scale * d_weight; an expert that was not chosen gets none.
pub(crate) fn route_backward(
    logits: &[f32],
    scale: &[f32],
    experts: &[i32],
    d_weights: &[f32],
    top_k: usize,
) -> Vec<f32> {
    let isa = Isa::detect();
    let count = scale.len();
    let mut d_logits = vec![0f32; logits.len()];
    d_logits
        .par_chunks_mut(ROUTE_ROWS * count)
        .zip(logits.par_chunks(ROUTE_ROWS * count))
        .zip(experts.par_chunks(ROUTE_ROWS * top_k).zip(d_weights.par_chunks(ROUTE_ROWS * top_k)))
        .for_each(|((d_logits, logits), (experts, d_weights))| {
            let mut probabilities = vec![0f32; count];
            let rows = experts.chunks_exact(top_k).zip(d_weights.chunks_exact(top_k));
            for ((d_logits, logits), (experts, d_weights)) in
                d_logits.chunks_exact_mut(count).zip(logits.chunks_exact(count)).zip(rows)
            {
                exp_row(isa, logits, &mut probabilities);
                let sum: f32 = experts.iter().map(|&expert| probabilities[expert as usize]).sum();
                let terms = || {
                    experts.iter().zip(d_weights).map(|(&expert, &d_weight)| {
                        let expert = expert as usize;
                        (expert, probabilities[expert] / sum, scale[expert] * d_weight)
                    })
                };
                let mean: f32 = terms().map(|(_, q, g)| q * g).sum();
                terms().for_each(|(expert, q, g)| d_logits[expert] = q * (g - mean));
            }
        });
    d_logits
}
