//! The experts of a layer one by one, for who looks into them; the kernels compute all of them at once.

use super::adapter::values;
use burn::tensor::{Int, Tensor, TensorData};
use tunehost_kernels::linear::lora_linear;
use tunehost_kernels::moe::Routing;

/// An expert with the tokens that chose it.
#[derive(Debug, Clone)]
pub struct Chosen {
    /// Its number.
    pub expert: usize,
    /// The tokens, in order.
    pub tokens: Vec<usize>,
    /// The weight of its output for each.
    pub weights: Vec<f32>,
}

/// The experts that any token chose, in order.
pub fn each_expert(routing: &Routing) -> Vec<Chosen> {
    let [_, top_k] = routing.weights.dims();
    let weights = values(&routing.weights);
    let experts: Vec<i32> = routing.experts.clone().into_data().iter::<i32>().collect();
    let count = experts.iter().max().map_or(0, |largest| *largest as usize + 1);
    let mut chosen: Vec<Chosen> =
        (0..count).map(|expert| Chosen { expert, tokens: Vec::new(), weights: Vec::new() }).collect();
    for (at, (expert, weight)) in experts.into_iter().zip(weights).enumerate() {
        let chosen = &mut chosen[expert as usize];
        chosen.tokens.push(at / top_k);
        chosen.weights.push(weight);
    }
    chosen.retain(|chosen| !chosen.tokens.is_empty());
    chosen
}

impl Chosen {
    /// The rows of `x` `[n, h]` that belong to its tokens.
    pub fn rows(&self, x: &Tensor<2>) -> Tensor<2> {
        let tokens: Vec<i32> = self.tokens.iter().map(|token| *token as i32).collect();
        let tokens = Tensor::<1, Int>::from_data(TensorData::new(tokens, [self.tokens.len()]), &x.device());
        x.clone().select(0, tokens)
    }

    /// Its matrix of a stack `[e, rows, width]`.
    pub fn matrix(&self, stack: &Tensor<3>) -> Tensor<2> {
        let [_, rows, width] = stack.dims();
        stack.clone().narrow(0, self.expert, 1).reshape([rows, width])
    }

    /// What its gate and its up, the halves of `gate_up` `[e, 2 i, h]`, make of `rows` `[n, h]`: `[n, i]` each.
    pub fn gate_and_up(&self, rows: Tensor<2>, gate_up: &Tensor<3>) -> (Tensor<2>, Tensor<2>) {
        let both = lora_linear(rows, self.matrix(gate_up), None);
        let inner = both.dims()[1] / 2;
        (both.clone().narrow(1, 0, inner), both.narrow(1, inner, inner))
    }
}
