//! Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467) with a frozen weight.

mod backend;
pub mod cpu;
#[cfg(feature = "cubecl")]
mod cube;
pub mod reference;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

pub use backend::{RmsNormKernel, RmsNormOps};

/// Scales every row of `x` to unit root mean square: `y = x * (mean(x^2) + eps)^(-1/2) * weight`.
///
/// `x` is `[rows, dim]`, f32, and `weight`, where there is one, is `[dim]`; the result is `[rows, dim]`. The weight is
/// taken as a constant: gradients flow to `x` alone, and `x` is all that is kept for the backward pass.
///
/// # Panics
/// If the weight's length is not `dim`, or on a dtype other than f32.
pub fn rms_norm(x: Tensor<2>, weight: Option<Tensor<1>>, eps: f64) -> Tensor<2> {
    let [_, dim] = x.dims();
    Tensor::from_dispatch(match weight {
        Some(weight) => {
            assert_eq!(weight.dims(), [dim], "rms_norm: the weight has one value per column of x");
            Dispatch::rms_norm(x.into_dispatch(), weight.into_dispatch(), eps)
        }
        None => Dispatch::rms_norm_weightless(x.into_dispatch(), eps),
    })
}
