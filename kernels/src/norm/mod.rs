//! Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467) with a frozen weight.

mod backend;
pub mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cube;
pub mod reference;

use crate::trace::{self, Work};
use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

pub use backend::{Epilogue, RmsNormKernel, RmsNormOps};

/// Scales every row of `x` to unit root mean square: `y = x * (mean(x^2) + eps)^(-1/2) * weight`.
///
/// `x` is `[rows, dim]`, f32, f16 or bf16, and `weight`, where there is one, is `[dim]`, f32; the result is `[rows, dim]` in `out`, one of
/// the same dtypes. The weight is taken as a constant: gradients flow to `x` alone, in its dtype, and `x` is all that is kept for the
/// backward pass.
///
/// # Panics
/// If the weight's length is not `dim`, or on another dtype; on the CPU on any but f32.
pub fn rms_norm(x: Tensor<2>, weight: Option<Tensor<1>>, eps: f64, out: DType) -> Tensor<2> {
    let [rows, dim] = x.dims();
    let _span = trace::kernel("rms_norm", || Work { flop: 0, bytes: rows * dim * (x.dtype().size() + out.size()) });
    Tensor::from_dispatch(match weight {
        Some(weight) => {
            assert_eq!(weight.dims(), [dim], "rms_norm: the weight has one value per column of x");
            Dispatch::rms_norm(x.into_dispatch(), weight.into_dispatch(), eps, out)
        }
        None => Dispatch::rms_norm_weightless(x.into_dispatch(), eps, out),
    })
}

/// `(residual + rms_norm(x)) * scale`: the end of a block of a residual network, in one pass.
///
/// `x` and `residual` are `[rows, dim]`, each f32, f16 or bf16, and `weight` is `[dim]`, f32; the result has the dtype of `residual`.
/// Gradients flow to `x` and to `residual`, each in its tensor's dtype (that to `residual` is the result's times `scale` in that dtype); `x`
/// is all that is kept.
///
/// # Panics
/// If the shapes do not fit together, or on another dtype; on the CPU on any but f32.
pub fn rms_norm_residual(x: Tensor<2>, weight: Tensor<1>, eps: f64, residual: Tensor<2>, scale: f32) -> Tensor<2> {
    let [rows, dim] = x.dims();
    assert_eq!(weight.dims(), [dim], "rms_norm_residual: the weight has one value per column of x");
    assert_eq!(residual.dims(), [rows, dim], "rms_norm_residual: the residual has the shape of x");
    let value_bytes = x.dtype().size() + 2 * residual.dtype().size();
    let _span = trace::kernel("rms_norm", || Work { flop: 0, bytes: rows * dim * value_bytes });
    let (x, weight, residual) = (x.into_dispatch(), weight.into_dispatch(), residual.into_dispatch());
    Tensor::from_dispatch(Dispatch::rms_norm_residual(x, weight, residual, eps, scale))
}
