//! What a layer's matrix products and its attention computed, kept between two passes over the same input.
//!
//! A recomputed layer runs twice. Nearly all of its time goes into products whose outputs are small beside what autodiff
//! would keep of the whole layer; kept, the second pass only computes again what is cheap (norms, rotations, activation
//! functions, the router): the selective recomputation of Korthikanti et al., arXiv 2205.05198.

use super::spec::Slot;
use burn::tensor::Tensor;
use tunehost_kernels::attention::{self, Attention, windowed_attention_known, windowed_attention_output};
use tunehost_kernels::linear::{self, Adapter, lora_linear_known, lora_linear_output};
use tunehost_kernels::moe::{self, Routing};

/// The outputs of one layer's products; empty where a pass is to keep none.
#[derive(Debug, Clone, Default)]
pub struct Products {
    keep: bool,
    linear: [Option<linear::Output>; 7],
    attention: Option<attention::Output>,
    experts: Option<Tensor<2>>,
    inputs: Option<Box<Inputs>>,
}

/// What a layer's products multiplied their matrices with.
#[derive(Debug, Clone, Default)]
pub struct Inputs {
    /// `[N, in]` of each linear module, by [`Slot`].
    pub linear: [Option<Tensor<2>>; 7],
    /// `[N, H]`, and which experts it went to.
    pub experts: Option<(Tensor<2>, Routing)>,
}

impl Products {
    /// For a pass whose inputs are looked at.
    pub fn observing() -> Self {
        Self { inputs: Some(Box::default()), ..Self::default() }
    }

    /// The inputs of an observed pass.
    pub fn into_inputs(self) -> Inputs {
        self.inputs.map(|inputs| *inputs).unwrap_or_default()
    }

    /// For a first pass whose outputs a second one takes.
    pub fn kept() -> Self {
        Self { keep: true, ..Self::default() }
    }

    /// What the second pass takes.
    pub fn for_second_pass(self) -> Self {
        Self { keep: false, ..self }
    }

    /// The linear layer of `slot`: `[N, out]`.
    pub(super) fn linear(
        &mut self,
        slot: Slot,
        x: Tensor<2>,
        weight: Tensor<2>,
        adapter: Option<&Adapter>,
    ) -> Tensor<2> {
        if let Some(inputs) = &mut self.inputs {
            inputs.linear[slot as usize] = Some(x.clone());
        }
        if let Some(known) = self.linear[slot as usize].take() {
            return lora_linear_known(x, weight, adapter, known);
        }
        let output = lora_linear_output(x, weight, adapter);
        self.linear[slot as usize] = self.keep.then(|| output.clone());
        output.y
    }

    /// Attention, shaped as `q`.
    pub(super) fn attention(&mut self, q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, attention: &Attention) -> Tensor<3> {
        if let Some(known) = self.attention.take() {
            return windowed_attention_known(q, k, v, attention, known);
        }
        let output = windowed_attention_output(q, k, v, attention);
        self.attention = self.keep.then(|| output.clone());
        output.out
    }

    /// The experts' weighted sum: `[N, H]`.
    pub(super) fn experts(
        &mut self,
        x: Tensor<2>,
        routing: &Routing,
        gate_up: Tensor<3>,
        down: Tensor<3>,
    ) -> Tensor<2> {
        if let Some(inputs) = &mut self.inputs {
            inputs.experts = Some((x.clone(), routing.clone()));
        }
        if let Some(known) = self.experts.take() {
            return moe::experts_known(x, routing, gate_up, down, known);
        }
        let out = moe::experts(x, routing, gate_up, down);
        self.experts = self.keep.then(|| out.clone());
        out
    }
}
