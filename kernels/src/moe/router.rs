//! The router on cubecl.

use crate::cube::{cover, empty, packed, units};
use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// The largest logit of a row and the sum of e^(logit - largest).
#[cube]
fn softmax_of(logits: &[f32], start: usize, experts: usize) -> (f32, f32) {
    let mut largest = logits[start];
    for e in 1..experts {
        largest = f32::max(largest, logits[start + e]);
    }
    let mut total = 0.0f32;
    for e in 0..experts {
        total += f32::exp(logits[start + e] - largest);
    }
    (largest, total)
}

/// One unit a token: there are `experts * top_k` comparisons, less than the projection before them by far.
#[cube(launch)]
fn route(
    logits: &[f32],
    scale: &[f32],
    weights: &mut [f32],
    chosen: &mut [i32],
    tokens: usize,
    experts: usize,
    top_k: usize,
) {
    let token = ABSOLUTE_POS;
    if token < tokens {
        let start = token * experts;
        let (largest, total) = softmax_of(logits, start, experts);
        let mut sum = 0.0f32;
        let mut last = f32::new(3.4e38);
        let mut last_expert = 0usize;
        for j in 0..top_k {
            // The next in the order of falling logits; of equal ones the lower index is first.
            let mut best = f32::new(-3.4e38);
            let mut best_expert = experts;
            for e in 0..experts {
                let z = logits[start + e];
                let after_last = j == 0 || z < last || (z == last && e > last_expert);
                if after_last && (z > best || best_expert == experts) {
                    best = z;
                    best_expert = e;
                }
            }
            // Logits that are no numbers are after nothing: the token then names expert 0, and its weights are no numbers.
            if best_expert == experts {
                best_expert = 0usize;
                best = logits[start];
            }
            let p = f32::exp(best - largest) / total;
            sum += p;
            chosen[token * top_k + j] = best_expert as i32;
            weights[token * top_k + j] = p;
            last = best;
            last_expert = best_expert;
        }
        for j in 0..top_k {
            let place = token * top_k + j;
            weights[place] = weights[place] / sum * scale[chosen[place] as usize];
        }
    }
}

/// The expert that a token chose, and its probability among all.
#[cube]
fn choice(logits: &[f32], chosen: &[i32], start: usize, place: usize, largest: f32, total: f32) -> (usize, f32) {
    let expert = chosen[place] as usize;
    (expert, f32::exp(logits[start + expert] - largest) / total)
}

#[cube(launch)]
fn route_backward(
    logits: &[f32],
    scale: &[f32],
    chosen: &[i32],
    d_weights: &[f32],
    d_logits: &mut [f32],
    tokens: usize,
    experts: usize,
    top_k: usize,
) {
    let token = ABSOLUTE_POS;
    if token < tokens {
        let start = token * experts;
        let (largest, total) = softmax_of(logits, start, experts);
        let mut sum = 0.0f32;
        let mut through_sum = 0.0f32;
        for j in 0..top_k {
            let (e, p) = choice(logits, chosen, start, token * top_k + j, largest, total);
            sum += p;
            through_sum += d_weights[token * top_k + j] * scale[e] * p;
        }
        through_sum /= sum * sum;
        let mut mean = 0.0f32;
        for j in 0..top_k {
            let (e, p) = choice(logits, chosen, start, token * top_k + j, largest, total);
            mean += p * (d_weights[token * top_k + j] * scale[e] / sum - through_sum);
        }
        for e in 0..experts {
            d_logits[start + e] = (0.0f32 - mean) * f32::exp(logits[start + e] - largest) / total;
        }
        for j in 0..top_k {
            let (e, p) = choice(logits, chosen, start, token * top_k + j, largest, total);
            d_logits[start + e] += p * (d_weights[token * top_k + j] * scale[e] / sum - through_sum);
        }
    }
}

/// Weights and experts, `[n, k]` each.
pub(super) fn choose(logits: CubeTensor, per_expert_scale: CubeTensor, top_k: usize) -> (CubeTensor, CubeTensor) {
    let [logits, scale] = [logits, per_expert_scale].map(|tensor| packed("route", tensor));
    let [n, experts] = logits.shape().dims();
    let (weights, chosen) = (empty(&logits, [n, top_k], DType::F32), empty(&logits, [n, top_k], DType::I32));
    route::launch(
        &logits.client.clone(),
        cover(n),
        units(),
        logits.into_buffer_arg(),
        scale.into_buffer_arg(),
        weights.clone().into_buffer_arg(),
        chosen.clone().into_buffer_arg(),
        n,
        experts,
        top_k,
    );
    (weights, chosen)
}

/// Gradient of the weights to the logits.
pub(super) fn choose_backward(
    logits: CubeTensor,
    per_expert_scale: CubeTensor,
    experts: CubeTensor,
    d_weights: CubeTensor,
) -> CubeTensor {
    let [logits, scale, d_weights] = [logits, per_expert_scale, d_weights].map(|tensor| packed("route", tensor));
    let chosen = into_contiguous(experts);
    let ([n, experts], [_, top_k]) = (logits.shape().dims(), chosen.shape().dims());
    let d_logits = empty(&logits, [n, experts], DType::F32);
    route_backward::launch(
        &logits.client.clone(),
        cover(n),
        units(),
        logits.into_buffer_arg(),
        scale.into_buffer_arg(),
        chosen.into_buffer_arg(),
        d_weights.into_buffer_arg(),
        d_logits.clone().into_buffer_arg(),
        n,
        experts,
        top_k,
    );
    d_logits
}
