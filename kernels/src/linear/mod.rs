//! Linear layer with a frozen weight and an optional LoRA adapter (Hu et al., "LoRA", 2021):
//! y = x W^T + scale * (drop(x) A^T) B^T.

mod backend;
mod cpu;
#[cfg(feature = "cubecl")]
mod cube;
pub mod reference;

pub use backend::LinearOps;

use crate::Runtime;
use crate::matmul::PART_OF_ROWS;
use crate::trace::{self, Work};
use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

/// Dropout on the adapter's input. Which elements are dropped is a function of the seed and the element's place alone, so
/// a recomputed forward pass drops the same ones and no mask is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Share of elements that are dropped, in [0, 1). The others are multiplied by 1 / (1 - p).
    pub p: f64,
    /// Chooses the elements; another seed for each step and module.
    pub seed: u64,
}

/// The trained low-rank pair beside a frozen weight.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// A: `[rank, in]`.
    pub a: Tensor<2>,
    /// B: `[out, rank]`.
    pub b: Tensor<2>,
    /// Factor of the adapter's output, usually alpha / rank.
    pub scale: f64,
    /// Dropout of the adapter's input, in training only.
    pub dropout: Option<Dropout>,
}

/// Bytes that the gradient of the layer takes beside inputs and results, for `n` rows of `input` values, `output` columns of the result
/// and an adapter of this `rank`.
///
/// The gradient of A x; on the CPU also that of B before it is transposed, and dropout works on a few rows at a time, which are not
/// counted. On cubecl dropout takes a copy of the input or of its gradient. On matrix instructions the parts in which gradients of A and B
/// are summed are there, and where activations are not the operands already, the input, its inner product and the gradient of the result
/// rounded.
pub fn workspace_bytes(runtime: Runtime, n: usize, input: usize, output: usize, rank: usize, dropout: bool) -> usize {
    match runtime {
        Runtime::Cpu { .. } => cpu::workspace_bytes(n, output, rank),
        Runtime::Cubecl { bf16: on_matrix_units, activations } => {
            let kept = if on_matrix_units { DType::BF16 } else { activations };
            let rounded_bytes = if kept == activations { 0 } else { kept.size() };
            // The copy of the input's gradient is gone before that of the input is made.
            let copy_bytes = if dropout { activations.size().max(kept.size()) } else { rounded_bytes };
            let rows = n * (input * copy_bytes + output * rounded_bytes + rank * (kept.size() + rounded_bytes));
            let parts = if on_matrix_units { n.div_ceil(PART_OF_ROWS) } else { 0 };
            rows + parts * rank * input.max(output) * size_of::<f32>()
        }
    }
}

/// What the layer computed in one pass, so that a second one over the same inputs need not.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[n, out]`, of the dtype of the input.
    pub y: Tensor<2>,
    /// With an adapter, scale * drop(x) A^T: `[n, rank]`, of the dtype of the input.
    pub inner: Option<Tensor<2>>,
}

/// y = x W^T, plus the adapter's part: `[n, out]`, of the dtype of `x`.
///
/// `x` is `[n, in]`, f32, or on cubecl any float, and `weight` `[out, in]`, f32 or bf16; A and B are f32. Gradients go to `x` and to the
/// adapter; the weight is frozen and never gets one. Between forward and backward only `x` and the `[n, rank]` product are kept.
///
/// # Panics
/// If the shapes do not fit together, or on a dtype that the device's kernel does not take, naming it.
pub fn lora_linear(x: Tensor<2>, weight: Tensor<2>, adapter: Option<&Adapter>) -> Tensor<2> {
    lora_linear_output(x, weight, adapter).y
}

/// [`lora_linear`], with what a second pass needs.
pub fn lora_linear_output(x: Tensor<2>, weight: Tensor<2>, adapter: Option<&Adapter>) -> Output {
    let (name, rank) =
        adapter.map_or(("lora_linear without adapter", 0), |adapter| ("lora_linear", adapter.a.dims()[0]));
    let _span = trace::kernel(name, || work(x.dims()[0], weight.dims(), [x.dtype(), weight.dtype()], rank, 1));
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    match adapter {
        None => Output { y: Tensor::from_dispatch(Dispatch::frozen_linear(x, weight)), inner: None },
        Some(Adapter { a, b, scale, dropout }) => {
            let (a, b) = (a.clone().into_dispatch(), b.clone().into_dispatch());
            let (y, inner) = Dispatch::lora_linear(x, weight, a, b, *scale, *dropout);
            Output { y: Tensor::from_dispatch(y), inner: Some(Tensor::from_dispatch(inner)) }
        }
    }
}

/// One product of `n` rows with the frozen weight and, times `low_rank`, those with A and B; of the gradients to them `x` is an
/// input too.
fn work(n: usize, [output, input]: [usize; 2], [x, weight]: [DType; 2], rank: usize, low_rank: usize) -> Work {
    let pair = low_rank * rank * (input + output);
    let again = if low_rank > 1 { n * input } else { 0 };
    let values = n * (input + output + rank) + again;
    let work = Work::of(2 * n * (input * output + pair), values, x);
    work.with_weight(input * output, weight.size()).with_weight(pair, size_of::<f32>())
}

/// [`lora_linear`] whose `output` is known: only its gradients are still computed.
///
/// # Panics
/// If `output` is not one of a call with an adapter, or without one, as this is.
pub fn lora_linear_known(x: Tensor<2>, weight: Tensor<2>, adapter: Option<&Adapter>, output: Output) -> Tensor<2> {
    let (x, weight, y) = (x.into_dispatch(), weight.into_dispatch(), output.y.into_dispatch());
    Tensor::from_dispatch(match (adapter, output.inner) {
        (None, None) => Dispatch::frozen_linear_known(x, weight, y),
        (Some(Adapter { a, b, scale, dropout }), Some(inner)) => {
            let (a, b) = (a.clone().into_dispatch(), b.clone().into_dispatch());
            Dispatch::lora_linear_known(x, weight, a, b, y, inner.into_dispatch(), *scale, *dropout)
        }
        _ => panic!("lora_linear_known: the output is of a call with another adapter"),
    })
}

#[cfg(test)]
mod tests;
