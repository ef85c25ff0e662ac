//! Floating-point operations of training, counted from shapes: a multiplication and an addition are two.

use super::memory::Model;
use crate::config::RecomputeGranularity;
use crate::model::config::{LayerConfig, TextConfig};
use crate::model::spec::Slot;
use serde::Serialize;
use std::iter::Sum;
use std::ops::Add;

/// Operations of the model and of the engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Work {
    /// Forward pass and gradients to inputs and adapters, attention inside its window, nothing twice.
    pub nominal_flop: f64,
    /// What the engine computes: that, what it recomputes, and what its kernels compute again.
    pub performed_flop: f64,
}

impl Add for Work {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            nominal_flop: self.nominal_flop + other.nominal_flop,
            performed_flop: self.performed_flop + other.performed_flop,
        }
    }
}

impl Sum for Work {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Add::add)
    }
}

impl Work {
    /// Both counts of `times` units of work, `again` of them beside.
    fn new(nominal: usize, again: usize, times: f64) -> Self {
        Self { nominal_flop: nominal as f64 * times, performed_flop: (nominal + again) as f64 * times }
    }
}

/// Keys that the queries of a document of `tokens` see in all.
pub fn visible_keys(tokens: usize, window: Option<usize>) -> usize {
    let window = window.unwrap_or(tokens).min(tokens);
    window * (window + 1) / 2 + (tokens - window) * window
}

/// Parameters of the layers of `text` that a token is multiplied with: linear modules, router and its experts.
pub fn active_layer_parameters(text: &TextConfig) -> usize {
    text.layers.iter().map(|layer| dense_parameters(text, layer) + expert_parameters(text, layer)).sum()
}

impl Model<'_> {
    /// One step over `documents`, by their lengths in tokens, `trained` of which have a target.
    pub fn work(&self, documents: impl Iterator<Item = usize>, trained: usize) -> Work {
        let token = self.per_token();
        let (tokens, attention) = documents
            .map(|tokens| (tokens, self.attention_of(tokens)))
            .fold((0, Work::default()), |(tokens, sum), (n, work)| (tokens + n, sum + work));
        // logits and the gradient of what they are made of
        let head = 2 * 2 * self.text.hidden_size * self.text.vocab_size;
        let tokens = tokens as f64;
        let linear = Work { nominal_flop: token.nominal_flop * tokens, performed_flop: token.performed_flop * tokens };
        attention + linear + Work::new(head, 0, trained as f64)
    }

    /// Matrix products of a token in all layers.
    fn per_token(&self) -> Work {
        let layers = self.text.layers.iter().enumerate().map(|(index, layer)| {
            let (dense, experts) = (2 * dense_parameters(self.text, layer), 2 * expert_parameters(self.text, layer));
            let router = 2 * router_parameters(self.text.hidden_size, layer);
            if index < self.lowest_layer() {
                return Work::new(dense + experts, 0, 1.0);
            }
            let of_layer = self.lora.modules.iter().filter(|module| module.layer == index);
            let low_rank: usize = of_layer.map(|m| 2 * self.lora.rank * (m.input + m.output)).sum();
            // forward; gradients to the input, and of an adapter to both its matrices
            let nominal = 2 * (dense + experts) + 3 * low_rank;
            // The gradient of the experts needs gate and up again.
            let in_kernels = experts * 2 / 3;
            let recomputed = match (index < self.recomputed_layers(), self.train.recompute_granularity) {
                (false, _) => 0,
                (true, RecomputeGranularity::Selective) => router,
                (true, RecomputeGranularity::Full) => dense + experts + low_rank,
            };
            Work::new(nominal, in_kernels + recomputed, 1.0)
        });
        layers.sum()
    }

    /// Scores and weighted values of a document in all layers.
    fn attention_of(&self, tokens: usize) -> Work {
        let layers = self.text.layers.iter().enumerate().map(|(index, layer)| {
            // scores, or any other product of queries and keys
            let product = 2 * visible_keys(tokens, layer.window) * self.text.heads * layer.head_dim;
            if index < self.lowest_layer() {
                return Work::new(2 * product, 0, 1.0);
            }
            let full = self.train.recompute_granularity == RecomputeGranularity::Full;
            let recomputed = if full && index < self.recomputed_layers() { 2 * product } else { 0 };
            // two forward and four backward, where the kernel makes the scores again
            Work::new(6 * product, product + recomputed, 1.0)
        });
        layers.sum()
    }
}

/// Of the linear modules and the router.
fn dense_parameters(text: &TextConfig, layer: &LayerConfig) -> usize {
    let (hidden, dense) = (text.hidden_size, text.intermediate_size);
    let (q, kv) = (text.heads * layer.head_dim, layer.kv_heads * layer.head_dim);
    let of = |slot: Slot| match slot {
        Slot::Q | Slot::O => q,
        Slot::V if layer.k_eq_v => 0,
        Slot::K | Slot::V => kv,
        Slot::Gate | Slot::Up | Slot::Down => dense,
    };
    hidden * Slot::ALL.map(of).iter().sum::<usize>() + router_parameters(hidden, layer)
}

/// Of the experts that a token goes to.
fn expert_parameters(text: &TextConfig, layer: &LayerConfig) -> usize {
    layer.moe.map_or(0, |moe| 3 * moe.top_k * moe.intermediate_size * text.hidden_size)
}

fn router_parameters(hidden: usize, layer: &LayerConfig) -> usize {
    layer.moe.map_or(0, |moe| moe.experts * hidden)
}
