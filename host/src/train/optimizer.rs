//! AdamW over the adapters (decoupled weight decay, arXiv 1711.05101), all state in f32, and the norm of the gradient.

use super::engine::Gradients;
use crate::config::{Schedule, TrainConfig};
use crate::model::adapter::{Adapter, LowRank, values};
use burn::tensor::Tensor;
use std::f64::consts::PI;

/// First and second moment of one tensor.
#[derive(Debug, Clone)]
pub struct Moments {
    /// Mean of the gradient.
    pub m: Tensor<2>,
    /// Mean of its square.
    pub v: Tensor<2>,
}

/// Optimiser state, parallel to [`Adapter::modules`]: moments of A and of B.
#[derive(Debug, Clone)]
pub struct AdamW {
    /// Steps taken.
    pub step: u64,
    /// Moments of A and B of each module.
    pub moments: Vec<[Moments; 2]>,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
}

impl AdamW {
    /// Zero moments for every tensor of `adapter`.
    pub fn new(config: &TrainConfig, adapter: &Adapter) -> Self {
        let zero = |t: &Tensor<2>| Moments { m: t.zeros_like(), v: t.zeros_like() };
        let moments = adapter.modules.iter().map(|p| [zero(&p.a), zero(&p.b)]).collect();
        Self { step: 0, moments, betas: config.betas, eps: config.eps, weight_decay: config.weight_decay }
    }

    /// Counts a step whose update is left out, so that a run resumed after it counts the same.
    pub fn skip(&mut self) {
        self.step += 1;
    }

    /// One update of every adapter tensor with gradients times `grad_factor`. A module without a gradient is an error of the
    /// engine; its tensors are left as they are, and the inert-adapter gate names it.
    pub fn update(&mut self, adapter: &mut Adapter, gradients: Gradients, grad_factor: f64, lr: f64) {
        self.step += 1;
        let step = self.step as i32;
        let [beta1, beta2] = self.betas;
        // The same order of operations as PyTorch's single-tensor AdamW, so that traces agree.
        let step_size = lr / (1.0 - beta1.powi(step));
        let correction2_sqrt = (1.0 - beta2.powi(step)).sqrt();
        let (decay, eps) = (1.0 - lr * self.weight_decay, self.eps);
        let update = |param: &mut Tensor<2>, grad: Tensor<2>, state: &mut Moments| {
            let grad = grad.mul_scalar(grad_factor as f32);
            state.m = state.m.clone().mul_scalar(beta1 as f32) + grad.clone().mul_scalar((1.0 - beta1) as f32);
            state.v = state.v.clone().mul_scalar(beta2 as f32) + grad.square().mul_scalar((1.0 - beta2) as f32);
            let denominator = state.v.clone().sqrt().div_scalar(correction2_sqrt as f32).add_scalar(eps as f32);
            *param =
                param.clone().mul_scalar(decay as f32) - (state.m.clone() / denominator).mul_scalar(step_size as f32);
        };
        let modules = adapter.modules.iter_mut().zip(gradients.modules).zip(&mut self.moments);
        for ((pair, grad), [state_a, state_b]) in modules {
            if let Some(LowRank { a, b }) = grad {
                update(&mut pair.a, a, state_a);
                update(&mut pair.b, b, state_b);
            }
        }
    }
}

/// Global L2 norm of the gradients, summed in f64 in module order.
pub fn global_norm(gradients: &Gradients) -> f64 {
    let squares = |t: &Tensor<2>| values(t).iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>();
    gradients.modules.iter().flatten().map(|g| squares(&g.a) + squares(&g.b)).sum::<f64>().sqrt()
}

/// Factor that brings a gradient of `norm` down to `clip_norm`; 1 when it is smaller or clipping is off (0).
pub fn clip_factor(norm: f64, clip_norm: f64) -> f64 {
    // PyTorch's clip_grad_norm_ adds the same 1e-6.
    if clip_norm > 0.0 { (clip_norm / (norm + 1e-6)).min(1.0) } else { 1.0 }
}

/// Learning rate of optimiser step `step` (from 0) out of `total`: linear warm-up, then the configured shape.
pub fn learning_rate(config: &TrainConfig, step: u64, total: u64) -> f64 {
    if step < config.warmup_steps {
        return config.lr * (step + 1) as f64 / config.warmup_steps as f64;
    }
    let decay_steps = total.saturating_sub(config.warmup_steps).max(1) as f64;
    let progress = ((step - config.warmup_steps) as f64 / decay_steps).min(1.0);
    let shape = match config.schedule {
        Schedule::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
        Schedule::Linear => 1.0 - progress,
        Schedule::Constant => return config.lr,
    };
    config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schedule_warms_up_and_decays() {
        let mut config = TrainConfig { lr: 1.0, warmup_steps: 10, min_lr_ratio: 0.1, ..TrainConfig::default() };
        let at = |config: &TrainConfig, step| learning_rate(config, step, 110);
        assert!((at(&config, 0) - 0.1).abs() < 1e-12 && (at(&config, 9) - 1.0).abs() < 1e-12);
        assert!((at(&config, 10) - 1.0).abs() < 1e-12);
        assert!((at(&config, 60) - 0.55).abs() < 1e-12);
        assert!((at(&config, 110) - 0.1).abs() < 1e-12 && (at(&config, 500) - 0.1).abs() < 1e-12);
        config.schedule = Schedule::Linear;
        assert!((at(&config, 35) - (0.1 + 0.9 * 0.75)).abs() < 1e-12);
        config.schedule = Schedule::Constant;
        assert_eq!(at(&config, 109), 1.0);
        config.warmup_steps = 0;
        assert_eq!(at(&config, 0), 1.0);
    }

    #[test]
    fn clipping_only_shrinks() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(50.0, 0.0), 1.0);
        assert!((clip_factor(10.0, 1.0) - 0.1).abs() < 1e-6);
    }
}
