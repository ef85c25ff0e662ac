//! AdamW (Loshchilov and Hutter, arXiv 1711.05101) over flat buffers: everything that is trained lies in one, its gradient and both
//! moments in one each, all of one length.
//!
//! What is written lies where it lay: [`adamw`] and [`write`](write()) change a buffer in place where nobody else holds it. Where somebody
//! does, such as a snapshot or a view, they change a copy, and the other's stays as it is.

mod backend;
mod cpu;
#[cfg(feature = "cubecl")]
mod cube;
pub mod reference;

pub use crate::matmul::Write;
pub use backend::AdamWOps;

use crate::trace::{self, Work};
use burn::backend::Dispatch;
use burn::tensor::Tensor;
use std::ops::Range;

/// The numbers of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Factor of the gradient.
    pub grad_factor: f64,
    /// Decay of the first and of the second moment.
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Factor of the values before the update: 1 - rate * weight decay.
    pub decay: f64,
    /// The rate over the bias correction of the first moment: 1 - beta1^t.
    pub step_size: f64,
    /// Root of the bias correction of the second moment: sqrt(1 - beta2^t).
    pub correction: f64,
}

impl Step {
    /// In f32, as the kernels compute.
    fn scalars(&self) -> Scalars {
        let narrow = |x: f64| x as f32;
        Scalars {
            grad_factor: narrow(self.grad_factor),
            betas: self.betas.map(narrow),
            rests: self.betas.map(|beta| narrow(1.0 - beta)),
            eps: narrow(self.eps),
            decay: narrow(self.decay),
            step_size: narrow(self.step_size),
            correction: narrow(self.correction),
        }
    }
}

/// [`Step`] in f32.
#[derive(Clone, Copy)]
struct Scalars {
    grad_factor: f32,
    betas: [f32; 2],
    /// 1 - beta of either moment.
    rests: [f32; 2],
    eps: f32,
    decay: f32,
    step_size: f32,
    correction: f32,
}

/// One update, in one pass, of `state`: values, first and second moment, each `[n]` in f32, by the `gradient` `[n]`, f32. With
/// g = grad_factor * gradient:
///
/// m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, values = decay * values - step_size * m / (sqrt(v) / correction + eps).
///
/// Each operation is rounded to f32 in the order of PyTorch's single-tensor AdamW; on cubecl products and sums may be fused.
///
/// # Panics
/// If the lengths differ, or on another dtype.
pub fn adamw(state: [Tensor<1>; 3], gradient: Tensor<1>, step: &Step) -> [Tensor<1>; 3] {
    let [n] = gradient.dims();
    assert!(state.iter().all(|buffer| buffer.dims() == [n]), "adamw: values, moments and gradient are of one length");
    // The gradient is read, the three others are read and written.
    let _span = trace::kernel("adamw", || Work::f32(0, 7 * n));
    let [values, m, v] = state.map(Tensor::into_dispatch);
    let (values, m, v) = Dispatch::adamw(values, m, v, gradient.into_dispatch(), *step);
    [values, m, v].map(Tensor::from_dispatch)
}

/// The sum of squares of each of `parts` of `flat` `[n]`, f32.
///
/// On the CPU a part is summed in f64 from first to last. On cubecl blocks of it are summed in f32, in an order that depends on nothing,
/// and these sums, which are all that comes to the host, in f64.
///
/// # Panics
/// If a part is beyond the end, or on another dtype.
pub fn squares(flat: Tensor<1>, parts: &[Range<usize>]) -> Vec<f64> {
    let [n] = flat.dims();
    assert!(parts.iter().all(|part| part.end <= n), "adamw: a part of {n} values");
    if parts.is_empty() {
        return Vec::new();
    }
    let _span = trace::kernel("adamw, sum of squares", || Work::f32(0, parts.iter().map(|part| part.len()).sum()));
    let sums = Tensor::<2>::from_dispatch(Dispatch::sums_of_squares(flat.into_dispatch(), parts.to_vec()));
    let [_, blocks] = sums.dims();
    let sums: Vec<f64> = sums.into_data().iter().collect();
    sums.chunks_exact(blocks).map(|part| part.iter().sum()).collect()
}

/// `flat` `[n]` in which `values`, both f32, replace what lies from `start` on, in row-major order, or are added to it.
///
/// # Panics
/// If they reach beyond the end, or on another dtype.
pub fn write(flat: Tensor<1>, start: usize, values: Tensor<2>, write: Write) -> Tensor<1> {
    let ([n], [rows, cols]) = (flat.dims(), values.dims());
    assert!(start + rows * cols <= n, "adamw: {rows} x {cols} values from {start} on do not fit {n}");
    let passes = if write == Write::Add { 3 } else { 2 };
    let _span = trace::kernel("adamw, gradient", || Work::f32(0, passes * rows * cols));
    Tensor::from_dispatch(Dispatch::write_flat(flat.into_dispatch(), start, values.into_dispatch(), write))
}

#[cfg(test)]
mod tests;
