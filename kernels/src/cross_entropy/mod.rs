//! The output head and the cross-entropy loss in one pass over chunks of rows, so that the logits of a whole micro-batch
//! never exist.
//!
//! Not an automatic-differentiation operation: the loss is the end of the graph, so the gradient of the hidden states is
//! made together with it, while the chunk's logits are at hand.

mod backend;
mod cpu;
#[cfg(feature = "cubecl")]
mod cube;
pub mod reference;

pub use backend::CrossEntropyOps;

use crate::Runtime;
use crate::trace::{self, Work};
use burn::backend::Dispatch;
use burn::tensor::Tensor;
use half::bf16;

/// Bytes of the logits of one chunk, by far the largest buffer of [`linear_cross_entropy`].
pub fn logits_bytes(chunk_rows: usize, vocab: usize) -> usize {
    chunk_rows * vocab * size_of::<f32>()
}

/// Bytes that [`linear_cross_entropy`] takes beside inputs and results, whatever the activations' dtype: a chunk's logits and as many rows
/// of `hidden` values, in f32; on matrix instructions also the gradient of the logits, rounded. The parts in which the gradient of the rows
/// is summed over the vocabulary lie there where the logits were.
pub fn workspace_bytes(runtime: Runtime, chunk_rows: usize, hidden: usize, vocab: usize) -> usize {
    let rounded = match runtime {
        Runtime::Cubecl { bf16: true, .. } => chunk_rows * vocab * size_of::<bf16>(),
        _ => 0,
    };
    logits_bytes(chunk_rows, vocab) + chunk_rows * hidden * size_of::<f32>() + rounded
}

/// A target that is not trained on.
pub const IGNORED: i32 = -100;

/// The loss of each row and, where it was asked for, the gradient of the hidden states.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    /// `[n]`: -log p(target), 0 where the target is ignored. Neither summed nor divided: the caller knows over how many
    /// trained tokens of the whole accumulation window to average.
    pub loss: Vec<f32>,
    /// `[n, h]`, in the dtype of the hidden states: `grad_scale` times the gradient of the sum of the losses.
    pub d_hidden: Option<Tensor<2>>,
}

/// How [`CrossEntropyOps`] makes the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Head {
    /// Logits z become cap * tanh(z / cap).
    pub softcap: Option<f64>,
    /// Rows whose logits exist at a time: [`logits_bytes`] of it.
    pub chunk_rows: usize,
}

/// Cross-entropy of softmax(softcap(hidden W^T)) against the targets.
///
/// `hidden` is `[n, h]`, f32 and where cubecl computes also f16 or bf16, `weight` `[v, h]`, and `targets[t]` the class of row t, already
/// shifted, or [`IGNORED`]. Ignored rows cost nothing. The logits z become cap * tanh(z / cap) with a `softcap`, and exist for `chunk_rows` rows at a time:
/// [`workspace_bytes`]. With `want_grad` the gradient comes too, times `grad_scale`. The result is cut off from any
/// autodiff graph of the inputs: `d_hidden` is what to start the backward pass of `hidden` with.
///
/// # Panics
/// If the shapes do not fit together, a target is neither ignored nor a class, or `chunk_rows` is 0.
pub fn linear_cross_entropy(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    targets: &[i32],
    softcap: Option<f64>,
    grad_scale: f64,
    chunk_rows: usize,
    want_grad: bool,
) -> CrossEntropy {
    let ([n, h], [classes, cols]) = (hidden.dims(), weight.dims());
    assert_eq!(cols, h, "hidden and weight differ in width");
    assert_eq!(targets.len(), n, "a target for each row");
    assert!(chunk_rows > 0, "chunk_rows must be at least 1");
    let valid = |target: i32| target == IGNORED || (0..classes as i32).contains(&target);
    if let Some(target) = targets.iter().find(|&&target| !valid(target)) {
        panic!("target {target} is neither {IGNORED} nor one of {classes} classes");
    }
    let (name, products) = match want_grad {
        true => ("linear_cross_entropy and gradient", 2),
        false => ("linear_cross_entropy", 1),
    };
    let _span = trace::kernel(name, || {
        let trained = targets.iter().filter(|target| **target != IGNORED).count();
        Work::of(products * 2 * trained * h * classes, products * n * h, hidden.dtype())
            .with_weight(h * classes, weight.dtype().size())
    });
    let head = Head { softcap, chunk_rows };
    let (hidden, weight) = (hidden.into_dispatch(), weight.into_dispatch());
    let (loss, d_hidden) = if want_grad {
        let (loss, d_hidden) = Dispatch::linear_cross_entropy_grad(hidden, weight, targets.to_vec(), head, grad_scale);
        (loss, Some(Tensor::from_dispatch(d_hidden)))
    } else {
        (Dispatch::linear_cross_entropy(hidden, weight, targets.to_vec(), head), None)
    };
    let loss = Tensor::<1>::from_dispatch(loss).into_data().try_into_vec().expect("the losses are f32");
    CrossEntropy { loss, d_hidden }
}

/// softcap(hidden W^T), `[n, v]` in f32, without gradient: for small inputs, where the logits themselves are wanted.
///
/// # Panics
/// If the shapes do not fit together.
pub fn logits(hidden: Tensor<2>, weight: Tensor<2>, softcap: Option<f64>) -> Tensor<2> {
    assert_eq!(hidden.dims()[1], weight.dims()[1], "hidden and weight differ in width");
    Tensor::from_dispatch(Dispatch::head_logits(hidden.into_dispatch(), weight.into_dispatch(), softcap))
}

#[cfg(test)]
mod tests;
