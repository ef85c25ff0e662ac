//! AdamW on slices, shared out over rayon.

use super::Scalars;
use crate::simd::{Isa, vectorised};
use rayon::prelude::*;
use std::ops::Range;

/// Values of a task.
const TASK_VALUES: usize = 16 * 1024;

/// [`adamw`](super::adamw()) in place.
pub(super) fn update(values: &mut [f32], m: &mut [f32], v: &mut [f32], gradient: &[f32], scalars: Scalars) {
    let isa = Isa::detect();
    let state =
        values.par_chunks_mut(TASK_VALUES).zip(m.par_chunks_mut(TASK_VALUES)).zip(v.par_chunks_mut(TASK_VALUES));
    state.zip(gradient.par_chunks(TASK_VALUES)).for_each(|(((values, m), v), gradient)| {
        update_task(isa, values, m, v, gradient, scalars);
    });
}

vectorised! {
    /// Every product, quotient, root and sum is rounded for itself: none is fused.
    fn update_task(values: &mut [f32], m: &mut [f32], v: &mut [f32], gradient: &[f32], scalars: Scalars) {
        let Scalars { grad_factor, betas, rests, eps, decay, step_size, correction } = scalars;
        for (((value, m), v), gradient) in values.iter_mut().zip(m).zip(v).zip(gradient) {
            let g = gradient * grad_factor;
            *m = *m * betas[0] + g * rests[0];
            *v = *v * betas[1] + g * g * rests[1];
            let denominator = v.sqrt() / correction + eps;
            *value = *value * decay - *m / denominator * step_size;
        }
    }
}

/// The sum of squares of each of `parts`, each from first to last.
pub(super) fn squares(flat: &[f32], parts: &[Range<usize>]) -> Vec<f64> {
    let of = |part: &Range<usize>| flat[part.clone()].iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    parts.par_iter().map(of).collect()
}
