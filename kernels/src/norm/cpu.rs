//! f32 slices, rows shared out over rayon.

use crate::simd::{self, Isa, vectorised};
use rayon::prelude::*;

/// Values per task: below this, handing work to another thread costs more than the work.
const TASK_VALUES: usize = 16 * 1024;

/// What comes after the norm: `y = (residual + norm) * scale`.
#[derive(Clone, Copy)]
pub struct Residual<'a> {
    /// Shaped as the norm.
    pub values: &'a [f32],
    /// Of the sum.
    pub scale: f32,
}

/// Writes `y = x * (mean(x^2) + eps)^(-1/2) * weight`, and what `residual` makes of it; `x` and `y` hold rows of `dim`
/// values.
pub fn forward(x: &[f32], weight: Option<&[f32]>, dim: usize, eps: f64, residual: Option<Residual>, y: &mut [f32]) {
    let isa = Isa::detect();
    let task = rows_per_task(dim) * dim;
    y.par_chunks_mut(task).zip(x.par_chunks(task)).enumerate().for_each(|(index, (y, x))| {
        for (row, (y, x)) in y.chunks_mut(dim).zip(x.chunks(dim)).enumerate() {
            normalise(isa, x, weight, eps, y);
            if let Some(Residual { values, scale }) = residual {
                add(isa, y, &values[index * task + row * dim..][..dim], scale);
            }
        }
    });
}

/// Writes `scale` times the gradient with respect to `x` (see [`reference::backward`](super::reference::backward)).
pub fn backward(x: &[f32], weight: Option<&[f32]>, dy: &[f32], dim: usize, eps: f64, scale: f32, dx: &mut [f32]) {
    let isa = Isa::detect();
    let task = rows_per_task(dim) * dim;
    dx.par_chunks_mut(task).zip(x.par_chunks(task)).zip(dy.par_chunks(task)).for_each(|((dx, x), dy)| {
        for ((dx, x), dy) in dx.chunks_mut(dim).zip(x.chunks(dim)).zip(dy.chunks(dim)) {
            gradient(isa, x, weight, dy, eps, scale, dx);
        }
    });
}

fn rows_per_task(dim: usize) -> usize {
    TASK_VALUES.div_ceil(dim)
}

#[inline(always)]
fn inverse_rms(row: &[f32], eps: f64) -> f32 {
    let mean_square = f64::from(simd::dot(row, row)) / row.len() as f64;
    (mean_square + eps).sqrt().recip() as f32
}

vectorised! {
    /// [`forward`] of one row, without a residual.
    pub(crate) fn normalise(x: &[f32], weight: Option<&[f32]>, eps: f64, y: &mut [f32]) {
        let r = inverse_rms(x, eps);
        match weight {
            Some(w) => y.iter_mut().zip(x).zip(w).for_each(|((y, x), w)| *y = x * r * w),
            None => y.iter_mut().zip(x).for_each(|(y, x)| *y = x * r),
        }
    }
}

vectorised! {
    /// y = (y + residual) * scale.
    fn add(y: &mut [f32], residual: &[f32], scale: f32) {
        y.iter_mut().zip(residual).for_each(|(y, residual)| *y = (*y + residual) * scale);
    }
}

vectorised! {
    /// [`backward`] of one row.
    pub(crate) fn gradient(x: &[f32], weight: Option<&[f32]>, dy: &[f32], eps: f64, scale: f32, dx: &mut [f32]) {
        // `dx` holds the weighted gradient until the row's sums are known.
        match weight {
            Some(w) => dx.iter_mut().zip(dy).zip(w).for_each(|((dx, dy), w)| *dx = dy * w * scale),
            None => dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx = dy * scale),
        }
        let r = inverse_rms(x, eps);
        let along = simd::dot(x, dx) * r * r * r / x.len() as f32;
        dx.iter_mut().zip(x).for_each(|(dx, x)| *dx = r * *dx - along * x);
    }
}
