//! Mixture of experts: the router's choice and the experts' gated MLPs.

mod backend;
mod cpu;
#[cfg(feature = "cubecl")]
mod cube;
pub mod reference;
#[cfg(feature = "cubecl")]
mod router;

pub use backend::MoeOps;

use crate::Runtime;
use crate::trace::{self, Work};
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

/// Sizes of a call of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tokens n.
    pub tokens: usize,
    /// Experts that a token goes to.
    pub top_k: usize,
    /// Experts e.
    pub experts: usize,
    /// Width h of a token.
    pub hidden: usize,
    /// Rows i of an expert's gate.
    pub intermediate: usize,
}

/// Tokens that go through cubecl's experts at a time. Of the 26B-A4B an expert then has some 1,024 rows: one of 17 tiles is lost where groups
/// end with one that is half full, and reading the matrices once more takes a quarter of the time of their products at a card's peak. With
/// half as many tokens it would be one of nine, and half.
const CHUNK_TOKENS: usize = 16_384;

/// Most bytes that the gradient of the experts takes beside inputs and results, whatever the router chose.
///
/// On the CPU the (token, slot) pairs of each task sorted by expert, and a tile of their rows. On cubecl a row for each pair of a chunk of
/// tokens: `[gate, up]`, whose gradient takes its place, with the gradient of the activation and later with that of the input. They are of
/// the activations' dtype, in bf16 where products are on matrix instructions; the input and the gradient of the result are there
/// too, rounded, where the activations are not bf16.
pub fn workspace_bytes(runtime: Runtime, shape: &Shape) -> usize {
    let Shape { tokens, top_k, experts, hidden, intermediate } = *shape;
    match runtime {
        Runtime::Cpu { threads } => cpu::workspace_bytes(shape, threads),
        Runtime::Cubecl { bf16: on_matrix_units, activations } => {
            let kept = if on_matrix_units { DType::BF16 } else { activations };
            let rounded = if kept == activations { 0 } else { 2 * tokens * hidden * kept.size() };
            let places = tokens.min(CHUNK_TOKENS) * top_k;
            let sorted = (2 * places + experts + 1) * size_of::<u32>();
            rounded + sorted + places * (2 * intermediate + intermediate.max(hidden)) * kept.size()
        }
    }
}

/// Which experts each token goes to, and with what weight.
#[derive(Clone, Debug)]
pub struct Routing {
    /// `[n, k]`, f32: the weight of each chosen expert's output.
    pub weights: Tensor<2>,
    /// `[n, k]`, i32: the chosen experts, the most probable first. A token chooses an expert at most once.
    pub experts: Tensor<2, Int>,
}

/// Chooses `top_k` experts for each token.
///
/// From `logits` `[n, e]`: softmax over all experts in f32, the `top_k` largest (of equal ones the lower index first),
/// divided by their sum, then multiplied by `per_expert_scale` `[e]`. Gradients go from the weights to the logits; the
/// scale is frozen.
///
/// # Panics
/// If the shapes do not fit together or `top_k` is not in `1..=e`.
pub fn route(logits: Tensor<2>, per_expert_scale: Tensor<1>, top_k: usize) -> Routing {
    let [n, experts] = logits.dims();
    assert_eq!(per_expert_scale.dims(), [experts], "one scale for each expert");
    assert!((1..=experts).contains(&top_k), "top_k must be in 1..={experts}, not {top_k}");
    let _span = trace::kernel("moe_experts, routing", || Work::f32(0, n * (experts + 2 * top_k)));
    let (weights, experts) = Dispatch::moe_route(logits.into_dispatch(), per_expert_scale.into_dispatch(), top_k);
    Routing { weights: Tensor::from_dispatch(weights), experts: Tensor::from_dispatch(experts) }
}

/// The sum over each token's chosen experts e of weight * down\[e\] (gelu_tanh(gate) * up): `[n, h]`, of the dtype of `x`.
///
/// `x` is `[n, h]`, f32, or on cubecl any float, `gate_up` `[e, 2 i, h]` with the gate in the first i rows of each expert, `down` `[e, h, i]`.
/// Gradients go to `x` and to `routing.weights`; the experts are frozen. Between forward and backward only `x` and the
/// routing are kept. A token's outputs are added in the order of the experts' indices.
///
/// # Panics
/// If the shapes do not fit together or the routing names an expert that does not exist.
pub fn experts(x: Tensor<2>, routing: &Routing, gate_up: Tensor<3>, down: Tensor<3>) -> Tensor<2> {
    check(&x, routing, &gate_up, &down);
    let _span =
        trace::kernel("moe_experts", || work(3, 2, routing.experts.dims(), down.dims(), [x.dtype(), down.dtype()]));
    Tensor::from_dispatch(Dispatch::moe_experts(
        x.into_dispatch(),
        routing.weights.clone().into_dispatch(),
        routing.experts.clone().into_dispatch(),
        gate_up.into_dispatch(),
        down.into_dispatch(),
    ))
}

/// `products` with the weights of the chosen experts; the weights of all are read once, and `rows` rows go in and out for a token.
fn work(
    products: usize,
    rows: usize,
    [n, top_k]: [usize; 2],
    [count, hidden, intermediate]: [usize; 3],
    [x, weights]: [DType; 2],
) -> Work {
    let flop = products * 2 * n * top_k * hidden * intermediate;
    Work::of(flop, rows * n * hidden, x).with_weight(count * 3 * hidden * intermediate, weights.size())
}

/// [`experts`] whose output `out` `[n, h]` is known from an earlier pass over the same inputs: only its gradients are
/// still computed.
///
/// # Panics
/// As [`experts`].
pub fn experts_known(
    x: Tensor<2>,
    routing: &Routing,
    gate_up: Tensor<3>,
    down: Tensor<3>,
    out: Tensor<2>,
) -> Tensor<2> {
    check(&x, routing, &gate_up, &down);
    Tensor::from_dispatch(Dispatch::moe_experts_known(
        x.into_dispatch(),
        routing.weights.clone().into_dispatch(),
        routing.experts.clone().into_dispatch(),
        gate_up.into_dispatch(),
        down.into_dispatch(),
        out.into_dispatch(),
    ))
}

fn check(x: &Tensor<2>, routing: &Routing, gate_up: &Tensor<3>, down: &Tensor<3>) {
    let ([n, hidden], [count, rows, cols]) = (x.dims(), gate_up.dims());
    assert_eq!((rows % 2, cols), (0, hidden), "gate_up must be [e, 2 i, {hidden}]");
    assert_eq!(down.dims(), [count, hidden, rows / 2], "down must be [{count}, {hidden}, {}]", rows / 2);
    assert_eq!(routing.weights.dims(), routing.experts.dims(), "a weight for each chosen expert");
    assert_eq!(routing.weights.dims()[0], n, "a choice for each token");
}

#[cfg(test)]
mod tests;
