//! Head and loss on f32 slices.

use super::{Head, IGNORED, logits_bytes};
use crate::flex::unwritten;
use crate::matmul::{Matrix, Weights, Write, par_matmul};
use crate::simd::{self, Isa, vectorised};
use rayon::prelude::*;

/// Where the gradient of the hidden states goes.
pub(crate) struct Gradient<'a> {
    /// `[n, h]`, zeros.
    pub(crate) d_hidden: &'a mut [f32],
    pub(crate) scale: f32,
}

/// The loss of each row of `hidden` `[n, h]` for `weight` `[v, h]`; fills the gradient where one is wanted.
pub(crate) fn linear_cross_entropy(
    hidden: &[f32],
    weight: Weights,
    targets: &[i32],
    head: Head,
    mut gradient: Option<Gradient>,
) -> Vec<f32> {
    let mut loss = vec![0f32; targets.len()];
    let kept: Vec<usize> = (0..targets.len()).filter(|&row| targets[row] != IGNORED).collect();
    if kept.is_empty() {
        return loss;
    }
    let h = hidden.len() / targets.len();
    let classes = weight.len() / h;
    let weight = weight.matrix(classes, h);
    let rows = head.chunk_rows.min(kept.len());
    let mut logits = unwritten(logits_bytes(rows, classes) / size_of::<f32>());
    // The chunk's hidden states, later their gradients.
    let mut gathered = unwritten(rows * h);
    for kept in kept.chunks(rows) {
        let (gathered, logits) = (&mut gathered[..kept.len() * h], &mut logits[..kept.len() * classes]);
        for (values, &row) in gathered.chunks_exact_mut(h).zip(kept) {
            values.copy_from_slice(&hidden[row * h..][..h]);
        }
        par_matmul(&[(Matrix::new(gathered, kept.len(), h), weight.t())], logits, Write::Set);

        let scale = gradient.as_ref().map(|gradient| gradient.scale);
        let losses: Vec<f32> = logits
            .par_chunks_exact_mut(classes)
            .zip(kept)
            .map(|(logits, &row)| row_loss(logits, targets[row] as usize, head.softcap, scale))
            .collect();
        for (&row, row_loss) in kept.iter().zip(losses) {
            loss[row] = row_loss;
        }

        if let Some(gradient) = &mut gradient {
            par_matmul(&[(Matrix::new(logits, kept.len(), classes), weight)], gathered, Write::Set);
            for (values, &row) in gathered.chunks_exact(h).zip(kept) {
                gradient.d_hidden[row * h..][..h].copy_from_slice(values);
            }
        }
    }
    loss
}

/// The loss of one row of raw logits. With a scale the logits are replaced by that many times their gradient.
fn row_loss(logits: &mut [f32], target: usize, softcap: Option<f64>, scale: Option<f32>) -> f32 {
    let isa = Isa::detect();
    if let Some(cap) = softcap {
        cap_logits(isa, logits, cap as f32);
    }
    let max = max_of(isa, logits);
    let target_logit = logits[target];
    let sum = match scale {
        None => sum_exp(isa, logits, max),
        Some(factor) => {
            // The slope of the softcap: d z / d raw = 1 - (z / cap)^2.
            let inverse_cap = softcap.map_or(0.0, |cap| 1.0 / cap as f32);
            let sum = sum_exp_with_slope(isa, logits, max, inverse_cap);
            simd::scale(isa, logits, (factor as f64 / sum) as f32);
            logits[target] -= factor * (1.0 - (target_logit * inverse_cap).powi(2));
            sum
        }
    };
    (sum.ln() + max as f64 - target_logit as f64) as f32
}

/// softcap(hidden W^T) for `hidden` `[n, h]`, `weight` `[v, h]`.
pub(crate) fn logits(hidden: &[f32], weight: Weights, h: usize, softcap: Option<f64>) -> Vec<f32> {
    let (n, classes) = (hidden.len() / h, weight.len() / h);
    let mut logits = unwritten(n * classes);
    par_matmul(&[(Matrix::new(hidden, n, h), weight.matrix(classes, h).t())], &mut logits, Write::Set);
    if let Some(cap) = softcap {
        logits.par_chunks_mut(classes).for_each(|row| cap_logits(Isa::detect(), row, cap as f32));
    }
    logits
}

vectorised! {
    /// z = cap * tanh(z / cap).
    fn cap_logits(logits: &mut [f32], cap: f32) {
        let inverse = 1.0 / cap;
        for logit in logits {
            *logit = cap * simd::tanh(*logit * inverse);
        }
    }
}

/// Values whose exponentials are summed in f32 before the sum goes on in f64.
const SUM_BLOCK: usize = 1024;
/// Partial sums, one for each lane of a vector.
const LANES: usize = 16;

#[inline(always)]
fn sum_wide(lanes: &[f32; LANES]) -> f64 {
    lanes.iter().map(|&lane| lane as f64).sum()
}

vectorised! {
    fn max_of(values: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let chunks = values.chunks_exact(LANES);
        for (lane, &value) in lanes.iter_mut().zip(chunks.remainder()) {
            *lane = value;
        }
        for chunk in chunks {
            for (lane, &value) in lanes.iter_mut().zip(chunk) {
                *lane = if value > *lane { value } else { *lane };
            }
        }
        lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

vectorised! {
    /// Sum of e^(value - max).
    fn sum_exp(values: &[f32], max: f32) -> f64 {
        let mut sum = 0f64;
        for block in values.chunks(SUM_BLOCK) {
            let mut lanes = [0f32; LANES];
            for chunk in block.chunks(LANES) {
                for (lane, &value) in lanes.iter_mut().zip(chunk) {
                    *lane += simd::exp(value - max);
                }
            }
            sum += sum_wide(&lanes);
        }
        sum
    }
}

vectorised! {
    /// [`sum_exp`] that leaves e^(value - max) (1 - (value inverse_cap)^2) in place of the values.
    fn sum_exp_with_slope(values: &mut [f32], max: f32, inverse_cap: f32) -> f64 {
        let mut sum = 0f64;
        for block in values.chunks_mut(SUM_BLOCK) {
            let mut lanes = [0f32; LANES];
            for chunk in block.chunks_mut(LANES) {
                for (lane, value) in lanes.iter_mut().zip(chunk) {
                    let e = simd::exp(*value - max);
                    let capped = *value * inverse_cap;
                    *lane += e;
                    *value = e * capped.mul_add(-capped, 1.0);
                }
            }
            sum += sum_wide(&lanes);
        }
        sum
    }
}
