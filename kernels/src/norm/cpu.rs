//! f32 slices, rows shared out over rayon.

use rayon::prelude::*;

/// Partial sums kept side by side: enough for the compiler to fill vector registers, and a fixed order of summation.
const LANES: usize = 32;

/// Values per task: below this, handing work to another thread costs more than the work.
const TASK_VALUES: usize = 16 * 1024;

/// Writes `y = x * (mean(x^2) + eps)^(-1/2) * weight`; `x` and `y` hold rows of `dim` values.
pub fn forward(x: &[f32], weight: Option<&[f32]>, dim: usize, eps: f64, y: &mut [f32]) {
    let task = rows_per_task(dim) * dim;
    y.par_chunks_mut(task).zip(x.par_chunks(task)).for_each(|(y, x)| {
        for (y, x) in y.chunks_mut(dim).zip(x.chunks(dim)) {
            let r = inverse_rms(x, eps);
            match weight {
                Some(w) => y.iter_mut().zip(x).zip(w).for_each(|((y, x), w)| *y = x * r * w),
                None => y.iter_mut().zip(x).for_each(|(y, x)| *y = x * r),
            }
        }
    });
}

/// Writes the gradient with respect to `x` (see [`reference::backward`](super::reference::backward)).
pub fn backward(x: &[f32], weight: Option<&[f32]>, dy: &[f32], dim: usize, eps: f64, dx: &mut [f32]) {
    let task = rows_per_task(dim) * dim;
    dx.par_chunks_mut(task).zip(x.par_chunks(task)).zip(dy.par_chunks(task)).for_each(|((dx, x), dy)| {
        for ((dx, x), dy) in dx.chunks_mut(dim).zip(x.chunks(dim)).zip(dy.chunks(dim)) {
            // `dx` holds the weighted gradient until the row's sums are known.
            match weight {
                Some(w) => dx.iter_mut().zip(dy).zip(w).for_each(|((dx, dy), w)| *dx = dy * w),
                None => dx.copy_from_slice(dy),
            }
            let r = inverse_rms(x, eps);
            let along = dot(x, dx) * r * r * r / dim as f32;
            dx.iter_mut().zip(x).for_each(|(dx, x)| *dx = r * *dx - along * x);
        }
    });
}

fn rows_per_task(dim: usize) -> usize {
    TASK_VALUES.div_ceil(dim)
}

fn inverse_rms(row: &[f32], eps: f64) -> f32 {
    let mean_square = f64::from(dot(row, row)) / row.len() as f64;
    (mean_square + eps).sqrt().recip() as f32
}

/// The dot product, summed in [`LANES`] interleaved parts.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (a_lanes, b_lanes) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a_lanes.remainder().iter().zip(b_lanes.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_lanes.zip(b_lanes) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + tail
}
