//! The definition, in f64.

use super::Step;

/// Updates `values` and the moments `m` and `v` by `gradient`.
pub fn update(values: &mut [f64], m: &mut [f64], v: &mut [f64], gradient: &[f64], step: &Step) {
    let Step { grad_factor, betas: [beta1, beta2], eps, decay, step_size, correction } = *step;
    for (i, gradient) in gradient.iter().enumerate() {
        let g = grad_factor * gradient;
        m[i] = beta1 * m[i] + (1.0 - beta1) * g;
        v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
        values[i] = decay * values[i] - step_size * m[i] / (v[i].sqrt() / correction + eps);
    }
}
